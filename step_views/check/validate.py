"""``validate``: predict a program at sizes that were never run, then run it at these sizes and compare.

::

    capture ──> predict the others ──> run them, without the profiler ──> errors, bias, coverage

All sizes are predicted before any of them runs. The measured step is the median of the steps that the capture times
without the profiler; other work on the machine affects it.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from graph_predictor.figures import signed_percent
from graph_predictor.prediction.operation_costs import computing_operations
from graph_predictor.prediction.predictor import Baseline
from graph_predictor.prediction.replay import replay
from graph_predictor.request.study import Configuration, Study
from graph_predictor.synthesis.baseline import baseline_of
from kernel_models.device import DeviceSpec
from kernel_models.op_call import OpCall
from kernel_models.operation import Operation, calls_of
from kernel_models.pricing import Models, price
from kernel_models.profile import load_profile
from kernel_models.trace_calls import FAMILIES
from step_views.check.measure import CheckError, StoredCapture
from tracer.cores import RUN_MODULE
from tracer.errors import ForetraceError
from tracer.graph import ExecutionGraph
from tracer.job import Job, read_job
from tracer.lazy import pandas as pd
from tracer.shown import Chart, ChartSeries, Shown
from tracer.user_code import with_sizes

LEAST_SIZED = 0.1
"""Kernel models are judged only if at least this share of device time has recorded sizes."""

Pieces = tuple[list[tuple[OpCall, ...]], np.ndarray]
"""Calls of each piece of work, and its measured time in ns."""


class Accuracy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Errors of one capture's predictions as shares of the measured time; signed ones are predicted over measured − 1.

    Attributes:
        step: signed error of the step predicted from the recorded window, against the median step (without the profiler
            if such steps were timed). On a CPU it is small by construction: the host's own times are played back.
        replay: median absolute error of the replayed steps.
        device: signed error of all device work (on a CPU: of operations that compute), priced by kernel models from its
            sizes alone, without collectives and work without sizes. ``None`` if the device or sizes are unknown.
        families: sum over families of |predicted − measured| of that work: counts errors that cancel in ``device``.
    """

    step: float | None
    replay: float | None
    device: float | None
    families: float | None

    def figures(self) -> dict[str, float]:
        """Return the known figures by name."""
        return {name: value for name in FIGURES if (value := getattr(self, name)) is not None}


FIGURES: Mapping[str, str] = {
    "step": "predicted step time", "replay": "replayed steps", "device": "modelled device time",
    "families": "modelled device time by family"}
"""Names of the figures and their descriptions."""


def accuracy(capture: StoredCapture, profiles: Mapping[str, Models] | None = None) -> Accuracy:
    """Predict a capture again and return the errors. ``profiles`` are fitted models by device name; other devices use
    data sheets. Raises ``CheckError`` if the capture cannot be predicted."""
    job = capture.job
    try:
        baseline = baseline_of(job).with_models(profiles or {})
        again = replay(job.graphs)
    except ForetraceError as error:
        raise CheckError(f"The capture {capture.name} cannot be predicted: {error}") from error
    device, families = _modelled(job, baseline)
    return Accuracy(step=_step(baseline), replay=_rounded(again.median_abs_error), device=device,
                    families=families)


def _step(baseline: Baseline) -> float | None:
    predicted = baseline.predict()
    measured_us = (predicted.recorded_us if predicted.profiled else predicted.unprofiled_us) or 0.0
    return _rounded(predicted.step_time_us / measured_us - 1.0) if measured_us else None


def _modelled(job: Job, baseline: Baseline) -> tuple[float | None, float | None]:
    """Return the figures ``device`` and ``families`` of ``Accuracy``."""
    families = modelled_families(job, baseline)
    if not families:
        return None, None
    predicted, measured = (sum(each) for each in zip(*families.values(), strict=True))
    return (_rounded(predicted / measured - 1.0),
            _rounded(sum(abs(said - took) for said, took in families.values()) / measured))


def modelled_families(job: Job, baseline: Baseline) -> dict[str, tuple[float, float]]:
    """Return the (modelled, recorded) time of a job's work by family, ns. The kernel models do not use recorded times.
    Empty where the device is unknown or sizes are missing."""
    scenario = baseline.scenario
    if scenario.devices.source is None:
        return {}
    if scenario.devices.source.vendor == "host" and not len(scenario.built.program.kernel_item):
        pieces, total = _computing(job.graphs)
    else:
        work = scenario.work
        rows = np.flatnonzero(work.sized).tolist()
        pieces = [work.calls[work.call_row[row]] for row in rows], work.measured_ns[rows].astype(np.float64)
        total = float(work.measured_ns.sum())
    calls, measured = pieces
    if not len(measured) or measured.sum() < LEAST_SIZED * total:
        return {}
    predicted = _priced(calls, scenario.devices.source, scenario.devices.source_models)
    family = np.array([FAMILIES.index(of[0].family) for of in calls])
    by_family = [np.bincount(family, weights=ns, minlength=len(FAMILIES)).tolist() for ns in (predicted, measured)]
    return {one.value: (said, took) for one, said, took in zip(FAMILIES, *by_family, strict=True) if took or said}


def _priced(pieces: Sequence[tuple[OpCall, ...]], spec: DeviceSpec, models: Models | None) -> np.ndarray:
    """Return the models' time for each group of calls, ns."""
    owner = np.repeat(np.arange(len(pieces)), [len(calls) for calls in pieces])
    times = price([call for calls in pieces for call in calls], spec, models).times_us
    return np.bincount(owner, weights=times, minlength=len(pieces)) * 1e3


def _computing(graphs: Sequence[ExecutionGraph]) -> tuple[Pieces, float]:
    """Return the steps' operations of known sizes that compute on a CPU, and the time of all that compute, ns."""
    calls: list[tuple[OpCall, ...]] = []
    times: list[float] = []
    total = 0.0
    for graph in graphs:
        ops = graph.ops
        rows = np.flatnonzero(computing_operations(graph) & (ops.step >= 0) & (ops.duration_ns > 0))
        total += float(ops.duration_ns[rows].sum())
        known: dict[tuple[int, ...], tuple[OpCall, ...]] = {}
        for row in rows.tolist():
            key = tuple(int(column[row]) for column in (ops.name, ops.shapes, ops.dtypes, ops.strides, ops.scalars))
            if key not in known:
                known[key] = calls_of(Operation.from_graph(graph, row))
            if known[key] and not any("unsized" in call.flags for call in known[key]):
                calls.append(known[key])
                times.append(float(ops.duration_ns[row]))
    return (calls, np.array(times)), total


def _rounded(value: float) -> float:
    """Round to 10⁻⁶, because stored values must not depend on the last bits of a machine's arithmetic."""
    return round(value, 6) + 0.0


Sizes = Mapping[str, int]
FORETRACE = (*RUN_MODULE, "foretrace")


def size_label(sizes: Sizes) -> str:
    """Return sizes as one word, such as "batch=8,seq=64"."""
    return ",".join(f"{name}={size}" for name, size in sizes.items())


@dataclass(frozen=True)
class ValidatedProgram:
    """A program that takes its sizes as arguments.

    Attributes:
        script: path of a script; its ``arguments`` may contain {NAME} for a size, else sizes are added as --NAME SIZE.
        workload: instead of a script, the name of a workload of the suite, with ``fixed`` settings.
        options: further options of foretrace capture.
    """

    script: str | None = None
    arguments: tuple[str, ...] = ()
    workload: str | None = None
    fixed: Mapping[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()

    def command(self, sizes: Sizes, out: Path) -> list[str]:
        """Return the words of the command that captures the program at these sizes."""
        begin = ["capture", "--out", str(out), *self.options]
        if self.workload is not None:
            settings = {**self.fixed, **sizes}
            return [*begin, "--workload", self.workload, *(f"--set={name}={value}" for name, value in settings.items())]
        return [*begin, str(self.script), "--", *with_sizes(self.arguments, sizes)]


@dataclass(frozen=True, slots=True)
class ValidatedCase:
    """One size: the prediction made before the run, with its 80% interval, and the measured time, µs."""

    sizes: Sizes
    predicted_us: float
    low_us: float
    high_us: float
    measured_us: float
    steps: int
    """Number of timed steps."""
    bound: str = ""
    warnings: tuple[str, ...] = ()

    @property
    def error(self) -> float:
        """Predicted over measured time, minus 1."""
        return self.predicted_us / self.measured_us - 1.0

    @property
    def covered(self) -> bool:
        """Whether the measured time is inside the interval."""
        return self.low_us <= self.measured_us <= self.high_us


@dataclass(frozen=True, repr=False)
class Validation(Shown):
    """Predictions compared with later measurements; ``captured`` are the sizes from which they were made."""

    captured: Sequence[Sizes]
    cases: Sequence[ValidatedCase]
    notes: tuple[str, ...] = ()

    @property
    def mape(self) -> float:
        """Mean absolute error, as a share."""
        return float(np.mean([abs(case.error) for case in self.cases]))

    @property
    def bias(self) -> float:
        """Mean signed error, as a share."""
        return float(np.mean([case.error for case in self.cases]))

    @property
    def coverage(self) -> float:
        """Share of measured times inside their 80% interval."""
        return float(np.mean([case.covered for case in self.cases]))

    def headline(self) -> str:
        """Return the errors in one line."""
        inside = sum(case.covered for case in self.cases)
        number = len(self.cases)
        return (f"mean error {self.mape:.1%}, bias {signed_percent(self.bias)}; {inside} of {number} measured time"
                f"{'' if number == 1 else 's'} in the 80% interval")

    def tables(self) -> Mapping[str, Callable[[], pd.DataFrame]]:
        """Return ``cases``: sizes, predicted and measured step (µs), interval, error (as a share), and coverage."""
        return {"cases": lambda: pd.DataFrame([{
            **case.sizes, "predicted_us": case.predicted_us, "low_us": case.low_us, "high_us": case.high_us,
            "measured_us": case.measured_us, "error": case.error, "covered": case.covered} for case in self.cases])}

    def chart(self) -> Chart:
        """Return a bar chart of predicted times, with their intervals, and measured times."""
        return Chart("bars", self.headline(), [size_label(case.sizes) for case in self.cases], [
            ChartSeries("predicted", [case.predicted_us / 1e3 for case in self.cases],
                        [case.low_us / 1e3 for case in self.cases], [case.high_us / 1e3 for case in self.cases]),
            ChartSeries("measured", [case.measured_us / 1e3 for case in self.cases])], "ms")

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {"captured": [dict(sizes) for sizes in self.captured], "mape": self.mape, "bias": self.bias,
                "coverage": self.coverage, "cases": [{
                    "sizes": dict(case.sizes), "predicted_us": case.predicted_us,
                    "interval_us": [case.low_us, case.high_us], "measured_us": case.measured_us, "steps": case.steps,
                    "error": case.error, "covered": case.covered, "bound": case.bound,
                    "warnings": list(case.warnings)} for case in self.cases], "notes": list(self.notes)}


@dataclass(frozen=True, slots=True)
class PredictedCase:
    """The prediction for a size, made before the run."""

    sizes: Sizes
    predicted_us: float
    interval_us: tuple[float, float]
    bound: str
    warnings: tuple[str, ...]

    def beside(self, measured: Sequence[int]) -> ValidatedCase:
        """Return the case with its prediction and the median of its timed steps (ns)."""
        return ValidatedCase(self.sizes, self.predicted_us, *self.interval_us, float(np.median(measured)) / 1e3,
                             len(measured), self.bound, self.warnings)


def capture_program(program: ValidatedProgram, sizes: Sizes, out: Path) -> list[int]:
    """Capture a program at some sizes in a new process, and return the steps timed without the profiler, ns. Raises
    ``CheckError`` with the end of the program's output if it fails."""
    words = program.command(sizes, out)
    done = subprocess.run([*FORETRACE, *words], capture_output=True, text=True, errors="replace", check=False,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise CheckError(f"foretrace {shlex.join(words)} ended with code {done.returncode}: "
                         f"{' '.join(said[-2:])[-500:] or 'it said nothing'}")
    return timed_steps(out)


def timed_steps(path: Path) -> list[int]:
    """Return the steps of a capture's slowest rank that were timed without the profiler, ns. Raises ``CheckError`` if
    there are none."""
    ranks = [graph.meta.unprofiled_step_ns for graph in read_job(path).graphs if graph.meta.unprofiled_step_ns]
    if not ranks:
        raise CheckError(f"{path} has no steps that were timed without the profiler: capture with --timed 10 or more.")
    return max(ranks, key=lambda steps: float(np.median(steps)))


def predict_cases(captures: Sequence[tuple[Sizes, Path]], wanted: Sequence[Sizes], *, profiles: Sequence[str] = (),
                  code: str | None = None, selected: float | None = None) -> list[PredictedCase]:
    """Predict a program's step at some sizes, each from the nearest of its captures. With ``code``
    ("train.py:build") the program is traced again at each size; masks made of data then select the share ``selected``.
    Raises ``ForetraceError`` if a size cannot be predicted."""
    (first, path), *others = captures
    study = Study(read_job([str(path)]), profiles=[load_profile(each) for each in profiles])
    found = []
    for sizes in wanted:
        changed = {name: size for name, size in sizes.items() if others or first.get(name) != size}
        said = tuple(f"{name}={first[name]}:{size}" if name in first else f"{name}={size}"
                     for name, size in changed.items())
        also = tuple(f"{other}:{size_label(at)}" for at, other in others) if code is None else ()
        one = study.predict(Configuration(sizes=said, also=also, code=code if said else None,
                                          selected=selected if said else None))
        found.append(PredictedCase(sizes, one.step_time_us, one.interval_us, one.bound, tuple(one.warnings)))
    return found


def validate(program: ValidatedProgram, sizes: Sequence[Sizes], out: str | os.PathLike[str], *, captures: int = 1,
             profiles: Sequence[str] = (), code: str | None = None, selected: float | None = None) -> Validation:
    """Capture a program at the first sizes, predict it at the others, run it at these, and compare.

    Args:
        program: the program.
        sizes: sizes of each run, all with the same names.
        out: a directory for the captures; it may have those of an earlier validation, which are replaced.
        captures: number of sizes that are captured; the others are predicted.
        profiles, code, selected: see ``predict_cases``.

    Raises:
        CheckError: there is nothing to predict, sizes differ in their names or repeat, or a run failed.
        ForetraceError: a size cannot be predicted.
    """
    if captures < 1 or len(sizes) <= captures:
        raise CheckError(f"{len(sizes)} sizes are given and {max(captures, 0)} are captured, so that none is left to "
                         "predict; give one more --set.")
    names = {tuple(sorted(one)) for one in sizes}
    labels = [size_label(one) for one in sizes]
    if len(names) > 1 or not all(sizes):
        raise CheckError("Each --set must name the same sizes, such as --set batch=4,seq=64 --set batch=8,seq=128.")
    if len(set(labels)) < len(labels):
        raise CheckError("A size is given twice; the others are to be predicted without having been seen.")
    folder = Path(out)
    again = replace(program, options=(*program.options, "--replace"))
    seen = []
    for one in sizes[:captures]:
        capture_program(again, one, folder / size_label(one))
        seen.append((one, folder / size_label(one)))
    said = predict_cases(seen, sizes[captures:], profiles=profiles, code=code, selected=selected)
    cases = [case.beside(capture_program(again, case.sizes, folder / size_label(case.sizes))) for case in said]
    notes = (f"Measured is the median of {min(case.steps for case in cases)} steps with no profiler on.",)
    return Validation(list(sizes[:captures]), cases, notes)
