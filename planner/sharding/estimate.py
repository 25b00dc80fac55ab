"""``estimate``: the step of one sharding in full: phases, look-ups of every rank, interval, sources, memory of each
rank, and the bound.

``anchored_problem``: a sharding problem whose prices are scaled to a recorded step.

::

    ``dense part``   measured                             × model(new) / model(recorded) on another device or batch.
    ``look-ups``     model × measured / model(recorded sharding)                also on another device.
    ``exchanges``    model × measured / model(recorded sharding)                only the model on another cluster.
    ``host``         idle time of the recorded step's device                    unchanged.

The recorded step is assumed to exchange its own indices before its look-ups, not the next batch's during them. Captured
workloads with ``pipelined=true`` are the exception.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from graph_predictor.figures import signed_percent
from graph_predictor.prediction.pricing import change_ratios
from kernel_models.collectives import CollectiveCall, CollectiveModel, CommError, topology_of
from kernel_models.device import DeviceSpec
from kernel_models.lookups import backward_call, forward_call, unfused_calls
from kernel_models.op_call import OpCall, Source, TablePart
from kernel_models.pricing import price
from kernel_models.spreads import HOST_AT_CAPTURED, MEASURED_KERNELS
from planner.sharding.choices import INPUT_COPIES, Choices, choices_of
from planner.sharding.problem import (
    NO_ANCHORS,
    RESERVED_BYTES,
    Anchors,
    DenseWork,
    ShardingPlan,
    ShardingProblem,
    WorkAnchor,
    prices,
)
from planner.sharding.sources import RecordedSharding, RecordedStep, StepPart
from planner.sharding.step import (
    INDEX,
    LENGTHS_BYTES,
    SENT,
    Assignment,
    PricedExchange,
    RankLoads,
    Scores,
    StepModel,
    assignment_of,
)
from tracer.arrays import Float64
from tracer.device_memory import MemoryAccount
from tracer.lookup_data.plan_file import ShardingError, ShardKind
from tracer.parallel_plan import PlanError


@dataclass(frozen=True)
class ShardedStep:
    """The predicted step of a sharding plan.

    Attributes:
        plan: the sharding.
        time_us, low_us, high_us: the step and its 80% interval.
        phases: time that the step waits for each phase, µs, by name; their sum is the step.
        forward_us, backward_us: look-ups of each rank, µs [ranks].
        sent_bytes, index_bytes: vectors that each rank sends, and indices that it receives [ranks].
        memory: device memory of each rank.
        host_bytes: bytes of tables in the memory of each rank's host [ranks].
        sources: time that the step waits for, µs, by ``Source``.
        calls: the step's collectives.
    """

    plan: ShardingPlan
    time_us: float
    low_us: float
    high_us: float
    phases: Mapping[str, float]
    forward_us: Float64
    backward_us: Float64
    sent_bytes: Float64
    index_bytes: Float64
    memory: tuple[MemoryAccount, ...]
    host_bytes: Float64
    sources: Mapping[int, float]
    calls: tuple[CollectiveCall, ...] = ()

    @property
    def compute_us(self) -> Float64:
        """Look-ups of each rank, forward and backward, µs [ranks]."""
        return self.forward_us + self.backward_us

    @property
    def communication_us(self) -> float:
        """Exposed time of exchanges, µs."""
        return sum(us for name, us in self.phases.items() if name in EXCHANGES)

    @property
    def imbalance(self) -> float:
        """Look-ups of the slowest rank over the mean of all ranks."""
        mean = float(self.compute_us.mean())
        return float(self.compute_us.max()) / mean if mean else 1.0

    @property
    def fullest(self) -> MemoryAccount:
        """Memory of the rank that needs most."""
        return max(self.memory, key=lambda each: each.total)

    @property
    def bound(self) -> str:
        """Return the name of the largest part of the step: look-ups of the slowest rank, an exchange or other work."""
        parts = {"look-ups": self.phases["look-ups"] + self.phases["look-ups, backward"],
                 "vectors": self.phases["vectors"] + self.phases["gradients of vectors"],
                 "indices": self.phases["indices"], "dense part": self.phases["dense"],
                 "all-reduce": self.phases["all-reduce"] + self.phases["copied tables"],
                 "host": self.phases["host"], "inputs": self.phases["inputs"]}
        name = max(parts, key=lambda each: parts[each])
        return f"{name}, rank {int(self.compute_us.argmax())}" if name == "look-ups" else name


EXCHANGES = ("indices", "vectors", "gradients of vectors", "all-reduce")
"""Phases that are collectives."""


def estimate(scores: Scores, assignment: Assignment) -> ShardedStep:
    """Estimate the step of an assignment, with each rank's look-ups priced as one kernel."""
    problem, choices = scores.problem, scores.choices
    loads = scores.adder.loads(assignment)
    ahead, back = rank_lookups(problem, choices, scores, assignment)
    dense = problem.dense
    indices, vectors, gradients, (reduced, dense_reduced) = exchanges_of(scores, loads)
    forward, backward = float(ahead.us.max()), float(back.us.max())
    # The bottom MLP overlaps the exchange; only its excess counts, as part of the dense work.
    out, home = (sum(each.us for each in found) for found in (vectors, gradients))
    received, hidden = sum(each.us for each in indices), scores.model.hidden_us
    phases = {
        "indices": max(received - hidden, 0.0), "inputs": max(dense.inputs - max(hidden - received, 0.0), 0.0),
        "look-ups": forward, "vectors": out,
        "dense": (dense.top_forward + dense.top_backward + dense.optimizer + max(dense.bottom_forward - out, 0.0)
                  + max(dense.bottom_backward - home, 0.0)),
        "gradients of vectors": home, "look-ups, backward": backward,
        "all-reduce": max(dense_reduced.us - backward, 0.0) + reduced.us, "copied tables": loads.copy_us,
        "host": dense.host}
    total = sum(phases.values())
    waited = [*(indices if phases["indices"] else []), *vectors, *gradients, reduced]
    low, high = _interval(problem, total, phases, ahead, back, waited)
    sources = _sources(problem, phases, ahead, back, waited)
    return ShardedStep(assignment.plan(problem, choices), total, low, high, phases, ahead.us, back.us,
                       loads.sums[SENT].copy(), loads.sums[INDEX].copy(),
                       _memory(problem, choices, scores, assignment, loads), loads.host_bytes.copy(), sources,
                       tuple(each.call for each in (*indices, *vectors, *gradients, reduced, dense_reduced)
                             if each.call is not None))


def exchanges_of(scores: Scores, loads: RankLoads) -> tuple[list[PricedExchange], ...]:
    """Return a step's collectives: of indices, of vectors, of their gradients, and all-reduces (gradients of copied
    tables and of the dense part)."""
    e = scores.model.exchanges
    node, cross = loads.node_bytes.max(initial=0.0), loads.cross_bytes.max(initial=0.0)
    sent, index = float(loads.sums[SENT].max()), float(loads.sums[INDEX].max())
    across = e.across_nodes.priced(float(cross))
    vectors = [e.all_to_all.priced(sent), e.reduce_scatter.priced(loads.reduced_bytes),
               e.node_reduce_scatter.priced(float(node)), across]
    gradients = [vectors[0], e.all_gather.priced(loads.reduced_bytes), e.node_all_gather.priced(float(node)),
                 across] if scores.problem.trained else []
    indices = [e.all_to_all.priced(index), e.all_to_all.priced(LENGTHS_BYTES if index > 0 else 0.0)]
    return indices, vectors, gradients, [e.all_reduce.priced(loads.gradient_bytes),
                                         e.all_reduce.priced(scores.problem.dense.gradient_bytes)]


@dataclass(frozen=True, slots=True)
class RankCalls:
    """Look-ups of each rank: time and 80% interval, µs, and source [ranks]."""

    us: Float64
    low: Float64
    high: Float64
    source: Float64


def rank_lookups(problem: ShardingProblem, choices: Choices, scores: Scores, assignment: Assignment) -> tuple[
        RankCalls, RankCalls]:
    """Return every rank's look-ups, forward and backward with the optimizer, as one kernel a rank or table by table."""
    parts: list[list[TablePart]] = [[] for _ in range(problem.ranks)]
    fused: list[list[TablePart]] = [[] for _ in range(problem.ranks)]
    for choice, place in zip(assignment.choice.tolist(), assignment.place.tolist(), strict=True):
        part = choices.units[choice]
        if not part.lookups:
            continue
        for rank in scores.adder.ranks_of(choice, place).tolist():
            parts[rank].append(part)
            if problem.trained and choices.kinds[choice] is not ShardKind.DATA_PARALLEL:
                fused[rank].append(part)
    if problem.fused:
        ahead, back = ([[call(each)] if each else [] for each in of] for call, of in (
            (forward_call, parts), (backward_call, fused)))
    else:
        ahead = [[forward_call([part]) for part in each] for each in parts]
        back = [[call for part in each for call in unfused_calls(part)] for each in fused]
    return (_priced(problem, ahead, problem.anchors.forward), _priced(problem, back, problem.anchors.backward))


def _priced(problem: ShardingProblem, calls: list[list[OpCall]], anchor: WorkAnchor | None) -> RankCalls:
    """Return the sum over each rank's calls, with fully correlated errors and the source of the longest call."""
    columns = np.zeros((4, len(calls)))
    every = [call for of in calls for call in of]
    if every:
        found = price(every, problem.device, problem.models)
        rank = np.repeat(np.arange(len(calls)), [len(of) for of in calls])
        for row, values in enumerate((found.time_us, found.low_us, found.high_us)):
            columns[row] = np.bincount(rank, weights=values[found.index], minlength=len(calls))
        order = np.argsort(found.time_us[found.index], kind="stable")
        columns[3, rank[order]] = found.source[found.index][order]
        rows = np.flatnonzero(columns[0])
        if anchor is not None:
            us, low, high = columns[:3, rows]
            time, anchored_low, anchored_high = anchor.times(us, low, high)
            # The recorded look-ups read rows on the device, so they do not narrow the interval of rows on hosts.
            far = np.array([any("host_rows" in call.flags for call in calls[i]) for i in rows])
            columns[:3, rows] = (time, np.where(far, np.minimum(anchored_low, time * low / us), anchored_low),
                                 np.where(far, np.maximum(anchored_high, time * high / us), anchored_high))
            columns[3, rows] = Source.ANCHORED
    return RankCalls(*columns)


def _interval(problem: ShardingProblem, total: float, phases: Mapping[str, float], ahead: RankCalls,
              back: RankCalls, waited: list[PricedExchange]) -> tuple[float, float]:
    """Return the ends of the step's 80% interval; look-ups, exchanges, dense work and host have independent errors."""
    exchanged = sum(each.us for each in waited)
    share = sum(phases[name] for name in EXCHANGES) / exchanged if exchanged else 0.0
    dense = phases["dense"] / problem.dense.us if problem.dense.us else 0.0
    ends = []
    for sign, end in ((-1, "low"), (1, "high")):
        lookups = 0.0
        for calls in (ahead, back):
            slowest = int(calls.us.argmax())
            lookups += abs(float((calls.low if end == "low" else calls.high)[slowest] - calls.us[slowest]))
        # Work on copied tables is priced like look-ups and has the same error.
        lookups *= 1 + phases["copied tables"] / max(phases["look-ups"] + phases["look-ups, backward"], 1e-12)
        wire = share * abs(_exchange_end(problem, waited, end) - exchanged)
        work = dense * abs(getattr(problem.dense, end) - problem.dense.us)
        host = HOST_AT_CAPTURED * phases["host"]
        ends.append(total + sign * float(np.sqrt(lookups**2 + wire**2 + work**2 + host**2)))
    return max(ends[0], 0.0), ends[1]


def _exchange_end(problem: ShardingProblem, waited: list[PricedExchange], end: str) -> float:
    """Return an end of the exchanges' interval; with an anchor, only the change from the recorded ones is uncertain."""
    anchor = problem.anchors.exchanges
    if anchor is None:
        return float(sum(getattr(one, end) for one in waited))
    sums = (np.array([sum(getattr(one, name) for one in waited) / anchor.factor]) for name in ("us", "low", "high"))
    _, low, high = anchor.times(*sums)
    return float((low if end == "low" else high)[0])


def _sources(problem: ShardingProblem, phases: Mapping[str, float], ahead: RankCalls, back: RankCalls,
             waited: list[PricedExchange]) -> dict[int, float]:
    found: dict[int, float] = {}

    def add(source: int, us: float) -> None:
        if us > 0:
            found[source] = found.get(source, 0.0) + us

    for each, name in ((ahead, "look-ups"), (back, "look-ups, backward")):
        add(int(each.source[each.us.argmax()]), phases[name])
    exchanged = sum(each.us for each in waited)
    for one in waited:
        add(int(one.source), one.us / exchanged * sum(phases[name] for name in EXCHANGES) if exchanged else 0.0)
    dense = sum(problem.dense.sources.values())
    for source, us in problem.dense.sources.items():
        add(int(source), us / dense * phases["dense"])
    add(int(Source.HEURISTIC if problem.anchors.backward is None else Source.ANCHORED), phases["copied tables"])
    add(int(Source.MEASURED), phases["host"])
    add(int(Source.HEURISTIC), phases["inputs"])
    return dict(sorted(found.items()))


def _memory(problem: ShardingProblem, choices: Choices, scores: Scores, assignment: Assignment,
            loads: RankLoads) -> tuple[MemoryAccount, ...]:
    columns = {name: np.zeros(problem.ranks) for name in (
        "weight_bytes", "state_bytes", "gradient_memory", "buffer_bytes")}
    for choice, place in zip(assignment.choice.tolist(), assignment.place.tolist(), strict=True):
        for name, values in columns.items():
            values[scores.adder.ranks_of(choice, place)] += getattr(choices, name)[choice]
    indices = np.minimum(INPUT_COPIES * loads.sums[INDEX], columns["buffer_bytes"])
    return tuple(MemoryAccount(
        parameters=float(columns["weight_bytes"][rank]), gradients=float(columns["gradient_memory"][rank]),
        optimizer_state=float(columns["state_bytes"][rank]), activations=problem.dense.memory_bytes,
        buffers=float(indices[rank]), temporaries=float(columns["buffer_bytes"][rank] - indices[rank])
        + problem.received_bytes, reserved=RESERVED_BYTES) for rank in range(problem.ranks))


@dataclass(frozen=True)
class AnchoredProblem:
    """A problem whose prices are scaled to a recorded step.

    Attributes:
        problem: the problem to search.
        own: the recorded sharding's step on its own cluster, with the same anchors; ``None`` if it is no plan.
        measured_us: the measured time of that step.
        notes: which parts are measured.
    """

    problem: ShardingProblem
    own: ShardedStep | None
    measured_us: float
    notes: tuple[str, ...]


def anchored_problem(problem: ShardingProblem, found: RecordedSharding, same_cluster: bool) -> AnchoredProblem:
    """Scale a problem's prices to a recorded step.

    Args:
        problem: the problem with modelled prices.
        found: the recorded step.
        same_cluster: whether the job stays on the recorded cluster, according to the user.
    """
    step = found.step
    spec = step.device
    if spec is None or (spec.vendor == "host") != (problem.device.vendor == "host"):
        name = "an unknown device" if spec is None else spec.name
        return AnchoredProblem(problem, None, step.step, (
            f"The step was recorded on {name}, which runs other operations than {problem.device.name}: nothing of it "
            "is measured here, all is priced.",))
    elsewhere = spec.name != problem.device.name
    noise = HOST_AT_CAPTURED if spec.vendor == "host" else MEASURED_KERNELS
    dense = measured_dense(problem.dense, found.dense, step, elsewhere, noise)
    growth = problem.samples / found.samples
    unscaled = growth != 1.0 and problem.dense == found.dense
    if unscaled:  # the trace cannot be traced again with more samples
        dense = replace(dense, low=dense.low * min(growth, 1.0), high=dense.high * max(growth, 1.0))
    idle = "of the host outside operations" if spec.vendor == "host" else "in which its device waited for the host"
    notes = [f"Measured in the recorded step: the dense part, {dense.us / 1e3:,.3f} ms"
             + (f" when scaled from {spec.name} to {problem.device.name}" if elsewhere else "")
             + f", and {step.host / 1e3:,.3f} ms {idle}, which stay."]
    if unscaled:
        notes.append(f"The dense part is that of the recorded {found.samples:,} samples a rank, with an interval that "
                     f"reaches {growth:.3g} times as much; give the capture of a workload to scale it.")
    where = _where_recorded(problem, found, spec)
    if where is None:
        notes.append("Where the recorded tables lie is no sharding that a plan can have, or not all ranks were "
                     "recorded: look-ups and exchanges are priced by models.")
        return AnchoredProblem(replace(problem, dense=dense), None, step.step, tuple(notes))
    there, plan = where
    anchors = _anchors(there, plan, step, noise)
    local = replace(there, dense=measured_dense(found.dense, found.dense, step, False, noise), anchors=anchors)
    choices = choices_of(local, plan.shardings)
    own = estimate(Scores(local, choices, StepModel(local)), assignment_of(plan, choices))
    kept = replace(anchors, exchanges=anchors.exchanges if same_cluster and not elsewhere else None, **{
        name: None if each is None else replace(each, elsewhere=elsewhere)
        for name, each in (("forward", anchors.forward), ("backward", anchors.backward))})
    notes.append(f"Anchored on it, measured over modelled: {_factors(kept)}.")
    notes.append(f"The recorded sharding on {found.ranks} ranks took {step.step / 1e3:,.3f} ms; under this model "
                 f"{own.time_us / 1e3:,.3f} ms ({signed_percent(own.time_us / max(step.step, 1e-9) - 1)}).")
    return AnchoredProblem(replace(problem, dense=dense, anchors=kept), own, step.step, tuple(notes))


def measured_dense(after: DenseWork, before: DenseWork, step: RecordedStep, elsewhere: bool,
                   noise: float) -> DenseWork:
    """Return the dense part of a recorded step after a change of device or batch.

    Args:
        after, before: modelled dense part after the change, and in the recording.
        elsewhere: whether the device changes.
        noise: spread of measured times, as a logarithm.
    """
    whole = after.us / before.us if before.us and after.us else 1.0

    def times(part: StepPart, *names: str) -> list[float]:
        measured, was = step.mean(part), sum(getattr(before, name) for name in names)
        if was <= 0:
            return [0.0] * (len(names) - 1) + [measured * whole]
        return [getattr(after, name) * measured / was for name in names]

    bottom_forward, top_forward = times(StepPart.DENSE_FORWARD, "bottom_forward", "top_forward")
    bottom_backward, top_backward = times(StepPart.DENSE_BACKWARD, "bottom_backward", "top_backward")
    (optimizer,) = times(StepPart.OPTIMIZER, "optimizer")
    us = bottom_forward + top_forward + bottom_backward + top_backward + optimizer
    was, will = (prices(*(np.array([value]) for value in (each.us, each.low, each.high))) for each in (before, after))
    ratio = change_ratios(was, will, elsewhere)
    moved = elsewhere or after != before
    low, high = (float(np.hypot(end[0], noise)) if moved else noise for end in (ratio.low, ratio.high))
    return replace(after, bottom_forward=bottom_forward, top_forward=top_forward, bottom_backward=bottom_backward,
                   top_backward=top_backward, optimizer=optimizer, inputs=0.0, low=us * float(np.exp(-low)),
                   high=us * float(np.exp(high)), host=step.host,
                   sources={int(Source.ANCHORED if moved else Source.MEASURED): us})


def _where_recorded(problem: ShardingProblem, found: RecordedSharding, spec: DeviceSpec) -> tuple[
        ShardingProblem, ShardingPlan] | None:
    """Return the problem of the recorded job, with modelled prices, and its plan; ``None`` if it is no valid plan."""
    if found.shardings is None:
        return None
    try:
        collectives = problem.collectives.by_one()
        if spec != problem.device or found.ranks > collectives.topology.gpus:
            collectives = CollectiveModel(topology_of(spec, found.ranks))
        there = replace(problem, device=spec, models=problem.models if spec == problem.device else None,
                        samples=found.samples, ranks=found.ranks, collectives=collectives, dense=found.dense,
                        memory_bytes=float("inf"), kinds=frozenset(ShardKind), pinned={},
                        pipelined=found.pipelined, anchors=NO_ANCHORS)
        return there, ShardingPlan(problem.tables, found.shardings, there.ranks, there.per_node)
    except (ShardingError, PlanError, CommError):
        return None


def _anchors(problem: ShardingProblem, plan: ShardingPlan, step: RecordedStep, noise: float) -> Anchors:
    choices = choices_of(problem, plan.shardings)
    scores = Scores(problem, choices, StepModel(problem))
    assignment = assignment_of(plan, choices)
    loads = scores.adder.loads(assignment)
    ahead, back = rank_lookups(problem, choices, scores, assignment)
    wires = [one for each in exchanges_of(scores, loads) for one in each]
    return Anchors(*(
        WorkAnchor(measured, us, low, high, noise) if measured > 0 and us > 0 else None
        for measured, (us, low, high) in (
            (step.mean(StepPart.LOOKUPS), [float(each.mean()) for each in (ahead.us, ahead.low, ahead.high)]),
            (step.mean(StepPart.GRADIENTS), [float(each.mean()) + loads.copy_us
                                             for each in (back.us, back.low, back.high)]),
            (step.exchanged, [sum(getattr(one, name) for one in wires) for name in ("us", "low", "high")]))))


def _factors(anchors: Anchors) -> str:
    named = (("look-ups", anchors.forward), ("their gradients and updates", anchors.backward),
             ("exchanges", anchors.exchanges))
    return ", ".join(f"{name} × {each.factor:.3g}" if each else f"{name} by models" for name, each in named)
