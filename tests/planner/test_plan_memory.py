"""Memory of a plan's stages: by formulas worked out by hand, by the literature, by laws; whether a plan fits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from said import plain
from typer.testing import CliRunner

from foretrace.commands import app
from graph_predictor.request.memory_fit import Fit, fit_of, fit_probability
from kernel_models.collectives import CollectiveModel
from kernel_models.device import device
from planner.parallel.corrections import CorrectionFactors
from planner.parallel.estimate import estimate
from planner.parallel.layer_costs import LayerCosts
from planner.parallel.memory import fullest_of, kept_of, moments_of, stage_memory, state_of, timeline
from planner.parallel.plan_costs import HOST_GBPS, costs_of_plan
from planner.parallel.search import price_plan, relief, search
from planner.parallel.space import Framework, exported, frameworks_of
from tracer.fake_world.fit import check_traceable
from tracer.parallel_plan import ParallelPlan, PlanError, Sharding
from tracer.shape_only.transformer import TransformerShape

SHAPE = TransformerShape(8, 1024, 8, 8, 4096, 8192, 1024, gated=True, rms=True, bias=False, rotary=True)
RUNNER = CliRunner()


def test_a_block_keeps_what_its_operations_need(hopper: LayerCosts) -> None:
    """In half-precision values of the stream's width h, of a token: both norms' inputs and outputs 4, queries, keys and
    values 3, attention's result 1, gate and up 8, their product 4: 20 of 2 bytes; of each norm's row one fp32 more, of
    each head's attention another."""
    one, again = kept_of(ParallelPlan.parse("dp=1"), SHAPE, hopper, 0)
    tokens, h = SHAPE.seq, SHAPE.hidden
    block = tokens * (20 * 2 * h + 4 * 2 + 4 * SHAPE.heads)
    assert again == 0.0
    assert one == pytest.approx(SHAPE.layers * block + 2 * tokens * h, rel=0.005)


COUNT = SHAPE.layers * SHAPE.block_parameters() + SHAPE.root_parameters()


@pytest.mark.parametrize(("text", "parameters", "gradients", "optimizer"), [
    ("dp=4,microbatch=1", 2 * COUNT, 4 * COUNT, 12 * COUNT), ("dp=4,sharding=1", 2 * COUNT, 4 * COUNT, 3 * COUNT),
    ("dp=4,sharding=1,half_gradients", 2 * COUNT, 2 * COUNT, 3 * COUNT),
    ("fsdp2=4", COUNT + 2 * min(2 * SHAPE.block_parameters() + SHAPE.root_parameters(), COUNT), COUNT, 2 * COUNT)])
def test_state_is_shared_as_zero_says(text: str, parameters: float, gradients: float, optimizer: float) -> None:
    parts = state_of(ParallelPlan.parse(text), SHAPE, 0).parts
    assert (parts["parameters"], parts["gradients"], parts["optimizer_state"]) == (parameters, gradients, optimizer)


def test_an_optimizer_in_the_hosts_memory_frees_its_state_and_takes_the_link_and_the_hosts_memory(
        hopper: LayerCosts, node: CollectiveModel) -> None:
    plan = ParallelPlan.parse("dp=4,sharding=1")
    away = ParallelPlan.parse("dp=4,sharding=1,offload_optimizer")
    assert ParallelPlan.parse(str(away)) == away != plan
    here, there = (state_of(each, SHAPE, 0) for each in (plan, away))
    assert here.total - there.total == here.optimizer_state == 3 * COUNT
    usual, offloaded = (costs_of_plan(each, SHAPE, hopper, node) for each in (plan, away))
    share = COUNT / 4
    # Gradients of 4 bytes there and parameters of 2 back over the link; 28 bytes of fp32 and the copy on the host.
    by_hand = share * (6 / hopper.device.host_gbps + 30 / HOST_GBPS) / 1e3
    assert offloaded.optimizer[0].us == pytest.approx(by_hand)
    rates = CorrectionFactors(jitter=0.0)
    assert estimate(offloaded, rates).time_us - estimate(usual, rates).time_us == pytest.approx(
        by_hand - usual.optimizer[0].us)
    assert frameworks_of(away, SHAPE) == (Framework.MEGATRON,)
    assert "--optimizer-cpu-offload" in exported(away, SHAPE, Framework.MEGATRON)
    changes = relief(plan, SHAPE, hopper, node.topology, 1e9)
    assert any(each.plan == away and each.frees_bytes == here.optimizer_state for each in changes)
    with pytest.raises(PlanError, match="offload_optimizer is known of DDP and ZeRO 1"):
        ParallelPlan.parse("fsdp2=4,offload_optimizer")
    with pytest.raises(PlanError, match="cannot be traced"):
        check_traceable(ParallelPlan.parse("ddp=4,offload_optimizer"))


def test_gradients_in_half_precision_take_half_the_way(hopper: LayerCosts, node: CollectiveModel) -> None:
    half = ParallelPlan.parse("dp=4,sharding=1,half_gradients")
    whole, part = (costs_of_plan(each, SHAPE, hopper, node) for each in (replace(half, half_gradients=False), half))
    assert part.exchange(("reduce", 0)).us < whole.exchange(("reduce", 0)).us
    assert part.exchange(("gather", 0)) == whole.exchange(("gather", 0))
    assert "--grad-reduce-in-bf16" in exported(half, SHAPE, Framework.MEGATRON)
    assert Framework.TORCHTITAN not in frameworks_of(replace(half, sharding=Sharding.PARAMETERS), SHAPE)


def test_stages_and_ranks_together_hold_the_model() -> None:
    plan = ParallelPlan.parse("pp=4,microbatches=4")
    assert sum(state_of(plan, SHAPE, stage).parameters for stage in range(4)) == 2 * COUNT
    split = state_of(ParallelPlan.parse("tp=4"), SHAPE, 0).parameters
    assert COUNT / 2 <= split < COUNT / 2 * 1.01  # norms are on every rank


def test_the_loss_is_the_fullest_moment_of_a_small_model_with_many_words(hopper: LayerCosts) -> None:
    wide, plan = replace(SHAPE, layers=1, vocab=128_000), ParallelPlan.parse("dp=1,microbatch=4")
    assert fullest_of(plan, wide, hopper).moment == "loss"
    logits = 4 * wide.seq * wide.vocab
    fused, steps = (moments_of(plan, replace(wide, fused_loss=how), hopper, 0)[0].total
                    for how in (True, False))
    assert steps - fused == pytest.approx(2 * logits + 2 * logits, rel=0.01)  # fp32 shares, and a gradient beside them


def test_cast_weights_are_kept_beside_the_others() -> None:
    blackwell = LayerCosts(device("b200"))
    usual, *others = (fullest_of(ParallelPlan.parse("dp=2,sharding=1"), SHAPE.in_linears(each), blackwell).account
                      for each in ("", "fp8", "mxfp8", "nvfp4"))
    for narrow in others:
        assert narrow.parameters > usual.parameters and narrow.activations < usual.activations
        assert narrow.optimizer_state == usual.optimizer_state


def test_a_plan_is_refused_only_where_it_cannot_fit(hopper: LayerCosts) -> None:
    found = fullest_of(ParallelPlan.parse("dp=8,microbatch=4"), SHAPE, hopper)
    assert found.low < found.account.total < found.high
    assert [fit_of(found, limit) for limit in (0.0, 1.01 * found.high, found.account.total, 0.99 * found.low)] == [
        Fit.FITS, Fit.FITS, Fit.TIGHT, Fit.NO]


def test_what_would_make_a_plan_fit_frees_what_it_says_the_cheapest_first(
        hopper: LayerCosts, node: CollectiveModel) -> None:
    plan = ParallelPlan.parse("dp=8,microbatch=4,microbatches=2")
    needs = fullest_of(plan, SHAPE, hopper)
    found, total = relief(plan, SHAPE, hopper, node.topology, 0.9 * needs.account.total), needs.account.total
    assert {each.plan.world_size for each in found} == {8} and {each.plan.global_batch for each in found} == {64}
    for each in found:
        assert fullest_of(each.plan, SHAPE, hopper).account.total == pytest.approx(total - each.frees_bytes)
        assert each.fits == (total - each.frees_bytes <= 0.9 * total)
    assert [each.fits for each in found] == sorted((each.fits for each in found), reverse=True) and found[0].fits
    limit = 0.8 * total
    refused = price_plan(plan, SHAPE, hopper, node, memory_limit=limit)
    assert refused.plans == [] and refused.needs == needs and refused.limit_bytes == limit
    assert fit_probability(needs, limit) < 0.01 and fit_probability(needs, needs.account.total) == pytest.approx(0.5)
    assert fit_probability(needs, needs.high) > 0.8 and fit_probability(needs, 0.0) == 1.0
    enough = [each for each in refused.relief if each.fits]
    assert len(enough) > 2 and [each.time_us for each in enough] == sorted(each.time_us for each in enough)
    for each in enough:
        assert each.time_us == estimate(costs_of_plan(each.plan, SHAPE, hopper, node)).time_us
        assert each.probability >= 0.5
    some = next(each for each in refused.relief if each.change.startswith("recomputing 4 of 8 blocks"))
    assert some.plan.recompute_layers == 4
    assert all(frameworks_of(each.plan, SHAPE) for each in refused.relief)


def test_where_nothing_fits_the_plan_that_needs_least_says_what_would_help(
        hopper: LayerCosts, node: CollectiveModel) -> None:
    found = search(SHAPE, 2, 2, hopper, node, memory_limit=1.6e9)
    assert found.plans == [] and found.needs is not None
    assert found.needs.account.total == min(each.least_bytes for each in found.refused if each.least_bytes)


def test_the_command_says_what_would_have_to_change(tmp_path: Path) -> None:
    command = ["plan", "llama", "--preset", "8b", "--gpus", "8", "--device", "a100-sxm-80g", "--parallel",
               "dp=8,microbatch=2,microbatches=2,sharding=1"]
    said = RUNNER.invoke(app, command)
    assert said.exit_code == 1 and "What would have to change" in plain(said.output)
    found = json.loads(RUNNER.invoke(app, [*command, "--json"]).stdout)
    assert any(each["fits"] for each in found["relief"]) and found["plans"] == []
    (refused,) = found["refused"]
    for words in (f"needs {refused['least_bytes'] / 1e9:,.1f} GB.", "less than 1%", found["relief"][0]["change"]):
        assert words in plain(said.output)
    assert found["needs"]["fits_probability"] < 0.01
    fits = next(each["plan"] for each in found["relief"] if each["fits"])
    assert RUNNER.invoke(app, [*command[:-1], fits]).exit_code == 0


@pytest.mark.parametrize("text", ["pp=4,microbatches=8", "pp=2,microbatches=4,chunks=2,schedule=interleaved", "dp=1",
                                  "pp=4,microbatches=8,schedule=zero_bubble", "pp=2,microbatches=4,schedule=gpipe"])
def test_over_a_step_what_was_kept_is_let_go_and_the_fullest_moment_is_the_stages(
        hopper: LayerCosts, text: str) -> None:
    plan = ParallelPlan.parse(text)
    for stage in range(plan.pp):
        points = timeline(plan, SHAPE, hopper, stage)
        assert len(points) == plan.passes * plan.chunks * (3 if "zero" in text else 2)
        kept, held = stage_memory(plan, SHAPE, hopper, stage), state_of(plan, SHAPE, stage).total
        one = kept_of(plan, SHAPE, hopper, stage)[0] / plan.chunks
        assert points[0].before == held and points[-1].before == pytest.approx(held + one)
        assert all(each.peak >= each.before >= held for each in points)
        most = max(each.peak for each in points)
        assert most == pytest.approx(kept.allocated, rel=0.02)
