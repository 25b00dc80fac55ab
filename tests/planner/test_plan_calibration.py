"""Calibration of a plan's rates on measured steps: what is known is found again, and what is strange is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from said import plain
from typer.testing import CliRunner

from foretrace.commands import app
from kernel_models.collectives import CollectiveModel
from planner.parallel.calibrate import SPREADS, MeasuredPlan, MeasuredPlanError, calibrate, fit_plans
from planner.parallel.corrections import CorrectionFactors, ResidualModel, features
from planner.parallel.estimate import estimate
from planner.parallel.layer_costs import LayerCosts
from planner.parallel.plan_costs import PlanCosts, costs_of_plan
from tracer.parallel_plan import ParallelPlan
from tracer.shape_only.transformer import TransformerShape

SHAPE = TransformerShape(4, 2048, 16, 16, 8192, 32_000, 2048)
PLANS = ("ddp=8,microbatch=2", "dp=4,tp=2,microbatch=4", "fsdp2=8,microbatch=4", "dp=2,tp=4,microbatch=8",
         "dp=4,pp=2,microbatches=8", "fsdp2=8,recompute=full", "dp=8,microbatch=8,microbatches=2", "tp=8,microbatch=8")


@pytest.fixture(scope="module")
def loads(hopper: LayerCosts, node: CollectiveModel) -> list[PlanCosts]:
    return [costs_of_plan(ParallelPlan.parse(text), SHAPE, hopper, node) for text in PLANS]


def _measured(loads: list[PlanCosts], rates: CorrectionFactors) -> list[MeasuredPlan]:
    return [MeasuredPlan(str(each.plan), each, estimate(each, rates).time_us) for each in loads]


def test_steps_of_a_slower_program_are_predicted_from_a_few_of_them(loads: list[PlanCosts]) -> None:
    slow = replace(CorrectionFactors(), products=1.2, others=1.5, collectives=1.3, host_us=50.0)
    steps = _measured(loads, slow)
    found = calibrate(steps[:5])
    assert np.abs(found.before).mean() > 0.15 > 0.03 > np.abs(found.after).mean()
    assert max(abs(each.log_ratio(found.rates)) for each in steps[5:]) < 0.03
    assert found.rates.spreads.products < 0.6 * CorrectionFactors().spreads.products
    assert str(found).startswith("Calibrated on 5 measured steps: off by ")


def test_steps_as_predicted_change_nothing(loads: list[PlanCosts]) -> None:
    rates = fit_plans(_measured(loads, CorrectionFactors()))
    assert rates.residuals is not None and rates.residuals.least == pytest.approx(0.0, abs=1e-6)
    assert replace(rates, residuals=None) == replace(CorrectionFactors(), **{
        name: pytest.approx(getattr(CorrectionFactors(), name), rel=1e-6) for name in SPREADS})


def test_what_rates_cannot_say_is_carried_to_plans_that_are_alike_and_to_no_others(loads: list[PlanCosts]) -> None:
    """One kind of plan takes 20% longer, which is no kernel's, collective's or host's."""
    def place(each: PlanCosts) -> tuple[float, ...]:
        return features(each.plan, each.shape)

    left = np.array([np.log(1.2) if each.plan.tp == 8 else 0.0 for each in loads])
    learned = ResidualModel.of(np.array([place(each) for each in loads]), np.clip(left, -0.03, 0.03))
    eight = next(each for each in loads if each.plan.tp == 8)
    near = replace(eight, plan=replace(eight.plan, microbatch=16))
    far = replace(eight, plan=ParallelPlan.parse("dp=64,microbatch=1,recompute=full"))
    assert 0.015 < learned.at(place(near)) <= learned.most == 0.03
    assert abs(learned.at(place(far))) < 0.01
    plain = estimate(eight, CorrectionFactors())
    found = estimate(eight, replace(CorrectionFactors(), residuals=learned))
    assert found.time_us == pytest.approx(plain.time_us * np.exp(learned.at(place(eight))))
    parts = "products", "others", "host", "layers", "pipeline", "data", "optimizer", "fixed", "stragglers"
    assert sum(getattr(found, name) for name in parts) == pytest.approx(found.time_us)


def test_one_wild_step_does_not_carry_the_others_away(loads: list[PlanCosts]) -> None:
    steps = _measured(loads, replace(CorrectionFactors(), products=1.1))
    rates = fit_plans([*steps[:-1], replace(steps[-1], us=10 * steps[-1].us)])
    assert max(abs(each.log_ratio(rates)) for each in steps[:-1]) < 0.1


@pytest.mark.parametrize(("count", "us", "says"), [(0, 1.0, "there are none"), (1, 1.0, "there is one"),
                                                  (3, 0.0, "no time above 0"), (3, float("nan"), "no time above 0")])
def test_what_nothing_can_be_learned_from_is_refused(loads: list[PlanCosts], count: int, us: float, says: str) -> None:
    with pytest.raises(MeasuredPlanError, match=says):
        calibrate([MeasuredPlan("a", loads[0], us)] * count)


COMMAND = ["plan", "gpt2", "--preset", "tiny", "--device", "a100-sxm-80g", "--gpus", "8"]


def _planned(*more: str) -> dict[str, Any]:
    said = CliRunner().invoke(app, [*COMMAND, *more, "--json"])
    assert said.exit_code == 0, said.output
    found: dict[str, Any] = json.loads(said.stdout)
    return found


def test_a_table_of_runs_calibrates_a_plan_and_narrows_it(tmp_path: Path) -> None:
    """The measured program takes half as long again as predicted, whatever its plan; one row is of another size."""
    lines = ["plan,step_ms,gpus,set"]
    for text, gpus, settings in (("dp=8", "", ""), ("tp=2,dp=4", "", "seq=64"), ("dp=8,microbatch=2", "", ""),
                                 ("fsdp2,tp=2", "8", "seq=64")):
        own = ["--set", settings or "seq=32"]  # as asked for, where a row says nothing
        lines.append(f'"{text}",{1.5 * _planned("--parallel", text, *own)["plans"][0]["step_ms"]},{gpus},{settings}')
    (tmp_path / "runs.csv").write_text("\n".join(lines))
    more = ("--parallel", "dp=8,microbatch=4", "--set", "seq=32")
    before, after = _planned(*more), _planned(*more, "--calibrate", str(tmp_path / "runs.csv"))
    one, other = before["plans"][0], after["plans"][0]
    assert other["step_ms"] / one["step_ms"] == pytest.approx(1.5, rel=0.1)
    assert np.divide(*other["interval_ms"]) > np.divide(*one["interval_ms"])
    assert [round(each["error_before"], 6) for each in after["calibration"]["steps"]] == [round(-1 / 3, 6)] * 4
    assert any(note.startswith("Calibrated on 4 measured steps") for note in after["notes"])


@pytest.mark.parametrize(("text", "says"), [
    ("step_ms\n5\n", "lacks the column plan"),
    ("plan,step_ms\ndp=8,none\n", "runs.csv, line 2, column step_ms: 'none' is no positive number of milliseconds"),
    ("plan,step_ms\n\ndp=8,5\n,5\n", "runs.csv, line 4, column plan: the cell is empty"),
    ("plan,step_ms,gpus\nfsdp2,5,many\n", "is no number of GPUs"), ("plan,step_ms\ndp=8,5\n", "there is one"),
    ("plan,step_ms\ndp=8,5\ntp=7,5\n", "runs.csv, line 3: the plan cannot be estimated"),
    ("plan,step_ms,model\ndp=8,5,nothing\n", "runs.csv, line 2: the plan cannot be estimated"),
    ("plan,step_ms,seq\ndp=8,5,128\n", "stands in the column set"), ("", "runs.csv")])
def test_a_bad_table_of_runs_is_refused_in_a_sentence(tmp_path: Path, text: str, says: str) -> None:
    runs = tmp_path / "runs.csv"
    runs.write_text(text)
    said = CliRunner().invoke(app, [*COMMAND, "--parallel", "dp=8", "--calibrate", str(runs)])
    assert said.exit_code == 2 and says in " ".join(plain(said.output).split()), said.output
