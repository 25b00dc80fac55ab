"""Peak memory of an edited step, where a trace by shapes knows it, and whether it fits the device.

    peak = most over the moments of: what stays (parameters, gradients, states, …) + activations × edits' factors
                                     + temporaries × the sizes' factor + the optimizer's temporaries, unless it is fused

A trace keeps the moments that may become the peak (``tracer.shape_only.memory``): a larger batch moves it from the
optimizer's step into backward, a smaller one back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from graph_predictor.prediction.replacement import Bools
from graph_predictor.prediction.scenario import Scenario
from kernel_models.dtypes import itemsize, short_dtype
from tracer.arrays import Float64
from tracer.decode import list_of
from tracer.graph import ExecutionGraph

PEAK, ACTIVATIONS = "peak", "activations"
SIZES = "sizes"
"""The edit whose factor temporaries share; recomputation's is on activations alone."""
OPTIMIZER = "1 optimizer"
"""The rewrite that leaves no foreach operation."""


def peak_memory(scenario: Scenario) -> int | None:
    """Bytes of the rank that needs most, with the edits' factors; ``None`` where nobody knows."""
    factors = scenario.activation_factors
    sizes, fused = factors.get(SIZES, 1.0), OPTIMIZER in scenario.rewrites
    weights = np.array([1.0, math.prod(factors.values()), sizes, 0.0 if fused else 1.0])
    known = [graph for graph in scenario.built.graphs if PEAK in graph.meta.memory]
    if not known:
        return None
    if (weights == 1.0).all():
        return max(graph.meta.memory[PEAK] for graph in known)
    return round(max(float((_moments(graph) @ weights).max()) for graph in known))


def with_sizes(scenario: Scenario, factor: float) -> Scenario:
    """Activations and temporaries that grow with the sizes."""
    return replace(scenario, activation_factors={**scenario.activation_factors, SIZES: factor})


def _moments(graph: ExecutionGraph) -> Float64:
    """Bytes that stay, of activations, of temporaries and of the optimizer's temporaries, [moments, 4]."""
    if graph.meta.memory_moments:
        return np.array(graph.meta.memory_moments, np.float64)
    # Traced by an earlier version: what the peak consists of, and an estimate of the optimizer's step, where gradients
    # are all there, and foreach operations make one more value for every parameter.
    memory = graph.meta.memory
    activations, parameters = memory.get(ACTIVATIONS, 0), memory.get("parameters", 0)
    foreach = any(text.startswith("aten::_foreach_") for text in graph.strings)
    others = sum(memory.get(name, 0) for name in ("buffers", "optimizer_state", "other"))
    return np.array([[memory[PEAK] - activations, activations, 0, 0],
                     [2 * parameters + others, 0, 0, parameters * foreach]], np.float64)


def most_activations(graph: ExecutionGraph) -> int:
    """The most bytes of activations that are alive at once, as far as the trace says; at the peak there may be none."""
    return int(_moments(graph)[:, 1].max()) if PEAK in graph.meta.memory else 0


def lacking_memory(scenario: Scenario) -> str | None:
    """Why a scenario does not fit its device's memory, as a sentence; ``None`` if it does, or nobody knows."""
    need, spec = peak_memory(scenario), scenario.devices.scaled()
    if need is None or spec is None or spec.memory_gb <= 0 or need <= spec.memory_gb * 1e9:
        return None
    return (f"The step needs {need / 1e9:.1f} GB and {spec.name} has {spec.memory_gb:g} GB: it does not fit; choose a "
            "larger device, a smaller batch, or recomputation (--recompute on).")


def kept_when_recomputed(graph: ExecutionGraph, chosen: Bools, blocks: int) -> float:
    """Share of the activations that stays when blocks are recomputed: what lies outside them is not told apart, so that
    it is taken to be in proportion to operations; of the blocks, one's activations and the input of each."""
    activations = most_activations(graph)
    if not activations or not blocks:
        return 1.0
    rows = np.flatnonzero(chosen)
    modules = graph.ops.module[rows]
    # The largest tensor that the first operation of a block reads is its input.
    first = int(rows[np.argmin(graph.ops.start_ns[rows])]) if len(rows) and (modules >= 0).any() else -1
    inputs = min(blocks * max(_tensor_bytes(graph, first), default=0), activations) if first >= 0 else 0
    return min(1.0, 1.0 / blocks + inputs / activations)


def _tensor_bytes(graph: ExecutionGraph, op: int) -> Iterator[int]:
    shapes, dtypes = (list_of(graph.string(int(column[op]))) for column in (graph.ops.shapes, graph.ops.dtypes))
    for shape, dtype in zip(shapes, dtypes, strict=False):
        if isinstance(shape, list) and shape and all(isinstance(size, int) and size >= 0 for size in shape):
            yield math.prod(shape) * itemsize(short_dtype(str(dtype)) or "fp32")
