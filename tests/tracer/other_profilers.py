"""Writes a graph as other profilers write a run: Nsight Systems' SQLite export, rocprofv3's JSON. For tests."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

from tracer.graph import ExecutionGraph, KernelKind, OpKind, SyncKind

PID = 4321
SHIFT = 1 << 24
_SYNC_TYPES = {SyncKind.EVENT_SYNC: 1, SyncKind.STREAM_WAIT_EVENT: 2, SyncKind.STREAM_SYNC: 3, SyncKind.DEVICE_SYNC: 4}


def write_nsys(graph: ExecutionGraph, path: Path, *, pid: int = PID, shapes: bool = True) -> None:
    """The tables of ``nsys export --type sqlite`` with CUDA calls, kernels, copies, waits and NVTX ranges."""
    texts: dict[str, int] = {}

    def code(text: str) -> int:
        return texts.setdefault(text, len(texts))

    def thread(number: int) -> int:
        return (1 << 48) + pid * SHIFT + 100 + number

    file = sqlite3.connect(path)
    file.executescript("""
        CREATE TABLE StringIds (id, value);
        CREATE TABLE TARGET_INFO_GPU (id, name, totalMemory, smCount, computeMajor, computeMinor);
        CREATE TABLE TARGET_INFO_SESSION_START_TIME (utcEpochNs);
        CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start, end, globalTid, correlationId, nameId);
        CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (
            start, end, deviceId, streamId, correlationId, globalPid, demangledName, shortName, registersPerThread,
            gridX, gridY, gridZ, blockX, blockY, blockZ, staticSharedMemory, dynamicSharedMemory);
        CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (
            start, end, deviceId, streamId, correlationId, globalPid, bytes, copyKind, srcKind, dstKind);
        CREATE TABLE CUPTI_ACTIVITY_KIND_MEMSET (start, end, deviceId, streamId, correlationId, globalPid, bytes);
        CREATE TABLE CUPTI_ACTIVITY_KIND_SYNCHRONIZATION (
            start, end, deviceId, streamId, correlationId, globalPid, syncType, eventId);
        CREATE TABLE CUPTI_ACTIVITY_KIND_CUDA_EVENT (deviceId, streamId, correlationId, globalPid, eventId);
        CREATE TABLE NVTX_EVENTS (start, end, eventType, text, globalTid, textId);""")
    meta, process = graph.meta, pid * SHIFT
    major, minor = (meta.compute_capability or "0.0").split(".")
    file.execute("INSERT INTO TARGET_INFO_GPU VALUES (0, ?, ?, ?, ?, ?)",
                 (meta.device, meta.device_memory_bytes, meta.sm_count, int(major), int(minor)))
    file.execute("INSERT INTO TARGET_INFO_SESSION_START_TIME VALUES (?)", (meta.base_time_ns,))
    calls = graph.launches
    file.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, ?)", [
        (start, start + duration, thread(on), correlation, code(graph.string(name) + "_v3020"))
        for start, duration, on, correlation, name in zip(
            calls.start_ns.tolist(), calls.duration_ns.tolist(), calls.thread.tolist(), calls.correlation.tolist(),
            calls.name.tolist(), strict=True)])
    kernels = graph.kernels
    for i in range(len(kernels)):
        start, end = int(kernels.start_ns[i]), int(kernels.start_ns[i] + kernels.duration_ns[i])
        where = (start, end, 0, int(kernels.stream[i]), int(kernels.correlation[i]), process)
        name, size = graph.string(int(kernels.name[i])), int(kernels.bytes[i])
        if kernels.kind[i] == KernelKind.MEMCPY:
            kind = {"HtoD": 1, "DtoH": 2}.get(name.split()[1] if " " in name else "", 8)
            ends = {"Pageable": 0, "Pinned": 1}
            first, _, second = name.partition("(")[2].rstrip(")").partition(" -> ")
            file.execute("INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                         (*where, size, kind, ends.get(first, 2), ends.get(second, 2)))
        elif kernels.kind[i] == KernelKind.MEMSET:
            file.execute("INSERT INTO CUPTI_ACTIVITY_KIND_MEMSET VALUES (?, ?, ?, ?, ?, ?, ?)", (*where, size))
        else:
            extent = [int(getattr(kernels, f"{kind}_{axis}")[i]) for kind in ("grid", "block") for axis in "xyz"]
            file.execute(f"INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES ({', '.join('?' * 17)})",
                         (*where, code(name), code(name[:8]), int(kernels.registers[i]), *extent, 0,
                          int(kernels.shared_bytes[i])))
    for event, i in enumerate(range(len(graph.syncs))):
        syncs = graph.syncs
        file.execute("INSERT INTO CUPTI_ACTIVITY_KIND_SYNCHRONIZATION VALUES (?, ?, 0, ?, ?, ?, ?, ?)",
                     (int(syncs.start_ns[i]), int(syncs.start_ns[i] + syncs.duration_ns[i]), int(syncs.stream[i]),
                      int(syncs.correlation[i]), process, _SYNC_TYPES[SyncKind(int(syncs.kind[i]))], event))
        if syncs.record_correlation[i] >= 0:
            file.execute("INSERT INTO CUPTI_ACTIVITY_KIND_CUDA_EVENT VALUES (0, ?, ?, ?, ?)",
                         (int(syncs.wait_stream[i]), int(syncs.record_correlation[i]), process, event))
    ops = graph.ops
    for i in range(len(ops)):
        name = graph.string(int(ops.name[i]))
        if ops.kind[i] == OpKind.ANNOTATION:
            text = name.replace("ProfilerStep#", "step ")
        else:
            sequence = f", seq = {int(ops.sequence[i])}" if ops.sequence[i] >= 0 else ""
            told = graph.string(int(ops.shapes[i])) if shapes and ops.shapes[i] >= 0 else ""
            text = f"{name}{sequence}, op_id = {i}" + (f", sizes = {told}" if told else "")
        inline = i % 2 == 0  # both forms occur
        file.execute("INSERT INTO NVTX_EVENTS VALUES (?, ?, 59, ?, ?, ?)",
                     (int(ops.start_ns[i]), int(ops.start_ns[i] + ops.duration_ns[i]), text if inline else None,
                      thread(int(ops.thread[i])), None if inline else code(text)))
    file.executemany("INSERT INTO StringIds VALUES (?, ?)", [(key, text) for text, key in texts.items()])
    file.commit()
    file.close()


def write_rocprof(graph: ExecutionGraph, path: Path, *, pid: int = PID) -> None:
    """The results of ``rocprofv3 --sys-trace --output-format json``."""
    names = sorted({graph.string(code) for code in graph.launches.name.tolist()})
    kernels, calls, ops = graph.kernels, graph.launches, graph.ops
    symbols = sorted({graph.string(code) for code in kernels.name.tolist()})

    def record(start: int, duration: int, correlation: int, **more: object) -> dict[str, object]:
        return {"size": 96, "start_timestamp": int(start), "end_timestamp": int(start + duration),
                "correlation_id": {"internal": int(correlation), "external": 0}, "thread_id": 7, **more}

    copies = {"HtoD": 1, "DtoH": 2}
    dispatched, copied = [], []
    for i in range(len(kernels)):
        name = graph.string(int(kernels.name[i]))
        base = (kernels.start_ns[i], kernels.duration_ns[i], kernels.correlation[i])
        stream = {"handle": int(kernels.stream[i])}
        if kernels.kind[i] == KernelKind.MEMCPY:
            direction = copies.get(name.split()[1] if " " in name else "", 3)
            copied.append(record(*base, kind=1, operation=direction, bytes=max(int(kernels.bytes[i]), 0),
                                 src_agent_id={"handle": 1}, dst_agent_id={"handle": 2}, stream_id=stream))
            continue
        block = {axis: max(int(getattr(kernels, f"block_{axis}")[i]), 1) for axis in "xyz"}
        grid = {axis: max(int(getattr(kernels, f"grid_{axis}")[i]), 1) * block[axis] for axis in "xyz"}
        dispatched.append(record(*base, kind=2, operation=1, dispatch_info={
            "agent_id": {"handle": 2}, "queue_id": stream, "kernel_id": symbols.index(name), "workgroup_size": block,
            "grid_size": grid, "group_segment_size": 0}))
    markers, texts = [], []
    for i in range(len(ops)):
        name = graph.string(int(ops.name[i])).replace("ProfilerStep#", "step ")
        markers.append({**record(ops.start_ns[i], ops.duration_ns[i], 10**9 + i), "kind": 3, "operation": 0,
                        "thread_id": int(ops.thread[i])})
        texts.append({"key": 10**9 + i, "value": name})
    api = [{**record(calls.start_ns[i], calls.duration_ns[i], calls.correlation[i]), "kind": 0,
            "operation": names.index(graph.string(int(calls.name[i]))), "thread_id": int(calls.thread[i])}
           for i in range(len(calls))]
    value = {"rocprofiler-sdk-tool": [{
        "metadata": {"pid": pid}, "kernel_symbols": [{"kernel_id": i, "formatted_kernel_name": each}
                                                    for i, each in enumerate(symbols)],
        "agents": [{"id": {"handle": 1}, "type": 1, "node_id": 0, "name": "CPU"},
                   {"id": {"handle": 2}, "type": 2, "node_id": 1, "product_name": graph.meta.device, "cu_count": 304}],
        "strings": {"marker_api": texts, "buffer_records": [
            {"kind": "HIP_RUNTIME_API", "operations": names},
            {"kind": "MEMORY_COPY", "operations": ["NONE", "MEMORY_COPY_HOST_TO_DEVICE", "MEMORY_COPY_DEVICE_TO_HOST",
                                                   "MEMORY_COPY_DEVICE_TO_DEVICE"]},
            {"kind": "KERNEL_DISPATCH", "operations": ["NONE", "COMPLETE"]}]},
        "buffer_records": {"kernel_dispatch": dispatched, "hip_api": api, "marker_api": markers,
                           "memory_copy": copied}}]}
    path.write_text(json.dumps(value), encoding="utf-8")
