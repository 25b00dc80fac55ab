"""The bound of a step, in one word: one definition for recorded steps and for predicted ones.

In a steady state everything happens one step time later from step to step. Whatever falls behind fastest decides: the
host where the host decides, a stream of the device where the device does, even while the host still runs ahead and
fills the launch queue, so that the recorded step itself waited for nothing::

    host      |== step 1 ==|== step 2 ==|== step 3 ==|                  5 ms from end to end
    stream    #### of step 1 ####|#### of step 2 ####|#### of step 3 ####    8 ms: the device decides
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from graph_predictor.prediction.replay import WINDOW, Replay, ReplayedStep
from graph_predictor.simulation.critical_path import Bound, Causes, PathStart, sums_back
from tracer.arrays import Int64
from tracer.graph import ExecutionGraph, KernelKind

HOST = "host"
_MERGED = {Bound.HOST: HOST, Bound.LAUNCH: HOST, Bound.SYNC: HOST}
"""Bounds that count together where one word names what decides: launch calls and return lags are the host's. (A gap
between two queued kernels is a launch too, but never decides.)"""
_WORDS = {bound.label: _MERGED.get(bound, bound.label) for bound in Bound}


def deciding(bounds: dict[str, float]) -> str:
    """The largest of the bounds (by their labels) along the path of what decides, the host's parts taken together."""
    merged: dict[str, float] = defaultdict(float)
    for label, word in _WORDS.items():
        merged[word] += bounds.get(label, 0.0)
    return max(merged, key=lambda name: merged[name])


class StreamEnds:
    """The first and last kernels of one rank's streams in each recorded step.

    Args:
        graph: the rank's.
        first_kernel: its first kernel's row in the program.
    """

    def __init__(self, graph: ExecutionGraph, first_kernel: int) -> None:
        kernels = graph.kernels
        # Collectives and copies wait for others; a stream falls behind by what it computes.
        rows = np.flatnonzero((kernels.step >= 0) & (kernels.kind == KernelKind.COMPUTE))
        rows = rows[np.lexsort((kernels.start_ns[rows], kernels.step[rows], kernels.stream[rows],
                                kernels.device[rows]))]
        place = np.stack([kernels.device[rows], kernels.stream[rows], kernels.step[rows]]).astype(np.int64)
        opens = np.ones(len(rows), np.bool_)
        opens[1:] = (place[:, 1:] != place[:, :-1]).any(axis=0)
        first = np.flatnonzero(opens)
        last = np.append(first[1:], len(rows)) - 1 if len(rows) else first
        self.of_step: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        before: dict[tuple[int, int], tuple[int, int]] = {}
        for low, high in zip(first.tolist(), last.tolist(), strict=True):
            device, stream, step = place[:, low].tolist()
            earlier, tail = before.get((device, stream), (-2, -1))
            self.of_step[step].append((first_kernel + int(rows[low]), first_kernel + int(rows[high]),
                                       tail if earlier == step - 1 else -1))
            before[device, stream] = (step, first_kernel + int(rows[high]))


def decides(replay: Replay, steps: Sequence[ReplayedStep], ends: StreamEnds, bounds: Sequence[Mapping[Bound, int]],
            causes: Causes) -> list[str]:
    """Return what decides replayed steps of one rank.

    Args:
        replay: the replay.
        steps: some of its steps.
        ends: of their rank.
        bounds: each step's own path by bound, ns.
        causes: of the replayed program.
    """
    simulated: Int64 = replay.simulated.kernel_end
    sums = np.array([[each[bound] for bound in Bound] for each in bounds], np.int64).reshape(len(bounds), len(Bound))
    behind: list[int] = []
    starts: list[PathStart] = []
    for number, step in enumerate(steps):
        longest, at, stop = step.replayed_ns, -1, 0
        row = int(replay.program.item_row[step.begin_item]) if step.name != WINDOW else -1
        for first, last, previous in ends.of_step.get(row, []):
            since = int(simulated[previous] if previous >= 0 else replay.simulated.kernel_start[first])
            if int(simulated[last]) - since > longest:
                longest, at, stop = int(simulated[last]) - since, last, since
        if at >= 0:
            behind.append(number)
            starts.append(PathStart(("kernel", at), int(simulated[at]), stop))
    sums[behind] = sums_back(causes, starts)
    names = list(dict.fromkeys(_MERGED.get(bound, bound.label) for bound in Bound))
    merged = np.zeros((len(names), len(steps)), np.int64)
    for bound in Bound:
        merged[names.index(_MERGED.get(bound, bound.label))] += sums[:, bound]
    return [names[at] for at in merged.argmax(axis=0).tolist()]
