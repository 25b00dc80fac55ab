"""The machine's own slowdown, seen by the work that did not change.

A change of a program is somewhere; a busy or throttled machine is everywhere. So operations that ran before and after
with the same name, shapes and types are controls: the ratio of their own times (of kernels: durations), at the lower
quartile over the distinct operations, is taken to be the machine's. The lower quartile, because a change reaches some
unchanged operations too (caches, memory layout), and it must not be excused by them.

A machine that others use does not only get slower: it interrupts. Then a call takes now its own time and now many times
that, and the mean call longer than the call at the lower quartile (``disturbance``).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from graph_predictor.simulation.host_time import exclusive_time
from tracer.graph import ExecutionGraph, KernelKind

LEAST_SHARE = 0.004
"""Controls have at least this share of the time: shorter ones measure the clock."""
FEWEST = 5
"""Fewest distinct controls with which something is said of the machine."""
BUSY = 0.8
"""A device that works this share of the step decides it, and kernels are the controls; else host operations are."""

CALM = 1.4
"""On a quiet machine operations take up to this much more in the mean than at their lower quartile: caches, the
allocator. Of 108 recordings on two shared cores those at rest had 1.13 to 1.4, those disturbed 1.5 to 12."""

Times = dict[tuple[str, ...], np.ndarray]


def machine_slowdown(old: Iterable[ExecutionGraph], new: Iterable[ExecutionGraph], *, device_decides: bool) -> float:
    """Log of how much longer unchanged work takes in ``new``; 0 where too little is unchanged to tell.

    Args:
        old, new: every rank of every run before and after.
        device_decides: whether kernels are the controls, not the host's operations.
    """
    before, after = (_joined(_kernels(graph) if device_decides else _operations(graph) for graph in graphs)
                     for graphs in (old, new))
    total = sum(float(times.sum()) for times in before.values()) or 1.0
    logs = [float(np.log(np.quantile(after[key], 0.25) / np.quantile(times, 0.25)))
            for key, times in before.items()
            if key in after and times.sum() >= LEAST_SHARE * total]
    return float(np.quantile(logs, 0.25)) if len(logs) >= FEWEST else 0.0


def disturbance(graphs: Iterable[ExecutionGraph], *, device_decides: bool) -> float:
    """Log of how much longer the same work took in the mean than at its lower quartile, beyond ``CALM``; at least 0."""
    times = _joined(_kernels(graph) if device_decides else _operations(graph) for graph in graphs)
    least = sum(float(np.quantile(each, 0.25)) * len(each) for each in times.values())
    total = sum(float(each.sum()) for each in times.values())
    return max(float(np.log(total / least / CALM)), 0.0) if least > 0 else 0.0


def _joined(ranks: Iterable[Times]) -> Times:
    found: dict[tuple[str, ...], list[np.ndarray]] = {}
    for rank in ranks:
        for key, times in rank.items():
            found.setdefault(key, []).append(times)
    return {key: np.concatenate(parts) for key, parts in found.items()}


def _grouped(graph: ExecutionGraph, columns: list[np.ndarray], ns: np.ndarray, text: list[bool]) -> Times:
    """Times by the values of the columns, which are string codes where ``text`` says so."""
    if not len(ns):
        return {}
    keys, group = np.unique(np.stack([np.asarray(column, np.int64) for column in columns]), axis=1, return_inverse=True)
    group = group.reshape(-1)
    order = np.argsort(group, kind="stable")
    parts = np.split(ns[order].astype(np.float64), np.cumsum(np.bincount(group))[:-1])
    named = [tuple(graph.string(value) if is_text else str(value) for value, is_text in zip(key, text, strict=True))
             for key in keys.T.tolist()]
    return dict(zip(named, parts, strict=True))


def _operations(graph: ExecutionGraph) -> Times:
    """Own time of each call of each operation in a step, ns."""
    own = exclusive_time(graph)
    ops = graph.ops
    ns = np.bincount(own.op, weights=own.end_ns - own.start_ns, minlength=len(ops)) if len(own.op) else np.zeros(
        len(ops))
    rows = np.flatnonzero((ns > 0) & (ops.step >= 0))
    return _grouped(graph, [ops.name[rows], ops.shapes[rows], ops.dtypes[rows]], ns[rows], [True, True, True])


def _kernels(graph: ExecutionGraph) -> Times:
    """Duration of each run of each kernel in a step, by name and grid, ns."""
    kernels = graph.kernels
    rows = np.flatnonzero((kernels.kind == KernelKind.COMPUTE) & (kernels.step >= 0) & (kernels.duration_ns > 0))
    return _grouped(graph, [kernels.name[rows], kernels.grid_x[rows], kernels.grid_y[rows], kernels.grid_z[rows]],
                    kernels.duration_ns[rows], [True, False, False, False])
