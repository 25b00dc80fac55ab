"""A survey: jobs are found, each is read once by a worker, and its rows are kept as soon as they are there.

::

    paths ──▶ jobs ──▶ those whose key the table has not ──▶ a worker a job ──▶ parts ──▶ one part
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from step_views.survey.discovery import FoundJob, find_jobs
from step_views.survey.facts import JobRows, failed_rows, job_rows
from step_views.survey.table import COLUMNS, SurveyError, SurveyTable, read_tables
from tracer.cluster.engines import open_workers
from tracer.cluster.forked import ForkedWorkers, cores
from tracer.cluster.workers import ClusterError, Failed, TaskWorkers
from tracer.shown import Shown

if TYPE_CHECKING:
    import pandas as pd

MOST_WARMING = 5
"""Jobs that this process reads until one was predicted: what all jobs share is then at hand in its copies."""


@dataclass(repr=False)
class Survey(Shown):
    """A survey's table, and what the last run did.

    Attributes:
        path: the table's directory.
        read, unchanged: number of jobs that this run read, and of those that the table already had.
        unreadable: (job or path, why) of those that could not be read.
        left_out: sentences on files that are no recordings.
    """

    path: str
    read: int = 0
    unchanged: int = 0
    unreadable: list[tuple[str, str]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    @property
    def found(self) -> int:
        """Return the jobs and paths that were to be read."""
        return self.read + self.unchanged + len(self.unreadable)

    @property
    def share_read(self) -> float:
        """Return the share of the jobs that the table has the facts of, of all that were found; 0 where none was."""
        return (self.read + self.unchanged) / self.found if self.found else 0.0

    def headline(self) -> str:
        """Say what was read in one line."""
        return (f"{self.found:,} jobs: {self.read:,} read, {self.unchanged:,} unchanged, {len(self.unreadable):,} "
                f"could not be read; {self.path}")

    def tables(self) -> Mapping[str, Callable[[], pd.DataFrame]]:
        """``jobs``, ``families`` and ``opportunities``; times in µs a step."""
        return {name: partial(self._frame, name) for name in COLUMNS}

    def _frame(self, name: str) -> pd.DataFrame:
        frame: pd.DataFrame = read_tables(self.path)[name].to_pandas()
        return frame

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"path": self.path, "found": self.found, "read": self.read, "unchanged": self.unchanged,
                "share_read": self.share_read, "left_out": self.left_out,
                "unreadable": [{"job": name, "why": why} for name, why in self.unreadable]}


def survey(paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], output: str | os.PathLike[str], *,
           workers: str | int | None = None, tags: Sequence[str] = (), step_region: str | None = None,
           progress: Callable[[int, int, JobRows], None] | None = None) -> Survey:
    """Survey many jobs into a table. What the table has of a job whose files did not change is kept.

        foretrace.survey(["runs/", "s3://team/traces/"], "survey.parquet").to_pandas()

    Args:
        paths: files, directory trees, globs, and fsspec URLs of these.
        output: the table's directory, new or of an earlier survey: it may be killed at any moment, and goes on.
        workers: a number of processes of this machine, by default one a core. The words "dask" and "ray" start a
            cluster on this machine; "dask:ADDRESS" and "ray:ADDRESS" use a running one.
        tags: kept with every job that is found, such as "team=ads".
        step_region: as in ``foretrace.read``.
        progress: called with (jobs done, jobs to read, the last one's rows).

    Raises:
        SurveyError: there is no path, or the output cannot be written or is no survey.
        ClusterError: the workers cannot be used.
    """
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not given:
        raise SurveyError("There is nothing to survey: the list of paths is empty.")
    where, kept = os.fspath(output), [_plain(tag) for tag in ([tags] if isinstance(tags, str) else tags)]
    with SurveyTable(where) as table:
        found = find_jobs(os.fspath(path) for path in given)
        # Of jobs that could not be read the reason may be gone although their files are the same: rights, memory.
        known = {row["job"]: row["key"] for row in table.jobs() if not row["error"]}
        # Jobs of one size lie together: workers that start together end together.
        todo = sorted((job for job in found.jobs if known.get(_plain(job.name)) != job.key),
                      key=lambda job: (job.size, job.name))
        failed = [(said, "") for said in found.unreadable]
        for done, rows in enumerate(_rows(todo, workers, step_region), 1):
            table.add(rows)
            if rows.job["error"]:
                failed.append((rows.job["job"], rows.job["error"]))
            if progress is not None:
                progress(done, len(todo), rows)
        table.compact({_plain(job.name): kept for job in found.jobs})
    return Survey(where, len(todo) - len(failed) + len(found.unreadable), len(found.jobs) - len(todo), failed,
                  found.left_out)


def _rows(todo: Sequence[FoundJob], workers: str | int | None, step_region: str | None) -> Iterator[JobRows]:
    """Yield each job's rows, in order."""
    make = partial(job_rows, step_region=step_region)
    if isinstance(workers, str) and workers:
        with open_workers(workers) as cluster:
            yield from _mapped(cluster, make, todo)
        return
    asked = workers if isinstance(workers, int) else cores()
    if asked < 1:
        raise ClusterError(f"{asked} workers are none; give 1 or more.")
    most = asked if cores() > 1 else 1
    rest = iter(todo)
    for _, job in zip(range(MOST_WARMING), rest, strict=False):
        yield (rows := make(job))
        if not rows.job["error"] and not rows.job["not_predicted"]:
            break
    left = list(rest)
    if min(most, len(left)) < 2:
        yield from map(make, left)
        return
    with ForkedWorkers(min(most, len(left))) as copies:
        yield from _mapped(copies, make, left)


def _mapped(workers: TaskWorkers, make: Callable[[FoundJob], JobRows], todo: Sequence[FoundJob]) -> Iterator[JobRows]:
    """Yield each job's rows, of one whose workers died the reason."""
    for job, rows in zip(todo, workers.map(make, todo, name=lambda job: job.name), strict=True):
        yield failed_rows(job, str(rows.error)) if isinstance(rows, Failed) else rows


def _plain(name: str) -> str:
    """Return a path or a tag as the table has it."""
    return name.encode("utf-8", "replace").decode()
