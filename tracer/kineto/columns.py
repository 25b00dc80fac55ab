"""Decoded events → columns. One chunk's event objects live only inside ``Collector.add``."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from tracer.graph import NONE, LossReport
from tracer.kineto.events import ABSENT, NO_ARGS, Args, Event
from tracer.kineto.names import (
    CATEGORY_GROUPS,
    DEVICE_KINDS,
    IGNORED_CATEGORIES,
    OTHER_PHASES,
    OWN_FRAME,
    NameGroup,
)
from tracer.kineto.numbers import int32_column, int64_column, nanoseconds

MODULE_PREFIX = "nn.Module: "
_BUILT_IN = "<built-in"
MEMORY_EVENT = "[memory]"
MEMORY_COLUMNS = {"start": np.int64, "thread": np.int32, "bytes": np.int64, "total": np.int64,
                  "address": np.int64, "device": np.int32}


class Interner(dict[str, int]):
    """Text → code, in order of first appearance. ``list(interner)`` is the table."""

    def __missing__(self, text: str) -> int:
        code = self[text] = len(self)
        return code

    def codes(self, texts: Iterable[str]) -> np.ndarray:
        """int32 codes of the texts."""
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

    def codes(self, texts: list[Any]) -> np.ndarray:
        """int32 codes of ``msgspec.Raw`` values."""
        if texts.count(ABSENT) == len(texts):  # by identity, so next to free
            return np.full(len(texts), NONE, np.int32)
        return np.array(list(map(self.__getitem__, map(bytes, texts))), np.int32)


class ThreadInterner(dict[tuple[Any, Any], int]):
    """(pid, tid) → thread number; 12 and "12" are the same."""

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
        """Append equally long columns."""
        for name, values in columns.items():
            self.parts[name].append(values)
        self.rows += len(columns["start"])

    def finish(self, names: dict[str, Any]) -> dict[str, np.ndarray]:
        """All columns, concatenated; the parts are released. ``names`` gives the dtypes of an empty group."""
        out = {}
        for name, dtype in names.items():
            chunks = self.parts.pop(name, [])
            out[name] = np.concatenate(chunks) if chunks else np.zeros(0, dtype)
        return out


_COMMON = {"start": np.int64, "duration": np.int64, "name": np.int32}
GROUP_COLUMNS: dict[NameGroup, dict[str, Any]] = {
    NameGroup.OPERATION: {
        **_COMMON, "thread": np.int32, "order": np.int64, "annotation": np.bool_, "sequence": np.int64,
        "forward_thread": np.int64, "external_id": np.int64, "record_id": np.int64, "shapes": np.int32,
        "dtypes": np.int32, "strides": np.int32, "scalars": np.int32, "module": np.int32},
    NameGroup.CALL: {**_COMMON, "thread": np.int32, "correlation": np.int64},
    NameGroup.DEVICE: {
        **_COMMON, "kind": np.int8, "device": np.int64, "stream": np.int64, "correlation": np.int64,
        "grid": np.int32, "block": np.int32, "registers": np.int32, "shared_bytes": np.int32, "bytes": np.int64},
    NameGroup.SYNC: {
        **_COMMON, "kind_text": np.int32, "stream": np.int64, "correlation": np.int64, "wait_stream": np.int64,
        "record_correlation": np.int64},
    NameGroup.OVERHEAD: {**_COMMON, "thread": np.int32},
    NameGroup.PYTHON: {**_COMMON, "thread": np.int32},
    NameGroup.PYTHON_CALL: {"start": np.int64, "duration": np.int64, "thread": np.int32},
    NameGroup.FRAME: {**_COMMON, "thread": np.int32},
}


class Collector:
    """Gathers all events of a trace into columns. ``finish(group)`` hands a group's columns over, once."""

    def __init__(self, loss: LossReport) -> None:
        self.loss = loss
        self.strings = Interner()
        self.threads = ThreadInterner()
        self.thread_names: dict[tuple[str, str], str] = {}
        self.categories: set[str | None] = set()
        self.flow_categories: set[str | None] = set()
        self.unknown: Counter[str] = Counter()
        """Events of categories or phases that mean nothing to this reader."""
        self.python_events = 0
        self.first_ns: int | None = None
        self.last_ns = 0
        self.memory = EventColumns()
        self.operation_comms: list[tuple[int, Args]] = []
        self.device_comms: list[tuple[int, Args]] = []
        self.extents = Interner()
        """JSON texts of launch grids and blocks, apart from the graph's strings."""
        self.frames = Interner()
        """Names of ``NameGroup.FRAME``, of which few are kept."""
        self._json = JsonInterner(self.strings)
        self._extents = JsonInterner(self.extents)
        self._columns: dict[NameGroup, EventColumns] = {group: EventColumns() for group in GROUP_COLUMNS}
        self._order = 0

    def add(self, events: list[Event]) -> None:
        """Take over the events of one chunk."""
        self.loss.events_read += len(events)
        buckets: dict[str | None, list[Event]] = defaultdict(list)
        flows: set[str | None] = set()
        memory: list[Event] = []
        for event in events:
            if event.ph == "X":
                buckets[event.cat].append(event)
            elif event.ph == "M":
                self._name_thread(event)
            elif event.ph in OTHER_PHASES:
                flows.add(event.cat)
                if event.name == MEMORY_EVENT and event.args is not None:
                    memory.append(event)
            else:
                self.unknown[f"phase {event.ph!r}"] += 1
        self.flow_categories |= flows
        if memory:
            self._add_memory(memory)
        self.categories.update(buckets)
        groups: dict[NameGroup, list[tuple[str | None, list[Event]]]] = defaultdict(list)
        for category, found in buckets.items():
            if category not in CATEGORY_GROUPS and category not in IGNORED_CATEGORIES:
                self.unknown[f"category {category!r}"] += len(found)
            groups[CATEGORY_GROUPS.get(category, NameGroup.IGNORED)].append((category, found))
        hosts = groups.pop(NameGroup.OPERATION, []) + [
            (None, found) for _, found in groups.pop(NameGroup.ANNOTATION, [])
        ]
        for category, found in hosts:
            self._add_operations(found, annotation=category is None)
        for group, parts in groups.items():
            for category, found in parts:
                if group is NameGroup.CALL:
                    self._add_calls(found)
                elif group is NameGroup.DEVICE:
                    self._add_device(found, DEVICE_KINDS.get(category, 0))
                elif group is NameGroup.SYNC:
                    self._add_syncs(found)
                elif group is NameGroup.OVERHEAD:
                    self._add_plain(found, NameGroup.OVERHEAD)
                elif group is NameGroup.PYTHON:
                    self._add_python(found)

    def finish(self, group: NameGroup) -> dict[str, np.ndarray]:
        """The columns of a group (times in absolute nanoseconds of the trace's clock)."""
        return self._columns[group].finish(GROUP_COLUMNS[group])

    def reach(self, group: NameGroup, name: str) -> int:
        """Largest less smallest value of a column gathered so far; 0 where there is none."""
        parts = [part for part in self._columns[group].parts.get(name, ()) if len(part)]
        return max(int(p.max()) for p in parts) - min(int(p.min()) for p in parts) if parts else 0

    def restore(self, group: NameGroup, columns: dict[str, np.ndarray]) -> None:
        """Put columns back that ``finish`` handed over."""
        self._columns[group].extend(**columns)

    def _name_thread(self, event: Event) -> None:
        if event.args is not None and event.args.name:
            key = (_text(event.pid), _text(event.tid))
            if event.name == "thread_name":
                self.thread_names[key] = str(event.args.name)

    def _timed(self, events: list[Event], positive: bool = False) -> tuple[list[Event], np.ndarray, np.ndarray]:
        """The events with usable times, their starts and durations; the others are dropped and counted."""
        start, start_ok = nanoseconds([event.ts for event in events])
        duration, duration_ok = nanoseconds([event.dur for event in events])
        good = start_ok & duration_ok & (duration >= 0) & ((start > 0) if positive else (start >= 0))
        if not good.all():
            self.loss.dropped_events += int(len(good) - good.sum())
            events = [event for event, keep in zip(events, good, strict=True) if keep]
            start, duration = start[good], duration[good]
        if len(start):
            first = int(start.min())
            self.first_ns = first if self.first_ns is None else min(first, self.first_ns)
            self.last_ns = max(self.last_ns, int((start + duration).max()))
        return events, start, duration

    def _common(self, events: list[Event], threads: bool) -> dict[str, np.ndarray]:
        columns = {"name": self.strings.codes([event.name for event in events])}
        if threads:
            pairs = [(event.pid, event.tid) for event in events]
            columns["thread"] = np.array(list(map(self.threads.__getitem__, pairs)), np.int32)
        return columns

    def _add_operations(self, events: list[Event], annotation: bool) -> None:
        events, start, duration = self._timed(events)
        args = [event.args or NO_ARGS for event in events]
        base = self._columns[NameGroup.OPERATION].rows
        self.operation_comms += [(base + i, a) for i, a in enumerate(args) if a.collective]
        order = int64_column([a.event_index for a in args])
        if len(order) and (order < 0).all():
            order = int64_column([a.event_index_2022 for a in args])
        if not annotation and len(order) and (order < 0).all():
            order = np.arange(self._order, self._order + len(order), dtype=np.int64)
        self._order += len(order)
        json = self._json.codes
        external = int64_column([a.external for a in args])
        if len(external) and external[0] == NONE:
            external = np.where(external == NONE, int64_column([a.external_lower for a in args]), external)
        shapes = json([a.dims for a in args])
        if len(shapes) and (shapes == NONE).all():
            shapes = json([a.dims_2020 for a in args])
        modules = [a.modules for a in args]
        self._columns[NameGroup.OPERATION].extend(
            **self._common(events, threads=True), start=start, duration=duration, order=order,
            annotation=np.full(len(events), annotation), external_id=external,
            sequence=int64_column([a.sequence for a in args]),
            forward_thread=int64_column([a.forward_thread for a in args]),
            record_id=int64_column([a.record_id for a in args]),
            shapes=shapes, dtypes=json([a.types for a in args]), strides=json([a.strides for a in args]),
            scalars=json([a.scalars for a in args]),
            module=(np.array([self.strings[m] if m else NONE for m in modules], np.int32)
                    if any(modules) else np.full(len(events), NONE, np.int32)))

    def _add_calls(self, events: list[Event]) -> None:
        events, start, duration = self._timed(events)
        correlation = int64_column([event.args.correlation if event.args else NONE for event in events])
        self._columns[NameGroup.CALL].extend(
            **self._common(events, threads=True), start=start, duration=duration, correlation=correlation)

    def _add_device(self, events: list[Event], kind: int) -> None:
        events, start, duration = self._timed(events, positive=True)
        args = [event.args or NO_ARGS for event in events]
        base = self._columns[NameGroup.DEVICE].rows
        self.device_comms += [(base + i, a) for i, a in enumerate(args) if a.collective]
        device = int64_column([a.device for a in args])
        stream = int64_column([a.stream for a in args])
        for row in np.flatnonzero(device == NONE):
            device[row] = _number(events[row].pid)
        for row in np.flatnonzero(stream == NONE):
            stream[row] = _number(events[row].tid)
        self._columns[NameGroup.DEVICE].extend(
            **self._common(events, threads=False), start=start, duration=duration,
            kind=np.full(len(events), kind, np.int8), device=device, stream=stream,
            correlation=int64_column([a.correlation for a in args]),
            grid=self._extents.codes([a.grid for a in args]), block=self._extents.codes([a.block for a in args]),
            registers=int32_column([a.registers for a in args]),
            shared_bytes=int32_column([a.shared_memory for a in args]), bytes=int64_column([a.bytes for a in args]))

    def _add_memory(self, events: list[Event]) -> None:
        """Take changes of memory; they bound no window, and those without a time are left out."""
        start, good = nanoseconds([event.ts for event in events])
        args = [event.args or NO_ARGS for event in events]
        # The profiler's numbers of kinds: 0 is the host; what 2021's traces call a device has none.
        device = [a.memory_device if a.memory_kind > 0 else NONE for a in args]
        thread = np.array([self.threads[event.pid, event.tid] for event in events], np.int32)
        columns = {"start": start, "thread": thread, "bytes": int64_column([a.allocated for a in args]),
                   "total": int64_column([a.total_allocated for a in args]),
                   "address": int64_column([a.address for a in args]), "device": int32_column(device)}
        self.memory.extend(**{name: column[good] for name, column in columns.items()})

    def _add_syncs(self, events: list[Event]) -> None:
        events, start, duration = self._timed(events)
        args = [event.args or NO_ARGS for event in events]
        texts = [a.sync_kind or event.name for a, event in zip(args, events, strict=True)]
        self._columns[NameGroup.SYNC].extend(
            **self._common(events, threads=False), start=start, duration=duration,
            kind_text=self.strings.codes(texts), stream=_absent(int64_column([a.stream for a in args])),
            correlation=int64_column([a.correlation for a in args]),
            wait_stream=_absent(int64_column([a.wait_stream for a in args])),
            record_correlation=_absent(int64_column([a.record_correlation for a in args])))

    def _add_plain(self, events: list[Event], group: NameGroup) -> None:
        events, start, duration = self._timed(events)
        self._columns[group].extend(**self._common(events, threads=True), start=start, duration=duration)

    def _add_python(self, events: list[Event]) -> None:
        self.python_events += len(events)
        modules = [event for event in events if event.name.startswith(MODULE_PREFIX)]
        self._add_plain(modules, NameGroup.PYTHON)
        rest = [event for event in events if not event.name.startswith(MODULE_PREFIX)]
        rest, start, duration = self._timed(rest)  # they bound the window
        called = np.array([not event.name.startswith(_BUILT_IN) for event in rest], np.bool_)
        thread = np.array([self.threads[event.pid, event.tid] for event in rest], np.int32)
        self._columns[NameGroup.PYTHON_CALL].extend(
            start=start[called], duration=duration[called], thread=thread[called])
        own = [i for i, event in enumerate(rest) if OWN_FRAME.match(event.name)]
        if own:
            events = [rest[i] for i in own]
            threads = [self.threads[event.pid, event.tid] for event in events]
            self._columns[NameGroup.FRAME].extend(
                name=self.frames.codes([event.name for event in events]), thread=np.array(threads, np.int32),
                start=start[own], duration=duration[own])


def _absent(values: np.ndarray) -> np.ndarray:
    """CUPTI writes an unknown 32-bit id as 4294967295."""
    values[values == 0xFFFFFFFF] = NONE
    return values


def _number(text: Any) -> int:
    digits = "".join(c for c in str(text) if c.isdecimal())
    return int(digits) if digits and len(digits) < 18 else NONE
