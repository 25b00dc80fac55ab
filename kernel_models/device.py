"""Devices as data: one TOML file each under ``kernel_models/devices``, every figure with its source.

``device("h200-sxm")`` gives a ``DeviceSpec``; ``resolve_device("NVIDIA H100 80GB HBM3")`` finds the one that a trace or
a table of measurements reports. Rates are dense (without structured sparsity), bandwidths of links are one way.
A device is added by adding a file.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tracer.decode import DecodeError, from_toml
from tracer.errors import ForetraceError
from tracer.input_file import read_input

FOLDER = Path(__file__).resolve().parent / "devices"
MEMORY_TOLERANCE = 0.12
"""A device reports 1 to 9% less memory than is sold (ECC, reserved parts, GB read as GiB), or up to 8% more."""
VENDORS = ("nvidia", "amd", "host")
_GENERIC = re.compile(r"\b(nvidia|tesla|geforce|amd|instinct|gpu|graphics|corporation)\b")
_FALLBACK_DTYPES = {"fp4": "fp8", "fp8": "fp16", "bf16": "fp32", "fp16": "fp32", "complex128": "fp64"}
"""The next wider dtype, whose rate stands for one that a device lists no rate for; fp32 for those not here."""


class DeviceError(ForetraceError):
    """No device goes by that name, or a device's file is broken."""


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """A device's published figures.

    Attributes:
        name: by which commands know it.
        vendor: "nvidia", "amd" or "host".
        architecture: such as "hopper"; constants no data sheet gives are kept by architecture.
        compute_capability: as CUDA or HIP reports it.
        reported_names: names that traces and tables report.
        short_names: names that people write; several devices may share one.
        default_for: short names that mean this device when nothing else tells them apart.
        placeholder: whether the figures only stand in for a calibration (``cpu``).
        sm_count: streaming multiprocessors, compute units or cores.
        boost_clock_mhz: at which the peak rates are counted.
        shared_memory_per_sm_kb, registers_per_sm_kb: KiB.
        power_w: board power limit.
        memory_kind, memory_gb, memory_bandwidth_gbps: "HBM3", 10⁹ bytes, 10⁹ bytes/s read and written together.
        l2_mb: last cache shared by all units, MiB; ``l3_mb`` a cache behind it (AMD's Infinity Cache), 0 for none.
        matrix_tflops: peak of the matrix (tensor) units, 10¹² operations/s by dtype; empty without such units.
        vector_tflops: peak of the other units.
        pcie_generation, pcie_width: 0 where the host is reached otherwise.
        host_gbps, peer_gbps: to the host and to the other devices of its node together, one way, 10⁹ bytes/s.
        kernel_floor_us: a kernel that does next to nothing; launch_latency_us: launch call to start on an idle device.
        sources: the source of each figure, by "table.key" of the file.
    """

    name: str
    vendor: str
    architecture: str
    compute_capability: str
    reported_names: tuple[str, ...]
    short_names: tuple[str, ...]
    default_for: tuple[str, ...]
    placeholder: bool
    sm_count: int
    boost_clock_mhz: float
    shared_memory_per_sm_kb: float
    registers_per_sm_kb: float
    power_w: float
    memory_kind: str
    memory_gb: float
    memory_bandwidth_gbps: float
    l2_mb: float
    l3_mb: float
    matrix_tflops: Mapping[str, float]
    vector_tflops: Mapping[str, float]
    pcie_generation: int
    pcie_width: int
    host_gbps: float
    peer_gbps: float
    kernel_floor_us: float
    launch_latency_us: float
    sources: Mapping[str, str]

    def peak_tflops(self, dtype: str, *, matrix: bool = False) -> float:
        """Peak rate of a dtype, 10¹² operations/s, dense.

        ``matrix`` asks for the matrix units; where they do not compute that dtype the other units do. A dtype without
        a rate of its own takes the next wider one's (fp8 on an A100 is computed as fp16), integers fp32's.
        """
        for _ in range(len(_FALLBACK_DTYPES) + 1):
            rates = [rate for rate in (self.matrix_tflops.get(dtype) if matrix else None,
                                       self.vector_tflops.get(dtype)) if rate]
            if rates:
                return max(rates)
            dtype = _FALLBACK_DTYPES.get(dtype, "fp32")
        raise DeviceError(f"{self.name} lists no fp32 rate; complete its file.")

    def to_json(self) -> dict[str, Any]:
        """Plain values, for a profile of a device whose figures were measured; see ``from_json``."""
        found = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: dict(value) if isinstance(value, Mapping) else list(value) if isinstance(value, tuple) else value
                for name, value in found.items()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> DeviceSpec:
        """The device of ``to_json``.

        Raises:
            DeviceError: a figure is missing, of another type, or out of range.
        """
        found: dict[str, Any] = {}
        try:
            for one in fields(cls):
                value, kind = values[one.name], str(one.type)
                if kind.startswith("Mapping[str, float]"):
                    value = MappingProxyType({str(key): _figure(one.name, rate) for key, rate in value.items()})
                elif kind.startswith("Mapping"):
                    value = MappingProxyType({str(key): str(text) for key, text in value.items()})
                elif kind.startswith("tuple"):
                    value = tuple(map(str, value))
                elif kind == "float":
                    value = _figure(one.name, value)
                elif kind == "int":
                    value = int(_figure(one.name, value))
                elif type(value).__name__ != kind:
                    raise TypeError(f"{one.name} is a {type(value).__name__}")
                found[one.name] = value
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            raise DeviceError(f"The stored device is not complete: {type(error).__name__}: {error}.") from None
        return cls(**found)

    def features(self) -> dict[str, float]:
        """The figures as numbers for models that learn across devices; rates in 10¹²/s, sizes in the units above."""
        return {
            "sm_count": self.sm_count, "boost_clock_mhz": self.boost_clock_mhz,
            "shared_memory_per_sm_kb": self.shared_memory_per_sm_kb, "registers_per_sm_kb": self.registers_per_sm_kb,
            "power_w": self.power_w, "memory_gb": self.memory_gb, "memory_bandwidth_gbps": self.memory_bandwidth_gbps,
            "l2_mb": self.l2_mb, "l3_mb": self.l3_mb, "kernel_floor_us": self.kernel_floor_us,
            **{f"vector_{d}_tflops": self.peak_tflops(d) for d in ("fp64", "fp32", "fp16", "bf16")},
            **{f"matrix_{d}_tflops": self.peak_tflops(d, matrix=True)
               for d in ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "int8")},
        }


def device_names() -> list[str]:
    """Names of all devices, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


@cache
def device(name: str) -> DeviceSpec:
    """The device of a name (see ``device_names``; case does not matter).

    Raises:
        DeviceError: No device has that name; the error lists near ones.
    """
    path = FOLDER / f"{name.lower()}.toml"
    if not re.fullmatch(r"[a-z0-9-]+", name.lower()) or not path.is_file():
        raise DeviceError(f"There is no device named {name!r}; {_near(name)}")
    return read_device(path)


def resolve_device(reported_name: str, memory_bytes: int | None = None, sm_count: int | None = None) -> DeviceSpec:
    """The device that a trace or table reports, such as "NVIDIA A100-SXM4-80GB".

    Where a name fits several devices ("A100"), memory and unit count narrow them down, to those of the nearest memory;
    of several left, a short name means the device whose file says so. An empty name is resolved where memory and unit
    count fit one device only.

    Args:
        reported_name: As the driver reports it, a name of ours, or a short one.
        memory_bytes: Reported memory; ``None`` or negative where unknown.
        sm_count: Reported multiprocessors or compute units; likewise.

    Raises:
        DeviceError: No device fits, or several do; the error lists them.
    """
    wanted = _plain(reported_name)
    every = [device(name) for name in device_names()]
    if wanted:
        matches = [spec for spec in every if wanted in {_plain(n) for n in (spec.name, *spec.reported_names)}]
        matches = matches or [spec for spec in every if wanted in {_plain(n) for n in spec.short_names}]
    else:
        known = (memory_bytes or 0) > 0 and (sm_count or 0) > 0
        matches = [spec for spec in every if known and spec.vendor != "host"]
    if not matches:
        raise DeviceError(f"No known device is reported as {reported_name!r}; {_near(reported_name)}")
    fitting = _nearest([spec for spec in matches if _fits(spec, memory_bytes, sm_count)], memory_bytes)
    if len(fitting) > 1:
        fitting = [spec for spec in fitting if wanted in {_plain(n) for n in spec.default_for}] or fitting
    if len(fitting) == 1:
        return fitting[0]
    if len(matches) == 1:
        # A partition or a virtual device may report less than the whole; its name decides.
        return matches[0]
    names = ", ".join(spec.name for spec in fitting or matches)
    if not wanted:
        raise DeviceError(f"The device has no name, and its memory and unit count fit {'several' if fitting else 'no'} "
                          f"known device{'s: ' + names if fitting else ''}; name it with --device.")
    raise DeviceError(f"{reported_name!r} may be any of {names}; name one of them.")


def read_device(path: Path) -> DeviceSpec:
    """Read one device's file.

    Raises:
        DeviceError: A figure is missing, no number, or without a known source.
    """
    try:
        data = from_toml(read_input(path))
    except OSError as error:
        raise DeviceError(f"{path} cannot be read as a device ({error.strerror}); check the path.") from None
    except DecodeError as error:
        raise DeviceError(f"{path.name} cannot be read as a device: {error}.") from None
    try:
        return _checked(_spec(data))
    except KeyError as error:
        raise DeviceError(f"{path.name} is no complete device: it lacks {error}; compare it with a shipped one "
                          "(foretrace devices h200-sxm --toml).") from None
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        raise DeviceError(f"{path.name} is no complete device: {error}; compare it with a shipped one (foretrace "
                          "devices h200-sxm --toml).") from None


_FIGURES = frozenset((
    "compute.sm_count", "compute.boost_clock_mhz", "compute.shared_memory_per_sm_kb", "compute.registers_per_sm_kb",
    "compute.power_w", "memory.capacity_gb", "memory.bandwidth_gbps", "memory.l2_mb", "memory.l3_mb",
    "links.pcie_generation", "links.pcie_width", "links.host_gbps", "links.peer_gbps", "launch.kernel_floor_us",
    "launch.latency_us"))


def _spec(data: dict[str, Any]) -> DeviceSpec:
    sources: dict[str, str] = {}

    def figures(table: str) -> dict[str, float]:
        found = {}
        for key, entry in data[table].items():
            if not isinstance(entry, dict):
                continue
            value = float(entry["value"])
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"{table}.{key} is {value}")
            found[key] = value
            sources[f"{table}.{key}"] = data["sources"][entry["source"]]
            if not table.endswith("_tflops") and f"{table}.{key}" not in _FIGURES:
                raise ValueError(f"{table}.{key} is no figure of a device")
        return found

    compute, memory, links, launch = (figures(table) for table in ("compute", "memory", "links", "launch"))
    return DeviceSpec(
        name=data["name"], vendor=_lower(data["vendor"]), architecture=_lower(data["architecture"]),
        compute_capability=data["compute_capability"], reported_names=tuple(data["reported_names"]),
        short_names=tuple(data["short_names"]), default_for=tuple(data.get("default_for", ())),
        placeholder=bool(data.get("placeholder", False)),
        sm_count=int(compute["sm_count"]), boost_clock_mhz=compute["boost_clock_mhz"],
        shared_memory_per_sm_kb=compute["shared_memory_per_sm_kb"],
        registers_per_sm_kb=compute["registers_per_sm_kb"], power_w=compute["power_w"],
        memory_kind=data["memory"]["kind"], memory_gb=memory["capacity_gb"],
        memory_bandwidth_gbps=memory["bandwidth_gbps"], l2_mb=memory["l2_mb"], l3_mb=memory.get("l3_mb", 0.0),
        matrix_tflops=MappingProxyType(figures("matrix_tflops")),
        vector_tflops=MappingProxyType(figures("vector_tflops")),
        pcie_generation=int(links["pcie_generation"]), pcie_width=int(links["pcie_width"]),
        host_gbps=links["host_gbps"], peer_gbps=links["peer_gbps"],
        kernel_floor_us=launch["kernel_floor_us"], launch_latency_us=launch["latency_us"],
        sources=MappingProxyType(sources))


def _lower(name: Any) -> Any:
    return name.lower() if isinstance(name, str) else name


def _checked(spec: DeviceSpec) -> DeviceSpec:
    """The device, whose texts are texts and whose figures can be divided by. Raises ``ValueError``."""
    for name in ("name", "vendor", "architecture", "compute_capability", "memory_kind"):
        if not isinstance(getattr(spec, name), str):
            raise ValueError(f"its {name} is no text")
    if spec.vendor not in VENDORS:
        raise ValueError(f"its vendor is {spec.vendor!r}; known are {', '.join(VENDORS)} (a CPU)")
    for texts in (spec.reported_names, spec.short_names, spec.default_for, spec.sources.values()):
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("one of its names or sources is no text")
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", spec.name):
        raise ValueError("its name has other characters than a-z, 0-9 and -")
    for name in ("sm_count", "boost_clock_mhz", "shared_memory_per_sm_kb", "registers_per_sm_kb", "memory_gb",
                 "memory_bandwidth_gbps", "l2_mb", "kernel_floor_us"):
        if not getattr(spec, name) > 0:
            raise ValueError(f"its {name} is not above 0")
    rates = [*spec.matrix_tflops.values(), *spec.vector_tflops.values()]
    if not spec.vector_tflops.get("fp32") or min(rates) <= 0:
        raise ValueError("a rate is not above 0, or that of fp32 is missing in vector_tflops")
    return spec


def _figure(name: str, value: Any) -> float:
    number = float(value)
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"{name} is {value}")
    return number


def _plain(name: str) -> str:
    """Lower case without vendors and punctuation: "Tesla V100-SXM2-16GB" → "v100sxm216gb"."""
    return re.sub(r"[^a-z0-9]", "", _GENERIC.sub(" ", name.lower()))


def _fits(spec: DeviceSpec, memory_bytes: int | None, sm_count: int | None) -> bool:
    if memory_bytes and memory_bytes > 0 and abs(memory_bytes / (spec.memory_gb * 1e9) - 1) > MEMORY_TOLERANCE:
        return False
    return not (sm_count and sm_count > 0) or sm_count == spec.sm_count


def _nearest(specs: list[DeviceSpec], memory_bytes: int | None) -> list[DeviceSpec]:
    """Those whose memory is nearest to what is reported, by its ratio; all where none is."""
    if not memory_bytes or memory_bytes <= 0:
        return specs
    away = [abs(math.log(memory_bytes / (spec.memory_gb * 1e9))) for spec in specs]
    return [spec for spec, distance in zip(specs, away, strict=True) if distance <= min(away)]


def _near(name: str) -> str:
    names = device_names()
    spelled = {_plain(name): name for name in names}
    for spec in map(device, names):
        spelled.update({_plain(n): spec.name for n in (*spec.reported_names, *spec.short_names)})
    close = difflib.get_close_matches(_plain(name), list(spelled), n=8, cutoff=0.5)
    near = list(dict.fromkeys(spelled[c] for c in close))
    return f"did you mean {' or '.join(near[:3])}?" if near else f"known devices: {', '.join(names)}."
