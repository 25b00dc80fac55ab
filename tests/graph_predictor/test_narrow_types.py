"""Narrow types on processors: by the units they have, with an interval for what was not measured, and labelled so."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

import tracer
from graph_predictor.edits.precision import Precision
from graph_predictor.prediction.scenario import EditError
from graph_predictor.synthesis.baseline import baseline_of
from kernel_models.cpu_units import EMULATED, MEASURED, OTHER_WORK, UNKNOWN, retyped, said_of
from kernel_models.op_call import Family, OpCall
from kernel_models.operation import calls_of, operation
from tracer.capture_layout import apply_context
from tracer.cpu_units import KNOWN, cpu_units
from tracer.job import Job

WITH_UNIT, WITHOUT = ("avx512_bf16", "avx512f", "avx2"), ("avx2",)


LLAMA = Path(__file__).resolve().parents[2] / "traces" / "llama-cpu"


@pytest.fixture(scope="module")
def recorded() -> Job:
    return tracer.read_job(LLAMA)


def on(job: Job, units: tuple[str, ...]) -> Job:
    for graph in job.graphs:
        graph.meta.host_units = list(units)
    return job


def product(dtype: str) -> tuple[OpCall, ...]:
    return calls_of(operation("aten::mm", [(64, 512), (512, 256)], [dtype, dtype]))


@pytest.mark.parametrize(("text", "units"), [
    ("processor\t: 0\nflags\t\t: fpu avx2 avx512f avx512_bf16 amx_bf16 amx_tile\n",
     ["amx_bf16", "avx512_bf16", "avx512f", "avx2"]),
    ("processor\t: 0\nFeatures\t: fp asimd asimdhp asimddp i8mm bf16\n",
     ["bf16", "asimdhp", "i8mm", "asimddp", "asimd"]),
    ("processor\t: 0\n", [])])
def test_units_are_those_that_the_system_lists(text: str, units: list[str], tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert cpu_units(tmp_path / "cpuinfo") == units
    assert cpu_units(tmp_path / "absent") == []


def test_a_capture_knows_its_processors_units(tmp_path: Path) -> None:
    from tracer.capture.context import _hardware

    pytest.importorskip("torch")
    assert set(_hardware()["cpu_units"]) <= set(KNOWN)
    graph = tracer.read_job(LLAMA).graphs[0]
    assert graph.meta.host_units == []  # it was recorded before captures noted them
    context = json.loads((LLAMA / "rank0" / "context.json").read_text())
    context["hardware"]["cpu_units"] = ["avx2"]
    (tmp_path / "context.json").write_text(json.dumps(context))
    assert apply_context(graph, tmp_path) and graph.meta.host_units == ["avx2"]


def test_a_unit_gains_between_nothing_and_its_peak() -> None:
    found = retyped(product("fp32"), product("bf16"), WITH_UNIT, measured=False)
    assert [call.dtype for call in found.calls] == ["fp32"]  # priced as what was recorded
    assert found.factor == pytest.approx(1 / math.sqrt(2))
    low, high = (found.factor * math.exp(side * found.spread) for side in (-1, 1))
    assert low < 0.5 and high > 1.0
    back = retyped(product("bf16"), product("fp32"), WITH_UNIT, measured=False)
    assert back.factor * found.factor == pytest.approx(1.0) and back.spread == pytest.approx(found.spread)
    wider = retyped(product("fp32"), product("bf16"), ("amx_bf16", *WITH_UNIT), measured=False)
    assert wider.factor < found.factor and wider.spread > found.spread


@pytest.mark.parametrize(("was", "now", "units", "measured", "spread"), [
    ("fp32", "bf16", WITHOUT, False, EMULATED), ("fp32", "bf16", (), False, UNKNOWN),
    ("fp32", "bf16", WITHOUT, True, MEASURED), ("fp32", "fp16", WITH_UNIT, False, EMULATED),
    ("fp32", "fp32", (), False, 0.0), ("bf16", "bf16", WITHOUT, False, 0.0),
    ("other", "bf16", WITHOUT, False, OTHER_WORK)])
def test_what_is_not_known_widens_and_what_is_the_same_does_not(
        was: str, now: str, units: tuple[str, ...], measured: bool, spread: float) -> None:
    before, after = product("fp32" if was == "other" else was), product(now)
    if was == "other":
        before = tuple(replace(call, family=Family.ELEMENTWISE) for call in before)
        after = tuple(replace(call, dtype=now) for call in before)
    assert retyped(before, after, units, measured=measured).spread == spread
    assert UNKNOWN > EMULATED


@pytest.mark.parametrize(("units", "said"), [
    (WITH_UNIT, "multiplies bf16 (avx512_bf16)"), (WITHOUT, "has no unit for bf16, which PyTorch emulates"),
    ((), "does not say whether its processor multiplies bf16")])
def test_a_step_in_bf16_is_priced_by_the_units(recorded: Job, units: tuple[str, ...], said: str) -> None:
    baseline = baseline_of(on(recorded, units))
    plain, narrow = baseline.predict(), baseline.predict([Precision("bf16")])
    assert (narrow.step_time_us < plain.step_time_us) == (units == WITH_UNIT)
    assert any(said in note for note in narrow.notes) and said in said_of("bf16", units, measured=False)
    assert narrow.sources["heuristic"] > 0.3 and narrow.sources.get("anchored", 0.0) < 0.7
    width = math.log(narrow.interval_us[1] / narrow.interval_us[0]) / 2
    assert width > (0.3 if units == WITH_UNIT else 1.0)


def test_types_that_no_processor_multiplies_are_refused(recorded: Job) -> None:
    with pytest.raises(EditError, match="no matrix units for tf32"):
        baseline_of(on(recorded, WITH_UNIT)).predict([Precision("tf32")])
    with pytest.raises(EditError, match="No operation of the step changes with products in fp32"):
        baseline_of(on(recorded, WITH_UNIT)).predict([Precision("fp32")])
