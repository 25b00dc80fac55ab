"""``Likeness``: what measured steps say of plans like theirs beyond what rates can say.

A program that runs one plan 10% longer than its rates explain runs a plan that differs in little so too. What is left
of measured steps after ``calibrate`` fitted the rates, a logarithm, is carried over by a Gaussian process over plans'
and models' features:

    c(x) = k(x, steps) · (k(steps, steps) + noise)⁻¹ · what is left,     k = exp(−distance² / 2·reach²)

Reach 3 and noise 0.1 are the best of five and four on LLM-Foundry's tables, five rows of which predict the others: 5.4%
off in the mean of six draws each, 7.1% by rates alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import log2

import numpy as np

from planner.parallel.loads import Loads
from tracer.arrays import Float64
from tracer.parallel_plan import ParallelPlan, Recomputation, Sharding
from tracer.shape_only.transformer import TransformerShape

REACH = 3.0
NOISE = 0.1
WILD, LEAST_USUAL = 3.0, 0.01


@dataclass(frozen=True, slots=True)
class Likeness:
    """Residuals of measured steps, a logarithm each, by where they lie among plans.

    Attributes:
        places: features of each step.
        weights: of each in the sum.
        least, most: the correction's bounds: no more than was ever seen.
    """

    places: tuple[tuple[float, ...], ...]
    weights: tuple[float, ...]
    least: float
    most: float

    @staticmethod
    def of(steps: Sequence[Loads], left: Float64) -> Likeness:
        """Learn from steps and the logarithms of measured over estimated time; what is far more than usual counts as
        ``WILD`` times the median."""
        usual = max(float(np.median(np.abs(left))), LEAST_USUAL)
        left = np.clip(left, -WILD * usual, WILD * usual)
        places = np.array([features(each.plan, each.shape) for each in steps])
        weights = np.linalg.solve(_alike(places, places) + NOISE * np.eye(len(places)), left)
        return Likeness(tuple(map(tuple, places.tolist())), tuple(weights.tolist()), min(float(left.min()), 0.0),
                        max(float(left.max()), 0.0))

    def correction(self, loads: Loads) -> float:
        """The logarithm of the factor on a plan's step."""
        at = np.array([features(loads.plan, loads.shape)])
        found = float(_alike(at, np.array(self.places))[0] @ np.array(self.weights))
        return min(max(found, self.least), self.most)


@lru_cache(maxsize=4096)
def features(plan: ParallelPlan, shape: TransformerShape) -> tuple[float, ...]:
    """Where a step lies among plans and models: sizes in powers of two, switches by how much they change."""
    return (log2(plan.tp), log2(plan.pp), log2(plan.cp), log2(plan.ep), log2(shape.hidden), log2(shape.seq),
            log2(plan.samples), 0.5 * log2(plan.passes), 2.0 * any(run.experts for run in shape.runs),
            float(plan.recompute is not Recomputation.NONE), float(plan.sharding >= Sharding.GRADIENTS))


def _alike(one: Float64, other: Float64) -> Float64:
    distance = ((one[:, None] - other[None]) ** 2).sum(axis=2)
    return np.asarray(np.exp(-distance / 2 / REACH**2))
