"""The ranks of a job that were not recorded, assumed to be like the recorded ones."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from graph_predictor.comm.recorded_calls import RecordedCollective, find_collectives
from graph_predictor.prediction.scenario import OTHER_RANKS, EditError, Scenario
from graph_predictor.recorded.facts import further_out
from graph_predictor.simulation.build import kernel_kinds
from kernel_models.collectives import CollectiveModel, CommTimes, price_calls, topology_of
from kernel_models.spreads import TRANSFER_ALONE
from tracer.graph import KernelKind
from tracer.parallel_plan import PlanError

UNDISTURBED = 1.5
"""A recorded time of at most 1.5 times the shortest is all transfer, slowed by overlapping computation; a longer time
includes waiting."""


@dataclass(frozen=True)
class RanksAlike:
    """Assume that unrecorded ranks do the same work as the recorded ones at the same time.

    Where some ranks of a collective were not recorded, its recorded time includes waiting for them. It keeps its
    transfer alone: the median of the times that are at most 1.5 times the shortest of its kind and size. The upper end
    of the 80% interval of the model of the device's usual nodes limits the transfer. Recorded times up to 1.5 times the
    shortest stay as they are. The slowest of all ranks is slower than the recorded ones: their kernels' variation from
    step to step, times how much further out the slowest of all lies.
    """

    def describe(self) -> str:
        """Return one phrase for reports."""
        return "all ranks alike"

    def apply(self, scenario: Scenario) -> Scenario:
        """Return the scenario with this edit applied (``Edit.apply``)."""
        scenario = scenario.claim(OTHER_RANKS, "--ranks-alike")
        graphs = scenario.built.graphs
        world = max(len(graphs), *(graph.meta.world_size for graph in graphs))
        try:
            model = CollectiveModel(topology_of(scenario.known_source(), world))
            model.check_fits(world)
        except PlanError as error:
            raise EditError(str(error)) from None
        found, unknown = find_collectives(scenario.built, model.topology)
        alone = [each for each in found if each.alone or len(each.members) < each.call.placement.ranks]
        if not alone:
            raise EditError("No collective of the step waits for a rank that was not recorded: there are none, or all "
                            "ranks were recorded, whose waiting is simulated.")
        pointer = scenario.built.program.kernel_ptr
        factor, spread = (np.full(len(scenario.built.program.kernel_item), value) for value in (1.0, 0.0))
        saved = 0.0
        for each, transfer_ns in zip(alone, _transfers_ns(alone, price_calls([one.call for one in alone], model)),
                                     strict=True):
            for position, kernel in each.members:
                row = int(pointer[position]) + kernel
                factor[row], spread[row] = transfer_ns / max(each.recorded_ns, 1), TRANSFER_ALONE
                saved += (each.recorded_ns - transfer_ns) * bool(scenario.cycle.kernel[row]) / len(graphs)
        further, varied = further_out(graphs, len(graphs), world)
        own = kernel_kinds(graphs) == KernelKind.COMPUTE
        factor[own] *= np.exp(further)
        spread[own] = abs(further)
        without = f" {unknown} of unknown kind or size keep their recorded times." if unknown else ""
        return scenario.with_note(
            f"Ranks that were not recorded are taken to be as quick as the recorded ones: {len(alone)} collectives "
            f"take their transfer alone, {saved / scenario.cycle.steps / 1e6:,.3f} ms less a step. {varied}{without}",
            kernels=scenario.kernels.scaled(factor).widened(spread))


def _transfers_ns(collectives: list[RecordedCollective], model: CommTimes) -> list[float]:
    """Return the time of each collective without waiting, ns."""
    alike: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for each in collectives:
        alike[_key(each)].append(each.recorded_ns)
    shortest = {key: min(times) for key, times in alike.items()}
    usual = {key: float(np.median([ns for ns in times if ns <= UNDISTURBED * shortest[key]]))
             for key, times in alike.items()}
    found = []
    for each, high_us in zip(collectives, model.high_us.tolist(), strict=True):
        key = _key(each)
        longest = high_us * 1e3 if math.isfinite(high_us) else math.inf
        undisturbed = each.recorded_ns <= UNDISTURBED * min(shortest[key], longest)
        found.append(float(each.recorded_ns) if undisturbed else min(usual[key], longest))
    return found


def _key(each: RecordedCollective) -> tuple[object, ...]:
    return each.call.kind, each.call.payload_bytes, each.call.dtype, each.call.placement
