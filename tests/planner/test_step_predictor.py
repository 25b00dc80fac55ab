"""The predictor that engines' own schedulers ask, by the interface of SGLang's simulator."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

import foretrace
from planner.serving.setup import ServingError
from planner.serving.step_grids import PrefillChunk
from planner.serving.step_predictor import StepPredictor
from planner.serving.steps import ServedStep


@dataclass
class Request:
    """What ``sglang_simulator.time_predictor.base.ScheduleRequest`` has."""

    extend_length: int = 0
    past_kv_length: int = 0


@dataclass
class Batch:
    """What of ``ScheduleBatch`` a predictor reads."""

    reqs: list[Request] = field(default_factory=list)


@pytest.fixture(scope="module")
def predictor() -> StepPredictor:
    return foretrace.step_predictor("llama-3.1-8b", device="h100-sxm", engine="sglang")


def test_steps_take_what_serve_says_but_for_the_engine(predictor: StepPredictor) -> None:
    decode = predictor.predict_infer_time(Batch([Request(1, 511)] * 8))
    step = predictor.model.time(ServedStep(8, 512))
    served = foretrace.serve("llama-3.1-8b", device="h100-sxm", engine="sglang", batch=8, context=512).decode
    assert decode == pytest.approx(step.us / 1e6) and step.engine == 0.0
    assert decode == pytest.approx((served.us - served.engine) / 1e6)
    mixed = predictor.predict_infer_time(Batch([Request(1, 511)] * 8 + [Request(300, 200)]))
    assert mixed == pytest.approx(predictor.model.time(ServedStep(8, 512, (PrefillChunk(1, 300, 200),), 1)).us / 1e6)
    # The first of a prompt's tokens is read, whatever its length: nothing is in the cache that it could decode from.
    assert predictor.seconds([1], [0]) > predictor.seconds([1], [10])


def test_what_a_simulator_asks_besides(predictor: StepPredictor) -> None:
    assert predictor.predict_infer_time(Batch()) == 0.0
    assert predictor.get_metrics() == {}
    predictor.reset_metrics()
    for new, computed, said in (([1], [], "both of each"), ([0], [5], "cannot compute 0 tokens"),
                                ([1], [-1], "the cache has -1")):
        with pytest.raises(ServingError, match=said):
            predictor.seconds(new, computed)
