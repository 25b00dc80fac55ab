"""Parts 3 and 5: predictions of sizes and variants that were never recorded, compared with real runs.

All cases are predicted before any of them runs. A case then alternates with the recorded program in one process. Its
measured step is the recorded step × the ratio of the two programs' medians there::

    | recorded | case | recorded | case | …      measured = recorded step × median(case) / median(recorded)

So a machine whose speed has changed since the recording does not make a prediction look wrong.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from graph_predictor.figures import signed_percent
from graph_predictor.request.study import Configuration, Study
from graph_predictor.sizes.retrace import nearest
from graph_predictor.synthesis.baseline import baseline_of
from kernel_models.op_call import Family
from kernel_models.profile import load_profile
from step_views.acceptance.calibration import PROFILE
from step_views.acceptance.parts import AcceptanceScale, Settings
from step_views.acceptance.points import (
    AcceptancePoint,
    absent,
    at_least,
    at_most,
    guarded,
    is_true,
    near,
    noted,
    percent,
)
from step_views.acceptance.worker import part_folder
from step_views.check.validate import (
    PredictedCase,
    ValidatedCase,
    ValidatedProgram,
    Validation,
    capture_program,
    modelled_families,
    predict_cases,
    size_label,
    timed_steps,
)
from tracer import workloads
from tracer.campaign.lab import Lab
from tracer.errors import ForetraceError
from tracer.graph import ExecutionGraph
from tracer.job import read_job
from tracer.output_file import whole_file

MEASURED = "measured.json"
OPTIONS = ("--replace", "--form", "foretrace", "--execution-trace", "none")
ROUNDS, BLOCK, WARM_UP = 4, 5, 3
"""Turns of each program, steps in a turn (the first step is not counted), and steps before the first turn."""
SAME_MAPE = 0.01
"""Largest share by which a calibrated profile may increase the mean error."""

Measured = dict[str, list[int]]
"""Step times of each case, ns, scaled to the machine's speed during the recording."""


def predictions(folder: Path, scale: AcceptanceScale) -> Iterator[AcceptancePoint]:
    """Record some sizes, predict other sizes and variants, run these, and judge the predictions."""
    own = part_folder(folder, 3)
    program = ValidatedProgram(workload=scale.workload, options=OPTIONS,
                               fixed={"device": scale.device, **scale.fixed})
    for sizes in scale.captured:
        capture_program(program, sizes, own / size_label(sizes))
    predicted, refused = _predicted(own, scale, [])
    for name, why in refused.items():
        # A variant may be impossible on a CPU, which lacks matrix units for example; a GPU has all that variants need.
        may_lack = name in scale.variants and not scale.is_cuda
        yield absent(name, why) if may_lack else is_true(name, "it can be predicted", False, why)
    measured: Measured = {}
    for number, sizes in enumerate(scale.captured):
        names = [name for name in predicted if _origin(scale, name) == number]
        yield from guarded(f"{size_label(sizes)}, run again", _run_in_turns(own, scale, sizes, names, measured))
    with whole_file(own / MEASURED) as file:
        file.write(msgspec.json.encode(measured))
    yield from judged(_beside(predicted, measured), scale)


def with_profile(folder: Path, scale: AcceptanceScale) -> Iterator[AcceptancePoint]:
    """Predict part 3's cases again with part 4's profile, and compare its products with those in the steps."""
    own, profile = part_folder(folder, 3), part_folder(folder, 4) / PROFILE
    if not (own / MEASURED).is_file() or not profile.is_file():
        yield is_true("files of parts 3 and 4", "there", False, "missing: run these parts again (--parts 3,4)")
        return
    measured = msgspec.json.decode((own / MEASURED).read_bytes(), type=Measured)
    before = _beside(_predicted(own, scale, [])[0], measured)
    after = _beside(_predicted(own, scale, [str(profile)])[0], measured)
    yield from judged(after, scale)
    mape = Validation(scale.captured, list(before.values())).mape
    yield at_most("mean error, with the profile", Validation(scale.captured, list(after.values())).mape,
                  mape + SAME_MAPE if math.isfinite(scale.mape) else math.inf)
    yield from _products(own, scale, str(profile))


def judged(cases: Mapping[str, ValidatedCase], scale: AcceptanceScale) -> Iterator[AcceptancePoint]:
    """Judge predictions against measured times."""
    if not cases:
        yield is_true("predictions", "≥ 1", False, "nothing was predicted")
        return
    for name, case in cases.items():
        yield at_most(f"{name}: {case.predicted_us / 1e3:.2f} ms ({case.low_us / 1e3:.2f} to {case.high_us / 1e3:.2f}) "
                      f"for {case.measured_us / 1e3:.2f}, error", abs(case.error), scale.worst)
    found = Validation(scale.captured, list(cases.values()))
    yield at_most("mean error", found.mape, scale.mape)
    yield noted("mean error, signed", signed_percent(found.bias), found.bias)
    yield at_least("inside the 80% interval", found.coverage, scale.covered)


def _settings(scale: AcceptanceScale) -> dict[str, dict[str, Any]]:
    """Return the settings with which each case is really run, by name."""
    found = {size_label(sizes): {**scale.fixed, **sizes} for sizes in scale.unseen}
    return found | {edit: {**scale.fixed, **scale.captured[0], **really}
                    for edit, (_, really) in scale.variants.items()}


def _predicted(own: Path, scale: AcceptanceScale, profiles: list[str]) -> tuple[dict[str, PredictedCase],
                                                                                dict[str, str]]:
    """Return the predictions by case, and the reasons why other cases cannot be predicted."""
    seen = [(sizes, own / size_label(sizes)) for sizes in scale.captured]
    study = Study(read_job([str(seen[0][1])]), profiles=[load_profile(path) for path in profiles])

    def varied(edit: str) -> PredictedCase:
        one = study.predict(Configuration(edits={edit: scale.variants[edit][0]}))
        return PredictedCase(scale.captured[0], one.step_time_us, one.interval_us, one.bound, ())

    def sized(sizes: Settings) -> PredictedCase:
        return predict_cases(seen, [sizes], profiles=profiles)[0]

    asked: dict[str, Callable[[], PredictedCase]] = {
        **{size_label(sizes): partial(sized, sizes) for sizes in scale.unseen},
        **{edit: partial(varied, edit) for edit in scale.variants}}
    found: dict[str, PredictedCase] = {}
    refused: dict[str, str] = {}
    for name, predict in asked.items():
        try:
            found[name] = predict()
        except ForetraceError as error:
            refused[name] = str(error)
    return found, refused


def _beside(predicted: Mapping[str, PredictedCase], measured: Measured) -> dict[str, ValidatedCase]:
    return {name: case.beside(measured[name]) for name, case in predicted.items() if name in measured}


def _origin(scale: AcceptanceScale, name: str) -> int:
    """Return the index of the recorded size from which a case is predicted."""
    sizes = next((one for one in scale.unseen if size_label(one) == name), scale.captured[0])
    return nearest(scale.captured, sizes)


def _run_in_turns(own: Path, scale: AcceptanceScale, sizes: Settings, names: Sequence[str], found: Measured
                  ) -> Iterator[AcceptancePoint]:
    """Run cases alternately with a recorded size and add their steps to ``found``. Yield points on cases that cannot
    run, and on the recorded size's time now relative to its recorded time."""
    lab = Lab(scale.device)
    recorded_ns = statistics.median(timed_steps(own / size_label(sizes)))
    base = _Running(lab, scale.workload, {**scale.fixed, **sizes})
    drifts = [statistics.median(base.turn()) / recorded_ns]

    def case(name: str) -> Iterator[AcceptancePoint]:
        other = _Running(lab, scale.workload, _settings(scale)[name])
        turns = [(base.turn(), other.turn()) for _ in range(ROUNDS)]
        drifts.append(statistics.median(time for turn, _ in turns for time in turn) / recorded_ns)
        found[name] = [round(time / drifts[-1]) for _, turn in turns for time in turn]
        yield from ()

    for name in names:
        yield from guarded(f"{name}, run", case(name))
        lab.tidy()
    drift = statistics.median(drifts) - 1.0
    yield noted(f"{size_label(sizes)}, run again over recorded", signed_percent(drift), drift)


class _Running:
    """A running workload that makes a few steps at a time."""

    def __init__(self, lab: Lab, name: str, settings: Mapping[str, Any]) -> None:
        self._lab = lab
        self._workload = workloads.build(name, **{**settings, "device": lab.device})
        self._batches = self._workload.batches()
        for _ in range(WARM_UP):
            self._step()

    def turn(self) -> list[int]:
        """Run some steps, each until the device has finished; return the times of all but the first, ns."""
        return [self._step() for _ in range(BLOCK)][1:]

    def _step(self) -> int:
        self._lab.machine.synchronize()
        start = time.perf_counter_ns()
        self._workload.step(next(self._batches))
        self._lab.machine.synchronize()
        return time.perf_counter_ns() - start


def _products(own: Path, scale: AcceptanceScale, profile: str) -> Iterator[AcceptancePoint]:
    """Judge a profile's predictions of the recorded steps' matrix products.

    On a CPU, other work takes the core at times. This is in a step's times but not in a calibration's, which are the
    fastest visits. So each product there is assumed to be as fast as the fastest equal product.
    """
    models = load_profile(profile)
    for sizes in scale.captured:
        name = size_label(sizes)
        job = read_job([str(own / name)])
        base = baseline_of(job).with_models({models.device.name: models})
        predicted, measured = modelled_families(job, base).get(Family.GEMM.value, (0.0, 0.0))
        of = "those"
        if not scale.is_cuda and measured:
            quickest = modelled_families(replace(job, graphs=[all_as_quick(graph) for graph in job.graphs]), base)
            taken, measured, of = measured, quickest[Family.GEMM.value][1], "the quickest of those"
            yield noted(f"{name}: products of the step over the quickest like them",
                        f"{taken / measured:.2f}, above 1 by what other work had the core for", taken / measured)
        error = predicted / measured - 1.0 if measured else None
        yield near(f"{name}: fitted products over {of} of the step, less 1", error, 0.0, scale.products, percent)


def all_as_quick(graph: ExecutionGraph) -> ExecutionGraph:
    """Return a graph whose operations each take the time of the fastest one with the same name and arguments."""
    ops = graph.ops
    alike = np.stack([ops.name, ops.shapes, ops.dtypes, ops.strides, ops.scalars])
    _, kind = np.unique(alike, axis=1, return_inverse=True)
    least = np.full(len(ops), np.iinfo(np.int64).max)
    np.minimum.at(least, kind.ravel(), ops.duration_ns)
    return replace(graph, ops=replace(ops, duration_ns=least[kind.ravel()]))
