"""What separates plans and which are worth having, and plans as arguments of frameworks."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest
import tomllib

from planner.parallel.corrections import Z80, PlanSpreads
from planner.parallel.estimate import Estimate
from planner.parallel.search import PARTS, Ranked, front, parts_of, separation, tied, unsure_us
from planner.parallel.space import Framework, exported
from tracer.device_memory import MemoryAccount
from tracer.parallel_plan import ParallelPlan, PlanError
from tracer.shape_only.transformer import TransformerShape

SHAPE = TransformerShape(80, 8192, 64, 8, 28_672, 128_256, 8192)
ROUTED = replace(SHAPE, experts=8, top_k=2)


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
     "tensor_overlap", SHAPE,
     "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 4 --context-parallel-size 2 --micro-batch-size 1 "
     "--global-batch-size 64 --sequence-parallel --tp-comm-overlap --num-layers-per-virtual-pipeline-stage 4 "
     "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
    ("ddp=2,tp=2,pp=2,microbatches=4,recompute=full,recompute_layers=3,overlap=false", SHAPE,
     "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --context-parallel-size 1 --micro-batch-size 1 "
     "--global-batch-size 8 --recompute-granularity full --recompute-method block --recompute-num-layers 3"),
    ("dp=4,pp=16,chunks=8,schedule=interleaved,microbatches=16,sharding=1,replicate=2,recompute=full",
     replace(SHAPE, layers=126),
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
    found = tomllib.loads(exported(plan, SHAPE, Framework.TORCHTITAN))
    assert found["training"] == {"local_batch_size": 16, "global_batch_size": 128, "seq_len": 8192}
    assert found["parallelism"] == {
        "data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 4, "fsdp_reshard_after_forward": "default",
        "tensor_parallel_degree": 2, "enable_async_tensor_parallel": False, "context_parallel_degree": 2,
        "pipeline_parallel_degree": 4, "pipeline_parallel_schedule": "InterleavedZeroBubble",
        "pipeline_parallel_microbatch_size": 2, "pipeline_parallel_layers_per_stage": 10,
        "pipeline_parallel_first_stage_less_layers": 0, "pipeline_parallel_last_stage_less_layers": 0}
    assert found["activation_checkpoint"] == {"mode": "none"}
    world = found["parallelism"]
    assert plan.world_size == (world["data_parallel_replicate_degree"] * world["data_parallel_shard_degree"]
                               * world["tensor_parallel_degree"] * world["context_parallel_degree"]
                               * world["pipeline_parallel_degree"])
    kept = exported(ParallelPlan.parse("fsdp2=8,recompute=operators"), SHAPE, Framework.TORCHTITAN)
    assert 'selective_ac_option = "op"' in kept
    half = exported(ParallelPlan.parse("fsdp2=8,recompute=needed,recompute_layers=40"), SHAPE, Framework.TORCHTITAN)
    assert tomllib.loads(half)["activation_checkpoint"] == {"mode": "selective", "selective_ac_option": "2"}
    plain = exported(ParallelPlan.parse("ddp=8,microbatches=2"), SHAPE, Framework.TORCHTITAN)
    assert tomllib.loads(plain)["parallelism"]["data_parallel_replicate_degree"] == 8
    assert tomllib.loads(plain)["training"]["local_batch_size"] == 1


def test_what_a_framework_does_not_have_is_not_exported() -> None:
    with pytest.raises(PlanError, match="torchtitan does not have the plan"):
        exported(ParallelPlan.parse("dp=8,sharding=1"), SHAPE, Framework.TORCHTITAN)
    with pytest.raises(PlanError, match="no arguments of its own"):
        exported(ParallelPlan.parse("fsdp2=8"), SHAPE, Framework.FSDP)
