"""Efficiencies: the share of the published rates that kernels of a family reach, by family, dtype and kind.

The defaults (``efficiencies.toml``, written by benchmarks/default_efficiencies.py from measured tables of several
devices, and ``efficiencies_host.toml`` from a CPU's calibration) price a device that was never calibrated;
``fit_efficiencies`` fits them to one device's measurements.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kernel_models.device import DeviceSpec
from kernel_models.heuristics.work import CallTable, KernelWork, overlapped, work
from kernel_models.op_call import PRODUCTS, Family, OpCall
from tracer.arrays import Float64

DEFAULTS_FILE = Path(__file__).with_name("efficiencies.toml")
HOST_DEFAULTS_FILE = Path(__file__).with_name("efficiencies_host.toml")
FEW = 3
"""Distinct calls that a key needs for its own fit; with fewer the next wider key is used. Set: the median of three is
not an extreme."""
ENOUGH = 20
"""Number of calls of a family below which a set counts less among several sets. Set."""
PRIOR_WEIGHT = 0.03
"""Pull towards the wider key, in mean absolute log error for each e-fold of change, times FEW over the calls. Set."""
_FACTORS = np.exp(np.linspace(-0.4, 0.4, 17))
_SWEEPS = 12  # chosen: the search ends by itself when a sweep changes nothing
_BOUNDS = {"compute": (0.005, 2.5), "memory": (0.01, 3.0), "fixed": (0.25, 12.0)}
"""Limits of the fitted values, wider than all defaults (``efficiencies.toml``)."""
_HOST_BOUNDS = _BOUNDS | {"fixed": (0.25, 200.0)}
"""Limits on a CPU: an operation allocates, gets a library's kernel and orders its operands before it computes."""
TELLING = 0.35
"""Least share of a call's time due to a parameter for the call to determine it; fitting needs ``FEW`` such calls."""
_LEVELS = 6
"""Number of keys of the longest chain."""
INTERVAL = (0.1, 0.9)
"""Quantiles of the 80% interval."""
NARROWEST = 0.05
"""Least half width of an interval, log: the scatter of one kernel between runs and library versions."""


@dataclass(frozen=True, slots=True)
class Efficiency:
    """The efficiency of calls of one key: t = fixed·floor·kernels + overlap(compute time/compute, memory time/memory).

    Attributes:
        compute, memory: Shares of the published rates that are reached.
        fixed: Fixed cost of every kernel, as a multiple of the device's kernel floor.
        low, high: Natural logarithms of the 80% interval's ends over the median time.
        source: Source of the measurements that it was fitted to.
    """

    compute: float
    memory: float
    fixed: float
    low: float
    high: float
    source: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the efficiency as plain values, rounded for storing."""
        return {name: round(getattr(self, name), 4) for name in ("compute", "memory", "fixed", "low", "high")} | {
            "source": self.source}


@dataclass(frozen=True)
class Efficiencies:
    """Efficiencies by key, such as "gemm/bf16/mm", "norm//layer_norm" (any dtype), "gemm", "*" (see ``keys``).

    Attributes:
        entries: By key.
        fitted: Whether they were fitted to measurements of the device whose calls they price.
        least: By family, the least log half width of an interval: the scatter between devices (empty for fitted ones).
    """

    entries: Mapping[str, Efficiency]
    fitted: bool = False
    least: Mapping[str, float] = field(default_factory=dict)

    def of(self, family: Family, dtype: str, kind: str) -> Efficiency:
        """Return the entry of the most specific existing key."""
        for key in keys(family, dtype, kind):
            if key in self.entries:
                return self.entries[key]
        return self.entries["*"]

    def columns(
        self, table: CallTable, computed: Callable[[str], str] = str,
    ) -> tuple[Float64, Float64, Float64, Float64, Float64]:
        """Return compute, memory, fixed, low and high of each call [n]; ``computed``: type that products run in."""
        found = [self.of(table.family, computed(dtype), kind) for kind, dtype in table.groups]
        least = self.least.get(table.family.value, 0.0)
        values = np.array([[e.compute, e.memory, e.fixed, min(e.low, -least), max(e.high, least)] for e in found]
                          ).reshape(-1, 5)
        taken = values[table.group]
        return taken[:, 0], taken[:, 1], taken[:, 2], taken[:, 3], taken[:, 4]

    def families(self) -> set[str]:
        """Return the families that have an entry of their own."""
        return {key.split("/")[0] for key in self.entries} - {"*"}

    def state(self) -> dict[str, Any]:
        """Return plain JSON values (see ``from_state``)."""
        least = {"least": dict(self.least)} if self.least else {}
        entries = {key: entry.as_dict() for key, entry in self.entries.items()}
        return {"fitted": self.fitted, **least, "entries": entries}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Efficiencies:
        """Return the efficiencies that ``state`` stored.

        Raises:
            KeyError, TypeError, ValueError: the state is not of this form.
        """
        entries = {str(key): Efficiency(**{name: float(entry[name]) for name in
                                           ("compute", "memory", "fixed", "low", "high")},
                                        source=str(entry.get("source", "")))
                   for key, entry in state["entries"].items()}
        for key, entry in entries.items():
            if not (entry.compute > 0 and entry.memory > 0 and entry.fixed > 0 and entry.low <= 0 <= entry.high):
                raise ValueError(f"the efficiencies of {key!r} are out of range")
        if "*" not in entries:
            raise ValueError("the efficiencies lack the entry '*', which everything falls back to")
        least = {str(family): float(width) for family, width in state.get("least", {}).items()}
        if not all(0 <= width < float("inf") for width in least.values()):
            raise ValueError("a least width of an interval is negative or without end")
        return cls(entries, bool(state.get("fitted", False)), least)


@dataclass(frozen=True, slots=True)
class Measured:
    """Calls of one device with their measured times, µs [n]; ``weight`` is the set's share among several sets."""

    calls: Sequence[OpCall]
    measured_us: Float64
    device: DeviceSpec
    weight: float = 1.0


def default_efficiencies_of(device: DeviceSpec) -> Efficiencies:
    """Return the efficiencies of a device that was never calibrated."""
    return default_efficiencies("host" if device.vendor == "host" else "gpu")


def default_efficiencies(kind: Literal["gpu", "host"] = "gpu") -> Efficiencies:
    """Return the default efficiencies of GPUs, or of CPUs, for devices that were never calibrated."""
    return _stored(HOST_DEFAULTS_FILE if kind == "host" else DEFAULTS_FILE)


@lru_cache(maxsize=2)
def _stored(file: Path) -> Efficiencies:
    toml: Any = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    return Efficiencies.from_state(toml.loads(file.read_text(encoding="utf-8")))


def keys(family: Family, dtype: str, kind: str) -> tuple[str, ...]:
    """Return the keys of a call, the most specific first; ``kind`` includes its layout after a colon.

    Products differ most by dtype, other families by kind, and strided or broadcast operands more than either.
    """
    name = family.value
    layout = kind[kind.index(":"):] if ":" in kind else ""
    if family in PRODUCTS:
        return f"{name}/{dtype}/{kind}", f"{name}/{dtype}", f"{name}//{kind}", name
    if layout:
        return (f"{name}/{dtype}/{kind}", f"{name}//{kind}", f"{name}/{dtype}/{layout}", f"{name}//{layout}",
                f"{name}/{dtype}", name)
    return f"{name}/{dtype}/{kind}", f"{name}//{kind}", f"{name}/{dtype}", name


def predicted_us(done: KernelWork, device: DeviceSpec, compute: Float64, memory: Float64, fixed: Float64) -> Float64:
    """Return the time of work at the given efficiencies, µs [n]: kernels' fixed costs plus the time of arithmetic and
    traffic (``together``)."""
    fixed_us = fixed * device.kernel_floor_us * done.kernels
    return fixed_us + together(done.compute_us / compute, done.memory_us / memory, device)


def together(compute_us: Float64, memory_us: Float64, device: DeviceSpec) -> Float64:
    """Return the time of arithmetic and traffic, µs [n]: they overlap on a GPU and add up on one thread of a CPU."""
    return compute_us + memory_us if device.vendor == "host" else overlapped(compute_us, memory_us)


def fit_efficiencies(
    calls: Sequence[OpCall], measured_us: npt.ArrayLike, device: DeviceSpec, *, source: str = "",
) -> Efficiencies:
    """Return the efficiencies of one device from measured calls, which need not cover every family.

    Family by family, along each call's chain of ``keys``, every key starts from the next wider key; with few calls it
    stays close to that key. A parameter minimises the mean absolute log error of the calls that determine it; half of a
    call's weight is its share of the measured time. Intervals are the 10% and 90% quantiles of the log residuals, for
    few calls mixed with the start's.

    Args:
        calls: Measured calls; repeated ones count as one with their median time.
        measured_us: Their times, µs; not positive or not finite ones are left out.
        device: Device that ran them.
        source: Source to note in the efficiencies.

    Raises:
        ValueError: there is no usable measurement, or the lengths differ.
    """
    return fit_over_devices([Measured(calls, np.asarray(measured_us, np.float64), device)], source=source, fitted=True)


def fit_over_devices(
    sets: Iterable[Measured], *, base: Efficiencies | None = None, source: str = "", fitted: bool = False,
) -> Efficiencies:
    """Fit as ``fit_efficiencies`` does, to several sets of calls together, each with its own device.

    Raises:
        ValueError: there is no usable measurement, or the lengths differ.
    """
    rows = [row for one in sets for row in _prepared(one)]
    if not rows:
        raise ValueError("there is no usable measured call to fit efficiencies to")
    base = base or default_efficiencies_of(rows[0].device)
    entries = dict(base.entries)
    for family in dict.fromkeys(row.table.family for row in rows):
        mine = [row for row in rows if row.table.family == family]
        for level in range(_LEVELS):
            _fit_level(mine, level, entries, source)
    return Efficiencies(entries, fitted)


@dataclass(frozen=True, slots=True)
class _Rows:
    """One family's calls of one set: their work, times and weights."""

    table: CallTable
    done: KernelWork
    device: DeviceSpec
    measured_us: Float64
    weight: Float64


def _prepared(one: Measured) -> list[_Rows]:
    times = np.asarray(one.measured_us, np.float64)
    if times.shape != (len(one.calls),):
        raise ValueError(f"{len(one.calls)} calls have {times.size} times")
    by_call: dict[OpCall, list[float]] = {}
    for call, time in zip(one.calls, times, strict=True):
        if np.isfinite(time) and time > 0 and "unsized" not in call.flags:
            by_call.setdefault(call, []).append(float(time))
    found = []
    for family in dict.fromkeys(call.family for call in by_call):
        calls = [call for call in by_call if call.family == family]
        table = CallTable.of(family, calls)
        measured = np.array([np.median(by_call[call]) for call in calls])
        total = np.array([np.sum(by_call[call]) for call in calls])
        weight = one.weight * min(1.0, len(calls) / ENOUGH) * 0.5 * (1.0 / len(calls) + total / total.sum())
        found.append(_Rows(table, work(table, one.device), one.device, measured, weight))
    return found


def _fit_level(rows: list[_Rows], level: int, entries: dict[str, Efficiency], source: str) -> None:
    """Fit the keys at position ``level`` of the calls' chains (0: the widest); each starts from the next wider key."""
    pieces: dict[str, list[tuple[_Rows, npt.NDArray[np.bool_]]]] = {}
    chains: dict[str, tuple[str, ...]] = {}
    for one in rows:
        of_group = [keys(one.table.family, dtype, kind)[::-1] for kind, dtype in one.table.groups]
        names = [chain[level] if level < len(chain) else "" for chain in of_group]
        chains.update(zip(names, of_group, strict=True))
        for name in dict.fromkeys(names):
            if name:
                chosen = np.array([other == name for other in names])[one.table.group]
                pieces.setdefault(name, []).append((one, chosen))
    for name, parts in pieces.items():
        count = sum(int(chosen.sum()) for _, chosen in parts)
        if count < (FEW if level else 1):
            continue
        wider = next((entries[key] for key in chains[name][:level][::-1] if key in entries), entries["*"])
        # A second fit of a key (a device's after the defaults) starts from the key's present values.
        entries[name] = _fit_one(parts, entries.get(name, wider), count, source)


def _fit_one(parts: list[tuple[_Rows, npt.NDArray[np.bool_]]], start: Efficiency, count: int, source: str,
             ) -> Efficiency:
    chosen = [KernelWork(one.done.compute_us[m], one.done.memory_us[m], one.done.kernels[m]) for one, m in parts]
    measured = [one.measured_us[m] for one, m in parts]
    weight = np.concatenate([one.weight[m] for one, m in parts])
    weight = weight / weight.sum()
    prior = PRIOR_WEIGHT * FEW / count
    bounds = _HOST_BOUNDS if parts[0][0].device.vendor == "host" else _BOUNDS
    told = _told(parts[0][0].table.family, chosen, [one.device for one, _ in parts], start)

    def residuals(e: Efficiency, rows: npt.NDArray[np.bool_], **tried: Float64) -> Float64:
        """Return log errors of the chosen calls [n], or for each of the values [k, 1] tried for a parameter, [k, n]."""
        values = [tried.get(name, getattr(e, name)) for name in ("compute", "memory", "fixed")]
        ends = np.cumsum([len(each) for each in measured])[:-1]
        return np.concatenate([
            np.log(m[mine]) - np.log(predicted_us(
                KernelWork(w.compute_us[mine], w.memory_us[mine], w.kernels[mine]), one.device, *values))
            for m, w, (one, _), mine in zip(measured, chosen, parts, np.split(rows, ends), strict=True)], axis=-1)

    def costs(e: Efficiency, name: str, tried: Float64) -> Float64:
        rows = told[name]
        moved = np.abs(np.log(tried / getattr(start, name)))
        off = np.abs(residuals(e, rows, **{name: tried[:, None]}))
        return np.sum(weight[rows] * off, axis=1) / weight[rows].sum() + prior * moved

    best, step = start, 1.0
    for _ in range(_SWEEPS):
        before = best
        for name in told:
            value, (least, most) = getattr(best, name), bounds[name]
            tried = np.append(np.clip(value * _FACTORS**step, least, most), value)
            *of_tried, of_best = costs(best, name, tried).tolist()
            if min(of_tried) < of_best - 1e-12:
                changes: dict[str, Any] = {name: float(tried[int(np.argmin(of_tried))])}
                best = replace(best, **changes)
        if best == before:
            step /= 4.0
            if step < 0.05:
                break
    low, high = spread(residuals(best, np.ones(len(weight), np.bool_)), weight)
    own = count / (count + ENOUGH)
    low, high = own * low + (1.0 - own) * start.low, own * high + (1.0 - own) * start.high
    return replace(best, low=low, high=high, source=source)


def _told(family: Family, done: list[KernelWork], devices: list[DeviceSpec], start: Efficiency,
          ) -> dict[str, npt.NDArray[np.bool_]]:
    """Return which calls determine each parameter, for the parameters that calls can determine.

    Short calls do not show rates, and long ones do not show fixed costs. A parameter follows only the calls whose time
    is due to it by at least the share ``TELLING``. With fewer than ``FEW`` such calls it stays unchanged.
    """
    seen: dict[str, list[npt.NDArray[np.bool_]]] = {name: [] for name in _BOUNDS}
    for one, device in zip(done, devices, strict=True):
        compute, memory = one.compute_us / start.compute, one.memory_us / start.memory
        fixed = start.fixed * device.kernel_floor_us * one.kernels
        least = TELLING * (fixed + together(compute, memory, device))
        seen["fixed"].append(fixed > least)
        seen["compute"].append((compute > least) & (compute >= memory))
        seen["memory"].append((memory > least) & (memory >= compute))
    rows = {name: np.concatenate(columns) for name, columns in seen.items()
            if name != "compute" or family in (*PRODUCTS, Family.EMBEDDING)}
    return {name: column for name, column in rows.items() if column.sum() >= FEW}


def spread(residuals: Float64, weight: Float64 | None = None) -> tuple[float, float]:
    """Return the ends, below and above 0, of the 80% interval of n log residuals, widened by the factor 1 + 2/n."""
    order = np.argsort(residuals)
    weights = np.ones(len(residuals)) if weight is None else weight
    share = (np.cumsum(weights[order]) - 0.5 * weights[order]) / weights.sum()
    low, high = np.interp(INTERVAL, share, residuals[order])
    wider = 1.0 + 2.0 / len(residuals)
    if len(residuals) < 5:
        # Too few for quantiles: no narrower than the scatter of kernels around a family-wide efficiency.
        low, high = min(low, -0.2), max(high, 0.2)
    return min(float(low) * wider, -NARROWEST), max(float(high) * wider, NARROWEST)
