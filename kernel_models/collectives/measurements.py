"""Measured times of collectives as columns, the types they are stored in, and the machine behind them.

Rows of different GPUs or clusters are never pooled. A row names its GPU as the driver or the table writes it, and its
system (a table's ``topology`` or ``cluster`` column). Rows that name neither are assumed to be of the user's
topology."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Annotated

import msgspec
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
from kernel_models.collectives.topology import Topology
from kernel_models.device import DeviceError, DeviceSpec, device, find_device, resolve_device
from tracer.arrays import Bool, Float64, Int64
from tracer.errors import listed
from tracer.guard import MOST_RANKS
from tracer.shape_only.devices import device_names

MOST_BYTES, LEAST_US, MOST_US = 1e18, 1e-6, 1e12
"""Limits of a plausible measurement: an exabyte, a picosecond, twelve days. A row beyond them is damaged."""

Setting = tuple[int, int, int, int, int, int]
"""Kind, dtype (index into ``DTYPES``), ranks, nodes, most and fewest ranks on a node: a call without its size."""


@dataclass(slots=True)
class CollectiveMeasurements:
    """n measured collectives. ``weight`` is the number of repeats behind each row."""

    batch: CollectiveBatch
    time_us: Float64
    weight: Float64
    backend: list[str] = field(default_factory=list)
    """Name of the backend of each row, such as "nccl" or "gloo"."""
    spread: float = 0.0
    """80% of medians over repeats lie within this log ratio of the truth; 0 without repeats."""
    device: list[str] = field(default_factory=list)
    """The GPU of each row as reported; "" where unknown."""
    system: list[str] = field(default_factory=list)
    """The cluster or node type of each row as a table names it; "" where unknown."""
    notes: list[str] = field(default_factory=list)
    """Notes of the readers, as sentences."""

    def __post_init__(self) -> None:
        self.device = self.device or [""] * len(self.time_us)
        self.system = self.system or [""] * len(self.time_us)

    def __len__(self) -> int:
        return len(self.time_us)

    def take(self, rows: Int64 | Bool) -> CollectiveMeasurements:
        """Return the measurements in the given rows (numbers or mask)."""
        picked = np.arange(len(self))[rows]
        return CollectiveMeasurements(self.batch.take(rows), self.time_us[rows], self.weight[rows],
                                      [self.backend[i] for i in picked], self.spread, [self.device[i] for i in picked],
                                      [self.system[i] for i in picked], self.notes)

    def backends(self) -> list[str]:
        """Return the names of the backends, sorted."""
        return sorted(set(self.backend))

    def of_backend(self, name: str) -> CollectiveMeasurements:
        """Return the rows of one backend."""
        return self.take(np.array([backend == name for backend in self.backend], np.bool_))

    def of_one_machine(self) -> CollectiveMeasurements:
        """Return all rows with the names of GPU and system removed, so that logs with and without names are pooled."""
        return replace(self, device=[], system=[])

    def aggregated(self) -> CollectiveMeasurements:
        """Return one row for each backend, machine, setting and size, with the median over repeats."""
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
        # Scatter of one repeat; a median of k repeats scatters about 1/sqrt(k) as much.
        repeats = float(np.median(out.weight))
        out.spread = float(np.quantile(ratios, 0.8)) / max(repeats, 1.0) ** 0.5 if ratios else self.spread
        return out

    def curves(self) -> dict[Setting, tuple[Float64, Float64]]:
        """Return ascending sizes and their times, µs, for each setting with sizes above zero. The rows must belong to
        one backend and be ``aggregated``."""
        first, setting = self.batch.settings()
        found: dict[Setting, tuple[Float64, Float64]] = {}
        for index, row in enumerate(first.tolist()):
            rows = np.flatnonzero((setting == index) & (self.batch.payload_bytes > 0))
            rows = rows[np.argsort(self.batch.payload_bytes[rows], kind="stable")]
            if len(rows):
                found[setting_of(self.batch, row)] = (self.batch.payload_bytes[rows], self.time_us[rows])
        return found


def setting_of(batch: CollectiveBatch, row: int) -> Setting:
    """Return the setting of a row: all of its columns but the size."""
    return (int(batch.kind[row]), int(batch.dtype[row]), int(batch.ranks[row]), int(batch.nodes[row]),
            int(batch.widest[row]), int(batch.narrowest[row]))


def join(parts: Iterable[CollectiveMeasurements]) -> CollectiveMeasurements:
    """Return the rows of several logs in one table."""
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


def check_measured(size: float, time_us: float) -> None:
    """Raise ``CommError`` if no collective of this many bytes can take this many µs."""
    if not (0 <= size <= MOST_BYTES and LEAST_US <= time_us <= MOST_US):
        raise CommError(f"A collective of {size:g} bytes that took {time_us:g} µs was measured wrongly: sizes are "
                        "from 0 to an exabyte, times above zero and no longer than days.")


def make_measurements(
        rows: Iterable[tuple[str | CollectiveKind, str, Placement, float, float]],
        backend: str = "nccl", device: str = "", system: str = "") -> CollectiveMeasurements:
    """Return the measurements of (collective, dtype, placement, payload bytes, µs) rows of one backend, GPU and system.

    Raises:
        CommError: A time or size is not finite, a time is not above zero or a size is below zero.
    """
    columns: list[tuple[int, ...]] = []
    sizes: list[float] = []
    times: list[float] = []
    for kind, dtype, placement, size, time_us in rows:
        check_measured(size, time_us)
        which = kind if isinstance(kind, CollectiveKind) else collective_kind(kind)
        columns.append((int(which), DTYPES.index(dtype_name(dtype)), placement.ranks, placement.nodes, placement.widest,
                        placement.narrowest))
        sizes.append(float(size))
        times.append(float(time_us))
    table = np.array(columns, np.int64).reshape(-1, 6)
    batch = CollectiveBatch(table[:, 0], np.array(sizes), *table[:, 1:].T)
    return CollectiveMeasurements(batch, np.array(times), np.ones(len(times)), [backend] * len(times),
                                  device=[device] * len(times), system=[system] * len(times))


Size = Annotated[float, msgspec.Meta(gt=0, le=MOST_BYTES)]
Bytes = Annotated[float, msgspec.Meta(ge=0, le=MOST_BYTES)]
Micros = Annotated[float, msgspec.Meta(ge=LEAST_US, le=MOST_US)]
Cost = Annotated[float, msgspec.Meta(ge=0, le=MOST_US)]
"""A latency, or a time per byte, µs; it may be 0."""
LogRatio = Annotated[float, msgspec.Meta(ge=-100, le=100)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Spread = Annotated[float, msgspec.Meta(ge=0, le=100)]
_Ranks = Annotated[int, msgspec.Meta(ge=1, le=MOST_RANKS)]
StoredSetting = tuple[int, str, _Ranks, _Ranks, _Ranks, _Ranks]
"""A ``Setting`` with the dtype's name."""


def stored_setting(stored: StoredSetting) -> Setting:
    """Return the setting of its stored form. Raises ``ValueError`` for an unknown collective or dtype."""
    kind, dtype, ranks, nodes, widest, narrowest = stored
    if dtype not in DTYPES:
        raise ValueError(f"{dtype[:40]!r} is no element type")
    if not nodes <= ranks or not narrowest <= widest <= ranks:
        raise ValueError("a group's ranks do not lie on its nodes")
    return int(CollectiveKind(kind)), DTYPES.index(dtype), ranks, nodes, widest, narrowest


MOST_NAMED = 6
"""Most names that a sentence lists."""
MOST_GPUS = 200
"""Names of GPUs in one table: each is compared with those of all known devices, which takes 10 ms."""


def same_gpu(name: str, on: Topology) -> bool:
    """Return whether a reported GPU may be the topology's: the same, with another memory size, or its short name."""
    wanted = find_device(on.node.device)
    found = _resolved(name)
    if found is not None and (found.name == wanted.name or set(found.short_names) == set(wanted.short_names)):
        return True
    return name.strip().lower() in {short.lower() for short in wanted.short_names}


def gpu_of_system(name: str) -> str:
    """Return the GPU in a system's name, such as "h100" of "h100_dgx"; "" if it has none."""
    for part in re.split(r"[\s_/]+", name.strip()):
        if part and part.lower() != "cpu" and _resolved(part) is not None:
            return part
    return ""


def of_cluster(rows: CollectiveMeasurements, on: Topology, device_name: str | None = None,
               system: str | None = None) -> tuple[CollectiveMeasurements, list[str]]:
    """Return the rows that were measured on the topology's GPU, and a note on rows left out.

    Args:
        rows: Measurements, possibly of several machines.
        on: The cluster to fit.
        device_name: Only rows of this GPU, as the table writes it or as ``resolve_device`` knows it.
        system: Only rows of this system, as the table writes it.

    Raises:
        CommError: No row is left, or the rows left are of several GPUs or systems.
    """
    total = len(rows)
    if not total:
        return rows, []
    kept = rows
    if system is not None:
        kept = _keep(kept, [_plain(name) == _plain(system) for name in kept.system],
                     f"No row is of system {system!r}; there are {_listed(kept.system)}.")
    if device_name is not None:
        kept = _keep(kept, [_alike(name, device_name) for name in kept.device],
                     f"No row is of device {device_name!r}; there are {_listed(kept.device)}.")
    gpus = [name or gpu_of_system(where) for name, where in zip(kept.device, kept.system, strict=True)]
    if (number := len(set(gpus))) > MOST_GPUS:
        raise CommError(f"The measurements are of {number:,} different GPUs, more than there are kinds of; give those "
                        "of one kind.")
    # A name that no device file has is accepted only where the user gives it as ``device_name``.
    fits = {name: not name or same_gpu(name, on) or (device_name is not None and _resolved(name) is None)
            for name in set(gpus)}
    keep = [fits[name] for name in gpus]
    kept = _keep(kept, keep, f"The measurements are of {_listed(gpus)}, and {on.node.name} has {on.node.device}; name "
                             "the topology they were measured on.")
    for what, option, names in (("device", "gpu-name", _devices(kept)),
                                ("system", "system", sorted(set(filter(None, kept.system))))):
        if len(names) > 1:
            raise CommError(f"The measurements are of several {what}s ({_listed(names)}); name one with --{option}.")
    if len(kept) == total:
        return kept, []
    left = _listed([name for name in {*rows.device, *rows.system} if name not in {*kept.device, *kept.system}])
    return kept, [f"{len(kept):,} of {total:,} measurements are of {on.node.name}; the others were left out ({left})."]


def _keep(rows: CollectiveMeasurements, keep: list[bool], refusal: str) -> CollectiveMeasurements:
    if not any(keep):
        raise CommError(refusal)
    return rows if all(keep) else rows.take(np.array(keep, np.bool_))


def _devices(rows: CollectiveMeasurements) -> list[str]:
    """Return one name for each distinct GPU of the rows."""
    found: dict[str, str] = {}
    for name in sorted(set(filter(None, rows.device))):
        spec = _resolved(name)
        found.setdefault(spec.name if spec else _plain(name), name)
    return list(found.values())


def _alike(name: str, wanted: str) -> bool:
    if not name or _plain(name) == _plain(wanted):
        return bool(name)
    a, b = _resolved(name), _resolved(wanted)
    return a is not None and b is not None and a.name == b.name


def _resolved(name: str) -> DeviceSpec | None:
    if not name.strip():
        return None
    try:
        return device(name) if name.strip().lower() in device_names() else resolve_device(name)
    except DeviceError:
        return None


def _plain(name: str) -> str:
    return " ".join(name.lower().split())


def _listed(names: list[str]) -> str:
    return listed(sorted(set(filter(None, names))), MOST_NAMED) or "rows that name none"


@dataclass(frozen=True, slots=True)
class Hints:
    """Facts that a log lacks: ``ranks`` in blocks of ``per_node`` (default: one node), kind, dtype, backend."""

    ranks: int | None = None
    per_node: int | None = None
    kind: CollectiveKind | None = None
    dtype: str = "float32"
    backend: str = "nccl"

    def placement(self) -> Placement:
        """Return the placement of ``ranks``. Raises ``CommError`` if ``ranks`` is not given."""
        if self.ranks is None:
            raise CommError("The number of ranks is not known; give --ranks.")
        return Placement.even(self.ranks, self.per_node or self.ranks)
