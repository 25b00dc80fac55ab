"""Files of embedding tables: CSV, Parquet, JSON and TOML, each row a table, and the published layout of sharding tasks.

A column is a field of ``EmbeddingTable``; missing columns have the field's default. ``reuse`` is one list of 17 shares
or the columns ``reuse_0`` … ``reuse_16``. JSON is a list of tables or ``{"tables": [...]}``, TOML has ``[[tables]]``. A
quantized table without a named optimizer is not trained.

The published layout (DreamShard's and NeuroShard's ``table_configs.json``, arXiv 2210.02023 and 2305.01868) has other
names: ``row``, ``dim``, ``pooling_factor`` and ``bin_0`` … ``bin_16``, the shares of a batch's *different rows* by how
often each is looked up.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from tracer.input_file import DecodeError, PathLike, from_json, from_toml, read_input, why_unopened
from tracer.lookup_data.tables import QUANTIZED, REUSE_BINS, REUSE_OF_BIN, EmbeddingTable, TableError
from tracer.table_input import TABLES, TableInputError, place, read_cells

PUBLISHED_BATCH = 65_536
"""Samples of the batch in the published histograms (facebookresearch/dlrm_datasets, fbgemm_t856_bs65536)."""
PUBLISHED_COLUMNS = 16
"""Columns of a published table if its file gives none: DreamShard's own default."""
MOST_TABLES = 10_000
"""Most tables of a file: the largest published file has 856, and a plan of 10,000 takes minutes."""
_FIELDS = {field.name: field for field in fields(EmbeddingTable)}
_NEEDED = [name for name, field in _FIELDS.items() if field.default is MISSING]
_WHOLE = ("rows", "columns", "longest_bag", "reuse_lookups", "unique")
_NUMBERS = ("bag", "skew", "cache_load_factor")
_LISTS = ("reuse", "bag_quantiles")
_REUSE = [f"reuse_{i}" for i in range(REUSE_BINS)]
_BINS = [f"bin_{i}" for i in range(REUSE_BINS)]
_PUBLISHED = ("name", "index", "row", "dim", "pooling_factor")
_BESIDE = ("dtype", "pooling", "weighted", "optimizer", "output_dtype", "location", "cache_load_factor")
"""Fields that a published table may have in addition, since the layout itself has none of them."""
_TRUE, _FALSE = ("true", "yes", "1"), ("false", "no", "0", "")

Row = Mapping[str, Any]


def read_tables(path: PathLike) -> list[EmbeddingTable]:
    """Read a file of tables.

    Args:
        path: path of the file; the ending gives its format: .csv, .parquet, .json or .toml.

    Raises:
        TableInputError: it cannot be read, has no tables, lacks a column, or has a table that contradicts itself; the
            sentence names the file and the line.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in _READERS:
        raise TableInputError(f"{path} does not say what it is; tables are read from {', '.join(_READERS)}.")
    try:
        rows = _READERS[suffix](path)
    except OSError as error:
        raise TableInputError(why_unopened(path, error)) from None
    except DecodeError as error:
        raise TableInputError(f"{path} cannot be read as tables: {error}.") from None
    if not rows:
        raise TableInputError(f"{path} has no tables; give at least one row with {', '.join(_NEEDED)}.")
    if len(rows) > MOST_TABLES:
        raise TableInputError(f"{path} has {len(rows):,} tables, which is more than {MOST_TABLES:,}.")
    found = []
    for number, row in enumerate(rows):
        try:
            found.append(_table(row, number))
        except TableError as error:
            where = place(path, number) if suffix in TABLES else f"{path}, table {number + 1}"
            raise TableInputError(f"{where}: {error}") from None
    try:
        return checked_tables(found, str(path))
    except TableError as error:
        raise TableInputError(str(error)) from None


def checked_tables(tables: Sequence[EmbeddingTable], name: str = "the tables") -> list[EmbeddingTable]:
    """Return the tables unchanged. Raises ``TableError`` if two have one name, or if there are none."""
    if not tables:
        raise TableError(f"{name} has no tables; give at least one.")
    seen: dict[str, int] = {}
    for i, table in enumerate(tables):
        if table.name in seen:
            raise TableError(f"{name}: tables {seen[table.name] + 1} and {i + 1} are both called {table.name!r}; give "
                             "each a name of its own.")
        seen[table.name] = i
    return list(tables)


def table_of_published(row: Row, name: str) -> EmbeddingTable:
    """Return a table of the published layout. Its bins are shares of different rows; ours are shares of look-ups.

    It may also have fields of ``EmbeddingTable`` that the layout lacks, such as ``dtype``.

    Raises:
        TableError: a size is invalid, a field is unknown, or bins are missing or are no shares.
    """
    others = {key: value for key, value in row.items()
              if _given(value) and key not in _PUBLISHED and key not in _BINS}
    for key in others:
        if key not in _BESIDE:
            _unknown(key, (*_PUBLISHED, *_BINS, *_BESIDE),
                     f"{', '.join(_PUBLISHED)}, bin_0 … bin_16, {', '.join(_BESIDE)}")
    lacking = [key for key in _BINS if not _given(row.get(key))]
    if lacking and len(lacking) < len(_BINS):
        raise TableError(f"it has no {lacking[0]}; the layout has the {REUSE_BINS} columns bin_0 … bin_16, or none.")
    bag = _number(row.get("pooling_factor", 1.0), "pooling_factor")
    bins = np.array([] if lacking else [_number(row[key], key) for key in _BINS])
    for key, share in zip(_BINS, bins.tolist(), strict=False):
        if not math.isfinite(share) or share < 0:
            raise TableError(f"{key} is {share:g}; it is a share of the rows that a batch looks up.")
    # A row of the bin b has REUSE_OF_BIN[b] look-ups. Tables that a batch never looks up have zeros.
    looked_up = bins * REUSE_OF_BIN if len(bins) else bins
    whole = float(looked_up.sum())
    reuse = tuple((looked_up / whole).tolist()) if whole > 0 else ()
    return EmbeddingTable(
        name, _whole(row["row"], "row"), _whole(row.get("dim", PUBLISHED_COLUMNS), "dim"), bag=bag, reuse=reuse,
        reuse_lookups=round(bag * PUBLISHED_BATCH) if reuse else 0, **_typed(others))


def _table(row: Any, index: int) -> EmbeddingTable:
    if not isinstance(row, Mapping):
        raise TableError("it is no table of names and values.")
    if "row" in row and "rows" not in row:
        return table_of_published(row, str(row.get("name", f"t{row.get('index', index)}")))
    return EmbeddingTable(**_values(row))


def _values(row: Row) -> dict[str, Any]:
    """Return the fields of a row in their types. Raises ``TableError``."""
    split = [row[key] for key in _REUSE if _given(row.get(key))]
    given = {key: value for key, value in row.items() if _given(value) and key not in _REUSE}
    for name in _NEEDED:
        if name not in given:
            raise TableError(f"it has no {name}; a table needs {', '.join(_NEEDED)}.")
    for key in given:
        if key not in _FIELDS:
            _unknown(key, tuple(_FIELDS), ", ".join(_FIELDS))
    if split:
        if len(split) != REUSE_BINS:
            raise TableError(f"it has {len(split)} of the {REUSE_BINS} columns reuse_0 … reuse_{REUSE_BINS - 1}.")
        given["reuse"] = split
    return _typed(given)


def _unknown(key: str, known: Sequence[str], listed: str) -> NoReturn:
    near = difflib.get_close_matches(str(key), known, n=1)
    raise TableError(f"{key!r} is no field of a table; " + (
        f"did you mean {near[0]}?" if near else f"known are {listed}."))


def _typed(given: Row) -> dict[str, Any]:
    """Return the fields converted to their types."""
    found = {key: _value(key, value) for key, value in given.items()}
    if found.get("dtype") in QUANTIZED:
        found.setdefault("optimizer", "none")
    return found


def _given(value: Any) -> bool:
    return value is not None and value != ""


def _value(key: str, value: Any) -> Any:
    if key in _LISTS:
        return tuple(_number(each, f"a number of {key}") for each in _listed(value, key))
    if key in _WHOLE:
        return _whole(value, key)
    if key in _NUMBERS:
        return _number(value, key)
    if key == "weighted":
        text = str(value).strip().lower()
        if text not in _TRUE + _FALSE:
            raise TableError(f"weighted is {value!r}; it is true or false.")
        return text in _TRUE
    return str(value).strip()


def _listed(value: Any, name: str) -> list[Any]:
    if isinstance(value, str):
        try:
            value = from_json(value) if value.lstrip().startswith("[") else value.replace(";", " ").split()
        except DecodeError as error:
            raise TableError(f"{name} is no list ({error}).") from None
    if not isinstance(value, list | tuple):
        raise TableError(f"{name} is {str(value)[:40]!r}, not a list of numbers.")
    return list(value)


def _number(value: Any, name: str) -> float:
    try:
        if isinstance(value, bool):
            raise ValueError
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise TableError(f"{name} is {str(value)[:40]!r}, not a number.") from None


def _whole(value: Any, name: str) -> int:
    number = _number(value, name)
    if not np.isfinite(number) or number != int(number):
        raise TableError(f"{name} is {str(value)[:40]}, which is no whole number.")
    return int(value) if isinstance(value, int) else int(number)


def _of_document(value: Any) -> list[Row]:
    found = value.get("tables") if isinstance(value, dict) else value
    if not isinstance(found, list):
        raise DecodeError('it is neither a list of tables nor has it one called "tables"')
    return found


_READERS: dict[str, Callable[[PathLike], Sequence[Row]]] = {
    **dict.fromkeys(TABLES, read_cells), ".json": lambda path: _of_document(from_json(read_input(path))),
    ".toml": lambda path: _of_document(from_toml(read_input(path)))}
