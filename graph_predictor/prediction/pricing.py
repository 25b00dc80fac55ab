"""Times of the kernels of a scenario: measured, anchored or modelled, each with its source and interval.

*Measured* times stay where nothing changed. *Anchored* ones are measured × model(new) / model(old): what a model gets
wrong about an operation in the same way before and after cancels. The interval of such a ratio is that of the models,
less what cancels: between two devices a fifth of the variance, on one device all of it but what the change itself is
unsure of.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from graph_predictor.prediction.anchoring import anchored, prices_of
from graph_predictor.prediction.scenario import Scenario
from graph_predictor.prediction.shared import KEPT
from graph_predictor.prediction.typical import typical_ratios, typical_times
from graph_predictor.prediction.work import COLLECTIVE
from kernel_models.device import DeviceSpec
from kernel_models.model import Source
from kernel_models.op_call import Family
from kernel_models.spreads import MEASURED_KERNELS, TYPICAL_WORK
from kernel_models.trace_calls import FAMILIES
from tracer.arrays import Float64, Int64

SHARED_VARIANCE = 0.2
"""Share of the variance of a model's error that it has in common on two devices. Calls of published tables that were
measured on two devices, priced from data sheets (``benchmarks/interval_coverage.py``): 0.54 of matrix products, 0.01 of
attention, -0.16 to 0.34 of the rest, 0.18 on average over pairs of devices."""
RATIOS_KEPT = 64
"""Devices with their rates whose ratios predictions from one recording share, where they are small."""
NUMBERS_KEPT = 2_000_000
"""Ratios in all that are kept of them: 50 MB with their intervals."""
UNCHANGED = 1e-3
"""A kernel's time that changes by less is called the same."""


@dataclass(frozen=True, slots=True)
class KernelTimes:
    """Times of all kernels of the recorded program.

    Attributes:
        ns: expected durations.
        source: a ``Source`` each.
        family: as in ``Work``.
        low, high: natural logs of the 80% interval's ends over the expected time (≤ 0 and ≥ 0).
        notes: what was assumed.
    """

    ns: Float64
    source: Int64
    family: Int64
    low: Float64
    high: Float64
    notes: tuple[str, ...]

    def of_rows(self, rows: np.ndarray) -> KernelTimes:
        """Return those of some kernels."""
        return KernelTimes(self.ns[rows], self.source[rows], self.family[rows], self.low[rows], self.high[rows],
                           self.notes)


def price_kernels(scenario: Scenario) -> KernelTimes:
    """Price every kernel of a scenario."""
    work, program = scenario.work, scenario.built.program
    ns = program.kernel_duration.astype(np.float64)
    kernels = len(ns)
    source: Int64 = np.full(kernels, Source.MEASURED, np.int64)
    low: Float64 = np.full(kernels, -MEASURED_KERNELS)
    high: Float64 = np.full(kernels, MEASURED_KERNELS)
    if scenario.kernels.sources is not None:
        source, low, high = (getattr(scenario.kernels.sources, name).copy() for name in ("source", "low", "high"))
    notes: list[str] = []
    ratio, ratio_low, ratio_high, changed, said = _shared_ratios(scenario)
    notes += said
    of = np.maximum(work.piece, 0)
    inside = work.piece >= 0
    if len(ratio):
        touched = inside & changed[of]
        ns[touched] *= ratio[of[touched]]
        source[touched] = np.maximum(source[touched], Source.ANCHORED)
        # Of a modelled time the interval stays that of the model; a measured one takes that of the ratio.
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
    """The factors on the device's speed, in words; empty where there are none."""
    return " and ".join(f"{what} × {factor:g}" for what, factor in (
        ("GPU clock", scenario.devices.clock), ("memory bandwidth", scenario.devices.bandwidth)) if factor != 1.0)


def _shared_ratios(scenario: Scenario) -> tuple[Float64, Float64, Float64, np.ndarray, list[str]]:
    """``_ratios`` and its notes; where no sizes change, made once for each device with its factors and call edits."""
    def make() -> tuple[Float64, Float64, Float64, np.ndarray, list[str]]:
        notes: list[str] = []
        return (*_ratios(scenario, notes), notes)

    if scenario.kernels.calls:
        return make()
    devices, kernels = scenario.devices, scenario.kernels
    of = (scenario.work, devices.target, devices.source, devices.target_models, devices.source_models, devices.clock,
          devices.bandwidth, kernels.change_known, kernels.call_edits)
    most = min(max(NUMBERS_KEPT // max(len(scenario.work.group), 1), KEPT), RATIOS_KEPT)
    return scenario.shared.once("ratios", of, make, most=most)


def _ratios(scenario: Scenario, notes: list[str]) -> tuple[Float64, Float64, Float64, np.ndarray]:
    """Ratio of every piece with the logs of its interval's ends, and which pieces have one."""
    work, devices = scenario.work, scenario.devices
    groups = len(work.calls)
    new = [scenario.kernels.calls.get(number, calls) for number, calls in enumerate(work.calls)]
    new = [tuple(after for call in calls for after in scenario.kernels.edited(call)) for calls in new]
    unlike = np.array([after != before for after, before in zip(new, work.calls, strict=True)], np.bool_)
    if not groups or not (devices.moved or unlike.any()):
        none = np.zeros(0)
        return none, none, none, np.zeros(len(work.group), np.bool_)
    source, target = scenario.known_source(), scenario.known_target()
    before = scenario.shared.once("recorded prices", (work, source, devices.source_models),
                                  lambda: prices_of(work.calls, source, devices.source_models))
    after = prices_of(new, target, devices.models)
    found = anchored(before, after, np.sqrt(1 - SHARED_VARIANCE) if devices.elsewhere else
                     0.0 if scenario.kernels.change_known else None)
    changed = unlike | devices.moved
    piece_ratio, piece_low, piece_high = (column[work.group] for column in (found.ratio, found.low, found.high))
    piece_changed = changed[work.group]
    unsized = np.array([any("unsized" in call.flags for call in calls) for calls in work.calls], np.bool_)[work.group]
    if unsized.any():
        _typical(scenario, source, target, piece_ratio, piece_low, piece_high, piece_changed, unsized, notes)
    return piece_ratio, piece_low, piece_high, piece_changed


def _typical(scenario: Scenario, source: DeviceSpec, target: DeviceSpec, ratio: Float64, low: Float64, high: Float64,
             changed: np.ndarray, unsized: np.ndarray, notes: list[str]) -> None:
    """Ratios of pieces without sizes (see ``typical``)."""
    work = scenario.work
    rows = np.flatnonzero(unsized & changed)
    family = np.array([FAMILIES.index(calls[0].family) if calls else COLLECTIVE for calls in work.calls])[
        work.group[rows]]
    for code in np.unique(family).tolist():
        mine = rows[family == code]
        times = np.maximum(work.measured_ns[mine] / 1e3, 0.1)
        before_us = scenario.shared.once(f"typical times of {code}", (source, scenario.devices.source_models),
                                         partial(typical_times, FAMILIES[code], source, scenario.devices.source_models))
        ratio[mine] = typical_ratios(FAMILIES[code], times, source, before_us, target, scenario.devices.models,
                                     scenario.kernels.edited)
        low[mine], high[mine] = -np.hypot(TYPICAL_WORK, 0.2), np.hypot(TYPICAL_WORK, 0.2)
    share = work.measured_ns[rows].sum() / max(work.measured_ns.sum(), 1)
    known = [FAMILIES[code].value for code in np.unique(family).tolist() if FAMILIES[code] is not Family.OTHER]
    if share > 0.005:
        notes.append(f"{share:.0%} of the kernels' time is of operations whose sizes the trace does not have; they "
                     f"were scaled as typical work of their families ({', '.join(known) or 'none known'}), in fp32, "
                     "that takes as long.")
