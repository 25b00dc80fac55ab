"""Which collective kernels of different ranks are one collective.

A collective starts when its last rank arrives and ends together; only then does the intrinsic transfer time pass.
The intrinsic time is the shortest recorded duration over the ranks: the last to arrive waited least.
Ranks are matched by process group and order within it where the trace has them, else by the order in which kernels
of one name end; a match whose recorded ends disagree is dropped and told.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from graph_predictor.simulation.rank_view import RankView
from tracer.graph import KernelKind

ENDS_AGREE_NS = 1_000_000
"""Recorded ends of one collective agree within 1–7 µs; clocks of different hosts may add up to this."""
HOST_RANGE = "gloo:"
"""How the names of the ranges of a host backend's threads begin."""
HOST_ENDS_AGREE_NS = 50_000_000
"""The same of collectives that threads of the host make (gloo): each ends when its own rank's scheduler lets it, on two
busy cores 5 ms apart; a collective of another turn is further away, or its order is."""


@dataclass(slots=True)
class Rendezvous:
    """Groups of kernels, as (rank position, kernel row) lists; ``intrinsic_ns`` one a group."""

    groups: list[list[tuple[int, int]]] = field(default_factory=list)
    intrinsic_ns: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def match_collectives(views: list[RankView], clock_ns: list[int], *, by_order: bool = False) -> Rendezvous:
    """Match the collective kernels of all ranks; ``clock_ns`` is each window's start on the job's clock.

    With ``by_order`` their ends need not agree: ranks that were laid out one by one have not met yet. Sends and
    receives are then no rendezvous (see ``synthesis.transfers``).
    """
    result = Rendezvous()
    if len(views) < 2:
        return result
    buckets: dict[tuple[str, ...], dict[int, list[int]]] = defaultdict(dict)
    for position, view in enumerate(views):
        for key, rows in _sequences(view, pairs=not by_order).items():
            buckets[key][position] = rows
    for key, by_rank in sorted(buckets.items()):
        if len(by_rank) < 2:
            continue
        lengths = {len(rows) for rows in by_rank.values()}
        if len(lengths) > 1:
            result.notes.append(
                f"The ranks recorded different numbers of {key[-1]} collectives ({sorted(lengths)}): "
                "they are replayed with their recorded durations, not as rendezvous.")
            continue
        apart: list[float] = []
        on_host = all(_on_host(views[position], rows) for position, rows in by_rank.items())
        for order in range(lengths.pop()):
            members = [(position, rows[order]) for position, rows in sorted(by_rank.items())]
            ends = [int(views[p].k_end[k]) + clock_ns[p] for p, k in members]
            if not by_order and max(ends) - min(ends) > (HOST_ENDS_AGREE_NS if on_host else ENDS_AGREE_NS):
                apart.append((max(ends) - min(ends)) / 1e6)
                continue
            result.groups.append(members)
            result.intrinsic_ns.append(min(int(views[p].graph.kernels.duration_ns[k]) for p, k in members))
        if apart:
            result.notes.append(
                f"{len(apart)} collectives ({key[-1]}) end up to {max(apart):.1f} ms apart on different ranks: they "
                "are replayed with their recorded durations, not as rendezvous.")
    return result


def _on_host(view: RankView, rows: list[int]) -> bool:
    graph = view.graph
    return all(graph.string(name).startswith(HOST_RANGE) for name in np.unique(graph.kernels.name[rows]).tolist())


def _sequences(view: RankView, pairs: bool) -> dict[tuple[str, ...], list[int]]:
    """Collective kernels of one rank in launch order, by what identifies their sequence across ranks.

    With ``pairs`` a send and the receive of a group of two are one.
    """
    graph = view.graph
    kernels, table = graph.kernels, graph.collectives
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
    rows = np.nonzero((kernels.kind == KernelKind.COLLECTIVE) & (view.k_call >= 0))[0]
    rows = rows[np.argsort(view.k_order[rows], kind="stable")]
    named = all(int(k) in described for k in rows)
    if not named:
        # Without groups, two overlapping collectives can have been launched in another order on another rank. They
        # end together everywhere, so the order of their ends is the one to go by.
        rows = rows[np.argsort(view.k_end[rows], kind="stable")]
    sequences: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for k in rows.tolist():
        key = described[k] if named else ("name", graph.string(int(kernels.name[k])))
        sequences[key].append(k)
    return sequences
