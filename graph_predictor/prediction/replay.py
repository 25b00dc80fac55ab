"""Replay: simulate a recorded job with its own durations and compare with what was measured.

In *constants* mode (the default) only kernel durations and unblocked host time are as recorded. Waiting is simulated,
and a few constants per trace give launch latencies and kernel gaps. Predictions rely on replays in this mode agreeing
with the recording.

Where only some ranks of a job were recorded, its collectives keep their recorded durations. These durations include
waiting for the other ranks. A what-if does not scale that."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp

import numpy as np

from graph_predictor.figures import signed_percent
from graph_predictor.prediction.repeat import Cycle
from graph_predictor.prediction.unprofiled import on_unprofiled_clock, unprofiled
from graph_predictor.recorded.counted_steps import CountedSteps, StepLengths
from graph_predictor.recorded.facts import check_device_work, damage_notes, rank_number
from graph_predictor.simulation.build import Built, build_program, kernel_factors
from graph_predictor.simulation.changed_program import with_residuals
from graph_predictor.simulation.engine import PathStart, simulate
from graph_predictor.simulation.program import EventTimes, Program, Simulated, step_items, whole_ns
from tracer.arrays import Int64
from tracer.errors import ForetraceError
from tracer.graph import NONE, SHAPE_ONLY, ExecutionGraph, KernelKind
from tracer.job import AnyJob, graphs_of
from tracer.lazy import pandas as pd
from tracer.shown import Chart, ChartSeries, Shown

Event = tuple[str, int]
"""("item" or "kernel", row of the program)."""


@dataclass(frozen=True, slots=True, eq=False)
class CountedSpan:
    """A step of one rank, or the rank's whole window.

    A step's measured time, its simulated time and the start of its critical path all come from one span.

    Attributes:
        program: the program of the events, or any other program of the same rows.
        rank: position in the job.
        since: the event at whose end the span begins; ``None`` for a window.
        until: the event at whose end the span ends; ``None`` for a window, which ends with its last event.
        from_start: whether the span begins at the start of ``since`` instead of its end.
    """

    program: Program
    rank: int
    since: Event | None = None
    until: Event | None = None
    from_start: bool = False

    @classmethod
    def of_step(cls, program: Program, rank: int, lengths: StepLengths, row: int, begin: int, end: int) -> CountedSpan:
        """Return the span of a step.

        Args:
            program: the recorded program.
            rank: position of the rank in the job.
            lengths: lengths of the rank's steps.
            row: row of the step in ``graph.steps``.
            begin: item of the step's begin.
            end: item of the step's end.
        """
        if not lengths.on_device[row]:
            return cls(program, rank, ("item", begin), ("item", end))
        first = int(program.kernel_ptr[rank])
        return cls(program, rank, ("kernel", first + int(lengths.since[row])),
                   ("kernel", first + int(lengths.last[row])), bool(lengths.from_start[row]))

    def path_start(self, times: Simulated | EventTimes) -> PathStart:
        """Return where the walk back along the span's critical path begins, and where it stops."""
        if self.since is None or self.until is None:
            return self._window_start(times)
        kind, row = self.since
        begin = times.kernel_start if self.from_start else times.item_end if kind == "item" else times.kernel_end
        kind, last = self.until
        end = times.item_end if kind == "item" else times.kernel_end
        return PathStart(self.until, int(end[last]), int(begin[row]))

    def _window_start(self, times: Simulated | EventTimes) -> PathStart:
        """Return where the path of the rank's whole window begins, at its last event."""
        program = self.program
        items = np.nonzero(program.thread_rank[program.item_thread()] == self.rank)[0]
        kernels = np.arange(program.kernel_ptr[self.rank], program.kernel_ptr[self.rank + 1])
        starts = np.concatenate([times.item_start[items], times.kernel_start[kernels]])
        ends = np.concatenate([times.item_end[items], times.kernel_end[kernels]])
        if not len(ends):
            return PathStart(None, 0, 0)
        last = int(np.argmax(ends))
        at = ("item", int(items[last])) if last < len(items) else ("kernel", int(kernels[last - len(items)]))
        return PathStart(at, int(ends[last]), int(starts.min()))

    def length_ns(self, times: Simulated | EventTimes) -> int:
        """Return the time from begin to end, ns."""
        start = self.path_start(times)
        return start.end_ns - start.stop_ns


REPRODUCIBLE_SHARE = 0.005
"""Above this share of unexplained delay, reports call the GPU timeline not reproducible."""
INEXACT = 0.01
"""A replayed step this far from the measured one is reported, and predictions from it get a wider interval."""
WINDOW = "whole window"


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """One step of one rank, ns.

    Attributes:
        measured_ns: as recorded, under the profiler.
        profiled_ns: replayed under the profiler; equals ``replayed_ns`` unless that is a replay without the profiler.
        begin_item, end_item: items of the program, on the step's thread.
        span: the part of the timeline that is counted as the step.
        why_not: reason why it is not one of the recording's steps that count; empty if it is one.
    """

    rank: int
    name: str
    measured_ns: int
    replayed_ns: int
    profiled_ns: int
    begin_item: int
    end_item: int
    span: CountedSpan = field(compare=False, repr=False)
    why_not: str = ""

    @property
    def counts(self) -> bool:
        """Return whether it is one of the steps that count for every command."""
        return not self.why_not

    @property
    def error(self) -> float:
        """Return replayed / measured time - 1, both under the profiler."""
        return self.profiled_ns / self.measured_ns - 1.0 if self.measured_ns else 0.0


@dataclass(slots=True, repr=False)
class Replay(Shown):
    """The result of a replay; ``program`` and ``simulated`` hold every time behind it."""

    steps: list[ReplayedStep]
    built: Built
    program: Program
    simulated: Simulated
    notes: list[str] = field(default_factory=list)
    scale_kernels: float = 1.0
    """Factor on kernel durations; if it is not 1, the steps are meant to differ from the measured ones."""

    @property
    def step_ns(self) -> float:
        """Return the time of a step, ns: the mean of the slowest rank's replayed steps that count; 0.0 without any."""
        return slowest_mean_ns((s.rank, s.replayed_ns) for s in self.steps if s.counts and s.name != WINDOW)

    def headline(self) -> str:
        """Return one line on how well the steps were replayed."""
        if not self.steps:
            return "no steps"
        worst = max((step.error for step in self.steps), key=abs)
        return f"{len(self.steps):,} steps replayed, {signed_percent(worst, 2)} of the measured time at most"

    def tables(self) -> Mapping[str, Callable[[], pd.DataFrame]]:
        """Return ``steps``: rank, name, measured and replayed time in ns, and the error (under the profiler)."""
        return {"steps": lambda: pd.DataFrame([{
            "rank": step.rank, "step": step.name, "measured_ns": step.measured_ns, "replayed_ns": step.replayed_ns,
            "error": step.error} for step in self.steps])}

    def chart(self) -> Chart:
        """Return the steps, measured and replayed."""
        return Chart("bars", self.headline(), [f"{step.name}, rank {step.rank}" for step in self.steps], [
            ChartSeries("measured", [step.measured_ns / 1e6 for step in self.steps]),
            ChartSeries("replayed", [step.replayed_ns / 1e6 for step in self.steps])], "ms")

    @property
    def inexact(self) -> list[ReplayedStep]:
        """Return the steps whose replay is more than 1% off; none if kernels were scaled."""
        return [s for s in self.steps if abs(s.error) > INEXACT] if self.scale_kernels == 1.0 else []

    @property
    def graphs(self) -> list[ExecutionGraph]:
        """Return the replayed graphs, one for each rank of ``program``."""
        return self.built.graphs

    @property
    def profiled(self) -> bool:
        """Return whether replayed times include the profiler; measured times always do."""
        return self.built.profiled

    @property
    def median_abs_error(self) -> float:
        """Return the median of the steps' absolute errors (a fraction)."""
        return float(np.median([abs(s.error) for s in self.steps])) if self.steps else 0.0

    @property
    def max_abs_error(self) -> float:
        """Return the largest absolute error of a step (a fraction)."""
        return max((abs(s.error) for s in self.steps), default=0.0)

    @property
    def unexplained_share(self) -> float:
        """Return the worst rank's unexplained delay plus the errors of its inexact steps, as a share of its window."""
        missed: dict[int, int] = {}
        for step in self.inexact:
            missed[step.rank] = missed.get(step.rank, 0) + abs(step.profiled_ns - step.measured_ns)
        shares = [report.unexplained_share + missed.get(rank_number(graph, at), 0) / max(report.window_ns, 1)
                  for at, (graph, report) in enumerate(zip(self.graphs, self.built.reports, strict=True))]
        return max(shares, default=0.0)

    @property
    def reproducible(self) -> bool:
        """Return whether the simulation explains the GPU timeline: ``unexplained_share`` is small enough."""
        return self.unexplained_share <= REPRODUCIBLE_SHARE

    def kernel_end_errors_ns(self) -> Int64:
        """Return simulated - recorded end of every kernel (ns)."""
        return self.simulated.kernel_end - self.program.recorded_kernel_end


def check_recorded(graphs: Sequence[ExecutionGraph]) -> None:
    """Raise ``ForetraceError`` if a graph cannot be replayed: its step was traced by shapes alone and has no times, or
    its device's work was not recorded."""
    if any(graph.meta.era == SHAPE_ONLY for graph in graphs):
        raise ForetraceError("The step was traced by shapes alone and never ran: it has operations but no times, so "
                             "there is nothing to replay or break down; use a recording (foretrace capture).")
    check_device_work(graphs)


def replay(
    graphs: AnyJob,
    *,
    residuals: bool = False,
    scale_kernels: float = 1.0,
    built: Built | None = None,
    profiled: bool = True,
) -> Replay:
    """Simulate a job with its recorded durations.

    By default the replay is compared with the step as recorded, under the profiler. Reports on where time goes use a
    replay without the profiler (``profiled=False``): the same durations less the profiler's cost.

    Args:
        graphs: A job, its graphs, or one rank's graph.
        residuals: Add the per-event residuals (a playback).
        scale_kernels: Factor on the durations of device work other than collectives: a what-if.
        built: An already built program of the same graphs, to save the work.
        profiled: Simulate the step as recorded, under the profiler; otherwise without it, where the capture knows what
            that takes (``Replay.profiled`` says which it was).

    Returns:
        The replayed steps. A window without steps is replayed as a whole.

    Raises:
        ForetraceError: There is nothing to simulate, or the factor is negative, not finite or beyond what int64
            nanoseconds hold.
    """
    graphs = graphs_of(graphs)
    if not graphs:
        raise ForetraceError("There is nothing to replay: no graph was given. Read a trace or a job first.")
    factors = kernel_factors(graphs, scale_kernels)
    check_recorded(graphs)
    built = built or build_program(list(graphs))
    if not profiled:
        built = unprofiled(built, CountedSteps.of(built.graphs).common)
    recorded = with_residuals(built.recorded_program) if residuals else built.recorded_program
    program = on_unprofiled_clock(recorded, built) if residuals else built.program
    if not len(program.item_kind) and not len(program.kernel_item):
        raise ForetraceError(
            "There is nothing to replay: the trace holds neither calls nor device work. It was probably recorded "
            "without activities; profile with ProfilerActivity.CPU and CUDA.")
    program = program.with_durations(whole_ns(program.kernel_duration * factors))
    simulated = simulate(program)
    # Steps were measured under the profiler, so only a replay under the profiler can be compared with them.
    under = simulated if built.profiled else simulate(
        recorded.with_durations(whole_ns(recorded.kernel_duration * factors)))
    steps = replayed_steps(built, program, simulated, under)
    notes = [*_contradicted(built), *_pinned(built), *damage_notes(built.graphs), *built.rendezvous.notes,
             *_partial_job(built)]
    with_steps = {s.rank for s in steps}
    for rank, graph in enumerate(built.graphs):
        if rank_number(graph, rank) not in with_steps:
            steps.append(_whole_window(built, program, simulated, under, rank))
    if any(s.name == WINDOW for s in steps):
        notes.append("No steps were found: the whole window is replayed as one. Name the region that marks them "
                     "with --step-region, or call prof.step() after each iteration.")
    result = Replay(steps=steps, built=built, program=program, simulated=simulated, notes=notes,
                    scale_kernels=scale_kernels)
    if result.inexact:
        worst = max(result.inexact, key=lambda s: abs(s.error))
        result.notes.insert(0, f"{len(result.inexact):,} of {len(steps):,} steps are replayed more than 1% off (most: "
                            f"{worst.name} of rank {worst.rank}, {signed_percent(worst.error)}): the rules miss "
                            "something that decided them, and predictions that rest on them are wider by that.")
    return result


def slowest_mean_ns(lengths: Iterable[tuple[int, int]]) -> float:
    """Return the mean length of the steps of the slowest rank, ns; 0.0 without steps.

    Args:
        lengths: rank and length of each step that counts, ns.
    """
    by_rank: dict[int, list[int]] = {}
    for rank, ns in lengths:
        by_rank.setdefault(rank, []).append(ns)
    return max((sum(own) / len(own) for own in by_rank.values()), default=0.0)


def replayed_steps(built: Built, program: Program, simulated: Simulated, under: Simulated) -> list[ReplayedStep]:
    """Return the steps of all ranks, in order.

    Args:
        built: the recorded job.
        program: the simulated program, whose rows are numbered as ``built``'s.
        simulated: its simulated times.
        under: its simulated times under the profiler.
    """
    counted, recorded, found = CountedSteps.of(built.graphs), program.recorded, []
    for rank, row, begin, end in step_items(program):
        graph, lengths = built.graphs[rank], counted.ranks[rank]
        span = CountedSpan.of_step(program, rank, lengths, row, begin, end)
        found.append(ReplayedStep(
            rank_number(graph, rank), graph.string(int(graph.steps.name[row])), span.length_ns(recorded),
            span.length_ns(simulated), span.length_ns(under), begin, end, span, counted.why_not(rank, row)))
    return found


def _contradicted(built: Built) -> list[str]:
    """Return notes on inferred waits that the recorded times contradict."""
    launches = sum(report.queue_contradicted for report in built.reports)
    found = [f"{launches:,} launches returned although the launch queue was full by this account: they wait for no "
             "place in it."] if launches else []
    if built.left_out:
        listed = ", ".join(f"{count:,} {name}" for name, count in built.left_out.items())
        found.append(f"Inferred waits that would have closed a circle were left out ({listed}): the recorded times "
                     "contradict them, so that the trace's clocks or its order of events are not to be trusted.")
    return found


def _pinned(built: Built) -> list[str]:
    """Return a note if more pieces of work than streams keep their recorded start, without a launch."""
    pinned = sum(report.edges["external"] for report in built.reports)
    streams = sum(len(np.unique(g.kernels.stream)) for g in built.graphs)
    if pinned <= streams:
        return []
    return [f"{pinned} pieces of GPU work without a recorded launch start when they were seen to, as external events: "
            "that they are on time says nothing, and a what-if does not move them."]


def _partial_job(built: Built) -> list[str]:
    """Return a note if collectives wait for ranks that were not recorded."""
    world = max((g.meta.world_size for g in built.graphs), default=1)
    collective = any((g.kernels.kind == KernelKind.COLLECTIVE).any() for g in built.graphs)
    if world <= len(built.graphs) or not collective:
        return []
    return [f"{len(built.graphs)} of {world} ranks were recorded: the late arrival of the others is an external event, "
            "kept as part of the collectives' recorded durations, which a what-if does not scale."]


def _whole_window(built: Built, program: Program, simulated: Simulated, under: Simulated, rank: int) -> ReplayedStep:
    """Return a rank's whole window as one step, from its first host item or kernel to its last."""
    items = np.flatnonzero(program.thread_rank[program.item_thread()] == rank)
    begin, end = (int(items[0]), int(items[-1])) if len(items) else (NONE, NONE)
    span = CountedSpan(program, rank)
    return ReplayedStep(
        rank_number(built.graphs[rank], rank), WINDOW, span.length_ns(program.recorded),
        span.length_ns(simulated), span.length_ns(under), begin, end, span)


MOST_UNEXPLAINED = 0.95
"""Largest unexplained share that counts (delays of several streams can exceed the window): at most a factor of 20."""


@dataclass(frozen=True, slots=True)
class ReplayErrors:
    """Errors of a replay against the recorded steps that a prediction repeats.

    Attributes:
        error: largest absolute error of the replayed steps, a fraction.
        unexplained: share of the worst rank's window that no rule explains.
        apart: log of the measured step over the unedited predicted one. Where recorded steps were not in a steady
            state, either may be right for an edited step, so the interval covers both.
    """

    error: float = 0.0
    unexplained: float = 0.0
    apart: float = 0.0

    def widened(self, low: float, high: float) -> tuple[float, float]:
        """Return an interval's ends, widened by the replay's errors, and by ``apart`` on the measured step's side."""
        factor = 1.0
        if self.error > INEXACT:
            factor *= 1.0 + self.error
        if self.unexplained > REPRODUCIBLE_SHARE:
            # If the delay is no part of the step, only the rest is: recorded / (recorded - unexplained).
            factor /= 1.0 - min(self.unexplained, MOST_UNEXPLAINED)
        # The replay's error may be the reason why the two steps are apart, so the larger of both counts.
        return low / max(factor, exp(-self.apart)), high * max(factor, exp(self.apart))

    def warnings(self) -> list[str]:
        """Return the warnings that a prediction states."""
        found = []
        if self.error > INEXACT:
            found.append(f"The recorded step itself is replayed {self.error:.1%} off (see foretrace replay): the "
                         "interval is wider by that.")
        if self.unexplained > REPRODUCIBLE_SHARE:
            found.append(f"The recorded GPU timeline is not reproducible (see foretrace replay): no rule explains "
                         f"{self.unexplained:.1%} of it. The kernels' times are not to be trusted, and the interval is "
                         "wider by that.")
        return found


def replay_error(built: Built, cycle: Cycle) -> ReplayErrors:
    """Replay the recorded steps of a cycle, and return the errors."""
    program = built.recorded_program
    simulated = simulate(program)
    steps = replayed_steps(built, program, simulated, simulated)
    error = max((abs(step.error) for step in steps if cycle.item[step.begin_item]), default=0.0)
    return ReplayErrors(error, max((report.unexplained_share for report in built.reports), default=0.0))
