"""Corrections of the formulas: factors on the time of a call's arithmetic and traffic, learned from measured steps.

    t = fixed · e^(Σ f) + overlap(compute · e^(Σ c), memory · g(Σ m))
    g(s) = e^s;  of products, where s > 0:  g(s) = 1 + r · (e^s − 1)

The traffic of a product beyond the memory's bandwidth is due to its multiprocessors: their loads, layout changes and
sums. So it shrinks on a device whose multiprocessors are faster relative to its memory: by r, which is 1 on the device
with most measured steps. The sums run over a call's classes (``call_classes``), its curves at its sizes, and the
device: its name, architecture and kind of memory. All numbers are kept by maker. In the fit
(``kernel_models.step_fit``) every number is pulled to zero, so that the data sheet holds where steps show nothing. Only
products have arithmetic to correct; curves are of arithmetic and traffic, and fixed costs of wide classes alone.
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
from kernel_models.heuristics.call_classes import Classes, grouped
from kernel_models.heuristics.work import CallTable, usable_cache_bytes
from kernel_models.op_call import PRODUCTS, Family, OpCall
from tracer.arrays import Float64

SHIPPED_FILE = Path(__file__).with_name("corrections.json.gz")
LARGEST = 2.5
"""Largest sum, as a logarithm: corrections do not replace the formulas."""
KNOTS = 48
"""Number of knots of a curve, one at each power of two: no call has more than 2⁴⁷ bytes."""
_PLACES = np.arange(KNOTS, dtype=np.float64)
PARTS = ("compute", "memory", "fixed")
THE_DEVICE = 6
"""Level of the corrections that all calls of one device share."""
BYTES_TO_CYCLES = 82 * 1.695 / 936
"""Cycles (10⁹/s, all multiprocessors together) for one GB/s of an RTX 3090. From its data sheet."""
_WIDE = 1
"""Classes up to this level have a fixed cost of their own."""


class Weight(NamedTuple):
    """One number of a correction: its name, how narrow its class or curve is, and whether it belongs to a curve."""

    name: str
    level: int
    is_curve: bool


class Traits(NamedTuple):
    """Traits of a device that determine its corrections: ``names`` are names and levels of the numbers that all calls
    on the device share."""

    maker: str
    architecture: str
    names: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Corrections:
    """Corrections of the formulas' times, as logarithms by name.

    Attributes:
        points: Numbers of classes and devices, by "part name".
        curves: Values at every power of two [``KNOTS``], by "part name".
        families: Families with measured calls; other families are not corrected, not even by the device's numbers.
        widths: By family, the standard deviation of the log error of all its calls of a step together.
        devices: Devices with measured steps.
        source: Source of the measured steps.
    """

    points: Mapping[str, float]
    curves: Mapping[str, Float64]
    families: frozenset[str] = frozenset()
    widths: Mapping[str, float] = field(default_factory=dict)
    devices: tuple[str, ...] = ()
    source: str = ""
    _known: dict[tuple[Traits, Classes], dict[str, tuple[float, list[tuple[int, Float64]]]]] = field(
        default_factory=dict, init=False, repr=False, compare=False)

    def sums(self, calls: Sequence[OpCall], device: DeviceSpec) -> tuple[Float64, Float64, Float64]:
        """Return the sums of every call's corrections, logarithms [n]: of its arithmetic, traffic and fixed cost."""
        found = {part: np.zeros(len(calls)) for part in PARTS}
        traits = traits_of(device)
        for group in grouped(calls, device):
            for part, (point, curves) in self._of_classes(group.classes, traits).items():
                total: Float64 = np.full(len(group.rows), point)
                for place, curve in curves:
                    total += np.interp(group.sizes[:, place], _PLACES, curve)
                found[part][group.rows] = np.clip(total, -LARGEST, LARGEST)
        return found["compute"], found["memory"], found["fixed"]

    def _of_classes(self, classes: Classes, traits: Traits) -> dict[str, tuple[float, list[tuple[int, Float64]]]]:
        """Return by part: the sum of these classes' numbers, and one curve over each size, cached.

        Curves over one size are linear between equal knots, so that their sum is one curve."""
        found = self._known.get((traits, classes))
        if found is None:
            found = {}
            for part in parts_of(classes.family) if classes.family.value in self.families else ():
                point = sum(self.points.get(f"{part} {weight.name}", 0.0)
                            for weight in plain_weights(classes, traits, part))
                curves: dict[int, Float64] = {}
                for name, place, _ in curves_of(classes, part):
                    curve = self.curves.get(f"{part} {traits.maker} {name}")
                    if curve is not None:
                        curves[place] = curves.get(place, 0.0) + curve
                found[part] = point, list(curves.items())
            self._known[traits, classes] = found
        return found

    def factors(self, table: CallTable, device: DeviceSpec) -> tuple[Float64, Float64, Float64]:
        """Return the factors on the time of every call's arithmetic, traffic and fixed cost [n]; the sums are cached
        for a device at any rates."""
        # These and the calls determine the sums. The value holds the corrections, so that their id stays unique.
        of = id(self), traits_of(device), device.vendor, tuple(device.matrix_tflops), usable_cache_bytes(device)
        _, (compute, memory, fixed) = table.once(("sums", of), lambda: (self, self.sums(table.calls, device)))
        excess: Float64 = np.full(len(table), excess_of(device) if table.family in PRODUCTS else 1.0)
        return np.exp(compute), traffic_factor(memory, excess)[0], np.exp(fixed)

    def of_family(self, family: Family, device: DeviceSpec) -> Corrections:
        """Return the corrections that calls of a family on a device use."""
        made = maker(device)
        # Some copies stream as element-wise kernels do.
        names = "(copy|elementwise)" if family is Family.COPY else family.value
        of_class = re.compile(rf"\w+ {made} {names}(?!\w)")
        of_device = re.compile(rf"\w+ {made} (memory|architecture|device|accumulation) [^/]*(/{names})?")

        def mine(name: str) -> bool:
            return of_class.match(name) is not None or of_device.fullmatch(name) is not None

        return replace(self, points={name: value for name, value in self.points.items() if mine(name)},
                       curves={name: curve for name, curve in self.curves.items() if mine(name)},
                       widths={name: width for name, width in self.widths.items() if name == family.value})

    def to_json(self) -> dict[str, Any]:
        """Return the corrections as plain values, without numbers below a thousandth."""
        curves = {name: [round(float(value), 3) for value in values] for name, values in self.curves.items()}
        return {"source": self.source, "devices": list(self.devices), "families": sorted(self.families),
                "widths": {name: round(value, 4) for name, value in self.widths.items()},
                "points": {name: round(value, 3) for name, value in self.points.items() if abs(value) >= 1e-3},
                "curves": {name: values for name, values in curves.items() if any(values)}}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Corrections:
        """Return the corrections that ``to_json`` stored.

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
        families = frozenset(map(str, values["families"]))
        return cls(points, curves, families, widths, tuple(map(str, values["devices"])), str(values["source"]))


def parts_of(family: Family) -> tuple[str, ...]:
    """Return the parts of a family's time that have corrections."""
    return PARTS if family in PRODUCTS else PARTS[1:]


def curves_of(classes: Classes, part: str) -> tuple[tuple[str, int, int], ...]:
    """Return the curves of a part; see ``Classes.curves``."""
    return () if part == "fixed" else classes.curves


def plain_weights(classes: Classes, traits: Traits, part: str) -> Iterator[Weight]:
    """Yield the numbers that calls with these classes share on a device."""
    for name, level in classes.names:
        if part == "fixed" and level > _WIDE:
            continue
        yield Weight(f"{traits.maker} {name}", level, False)
        if "aligned" in name:
            yield Weight(f"{traits.maker} {name} on {traits.architecture}", 3, False)
    for text, level in traits.names:
        yield Weight(f"{traits.maker} {text}", level, False)
        yield Weight(f"{traits.maker} {text}/{classes.family.value}", level, False)


def traits_of(device: DeviceSpec) -> Traits:
    """Return the traits of a device that determine its corrections."""
    names = [(f"memory {device.memory_kind[:4]}", 4), (f"architecture {device.architecture}", 5),
             (f"device {device.name}", THE_DEVICE)]
    if accumulates_at_half(device):
        names.append(("accumulation at half rate", 4))
    return Traits(maker(device), device.architecture, tuple(names))


def excess_of(device: DeviceSpec) -> float:
    """Return r in the module's g: multiprocessors' cycles per byte of memory traffic, an RTX 3090's over the device's.

    Chosen by measurement: with r a GPU left out of the fit is predicted within 12 to 13% instead of 13 to 18."""
    if device.vendor != "nvidia":
        return 1.0
    return BYTES_TO_CYCLES * device.memory_bandwidth_gbps / (device.sm_count * device.boost_clock_mhz / 1e3)


def traffic_factor(sums: Float64, excess: Float64) -> tuple[Float64, Float64]:
    """Return the factor on traffic, g of the sums (see the module), [n], and the derivative of its logarithm."""
    power = np.exp(sums)
    share = np.where(sums > 0, excess, 1.0)
    factor = 1.0 + share * (power - 1.0)
    return factor, share * power / factor


def maker(device: DeviceSpec) -> str:
    """Return the maker of a device's kernels: NVIDIA's are alike over architectures; only one of AMD's was measured."""
    return device.vendor if device.vendor == "nvidia" else f"{device.vendor}-{device.architecture}"


def accumulates_at_half(device: DeviceSpec) -> bool:
    """Return whether matrix units halve their rate for 16-bit products that are summed in fp32 (GeForce boards)."""
    half, byte = (device.matrix_tflops.get(dtype, 0.0) for dtype in ("fp16", "int8"))
    return device.vendor == "nvidia" and 0 < 3 * half < byte


@cache
def shipped_corrections() -> Corrections | None:
    """Return the corrections that come with foretrace; ``None`` where there are none."""
    if not SHIPPED_FILE.exists():
        return None
    return Corrections.from_json(msgspec.json.decode(gzip.decompress(SHIPPED_FILE.read_bytes())))
