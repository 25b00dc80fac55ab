"""Merges the notes of a discarded step (``notes.py``) into the graph of the recorded steps. Needs no torch.

``collectives.json``: where a profiled step has the same collectives as the noted step, the n-th call of an operator is
described by that operator's n-th note. A step with other collectives is aligned with the notes in order, by operator
and, where known, by size. So an occasional collective (the loss, every fifth step) does not cost the groups of all
others. A call is identified only if every best alignment agrees. For a call without a note only the kind is known, and
the job's process group if it has only one. A functional collective and the ``c10d`` call inside it are one: the notes
have the outer, the row names the inner.

``lookups.json`` and ``python-calls.json``: counts, written to the operations that they belong to.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, TypedDict

import msgspec
import numpy as np

from tracer.alignment_loop import align_windows
from tracer.arrays import Bool, Int64
from tracer.errors import TraceError
from tracer.graph import NONE, CollectiveTable, ExecutionGraph, OpKind, string_coder
from tracer.guard import MOST_RANKS
from tracer.input_file import DecodeError, from_json, read_input, why_not_read
from tracer.kineto.linking import SAME_SIZE, collective_kind
from tracer.lookup_data.noted import note_counted
from tracer.lookup_data.tables import EmbeddingTable, TableError

_MOST_CELLS = 4_000_000
"""Most cells of the alignment's table, a second or two; in longer steps that differ throughout, groups stay unknown."""
_NO_TENSOR = frozenset({"", "Scalar", "ScalarList", "GenericList", "None", "Bool", "Int", "Double", "String"})


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A collective call of the profile.

    Attributes:
        operator: The name of its operator.
        elements: Elements of all tensors it was given, -1 where not recorded.
    """

    operator: str
    elements: int = -1

    def may_be(self, note: dict[str, Any]) -> bool:
        """Return whether the note may describe the call."""
        if self.operator != note["op"]:
            return False
        sent, received = note["elements_in"], note["elements_out"]
        if self.elements < 0 or self.elements == sent:
            return True
        # Most calls are also given the tensors that they receive; of lists of lists of tensors nothing is recorded.
        return not _is_in_place(self.operator) and self.elements in (received, sent + received)


@lru_cache(maxsize=256)
def _is_in_place(operator: str) -> bool:
    return collective_kind(operator) in SAME_SIZE


def call_of(graph: ExecutionGraph, row: int, operator: str) -> RecordedCall:
    """Read the call in a row of ``graph.ops``."""
    try:
        shapes, dtypes = (json.loads(graph.string(int(column[row]))) for column in (graph.ops.shapes, graph.ops.dtypes))
        sizes = [size for shape, dtype in zip(shapes, dtypes, strict=True) for size in _sizes(shape, dtype)]
        return RecordedCall(operator, sum(sizes) if sizes else -1)
    except (ValueError, TypeError):
        return RecordedCall(operator)


def _sizes(shape: Any, dtype: str) -> list[int]:
    if dtype.startswith("TensorList"):
        return [math.prod(each) for each in shape]
    return [] if dtype in _NO_TENSOR else [math.prod(shape)]


def notes_of(calls: Sequence[RecordedCall], notes: Sequence[dict[str, Any]]) -> list[dict[str, Any] | None]:
    """Return the note of each call; ``None`` where it has none, or where two different notes fit."""
    first = _leftmost(calls, notes)
    last = [None if place is None else len(notes) - 1 - place
            for place in reversed(_leftmost(calls[::-1], notes[::-1]))]
    found: list[dict[str, Any] | None] = []
    for one, other in zip(first, last, strict=True):
        agreed = one is not None and other is not None and (one == other or notes[one] == notes[other])
        found.append(notes[one] if agreed and one is not None else None)
    return found


def _leftmost(calls: Sequence[RecordedCall], notes: Sequence[dict[str, Any]]) -> list[int | None]:
    """Return the index of each call's note in the leftmost of the longest alignments."""
    found: list[int | None] = [None] * len(calls)
    begin = 0
    while begin < min(len(calls), len(notes)) and calls[begin].may_be(notes[begin]):
        found[begin] = begin
        begin += 1
    middle, rest = calls[begin:], notes[begin:]
    if not middle or not rest or len(middle) * len(rest) > _MOST_CELLS:
        return found
    # best[i][j]: the largest number of calls in middle[i:] that can be aligned with rest[j:].
    may = [[call.may_be(note) for note in rest] for call in middle]
    best = np.zeros((len(middle) + 1, len(rest) + 1), np.int32).tolist()
    for i in range(len(middle) - 1, -1, -1):
        row, below, fits = best[i], best[i + 1], may[i]
        for j in range(len(rest) - 1, -1, -1):
            row[j] = below[j + 1] + 1 if fits[j] else max(below[j], row[j + 1])
    i = j = 0
    while i < len(middle) and best[i][j]:
        # Take the first note that fits without losing a later call; if there is none, the call has no note.
        place = next((k for k in range(j, len(rest)) if may[i][k] and best[i + 1][k + 1] + 1 == best[i][j]), None)
        if place is not None:
            found[begin + i] = begin + place
            j = place + 1
        i += 1
    return found


_Elements = Annotated[int, msgspec.Meta(ge=NONE, le=(1 << 62))]
_Rank = Annotated[int, msgspec.Meta(ge=NONE, lt=MOST_RANKS)]
_Note = TypedDict("_Note", {"op": str, "kind": str, "group": str, "ranks": list[_Rank], "dtype": str,
                            "elements_in": _Elements, "elements_out": _Elements, "async": bool | None})


class _Collectives(msgspec.Struct):
    rows: list[_Note]


_OPERATORS = ("c10d::", "_c10d_functional::")
_NOT_COLLECTIVES = ("::wait_tensor", "::check_for_nan", "::batch_p2p_ops", "::_wrap_tensor_autograd")


def _rows(path: Path, kind: type[Any], what: str, without: str) -> tuple[list[Any] | None, list[str]]:
    """Return the rows of a file, ``None`` where it is missing or was not read, and a sentence on why it was not read.

    Raises:
        TraceError: the file is damaged.
    """
    try:
        rows: list[Any] = from_json(read_input(path), kind).rows
        return rows, []
    except FileNotFoundError:
        if not path.is_symlink():
            return None, []
        why = why_not_read(path)
    except (OSError, DecodeError, TableError) as error:
        # A pipe, a device or a link is no file of the capture, which is of use without it.
        why = why_not_read(path) or ("is a link to another file" if path.is_symlink() else "")
        if not why:
            raise TraceError(f"{path} cannot be read as a capture's {what} ({error}); copy or record it again.") \
                from error
    return None, [f"{path.parent.name}/{path.name} {why}; it was not read, and {without}."]


def merge_collectives(graph: ExecutionGraph, path: Path, groups: object = ()) -> list[str]:
    """Add or complete the graph's collectives, in place; return sentences on mismatches. The file may be missing.

    ``groups`` are the rank's process groups as ``context.json`` has them.

    Raises:
        TraceError: the file is damaged.
    """
    noted, notes = _rows(path, _Collectives, "notes of collectives",
                         "collectives are those of the profiler's trace")
    if notes or noted is None:
        return notes
    calls = _calls(graph)
    described, unlike = _described(graph, calls, noted)
    left = [index for index, note in enumerate(described) if note is None and graph.ops.step[calls[index][0]] != NONE]
    only = _only_group(groups, noted)
    if only is not None:
        for index, note in enumerate(described):
            if note is None:
                described[index] = _in_group(only, call_of(graph, *calls[index]))
    _fill(graph, calls, described)
    if not left:
        return []
    of = f"{len(left)} of their {sum(int(graph.ops.step[row]) in unlike for row, _ in calls)} collectives"
    have = "step has" if len(graph.steps) == 1 else "steps have"
    return [f"{len(unlike)} of {len(graph.steps)} {have} other collectives than the step in which they were noted: "
            + (f"the process groups of {of} are unknown." if only is None else
               f"{of} are taken to be of the job's only process group.")]


def _only_group(groups: object, noted: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return name and ranks of this rank's only process group; ``None`` if it has several or a note names another."""
    if not isinstance(groups, list | tuple) or len(groups) != 1 or not isinstance(groups[0], dict):
        return None
    name, ranks = str(groups[0].get("pg_name", "")), groups[0].get("ranks")
    if not isinstance(ranks, list) or not all(isinstance(rank, int) for rank in ranks):
        return None
    return {"group": name, "ranks": ranks} if all(row["group"] == name for row in noted) else None


def _in_group(group: dict[str, Any], call: RecordedCall) -> dict[str, Any]:
    """Return what is known of a call without a note, given its group."""
    kind = collective_kind(call.operator)
    known: dict[str, Any] = {**group, "kind": kind}
    if kind in ("send", "recv"):
        known.pop("ranks")  # its sender and receiver are not known
    if kind in SAME_SIZE and call.elements >= 0:
        known.update(elements_in=call.elements, elements_out=call.elements)
    return known


def _calls(graph: ExecutionGraph) -> list[tuple[int, str]]:
    """Return (row of ops, operator) of the outermost collective calls, in time order."""
    ops = graph.ops
    names = {code: text for code in np.unique(ops.name).tolist() if code >= 0
             and (text := graph.strings[code]).startswith(_OPERATORS) and not text.endswith(_NOT_COLLECTIVES)}
    found = np.flatnonzero(np.isin(ops.name, list(names)) & (ops.kind == OpKind.OPERATION))
    rows: list[int] = found[np.argsort(ops.start_ns[found], kind="stable")].tolist()
    calls = set(rows)
    return [(row, names[int(ops.name[row])]) for row in rows if _enclosing(ops.parent, row, calls) == NONE]


def _enclosing(parent: np.ndarray, row: int, wanted: set[int]) -> int:
    row = int(parent[row])
    while row >= 0 and row not in wanted:
        row = int(parent[row])
    return row


def _described(graph: ExecutionGraph, calls: list[tuple[int, str]], noted: list[dict[str, Any]]) -> \
        tuple[list[dict[str, Any] | None], set[int]]:
    """Return the note of each call, and the steps whose calls differ from the noted ones."""
    by_operator: dict[str, list[dict[str, Any]]] = {}
    for row in noted:
        by_operator.setdefault(row["op"], []).append(row)
    steps = [int(graph.ops.step[row]) for row, _ in calls]
    counts: dict[tuple[int, str], int] = {}
    places = []
    for step, (_, operator) in zip(steps, calls, strict=True):
        places.append(counts.get((step, operator), 0))
        counts[step, operator] = places[-1] + 1
    expected = {operator: len(rows) for operator, rows in by_operator.items()}
    seen = {step: {o: n for (s, o), n in counts.items() if s == step} for step in {*steps, *range(len(graph.steps))}}
    alike = {step for step, found in seen.items() if step != NONE and found == expected}
    found = [by_operator[operator][place] if step in alike else None
             for step, place, (_, operator) in zip(steps, places, calls, strict=True)]
    unlike = set(range(len(graph.steps))) - alike
    known: dict[
        tuple[RecordedCall, ...], list[dict[str, Any] | None]
    ] = {}  # steps that differ are often alike themselves
    for step in sorted(unlike):
        rows = [index for index, each in enumerate(steps) if each == step]
        made = tuple(call_of(graph, *calls[index]) for index in rows)
        if made not in known:
            known[made] = notes_of(made, noted)
        for index, note in zip(rows, known[made], strict=True):
            found[index] = note
    return found, unlike


def _fill(graph: ExecutionGraph, calls: list[tuple[int, str]], described: list[dict[str, Any] | None]) -> None:
    """Complete the rows that have device work, and replace all other rows by the calls."""
    old = graph.collectives
    code_of = string_coder(graph)
    call_rows = {row: index for index, (row, _) in enumerate(calls)}
    launched: dict[int, list[int]] = {}
    for row in np.flatnonzero(old.kernel >= 0).tolist():
        op = int(old.op[row])
        outer = op if op in call_rows else _enclosing(graph.ops.parent, op, set(call_rows)) if op >= 0 else NONE
        if outer != NONE:
            launched.setdefault(call_rows[outer], []).append(row)
    # A row without device work is gloo's own annotation of a call (or of a part of one): the call replaces it.
    keep = old.kernel >= 0 if calls else np.ones(len(old), bool)
    added = [index for index in range(len(calls)) if index not in launched]
    table = CollectiveTable(**{
        name: np.concatenate([column, np.full(len(added), NONE, column.dtype)])
        for name, column in old.take(np.flatnonzero(keep)).columns().items()
    })
    place = np.cumsum(keep) - 1
    inner = _innermost_calls(graph, call_rows)
    first_added = int(np.count_nonzero(keep))
    for index, (row, operator) in enumerate(calls):
        targets = [int(place[r]) for r in launched.get(index, [])]
        if index not in launched:
            targets = [first_added + int(np.searchsorted(added, index))]
            table.op[targets[0]] = inner.get(row, row)
        for target in targets:
            _describe(table, target, described[index] or {"kind": collective_kind(operator)}, code_of)
    table = table.take(np.argsort(_times(graph, table), kind="stable"))
    order: dict[int, int] = {}
    for index, group in enumerate(table.group.tolist()):
        table.order[index] = order[group] = order.get(group, -1) + 1
    graph.collectives = table


def _innermost_calls(graph: ExecutionGraph, call_rows: dict[int, int]) -> dict[int, int]:
    """Return for each outer call the first ``c10d`` call inside it."""
    ops = graph.ops
    codes = [code for code in np.unique(ops.name).tolist() if code >= 0 and graph.strings[code].startswith("c10d::")]
    inner: dict[int, int] = {}
    outers = set(call_rows)
    for row in np.flatnonzero(np.isin(ops.name, codes)).tolist() if codes else []:
        if row not in outers and (outer := _enclosing(ops.parent, row, outers)) != NONE:
            inner.setdefault(outer, row)
    return inner


def _describe(table: CollectiveTable, row: int, note: dict[str, Any], code_of: Any) -> None:
    values = {
        "kind": code_of(note["kind"]),
        "group": code_of(note.get("group", "")),
        "ranks": code_of(json.dumps(note["ranks"])) if note.get("ranks") else NONE,
        "dtype": code_of(note.get("dtype", "")),
        "elements_in": note.get("elements_in", NONE),
        "elements_out": note.get("elements_out", NONE),
        "group_size": len(note["ranks"]) if note.get("ranks") else NONE,
        "is_async": NONE if note.get("async") is None else int(note["async"]),
    }
    for name, value in values.items():
        column = getattr(table, name)
        if column[row] == NONE:
            column[row] = value


def _times(graph: ExecutionGraph, table: CollectiveTable) -> np.ndarray:
    """Return the start of each collective: of its device work, else of its operation."""
    def at(starts: np.ndarray, rows: np.ndarray) -> np.ndarray:
        return starts[np.maximum(rows, 0)] if len(starts) else np.zeros(len(rows), np.int64)

    return np.where(table.kernel >= 0, at(graph.kernels.start_ns, table.kernel), at(graph.ops.start_ns, table.op))


class _Lookups(msgspec.Struct):
    rows: list[EmbeddingTable]


def merge_lookups(graph: ExecutionGraph, path: Path) -> list[str]:
    """Write the counts to the graph's look-ups, in place; return sentences on mismatches.

    A missing file is fine.

    Raises:
        TraceError: the file is damaged.
    """
    counted, notes = _rows(path, _Lookups, "counts of look-ups", "look-ups are as the trace has them")
    if notes or counted is None:
        return notes
    if not counted:
        return ["The step in which indices were to be counted looked nothing up."]
    return note_counted(graph, counted)


_WATCHED_ONLY = ("aten::detach", "profiler::")
"""Skipped operations: autograd calls the first more often while a mode watches, no profiler records the second."""
LEAST_FOUND = 0.5
"""Least share of the counted operations in a step of the same program."""


class _Counted(msgspec.Struct):
    rows: list[tuple[str, int]]


def merge_python(graph: ExecutionGraph, path: Path) -> list[str]:
    """Write the counted calls to a graph's operations and steps, in place; return sentences on mismatches.

    A missing file is fine.

    Raises:
        TraceError: the file is damaged.
    """
    rows, notes = _rows(path, _Counted, "counts of Python calls", "calls of Python are not known")
    return notes if rows is None else note_python_calls(graph, rows)


def note_python_calls(graph: ExecutionGraph, rows: list[tuple[str, int]]) -> list[str]:
    """Write counted calls to a graph's operations, in place, step by step; return sentences on mismatches.

    Args:
        graph: The recorded steps; the counted step is not among them.
        rows: As in ``PythonNotes.rows``.
    """
    code_of = {text: code for code, text in enumerate(graph.strings)}
    reached = np.cumsum([calls for _, calls in rows])
    places = [row for row, (name, _) in enumerate(rows[:-1]) if not name.startswith(_WATCHED_ONLY)]
    counted = np.array([code_of.get(rows[row][0], NONE) for row in places], np.int64)
    if not places or not 0 <= int(reached[-1]) < 1 << 31 or min(calls for _, calls in rows) < 0:
        return ["The step in which calls of Python were to be counted has no counts that could be."]
    ops, unlike = graph.ops, 0
    level = _outermost(graph, counted)
    known: dict[bytes, Int64 | None] = {}
    before_ops, in_steps = ops.writable("python_calls"), graph.steps.writable("python_calls")
    for step in range(len(graph.steps)):
        mine = np.flatnonzero((ops.step == step) & (ops.start_ns >= graph.steps.start_ns[step]))
        mine = mine[np.argsort(ops.start_ns[mine], kind="stable")]
        names = np.where(level[mine], ops.name[mine], NONE - 1).astype(np.int64)
        key = names.tobytes()
        if key not in known:
            known[key] = _calls_before(names, counted, reached[places])
        found = known[key]
        if found is None:
            unlike += 1
            continue
        before_ops[mine] = found
        in_steps[step] = int(reached[-1])
    return [] if not unlike else [
        f"{unlike} of {len(graph.steps)} steps are unlike the one in which Python calls were counted, and have none."]


def _outermost(graph: ExecutionGraph, counted: Int64) -> Bool:
    """Return which rows of ``ops`` have a counted operation's name and are not inside another such row, [ops]."""
    ops = graph.ops
    named = np.isin(ops.name, counted[counted != NONE])
    inside = np.zeros(len(ops), np.bool_)
    for row, parent in enumerate(ops.parent.tolist()):  # a parent comes before its parts
        if parent >= 0:
            inside[row] = named[parent] or inside[parent]
    return named & ~inside


def _calls_before(names: Int64, counted: Int64, reached: Int64) -> Int64 | None:
    """Return the calls before each operation of a step; ``None`` where too few of the counted operations are in it."""
    places = np.flatnonzero(names >= 0)
    partner = align_windows(counted, names[places])
    found = partner >= 0
    if found.sum() < LEAST_FOUND * len(counted):
        return None
    at = np.zeros(len(names), np.int64)
    at[places[partner[found]]] = reached[found]
    return np.diff(np.maximum.accumulate(at), prepend=0)
