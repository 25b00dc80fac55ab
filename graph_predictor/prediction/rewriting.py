"""Work replaced by other work: edits name what is replaced (``Rewrite``), and it is carried out here, once everything
else about the scenario is known. So the order of the edits does not matter.

    units    mul  add  relu        time  t₁ t₂ t₃
    becomes  fused                 (t₁ + t₂ + t₃) × model(fused) / model(mul, add, relu)

Kernels that vanish take no time, nor do the gaps before them; an operation all of whose kernels vanish takes no host
time, launches among it. Python between the operations stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from graph_predictor.prediction.anchoring import prices_of, size_of_change
from graph_predictor.prediction.pricing import KernelTimes
from graph_predictor.prediction.replacement import Replacement, Units
from graph_predictor.prediction.scenario import Scenario
from kernel_models.device import DeviceSpec
from kernel_models.model import Source
from kernel_models.op_call import OpCall
from kernel_models.pricing import Models
from kernel_models.spreads import REPLACED_ON_CPU
from kernel_models.trace_calls import FAMILIES
from tracer.arrays import Bool, Float64, Int64
from tracer.trees import within

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
        kernel_gone: kernels of the recorded program that vanish.
        kernels: of each, the kernels whose place it takes; the new work is the first of them (on a CPU none).
    """

    units: Units
    replacements: list[Replacement]
    ratio: Float64
    low: Float64
    high: Float64
    host_weight: Float64
    host_spread: float
    kernel_gone: Bool
    kernels: list[Int64] = field(default_factory=list)


def rewrite(scenario: Scenario) -> Rewritten | None:
    """Carry out a scenario's rewrites, in the order of their names; ``None`` where there are none."""
    if not scenario.rewrites:
        return None
    from graph_predictor.prediction.units import units_of

    units = units_of(scenario)
    found: list[Replacement] = []
    before: list[tuple[OpCall, ...]] = []
    weight: Float64 = np.ones(len(scenario.pieces))
    for name in sorted(scenario.rewrites):
        rewriting = scenario.rewrites[name](scenario, units)
        for replacement in rewriting.replacements:
            before.append(tuple(call for u in replacement.units.tolist() for call in units.calls[u]))
            replacement.carry_out(units)
        found += rewriting.replacements
        if rewriting.host_weight is not None:
            weight = weight * rewriting.host_weight
    result = _priced(scenario, units, found, before, weight)
    return replace(result, host_spread=_cpu_spread(scenario, result)) if units.on_host and found else result


def replaced_kernels(done: Rewritten | None, times: KernelTimes) -> KernelTimes:
    """Return the kernels' times with all replacements."""
    if done is None or done.units.on_host:
        return times
    ns, source, family, low, high = (getattr(times, name).copy() for name in ("ns", "source", "family", "low", "high"))
    for i, (replacement, kernels) in enumerate(zip(done.replacements, done.kernels, strict=True)):
        total = float(ns[kernels].sum()) * done.ratio[i]
        widest = kernels[np.argmax(ns[kernels])]
        ns[kernels] = 0.0
        head = kernels[0]
        ns[head] = total
        source[head] = max(int(source[kernels].max()), Source.ANCHORED)
        family[head] = FAMILIES.index(replacement.calls[0].family)
        low[head], high[head] = min(low[widest], done.low[i]), max(high[widest], done.high[i])
    return replace(times, ns=ns, source=source, family=family, low=low, high=high)


def replaced_host(scenario: Scenario, done: Rewritten | None, ns: Float64) -> Float64:
    """Return the times of the host's pieces with all replacements, ns."""
    if done is None:
        return ns
    units, pieces = done.units, scenario.pieces
    result = ns * done.host_weight
    if not units.on_host:
        return result
    # A CPU's operations: the own time of all goes to the first one.
    rows_of = _rows_by_operation(scenario)
    current = ns.copy()
    for replacement, ratio in zip(done.replacements, done.ratio.tolist(), strict=True):
        rows = [rows_of.get((int(units.rank[u]), int(units.op[u])), _NONE) for u in replacement.units.tolist()]
        every = np.concatenate(rows)
        total = float(current[every].sum()) * ratio
        current[every] = result[every] = 0.0
        head = rows[0][np.argmax(pieces.ns[rows[0]])]
        current[head] = result[head] = total
    return result


_NONE = np.zeros(0, np.int64)


def _rows_by_operation(scenario: Scenario) -> dict[tuple[int, int], Int64]:
    pieces = scenario.pieces
    rows = np.flatnonzero((pieces.op >= 0) & ~pieces.is_cost & scenario.cycle.working[pieces.item])
    rows = rows[np.lexsort((pieces.op[rows], pieces.rank[rows]))]
    changes = np.flatnonzero((np.diff(pieces.op[rows]) != 0) | (np.diff(pieces.rank[rows]) != 0)) + 1
    return {(int(pieces.rank[part[0]]), int(pieces.op[part[0]])): part for part in np.split(rows, changes) if len(part)}


def _priced(scenario: Scenario, units: Units, found: list[Replacement], before: list[tuple[OpCall, ...]],
            weight: Float64) -> Rewritten:
    target, models = scenario.known_target(), scenario.devices.models
    ratio, low, high = ratios_of(before, [one.calls for one in found], target, models)
    kernel_gone = np.zeros(len(scenario.built.program.kernel_item), np.bool_)
    kernels = [] if units.on_host else _kernels(scenario, units, found, kernel_gone)
    gone = _host_of_dead(scenario, units) if units.on_host else _host_of(scenario, kernel_gone)
    return Rewritten(units, found, ratio, low, high, np.where(gone, 0.0, weight), 0.0, kernel_gone, kernels)


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


def _kernels(scenario: Scenario, units: Units, found: list[Replacement], gone: Bool) -> list[Int64]:
    """The cycle's kernels of each replacement, the new work's first; marks those that vanish."""
    piece = scenario.work.piece
    rows = np.flatnonzero(scenario.cycle.kernel & (piece >= 0))
    rows = rows[np.lexsort((rows, scenario.built.program.recorded_kernel_start[rows], piece[rows]))]
    pointer = np.searchsorted(piece[rows], np.arange(len(scenario.work.group) + 1))
    result = []
    for replacement in found:
        of = units.row[replacement.units].tolist()
        kernels = np.concatenate([rows[pointer[p]:pointer[p + 1]] for p in of])
        gone[kernels[1:]] = True
        result.append(kernels)
    return result


def _host_of(scenario: Scenario, kernel_gone: Bool) -> Bool:
    """Pieces of host time in operations all of whose kernels vanish."""
    pieces = scenario.pieces
    result = np.zeros(len(pieces), np.bool_)
    program = scenario.built.program
    for rank, graph in enumerate(scenario.built.graphs):
        low, high = int(program.kernel_ptr[rank]), int(program.kernel_ptr[rank + 1])
        vanished = kernel_gone[low:high]
        if not vanished.any():
            continue
        op = graph.kernels.op.astype(np.int64)
        every = _counts_up(graph.ops.parent, op[op >= 0])
        dead = (_counts_up(graph.ops.parent, op[vanished & (op >= 0)]) == every) & (every > 0)
        mine = np.flatnonzero((pieces.rank == rank) & (pieces.op >= 0))
        result[mine] = within(graph.ops.parent, dead)[pieces.op[mine]]
    return result


def _host_of_dead(scenario: Scenario, units: Units) -> Bool:
    """The same on a CPU: in operations all of whose computing operations vanish."""
    pieces = scenario.pieces
    result = np.zeros(len(pieces), np.bool_)
    for rank, graph in enumerate(scenario.built.graphs):
        mine = units.rank == rank
        if not (mine & ~units.alive).any():
            continue
        every = _counts_up(graph.ops.parent, units.op[mine])
        dead = (_counts_up(graph.ops.parent, units.op[mine & ~units.alive]) == every) & (every > 0)
        rows = np.flatnonzero((pieces.rank == rank) & (pieces.op >= 0))
        result[rows] = within(graph.ops.parent, dead)[pieces.op[rows]]
    return result


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
    rows_of = _rows_by_operation(scenario)
    units = done.units
    unsure = 0.0
    for one, ratio, low, high in zip(done.replacements, done.ratio, done.low, done.high, strict=True):
        rows = [rows_of.get((int(units.rank[u]), int(units.op[u])), _NONE) for u in one.units.tolist()]
        unsure += float(pieces.ns[np.concatenate(rows)].sum()) * ratio * max(REPLACED_ON_CPU, -low, high)
    return unsure / (float(pieces.ns[scenario.cycle.working[pieces.item]].sum()) or 1.0)
