"""Functions for the commands that show and compare steps, ``ranks``, ``report`` and ``sweep``, with their options."""

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
        source: a job, or its path.
        step: name or number of a step; by default the mean of all steps is shown.
        profiled: whether to keep the cost of the profiler.

    Raises:
        ForetraceError: the job cannot be read, has only one rank, or has no such step.
    """
    times, notes = replayed_ranks(job_of(source), step, profiled=profiled)
    found = rank_report(times)
    found.notes[:0] = notes
    return found


def report(source: Job | str | os.PathLike[str], out: str | os.PathLike[str], *, step: str | None = None,
           profiled: bool = False) -> None:
    """Write one HTML page about a recording, which needs no network when it is read.

    Args:
        source: a job, or its path.
        out: the page's file.
        step, profiled: as in ``ranks``.

    Raises:
        ForetraceError: the job cannot be read or shown, or the file cannot be written.
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
          jobs: int = -1, progress: Callable[[int, int], None] | None = None,
          from_device: str | None = None, profile: Sequence[str] = (), step: str | int | None = None,
          profiled: bool = False, **options: Any) -> Sweep:
    """Predict every combination of sizes, devices, ranks and edits, in parallel. A single value needs no list.

    Args:
        source: path of a recording, paths of its ranks, or SCRIPT.py:FUNCTION.
        sizes: values of each size, for example ``{"batch": [8, 16, 32]}``.
        device, world_size, parallel, topology: values of these options of ``foretrace predict``.
        edits: combinations of edits without a value, for example ``["none", "cuda-graphs"]``.
        fixed: changes that all points have.
        output: file for the table, FILE.parquet or FILE.csv; an interrupted run continues from its journal.
        price_per_hour: price of one device.
        workers: "local", "dask", "ray", or a running cluster such as "dask:tcp://head:8786".
        jobs: number of local processes, -1 for one per core.
        progress: function that is called with the number of finished points and of all points.
        from_device, profile, step, profiled: as in ``foretrace.predict``.
        options: values of edits by the name of the option, for example ``clock=[1.0, 1.5]``.

    Raises:
        SweepError: nothing varies, or an option cannot be swept.
        ForetraceError: the source cannot be read, or the table cannot be written.
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
                     price_per_hour=price_per_hour, workers=workers, jobs=jobs, progress=progress)


def _values(given: Any) -> tuple[Any, ...]:
    """Return an axis's values; a text or a number is a single value."""
    return (given,) if isinstance(given, str | int | float) else tuple(given)
