"""Served steps with the edits of recorded ones: the same registry, the same prices; the simulator as the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
from said import Run, plain
from tried_edits import EVERY

from graph_predictor.edits.registry import made
from graph_predictor.prediction.predictor import Baseline, Spreads
from graph_predictor.prediction.scenario import Edit, Scenario
from graph_predictor.prediction.step_spread import RESOLVED
from kernel_models.device import find_device
from planner.serving.edited import EditedServingModel, ServedHost, ServedKernel, edited_model, served_scenario
from planner.serving.serve import cluster_for, prompt_step, serve
from planner.serving.setup import ServingError, ServingSetup
from planner.serving.source import served_decoder
from planner.serving.steps import ServedStep, ServingModel
from tracer.errors import ForetraceError

DECODE = ServedStep(32, 2048)
SETUP = ServingSetup(tp=2)
PROMPT = prompt_step(SETUP, 8192)
BOTH = prompt_step(SETUP, 1024)
"""A step whose host takes as long as its device."""


@cache
def model() -> ServingModel:
    spec = find_device("h100-sxm")
    return ServingModel(served_decoder("llama-3.1-8b").shape, SETUP, spec, cluster_for(spec, 2, None, None, None))


@cache
def baseline(step: ServedStep) -> Baseline:
    """The step kernel by kernel on the simulator that replays recordings."""
    own, rates = model(), model().rates
    found = own.in_order(step)
    kernels = [ServedKernel(each.name, each.call, *times) for each, *times in zip(
        found, *(column.tolist() for column in own.prices_of(found)), strict=True)]
    host = ServedHost(own.engine_us(step), rates.host_us, rates.host_collective_us,
                      own.graph_us * own.setup.pp if own.captured(step) else None)
    scenario = served_scenario(kernels, host, own.device, own.models, own.setup.gpus)
    return Baseline(scenario, Spreads(rates.spreads.host, RESOLVED), ran=False)


def simulated_us(step: ServedStep, edits: Sequence[Edit] = ()) -> float:
    """It is repeated until its period settles."""
    return baseline(step).predict(edits).step_time_us


@dataclass(frozen=True)
class HostWeights:
    """Factors on the engine's time around a step, on launches of kernels but the first ones, and on these."""

    engine: float = 1.0
    launches: float = 1.0
    first: float = 1.0

    def describe(self) -> str:
        return "host weights"

    def apply(self, scenario: Scenario) -> Scenario:
        op = scenario.slices.op
        weight = np.select([op < 0, op == 0], [self.engine, self.first], self.launches)
        return replace(scenario, host=scenario.host.scaled(weight))


OFFERED = [(option.make(value), {0.5: [DECODE], 2.0: [PROMPT]}.get(value, [DECODE, PROMPT]))
           for option, value in EVERY if option.name != "cuda-graphs"]
"""Edits that ``serve`` has an option of, and the steps that they are tried on."""
LEAST_EDITS = 14
"""Of them so many are taken; the others are refused with a sentence."""


def is_what_the_simulator_gives(edits: Sequence[Edit], steps: Sequence[ServedStep] = (DECODE, PROMPT)) -> None:
    own = edited_model(model(), edits)
    for step in steps:
        assert own.time(step).us == pytest.approx(simulated_us(step, edits), rel=0.03), (edits, step)
    assert own.surface.us(32, 2048) == pytest.approx(own.time(DECODE).us, rel=1e-6), edits


def test_every_edit_is_refused_or_gives_what_the_simulator_gives() -> None:
    is_what_the_simulator_gives([])
    taken = 0
    for edit, steps in OFFERED:
        try:
            edited_model(model(), [edit])
        except ForetraceError as error:
            assert str(error).endswith((".", ")")) and "\n" not in str(error), edit
        else:
            is_what_the_simulator_gives([edit], steps)
            taken += 1
    assert taken >= LEAST_EDITS


def test_an_edit_may_change_the_engine_apart_from_launches() -> None:
    is_what_the_simulator_gives([HostWeights(10.0)])
    is_what_the_simulator_gives([HostWeights(0.0, 3.0, 3.0)])
    with pytest.raises(ServingError, match="'host weights' changes launches unlike one another"):
        edited_model(model(), [HostWeights(first=2.0)])


def test_where_host_and_device_take_as_long_the_estimate_has_them_wait_for_each_other() -> None:
    assert simulated_us(BOTH) < model().time(BOTH).us < 2 ** (1 / model().rates.meet) * simulated_us(BOTH)


def test_edits_change_what_they_say_and_nothing_else() -> None:
    was = model().time(PROMPT)
    faster = EditedServingModel(model(), made({"link": 2.0})).time(PROMPT)
    assert faster.products == was.products and faster.others == was.others
    assert was.collectives / 2 < faster.collectives < was.collectives
    halved = EditedServingModel(model(), made({"kernels": 0.5})).time(PROMPT)
    assert halved.products == pytest.approx(was.products / 2, rel=1e-3) and halved.collectives == was.collectives
    host = EditedServingModel(model(), made({"host": 3.0})).time(DECODE)
    assert host.engine == pytest.approx(3 * model().time(DECODE).engine)
    clock = EditedServingModel(model(), made({"clock": 0.5})).time(PROMPT)
    assert clock.products > 1.3 * was.products and clock.low < clock.us < clock.high
    with pytest.raises(ServingError, match="--precision"):
        EditedServingModel(model(), made({"dtype": "bf16"}))


def test_serve_takes_edits(run: Run) -> None:
    done = run("serve", "llama-3.1-8b", "--device", "h100-sxm", "--tp", "2", "--clock", "0.5", "--prompt", "512")
    assert done.code == 0 and "GPU clock × 0.5" in plain(done.out)
    done = run("serve", "llama-3.1-8b", "--device", "h100-sxm", "--hide-collectives")
    assert done.code == 2 and done.err.startswith("foretrace: ") and done.err.count("\n") == 1
    found = serve("llama-3.1-8b", device="h100-sxm", edits=made({"bandwidth": 2.0}), concurrency=2, requests=8)
    assert found.to_json()["edits"] == ["memory bandwidth × 2"]
    assert found.decode.us < serve("llama-3.1-8b", device="h100-sxm").decode.us
