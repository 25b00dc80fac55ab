"""Part 1: the tools with which calibration measures: held streams, graphs, memsets, the clock, caches and events."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from step_views.acceptance.parts import AcceptanceScale
from step_views.acceptance.points import AcceptancePoint, absent, at_most, guarded, is_true, near, plain
from tracer.campaign.lab import Lab
from tracer.campaign.micro import measure

HELD_US, HELD_WITHIN = 1_000.0, 0.05
IDLE_S, BUSY_RUNS, BUSY_SIDE = 1.0, 2_000, 4096
"""Chosen: a hold of 1 ms and its tolerance, measured after a second of rest and after products of this side."""
CACHE_BYTES = 20e6
"""Bytes of input and output of an operation that is timed with and without its data in L2 (H100: 50 MB)."""
EVENT_US, EVENT_WITHIN = 0.5, 0.01
"""Events must agree with the profiler within 0.5 µs; above 50 µs, where kernels themselves vary, within 1%."""
SIZES = ((64, 1024), (512, 1024), (2048, 1024), (8192, 1024), (8192, 4096), (16384, 8192))
"""Sizes of element-wise operations that take from about 3 to about 500 µs on an H100."""
SHORTEST_US, LONGEST_US = 2.0, 1_000.0
LEAST_JUDGED = 3
"""Times of the kernels that are compared, and their least number. Chosen."""

Row = Mapping[str, Any]


def units(folder: Path, scale: AcceptanceScale) -> Iterator[AcceptancePoint]:
    """Measure with each tool something whose result is known."""
    if not scale.is_cuda:
        yield absent("units", "PyTorch sees no GPU, and a host has no queue to hold")
        return
    lab = Lab("cuda")
    for name, points in (("hold", _held), ("graph, memset, clock", _work), ("events", _events)):
        yield from guarded(name, points(lab))


def _work(lab: Lab) -> Iterator[AcceptancePoint]:
    x = lab.random(1024, 1024)
    before = x.clone()
    lab.machine.graph(lambda: x.add_(1.0))()  # runs once before the capture, and once when replayed
    lab.machine.synchronize()
    yield near("runs of a graph's work", float((x - before).mean()), 2.0, 1e-3)
    lab.machine.memset(x)
    lab.machine.synchronize()
    yield at_most("numbers left by a memset", float(x.count_nonzero()), 0.0, plain)
    clock = lab.machine.clock_mhz()
    yield absent("clock", "it cannot be read (pip install 'foretrace[gpu]')") if clock is None else is_true(
        "clock", "100 to 4,000 MHz", 100 <= clock <= 4_000, f"{clock} MHz")


def _events(lab: Lab) -> Iterator[AcceptancePoint]:
    rows = [measure("elementwise", _operation(size), lab) for size in (*SIZES, (int(CACHE_BYTES) // 8 // 1024, 1024))]
    yield from judged_events([row for row, _ in rows])
    yield judged_cache(*rows[-1])


def _operation(size: tuple[int, int]) -> dict[str, Any]:
    return {"rows": size[0], "width": size[1], "op": "gelu", "layout": "contiguous", "dtype": "fp32"}


def _held(lab: Lab) -> Iterator[AcceptancePoint]:
    """Judge how long a stream is held for a requested time: after a pause, and after work that raises the clock."""
    time.sleep(IDLE_S)
    lab.machine.scale_hold()
    yield near("hold, cold", _median_us(lab, lambda: lab.machine.hold(HELD_US)), HELD_US, HELD_WITHIN)
    a = lab.random(BUSY_SIDE, BUSY_SIDE, dtype="bf16")
    for _ in range(BUSY_RUNS):
        a @ a
    lab.machine.scale_hold()
    yield near("hold, hot", _median_us(lab, lambda: lab.machine.hold(HELD_US)), HELD_US, HELD_WITHIN)


def _median_us(lab: Lab, work: Callable[[], None]) -> float:
    times = []
    for _ in range(10):
        first, second = lab.machine.event(), lab.machine.event()
        first.record()
        work()
        second.record()
        lab.machine.synchronize()
        times.append(first.elapsed_time(second) * 1e3)
    return statistics.median(times)


def judged_events(rows: Sequence[Row]) -> Iterator[AcceptancePoint]:
    """Judge the times of events, minus an empty pair's time, by the profiler's time of the same kernel."""
    alone = [row for row in rows if row["kernel_count"] == 1.0 and SHORTEST_US <= row["kernel_us"] <= LONGEST_US]
    for row in alone:
        by_event, kernel = row["p50_us"] - row["event_overhead_us"], row["kernel_us"]
        yield near(f"event less overhead, a kernel of {kernel:.1f} µs", by_event - kernel, 0.0,
                   round(max(EVENT_US, EVENT_WITHIN * kernel), 3), plain)
    yield is_true("kernels compared", f"≥ {LEAST_JUDGED}", len(alone) >= LEAST_JUDGED, f"{len(alone)} of {len(rows)}")


def judged_cache(warm: Row, cold: Row) -> AcceptancePoint:
    """Judge whether evicted data take longer."""
    return is_true("cold over warm at 20 MB", "> 1.05", cold["p50_us"] > 1.05 * warm["p50_us"],
                   f"{cold['p50_us'] / warm['p50_us']:.2f} ({warm['p50_us']:.1f} and {cold['p50_us']:.1f} µs)")
