"""Output of PARAM's comms.py: one ``COMMS-RES-<collective>`` row for each size.

::

    COMMS-RES        size (B)  nElementsPerRank  Latency(us):p50  p75   p95   Min   Max  AlgBW(GB/s)  BusBW(GB/s)
    COMMS-RES-all_reduce  1024              256             24.1  24.5  25.0  23.0  26.0       0.042        0.074

The 50th percentile over ranks is taken. The number of ranks follows from BusBW / AlgBW where ``--ranks`` does not say.
"""

from __future__ import annotations

import math
import re

from kernel_models.collectives.call import (
    DTYPE_BYTES,
    CollectiveKind,
    CommError,
    Placement,
    bus_factor,
    collective_kind,
)
from kernel_models.collectives.measurements import CollectiveMeasurements, make_measurements
from kernel_models.collectives.readers.hints import Hints

_HEADER = re.compile(r"^\s*COMMS-RES\s+(total-)?size \(B\)")
_ROW = re.compile(r"^\s*COMMS-RES-([a-z_0-9]+)\s+(.*)$")
COLUMNS = 9
MOST_RANKS = 4096
_WIDTHS = {1: "int8", 2: "float16", 4: "float32", 8: "float64"}


def is_param(text: str) -> bool:
    """Return whether a text looks like such output."""
    return "COMMS-RES" in text


def read_param(text: str, name: str, hints: Hints) -> CollectiveMeasurements:
    """The measurements of the output. Raises ``CommError`` naming the line that is not usable."""
    found: list[tuple[int, CollectiveKind, float, float, float, float, float]] = []
    header = 0
    for number, line in enumerate(text.splitlines(), start=1):
        if _HEADER.match(line):
            header = number
            if "Latency(us)" not in line or "GB/s" not in line:
                raise CommError(f"{name}, line {number}: PARAM's columns are in us and GB/s, and these are not; give "
                                "the output as comms.py wrote it.")
            if line.lstrip().startswith("COMMS-RES") and "total-size" in line:
                raise CommError(f"{name}, line {number}: pairs of collectives at once (--pair) are no measurement of "
                                "one; run them one at a time.")
            continue
        match = _ROW.match(line)
        if not match or match.group(1).upper() == "QUANT":
            continue
        if not header:
            raise CommError(f"{name}, line {number}: there are results before any line that names the columns; give "
                            "the whole output.")
        try:
            cells = [float(cell) for cell in match.group(2).split()]
        except ValueError:
            cells = []
        if len(cells) < COLUMNS or not all(0 <= cell < math.inf for cell in cells):
            raise CommError(f"{name}, line {number}: the row has not the {COLUMNS} numbers that line {header} names; "
                            "it is cut off or another tool's.")
        size, elements, median, *_, algbw, busbw = cells[:COLUMNS]
        if median <= 0 or abs(algbw - size / median * 1e-3) > 0.25 * (size / median * 1e-3) + 0.01:
            raise CommError(f"{name}, line {number}: {size:,.0f} bytes in {median:g} µs are not {algbw:g} GB/s; its "
                            "units are mixed.")
        found.append((number, collective_kind(match.group(1).removesuffix("_base")), size, elements, median, algbw,
                      busbw))
    if not found:
        raise CommError(f"{name}: there is no COMMS-RES row of results in it; give the whole output of comms.py.")
    rows = []
    for number, kind, size, elements, median, algbw, busbw in found:
        placement = hints.placement() if hints.ranks else _placement(found, kind, algbw, busbw, f"{name}, line "
                                                                                                f"{number}")
        total = elements * (1 if kind in (CollectiveKind.ALL_REDUCE, CollectiveKind.BROADCAST, CollectiveKind.REDUCE)
                            else placement.ranks)
        width = round(size / total) if total else 0
        rows.append((kind, _WIDTHS.get(width, hints.dtype if hints.dtype in DTYPE_BYTES else "float32"), placement,
                     size,
                     median))
    return make_measurements(rows, hints.backend)


def _placement(found: list[tuple[int, CollectiveKind, float, float, float, float, float]], kind: CollectiveKind,
               algbw: float, busbw: float, where: str) -> Placement:
    """The rank count whose bus factor is BusBW / AlgBW, by the row of that kind with the highest bandwidth."""
    best = max((row for row in found if row[1] is kind), key=lambda row: row[5])
    algbw, busbw = best[5], best[6]
    if algbw < 1.0:
        raise CommError(f"{where}: the output does not say how many ranks there were; give --ranks (and --per-node).")
    ratio = busbw / algbw
    near = [n for n in range(2, MOST_RANKS) if abs(bus_factor(kind, n) - ratio) < 0.002 / algbw + 1e-4]
    if len(near) != 1:
        raise CommError(f"{where}: the output does not say how many ranks there were; give --ranks (and --per-node).")
    return Placement((near[0],))
