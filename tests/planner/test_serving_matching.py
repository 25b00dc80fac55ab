"""Kernels of recorded served steps and the operations that they belong to; steps predicted from other ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from kernel_models.device import find_device
from kernel_models.op_call import Family
from planner.serving.serve import cluster_for
from planner.serving.setup import ServingError, ServingSetup
from planner.serving.source import served_decoder
from planner.serving.step_grids import PrefillChunk
from planner.serving.step_operations import StepExchange, StepOperation
from planner.serving.steps import ServedStep, ServingModel
from planner.serving.trace_calibration import (
    KernelRole,
    RecordedKernel,
    captured_operators,
    kernel_role,
    match_kernels,
    read_anchor,
)
from tracer.graph import ExecutionGraph
from tracer.job import read_job

KERNELS = {"norms": "fused_add_rms_norm_kernel", "rotary positions, cache": "reshape_and_cache_flash_kernel",
           "attention of decoding": "flash_fwd_splitkv_kernel", "activation": "act_and_mul_kernel",
           "embedding": "indexSelectSmallIndex", "sampling": "argmax_kernel"}
FACTORS = {"queries, keys, values": 0.8, "attention's output": 1.3, "attention of decoding": 1.5, "norms": 2.0,
           "feed-forward part": 0.9}


@cache
def model() -> ServingModel:
    spec = find_device("h100-sxm")
    return ServingModel(served_decoder("llama-3.1-8b").shape, ServingSetup(), spec,
                        cluster_for(spec, 1, None, None, None))


def ran(step: ServedStep) -> list[tuple[str, float]]:
    """The kernels of a step on a machine whose operations take other times than predicted."""
    order = model().in_order(step)
    us = model().prices_of(order)[0]
    return [("nvjet_gemm" if each.call.family is Family.GEMM and each.name not in KERNELS else
             KERNELS.get(each.name, "other"), max(FACTORS.get(each.name, 1.0) * time, 0.01))
            for each, time in zip(order, us.tolist(), strict=True) if isinstance(each, StepOperation)]


def trace_of(path: Path, steps: Sequence[tuple[str, list[tuple[str, float]]]]) -> str:
    """A trace of steps whose kernels one graph launch starts."""
    events, now = [], 1000.0
    common = {"ph": "X", "pid": 1, "tid": 1}
    for number, (name, kernels) in enumerate(steps):
        begin = now
        events.append({**common, "cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": now + 1, "dur": 5,
                       "args": {"correlation": number + 1}})
        now += 20
        for kernel, us in kernels:
            events.append({"ph": "X", "pid": 0, "tid": 7, "cat": "kernel", "name": kernel, "ts": now, "dur": us,
                           "args": {"correlation": number + 1, "stream": 7, "device": 0, "graph node id": 5}})
            now += us
        events.append({**common, "cat": "user_annotation", "name": name, "ts": begin, "dur": now - begin + 1})
        now += 50
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events, "deviceProperties": [
        {"id": 0, "name": "NVIDIA H100 80GB HBM3", "totalGlobalMem": 85_000_000_000}]}))
    return str(path)


def test_a_name_says_a_kernel_s_role() -> None:
    for name, role in (
            ("fmhaSm100aKernel_QkvE4m3", KernelRole.ATTENTION), ("kernel_unified_attention_2d", KernelRole.ATTENTION),
            ("_matmul_ogs_NNT_bf16xbf16xmxfp4_128x128x128x1_swiglu", KernelRole.EXPERTS),
            ("nvjet_tst_64x64", KernelRole.PRODUCT), ("_finalize_matmul_scatter_bf16", KernelRole.ROUTING),
            ("Memcpy DtoD (Device -> Device)", KernelRole.NONE), ("multimem_all_reduce_kernel", KernelRole.COLLECTIVE),
            ("void vllm::reshape_and_cache_flash_kernel<…>", KernelRole.CACHE),
            ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0", KernelRole.NORM)):
        assert kernel_role(name) is role, name
    assert kernel_role("triton_poi_fused_7", "_C::silu_and_mul") is KernelRole.ACTIVATION


def test_a_product_is_which_one_by_its_place() -> None:
    order = model().in_order(ServedStep(8, 1024))
    layer = ["rms_norm_kernel", "gemm", "gemm", "rotary_kernel", "copy_kernel", "reshape_and_cache", "flash_fwd",
             "gemm", "rms_norm_kernel", "gemm", "silu_and_mul", "gemm"]
    found = match_kernels([RecordedKernel(name, "", 1.0) for name in [*(32 * layer), "rms_norm_kernel", "gemm"]], order)
    assert found.of[:12] == (
        "norms", "queries, keys, values", "queries, keys, values", "rotary positions, cache", "rotary positions, cache",
        "rotary positions, cache", "attention of decoding", "attention's output", "norms", "feed-forward part",
        "activation", "feed-forward part")
    assert found.of[-1] == "logits" and found.beside[4] and not found.none_us


@pytest.mark.parametrize(("name", "model_name", "device", "setup", "own"), [
    ("vllm-cuda-graph", "gpt-oss-20b", "mi300x", ServingSetup(experts="mxfp4"), 0.99),
    ("vllm-eager-B200", "gpt-oss-120b", "b200", ServingSetup(tp=8, experts="mxfp4", kv="fp8"), 0.87)])
def test_kernels_of_real_servers_belong_to_operations(
        real_trace: Callable[[str], Path], name: str, model_name: str, device: str, setup: ServingSetup, own: float
        ) -> None:
    spec = find_device(device)
    plain = ServingModel(served_decoder(model_name).shape, setup, spec, cluster_for(spec, setup.gpus, None, None, None))
    found = read_anchor(str(real_trace(name)), plain)
    assert found.own > own and found.own + found.beside > 0.99
    anchored, step = found.of(plain), found.steps[0]
    assert anchored.prices_of(anchored.in_order(step))[0].sum() == pytest.approx(
        sum(found.measured.values()), rel=0.01)
    assert found.rests(anchored, step) == pytest.approx(1.0)


def test_another_batch_is_predicted_from_one(tmp_path: Path) -> None:
    here, there = ServedStep(8, 1024), ServedStep(64, 3000)
    found = read_anchor(trace_of(tmp_path / "a.json", [("execute_context_0(0)_generation_8(sq8sk8192)", ran(here))]),
                        model())
    assert found.own + found.beside == pytest.approx(1.0, abs=0.01)
    for name in FACTORS:
        rate = found.rates.others if name == "norms" else found.rates.products
        assert rate * found.factors[name] == pytest.approx(FACTORS[name], rel=0.02), name
    for step in (here, there):
        assert found.of(model()).prices_of(model().in_order(step))[0].sum() == pytest.approx(
            sum(us for _, us in ran(step)), rel=0.02)
    # Prompts' attention was not recorded; all else was.
    prompt = ServedStep(0, 0, (PrefillChunk(1, 1024),), 1)
    assert 0.8 < found.rests(found.of(model()), prompt) < 1.0


def test_steps_that_do_not_say_what_they_did_are_told(tmp_path: Path) -> None:
    path = trace_of(tmp_path / "a.json", [(f"ProfilerStep#{number}", ran(ServedStep(4, 512))) for number in range(2)])
    with pytest.raises(ServingError, match="--context"):
        read_anchor(path, model())
    found = read_anchor(path, model(), assumed=ServedStep(4, 512))
    assert len(found.steps) == 2 and "taken to decode 4 × 512" in str(found)


def test_kernels_of_a_graph_have_the_operations_of_its_capture(tmp_path: Path) -> None:
    operators = ["aten::mm", "_C::silu_and_mul", "aten::mm"]
    call = {"ph": "X", "pid": 1, "tid": 1, "cat": "cuda_runtime", "dur": 2}
    events = [{**call, "name": "cudaStreamBeginCapture", "ts": 10}]
    for number, name in enumerate(operators):
        events += [
            {"ph": "X", "pid": 1, "tid": 1, "cat": "cpu_op", "name": name, "ts": 20 + 20 * number, "dur": 15,
             "args": {"External id": number + 1}},
            {"ph": "X", "pid": 1, "tid": 1, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 25 + 20 * number,
             "dur": 3, "args": {"correlation": 100 + number, "External id": number + 1}}]
    events.append({**call, "name": "cudaStreamEndCapture", "ts": 90})
    # A trace needs device work to be one.
    events.append({"ph": "X", "pid": 0, "tid": 7, "cat": "kernel", "name": "warm", "ts": 5, "dur": 1,
                   "args": {"correlation": 1, "stream": 7, "device": 0}})
    path = tmp_path / "capture.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events, "deviceProperties": []}))

    def read(where: str) -> ExecutionGraph:
        return read_job([where]).graphs[0]

    graph = read(trace_of(tmp_path / "a.json", [("step", [("k1", 3.0), ("triton_poi_fused_0", 2.0), ("k2", 3.0)])]))
    found = captured_operators(graph, read(str(path)))
    ordered = np.argsort(graph.kernels.start_ns)
    assert [found[row] for row in ordered.tolist()] == operators
    with pytest.raises(ServingError, match="captures no CUDA graph"):
        captured_operators(graph, graph)


def test_all_of_a_step_is_in_order() -> None:
    spec = find_device("h100-sxm")
    split = ServingModel(served_decoder("llama-3.1-8b").shape, ServingSetup(tp=2), spec,
                         cluster_for(spec, 2, None, None, None))
    names = [each.name for each in split.in_order(ServedStep(8, 1024)) if not isinstance(each, StepExchange)]
    assert names.index("attention of decoding") < names.index("attention's output") < names.index("feed-forward part")
    every = [each.name for each in split.in_order(ServedStep(8, 1024))]
    assert every.count("all-reduce") == 65 and every[-1] == "logits of all GPUs"
