"""``estimate``: the time of a plan's step from what it is made of, and what binds it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from statistics import NormalDist

import numpy as np

from planner.parallel.likeness import Likeness
from planner.parallel.loads import BlockLoads, Exchange, Loads
from planner.parallel.pieces import LayerWork
from planner.parallel.schedule import BACKWARD, WEIGHTS, Pipelined, order_of, simulate
from planner.parallel.spreads import PUBLISHED, Z80, PlanSpreads
from tracer.arrays import Float64
from tracer.parallel_plan import ParallelPlan, Recomputation, Schedule, Sharding


@dataclass(frozen=True, slots=True)
class Rates:
    """Factors of a real job over its models; ``parallel.calibrate`` fits them to a user's own steps.

    The host's are between those of vTrain's A100 hosts (52 to 55 µs and 88 to 112 µs: ``benchmarks/vtrain.py``) and
    H100 hosts, on which Megatron-LM's own small jobs take 0.65 of what those would. Work beside collectives is slowed
    by 18.9% in the mean, by 40% at most, of FSDP and pipelines on four GPU types (Lee et al., "Characterizing
    Compute-Communication Overlap", 2025). The jitter is what the fp8 steps of Llama 3.1 8B and 70B that NVIDIA
    publishes grow by from 8 to 128 and from 64 to 2,048 H100 (dgxc-benchmarking: 1.6 to 3.5%).

    Attributes:
        products, others: factors on matrix products and on everything else.
        collectives, network: factors on collectives within a node, and on those that leave it.
        host_us: host time of each kernel's launch; host_collective_us: of each collective.
        step_us: once a step.
        interference: of collectives that run beside work within a node, the share of their time by which the work takes
            longer; half of it for those that leave the node, for which NCCL fills half as many channels.
        jitter: standard deviation of GPUs' speeds; a step waits for the slowest of all.
        meet: how host and GPU share a stretch of work: (host^meet + gpu^meet)^(1/meet). Large: the slower one decides;
            smaller: each waits for the other at times.
        spreads: how far off all of this may be.
        likeness: what measured steps say of plans like theirs beyond all this.
    """

    products: float = 1.0
    others: float = 1.0
    collectives: float = 1.0
    network: float = 1.0
    host_us: float = 35.0
    host_collective_us: float = 60.0
    step_us: float = 0.0
    interference: float = 0.19
    jitter: float = 0.02
    meet: float = 3.0
    spreads: PlanSpreads = PUBLISHED
    likeness: Likeness | None = None


@dataclass(frozen=True, slots=True)
class Estimate:
    """The step of a plan, µs. The parts are those of the average stage and add up to ``time_us``.

    Attributes:
        time_us, low_us, high_us: the step and its 80% interval.
        products, others: arithmetic and other device work.
        host: what the host takes longer than the device.
        layers: collectives within layers that work waits for.
        pipeline: sending between stages, and waiting for other stages that are no slower than this one.
        data: gradients and parameters of replicas that nothing hides.
        optimizer: its work.
        fixed: once a step.
        stragglers: what the slowest GPU takes longer than the others.
        hidden: collectives that work hides.
        sources: share of the device's time by ``Source``.
        spreads: how far off the step's parts may be.
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
        """Return the step and all its parts so many times as long."""
        return replace(self, **{each.name: factor * getattr(self, each.name) for each in fields(self)
                                if isinstance(getattr(self, each.name), float)})

    @property
    def exposed_us(self) -> float:
        """Collectives that the step waits for, without the pipeline's."""
        return self.layers + self.data

    @property
    def bubble(self) -> float:
        """Share of the step in which the average stage waits for others."""
        return self.pipeline / self.time_us if self.time_us else 0.0

    @property
    def bound(self) -> str:
        """Return what most of the step is."""
        parts = {"arithmetic": self.products, "memory": self.others + self.optimizer, "host": self.host + self.fixed,
                 "communication": self.exposed_us, "pipeline bubble": self.pipeline}
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True, slots=True)
class StepSchedule:
    """A plan's step on the estimate's clock, µs: the tasks of every stage, and what follows them.

    Attributes:
        run: the tasks.
        exposed: gradients and parameters of replicas that nothing hides, of each stage.
        optimizer: its work, of each stage.
        hidden: gradients and parameters that work hides, of the average stage.
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

    def add(self, work: LayerWork, rates: Rates, exchange: Exchange = Exchange(), count: int = 1) -> None:  # noqa: B008
        self.products += count * work.products * rates.products
        self.others += count * work.others * rates.others
        self.waits += count * exchange_us(exchange, rates)
        self.host += count * (work.launches * rates.host_us + exchange.count * rates.host_collective_us)

    @property
    def device(self) -> float:
        return self.products + self.others + self.waits

    def us(self, rates: Rates) -> float:
        longest = max(self.device, self.host)
        if longest <= 0:
            return 0.0
        other = min(self.device, self.host) / longest
        return float(longest * (1 + other ** rates.meet) ** (1 / rates.meet))


def estimate(loads: Loads, rates: Rates = Rates()) -> Estimate:
    """The step of a plan.

    Every stage does forward and backward of its blocks for each micro-batch in the schedule's order; the replicas'
    collectives follow, beside the last backward where they can, and the optimizer.
    """
    plan, stages = loads.plan, loads.plan.pp
    forward, backward, step = _laid_out(loads, rates)
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
    spreads = _spreads(loads, rates)
    working = max(total - max(pipeline, 0.0), 1e-9)
    spread = Z80 * spreads.of(products / working, (others + optimizer) / working, (waits + mean_data) / working,
                              max(host, 0.0) / working)
    found = Estimate(plan, total, total * float(np.exp(-spread)), total * float(np.exp(spread)), products, others, host,
                     waits, max(pipeline, 0.0), mean_data, optimizer, rates.step_us, stragglers, hidden,
                     _sources(loads), spreads)
    return found if rates.likeness is None else found.times(float(np.exp(rates.likeness.correction(loads))))


def step_schedule(loads: Loads, rates: Rates) -> StepSchedule:
    """Return when the work of a plan's step is done, as ``estimate`` has it."""
    return _laid_out(loads, rates)[2]


def _laid_out(loads: Loads, rates: Rates) -> tuple[list[list[_Stretch]], list[list[_Stretch]], StepSchedule]:
    """Forward and backward of every stage's chunks, and when each is done."""
    plan = loads.plan
    forward, backward = (_stretches(of, loads, rates) for of in (_forward, _backward))
    f = np.array([[each.us(rates) for each in row] for row in forward])
    b = np.array([[each.us(rates) for each in row] for row in backward])
    transfer = np.array([exchange_us(each, rates) + each.count * rates.host_collective_us for each in loads.transfer])
    run = simulate(order_of(plan.schedule, plan.pp, plan.passes, plan.chunks), f, b, transfer,
                   plan.schedule in (Schedule.GPIPE, Schedule.ONE_F_ONE_B), _of_weights(loads, rates, backward, b))
    data, optimizer, hidden = [], [], 0.0
    for stage in range(plan.pp):
        exposed, beside = _replicas(loads, rates, stage, _since_gradients(run, stage), float(f[stage].sum()),
                                    float(b[stage].sum()))
        if stage in (0, plan.pp - 1):
            exposed += exchange_us(loads.tied, rates)
        optimizer.append(_optimizer(loads, rates, stage))
        data.append(exposed)
        hidden += beside / plan.pp
    return forward, backward, StepSchedule(run, data, optimizer, hidden)


def _stretches(of: Callable[[Loads, Rates, int, int], _Stretch], loads: Loads, rates: Rates) -> list[list[_Stretch]]:
    """Forward or backward of every stage's chunks; those in between with the same blocks are equal."""
    known: dict[tuple[object, ...], _Stretch] = {}
    plan, rows = loads.plan, []
    for stage in range(plan.pp):
        row = []
        for chunk in range(plan.chunks):
            place = (stage, chunk)
            ends = place == (0, 0), place == (plan.pp - 1, plan.chunks - 1)
            key = (*ends, loads.counts[stage][chunk], loads.again[stage][chunk])
            if key not in known:
                known[key] = of(loads, rates, stage, chunk)
            row.append(known[key])
        rows.append(row)
    return rows


def stretches(loads: Loads, rates: Rates) -> tuple[Float64, Float64, Float64 | None]:
    """Return µs of forward, backward and, done apart, weights' gradients of one micro-batch, each [stage, chunk]."""
    forward, backward = (_stretches(of, loads, rates) for of in (_forward, _backward))
    f, b = (np.array([[each.us(rates) for each in row] for row in rows]) for rows in (forward, backward))
    return f, b, _of_weights(loads, rates, backward, b)


def slowest_of(ranks: int) -> float:
    """By how many standard deviations the slowest of so many equal GPUs is off their mean, expected (Blom, 1958)."""
    return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))


def exchange_us(exchange: Exchange, rates: Rates) -> float:
    """Return what collectives in a row take."""
    return exchange.us * (rates.network if exchange.between_nodes else rates.collectives)


def _forward(loads: Loads, rates: Rates, stage: int, chunk: int) -> _Stretch:
    plan, held = loads.plan, loads.held(stage, chunk)
    out = _Stretch()
    if stage == 0 and chunk == 0:
        out.add(loads.embedding.forward, rates, loads.embedding_forward)
    for block, count in held:
        _add_forward(out, block, rates, count, plan.overlap)
    if stage == plan.pp - 1 and chunk == plan.chunks - 1:
        out.add(loads.head.forward, rates, loads.head_forward, 1 + loads.shape.predictions)
    if plan.sharding is Sharding.PARAMETERS:
        compute = out.device / sum(count for _, count in held)
        for block, count in held:
            _beside(out, (block.gather,), compute, count, plan.overlap, rates)
        _expose(out, loads.root_gather, rates)
    return out


def _backward(loads: Loads, rates: Rates, stage: int, chunk: int) -> _Stretch:
    plan, held = loads.plan, loads.held(stage, chunk)
    out = _Stretch()
    if stage == plan.pp - 1 and chunk == plan.chunks - 1:
        out.add(loads.head.backward, rates, loads.head_backward, 1 + loads.shape.predictions)
    for (block, count), again in zip(held, loads.rerun(stage, chunk), strict=True):
        if again:
            _add_forward(out, block, rates, again, plan.overlap, plan.recompute)
        elif plan.recompute is Recomputation.SELECTIVE:
            out.add(block.work.core, rates, count=count)
        before = out.device
        out.add(block.work.backward, rates, block.backward, count)
        out.add(LayerWork(), rates, block.experts_backward, count)
        _beside(out, (block.context_backward, block.beside_backward), (out.device - before) / count, count,
                plan.overlap, rates)
    if stage == 0 and chunk == 0:
        out.add(loads.embedding.backward, rates)
    if plan.sharding is Sharding.PARAMETERS:
        compute = out.device / sum(count for _, count in held)
        for block, count in held:
            _beside(out, (block.gather, block.reduce), compute, count, plan.overlap, rates)
        _expose(out, loads.root_reduce, rates)
    return out


def _of_weights(loads: Loads, rates: Rates, backward: list[list[_Stretch]], us: Float64) -> Float64 | None:
    """Return the µs of weights' gradients in each stage's backward, where the schedule does them apart."""
    plan = loads.plan
    if plan.schedule is not Schedule.ZERO_BUBBLE:
        return None
    shares: list[list[float]] = []
    for stage, row in enumerate(backward):
        shares.append([])
        for chunk, whole in enumerate(row):
            weights = _Stretch()
            for block, count in loads.held(stage, chunk):
                weights.add(block.work.weights, rates, count=count)
            if stage == plan.pp - 1 and chunk == plan.chunks - 1:
                weights.add(loads.head.weights, rates, count=1 + loads.shape.predictions)
            shares[-1].append(weights.device / whole.device)
    return us * np.array(shares)


def _add_forward(out: _Stretch, block: BlockLoads, rates: Rates, count: int, overlap: bool,
                 again: Recomputation = Recomputation.NONE) -> None:
    """Forward of blocks, or what of it is computed ``again``: less than all of it lacks the last product's collective
    too."""
    before = out.device
    if again in (Recomputation.NONE, Recomputation.FULL):
        out.add(block.work.forward, rates, block.forward, count)
    else:
        out.add(block.work.again[again], rates, block.forward.without_last(), count)
    out.add(LayerWork(), rates, block.experts_forward, count)
    _beside(out, (block.context_forward, block.beside_forward), (out.device - before) / count,
            count, overlap, rates)


def _beside(out: _Stretch, exchanges: Sequence[Exchange], compute: float, count: int, overlap: bool,
            rates: Rates) -> None:
    """Collectives of each block beside its work: what is longer than it is waited for, and they slow it down."""
    us = sum(exchange_us(each, rates) for each in exchanges)
    behind = min(us, compute) if overlap else 0.0
    out.hidden += behind * count
    out.waits += (us - behind + slowed_us(exchanges, behind, rates)) * count


def slowed_us(exchanges: Sequence[Exchange], behind: float, rates: Rates) -> float:
    """Return what work takes longer for collectives that it hides for ``behind`` µs."""
    us = sum(exchange_us(each, rates) for each in exchanges)
    felt = sum(exchange_us(each, rates) * (0.5 if each.between_nodes else 1.0) for each in exchanges)
    return rates.interference * behind * felt / us if us else 0.0


def _expose(out: _Stretch, exchange: Exchange, rates: Rates) -> None:
    out.waits += exchange_us(exchange, rates)
    out.host += exchange.count * rates.host_collective_us


def _since_gradients(run: Pipelined, stage: int) -> float:
    """Return the time in which a stage's first gradients are complete: from the start of the last micro-batch's
    backward of its first chunk that gets there to the stage's end, with what it does and waits for between."""
    order = run.order
    kind = WEIGHTS if (order.kind[stage] == WEIGHTS).any() else BACKWARD
    last = (order.kind[stage] == kind) & (order.microbatch[stage] == order.microbatch[stage].max())
    return float(run.end[stage].max() - run.start[stage][last].min())


def _replicas(loads: Loads, rates: Rates, stage: int, since: float, forward: float,
              backward: float) -> tuple[float, float]:
    """Collectives of replicas: what is exposed, and what work hides, µs.

    Gradients are reduced block by block beside the last micro-batch's backward, those of the last block after it, and
    parameters gathered so beside the first one's forward.

    Args:
        since: from when gradients are complete to the stage's end.
        forward, backward: of one micro-batch, all chunks of the stage.
    """
    plan = loads.plan
    last = 1 / max(sum(map(sum, loads.counts[stage])), 1)
    reduce, gather = exchange_us(loads.reduce[stage], rates), exchange_us(loads.gather[stage], rates)
    if plan.sharding is Sharding.GRADIENTS:
        reduce *= plan.passes  # sharded gradients cannot be accumulated before they are reduced
        since = backward * plan.passes + forward * (plan.passes - 1)
        last /= plan.passes
    if not plan.overlap:
        return reduce + gather, 0.0
    behind, ahead = (1 - last) * min(reduce, since), (1 - last) * min(gather, forward)
    hidden = behind + ahead
    return reduce + gather - hidden + slowed_us((loads.reduce[stage], loads.gather[stage]), hidden, rates), hidden


def _optimizer(loads: Loads, rates: Rates, stage: int) -> float:
    work = loads.optimizer[stage]
    return work.products * rates.products + work.others * rates.others


def _spreads(loads: Loads, rates: Rates) -> PlanSpreads:
    """Return how far off the parts may be, as far as their own models do not know better."""
    blocks = [(float(count), each) for block, count in loads.whole
              for each in (block.work.forward, block.work.backward)]
    works = [*blocks, (1.0, loads.head.forward), (1.0, loads.head.backward)]
    exchanges = [exchange for each in loads.blocks for exchange in (
        each.forward, each.backward, each.gather, each.reduce, each.experts_forward, each.context_forward)]
    moved = [(1.0, each) for each in (*exchanges, *loads.reduce, *loads.gather)]
    return rates.spreads.within(_half_width(works), _half_width(moved))


def _half_width(parts: Sequence[tuple[float, LayerWork | Exchange]]) -> float:
    """Half of an 80% interval as a share of what it is of, µs of each part so many times."""
    us, low, high = (sum(count * float(getattr(each, name)) for count, each in parts) for name in ("us", "low", "high"))
    return (high - low) / 2 / us if us else 0.0


def _sources(loads: Loads) -> dict[int, float]:
    whole = LayerWork()
    for block, count in loads.whole:
        whole += (block.work.forward + block.work.backward).times(count)
    whole += loads.head.forward + loads.head.backward
    return {source: us / whole.us for source, us in sorted(whole.sources.items())} if whole.us else {}
