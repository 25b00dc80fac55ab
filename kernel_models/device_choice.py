"""The device that a user names: one of ours, as a driver reports it, or a file of one's own."""

from __future__ import annotations

import re
from pathlib import Path

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
