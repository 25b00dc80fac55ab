"""``Prediction``: the predicted time of a step, its interval, its explanation, and whether its memory fits.

Peak memory is known where the step was traced by shapes::

    peak = most over the moments of: what stays (parameters, gradients, states, …) + activations × edits' factors
                                     + temporaries × the sizes' factor + the optimizer's temporaries, unless it is fused

A trace keeps all moments that may become the peak (``tracer.shape_only.tensors``). A larger batch may move the peak
from the optimizer's step into backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np

from graph_predictor.prediction.scenario import OtherSizes, Scenario
from graph_predictor.recorded.facts import RecordedFacts, damage_notes
from graph_predictor.simulation.build import Built, kernel_kinds
from kernel_models.op_call import itemsize, short_dtype
from tracer.arrays import Bool, Int8
from tracer.device_memory import PEAK, MemoryAccount, memory_moments, scaled_account
from tracer.graph import ExecutionGraph, KernelKind
from tracer.input_file import list_of
from tracer.lazy import pandas as pd
from tracer.shown import Chart, ChartSeries, Shown, frame_of

SIZES = "sizes"
"""The edit whose factor also applies to temporaries; recomputation's factor applies to activations alone."""
OPTIMIZER = "1 optimizer"
"""The rewrite after which no foreach operation is left."""


def memory_account(scenario: Scenario) -> MemoryAccount | None:
    """Return the memory of the rank that needs the most, with the edits' factors; ``None`` if unknown."""
    factors = scenario.activation_factors
    sizes, fused = factors.get(SIZES, 1.0), OPTIMIZER in scenario.rewrites
    weights = np.array([1.0, math.prod(factors.values()), sizes, 0.0 if fused else 1.0])
    known = [graph for graph in scenario.built.graphs if PEAK in graph.meta.memory]
    accounts = (scaled_account(graph, weights) for graph in known)
    return max(accounts, key=lambda account: account.total, default=None)


def peak_memory(scenario: Scenario) -> int | None:
    """Return the bytes of the rank that needs the most, with the edits' factors; ``None`` if unknown."""
    account = memory_account(scenario)
    return None if account is None else round(account.total)


def with_sizes(scenario: Scenario, factor: float) -> Scenario:
    """Return the scenario whose activations and temporaries are ``factor`` times as large because of its sizes."""
    return replace(scenario, activation_factors={**scenario.activation_factors, SIZES: factor})


def most_activations(graph: ExecutionGraph) -> int:
    """Return the most bytes of activations alive at one moment of the trace, which need not be the memory peak's; 0 if
    the trace does not state memory."""
    return int(memory_moments(graph)[:, 1].max()) if PEAK in graph.meta.memory else 0


def lacking_memory(scenario: Scenario) -> str | None:
    """Return a sentence on why a scenario does not fit its device's memory; ``None`` if it fits, or that is unknown."""
    account = memory_account(scenario)
    spec = None if account is None else scenario.scaled_device()
    if account is None or spec is None or (lacking := account.lacking(spec.memory_gb * 1e9, spec.name)) is None:
        return None
    return f"{lacking} The step takes {account}."


def kept_when_recomputed(graph: ExecutionGraph, chosen: Bool, blocks: int) -> float:
    """Return the share (0 to 1) of activations that stay in memory when ``blocks`` blocks are recomputed: those of one
    block and each block's input. All activations count as belonging to blocks, as those outside are not known."""
    activations = most_activations(graph)
    if not activations or not blocks:
        return 1.0
    rows = np.flatnonzero(chosen)
    modules = graph.ops.module[rows]
    # The largest tensor that the first operation of a block reads is its input.
    first = int(rows[np.argmin(graph.ops.start_ns[rows])]) if len(rows) and (modules >= 0).any() else -1
    inputs = min(blocks * max(_tensor_bytes(graph, first), default=0), activations) if first >= 0 else 0
    return min(1.0, 1.0 / blocks + inputs / activations)


def _tensor_bytes(graph: ExecutionGraph, op: int) -> Iterator[int]:
    shapes, dtypes = (list_of(graph.string(int(column[op]))) for column in (graph.ops.shapes, graph.ops.dtypes))
    for shape, dtype in zip(shapes, dtypes, strict=False):
        if isinstance(shape, list) and shape and all(isinstance(size, int) and size >= 0 for size in shape):
            yield math.prod(shape) * itemsize(short_dtype(str(dtype)) or "fp32")


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """Facts of a job that every prediction reports.

    Attributes:
        kinds: ``KernelKind`` of all its kernels.
        device: the name of the first rank's device, as the trace has it.
        world_size: number of ranks that it ran on, or was traced for.
        unrecorded: a sentence on why its collectives keep their times; empty if all ranks were recorded.
        damage: sentences on data of its traces that was lost or assumed.
    """

    kinds: Int8
    device: str
    world_size: int
    unrecorded: str
    damage: tuple[str, ...]

    @classmethod
    def of(cls, built: Built) -> SourceFacts:
        """Return the facts of a built job."""
        graphs, there = built.graphs, len(built.graphs)
        kinds = kernel_kinds(graphs)
        world = max(graph.meta.world_size for graph in graphs)
        unrecorded = ""
        if world > there and (kinds == KernelKind.COLLECTIVE).any():
            unrecorded = (f"{there} of {world} ranks were recorded: collectives keep their recorded durations, other "
                          "ranks' late arrival among them (--ranks-alike leaves it out).")
        return cls(kinds, graphs[0].meta.device, max(there, world), unrecorded, tuple(damage_notes(graphs)))


def which_times(profiled: bool, *, ran: bool = True) -> str:
    """Return the phrase for a step's times in reports: under or without the profiler, or of a step that never ran."""
    if not ran:
        return "that never ran"
    return "under the profiler" if profiled else "without the profiler"


@dataclass(frozen=True, slots=True)
class RankPrediction:
    """The prediction of one rank, µs a step; ``bounds_us`` is its critical path by bound."""

    rank: int
    step_time_us: float
    gpu_active_us: float
    bound: str
    bounds_us: dict[str, float]


@dataclass(frozen=True, slots=True)
class PathItem:
    """Critical-path time of one operation in one bound, µs a step."""

    operation: str
    bound: str
    time_us: float
    share: float


@dataclass(slots=True, repr=False)
class SteadyStep:
    """The steady state of a step, µs a step: a prediction without its interval and prices.

    Attributes:
        step_time_us: expected time of a step.
        gpu_active_us: time a step in which device work other than collectives runs, of the most active rank.
        bound: the resource that decides the step time: "host", "compute", "memory copy", "exposed communication", …
        bounds_us: critical path of the rank that decides (see ``bottleneck_rank``) by bound; adds up to the step time.
        critical_path: the operations of that path, the longest first.
        per_rank: time, GPU active time and bounds of each rank.
    """

    step_time_us: float
    gpu_active_us: float
    bound: str
    bounds_us: dict[str, float]
    critical_path: list[PathItem]
    per_rank: list[RankPrediction]


@dataclass(slots=True, repr=False)
class Prediction(SteadyStep, Shown):
    """The steady state of a (changed) training step.

    Attributes:
        interval_us, gpu_active_interval_us: 80% intervals of the step time and of the GPU's active time.
        families_us: device time a step by family of work, of the rank that decides.
        sources: share of all host and device time of the step, of all ranks, by its source.
        kernel_sources: share of the device time by source.
        profiled: whether times include the profiler's cost.
        ran: whether they rest on a recording; otherwise the step was traced by shapes, and everything is priced.
        recorded: facts of the recording that they rest on; ``None`` for a step that never ran.
        savings_us: time a step that a host, a GPU or a network without any cost would save, each alone; if asked for.
        steps: names of the recorded steps that the prediction rests on.
        as_measured: whether nothing was changed and the predicted time agrees with the measured one; otherwise a
            warning gives the reason.
        device, recorded_on: names of the devices, empty where unknown.
        peak_memory_bytes: peak memory of the rank that needs the most; ``None`` if unknown.
        items_per_second, flops_per_step, mfu, cost_per_step: where known; ``mfu`` is of the device's peak rate.
        edits: a phrase for each change.
        sizes: the requested sizes, the method and the input dimensions that follow them; ``None``: as recorded.
        warnings: reasons for a less reliable prediction; notes: assumptions.
    """

    interval_us: tuple[float, float]
    families_us: dict[str, float]
    sources: dict[str, float]
    kernel_sources: dict[str, float]
    profiled: bool = True
    ran: bool = True
    recorded: RecordedFacts | None = None
    gpu_active_interval_us: tuple[float, float] = (0.0, 0.0)
    savings_us: dict[str, float] = field(default_factory=dict)
    steps: tuple[str, ...] = ()
    as_measured: bool = False
    device: str = ""
    recorded_on: str = ""
    peak_memory_bytes: int | None = None
    items_per_second: float | None = None
    flops_per_step: float | None = None
    mfu: float | None = None
    cost_per_step: float | None = None
    edits: list[str] = field(default_factory=list)
    sizes: OtherSizes | None = None
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def recorded_us(self) -> float | None:
        """Return the recorded step under the profiler, µs."""
        return None if self.recorded is None else self.recorded.step_ns / 1e3

    @property
    def unprofiled_us(self) -> float | None:
        """Return the median step that the capture timed without the profiler, µs."""
        found = None if self.recorded is None else self.recorded.unprofiled_ns
        return None if found is None else found / 1e3

    @property
    def cycle(self) -> int:
        """Return the number of recorded steps in the predicted one: more than one if the loop alternates."""
        return 1 if self.recorded is None else self.recorded.cycle

    @property
    def times(self) -> str:
        """Return the kind of times: "without the profiler", "under the profiler" or "that never ran" (the step)."""
        return which_times(self.profiled, ran=self.ran)

    def headline(self) -> str:
        """Return the prediction in one line."""
        low, high = self.interval_us
        edits = f" ({', '.join(self.edits)})" if self.edits else ""
        return (f"step {self.times}{edits} {self.step_time_us / 1e3:,.3f} ms, 80% between {low / 1e3:,.3f} and "
                f"{high / 1e3:,.3f} ms, decided by {self.bound}")

    def tables(self) -> Mapping[str, Callable[[], pd.DataFrame]]:
        """Return ``critical_path``, ``bounds``, ``families``, ``sources`` and ``ranks``; times in µs a step."""
        def by_name(key: str, value: str, values: dict[str, float]) -> pd.DataFrame:
            return pd.DataFrame({key: list(values), value: list(values.values())})

        return {
            "critical_path": lambda: frame_of(map(asdict, self.critical_path), [one.name for one in fields(PathItem)]),
            "bounds": lambda: by_name("bound", "time_us", self.bounds_us),
            "families": lambda: by_name("family", "time_us", self.families_us),
            "sources": lambda: by_name("source", "share", self.sources),
            "ranks": lambda: pd.DataFrame([{
                "rank": each.rank, "step_time_us": each.step_time_us, "gpu_active_us": each.gpu_active_us,
                "bound": each.bound} for each in self.per_rank]),
        }

    def chart(self) -> Chart:
        """Return the step with its interval, and its critical path by bound below."""
        bounds = {name: us for name, us in self.bounds_us.items() if us > 0}
        values = [self.step_time_us, *bounds.values()]
        low, high = self.interval_us
        none = [math.nan] * len(bounds)  # only the step has an interval
        return Chart("bars", self.headline(), ["step", *bounds], [ChartSeries(
            "expected", [us / 1e3 for us in values], [low / 1e3, *none], [high / 1e3, *none])], "ms")

    def to_json(self, top: int | None = None) -> dict[str, Any]:
        """Return plain values, with the ``top`` largest entries of the critical path (by default all)."""
        return {
            "times": self.times, "step_time_us": self.step_time_us, "interval_us": list(self.interval_us),
            "gpu_active_us": self.gpu_active_us, "gpu_active_interval_us": list(self.gpu_active_interval_us),
            "bound": self.bound,
            "per_rank": [{"rank": r.rank, "step_time_us": r.step_time_us, "gpu_active_us": r.gpu_active_us,
                          "bound": r.bound, "bounds_us": r.bounds_us} for r in self.per_rank],
            "sources": self.sources, "kernel_sources": self.kernel_sources,
            "peak_memory_bytes": self.peak_memory_bytes, "warnings": self.warnings,
            "bounds_us": self.bounds_us, "families_us": self.families_us,
            "critical_path": [{"operation": e.operation, "bound": e.bound, "time_us": e.time_us, "share": e.share}
                              for e in self.critical_path[:top]],
            "savings_us": self.savings_us, "recorded": None if self.recorded is None else self.recorded.to_json(),
            "recorded_us": self.recorded_us, "unprofiled_us": self.unprofiled_us, "steps": list(self.steps),
            "as_measured": self.as_measured,
            "device": self.device or None, "recorded_on": self.recorded_on or None,
            "items_per_second": self.items_per_second, "flops_per_step": self.flops_per_step, "mfu": self.mfu,
            "cost_per_step": self.cost_per_step,
            "edits": self.edits, "sizes": None if self.sizes is None else self.sizes.to_json(), "notes": self.notes,
        }
