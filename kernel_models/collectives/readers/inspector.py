"""Logs of NCCL's inspector plugin (``NCCL_PROFILER_PLUGIN=libnccl-profiler-inspector.so``): collectives of a real run.

One JSON object a collective a rank, as each rank saw it: a rank that came early waited within its kernel. Of the ranks
whose logs are given, the quickest one's time of the same collective is its transfer. Give the directory of all logs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from kernel_models.collectives.call import CollectiveKind, CommError, Placement, collective_kind
from kernel_models.collectives.measurements import CollectiveMeasurements, make_measurements
from kernel_models.collectives.readers.hints import Hints
from tracer.input_file import read_input

MOST_BYTES = 2 << 30
_SCALED = (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_TO_ALL)
"""Kinds whose payload is counted over all ranks."""


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
    """Return whether a text is such a log."""
    return '"inspector_output_format_version"' in text[:8192] and '"header"' in text[:8192]


def inspector_folder(path: Path) -> list[Path]:
    """Return the logs in a directory; empty if it is none, or has no logs."""
    if not path.is_dir():
        return []
    found = sorted(each for each in path.iterdir() if each.is_file() and each.suffix in (".log", ".json", ".jsonl"))
    return [each for each in found if is_inspector(each.open("rb").read(8192).decode("utf-8", "replace"))]


def read_inspector(files: list[Path], hints: Hints) -> CollectiveMeasurements:
    """Read the logs of one run.

    Raises:
        CommError: a log is damaged, too large, or has no collective of more than one rank.
    """
    if sum(each.stat().st_size for each in files) > MOST_BYTES:
        raise CommError(f"The logs are larger than {MOST_BYTES >> 30} GiB together; give those of a part of the run.")
    quickest: dict[tuple[str, int], tuple[CollectiveKind, Placement, float, float]] = {}
    ranks: dict[tuple[str, int], int] = {}
    skipped = 0
    for file in files:
        for line in _lines(read_input(file).decode("utf-8", "replace"), file.name):
            done, head = line.coll_perf, line.header
            if done is None:
                continue
            if head.n_ranks < 2 or done.coll_exec_time_us <= 0 or done.coll_msg_size_bytes < 0:
                skipped += 1
                continue
            try:
                kind = collective_kind(done.coll)
            except CommError:
                skipped += 1
                continue
            key = head.id, done.coll_sn
            ranks[key] = ranks.get(key, 0) + 1
            placement = Placement.even(head.n_ranks, -(-head.n_ranks // max(head.nnodes, 1)))
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
    """Bytes of the whole buffer. The log's size is one rank's share where its bandwidth counts all of them."""
    size = done.coll_msg_size_bytes
    if kind not in _SCALED or done.coll_algobw_gbs <= 0 or size <= 0:
        return size
    counted = done.coll_algobw_gbs * done.coll_exec_time_us * 1e3 / size
    return size * ranks if counted > ranks**0.5 else size


def _lines(text: str, name: str) -> Iterator[_Line]:
    """Yield the objects of a log, whether a line each or spread over several."""
    decoder, place = json.JSONDecoder(), 0
    while True:
        while place < len(text) and text[place] in " \t\r\n,[]":
            place += 1
        if place >= len(text):
            return
        try:
            value, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            if text.count('"header"', place) < 2:  # its last entry, cut off
                return
            raise CommError(f"{name} is damaged at character {place:,}: copy it again.") from None
        yield _converted(value, name)


def _converted(value: Any, name: str) -> _Line:
    try:
        return msgspec.convert(value, _Line)
    except msgspec.ValidationError as error:
        raise CommError(f"{name} has an entry that is none of the inspector's ({error}).") from None
