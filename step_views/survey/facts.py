"""One job's rows: what ``inspect``, ``predict`` and ``opportunities`` say of it, in the columns of the tables."""

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
from graph_predictor.recorded.facts import damage_notes
from graph_predictor.simulation.program import Bound
from graph_predictor.synthesis.baseline import baseline_of
from step_views.check.measure import operations
from step_views.reports.inspection import Inspection, inspect_job
from step_views.reports.opportunities import candidates, opportunities
from step_views.survey.discovery import FoundJob
from tracer.device_memory import memory_timeline
from tracer.errors import ForetraceError, TraceError, reason_of
from tracer.graph import SHAPE_ONLY, ExecutionGraph
from tracer.job import EPOCH_NS, Job, read_job
from tracer.versions import installed_version

BEST = 5
"""Changes that are kept of each job."""
LOADING = "no data loading"
"""The change that says what loading costs: a loader in the step's own thread is host time on the critical path."""
MOST_TEXT = 1000
"""Characters of the sentences in one column."""


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
        job = _read(found, step_region)
        return _of_job(job, found)
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


def _read(found: FoundJob, step_region: str | None) -> Job:
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


def _of_job(job: Job, found: FoundJob) -> JobRows:
    graphs, inspected = job.graphs, inspect_job(job)
    ran = all(graph.meta.era != SHAPE_ONLY for graph in graphs)
    row = {**_of_files(found), **_recorded(job, inspected)}
    lengths = _lengths(graphs) if ran and inspected.recorded is not None else []
    times = max((graph.meta.unprofiled_step_ns for graph in graphs), key=lambda own: float(np.median(own or [0])))
    row["step_times_us"] = [ns / 1e3 for ns in times or lengths]
    row["profiled"] = not times
    counts = operations(job)
    row |= {"program": _program(counts, row), **_codes(counts)}
    try:
        tried = opportunities(baseline_of(job), top=len(candidates()), evidence=True)
    except ForetraceError as error:
        return JobRows({**row, "not_predicted": _text([str(error)])})
    step, name, key = tried.baseline, row["job"], row["key"]
    loading = max((one.gain_us for one in tried.found if one.name == LOADING), default=0.0)
    return JobRows({**row, **_predicted(step), "saves_loading_us": loading}, [
        {"job": name, "key": key, "family": family, "time_us": us, "share": us / max(step.step_time_us, 1e-9)}
        for family, us in step.families_us.items()], [
        {"job": name, "key": key, "place": place, "change": one.name, "option": one.option, "is_bound": one.bound,
         "gain_us": one.gain_us, "low_us": one.interval_us[0], "high_us": one.interval_us[1], "share": one.gain,
         "then_decides": one.decides} for place, one in enumerate(tried.found[:BEST])])


def _lengths(graphs: Sequence[ExecutionGraph]) -> list[int]:
    """Return the lengths of the recorded steps that count, of the slowest rank, ns."""
    counted = CountedSteps.of(graphs)
    longest: list[int] = counted.longest_ns()[counted.common].tolist()
    return longest


def _recorded(job: Job, inspected: Inspection) -> dict[str, Any]:
    """Return what is true of the recording before anything is simulated."""
    graphs, facts = job.graphs, inspected.recorded
    metas = [graph.meta for graph in graphs]
    began = [meta.base_time_ns for meta in metas if meta.base_time_ns > EPOCH_NS]
    versions = {name: text for meta in reversed(metas) for name, text in meta.versions.items()}
    loss = inspected.loss()
    return {
        "recorded_at_ns": min(began, default=None), "ranks": len(graphs),
        "world_size": max(job.world_size, len(graphs)),
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
        "peak_memory_bytes": max((peak for graph in graphs if (peak := _peak(graph))), default=None),
        "lost_events": loss.dropped_events + loss.repaired_events, "lost_bytes": loss.truncated_bytes,
        "damage": _text(damage_notes(graphs)), "notes": _text(inspected.notes),
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
