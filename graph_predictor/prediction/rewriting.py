"""Work replaced by other work: edits name what is replaced (``Rewrite``), and it is carried out here, once everything
else about the scenario is known. So the order of the edits does not matter.

    units    mul  add  relu        time  t₁ t₂ t₃
    becomes  fused                 (t₁ + t₂ + t₃) × model(fused) / model(mul, add, relu)

Kernels that vanish take no time, nor do the gaps before them; an operation all of whose kernels vanish takes no host
time, launches among it, and waits for nothing. Python between the operations stays. Work whose place nothing takes is
removed: the operations that an edit removes, and nothing around them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from graph_predictor.prediction.anchoring import prices_of, size_of_change
from graph_predictor.prediction.pricing import KernelTimes
from graph_predictor.prediction.replacement import Gone, Replacement, Units
from graph_predictor.prediction.scenario import Scenario
from graph_predictor.simulation.program import ItemKind
from kernel_models.device import DeviceSpec
from kernel_models.model import Source
from kernel_models.op_call import OpCall
from kernel_models.pricing import Models
from kernel_models.spreads import REPLACED_ON_CPU
from kernel_models.trace_calls import FAMILIES
from tracer.arrays import Bool, Float64, Int64
from tracer.columns import within
from tracer.graph import ExecutionGraph

LEAST_US = 1e-3


@dataclass(slots=True)
class Rewritten:
    """All replacements of a scenario with the ratio of each one's time to that of the work whose place it takes.

    Attributes:
        units: the units, after all replacements.
        replacements: in the order they are carried out.
        ratio, low, high: of each: time after over time before, and the logs of its 80% interval's ends.
        host_weight: factor on each piece of host time; zero where it vanishes.
        host_spread: log half width of what it adds to the interval of the host's time.
        gone: what vanishes.
        members: of each, the kernels whose place it takes, or on a CPU the pieces of host time; the new work is the
            first of them.
    """

    units: Units
    replacements: list[Replacement]
    ratio: Float64
    low: Float64
    high: Float64
    host_weight: Float64
    host_spread: float
    gone: Gone
    members: list[Int64] = field(default_factory=list)

    def removed(self) -> Int64:
        """Return the kernels, or on a CPU the pieces of host time, whose place nothing takes."""
        return np.concatenate([_NONE, *(rows for one, rows in zip(self.replacements, self.members, strict=True)
                                        if not one.calls)])

    def labels(self) -> dict[int, str]:
        """Return what reports call new work, by its kernel, or on a CPU by its piece of host time."""
        return {int(rows[0]): one.label for one, rows in zip(self.replacements, self.members, strict=True) if one.label}


def rewrite(scenario: Scenario) -> Rewritten | None:
    """Carry out a scenario's rewrites, in the order of their names; ``None`` where there are none."""
    if not scenario.rewrites:
        return None
    from graph_predictor.prediction.units import units_of

    units = units_of(scenario)
    found: list[Replacement] = []
    before: list[tuple[OpCall, ...]] = []
    weight: Float64 = np.ones(len(scenario.pieces))
    removed: list[Bool] = [np.zeros(len(graph.ops), np.bool_) for graph in scenario.built.graphs]
    for name in sorted(scenario.rewrites):
        rewriting = scenario.rewrites[name](scenario, units)
        for replacement in rewriting.replacements:
            before.append(tuple(call for u in replacement.units.tolist() for call in units.calls[u]))
            replacement.carry_out(units)
        found += rewriting.replacements
        if rewriting.host_weight is not None:
            weight = weight * rewriting.host_weight
        for rank, mine in enumerate(rewriting.removed or ()):
            removed[rank] |= mine
    result = _priced(scenario, units, found, before, weight, removed)
    return replace(result, host_spread=_cpu_spread(scenario, result)) if units.on_host and found else result


def replaced_kernels(done: Rewritten | None, times: KernelTimes) -> KernelTimes:
    """Return the kernels' times with all replacements."""
    if done is None:
        return times
    ns, source, family, low, high = (getattr(times, name).copy() for name in ("ns", "source", "family", "low", "high"))
    for i, (replacement, kernels) in enumerate(zip(done.replacements, done.members, strict=True)):
        if done.units.on_host or not replacement.calls:
            continue
        total = float(ns[kernels].sum()) * done.ratio[i]
        widest = kernels[np.argmax(ns[kernels])]
        ns[kernels] = 0.0
        head = kernels[0]
        ns[head] = total
        source[head] = max(int(source[kernels].max()), Source.ANCHORED)
        family[head] = FAMILIES.index(replacement.calls[0].family)
        low[head], high[head] = min(low[widest], done.low[i]), max(high[widest], done.high[i])
    ns[done.gone.kernels] = 0.0
    return replace(times, ns=ns, source=source, family=family, low=low, high=high)


def replaced_host(done: Rewritten | None, ns: Float64) -> Float64:
    """Return the times of the host's pieces with all replacements, ns."""
    if done is None:
        return ns
    result = ns * done.host_weight
    if not done.units.on_host:
        return result
    # A CPU's operations: the own time of all goes to the first one.
    current = ns.copy()
    for replacement, rows, ratio in zip(done.replacements, done.members, done.ratio.tolist(), strict=True):
        total = float(current[rows].sum()) * ratio
        current[rows] = result[rows] = 0.0
        if replacement.calls:
            current[rows[0]] = result[rows[0]] = total
    return result


_NONE = np.zeros(0, np.int64)


def _host_pieces(scenario: Scenario, units: Units, found: list[Replacement]) -> list[Int64]:
    """The pieces of a CPU's host time whose place each replacement takes: first the largest of its first operation."""
    pieces = scenario.pieces
    rows_of = _rows_by_operation(scenario)
    result = []
    for replacement in found:
        rows = [rows_of.get((int(units.rank[u]), int(units.op[u])), _NONE) for u in replacement.units.tolist()]
        first = rows[0][np.argsort(-pieces.ns[rows[0]], kind="stable")]
        result.append(np.concatenate([first, *rows[1:]]))
    return result


def _rows_by_operation(scenario: Scenario) -> dict[tuple[int, int], Int64]:
    pieces = scenario.pieces
    rows = np.flatnonzero((pieces.op >= 0) & ~pieces.is_cost & scenario.cycle.working[pieces.item])
    rows = rows[np.lexsort((pieces.op[rows], pieces.rank[rows]))]
    changes = np.flatnonzero((np.diff(pieces.op[rows]) != 0) | (np.diff(pieces.rank[rows]) != 0)) + 1
    return {(int(pieces.rank[part[0]]), int(pieces.op[part[0]])): part for part in np.split(rows, changes) if len(part)}


def _priced(scenario: Scenario, units: Units, found: list[Replacement], before: list[tuple[OpCall, ...]],
            weight: Float64, removed: list[Bool]) -> Rewritten:
    ratio, low, high = np.zeros(len(found)), np.zeros(len(found)), np.zeros(len(found))
    new = np.flatnonzero([bool(one.calls) for one in found])
    if len(new):
        ratio[new], low[new], high[new] = ratios_of(
            [before[i] for i in new], [found[i].calls for i in new], scenario.known_target(), scenario.devices.models)
    members = (_host_pieces if units.on_host else _kernels)(scenario, units, found)
    kernel_gone = _removed_kernels(scenario, removed)
    for one, rows in zip(found, members, strict=True) if not units.on_host else ():
        kernel_gone[rows[1 if one.calls else 0:]] = True
    operations = [mine | (_dead_on_cpu(graph, units, rank, mine) if units.on_host
                          else _dead(graph, kernel_gone[low:high], mine))
                  for rank, (graph, mine, (low, high)) in enumerate(zip(
                      scenario.built.graphs, removed, pairwise(scenario.built.program.kernel_ptr.tolist()),
                      strict=True))]
    # New work waits for what the old did (a fused sum for an all-reduce), unless that is gone or nothing took its
    # place.
    calls = _calls_in(scenario, operations)
    calls &= _calls_in(scenario, removed) | ~_wait_for(scenario, ~kernel_gone)
    gone = Gone(operations, kernel_gone, calls)
    pieces = scenario.pieces
    for rank, mine in enumerate(operations):
        rows = np.flatnonzero((pieces.rank == rank) & (pieces.op >= 0))
        weight[rows[mine[pieces.op[rows]]]] = 0.0
    return Rewritten(units, found, ratio, low, high, weight, 0.0, gone, members)


def ratios_of(before: Sequence[tuple[OpCall, ...]], after: Sequence[tuple[OpCall, ...]], spec: DeviceSpec,
              models: Models | None = None) -> tuple[Float64, Float64, Float64]:
    """Time of each replacement over that of what it replaces, and the logs of the 80% interval's ends."""
    was, now = prices_of(before, spec, models), prices_of(after, spec, models)
    ratio = now.time_us / np.maximum(was.time_us, LEAST_US)
    # On one device errors of one family cancel but for the change: e-fold of it, the whole of the model's interval.
    # What another family replaces shares no error with it.
    alike = np.array([{call.family for call in old} == {call.family for call in new}
                      for old, new in zip(before, after, strict=True)], np.bool_)
    unsure = np.where(alike, size_of_change(ratio), 1.0)
    return ratio, -unsure * np.hypot(now.low, was.high), unsure * np.hypot(now.high, was.low)


def _kernels(scenario: Scenario, units: Units, found: list[Replacement]) -> list[Int64]:
    """The cycle's kernels of each replacement, the new work's first."""
    piece = scenario.work.piece
    rows = np.flatnonzero(scenario.cycle.kernel & (piece >= 0))
    rows = rows[np.lexsort((rows, scenario.built.program.recorded_kernel_start[rows], piece[rows]))]
    pointer = np.searchsorted(piece[rows], np.arange(len(scenario.work.group) + 1))
    return [np.concatenate([rows[pointer[p]:pointer[p + 1]] for p in units.row[one.units].tolist()]) for one in found]


def _removed_kernels(scenario: Scenario, removed: list[Bool]) -> Bool:
    """Return which kernels operations that are removed launched."""
    return np.concatenate([np.append(mine, False)[graph.kernels.op]
                           for mine, graph in zip(removed, scenario.built.graphs, strict=True)])


def _calls_in(scenario: Scenario, operations: list[Bool]) -> Bool:
    """Return which items of the recorded program are calls in such operations."""
    program = scenario.built.program
    rank = program.thread_rank[program.item_thread()]
    found = np.zeros(len(program.item_kind), np.bool_)
    for number, (mine, graph) in enumerate(zip(operations, scenario.built.graphs, strict=True)):
        items = np.flatnonzero((rank == number) & (program.item_kind == ItemKind.CALL))
        found[items] = np.append(mine, False)[graph.launches.op[program.item_row[items]]]
    return found


def _wait_for(scenario: Scenario, kernels: Bool) -> Bool:
    """Return which items of the recorded program wait for any of the kernels."""
    program = scenario.built.program
    item = np.repeat(np.arange(len(program.item_kind)), np.diff(program.wait_ptr))
    found = np.zeros(len(program.item_kind), np.bool_)
    found[item[kernels[program.wait_kernel]]] = True
    return found


def _dead(graph: ExecutionGraph, gone: Bool, removed: Bool) -> Bool:
    """Operations of a rank all of whose kernels vanish, and those in them. What is removed leaves alone what it was in.

    Args:
        graph: the rank's.
        gone: kernels that vanish.
        removed: operations that are removed.
    """
    op = graph.kernels.op.astype(np.int64)
    own = (op >= 0) & ~np.append(removed, False)[op]
    return _within_dead(graph, op[own & gone], op[own])


def _dead_on_cpu(graph: ExecutionGraph, units: Units, rank: int, removed: Bool) -> Bool:
    """The same on a CPU: operations all of whose computing operations vanish."""
    mine = np.flatnonzero(units.rank == rank)
    mine = mine[~removed[units.op[mine]]]
    return _within_dead(graph, units.op[mine[~units.alive[mine]]], units.op[mine])


def _within_dead(graph: ExecutionGraph, vanished: Int64, every: Int64) -> Bool:
    """Operations such that whatever of ``every`` lies at or below them has vanished, and those in them."""
    if not len(vanished):
        return np.zeros(len(graph.ops), np.bool_)
    total = _counts_up(graph.ops.parent, every)
    return within(graph.ops.parent, (_counts_up(graph.ops.parent, vanished) == total) & (total > 0))


def _counts_up(parent: np.ndarray, op: Int64) -> Int64:
    """Return how many of the given rows lie at or below each operation."""
    count = np.zeros(len(parent), np.int64)
    here = op.astype(np.int64)
    while len(here):
        np.add.at(count, here, 1)
        here = parent[here].astype(np.int64)
        here = here[here >= 0]
    return count


def _cpu_spread(scenario: Scenario, done: Rewritten) -> float:
    """Return what a CPU's replaced work adds to the interval of the host's time: its share × its own,
    ``REPLACED_ON_CPU`` at least."""
    pieces = scenario.pieces
    unsure = 0.0
    for rows, ratio, low, high in zip(done.members, done.ratio, done.low, done.high, strict=True):
        unsure += float(pieces.ns[rows].sum()) * ratio * max(REPLACED_ON_CPU, -low, high)
    return unsure / (float(pieces.ns[scenario.cycle.working[pieces.item]].sum()) or 1.0)
