"""Accuracy of the models on a recorded step: their times beside the measured ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from graph_predictor.check.captures import CheckError, StoredCapture
from graph_predictor.prediction.overheads import computing_operations
from graph_predictor.prediction.predictor import Baseline
from graph_predictor.prediction.replay import replay
from graph_predictor.synthesis.baseline import baseline_of
from kernel_models.device import DeviceSpec
from kernel_models.op_call import OpCall
from kernel_models.operation import Operation, calls_of
from kernel_models.pricing import Models, price
from kernel_models.trace_calls import FAMILIES
from tracer.errors import ForetraceError
from tracer.graph import ExecutionGraph
from tracer.job import Job

LEAST_SIZED = 0.1
"""Least share of device time with recorded sizes for which kernel models are judged."""

Pieces = tuple[list[tuple[OpCall, ...]], np.ndarray]
"""Calls of each piece of work, and its measured time in ns."""


class Accuracy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Errors of one capture's predictions, as shares of what was measured; signed ones are predicted over measured − 1.

    Attributes:
        step: signed, of the step with nothing watching (where that was timed, else as recorded) as predicted from the
            recorded window, against the median of the measured steps. On a CPU it closes by construction: the host's
            own times are played back.
        replay: median |error| of the replayed steps.
        device: signed, of the device's work in all (on a CPU: of the operations that compute) as the kernel models
            price it without looking at its times. Collectives and work without sizes take no part. None where the
            device is unknown or sizes are lacking.
        families: Σ |predicted − measured| over the families of work, of the same: what cancels in ``device``.
    """

    step: float | None
    replay: float | None
    device: float | None
    families: float | None

    def figures(self) -> dict[str, float]:
        """Return the figures that are known, by name."""
        return {name: value for name in FIGURES if (value := getattr(self, name)) is not None}


FIGURES: Mapping[str, str] = {
    "step": "predicted step time", "replay": "replayed steps", "device": "modelled device time",
    "families": "modelled device time by family"}
"""Figures and what they are of, in words."""


def accuracy(capture: StoredCapture, profiles: Mapping[str, Models] | None = None) -> Accuracy:
    """Predict a capture again.

    Args:
        capture: what was recorded.
        profiles: fitted models by name of the device; data sheets elsewhere.

    Raises:
        CheckError: it cannot be predicted from.
    """
    job = capture.job
    try:
        baseline = baseline_of(job).with_models(profiles or {})
        again = replay(job.graphs)
    except ForetraceError as error:
        raise CheckError(f"The capture {capture.name} cannot be predicted: {error}") from error
    device, families = _modelled(job, baseline)
    return Accuracy(step=_step(job, baseline), replay=_rounded(again.median_abs_error), device=device,
                    families=families)


def _step(job: Job, baseline: Baseline) -> float | None:
    predicted = baseline.predict()
    measured_us = (predicted.recorded_us if predicted.profiled else predicted.unprofiled_us) or 0.0
    return _rounded(predicted.step_time_us / measured_us - 1.0) if measured_us else None


def _modelled(job: Job, baseline: Baseline) -> tuple[float | None, float | None]:
    """``device`` and ``families``."""
    scenario = baseline.scenario
    if scenario.devices.source is None:
        return None, None
    if scenario.devices.source.vendor == "host" and not len(scenario.built.program.kernel_item):
        pieces, total = _computing(job.graphs)
    else:
        work = scenario.work
        rows = np.flatnonzero(work.sized).tolist()
        pieces = [work.calls[work.group[row]] for row in rows], work.measured_ns[rows].astype(np.float64)
        total = float(work.measured_ns.sum())
    calls, measured = pieces
    if not len(measured) or measured.sum() < LEAST_SIZED * total:
        return None, None
    predicted = _priced(calls, scenario.devices.source, scenario.devices.source_models)
    family = np.array([FAMILIES.index(of[0].family) for of in calls])
    by_family = [np.bincount(family, weights=ns, minlength=len(FAMILIES)) for ns in (predicted, measured)]
    return (_rounded(float(predicted.sum() / measured.sum()) - 1.0),
            _rounded(float(np.abs(by_family[0] - by_family[1]).sum() / measured.sum())))


def _priced(pieces: Sequence[tuple[OpCall, ...]], spec: DeviceSpec, models: Models | None) -> np.ndarray:
    """Time of each piece by the models, ns."""
    owner = np.repeat(np.arange(len(pieces)), [len(calls) for calls in pieces])
    times = price([call for calls in pieces for call in calls], spec, models).times_us
    return np.bincount(owner, weights=times, minlength=len(pieces)) * 1e3


def _computing(graphs: Sequence[ExecutionGraph]) -> tuple[Pieces, float]:
    """The operations of the steps that compute on a CPU and whose sizes are known; and the time of all that do, ns."""
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
    """Round to 10⁻⁶: what is stored must not change with the last bits of a machine's arithmetic."""
    return round(value, 6) + 0.0
