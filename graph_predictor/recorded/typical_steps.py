"""The typical steps of a recording: all commands take the same ones, so that they state the same time.

::

    recorded    | 20 | 21 | 20 | 46 | 19 |      46 is an outlier: a pause, a checkpoint, a queue that was filling
    typical       x    x    x         x
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tracer.arrays import Bool, Int64
from tracer.graph import ExecutionGraph, LaunchKind

MOST_STEPS = 6
"""Recorded steps a prediction rests on by default."""
LIKE_WORK = 0.01
"""Steps whose launches and kernels differ in number by no more than this share do the same work."""
LEAST_STEPS = 3
LIKE_THE_MEDIAN = 0.1
"""Steps as long as the median one, within this share, are the typical ones; others (the first, a stutter) are left
out."""


def typical(lengths: Int64) -> Bool:
    """Return which steps are about as long as the (lower) median one, [steps].

    Of two steps nobody can say which one is the outlier.
    """
    if len(lengths) < LEAST_STEPS:
        return np.ones(len(lengths), np.bool_)
    median = np.sort(lengths)[(len(lengths) - 1) // 2]
    return np.abs(lengths - median) <= LIKE_THE_MEDIAN * median


def typical_of_ranks(lengths: Sequence[Int64]) -> list[Bool]:
    """Return which steps of each rank are typical: those whose longest rank is about as long as the median.

    Args:
        lengths: of each rank's steps, in order. Where ranks recorded different numbers of them, the last ones are the
            same. Of a rank that has untypical ones only, all stand for the step.
    """
    most = max(map(len, lengths), default=0)
    longest = np.zeros(most, np.int64)
    for own in lengths:
        longest[most - len(own):] = np.maximum(longest[most - len(own):], own)
    found = typical(longest)
    return [_or_all(found[most - len(own):]) for own in lengths]


def _or_all(chosen: Bool) -> Bool:
    return chosen if chosen.any() else np.ones(len(chosen), np.bool_)


def similar_steps(graphs: Sequence[ExecutionGraph]) -> range | None:
    """Return the consecutive typical steps that are repeated, as many as possible and at most ``MOST_STEPS``.

    They launch the same work (±1%), or take turns that they keep to; of turns, whole rounds are repeated. Of several
    such runs it is the one whose mean is nearest to that of all typical steps, the time that every report states.
    """
    fewest = min((len(graph.steps) for graph in graphs), default=0)
    if fewest < 1:
        return None
    longest = lengths_from(graphs, 0)
    ordinary = _or_all(typical_of_ranks([graph.steps.duration_ns for graph in graphs])[0][-fewest:])
    mean = float(longest[ordinary].mean())
    work = _work(graphs)
    runs = [run for turns in range(1, MOST_STEPS + 1) for run in _runs(ordinary, work, turns)]
    return min(runs, key=lambda run: (-len(run), abs(float(longest[run].mean()) - mean), -run.start))


def compared_steps(graphs: Sequence[ExecutionGraph], similar: range) -> range:
    """Return the steps, at most ``MOST_STEPS``, that say what host time differs by: the repeated ones and those after
    them, outliers among them.

    What comes before is how a recording begins: queues that fill, caches that grow.
    """
    return range(similar.start, min(similar.start + MOST_STEPS, *(len(graph.steps) for graph in graphs)))


def alike_steps(graphs: Sequence[ExecutionGraph], similar: range) -> range:
    """Return the repeated steps with those around them that launch the same work (±1%), typical or not, at most
    ``MOST_STEPS``: between them the speed of the host can be compared."""
    same = _same_as_before(_work(graphs), 1)
    start, stop = similar.start, similar.stop
    while start and same[start] and stop - start < MOST_STEPS:
        start -= 1
    while stop < len(same) and same[stop] and stop - start < MOST_STEPS:
        stop += 1
    return range(start, stop)


def lengths_from(graphs: Sequence[ExecutionGraph], first: int) -> Int64:
    """Return how long the steps from a common one on took, of the slowest rank, ns, [steps]."""
    fewest = min(len(graph.steps) for graph in graphs)
    longest: Int64 = np.max([graph.steps.duration_ns[len(graph.steps) - fewest:] for graph in graphs], axis=0)
    return longest[first:]


def _runs(ordinary: Bool, work: Int64, turns: int) -> list[range]:
    """All runs of typical steps each of which launches what the one ``turns`` before it does, in whole rounds.

    That steps take turns is known of two rounds; of one alone, the round before or after it, typical or not, says so.
    """
    steps, same = len(ordinary), _same_as_before(work, turns)
    found = []
    for start in range(steps):
        for stop in range(start + turns, min(start + MOST_STEPS, steps) + 1, turns):
            if not ordinary[start:stop].all() or not same[start + turns:stop].all():
                break
            alone = turns > 1 and stop - start == turns
            before, after = same[start:stop], same[stop:stop + turns]
            if not alone or before.all() or (len(after) == turns and after.all()):
                found.append(range(start, stop))
    return found


def _same_as_before(work: Int64, steps: int) -> Bool:
    """Return which steps launch the same as the one that many steps earlier, [steps]."""
    same = np.zeros(len(work), np.bool_)
    later, earlier = work[steps:], work[:-steps]
    same[steps:] = (np.abs(later - earlier) <= LIKE_WORK * np.maximum(later, earlier)).all(axis=1)
    return same


def _work(graphs: Sequence[ExecutionGraph]) -> Int64:
    """Work of the last steps, as many as every rank has, [steps, ranks × kinds]."""
    fewest = min(len(graph.steps) for graph in graphs)
    return np.concatenate([_launched(graph, fewest) for graph in graphs], axis=1)


def _launched(graph: ExecutionGraph, steps: int) -> Int64:
    """Work of a rank's last steps, [steps, kinds]: device work, and the calls that start it or wait for it; the
    operations where the host computes.

    How often a host asks whether something is done is no work, nor are the operations it asks with.
    """
    calls = graph.launches.step[graph.launches.kind != LaunchKind.OTHER]
    columns = (graph.kernels.step, graph.ops.step if graph.computes_on_host else calls)
    own = len(graph.steps)
    return np.stack([np.bincount(column[column >= 0], minlength=own)[own - steps:] for column in columns], axis=1)


def typical_steps(graphs: Sequence[ExecutionGraph]) -> list[int]:
    """All typical steps that every rank has, numbered from 0 within each rank."""
    fewest = min((len(graph.steps) for graph in graphs), default=0)
    of_ranks = typical_of_ranks([graph.steps.duration_ns for graph in graphs])
    return np.flatnonzero(_or_all(of_ranks[0][len(of_ranks[0]) - fewest:])).tolist() if fewest else []


def mean_typical_ns(graphs: Sequence[ExecutionGraph]) -> float:
    """Return the mean of each rank's typical steps, ns, of the slowest rank; the ranks have steps."""
    lengths = [graph.steps.duration_ns for graph in graphs]
    return max(float(own[kept].mean()) for own, kept in zip(lengths, typical_of_ranks(lengths), strict=True))


def left_out(typical_steps: int, steps: int) -> str:
    """Say how many steps are left out."""
    return (f"{steps - typical_steps:,} of {steps:,} steps differ from the median one by more than "
            f"{LIKE_THE_MEDIAN:.0%} and are left out")
