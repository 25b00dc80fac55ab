"""Pricing: every call gets a time, an interval and a source. No work has price 0, and no unknown work raises an error.

Calls are grouped by family, and each distinct call is priced once, by the best model that covers it. The order is:
learned; heuristic with efficiencies fitted to the device; another form of the same work that is covered
(``times_by_variant``); the data sheet.

Pricing by a variant: a profile of linear layers' forward products has no measurements of the gradients, whose operands
are laid out differently. The data sheet's formula gives the cost of that difference, the profile the device's distance
from the formula:

    t(call) = t_datasheet(call) · t_profile(variant) / t_datasheet(variant)

so that the same measurements price forward and backward of one layer.

Power limit: tables of kernels are measured in bursts, at the boost clock. Where products follow each other for
milliseconds, a board whose matrix units exceed its power limit lowers their clock:

    t = max(t of the burst, operations · joules per operation / watts)

Energy per operation is assumed to be the same at every clock. Bursts would run 240 products of a B200 at 0.6 to 0.8 of
the peak; sustained, all ended near 0.49 of it (``benchmarks/sustained_products.py``). Memory traffic and other work are
not slowed. The limit applies to all steps, traced, anchored or planned; it does not apply to an isolated call
(``foretrace price``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from typing import Protocol

import numpy as np

from kernel_models.device import DeviceSpec
from kernel_models.families.attention import attention
from kernel_models.heuristics.roofline import heuristic_models
from kernel_models.heuristics.work import FamilyCalls, computed_as
from kernel_models.op_call import Family, KernelModel, OpCall, Source, Times, covered_times
from kernel_models.spreads import OTHER_LAYOUT
from tracer.arrays import Bool, Float64, Int8, Int64

LEAST_US = 0.5
"""Least time of a kernel: the shortest that CUPTI and roctracer report take 0.7 to 1 µs. It keeps a broken model from
pricing work at 0."""
WIDEST = 1e3
"""An interval's ends are at most this factor from the time. Set."""


class Models(Protocol):
    """The part of a device's profile that pricing needs."""

    @property
    def device(self) -> DeviceSpec:
        """Return the device to which the models were fitted."""
        ...

    def models_of(self, family: Family) -> Sequence[KernelModel]:
        """Return the models of a family, in any order."""
        ...


@dataclass(frozen=True, slots=True)
class PricedCalls:
    """Times of n calls, in their order.

    Attributes:
        calls: The m distinct calls, in order of first appearance.
        index: Index of each call into the distinct calls [n].
        time_us, low_us, high_us: Expected time and 80% interval of each distinct call, µs [m].
        source: A ``Source`` of each distinct call [m].
        by_variant: Whether the profile covers only another form of the call (a ``Source.HEURISTIC``), [m].
        common: Share of an interval's width that the calls of a family have in common [m] (see ``op_call.Times``).
    """

    calls: list[OpCall]
    index: Int64
    time_us: Float64
    low_us: Float64
    high_us: Float64
    source: Int8
    by_variant: Bool = field(default_factory=lambda: np.zeros(0, np.bool_))
    common: Float64 = field(default_factory=lambda: np.ones(0))

    def __len__(self) -> int:
        return len(self.index)

    @property
    def times_us(self) -> Float64:
        """Return the time of every call, repeated calls included, µs [n]."""
        return self.time_us[self.index]

    def part(self, rows: Sequence[int]) -> PricedCalls:
        """Return the calls of these rows, in their order."""
        of: dict[int, int] = {}
        index = np.array([of.setdefault(each, len(of)) for each in self.index[rows].tolist()], np.int64)
        kept = np.array(list(of), np.int64)
        return PricedCalls([self.calls[i] for i in of], index, self.time_us[kept], self.low_us[kept],
                           self.high_us[kept], self.source[kept], self.by_variant[kept], self.common[kept])

    @property
    def total_us(self) -> float:
        """Return the sum over all calls, µs."""
        return float(self.times_us.sum())

    def total_interval_us(self) -> tuple[float, float]:
        """Return the 80% interval of the sum, µs. Errors have a common cause within a family, not between families.

        Within a family the common parts of the distances to the interval's ends add up linearly. The other parts, and
        the distances of the families, add up in quadrature.
        """
        counts = np.bincount(self.index, minlength=len(self.calls))
        total = self.total_us
        low, high = (self._distance(counts * np.abs(end - self.time_us)) for end in (self.low_us, self.high_us))
        return max(total - low, 0.0), total + high

    def _distance(self, distance_us: Float64) -> float:
        """Return the distance from the sum to one end of its interval, µs, from the distances of the distinct calls."""
        common = self.common if len(self.common) else np.ones(len(self.calls))
        together: dict[Family, float] = {}
        for call, distance in zip(self.calls, (common * distance_us).tolist(), strict=True):
            together[call.family] = together.get(call.family, 0.0) + distance
        own = (1.0 - common**2) * distance_us**2
        return float(np.sqrt(np.sum(np.square(list(together.values()))) + own.sum()))

    def share_by_source(self) -> dict[str, float]:
        """Return the share of the total time from each source, best first, without sources that priced no call."""
        times, sources = self.times_us, self.source[self.index]
        total = times.sum()
        shares = {source.label: float(times[sources == source].sum() / total) if total else 0.0 for source in Source}
        return {label: share for label, share in shares.items() if share > 0}


class CallBatch:
    """Calls to be priced on several devices: what does not depend on the device is computed once.

    Args:
        calls: the calls; repeats are allowed.

    Attributes:
        distinct: the distinct calls, in order of first appearance.
        index: the index of each call into ``distinct``.
    """

    def __init__(self, calls: Iterable[OpCall]) -> None:
        self.distinct, self.index = _distinct(calls)

    @cached_property
    def families(self) -> Mapping[Family, tuple[Int64, FamilyCalls]]:
        """Return by family the positions of its distinct calls, and these calls."""
        return {family: (rows, FamilyCalls(self.distinct[i] for i in rows.tolist()))
                for family, rows in _by_family(self.distinct).items()}


def price(calls: Iterable[OpCall] | CallBatch, device: DeviceSpec, profile: Models | None = None) -> PricedCalls:
    """Return the time of every call on a device, with its interval and source.

    Args:
        calls: The calls; repeats are allowed.
        device: Device that the calls would run on.
        profile: Fitted models of that device. A call that they do not cover is priced by a variant that they cover,
            else, as without a profile, by the data sheet's figures with default efficiencies.
    """
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

        def take(covered: Bool, times: Times, by: Source) -> Int64:
            """Store the valid times of covered calls that have no time yet; return which calls got a time."""
            nonlocal left
            sound = np.isfinite(times.time_us) & (times.time_us > 0)
            taken: Int64 = left[covered][sound]
            time[taken], low[taken], high[taken] = times.time_us[sound], times.low_us[sound], times.high_us[sound]
            source[taken] = by
            if times.common is not None:
                common[taken] = np.clip(times.common[sound], 0.0, 1.0)
            left = np.concatenate([left[~covered], left[covered][~sound]])
            return taken

        for model in models:
            if model is fallback[family] and fitted:
                by_variant[take(*times_by_variant([distinct[i] for i in left], fitted, model), Source.HEURISTIC)] = True
                if not len(left):
                    break
            mine = every if left is rows else [distinct[i] for i in left.tolist()]
            if model.source != Source.DATASHEET:
                covered, times = covered_times(model, mine)
            else:
                covered, times = np.ones(len(mine), np.bool_), model.predict(mine)
            if covered.any():
                take(covered, times, model.source)
            if not len(left):
                break
    time = np.where(np.isfinite(time), time, device.kernel_floor_us)
    time = np.maximum(time, LEAST_US)
    low = np.clip(np.nan_to_num(low, nan=0.0), time / WIDEST, time)
    high = np.clip(np.nan_to_num(high, nan=np.inf), time, time * WIDEST)
    return PricedCalls(distinct, index, time, low, high, source, by_variant, common)


def _distinct(calls: Iterable[OpCall]) -> tuple[list[OpCall], Int64]:
    """Return the distinct calls in order of first appearance, and each call's index; each call is hashed once."""
    known: defaultdict[OpCall, int] = defaultdict(count().__next__)
    index = np.fromiter(map(known.__getitem__, calls), np.int64)
    return list(known), index


def _by_family(calls: Sequence[OpCall]) -> Mapping[Family, Int64]:
    """Return the indices of the calls of each family."""
    families = [call.family for call in calls]
    if len(set(families)) == 1:
        return {families[0]: np.arange(len(families))}
    rows: dict[Family, list[int]] = {}
    for i, family in enumerate(families):
        rows.setdefault(family, []).append(i)
    return {family: np.array(found, np.int64) for family, found in rows.items()}


_LAYOUTS = ("nt", "nn", "tn", "tt")
_DIRECTIONS = ("forward", "dgrad", "wgrad")


def times_by_variant(
    calls: Sequence[OpCall], fitted: Sequence[KernelModel], datasheet: KernelModel,
) -> tuple[Bool, Times]:
    """Return which of a family's calls have a variant that a fitted model covers [n], and the times of these calls, µs.

    Args:
        calls: calls of one family that no fitted model covers.
        fitted: the family's fitted models, best first.
        datasheet: model that prices any call of the family.
    """
    variant: list[OpCall | None] = [None] * len(calls)
    by: list[KernelModel | None] = [None] * len(calls)
    of_calls = [list(_variants(call)) for call in calls]
    for model in fitted:
        if model.source == Source.DATASHEET:
            continue
        for place in range(max(map(len, of_calls), default=0)):
            rows = [i for i, found in enumerate(of_calls) if variant[i] is None and place < len(found)]
            if rows:
                tried = [of_calls[i][place] for i in rows]
                for i, other, known in zip(rows, tried, model.covers(tried), strict=True):
                    if known:
                        variant[i], by[i] = other, model
    found = np.array([one is not None for one in variant], np.bool_)
    chosen: list[int] = np.flatnonzero(found).tolist()
    time, low, high = (np.zeros(len(chosen)) for _ in range(3))
    for model in fitted:
        mine = [at for at, i in enumerate(chosen) if by[i] is model]
        near = [one for at in mine if (one := variant[chosen[at]]) is not None]
        if near:
            times, formula = model.predict(near), datasheet.predict(near).time_us
            time[mine] = datasheet.predict([calls[chosen[at]] for at in mine]).time_us * times.time_us / formula
            with np.errstate(all="ignore"):  # the caller skips times that are not finite
                low[mine] = time[mine] * np.exp(-np.hypot(np.log(times.time_us / times.low_us), OTHER_LAYOUT))
                high[mine] = time[mine] * np.exp(np.hypot(np.log(times.high_us / times.time_us), OTHER_LAYOUT))
    return found, Times(time, low, high)


def _variants(call: OpCall) -> Iterator[OpCall]:
    """Yield the same work in other forms, most similar first."""
    if "unsized" not in call.flags:
        yield from _VARIANTS.get(call.family, lambda call: iter(()))(call)


def _products(call: OpCall) -> Iterator[OpCall]:
    """Yield the product in other layouts, then without the bias or other addition."""
    plain = tuple(flag for flag in call.flags if flag not in ("bias", "accumulate"))
    for flags in dict.fromkeys((call.flags, plain)):
        for layout in dict.fromkeys((call.layout, *_LAYOUTS)):
            if (layout, flags) != (call.layout, call.flags):
                yield replace(call, layout=layout, flags=flags)


def _convolutions(call: OpCall) -> Iterator[OpCall]:
    """Yield the other directions, which have as many operations, then the other layout."""
    plain = tuple(flag for flag in call.flags if flag != "bias")
    for layout in dict.fromkeys((call.layout, "nchw", "nhwc")):
        for flags in dict.fromkeys((call.flags, plain)):
            for kind in dict.fromkeys((call.kind, *_DIRECTIONS)):
                if (kind, layout, flags) != (call.kind, call.layout, call.flags):
                    yield replace(call, kind=kind, layout=layout, flags=flags)


def _attentions(call: OpCall) -> Iterator[OpCall]:
    """Yield the other direction (forward or backward) of the same kernel."""
    name, _, direction = call.kind.rpartition("_")
    batch, heads, kv_heads, q_len, kv_len, head_dim, v_head_dim, window = call.dims
    yield from attention(
        f"{name}_{'forward' if direction == 'backward' else 'backward'}", batch, heads, kv_heads, q_len, kv_len,
        head_dim, v_head_dim, call.dtype, causal="causal" in call.flags, window=window,
        flags=tuple(flag for flag in call.flags if flag != "causal"))


def _images(call: OpCall) -> Iterator[OpCall]:
    """Yield the call on images of the default layout."""
    if call.layout == "nhwc":
        yield replace(call, layout="")


_VARIANTS: dict[Family, Callable[[OpCall], Iterator[OpCall]]] = {
    Family.GEMM: _products, Family.CONV: _convolutions, Family.ATTENTION: _attentions,
    Family.NORM: _images, Family.POOLING: _images, Family.INTERPOLATE: _images}


WATTS_PER_TFLOPS = {"ampere": 1.34, "hopper": 0.97, "blackwell": 0.91}
"""Power of the whole board for 10¹² operations/s of 16-bit products, W, by architecture.

Ampere: 0.718 of 312 TFLOP/s at the 300 W of an A100 PCIe 80 GB; Blackwell: 0.486 of 2,250 at the 1,000 W of a B200 (the
fitted half of SimuMax's tables, ``benchmarks/sustained_products.py``). Hopper: 720 TFLOP/s at the 700 W of an H100 and
an H200 SXM, as published by SemiAnalysis ("MI300X vs H100 vs H200 Benchmark", December 2024). These are products of
training, not of zeros; fp8 reached 1,280. Boards without a figure are not slowed here (see ``heuristics.work``)."""
COST_OF_TYPE = {"fp16": 1.0, "bf16": 1.0, "fp8": 0.56, "int8": 0.56, "fp4": 0.31, "tf32": 2.0}
"""Energy of an operation by type, relative to 16 bits. The figure of fp8 follows from Hopper's above; fp4 (below fp8 by
the same ratio) and tf32 (twice) are assumed, from peak rates."""
COST_ON = {"blackwell": {"fp8": 0.46, "int8": 0.46, "fp4": 0.26}}
"""Energies by architecture, where steps show them. Blackwell's 16-bit figure is one machine's (SimuMax's B200);
narrower types follow NVIDIA's recipes. Its fp8 gives Llama 3.1 405B in MXFP8 on 256 GB200 the step time of
Megatron-Bridge's summary (26.06). The figure of fp4 lies between those that do so for NVFP4 and for Llama 3 70B. Other
rows judge them (``benchmarks/weak_scaling.py --rows recipes``). Other boards (B300, GB300) are extrapolated."""
LIMITED = frozenset((Family.GEMM, Family.ATTENTION, Family.CONV))


def sustained_tflops(device: DeviceSpec, dtype: str) -> float:
    """Return the rate of products that the board's power sustains, 10¹² operations/s; infinite where unknown."""
    watts = WATTS_PER_TFLOPS.get(device.architecture)
    computed = computed_as(device, dtype)
    cost = COST_ON.get(device.architecture, {}).get(computed, COST_OF_TYPE.get(computed))
    if watts is None or cost is None or not device.power_w:
        return np.inf
    return device.power_w / (watts * cost)


def sustained(priced: PricedCalls, device: DeviceSpec) -> PricedCalls:
    """Return the prices under the board's power limit, for a step that keeps the device busy; intervals scale along."""
    rates: dict[str, float] = {}
    least: Float64 = np.zeros(len(priced.calls))
    for i, call in enumerate(priced.calls):
        if call.family in LIMITED:
            if call.dtype not in rates:
                rates[call.dtype] = sustained_tflops(device, call.dtype)
            least[i] = call.flops / rates[call.dtype] / 1e6
    slower = np.maximum(least / priced.time_us, 1.0)
    return replace(priced, time_us=priced.time_us * slower, low_us=priced.low_us * slower,
                   high_us=priced.high_us * slower)
