"""The search over plans: what it tries, that its bounds are bounds, and that leaving plans out misses none."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch")

from kernel_models.collectives import CollectiveModel, find_topology
from kernel_models.op_call import OpCall
from planner.parallel.corrections import CorrectionFactors
from planner.parallel.layer_costs import LayerCosts
from planner.parallel.search import Bounds, search
from planner.parallel.space import Framework, candidates, frameworks_of
from tracer.parallel_plan import ParallelPlan, PlanError, Recomputation, Schedule, Sharding
from tracer.shape_only.transformer import Latent, Piece, TransformerPart, TransformerShape

DENSE = TransformerShape(8, 512, 2, 2, 2048, 1024, 2048, gated=True, rms=True, bias=False, rotary=True)
ROUTED = replace(DENSE, experts=4, top_k=2)
SMALL = replace(DENSE, layers=4, seq=512)


@pytest.fixture(scope="module")
def nodes() -> CollectiveModel:
    return CollectiveModel(find_topology("dgx-h100x2"))


@pytest.mark.parametrize(("shape", "gpus"), [
    (SMALL, 8), pytest.param(replace(SMALL, experts=4, top_k=1, imbalance=1.04), 2, marks=pytest.mark.slow)])
def test_a_search_that_leaves_plans_out_finds_the_same_best_ones_as_one_that_does_not(
        shape: TransformerShape, gpus: int, hopper: LayerCosts, nodes: CollectiveModel) -> None:
    every = search(shape, gpus, 4, hopper, nodes, best=None)
    found = search(shape, gpus, 4, hopper, nodes, best=5, reach=1.01)
    assert found.considered == every.considered
    assert len(found.plans) < len(every.plans) / 2 and found.slower > len(every.plans) / 4
    known = {each.plan for each in found.plans}
    times = sorted(each.estimate.time_us for each in every.plans)
    wanted = max(times[4], 1.01 * times[0])
    assert all(each.plan in known for each in every.plans if each.estimate.time_us <= wanted)
    # No plan takes less than its bound, and most little more.
    bounds = Bounds(shape, hopper, nodes, CorrectionFactors())
    assert all(bounds.floor_us(each.plan) <= bounds.least_us(each.plan) for each in every.plans)
    shares = sorted(bounds.least_us(each.plan) / each.estimate.time_us for each in every.plans)
    assert shares[-1] <= 1 + 1e-9 and shares[len(shares) // 2] > 0.5
    assert found.slower_us >= wanted


def test_a_search_tries_what_the_frameworks_have() -> None:
    every = list(candidates(DENSE, 16, 16))
    assert len(set(every)) == len(every)
    assert all(frameworks_of(plan, DENSE) for plan in every if 2 % plan.tp == 0 and plan.pp <= DENSE.layers)
    assert {plan.schedule for plan in every} == set(Schedule) - {Schedule.GPIPE}
    assert {plan.sharding for plan in every} == set(Sharding)
    assert {plan.recompute for plan in every} == {
        Recomputation.NONE, Recomputation.FULL, Recomputation.NEEDED, Recomputation.OPERATORS}
    assert any(plan.replicate > 1 for plan in every) and any(plan.cp > 1 for plan in every)
    assert any(plan.recompute_layers for plan in every) and any(plan.tensor_overlap for plan in every)
    assert any(plan.tp > 1 and not plan.sequence_parallel for plan in every)
    for framework in Framework:
        own = list(candidates(DENSE, 16, 16, framework))
        assert set(own) <= set(every) and {(plan.tp, plan.pp) for plan in own} >= {(1, 1)}
        assert all(framework in frameworks_of(plan, DENSE, framework) for plan in own
                   if 2 % plan.tp == 0 and plan.pp <= 8)
    routed = list(candidates(ROUTED, 4, 16))
    assert {plan.ep for plan in routed} == {1, 2, 4} and {plan.etp for plan in routed} == {None, 1}


@pytest.mark.parametrize(("text", "names"), [
    ("dp=4,tp=2,pp=2,microbatches=8,sharding=1,sequence_parallel,recompute=full", ["megatron"]),
    ("fsdp2=8,tp=2,sequence_parallel,recompute=needed", ["torchtitan"]),
    ("fsdp2=16,recompute=operators", ["torchtitan"]), ("fsdp2=16,recompute=projections", []),
    ("fsdp2=16", ["megatron", "torchtitan", "fsdp"]),
    ("fsdp2=16,replicate=2,recompute=needed", ["torchtitan", "fsdp"]), ("tp=2", ["megatron"]),
    ("pp=2,microbatches=4,schedule=zero_bubble", []),
    ("pp=2,microbatches=4,chunks=2,schedule=zero_bubble", ["torchtitan"]), ("dp=2,sharding=1,pp=2", ["megatron"])])
def test_a_plan_belongs_to_the_frameworks_that_have_it(text: str, names: list[str]) -> None:
    assert [each.value for each in frameworks_of(ParallelPlan.parse(text), DENSE)] == names


def test_a_framework_that_has_no_plan_is_told(hopper: LayerCosts, nodes: CollectiveModel) -> None:
    with pytest.raises(PlanError, match=r"by any plan of at most .* that fsdp has"):
        search(DENSE, 16, 8, hopper, nodes, framework=Framework.FSDP)


WIDE = replace(DENSE, heads=16, kv_heads=16)
UNEVEN = replace(ROUTED, experts=8, imbalance=1.04)
EXPERTS = replace(WIDE, experts=8, top_k=2)


@pytest.mark.parametrize(("way", "shape", "part"), [
    # A large micro-batch.
    ("_grown", DENSE, TransformerPart(Piece.BLOCK, 6, 2, 2, sequence_parallel=True)),
    ("_grown", DENSE, TransformerPart(Piece.HEAD, 3, 2)),
    # Experts with any number of rows.
    ("_grown", replace(UNEVEN, merges=True), TransformerPart(Piece.BLOCK, 3, ep=2)),
    ("_grown", UNEVEN, TransformerPart(Piece.BLOCK, 2, ep=8)), ("_grown", UNEVEN, TransformerPart(Piece.BLOCK, 1)),
    ("_grown", UNEVEN, TransformerPart(Piece.BLOCK, 1, 2, 2, 4, sequence_parallel=True)),
    ("_grown", UNEVEN, TransformerPart(Piece.BLOCK, 1, 2, ep=4, sequence_parallel=True, etp=1)),
    # Many tensor-parallel ranks.
    ("_split", WIDE, TransformerPart(Piece.BLOCK, 2, 8, 2)),
    ("_split", replace(WIDE, latent=Latent(64, 32, 16, 8, 16)),
     TransformerPart(Piece.BLOCK, 1, 8, sequence_parallel=True)),
    ("_split", EXPERTS, TransformerPart(Piece.BLOCK, 1, 8, ep=2, sequence_parallel=True, etp=1))])
def test_what_is_derived_of_a_block_costs_what_its_own_trace_says(
        way: str, shape: TransformerShape, part: TransformerPart, hopper: LayerCosts) -> None:
    found, traced = getattr(hopper, way)(shape.one_layer(), part), hopper._trace(shape.one_layer(), part)
    assert found == traced  # what forward keeps among it
    assert counted(*found.forward, *found.backward) == counted(*traced.forward, *traced.backward)


def counted(*calls: OpCall) -> list[tuple[float, float, float]]:
    return [(call.flops, call.bytes_read, call.bytes_written) for call in calls]


def test_the_updates_of_experts_cost_what_their_own_trace_says(hopper: LayerCosts) -> None:
    part = TransformerPart(Piece.BLOCK, 1, 8, sequence_parallel=True, etp=1)
    found, traced = hopper._updates(EXPERTS.one_layer(), part), hopper._trace_optimizer(EXPERTS.one_layer(), part)
    assert tuple(found) == tuple(traced) and counted(*found) == counted(*traced)


def test_nothing_of_a_block_without_experts_depends_on_how_experts_are_shared(hopper: LayerCosts) -> None:
    part = TransformerPart(Piece.BLOCK, 1)
    assert hopper._traced(DENSE.one_layer(), replace(part, ep=4)) is hopper._traced(DENSE.one_layer(), part)
