"""The plans that a search tries: every way to spread a decoder's step that the frameworks have; and the sequences of
a plan that a user names."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from planner.parallel.frameworks import WAYS, Framework, Ways
from tracer.parallel_plan import MOST_TASKS, ParallelPlan, PlanError, Recomputation, Schedule, Sharding
from tracer.shape_only.transformer import TransformerShape

MOST_MICROBATCH = 16
"""Sequences; beyond, kernels gain next to nothing."""
MOST_PARTS = 16
LEAST_TOKENS = 1024
"""Parts of a sequence (cp) that are tried, and tokens of one; for others, name the plan."""
MOST_CHUNKS = 16
"""Chunks of a stage that are tried; NVIDIA's published recipes have up to 12."""
COPIES = (2, 4, 16, 64)
"""Copies of sharded state that are tried, each of one or several whole nodes."""


@dataclass(frozen=True, slots=True)
class MeshSizes:
    """Sizes of the dimensions."""

    dp: int
    tp: int
    pp: int
    cp: int
    ep: int

    @property
    def usual(self) -> ParallelPlan:
        """The plain plan of these sizes."""
        own = bool(self.dp * self.cp % self.ep)
        return ParallelPlan(dp=self.dp, tp=self.tp, pp=self.pp, cp=self.cp, ep=self.ep, microbatches=1,
                            sequence_parallel=own, etp=1 if own else None)


Work = tuple[Schedule, int, int, int, bool, bool, int | None]
"""Schedule, chunks, sequences of a micro-batch, micro-batches, sequence parallelism, its overlap, ranks of an expert.
"""
State = tuple[Sharding, int, Recomputation, int | None]
"""What replicas share and in how many copies; what is computed again, and for how many blocks of a chunk."""


@dataclass(frozen=True, slots=True)
class PlanFamily:
    """Plans that do the same work in the same order, and differ in what they keep: state and activations."""

    layout: MeshSizes
    work: Work
    states: tuple[State, ...]

    @property
    def least(self) -> ParallelPlan:
        """Return the plan that computes nothing again, or least."""
        return self.plan(min(self.states, key=lambda state: state[2].blocks))

    def plan(self, state: State) -> ParallelPlan:
        """Return one of them."""
        layout = self.layout
        schedule, chunks, size, count, sequence_parallel, overlap, etp = self.work
        sharding, copies, recomputed, layers = state
        return ParallelPlan(
            dp=layout.dp, tp=layout.tp, pp=layout.pp, cp=layout.cp, ep=layout.ep, microbatch=size, microbatches=count,
            chunks=chunks, schedule=schedule, sharding=sharding, sequence_parallel=sequence_parallel,
            tensor_overlap=overlap, recompute=recomputed, recompute_layers=layers, replicate=copies, etp=etp)


def candidates(shape: TransformerShape, gpus: int, global_batch: int, framework: Framework | None = None, *,
               node: int = 8) -> Iterator[ParallelPlan]:
    """Every plan of so many GPUs that does ``global_batch`` sequences a step; some of them cannot be."""
    for layout in layouts(shape, gpus, global_batch):
        for family in families(layout, shape, global_batch, framework, node=node):
            yield from (family.plan(state) for state in family.states)


def layouts(shape: TransformerShape, gpus: int, global_batch: int) -> Iterator[MeshSizes]:
    """Every way to divide the GPUs among the dimensions."""
    experts = math.gcd(*(run.experts for run in shape.runs if run.experts))
    for tp in _divisors(gpus):
        for pp in _divisors(gpus // tp):
            for cp in _divisors(gpus // tp // pp):
                dp = gpus // tp // pp // cp
                if global_batch % dp or cp > max(1, min(MOST_PARTS, shape.seq // LEAST_TOKENS)):
                    continue
                for ep in _divisors(math.gcd(experts, dp * cp * tp)) if experts else [1]:
                    yield MeshSizes(dp, tp, pp, cp, ep)


def families(layout: MeshSizes, shape: TransformerShape, global_batch: int, framework: Framework | None = None, *,
             node: int = 8) -> Iterator[PlanFamily]:
    """The plans of a layout that the frameworks have.

    Args:
        framework: the only one whose plans are wanted.
        node: GPUs of a node: copies of sharded state have one or several whole ones.
    """
    found: dict[Work, dict[State, None]] = {}
    for each in (framework,) if framework else tuple(Framework):
        ways = WAYS[each]
        if not _possible(ways, layout):
            continue
        shared = list(_shared(ways, each, layout, node))
        for work in _works(ways, layout, shape, global_batch, node):
            states = found.setdefault(work, {})
            recomputed = list(_recomputations(ways, work[0], shape, layout.pp * work[1]))
            states.update(((*one, *two), None) for one, two in product(shared, recomputed))
    yield from (PlanFamily(layout, work, tuple(states)) for work, states in found.items())


def _possible(ways: Ways, layout: MeshSizes) -> bool:
    return ((ways.layers or layout.tp * layout.pp == 1) and (ways.sequences or layout.cp == 1)
            and (ways.experts or layout.ep == 1))


def _works(ways: Ways, layout: MeshSizes, shape: TransformerShape, global_batch: int, node: int) -> Iterator[Work]:
    own = global_batch // layout.dp
    batches = [(size, own // size) for size in range(1, MOST_MICROBATCH + 1)
               if own % size == 0 and own // size * layout.pp <= MOST_TASKS]
    tensor = list(_tensor(ways, layout, shape, node))
    for (schedule, chunks), (size, count), modes in product(_schedules(ways, layout, shape), batches, tensor):
        if not (chunks > 1 and count % layout.pp) and count * layout.pp * chunks <= MOST_TASKS:
            yield (schedule, chunks, size, count, *modes)


def _shared(ways: Ways, framework: Framework, layout: MeshSizes, node: int) -> Iterator[tuple[Sharding, int]]:
    """Yield what replicas share, and in how many copies."""
    if layout.dp * layout.cp == 1:
        yield Sharding.NONE, 1
        return
    if framework is Framework.TORCHTITAN and layout.tp * layout.pp * layout.cp * layout.ep == 1:
        yield Sharding.NONE, 1
    for sharding in ways.piped if layout.pp > 1 else ways.shardings:
        yield sharding, 1
        if sharding not in ways.copied:
            continue
        for copies in COPIES:
            own = layout.dp // copies * layout.cp
            if layout.dp % copies == 0 and own * layout.tp % node == 0 and own % layout.ep == 0:
                yield sharding, copies


def _tensor(ways: Ways, layout: MeshSizes, shape: TransformerShape,
            node: int) -> Iterator[tuple[bool, bool, int | None]]:
    """Sequence parallelism, its overlap, which a node's own links alone have, and ranks of an expert."""
    routed = any(run.experts for run in shape.runs)
    whole = (layout.dp * layout.cp) % layout.ep == 0
    if layout.tp == 1:
        if whole:
            yield False, False, None
        return
    for overlap in (False, True) if layout.tp <= node else (False,):
        if whole:
            yield True, overlap, None
        if routed:
            yield True, overlap, 1
    if ways.plain_tensor and not routed:
        yield False, False, None


def _schedules(ways: Ways, layout: MeshSizes, shape: TransformerShape) -> Iterator[tuple[Schedule, int]]:
    """Schedules of a pipeline with their chunks: as deep as the others, but for one layer less at either end."""
    if layout.pp == 1:
        yield Schedule.ONE_F_ONE_B, 1
        return
    for schedule in ways.schedules:
        if schedule is Schedule.ONE_F_ONE_B:
            yield schedule, 1
        if schedule not in ways.chunked:
            continue
        for chunks in range(2, min(MOST_CHUNKS, shape.layers // layout.pp) + 1):
            if -shape.layers % (layout.pp * chunks) <= 2:
                yield schedule, chunks


def _recomputations(ways: Ways, schedule: Schedule, shape: TransformerShape,
                    places: int) -> Iterator[tuple[Recomputation, int | None]]:
    """Yield what is computed again, and of how many blocks of a chunk."""
    each = -(-shape.layers // places)
    for kind in ways.recompute:
        if (kind is Recomputation.SELECTIVE and shape.flash) or (kind.blocks and schedule is Schedule.ZERO_BUBBLE):
            continue
        yield kind, None
        if kind in (Recomputation.FULL, Recomputation.NEEDED):
            # Every second or fourth block has a whole number of them; the first of a chunk need none.
            some = {round(each * part) for part in ways.parts
                    if kind is Recomputation.FULL or each * part == int(each * part)}
            yield from ((kind, layers) for layers in sorted(some) if 0 < layers < each)


def _divisors(number: int) -> list[int]:
    """Return the divisors of a number in ascending order."""
    low = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return low + [number // each for each in reversed(low) if each * each != number]


def says_batch(text: str) -> bool:
    """Return whether a plan's text says how many micro-batches a step has."""
    return "microbatches" in text or "accumulation" in text


def with_batch(plan: ParallelPlan, text: str, global_batch: int | None) -> ParallelPlan:
    """Return the plan with the micro-batches that a step of so many sequences has, where its text says none.

    Args:
        plan: as ``text`` says it.
        text: of the plan.
        global_batch: sequences of a step; ``None``: as many as the plan says.

    Raises:
        PlanError: the sequences cannot be spread over its replicas, or its text says another number of them.
    """
    if global_batch is None:
        return plan
    if says_batch(text):
        if plan.global_batch != global_batch:
            raise PlanError(f"The plan {text} has {plan.global_batch:,} sequences a step and not {global_batch:,}; "
                            "leave its microbatches or the batch out.")
        return plan
    passes, left = divmod(global_batch, plan.dp * plan.samples)
    if left or not passes:
        raise PlanError(f"A batch of {global_batch:,} sequences cannot be split evenly over dp={plan.dp} replicas with "
                        f"microbatch={plan.samples}; choose another batch.")
    if passes * plan.pp * plan.chunks > MOST_TASKS:
        raise PlanError(f"A batch of {global_batch:,} sequences is {passes:,} micro-batches on pp={plan.pp} stages, "
                        f"more than the {MOST_TASKS:,} pieces that are put in order; choose a smaller one.")
    return replace(plan, microbatches=passes)
