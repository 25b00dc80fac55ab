"""``explain``: what may cause the difference between a measured step and its estimate, each cause tried alone.

A cause changes one input of the estimate: a factor, a setting of the plan, a kernel of the decoder, or the framework.
Each has a range with a source. The estimator gives the change of the step within the range. A cause alone explains the
measured step if this lies between the steps at the ends of the range.

Two sources serve several causes. *Steps*: the differences between published steps and their estimates (``PlanSpreads``,
80%). *Boards*: Sinha et al., "Not All GPUs Are Created Equal", 2022 (arXiv 2208.11035): GPUs of one cluster differ by
at most 22%, outliers take 1.5 times the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import exp
from typing import Any

from planner.parallel.calibrate import MOST_OFF
from planner.parallel.corrections import PUBLISHED, Z80, CorrectionFactors
from planner.parallel.estimate import Estimate, estimate
from planner.parallel.frameworks import PLAIN, profile_of
from planner.parallel.layer_costs import LayerCosts
from planner.parallel.plan_costs import costs_of_plan
from planner.parallel.planning import PlanJob, job_of
from planner.parallel.search import REPEATED
from tracer.parallel_plan import Dispatcher, Graphs, ParallelPlan, PlanError, Recomputation, Sharding, slowest_of
from tracer.shape_only.errors import ShapeOnlyError
from tracer.shape_only.transformer import TransformerShape

STEPS = "1,026 published steps (benchmarks/plan_intervals.py), 80%"
BOARDS = "Sinha et al., 2022: GPUs of one cluster differ by up to 22%"
OUTLIERS = "Sinha et al., 2022: outliers take 1.5 times as long as the median GPU"
NETWORK = "Hugging Face's H100 nodes: from 0.85 of the formula's time to 170 of 400 GB/s"
EAGER = "from CUDA graphs to nanotron's 74 µs a launch (planner/parallel/frameworks.toml)"
FIXED = "nanotron's 90 ms a step (planner/parallel/frameworks.toml)"
BESIDE = "Lee et al., 2025: none to 40%"
LOADS = "Wang et al., 2024 (Auxiliary-Loss-Free Load Balancing), table 2: up to 1.7 with an auxiliary loss"
SETTING = "the plan's setting may be another than was said"
KERNELS = "the program may lack the kernel"
EVERY_ROUND = 14
"""Halvings of a range in the search for the value that reaches the measured step."""


@dataclass(frozen=True, slots=True)
class _State:
    """Inputs of a step's estimate, apart from the cluster."""

    plan: ParallelPlan
    shape: TransformerShape
    rates: CorrectionFactors
    pieces: LayerCosts


Change = Callable[[_State, float], _State]


@dataclass(frozen=True, slots=True)
class StepCause:
    """A possible cause of a longer or shorter step.

    Attributes:
        name: description.
        usual, least, most: the estimate's value, and the ends of the range; a switch goes from 0 to 1.
        change: returns the inputs of the estimate with a value of the cause.
        source: source of the range.
        unit: unit of the value in reports; "" for a switch.
        joined: whether the cause can occur together with all others.
    """

    name: str
    usual: float
    least: float
    most: float
    change: Change
    source: str
    unit: str = ""
    joined: bool = True


@dataclass(frozen=True, slots=True)
class Explanation:
    """How far a cause changes the step.

    Attributes:
        cause: the cause.
        low_us, high_us: least change (0 or negative) and largest change (0 or positive) of the step in the range, µs.
        covers: share of the gap that the cause can cover; 1.0 if it alone reaches the measured step.
        needed: value that reaches the measured step (for a switch, the share of its change); ``None`` if none does.
    """

    cause: StepCause
    low_us: float
    high_us: float
    covers: float
    needed: float | None = None

    @property
    def reaches(self) -> bool:
        """Return whether the cause alone reaches the measured step."""
        return self.covers >= 1.0

    @property
    def strain(self) -> float:
        """Return, from 0 to 1, how far into its range the cause must go, or the unused share of a switch's change; 1 if
        the cause does not reach the measured step."""
        if self.needed is None:
            return 1.0
        if not self.cause.unit:
            return 1.0 - self.needed
        end = self.cause.most if self.needed > self.cause.usual else self.cause.least
        return abs(self.needed - self.cause.usual) / abs(end - self.cause.usual)


@dataclass(frozen=True, slots=True)
class ExplainedStep:
    """A measured step, its estimate, and possible causes of the gap, likeliest first.

    Attributes:
        measured_us: the measured step, µs.
        estimate: its estimate.
        causes: causes that move the step towards the measured one: first those that reach it alone, by ``strain``,
            then those that cover most.
        away: causes that only move the step the other way.
        together_us: the step with all ``causes`` at the ends of their ranges, as far as they can occur together, µs.
        notes: assumptions.
    """

    measured_us: float
    estimate: Estimate
    causes: tuple[Explanation, ...]
    away: tuple[Explanation, ...]
    together_us: float
    notes: tuple[str, ...] = ()

    @property
    def gap_us(self) -> float:
        """Measured step minus estimate, µs."""
        return self.measured_us - self.estimate.time_us

    @property
    def inside(self) -> bool:
        """Return whether the measured step lies inside the 80% interval."""
        return self.estimate.low_us <= self.measured_us <= self.estimate.high_us

    @property
    def verdict(self) -> str:
        """Text that says in a sentence or two what explains the gap."""
        if abs(self.gap_us) <= REPEATED * self.estimate.time_us:
            return "Steps of one plan differ by as much: nothing is left to explain."
        alone = [each for each in self.causes if each.reaches]
        head = "It lies inside the 80% interval. " if self.inside else "It lies outside the 80% interval. "
        if alone:
            return head + (f"{len(alone)} causes reach it, each alone." if len(alone) > 1 else
                           f"One cause alone reaches it: {alone[0].cause.name}.")
        if not self.causes:
            return head + "No listed cause explains it: none moves the step that way."
        most = self.causes[0]
        head += f"No listed cause alone explains it; {most.cause.name} covers most, {most.covers:.0%} of the gap. "
        longer = self.gap_us > 0
        if (self.together_us >= self.measured_us) == longer:
            return head + "Several together can."
        return head + ("All of them together do not either; compare the device, the model, the batch and the unit of "
                       "the measured step with what was stated.")


def explain(job: PlanJob, plan: ParallelPlan, measured_us: float) -> ExplainedStep:
    """Find possible causes of the difference between a measured step and its estimate.

    Args:
        job: models and figures of the estimate.
        plan: the plan as the framework runs it.
        measured_us: time of the measured step, µs.

    Raises:
        PlanError: the plan is not possible, or the time is so far off that its unit or its plan must be wrong.
    """
    start = _State(plan, job.shape, job.rates, job.pieces)
    step = _Steps(job)
    found = step.of(start)
    if not found.time_us / MOST_OFF < measured_us < found.time_us * MOST_OFF:
        raise PlanError(f"A measured step of {measured_us / 1e3:,.4g} ms is more than {MOST_OFF:g} times off the "
                        f"{found.time_us / 1e3:,.4g} ms expected, which no cause explains; a bare number is in ms, "
                        "37.7s are seconds.")
    looked = [each for cause in _causes(job, start) if (each := _looked(cause, start, step, found, measured_us))]
    causes = sorted((each for each in looked if each.covers > 0), key=lambda each: (
        not each.reaches, each.strain if each.reaches else -each.covers))
    away = [each for each in looked if each.covers <= 0 and (each.low_us or each.high_us)]
    return ExplainedStep(measured_us, found, tuple(causes), tuple(away),
                         _together(start, causes, step, found, measured_us), job.notes)


class _Steps:
    """Estimates of states on a job's cluster, each priced once."""

    def __init__(self, job: PlanJob) -> None:
        self._job = job
        self._costs: dict[tuple[Any, ...], Any] = {}

    def of(self, state: _State) -> Estimate:
        """Return the step for these inputs. Raises ``PlanError`` if they are not possible."""
        key = state.plan, state.shape, id(state.pieces)
        if key not in self._costs:
            self._costs[key] = costs_of_plan(state.plan, state.shape, state.pieces, self._job.cluster)
        return estimate(self._costs[key], state.rates)


def _looked(cause: StepCause, start: _State, step: _Steps, found: Estimate, measured_us: float) -> Explanation | None:
    """Return how far a cause moves the step; ``None`` if the change is not possible."""
    def moved(value: float) -> float:
        return step.of(cause.change(start, value)).time_us - found.time_us

    try:
        ends = [moved(value) if value != cause.usual else 0.0 for value in (cause.least, cause.most)]
    except (PlanError, ShapeOnlyError):
        return None
    gap = measured_us - found.time_us
    towards = max(ends, key=lambda us: us * gap)
    covers = min(towards / gap, 1.0) if gap else 0.0
    needed = None if covers < 1.0 else gap / towards
    if covers >= 1.0 and cause.unit:
        near, far = cause.usual, cause.least if towards == ends[0] else cause.most
        for _ in range(EVERY_ROUND):
            middle = (near + far) / 2
            near, far = (near, middle) if abs(moved(middle)) >= abs(gap) else (middle, far)
        needed = far
    return Explanation(cause, min(*ends, 0.0), max(*ends, 0.0), covers, needed)


def _together(start: _State, causes: Sequence[Explanation], step: _Steps, found: Estimate, measured_us: float) -> float:
    """Return the step with all causes that can occur together, each at the end that moves it closer, µs."""
    state, us, longer = start, found.time_us, measured_us > found.time_us
    for each in causes:
        if not each.cause.joined:
            continue
        for value in (each.cause.least, each.cause.most):
            try:
                other = each.cause.change(state, value)
                then = step.of(other).time_us
            except (PlanError, ShapeOnlyError):
                continue
            if (then > us) == longer and then != us:
                state, us = other, then
    return us


def _causes(job: PlanJob, start: _State) -> Iterator[StepCause]:
    """Yield all causes that are possible for a plan."""
    yield from _of_rates(start)
    yield from _of_plan(start)
    yield from _of_kernels(start)
    if job.request.runs is PLAIN:
        profile, eager = profile_of("nanotron"), None

        def as_nanotron(state: _State, value: float) -> _State:
            nonlocal eager
            eager = eager or job_of(replace(job.request, framework="nanotron", only=None, pieces=LayerCosts(
                job.pieces.device, job.request.profile, job.pieces, profile)))
            return _State(profile.planned(state.plan), eager.shape, eager.rates, eager.pieces)

        yield StepCause("an eager framework, as nanotron runs a step", 0, 0, 1, as_nanotron,
                        "planner/parallel/frameworks.toml", joined=False)


def _of_rates(start: _State) -> Iterator[StepCause]:
    """Yield causes that are correction factors."""
    def times(*names: str) -> Change:
        return lambda state, value: replace(state, rates=replace(state.rates, **{
            name: value * getattr(start.rates, name) for name in names}))

    def usual(spread: float) -> tuple[float, float, float]:
        return 1.0, exp(-Z80 * spread), exp(Z80 * spread)

    plan, time = start.plan, "× the time"
    yield StepCause("throttled boards: products at lower clocks", 1.0, 1.0, 1.22, times("products"), BOARDS, time)
    yield StepCause("products of another library", *usual(PUBLISHED.products), times("products"), STEPS, time)
    yield StepCause("other kernels, more or less fused", *usual(PUBLISHED.others), times("others"), STEPS, time)
    yield StepCause("collectives within nodes", *usual(PUBLISHED.collectives), times("collectives"), STEPS, time)
    yield StepCause("a slower network between nodes", 1.0, 0.85, 400 / 170, times("network"), NETWORK, time)
    yield StepCause("the host's launches", 1.0, 0.0, max(74.0 / max(start.rates.host_us, 1.0), 1.0),
                    times("host_us", "host_collective_us"), EAGER, time)
    yield StepCause("time once a step (data, logging)", 0.0, 0.0, 90.36, lambda state, value: replace(
        state, rates=replace(state.rates, step_us=start.rates.step_us + 1e3 * value)), FIXED, "ms")
    yield StepCause("work beside collectives slowed", start.rates.interference, 0.0, 0.4, lambda state, value: replace(
        state, rates=replace(state.rates, interference=value)), BESIDE, "of their time")
    if plan.world_size > 1:
        yield StepCause("stragglers: the slowest GPU", start.rates.jitter * slowest_of(plan.world_size), 0.0, 0.5,
                        lambda state, value: replace(state, rates=replace(
                            state.rates, jitter=value / slowest_of(plan.world_size))), OUTLIERS, "of a step more")


def _of_plan(start: _State) -> Iterator[StepCause]:
    """Yield causes that are settings of the plan."""
    def into(**values: Any) -> Change:
        return lambda state, value: replace(state, plan=replace(state.plan, **values)) if value else state

    def other(name: str, *, joined: bool = True, **values: Any) -> StepCause:
        return StepCause(name, 0, 0, 1, into(**values), SETTING, joined=joined)

    plan, routed = start.plan, any(run.experts for run in start.shape.runs)
    not_on = {True: "not on", False: "on"}
    if plan.sequence_parallel:
        yield other(f"overlap of tensor-parallel collectives {not_on[plan.tensor_overlap]}",
                    tensor_overlap=not plan.tensor_overlap)
    if plan.dp * plan.cp > 1:
        yield other(f"overlap of replicas' collectives {not_on[plan.overlap]}", overlap=not plan.overlap)
        yield other(f"gradients reduced in {'fp32' if plan.half_gradients else '16 bits'}",
                    half_gradients=not plan.half_gradients)
        if plan.sharding >= Sharding.GRADIENTS:
            stage = Sharding.GRADIENTS if plan.fsdp2 else Sharding.PARAMETERS
            yield other(f"ZeRO {int(stage)}", sharding=stage)
    for kind in (Recomputation.NONE, Recomputation.NEEDED, Recomputation.FULL):
        if plan.recompute is not kind or plan.recompute_layers:
            yield other(f"recomputation: {kind.value}", recompute=kind, recompute_layers=None, recompute_modules=(),
                        joined=False)
    graphs = Graphs.NONE if plan.graphs is not Graphs.NONE else Graphs.WHOLE
    yield other(f"CUDA graphs: {graphs.value}", graphs=graphs, joined=plan.graphs is not Graphs.NONE)
    if routed and plan.ep > 1:
        yield other(f"overlap of experts' exchanges {not_on[plan.expert_overlap]}",
                    expert_overlap=not plan.expert_overlap)
    if routed and plan.dispatcher.once:
        yield other("tokens sent to experts by all-to-all", dispatcher=Dispatcher.ALL_TO_ALL)
    if routed:
        yield other(f"fused kernels of experts {not_on[plan.fused_experts]}", fused_experts=not plan.fused_experts)


def _of_kernels(start: _State) -> Iterator[StepCause]:
    """Yield causes that are other kernels of the decoder."""
    def each(**values: Any) -> Change:
        return lambda state, value: replace(state, shape=replace(state.shape, stack=tuple(
            replace(run, **values) for run in state.shape.stack), **values)) if value else state

    def imbalanced(state: _State, value: float) -> _State:
        shape = state.shape
        return replace(state, shape=replace(shape, imbalance=value, stack=tuple(
            replace(run, imbalance=value if run.experts else run.imbalance) for run in shape.stack)))

    shape = start.shape
    yield StepCause("loss in steps, not fused" if shape.fused_loss else "a fused loss", 0, 0, 1,
                    each(fused_loss=not shape.fused_loss), KERNELS)
    if shape.flash and not any(run.latent for run in shape.runs):
        yield StepCause("attention not fused", 0, 0, 1, each(flash=False), KERNELS)
        if shape.flash_version != 2:
            yield StepCause("FlashAttention 2", 0, 0, 1, each(flash_version=2), KERNELS, joined=False)
    if shape.linears:
        yield StepCause("linear layers in 16 bits", 0, 0, 1, lambda state, value: replace(
            state, shape=state.shape.in_linears("")) if value else state, SETTING)
    if (routed := max((run.imbalance for run in shape.runs if run.experts), default=0.0)):
        yield StepCause("imbalance of experts", routed, 1.0, max(1.7, routed), imbalanced, LOADS,
                        "× the mean's tokens")
