"""Corrections of the formulas: factors on the time of a call's arithmetic and traffic, learned from measured steps.

    t = fixed · e^(Σ f) + overlap(compute · e^(Σ c), memory · e^(Σ m))

The sums run over a call's classes (``call_classes``), its curves at its sizes, and the device: its name, architecture
and kind of memory. All are a maker's. Every number was held near zero when it was fitted
(``kernel_models.step_fit``), so that what steps say nothing of stays as the data sheet has it. Only products have
arithmetic to correct; curves are of arithmetic and traffic, and fixed costs are of wide classes alone.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from kernel_models.device import DeviceSpec
from kernel_models.heuristics.call_classes import PRODUCTS, Grouped, grouped
from kernel_models.op_call import Family, OpCall
from tracer.arrays import Float64

SHIPPED_FILE = Path(__file__).with_name("corrections.json.gz")
LARGEST = 2.5
"""Largest sum, as a logarithm: corrections are no models of their own."""
KNOTS = 48
"""Powers of two of a curve."""
PARTS = ("compute", "memory", "fixed")
_WIDE = 1
"""Classes up to this level have a fixed cost of their own."""


class Weight(NamedTuple):
    """One number of a correction: its name, how narrow what it is for is, and whether it is a curve's."""

    name: str
    level: int
    is_curve: bool


@dataclass(frozen=True)
class Corrections:
    """Numbers by name.

    Attributes:
        points: by "part name", of classes and devices.
        curves: by "part name", at every power of two [``KNOTS``].
        widths: by family, the standard deviation of the log of what all its calls of a step together are off.
        devices: whose steps they were fitted to.
        source: what they were fitted to.
    """

    points: Mapping[str, float]
    curves: Mapping[str, Float64]
    widths: Mapping[str, float] = field(default_factory=dict)
    devices: tuple[str, ...] = ()
    source: str = ""

    def sums(self, calls: Sequence[OpCall], device: DeviceSpec) -> tuple[Float64, Float64, Float64]:
        """The sums of every call, logarithms [n]: of its arithmetic, its traffic and its fixed cost."""
        found = {part: np.zeros(len(calls)) for part in PARTS}
        for group in grouped(calls, device):
            family = calls[int(group.rows[0])].family
            for part in parts_of(family):
                total: Float64 = np.full(len(group.rows), sum(
                    self.points.get(f"{part} {weight.name}", 0.0)
                    for weight in plain_weights(group, family, device, part)))
                for name, place, _ in curves_of(group, part):
                    curve = self.curves.get(f"{part} {maker(device)} {name}")
                    if curve is not None:
                        total += np.interp(group.sizes[:, place], np.arange(KNOTS), curve)
                found[part][group.rows] = np.clip(total, -LARGEST, LARGEST)
        return found["compute"], found["memory"], found["fixed"]

    def of_family(self, family: Family, device: DeviceSpec) -> Corrections:
        """Those that calls of a family on a device use."""
        made = maker(device)
        of_class = re.compile(rf"\w+ {made} {family.value}(?!\w)")
        of_device = re.compile(rf"\w+ {made} (memory|architecture|device|accumulation) [^/]*(/{family.value})?")

        def mine(name: str) -> bool:
            return of_class.match(name) is not None or of_device.fullmatch(name) is not None

        return replace(self, points={name: value for name, value in self.points.items() if mine(name)},
                       curves={name: curve for name, curve in self.curves.items() if mine(name)},
                       widths={name: width for name, width in self.widths.items() if name == family.value})

    def to_json(self) -> dict[str, Any]:
        """Plain values; numbers below a thousandth are left out."""
        curves = {name: [round(float(value), 3) for value in values] for name, values in self.curves.items()}
        return {"source": self.source, "devices": list(self.devices),
                "widths": {name: round(value, 4) for name, value in self.widths.items()},
                "points": {name: round(value, 3) for name, value in self.points.items() if abs(value) >= 1e-3},
                "curves": {name: values for name, values in curves.items() if any(values)}}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Corrections:
        """Back from ``to_json``.

        Raises:
            KeyError, TypeError, ValueError: the values are not of this form.
        """
        points = {str(name): float(value) for name, value in values["points"].items()}
        table: Float64 = np.asarray(list(values["curves"].values()), np.float64).reshape(-1, KNOTS)
        curves = {str(name): curve for name, curve in zip(values["curves"], table, strict=True)}
        widths = {str(name): float(value) for name, value in values["widths"].items()}
        numbers = np.array([*points.values(), *widths.values()], np.float64)
        if not (np.isfinite(table).all() and np.isfinite(numbers).all()) or min(widths.values(), default=0) < 0:
            raise ValueError("a correction is out of range")
        return cls(points, curves, widths, tuple(map(str, values["devices"])), str(values["source"]))


def parts_of(family: Family) -> tuple[str, ...]:
    """Which sums a family's calls have."""
    return PARTS if family in PRODUCTS else PARTS[1:]


def curves_of(group: Grouped, part: str) -> tuple[tuple[str, int, int], ...]:
    """The curves of a sum; see ``Classes.curves``."""
    return () if part == "fixed" else group.classes.curves


def plain_weights(group: Grouped, family: Family, device: DeviceSpec, part: str) -> Iterator[Weight]:
    """The numbers that calls of the same classes share on a device."""
    for name, level in group.classes.names:
        if part == "fixed" and level > _WIDE:
            continue
        yield Weight(f"{maker(device)} {name}", level, False)
        if "aligned" in name:
            yield Weight(f"{maker(device)} {name} on {device.architecture}", 3, False)
    of_device = [(f"memory {device.memory_kind[:4]}", 4), (f"architecture {device.architecture}", 5),
                 (f"device {device.name}", 6)]
    if accumulates_at_half(device):
        of_device.append(("accumulation at half rate", 4))
    for text, level in of_device:
        yield Weight(f"{maker(device)} {text}", level, False)
        yield Weight(f"{maker(device)} {text}/{family.value}", level, False)


def maker(device: DeviceSpec) -> str:
    """Whose kernels run on a device: NVIDIA's are alike over architectures; of AMD's only one was measured."""
    return device.vendor if device.vendor == "nvidia" else f"{device.vendor}-{device.architecture}"


def accumulates_at_half(device: DeviceSpec) -> bool:
    """Return whether matrix units halve their rate where 16-bit products are summed up in fp32 (GeForce boards)."""
    half, byte = (device.matrix_tflops.get(dtype, 0.0) for dtype in ("fp16", "int8"))
    return device.vendor == "nvidia" and 0 < 3 * half < byte


@cache
def shipped_corrections() -> Corrections | None:
    """The corrections that come with foretrace; ``None`` where there are none."""
    if not SHIPPED_FILE.exists():
        return None
    return Corrections.from_json(msgspec.json.decode(gzip.decompress(SHIPPED_FILE.read_bytes())))
