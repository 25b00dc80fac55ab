"""``anchored_problem``: a sharding problem whose prices rest on a recorded step.

::

    dense part   measured                  (on another device or with another batch × model(there) / model(recorded))
    look-ups     model × measured / model(recorded sharding)                          likewise on another device
    exchanges    model × measured / model(recorded sharding)                          priced anew on another cluster
    host         what the recorded step's device had nothing to do: it stays

The recorded step is taken to exchange its own indices before its look-ups, not the next batch's beside them, unless it
is of a captured workload with ``pipelined=true``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from graph_predictor.figures import signed_percent
from graph_predictor.prediction.pricing import SHARED_VARIANCE, anchored
from kernel_models.collectives import CollectiveModel, CommError, topology_of
from kernel_models.device import DeviceSpec
from kernel_models.op_call import Source
from kernel_models.spreads import HOST_AT_CAPTURED, MEASURED_KERNELS
from planner.sharding.choices import choices_of
from planner.sharding.estimate import RankCalls, ShardedStep, estimate, exchanges_of, rank_lookups
from planner.sharding.problem import NO_ANCHORS, Anchors, DenseWork, ShardingPlan, ShardingProblem, WorkAnchor, prices
from planner.sharding.scoring import Scores
from planner.sharding.sources import RecordedSharding, RecordedStep, StepPart
from planner.sharding.step import StepModel, assignment_of
from tracer.lookup_data.plan_file import ShardingError, ShardKind
from tracer.parallel_plan import PlanError


@dataclass(frozen=True)
class AnchoredProblem:
    """A problem with what was measured.

    Attributes:
        problem: to be searched.
        own: the recorded sharding's step under the same anchors, where it ran; ``None`` where it is no plan.
        measured_us: that step as measured.
        notes: which part is measured.
    """

    problem: ShardingProblem
    own: ShardedStep | None
    measured_us: float
    notes: tuple[str, ...]


def anchored_problem(problem: ShardingProblem, found: RecordedSharding, same_cluster: bool) -> AnchoredProblem:
    """Rest a problem's prices on a recorded step.

    Args:
        problem: priced by models alone.
        found: the recorded step.
        same_cluster: whether the job stays on the cluster it was recorded on, as far as the user says.
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
    if unscaled:  # of a trace that cannot be traced again
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
    own = _estimated(local, plan)
    kept = replace(anchors, exchanges=anchors.exchanges if same_cluster and not elsewhere else None, **{
        name: None if each is None else replace(each, elsewhere=elsewhere)
        for name, each in (("forward", anchors.forward), ("backward", anchors.backward))})
    notes.append(f"Anchored on it, measured over modelled: {_factors(kept)}.")
    notes.append(f"The recorded sharding on {found.ranks} ranks took {step.step / 1e3:,.3f} ms; under this model "
                 f"{own.time_us / 1e3:,.3f} ms ({signed_percent(own.time_us / max(step.step, 1e-9) - 1)}).")
    return AnchoredProblem(replace(problem, dense=dense, anchors=kept), own, step.step, tuple(notes))


def measured_dense(after: DenseWork, before: DenseWork, step: RecordedStep, elsewhere: bool,
                   noise: float) -> DenseWork:
    """The dense part of a recorded step after a change of device or batch.

    Args:
        after, before: by models: as it will be, and as it was recorded.
        elsewhere: on another device.
        noise: of measured times.
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
    ratio = anchored(was, will, float(np.sqrt(1 - SHARED_VARIANCE)) if elsewhere else None)
    moved = elsewhere or after != before
    low, high = (float(np.hypot(end[0], noise)) if moved else noise for end in (ratio.low, ratio.high))
    return replace(after, bottom_forward=bottom_forward, top_forward=top_forward, bottom_backward=bottom_backward,
                   top_backward=top_backward, optimizer=optimizer, inputs=0.0, low=us * float(np.exp(-low)),
                   high=us * float(np.exp(high)), host=step.host,
                   sources={int(Source.ANCHORED if moved else Source.MEASURED): us})


def _where_recorded(problem: ShardingProblem, found: RecordedSharding, spec: DeviceSpec) -> tuple[
        ShardingProblem, ShardingPlan] | None:
    """The problem of the recorded job, by models alone, and its plan; ``None`` where it is none."""
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
    return Anchors(_anchor(step.mean(StepPart.LOOKUPS), ahead, 0.0, noise),
                   _anchor(step.mean(StepPart.GRADIENTS), back, loads.copy_us, noise),
                   _sum_anchor(step.exchanged, sum(one.us for one in wires), sum(one.low for one in wires),
                               sum(one.high for one in wires), noise))


def _anchor(measured: float, calls: RankCalls, more: float, noise: float) -> WorkAnchor | None:
    us, low, high = (float(each.mean()) + more for each in (calls.us, calls.low, calls.high))
    return _sum_anchor(measured, us, low, high, noise)


def _sum_anchor(measured: float, us: float, low: float, high: float, noise: float) -> WorkAnchor | None:
    return WorkAnchor(measured, us, low, high, noise) if measured > 0 and us > 0 else None


def _estimated(problem: ShardingProblem, plan: ShardingPlan) -> ShardedStep:
    choices = choices_of(problem, plan.shardings)
    return estimate(Scores(problem, choices, StepModel(problem)), assignment_of(plan, choices))


def _factors(anchors: Anchors) -> str:
    named = (("look-ups", anchors.forward), ("their gradients and updates", anchors.backward),
             ("exchanges", anchors.exchanges))
    return ", ".join(f"{name} × {each.factor:.3g}" if each else f"{name} by models" for name, each in named)
