"""The causes of a difference between two recipes, and of a measured step."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from said import plain
from typer.testing import CliRunner

from foretrace.commands import app
from planner.parallel.compared import _every_order, _some_orders, compare, read_recipe
from planner.parallel.estimate import Estimate
from planner.parallel.planning import PlanRequest
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
    if weigh is _every_order:
        assert parts[:2] == pytest.approx([(100 + 300) / 2, (200 + 400) / 2])
    assert all(sum(share for (_, which), share in edges.items() if which == i) == pytest.approx(1) for i in range(3))


def test_orders_that_cannot_be_are_left_out() -> None:
    """The second setting needs the first, and of two that need each other no order is possible."""
    edges = _every_order(2, lambda mask: None if mask == 2 else _us(1.0 + mask))
    assert edges == {(0, 0): 1.0, (1, 1): 1.0}
    assert _every_order(2, lambda mask: None if mask in (1, 2) else _us(1.0)) == {}


def _recipes(folder: Path, second: str, first: str = FIRST) -> list[str]:
    paths = [folder / "a.toml", folder / "b.toml"]
    for path, text in zip(paths, (first, second), strict=True):
        path.write_text(text)
    return [str(path) for path in paths]


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


def test_settings_that_only_change_together_are_one_cause(tmp_path: Path) -> None:
    """Three replicas of six sequences are no four of eight."""
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
    assert refused.exit_code == 2 and "--gpus with several sizes says nothing of two recipes" in plain(refused.output)
    for command, says in ((["plan"], "what is planned"), (["plan", "llama"], "how many GPUs the job has")):
        refused = RUNNER.invoke(app, command)
        assert refused.exit_code == 2 and says in plain(refused.output)
