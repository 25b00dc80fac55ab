"""``NsysSource``: the SQLite export of Nsight Systems (``nsys export --type sqlite``), tables of the CUDA, NVTX schema.

Its tables differ by version; a table or column that is not there is left out. Of several processes in one file that
with the most device work is read, and a note names the others.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import Any
from urllib.parse import quote

from tracer.errors import TraceError
from tracer.lazy import sqlite3
from tracer.translate.events import complete_event, marked_range, written

MAGIC = b"SQLite format 3\x00"
PROCESS_SHIFT = 1 << 24
"""Global thread numbers hold host, process and thread, 24 bits each but the first."""
COPIES = {1: "HtoD", 2: "DtoH", 8: "DtoD", 9: "HtoH", 10: "PtoP"}
MEMORIES = {0: "Pageable", 1: "Pinned", 2: "Device", 3: "Array", 4: "Managed"}
SYNCS = {1: "Event Sync", 2: "Stream Wait Event", 3: "Stream Sync", 4: "Context Sync"}
PUSH_POP, START_END = 59, 60  # NvtxPushPopRange and NvtxStartEndRange in ENUM_NSYS_EVENT_TYPE
_VERSION = re.compile(r"_v\d+(?:_ptsz)?$|_ptsz$")
_KERNELS, _CALLS = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME"
_STEPS_OF_WORK = 50_000  # chosen: between two looks at the budget
_WORK_A_BYTE = 100
"""Instructions of SQLite's machine for each byte of the file, above which a query is no export's."""


class NsysSource:
    """One export, read as the text of a profiler's trace; see ``tracer.kineto.source.TraceSource``."""

    def __init__(self, path: str | os.PathLike[str], progress: Callable[[int, int], None] | None = None) -> None:
        self.name = os.fspath(path)
        self.damage = ""
        self.stored_bytes = os.path.getsize(path)
        self.notes: list[str] = []
        self._progress = progress

    def blocks(self) -> Iterator[bytes]:
        """Yield the events as text. Raises ``TraceError`` where the file is no export of Nsight Systems."""
        try:
            with closing(self._open()) as file:
                export = _Export(file)
                if not export.has(_CALLS, "correlationId") and not export.has(_KERNELS, "correlationId"):
                    raise TraceError(f"{self.name} is an SQLite file without CUDA calls or kernels: give what 'nsys "
                                     "export --type sqlite' wrote of a recording with --trace cuda,nvtx.")
                process, others = export.process()
                if others:
                    self.notes.append(f"The export has {len(others) + 1} processes with device work; process {process} "
                                      f"was read, which has the most, and {', '.join(map(str, others[:8]))} were not: "
                                      "record one report for each rank to read them all.")
                yield from written(export.head(), export.events(process))
        except sqlite3.Error as error:
            raise TraceError(f"{self.name} cannot be read as an SQLite file ({error}): export it again with 'nsys "
                             "export --type sqlite'.") from error
        if self._progress is not None:
            self._progress(self.stored_bytes, self.stored_bytes)

    def _open(self) -> sqlite3.Connection:
        file = sqlite3.connect(f"file:{quote(os.path.abspath(self.name))}?mode=ro&immutable=1", uri=True)
        file.execute("PRAGMA trusted_schema = OFF")  # a stranger's file runs no functions of its schema
        budget = iter(range(max(self.stored_bytes * _WORK_A_BYTE // _STEPS_OF_WORK, 1000)))
        file.set_progress_handler(lambda: next(budget, None) is None, _STEPS_OF_WORK)
        file.text_factory = lambda text: text.decode("utf-8", "replace")
        return file


class _Export:
    """Tables of an export, by the columns that are there."""

    def __init__(self, file: sqlite3.Connection) -> None:
        self._file = file
        names = [name for (name,) in file.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        self._columns = {name: {row[1] for row in file.execute(f'PRAGMA table_info("{_plain(name)}")')}
                         for name in names if _plain(name) == name}
        self._texts: dict[int, str] = {}
        if self.has("StringIds", "id", "value"):
            self._texts = {key: str(text) for key, text in file.execute("SELECT id, value FROM StringIds")}

    def has(self, table: str, *columns: str) -> bool:
        """Return whether a table with these columns is there (no view: what it would run is not known)."""
        return table in self._columns and self._columns[table].issuperset(columns)

    def rows(self, table: str, needed: tuple[str, ...], *more: str) -> Iterator[dict[str, Any]]:
        """Yield the rows as dicts, those whose needed columns are whole numbers; a column that is not there is 0."""
        if not self.has(table, *needed):
            return
        there = [name for name in (*needed, *more) if name in self._columns[table]]
        absent = dict.fromkeys(name for name in more if name not in there)
        query = f"SELECT {', '.join(there)} FROM {table}"
        for row in self._file.execute(query):
            found = dict(zip(there, row, strict=True))
            if all(isinstance(found[name], int) for name in needed):
                yield {**absent, **found}

    def text(self, key: Any) -> str:
        """Return an interned text; empty where there is none."""
        return self._texts.get(key, "") if isinstance(key, int) else ""

    def process(self) -> tuple[int, list[int]]:
        """Return the process with the most device work, and the others that have some; of none the first call's."""
        counts: dict[int, int] = defaultdict(int)
        for row in self.rows(_KERNELS, ("start",), "globalPid"):
            counts[_process(row["globalPid"])] += 1
        if not counts:
            for row in self.rows(_CALLS, ("start",), "globalTid"):
                counts[_process(row["globalTid"])] += 1
        ordered = sorted(counts, key=lambda each: (-counts[each], each))
        return (ordered[0], ordered[1:]) if ordered else (0, [])

    def head(self) -> dict[str, Any]:
        """Return the top-level fields: the devices, and when the recording began."""
        devices = [
            {"id": row["id"], "name": str(row["name"] or ""), "totalGlobalMem": row["totalMemory"],
             "numSms": row["smCount"], "computeMajor": row["computeMajor"] or row["smMajor"],
             "computeMinor": row["computeMinor"] or row["smMinor"]}
            for row in self.rows("TARGET_INFO_GPU", ("id",), "name", "totalMemory", "smCount", "computeMajor",
                                 "computeMinor", "smMajor", "smMinor")]
        found: dict[str, Any] = {"schemaVersion": 1, "deviceProperties": devices}
        for row in self.rows("TARGET_INFO_SESSION_START_TIME", ("utcEpochNs",)):
            found["baseTimeNanoseconds"] = row["utcEpochNs"]
        return found

    def events(self, process: int) -> Iterator[dict[str, Any]]:
        """Yield all events of a process."""
        yield from self._calls(process)
        yield from self._kernels(process)
        yield from self._copies(process)
        yield from self._syncs(process)
        yield from self._ranges(process)

    def _calls(self, process: int) -> Iterator[dict[str, Any]]:
        for row in self.rows(_CALLS, ("start", "end", "correlationId"), "globalTid", "nameId"):
            if _process(row["globalTid"]) == process:
                name = _VERSION.sub("", self.text(row["nameId"])) or "INVALID"
                kind = "cuda_driver" if re.match(r"cu[A-Z]", name) else "cuda_runtime"
                yield complete_event(kind, name, row["start"], row["end"], process, _thread(row["globalTid"]),
                                     correlation=row["correlationId"])

    def _kernels(self, process: int) -> Iterator[dict[str, Any]]:
        extent = [f"{kind}{axis}" for kind in ("grid", "block") for axis in "XYZ"]
        for row in self.rows(_KERNELS, ("start", "end", "deviceId", "streamId", "correlationId"), "globalPid",
                             "demangledName", "shortName", "registersPerThread", "staticSharedMemory",
                             "dynamicSharedMemory", *extent):
            if _process(row["globalPid"]) == process:
                numbers = [row[name] if isinstance(row[name], int) else 1 for name in extent]
                arguments = {"grid": numbers[:3], "block": numbers[3:],
                             "registers per thread": row["registersPerThread"] or 0,
                             "shared memory": (row["staticSharedMemory"] or 0) + (row["dynamicSharedMemory"] or 0)}
                yield _device_event("kernel", self.text(row["demangledName"]) or self.text(row["shortName"])
                                    or "unnamed kernel", row, arguments)
        # Recorded without its parts (--cuda-graph-trace=graph), a graph is one piece of work.
        for row in self.rows("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", ("start", "end", "deviceId", "streamId",
                                                                 "correlationId"), "globalPid"):
            if row["globalPid"] is None or _process(row["globalPid"]) == process:
                yield _device_event("kernel", "CUDA graph, recorded as a whole", row, {})

    def _copies(self, process: int) -> Iterator[dict[str, Any]]:
        needed = ("start", "end", "deviceId", "streamId", "correlationId")
        for row in self.rows("CUPTI_ACTIVITY_KIND_MEMCPY", needed, "globalPid", "bytes", "copyKind", "srcKind",
                             "dstKind"):
            if _process(row["globalPid"]) == process:
                where = [MEMORIES.get(row[end], "Unknown") for end in ("srcKind", "dstKind")]
                name = f"Memcpy {COPIES.get(row['copyKind'], 'DtoD')} ({where[0]} -> {where[1]})"
                yield _device_event("gpu_memcpy", name, row, {"bytes": row["bytes"] or 0})
        for row in self.rows("CUPTI_ACTIVITY_KIND_MEMSET", needed, "globalPid", "bytes"):
            if _process(row["globalPid"]) == process:
                yield _device_event("gpu_memset", "Memset (Device)", row, {"bytes": row["bytes"] or 0})

    def _syncs(self, process: int) -> Iterator[dict[str, Any]]:
        records: dict[Any, list[tuple[int, int]]] = defaultdict(list)  # of an event: its records, in order of calls
        for row in self.rows("CUPTI_ACTIVITY_KIND_CUDA_EVENT", ("correlationId", "eventId", "streamId"), "globalPid"):
            records[row["globalPid"], row["eventId"]].append((row["correlationId"], row["streamId"]))
        for found in records.values():
            found.sort()
        for row in self.rows("CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", ("start", "end", "correlationId", "syncType"),
                             "globalPid", "deviceId", "streamId", "eventId"):
            if _process(row["globalPid"]) != process or row["syncType"] not in SYNCS:
                continue
            kind = SYNCS[row["syncType"]]
            arguments = {"cuda_sync_kind": kind, "correlation": row["correlationId"], "device": row["deviceId"] or 0,
                         "stream": _stream(row["streamId"])}
            earlier = records.get((row["globalPid"], row["eventId"]), [])
            place = bisect_left(earlier, (row["correlationId"], -1))
            if place and row["syncType"] in (1, 2):
                record, stream = earlier[place - 1]
                arguments |= {"wait_on_stream": stream, "wait_on_cuda_event_record_corr_id": record}
            yield complete_event("cuda_sync", kind, row["start"], row["end"], row["deviceId"] or 0,
                                 _stream(row["streamId"]), **arguments)

    def _ranges(self, process: int) -> Iterator[dict[str, Any]]:
        for row in self.rows("NVTX_EVENTS", ("start", "end", "eventType", "globalTid"), "text", "textId"):
            if row["eventType"] in (PUSH_POP, START_END) and _process(row["globalTid"]) == process:
                text = row["text"] if isinstance(row["text"], str) else self.text(row["textId"])
                if text:
                    yield marked_range(text, row["start"], row["end"], process, _thread(row["globalTid"]))


def _device_event(category: str, name: str, row: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    return complete_event(category, name, row["start"], row["end"], row["deviceId"], row["streamId"],
                          device=row["deviceId"], stream=row["streamId"], correlation=row["correlationId"], **arguments)


def _stream(number: Any) -> int:
    return number if isinstance(number, int) and 0 <= number < 1 << 31 else -1


def _process(number: Any) -> int:
    return number // PROCESS_SHIFT % PROCESS_SHIFT if isinstance(number, int) else 0


def _thread(number: Any) -> int:
    return number % PROCESS_SHIFT if isinstance(number, int) else 0


def _plain(name: str) -> str:
    return "".join(c for c in name if c.isascii() and (c.isalnum() or c == "_"))


def is_export(head: bytes) -> bool:
    """Return whether a file's first bytes are an SQLite file's."""
    return head.startswith(MAGIC)


def local_export(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a local SQLite file."""
    with suppress(OSError):
        if "://" not in os.fspath(path) and os.path.isfile(path):
            with open(path, "rb") as file:
                return is_export(file.read(len(MAGIC)))
    return False
