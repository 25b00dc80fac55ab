"""One job's rows: what ``inspect``, ``predict`` and ``opportunities`` say of it, in the columns of the tables.

::

    up to 16 ranks    graphs of all ranks ──▶ parts of the ranks ──▶ facts of the recording
                                        └───▶ steady state and opportunities
    more ranks        a rank's graph ──▶ its part, then the next rank's ──▶ facts of the recording
                      graphs of 16 ranks from the quickest to the slowest ──▶ steady state and opportunities
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from graph_predictor.prediction.result import Prediction, which_times
from graph_predictor.recorded.counted_steps import CountedSteps
from graph_predictor.recorded.facts import damage_notes, rank_number
from graph_predictor.simulation.program import Bound
from graph_predictor.synthesis.baseline import baseline_of
from step_views.check.measure import operations_of_rank
from step_views.reports.inspection import InspectedRank, Inspection, inspection_of
from step_views.reports.opportunities import candidates, opportunities
from step_views.survey.discovery import FoundJob
from tracer.device_memory import memory_timeline
from tracer.errors import ForetraceError, TraceError, reason_of
from tracer.files import FileKind, FoundFile
from tracer.graph import SHAPE_ONLY, ExecutionGraph, Meta
from tracer.job import EPOCH_NS, Job, assemble_job, files_of_ranks, read_by_rank, read_job
from tracer.versions import installed_version

BEST = 5
"""Changes that are kept of each job."""
LOADING = "no data loading"
"""The change that says what loading costs: a loader in the step's own thread is host time on the critical path."""
MOST_TEXT = 1000
"""Characters of the sentences in one column."""


MOST_TOGETHER = 16
"""Ranks up to which all of a job are in memory and simulated together. Of more, this many are simulated. Chosen."""


@dataclass(frozen=True, slots=True)
class JobRows:
    """The rows of one job, plain values by column."""

    job: dict[str, Any]
    families: list[dict[str, Any]] = field(default_factory=list)
    opportunities: list[dict[str, Any]] = field(default_factory=list)


def bound_column(label: str) -> str:
    """Return the column of the critical path's time in a bound, by its label."""
    return f"{label.replace(' ', '_')}_us"


BOUND_COLUMNS = {bound_column(bound.label): bound.label for bound in Bound}


def job_rows(found: FoundJob, step_region: str | None = None) -> JobRows:
    """Read a job and return its rows; of one that cannot be read ``error`` says why, and nothing is raised."""
    try:
        return _of_job(_read(found, step_region), found)
    except ForetraceError as error:
        return failed_rows(found, str(error))
    except Exception as error:  # one job in thousands must not end the others
        return failed_rows(found, f"An unexpected error, which is a bug of foretrace: {type(error).__name__}: "
                                  f"{reason_of(error)}.")


def failed_rows(found: FoundJob, why: str) -> JobRows:
    """Return the row of a job that could not be read."""
    return JobRows({**_of_files(found), "error": _text([why])})


def _of_files(found: FoundJob) -> dict[str, Any]:
    return {"job": found.name.encode("utf-8", "replace").decode(), "key": found.key, "files": found.files,
            "bytes": found.size, "foretrace": installed_version("foretrace") or "", "error": "", "not_predicted": ""}


def _text(sentences: Sequence[str]) -> str:
    text = " ".join(" ".join(sentences).split()).encode("utf-8", "replace").decode()
    return text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT - 1]}…"


@dataclass(slots=True)
class SurveyedRank:
    """What a survey keeps of a rank: its part of an ``Inspection``, its peak of memory, its operations of a step."""

    inspected: InspectedRank
    peak_bytes: int | None
    operations: Counter[tuple[str, str]]

    @classmethod
    def of(cls, graph: ExecutionGraph) -> SurveyedRank:
        """Return what is kept of a rank."""
        return cls(InspectedRank.of(graph), _peak(graph), operations_of_rank(graph))

    @property
    def meta(self) -> Meta:
        """Return the context of the rank's window."""
        return self.inspected.meta


@dataclass(frozen=True, slots=True)
class SurveyedJob:
    """A job as its rows need it.

    Attributes:
        ranks: what is kept of each rank.
        inspected: the facts of the recording.
        simulated: the ranks from which the steady state is predicted.
        simulated_ranks: their numbers; of a job read rank by rank, from the quickest to the slowest.
        operations: operations of a step, of all ranks.
        world_size: ranks of the job, recorded or not.
    """

    ranks: list[SurveyedRank]
    inspected: Inspection
    simulated: Job
    simulated_ranks: list[int]
    operations: Counter[tuple[str, str]]
    world_size: int


def _read(found: FoundJob, step_region: str | None) -> SurveyedJob:
    """Read all ranks: together, or one after the other if they are many."""
    notes = list[str]()
    files = files_of_ranks(found.paths, notes) if found.files > MOST_TOGETHER else []
    if sum(file.kind is not FileKind.EXECUTION_TRACE for file in files) > MOST_TOGETHER:
        return _read_apart(files, notes, step_region)
    job = _read_together(found, step_region)
    ranks = [SurveyedRank.of(graph) for graph in job.graphs]
    counts: Counter[tuple[str, str]] = Counter()
    for rank in ranks:
        counts.update(rank.operations)
    inspected = inspection_of([rank.inspected for rank in ranks], job.world_size, job.missing_ranks, job.notes,
                              job.classes)
    numbers = [rank_number(graph, place) for place, graph in enumerate(job.graphs)]
    return SurveyedJob(ranks, inspected, job, numbers, counts, job.world_size)


def _read_together(found: FoundJob, step_region: str | None) -> Job:
    """Read all ranks; where files were named one by one, those that can be read."""
    try:
        return read_job(found.paths, step_region=step_region)
    except TraceError as error:
        readable, notes = list[str](), list[str]()
        for path in found.paths if len(found.paths) > 1 else ():
            try:
                read_job(path, step_region=step_region)
                readable.append(path)
            except ForetraceError as own:
                notes.append(f"Skipped: {own}")
        if not readable or not notes:
            raise error from None
    job = read_job(readable, step_region=step_region)
    job.notes += notes
    return job


def _read_apart(files: Sequence[FoundFile], notes: Sequence[str], step_region: str | None) -> SurveyedJob:
    """Read the ranks one after the other, and some of them again to simulate them."""
    counts: Counter[tuple[str, str]] = Counter()

    def add(rank: SurveyedRank) -> None:
        counts.update(rank.operations)
        rank.operations = Counter()

    job = read_by_rank(files, _kept, add, notes, step_region=step_region)
    inspected = inspection_of([rank.inspected for rank in job.ranks], job.world_size, job.missing_ranks, job.notes)
    facts = [] if inspected.recorded is None else inspected.recorded.ranks
    # What a rank takes by itself is its step without exposed communication, in which it waits for others.
    own = [one.step_ns - one.exposed_ns for one in facts] if len(facts) == len(job.ranks) else [
        rank.meta.window_ns for rank in job.ranks]
    order = np.argsort(own, kind="stable")
    places = order[np.linspace(0, len(order) - 1, MOST_TOGETHER).round().astype(int)].tolist()
    chosen = [job.ranks[place].meta.rank for place in places]
    again = read_by_rank(
        [*dict.fromkeys(job.files[place] for place in places),
         *(file for file in files if file.kind is FileKind.EXECUTION_TRACE)],
        lambda graph: graph, step_region=step_region, cycle=job.ranks[0].meta.cycle)
    simulated = assemble_job([graph for graph in again.ranks if graph.meta.rank in chosen])
    return SurveyedJob(job.ranks, inspected, simulated, chosen, counts, job.world_size)


def _kept(graph: ExecutionGraph) -> SurveyedRank:
    """Return what is kept of one of many ranks, without what is large and used of single ranks alone."""
    graph.meta.module_lines, graph.meta.process_groups = {}, []
    return SurveyedRank.of(graph)


def _of_job(job: SurveyedJob, found: FoundJob) -> JobRows:
    row = {**_of_files(found), **_recorded(job)}
    ran = all(rank.meta.era != SHAPE_ONLY for rank in job.ranks)
    lengths = _lengths(job) if ran and job.inspected.recorded is not None else []
    times = max((rank.meta.unprofiled_step_ns for rank in job.ranks), key=lambda own: float(np.median(own or [0])))
    row["step_times_us"] = [ns / 1e3 for ns in times or lengths]
    row["profiled"] = not times
    row |= {"program": _program(job.operations, row), **_codes(job.operations),
            "simulated_ranks": job.simulated_ranks}
    try:
        baseline = baseline_of(job.simulated)
        tried = opportunities(baseline, top=len(candidates()), evidence=True)
    except ForetraceError as error:
        return JobRows({**row, "not_predicted": _text([str(error)])})
    step, name, key = tried.baseline, row["job"], row["key"]
    if len(job.simulated_ranks) < len(job.ranks):
        step.warnings[:] = [
            f"Of {len(job.ranks):,} recorded ranks {len(job.simulated_ranks)} are simulated, from the quickest to the "
            "slowest: their collectives hold waits for the others.",
            *(said for said in step.warnings if said != baseline.facts.unrecorded)]
    loading = max((one.gain_us for one in tried.found if one.name == LOADING), default=0.0)
    return JobRows({**row, **_predicted(step), "saves_loading_us": loading}, [
        {"job": name, "key": key, "family": family, "time_us": us, "share": us / max(step.step_time_us, 1e-9)}
        for family, us in step.families_us.items()], [
        {"job": name, "key": key, "place": place, "change": one.name, "option": one.option, "is_bound": one.bound,
         "gain_us": one.gain_us, "low_us": one.interval_us[0], "high_us": one.interval_us[1], "share": one.gain,
         "then_decides": one.decides} for place, one in enumerate(tried.found[:BEST])])


def _lengths(job: SurveyedJob) -> list[int]:
    """Return the lengths of the recorded steps that count, of the slowest rank, ns."""
    counted = CountedSteps.together([rank.inspected.steps for rank in job.ranks])
    longest: list[int] = counted.longest_ns()[counted.common].tolist()
    return longest


def _recorded(job: SurveyedJob) -> dict[str, Any]:
    """Return what is true of the recording before anything is simulated."""
    inspected, facts, metas = job.inspected, job.inspected.recorded, [rank.meta for rank in job.ranks]
    began = [meta.base_time_ns for meta in metas if meta.base_time_ns > EPOCH_NS]
    versions = {name: text for meta in reversed(metas) for name, text in meta.versions.items()}
    loss = inspected.loss()
    return {
        "recorded_at_ns": min(began, default=None), "ranks": len(metas),
        "world_size": max(job.world_size, len(metas)),
        "device": ", ".join(inspected.devices), "format": ", ".join(sorted({meta.era for meta in metas})),
        "torch": ", ".join(sorted({meta.torch_version for meta in metas if meta.torch_version})),
        "versions": json.dumps(dict(sorted(versions.items()))),
        "backend": ", ".join(sorted({meta.backend for meta in metas if meta.backend})),
        "steps": inspected.steps, "counted_steps": 0 if facts is None else facts.counted,
        "recorded_step_us": None if facts is None else facts.step_ns / 1e3,
        "unprofiled_step_us": None if facts is None or facts.unprofiled_ns is None else facts.unprofiled_ns / 1e3,
        "recorded_gpu_active_us": None if inspected.gpu_active_ns is None else inspected.gpu_active_ns / 1e3,
        "host_outside_ops_share": inspected.host_outside_ops_share,
        "operations": inspected.total("ops"), "launches": inspected.total("launches"),
        "kernels": inspected.total("kernels"), "collectives": inspected.total("collectives"),
        "peak_memory_bytes": max((rank.peak_bytes for rank in job.ranks if rank.peak_bytes), default=None),
        "lost_events": loss.dropped_events + loss.repaired_events, "lost_bytes": loss.truncated_bytes,
        "damage": _text(damage_notes(job.ranks)), "notes": _text(inspected.notes),
    }


def _peak(graph: ExecutionGraph) -> int | None:
    """Return the peak of a rank's device memory over its window; ``None`` where the recording does not tell all."""
    if not len(graph.allocations):
        return None
    try:
        timeline = memory_timeline(graph)
    except ForetraceError:
        return None
    return None if timeline.lacks_earlier or not len(timeline.time_ns) else int(timeline.total_bytes.max())


def _predicted(step: Prediction) -> dict[str, Any]:
    """Return the steady state of the step as it is."""
    saves = {f"saves_{name.lower()}_us": us for name, us in step.savings_us.items()}
    return {
        "times": which_times(step.profiled, ran=step.ran), "step_time_us": step.step_time_us,
        "low_us": step.interval_us[0], "high_us": step.interval_us[1], "bound": step.bound,
        "gpu_active_us": step.gpu_active_us, **{bound_column(label): us for label, us in step.bounds_us.items()},
        **saves, "mfu": step.mfu, "warnings": _text(step.warnings),
    }


def _program(counts: Counter[tuple[str, str]], row: dict[str, Any]) -> str:
    """Return a digest of a program: its operations, their counts in a step, its ranks and its device."""
    if not counts:
        return ""
    said = repr((sorted(counts.items()), row["device"], row["ranks"], row["world_size"]))
    return hashlib.blake2b(said.encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()


def _codes(counts: Counter[tuple[str, str]]) -> dict[str, list[int]]:
    """Return checksums of the operations' names and sizes, in order, and how often each runs in a step."""
    codes: Counter[int] = Counter()
    for (name, shapes), number in counts.items():
        codes[zlib.crc32(f"{name}\0{shapes}".encode("utf-8", "surrogatepass"))] += number
    return {"operation_codes": sorted(codes), "operation_counts": [codes[code] for code in sorted(codes)]}
