"""A workload's step with each collective done by the backend that is best for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from graph_predictor.build import Built
from graph_predictor.comm_pricing import RecordedCollective, find_collectives
from graph_predictor.critical_path import step_items
from graph_predictor.engine import simulate
from kernel_models.collectives import CollectiveBatch, CommError, Topology
from kernel_models.collectives.tuner import MARGIN, Predict


@dataclass(slots=True)
class TunedWorkload:
    """Mean step (ns) by backend, NaN where it lacks a collective, and with the best for each.

    ``winner`` is the backend of each collective.
    """

    collectives: list[RecordedCollective]
    winner: list[str]
    step_ns: dict[str, float]
    best_ns: float
    default: str

    @property
    def gain(self) -> float:
        """The default's step over the best's, less one."""
        return self.step_ns[self.default] / self.best_ns - 1.0 if self.best_ns else 0.0


def tune_workload(built: Built, backends: Mapping[str, Predict], on: Topology,
                  default: str | None = None) -> TunedWorkload:
    """Simulate a recorded job's step with each backend and with the best for each collective.

    Raises:
        CommError: The job has no collective whose size is known, or no backend was measured for one of them.
    """
    collectives, _ = find_collectives(built, on)
    if not collectives:
        raise CommError("The workload has no collectives of known size; record it with shapes.")
    names = list(backends)
    default = default or next((name for name in names if name.startswith("nccl")), names[0])
    batch = CollectiveBatch.from_calls([c.call for c in collectives])
    times = {name: backends[name](batch).time_us for name in names}
    table = np.stack([times[name] for name in names])
    if not np.isfinite(table).any(axis=0).all():
        lacking = collectives[int(np.flatnonzero(~np.isfinite(table).any(axis=0))[0])].call
        raise CommError(f"No backend was measured for {lacking.kind.label} over {lacking.ranks} ranks, which the "
                        "workload does; measure it with 'foretrace comm bench'.")
    best = np.nanargmin(table, axis=0)
    own = times[default]
    stays = np.isfinite(own) & (own <= table[best, np.arange(len(best))] * (1 + MARGIN))
    best = np.where(stays, names.index(default), best)
    step = {name: _mean_step(built, collectives, times[name]) if np.isfinite(times[name]).all() else float("nan")
            for name in names}
    return TunedWorkload(collectives, [names[i] for i in best], step,
                         _mean_step(built, collectives, table[best, np.arange(len(best))]), default)


def _mean_step(built: Built, collectives: list[RecordedCollective], time_us: np.ndarray) -> float:
    duration = built.program.kernel_duration.copy()
    for collective, value in zip(collectives, time_us.tolist(), strict=True):
        for position, kernel in collective.members:
            duration[int(built.program.kernel_ptr[position]) + kernel] = round(value * 1e3)
    simulated = simulate(built.program.with_durations(duration))
    steps = [float(simulated.item_end[end] - simulated.item_end[begin]) for _, _, begin,
             end in step_items(built.program)]
    return float(np.mean(steps)) if steps else float(simulated.kernel_end.max(initial=0))
