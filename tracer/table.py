"""A ``Table``: equally long NumPy columns, of which an ``ExecutionGraph`` has several."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntEnum
from functools import cache
from typing import Any, ClassVar

import numpy as np

NONE = -1
"""Code of a missing string, parent, step, launch, op or number in every integer column."""


def is_constant(column: np.ndarray) -> bool:
    """Whether a column is one value, kept once: ``np.broadcast_to``, which cannot be written to."""
    return len(column) > 0 and column.strides == (0,)


def is_time(column: str) -> bool:
    """Whether a column of this name holds times or durations, which are always there to be edited in place."""
    return column.endswith("_ns")


@dataclass(slots=True)
class Table:
    """Equally long NumPy columns of whole numbers. Subclasses only list them, as ``Int64``, ``Int32`` or ``Int8``.

    Columns of what was read may be a single value that is kept once and cannot be written to, see ``writable``; times
    (``is_time``) never are.
    """

    STRING_COLUMNS: ClassVar[frozenset[str]] = frozenset()
    """Columns whose values are codes into ``graph.strings``."""
    ENUMS: ClassVar[dict[str, type[IntEnum]]] = {}
    """Columns whose values are members of an enumeration."""
    ADDED: ClassVar[frozenset[str]] = frozenset()
    """Columns that files of earlier versions lack; they are read as ``NONE``."""

    def __len__(self) -> int:
        return len(getattr(self, next(iter(self.layout()))))

    @classmethod
    @cache  # opening a small file would spend most of its time asking for them
    def layout(cls) -> dict[str, np.dtype]:
        """Names of the columns, in order, and their NumPy types."""
        return {column.name: np.dtype(str(column.type).lower()) for column in fields(cls)}

    def columns(self) -> dict[str, np.ndarray]:
        """Name → array, without copying."""
        return {name: getattr(self, name) for name in self.layout()}

    @classmethod
    def empty(cls, rows: int = 0) -> Any:
        """A table of ``rows`` rows, every value ``NONE``."""
        return cls(**{name: np.full(rows, NONE, dtype) for name, dtype in cls.layout().items()})

    @classmethod
    def blank(cls, rows: int) -> Any:
        """As ``empty``, but in columns that take no memory and cannot be written to: they are there to be replaced."""
        return cls(**{name: np.broadcast_to(column, rows) for name, column in cls.empty(1).columns().items()})

    def writable(self, name: str) -> np.ndarray:
        """A column to write to: one that is a single value, kept once, is written out first."""
        if is_constant(getattr(self, name)):
            setattr(self, name, getattr(self, name).copy())
        column: np.ndarray = getattr(self, name)
        return column

    def take(self, rows: np.ndarray) -> Any:
        """A new table of the given rows (indices or mask), in that order."""
        return type(self)(**{name: column[rows] for name, column in self.columns().items()})
