"""Kernels of recorded served steps, the operations that they belong to, and what is learned of real ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from kernel_models.device import find_device
from kernel_models.op_call import Family
from planner.serving.serve import cluster_for, serve
from planner.serving.setup import ServingError, ServingSetup
from planner.serving.source import served_decoder
from planner.serving.step_grids import PrefillChunk
from planner.serving.step_operations import StepOperation
from planner.serving.steps import ServedStep, ServingModel
from planner.serving.trace_calibration import (
    KernelRole,
    RecordedKernel,
    captured_operators,
    kernel_role,
    match_kernels,
    read_anchor,
    step_of,
)
from tracer.job import read_job

pytestmark = pytest.mark.usefixtures("read_once")
KERNELS = {"norms": "fused_add_rms_norm_kernel", "rotary positions, cache": "reshape_and_cache_flash_kernel",
           "attention of decoding": "flash_fwd_splitkv_kernel", "activation": "act_and_mul_kernel",
           "embedding": "indexSelectSmallIndex", "sampling": "argmax_kernel"}
FACTORS = {"queries, keys, values": 0.8, "attention's output": 1.3, "attention of decoding": 1.5, "norms": 2.0,
           "feed-forward part": 0.9}
PLAIN = ServingSetup()


@cache
def model_of(name: str, device: str, setup: ServingSetup = PLAIN) -> ServingModel:
    spec = find_device(device)
    return ServingModel(served_decoder(name).shape, setup, spec, cluster_for(spec, setup.gpus, None, None, None))


def model() -> ServingModel:
    return model_of("llama-3.1-8b", "h100-sxm")


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
    split = model_of("llama-3.1-8b", "h100-sxm", ServingSetup(tp=2))
    every = [each.name for each in split.in_order(ServedStep(8, 1024))]
    assert every.count("all-reduce") == 65 and every[-1] == "logits of all GPUs"


@pytest.mark.parametrize(("name", "model_name", "device", "setup", "own"), [
    ("vllm-cuda-graph", "gpt-oss-20b", "mi300x", ServingSetup(experts="mxfp4"), 0.99),
    ("vllm-eager-B200", "gpt-oss-120b", "b200", ServingSetup(tp=8, experts="mxfp4", kv="fp8"), 0.87)])
def test_kernels_of_real_servers_belong_to_operations(
        real_trace: Callable[[str], Path], name: str, model_name: str, device: str, setup: ServingSetup, own: float
        ) -> None:
    plain = model_of(model_name, device, setup)
    found = read_anchor(str(real_trace(name)), plain)
    assert found.own > own and found.own + found.beside > 0.99 and "another model" not in str(found)
    if name == "vllm-cuda-graph":
        assert (found.steps[0].sequences, found.steps[0].pieces[0].prompts) == (37, 9)
        assert sum(found.measured.values()) == pytest.approx(156_000, rel=0.02)
        assert found.measured["collectives"] == 0 and found.rates.collectives == 1.0
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
    events = [{**call, "name": "cudaStreamBeginCapture", "ts": 10}, {**call, "name": "cudaStreamEndCapture", "ts": 90},
              {**call, "pid": 0, "tid": 7, "cat": "kernel", "name": "warm", "ts": 5,  # a trace needs device work
               "args": {"correlation": 1, "stream": 7, "device": 0}}]
    for number, name in enumerate(operators):
        events += [{**call, "cat": "cpu_op", "name": name, "ts": 20 + 20 * number, "dur": 15,
                    "args": {"External id": number + 1}},
                   {**call, "name": "cudaLaunchKernel", "ts": 25 + 20 * number,
                    "args": {"correlation": 100 + number, "External id": number + 1}}]
    path = tmp_path / "capture.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events, "deviceProperties": []}))
    kernels = [("k1", 3.0), ("triton_poi_fused_0", 2.0), ("k2", 3.0)]
    graph, capture = (read_job([where]).graphs[0] for where in (trace_of(tmp_path / "a.json", [("step", kernels)]),
                                                                str(path)))
    found = captured_operators(graph, capture)
    ordered = np.argsort(graph.kernels.start_ns)
    assert [found[row] for row in ordered.tolist()] == operators
    with pytest.raises(ServingError, match="captures no CUDA graph"):
        captured_operators(graph, graph)


@pytest.mark.parametrize(("name", "step"), [
    ("execute_context_1(888_788544)_generation_0(0)", ServedStep(0, 0.0, (PrefillChunk(1, 888, 0),), 1)),
    ("execute_8192_context_2(sq800sk1000sqsq1sqsk1)_generation_4(sq4sk400sqsq4sqsk1)",
     ServedStep(4, 100.0, (PrefillChunk(2, 400, 100),), 2)),
    ("execute_context_0(0)_generation_8(8)", ServedStep(8, 1.0, (), 0)), ("ProfilerStep#3", None),
    ("execute_model", None), ("execute_context_0(0)_generation_0(0)", None)])
def test_a_step_s_name_says_what_it_works_on(name: str, step: ServedStep | None) -> None:
    assert step_of(name) == step


def test_a_trace_anchors_serve(real_trace: Callable[[str], Path]) -> None:
    found, plain = (serve("gpt-oss-120b", device="b200", tp=8, experts="mxfp4", kv_dtype="fp8", batch=8, context=1024,
                          anchor=where) for where in (str(real_trace("vllm-eager-B200")), None))
    assert found.notes[0].startswith("Anchored on 1 recorded step") and found.prefill.us != plain.prefill.us


@pytest.mark.parametrize(("trace", "name", "device", "setup", "says"), [
    ("resnet50-ddp-2xA100", "gpt-oss-20b", "b200", ServingSetup(), "No step of"),
    ("vllm-cuda-graph", "gpt-oss-20b", "h200-sxm", ServingSetup(experts="mxfp4"), "with 206 GB"),
    ("vllm-eager-B200", "gpt-oss-20b", "h200-sxm", ServingSetup(), "give --device b200"),
    ("vllm-cuda-graph", "llama-3.1-70b", "mi300x", ServingSetup(tp=8), "no collectives")])
def test_a_trace_of_another_device_or_split_is_told(real_trace: Callable[[str], Path], trace: str, name: str,
                                                    device: str, setup: ServingSetup, says: str) -> None:
    with pytest.raises(ServingError, match=says):
        read_anchor(str(real_trace(trace)), model_of(name, device, setup))


def test_a_trace_of_another_model_is_told(real_trace: Callable[[str], Path]) -> None:
    where = str(real_trace("vllm-cuda-graph"))
    assert "may be of another model" in str(read_anchor(where, model_of("qwen3-32b", "mi300x")))
