"""Functions of the commands that show and compare steps: ``ranks``, ``report`` and ``sweep``, with their options."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from graph_predictor.request.predict import job_of
from graph_predictor.request.study import Configuration
from step_views.pages.overview import report_page
from step_views.pages.page import Provenance, write_page
from step_views.reports.ranks.report import JobReport, rank_report, replayed_ranks
from step_views.sweep.run import LOCAL, Sweep, SweepSource
from step_views.sweep.run import sweep as run_sweep
from step_views.sweep.space import Axis, SweepError, SweepSpace
from tracer.job import Job


def ranks(source: Job | str | os.PathLike[str], *, step: str | None = None, profiled: bool = False) -> JobReport:
    """Compare the ranks of a recorded job: waits, stragglers, bubbles and the path across ranks.

    Args:
        source: a job, or the path of one.
        step: the step to look at, by name or number; by default the mean of all.
        profiled: keep what the profiler costs.

    Raises:
        ForetraceError: the job cannot be read, has one rank or no such step.
    """
    times, notes = replayed_ranks(job_of(source), step, profiled=profiled)
    found = rank_report(times)
    found.notes[:0] = notes
    return found


def report(source: Job | str | os.PathLike[str], out: str | os.PathLike[str], *, step: str | None = None,
           profiled: bool = False) -> None:
    """Write one HTML page of a recording, which needs no network to be looked at.

    Args:
        source: a job, or the path of one.
        out: the page's file.
        step, profiled: as for ``ranks``.

    Raises:
        ForetraceError: the job cannot be read or shown, or the file not written.
    """
    job = job_of(source)
    names = [graph.meta.source or "a job" for graph in job.graphs]
    if isinstance(source, str | os.PathLike):
        names = [os.fspath(source)]
    page = report_page(job, Provenance(tuple(dict.fromkeys(names)), "foretrace.report"), step=step, profiled=profiled)
    write_page(page, os.fspath(out))


def sweep(source: str | Sequence[str], *, sizes: Mapping[str, int | Iterable[int]] | None = None,
          device: str | Iterable[str] = (), world_size: int | Iterable[int] = (), parallel: str | Iterable[str] = (),
          topology: str | Iterable[str] = (), edits: str | Iterable[str] = (), fixed: Configuration | None = None,
          output: str | os.PathLike[str] | None = None, price_per_hour: float | None = None, workers: str = LOCAL,
          scheduler: str | None = None, jobs: int = -1, progress: Callable[[int, int], None] | None = None,
          from_device: str | None = None, profile: Sequence[str] = (), step: str | int | None = None,
          profiled: bool = False, **options: Any) -> Sweep:
    """Predict every combination of sizes, devices, ranks and edits, in parallel. One value needs no list.

    Args:
        source: path of a recording, paths of its ranks, or SCRIPT.py:FUNCTION.
        sizes: values of each size, such as ``{"batch": [8, 16, 32]}``.
        device, world_size, parallel, topology: values of these options of ``foretrace predict``.
        edits: combinations of edits that take no value, such as ``["none", "cuda-graphs"]``.
        fixed: what all points share.
        output: table that is written, FILE.parquet or FILE.csv; a run that was stopped goes on from its journal.
        price_per_hour: of one device.
        workers: "local", "dask" or "ray"; scheduler: their address; jobs: local processes, -1 for one a core.
        progress: called with the points done and all points.
        from_device, profile, step, profiled: as for ``foretrace.predict``.
        options: values of edits by the name of their option, such as ``clock=[1.0, 1.5]``.

    Raises:
        SweepError: nothing varies, or an option cannot be swept.
        ForetraceError: the source cannot be read, or the table not written.
    """
    listed: dict[str, Any] = {
        "device": device, "world_size": world_size, "topology": topology, "parallel": parallel, **options,
        "edits": edits}
    axes = [Axis(f"set:{name}", _values(given)) for name, given in (sizes or {}).items()]
    axes += [Axis(name, values) for name, given in listed.items() if (values := _values(given))]
    if not axes:
        raise SweepError("Nothing varies; give values of sizes, device, world_size, parallel, topology or an edit.")
    paths = (source,) if isinstance(source, str) else tuple(source)
    if not paths:
        raise SweepError("There is no recording to sweep: the list of paths is empty.")
    where = SweepSource(paths, step=step, recorded_on=from_device, profiles=tuple(profile), profiled=profiled)
    return run_sweep(where, SweepSpace(tuple(axes), fixed or Configuration()), output=output,
                     price_per_hour=price_per_hour, backend=workers, scheduler=scheduler, jobs=jobs, progress=progress)


def _values(given: Any) -> tuple[Any, ...]:
    """Return an axis' values; a text or a number is one."""
    return (given,) if isinstance(given, str | int | float) else tuple(given)
