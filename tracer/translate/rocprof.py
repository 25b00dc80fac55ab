"""``rocprofv3 --output-format json``: HIP's calls, kernels, copies and ROCTx ranges as events of a profiler JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from tracer.errors import TraceError
from tracer.translate.events import complete_event, marked_range, written

KEY = b'"rocprofiler-sdk-tool"'
_COPIES = {"HOST_TO_DEVICE": "HtoD", "DEVICE_TO_HOST": "DtoH", "DEVICE_TO_DEVICE": "DtoD", "HOST_TO_HOST": "HtoH"}


class _Handle(msgspec.Struct):
    handle: int = -1


class _Correlation(msgspec.Struct):
    internal: int = -1


class _Extent(msgspec.Struct):
    x: int = 1
    y: int = 1
    z: int = 1


class _Dispatch(msgspec.Struct):
    agent_id: _Handle = msgspec.field(default_factory=_Handle)
    queue_id: _Handle = msgspec.field(default_factory=_Handle)
    kernel_id: int = -1
    workgroup_size: _Extent = msgspec.field(default_factory=_Extent)
    grid_size: _Extent = msgspec.field(default_factory=_Extent)
    group_segment_size: int = 0


class _Record(msgspec.Struct):
    kind: int | str = -1
    operation: int | str = -1
    thread_id: int = 0
    correlation_id: _Correlation = msgspec.field(default_factory=_Correlation)
    start_timestamp: int = -1
    end_timestamp: int = -1
    dispatch_info: _Dispatch | None = None
    src_agent_id: _Handle = msgspec.field(default_factory=_Handle)
    dst_agent_id: _Handle = msgspec.field(default_factory=_Handle)
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


def is_rocprof(head: bytes) -> bool:
    """Return whether the text of a file begins as rocprofv3's results do."""
    begin = head[:4096]  # a block is megabytes, and stripping copies it
    return begin.lstrip()[:1] == b"{" and KEY in begin


def translated(text: bytes, name: str) -> tuple[Iterator[bytes], list[str]]:
    """Return the results as the text of a profiler's trace in blocks, and notes.

    Raises:
        TraceError: the text is no whole JSON of rocprofv3, or has no calls and kernels.
    """
    try:
        found = msgspec.json.decode(text, type=_Results).processes
    except msgspec.DecodeError as error:
        raise TraceError(f"{name} cannot be read as rocprofv3's results ({error}): record it again with "
                         "--output-format json.") from error
    found = [each for each in found if each.buffer_records.kernel_dispatch or each.buffer_records.hip_api]
    if not found:
        raise TraceError(f"{name} has no calls and no kernels: record with rocprofv3 --sys-trace --output-format json.")
    found.sort(key=lambda each: -len(each.buffer_records.kernel_dispatch))
    others = [str(each.metadata.pid) for each in found[1:]]
    notes = [f"The results have {len(found)} processes; process {found[0].metadata.pid} was read, which has the most "
             f"kernels, and {', '.join(others[:8])} were not."] if others else []
    return written(_head(found[0]), _events(found[0])), notes


def _gpus(process: _Process) -> list[_Agent]:
    return sorted((each for each in process.agents if each.type in (2, "GPU", "gpu")), key=lambda each: each.node_id)


def _head(process: _Process) -> dict[str, Any]:
    return {"schemaVersion": 1, "deviceProperties": [
        {"id": place, "name": agent.product_name or agent.name, "numSms": agent.cu_count}
        for place, agent in enumerate(_gpus(process))]}


def _events(process: _Process) -> Iterator[dict[str, Any]]:
    pid, records = process.metadata.pid, process.buffer_records
    devices = {agent.id.handle: place for place, agent in enumerate(_gpus(process))}
    names = {each.kernel_id: each.formatted_kernel_name or each.demangled_kernel_name or each.kernel_name
             for each in process.kernel_symbols}
    kinds = {each.kind: each.operations for each in process.strings.buffer_records}
    operations = [each.operations for each in process.strings.buffer_records]
    texts = {each.key: each.value for each in process.strings.marker_api}

    def named(record: _Record) -> str:
        if isinstance(record.operation, str):
            return record.operation
        found = kinds.get(record.kind, []) if isinstance(record.kind, str) else (
            operations[record.kind] if 0 <= record.kind < len(operations) else [])
        return found[record.operation] if 0 <= record.operation < len(found) else "INVALID"

    for record in records.hip_api:
        yield complete_event("hip_runtime", named(record), record.start_timestamp, record.end_timestamp, pid,
                             record.thread_id, correlation=record.correlation_id.internal)
    for record in records.kernel_dispatch:
        work = record.dispatch_info or _Dispatch()
        # AMD counts a grid in work-items, CUDA (and the graph) in blocks.
        grid = [-(-getattr(work.grid_size, axis) // max(getattr(work.workgroup_size, axis), 1)) for axis in "xyz"]
        block = [getattr(work.workgroup_size, axis) for axis in "xyz"]
        stream = record.stream_id.handle if record.stream_id is not None else work.queue_id.handle
        device = devices.get(work.agent_id.handle, 0)
        yield complete_event(
            "kernel", names.get(work.kernel_id) or "unnamed kernel", record.start_timestamp, record.end_timestamp,
            device, stream, device=device, stream=stream, correlation=record.correlation_id.internal, grid=grid,
            block=block, **{"shared memory": work.group_segment_size})
    for record in records.memory_copy:
        where = named(record).removeprefix("MEMORY_COPY_")
        device = devices.get(record.dst_agent_id.handle, devices.get(record.src_agent_id.handle, 0))
        stream = record.stream_id.handle if record.stream_id is not None else 0
        yield complete_event(
            "gpu_memcpy", f"Memcpy {_COPIES.get(where, 'DtoD')}", record.start_timestamp, record.end_timestamp, device,
            stream, device=device, stream=stream, correlation=record.correlation_id.internal, bytes=record.bytes)
    for record in records.marker_api:
        text = texts.get(record.correlation_id.internal, "")
        if text and record.end_timestamp > record.start_timestamp:
            yield marked_range(text, record.start_timestamp, record.end_timestamp, pid, record.thread_id)
