"""Statistics of the rows that a graph's operations look up, stored in the operations' arguments.

The profiler records no tensor values. The counts of a look-up's indices, or the distribution that they follow, are kept
where it would record them: as the recorded text of the argument that holds the indices.

    aten::_embedding_bag(weight, indices, …)      indices: shape [5120], value "lookups:[{"name":"tables.0", …}]"

So the statistics are stored with the graph and stay with the operation when its sizes change. They distinguish two
look-ups of equal shapes, and reach all that prices the operation. The indices are not stored.

An operation looks up one table, or several that lie one after another in one weight (as in FBGEMM's table-batched
embedding).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from tracer.columns import named
from tracer.graph import NONE, ExecutionGraph, OpKind, string_coder
from tracer.input_file import DecodeError, from_json
from tracer.lookup_data.indices import Indices
from tracer.lookup_data.tables import EmbeddingTable, TableError
from tracer.views import list_of

_MARK = "lookups:"
_COUNT = re.compile("[0-9]{1,18}")
_DIGITS = 5  # chosen: more only lengthen the file
FORWARD = {"aten::embedding": (0, 1), "aten::embedding_bag": (0, 1), "aten::_embedding_bag": (0, 1),
           "aten::_embedding_bag_forward_only": (0, 1)}
"""Look-ups → positions of the weight and of the indices among their arguments."""
BATCHED = {"fbgemm::split_embedding_codegen_lookup_": (1, 11), "fbgemm::dense_embedding_codegen_lookup_": (0, 7)}
"""Look-ups by the beginning of the operation's name → positions of the weight and of the indices."""
BACKWARD = frozenset({
    "aten::embedding_backward", "aten::embedding_dense_backward", "aten::embedding_sparse_backward",
    "aten::_embedding_bag_backward", "aten::_embedding_bag_dense_backward", "aten::_embedding_bag_sparse_backward"})
"""Gradients of look-ups; their second argument is the indices."""
_MATRIX = 2  # dimensions of a weight that holds one table
_OF_BACKWARD = 1  # position of the indices among a gradient's arguments
_NAMES = {part.name: part for part in fields(EmbeddingTable)}


def note_text(tables: Sequence[EmbeddingTable]) -> str:
    """Return the tables as the text of an argument, without default values."""
    return _MARK + json.dumps([_plain(table) for table in tables], separators=(",", ":"))


@lru_cache(maxsize=4096)
def noted_tables(text: str) -> tuple[EmbeddingTable, ...]:
    """Return the tables in the text of an argument; () for any other text and for damaged ones."""
    if not text.startswith(_MARK):
        return ()
    try:
        return tuple(from_json(text.removeprefix(_MARK), list[EmbeddingTable]))
    except (DecodeError, TableError):
        return ()


def tables_of(graph: ExecutionGraph) -> list[EmbeddingTable]:
    """Return the tables that a graph's operations are known to look up, each name once, in order."""
    ops = graph.ops
    found: dict[str, EmbeddingTable] = {}
    for code in dict.fromkeys(ops.scalars[_rows(graph)].tolist()):
        for value in list_of(graph.string(code)):
            for table in noted_tables(value if isinstance(value, str) else ""):
                found.setdefault(table.name, table)
    return list(found.values())


def note_tables(graph: ExecutionGraph, tables: Sequence[EmbeddingTable]) -> list[str]:
    """Note at each look-up, and at its gradient, which of a model's tables it reads. In place.

    A table belongs to the look-up of its module (``tables.3``) if that is known and the sizes fit. Otherwise tables and
    look-ups of equal sizes are paired in order. If a weight has as many rows as all tables of its width together, it
    holds all of them.

    Returns:
        Sentences for what could not be joined.
    """
    lookups = find_lookups(graph)
    writer, lacking = _Writer(graph), 0
    for step in sorted({own.step for own in lookups}):
        of_step = [own for own in lookups if own.step == step]
        for own, found in zip(of_step, _joined(of_step, tables), strict=True):
            lacking += not found
            writer.write(own, found)
    if not lacking:
        return []
    return [f"{lacking} of {len(lookups)} look-ups are of none of the {len(tables)} tables that are described: their "
            "rows are taken to differ."]


def note_counted(graph: ExecutionGraph, counted: Sequence[EmbeddingTable]) -> list[str]:
    """Note the counts of one watched step at the look-ups of every step, in order, in place.

    Args:
        counted: the table of each look-up of the watched step.

    Returns:
        Sentences on steps with other look-ups: there, tables and look-ups are joined as in ``note_tables``.
    """
    lookups = find_lookups(graph)
    if not lookups:
        return ["Look-ups were counted, and the profile has no operation that looks rows up (compiled code does it in "
                "kernels of its own): what was counted is not used."]
    unlike = _note_each(graph, lookups, [[table] for table in counted], [(t.rows, t.columns) for t in counted])
    return [f"{unlike} of {len({own.step for own in lookups})} steps look up other tables than the step in which "
            "indices were counted."] if unlike else []


def _note_each(graph: ExecutionGraph, lookups: Sequence[Lookup], tables: list[list[EmbeddingTable]],
               shapes: list[tuple[int, ...]]) -> int:
    """Note the tables of one step's look-ups, with weights of these shapes, at the look-ups of all steps. In place.

    Returns:
        The number of steps with other shapes; their look-ups and tables are joined by sizes.
    """
    writer, unlike = _Writer(graph), 0
    for step in sorted({own.step for own in lookups}):
        of_step = [own for own in lookups if own.step == step]
        alike = [own.shape for own in of_step] == shapes
        unlike += not alike
        of_each = tables if alike else _joined(of_step, [table for part in tables for table in part])
        for own, found in zip(of_step, of_each, strict=True):
            writer.write(own, found)
    return unlike


def note_indices(graph: ExecutionGraph, indices: Indices) -> list[str]:
    """Note the statistics of real indices, or of a distribution, at each look-up, in place; return notes on the rest.

    Tables that are noted already keep their names; new ones are named by their modules, or numbered.

    Raises:
        TableError: the graph looks up no table, or the indices do not fit its tables.
    """
    if known := tables_of(graph):
        return note_tables(graph, indices.of(known))
    lookups = find_lookups(graph)
    if not lookups:
        raise TableError(f"{indices.source} describes indices, and the step looks up no embedding table: leave "
                         "--indices out.")
    first = min(own.step for own in lookups)
    of_each = [own.tables(place) for place, own in enumerate(own for own in lookups if own.step == first)]
    tables = {table.name: table for part in of_each for table in part}  # a module that is called twice has one table
    described = dict(zip(tables, indices.of(list(tables.values())), strict=True))
    _note_each(graph, lookups, [[described[table.name] for table in part] for part in of_each],
               [own.shape for own in lookups if own.step == first])
    unknown = sum(not part for part in of_each)
    return [f"{unknown} of {len(of_each)} look-ups are of several tables whose columns the trace does not record: "
            "their indices stay as they were; record with PyTorch 2.1 or newer."] if unknown else []


@dataclass(slots=True)
class Lookup:
    """One look-up of a step, with its operations.

    Attributes:
        rows: Its rows in ``graph.ops``, outermost first, each with the position of its indices.
        step: Its step of the graph, ``NONE`` outside steps.
        module: Path of the module that called it, empty where not known.
        shape: Shape of its weight; one dimension where several tables lie in the weight.
        lookups: Indices in all.
        bags: Number of vectors that it returns.
        pooled: Whether a bag may have several look-ups.
        dtype: Recorded dtype of the weight.
        sequence: Autograd's sequence number, ``NONE`` if not known.
        batched_tables: Number of tables in the weight, where the operation gives it.
        columns: Columns of each table; 0 where the operation does not give them.
    """

    rows: list[tuple[int, int]]
    step: int
    module: str
    shape: tuple[int, ...]
    lookups: int
    bags: int
    pooled: bool
    dtype: str
    sequence: int
    batched_tables: int = 1
    columns: int = 0

    @property
    def elements(self) -> int:
        """Return how many elements the weight has."""
        return prod(self.shape)

    def tables(self, place: int) -> list[EmbeddingTable]:
        """Return its tables. Several in one weight are assumed to have equal rows; [] if their columns are unknown.

        Args:
            place: index of the look-up in its step, for a name where no module gives one.
        """
        name, count, columns = self.module or f"table {place}", self.batched_tables, self.columns
        if len(self.shape) == _MATRIX:
            count, columns = 1, self.shape[1]
        if not columns and count > 1:
            return []
        rows, columns = self.elements // (max(columns, 1) * count), max(columns, 1)
        return [EmbeddingTable(f"{name}.{at}" if count > 1 else name, max(rows, 1), columns,
                               bag=self.lookups / max(self.bags, 1), pooling="sum" if self.pooled else "none")
                for at in range(count)]


def find_lookups(graph: ExecutionGraph) -> list[Lookup]:
    """Return the look-ups of a graph in time order, with the rows of their gradients."""
    ops = graph.ops
    rows = _rows(graph)
    rows = rows[np.argsort(ops.start_ns[rows], kind="stable")]
    kinds = {row: _position(graph.string(int(ops.name[row]))) for row in rows.tolist()}
    found: dict[int, Lookup] = {}
    gradients: list[int] = []
    for row in rows.tolist():
        position = kinds[row]
        if position is None:
            gradients.append(row)
            continue
        outer = _outermost(ops.parent, row, kinds)
        if outer in found:
            found[outer].rows.append((row, position[1]))
            found[outer].sequence = max(found[outer].sequence, int(ops.sequence[row]))
            continue
        own = _read(graph, row, position)
        if own is not None:
            found[outer] = own
    lookups = list(found.values())
    _add_gradients(graph, lookups, gradients)
    return lookups


def _read(graph: ExecutionGraph, row: int, position: tuple[int, int]) -> Lookup | None:
    ops, arguments = graph.ops, graph.arguments(row)
    if len(arguments) <= position[1]:
        return None
    weight, indices = arguments[position[0]], arguments[position[1]]
    if not weight.shape or indices.shape is None or not all(type(n) is int for n in (*weight.shape, *indices.shape)):
        return None
    name = graph.string(int(ops.name[row]))
    lookups, pooled = prod(indices.shape), "bag" in name or position in BATCHED.values()
    bags, tables = lookups, 1
    if pooled:
        offsets = arguments[position[1] + 1] if len(arguments) > position[1] + 1 else None
        length = prod(offsets.shape) if offsets is not None and offsets.shape else 0
        if len(indices.shape) == 2 or not length:
            bags = indices.shape[0]
        else:
            include_last = position in BATCHED.values() or (len(arguments) > 7 and arguments[7].value == "True") \
                or (len(arguments) > 8 and arguments[8].value == "True" and name == "aten::embedding_bag")
            bags = length - int(include_last)
    columns = 0
    if position in BATCHED.values():
        at = position[0] + (5 if position[0] else 2)
        ends, total = arguments[at:at + 2]  # D_offsets, total_D
        tables = max(prod(ends.shape or (1,)) - 1, 1)
        columns = int(total.value) // tables if _COUNT.fullmatch(total.value) else 0
    module = graph.string(int(ops.module[row])).replace("/", ".")
    return Lookup([(row, position[1])], int(ops.step[row]), module, tuple(weight.shape), lookups,
                  bags, pooled, weight.dtype, int(ops.sequence[row]), tables, columns)


def _add_gradients(graph: ExecutionGraph, lookups: list[Lookup], rows: list[int]) -> None:
    """Join gradients to look-ups by autograd's number, else by equal sizes from the last look-up to the first."""
    ops = graph.ops
    by_number = {(own.step, own.sequence): own for own in lookups if own.sequence != NONE}
    left: dict[tuple[int, tuple[int, ...]], list[Lookup]] = {}
    for own in lookups:
        left.setdefault((own.step, own.shape), []).append(own)
    before: Lookup | None = None
    before_end = -1
    for row in rows:
        step = int(ops.step[row])
        if before is not None and ops.start_ns[row] < before_end:  # inside the gradient just joined
            before.rows.append((row, _OF_BACKWARD))
            continue
        last = left.get((step, _gradient_shape(graph, row)), [])[-1:]
        numbered = [by_number[step, number] for number in _numbers(graph, row) if (step, number) in by_number]
        if not (numbered or last):
            continue
        own = (numbered or last)[0]
        group = left[step, own.shape]
        if own in group:
            group.remove(own)
        own.rows.append((row, _OF_BACKWARD))
        before, before_end = own, int(ops.start_ns[row] + ops.duration_ns[row])


def _numbers(graph: ExecutionGraph, row: int) -> list[int]:
    """Return autograd's sequence numbers of an operation and of the operations around it."""
    found = []
    while row >= 0:
        if graph.ops.sequence[row] != NONE:
            found.append(int(graph.ops.sequence[row]))
        row = int(graph.ops.parent[row])
    return found


def _gradient_shape(graph: ExecutionGraph, row: int) -> tuple[int, ...]:
    """Return the shape of the weight whose gradient an operation makes; its rows are an argument."""
    arguments = graph.arguments(row)
    columns = arguments[0].shape[-1] if arguments and arguments[0].shape else 0
    place = {"aten::_embedding_bag_backward": 6, "aten::_embedding_bag_dense_backward": 5,
             "aten::_embedding_bag_sparse_backward": 5}.get(graph.string(int(graph.ops.name[row])), 2)
    text = arguments[place].value if len(arguments) > place else ""
    return (int(text) if _COUNT.fullmatch(text) else 0, columns)


def _joined(lookups: list[Lookup], tables: Sequence[EmbeddingTable]) -> list[list[EmbeddingTable]]:
    """Return the tables of each look-up of a step; [] where no table fits."""
    by_shape: dict[tuple[int, ...], list[EmbeddingTable]] = {}
    for table in tables:
        by_shape.setdefault((table.rows, table.columns), []).append(table)
    turn: dict[tuple[int, ...], int] = {}
    found = []
    for own in lookups:
        fitting = by_shape.get(own.shape, [])
        if not fitting:
            found.append(_all_in(own, tables))
            continue
        named = [table for table in fitting if _is_of(table.name, own.module)]
        place = turn.get(own.shape, 0)
        turn[own.shape] = place + 1
        found.append(named[:1] or [fitting[place % len(fitting)]])
    return found


def _is_of(table: str, module: str) -> bool:
    return bool(module) and (module == table or module.endswith(f".{table}") or table.endswith(f".{module}"))


def _all_in(own: Lookup, tables: Sequence[EmbeddingTable]) -> list[EmbeddingTable]:
    """Return all tables of a weight that holds several one after another."""
    if len(own.shape) == 2:
        alike = [table for table in tables if table.columns == own.shape[1]]
        return alike if len(alike) > 1 and sum(table.rows for table in alike) == own.shape[0] else []
    together = len(tables) == own.batched_tables and sum(t.rows * t.columns for t in tables) == own.elements
    return list(tables) if together else []


class _Writer:
    """Writes texts into the graph's arguments; each distinct row of arguments is written once."""

    def __init__(self, graph: ExecutionGraph) -> None:
        self._graph, self._code_of = graph, string_coder(graph)

    def write(self, own: Lookup, tables: Sequence[EmbeddingTable]) -> None:
        text = note_text(tables) if tables else ""
        ops = self._graph.ops
        column = ops.writable("scalars")
        for row, position in own.rows:
            scalars = [str(value) for value in list_of(self._graph.string(int(ops.scalars[row])))]
            scalars += [""] * (position + 1 - len(scalars))
            scalars[position] = text
            column[row] = self._code_of(json.dumps(scalars))


def _plain(table: EmbeddingTable) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, part in _NAMES.items():
        value = getattr(table, name)
        if value == part.default:
            continue
        found[name] = [_short(each) for each in value] if isinstance(value, tuple) else _short(value)
    return found


def _short(value: Any) -> Any:
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value


def _position(name: str) -> tuple[int, int] | None:
    """Return the positions of weight and indices of a look-up; ``None`` for a gradient."""
    if name in FORWARD:
        return FORWARD[name]
    return next((position for start, position in BATCHED.items() if name.startswith(start)), None)


def _rows(graph: ExecutionGraph) -> np.ndarray:
    """Return the rows of ``graph.ops`` that are look-ups or their gradients."""
    ops = graph.ops
    lookup = named(ops.name, graph.strings, lambda text: text in FORWARD or text in BACKWARD or text.startswith(
        tuple(BATCHED)))
    return np.flatnonzero(lookup & (ops.kind == OpKind.OPERATION))


def _outermost(parent: np.ndarray, row: int, among: dict[int, Any]) -> int:
    found, here = row, int(parent[row])
    while here >= 0:
        if here in among:
            found = here
        here = int(parent[here])
    return found
