"""``read_log``: measured collectives of any known log or table. The text itself shows its format.

Tables are CSV, TSV, Parquet or JSON lines: one row per measurement, columns found by their usual names. A table needs a
size in bytes and a time whose column names its unit (``latency_us``, ``time_ms``, …). Also read: the collective, the
dtype, ranks, ranks per node, the backend, the GPU and the system. ``Hints`` supply what a table lacks. NCCL's inspector
plugin (``NCCL_PROFILER_PLUGIN=libnccl-profiler-inspector.so``) writes one JSON object for each collective and rank. A
rank that came early waited within its kernel, so the shortest time over the given ranks is the transfer. Give the
directory of all logs.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from kernel_models.collectives.call import CollectiveKind, CommError, Placement, collective_kind, dtype_name
from kernel_models.collectives.measurements import (
    CollectiveMeasurements,
    Hints,
    check_measured,
    join,
    make_measurements,
)
from kernel_models.collectives.text_logs import is_mpi, is_nccl_tests, is_param, read_mpi, read_nccl_tests, read_param
from tracer.guard import MOST_RANKS
from tracer.input_file import read_input
from tracer.table_input import FORMATS, TableInputError, place, read_frame

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
_TO_US = {"us": 1.0, "ms": 1e3, "ns": 1e-3, "s": 1e6}  # by definition
_TIME_ORDER = ("latency", "median", "p50", "time", "duration", "elapsed", "mean", "avg", "min", "max")


def is_table(path: str) -> bool:
    """Return whether a file's name has the ending of a table."""
    return path.lower().endswith(SUFFIXES)


def read_table(path: str, hints: Hints) -> CollectiveMeasurements:
    """Return the measured collectives in a user's table.

    Raises:
        TableInputError: it cannot be read, or has an unusable column or line, which the error names.
    """
    frame = read_frame(path, SUFFIXES, comment="#")
    columns = {str(c).strip().lower(): c for c in frame.columns}
    found = {key: next((columns[n] for n in names if n in columns), None) for key, names in _NAMES.items()}
    if found["size"] is None:
        raise TableInputError(f"{path}, line 1: no column holds sizes in bytes; name one payload_bytes.")
    time_column, scale = _time(columns, path)
    for needed, option, hint in (("kind", "--collective", hints.kind), ("ranks", "--ranks", hints.ranks)):
        if found[needed] is None and hint is None:
            raise TableInputError(f"{path}, line 1: no column says the "
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
            placement = _placement(placements, ranks, per_node)
            dtype = dtype_name(str(values["dtype"][i])) if "dtype" in values else hints.dtype
            if not (math.isfinite(float(size)) and math.isfinite(float(time))):
                raise ValueError("its size or its time is missing or infinite")
            check_measured(float(size), float(time) * scale)
        except (TypeError, ValueError, OverflowError, CommError) as error:
            raise TableInputError(f"{place(path, i, '#')}: it is no measurement ({str(error).rstrip('.')}); mend or "
                                  "remove the line.") from None
        backend = _text(values, "backend", i) or hints.backend
        origin = (backend, _text(values, "device", i), _text(values, "system", i))
        by_origin.setdefault(origin, []).append(
            (kinds[raw], dtype, placement, float(size), float(time) * scale))
    if len(by_origin) > MOST_ORIGINS:
        raise TableInputError(f"{path}: the table is of {len(by_origin):,} backends, devices and systems together, "
                              f"more than {MOST_ORIGINS}; give those of one at a time.")
    if not by_origin:
        raise TableInputError(f"{path}: the table has no rows; give one with measurements.")
    return join(make_measurements(rows, *origin) for origin, rows in by_origin.items())


def _placement(known: dict[tuple[int, int], Placement], ranks: int, per_node: int) -> Placement:
    """Return the placement of a group's ranks, stored once per shape. Raises ``CommError``: too many ranks."""
    if (ranks, per_node) not in known:
        known[ranks, per_node] = Placement.even(ranks, per_node)
        if len(known) > MOST_SHAPES or sum(-(-all_ranks // node) for all_ranks, node in known) > MOST_RANKS:
            raise CommError(f"the groups have more than {MOST_SHAPES} shapes, or more nodes than any cluster has")
    return known[ranks, per_node]


def _text(values: dict[str, list[Any]], key: str, row: int) -> str:
    """Return a cell as text; "" where the column or the cell is missing, or holds "nan" or "inf"."""
    value = values[key][row] if key in values else None
    text = "" if value is None else str(value).strip()
    return "" if text.lower().lstrip("+-") in ("nan", "inf") else text


def _time(columns: dict[str, Any], path: str) -> tuple[Any, float]:
    """Return the most informative time column, and its factor to µs."""
    timed = {}
    for column in columns:
        match = _TIME.match(column)
        if match:
            timed[column] = (_TIME_ORDER.index(next(w for w in _TIME_ORDER if column.startswith(w))),
                             match.group("unit"))
    if not timed:
        raise TableInputError(f"{path}, line 1: no column holds times with their unit in its name; name one "
                              "latency_us or time_ms.")
    best = min(timed, key=lambda column: timed[column][0])
    if len({unit for rank, unit in timed.values() if rank == timed[best][0]}) > 1:
        raise TableInputError(f"{path}, line 1: times are given in several units ({', '.join(sorted(timed))}); keep "
                              "one column.")
    return columns[best], _TO_US[timed[best][1]]


MOST_SHAPES, MOST_ORIGINS = 500, 100  # chosen: each shape of groups, backend and device of a file gets its own fit
MOST_INSPECTOR_BYTES = 2 << 30  # chosen, for memory
_SCALED = (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_TO_ALL)
"""Kinds whose payload is the sum over all ranks."""


class _Header(msgspec.Struct):
    id: str = ""
    rank: int = -1
    n_ranks: int = 0
    nnodes: int = 1


class _Performance(msgspec.Struct):
    coll: str = ""
    coll_sn: int = -1
    coll_msg_size_bytes: float = -1.0
    coll_exec_time_us: float = -1.0
    coll_algobw_gbs: float = 0.0


class _Line(msgspec.Struct):
    header: _Header
    coll_perf: _Performance | None = None


def is_inspector(text: str) -> bool:
    """Return whether a text is a log of NCCL's inspector plugin."""
    return '"inspector_output_format_version"' in text[:8192] and '"header"' in text[:8192]


def inspector_folder(path: Path) -> list[Path]:
    """Return the logs in a directory; empty if it is not a directory or has no logs."""
    if not path.is_dir():
        return []
    found = sorted(each for each in path.iterdir() if each.is_file() and each.suffix in (".log", ".json", ".jsonl"))
    return [each for each in found if is_inspector(each.open("rb").read(8192).decode("utf-8", "replace"))]


def read_inspector(files: list[Path], hints: Hints) -> CollectiveMeasurements:
    """Read the inspector logs of one run.

    Raises:
        CommError: a log is damaged, too large, or has no collective of more than one rank.
    """
    if sum(each.stat().st_size for each in files) > MOST_INSPECTOR_BYTES:
        raise CommError(f"The logs are larger than {MOST_INSPECTOR_BYTES >> 30} GiB together; give those of a part of "
                        "the run.")
    quickest: dict[tuple[str, int], tuple[CollectiveKind, Placement, float, float]] = {}
    ranks: dict[tuple[str, int], int] = {}
    placements: dict[tuple[int, int], Placement] = {}
    skipped = 0
    for file in files:
        for line in _lines(read_input(file).decode("utf-8", "replace"), file.name):
            done, head = line.coll_perf, line.header
            if done is None:
                continue
            if (head.n_ranks < 2 or not 0 < done.coll_exec_time_us < math.inf
                    or not 0 <= done.coll_msg_size_bytes < math.inf or not 0 <= done.coll_algobw_gbs < math.inf):
                skipped += 1
                continue
            try:
                kind = collective_kind(done.coll)
            except CommError:
                skipped += 1
                continue
            key = head.id, done.coll_sn
            ranks[key] = ranks.get(key, 0) + 1
            shape = head.n_ranks, -(-head.n_ranks // max(head.nnodes, 1))
            placement = _placement(placements, *shape)
            time = min(done.coll_exec_time_us, quickest[key][3] if key in quickest else done.coll_exec_time_us)
            quickest[key] = kind, placement, _payload(kind, head.n_ranks, done), time
    if not quickest:
        raise CommError(f"{files[0].name} has no collective of several ranks that took time; record with "
                        "NCCL_INSPECTOR_ENABLE=1 while the job communicates.")
    found = make_measurements([(kind, hints.dtype, placement, size, time)
                               for kind, placement, size, time in quickest.values()], hints.backend)
    alone = sum(ranks[key] < quickest[key][1].ranks for key in quickest)
    if alone:
        found.notes.append(f"{alone:,} of {len(quickest):,} collectives were not logged by all of their ranks: the "
                           "quickest one's time may have waiting for others in it.")
    if skipped:
        found.notes.append(f"{skipped:,} entries were left out: of one rank, without a time, or of no collective that "
                           "is known.")
    found.notes.append(f"The inspector logs no types; {hints.dtype} is taken.")
    return found


def _payload(kind: CollectiveKind, ranks: int, done: _Performance) -> float:
    """Return the bytes of the whole buffer. Some logs hold one rank's share, and the bandwidth of all ranks."""
    size = done.coll_msg_size_bytes
    if kind not in _SCALED or done.coll_algobw_gbs <= 0 or size <= 0:
        return size
    counted = done.coll_algobw_gbs * done.coll_exec_time_us * 1e3 / size
    return size * ranks if counted > ranks**0.5 else size


def _lines(text: str, name: str) -> Iterator[_Line]:
    """Yield the objects of a log, on one line each or spread over several lines."""
    decoder, place = json.JSONDecoder(), 0
    while True:
        while place < len(text) and text[place] in " \t\r\n,[]":
            place += 1
        if place >= len(text):
            return
        try:
            value, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            if text.count('"header"', place) < 2:  # the last entry is cut off
                return
            raise CommError(f"{name} is damaged at character {place:,}: copy it again.") from None
        yield _converted(value, name)


def _converted(value: Any, name: str) -> _Line:
    try:
        return msgspec.convert(value, _Line)
    except (msgspec.ValidationError, UnicodeError) as error:  # half of a surrogate pair is not valid text
        raise CommError(f"{name} has an entry that is none of the inspector's ({error}).") from None


MOST_BYTES = 256 << 20  # chosen, for memory; a benchmark's log has some kB


def read_log(path: str, hints: Hints | None = None) -> CollectiveMeasurements:
    """Read a log or table of measurements, of any known form.

    Raises:
        CommError: The form is unknown, or a line is broken; one sentence, with the line.
        OSError: The file cannot be read.
    """
    hints = hints or Hints()
    if logs := inspector_folder(Path(path)):
        return read_inspector(logs, hints)
    if is_table(path):
        return read_table(path, hints)
    file = Path(path)
    if file.stat().st_size > MOST_BYTES:
        raise CommError(f"{file.name} is larger than {MOST_BYTES >> 20} MiB; give the log of the benchmark alone.")
    text = read_input(file).decode("utf-8", "replace")
    if is_inspector(text):
        return read_inspector([file], hints)
    if is_param(text):
        return read_param(text, file.name, hints)
    if is_mpi(text):
        return read_mpi(text, file.name, hints)
    if is_nccl_tests(text):
        return read_nccl_tests(text, file.name, hints)
    raise CommError(f"{file.name} is no output of nccl-tests, rccl-tests, PARAM, NCCL's inspector, OSU's benchmarks or "
                    "ucc_perftest, and no table (.csv, .tsv, .jsonl, .parquet); give one of those or a trace.")
