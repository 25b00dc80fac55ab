"""Odd windows through reader, builder and simulator: nothing crashes, nothing hangs, nothing is silently zero."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace as with_fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from micro import Micro, closes, host_span_ns, read_ranks, step_us
from reference_simulator import Draft, _Item, _Kernel, programs

from graph_predictor.prediction.replay import WINDOW, replay
from graph_predictor.simulation import device_waits as launch_queue
from graph_predictor.simulation.build import build_program
from graph_predictor.simulation.changed_program import without_cycles
from graph_predictor.simulation.engine import SimulationStuck, simulate
from graph_predictor.simulation.program import NEVER, LaunchReference, Program
from tracer.errors import ForetraceError
from tracer.job import read_job


def test_only_kernels(tmp_path: Path) -> None:
    """Orphans, no host events: the first starts when it was seen to start, and each stream follows from its first."""
    graph = Micro().orphan(7, 10, 30).read(tmp_path)
    result = closes(graph)
    assert [(s.name, s.measured_ns) for s in result.steps] == [(WINDOW, 30_000)]
    assert replay(graph, scale_kernels=2).steps[0].replayed_ns == 60_000
    trace = Micro()
    for n in range(5):
        trace.orphan(7, 10 + 21 * n, 20).orphan(20, 15 + 31 * n, 30)
    result = replay(trace.read(tmp_path))
    # No kernel has a launch, so the gap is the default 1.2: 0.2 more for each of four successors on stream 20.
    assert result.steps[0].measured_ns == 15_000 + 31_000 * 4 + 30_000 - 10_000
    assert result.steps[0].replayed_ns == result.steps[0].measured_ns + 4 * 200


def test_only_host(tmp_path: Path) -> None:
    """Steps of one thread, one of no length, and those of another thread beside it."""
    trace = Micro().step(0, 0, 1).step(0, 100, 2).step(10, 40, 7, thread=2).step(100, 250, 3)
    trace.op("aten::add", 10, 20).op("aten::mul", 20, 30).op("aten::add", 110, 120).op("aten::add", 12, 20, thread=2)
    result = closes(trace.read(tmp_path))
    assert (step_us(result, "2"), step_us(result, "3")) == (100, 150)


def test_unordered_events(tmp_path: Path) -> None:
    """The file's order means nothing: the same trace backwards gives the same replay. A helper thread that only
    launches takes part; one that only polls does not."""
    trace = Micro().calibrate().step(1000, 1200)
    trace.launch(1010, 5, (7, 1020, 50), thread=9)
    trace.launch(1015, 5, (7, 1071, 50))
    trace.call("cudaEventQuery", 1030, 1, thread=8)
    trace.call("cudaDeviceSynchronize", 1040, 91)
    forward = closes(trace.read(tmp_path))
    assert len(forward.program.thread_rank) == 2
    trace.events.reverse()
    backward = closes(trace.read(tmp_path))
    assert forward.simulated.kernel_end.tolist() == backward.simulated.kernel_end.tolist()
    assert [s.replayed_ns for s in forward.steps] == [s.replayed_ns for s in backward.steps]


@pytest.mark.parametrize("factor", [-1.0, float("nan"), 1e300, 1e15])
def test_factors_without_meaning(factor: float, tmp_path: Path) -> None:
    """Also those under which durations would not fit an int64 of nanoseconds."""
    graph = Micro().calibrate().read(tmp_path)
    with pytest.raises(ForetraceError, match=r"scaled|would last for years"):
        replay(graph, scale_kernels=factor)
    with pytest.raises(ForetraceError, match="nothing to replay"):
        replay([])


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


RANDOM = settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
CALLS = ("cudaLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemcpyAsync", "hipMemcpyWithStream", "cudaFree",
         "cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventRecord", "cudaStreamWaitEvent", "NCCL", "lost")


@st.composite
def recordings(draw: st.DrawFn) -> list[Micro]:
    """One or two ranks whose calls and device work have any times at all: several threads, streams, graphs, copies,
    collectives; clocks of host and device need not agree, nor streams keep the order of their launches."""
    ranks = []
    for _ in range(draw(st.integers(1, 2))):
        trace, now = Micro().calibrate(), dict.fromkeys((1, 2, 3), 1000.0)
        for _ in range(draw(st.integers(5, 60))):
            thread, name = draw(st.sampled_from([1, 1, 2, 3])), draw(st.sampled_from(CALLS))
            begin = now[thread] + draw(st.sampled_from([0, 1, 5, 30, 150]))
            takes = draw(st.sampled_from([0, 2, 5, 40, 200, 900]))
            now[thread] = begin + takes
            at = begin + draw(st.sampled_from([-20, 0, 5, 30, 300, 1500]))
            work = (draw(st.sampled_from([7, 7, 7, 20, 21])), at, draw(st.sampled_from([1, 10, 100, 1000])))
            if name in ("cudaLaunchKernel", "NCCL"):
                trace.launch(begin, takes, work, thread=thread, name=NCCL if name == "NCCL" else "gemm")
            elif name == "cudaGraphLaunch":
                more = [(draw(st.sampled_from([7, 22])), at + 10 * i, 8) for i in range(draw(st.integers(1, 3)))]
                trace.launch(begin, takes, work, kernels=more, call=name, thread=thread)
            elif "Memcpy" in name:
                kind = draw(st.sampled_from(["DtoH (Device -> Pageable)", "HtoD (Pageable -> Device)", "DtoD"]))
                trace.copy(begin, takes, work, kind, draw(st.sampled_from([64, 4_000_000])), call=name, thread=thread)
            elif name == "lost":
                trace.launch(begin, takes, thread=thread)
            else:
                trace.call(name, begin, takes, thread=thread)
        trace.step(1000, max(now.values()) + 10, 1)
        ranks.append(trace)
    return ranks


@RANDOM
@given(recordings())
def test_any_recording_can_be_simulated(tmp_path_factory: pytest.TempPathFactory, ranks: list[Micro]) -> None:
    """With a queue that counts as full from three entries on, so that it holds calls back in small recordings too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch_queue, "NEARLY_FULL", 3)
        patch.setattr(launch_queue, "FEW_BLOCKED", 2)
        patch.setattr(launch_queue, "CUDA_DEPTH", 4)
        built = build_program(read_ranks(ranks, tmp_path_factory.mktemp("random")))
    for factor in (1.0, 0.0, 4.0):
        simulate(built.program.with_durations(np.rint(built.program.kernel_duration * factor).astype(np.int64)))


@RANDOM
@given(programs(), st.data())
def test_what_closes_cycles_goes_and_nothing_else(program: Program, data: st.DataObject) -> None:
    """A program without cycles stays as it is; waits and edges that point anywhere leave one that can be simulated."""
    same, left_out = without_cycles(program)
    assert not left_out
    assert np.array_equal(same.edge_kernel, program.edge_kernel) and np.array_equal(same.wait_kernel,
                                                                                    program.wait_kernel)
    kernels = len(program.kernel_item)
    if not kernels:
        return
    anywhere = st.integers(0, kernels - 1)
    tangled = program.copy()
    for name in ("edge_kernel", "wait_kernel"):
        column = getattr(tangled, name)
        column[:] = data.draw(st.lists(anywhere, min_size=len(column), max_size=len(column)), label=name)
    free, _ = without_cycles(tangled)
    simulate(free)


def two_that_wait_for_each_other() -> Program:
    """Kernels of two streams."""
    draft = Draft([0], [0], [0], queues=[[]])
    draft.items = [_Item(0, 0, 1, -1), _Item(0, 0, 1, -1)]
    draft.kernels = [_Kernel(0, n, n, LaunchReference.CALL_END, 1, -1, 0, 10, int(NEVER)) for n in range(2)]
    draft.kernels[0].edges.append((1, 1.0, 0))
    simulate(draft.program())
    draft.kernels[1].edges.append((0, 1.0, 0))
    return draft.program()


def test_the_contradicted_edge_goes() -> None:
    """Of two edges the one goes whose source ended after its target had started in the recording."""
    program = with_fields(two_that_wait_for_each_other(), recorded_kernel_start=np.array([5, 20]),
                          recorded_kernel_end=np.array([15, 30]))
    with pytest.raises(SimulationStuck, match="2 of 4 events left"):
        simulate(program)
    free, left_out = without_cycles(program)
    assert left_out == {"waits across streams": 1}
    assert free.edge_kernel.tolist() == [0]
    assert simulate(free).kernel_start[1] >= simulate(free).kernel_end[0]


def test_a_call_keeps_its_time_when_its_wait_goes() -> None:
    """A call cannot wait for what a later call launches: its recorded duration stands for what it waited for."""
    draft = Draft([0], [0], [0], queues=[[]])
    draft.items = [_Item(0, 0, 1, -1, waits=[(0, 0)]), _Item(0, 0, 1, -1)]
    draft.kernels = [_Kernel(0, 0, 1, LaunchReference.CALL_END, 1, -1, 0, 10, int(NEVER))]
    program = with_fields(draft.program(), recorded_item_start=np.array([0, 50]), recorded_item_end=np.array([50, 51]),
                          recorded_kernel_end=np.array([70]))
    with pytest.raises(SimulationStuck):
        simulate(program)
    free, left_out = without_cycles(program)
    assert left_out == {"blocking calls": 1}
    assert simulate(free).item_end.tolist() == [50, 51]


@pytest.mark.real_traces
def test_nothing_is_left_out_of_real_jobs(real_trace: Callable[[str], Path]) -> None:
    """The rules themselves contradict no recording of the data; the job of eight ranks and its successor replay."""
    for name in ("nanogpt-rank0-of-8xH100/hook.kineto.json.gz", "nanogpt-8xH100"):
        built = build_program(read_job(real_trace(name)).graphs)
        assert not built.left_out
        simulate(built.program)


def test_unnamed_collectives_in_another_order(tmp_path: Path) -> None:
    """Without arguments, collectives are matched by the order of their ends: launch order differs between the ranks.

        rank 0   X  ########### 1020-1320 ###########       rank 1   Y                 # 1220-1240 #
                 Y    ####### 1040-1240 #######                      X                          ## 1280-1320 ##
    """
    traces = [Micro(rank=rank, world_size=2).calibrate().step(1000, 1335) for rank in range(2)]
    for rank, at, kernel in ((0, 1010, (20, 1020, 300)), (0, 1030, (24, 1040, 200)), (1, 1210, (24, 1220, 20)),
                             (1, 1270, (20, 1280, 40))):
        traces[rank].launch(at, 5, kernel, name=NCCL)
    built = build_program(read_ranks(traces, tmp_path))
    ends = simulate(built.program).kernel_end - built.program.recorded_kernel_end
    assert np.abs(ends).max() <= 1_000
