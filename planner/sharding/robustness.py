"""How a sharding bears data that drift: the step of the same plan when rows are looked up by other laws or bags are
longer, beside the best plan that could be found for that data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.sharding.choices import choices_of
from planner.sharding.loads import assignment_of
from planner.sharding.plan import ShardingPlan
from planner.sharding.problem import ShardingProblem, own_order
from planner.sharding.scoring import Scores
from planner.sharding.search import search
from planner.sharding.step import StepModel
from tracer.lookup_data.tables import EmbeddingTable

BAG_DRIFT = 0.4
"""Standard deviation of the logarithm of each table's bag length after it drifted: by half or by twice for one in
twelve. An assumption."""


@dataclass(frozen=True, slots=True)
class DataDrift:
    """Other data for the same tables.

    Attributes:
        name: for reports.
        skew: exponent of every table's Zipf law; ``None``: as before.
        bags: standard deviation of the logarithm of what each table's bag length is multiplied by.
    """

    name: str
    skew: float | None = None
    bags: float = 0.0

    def applied(self, tables: Sequence[EmbeddingTable], seed: int = 0) -> tuple[EmbeddingTable, ...]:
        """The tables as that data look rows up in them."""
        factors = np.empty(len(tables))
        factors[own_order(tables)] = np.exp(self.bags * np.random.default_rng(seed).standard_normal(len(tables)))
        found = []
        for table, factor in zip(tables, factors.tolist(), strict=True):
            changed = table if self.skew is None else replace(table, skew=self.skew, reuse=(), reuse_lookups=0)
            if self.bags:
                # The law by which rows are drawn stays: the histogram of the longer batch follows from it.
                changed = replace(changed, bag=changed.bag * factor,
                                  longest_bag=math.ceil(changed.longest_bag * factor))
            found.append(changed)
        return tuple(found)


def drifts(skews: Sequence[float]) -> list[DataDrift]:
    """A drift for each exponent, and one of the bag lengths."""
    return [*(DataDrift(f"skew {skew:g}", skew) for skew in skews), DataDrift("bag lengths drift", bags=BAG_DRIFT)]


@dataclass(frozen=True, slots=True)
class DriftedStep:
    """The steps of plans under drifted data.

    Attributes:
        drift: the data.
        plans_us: the step of each plan, in their order, µs; infinite where it no longer fits the memory.
        best_us: of the best plan that a search finds for this data.
    """

    drift: DataDrift
    plans_us: tuple[float, ...]
    best_us: float

    @property
    def regret(self) -> float:
        """Return how much longer the first plan takes than the best for this data, as a share."""
        return self.plans_us[0] / self.best_us - 1.0


def drifted(problem: ShardingProblem, plans: Sequence[ShardingPlan], drift: DataDrift, seed: int = 0) -> DriftedStep:
    """The steps of plans when the data drifted.

    Raises:
        ShardingError: the drifted tables' batches fit nowhere.
    """
    changed = replace(problem, tables=drift.applied(problem.tables, seed))
    model = StepModel(changed)
    steps = []
    for plan in plans:
        scores = Scores(changed, choices_of(changed, plan.shardings), model)
        standing = scores.standing(assignment_of(plan, scores.choices))
        steps.append(standing.step_us if scores.fits(standing) else math.inf)
    best = search(changed, 1, seed, model=model).best[0][0]
    # A plan that was carried over may still beat what the search finds anew.
    return DriftedStep(drift, tuple(steps), min([best, *steps]))
