"""Ranks that share a CPU: what they cost each other, worked out by hand, and what a plan's hooks add."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from graph_predictor.prediction.predictor import Baseline
from graph_predictor.request.parallel_ranks import on_ranks
from graph_predictor.synthesis.baseline import baseline_of
from graph_predictor.synthesis.recorded_times import BUSY, SharedCores, cores_shared
from kernel_models.collectives import CollectiveModel, find_topology
from tracer.graph import NONE, Meta
from tracer.job import read_job
from tracer.parallel_plan import ParallelPlan

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("ranks", "cores", "threads", "crowding", "taken"), [
    (2, 2, 1, 1.0, BUSY),  # a core each: nothing is left for a collective
    (4, 2, 1, 2.0, BUSY),
    (2, 8, 1, 1.0, 0.0),  # cores of their own
    (2, 3, 1, 1.0, BUSY * (1 - 0.5 / BUSY)),  # half a core each
    (2, 8, 4, 1.0, BUSY),  # operations compute with all of them
    (4, 8, 4, 2.0, BUSY)])
def test_cores_are_shared(ranks: int, cores: int, threads: int, crowding: float, taken: float) -> None:
    shared = SharedCores(ranks, cores, threads)
    assert shared.crowding == pytest.approx(crowding) and shared.taken == pytest.approx(taken)


def test_what_a_recording_does_not_say_is_not_assumed() -> None:
    alone = Meta(host_cores=2, host_threads=1, world_size=1)
    assert cores_shared(alone, 4) == SharedCores(4, 2, 1)
    assert cores_shared(alone, 1) is None
    assert cores_shared(replace(alone, host_cores=NONE), 4) is None
    assert cores_shared(replace(alone, world_size=4), 4) is None  # it shared them when it was recorded
    assert cores_shared(replace(alone, host_threads=NONE), 2) == SharedCores(2, 2, 1)


@pytest.fixture(scope="module")
def llama() -> Baseline:
    """One process on two cores."""
    return baseline_of(read_job(ROOT / "traces" / "llama-cpu"))


def spread(alone: Baseline, plan: str) -> float:
    """The step of a plan, µs."""
    return on_ranks(alone, ParallelPlan.parse(plan), CollectiveModel(find_topology("cpu"))).predict().step_time_us


def test_ranks_beyond_the_cores_take_turns(llama: Baseline) -> None:
    alone_us = llama.predict().step_time_us
    two, four = spread(llama, "ddp=2"), spread(llama, "ddp=4")
    assert alone_us < two < 1.9 * alone_us
    assert 2 * alone_us < four
    said = on_ranks(llama, ParallelPlan.parse("ddp=4"), CollectiveModel(find_topology("cpu"))).predict()
    assert any("4 ranks share 2 cores of the recorded host" in note for note in said.notes)


def test_sharding_costs_the_host_its_hooks(llama: Baseline) -> None:
    """What FSDP adds beyond its collectives is milliseconds of Python, which no recording without it has."""
    plan, cpu = ParallelPlan.parse("fsdp2=2"), CollectiveModel(find_topology("cpu"))
    sharded = on_ranks(llama, plan, cpu)
    host_ms = sharded.slices.ns[sharded.slices.rank == 0].sum() / 1e6
    alone_ms = llama.slices.ns.sum() / llama.cycle.steps / 1e6
    assert host_ms > alone_ms + 3.0
