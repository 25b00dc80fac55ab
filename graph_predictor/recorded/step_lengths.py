"""The length of each recorded step: the host's, or the device's where the device falls behind the host.

A step ends on the host when its last call returns. Without a blocking call the device may still have work of many steps
before it: then the host's steps are short, and the device's last kernels say how fast the job really goes::

    host      |step 0|step 1|step 2|step 3|               0.3 ms from end to end
    stream      ### step 0 ###|### step 1 ###|### …        1.0 ms from last kernel to last kernel

"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracer.arrays import Bool, Int64
from tracer.graph import NONE, ExecutionGraph, KernelKind

BEHIND = 0.02
"""A device that takes longer for the steps than the host by more than this share falls behind it: less is what queues
that fill and drain make of any recording."""
LEAST_STEPS = 3
LIKE_THE_MEDIAN = 0.1
"""Steps as long as the median one, within this share, are typical. Others are outliers: the first one, a stutter."""


@dataclass(frozen=True, slots=True)
class StepLengths:
    """The recorded steps of one rank, [steps].

    Attributes:
        host_ns: from the begin to the end of the step on its thread.
        device_ns: from the last kernel of the step before on the same stream to the step's own; of the stream on which
            that is longest, 0 without device work.
        last: the kernel it ends with, a row of ``graph.kernels``; -1 for none.
        since: the last kernel of the step before, or the step's first one.
        from_start: whether it counts from the start of ``since``, as no step before used the stream.
        behind: whether the device falls behind the host, so that ``device_ns`` are the steps' lengths.
    """

    host_ns: Int64
    device_ns: Int64
    last: Int64
    since: Int64
    from_start: Bool
    behind: bool

    @property
    def on_device(self) -> Bool:
        """Return which steps the device's kernels end. A first step has no kernel before it to be counted from: the
        host says how long it took, unless the device's own work of it took longer."""
        longer = ~self.from_start | (self.device_ns > self.host_ns)
        return (self.last >= 0) & longer if self.behind else np.zeros(len(self.host_ns), np.bool_)

    @property
    def length_ns(self) -> Int64:
        """Return the length of each step."""
        return np.where(self.on_device, self.device_ns, self.host_ns)


def typical(lengths: Int64) -> Bool:
    """Return which steps are about as long as the (lower) median one, [steps]. Of two steps either may be the outlier,
    so that both are typical."""
    if len(lengths) < LEAST_STEPS:
        return np.ones(len(lengths), np.bool_)
    median = np.sort(lengths)[(len(lengths) - 1) // 2]
    return np.abs(lengths - median) <= LIKE_THE_MEDIAN * median


def step_lengths(graph: ExecutionGraph) -> StepLengths:
    """Measure a rank's recorded steps.

    Collectives and copies wait for others: a stream falls behind by what it computes.
    """
    kernels, steps = graph.kernels, len(graph.steps)
    host = graph.steps.duration_ns
    found = StepLengths(host, np.zeros(steps, np.int64), np.full(steps, NONE, np.int64),
                        np.full(steps, NONE, np.int64), np.ones(steps, np.bool_), False)
    rows = np.flatnonzero((kernels.step >= 0) & (kernels.kind == KernelKind.COMPUTE))
    if not len(rows):
        return found
    rows = rows[np.lexsort((kernels.start_ns[rows], kernels.step[rows], kernels.stream[rows], kernels.device[rows]))]
    place = np.stack([kernels.device[rows], kernels.stream[rows]]).astype(np.int64)
    step = kernels.step[rows].astype(np.int64)
    opens = np.ones(len(rows), np.bool_)
    opens[1:] = (place[:, 1:] != place[:, :-1]).any(axis=0) | (step[1:] != step[:-1])
    first = np.flatnonzero(opens)
    last = np.append(first[1:], len(rows)) - 1
    own = step[first]
    follows = np.zeros(len(first), np.bool_)
    follows[1:] = (place[:, first[1:]] == place[:, first[:-1]]).all(axis=0) & (own[1:] == own[:-1] + 1)
    since = np.where(follows, last[np.arange(len(first)) - 1], first)
    end = kernels.start_ns + kernels.duration_ns
    begin = np.where(follows, end[rows[since]], kernels.start_ns[rows[since]])
    ns = end[rows[last]] - begin
    # Of each step the stream that takes longest: the last one of its group in this order.
    order = np.lexsort((ns, own))
    ends = np.append(own[order][1:] != own[order][:-1], True)
    chosen = order[ends]
    at = own[chosen]
    found.device_ns[at], found.last[at], found.since[at] = ns[chosen], rows[last[chosen]], rows[since[chosen]]
    found.from_start[at] = ~follows[chosen]
    return StepLengths(host, found.device_ns, found.last, found.since, found.from_start,
                     _falls_behind(graph, found, end))


def _falls_behind(graph: ExecutionGraph, lengths: StepLengths, end: Int64) -> bool:
    """Return whether the device takes longer than the host for the steps that are typical of the host, and lags more
    from one to the next."""
    worked = np.flatnonzero((lengths.last >= 0) & typical(lengths.host_ns))
    if lengths.device_ns[worked].sum() <= (1.0 + BEHIND) * lengths.host_ns[worked].sum():
        return False
    lag = end[lengths.last[worked]] - (graph.steps.start_ns + graph.steps.duration_ns)[worked]
    return bool(lag[-1] > 0 and (len(lag) == 1 or lag[-1] > lag[0]))
