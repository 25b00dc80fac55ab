"""The one class of parallel plans and its parser: both spellings, places of ranks, and what is no plan."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracer import workloads
from tracer.fake_world.fit import check_plan
from tracer.parallel_plan import MeshPlace, ParallelPlan, PlanError, Recomputation, Sharding


def test_plans_and_their_places() -> None:
    plan = ParallelPlan.parse("fsdp2=2,tp=3,pp=4", 24)
    assert plan.place(17) == MeshPlace(pp=2, dp=1, tp=2)
    assert list(plan.mesh.items()) == [("pp", 4), ("dp", 2), ("tp", 3)]
    with pytest.raises(PlanError, match="no rank 24"):
        plan.place(24)


@pytest.mark.parametrize(("one", "size", "other"), [
    ("fsdp2", 64, "dp=64,sharding=3"), (" TP ", 8, "tp=8"),
    ("ddp,pp=2,microbatches=8", 8, "ddp=4,pp=2,microbatches=8"), ("ddp,bucket_mb=50", 8, "ddp=8,bucket_mb=50"),
    ("ddp=8", None, "dp=8"), ("fsdp2=8,tp=2", None, "dp=8,tp=2,sharding=parameters"),
    ("ddp=4,accumulation=2", None, "dp=4,microbatches=2"), ("pp=4", None, "pp=4,microbatches=4"),
    ("dp=2,tp=2,sequence_parallel", None, "DP=2, tp=2, sequence-parallel=true"), ("ddp=8,sharding=0", None, "dp=8")])
def test_both_spellings_are_one_plan(one: str, size: int | None, other: str) -> None:
    assert ParallelPlan.parse(one, size) == ParallelPlan.parse(other)


@pytest.mark.parametrize("text", [
    # As captures store them, which are compared with those of further ranks, and as estimates print them.
    "ddp=8", "fsdp2=8,tp=8", "ddp=4,tp=2,pp=2,microbatches=8", "ddp=8,bucket_mb=50", "fsdp2=8,ep=4", "ddp=1", "tp=2",
    "dp=8,tp=4,microbatch=2,microbatches=16,sharding=1,sequence_parallel,tensor_overlap,recompute=full",
    "dp=1,microbatch=1,microbatches=8,overlap=false", "pp=4,microbatch=1,microbatches=8,chunks=2,schedule=interleaved"])
def test_a_plan_is_written_as_it_is_read(text: str) -> None:
    assert set(str(ParallelPlan.parse(text)).split(",")) == set(text.split(","))


SIZES = st.integers(1, 6)


@given(SIZES, SIZES, SIZES, SIZES, st.sampled_from(Sharding), st.sampled_from(Recomputation), st.none() | SIZES,
       st.none() | SIZES, st.sampled_from([1, 2, 3]))
def test_any_plan_is_read_back_and_its_groups_hold_a_rank_once(
        dp: int, tp: int, pp: int, cp: int, sharding: Sharding, recompute: Recomputation, count: int | None,
        layers: int | None, copies: int) -> None:
    copies = copies if sharding else 1
    if recompute not in (Recomputation.FULL, Recomputation.NEEDED):
        layers = None
    plan = ParallelPlan(dp * copies, tp, pp, cp, microbatches=count, sharding=sharding, recompute=recompute,
                        recompute_layers=layers, replicate=copies)
    assert ParallelPlan.parse(str(plan), plan.world_size) == plan
    assert [plan.rank(plan.place(rank)) for rank in range(plan.world_size)] == list(range(plan.world_size))
    for dimension in ("dp", "tp", "cp"):
        group = plan.group(dimension, pp - 1)
        assert len(set(group)) == getattr(plan, dimension)
        # The members differ in this dimension alone.
        assert [getattr(plan.place(rank), dimension) for rank in group] == list(range(len(group)))
    assert {plan.place(rank).pp for rank in plan.group("pp")} == {0, 1 % pp}
    # What is shared lies within one copy of the state, and copies differ in nothing else.
    shards, copies_of = plan.group("shards", pp - 1), plan.group("copies", pp - 1)
    together = sorted(rank + other - shards[0] for rank in shards for other in copies_of)
    assert together == plan.group("dpcp", pp - 1)


@pytest.mark.parametrize(("text", "size", "message"), [
    ("zero", 8, "'zero' is no part of a parallel plan"), ("ddp=2,", None, "'' is no part of a parallel plan"),
    ("ddp", None, "'ddp' is no part of a parallel plan: write sizes"),
    ("fsdp2=x", 8, "'fsdp2=x' is no part of a parallel plan"),
    ("fsdp2=-2", 8, "'fsdp2=-2' is no part of a parallel plan"),
    ("fsdp2=3", 8, "its sizes multiply to 3, which is not the world size 8"),
    ("fsdp2,tp=3", 8, "3 does not divide the world size 8"),
    ("fsdp2=4,ddp=2", 8, "name each dimension once"),
    ("accumulation=2,microbatches=2", None, "name each dimension once"),
    ("fsdp2,tp", 8, "leave the size out of one at most"),
    ("ddp=8,sharding=3", 8, "contradicts itself"),
    ("ddp=30000000", None, "give one of 1,000,000 or fewer"),
    ("fsdp2,tp=0", 8, "tp=0 is not possible in a plan"),
    ("pp=8,microbatches=0", 8, "microbatches=0 is not possible in a plan"),
    ("fsdp2=8,bucket_mb=50", 8, "bucket_mb is of DDP"),
    ("ddp=8,bucket_mb=0", 8, "bucket_mb=0 is not possible in a plan"),
    ("ddp=8,bucket_mb=x", 8, "'bucket_mb=x' is no part of a parallel plan"),
    ("ddp=4,ep=3", None, "number .4. it does not divide"),
    ("chunks=2", None, "interleaved schedule has 2 or more chunks"),
    ("sequence_parallel", None, "goes with tensor parallelism"),
    ("tp=2,sequence_parallel=often", None, "sequence_parallel=often is not possible in a plan; give true or false"),
    ("pp=4,chunks=2,schedule=interleaved,microbatches=3", None, "groups of pp=4"),
    ("recompute=operators,recompute_layers=2", None, "give recompute=full or needed too"),
    ("ddp=4,replicate=2", None, "give sharding=1 to 3"), ("fsdp2=4,replicate=3", None, "a divisor of dp"),
    ("fsdp2=4,ep=4,replicate=2", None, "than one of replicate=2 copies has"),
    ("pp=2,schedule=zero_bubble,recompute=full", None, "choose another schedule"),
    ("sharding=4", None, "give 0 to 3"), ("recompute=some", None, "give none or selective or full"),
])
def test_texts_that_are_no_plan(text: str, size: int | None, message: str) -> None:
    with pytest.raises(PlanError, match=message) as error:
        ParallelPlan.parse(text, size)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("text", "message"), [
    ("dp=2,cp=2", "cp=2 cannot be traced: no workload splits its sequences"),
    ("pp=2,chunks=2,schedule=interleaved", "chunks=2 cannot be traced: pipelines run"),
    ("pp=2,schedule=gpipe", "schedule=gpipe cannot be traced"),
    ("dp=4,sharding=3,replicate=2", "replicate=2 cannot be traced: replicas share"),
    ("tp=2,sequence_parallel", "sequence_parallel=true cannot be traced"),
    ("dp=2,recompute=full", "recompute=full cannot be traced: .*--set checkpointing=true"),
    ("dp=2,overlap=false", "overlap=false cannot be traced"),
    ("dp=2,microbatch=1", "microbatch=1 cannot be traced: .*--set batch"),
    ("dp=2,microbatches=2", "microbatches belong to a pipeline"),
    ("dp=2,sharding=1", "sharding=1 cannot be traced: .*ddp.*fsdp2"),
])
def test_what_only_an_estimate_knows_is_not_traced(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_plan(workloads.configure("llama", preset="tiny"), ParallelPlan.parse(text))
