"""What predictions from one recording share: made once for equal causes, never for others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from micro import Micro

from foretrace.edits import Device, ScaleClock, ScaleHost
from graph_predictor.prediction import pricing
from graph_predictor.prediction import repeat as repeats
from graph_predictor.prediction.repeat import KEPT, Shared, repeat
from graph_predictor.synthesis.baseline import baseline_of
from kernel_models.device import device
from tracer.errors import ForetraceError
from tracer.job import read_job


def test_a_result_is_made_once_for_equal_causes() -> None:
    shared, made = Shared(), []
    spec = device("h100-sxm")
    for causes, value in (((spec, 1.0), 1), ((replace(spec), 1.0), 2), ((spec, 1.1), 3), ((object(), 1.0), 4),
                          ((object(), 1.0), 5), ((spec, 1), 6)):
        shared.once("ratios", causes, lambda value=value: made.append(value))
    assert made == [1, 3, 4, 5, 6]
    assert shared.once("others", (spec, 1.0), lambda: 7) == 7
    for clock in range(KEPT):
        shared.once("ratios", (clock,), lambda clock=clock: clock)
    assert shared.once("ratios", (spec, 1.0), lambda: 8) == 8


def test_a_refusal_is_a_result_and_what_is_too_large_is_not_kept() -> None:
    shared, tried = Shared(), []

    def refuse() -> int:
        tried.append(0)
        raise ForetraceError("Not so.")

    for causes in (("ddp=2", ("batch", 4)), ("ddp=2", ("batch", 4)), ("ddp=2", ("batch", 8))):
        with pytest.raises(ForetraceError, match="Not so"):
            shared.once("ranks", causes, refuse)
    assert len(tried) == 2
    assert [shared.once("large", (), lambda size=size: size, keep=lambda size: size < 3) for size in (5, 2, 1)] == [
        5, 2, 2]


def test_a_large_job_keeps_the_unedited_results_and_the_last_ones(monkeypatch: pytest.MonkeyPatch,
                                                                  tmp_path: Path) -> None:
    monkeypatch.setattr(repeats, "LARGE", 1)
    one = baseline_of(read_job(step(tmp_path)), device=device("a100-sxm-80g"))
    assert one.scenario.shared.most == one.cycle.shared.most == repeats.LARGE_KEPT
    assert repeat(one.cycle, 4).shared.most == repeats.LARGE_KEPT
    assert one.scenario.shared.as_many(1, 1_000, 1_000) == 1 and Shared().as_many(1, 1_000, 1_000) == 1_000
    edits = [[ScaleHost(0.5)], [ScaleClock(0.9)], [ScaleHost(0.5)], [Device("h100-sxm")]]
    found = [one.predict(each) for each in edits]
    monkeypatch.undo()
    assert found == [baseline_of(read_job(step(tmp_path)), device=device("a100-sxm-80g")).predict(each)
                     for each in edits]


def step(folder: Path) -> Path:
    trace = Micro(rank=0).calibrate()
    for number in range(3):
        at = 1000 + 1000 * number
        trace.step(at, at + 900, number + 1)
        trace.op("aten::mm", at + 10, at + 20, **{"Input Dims": [[2048, 2048], [2048, 2048]],
                                                  "Input type": ["float", "float"]})
        trace.launch(at + 11, 5, (7, at + 21, 600))
        trace.call("cudaDeviceSynchronize", at + 30, 600)
    return trace.write(folder / "trace.json")


def test_many_predictions_from_one_recording_are_those_of_each_alone(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = read_job(step(tmp_path))
    priced = []
    original = pricing.price
    monkeypatch.setattr(pricing, "price", lambda *args: priced.append(args) or original(*args))
    one = baseline_of(job, device=device("a100-sxm-80g"))
    edits = [[Device(name), ScaleClock(clock), ScaleHost(host)] for name in ("h100-sxm", "b200")
             for clock in (0.9, 1.1) for host in (0.5, 1.0, 2.0)]
    together = [one.predict(each) for each in edits]
    # Before, and its typical work, once; after for each device and clock: hosts change no kernel.
    assert len(priced) == 2 + 4
    alone = [baseline_of(job, device=device("a100-sxm-80g")).predict(each) for each in edits]
    assert together == alone
    assert len({result.step_time_us for result in together}) > 4
    assert repeat(one.cycle, 4) is repeat(one.cycle, 4)
