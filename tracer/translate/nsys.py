"""``NsysSource``: the SQLite export of Nsight Systems (``nsys export --type sqlite``), tables of the CUDA, NVTX schema.

Its tables differ by version; missing tables and columns are skipped. If a file has several processes, the process with
the most device work is read, and a note names the others.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from typing import Any
from urllib.parse import quote

import numpy as np

from tracer.arrays import Bool, Int32, Int64
from tracer.errors import TraceError, reason_of
from tracer.graph import NONE
from tracer.guard import MOST_TEXT, DecodeError, NameBudget, RowBudget
from tracer.kineto.scanner import EMPTY_TEXT, EventBatch
from tracer.lazy import sqlite3
from tracer.translate.events import NOTHING, ForeignBatch, ForeignTexts, Meaning

PROCESS_SHIFT = 1 << 24
"""Global thread numbers hold host, process and thread; process and thread have 24 bits each."""
COPIES = {1: "HtoD", 2: "DtoH", 8: "DtoD", 9: "HtoH", 10: "PtoP"}
MEMORIES = {0: "Pageable", 1: "Pinned", 2: "Device", 3: "Array", 4: "Managed"}
SYNCS = {1: "Event Sync", 2: "Stream Wait Event", 3: "Stream Sync", 4: "Context Sync"}
PUSH_POP, START_END = 59, 60  # NvtxPushPopRange and NvtxStartEndRange in ENUM_NSYS_EVENT_TYPE
_VERSION = re.compile(r"_v\d+(?:_ptsz)?$|_ptsz$")
_DRIVER = re.compile(r"cu[A-Z]")
_KERNELS, _CALLS = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME"
_WORK = ("start", "end", "deviceId", "streamId", "correlationId")
_EXTENT = [f"{kind}{axis}" for kind in ("grid", "block") for axis in "XYZ"]
_STEPS_OF_WORK = 50_000  # chosen: SQLite instructions between two checks of the budget
_WORK_A_BYTE = 100
"""SQLite instructions for each byte of the file, above which a query cannot be one on a real export."""
_ROWS = 1 << 15  # chosen: memory for rows that become columns at a time
_ROWS_A_LOOK = 256  # chosen: rows between two looks at what their texts have in the file
_DEVICE_NAME = 200  # chosen: characters of a device's name

Columns = Mapping[str, Int64]


class NsysSource:
    """One export, read as batches of events. ``metadata`` holds the devices and the start of the recording."""

    is_list = False
    complete = True

    def __init__(self, path: str | os.PathLike[str], progress: Callable[[int, int], None] | None = None) -> None:
        self.name = os.fspath(path)
        self.damage = ""
        self.stored_bytes = os.path.getsize(path)
        self.notes: list[str] = []
        self.metadata: dict[str, Any] = {}
        self._names = NameBudget(self.stored_bytes)
        self.vocabulary = ForeignTexts(self._names)
        self._progress = progress

    def __iter__(self) -> Iterator[EventBatch]:
        """Yield the events. Raises ``TraceError`` if the file is no export of Nsight Systems."""
        try:
            with closing(self._open()) as file:
                export = _Export(file, self.stored_bytes, self.vocabulary, self._names)
                if not export.has(_CALLS, "correlationId") and not export.has(_KERNELS, "correlationId"):
                    raise TraceError(f"{self.name} is an SQLite file without CUDA calls or kernels: give what 'nsys "
                                     "export --type sqlite' wrote of a recording with --trace cuda,nvtx.")
                process, others = export.process()
                if others:
                    self.notes.append(f"The export has {len(others) + 1} processes with device work; process {process} "
                                      f"was read, which has the most, and {', '.join(map(str, others[:8]))} were not: "
                                      "record one report for each rank to read them all.")
                self.metadata.update(export.head())
                yield from export.events(process)
        except (sqlite3.Error, DecodeError, MemoryError, UnicodeError) as error:
            raise TraceError(f"{self.name} cannot be read as an SQLite file ({reason_of(error)}): export it again with "
                             "'nsys export --type sqlite'.") from error
        self.notes += self._names.notes()
        if self._progress is not None:
            self._progress(self.stored_bytes, self.stored_bytes)

    def _open(self) -> sqlite3.Connection:
        file = sqlite3.connect(f"file:{quote(os.path.abspath(self.name))}?mode=ro&immutable=1", uri=True)
        file.execute("PRAGMA trusted_schema = OFF")  # a foreign file runs no functions of its schema
        budget = iter(range(max(self.stored_bytes * _WORK_A_BYTE // _STEPS_OF_WORK, 1000)))
        file.set_progress_handler(lambda: next(budget, None) is None, _STEPS_OF_WORK)
        file.text_factory = self._text
        return file

    def _text(self, text: bytes) -> str:
        """Decode a text of a query, and count its bytes."""
        self._names.count(len(text))
        return text.decode("utf-8", "replace")


class _Export:
    """The tables of an export, and which columns they have."""

    def __init__(self, file: sqlite3.Connection, stored_bytes: int, vocabulary: ForeignTexts,
                 names: NameBudget) -> None:
        self._file = file
        self._names = names
        self._code_of: dict[int, int] = {}
        self._budget = RowBudget(stored_bytes)
        self._vocabulary = vocabulary
        tables = [name for (name,) in file.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        self._columns = {name: {row[1] for row in file.execute(f'PRAGMA table_info("{name}")')}
                         for name in tables if isinstance(name, str) and _plain(name) == name}
        self._texts = self._texts_of("StringIds", "value")

    def _texts_of(self, table: str, column: str, most: int = MOST_TEXT) -> dict[int, str]:
        """Return the texts of a column by the row's ``id``; none where the table or column is not there."""
        found: dict[int, str] = {}
        if self.has(table, "id", column):
            for key, size, text in self._file.execute(
                    f"SELECT id, {_stored(column)}, {_text(column, most)} FROM {table} WHERE typeof(id) = 'integer' "
                    f"AND typeof({column}) = 'text'"):
                self._budget.take(1)
                self._names.count(size)
                found[key] = text
        return found

    def has(self, table: str, *columns: str) -> bool:
        """Return whether there is a table with these columns. A view does not count: it could run anything."""
        return table in self._columns and self._columns[table].issuperset(columns)

    def rows(self, table: str, needed: tuple[str, ...], **more: int) -> Iterator[Columns]:
        """Yield columns of many rows at a time, from the rows whose needed columns are whole numbers.

        Args:
            table: Its name.
            needed: Columns without which a row is left out.
            more: Other columns, each with the value that replaces missing ones and those that are no whole numbers.
        """
        for columns, _ in self._read(table, needed, more, ""):
            yield columns

    def _read(self, table: str, needed: tuple[str, ...], more: Mapping[str, int], text: str) -> \
            Iterator[tuple[Columns, list[str | None]]]:
        """Yield as ``rows`` does, with the texts of one column if it is named and exists."""
        if not self.has(table, *needed):
            return
        there = [name for name in more if name in self._columns[table]]
        with_text = text in self._columns[table]
        chosen = [*(f'"{name}"' for name in needed), *(_number(name, more[name]) for name in there),
                  *((_stored(text), _text(text)) if with_text else ("0", "NULL"))]
        where = " AND ".join(f"typeof(\"{name}\") = 'integer'" for name in needed)
        found = self._file.execute(f"SELECT {', '.join(chosen)} FROM {table} WHERE {where}")
        while rows := self._some(found):
            texts = [row[-1] for row in rows]
            columns = np.array([row[:-2] for row in rows], np.int64).T
            yield {**{name: np.full(len(rows), value, np.int64) for name, value in more.items()},
                   **dict(zip((*needed, *there), np.ascontiguousarray(columns), strict=True))}, texts

    def _some(self, found: sqlite3.Cursor) -> list[tuple[Any, ...]]:
        """Return the next rows, whose last but one value is the stored length of their text."""
        rows: list[tuple[Any, ...]] = []
        while len(rows) < _ROWS and (more := found.fetchmany(_ROWS_A_LOOK)):
            self._budget.take(len(more))
            self._names.count(sum(row[-2] for row in more))
            rows += more
        return rows

    def process(self) -> tuple[int, list[int]]:
        """Return the process with the most device work (without any, the first call's), and others that have some."""
        counts: dict[int, int] = defaultdict(int)
        for table, column in ((_KERNELS, "globalPid"), (_CALLS, "globalTid")):
            for rows in () if counts else self.rows(table, ("start",), **{column: 0}):
                for process, number in zip(*(each.tolist() for each in np.unique(
                        _process(rows[column]), return_counts=True)), strict=True):
                    counts[process] += number
        ordered = sorted(counts, key=lambda each: (-counts[each], each))
        return (ordered[0], ordered[1:]) if ordered else (0, [])

    def head(self) -> dict[str, Any]:
        """Return the top-level fields: the devices and the start of the recording."""
        devices = []
        names = self._texts_of("TARGET_INFO_GPU", "name", _DEVICE_NAME)
        for rows in self.rows("TARGET_INFO_GPU", ("id",), totalMemory=0, smCount=0, computeMajor=0, computeMinor=0,
                              smMajor=0, smMinor=0):
            each = {name: column.tolist() for name, column in rows.items()}
            devices += [{"id": number, "name": names.get(number, ""), "totalGlobalMem": each["totalMemory"][at],
                         "numSms": each["smCount"][at], "computeMajor": each["computeMajor"][at] or each["smMajor"][at],
                         "computeMinor": each["computeMinor"][at] or each["smMinor"][at]}
                        for at, number in enumerate(each["id"])]
        found: dict[str, Any] = {"schemaVersion": 1, "deviceProperties": devices}
        for rows in self.rows("TARGET_INFO_SESSION_START_TIME", ("utcEpochNs",)):
            found["baseTimeNanoseconds"] = int(rows["utcEpochNs"][-1])
        return found

    def events(self, process: int) -> Iterator[EventBatch]:
        """Yield all events of a process."""
        yield from self._calls(process)
        yield from self._kernels(process)
        yield from self._copies(process)
        yield from self._syncs(process)
        yield from self._ranges(process)

    def _calls(self, process: int) -> Iterator[EventBatch]:
        named: dict[int, tuple[int, bool]] = {}
        for rows in self.rows(_CALLS, ("start", "end", "correlationId"), globalTid=0, nameId=NONE):
            rows = _of(rows, _process(rows["globalTid"]) == process)
            names, place = np.unique(rows["nameId"], return_inverse=True)
            for key in names.tolist():
                if key not in named:
                    name = _VERSION.sub("", self._texts.get(key, "")) or "INVALID"
                    named[key] = self._vocabulary.name(name), bool(_DRIVER.match(name))
            runtime_kind, driver_kind = (self._vocabulary.code(kind) for kind in ("cuda_runtime", "cuda_driver"))
            code, driver = (np.array([named[key][at] for key in names.tolist()], np.int32)[place] for at in (0, 1))
            yield self._host(rows, process, code, np.where(driver, driver_kind, runtime_kind).astype(np.int32),
                             correlation=rows["correlationId"])

    def _kernels(self, process: int) -> Iterator[EventBatch]:
        for rows in self.rows(_KERNELS, _WORK, globalPid=0, demangledName=NONE, shortName=NONE, registersPerThread=0,
                              staticSharedMemory=0, dynamicSharedMemory=0, **dict.fromkeys(_EXTENT, 1)):
            rows = _of(rows, _process(rows["globalPid"]) == process)
            code = self._codes(rows["demangledName"])
            code = np.where(code == EMPTY_TEXT, self._codes(rows["shortName"]), code).astype(np.int32)
            code[code == EMPTY_TEXT] = self._vocabulary.name("unnamed kernel")
            grid, block = (self._vocabulary.extents([rows[name] for name in names])
                           for names in (_EXTENT[:3], _EXTENT[3:]))
            static, dynamic = (np.clip(rows[name], -(1 << 40), 1 << 40)
                               for name in ("staticSharedMemory", "dynamicSharedMemory"))
            yield self._device("kernel", rows, code, {"grid": grid, "block": block}, shared_memory=static + dynamic,
                               registers=rows["registersPerThread"])
        # A graph recorded without its parts (--cuda-graph-trace=graph) is one piece of work.
        for rows in self.rows("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", _WORK, globalPid=process * PROCESS_SHIFT):
            rows = _of(rows, _process(rows["globalPid"]) == process)
            yield self._device("kernel", rows, self._vocabulary.name("CUDA graph, recorded as a whole"))

    def _copies(self, process: int) -> Iterator[EventBatch]:
        for rows in self.rows("CUPTI_ACTIVITY_KIND_MEMCPY", _WORK, globalPid=0, bytes=0, copyKind=NONE, srcKind=NONE,
                              dstKind=NONE):
            rows = _of(rows, _process(rows["globalPid"]) == process)
            kinds, place = np.unique(np.stack([rows[name] for name in ("copyKind", "srcKind", "dstKind")], axis=1),
                                     axis=0, return_inverse=True)
            names = [f"Memcpy {COPIES.get(kind, 'DtoD')} ({MEMORIES.get(source, 'Unknown')} -> "
                     f"{MEMORIES.get(target, 'Unknown')})" for kind, source, target in kinds.tolist()]
            codes = np.array([self._vocabulary.name(name) for name in names], np.int32)[place.reshape(-1)]
            yield self._device("gpu_memcpy", rows, codes, bytes=rows["bytes"])
        for rows in self.rows("CUPTI_ACTIVITY_KIND_MEMSET", _WORK, globalPid=0, bytes=0):
            rows = _of(rows, _process(rows["globalPid"]) == process)
            yield self._device("gpu_memset", rows, self._vocabulary.name("Memset (Device)"), bytes=rows["bytes"])

    def _syncs(self, process: int) -> Iterator[EventBatch]:
        records: dict[Any, list[tuple[int, int]]] = defaultdict(list)  # event → its records, in order of calls
        for rows in self.rows("CUPTI_ACTIVITY_KIND_CUDA_EVENT", ("correlationId", "eventId", "streamId"), globalPid=0):
            for pid, event, call, stream in zip(*(rows[name].tolist() for name in (
                    "globalPid", "eventId", "correlationId", "streamId")), strict=True):
                records[pid, event].append((call, stream))
        for found in records.values():
            found.sort()
        for rows in self.rows("CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", ("start", "end", "correlationId", "syncType"),
                              globalPid=0, deviceId=0, streamId=NONE, eventId=NONE):
            rows = _of(rows, (_process(rows["globalPid"]) == process) & np.isin(rows["syncType"], list(SYNCS)))
            wait, record = (np.full(len(rows["start"]), NONE, np.int64) for _ in range(2))
            for at in np.flatnonzero(np.isin(rows["syncType"], (1, 2))).tolist():
                earlier = records.get((int(rows["globalPid"][at]), int(rows["eventId"][at])), [])
                place = bisect_left(earlier, (int(rows["correlationId"][at]), -1))
                if place:
                    record[at], wait[at] = earlier[place - 1]
            streams = np.where((rows["streamId"] >= 0) & (rows["streamId"] < 1 << 31), rows["streamId"], NONE)
            kinds = {key: self._vocabulary.name(text) for key, text in SYNCS.items()}
            name = np.array([kinds[kind] for kind in rows["syncType"].tolist()], np.int32)
            yield self._device("cuda_sync", {**rows, "streamId": streams}, name, {"sync_kind": name}, wait_stream=wait,
                               record_correlation=record)

    def _ranges(self, process: int) -> Iterator[EventBatch]:
        known: dict[int, Meaning] = {}
        needed = ("start", "end", "eventType", "globalTid")
        for rows, texts in self._read("NVTX_EVENTS", needed, {"textId": NONE}, "text"):
            mine = (_process(rows["globalTid"]) == process) & np.isin(rows["eventType"], (PUSH_POP, START_END))
            inline: dict[str, Meaning] = {}
            found = []
            for at in np.flatnonzero(mine).tolist():
                text, key = texts[at], int(rows["textId"][at])
                if text is not None:
                    meaning = inline.get(text) or inline.setdefault(text, self._vocabulary.meaning(text))
                else:
                    meaning = known.get(key) or known.setdefault(
                        key, self._vocabulary.meaning(self._texts.get(key, "")))
                if meaning.name != EMPTY_TEXT:
                    found.append((at, meaning))
            rows = _of(rows, np.array([at for at, _ in found], np.int64))
            category, name, sizes = (np.array([each[at] for _, each in found], np.int32) for at in (0, 1, 3))
            sequence = np.array([each.sequence for _, each in found], np.int64)
            yield self._host(rows, process, name, category, {"dims": sizes}, sequence=sequence)

    def _codes(self, keys: Int64) -> Int32:
        """Return the codes of interned texts; an absent text has the empty text's code."""
        distinct, place = np.unique(keys, return_inverse=True)
        for key in distinct.tolist():
            if key not in self._code_of:
                self._code_of[key] = self._vocabulary.name(self._texts.get(key, ""))
        return np.array([self._code_of[key] for key in distinct.tolist()], np.int32)[place]

    def _host(self, rows: Columns, process: int, name: Int32, category: Int32, codes: Mapping[str, Int32] = NOTHING,
              **numbers: Int64) -> EventBatch:
        """Return the events of the process's threads."""
        return ForeignBatch(rows["start"], rows["end"], {
            "ph": self._vocabulary.code("X"), "cat": category, "name": name, "pid": self._vocabulary.code(process),
            "tid": self._vocabulary.numbers(rows["globalTid"] % PROCESS_SHIFT), **codes}, numbers)

    def _device(self, category: str, rows: Columns, name: Int32 | int, codes: Mapping[str, Int32] = NOTHING,
                **numbers: Int64) -> EventBatch:
        """Return the events of a device's streams."""
        device, stream = rows["deviceId"], rows["streamId"]
        return ForeignBatch(rows["start"], rows["end"], {
            "ph": self._vocabulary.code("X"), "cat": self._vocabulary.code(category), "name": name,
            "pid": self._vocabulary.numbers(device), "tid": self._vocabulary.numbers(stream), **codes},
            {"device": device, "stream": stream, "correlation": rows["correlationId"], **numbers})


def _of(rows: Columns, which: Bool | Int64) -> Columns:
    """Return the selected rows, given their indices or a mask."""
    return {name: column[which] for name, column in rows.items()}


def _process(number: Int64) -> Int64:
    return number // PROCESS_SHIFT % PROCESS_SHIFT


def _number(column: str, default: int) -> str:
    """Return the SQL expression of a column that shall be a whole number."""
    return f"CASE WHEN typeof(\"{column}\") = 'integer' THEN \"{column}\" ELSE {default} END"


def _text(column: str, most: int = MOST_TEXT) -> str:
    """Return the expression of a column that shall be a text, of bounded length."""
    return f"CASE WHEN typeof(\"{column}\") = 'text' THEN substr(\"{column}\", 1, {most}) END"


def _stored(column: str) -> str:
    """Return the expression of the bytes that a text has in the file: all of them are read, also behind a zero, where
    the text ends. Rows of a damaged file may share them."""
    return f"CASE WHEN typeof(\"{column}\") = 'text' THEN length(CAST(\"{column}\" AS BLOB)) ELSE 0 END"


def _plain(name: str) -> str:
    return "".join(c for c in name if c.isascii() and (c.isalnum() or c == "_"))
