"""Where a step's time goes: on paper for a hand-made step, and adding up on every real trace."""

from __future__ import annotations

import gc
import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from micro import Micro
from report_support import CPU_SMALL, REAL, real_trace, worked_step
from slowly import mostly_slow

from graph_predictor.prediction.replay import WINDOW, Replay, replay
from graph_predictor.request.predict import predict
from graph_predictor.simulation.engine import Causes
from graph_predictor.simulation.host_slices import HostTime, exclusive_time, split
from graph_predictor.simulation.program import Bound
from step_views.reports.breakdown import breakdown
from step_views.reports.breakdown_loop import HOST, WAITING, sum_steps
from step_views.reports.call_tree import OUTSIDE, OperationSums
from tracer.columns import empty_room
from tracer.errors import ForetraceError
from tracer.graph import OpKind
from tracer.job import read_job


def replayed(path: Path) -> Replay:
    return replay(read_job(path).graphs)


def test_the_worked_step(tmp_path: Path) -> None:
    """Host 40 to the launch and 240 after the sync; launch 5 in the call and 5 of latency; sync returns 10 late.

    The sync takes 35, of which 3 are its cost when nothing blocks; the rest is waiting, not the operation's work.
    """
    (step,) = breakdown(replay(worked_step().read(tmp_path)), step="ProfilerStep#1").steps
    assert step.simulated_ns == step.measured_ns == 400_000
    assert {b: ns for b, ns in step.totals.bounds.items() if ns} == {
        Bound.HOST: 280_000, Bound.LAUNCH: 10_000, Bound.COMPUTE: 100_000, Bound.SYNC: 10_000}
    assert {(e.operation, e.bound): e.time_ns for e in step.totals.span} == {
        (OUTSIDE, Bound.HOST): 10_000 + 35_000 + 190_000,  # 1000-1010, 1165-1200, 1210-1400
        ("aten::outer", Bound.HOST): 20_000, ("aten::inner", Bound.HOST): 10_000,
        ("aten::inner", Bound.LAUNCH): 10_000, ("aten::inner", Bound.COMPUTE): 100_000,
        ("aten::item", Bound.SYNC): 10_000, ("aten::item", Bound.HOST): 5_000, ("aten::after", Bound.HOST): 10_000,
    }
    rows = {e.operation: (e.calls, e.host_ns, e.waiting_ns, e.gpu_ns) for e in step.totals.operations}
    assert rows == {
        "aten::outer": (1, 70_000, 0, 0), "aten::inner": (1, 30_000, 0, 100_000), "aten::item": (1, 13_000, 32_000, 0),
        "aten::after": (1, 10_000, 0, 0), OUTSIDE: (0, 245_000, 0, 0),
    }
    (kernel,) = step.totals.kernels
    assert (kernel.kernel, kernel.count, kernel.total_ns, kernel.mean_ns, kernel.share) == (
        "void [red]mul<4>(float*)", 1, 100_000, 100_000, 1.0)


def test_what_if_moves_only_the_gpu_part_and_orphans_are_named(tmp_path: Path) -> None:
    graph = worked_step().orphan(9, 1210, 7).read(tmp_path)
    (step,) = breakdown(replay(graph, scale_kernels=2.0), step="1").steps
    assert step.simulated_ns == sum(e.time_ns for e in step.totals.span) == 500_000
    assert (step.totals.bounds[Bound.COMPUTE], step.totals.bounds[Bound.HOST]) == (200_000, 280_000)
    assert {e.operation: e.gpu_ns for e in step.totals.operations if e.gpu_ns} == {
        "aten::inner": 200_000, "launch not recorded": 14_000}


@pytest.mark.parametrize("wanted", ["nonsense", "2", "-3", "", "1.5"])
def test_choosing_a_step_and_one_that_is_not_there(tmp_path: Path, wanted: str) -> None:
    result = replay(worked_step().read(tmp_path))
    for number, there in ((0, "ProfilerStep#0"), (0, "0"), (1, "-1")):
        assert [s.name for s in breakdown(result, step=there).steps] == [f"ProfilerStep#{number}"]
    with pytest.raises(ForetraceError, match="ProfilerStep#0, ProfilerStep#1"):
        breakdown(result, step=wanted)


def test_totals_add_steps_up_and_json_holds_them(tmp_path: Path) -> None:
    result = breakdown(replay(worked_step().read(tmp_path)))
    total = result.total()
    assert sum(total.bounds.values()) == sum(s.simulated_ns for s in result.steps) == 1_000_000
    assert sum(e.time_ns for e in total.span) == 1_000_000
    step = json.loads(json.dumps(result.to_json(top=2)))["steps"][1]
    assert step["span_bounds_us"]["compute"] == 100.0
    assert set(step["span_bounds_us"]) == {bound.label for bound in Bound}
    assert [len(step[name]) for name in ("span", "operations", "kernels")] == [2, 2, 1]
    assert step["span"][0] == {"operation": OUTSIDE, "module": None, "bound": "host", "time_us": 235.0,
                                        "share": 0.5875, "segments": 3}


def test_exclusive_time_by_hand(tmp_path: Path) -> None:
    """Touching, nested, zero-length and simultaneous operations; annotations are looked through."""
    trace = Micro().step(0, 100)
    trace.op("a", 0, 40).op("b", 0, 10).op("c", 10, 40).op("empty", 20, 20).op("d", 40, 50).op("e", 60, 70, thread=2)
    graph = trace.read(tmp_path)
    host = exclusive_time(graph)
    found = [(graph.string(int(graph.ops.name[op])), int(start), int(end))
             for op, start, end in zip(host.op, host.start_ns, host.end_ns, strict=True)]
    assert found == [("b", 0, 10_000), ("c", 10_000, 40_000), ("d", 40_000, 50_000), ("e", 60_000, 70_000)]


def test_split_adds_up_by_hand() -> None:
    host = HostTime(*(np.array(c, np.int64) for c in ([0, 0, 1], [10, 30, 0], [20, 50, 100], [5, 6, 7])))
    pieces = split(host, np.array([0, 0, 1, -1, 3, 0]), np.array([15, 20, -10, 0, 0, 12]),
                   np.array([40, 30, 10, 9, 9, 12]))
    found = sorted(zip(pieces.query.tolist(), pieces.op.tolist(), pieces.ns.tolist(), strict=True))
    assert found == [(0, -1, 10), (0, 5, 5), (0, 6, 10), (1, -1, 10), (2, -1, 10), (2, 7, 10), (3, -1, 9), (4, -1, 9)]


DECIDED = ("resnet50-V100", "resnet50-ddp-2xA100/rank0.kineto.json.gz", "rank3-of-8xA100-6steps", "linear-2080Ti")
"""Traces of which breakdown and predict name what decides."""
BERT = "h100-vs-mi300/h100-gaunernst_bert-small-uncased.json.gz"


@pytest.mark.real_traces
@pytest.mark.parametrize("name", mostly_slow(
    ["cpu-small", *REAL], {"cpu-small", *REAL} - {"rank3-of-8xA100-6steps", "resnet50-V100", "dlrm-8xV100-2023"}))
def test_every_step_adds_up_on_real_traces(name: str) -> None:
    result = replayed(CPU_SMALL if name == "cpu-small" else real_trace(name))
    found = breakdown(result)
    if name in DECIDED:
        assert found.bound == predict(result.graphs).bound
    graphs = {(g.meta.rank if g.meta.rank >= 0 else i): g for i, g in enumerate(result.graphs)}
    for step, replayed_step in zip(found.steps, result.steps, strict=True):
        by_bound = dict.fromkeys(Bound, 0)
        for e in step.totals.span:
            by_bound[e.bound] += e.time_ns
            assert e.time_ns > 0 and e.operation
        assert by_bound == step.totals.bounds
        assert step.simulated_ns == replayed_step.replayed_ns == sum(by_bound.values())
        assert all(min(o.host_ns, o.waiting_ns, o.gpu_ns) >= 0 for o in step.totals.operations)
        if step.name == WINDOW:
            operations = graphs[step.rank].ops.kind == OpKind.OPERATION
            assert sum(o.calls for o in step.totals.operations) == int(operations.sum())
        assert sum(o.gpu_ns for o in step.totals.operations) == sum(k.total_ns for k in step.totals.kernels)
        if name == BERT:
            assert any("BertEncoder_0/BertLayer_0" in module.module for module in step.totals.modules)
            assert any(e.module for e in step.totals.span)


def running_ahead() -> Micro:
    """Three steps of 100 launches, 60 each; the kernels take 150 each, 151 with the gap, and fall behind."""
    trace, now, busy = Micro().calibrate(), 1000.0, 1000.0
    for number in (1, 2, 3):
        begin = now
        for _ in range(100):
            trace.launch(now + 55, 5, (7, max(now + 65, busy + 1), 150))
            busy = max(now + 65, busy + 1) + 150
            now += 60
        trace.step(begin, now, number)
    return trace


def test_what_falls_behind_decides(tmp_path: Path) -> None:
    """The host takes 6000 a step and waits for nothing; its device takes 15,100, which is what a step takes."""
    graph = running_ahead().read(tmp_path)
    result = breakdown(replay(graph))
    for step in result.steps[2:]:
        assert step.simulated_ns == 15_100_000 == sum(step.totals.bounds.values())
    predicted = predict(graph)
    assert result.bound == predicted.bound == "compute"
    assert result.step_ns == 15_100_000 and predicted.step_time_us == 15_100
    assert breakdown(replay(graph, scale_kernels=0.1)).bound == "host"


@pytest.mark.parametrize("seed", range(3))
def test_steps_that_overlap_are_each_added_up_by_themselves(seed: int) -> None:
    """Own time and waiting of random windows, nanosecond by nanosecond; nothing of operation 1 may be left."""
    rng, span = np.random.default_rng(seed), 60
    thread_op = rng.integers(-1, 3, (2, span))  # the operation of two threads at each time; -1: none
    waits_now = rng.random((2, span)) < 0.3
    host, waiting = [], []
    for thread in (0, 1):
        host += [(thread, at, at + 1, int(op)) for at, op in enumerate(thread_op[thread]) if op >= 0]
        waiting += [(thread, at, at + 1, -1) for at in np.flatnonzero(waits_now[thread]).tolist()]
    own, blocked = (HostTime(*np.array(each, np.int64).T.copy()) for each in (host, waiting))
    low = np.array([0, 20, 10, 30], np.int64)
    high, of_thread, none = low + np.array([60, 15, 40, 0]), np.array([0, 1, 1, 0], np.int64), np.zeros(0, np.int64)
    for share in (np.zeros(0), np.array([1.0, 0.0, 1.0, 1.0])):
        room, there, state = *empty_room(5, 4), np.zeros(2, np.int64)
        step, slot, sums = np.empty(40, np.int64), np.empty(40, np.int64), np.empty((40, 4), np.int64)
        assert sum_steps(low, high, of_thread, own.first, own.thread, own.start_ns, own.end_ns, own.op, blocked.first,
                         blocked.thread, blocked.start_ns, blocked.end_ns, blocked.latest_end, np.array([0, 1]),
                         np.zeros(5, np.int64), none, none, none, np.zeros(5, np.int64), none, np.arange(5), share,
                         room, there, state, step, slot, sums) == 4
        wanted = np.zeros((4, 5, 4), np.int64)
        for number, (begin, end, mine) in enumerate(zip(low.tolist(), high.tolist(), of_thread.tolist(), strict=True)):
            for at in range(begin, end):
                for thread in (0, 1):
                    op = int(thread_op[thread, at])
                    if op < 0 and thread != mine:
                        continue
                    wanted[number, op if op >= 0 else 3, WAITING if waits_now[thread, at] else HOST] += 1
        if len(share):
            wanted[:, 1, HOST] = 0
        found = np.zeros_like(wanted)
        rows = slice(int(state[0]))
        found[step[rows], slot[rows]] = sums[rows]
        assert np.array_equal(found, wanted)


@pytest.mark.slow  # every step is broken down above
def test_a_step_costs_its_own_events(tmp_path: Path) -> None:
    """One step of 400 is broken down with no more memory than one of 10: nothing as long as the trace is made."""
    def most_held(steps: int) -> int:
        trace = Micro().calibrate()
        for number in range(steps):
            begin = 1000 + 2000 * number
            trace.step(begin, begin + 2000, number + 1)
            for at in range(begin, begin + 2000, 100):
                trace.op("aten::add", at + 10, at + 90)
                trace.launch(at + 20, 5, (7, at + 30, 40))
        result = replay(trace.read(tmp_path))
        kinds = [graph.kernels.kind for graph in result.graphs]
        rank = OperationSums(result, 0, Causes(result.program, result.simulated, kinds))
        rank.figures(result.steps[1:2], spans=True)
        gc.collect()
        tracemalloc.start()
        try:
            rank.figures(result.steps[2:3], spans=True)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert most_held(400) < 2 * most_held(10)
