"""Runs a sweep: chunks of points on this machine or a cluster, with one row of the table for each point."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache, partial
from itertools import groupby
from typing import Any

import pandas as pd
from joblib import Parallel, delayed, parallel_config

from graph_predictor.prediction.edited_repeats import HOSTS_KEPT
from graph_predictor.prediction.result import Prediction
from graph_predictor.request.study import Study, is_script, read_source
from kernel_models.device import find_device
from kernel_models.profile import load_profile
from step_views.exports.tables import write_frame
from step_views.sweep.files import Journal, draw_sweep
from step_views.sweep.space import Point, SweepError, SweepSpace
from tracer.cluster.engines import LOCAL, open_workers
from tracer.cluster.forked import ForkedWorkers, cores
from tracer.cluster.workers import TaskWorkers
from tracer.cores import safe_paths
from tracer.errors import ForetraceError
from tracer.graph import ExecutionGraph
from tracer.input_file import open_anywhere
from tracer.job import Job, read_job
from tracer.shown import Shown

COLUMNS = ("times", "step_time_us", "low_us", "high_us", "gpu_active_us", "bound", "ranks", "items_per_second",
           "mfu", "peak_memory_bytes", "cost_per_step", "cost_per_million_items", "measured_share", "warnings",
           "refused")
"""Columns after those of the axes. ``times``: under the profiler or without it. Times are in µs with the ends of the
80% interval. ``measured_share``: share of the step time from measured durations. ``refused``: reason why a point was
not priced; empty for other points."""


def row(study: Study, point: Point, price_per_hour: float | None) -> dict[str, Any]:
    """Predict one point, and return plain values by column."""
    try:
        result = study.predict(point.configuration, price_per_hour=price_per_hour, path=False)
    except ForetraceError as error:
        return {**point.values, **dict.fromkeys(COLUMNS), "refused": " ".join(str(error).split())}
    return {**point.values, **_results(result)}


def _results(result: Prediction) -> dict[str, Any]:
    items = result.items_per_second
    cost = result.cost_per_step
    per_step = None if items is None else items * result.step_time_us / 1e6
    return {
        "times": result.times, "step_time_us": result.step_time_us, "low_us": result.interval_us[0],
        "high_us": result.interval_us[1],
        "gpu_active_us": result.gpu_active_us, "bound": result.bound, "ranks": len(result.per_rank),
        "items_per_second": items, "mfu": result.mfu, "peak_memory_bytes": result.peak_memory_bytes,
        "cost_per_step": cost,
        "cost_per_million_items": None if cost is None or not per_step else cost / per_step * 1e6,
        "measured_share": result.sources.get("measured", 0.0), "warnings": " ".join(result.warnings), "refused": "",
    }


class Goal(str, Enum):
    """The measure by which points are ranked."""

    THROUGHPUT = "throughput"
    TIME = "time"
    COST = "cost"


_COLUMN = {Goal.THROUGHPUT: ("items_per_second", False), Goal.TIME: ("step_time_us", True)}
_COSTS = ("cost_per_million_items", "cost_per_step")


def feasible(table: pd.DataFrame, memory_limit: float | None = None) -> pd.DataFrame:
    """Return the priced points that fit. ``memory_limit``: bytes of a device; points of unknown memory are kept."""
    kept = table[table["step_time_us"].notna()]
    if memory_limit is None:
        return kept
    return kept[~(kept["peak_memory_bytes"].astype(float) > memory_limit)]


def ranked(table: pd.DataFrame, goal: Goal, memory_limit: float | None = None) -> pd.DataFrame:
    """Return the feasible points, best first. Raises ``SweepError`` if no point has the goal's figure."""
    kept = feasible(table, memory_limit)
    if goal is Goal.COST:
        column = next((name for name in _COSTS if kept[name].notna().any()), None)
        if column is None and len(kept):
            raise SweepError("No point has a cost; give the price of a device and hour with --price.")
        up = True
    else:
        column, up = _COLUMN[goal]
        if len(kept) and not kept[column].notna().any():
            raise SweepError("No point says how many samples a step has; name the batch with --set batch=OLD:NEW,…, "
                             "or rank by time.")
    if not len(kept):
        return kept
    return kept.sort_values(str(column), ascending=up, kind="stable", na_position="last")


CHUNK = 16
"""Fewest points of a chunk, after which a worker reports: few, so that little is lost if the sweep is stopped; more
than one, because points share work."""
LEAST_CHUNKS = 64
"""Fewest chunks, if there are enough points."""
RATES = ("clock", "bandwidth")
"""Names of edits of the GPU's rates, which do not change the host."""

Row = dict[str, Any]


@dataclass(frozen=True)
class SweepSource:
    """The source that each worker reads, as plain values. Paths must mean the same on every machine of a cluster.

    Attributes:
        paths: paths of the source, or one SCRIPT.py:FUNCTION.
        window, step, recorded_on, profiles, profiled: as in ``Study``; devices by name, profiles by path.
        step_region, cycle: as in ``tracer.read_job``.
    """

    paths: tuple[str, ...]
    window: int = 0
    step: str | int | None = None
    recorded_on: str | None = None
    profiles: tuple[str, ...] = ()
    profiled: bool = False
    step_region: str | None = None
    cycle: int | None = None

    def study(self, job: Job | None = None) -> Study:
        """Read the source. Raises ``ForetraceError`` if it cannot be read."""
        script = self.paths[0] if is_script(self.paths, self.step_region) else None
        if job is None and script is None:
            job = read_source(self.paths, self.window, read=self._read)
        return Study(job, self.step,
                     recorded_on=None if self.recorded_on is None else find_device(self.recorded_on),
                     profiles=[load_profile(path) for path in self.profiles],
                     code=script, profiled=self.profiled, read=self._read)

    def _read(self, paths: list[str], window: int = 0) -> Job:
        return read_job(paths, window=window, step_region=self.step_region, cycle=self.cycle)


@dataclass(frozen=True, repr=False)
class Sweep(Shown):
    """The priced points of a sweep.

    Attributes:
        table: one row a point, in the order of the space: the axes' columns, then ``COLUMNS``.
        axes: names of the axes' columns.
        resumed: number of points that an earlier run had finished.
        notes: remarks for the reader.
    """

    table: pd.DataFrame
    axes: tuple[str, ...]
    resumed: int = 0
    notes: tuple[str, ...] = field(default_factory=tuple)

    def headline(self) -> str:
        """Return the number of points, and the fastest, in one line."""
        priced = self.table[self.table["step_time_us"].notna()]
        said = f"{len(self.table):,} points over {', '.join(self.axes) or 'no axis'}"
        if priced.empty:
            return f"{said}, none priced"
        best = priced.loc[priced["step_time_us"].idxmin()]
        where = ", ".join(f"{name} {best[name]}" for name in self.axes)
        return (f"{said}, {len(priced):,} priced; fastest {where or 'the step'} with {best['step_time_us'] / 1e3:,.3f} "
                f"ms ({best['low_us'] / 1e3:,.3f} to {best['high_us'] / 1e3:,.3f})")

    def tables(self) -> Mapping[str, Callable[[], pd.DataFrame]]:
        """Return ``points``, which is ``table``."""
        return {"points": lambda: self.table}

    def plot(self, ax: Any = None) -> Any:
        """Plot step times with their intervals over the axis with most numbers, with a line for each combination of the
        other axes. Raises ``SweepError`` without points or without a library for plots."""
        return draw_sweep(self.table, self.axes, ax)


def sweep(source: SweepSource, space: SweepSpace, *, output: str | os.PathLike[str] | None = None,
          price_per_hour: float | None = None, workers: str = LOCAL,
          jobs: int = -1, progress: Callable[[int, int], None] | None = None) -> Sweep:
    """Predict every point of a space.

        source: the job that every point changes.
        space: the points.
        output: path of the table; by default nothing is written. Until the table is written, a journal in its folder
            keeps finished points, and the next run does not repeat them.
        price_per_hour: price of one device.
        workers: "local", "dask", "ray", or a running cluster such as "dask:tcp://head:8786".
        jobs: number of processes on this machine; -1 for one a core.
        progress: called with the number of points done and the number of all points.

    Raises:
        SweepError: the journal belongs to another sweep.
        ClusterError: the workers are unknown or not available.
        ForetraceError: the source cannot be read, or the table not written; the journal is kept then.
    """
    if jobs < 1 and jobs != -1:
        raise SweepError(f"{jobs} is no number of processes; give --jobs 1 or more, or -1 for one a core.")
    study = source.study()
    points = list(space)
    study.check_named([point.configuration for point in points])
    job = study.job  # an unreadable source is reported before any worker starts
    with ExitStack() as stack:
        rows: dict[str, Row] = {}
        journal: Journal | None = None
        keep: Callable[[dict[str, Row]], None] = rows.update
        opened = stack.enter_context(open_workers(workers))  # unreachable ones leave no journal behind
        if output is not None:
            journal = stack.enter_context(Journal(output, _about(source, job, space, price_per_hour)))
            rows, keep = journal.rows, journal.add
        missing = [point for point in points if point.key not in rows]
        resumed = len(points) - len(missing)
        done = resumed
        for found in _run(source, study, missing, price_per_hour, opened, jobs, stack):
            keep(found)
            done += len(found)
            if progress is not None:
                progress(done, len(points))
        axes = tuple(axis.title for axis in space.axes)
        table = pd.DataFrame([rows[point.key] for point in points], columns=[*axes, *COLUMNS])
        if output is not None and journal is not None:
            write_frame(table, output)
            journal.remove()
    return Sweep(table, axes, resumed, tuple(journal.notes) if journal is not None else ())


def _run(source: SweepSource, study: Study, points: Sequence[Point], price: float | None, workers: TaskWorkers,
         jobs: int, stack: ExitStack) -> Iterator[dict[str, Row]]:
    """Yield the rows of each chunk of points, as chunks are finished."""
    chunks = list(_chunks(points))

    def priced(chunk: list[Point]) -> dict[str, Row]:
        return {point.key: row(study, point, price) for point in chunk}

    there = partial(_rows, source, price)
    if workers.elsewhere:
        yield from workers.each(there, chunks, name=lambda chunk: f"A chunk of {len(chunk)} points")
        return
    if chunks:
        first, *chunks = chunks
        yield priced(first)  # computes what all points share
    if not chunks:
        return
    most = min(len(chunks), os.cpu_count() or 1)  # more would have nothing to do, or nothing to do it with
    jobs = jobs if jobs < 1 else min(jobs, most)
    if jobs == 1:
        yield from map(priced, chunks)
        return
    if (forks := _forks()) > 1:
        with ForkedWorkers(min(forks, most) if jobs < 1 else jobs) as copies:
            yield from copies.each(priced, chunks)
        return
    stack.enter_context(safe_paths())
    stack.enter_context(parallel_config(backend="loky", n_jobs=jobs, inner_max_num_threads=1))
    yield from Parallel(return_as="generator_unordered")(delayed(there)(chunk) for chunk in chunks)


def _forks() -> int:
    """Return how many copies of this process can work at once; 1 if PyTorch is loaded, whose threads forbid copies."""
    return 1 if "torch" in sys.modules else cores()


def _chunks(points: Sequence[Point]) -> Iterator[list[Point]]:
    """Yield chunks of points for workers. Points with equal traces come together, so that a worker traces them once.
    Within these, groups of ``HOSTS_KEPT`` hosts are combined with all rates of the GPU, so that results for hosts and
    rates are reused. Points of one rate stay in one chunk, up to a fair share of all points."""
    most = min(max(len(points) // LEAST_CHUNKS, CHUNK), HOSTS_KEPT)
    for _, group in groupby(sorted(points, key=lambda point: repr(point.traced)), key=lambda point: point.traced):
        chunk: list[Point] = []
        for alike in _by_rates(list(group)):
            for at in range(0, len(alike), most):
                chunk += alike[at:at + most]
                if len(chunk) >= CHUNK:
                    yield chunk
                    chunk = []
        if chunk:
            yield chunk


def _by_rates(points: Sequence[Point]) -> Iterator[list[Point]]:
    """Group points by rates of the GPU: first those with ``HOSTS_KEPT`` combinations of their other changes, then the
    next such combinations."""
    known: dict[str, int] = {}

    def place(point: Point) -> tuple[int, str, int]:
        changes: dict[str, Any] = {**point.configuration.differences(), "edits": dict(point.configuration.edits)}
        rates = [changes["edits"].pop(name, None) for name in RATES]
        beside = known.setdefault(repr(changes), len(known))
        return beside // HOSTS_KEPT, repr(rates), beside

    placed = sorted(((place(point), point) for point in points), key=lambda pair: pair[0])
    for _, alike in groupby(placed, key=lambda pair: pair[0][:2]):
        yield [point for _, point in alike]


def _rows(source: SweepSource, price: float | None, points: list[Point]) -> dict[str, Row]:
    study = _read_once(source)
    return {point.key: row(study, point, price) for point in points}


@lru_cache(maxsize=1)
def _read_once(source: SweepSource) -> Study:
    """Return a worker's study: read for its first chunk, used for all."""
    return source.study()


def _about(source: SweepSource, job: Job, space: SweepSpace, price: float | None) -> dict[str, Any]:
    """Return what identifies a journal's points: contents of sources, not only their paths."""
    return {
        "source": _fingerprint(job.graphs), "window": source.window, "step": source.step,
        "step region": job.graphs[0].meta.step_region, "cycle": job.graphs[0].meta.cycle,
        "recorded device": source.recorded_on, "profiles": [_content(path) for path in source.profiles],
        "profiled": source.profiled, "options": space.fixed.differences(), "price": price,
        "recorded sizes": {axis.title: axis.old for axis in space.axes if axis.old is not None},
    }


def _fingerprint(graphs: Sequence[ExecutionGraph]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for graph in graphs:
        for column in (graph.ops.name, graph.ops.start_ns, graph.ops.shapes, graph.kernels.name,
                       graph.kernels.start_ns, graph.kernels.duration_ns):
            digest.update(column.tobytes())
        digest.update("\0".join(graph.strings).encode("utf-8", "replace"))
    return digest.hexdigest()


def _content(path: str) -> str:
    with open_anywhere(path)[0] as file:
        return hashlib.blake2b(file.read(), digest_size=16).hexdigest()
