"""The interval of a step time: kernels and host drawn from their intervals, simulated, and the quantiles read off.

Errors of one family share their cause and are drawn together; those of different families, and the host's, apart. Small
programs are simulated for every draw. Of large ones the effect of each factor alone, at both ends of its interval, is
simulated, and effects add up in quadrature on either side: exact where the step time is linear in the factors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from graph_predictor.prediction.pricing import KernelTimes
from kernel_models.spreads import END
from tracer.arrays import Float64

DRAWS = 128
DRAWN_EVENTS = 400_000
"""Draws × events up to which every draw is simulated: about 0.1 s."""
MOST_FACTORS = 6
NEGLIGIBLE = 1e-3
"""Share of the step: families whose errors cannot move it by more are not simulated in large programs."""
SEED = 20

Simulate = Callable[[Float64, Sequence[float]], Float64]
"""Step times, ns, of several factors on kernels' times, [kernels, draws], with a factor on the host's time each."""


def step_interval(simulate: Simulate, times: KernelTimes, weight: Float64, host_spread: float, expected_ns: float,
                  events: int) -> tuple[float, float]:
    """80% interval of the step time, ns.

    Args:
        simulate: the step times of factors.
        times: the times and intervals of the step's kernels.
        weight: ns of each kernel in the step, to rank the families.
        host_spread: log half width of the 80% interval of host time.
        expected_ns: the step time without errors.
        events: size of the simulated program.
    """
    families = np.unique(times.family[weight > 0])
    effect = {int(f): float((weight * np.maximum(times.high, -times.low))[times.family == f].sum()) for f in families}
    ranked = sorted(effect, key=lambda f: -effect[f])
    groups = [[f] for f in ranked[:MOST_FACTORS - 1]] + ([ranked[MOST_FACTORS - 1:]] if len(ranked) >= MOST_FACTORS else
                                                         [])
    masks = [np.isin(times.family, group) for group in groups]
    if DRAWS * events <= DRAWN_EVENTS:
        return _drawn(simulate, times, masks, host_spread, expected_ns)
    # No step moves by more than its kernels do: what is added in quadrature must be more than nothing.
    masks = [mask for mask, group in zip(masks, groups, strict=True)
             if sum(effect[f] for f in group) > NEGLIGIBLE * expected_ns]
    return _linear(simulate, times, masks, host_spread, expected_ns)


def active_interval(times: KernelTimes, weight: Float64, active_ns: float, least: float) -> tuple[float, float]:
    """80% interval of the time in which a device works, ns: as long as its kernels take, one after another.

    Args:
        times: the kernels' times and intervals.
        weight: ns of each kernel in the step; 0 for collectives and for those of other ranks.
        active_ns: the time without errors; kernels that overlap are taken to go on overlapping as they do.
        least: log half width of the narrowest interval.
    """
    total = float(weight.sum())
    below = above = 0.0
    for family in np.unique(times.family[weight > 0]):
        mine = times.family == family
        below += float((weight[mine] * -np.expm1(times.low[mine])).sum()) ** 2
        above += float((weight[mine] * np.expm1(times.high[mine])).sum()) ** 2
    share = active_ns / total if total else 0.0
    low, high = active_ns - share * float(np.sqrt(below)), active_ns + share * float(np.sqrt(above))
    return min(max(low, 0.0), active_ns * float(np.exp(-least))), max(high, active_ns * float(np.exp(least)))


def spread_by(low: float, high: float, expected_ns: float, spread: float) -> tuple[float, float]:
    """An interval with another cause of errors in it, of a log half width; an end at 0 remains there."""
    if expected_ns <= 0:
        return low, high
    below = np.hypot(np.log(expected_ns / low), spread) if low > 0 else np.inf
    above = np.hypot(np.log(high / expected_ns), spread)
    return expected_ns * float(np.exp(-below)), expected_ns * float(np.exp(above))


def _factors(times: KernelTimes, masks: list[np.ndarray], draws: Float64) -> Float64:
    """Factor on each kernel's time, [kernels, draws], for standard normal draws of the groups, [draws, groups]."""
    factor = np.ones((len(times.ns), len(draws)))
    for mask, of_group in zip(masks, draws.T, strict=True):
        rows = np.flatnonzero(mask)
        low, high = -times.low[rows] / END, times.high[rows] / END
        for number, draw in enumerate(of_group.tolist()):
            if draw:
                factor[rows, number] = np.exp(draw * (low if draw < 0 else high))
    return factor


def _simulated(simulate: Simulate, times: KernelTimes, masks: list[np.ndarray], host_spread: float,
               draws: Float64) -> Float64:
    """Step times, ns, of draws for the groups of families and, last, for the host, [draws, groups + 1]."""
    return simulate(_factors(times, masks, draws[:, :-1]), [float(np.exp(z * host_spread / END)) for z in draws[:, -1]])


def _drawn(simulate: Simulate, times: KernelTimes, masks: list[np.ndarray], host_spread: float,
           expected_ns: float) -> tuple[float, float]:
    draws = np.random.default_rng(SEED).standard_normal((DRAWS // 2, len(masks) + 1))
    found = _simulated(simulate, times, masks, host_spread, np.concatenate([draws, -draws]))
    low, high = np.quantile(found, (0.1, 0.9))
    return min(float(low), expected_ns), max(float(high), expected_ns)


def _linear(simulate: Simulate, times: KernelTimes, masks: list[np.ndarray], host_spread: float,
            expected_ns: float) -> tuple[float, float]:
    below = above = 0.0
    ends = np.repeat(np.eye(len(masks) + 1), 2, axis=0) * END
    ends[::2] *= -1.0
    for step_ns in _simulated(simulate, times, masks, host_spread, ends).tolist():
        change = step_ns - expected_ns
        below, above = below + min(change, 0.0) ** 2, above + max(change, 0.0) ** 2
    return expected_ns - float(np.sqrt(below)), expected_ns + float(np.sqrt(above))
