"""The causes of a difference between two recipes, and of a measured step."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from said import plain
from typer.testing import CliRunner

from foretrace.commands import app
from planner.parallel.compared import _every_order, _some_orders, compare, read_recipe
from planner.parallel.estimate import Estimate
from planner.parallel.explained import ExplainedStep, explain
from planner.parallel.planning import PlanJob, PlanRequest, job_of
from tracer.parallel_plan import ParallelPlan, PlanError

RUNNER = CliRunner()
BASE = PlanRequest("llama", 8, device="h100-sxm")
FIRST = 'parallel = "dp=8,microbatch=1,microbatches=2,sharding=1"\n'


def _us(us: float) -> Estimate:
    return Estimate(ParallelPlan(), us, us, us, us, *[0.0] * 9, {})


@pytest.mark.parametrize("weigh", [_every_order, _some_orders])
def test_parts_are_those_of_shapley_where_every_order_is_possible(weigh: Callable[..., dict[tuple[int, int], float]]
                                                                  ) -> None:
    """Three factors on a step: of 2, 3 and 1."""
    def step(mask: int) -> Estimate:
        return _us(100.0 * (2 if mask & 1 else 1) * (3 if mask & 2 else 1))

    edges = weigh(3, step)
    parts = [sum(share * (step(mask | 1 << i).time_us - step(mask).time_us) for (mask, which), share in edges.items()
                 if which == i) for i in range(3)]
    assert sum(parts) == pytest.approx(500.0) and parts[2] == 0.0
    assert all(sum(share for (_, which), share in edges.items() if which == i) == pytest.approx(1) for i in range(3))
    if weigh is _every_order:
        assert parts[:2] == pytest.approx([(100 + 300) / 2, (200 + 400) / 2])


def test_orders_that_cannot_be_are_left_out() -> None:
    """The second setting needs the first, and of two that need each other no order is possible."""
    edges = _every_order(2, lambda mask: None if mask == 2 else _us(1.0 + mask))
    assert edges == {(0, 0): 1.0, (1, 1): 1.0}
    assert _every_order(2, lambda mask: None if mask in (1, 2) else _us(1.0)) == {}


def _recipes(folder: Path, second: str, first: str = FIRST) -> list[str]:
    for name, text in (("a.toml", first), ("b.toml", second)):
        (folder / name).write_text(text)
    return [str(folder / "a.toml"), str(folder / "b.toml")]


def test_causes_add_up_and_turn_their_signs_with_the_recipes(tmp_path: Path) -> None:
    paths = _recipes(tmp_path, 'parallel = "dp=4,tp=2,microbatch=1,microbatches=4,sharding=1,sequence_parallel,'
                               'recompute=full"\n')
    there, back = compare(paths, BASE), compare(paths[::-1], BASE)
    assert {each.setting for each in there.causes} == {"tp", "sequence_parallel", "recomputation"}
    for both in (there, back):
        assert sum(each.us for each in both.causes) == pytest.approx(both.us) and both.exact
        assert all(sum(each.parts.values()) == pytest.approx(each.us) for each in both.causes)
    turned = {each.setting: -each.us for each in back.causes}
    assert {each.setting: each.us for each in there.causes} == pytest.approx(turned)
    (parallel,) = (each for each in there.causes if each.setting == "sequence_parallel")
    assert parallel.alone_us is None and (parallel.before, parallel.after) == ("off", "on")
    assert there.causes[0].setting == "recomputation" and there.causes[0].us > there.causes[0].unsure_us > 0


def test_one_setting_that_differs_is_the_whole_difference(tmp_path: Path) -> None:
    found = compare(_recipes(tmp_path, f'{FIRST}device = "a100-sxm-80g"\n'), BASE)
    (cause,) = found.causes
    assert cause.setting == "device" and cause.us == cause.alone_us == cause.last_us == found.us > 0
    assert compare(_recipes(tmp_path, FIRST), BASE).causes == ()
    # Settings that only change together are one cause: three replicas of six sequences are no four of eight.
    found = compare(_recipes(tmp_path, 'parallel = "dp=3,microbatch=1,microbatches=1"\ngpus = 3\n',
                             'parallel = "dp=2,microbatch=1,microbatches=1"\ngpus = 2\n'), BASE)
    (cause,) = found.causes
    assert cause.setting == "GPUs with sequences a step" and cause.us == found.us
    assert (cause.before, cause.after) == ("2 2", "3 3")


@pytest.mark.parametrize(("text", "says"), [
    ("gpus = ", "is no recipe"), ("speed = 3", "says speed, which no recipe has; known are source"),
    ("gpus = true", "has gpus = True, which is no value of it"), ("gpus = 8", "says no plan")])
def test_what_is_no_recipe_is_refused(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "a.toml"
    path.write_text(text)
    with pytest.raises(PlanError, match=says):
        read_recipe(str(path), BASE)


def test_the_command_compares_recipes_that_say_everything(tmp_path: Path) -> None:
    said = 'source = "llama"\ndevice = "h100-sxm"\n'
    paths = _recipes(tmp_path, f'{said}[parallel]\ndp = 8\nsharding = 1\nmicrobatches = 2\nrecompute = "full"\n',
                     said + FIRST)
    shown = RUNNER.invoke(app, ["plan", "--compare", *paths])
    assert shown.exit_code == 0 and "recomputation" in plain(shown.output), shown.output
    found = json.loads(RUNNER.invoke(app, ["plan", "--compare", *paths, "--json"]).stdout)
    (cause,) = found["causes"]
    assert cause["ms"] == pytest.approx(found["difference_ms"]) and found["recipes"][0]["gpus"] == 8
    refused = RUNNER.invoke(app, ["plan", "llama", "--gpus", "8,16", "--compare", *paths])
    assert refused.exit_code == 2 and "--gpus with several sizes does not go with --compare" in plain(refused.output)


@pytest.fixture(scope="module")
def job() -> PlanJob:
    return job_of(BASE)


OVERLAPPED = ParallelPlan.parse("dp=4,tp=2,microbatch=1,microbatches=4,sharding=1,sequence_parallel,tensor_overlap")


def _explained(job: PlanJob, us: float) -> ExplainedStep:
    found = explain(job, OVERLAPPED, us)
    for each in (*found.causes, *found.away):
        assert each.low_us <= 0.0 <= each.high_us and each.cause.source
    reach = [each.reaches for each in found.causes]
    assert reach == sorted(reach, reverse=True) and all(each.covers > 0 for each in found.causes)
    return found


def test_a_switch_that_was_off_explains_the_step_without_it(job: PlanJob) -> None:
    without = job.estimate(replace(OVERLAPPED, tensor_overlap=False)).time_us
    found = _explained(job, without)
    first = found.causes[0]
    assert first.cause.name == "overlap of tensor-parallel collectives not on" and first.reaches
    assert first.needed == pytest.approx(1.0) and first.high_us == pytest.approx(found.gap_us)
    assert "each alone" in found.verdict and found.together_us > without


def test_a_factor_that_was_another_is_found_within_its_range(job: PlanJob) -> None:
    slower = replace(job, rates=replace(job.rates, products=1.1))
    found = _explained(job, slower.estimate(OVERLAPPED).time_us)
    needed = {each.cause.name: each.needed for each in found.causes if each.reaches}
    assert needed["throttled boards: products at lower clocks"] == pytest.approx(1.1, abs=1e-4)
    assert needed["products of another library"] == pytest.approx(1.1, abs=1e-4) and found.inside
    quicker = _explained(job, 0.97 * found.estimate.time_us)
    assert "throttled boards: products at lower clocks" not in {each.cause.name for each in quicker.causes}
    assert quicker.causes[0].low_us < 0 and quicker.together_us < quicker.estimate.time_us


def test_what_no_cause_explains_is_said_to_be_so(job: PlanJob) -> None:
    us = job.estimate(OVERLAPPED).time_us
    for factor, says in ((1.001, "nothing is left to explain"), (2.0, "outside the 80% interval. No listed"),
                         (2.0, "Several together can."), (20.0, "All of them together do not either")):
        assert says in _explained(job, factor * us).verdict
    with pytest.raises(PlanError, match="a bare number is in ms"):
        explain(job, OVERLAPPED, 1e3 * us)


def test_the_command_explains_a_measured_step(job: PlanJob) -> None:
    command = ["plan", "llama", "--gpus", "8", "--device", "h100-sxm", "--measured"]
    ms = 1.1 * job.estimate(OVERLAPPED).time_us / 1e3
    found = RUNNER.invoke(app, [*command, f"{ms / 1e3}s", "--parallel", str(OVERLAPPED), "--json"])
    values = json.loads(found.stdout)
    assert values["measured_ms"] == pytest.approx(ms) and values["causes"][0]["reaches"]
    shown = plain(RUNNER.invoke(app, [*command, str(ms), "--parallel", str(OVERLAPPED)]).output)
    assert "What may cause it, each alone" in shown and values["causes"][0]["cause"] in shown
    for wrong, says in ((["3200"], "is of one plan; give it with --parallel"),
                        (["soon", "--parallel", "dp=8"], "is no time of a step"),
                        (["9", "--parallel", "dp=8", "--timeline", "a.json"], "does not go with --measured")):
        refused = RUNNER.invoke(app, [*command, *wrong])
        assert refused.exit_code == 2 and says in plain(refused.output)


def test_pairs_differ_in_one_setting_and_keep_the_sequences_of_a_step_or_a_gpu(job: PlanJob) -> None:
    from weak_scaling import Measured, signs  # of the benchmarks

    def row(text: str, measured: float, predicted: float) -> Measured:
        return Measured.of(job.shape, ParallelPlan.parse(text), "here", measured, predicted)

    rows = [row("dp=8,microbatches=2", 10.0, 10.0), row("dp=4,tp=2,microbatches=4", 12.0, 11.0),  # tp alone
            row("dp=4,tp=2,microbatches=8", 22.0, 23.0),  # sequences alone
            row("dp=8,tp=2,microbatches=4", 12.5, 10.5),  # GPUs alone, with either
            row("dp=8,tp=2,microbatches=4,recompute=full", 16.0, 16.0)]
    pairs = signs(rows)
    assert pairs.setting.tolist() == ["tp", "sequences", "gpus", "gpus", "recompute"]
    assert pairs.measured.tolist() == pytest.approx([0.2, 22 / 24 - 1, 12.5 / 12 - 1, 25 / 22 - 1, 0.28])
    assert pairs.predicted[0] == pytest.approx(0.1) and pairs.predicted[2] == pytest.approx(10.5 / 11 - 1)
