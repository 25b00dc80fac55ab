"""A job's timeline as a Perfetto trace in protobuf, for large jobs: smaller and faster to open than JSON.

The messages are those of the package ``perfetto``. A slice is two packets. Packets with the same track and name differ
only in their time. Therefore protobuf encodes everything but the time once, and the time is put before it. Packets with
equal times are in the order of nesting: ends first, then begins, the longest first.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, BinaryIO

import numpy as np

from graph_predictor.prediction.replay import Replay
from graph_predictor.prediction.simulated_job import SimulatedJob, replayed_job
from step_views.reports.timeline import ArrowBlock, CountBlock, SliceBlock, TrackList, job_timeline
from tracer.arrays import Int64
from tracer.errors import ForetraceError
from tracer.output_file import whole_file
from tracer.output_kind import PERFETTO, check_output

_BEGIN, _END, _COUNTER = 1, 2, 4
"""``TrackEvent.Type``."""
_CLEARED, _NEEDED = 1, 2
"""``TracePacket.SequenceFlags``: a sequence's state begins; a packet needs this state."""
_TIMESTAMP, _PACKET = b"\x40", b"\x0a"
"""Keys of ``TracePacket.timestamp`` (field 8, varint) and ``Trace.packet`` (field 1, with its length)."""
_BLOCK = 1 << 20  # bytes written at once; chosen


def write_perfetto(source: Replay | SimulatedJob, path: str | os.PathLike[str]) -> None:
    """Write a job's timeline in Perfetto's protobuf format, with counts and with arrows from launches to kernels. Times
    are ns from the job's start. An existing file is replaced only if it is such a trace, written by foretrace. Raises
    ``ForetraceError`` if the file cannot be written or the package ``perfetto`` is not installed."""
    messages = _messages()
    check_output(os.fspath(path), [], PERFETTO)
    job = source if isinstance(source, SimulatedJob) else replayed_job(source)
    with ExitStack() as stack:
        stream: BinaryIO = stack.enter_context(whole_file(path))
        stream.write(_described(messages, job))
        kept = bytearray()
        arrows = 1
        for process, parts in job_timeline(job):
            writer = _Process(messages, process)
            for part in parts:
                writer.add(part)
            arrows += writer.number_arrows(arrows)
            for packet in writer.packets():
                kept += packet
                if len(kept) > _BLOCK:
                    stream.write(kept)
                    kept.clear()
        stream.write(kept)


def _messages() -> Any:
    try:
        from perfetto.protos.perfetto.trace import perfetto_trace_pb2
    except ImportError as error:
        raise ForetraceError("Perfetto's form of a trace needs its package, which is not installed: pip install "
                             "'foretrace[export]', or write JSON (OUT.json).") from error
    return perfetto_trace_pb2


def _described(messages: Any, job: SimulatedJob) -> bytes:
    """Return the first packet: a track that describes the trace and names the program that wrote it."""
    packet = messages.TracePacket(trusted_packet_sequence_id=1)
    packet.track_descriptor.uuid = 1
    packet.track_descriptor.name = f"foretrace: {job.title}"
    return _framed(packet.SerializeToString())


def _framed(body: bytes) -> bytes:
    return _PACKET + varint(len(body)) + body


def varint(value: int) -> bytes:
    """Return a number in protobuf's encoding, with seven bits per byte."""
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


class _Process:
    """The packets of one process: a separate sequence, which defines each name once."""

    def __init__(self, messages: Any, process: TrackList) -> None:
        self.messages, self.process = messages, process
        self.sequence = process.number + 1
        self.base = process.number << 32
        """Number of the first track of this process."""
        self.slices: list[SliceBlock] = []
        self.arrows: list[ArrowBlock] = []
        self.counts: list[CountBlock] = []
        self.names: dict[str, int] = {}
        self.first_arrow = 1

    def add(self, part: SliceBlock | ArrowBlock | CountBlock) -> None:
        """Add a part of the process's timeline."""
        if isinstance(part, SliceBlock):
            self.slices.append(part)
        elif isinstance(part, ArrowBlock):
            self.arrows.append(part)
        else:
            self.counts.append(part)

    def number_arrows(self, first: int) -> int:
        """Number the process's arrows from ``first`` on; return how many there are."""
        self.first_arrow = first
        return sum(len(part.from_ns) for part in self.arrows)

    def packets(self) -> Iterator[bytes]:
        """Yield all packets: descriptions, names, slices, counts."""
        yield from self._descriptions()
        # Bodies first, because they determine which names are needed.
        bodies, place, time = self._events()
        yield self._interned()
        form = _TIMESTAMP
        for body, at in zip(place.tolist(), time.tolist(), strict=True):
            yield _framed(form + varint(at) + bodies[body])
        yield from self._counters()

    def _packet(self) -> Any:
        return self.messages.TracePacket(trusted_packet_sequence_id=self.sequence)

    def _uuid(self, track: int) -> int:
        return self.base + 1 + track

    def _descriptions(self) -> Iterator[bytes]:
        packet = self._packet()
        descriptor = packet.track_descriptor
        descriptor.uuid = self.base
        descriptor.process.pid, descriptor.process.process_name = self.process.number, _text(self.process.name)
        descriptor.child_ordering = 3  # EXPLICIT: by ``sibling_order_rank``
        yield _framed(packet.SerializeToString())
        for (order, name), track in self.process.tracks.items():
            packet = self._packet()
            descriptor = packet.track_descriptor
            descriptor.uuid, descriptor.parent_uuid, descriptor.name = self._uuid(track), self.base, _text(name)
            descriptor.sibling_order_rank = order
            yield _framed(packet.SerializeToString())

    def _interned(self) -> bytes:
        packet = self._packet()
        packet.sequence_flags = _CLEARED
        for name, number in self.names.items():
            packet.interned_data.event_names.add(iid=number, name=_text(name))
        return _framed(packet.SerializeToString())

    def _events(self) -> tuple[list[bytes], Int64, Int64]:
        """Return packets without their times, and for each event the place of its packet and its time, in order."""
        flows = self._flows()
        bodies: list[bytes] = []
        known: dict[tuple[Any, ...], int] = {}
        columns: list[np.ndarray] = []
        for part in self.slices:
            if not len(part.start_ns):
                continue
            keys = np.stack([part.track, part.name, *part.arguments.values()])
            kinds, kind = np.unique(keys, axis=1, return_inverse=True)
            kind = kind.reshape(-1)
            begins = np.empty(kinds.shape[1], np.int64)
            ends = np.empty(kinds.shape[1], np.int64)
            for column, (track, name, *values) in enumerate(kinds.T.tolist()):
                arguments = [(key, part.texts[value]) for key, value in zip(part.arguments, values, strict=True)]
                begins[column] = _once(known, bodies, (track, part.category, part.texts[name], *arguments),
                                       lambda t=track, n=part.texts[name], a=arguments, c=part.category:  # type: ignore
                                       self._begin(t, n, c, a, ()))
                ends[column] = _once(known, bodies, (track,), lambda t=track: self._end(t))  # type: ignore[misc]
            begin = begins[kind]
            for row in np.flatnonzero(np.isin(part.track * 2**44 + part.start_ns, flows.keys_array)).tolist():
                ids = flows.of(part.category, int(part.track[row]), int(part.start_ns[row]))
                if ids:
                    track, name, *values = keys[:, row].tolist()
                    arguments = [(key, part.texts[value]) for key, value in zip(part.arguments, values, strict=True)]
                    begin[row] = len(bodies)
                    bodies.append(self._begin(track, part.texts[name], part.category, arguments, ids))
            columns.append(np.stack([begin, ends[kind], part.start_ns, part.duration_ns]))
        if not columns:
            return bodies, np.zeros(0, np.int64), np.zeros(0, np.int64)
        begin, end, start, duration = np.concatenate(columns, axis=1)
        count = len(begin)
        # At equal times: ends of earlier slices, the latest begun first; then begins, the longest first. A slice
        # without duration begins and ends within the others.
        time = np.concatenate([start, start + duration])
        late = np.concatenate([np.ones(count, np.int64), np.where(duration > 0, 0, 1)])
        within = np.concatenate([-duration, np.where(duration > 0, -start, 0)])
        twice = np.concatenate([np.arange(count), np.arange(count)])
        is_end = np.repeat([0, 1], count)
        order = np.lexsort((is_end, twice, within, late, time))
        return bodies, np.concatenate([begin, end])[order], time[order]

    def _begin(self, track: int, name: str, category: str, arguments: list[tuple[str, str]],
               flows: tuple[int, ...]) -> bytes:
        packet = self._packet()
        packet.sequence_flags = _NEEDED
        event = packet.track_event
        event.type, event.track_uuid = _BEGIN, self._uuid(track)
        event.name_iid = self.names.setdefault(name, len(self.names) + 1)
        event.categories.append(category)
        for key, value in arguments:
            if value:
                event.debug_annotations.add(name=key, string_value=_text(value))
        event.flow_ids.extend(flows)
        return packet.SerializeToString()  # type: ignore[no-any-return]

    def _end(self, track: int) -> bytes:
        packet = self._packet()
        packet.sequence_flags = _NEEDED
        packet.track_event.type, packet.track_event.track_uuid = _END, self._uuid(track)
        return packet.SerializeToString()  # type: ignore[no-any-return]

    def _flows(self) -> _Flows:
        found = _Flows()
        number = self.first_arrow
        for part in self.arrows:
            for source, at, target, to in zip(part.from_track.tolist(), part.from_ns.tolist(),
                                              part.to_track.tolist(), part.to_ns.tolist(), strict=True):
                found.add("call", source, at, number)
                found.add("kernel", target, to, number)
                number += 1
        return found.done()

    def _counters(self) -> Iterator[bytes]:
        for place, part in enumerate(self.counts):
            uuid = self.base + (1 << 30) + place
            packet = self._packet()
            descriptor = packet.track_descriptor
            descriptor.uuid, descriptor.parent_uuid, descriptor.name = uuid, self.base, part.name
            descriptor.counter.unit = 2  # a count
            yield _framed(packet.SerializeToString())
            for at, value in zip(part.at_ns.tolist(), part.value.tolist(), strict=True):
                packet = self._packet()
                packet.timestamp = at
                packet.track_event.type, packet.track_event.track_uuid = _COUNTER, uuid
                packet.track_event.counter_value = value
                yield _framed(packet.SerializeToString())


class _Flows:
    """Arrows by the slice at which they begin or end."""

    def __init__(self) -> None:
        self.ids: dict[tuple[str, int, int], list[int]] = {}
        self.keys_array: Int64 = np.zeros(0, np.int64)

    def add(self, category: str, track: int, start: int, number: int) -> None:
        """Record one end of an arrow."""
        self.ids.setdefault((category, track, start), []).append(number)

    def done(self) -> _Flows:
        """Prepare the array that shows quickly which slices have no arrow."""
        self.keys_array = np.array([track * 2**44 + start for _, track, start in self.ids], np.int64)
        return self

    def of(self, category: str, track: int, start: int) -> tuple[int, ...]:
        """Return and remove the arrows at this category, track and start: only the first such slice gets them."""
        return tuple(self.ids.pop((category, track, start), ()))


def _once(known: dict[tuple[Any, ...], int], bodies: list[bytes], key: tuple[Any, ...], make: Any) -> int:
    """Return the index in ``bodies`` of the body for ``key``, which is made at the first request."""
    if key not in known:
        known[key] = len(bodies)
        bodies.append(make())
    return known[key]


def _text(text: str) -> str:
    """Return a text without what protobuf cannot hold (half of a surrogate pair)."""
    return text.encode("utf-8", "replace").decode()
