"""No recording yields a program that waits for itself, whatever its times say."""

from __future__ import annotations

from dataclasses import replace as with_fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from micro import Micro, read_ranks
from reference_simulator import Draft, _Item, _Kernel, programs

from graph_predictor.simulation import device_waits as launch_queue
from graph_predictor.simulation.build import build_program
from graph_predictor.simulation.changed_program import without_cycles
from graph_predictor.simulation.engine import SimulationStuck, simulate
from graph_predictor.simulation.program import NEVER, LaunchReference, Program

RANDOM = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
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
    draft = Draft([0], [0], [0], queues=[[]])
    draft.items = [_Item(0, 0, 1, -1), _Item(0, 0, 1, -1)]
    draft.kernels = [_Kernel(0, n, n, LaunchReference.CALL_END, 1, -1, 0, 10, int(NEVER)) for n in range(2)]
    draft.kernels[0].edges.append((1, 1.0, 0))
    draft.kernels[1].edges.append((0, 1.0, 0))
    return draft.program()


def test_the_contradicted_edge_goes() -> None:
    """Of two edges the one goes whose source ended after its target had started in the recording."""
    program = with_fields(two_that_wait_for_each_other(), recorded_kernel_start=np.array([5, 20]),
                          recorded_kernel_end=np.array([15, 30]))
    with pytest.raises(SimulationStuck):
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
    free, left_out = without_cycles(program)
    assert left_out == {"blocking calls": 1}
    assert simulate(free).item_end.tolist() == [50, 51]


@pytest.mark.real_traces
def test_nothing_is_left_out_of_real_jobs(real_trace: object) -> None:
    """The rules themselves contradict no recording of the data; the job of eight ranks and its successor replay."""
    from tracer.job import read_job
    for name in ("nanogpt-rank0-of-8xH100/hook.kineto.json.gz", "nanogpt-8xH100"):
        path: Path = real_trace(name)  # type: ignore[operator]
        built = build_program(read_job(path).graphs)
        assert not built.left_out
        simulate(built.program)
