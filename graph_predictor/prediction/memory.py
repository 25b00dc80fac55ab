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

from graph_predictor.prediction.scenario import Scenario
from kernel_models.tensors import itemsize, short_dtype
from tracer.arrays import Bool
from tracer.device_memory import PEAK, MemoryAccount, memory_moments, scaled_account
from tracer.graph import ExecutionGraph
from tracer.input_file import list_of

SIZES = "sizes"
"""The edit whose factor temporaries share; recomputation's is on activations alone."""
OPTIMIZER = "1 optimizer"
"""The rewrite that leaves no foreach operation."""


def memory_account(scenario: Scenario) -> MemoryAccount | None:
    """Memory of the rank that needs most, with the edits' factors; ``None`` where nobody knows."""
    factors = scenario.activation_factors
    sizes, fused = factors.get(SIZES, 1.0), OPTIMIZER in scenario.rewrites
    weights = np.array([1.0, math.prod(factors.values()), sizes, 0.0 if fused else 1.0])
    known = [graph for graph in scenario.built.graphs if PEAK in graph.meta.memory]
    accounts = (scaled_account(graph, weights) for graph in known)
    return max(accounts, key=lambda account: account.total, default=None)


def peak_memory(scenario: Scenario) -> int | None:
    """Bytes of the rank that needs most, with the edits' factors; ``None`` where nobody knows."""
    account = memory_account(scenario)
    return None if account is None else round(account.total)


def with_sizes(scenario: Scenario, factor: float) -> Scenario:
    """Activations and temporaries that grow with the sizes."""
    return replace(scenario, activation_factors={**scenario.activation_factors, SIZES: factor})


def most_activations(graph: ExecutionGraph) -> int:
    """The most bytes of activations that are alive at once, as far as the trace says; at the peak there may be none."""
    return int(memory_moments(graph)[:, 1].max()) if PEAK in graph.meta.memory else 0


def lacking_memory(scenario: Scenario) -> str | None:
    """Return why a scenario does not fit its device's memory, as a sentence; ``None`` if it does, or nobody knows."""
    account = memory_account(scenario)
    spec = None if account is None else scenario.scaled_device()
    if account is None or spec is None or (lacking := account.lacking(spec.memory_gb * 1e9, spec.name)) is None:
        return None
    return f"{lacking} The step takes {account}."


def kept_when_recomputed(graph: ExecutionGraph, chosen: Bool, blocks: int) -> float:
    """Share of the activations that stays when blocks are recomputed: what lies outside them is not known, so that
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
