"""The two ways to match the rows of ``ops`` to the nodes of an execution trace; see ``tracer.join``."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tracer.alignment import align_windows
from tracer.arrays import Bool, Int32, Int64
from tracer.execution_trace import ExecutionTrace
from tracer.graph import NONE, ExecutionGraph, OpKind

STEP_PREFIX = "ProfilerStep#"

# Below this share of agreeing names an offset between the ids is chance.
_OFFSET_AGREEMENT = 0.98
_PAIRS_FOR_OFFSET = 1_000_000
_THREADS_TRIED = 3
# How far from its place an operation may be that equal (microsecond) timestamps put out of order.
_SWAP_REACH = 8


@dataclass(slots=True)
class Match:
    """A way's result. ``candidate`` marks the rows of ``ops`` that should have a node."""

    method: str
    node: Int64
    """Row of the execution trace for each row of ops, -1 for none."""
    candidate: Bool
    offset: int = 0

    def share(self) -> float:
        """Joined share of the candidates, 0 to 1."""
        candidates = int(np.count_nonzero(self.candidate))
        return int(np.count_nonzero(self.node >= 0)) / candidates if candidates else 0.0


@dataclass(slots=True)
class Names:
    """Op names of both sides as codes of one numbering, and which rows can be joined at all."""

    ops: Int64
    nodes: Int64
    op_usable: Bool
    node_usable: Bool


def joinable_names(graph: ExecutionGraph, trace: ExecutionTrace) -> Names:
    """Names of both sides in one numbering, without steps and annotations the execution trace has nowhere."""
    codes: dict[str, int] = {}

    def recode(column: Int32, strings: list[str]) -> Int64:
        used = np.unique(column)
        table = np.full(int(used.max(initial=0)) + 2, NONE, dtype=np.int64)  # the last entry serves code -1
        for code in used[used >= 0].tolist():
            table[code] = codes.setdefault(strings[code], len(codes))
        return table[column]

    ops, nodes = recode(graph.ops.name, graph.strings), recode(trace.name, trace.strings)
    steps = np.array([code for text, code in codes.items() if text.startswith(STEP_PREFIX)], dtype=np.int64)
    recorded = np.isin(ops, nodes) | (graph.ops.kind != OpKind.ANNOTATION)
    return Names(ops, nodes, ~np.isin(ops, steps) & recorded, ~np.isin(nodes, steps) & trace.is_operation())


def by_record_id(graph: ExecutionGraph, trace: ExecutionTrace, names: Names) -> Match | None:
    """Join by record id; ``None`` where ids are missing (some versions write 0 for all) or agree at no offset."""
    ids = graph.ops.record_id
    rows = np.flatnonzero((ids > 0) & names.op_usable)
    nodes = np.flatnonzero(names.node_usable & (trace.record_id >= 0))
    if len(rows) == 0 or len(nodes) == 0 or len(np.unique(ids[rows])) < len(rows):
        return None
    nodes = nodes[np.argsort(trace.record_id[nodes], kind="stable")]
    known = trace.record_id[nodes]
    best: Match | None = None
    for offset in _likely_offsets(ids[rows], names.ops[rows], known, names.nodes[nodes]):
        wanted = ids[rows] + offset
        at = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
        present = known[at] == wanted
        equal = present & (names.ops[rows] == names.nodes[nodes[at]])
        if np.count_nonzero(equal) < _OFFSET_AGREEMENT * np.count_nonzero(present) or not equal.any():
            continue
        node = np.full(len(ids), NONE, dtype=np.int64)
        node[rows[equal]] = nodes[at[equal]]
        candidate = np.zeros(len(ids), dtype=bool)
        candidate[rows] = (wanted >= known[0]) & (wanted <= known[-1])
        found = Match("record_id", node, candidate, offset)
        if best is None or np.count_nonzero(node >= 0) > np.count_nonzero(best.node >= 0):
            best = found
    return best


def _likely_offsets(ids: Int64, names: Int64, known: Int64, known_names: Int64) -> list[int]:
    """0, and the commonest differences between the ids of rare names, commonest first."""
    counts = np.bincount(names, minlength=int(max(names.max(), known_names.max())) + 1)
    pairs = counts * np.bincount(known_names, minlength=len(counts))
    differences: list[Int64] = []
    budget = _PAIRS_FOR_OFFSET
    for name in np.argsort(pairs, kind="stable").tolist():
        if pairs[name] == 0:
            continue
        budget -= int(pairs[name])
        if budget < 0 and differences:
            break
        differences.append(np.subtract.outer(known[known_names == name], ids[names == name]).ravel())
    if not differences:
        return [0]
    values, votes = np.unique(np.concatenate(differences), return_counts=True)
    common = values[np.argsort(-votes, kind="stable")[:5]].tolist()
    return [0, *(int(value) for value in common if value != 0)]


def by_sequence(graph: ExecutionGraph, trace: ExecutionTrace, names: Names) -> Match:
    """Join by aligning the op names of each pair of threads, the largest execution-trace threads first."""
    ops = graph.ops
    match = Match("sequence", np.full(len(ops), NONE, np.int64), np.zeros(len(ops), dtype=bool))
    ours = {
        thread: _program_order(graph, np.flatnonzero((ops.thread == thread) & names.op_usable & (names.ops >= 0)))
        for thread in present_values(ops.thread)
    }
    named = names.node_usable & (names.nodes >= 0)  # a damaged file has nodes without a name
    theirs = {t: np.flatnonzero((trace.thread == t) & named) for t in present_values(trace.thread)}
    size = int(max(names.ops.max(initial=0), names.nodes.max(initial=0))) + 1
    histograms = {t: np.bincount(names.ops[rows], minlength=size) for t, rows in ours.items()}
    # Sequence numbers tell iterations apart within one process. Across processes, or where the windows are disjoint,
    # they differ by a constant, which the first thread joined reveals to the others.
    same_process = any(thread.pid == str(trace.pid) for thread in graph.threads)
    marks = ops.sequence if same_process else np.full(len(ops), NONE, np.int64)
    shifted = False
    for _, nodes in sorted(theirs.items(), key=lambda item: -len(item[1])):
        histogram = np.bincount(names.nodes[nodes], minlength=size)
        likely = sorted(ours, key=lambda t: -int(np.minimum(histogram, histograms[t]).sum()))[:_THREADS_TRIED]
        best_thread = NONE
        best: Int64 = np.empty(0, np.int64)
        for thread in likely:
            rows = ours[thread]
            partner = align_windows(names.ops[rows], names.nodes[nodes], marks[rows], trace.sequence[nodes])
            _repair_swaps(names.ops[rows], names.nodes[nodes], partner)
            if np.count_nonzero(partner >= 0) > np.count_nonzero(best >= 0):
                best_thread, best = thread, partner
        if best_thread == NONE:
            continue
        rows = ours.pop(best_thread)
        found = np.flatnonzero(best >= 0)
        match.node[rows[found]] = nodes[best[found]]
        if not shifted and (shift := _shift(ops.sequence[rows[found]], trace.sequence[nodes[best[found]]])) is not None:
            marks = np.where(ops.sequence >= 0, ops.sequence + shift, NONE)
            shifted = True
        first, last = int(found[0]), int(found[-1])
        before = min(first, int(best[found].min()))
        after = min(len(rows) - 1 - last, len(nodes) - 1 - int(best[found].max()))
        match.candidate[rows[first - before: last + after + 1]] = True
    joined = match.node >= 0
    if joined.any():
        start = ops.start_ns
        low, high = start[joined].min(), start[joined].max()
        for rows in ours.values():
            match.candidate[rows[(start[rows] >= low) & (start[rows] <= high)]] = True
    return match


def _shift(sequence: Int64, node_sequence: Int64) -> int | None:
    """The commonest difference of sequence numbers, ``None`` where nothing joined has any."""
    both = (sequence >= 0) & (node_sequence >= 0)
    if not both.any():
        return None
    values, counts = np.unique(node_sequence[both] - sequence[both], return_counts=True)
    return int(values[np.argmax(counts)])


def present_values(threads: npt.NDArray[np.integer]) -> list[int]:
    """The different values of a column, in order."""
    return np.unique(threads).tolist()


def _program_order(graph: ExecutionGraph, rows: Int64) -> Int64:
    """Rows of one thread by start; ids break ties, since older traces have only microseconds."""
    ops = graph.ops
    external = ops.external_id[rows]
    ids = external if len(np.unique(external)) == len(rows) else np.arange(len(rows))
    return rows[np.lexsort((ids, ops.start_ns[rows]))]


def _repair_swaps(names: Int64, node_names: Int64, partner: Int64) -> None:
    """Pair left-over tokens of one name that lie a few places from where the alignment expects them."""
    free = np.ones(len(node_names), dtype=bool)
    free[partner[partner >= 0]] = False
    if not free.any():
        return
    found = np.flatnonzero(partner >= 0)
    lost = np.flatnonzero(partner < 0)
    if not len(found):
        return
    left = found[np.maximum(np.searchsorted(found, lost) - 1, 0)]
    for row, expected in zip(lost.tolist(), (partner[left] + lost - left).tolist(), strict=True):
        if not 0 <= expected < len(node_names) + _SWAP_REACH:
            continue
        low = max(expected - _SWAP_REACH, 0)
        near = low + np.flatnonzero(free[low: expected + _SWAP_REACH + 1])
        near = near[node_names[near] == names[row]]
        if len(near):
            node = int(near[np.argmin(np.abs(near - expected))])
            partner[row] = node
            free[node] = False
