"""A ``Table``: equally long NumPy columns, of which an ``ExecutionGraph`` has several."""

from __future__ import annotations

from dataclasses import dataclass, fields
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
    """Equally long NumPy columns. Subclasses only list their columns.

    Columns of what was read may be a single value that is kept once and cannot be written to, see ``writable``; times
    (``is_time``) never are.
    """

    DTYPES: ClassVar[dict[str, Any]] = {}
    STRING_COLUMNS: ClassVar[frozenset[str]] = frozenset()
    """Columns whose values are codes into ``graph.strings``."""
    ADDED: ClassVar[frozenset[str]] = frozenset()
    """Columns that files of earlier versions lack; they are read as ``NONE``."""

    def __len__(self) -> int:
        return len(getattr(self, fields(self)[0].name))

    @classmethod
    def column_names(cls) -> tuple[str, ...]:
        """Names of the columns, in order."""
        return tuple(f.name for f in fields(cls))

    def columns(self) -> dict[str, np.ndarray]:
        """Name → array, without copying."""
        return {name: getattr(self, name) for name in self.column_names()}

    @classmethod
    def empty(cls, rows: int = 0) -> Any:
        """A table of ``rows`` rows, every value ``NONE`` (floats: NaN)."""
        missing = {True: np.nan, False: NONE}
        return cls(**{
            name: np.full(rows, missing[np.issubdtype(cls.column_dtype(name), np.floating)], cls.column_dtype(name))
            for name in cls.column_names()
        })

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

    @classmethod
    def column_dtype(cls, column: str) -> np.dtype:
        """The NumPy type of a column."""
        return np.dtype(cls.DTYPES[column])

    def take(self, rows: np.ndarray) -> Any:
        """A new table of the given rows (indices or mask), in that order."""
        return type(self)(**{name: column[rows] for name, column in self.columns().items()})
