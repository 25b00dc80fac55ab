"""Decoders of several kinds of blocks, and how layers are spread over stages."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch")

from kernel_models.collectives import CollectiveModel
from planner.parallel.corrections import CorrectionFactors
from planner.parallel.decoder import check_decoder_plan
from planner.parallel.estimate import estimate
from planner.parallel.layer_costs import LayerCosts
from planner.parallel.memory import fullest_of
from planner.parallel.plan_costs import PlanCosts, costs_of_plan, optimizer_parameters, stage_parameters
from planner.parallel.stages import blocks_of_stage, layers_of
from tracer.parallel_plan import ParallelPlan, PlanError, Sharding
from tracer.shape_only.errors import ShapeOnlyError
from tracer.shape_only.transformer import TransformerShape

DENSE = TransformerShape(2, 256, 4, 4, 1024, 512, 128, gated=True, rms=True, bias=False, rotary=True)
ROUTED = replace(DENSE, layers=4, ffn=256, experts=8, top_k=2)
MIXED = replace(ROUTED, layers=6, stack=(DENSE, ROUTED))


@pytest.mark.parametrize(("layers", "stages", "chunks", "values", "expected"), [
    (126, 16, 1, {}, [[7], *[[8]] * 14, [7]]), (61, 4, 1, {}, [[15], [16], [15], [15]]),
    (7, 2, 2, {}, [[2, 2], [2, 1]]),
    (61, 8, 1, {"first": 7, "last": 6}, [[7], *[[8]] * 6, [6]]),
    (62, 4, 2, {"first": 14}, [[7, 7], *[[8, 8]] * 3]),
    (14, 4, 1, {"embedding": True, "loss": True}, [[3], [4], [4], [3]]),
    (15, 4, 2, {"loss": True}, [[2, 2], [2, 2], [2, 2], [2, 1]])])
def test_layers_are_spread_as_frameworks_spread_them(
        layers: int, stages: int, chunks: int, values: dict[str, int], expected: list[list[int]]) -> None:
    assert [list(row) for row in layers_of(layers, stages, chunks, **values)] == expected


@pytest.mark.parametrize(("text", "says"), [
    ("pp=8", "6 layers are too few for pp=8 stages"),
    ("pp=4,first_layers=5", "1 of 6 layers are left, which 3 stages cannot share evenly"),
    ("pp=2,first_layers=2,last_layers=2", "2 of 6 layers are left, which 0 stages"),
    ("pp=2,first_layers=9", "0 of 6 layers are left"),
    ("pp=2,chunks=2,schedule=interleaved,last_layers=3", "last_layers=3 cannot be split evenly by the stage's 2"),
    ("dp=16,ep=16", "8 experts cannot be split evenly by ep=16")])
def test_spreads_that_cannot_be_are_named(text: str, says: str, cluster: CollectiveModel) -> None:
    with pytest.raises(PlanError, match=says):
        check_decoder_plan(ParallelPlan.parse(text), MIXED, cluster.topology)


@pytest.mark.parametrize("text", ["pp=4,microbatches=4,first_layers=1,last_layers=1",
                                  "pp=4,microbatches=4,embedding_layer,loss_layer"])
def test_plans_say_their_layers(text: str) -> None:
    assert str(ParallelPlan.parse(text)) == text


@pytest.mark.parametrize(("text", "says"), [
    ("tp=2,first_layers=1", "a pipeline's stages"), ("pp=2,first_layers=1,loss_layer", "leave one of the two out"),
    ("pp=2,last_layers=0", "1 or more"), ("dp=2,tp=4,ep=2,etp=1", "give sequence_parallel too"),
    ("dp=2,tp=4,sequence_parallel,etp=2", "give etp=1"),
    ("dp=2,tp=4,sequence_parallel,etp=1,ep=16", "a stage's ranks, whose number")])
def test_plans_that_contradict_themselves_are_refused(text: str, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        ParallelPlan.parse(text)


def test_stages_hold_their_kinds_of_blocks() -> None:
    plan = ParallelPlan(pp=4)
    assert [blocks_of_stage(plan, MIXED, stage) for stage in range(4)] == [
        [(DENSE.one_layer(), 1, 0)], [(DENSE.one_layer(), 1, 0), (ROUTED.one_layer(), 1, 0)],
        [(ROUTED.one_layer(), 2, 0)], [(ROUTED.one_layer(), 1, 0)]]
    assert sum(stage_parameters(plan, MIXED, stage) for stage in range(4)) == MIXED.parameters
    assert MIXED.parameters == DENSE.parameters + ROUTED.layers * ROUTED.block_parameters()
    assert MIXED.cut(3).stack == (DENSE, replace(ROUTED, layers=1))


@pytest.mark.parametrize("text", ["dp=2,microbatches=2", "pp=2,dp=2,ep=2,microbatches=4,tp=2,sequence_parallel",
                                  "dp=4,sharding=3,recompute=full"])
def test_a_stack_of_equal_runs_is_the_plain_decoder_to_the_digit(
        text: str, pieces: LayerCosts, cluster: CollectiveModel) -> None:
    plan = ParallelPlan.parse(text)
    stacked = replace(ROUTED, stack=(replace(ROUTED, layers=1), replace(ROUTED, layers=3)))
    plain, same = (estimate(costs_of_plan(plan, shape, pieces, cluster)) for shape in (ROUTED, stacked))
    assert plain == same
    assert fullest_of(plan, ROUTED, pieces).account == fullest_of(plan, stacked, pieces).account


def test_a_mixed_decoder_lies_between_its_kinds(pieces: LayerCosts, cluster: CollectiveModel) -> None:
    free = CorrectionFactors(host_us=0.0, host_collective_us=0.0)

    def products(shape: TransformerShape) -> float:
        return estimate(costs_of_plan(ParallelPlan(), shape, pieces, cluster), free).products

    # What all have in common (embedding and head) is that of a decoder of n blocks less n blocks.
    blocks = [products(replace(kind, layers=2)) - products(replace(kind, layers=1)) for kind in (DENSE, ROUTED)]
    head = products(replace(DENSE, layers=1)) - blocks[0]
    assert products(MIXED) == pytest.approx(head + 2 * blocks[0] + 4 * blocks[1])


def test_runs_that_do_not_make_the_decoder_are_refused() -> None:
    for changed in ({"layers": 5}, {"stack": (MIXED,)}, {"stack": (replace(DENSE, layers=6, hidden=128),)}):
        with pytest.raises(ShapeOnlyError, match=r"[Rr]uns of a decoder"):
            replace(MIXED, **changed)


def test_experts_take_the_tokens_of_their_own_ranks(pieces: LayerCosts, cluster: CollectiveModel) -> None:
    base, sent = "dp=2,tp=4,ep=2,sequence_parallel,microbatches=1", (0, "experts forward")

    def of(text: str, shape: TransformerShape) -> PlanCosts:
        return costs_of_plan(ParallelPlan.parse(text), shape, pieces, cluster)

    def counted(costs: PlanCosts) -> tuple[int, ...]:
        return tuple(costs.exchange((0, name)).count for name in ("block forward", "block backward", "experts forward"))

    plain, own = (of(base + more, ROUTED) for more in ("", ",etp=1"))
    # Attention alone is split; what shards of an expert gather and reduce is the experts', as are the two all-to-alls.
    assert counted(plain) == (2, 3, 4) and counted(own) == (2, 3, 2)
    assert own.exchange(sent).us < plain.exchange(sent).us
    assert counted(of(base, replace(ROUTED, shared_ffn=256)))[:2] == (4, 6)
    loaded = of(base, replace(ROUTED, imbalance=2.0))
    assert loaded.exchange(sent).us > plain.exchange(sent).us
    assert loaded.blocks[0].forward.products > plain.blocks[0].forward.products


def test_expert_groups_are_neighbours_and_their_replicas() -> None:
    plan = ParallelPlan.parse("dp=2,tp=4,pp=2,ep=4,etp=1,sequence_parallel")
    assert plan.group("ep", 1) == [8, 9, 10, 11]
    assert plan.group("experts") == [0, 4]
    assert plan.group("ends") == [0, 8]
    shared = ParallelPlan.parse("dp=4,tp=2,ep=2")
    assert (shared.group("ep"), shared.group("experts"), shared.group("etp")) == ([0, 2], [0, 4], [0, 1])


def test_a_rank_has_its_share_of_the_experts_state() -> None:
    plan = ParallelPlan.parse("dp=8,ep=4,sharding=1")
    experts = 4 * ROUTED.expert_parameters(4)
    assert stage_parameters(plan, ROUTED, 0) == ROUTED.parameters - 4 * ROUTED.expert_parameters() + experts
    assert optimizer_parameters(plan, ROUTED, 0) == pytest.approx(
        (ROUTED.parameters - 4 * ROUTED.expert_parameters()) / 8 + experts / 2)
    assert optimizer_parameters(replace(plan, sharding=Sharding.NONE), ROUTED, 0) == stage_parameters(plan, ROUTED, 0)


def test_a_tied_matrix_lies_on_both_ends_of_a_pipeline(pieces: LayerCosts, cluster: CollectiveModel) -> None:
    tied = replace(DENSE, tied=True)
    assert stage_parameters(ParallelPlan(), tied, 0) == tied.parameters == DENSE.parameters - 512 * 256
    for stage in (0, 1):
        assert stage_parameters(ParallelPlan(pp=2), tied, stage) == stage_parameters(ParallelPlan(pp=2), DENSE, stage)
    one, two, untied = (costs_of_plan(plan, shape, pieces, cluster).exchange("tied") for plan, shape in (
        (ParallelPlan(), tied), (ParallelPlan(pp=2), tied), (ParallelPlan(pp=2), DENSE)))
    assert (one.count, two.count, untied.count) == (0, 1, 0)
    apart, together = (estimate(costs_of_plan(ParallelPlan(pp=2), shape, pieces, cluster),
                                CorrectionFactors(jitter=0.0))
                       for shape in (DENSE, tied))
    assert together.time_us - apart.time_us == pytest.approx(two.us)


def test_prediction_modules_are_on_the_last_stage(pieces: LayerCosts, cluster: CollectiveModel) -> None:
    shape, plan = replace(MIXED, predictions=1), ParallelPlan(pp=2)
    assert blocks_of_stage(plan, shape, 0) == blocks_of_stage(plan, MIXED, 0)
    assert blocks_of_stage(plan, shape, 1) == [
        (ROUTED.one_layer(), 3, 0), (replace(ROUTED.one_layer(), merges=True), 1, 0)]
    more, less = (estimate(costs_of_plan(plan, each, pieces, cluster)) for each in (shape, MIXED))
    assert more.products > less.products
