"""Predictions from real traces, against what other traces measured; and the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from fitted_times import Fitted
from said import plain
from typer.testing import CliRunner

from foretrace.commands import app
from foretrace.edits import Device, Edit, HostFrom, ScaleKernels
from graph_predictor.prediction.replay import replay
from graph_predictor.synthesis.baseline import baseline_of
from tracer.job import Job, read_job

pytestmark = pytest.mark.real_traces

Find = Callable[[str], Path]
V100 = "resnet50-V100/rank0.kineto.json.gz"
A100 = "resnet50-ddp-2xA100"
A100_WITHOUT_SIZES = "resnet50-ddp-2xA100/rank0.kineto.json.gz"
DLRM = "dlrm-8xV100-2023"
RANK3 = "rank3-of-8xA100-6steps/rank3.kineto.json.gz"
H100 = "h100-vs-mi300/h100-Qwen_Qwen1.5-0.5B-Chat.json.gz"
MI300X = "h100-vs-mi300/mi300-Qwen_Qwen1.5-0.5B-Chat.json.gz"


@lru_cache(maxsize=8)
def job(path: Path) -> Job:
    return read_job(path)


def test_the_steady_state_of_the_v100_is_not_its_first_step(real_trace: Find) -> None:
    result = baseline_of(job(real_trace(V100))).predict()
    assert result.step_time_us == pytest.approx(95_600, rel=0.005)
    assert result.bound == "compute"
    halved = baseline_of(job(real_trace(V100))).predict([ScaleKernels(0.5)])
    assert halved.step_time_us == pytest.approx(48_400, rel=0.02)


@pytest.mark.parametrize("name", [A100, RANK3])
def test_no_edit_is_the_replay(real_trace: Find, name: str) -> None:
    read = job(real_trace(name))
    result = baseline_of(read).predict()
    replayed = {s.name: s.replayed_ns / 1e3 for s in replay(read.graphs).steps}
    # What the GPU still had to do when the first of the steps began is not in a steady state.
    assert result.step_time_us == pytest.approx(np.mean([replayed[step] for step in result.steps]), rel=0.002)
    assert result.sources == {"measured": 1.0}


@pytest.mark.parametrize(("source", "target", "bound", "host_decides"), [
    (V100, A100, "host", True), (A100, V100, "compute", False), (H100, MI300X, "host", True),
    (MI300X, H100, "host", True), (A100_WITHOUT_SIZES, V100, "compute", False)])
def test_another_device_with_its_host(real_trace: Find, source: str, target: str, bound: str,
                                      host_decides: bool) -> None:
    """GPU active time within 25%, the bound named right, and the step within 10% where the host decides."""
    other = baseline_of(job(real_trace(target)))
    measured, spec = other.predict(), other.scenario.devices.source
    assert spec is not None
    edits: list[Edit] = [Device(spec), HostFrom(job(real_trace(target)).graphs, "the other")]
    result = baseline_of(job(real_trace(source))).predict(edits)
    assert result.gpu_active_us == pytest.approx(measured.gpu_active_us, rel=0.25)
    assert result.bound == measured.bound == bound
    if host_decides:
        assert result.step_time_us == pytest.approx(measured.step_time_us, rel=0.10)
    assert result.interval_us[0] < result.step_time_us < result.interval_us[1]


def test_steps_to_come_from_models_of_the_first_two(real_trace: Find) -> None:
    read = job(real_trace(RANK3))
    result = baseline_of(read, range(2)).predict([Fitted()])
    later = read.graphs[0].steps.duration_ns[2:] / 1e3
    assert np.abs(result.step_time_us / later - 1).mean() < 0.05
    assert "measured" not in result.kernel_sources


def test_command_line(real_trace: Find) -> None:
    source = ["predict", str(real_trace(V100))]
    result = CliRunner().invoke(app, [*source, "--device", "a100-sxm-40g", "--host-from", str(real_trace(A100))])
    assert result.exit_code == 0
    assert "decided by: host" in plain(result.stdout)
    values = json.loads(CliRunner().invoke(app, [*source, "--kernels", "0.5", "--price", "2", "--json"]).stdout)
    assert values["bound"] == "compute"
    assert values["interval_us"][0] <= values["step_time_us"] <= values["interval_us"][1]
    assert values["cost_per_step"] == pytest.approx(2 * values["step_time_us"] / 3.6e9)


@pytest.mark.parametrize(("name", "arguments", "why"), [
    (A100, ["--set", "batch=64"], "batch=32:64"), (A100, ["--step", "9"], "There is no step '9'"),
    (V100, ["--set", "batch=32:64"], "record_shapes")])
def test_what_cannot_be_done_is_one_sentence(real_trace: Find, name: str, arguments: list[str], why: str) -> None:
    result = CliRunner().invoke(app, ["predict", str(real_trace(name)), *arguments])
    assert (result.exit_code, result.stdout) == (2, "")
    assert why in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
