"""Joins an execution trace to a graph read from the same program's Kineto trace, and fills what the graph lacks.

Two ways, never by ``External id`` (its meaning changed over the years):

* the profiler's ``Record function id`` equals the execution trace's ``rf_id``, up to a constant offset;
* where it is missing or disagrees, the op names of each thread are aligned in program order.

The two files may cover different windows. *Candidates* are the rows of ``ops`` inside the window both cover, except
annotations that the execution trace never has (``ProfilerStep#N`` above all, whose numbers differ anyway):

* by record id: rows whose id, offset included, lies in the range of the execution trace's ids;
* by sequence: Per thread, rows from the first to the last joined one. Before (after) them also as many rows as the
  execution trace has nodes before (after) its first (last) joined node. For threads without a counterpart, the rows
  that start between the first and the last joined row.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tracer.alignment_loop import align_windows
from tracer.arrays import Bool, Int32, Int64
from tracer.columns import nearest
from tracer.execution_trace import ExecutionTrace, read_execution_trace
from tracer.execution_trace.trace import profiler_arguments
from tracer.graph import NONE, CodeOf, ExecutionGraph, OpKind, string_coder
from tracer.guard import MOST_RANKS
from tracer.kineto.linking import collective_kind

if TYPE_CHECKING:
    from tracer.execution_trace import CommNode, ExecutionTrace


STEP_PREFIX = "ProfilerStep#"

# Below this share of agreeing names an offset between the ids is chance.
_OFFSET_AGREEMENT = 0.98
_PAIRS_FOR_OFFSET = 1_000_000  # chosen: 8 MB of differences
_THREADS_TRIED = 3  # chosen: those with most names in common
# Largest distance by which equal (microsecond) timestamps may put an operation out of order.
_SWAP_REACH = 8


@dataclass(slots=True)
class Match:
    """Result of one way of joining. ``candidate`` marks the rows of ``ops`` that should have a node."""

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
    """Op names of both sides as codes of one numbering, and the rows that can be joined at all."""

    ops: Int64
    nodes: Int64
    op_usable: Bool
    node_usable: Bool


def joinable_names(graph: ExecutionGraph, trace: ExecutionTrace) -> Names:
    """Return names of both sides in one numbering, without steps and annotations that the trace never has."""
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
    """Return 0, and the commonest differences between the ids of rare names, commonest first."""
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
    """Return the commonest difference of sequence numbers, ``None`` where nothing joined has any."""
    both = (sequence >= 0) & (node_sequence >= 0)
    if not both.any():
        return None
    values, counts = np.unique(node_sequence[both] - sequence[both], return_counts=True)
    return int(values[np.argmax(counts)])


def present_values(threads: npt.NDArray[np.integer]) -> list[int]:
    """Return the different values of a column, in order."""
    return np.unique(threads).tolist()


def _program_order(graph: ExecutionGraph, rows: Int64) -> Int64:
    """Return the rows of one thread by start; ids break ties, since older traces have only microseconds."""
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


# A collective's launch lies at most this many ranges inside its record_param_comms.
_LEVELS = 4


def fill_from_trace(graph: ExecutionGraph, trace: ExecutionTrace, node: Int64) -> dict[str, int]:
    """Fill what is missing in ``graph`` and count it by column; nothing recorded is overwritten.

    ``node`` is the row of ``trace`` for each row of ``ops``, -1 for none.
    """
    code_of = string_coder(graph)
    filled = _fill_arguments(graph, trace, node, code_of)
    filled.update(_fill_collectives(graph, trace, node, code_of))
    if trace.process_groups and not graph.meta.process_groups:
        graph.meta.process_groups = [dict(group) for group in trace.process_groups]
        filled["process_groups"] = len(trace.process_groups)
    world = next((c.group_size for c in trace.comms if c.group_description == "default_pg" and c.group), NONE)
    if graph.meta.world_size == NONE and 0 < world <= MOST_RANKS:
        graph.meta.world_size = world
        filled["world_size"] = 1
    return filled


def _fill_arguments(graph: ExecutionGraph, trace: ExecutionTrace, node: Int64, code_of: CodeOf) -> dict[str, int]:
    ops = graph.ops
    columns = {"shapes": ops.shapes, "dtypes": ops.dtypes, "strides": ops.strides, "scalars": ops.scalars}
    lacking = {name: (column < 0) & (node >= 0) for name, column in columns.items()}
    rows = np.flatnonzero(np.logical_or.reduce(list(lacking.values())))
    at = node[rows]
    keys = np.stack([trace.input_shapes[at], trace.input_types[at], trace.input_strides[at], trace.inputs[at]], axis=1)
    # Many nodes share shapes and types, and the tensor ids among the values change nothing: translate each once.
    seen: dict[tuple[int, ...], tuple[int, int, int, int]] = {}
    translated = np.full((len(rows), 4), NONE, dtype=np.int32)
    for place, key in enumerate(map(tuple, keys.tolist())):
        if key not in seen:
            texts = profiler_arguments(
                trace.string(key[3]), trace.string(key[0]), trace.string(key[1]), trace.string(key[2])
            )
            seen[key] = (code_of(texts.shapes), code_of(texts.dtypes), code_of(texts.strides), code_of(texts.scalars))
        translated[place] = seen[key]
    filled = {}
    for index, name in enumerate(columns):
        wanted = lacking[name][rows] & (translated[:, index] >= 0)
        if wanted.any():
            ops.writable(name)[rows[wanted]] = translated[wanted, index]
            filled[name] = int(np.count_nonzero(wanted))
    return filled


def _fill_collectives(graph: ExecutionGraph, trace: ExecutionTrace, node: Int64, code_of: CodeOf) -> dict[str, int]:
    by_node = {comm.node: comm for comm in trace.comms if comm.name != "wait"}
    described = np.flatnonzero(np.isin(node, list(by_node)))
    comm_of_op = {row: by_node[int(node[row])] for row in described.tolist()}
    collectives = graph.collectives
    filled: dict[str, int] = {}
    if not comm_of_op or not len(collectives):
        return filled
    unknown = graph.strings.index("unknown") if "unknown" in graph.strings else None
    inner = _first_inside(graph, comm_of_op)
    for row in range(len(collectives)):
        comm = _comm_of(graph, int(collectives.op[row]), comm_of_op, inner)
        if comm is None:
            continue
        kind = collective_kind(comm.name)
        values = {
            "kind": code_of(kind) if kind != "unknown" else NONE,
            "group": code_of(comm.group),
            "ranks": code_of(comm.ranks),
            "dtype": code_of(comm.dtype),
            "elements_in": comm.elements_in,
            "elements_out": comm.elements_out,
            "group_size": comm.group_size,
        }
        for name, value in values.items():
            column = getattr(collectives, name)
            missing = column[row] == NONE or (name == "kind" and column[row] == unknown)
            if missing and value != NONE:
                column[row] = value
                filled[f"collectives.{name}"] = filled.get(f"collectives.{name}", 0) + 1
    return filled


def _first_inside(graph: ExecutionGraph, comm_of_op: dict[int, CommNode]) -> dict[int, CommNode]:
    """Return the first collective inside each range that encloses collectives within a few levels."""
    inside: dict[int, CommNode] = {}
    for op, comm in sorted(comm_of_op.items()):
        parent = int(graph.ops.parent[op])
        for _ in range(_LEVELS):
            if parent < 0:
                break
            inside.setdefault(parent, comm)
            parent = int(graph.ops.parent[parent])
    return inside


def _comm_of(
    graph: ExecutionGraph, op: int, comm_of_op: dict[int, CommNode], inner: dict[int, CommNode]
) -> CommNode | None:
    """Return the collective an operation is, lies in, or contains."""
    ancestor = op
    for _ in range(_LEVELS):
        if ancestor < 0:
            break
        if ancestor in comm_of_op:
            return comm_of_op[ancestor]
        ancestor = int(graph.ops.parent[ancestor])
    return inner.get(op)


# Share from which a join needs no second method.
_GOOD = 0.999
# A thread was aligned wrongly if its operations mostly have another parent in the execution trace.
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
    """Share of joined operations whose parents are joined to each other too: a check independent of the join."""
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
    """Undo the join of threads whose parents mostly disagree; return the share of agreeing parents of the rest."""
    ops = graph.ops
    # Rows that are never joined (steps, synthetic nodes) are skipped.
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
        # Record ids with equal names are certain, even where a range ends on another thread (gloo's) than it began.
        if match.method == "sequence" and np.count_nonzero(agrees & mine) < _PARENT_AGREEMENT * compared:
            match.node[rows[mine]] = NONE
            keep &= ~mine
    compared = int(np.count_nonzero(comparable & keep))
    return float(np.count_nonzero(agrees & keep)) / compared if compared else 1.0
