"""Predicted instead of recorded transfer times for a job's collectives.

Waiting is never priced: a rendezvous starts when its last rank arrives, and only the time from there to its end, which
replay takes from the recording, is replaced by a prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from graph_predictor.simulation.build import Built
from graph_predictor.simulation.program import Program
from kernel_models.collectives import CollectiveBatch, CollectiveCall, CommTimes, Topology
from kernel_models.collectives.readers.traces import element_bytes, kind_of, payload_bytes
from tracer.arrays import Int64
from tracer.decode import list_of
from tracer.graph import NONE, ExecutionGraph, KernelKind

Predict = Callable[[CollectiveBatch], CommTimes]


@dataclass(frozen=True, slots=True)
class RecordedCollective:
    """One collective of a job: its call, its kernels as (position of the rank, kernel row), and its recorded
    transfer."""

    call: CollectiveCall
    members: tuple[tuple[int, int], ...]
    recorded_ns: int
    alone: bool
    """Only one rank was recorded: its recorded time has waiting in it."""


@dataclass(slots=True)
class PricedJob:
    """A program with predicted collectives. ``unpriced`` kernels kept their recorded times."""

    program: Program
    collectives: list[RecordedCollective]
    times: CommTimes
    unpriced: int
    notes: list[str] = field(default_factory=list)


def find_collectives(built: Built, on: Topology) -> tuple[list[RecordedCollective], int]:
    """The job's collectives whose call is known, and how many kernels of others there are."""
    graphs = built.graphs
    row_of = [{int(k): i for i, k in enumerate(g.collectives.kernel.tolist()) if k >= 0} for g in graphs]
    grouped = {member for members in built.rendezvous.groups for member in members}
    found: list[RecordedCollective] = []
    unknown = 0
    for members, recorded in zip(built.rendezvous.groups, built.rendezvous.intrinsic_ns, strict=True):
        call = recorded_call(graphs, row_of, members, on)
        if call is None:
            unknown += len(members)
        else:
            found.append(RecordedCollective(call, tuple(members), int(recorded), False))
    for position, graph in enumerate(graphs):
        for kernel in np.flatnonzero(graph.kernels.kind == KernelKind.COLLECTIVE).tolist():
            if (position, kernel) in grouped:
                continue
            call = recorded_call(graphs, row_of, [(position, kernel)], on)
            if call is None:
                unknown += 1
            else:
                found.append(RecordedCollective(call, ((position, kernel),), int(graph.kernels.duration_ns[kernel]),
                                                True))
    return found, unknown


def recorded_call(graphs: Sequence[ExecutionGraph], row_of: list[dict[int, int]],
                  members: Sequence[tuple[int, int]], on: Topology) -> CollectiveCall | None:
    """The call of one collective's kernels, (position of the rank, kernel row) each; ``None`` where nothing tells what
    it moves."""
    size, kind, dtype = float("nan"), None, "float32"
    ranks: list[int] = []
    named: list[int] = []
    group_size = 0
    for position, kernel in members:
        graph, row = graphs[position], row_of[position].get(kernel)
        if row is None:
            return None
        table = graph.collectives
        kind = kind_of(graph, table, row)
        if kind is None:
            return None
        ranks.append(graph.meta.rank if graph.meta.rank >= 0 else position)
        world = max(graph.meta.world_size, len(graphs))
        group_size = max(group_size, int(table.group_size[row]) if table.group_size[row] != NONE else (
            world if len(members) == 1 else len(members)))
        named = named or _named_ranks(graph.string(int(table.ranks[row])) if table.ranks[row] != NONE else "")
        dtype, width = element_bytes(graph, table, row)
        value = payload_bytes(kind, int(table.elements_in[row]), int(table.elements_out[row]), width, group_size)
        size = value if not size >= value else size
    if kind is None or size != size:
        return None
    if len(members) < group_size and len(named) == group_size and max(named) < on.gpus:
        placement = on.place(named)
    elif len(members) < group_size:
        placement = on.first(min(group_size, on.gpus))
    else:
        placement = on.place(ranks)
    return CollectiveCall(kind, size, placement, dtype)


def _named_ranks(text: str) -> list[int]:
    """Ranks of a group as a trace lists them; none where the list is cut off or names one twice."""
    found = list_of(text)
    if not all(type(rank) is int and rank >= 0 for rank in found):
        return []
    return found if len(set(found)) == len(found) else []


def price_collectives(built: Built, predict: Predict, on: Topology) -> PricedJob:
    """Remove the recorded time of every collective kernel whose call is known, and predict it instead.

    Args:
        built: The job's program.
        predict: Gives the times of a batch (``CommProfile.predict``, or a mixture of several).
        on: Where the ranks lie.
    """
    collectives, unknown = find_collectives(built, on)
    times = predict(CollectiveBatch.from_calls([c.call for c in collectives]))
    duration: Int64 = built.program.kernel_duration.copy()
    for collective, time_us in zip(collectives, times.time_us.tolist(), strict=True):
        for position, kernel in collective.members:
            duration[int(built.program.kernel_ptr[position]) + kernel] = round(time_us * 1e3)
    notes = []
    if unknown:
        notes.append(f"{unknown} collective kernels have no recorded kind or size and keep their recorded times; "
                     "record with shapes.")
    if alone := sum(c.alone for c in collectives):
        notes.append(f"{alone} collectives were recorded on one rank only: what it waited for the others is left out.")
    return PricedJob(built.program.with_durations(duration), collectives, times, unknown, notes)
