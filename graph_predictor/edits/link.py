"""Faster or slower links between a job's GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from graph_predictor.edits.topology import OnTopology
from graph_predictor.prediction.scenario import EditError, Scenario
from graph_predictor.simulation.program import MOST_FACTOR
from kernel_models.collectives import CollectiveModel, topology_of


@dataclass(frozen=True)
class ScaleLink:
    """Scale the bandwidth of the links between a node's GPUs and of its network cards by a factor.

    Collectives take their recorded time × model(scaled links) / model(recorded links). The recorded cluster is assumed
    to be filled nodes of the device's usual kind. Latencies stay, so small collectives change less.
    """

    factor: float

    def describe(self) -> str:
        """Return one phrase for reports."""
        return f"links × {self.factor:g}"

    def apply(self, scenario: Scenario) -> Scenario:
        """Return the scenario with this edit applied (``Edit.apply``)."""
        if not 1 / MOST_FACTOR <= self.factor <= MOST_FACTOR:
            raise EditError(f"Links cannot be scaled by {self.factor:g}: give a positive factor, at most "
                            f"{MOST_FACTOR:g}.")
        graphs = scenario.built.graphs
        world = max(len(graphs), *(graph.meta.world_size for graph in graphs))
        usual = topology_of(scenario.known_source(), world)
        return OnTopology(CollectiveModel(usual.with_links(self.factor)), usual).apply(scenario)
