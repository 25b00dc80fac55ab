"""A job, all its ranks, to one file and back."""

from __future__ import annotations

import os
from dataclasses import fields
from typing import TYPE_CHECKING, get_type_hints

from tracer.decode import DecodeError, convert
from tracer.rank_classes import MOST_RANKS
from tracer.store.container import corrupt, write_file
from tracer.store.graphs import load_graphs, pack_graphs
from tracer.table import NONE

if TYPE_CHECKING:
    from tracer.job import Job


def save_job(job: Job, path: str | os.PathLike[str]) -> None:
    """Save a job, all its ranks, as one file. As ``save_graph`` otherwise."""
    others = {part.name: getattr(job, part.name) for part in fields(job) if part.name != "graphs"}
    write_file(path, pack_graphs("job", list(job.graphs), others, os.fspath(path)))


def load_job(path: str | os.PathLike[str], *, step_region: str | None = None) -> Job:
    """Load a saved job; a file with one graph gives a job of its rank.

    It takes the arguments of ``load_graph``, and raises the same errors.
    """
    from tracer.job import Job, assemble_job  # job.py reads graph files too

    name = os.fspath(path)
    manifest, graphs = load_graphs(name, step_region)
    if manifest.kind == "graph":
        return assemble_job(graphs)
    hints = get_type_hints(Job)
    try:
        others = {
            part.name: convert(manifest.job[part.name], hints[part.name])
            for part in fields(Job) if part.name in manifest.job
        }
    except DecodeError as error:
        raise corrupt(name, f"its manifest cannot be read: {error}") from None
    job = Job(graphs, **others)
    _check_classes(job, name)
    return job


def _check_classes(job: Job, label: str) -> None:
    """Refuse a folded job whose classes hold impossible ranks or point to graphs that are not there."""
    size = max(job.world_size, 0)
    if size > MOST_RANKS or len(job.missing_ranks) > MOST_RANKS:
        raise corrupt(label, "it claims an impossible number of ranks")
    for each in job.classes:
        for first, last, step in each.ranks:
            if not (0 <= first <= last < size and step > 0 and (last - first) % step == 0):
                raise corrupt(label, "its classes hold ranks that the job does not have")
        if not NONE <= each.graph < len(job.graphs) or not each.ranks:
            raise corrupt(label, "its classes point to graphs that are not there")
