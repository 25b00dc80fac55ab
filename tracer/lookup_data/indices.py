"""Real indices, or a distribution of them: the argument of ``--indices``.

There are five forms, recognised by the text:

- ``zipf:1.05``: rows are drawn by a Zipf law with exponent 1.05; ``zipf:0`` draws them uniformly.
- A Parquet or CSV file, *long*: one row for each look-up, columns ``table``, ``sample``, ``index`` in any order.
  Samples without look-ups need no row.
- A Parquet or CSV file, *wide*: one row for each sample and one column for each table, with its name. A cell is an
  index or a list of indices (in CSV: separated by spaces), or empty. A column ``sample`` is not a table.
- A file of torch (``.pt``, ``.pt.gz``) as published for ``dlrm_datasets``: the tensors (indices, offsets, lengths) of
  one batch. Indices are all look-ups, table after table; offsets are their bounds [tables·samples + 1]; lengths are
  bag lengths [tables, samples]. Tables are known by their order.
- The same in Parquet: one row with lists ``indices``, ``offsets`` (may be absent) and ``lengths``, a list of one list
  for each table. Or one row for each table with its own three lists, and optionally its name in a column ``table``.

Only counts leave this module: how often rows repeat, and how long bags are.
"""

from __future__ import annotations

import gzip
import io
import math
import os
import pickle
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tracer.arrays import Int64
from tracer.guard import FREE_TEXT, GROWTH, DecodeError, check_cells
from tracer.input_file import read_input
from tracer.lazy import arrow_csv, compute, pyarrow
from tracer.lookup_data.files import MOST_TABLES
from tracer.lookup_data.tables import BAG_QUANTILES, STEEPEST_SKEW, EmbeddingTable, TableError, reuse_histogram
from tracer.table_input import TableInputError, read_parquet

LAW = "zipf:"
_WORDS = {"table", "index", "indices", "offsets", "lengths", "values"}
"""Columns that mark the long or the published layout, and therefore are no names of tables."""


_LONG_ROW = 24
"""Bytes of a row of the long layout: table, sample and index."""


@dataclass(frozen=True, slots=True)
class TableIndices:
    """The look-ups of one table in a batch.

    Attributes:
        name: name of the table; empty where the file identifies tables by order.
        indices: rows looked up [look-ups], bag after bag.
        lengths: look-ups of each sample [samples].
    """

    name: str
    indices: Int64
    lengths: Int64

    def of(self, table: EmbeddingTable) -> EmbeddingTable:
        """Return the table with the statistics of this batch.

        Raises:
            TableError: an index is not below the table's number of rows.
        """
        if len(self.indices) and int(self.indices.max()) >= table.rows:
            raise TableError(f"table {table.name!r} has {table.rows:,} rows, and the indices go up to "
                             f"{int(self.indices.max()):,}: they are of another table.")
        return counted(table, self.indices, self.lengths)


@dataclass(frozen=True, slots=True)
class Indices:
    """The argument of ``--indices``: a Zipf law (``skew``) for every table, or the look-ups of some tables.

    Attributes:
        source: the argument as written.
        skew: exponent of the Zipf law, ``None`` where look-ups are known.
        tables: in the file's order.
    """

    source: str
    skew: float | None = None
    tables: tuple[TableIndices, ...] = ()

    def of(self, tables: Sequence[EmbeddingTable]) -> list[EmbeddingTable]:
        """Return a model's tables, each with the statistics of these indices.

        Tables of a file are matched by name, or by order if their numbers are equal; a file of one table describes
        every table.

        Raises:
            TableError: a table has no indices, or they do not fit it.
        """
        if self.skew is not None:
            return [replace(table, skew=self.skew, reuse=(), reuse_lookups=0, unique=0) for table in tables]
        named = {own.name: own for own in self.tables if own.name}
        if all(table.name in named for table in tables):
            return [named[table.name].of(table) for table in tables]
        if some := [table.name for table in tables if table.name in named]:
            lacking = next(table.name for table in tables if table.name not in named)
            raise TableError(f"{self.source} has indices of table {some[0]!r} and none of {lacking!r}; give columns of "
                             "all of the model's tables by their names, or of none of them to go by their order.")
        if len(self.tables) == 1:
            return [self.tables[0].of(table) for table in tables]
        if len(self.tables) != len(tables):
            lacking = next((table.name for table in tables if table.name not in named), "")
            raise TableError(f"{self.source} has indices of {len(self.tables)} tables, and the model looks up "
                             f"{len(tables)}: name the file's tables as the model's ({lacking!r} is not among them), "
                             "or give as many in their order.")
        return [own.of(table) for own, table in zip(self.tables, tables, strict=True)]


def counted(table: EmbeddingTable, indices: Int64, lengths: Int64) -> EmbeddingTable:
    """Return the table with the statistics of one batch: bags, reuse, rows touched.

    Args:
        indices: rows looked up [look-ups].
        lengths: look-ups of each sample [samples].
    """
    if not len(indices):
        return replace(table, bag=0.0, longest_bag=0, bag_quantiles=(), reuse=(), reuse_lookups=0, unique=0)
    quantiles = np.quantile(lengths, BAG_QUANTILES)
    return replace(
        table, bag=len(indices) / len(lengths), longest_bag=int(lengths.max()), bag_quantiles=tuple(quantiles.tolist()),
        reuse=tuple(reuse_histogram(indices).tolist()), reuse_lookups=len(indices), unique=len(np.unique(indices)))


def read_indices(text: str) -> Indices:
    """Read the text of ``--indices``.

    Raises:
        TableError: the exponent is not valid.
        TableInputError: the file cannot be read, or has no known layout.
    """
    if text.startswith(LAW):
        return Indices(text, skew=_skew(text))
    path = os.fspath(text)
    plain = path.lower().removesuffix(".gz")
    try:
        data = read_input(path)
        if path.lower().endswith(".gz"):
            data = _unpacked(data)
        if plain.endswith((".pt", ".pth")):
            tables = _of_torch(data)
        elif plain.endswith((".parquet", ".csv")):
            tables = _of_columns(_columns(data, plain))
        else:
            raise ValueError(f"its name ends in none of .parquet, .csv, .pt and .pt.gz (a law is written {LAW}1.05)")
        _check(tables)
    except FileNotFoundError:
        raise TableInputError(f"There is no file {path}; give indices as a file, or a law such as {LAW}1.05.") from None
    except ModuleNotFoundError:
        raise TableInputError(f"Reading {path} needs PyTorch, which is not installed (pip install "
                              "'foretrace[capture]'); or give the indices as Parquet.") from None
    except (OSError, EOFError, ValueError, TypeError, MemoryError, DecodeError) as error:
        why = str(error).splitlines()[0] if str(error) else "it is damaged"
        raise TableInputError(f"{path} cannot be read as indices: {why}. Give columns table, sample, index, or "
                              "a column a table, or lists of indices and lengths.") from None
    return Indices(text, tables=tables)


def _skew(text: str) -> float:
    try:
        skew = float(text.removeprefix(LAW))
    except ValueError:
        skew = math.nan
    if not 0 <= skew <= STEEPEST_SKEW:
        raise TableError(f"{text} is no Zipf law: write {LAW}S with an exponent S from 0 (rows drawn evenly) to "
                         f"{STEEPEST_SKEW:g}.")
    return skew


def _unpacked(data: bytes) -> bytes:
    most = max(GROWTH * len(data), FREE_TEXT)
    with gzip.open(io.BytesIO(data)) as stream:
        found = stream.read(most + 1)
    if len(found) > most:
        raise ValueError(f"it unpacks to more than {GROWTH} times its size")
    return found


def _columns(data: bytes, name: str) -> pyarrow.Table:
    if name.endswith(".csv"):
        if (columns := data.count(b",", 0, data.find(b"\n"))) > MOST_TABLES:  # before each column becomes an object
            raise ValueError(f"it has {columns:,} columns, which is more than {MOST_TABLES:,} tables")
        # Not by ``read_frame``: both formats are read as Arrow columns, which can hold lists, from bytes in memory.
        return arrow_csv.read_csv(io.BytesIO(data))
    with io.BytesIO(data) as stream:
        return read_parquet(stream)


def _of_columns(table: pyarrow.Table) -> tuple[TableIndices, ...]:
    if len(set(table.column_names)) < len(table.column_names):
        raise ValueError("two of its columns have one name")
    if {"table", "sample", "index"} <= set(table.column_names):
        return _long(table)
    if {"indices", "lengths"} <= set(table.column_names):
        return _published(table)
    if odd := sorted(_WORDS & set(table.column_names)):
        raise ValueError(f"it has a column {odd[0]!r} and not the others of that layout (table, sample, index; or "
                         f"indices, offsets, lengths): its columns are {', '.join(table.column_names[:6])}")
    names = [name for name in table.column_names if name != "sample"]
    if not names or not len(table):
        raise ValueError("it has no look-ups")
    return tuple(_wide(name, table.column(name)) for name in names)


def _long(table: pyarrow.Table) -> tuple[TableIndices, ...]:
    of = np.asarray(table.column("table").to_numpy(zero_copy_only=False)).astype(str)
    sample, index = (_whole(table.column(name), name) for name in ("sample", "index"))
    _, sample = np.unique(sample, return_inverse=True)
    samples = int(sample.max()) + 1 if len(sample) else 0
    names, first, place = np.unique(of, return_index=True, return_inverse=True)
    check_cells(samples, len(names), _LONG_ROW * len(of))
    rows = np.split(np.argsort(place, kind="stable"), np.cumsum(np.bincount(place))[:-1]) if len(of) else []
    return tuple(TableIndices(str(names[at]), index[own], np.bincount(sample[own], minlength=samples).astype(np.int64))
                 for at in np.argsort(first).tolist() for own in (rows[at],))


def _published(table: pyarrow.Table) -> tuple[TableIndices, ...]:
    """Return look-ups, bounds and bag lengths from lists, where one row holds all tables or each row holds one."""
    names = set(table.column_names)
    if odd := sorted(names - {"table", "indices", "offsets", "lengths"}):
        raise ValueError(f"beside indices and lengths it has a column {odd[0]!r}, which is of no layout that is known")
    rows = table.to_pylist()
    if not rows:
        raise ValueError("it has no look-ups")
    if len(rows) == 1 and "table" not in names:
        lengths = _numbers(rows[0]["lengths"], "lengths")
        if lengths.ndim != 2:
            raise ValueError("its one row must have, as lengths, a list for each table of what each sample looks up")
        offsets = rows[0].get("offsets")
        return _of_batch(_numbers(rows[0]["indices"], "indices"),
                         None if offsets is None else _numbers(offsets, "offsets"), lengths)
    found = []
    for row in rows:
        own = {name: _numbers(row[name], name) for name in ("indices", "offsets", "lengths")
               if row.get(name) is not None}
        if not {"indices", "lengths"} <= set(own) or any(each.ndim != 1 for each in own.values()):
            raise ValueError("each row must have a list of indices and one of lengths, of one table")
        (one,) = _of_batch(own["indices"], own.get("offsets"), own["lengths"][None, :])
        found.append(replace(one, name=str(row.get("table") or "")))
    if len({len(one.lengths) for one in found}) > 1:
        raise ValueError("its tables have lengths of different numbers of samples")
    return tuple(found)


def _numbers(value: Any, name: str) -> Int64:
    """Return integers from a list, or from a list of equally long lists."""
    try:
        found = np.asarray(value)
    except ValueError:
        raise ValueError(f"{name} are lists that differ in length") from None
    if not found.size and found.ndim == 1:
        return np.zeros(0, np.int64)
    if found.ndim not in (1, 2) or found.dtype.kind not in "iu":
        raise ValueError(f"{name} are no lists of whole numbers")
    return found.astype(np.int64)


def _wide(name: str, column: Any) -> TableIndices:
    column = column.combine_chunks()
    if pyarrow.types.is_string(column.type):
        text = compute.utf8_trim_whitespace(column)
        text = compute.if_else(compute.equal(text, ""), pyarrow.scalar(None, pyarrow.string()), text)
        column = compute.utf8_split_whitespace(text)
    if pyarrow.types.is_list(column.type) or pyarrow.types.is_large_list(column.type):
        lengths = compute.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False)
        return TableIndices(name, _whole(column.flatten(), name), lengths.astype(np.int64))
    there = compute.is_valid(column).to_numpy(zero_copy_only=False)
    return TableIndices(name, _whole(column.drop_null(), name), there.astype(np.int64))


def _whole(column: Any, name: str) -> Int64:
    """Return integers from a column of numbers or text."""
    try:
        if column.null_count:
            raise ValueError
        if isinstance(column, pyarrow.ChunkedArray):
            column = column.combine_chunks()
        return np.asarray(column.cast(pyarrow.int64()).to_numpy(zero_copy_only=False), np.int64)
    except (pyarrow.ArrowException, ValueError):
        raise ValueError(f"column {name!r} holds something else than whole numbers") from None


def _of_torch(data: bytes) -> tuple[TableIndices, ...]:
    indices, offsets, lengths = read_tensors(data)
    if indices.ndim != 1 or offsets.ndim != 1 or lengths.ndim != 2:
        raise ValueError("indices and offsets must have one dimension, and lengths two: tables by samples")
    return _of_batch(indices, offsets, lengths)


def _of_batch(indices: Int64, offsets: Int64 | None, lengths: Int64) -> tuple[TableIndices, ...]:
    """Return the tables of one batch's look-ups, table after table; ``lengths`` [tables, samples]."""
    tables, _ = lengths.shape
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    if lengths.min(initial=0) < 0 or lengths.sum() != len(indices) or (offsets is not None and (
            len(offsets) not in (len(bounds) - 1, len(bounds)) or (offsets != bounds[:len(offsets)]).any())):
        raise ValueError("its offsets and lengths do not cover its indices")
    ends = np.concatenate([[0], np.cumsum(lengths.sum(axis=1))])
    return tuple(TableIndices("", indices[ends[t]:ends[t + 1]], lengths[t]) for t in range(tables))


def _check(tables: tuple[TableIndices, ...]) -> None:
    if not any(len(own.indices) for own in tables):
        raise ValueError("it has no look-ups")
    for place, own in enumerate(tables):
        if len(own.indices) and int(own.indices.min()) < 0:
            raise ValueError(f"table {own.name or place!r} has the index {int(own.indices.min())}; rows count from 0")


def read_tensors(data: bytes) -> tuple[Int64, Int64, Int64]:
    """Return the three tensors of integers (indices, offsets, lengths) of a file.

    Raises:
        ValueError: it holds something else.
    """
    import torch

    try:
        found = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except (pickle.UnpicklingError, RuntimeError, zipfile.BadZipFile, KeyError, AttributeError):
        raise ValueError("it is no file of plain tensors") from None
    if isinstance(found, dict) and set(found) == {"indices", "offsets", "lengths"}:
        found = [found[name] for name in ("indices", "offsets", "lengths")]
    if not isinstance(found, tuple | list) or len(found) != 3 or not all(isinstance(t, torch.Tensor) for t in found):
        raise ValueError("it does not hold the three tensors (indices, offsets, lengths)")
    if any(tensor.is_floating_point() or tensor.is_complex() for tensor in found):
        raise ValueError("its tensors hold something else than whole numbers")
    indices, offsets, lengths = (tensor.to(torch.int64).numpy() for tensor in found)
    return indices, offsets, lengths
