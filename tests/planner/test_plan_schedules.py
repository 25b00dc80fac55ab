"""What frameworks do with a plan's state and order: zero-bubble pipelines, FSDP in a pipeline, copies of what is shared
(HSDP), and blocks of which only some are computed again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")

from kernel_models.collectives import CollectiveModel
from planner.parallel.corrections import CorrectionFactors
from planner.parallel.estimate import estimate
from planner.parallel.layer_costs import LayerCosts
from planner.parallel.memory import fullest_of, in_flight
from planner.parallel.plan_costs import PlanCosts, costs_of_plan
from planner.parallel.schedule import BACKWARD, FORWARD, WEIGHTS, order_of, simulate
from tracer.parallel_plan import ParallelPlan, Schedule
from tracer.shape_only.transformer import Piece, TransformerPart, TransformerShape

SHAPE = TransformerShape(8, 512, 8, 8, 2048, 1024, 256, dtype="bf16")
QUIET = CorrectionFactors(host_us=0.0, host_collective_us=0.0, jitter=0.0)


@pytest.mark.parametrize(("stages", "count"), [(1, 2), (2, 2), (4, 8), (8, 32)])
def test_a_zero_bubble_pipeline_waits_for_what_the_paper_says(stages: int, count: int) -> None:
    """Qi et al. (2024), table 1: a stage waits (p − 1)(F + B − W), with 1F1B (p − 1)(F + B + W)."""
    forward, backward, weights = 1.0, 1.2, 0.8
    ones, still = np.ones((stages, 1)), np.zeros(stages)
    order = order_of(Schedule.ZERO_BUBBLE, stages, count)
    run = simulate(order, forward * ones, (backward + weights) * ones, still, False, weights * ones)
    work = count * (forward + backward + weights)
    assert run.makespan == pytest.approx(work + (stages - 1) * (forward + backward - weights))
    assert run.busy == pytest.approx(np.full(stages, work))
    for row, batches in zip(order.kind, order.microbatch, strict=True):
        for kind in (FORWARD, BACKWARD, WEIGHTS):
            assert sorted(batches[row == kind]) == list(range(count))
        # Whoever has done a forward and not yet its weights' gradients keeps its activations.
        held = np.cumsum((row == FORWARD).astype(int) - (row == WEIGHTS))
        assert held.max() <= min(stages, count)


def test_gradients_of_weights_are_half_of_backwards_products(pieces: LayerCosts) -> None:
    head = pieces.cost(SHAPE, TransformerPart(Piece.HEAD, 4))
    assert head.weights.products == pytest.approx(head.forward.products, rel=0.1)
    block = pieces.cost(SHAPE, TransformerPart(Piece.BLOCK, 4))
    assert 0.3 < block.weights.products / block.backward.products < 0.5  # attention has no weights
    assert block.weights.others == 0


def test_a_zero_bubble_step_is_shorter_by_its_weights_and_needs_as_much_memory_on_every_stage(
        pieces: LayerCosts, cluster: CollectiveModel) -> None:
    plain = ParallelPlan.parse("pp=4,microbatches=8")
    zero = replace(plain, schedule=Schedule.ZERO_BUBBLE)
    usual, quick = (estimate(costs_of_plan(plan, SHAPE, pieces, cluster), QUIET) for plan in (plain, zero))
    assert quick.time_us < usual.time_us and quick.products == pytest.approx(usual.products)
    assert [in_flight(zero, stage) for stage in range(4)] == [4, 4, 4, 4]


def test_sharded_parameters_in_a_pipeline_are_gathered_and_reduced_once_a_step(
        pieces: LayerCosts, cluster: CollectiveModel) -> None:
    def of(text: str) -> PlanCosts:
        return costs_of_plan(ParallelPlan.parse(text), SHAPE, pieces, cluster)

    few, many, zero = of("fsdp2=4,pp=2,microbatches=2"), of("fsdp2=4,pp=2,microbatches=8"), of(
        "dp=4,pp=2,microbatches=8,sharding=1")
    assert few.exchange((0, "gather")).us == 0
    for stage in (0, 1):
        assert len({each.exchange(("reduce", stage)) for each in (few, many, zero)}) == 1
        assert few.exchange(("gather", stage)) == zero.exchange(("gather", stage))
    memory = [fullest_of(ParallelPlan.parse(text), SHAPE, pieces).account for text in (
        "fsdp2=4,pp=2,microbatches=2", "dp=4,pp=2,microbatches=2,sharding=1")]
    # A quarter of everything in fp32 is the rank's own, beside what is gathered and reduced once.
    count = memory[1].parameters / 2
    assert memory[0].gradients == pytest.approx(4 * count * 1.25)
    assert memory[0].parameters == pytest.approx(2 * count + 4 * count / 4)
    assert memory[0].optimizer_state == pytest.approx(8 * count / 4)


@pytest.mark.parametrize("text", ["fsdp2=16", "dp=16,sharding=1"])
def test_copies_of_shared_state_gather_within_a_node_and_reduce_a_share_beyond(
        text: str, pieces: LayerCosts, cluster: CollectiveModel) -> None:
    whole, copies = (costs_of_plan(ParallelPlan.parse(f"{text}{more}"), SHAPE, pieces, cluster)
                     for more in ("", ",replicate=2"))
    every, own = ([of.exchange((0, name) if of.plan.fsdp2 else (name, 0)) for name in ("gather", "reduce")]
                  for of in (whole, copies))
    assert every[0].between_nodes and not own[0].between_nodes
    assert (own[1].count, every[1].count) == (2, 1) and own[1].between_nodes
    state = [fullest_of(each.plan, SHAPE, pieces).account.optimizer_state for each in (whole, copies)]
    assert state[1] == pytest.approx(2 * state[0])


def test_some_blocks_computed_again_cost_their_share_of_time_and_memory(
        pieces: LayerCosts, cluster: CollectiveModel) -> None:
    plans = [ParallelPlan.parse(f"pp=2,microbatches=4,microbatch=4,recompute={text}") for text in (
        "none", "full,recompute_layers=1", "full,recompute_layers=3", "full")]
    products = [estimate(costs_of_plan(plan, SHAPE, pieces, cluster), QUIET).products for plan in plans]
    assert np.diff(products) == pytest.approx((products[3] - products[0]) * np.array([0.25, 0.5, 0.25]))
    kept = [fullest_of(plan, SHAPE, pieces).account.activations for plan in plans]
    assert kept == sorted(kept, reverse=True)
    everything = replace(plans[3], recompute_layers=100)
    assert estimate(costs_of_plan(everything, SHAPE, pieces, cluster), QUIET).products == products[3]
