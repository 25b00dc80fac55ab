"""Parts of a rank's step: computing, communicating, waiting for other ranks, or idle.

::

    compute      ####          ####                   a kernel that is not a collective
    collective      ==~~~~~~~==========               ~ waiting for the last rank, = the transfer
                 BBBBEwwwwwwwEEBBBBEEE.....           busy, exposed, waiting, idle

The parts of a window add up to it exactly. On a rank without device work the host computes: it is busy unless it
waits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cache, partial

import numpy as np

from graph_predictor.prediction.edited_repeats import kinds_of
from graph_predictor.prediction.explain import OperationNames, step_names
from graph_predictor.prediction.predictor import SimulatedStep
from graph_predictor.prediction.replay import WINDOW, Replay, ReplayedStep
from graph_predictor.prediction.scenario import Gone
from graph_predictor.prediction.steady_state import Periods
from graph_predictor.recorded.facts import RecordedFacts, rank_number, recorded_facts
from graph_predictor.simulation.build import Built
from graph_predictor.simulation.engine import simulate
from graph_predictor.simulation.host_slices import HostSlices, host_slices
from graph_predictor.simulation.program import EndCause, KernelCause, Program, Simulated, whole_ns
from step_views.reports.breakdown import replayed_steps
from tracer.arrays import Float64, Int8, Int64
from tracer.columns import covered
from tracer.graph import NONE, ExecutionGraph, KernelKind

POINT_TO_POINT = ("send", "recv", "send_recv")
"""Kinds of ``CollectiveTable`` that connect two stages of a pipeline."""


class RankPart(IntEnum):
    """What a rank does in a nanosecond, the first that applies: computes, only transfers, waits, waits for a stage."""

    BUSY = 0
    EXPOSED = 1
    WAITING = 2
    BUBBLE = 3
    IDLE = 4


@dataclass(frozen=True, slots=True)
class RankParts:
    """A window divided into parts: ``part`` is the ``RankPart`` between each two neighbours of ``edge_ns``.

    ``overlapped_ns`` is the busy time in which a collective also ran.
    """

    edge_ns: Int64
    part: Int8
    overlapped_ns: int

    def ns(self, part: RankPart) -> int:
        """Return the time of one part."""
        return int(np.diff(self.edge_ns)[self.part == part].sum())


@dataclass(frozen=True, slots=True)
class Meetings:
    """For a program's collective kernels: when each could have started, and when its last rank arrived (ns).

    Indexed by the program's kernels; for kernels that are no collectives both are their start. ``point_to_point`` marks
    sends and receives.
    """

    ready: Int64
    met: Int64
    point_to_point: np.ndarray


def meetings(times: JobTimes) -> Meetings:
    """Return when the ranks met in a job's simulated collectives."""
    program, simulated = times.program, times.simulated
    ready, met = simulated.kernel_start.copy(), simulated.kernel_start.copy()
    grouped = program.kernel_group >= 0
    if grouped.any():
        met[grouped] = simulated.kernel_start[simulated.group_last[program.kernel_group[grouped]]]
    between = np.zeros(len(met), np.bool_)
    rank_of = program.kernel_rank()
    for rank, graph in enumerate(times.graphs):
        table = graph.collectives
        kinds = np.isin([graph.string(code) for code in table.kind.tolist()], POINT_TO_POINT)
        rows = table.kernel[kinds & (table.kernel >= 0)] if len(table) else table.kernel
        low, high = int(program.kernel_ptr[rank]), int(program.kernel_ptr[rank + 1])
        mine = np.arange(low, high)
        between[mine] = np.isin(times.graph_row(mine), rows)
    # A receive that started together with another rank's send had arrived before.
    sent = (simulated.kernel_cause == KernelCause.EDGE) & between
    for k in np.flatnonzero(sent).tolist():
        other = int(program.edge_kernel[int(simulated.kernel_source[k])])
        if rank_of[other] != rank_of[k]:
            ready[k] = min(_ready_alone(times, k, rank_of), int(met[k]))
    return Meetings(ready, met, between)


def _ready_alone(times: JobTimes, k: int, rank_of: Int64) -> int:
    """Return when a kernel could have started if only its own rank mattered, ns."""
    program, simulated = times.program, times.simulated
    at = []
    if program.kernel_item[k] >= 0:
        at.append(int(simulated.item_end[program.kernel_item[k]] + program.kernel_latency[k]))
    if program.kernel_previous[k] >= 0:
        at.append(int(simulated.kernel_end[program.kernel_previous[k]] + program.kernel_gap[k]))
    for edge in range(int(program.edge_ptr[k]), int(program.edge_ptr[k + 1])):
        other = int(program.edge_kernel[edge])
        if rank_of[other] == rank_of[k]:
            took = int(simulated.kernel_end[other] - simulated.kernel_start[other])
            at.append(int(simulated.kernel_start[other]) + int(program.edge_fraction[edge] * took)
                      + int(program.edge_lag[edge]))
    return max(at, default=int(simulated.kernel_start[k]))


def parts_of(times: JobTimes, meet: Meetings, window: Window) -> RankParts:
    """Divide one window into its parts."""
    simulated = times.simulated
    low, high = (int(k) for k in times.program.kernel_ptr[window.rank: window.rank + 2])
    kernels, kind = np.arange(low, high), times.kinds[window.rank]
    device = kernels[kind != KernelKind.COLLECTIVE]
    collective = kernels[kind == KernelKind.COLLECTIVE]
    start, end = simulated.kernel_start, simulated.kernel_end
    busy = (start[device], end[device]) if len(device) else _host_busy(times, window.rank)
    ready, met = meet.ready[collective], meet.met[collective]
    paired = meet.point_to_point[collective]
    layers = [busy, (met, end[collective]), (ready[~paired], met[~paired]), (ready[paired], met[paired])]
    first, last = window.start_ns, max(window.end_ns, window.start_ns)
    clipped = [(np.clip(a, first, last), np.clip(b, first, last)) for a, b in layers]
    edges = np.unique(np.concatenate([[first, last], *(side for pair in clipped for side in pair)]))
    over = [covered(pair, edges[:-1], edges[1:]) > 0 for pair in clipped]
    part = np.select(over, [np.int8(one) for one in list(RankPart)[:-1]], np.int8(RankPart.IDLE)).astype(np.int8)
    together = over[RankPart.BUSY] & (over[1] | over[2] | over[3])
    return RankParts(edges, part, int(np.diff(edges)[together].sum()))


def _host_busy(times: JobTimes, rank: int) -> tuple[Int64, Int64]:
    """Return the begins and ends of a rank's host work: before each item, and within items that do not wait."""
    program, simulated = times.program, times.simulated
    items = np.flatnonzero(program.thread_rank[program.item_thread()] == rank)
    start, end = simulated.item_start[items], simulated.item_end[items]
    waits = simulated.item_end_cause[items] != EndCause.OWN_COST
    worked = np.where(waits, np.minimum(start + program.item_cost[items], end), end)
    return start - program.item_work[items], worked


@dataclass(frozen=True, slots=True)
class Window:
    """One step of one rank, or one period of a prediction in its steady state.

    Attributes:
        rank: position of the rank in the job.
        name: name of the step.
        start_ns, end_ns: on the simulated clock.
        at: the ("item" or "kernel", row) whose end is the window's end; ``None`` if there is none.
        kernels: rows of the program's device work that was launched in the window.
    """

    rank: int
    name: str
    start_ns: int
    end_ns: int
    at: tuple[str, int] | None
    kernels: Int64

    @property
    def length_ns(self) -> int:
        """Return the time from begin to end, ns."""
        return self.end_ns - self.start_ns


@dataclass(frozen=True, slots=True)
class JobTimes:
    """A simulated job and its times.

    Attributes:
        built: the job whose graphs give the names.
        program, simulated: the simulated program, and its times.
        kinds: ``KernelKind`` of the program's kernels, one array for each rank.
        item, kernel: for each row of ``program``, the row of ``built.program`` that it is or copies.
        slices: operations in which the host time of ``built.program``'s items was spent; ``host_ns`` their time now.
        gone: what edits removed; ``None`` for nothing.
        names: returns the names of operations, computed once.
        windows: for each step, the windows of its ranks.
        steps: number of recorded steps in one window.
        predicted: whether the job was predicted, and not recorded and replayed.
        profiled: whether times are under the profiler.
        ran: whether times come from a recording, and not from a trace by shapes.
        edits: descriptions of changes to the source.
        notes: remarks for the reader.
        again: returns the job's mean step time (ns) with another program of the same rows.
        recorded: facts about the recording of a recorded job.
    """

    built: Built
    program: Program
    simulated: Simulated
    kinds: list[Int8]
    item: Int64
    kernel: Int64
    slices: HostSlices
    host_ns: Float64
    gone: Gone | None
    names: Callable[[], OperationNames]
    windows: list[list[Window]]
    steps: int
    predicted: bool
    profiled: bool
    ran: bool
    edits: tuple[str, ...]
    notes: tuple[str, ...]
    again: Callable[[Program], float]
    recorded: RecordedFacts | None = None

    @property
    def graphs(self) -> list[ExecutionGraph]:
        """The ranks' graphs."""
        return self.built.graphs

    @property
    def step_ns(self) -> float:
        """The job's step time: the mean over steps of the longest rank's time, ns."""
        return mean_step([[w.length_ns for w in ranks] for ranks in self.windows]) / self.steps

    def number(self, rank: int) -> int:
        """Return the number of the rank at a position in the job."""
        found = self.graphs[rank].meta.rank
        return found if found >= 0 else rank

    def graph_row(self, kernel: Int64) -> Int64:
        """Return for kernels of the program the rows of their rank's ``graph.kernels``."""
        rank = self.program.kernel_rank()[kernel]
        return self.kernel[kernel] - self.built.program.kernel_ptr[rank]


def mean_step(lengths: list[list[int]]) -> float:
    """Return the mean over steps of the longest rank's time, ns."""
    return float(np.mean([max(ranks) for ranks in lengths])) if lengths else 0.0


def recorded_times(result: Replay, step: str | None = None) -> JobTimes:
    """Return the times of a replayed job. ``step`` is as in ``breakdown``. Raises ``ForetraceError`` if there is no
    such step."""
    built, program = result.built, result.program
    chosen = replayed_steps(result.steps, step)
    if step is None:
        chosen = [one for one in chosen if one.counts] or chosen
    position = {rank_number(graph, rank): rank for rank, graph in enumerate(built.graphs)}
    of_rank: dict[int, list[ReplayedStep]] = {}
    for one in chosen:
        of_rank.setdefault(position[one.rank], []).append(one)
    fewest = min(len(found) for found in of_rank.values())
    notes = list(result.notes)
    facts = recorded_facts(built.graphs) if step is None else None
    notes += [] if facts is None else facts.notes()
    if any(len(found) > fewest for found in of_rank.values()):
        notes.append(f"The ranks recorded different numbers of steps: the last {fewest} of each are compared.")
    in_step = [[_step_of(result, rank, found[number - fewest]) for rank, found in sorted(of_rank.items())]
               for number in range(fewest)]

    def windows(simulated: Simulated) -> list[list[Window]]:
        return [[_recorded_window(simulated, rank, one, kernels) for rank, one, kernels in ranks]
                for ranks in in_step]

    def again(other: Program) -> float:
        return mean_step([[w.length_ns for w in ranks] for ranks in windows(simulate(other))])

    rows, slices = np.arange(len(program.item_kind)), host_slices(built)
    ns = slices.ns.astype(np.float64)
    return JobTimes(
        built, program, result.simulated, [graph.kernels.kind for graph in built.graphs], rows,
        np.arange(len(program.kernel_item)), slices, ns, None, cache(lambda: OperationNames(built, slices, ns)),
        windows(result.simulated), 1, False, result.profiled, True, (), tuple(notes), again, facts)


def predicted_times(step: SimulatedStep) -> JobTimes:
    """Return the times of a predicted job, for its last period."""
    scenario, steady = step.scenario, step.steady
    repeated, cycle = steady.repeated, scenario.cycle
    last = np.flatnonzero(repeated.copy_of_kernel == repeated.copies - 1)
    rank_of = steady.program.kernel_rank()[last]

    def windows(of: Periods) -> list[list[Window]]:
        return [[Window(rank, " to ".join(dict.fromkeys((cycle.names[0], cycle.names[-1]))), int(of.stop_ns[rank]),
                        int(of.stop_ns[rank] + of.period_ns[rank]), of.at[rank], last[rank_of == rank])
                 for rank in range(len(of.at))]]

    def again(other: Program) -> float:
        simulated = simulate(other, structure=steady.copies.structure)
        return float(Periods.of(repeated, simulated).period_ns.max()) / cycle.steps

    built, host = scenario.built, steady.copies.host
    return JobTimes(
        built, steady.program, steady.simulated, kinds_of(repeated, built.graphs), repeated.item, repeated.kernel,
        scenario.slices, host.ns, host.gone, partial(step_names, scenario, host), windows(steady.periods), cycle.steps,
        True, scenario.profiled, step.ran, step.edits, step.notes, again)


def scaled_rank(times: JobTimes, rank: int, kernels: float, host: float) -> Program:
    """Return the program with one rank's host time and device work (without collectives) scaled by factors."""
    program = times.program
    low, high = (int(k) for k in program.kernel_ptr[rank: rank + 2])
    duration = program.kernel_duration.copy()
    own = times.kinds[rank] != KernelKind.COLLECTIVE
    duration[low:high] = np.where(own, whole_ns(duration[low:high] * kernels), duration[low:high])
    mine = program.thread_rank[program.item_thread()] == rank
    work, cost = (np.where(mine, whole_ns(ns * host), ns)
                  for ns in (program.item_work, program.item_cost))
    return replace(program, kernel_duration=duration, item_work=work, item_cost=cost)


def _step_of(result: Replay, rank: int, step: ReplayedStep) -> tuple[int, ReplayedStep, Int64]:
    """Return the rank, the step, and the device work launched in it."""
    program, graph = result.program, result.graphs[rank]
    kernels = np.arange(int(program.kernel_ptr[rank]), int(program.kernel_ptr[rank + 1]))
    row = NONE if step.name == WINDOW else int(program.item_row[step.begin_item])
    return rank, step, kernels if row == NONE else kernels[graph.kernels.step == row]


def _recorded_window(simulated: Simulated, rank: int, step: ReplayedStep, kernels: Int64) -> Window:
    start = step.span.path_start(simulated)
    return Window(rank, step.name, start.stop_ns, start.end_ns, start.at, kernels)
