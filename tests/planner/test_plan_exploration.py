"""``foretrace plan`` over devices and their figures."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from foretrace.commands import app
from kernel_models.collectives import find_topology
from kernel_models.device import device, scaled_device
from planner.parallel.exploration import AXES, cases_of, factors_of
from planner.parallel.layer_costs import LayerCosts
from planner.parallel.planning import Technology, plan
from tracer.parallel_plan import PlanError

SMALL = ["seq=256", "depth=2", "width=512", "heads=8", "vocabulary=2048", "positions=256", "batch=1", "dtype=bf16"]
WAYS = "fsdp2=8,tp=2,microbatch=4,microbatches=2"
H100 = device("h100-sxm")


@pytest.fixture(scope="module")
def traced() -> LayerCosts:
    return LayerCosts(H100)


def step_us(technology: Technology, traced: LayerCosts, **more: Any) -> float:
    pieces = LayerCosts(technology.device(H100), like=traced)
    found = plan("gpt2", 16, device="h100-sxm", settings=SMALL, preset="default", only=WAYS, pieces=pieces,
                 technology=technology, **more)
    return found.plans[0].estimate.time_us


def test_a_factor_of_one_is_the_device_itself(traced: LayerCosts) -> None:
    assert scaled_device(H100) is H100 and Technology().device(H100) is H100
    on = find_topology("dgx-h100x2")
    assert on.with_links(1.0) is on
    plain = plan("gpt2", 16, device="h100-sxm", settings=SMALL, preset="default", only=WAYS).plans[0].estimate
    assert step_us(Technology(), traced) == plain.time_us


@pytest.mark.parametrize("figure", ["clock", "bandwidth", "link", "power"])
def test_more_of_a_figure_is_never_slower(figure: str, traced: LayerCosts) -> None:
    times = [step_us(Technology(**{figure: factor}), traced, launch_us=0.1) for factor in (0.25, 0.5, 1.0, 1.5, 4.0)]
    assert times == sorted(times, reverse=True) and (figure == "power" or times[-1] < times[0])


def test_an_edited_device_says_so_and_where_its_figures_are_from(traced: LayerCosts) -> None:
    edited = Technology(bandwidth=1.5, link=2.0).device(H100)
    assert edited.name == "h100-sxm (bandwidth × 1.5)" and edited.memory_bandwidth_gbps == 1.5 * 3350
    assert edited.sources["memory.bandwidth_gbps"] == H100.sources["memory.bandwidth_gbps"] + ", × 1.5"
    assert edited.sources["matrix_tflops.bf16"] == H100.sources["matrix_tflops.bf16"]
    assert scaled_device(H100, clock=2.0).sources["matrix_tflops.bf16"].endswith(", × 2")
    on, wider = find_topology("dgx-h100x2"), find_topology("dgx-h100x2").with_links(2.0)
    assert wider.node.peer_gbps == 2 * on.node.peer_gbps and wider.network.card_gbps == 2 * on.network.card_gbps
    named = plan("gpt2", 16, device="h100-sxm", settings=SMALL, preset="default", only=WAYS,
                 pieces=LayerCosts(edited, like=traced), technology=Technology(bandwidth=1.5, link=2.0))
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
    for axis in AXES:
        for bad in ("0", "-1", "nan", "1e9", "", "x", "1parsec", "1000"):
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
    base = ["plan", "gpt2", "--preset", "default", "--gpus", "2", "--parallel", "fsdp2=2,microbatch=1,microbatches=1"]
    for setting in SMALL:
        base += ["--set", setting]
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
