"""Facts about a recording's step before any simulation: computed once, and printed by every command.

::

    graphs ──▶ steps that count ──▶ RecordedFacts: recorded step, step without the profiler, GPU active, why not others

The steady state of the same step, its bound and its critical path are in the ``Prediction`` without edits, which also
has these facts. Commands and pages print all of them in the same lines. Damage of the traces is such a fact; without
the work of its device, a recording cannot be predicted from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from graph_predictor.figures import milliseconds, percent, signed_percent
from graph_predictor.recorded.counted_steps import CountedSteps
from tracer.arrays import Bool, Int64
from tracer.columns import covered, union_ns
from tracer.errors import ForetraceError
from tracer.graph import LAUNCHING, SHAPE_ONLY, ExecutionGraph, HasMeta, KernelKind, Meta
from tracer.job import Job
from tracer.parallel_plan import slowest_of
from tracer.step_work import captured_launches, captured_of_steps


def rank_number(graph: HasMeta, position: int) -> int:
    """Return the rank that the trace names, else its position in the job."""
    return graph.meta.rank if graph.meta.rank >= 0 else position


def by_rank(notes: Sequence[tuple[int, str]], ranks: int) -> list[str]:
    """Return each note once, with the numbers of its ranks unless it holds for all ``ranks`` ranks."""
    told: dict[str, list[int]] = {}
    for rank, note in notes:
        told.setdefault(note, []).append(rank)
    return [note if len(of) == ranks else f"Rank {', '.join(map(str, of))}: {note}" for note, of in told.items()]


def damage_notes(graphs: Sequence[HasMeta]) -> list[str]:
    """Return the sentences of loss reports on data that was left out or assumed. Only ranks with damaged files, or
    traced by shapes alone, have such sentences."""
    notes = [
        (rank_number(graph, position), note)
        for position, graph in enumerate(graphs)
        if graph.meta.loss.truncated_bytes or graph.meta.loss.dropped_events or graph.meta.loss.repaired_events
        or graph.meta.loss.mistimed_kernels or graph.meta.era == SHAPE_ONLY
        or any("left out" in note or "damaged" in note for note in graph.meta.loss.notes)
        for note in graph.meta.loss.notes
    ]
    return by_rank(notes, len(graphs))


def folded_notes(job: Job) -> list[str]:
    """Return a note for folded jobs, in which one graph represents many ranks and only the graphs are simulated."""
    if not job.classes:
        return []
    ranks = ", ".join(str(graph.meta.rank) for graph in job.graphs[:8]) + (", …" if len(job.graphs) > 8 else "")
    only = f"rank {ranks} is" if len(job.graphs) == 1 else f"ranks {ranks} are"
    return [f"The job is folded: only {only} simulated, for all {job.known_ranks:,} ranks that do the same work; they "
            "are taken to arrive together at every collective."]


_NOT_KNOWN = ("What the step rests on is not known, so that nothing is predicted from it. Recordings of NVIDIA and AMD "
              "GPUs and of CPUs can be read; foretrace inspect shows what is known of this one.")


def check_device_work(graphs: Sequence[ExecutionGraph]) -> None:
    """Raise ``ForetraceError`` if the work of a job's devices is unknown: it cannot be read, is lost, or never ran."""
    if why := unknown_device_work(graphs):
        raise ForetraceError(why)


def unknown_device_work(graphs: Sequence[ExecutionGraph]) -> str:
    """Return a sentence on the first file with unknown device work: the reason and what to do; empty for none."""
    return unknown_of([RankDeviceWork.of(graph) for graph in graphs])


@dataclass(frozen=True, slots=True)
class RankDeviceWork:
    """How far one rank's device work is known.

    Attributes:
        source: the rank's file.
        why: why the work is unknown, and what to do; empty if it is known.
        launches, captured: number of its launches, and of those that a CUDA graph only captured.
        captured_of_steps: number of captured launches in each step, [steps].
    """

    source: str
    why: str
    launches: int
    captured: int
    captured_of_steps: Int64

    @classmethod
    def of(cls, graph: ExecutionGraph) -> RankDeviceWork:
        """Return what is known of a rank."""
        found = cls(graph.meta.source, "", int(np.isin(graph.launches.kind, LAUNCHING).sum()),
                    int(captured_launches(graph).sum()), captured_of_steps(graph))
        return replace(found, why=_unknown_of_rank(graph, found))


def unknown_of(ranks: Sequence[RankDeviceWork]) -> str:
    """Return the sentence of ``unknown_device_work`` on a job's ranks."""
    for rank in ranks:
        if rank.why:
            return f"{rank.source}: {rank.why}"
    launches = _only_captured(ranks)
    return f"{ranks[0].source}: {_a_capture(launches)}" if launches else ""


def _unknown_of_rank(graph: ExecutionGraph, work: RankDeviceWork) -> str:
    loss = graph.meta.loss
    # Among many kernels, a few unknown events are a tool's own (counters, marks). More than kernels, they are work.
    if (unread := loss.unreadable_device_events) > len(graph.kernels):
        return f"its device's work cannot be read: {unread:,} events are of a kind that this version does not know. " \
            + _NOT_KNOWN
    if launches := _only_captured([work]):
        return _a_capture(launches)
    if work.launches and not len(graph.kernels):
        return (f"it has {work.launches:,} launches and no device work: the profiler lost it, or was not "
                "allowed to see it. Record the device too (ProfilerActivity.CUDA; foretrace doctor says what a "
                "machine lacks).")
    if calls := loss.unreadable_device_calls:
        return (f"its device's work cannot be read: {calls:,} calls of an accelerator's runtime have no device work "
                "that this version knows. " + _NOT_KNOWN)
    return ""


def _only_captured(ranks: Sequence[RankDeviceWork]) -> int:
    """Return how many launches a CUDA graph captured, if each step has some (without steps: if most are such); else 0.

    Ranks with different numbers of recorded steps are compared by their last steps.
    """
    fewest = min((len(rank.captured_of_steps) for rank in ranks), default=0)
    if fewest:
        captured = np.sum([rank.captured_of_steps[-fewest:] for rank in ranks], axis=0)
        return int(captured.sum()) if (captured > 0).all() else 0
    launches = sum(rank.captured for rank in ranks)
    return launches if launches > sum(rank.launches for rank in ranks) / 2 else 0


def _a_capture(launches: int) -> str:
    return (f"it is the recording of a CUDA graph's capture: {launches:,} launches only recorded the graph and ran "
            "nothing, so that the step is not the one that the program runs. Record steps that launch the graph: more "
            "warm-up steps before the profiler's window.")


def active_ns(start: Int64, end: Int64, device: np.ndarray) -> int:
    """Return the time, ns, in which the most active device works.

    Collectives do not count, because their kernels mostly wait for other ranks. Overlapping work of several streams
    counts once.

    Args:
        start, end: start and end of each piece of device work other than collectives, ns.
        device: device of each piece of work.
    """
    devices = np.unique(device)
    if len(devices) <= 1:
        return union_ns(start, end)
    return max(union_ns(start[device == one], end[device == one]) for one in devices.tolist())


def active_of_steps(graph: ExecutionGraph, *, collectives: bool = False) -> Int64:
    """Return the time, ns, in which work that each recorded step launched keeps each device active, [devices, steps].

    Args:
        graph: the graph of a rank.
        collectives: whether collectives count too.
    """
    kernels, steps = graph.kernels, len(graph.steps)
    numbers, device = np.unique(kernels.device, return_inverse=True)
    devices = max(len(numbers), 1)
    rows = np.flatnonzero((kernels.step >= 0) & (collectives | (kernels.kind != KernelKind.COLLECTIVE)))
    start, duration = kernels.start_ns[rows] - kernels.start_ns[rows].min(initial=0), kernels.duration_ns[rows]
    # Each step's work on a device gets its own stretch of time, so that no two of them overlap.
    stretch = int((start + duration).max(initial=0)) + 1
    start += (device[rows] * steps + kernels.step[rows]) * stretch
    begin = np.arange(devices * steps, dtype=np.int64) * stretch
    return covered((start, start + duration), begin, begin + stretch).reshape(devices, steps)


def _mean_ns(of_steps: Int64, steps: Bool) -> float:
    """Return the mean over some steps, ns, of the device where it is longest; ``of_steps`` is [devices, steps]."""
    return int(of_steps[:, steps].sum(axis=1).max(initial=0)) / int(steps.sum())


AHEAD = 0.05
"""Least head start, as a share of a step, of a host that runs ahead. In host-bound jobs the host is 0.01 to 0.06 ms
ahead, 0.1% or less. In two GPU-bound jobs without the profiler it is 15% to 100% of a step (benchmarks/jobs.py)."""


def head_start_ns(graph: ExecutionGraph) -> int:
    """Return how long the first launched kernel had to wait for work launched before the recording, ns; 0 where no such
    work was recorded.

    ::

        host     … launches |window opens|──[ first call ]──
        device   ══ work launched before the window ══════════|== the first call's kernel ==|
                                              └─ head start ──┘

    If the host decides the step time, its device waits for it, and launched kernels start at once. A device that still
    has work for milliseconds when the profiler starts has a host that runs ahead.
    """
    kernels = graph.kernels
    launched = np.flatnonzero(kernels.launch >= 0)
    before = kernels.launch < 0
    if not len(launched) or not before.any():
        return 0
    call = graph.launches.start_ns[kernels.launch[launched]]
    first = int(launched[np.argmin(call)])
    start, called = int(kernels.start_ns[first]), int(call.min())
    busy = np.minimum(kernels.start_ns[before] + kernels.duration_ns[before], start) - np.maximum(
        kernels.start_ns[before], called)
    return min(start - called, int(np.maximum(busy, 0).sum()))


def runs_ahead(graph: ExecutionGraph) -> bool:
    """Return whether a rank's host was further ahead of its device than in any host-bound job."""
    if not len(graph.steps):
        return False
    return head_start_ns(graph) > AHEAD * float(np.median(graph.steps.duration_ns))


def further_out(graphs: Sequence[ExecutionGraph], ranks: int, of: int) -> tuple[float, str]:
    """Return how much longer (log) kernels of the slowest of ``of`` ranks take than those of the slowest of ``ranks``,
    and a sentence on it. Ranks are assumed to vary as the kernels of these graphs vary from step to step."""
    sigma = kernel_jitter(graphs)
    if sigma is None:
        return 0.0, "No rank has two equal steps, so kernels' variation is unknown: no rank is taken to be slower."
    further = sigma * (slowest_of(of) - slowest_of(ranks))
    return further, (f"Ranks' kernels vary by {sigma:.2%} from step to step, so that the slowest rank's take "
                     f"{signed_percent(np.expm1(further), 2)}.")


def kernel_jitter(graphs: Sequence[ExecutionGraph]) -> float | None:
    """Return the standard deviation, from step to step, of the log of the time of a rank's computing kernels.

    Only steps with the usual number of kernels are compared; ``None`` where no rank has two of them.
    """
    deviations, freedom = 0.0, 0
    for graph in graphs:
        kernels = graph.kernels
        own = (kernels.kind == KernelKind.COMPUTE) & (kernels.step >= 0)
        steps = len(graph.steps)
        count = np.bincount(kernels.step[own], minlength=steps)
        total = np.bincount(kernels.step[own], weights=kernels.duration_ns[own], minlength=steps)
        if not count.any():
            continue
        usual = np.bincount(count[count > 0]).argmax()
        logs = np.log(total[(count == usual) & (total > 0)])
        deviations += float(((logs - logs.mean()) ** 2).sum())
        freedom += max(len(logs) - 1, 0)
    return float(np.sqrt(deviations / freedom)) if freedom else None


SHOWN = 4
"""Number of excluded steps whose reasons a sentence states."""


@dataclass(frozen=True, slots=True)
class RankFacts:
    """One rank's recorded step, ns: means of the steps that count. ``gpu_active_ns`` is ``None`` without GPU work;
    ``exposed_ns`` is the time in which its device only transfers or waits in collectives."""

    rank: int
    step_ns: float
    gpu_active_ns: float | None
    exposed_ns: float


@dataclass(frozen=True, slots=True)
class RankRecord:
    """One rank's part of ``RecordedFacts``: a few numbers for each step, kept when the rank's graph is not.

    Attributes:
        meta: of its graph.
        names: names of its steps.
        active_ns, exposed_ns: time in which each device computes, and in which it is active by collectives alone,
            [devices, steps]; ``active_ns`` is ``None`` without GPU work.
    """

    meta: Meta
    names: tuple[str, ...]
    active_ns: Int64 | None
    exposed_ns: Int64

    @classmethod
    def of(cls, graph: ExecutionGraph) -> RankRecord:
        """Return the record of a rank."""
        active = active_of_steps(graph)
        together = active_of_steps(graph, collectives=True) if len(graph.collectives) else active
        return cls(graph.meta, tuple(graph.string(int(code)) for code in graph.steps.name.tolist()),
                   active if len(graph.kernels) else None, together - active)


@dataclass(frozen=True, slots=True)
class RecordedFacts:
    """The recorded step of a job.

    Attributes:
        step_ns: mean of the steps that count, under the profiler, of the slowest rank.
        counted, steps: number of steps that count, and of all steps.
        names: names of the steps that count.
        left_out: (name, reason) of the other steps.
        gpu_active_ns: time a step in which device work other than collectives runs, of the most active rank; ``None``
            without GPU work.
        unprofiled_ns: median of the steps timed without the profiler, of the slowest rank; ``None`` without any.
        timed: number of steps timed without the profiler.
        of_all: whether the facts are of all steps that count, rather than of chosen steps.
        behind: whether the device falls behind the host, so that its last kernels end the steps.
        ranks: facts of each rank.
        cycle: number of recorded steps in each step, if a loop alternates; else 1.
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
    cycle: int = 1

    def sentence(self) -> str:
        """Return the recorded step with and without the profiler: the first line of every command on a recording."""
        return f"{self.step_ns / 1e6:,.3f} ms {self.how()}"

    def how(self) -> str:
        """Return how the recorded step was measured, and its time without the profiler."""
        unit = "steps" if self.cycle == 1 else f"cycle{'' if self.steps == 1 else 's'} of {self.cycle} steps"
        mean = f"mean of {self.counted:,}" + (f" of {self.steps:,}" if self.counted < self.steps else "") + f" {unit}"
        if not self.of_all:
            mean = ", ".join(self.names)
        slowest = "; slowest rank" if len(self.ranks) > 1 else ""
        shown = self.steps > 1 or self.cycle > 1
        profiled = "under the profiler" + (f" ({mean}{slowest})" if shown else f" ({slowest[2:]})" if slowest else "")
        if self.unprofiled_ns is None:
            return profiled
        return f"{profiled}, {self.unprofiled_ns / 1e6:,.3f} ms without it (median of {self.timed:,})"

    def notes(self) -> list[str]:
        """Return which steps do not count and why, and whether steps are counted on the device."""
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
        """Return the facts as plain values, times in µs."""
        return {
            "step_us": self.step_ns / 1e3, "counted": self.counted, "steps": self.steps, "names": list(self.names),
            "left_out": [{"step": name, "why": why} for name, why in self.left_out],
            "gpu_active_us": None if self.gpu_active_ns is None else self.gpu_active_ns / 1e3,
            "unprofiled_us": None if self.unprofiled_ns is None else self.unprofiled_ns / 1e3, "timed": self.timed,
            "device_behind": self.behind, "cycle": self.cycle}


def recorded_facts(graphs: Sequence[ExecutionGraph], steps: CountedSteps | None = None,
                   chosen: Sequence[int] | None = None) -> RecordedFacts | None:
    """Return the facts of a recorded job; ``None`` where a rank has no steps.

    Args:
        graphs: one for each rank.
        steps: the steps that count, if they are known already.
        chosen: numbers of the requested steps, within each rank; by default the steps that count.
    """
    if not graphs or not all(len(graph.steps) for graph in graphs):
        return None
    return facts_of([RankRecord.of(graph) for graph in graphs], steps or CountedSteps.of(graphs), chosen)


def facts_of(records: Sequence[RankRecord], steps: CountedSteps,
             chosen: Sequence[int] | None = None) -> RecordedFacts | None:
    """Return the facts of ``recorded_facts`` from the ranks' records."""
    if not records or not all(record.names for record in records):
        return None
    ranks = []
    for rank, record in enumerate(records):
        counts = steps.counts[rank]
        if chosen is not None:
            counts = np.zeros(len(counts), np.bool_)
            counts[list(chosen)] = True
        ranks.append(RankFacts(
            rank_number(record, rank), float(steps.ranks[rank].length_ns[counts].mean()),
            None if record.active_ns is None else _mean_ns(record.active_ns, counts),
            _mean_ns(record.exposed_ns, counts)))
    slowest = int(np.argmax([rank.step_ns for rank in ranks]))
    names, counts = records[slowest].names, steps.counts[slowest]
    asked = np.flatnonzero(counts).tolist() if chosen is None else list(chosen)
    active = [rank.gpu_active_ns for rank in ranks if rank.gpu_active_ns is not None]
    timed = [one.meta.unprofiled_step_ns for one in records if one.meta.unprofiled_step_ns]
    return RecordedFacts(
        ranks[slowest].step_ns, len(asked), len(names), tuple(names[at] for at in asked),
        () if chosen is not None else tuple(
            (names[at], steps.why_not(slowest, at)) for at in np.flatnonzero(~counts).tolist()),
        max(active, default=None), max((float(np.median(own)) for own in timed), default=None),
        max(map(len, timed), default=0), chosen is None, steps.ranks[slowest].behind, tuple(ranks),
        max(one.meta.cycle for one in records))


def recorded_line(recorded: RecordedFacts) -> str:
    """Return the line on the recorded step."""
    return f"Recorded step: {recorded.sentence()}"


def step_line(times: str, step_us: float, interval_us: tuple[float, float] | None = None, what: str = "",
              cycle: int = 1) -> str:
    """Return the line on how long the step takes.

    Args:
        times: the kind of times, such as "without the profiler".
        step_us: time of the step in its steady state, µs.
        interval_us: its 80% interval, µs, if one was asked for.
        what: a phrase on the step.
        cycle: number of recorded steps that it consists of.
    """
    between = "" if interval_us is None else (
        f", 80% between {milliseconds(interval_us[0] * 1e3)} and {milliseconds(interval_us[1] * 1e3)} ms")
    each = "" if cycle == 1 else (f"a cycle of {cycle} steps, {milliseconds(step_us * 1e3 / cycle)} ms each in the "
                                  "mean")
    said = "; ".join(filter(None, (each, what)))
    return f"Step {times}: {milliseconds(step_us * 1e3)} ms{between}{f' ({said})' if said else ''}"


def decided_line(gpu_active_us: float | None, bound: str, interval_us: tuple[float, float] | None = None) -> str:
    """Return the line on how long the GPU is active, and what decides the step."""
    decided = f"decided by: {bound}"
    if not gpu_active_us:
        return decided[0].upper() + decided[1:]
    between = "" if interval_us is None or not interval_us[1] else (
        f", 80% between {milliseconds(interval_us[0] * 1e3)} and {milliseconds(interval_us[1] * 1e3)} ms")
    return f"GPU active {milliseconds(gpu_active_us * 1e3)} ms{between}; {decided}"


def savings_line(savings_us: Mapping[str, float], step_us: float) -> str:
    """Return the line on what the step would save if a resource took no time; empty where that is unknown."""
    if not savings_us or step_us <= 0:
        return ""
    return "Taking no time would save: " + ", ".join(
        f"{name} {percent(us / step_us)}" for name, us in savings_us.items())
