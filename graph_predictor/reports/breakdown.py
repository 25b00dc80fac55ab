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

from graph_predictor.prediction.deciding import StreamEnds, decides
from graph_predictor.prediction.path_attribution import attribute_path, bound_sums
from graph_predictor.prediction.replay import WINDOW, Replay, ReplayedStep
from graph_predictor.prediction.result import which_times
from graph_predictor.prediction.step_kinds import step_kinds
from graph_predictor.recorded.module_paths import with_backward_modules
from graph_predictor.recorded.typical_steps import left_out, typical_of_ranks
from graph_predictor.simulation.critical_path import (
    Bound,
    Causes,
    Paths,
    PathStart,
    step_start,
    walks_back,
    window_start,
)
from graph_predictor.simulation.host_time import exclusive_time, operation_of, split, waits
from graph_predictor.simulation.program import whole_ns
from tracer.arrays import Int32, Int64
from tracer.charts import Chart, ChartSeries
from tracer.errors import ForetraceError
from tracer.graph import NONE, ExecutionGraph, OpKind, Phase
from tracer.grouping import grouped, kinds_of, totals
from tracer.shown import Shown

if TYPE_CHECKING:
    import pandas as pd

_CALLS, _HOST, _WAITING, _GPU = range(4)
_MISSING = 2
"""Codes below zero: of an operation that is none, and of work whose launch is unknown."""
OUTSIDE = "outside any op"
"""Name of host time in no operation: Python, the framework's own code, the profiler; and of what it launched."""
NO_PHASE = "other"
"""Phase of what is in none."""
NO_LAUNCH = "launch not recorded"
"""Name of GPU work whose launch the window does not hold."""

_Place = tuple[int, int, int, int]
"""Of a step: its row, begin and end (ns of the window), and thread."""
_PHASES = {int(phase): phase.name.lower() for phase in Phase}


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

    def __init__(self, bounds: dict[Bound, int], parts: Sequence[tuple[_Views, int]]) -> None:
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
        ranks: dict[int, tuple[_Views, list[int]]] = {}
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
        found.update(zip(rows, OperationSums(replay, position, causes).steps([chosen[at] for at in rows]),
                         strict=True))
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


class OperationSums:
    """One rank's times by operation.

    It keeps what all steps of the rank share; a step then takes as long as its own events.
    """

    def __init__(self, replay: Replay, position: int, causes: Causes) -> None:
        built = replay.built
        self.replay, self.position, self.causes = replay, position, causes
        self.graph: ExecutionGraph = with_backward_modules(built.graphs[position])
        self.host = exclusive_time(self.graph)
        self.share = None if built.without_profiler is None else built.without_profiler.shares[position]
        self.waits = waits(built.recorded_program, position, built.thread_number, built.clock_ns[position])
        self.operation = np.append(operation_of(self.graph), NONE)
        low, high = int(replay.program.kernel_ptr[position]), int(replay.program.kernel_ptr[position + 1])
        self.kernel_ns = (replay.simulated.kernel_end - replay.simulated.kernel_start)[low:high]
        self.ends = StreamEnds(self.graph, low)
        ops, kernels = self.graph.ops, self.graph.kernels
        self.ops_of = _ByStep(np.where(ops.kind == OpKind.OPERATION, ops.step, NONE))
        self.kernels_of = _ByStep(kernels.step)
        self.modules = bool((ops.module >= 0).any())
        # Names with modules as codes in their order: of operations, of kernels by themselves, and of neither.
        width = len(self.graph.strings) + 1 if self.modules else 1
        pairs, place = grouped(np.concatenate([
            (ops.name.astype(np.int64) + 1) * width + (ops.module + 1 if self.modules else 0),
            (kernels.name.astype(np.int64) + 1) * width, [0]]))
        self.pairs = [(pair // width + NONE, pair % width + NONE) for pair in pairs.tolist()]
        self.pair_of_op, self.pair_of_kernel = place[:len(ops)], place[len(ops):-1]
        self.pair_of_none = int(place[-1])
        # Of each operation, of what is in none and of work whose launch is unknown: name, module and phase.
        self.width = len(self.graph.strings) + len(Phase) + _MISSING
        columns = [np.append(column, [NONE, NONE - 1]).astype(np.int64) for column in (ops.name, ops.module, ops.phase)]
        self.view_of_op, example = kinds_of(*columns)
        self.views = np.stack([column[example] for column in columns], axis=1)
        orphans = np.flatnonzero(kernels.launch < 0)
        self.orphans = orphans[np.argsort(kernels.start_ns[orphans], kind="stable")]
        self.orphans_start = kernels.start_ns[self.orphans]

    def steps(self, steps: list[ReplayedStep]) -> list[StepBreakdown]:
        """Break steps down, all in one pass; their tables are made when they are asked for."""
        replay = self.replay
        places = [self._place(step) for step in steps]
        paths = walks_back(self.causes, [self._start(step) for step in steps])
        kernels = [self._in_step(row, start, end) for row, start, end, _ in places]
        views = {"path": self._path_sums(paths), **self._host_views(places, kernels), "kernels": self._kernels(kernels)}
        bounds = bound_sums(paths)
        decided = decides(replay, steps, self.ends, bounds, self.causes)
        return [StepBreakdown(step.rank, step.name, step.measured_ns, step.replayed_ns,
                              Totals(bounds[at], [(views, at)]), decided[at])
                for at, step in enumerate(steps)]

    def _start(self, step: ReplayedStep) -> PathStart:
        replay = self.replay
        if step.name == WINDOW:
            return window_start(replay.program, replay.simulated, self.position)
        return step_start(replay.simulated, step.begin_item, step.end_item)

    def operation_sums(self, step: ReplayedStep) -> tuple[Int64, Int64]:
        """Return rows of ``graph.ops`` with their calls, own host time, waiting and GPU time (ns) in a step, [4, rows].

        The row after the table's last one stands for what is in no operation, the next for device work whose launch
        is unknown.
        """
        place = self._place(step)
        _, op, what, ns = self._parts([place], [self._in_step(*place[:3])])
        rows, place_of = np.unique(op, return_inverse=True)  # not by a table: rows span the whole trace
        sums = totals(what * len(rows) + place_of.reshape(-1), ns, 4 * len(rows)).reshape(4, -1)
        used = sums.any(axis=0)
        return rows[used], sums[:, used]

    def _place(self, step: ReplayedStep) -> _Place:
        """Row, begin, end (ns of the window) and thread of a step."""
        graph = self.graph
        if step.name == WINDOW:
            return NONE, 0, max(graph.meta.window_ns, 1), NONE
        row = int(self.replay.program.item_row[step.begin_item])
        start = int(graph.steps.start_ns[row])
        return row, start, start + int(graph.steps.duration_ns[row]), int(graph.steps.thread[row])

    def _path_sums(self, paths: Paths) -> StepSums:
        graph, first = self.graph, paths.first
        count = len(first) - 1
        if self.share is None:
            pieces = [attribute_path(self.replay, paths.joined, self.position, self.host, self.operation)]
        else:  # lengths are rounded along each path
            pieces = [attribute_path(self.replay, paths.one(at), self.position, self.host, self.operation, self.share)
                      for at in range(count)]
        bound, op, kernel, ns = (np.concatenate([getattr(each, name) for each in pieces])
                                 for name in ("bound", "op", "kernel", "ns"))
        segment = np.concatenate([each.segment + (first[at] if len(pieces) > 1 else 0)
                                  for at, each in enumerate(pieces)])
        step = np.searchsorted(first, segment, side="right") - 1
        pair = np.full(len(op), self.pair_of_none, np.int64)
        known = op >= 0
        pair[known] = self.pair_of_op[op[known]]
        alone = ~known & (kernel >= 0)
        pair[alone] = self.pair_of_kernel[kernel[alone]]
        kinds = len(self.pairs) * len(Bound)
        keys, place = grouped(step * kinds + pair * len(Bound) + bound)
        values = np.stack([totals(place, ns, len(keys)), np.bincount(place, minlength=len(keys))], axis=1)

        def label(kind: int) -> tuple[str, str, Bound]:
            name, module = self.pairs[kind // len(Bound)]
            return graph.string(name) or OUTSIDE, graph.string(module), Bound(kind % len(Bound))

        return StepSums.of(keys // kinds, keys % kinds, values, count, label)

    def _parts(self, places: list[_Place], kernels: list[Int64]) -> tuple[Int64, Int64, Int64, Int64]:
        """What steps consist of: the step, the operation (a row of ``ops``, or one of two more), which of the four sums
        it counts for, and ns or calls."""
        ops, graph = self.graph.ops, self.graph
        starts, ends, threads = (np.array([place[at] for place in places], np.int64) for at in (1, 2, 3))
        own, own_step = self.host.cut(starts, ends)
        waiting, waiting_step = self.waits.cut(starts, ends)
        nearby = self.host.between(int(starts.min()), int(ends.max()))
        blocked = split(nearby, waiting.thread, waiting.start_ns, waiting.end_ns)
        blocked_step = waiting_step[blocked.query]
        # Two more slots: one for what is in no operation, one for device work whose launch is unknown.
        nowhere, unknown = len(ops), len(ops) + 1
        own_ns = own.end_ns - own.start_ns
        inside = blocked.op >= 0
        found = [(own_step, own.op, _HOST, own_ns)]
        found += [(blocked_step[inside], blocked.op[inside], which, sign * blocked.ns[inside])
                  for which, sign in ((_HOST, -1), (_WAITING, 1))]
        # Outside any operation only the step's own thread counts: others are idle there.
        outside = (waiting.thread[blocked.query] == threads[blocked_step]) & ~inside
        waited = totals(blocked_step[outside], blocked.ns[outside], len(places))
        mine = own.thread == threads[own_step]
        rest = ends - starts - totals(own_step[mine], own_ns[mine], len(places)) - waited
        threaded = np.flatnonzero(threads >= 0)
        at = np.full(len(threaded), nowhere)
        found += [(threaded, at, _WAITING, waited[threaded]), (threaded, at, _HOST, rest[threaded])]
        if self.share is not None:
            found = [(step, op, which, whole_ns(ns * self.share[op]) if which == _HOST else ns)
                     for step, op, which, ns in found]
        launched = np.concatenate(kernels)
        launched_by = self.operation[graph.kernels.op[launched]]
        launched_by[launched_by < 0] = nowhere
        launched_by[graph.kernels.launch[launched] < 0] = unknown
        found.append((_windows(kernels), launched_by, _GPU, self.kernel_ns[launched]))
        called = [np.flatnonzero(ops.kind == OpKind.OPERATION) if row < 0 else self.ops_of.rows(row)
                  for row, *_ in places]
        calls = np.concatenate(called)
        found.append((_windows(called), calls, _CALLS, np.ones(len(calls), np.int64)))
        what = np.repeat([each[2] for each in found], [len(each[1]) for each in found])
        step, op, ns = (np.concatenate([each[at] for each in found]).astype(np.int64) for at in (0, 1, 3))
        return step, op, what, ns

    def _host_views(self, places: list[_Place], kernels: list[Int64]) -> dict[str, StepSums]:
        step, op, what, ns = self._parts(places, kernels)
        # By name, module and phase together first: of these there are few.
        keys, place = grouped(step * len(self.views) + self.view_of_op[op])
        sums = totals(what * len(keys) + place, ns, 4 * len(keys)).reshape(4, -1)
        used = np.bincount(place[ns != 0], minlength=len(keys)) > 0
        step, view = keys[used] // len(self.views), keys[used] % len(self.views)
        by_what = [each[used] for each in sums]

        def by(label: Callable[..., tuple[str, ...]], *columns: int) -> StepSums:
            """Sums of each step by some of the three codes."""
            kinds, kind = grouped(sum((self.views[:, column] + _MISSING) * self.width ** power
                                      for power, column in enumerate(reversed(columns))))
            keys, place = grouped(step * len(kinds) + kind[view])
            values = np.stack([totals(place, each, len(keys)) for each in by_what], axis=1)
            powers = self.width ** np.arange(len(columns))[::-1]
            return StepSums.of(keys // len(kinds), keys % len(kinds), values, len(places),
                               lambda kind: label(*(kinds[kind] // powers % self.width - _MISSING).tolist()))

        def text(code: int) -> str:
            return self.graph.string(code) if code >= 0 else {NONE: "", NONE - 1: NO_LAUNCH}[code]

        found = {"operations": by(lambda name: (text(name) or OUTSIDE,), 0),
                 "phases": by(lambda module, phase: (text(module), _PHASES.get(phase, NO_PHASE)), 1, 2)}
        if self.modules:
            found["modules"] = by(lambda module: (text(module),), 1)
        return found

    def _in_step(self, row: int, start: int, end: int) -> Int64:
        """Device work launched in a step; orphans count where they started."""
        if row < 0:
            return np.arange(len(self.graph.kernels))
        low, high = np.searchsorted(self.orphans_start, (start, end))
        if low == high:
            return self.kernels_of.rows(row)
        return np.union1d(self.kernels_of.rows(row), self.orphans[low:high])

    def _kernels(self, kernels: list[Int64]) -> StepSums:
        rows = np.concatenate(kernels)
        width = len(self.graph.strings)
        keys, place = grouped(_windows(kernels) * width + self.graph.kernels.name[rows])
        values = np.stack([np.bincount(place, minlength=len(keys)), totals(place, self.kernel_ns[rows], len(keys))],
                          axis=1)
        return StepSums.of(keys // max(width, 1), keys % max(width, 1), values, len(kernels),
                           lambda name: (self.graph.string(name),))


@dataclass(frozen=True, slots=True)
class StepSums:
    """Sums by step and kind: rows in the order of the steps, within one in that of the kinds' numbers.

    Attributes:
        first: where each step's rows begin, and the end.
        kind, values: of each row [rows] and [rows, sums].
        label: makes a kind's key: what its entries begin with.
    """

    first: Int64
    kind: Int64
    values: Int64
    label: Callable[[int], tuple[Any, ...]]

    @classmethod
    def of(cls, step: Int64, kind: Int64, values: Int64, count: int,
           label: Callable[[int], tuple[Any, ...]]) -> StepSums:
        """Take rows whose steps are in order."""
        return cls(np.searchsorted(step, np.arange(count + 1)), kind, values, label)

    def of_step(self, at: int) -> list[tuple[Any, ...]]:
        """Return the key and sums of each kind in a step."""
        rows = slice(int(self.first[at]), int(self.first[at + 1]))
        return [(*self.label(kind), *sums) for kind, sums in
                zip(self.kind[rows].tolist(), self.values[rows].tolist(), strict=True)]

    def of_steps(self, steps: list[int]) -> list[tuple[tuple[Any, ...], list[int]]]:
        """Return the key and sums of each kind in several steps together, in the order in which the steps' own tables
        first have them."""
        counts = self.first[np.array(steps) + 1] - self.first[steps]
        rows = np.repeat(self.first[steps] - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
        kinds, place = grouped(self.kind[rows])
        values = self.values[rows]
        sums = np.stack([totals(place, each, len(kinds)) for each in values.T], axis=1)
        met = np.zeros(len(kinds), np.int64)
        met[place[::-1]] = np.arange(len(rows) - 1, -1, -1)
        order = [np.arange(len(kinds)), np.repeat(np.arange(len(steps)), counts)[met]]
        if values.shape[1] > _WAITING:  # host views, whose entries may be equally large
            own = values[met]
            order[1:1] = [-own[:, _WAITING], -(own[:, _HOST] + own[:, _GPU])]
        by_step = np.lexsort(order)
        return [(self.label(kind), own) for kind, own in
                zip(kinds[by_step].tolist(), sums[by_step].tolist(), strict=True)]


_Views = Mapping[str, StepSums]
"""The tables of a rank's steps, by name."""


def _windows(rows: list[Int64]) -> Int64:
    """Which window each row is of, where they are put behind one another."""
    return np.repeat(np.arange(len(rows)), [len(each) for each in rows])


class _ByStep:
    """Rows by the step they are in, found without looking at those of other steps."""

    def __init__(self, step: Int32) -> None:
        self.order = np.argsort(step, kind="stable")
        # As wide as what is looked up, or all of it would be converted for each look-up.
        self.sorted = step[self.order].astype(np.int64)

    def rows(self, step: int) -> Int64:
        """Rows of one step, in order."""
        low, high = np.searchsorted(self.sorted, (step, step + 1))
        return self.order[low:high]


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
