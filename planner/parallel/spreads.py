"""``PlanSpreads``: how far a plan's step may be off, by what it is made of.

Published jobs are off from their estimates by more than their kernels' errors: each runs software, clocks and networks
of its own. The logarithm of measured over estimated time is taken as normal, with a standard deviation of

    s² = step² + Σ over products, others, collectives, host of (share of the working step · spread of the kind)²
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

Z80 = 1.2816
"""Standard deviations of a normal distribution about its mean between which 80% lie."""


@dataclass(frozen=True, slots=True)
class PlanSpreads:
    """Standard deviations of logarithms: of a whole step, and of what each kind of work in it takes.

    Fitted by largest likelihood, each table counting as much, to half of 1,026 published steps on A100, H100 and B200,
    chosen by a checksum of the series' names (``benchmarks/plan_intervals.py``, which judges the other half).

    Attributes:
        step: whatever it is made of.
        products, others: matrix products with fused attention, and all other kernels.
        collectives: those that the step waits for.
        host: what it takes longer than the device.
    """

    step: float = 0.06
    products: float = 0.116
    others: float = 0.339
    collectives: float = 0.282
    host: float = 1.01

    def scaled(self, factor: float) -> PlanSpreads:
        """Return all of them times a factor."""
        return PlanSpreads(*(factor * float(getattr(self, each.name)) for each in fields(self)))

    def within(self, kernels: float, collectives: float) -> PlanSpreads:
        """Return those of work whose own models are known better, by their 80% half-widths as shares: fitted kernel
        models or measured collectives."""
        return PlanSpreads(self.step, min(self.products, kernels / Z80), min(self.others, kernels / Z80),
                       min(self.collectives, collectives / Z80), self.host)

    def of(self, products: float, others: float, collectives: float, host: float) -> float:
        """Return the logarithm's standard deviation of a step of such shares."""
        parts = (self.step, products * self.products, others * self.others, collectives * self.collectives,
                 host * self.host)
        return float(np.sqrt(sum(part * part for part in parts)))


PUBLISHED = PlanSpreads()
"""Those of jobs about which nothing is known but what is published."""
