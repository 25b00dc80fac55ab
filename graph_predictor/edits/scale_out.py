"""A recorded job on more or fewer ranks that do the same work."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from graph_predictor.comm.recorded_calls import find_collectives
from graph_predictor.edits.topology import fill_ratios
from graph_predictor.prediction.scenario import OTHER_RANKS, EditError, Scenario
from graph_predictor.recorded.facts import further_out
from graph_predictor.simulation.build import kernel_kinds
from kernel_models.collectives import CollectiveModel, CommError, price_calls, topology_of
from tracer.columns import MOST_RANKS
from tracer.graph import KernelKind
from tracer.parallel_plan import PlanError


@dataclass(frozen=True)
class ScaleOut:
    """Scale the job weakly to N ranks on filled nodes of the device's usual kind, on their usual network or another
    one (``64@roce-100``).

    Collectives of the whole world take their recorded time × model(N ranks) / model(recorded ranks) at unchanged
    payloads; those of smaller groups stay. All kernels slow down, because the slowest of more ranks is slower: by their
    variation from step to step, times how much further out the slowest of N ranks lies. Assumes normal jitter, and that
    each rank's own work stays (in truth an optimizer's shards would shrink).
    """

    ranks: int
    network: str | None = None
    """Between nodes, by name (foretrace topologies)."""

    @classmethod
    def parse(cls, text: str) -> ScaleOut:
        """Parse a number of ranks, and a network's name behind an ``@``. Raises ``EditError`` for anything else."""
        number, at, network = text.partition("@")
        try:
            ranks = int(number)
        except ValueError:
            ranks = 0
        if not 2 <= ranks <= MOST_RANKS or (at and not network):
            raise EditError(f"{text!r} is no number of ranks to scale to; give 2 to {MOST_RANKS:,}, and a network "
                            "between nodes if it is not their usual one, such as 64@roce-100.")
        return cls(ranks, network or None)

    def describe(self) -> str:
        """One phrase."""
        return f"{self.ranks:,} ranks" + (f" on {self.network}" if self.network else "")

    def apply(self, scenario: Scenario) -> Scenario:
        """Return the scenario with this edit applied (``Edit.apply``)."""
        built = scenario.built
        world = max(len(built.graphs), *(graph.meta.world_size for graph in built.graphs))
        if world < 2 or built.computes_on_host:
            raise EditError("Only a recorded job of several GPUs can be scaled out; spread a step of one rank with "
                            "--parallel.")
        scenario = scenario.claim("the network", "--scale-out")
        device = scenario.known_source()
        try:
            old, new = (CollectiveModel(topology_of(device, ranks, network))
                        for ranks, network in ((world, None), (self.ranks, self.network)))
            new.check_fits(self.ranks)
        except (PlanError, CommError) as error:
            raise EditError(str(error)) from None
        found, unknown = find_collectives(built, old.topology)
        whole = [each for each in found if each.call.placement.ranks == world]
        if not whole:
            raise EditError("No collective of the job is known to be of all its ranks, so that nothing says what more "
                            "of them would change; record with shapes.")
        there = [replace(each.call, placement=new.topology.first(self.ranks)) for each in whole]
        program = built.program
        factor, spread = np.ones(len(program.kernel_item)), np.zeros(len(program.kernel_item))
        fill_ratios(program.kernel_ptr, whole, price_calls([each.call for each in whole], old), price_calls(there, new),
                    factor, spread)
        further, varied = further_out(built.graphs, world, self.ranks)
        own = kernel_kinds(built.graphs) == KernelKind.COMPUTE
        factor[own] *= np.exp(further)
        spread[own] = abs(further)
        waiting = ""
        if OTHER_RANKS not in scenario.set_by and any(each.alone for each in whole):
            waiting = (" What this rank waited for others is taken to grow like the transfers; --ranks-alike leaves it "
                       "out.")
        without = f" {unknown} collectives of unknown kind or size keep their times." if unknown else ""
        return scenario.with_note(
            f"On {new.topology.name}; each rank's work, and collectives of fewer ranks than all, stay as recorded on "
            f"{world:,}. {varied}{without}{waiting}", kernels=scenario.kernels.scaled(factor).widened(spread))
