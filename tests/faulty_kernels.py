"""Traces written by hand in which every time is known, and what a profiler can do wrong with the kernels' times.

Each step takes 1 ms: the thread launches four products, 60 µs apart, and waits for the device. The first kernel starts
30 µs after its call begins, the others 5 µs after the one before::

    thread  |op|op|op|op|      wait      |            to 1,000 µs
    stream     ▓▓▓▓▓ ▓▓▓▓▓ ▓▓▓▓▓ ▓▓▓▓▓                150 µs each: GPU active 600 µs
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Event = dict[str, Any]
BASE_US = 1_700_000_000_000_000.0
STEP_MS, ACTIVE_MS = 1.0, 0.6
KERNEL_US = 150.0


def steps(number: int = 4, *, waits: bool = True, stream: int = 7, device: int = 0, process: int = 1000,
          base: float = BASE_US, first: int = 0) -> list[Event]:
    """Return the events of so many steps of one process; correlation ids count from ``first``."""
    events: list[Event] = []
    correlation = first

    def add(category: str, name: str, start: float, duration: float, **args: Any) -> None:
        lane = (device, stream) if category == "kernel" else (process, process)
        events.append({"ph": "X", "cat": category, "name": name, "pid": lane[0], "tid": lane[1],
                       "ts": base + start, "dur": duration, "args": args})

    for step in range(number):
        at = 1000.0 * step
        add("user_annotation", f"ProfilerStep#{step}", at, 1000.0)
        for which in range(4):
            correlation += 1
            add("cpu_op", "aten::mm", at + 20 + 60 * which, 40.0, **{"Input Dims": [[1024, 1024], [1024, 1024]],
                                                                      "Input type": ["float", "float"]})
            add("cuda_runtime", "cudaLaunchKernel", at + 30 + 60 * which, 5.0, correlation=correlation)
            add("kernel", "ampere_sgemm_128x128_nn", at + 60 + (KERNEL_US + 5) * which, KERNEL_US, device=device,
                stream=stream, correlation=correlation, grid=[4, 4, 1], block=[256, 1, 1])
        correlation += 1
        if waits:
            add("cuda_runtime", "cudaDeviceSynchronize", at + 300, 385.0, correlation=correlation)
    return events


def reading_steps(number: int = 4, *, streams: Sequence[int] = (7,), parts: int = 6) -> list[Event]:
    """Return steps of parts in which the thread launches three kernels of 90 µs, and then reads a value: it copies it
    and waits for the stream. The device idles between the parts, so that each wait depends on the clock."""
    events: list[Event] = []
    now, correlation = 0.0, 0

    def add(category: str, name: str, start: float, duration: float, lane: tuple[int, int] = (1000, 1000),
            **args: Any) -> None:
        events.append({"ph": "X", "cat": category, "name": name, "pid": lane[0], "tid": lane[1],
                       "ts": BASE_US + start, "dur": duration, "args": args})

    for step in range(number):
        begin, now = now, now + 20
        for _ in range(parts):
            device = now + 40
            for which in range(3):
                correlation += 1
                stream = streams[which % len(streams)]
                add("cpu_op", "aten::mm", now, 15.0)
                add("cuda_runtime", "cudaLaunchKernel", now + 5, 6.0, correlation=correlation)
                add("kernel", "gemm", device, 90.0, (0, stream), device=0, stream=stream, correlation=correlation)
                now, device = now + 20, device + 92
            add("cpu_op", "aten::item", now, device + 32 - now)
            add("cuda_runtime", "cudaMemcpyAsync", now + 3, 8.0, correlation=correlation + 1)
            add("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", device, 2.0, (0, 7), device=0, stream=7,
                correlation=correlation + 1, bytes=4)
            correlation += 2
            add("cuda_runtime", "cudaStreamSynchronize", now + 12, device + 5 - now, correlation=correlation)
            now = device + 27
        now += 30
        add("user_annotation", f"ProfilerStep#{step}", begin, now - begin)
    return events


def kernels(events: list[Event]) -> list[Event]:
    """Return the kernels, in the order of their launches; changing one changes the trace."""
    return [event for event in events if event["cat"] == "kernel"]


def shifted(events: list[Event], by_us: float, *, device: int = 0) -> list[Event]:
    """Move all work of a device by so much, as a clock would that is not the host's."""
    for event in events:
        if event["cat"] in ("kernel", "gpu_memcpy") and event["args"]["device"] == device:
            event["ts"] += by_us
    return events


def changed(events: list[Event], rows: list[int], change: Callable[[Event], None]) -> list[Event]:
    """Change some of the kernels."""
    for row in rows:
        change(kernels(events)[row])
    return events


def stamp(**times: float) -> Callable[[Event], None]:
    """Return a change that sets times: ``ts``, ``dur``, or ``early`` and ``late`` to move the start."""
    def change(event: Event) -> None:
        event["ts"] += times.get("late", 0.0) - times.get("early", 0.0)
        event.update({name: value for name, value in times.items() if name in ("ts", "dur")})
    return change


def write(path: Path, events: list[Event], **metadata: Any) -> Path:
    """Write a trace of an A100."""
    gpu = {"id": 0, "name": "NVIDIA A100-SXM4-80GB", "totalGlobalMem": 85_000_000_000, "computeMajor": 8,
           "computeMinor": 0, "numSms": 108}
    path.write_text(json.dumps({"schemaVersion": 1, "deviceProperties": [gpu], **metadata, "traceEvents": events}),
                    encoding="utf-8")
    return path
