"""``rocprofv3 --output-format json``: HIP's calls, kernels, copies and ROCTx ranges as events of a profiler JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from tracer.arrays import Int32, Int64
from tracer.errors import TraceError
from tracer.guard import MOST_PART, DecodeError, NameBudget, check_objects, well_formed
from tracer.input_file import from_json
from tracer.kineto.scanner import EventBatch
from tracer.translate.events import NOTHING, ForeignBatch, ForeignTexts, Meaning, whole_numbers

_COPIES = {"HOST_TO_DEVICE": "HtoD", "DEVICE_TO_HOST": "DtoH", "DEVICE_TO_DEVICE": "DtoD", "HOST_TO_HOST": "HtoH"}


class _Handle(msgspec.Struct):
    handle: int = -1


class _Correlation(msgspec.Struct):
    internal: int = -1


class _Extent(msgspec.Struct):
    x: int = 1
    y: int = 1
    z: int = 1


_NO_HANDLE, _NO_CORRELATION, _UNIT = _Handle(), _Correlation(), _Extent()
"""Defaults of absent parts, for all records."""


class _Dispatch(msgspec.Struct):
    agent_id: _Handle = msgspec.field(default_factory=lambda: _NO_HANDLE)
    queue_id: _Handle = msgspec.field(default_factory=lambda: _NO_HANDLE)
    kernel_id: int = -1
    workgroup_size: _Extent = msgspec.field(default_factory=lambda: _UNIT)
    grid_size: _Extent = msgspec.field(default_factory=lambda: _UNIT)
    group_segment_size: int = 0


_NO_DISPATCH = _Dispatch()


class _Record(msgspec.Struct):
    kind: int | str = -1
    operation: int | str = -1
    thread_id: int = 0
    correlation_id: _Correlation = msgspec.field(default_factory=lambda: _NO_CORRELATION)
    start_timestamp: int = -1
    end_timestamp: int = -1
    dispatch_info: _Dispatch | None = None
    src_agent_id: _Handle = msgspec.field(default_factory=lambda: _NO_HANDLE)
    dst_agent_id: _Handle = msgspec.field(default_factory=lambda: _NO_HANDLE)
    stream_id: _Handle | None = None
    bytes: int = 0


class _Records(msgspec.Struct):
    kernel_dispatch: list[_Record] = msgspec.field(default_factory=list)
    hip_api: list[_Record] = msgspec.field(default_factory=list)
    marker_api: list[_Record] = msgspec.field(default_factory=list)
    memory_copy: list[_Record] = msgspec.field(default_factory=list)


class _Agent(msgspec.Struct):
    id: _Handle = msgspec.field(default_factory=_Handle)
    type: int | str = 0
    node_id: int = 0
    name: str = ""
    product_name: str = ""
    cu_count: int = 0


class _Symbol(msgspec.Struct):
    kernel_id: int = -1
    formatted_kernel_name: str = ""
    demangled_kernel_name: str = ""
    kernel_name: str = ""


class _Kind(msgspec.Struct):
    kind: str = ""
    operations: list[str] = msgspec.field(default_factory=list)


class _Marker(msgspec.Struct):
    key: int = -1
    value: str = ""


class _Texts(msgspec.Struct):
    buffer_records: list[_Kind] = msgspec.field(default_factory=list)
    marker_api: list[_Marker] = msgspec.field(default_factory=list)


class _Metadata(msgspec.Struct):
    pid: int = 0


class _Process(msgspec.Struct):
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)
    agents: list[_Agent] = msgspec.field(default_factory=list)
    strings: _Texts = msgspec.field(default_factory=_Texts)
    kernel_symbols: list[_Symbol] = msgspec.field(default_factory=list)
    buffer_records: _Records = msgspec.field(default_factory=_Records)


class _Results(msgspec.Struct):
    processes: list[_Process] = msgspec.field(name="rocprofiler-sdk-tool", default_factory=list)


class RocprofEvents:
    """The results of one file, as batches of events. ``metadata`` holds the devices.

    Raises:
        TraceError: the text is no complete JSON of rocprofv3, or has neither calls nor kernels.
    """

    is_list = False
    complete = True

    def __init__(self, text: bytes, name: str, stored_bytes: int) -> None:
        self._names = NameBudget(stored_bytes)
        self.vocabulary = ForeignTexts(self._names)
        self.notes: list[str] = []
        self._file = name
        try:
            check_objects(text.count(b"{"), stored_bytes)
            found = _decoded(text)
        except DecodeError as error:
            raise TraceError(self._unread(error)) from error
        found = [each for each in found if each.buffer_records.kernel_dispatch or each.buffer_records.hip_api]
        if not found:
            raise TraceError(f"{name} has no calls and no kernels: record with rocprofv3 --sys-trace --output-format "
                             "json.")
        found.sort(key=lambda each: -len(each.buffer_records.kernel_dispatch))
        others = [str(each.metadata.pid)[:20] for each in found[1:]]
        if others:
            self.notes.append(f"The results have {len(found)} processes; process {found[0].metadata.pid} was read, "
                              f"which has the most kernels, and {', '.join(others[:8])} were not.")
        self._process = found[0]
        self.metadata: dict[str, Any] = {"schemaVersion": 1, "deviceProperties": [
            {"id": place, "name": well_formed(agent.product_name or agent.name, MOST_PART), "numSms": agent.cu_count}
            for place, agent in enumerate(_gpus(self._process))]}

    def __iter__(self) -> Iterator[EventBatch]:
        """Yield the events. Raises ``TraceError`` if their names are longer than the file."""
        try:
            yield from self._events()
        except DecodeError as error:
            raise TraceError(self._unread(error)) from error
        self.notes += self._names.notes()

    def _unread(self, error: DecodeError) -> str:
        return (f"{self._file} cannot be read as rocprofv3's results ({error}): record it again with --output-format "
                "json.")

    def _events(self) -> Iterator[EventBatch]:
        process, code = self._process, self.vocabulary.code
        records = process.buffer_records
        name_of = _Operations(process, self.vocabulary)
        if records.hip_api:
            yield self._batch(records.hip_api, code("hip_runtime"), name_of.codes(records.hip_api),
                              code(process.metadata.pid), [record.thread_id for record in records.hip_api])
        devices = {agent.id.handle: place for place, agent in enumerate(_gpus(process))}
        if records.kernel_dispatch:
            yield self._kernels(records.kernel_dispatch, devices)
        if records.memory_copy:
            copies = records.memory_copy
            device = [devices.get(record.dst_agent_id.handle, devices.get(record.src_agent_id.handle, 0))
                      for record in copies]
            stream = [record.stream_id.handle if record.stream_id is not None else 0 for record in copies]
            yield self._batch(copies, code("gpu_memcpy"), name_of.copies(copies), device, stream, {}, {
                "device": whole_numbers(device), "stream": whole_numbers(stream),
                "bytes": whole_numbers([record.bytes for record in copies])})
        if records.marker_api:
            yield from self._ranges(records.marker_api)

    def _kernels(self, records: list[_Record], devices: dict[int, int]) -> EventBatch:
        vocabulary = self.vocabulary
        names = {each.kernel_id: vocabulary.name(each.formatted_kernel_name or each.demangled_kernel_name
                                                 or each.kernel_name) for each in self._process.kernel_symbols}
        unnamed = vocabulary.name("unnamed kernel")
        work = [record.dispatch_info or _NO_DISPATCH for record in records]
        # AMD counts a grid in work-items, CUDA (and the graph) in blocks.
        block, items = ({axis: whole_numbers([getattr(getattr(each, size), axis) for each in work]) for axis in "xyz"}
                        for size in ("workgroup_size", "grid_size"))
        grid = [-(-items[axis] // np.maximum(block[axis], 1)) for axis in "xyz"]
        stream = [record.stream_id.handle if record.stream_id is not None else each.queue_id.handle
                  for record, each in zip(records, work, strict=True)]
        device = [devices.get(each.agent_id.handle, 0) for each in work]
        name = np.array([names.get(each.kernel_id) or unnamed for each in work], np.int32)
        return self._batch(
            records, vocabulary.code("kernel"), name, device, stream,
            {"grid": vocabulary.extents(grid), "block": vocabulary.extents(block.values())},
            {"device": whole_numbers(device), "stream": whole_numbers(stream),
             "shared_memory": whole_numbers([each.group_segment_size for each in work])})

    def _ranges(self, records: list[_Record]) -> Iterator[EventBatch]:
        texts = {each.key: each.value for each in self._process.strings.marker_api}
        kept = [record for record in records if texts.get(record.correlation_id.internal)
                and record.end_timestamp > record.start_timestamp]
        if kept:
            known: dict[str, Meaning] = {}
            found = [known.get(text) or known.setdefault(text, self.vocabulary.meaning(text))
                     for text in (texts[record.correlation_id.internal] for record in kept)]
            category, name, sizes = (np.array([each[at] for each in found], np.int32) for at in (0, 1, 3))
            yield self._batch(kept, category, name, self.vocabulary.code(self._process.metadata.pid),
                              [record.thread_id for record in kept], {"dims": sizes},
                              {"sequence": whole_numbers([each.sequence for each in found])}, correlated=False)

    def _batch(self, records: list[_Record], category: Int32 | int, name: Int32, pid: list[int] | int, tid: list[int],
               codes: Mapping[str, Int32] = NOTHING, numbers: Mapping[str, Int64] = NOTHING,
               correlated: bool = True) -> EventBatch:
        process, thread = (each if isinstance(each, int) else
                           np.array([self.vocabulary.code(one) for one in each], np.int32) for each in (pid, tid))
        start, end, correlation = (whole_numbers(each) for each in (
            [record.start_timestamp for record in records], [record.end_timestamp for record in records],
            [record.correlation_id.internal for record in records]))
        return ForeignBatch(start, end, {
            "ph": self.vocabulary.code("X"), "cat": category, "name": name, "pid": process, "tid": thread, **codes},
            {**({"correlation": correlation} if correlated else {}), **numbers})


class _Operations:
    """Codes of the names of a process's calls and copies: each is looked up once."""

    def __init__(self, process: _Process, vocabulary: ForeignTexts) -> None:
        self._kinds = {each.kind: each.operations for each in process.strings.buffer_records}
        self._operations = [each.operations for each in process.strings.buffer_records]
        self._vocabulary = vocabulary

    def codes(self, records: list[_Record], make: Callable[[str], str] = str) -> Int32:
        known: dict[tuple[int | str, int | str], int] = {}
        for kind, operation in dict.fromkeys((record.kind, record.operation) for record in records):
            known[kind, operation] = self._vocabulary.name(make(self._name(kind, operation)))
        return np.array([known[record.kind, record.operation] for record in records], np.int32)

    def copies(self, records: list[_Record]) -> Int32:
        return self.codes(records, lambda name: f"Memcpy {_COPIES.get(name.removeprefix('MEMORY_COPY_'), 'DtoD')}")

    def _name(self, kind: int | str, operation: int | str) -> str:
        if isinstance(operation, str):
            return operation
        found = self._kinds.get(kind, []) if isinstance(kind, str) else (
            self._operations[kind] if 0 <= kind < len(self._operations) else [])
        return found[operation] if 0 <= operation < len(found) else "INVALID"


def _decoded(text: bytes) -> list[_Process]:
    """Return the results of each process. Bytes in symbols that are not UTF-8 are replaced."""
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        text = text.decode("utf-8", "replace").encode()
    return from_json(text, _Results).processes


def _gpus(process: _Process) -> list[_Agent]:
    return sorted((each for each in process.agents if each.type in (2, "GPU", "gpu")), key=lambda each: each.node_id)
