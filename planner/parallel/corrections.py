"""``CorrectionFactors``: factors between a user's jobs and the models of their parts, their uncertainty, and residuals
of measured steps. ``parallel.calibrate`` fits them."""

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
"""Half-width, in standard deviations, of the interval that holds 80% of a normal distribution."""


@dataclass(frozen=True, slots=True)
class PlanSpreads:
    """Standard deviations of the logarithm of measured over estimated time, for a step and each kind of its work.

    Published jobs differ from their estimates by more than their kernels' errors, because each has its own software,
    clocks and networks. The logarithm of measured over estimated time is taken as normal, with

        s² = step² + Σ over products, others, collectives, host of (share of the working step · spread of the kind)²

    Fitted by largest likelihood, with equal weight for each table, to half of 1,026 published steps on A100, H100 and
    B200. A checksum of the series' names chooses the half; ``benchmarks/plan_intervals.py`` judges the other.

    Attributes:
        step: spread of the whole step, independent of its parts.
        products, others: spreads of matrix products with fused attention, and of all other kernels.
        collectives: spread of exposed collectives.
        host: spread of the host time in addition to the device's.
    """

    step: float = 0.06
    products: float = 0.116
    others: float = 0.339
    collectives: float = 0.282
    host: float = 1.01

    def scaled(self, factor: float) -> PlanSpreads:
        """Return these spreads multiplied by a factor."""
        return PlanSpreads(*(factor * float(getattr(self, each.name)) for each in fields(self)))

    def within(self, kernels: float, collectives: float) -> PlanSpreads:
        """Return these spreads, narrowed if fitted kernel models or measured collectives have narrower intervals. The
        arguments are 80% half-widths as shares."""
        return PlanSpreads(self.step, min(self.products, kernels / Z80), min(self.others, kernels / Z80),
                       min(self.collectives, collectives / Z80), self.host)

    def of(self, products: float, others: float, collectives: float, host: float) -> float:
        """Return the standard deviation of a step's logarithm; the arguments are shares of the working step."""
        parts = (self.step, products * self.products, others * self.others, collectives * self.collectives,
                 host * self.host)
        return float(np.sqrt(sum(part * part for part in parts)))


PUBLISHED = PlanSpreads()
"""Spreads of jobs without own measurements."""

REACH, NOISE = 3.0, 0.1
"""Settings of ``ResidualModel`` for plans: the best of five and of four values on LLM-Foundry's tables, where five rows
predict the others. The mean error over six draws each is 5.4%, and 7.1% by factors alone."""
WILD, LEAST_USUAL = 3.0, 0.01
"""Choices: a step's error counts at most this multiple of the median error; least value of that median."""


@dataclass(frozen=True, slots=True)
class ResidualModel:
    """Residuals of measured steps after factors were fitted, applied to steps with similar features.

    If a program runs one plan 10% longer than its factors explain, it likely does so for similar plans. The residual
    logarithm is carried over by a Gaussian process over features:

        c(x) = k(x, steps) · (k(steps, steps) + noise)⁻¹ · residuals,     k = exp(−distance² / 2·reach²)

    Attributes:
        places: features of each measured step.
        weights: weight of each step in the sum.
        least, most: limits of the correction: the least and the largest residual seen.
        reach: distance over which steps are similar.
    """

    places: tuple[tuple[float, ...], ...]
    weights: tuple[float, ...]
    least: float
    most: float
    reach: float = REACH

    @staticmethod
    def of(places: Float64, left: Float64, reach: float = REACH, noise: float = NOISE,
           wild: float = WILD) -> ResidualModel:
        """Learn from steps' features [n, d] and logarithms of measured over estimated time [n]. The logarithms are
        clipped at ``wild`` times the median of their sizes."""
        usual = max(float(np.median(np.abs(left))), LEAST_USUAL)
        left = np.clip(left, -wild * usual, wild * usual)
        weights = np.linalg.solve(_alike(places, places, reach) + noise * np.eye(len(places)), left)
        return ResidualModel(tuple(map(tuple, places.tolist())), tuple(weights.tolist()), min(float(left.min()), 0.0),
                             max(float(left.max()), 0.0), reach)

    def at(self, place: tuple[float, ...]) -> float:
        """Return the logarithm of the correction factor for a step with these features."""
        found = float(_alike(np.array([place]), np.array(self.places), self.reach)[0] @ np.array(self.weights))
        return min(max(found, self.least), self.most)


def _alike(one: Float64, other: Float64, reach: float) -> Float64:
    distance = ((one[:, None] - other[None]) ** 2).sum(axis=2)
    return np.asarray(np.exp(-distance / 2 / reach**2))


@lru_cache(maxsize=4096)
def features(plan: ParallelPlan, shape: TransformerShape) -> tuple[float, ...]:
    """Return a step's coordinates for ``ResidualModel``: logarithms to base 2 of sizes, and weighted switches."""
    return (log2(plan.tp), log2(plan.pp), log2(plan.cp), log2(plan.ep), log2(shape.hidden), log2(shape.seq),
            log2(plan.samples), 0.5 * log2(plan.passes), 2.0 * any(run.experts for run in shape.runs),
            float(plan.recompute is not Recomputation.NONE), float(plan.sharding >= Sharding.GRADIENTS))


@dataclass(frozen=True, slots=True)
class CorrectionFactors:
    """Factors between a real job and its models; ``parallel.calibrate`` fits them to a user's own steps.

    The defaults for the host lie between vTrain's A100 hosts (52 to 55 µs and 88 to 112 µs: ``benchmarks/vtrain.py``)
    and H100 hosts, where Megatron-LM's own small jobs take 0.65 of the A100 hosts' time. Collectives slow overlapping
    work by 18.9% in the mean, by 40% at most, with FSDP and pipelines on four GPU types (Lee et al., "Characterizing
    Compute-Communication Overlap", 2025). The jitter is the growth of NVIDIA's published fp8 steps of Llama 3.1 8B and
    70B from 8 to 128 and from 64 to 2,048 H100 (dgxc-benchmarking: 1.6 to 3.5%).

    Attributes:
        products, others: factors on matrix products and on everything else.
        collectives, network: factors on collectives within a node, and on collectives between nodes.
        host_us: host time of each kernel's launch; host_collective_us: of each collective's launch.
        step_us: constant time of each step.
        meeting_us, crossing_us: extra host time of each tensor-parallel collective, for each rank of its group but one,
            and for each rank on another node (``planner.parallel.frameworks``).
        transfer_us, crossing_transfer_us: extra cost of each transfer between stages, anywhere and between nodes.
        interference: share of a collective's time by which overlapping work takes longer, within a node. Collectives
            between nodes count half: NCCL uses half as many channels for them.
        jitter: standard deviation of GPUs' speeds; a step waits for the slowest GPU.
        meet: exponent by which host and GPU times combine: (host^meet + gpu^meet)^(1/meet). If large, the slower one
            decides; if smaller, each waits for the other at times.
        spreads: relative errors of the estimate.
        residuals: corrections from measured steps of similar plans, beyond these factors.
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
        """Return the factors with ``meeting_us`` and ``crossing_us`` included for a plan's tensor-parallel groups."""
        return replace(self, host_collective_us=self.host_collective_us + (plan.tp - 1) * self.meeting_us,
                       crossing_us=plan.tp * self.crossing_us)


UNCORRECTED = CorrectionFactors()
"""The factors of a job without measured steps."""


def fit_factors(log_ratios: Callable[[CorrectionFactors], Float64], start: CorrectionFactors,
                widths: Mapping[str, float], error: float, *, firm: bool = False) -> CorrectionFactors:
    """Return the factors with the least squared log errors, robustly, that deviate least from ``start``.

    Args:
        log_ratios: returns the logarithms of predicted over measured times for some factors [n].
        start: factors around which the fitted ones lie.
        widths: the fitted factors, and the standard deviation of each one's logarithm around its start.
        error: scale of a time's log error relative to which deviations are weighed; larger errors count linearly, not
            squared.
        firm: whether deviations count squared at any size; else large deviations count linearly, like errors.
    """
    middle = np.log([getattr(start, name) for name in widths])
    width = np.array(list(widths.values()))

    def factors_of(values: Float64) -> CorrectionFactors:
        return replace(start, **dict(zip(widths, np.exp(values).tolist(), strict=True)))

    def strange(values: Float64) -> Float64:
        away = (values - middle) / width
        if firm:  # the soft loss of this value is the square
            away *= np.sqrt(1 + away**2 / 4)
        return np.concatenate([log_ratios(factors_of(values)) / error, away])

    return factors_of(optimize.least_squares(strange, middle, loss="soft_l1", x_scale=width, diff_step=1e-3).x)
