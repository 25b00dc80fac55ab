"""The merge of ``python-calls.json`` into a graph's operations. Needs no torch."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from tracer.alignment import align_windows
from tracer.arrays import Bool, Int64
from tracer.decode import DecodeError, from_json
from tracer.errors import TraceError
from tracer.graph import NONE, ExecutionGraph
from tracer.input_file import read_input, why_not_read

_WATCHED_ONLY = ("aten::detach", "profiler::")
"""What autograd calls more often while a mode watches, and what no profiler records: no places to count at."""
LEAST_FOUND = 0.5
"""Share of the counted operations that a step must have to be the same program."""


class _Counted(msgspec.Struct):
    rows: list[tuple[str, int]]


def merge_python(graph: ExecutionGraph, path: Path) -> list[str]:
    """Write what was counted with the operations and steps of a graph, in place; sentences for what does not fit.

    A missing file is fine.

    Raises:
        TraceError: the file is damaged.
    """
    try:
        rows = from_json(read_input(path), _Counted).rows
    except FileNotFoundError:
        return []
    except (OSError, DecodeError) as error:
        if why := why_not_read(path):
            return [f"{path.parent.name}/{path.name} {why}; it was not read, and calls of Python are not known."]
        raise TraceError(f"{path} cannot be read as a capture's counts of Python calls ({error}); copy or record it "
                         "again.") from error
    return note_python_calls(graph, rows)


def note_python_calls(graph: ExecutionGraph, rows: list[tuple[str, int]]) -> list[str]:
    """Write counted calls with a graph's operations, in place, step by step; sentences for what does not fit.

    Args:
        graph: steps that were recorded beside the counted one.
        rows: as ``PythonNotes`` has them.
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
            known[key] = _calls(names, counted, reached[places])
        found = known[key]
        if found is None:
            unlike += 1
            continue
        before_ops[mine] = found
        in_steps[step] = int(reached[-1])
    return [] if not unlike else [
        f"{unlike} of {len(graph.steps)} steps are unlike the one in which Python calls were counted, and have none."]


def _outermost(graph: ExecutionGraph, counted: Int64) -> Bool:
    """Return which rows of ``ops`` have a counted operation's name and lie in no other one that has."""
    ops = graph.ops
    named = np.isin(ops.name, counted[counted != NONE])
    inside = np.zeros(len(ops), np.bool_)
    for row, parent in enumerate(ops.parent.tolist()):  # a parent comes before its parts
        if parent >= 0:
            inside[row] = named[parent] or inside[parent]
    return named & ~inside


def _calls(names: Int64, counted: Int64, reached: Int64) -> Int64 | None:
    """Return the calls before each operation of a step; ``None`` where too few of the counted ones are in it."""
    places = np.flatnonzero(names >= 0)
    partner = align_windows(counted, names[places])
    found = partner >= 0
    if found.sum() < LEAST_FOUND * len(counted):
        return None
    at = np.zeros(len(names), np.int64)
    at[places[partner[found]]] = reached[found]
    return np.diff(np.maximum.accumulate(at), prepend=0)
