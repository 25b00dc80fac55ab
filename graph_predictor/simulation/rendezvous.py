"""Rendezvous: collective kernels of different ranks that are one collective.

A collective starts when its last rank arrives and ends together; only then does the intrinsic transfer time pass.
The intrinsic time is the shortest recorded duration over the ranks: the last to arrive waited least.
Ranks are matched by process group and order within it where the trace has them, else by the order in which kernels
of one name end; a match whose recorded ends disagree is dropped and reported.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from graph_predictor.simulation.rank_view import RankView
from tracer.arrays import Int64
from tracer.graph import ExecutionGraph, KernelKind

ENDS_AGREE_NS = 1_000_000
"""Recorded ends of one collective agree within 1–7 µs; clocks of different hosts may add up to this."""
HOST_RANGE = "gloo:"
"""Begin of the names of the ranges of a host backend's threads."""
HOST_ENDS_AGREE_NS = 50_000_000
"""The same of collectives that threads of the host make (gloo): each ends when its own rank's scheduler lets it, on two
busy cores 5 ms apart; a collective of another turn is further away, or its order is."""


@dataclass(slots=True)
class Rendezvous:
    """Groups of kernels, as (rank position, kernel row) lists; ``intrinsic_ns`` one a group."""

    groups: list[list[tuple[int, int]]] = field(default_factory=list)
    intrinsic_ns: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def match_collectives(views: list[RankView], clock_ns: list[int], drifts: list[float]) -> Rendezvous:
    """Match the recorded collective kernels of all ranks; ``clock_ns`` is each window's start on the job's clock, and
    ``drifts`` how much faster than it each rank's runs (``clocks``)."""
    result = Rendezvous()
    apart: dict[str, list[float]] = defaultdict(list)
    for name, members in recorded_meetings(views, result.notes):
        ends = [round(int(views[p].k_end[k]) * (1.0 - drifts[p])) + clock_ns[p] for p, k in members]
        if max(ends) - min(ends) > (HOST_ENDS_AGREE_NS if runs_on_host(views, members) else ENDS_AGREE_NS):
            apart[name].append((max(ends) - min(ends)) / 1e6)
            continue
        result.groups.append(members)
        result.intrinsic_ns.append(min(int(views[p].graph.kernels.duration_ns[k]) for p, k in members))
    result.notes += [
        f"{len(found)} collectives ({name}) end up to {max(found):.1f} ms apart on different ranks: they are replayed "
        "with their recorded durations, not as rendezvous." for name, found in apart.items()]
    return result


def recorded_meetings(views: Sequence[RankView], notes: list[str]) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """Yield what each recorded collective is called and its (rank position, kernel row) pairs, whenever they ended.

    What cannot be matched is put into ``notes``.
    """
    ends = [view.k_end + view.graph.meta.base_time_ns for view in views]
    return _meetings([_recorded_sequences(view) for view in views], notes, ends)


def runs_on_host(views: Sequence[RankView], members: list[tuple[int, int]]) -> bool:
    """Return whether threads of the host make a collective (gloo)."""
    return all(views[p].graph.string(int(views[p].graph.kernels.name[k])).startswith(HOST_RANGE) for p, k in members)


def match_in_order(graphs: list[ExecutionGraph]) -> Rendezvous:
    """Match the collectives of ranks that never ran, by process group and the order in which each launches them.

    A collective takes what it takes on the slowest rank. Sends and receives are no rendezvous (see
    ``synthesis.program``).
    """
    result = Rendezvous()
    for _, members in _meetings([_sequences(graph, np.flatnonzero(graph.kernels.kind == KernelKind.COLLECTIVE),
                                            _described(graph, pairs=False)) for graph in graphs], result.notes):
        result.groups.append(members)
        result.intrinsic_ns.append(max(int(graphs[p].kernels.duration_ns[k]) for p, k in members))
    return result


def _meetings(ranks: list[dict[tuple[str, ...], list[int]]], notes: list[str],
              ends: Sequence[Int64] | None = None) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """Yield what each collective is called, and its (rank position, kernel row) pairs, by ``_sequences`` of each
    rank; ``ends`` of every rank's kernels, on one clock, tell where a shorter sequence belongs."""
    buckets: dict[tuple[str, ...], dict[int, list[int]]] = defaultdict(dict)
    for position, sequences in enumerate(ranks):
        for key, rows in sequences.items():
            buckets[key][position] = rows
    for key, by_rank in sorted(buckets.items()):
        lengths = {len(rows) for rows in by_rank.values()}
        if len(by_rank) < 2:
            continue
        if len(lengths) > 1:
            numbers = f"The ranks recorded different numbers of {key[-1]} collectives ({sorted(lengths)}): "
            aligned = None if ends is None else _aligned(by_rank, ends)
            if aligned is None:
                notes.append(f"{numbers}they are replayed with their recorded durations, not as rendezvous.")
                continue
            met = [members for members in aligned if len(members) > 1]
            notes.append(f"{numbers}the {len(met)} that at least two ranks have were matched by when they ended.")
            for members in met:
                yield key[-1], members
            continue
        for order in range(lengths.pop()):
            yield key[-1], [(position, rows[order]) for position, rows in sorted(by_rank.items())]


def _aligned(by_rank: dict[int, list[int]], ends: Sequence[Int64]) -> list[list[tuple[int, int]]] | None:
    """Return the members of each collective of the longest sequence, where others are parts of it without gaps that
    end with it; ``None`` where one is no such part."""
    longest = max(by_rank, key=lambda position: (len(by_rank[position]), -position))
    reference = ends[longest][by_rank[longest]]
    found: list[list[tuple[int, int]]] = [[] for _ in reference]
    for position, rows in sorted(by_rank.items()):
        own = ends[position][rows]
        apart = [float(np.median(np.abs(own - reference[shift:shift + len(own)])))
                 for shift in range(len(reference) - len(own) + 1)]
        shift = int(np.argmin(apart))
        if apart[shift] > ENDS_AGREE_NS:
            return None
        for number, row in enumerate(rows):
            found[shift + number].append((position, row))
    return found


def _recorded_sequences(view: RankView) -> dict[tuple[str, ...], list[int]]:
    rows = np.nonzero((view.graph.kernels.kind == KernelKind.COLLECTIVE) & (view.k_call >= 0))[0]
    rows = rows[np.argsort(view.k_order[rows], kind="stable")]
    described = _described(view.graph, pairs=True)
    if not all(int(k) in described for k in rows):
        # Without groups, two overlapping collectives can have been launched in another order on another rank. They
        # end together everywhere, so the order of their ends is the one to go by.
        rows = rows[np.argsort(view.k_end[rows], kind="stable")]
    return _sequences(view.graph, rows, described)


def _described(graph: ExecutionGraph, pairs: bool) -> dict[int, tuple[str, ...]]:
    """Return what identifies the sequence across ranks that each collective kernel with a process group belongs to.

    With ``pairs`` a send and the receive of a group of two are one.
    """
    table = graph.collectives
    described: dict[int, tuple[str, ...]] = {}
    for i in range(len(table)):
        # A group of one name can differ by rank (a row and a column of a mesh): its ranks tell them apart.
        if table.kernel[i] >= 0 and table.group[i] >= 0:
            kind = graph.string(int(table.kind[i]))
            if pairs and kind in ("send", "recv") and table.group_size[i] == 2:
                # Of two ranks, what one sends the other receives.
                kind = "send_recv"
            described[int(table.kernel[i])] = (
                "group", graph.string(int(table.group[i])), graph.string(int(table.ranks[i])), kind)
    return described


def _sequences(graph: ExecutionGraph, rows: Int64, described: dict[int, tuple[str, ...]]) -> dict[
        tuple[str, ...], list[int]]:
    """Collective kernels of one rank in the given order, by what identifies their sequence across ranks."""
    named = all(int(k) in described for k in rows)
    sequences: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for k in rows.tolist():
        sequences[described[k] if named else ("name", graph.string(int(graph.kernels.name[k])))].append(k)
    return sequences
