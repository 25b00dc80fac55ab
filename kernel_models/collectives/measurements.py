"""Measured times of collectives as columns, and their repeats made one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from kernel_models.collectives.call import (
    DTYPES,
    CollectiveBatch,
    CollectiveKind,
    CommError,
    Placement,
    collective_kind,
    dtype_name,
)
from tracer.arrays import Bool, Float64, Int64

MOST_BYTES, LEAST_US, MOST_US = 1e18, 1e-6, 1e12
"""Limits of a believable measurement: an exabyte, a picosecond, twelve days. A row beyond them is damaged."""

Setting = tuple[int, int, int, int, int, int]
"""Kind, dtype (row of ``DTYPES``), ranks, nodes, most and fewest ranks on a node: all of a call but its size."""


@dataclass(slots=True)
class CollectiveMeasurements:
    """n measured collectives; ``weight`` is how many repeats a row stands for, ``spread`` the scatter of medians."""

    batch: CollectiveBatch
    time_us: Float64
    weight: Float64
    backend: list[str] = field(default_factory=list)
    """One name for each row, such as "nccl" or "gloo"."""
    spread: float = 0.0
    """80% of medians over repeats lie within this log ratio of the truth; 0 where nothing was repeated."""
    device: list[str] = field(default_factory=list)
    """The GPU of each row as it was reported; empty where nothing says it."""
    system: list[str] = field(default_factory=list)
    """The cluster or node type of each row as a table names it; empty where nothing says it."""
    notes: list[str] = field(default_factory=list)
    """Notes of the readers."""

    def __post_init__(self) -> None:
        self.device = self.device or [""] * len(self.time_us)
        self.system = self.system or [""] * len(self.time_us)

    def __len__(self) -> int:
        return len(self.time_us)

    def take(self, rows: Int64 | Bool) -> CollectiveMeasurements:
        """The given rows."""
        picked = np.arange(len(self))[rows]
        return CollectiveMeasurements(self.batch.take(rows), self.time_us[rows], self.weight[rows],
                                      [self.backend[i] for i in picked], self.spread, [self.device[i] for i in picked],
                                      [self.system[i] for i in picked], self.notes)

    def backends(self) -> list[str]:
        """Names of the backends, sorted."""
        return sorted(set(self.backend))

    def of_backend(self, name: str) -> CollectiveMeasurements:
        """The rows of one backend."""
        return self.take(np.array([backend == name for backend in self.backend], np.bool_))

    def of_one_machine(self) -> CollectiveMeasurements:
        """The same rows as of one machine: a log that names its GPU and one that does not repeat each other."""
        return replace(self, device=[], system=[])

    def aggregated(self) -> CollectiveMeasurements:
        """One row for each backend, machine, setting and size: the median over repeats."""
        origins = list(zip(self.backend, self.device, self.system, strict=True))
        code = {origin: i for i, origin in enumerate(sorted(set(origins)))}
        _, setting = self.batch.settings()
        key = np.stack([setting, np.array([code[origin] for origin in origins], np.int64)], axis=1)
        if not len(self):
            return self
        rows = np.lexsort((self.time_us, self.batch.payload_bytes, key[:, 1], key[:, 0]))
        size = self.batch.payload_bytes[rows]
        new = np.ones(len(rows), np.bool_)
        new[1:] = (key[rows][1:] != key[rows][:-1]).any(axis=1) | (size[1:] != size[:-1])
        starts = np.append(np.flatnonzero(new), len(rows))
        medians, weights, ratios = [], [], []
        for low, high in pairwise(starts.tolist()):
            times = self.time_us[rows[low:high]]
            medians.append(float(np.median(times)))
            weights.append(float(self.weight[rows[low:high]].sum()))
            if high - low > 1:
                ratios.extend(np.abs(np.log(times / medians[-1])).tolist())
        kept = rows[starts[:-1]]
        out = self.take(kept)
        out.time_us, out.weight = np.array(medians), np.array(weights)
        # Of one repeat; a median of k repeats scatters about 1/sqrt(k) as much.
        repeats = float(np.median(out.weight))
        out.spread = float(np.quantile(ratios, 0.8)) / max(repeats, 1.0) ** 0.5 if ratios else self.spread
        return out

    def curves(self) -> dict[Setting, tuple[Float64, Float64]]:
        """Sizes ascending and µs of each setting with sizes above zero; call it on ``aggregated`` rows of one
        backend."""
        first, setting = self.batch.settings()
        found: dict[Setting, tuple[Float64, Float64]] = {}
        for index, row in enumerate(first.tolist()):
            rows = np.flatnonzero((setting == index) & (self.batch.payload_bytes > 0))
            rows = rows[np.argsort(self.batch.payload_bytes[rows], kind="stable")]
            if len(rows):
                found[setting_of(self.batch, row)] = (self.batch.payload_bytes[rows], self.time_us[rows])
        return found


def setting_of(batch: CollectiveBatch, row: int) -> Setting:
    """All of a row but its size."""
    return (int(batch.kind[row]), int(batch.dtype[row]), int(batch.ranks[row]), int(batch.nodes[row]),
            int(batch.widest[row]), int(batch.narrowest[row]))


def join(parts: Iterable[CollectiveMeasurements]) -> CollectiveMeasurements:
    """Rows of several logs."""
    kept = [part for part in parts if len(part)]
    if not kept:
        return make_measurements([])
    names = ("kind", "payload_bytes", "dtype", "ranks", "nodes", "widest", "narrowest")
    batch = CollectiveBatch(*(np.concatenate([getattr(p.batch, name) for p in kept]) for name in names))
    return CollectiveMeasurements(
        batch,
        np.concatenate([p.time_us for p in kept]),
        np.concatenate([p.weight for p in kept]),
        [name for p in kept for name in p.backend],
        max(p.spread for p in kept),
        [name for p in kept for name in p.device],
        [name for p in kept for name in p.system],
        list(dict.fromkeys(note for p in kept for note in p.notes)),
    )


def make_measurements(
        rows: Iterable[tuple[str | CollectiveKind, str, Placement, float, float]],
        backend: str = "nccl", device: str = "", system: str = "") -> CollectiveMeasurements:
    """Measurements of (collective, dtype, placement, payload bytes, µs) rows of one backend, GPU and system.

    Raises:
        CommError: A time or size is not finite, a time is not above zero or a size is below zero.
    """
    columns: list[tuple[int, ...]] = []
    sizes: list[float] = []
    times: list[float] = []
    for kind, dtype, placement, size, time_us in rows:
        if not (0 <= size <= MOST_BYTES and LEAST_US <= time_us <= MOST_US):
            raise CommError(f"A collective of {size:g} bytes that took {time_us:g} µs was measured wrongly: sizes are "
                            "from 0 to an exabyte, times above zero and no longer than days.")
        which = kind if isinstance(kind, CollectiveKind) else collective_kind(kind)
        columns.append((int(which), DTYPES.index(dtype_name(dtype)), placement.ranks, placement.nodes, placement.widest,
                        placement.narrowest))
        sizes.append(float(size))
        times.append(float(time_us))
    table = np.array(columns, np.int64).reshape(-1, 6)
    batch = CollectiveBatch(table[:, 0], np.array(sizes), *table[:, 1:].T)
    return CollectiveMeasurements(batch, np.array(times), np.ones(len(times)), [backend] * len(times),
                                  device=[device] * len(times), system=[system] * len(times))
