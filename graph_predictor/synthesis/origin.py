"""The recorded job whose times a step traced by shapes has taken: ``StandIn``.

What an edit makes of the recorded host it makes of the traced one too, operation by operation:

    recorded   addmm  100 µs → 50 µs with the edit             (×0.5)
    traced     addmm  180 µs (anchored) → 90 µs                (×0.5, by the recorded operation that stands for it)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from graph_predictor.prediction.scenario import Scenario
from graph_predictor.simulation.host_pieces import HostPieces
from graph_predictor.synthesis.retraced_slots import slot_places
from tracer.arrays import Float64, Int64
from tracer.graph import NONE


@dataclass(frozen=True, slots=True)
class StandIn:
    """A recorded job and which of its operations stand for those of a traced one.

    Attributes:
        scenario: the recorded job, without edits.
        ranks: of each traced rank the recorded one.
        names: of each traced rank the names by which slots are found.
        slot: of each traced rank the slot that stands for each row of its ``ops``; -1 for none.
    """

    scenario: Scenario
    ranks: list[int]
    names: list[frozenset[str]]
    slot: list[Int64]

    def host_factors(self, pieces: HostPieces, ns: Float64) -> Float64:
        """Factor on each piece of the traced job's host time.

        Args:
            pieces: of the traced job.
            ns: times of the recorded job's pieces as an edit makes them.
        """
        found: Float64 = np.ones(len(pieces))
        for rank in range(len(self.slot)):
            mine = pieces.of_rank(rank)
            inside, before, tail, overall = self._ratios(rank, ns)
            slot = np.append(self.slot[rank], NONE)
            op, following = pieces.op[mine], pieces.following[mine]
            in_gap = np.where(following >= 0, np.append(before, overall)[slot[following]], tail)
            found[mine] = np.where(op >= 0, np.append(inside, overall)[slot[op]], in_gap)
        return found

    def _ratios(self, rank: int, ns: Float64) -> tuple[Float64, Float64, float, float]:
        """Time with the edit over time without: in each slot and before it, after the last one, and of all."""
        pieces, cycle, recorded = self.scenario.pieces, self.scenario.cycle, self.ranks[rank]
        rows = np.flatnonzero((pieces.rank == recorded) & cycle.working[pieces.item])
        was, will = pieces.ns[rows].astype(np.float64), ns[rows]
        overall = float(will.sum() / was.sum()) if was.sum() > 0 else 1.0
        inner, later, slots = slot_places(self.scenario, recorded, self.names[rank])
        op, following = np.append(inner, NONE)[pieces.op[rows]], np.append(later, NONE)
        in_slot = op >= 0
        place = np.where(pieces.op[rows] >= 0, following[pieces.op[rows]], following[pieces.following[rows]])
        # Where nothing was recorded, nothing tells another ratio than that of all.
        inside = _ratio(op[in_slot], was[in_slot], will[in_slot], slots, overall)
        gap = np.where(place >= 0, place, slots)[~in_slot]
        between = _ratio(gap, was[~in_slot], will[~in_slot], slots + 1, overall)
        return inside, between[:slots], float(between[slots]), overall


def _ratio(place: Int64, was: Float64, will: Float64, size: int, otherwise: float) -> Float64:
    before, after = (np.bincount(place, weights=column, minlength=size)[:size] for column in (was, will))
    return np.where(before > 0, after / np.maximum(before, 1e-9), otherwise)


__all__ = ["StandIn"]
