"""Captures of a small GPU step made by hand, for tests of `foretrace check`: what is measured is known on paper."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from micro import Micro

CONTEXT: dict[str, Any] = {
    "recorded": "2026-01-02", "rank": 0, "world_size": 1, "torch_threads": 1, "complete": True,
    "hardware": {"device": "NVIDIA A100-SXM4-80GB", "cpu": "a CPU", "cores": 8},
    "software": {"torch": "2.13.0"},
}
SIZES: dict[str, Any] = {"Input Dims": [[4096, 1024], [1024, 1024], [1024]], "Input type": ["float", "float", "float"]}


def samples(step_us: float, spread: float = 0.01, number: int = 30, seed: int = 0) -> list[int]:
    """Step times around a median, ns."""
    noise = np.random.default_rng(seed).normal(0.0, spread, number)
    return [round(1e3 * step_us * float(np.exp(each))) for each in noise - np.median(noise)]


def step_trace(launches: int = 1, items: int = 1, kernel_us: float = 100, name: str = "aten::linear",
               args: dict[str, Any] | None = None, length: float = 600) -> Micro:
    """A calibration and nine steps of ``length`` µs: ``launches`` products, each a kernel, then ``items`` waits."""
    trace = Micro()
    trace.metadata["deviceProperties"] = [{"id": 0, "name": "NVIDIA A100-SXM4-80GB", "totalGlobalMem": 85 * 10**9,
                                           "numSms": 108}]
    trace.calibrate()
    for n in range(9):
        at = 1000.0 + length * n
        trace.step(at, at + length, n + 1)
        begin = at + 30
        for i in range(launches):
            trace.op(name, at + 10 + 10 * i, at + 18 + 10 * i, **(SIZES if args is None else args))
            trace.launch(at + 12 + 10 * i, 4, (7, begin, kernel_us))
            begin += kernel_us + 1
        for i in range(items):
            wait = at + 10 + 10 * launches if i == 0 else begin + 20 * i
            trace.op("aten::_local_scalar_dense", wait, max(wait + 10, begin + 5 + 20 * i))
            trace.call("cudaStreamSynchronize", wait + 1, max(8.0, begin + 3 + 20 * i - wait))
    return trace


def write_capture(folder: Path, trace: Micro | None = None, step_ns: Sequence[int] = (), *, memory: int = 10**9,
                  **changes: Any) -> Path:
    """A capture's directory with one rank; ``changes`` replace parts of its context."""
    part = folder / "rank0"
    part.mkdir(parents=True)
    document = (trace or step_trace()).document()
    (part / "kineto.json.gz").write_bytes(gzip.compress(json.dumps(document).encode(), mtime=0))
    context = {**CONTEXT, "unprofiled_step_ns": list(step_ns or samples(550)),
               "peak_memory": {"allocated_bytes": memory}, **changes}
    (part / "context.json").write_text(json.dumps(context), encoding="utf-8")
    return folder
