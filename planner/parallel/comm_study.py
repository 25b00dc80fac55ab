"""``study_communication``: a plan's messages in a step, their causes and sizes, and how long the step waits for them.

Messages are the calls of ``plan_costs.plan_calls``, times how often a rank of one stage makes each in a step. Exposed
time is what the step would save if a cause's collectives cost nothing, by the same ``estimate``. A hidden collective
therefore counts only by how much it slows the work that hides it.

    foretrace.comm_study("llama", [64, 512], presets=["8b", "70b"], seqs=[4096, 32768], device="h100-sxm").to_pandas()
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any

from graph_predictor.comm.clusters import cluster_of, measured_file
from graph_predictor.comm.mixing import Mixture, mixture
from graph_predictor.request.memory_fit import Fit, fit_of
from kernel_models.collectives import (
    CollectiveCall,
    CollectiveKind,
    CollectiveModel,
    Topology,
    bus_factor,
    planned_topology,
    price_calls,
)
from kernel_models.device import find_device
from kernel_models.profile import DeviceProfile
from planner.parallel.corrections import Z80, CorrectionFactors
from planner.parallel.decoder import other_nodes, read_decoder
from planner.parallel.estimate import Estimate, estimate
from planner.parallel.layer_costs import LayerCosts
from planner.parallel.memory import fullest_of
from planner.parallel.plan_costs import (
    NOTHING,
    CallName,
    Exchange,
    PlanCalls,
    PlanCosts,
    costs_of_plan,
    plan_calls,
    stage_parameters,
)
from planner.parallel.space import with_batch
from planner.parallel.stages import counts_of_stage
from tracer.job import Job
from tracer.parallel_plan import ParallelPlan, PlanError, Recomputation, Sharding
from tracer.shape_only.transformer import TransformerShape
from tracer.shown import Shown, frame_of

if TYPE_CHECKING:
    import pandas


BUCKET_PARAMETERS, BUCKET_PARAMETERS_A_REPLICA = 40_000_000, 1_000_000
"""Parameters whose gradients Megatron-Core reduces at once if these overlap: the larger of the first number and of the
second times the replicas (``DistributedDataParallelConfig.bucket_size``). Without overlap, all at once."""


class CommCause(str, Enum):
    """The reason why ranks communicate."""

    TENSOR = "tensor parallelism"
    CONTEXT = "context parallelism"
    EXPERTS = "experts"
    VOCABULARY = "vocabulary and loss"
    PIPELINE = "pipeline"
    GRADIENTS = "gradients"
    PARAMETERS = "parameters"
    TIED = "tied embedding"


_NAMED = {"block": CommCause.TENSOR, "beside": CommCause.TENSOR, "context": CommCause.CONTEXT,
          "experts": CommCause.EXPERTS,
          "embedding": CommCause.VOCABULARY, "loss": CommCause.VOCABULARY, "head": CommCause.VOCABULARY,
          "transfer": CommCause.PIPELINE, "reduce": CommCause.GRADIENTS, "gather": CommCause.PARAMETERS,
          "tied": CommCause.TIED}


@dataclass(frozen=True, slots=True)
class StepMessages:
    """A group of equal collectives in a rank's step.

    Attributes:
        cause, kind: reason for the messages, and kind of collective.
        ranks, nodes: number of ranks that take part, and of nodes.
        payload_bytes: payload of one message (nccl-tests' size).
        count: number in a step; not whole if backward recomputes a part of a block.
        us: time of one message that overlaps nothing.
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
        """Return the payload of all these messages."""
        return self.count * self.payload_bytes

    @property
    def wire_bytes(self) -> float:
        """Return the bytes of these messages that leave a rank."""
        return self.volume_bytes * bus_factor(self.kind, self.ranks)


@dataclass(frozen=True, slots=True)
class ExposedTime:
    """The time that a step would save if the collectives of one cause, or all, cost nothing, µs. ``low`` and ``high``
    are that time with collectives at the ends of the 80% interval of published steps (``PlanSpreads.collectives``)."""

    us: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class PlanCommunication:
    """The communication of one plan's step.

    Attributes:
        model: the decoder's name.
        shape: sizes of the decoder.
        estimate: the estimated step.
        fit: whether the plan fits the device.
        stage: the stage whose ranks send most bytes.
        messages: messages of one rank of that stage in a step, by cause.
        exposed: exposed time of each cause.
        all_exposed: exposed time of all causes together; less than their sum, because they hide behind the same work.
        mixture: the best backend of each message, if there are several; ``single_us``: the step with one backend.
    """

    model: str
    shape: TransformerShape
    estimate: Estimate
    fit: Fit
    stage: int
    messages: tuple[StepMessages, ...]
    exposed: dict[CommCause, ExposedTime]
    all_exposed: ExposedTime
    mixture: Mixture | None = None
    single_us: float = 0.0

    @property
    def wire_bytes(self) -> float:
        """Bytes that leave a rank in a step."""
        return sum(each.wire_bytes for each in self.messages)

    @property
    def alone_us(self) -> float:
        """Time of all collectives one after another, µs."""
        return sum(each.count * each.us for each in self.messages)

    def histogram(self) -> dict[tuple[CollectiveKind, int], tuple[float, float]]:
        """Return count and payload bytes of messages by kind and size class: log2 of the size, rounded down."""
        found: dict[tuple[CollectiveKind, int], tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
        for each in self.messages:
            at = each.kind, int(math.log2(max(each.payload_bytes, 1.0)))
            count, volume = found[at]
            found[at] = count + each.count, volume + each.volume_bytes
        return dict(sorted(found.items()))


def study_communication(model: str, shape: TransformerShape, plan: ParallelPlan, pieces: LayerCosts,
                        collectives: CollectiveModel, rates: CorrectionFactors,
                        limit_bytes: float) -> PlanCommunication:
    """Find a plan's messages and how long its step waits for them.

    Raises:
        PlanError: the plan does not divide the model, or the cluster is too small.
    """
    costs = costs_of_plan(plan, shape, pieces, collectives)
    whole = estimate(costs, rates)
    stages = [messages_of(plan, shape, collectives, stage) for stage in range(plan.pp)]
    stage = max(range(plan.pp), key=lambda each: sum(row.wire_bytes for row in stages[each]))
    causes = {row.cause for rows in stages for row in rows}
    exposed = {cause: _exposed(costs, {cause}, whole, rates) for cause in CommCause if cause in causes}
    mixed, single = None, 0.0
    if collectives.mixed:
        mixed = mixture_of_plan(plan, shape, collectives)
        alone = collectives.by_one(None if collectives.profile is None else mixed.best_single)
        single = estimate(costs_of_plan(plan, shape, pieces, alone), rates).time_us
    return PlanCommunication(model, shape, whole, fit_of(fullest_of(plan, shape, pieces), limit_bytes), stage,
                             stages[stage], exposed, _exposed(costs, set(CommCause), whole, rates), mixed, single)


def mixture_of_plan(plan: ParallelPlan, shape: TransformerShape, collectives: CollectiveModel) -> Mixture:
    """Find which backend does each collective of a step, for a rank of the stage that sends most bytes."""
    found = [calls_of(plan, shape, collectives.topology, stage) for stage in range(plan.pp)]
    most = max(found, key=lambda rows: sum(
        call.payload_bytes * count * bus_factor(call.kind, call.ranks) for _, call, count in rows))
    return mixture([call for _, call, _ in most], [count for _, _, count in most], collectives)


def calls_of(plan: ParallelPlan, shape: TransformerShape, on: Topology,
             stage: int) -> list[tuple[CommCause, CollectiveCall, float]]:
    """Return every call of a rank of a stage in a step, with its cause and how often it occurs. A call that overlaps
    its product in pieces counts once."""
    calls = plan_calls(replace(plan, tensor_overlap=False), shape, on)
    counts = _counts(calls, plan, shape, stage)
    found: dict[tuple[CommCause, CollectiveCall], float] = defaultdict(float)
    for key, count in counts.items():
        cause = cause_of(key)
        for row, times in calls.of[key]:
            call = calls.calls[row]
            whole_stage = key in (("reduce", stage), ("gather", stage))
            parts = _parts(plan, shape, stage) if whole_stage else 1
            number = count * times
            part_again = plan.recompute not in (Recomputation.NONE, Recomputation.FULL)
            if part_again and isinstance(key, tuple) and key[1] == "block forward":
                number -= _last_left_out(calls, key, row, plan, shape, stage)
            found[cause, replace(call, payload_bytes=call.payload_bytes / parts)] += number * parts
    return [(cause, call, count) for (cause, call), count in found.items() if count > 0]


def cause_of(name: CallName) -> CommCause:
    """Return the cause of the collectives with this name."""
    text = name if isinstance(name, str) else next(part for part in name if isinstance(part, str))
    return _NAMED[text.removeprefix("root ").split()[0]]


def messages_of(plan: ParallelPlan, shape: TransformerShape, collectives: CollectiveModel,
                stage: int) -> tuple[StepMessages, ...]:
    """Return the calls of ``calls_of`` with their times, by cause, the largest volume first."""
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
    for row, (blocks, rerun) in enumerate(counts_of_stage(plan, shape, stage)):
        for name in ("block", "experts", "context"):
            counts[row, f"{name} forward"] = every * (blocks + rerun)
            counts[row, f"{name} backward"] = every * blocks
        # Of fully sharded parameters: gathered in forward and again in backward.
        counts[row, "gather"], counts[row, "reduce"] = 2 * every * blocks, every * blocks
    counts["root gather"], counts["root reduce"] = every, every
        # Every chunk has a neighbour on either side, except at the model's two ends.
    counts["transfer", stage] = 2 * every * (plan.chunks - last)
    before = "transfer", (stage - 1) % plan.pp
    counts[before] = counts.get(before, 0) + 2 * every * (plan.chunks - first)
    counts["reduce", stage] = every if plan.sharding is Sharding.GRADIENTS else 1
    counts["gather", stage] = 1
    return {key: count for key, count in counts.items() if count and key in calls.of}


def _parts(plan: ParallelPlan, shape: TransformerShape, stage: int) -> int:
    """Return how many messages a call for a stage's gradients or parameters is cut into: with FSDP, its blocks; with
    overlap and without ``bucket_mb``, Megatron-Core's buckets; else 1."""
    if plan.sharding is Sharding.PARAMETERS:
        return sum(count for count, _ in counts_of_stage(plan, shape, stage))
    if not plan.overlap or plan.bucket_mb is not None:
        return 1
    bucket = max(BUCKET_PARAMETERS, BUCKET_PARAMETERS_A_REPLICA * plan.dp * plan.cp)
    return max(math.ceil(stage_parameters(plan, shape, stage) / bucket), 1)


def _last_left_out(calls: PlanCalls, key: CallName, row: int, plan: ParallelPlan, shape: TransformerShape,
                   stage: int) -> int:
    """Return how many calls partial recomputation leaves out: those after a block's last product."""
    if calls.calls[row].kind is CollectiveKind.ALL_GATHER:
        return 0
    return plan.passes * sum(rerun for kind, (_, rerun) in enumerate(counts_of_stage(plan, shape, stage))
                             if (kind, "block forward") == key)


def _exposed(costs: PlanCosts, causes: set[CommCause], whole: Estimate, rates: CorrectionFactors) -> ExposedTime:
    # The slowest GPU's excess is a share of the whole step and not communication.
    rates = replace(rates, jitter=0.0)

    def time(change: Callable[[Exchange], Exchange]) -> float:
        exchanges = {name: change(each) if cause_of(name) in causes else each for name, each in costs.exchanges.items()}
        return estimate(replace(costs, exchanges=exchanges), rates).time_us

    nothing = time(lambda _: NOTHING)
    spread = math.exp(Z80 * whole.spreads.collectives)
    low, high = (time(lambda each, by=by: replace(each, us=by * each.us))  # type: ignore[misc]
                 for by in (1 / spread, spread))
    return ExposedTime(max(time(lambda each: each) - nothing, 0.0), max(low - nothing, 0.0), max(high - nothing, 0.0))


MOST_CASES, _SEVERAL, _MOST_TENSOR = 512, 2, 8
"""Choices: most cases of one study. For ``usual_plans``: stages of a pipeline and parts of a sequence; and most ranks
that share a layer, the GPUs of a usual node."""


@dataclass(frozen=True, repr=False)
class CommStudy(Shown):
    """The communication of several plans.

    Attributes:
        device, topology: the cluster, or the largest of several clusters.
        cases: each plan at each size, in the order of the request.
        refused: plans that are impossible, each with the reason.
        notes: assumptions.
    """

    device: str
    topology: str
    cases: tuple[PlanCommunication, ...]
    refused: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]

    def headline(self) -> str:
        """Return in a line how much of the steps is exposed."""
        shares = [each.all_exposed.us / each.estimate.time_us for each in self.cases]
        found = f"; {min(shares):.1%} to {max(shares):.1%} of the step is exposed communication" if shares else ""
        return f"{len(self.cases)} plans on {self.device}{found}"

    def tables(self) -> Mapping[str, Callable[[], pandas.DataFrame]]:
        """Return tables with a row for each plan, cause, group of equal messages, and size class of messages."""
        return {"plans": partial(_rows_of, self.cases, _plan_rows),
                "causes": partial(_rows_of, self.cases, _cause_rows),
                "messages": partial(_rows_of, self.cases, _message_rows),
                "sizes": partial(_rows_of, self.cases, _size_rows)}


def comm_study(source: str | Job, gpus: Sequence[int], *, device: str = "h200-sxm", topology: str | None = None,
               settings: Sequence[str] = (), presets: Sequence[str] = (), seqs: Sequence[int] = (),
               plans: Sequence[str] = (), global_batch: int | None = None, comm_profile: str | None = None,
               comm_choices: str | None = None, profile: DeviceProfile | None = None) -> CommStudy:
    """Find the messages of a decoder's plans, and how long their steps wait for them.

        source: as in ``plan``.
        gpus: numbers of GPUs to study.
        device, topology: the cluster; by default the device's usual nodes.
        settings: assignments for the model, such as "layers=4".
        presets: presets of the workload; by default its first.
        seqs: tokens of a sequence; by default the source's.
        plans: such as "fsdp2,tp=8"; one size may be left out. By default ``usual_plans``.
        global_batch: sequences of a step; sets the micro-batches of a plan that does not name them.
        comm_profile: a file of measured collectives.
        comm_choices: a file of several backends' measured collectives, or "auto": each is done by the best of them.
        profile: models fitted for the device.

    Raises:
        PlanError: the source is no decoder, a plan cannot be parsed, or there are too many cases.
        ForetraceError: a name is unknown, or a file cannot be read.
    """
    count = len(gpus) * max(len(presets), 1) * max(len(seqs), 1) * max(len(plans), 1)
    if count > MOST_CASES:
        raise PlanError(f"These are {count:,} cases, and at most {MOST_CASES} are studied at once; ask for fewer sizes "
                        "or plans.")
    spec = find_device(device)
    known = cluster_of(topology, comm_profile, None, comm_choices, lambda: planned_topology(spec, max(gpus)))
    named = topology is not None or measured_file(comm_profile, comm_choices) is not None
    pieces, rates = LayerCosts(spec, profile), CorrectionFactors()
    cases: list[PlanCommunication] = []
    refused: dict[str, str] = {}
    notes: list[str] = []
    on = known.topology
    for preset in presets or (None,):
        for seq in seqs or (None,):
            name, shape, _, own = read_decoder(source, settings, preset)
            if seq is not None:
                _, shape, _, own = read_decoder(source, (*settings, f"seq={seq}"), preset)
            notes += own
            for size in gpus:
                cluster = known if named else replace(known, topology=planned_topology(spec, size))
                for text in plans or usual_plans(shape, size, cluster.topology):
                    try:
                        plan = with_batch(ParallelPlan.parse(text, size), text, global_batch)
                        cluster.check_fits(size)
                        cases.append(study_communication(name, shape, plan, pieces, cluster, rates,
                                                         spec.memory_gb * 1e9))
                    except PlanError as error:
                        refused.setdefault(str(error), f"{text} on {size:,} GPUs")
    if not cases and refused:
        raise PlanError(next(iter(refused)))
    notes += other_nodes(on, spec)
    notes.append(f"A launch is taken to cost the host {rates.host_us:g} µs.")
    return CommStudy(spec.name, on.name, tuple(cases), tuple((text, why) for why, text in refused.items()),
                     tuple(dict.fromkeys(notes)))


def usual_plans(shape: TransformerShape, gpus: int, on: Topology) -> list[str]:
    """Return plans that show each kind of communication the model can have on ``gpus`` GPUs: ZeRO 0 to 3; tensor
    parallelism without and with sequence parallelism; a pipeline; context parallelism; expert parallelism."""
    tensor = max(size for size in (1, 2, 4, _MOST_TENSOR) if size <= min(on.node.gpus, gpus) and not any(
        value % size for kind in shape.kinds
        for value in (gpus, kind.ffn, *(heads for _, heads, _, _ in kind.shared_heads(size, 1)))))
    found = ["ddp", "dp,sharding=1", "dp,sharding=2", "fsdp2"] if gpus > 1 else ["dp"]
    if tensor > 1:
        found += [f"dp,tp={tensor},sharding=1", f"dp,tp={tensor},sequence_parallel,sharding=1",
                  f"fsdp2,tp={tensor},sequence_parallel"]
    split = f"tp={tensor},sequence_parallel," if tensor > 1 and gpus >= tensor * _SEVERAL else ""
    if gpus % (_SEVERAL * (tensor if split else 1)) == 0:
        found += [f"dp,pp={_SEVERAL},{split}sharding=1", f"dp,cp={_SEVERAL},{split}sharding=1"]
    experts = max((kind.experts for kind in shape.kinds), default=0)
    shared = max((size for size in range(2, min(gpus, experts) + 1) if not gpus % size and not experts % size),
                 default=1)
    return [*found, f"dp,ep={shared},sharding=1"] if shared > 1 else found


def _rows_of(cases: Sequence[PlanCommunication],
             rows: Callable[[PlanCommunication], list[dict[str, Any]]]) -> pandas.DataFrame:
    return frame_of({"model": case.model, "seq": case.shape.seq, "gpus": case.estimate.plan.world_size,
                     "plan": str(case.estimate.plan)} | row for case in cases for row in rows(case))


def _plan_rows(each: PlanCommunication) -> list[dict[str, Any]]:
    e, all_of_it = each.estimate, each.all_exposed
    return [{"step_ms": e.time_us / 1e3, "step_low_ms": e.low_us / 1e3, "step_high_ms": e.high_us / 1e3,
             "exposed_ms": all_of_it.us / 1e3, "exposed_low_ms": all_of_it.low / 1e3,
             "exposed_high_ms": all_of_it.high / 1e3, "exposed_share": all_of_it.us / e.time_us,
             "alone_ms": each.alone_us / 1e3, "sent_gb": each.wire_bytes / 1e9,
             "messages": sum(row.count for row in each.messages), "stage": each.stage, "fits": each.fit.value,
             **({} if each.mixture is None else _gained(each.mixture, e.time_us, each.single_us))}]


def _gained(mixed: Mixture, step_us: float, single_us: float) -> dict[str, Any]:
    gain, low, high = mixed.step_gain(step_us, single_us)
    return {"best_single": mixed.best_single, "single_step_ms": single_us / 1e3, "gain_ms": gain / 1e3,
            "gain_low_ms": low / 1e3, "gain_high_ms": high / 1e3}


def _cause_rows(each: PlanCommunication) -> list[dict[str, Any]]:
    def of(cause: object, what: Callable[[Any], float]) -> float:
        return sum(what(row) for row in each.messages if row.cause is cause)

    return [{"cause": cause.value, "exposed_ms": time.us / 1e3, "exposed_low_ms": time.low / 1e3,
             "exposed_high_ms": time.high / 1e3, "alone_ms": of(cause, lambda row: row.count * row.us) / 1e3,
             "payload_gb": of(cause, lambda row: row.volume_bytes) / 1e9,
             "sent_gb": of(cause, lambda row: row.wire_bytes) / 1e9, "messages": of(cause, lambda row: row.count)}
            for cause, time in each.exposed.items()]


def _message_rows(each: PlanCommunication) -> list[dict[str, Any]]:
    return [{"cause": row.cause.value, "collective": row.kind.label, "ranks": row.ranks, "nodes": row.nodes,
             "payload_bytes": row.payload_bytes, "count": row.count, "us": row.us,
             "sent_gb": row.wire_bytes / 1e9} for row in each.messages]


def _size_rows(each: PlanCommunication) -> list[dict[str, Any]]:
    return [{"collective": kind.label, "from_bytes": 2 ** power, "count": count, "payload_gb": volume / 1e9}
            for (kind, power), (count, volume) in each.histogram().items()]
