"""The merge of ``collectives.json`` into a graph's collectives. Needs no torch.

The notes are of one step. Where a profiled step has the same collectives, the n-th call of an operator in it is
described by the n-th note of that operator; a step that has others is aligned with the notes (``noted_calls.py``), and
what is left over there is of the job's only process group if there is but one, else only its kind is known. A
functional collective and the ``c10d`` call inside it are one: the notes have the outer, the row names the inner.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, TypedDict, cast

import msgspec
import numpy as np

from tracer.capture.noted_calls import RecordedCall, call_of, notes_of
from tracer.decode import DecodeError, from_json
from tracer.errors import TraceError
from tracer.graph import NONE, CollectiveTable, ExecutionGraph, OpKind, string_coder
from tracer.input_file import read_input, why_not_read
from tracer.kineto.collectives import SAME_SIZE, collective_kind
from tracer.ranks import MOST_RANKS

_Elements = Annotated[int, msgspec.Meta(ge=NONE, le=(1 << 62))]
_Rank = Annotated[int, msgspec.Meta(ge=NONE, lt=MOST_RANKS)]
_Note = TypedDict("_Note", {"op": str, "kind": str, "group": str, "ranks": list[_Rank], "dtype": str,
                            "elements_in": _Elements, "elements_out": _Elements, "async": bool | None})


class _Stored(msgspec.Struct):
    rows: list[_Note]


_OPERATORS = ("c10d::", "_c10d_functional::")
_NOT_COLLECTIVES = ("::wait_tensor", "::check_for_nan", "::batch_p2p_ops", "::_wrap_tensor_autograd")


def merge_collectives(graph: ExecutionGraph, path: Path, groups: object = ()) -> list[str]:
    """Add or complete the graph's collectives, in place; sentences for what does not fit. A missing file is fine.

    ``groups`` are the rank's process groups as ``context.json`` has them.

    Raises:
        TraceError: the file is damaged.
    """
    try:
        noted = cast(list[dict[str, Any]], from_json(read_input(path), _Stored).rows)
    except FileNotFoundError:
        return [] if not path.is_symlink() else [_not_read(path, why_not_read(path))]
    except (OSError, DecodeError) as error:
        # A pipe, a device, a link to another file: nothing of the capture's, which is of use without it.
        if why := why_not_read(path) or ("is a link to another file" if path.is_symlink() else ""):
            return [_not_read(path, why)]
        raise TraceError(f"{path} cannot be read as a capture's notes of collectives ({error}); copy or record "
                         "it again.") from error
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
    """Name and ranks of this rank's one process group; ``None`` if it has several, or there are notes of another."""
    if not isinstance(groups, list | tuple) or len(groups) != 1 or not isinstance(groups[0], dict):
        return None
    name, ranks = str(groups[0].get("pg_name", "")), groups[0].get("ranks")
    if not isinstance(ranks, list) or not all(isinstance(rank, int) for rank in ranks):
        return None
    return {"group": name, "ranks": ranks} if all(row["group"] == name for row in noted) else None


def _in_group(group: dict[str, Any], call: RecordedCall) -> dict[str, Any]:
    """Return what is known of a call that nothing was noted of, but whose group is."""
    kind = collective_kind(call.operator)
    known: dict[str, Any] = {**group, "kind": kind}
    if kind in ("send", "recv"):
        known.pop("ranks")  # those who send and receive are not known
    if kind in SAME_SIZE and call.elements >= 0:
        known.update(elements_in=call.elements, elements_out=call.elements)
    return known


def _not_read(path: Path, why: str) -> str:
    return f"{path.parent.name}/{path.name} {why}; it was not read, and collectives are those of the profiler's trace."


def _calls(graph: ExecutionGraph) -> list[tuple[int, str]]:
    """(row of ops, operator) of the outermost collective calls, in time order."""
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
    """The note of each call, and the steps whose calls are not those noted."""
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
    """Device work keeps its row and gains what it lacks; other rows are replaced by the calls."""
    old = graph.collectives
    code_of = string_coder(graph)
    call_rows = {row: index for index, (row, _) in enumerate(calls)}
    launched: dict[int, list[int]] = {}
    for row in np.flatnonzero(old.kernel >= 0).tolist():
        op = int(old.op[row])
        outer = op if op in call_rows else _enclosing(graph.ops.parent, op, set(call_rows)) if op >= 0 else NONE
        if outer != NONE:
            launched.setdefault(call_rows[outer], []).append(row)
    # A row without device work is gloo's own annotation of a call (or of a part of one): the call takes its place.
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
    """Outer call → the first ``c10d`` call inside it."""
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
    """Return when each collective began: its device work, else its operation."""
    def at(starts: np.ndarray, rows: np.ndarray) -> np.ndarray:
        return starts[np.maximum(rows, 0)] if len(starts) else np.zeros(len(rows), np.int64)

    return np.where(table.kernel >= 0, at(graph.kernels.start_ns, table.kernel), at(graph.ops.start_ns, table.op))
