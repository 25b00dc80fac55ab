"""The device that a user names: one of ours, as a driver reports it, a file of one's own, or one with other figures."""

from __future__ import annotations

from pathlib import Path

from kernel_models.device import DeviceError, DeviceSpec, device, read_device, resolve_device, scaled
from tracer.shape_only.devices import TracedDevice, device_names

OWN = ".toml"
"""A name with this ending is a file, in the format of ``tracer/devices``."""


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


def shape_device(spec: DeviceSpec) -> TracedDevice:
    """Return what a step is traced for by shapes, of a device's figures."""
    return TracedDevice.of(spec.name, spec.vendor, spec.compute_capability, spec.reported_names, spec.memory_gb,
                           spec.sm_count)


def scaled_device(spec: DeviceSpec, *, clock: float = 1.0, bandwidth: float = 1.0, memory: float = 1.0,
                  power: float = 1.0) -> DeviceSpec:
    """Return the device with figures times factors, each with the factor in its source; itself where all are 1.

    All peak rates follow the clock; caches, launches and what the board's power feeds do not.
    """
    if clock == bandwidth == memory == power == 1.0:
        return spec
    return scaled(spec, {
        "compute.boost_clock_mhz": clock, "matrix_tflops": clock, "vector_tflops": clock,
        "memory.bandwidth_gbps": bandwidth, "memory.capacity_gb": memory, "compute.power_w": power})
