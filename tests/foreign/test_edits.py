"""Every edit that ``foretrace predict`` offers on captures of others' scripts, and pairs of them.

The edits are found from what can be configured, so that a new one is tried here by itself: a new switch at once, a new
option as soon as ``VALUES`` says what to give it (a test fails until it does). Singles run on ``ALONE``: a Hugging Face
Trainer and a recurrent network; pairs on the latter alone, those with one of ``WITH``: a step traced again by its code,
and another host. Left out, for time: pairs of the other edits, and other programs. Left out because not all of its
pairs hold, for reasons not yet found: the Trainer. Its pairs with flash attention do.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields, replace
from functools import lru_cache
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from catalogue import OTHER_SIZE, Program, program

import tracer
from graph_predictor.cli.predict import predict as command
from graph_predictor.configuration import SWITCHES, Configuration
from graph_predictor.prediction.result import Prediction
from graph_predictor.study import Study
from tracer.errors import ForetraceError
from tracer.graph import ExecutionGraph

ALONE = ("bert_trainer", "gru_forecast")
IN_PAIRS = ("gru_forecast",)
WITH = {"sizes by code", "host_from"}
"""Every pair that is tried has one of these."""
VALUES: dict[str, tuple[Any, ...]] = {
    "device": ("h200-sxm",), "dtype": ("bf16",), "parallel": ("ddp=4",), "straggler": ("0:50%",),
    "topology": ("dgx-h100x2",), "host": (0.5, 2.0), "clock": (1.5,), "bandwidth": (2.0,), "kernels": (0.5,)}
"""What each option is given; those whose value depends on the program are in ``edits_of``."""
OF_PROGRAM = {"sizes", "also", "code", "host_from"}
BESIDE_OTHERS = {"from_topology", "comm_profile", "comm_backend"}
"""They say how another option is meant, and are no edits by themselves."""
SLOWER = "a slower host"
"""The program's own capture with all times twice as long: another real one differs by the noise of the machine too."""
NO_EDITS = {"source", "from_device", "profile", "step", "price", "top", "window", "json", "debug"}
"""Options of the command that say what is read or shown."""
MOVES = 0.02
"""An edit that changes the step by less is not said to move it."""
APART = 0.002
"""Two predictions nearer than this are the same."""

Change = dict[str, Any]
Result = Prediction | str
Slowed = Callable[[ExecutionGraph, int], ExecutionGraph]


def test_every_option_of_the_command_is_tried() -> None:
    configured = {field.name for field in fields(Configuration)} - {"switches"}
    assert configured == set(VALUES) | OF_PROGRAM | BESIDE_OTHERS
    options = {name: parameter.default for name, parameter in inspect.signature(command).parameters.items()}
    switches = {name for name, default in options.items() if default is False}
    assert len(set(options) - switches - NO_EDITS - configured - {"recompute", "profiled"}) == 0
    known = {name.replace("-", "_") for name in SWITCHES} | {"compiled", "profiled", "json", "debug"}
    assert switches <= known, "a switch of the command that is none of SWITCHES"


def edits_of(which: Program, captured: Callable[[str], Path]) -> dict[str, Change]:
    """Every edit by itself, by a name for messages."""
    found: dict[str, Change] = {name: {"switches": frozenset([name])} for name in SWITCHES}
    for option, values in VALUES.items():
        found |= {f"{option}={value}": {option: value} for value in values}
    batch = which.sizes["batch"]
    size = {"sizes": (f"batch={batch}:{2 * batch}",)}
    found["sizes"] = size
    if which.builds:
        found["sizes by code"] = {**size, "code": which.code}
    found["host_from"] = {"host_from": SLOWER}
    if which.name == "gru_forecast":
        other = captured(which.name).parent / OTHER_SIZE.replace(":", "-").replace("=", "")
        found["sizes by laws"] = {"sizes": ("batch=8:32",), "also": (f"{other}:batch=16",)}
    return found


def together(first: Change, second: Change) -> Change | None:
    """Both edits; ``None`` if both give one option."""
    if (set(first) & set(second)) - {"switches"}:
        return None
    both = {**first, **second}
    if "switches" in first and "switches" in second:
        both["switches"] = first["switches"] | second["switches"]
    return both


class Predictor:
    """Predictions from one capture, in this process: refusals are their sentences, anything else is raised."""

    def __init__(self, path: Path, slowed: Slowed) -> None:
        job = tracer.read_job(path)
        slower = replace(job, graphs=[slowed(graph, 2) for graph in job.graphs])
        self.study = Study(job, read=lambda paths: slower if paths == [SLOWER] else tracer.read_job(*paths))
        self.base = self.study.predict(Configuration())

    def __call__(self, change: Change) -> Result:
        try:
            return self.study.predict(Configuration(**change))
        except ForetraceError as error:
            return str(error)

    def moved(self, result: Prediction) -> float:
        """By what share of the step."""
        return result.step_time_us / self.base.step_time_us - 1.0


@lru_cache(maxsize=1)
def predictor(path: Path, slowed: Slowed) -> Predictor:
    return Predictor(path, slowed)


def complaints(result: Result) -> list[str]:
    """What is wrong with one result by itself."""
    if isinstance(result, str):
        whole = result.strip() == result and "\n" not in result and result.endswith((".", "?", ")"))
        return [] if whole and "Traceback" not in result else [f"no sentence: {result!r}"]
    low, high = result.interval_us
    if not 0.0 < low <= result.step_time_us <= high < float("inf"):
        return [f"the interval {low} to {high} does not hold {result.step_time_us}"]
    return [] if high > low else [f"an interval without width at {low}"]


@pytest.mark.parametrize("name", ALONE)
def test_each_edit_is_predicted_with_an_interval_or_refused_in_a_sentence(
        name: str, captured: Callable[[str], Path], slowed: Slowed) -> None:
    predict = predictor(captured(name), slowed)
    assert complaints(predict.base) == []
    wrong = {edit: found for edit, change in edits_of(program(name), captured).items()
             if (found := complaints(predict(change)))}
    assert wrong == {}


def lost(moved: tuple[float, float], both: float) -> bool:
    """Whether two edits that each move the step do not both show in what they do together.

    Two that make it shorter may hide the same time, so that together they do what the stronger does; but never less.
    One that makes it longer and one that makes it shorter must both show, as must two that make it longer.
    """
    low, high = sorted(moved)
    if high < 0.0:
        return both > low + APART
    if low > 0.0:
        return both <= high + APART
    return not low + APART < both < high - APART


@pytest.mark.parametrize("name", IN_PAIRS)
def test_no_edit_loses_another(name: str, captured: Callable[[str], Path], slowed: Slowed) -> None:
    predict = predictor(captured(name), slowed)
    edits = edits_of(program(name), captured)
    alone = {edit: predict(change) for edit, change in edits.items()}
    wrong: list[str] = []
    pairs = 0
    for first, second in combinations(edits, 2):
        change = together(edits[first], edits[second])
        if change is None or not {first, second} & WITH:
            continue
        both = predict(change)
        pairs += 1
        wrong += [f"{first} with {second}: {text}" for text in complaints(both)]
        one, other = alone[first], alone[second]
        if isinstance(both, str) or isinstance(one, str) or isinstance(other, str):
            continue
        moved = predict.moved(one), predict.moved(other)
        if min(map(abs, moved)) > MOVES and lost(moved, predict.moved(both)):
            wrong.append(f"{first} ({moved[0]:+.1%}) with {second} ({moved[1]:+.1%}): {predict.moved(both):+.1%}")
    assert pairs > 30
    assert wrong == []
