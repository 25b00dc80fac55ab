"""Points that are feasible, the best first."""

from __future__ import annotations

from enum import Enum

import pandas as pd

from graph_predictor.sweep.space import SweepError


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
