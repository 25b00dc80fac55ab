"""Ranks that share a CPU: what they cost each other, worked out by hand, and what a plan's hooks add."""

from __future__ import annotations

from dataclasses import replace

import pytest
from recordings import llama, llama_on

from graph_predictor.synthesis.recorded_times import BUSY, SharedCores, cores_shared
from tracer.graph import NONE, Meta


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


@pytest.mark.slow
def test_ranks_beyond_the_cores_take_turns() -> None:
    alone_us = llama().predict().step_time_us
    two, four = llama_on("ddp=2").predict(), llama_on("ddp=4").predict()
    assert alone_us < two.step_time_us < 1.9 * alone_us
    assert 2 * alone_us < four.step_time_us
    assert any("4 ranks share 2 cores of the recorded host" in note for note in four.notes)


@pytest.mark.slow  # a sharded plan of this capture: test_ranks.py
def test_sharding_costs_the_host_its_hooks() -> None:
    """What FSDP adds beyond its collectives is milliseconds of Python, which no recording without it has."""
    alone, sharded = llama(), llama_on("fsdp2=2")
    host_ms = sharded.slices.ns[sharded.slices.rank == 0].sum() / 1e6
    assert host_ms > alone.slices.ns.sum() / alone.cycle.steps / 1e6 + 3.0
