"""Events of the scanner, gathered into columns by group."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from tracer.columns import grouped, is_constant
from tracer.graph import NONE, LossReport
from tracer.guard import well_formed
from tracer.kineto.events import (
    CATEGORY_GROUPS,
    DEVICE_KINDS,
    IGNORED_CATEGORIES,
    OTHER_PHASES,
    OWN_FRAME,
    UNREADABLE_DEVICE_CATEGORIES,
    Args,
    NameGroup,
    is_accelerator_call,
)
from tracer.kineto.scanner import EMPTY_TEXT, EventBatch, HasValues, TokenMap

if TYPE_CHECKING:
    from tracer.kineto.processes import ProcessPart

MODULE_PREFIX = "nn.Module: "
_MODULE, _BUILT_IN, _OWN, _OTHER = range(4)
"""Owners of Python functions: modules, the interpreter, the program, libraries."""
_NO_ROWS = np.zeros(0, np.int64)
MEMORY_EVENT = "[memory]"
MEMORY_COLUMNS = {"start": np.int64, "thread": np.int32, "bytes": np.int64, "total": np.int64,
                  "address": np.int64, "device": np.int32}


class Interner(dict[str, int]):
    """Text → code, in order of first appearance. ``list(interner)`` is the table."""

    def __missing__(self, text: str) -> int:
        code = self[text] = len(self)
        return code

    def codes(self, texts: Iterable[str]) -> np.ndarray:
        """Return int32 codes of the texts."""
        return np.array(list(map(self.__getitem__, texts)), np.int32)


class JsonInterner(dict[bytes, int]):
    """Undecoded JSON text → code in an ``Interner``; absent text and ``null`` → ``NONE``."""

    def __init__(self, strings: Interner) -> None:
        super().__init__({b"": NONE, b"null": NONE})
        self._strings = strings

    def __missing__(self, text: bytes) -> int:
        if b"\n" in text or b"\t" in text:  # some writers indent; one text for one value
            value = msgspec.json.format(text, indent=-1).decode("utf-8", "replace")
        else:
            value = text.decode("utf-8", "replace")
        code = self[text] = self._strings[value]
        return code


class ThreadInterner(dict[tuple[Any, Any], int]):
    """(pid, tid) → thread number; the number 12 and the text "12" are the same."""

    def processes(self) -> np.ndarray:
        """Return the number of each thread's process, [threads]; at least one entry, even without threads."""
        pids: dict[str, int] = {}
        return np.array([pids.setdefault(pid, len(pids)) for pid, _ in self.keys_in_order] or [0], np.int32)

    def __init__(self) -> None:
        super().__init__()
        self.keys_in_order: list[tuple[str, str]] = []
        self._normal: dict[tuple[str, str], int] = {}

    def __missing__(self, key: tuple[Any, Any]) -> int:
        normal = (_text(key[0]), _text(key[1]))
        code = self._normal.get(normal)
        if code is None:
            code = self._normal[normal] = len(self.keys_in_order)
            self.keys_in_order.append(normal)
        self[key] = code
        return code


def _text(value: Any) -> str:
    return "" if value is None else str(value)


@dataclass
class EventColumns:
    """Named int columns of one group, gathered chunk by chunk."""

    parts: dict[str, list[np.ndarray]] = field(default_factory=lambda: defaultdict(list))
    rows: int = 0

    def extend(self, **columns: np.ndarray) -> None:
        """Append equally long columns; a column of a single value takes no memory, except for times."""
        for name, values in columns.items():
            alike = name not in _TIMES and len(values) > 1 and values[0] == values[-1] and (values == values[0]).all()
            self.parts[name].append(np.broadcast_to(values[:1].copy(), len(values)) if alike else values)
        self.rows += len(columns["start"])

    def finish(self, names: dict[str, Any]) -> dict[str, np.ndarray]:
        """Return all columns, concatenated, and release the parts. A column of a single value stays constant.

        ``names`` gives the dtypes of an empty group.
        """
        out = {}
        for name, dtype in names.items():
            chunks = [chunk for chunk in self.parts.pop(name, []) if len(chunk)]
            alike = chunks and name not in _TIMES and all(
                (is_constant(chunk) or len(chunk) == 1) and chunk[0] == chunks[0][0] for chunk in chunks)
            if alike:
                out[name] = np.broadcast_to(chunks[0][:1], sum(map(len, chunks)))
            else:
                out[name] = np.concatenate(chunks) if chunks else np.zeros(0, dtype)
        return out


_TIMES = frozenset({"start", "duration"})
_COMMON = {"start": np.int64, "duration": np.int64, "name": np.int32}
GROUP_COLUMNS: dict[NameGroup, dict[str, Any]] = {
    NameGroup.OPERATION: {
        **_COMMON, "thread": np.int32, "order": np.int64, "annotation": np.bool_, "sequence": np.int64,
        "forward_thread": np.int64, "external_id": np.int64, "record_id": np.int64, "shapes": np.int32,
        "dtypes": np.int32, "strides": np.int32, "scalars": np.int32, "module": np.int32},
    NameGroup.CALL: {**_COMMON, "thread": np.int32, "correlation": np.int64},
    NameGroup.DEVICE: {
        **_COMMON, "kind": np.int8, "device": np.int64, "stream": np.int64, "correlation": np.int64,
        "external_id": np.int64, "grid": np.int32, "block": np.int32, "registers": np.int32, "shared_bytes": np.int32,
        "bytes": np.int64},
    NameGroup.SYNC: {
        **_COMMON, "kind_text": np.int32, "stream": np.int64, "correlation": np.int64, "wait_stream": np.int64,
        "record_correlation": np.int64},
    NameGroup.OVERHEAD: {**_COMMON, "thread": np.int32},
    NameGroup.PYTHON: {**_COMMON, "thread": np.int32},
    NameGroup.PYTHON_CALL: {"start": np.int64, "duration": np.int64, "thread": np.int32},
    NameGroup.FRAME: {**_COMMON, "thread": np.int32},
}


class Collector:
    """Gathers all events of a trace into columns. ``finish(group)`` hands a group's columns over, once.

    Args:
        loss: counts what is dropped.
        scanner: scanner of the batches that ``add`` gets.
        part: the one process to read, of a file that holds several.
    """

    def __init__(self, loss: LossReport, scanner: HasValues, part: ProcessPart | None = None) -> None:
        self._part = part
        self._of_part = TokenMap(scanner, lambda pid: part is None or _text(pid) == part.pid, np.bool_)
        self.loss = loss
        self.strings = Interner()
        self.threads = ThreadInterner()
        self.thread_names: dict[tuple[str, str], str] = {}
        self.categories: set[str | None] = set()
        self.flow_categories: set[str | None] = set()
        self.unknown: Counter[str] = Counter()
        """Events of categories or phases that this reader does not know."""
        self.unknown_places: Counter[str] = Counter()
        """Unknown timed events by process. Those of a process that is not a host's are a device's."""
        self.unreadable_events = 0
        """Timed events whose category only an accelerator's work has."""
        self.accelerator_calls = 0
        self.python_events = 0
        self.first_ns: int | None = None
        self.last_ns = 0
        self.memory = EventColumns()
        self.operation_comms: list[tuple[int, Args]] = []
        self.device_comms: list[tuple[int, Args]] = []
        self.extents = Interner()
        """JSON texts of launch grids and blocks, kept out of the graph's strings."""
        self.frames = Interner()
        """Names of the Python frames (``NameGroup.FRAME``); few of them are kept."""
        json, extents = JsonInterner(self.strings), JsonInterner(self.extents)
        self._texts = TokenMap(scanner, lambda text: self.strings[well_formed(text)])
        self._some_texts = TokenMap(scanner, lambda text: self.strings[well_formed(text)] if text else NONE)
        self._json = TokenMap(scanner, json.__getitem__)
        self._extents = TokenMap(scanner, extents.__getitem__)
        self._frames = TokenMap(scanner, self.frames.__getitem__)
        self._numbers = TokenMap(scanner, _number, np.int64)
        self._is_memory = TokenMap(scanner, MEMORY_EVENT.__eq__, np.bool_)
        self._python_kinds = TokenMap(scanner, _python_kind, np.int8)
        self._values = scanner.values
        self._columns: dict[NameGroup, EventColumns] = {group: EventColumns() for group in GROUP_COLUMNS}
        self._order = 0

    def add(self, batch: EventBatch) -> None:
        """Add the events of one batch."""
        self.loss.events_read += batch.events
        buckets: dict[str | None, np.ndarray] = {}
        named, memory = [], []
        for phase, category, all_rows in self._parts(batch):
            rows = all_rows if self._part is None else all_rows[self._is_mine(batch, category, all_rows, self._part)]
            if phase == "X":
                self.loss.other_process_events += len(all_rows) - len(rows)
                buckets[category] = rows
            elif phase == "M":
                named.append(rows)
            elif phase in OTHER_PHASES:
                if phase == "B":
                    self.unknown_places.update(self._processes(batch, rows))
                self.flow_categories.add(category)
                memory.append(rows[self._is_memory(batch.code("name", rows))])
            else:
                self.unknown[f"phase {phase!r}"] += len(rows)
        for row in np.sort(np.concatenate([*named, _NO_ROWS])).tolist():
            self._name_thread(batch, np.array([row]))
        changes = batch.with_args(np.sort(np.concatenate([*memory, _NO_ROWS])))
        if len(changes):
            self._add_memory(batch, changes)
        self.categories.update(buckets)
        groups: dict[NameGroup, list[tuple[str | None, np.ndarray]]] = defaultdict(list)
        unplaced = [_NO_ROWS]
        for category, rows in buckets.items():
            if category not in CATEGORY_GROUPS and category not in IGNORED_CATEGORIES:
                self.unknown[f"category {category!r}"] += len(rows)
                if category in UNREADABLE_DEVICE_CATEGORIES:
                    self.unreadable_events += len(rows)
                else:
                    unplaced.append(rows)
            if is_accelerator_call(category):
                self.accelerator_calls += len(rows)
            groups[CATEGORY_GROUPS.get(category, NameGroup.IGNORED)].append((category, rows))
        self.unknown_places.update(self._processes(batch, np.concatenate(unplaced)))
        hosts = groups.pop(NameGroup.OPERATION, []) + [
            (None, rows) for _, rows in groups.pop(NameGroup.ANNOTATION, [])
        ]
        for category, rows in hosts:
            self._add_operations(batch, rows, annotation=category is None)
        for group, parts in groups.items():
            for category, rows in parts:
                if group is NameGroup.CALL:
                    self._add_calls(batch, rows)
                elif group is NameGroup.DEVICE:
                    self._add_device(batch, rows, DEVICE_KINDS.get(category, 0))
                elif group is NameGroup.SYNC:
                    self._add_syncs(batch, rows)
                elif group is NameGroup.OVERHEAD:
                    self._add_plain(batch, rows, NameGroup.OVERHEAD)
                elif group is NameGroup.PYTHON:
                    self._add_python(batch, rows)

    def _is_mine(self, batch: EventBatch, category: str | None, rows: np.ndarray, part: ProcessPart) -> np.ndarray:
        """Return which rows belong to the process that is read, [rows]."""
        if CATEGORY_GROUPS.get(category) not in (NameGroup.DEVICE, NameGroup.SYNC):
            return self._of_part(batch.code("pid", rows))
        return part.owns(self._devices_of(batch, rows), batch.number("correlation", rows))

    def _devices_of(self, batch: EventBatch, rows: np.ndarray) -> np.ndarray:
        """Return the device of each row of device work; if an event names none, the number in its process's id."""
        device = batch.number("device", rows)
        unknown = np.flatnonzero(device == NONE)
        device[unknown] = self._numbers(batch.code("pid", rows[unknown]))
        return device

    def _parts(self, batch: EventBatch) -> list[tuple[str, str | None, np.ndarray]]:
        """Return (phase, category, rows) for each kind of event, in the order of their first events."""
        rows = np.arange(batch.events)
        phase, category = (grouped(batch.code(name, rows).astype(np.int64)) for name in ("ph", "cat"))
        kind = phase[1] * len(category[0]) + category[1]
        small = len(phase[0]) * len(category[0]) <= 1 << 16  # numpy sorts numbers of 16 bits by counting
        order = np.argsort(kind.astype(np.uint16) if small else kind, kind="stable")
        kinds, counts = np.unique(kind[order], return_counts=True) if not small else _counts(kind)
        found = []
        for each, last, count in zip(kinds.tolist(), np.cumsum(counts).tolist(), counts.tolist(), strict=True):
            of_phase, of_category = divmod(each, len(category[0]))
            found.append((self._values[phase[0][of_phase]], self._values[category[0][of_category]],
                          order[last - count:last]))
        return _merged(found)

    def finish(self, group: NameGroup) -> dict[str, np.ndarray]:
        """Return the columns of a group (times in absolute nanoseconds of the trace's clock)."""
        return self._columns[group].finish(GROUP_COLUMNS[group])

    def of_window(self, group: NameGroup) -> dict[str, np.ndarray]:
        """Return the columns of a group, with starts relative to the window's."""
        columns = self.finish(group)
        columns["start"] = columns["start"] - (self.first_ns or 0)
        return columns

    def rows(self, group: NameGroup) -> int:
        """Return the number of events of a group gathered so far."""
        return self._columns[group].rows

    def gathered(self, group: NameGroup, *names: str) -> list[np.ndarray]:
        """Return copies of some columns of a group, which keeps its own."""
        parts = self._columns[group].parts
        return [np.concatenate([*parts.get(name, ()), np.zeros(0, GROUP_COLUMNS[group][name])]) for name in names]

    def reach(self, group: NameGroup, name: str) -> int:
        """Return the range (largest minus smallest value) of a column gathered so far; 0 if it is empty."""
        parts = [part for part in self._columns[group].parts.get(name, ()) if len(part)]
        return max(int(p.max()) for p in parts) - min(int(p.min()) for p in parts) if parts else 0

    def restore(self, group: NameGroup, columns: dict[str, np.ndarray]) -> None:
        """Put back columns that ``finish`` returned."""
        self._columns[group].extend(**columns)

    def _name_thread(self, batch: EventBatch, row: np.ndarray) -> None:
        """Take a thread's name from one row."""
        pid, tid, what, name = (self._values[int(batch.code(field, row)[0])] for field in
                                ("pid", "tid", "name", "thread_name"))
        if name and what == "thread_name":
            self.thread_names[_text(pid), _text(tid)] = str(name)

    def _timed(self, batch: EventBatch, rows: np.ndarray, bounds_at_zero: bool = True) -> \
            tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the rows with usable times, their starts and durations; the others are dropped and counted.

        A start of 0 bounds the window unless ``bounds_at_zero`` is false: device events have 0 for an unknown start.
        """
        start, start_ok = batch.time("ts", rows)
        duration, duration_ok = batch.time("dur", rows)
        good = start_ok & duration_ok & (duration >= 0) & (start >= 0)
        if not good.all():
            self.loss.dropped_events += int(len(good) - good.sum())
            rows, start, duration = rows[good], start[good], duration[good]
        stamped = slice(None) if bounds_at_zero or (start > 0).all() else start > 0
        self._bound(start[stamped], duration[stamped])
        return rows, start, duration

    def _bound(self, start: np.ndarray, duration: np.ndarray) -> None:
        """Widen the window to hold these events."""
        if len(start):
            first = int(start.min())
            self.first_ns = first if self.first_ns is None else min(first, self.first_ns)
            self.last_ns = max(self.last_ns, int((start + duration).max()))

    def bound_again(self) -> None:
        """Recompute the window's bounds after some events were moved or dropped."""
        self.first_ns, self.last_ns = None, 0
        for columns in self._columns.values():
            for start, duration in zip(columns.parts.get("start", ()), columns.parts.get("duration", ()), strict=True):
                self._bound(start, duration)

    def _threads_of(self, batch: EventBatch, rows: np.ndarray) -> np.ndarray:
        """Return int32 thread numbers."""
        pids, tids = (batch.code(name, rows).astype(np.int64) for name in ("pid", "tid"))
        if not len(rows):
            return np.zeros(0, np.int32)
        pairs, place = grouped(pids * len(self._values) + tids)
        first = np.empty(len(pairs), np.int64)
        first[place[::-1]] = np.arange(len(rows) - 1, -1, -1)
        numbers = np.empty(len(pairs), np.int32)
        for at in np.argsort(first).tolist():
            pid, tid = divmod(int(pairs[at]), len(self._values))
            numbers[at] = self.threads[self._values[pid], self._values[tid]]
        return numbers[place]

    def _processes(self, batch: EventBatch, rows: np.ndarray) -> dict[str, int]:
        """Return the number of rows by process."""
        codes, counts = np.unique(batch.code("pid", rows), return_counts=True)
        return {_text(self._values[code]): count for code, count in zip(codes.tolist(), counts.tolist(), strict=True)}

    def _common(self, batch: EventBatch, rows: np.ndarray, threads: bool) -> dict[str, np.ndarray]:
        columns = {"name": self._texts(batch.code("name", rows))}
        if threads:
            columns["thread"] = self._threads_of(batch, rows)
        return columns

    def _add_operations(self, batch: EventBatch, rows: np.ndarray, annotation: bool) -> None:
        rows, start, duration = self._timed(batch, rows)
        base = self._columns[NameGroup.OPERATION].rows
        self.operation_comms += _collectives(batch, rows, base)
        order = batch.number("event_index", rows)
        if len(order) and (order < 0).all():
            order = batch.number("event_index_2022", rows)
        if not annotation and len(order) and (order < 0).all():
            order = np.arange(self._order, self._order + len(order), dtype=np.int64)
        self._order += len(order)
        external = batch.number("external", rows)
        if len(external) and external[0] == NONE:
            external = np.where(external == NONE, batch.number("external_lower", rows), external)
        shapes = self._json(batch.code("dims", rows))
        if len(shapes) and (shapes == NONE).all():
            shapes = self._json(batch.code("dims_2020", rows))
        self._columns[NameGroup.OPERATION].extend(
            **self._common(batch, rows, threads=True), start=start, duration=duration, order=order,
            annotation=np.full(len(rows), annotation), external_id=external,
            sequence=batch.number("sequence", rows), forward_thread=batch.number("forward_thread", rows),
            record_id=batch.number("record_id", rows), shapes=shapes, dtypes=self._json(batch.code("types", rows)),
            strides=self._json(batch.code("strides", rows)), scalars=self._json(batch.code("scalars", rows)),
            module=self._some_texts(batch.code("modules", rows)))

    def _add_calls(self, batch: EventBatch, rows: np.ndarray) -> None:
        rows, start, duration = self._timed(batch, rows)
        self._columns[NameGroup.CALL].extend(
            **self._common(batch, rows, threads=True), start=start, duration=duration,
            correlation=batch.number("correlation", rows))

    def _add_device(self, batch: EventBatch, rows: np.ndarray, kind: int) -> None:
        rows, start, duration = self._timed(batch, rows, bounds_at_zero=False)
        base = self._columns[NameGroup.DEVICE].rows
        self.device_comms += _collectives(batch, rows, base)
        device, stream = self._devices_of(batch, rows), batch.number("stream", rows)
        unknown = np.flatnonzero(stream == NONE)
        stream[unknown] = self._numbers(batch.code("tid", rows[unknown]))
        self._columns[NameGroup.DEVICE].extend(
            **self._common(batch, rows, threads=False), start=start, duration=duration,
            kind=np.full(len(rows), kind, np.int8), device=device, stream=stream,
            correlation=batch.number("correlation", rows), external_id=batch.number("external", rows),
            grid=self._extents(batch.code("grid", rows)),
            block=self._extents(batch.code("block", rows)), registers=_int32(batch.number("registers", rows)),
            shared_bytes=_int32(batch.number("shared_memory", rows)), bytes=batch.number("bytes", rows))

    def _add_memory(self, batch: EventBatch, rows: np.ndarray) -> None:
        """Take changes of memory, without those that have no time; they do not bound the window."""
        start, good = batch.time("ts", rows)
        # The profiler's numbers of device types: 0 is the host. Traces of 2021 have no type where they name a device.
        device = np.where(batch.number("memory_kind", rows) > 0, batch.number("memory_device", rows), NONE)
        columns = {"start": start, "thread": self._threads_of(batch, rows), "bytes": batch.number("allocated", rows),
                   "total": batch.number("total_allocated", rows), "address": batch.number("address", rows),
                   "device": _int32(device)}
        self.memory.extend(**{name: column[good] for name, column in columns.items()})

    def _add_syncs(self, batch: EventBatch, rows: np.ndarray) -> None:
        rows, start, duration = self._timed(batch, rows)
        kinds, names = batch.code("sync_kind", rows), batch.code("name", rows)
        self._columns[NameGroup.SYNC].extend(
            **self._common(batch, rows, threads=False), start=start, duration=duration,
            kind_text=self._texts(np.where(kinds == EMPTY_TEXT, names, kinds)),
            stream=_absent(batch.number("stream", rows)), correlation=batch.number("correlation", rows),
            wait_stream=_absent(batch.number("wait_stream", rows)),
            record_correlation=_absent(batch.number("record_correlation", rows)))

    def _add_plain(self, batch: EventBatch, rows: np.ndarray, group: NameGroup) -> None:
        rows, start, duration = self._timed(batch, rows)
        self._columns[group].extend(**self._common(batch, rows, threads=True), start=start, duration=duration)

    def _add_python(self, batch: EventBatch, rows: np.ndarray) -> None:
        self.python_events += len(rows)
        kinds = self._python_kinds(batch.code("name", rows))
        self._add_plain(batch, rows[kinds == _MODULE], NameGroup.PYTHON)
        rest, start, duration = self._timed(batch, rows[kinds != _MODULE])  # they bound the window
        names = batch.code("name", rest)
        kinds = self._python_kinds(names)
        thread = self._threads_of(batch, rest)
        called, own = kinds != _BUILT_IN, np.flatnonzero(kinds == _OWN)
        self._columns[NameGroup.PYTHON_CALL].extend(
            start=start[called], duration=duration[called], thread=thread[called])
        if len(own):
            self._columns[NameGroup.FRAME].extend(
                name=self._frames(names[own]), thread=thread[own], start=start[own], duration=duration[own])


def _python_kind(name: str) -> int:
    """Return the owner of a Python function, by its name: modules, the interpreter, the program or libraries."""
    if name.startswith(MODULE_PREFIX):
        return _MODULE
    if name.startswith("<built-in"):
        return _BUILT_IN
    return _OWN if OWN_FRAME.match(name) else _OTHER


def _collectives(batch: EventBatch, rows: np.ndarray, base: int) -> list[tuple[int, Args]]:
    """Return the arguments of the rows that name a collective, each with its position plus ``base``."""
    if not batch.collectives:
        return []
    named = np.array(sorted(batch.collectives), np.int64)
    at = np.searchsorted(rows, named)
    found = at < len(rows)
    found[found] = rows[at[found]] == named[found]
    return [(base + place, batch.collectives[row]) for place, row in
            zip(at[found].tolist(), named[found].tolist(), strict=True)]


def _counts(kind: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct values of an array of small numbers, and the count of each."""
    counts = np.bincount(kind)
    kinds = np.flatnonzero(counts)
    return kinds, counts[kinds]


def _merged(parts: list[tuple[Any, Any, np.ndarray]]) -> list[tuple[str, str | None, np.ndarray]]:
    """Merge parts of one phase and category, which may be spelled in two ways, in the order of their first rows."""
    rows: dict[tuple[Any, Any], list[np.ndarray]] = defaultdict(list)
    for phase, category, found in parts:
        rows[phase, category].append(found)
    whole = [(*names, found[0] if len(found) == 1 else np.sort(np.concatenate(found)))
             for names, found in rows.items()]
    return sorted(whole, key=lambda part: int(part[2][0]))


def _int32(values: np.ndarray) -> np.ndarray:
    """Return values as int32; values that do not fit become -1."""
    values[(values > 2**31 - 1) | (values < -(2**31))] = NONE
    return values.astype(np.int32)


def _absent(values: np.ndarray) -> np.ndarray:
    """Return ids with -1 for unknown: CUPTI writes an unknown 32-bit id as 4294967295."""
    values[values == 0xFFFFFFFF] = NONE
    return values


def _number(text: Any) -> int:
    digits = "".join(c for c in str(text) if c.isdecimal())
    return int(digits) if digits and len(digits) < 18 else NONE
