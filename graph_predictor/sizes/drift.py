"""The machine's drift between two captures of one program at different sizes: ``drift_between``.

Two captures are taken minutes apart, and a shared machine is faster in one than in the other. The difference between
them is then partly growth with the size and partly drift. Growth is predicted from an operation's work: its shapes in
the two captures, and the models' ratio for these. The rest is drift, ln ratios of host time per step::

    stays     all time outside of operations with other shapes; models keep it as it is    observed x
    computes  operations with other shapes, over the models' growth                        observed y = drift + error

The models' error has the width ``RESIZED_ON_CPU`` (variance s). Drift is as large as x, or as the difference of two
runs of one program (variance v). The mean of a normal drift given y is then y v / (v + s), its variance v s / (v + s).
If the machine's speed was constant, v is small and the second capture counts; otherwise the models' growth does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from graph_predictor.prediction.operation_costs import (
    OperationCosts,
    computing_operations,
    every_operation,
    operation_costs,
    partners,
)
from graph_predictor.prediction.pricing import prices_of, size_of_change
from graph_predictor.prediction.scenario import Scenario
from kernel_models.operation import Operation, calls_of
from kernel_models.spreads import END, HOST_AT_CAPTURED, RESIZED_ON_CPU
from tracer.arrays import Bool, Float64

_TWO_RUNS = 2.0 * (HOST_AT_CAPTURED / END) ** 2
"""Variance of the log ratio of two runs."""
_NOTED = 0.02
"""Smaller drifts are not reported."""


@dataclass(frozen=True, slots=True, eq=False)
class Drift:
    """How much slower the machine was during a capture than during the first capture.

    Attributes:
        weight: factor on each slice of the capture's host time that removes the drift.
        spread: log half width of the 80% interval of a step's host time that the drift's uncertainty adds.
        log: drift of the whole step: ln of the capture's time over its time on the first capture's machine.
    """

    weight: Float64
    spread: float
    log: float

    def taken_out(self, scenario: Scenario) -> Scenario:
        """Return the capture's step (also at other sizes) as the first capture's machine would run it."""
        found = replace(scenario, host=scenario.host.scaled(self.weight).widened(self.spread))
        if abs(self.log) < _NOTED:
            return found
        return found.with_note(
            f"The machine was {abs(math.expm1(abs(self.log))):.0%} {'slower' if self.log > 0 else 'quicker'} during "
            "that capture than during the first one, by work that is alike in both and by the models' growth of the "
            "rest; that was taken out, and the step is one of the first capture's machine.")


def drift_between(first: Scenario, other: Scenario) -> Drift | None:
    """Estimate how much slower the machine was during the other capture.

    Returns:
        The drift; ``None`` if the numbers of ranks differ, or nothing can be compared.
    """
    if len(first.built.graphs) != len(other.built.graphs):
        return None
    weight, spread, were, are = np.ones(len(other.slices)), 0.0, 0.0, 0.0
    for rank in range(len(first.built.graphs)):
        tables = [operation_costs(one.cycle, one.slices, rank, every_operation(one.built.graphs[rank]))
                  for one in (first, other)]
        found = _of_rank(first, tables[0], tables[1])
        if found is None:
            return None
        stays, computes, sure, computing = found
        inside = np.where(computing, math.exp(-computes), math.exp(-stays))
        mine = tables[1].by_slice(other.slices, inside, np.full(len(inside) + 1, math.exp(-stays)), 1.0, 1.0)
        rows = tables[1].slice_row
        weight *= mine
        after = float((other.slices.ns * mine)[rows].sum())
        were, are = were + after, are + float(other.slices.ns[rows].sum())
        part = float(tables[1].inside.sum(axis=0)[computing].sum()) * math.exp(-computes) / max(after, 1.0)
        spread = max(spread, END * math.hypot(part * sure, (1.0 - part) * math.sqrt(_TWO_RUNS)))
    return Drift(weight, spread, math.log(are / were)) if were > 0.0 else None


def _of_rank(scenario: Scenario, mine: OperationCosts, theirs: OperationCosts) -> tuple[
        float, float, float, Bool] | None:
    """Return the drift of time that stays and of computation, the latter's standard deviation, and which rows of
    ``theirs`` compute at another size; ``None`` if nothing can be compared."""
    partner = partners(mine, theirs)
    a = np.flatnonzero(partner >= 0)
    b = partner[a]
    was, now = mine.inside.mean(axis=0)[a], theirs.inside.mean(axis=0)[b]
    growth, resized = _growth(scenario, mine, theirs, a, b)
    resized &= (was > 0) & (now > 0)
    kept = ~resized
    before = [one.before.mean(axis=0)[[*rows, -1]].sum() for one, rows in ((mine, a), (theirs, b))]
    stay = float(was[kept].sum() + before[0]), float(now[kept].sum() + before[1])
    if min(stay) <= 0.0:
        return None
    stays = math.log(stay[1] / stay[0])
    computing: Bool = np.zeros(len(theirs), np.bool_)
    computing[b[resized]] = True
    if not resized.any():
        return stays, stays, math.sqrt(_TWO_RUNS), computing
    grown = was[resized] * growth[resized]
    observed = math.log(float(now[resized].sum()) / float(grown.sum()))
    error = (RESIZED_ON_CPU / END * float((grown * size_of_change(growth[resized])).sum() / grown.sum())) ** 2
    prior = stays**2 + _TWO_RUNS
    return stays, observed * prior / (prior + error), math.sqrt(prior * error / (prior + error)), computing


def _growth(scenario: Scenario, mine: OperationCosts, theirs: OperationCosts, a: np.ndarray, b: np.ndarray) -> tuple[
        Float64, Bool]:
    """Return the models' growth of each pair of rows with its shapes, and whether it is known: only for operations that
    compute on the host and have other shapes. Unknown growth is 1."""
    one, two = mine.graph, theirs.graph
    number: dict[tuple[str, str, int, int], int] = {}
    rows: list[int] = []
    pairs: list[tuple[int, int]] = []
    for op, other in zip(mine.op[a].tolist(), theirs.op[b].tolist(), strict=True):
        key = (one.string(int(one.ops.shapes[op])), two.string(int(two.ops.shapes[other])),
               int(one.ops.name[op]), int(one.ops.scalars[op]))
        if key not in number:
            number[key] = len(pairs)
            pairs.append((op, other))
        rows.append(number[key])
    computes = computing_operations(one) if one.computes_on_host else np.zeros(len(one.ops), np.bool_)
    chosen = [at for (before, after, *_), at in number.items() if before != after and computes[pairs[at][0]]]
    calls = [calls_of(Operation.from_graph(graph, op)) for at in chosen
             for graph, op in zip((one, two), pairs[at], strict=True)]
    found, known = np.ones(len(pairs)), np.zeros(len(pairs), np.bool_)
    if chosen:
        times = prices_of(calls, scenario.known_source(), scenario.devices.source_models).time_us.reshape(-1, 2)
        sized = np.array([bool(one) and not any("unsized" in call.flags for call in one) for one in calls], np.bool_)
        sure = sized.reshape(-1, 2).all(axis=1) & (times > 0).all(axis=1)
        places = np.array(chosen)[sure]
        found[places], known[places] = times[sure, 1] / times[sure, 0], True
    return found[rows], known[rows]
