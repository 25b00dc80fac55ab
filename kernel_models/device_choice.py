"""The device that a user names: one of ours, as a driver reports it, a file of one's own, or one with other figures."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from kernel_models.device import DeviceError, DeviceSpec, device, device_names, read_device, resolve_device
from tracer.shape_only import devices as shape_only

OWN = ".toml"
"""A name with this ending is a file, in the format of ``kernel_models/devices``."""


def find_device(name: str) -> DeviceSpec:
    """The device of a name.

    Args:
        name: ours, one that drivers report, or a TOML file of one's own.

    Raises:
        DeviceError: no device goes by it, or the file is not complete; the error says what is missing.
    """
    if name.lower().endswith(OWN):
        spec = read_device(Path(name))
        if spec.name in device_names() and spec != device(spec.name):
            raise DeviceError(f"{name} calls its device {spec.name}, which is the name of a known one with other "
                              "figures; give it a name of its own.")
        return spec
    try:
        return device(name)
    except DeviceError:
        return resolve_device(name)


def traced_device(name: str) -> str | shape_only.TracedDevice:
    """Return what a step is traced for, of a name as ``find_device`` takes it or the tracer knows it. Raises as these
    do."""
    return name if name in shape_only.device_names() else shape_device(find_device(name))


def shape_device(spec: DeviceSpec) -> str | shape_only.TracedDevice:
    """Return what a step is traced for by shapes: a name that the tracer knows, or what it must know of another device.

    Raises:
        DeviceError: the device's compute capability cannot be understood.
    """
    if spec.name in shape_only.device_names():
        return spec.name
    memory_bytes = round(spec.memory_gb * 1e9)
    if spec.vendor == "host":
        return shape_only.TracedDevice(spec.name, (0, 0), shape_only.CPU, memory_bytes)
    found = re.fullmatch(r"(\d+)\.(\d+)", spec.compute_capability)
    if found is None or spec.vendor not in ("nvidia", "amd"):
        raise DeviceError(f"No step can be traced for {spec.name}: its vendor is {spec.vendor!r} and its compute "
                          f"capability {spec.compute_capability!r}; write nvidia or amd, and one such as 9.0.")
    return shape_only.TracedDevice(spec.name, (int(found.group(1)), int(found.group(2))), spec.vendor, memory_bytes)


def scaled_device(spec: DeviceSpec, *, clock: float = 1.0, bandwidth: float = 1.0, memory: float = 1.0,
                  power: float = 1.0) -> DeviceSpec:
    """Return the device with figures times factors, each with the factor in its source; itself where all are 1.

    All peak rates follow the clock; caches, launches and what the board's power feeds do not.
    """
    if clock == bandwidth == memory == power == 1.0:
        return spec
    factors = {"compute.boost_clock_mhz": clock, "matrix_tflops": clock, "vector_tflops": clock,
               "memory.bandwidth_gbps": bandwidth, "memory.capacity_gb": memory, "compute.power_w": power}
    return replace(
        spec, boost_clock_mhz=spec.boost_clock_mhz * clock, matrix_tflops=_times(spec.matrix_tflops, clock),
        vector_tflops=_times(spec.vector_tflops, clock), memory_bandwidth_gbps=spec.memory_bandwidth_gbps * bandwidth,
        memory_gb=spec.memory_gb * memory, power_w=spec.power_w * power,
        sources=MappingProxyType({key: _source(key, text, factors) for key, text in spec.sources.items()}))


def _times(rates: Mapping[str, float], factor: float) -> Mapping[str, float]:
    return MappingProxyType({name: rate * factor for name, rate in rates.items()})


def _source(key: str, text: str, factors: Mapping[str, float]) -> str:
    factor = factors.get(key, factors.get(key.partition(".")[0], 1.0))
    return text if factor == 1.0 else f"{text}, × {factor:g}"
