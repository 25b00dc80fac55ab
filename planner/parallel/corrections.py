"""``CorrectionFactors``: by what a user's jobs differ from the models of their parts, how far off that may be, and what
is left of measured steps; ``parallel.calibrate`` fits them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import log2

import numpy as np

from tracer.arrays import Float64
from tracer.lazy import optimize
from tracer.parallel_plan import ParallelPlan, Recomputation, Sharding
from tracer.shape_only.transformer import TransformerShape

Z80 = 1.2816
"""Standard deviations of a normal distribution about its mean between which 80% lie."""


@dataclass(frozen=True, slots=True)
class PlanSpreads:
    """Standard deviations of logarithms: of a whole step, and of what each kind of work in it takes.

    Published jobs are off from their estimates by more than their kernels' errors: each runs software, clocks and
    networks of its own. The logarithm of measured over estimated time is taken as normal, with

        s² = step² + Σ over products, others, collectives, host of (share of the working step · spread of the kind)²

    Fitted by largest likelihood, with equal weight for each table, to half of 1,026 published steps on A100, H100 and
    B200. A checksum of the series' names chooses the half; ``benchmarks/plan_intervals.py`` judges the other.

    Attributes:
        step: of the whole step, independent of its parts.
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

REACH, NOISE = 3.0, 0.1
"""Of a plan's steps: the best of five and of four on LLM-Foundry's tables, where five rows predict the others. The mean
error over six draws each is 5.4%, and 7.1% by factors alone."""
WILD, LEAST_USUAL = 3.0, 0.01
"""Choices: times the median that a step's error counts for at most, and the least that the median is taken to be."""


@dataclass(frozen=True, slots=True)
class ResidualModel:
    """What is left of measured steps after factors were fitted, by where the steps lie among others.

    A program that runs one plan 10% longer than its factors explain runs a plan that differs in little so too. The
    logarithm that is left is carried over by a Gaussian process over features:

        c(x) = k(x, steps) · (k(steps, steps) + noise)⁻¹ · what is left,     k = exp(−distance² / 2·reach²)

    Attributes:
        places: features of each step.
        weights: of each in the sum.
        least, most: the correction's bounds: no more than was ever seen.
        reach: distance over which steps are alike.
    """

    places: tuple[tuple[float, ...], ...]
    weights: tuple[float, ...]
    least: float
    most: float
    reach: float = REACH

    @staticmethod
    def of(places: Float64, left: Float64, reach: float = REACH, noise: float = NOISE,
           wild: float = WILD) -> ResidualModel:
        """Learn from steps' features [n, d] and logarithms of measured over estimated time [n]; what is far more than
        usual counts as ``wild`` times the median."""
        usual = max(float(np.median(np.abs(left))), LEAST_USUAL)
        left = np.clip(left, -wild * usual, wild * usual)
        weights = np.linalg.solve(_alike(places, places, reach) + noise * np.eye(len(places)), left)
        return ResidualModel(tuple(map(tuple, places.tolist())), tuple(weights.tolist()), min(float(left.min()), 0.0),
                             max(float(left.max()), 0.0), reach)

    def at(self, place: tuple[float, ...]) -> float:
        """Return the logarithm of the factor on a step of these features."""
        found = float(_alike(np.array([place]), np.array(self.places), self.reach)[0] @ np.array(self.weights))
        return min(max(found, self.least), self.most)


def _alike(one: Float64, other: Float64, reach: float) -> Float64:
    distance = ((one[:, None] - other[None]) ** 2).sum(axis=2)
    return np.asarray(np.exp(-distance / 2 / reach**2))


@lru_cache(maxsize=4096)
def features(plan: ParallelPlan, shape: TransformerShape) -> tuple[float, ...]:
    """Where a step lies among plans and models: sizes in powers of two, switches by how much they change."""
    return (log2(plan.tp), log2(plan.pp), log2(plan.cp), log2(plan.ep), log2(shape.hidden), log2(shape.seq),
            log2(plan.samples), 0.5 * log2(plan.passes), 2.0 * any(run.experts for run in shape.runs),
            float(plan.recompute is not Recomputation.NONE), float(plan.sharding >= Sharding.GRADIENTS))


@dataclass(frozen=True, slots=True)
class CorrectionFactors:
    """Factors of a real job over its models; ``parallel.calibrate`` fits them to a user's own steps.

    The host's are between those of vTrain's A100 hosts (52 to 55 µs and 88 to 112 µs: ``benchmarks/vtrain.py``) and
    H100 hosts, on which Megatron-LM's own small jobs take 0.65 of what those would. Collectives slow overlapping work
    by 18.9% in the mean, by 40% at most, of FSDP and pipelines on four GPU types (Lee et al., "Characterizing
    Compute-Communication Overlap", 2025). The jitter is what the fp8 steps of Llama 3.1 8B and 70B that NVIDIA
    publishes grow by from 8 to 128 and from 64 to 2,048 H100 (dgxc-benchmarking: 1.6 to 3.5%).

    Attributes:
        products, others: factors on matrix products and on everything else.
        collectives, network: factors on collectives within a node, and on those that leave it.
        host_us: host time of each kernel's launch; host_collective_us: of each collective.
        step_us: once a step.
        meeting_us, crossing_us: extra host time of each tensor-parallel collective, for each rank of its group but one,
            and for each rank on another node (``planner.parallel.frameworks``).
        transfer_us, crossing_transfer_us: extra cost of each transfer between stages, anywhere and between nodes.
        interference: share of a collective's time by which overlapping work takes longer, within a node. Collectives
            that leave the node count half: NCCL fills half as many channels for them.
        jitter: standard deviation of GPUs' speeds; a step waits for the slowest of all.
        meet: how host and GPU share a stretch of work: (host^meet + gpu^meet)^(1/meet). Large: the slower one decides;
            smaller: each waits for the other at times.
        spreads: how far off all of this may be.
        residuals: what measured steps say of plans like theirs beyond all this.
    """

    products: float = 1.0
    others: float = 1.0
    collectives: float = 1.0
    network: float = 1.0
    host_us: float = 35.0
    host_collective_us: float = 60.0
    step_us: float = 0.0
    meeting_us: float = 0.0
    crossing_us: float = 0.0
    transfer_us: float = 0.0
    crossing_transfer_us: float = 0.0
    interference: float = 0.19
    jitter: float = 0.02
    meet: float = 3.0
    spreads: PlanSpreads = PUBLISHED
    residuals: ResidualModel | None = None

    def meeting(self, plan: ParallelPlan) -> CorrectionFactors:
        """Return the factors with what a collective within a plan's layers costs the hosts that meet there."""
        return replace(self, host_collective_us=self.host_collective_us + (plan.tp - 1) * self.meeting_us,
                       crossing_us=plan.tp * self.crossing_us)


UNCORRECTED = CorrectionFactors()
"""The factors of a job without measured steps."""


def fit_factors(log_ratios: Callable[[CorrectionFactors], Float64], start: CorrectionFactors,
                widths: Mapping[str, float], error: float, *, firm: bool = False) -> CorrectionFactors:
    """Return the factors with the least squared log errors, robustly, that are least strange.

    Args:
        log_ratios: of predicted over measured times with some factors [n].
        start: factors around which the fitted ones lie.
        widths: the factors that are fitted, and the standard deviation of each one's logarithm around its start.
        error: log scale of a time's error against which strangeness is weighed, and beyond which errors count by their
            size, not its square.
        firm: strangeness counts by its square however large; else, as errors do, by its size where it is large.
    """
    middle = np.log([getattr(start, name) for name in widths])
    width = np.array(list(widths.values()))

    def factors_of(values: Float64) -> CorrectionFactors:
        return replace(start, **dict(zip(widths, np.exp(values).tolist(), strict=True)))

    def strange(values: Float64) -> Float64:
        away = (values - middle) / width
        if firm:  # its soft loss is then the square
            away *= np.sqrt(1 + away**2 / 4)
        return np.concatenate([log_ratios(factors_of(values)) / error, away])

    return factors_of(optimize.least_squares(strange, middle, loss="soft_l1", x_scale=width, diff_step=1e-3).x)
