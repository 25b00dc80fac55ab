"""Devices as data: one TOML file each under ``tracer/devices``, every figure with its source.

``device("h200-sxm")`` gives a ``DeviceSpec``; ``resolve_device("NVIDIA H100 80GB HBM3")`` finds the device by the name
in a trace or a table of measurements. Rates are dense (without structured sparsity), bandwidths of links are one way.
To add a device, add a file.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

from kernel_models.device_figures import FIGURES, check_texts, figures_in
from kernel_models.sourced_figures import number_of, shown
from tracer.errors import ForetraceError, cut_text
from tracer.input_file import DecodeError, from_toml, read_input, why_unopened
from tracer.shape_only.devices import FOLDER, TracedDevice, device_names

OWN = ".toml"
"""Ending that marks a name as a TOML file of the user's own, in the format of ``tracer/devices``."""
MEMORY_TOLERANCE = 0.12
"""Tolerance of reported memory: 1 to 9% less than is sold (ECC, reserved parts, GB read as GiB), or up to 8% more."""
_PUNCTUATION = bytes(set(range(256)) - set(b"abcdefghijklmnopqrstuvwxyz0123456789"))
_SHOWN = 60  # chosen: most characters of a name inside an error's sentence
_GENERIC = re.compile(r"\b(nvidia|tesla|geforce|amd|instinct|gpu|graphics|corporation)\b")
REPORTED = "reported by the device's driver"
"""The source of a figure of a device that no file describes."""
_MAKERS = {"amd": re.compile(r"\b(AMD|Radeon|Instinct)\b", re.IGNORECASE),
           "nvidia": re.compile(r"\b(NVIDIA|Tesla|GeForce|Quadro|TITAN|GRID)\b", re.IGNORECASE)}
_MIG = re.compile(r"(?P<whole>.+?)[ -]MIG[ -]((?P<compute>[1-7])c[.-])?(?P<slices>[1-7])g[.-](?P<gb>\d{1,3})gb"
                  r"(\+me(\.all)?|\+gfx|-me)?", re.IGNORECASE)
_PARTITION = re.compile(r"(?P<whole>.+?)[ -](?P<mode>[DTQC]PX)", re.IGNORECASE)
UNITS_OF_A_DIE = {"cdna3": 38, "cdna4": 32}
"""Compute units of an accelerator die (AMD CDNA 3 and CDNA 4 white papers); a partition consists of whole dies."""
PARTITIONS = {"DPX": 2, "TPX": 3, "QPX": 4}
"""Parts into which a mode divides a device (AMD SMI reference, compute partitions); CPX makes each die a part."""
ATTRIBUTES = {"memory.capacity_gb": "memory_gb", "memory.bandwidth_gbps": "memory_bandwidth_gbps",
              "launch.latency_us": "launch_latency_us"}
"""Attributes of ``DeviceSpec`` whose names differ from the figure's key in the file."""
_AS_ALIKE = {"compute.shared_memory_per_sm_kb", "compute.registers_per_sm_kb", "links.pcie_generation",
             "links.pcie_width", "links.host_gbps", "launch.kernel_floor_us", "launch.latency_us"}
"""Figures that an unknown device copies from the known device most similar to it."""
MIG_GB = {
    "a30": 24, "a100-pcie-40g": 40, "a100-sxm-40g": 40,
    **dict.fromkeys(("a100-pcie-80g", "a100-sxm-80g", "a800-pcie-80g", "a800-sxm-80g", "h100-pcie", "h100-sxm",
                     "h800"), 80),
    "h100-nvl": 94, "gh200-96g": 96, "h20": 96, "h200-sxm": 141, "h200-nvl": 141, "h20-3e": 141, "gh200-144g": 144,
    "b200": 180, "gb200": 186, "b300": 269, "gb300": 278,
    "rtx-pro-6000": 96, "rtx-pro-6000-max-q": 96, "rtx-pro-6000-server": 96}
"""Devices that MIG divides, and the GB that the names of their profiles divide (NVIDIA MIG user guide, supported GPUs
and profiles; drivers' lists for B300 and GB300; A800, H800 and H20-3e as their chips)."""
MIG_EIGHTHS = {1: (1, 2), 2: (2,), 3: (4,), 4: (4,), 7: (8,)}
"""Eighths of the memory that an instance may have, by its slices, on devices of seven slices (MIG user guide)."""
MIG_COMPUTE = {2: (1,), 3: (1, 2), 4: (1, 2), 7: (1, 2, 3, 4)}
"""Possible slices of a compute instance, by the slices of the larger instance around it (``nvidia-smi mig -lcip``)."""
MIG_ROUNDING = 0.04
"""Tolerance of the GB in a profile's name: names are whole GB, and drivers differ (1g.23gb and 1g.24gb on a GB200)."""
MIG_UNITS = {"ampere": {1: 14, 2: 28, 3: 42, 4: 56, 7: 98}, "hopper": {1: 16, 2: 32, 3: 60, 4: 64, 7: 132}}
"""Multiprocessors of an instance by architecture and slices, as ``nvidia-smi mig -lgip`` lists them. Other
architectures take the slices' share of the device's multiprocessors."""
_FALLBACK_DTYPES = {"fp4": "fp8", "fp8": "fp16", "bf16": "fp32", "fp16": "fp32", "complex128": "fp64"}
"""The next wider dtype, whose rate replaces a rate that a device does not list; dtypes missing here take fp32's."""


class DeviceError(ForetraceError):
    """No device has that name, or a device's file is broken."""


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """A device's published figures.

    Attributes:
        name: Name that commands accept.
        vendor: "nvidia", "amd" or "host".
        architecture: Such as "hopper". Constants that no data sheet gives are kept by architecture.
        compute_capability: As CUDA or HIP reports it.
        reported_names: Names that traces and tables report.
        short_names: Names that people write; several devices may share one.
        default_for: Short names that mean this device when nothing else distinguishes the candidates.
        placeholder: Whether the figures only replace a missing calibration (``cpu``).
        sm_count: Streaming multiprocessors, compute units or cores.
        boost_clock_mhz: Clock at which the peak rates are counted.
        shared_memory_per_sm_kb, registers_per_sm_kb: KiB.
        power_w: Board power limit.
        memory_kind, memory_gb, memory_bandwidth_gbps: "HBM3", 10⁹ bytes, 10⁹ bytes/s of reads plus writes.
        l2_mb: Last cache shared by all units, MiB; ``l3_mb`` a cache behind it (AMD's Infinity Cache), 0 for none.
        matrix_tflops: Peak of the matrix (tensor) units, 10¹² operations/s by dtype; empty without such units.
        vector_tflops: Peak of the other units, 10¹² operations/s by dtype.
        pcie_generation, pcie_width: 0 where another link connects the host.
        host_gbps, peer_gbps: Bandwidth to the host, and to all other devices of the node in sum, one way, 10⁹ bytes/s.
        kernel_floor_us: Time of an almost empty kernel; launch_latency_us: from launch call to start on an idle device.
        sources: The source of each figure, by "table.key" of the file.
        note: Sentence for predictions that says where the figures come from if not from a data sheet.
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
    note: str = ""

    def peak_tflops(self, dtype: str, *, matrix: bool = False) -> float:
        """Return the peak rate of a dtype, 10¹² operations/s, dense.

        ``matrix`` asks for the matrix units; for a dtype that they do not compute the other units' rate is returned. A
        dtype without a rate takes the next wider dtype's (fp8 on an A100 is computed as fp16), integers fp32's.
        """
        for _ in range(len(_FALLBACK_DTYPES) + 1):
            rates = [rate for rate in (self.matrix_tflops.get(dtype) if matrix else None,
                                       self.vector_tflops.get(dtype)) if rate]
            if rates:
                return max(rates)
            dtype = _FALLBACK_DTYPES.get(dtype, "fp32")
        raise DeviceError(f"{self.name} lists no fp32 rate; complete its file.")

    def to_json(self) -> dict[str, Any]:
        """Return the figures as JSON values, for the profile of a measured device; ``from_json`` reads them."""
        found = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: dict(value) if isinstance(value, Mapping) else list(value) if isinstance(value, tuple) else value
                for name, value in found.items()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> DeviceSpec:
        """Return the device that ``to_json`` stored.

        Raises:
            DeviceError: a figure is missing, of another type, or out of range.
        """
        found: dict[str, Any] = {}
        try:
            for one in fields(cls):
                value = values[one.name] if one.default is MISSING else values.get(one.name, one.default)
                kind = str(one.type)
                if kind.startswith("Mapping[str, float]"):
                    value = MappingProxyType({str(key): _figure(one.name, rate) for key, rate in value.items()})
                elif kind.startswith("Mapping"):
                    value = MappingProxyType({str(key): str(text) for key, text in value.items()})
                elif kind.startswith("tuple"):
                    value = tuple(map(str, value))
                elif kind == "float":
                    value = _figure(one.name, value)
                elif kind == "int":
                    value = _count(one.name, value)
                elif type(value).__name__ != kind:
                    raise TypeError(f"{one.name} is a {type(value).__name__}")
                found[one.name] = value
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            raise DeviceError(f"The stored device is not complete: {type(error).__name__}: {error}.") from None
        return cls(**found)

    def features(self) -> dict[str, float]:
        """Return the figures as numbers for models that learn across devices; units as in ``DeviceSpec``."""
        return {
            "sm_count": self.sm_count, "boost_clock_mhz": self.boost_clock_mhz,
            "shared_memory_per_sm_kb": self.shared_memory_per_sm_kb, "registers_per_sm_kb": self.registers_per_sm_kb,
            "power_w": self.power_w, "memory_gb": self.memory_gb, "memory_bandwidth_gbps": self.memory_bandwidth_gbps,
            "l2_mb": self.l2_mb, "l3_mb": self.l3_mb, "kernel_floor_us": self.kernel_floor_us,
            **{f"vector_{d}_tflops": self.peak_tflops(d) for d in ("fp64", "fp32", "fp16", "bf16")},
            **{f"matrix_{d}_tflops": self.peak_tflops(d, matrix=True)
               for d in ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "int8")},
        }


@cache
def device(name: str) -> DeviceSpec:
    """Return the device with this name, one of ``device_names``; case does not matter.

    Raises:
        DeviceError: No device has that name; the error lists similar names.
    """
    if name.lower() not in device_names():
        raise DeviceError(f"There is no device named {cut_text(name, _SHOWN)!r}; {_near(name)}")
    return read_device(FOLDER / f"{name.lower()}.toml")


def resolve_device(reported_name: str, memory_bytes: int | None = None, sm_count: int | None = None) -> DeviceSpec:
    """Return the device that a trace or table reports, such as "NVIDIA A100-SXM4-80GB".

    Where a name fits several devices ("A100"), the nearest memory and the unit count narrow the choice; then a short
    name means the device that lists it in ``default_for``. An empty name is resolved where memory and unit count fit
    one device only, apart from export variants. A MIG name ("… MIG 3g.40gb") is a slice of the device named first.
    AMD's compute partition is a slice too: by its mode ("… CPX"), or by a unit count of some whole dies.

    Args:
        reported_name: The driver's name, foretrace's name, or a short name.
        memory_bytes: Reported memory; ``None`` or negative where unknown.
        sm_count: Reported multiprocessors or compute units; ``None`` or negative where unknown.

    Raises:
        DeviceError: No device fits, or several do; the error lists them.
    """
    if (sliced := _MIG.fullmatch(reported_name.strip())) is not None:
        return _mig_slice(sliced["whole"], int(sliced["compute"] or 0), int(sliced["slices"]), int(sliced["gb"]),
                          memory_bytes, sm_count)
    if (part := _PARTITION.fullmatch(reported_name.strip())) is not None:
        whole, mode = resolve_device(part["whole"]), part["mode"].upper()
        if mode in _amd_partitions(whole):
            return _amd_partition(whole, mode, memory_bytes)
    wanted = _plain(reported_name)
    known = bool(wanted) or ((memory_bytes or 0) > 0 and (sm_count or 0) > 0)
    matches = _named(wanted) if known else []
    if not matches:
        raise DeviceError(f"No known device is reported as {cut_text(reported_name, _SHOWN)!r}; "
                          f"{_near(reported_name)} A TOML file describes another one (foretrace devices NAME --toml "
                          "prints one to change).")
    fitting = _nearest([spec for spec in matches if _fits(spec, memory_bytes, sm_count)], memory_bytes)
    if len(fitting) > 1:
        fitting = [spec for spec in fitting
                   if (wanted in {_plain(n) for n in spec.default_for} if wanted else spec.default_for)] or fitting
    if len(fitting) == 1:
        return fitting[0]
    if len(matches) == 1:
        for mode, units in _amd_partitions(matches[0]).items():
            if units == sm_count:
                return _amd_partition(matches[0], mode, memory_bytes)
        # A virtual device may report fewer units than the whole: its name decides. More units mean another device.
        whole = matches[0]
        if 0 < (sm_count or whole.sm_count) < whole.sm_count:
            return replace(whole, note=f"{reported_name} reports {sm_count} of the {whole.sm_count} units of "
                                       f"{whole.name} (a virtual device, or a share set by MPS): its figures are those "
                                       "of the whole.")
        if (sm_count or 0) <= whole.sm_count:
            return whole
        raise DeviceError(f"The known {reported_name!r} has {matches[0].sm_count} units, and this one {sm_count}.")
    names = ", ".join(spec.name for spec in fitting or matches)
    if not wanted:
        raise DeviceError(f"The device has no name, and its memory and unit count fit {'several' if fitting else 'no'} "
                          f"known device{'s: ' + names if fitting else ''}; name it with --device.")
    raise DeviceError(f"{reported_name!r} may be any of {names}; name one of them.")


def _named(wanted: str) -> list[DeviceSpec]:
    """Return the devices that have a plain name (``_plain``); for an empty name all devices except CPUs."""
    # A file is decoded only where its text has the name: decoding all files would take most of the time.
    every = [device(name) for name, text in _plain_files() if wanted in text]
    if not wanted:
        return [spec for spec in every if spec.vendor != "host"]
    matches = [spec for spec in every if wanted in {_plain(n) for n in (spec.name, *spec.reported_names)}]
    return matches or [spec for spec in every if wanted in {_plain(n) for n in spec.short_names}]


@cache
def _plain_files() -> tuple[tuple[str, str], ...]:
    """Return each device file's name, without its ending, and its text as a plain name (``_plain``)."""
    return tuple((path.stem, _plain(path.read_text(encoding="utf-8"))) for path in sorted(FOLDER.glob("*.toml")))


def reported_figure(hardware: Mapping[str, Any], key: str) -> float | None:
    """Return a figure that a device's driver reported; ``None`` where it is missing. Raises ``DeviceError``: the
    recorded value is no number."""
    value = hardware.get(key)
    try:
        number = None if value is None else number_of(value)
    except (TypeError, OverflowError):
        number = math.nan
    if number is not None and not math.isfinite(number):
        raise DeviceError(f"{hardware.get('device') or 'The device'} is recorded with {key} {shown(value)}, where a "
                          "number belongs: the record was changed or damaged, so measure again.")
    return number


def unknown_device(reported_name: str, memory_bytes: int | None, sm_count: int | None, compute_capability: str = "", *,
                   l2_mb: float | None = None, clock_mhz: float | None = None, bandwidth_gbps: float | None = None,
                   ) -> DeviceSpec:
    """Return a placeholder for a GPU that no file describes, from what its driver reports; its intervals are wide.

    A figure that the driver does not report is the median per unit (rates: per unit and clock) of known devices: of the
    same compute capability, else generation, else maker. Each shipped device was predicted in this way without its own
    file. 80% of bandwidths lie within a factor of 1.35, fp16 matrix rates within 2.0 (GeForce boards have half), fp32
    rates within 1.12. All with matrix units are within ``PLACEHOLDER_DEVICE``.

    Args:
        reported_name: As the driver reports it; the name shows the maker.
        memory_bytes: Reported memory; ``None`` or negative where unknown, as for the arguments below.
        sm_count: Reported multiprocessors or compute units.
        compute_capability: As the driver reports it, empty where unknown.
        l2_mb: Last cache, MiB.
        clock_mhz: Highest clock.
        bandwidth_gbps: Memory bandwidth, 10⁹ bytes/s.

    Raises:
        DeviceError: The number of units is unknown, or the name shows no known maker.
    """
    vendor = next((maker for maker, names in _MAKERS.items() if names.search(reported_name)), None)
    if vendor is None or (sm_count or 0) <= 0 or sm_count is None:
        raise DeviceError(f"{reported_name!r} is no known device, and " + (
            "its name is of no known maker of GPUs." if vendor is None else "nothing says how many units it has."))
    all_ = [spec for spec in map(device, device_names()) if spec.vendor == vendor]
    major = compute_capability.partition(".")[0]
    kin, which = next((found, text) for found, text in (
        ([spec for spec in all_ if spec.compute_capability == compute_capability],
         f"of compute capability {compute_capability}"),
        ([spec for spec in all_ if spec.compute_capability.partition(".")[0] == major],
         f"of compute capability {major}"),
        (all_, f"of {vendor.upper() if vendor == 'amd' else 'NVIDIA'}")) if found)

    def each(figure: Callable[[DeviceSpec], float]) -> float:
        """Return the median per unit of the known devices, times the units of this device."""
        return rounded(median(figure(spec) / spec.sm_count for spec in kin) * sm_count)

    clock = clock_mhz or median(spec.boost_clock_mhz for spec in kin)

    def rates(of: Callable[[DeviceSpec], Mapping[str, float]]) -> Mapping[str, float]:
        names = [name for name in dict.fromkeys(name for spec in kin for name in of(spec))
                 if 2 * sum(name in of(spec) for spec in kin) > len(kin)]
        return MappingProxyType({name: rounded(clock * sm_count * median(
            of(spec)[name] / spec.sm_count / spec.boost_clock_mhz for spec in kin if name in of(spec)))
            for name in names})

    host_gbps = median(spec.host_gbps for spec in kin)
    like = min(kin, key=lambda spec: (abs(spec.host_gbps - host_gbps), abs(math.log(spec.sm_count / sm_count))))
    matrix, vector = rates(lambda spec: spec.matrix_tflops), rates(lambda spec: spec.vector_tflops)
    memory_gb = rounded(memory_bytes / 1e9) if memory_bytes and memory_bytes > 0 else each(lambda spec: spec.memory_gb)
    reported = {"compute.sm_count": sm_count, "memory.capacity_gb": (memory_bytes or 0) > 0, "memory.l2_mb": l2_mb,
                "compute.boost_clock_mhz": clock_mhz, "memory.bandwidth_gbps": bandwidth_gbps}
    guess = f"median of the {len(kin)} known devices {which}, for each unit and clock"
    return replace(
        like, name=re.sub(r"[^a-z0-9]+", "-", reported_name.lower()).strip("-"), reported_names=(reported_name,),
        short_names=(), default_for=(), placeholder=True, compute_capability=compute_capability, sm_count=sm_count,
        boost_clock_mhz=clock, power_w=each(lambda spec: spec.power_w), memory_gb=memory_gb,
        memory_bandwidth_gbps=bandwidth_gbps or each(lambda spec: spec.memory_bandwidth_gbps),
        l2_mb=l2_mb or each(lambda spec: spec.l2_mb), l3_mb=each(lambda spec: spec.l3_mb),
        matrix_tflops=matrix, vector_tflops=vector, peer_gbps=median(spec.peer_gbps for spec in kin),
        sources=MappingProxyType({
            key: REPORTED if reported.get(key) else f"as of {like.name}, the most alike" if key in _AS_ALIKE else guess
            for key in [*(key for key in like.sources if "_tflops." not in key),
                        *(f"matrix_tflops.{name}" for name in matrix), *(f"vector_tflops.{name}" for name in vector)]}),
        note=f"{reported_name} is an unknown GPU ({sm_count} SMs, {memory_gb:.0f} GB): its rates are the {guess}, and "
             "its intervals are wide; foretrace calibrate measures it.")


def _mig_slice(name: str, compute: int, slices: int, gigabytes: int, memory_bytes: int | None, sm_count: int | None
               ) -> DeviceSpec:
    """Return a MIG instance with its share of units, memory, bandwidth and cache. With ``compute`` it is a compute
    instance, which shares a larger instance's memory. Raises ``DeviceError``: the device has no such instance."""
    part = f"MIG {f'{compute}c.' if compute else ''}{slices}g.{gigabytes}gb"
    whole = resolve_device(name)
    if _mig_eighths(whole, compute, slices, gigabytes) is None:
        others = [spec for spec in _named(_plain(name)) if _mig_eighths(spec, compute, slices, gigabytes)]
        if not others:
            raise DeviceError(f"{whole.name} has no {part}; " + (
                f"its MIG profiles are {', '.join(_mig_profiles(whole, compute=bool(compute)))}."
                if whole.name in MIG_GB else "MIG does not divide it: name it whole."))
        # A short name may mean a device with other memory, such as "A100": its boards differ in power.
        whole = min(others, key=lambda spec: abs(spec.power_w - whole.power_w))
    share = (_mig_eighths(whole, compute, slices, gigabytes) or 0) / 8
    known, all_slices = MIG_UNITS.get(whole.architecture, {}), 4 if _has_quarters(whole) else 7
    known = known if known.get(7, 0) <= whole.sm_count else {}  # an H20's chip has fewer units
    units = sm_count if sm_count and sm_count > 0 else (
        compute * known.get(1, whole.sm_count // all_slices) if compute else
        known.get(slices, whole.sm_count * slices // all_slices))
    return _part(whole, part, "MIG slice", min(units, whole.sm_count), share, 0.0, memory_bytes)


def _has_quarters(whole: DeviceSpec) -> bool:
    """Return whether MIG divides a device into four slices; other devices have seven slices and eighths of memory."""
    return whole.name == "a30" or whole.architecture == "rtx-blackwell"


def _mig_memory(whole: DeviceSpec) -> dict[int, tuple[int, ...]]:
    """Return the possible eighths of the memory, by slices; empty for a device without MIG."""
    return {} if whole.name not in MIG_GB else {1: (2,), 2: (4,), 4: (8,)} if _has_quarters(whole) else MIG_EIGHTHS


def _mig_eighths(whole: DeviceSpec, compute: int, slices: int, gigabytes: int) -> int | None:
    """Return the eighths of the memory that a profile has; ``None`` where the device has no such profile."""
    if compute and compute not in MIG_COMPUTE.get(slices, ()):
        return None
    return next((eighths for eighths in _mig_memory(whole).get(slices, ())
                 if abs(gigabytes / (MIG_GB[whole.name] * eighths / 8) - 1) <= MIG_ROUNDING), None)


def _mig_profiles(whole: DeviceSpec, *, compute: bool) -> list[str]:
    """Return the names of a device's MIG profiles; with ``compute`` those of its compute instances."""
    return [f"{part}{slices}g.{math.floor(MIG_GB[whole.name] * eighths / 8 + 0.5)}gb"
            for slices, several in _mig_memory(whole).items() for eighths in several
            for part in ([f"{one}c." for one in MIG_COMPUTE.get(slices, ())] if compute else [""])]


def _amd_partitions(whole: DeviceSpec) -> dict[str, int]:
    """Return the number of units of a compute partition, by mode; empty for a device with one die."""
    dies = whole.sm_count // UNITS_OF_A_DIE.get(whole.architecture, whole.sm_count)
    counts = {**PARTITIONS, "CPX": dies} if dies > 1 else {}
    return {mode: whole.sm_count // parts for mode, parts in counts.items() if dies % parts == 0}


def _amd_partition(whole: DeviceSpec, mode: str, memory_bytes: int | None) -> DeviceSpec:
    """Return a compute partition: some dies, with their share of memory, caches and links while all dies work."""
    units = _amd_partitions(whole)[mode]
    share = units / whole.sm_count
    return _part(whole, mode, "compute partition", units, share, share, memory_bytes)


def _part(whole: DeviceSpec, part: str, kind: str, units: int, share: float, links: float, memory_bytes: int | None
          ) -> DeviceSpec:
    """Return ``units`` of a device, a ``share`` of its memory, bandwidth and caches, and a ``links`` share of links."""
    compute = units / whole.sm_count
    memory_gb = memory_bytes / 1e9 if memory_bytes and memory_bytes > 0 else whole.memory_gb * share
    name = f"{whole.name}-{re.sub(r'[ .]', '-', part.lower())}"
    found = scaled(whole, {
        "compute.sm_count": compute, "compute.power_w": compute, "matrix_tflops": compute, "vector_tflops": compute,
        "memory.capacity_gb": share, "memory.bandwidth_gbps": share, "memory.l2_mb": share, "memory.l3_mb": share,
        "links.peer_gbps": links})
    return replace(
        found, name=name, reported_names=(f"{(whole.reported_names or (whole.name,))[0]} {part}",), short_names=(),
        default_for=(), sm_count=units, memory_gb=memory_gb,
        note=f"{name} is a {kind} of {whole.name}: {units} of its {whole.sm_count} SMs, {memory_gb:.0f} GB and "
             f"{100 * share:.3g}% of its memory bandwidth.")


def scaled(spec: DeviceSpec, factors: Mapping[str, float]) -> DeviceSpec:
    """Return the device with figures multiplied by factors, by "table.key" or "table"; each source notes its factor."""
    def source(key: str, text: str) -> str:
        factor = factors.get(key, factors.get(key.partition(".")[0], 1.0))
        return text if factor == 1.0 else f"{text}, × {factor:g}"

    figures: dict[str, Any] = {}
    for key, factor in factors.items():
        name = ATTRIBUTES.get(key, key.rpartition(".")[2])
        value = getattr(spec, name)
        figures[name] = (MappingProxyType({dtype: rate * factor for dtype, rate in value.items()})
                         if isinstance(value, Mapping) else value * factor)
    return replace(spec, **figures, sources=MappingProxyType({k: source(k, text) for k, text in spec.sources.items()}))


def read_device(path: Path) -> DeviceSpec:
    """Read one device's file.

    Raises:
        DeviceError: A figure is missing, not plausible (``device_figures``), or has no known source.
    """
    try:
        data = from_toml(read_input(path))
    except OSError as error:
        raise DeviceError(why_unopened(path, error)) from None
    except DecodeError as error:
        raise DeviceError(f"{path} cannot be read as a device: {error}.") from None
    try:
        check_texts(data)
        values, sources = figures_in(data)
    except ValueError as error:
        raise DeviceError(f"{path} is no device: {error}; compare it with a shipped one (foretrace devices h200-sxm "
                          "--toml).") from None
    return _spec(data, values, sources)


def _spec(data: Mapping[str, Any], values: Mapping[str, float], sources: Mapping[str, str]) -> DeviceSpec:
    """Return the device described by a checked file."""

    def rates(table: str) -> Mapping[str, float]:
        return MappingProxyType({name.partition(".")[2]: value for name, value in values.items()
                                 if name.startswith(f"{table}.")})

    figures: dict[str, Any] = {
        ATTRIBUTES.get(key, key.partition(".")[2]): int(values[key]) if figure.whole else values.get(key, 0.0)
        for key, figure in FIGURES.items()}
    return DeviceSpec(
        name=data["name"], vendor=data["vendor"].lower(), architecture=data["architecture"].lower(),
        compute_capability=data["compute_capability"], reported_names=tuple(data["reported_names"]),
        short_names=tuple(data["short_names"]), default_for=tuple(data.get("default_for", ())),
        placeholder=data.get("placeholder", False),
        memory_kind=data["memory"]["kind"], matrix_tflops=rates("matrix_tflops"), vector_tflops=rates("vector_tflops"),
        sources=MappingProxyType(dict(sources)), **figures)


def rounded(value: float) -> float:
    """Return a figure rounded to four significant digits."""
    return float(f"{value:.4g}")


def _figure(name: str, value: Any) -> float:
    number = number_of(value)
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"{name} is {value}")
    return number


def _count(name: str, value: Any) -> int:
    number = _figure(name, value)
    if number != int(number):
        raise ValueError(f"{name} is {value}, which is no whole number")
    return int(number)


def _plain(name: str) -> str:
    """Return a name in lower case without vendors and punctuation: "Tesla V100-SXM2-16GB" → "v100sxm216gb"."""
    return _GENERIC.sub(" ", name.lower()).encode(errors="replace").translate(None, _PUNCTUATION).decode()


def _fits(spec: DeviceSpec, memory_bytes: int | None, sm_count: int | None) -> bool:
    if memory_bytes and memory_bytes > 0 and abs(memory_bytes / (spec.memory_gb * 1e9) - 1) > MEMORY_TOLERANCE:
        return False
    return not (sm_count and sm_count > 0) or sm_count == spec.sm_count


def _nearest(specs: list[DeviceSpec], memory_bytes: int | None) -> list[DeviceSpec]:
    """Return the devices whose memory is nearest to the reported one, by ratio; all devices where none is reported."""
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


def find_device(name: str) -> DeviceSpec:
    """Return the device with this name.

    Args:
        name: foretrace's name, a name that drivers report, or the path of a TOML file.

    Raises:
        DeviceError: No device has the name, or the file is not complete; the error says what is missing.
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
    """Return the device's properties that decide which operations a step traced for it runs."""
    return TracedDevice.of(spec.name, spec.vendor, spec.compute_capability, spec.reported_names, spec.memory_gb,
                           spec.sm_count)


def scaled_device(spec: DeviceSpec, *, clock: float = 1.0, bandwidth: float = 1.0, memory: float = 1.0,
                  power: float = 1.0) -> DeviceSpec:
    """Return the device with figures multiplied by factors, which its sources note; unchanged where all factors are 1.

    All peak rates follow the clock; caches, launches and the rate that board power can sustain do not.
    """
    if clock == bandwidth == memory == power == 1.0:
        return spec
    return scaled(spec, {
        "compute.boost_clock_mhz": clock, "matrix_tflops": clock, "vector_tflops": clock,
        "memory.bandwidth_gbps": bandwidth, "memory.capacity_gb": memory, "compute.power_w": power})
