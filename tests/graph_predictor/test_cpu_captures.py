"""Captures of programs that compute on a CPU teach what another program's operations compute there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from said import plain
from typer.testing import CliRunner

from foretrace.commands import app
from graph_predictor.prediction.host_steps import host_by_name, recorded_host_work
from graph_predictor.request.measured import read_kernels
from graph_predictor.request.study import Configuration, Study
from graph_predictor.synthesis.baseline import baseline_of
from graph_predictor.synthesis.program import DeviceWork
from graph_predictor.synthesis.step import HostThread
from kernel_models.datasets.traces import HostWork, host_samples
from kernel_models.device import device
from kernel_models.fitting import Options, fit_profile
from kernel_models.op_call import Family, Source
from kernel_models.pricing import price
from kernel_models.profile import DeviceProfile
from tracer.graph import ExecutionGraph, KernelKind
from tracer.job import read_job

ROOT = Path(__file__).parents[2]
HOST = ROOT / "traces" / "host"
TEACHERS = ("convnext_images", "resnet18", "timm_resnet", "vit")
JUDGED = "resnet50"
CPU = device("cpu")


def _captures(name: str) -> list[str]:
    return [str(path) for path in sorted((HOST / name).glob("round*"))]


@pytest.fixture(scope="module")
def profile() -> DeviceProfile:
    samples = read_kernels([_captures(name)[0] for name in TEACHERS], spec=CPU)
    return fit_profile(samples, CPU, Options.of_one_machine(refit=True))


@pytest.fixture(scope="module")
def recorded() -> ExecutionGraph:
    return read_job(_captures(JUDGED)[0]).graphs[0]


def test_an_operation_of_several_calls_is_shared_out_by_the_formulas() -> None:
    graph = read_job(_captures("resnet18")[0]).graphs[0]
    names = [graph.string(int(code)) for code in graph.ops.name]
    row = names.index("aten::convolution_backward")
    parts = list(host_samples(graph, HostWork(np.array([row]), np.array([30_000.0])), CPU))
    (found,) = (one for one in parts if one.family is Family.CONV)
    assert {call.kind for call in found.calls} >= {"dgrad", "wgrad"}
    assert sum(float(one.measured_us.sum()) for one in parts) == pytest.approx(30.0)
    formula = price(list(found.calls), CPU).times_us
    assert found.measured_us / formula == pytest.approx(np.full(len(found), found.measured_us[0] / formula[0]))


@pytest.mark.slow  # the next test asks the same profile of a traced step
def test_what_is_learned_holds_for_a_program_that_taught_nothing(
        profile: DeviceProfile, recorded: ExecutionGraph) -> None:
    """All that its operations compute, by the captures of four others, is nearer than by the CPU that stands for any,
    which takes its convolutions for half as long again."""
    work = recorded_host_work(recorded)
    samples = list(host_samples(recorded, work, CPU))
    calls = [call for one in samples for call in one.calls]
    measured = np.concatenate([one.measured_us for one in samples])
    learned, formulas = price(calls, CPU, profile), price(calls, CPU)
    assert learned.source.min() == Source.LEARNED
    off, before = (abs(np.log(told.total_us / measured.sum())) for told in (learned, formulas))
    assert off < 0.5 * before


@pytest.mark.slow
def test_a_traced_step_is_surer_with_it_and_says_what_it_lacks_without(
        profile: DeviceProfile, recorded: ExecutionGraph) -> None:
    from graph_predictor.sizes.retrace import trace_again

    pytest.importorskip("torch")
    traced = trace_again(recorded, {}, "cpu")
    host = host_by_name(",".join(_captures(name)[0] for name in TEACHERS), lambda path: read_job([path]))
    taught, formulas = (baseline_of([traced], host=host, models=models).predict() for models in (profile, None))
    widths = [np.log(one.interval_us[1] / one.interval_us[0]) for one in (taught, formulas)]
    assert widths[0] < widths[1]
    assert not any("stands for any" in note for note in taught.notes)
    (said,) = (note for note in formulas.notes if "stands for any" in note)
    assert "foretrace fit CAPTURE" in said and "--profile" in said
    assert taught.step_time_us == pytest.approx(float(np.median(recorded.meta.unprofiled_step_ns)) / 1e3, rel=0.25)


def test_an_interval_has_both_parts() -> None:
    def work(name: str, ns: float, spread: float) -> DeviceWork:
        return DeviceWork(name, KernelKind.COMPUTE, ns, low=-spread, high=spread)

    sure = HostThread.of(1000.0, [])
    assert sure.spread(0.1, 0.0, 1.0) == pytest.approx(0.1)
    same = HostThread.of(1000.0, [work("gemm: nt fp32", 500.0, 0.4), work("gemm: nn fp32", 500.0, 0.4)])
    apart = HostThread.of(1000.0, [work("gemm: nt fp32", 500.0, 0.4), work("norm: layer fp32", 500.0, 0.4)])
    assert same.spread(0.0, 0.0, 0.0) == pytest.approx(0.2)
    assert apart.spread(0.0, 0.0, 0.0) == pytest.approx(0.2 / np.sqrt(2))
    assert same.spread(0.1, 0.0, 0.0) == pytest.approx(np.hypot(0.05, 0.2))
    # A machine that nobody knows is slow, or quick, at both.
    assert same.spread(0.0, 1.0, 1.0) == pytest.approx(np.hypot(1.0, 0.2))
    assert HostThread(0.0, 0.0, 0.0).spread(0.3, 0.0, 0.0) == 0.3


def test_the_command_fits_captures_of_a_cpu(recorded: ExecutionGraph, tmp_path: Path) -> None:
    fitted = tmp_path / "cpu.profile"
    made = CliRunner().invoke(app, ["fit", _captures("bert")[0], "--device", "cpu", "-o", str(fitted)])
    assert made.exit_code == 0 and "models of cpu" in plain(made.output)
    judged = CliRunner().invoke(app, ["models", "evaluate", str(fitted), _captures(JUDGED)[0]])
    assert judged.exit_code == 0, judged.output
    assert "gemm" in judged.output and "elementwise" in judged.output
    # Of a GPU these are no measurements, and without sizes they are none of anything.
    bare, refused = tmp_path / "bare.foretrace", tmp_path / "x.profile"
    replace(recorded, ops=replace(recorded.ops, shapes=np.full_like(recorded.ops.shapes, -1))).save(bare)
    for capture, device_name, said in ((_captures("bert")[0], "h200-sxm", ""), (str(bare), "cpu", "sizes")):
        ran = CliRunner().invoke(app, ["fit", capture, "--device", device_name, "-o", str(refused)])
        assert ran.exit_code == 2 and said in plain(ran.output) and not refused.exists()


def test_a_profile_is_used_for_a_saved_step_of_its_device(profile: DeviceProfile, tmp_path: Path) -> None:
    """It was left aside unless the device that the step had been traced for was named again."""
    pytest.importorskip("torch")
    from graph_predictor.sizes.retrace import trace_again

    path = tmp_path / "step.foretrace"
    trace_again(read_job(_captures("vit")[0]).graphs[0], {}, "cpu").save(path)
    job = read_job(path)
    plain_us, named_us, as_traced_us = (
        Study(job, profiles=profiles).predict(Configuration(device=named)).step_time_us
        for profiles, named in (((), None), ((profile,), "cpu"), ((profile,), None)))
    assert as_traced_us == named_us != plain_us
