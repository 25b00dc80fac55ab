"""Damage of the traces that were read, and recordings that lack their device's work, which cannot be predicted from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tracer.errors import ForetraceError
from tracer.graph import LAUNCHING, SHAPE_ONLY, ExecutionGraph
from tracer.job import Job
from tracer.lost_launches import captured_launches, captured_of_steps


def rank_number(graph: ExecutionGraph, position: int) -> int:
    """Return the rank the trace names, else its place in the job."""
    return graph.meta.rank if graph.meta.rank >= 0 else position


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
        (rank_number(graph, position), note)
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


_NOT_KNOWN = ("What the step rests on is not known, so that nothing is predicted from it. Recordings of NVIDIA and AMD "
              "GPUs and of CPUs can be read; foretrace inspect shows what is known of this one.")


def check_device_work(graphs: Sequence[ExecutionGraph]) -> None:
    """Raise ``ForetraceError`` if what a job's devices did is not known: it cannot be read, is lost, or never ran."""
    if why := unknown_device_work(graphs):
        raise ForetraceError(why)


def unknown_device_work(graphs: Sequence[ExecutionGraph]) -> str:
    """Say of which file what a device did is not known, why, and what to do; empty where it is, or none was used."""
    for graph in graphs:
        if why := _unknown_of_rank(graph):
            return f"{graph.meta.source}: {why}"
    launches = _only_captured(graphs)
    return f"{graphs[0].meta.source}: {_a_capture(launches)}" if launches else ""


def _unknown_of_rank(graph: ExecutionGraph) -> str:
    loss, launching = graph.meta.loss, np.isin(graph.launches.kind, LAUNCHING)
    # A few unknown events beside many kernels are a tool's own (counters, marks); more than the kernels are the work.
    if (unread := loss.unreadable_device_events) > len(graph.kernels):
        return f"its device's work cannot be read: {unread:,} events are of a kind that this version does not know. " \
            + _NOT_KNOWN
    if launches := _only_captured([graph]):
        return _a_capture(launches)
    if launching.any() and not len(graph.kernels):
        return (f"it has {int(launching.sum()):,} launches and no device work: the profiler lost it, or was not "
                "allowed to see it. Record the device too (ProfilerActivity.CUDA; foretrace doctor says what a "
                "machine lacks).")
    if calls := loss.unreadable_device_calls:
        return (f"its device's work cannot be read: {calls:,} calls of an accelerator's runtime have no device work "
                "that this version knows. " + _NOT_KNOWN)
    return ""


def _only_captured(graphs: Sequence[ExecutionGraph]) -> int:
    """Return the launches that only recorded a CUDA graph, where each step has some on one of the ranks; else 0.

    Where ranks recorded different numbers of steps, the last ones are the same.
    """
    fewest = min((len(graph.steps) for graph in graphs), default=0)
    if fewest:
        captured = np.sum([captured_of_steps(graph)[-fewest:] for graph in graphs], axis=0)
        return int(captured.sum()) if (captured > 0).all() else 0
    launches = sum(int(captured_launches(graph).sum()) for graph in graphs)
    every = sum(int(np.isin(graph.launches.kind, LAUNCHING).sum()) for graph in graphs)
    return launches if launches > every / 2 else 0


def _a_capture(launches: int) -> str:
    return (f"it is the recording of a CUDA graph's capture: {launches:,} launches only recorded the graph and ran "
            "nothing, so that the step is not the one that the program runs. Record steps that launch the graph: more "
            "warm-up steps before the profiler's window.")
