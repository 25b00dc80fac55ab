"""Launch constants of one trace: a handful of medians and means that stand in for per-event residuals.

Every constant is estimated from the events where nothing else can have decided the time:

* *launch latency* of a kernel kind: from the end of its launch call to its start, on a stream that had been idle
  before the call began (median; samples above 60 µs are waits, not latency);
* *gap* between two queued kernels of one stream, by the kinds of both and by whether a CUDA graph launched them
  (mean, since gaps add up along a stream; samples above 20 µs are waits).

Units are nanoseconds. A constant with fewer than three samples falls back to the pool of all kinds. Where that is empty
it takes the defaults below, which are typical of the traces the project was developed against (V100 to B200): even one
launch of the recording says more of it than they do.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tracer.arrays import Bool, Int8, Int64
from tracer.graph import KernelKind

LATENCY_CEILING_NS = 60_000
"""Longest latency from the start of the call: a kernel that begins later waited for something else. Set."""
GAP_CEILING_NS = 20_000
"""Longest gap of queued kernels; a longer one is a wait. Set."""
IDLE_MARGIN_NS = 5_000
"""A stream is idle for a launch when its last work ended at least this long before the call began. Set."""
QUEUED_MARGIN_NS = 10_000
"""A kernel was certainly queued when its predecessor ended at least this long after its own launch returned."""
LATENCY_DEFAULT_NS = 2_000
GAP_DEFAULT_NS = 1_200
COPY_IN_CALL_DEFAULT_NS = 15_000
RETURN_DEFAULT_NS = 6_000
STAGED_TAIL_DEFAULT_NS = 100_000
"""Defaults: typical of the traces named above (V100 to B200)."""
FEW = 3
"""Samples that a constant of its own needs. Set: the fewest whose median is not an end."""
KINDS = len(KernelKind)


@dataclass(slots=True)
class LaunchConstants:
    """Constants of one rank's trace, nanoseconds.

    ``latency[kind]`` counts from the call's end, ``latency_in_call[kind]`` from the start of a call that waits for
    its own work; ``gap[before, kind, in_graph]``. ``returns`` maps a call's name to the lag between the end of the
    work it waited for and its return; ``queue_return`` is the same for a full launch queue. ``base_cost`` maps a
    call's name to its unblocked cost.
    """

    latency: Int64
    latency_in_call: Int64
    gap: Int64
    returns: dict[str, int] = field(default_factory=dict)
    base_cost: dict[str, int] = field(default_factory=dict)
    staged_tail: int = STAGED_TAIL_DEFAULT_NS
    """Time from the return of a call that stages a large pageable copy to the copy's end."""
    queue_return: int = RETURN_DEFAULT_NS
    queue_depth: int = 0
    samples: dict[str, int] = field(default_factory=dict)
    """Number of samples behind each constant, by its name."""


@dataclass(frozen=True, slots=True)
class LaunchSamples:
    """Samples of launch latency and gaps: columns of equal length, one row a kernel with a recorded launch.

    ``previous_end`` and ``previous_kind`` describe the kernel before it on its stream (very small end, kind -1 when
    there is none). ``in_call`` marks copies their own call waits for,
    ``staged`` large pageable copies their call feeds. Times in ns.
    """

    kind: Int8
    start: Int64
    call_start: Int64
    call_end: Int64
    previous_end: Int64
    previous_kind: Int8
    in_graph: Bool
    in_call: Bool
    staged: Bool
    end: Int64


def fit_launch_constants(samples: LaunchSamples) -> LaunchConstants:
    """Estimate latencies and gaps (see the module's text for which events count)."""
    s = samples
    counts: dict[str, int] = {}
    soon = s.start - s.call_start < LATENCY_CEILING_NS
    idle = ~s.in_graph & (s.previous_end + IDLE_MARGIN_NS <= s.call_start) & soon
    outside, inside = idle & ~s.in_call & ~s.staged, idle & s.in_call
    latency = _by_kind(s.start - s.call_end, s.kind, outside, LATENCY_DEFAULT_NS, "latency", counts)
    in_call = _by_kind(s.start - s.call_start, s.kind, inside, COPY_IN_CALL_DEFAULT_NS, "latency_in_call", counts)

    gap_value = s.start - s.previous_end
    queued = (s.previous_kind >= 0) & (gap_value < GAP_CEILING_NS) & (
        s.in_graph | (s.previous_end > s.call_end + QUEUED_MARGIN_NS))
    pooled = round(float(gap_value[queued].mean())) if queued.any() else GAP_DEFAULT_NS
    gap = np.full((KINDS, KINDS, 2), pooled, np.int64)
    for before in range(KINDS):
        for kind in range(KINDS):
            for in_graph in range(2):
                rows = queued & (s.previous_kind == before) & (s.kind == kind) & (s.in_graph == bool(in_graph))
                n = int(rows.sum())
                if n >= FEW:
                    gap[before, kind, in_graph] = round(float(gap_value[rows].mean()))
                    counts[f"gap/{KernelKind(before).name}/{KernelKind(kind).name}/{'graph' if in_graph else ''}"] = n
    tail = STAGED_TAIL_DEFAULT_NS
    if s.staged.any():
        tail = int(np.median((s.end - s.call_end)[s.staged]))
        counts["staged_tail"] = int(s.staged.sum())
    return LaunchConstants(latency=latency, latency_in_call=in_call, gap=gap, staged_tail=tail, samples=counts)


def _by_kind(
    value: Int64, kind: Int8, rows: Bool, default: int, name: str,
    counts: dict[str, int],
) -> Int64:
    """Median per kernel kind, falling back to the pool of all kinds and then to ``default``."""
    pooled = int(np.median(value[rows])) if rows.any() else default
    result = np.full(KINDS, pooled, np.int64)
    for code in range(KINDS):
        chosen = rows & (kind == code)
        n = int(chosen.sum())
        if n >= FEW:
            result[code] = int(np.median(value[chosen]))
            counts[f"{name}/{KernelKind(code).name}"] = n
    return result
