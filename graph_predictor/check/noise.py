"""Whether repeated measurements got larger, beyond what repeating them does: a one-sided test on runs of step times.

Steps of one run share what the run met: the machine's other work, clocks, memory layout. Ten thousand steps of one run
say no more about the next run than a hundred do, so that a rank test of one run's steps against another's finds any two
runs different. Here a run is one observation, of the log of its typical step. Its variance has three parts:

* *between runs*, ``s²``: estimated from repeated runs where there are any, together with a prior of ``Prior.sd`` worth
  ``Prior.weight`` runs, s² = (weight · sd² + Σ(x − mean)²) / (weight + n − 1), as a scaled inverse χ² prior gives;
* *within a run*, the variance of its own median, by a bootstrap of blocks of consecutive steps (Künsch 1989), because
  neighbouring steps are alike.

* *what the machine did*, ``disturbed``: the spread that each run's recording shows of work that is always the same.

The difference less ``least`` over its standard error is Student's t with weight + n − 1 degrees of freedom; the null
hypothesis is "slower by no more than ``least``", so that a difference too small to matter never fails. The difference
is the smallest one of the medians', of the lower quartiles' and of the lower deciles': a program that got slower
moves all three, a machine that had a bad moment mostly the slower half.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Samples = npt.NDArray[np.float64]

QUANTILES = (0.1, 0.25, 0.5)
RESAMPLES = 400
SEED = 12


@dataclass(frozen=True, slots=True)
class Prior:
    """The knowledge of a quantity's noise before any run is repeated.

    Attributes:
        sd: standard deviation of the log from run to run of one program on one machine.
        weight: how many repeated runs that is worth.
        within: least standard deviation of the log within a run, for runs of few samples.
    """

    sd: float
    weight: float
    within: float = 0.01


@dataclass(frozen=True, slots=True)
class Slowdown:
    """The difference of new runs from old ones, as logs of ratios.

    Attributes:
        difference: new over old.
        low, high: ends of its two-sided 90% interval.
        p_value: how likely a difference this large were, if the program were slower by ``least`` at most.
        detectable: the smallest difference that these runs could have shown at the level that was asked for.
        base_runs, new_runs: how many runs were compared.
    """

    difference: float
    low: float
    high: float
    p_value: float
    detectable: float
    base_runs: int
    new_runs: int

    @property
    def confidence(self) -> float:
        """1 − p."""
        return 1.0 - self.p_value


def slowdown(base: Sequence[Sequence[float]], new: Sequence[Sequence[float]], prior: Prior, *, least: float,
             level: float, shared: float = 0.0, shared_sd: float = 0.0, disturbed: Sequence[float] = ()) -> Slowdown:
    """Compare runs; each is a list of positive samples.

    Args:
        base, new: runs before and after.
        prior: of this quantity.
        least: ratio − 1 that is too small to matter.
        level: p-value at which a test fails, for ``detectable``.
        shared: log of what both sides' common machine is known to have got slower by, taken off the difference.
        shared_sd: standard deviation of that.
        disturbed: standard deviation of the log that each run's recording shows by itself, old ones first.
    """
    from scipy.special import stdtr, stdtrit

    old_places, old_variance = _runs(base, prior)
    new_places, new_variance = _runs(new, prior)
    spread = [_squares(side) for side in (old_places, new_places)]
    freedom = prior.weight + len(base) + len(new) - 2
    # Each quantile has its own spread; the widest one counts.
    between = (prior.weight * prior.sd**2 + max(a + b for a, b in zip(*spread, strict=True))) / freedom
    seen = [float(np.sum(np.square(side))) / max(len(side), 1) ** 2
            for side in (disturbed[:len(base)], disturbed[len(base):])]
    error = float(np.sqrt(between * (1 / len(base) + 1 / len(new)) + old_variance + new_variance + shared_sd**2
                          + sum(seen)))
    moved = float(np.min(new_places.mean(axis=0) - old_places.mean(axis=0))) - shared
    floor = float(np.log1p(least))
    return Slowdown(
        difference=moved, low=moved + error * float(stdtrit(freedom, 0.05)),
        high=moved + error * float(stdtrit(freedom, 0.95)),
        p_value=float(stdtr(freedom, -(moved - floor) / error)),
        detectable=floor - error * float(stdtrit(freedom, level)), base_runs=len(base), new_runs=len(new))


def _runs(runs: Sequence[Sequence[float]], prior: Prior) -> tuple[Samples, float]:
    """Quantiles of each run, [runs, quantiles], in logs; and the variance of the mean run from within runs."""
    logs = [np.log(np.maximum(np.asarray(run, np.float64), 1e-9)) for run in runs]
    places = np.stack([np.quantile(each, QUANTILES) for each in logs])
    variances = [max(_variance_of_median(each), prior.within**2 / len(each)) for each in logs]
    return places, float(np.sum(variances)) / len(runs) ** 2


def _squares(places: Samples) -> Samples:
    """Sum of squared deviations from the mean, of each quantile."""
    return np.asarray(((places - places.mean(axis=0)) ** 2).sum(axis=0), np.float64)


def _variance_of_median(logs: Samples) -> float:
    """Resample blocks of about n^(1/3) · 1.5 neighbours; the blocks wrap around."""
    n = len(logs)
    if n < 3:
        return 0.0
    block = max(1, min(n // 2, round(1.5 * n ** (1 / 3))))
    draw = np.random.default_rng(SEED).integers(0, n, size=(RESAMPLES, -(-n // block)))
    rows = (draw[:, :, None] + np.arange(block)).reshape(RESAMPLES, -1)[:, :n] % n
    return float(np.var(np.median(logs[rows], axis=1)))
