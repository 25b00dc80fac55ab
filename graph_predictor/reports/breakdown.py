"""Breakdown of a step's time: by bound, by operation, by module, by kernel, and along the critical path.

Times by bound and the critical path come from the simulated timeline and add up to the simulated step exactly. Host
time by operation is as recorded, exclusive (an operation's own, not that of operations it calls) and with waiting
taken out, and so is the profiler's cost where the replay is without it; GPU time is the simulated duration of the work
an operation launched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from graph_predictor.prediction.replay import Replay, ReplayedStep
from graph_predictor.prediction.result import which_times
from graph_predictor.prediction.step_kinds import step_kinds
from graph_predictor.recorded.typical_steps import left_out, typical_of_ranks
from graph_predictor.reports.operation_sums import OperationSums, StepTables
from graph_predictor.simulation.critical_path import Bound, Causes
from tracer.charts import Chart, ChartSeries
from tracer.errors import ForetraceError
from tracer.graph import ExecutionGraph
from tracer.shown import Shown

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True)
class PathEntry:
    """Critical-path time of one operation in one module and bound, ns.

    ``operation`` is the kernel's name where the operation that launched a kernel was not recorded.
    """

    operation: str
    module: str
    bound: Bound
    time_ns: int
    segments: int


@dataclass(frozen=True, slots=True)
class OperationTime:
    """One operation name: calls, own host time without waiting, waiting, and GPU time it launched (ns)."""

    operation: str
    calls: int
    host_ns: int
    waiting_ns: int
    gpu_ns: int


@dataclass(frozen=True, slots=True)
class ModuleTime:
    """The same of one module path; empty for operations in no module."""

    module: str
    calls: int
    host_ns: int
    waiting_ns: int
    gpu_ns: int


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """The same of one module path in one phase of the step: forward, backward, optimizer, data or other."""

    module: str
    phase: str
    calls: int
    host_ns: int
    waiting_ns: int
    gpu_ns: int


@dataclass(frozen=True, slots=True)
class KernelTime:
    """One kernel name; ``share`` is of the GPU time of the same step or mean."""

    kernel: str
    count: int
    total_ns: int
    share: float

    @property
    def mean_ns(self) -> float:
        """Mean duration."""
        return self.total_ns / self.count if self.count else 0.0


class Totals:
    """The six views of one step, or of several added up; each list begins with its largest entry.

    Args:
        bounds: the critical path by bound, ns.
        parts: of the step, or of each, its rank's tables, and which step it is there. A list is made of them when it is
            first asked for, as there are many in many steps.
    """

    def __init__(self, bounds: dict[Bound, int], parts: Sequence[tuple[StepTables, int]]) -> None:
        self.bounds, self.parts = bounds, parts

    def _made(self, name: str) -> list[tuple[Any, ...]]:
        """Key and sums of every entry of a list."""
        return [entry for views, at in self.parts if name in views for entry in views[name].of_step(at)]

    @cached_property
    def path(self) -> list[PathEntry]:
        """The critical path by operation, module and bound."""
        return _largest_path([PathEntry(*each) for each in self._made("path")])

    @cached_property
    def operations(self) -> list[OperationTime]:
        """Host and GPU time by operation."""
        return _largest([OperationTime(*each) for each in self._made("operations")])

    @cached_property
    def modules(self) -> list[ModuleTime]:
        """Host and GPU time by module; nothing where the trace names none."""
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
        """Plain values for JSON, microseconds; at most ``top`` entries a list."""
        total = sum(self.bounds.values())
        return {
            "bounds_us": {bound.label: ns / 1e3 for bound, ns in self.bounds.items()},
            "critical_path": [
                {"operation": e.operation, "module": e.module or None, "bound": e.bound.label,
                 "time_us": e.time_ns / 1e3, "share": e.time_ns / total if total else 0.0, "segments": e.segments}
                for e in self.path[:top]],
            "operations": [{"operation": e.operation, **_host_json(e)} for e in self.operations[:top]],
            "modules": [{"module": e.module or None, **_host_json(e)} for e in self.modules[:top]],
            "phases": [{"module": e.module or None, "phase": e.phase, **_host_json(e)} for e in self.phases[:top]],
            "kernels": [
                {"kernel": e.kernel, "count": e.count, "total_us": e.total_ns / 1e3, "mean_us": e.mean_ns / 1e3,
                 "share": e.share} for e in self.kernels[:top]],
        }


class _Summed(Totals):
    """The totals of several steps: what has the same key is one entry."""

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


@dataclass(slots=True)
class StepBreakdown:
    """One step of one rank, ns. The bounds, and the path's entries, add up to ``simulated_ns``; ``bound`` is what
    decides steps like it, as ``predict`` has it (see ``deciding``)."""

    rank: int
    name: str
    measured_ns: int
    simulated_ns: int
    totals: Totals
    bound: str
    typical: bool = True
    """Whether it is one of the steps that stand for the step."""


@dataclass(slots=True, repr=False)
class Breakdown(Shown):
    """The steps asked for, in the order of the replay, and what to know when reading them."""

    steps: list[StepBreakdown]
    notes: list[str] = field(default_factory=list)
    profiled: bool = True
    """Whether times are those under the profiler (``measured_ns`` is in any case)."""

    @property
    def typical(self) -> list[StepBreakdown]:
        """The steps that stand for the step: all but outliers."""
        return [step for step in self.steps if step.typical]

    @property
    def step_ns(self) -> float:
        """The step: mean of the typical ones, of the slowest rank."""
        return slowest_mean((step.rank, step.simulated_ns) for step in self.typical)

    def headline(self) -> str:
        """Say where most of the step goes in one line."""
        total = self.total()
        whole = sum(total.bounds.values())
        if not whole:
            return "no steps"
        most = max(total.bounds, key=lambda bound: total.bounds[bound])
        return (f"step {which_times(self.profiled)} {self.step_ns / 1e6:,.3f} ms, {total.bounds[most] / whole:.0%} of "
                f"its critical path {most.label}")

    def tables(self) -> Mapping[str, Callable[[], pd.DataFrame]]:
        """``critical_path``, ``operations``, ``modules``, ``kernels`` of all typical steps, and ``steps``; times in
        µs."""
        import pandas as pd

        found = self.to_json()
        totals = self.total().to_json()
        return {**{name: partial(pd.DataFrame, totals[name])
                   for name in ("critical_path", "operations", "modules", "kernels")},
                "steps": lambda: pd.DataFrame(found["steps"])[["rank", "step", "measured_us", "simulated_us", "typical",
                                                               "bound"]]}

    def chart(self) -> Chart:
        """Return the critical path by bound, of the mean typical step."""
        bounds = {bound.label: ns / max(len(self.typical), 1) / 1e6 for bound, ns in self.total().bounds.items() if ns}
        return Chart("bars", self.headline(), list(bounds), [ChartSeries("critical path", list(bounds.values()))],
                     "ms a step")

    def total(self) -> Totals:
        """All typical steps of all ranks added up."""
        bounds = Counter(dict.fromkeys(Bound, 0))
        for step in self.typical:
            bounds.update(step.totals.bounds)
        return _Summed(dict(bounds), [part for step in self.typical for part in step.totals.parts])

    def to_json(self, top: int | None = None) -> dict[str, Any]:
        """Plain values for JSON, microseconds; at most ``top`` entries a list."""
        return {
            "times": which_times(self.profiled), "step_time_us": self.step_ns / 1e3,
            "steps": [
                {"rank": s.rank, "step": s.name, "measured_us": s.measured_ns / 1e3,
                 "simulated_us": s.simulated_ns / 1e3, "typical": s.typical, "bound": s.bound,
                 **s.totals.to_json(top)} for s in self.steps],
            "notes": self.notes,
        }


def breakdown(replay: Replay, *, step: str | None = None) -> Breakdown:
    """Break the replayed steps down.

    Args:
        replay: A replay.
        step: Only this step of every rank: its name, or its number within the rank (from 0; negative from the end).

    Raises:
        ForetraceError: No rank has such a step.
    """
    graphs = replay.graphs
    positions = {(g.meta.rank if g.meta.rank >= 0 else i): i for i, g in enumerate(graphs)}
    chosen = choose_steps(replay.steps, step)
    typical = chosen if step is not None else typical_steps(chosen)
    ranks: dict[int, list[int]] = {}
    for at, one in enumerate(chosen):
        ranks.setdefault(positions[one.rank], []).append(at)
    causes = Causes(replay.program, replay.simulated, [g.kernels.kind for g in graphs])
    found: dict[int, StepBreakdown] = {}
    for position, rows in ranks.items():
        own = [chosen[at] for at in rows]
        figures = OperationSums(replay, position, causes).figures(own)
        found.update((row, StepBreakdown(
            one.rank, one.name, one.measured_ns, one.replayed_ns,
            Totals(figures.bounds[at], [(figures.tables, at)]), figures.decided[at]))
            for at, (row, one) in enumerate(zip(rows, own, strict=True)))
    kept = {id(one) for one in typical}
    steps = [replace(found[at], typical=id(one) in kept) for at, one in enumerate(chosen)]
    notes = list(replay.notes)
    if len(typical) < len(chosen):
        notes.append(f"{left_out(len(typical), len(chosen))} of the mean.")
    if step is None and (kinds := step_kinds(graphs)) is not None:
        notes.append(f"Warning: {kinds.text} The mean is of different steps; --step names one.")
    if not len(replay.program.kernel_item):
        notes.append("The trace has no GPU work: all time is the host's, and the step is a playback of it.")
    if replay.graphs and not any((g.ops.module >= 0).any() for g in graphs):
        notes.append(_without_modules(replay.graphs))
    return Breakdown(steps, notes, replay.profiled)


def _without_modules(graphs: list[ExecutionGraph]) -> str:
    """Return what to do about a trace that names no modules."""
    flags = graphs[0].meta.profiler_flags
    if flags.get("with_stack"):
        return "The trace names no modules, although stacks were recorded: no operation ran inside a torch.nn.Module."
    although = " (with_modules=True names those of TorchScript alone)" if flags.get("with_modules") else ""
    return f"The trace names no modules{although}: record with with_stack=True (foretrace capture --stacks)."


def choose_steps(steps: list[ReplayedStep], wanted: str | None) -> list[ReplayedStep]:
    """The steps of that name, or of that number within each rank; all without a wish.

    Raises:
        ForetraceError: No rank has such a step.
    """
    if wanted is None:
        return list(steps)
    named = [s for s in steps if s.name == wanted]
    if named:
        return named
    by_rank: dict[int, list[ReplayedStep]] = {}
    for s in steps:
        by_rank.setdefault(s.rank, []).append(s)
    try:
        number = int(wanted)
    except ValueError:
        number = None
    if number is not None:
        found = [own[number] for own in by_rank.values() if -len(own) <= number < len(own)]
        if found:
            return found
    names = list(dict.fromkeys(s.name for s in steps))
    listed = ", ".join(names[:6]) + (f" … {names[-1]}" if len(names) > 6 else "")
    most = max((len(own) for own in by_rank.values()), default=0)
    raise ForetraceError(f"There is no step {wanted!r}: the trace has {listed}; give one of these names, or a number "
                         f"from 0 to {most - 1}.")


def typical_steps(steps: list[ReplayedStep]) -> list[ReplayedStep]:
    """Return the steps, of all ranks, that stand for the step: all but outliers."""
    by_rank: dict[int, list[ReplayedStep]] = {}
    for one in steps:
        by_rank.setdefault(one.rank, []).append(one)
    kept = typical_of_ranks([np.array([one.measured_ns for one in own], np.int64) for own in by_rank.values()])
    found = {id(one) for own, mask in zip(by_rank.values(), kept, strict=True)
             for one, keep in zip(own, mask.tolist(), strict=True) if keep}
    return [one for one in steps if id(one) in found]


def slowest_mean(times: Iterable[tuple[int, int]]) -> float:
    """Return the largest of the ranks' mean times, ns; of no time 0.

    Args:
        times: rank and time, ns.
    """
    by_rank: dict[int, list[int]] = {}
    for rank, ns in times:
        by_rank.setdefault(rank, []).append(ns)
    return max((sum(own) / len(own) for own in by_rank.values()), default=0.0)


def _host_json(entry: OperationTime | ModuleTime | PhaseTime) -> dict[str, Any]:
    return {"calls": entry.calls, "host_us": entry.host_ns / 1e3, "waiting_us": entry.waiting_ns / 1e3,
            "gpu_us": entry.gpu_ns / 1e3}


def _largest_path(entries: list[PathEntry]) -> list[PathEntry]:
    return sorted(entries, key=lambda e: (-e.time_ns, e.operation, e.module, e.bound))


def _largest(entries: list[Any]) -> list[Any]:
    """Largest host and GPU time together first; what only waited comes last."""
    return sorted(entries, key=lambda e: (-(e.host_ns + e.gpu_ns), -e.waiting_ns))


def _largest_kernels(entries: Iterable[tuple[Any, ...]]) -> list[KernelTime]:
    found = list(entries)
    total = sum(ns for _, _, ns in found)
    made = [KernelTime(name, count, ns, ns / total if total else 0.0) for name, count, ns in found]
    return sorted(made, key=lambda e: (-e.total_ns, e.kernel))
