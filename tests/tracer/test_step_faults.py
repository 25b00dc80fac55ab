"""Steps that are none or lost device work, planted by kind: the reader finds, counts and names them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kineto_support import call, event, kernel, op, write

from tracer.graph import NONE, ExecutionGraph, StepSource
from tracer.kineto import read_kineto
from tracer.step_work import lost_launches

Events = list[dict[str, Any]]


def iteration(number: int, start: float, length: float, launches: int, *, streams: int = 1, lost: int = 0) -> Events:
    """A step of so many operations, each with a launch and a kernel but for the first ``lost``; times in µs."""
    events = [event("user_annotation", f"ProfilerStep#{number}", start, length)]
    each = 0.8 * length / launches
    for at in range(launches):
        begin, correlation = start + 0.1 * length + at * each, 10_000 * number + at + 1
        events += [op("aten::mm", begin, 0.9 * each),
                   call("cudaLaunchKernel", begin + 0.1 * each, 0.1 * each, correlation)]
        if at >= lost:
            events.append(kernel("gemm", begin + 0.3 * each, 0.5 * each, correlation, stream=7 + at % streams))
    return events


def on_host(number: int, start: float, length: float, operations: int) -> Events:
    """A step of a job without GPUs."""
    each = 0.9 * length / operations
    return [event("user_annotation", f"ProfilerStep#{number}", start, length),
            *(op("aten::mm", start + at * each, 0.8 * each) for at in range(operations))]


def leftover(kind: str, number: int, start: float, length: float) -> Events:
    """A step that holds almost nothing."""
    inside = {
        "nothing": [],
        "a wait": [call("cudaDeviceSynchronize", start + 0.1 * length, 0.8 * length, 77_001)],
        "a loss that is read": [
            op("aten::item", start + 0.1 * length, 0.8 * length),
            call("cudaMemcpyAsync", start + 0.2 * length, 0.1 * length, 77_001),
            event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", start + 0.3 * length, 2, pid=0, tid=7,
                  device=0, stream=7, correlation=77_001, bytes=4)],
    }[kind]
    return [event("user_annotation", f"ProfilerStep#{number}", start, length), *inside]


def graph_of(folder: Path, events: Events) -> ExecutionGraph:
    return read_kineto(write(folder, events))


def names(graph: ExecutionGraph) -> list[str]:
    return [graph.string(code) for code in graph.steps.name.tolist()]


@pytest.mark.parametrize(("kind", "length", "good", "streams"), [
    ("nothing", 12, 1, 1), ("a wait", 67_800, 2, 3), ("a loss that is read", 3_000_000, 5, 2),
    ("a wait", 3_000_000, 1, 1), ("a loss that is read", 12, 2, 3)])
def test_an_empty_last_step_is_left_out(tmp_path: Path, kind: str, length: float, good: int, streams: int) -> None:
    """However long it is: it holds a wait or a copy of the hundred launches of a step."""
    events = [each for number in range(good) for each in iteration(number, 1e5 * number, 1e5, 100, streams=streams)]
    graph = graph_of(tmp_path, events + leftover(kind, good, 1e5 * good, length))
    assert names(graph) == [f"ProfilerStep#{number}" for number in range(good)]
    assert graph.meta.loss.empty_steps == 1
    assert any(note.startswith(f"ProfilerStep#{good} holds almost no work") for note in graph.meta.loss.notes)
    assert (graph.ops.step < good).all() and (graph.launches.step < good).all() and (graph.kernels.step < good).all()


def test_an_empty_first_step_is_left_out_and_the_others_are_renumbered(tmp_path: Path) -> None:
    """As where ``prof.step()`` opens the loop's body instead of ending it; here both borders are empty."""
    events = leftover("a wait", 0, 0, 500) + iteration(1, 1000, 1000, 60) + iteration(2, 2000, 1000, 60)
    graph = graph_of(tmp_path, events + leftover("nothing", 3, 3000, 10))
    assert names(graph) == ["ProfilerStep#1", "ProfilerStep#2"] and graph.meta.loss.empty_steps == 2
    assert np.bincount(graph.kernels.step).tolist() == [60, 60]
    assert graph.launches.step.tolist()[0] == NONE and set(graph.launches.step.tolist()) == {NONE, 0, 1}
    assert any("ProfilerStep#0, ProfilerStep#3 hold almost no work" in note for note in graph.meta.loss.notes)


TRAINED = [*on_host(1, 1e6, 100, 1), op("autograd::engine::evaluate_function: MmBackward0", 1e6 + 95, 4)]
"""A short step that runs the autograd engine: a thousandth of the operations of the one before, that compiled it."""


@pytest.mark.parametrize(("events", "kept", "empty"), [
    (leftover("nothing", 0, 0, 5) + leftover("nothing", 1, 10, 5) + iteration(2, 1000, 1000, 60)
     + leftover("a wait", 3, 2000, 90), [2], 3),
    (on_host(0, 0, 1e5, 200) + on_host(1, 1e5, 50, 1), [0], 1),
    (on_host(0, 0, 1e5, 200) + leftover("nothing", 1, 1e5, 50), [0], 1),
    (iteration(0, 0, 1e5, 100) + iteration(1, 1e5, 2e4, 10), [0, 1], 0),
    (iteration(0, 0, 1e5, 100) + iteration(1, 1e5, 1e5, 100, lost=100), [0, 1], 0),
    (iteration(0, 0, 1e5, 100) + iteration(1, 1e5, 1e6, 100), [0, 1], 0),
    (on_host(0, 0, 1e6, 3000) + TRAINED, [0, 1], 0),
    # It is time of the loop: whether it counts is for those to say who compare lengths.
    (iteration(0, 0, 1000, 60) + leftover("nothing", 1, 1000, 900) + iteration(2, 1900, 1000, 60), [0, 1, 2], 0),
    (leftover("nothing", 0, 0, 10) + leftover("nothing", 1, 10, 10) + [op("aten::mm", 40, 5)], [0, 1], 0)],
    ids=["one good step", "no GPUs, an operation", "no GPUs, nothing", "a tenth of the work", "its kernels are lost",
         "ten times as long", "after one that compiled", "between others", "only empty ones"])
def test_steps_with_work_and_empty_ones_between_are_kept(tmp_path: Path, events: Events, kept: list[int],
                                                         empty: int) -> None:
    graph = graph_of(tmp_path, events)
    assert names(graph) == [f"ProfilerStep#{number}" for number in kept] and graph.meta.loss.empty_steps == empty


def test_an_empty_first_step_of_a_data_loader_is_left_out(tmp_path: Path) -> None:
    """Its steps have names that the reader gives them."""
    events = [event("user_annotation", "enumerate(DataLoader)#_SingleProcess.__next__", at, 5)
              for at in (0, 1000, 2000, 3000)]
    events += [op("aten::mm", 1000 * step + 100 + 10 * at, 5) for step in (1, 2, 3) for at in range(60)]
    graph = graph_of(tmp_path, events)
    assert graph.meta.step_source == StepSource.DATA_LOADER
    assert names(graph) == ["step 1", "step 2", "step 3"] and graph.meta.loss.empty_steps == 1


def repeats(lengths: Sequence[float], kernels: Sequence[float] = (), children: Sequence[int] = ()) -> Events:
    """The same four operations again and again, in windows of these lengths, with a kernel of these times in each and
    so many operations inside the last one; µs."""
    events: Events = []
    at = 0.0
    for number, length in enumerate(lengths):
        each = length / 4
        events += [op(f"aten::op{k}", at + k * each, 0.9 * each) for k in range(4)]
        for child in range(children[number] if children else 0):
            events.append(op("aten::copy_", at + (3 + 0.05 * child) * each, 0.04 * each))
        if kernels:
            events += [call("cudaLaunchKernel", at + 0.1 * each, 0.1 * each, number + 1),
                       kernel("gemm", at + 0.3 * each, kernels[number], number + 1)]
        at += length
    return events


@pytest.mark.parametrize("events", [
    repeats([344_000, 2_750, 145]), repeats([145, 344_000, 2_750]), repeats([100, 300, 1000, 5000]),
    repeats([100, 100, 100, 100], kernels=[1, 10, 40, 300]), repeats([100, 101, 99], children=[1, 9, 15])],
    ids=["344 ms to 0.1 ms", "in another order", "four", "device time", "operations"])
def test_repeats_unlike_each_other_are_no_steps(tmp_path: Path, events: Events) -> None:
    graph = graph_of(tmp_path, events)
    loss = graph.meta.loss
    assert len(graph.steps) == 0 and graph.meta.step_source == NONE and (graph.ops.step == NONE).all()
    assert loss.unlike_repeats in (3, 4) and (graph.launches.step == NONE).all() and (graph.kernels.step == NONE).all()
    assert any("are not taken for steps" in note for note in loss.notes)
    assert any("marks no steps" in note for note in loss.notes)


@pytest.mark.parametrize("events", [
    repeats([100, 101, 99]), repeats([344_000, 100, 101, 99]), repeats([100, 140, 90, 70, 130]),
    repeats([100, 100, 100], kernels=[10, 11, 9]), repeats([100, 100, 100], children=[10, 10, 10])])
def test_repeats_that_are_alike_are_steps(tmp_path: Path, events: Events) -> None:
    """One that is cold is an outlier of steps."""
    graph = graph_of(tmp_path, events)
    assert graph.meta.step_source == StepSource.PERIOD and graph.meta.loss.unlike_repeats == 0
    assert len(graph.steps) >= 3


@pytest.mark.parametrize(("lost", "expected", "streams"), [
    ([0, 30, 0], [0, 30, 0], 1), ([100, 0, 45], [100, 0, 45], 3), ([0, 1, 0], [0, 0, 0], 1),
    ([20, 20, 20], [0, 0, 0], 1), ([20, 50, 20], [0, 30, 0], 3), ([40], [0], 1)])
def test_launches_that_lost_their_work_are_counted_by_step(tmp_path: Path, lost: list[int], expected: list[int],
                                                           streams: int) -> None:
    """Beyond those that every step lacks, and not where they are 1% of the step's hundred."""
    events = [each for number, missing in enumerate(lost)
              for each in iteration(number, 1e5 * number, 1e5, 100, streams=streams, lost=missing)]
    graph = graph_of(tmp_path, events)
    assert lost_launches(graph).tolist() == expected
    assert graph.meta.loss.lossy_steps == sum(map(bool, expected))
    assert graph.meta.loss.launches_without_kernels == sum(lost)
    told = [note for note in graph.meta.loss.notes if "lost the device work" in note]
    assert len(told) == any(expected)
    assert not told or f"of {sum(expected):,} launches" in told[0]


def test_launches_that_are_captured_are_not_lost(tmp_path: Path) -> None:
    """The first step captures a CUDA graph, which the others launch."""
    captured = [event("user_annotation", "ProfilerStep#0", 0, 1000), op("aten::mm", 5, 900),
                call("cudaStreamBeginCapture", 10, 5, 1),
                *(call("cudaLaunchKernel", 20 + 10 * at, 5, 10 + at) for at in range(50)),
                call("cudaStreamEndCapture", 800, 5, 2)]
    graph = graph_of(tmp_path, captured + iteration(1, 1000, 1000, 60) + iteration(2, 2000, 1000, 60))
    assert lost_launches(graph).tolist() == [0, 0, 0] and graph.meta.loss.lossy_steps == 0
