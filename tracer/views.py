"""Views of a graph for people: rows with decoded strings, pandas frames and decoded arguments.

Code that computes works on the columns; nothing here is used by the simulator.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from tracer.arrays import Int64
from tracer.decode import list_of
from tracer.graph import (
    NONE,
    ExecutionGraph,
    GapKind,
    KernelKind,
    LaunchKind,
    OpKind,
    Phase,
    Place,
    SyncKind,
    WaitSource,
)

if TYPE_CHECKING:
    import pandas

# Integer columns that are members of an enumeration, by table.
_ENUMS: dict[str, dict[str, type]] = {
    "ops": {"kind": OpKind, "phase": Phase, "place": Place},
    "launches": {"kind": LaunchKind},
    "kernels": {"kind": KernelKind},
    "syncs": {"kind": SyncKind},
    "gaps": {"kind": GapKind},
    "collectives": {"wait_source": WaitSource},
}

_MOST_NESTED = 2
"""Lists within lists of tensors."""
_MOST_ELEMENTS = 1 << 60
"""Most elements of a tensor: no memory holds more, and their bytes still fit into a whole number of 64 bits."""


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of an operation as far as it was recorded.

    ``dtype`` is the profiler's type name ("float", "c10::BFloat16", "Scalar", "TensorList", or "" for other
    things). ``shape`` and ``stride`` are in elements, nested for a list of tensors, ``None`` where not recorded;
    ``value`` is the text of a number or list of numbers, "" where not recorded.
    """

    dtype: str
    shape: tuple[Any, ...] | None = None
    stride: tuple[Any, ...] | None = None
    value: str = ""


class Row(SimpleNamespace):
    """One row of a table: an attribute a column, strings and enumerations decoded, ``None`` for "none".

    Read-only; ``row.index`` is its number in the table.
    """

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("rows are read-only views; change the table's columns instead")

    def __delattr__(self, name: str) -> None:
        raise AttributeError("rows are read-only views; change the table's columns instead")


def row(graph: ExecutionGraph, table: str, index: int) -> Row:
    """Row ``index`` (negative counts from the end) of a table such as ``"ops"``.

    Raises:
        IndexError: the table has no such row.
        KeyError: the graph has no such table.
    """
    kind = ExecutionGraph.TABLES[table]
    columns = getattr(graph, table).columns()
    size = len(getattr(graph, table))
    if not -size <= index < size:
        raise IndexError(f"row {index} of {table}, which has {size}")
    index %= size
    values: dict[str, Any] = {"index": index}
    for name, column in columns.items():
        value = column[index].item()
        if name in kind.STRING_COLUMNS:
            value = graph.strings[value] if value >= 0 else None
        elif name in _ENUMS.get(table, {}):
            value = _ENUMS[table][name](value) if value >= 0 else None
        elif value == NONE and not name.endswith("_ns"):
            value = None
        values[name] = value
    return Row(**values)


def to_pandas(graph: ExecutionGraph, table: str) -> pandas.DataFrame:
    """A table as a DataFrame: strings and enumerations as categoricals (missing ones null), numbers as stored.

    Raises:
        KeyError: the graph has no such table.
    """
    import pandas

    kind = ExecutionGraph.TABLES[table]
    frame: dict[str, Any] = {}
    for name, column in getattr(graph, table).columns().items():
        if name in kind.STRING_COLUMNS:
            used = np.unique(column[column >= 0])
            # A string may have been stored twice; categories must differ.
            texts, position = np.unique([graph.strings[code] for code in used.tolist()], return_inverse=True)
            codes = _categorical_codes(column, used, position) if len(used) else column
            frame[name] = pandas.Categorical.from_codes(codes, categories=texts.astype(object))
        elif name in _ENUMS.get(table, {}):
            members = list(_ENUMS[table][name])  # type: ignore[call-overload]
            frame[name] = pandas.Categorical.from_codes(column, categories=[member.name.lower() for member in members])
        else:
            frame[name] = column
    return pandas.DataFrame(frame)


def arguments(graph: ExecutionGraph, op: int) -> list[Argument]:
    """The arguments of operation ``op``, in order; empty where the trace recorded none.

    Raises:
        IndexError: there is no such operation.
    """
    ops = graph.ops
    dtypes, shapes, strides, scalars = (
        list_of(graph.string(int(column[op]))) for column in (ops.dtypes, ops.shapes, ops.strides, ops.scalars)
    )
    count = max(len(part) for part in (dtypes, shapes, strides, scalars))
    return [
        Argument(
            dtype=str(_at(dtypes, i, "")),
            shape=shape,
            stride=_strides(_at(strides, i, None), shape),
            value=str(_at(scalars, i, "")),
        )
        for i in range(count)
        for shape in [_sizes(_at(shapes, i, None))]
    ]


def _categorical_codes(column: Int64, used: Int64, position: Int64) -> Int64:
    """Codes into the sorted texts for a column of string codes, -1 for none."""
    at = np.minimum(np.searchsorted(used, column), len(used) - 1)
    return np.where(column >= 0, position[at], NONE)


def _at(values: list[Any], index: int, missing: Any) -> Any:
    return values[index] if index < len(values) else missing


def _sizes(value: Any) -> tuple[Any, ...] | None:
    """Sizes of a tensor, or of the tensors in a list; ``None`` for what is no such thing, empty within a list."""
    if not isinstance(value, list):
        return None
    if all(type(part) is int for part in value):
        return tuple(value) if min(value, default=0) >= 0 and prod(value) <= _MOST_ELEMENTS else None
    return tuple(_listed(value))


def _listed(value: list[Any], depth: int = 0) -> Iterator[tuple[int, ...]]:
    """Yield the sizes of the tensors in a list, and in lists within it."""
    for part in value:
        if isinstance(part, list) and depth < _MOST_NESTED and not all(type(size) is int for size in part):
            yield from _listed(part, depth + 1)
        else:
            yield _sizes(part if depth < _MOST_NESTED else None) or ()


def _strides(value: Any, shape: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    """Strides that belong to sizes, of a tensor or of those in a list; ``None`` where one is not as long as the
    other."""
    if not isinstance(value, list) or shape is None or len(value) != len(shape):
        return None
    if all(type(size) is int for size in shape):
        return tuple(value) if all(type(part) is int and 0 <= part <= _MOST_ELEMENTS for part in value) else None
    return tuple(_strides(part, one) or () for part, one in zip(value, shape, strict=True))
