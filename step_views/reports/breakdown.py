"""Breakdown of a step's time: along the critical path, by operation, by module and by kernel.

The critical path is that of the steady state, as in ``predict``, and adds up to its step exactly. Each recorded step
also has its own span, from its begin to its end, which adds up to the step's simulated time. Host time by operation is
recorded self time, without called operations and without waiting. If the replay is without the profiler, so is host
time. GPU time is the simulated duration of the work that an operation launched.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from graph_predictor.prediction.explain import bottleneck
from graph_predictor.prediction.predictor import Baseline
from graph_predictor.prediction.repeat import collect, step_numbers
from graph_predictor.prediction.replay import WINDOW, Replay, ReplayedStep, slowest_mean_ns
from graph_predictor.prediction.result import PathItem, SteadyStep, which_times
from graph_predictor.prediction.step_spread import step_kinds
from graph_predictor.recorded.facts import RecordedFacts
from graph_predictor.simulation.engine import Causes
from graph_predictor.simulation.program import Bound
from step_views.reports.call_tree import OperationSums, StepTables
from tracer.errors import ForetraceError
from tracer.graph import ExecutionGraph
from tracer.lazy import pandas as pd
from tracer.shown import Chart, ChartSeries, Shown, frame_of


@dataclass(frozen=True, slots=True)
class SpanEntry:
    """Time of one operation in one module and bound within a step's span, ns.

    ``operation`` is the kernel's name if the operation that launched the kernel was not recorded.
    """

    operation: str
    module: str
    bound: Bound
    time_ns: int
    segments: int


@dataclass(frozen=True, slots=True)
class OperationTime:
    """Times of operations of one name: calls, own host time without waiting, waiting, and launched GPU time (ns)."""

    operation: str
    calls: int
    host_ns: int
    waiting_ns: int
    gpu_ns: int


@dataclass(frozen=True, slots=True)
class ModuleTime:
    """Times of the operations in one module path ("" for no module), as in ``OperationTime``."""

    module: str
    calls: int
    host_ns: int
    waiting_ns: int
    gpu_ns: int


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """Times of one module path in one phase (forward, backward, optimizer, data, other), as in ``OperationTime``."""

    module: str
    phase: str
    calls: int
    host_ns: int
    waiting_ns: int
    gpu_ns: int


@dataclass(frozen=True, slots=True)
class KernelTime:
    """Times of all kernels of one name; ``share`` is their share of the GPU time of the step or mean."""

    kernel: str
    count: int
    total_ns: int
    share: float

    @property
    def mean_ns(self) -> float:
        """Mean duration, ns."""
        return self.total_ns / self.count if self.count else 0.0


class Totals:
    """The tables of one step, or of several steps added up; each list begins with its largest entry.

    Args:
        bounds: the span by bound, ns.
        parts: for each step, its rank's tables and the step's index in them. Lists are made when first used, because
            many steps have many.
    """

    def __init__(self, bounds: dict[Bound, int], parts: Sequence[tuple[StepTables, int]]) -> None:
        self.bounds, self.parts = bounds, parts

    def _made(self, name: str) -> list[tuple[Any, ...]]:
        """Return a tuple (key and sums) for every entry of the table ``name`` in these steps."""
        return [entry for views, at in self.parts if name in views for entry in views[name].of_step(at)]

    @cached_property
    def span(self) -> list[SpanEntry]:
        """The span by operation, module and bound."""
        return sorted((SpanEntry(*each) for each in self._made("span")),
                      key=lambda e: (-e.time_ns, e.operation, e.module, e.bound))

    @cached_property
    def operations(self) -> list[OperationTime]:
        """Host and GPU time by operation."""
        return _largest([OperationTime(*each) for each in self._made("operations")])

    @cached_property
    def modules(self) -> list[ModuleTime]:
        """Host and GPU time by module; empty if the trace names no modules."""
        return _largest([ModuleTime(*each) for each in self._made("modules")])

    @cached_property
    def kernels(self) -> list[KernelTime]:
        """GPU time by kernel."""
        return _largest_kernels(self._made("kernels"))

    @cached_property
    def phases(self) -> list[PhaseTime]:
        """Host and GPU time by module and phase."""
        return _largest([PhaseTime(*each) for each in self._made("phases")])

    def to_json(self, top: int | None = None) -> dict[str, Any]:
        """Return plain values for JSON, microseconds; at most ``top`` entries a list."""
        total = sum(self.bounds.values())
        return {
            "span_bounds_us": {bound.label: ns / 1e3 for bound, ns in self.bounds.items()},
            "span": [
                {"operation": e.operation, "module": e.module or None, "bound": e.bound.label,
                 "time_us": e.time_ns / 1e3, "share": e.time_ns / total if total else 0.0, "segments": e.segments}
                for e in self.span[:top]],
            "operations": [{"operation": e.operation, **_host_json(e)} for e in self.operations[:top]],
            "modules": [{"module": e.module or None, **_host_json(e)} for e in self.modules[:top]],
            "phases": [{"module": e.module or None, "phase": e.phase, **_host_json(e)} for e in self.phases[:top]],
            "kernels": [
                {"kernel": e.kernel, "count": e.count, "total_us": e.total_ns / 1e3, "mean_us": e.mean_ns / 1e3,
                 "share": e.share} for e in self.kernels[:top]],
        }


class _Summed(Totals):
    """The totals of several steps: entries with equal keys are added."""

    def _made(self, name: str) -> list[tuple[Any, ...]]:
        ranks: dict[int, tuple[StepTables, list[int]]] = {}
        for views, at in self.parts:
            ranks.setdefault(id(views), (views, []))[1].append(at)
        found: dict[tuple[Any, ...], list[int]] = {}
        for views, steps in ranks.values():
            for key, sums in views[name].of_steps(steps) if name in views else ():
                known = found.setdefault(key, [0] * len(sums))
                known[:] = [a + b for a, b in zip(known, sums, strict=True)]
        return [(*key, *sums) for key, sums in found.items()]


@dataclass(frozen=True, slots=True)
class StepBreakdown:
    """One recorded step of one rank, ns. The bounds of its span, and the span's entries, add up to ``simulated_ns``.

    ``why_not`` is the reason why the step does not count; "" if it counts.
    """

    rank: int
    name: str
    measured_ns: int
    simulated_ns: int
    totals: Totals
    why_not: str = ""


@dataclass(slots=True, repr=False)
class Breakdown(Shown):
    """The breakdown of a step's time.

    Attributes:
        steps: the requested recorded steps, in the order of the replay.
        notes: remarks for the reader.
        profiled: whether times are under the profiler (``measured_ns`` always is).
        recorded: facts about the recording; ``None`` without steps.
        steady: the steady state; ``None`` if no steps could be repeated, or if durations were scaled.
    """

    steps: list[StepBreakdown]
    notes: list[str] = field(default_factory=list)
    profiled: bool = True
    recorded: RecordedFacts | None = None
    steady: SteadyStep | None = None

    @property
    def counted(self) -> list[StepBreakdown]:
        """The steps that count."""
        return [step for step in self.steps if not step.why_not]

    @property
    def step_ns(self) -> float:
        """Time of the step: the steady state; without one, the slowest rank's mean over the spans that count."""
        if self.steady is not None:
            return self.steady.step_time_us * 1e3
        return slowest_mean_ns((step.rank, step.simulated_ns) for step in self.counted)

    @property
    def bounds_us(self) -> dict[str, float]:
        """Critical path by bound, µs a step; without a steady state, the spans of the steps that count."""
        if self.steady is not None:
            return self.steady.bounds_us
        return {bound.label: ns / max(len(self.counted), 1) / 1e3 for bound, ns in self.total().bounds.items()}

    @property
    def bound(self) -> str:
        """The bound of the step in one word."""
        return bottleneck(self.bounds_us) if self.steady is None else self.steady.bound

    @property
    def critical_path(self) -> list[PathItem]:
        """Critical path by operation and bound, longest first; without a steady state, from the spans."""
        if self.steady is not None:
            return self.steady.critical_path
        total, steps = self.total(), max(len(self.counted), 1)
        sums: dict[tuple[str, str], int] = defaultdict(int)
        for each in total.span:
            sums[each.operation, each.bound.label] += each.time_ns
        whole = sum(sums.values()) or 1
        return sorted((PathItem(*key, ns / steps / 1e3, ns / whole) for key, ns in sums.items()),
                      key=lambda entry: (-entry.time_us, entry.operation))

    def headline(self) -> str:
        """Return the step's time and bound in one line."""
        if not self.steps:
            return "no steps"
        share = max(self.bounds_us.values(), default=0.0) / max(sum(self.bounds_us.values()), 1e-9)
        most = max(self.bounds_us, key=lambda name: self.bounds_us[name])
        return (f"step {which_times(self.profiled)} {self.step_ns / 1e6:,.3f} ms, decided by {self.bound}; {share:.0%} "
                f"of its critical path {most}")

    def tables(self) -> Mapping[str, Callable[[], pd.DataFrame]]:
        """Return ``critical_path``; ``operations``, ``modules`` and ``kernels`` over all steps that count; ``steps``.
        Times are in µs.
        """
        found = self.to_json()
        totals = self.total().to_json()
        rows = {"critical_path": found["critical_path"], **{name: totals[name] for name in (
            "operations", "modules", "kernels")}, "steps": found["steps"]}
        return {name: partial(frame_of, rows[name], columns) for name, columns in _TABLES.items()}

    def chart(self) -> Chart:
        """Return the critical path by bound."""
        bounds = {name: us / 1e3 for name, us in self.bounds_us.items() if us}
        return Chart("bars", self.headline(), list(bounds), [ChartSeries("critical path", list(bounds.values()))],
                     "ms a step")

    def total(self) -> Totals:
        """Return the sums over all steps of all ranks that count."""
        bounds = Counter(dict.fromkeys(Bound, 0))
        for step in self.counted:
            bounds.update(step.totals.bounds)
        return _Summed(dict(bounds), [part for step in self.counted for part in step.totals.parts])

    def to_json(self, top: int | None = None) -> dict[str, Any]:
        """Return plain values for JSON, microseconds; at most ``top`` entries a list."""
        return {
            "times": which_times(self.profiled), "step_time_us": self.step_ns / 1e3, "steady": self.steady is not None,
            "recorded": None if self.recorded is None else self.recorded.to_json(),
            "gpu_active_us": None if self.steady is None else self.steady.gpu_active_us,
            "bound": self.bound, "bounds_us": self.bounds_us,
            "critical_path": [{"operation": e.operation, "bound": e.bound, "time_us": e.time_us, "share": e.share}
                              for e in self.critical_path[:top]],
            "steps": [
                {"rank": s.rank, "step": s.name, "measured_us": s.measured_ns / 1e3,
                 "simulated_us": s.simulated_ns / 1e3, "counts": not s.why_not, "why_not": s.why_not or None,
                 **s.totals.to_json(top)} for s in self.steps],
            "notes": self.notes,
        }


_HOST_COLUMNS = ("calls", "host_us", "waiting_us", "gpu_us")
_TABLES = {"critical_path": ("operation", "bound", "time_us", "share"), "operations": ("operation", *_HOST_COLUMNS),
           "modules": ("module", *_HOST_COLUMNS), "kernels": ("kernel", "count", "total_us", "mean_us", "share"),
           "steps": ("rank", "step", "measured_us", "simulated_us", "counts", "why_not")}
"""Columns of the tables of a breakdown, which exist even without rows."""


def breakdown(replay: Replay, *, step: str | None = None, spans: bool = True) -> Breakdown:
    """Break the replayed steps down.

    Args:
        replay: the replay.
        step: only this step of every rank: its name, or its number within the rank (from 0; negative from the end).
        spans: whether to break down the span of each recorded step too; without a steady state this is always done.

    Raises:
        ForetraceError: no rank has such a step.
    """
    graphs = replay.graphs
    positions = {(g.meta.rank if g.meta.rank >= 0 else i): i for i, g in enumerate(graphs)}
    chosen = replayed_steps(replay.steps, step)
    ranks: dict[int, list[int]] = {}
    for at, one in enumerate(chosen):
        ranks.setdefault(positions[one.rank], []).append(at)
    baseline, why = _baseline(replay, step)
    recorded = None if baseline is None else baseline.recorded_facts
    steady = None if baseline is None else baseline.steady_step()
    spans = spans or baseline is None
    del baseline  # its host times are the largest table of a large job
    collect(replay.program)
    causes = Causes(replay.program, replay.simulated, [g.kernels.kind for g in graphs])
    found: dict[int, StepBreakdown] = {}
    for position, rows in ranks.items():
        own = [chosen[at] for at in rows]
        figures = OperationSums(replay, position, causes).figures(own, spans=spans)
        found.update((row, StepBreakdown(
            one.rank, one.name, one.measured_ns, one.replayed_ns, Totals(figures.bounds[at], [(figures.tables, at)]),
            one.why_not if step is None else "")) for at, (row, one) in enumerate(zip(rows, own, strict=True)))
    notes = [*replay.notes, *why, *([] if recorded is None else recorded.notes())]
    if step is None and (kinds := step_kinds(graphs)) is not None:
        notes.append(f"Warning: {kinds.text} The mean is of different steps; --step names one.")
    if not len(replay.program.kernel_item):
        notes.append("The trace has no GPU work: all time is the host's, and the step is a playback of it.")
    if replay.graphs and not any((g.ops.module >= 0).any() for g in graphs):
        notes.append(_without_modules(replay.graphs))
    return Breakdown([found[at] for at in range(len(chosen))], notes, replay.profiled, recorded, steady)


def _baseline(replay: Replay, step: str | None) -> tuple[Baseline | None, list[str]]:
    """Return the job prepared for its steady state; else ``None`` and a note with the reason."""
    if replay.scale_kernels != 1.0 or any(one.name == WINDOW for one in replay.steps):
        return None, []
    try:
        return Baseline.recorded(replay.graphs, step, built=replay.built.as_recorded(), profiled=replay.profiled), []
    except ForetraceError as error:
        return None, [f"No steady state is known of it: {error}"]


def _without_modules(graphs: list[ExecutionGraph]) -> str:
    """Return a note on how to record modules, for a trace that names none."""
    flags = graphs[0].meta.profiler_flags
    if flags.get("with_stack"):
        return "The trace names no modules, although stacks were recorded: no operation ran inside a torch.nn.Module."
    although = " (with_modules=True names those of TorchScript alone)" if flags.get("with_modules") else ""
    return f"The trace names no modules{although}: record with with_stack=True (foretrace capture --stacks)."


def replayed_steps(steps: list[ReplayedStep], wanted: str | None) -> list[ReplayedStep]:
    """Return the steps with a name, or with a number within each rank; by default all. Raises like ``step_numbers``."""
    named = [s for s in steps if wanted is None or s.name == wanted]
    if wanted is None or named:
        return named
    by_rank: dict[int, list[ReplayedStep]] = {}
    for s in steps:
        by_rank.setdefault(s.rank, []).append(s)
    [number] = step_numbers([s.name for s in steps], wanted, min(map(len, by_rank.values()), default=0))
    return [own[number] for own in by_rank.values()]


def _host_json(entry: OperationTime | ModuleTime | PhaseTime) -> dict[str, Any]:
    return {"calls": entry.calls, "host_us": entry.host_ns / 1e3, "waiting_us": entry.waiting_ns / 1e3,
            "gpu_us": entry.gpu_ns / 1e3}


def _largest(entries: list[Any]) -> list[Any]:
    """Return entries with the largest sum of host and GPU time first, and entries that only waited last."""
    return sorted(entries, key=lambda e: (-(e.host_ns + e.gpu_ns), -e.waiting_ns))


def _largest_kernels(entries: Iterable[tuple[Any, ...]]) -> list[KernelTime]:
    found = list(entries)
    total = sum(ns for _, _, ns in found)
    made = [KernelTime(name, count, ns, ns / total if total else 0.0) for name, count, ns in found]
    return sorted(made, key=lambda e: (-e.total_ns, e.kernel))
