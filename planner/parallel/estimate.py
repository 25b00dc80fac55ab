"""``estimate``: the time of a plan's step from the costs of its parts, and what limits it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from planner.parallel.buckets import bucket_shares
from planner.parallel.corrections import PUBLISHED, UNCORRECTED, Z80, CorrectionFactors, PlanSpreads, features
from planner.parallel.plan_costs import CallName, PlanCosts
from planner.parallel.schedule import BACKWARD, WEIGHTS, Pipelined, order_of, simulate
from planner.parallel.work import NOTHING, Exchange, LayerWork
from tracer.arrays import Float64
from tracer.parallel_plan import Graphs, ParallelPlan, Recomputation, Schedule, Sharding, slowest_of


@dataclass(frozen=True, slots=True)
class Estimate:
    """The step of a plan, µs. The parts are those of the average stage and add up to ``time_us``.

    Attributes:
        time_us, low_us, high_us: the step and its 80% interval.
        products, others: arithmetic and other device work.
        host: time that the host takes in addition to the device's.
        layers: collectives within layers that work waits for.
        pipeline: sending between stages, and waiting for other stages.
        data: exposed collectives of the replicas' gradients and parameters.
        optimizer: the optimizer's work.
        fixed: constant time of a step.
        stragglers: time that the slowest GPU takes in addition to the others'.
        hidden: collectives that work hides; no part of ``time_us``.
        sources: share of the device's time by ``Source``.
        spreads: relative errors of the step's parts.
    """

    plan: ParallelPlan
    time_us: float
    low_us: float
    high_us: float
    products: float
    others: float
    host: float
    layers: float
    pipeline: float
    data: float
    optimizer: float
    fixed: float
    stragglers: float
    hidden: float
    sources: dict[int, float]
    spreads: PlanSpreads = PUBLISHED

    def times(self, factor: float) -> Estimate:
        """Return the step with all its times multiplied by a factor."""
        return replace(self, **{each.name: factor * getattr(self, each.name) for each in fields(self)
                                if isinstance(getattr(self, each.name), float)})

    @property
    def exposed_us(self) -> float:
        """Return the time of the collectives that the step waits for, without the pipeline's, µs."""
        return self.layers + self.data

    @property
    def bubble(self) -> float:
        """Return the share of the step in which the average stage waits for others."""
        return self.pipeline / self.time_us if self.time_us else 0.0

    @property
    def bound(self) -> str:
        """Return the name of the largest part of the step."""
        parts = {"arithmetic": self.products, "memory": self.others + self.optimizer, "host": self.host + self.fixed,
                 "communication": self.exposed_us, "pipeline bubble": self.pipeline}
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True, slots=True)
class StepSchedule:
    """A plan's step on the estimate's clock, µs: the tasks of every stage, and what follows them.

    Attributes:
        run: the tasks.
        exposed: exposed collectives of the replicas' gradients and parameters, by stage.
        optimizer: the optimizer's work, by stage.
        hidden: hidden collectives of gradients and parameters, of the average stage.
    """

    run: Pipelined
    exposed: list[float]
    optimizer: list[float]
    hidden: float

    @property
    def ends(self) -> list[float]:
        """Return when each stage has ended."""
        return [float(tasks) + data + work for tasks, data, work in zip(
            self.run.stage_end, self.exposed, self.optimizer, strict=True)]


@dataclass(slots=True)
class _Stretch:
    """Work of one stage for one micro-batch: device µs by kind, collectives it waits for, hidden ones, host µs."""

    products: float = 0.0
    others: float = 0.0
    waits: float = 0.0
    hidden: float = 0.0
    host: float = 0.0

    def add(self, work: LayerWork, rates: CorrectionFactors, exchange: Exchange = NOTHING, count: int = 1) -> None:
        self.products += count * work.products * rates.products
        self.others += count * work.others * rates.others
        self.waits += count * exchange_us(exchange, rates)
        self.host += count * (work.launches * rates.host_us + exchange.count * (
            rates.host_collective_us + (1 - 1 / exchange.nodes) * rates.crossing_us))

    @property
    def device(self) -> float:
        return self.products + self.others + self.waits

    def us(self, rates: CorrectionFactors) -> float:
        longest = max(self.device, self.host)
        if longest <= 0:
            return 0.0
        other = min(self.device, self.host) / longest
        return float(longest * (1 + other ** rates.meet) ** (1 / rates.meet))


_Stretches = list[list[_Stretch]]
"""Work by [stage][chunk]."""


def estimate(costs: PlanCosts, rates: CorrectionFactors = UNCORRECTED) -> Estimate:
    """Estimate the step of a plan.

    Every stage runs forward and backward of its blocks for each micro-batch, in the schedule's order. The replicas'
    collectives follow, overlapping the last backward where they can, and then the optimizer.
    """
    plan, stages = costs.plan, costs.plan.pp
    forward, backward, step = _laid_out(costs, rates)
    run, ends, hidden = step.run, step.ends, step.hidden
    stragglers = max(ends) * rates.jitter * slowest_of(plan.world_size)
    total = max(ends) + stragglers + rates.step_us
    count = plan.passes / stages
    every = [each for rows in (forward, backward) for row in rows for each in row]
    products = count * sum(each.products for each in every)
    others = count * sum(each.others for each in every)
    waits = count * sum(each.waits for each in every)
    busy = float(run.busy.mean())
    optimizer, mean_data = float(np.mean(step.optimizer)), float(np.mean(step.exposed))
    pipeline = max(ends) - busy - mean_data - optimizer
    hidden += count * sum(each.hidden for each in every)
    host = busy - products - others - waits
    spreads = _spreads(costs, rates)
    working = max(total - max(pipeline, 0.0), 1e-9)
    spread = Z80 * spreads.of(products / working, (others + optimizer) / working, (waits + mean_data) / working,
                              max(host, 0.0) / working)
    found = Estimate(plan, total, total * float(np.exp(-spread)), total * float(np.exp(spread)), products, others, host,
                     waits, max(pipeline, 0.0), mean_data, optimizer, rates.step_us, stragglers, hidden,
                     _sources(costs), spreads)
    if rates.residuals is None:
        return found
    return found.times(float(np.exp(rates.residuals.at(features(plan, costs.shape)))))


def step_schedule(costs: PlanCosts, rates: CorrectionFactors) -> StepSchedule:
    """Return the tasks of a plan's step, µs, as in ``estimate`` before stragglers and fixed time are added."""
    return _laid_out(costs, rates)[2]


def _laid_out(costs: PlanCosts, rates: CorrectionFactors) -> tuple[_Stretches, _Stretches, StepSchedule]:
    """Return forward and backward of every stage's chunks, and the schedule of the step."""
    plan, rates = costs.plan, _graphed(costs.plan, rates)
    forward, backward, f, b, weights = _passes(costs, rates)
    sent = [costs.exchange(("transfer", stage)) for stage in range(plan.pp)]
    transfer = np.array([exchange_us(each, rates) + each.count * (
        rates.host_collective_us + rates.transfer_us + each.between_nodes * rates.crossing_transfer_us)
        for each in sent])
    run = simulate(order_of(plan.schedule, plan.pp, plan.passes, plan.chunks), f, b, transfer,
                   plan.schedule in (Schedule.GPIPE, Schedule.ONE_F_ONE_B), weights)
    data, optimizer, hidden = [], [], 0.0
    for stage in range(plan.pp):
        exposed, beside = _replicas(costs, rates, stage, _since_gradients(run, stage), float(f[stage].sum()),
                                    float(b[stage].sum()))
        if stage in (0, plan.pp - 1):
            exposed += exchange_us(costs.exchange("tied"), rates)
        work = costs.optimizer[stage]
        optimizer.append(work.products * rates.products + work.others * rates.others)
        data.append(exposed)
        hidden += beside / plan.pp
    return forward, backward, StepSchedule(run, data, optimizer, hidden)


def _stretches(of: Callable[[PlanCosts, CorrectionFactors, int, int], _Stretch], costs: PlanCosts,
               rates: CorrectionFactors) -> _Stretches:
    """Return forward or backward of every stage's chunks; equal chunks are computed once."""
    known: dict[tuple[object, ...], _Stretch] = {}
    plan, rows = costs.plan, []
    for stage in range(plan.pp):
        row = []
        for chunk in range(plan.chunks):
            place = (stage, chunk)
            ends = place == (0, 0), place == (plan.pp - 1, plan.chunks - 1)
            key = (*ends, costs.counts[stage][chunk], costs.recomputed[stage][chunk])
            if key not in known:
                known[key] = of(costs, rates, stage, chunk)
            row.append(known[key])
        rows.append(row)
    return rows


def _passes(costs: PlanCosts, rates: CorrectionFactors
            ) -> tuple[_Stretches, _Stretches, Float64, Float64, Float64 | None]:
    """Return forward and backward of every stage's chunks, followed by what ``passes_us`` returns.

    Args:
        rates: from ``_graphed``.
    """
    if rates.meeting_us or rates.crossing_us:
        rates = rates.meeting(costs.plan)
    forward, backward = (_stretches(of, costs, rates) for of in (_forward, _backward))
    f, b = (np.array([[each.us(rates) for each in row] for row in rows]) for rows in (forward, backward))
    return forward, backward, f, b, _of_weights(costs, rates, backward, b)


def _graphed(plan: ParallelPlan, rates: CorrectionFactors) -> CorrectionFactors:
    """Return the factors without host time if one CUDA graph launches the plan's whole step, else unchanged."""
    return replace(rates, host_us=0.0, host_collective_us=0.0) if plan.graphs is Graphs.WHOLE else rates


def passes_us(costs: PlanCosts, rates: CorrectionFactors) -> tuple[Float64, Float64, Float64 | None]:
    """Return µs of a micro-batch's forward, backward and, if split off, weights' gradients, each [stage, chunk]."""
    return _passes(costs, _graphed(costs.plan, rates))[2:]


def exchange_us(exchange: Exchange, rates: CorrectionFactors) -> float:
    """Return the time of an exchange's collectives one after another, µs."""
    return exchange.us * (rates.network if exchange.between_nodes else rates.collectives)


def _forward(costs: PlanCosts, rates: CorrectionFactors, stage: int, chunk: int) -> _Stretch:
    plan, held = costs.plan, costs.held(stage, chunk)
    out = _Stretch()
    if stage == 0 and chunk == 0:
        out.add(costs.embedding.forward, rates, costs.exchange("embedding"))
    for kind, count, _ in held:
        _add_forward(out, costs, kind, rates, count)
    if stage == plan.pp - 1 and chunk == plan.chunks - 1:
        out.add(costs.head.forward, rates, costs.exchange("loss"), 1 + costs.shape.predictions)
    if plan.sharding is Sharding.PARAMETERS:
        compute = out.device / sum(count for _, count, _ in held)
        for kind, count, _ in held:
            _beside(out, (costs.exchange((kind, "gather")),), compute, count, plan.overlap, rates)
        _expose(out, costs.exchange("root gather"), rates)
    return out


def _backward(costs: PlanCosts, rates: CorrectionFactors, stage: int, chunk: int) -> _Stretch:
    plan, held = costs.plan, costs.held(stage, chunk)
    out = _Stretch()
    if stage == plan.pp - 1 and chunk == plan.chunks - 1:
        out.add(costs.head.backward, rates, costs.exchange("head backward"), 1 + costs.shape.predictions)
    for kind, count, recomputed in held:
        if recomputed:
            _add_forward(out, costs, kind, rates, recomputed, plan.recompute)
        elif plan.recompute is Recomputation.SELECTIVE:
            out.add(costs.blocks[kind].core, rates, count=count)
        before = out.device
        out.add(costs.blocks[kind].backward, rates, costs.exchange((kind, "block backward")), count)
        _with_experts(out, costs, costs.exchange((kind, "experts backward")), (out.device - before) / count, count,
                      rates)
        beside = tuple(costs.exchange((kind, f"{what} backward")) for what in ("context", "beside"))
        _beside(out, beside, (out.device - before) / count, count, plan.overlap, rates)
    if stage == 0 and chunk == 0:
        out.add(costs.embedding.backward, rates)
    if plan.sharding is Sharding.PARAMETERS:
        compute = out.device / sum(count for _, count, _ in held)
        for kind, count, _ in held:
            both = costs.exchange((kind, "gather")), costs.exchange((kind, "reduce"))
            _beside(out, both, compute, count, plan.overlap, rates)
        _expose(out, costs.exchange("root reduce"), rates)
    return out


def _of_weights(costs: PlanCosts, rates: CorrectionFactors, backward: _Stretches, us: Float64) -> Float64 | None:
    """Return the µs of weights' gradients in backward, [stage, chunk]; ``None`` if the schedule does not split them."""
    plan = costs.plan
    if plan.schedule is not Schedule.ZERO_BUBBLE:
        return None
    shares: list[list[float]] = []
    for stage, row in enumerate(backward):
        shares.append([])
        for chunk, whole in enumerate(row):
            weights = _Stretch()
            for kind, count, _ in costs.held(stage, chunk):
                weights.add(costs.blocks[kind].weights, rates, count=count)
            if stage == plan.pp - 1 and chunk == plan.chunks - 1:
                weights.add(costs.head.weights, rates, count=1 + costs.shape.predictions)
            shares[-1].append(weights.device / whole.device)
    return us * np.array(shares)


def _add_forward(out: _Stretch, costs: PlanCosts, kind: int, rates: CorrectionFactors, count: int,
                 recomputed: Recomputation = Recomputation.NONE) -> None:
    """Add forward of blocks, or the part of it that is recomputed. A recomputed part omits the collective after the
    block's last product."""
    before, work, waited = out.device, costs.blocks[kind], costs.exchange((kind, "block forward"))
    if recomputed in (Recomputation.NONE, Recomputation.FULL):
        out.add(work.forward, rates, waited, count)
    else:
        out.add(work.recomputed[recomputed], rates, waited.without_last(), count)
    _with_experts(out, costs, costs.exchange((kind, "experts forward")), (out.device - before) / count, count, rates)
    beside = tuple(costs.exchange((kind, f"{what} forward")) for what in ("context", "beside"))
    _beside(out, beside, (out.device - before) / count, count, costs.plan.overlap, rates)


def _with_experts(out: _Stretch, costs: PlanCosts, exchange: Exchange, compute: float, count: int,
                  rates: CorrectionFactors) -> None:
    """Add a block's exchanges with its experts. With ``expert_overlap`` an exchange overlaps another micro-batch's
    work, taken to be as long as its own pass: Megatron-Core merges a forward with another one's backward. Passes that
    run alone (``_alone``) wait for the exchange."""
    alone = _alone(costs.plan) if costs.plan.expert_overlap else 1.0
    whole, hidden = exchange.times(alone), exchange.times(1.0 - alone)
    out.waits += count * exchange_us(whole, rates)
    out.host += count * exchange.count * rates.host_collective_us
    if alone < 1.0:
        _beside(out, (hidden,), compute, count, True, rates)


def _alone(plan: ParallelPlan) -> float:
    """Return the share of the average stage's passes that run before its first backward or after its last forward."""
    ahead = plan.pp - 1 + (plan.chunks - 1) * plan.pp + 1
    return min(ahead / (plan.passes * plan.chunks), 1.0)


def _beside(out: _Stretch, exchanges: Sequence[Exchange], compute: float, count: int, overlap: bool,
            rates: CorrectionFactors) -> None:
    """Add collectives that overlap each block's work (``compute`` µs): the excess is waited for, the rest slows it."""
    us = sum(exchange_us(each, rates) for each in exchanges)
    behind = min(us, compute) if overlap else 0.0
    out.hidden += behind * count
    out.waits += (us - behind + slowed_us(exchanges, behind, rates)) * count


def slowed_us(exchanges: Sequence[Exchange], behind: float, rates: CorrectionFactors) -> float:
    """Return by how many µs work slows down if it hides collectives for ``behind`` µs."""
    us = sum(exchange_us(each, rates) for each in exchanges)
    felt = sum(exchange_us(each, rates) * (0.5 if each.between_nodes else 1.0) for each in exchanges)
    return rates.interference * behind * felt / us if us else 0.0


def _expose(out: _Stretch, exchange: Exchange, rates: CorrectionFactors) -> None:
    out.waits += exchange_us(exchange, rates)
    out.host += exchange.count * rates.host_collective_us


def _since_gradients(run: Pipelined, stage: int) -> float:
    """Return µs from a stage's first complete gradients to its end, work and waits included. They are complete from
    the last micro-batch's first backward on any chunk (or weights' gradients, if split)."""
    order = run.order
    kind = WEIGHTS if (order.kind[stage] == WEIGHTS).any() else BACKWARD
    last = (order.kind[stage] == kind) & (order.microbatch[stage] == order.microbatch[stage].max())
    return float(run.end[stage].max() - run.start[stage][last].min())


def _replicas(costs: PlanCosts, rates: CorrectionFactors, stage: int, since: float, forward: float,
              backward: float) -> tuple[float, float]:
    """Return the exposed and the hidden time of the replicas' collectives, µs.

    Gradients are reduced block by block, or bucket by bucket, during the last micro-batch's backward. The last block or
    bucket follows it. Parameters are gathered block by block during the first micro-batch's forward.

    Args:
        since: µs from the first complete gradients to the stage's end.
        forward, backward: µs of one micro-batch, all chunks of the stage.
    """
    plan = costs.plan
    last = 1 / max(sum(map(sum, costs.counts[stage])), 1) if plan.bucket_mb is None else (
        bucket_shares(plan, costs.shape, stage)[-1])
    both = costs.exchange(("reduce", stage)), costs.exchange(("gather", stage))
    reduce, gather = (exchange_us(each, rates) for each in both)
    if plan.sharding is Sharding.GRADIENTS:
        reduce *= plan.passes  # sharded gradients cannot be accumulated before they are reduced
        since = backward * plan.passes + forward * (plan.passes - 1)
        last /= plan.passes
    if not plan.overlap:
        return reduce + gather, 0.0
    behind, ahead = (1 - last) * min(reduce, since), (1 - last) * min(gather, forward)
    hidden = behind + ahead
    return reduce + gather - hidden + slowed_us(both, hidden, rates), hidden


def _spreads(costs: PlanCosts, rates: CorrectionFactors) -> PlanSpreads:
    """Return the spreads of the parts, narrowed where kernels' and collectives' own intervals are narrower."""
    blocks = [(float(count), each) for block, count in costs.whole for each in (block.forward, block.backward)]
    works = [*blocks, (1.0, costs.head.forward), (1.0, costs.head.backward)]
    names: list[CallName] = [(kind, what) for kind in range(len(costs.blocks)) for what in (
        "block forward", "block backward", "gather", "reduce", "experts forward", "context forward")]
    names += [(what, stage) for what in ("reduce", "gather") for stage in range(costs.plan.pp)]
    return rates.spreads.within(_half_width(works), _half_width([(1.0, costs.exchange(name)) for name in names]))


def _half_width(parts: Sequence[tuple[float, LayerWork | Exchange]]) -> float:
    """Return half of the 80% interval of a sum as a share of it; ``parts`` are pairs of count and cost."""
    us, low, high = (sum(count * float(getattr(each, name)) for count, each in parts) for name in ("us", "low", "high"))
    return (high - low) / 2 / us if us else 0.0


def _sources(costs: PlanCosts) -> dict[int, float]:
    whole = LayerWork()
    for block, count in costs.whole:
        whole += (block.forward + block.backward).times(count)
    whole += costs.head.forward + costs.head.backward
    return {source: us / whole.us for source, us in sorted(whole.sources.items())} if whole.us else {}
