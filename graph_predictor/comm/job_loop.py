# mypy: disable-error-code="no-untyped-def"
"""The inner loop of ``comm_job.simulate_groups``, compiled with numba. Plain arrays in, plain arrays filled."""

from __future__ import annotations

import numpy as np

from kernel_models.compiled import compiled


@compiled()
def run_groups(lane_ptr, entry_collective, entry_work, duration, start, end, last, lane_end, lane_waited):
    """Returns how many collectives never started."""
    lanes, collectives = lane_ptr.shape[0] - 1, duration.shape[0]
    missing = np.zeros(collectives, np.int64)
    for e in range(entry_collective.shape[0]):
        missing[entry_collective[e]] += 1
    # Lanes that wait for a collective are a chain.
    waiting = np.full(collectives, -1, np.int64)
    next_lane = np.full(lanes, -1, np.int64)
    arrival = np.zeros(lanes, np.int64)
    position = lane_ptr[:-1].copy()
    todo = np.empty(lanes, np.int64)
    count = 0
    for lane in range(lanes):
        todo[count] = lane
        count += 1
    left = 0
    for c in range(collectives):
        if missing[c] > 0:
            left += 1
    while count > 0:
        count -= 1
        lane = todo[count]
        e = position[lane]
        if e == lane_ptr[lane + 1]:
            continue
        c = entry_collective[e]
        arrival[lane] = lane_end[lane] + entry_work[e]
        if last[c] < 0 or arrival[lane] > start[c]:
            start[c] = arrival[lane]
            last[c] = lane
        next_lane[lane] = waiting[c]
        waiting[c] = lane
        missing[c] -= 1
        if missing[c] == 0:
            end[c] = start[c] + duration[c]
            left -= 1
            member = waiting[c]
            while member >= 0:
                lane_waited[member] += start[c] - arrival[member]
                lane_end[member] = end[c]
                position[member] += 1
                todo[count] = member
                count += 1
                member = next_lane[member]
    return left
