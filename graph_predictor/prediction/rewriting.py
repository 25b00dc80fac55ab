"""Replace work by other work. Edits name the replacements (``Rewrite``); this module applies them once everything else
about the scenario is known. So the order of the edits does not matter.

    units    mul  add  relu        time  t₁ t₂ t₃
    becomes  fused                 (t₁ + t₂ + t₃) × model(fused) / model(mul, add, relu)

Removed kernels take no time, and neither do the gaps before them. An operation without any kernel left takes no host
time, launches included, and waits for nothing. Python between the operations stays. An edit may also name operations to
remove without a replacement; nothing around them is removed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from graph_predictor.prediction.operation_costs import computing_operations
from graph_predictor.prediction.pricing import KernelTimes, prices_of, size_of_change
from graph_predictor.prediction.scenario import Gone, Replacement, Scenario, WorkUnits
from graph_predictor.simulation.program import ItemKind, owners
from kernel_models.device import DeviceSpec
from kernel_models.op_call import OpCall, Source
from kernel_models.operation import Operation, calls_of
from kernel_models.pricing import Models
from kernel_models.spreads import REPLACED_ON_CPU
from kernel_models.trace_calls import FAMILIES
from tracer.arrays import Bool, Float64, Int64
from tracer.columns import nearest, within
from tracer.graph import NONE, ExecutionGraph


def units_of(scenario: Scenario) -> WorkUnits:
    """Return the device work of a scenario's cycle as rows to replace, with its edits of sizes and precision."""
    return _host_units(scenario) if scenario.built.computes_on_host else _device_units(scenario)


def _device_units(scenario: Scenario) -> WorkUnits:
    work, program, cycle = scenario.work, scenario.built.program, scenario.cycle
    mine = np.flatnonzero(cycle.kernel & (work.kernel_group >= 0))
    rank = program.kernel_rank()
    stream = np.concatenate([g.kernels.stream for g in scenario.built.graphs]).astype(np.int64)
    order = mine[np.lexsort((mine, program.recorded_kernel_start[mine], stream[mine], rank[mine]))]
    groups, first_at, count = np.unique(work.kernel_group[order], return_index=True, return_counts=True)
    by_time = np.argsort(first_at, kind="stable")
    groups, first, count = groups[by_time], order[first_at[by_time]], count[by_time]
    last = np.full(len(work.call_row), NONE, np.int64)
    last[work.kernel_group[order]] = order  # the last one written stays
    # Whether a kernel waits for more than its launch and its stream's previous kernel, and what waits for the kernel.
    previous = program.kernel_previous[first]
    owner = owners(program.edge_ptr)
    other = program.edge_kernel != program.kernel_previous[owner]
    awaits = np.zeros(len(program.kernel_item), np.bool_)
    awaits[owner[other]] = True
    seen = np.zeros(len(program.kernel_item), np.bool_)
    seen[program.edge_kernel[other]] = True
    seen[program.wait_kernel] = True
    watched_group = np.zeros(len(work.call_row), np.bool_)
    watched_group[work.kernel_group[np.flatnonzero(seen & (work.kernel_group >= 0))]] = True
    follows = np.zeros(len(groups), np.bool_)
    follows[1:] = (previous[1:] == last[groups[:-1]]) & ~awaits[first[1:]]
    new = [tuple(n for call in scenario.kernels.calls.get(number, calls) for n in scenario.kernels.edited(call))
           for number, calls in enumerate(work.calls)]
    calls = [new[number] for number in work.call_row[groups].tolist()]
    op = work.op[groups]
    phase, step = (_of_ops(scenario, work.rank[groups], op, name) for name in ("phase", "step"))
    return WorkUnits(work.rank[groups], stream[first], groups, op, phase, step, program.recorded_kernel_start[first],
                     count,
                 follows, watched_group[groups], calls, np.ones(len(groups), np.bool_), False)


def _host_units(scenario: Scenario) -> WorkUnits:
    slices, parts = scenario.slices, []
    calls: list[tuple[OpCall, ...]] = []
    for rank, graph in enumerate(scenario.built.graphs):
        rows = np.flatnonzero((slices.rank == rank) & (slices.op >= 0) & scenario.cycle.working[slices.item])
        op = np.unique(slices.op[rows])
        op = op[computing_operations(graph)[op]]
        op = op[np.lexsort((graph.ops.start_ns[op], graph.ops.thread[op]))]
        thread = graph.ops.thread[op].astype(np.int64)
        # Work of an outer operation before and after an inner one lies between the inner operation's neighbours.
        around = _around(graph.ops.parent, op)
        follows = np.zeros(len(op), np.bool_)
        follows[1:] = (thread[1:] == thread[:-1]) & (around[1:] == around[:-1])
        parts.append((np.full(len(op), rank, np.int64), thread, op, graph.ops.start_ns[op], follows))
        known: dict[tuple[int, ...], tuple[OpCall, ...]] = {}
        columns = ("name", "shapes", "dtypes", "strides", "scalars")
        keys = np.stack([getattr(graph.ops, name)[op] for name in columns], axis=1).tolist()
        for row, key in zip(op.tolist(), map(tuple, keys), strict=True):
            if key not in known:
                known[key] = tuple(new for call in calls_of(Operation.from_graph(graph, row))
                                   for new in scenario.kernels.edited(call))
            calls.append(known[key])
    rank_of, lane, op, start, follows = (np.concatenate([part[i] for part in parts]) for i in range(5))
    phase, step = (_of_ops(scenario, rank_of, op, name) for name in ("phase", "step"))
    return WorkUnits(rank_of, lane, op, op, phase, step, start, np.ones(len(op), np.int64), follows,
                 np.zeros(len(op), np.bool_), calls, np.ones(len(op), np.bool_), True)


def _around(parent: npt.NDArray[np.integer], op: Int64) -> Int64:
    """Return for each operation in ``op`` the nearest other one in ``op`` that encloses it; -1 for none."""
    among = np.zeros(len(parent), np.bool_)
    among[op] = True
    return nearest(parent, among, parent[op].astype(np.int64))


def _of_ops(scenario: Scenario, rank: Int64, op: Int64, column: str) -> Int64:
    """Return values of a column of ``ops`` for operations of several ranks; -1 where ``op`` is -1."""
    found = np.full(len(op), NONE, np.int64)
    for number, graph in enumerate(scenario.built.graphs):
        mine = (rank == number) & (op >= 0)
        found[mine] = getattr(graph.ops, column)[op[mine]]
    return found


def host_weight(scenario: Scenario, chosen: list[Bool], factor: float, before: list[Bool] | None = None) -> Float64:
    """Return a factor for each slice of host time, if chosen operations take another time.

    Args:
        scenario: the scenario of the host time.
        chosen: masks of the operations of each rank whose time changes.
        factor: factor on their time and on the time before them; time of loading data stays.
        before: masks of the operations with the factor on the time before them; by default ``chosen``.
    """
    slices = scenario.slices
    weight = np.ones(len(slices))
    for rank in range(len(scenario.built.graphs)):
        rows = np.flatnonzero((slices.rank == rank) & ~slices.data)
        op, following = slices.op[rows], slices.following[rows]
        ahead = np.append(chosen[rank] if before is None else before[rank], False)
        weight[rows[np.where(op >= 0, np.append(chosen[rank], False)[op], ahead[following])]] = factor
    return weight


LEAST_US = 1e-3
"""Least time of replaced work, µs, as it is divided by: a nanosecond."""


@dataclass(slots=True)
class Rewritten:
    """All replacements of a scenario, and the ratio of each one's time to that of the work it replaces.

    Attributes:
        units: the units, after all replacements.
        replacements: in the order they are carried out.
        ratio, low, high: for each, time after / time before, and the logs of the ends of its 80% interval.
        host_weight: factor on each slice of host time; zero where it vanishes.
        host_spread: log half width that the replacements add to the interval of host time.
        gone: work that vanishes.
        members: for each replacement, the kernels (on a CPU: slices of host time) that it replaces; the new work takes
            the place of the first.
    """

    units: WorkUnits
    replacements: list[Replacement]
    ratio: Float64
    low: Float64
    high: Float64
    host_weight: Float64
    host_spread: float
    gone: Gone
    members: list[Int64] = field(default_factory=list)

    def removed(self) -> Int64:
        """Return the kernels (on a CPU: slices of host time) that are removed without a replacement."""
        return np.concatenate([_NONE, *(rows for one, rows in zip(self.replacements, self.members, strict=True)
                                        if not one.calls)])

    def labels(self) -> dict[int, str]:
        """Return the reports' names of new work, by its kernel (on a CPU: by its slice of host time)."""
        return {int(rows[0]): one.label for one, rows in zip(self.replacements, self.members, strict=True) if one.label}


def rewrite(scenario: Scenario) -> Rewritten | None:
    """Carry out a scenario's rewrites in the order of their names; ``None`` without rewrites."""
    if not scenario.rewrites:
        return None
    units = units_of(scenario)
    found: list[Replacement] = []
    before: list[tuple[OpCall, ...]] = []
    weight: Float64 = np.ones(len(scenario.slices))
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
    """Return the times of the host's slices with all replacements, ns."""
    if done is None:
        return ns
    result = ns * done.host_weight
    if not done.units.on_host:
        return result
    # On a CPU the own time of all replaced operations goes to the first one.
    current = ns.copy()
    for replacement, rows, ratio in zip(done.replacements, done.members, done.ratio.tolist(), strict=True):
        total = float(current[rows].sum()) * ratio
        current[rows] = result[rows] = 0.0
        if replacement.calls:
            current[rows[0]] = result[rows[0]] = total
    return result


_NONE = np.zeros(0, np.int64)


def _host_slices(scenario: Scenario, units: WorkUnits, found: list[Replacement]) -> list[Int64]:
    """Return the slices of a CPU's host time that each replacement replaces; the first operation's largest is first."""
    slices = scenario.slices
    rows_of = _rows_by_operation(scenario)
    result = []
    for replacement in found:
        rows = [rows_of.get((int(units.rank[u]), int(units.op[u])), _NONE) for u in replacement.units.tolist()]
        first = rows[0][np.argsort(-slices.ns[rows[0]], kind="stable")]
        result.append(np.concatenate([first, *rows[1:]]))
    return result


def _rows_by_operation(scenario: Scenario) -> dict[tuple[int, int], Int64]:
    slices = scenario.slices
    rows = np.flatnonzero((slices.op >= 0) & ~slices.is_cost & scenario.cycle.working[slices.item])
    rows = rows[np.lexsort((slices.op[rows], slices.rank[rows]))]
    changes = np.flatnonzero((np.diff(slices.op[rows]) != 0) | (np.diff(slices.rank[rows]) != 0)) + 1
    return {(int(slices.rank[part[0]]), int(slices.op[part[0]])): part for part in np.split(rows, changes) if len(part)}


def _priced(scenario: Scenario, units: WorkUnits, found: list[Replacement], before: list[tuple[OpCall, ...]],
            weight: Float64, removed: list[Bool]) -> Rewritten:
    ratio, low, high = np.zeros(len(found)), np.zeros(len(found)), np.zeros(len(found))
    new = np.flatnonzero([bool(one.calls) for one in found])
    if len(new):
        ratio[new], low[new], high[new] = ratios_of(
            [before[i] for i in new], [found[i].calls for i in new], scenario.known_target(), scenario.devices.models)
    members = (_host_slices if units.on_host else _kernels)(scenario, units, found)
    kernel_gone = _removed_kernels(scenario, removed)
    for one, rows in zip(found, members, strict=True) if not units.on_host else ():
        kernel_gone[rows[1 if one.calls else 0:]] = True
    operations = [mine | (_dead_on_cpu(graph, units, rank, mine) if units.on_host
                          else _dead(graph, kernel_gone[low:high], mine))
                  for rank, (graph, mine, (low, high)) in enumerate(zip(
                      scenario.built.graphs, removed, pairwise(scenario.built.program.kernel_ptr.tolist()),
                      strict=True))]
    # New work waits for what the old work waited for (a fused sum for an all-reduce), unless the awaited work is gone
    # or the old work has no replacement.
    calls = _calls_in(scenario, operations)
    calls &= _calls_in(scenario, removed) | ~_wait_for(scenario, ~kernel_gone)
    gone = Gone(operations, kernel_gone, calls)
    slices = scenario.slices
    for rank, mine in enumerate(operations):
        rows = np.flatnonzero((slices.rank == rank) & (slices.op >= 0))
        weight[rows[mine[slices.op[rows]]]] = 0.0
    return Rewritten(units, found, ratio, low, high, weight, 0.0, gone, members)


def ratios_of(before: Sequence[tuple[OpCall, ...]], after: Sequence[tuple[OpCall, ...]], spec: DeviceSpec,
              models: Models | None = None) -> tuple[Float64, Float64, Float64]:
    """Return time after / time before of each replacement, and the logs of the ends of its 80% interval."""
    was, now = prices_of(before, spec, models), prices_of(after, spec, models)
    ratio = now.time_us / np.maximum(was.time_us, LEAST_US)
    # On one device a family's errors cancel except for the change: an e-fold change has the model's whole interval.
    # Work of another family shares no error with the work it replaces.
    alike = np.array([{call.family for call in old} == {call.family for call in new}
                      for old, new in zip(before, after, strict=True)], np.bool_)
    unsure = np.where(alike, size_of_change(ratio), 1.0)
    return ratio, -unsure * np.hypot(now.low, was.high), unsure * np.hypot(now.high, was.low)


def _kernels(scenario: Scenario, units: WorkUnits, found: list[Replacement]) -> list[Int64]:
    """Return the cycle's kernels that each replacement replaces; the kernel of the new work is the first."""
    kernel_group = scenario.work.kernel_group
    rows = np.flatnonzero(scenario.cycle.kernel & (kernel_group >= 0))
    rows = rows[np.lexsort((rows, scenario.built.program.recorded_kernel_start[rows], kernel_group[rows]))]
    pointer = np.searchsorted(kernel_group[rows], np.arange(len(scenario.work.call_row) + 1))
    return [np.concatenate([rows[pointer[p]:pointer[p + 1]] for p in units.row[one.units].tolist()]) for one in found]


def _removed_kernels(scenario: Scenario, removed: list[Bool]) -> Bool:
    """Return which kernels were launched by removed operations."""
    return np.concatenate([np.append(mine, False)[graph.kernels.op]
                           for mine, graph in zip(removed, scenario.built.graphs, strict=True)])


def _calls_in(scenario: Scenario, operations: list[Bool]) -> Bool:
    """Return which items of the recorded program are calls in the given operations (masks by rank)."""
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
    item = owners(program.wait_ptr)
    found = np.zeros(len(program.item_kind), np.bool_)
    found[item[kernels[program.wait_kernel]]] = True
    return found


def _dead(graph: ExecutionGraph, gone: Bool, removed: Bool) -> Bool:
    """Return the operations of a rank all of whose kernels vanish, and those in them. Kernels of removed operations do
    not count for the operations around these.

    Args:
        graph: the graph of the rank.
        gone: kernels that vanish.
        removed: operations that are removed.
    """
    op = graph.kernels.op.astype(np.int64)
    own = (op >= 0) & ~np.append(removed, False)[op]
    return _within_dead(graph, op[own & gone], op[own])


def _dead_on_cpu(graph: ExecutionGraph, units: WorkUnits, rank: int, removed: Bool) -> Bool:
    """Return ``_dead`` for a CPU: operations all of whose computing operations vanish, and those in them."""
    mine = np.flatnonzero(units.rank == rank)
    mine = mine[~removed[units.op[mine]]]
    return _within_dead(graph, units.op[mine[~units.alive[mine]]], units.op[mine])


def _within_dead(graph: ExecutionGraph, vanished: Int64, every: Int64) -> Bool:
    """Return a mask of operations whose rows of ``every`` (at or below them) all vanished, and operations in them."""
    if not len(vanished):
        return np.zeros(len(graph.ops), np.bool_)
    total = _counts_up(graph.ops.parent, every)
    return within(graph.ops.parent, (_counts_up(graph.ops.parent, vanished) == total) & (total > 0))


def _counts_up(parent: np.ndarray, op: Int64) -> Int64:
    """Return the number of rows ``op`` that lie at or below each operation."""
    count = np.zeros(len(parent), np.int64)
    here = op.astype(np.int64)
    while len(here):
        np.add.at(count, here, 1)
        here = parent[here].astype(np.int64)
        here = here[here >= 0]
    return count


def _cpu_spread(scenario: Scenario, done: Rewritten) -> float:
    """Return the log half width that a CPU's replaced work adds to the interval of host time: its share of that time ×
    its own half width (at least ``REPLACED_ON_CPU``)."""
    slices = scenario.slices
    unsure = 0.0
    for rows, ratio, low, high in zip(done.members, done.ratio, done.low, done.high, strict=True):
        unsure += float(slices.ns[rows].sum()) * ratio * max(REPLACED_ON_CPU, -low, high)
    return unsure / (float(slices.ns[scenario.cycle.working[slices.item]].sum()) or 1.0)
