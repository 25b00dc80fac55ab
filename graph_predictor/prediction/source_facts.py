"""Facts of a job that are told beside every prediction from it, whatever is edited: found once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from graph_predictor.recorded.damage import damage_notes
from graph_predictor.simulation.build import Built
from tracer.arrays import Int8
from tracer.graph import KernelKind


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """Facts of a job.

    Attributes:
        kinds: ``KernelKind`` of all its kernels.
        device: the name of the first rank's device, as the trace has it.
        world_size: ranks that it ran on, or was traced for.
        unrecorded: why its collectives keep their times, a sentence; empty where all ranks are there.
        damage: what was lost of its traces, or assumed.
    """

    kinds: Int8
    device: str
    world_size: int
    unrecorded: str
    damage: tuple[str, ...]

    @classmethod
    def of(cls, built: Built) -> SourceFacts:
        """Find them."""
        graphs, there = built.graphs, len(built.graphs)
        kinds = np.concatenate([graph.kernels.kind for graph in graphs])
        world = max(graph.meta.world_size for graph in graphs)
        unrecorded = ""
        if world > there and (kinds == KernelKind.COLLECTIVE).any():
            unrecorded = (f"{there} of {world} ranks were recorded: collectives keep their recorded durations, other "
                          "ranks' late arrival among them (--ranks-alike leaves it out).")
        return cls(kinds, graphs[0].meta.device, max(there, world), unrecorded, tuple(damage_notes(graphs)))
