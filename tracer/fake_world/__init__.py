"""Fake worlds: one process does what one rank of a large job does, with collectives that take no time.

    with fake_world(world_size=64, rank=3):
        workload = parallelize(workloads.build("llama"), ParallelPlan.parse("fsdp2=8,tp=8"))
        workload.step(batch)

``world.py`` puts the world up, ``apply.py`` spreads a workload of the suite over it as a ``tracer.parallel_plan`` says
(in real process groups too), ``streams.py`` models what the collectives overlap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracer.fake_world.fit import FakeWorldError, check_plan, check_world
from tracer.lazy import lazily

if TYPE_CHECKING:
    from tracer.fake_world.apply import parallelize
    from tracer.fake_world.classes import rank_classes
    from tracer.fake_world.world import current_world, fake_launch, fake_world

_HOMES = {
    "parallelize": "tracer.fake_world.apply",
    "rank_classes": "tracer.fake_world.classes",
    "current_world": "tracer.fake_world.world",
    "fake_world": "tracer.fake_world.world",
    "fake_launch": "tracer.fake_world.world",
}

__all__ = [
    "FakeWorldError",
    "check_plan",
    "check_world",
    "current_world",
    "fake_launch",
    "fake_world",
    "parallelize",
    "rank_classes",
]

__getattr__, __dir__ = lazily(__name__, _HOMES)
