"""Anchoring: what recorded work takes after a change, by what was measured and what models say of before and after.

::

    time after = recorded time × model(after) / model(before)            the model says how time follows the work

Every way to another size, another device or another program takes its times from here. What a model gets wrong about an
operation in the same way before and after cancels. The interval of a ratio is that of both models' times as far as the
work changes: an e-fold of change, the whole of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kernel_models.device import DeviceSpec
from kernel_models.op_call import OpCall
from kernel_models.pricing import CallBatch, Models, price, sustained
from kernel_models.spreads import RESIZED_ON_CPU
from tracer.arrays import Float64

Calls = Sequence[tuple[OpCall, ...]]
LEAST_RATIO, MOST_RATIO = 1e-3, 1e3
"""Beyond them one recorded time says nothing of another."""


@dataclass(frozen=True, slots=True)
class Prices:
    """Times that models predict for groups of calls, µs, and the logs of the interval's ends over them, [groups]."""

    time_us: Float64
    low: Float64
    high: Float64


@dataclass(frozen=True, slots=True)
class Ratios:
    """Time after a change over the recorded one, and the logs of the 80% interval's ends over it, [groups]."""

    ratio: Float64
    low: Float64
    high: Float64


class CallGroups:
    """Groups of calls, each priced as the sum of its calls, as in a step that keeps the device busy.

    What does not depend on the device is found once, for any number of devices.

    Args:
        calls: the groups.
        single: calls that are priced with them, each by itself, as on a device that is not busy.
    """

    def __init__(self, calls: Calls, single: Sequence[OpCall] = ()) -> None:
        flat = [call for group in calls for call in group]
        self._groups = len(calls)
        self._owner = np.repeat(np.arange(len(calls)), [len(group) for group in calls])
        self._batch = CallBatch([*flat, *single])

    def prices(self, spec: DeviceSpec, models: Models | None) -> tuple[Prices, Float64]:
        """Return the groups' prices on a device, and the times of the single calls, µs."""
        if not len(self._batch.index):
            return Prices(*(np.zeros(self._groups) for _ in range(3))), np.zeros(0)
        priced = price(self._batch, spec, models)
        own = priced.index[:len(self._owner)]
        kept = sustained(priced, spec)
        time, low, high = (np.bincount(self._owner, weights=column[own], minlength=self._groups).astype(np.float64)
                           for column in (kept.time_us, kept.low_us, kept.high_us))
        safe = np.maximum(time, 1e-9)
        return (Prices(time, np.log(np.maximum(low, 1e-9) / safe), np.log(np.maximum(high, 1e-9) / safe)),
                priced.times_us[len(self._owner):])


def prices_of(calls: Calls, spec: DeviceSpec, models: Models | None) -> Prices:
    """Price groups of calls once, see ``CallGroups``."""
    return CallGroups(calls).prices(spec, models)[0]


def anchored(before: Prices, after: Prices, share: float | None = None) -> Ratios:
    """Ratios of recorded work: 0 where none is left, 1 where the models know no time of what was recorded.

    Args:
        before: of the recorded calls, where they were recorded.
        after: of those they become.
        share: of the models' intervals that the ratio keeps; by default as much as the work changes.
    """
    ratio = np.clip(after.time_us / np.maximum(before.time_us, 1e-9), LEAST_RATIO, MOST_RATIO)
    ratio = np.where(before.time_us > 0, np.where(after.time_us > 0, ratio, 0.0), 1.0)
    weight = size_of_change(ratio) if share is None else share
    return Ratios(ratio, -weight * np.hypot(after.low, before.high), weight * np.hypot(after.high, before.low))


def size_of_change(ratio: Float64) -> Float64:
    """Return how much work changes: the size of the log of its ratio, at most 1."""
    return np.minimum(np.abs(np.log(np.maximum(ratio, LEAST_RATIO))), 1.0)


def resized_on_cpu(ns: Float64, ratio: Float64, total_ns: float) -> float:
    """Log half width of the 80% interval of a host's time of which some is anchored computation.

    Args:
        ns: of the computation after the change.
        ratio: of each.
        total_ns: of the host.
    """
    return RESIZED_ON_CPU * float((ns * size_of_change(ratio)).sum()) / max(total_ns, 1.0)


def shrinking(stays_ns: float, total_ns: float, growth: float) -> float:
    """Log half width that smaller sizes add: host time that stays may shrink with them too, and weighs more in a step
    that got shorter (allocating, copying, what a larger batch drives out of caches). The interval holds both.

    Of five programs of benchmarks/foreign_tuning taken from batch 16 to 4 on a quiet core none came out more than 1%
    too short, and two 18 and 35% too long.

    Args:
        stays_ns: host time that stays although nobody knows that it does.
        total_ns: of the step.
        growth: of the sizes.
    """
    return -math.log1p(-stays_ns / total_ns * (1.0 - growth)) if growth < 1.0 and total_ns > 0.0 else 0.0
