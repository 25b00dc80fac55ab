"""``graph_calls``: which operation a kernel is priced as, on traces made by hand, and on the recorded ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trace_coverage
from slowly import mostly_slow

from kernel_models import trace_calls
from kernel_models.families.registry import unsized
from kernel_models.kernel_names import element_dtype, family_hint, short_kernel_name, uses_tf32
from kernel_models.op_call import Family
from kernel_models.trace_calls import FAMILIES, Basis, TraceCalls, graph_calls
from tracer.graph import NONE, ExecutionGraph
from tracer.kineto import read_kineto


class Trace:
    """A profiler trace of one thread: operations given by their times, each kernel launched at a time (µs)."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.correlation = 0

    def op(self, name: str, start: int, end: int, shapes: list[Any] | None = None, types: list[str] | None = None,
           category: str = "cpu_op", **args: Any) -> Trace:
        recorded = {} if shapes is None else {"Input Dims": shapes, "Input type": types or ["float"] * len(shapes)}
        self._event(category, name, start, end - start, 1, recorded | args)
        return self

    def kernel(self, name: str, launched: int, start: int, duration: int, category: str = "kernel",
               call: str = "cudaLaunchKernel", **args: Any) -> Trace:
        self.correlation += 1
        self._event("cuda_runtime", call, launched, 1, 1, {"correlation": self.correlation})
        self._event(category, name, start, duration, 7,
                    {"correlation": self.correlation, "stream": 7, "device": 0, **args})
        return self

    def _event(self, category: str, name: str, start: int, duration: int, thread: int, args: dict[str, Any]) -> None:
        self.events.append({"ph": "X", "cat": category, "name": name, "pid": 0 if thread == 7 else 1, "tid": thread,
                            "ts": 1000 + start, "dur": duration, "args": args})

    def read(self, folder: Path) -> ExecutionGraph:
        path = folder / "trace.json"
        path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": self.events}))
        return read_kineto(path)


def pieces(graph: ExecutionGraph, result: TraceCalls) -> list[tuple[str, str, str, int, str]]:
    """(operation, family, kind of the first call, ns, basis) of each piece."""
    return [(graph.string(int(graph.ops.name[op])) if (op := int(result.op[row])) >= 0 else "",
             result.calls_of_row(row)[0].family.value, result.calls_of_row(row)[0].kind, int(result.time_ns[row]),
             Basis(int(result.basis[row])).name) for row in range(len(result))]


def test_kernels_belong_to_the_innermost_operation_with_sizes(tmp_path: Path) -> None:
    graph = (Trace()
             .op("aten::linear", 0, 50, [[32, 16], [8, 16], [8]])
             .op("aten::addmm", 10, 40, [[8], [32, 16], [16, 8], [], []], ["float"] * 3 + ["Scalar"] * 2)
             .kernel("ampere_sgemm_32x32_tn", 20, 60, 5).kernel("splitKreduce_kernel", 30, 70, 2)
             .op("aten::relu", 60, 90, [[32, 8]]).op("aten::clamp_min", 70, 80)
             .kernel("vectorized_elementwise_kernel", 72, 100, 3)
             .op("c10d::allreduce_", 110, 130, [[64]])
             .kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgs)", 115, 120, 50)
             .read(tmp_path))
    found = graph_calls(graph)
    assert pieces(graph, found) == [
        ("aten::addmm", "gemm", "mm", 7000, "SHAPES"), ("aten::relu", "elementwise", "relu", 3000, "SHAPES")]
    assert found.collective_ns == 50_000  # counted and left out


def test_rows_give_back_kernels_and_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    real = trace_calls.calls_of
    monkeypatch.setattr(trace_calls, "calls_of", lambda *a, **k: asked.append(1) or real(*a, **k))
    trace = Trace()
    for i in range(6):
        trace.op("aten::convolution_backward", 100 * i, 100 * i + 90, [
            [2, 8, 8, 8], [2, 4, 8, 8], [8, 4, 3, 3], [], [], [], [], [], [], [], []], ["float"] * 3 + [""] + [
            "ScalarList"] * 3 + ["Scalar", "ScalarList", "Scalar", "ScalarList"], **{"Concrete Inputs": [
                "", "", "", "", "[1, 1]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1", "[True, True, False]"]})
        trace.kernel("dgrad_engine", 100 * i + 10, 100 * i + 20, 5)
        trace.kernel("wgrad_engine", 100 * i + 11, 100 * i + 30, 7)
    graph = trace.read(tmp_path)
    result = graph_calls(graph)
    assert len(result) == 6
    assert [call.kind for call in result.calls_of_row(2)] == ["dgrad", "wgrad"]
    assert len(result.calls) == 2 and len(asked) == 1  # equal work is one call, looked at once
    assert result.kernel[result.kernel_offset[1]:result.kernel_offset[2]].tolist() == [2, 3]
    assert result.time_by_family() == {Family.CONV: 72_000}
    assert sorted(result.kernel.tolist()) == list(range(len(graph.kernels)))
    empty = graph_calls(Trace().op("aten::mm", 0, 30, [[2, 2], [2, 2]]).read(tmp_path))
    assert len(empty) == 0 and empty.calls == [] and empty.call_offset.tolist() == empty.kernel_offset.tolist() == [0]


def test_copies_and_memsets_by_their_own_bytes(tmp_path: Path) -> None:
    graph = (Trace().op("aten::copy_", 0, 30, [[64], [64]])
             .kernel("Memcpy HtoD (Pinned -> Device)", 5, 40, 4, "gpu_memcpy", "cudaMemcpyAsync", bytes=256)
             .kernel("Memset (Device)", 10, 50, 1, "gpu_memset", "cudaMemsetAsync", bytes=16)
             .kernel("Memcpy DtoH (Device -> Pageable)", 20, 60, 2, "gpu_memcpy", "cudaMemcpyAsync", bytes=8)
             .read(tmp_path))
    result = graph_calls(graph)
    calls = [result.calls_of_row(row)[0] for row in range(3)]
    assert [(call.family, call.kind, call.dims, call.flags) for call in calls] == [
        (Family.TRANSFER, "h2d", (256,), ("pinned",)), (Family.MEMSET, "memset", (16,), ()),
        (Family.TRANSFER, "d2h", (8,), ("pageable",))]
    assert set(result.basis.tolist()) == {Basis.KERNEL_BYTES}


def test_kernels_without_operation_are_known_by_name_only(tmp_path: Path) -> None:
    graph = (Trace().kernel("void flash_fwd_kernel<Traits>(Params)", 0, 10, 5).kernel("strange", 1, 20, 6)
             .op("Optimizer.step#Adam.step", 30, 60, category="user_annotation")
             .kernel("multi_tensor_apply_kernel<Adam>", 40, 50, 7)
             .op("aten::mm", 70, 90).kernel("ampere_sgemm", 75, 80, 5).read(tmp_path))  # without recorded sizes
    result = graph_calls(graph)
    assert [result.calls_of_row(row)[0] for row in range(4)] == [
        unsized(Family.ATTENTION, "flash_fwd_kernel"), unsized(Family.OTHER, "strange"),
        unsized(Family.OPTIMIZER, "multi_tensor_apply_kernel"), unsized(Family.GEMM, "mm")]
    assert set(result.basis.tolist()) == {Basis.NAME}
    assert result.op[:2].tolist() == [NONE, NONE]


def test_kernels_tell_types_and_families_that_operations_leave_open(tmp_path: Path) -> None:
    sizes = [[32, 16], [16, 8]]
    graph = (Trace().op("aten::mm", 0, 30, sizes).kernel("cutlass_80_tensorop_s1688gemm_64x64_nn", 5, 20, 5)
             .op("aten::mm", 40, 70, sizes).kernel("ampere_sgemm_128x64_nn", 45, 80, 5)
             .op("aten::cat", 80, 99, [[[4, 3], [4, 5]], []], ["TensorList", "Scalar"])
             .kernel("void CatArrayBatchedCopy<c10::Half, unsigned int, 2>(c10::Half*)", 85, 90, 5)
             .op("lib::scale", 100, 130, [[64, 2], [64, 2]]).kernel("vectorized_elementwise_kernel<4>", 105, 120, 5)
             .op("lib::mystery", 140, 170, [[64]]).kernel("mystery_kernel", 145, 180, 5)
             .op("aten::view", 180, 190, [[64]]).kernel("strange", 185, 190, 5).read(tmp_path))
    result, told = graph_calls(graph), graph_calls(graph, tf32=True)
    found = [result.calls_of_row(row)[0] for row in range(len(result))]
    assert [call.family for call in found] == [
        Family.GEMM, Family.GEMM, Family.CONCAT, Family.ELEMENTWISE, Family.OTHER, Family.OTHER]
    assert [call.dtype for call in found[:3]] == ["tf32", "fp32", "fp16"]
    assert [told.calls_of_row(row)[0].dtype for row in range(2)] == ["tf32", "tf32"]
    assert (found[2].bytes_written, found[3].kind, found[4].bytes_read) == (64, "lib::scale", 256)


def test_fused_lookups_and_their_gradients_complete_each_other(tmp_path: Path) -> None:
    def lookup(start: int, tables: int, lookups: int) -> list[Any]:
        return [[0], [9600], [0], [0, 0], [tables], [tables], [tables + 1], [], [], [tables + 1], [], [lookups],
                [16 * tables + 1], [], []]

    types = ["float"] * 4 + ["int", "long int", "int", "Scalar", "Scalar", "long int", "Scalar", "long int", "long int",
                             "Scalar", ""]
    name = "fbgemm::split_embedding_codegen_lookup_adagrad_function"
    node = "torch::autograd::CppNode<SplitLookupFunction_adagrad_Op>"
    graph = (Trace().op(name, 0, 20, lookup(0, 3, 700), types).kernel("embedding_forward", 5, 10, 5)
             .op(name, 30, 50, lookup(30, 1, 90), types).kernel("embedding_forward", 35, 40, 5)
             .op(node, 60, 80, [[16, 24]], **{"Sequence number": 8}).kernel("embedding_backward", 65, 70, 5)
             .op(node, 90, 110, [[16, 48]], **{"Sequence number": 7}).kernel("embedding_backward", 95, 100, 5)
             .read(tmp_path))
    result = graph_calls(graph)
    calls = [result.calls_of_row(row)[0] for row in range(4)]
    assert [call.kind for call in calls] == ["bag", "bag", "bag_backward_fused", "bag_backward_fused"]
    assert calls[0].dims == calls[3].dims == (700, 48, 200, 16, 3)
    assert calls[1].dims == calls[2].dims == (90, 16, 400, 24, 1)
    assert not any("assumed" in call.flags for call in calls)


@pytest.mark.parametrize(("name", "family"), [
    ("ampere_sgemm_128x64_nn", Family.GEMM), ("Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x128x64", Family.GEMM),
    ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", Family.GEMM),
    ("kernel_unified_attention_2d", Family.ATTENTION), ("fmhaSm100aKernel_QkvE4m3OBfloat16H64", Family.ATTENTION),
    ("void cudnn::bn_bw_1C11_singleread<float, 512, true, 1, 2, 0>", Family.NORM),
    ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", Family.ELEMENTWISE),
    ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", Family.REDUCTION),
    ("void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, true>", Family.SOFTMAX),
    ("triton_poi_fused_add_cos_sin_0", Family.TRITON), ("Memset (Device)", Family.MEMSET), ("who_knows", Family.OTHER),
])
def test_families_by_kernel_name(name: str, family: Family) -> None:
    assert family_hint(name) is family


def test_tf32_and_types_by_kernel_name() -> None:
    assert uses_tf32("void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_64x128_32x3_tn_align1>")
    assert uses_tf32("sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nchw")
    assert not uses_tf32("ampere_sgemm_128x64_nn")
    assert not uses_tf32("cutlass_80_tensorop_bf16_s16816gemm_bf16_64x64_32x6_nn_align8")
    assert element_dtype("void CatArrayBatchedCopy<at::native::OpaqueType<2u>, unsigned int>") == "bf16"
    assert element_dtype("void reduce_kernel<512, 1, ReduceOp<float, func>>") == "fp32"
    assert element_dtype("gemm") == ""
    assert short_kernel_name("void at::native::(anonymous namespace)::copy<4, F>(int)") == "at::native::copy"


@pytest.mark.real_traces
@pytest.mark.parametrize("name", mostly_slow([
    "cuda-sync-A100", "dlrm-8xV100-2023", "gpu-only-MI210", "h100-vs-mi300", "linear-2080Ti", "rank0-1-of-128",
    "rank3-of-8xA100-6steps", "resnet50-V100", "resnet50-V100-2021", "resnet50-ddp-2xA100", "triton-example",
    "vllm-cuda-graph", "vllm-eager-B200",
], {"cuda-sync-A100", "gpu-only-MI210", "linear-2080Ti", "rank0-1-of-128", "resnet50-V100", "triton-example",
    "vllm-cuda-graph", "vllm-eager-B200"}))
def test_recorded_traces_are_covered(name: str, real_trace: Any) -> None:
    paths = trace_coverage.profiler_traces(real_trace(name))
    assert paths
    for path in paths:
        found = trace_coverage.coverage(trace_coverage.read(path))
        assert found.share >= 0.98, (path, found.rest)
        assert found.named_known >= 0.95 * found.named - 10_000, (path, found.rest)
        assert found.sized + found.named + found.collective == found.total


@pytest.mark.real_traces
def test_rates_on_an_a100_are_possible(real_trace: Any) -> None:
    """Joined shapes of ResNet-50: no family moves or computes more than the device can, nor next to nothing."""
    import tracer

    graph = read_kineto(real_trace("resnet50-ddp-2xA100/rank0.kineto.json.gz"))
    tracer.join_execution_trace(graph, real_trace("resnet50-ddp-2xA100/rank0.schema-1.0.3.et.json.gz"))
    result = graph_calls(graph)
    moved, flops = np.zeros(len(FAMILIES)), np.zeros(len(FAMILIES))
    for row in np.flatnonzero(result.basis == Basis.SHAPES).tolist():
        for call in result.calls_of_row(row):
            moved[result.family[row]] += call.bytes_moved
            flops[result.family[row]] += call.flops
    spent = result.time_by_family(result.basis == Basis.SHAPES)
    conv = flops[FAMILIES.index(Family.CONV)] / spent[Family.CONV]  # per ns: GFLOP/s × 1e-9
    assert 20_000 < conv < 156_000
    for family in (Family.ELEMENTWISE, Family.NORM, Family.OPTIMIZER):
        assert 600 < moved[FAMILIES.index(family)] / spent[family] < 2_039, family
