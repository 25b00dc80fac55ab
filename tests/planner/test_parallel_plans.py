"""Parallel plans: what is possible, schedules by their formulas, memory, the parts of a step, and the command; what
frameworks do with a plan's state and order."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from said import plain
from typer.testing import CliRunner

from foretrace.commands import app
from kernel_models.collectives import CollectiveModel
from kernel_models.device import device
from planner.parallel.corrections import CorrectionFactors
from planner.parallel.decoder import check_decoder_plan, decoder_of
from planner.parallel.estimate import Estimate, estimate
from planner.parallel.layer_costs import LayerCosts
from planner.parallel.memory import fullest_of, in_flight
from planner.parallel.plan_costs import PlanCosts, costs_of_plan
from planner.parallel.schedule import BACKWARD, FORWARD, WEIGHTS, order_of, simulate
from planner.parallel.search import search
from tracer.parallel_plan import ParallelPlan, PlanError, Schedule, slowest_of
from tracer.shape_only.transformer import Piece, TransformerPart, TransformerShape

pytest.importorskip("torch")

SHAPE = TransformerShape(8, 512, 8, 8, 2048, 1024, 256, dtype="bf16")
QUIET = CorrectionFactors(host_us=0.0, host_collective_us=0.0, jitter=0.0)
RUNNER = CliRunner()


@pytest.mark.parametrize(("text", "says"), [
    ("tp=3", "8 heads cannot be split evenly by tp=3"), ("pp=16", "8 layers are too few for pp=16 stages"),
    ("dp=32", "do not fit on dgx-h200x2"), ("dp=2,ep=2", "needs experts"),
    ("cp=3", "cannot be split evenly by 2 cp=6")])
def test_what_cannot_be_is_named(text: str, says: str, cluster: CollectiveModel) -> None:
    with pytest.raises(PlanError, match=says):
        check_decoder_plan(ParallelPlan.parse(text), SHAPE, cluster.topology)


@pytest.mark.parametrize(("schedule", "stages", "count", "chunks"), [
    (Schedule.GPIPE, 2, 2, 1), (Schedule.GPIPE, 8, 32, 1), (Schedule.ONE_F_ONE_B, 1, 3, 1),
    (Schedule.ONE_F_ONE_B, 8, 32, 1), (Schedule.INTERLEAVED, 4, 16, 2), (Schedule.INTERLEAVED, 4, 16, 4)])
def test_the_bubble_is_that_of_the_formula(schedule: Schedule, stages: int, count: int, chunks: int) -> None:
    work = np.full((stages, chunks), 1 / chunks)
    run = simulate(order_of(schedule, stages, count, chunks), work, 2 * work, np.zeros(stages), False)
    assert run.makespan == pytest.approx(3 * (count + (stages - 1) / chunks))
    assert run.busy == pytest.approx(np.full(stages, 3 * count))


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


def test_what_recomputation_keeps_is_not_run_again_and_takes_memory(
        pieces: LayerCosts, cluster: CollectiveModel) -> None:
    def of(plan: str) -> Estimate:
        return estimate(costs_of_plan(ParallelPlan.parse(plan), SHAPE, pieces, cluster), QUIET)

    kinds = ("full", "needed", "projections", "operators", "none")
    plans = [f"dp=4,microbatch=4,recompute={kind}" for kind in kinds]
    again = [of(plan).products for plan in plans]
    held = [fullest_of(ParallelPlan.parse(plan), SHAPE, pieces).account.activations for plan in plans]
    assert again == sorted(again, reverse=True) and len(set(again)) == 5
    assert held == sorted(held) and len(set(held)) == 4  # of either of the first two the input of each block
    qkv = SHAPE.hidden + 2 * SHAPE.kv_heads * SHAPE.width_of_head
    assert held[2] - held[1] == SHAPE.layers * 4 * SHAPE.seq * qkv * SHAPE.element_bytes
    full, needed, none = (of(f"tp=4,recompute={kind}") for kind in ("full", "needed", "none"))
    # Of the forward products of 12 h² the last has 4 h²; attention and each kernel's start take their share too.
    assert 0.66 < (needed.products - none.products) / (full.products - none.products) < 0.9
    assert (needed.layers - none.layers) / (full.layers - none.layers) == pytest.approx(0.5)


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
    assert quick.time_us < estimate(beside, replace(quiet, interference=0.1)).time_us < slow.time_us
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


def test_a_search_finds_every_plan_and_says_why_others_are_not_there(
        pieces: LayerCosts, cluster: CollectiveModel) -> None:
    shape = replace(SHAPE, heads=2, kv_heads=2, layers=2)
    every = search(shape, 4, 4, pieces, cluster, best=None)
    limit = float(np.median([each.memory.total for each in every.plans]))
    found = search(shape, 4, 4, pieces, cluster, memory_limit=limit, best=None)
    assert found.considered == every.considered and not found.slower
    times = [float(f"{each.estimate.time_us:.3g}") for each in found.plans]
    assert 0 < len(times) < len(every.plans) and times == sorted(times)
    assert all(each.memory.total <= limit for each in found.plans)
    too_large = next(each for each in found.refused if "does not fit" in each.reason)
    least = min(each.memory.total for each in every.plans if each.memory.total > limit)
    assert too_large.least_bytes == least
    assert too_large.such_as.endswith(f"needs {least / 1e9:,.1f} GB, the least of these")
    for says in ("2 heads cannot be split evenly by tp=4", "2 layers are too few for pp=4 stages"):
        assert any(says in each.reason for each in found.refused)


def test_a_batch_of_billions_is_not_put_in_order(pieces: LayerCosts, cluster: CollectiveModel) -> None:
    with pytest.raises(PlanError, match="at most 262,144 micro-batches"):
        search(SHAPE, 4, 2**31, pieces, cluster)
    with pytest.raises(PlanError, match="more work to put in order"):
        ParallelPlan(pp=4, microbatches=100_000)


SIZES = {"dtype": "bf16", "depth": 2, "width": 64, "heads": 4, "kv_heads": 4, "hidden": 64, "vocabulary": 100, "seq": 8}


@pytest.mark.parametrize(("name", "sizes", "says"), [
    ("resnet50", {}, "no decoder"), ("llama", {"depth": 2}, "lack or spoil"),
    ("llama", {**SIZES, "width": 1}, "sizes that no model has"), ("llama", {**SIZES, "depth": 0}, "no model has"),
    ("llama", {**SIZES, "seq": 10**25}, "no model has"), ("llama", {**SIZES, "heads": -4}, "no model has"),
    ("llama", {**SIZES, "dropout": 2.0}, "no model has")])
def test_workloads_that_are_no_decoder_are_told(name: str, sizes: dict[str, object], says: str) -> None:
    assert decoder_of("llama", SIZES).layers == 2
    with pytest.raises(PlanError, match=says):
        decoder_of(name, sizes)


COMMAND = ["plan", "llama", "--gpus", "2", "--preset", "default", "--set", "dtype=bf16", "--global-batch", "2"]


def test_the_command_prints_plans() -> None:
    result = RUNNER.invoke(app, [*COMMAND, "--price", "2", "--json"])
    assert result.exit_code == 0, result.stderr
    values = json.loads(result.stdout)
    best = values["plans"][0]
    assert values["topology"] == "dgx-h200" and best["interval_ms"][0] < best["step_ms"] < best["interval_ms"][1]
    assert best["cost_per_step"] == pytest.approx(2 * 2 * best["step_ms"] / 3.6e6)
    assert best["tied_with_first"] and best["frameworks"] and values["front"][0]["plan"] == best["plan"]
    assert sum(values["plans"][1]["more_than_first_ms"].values()) == pytest.approx(
        values["plans"][1]["step_ms"] - best["step_ms"])
    sizes = RUNNER.invoke(app, ["plan", "llama", "--gpus", "1,2", *COMMAND[4:], "--framework", "torchtitan",
                                "--export", "torchtitan"])
    assert sizes.exit_code == 0, sizes.stderr
    text = plain(sizes.stdout)
    assert "1 GPUs of" in text and "2 GPUs of" in text and text.count("[activation_checkpoint]") == 2
    assert "Pareto front" in text
    uneven = RUNNER.invoke(app, [*COMMAND[:-1], "3"])
    assert "3 sequences cannot be split evenly over dp=2" in plain(uneven.stdout)
    for enough in ("80", "80GB", "80GiB"):
        shown = RUNNER.invoke(app, [*COMMAND, "--parallel", "tp=2,microbatches=2", "--memory-limit", enough])
        assert shown.exit_code == 0 and "Sequences of a step: 2" in plain(shown.stdout)
    refused = RUNNER.invoke(app, ["plan", "llama", "--gpus", "3", "--parallel", "tp=3"])
    assert refused.exit_code == 1 and "32 heads cannot be split evenly by tp=3" in plain(refused.stdout)
    usual = RUNNER.invoke(app, ["plan", "llama", "--gpus", "8", "--parallel", "fsdp2"])
    assert "llama 8b: a decoder of 8.03 billion parameters (32 layers of width 4,096" in plain(usual.stdout)


@pytest.mark.parametrize(("arguments", "says"), [
    (["plan", "resnet50", "--gpus", "2"], "no decoder"), (["plan", "llama"], "how many GPUs the job has"),
    (["plan"], "what is planned"), (["plan", "llama", "--gpus", "64", "--topology", "dgx-h200"], "do not fit"),
    (["plan", "llama", "--gpus", "2,x"], "--gpus 2,x is not possible"),
    ([*COMMAND, "--framework", "accelerate"], "accelerate is no framework"),
    ([*COMMAND, "--framework", "fsdp", "--export", "megatron"], "give both the same name"),
    ([*COMMAND, "--export", "fsdp"], "has no arguments of its own"),
    ([*COMMAND, "--launch-us", "inf"], "--launch-us inf is no figure"),
    ([*COMMAND, "--price", "inf"], "--price inf is no figure"),
    ([*COMMAND, "--host", "1e308"], "--host 1e+308 is no figure"),
    ([*COMMAND, "--memory-limit", "0"], "leaves no memory"),
    ([*COMMAND, "--memory-limit", "much"], "'much' is no size"),
    ([*COMMAND, "--parallel", "tp=4"], "multiply to 4, which is not the world size 2")])
def test_the_command_refuses_in_one_sentence(arguments: list[str], says: str) -> None:
    wrong = RUNNER.invoke(app, arguments)
    assert wrong.exit_code == 2 and says in plain(wrong.stderr)


GPT_175B = TransformerShape(96, 12288, 96, 96, 4 * 12288, 51200, 2048, flash=False, dropout=0.1, dtype="fp16")
SBH = 2048 * 12288
CORE = 5 * 96 * 2048 / 12288


@pytest.mark.parametrize(("plan", "factor", "near"), [
    ("", 34 + CORE, 2e-3), ("tp=8", 10 + (24 + CORE) / 8, 2e-3), ("tp=8,sequence_parallel", (34 + CORE) / 8, 2e-3),
    ("recompute=selective", 34, 2e-3), ("tp=8,recompute=selective", 10 + 24 / 8, 2e-3),
    ("tp=8,sequence_parallel,recompute=selective", 34 / 8, 2e-3), ("tp=8,recompute=full", 2, 1e-6)])
def test_a_blocks_activations_are_those_of_the_literature(plan: str, factor: float, near: float) -> None:
    """Korthikanti et al. (2022), "Reducing Activation Recomputation", table 2: bytes a layer over s·b·h; one layer
    more or less, so that embedding and head do not count. What fused attention adds is a log-sum a row and head."""
    pieces = LayerCosts(device("a100-sxm-80g"))
    parsed = ParallelPlan.parse(f"microbatch=1,{plan}".strip(","))
    more, fewer = (fullest_of(parsed, replace(GPT_175B, layers=layers), pieces).account.activations
                   for layers in (3, 2))
    assert (more - fewer) / SBH == pytest.approx(factor, rel=near)


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


@pytest.mark.parametrize(("schedule", "counts"), [
    (Schedule.ZERO_BUBBLE, [4] * 4), (Schedule.ONE_F_ONE_B, [4, 3, 2, 1]), (Schedule.GPIPE, [8] * 4)])
def test_a_zero_bubble_step_is_shorter_and_needs_as_much_memory_on_every_stage(
        pieces: LayerCosts, cluster: CollectiveModel, schedule: Schedule, counts: list[int]) -> None:
    plan = ParallelPlan(pp=4, microbatches=8, schedule=schedule)
    assert [in_flight(plan, stage) for stage in range(4)] == counts
    zero, found = (estimate(costs_of_plan(replace(plan, schedule=each), SHAPE, pieces, cluster), QUIET)
                   for each in (Schedule.ZERO_BUBBLE, schedule))
    assert zero.time_us <= found.time_us and zero.products == pytest.approx(found.products)


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
