"""What a survey says of a fleet: how its steps are distributed, where GPU time is lost, and what got slower.

A job loses the time of its critical path that is no computation, on all of its GPUs (``slower.path_by_cause``)::

    GPU-seconds lost an hour = 3,600 s × GPUs × time of the path in a cause / time of the path
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from graph_predictor.simulation.program import Bound
from step_views.survey.slower import Regression, Untold, path_by_cause, regressions
from step_views.survey.table import read_tables
from tracer.shown import Shown, frame_of

if TYPE_CHECKING:
    import pandas as pd

HOUR_S = 3600.0
LOST = [bound.label for bound in Bound if bound is not Bound.COMPUTE]
"""Causes: the critical path's time that is no computation."""


@dataclass(frozen=True, slots=True)
class FleetQuantiles:
    """A quantity over the jobs that have it."""

    quantity: str
    unit: str
    jobs: int
    p10: float
    median: float
    p90: float


@dataclass(frozen=True, slots=True)
class LostTime:
    """A cause over the whole fleet: ``jobs`` lose more to it than to any other; ``share`` is of all GPUs' time."""

    cause: str
    gpu_s_an_hour: float
    share: float
    jobs: int


@dataclass(frozen=True, slots=True)
class LosingJob:
    """What a job loses to a cause, and the change that would save most of its step; µs a step, 80% interval."""

    cause: str
    job: str
    gpu_s_an_hour: float
    share: float
    step_time_us: float
    change: str
    gain_us: float | None
    low_us: float | None
    high_us: float | None


@dataclass(repr=False)
class Fleet(Shown):
    """A survey's jobs together.

    Attributes:
        jobs, predicted, unreadable: jobs in the table with these tags, those with a predicted step, those not read.
        distributions: of times and shares.
        lost: by cause, the largest first.
        worst: for each of these causes the jobs that lose most.
        slower: what got slower since the other survey, the most GPU time lost first; ``compared`` programs.
        untold: programs with too few steps to tell whether they got slower by 3%.
        notes: what to know when reading it.
    """

    jobs: int
    predicted: int
    unreadable: int
    distributions: list[FleetQuantiles]
    lost: list[LostTime]
    worst: list[LosingJob]
    slower: list[Regression] = field(default_factory=list)
    untold: list[Untold] = field(default_factory=list)
    compared: int | None = None
    notes: list[str] = field(default_factory=list)

    def headline(self) -> str:
        """Say what costs most in one line."""
        said = f"{self.jobs:,} jobs"
        if self.lost:
            said += f"; {self.lost[0].cause} costs {self.lost[0].share:.0%} of their GPUs' time"
        return said if self.compared is None else f"{said}; {len(self.slower):,} of {self.compared:,} programs slower"

    def tables(self) -> Mapping[str, Callable[[], pd.DataFrame]]:
        """``lost``, ``worst``, ``slower``, ``untold`` and ``distributions``."""
        return {name: partial(frame_of, map(asdict, getattr(self, name)))
                for name in ("lost", "worst", "slower", "untold", "distributions")}

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def fleet(table: str | os.PathLike[str], *, since: str | os.PathLike[str] | None = None, tags: Sequence[str] = (),
          top: int = 3) -> Fleet:
    """Say what a survey's table holds.

    Args:
        table: the directory that ``survey`` wrote.
        since: an earlier survey: which of its programs are slower now.
        tags: only jobs that have all of these; of the earlier survey all count.
        top: jobs that are named for each cause.

    Raises:
        SurveyError: a table is no survey.
    """
    tables = read_tables(table)
    wanted = {tags} if isinstance(tags, str) else set(tags)
    rows = [row for row in tables["jobs"].to_pylist() if wanted <= set(row["tags"] or ())]
    best = {row["job"]: row for row in tables["opportunities"].to_pylist() if row["place"] == 0}
    known = [row for row in rows if row["step_time_us"]]
    lost, worst = _lost(known, best, top)
    found = Fleet(len(rows), len(known), sum(bool(row["error"]) for row in rows), _distributions(known), lost, worst)
    if len(known) < len(rows) - found.unreadable:
        why = "what their devices did, or their steps, are not known (column not_predicted)"
        found.notes.append(f"{len(rows) - found.unreadable - len(known):,} jobs were read but not predicted: {why}.")
    if since is not None:
        before = read_tables(since)
        found.slower, found.untold, found.compared = regressions(
            (before["jobs"].to_pylist(), before["families"].to_pylist()), (rows, tables["families"].to_pylist()))
        versions = {row["foretrace"] for row in (*rows, *before["jobs"].to_pylist())}
        if len(versions) > 1:
            found.notes.append(f"The surveys are of several versions of foretrace ({', '.join(sorted(versions))}), "
                               "which may differ in what they say of equal recordings; survey the older ones again.")
    return found


def _distributions(rows: Sequence[Mapping[str, Any]]) -> list[FleetQuantiles]:
    """Return quantiles over the jobs."""
    def share(*columns: str) -> list[float]:
        return [100 * sum(row[column] or 0.0 for column in columns) / row["step_time_us"] for row in rows]

    on_gpu = [row for row in rows if row["gpu_active_us"]]
    values = {
        ("step", "ms"): [row["step_time_us"] / 1e3 for row in rows],
        ("GPU active", "% of the step"): [100 * row["gpu_active_us"] / row["step_time_us"] for row in on_gpu],
        ("host on the critical path", "%"): share("host_us", "launch_us", "sync_us"),
        ("exposed communication", "%"): share("exposed_communication_us"),
        ("waiting for a rank", "%"): share("waiting_for_rank_us"),
        ("data loading", "%"): share("saves_loading_us"),
        ("memory copies", "%"): share("memory_copy_us"),
        ("host outside operations", "%"): [100 * row["host_outside_ops_share"] for row in rows
                                           if row["host_outside_ops_share"] is not None],
        ("peak memory", "GB"): [row["peak_memory_bytes"] / 1e9 for row in rows if row["peak_memory_bytes"]],
        ("ranks", ""): [float(row["world_size"]) for row in rows],
    }
    return [FleetQuantiles(*name, len(own), *map(float, np.quantile(own, (0.1, 0.5, 0.9))))
            for name, own in values.items() if own]


def _lost(rows: Sequence[Mapping[str, Any]], best: Mapping[str, Mapping[str, Any]], top: int) -> tuple[
        list[LostTime], list[LosingJob]]:
    """Return what is lost by cause, and the jobs that lose most."""
    rows = [row for row in rows if row["gpu_active_us"]]
    paths = [path_by_cause(row) for row in rows]
    gpus = np.array([row["world_size"] for row in rows], np.float64)
    if not rows:
        return [], []
    shares = np.array([[path[label] / (sum(path.values()) or 1.0) for label in LOST] for path in paths])
    seconds = HOUR_S * gpus[:, None] * shares
    largest = np.where(seconds.max(axis=1) > 0, seconds.argmax(axis=1), -1)
    lost = [LostTime(label, float(seconds[:, at].sum()), float(seconds[:, at].sum() / (HOUR_S * gpus.sum())),
                     int((largest == at).sum())) for at, label in enumerate(LOST)]
    worst = []
    for at, label in sorted(enumerate(LOST), key=lambda each: -lost[each[0]].gpu_s_an_hour):
        for place in np.argsort(-seconds[:, at], kind="stable")[:top].tolist():
            if seconds[place, at] > 0:
                row, change = rows[place], best.get(rows[place]["job"], {})
                worst.append(LosingJob(label, row["job"], float(seconds[place, at]), float(shares[place, at]),
                                       row["step_time_us"], change.get("change", ""), change.get("gain_us"),
                                       change.get("low_us"), change.get("high_us")))
    return sorted((one for one in lost if one.gpu_s_an_hour), key=lambda one: -one.gpu_s_an_hour), worst
