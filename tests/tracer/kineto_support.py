"""Real traces and hand-made ones for the tests of the Kineto reader."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tracer.graph import ExecutionGraph

DATA = Path(os.environ.get("FORETRACE_DATA") or Path(__file__).resolve().parents[3] / "shared" / "data") / "traces"

KINETO = sorted(
    str(path.relative_to(DATA)) for path in DATA.glob("**/*.json.gz")
    if ".et." not in path.name and path.name != "et.json.gz") if DATA.exists() else []


def real(name: str) -> Path:
    """A real trace's path; skips the test where the shared data is absent."""
    path = DATA / name
    if not path.exists():
        pytest.skip(f"{path} is absent: set FORETRACE_DATA to the folder that holds traces/")
    return path


def decoded(path: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Events and metadata by Python's own decoder, times left as text: the reference of several tests."""
    value = json.loads(gzip.decompress(path.read_bytes()), parse_float=str)
    if isinstance(value, list):
        return value, {}
    return value["traceEvents"], {key: item for key, item in value.items() if key != "traceEvents"}


def event(category: str, name: str, start: Any, duration: Any, *, pid: Any = 1, tid: Any = 1, **args: Any) -> \
        dict[str, Any]:
    """One "X" event; argument names take underscores for spaces only through ``**{"Ev Idx": 1}``."""
    return {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": start, "dur": duration,
            "args": args}


def op(name: str, start: Any, duration: Any, **more: Any) -> dict[str, Any]:
    return event("cpu_op", name, start, duration, **more)


def call(name: str, start: Any, duration: Any, correlation: int, **more: Any) -> dict[str, Any]:
    return event("cuda_runtime", name, start, duration, correlation=correlation, **more)


def kernel(name: str, start: Any, duration: Any, correlation: int, stream: int = 7, device: int = 0, **more: Any) -> \
        dict[str, Any]:
    return event("kernel", name, start, duration, pid=device, tid=stream, device=device, stream=stream,
                 correlation=correlation, **more)


def small_step() -> list[dict[str, Any]]:
    """One step on one thread: a linear with its launch and kernel, a relu outside any launch."""
    return [
        event("user_annotation", "ProfilerStep#3", 100, 100),
        op("aten::linear", 110, 30, **{"Input Dims": [[2, 3], [4, 3]], "Ev Idx": 1}),
        op("aten::addmm", 115, 20, **{"Ev Idx": 2}),
        call("cudaLaunchKernel", 120, 5, 11),
        kernel("gemm", 130, 40, 11, grid=[2, 3, 1], block=[128, 1, 1]),
        op("aten::relu", 160, 10, **{"Ev Idx": 3}),
    ]


def write(folder: Path, events: Any, name: str = "trace.json", **metadata: Any) -> Path:
    """Write a trace (list form if ``events`` is a dict or text it is written as it is)."""
    path = folder / name
    value = {"schemaVersion": 1, **metadata, "traceEvents": events} if isinstance(events, list) else events
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    return path


def names(graph: ExecutionGraph, codes: np.ndarray) -> list[str]:
    return [graph.string(int(code)) for code in codes]
