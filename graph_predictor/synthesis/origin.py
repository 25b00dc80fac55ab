"""The recorded job whose times a step traced by shapes has taken: ``StandIn``.

What an edit makes of the recorded host it makes of the traced one too, operation by operation:

    recorded   addmm  100 µs → 50 µs with the edit             (×0.5)
    traced     addmm  180 µs (anchored) → 90 µs                (×0.5, by the recorded operation that stands for it)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from graph_predictor.prediction.operation_costs import OperationCosts
from graph_predictor.prediction.scenario import Scenario
from graph_predictor.simulation.host_slices import HostSlices
from tracer.arrays import Float64, Int64
from tracer.graph import NONE


@dataclass(frozen=True, slots=True)
class StandIn:
    """A recorded job and which of its operations stand for those of a traced one.

    Attributes:
        scenario: the recorded job, without edits.
        ranks: of each traced rank the recorded one.
        costs: of each traced rank what the recorded one's operations cost.
        row: of each traced rank the row of these costs that stands for each row of its ``ops``; -1 for none.
    """

    scenario: Scenario
    ranks: list[int]
    costs: list[OperationCosts]
    row: list[Int64]

    def host_factors(self, pieces: HostSlices, ns: Float64) -> Float64:
        """Factor on each piece of the traced job's host time.

        Args:
            pieces: of the traced job.
            ns: times of the recorded job's pieces as an edit makes them.
        """
        found: Float64 = np.ones(len(pieces))
        for rank in range(len(self.row)):
            mine = pieces.of_rank(rank)
            inside, before, fetch, overall = self._ratios(rank, ns)
            row = np.append(self.row[rank], NONE)
            op, following = pieces.op[mine], pieces.following[mine]
            ahead = np.where(following >= 0, np.append(before[:-1], overall)[row[following]], before[-1])
            found[mine] = np.where(pieces.fetched[mine], fetch,
                                   np.where(op >= 0, np.append(inside, overall)[row[op]], ahead))
        return found

    def _ratios(self, rank: int, ns: Float64) -> tuple[Float64, Float64, float, float]:
        """Time with the edit over time without: in each recorded operation and before it (and after the last one), of
        loading batches, and of all."""
        pieces, cycle, costs = self.scenario.slices, self.scenario.cycle, self.costs[rank]
        mine = (pieces.rank == self.ranks[rank]) & cycle.working[pieces.item]
        # Where nothing was recorded, nothing tells another ratio than that of all.
        overall = float(_ratio(np.zeros(mine.sum(), np.int64), pieces.ns[mine], ns[mine], 1, 1.0)[0])
        was, will = pieces.ns[costs.slice_row], ns[costs.slice_row]
        inside, before = (_ratio(costs.row[rows], was[rows], will[rows], len(costs) + 1, overall)
                          for rows in (costs.within, ~costs.within))
        rows = mine & pieces.fetched
        fetch = float(_ratio(np.zeros(rows.sum(), np.int64), pieces.ns[rows], ns[rows], 1, overall)[0])
        return inside[:-1], before, fetch, overall


def _ratio(place: Int64, was: Int64, will: Float64, size: int, otherwise: float) -> Float64:
    before, after = (np.bincount(place, weights=column, minlength=size) for column in (was, will))
    return np.where(before > 0, after / np.maximum(before, 1e-9), otherwise)
