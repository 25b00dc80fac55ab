"""Parallel plans: what is possible, schedules by their formulas, memory, the parts of a step, and the command."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from said import plain

pytest.importorskip("torch")

from typer.testing import CliRunner

from foretrace.commands import app
from kernel_models.collectives import CollectiveModel
from kernel_models.device import device
from planner.parallel.corrections import CorrectionFactors
from planner.parallel.decoder import check_decoder_plan, decoder_of
from planner.parallel.estimate import estimate, slowest_of
from planner.parallel.layer_costs import LayerCosts
from planner.parallel.memory import fullest_of, in_flight
from planner.parallel.plan_costs import PlanCosts, costs_of_plan, stage_parameters
from planner.parallel.schedule import order_of, simulate
from planner.parallel.search import search
from tracer.parallel_plan import ParallelPlan, PlanError, Recomputation, Schedule, Sharding
from tracer.shape_only.transformer import Piece, TransformerPart, TransformerShape

SHAPE = TransformerShape(8, 512, 8, 8, 2048, 1024, 256, dtype="bf16")
RUNNER = CliRunner()


@pytest.mark.parametrize(("text", "says"), [
    ("tp=3", "8 heads cannot be split evenly by tp=3"), ("pp=16", "8 layers are too few for pp=16 stages"),
    ("dp=32", "do not fit on dgx-h200x2"), ("dp=2,ep=2", "needs experts"),
    ("cp=3", "cannot be split evenly by 2 cp=6")])
def test_what_cannot_be_is_named(text: str, says: str, cluster: CollectiveModel) -> None:
    with pytest.raises(PlanError, match=says):
        check_decoder_plan(ParallelPlan.parse(text), SHAPE, cluster.topology)


@pytest.mark.parametrize("schedule", [Schedule.GPIPE, Schedule.ONE_F_ONE_B])
@pytest.mark.parametrize(("stages", "count"), [(1, 3), (2, 2), (4, 8), (8, 32)])
def test_the_bubble_is_that_of_the_formula(schedule: Schedule, stages: int, count: int) -> None:
    ones = np.ones((stages, 1))
    run = simulate(order_of(schedule, stages, count), ones, 2 * ones, np.zeros(stages), False)
    assert run.makespan == pytest.approx(3 * (count + stages - 1))
    assert 1 - run.busy.mean() / run.makespan == pytest.approx((stages - 1) / (count + stages - 1))


@pytest.mark.parametrize("chunks", [2, 4])
def test_interleaving_divides_the_bubble_by_the_chunks(chunks: int) -> None:
    stages, count = 4, 16
    work = np.full((stages, chunks), 1 / chunks)
    run = simulate(order_of(Schedule.INTERLEAVED, stages, count, chunks), work, 2 * work, np.zeros(stages), False)
    assert run.makespan == pytest.approx(3 * (count + (stages - 1) / chunks))


def test_the_slowest_stage_sets_the_pace_and_transfers_add_up() -> None:
    forward, backward = np.array([[1.0], [3.0]]), np.array([[1.0], [3.0]])
    run = simulate(order_of(Schedule.ONE_F_ONE_B, 2, 10), forward, backward, np.array([0.5, 0.5]), False)
    assert run.makespan == pytest.approx(1 + 0.5 + 60 + 0.5 + 1)


def test_the_parts_of_a_step_add_up(pieces: LayerCosts, cluster: CollectiveModel) -> None:
    for text in ("dp=2,microbatches=2", "dp=2,tp=2,pp=2,microbatches=4,sequence_parallel",
                 "dp=4,sharding=3,recompute=full", "dp=16,sharding=1,overlap=false"):
        e = estimate(costs_of_plan(ParallelPlan.parse(text), SHAPE, pieces, cluster))
        parts = e.products + e.others + e.host + e.layers + e.pipeline + e.data + e.optimizer + (
            e.fixed + e.stragglers)
        assert parts == pytest.approx(e.time_us, rel=1e-6), text
        assert e.low_us < e.time_us < e.high_us


def test_what_collectives_beside_work_cost_is_between_nothing_and_waiting_for_them(
        pieces: LayerCosts, cluster: CollectiveModel) -> None:
    plan = ParallelPlan(tp=4, sequence_parallel=True)
    plain, beside = (costs_of_plan(replace(plan, tensor_overlap=overlap), SHAPE, pieces, cluster)
                     for overlap in (False, True))
    quiet = CorrectionFactors(host_us=0.0, host_collective_us=0.0)
    waiting, partly, free = (estimate(loads, rates).time_us for loads, rates in (
        (plain, quiet), (beside, quiet), (beside, replace(quiet, interference=0.0))))
    assert free < partly < waiting


def test_collectives_of_a_node_slow_work_twice_as_much_as_those_that_leave_it(
        pieces: LayerCosts, cluster: CollectiveModel) -> None:
    loads = costs_of_plan(ParallelPlan.parse("dp=8,sharding=3"), SHAPE, pieces, cluster)
    away = replace(loads, exchanges=loads.exchanges | {
        (0, name): replace(loads.exchange((0, name)), nodes=2) for name in ("gather", "reduce")})
    slowed = [estimate(each, CorrectionFactors(interference=factor)).layers
              - estimate(each, CorrectionFactors(interference=0.0)).layers
              for each, factor in ((loads, 0.1), (away, 0.2))]
    assert slowed[0] > 0 and slowed[0] == pytest.approx(slowed[1])


def test_the_slowest_of_more_gpus_is_slower_and_one_gpu_has_no_other_to_wait_for(
        pieces: LayerCosts, cluster: CollectiveModel) -> None:
    # Expected largest of 8, 100 and 2,048 standard normals: 1.424, 2.508, 3.43 (tables of order statistics).
    assert [slowest_of(ranks) for ranks in (1, 8, 100, 2048)] == pytest.approx([0.0, 1.424, 2.508, 3.43], abs=0.02)
    loads = costs_of_plan(ParallelPlan.parse("dp=16"), SHAPE, pieces, cluster)
    even, uneven = estimate(loads, CorrectionFactors(jitter=0.0)), estimate(loads, CorrectionFactors(jitter=0.01))
    assert uneven.time_us == pytest.approx(even.time_us * (1 + 0.01 * slowest_of(16)))


def test_recomputing_what_is_needed_leaves_out_the_last_product_and_its_collective(
        pieces: LayerCosts, cluster: CollectiveModel) -> None:
    none, needed, full = (
        estimate(costs_of_plan(ParallelPlan.parse(f"tp=4,recompute={kind}"), SHAPE, pieces, cluster), CorrectionFactors(
            host_us=0.0, host_collective_us=0.0)) for kind in ("none", "needed", "full"))
    assert none.products < needed.products < full.products
    # Of the forward products of 12 h² the last has 4 h²; attention and each kernel's start take their share too.
    assert 0.66 < (needed.products - none.products) / (full.products - none.products) < 0.9
    assert (needed.layers - none.layers) / (full.layers - none.layers) == pytest.approx(0.5)


def test_what_recomputation_keeps_is_not_run_again_and_takes_memory(
        pieces: LayerCosts, cluster: CollectiveModel) -> None:
    products, bytes_held = {}, {}
    for kind in ("none", "needed", "projections", "operators"):
        plan = ParallelPlan.parse(f"dp=4,microbatch=4,recompute={kind}")
        found = estimate(costs_of_plan(plan, SHAPE, pieces, cluster),
                         CorrectionFactors(host_us=0.0, host_collective_us=0.0))
        products[kind] = found.products
        bytes_held[kind] = fullest_of(plan, SHAPE, pieces).account.activations
    again = {kind: us - products["none"] for kind, us in products.items()}
    assert again["needed"] > again["projections"] > again["operators"] > 0
    assert bytes_held["needed"] < bytes_held["projections"] < bytes_held["operators"] < bytes_held["none"]
    tokens = 4 * SHAPE.seq
    qkv = SHAPE.hidden + 2 * SHAPE.kv_heads * SHAPE.width_of_head
    assert bytes_held["projections"] - bytes_held["needed"] == SHAPE.layers * tokens * qkv * SHAPE.element_bytes


@pytest.mark.parametrize("experts", [0, 4])
def test_a_fused_gate_and_rotation_do_the_same_products_in_fewer_kernels(pieces: LayerCosts, experts: int) -> None:
    gated = replace(SHAPE, gated=True, rotary=True, experts=experts, top_k=2 if experts else 0, bias=not experts)
    part = TransformerPart(Piece.BLOCK, 2)
    fused, eager = (pieces.cost(replace(gated, fused=each), part) for each in (True, False))
    for way in ("forward", "backward"):
        one, other = getattr(fused, way), getattr(eager, way)
        assert one.products == pytest.approx(other.products) and one.launches < other.launches
        assert one.others < 0.8 * other.others
    # The gate's activation, its product with the other half and the turned halves need not be kept.
    assert pieces.saved_bytes(replace(gated, fused=True), part) < pieces.saved_bytes(replace(gated, fused=False), part)


def test_overlapped_tensor_parallelism_waits_for_the_last_piece_of_its_reduce_scatters(
        pieces: LayerCosts, cluster: CollectiveModel) -> None:
    plan = ParallelPlan(tp=4, sequence_parallel=True)
    plain, beside = (costs_of_plan(replace(plan, tensor_overlap=overlap), SHAPE, pieces, cluster)
                     for overlap in (False, True))
    wide = replace(SHAPE, heads=16, kv_heads=16)
    apart = costs_of_plan(replace(plan, tp=16, tensor_overlap=True), wide, pieces, cluster)
    # No memory of other nodes' GPUs can be written into.
    assert apart.exchange((0, "block forward")).between_nodes and not apart.exchange((0, "beside forward")).count
    assert counted(plain) == (4, 6, 0, 0) and counted(beside) == (2, 0, 4, 6)
    assert beside.exchange((0, "beside backward")).us == pytest.approx(plain.exchange((0, "block backward")).us)
    quiet = CorrectionFactors(host_us=0.0, host_collective_us=0.0, interference=0.0)
    slow, quick = estimate(plain, quiet), estimate(beside, quiet)
    # What is not waited for any more is hidden, but for what lasts longer than the block's own work.
    assert quick.products == slow.products and quick.layers < slow.layers
    assert quick.hidden - slow.hidden == pytest.approx(
        SHAPE.layers * sum(beside.exchange((0, f"beside {way}")).us for way in ("forward", "backward")) - (
            quick.layers - SHAPE.layers * beside.exchange((0, "block forward")).us
            - sum(beside.exchange(name).us for name in ("embedding", "loss", "head backward"))), rel=0.02)
    with pytest.raises(PlanError, match="give sequence_parallel too"):
        ParallelPlan(tp=4, tensor_overlap=True)


def counted(costs: PlanCosts) -> tuple[int, ...]:
    return tuple(costs.exchange((0, f"{what} {way}")).count for what in ("block", "beside")
                 for way in ("forward", "backward"))


def test_a_host_that_costs_nothing_leaves_the_device(pieces: LayerCosts, cluster: CollectiveModel) -> None:
    loads = costs_of_plan(ParallelPlan(), SHAPE, pieces, cluster)
    free = estimate(loads, CorrectionFactors(host_us=0.0, host_collective_us=0.0))
    work = (loads.blocks[0].forward + loads.blocks[0].backward).times(SHAPE.layers)
    whole = work.us + sum(each.us for each in (loads.head.forward, loads.head.backward, loads.embedding.forward,
                                               loads.embedding.backward))
    assert free.time_us == pytest.approx(whole + loads.optimizer[0].us)
    assert estimate(loads, CorrectionFactors(host_us=100.0)).bound == "host"


def test_tensor_parallelism_has_two_collectives_a_block_and_half_the_products(
        pieces: LayerCosts, cluster: CollectiveModel) -> None:
    one, two, spread = (costs_of_plan(plan, SHAPE, pieces, cluster) for plan in (
        ParallelPlan(), ParallelPlan(tp=2), ParallelPlan(tp=2, sequence_parallel=True)))
    assert [counted(each)[:2] for each in (one, two, spread)] == [(0, 0), (2, 2), (4, 6)]
    assert two.blocks[0].forward.products < one.blocks[0].forward.products


def test_parameters_are_all_on_some_stage_and_shared_evenly() -> None:
    whole = stage_parameters(ParallelPlan(), SHAPE, 0)
    assert whole == SHAPE.parameters
    assert sum(stage_parameters(ParallelPlan(pp=4), SHAPE, stage) for stage in range(4)) == whole


def test_memory_shrinks_with_sharding_recomputation_and_shards(pieces: LayerCosts) -> None:
    def total(**values: object) -> float:
        plan = ParallelPlan(**{"dp": 4, "microbatch": 2, "microbatches": 4, **values})  # type: ignore[arg-type]
        return fullest_of(plan, SHAPE, pieces).account.total

    zero = [total(sharding=each) for each in Sharding]
    assert zero == sorted(zero, reverse=True)
    assert len(set(zero)) == 4
    assert total(recompute=Recomputation.FULL) < total()
    # Of so small a model the buffers of one communicator more weigh more than half of its tensors.
    halved, whole = (fullest_of(ParallelPlan(dp=4, tp=tp, microbatch=2, microbatches=4), SHAPE, pieces).account
                     for tp in (2, 1))
    assert halved.allocated < whole.allocated


def test_micro_batches_in_flight() -> None:
    plan = ParallelPlan(pp=4, microbatches=8)
    assert [in_flight(plan, stage) for stage in range(4)] == [4, 3, 2, 1]
    assert in_flight(replace(plan, schedule=Schedule.GPIPE), 3) == 8


def test_a_search_finds_every_plan_and_says_why_others_are_not_there(
    pieces: LayerCosts, cluster: CollectiveModel
) -> None:
    shape = replace(SHAPE, heads=2, kv_heads=2, layers=2)
    every = search(shape, 4, 4, pieces, cluster, best=None)
    limit = float(np.median([each.memory.total for each in every.plans]))
    found = search(shape, 4, 4, pieces, cluster, memory_limit=limit, best=None)
    assert found.considered == every.considered and not found.slower
    assert 0 < len(found.plans) < len(every.plans)
    times = [float(f"{each.estimate.time_us:.3g}") for each in found.plans]
    assert times == sorted(times)
    assert all(each.memory.total <= limit for each in found.plans)
    reasons = " ".join(each.reason for each in found.refused)
    too_large = next(each for each in found.refused if "does not fit" in each.reason)
    least = min(each.memory.total for each in every.plans if each.memory.total > limit)
    assert too_large.least_bytes == least
    assert too_large.such_as.endswith(f"needs {least / 1e9:,.1f} GB, the least of these")
    assert "2 heads cannot be split evenly by tp=4" in reasons
    assert "2 layers are too few for pp=4 stages" in reasons


def test_a_batch_of_billions_is_not_put_in_order(pieces: LayerCosts, cluster: CollectiveModel) -> None:
    with pytest.raises(PlanError, match="at most 262,144 micro-batches"):
        search(SHAPE, 4, 2**31, pieces, cluster)
    with pytest.raises(PlanError, match="more work to put in order"):
        ParallelPlan(pp=4, microbatches=100_000)


def test_workloads_that_are_no_decoder_are_told() -> None:
    with pytest.raises(PlanError, match="no decoder"):
        decoder_of("resnet50", {})
    with pytest.raises(PlanError, match="lack or spoil"):
        decoder_of("llama", {"depth": 2})
    with pytest.raises(PlanError, match="sizes that no model has"):
        decoder_of("llama", {**dict.fromkeys(("depth", "width", "kv_heads", "hidden", "vocabulary", "seq"), 1),
                             "heads": 4, "dtype": "fp32"})
    sizes = {"dtype": "bf16", "depth": 2, "width": 64, "heads": 4, "kv_heads": 4, "hidden": 64, "vocabulary": 100,
             "seq": 8}
    assert decoder_of("llama", sizes).layers == 2
    for spoilt in ({"depth": 0}, {"seq": 10**25}, {"heads": -4}, {"dropout": 2.0}):
        with pytest.raises(PlanError, match="no model has"):
            decoder_of("llama", {**sizes, **spoilt})


def test_the_command_prints_plans_and_refuses_in_one_sentence() -> None:
    base = ["plan", "llama", "--gpus", "2", "--preset", "default", "--set", "dtype=bf16", "--global-batch", "2"]
    result = RUNNER.invoke(app, [*base, "--price", "2", "--json"])
    assert result.exit_code == 0, result.stderr
    values = json.loads(result.stdout)
    assert values["topology"] == "dgx-h200"
    best = values["plans"][0]
    assert best["interval_ms"][0] < best["step_ms"] < best["interval_ms"][1]
    assert best["cost_per_step"] == pytest.approx(2 * 2 * best["step_ms"] / 3.6e6)
    shown = RUNNER.invoke(app, [*base, "--parallel", "tp=2,microbatches=2"])
    assert shown.exit_code == 0
    assert "Best plans" in plain(shown.stdout) and "Sequences of a step: 2" in plain(shown.stdout)
    assert best["tied_with_first"] and best["frameworks"] and values["front"][0]["plan"] == best["plan"]
    assert sum(values["plans"][1]["more_than_first_ms"].values()) == pytest.approx(
        values["plans"][1]["step_ms"] - best["step_ms"])
    sizes = RUNNER.invoke(app, ["plan", *base[1:2], "--gpus", "1,2", *base[4:], "--framework", "torchtitan",
                                "--export", "torchtitan"])
    assert sizes.exit_code == 0, sizes.stderr
    text = plain(sizes.stdout)
    assert "1 GPUs of" in text and "2 GPUs of" in text and text.count("[activation_checkpoint]") == 2
    assert "Pareto front: no other plan is faster with as little memory and as few GPUs" in text
    uneven = RUNNER.invoke(app, [*base[:-1], "3"])
    assert "3 sequences cannot be split evenly over dp=2" in plain(uneven.stdout)
    for enough in ("80", "80GB", "80GiB"):
        assert RUNNER.invoke(app, [*base, "--parallel", "tp=2,microbatches=2", "--memory-limit", enough]).exit_code == 0
    refused = RUNNER.invoke(app, ["plan", "llama", "--gpus", "3", "--parallel", "tp=3"])
    assert refused.exit_code == 1
    assert "32 heads cannot be split evenly by tp=3" in plain(refused.stdout)
    usual = RUNNER.invoke(app, ["plan", "llama", "--gpus", "8", "--parallel", "fsdp2"])
    assert "llama 8b: a decoder of 8.03 billion parameters (32 layers of width 4,096" in plain(usual.stdout)
    for arguments, says in ((["plan", "resnet50", "--gpus", "2"], "no decoder"),
                            (["plan", "llama", "--gpus", "64", "--topology", "dgx-h200"], "do not fit"),
                            (["plan", "llama", "--gpus", "2,x"], "--gpus 2,x is not possible"),
                            ([*base, "--framework", "accelerate"], "accelerate is no framework"),
                            ([*base, "--framework", "fsdp", "--export", "megatron"], "give both the same name"),
                            ([*base, "--export", "fsdp"], "has no arguments of its own"),
                            ([*base, "--launch-us", "inf"], "--launch-us inf is no figure"),
                            ([*base, "--price", "inf"], "--price inf is no figure"),
                            ([*base, "--host", "1e308"], "--host 1e+308 is no figure"),
                            ([*base, "--memory-limit", "0"], "leaves no memory"),
                            ([*base, "--memory-limit", "much"], "'much' is no size"),
                            ([*base, "--parallel", "tp=4"], "multiply to 4, which is not the world size 2")):
        wrong = RUNNER.invoke(app, arguments)
        assert wrong.exit_code == 2
        assert says in plain(wrong.stderr)


GPT_175B = TransformerShape(96, 12288, 96, 96, 4 * 12288, 51200, 2048, flash=False, dropout=0.1, dtype="fp16")
SBH = 2048 * 12288
CORE = 5 * 96 * 2048 / 12288


@pytest.mark.parametrize(("plan", "factor"), [
    ("", 34 + CORE), ("tp=8", 10 + (24 + CORE) / 8), ("tp=8,sequence_parallel", (34 + CORE) / 8),
    ("recompute=selective", 34), ("tp=8,recompute=selective", 10 + 24 / 8),
    ("tp=8,sequence_parallel,recompute=selective", 34 / 8)])
def test_a_blocks_activations_are_those_of_the_literature(plan: str, factor: float) -> None:
    """Korthikanti et al. (2022), "Reducing Activation Recomputation", table 2: bytes a layer over s·b·h; one layer
    more or less, so that embedding and head do not count. What fused attention adds is a log-sum a row and head."""
    pieces = LayerCosts(device("a100-sxm-80g"))
    parsed = ParallelPlan.parse(f"microbatch=1,{plan}".strip(","))
    more, fewer = (fullest_of(parsed, replace(GPT_175B, layers=layers), pieces).account.activations
                   for layers in (3, 2))
    assert (more - fewer) / SBH == pytest.approx(factor, rel=2e-3)


def test_full_recomputation_keeps_each_blocks_input() -> None:
    """2·s·b·h a layer (the same table)."""
    pieces, parsed = LayerCosts(device("a100-sxm-80g")), ParallelPlan.parse("microbatch=1,tp=8,recompute=full")
    more, fewer = (fullest_of(parsed, replace(GPT_175B, layers=layers), pieces).account.activations
                   for layers in (3, 2))
    assert (more - fewer) / SBH == pytest.approx(2)
