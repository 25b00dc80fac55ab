"""A workload's step with each collective done by the backend that is best for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from graph_predictor.comm.recorded_calls import RecordedCollective, find_collectives, with_transfers
from graph_predictor.prediction.replay import replayed_steps, slowest_mean_ns
from graph_predictor.simulation.build import Built
from graph_predictor.simulation.engine import simulate
from kernel_models.collectives import CollectiveBatch, CommError, Topology
from kernel_models.collectives.measurements import same_gpu
from kernel_models.collectives.tuner import MARGIN, Predict
from tracer.arrays import Bool


@dataclass(slots=True)
class TunedWorkload:
    """Mean step (ns) with each backend, and with the best backend for each collective.

    Collectives that a backend was not measured for (``missing``, by backend) run with the default backend; if the
    default lacks them too, with the fastest that was measured. Those measured with no backend (``unmeasured``) keep
    their recorded times. ``winner`` is each collective's backend, empty if unmeasured. ``notes`` are sentences.
    """

    collectives: list[RecordedCollective]
    winner: list[str]
    step_ns: dict[str, float]
    best_ns: float
    default: str
    missing: dict[str, list[str]] = field(default_factory=dict)
    unmeasured: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def gain(self) -> float:
        """Return the step with the default backend / the best step, less one."""
        return self.step_ns[self.default] / self.best_ns - 1.0 if self.best_ns else 0.0


def tune_workload(built: Built, backends: Mapping[str, Predict], on: Topology,
                  default: str | None = None) -> TunedWorkload:
    """Simulate a recorded job's step with each backend and with the best for each collective.

    Raises:
        CommError: The job has no collective of known size, no backend was measured for any of them, or no backend is
            called ``default``.
    """
    collectives, _ = find_collectives(built, on)
    if not collectives:
        raise CommError("The workload has no collectives of known size; record it with shapes.")
    names = list(backends)
    default = default or next((name for name in names if name.startswith("nccl")), names[0])
    if default not in names:
        raise CommError(f"There is no backend {default!r} among {', '.join(names)}.")
    batch = CollectiveBatch.from_calls([c.call for c in collectives])
    table = np.stack([backends[name](batch).time_us for name in names])
    has = np.isfinite(table)
    if not has.any():
        lacking = ", ".join(_lacking(collectives, has[0]))
        raise CommError(f"No backend was measured for what the workload does ({lacking}); measure it with 'foretrace "
                        "comm bench'.")
    own = table[names.index(default)]
    known: Bool = np.asarray(has.any(axis=0))
    best = np.where(has, table, np.inf).argmin(axis=0)
    best_us = np.where(known, table[best, np.arange(len(best))], [c.recorded_ns / 1e3 for c in collectives])
    best = np.where(np.isfinite(own) & (own <= best_us * (1 + MARGIN)), names.index(default), best)
    base_us = np.where(np.isfinite(own), own, best_us)
    chosen_us = np.where(known, table[best, np.arange(len(best))], best_us)
    step = {name: _mean_step(built, collectives, np.where(mine, table[i], base_us))
            for i, (name, mine) in enumerate(zip(names, has, strict=True))}
    missing = {name: _lacking(collectives, mine) for name, mine in zip(names, has, strict=True) if not mine.all()}
    return TunedWorkload(collectives, [names[i] if k else "" for i, k in zip(best, known, strict=True)], step,
                         _mean_step(built, collectives, chosen_us), default, missing, _lacking(collectives, known),
                         _other_devices(built, on))


def _lacking(collectives: list[RecordedCollective], has: Bool) -> list[str]:
    """Return the collectives that were not measured, such as "all_to_all over 8 ranks"."""
    return sorted({f"{c.call.kind.label} over {c.call.ranks} ranks"
                   for c, mine in zip(collectives, has, strict=True) if not mine})


def _other_devices(built: Built, on: Topology) -> list[str]:
    """Return a note if the workload was recorded on another GPU than the profiles were measured on."""
    found = sorted({g.meta.device for g in built.graphs if g.meta.device and not same_gpu(g.meta.device, on)})
    if not found:
        return []
    return [f"The workload was recorded on {', '.join(found)}, and the profiles were measured on {on.node.name} "
            f"({on.node.device}): the steps mix the computation of the one with the collectives of the other."]


def _mean_step(built: Built, collectives: list[RecordedCollective], time_us: np.ndarray) -> float:
    simulated = simulate(with_transfers(built, collectives, time_us))
    steps = replayed_steps(built, built.program, simulated, simulated)
    step_ns = slowest_mean_ns((step.rank, step.replayed_ns) for step in steps if step.counts)
    return step_ns or float(simulated.kernel_end.max(initial=0))
