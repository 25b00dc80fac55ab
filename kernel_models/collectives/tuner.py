"""Choice of the best backend, or the best of NCCL's algorithms, for each operation, size and group.

A backend wins a size when it is faster than the default by more than ``MARGIN``. Smaller differences are within the
scatter of measurements: they are ties, and the default wins ties.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from kernel_models.collectives.call import CollectiveBatch, CollectiveKind, CommError, CommTimes, Level, Placement
from kernel_models.collectives.datasheet import Algorithm, Line, RankGroup, nccl_lines
from kernel_models.collectives.profile import CommProfile
from kernel_models.collectives.topology import Topology

Predict = Callable[[CollectiveBatch], CommTimes]

MARGIN = 0.05
"""Least relative gain that counts: repeats of one measurement differ by 2% (median) to 10% (p90)."""
FINENESS = 8
"""Sizes per doubling in the search for a crossover. Set: finer than measured tables, whose sizes double."""
CSV_HEADER = "collective_type,min_bytes,max_bytes,algorithm,protocol,channels,nNodes,nRanks,numPipeOps,regBuff"
CSV_NAMES = {CollectiveKind.ALL_REDUCE: "allreduce", CollectiveKind.ALL_GATHER: "allgather",
             CollectiveKind.REDUCE_SCATTER: "reducescatter", CollectiveKind.BROADCAST: "broadcast",
             CollectiveKind.REDUCE: "reduce"}
CSV_MOST = 2**32 - 1
"""The plugin's value for "every larger size"."""


@dataclass(frozen=True, slots=True)
class TunedChoice:
    """One operation at one size: times (µs) by backend, NaN where a backend was not measured, and the winner."""

    kind: CollectiveKind
    placement: Placement
    payload_bytes: float
    time_us: Mapping[str, float]
    winner: str

    def gain(self, default: str) -> float:
        """Return the default's time over the winner's, minus one."""
        return self.time_us[default] / self.time_us[self.winner] - 1.0

    def to_json(self) -> dict[str, Any]:
        """Return the choice as plain JSON values."""
        return {"collective": self.kind.label, "ranks": self.placement.ranks, "per_node": list(self.placement.per_node),
                "payload_bytes": self.payload_bytes, "time_us": dict(self.time_us), "winner": self.winner}


@dataclass(frozen=True, slots=True)
class Crossover:
    """A size, ``payload_bytes``, above which the backend ``after`` wins instead of ``before``."""

    kind: CollectiveKind
    placement: Placement
    payload_bytes: float
    before: str
    after: str

    def to_json(self) -> dict[str, Any]:
        """Return the crossover as plain JSON values."""
        return {"collective": self.kind.label, "ranks": self.placement.ranks, "per_node": list(self.placement.per_node),
                "payload_bytes": self.payload_bytes, "before": self.before, "after": self.after}


def backends_of(profiles: Sequence[CommProfile]) -> dict[str, Predict]:
    """Return a predictor for each measured backend of the profiles; equal names of backends are numbered."""
    found: dict[str, Predict] = {}
    for profile in profiles:
        for name in profile.backend_names():
            unique = name if name not in found else f"{name}#{sum(n.split('#')[0] == name for n in found) + 1}"

            def predict(batch: CollectiveBatch, profile: CommProfile = profile, name: str = name) -> CommTimes:
                return _only_measured(profile.predict(batch, name))

            found[unique] = predict
    if not found:
        raise CommError("None of the profiles has a measured backend; fit measurements with 'foretrace comm fit'.")
    return found


def _only_measured(times: CommTimes) -> CommTimes:
    """Return times with NaN for those of formulas: backends are compared by measurements only."""
    times.time_us = np.where(times.level >= int(Level.FITTED), np.nan, times.time_us)
    return times


def measured_groups(profiles: Sequence[CommProfile]) -> list[tuple[CollectiveKind, Placement, float, float]]:
    """Return (kind, placement, least, largest size) of groups that several backends (or the only one) measured."""
    ranges: dict[tuple[int, int, int, int, int], dict[tuple[int, str], tuple[float, float]]] = {}
    for number, profile in enumerate(profiles):
        for name, models in profile.backends.items():
            for key, curve in models.measured.curves.items():
                group = (key[0], *key[2:])
                low, high = float(curve.size[0]), float(curve.size[-1])
                before = ranges.setdefault(group, {}).get((number, name), (low, high))
                ranges[group][number, name] = (min(low, before[0]), max(high, before[1]))
    several = max((len(found) for found in ranges.values()), default=0) > 1
    groups = []
    for (kind, ranks, nodes, widest, narrowest), found in sorted(ranges.items()):
        if several and len(found) < 2:
            continue
        low, high = max(r[0] for r in found.values()), min(r[1] for r in found.values())
        if low <= high and ranks > 1:
            # A placement's node count and extremes are known; its other nodes are filled evenly.
            middle = ranks - widest - narrowest
            per_node = ((ranks,) if nodes == 1 else (widest, narrowest) if nodes == 2 else
                        (widest, *(_spread(middle, nodes - 2)), narrowest))
            groups.append((CollectiveKind(kind), Placement(per_node), low, high))
    return groups


def _spread(ranks: int, nodes: int) -> list[int]:
    return [ranks // nodes + (1 if i < ranks % nodes else 0) for i in range(nodes)]


def choose(backends: Mapping[str, Predict], kind: CollectiveKind, placement: Placement, sizes: npt.ArrayLike,
           *, dtype: str = "float16", default: str | None = None, margin: float = MARGIN) -> list[TunedChoice]:
    """Return the best backend at each size, with the times of all.

    Args:
        backends: Predictors by name of the backend.
        kind: The operation.
        placement: The group.
        sizes: Payload bytes, ascending.
        dtype: Type of the elements.
        default: Backend that wins unless another gains more than ``margin``; by default "nccl", else the first.
        margin: Relative gain above which another backend wins.
    """
    names = list(backends)
    default = default or next((n for n in names if n.startswith("nccl")), names[0])
    if default not in backends:
        raise CommError(f"There is no backend {default!r} among {', '.join(names)}.")
    payload = np.atleast_1d(np.asarray(sizes, np.float64))
    times = {name: backends[name](CollectiveBatch.of(kind, payload, placement, dtype)).time_us for name in names}
    found: list[TunedChoice] = []
    for i, size in enumerate(payload.tolist()):
        row = {name: float(times[name][i]) for name in names}
        known = {name: value for name, value in row.items() if np.isfinite(value)}
        if not known:
            continue
        best = min(known, key=lambda name: known[name])
        # The default wins ties, else the winner of the size before.
        stays = (default, found[-1].winner if found else default)
        best = next((name for name in stays if name in known and known[name] <= known[best] * (1 + margin)), best)
        found.append(TunedChoice(kind, placement, size, row, best))
    return found


def crossovers(backends: Mapping[str, Predict], kind: CollectiveKind, placement: Placement, smallest: float,
               largest: float, *, default: str | None = None, margin: float = MARGIN) -> list[Crossover]:
    """Return the sizes at which the winner changes, accurate to an eighth of a doubling."""
    steps = max(int(np.ceil(np.log2(largest / smallest) * FINENESS)), 1)
    sizes = np.geomspace(smallest, largest, steps + 1)
    choices = choose(backends, kind, placement, sizes, default=default, margin=margin)
    return [Crossover(kind, placement, after.payload_bytes, before.winner, after.winner)
            for before, after in pairwise(choices) if before.winner != after.winner]


def algorithm_rows(on: Topology, kind: CollectiveKind, placement: Placement, smallest: float,
                   largest: float) -> list[tuple[float, float, Line]]:
    """Return (first byte, last byte, line) of NCCL's best algorithm and protocol by size, by formula."""
    group = RankGroup(placement.ranks, placement.nodes, placement.widest, placement.narrowest)
    ways = [line for line in nccl_lines(on, kind, group) if line.algorithm is not Algorithm.DIRECT]
    if not ways or placement.ranks < 2:
        return []
    points = {smallest}
    for i, a in enumerate(ways):
        for b in ways[i + 1:]:
            if a.us_per_byte != b.us_per_byte:
                at = (b.latency_us - a.latency_us) / (a.us_per_byte - b.us_per_byte)
                if smallest < at < largest:
                    points.add(at)
    edges = sorted(points)
    rows: list[tuple[float, float, Line]] = []
    for low, high in zip(edges, [*edges[1:], largest], strict=True):
        middle = 0.5 * (low + high)
        best = min(ways, key=lambda way: way.latency_us + way.us_per_byte * middle)
        if rows and rows[-1][2] == best:
            rows[-1] = (rows[-1][0], high, best)
        else:
            rows.append((low, high, best))
    return rows


def nccl_tuner_csv(on: Topology, groups: Sequence[tuple[CollectiveKind, Placement]]) -> str:
    """Return the file of NCCL's example tuner plugin (``NCCL_TUNER_CONFIG_FILE``): the best algorithm by size.

    Formulas choose the algorithm for that topology; kinds that the plugin does not know (all-to-all, send and receive)
    are left out.
    """
    lines = [CSV_HEADER]
    for kind, placement in groups:
        if kind not in CSV_NAMES:
            continue
        rows = algorithm_rows(on, kind, placement, 0.0, float(CSV_MOST))
        start = 0
        for _, high, line in rows:
            stop = CSV_MOST if high >= CSV_MOST else int(high)
            lines.append(f"{CSV_NAMES[kind]},{start},{stop},{line.algorithm.name.lower()},{line.protocol.name.lower()},-1,"
                         f"{placement.nodes},{placement.ranks},-1,-1")
            start = stop + 1
    return "\n".join(lines) + "\n"
