"""The contents of a device's TOML file: its figures with their ranges, its names and kinds. See ``sourced_figures``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from kernel_models.sourced_figures import Figure, figure_in, found_instead, shown, sources_in, table_in, text_in

TABLES = ("compute", "memory", "matrix_tflops", "vector_tflops", "links", "launch")
ARCHITECTURES = {
    "nvidia": ("pascal", "volta", "turing", "ampere", "ada", "hopper", "blackwell", "rtx-blackwell"),
    "amd": ("cdna2", "cdna3", "cdna4"),
    "host": ("cpu", "alder-lake", "cascade-lake", "emerald-rapids"),
}
"""Architectures by vendor. Constants that no data sheet gives are kept by architecture: a misspelled one would silently
have none."""
RATED = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "fp4", "int8")
"""Element types for which devices list rates."""
OPERATIONS_A_CLOCK = {"vector_tflops.fp32": (2, 2048)}
"""Range of the fp32 rate per clock and unit, operations; shipped devices have 20 to 277. A value outside means that
units, clock and rate are of different devices, or in wrong units."""
OTHER_OPERATIONS_A_CLOCK = (0.5, 400_000)
"""Range of rates of other types and of matrix units per clock and unit; shipped devices have 2 to 48,600."""
_MEMORY_KIND = re.compile(r"(HBM|GDDR|LPDDR|DDR)[1-9]\w{0,2}")
_CAPABILITY = re.compile(r"\d{1,2}\.\d{1,2}")
_NAME = re.compile(r"[a-z0-9][a-z0-9-]*")

FIGURES: Mapping[str, Figure] = MappingProxyType({
    "compute.sm_count": Figure(1, 4_096, "multiprocessors, compute units or cores", whole=True),
    "compute.boost_clock_mhz": Figure(100, 20_000, "MHz"),
    "compute.shared_memory_per_sm_kb": Figure(1, 10_000, "KiB"),
    "compute.registers_per_sm_kb": Figure(0.05, 10_000, "KiB"),
    "compute.power_w": Figure(1, 20_000, "W"),
    "memory.capacity_gb": Figure(0.5, 20_000, "10⁹ bytes"),
    "memory.bandwidth_gbps": Figure(10, 100_000, "10⁹ bytes/s"),
    "memory.l2_mb": Figure(0.05, 10_000, "MiB"),
    "memory.l3_mb": Figure(0, 10_000, "MiB", needed=False),
    "links.pcie_generation": Figure(0, 10, "generation of PCI Express, 0 for none", whole=True),
    "links.pcie_width": Figure(0, 32, "lanes, 0 for none", whole=True),
    "links.host_gbps": Figure(0.5, 10_000, "10⁹ bytes/s, one way"),
    "links.peer_gbps": Figure(0, 20_000, "10⁹ bytes/s, one way; 0 for no links"),
    "launch.kernel_floor_us": Figure(0.05, 100, "µs"),
    "launch.latency_us": Figure(0, 100, "µs"),
})
"""Figures by "table.key" of the file, with the range and the unit of each."""
_RATE = Figure(0.001, 200_000, "10¹² operations/s")
_KEYS = {"name", "vendor", "architecture", "compute_capability", "reported_names", "short_names", "default_for",
         "placeholder", "sources", *TABLES}


def figures_in(data: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, str]]:
    """Return values and sources of all figures of a device's file, by "table.key".

    Raises:
        ValueError: A table, a figure or a source is missing, unknown, of another type or not plausible. The text is a
            clause without a full stop: it names the item, what was found and what is expected.
    """
    unknown = [key for key in data if key not in _KEYS]
    if unknown:
        raise ValueError(f"{shown(unknown[0])} is nothing that a device has; expected are {', '.join(sorted(_KEYS))}")
    known = sources_in(data)
    values: dict[str, float] = {}
    sources: dict[str, str] = {}
    for table in TABLES:
        for key, entry in table_in(data, table).items():
            name = f"{table}.{key}"
            if name != "memory.kind":
                values[name], sources[name] = _figure(name, entry, known)
    lacking = [name for name, figure in FIGURES.items() if figure.needed and name not in values]
    if lacking:
        raise ValueError(f"it lacks {lacking[0]}; expected is {FIGURES[lacking[0]].expected()} with its source")
    if "vector_tflops.fp32" not in values:
        raise ValueError(f"it lacks vector_tflops.fp32; expected is {_RATE.expected()} with its source")
    _check_together(values)
    return values, sources


def check_architecture(name: str, known: Sequence[str]) -> None:
    """Raise ``ValueError`` for an unknown architecture: a misspelled one would silently lose its constants."""
    if name not in known:
        raise ValueError(f"architecture is {shown(name)}, which is none that is known of this vendor; expected is one "
                         f"of {', '.join(known)}: name the one that is most like it")


def check_texts(data: Mapping[str, Any]) -> None:
    """Check the texts of a device's file: its names, its vendor and architecture, and the kind of its memory.

    Raises:
        ValueError: one is missing, of another type or unknown; the text is a clause as in ``figures_in``.
    """
    for key in ("name", "vendor", "architecture", "compute_capability"):
        text_in(data, key, key)
    kind = text_in(table_in(data, "memory"), "kind", "memory.kind")
    if not _NAME.fullmatch(data["name"]):
        raise ValueError(f"name is {shown(data['name'])}; expected are a-z, 0-9 and - only, such as \"my-gpu\"")
    vendor, architecture = data["vendor"].lower(), data["architecture"].lower()
    if vendor not in ARCHITECTURES:
        raise ValueError(f"vendor is {shown(data['vendor'])}; expected is one of {', '.join(ARCHITECTURES)} "
                         "(host: a processor)")
    check_architecture(architecture, ARCHITECTURES[vendor])
    if vendor != "host" and not _CAPABILITY.fullmatch(data["compute_capability"]):
        raise ValueError(f"compute_capability is {shown(data['compute_capability'])}; expected is one as the driver "
                         'reports it, such as "9.0"')
    if not _MEMORY_KIND.fullmatch(kind):
        raise ValueError(f"memory.kind is {shown(kind)}; expected is one such as HBM3, HBM3e, GDDR6X, DDR5 or LPDDR5")
    for key in ("reported_names", "short_names", "default_for"):
        names = data.get(key, [] if key == "default_for" else None)
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError(found_instead(key, names, 'a list of names, such as ["MY GPU"] or []'))
    if not isinstance(data.get("placeholder", False), bool):
        raise ValueError(found_instead("placeholder", data["placeholder"], "true or false"))


def _figure(name: str, entry: Any, sources: Mapping[str, str]) -> tuple[float, str]:
    """Return one figure's value and source."""
    table, _, key = name.partition(".")
    if table.endswith("_tflops"):
        if key not in RATED:
            raise ValueError(f"{name} is of no known element type; expected are rates of {', '.join(RATED)}")
        figure = _RATE
    elif name in FIGURES:
        figure = FIGURES[name]
    else:
        keys = (each.partition(".")[2] for each in FIGURES if each.startswith(f"{table}."))
        raise ValueError(f"{name} is no figure of a device; expected of [{table}] are {', '.join(keys)}")
    return figure_in(name, entry, figure, sources)


def _check_together(values: Mapping[str, float]) -> None:
    """Check that units, clock and rates can belong to one device."""
    units, mhz = values["compute.sm_count"], values["compute.boost_clock_mhz"]
    for name, tflops in values.items():
        if "_tflops." in name:
            operations = tflops * 1e6 / (units * mhz)
            least, most = OPERATIONS_A_CLOCK.get(name, OTHER_OPERATIONS_A_CLOCK)
            if not least <= operations <= most:
                raise ValueError(
                    f"{name} is {tflops:g} with compute.sm_count {units:g} and compute.boost_clock_mhz {mhz:g}, which "
                    f"is {operations:,.2f} operations a clock of each unit; expected are {least:g} to {most:,}, so "
                    "that one of the three is of another device or in another unit")
