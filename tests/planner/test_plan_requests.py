"""What a plan's command is asked for: together, over devices and their figures, and as a step in time."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from said import Ran, plain
from typer.testing import CliRunner

import foretrace
from foretrace.commands import app
from kernel_models.collectives import find_topology
from kernel_models.device import device, scaled_device
from planner.parallel import planning
from planner.parallel.exploration import AXES, cases_of, factors_of
from planner.parallel.layer_costs import LayerCosts
from planner.parallel.page import KINDS, StepTimeline, plan_timeline
from planner.parallel.planning import Technology
from tracer.errors import ForetraceError
from tracer.parallel_plan import PlanError

pytest.importorskip("torch")


SMALL = ("plan", "llama", "--preset", "tiny", "--gpus", "8")


def shown(*arguments: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, [*SMALL, *arguments, "--json"])
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("wanted", [("--global-batch", "32"), ("--set", "batch=4")])
def test_a_batch_is_that_of_the_one_plan_too(wanted: tuple[str, str]) -> None:
    assert shown("--parallel", "ddp", *wanted)["plans"][0]["plan"] == "ddp=8,microbatches=4"


@pytest.mark.parametrize(("wanted", "says"), [
    (("--global-batch", "12", "--parallel", "ddp"), "12 sequences cannot be split evenly over dp=8"),
    (("--global-batch", "12", "--parallel", "ddp,microbatches=2"), "has 16 sequences a step and not 12"),
    (("--framework", "fsdp", "--parallel", "dp=4,tp=2"), "fsdp does not have the plan"),
    (("--host-from", "gpu-steps", "--launch-us", "9"), "two answers to one question"),
    (("--host-from", "cpu-steps"), "launch nothing, and a plan is of GPUs"),
    (("--host-from", "nowhere"), "nowhere does not exist"),
    (("--export", "torchtitan", "--parallel", "dp=8,sharding=1"), "torchtitan does not have the plan"),
    (("--device", "h100-sxm", "--linears", "nvfp4", "--parallel", "ddp"), "do not have nvfp4"),
    (("--preset", "9000b"), "llama has no preset '9000b'; choose one of 8b, 70b, 405b, default, tiny, real")])
def test_what_contradicts_itself_is_refused(wanted: tuple[str, ...], says: str) -> None:
    done = CliRunner().invoke(app, [*SMALL, *wanted])
    assert done.exit_code == 2 and says in plain(done.stderr)


def test_stages_need_what_lies_in_their_interval() -> None:
    found = shown("--parallel", "dp=2,pp=4,microbatches=4", "--set", "depth=4")
    for stage in found["stages"]:
        low, high = stage["memory_gb"]
        assert stage["allocated_gb"] < low < stage["total_gb"] < high


@pytest.mark.parametrize("wrong", [
    {"gpus": "8"}, {"gpus": 8.5}, {"global_batch": -3}, {"best": -1}, {"memory_limit": float("nan")},
    {"memory_limit": -1}, {"launch_us": -1.0}, {"device": "cpu"}, {"framework": "x"}])
def test_figures_no_job_can_have_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ForetraceError):
        foretrace.plan("llama", **{"gpus": 8, "preset": "tiny", "only": "ddp", **wrong})


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


SIZES = ["seq=256", "depth=2", "width=512", "heads=8", "vocabulary=2048", "positions=256", "batch=1", "dtype=bf16"]
WAYS = "fsdp2=8,tp=2,microbatch=4,microbatches=2"
H100 = device("h100-sxm")


def step_us(technology: Technology, hopper: LayerCosts, **more: Any) -> float:
    pieces = LayerCosts(technology.device(H100), like=hopper)
    found = planning.plan("gpt2", 16, device="h100-sxm", settings=SIZES, preset="default", only=WAYS, pieces=pieces,
                 technology=technology, **more)
    return found.plans[0].estimate.time_us


def test_a_factor_of_one_is_the_device_itself(hopper: LayerCosts) -> None:
    assert scaled_device(H100) is H100 and Technology().device(H100) is H100
    on = find_topology("dgx-h100x2")
    assert on.with_links(1.0) is on
    plain = planning.plan("gpt2", 16, device="h100-sxm", settings=SIZES, preset="default", only=WAYS).plans[0].estimate
    assert step_us(Technology(), hopper) == plain.time_us


@pytest.mark.parametrize("figure", ["clock", "bandwidth", "link", "power"])
def test_more_of_a_figure_is_never_slower(figure: str, hopper: LayerCosts) -> None:
    times = [step_us(Technology(**{figure: factor}), hopper, launch_us=0.1) for factor in (0.25, 0.5, 1.0, 1.5, 4.0)]
    assert times == sorted(times, reverse=True) and (figure == "power" or times[-1] < times[0])


def test_an_edited_device_says_so_and_where_its_figures_are_from(hopper: LayerCosts) -> None:
    edited = Technology(bandwidth=1.5, link=2.0).device(H100)
    assert edited.name == "h100-sxm (bandwidth × 1.5)" and edited.memory_bandwidth_gbps == 1.5 * 3350
    assert edited.sources["memory.bandwidth_gbps"] == H100.sources["memory.bandwidth_gbps"] + ", × 1.5"
    assert edited.sources["matrix_tflops.bf16"] == H100.sources["matrix_tflops.bf16"]
    assert scaled_device(H100, clock=2.0).sources["matrix_tflops.bf16"].endswith(", × 2")
    on, wider = find_topology("dgx-h100x2"), find_topology("dgx-h100x2").with_links(2.0)
    assert wider.node.peer_gbps == 2 * on.node.peer_gbps and wider.network.card_gbps == 2 * on.network.card_gbps
    named = planning.plan("gpt2", 16, device="h100-sxm", settings=SIZES, preset="default", only=WAYS,
                 pieces=LayerCosts(edited, like=hopper), technology=Technology(bandwidth=1.5, link=2.0))
    assert named.device == "h100-sxm (bandwidth × 1.5, link × 2)"


def test_factors_and_values() -> None:
    def factors(axis: str, text: str) -> list[float]:
        return factors_of(axis, text, H100, lambda: 450.0)

    assert factors("bandwidth", "1,x1.5,6.7TB/s") == [1.0, 1.5, 2.0]
    assert factors("link", "900GB/s, 450 gb/s") == [2.0, 1.0]
    assert factors("clock", f"{H100.boost_clock_mhz:g}MHz") == [1.0]
    assert factors("memory", f"{2 * H100.memory_gb:g}GB") == [2.0]
    assert factors("power", "1400W,0.5") == [2.0, 0.5]
    assert factors_of("clock", None, H100, lambda: 1.0) == [1.0]
    with pytest.raises(PlanError, match="nothing says what power"):
        factors_of("power", "2", replace(H100, power_w=0.0), lambda: 1.0)
    for axis, bad in product(AXES, ("0", "-1", "nan", "1e9", "", "x", "1parsec", "1000")):
        with pytest.raises(PlanError):
            factors(axis, bad)


def test_cases_are_every_device_with_every_change() -> None:
    found = cases_of("a100-sxm-80g,h100-sxm", None, "1,2", {"clock": "1,1.2", "link": "2"}, 8)
    assert [(each.device, each.price, each.technology.clock, each.technology.link) for each in found] == [
        ("a100-sxm-80g", 1, 1, 2), ("a100-sxm-80g", 1, 1.2, 2), ("h100-sxm", 2, 1, 2), ("h100-sxm", 2, 1.2, 2)]
    for devices, prices, changes in (("h100-sxm", "1,2", {}), ("h100-sxm", "-1", {}), ("h100-sxm", "inf", {}),
                                     ("h100-sxm", "x", {}), ("h100-sxm", None, {
                                         "clock": ",".join(f"1.{i}" for i in range(101, 166))})):
        with pytest.raises(PlanError):
            cases_of(devices, None, prices, changes, 8)


def test_the_command_compares_devices_and_draws_a_map() -> None:
    base = ["plan", "gpt2", "--preset", "default", "--gpus", "2", "--parallel", "fsdp2=2,microbatch=1,microbatches=1",
            *(word for setting in SIZES for word in ("--set", setting))]
    said = CliRunner().invoke(app, [*base, "--device", "a100-sxm-80g,h100-sxm", "--price", "1,2", "--json"])
    values = json.loads(said.stdout)["cases"]
    assert [each["device"] for each in values] == ["a100-sxm-80g", "h100-sxm"]
    for each in values:
        assert each["joules_per_token"] == pytest.approx(each["power_w"] / each["tokens_per_gpu_second"])
        assert set(each["gains"]) == {"compute", "power", "memory", "network"} and each["cost_per_million_tokens"] > 0
    fed = CliRunner().invoke(app, [*base, "--device", "h100-sxm", "--power", "1,2", "--json"])
    assert [each["power_w"] for each in json.loads(fed.stdout)["cases"]] == [700, 1400]
    mapped = CliRunner().invoke(app, [*base, "--device", "h100-sxm", "--clock", "1,2", "--link", "0.5,1"])
    assert mapped.exit_code == 0 and "clock \\ link" in mapped.stdout and "What binds" in mapped.stdout, mapped.output
    one = CliRunner().invoke(app, [*base, "--device", "h100-sxm", "--bandwidth", "2", "--json"])
    assert json.loads(one.stdout)["device"] == "h100-sxm (bandwidth × 2)"
    tight = CliRunner().invoke(app, [*base, "--device", "h100-sxm", "--memory", "0.01,1", "--set", "depth=2000"])
    assert "capacity: nothing fits" in tight.stdout
    refused = CliRunner().invoke(app, [*base, "--device", "h100-sxm,b200", "--export", "megatron"])
    assert refused.exit_code == 2 and "leave it out" in refused.output


LARGE = ["width=2048", "depth=8", "heads=16", "kv_heads=8", "hidden=4096", "vocabulary=8192", "seq=2048"]


@pytest.mark.parametrize("text", ["dp=2,tp=2,pp=2,microbatches=4,sharding=1", "fsdp2=8",
                                  "dp=2,pp=4,microbatches=8,chunks=2,schedule=interleaved",
                                  "pp=8,microbatches=8,schedule=zero_bubble"])
def test_tasks_follow_one_another_and_end_with_the_estimate(text: str) -> None:
    found = planning.plan("llama", 8, device="h100-sxm", settings=LARGE, preset="8b", only=text)
    assert found.schedule is not None
    best = found.plans[0].estimate
    shown = StepTimeline.of(found.schedule, best)
    assert shown.end_ns.max() == pytest.approx(best.time_us * 1e3, abs=1)
    passes = best.plan.passes * best.plan.chunks
    for stage in range(shown.stages):
        rows = np.flatnonzero(shown.stage == stage)
        assert (shown.start_ns[rows][1:] >= shown.end_ns[rows][:-1]).all()
        kinds = [KINDS[kind] for kind in shown.kind[rows].tolist()]
        assert kinds.count("forward") == kinds.count("backward") == passes
        assert kinds.count("optimizer") == kinds.count("waiting for the slowest GPU") == 1
    assert plan_timeline(shown).parts


def timeline(*words: str) -> Ran:
    sizes = [word for size in LARGE for word in ("--set", size)]
    found = CliRunner().invoke(app, ["plan", "llama", "--preset", "8b", "--device", "h100-sxm", *sizes, *words])
    return Ran(found.exit_code, found.stdout, found.stderr)


def test_the_command_writes_a_timeline(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    found = timeline("--gpus", "8", "--parallel", "dp=2,tp=2,pp=2,microbatches=4", "--timeline", str(path))
    assert found.code == 0
    events = json.loads(path.read_text())["traceEvents"]
    assert {"forward 0", "backward 3", "optimizer"} <= {event["name"] for event in events if event.get("cat") == "task"}
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {"stage 0", "stage 1"}


def test_a_timeline_is_of_one_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused is refused before a search."""
    kept, other = tmp_path / "notes.txt", tmp_path / "a.json"
    kept.write_text("mine")
    monkeypatch.setattr("planner.parallel.planning.find_plans", lambda request: pytest.fail("searched"))
    for words, said in ((("--gpus", "8,16", "--timeline", str(other)), "--timeline"),
                        (("--gpus", "8", "--clock", "1,2", "--timeline", str(other)), "--timeline"),
                        (("--gpus", "8", "--timeline", str(kept)), "notes.txt")):
        found = timeline(*words)
        assert (found.code, found.out) == (2, "") and said in found.err
    assert kept.read_text() == "mine"
    monkeypatch.undo()
    found = timeline("--gpus", "8", "--parallel", "dp=8,microbatch=4096", "--timeline", str(other))
    assert found.code == 1 and "Not possible" in found.out and not other.exists()
