"""Peak memory of an edited step, where a trace by shapes knows it, and whether it fits the device.

    peak = parameters + buffers + gradients + optimizer states + other + temporaries + activations × edits' factors

and no less than what the optimizer's step needs, where there are no activations.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec
import numpy as np

from graph_predictor.prediction.pricing import target_device
from graph_predictor.prediction.scenario import Scenario
from graph_predictor.prediction.units import Bools
from kernel_models.dtypes import itemsize, short_dtype
from tracer.graph import ExecutionGraph

PEAK, ACTIVATIONS = "peak", "activations"
OPTIMIZER = "1 optimizer"
"""The rewrite that leaves no foreach operation."""


def peak_memory(scenario: Scenario) -> int | None:
    """Bytes of the rank that needs most, with the edits' factors on activations; ``None`` where nobody knows."""
    factor = math.prod(scenario.activation_factors.values())
    needs = []
    for graph in scenario.built.graphs:
        memory = graph.meta.memory
        if PEAK in memory:
            need = memory[PEAK] + (factor - 1.0) * memory.get(ACTIVATIONS, 0)
            least = _in_optimizer(graph, fused=OPTIMIZER in scenario.rewrites)
            needs.append(need if factor == 1.0 else max(need, least))
    return round(max(needs)) if needs else None


def _in_optimizer(graph: ExecutionGraph, *, fused: bool) -> int:
    """Bytes alive in the optimizer's step, which needs no activation: another moment may be the peak without these.

    Gradients are all there then; an optimizer of foreach operations makes one more value for every parameter.
    """
    memory = graph.meta.memory
    parameters = memory.get("parameters", 0)
    foreach = not fused and any(text.startswith("aten::_foreach_") for text in graph.strings)
    return parameters * (2 + foreach) + sum(memory.get(name, 0) for name in ("buffers", "optimizer_state", "other"))


def lacking_memory(scenario: Scenario) -> str | None:
    """Why a scenario does not fit its device's memory, as a sentence; ``None`` if it does, or nobody knows."""
    need, spec = peak_memory(scenario), target_device(scenario)
    if need is None or spec is None or spec.memory_gb <= 0 or need <= spec.memory_gb * 1e9:
        return None
    return (f"The step needs {need / 1e9:.1f} GB and {spec.name} has {spec.memory_gb:g} GB: it does not fit; choose a "
            "larger device, a smaller batch, or recomputation (--recompute on).")


def kept_when_recomputed(graph: ExecutionGraph, chosen: Bools, blocks: int) -> float:
    """Share of the activations that stays when blocks are recomputed: what lies outside them is not told apart, so that
    it is taken to be in proportion to operations; of the blocks, one's activations and the input of each."""
    activations = graph.meta.memory.get(ACTIVATIONS, 0)
    if not activations or not blocks:
        return 1.0
    rows = np.flatnonzero(chosen)
    modules = graph.ops.module[rows]
    # The largest tensor that the first operation of a block reads is its input.
    first = int(rows[np.argmin(graph.ops.start_ns[rows])]) if len(rows) and (modules >= 0).any() else -1
    inputs = blocks * max(_tensor_bytes(graph, first), default=0) if first >= 0 else 0
    return min(1.0, 1.0 / blocks + inputs / activations)


def _tensor_bytes(graph: ExecutionGraph, op: int) -> Iterator[int]:
    try:
        shapes = msgspec.json.decode(graph.string(int(graph.ops.shapes[op])) or "[]")
        dtypes = msgspec.json.decode(graph.string(int(graph.ops.dtypes[op])) or "[]")
    except msgspec.DecodeError:
        return
    for shape, dtype in zip(shapes, dtypes, strict=False):
        if isinstance(shape, list) and shape and all(isinstance(size, int) for size in shape):
            yield math.prod(shape) * itemsize(short_dtype(str(dtype)) or "fp32")
