"""``Mixture``: a step's collectives, each by the backend that is best for it, against one backend for all of them.

Times are sums over the collectives, one after another. A prediction of the step states how much of them it waits for.
The interval of a gain assumes that one backend's errors are equal at neighbouring sizes, and that errors of different
rows of the table are independent. Two formulas of one cluster share half of their variance.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from graph_predictor.comm.recorded_calls import find_collectives
from graph_predictor.comm.traffic import bytes_text
from graph_predictor.simulation.build import Built
from kernel_models.collectives import (
    CollectiveBatch,
    CollectiveCall,
    CollectiveKind,
    CollectiveModel,
    CommTimes,
    Level,
)
from kernel_models.collectives.datasheet import COMMUNICATOR_BYTES
from kernel_models.collectives.price import PINNED, BackendChoices
from kernel_models.spreads import COLLECTIVES_SHARED
from tracer.arrays import Bool, Float64


@dataclass(frozen=True, slots=True)
class MixedRow:
    """Collectives of one kind and group in a rank's step for which the same backend is best.

    Attributes:
        kind, ranks, nodes: kind of the collectives, and size of their group.
        smallest_bytes, largest_bytes: range of their payloads.
        backend: the best backend for them.
        calls: number of collectives a step.
        time_us: their time a step by ``backend``, switches between backends included.
        single_us: their time a step by the best single backend.
        low_us, high_us: ends of the 80% interval of the time gained a step.
    """

    kind: CollectiveKind
    ranks: int
    nodes: int
    smallest_bytes: float
    largest_bytes: float
    backend: str
    calls: float
    time_us: float
    single_us: float
    low_us: float
    high_us: float

    @property
    def gain_us(self) -> float:
        """Return the time gained over the best single backend, µs a step."""
        return self.single_us - self.time_us


@dataclass(frozen=True)
class Mixture:
    """The collectives of a rank's step.

    Attributes:
        rows: the collectives by kind, group and backend.
        singles_us: time of all collectives by each backend that can do all of them, by name.
        pinned_us: time of all collectives by NCCL's algorithms and protocols, one for all sizes of a kind and group
            (the best one), if the backends are these; else ``None``.
        base: the backend that does every collective that no other backend does faster.
        switched: number of calls by another backend than the base.
        switch_us: additional time of each such call, included in ``time_us``.
        memory_bytes: memory of a rank that other backends than the base need.
        unsure: share of the calls whose best and second-best backend differ by less than the times' uncertainty.
    """

    rows: tuple[MixedRow, ...]
    singles_us: Mapping[str, float]
    pinned_us: float | None
    base: str
    switched: float
    switch_us: float
    memory_bytes: float
    unsure: float

    @property
    def time_us(self) -> float:
        """Return the time of all collectives, one after another, µs a step."""
        return sum(row.time_us for row in self.rows)

    @property
    def best_single(self) -> str:
        """Return the single backend that does all collectives fastest."""
        return min(self.singles_us, key=lambda name: self.singles_us[name])

    @property
    def gain_us(self) -> tuple[float, float, float]:
        """Return the time gained over the best single backend, and its 80% interval, µs a step."""
        gain = sum(row.gain_us for row in self.rows)
        down, up = (float(np.sqrt(sum(end(row) ** 2 for row in self.rows))) for end in (
            lambda row: row.gain_us - row.low_us, lambda row: row.high_us - row.gain_us))
        return gain, gain - down, gain + up

    def step_gain(self, step_us: float, single_us: float) -> tuple[float, float, float]:
        """Return the µs that a step saves over a step with the best single backend, and both ends of the 80% interval.
        A step saves a share of the collectives' gain; the interval is the collectives' interval times this share."""
        gain, (whole, low, high) = single_us - step_us, self.gain_us
        share = gain / whole if whole else 0.0
        low, high = sorted((share * low, share * high))
        return gain, low, high

    def headline(self) -> str:
        """Return the gain in one sentence."""
        gain, low, high = self.gain_us
        single = self.singles_us[self.best_single]
        if not self.rows:
            return "The step has no collectives whose kind and size are known."
        if gain == 0.0:
            return (f"A rank's collectives take {single:,.1f} µs a step one after another, all by {self.base}: no "
                    "other backend gains more than the switch to it costs.")
        return (f"A rank's collectives take {self.time_us:,.1f} µs a step one after another, {single:,.1f} µs by "
                f"{self.best_single} alone: {gain:,.1f} µs less, 80% between {low:,.1f} and {high:,.1f} µs.")

    def notes(self) -> list[str]:
        """Return sentences on the cost of mixing backends, and the uncertainty of its gain."""
        found = []
        if self.switched:
            found.append(
                f"Of a rank's collectives {self.switched:,.4g} a step are done by another backend than {self.base}; "
                f"each is taken to cost {self.switch_us:g} µs more, for an event recorded and waited for on the way "
                "there and back (medians of PyTorch on H100; none are needed on one stream or between two of one "
                "backend).")
            found.append(f"Other backends' buffers are taken to need up to {self.memory_bytes / 1e9:.2g} GB of a rank: "
                         f"{COMMUNICATOR_BYTES / 1e9:g} GB for a communicator of NCCL, the largest payload times the "
                         "ranks for others.")
            if self.unsure:
                found.append(f"Of {self.unsure:.0%} of a rank's collectives the backend leads the next by less than "
                             "their times are known to.")
        if self.rows and self.pinned_us is not None:
            found.append(f"{self.base} chooses among its algorithms and protocols by size itself: with the best one "
                         f"for each kind and group it would take {self.pinned_us:,.1f} µs.")
        if len(self.singles_us) > 1:
            found.append("By one backend alone: " + ", ".join(
                f"{name} {us:,.1f} µs" for name, us in self.singles_us.items()) + ".")
        if self.rows and self.gain_us[0] < 0:
            found.append(f"{self.best_single} alone is faster than the mixture, whose other calls are "
                         f"{self.base}'s: name it with --comm-backend.")
        return found

    def sentences(self) -> list[str]:
        """Return headline, choices by backend and notes as sentences, for reports without a table."""
        does = "; ".join(f"{row.backend} {row.calls:,.4g} {row.kind.label} of {_sizes(row)} over {row.ranks:,} ranks"
                         for row in self.rows)
        return [self.headline(), *([f"A step's collectives by backend: {does}."] if self.rows else []), *self.notes()]

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        gain, low, high = self.gain_us
        return {
            "base": self.base, "best_single": self.best_single, "time_us": self.time_us,
            "singles_us": dict(self.singles_us), "pinned_us": self.pinned_us,
            "gain_us": gain, "gain_interval_us": [low, high],
            "switched_calls": self.switched, "switch_us": self.switch_us, "memory_bytes": self.memory_bytes,
            "unsure_share": self.unsure,
            "choices": [{
                "collective": row.kind.label, "ranks": row.ranks, "nodes": row.nodes,
                "payload_bytes": [row.smallest_bytes, row.largest_bytes], "backend": row.backend, "calls": row.calls,
                "time_us": row.time_us, "best_single_us": row.single_us, "gain_us": row.gain_us,
                "gain_interval_us": [row.low_us, row.high_us]} for row in self.rows],
            "notes": self.notes()}

    def table(self) -> list[list[str]]:
        """Return the cells of a report: backend and times of each row."""
        return [[row.kind.label, f"{row.ranks:,}", _sizes(row), row.backend, f"{row.calls:,.4g}", f"{row.time_us:,.1f}",
                 f"{row.single_us:,.1f}", f"{row.gain_us:,.1f}", f"{row.low_us:,.1f} – {row.high_us:,.1f}"]
                for row in self.rows]


def mixture(calls: Sequence[CollectiveCall], counts: Sequence[float], on: CollectiveModel) -> Mixture:
    """Return the best backends for the collectives of a rank's step. ``counts`` states how often a rank does each of
    ``calls`` in a step."""
    backends, many = on.backends, np.asarray(counts, np.float64)
    choices = backends.choose(CollectiveBatch.from_calls(calls), many)
    singles = {name: float(many @ times.time_us) for name, times in zip(choices.names, choices.by_name, strict=True)
               if name == choices.names[0] or (name not in PINNED and (times.level != int(Level.UNKNOWN)).all())}
    single = choices.by_name[choices.names.index(min(singles, key=lambda name: singles[name]))]
    grouped: dict[tuple[CollectiveKind, int, int, str], list[int]] = defaultdict(list)
    for i, call in enumerate(calls):
        grouped[call.kind, call.ranks, call.placement.nodes, choices.label(i)].append(i)
    rows = [_row(key, [calls[i].payload_bytes for i in at], many[at], choices, single, at)
            for key, at in grouped.items()]
    switched = choices.winner > 0
    return Mixture(tuple(sorted(rows, key=lambda row: (row.kind, row.ranks, row.nodes, row.smallest_bytes))), singles,
                   _pinned(calls, many, choices), choices.names[0], float(many[switched].sum()), backends.switch_us,
                   _memory(calls, choices), float(many @ ~choices.sure / many.sum()) if many.sum() else 0.0)


def mixture_of_step(built: Built, of_step: Bool, steps: int, on: CollectiveModel) -> Mixture:
    """Return the best backends for the collectives of a recorded or traced step, as a mean over its ranks. ``of_step``
    is a mask of the program's kernels in the steps; ``steps`` is the number of steps."""
    found, _ = find_collectives(built, on.topology)
    pointer, share = built.program.kernel_ptr, 1.0 / (steps * max(len(built.graphs), 1))
    counts: dict[CollectiveCall, float] = defaultdict(float)
    for each in found:
        counts[each.call] += share * sum(bool(of_step[int(pointer[rank]) + kernel]) for rank, kernel in each.members)
    kept = {call: count for call, count in counts.items() if count > 0}
    return mixture(list(kept), list(kept.values()), on)


def _row(key: tuple[CollectiveKind, int, int, str], sizes: Sequence[float], many: Float64, choices: BackendChoices,
         single: CommTimes, at: Sequence[int]) -> MixedRow:
    mine, other = choices.times.take(np.array(at)), single.take(np.array(at))
    gain = float(many @ (other.time_us - mine.time_us))
    same = np.isclose(mine.time_us, other.time_us, rtol=1e-12)
    alike = (mine.level == int(Level.DATASHEET)) & (other.level == int(Level.DATASHEET))
    share = np.where(same, 0.0, np.where(alike, np.sqrt(1 - COLLECTIVES_SHARED), 1.0)) * many
    down = np.hypot(share @ (other.time_us - other.low_us), share @ (mine.high_us - mine.time_us))
    up = np.hypot(share @ (other.high_us - other.time_us), share @ (mine.time_us - mine.low_us))
    return MixedRow(*key[:3], min(sizes), max(sizes), key[3], float(many.sum()), float(many @ mine.time_us),
                    float(many @ other.time_us), gain - float(down), gain + float(up))


def _pinned(calls: Sequence[CollectiveCall], many: Float64, choices: BackendChoices) -> float | None:
    """Return the time of calls if each kind and group uses one algorithm and protocol for all its sizes, µs."""
    pinned = np.array([name in PINNED for name in choices.names])
    if not pinned.any() or not len(calls):
        return None
    groups: dict[object, list[int]] = defaultdict(list)
    for i, call in enumerate(calls):
        groups[call.kind, call.placement].append(i)
    table = choices.table_us[pinned]
    return sum(float(np.nanmin(table[:, at] @ many[at])) for at in groups.values())


def _memory(calls: Sequence[CollectiveCall], choices: BackendChoices) -> float:
    """Return the bytes that a rank needs for buffers of backends other than the base."""
    needed: dict[tuple[int, object], float] = defaultdict(float)
    for call, winner in zip(calls, choices.winner.tolist(), strict=True):
        if winner:
            own = COMMUNICATOR_BYTES if choices.of_nccl(winner) else call.payload_bytes * call.ranks
            needed[winner, call.placement] = max(needed[winner, call.placement], own)
    return sum(needed.values())


def _sizes(row: MixedRow) -> str:
    low, high = bytes_text(row.smallest_bytes), bytes_text(row.largest_bytes)
    return low if low == high else f"{low} – {high}"
