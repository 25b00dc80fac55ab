"""Logs of nccl-tests and rccl-tests: ``all_reduce_perf`` and its siblings.

::

    # Collective test starting: all_reduce_perf                                   (newer versions)
    #  Rank  0 Group  0 Pid  4711 on  node1 device  0 [0x07] NVIDIA H100 80GB HBM3
    #       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
    #        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
         1048576        262144     float     sum      -1    25.41   41.27   72.22      0    25.17   41.66   72.90      0

The out-of-place time is taken, and the GPU from the header. Every row is checked against itself: algbw must be
size / time.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

from kernel_models.collectives.call import (
    CollectiveKind,
    CommError,
    Placement,
    bus_factor,
    collective_kind,
    dtype_name,
)
from kernel_models.collectives.measurements import CollectiveMeasurements, join, make_measurements
from kernel_models.collectives.readers.hints import Hints

_RANK = re.compile(r"#\s*Rank\s+(\d{1,9})\s.*?\bon\s+(\S+)\s+device\s+\d+(?:\s+\[[^\]]*\])?[ \t]*(.*)$", re.IGNORECASE)
_TEST = re.compile(r"(?:Collective test starting:\s*|\b)(\w+)_perf\b")
_ROW = re.compile(r"^\s+\d+\s+\d+\s+[a-z]\w*\s")
_END = re.compile(r"^#\s*(Avg bus bandwidth|Out of bounds values)", re.IGNORECASE)
_BROKEN_ROW = re.compile(r"^\s+\d+(\s|$)")
BANDWIDTH_TOLERANCE, BANDWIDTH_ROUNDING = 0.03, 0.011
"""algbw is printed with two decimals, time with two to four digits."""


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
    """Return whether a text looks like such a log."""
    return bool(re.search(r"#\s+size\s+count", text) or ("algbw" in text and "busbw" in text and "nThread" in text))


def read_nccl_tests(text: str, name: str, hints: Hints) -> CollectiveMeasurements:
    """The measurements of a log.

    Raises:
        CommError: a line is broken, in other units or not consistent; or the log lacks what ``hints`` must then say.
    """
    state = _State(kind=hints.kind)
    runs = [state]
    for number, line in enumerate(text.splitlines(), start=1):
        if match := _RANK.search(line):
            if state.columns is not None:
                state = _State(kind=hints.kind)  # logs of several runs one after the other
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
    """The one GPU of a run's header; empty where it names none."""
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
    units = re.findall(r"\(([^)]*)\)", line)
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
    # Before 2020 all_gather and reduce_scatter printed algbw with the (n-1)/n of busbw in it.
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
    """All-reduce by its bus factor; the others share theirs."""
    if ranks > 2 and algbw > 0.5 and abs(busbw / algbw - bus_factor(CollectiveKind.ALL_REDUCE, ranks)) < 0.02:
        return CollectiveKind.ALL_REDUCE
    raise CommError(f"{where}: the log does not name its collective; give --collective.")
