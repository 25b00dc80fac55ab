"""The figures of a result that are worth a curve over runs: a number each, an interval's ends beside its middle."""

from __future__ import annotations

from collections.abc import Mapping

from graph_predictor.prediction.replay import Replay
from graph_predictor.prediction.result import Prediction
from graph_predictor.reports.breakdown import Breakdown
from tracer.errors import ForetraceError


def scalars_of(result: object) -> Mapping[str, float]:
    """Return a result's figures by name; names are paths, which TensorBoard groups by.

    Raises:
        ForetraceError: it is no result that has any.
    """
    if isinstance(result, Prediction):
        return _of_prediction(result)
    if isinstance(result, Replay):
        return {f"step_ms/rank{step.rank}/{step.name}/{which}": ns / 1e6 for step in result.steps
                for which, ns in (("measured", step.measured_ns), ("replayed", step.replayed_ns))}
    if isinstance(result, Breakdown):
        return {"step_ms": result.step_ns / 1e6,
                **{f"critical_path_ms/{name}": us / 1e3 for name, us in result.bounds_us.items() if us}}
    # A gate's figures: what each is now, beside what it was.
    if (verdicts := getattr(result, "verdicts", None)) is not None:
        return {f"{one.program}/{one.quantity}/{which}": float(value) for one in verdicts
                for which, value in (("before", one.before), ("now", one.now)) if value is not None}
    raise ForetraceError(f"{type(result).__name__} has no figures for TensorBoard; give a prediction, a replay, a "
                         "breakdown, or the outcome of a check.")


def _of_prediction(result: Prediction) -> dict[str, float]:
    low, high = result.interval_us
    known = {"peak_memory_gb": None if result.peak_memory_bytes is None else result.peak_memory_bytes / 1e9,
             "mfu": result.mfu, "samples_per_second": result.items_per_second, "cost_per_step": result.cost_per_step}
    return {"step_ms/expected": result.step_time_us / 1e3, "step_ms/low": low / 1e3, "step_ms/high": high / 1e3,
            "gpu_active_ms": result.gpu_active_us / 1e3,
            **{f"critical_path_ms/{name}": us / 1e3 for name, us in result.bounds_us.items() if us},
            **{f"source_share/{name}": share for name, share in result.sources.items()},
            **{name: float(value) for name, value in known.items() if value is not None}}

