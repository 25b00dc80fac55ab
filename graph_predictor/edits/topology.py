"""Another network: the collectives of a recorded job on another cluster."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from graph_predictor.comm.recorded_calls import RecordedCollective, find_collectives
from graph_predictor.prediction.scenario import EditError, Scenario
from kernel_models.collectives import CollectiveModel, CommTimes, Topology, price_calls, topology_of
from kernel_models.spreads import COLLECTIVES_SHARED
from tracer.graph import KernelKind
from tracer.parallel_plan import PlanError

END_US = 1e-3  # chosen: a nanosecond, so that no ratio divides by zero


@dataclass(frozen=True)
class OnTopology:
    """Move collectives to another cluster: their recorded time × model(there) / model(where they were recorded).

    Assumes NCCL's own choice of algorithms, ranks that fill nodes in order, and recorded times without waiting for
    other ranks. Where only one rank of several was recorded, its times include waiting.

    Attributes:
        model: the cluster, with measurements of it if there are any.
        recorded: the topology the job ran on; by default filled nodes of its device's usual kind.
        reference: the model that prices the recorded collectives where the job ran on ``model``'s own topology; by
            default its data sheet.
    """

    model: CollectiveModel
    recorded: Topology | None = None
    reference: CollectiveModel | None = None

    def describe(self) -> str:
        """Return one phrase for reports."""
        by = "" if self.model.backend is None else f" by {self.model.backend}"
        by = " by the best backend for each" if self.model.mixed else by
        return f"collectives on {self.model.topology.name}{by}"

    def apply(self, scenario: Scenario) -> Scenario:
        """Return the scenario with this edit applied (``Edit.apply``)."""
        built = scenario.built
        graphs = built.graphs
        world = max(len(graphs), *(graph.meta.world_size for graph in graphs))
        scenario = scenario.claim("the network", self.describe())
        if not any((graph.kernels.kind == KernelKind.COLLECTIVE).any() for graph in graphs):
            return scenario.with_note("The step has no collectives, so that the network changes nothing.")
        try:
            self.model.check_fits(world)
            old = CollectiveModel(self.recorded or topology_of(scenario.known_source(), world))
            old.check_fits(world)
            if self.reference is not None and old.topology == self.reference.topology:
                old = self.reference
        except PlanError as error:
            raise EditError(str(error)) from None
        found, unknown = find_collectives(built, self.model.topology)
        before, _ = find_collectives(built, old.topology)
        factor = np.ones(len(built.program.kernel_item))
        spread = np.zeros(len(factor))
        if found:
            there = price_calls([each.call for each in found], self.model)
            here = price_calls([each.call for each in before], old)
            same = [a.call == b.call for a, b in zip(found, before, strict=True)]
            if _measured(self.model) or self.model.topology != old.topology or not all(same):
                fill_ratios(built.program.kernel_ptr, found, here, there, factor, spread)
        notes = f"Collectives were recorded on {old.topology.name}" + (
            " (the device's usual nodes)" if self.recorded is None else "") + (
            f"; {unknown} of them have no recorded kind or size and keep their times." if unknown else ".") + (
            " None takes another time there." if (factor == 1.0).all() else "")
        return scenario.with_note(notes, kernels=scenario.kernels.scaled(factor).widened(spread))


def fill_ratios(pointer: np.ndarray, found: list[RecordedCollective], here: CommTimes, there: CommTimes,
                factor: np.ndarray, spread: np.ndarray) -> None:
    """Put the ratio of each collective, and the log half width of its interval, at the rows of its kernels."""
    ratio = np.maximum(there.time_us, END_US) / np.maximum(here.time_us, END_US)
    wide = np.sqrt((1 - COLLECTIVES_SHARED) * (_half_width(there) ** 2 + _half_width(here) ** 2))
    wide[ratio == 1.0] = 0.0
    for each, value, width in zip(found, ratio.tolist(), wide.tolist(), strict=True):
        for position, kernel in each.members:
            row = int(pointer[position]) + kernel
            factor[row], spread[row] = value, width


def _measured(model: CollectiveModel) -> bool:
    return model.profile is not None and bool(model.profile.backends)


def _half_width(times: CommTimes) -> np.ndarray:
    low, high = np.maximum(times.low_us, END_US), np.maximum(times.high_us, END_US)
    width: np.ndarray = np.log(high / low) / 2
    return width
