"""Removing events whose times lie impossibly far from all others, or whose streams or threads are impossibly many.

A single host event at time 0 would stretch the window to decades and hide everything in it.
"""

from __future__ import annotations

import numpy as np

from tracer.kineto.columns import GROUP_COLUMNS, Collector
from tracer.kineto.names import NameGroup

MAX_WINDOW_NS = 7 * 24 * 3600 * 10**9
"""No profiler window lasts a week: buffers hold minutes at most."""


MOST_STREAMS, MOST_THREADS, _MOST_DEVICES = 4096, 1 << 14, 64
"""Streams of a process and threads that did work, at most: real traces have some dozens."""


def drop_outliers(collected: Collector) -> None:
    """Drop and count the events more than half a week from the median one, if the window is longer than a week."""
    if collected.first_ns is None or collected.last_ns - collected.first_ns <= MAX_WINDOW_NS:
        return
    columns = {group: collected.finish(group) for group in GROUP_COLUMNS}
    starts = np.concatenate([found["start"] for found in columns.values()])
    if len(starts) == 0:
        return
    middle = int(np.sort(starts)[len(starts) // 2])
    dropped = 0
    first, last = [], []
    for group, found in columns.items():
        keep = (np.abs(found["start"] - middle) <= MAX_WINDOW_NS // 2) & (found["duration"] <= MAX_WINDOW_NS // 2)
        dropped += int(len(keep) - keep.sum())
        kept = put_back(collected, group, found, keep)
        if keep.any():
            first.append(int(kept["start"].min()))
            last.append(int((kept["start"] + kept["duration"]).max()))
    collected.first_ns, collected.last_ns = min(first, default=None), max(last, default=0)
    collected.loss.dropped_events += dropped
    collected.loss.notes.append(f"{dropped} events more than half a week from all others were dropped: their times are "
                                "wrong.")


def drop_excess(collected: Collector) -> None:
    """Drop and count the events of streams and threads beyond those a process can have, in order of appearance."""
    if (collected.reach(NameGroup.DEVICE, "stream") >= MOST_STREAMS
            or collected.reach(NameGroup.DEVICE, "device") >= _MOST_DEVICES):
        found = collected.finish(NameGroup.DEVICE)
        device, stream = (np.unique(found[name], return_inverse=True)[1].reshape(-1) for name in ("device", "stream"))
        _, first, place = np.unique(device * len(stream) + stream, return_index=True, return_inverse=True)
        order = np.empty(len(first), np.int64)
        order[np.argsort(first)] = np.arange(len(first))
        keep = order[place.reshape(-1)] < MOST_STREAMS
        put_back(collected, NameGroup.DEVICE, found, keep)
        _tell(collected, keep, f"on streams beyond the first {MOST_STREAMS:,}")
    if len(collected.threads.keys_in_order) <= MOST_THREADS:
        return
    for group in GROUP_COLUMNS:
        if "thread" in GROUP_COLUMNS[group]:
            found = collected.finish(group)
            keep = found["thread"] < MOST_THREADS
            put_back(collected, group, found, keep)
            _tell(collected, keep, f"on threads beyond the first {MOST_THREADS:,}")
    del collected.threads.keys_in_order[MOST_THREADS:]


def _tell(collected: Collector, keep: np.ndarray, where: str) -> None:
    dropped = int(len(keep) - keep.sum())
    if dropped:
        collected.loss.dropped_events += dropped
        collected.loss.notes.append(f"{dropped} events {where} were dropped: no process has so many.")


def put_back(collected: Collector, group: NameGroup, found: dict[str, np.ndarray], keep: np.ndarray) -> \
        dict[str, np.ndarray]:
    """Put the kept rows of a group back, and return them."""
    row = np.cumsum(keep) - 1
    for owner, comms in ((NameGroup.OPERATION, collected.operation_comms), (NameGroup.DEVICE, collected.device_comms)):
        if owner is group:
            comms[:] = [(int(row[old]), args) for old, args in comms if keep[old]]
    kept = {name: column[keep] for name, column in found.items()}
    collected.restore(group, kept)
    return kept
