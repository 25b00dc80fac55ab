"""Damage of the traces that were read (lost, mended, left out, assumed), for every report that rests on them."""

from __future__ import annotations

from collections.abc import Sequence

from tracer.graph import SHAPE_ONLY, ExecutionGraph
from tracer.job import Job


def by_rank(notes: Sequence[tuple[int, str]], ranks: int) -> list[str]:
    """Notes of several ranks, each given once, with the ranks it is about unless it is about all of them."""
    told: dict[str, list[int]] = {}
    for rank, note in notes:
        told.setdefault(note, []).append(rank)
    return [note if len(of) == ranks else f"Rank {', '.join(map(str, of))}: {note}" for note, of in told.items()]


def damage_notes(graphs: Sequence[ExecutionGraph]) -> list[str]:
    """The loss reports' sentences of the ranks whose files were damaged or that were traced by shapes alone, which say
    what was left out or assumed; empty if there are none."""
    notes = [
        (graph.meta.rank if graph.meta.rank >= 0 else position, note)
        for position, graph in enumerate(graphs)
        if graph.meta.loss.truncated_bytes or graph.meta.loss.dropped_events or graph.meta.loss.repaired_events
        or graph.meta.loss.mistimed_kernels or graph.meta.era == SHAPE_ONLY
        or any("left out" in note or "damaged" in note for note in graph.meta.loss.notes)
        for note in graph.meta.loss.notes
    ]
    return by_rank(notes, len(graphs))


def folded_notes(job: Job) -> list[str]:
    """Return what to say where one graph stands for many ranks and only the graphs are simulated."""
    if not job.classes:
        return []
    ranks = ", ".join(str(graph.meta.rank) for graph in job.graphs[:8]) + (", …" if len(job.graphs) > 8 else "")
    only = f"rank {ranks} is" if len(job.graphs) == 1 else f"ranks {ranks} are"
    return [f"The job is folded: only {only} simulated, for all {job.known_ranks:,} ranks that do the same work; they "
            "are taken to arrive together at every collective."]
