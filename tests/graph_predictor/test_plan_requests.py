"""What a plan's command is asked for together is done together, or refused in a sentence."""

from __future__ import annotations

import json
from typing import Any

import pytest
from said import plain
from typer.testing import CliRunner

from graph_predictor.cli import app

pytest.importorskip("torch")
SMALL = ("plan", "llama", "--preset", "tiny", "--gpus", "8")


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, [*SMALL, *arguments])
    return done.exit_code, plain(done.stderr or done.stdout)


def shown(*arguments: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, [*SMALL, *arguments, "--json"])
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("wanted", [("--global-batch", "32"), ("--set", "batch=4")])
def test_a_batch_is_that_of_the_one_plan_too(wanted: tuple[str, str]) -> None:
    plan = shown("--parallel", "ddp", *wanted)["plans"][0]["plan"]
    assert plan == "ddp=8,microbatches=4"


@pytest.mark.parametrize(("wanted", "says"), [
    (("--global-batch", "12", "--parallel", "ddp"), "12 sequences cannot be split evenly over dp=8"),
    (("--global-batch", "12", "--parallel", "ddp,microbatches=2"), "has 16 sequences a step and not 12"),
    (("--framework", "fsdp", "--parallel", "dp=4,tp=2"), "fsdp does not have the plan"),
    (("--export", "torchtitan", "--parallel", "dp=8,sharding=1"), "torchtitan does not have the plan"),
    (("--preset", "9000b"), "llama has no preset '9000b'; choose one of 8b, 70b, 405b, default, tiny, real")])
def test_what_contradicts_itself_is_refused(wanted: tuple[str, ...], says: str) -> None:
    code, text = run(*wanted)
    assert code == 2 and says in text


def test_a_name_that_is_none_is_told_from_a_path() -> None:
    for name, says in (("lama", "did you mean llama"), ("nemotron-h", "did you mean nemotron-h-8b"),
                       ("qqq", "known models are llama"), ("./qqq", "does not exist"), ("qqq.json", "does not exist")):
        done = CliRunner().invoke(app, ["plan", name, "--gpus", "8"])
        assert done.exit_code == 2 and says in plain(done.stderr)
