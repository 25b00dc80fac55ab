"""The host of another capture: its time in and between operations, and its launch latencies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from graph_predictor.prediction.operation_costs import (
    OperationCosts,
    numbered_names,
    operation_costs,
    outermost_operations,
    partners,
)
from graph_predictor.prediction.repeat import Cycle, choose_steps
from graph_predictor.prediction.scenario import EditError, Origin, Scenario
from graph_predictor.prediction.unprofiled import unprofiled
from graph_predictor.recorded.counted_steps import similar_steps
from graph_predictor.simulation.build import build_program
from graph_predictor.simulation.host_slices import HostSlices, host_slices
from kernel_models.spreads import OTHER_HOST
from tracer.arrays import Bool, Float64, Int64
from tracer.graph import ExecutionGraph


@dataclass(frozen=True)
class HostFrom:
    """Take host times from another capture of the same or a similar program.

    The outermost operations of both steps are matched in program order. A matched operation and the time before it take
    the other capture's mean time (``operation_costs``). An operation without a partner takes the mean of the other
    capture's operations of its name. Without these, its time scales by the ratio of all matched times. Calls within an
    operation scale with it. Launch latencies also come from the other capture. Assumes that it ran the same framework
    path: its host time, not its waiting, is taken.

    In a step traced again at other sizes, each operation changes as the recorded operation that its time came from.

    Attributes:
        graphs: of the other capture, one a rank. Ranks are paired by position; a missing rank takes the first one.
        name: label of the other capture.
    """

    graphs: Sequence[ExecutionGraph]
    name: str = "another trace"

    def describe(self) -> str:
        """Return one phrase for reports."""
        return f"host of {self.name}"

    def apply(self, scenario: Scenario) -> Scenario:
        """Return the scenario with this edit applied (``Edit.apply``)."""
        scenario = scenario.claim("the host", f"--host-from {self.name}")
        if scenario.origin is not None:
            return self._retraced(scenario, scenario.origin)
        other = build_program(list(self.graphs))
        steps = similar_steps(other.graphs)
        if not scenario.profiled:
            other = unprofiled(other, steps)
        cycle = choose_steps(other, steps)
        if cycle is None:
            raise EditError(f"{self.name} has no steps, so that its host time is not known by step; give a trace "
                            "with steps.")
        slices = host_slices(other)
        # The ratio of the hosts comes from recorded times, but also applies to times that other edits changed.
        ns = scenario.host_times()
        matched = total = 0.0
        for rank in range(len(scenario.built.graphs)):
            other_rank = min(rank, len(other.graphs) - 1)
            done, all_ = _rank(scenario, rank, slices, cycle, other_rank, ns)
            matched, total = matched + done, total + all_
        if not matched:
            raise EditError(f"No operation of the step is in {self.name}: its host cannot stand in; give a trace of "
                            "the same model.")
        share = matched / total if total else 0.0
        host = scenario.host.widened((1.0 - share) * OTHER_HOST)
        changed = replace(scenario, host=replace(host, ns=ns, constants=[report.constants for report in other.reports]))
        if other.profiled and not scenario.profiled:
            changed = replace(changed, warnings=(*changed.warnings, (
                f"{self.name} does not say what its step takes without the profiler: its host times are those under "
                "it.")))
        return changed.with_note(f"Host time is that of {self.name}: {share:.0%} of it by the same operation in the "
                                 "same place, the rest by operations of the same name or the mean ratio.")


    def _retraced(self, scenario: Scenario, origin: Origin) -> Scenario:
        """Apply the edit to a step traced again: each operation changes as the recorded operation it came from."""
        recorded = self.apply(origin.scenario)
        there = recorded.host
        assert there.ns is not None and there.constants is not None
        ns = scenario.host_times() * origin.host_factors(scenario.slices, there.ns)
        constants = [there.constants[min(rank, len(there.constants) - 1)] for rank in origin.ranks]
        return replace(
            scenario, host=replace(scenario.host.widened(there.spread), ns=ns, constants=constants),
            warnings=tuple(dict.fromkeys((*scenario.warnings, *recorded.warnings))),
            notes=tuple(dict.fromkeys((*scenario.notes, *recorded.notes))))


def _rank(scenario: Scenario, rank: int, slices: HostSlices, cycle: Cycle, other_rank: int, ns: Float64) -> tuple[
        float, float]:
    """Scale one rank's part of ``ns`` to the other host. Return recorded ns: of matched operations, and of all."""
    mine = operation_costs(scenario.cycle, scenario.slices, rank, outermost_operations(scenario.built.graphs[rank]))
    theirs = operation_costs(cycle, slices, other_rank, outermost_operations(cycle.built.graphs[other_rank]))
    inside, before, tail = mine.inside.mean(axis=0), mine.before.mean(axis=0)[:-1], float(mine.before[:, -1].mean())
    partner = partners(mine, theirs)
    in_place = partner >= 0
    other_inside, other_before, known = _times(mine, theirs, partner)
    # Other time for a part that takes no time here goes to the other part of the same operation.
    other_before, other_inside = (
        np.where(inside <= 0, other_inside + other_before, np.where(before <= 0, 0.0, other_before)),
        np.where(inside <= 0, 0.0, np.where(before <= 0, other_inside + other_before, other_inside)))
    taken = float((inside + before)[known].sum())
    overall = float((other_inside + other_before)[known].sum()) / taken if taken else 1.0
    other_tail = float(theirs.before[:, -1].mean())
    after = other_tail / tail if tail > 0 else overall
    fetch = theirs.fetch / mine.fetch if mine.fetch > 0 and theirs.fetch > 0 else overall
    factors = mine.by_slice(
        scenario.slices, np.where(known, _ratio(other_inside, inside), overall),
        np.append(np.where(known, _ratio(other_before, before), overall), after), fetch, overall)
    rows = np.flatnonzero((scenario.slices.rank == rank) & scenario.cycle.working[scenario.slices.item])
    ns[rows] *= factors[rows]
    matched = float((inside + before)[in_place].sum()) + (tail if other_tail > 0 else 0.0) + (
        mine.fetch if theirs.fetch > 0 else 0.0)
    return matched * scenario.cycle.steps, float(scenario.slices.ns[rows].sum())


def _times(mine: OperationCosts, theirs: OperationCosts, partner: Int64) -> tuple[Float64, Float64, Bool]:
    """Return the ns that the other capture takes in, and before, each operation of ``mine`` (its partner's, else the
    mean of operations of its name), and whether they are known."""
    numbers: dict[str, int] = {}
    name, other = (numbered_names(one.graph, one.op, numbers) for one in (mine, theirs))
    count = np.bincount(other, minlength=len(numbers))
    known = (partner >= 0) | (count[name] > 0)
    found = []
    for time in (theirs.inside.mean(axis=0), theirs.before.mean(axis=0)[:-1]):
        by_name = np.bincount(other, weights=time, minlength=len(numbers)) / np.maximum(count, 1)
        found.append(np.where(partner >= 0, np.append(time, 0.0)[partner], by_name[name]))
    return found[0], found[1], known


def _ratio(time: Float64, over: Float64) -> Float64:
    return np.where(over > 0, time / np.maximum(over, 1e-9), 0.0)
