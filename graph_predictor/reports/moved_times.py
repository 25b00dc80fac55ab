"""Recorded times on the simulated clock, from times that are known on both: begins and ends of items, and of the pieces
of host time between them."""

from __future__ import annotations

import numpy as np

from graph_predictor.simulation.engine import Simulated
from graph_predictor.simulation.host_pieces import HostPieces
from graph_predictor.simulation.program import Program
from tracer.arrays import Float64, Int64


def known_times(recorded: Program, simulated: Simulated, pieces: HostPieces, ns: Float64, items: Int64, rows: Int64,
                clock_ns: int) -> tuple[Int64, Int64]:
    """Return times of one thread that are known on the job's clock as recorded and as simulated, ns, both in order.

    An operation that takes no time after the edits begins and ends at one simulated moment.

    Args:
        recorded: the program as recorded.
        simulated: the simulated times.
        pieces: host time of ``recorded``.
        ns: what each piece takes.
        items: of the simulated program, of one thread.
        rows: the recorded item that each of them is a copy of.
        clock_ns: of the rank, from its window to the job's clock.
    """
    place = np.full(len(recorded.item_kind), -1, np.int64)
    place[rows] = np.arange(len(rows))
    inside = np.flatnonzero((place[pieces.item] >= 0) & ~pieces.is_cost)
    inside = inside[np.lexsort((pieces.start_ns[inside], place[pieces.item[inside]]))]
    at = place[pieces.item[inside]]
    # Work follows the thread's previous item; before the first one it ends where the item begins.
    reached = np.cumsum(ns[inside])
    before = np.searchsorted(at, at)
    done = reached - np.append(0.0, reached)[before]
    follows = items[at] - 1 == items[np.maximum(at - 1, 0)]
    total = np.bincount(at, weights=ns[inside], minlength=len(items))[at]
    begin = np.where(follows, simulated.item_end[items[np.maximum(at - 1, 0)]], simulated.item_start[items[at]] - total)
    start, length = pieces.start_ns[inside] + clock_ns, pieces.ns[inside]
    # Parts of one gap have the same start: they follow one another.
    opens = np.ones(len(inside), np.bool_)
    opens[1:] = (at[1:] != at[:-1]) | (start[1:] != start[:-1])
    sofar = np.cumsum(length) - length
    start = start + sofar - sofar[np.flatnonzero(opens)[np.cumsum(opens) - 1]]
    known = np.concatenate([np.stack([start, start + length], 1).reshape(-1), np.stack(
        [recorded.recorded_item_start[rows], recorded.recorded_item_end[rows]], 1).reshape(-1)])
    now = np.concatenate([np.stack([begin + done - ns[inside], begin + done], 1).reshape(-1), np.stack(
        [simulated.item_start[items], simulated.item_end[items]], 1).reshape(-1).astype(np.float64)])
    order = np.argsort(known, kind="stable")
    return known[order], np.rint(np.maximum.accumulate(now[order])).astype(np.int64)


def carried(times: Int64, recorded: Int64, moved: Int64) -> Int64:
    """Recorded times (ns) on the simulated clock: between two known times in proportion, beyond them shifted."""
    inside = np.interp(times, recorded, moved)
    inside = np.where(times < recorded[0], times - recorded[0] + moved[0], inside)
    return np.rint(np.where(times > recorded[-1], times - recorded[-1] + moved[-1], inside)).astype(np.int64)
