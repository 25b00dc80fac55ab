"""What a plan's command is asked for together is done together, or refused in a sentence."""

from __future__ import annotations

import json
from typing import Any

import pytest
from said import plain
from typer.testing import CliRunner

from foretrace.commands import app

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
    (("--host-from", "gpu-steps", "--launch-us", "9"), "two answers to one question"),
    (("--host-from", "cpu-steps"), "launch nothing, and a plan is of GPUs"),
    (("--host-from", "nowhere"), "nowhere does not exist"),
    (("--export", "torchtitan", "--parallel", "dp=8,sharding=1"), "torchtitan does not have the plan"),
    (("--preset", "9000b"), "llama has no preset '9000b'; choose one of 8b, 70b, 405b, default, tiny, real")])
def test_what_contradicts_itself_is_refused(wanted: tuple[str, ...], says: str) -> None:
    code, text = run(*wanted)
    assert code == 2 and says in text


def test_stages_need_what_lies_in_their_interval() -> None:
    found = shown("--parallel", "dp=2,pp=4,microbatches=4", "--set", "depth=4")
    for stage in found["stages"]:
        low, high = stage["memory_gb"]
        assert stage["allocated_gb"] < low < stage["total_gb"] < high


def test_exposed_communication_is_no_more_than_all_of_it() -> None:
    done = CliRunner().invoke(app, ["comm", "study", "llama", "--preset", "8b", "--gpus", "16", "--global-batch", "64",
                                    "--parallel", "dp=2,tp=8,sequence_parallel,sharding=1", "--set", "depth=4",
                                    "--json"])
    case = json.loads(done.stdout)["plans"][0]
    assert 0 < case["exposed_ms"] <= case["alone_ms"]


@pytest.mark.parametrize("wrong", [
    {"gpus": "8"}, {"gpus": 8.5}, {"global_batch": -3}, {"best": -1}, {"memory_limit": float("nan")},
    {"memory_limit": -1}, {"launch_us": -1.0}, {"device": "cpu"}, {"framework": "x"}])
def test_figures_no_job_can_have_are_refused(wrong: dict[str, Any]) -> None:
    from foretrace import plan
    from tracer.errors import ForetraceError

    with pytest.raises(ForetraceError):
        plan("llama", **{"gpus": 8, "preset": "tiny", "only": "ddp", **wrong})


def test_a_name_that_is_none_is_told_from_a_path() -> None:
    for name, says in (("lama", "did you mean llama"), ("nemotron-h", "did you mean nemotron-h-8b"),
                       ("qqq", "known models are llama"), ("./qqq", "does not exist"), ("qqq.json", "does not exist")):
        done = CliRunner().invoke(app, ["plan", name, "--gpus", "8"])
        assert done.exit_code == 2 and says in plain(done.stderr)


def test_a_launch_costs_what_a_hosts_operations_do() -> None:
    """A small model's step is its launches, on gpu-steps 20 to 40 µs each; its interval is as wide as that host's."""
    given = shown("--parallel", "ddp", "--launch-us", "35")
    learned = shown("--parallel", "ddp", "--host-from", "gpu-steps")
    assert "as operations of gpu-steps do" in " ".join(learned["notes"])
    assert 0.55 < learned["plans"][0]["step_ms"] / given["plans"][0]["step_ms"] < 1.4
