"""Tables of measurements (CSV, TSV, Parquet, JSON lines): a row each, columns found by their usual names.

Needed: a size in bytes and a time whose column names its unit (``latency_us``, ``time_ms``, …). Known besides: the
collective, the dtype, ranks, ranks per node, the backend, the GPU and the system; what a table lacks is taken from
``Hints``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from kernel_models.collectives.call import CollectiveKind, CommError, Placement, collective_kind, dtype_name
from kernel_models.collectives.measurements import CollectiveMeasurements, join, make_measurements
from kernel_models.collectives.readers.hints import Hints
from tracer.table_input import FORMATS, read_frame

SUFFIXES = tuple(FORMATS)
_NAMES = {
    "size": ("payload_bytes", "bytes", "size_bytes", "size", "msg_bytes", "message_bytes"),
    "kind": ("collective", "kind", "op", "operation", "collective_type"),
    "dtype": ("dtype", "type", "datatype"),
    "ranks": ("ranks", "world_size", "num_ranks", "n_ranks", "num_gpus", "gpus", "group_size"),
    "per_node": ("ranks_per_node", "gpus_per_node", "per_node", "devices_per_node"),
    "backend": ("backend", "backend_kernel", "library"),
    "device": ("gpu", "device", "device_name", "gpu_name", "accelerator"),
    "system": ("system", "cluster", "topology", "machine", "node_type"),
}
_TIME = re.compile(r"^(?:(?P<what>median|p50|avg|mean|min|max|latency|time|duration|elapsed)_?)+(?P<unit>us|ms|ns|s)$")
_TO_US = {"us": 1.0, "ms": 1e3, "ns": 1e-3, "s": 1e6}
_TIME_ORDER = ("latency", "median", "p50", "time", "duration", "elapsed", "mean", "avg", "min", "max")


def is_table(path: str) -> bool:
    """Return whether a file's name is a table's."""
    return path.lower().endswith(SUFFIXES)


def read_table(path: str, hints: Hints) -> CollectiveMeasurements:
    """The measurements of a table.

    Raises:
        TableInputError: it cannot be read.
        CommError: a column or line is not usable; it is named.
    """
    frame = read_frame(path, SUFFIXES, comment="#")
    name = Path(path).name
    columns = {str(c).strip().lower(): c for c in frame.columns}
    found = {key: next((columns[n] for n in names if n in columns), None) for key, names in _NAMES.items()}
    if found["size"] is None:
        raise CommError(f"{name}, line 1: no column holds sizes in bytes; name one payload_bytes.")
    time_column, scale = _time(columns, name)
    for needed, option, hint in (("kind", "--collective", hints.kind), ("ranks", "--ranks", hints.ranks)):
        if found[needed] is None and hint is None:
            raise CommError(f"{name}, line 1: no column says the "
                            f"{'collective' if needed == 'kind' else 'number of ranks'}; "
                            f"add one, or give {option}.")
    by_origin: dict[tuple[str, str, str], list[tuple[CollectiveKind, str, Placement, float, float]]] = {}
    kinds: dict[Any, CollectiveKind] = {}
    placements: dict[tuple[int, int], Placement] = {}
    values = {key: frame[column].tolist() for key, column in found.items() if column is not None}
    times, sizes = frame[time_column].tolist(), values["size"]
    for i, (size, time) in enumerate(zip(sizes, times, strict=True)):
        try:
            raw = values["kind"][i] if "kind" in values else hints.kind
            if raw not in kinds:
                kinds[raw] = raw if isinstance(raw, CollectiveKind) else collective_kind(str(raw))
            ranks = int(values["ranks"][i]) if "ranks" in values else hints.ranks or 1
            per_node = int(values["per_node"][i]) if "per_node" in values else hints.per_node or ranks
            if (ranks, per_node) not in placements:
                placements[ranks, per_node] = Placement.even(ranks, per_node)
            dtype = dtype_name(str(values["dtype"][i])) if "dtype" in values else hints.dtype
            if not (float(size) >= 0 and float(time) > 0):
                raise ValueError(f"{size} bytes in {time}")
        except (TypeError, ValueError, OverflowError, CommError) as error:
            raise CommError(f"{name}, line {i + 2}: it is no measurement ({error}); mend or remove the line.") from None
        backend = _text(values, "backend", i) or hints.backend
        origin = (backend, _text(values, "device", i), _text(values, "system", i))
        by_origin.setdefault(origin, []).append(
            (kinds[raw], dtype, placements[ranks, per_node], float(size), float(time) * scale))
    if not by_origin:
        raise CommError(f"{name}: the table has no rows; give one with measurements.")
    return join(make_measurements(rows, *origin) for origin, rows in by_origin.items())


def _text(values: dict[str, list[Any]], key: str, row: int) -> str:
    """A cell as text; empty where the column or the cell is, or where a writer put down a missing number for it."""
    value = values[key][row] if key in values else None
    text = "" if value is None else str(value).strip()
    return "" if text.lower().lstrip("+-") in ("nan", "inf") else text


def _time(columns: dict[str, Any], name: str) -> tuple[Any, float]:
    """The time column that says most, and its factor to µs."""
    timed = {}
    for column in columns:
        match = _TIME.match(column)
        if match:
            timed[column] = (_TIME_ORDER.index(next(w for w in _TIME_ORDER if column.startswith(w))),
                             match.group("unit"))
    if not timed:
        raise CommError(f"{name}, line 1: no column holds times with their unit in its name; name one latency_us or "
                        "time_ms.")
    best = min(timed, key=lambda column: timed[column][0])
    if len({unit for rank, unit in timed.values() if rank == timed[best][0]}) > 1:
        raise CommError(f"{name}, line 1: times are given in several units ({', '.join(sorted(timed))}); keep one "
                        "column.")
    return columns[best], _TO_US[timed[best][1]]
