"""Times of the kernels of a scenario: measured, anchored or modelled, each with its source and interval.

Anchoring predicts the time of recorded work after a change from its measured time and a ratio of modelled times::

    time after = recorded time × model(after) / model(before)            the model says how time follows the work

Predictions for another size, device or program all take their times from here. A relative error of the model that is
equal before and after cancels. So the ratio's interval is in proportion to the change of the work: at an e-fold change,
it is the whole interval of both modelled times.

*Measured* times stay where nothing changed. The interval of an anchored time is that of the models, less what cancels.
Between two devices a fifth of the variance cancels; on one device all except the uncertainty of the change itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache

import numpy as np

from graph_predictor.prediction.scenario import COLLECTIVE, Scenario
from graph_predictor.simulation.program import Program
from kernel_models.device import DeviceSpec
from kernel_models.op_call import Family, OpCall, Source
from kernel_models.operation import calls_of, operation
from kernel_models.pricing import CallBatch, Models, price, sustained
from kernel_models.spreads import MEASURED_KERNELS, PLACEHOLDER_DEVICE, RESIZED_ON_CPU, TYPICAL_WORK
from kernel_models.trace_calls import FAMILIES
from tracer.arrays import Bool, Float64, Int64

Calls = Sequence[tuple[OpCall, ...]]
LEAST_RATIO, MOST_RATIO = 1e-3, 1e3
"""Limits of a ratio: beyond them a recorded time gives no information about another. Chosen."""


@dataclass(frozen=True, slots=True)
class Prices:
    """Times that models predict for groups of calls, µs, and logs of (interval's ends / time), [groups] each."""

    time_us: Float64
    low: Float64
    high: Float64


@dataclass(frozen=True, slots=True)
class Ratios:
    """Ratios of the time after a change to the recorded time, and logs of (80% interval's ends / ratio), [groups]."""

    ratio: Float64
    low: Float64
    high: Float64


class CallGroups:
    """Groups of calls, each priced as the sum of its calls, as in a step that keeps the device busy.

    Results that do not depend on the device are computed once, for any number of devices.

    Args:
        calls: the groups.
        single: calls priced in addition, each alone, as on a device that is not busy.
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


def change_ratios(before: Prices, after: Prices, elsewhere: bool = False) -> Ratios:
    """Return ratios of times: 0 where no work remains, 1 where the models have no time for the recorded work.

    Args:
        before: prices of the recorded calls on the device of the recording.
        after: prices of the calls that replace them.
        elsewhere: the calls run on another device: the ratio keeps the models' intervals less their shared variance. On
            the same device it keeps a share of the intervals that grows with the change of the work.
    """
    ratio = np.clip(after.time_us / np.maximum(before.time_us, 1e-9), LEAST_RATIO, MOST_RATIO)
    ratio = np.where(before.time_us > 0, np.where(after.time_us > 0, ratio, 0.0), 1.0)
    weight = np.sqrt(1 - SHARED_VARIANCE) if elsewhere else size_of_change(ratio)
    return Ratios(ratio, -weight * np.hypot(after.low, before.high), weight * np.hypot(after.high, before.low))


def size_of_change(ratio: Float64) -> Float64:
    """Return how much work changes: the size of the log of its ratio, at most 1."""
    return np.minimum(np.abs(np.log(np.maximum(ratio, LEAST_RATIO))), 1.0)


def resized_on_cpu(ns: Float64, ratio: Float64, total_ns: float) -> float:
    """Return the log half width of the 80% interval of host time, part of it computation scaled to other sizes.

    Args:
        ns: times of the computation after the change.
        ratio: ratio of each of these times to the recorded time.
        total_ns: all host time.
    """
    return RESIZED_ON_CPU * float((ns * size_of_change(ratio)).sum()) / max(total_ns, 1.0)


def shrinking(stays_ns: float, total_ns: float, growth: float) -> float:
    """Return the log half width that smaller sizes add: host time that is assumed constant may shrink with the sizes.

    Examples are allocating, copying, and what a larger batch drives out of caches. Such time weighs more in a shorter
    step. Five programs of benchmarks/foreign_tuning were predicted from batch 16 to 4 on a quiet core: none came out
    more than 1% too short, and two 18 and 35% too long.

    Args:
        stays_ns: host time that is assumed to stay.
        total_ns: time of the step.
        growth: factor on the sizes; 1 or more adds nothing.
    """
    return -math.log1p(-stays_ns / total_ns * (1.0 - growth)) if growth < 1.0 and total_ns > 0.0 else 0.0


RUNGS = 24
"""Calls of a ladder, over a factor of 4,096 of work: each has 1.4 times the work of the one before."""


@lru_cache
def ladders(family: Family) -> tuple[tuple[OpCall, ...], ...]:
    """Return typical work of a family, as ladders of growing calls; ratios of ladders are averaged (log)."""
    sizes = np.unique(np.rint(np.geomspace(1, 4096, RUNGS)).astype(int)).tolist()
    if family is Family.CONV:
        # Layers of ResNet-50 (He et al. 2016, table 1): the 3×3 and the 1×1 of a middle stage.
        options = [[1, 1], [1, 1], [1, 1]]
        of = [((128, 28, 28), (128, 128, 3, 3)), ((512, 28, 28), (128, 512, 1, 1))]
        return tuple(tuple(_one("aten::convolution", [(n, *image), weight, None, *([None] * 6)],
                                [None, None, None, options[0], [kernel // 2] * 2, options[2], False, [0, 0], 1])
                           for n in sizes) for image, weight in of for kernel in [weight[-1]])
    if family is Family.GEMM:
        return (tuple(_one("aten::mm", [(16 * n, 1024), (1024, 1024)], None) for n in sizes),)
    if family is Family.ATTENTION:
        return (tuple(_one("aten::bmm", [(n, 512, 64), (n, 64, 512)], None) for n in sizes),)
    return (tuple(_one("aten::add", [(n * 16384,), (n * 16384,)], None) for n in sizes),)


def _one(name: str, shapes: Sequence[object], values: Sequence[object] | None) -> OpCall:
    return calls_of(operation(name, shapes, "fp32", None, values))[0]


def typical_calls(family: Family, source: DeviceSpec) -> list[list[OpCall]]:
    """Return the ladders of a family, as calls that a device would run."""
    calls = [list(rung) for rung in ladders(family)]
    if family is Family.CONV and "tf32" in source.matrix_tflops:
        # cuDNN's default: fp32 data, TF32 products.
        return [[replace(call, dtype="tf32") for call in rung] for rung in calls]
    return calls


@dataclass(frozen=True)
class Ladders:
    """Ladders of typical calls by family, to scale kernels of unknown sizes to another device.

    A trace without shapes still gives each kernel's time and, by its operation's name, its family. A ladder of typical
    calls of the family, from small to large, is priced on both devices. A kernel takes the ratio of the rung whose
    price on the first device equals its measured time. So short kernels stay at the floor of a launch, and long kernels
    scale with the devices' rates.

    Attributes:
        families: families of the kernels to scale.
        source: the device on which the kernels were measured.
    """

    families: tuple[Family, ...]
    source: DeviceSpec

    @cached_property
    def _rungs(self) -> dict[Family, list[list[OpCall]]]:
        return {family: typical_calls(family, self.source) for family in dict.fromkeys(map(_ladder, self.families))}

    @property
    def calls(self) -> list[OpCall]:
        """Return the calls of all ladders, one after another."""
        return [call for calls in self._rungs.values() for each in calls for call in each]

    def times(self, times_us: Float64) -> dict[Family, list[Float64]]:
        """Return ``times_us`` of ``calls`` by family and ladder, µs."""
        lengths = [len(each) for calls in self._rungs.values() for each in calls]
        ladders = iter(np.split(times_us, np.cumsum(lengths)[:-1]))
        found = {family: [next(ladders) for _ in calls] for family, calls in self._rungs.items()}
        return {family: found[_ladder(family)] for family in self.families}


def _ladder(family: Family) -> Family:
    """Return the family whose ladders ``family`` uses: itself if it has its own, else ``OTHER``."""
    return family if family in (Family.CONV, Family.GEMM, Family.ATTENTION) else Family.OTHER


def typical_ratios(log_us: Float64, before_us: Sequence[Float64], after_us: Sequence[Float64]) -> Float64:
    """Return the ratio of the target's to the source's time, [n], for kernels of a family by their recorded times.

    Args:
        log_us: logs of the kernels' times on the source, µs, [n].
        before_us, after_us: times of the family's ladders on the source and on the target, µs.
    """
    logs = np.zeros(len(log_us))
    for before, after in zip(before_us, after_us, strict=True):
        order = np.argsort(before)
        logs += np.interp(log_us, np.log(before[order]), np.log(after / before)[order])
    return np.exp(logs / len(before_us))


SHARED_VARIANCE = 0.2
"""Share of the variance of a model's error that is common to two devices. Calls of published tables that were
measured on two devices, priced from data sheets (``benchmarks/interval_coverage.py``): 0.54 of matrix products, 0.01 of
attention, -0.16 to 0.34 of the rest, 0.18 on average over pairs of devices."""
RATIOS_KEPT = 512
"""Combinations of device and rates whose ratios predictions from one recording share, if few ratios each."""
NUMBERS_KEPT = 2_000_000
"""Most ratios that are kept in total: 50 MB with their intervals."""
UNCHANGED = 1e-3
"""Smaller relative changes of a kernel's time count as none."""


@dataclass(frozen=True, slots=True)
class KernelTimes:
    """Times of all kernels of the recorded program.

    Attributes:
        ns: expected durations.
        source: a ``Source`` code for each kernel.
        family: as in ``Work``.
        low, high: natural logs of the 80% interval's ends over the expected time (≤ 0 and ≥ 0).
        notes: sentences on assumptions.
    """

    ns: Float64
    source: Int64
    family: Int64
    low: Float64
    high: Float64
    notes: tuple[str, ...]

    def of_rows(self, rows: np.ndarray) -> KernelTimes:
        """Return the times of some kernels."""
        return KernelTimes(self.ns[rows], self.source[rows], self.family[rows], self.low[rows], self.high[rows],
                           self.notes)


def price_kernels(scenario: Scenario) -> KernelTimes:
    """Price every kernel of a scenario; kept for scenarios with equal kernel changes and device rates."""
    changes = [getattr(group, field.name) for group in (scenario.devices, scenario.kernels) for field in fields(group)]
    return scenario.shared.once("kernel times", (scenario.built, scenario.cycle, scenario.work, *changes),
                                lambda: _priced(scenario))


def measured_times(program: Program) -> KernelTimes:
    """Return the recorded times of all kernels, collectives and copies included."""
    kernels = len(program.kernel_duration)
    return KernelTimes(program.kernel_duration.astype(np.float64), np.full(kernels, Source.MEASURED, np.int64),
                       np.zeros(kernels, np.int64), np.full(kernels, -MEASURED_KERNELS),
                       np.full(kernels, MEASURED_KERNELS), ())


def _priced(scenario: Scenario) -> KernelTimes:
    work, program = scenario.work, scenario.built.program
    ns = program.kernel_duration.astype(np.float64)
    kernels = len(ns)
    source: Int64 = np.full(kernels, Source.MEASURED, np.int64)
    low: Float64 = np.full(kernels, -MEASURED_KERNELS)
    high: Float64 = np.full(kernels, MEASURED_KERNELS)
    if scenario.kernels.sources is not None:
        source, low, high = (getattr(scenario.kernels.sources, name).copy() for name in ("source", "low", "high"))
    devices, changes = scenario.devices, scenario.kernels
    ratio, ratio_low, ratio_high, changed, said = scenario.shared.once("ratios", (
        devices.clock, devices.bandwidth, work, devices.target, devices.source, devices.target_models,
        devices.source_models, changes.calls, changes.change_known, changes.call_edits), lambda: _ratios(scenario),
        most=scenario.shared.as_many(len(work.call_row), NUMBERS_KEPT, RATIOS_KEPT))
    notes = list(said)
    of = np.maximum(work.kernel_group, 0)
    inside = work.kernel_group >= 0
    if len(ratio):
        touched = inside & changed[of]
        ns[touched] *= ratio[of[touched]]
        source[touched] = np.maximum(source[touched], Source.ANCHORED)
            # A modelled time keeps the model's interval; a measured time gets that of the ratio.
        low[touched] = np.minimum(low[touched], ratio_low[of[touched]])
        high[touched] = np.maximum(high[touched], ratio_high[of[touched]])
        repeated = of[touched & scenario.cycle.kernel]
        if scenario.devices.target is None and _factors(scenario) and (np.abs(ratio[repeated] - 1) < UNCHANGED).all():
            notes.append(f"{_factors(scenario)} changes no kernel's time by {UNCHANGED:.1%}.")
    elif _factors(scenario):
        notes.append(f"No time of the step is a GPU's: nothing changes with {_factors(scenario)}.")
    factor, spread = scenario.kernels.factor, scenario.kernels.spread
    if factor is not None:
        ns *= factor
        source[factor != 1.0] = np.maximum(source[factor != 1.0], Source.ANCHORED)
    if spread is not None:
        low, high = -np.hypot(low, spread), np.hypot(high, spread)
    return KernelTimes(ns, source, work.family, low, high, tuple(notes))


def _factors(scenario: Scenario) -> str:
    """Return the factors on the device's speed, in words; empty where there are none."""
    return " and ".join(f"{what} × {factor:g}" for what, factor in (
        ("GPU clock", scenario.devices.clock), ("memory bandwidth", scenario.devices.bandwidth)) if factor != 1.0)


@dataclass(frozen=True)
class _EditedCalls:
    """A scenario's calls after its edits, before any device prices them: made once for scenarios with equal edits.

    Attributes:
        new: calls of each kernel group after the edits, to be priced together with the ladders.
        unlike: for each row of ``Work.calls``, whether the edits change it.
        unsized: kernel groups without sizes and the logs of their recorded times, µs, by the code of their family.
        ladders: typical calls of these families.
    """

    new: CallGroups
    unlike: Bool
    unsized: dict[int, tuple[Int64, Float64]]
    ladders: Ladders | None

    @classmethod
    def of(cls, scenario: Scenario) -> _EditedCalls:
        """Return the edited calls of a scenario."""
        work, kernels, source = scenario.work, scenario.kernels, scenario.known_source()
        new = [kernels.calls.get(number, calls) for number, calls in enumerate(work.calls)]
        if kernels.call_edits:
            new = [tuple(after for call in calls for after in kernels.edited(call)) for calls in new]
        unlike = np.array([after is not before and after != before
                           for after, before in zip(new, work.calls, strict=True)], np.bool_)
        without = np.array([any("unsized" in call.flags for call in calls) for calls in work.calls], np.bool_)
        rows = np.flatnonzero(without[work.call_row]) if len(without) else np.zeros(0, np.int64)
        code = np.array([FAMILIES.index(calls[0].family) if calls else COLLECTIVE for calls in work.calls], np.int64)
        family, log_us = code[work.call_row[rows]], np.log(np.maximum(work.measured_ns[rows] / 1e3, 0.1))
        unsized = {each: (rows[family == each], log_us[family == each]) for each in np.unique(family).tolist()}
        families = tuple(FAMILIES[each] for each in unsized)
        ladders = Ladders(families, source) if families else None
        typical = [] if ladders is None else [kernels.edited(call)[0] for call in ladders.calls]
        return cls(CallGroups(new, typical), unlike, unsized, ladders)


def _ratios(scenario: Scenario) -> tuple[Float64, Float64, Float64, np.ndarray, list[str]]:
    """Return ratios of kernel groups, the logs of their intervals' ends, whether each group has changed, and notes."""
    work, devices, kernels = scenario.work, scenario.devices, scenario.kernels
    nothing: list[str] = []
    none = np.zeros(0), np.zeros(0), np.zeros(0), np.zeros(len(work.call_row), np.bool_), nothing
    if not work.calls or not (devices.moved or kernels.calls or kernels.call_edits):
        return none
    source, target = scenario.known_source(), scenario.known_target()
    edited = scenario.shared.once("edited calls", (work, source, kernels.calls, kernels.call_edits),
                                  lambda: _EditedCalls.of(scenario))
    if not (devices.moved or edited.unlike.any()):
        return none
    models = devices.source_models
    before = scenario.shared.once("recorded prices", (work, source, models),
                                  lambda: prices_of(work.calls, source, models))
    after, typical_us = edited.new.prices(target, devices.models)
    found = change_ratios(before, after, devices.elsewhere)
    changed = (edited.unlike | devices.moved)[work.call_row]
    ratio, low, high = (column[work.call_row] for column in (found.ratio, found.low, found.high))
    notes = [] if edited.ladders is None else _typical(
        scenario, edited, edited.ladders, typical_us, (ratio, low, high), changed)
    return ratio, low, high, changed, notes


def _typical(scenario: Scenario, edited: _EditedCalls, ladders: Ladders, typical_us: Float64,
             found: tuple[Float64, Float64, Float64], changed: Bool) -> list[str]:
    """Fill in the ratios of kernel groups without sizes, by typical work; return notes on that."""
    work, models = scenario.work, scenario.devices.source_models
    ratio, low, high = found
    before = scenario.shared.once("typical times", (ladders, models), lambda: ladders.times(
        price(ladders.calls, ladders.source, models).times_us))
    after = ladders.times(typical_us)
    unsized_ns, known = 0, []
    stand_ins = scenario.known_source().placeholder or scenario.known_target().placeholder
    width = np.hypot(TYPICAL_WORK, 0.2) + PLACEHOLDER_DEVICE * stand_ins
    for code, (own, log_us) in edited.unsized.items():
        family, mine = FAMILIES[code], changed[own]
        if not mine.all():
            own, log_us = own[mine], log_us[mine]
        if not len(own):
            continue
        ratio[own] = typical_ratios(log_us, before[family], after[family])
        low[own], high[own] = -width, width
        unsized_ns += int(work.measured_ns[own].sum())
        known += [] if family is Family.OTHER else [family.value]
    share = unsized_ns / max(work.measured_ns.sum(), 1)
    return [] if share <= 0.005 else [
        f"{share:.0%} of the kernels' time is of operations whose sizes the trace does not have; they were scaled as "
        f"typical work of their families ({', '.join(known) or 'none known'}), in fp32, that takes as long."]
