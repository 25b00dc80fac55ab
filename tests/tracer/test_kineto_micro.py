"""Hand-made traces whose graph is known on paper."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kineto_support import call, event, kernel, names, op, small_step, write

from tracer.errors import TraceError
from tracer.graph import NONE, ExecutionGraph, GapKind, LaunchKind, OpKind, Phase, StepSource, SyncKind
from tracer.kineto import read_kineto, read_processes
from tracer.kineto.events import COLLECTIVE_KERNEL, call_kind, is_blocking_copy
from tracer.kineto.linking import collective_kind


def graph_of(folder: Path, events: list[dict[str, Any]], **metadata: Any) -> ExecutionGraph:
    return read_kineto(write(folder, events, **metadata))


def gaps_of(graph: ExecutionGraph) -> list[tuple[int, int, int]]:
    """Start and duration of each gap, ns, and its kind."""
    gaps = graph.gaps
    return list(zip(gaps.start_ns.tolist(), gaps.duration_ns.tolist(), gaps.kind.tolist(), strict=True))


def test_one_step(tmp_path: Path) -> None:
    graph = graph_of(tmp_path, [*small_step(), event("python_function", "ProfilerStep#3", 100, 100)],
                     baseTimeNanoseconds=1_700_000_000_000_000_000)
    assert graph.meta.base_time_ns == 1_700_000_000_000_100_000 and graph.meta.window_ns == 100_000
    assert len(graph.steps) == 1 and graph.meta.python_events == 1
    assert names(graph, graph.ops.name) == ["ProfilerStep#3", "aten::linear", "aten::addmm", "aten::relu"]
    assert graph.ops.parent.tolist() == [NONE, 0, 1, 0]
    assert graph.ops.kind.tolist() == [OpKind.ANNOTATION] + [OpKind.OPERATION] * 3
    assert graph.launches.op.tolist() == [2] and graph.launches.kind.tolist() == [LaunchKind.KERNEL]
    kernels = graph.kernels
    assert (kernels.launch[0], kernels.op[0], kernels.step[0], kernels.start_ns[0]) == (0, 2, 0, 30_000)
    assert (kernels.grid_x[0], kernels.grid_y[0], kernels.grid_z[0], kernels.block_x[0]) == (2, 3, 1, 128)
    assert gaps_of(graph) == [(0, 10_000, GapKind.PYTHON), (40_000, 20_000, GapKind.PYTHON),
                              (70_000, 30_000, GapKind.PYTHON)]
    assert set(graph.gaps.step.tolist()) == {0}


def test_data_loading_and_profiler_gaps(tmp_path: Path) -> None:
    graph = graph_of(tmp_path, [
        op("a", 0, 10), event("user_annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 20, 30),
        op("b", 30, 5), op("c", 60, 10), event("overhead", "Buffer Flush", 71, 8, pid=-1, tid=0), op("d", 80, 1)])
    assert gaps_of(graph) == [(10_000, 10_000, GapKind.PYTHON), (20_000, 10_000, GapKind.DATA_LOADING),
                              (35_000, 15_000, GapKind.DATA_LOADING), (50_000, 10_000, GapKind.PYTHON),
                              (70_000, 10_000, GapKind.PROFILER)]
    assert Phase.DATA in graph.ops.phase[names(graph, graph.ops.name).index("b"):][:1]


def test_a_driver_call_inside_a_runtime_call(tmp_path: Path) -> None:
    events = [op("triton", 0, 100), call("cudaLaunchKernelExC", 10, 20, 5), call("cuLaunchKernelEx", 12, 10, 6),
              kernel("k", 40, 5, 6)]
    graph = graph_of(tmp_path, events)
    assert graph.launches.parent.tolist() == [NONE, 0] and graph.launches.op.tolist() == [0, 0]
    assert graph.launches.kind.tolist() == [LaunchKind.OTHER, LaunchKind.KERNEL]
    assert graph.kernels.launch.tolist() == [1] and graph.meta.loss.launches_without_kernels == 0
    events[2]["args"]["correlation"] = events[3]["args"]["correlation"] = 5
    graph = graph_of(tmp_path, events)
    assert graph.kernels.launch.tolist() == [0]
    assert graph.launches.kind.tolist() == [LaunchKind.KERNEL, LaunchKind.OTHER]


def test_two_processes_with_equal_correlations(tmp_path: Path) -> None:
    events = []
    for process, device in ((100, 0), (200, 1)):
        for i in range(3):
            events += [op(f"p{process}", 100 * i, 50, pid=process, tid=process),
                       call("cudaLaunchKernel", 100 * i + 10, 5, i + 1 + (device and i == 0) * 50, pid=process,
                            tid=process),
                       kernel("k", 100 * i + 30 - device, 5, i + 1 + (device and i == 0) * 50, device=device)]
    with pytest.raises(TraceError, match="2 processes"):
        graph_of(tmp_path, events)
    (path,) = tmp_path.iterdir()
    for device, (pid, graph) in enumerate(zip(("100", "200"), read_processes(path), strict=True)):
        assert len(graph.kernels) == 3 and set(graph.kernels.device.tolist()) == {device}
        assert {graph.threads[thread].pid for thread in graph.launches.thread[graph.kernels.launch].tolist()} == {pid}


def test_orphans_leading_and_not_per_stream(tmp_path: Path) -> None:
    graph = graph_of(tmp_path, [
        op("a", 50, 50), call("cudaLaunchKernel", 55, 5, 1), call("cudaLaunchKernel", 62, 5, 2),
        kernel("early", 10, 5, 900), kernel("linked", 70, 5, 1), kernel("late orphan", 80, 5, 901),
        kernel("other stream", 90, 5, 902, stream=8)])
    assert graph.meta.loss.orphan_kernels == 3 and graph.meta.loss.leading_orphans == 2
    assert graph.meta.loss.launches_without_kernels == 1
    assert any("no recorded launch" in note for note in graph.meta.loss.notes)


def test_zero_size_memsets_and_captured_launches_are_no_losses(tmp_path: Path) -> None:
    graph = graph_of(tmp_path, [
        op("a", 0, 100), call("cudaMemsetAsync", 1, 2, 1), call("cudaStreamBeginCapture", 5, 1, 2),
        call("cudaLaunchKernel", 10, 2, 3), call("cudaStreamEndCapture", 15, 1, 4),
        call("cudaLaunchKernel", 20, 2, 5), kernel("k", 30, 1, 5)])
    assert graph.meta.loss.launches_without_kernels == 0


@pytest.mark.parametrize("thread", [1, 2])
def test_a_closure_that_the_optimizer_calls_is_not_its_own_work(tmp_path: Path, thread: int) -> None:
    engine = "autograd::engine::evaluate_function: MmBackward0"
    graph = graph_of(tmp_path, [
        event("user_annotation", "ProfilerStep#0", 0, 100),
        event("user_annotation", "Optimizer.step#Adam.step", 5, 90), op("aten::mm", 10, 10),
        event("user_annotation", "Optimizer.zero_grad#Adam.zero_grad", 22, 4), op("aten::zero_", 23, 2),
        op(engine, 30, 20, tid=thread), op("aten::t", 32, 10, tid=thread), op("aten::add_", 60, 5),
        op("aten::sqrt", 70, 5), op("after", 120, 5)])
    phase = dict(zip(names(graph, graph.ops.name), graph.ops.phase.tolist(), strict=True))
    assert phase["aten::mm"] == Phase.FORWARD and phase["aten::t"] == phase[engine] == Phase.BACKWARD
    assert phase["after"] == Phase.OTHER and (graph.ops.step == 0).sum() == len(graph.ops) - 1
    for name in ("aten::zero_", "aten::add_", "aten::sqrt", "Optimizer.step#Adam.step"):
        assert phase[name] == Phase.OPTIMIZER, name


def test_steps_between_optimizer_steps(tmp_path: Path) -> None:
    events = []
    for i in range(4):
        events += [event("user_annotation", "Optimizer.zero_grad#SGD.zero_grad", 100 * i, 5),
                   op("aten::mm", 100 * i + 10, 5), op("aten::mm", 100 * i + 20, 5),
                   event("user_annotation", "Optimizer.step#SGD.step", 100 * i + 80, 10)]
    graph = graph_of(tmp_path, events)
    assert graph.meta.step_source == StepSource.OPTIMIZER
    assert graph.steps.start_ns.tolist() == [0, 90_000, 190_000, 290_000]
    assert graph.steps.duration_ns.tolist() == [90_000, 100_000, 100_000, 100_000]
    cut = graph_of(tmp_path, events[3:])  # the window begins in the middle of the first step
    assert len(cut.steps) == 3


def test_steps_from_the_data_loader_and_from_a_period(tmp_path: Path) -> None:
    events = []
    for i in range(4):
        events += [event("user_annotation", "enumerate(DataLoader)#_SingleProcess.__next__", 100 * i, 5),
                   *(op(f"aten::op{k}", 100 * i + 10 * k, 5) for k in range(1, 5))]
    graph = graph_of(tmp_path, events)
    assert graph.meta.step_source == StepSource.DATA_LOADER and len(graph.steps) == 4
    graph = graph_of(tmp_path, [e for e in events if e["cat"] == "cpu_op"])
    assert graph.meta.step_source == StepSource.PERIOD and len(graph.steps) == 4
    assert graph.steps.start_ns.tolist() == [0, 100_000, 200_000, 300_000]
    graph = graph_of(tmp_path, [op(f"aten::op{i}", 10 * i, 5) for i in range(20)])
    assert len(graph.steps) == 0


@pytest.mark.parametrize("names", [["aten::mm"] * 10, ["aten::mm", "aten::relu"] * 8, ["aten::mm"] * 12])
def test_equal_calls_are_a_loop_and_no_steps(tmp_path: Path, names: list[str]) -> None:
    """Ten products are also three periods of three; nothing says that three of them are a step."""
    assert len(graph_of(tmp_path, [op(name, 10 * i, 5) for i, name in enumerate(names)]).steps) == 0


def test_waiting_for_autograd_is_no_python(tmp_path: Path) -> None:
    """The step's thread is idle while another one runs the backward pass, and again while nobody does anything.

        main       |mm| ...........waits............ |mm|   python   |mm|
        autograd        |--- AddmmBackward0 ---|
    """
    events = [event("user_annotation", "ProfilerStep#1", 0, 400), op("aten::mm", 10, 40), op("aten::mm", 200, 50),
              op("aten::mm", 350, 40), {**op("autograd::engine::evaluate_function: AddmmBackward0", 60, 130), "tid": 9}]
    gaps = graph_of(tmp_path, events).gaps
    main = gaps.thread == gaps.thread[np.argmin(gaps.start_ns)]
    found = dict(zip(gaps.start_ns[main].tolist(), gaps.kind[main].tolist(), strict=True))
    assert found == {0: GapKind.PYTHON, 50_000: GapKind.BLOCKED, 250_000: GapKind.PYTHON, 390_000: GapKind.PYTHON}


def test_modules_and_the_functions_that_called_them(tmp_path: Path) -> None:
    """PyTorch's own functions do not count, and of several callers the first one does."""
    graph = graph_of(tmp_path, [
        event("python_function", "train.py(17): step", 0, 200),
        event("python_function", "torch/nn/modules/module.py(1786): _wrapped_call_impl", 5, 90),
        event("python_function", "nn.Module: Net_0", 10, 80),
        event("python_function", "models/net.py(40): forward", 12, 70),
        event("python_function", "<built-in method linear>", 20, 20),
        event("python_function", "nn.Module: Linear_3", 15, 30), op("aten::mm", 22, 5), op("outside", 120, 5),
        event("python_function", "evaluate.py(3): again", 300, 100),
        event("python_function", "nn.Module: Net_0", 310, 50), op("aten::add", 320, 5)])
    assert names(graph, graph.ops.module) == ["Net_0/Linear_3", "", "Net_0"]
    assert graph.meta.module_lines == {"Net_0": "train.py(17): step", "Net_0/Linear_3": "models/net.py(40): forward"}
    assert graph.meta.python_events == 8 and graph.meta.profiler_flags["with_stack"]
    assert not [text for text in graph.strings if "train.py" in text or "built-in" in text]


def test_synchronisations(tmp_path: Path) -> None:
    graph = graph_of(tmp_path, [
        op("a", 0, 50), call("cudaStreamWaitEvent", 5, 2, 8),
        event("cuda_sync", "Stream Wait Event", 6, 1, pid=0, tid=20, stream=20, correlation=8, wait_on_stream=7,
              wait_on_cuda_event_record_corr_id=4),
        event("cuda_sync", "Context Sync", 9, 1, pid=0, tid=0, correlation=99, stream=4294967295)])
    assert graph.syncs.kind.tolist() == [SyncKind.STREAM_WAIT_EVENT, SyncKind.DEVICE_SYNC]
    assert graph.syncs.launch.tolist() == [0, NONE] and graph.syncs.stream.tolist() == [20, NONE]
    assert graph.syncs.wait_stream.tolist() == [7, NONE] and graph.syncs.record_correlation.tolist() == [4, NONE]


def test_a_collective_described_in_four_places_counts_once(tmp_path: Path) -> None:
    known = {"Collective name": "allreduce", "In msg nelems": 64, "Out msg nelems": 64, "dtype": "BFloat16",
             "Group size": 8, "Process Group Name": "3", "Process Group Ranks": "[0, 1, ...]"}
    graph = graph_of(tmp_path, [
        op("c10d::allreduce_", 0, 100), op("record_param_comms", 5, 80, **known),
        event("user_annotation", "nccl:all_reduce", 10, 60, **{"Input Dims": [[64]], "Input type": ["c10::BFloat16"]}),
        call("cudaLaunchKernelExC", 20, 5, 1), kernel("ncclDevKernel_Generic(x)", 50, 9, 1, **known),
        op("record_param_comms", 110, 5, **{"Collective name": "wait"}),
        op("record_param_comms", 120, 5, **{**known, "Collective name": "broadcast"})])
    found = graph.collectives
    assert names(graph, found.kind) == ["all_reduce", "broadcast"] and found.kernel.tolist() == [0, NONE]
    assert found.order.tolist() == [0, 1] and names(graph, found.group) == ["3", "3"]
    assert found.elements_in.tolist() == [64, 64] and names(graph, found.dtype) == ["bfloat16"] * 2
    assert names(graph, found.ranks) == ["[0, 1, ...]"] * 2 and found.group_size.tolist() == [8, 8]


@pytest.mark.parametrize(("name", "kind"), [
    ("ncclKernel_AllReduce_RING_LL_Sum_float", "all_reduce"), ("ncclDevKernel_SendRecv", "send_recv"),
    ("_allgather_base", "all_gather"), ("reduce_scatter_tensor_coalesced", "reduce_scatter"),
    ("all_to_allv", "all_to_all"), ("cross_device_reduce_1stage", "all_reduce"), ("ncclDevKernel_Generic", "unknown"),
    ("reduce", "reduce"), ("recv", "recv"), ("void deep_ep::intranode::dispatch<8, 768>(int4*)", "all_to_all"),
    ("void deep_ep::internode_ll::combine<true, 7168, 9, 9>(void*)", "all_to_all"),
    ("ncclSymkDevKernel_AllGather_LLMC(ncclSymkDevWorkArgs4K)", "all_gather")])
def test_names_of_collectives(name: str, kind: str) -> None:
    assert collective_kind(name) == kind


@pytest.mark.parametrize(("name", "collective"), [
    ("ncclDevKernel_Generic(ncclDevComm*)", True), ("void multimem_all_reduce_kernel<c10::BFloat16>", True),
    ("void vllm::cross_device_reduce_2stage<float, 8>", True), ("void at::native::reduce_kernel<512>", False),
    ("void deep_ep::intranode::dispatch<8, 768, 8192>(int4*, float*)", True),
    ("void deep_ep::internode::notify_dispatch<false, 2>(int const*)", True),
    ("void deep_ep::internode_ll::combine<true, 7168, 9, 9>(void*)", True),
    ("void dpsk::ep::internode::dispatch_ll<true>()", True), ("nvshmemi_alltoall_kernel", True),
    ("ncclSymkDevKernel_AllReduce_AGxLLMC_R_sum_bf16(ncclSymkDevWorkArgs4K)", True),
    ("void tensorrt_llm::kernels::oneShotAllReduceKernel<__half, 8>", True),
    ("void tensorrt_llm::kernels::ar_fusion::allreduce_fusion_kernel_oneshot_lamport<>", True),
    ("multimem_all_gather_kernel<16>", True),
    ("void deep_ep::layout::get_dispatch_layout<256, 32, 8>(long const*)", False),
    ("void flash_fwd_splitkv_combine_kernel<Flash_fwd_kernel_traits>", False),
    ("void cutlass::device_kernel<at::cuda::detail::dispatch_x>", False), ("triton_poi_fused_dispatch_0", False)])
def test_names_of_collective_kernels(name: str, collective: bool) -> None:
    assert bool(COLLECTIVE_KERNEL.search(name)) == collective


@pytest.mark.parametrize(("name", "kind"), [
    ("cudaLaunchKernel", LaunchKind.KERNEL), ("cuLaunchKernelEx", LaunchKind.KERNEL),
    ("hipExtModuleLaunchKernel", LaunchKind.KERNEL), ("hipGraphLaunch", LaunchKind.GRAPH),
    ("cudaMemcpyAsync", LaunchKind.MEMCPY), ("hipMemcpyWithStream", LaunchKind.MEMCPY),
    ("cudaMemcpy", LaunchKind.MEMCPY), ("cudaMemsetAsync", LaunchKind.MEMSET),
    ("cudaEventRecordWithFlags", LaunchKind.EVENT_RECORD), ("cudaStreamWaitEvent", LaunchKind.STREAM_WAIT),
    ("hipDeviceSynchronize", LaunchKind.BLOCKING_SYNC), ("cudaEventSynchronize", LaunchKind.BLOCKING_SYNC),
    ("cudaEventQuery", LaunchKind.OTHER), ("INVALID", LaunchKind.OTHER), ("cudaLaunchHostFunc", LaunchKind.OTHER)])
def test_names_of_calls(name: str, kind: LaunchKind) -> None:
    assert call_kind(name) == kind
    assert is_blocking_copy(name) == (name in ("hipMemcpyWithStream", "cudaMemcpy"))


def test_float_epoch_times_keep_parents(tmp_path: Path) -> None:
    text = (b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "outer", "pid": 1, "tid": 1, '
            b'"ts": 1712195495519761.132, "dur": 10.100}, {"ph": "X", "cat": "cpu_op", "name": "inner", "pid": 1, '
            b'"tid": "1", "ts": 1712195495519761.133, "dur": 10.099}]}')
    path = tmp_path / "t.json"
    path.write_bytes(text)
    graph = read_kineto(path)
    assert graph.ops.parent.tolist() == [NONE, 0] and graph.ops.start_ns.tolist() == [0, 1]
    assert graph.meta.loss.clamped_children == 0 and graph.ops.duration_ns.tolist() == [10_100, 10_099]
    assert np.issubdtype(graph.ops.start_ns.dtype, np.int64)
