"""Odd windows through reader, builder and simulator: nothing crashes, nothing hangs, nothing is silently zero."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from micro import Micro, closes, host_span_ns, read_ranks, step_us

from graph_predictor.prediction.replay import WINDOW, replay
from graph_predictor.simulation.build import build_program
from graph_predictor.simulation.engine import simulate
from tracer.errors import ForetraceError


def test_no_graphs_at_all() -> None:
    with pytest.raises(ForetraceError, match="nothing to replay"):
        replay([])


def test_one_kernel_and_nothing_else(tmp_path: Path) -> None:
    """A window of one orphan: it starts when it was seen to start, and takes its duration."""
    graph = Micro().orphan(7, 10, 30).read(tmp_path)
    result = closes(graph)
    assert [(s.name, s.measured_ns) for s in result.steps] == [(WINDOW, 30_000)]
    assert replay(graph, scale_kernels=2).steps[0].replayed_ns == 60_000


def test_only_kernels(tmp_path: Path) -> None:
    """Two streams of orphans, no host events: each stream follows from its first kernel."""
    trace = Micro()
    for n in range(5):
        trace.orphan(7, 10 + 21 * n, 20).orphan(20, 15 + 31 * n, 30)
    result = replay(trace.read(tmp_path))
    # No kernel has a launch, so the gap is the default 1.2: 0.2 more for each of four successors on stream 20.
    assert result.steps[0].measured_ns == 15_000 + 31_000 * 4 + 30_000 - 10_000
    assert result.steps[0].replayed_ns == result.steps[0].measured_ns + 4 * 200


def test_only_host(tmp_path: Path) -> None:
    graph = Micro().step(0, 100, 1).op("aten::add", 10, 20).step(100, 250, 2).op("aten::add", 110, 120).read(tmp_path)
    result = closes(graph)
    assert (step_us(result, "1"), step_us(result, "2")) == (100, 150)


def test_launch_on_a_thread_without_operations(tmp_path: Path) -> None:
    """A helper thread that only launches takes part; one that only polls does not."""
    trace = Micro().calibrate().step(1000, 1200)
    trace.launch(1010, 5, (7, 1020, 50), thread=9)
    trace.call("cudaEventQuery", 1030, 1, thread=8)
    trace.call("cudaDeviceSynchronize", 1040, 45)
    graph = trace.read(tmp_path)
    result = closes(graph)
    assert len(result.program.thread_rank) == 2


def test_steps_of_no_length_and_steps_on_two_threads(tmp_path: Path) -> None:
    trace = Micro().step(0, 0, 1).step(0, 50, 2).step(10, 40, 7, thread=2)
    trace.op("aten::add", 10, 20).op("aten::mul", 20, 30).op("aten::add", 12, 20, thread=2)
    result = closes(trace.read(tmp_path))
    assert {s.name: s.replayed_ns for s in result.steps}["ProfilerStep#2"] == 50_000


def test_unordered_events(tmp_path: Path) -> None:
    """The file's order means nothing: the same trace backwards gives the same replay."""
    trace = Micro().calibrate().step(1000, 1200)
    trace.launch(1010, 5, (7, 1020, 50))
    trace.launch(1015, 5, (7, 1071, 50))
    trace.call("cudaDeviceSynchronize", 1040, 91)
    forward = closes(trace.read(tmp_path))
    trace.events.reverse()
    backward = closes(trace.read(tmp_path))
    assert forward.simulated.kernel_end.tolist() == backward.simulated.kernel_end.tolist()
    assert [s.replayed_ns for s in forward.steps] == [s.replayed_ns for s in backward.steps]


def test_kernel_that_starts_before_its_call(tmp_path: Path) -> None:
    """Clocks that disagree by a microsecond: the kernel cannot start before its call, and the rest goes on."""
    trace = Micro().calibrate().step(1000, 1200)
    trace.launch(1010, 5, (7, 1009, 50))
    result = replay(trace.read(tmp_path))
    assert abs(result.kernel_end_errors_ns()).max() <= 11_000
    assert step_us(result, "1") == 200


@pytest.mark.parametrize("factor", [-1.0, float("nan"), float("inf"), 1e300, 1e15])
def test_factors_without_meaning(factor: float, tmp_path: Path) -> None:
    """Also those under which durations would not fit an int64 of nanoseconds."""
    graph = Micro().calibrate().read(tmp_path)
    with pytest.raises(ForetraceError, match=r"scaled|would last for years"):
        replay(graph, scale_kernels=factor)


def test_two_threads_fill_one_queue(tmp_path: Path) -> None:
    """Two threads launch in turn, each on its stream, until the queue is full; either may run ahead in a what-if.

        thread 1   |0|       |2|       |4| ...   stream 7   ##100## (of even entries)
        thread 2        |1|       |3|            stream 20  ##100## (of odd entries)

    A thread launches every 60, the device finishes one entry of each stream every 101.
    """
    trace = Micro().calibrate()
    ends = {1: 1000.0, 2: 1030.0}
    finished: list[float] = []
    for n in range(4000):
        thread, stream, i = 1 + n % 2, (7, 20)[n % 2], n // 2
        start = ends[thread] + 55
        # Entry n - 1022 is of the same stream, so at most 1021 earlier ones are unfinished once it has ended.
        end = max(start + 5, finished[n - 1022] + 6 if n >= 1022 else 0)
        begin = (1065, 1095)[n % 2] + 101 * i
        trace.launch(start, end - start, (stream, begin, 100), thread=thread)
        finished.append(begin + 100)
        ends[thread] = end
    trace.step(1000, ends[1] + 5, 1)
    graph = trace.read(tmp_path)
    result = replay(graph)
    assert result.built.reports[0].queue_depth == 1022
    assert result.built.reports[0].blocked_launches > 500
    assert result.max_abs_error <= 0.001
    halved = replay(graph, scale_kernels=0.5)
    assert host_span_ns(halved, halved.steps[-1]) == 2000 * 60_000 + 5000, "never full, 60 a call"
    # Thread 2 stopped for 50 ms: thread 1 goes on for as long as the queue has room; nothing gets stuck.
    program = result.program.copy()
    program.item_work[int(program.thread_ptr[1]) + 1000] += 50_000_000
    late = simulate(program)
    assert (late.item_end >= result.simulated.item_end).all()


def test_unnamed_collectives_in_another_order(tmp_path: Path) -> None:
    """Without arguments, collectives are matched by the order of their ends: launch order differs between the ranks.

        rank 0   X  ########### 1020-1320 ###########       rank 1   Y                 # 1220-1240 #
                 Y    ####### 1040-1240 #######                      X                          ## 1280-1320 ##
    """
    name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    first = Micro(rank=0, world_size=2).calibrate().step(1000, 1335)
    first.launch(1010, 5, (20, 1020, 300), name=name)
    first.launch(1030, 5, (24, 1040, 200), name=name)
    second = Micro(rank=1, world_size=2).calibrate().step(1000, 1335)
    second.launch(1210, 5, (24, 1220, 20), name=name)
    second.launch(1270, 5, (20, 1280, 40), name=name)
    built = build_program(read_ranks([first, second], tmp_path))
    ends = simulate(built.program).kernel_end - built.program.recorded_kernel_end
    assert np.abs(ends).max() <= 1_000
