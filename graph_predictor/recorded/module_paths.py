"""The module of backward operations: that of the forward operation whose gradient they compute.

A trace names modules where Python called them, and backward operations run outside of them. Autograd's sequence number
connects a backward node to the forward operation that made it (the last one with that number). All operations within a
node belong to it. ``AccumulateGrad`` adds up a gradient right after the node that computed it, and has no number.
Operations that a checkpoint repeats are called without the modules around them, and get their path in forward."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tracer.arrays import Int64
from tracer.graph import NONE, ExecutionGraph, OpKind, OpTable, Phase


def is_collective(name: str) -> bool:
    """Return whether an operation belongs to torch.distributed."""
    return name.startswith(("c10d::", "_c10d_functional::", "record_param_comms", "gloo:", "nccl:"))


def plain_name(name: str) -> str:
    """Return an operation's name without autograd's prefix."""
    return name.removeprefix("autograd::engine::evaluate_function: ")


ACCUMULATE = "torch::autograd::AccumulateGrad"
_ACCUMULATE = "AccumulateGrad"


def with_backward_modules(graph: ExecutionGraph) -> ExecutionGraph:
    """Return the graph with modules of backward operations too; the graph itself if the trace names no modules."""
    ops = graph.ops
    if not (ops.module >= 0).any():
        return graph
    backward = (ops.phase == Phase.BACKWARD) & (ops.kind == OpKind.OPERATION)
    module = _whole_paths(graph, backward)
    lacking = backward & (module < 0)
    source = _forward_of(ops, np.flatnonzero(lacking & (ops.sequence >= 0)), np.flatnonzero(
        (ops.sequence >= 0) & (ops.kind == OpKind.OPERATION) & (~backward | (module >= 0))))
    found = source >= 0
    module[found] = module[source[found]]
    # Operations within a node without a module (a loss outside of all modules) are known to have none.
    known = found | (backward & ~lacking)
    module, known = _inherited(ops, module, known, backward)
    summing = _accumulating(graph, np.flatnonzero(~known & lacking))
    before = _known_before(ops, summing, known)
    module[summing], known[summing] = np.where(before >= 0, module[before], NONE), True
    module, _ = _inherited(ops, module, known, backward)
    return replace(graph, ops=replace(ops, module=module.astype(np.int32)))


def _forward_of(ops: OpTable, rows: Int64, sources: Int64) -> Int64:
    """Return for every operation the forward row with its sequence number (-1: none, or not among ``rows``)."""
    found = np.full(len(ops), NONE, np.int64)
    if not len(rows) or not len(sources):
        return found
    # Each thread has its own sequence numbers, so the profiler's number of the forward thread chooses between them.
    order = sources[np.lexsort((ops.start_ns[sources], ops.sequence[sources], ops.thread[sources]))]
    span = int(ops.sequence[order].max()) + 2
    keys = ops.thread[order].astype(np.int64) * span + ops.sequence[order]
    threads = np.unique(ops.thread[sources])

    def last(rows: Int64, thread: Int64) -> Int64:
        wanted = thread * span + np.minimum(ops.sequence[rows], span - 1)
        at = np.searchsorted(keys, wanted, side="right") - 1
        return np.where((at >= 0) & (keys[np.maximum(at, 0)] == wanted), order[np.maximum(at, 0)], NONE)

    for number in np.unique(ops.forward_thread[rows]).tolist():
        mine = rows[ops.forward_thread[rows] == number]
        met = np.stack([last(mine, np.full(len(mine), thread, np.int64)) for thread in threads])
        before = (met >= 0) & (ops.start_ns[met] <= ops.start_ns[mine])
        best = int(before.sum(axis=1).argmax())
        found[mine] = np.where(before[best], met[best], NONE)
    return found


def _known_before(ops: OpTable, rows: Int64, known: np.ndarray) -> Int64:
    """Return, for each of ``rows``, the last row before it on its thread that is ``known`` (-1: none)."""
    order = np.lexsort((np.arange(len(ops)), ops.start_ns, ops.thread))
    at = np.maximum.accumulate(np.where(known[order], np.arange(len(order)), -1))
    place = np.empty(len(ops), np.int64)
    place[order] = np.arange(len(order))
    found = np.where(at[place[rows]] >= 0, order[at[place[rows]]], NONE)
    return np.where((found >= 0) & (ops.thread[found] == ops.thread[rows]), found, NONE)


def _inherited(ops: OpTable, module: Int64, known: np.ndarray, backward: np.ndarray) -> tuple[Int64, np.ndarray]:
    """Return ``module`` and ``known``, completed from each operation's nearest backward ancestor with known module."""
    above = np.where(backward & (ops.parent >= 0) & backward[ops.parent], ops.parent, NONE).astype(np.int64)
    module, known = module.copy(), known.copy()
    while True:
        open_rows = np.flatnonzero(~known & (above >= 0))
        if not len(open_rows):
            return module, known
        there = known[above[open_rows]]
        taken = open_rows[there]
        module[taken], known[taken] = module[above[taken]], True
        onward = open_rows[~there]
        above[onward] = above[above[onward]]


def _accumulating(graph: ExecutionGraph, rows: Int64) -> Int64:
    """Return the outermost operations among ``rows`` that add up gradients."""
    names = np.array([text.endswith(_ACCUMULATE) for text in graph.strings], np.bool_)
    found = rows[names[graph.ops.name[rows]]] if len(rows) else rows
    above = graph.ops.parent[found]
    return found[(above < 0) | ~names[graph.ops.name[np.maximum(above, 0)]]]


def _whole_paths(graph: ExecutionGraph, backward: np.ndarray) -> Int64:
    """Return the modules; operations repeated in backward get the whole path they had in forward."""
    module = graph.ops.module.astype(np.int64)
    named = np.unique(module[~backward & (module >= 0)]).tolist()
    whole: dict[str, int] = {}
    for code in named:
        parts = graph.string(code).split("/")
        for first in range(1, len(parts)):
            tail = "/".join(parts[first:])
            whole[tail] = NONE if tail in whole else code
    for code in set(np.unique(module[backward & (module >= 0)]).tolist()) - set(named):
        before = whole.get(graph.string(code), NONE)
        if before >= 0:
            module[backward & (module == code)] = before
    return module
