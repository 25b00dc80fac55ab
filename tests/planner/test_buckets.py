"""Buckets of gradients in plans: how many all-reduces there are, which is exposed, and which frameworks have them."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch")

from kernel_models.collectives import CollectiveModel, find_topology
from kernel_models.collectives.bandwidths import BusBandwidths
from kernel_models.device import device
from planner.parallel.buckets import bucket_shares
from planner.parallel.comm_study import CommCause, calls_of
from planner.parallel.corrections import CorrectionFactors
from planner.parallel.estimate import estimate
from planner.parallel.frameworks import profile_of
from planner.parallel.layer_costs import LayerCosts
from planner.parallel.plan_costs import costs_of_plan
from planner.parallel.space import Framework, exported, frameworks_of
from tracer.parallel_plan import ParallelPlan
from tracer.shape_only.transformer import TransformerShape

LLAMA_1B = TransformerShape(16, 2048, 32, 32, 8192, 131_072, 4096, gated=True, rms=True, bias=False, rotary=True,
                            tied=True)
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


def test_each_bucket_waits_on_a_slow_network() -> None:
    """A run of these took 1,020 ms, and one with ZeRO 1 on the same network 531 (Hugging Face's benchmark)."""
    pieces = LayerCosts(device("h100-sxm"))
    one, many = (costs_of_plan(plan, LLAMA_1B, pieces, SLOW) for plan in (replace(DDP, bucket_mb=None), DDP))
    assert [each.exchange(("reduce", 0)).count for each in (one, many)] == [1, 49]
    rates = CorrectionFactors(jitter=0.0)
    assert estimate(many, rates).time_us > estimate(one, rates).time_us + 3e5
    messages = [(call.payload_bytes, count) for cause, call, count in calls_of(DDP, LLAMA_1B, SLOW.topology, 0)
                if cause is CommCause.GRADIENTS]
    assert messages == [(pytest.approx(4 * LLAMA_1B.parameters / 49, rel=1e-3), 49)]


def test_nanotron_has_buckets_where_replicas_share_nothing() -> None:
    profile = profile_of("nanotron")
    assert profile.planned(ParallelPlan(dp=8)).bucket_mb == 25
    assert profile.planned(ParallelPlan(dp=8, bucket_mb=100)).bucket_mb == 100
    assert profile.planned(ParallelPlan.parse("dp=8,sharding=1")).bucket_mb is None
    assert profile.planned(ParallelPlan(tp=8)).bucket_mb is None


def test_frameworks_with_buckets_get_their_size() -> None:
    assert Framework.TORCHTITAN not in frameworks_of(DDP, LLAMA_1B)
    assert "--ddp-bucket-size 13107200" in exported(DDP, LLAMA_1B, Framework.MEGATRON).splitlines()
