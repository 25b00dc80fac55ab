"""How fast a device may compute under its power limit.

Power is a static share of the limit plus the energy of the operations; an operation costs more at a higher clock, as
the voltage must rise. A kernel shorter than the limit's averaging time may take more power than the limit:

    allowed(t) = limit · (1 + boost / (1 + t/τ))
    allowed(t) = static · limit + 2 · lanes · used · f · e · energy · (f / 700 MHz)^β   → f, at most the boost clock

with e the energy of an operation at 16 nm and 700 MHz and ``energy`` the process's relative one (``Figures``). A P4
and a T4 run products at 50–60% of their boost clocks, which teaches e, β, boost and τ; a V100 and an A100 hardly slow
down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from cross_device.figures import Figures
from tracer.arrays import Float64

_REFERENCE_MHZ = 700.0
_CORNER = 16.0
"""Exponent of the smooth minimum of the power-limited and the boost clock."""
_SHORT_US = 1_000.0


@dataclass(frozen=True, slots=True)
class PowerLaw:
    """The law's constants; the values here are where fits begin.

    Attributes:
        energy_pj: of a multiply or add at 16 nm and 700 MHz, memory traffic included, 10⁻¹² J.
        beta: exponent of the clock in an operation's energy.
        boost: share by which a very short kernel may exceed the limit.
        tau_us: duration at which half of that is gone.
        static: share of the limit that does not depend on the work.
        used: share of the lanes that the best kernels keep busy.
    """

    energy_pj: float = 17.0
    beta: float = 0.5
    boost: float = 0.3
    tau_us: float = 3_000.0
    static: float = 0.25
    used: float = 0.85

    def tflops(self, figures: Figures, duration_us: Float64) -> Float64:
        """Rate of the best kernels of a given duration, 10¹² operations/s, [n]."""
        per_mhz = 2e-6 * figures.lanes * self.used
        allowed = figures.power_w * (1 + self.boost / (1 + duration_us / self.tau_us) - self.static)
        limited = (allowed * _REFERENCE_MHZ ** self.beta / (self.energy_pj * figures.energy * per_mhz)) \
            ** (1 / (1 + self.beta))
        clock = (limited ** -_CORNER + figures.clock_mhz ** -_CORNER) ** (-1 / _CORNER)
        return per_mhz * clock

    def duration_us(self, figures: Figures, operations: Float64) -> Float64:
        """Time of the best kernel for so many operations, [n]: rate and duration depend on each other."""
        time = operations / 1e6 / self.tflops(figures, np.full(len(operations), _SHORT_US))
        for _ in range(6):
            time = operations / 1e6 / self.tflops(figures, time)
        return time

    def state(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def best_rates(operations: Float64, time_us: Float64, *, least: int = 20) -> tuple[Float64, Float64]:
    """Durations (half-decades, µs) and the rates that the fastest tenth of the kernels of each reaches, 10¹²/s."""
    half_decade = np.round(2 * np.log10(time_us)) / 2
    durations, rates = [], []
    for bin_ in np.unique(half_decade[(half_decade >= 3) & (half_decade <= 5)]):
        here = half_decade == bin_
        if here.sum() >= least:
            durations.append(10.0 ** bin_)
            rates.append(float(np.quantile(operations[here] / 1e6 / time_us[here], 0.9)))
    return np.array(durations), np.array(rates)


def fit_power_law(envelopes: Sequence[tuple[Figures, Float64, Float64]], start: PowerLaw | None = None) -> PowerLaw:
    """Fit energy, boost, τ and the lanes in use to best rates; β and the static share are kept.

    Args:
        envelopes: a device, durations (µs) and best rates (10¹²/s) of each.
        start: where the fit begins and what it is drawn to, weakly.
    """
    from scipy.optimize import least_squares

    start = start or PowerLaw()
    names = ("energy_pj", "boost", "tau_us", "used")
    first = np.log([getattr(start, name) for name in names])

    def law(values: Float64) -> PowerLaw:
        return replace(start, **{name: float(value) for name, value in zip(names, np.exp(values), strict=True)})

    def errors(values: Float64) -> Float64:
        now = law(values)
        return np.concatenate([0.1 * (values - first), *(
            np.log(now.tflops(figures, duration) / rate) for figures, duration, rate in envelopes if len(rate))])

    upper = np.log([200.0, 3.0, 1e5, 1.0])
    fitted = least_squares(errors, np.minimum(first, upper - 1e-3), bounds=(np.log([1.0, 1e-3, 10.0, 0.3]), upper))
    return law(fitted.x)
