"""Joins an execution trace to a graph read from the same program's Kineto trace.

Two ways, never by ``External id`` (its meaning changed over the years):

* the profiler's ``Record function id`` equals the execution trace's ``rf_id``, up to a constant offset;
* where it is missing or disagrees, the op names of each thread are aligned in program order.

The two files may cover different windows. *Candidates* are the rows of ``ops`` inside the window both cover, except
annotations that the execution trace has nowhere (``ProfilerStep#N`` above all, whose numbers differ anyway):

* by record id: rows whose id, offset included, lies in the range of the execution trace's ids;
* by sequence: per thread, rows from the first to the last joined one, and as many rows before (after) them as the
  execution trace also has nodes before (after) its first (last) joined node; of threads that have no counterpart,
  the rows that start between the first and the last joined one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import numpy as np

from tracer.execution_trace import ExecutionTrace, read_execution_trace
from tracer.fill import fill_from_trace
from tracer.graph import NONE, ExecutionGraph
from tracer.matching import Match, Names, by_record_id, by_sequence, joinable_names, present_values
from tracer.trees import nearest

# The target: a join that reaches it needs no second method.
_GOOD = 0.999
# A thread whose operations mostly have another parent in the execution trace was aligned to the wrong one.
_PARENT_AGREEMENT = 0.5


@dataclass(slots=True)
class JoinReport:
    """The result of a join; ``joined`` and ``candidates`` count rows of ``ops`` (see the module's text)."""

    schema: str
    method: str = "none"
    """"record_id", "sequence" or "none"."""
    offset: int = 0
    """``rf_id`` minus ``Record function id``, for the first method."""
    joined: int = 0
    candidates: int = 0
    parents_agree: float = 1.0
    """Share of joined operations whose parents are joined to each other too: a check the join does not use."""
    filled: dict[str, int] = field(default_factory=dict)
    """Values taken over from the execution trace, by column."""
    notes: list[str] = field(default_factory=list)

    @property
    def share(self) -> float:
        """Joined share of the candidates, 0 to 1; 0 where there is none."""
        return self.joined / self.candidates if self.candidates else 0.0


def join_execution_trace(graph: ExecutionGraph, source: str | os.PathLike[str] | ExecutionTrace) -> JoinReport:
    """Join an execution trace to a graph, in place, and take over what the profiler did not record.

    Fills ``ops.et_node`` with node ids; shapes, dtypes, strides and scalars of joined operations that have none;
    process groups and details of collectives; and ``meta.et_schema``, ``et_joined`` and ``et_candidates``.

    Args:
        graph: the graph of one rank.
        source: the rank's execution trace: a path, fsspec URL, or one already read.

    Raises:
        TraceError: the execution trace cannot be read.
    """
    trace = source if isinstance(source, ExecutionTrace) else read_execution_trace(source)
    names = joinable_names(graph, trace)
    match = by_record_id(graph, trace, names)
    if match is None or match.share() < _GOOD:
        other = by_sequence(graph, trace, names)
        if match is None or other.share() > match.share():
            match = other
    agreement = _drop_wrong_threads(graph, trace, names, match)
    joined = match.node >= 0
    et_node = graph.ops.writable("et_node")
    et_node[:] = NONE
    et_node[joined] = trace.id[match.node[joined]]
    report = JoinReport(
        schema=trace.schema,
        method=match.method if joined.any() else "none",
        offset=match.offset,
        joined=int(np.count_nonzero(joined)),
        candidates=int(np.count_nonzero(match.candidate)),
        parents_agree=agreement,
        notes=list(trace.notes),
    )
    if not joined.any():
        report.notes.append("no operation of the execution trace was found in the profiler's: they show two programs.")
    report.filled = fill_from_trace(graph, trace, match.node)
    meta = graph.meta
    meta.et_schema, meta.et_joined, meta.et_candidates = trace.schema, report.joined, report.candidates
    return report


def _drop_wrong_threads(graph: ExecutionGraph, trace: ExecutionTrace, names: Names, match: Match) -> float:
    """Undo the join of threads whose parents mostly disagree; the share of agreeing parents of the rest."""
    ops = graph.ops
    # Rows that are never joined (steps, synthetic nodes) are passed over.
    parent = nearest(ops.parent, names.op_usable, ops.parent.astype(np.int64))
    # searchsorted needs the ids sorted, which they are.
    at = np.minimum(np.searchsorted(trace.id, trace.parent), len(trace.id) - 1)
    node_parent = np.where((trace.id[at] == trace.parent) & (at != np.arange(len(at))), at, NONE)
    node_parent = nearest(node_parent, names.node_usable, node_parent)
    rows = np.flatnonzero(match.node >= 0)
    if not len(rows):
        return 1.0
    expected = node_parent[match.node[rows]]
    actual = np.where(parent[rows] >= 0, match.node[parent[rows]], NONE)
    # A parent outside the other trace's window cannot be compared.
    comparable = (parent[rows] < 0) | (actual >= 0)
    agrees = (expected == actual) & comparable
    keep = np.ones(len(rows), dtype=bool)
    for thread in present_values(ops.thread[rows]):
        mine = ops.thread[rows] == thread
        compared = int(np.count_nonzero(comparable & mine))
        # Record ids with equal names are no guess, even where a range ends on another thread (gloo's) than it began.
        if match.method == "sequence" and np.count_nonzero(agrees & mine) < _PARENT_AGREEMENT * compared:
            match.node[rows[mine]] = NONE
            keep &= ~mine
    compared = int(np.count_nonzero(comparable & keep))
    return float(np.count_nonzero(agrees & keep)) / compared if compared else 1.0
