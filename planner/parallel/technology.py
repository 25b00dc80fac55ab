"""``Technology``: a known device and its nodes with other figures, as a user writes them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from math import isfinite

from kernel_models.collectives import Topology
from kernel_models.device import DeviceSpec
from kernel_models.device_edit import scaled_device
from tracer.parallel_plan import PlanError

AXES: Mapping[str, Mapping[str, float]] = {
    "clock": {"mhz": 1.0, "ghz": 1e3}, "bandwidth": {"gb/s": 1.0, "tb/s": 1e3},
    "memory": {"gb": 1.0, "tb": 1e3, "gib": 1.073741824}, "link": {"gb/s": 1.0, "tb/s": 1e3}}
"""Figures that may be changed, and units of their values in those of the device's figure."""
_UNITS = {"clock": "MHz", "bandwidth": "GB/s", "memory": "GB", "link": "GB/s"}
MOST = 100.0
"""Largest factor, and one over the smallest."""


@dataclass(frozen=True, slots=True)
class Technology:
    """Factors on a device's and its nodes' figures.

    Attributes:
        clock, bandwidth, memory, power: of the device: its rates, its memory's speed and size, its board's limit.
        link: on the links between a node's GPUs, and on the network cards that join nodes.
    """

    clock: float = 1.0
    bandwidth: float = 1.0
    memory: float = 1.0
    link: float = 1.0
    power: float = 1.0

    def __str__(self) -> str:
        return ", ".join(f"{name} × {factor:g}" for name, factor in asdict(self).items() if factor != 1.0)

    def device(self, spec: DeviceSpec) -> DeviceSpec:
        """Return the device so changed, by a name that says it; itself where nothing of it is."""
        edited = scaled_device(spec, clock=self.clock, bandwidth=self.bandwidth, memory=self.memory, power=self.power)
        return edited if edited is spec else replace(edited, name=f"{spec.name} ({replace(self, link=1.0)})")

    def cluster(self, on: Topology) -> Topology:
        """Return the cluster with other links; itself where they stay."""
        return on.with_links(self.link)


AS_IT_IS = Technology()


def factors_of(axis: str, text: str | None, spec: DeviceSpec, link_gbps: Callable[[], float]) -> list[float]:
    """Return the factors of an option: "1.5" and "x1.5" are factors, "2100MHz" or "6TB/s" values.

    Args:
        axis: one of ``AXES``.
        text: one or several, separated by commas; ``None`` for none, which is a factor of 1.
        spec: the device that a value is of.
        link_gbps: the bandwidth of a GPU's links to its node that a value is of.

    Raises:
        PlanError: it is neither, or out of range.
    """
    if text is None:
        return [1.0]
    own = {"clock": lambda: spec.boost_clock_mhz, "bandwidth": lambda: spec.memory_bandwidth_gbps,
           "memory": lambda: spec.memory_gb, "link": link_gbps}[axis]
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"[x×]?(\d{1,9}(?:\.\d{1,9})?)\s*([a-z/]*)", part.strip().lower(), re.ASCII)
        unit = match.group(2) if match else "?"
        if match is None or (unit and unit not in AXES[axis]):
            raise PlanError(f"--{axis} {part.strip()[:40]!r} is no factor and no value; write one such as 1.5 or "
                            f"100{_UNITS[axis]}, several separated by commas.")
        factor = float(match.group(1)) * AXES[axis].get(unit, 1.0) / (own() if unit else 1.0)
        if not isfinite(factor) or not 1 / MOST <= factor <= MOST:
            raise PlanError(f"--{axis} {part.strip()} is {factor:g} times what {spec.name} has; give from {1 / MOST:g} "
                            f"to {MOST:g} times as much.")
        found.append(factor)
    return list(dict.fromkeys(found))
