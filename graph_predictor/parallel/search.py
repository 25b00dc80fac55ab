"""The search for the best plan of a decoder on a number of GPUs: plans that cannot be and those that do not fit are
named with the reason, and the rest are estimated."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from graph_predictor.parallel.decoder import check_decoder_plan
from graph_predictor.parallel.estimate import Estimate, Rates, estimate
from graph_predictor.parallel.loads import loads_of
from graph_predictor.parallel.memory import memory_of
from graph_predictor.parallel.pieces import LayerPieces
from kernel_models.collectives import CollectiveModel
from tracer.memory_account import MemoryAccount
from tracer.parallel_plan import MOST_TASKS, ParallelPlan, PlanError, Recomputation, Sharding
from tracer.shape_only.transformer import TransformerShape

MOST_MICROBATCH = 16
"""Sequences; beyond, kernels gain next to nothing."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """A feasible plan."""

    estimate: Estimate
    memory: MemoryAccount


@dataclass(slots=True)
class Refused:
    """Plans that cannot be, for one reason: how many, and the first of them."""

    reason: str
    example: str
    count: int = 0


@dataclass(slots=True)
class Found:
    """The result of a search: feasible plans, the fastest first, and why others are not among them."""

    plans: list[Ranked] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)

    @property
    def considered(self) -> int:
        """Plans in all."""
        return len(self.plans) + sum(each.count for each in self.refused)


def candidates(shape: TransformerShape, gpus: int, global_batch: int) -> Iterator[ParallelPlan]:
    """Every plan of so many GPUs that does ``global_batch`` sequences a step; some of them cannot be.

    Tensor parallelism goes with sequence parallelism, and sharded parameters with no pipeline: what frameworks do.
    """
    recompute = [Recomputation.NONE, Recomputation.FULL] + ([] if shape.flash else [Recomputation.SELECTIVE])
    for tp in _divisors(gpus):
        for pp in _divisors(gpus // tp):
            dp = gpus // tp // pp
            if global_batch % dp:
                continue
            for microbatch in range(1, MOST_MICROBATCH + 1):
                count, rest = divmod(global_batch // dp, microbatch)
                if rest or not 0 < count * pp <= MOST_TASKS:
                    continue
                for sharding in Sharding:
                    if (sharding and dp == 1) or (sharding > Sharding.OPTIMIZER and pp > 1):
                        continue
                    for again in recompute:
                        yield ParallelPlan(dp=dp, tp=tp, pp=pp, microbatch=microbatch, microbatches=count,
                                          sharding=sharding, recompute=again, sequence_parallel=tp > 1)


def search(shape: TransformerShape, gpus: int, global_batch: int, pieces: LayerPieces, collectives: CollectiveModel, *,
           memory_limit: float | None = None, rates: Rates | None = None,
           tick: Callable[[], None] = lambda: None) -> Found:
    """Estimate every plan that can be and fits.

    Args:
        memory_limit: bytes of a device; by default all it has.
        tick: called once a plan.

    Raises:
        PlanError: the cluster is too small, or the batch can be split by no number of replicas.
    """
    collectives.check_fits(gpus)
    found = _sorted_out(candidates(shape, gpus, global_batch), shape, pieces, collectives, memory_limit, rates, tick)
    if not found.considered:
        raise PlanError(f"A batch of {global_batch:,} sequences cannot be split over {gpus:,} GPUs by any plan of at "
                        f"most {MOST_TASKS:,} micro-batches; choose a batch that shares divisors with it.")
    return found


def price_plan(text: str, gpus: int, shape: TransformerShape, pieces: LayerPieces, collectives: CollectiveModel, *,
               memory_limit: float | None = None, rates: Rates | None = None) -> Found:
    """One plan, as ``ParallelPlan.parse`` reads it, as a search that found it or refused it.

    Raises:
        PlanError: the text is no plan, or one of another number of GPUs.
    """
    return _sorted_out([ParallelPlan.parse(text, gpus)], shape, pieces, collectives, memory_limit, rates, lambda: None)


def _sorted_out(
    plans: Iterable[ParallelPlan],
    shape: TransformerShape,
    pieces: LayerPieces,
    collectives: CollectiveModel,
    memory_limit: float | None,
    rates: Rates | None,
    tick: Callable[[], None],
) -> Found:
    limit = memory_limit if memory_limit is not None else pieces.device.memory_gb * 1e9
    reasons: dict[str, Refused] = {}
    found = Found()
    for plan in plans:
        tick()
        try:
            check_decoder_plan(plan, shape, collectives.topology)
            memory = memory_of(plan, shape, pieces)
            if (lacking := memory.lacking(limit, pieces.device.name)) is not None:
                raise PlanError(lacking)
        except PlanError as error:
            refused = reasons.setdefault(str(error), Refused(str(error), str(plan)))
            refused.count += 1
            continue
        found.plans.append(Ranked(estimate(loads_of(plan, shape, pieces, collectives), rates or Rates()), memory))
    # Of plans that take the same time, the one that needs least memory comes first.
    found.plans.sort(key=lambda each: (float(f"{each.estimate.time_us:.3g}"), each.memory.total))
    found.refused = sorted(reasons.values(), key=lambda each: -each.count)
    return found


def _divisors(number: int) -> list[int]:
    """Return the divisors of a number in ascending order."""
    low = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return low + [number // each for each in reversed(low) if each * each != number]
