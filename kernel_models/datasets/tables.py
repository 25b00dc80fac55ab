"""Recognising and reading tables: one small reader for each signature of columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kernel_models.datasets.samples import DataError, Samples
from kernel_models.device import DeviceSpec
from tracer.errors import reason_of
from tracer.table_input import TABLES, read_frame

if TYPE_CHECKING:
    import pandas

FORMS = ("gemm_forward", "attention_decode", "attention_causal", "vidur_blocks", "neusight", "campaign",
         "operator_table", "generic")
"""Modules with a reader each, the most specific first. A new form of table is a new module here."""
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


def readers() -> list[Reader]:
    """All readers, in the order of ``FORMS``."""
    return [import_module(f"kernel_models.datasets.{name}").READER for name in FORMS]


def read_table(path: Path, spec: DeviceSpec | None = None, notes: list[str] | None = None) -> list[Samples]:
    """The samples of one table.

    Args:
        path: Parquet or CSV.
        spec: the device of a table that names none.
        notes: is told how many rows are of no use.

    Raises:
        TableInputError: the file cannot be read.
        DataError: no reader knows its columns, it names no device and none was given, or it has no usable row.
    """
    frame = read_frame(path)
    if not len(frame):
        raise DataError(f"{path} is an empty table; there is nothing to learn from it.")
    known = readers()
    for reader in known:
        if reader.columns <= set(reader.renamed(frame).columns):
            frame = reader.renamed(frame)
            break
    else:
        nearest = max(known, key=lambda reader: len(reader.columns & set(frame.columns)) / len(reader.columns))
        missing = ", ".join(sorted(nearest.columns - set(frame.columns))[:6])
        raise DataError(f"{path} has no known table's columns; as a table of {nearest.name} it lacks {missing}.")
    if not reader.names_device:
        if spec is None:
            raise DataError(f"{path} does not name the device it was measured on; name it with --device.")
        frame = frame.assign(**{DEVICE: spec.name})
    check_sizes(frame, reader.sizes, path)
    try:
        found = [one for one in reader.read(frame, path) if len(one)]
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:  # what odd cells do
        raise DataError(f"{path} cannot be read as a table of {reader.name}: {reason_of(error)}"
                        "; check its values.") from error
    for one in found:
        if not (np.isfinite(one.measured_us).all() and (one.measured_us > 0).all()):
            raise DataError(f"{path} holds times that are not positive numbers of microseconds; remove those rows.")
    if not found:
        raise DataError(f"{path} holds no row of a known kind of kernel; there is nothing to learn from it.")
    left_out = len(frame) - sum(map(len, found))
    if notes is not None and reader.takes_all and left_out > 0:
        notes.append(f"{path.name}: {left_out:,} of {len(frame):,} rows were left out: they are no single kernel of a "
                     "known kind with known sizes.")
    return found


def check_sizes(frame: pandas.DataFrame, columns: Iterable[str], path: Path, least: int = 1,
                most: int = LARGEST) -> None:
    """Refuse columns of sizes that hold anything but whole numbers from ``least`` to ``most``.

    Raises:
        DataError: naming the column, the row and the value.
    """
    import pandas

    for name in columns:
        numbers = pandas.to_numeric(frame[name], errors="coerce").to_numpy(float)
        with np.errstate(invalid="ignore"):
            wrong = ~((numbers >= least) & (numbers <= most) & (numbers == np.floor(numbers)))
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            raise DataError(f"{path} holds {str(frame[name].iloc[row])[:40]!r} as {name} in row "
                            f"{row + 1:,}, which is no whole number from {least} to {most:,}; "
                            "correct or remove that row.")
