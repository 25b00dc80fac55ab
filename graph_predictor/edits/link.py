"""Faster or slower links between a job's GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from graph_predictor.edits.topology import OnTopology
from graph_predictor.prediction.scenario import EditError, Scenario
from graph_predictor.simulation.program import MOST_FACTOR
from kernel_models.collectives import CollectiveModel, topology_of


@dataclass(frozen=True)
class ScaleLink:
    """The links between a node's GPUs and its network cards times a factor.

    Collectives take their recorded time × model(there) / model(where they were recorded), which is taken to be the
    device's usual nodes, filled: latencies stay, so that small ones change less.
    """

    factor: float

    def describe(self) -> str:
        """One phrase."""
        return f"links × {self.factor:g}"

    def apply(self, scenario: Scenario) -> Scenario:
        """See ``Edit``."""
        if not 1 / MOST_FACTOR <= self.factor <= MOST_FACTOR:
            raise EditError(f"Links cannot be scaled by {self.factor:g}: give a positive factor, at most "
                            f"{MOST_FACTOR:g}.")
        graphs = scenario.built.graphs
        world = max(len(graphs), *(graph.meta.world_size for graph in graphs))
        usual = topology_of(scenario.known_source(), world)
        return OnTopology(CollectiveModel(usual.with_links(self.factor)), usual).apply(scenario)
