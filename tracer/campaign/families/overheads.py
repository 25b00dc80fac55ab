"""Benchmarks of costs other than kernels, on host and device: launches, synchronisations, events, graphs, overlap.

Times are microseconds: of calls by the host's clock, of device work by device events. Nothing here has a size, so
nothing is held out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from tracer.campaign.families.family import Bench, CampaignFamily, Settings

if TYPE_CHECKING:
    from tracer.campaign.lab import Lab

REPEATS = 200  # chosen: enough for quantiles
CHAIN = 50
"""Kernels in a chain; the mean time between their starts is measured."""
BUSY_US = 2_000.0
"""Time for which the stream is kept busy while launches onto it are timed."""
QUEUE_US = 100_000.0  # chosen: longer than filling a launch queue takes
BLOCKED_US = 25_000.0
"""Launches that take longer waited for the busy stream: a full queue blocks one for the rest of ``QUEUE_US``. That is
some 90 ms after a thousand launches of 5 µs; other delays of a host are shorter."""
MOST_LAUNCHES = 5_000  # chosen: several times what a launch queue holds
OVERLAP_SIZES = {True: 4096, False: 64}
"""Size of the matrix product that a copy overlaps, on a GPU (true) and on a host."""

Samples = Mapping[str, list[float]]


def _timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - start) / 1e3


def _launch_idle(lab: Lab, kernel: Callable[[], Any]) -> Samples:
    """Measure (µs) ``call``: a launch on an idle stream; ``round_trip``: from its begin to the known end."""
    calls, trips = [], []
    for _ in range(REPEATS):
        lab.machine.synchronize()
        start = time.perf_counter_ns()
        kernel()
        calls.append((time.perf_counter_ns() - start) / 1e3)
        lab.machine.synchronize()
        trips.append((time.perf_counter_ns() - start) / 1e3)
    return {"call": calls, "round_trip": trips}


def _launch_busy(lab: Lab, kernel: Callable[[], Any]) -> Samples:
    calls: list[float] = []
    while len(calls) < REPEATS:
        lab.machine.synchronize()
        lab.machine.hold(BUSY_US)
        calls += [_timed(kernel) for _ in range(CHAIN)]
    lab.machine.synchronize()
    return {"call": calls}


def _queue_depth(lab: Lab, kernel: Callable[[], Any]) -> Samples:
    """Return as ``launches`` how many launches a busy stream takes before one blocks; empty if no launch blocked."""
    depths = []
    for _ in range(3):
        lab.machine.synchronize()
        lab.machine.hold(QUEUE_US)
        taken = next((number for number in range(MOST_LAUNCHES) if _timed(kernel) > BLOCKED_US), None)
        if taken is not None:
            depths.append(float(taken))
        lab.machine.synchronize()
    return {"launches": depths}


def _item(lab: Lab, kernel: Callable[[], Any]) -> Samples:
    """Measure the time to read one number: from an idle device, and right after a kernel was launched."""
    value = lab.random(1)
    idle, after = [], []
    for _ in range(REPEATS):
        lab.machine.synchronize()
        idle.append(_timed(value.item))
        kernel()
        after.append(_timed(value.item))
    return {"idle": idle, "after_launch": after}


def _synchronise(lab: Lab, kernel: Callable[[], Any]) -> Samples:
    """Measure synchronising device and stream when idle, and the device right after a launch."""
    stream = lab.machine.current_stream()
    found: dict[str, list[float]] = {"device_idle": [], "stream_idle": [], "device_after_launch": []}
    for _ in range(REPEATS):
        lab.machine.synchronize()
        found["device_idle"].append(_timed(lab.machine.synchronize))
        found["stream_idle"].append(_timed(stream.synchronize))
        kernel()
        found["device_after_launch"].append(_timed(lab.machine.synchronize))
    return found


def _events(lab: Lab, kernel: Callable[[], Any]) -> Samples:
    """Measure the host's cost of an event's record, query and synchronise, a stream's wait, and an empty event pair."""
    other = lab.machine.stream()
    found: dict[str, list[float]] = {"record": [], "stream_wait": [], "query": [], "synchronize_done": [],
                                     "device_empty_pair": []}
    for _ in range(REPEATS):
        first, second = lab.machine.event(), lab.machine.event()
        kernel()
        found["record"].append(_timed(first.record))
        found["stream_wait"].append(_timed(partial(other.wait_event, first)))
        second.record()
        lab.machine.synchronize()
        found["query"].append(_timed(first.query))
        found["synchronize_done"].append(_timed(first.synchronize))
        lab.machine.hold(20.0)
        first.record()
        second.record()
        lab.machine.synchronize()
        found["device_empty_pair"].append(first.elapsed_time(second) * 1e3)
    return found


def _chain_us(lab: Lab, work: Callable[[], Any], count: int) -> float:
    """Return the device time, µs, of one of ``count`` kernels that ``work`` launches, queued well ahead."""
    first, second = lab.machine.event(), lab.machine.event()
    lab.machine.hold(BUSY_US)
    first.record()
    work()
    second.record()
    lab.machine.synchronize()
    return float(first.elapsed_time(second)) * 1e3 / count


def _graph(lab: Lab, kernel: Callable[[], Any]) -> Samples:
    """Measure the time between ``CHAIN`` dependent tiny kernels launched one by one, the device time of one replay of
    their CUDA graph and of two, and the replaying call. The gap between replays is that of two minus twice that of
    one."""
    def chain() -> None:
        for _ in range(CHAIN):
            kernel()

    replay = lab.machine.graph(chain)
    found: dict[str, list[float]] = {"kernel_by_kernel": [], "one_replay": [], "two_replays": [],
                                     "replay_call": []}
    for _ in range(REPEATS // 4):
        found["kernel_by_kernel"].append(_chain_us(lab, chain, CHAIN))
        found["one_replay"].append(_chain_us(lab, replay, 1))
        found["two_replays"].append(_chain_us(lab, lambda: (replay(), replay()), 1))
        lab.machine.synchronize()
        found["replay_call"].append(_timed(replay))
    return found


def _overlap(lab: Lab, kernel: Callable[[], Any]) -> Samples:
    """Measure a matrix product and a pinned copy to the device, alone and concurrently on two streams."""
    torch, size = lab.torch, OVERLAP_SIZES[lab.is_cuda]
    a, b = (lab.random(size, size, dtype="bf16") for _ in range(2))
    source = lab.pinned(torch.randint(256, (size * size * 4,), dtype=torch.uint8))
    target = torch.empty_like(source, device=lab.device)
    side = lab.machine.stream()

    def compute() -> None:
        for _ in range(8):
            torch.mm(a, b)

    def copy() -> None:
        target.copy_(source, non_blocking=True)

    def both() -> None:
        side.wait_stream(lab.machine.current_stream())
        with lab.machine.on(side):
            copy()
        compute()
        lab.machine.current_stream().wait_stream(side)

    both()
    return {name: [_chain_us(lab, work, 1) for _ in range(REPEATS // 10)]
            for name, work in (("compute", compute), ("copy", copy), ("both", both))}


_CASES: dict[str, Callable[[Lab, Callable[[], Any]], Samples]] = {
    "launch_idle": _launch_idle, "launch_busy": _launch_busy, "queue_depth": _queue_depth, "item": _item,
    "synchronise": _synchronise, "events": _events, "graph": _graph, "overlap": _overlap,
}


def _prepare(settings: Settings, lab: Lab) -> Bench:
    x = lab.random(32)
    for _ in range(CHAIN):
        x.add_(1e-6)
    return Bench(samples=lambda: _CASES[settings["case"]](lab, lambda: x.add_(1e-6)))


FAMILIES = [CampaignFamily(
    "overheads", "launches, queue, synchronisation, events, CUDA graphs, overlap with copies", {},
    {"case": tuple(_CASES)}, prepare=_prepare)]
