"""The device's own figures where no data sheet has them: a CPU's, or a GPU's that no file describes."""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kernel_models.device import DeviceError, DeviceSpec, device, resolve_device
from kernel_models.op_call import Family, OpCall
from tracer.shape_only.devices import device_names

MEASURED = "measured by foretrace calibrate"
_REPORTED = "reported by the device's driver"
_BEYOND_CACHE = 3.0
"""Traffic of so many times the last cache shows the memory's bandwidth."""
_BEYOND_ANY_CACHE = 1 << 28
"""Bytes moved that no core finds in its share of a cache, however large the socket's is that a virtual machine sees."""
_OTHER_DTYPES = {"fp64": 0.5, "int8": 1.0, "fp16": 1.0}
"""Shares of the fp32 rate taken where nothing was measured."""


def spec_of(hardware: Mapping[str, Any], threads: int) -> DeviceSpec:
    """The device that a worker reports; figures are placeholders where no file describes it.

    Args:
        hardware: as a capture's context has it.
        threads: of a CPU.
    """
    name = str(hardware.get("device", ""))
    if name == "CPU":
        changes: dict[str, Any] = {"sm_count": max(threads, 1), **_caches()}
        return replace(device("cpu"), **changes)
    units = hardware.get("multi_processor_count")
    try:
        spec = resolve_device(name, hardware.get("total_memory"), units)
    except DeviceError:
        return _unknown_gpu(name, hardware)
    return _unknown_gpu(name, hardware) if units and units != spec.sm_count else spec  # a partition of a device


def with_measured(spec: DeviceSpec, measured: Iterable[tuple[OpCall, float]]) -> DeviceSpec:
    """A placeholder's figures replaced by the best that was measured; other devices are as they were.

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
        if spec.vendor != "host":  # narrower types multiply on matrix units, which vectors do not compute on
            matrix = {name: _rounded(rate) for name, rate in sorted(rates.items()) if name != "fp32"}
            changes["matrix_tflops"] = MappingProxyType(matrix)
            sources |= {f"matrix_tflops.{name}": MEASURED for name in matrix}
            vector = dict.fromkeys(("bf16", "fp16", "fp32"), base) | {"fp64": _OTHER_DTYPES["fp64"] * base}
        changes["vector_tflops"] = MappingProxyType({name: _rounded(rate) for name, rate in sorted(vector.items())})
        sources |= {f"vector_tflops.{name}": MEASURED if name in rates and rates[name] == rate else
                    f"share of fp32, which was {MEASURED}" for name, rate in vector.items()}
    link = link or bandwidth * (spec.vendor == "host")
    if bandwidth:
        changes["memory_bandwidth_gbps"] = _rounded(bandwidth)
        sources["memory.bandwidth_gbps"] = MEASURED
    if link:
        changes["host_gbps"] = _rounded(link)
        sources["links.host_gbps"] = MEASURED
    if floor < float("inf"):
        changes["kernel_floor_us"] = _rounded(floor)
        sources["launch.kernel_floor_us"] = MEASURED
    complete = bool(rates) and bool(bandwidth)
    return replace(spec, placeholder=not complete, sources=MappingProxyType(sources), **changes)


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _caches() -> dict[str, float]:
    """Last cache and memory of this machine, where Linux tells them."""
    found: dict[str, float] = {}
    with suppress(OSError, ValueError, AttributeError):
        found["memory_gb"] = _rounded(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9)
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with suppress(OSError, ValueError):
            number, unit = re.fullmatch(r"(\d+)([KM])", path.read_text(encoding="ascii").strip()).groups()  # type: ignore[union-attr]
            sizes.append(int(number) / (1024 if unit == "K" else 1))
    if sizes:
        found["l2_mb"] = max(sizes)
    return found


def _unknown_gpu(name: str, hardware: Mapping[str, Any]) -> DeviceSpec:
    """A GPU as its driver describes it; what that does not tell is the median of described GPUs of its architecture,
    else of its maker, until it is measured."""
    vendor = "amd" if hardware.get("gcnarchname") else "nvidia"
    capability = str(hardware.get("compute_capability", ""))
    every = [device(one) for one in device_names() if device(one).vendor == vendor]
    alike = [one for one in every if one.compute_capability == capability]
    architecture = alike[0].architecture if alike else str(hardware.get("gcnarchname") or f"sm{capability}")
    clocks = hardware.get("clocks") or {}
    sources: dict[str, str] = {}

    def figure(key: str, attribute: str, *told: float) -> float:
        """The first figure that was told, else the median of GPUs alike."""
        found = next((value for value in told if value > 0), None)
        sources[key] = _REPORTED if found is not None else (
            f"not known: the median of described {architecture if alike else vendor} GPUs")
        return found if found is not None else statistics.median(getattr(one, attribute) for one in alike or every)

    def told(key: str, scale: float = 1.0, values: Mapping[str, Any] = hardware) -> float:
        value = values.get(key)
        return value * scale if isinstance(value, int | float) else 0.0

    units = figure("compute.sm_count", "sm_count", told("multi_processor_count"))
    clock = figure("compute.boost_clock_mhz", "boost_clock_mhz", told("max_sm_mhz", 1, clocks),
                   told("clock_rate", 1e-3))
    # Two transfers a clock of the memory.
    pins = told("memory_clock_rate", 1e3) * told("memory_bus_width", 2 / 8)
    rates = {dtype: statistics.median(one.peak_tflops(dtype) / (one.sm_count * one.boost_clock_mhz)
                                      for one in alike or every) * units * clock for dtype in ("fp64", "fp32")}
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "unknown-gpu"
    return replace(
        (alike or every)[0], name=plain if plain not in device_names() else f"{plain}-{units:.0f}", vendor=vendor,
        reported_names=(name,), short_names=(), default_for=(), placeholder=True, architecture=architecture,
        compute_capability=capability, sm_count=int(units), boost_clock_mhz=clock,
        shared_memory_per_sm_kb=figure("compute.shared_memory_per_sm_kb", "shared_memory_per_sm_kb",
                                       told("shared_memory_per_multiprocessor", 1 / 1024)),
        registers_per_sm_kb=figure("compute.registers_per_sm_kb", "registers_per_sm_kb",
                                   told("regs_per_multiprocessor", 4 / 1024)),
        power_w=figure("compute.power_w", "power_w", told("power_limit_w", 1, clocks)), memory_kind="unknown",
        memory_gb=_rounded(figure("memory.capacity_gb", "memory_gb", told("total_memory", 1e-9))),
        memory_bandwidth_gbps=figure("memory.bandwidth_gbps", "memory_bandwidth_gbps", pins / 1e9),
        l2_mb=_rounded(figure("memory.l2_mb", "l2_mb", told("l2_cache_size", 2.0**-20))),
        l3_mb=figure("memory.l3_mb", "l3_mb"), matrix_tflops=MappingProxyType({}),
        vector_tflops=MappingProxyType({dtype: _rounded(rate) for dtype, rate in rates.items()}),
        pcie_generation=0, pcie_width=0, peer_gbps=0.0, host_gbps=figure("links.host_gbps", "host_gbps"),
        kernel_floor_us=figure("launch.kernel_floor_us", "kernel_floor_us"),
        launch_latency_us=figure("launch.latency_us", "launch_latency_us"),
        sources=MappingProxyType(sources | dict.fromkeys(
            ("links.pcie_generation", "links.pcie_width", "links.peer_gbps"), "not known") | {
                f"vector_tflops.{dtype}": "units and clock times the median of described GPUs" for dtype in rates}))
