"""The roofline section: how near the device's work comes to what its arithmetic and its memory allow.

Operations and bytes of a piece of work are those that the kernel models count (``kernel_models.families``); time is
recorded or predicted; the roof is the data sheet's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from graph_predictor.pages.parts import (
    Cell,
    PagePlot,
    PageSection,
    count_cell,
    ms_cell,
    number_cell,
    share_cell,
    table,
    text_column,
)
from graph_predictor.pages.parts import PageColumn as Column
from graph_predictor.prediction.scenario import Scenario
from graph_predictor.reports.ranks.times import JobTimes
from kernel_models.device import DeviceSpec
from kernel_models.op_call import Family, OpCall
from tracer.arrays import Float64, Int64

MOST_POINTS = 400
_MATRIX = (Family.GEMM, Family.CONV, Family.ATTENTION, Family.RECURRENT)
_GROUPS = {"products": (Family.GEMM, Family.CONV, Family.RECURRENT), "attention": (Family.ATTENTION,),
           "norm, softmax, reduction": (Family.NORM, Family.SOFTMAX, Family.REDUCTION, Family.LOSS, Family.POOLING),
           "look-ups, indices": (Family.EMBEDDING, Family.INDEX, Family.SORT), "optimizer": (Family.OPTIMIZER,)}
_ELSE = "elementwise and other"
_COLOURS = {"products": "@{compute}", "attention": "@{backward}", "norm, softmax, reduction": "@{forward}",
            "look-ups, indices": "@{copy}", "optimizer": "@{optimizer}", _ELSE: "@{host}"}


@dataclass(frozen=True, slots=True)
class RoofPoint:
    """Equal pieces of work: what they compute, how often a step, and how long (ns a step, of all ranks)."""

    name: str
    family: str
    dtype: str
    matrix: bool
    flops: float
    moved_bytes: float
    count: float
    time_ns: float

    def share(self, device: DeviceSpec) -> float:
        """Return the time that the device's peak rates allow over what it takes."""
        rate = device.peak_tflops(self.dtype, matrix=self.matrix) * 1e3
        least_ns = max(self.flops / rate if rate else 0.0, self.moved_bytes / device.memory_bandwidth_gbps)
        return least_ns * self.count / self.time_ns if self.time_ns else 0.0


def roofline_section(times: JobTimes, scenario: Scenario) -> PageSection:
    """Return the section; without parts where the device is not known or ran nothing whose sizes are.

    Args:
        times: of the job, recorded or predicted.
        scenario: what it was simulated of.
    """
    devices = scenario.devices
    target = devices.scaled() or devices.source
    empty = PageSection("roofline", "Roofline", [])
    if target is None or target.memory_bandwidth_gbps <= 0 or target.placeholder:
        return empty
    series = [("predicted" if times.predicted else "recorded", _points(times, scenario, times.predicted), target)]
    if times.predicted and times.edits and times.ran and devices.source is not None and not devices.source.placeholder:
        series.append(("recorded", _points(times, scenario, False), devices.source))
    if not any(point.flops > 0 for _, points, _ in series for point in points):
        return empty
    parts = []
    for which, points, device in series:
        parts.append(_plot(which, points, device))
    sized = sum(p.time_ns for p in series[0][1])
    return PageSection("roofline", "Roofline", parts, (
        f"Each point is work of one kind and size: further right it computes more for each byte, higher up it is "
        f"faster. The roof is {target.name}'s data sheet: {target.memory_bandwidth_gbps:,.0f} GB/s and the peak rate "
        f"of the element type. Work of known sizes, {sized / 1e6:,.3f} ms a step of all ranks, is shown; bytes count "
        "each stored element once, so that what comes from a cache can lie above the roof."))


def _points(times: JobTimes, scenario: Scenario, predicted: bool) -> list[RoofPoint]:
    """Return the work of a step of all ranks, the longest first."""
    work = scenario.work
    kernels = np.concatenate([w.kernels for step in times.windows for w in step] or [np.zeros(0, np.int64)])
    steps = max(len(times.windows) * times.steps, 1)
    rows = times.kernel[kernels]
    ns: Float64 = (times.simulated.kernel_end - times.simulated.kernel_start)[kernels].astype(np.float64)
    if not predicted:
        ns = times.built.recorded_program.kernel_duration[rows].astype(np.float64)
    piece = work.kernel_group[rows]
    known = piece >= 0
    known[known] = work.sized[piece[known]]
    piece, ns = piece[known], ns[known]
    group: Int64 = work.call_row[piece]
    time = np.bincount(group, weights=ns, minlength=len(work.calls))
    different = np.unique(piece)
    # A recorded piece is repeated in every window it is in; its kernels' number says how often.
    kernels_of = np.bincount(work.kernel_group[work.kernel_group >= 0], minlength=len(work.call_row))
    seen = np.bincount(piece, minlength=len(work.call_row))
    times_of = np.where(kernels_of > 0, seen / np.maximum(kernels_of, 1), 0.0)
    count = np.bincount(work.call_row[different], weights=times_of[different], minlength=len(work.calls))
    found = []
    for number in np.flatnonzero(time > 0).tolist():
        calls = scenario.kernels.calls.get(number, work.calls[number]) if predicted else work.calls[number]
        calls = tuple(call for call in calls if call.family not in (Family.TRANSFER, Family.MEMSET))
        if calls:
            found.append(_point(calls, count[number] / steps, time[number] / steps))
    return sorted(found, key=lambda point: -point.time_ns)


def _point(calls: tuple[OpCall, ...], count: float, time_ns: float) -> RoofPoint:
    most = max(calls, key=lambda call: (call.flops, call.bytes_moved))
    sizes = "×".join(f"{size:,}" for size in most.dims[:6])
    more = f" and {len(calls) - 1} more" if len(calls) > 1 else ""
    return RoofPoint(f"{most.kind or most.family.value} {sizes} {most.dtype}{more}", most.family.value, most.dtype,
                     most.family in _MATRIX, sum(call.flops for call in calls),
                     sum(call.bytes_moved for call in calls), count, time_ns)


def _plot(which: str, points: list[RoofPoint], device: DeviceSpec) -> PagePlot:
    shown = [p for p in points if p.flops > 0 and p.moved_bytes > 0 and p.time_ns > 0][:MOST_POINTS]
    values = [{"name": p.name, "family": _group(p.family), "intensity": p.flops / p.moved_bytes,
               "rate": p.flops * p.count / p.time_ns / 1e3, "ms": p.time_ns / 1e6,
               "share": f"{p.share(device):.1%}", "time": f"{p.time_ns / 1e6:,.3f} ms a step"} for p in shown]
    peaks = _peaks(shown, device)
    low = min((p.flops / p.moved_bytes for p in shown), default=0.01) / 2
    high = max((p.flops / p.moved_bytes for p in shown), default=100.0) * 2
    roof: list[dict[str, Any]] = []
    for label, peak in peaks:
        ridge = peak * 1e3 / device.memory_bandwidth_gbps
        roof += [{"x": x, "y": min(peak, x * device.memory_bandwidth_gbps / 1e3), "roof": label}
                 for x in sorted({min(low, ridge / 2), ridge, max(high, ridge * 2)})]
    rows = ([Cell(p.name), Cell(p.family), count_cell(round(p.count, 1)), ms_cell(p.time_ns),
             number_cell(p.flops * p.count / p.time_ns / 1e3 if p.time_ns else None),
             number_cell(p.moved_bytes * p.count / p.time_ns if p.time_ns else None, 1),
             number_cell(p.flops / p.moved_bytes if p.moved_bytes else None), share_cell(p.share(device))]
            for p in points)
    left = sum(1 for p in points if p.flops > 0) - len(shown)
    fewer = f" The longest {len(shown):,} are drawn, {left:,} more are in the table." if left > 0 else ""
    return PagePlot(
        f"roof-{which}", f"Work of the step on {device.name}, {which}",
        "Rate of each kind of work over the operations it does for each byte; the area is its time. Ctrl and the "
        f"wheel zoom, dragging moves, a double click shows all.{fewer}",
        _spec(values, roof), table(
            f"work-{which}", f"Work on {device.name}, {which}, a step of all ranks",
            [text_column("work"), text_column("family"), Column("pieces"), Column("ms"), Column("TFLOP/s"),
             Column("GB/s"), Column("FLOP/byte"), Column("of the roof", note="least time by the data sheet over the "
                                                                           "time it takes")], rows, folded=True))


def _group(family: str) -> str:
    return next((name for name, families in _GROUPS.items() if Family(family) in families), _ELSE)


def _peaks(points: list[RoofPoint], device: DeviceSpec) -> list[tuple[str, float]]:
    """Return the peak rates of the element types that take most time: at most one of each kind of unit."""
    found: dict[str, float] = {}
    for matrix in (True, False):
        sums: dict[str, float] = {}
        for p in points:
            if p.matrix == matrix:
                sums[p.dtype] = sums.get(p.dtype, 0.0) + p.time_ns
        if sums:
            dtype = max(sums, key=lambda name: sums[name])
            peak = device.peak_tflops(dtype, matrix=matrix)
            found.setdefault(f"{dtype} {'matrix' if matrix else 'vector'} units, {peak:,.1f} TFLOP/s", peak)
    return list(found.items())


def _spec(values: list[dict[str, Any]], roof: list[dict[str, Any]]) -> dict[str, Any]:
    x = {"type": "quantitative", "scale": {"type": "log"}, "axis": {"format": "~g", "tickCount": 6}}
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json", "width": "container", "height": 380,
        "layer": [
            {"data": {"values": roof}, "mark": {"type": "line", "strokeWidth": 1.6, "clip": True},
             "encoding": {"x": {**x, "field": "x", "title": "FLOP per byte"},
                          "y": {**x, "field": "y", "title": "TFLOP/s"}, "detail": {"field": "roof"},
                          "color": {"value": "@{quiet}"},
                          "strokeDash": {"field": "roof", "title": None, "type": "nominal"}}},
            {"data": {"values": values},
             "params": [{"name": "zoom", "bind": "scales", "select": {
                 "type": "interval", "zoom": "wheel![event.ctrlKey]"}}],
             "mark": {"type": "circle", "opacity": 0.72, "clip": True, "stroke": "@{raised}", "strokeWidth": 0.6},
             "encoding": {"x": {**x, "field": "intensity"}, "y": {**x, "field": "rate"},
                          "size": {"field": "ms", "type": "quantitative", "scale": {"range": [24, 900]},
                                   "legend": None},
                          "color": {"field": "family", "type": "nominal", "title": None, "scale": {
                              "domain": list(_COLOURS), "range": list(_COLOURS.values())}},
                          "tooltip": [{"field": "name", "title": "work"}, {"field": "time"},
                                      {"field": "rate", "title": "TFLOP/s", "format": ",.2f", "type": "quantitative"},
                                      {"field": "intensity", "title": "FLOP/byte", "format": ",.2f",
                                       "type": "quantitative"}, {"field": "share", "title": "of the roof"}]}}],
    }
