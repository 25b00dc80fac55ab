"""Texts that benchmarks of collectives print: nccl-tests and rccl-tests, PARAM, OSU's MPI benchmarks, ucc_perftest.

Logs of nccl-tests and rccl-tests: ``all_reduce_perf`` and its siblings::

    # Collective test starting: all_reduce_perf                                   (newer versions)
    #  Rank  0 Group  0 Pid  4711 on  node1 device  0 [0x07] NVIDIA H100 80GB HBM3

    #       size         count      type   redop    root     time   algbw   busbw #wrong   … (the same in place)
    #        (B)    (elements)                               (us)  (GB/s)  (GB/s)
         1048576        262144     float     sum      -1    25.41   41.27   72.22      0

The out-of-place time is taken, and the GPU from the header. Every row is checked against itself: algbw must be
size / time.

Output of PARAM's comms.py: one ``COMMS-RES-<collective>`` row for each size.

::

    COMMS-RES        size (B)  nElementsPerRank  Latency(us):p50  p75   p95   Min   Max  AlgBW(GB/s)  BusBW(GB/s)
    COMMS-RES-all_reduce  1024              256             24.1  24.5  25.0  23.0  26.0       0.042        0.074

The 50th percentile over ranks is taken. Without ``--ranks`` the number of ranks follows from BusBW / AlgBW.

Output of the OSU micro-benchmarks of MPI libraries (``osu_allreduce`` and its siblings) and of ``ucc_perftest``.

::

    # OSU MPI Allreduce Latency Test v7.3              Collective:             Allreduce
    # Datatype: MPI_FLOAT.                             Datatype:               float32
    # Size       Avg Latency(us)                              Count        Size                Time, us
    4                       1.95                                                            avg         min       max
    8                       1.97                                1           4             17.97       17.29     18.99

Neither program prints the number of ranks; only OSU's test of two ranks implies it. The mean over ranks is taken. In
both programs the *size* of an all-to-all is what a rank sends to each other rank, that of an all-gather what a rank
contributes. The payload is the size times the number of ranks."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

from kernel_models.collectives.call import (
    DTYPE_BYTES,
    CollectiveKind,
    CommError,
    Placement,
    bus_factor,
    collective_kind,
    dtype_name,
)
from kernel_models.collectives.measurements import CollectiveMeasurements, Hints, join, make_measurements

_RANK = re.compile(
    r"#\s*Rank\s+(\d{1,9})\s[^#]*?\bon\s+(\S+)\s+device\s+\d+(?:\s+\[[^\]]*\])?[ \t]*(.*)$", re.IGNORECASE)
_TEST = re.compile(r"(?:Collective test starting:\s*|\b)(\w+)_perf\b")
_ROW = re.compile(r"^\s+\d+\s+\d+\s+[a-z]\w*\s")
_END = re.compile(r"^#\s*(Avg bus bandwidth|Out of bounds values)", re.IGNORECASE)
_BROKEN_ROW = re.compile(r"^\s+\d+(\s|$)")
BANDWIDTH_TOLERANCE, BANDWIDTH_ROUNDING = 0.03, 0.011
"""Tolerances of a row's algbw against its size / time: algbw has two printed decimals, time two to four digits."""


@dataclass
class _State:
    hosts: dict[int, str] = field(default_factory=dict)
    devices: dict[int, str] = field(default_factory=dict)
    rows: list[tuple[CollectiveKind, str, Placement, float, float]] = field(default_factory=list)
    ended: bool = False
    kind: CollectiveKind | None = None
    columns: list[str] | None = None
    header_line: int = 0


def is_nccl_tests(text: str) -> bool:
    """Return whether a text looks like a log of nccl-tests or rccl-tests."""
    return bool(re.search(r"#\s+size\s+count", text) or ("algbw" in text and "busbw" in text and "nThread" in text))


def read_nccl_tests(text: str, name: str, hints: Hints) -> CollectiveMeasurements:
    """Return the measurements of a log of nccl-tests or rccl-tests.

    Raises:
        CommError: a line is broken, in other units or inconsistent; or a fact is missing in the log and in ``hints``.
    """
    state = _State(kind=hints.kind)
    runs = [state]
    for number, line in enumerate(text.splitlines(), start=1):
        if match := _RANK.search(line):
            if state.columns is not None:
                state = _State(kind=hints.kind)  # a file may hold logs of several runs
                runs.append(state)
            state.hosts[int(match.group(1))] = match.group(2)
            state.devices[int(match.group(1))] = match.group(3).strip()
        elif _END.match(line):
            state.ended = True
        elif match := _TEST.search(line):
            if hints.kind is None:
                state.kind = _kind(match.group(1))
        elif line.lstrip().startswith("#") and "size" in line and ("algbw" in line or "time" in line):
            state.columns, state.header_line = line.lstrip("# ").split(), number
        elif line.lstrip().startswith("#") and "(B)" in line:
            _check_units(line, number, name)
        elif _ROW.match(line):
            state.rows.append(_row(line, number, name, state, hints))
        elif _BROKEN_ROW.match(line) and state.columns is not None:
            raise CommError(f"{name}, line {number}: the row is cut off ({line.strip()[:40]!r}); remove it, or give "
                            "the whole log.")
    if not any(run.rows for run in runs):
        raise CommError(f"{name}: there is no row of results in it; give the whole output of an nccl-tests program.")
    found = join(make_measurements(run.rows, hints.backend, _gpu(run, name)) for run in runs)
    if not all(run.ended for run in runs if run.rows):
        found.notes = [f"{name} ends without nccl-tests' closing lines (# Avg bus bandwidth); if it was cut off, "
                       "larger sizes are missing."]
    return found


def _gpu(run: _State, name: str) -> str:
    """Return the one GPU that a run's header names; "" if it names none."""
    found = sorted(set(filter(None, run.devices.values())))
    if len(found) > 1:
        raise CommError(f"{name}: its ranks ran on different GPUs ({', '.join(found)}), which no topology describes; "
                        "give a log of one kind of GPU.")
    return found[0] if found else ""


def _kind(test: str) -> CollectiveKind | None:
    try:
        return collective_kind(test)
    except CommError:
        return None


def _check_units(line: str, number: int, name: str) -> None:
    units = re.findall(r"\(([^()]*)\)", line)
    if any(unit not in ("B", "elements", "us", "GB/s") for unit in units):
        other = next(unit for unit in units if unit not in ("B", "elements", "us", "GB/s"))
        raise CommError(f"{name}, line {number}: a column is in {other}, and nccl-tests writes B, us and GB/s; "
                        "convert it, or give the log as the program wrote it.")


def _row(line: str, number: int, name: str, state: _State,
         hints: Hints) -> tuple[CollectiveKind, str, Placement, float, float]:
    where = f"{name}, line {number}"
    if state.columns is None:
        raise CommError(f"{where}: there are results before any line that names the columns (# size count type …); "
                        "give the whole log.")
    cells = line.split()
    if len(cells) != len(state.columns):
        raise CommError(f"{where}: the row has {len(cells)} columns and line {state.header_line} names "
                        f"{len(state.columns)}; it is cut off or another tool's.")
    try:
        at = {column: state.columns.index(column) for column in ("size", "type", "time", "algbw", "busbw")}
        size, time_us, algbw, busbw = (float(cells[at[column]]) for column in ("size", "time", "algbw", "busbw"))
        dtype = dtype_name(cells[at["type"]])
    except (ValueError, CommError):
        raise CommError(f"{where}: a number or column that nccl-tests writes is missing; it is cut off or another "
                        "tool's.") from None
    if not all(0 <= value < math.inf for value in (size, time_us, algbw, busbw)) or time_us == 0:
        raise CommError(f"{where}: {size:g} bytes took {time_us:g} µs; that is no measurement.")
    rate = size / time_us * 1e-3
    placement = _placement(state, hints, where)
    kind = state.kind if state.kind is not None else _guess(algbw, busbw, placement.ranks, where)
    # Before 2020 all_gather and reduce_scatter printed an algbw that included busbw's factor (n-1)/n.
    expected = (rate, rate * bus_factor(kind, placement.ranks))
    if all(abs(algbw - value) > BANDWIDTH_TOLERANCE * value + BANDWIDTH_ROUNDING for value in expected):
        raise CommError(f"{where}: {size:,.0f} bytes in {time_us:g} µs are {rate:.2f} GB/s, and the row says "
                        f"{algbw:g}; its "
                        "units are mixed.")
    return kind, dtype, placement, size, time_us


def _placement(state: _State, hints: Hints, where: str) -> Placement:
    if hints.ranks is not None:
        return hints.placement()
    if not state.hosts:
        raise CommError(f"{where}: the log does not say how many ranks there were; give --ranks (and --per-node).")
    if sorted(state.hosts) != list(range(len(state.hosts))):
        raise CommError(f"{where}: of {max(state.hosts) + 1} ranks only {len(state.hosts)} are listed above it; the "
                        "log is cut off at its beginning.")
    counts: dict[str, int] = {}
    for host in state.hosts.values():
        counts[host] = counts.get(host, 0) + 1
    return Placement(tuple(counts.values()))


def _guess(algbw: float, busbw: float, ranks: int, where: str) -> CollectiveKind:
    """Return all-reduce if the bus factor is its own; the other kinds share one factor."""
    if ranks > 2 and algbw > 0.5 and abs(busbw / algbw - bus_factor(CollectiveKind.ALL_REDUCE, ranks)) < 0.02:
        return CollectiveKind.ALL_REDUCE
    raise CommError(f"{where}: the log does not name its collective; give --collective.")


_PARAM_HEADER = re.compile(r"^\s*COMMS-RES\s+(total-)?size \(B\)")
_PARAM_ROW = re.compile(r"^\s*COMMS-RES-([a-z_0-9]+)\s+(.*)$")
COLUMNS = 9  # numbers of PARAM's rows, by its header
MOST_RANKS = 4096  # chosen: largest group that two bandwidths are searched for
_TYPE_OF_WIDTH = {1: "int8", 2: "float16", 4: "float32", 8: "float64"}


def is_param(text: str) -> bool:
    """Return whether a text looks like PARAM's output."""
    return "COMMS-RES" in text


def read_param(text: str, name: str, hints: Hints) -> CollectiveMeasurements:
    """Return the measurements of PARAM's output. Raises ``CommError``, which names the unusable line."""
    found: list[tuple[int, CollectiveKind, float, float, float, float, float]] = []
    header = 0
    for number, line in enumerate(text.splitlines(), start=1):
        if _PARAM_HEADER.match(line):
            header = number
            if "Latency(us)" not in line or "GB/s" not in line:
                raise CommError(f"{name}, line {number}: PARAM's columns are in us and GB/s, and these are not; give "
                                "the output as comms.py wrote it.")
            if line.lstrip().startswith("COMMS-RES") and "total-size" in line:
                raise CommError(f"{name}, line {number}: pairs of collectives at once (--pair) are no measurement of "
                                "one; run them one at a time.")
            continue
        match = _PARAM_ROW.match(line)
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
    placements: dict[CollectiveKind, Placement] = {}
    for number, kind, size, elements, median, *_ in found:
        if kind not in placements:
            placements[kind] = hints.placement() if hints.ranks else _ranks_by_bus_factor(
                found, kind, f"{name}, line {number}")
        placement = placements[kind]
        total = elements * (1 if kind in (CollectiveKind.ALL_REDUCE, CollectiveKind.BROADCAST, CollectiveKind.REDUCE)
                            else placement.ranks)
        width = round(size / total) if total else 0
        dtype = _TYPE_OF_WIDTH.get(width, hints.dtype if hints.dtype in DTYPE_BYTES else "float32")
        rows.append((kind, dtype, placement, size, median))
    return make_measurements(rows, hints.backend)


def _ranks_by_bus_factor(found: list[tuple[int, CollectiveKind, float, float, float, float, float]],
                         kind: CollectiveKind, where: str) -> Placement:
    """Return the number of ranks whose bus factor is BusBW / AlgBW, from the kind's row with the highest bandwidth."""
    best = max((row for row in found if row[1] is kind), key=lambda row: row[5])
    algbw, busbw = best[5], best[6]
    near = [n for n in range(2, MOST_RANKS) if abs(bus_factor(kind, n) - busbw / algbw) < 0.002 / algbw + 1e-4] \
        if algbw >= 1.0 else []
    if len(near) != 1:
        raise CommError(f"{where}: the output does not say how many ranks there were; give --ranks (and --per-node).")
    return Placement((near[0],))


_OSU = re.compile(r"^#\s*OSU MPI(?:-CUDA|-ROCM)?\s+(?:Non-blocking\s+)?([\w-]+)\s+Latency Test", re.MULTILINE)
_OSU_PAIR = re.compile(r"^#\s*OSU MPI\S*\s+Latency Test", re.MULTILINE)
_OSU_SIZE = re.compile(r"^#\s*Size\s+(?:Avg )?Latency\s*\(us\)", re.MULTILINE)
_OSU_TYPE = re.compile(r"^#\s*Datatype:\s*MPI_(\w+?)\.?\s*$", re.MULTILINE)
_UCC = re.compile(r"^Collective:\s*(\w+)", re.MULTILINE)
_UCC_SIZE = re.compile(r"^[ \t]*Count\s+Size\s+Time, us", re.MULTILINE)
_UCC_TYPE = re.compile(r"^Datatype:\s*(\w+)", re.MULTILINE)
_EACH = (CollectiveKind.ALL_GATHER, CollectiveKind.ALL_TO_ALL)
"""Kinds whose *size* is that of one pair of ranks, or of one rank's contribution."""


def is_mpi(text: str) -> bool:
    """Return whether a text looks like the output of OSU's benchmarks or of ucc_perftest."""
    return any(name.search(text) and size.search(text) for name, size in (
        (_OSU, _OSU_SIZE), (_OSU_PAIR, _OSU_SIZE), (_UCC, _UCC_SIZE)))


def read_mpi(text: str, name: str, hints: Hints) -> CollectiveMeasurements:
    """Return the measurements of an output of OSU's benchmarks or of ucc_perftest.

    Raises:
        CommError: a line is broken, the collective is unknown, or the number of ranks is missing.
    """
    osu = _OSU_SIZE.search(text)
    head = osu or _UCC_SIZE.search(text)
    assert head is not None
    kind = hints.kind or _named_kind(text, name)
    if hints.ranks is None and kind is not CollectiveKind.SEND_RECV:
        raise CommError(f"{name} does not say how many ranks there were; give --ranks (and --per-node).")
    placement = hints.placement() if hints.ranks is not None else Placement((1, 1))
    typed = (_OSU_TYPE if osu else _UCC_TYPE).search(text)
    dtype = dtype_name(typed[1]) if typed else hints.dtype
    column, size_column = (1, 0) if osu else (2, 1)
    rows = []
    first = text.count("\n", 0, head.start()) + 1
    for number, line in enumerate(text.splitlines()[first:], start=first + 1):
        cells = line.split()
        if not cells or not cells[0].isdecimal():
            continue
        try:
            size, time_us = float(cells[size_column]), float(cells[column])
            if not (0 <= size < math.inf and 0 < time_us < math.inf):
                raise ValueError
        except (ValueError, IndexError):
            raise CommError(f"{name}, line {number}: the row is cut off or another tool's ({line.strip()[:40]!r}); "
                            "remove it, or give the whole output.") from None
        rows.append((kind, dtype, placement, size * (placement.ranks if kind in _EACH else 1), time_us))
    if not rows:
        raise CommError(f"{name}: there is no row of results in it; give the whole output.")
    return make_measurements(rows, hints.backend)


def _named_kind(text: str, name: str) -> CollectiveKind:
    found = _OSU.search(text) or _UCC.search(text)
    if found is None:
        return CollectiveKind.SEND_RECV
    try:
        return collective_kind(found[1].lower().replace("-", "_"))
    except CommError as error:
        raise CommError(f"{name}: {error}") from None
