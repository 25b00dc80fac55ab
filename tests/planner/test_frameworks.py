"""Profiles of frameworks: figures have sources, a profile changes what it says, and others change nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from said import plain
from typer.testing import CliRunner

pytest.importorskip("torch")

from foretrace.commands import app
from kernel_models.collectives import CollectiveModel, find_topology
from kernel_models.collectives.bandwidths import BusBandwidths
from kernel_models.device import device
from planner.parallel.calibrate import MeasuredPlan, calibrate
from planner.parallel.corrections import UNCORRECTED, CorrectionFactors
from planner.parallel.estimate import estimate
from planner.parallel.frameworks import PLAIN, framework_profiles, profile_of
from planner.parallel.layer_costs import LayerCosts
from planner.parallel.memory import fullest_of
from planner.parallel.plan_costs import costs_of_plan
from planner.parallel.space import ANY, Framework, families, frameworks_of, layouts
from planner.parallel.stages import spread
from tracer.parallel_plan import ParallelPlan, PlanError
from tracer.shape_only.transformer import TransformerShape

SHAPE = TransformerShape(8, 512, 8, 8, 2048, 1024, 256, gated=True, rms=True, bias=False, rotary=True)
NANOTRON = profile_of("nanotron")
LLAMA_1B = TransformerShape(16, 2048, 32, 32, 8192, 131_072, 4096, gated=True, rms=True, bias=False, rotary=True,
                            tied=True)
RUNNER = CliRunner()


@pytest.fixture(scope="module")
def own() -> LayerCosts:
    return LayerCosts(device("h100-sxm"), profile=NANOTRON)


def test_every_figure_has_a_source() -> None:
    for profile in framework_profiles().values():
        figures = [f"{part}.{key}" for part in ("shape", "plan", "piped", "shared", "ddp", "rates", "spreads",
                                                "meeting", "widths", "memory") for key in getattr(profile, part)]
        assert set(figures) == set(profile.sources)
        assert all(each.source for each in profile.passes)
        assert Framework(profile.framework)


@pytest.mark.parametrize(("shape", "stages", "first"), [
    (LLAMA_1B, 2, 10), (LLAMA_1B, 4, 5), (LLAMA_1B, 8, 3),
    (replace(LLAMA_1B, layers=32, hidden=4096, ffn=14_336, tied=False), 16, 3)])
def test_balanced_stages_are_those_of_nanotrons_runs(shape: TransformerShape, stages: int, first: int) -> None:
    """``local_params`` of Hugging Face's benchmark are those of the first stage."""
    counts = [each[0][0] for each in spread(ParallelPlan(pp=stages, balanced=True), shape)]
    assert counts[0] == first and sum(counts) == shape.layers and min(counts[:-1]) >= 1 > counts[-1] - first


def test_a_stage_with_the_head_alone_has_memory(own: LayerCosts) -> None:
    shape = replace(SHAPE, layers=3, vocab=32_768)
    plan = ParallelPlan(pp=4, microbatches=4, balanced=True)
    assert spread(plan, shape)[-1] == ((0,),)
    assert fullest_of(plan, shape, own).account.total > 0
    with pytest.raises(PlanError, match="2 layers are too few for pp=4"):
        spread(plan, replace(SHAPE, layers=2))
    with pytest.raises(PlanError, match="balanced spreads the layers over a pipeline's stages"):
        ParallelPlan(pp=2, balanced=True, first_layers=2)


def test_a_profile_makes_steps_longer_and_fuller(own: LayerCosts) -> None:
    pieces, on = LayerCosts(device("h100-sxm"), like=own), CollectiveModel(find_topology("dgx-h100"))
    plan = ParallelPlan.parse("dp=2,tp=2,pp=2,sharding=1,microbatch=4,microbatches=4,sequence_parallel")
    usual = estimate(costs_of_plan(plan, SHAPE, pieces, on))
    costs = costs_of_plan(NANOTRON.planned(plan), NANOTRON.shaped(SHAPE), own, on)
    found = estimate(costs, NANOTRON.rated(UNCORRECTED, on))
    assert costs.plan.balanced and not costs.plan.overlap and not costs.shape.fused_loss
    assert found.others > 1.2 * usual.others and found.time_us > usual.time_us
    kept = [fullest_of(plan, SHAPE, each).account for each in (pieces, own)]
    assert kept[1].activations > kept[0].activations and kept[1].gradients > kept[0].gradients
    assert PLAIN.planned(plan) is plan and PLAIN.shaped(SHAPE) is SHAPE and PLAIN.rated(UNCORRECTED, on) == UNCORRECTED


def test_hosts_that_are_late_are_seen_in_the_measured_network(own: LayerCosts) -> None:
    on = find_topology("dgx-h100x16")
    quick, slow = (NANOTRON.rated(UNCORRECTED, CollectiveModel(on, bandwidths=BusBandwidths.parse(text)))
                   for text in ("1:460/263/263,16:170/125/125", "1:425/242/242,16:50/27/27"))
    assert quick.meeting_us < 10 < 200 < slow.meeting_us
    plan = ParallelPlan(tp=8, sequence_parallel=True)
    assert slow.meeting(plan).host_collective_us == pytest.approx(slow.host_collective_us + 7 * slow.meeting_us)
    assert UNCORRECTED.meeting(plan) == UNCORRECTED


def test_transfers_between_nodes_cost_more_where_a_profile_says_so(own: LayerCosts) -> None:
    plan = ParallelPlan.parse("tp=8,pp=2,microbatches=4,sequence_parallel")
    costs = costs_of_plan(plan, SHAPE, own, CollectiveModel(find_topology("dgx-h100x2")))
    rates = CorrectionFactors(jitter=0.0)
    more = estimate(costs, replace(rates, crossing_transfer_us=1e5)).time_us - estimate(costs, rates).time_us
    assert more > 4e5
    inside = costs_of_plan(replace(plan, tp=2), SHAPE, own, CollectiveModel(find_topology("dgx-h100")))
    assert estimate(inside, replace(rates, crossing_transfer_us=1e5)) == estimate(inside, rates)


def test_frameworks_by_name_alone_are_not_among_any() -> None:
    plan = ParallelPlan(pp=2, microbatches=2, balanced=True)
    assert not frameworks_of(plan, SHAPE)
    assert frameworks_of(plan, SHAPE, Framework.NANOTRON) == (Framework.NANOTRON,)
    assert not set(frameworks_of(ParallelPlan(dp=2), SHAPE)) - set(ANY)
    layout = next(each for each in layouts(SHAPE, 8, 8) if (each.pp, each.tp) == (2, 4))
    found = [family.least for family in families(layout, SHAPE, 8, Framework.NANOTRON, profile=NANOTRON)]
    assert found and all(each.balanced and not each.tensor_overlap for each in found)


def test_three_steps_move_a_profiles_factors_by_little(own: LayerCosts) -> None:
    on = CollectiveModel(find_topology("dgx-h100"))
    start = NANOTRON.rated(UNCORRECTED, on)
    costs = [costs_of_plan(ParallelPlan(dp=dp, microbatches=2), NANOTRON.shaped(SHAPE), own, on) for dp in (2, 4, 8)]
    steps = [MeasuredPlan(str(each.plan), each, factor * estimate(each, start).time_us)
             for each, factor in zip(costs, (1.1, 1.1, 9.0), strict=True)]  # the last hung
    rates = calibrate(steps, start, NANOTRON.widths).rates
    assert rates.residuals is None
    assert estimate(costs[0], rates).time_us < 1.5 * estimate(costs[0], start).time_us


def test_the_command_takes_a_framework_and_its_network(tmp_path: Path) -> None:
    base = ["plan", "llama", "--preset", "tiny", "--gpus", "16", "--device", "h100-sxm", "--framework", "nanotron"]
    said = RUNNER.invoke(app, [*base, "--parallel", "dp=8,pp=2", "--comm-profile", "1:425/242/242,2:334/163/163"])
    assert said.exit_code == 0 and "to cost the host 74" in plain(said.stdout)
    for arguments, says in ((["--comm-profile", "0/1/1"], "is no bandwidth in GB/s"),
                            (["--comm-profile", "5/5/5", "--comm-choices", "auto"], "say nothing of several backends"),
                            (["--export", "nanotron"], "has no arguments of its own"),
                            (["--parallel", "fsdp2=16"], "nanotron does not have the plan")):
        wrong = RUNNER.invoke(app, [*base, *arguments])
        assert wrong.exit_code == 2 and says in " ".join(plain(wrong.stderr).split()), wrong.stderr
