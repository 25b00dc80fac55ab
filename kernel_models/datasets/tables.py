"""The form of a table: the columns that identify it, and the function that reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from kernel_models.datasets.samples import Samples
from tracer.lazy import pandas
from tracer.table_input import TABLES, cell_error, place

LARGEST = 2**40
"""Largest size of a tensor."""
DEVICE = "device"
"""Column with the device's name, added to a table that names no device."""


class Reader(NamedTuple):
    """A reader: the columns that a table must have for it, and the function that reads the table.

    ``names_device`` is false where the table does not name its device: ``DEVICE`` is then added to it. ``takes_all`` is
    false where a reader leaves rows out on purpose, so that no note is needed. ``sizes`` are columns that hold a whole
    number from 1 in every row. ``aliases`` are other names of columns, by the names that the reader expects.
    """

    name: str
    columns: frozenset[str]
    read: Callable[[pandas.DataFrame, Path], Iterator[Samples]]
    names_device: bool = True
    takes_all: bool = True
    sizes: tuple[str, ...] = ()
    aliases: Mapping[str, tuple[str, ...]] = MappingProxyType({})

    def renamed(self, frame: pandas.DataFrame) -> pandas.DataFrame:
        """Return the table with its columns renamed to the names that this reader expects."""
        names = {}
        for name, others in self.aliases.items():
            known = [one for one in others if one in frame.columns]
            if name not in frame.columns and known:
                names[known[0]] = name
        return frame.rename(columns=names) if names else frame


def is_table(name: str) -> bool:
    """Return whether a file's name has the ending of a table."""
    return name.lower().endswith(TABLES)


def check_sizes(frame: pandas.DataFrame, columns: Iterable[str], path: Path, least: int = 1,
                most: int = LARGEST) -> None:
    """Refuse columns of sizes that hold anything but whole numbers from ``least`` to ``most``.

    Raises:
        TableInputError: names the line, the column and the value.
    """
    for name in columns:
        numbers = pandas.to_numeric(frame[name], errors="coerce").to_numpy(float)
        with np.errstate(invalid="ignore"):
            wrong = ~((numbers >= least) & (numbers <= most) & (numbers == np.floor(numbers)))
        if not wrong.any() and frame[name].dtype == object:  # a Parquet file may hold numbers as text
            wrong = np.array([isinstance(value, str) for value in frame[name]])
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            raise cell_error(place(path, int(frame.index[row])), name, frame[name].iloc[row],
                             f"whole number from {least} to {most:,}")


def check_texts(frame: pandas.DataFrame, columns: Iterable[str], path: Path) -> None:
    """Refuse columns of text with an empty cell or a number.

    Raises:
        TableInputError: names the line, the column and the value.
    """
    for name in columns:
        wrong = [row for row, value in enumerate(frame[name]) if not isinstance(value, str)]
        if wrong:
            raise cell_error(place(path, int(frame.index[wrong[0]])), name, frame[name].iloc[wrong[0]], "word")
