"""Checks that a device is fit to be measured: clocks, other processes and memory, before, during and after.

The state of a GPU comes from its driver (``tracer.gpu_state``), that of a CPU from the operating system. Facts that
cannot be read cause no finding.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from tracer.cores import usable_cores
from tracer.errors import ForetraceError
from tracer.free_memory import machine_memory
from tracer.gpu_state import find_gpus, place_in_use

LEAST_FREE_BYTES = {"cuda": 2e9, "cpu": 1e9}
"""Least free memory for a calibration, bytes: with less, useful matrix products and tables do not fit."""
LITTLE_FREE_SHARE = 0.5
"""If a smaller share of a GPU's memory is free, another program is using the GPU."""
SLOW_CLOCK = 0.7
"""Share of its highest clock below which a busy GPU counts as throttled, for any reason that the GPU reports."""
BUSY_PER_CORE = 1.3
"""Load average per core above which other work shares a CPU's caches and memory. These shares are chosen."""


class CalibrationError(ForetraceError):
    """A calibration cannot be done as requested, or not on this device."""


@dataclass(frozen=True)
class Health:
    """A device at one moment; ``None`` for what could not be found out.

    Attributes:
        device: "cuda" or "cpu".
        name: As the device reports it.
        clock_mhz, highest_clock_mhz: Present and highest clock of the multiprocessors.
        held_back_by: Reasons for throttled clocks.
        total_bytes, free_bytes: Memory.
        processes: Number of processes that compute on the device, foretrace's own included.
        utilization: Share of time in which the device is busy.
        load: Load average per usable core, of a CPU.
    """

    device: str
    name: str = ""
    clock_mhz: float | None = None
    highest_clock_mhz: float | None = None
    held_back_by: tuple[str, ...] = ()
    total_bytes: float | None = None
    free_bytes: float | None = None
    processes: int | None = None
    utilization: float | None = None
    load: float | None = None


@dataclass(frozen=True)
class Finding:
    """A problem of the device. ``what`` identifies it, so that it is reported once; ``fatal``: measuring is useless."""

    what: str
    text: str
    fatal: bool = False


Probe = Callable[[str], Health]
"""Function that returns the health of "cuda" or "cpu"."""


def probe(device: str) -> Health:
    """Return the device's health now."""
    return _gpu() if device == "cuda" else _cpu()


def before(health: Health) -> list[Finding]:
    """Return the problems before foretrace runs anything on the device."""
    found = _memory(health)
    if health.device == "cuda":
        if health.processes:
            found.append(Finding("processes", f"{_others(health.processes)} on the GPU: its times will be too long "
                                              "and scatter. Stop it, or calibrate when it has ended."))
        elif (health.utilization or 0.0) > 0.1:
            found.append(Finding("processes", f"The GPU is {health.utilization:.0%} busy before the calibration has "
                                              "begun: something else runs on it."))
    return [*found, *_clocks(health), *_load(health, own=0.0)]


def during(health: Health) -> list[Finding]:
    """Return the problems while one process of foretrace measures."""
    found = [*_clocks(health), *_load(health, own=1.0)]
    if health.device == "cuda" and (health.processes or 0) > 1:
        found.append(Finding("processes", f"{_others((health.processes or 0) - 1)} on the GPU during the calibration: "
                                          "its times are too long and scatter."))
    return found


def _others(count: int) -> str:
    return "Another process computes" if count == 1 else f"{count} other processes compute"


def _memory(health: Health) -> list[Finding]:
    free, total = health.free_bytes, health.total_bytes
    if free is None:
        return []
    if free < LEAST_FREE_BYTES[health.device]:
        return [Finding("memory", f"Only {free / 1e9:.1f} GB of the device's memory is free, and a calibration needs "
                                  f"{LEAST_FREE_BYTES[health.device] / 1e9:.0f} GB: end what else uses it.",
                        fatal=True)]
    if health.device == "cuda" and total and free < LITTLE_FREE_SHARE * total:
        return [Finding("memory", f"Only {free / 1e9:.1f} of {total / 1e9:.1f} GB of the GPU's memory is free: "
                                  "something else lives there, and large sizes are left out.")]
    return []


def _clocks(health: Health) -> list[Finding]:
    if health.held_back_by:
        return [Finding("clocks", f"The GPU's clocks are held back by {' and '.join(health.held_back_by)}: its times "
                                  "are longer than they need be.")]
    clock, highest = health.clock_mhz, health.highest_clock_mhz
    if clock and highest and (health.utilization or 0.0) > 0.5 and clock < SLOW_CLOCK * highest:
        return [Finding("clocks", f"The GPU runs at {clock:.0f} MHz of {highest:.0f} though it is busy: its clocks are "
                                  "limited or locked.")]
    return []


def _load(health: Health, own: float) -> list[Finding]:
    if health.device == "cuda" or health.load is None:
        return []
    cores = max(usable_cores(), 1)
    if health.load - own / cores > BUSY_PER_CORE:
        return [Finding("load", f"The machine is busy with other work (load {health.load * cores:.1f} on {cores} "
                                "cores): caches and memory are shared, and times scatter.")]
    return []


def _cpu() -> Health:
    memory = machine_memory()
    load = None
    with suppress(OSError, AttributeError):
        load = os.getloadavg()[0] / max(usable_cores(), 1)
    return Health("cpu", "CPU", total_bytes=memory.get("MemTotal"), free_bytes=memory.get("MemAvailable"), load=load)


def _gpu() -> Health:
    devices = find_gpus()
    place = None if devices is None else place_in_use(devices)
    if devices is None or place is None:
        return Health("cuda")
    state = devices.state(place)
    known = state.memory_bytes >= 0 and state.used_bytes >= 0
    return Health(
        "cuda", state.name, state.sm_mhz or None, state.max_sm_mhz or None, state.slowed_by,
        state.memory_bytes if known else None, state.memory_bytes - state.used_bytes if known else None,
        state.processes if state.processes >= 0 else None, state.busy if state.busy >= 0 else None)
