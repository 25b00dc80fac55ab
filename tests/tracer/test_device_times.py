"""Device work with impossible times: a clock behind the host's, wrong starts, wrong ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faulty_kernels import (
    ACTIVE_MS,
    BASE_US,
    KERNEL_US,
    Event,
    changed,
    kernels,
    reading_steps,
    shifted,
    stamp,
    steps,
    write,
)

from tracer.graph import ExecutionGraph
from tracer.kineto import read_kineto, read_processes

HOURS_27 = 1e11
"""In µs."""


def read(folder: Path, events: list[Event]) -> ExecutionGraph:
    return read_kineto(write(folder / "trace.json", events))


def read_ranks(folder: Path, events: list[Event]) -> list[ExecutionGraph]:
    return read_processes(write(folder / "trace.json", events))


def lead_us(graph: ExecutionGraph) -> np.ndarray:
    """From the start of each call to that of its kernel."""
    rows = graph.kernels.launch >= 0
    called = graph.launches.start_ns[graph.kernels.launch[rows]]
    return (graph.kernels.start_ns[rows] - called) / 1e3


def active_ms(graph: ExecutionGraph) -> float:
    return float(graph.kernels.duration_ns.sum()) / 1e6


def noted(graph: ExecutionGraph, text: str) -> bool:
    return any(text in note for note in graph.meta.loss.notes)


@pytest.mark.parametrize("events", [steps(), steps(waits=False), reading_steps(), reading_steps(streams=(7, 20))])
def test_good_times_are_left_alone(tmp_path: Path, events: list[Event]) -> None:
    graph = read(tmp_path, events)
    assert not graph.meta.loss.mistimed_kernels and not graph.meta.loss.dropped_events and not graph.meta.loss.notes
    recorded = sorted((round(event["ts"] - BASE_US, 3), event["dur"]) for event in events
                      if event["cat"] in ("kernel", "gpu_memcpy"))
    assert sorted(zip(graph.kernels.start_ns / 1e3, graph.kernels.duration_ns / 1e3, strict=True)) == recorded


@pytest.mark.parametrize("behind_us", [46, 700, 3e6])
@pytest.mark.parametrize("events", [steps(6), steps(6, waits=False), reading_steps(), reading_steps(streams=(7, 20))],
                         ids=["waits", "no waits", "reads", "reads of two streams"])
def test_a_clock_behind_the_hosts_is_moved(tmp_path: Path, behind_us: float, events: list[Event]) -> None:
    graph = read(tmp_path, shifted([{**event} for event in events], -behind_us))
    loss = graph.meta.loss
    assert loss.shifted_kernels == len(graph.kernels) and loss.mistimed_kernels == loss.shifted_kernels
    assert noted(graph, "The clock of device 0 was ") and not loss.dropped_events
    assert 0 < lead_us(graph).min() <= 10
    # What the clock lacks is known but for the time a launch takes, of which these have 30 to 35 µs.
    truth = read(tmp_path, events)
    assert 0 <= (truth.kernels.start_ns - graph.kernels.start_ns).min() <= 35_000
    assert np.ptp(truth.kernels.start_ns - graph.kernels.start_ns) == 0
    assert graph.meta.window_ns == truth.meta.window_ns


def test_only_the_device_with_the_wrong_clock_is_moved(tmp_path: Path) -> None:
    right, graph = read_ranks(tmp_path, shifted(steps() + steps(device=1, process=1001, first=500), -700, device=1))
    assert graph.meta.loss.shifted_kernels == 16 and noted(graph, "The clock of device 1 was 675 µs behind")
    assert not right.meta.loss.shifted_kernels and sorted(set(lead_us(right))) == [30, 125, 220, 315]


def test_a_clock_that_drifts_is_named_and_left_alone(tmp_path: Path) -> None:
    events = steps(6)
    for place, event in enumerate(kernels(events)):
        event["ts"] -= 100 + 40 * place
    graph = read(tmp_path, events)
    assert graph.meta.loss.early_kernels == 22 and graph.meta.loss.mistimed_kernels == 22
    assert noted(graph, "by a time that changes") and len(graph.kernels) == 24


@pytest.mark.parametrize(("waits", "far_us", "rows"), [
    (True, -1e12, [0]), (True, -HOURS_27, [3, 4]), (False, -1e7, [5, 10]), (True, -2e3, [0, 1, 2, 3]),
    (False, 1e8, [23]), (False, HOURS_27, [3]), (True, 1e8, [3]), (False, -2e3, [0])])
def test_a_wrong_start_is_placed_after_its_launch(tmp_path: Path, waits: bool, far_us: float, rows: list[int]) -> None:
    graph = read(tmp_path, changed(steps(6, waits=waits), rows, stamp(late=far_us)))
    loss = graph.meta.loss
    assert (loss.placed_kernels, loss.mistimed_kernels) == (len(rows), len(rows)) and not loss.launches_without_kernels
    assert noted(graph, "had an impossible start") and graph.meta.window_ns == 6_000_000
    assert graph.meta.base_time_ns == int(BASE_US * 1e3)
    assert active_ms(graph) == pytest.approx(6 * ACTIVE_MS) and lead_us(graph).min() >= 5
    order = np.argsort(graph.kernels.start_ns)
    ends = (graph.kernels.start_ns + graph.kernels.duration_ns)[order]
    assert (graph.kernels.start_ns[order][1:] >= ends[:-1]).all()
    assert (np.diff(graph.kernels.launch[order]) > 0).all()


def one_launch(events: list[Event]) -> None:
    """The kernels of the second step are of one launch, as those of a graph."""
    for each in kernels(events)[4:8]:
        each["args"]["correlation"] = kernels(events)[4]["args"]["correlation"]


@pytest.mark.parametrize(("more", "change", "says"), [
    (stamp(early=HOURS_27, dur=400.0), None, "left out"),
    (stamp(early=HOURS_27), lambda events: kernels(events)[5]["args"].update(correlation=999_999), ""),
    (stamp(early=HOURS_27), one_launch, ""),
    (stamp(ts=0, dur=0.0), lambda events: kernels(events)[5].update(name="seen once"), "had no start (time 0)")],
    ids=["fits nowhere", "without a launch", "of a graph", "without times and alone"])
def test_a_wrong_start_that_cannot_be_placed_is_dropped(tmp_path: Path, more: Any, change: Any, says: str) -> None:
    events = changed(steps(), [5], more)
    if change is not None:
        change(events)
    graph = read(tmp_path, events)
    loss = graph.meta.loss
    assert (loss.placed_kernels, loss.dropped_events, loss.orphan_kernels) == (0, 1, 0) and noted(graph, says)
    assert loss.launches_without_kernels == (3 if change is one_launch else 1)
    assert len(graph.kernels) == 15 and graph.meta.window_ns == 4_000_000


def test_kernels_of_graphs_may_overlap(tmp_path: Path) -> None:
    events = steps()
    one_launch(events)
    assert not read(tmp_path, changed(events, [4], stamp(dur=400.0))).meta.loss.mistimed_kernels


@pytest.mark.parametrize("duration", [0.0, KERNEL_US])
def test_kernels_at_time_zero(tmp_path: Path, duration: float) -> None:
    """Without a duration they take as long as others of their name and grid."""
    graph = read(tmp_path, changed(steps(), [1, 5, 9], stamp(ts=0, dur=duration)))
    loss = graph.meta.loss
    assert (loss.placed_kernels, loss.dropped_events, loss.launches_without_kernels) == (3, 0, 0)
    assert graph.meta.window_ns == 4_000_000
    assert noted(graph, "3 at time 0") and active_ms(graph) == pytest.approx(4 * ACTIVE_MS)


def test_wrong_kernels_beside_a_clock_that_is_behind(tmp_path: Path) -> None:
    events = shifted(steps(), -700)
    graph = read(tmp_path, changed(events, [3, 9], stamp(early=1e9)))
    assert graph.meta.loss.shifted_kernels == 16 and noted(graph, "The clock of device 0 was")
    assert graph.meta.loss.placed_kernels + graph.meta.loss.dropped_events == 2


@pytest.mark.parametrize(("duration_us", "rows"), [
    (400.0, [5]), (2e4, [5, 6]), (2e6, [3, 7]), (5e9, [15]), (2e6, [1, 3, 5, 7, 9])])
def test_a_wrong_end_is_cut_to_what_the_kernel_usually_takes(
        tmp_path: Path, duration_us: float, rows: list[int]) -> None:
    graph = read(tmp_path, changed(steps(), rows, stamp(dur=duration_us)))
    assert graph.meta.loss.cut_kernels == graph.meta.loss.mistimed_kernels == len(rows)
    assert noted(graph, "had an impossible duration") and graph.meta.window_ns == 4_000_000
    assert active_ms(graph) == pytest.approx(4 * ACTIVE_MS)


def test_a_kernel_of_its_own_kind_is_cut_to_the_next_start(tmp_path: Path) -> None:
    events = changed(steps(), [5], stamp(dur=2e6))
    alone = read(tmp_path, kernels(events))  # a trace of the device alone
    assert alone.meta.loss.cut_kernels == 1 and active_ms(alone) == pytest.approx(4 * ACTIVE_MS)
    kernels(events)[5]["name"] = "the only one"
    graph = read(tmp_path, events)
    assert graph.meta.loss.cut_kernels == 1 and active_ms(graph) == pytest.approx(4 * ACTIVE_MS + 0.005)


@pytest.mark.parametrize("wrong", [False, True])
def test_streams_that_overlap_by_habit_keep_their_overlaps(tmp_path: Path, wrong: bool) -> None:
    events = changed(steps(), list(range(16)), stamp(dur=175.0))
    graph = read(tmp_path, changed(events, [5] if wrong else [], stamp(dur=2e6)))
    assert graph.meta.loss.cut_kernels == wrong
    # One that is cut ends where the next begins.
    assert active_ms(graph) == pytest.approx(16 * 0.175 - 0.020 * wrong)


def test_streams_and_processes_do_not_mix(tmp_path: Path) -> None:
    """Two processes that both call their stream 7 and their device 0 overlap without a fault."""
    both = steps() + [{**event, "ts": event["ts"] + 40} for event in steps(process=1001, first=500)]
    assert not any(graph.meta.loss.mistimed_kernels for graph in read_ranks(tmp_path, both))
    two = steps() + steps(process=1001, stream=20, first=500)
    cut, placed = read_ranks(tmp_path, changed(changed(two, [5], stamp(dur=2e6)), [20], stamp(early=HOURS_27)))
    assert (cut.meta.loss.cut_kernels, placed.meta.loss.placed_kernels) == (1, 1)
    assert active_ms(cut) == pytest.approx(4 * ACTIVE_MS) == active_ms(placed)
