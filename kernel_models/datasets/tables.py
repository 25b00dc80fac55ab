"""The form of a table: the columns that it is known by, and the function that reads it."""

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
"""No size of a tensor is larger."""
DEVICE = "device"
"""Column of the device's name that is added to a table which names none."""


class Reader(NamedTuple):
    """A reader: the columns that a table must have to be its, and the function that reads it.

    ``names_device`` is false where the table does not tell its device: ``DEVICE`` is then added to it. ``takes_all`` is
    false where a reader leaves rows out on purpose, which is then not worth a note. ``sizes`` are columns that hold a
    whole number from 1 in every row. ``aliases`` are other names of columns, by the names that it reads.
    """

    name: str
    columns: frozenset[str]
    read: Callable[[pandas.DataFrame, Path], Iterator[Samples]]
    names_device: bool = True
    takes_all: bool = True
    sizes: tuple[str, ...] = ()
    aliases: Mapping[str, tuple[str, ...]] = MappingProxyType({})

    def renamed(self, frame: pandas.DataFrame) -> pandas.DataFrame:
        """Return the table with this reader's names of its columns."""
        names = {}
        for name, others in self.aliases.items():
            known = [one for one in others if one in frame.columns]
            if name not in frame.columns and known:
                names[known[0]] = name
        return frame.rename(columns=names) if names else frame


def is_table(name: str) -> bool:
    """Return whether a file's name is a table's."""
    return name.lower().endswith(TABLES)


def check_sizes(frame: pandas.DataFrame, columns: Iterable[str], path: Path, least: int = 1,
                most: int = LARGEST) -> None:
    """Refuse columns of sizes that hold anything but whole numbers from ``least`` to ``most``.

    Raises:
        TableInputError: naming the line, the column and the value.
    """
    for name in columns:
        numbers = pandas.to_numeric(frame[name], errors="coerce").to_numpy(float)
        with np.errstate(invalid="ignore"):
            wrong = ~((numbers >= least) & (numbers <= most) & (numbers == np.floor(numbers)))
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            raise cell_error(place(path, int(frame.index[row])), name, frame[name].iloc[row],
                             f"whole number from {least} to {most:,}")


def check_texts(frame: pandas.DataFrame, columns: Iterable[str], path: Path) -> None:
    """Refuse columns of words that lack one, or hold a number.

    Raises:
        TableInputError: naming the line, the column and the value.
    """
    for name in columns:
        wrong = [row for row, value in enumerate(frame[name]) if not isinstance(value, str)]
        if wrong:
            raise cell_error(place(path, int(frame.index[wrong[0]])), name, frame[name].iloc[wrong[0]], "word")
