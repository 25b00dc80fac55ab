"""A server's trace as anchor: what its steps say that they worked on, and what is learned of real ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kernel_models.device import find_device
from planner.serving.serve import cluster_for, serve
from planner.serving.setup import ServingError, ServingSetup
from planner.serving.source import served_decoder
from planner.serving.step_grids import PrefillChunk
from planner.serving.steps import ServedStep, ServingModel
from planner.serving.trace_calibration import read_anchor, step_of


def model_of(name: str, device: str, setup: ServingSetup) -> ServingModel:
    spec = find_device(device)
    return ServingModel(served_decoder(name).shape, setup, spec, cluster_for(spec, setup.gpus, None, None, None))


def test_a_step_s_name_says_what_it_works_on() -> None:
    assert step_of("execute_context_1(888_788544)_generation_0(0)") == ServedStep(
        0, 0.0, (PrefillChunk(1, 888, 0),), 1)
    assert step_of("execute_8192_context_2(sq800sk1000sqsq1sqsk1)_generation_4(sq4sk400sqsq4sqsk1)") == ServedStep(
        4, 100.0, (PrefillChunk(2, 400, 100),), 2)
    assert step_of("execute_context_0(0)_generation_8(8)") == ServedStep(8, 1.0, (), 0)
    for none in ("ProfilerStep#3", "execute_model", "execute_context_0(0)_generation_0(0)"):
        assert step_of(none) is None


def test_kernels_of_graph_launches_count_by_their_names(real_trace: Callable[[str], Path]) -> None:
    model = model_of("gpt-oss-20b", "mi300x", ServingSetup(experts="mxfp4"))
    found = read_anchor(str(real_trace("vllm-cuda-graph")), model)
    step = found.steps[0]
    assert (step.sequences, step.pieces[0].prompts) == (37, 9)
    assert sum(found.measured.values()) == pytest.approx(156_000, rel=0.02)
    assert found.measured["collectives"] == 0 and found.rates.collectives == 1.0
    # The recorded step comes out as its kernels took.
    again = found.of(model)
    assert again.prices_of(again.in_order(step))[0].sum() == pytest.approx(sum(found.measured.values()), rel=0.01)


def test_a_trace_anchors_serve(real_trace: Callable[[str], Path]) -> None:
    where = str(real_trace("vllm-eager-B200"))
    found = serve("gpt-oss-120b", device="b200", tp=8, experts="mxfp4", kv_dtype="fp8", batch=8, context=1024,
                  anchor=where)
    plain = serve("gpt-oss-120b", device="b200", tp=8, experts="mxfp4", kv_dtype="fp8", batch=8, context=1024)
    assert found.notes[0].startswith("Anchored on 1 recorded step")
    assert found.prefill.us != plain.prefill.us
    with pytest.raises(ServingError, match="No step of"):
        read_anchor(str(real_trace("resnet50-ddp-2xA100")), model_of("gpt-oss-20b", "b200", ServingSetup()))


def test_a_trace_of_another_device_split_or_model_is_told(real_trace: Callable[[str], Path]) -> None:
    where = str(real_trace("vllm-cuda-graph"))
    with pytest.raises(ServingError, match="with 206 GB"):
        read_anchor(where, model_of("gpt-oss-20b", "h200-sxm", ServingSetup(experts="mxfp4")))
    with pytest.raises(ServingError, match="give --device b200"):
        read_anchor(str(real_trace("vllm-eager-B200")), model_of("gpt-oss-20b", "h200-sxm", ServingSetup()))
    with pytest.raises(ServingError, match="no collectives"):
        read_anchor(where, model_of("llama-3.1-70b", "mi300x", ServingSetup(tp=8)))
    assert "may be of another model" in str(read_anchor(where, model_of("qwen3-32b", "mi300x", ServingSetup())))
    assert "another" not in str(read_anchor(where, model_of("gpt-oss-20b", "mi300x", ServingSetup(experts="mxfp4"))))
