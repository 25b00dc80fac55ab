"""GPU active time of recorded traces, priced from data sheets alone and with efficiencies fitted to other traces.

    python benchmarks/datasheet_traces.py [DATA]

Measured: the sum of kernel durations of a trace, collectives left out, of the operations whose sizes were recorded.
`sized` is their share of that sum: a kernel that lost its operation but runs as a recorded one does counts in; what has
no sizes, or assumed ones, could only be priced as a typical kernel and takes no part.

Data sheet: the default efficiencies, to whose fit the traces of `h100-vs-mi300` gave nothing (see
`default_efficiencies.py`; the traces it did use are marked *). Left out: efficiencies fitted to the other traces of the
same device, or, where there is none ("others"), to the traces of all other devices. A second table adds the device's
published kernel tables, which are no traces. `inside` is the share of distinct calls whose measured time lies within
the 80% interval; each call's time is the median of its repetitions.
"""

from __future__ import annotations

import argparse
import os
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from kernel_models.device import DeviceError, DeviceSpec, resolve_device
from kernel_models.heuristics.efficiency import Efficiencies, Efficiency, Measured, fit_over_devices
from kernel_models.heuristics.roofline import heuristic_models
from kernel_models.op_call import Family, OpCall
from kernel_models.pricing import price
from kernel_models.trace_calls import TraceCalls, graph_calls
from tracer.errors import ForetraceError
from tracer.graph import ExecutionGraph
from tracer.kineto import read_kineto

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("FORETRACE_DATA", ROOT.parent / "shared" / "data"))
KNOWN_DEVICES = {"rank0-1-of-128": "a100-sxm-80g", "list-form-2020": "v100-sxm2-32g"}
"""Devices of traces that do not record them: a V100 as in the folder's name; kernels of cuBLAS for Ampere, on what is
taken to be an A100 with 80 GB."""
FITTED_TO = ("rank3-of-8xA100-6steps", "dlrm-8xV100-2023/rank0", "loader-workers-0", "vllm-eager-B200",
             "sampled_rank-0", "torch-compile-mi300", "alexnet")
"""Traces that gave defaults to families no table has."""
START = Efficiencies({"*": Efficiency(0.7, 0.8, 1.3, -0.7, 0.7, "start of the fit")})
"""What the defaults are fitted from, and what shares out a kernel's time among several calls: were that done by the
defaults themselves, each fit of them would lead to another."""
ASKED = {"h100-Qwen": (0.25, 0.10), "h100-gaunernst": (0.25, 0.10)}
"""Error of the total that was asked for, by the data sheet alone and fitted to the device's other traces."""


@dataclass(frozen=True, slots=True)
class Trace:
    """One trace: pieces of work with their calls and measured times.

    ``pieces`` are the calls of each operation with recorded sizes, ``piece_us`` its kernels' time, ``alone`` whether no
    other kernel ran at the same time. ``calls`` and ``measured_us`` are the calls of those that ran alone, for fitting;
    the time of a piece of several calls is shared out as ``START`` prices them.
    """

    name: str
    device: DeviceSpec
    pieces: list[tuple[OpCall, ...]]
    piece_us: np.ndarray
    alone: np.ndarray
    sized: float

    @property
    def calls(self) -> list[OpCall]:
        """Calls that ran alone."""
        return [call for piece, alone in zip(self.pieces, self.alone, strict=True) if alone for call in piece]

    @property
    def measured_us(self) -> np.ndarray:
        """Their times, µs."""
        chosen = [piece for piece, alone in zip(self.pieces, self.alone, strict=True) if alone]
        lengths = [len(piece) for piece in chosen]
        calls = self.calls
        said = np.empty(len(calls))
        for family, model in heuristic_models(self.device, START).items():
            rows = [i for i, call in enumerate(calls) if call.family == family]
            if rows:
                said[rows] = model.predict([calls[i] for i in rows]).time_us
        of = np.repeat(np.arange(len(chosen)), lengths)
        share = said / np.bincount(of, weights=said, minlength=len(chosen))[of]
        return np.repeat(self.piece_us[self.alone], lengths) * share

    @property
    def total_us(self) -> float:
        """GPU active time of the pieces, µs."""
        return float(self.piece_us.sum())


@cache
def read_trace(path: Path) -> Trace | None:
    """A trace whose device is known and which recorded sizes, else ``None``."""
    try:
        graph = read_kineto(path)
    except ForetraceError:
        return None
    name = "/".join(path.parts[path.parts.index("traces") + 1:]).removesuffix(".json.gz").removesuffix(".kineto")
    reported = next((device for part, device in KNOWN_DEVICES.items() if part in name), graph.meta.device)
    try:
        device = resolve_device(reported, graph.meta.device_memory_bytes, graph.meta.sm_count)
    except DeviceError:
        return None
    found = graph_calls(graph)
    total = found.time_ns.sum() / 1e3
    pieces, times, alone = pieces_of(graph, found)
    if not total or sum(times) < 0.3 * total:
        return None
    return Trace(name, device, pieces, np.array(times), np.array(alone), float(sum(times) / total))


def alone_on_device(graph: ExecutionGraph) -> np.ndarray:
    """Whether each kernel ran with no other at the same time, by their recorded times."""
    kernels = graph.kernels
    order = np.lexsort((kernels.start_ns, kernels.device))
    start = kernels.start_ns[order]
    end = start + kernels.duration_ns[order]
    same = np.concatenate([[False], kernels.device[order][1:] == kernels.device[order][:-1]])
    latest = np.maximum.accumulate(end)
    before = np.concatenate([[0], latest[:-1]])
    alone = ~same | (before <= start)
    alone[:-1] &= ~same[1:] | (start[1:] >= end[:-1])
    result = np.empty(len(order), bool)
    result[order] = alone
    return result


def pieces_of(graph: ExecutionGraph, found: TraceCalls) -> tuple[list[tuple[OpCall, ...]], list[float], list[bool]]:
    """Calls, time, µs, and whether it ran alone, of every piece with recorded sizes.

    A kernel without an operation (launched before the window's first one) is given the calls of an operation that ran
    the same kernel over the same grid, where there is one. Sizes that a family had to assume count as unrecorded.
    """
    kernels = graph.kernels

    def launched(row: int) -> tuple[int, ...]:
        return tuple(int(getattr(kernels, column)[row]) for column in (
            "name", "grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z"))

    pieces, times, apart, by_launch, lone = [], [], [], {}, []
    alone = alone_on_device(graph)
    for row in range(len(found)):
        calls, time = found.calls_of_row(row), found.time_ns[row] / 1e3
        own = found.kernel[found.kernel_offset[row]:found.kernel_offset[row + 1]]
        if any({"unsized", "assumed"} & set(call.flags) for call in calls):
            if len(own) == 1:
                lone.append((launched(int(own[0])), time))
            continue
        if len(own) == 1:
            by_launch.setdefault(launched(int(own[0])), calls)
        pieces.append(calls)
        times.append(time)
        apart.append(bool(alone[own].all()))
    for key, time in lone:
        if key in by_launch:
            pieces.append(by_launch[key])
            times.append(time)
            apart.append(False)
    return pieces, times, apart


def traces(data: Path) -> list[Trace]:
    """Every usable trace."""
    paths = sorted((data / "traces").glob("**/*.json.gz"))
    paths = [path for path in paths if ".et." not in path.name and path.name != "et.json.gz"]
    return [trace for trace in map(read_trace, paths) if trace is not None]


def priced_us(trace: Trace, efficiencies: Efficiencies | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Time and 80% interval of every piece, µs; the ends of a piece of several calls add up."""
    calls = [call for piece in trace.pieces for call in piece]
    if efficiencies is None:
        priced = price(calls, trace.device)
        columns = [priced.time_us[priced.index], priced.low_us[priced.index], priced.high_us[priced.index]]
    else:
        columns = [np.empty(len(calls)) for _ in range(3)]
        for family, model in heuristic_models(trace.device, efficiencies).items():
            at = [i for i, call in enumerate(calls) if call.family == family]
            if at:
                times = model.predict([calls[i] for i in at])
                for column, values in zip(columns, (times.time_us, times.low_us, times.high_us), strict=True):
                    column[at] = values
    piece = np.repeat(np.arange(len(trace.pieces)), [len(p) for p in trace.pieces])
    time, low, high = (np.bincount(piece, weights=column, minlength=len(trace.pieces)) for column in columns)
    return time, low, high


def inside(trace: Trace, low: np.ndarray, high: np.ndarray) -> float:
    """Share of distinct pieces whose median measured time lies within the interval."""
    by_piece = defaultdict(list)
    for i, piece in enumerate(trace.pieces):
        by_piece[piece].append(i)
    hits = [low[at[0]] <= np.median(trace.piece_us[at]) <= high[at[0]] for at in by_piece.values()]
    return float(np.mean(hits))


def fitted_elsewhere(trace: Trace, others: Iterable[Trace], tables: Iterable[Measured] = ()) -> Efficiencies:
    """Efficiencies fitted to other traces (and tables)."""
    sets = [Measured(one.calls, one.measured_us, one.device) for one in others]
    return fit_over_devices([*sets, *tables], fitted=True)


def by_family(trace: Trace, time: np.ndarray) -> list[tuple[str, float, float]]:
    """Family, measured and priced time, µs, the longest first."""
    measured: dict[Family, float] = defaultdict(float)
    priced: dict[Family, float] = defaultdict(float)
    for piece, was, said in zip(trace.pieces, trace.piece_us, time, strict=True):
        measured[piece[0].family] += was
        priced[piece[0].family] += said
    return sorted(((f.value, measured[f], priced[f]) for f in measured), key=lambda row: -row[1])


def device_tables(data: Path, device: DeviceSpec) -> list[Measured]:
    """The published kernel tables of a device."""
    from kernel_tables import table_sets

    mine = [one for one in table_sets(data) if one.device.name == device.name]
    return [Measured(one.calls, one.measured_us, one.device) for one in mine]


def asked(trace: Trace, sheet: float, left_out: float) -> str:
    """The errors that were asked for, and whether they are met, given total priced times, µs."""
    found = next((limits for name, limits in ASKED.items() if name in trace.name), None)
    if found is None:
        return ""
    return "; asked " + ", ".join(
        f"{what} ≤ {limit:.0%}: {'met' if abs(priced / trace.total_us - 1) <= limit else 'missed'}"
        for what, limit, priced in zip(("data sheet", "left out"), found, (sheet, left_out), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data", nargs="?", type=Path, default=DATA)
    data = parser.parse_args().data
    found = traces(data)
    print(f"{'trace':52}{'device':14}{'sized':>7}{'measured ms':>12}{'data sheet':>12}{'inside':>8}"
          f"{'left out':>10}{'inside':>8}  {'fitted to'}")
    details = []
    for trace in found:
        time, low, high = priced_us(trace)
        folder = trace.name.split("/")[0]
        same = [t for t in found if t.device.name == trace.device.name and t.name != trace.name
                and not (folder == t.name.split("/")[0] and folder.startswith("dlrm"))]
        others = same or [t for t in found if t.device.name != trace.device.name]
        left_out, low_out, high_out = priced_us(trace, fitted_elsewhere(trace, others))
        mark = "*" if any(part in trace.name for part in FITTED_TO) else ""
        fitted = f"{len(same)} of the device" if same else f"others ({len(others)})"
        print(f"{trace.name[:50] + mark:52}{trace.device.name:14}{trace.sized:7.0%}{trace.total_us / 1e3:12.3f}"
              f"{time.sum() / trace.total_us - 1:+12.1%}{inside(trace, low, high):8.0%}"
              f"{left_out.sum() / trace.total_us - 1:+10.1%}{inside(trace, low_out, high_out):8.0%}  {fitted}"
              f"{asked(trace, float(time.sum()), float(left_out.sum()))}")
        details.append((trace, time, left_out))
    print("\nWith the device's published tables as well as its other traces")
    for trace, _, _ in details:
        tables = device_tables(data, trace.device)
        if tables:
            same = [t for t in found if t.device.name == trace.device.name and t.name != trace.name]
            time, low, high = priced_us(trace, fitted_elsewhere(trace, same, tables))
            print(f"{trace.name[:50]:52}{trace.device.name:14}{time.sum() / trace.total_us - 1:+12.1%}"
                  f"{inside(trace, low, high):8.0%}  {len(same)} traces, {len(tables)} tables")
    for trace, time, left_out in details:
        if "dlrm" in trace.name and "rank0" not in trace.name:
            continue
        print(f"\n{trace.name}: by family, ms (measured, data sheet, left out)")
        for (family, was, said), (_, _, again) in zip(by_family(trace, time), by_family(trace, left_out), strict=True):
            if was > 0.01 * trace.total_us:
                print(f"  {family:14}{was / 1e3:10.3f}{said / 1e3:10.3f} {said / was - 1:+7.0%}{again / 1e3:10.3f} "
                      f"{again / was - 1:+7.0%}")


if __name__ == "__main__":
    main()
