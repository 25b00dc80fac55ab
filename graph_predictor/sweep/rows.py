"""A point's row of the table: what was predicted, or why nothing was."""

from __future__ import annotations

from enum import Enum
from typing import Any

import pandas as pd

from graph_predictor.prediction.result import Prediction
from graph_predictor.request.study import Study
from graph_predictor.sweep.space import Point, SweepError
from tracer.errors import ForetraceError

COLUMNS = ("times", "step_time_us", "low_us", "high_us", "gpu_active_us", "bound", "ranks", "items_per_second",
           "mfu", "peak_memory_bytes", "cost_per_step", "cost_per_million_items", "measured_share", "warnings",
           "refused")
"""After the axes' columns. ``times`` says whether they are under the profiler or without it. Times in µs with the ends
of the 80% interval; ``measured_share`` of the step time rests on measured durations; ``refused`` says why a point was
not priced, and is empty for the others."""


def row(study: Study, point: Point, price_per_hour: float | None) -> dict[str, Any]:
    """Predict one point: plain values by column."""
    try:
        result = study.predict(point.configuration, price_per_hour=price_per_hour, path=False)
    except ForetraceError as error:
        return {**point.values, **dict.fromkeys(COLUMNS), "refused": " ".join(str(error).split())}
    return {**point.values, **_results(result)}


def _results(result: Prediction) -> dict[str, Any]:
    items = result.items_per_second
    cost = result.cost_per_step
    per_step = None if items is None else items * result.step_time_us / 1e6
    return {
        "times": result.times, "step_time_us": result.step_time_us, "low_us": result.interval_us[0],
        "high_us": result.interval_us[1],
        "gpu_active_us": result.gpu_active_us, "bound": result.bound, "ranks": len(result.per_rank),
        "items_per_second": items, "mfu": result.mfu, "peak_memory_bytes": result.peak_memory_bytes,
        "cost_per_step": cost,
        "cost_per_million_items": None if cost is None or not per_step else cost / per_step * 1e6,
        "measured_share": result.sources.get("measured", 0.0), "warnings": " ".join(result.warnings), "refused": "",
    }


class Goal(str, Enum):
    """The measure by which points are ranked."""

    THROUGHPUT = "throughput"
    TIME = "time"
    COST = "cost"


_COLUMN = {Goal.THROUGHPUT: ("items_per_second", False), Goal.TIME: ("step_time_us", True)}
_COSTS = ("cost_per_million_items", "cost_per_step")


def feasible(table: pd.DataFrame, memory_limit: float | None = None) -> pd.DataFrame:
    """The points that were priced and fit.

    Args:
        table: of ``Sweep``.
        memory_limit: bytes of a device; points of unknown peak memory are kept.
    """
    kept = table[table["step_time_us"].notna()]
    if memory_limit is None:
        return kept
    return kept[~(kept["peak_memory_bytes"].astype(float) > memory_limit)]


def ranked(table: pd.DataFrame, goal: Goal, memory_limit: float | None = None) -> pd.DataFrame:
    """The feasible points, the best first.

    Raises:
        SweepError: nothing says how good a point is.
    """
    kept = feasible(table, memory_limit)
    if goal is Goal.COST:
        column = next((name for name in _COSTS if kept[name].notna().any()), None)
        if column is None and len(kept):
            raise SweepError("No point has a cost; give the price of a device and hour with --price.")
        up = True
    else:
        column, up = _COLUMN[goal]
        if len(kept) and not kept[column].notna().any():
            raise SweepError("No point says how many samples a step has; name the batch with --set batch=OLD:NEW,…, "
                             "or rank by time.")
    if not len(kept):
        return kept
    return kept.sort_values(str(column), ascending=up, kind="stable", na_position="last")
