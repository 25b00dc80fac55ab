"""Which recorded steps stand for the step: all commands mean the same ones, so that they state the same time.

::

    recorded    | 20 | 21 | 20 | 46 | 19 |      46 is an outlier: a pause, a checkpoint, a queue that was filling
    typical       x    x    x         x
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tracer.arrays import Int64
from tracer.graph import ExecutionGraph

Bools = npt.NDArray[np.bool_]
MOST_STEPS = 4
"""Recorded steps a prediction rests on by default."""
LEAST_STEPS = 3
LIKE_THE_MEDIAN = 0.1
"""Steps as long as the median one, within this share, are the typical ones; others (the first, a stutter) are left
out."""


def typical(lengths: Int64) -> Bools:
    """Return which steps are about as long as the (lower) median one, [steps].

    Of two steps nobody can say which one is the outlier.
    """
    if len(lengths) < LEAST_STEPS:
        return np.ones(len(lengths), np.bool_)
    median = np.sort(lengths)[(len(lengths) - 1) // 2]
    return np.abs(lengths - median) <= LIKE_THE_MEDIAN * median


def typical_of_ranks(lengths: Sequence[Int64]) -> list[Bools]:
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


def _or_all(chosen: Bools) -> Bools:
    return chosen if chosen.any() else np.ones(len(chosen), np.bool_)


def similar_steps(graphs: Sequence[ExecutionGraph]) -> range | None:
    """Of the steps alike the (last) longest run of typical ones, without an outlier between them."""
    alike = alike_steps(graphs)
    if alike is None:
        return None
    fewest = alike.stop
    lengths = [graph.steps.duration_ns[len(graph.steps) - fewest:] for graph in graphs]
    ordinary = typical(np.max([own[alike.start:] for own in lengths], axis=0))
    # Borders of the runs; each is from one border to the next.
    change = np.flatnonzero(np.diff(ordinary.astype(np.int8), prepend=0, append=0))
    runs = change.reshape(-1, 2)
    low, high = runs[len(runs) - 1 - int(np.argmax((runs[:, 1] - runs[:, 0])[::-1]))].tolist()
    return range(alike.start + low, alike.start + high)


def typical_steps(graphs: Sequence[ExecutionGraph]) -> list[int]:
    """All typical steps that every rank has, numbered from 0 within each rank."""
    fewest = min((len(graph.steps) for graph in graphs), default=0)
    of_ranks = typical_of_ranks([graph.steps.duration_ns for graph in graphs])
    return np.flatnonzero(_or_all(of_ranks[0][len(of_ranks[0]) - fewest:])).tolist() if fewest else []


def alike_steps(graphs: Sequence[ExecutionGraph]) -> range | None:
    """The last steps, at most ``MOST_STEPS``, in which every rank launched the same number of kernels and calls
    (±1%)."""
    fewest = min((len(graph.steps) for graph in graphs), default=0)
    if fewest < 1:
        return None
    alike = 1
    for back in range(2, min(fewest, MOST_STEPS) + 1):
        if not all(_alike(graph, len(graph.steps) - back, len(graph.steps) - 1) for graph in graphs):
            break
        alike = back
    return range(fewest - alike, fewest)


def _alike(graph: ExecutionGraph, one: int, other: int) -> bool:
    for column in (graph.kernels.step, graph.ops.step, graph.launches.step):
        a, b = int((column == one).sum()), int((column == other).sum())
        if abs(a - b) > 0.01 * max(a, b):
            return False
    return True


def left_out(typical_steps: int, steps: int) -> str:
    """Say how many steps are left out."""
    return (f"{steps - typical_steps:,} of {steps:,} steps differ from the median one by more than "
            f"{LIKE_THE_MEDIAN:.0%} and are left out")
