"""Removing events whose times lie impossibly far from all others.

A single host event at time 0 would stretch the window to decades and hide everything in it.
"""

from __future__ import annotations

import numpy as np

from tracer.kineto.columns import GROUP_COLUMNS, Collector
from tracer.kineto.names import Group

MAX_WINDOW_NS = 7 * 24 * 3600 * 10**9
"""No profiler window lasts a week: buffers hold minutes at most."""


def drop_outliers(collected: Collector) -> None:
    """If the window is longer than a week, drop and count the events more than half a week from the median one."""
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
        row = np.cumsum(keep) - 1
        for owner, comms in ((Group.OPERATION, collected.operation_comms), (Group.DEVICE, collected.device_comms)):
            if owner is group:
                comms[:] = [(int(row[old]), args) for old, args in comms if keep[old]]
        kept = {name: column[keep] for name, column in found.items()}
        collected.restore(group, kept)
        if keep.any():
            first.append(int(kept["start"].min()))
            last.append(int((kept["start"] + kept["duration"]).max()))
    collected.first_ns, collected.last_ns = min(first, default=None), max(last, default=0)
    collected.loss.dropped_events += dropped
    collected.loss.notes.append(f"{dropped} events more than half a week from all others were dropped: their times are "
                                "wrong.")
