"""Measurement of one micro-benchmark: warm and L2-flushed times by events, and the kernels that it ran.

    hold | flush | event  run  event       cold: the data comes from device memory
    hold |         event  run  event       warm: what fits is still in L2

``hold`` keeps the stream busy until the host has queued the rest, so that launch costs are not in the times. An event
pair itself takes some time: its median is stored with the times (``event_overhead_us``), not subtracted.

Other programs use a host's caches and memory for moments at a time. So a benchmark may be visited again, moments or
minutes later, for its warm times alone; the fastest visit is what the host can do.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tracer.campaign.families import FAMILIES, Bench
from tracer.campaign.tables import WARM, warm_variant
from tracer.lazy import numpy as np

if TYPE_CHECKING:
    from tracer.campaign.lab import Lab

WARM_UP_RUNS = 3  # chosen: the first compiles and allocates, the next touches the new memory
LEAST_RUNS, MOST_RUNS = 10, 200  # chosen: enough for a median, and for quantiles
SLOW_RUNS = 3
"""Number of runs of work so slow that ``LEAST_RUNS`` would exceed the budget."""
STEADY = 0.005
"""Repetition stops once the median's standard error, from the interquartile range, is below this share of it."""
CUDA_BUDGET_S, HOST_BUDGET_S = 0.1, 0.01
"""Longest time for the repetitions of a variant, seconds."""
HOST_FLUSHED_BUDGET_S = 0.005
"""Longest time for a host's flushed variant, seconds: its flush takes longer than most runs."""
PROFILED_RUNS = 3  # chosen: all runs launch the same kernels
HOLD_FACTOR, HOLD_US = 1.5, 30.0
"""Factor on the host's time to queue a run, and µs added to it: the time for which the stream is held."""
_QUANTILES = (10, 25, 50, 75, 90)  # per cent, as the columns' names say


class Ran(NamedTuple):
    """The kernels of one profiled run: their names in order, their number, and their total time.

    None where the profiler recorded no device work (it may lack the permission).
    """

    kernels: list[str] | None
    number: float | None
    time_us: float | None


def measure(family: str, settings: dict[str, Any], lab: Lab, visit: int = 1) -> list[dict[str, Any]]:
    """Run one micro-benchmark; return one row for each variant, as described in ``tracer.campaign.tables``.

    The first visit measures warm and cold variants, and records which kernels ran; later visits measure only the warm
    one.
    """
    with lab:
        bench = FAMILIES[family].bench(settings, lab)
        lab.machine.scale_hold()
        if bench.samples is not None:
            rows = [{"variant": name, **_quantiles(times)} for name, times in bench.samples().items() if times]
            if not rows:
                raise RuntimeError("This measurement is not supported here: it took no sample.")
            return rows
        hold_us, run_us = _warm_up(bench, lab)
        if visit > 1:
            times = _repeat(bench, lab, hold_us, run_us, flush=False)
            return [{"variant": warm_variant(visit), **_quantiles(times), "event_overhead_us": _empty_pair_us(lab)}]
        rows = []
        for variant, flush in ((WARM, False), ("cold", True)):
            times = _repeat(bench, lab, hold_us, run_us, flush)
            rows.append({"variant": variant, **_quantiles(times)})
        overhead = _empty_pair_us(lab)
        clock = lab.machine.clock_mhz()
        ran = which_kernels(bench.run, lab)
        common = {"flops": bench.flops, "bytes": float(bench.bytes), "kernels": ran.kernels,
                  "kernel_count": ran.number, "kernel_us": ran.time_us, "event_overhead_us": overhead,
                  "sm_clock_mhz": clock}
        return [{**row, **common} for row in rows]


def _warm_up(bench: Bench, lab: Lab) -> tuple[float, float]:
    """Run a few times; return µs until the host has queued a run (0 where it waits), and until the run has ended."""
    queued, ended = [], []
    for _ in range(WARM_UP_RUNS):
        lab.machine.synchronize()
        start = time.perf_counter_ns()
        bench.run()
        queued.append((time.perf_counter_ns() - start) / 1e3)
        lab.machine.synchronize()
        ended.append((time.perf_counter_ns() - start) / 1e3)
    return min(queued) if bench.asynchronous else 0.0, min(ended)


def _repeat(bench: Bench, lab: Lab, hold_us: float, run_us: float, flush: bool) -> list[float]:
    """Return the microseconds of each run, repeated until the median is steady or the budget is used."""
    machine = lab.machine
    budget_s = CUDA_BUDGET_S if lab.is_cuda else HOST_FLUSHED_BUDGET_S if flush else HOST_BUDGET_S
    batch = LEAST_RUNS if LEAST_RUNS * run_us < 1e6 * budget_s else SLOW_RUNS
    times: list[float] = []
    machine.scale_hold()
    started = time.perf_counter()
    while len(times) < MOST_RUNS:
        pairs = []
        for _ in range(batch):
            first, second = machine.event(), machine.event()
            if hold_us:
                machine.hold(HOLD_FACTOR * hold_us + HOLD_US)
            if flush:
                machine.flush()
            first.record()
            bench.run()
            second.record()
            pairs.append((first, second))
        machine.synchronize()
        times += [first.elapsed_time(second) * 1e3 for first, second in pairs]
        if time.perf_counter() - started > budget_s or _is_steady(times):
            break
    return times


def _is_steady(times: Sequence[float]) -> bool:
    if len(times) < LEAST_RUNS:
        return False
    low, middle, high = statistics.quantiles(times, n=4)
    return 0.93 * (high - low) / len(times) ** 0.5 <= STEADY * middle  # 1.253 σ/√n, σ = range / 1.349


def _is_operation(event: Any) -> bool:
    return event is not None and event.name.startswith("aten::")


def _quantiles(times: Sequence[float]) -> dict[str, Any]:
    values = np.percentile(times, _QUANTILES)
    return {"runs": len(times), "min_us": float(min(times)),
            **{f"p{share}_us": float(value) for share, value in zip(_QUANTILES, values, strict=True)}}


def _empty_pair_us(lab: Lab) -> float:
    found = []
    for _ in range(5):
        first, second = lab.machine.event(), lab.machine.event()
        lab.machine.hold(HOLD_US)
        first.record()
        second.record()
        lab.machine.synchronize()
        found.append(first.elapsed_time(second) * 1e3)
    return statistics.median(found)


def which_kernels(run: Callable[[], Any], lab: Lab) -> Ran:
    """Profile a few runs: the device's kernels and copies, or on a CPU the outermost operations."""
    from torch.profiler import ProfilerActivity, profile

    activity = ProfilerActivity.CUDA if lab.is_cuda else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        for _ in range(PROFILED_RUNS):
            run()
        lab.machine.synchronize()
    if lab.is_cuda:
        events = [event for event in profiler.events() if event.device_type.name == "CUDA"]
    else:
        events = [event for event in profiler.events() if _is_operation(event) and not _is_operation(event.cpu_parent)]
    events.sort(key=lambda event: event.time_range.start)
    if not events:
        return Ran(None, None, None)
    total = sum(event.time_range.elapsed_us() for event in events)
    names = list(dict.fromkeys(str(event.name) for event in events))
    return Ran(names, len(events) / PROFILED_RUNS, total / PROFILED_RUNS)
