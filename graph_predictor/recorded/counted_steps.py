"""The steps of a recording that count: all commands use the same steps, so that they state the same time.

::

    recorded    | 20 | 21 | 20 | 46 | 19 |      46 is an outlier: a pause, a checkpoint, a queue that was filling
    counts        x    x    x         x"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tracer.arrays import Bool, Int64
from tracer.graph import NONE, ExecutionGraph, KernelKind, LaunchKind, StepSource
from tracer.step_work import captured_of_steps, lost_launches

BEHIND = 0.02
"""A device falls behind its host if its time for the steps is longer by more than this share. Queues that fill and
drain in any recording cause smaller differences."""
LEAST_STEPS = 3
"""Least number of steps in which an outlier can be recognised."""
LIKE_THE_MEDIAN = 0.1
"""Steps within this share of the median step's length are typical; others are outliers (the first step, a stutter)."""


@dataclass(frozen=True)
class StepLengths:
    """The recorded steps of one rank, [steps].

    A step ends on the host when its last call returns. Without a blocking call the device may then still have work of
    many earlier steps. The host's steps are short, and the device's last kernels show how long a step takes::

        host      |step 0|step 1|step 2|step 3|               0.3 ms from end to end
        stream      ### step 0 ###|### step 1 ###|### …        1.0 ms from last kernel to last kernel

    Attributes:
        host_ns: from the begin to the end of the step on its thread.
        device_ns: from the last kernel of the step before on the same stream to the step's own last kernel, on the
            stream where that is longest; 0 without device work.
        last: the kernel it ends with, a row of ``graph.kernels``; -1 for none.
        since: the last kernel of the step before, or else the step's first kernel.
        from_start: whether ``device_ns`` counts from the start of ``since``: no step before used the stream.
        behind: whether the device falls behind the host, so that ``device_ns`` is the steps' length.
    """

    host_ns: Int64
    device_ns: Int64
    last: Int64
    since: Int64
    from_start: Bool
    behind: bool

    @cached_property
    def on_device(self) -> Bool:
        """Return which steps end with a kernel. A first step has no earlier kernel to count from, so its length is the
        host's, unless the device's own work took longer."""
        longer = ~self.from_start | (self.device_ns > self.host_ns)
        return (self.last >= 0) & longer if self.behind else np.zeros(len(self.host_ns), np.bool_)

    @property
    def length_ns(self) -> Int64:
        """Return the length of each step."""
        return np.where(self.on_device, self.device_ns, self.host_ns)


def typical(lengths: Int64) -> Bool:
    """Return which steps are about as long as the (lower) median one, [steps]. Of fewer than ``LEAST_STEPS`` steps all
    are typical."""
    if len(lengths) < LEAST_STEPS:
        return np.ones(len(lengths), np.bool_)
    median = np.sort(lengths)[(len(lengths) - 1) // 2]
    return np.abs(lengths - median) <= LIKE_THE_MEDIAN * median


def step_lengths(graph: ExecutionGraph) -> StepLengths:
    """Return the lengths of a rank's recorded steps.

    Only computing kernels count, because collectives and copies wait for others.
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
    # Keep for each step the stream that takes longest: the last of the step's group in this order.
    order = np.lexsort((ns, own))
    ends = np.append(own[order][1:] != own[order][:-1], True)
    chosen = order[ends]
    at = own[chosen]
    found.device_ns[at], found.last[at], found.since[at] = ns[chosen], rows[last[chosen]], rows[since[chosen]]
    found.from_start[at] = ~follows[chosen]
    return StepLengths(host, found.device_ns, found.last, found.since, found.from_start,
                     _falls_behind(graph, found, end))


def _falls_behind(graph: ExecutionGraph, lengths: StepLengths, end: Int64) -> bool:
    """Return whether the device takes longer than the host for the typical steps, and lags more from step to step."""
    worked = np.flatnonzero((lengths.last >= 0) & typical(lengths.host_ns))
    if lengths.device_ns[worked].sum() <= (1.0 + BEHIND) * lengths.host_ns[worked].sum():
        return False
    lag = end[lengths.last[worked]] - (graph.steps.start_ns + graph.steps.duration_ns)[worked]
    return bool(lag[-1] > 0 and (len(lag) == 1 or lag[-1] > lag[0]))


MOST_STEPS = 6
"""Most recorded steps that a prediction uses by default."""
MOST_REPEATED = 300_000
"""Most operations, launches and kernels of all ranks in these steps; large steps are therefore fewer. Their copies take
some 2 kB of memory each. The largest public recording tried has 36,000 a step."""
LIKE_WORK = 0.01
"""Steps whose launches and kernels differ in number by no more than this share do the same work."""


@dataclass(frozen=True, slots=True)
class RecordedRankSteps:
    """One rank's part of ``CountedSteps``: the attributes of that class for this rank alone."""

    lengths: StepLengths
    lost: Int64
    captured: Int64
    unended: Bool

    @classmethod
    def of(cls, graph: ExecutionGraph) -> RecordedRankSteps:
        """Return the steps of a rank."""
        return cls(step_lengths(graph), lost_launches(graph), captured_of_steps(graph), _unended(graph))


@dataclass(frozen=True)
class CountedSteps:
    """The recorded steps of a job, and which of them count. All commands use the same steps.

    Attributes:
        ranks: the lengths of each rank's steps.
        counts: which of each rank's steps count, [steps].
        lost: number of launches in each rank's steps that have no recorded device work, although other steps have it.
        captured: number of launches in each rank's steps that ran nothing, because a CUDA graph captured them.
        unended: which of each rank's steps have no recorded end, [steps].
    """

    ranks: list[StepLengths]
    counts: list[Bool]
    lost: list[Int64]
    captured: list[Int64]
    unended: list[Bool]

    @classmethod
    def of(cls, graphs: Sequence[ExecutionGraph]) -> CountedSteps:
        """Return the steps of a job's graphs, see ``together``."""
        return cls.together([RecordedRankSteps.of(graph) for graph in graphs])

    @classmethod
    def together(cls, ranks: Sequence[RecordedRankSteps]) -> CountedSteps:
        """Return the steps of a job. Steps that lost device work, have no recorded end or are not typical do not count.

        Ranks with different numbers of steps are compared by their last steps. If no step is left, all typical steps
        count except those whose work a CUDA graph captured.
        """
        most = max((len(one.unended) for one in ranks), default=0)
        longest, whole, ran = np.zeros(most, np.int64), np.ones(most, np.bool_), np.ones(most, np.bool_)
        for one in ranks:
            at = slice(most - len(one.unended), None)
            longest[at] = np.maximum(longest[at], one.lengths.length_ns)
            ran[at] &= one.captured == 0
            whole[at] &= (one.lost == 0) & ~one.unended
        found = whole & ran if (whole & ran).any() else _or_all(ran)
        found[found] = typical(longest[found])
        return cls([one.lengths for one in ranks], [_or_all(found[most - len(one.unended):]) for one in ranks],
                   [one.lost for one in ranks], [one.captured for one in ranks], [one.unended for one in ranks])

    @property
    def common(self) -> list[int]:
        """Return the steps that count and exist on every rank, numbered from 0 within each rank."""
        fewest = min((len(own) for own in self.counts), default=0)
        return np.flatnonzero(_or_all(self.counts[0][len(self.counts[0]) - fewest:])).tolist() if fewest else []

    def mean_ns(self, rank: int) -> float:
        """Return the mean length of a rank's steps that count, ns; the rank must have steps."""
        return float(self.ranks[rank].length_ns[self.counts[rank]].mean())

    def longest_ns(self, first: int = 0) -> Int64:
        """Return the lengths on the slowest rank of the common steps from ``first`` on, ns, [steps]."""
        fewest = min(len(own) for own in self.counts)
        longest: Int64 = np.max([one.length_ns[len(one.host_ns) - fewest:] for one in self.ranks], axis=0)
        return longest[first:]

    def undamaged(self) -> Bool:
        """Return which common steps lost no device work on any rank and captured no CUDA graph, [steps]."""
        fewest = min(len(own) for own in self.counts)
        return np.all([(missing[len(missing) - fewest:] == 0) & (recorded[len(recorded) - fewest:] == 0)
                       for missing, recorded in zip(self.lost, self.captured, strict=True)], axis=0)

    def why_not(self, rank: int, step: int) -> str:
        """Return why a step does not count; empty if it counts."""
        if self.counts[rank][step]:
            return ""
        if launches := int(self.captured[rank][step]):
            return f"{launches:,} of its launches only recorded a CUDA graph"
        if missing := int(self.lost[rank][step]):
            return f"{missing:,} of its launches lost their device work"
        if self.unended[rank][step]:
            return "no region begins after it"
        counted = np.sort(self.ranks[rank].length_ns[self.counts[rank]])
        ratio = self.ranks[rank].length_ns[step] / max(int(counted[(len(counted) - 1) // 2]), 1)
        if abs(ratio - 1.0) <= LIKE_THE_MEDIAN:
            return "as long as others here, not on another rank"
        return f"{ratio:.2g} times as long as the median one"


def _unended(graph: ExecutionGraph) -> Bool:
    """Return which steps have no recorded end: a region's last step, which lacks the host time between two regions."""
    found = np.zeros(len(graph.steps), np.bool_)
    found[-1:] = graph.meta.step_source == StepSource.REGION
    return found


def _or_all(chosen: Bool) -> Bool:
    return chosen.copy() if chosen.any() else np.ones(len(chosen), np.bool_)


def similar_steps(graphs: Sequence[ExecutionGraph], counted: CountedSteps | None = None) -> range | None:
    """Return the longest run of consecutive steps that count, to be repeated: at most ``MOST_STEPS`` steps and, if they
    are several, at most ``MOST_REPEATED`` events.

    All steps of a run launch the same work (±1%), or alternate regularly; then whole rounds are repeated. Of several
    such runs, the mean of the returned one is nearest to that of all typical steps, the time that every report states.
    """
    fewest = min((len(graph.steps) for graph in graphs), default=0)
    if fewest < 1:
        return None
    counted = counted or CountedSteps.of(graphs)
    longest, ordinary = counted.longest_ns(), np.zeros(fewest, np.bool_)
    ordinary[counted.common] = True
    mean = float(longest[ordinary].mean())
    work = _work(graphs)
    events = sum(len(graph.ops) + len(graph.launches) + len(graph.kernels) for graph in graphs)
    most = min(max(MOST_REPEATED * fewest // max(events, 1), 1), MOST_STEPS)
    runs = [run for turns in range(1, most + 1) for run in _runs(ordinary, work, turns, most)]
    length = max(map(len, runs))
    starts = np.unique([run.start for run in runs if len(run) == length])
    means = np.lib.stride_tricks.sliding_window_view(longest, length)[starts].mean(axis=1)
    start = int(starts[np.abs(means - mean) == np.abs(means - mean).min()][-1])
    return range(start, start + length)


def compared_steps(counted: CountedSteps, similar: range) -> list[int]:
    """Return the steps whose host times give the host's variation, at most ``MOST_STEPS``: the repeated steps and later
    ones, outliers included, damaged steps excluded.

    Earlier steps belong to the start of a recording, when queues fill and caches grow.
    """
    whole = counted.undamaged()
    return [step for step in range(similar.start, min(similar.start + MOST_STEPS, len(whole))) if whole[step]]


def alike_steps(graphs: Sequence[ExecutionGraph], similar: range) -> range:
    """Return the repeated steps and those around them that launch the same work (±1%), typical or not, at most
    ``MOST_STEPS``. The speed of the host can be compared between them."""
    same = _same_as_before(_work(graphs), 1)
    start, stop = similar.start, similar.stop
    while start and same[start] and stop - start < MOST_STEPS:
        start -= 1
    while stop < len(same) and same[stop] and stop - start < MOST_STEPS:
        stop += 1
    return range(start, stop)


def _runs(ordinary: Bool, work: Int64, turns: int, most: int) -> list[range]:
    """Return all runs of at most ``most`` typical steps, in whole rounds of ``turns`` steps, where each step launches
    the same work as the step ``turns`` before it.

    A run of one round counts only if the round before or after it, typical or not, launches the same work.
    """
    steps = len(ordinary)
    typical, same, found = _streak_ends(ordinary), _streak_ends(_same_as_before(work, turns)), []
    for start in range(steps - turns + 1):
        last = min(start + most, typical[start], max(same[start + turns], start + turns))
        for stop in range(start + turns, last + 1, turns):
            alone = turns > 1 and stop - start == turns
            if not alone or same[start] >= stop or same[stop] >= stop + turns:
                found.append(range(start, stop))
    return found


def _streak_ends(chosen: Bool) -> list[int]:
    """Return for each place, and the end, the first place from there on that is not chosen."""
    places = np.arange(len(chosen) + 1)
    ends = np.where(np.r_[chosen, False], len(chosen), places)
    return np.minimum.accumulate(ends[::-1])[::-1].tolist()  # type: ignore[no-any-return]


def _same_as_before(work: Int64, steps: int) -> Bool:
    """Return which steps launch the same work as the step ``steps`` before them; ``work`` has a row for each step."""
    same = np.zeros(len(work), np.bool_)
    later, earlier = work[steps:], work[:-steps]
    same[steps:] = (np.abs(later - earlier) <= LIKE_WORK * np.maximum(later, earlier)).all(axis=1)
    return same


def _work(graphs: Sequence[ExecutionGraph]) -> Int64:
    """Count the work of each of the last steps that every rank has, [steps, ranks × kinds]."""
    fewest = min(len(graph.steps) for graph in graphs)
    return np.concatenate([_launched(graph, fewest) for graph in graphs], axis=1)


def _launched(graph: ExecutionGraph, steps: int) -> Int64:
    """Return the work of a rank's last steps, [steps, kinds]: numbers of kernels, and of calls that start or wait for
    them. If the host computes, operations are counted instead of calls.

    Calls that only ask whether work is done do not count: their number varies.
    """
    calls = graph.launches.step[graph.launches.kind != LaunchKind.OTHER]
    columns = (graph.kernels.step, graph.ops.step if graph.computes_on_host else calls)
    own = len(graph.steps)
    return np.stack([np.bincount(column[column >= 0], minlength=own)[own - steps:] for column in columns], axis=1)
