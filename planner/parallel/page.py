"""``StepTimeline``: the tasks of a plan's estimated step over time, for pages and trace viewers.

``plans_page``: the page of a search for plans: the fastest with their intervals, memory of stages, the best timeline.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from graph_predictor.figures import count, signed_milliseconds
from kernel_models.op_call import Source
from planner.parallel.estimate import Estimate, StepSchedule
from planner.parallel.planning import Plans
from planner.parallel.search import differences, front, tied
from step_views.pages.comparison import interval_plot
from step_views.pages.events import KIND_CODE, EventNames, Track, pack
from step_views.pages.memory import MemoryMoments, memory_section
from step_views.pages.page import Provenance, notes_part, provenance_section, sentence
from step_views.pages.parts import (
    Cell,
    Facts,
    IntervalBar,
    KeyFigure,
    KeyFigures,
    PageSection,
    PageTable,
    Part,
    ReportPage,
    TrackEvents,
    count_cell,
    number_cell,
    share_cell,
    table,
    text_column,
)
from step_views.pages.parts import PageColumn as Column
from step_views.reports.timeline import TimelineProcess, Tracks, json_text, write_events
from tracer.arrays import Int64
from tracer.output_kind import TIMELINE, check_output

PASSES = ("forward", "backward", "weights")
"""Names of ``schedule``'s kinds of tasks, in the order of their numbers."""
KINDS = (*PASSES, "gradients and parameters", "optimizer", "waiting for the slowest GPU", "once a step")
"""Names of all kinds of tasks: those of the schedule, then those that end the step, in order."""


@dataclass(frozen=True, slots=True)
class StepTimeline:
    """The tasks of one rank of each stage. Gradients and parameters appear as their exposed part, after the last task.

    Attributes:
        stages: number of stages.
        stage, kind: of each task, stage by stage; ``kind`` is an index into ``KINDS``.
        titles: title of each task.
        start_ns, end_ns: start and end of each task.
    """

    stages: int
    stage: Int64
    kind: Int64
    titles: list[str]
    start_ns: Int64
    end_ns: Int64

    @classmethod
    def of(cls, step: StepSchedule, whole: Estimate) -> StepTimeline:
        """Return the tasks of a plan's step; the last task ends at the end of the estimated step."""
        run, order = step.run, step.run.order
        stages, tasks = run.start.shape
        # Residuals of similar measured plans stretch all tasks alike.
        factor = (whole.time_us - whole.stragglers - whole.fixed) / max(step.ends)
        after = np.array([step.exposed, step.optimizer]).T
        slowest = np.array([whole.stragglers, whole.fixed]) / factor
        end = np.hstack([run.end, run.stage_end[:, None] + np.cumsum(after, axis=1),
                         np.tile(max(step.ends) + np.cumsum(slowest), (stages, 1))])
        start = np.hstack([run.start, run.stage_end[:, None], end[:, tasks:-1]])
        start[:, -2] = max(step.ends)
        kind = np.hstack([order.kind, np.tile(np.arange(len(PASSES), len(KINDS)), (stages, 1))])
        chunks = int(order.chunk.max()) + 1
        titles = []
        for columns in zip(order.kind.tolist(), order.microbatch.tolist(), order.chunk.tolist(), strict=True):
            titles += [f"{KINDS[each]} {microbatch}" + (f", chunk {chunk}" if chunks > 1 else "")
                       for each, microbatch, chunk in zip(*columns, strict=True)] + list(KINDS[len(PASSES):])
        shown = np.flatnonzero(end > start)
        stage = np.repeat(np.arange(stages), kind.shape[1])
        return cls(stages, stage[shown], kind.reshape(-1)[shown], [titles[row] for row in shown.tolist()],
                   *(np.rint(1e3 * factor * each.reshape(-1)[shown]).astype(np.int64) for each in (start, end)))


def write_step_timeline(found: StepTimeline, path: str | os.PathLike[str]) -> None:
    """Write a step as a Chrome trace that Perfetto and chrome://tracing open: a process for each stage.

    Raises:
        ForetraceError: the file cannot be written, or exists and is not a timeline.
    """
    check_output(os.fspath(path), [], TIMELINE)
    write_events(_events(found), path)


def _events(found: StepTimeline) -> Iterator[str]:
    tracks = Tracks()
    for stage in range(found.stages):
        process = TimelineProcess(tracks, stage + 1, f"stage {stage}")
        rows = np.flatnonzero(found.stage == stage)
        yield process.slices("task", [process.track(0, "tasks")] * len(rows), found.start_ns[rows],
                             found.end_ns[rows] - found.start_ns[rows],
                             [json_text(found.titles[row]) for row in rows.tolist()])
        yield process.metadata()


_EVENTS = {"weights": "task", "gradients and parameters": "collective",
           "waiting for the slowest GPU": "waiting for rank", "once a step": "host"}
"""Kind of a page's event for kinds of tasks with another name."""


def plans_page(found: Sequence[Plans], where: Provenance) -> ReportPage:
    """Return the page for plans of one or several sizes of a job; the sections show the first size that has a plan."""
    main = next((each for each in found if each.plans), found[0])
    sections = [_overview(main, found), _plans(found)]
    if main.schedule is not None:
        sections.append(plan_timeline(StepTimeline.of(main.schedule, main.plans[0].estimate)))
    sections.append(_memory(main))
    sections.append(provenance_section(where, more=_sources(main)))
    return ReportPage(where.title, sentence(main.headline()), sections)


def _ms(us: float | None) -> Cell:
    """Return the table cell of a time, in ms with one decimal, as ``foretrace plan`` prints it."""
    return Cell("–") if us is None else Cell(f"{us / 1e3:,.1f}", us)


def _overview(main: Plans, found: Sequence[Plans]) -> PageSection:
    parts: list[Part] = []
    if main.plans:
        best = main.plans[0]
        e = best.estimate
        parts.append(KeyFigures([
            KeyFigure("Fastest plan", str(e.plan)),
            KeyFigure("Step", f"{e.time_us / 1e3:,.1f} ms",
                   f"80% between {e.low_us / 1e3:,.1f} and {e.high_us / 1e3:,.1f}"),
            KeyFigure("Decided by", e.bound), KeyFigure("Memory", f"{best.memory.total / 1e9:.1f} GB", best.fit.value),
            KeyFigure("Throughput", f"{e.plan.global_batch / e.time_us * 1e6:,.3g} /s", "sequences")]))
        parts.append(IntervalBar(str(e.plan), e.low_us * 1e3, e.time_us * 1e3, e.high_us * 1e3))
    parts.append(Facts([(count(main.gpus), f"GPUs of {main.topology}"), (count(main.considered), "plans considered"),
                        (count(len(main.plans)), "estimated"),
                        (f"{main.shape.parameters / 1e9:,.3g} billion", f"parameters of {main.model}"),
                        (count(main.shape.seq), "tokens a sequence")]))
    refused = table("refused", "Not possible", [Column("plans"), text_column("why"), text_column("such as")],
                    ([count_cell(each.count), each.reason, each.such_as] for each in main.refused))
    if refused.rows:
        parts.append(refused)
    parts += notes_part([note for each in found for note in each.notes])
    return PageSection("overview", "Overview", parts)


def _plans(found: Sequence[Plans]) -> PageSection:
    parts: list[Part] = []
    for each in found:
        if not each.plans:
            continue
        first = each.plans[0].estimate
        rows = [(str(p.plan), p.estimate.time_us * 1e3, p.estimate.low_us * 1e3, p.estimate.high_us * 1e3)
                for p in each.plans]
        of = f" on {each.gpus:,} GPUs"
        shown = table(
            f"plans-{each.gpus}", f"Plans{of}, the fastest first; = ties with the first within its uncertainty",
            [text_column("plan"), Column("step ms"), Column("80% from"), Column("to"), text_column("tie"),
             Column("memory GB"), Column("exposed ms"), Column("bubble"), text_column("binds"), text_column("has it")],
            ([str(p.plan), _ms(p.estimate.time_us), _ms(p.estimate.low_us), _ms(p.estimate.high_us),
              "=" if tied(first, p.estimate) else "", Cell(f"{p.memory.total / 1e9:.1f}", p.memory.total),
              _ms(p.estimate.exposed_us), share_cell(p.estimate.bubble), p.estimate.bound,
              ", ".join(name.value for name in p.frameworks) or "none"] for p in each.plans))
        parts.append(interval_plot(f"plan-intervals-{each.gpus}", f"The fastest plans{of}, with their 80% intervals",
                                   "A bar is a plan's step, the line its 80% interval.", rows[:24], shown))
        parts.append(_apart(each))
    every = front([p for each in found for p in each.plans])
    parts.append(table(
        "front", "Pareto front: no other plan is faster with as little memory and as few GPUs",
        [Column("GPUs"), Column("step ms"), Column("sequences a second"), Column("memory GB"), text_column("plan")],
        ([count_cell(p.plan.world_size), _ms(p.estimate.time_us),
          number_cell(p.plan.global_batch / p.estimate.time_us * 1e6), Cell(f"{p.memory.total / 1e9:.1f}",
                                                                          p.memory.total), str(p.plan)]
         for p in every)))
    return PageSection("plans", "Plans", [p for p in parts if not isinstance(p, PageTable) or p.rows])


def _apart(each: Plans) -> PageTable:
    """Return a table of how much longer the next plans are than the first, part by part."""
    first = each.plans[0].estimate
    others = [p.estimate for p in each.plans[1:9]]
    names = list(dict.fromkeys(name for e in others for name in differences(first, e)))
    return table(f"apart-{each.gpus}", "What the next plans take more than the first, ms",
                 [text_column("plan"), *(Column(name.replace("_", " ")) for name in names)],
                 ([str(e.plan), *(Cell(signed_milliseconds(us * 1e3, 1), us) for us in (
                     differences(first, e).get(name, 0.0) for name in names))] for e in others))


def plan_timeline(found: StepTimeline) -> PageSection:
    """Return the timeline of a plan's step: the tasks of a rank of each stage."""
    names, tracks = EventNames(), []
    codes = np.array([KIND_CODE[_EVENTS.get(kind, kind)] for kind in KINDS], np.int64)
    for stage in range(found.stages):
        rows = np.flatnonzero(found.stage == stage)
        zero = np.zeros(len(rows), np.int64)
        tracks.append(Track("tasks", f"stage {stage}", "", zero, found.start_ns[rows], found.end_ns[rows],
                            np.array([names.code(found.titles[row]) for row in rows.tolist()], np.int64),
                            codes[found.kind[rows]], zero.astype(bool), True))
    columns, said = pack(tracks, names, int(found.end_ns.max()))
    return PageSection("timeline", "Timeline", [TrackEvents(
        "timeline", "The fastest plan's step, as it is estimated: " + (
            "a rank" if found.stages == 1 else f"a rank of each of {found.stages:,} stages"),
        "Time runs to the right; each row is what a rank of a stage does. Drag or use the arrow keys to move, Ctrl and "
        "the wheel, two fingers, or + and − to zoom.", columns, said)])


def _memory(main: Plans) -> PageSection:
    if not main.plans and not main.stages:
        return PageSection("memory", "Memory", [])
    account = main.plans[0].memory if main.plans else None
    moments, more = [], []
    if main.stages:
        more = [table("stages", "Memory of the stages", [
            Column("stage"), text_column("fullest at"), Column("allocated GB"), Column("in all GB"), Column("80% from"),
            Column("to"), Column("kept for backward GB")], (
            [count_cell(each.stage), each.moment, *(Cell(f"{size / 1e9:.1f}", size) for size in (
                each.allocated, each.account.total, each.low, each.high, each.account.activations))]
            for each, _ in main.stages))]
        for each, points in main.stages[:4]:
            moments.append(MemoryMoments(
                list(range(len(points))), {"held before the task": [p.before for p in points],
                                           "needed more in it": [p.peak - p.before for p in points]},
                "task of the step",
                [f"{p.task} {p.microbatch}" + (f", chunk {p.chunk}" if p.chunk else "") for p in points],
                f"Stage {each.stage}: memory before each task, and what it needs more", f"stage-{each.stage}"))
    return memory_section(account, moments, more=more)


def _sources(main: Plans) -> list[PageTable]:
    if not main.plans:
        return []
    return [table("sources", "Where the fastest plan's time comes from", [text_column("source"), Column("share")],
                  ([Source(source).label, share_cell(share)]
                   for source, share in main.plans[0].estimate.sources.items()))]
