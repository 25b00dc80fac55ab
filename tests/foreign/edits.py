"""Every edit that ``foretrace predict`` offers, alone and in pairs, and what it means that one loses another.

The edits are found from what can be configured, so that a new one is tried by itself: a new switch at once, a new
option as soon as ``VALUES`` says what to give it (a test fails until it does). What an edit does is seen in the step,
and where something else decides the step, in the work: the sums of host, device and communication time and what is
waited for, which ``Work`` has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import combinations
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from catalogue import Program
from recordings import slowed

import tracer
from graph_predictor.edits.registry import OPTIONS
from graph_predictor.prediction.result import Prediction
from graph_predictor.request.study import Configuration, Study
from graph_predictor.simulation.program import NEVER
from kernel_models.collectives import find_topology
from kernel_models.collectives.profile import CommProfile
from tracer.errors import ForetraceError
from tracer.graph import KernelKind
from tracer.job import Job

CLUSTER = "dgx-h100x2"
VALUES: dict[str, tuple[Any, ...]] = {
    "device": ("a100-sxm-40g",), "parallel": ("ddp=4",), "topology": (CLUSTER,)}
"""What each option is given; those whose value depends on the program are in ``edits_of``."""
EDITS: dict[str, tuple[Any, ...]] = {
    **{option.name: (option.example or 0.5,) for option in OPTIONS if not option.switches}, "host": (0.5, 2.0),
    "clock": (1.5,), "bandwidth": (2.0,), "link": (2.0,), "remove": ("aten::*mm*|aten::*conv*",)}
"""What the edits are given that take a value; those that take none are switched."""
OF_PROGRAM = {"sizes", "also", "code", "selected", "host_from", "from_topology", "comm_profile", "comm_backend",
              "comm_choices"}
SLOWER = "a slower host"
"""The program's own capture with all times twice as long: another real one differs by the noise of the machine too."""
MOVES = 0.02
"""An edit that changes the step, or some of its work, by less is not said to move it."""
APART = 0.002
"""Two predictions nearer than this are the same."""
STILL = 0.01
"""Share of what an edit changes alone whose change with another one says that it is there still."""

Change = dict[str, Any]
Result = Prediction | str
"""A prediction, or the sentence with which it is refused."""


def edits_of(which: Program, folder: Path, other: tuple[str, str] | None = None, *, traced: bool = False) -> \
        dict[str, Change]:
    """Every edit by itself, by a name for messages.

    Args:
        which: the program.
        folder: for files that edits need.
        other: of a second capture of the program, its path and the size it differs in, such as "batch=16".
        traced: the source was traced by shapes from the program's code, which is then traced again without ``code``.
    """
    found: dict[str, Change] = {word: {"edits": {option.name: value}} for option in OPTIONS
                                for word, value in option.switches.items()}
    found |= {f"{name}={value}": {"edits": {name: value}} for name, values in EDITS.items() for value in values}
    for option, values in VALUES.items():
        found |= {f"{option}={value}": {option: value} for value in values}
    found["from_topology"] = {"topology": CLUSTER, "from_topology": "dgx-a100x2"}
    found["comm_backend"] = {"topology": CLUSTER, "comm_backend": "gloo"}
    found["comm_choices"] = {"topology": CLUSTER, "comm_choices": "auto"}
    profile = folder / "collectives.json"
    CommProfile(find_topology(CLUSTER)).save(profile)
    found["comm_profile"] = {"comm_profile": str(profile)}
    batch = which.sizes["batch"]
    size = {"sizes": (f"batch={batch}:{2 * batch}",)}
    found["sizes"] = size
    if which.builds and not traced:
        found["sizes by code"] = {**size, "code": which.code, "selected": 0.5}
    found["host_from"] = {"host_from": SLOWER}
    if other is not None:
        path, at = other
        found["sizes by laws"] = {"sizes": (f"batch={batch}:{4 * batch}",), "also": (f"{path}:{at}",)}
    return found


def configured() -> set[str]:
    """Options of a configuration that are tried, apart from switches."""
    return set(VALUES) | OF_PROGRAM


def together(first: Change, second: Change) -> Change | None:
    """Both edits; ``None`` if both give one option."""
    edits = first.get("edits", {}), second.get("edits", {})
    if (set(first) & set(second)) - {"edits"} or set(edits[0]) & set(edits[1]):
        return None
    return {**first, **second, "edits": {**edits[0], **edits[1]}}


@dataclass(frozen=True, slots=True)
class Work:
    """What there is to do in a predicted step, of all ranks, whatever of it decides: ns, and a number of waits.

    Attributes:
        host: host time, waits apart.
        device: device work but collectives.
        communication: collectives.
        latency: from launches to their kernels.
        beside: the shortest step that work beside the job allows: loading, hidden collectives.
        waits: of the host for the device.
    """

    host: float
    device: float
    communication: float
    latency: float
    beside: float
    waits: float

    @classmethod
    def of(cls, settled: Any) -> Work:
        """The sums over the last copy of the repeated steps, a step."""
        steps = settled.scenario.cycle.steps
        repeated, program = settled.steady.repeated, settled.steady.program
        items = repeated.copy_of_item == repeated.copies - 1
        kernels = repeated.copy_of_kernel == repeated.copies - 1
        kinds = np.concatenate([graph.kernels.kind for graph in settled.scenario.built.graphs])[repeated.kernel]
        moved = kinds == KernelKind.COLLECTIVE
        first = np.isin(repeated.item, settled.scenario.cycle.first)
        starts = program.item_external[items & first]
        before = program.item_external[(repeated.copy_of_item == repeated.copies - 2) & first]
        beside = np.where((starts > NEVER) & (before > NEVER), starts - before, 0)
        waits = np.diff(program.wait_ptr)[items]
        sums = (program.item_work[items].sum() + program.item_cost[items].sum(),
                program.kernel_duration[kernels & ~moved].sum(), program.kernel_duration[kernels & moved].sum(),
                program.kernel_latency[kernels].sum(), beside.max(initial=0), (waits > 0).sum())
        return cls(*(float(each) / steps for each in sums))


class Predictor:
    """Predictions from one source, in this process: refusals are their sentences, anything else is raised.

    Args:
        job: recorded or traced.
        code: of a job that was traced, its SCRIPT.py:FUNCTION.
        hosts: of a job that was traced, the capture whose host is taken; otherwise the job itself, slower.
    """

    def __init__(self, job: Job, *, code: str | None = None, hosts: Job | None = None) -> None:
        of_host = hosts or job
        slower = replace(of_host, graphs=[slowed(graph, 2) for graph in of_host.graphs])
        self.study = Study(job, code=code, read=lambda paths: slower if paths == [SLOWER] else tracer.read_job(*paths))
        self._found: dict[str, Result] = {}
        self._works: dict[str, Work] = {}
        base = self({})
        if isinstance(base, str):
            raise ForetraceError(f"Without any edit nothing is predicted: {base}")
        self.base: Prediction = base

    def __call__(self, change: Change) -> Result:
        """Predict once; what there is to do is noted of the same simulation, see ``work``."""
        key = _key(change)
        if key not in self._found:
            try:
                self._found[key] = self._predicted(change)
            except ForetraceError as error:
                self._found[key] = str(error)
        return self._found[key]

    def _predicted(self, change: Change) -> Prediction:
        prepared = self.study.prepared(Configuration(**change))
        run = prepared.start._run

        def noted(edits: Any) -> Any:
            done = run(edits)
            if edits is prepared.edits:  # not the unedited step, which this one is compared with
                self._works[_key(change)] = Work.of(done)
            return done

        with patch.object(prepared.start, "_run", noted):
            return prepared.predict()

    def moved(self, result: Prediction) -> float:
        """By what share of the step."""
        return result.step_time_us / self.base.step_time_us - 1.0

    def work(self, change: Change) -> Work:
        """What there is to do, of a configuration that was predicted."""
        return self._works[_key(change)]


def _key(change: Change) -> str:
    return repr(sorted(change.items(), key=lambda each: each[0]))


def complaints(result: Result) -> list[str]:
    """What is wrong with one result by itself."""
    if isinstance(result, str):
        whole = result.strip() == result and "\n" not in result and result.endswith((".", "?", ")"))
        return [] if whole and "Traceback" not in result else [f"no sentence: {result!r}"]
    low, high = result.interval_us
    if not 0.0 < low <= result.step_time_us <= high < float("inf"):
        return [f"the interval {low} to {high} does not hold {result.step_time_us}"]
    return [] if high > low else [f"an interval without width at {low}"]


def change_of(now: float, before: float) -> float:
    """Relative change; 0 where there was nothing and is nothing."""
    return now / before - 1.0 if before else float("inf") if now else 0.0


def shows_in_step(alone: tuple[float, float], with_other: tuple[float, float]) -> bool:
    """Whether an edit moves the step of another one the way it moves the step alone, from the first to the second."""
    by_itself, further = change_of(*reversed(alone)), change_of(*reversed(with_other))
    return abs(by_itself) > MOVES and abs(further) > APART and by_itself * further > 0


def lost_work(base: Work, alone: Work, other: Work, both: Work) -> bool:
    """Whether an edit changes none of the sums of work with another one that it changes alone.

    Where the other one leaves less of the work than an edit must change to be said to move it (a CUDA graph leaves one
    launch), none can be lost; nor can an edit that changes no work, nor one of which a hundredth is left, such as a
    clock's of products that are done in 16 bits instead of 32.
    """
    touched = False
    for field in fields(Work):
        b, a, o, ab = (getattr(work, field.name) for work in (base, alone, other, both))
        if abs(change_of(a, b)) <= MOVES or (b and o <= MOVES * b):
            continue
        if (a - b) * (ab - o) > 0 and (abs(change_of(ab, o)) > APART or abs(ab - o) > STILL * abs(a - b)):
            return False
        touched = True
    return touched


@dataclass(frozen=True, slots=True)
class Pair:
    """Two edits made together: what came of it, by what share each and both move the step, and what is wrong."""

    first: str
    second: str
    result: Result
    moved: tuple[float | None, float | None, float | None]
    wrong: tuple[str, ...]

    @property
    def told(self) -> str:
        """What is wrong, in a line."""
        shares = ["–" if share is None else f"{share:+.1%}" for share in self.moved]
        return (f"{self.first} ({shares[0]}) with {self.second} ({shares[1]}), together {shares[2]}: "
                f"{'; '.join(self.wrong)}")


SAME = {frozenset(("fuse-elementwise", "compile")): "the compiler fuses the same chains",
        frozenset(("dtype=bf16", "sizes by code")): "shapes do not show what runs inside an operation: an embedding's "
                                                    "gradient is filled in the recording, and so in another type"}
"""Pairs of which one does what the other does, or sees other operations, and why."""


def pairs_of(predict: Predictor, edits: dict[str, Change], chosen: Callable[[str, str], bool] = lambda a, b: True) -> \
        Iterator[Pair]:
    """Every pair of edits that can be made together, tried.

    Args:
        predict: the source.
        edits: by name, see ``edits_of``.
        chosen: whether a pair is tried.
    """
    alone = {name: predict(change) for name, change in edits.items()}
    for first, second in combinations(edits, 2):
        change = together(edits[first], edits[second])
        if change is None or not chosen(first, second):
            continue
        both = predict(change)
        results = (alone[first], alone[second], both)
        moved = tuple(None if isinstance(each, str) else predict.moved(each) for each in results)
        wrong = complaints(both)
        if not any(isinstance(each, str) for each in results) and frozenset((first, second)) not in SAME:
            wrong += _lost_of(predict, edits, (first, second), change, results)
        yield Pair(first, second, both, moved, tuple(wrong))  # type: ignore[arg-type]


def _lost_of(predict: Predictor, edits: dict[str, Change], names: tuple[str, str], change: Change,
             results: tuple[Any, Any, Any]) -> list[str]:
    """What is lost of two edits: first by their steps, and where these say nothing by the work there is to do."""
    base, together_us = predict.base.step_time_us, results[2].step_time_us
    found = []
    for one, name in enumerate(names):
        alone, other = results[one].step_time_us, results[1 - one].step_time_us
        if shows_in_step((base, alone), (other, together_us)):
            continue
        works = [predict.work(each) for each in ({}, edits[name], edits[names[1 - one]], change)]
        if lost_work(*works):
            found.append(f"{name} is lost")
        elif abs(change_of(alone, base)) > MOVES < abs(change_of(together_us, other)):
            found.append(f"{name} is turned round")
    return found
