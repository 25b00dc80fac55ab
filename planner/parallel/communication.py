"""``study_communication``: what a plan's step communicates, why, in messages of which size, and what of it work waits
for.

Messages are those of ``loads.plan_calls``, which estimates price, times how often a rank of one stage makes each in a
step. Exposed is what the step would save if a cause's collectives cost nothing, by the same ``estimate``: what work
hides counts only as far as it slows that work down.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from graph_predictor.comm.mixing import Mixture, mixture
from graph_predictor.request.memory_fit import Fit, fit_of
from kernel_models.collectives import (
    CollectiveCall,
    CollectiveKind,
    CollectiveModel,
    Topology,
    bus_factor,
    price_calls,
)
from planner.parallel.estimate import Estimate, Rates, estimate
from planner.parallel.loads import (
    BlockLoads,
    CallName,
    Exchange,
    Loads,
    PlanCalls,
    loads_of,
    plan_calls,
    stage_parameters,
)
from planner.parallel.memory import fullest_of
from planner.parallel.pieces import LayerPieces
from planner.parallel.spreads import Z80
from planner.parallel.stages import recomputed, spread
from tracer.parallel_plan import ParallelPlan, Recomputation, Sharding
from tracer.shape_only.transformer import TransformerShape

BUCKET_PARAMETERS, BUCKET_PARAMETERS_A_REPLICA = 40_000_000, 1_000_000
"""Parameters whose gradients Megatron-Core reduces at once: the larger of the first and of the second for each replica
(``DistributedDataParallelConfig.bucket_size``); all at once where nothing is to be overlapped."""


class CommCause(str, Enum):
    """Why ranks communicate."""

    TENSOR = "tensor parallelism"
    CONTEXT = "context parallelism"
    EXPERTS = "experts"
    VOCABULARY = "vocabulary and loss"
    PIPELINE = "pipeline"
    GRADIENTS = "gradients"
    PARAMETERS = "parameters"
    TIED = "tied embedding"


_IN_BLOCKS = {
    CommCause.TENSOR: ("forward", "backward", "beside_forward", "beside_backward"),
    CommCause.CONTEXT: ("context_forward", "context_backward"),
    CommCause.EXPERTS: ("experts_forward", "experts_backward"),
    CommCause.GRADIENTS: ("reduce",), CommCause.PARAMETERS: ("gather",)}
_OUTSIDE = {
    CommCause.VOCABULARY: ("embedding_forward", "head_forward", "head_backward"), CommCause.TIED: ("tied",),
    CommCause.PIPELINE: ("transfer",), CommCause.GRADIENTS: ("reduce", "root_reduce"),
    CommCause.PARAMETERS: ("gather", "root_gather")}
_NAMED = {"block": CommCause.TENSOR, "context": CommCause.CONTEXT, "experts": CommCause.EXPERTS,
          "embedding": CommCause.VOCABULARY, "loss": CommCause.VOCABULARY, "head": CommCause.VOCABULARY,
          "transfer": CommCause.PIPELINE, "reduce": CommCause.GRADIENTS, "gather": CommCause.PARAMETERS,
          "tied": CommCause.TIED}


@dataclass(frozen=True, slots=True)
class StepMessages:
    """Equal collectives of a rank's step.

    Attributes:
        cause, kind: of them.
        ranks, nodes: that take part, and that these are on.
        payload_bytes: of each (nccl-tests' size).
        count: in a step; not whole where a part of a block is computed again.
        us: of each, alone.
    """

    cause: CommCause
    kind: CollectiveKind
    ranks: int
    nodes: int
    payload_bytes: float
    count: float
    us: float

    @property
    def volume_bytes(self) -> float:
        """Payload of all."""
        return self.count * self.payload_bytes

    @property
    def wire_bytes(self) -> float:
        """Bytes that leave a rank."""
        return self.volume_bytes * bus_factor(self.kind, self.ranks)


@dataclass(frozen=True, slots=True)
class ExposedTime:
    """The time a step would save if a cause's collectives, or all, cost nothing, µs, and the same with collectives as
    long as the ends of their 80% interval in published steps (``PlanSpreads.collectives``)."""

    us: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class PlanCommunication:
    """The communication of one plan's step.

    Attributes:
        model: the decoder's name.
        shape: its sizes.
        estimate: of the step.
        fit: whether it fits the device.
        stage: of the ranks that ``messages`` are of: those from which most bytes leave.
        messages: of a step of one of them, by cause.
        exposed: of each cause that there is.
        all_exposed: of all of them together, which hide behind the same work.
    """

    model: str
    shape: TransformerShape
    estimate: Estimate
    fit: Fit
    stage: int
    messages: tuple[StepMessages, ...]
    exposed: dict[CommCause, ExposedTime]
    all_exposed: ExposedTime

    @property
    def wire_bytes(self) -> float:
        """Bytes that leave a rank in a step."""
        return sum(each.wire_bytes for each in self.messages)

    @property
    def alone_us(self) -> float:
        """All collectives one after another, µs."""
        return sum(each.count * each.us for each in self.messages)

    def histogram(self) -> dict[tuple[CollectiveKind, int], tuple[float, float]]:
        """Return count and payload of messages by kind and size: the power of two that it is at least."""
        found: dict[tuple[CollectiveKind, int], tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
        for each in self.messages:
            at = each.kind, int(math.log2(max(each.payload_bytes, 1.0)))
            count, volume = found[at]
            found[at] = count + each.count, volume + each.volume_bytes
        return dict(sorted(found.items()))


def study_communication(model: str, shape: TransformerShape, plan: ParallelPlan, pieces: LayerPieces,
                        collectives: CollectiveModel, rates: Rates, limit_bytes: float) -> PlanCommunication:
    """Find what a plan communicates and what of it the step waits for.

    Raises:
        PlanError: the model does not divide as the plan wants it, or the cluster is too small.
    """
    loads = loads_of(plan, shape, pieces, collectives)
    whole = estimate(loads, rates)
    stages = [messages_of(plan, shape, collectives, stage) for stage in range(plan.pp)]
    stage = max(range(plan.pp), key=lambda each: sum(row.wire_bytes for row in stages[each]))
    causes = {row.cause for rows in stages for row in rows}
    exposed = {cause: _exposed(loads, {cause}, whole, rates) for cause in CommCause if cause in causes}
    return PlanCommunication(model, shape, whole, fit_of(fullest_of(plan, shape, pieces), limit_bytes), stage,
                             stages[stage], exposed, _exposed(loads, set(CommCause), whole, rates))


def mixture_of_plan(plan: ParallelPlan, shape: TransformerShape, collectives: CollectiveModel) -> Mixture:
    """Find who does the collectives of a plan's step, of a rank of the stage that does most of them."""
    found = [calls_of(plan, shape, collectives.topology, stage) for stage in range(plan.pp)]
    most = max(found, key=lambda rows: sum(
        call.payload_bytes * count * bus_factor(call.kind, call.ranks) for _, call, count in rows))
    return mixture([call for _, call, _ in most], [count for _, _, count in most], collectives)


def calls_of(plan: ParallelPlan, shape: TransformerShape, on: Topology,
             stage: int) -> list[tuple[CommCause, CollectiveCall, float]]:
    """Return all that a rank of a stage sends and receives in a step, and how often; what is overlapped in pieces
    counts as whole."""
    calls = plan_calls(replace(plan, tensor_overlap=False), shape, on)
    counts = _counts(calls, plan, shape, stage)
    found: dict[tuple[CommCause, CollectiveCall], float] = defaultdict(float)
    for key, count in counts.items():
        name = key if isinstance(key, str) else next(part for part in key if isinstance(part, str))
        cause = _NAMED[name.removeprefix("root ").split()[0]]
        for row, times in calls.of[key]:
            call = calls.calls[row]
            whole_stage = key in (("reduce", stage), ("gather", stage))
            parts = _parts(plan, shape, stage) if whole_stage else 1
            number = count * times
            if name == "block forward" and plan.recompute not in (Recomputation.NONE, Recomputation.FULL):
                number -= _last_left_out(calls, key, row, plan, shape, stage)
            found[cause, replace(call, payload_bytes=call.payload_bytes / parts)] += number * parts
    return [(cause, call, count) for (cause, call), count in found.items() if count > 0]


def messages_of(plan: ParallelPlan, shape: TransformerShape, collectives: CollectiveModel,
                stage: int) -> tuple[StepMessages, ...]:
    """Return the same as ``calls_of``, priced."""
    rows = calls_of(plan, shape, collectives.topology, stage)
    if not rows:
        return ()
    times_of = price_calls([call for _, call, _ in rows], collectives)
    order = list(CommCause)
    return tuple(sorted((StepMessages(cause, call.kind, call.ranks, call.placement.nodes, call.payload_bytes, count,
                                      float(us))
                         for (cause, call, count), us in zip(rows, times_of.time_us, strict=True)),
                        key=lambda each: (order.index(each.cause), -each.volume_bytes)))


def _counts(calls: PlanCalls, plan: ParallelPlan, shape: TransformerShape, stage: int) -> dict[CallName, int]:
    """Return how often a rank of the stage makes the calls of each name in a step."""
    first, last = stage == 0, stage == plan.pp - 1
    every = plan.passes
    counts: dict[CallName, int] = {"embedding": first * every, "tied": int(first or last)}
    for name in ("loss", "head backward"):
        counts[name] = last * every * (1 + shape.predictions)
    for row, (blocks, again) in enumerate(_held(plan, shape, stage)):
        for name in ("block", "experts", "context"):
            counts[row, f"{name} forward"] = every * (blocks + again)
            counts[row, f"{name} backward"] = every * blocks
        # Of fully sharded parameters: gathered in forward and again in backward.
        counts[row, "gather"], counts[row, "reduce"] = 2 * every * blocks, every * blocks
    counts["root gather"], counts["root reduce"] = every, every
    # Every chunk has a neighbour on either side, but for the model's two ends: activations one way, gradients back.
    counts["transfer", stage] = 2 * every * (plan.chunks - last)
    before = "transfer", (stage - 1) % plan.pp
    counts[before] = counts.get(before, 0) + 2 * every * (plan.chunks - first)
    counts["reduce", stage] = every if plan.sharding is Sharding.GRADIENTS else 1
    counts["gather", stage] = 1
    return {key: count for key, count in counts.items() if count and key in calls.of}


def _held(plan: ParallelPlan, shape: TransformerShape, stage: int) -> list[tuple[int, int]]:
    """Return a stage's blocks of each of ``shape.kinds``, and those of them that are computed again."""
    chunks = zip(spread(plan, shape)[stage], recomputed(plan, shape)[stage], strict=True)
    rows = [list(zip(held, again, strict=True)) for held, again in chunks]
    return [(sum(held for held, _ in kind), sum(again for _, again in kind)) for kind in zip(*rows, strict=True)]


def _parts(plan: ParallelPlan, shape: TransformerShape, stage: int) -> int:
    """Messages that a stage's gradients or parameters are cut into: its blocks where FSDP keeps them, Megatron-Core's
    buckets else."""
    if plan.sharding is Sharding.PARAMETERS:
        return sum(count for count, _ in _held(plan, shape, stage))
    if not plan.overlap:
        return 1
    bucket = max(BUCKET_PARAMETERS, BUCKET_PARAMETERS_A_REPLICA * plan.dp * plan.cp)
    return max(math.ceil(stage_parameters(plan, shape, stage) / bucket), 1)


def _last_left_out(calls: PlanCalls, key: CallName, row: int, plan: ParallelPlan, shape: TransformerShape,
                   stage: int) -> int:
    """Calls less where not all of a block is computed again: the one after its last product."""
    if calls.calls[row].kind is CollectiveKind.ALL_GATHER:
        return 0
    return plan.passes * sum(again for kind, (_, again) in enumerate(_held(plan, shape, stage))
                             if (kind, "block forward") == key)


def _exposed(loads: Loads, causes: set[CommCause], whole: Estimate, rates: Rates) -> ExposedTime:
    # What the slowest GPU takes longer is a share of the whole step, and no communication.
    rates = replace(rates, jitter=0.0)

    def time(change: Callable[[Exchange], Exchange]) -> float:
        return estimate(_changed(loads, causes, change), rates).time_us

    nothing = time(lambda _: Exchange())
    spread = math.exp(Z80 * whole.spreads.collectives)
    low, high = time(lambda each: _times_as_long(each, 1 / spread)), time(lambda each: _times_as_long(each, spread))
    return ExposedTime(max(time(lambda each: each) - nothing, 0.0), max(low - nothing, 0.0), max(high - nothing, 0.0))


def _times_as_long(exchange: Exchange, factor: float) -> Exchange:
    return replace(exchange, us=factor * exchange.us)


def _changed(loads: Loads, causes: set[CommCause], change: Callable[[Exchange], Exchange]) -> Loads:
    def of(holder: Loads | BlockLoads, table: Mapping[CommCause, tuple[str, ...]]) -> dict[str, Any]:
        names = [name for cause in table if cause in causes for name in table[cause]]
        found = {name: getattr(holder, name) for name in names}
        return {name: tuple(map(change, value)) if isinstance(value, tuple) else change(value)
                for name, value in found.items()}

    blocks = tuple(replace(block, **of(block, _IN_BLOCKS)) for block in loads.blocks)
    return replace(loads, blocks=blocks, **of(loads, _OUTSIDE))
