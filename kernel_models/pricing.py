"""Pricing: every call gets a time, an interval and a source. Nothing is free, and nothing unknown is an error.

Calls are grouped by family and each distinct one is priced once. The best model that covers a call prices it: learned,
then heuristic with efficiencies fitted to the device, then another form of the same work that is covered
(``anchoring``), then the data sheet.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import Protocol

import numpy as np

from kernel_models.anchoring import anchored
from kernel_models.device import DeviceSpec
from kernel_models.heuristics.call_table import FamilyCalls
from kernel_models.model import KernelModel, Source, covered_times
from kernel_models.op_call import Family, OpCall
from tracer.arrays import Bool, Float64, Int8, Int64

LEAST_US = 0.5
"""No kernel takes less: the shortest that CUPTI and roctracer report are 0.7 to 1 µs. Keeps broken models from pricing
work at nothing."""
WIDEST = 1e3
"""Ends of an interval are at most this factor from the time."""


class Models(Protocol):
    """The part of a device's profile that pricing needs."""

    @property
    def device(self) -> DeviceSpec:
        """The device its models were fitted to."""
        ...

    def models_of(self, family: Family) -> Sequence[KernelModel]:
        """The models of a family, in any order."""
        ...


@dataclass(frozen=True, slots=True)
class PricedCalls:
    """Times of n calls, in their order.

    Attributes:
        calls: the m distinct calls, in order of first appearance.
        index: of each call into the distinct ones [n].
        time_us, low_us, high_us: expected time and 80% interval of each distinct call, µs [m].
        source: a ``Source`` of each distinct call [m].
        anchored: which of them the profile covers only in another form (a ``Source.HEURISTIC``), [m].
        common: share of an interval's width that the calls of a family have in common [m] (see ``model.Times``).
    """

    calls: list[OpCall]
    index: Int64
    time_us: Float64
    low_us: Float64
    high_us: Float64
    source: Int8
    anchored: Bool = field(default_factory=lambda: np.zeros(0, np.bool_))
    common: Float64 = field(default_factory=lambda: np.ones(0))

    def __len__(self) -> int:
        return len(self.index)

    @property
    def times_us(self) -> Float64:
        """Time of every call, repeated ones too, µs [n]."""
        return self.time_us[self.index]

    @property
    def total_us(self) -> float:
        """Sum over all calls, µs."""
        return float(self.times_us.sum())

    def total_interval_us(self) -> tuple[float, float]:
        """80% interval of the sum, µs: errors of one family share their cause, those of different families do not.

        Within a family the distances to the interval's ends add up as far as they are common; the rest of each call's,
        and the families', add up in quadrature.
        """
        counts = np.bincount(self.index, minlength=len(self.calls))
        total = self.total_us
        low, high = (self._distance(counts * np.abs(end - self.time_us)) for end in (self.low_us, self.high_us))
        return max(total - low, 0.0), total + high

    def _distance(self, distance_us: Float64) -> float:
        """From the sum to an end of its interval, µs, from those of the distinct calls."""
        common = self.common if len(self.common) else np.ones(len(self.calls))
        together: dict[Family, float] = {}
        for call, distance in zip(self.calls, (common * distance_us).tolist(), strict=True):
            together[call.family] = together.get(call.family, 0.0) + distance
        own = (1.0 - common**2) * distance_us**2
        return float(np.sqrt(np.sum(np.square(list(together.values()))) + own.sum()))

    def share_by_source(self) -> dict[str, float]:
        """Share of the total time from each source, best first; sources without any are left out."""
        times, sources = self.times_us, self.source[self.index]
        total = times.sum()
        shares = {source.label: float(times[sources == source].sum() / total) if total else 0.0 for source in Source}
        return {label: share for label, share in shares.items() if share > 0}


class CallBatch:
    """Calls that are priced on one device after another: what does not depend on the device is found once.

    Args:
        calls: any, repeated ones too.

    Attributes:
        distinct: those that differ, in order of first appearance.
        index: the place of each call among them.
    """

    def __init__(self, calls: Iterable[OpCall]) -> None:
        self.distinct, self.index = _distinct(calls)

    @cached_property
    def families(self) -> Mapping[Family, tuple[Int64, FamilyCalls]]:
        """Places of the distinct calls of each family, and these calls."""
        return {family: (rows, FamilyCalls(self.distinct[i] for i in rows.tolist()))
                for family, rows in _by_family(self.distinct).items()}


def price(calls: Iterable[OpCall] | CallBatch, device: DeviceSpec, profile: Models | None = None) -> PricedCalls:
    """Price calls on a device.

    Args:
        calls: Any, repeated ones too.
        device: Where they would run.
        profile: Fitted models of that device; without it, or for what its models do not cover, the data sheet's
            figures with default efficiencies.
    """
    from kernel_models.heuristics import heuristic_models  # recorded work keeps its times, and needs none of it

    batch = calls if isinstance(calls, CallBatch) else CallBatch(calls)
    distinct, index = batch.distinct, batch.index
    m = len(distinct)
    time: Float64 = np.full(m, np.nan)
    low: Float64 = np.full(m, np.nan)
    high: Float64 = np.full(m, np.nan)
    source = np.full(m, Source.DATASHEET, np.int8)
    by_variant = np.zeros(m, np.bool_)
    common: Float64 = np.ones(m)
    fallback = heuristic_models(device)
    for family, (rows, every) in batch.families.items():
        fitted = sorted(profile.models_of(family), key=lambda model: model.source) if profile is not None else []
        models: list[KernelModel] = [*fitted, fallback[family]]
        left = rows
        for model in models:
            if model is fallback[family] and fitted and len(left):
                near, times = anchored([distinct[i] for i in left], fitted, model)
                sound = np.isfinite(times.time_us) & (times.time_us > 0)
                taken = left[near][sound]
                time[taken], low[taken], high[taken] = times.time_us[sound], times.low_us[sound], times.high_us[sound]
                source[taken], by_variant[taken] = Source.HEURISTIC, True
                left = np.concatenate([left[~near], left[near][~sound]])
                if not len(left):
                    break
            mine = every if left is rows else [distinct[i] for i in left.tolist()]
            if model.source != Source.DATASHEET:
                covered, times = covered_times(model, mine)
            else:
                covered, times = np.ones(len(mine), np.bool_), model.predict(mine)
            if covered.any():
                sound = np.isfinite(times.time_us) & (times.time_us > 0)
                taken = left[covered][sound]
                time[taken], low[taken], high[taken] = (
                    times.time_us[sound], times.low_us[sound], times.high_us[sound])
                source[taken] = model.source
                if times.common is not None:
                    common[taken] = np.clip(times.common[sound], 0.0, 1.0)
                left = np.concatenate([left[~covered], left[covered][~sound]])
            if not len(left):
                break
    time = np.where(np.isfinite(time), time, device.kernel_floor_us)
    time = np.maximum(time, LEAST_US)
    low = np.clip(np.nan_to_num(low, nan=0.0), time / WIDEST, time)
    high = np.clip(np.nan_to_num(high, nan=np.inf), time, time * WIDEST)
    return PricedCalls(distinct, index, time, low, high, source, by_variant, common)


def _distinct(calls: Iterable[OpCall]) -> tuple[list[OpCall], Int64]:
    """The distinct calls in order of first appearance, and the place of each call among them; hashes each call once."""
    known: defaultdict[OpCall, int] = defaultdict(count().__next__)
    index = np.fromiter(map(known.__getitem__, calls), np.int64)
    return list(known), index


def _by_family(calls: Sequence[OpCall]) -> Mapping[Family, Int64]:
    """Indices of the calls of each family."""
    families = [call.family for call in calls]
    if len(set(families)) == 1:
        return {families[0]: np.arange(len(families))}
    rows: dict[Family, list[int]] = {}
    for i, family in enumerate(families):
        rows.setdefault(family, []).append(i)
    return {family: np.array(found, np.int64) for family, found in rows.items()}
