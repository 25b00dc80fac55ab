"""Profiles of frameworks, buckets of gradients, what separates plans, and plans as arguments of frameworks."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import tomllib
from said import plain
from typer.testing import CliRunner

from foretrace.commands import app
from kernel_models.collectives import CollectiveModel, find_topology
from kernel_models.collectives.bandwidths import BusBandwidths
from kernel_models.device import device
from planner.parallel.buckets import bucket_shares
from planner.parallel.calibrate import MeasuredPlan, calibrate
from planner.parallel.comm_study import CommCause, calls_of
from planner.parallel.corrections import UNCORRECTED, Z80, CorrectionFactors, PlanSpreads
from planner.parallel.estimate import Estimate, estimate
from planner.parallel.frameworks import PLAIN, framework_profiles, profile_of
from planner.parallel.layer_costs import LayerCosts
from planner.parallel.memory import fullest_of
from planner.parallel.plan_costs import costs_of_plan
from planner.parallel.search import PARTS, Ranked, front, parts_of, separation, tied, unsure_us
from planner.parallel.space import ANY, Framework, exported, families, frameworks_of, layouts
from planner.parallel.stages import spread
from tracer.device_memory import MemoryAccount
from tracer.parallel_plan import ParallelPlan, PlanError
from tracer.shape_only.transformer import TransformerShape

pytest.importorskip("torch")


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


def test_a_profile_makes_steps_longer_and_fuller(
        own: LayerCosts, hopper: LayerCosts, node: CollectiveModel) -> None:
    plan = ParallelPlan.parse("dp=2,tp=2,pp=2,sharding=1,microbatch=4,microbatches=4,sequence_parallel")
    usual = estimate(costs_of_plan(plan, SHAPE, hopper, node))
    costs = costs_of_plan(NANOTRON.planned(plan), NANOTRON.shaped(SHAPE), own, node)
    found = estimate(costs, NANOTRON.rated(UNCORRECTED, node))
    assert costs.plan.balanced and not costs.plan.overlap and not costs.shape.fused_loss
    assert found.others > 1.2 * usual.others and found.time_us > usual.time_us
    kept = [fullest_of(plan, SHAPE, each).account for each in (hopper, own)]
    assert kept[1].activations > kept[0].activations and kept[1].gradients > kept[0].gradients
    assert PLAIN.planned(plan) is plan and PLAIN.shaped(SHAPE) is SHAPE
    assert PLAIN.rated(UNCORRECTED, node) == UNCORRECTED


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


def test_three_steps_move_a_profiles_factors_by_little(own: LayerCosts, node: CollectiveModel) -> None:
    start = NANOTRON.rated(UNCORRECTED, node)
    costs = [costs_of_plan(ParallelPlan(dp=dp, microbatches=2), NANOTRON.shaped(SHAPE), own, node) for dp in (2, 4, 8)]
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


SLOW = CollectiveModel(find_topology("dgx-h100x8"), bandwidths=BusBandwidths.parse("1:430/242/242,8:97/27/27"))
DDP = ParallelPlan(dp=64, microbatch=2, microbatches=2, bucket_mb=25)


def test_products_of_a_block_fill_buckets_and_the_embedding_ends_the_last() -> None:
    """Down, gate with up, and attention's two products reach 25 MiB of bf16 each; a tied embedding is last."""
    shares = bucket_shares(DDP, LLAMA_1B, 0)
    assert len(shares) == 3 * 16 + 1 and sum(shares) == pytest.approx(1)
    assert shares[-1] == pytest.approx(131_072 * 2048 / LLAMA_1B.parameters, rel=0.01)
    assert len(bucket_shares(replace(DDP, bucket_mb=100_000), LLAMA_1B, 0)) == 1
    experts = replace(LLAMA_1B, experts=8, top_k=2)
    assert len(bucket_shares(replace(DDP, ep=4), experts, 0, experts=True)) == 2 * 2 * 16


def test_each_bucket_waits_on_a_slow_network(hopper: LayerCosts) -> None:
    """A run of these took 1,020 ms, and one with ZeRO 1 on the same network 531 (Hugging Face's benchmark)."""
    one, many = (costs_of_plan(plan, LLAMA_1B, hopper, SLOW) for plan in (replace(DDP, bucket_mb=None), DDP))
    assert [each.exchange(("reduce", 0)).count for each in (one, many)] == [1, 49]
    rates = CorrectionFactors(jitter=0.0)
    assert estimate(many, rates).time_us > estimate(one, rates).time_us + 3e5
    messages = [(call.payload_bytes, count) for cause, call, count in calls_of(DDP, LLAMA_1B, SLOW.topology, 0)
                if cause is CommCause.GRADIENTS]
    assert messages == [(pytest.approx(4 * LLAMA_1B.parameters / 49, rel=1e-3), 49)]


@pytest.mark.parametrize(("text", "megabytes"), [
    ("dp=8", 25), ("dp=8,bucket_mb=100", 100), ("dp=8,sharding=1", None), ("tp=8", None)])
def test_nanotron_has_buckets_where_replicas_share_nothing(text: str, megabytes: int | None) -> None:
    assert NANOTRON.planned(ParallelPlan.parse(text)).bucket_mb == megabytes


def test_frameworks_with_buckets_get_their_size() -> None:
    assert Framework.TORCHTITAN not in frameworks_of(DDP, LLAMA_1B)
    assert "--ddp-bucket-size 13107200" in exported(DDP, LLAMA_1B, Framework.MEGATRON).splitlines()


LARGE = TransformerShape(80, 8192, 64, 8, 28_672, 128_256, 8192)
ROUTED = replace(LARGE, experts=8, top_k=2)


def _estimate(products: float, layers: float, pipeline: float = 0.0, text: str = "tp=2") -> Estimate:
    return Estimate(ParallelPlan.parse(text), products + layers + pipeline, 0.0, 0.0, products, 0.0, 0.0, layers,
                    pipeline, 0.0, 0.0, 0.0, 0.0, 0.0, {}, PlanSpreads(0.0, 0.1, 0.1, 0.5, 1.0))


def test_what_two_plans_have_in_common_is_no_reason_to_doubt_their_order() -> None:
    first, longer = _estimate(1000.0, 100.0), _estimate(1000.0, 100.0, 5.0)
    assert unsure_us(first, longer) == pytest.approx(Z80 * 0.1 * 5)
    # A hundred more of one kind and ninety less of another can be told from nothing else.
    other = _estimate(900.0, 210.0)
    assert unsure_us(first, other) == pytest.approx(Z80 * (10**2 + 55**2) ** 0.5) and tied(first, other)
    assert sum(parts_of(other).values()) == other.time_us and set(parts_of(other)) == set(PARTS)
    assert separation(first, other) == "+0.9%: 0.11 ms more exposed communication, 0.1 ms less arithmetic"
    # What runs of one plan differ by says nothing either.
    assert tied(first, _estimate(1000.0, 100.0, 5.0)) and not tied(first, _estimate(1000.0, 100.0, 6.0))
    assert tied(first, first) and separation(first, first) == "0.0%: nothing"


def test_a_plan_is_worth_having_if_no_other_is_as_quick_with_no_more_memory_and_gpus() -> None:
    def ranked(us: float, size: float, text: str) -> Ranked:
        return Ranked(_estimate(us, 0.0, text=text), MemoryAccount(parameters=size))

    quick, small, bad = ranked(10, 50, "tp=2"), ranked(12, 20, "tp=2"), ranked(13, 30, "tp=2")
    alone, twice = ranked(40, 60, "dp=1"), ranked(21, 55, "dp=2,microbatch=2")
    found = front([bad, small, alone, quick, twice])
    # Two replicas do four sequences in 21 µs, which is 5.25 a sequence.
    assert found == [twice, quick, small, alone]


@pytest.mark.parametrize(("text", "shape", "says"), [
    ("dp=4,tp=4,pp=4,cp=2,microbatch=1,microbatches=16,chunks=5,schedule=interleaved,sharding=1,sequence_parallel,"
     "tensor_overlap", LARGE,
     "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 4 --context-parallel-size 2 --micro-batch-size 1 "
     "--global-batch-size 64 --sequence-parallel --tp-comm-overlap --num-layers-per-virtual-pipeline-stage 4 "
     "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
    ("ddp=2,tp=2,pp=2,microbatches=4,recompute=full,recompute_layers=3,overlap=false", LARGE,
     "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --context-parallel-size 1 --micro-batch-size 1 "
     "--global-batch-size 8 --recompute-granularity full --recompute-method block --recompute-num-layers 3"),
    ("dp=4,pp=16,chunks=8,schedule=interleaved,microbatches=16,sharding=1,replicate=2,recompute=full",
     replace(LARGE, layers=126),
     "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 16 --context-parallel-size 1 --micro-batch-size 1 "
     "--global-batch-size 64 --num-virtual-stages-per-pipeline-rank 8 --account-for-embedding-in-pipeline-split "
     "--account-for-loss-in-pipeline-split --use-distributed-optimizer --num-distributed-optimizer-instances 2 "
     "--overlap-grad-reduce --overlap-param-gather --recompute-granularity full --recompute-method uniform "
     "--recompute-num-layers 1"),
    ("fsdp2=8,tp=2,ep=4,etp=1,sequence_parallel", ROUTED,
     "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 --context-parallel-size 1 --micro-batch-size 1 "
     "--global-batch-size 8 --expert-model-parallel-size 4 --expert-tensor-parallel-size 1 --sequence-parallel "
     "--use-distributed-optimizer --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params "
     "--overlap-grad-reduce --overlap-param-gather")])
def test_a_plan_as_megatrons_arguments(text: str, shape: TransformerShape, says: str) -> None:
    assert shlex.split(exported(ParallelPlan.parse(text), shape, Framework.MEGATRON)) == shlex.split(says)


def test_a_plan_as_torchtitans_settings() -> None:
    plan = ParallelPlan.parse("fsdp2=8,replicate=2,tp=2,pp=4,cp=2,microbatch=2,microbatches=8,chunks=2,"
                              "schedule=zero_bubble,sequence_parallel")
    found = tomllib.loads(exported(plan, LARGE, Framework.TORCHTITAN))
    assert found["training"] == {"local_batch_size": 16, "global_batch_size": 128, "seq_len": 8192}
    assert found["parallelism"] == {
        "data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 4, "fsdp_reshard_after_forward": "default",
        "tensor_parallel_degree": 2, "enable_async_tensor_parallel": False, "context_parallel_degree": 2,
        "pipeline_parallel_degree": 4, "pipeline_parallel_schedule": "InterleavedZeroBubble",
        "pipeline_parallel_microbatch_size": 2, "pipeline_parallel_layers_per_stage": 10,
        "pipeline_parallel_first_stage_less_layers": 0, "pipeline_parallel_last_stage_less_layers": 0}
    assert found["activation_checkpoint"] == {"mode": "none"}
    kept, half, plain = (tomllib.loads(exported(ParallelPlan.parse(text), LARGE, Framework.TORCHTITAN)) for text in (
        "fsdp2=8,recompute=operators", "fsdp2=8,recompute=needed,recompute_layers=40", "ddp=8,microbatches=2"))
    assert kept["activation_checkpoint"]["selective_ac_option"] == "op"
    assert half["activation_checkpoint"] == {"mode": "selective", "selective_ac_option": "2"}
    assert plain["parallelism"]["data_parallel_replicate_degree"] == 8 and plain["training"]["local_batch_size"] == 1
    with pytest.raises(PlanError, match="torchtitan does not have the plan"):
        exported(ParallelPlan.parse("dp=8,sharding=1"), LARGE, Framework.TORCHTITAN)
