"""What decides a step's time, in one word: one definition for recorded steps and for predicted ones.

In a steady state everything happens one step time later from step to step. Whatever falls behind fastest decides: the
host where the host decides, a stream of the device where the device does, even while the host still runs ahead and
fills the launch queue, so that the recorded step itself waited for nothing::

    host      |== step 1 ==|== step 2 ==|== step 3 ==|                  5 ms from end to end
    stream    #### of step 1 ####|#### of step 2 ####|#### of step 3 ####    8 ms: the device decides

The word is the largest part of the critical path of that steady state. What a host, a GPU or a network that takes no
time would save is its evidence (``Prediction.savings_us``).
"""

from __future__ import annotations

from collections import defaultdict

from graph_predictor.simulation.critical_path import Bound

HOST = "host"
_MERGED = {Bound.HOST: HOST, Bound.LAUNCH: HOST, Bound.SYNC: HOST}
"""Bounds that count together where one word names what decides: launch calls and return lags are the host's. (A gap
between two queued kernels is a launch too, but never decides.)"""
_WORDS = {bound.label: _MERGED.get(bound, bound.label) for bound in Bound}


def bottleneck(bounds: dict[str, float]) -> str:
    """The largest of the bounds (by their labels) along the path of what decides, the host's parts taken together."""
    merged: dict[str, float] = defaultdict(float)
    for label, word in _WORDS.items():
        merged[word] += bounds.get(label, 0.0)
    return max(merged, key=lambda name: merged[name])
