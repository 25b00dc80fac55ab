"""Figures of devices without a data sheet: a CPU, or a GPU that no file describes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kernel_models.device import (
    DeviceError,
    DeviceSpec,
    device,
    device_names,
    reported_figure,
    resolve_device,
    rounded,
    unknown_device,
)
from kernel_models.op_call import Family, OpCall

MEASURED = "measured by foretrace calibrate"
_BEYOND_CACHE = 3.0
"""Least traffic, as a multiple of the last cache's size, that shows the bandwidth of memory instead of the cache's."""
_BEYOND_ANY_CACHE = 1 << 28
"""Bytes that exceed any core's share of a cache, even if a virtual machine reports the cache of a large socket."""
_OTHER_DTYPES = {"fp64": 0.5, "int8": 1.0, "fp16": 1.0}
"""Assumed rates of types without a measurement, as shares of the fp32 rate."""


def measured_device(hardware: Mapping[str, Any]) -> str:
    """Return what identifies a measured device: its name with a CPU's model or a GPU's units (it may be a part)."""
    name, units = str(hardware.get("device", "")), hardware.get("multi_processor_count")
    more = hardware.get("cpu") if name == "CPU" else f"{units} units" if units else ""
    return f"{name} ({more})" if more else name


def spec_of(hardware: Mapping[str, Any], threads: int) -> DeviceSpec:
    """Return the device that a worker reports; figures are placeholders where no file describes it.

    Args:
        hardware: facts of the hardware, as in a capture's context.
        threads: number of threads of a CPU.

    Raises:
        DeviceError: a figure is no number, or too little is known of an unknown GPU.
    """
    name = str(hardware.get("device", ""))
    max_clock_mhz(hardware)
    if name == "CPU":
        changes: dict[str, Any] = {"sm_count": max(threads, 1), **_caches()}
        return replace(device("cpu"), **changes)
    memory, units = (int(reported_figure(hardware, key) or 0) for key in ("total_memory", "multi_processor_count"))
    try:
        spec = resolve_device(name, memory, units)
    except DeviceError:
        return _unknown_gpu(name, hardware)
    if spec.vendor == "amd" and spec.name not in device_names():
        return replace(spec, placeholder=True)  # a compute partition: it has more bandwidth while other partitions rest
    return _unknown_gpu(name, hardware) if units and units != spec.sm_count else spec  # a part of a device


def max_clock_mhz(hardware: Mapping[str, Any]) -> float | None:
    """Return a device's highest clock, MHz; ``None`` where unknown. Raises ``DeviceError``: it is no number."""
    clocks = hardware.get("clocks")
    highest = clocks.get("max_sm_mhz") if isinstance(clocks, Mapping) else clocks
    return reported_figure({**hardware, "max_sm_mhz": highest}, "max_sm_mhz")


def with_measured(spec: DeviceSpec, measured: Iterable[tuple[OpCall, float]]) -> DeviceSpec:
    """Return a placeholder with its figures replaced by the best measured ones; other devices are returned unchanged.

    Args:
        spec: the device.
        measured: calls and their times, µs.
    """
    if not spec.placeholder:
        return spec
    rates: dict[str, float] = {}
    bandwidth, link, floor = 0.0, 0.0, float("inf")
    beyond = min(_BEYOND_CACHE * spec.l2_mb * 2**20, _BEYOND_ANY_CACHE)
    for call, time_us in measured:
        if call.family is Family.GEMM:
            rates[call.dtype] = max(rates.get(call.dtype, 0.0), call.flops / time_us / 1e6)
        elif call.family in (Family.COPY, Family.TRANSFER, Family.ELEMENTWISE, Family.MEMSET):
            floor = min(floor, time_us)
            if call.kind in ("h2d", "d2h"):
                link = max(link, call.bytes_read / time_us / 1e3)
            elif call.bytes_moved >= beyond:
                bandwidth = max(bandwidth, call.bytes_moved / time_us / 1e3)
    sources = dict(spec.sources)
    changes: dict[str, Any] = {}
    if rates:
        base = rates.get("fp32") or max(rates.values())
        vector = {name: base * share for name, share in _OTHER_DTYPES.items()} | {"bf16": base, "fp32": base} | rates
        if spec.vendor != "host":  # narrower types multiply on matrix units, vector work does not
            matrix = {name: rounded(rate) for name, rate in sorted(rates.items()) if name != "fp32"}
            changes["matrix_tflops"] = MappingProxyType(matrix)
            sources |= {f"matrix_tflops.{name}": MEASURED for name in matrix}
            vector = dict.fromkeys(("bf16", "fp16", "fp32"), base) | {"fp64": _OTHER_DTYPES["fp64"] * base}
        changes["vector_tflops"] = MappingProxyType({name: rounded(rate) for name, rate in sorted(vector.items())})
        sources |= {f"vector_tflops.{name}": MEASURED if name in rates and rates[name] == rate else
                    f"share of fp32, which was {MEASURED}" for name, rate in vector.items()}
    link = link or bandwidth * (spec.vendor == "host")
    for name, key, value in (("memory_bandwidth_gbps", "memory.bandwidth_gbps", bandwidth),
                             ("host_gbps", "links.host_gbps", link),
                             ("kernel_floor_us", "launch.kernel_floor_us", floor)):
        if 0 < value < float("inf"):
            changes[name], sources[key] = rounded(value), MEASURED
    complete = bool(rates) and bool(bandwidth)
    return replace(spec, placeholder=not complete, note="" if complete else spec.note,
                   sources=MappingProxyType(sources), **changes)


def _caches() -> dict[str, float]:
    """Return the last cache, MiB, and the memory, GB, of this machine, where Linux reports them."""
    found: dict[str, float] = {}
    with suppress(OSError, ValueError, AttributeError):
        found["memory_gb"] = rounded(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9)
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with suppress(OSError, ValueError):
            number, unit = re.fullmatch(r"(\d+)([KM])", path.read_text(encoding="ascii").strip()).groups()  # type: ignore[union-attr]
            sizes.append(int(number) / (1024 if unit == "K" else 1))
    if sizes:
        found["l2_mb"] = max(sizes)
    return found


def _unknown_gpu(name: str, hardware: Mapping[str, Any]) -> DeviceSpec:
    """Return an unknown GPU as its driver describes it; rates of matrix units are left empty, to be measured."""

    def figure(key: str, scale: float = 1.0) -> float | None:
        value = reported_figure(hardware, key)
        return value * scale if value and value > 0 else None

    width, clock_khz = figure("memory_bus_width"), figure("memory_clock_rate")
    amd = bool(hardware.get("gcnarchname"))
    spec = unknown_device(
        name or ("AMD GPU" if amd else "NVIDIA GPU"), int(figure("total_memory") or 0),
        int(figure("multi_processor_count") or 0), str(hardware.get("compute_capability", "")),
        l2_mb=figure("l2_cache_size", 2.0**-20),
        clock_mhz=max_clock_mhz(hardware) or figure("clock_rate", 1e-3),
        bandwidth_gbps=rounded(2 * clock_khz * 1e3 * width / 8 / 1e9) if width and clock_khz else None)
    return replace(spec, matrix_tflops=MappingProxyType({}))
