"""Small files that claim, share or nest very much, as they come with bug reports. For tests and benchmarks."""

from __future__ import annotations

import gzip
import json
import pickle
import sqlite3
from collections.abc import Callable
from pathlib import Path

from other_profilers import SHIFT

NESTED, ROWS, LONG, SHARED = 50_000, 20_000, 20_000_000, 10_000


def nested_modules(path: Path, depth: int = NESTED) -> None:
    """A trace of so many modules in one another, and an operation in the innermost."""
    events = [{"ph": "X", "cat": "python_function", "name": f"nn.Module: L_{i}", "pid": 1, "tid": 1, "ts": i,
               "dur": 4 * depth - 2 * i} for i in range(depth)]
    events += [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": depth + 10, "dur": 5},
               {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "pid": 1, "tid": 1, "ts": 0,
                "dur": 4 * depth}]
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode(), 6, mtime=0))


def long_name_nsys(path: Path, size: int = LONG, rows: int = ROWS) -> None:
    """An export of Nsight Systems whose calls and kernels all have one long name."""
    file = sqlite3.connect(path)
    file.executescript("CREATE TABLE StringIds (id INTEGER, value TEXT);"
                       "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start, end, deviceId, streamId, correlationId, "
                       "globalPid, demangledName, shortName);"
                       "CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start, end, globalTid, correlationId, nameId);")
    file.execute("INSERT INTO StringIds VALUES (1, ?)", ("k" * size,))
    file.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, 0, 7, ?, ?, 1, 1)",
                     [(100 * i + 1000, 100 * i + 1050, i, 5 * SHIFT) for i in range(rows)])
    file.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, 1)",
                     [(100 * i + 900, 100 * i + 950, 5 * SHIFT + 1, i) for i in range(rows)])
    file.commit()
    file.close()


def long_name_rocprof(path: Path, size: int = LONG, rows: int = ROWS) -> None:
    """Results of rocprofv3 whose kernels all have one long name."""
    records = [{"start_timestamp": 1000 + 100 * i, "end_timestamp": 1050 + 100 * i, "kind": 2, "operation": 1,
                "thread_id": 1, "correlation_id": {"internal": i}, "dispatch_info": {
                    "kernel_id": 0, "agent_id": {"handle": 2}}} for i in range(rows)]
    path.write_text(json.dumps({"rocprofiler-sdk-tool": [{
        "metadata": {"pid": 1}, "kernel_symbols": [{"kernel_id": 0, "formatted_kernel_name": "k" * size}],
        "buffer_records": {"kernel_dispatch": records}}]}))


def shared_frames(path: Path, count: int = SHARED) -> None:
    """A snapshot in which so many events share one stack of so many frames."""
    frames = [{"filename": f"/a/b{i}.py", "line": i, "name": f"f{i}"} for i in range(count)]
    events = [{"action": "alloc", "addr": 512 * i, "size": 512, "time_us": i, "frames": frames} for i in range(count)]
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [events]}, 4))


def nested_key(path: Path, depth: int = 200_000) -> None:
    """A snapshot with a dictionary whose key is so many tuples in one another."""
    path.write_bytes(b"\x80\x04}(X\x08\x00\x00\x00segments]X\x01\x00\x00\x00a})" + b"\x85" * depth + b"K\x01su.")


LIES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "modules.json.gz": ("replay", nested_modules), "name.sqlite": ("replay", long_name_nsys),
    "name.json": ("replay", long_name_rocprof), "frames.pickle": ("memory", shared_frames),
    "key.pickle": ("memory", nested_key)}
"""Files by name: the command that reads them, and what writes them."""
