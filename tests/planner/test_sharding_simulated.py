"""The step that ``shard`` estimates for a plan against the simulated step of the traced fake world of that plan.

The traced model is plain PyTorch and the estimate is of FBGEMM's fused kernels. What both have must agree: each rank's
look-ups, the exchanges, the dense part; what only the first has (passes over sparse gradients, finding the rank of each
row) makes its steps longer and must not change which plan is faster.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from slowly import mostly_slow

from graph_predictor.edits.scale import ScaleHost
from graph_predictor.synthesis.baseline import baseline_of
from kernel_models.collectives import CollectiveModel, topology_of
from kernel_models.device import device
from planner.sharding.choices import choices_of
from planner.sharding.estimate import ShardedStep, estimate
from planner.sharding.problem import ShardingPlan, ShardingProblem
from planner.sharding.sources import StepPart, parts_of, sharding_source
from planner.sharding.step import LENGTHS_BYTES, Scores, StepModel, assignment_of
from tracer import workloads
from tracer.arrays import Float64
from tracer.graph import KernelKind
from tracer.lookup_data.plan_file import ShardKind, TableSharding

RANKS = 2
H200 = device("h200-sxm")
SETTINGS = ["batch=8192", "tables=4", "rows=400000", "embedding=128", "pooling=40", "bags_halved=2", "width=512",
            "depth=3", "sparse=true", "optimizer=sgd", "batched=true"]
ALL = tuple(range(RANKS))


def whole(*ranks: int) -> tuple[TableSharding, ...]:
    return tuple(TableSharding(ShardKind.TABLE_WISE, (rank,)) for rank in ranks)


PLANS = {
    "column-wise": (TableSharding(ShardKind.COLUMN_WISE, ALL),) * 4,
    "three and one": whole(0, 0, 0, 1), "one rank": whole(0, 0, 0, 0),
    "row-wise": (TableSharding(ShardKind.ROW_WISE, ALL),) * 4,
    "data-parallel": (TableSharding(ShardKind.DATA_PARALLEL, ALL),) * 4}
QUICK = {"column-wise", "one rank"}
"""Plans that the quick tests trace."""


@dataclass(frozen=True)
class Simulated:
    """A simulated step, µs: whole, look-ups and dense part of each rank, all-to-alls of indices, vectors, gradients."""

    step: float
    lookups: Float64
    dense: float
    exchanges: float


Steps = Callable[[str], tuple[ShardedStep, Simulated]]


@pytest.fixture(scope="module")
def problem() -> ShardingProblem:
    pytest.importorskip("torch")
    found = sharding_source("dlrm", H200, settings=SETTINGS)
    return ShardingProblem(found.tables, found.samples, RANKS, H200, CollectiveModel(topology_of(H200, RANKS)),
                           dense=found.dense, pipelined=False)


@pytest.fixture(scope="module")
def steps(problem: ShardingProblem, tmp_path_factory: pytest.TempPathFactory) -> Steps:
    """From a plan's name to its step, estimated and simulated."""
    folder = tmp_path_factory.mktemp("plans")

    @cache
    def find(name: str) -> tuple[ShardedStep, Simulated]:
        plan = ShardingPlan(problem.tables, PLANS[name], RANKS, problem.per_node)
        plan.save(folder / "plan.json")
        choices = choices_of(problem, plan.shardings)
        step = estimate(Scores(problem, choices, StepModel(problem)), assignment_of(plan, choices))
        return step, simulated(folder / "plan.json", problem)

    return find


def simulated(plan: Path, problem: ShardingProblem, *more: str) -> Simulated:
    from tracer.shape_only import trace_job

    job = trace_job(workloads.parse("dlrm", [*SETTINGS, f"sharding={plan}", *more]), world_size=RANKS, parallel="ddp",
                    warmup=1)
    baseline = baseline_of(job, collectives=problem.collectives)
    built = baseline.scenario.built
    lookups, dense, exchanges = np.zeros(RANKS), [], []
    for each in job.classes:
        graph = built.graphs[each.graph]
        low, high = (int(end) for end in built.program.kernel_ptr[each.graph:each.graph + 2])
        us, kernels = built.program.kernel_duration[low:high] / 1e3, graph.kernels
        part, collective = parts_of(graph)[kernels.op], kernels.kind == KernelKind.COLLECTIVE
        lookups[[rank for rank in ALL if rank in each]] = us[~collective & (part == StepPart.LOOKUPS)].sum()
        dense.append(us[~collective & np.isin(part, [
            StepPart.DENSE_FORWARD, StepPart.DENSE_BACKWARD, StepPart.OPTIMIZER])].sum())
        kinds = {int(kernel): graph.string(int(kind)) for kernel, kind in zip(
            graph.collectives.kernel, graph.collectives.kind, strict=True)}
        exchanges.append(sum(us[row] for row, kind in kinds.items() if row >= 0 and kind == "all_to_all"))
    # A sharding says nothing of the host: one that never decides.
    return Simulated(baseline.predict([ScaleHost(0.1)]).step_time_us, lookups, min(dense), max(exchanges))


@pytest.mark.parametrize("name", mostly_slow(list(PLANS), QUICK))
def test_look_ups_exchanges_and_the_dense_part_agree(steps: Steps, problem: ShardingProblem, name: str) -> None:
    step, traced = steps(name)
    assert step.forward_us == pytest.approx(traced.lookups, rel=0.06, abs=0.1)
    if name != "data-parallel":
        estimated = sum(step.phases[phase] for phase in ("indices", "vectors", "gradients of vectors"))
        assert estimated == pytest.approx(traced.exchanges, rel=0.03)
    if name == "one rank":  # beside it DDP copies gradients into buckets, and vectors are put together
        assert problem.dense.us + problem.dense.inputs == pytest.approx(traced.dense, rel=0.15)


@pytest.mark.slow
def test_what_is_faster_is_faster_simulated(steps: Steps) -> None:
    found = [(step.time_us, traced.step) for step, traced in (steps(name) for name in PLANS if name != "data-parallel")]
    apart = [(one, other) for one in found for other in found if one[0] < 0.95 * other[0]]
    assert len(apart) >= 4
    assert all(one[1] < other[1] for one, other in apart)
    ratios = [traced / estimated for estimated, traced in found]
    assert min(ratios) > 1.0 and max(ratios) < 1.35 * min(ratios)


def test_a_pipeline_hides_the_next_batchs_indices(problem: ShardingProblem, steps: Steps, tmp_path: Path) -> None:
    plan = ShardingPlan(problem.tables, PLANS["column-wise"], RANKS, problem.per_node)
    plan.save(tmp_path / "plan.json")
    found = []
    for pipelined in (False, True):
        # Copies to the device take their turn in a traced step, which has one stream for all that is no collective.
        same = replace(problem, pipelined=pipelined, dense=replace(problem.dense, inputs=0.0))
        choices = choices_of(same, plan.shardings)
        found.append(estimate(Scores(same, choices, StepModel(same)), assignment_of(plan, choices)).time_us)
    traced, before = simulated(tmp_path / "plan.json", problem, "pipelined=true"), steps("column-wise")[1]
    assert traced.exchanges == pytest.approx(before.exchanges, rel=0.001)
    # Without a pipeline the lengths are exchanged while indices of all tables are put together.
    lengths = float(StepModel(problem).exchanges.all_to_all.us(LENGTHS_BYTES))
    assert before.step - traced.step == pytest.approx(found[0] - found[1] - lengths, rel=0.1)
