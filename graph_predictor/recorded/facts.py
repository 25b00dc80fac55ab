"""What is true of a recording's step before anything is simulated: made once, and printed by every command.

::

    graphs ──▶ steps that count ──▶ RecordedFacts: recorded step, step without the profiler, GPU active, why not others

The steady state of the same step, what decides it and its critical path are the ``Prediction`` without edits, which
carries these facts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from graph_predictor.recorded.counted_steps import CountedSteps
from graph_predictor.recorded.gpu_active import mean_active_ns
from tracer.graph import ExecutionGraph

SHOWN = 4
"""Steps that do not count of which a sentence names the reason."""


@dataclass(frozen=True, slots=True)
class RankFacts:
    """One rank's recorded step, ns: means of the steps that count. ``gpu_active_ns`` is ``None`` without GPU work."""

    rank: int
    step_ns: float
    gpu_active_ns: float | None


@dataclass(frozen=True, slots=True)
class RecordedFacts:
    """The recorded step of a job.

    Attributes:
        step_ns: mean of the steps that count, under the profiler, of the slowest rank.
        counted, steps: number of steps that count, and of all.
        names: of the steps that count.
        left_out: (name, why) of the others.
        gpu_active_ns: time a step in which device work other than collectives runs, of the most active rank; ``None``
            without GPU work.
        unprofiled_ns: median of the steps timed without the profiler, of the slowest rank; ``None`` where none was.
        timed: number of these.
        of_all: whether all steps were asked about, rather than one that was chosen.
        behind: whether the device's last kernels end the steps, as it falls behind the host.
        ranks: each rank's.
    """

    step_ns: float
    counted: int
    steps: int
    names: tuple[str, ...]
    left_out: tuple[tuple[str, str], ...]
    gpu_active_ns: float | None
    unprofiled_ns: float | None
    timed: int
    of_all: bool
    behind: bool
    ranks: tuple[RankFacts, ...]

    def sentence(self) -> str:
        """Say the recorded step by both clocks: the line that every command of a recording leads with."""
        return f"{self.step_ns / 1e6:,.3f} ms {self.how()}"

    def how(self) -> str:
        """Say what the recorded step is, and what it takes by the other clock."""
        mean = f"mean of {self.counted:,}" + (f" of {self.steps:,}" if self.counted < self.steps else "") + " steps"
        if not self.of_all:
            mean = ", ".join(self.names)
        slowest = "; slowest rank" if len(self.ranks) > 1 else ""
        profiled = "under the profiler" + (f" ({mean}{slowest})" if self.steps > 1 else
                                                                       f" ({slowest[2:]})" if slowest else "")
        if self.unprofiled_ns is None:
            return profiled
        return f"{profiled}, {self.unprofiled_ns / 1e6:,.3f} ms without it (median of {self.timed:,})"

    def notes(self) -> list[str]:
        """Say which steps do not count and why, and whose clock is read."""
        found = []
        if self.left_out:
            named = "; ".join(f"{name}: {why}" for name, why in self.left_out[:SHOWN])
            more = f"; and {len(self.left_out) - SHOWN:,} more" if len(self.left_out) > SHOWN else ""
            found.append(f"{len(self.left_out):,} of {self.steps:,} steps do not count ({named}{more}).")
        if self.behind:
            found.append("The host runs ahead of its device: steps are counted from the last kernel of one to the last "
                         "kernel of the next.")
        return found

    def to_json(self) -> dict[str, Any]:
        """Plain values, microseconds."""
        return {
            "step_us": self.step_ns / 1e3, "counted": self.counted, "steps": self.steps, "names": list(self.names),
            "left_out": [{"step": name, "why": why} for name, why in self.left_out],
            "gpu_active_us": None if self.gpu_active_ns is None else self.gpu_active_ns / 1e3,
            "unprofiled_us": None if self.unprofiled_ns is None else self.unprofiled_ns / 1e3, "timed": self.timed,
            "device_behind": self.behind}


def recorded_facts(graphs: Sequence[ExecutionGraph], steps: CountedSteps | None = None,
                   chosen: Sequence[int] | None = None) -> RecordedFacts | None:
    """Find the facts of a recorded job; ``None`` where a rank has no steps.

    Args:
        graphs: one a rank.
        steps: which steps count, where that is known already.
        chosen: numbers of the steps that were asked for, within each rank; by default those that count.
    """
    fewest = min((len(graph.steps) for graph in graphs), default=0)
    if not fewest:
        return None
    steps = steps or CountedSteps.of(graphs)
    ranks = []
    for rank, graph in enumerate(graphs):
        counts = steps.counts[rank]
        if chosen is not None:
            counts = np.zeros(len(counts), np.bool_)
            counts[list(chosen)] = True
        ranks.append(RankFacts(
            graph.meta.rank if graph.meta.rank >= 0 else rank, float(steps.ranks[rank].length_ns[counts].mean()),
            mean_active_ns(graph, counts) if len(graph.kernels) else None))
    slowest = int(np.argmax([rank.step_ns for rank in ranks]))
    graph, counts = graphs[slowest], steps.counts[slowest]
    names = [graph.string(int(code)) for code in graph.steps.name.tolist()]
    asked = np.flatnonzero(counts).tolist() if chosen is None else list(chosen)
    active = [rank.gpu_active_ns for rank in ranks if rank.gpu_active_ns is not None]
    timed = [one.meta.unprofiled_step_ns for one in graphs if one.meta.unprofiled_step_ns]
    return RecordedFacts(
        ranks[slowest].step_ns, len(asked), len(names), tuple(names[at] for at in asked),
        () if chosen is not None else tuple(
            (names[at], steps.why_not(slowest, at)) for at in np.flatnonzero(~counts).tolist()),
        max(active, default=None), max((float(np.median(own)) for own in timed), default=None),
        max(map(len, timed), default=0), chosen is None, steps.ranks[slowest].behind, tuple(ranks))
