"""Sections of a step's page: its operations, the distance of its work from the roofline, and its ranks.

FLOPs and bytes in the roofline are those that the kernel models count (``kernel_models.families``). Times are recorded
or predicted. The roof comes from the data sheet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from graph_predictor.figures import count, milliseconds
from graph_predictor.prediction.result import PathItem, which_times
from graph_predictor.prediction.scenario import Scenario
from kernel_models.device import DeviceSpec
from kernel_models.op_call import PRODUCTS, Family, OpCall
from step_views.pages.page import notes_part
from step_views.pages.parts import (
    Cell,
    KeyFigure,
    KeyFigures,
    PagePlot,
    PageSection,
    PageTable,
    Part,
    count_cell,
    ms_cell,
    number_cell,
    share_cell,
    table,
    text_column,
    us_cell,
)
from step_views.pages.parts import PageColumn as Column
from step_views.reports.breakdown import Breakdown, ModuleTime, OperationTime, PhaseTime
from step_views.reports.call_tree import STEP, CallTree
from step_views.reports.ranks.report import JobReport, waiting_ns
from step_views.reports.ranks.stragglers import TOGETHER_NS
from step_views.reports.ranks.times import JobTimes
from tracer.arrays import Float64, Int64

LEAST_SHARE = 0.001
"""Smallest share of the whole for which the icicle draws a node; smaller nodes are merged with their parent."""
MOST_NODES = 1_500  # chosen: a browser draws these at once
ROW_PX = 22  # chosen: height of a line of text
TREE_PAGE = 40
"""Rows of the module tree that are visible at once."""
_PHASES = ("forward", "backward", "optimizer", "data", "other")
_PHASE_COLOURS = {"step": "@{faint}", "forward": "@{forward}", "backward": "@{backward}", "optimizer": "@{optimizer}",
            "data": "@{loading}", "other": "@{other}"}


def operations_section(result: Breakdown, tree: CallTree | None = None,
                       lines: Mapping[str, str] | None = None) -> PageSection:
    """Return the section of a breakdown: the call tree, and all rows of the tables of ``foretrace breakdown``.
    ``lines`` maps a module path to the function that calls the module, if stacks were recorded."""
    total = result.total()
    steps = max(len(result.counted), 1)
    each = "ms" if len(result.steps) == 1 else f"ms a step, mean of {count(steps)} (all ranks)"
    parts: list[Part] = []
    if tree is not None:
        parts += [plot for what, name in (("gpu_ns", "GPU"), ("host_ns", "host"))
                  if (plot := icicle(tree, what, name)) is not None]
    parts.append(path_table(result.critical_path))
    parts.append(_host_table("by-operation", f"By operation, {each}", "operation",
                             [(e.operation, e) for e in total.operations], steps))
    if any(e.module for e in total.modules):
        parts.append(_module_tree(total.phases, steps, each, lines or {}))
        parts.append(_host_table("by-module", f"By module, {each}", "module",
                                 [(e.module or "no module", e) for e in total.modules], steps))
    parts.append(table(
        "by-kernel", f"By kernel, {each}; share of the GPU's time",
        [text_column("kernel"), Column("count"), Column("ms"), Column("mean µs"), Column("share")],
        ([e.kernel, count_cell(e.count / steps), ms_cell(e.total_ns / steps), us_cell(e.mean_ns), share_cell(e.share)]
         for e in total.kernels)))
    return PageSection("operations", "Operations", [
        part for part in parts if not isinstance(part, PageTable) or part.rows],
        "Host time is an operation's own, without waiting and without that of the operations it calls; GPU time is of "
        "the work it launched.")


def _host_table(key: str, caption: str, title: str,
                entries: Sequence[tuple[str, OperationTime | ModuleTime]], steps: int) -> PageTable:
    waiting, gpu = (any(getattr(e, what) for _, e in entries) for what in ("waiting_ns", "gpu_ns"))
    return table(key, caption, [
        text_column(title, path=title == "module"), Column("calls"), Column("host"),
        *([Column("waiting")] if waiting else []), *([Column("GPU")] if gpu else [])], (
        [name, count_cell(e.calls / steps), ms_cell(e.host_ns / steps),
         *([ms_cell(e.waiting_ns / steps)] if waiting else []), *([ms_cell(e.gpu_ns / steps)] if gpu else [])]
        for name, e in entries))


def _module_tree(phases: Sequence[PhaseTime], steps: int, each: str, lines: Mapping[str, str]) -> PageTable:
    """Return modules with their time by phase, in the order of their paths, indented. Times include the modules
    below."""
    gpu = any(e.gpu_ns for e in phases)
    shown = [phase for phase in _PHASES if any(e.phase == phase and e.module for e in phases)]
    sums: dict[tuple[str, ...], dict[str, list[int]]] = {}
    for e in phases:
        path = tuple(filter(None, e.module.split("/")))
        for depth in range(1, len(path) + 1):
            own = sums.setdefault(path[:depth], {}).setdefault(e.phase, [0, 0])
            own[0] += e.host_ns
            own[1] += e.gpu_ns
    rows: list[list[Cell | str]] = []
    for path, by_phase in sorted(sums.items()):
        row: list[Cell | str] = ["\u2003" * (len(path) - 1) + path[-1]]
        for phase in shown:
            host, device = by_phase.get(phase, [0, 0])
            row += [ms_cell(host / steps), *([ms_cell(device / steps)] if gpu else [])]
        rows.append([*row, *([lines.get("/".join(path), "")] if lines else [])])
    columns = [text_column("module")]
    for phase in shown:
        columns += [Column(f"{phase} host"), *([Column(f"{phase} GPU")] if gpu else [])]
    if lines:
        columns.append(text_column("called in", path=True))
    return table("module-tree", f"Module tree, forward and backward, {each}", columns, rows,
                 note="Times include those of the modules below.", page=TREE_PAGE)


def icicle(tree: CallTree, what: str, name: str) -> PagePlot | None:
    """Return the call tree as an icicle of one kind of time; ``None`` if all these times are zero. ``what`` is an
    attribute of ``CallNode``."""
    own = [getattr(node, what) for node in tree.nodes]
    whole = tree.inclusive(what)
    if whole[0] <= 0:
        return None
    kept = _kept(whole, [node.parent for node in tree.nodes])
    values: list[dict[str, Any]] = []
    depth: dict[int, int] = {}
    phase: dict[int, str] = {}
    below = dict.fromkeys(kept, 0)
    for at in kept:
        node = tree.nodes[at]
        depth[at] = 0 if node.parent < 0 else depth[node.parent] + 1
        phase[at] = node.name if node.kind in ("phase", STEP) else phase[node.parent]
        if node.parent >= 0:
            below[node.parent] += whole[at]
    for at in kept:
        node = tree.nodes[at]
        values.append({"id": at, "parent": None if node.parent < 0 else node.parent, "name": node.name,
                       # Small nodes below are not drawn: their time counts as the node's own.
                       "own": (whole[at] - below[at]) / tree.steps / 1e6, "kind": node.kind, "phase": phase[at],
                       "ms": milliseconds(whole[at] / tree.steps), "self": milliseconds(own[at] / tree.steps),
                       "share": f"{whole[at] / whole[0] * 100:.1f}%"})
    levels = max(depth.values()) + 1
    spec = _icicle_spec(values, levels)
    left = len(tree.nodes) - len(kept)
    merged = f" {left:,} nodes of less than {LEAST_SHARE:.1%} each are part of the ones above them." if left else ""
    rows = [[Cell(tree.nodes[at].name), Cell(tree.nodes[at].kind), Cell(phase[at]), ms_cell(whole[at] / tree.steps),
             ms_cell(own[at] / tree.steps), share_cell(whole[at] / whole[0])]
            for at in sorted(kept, key=lambda at: -whole[at])]
    return PagePlot(
        f"icicle-{name.lower()}", f"{name[:1].upper()}{name[1:]} time by phase, module and operation",
        f"Each box is as wide as its {name} time; those below it are what it consists of. Choose a box to enlarge it, "
        f"the top one to see all.{merged}", spec,
        table(f"tree-{name.lower()}", f"{name[:1].upper()}{name[1:]} time of the call tree, ms a step", [
            text_column("name"), text_column("kind"), text_column("phase"), Column("ms"), Column("own"),
            Column("share")], rows, folded=True), vega=True)


def _kept(whole: list[int], parents: list[int]) -> list[int]:
    """Return the nodes that are large enough, at most the largest ``MOST_NODES``, parents before children."""
    least = whole[0] * LEAST_SHARE
    large = [at for at, ns in enumerate(whole) if ns > least or at == 0]
    if len(large) > MOST_NODES:
        least = sorted((whole[at] for at in large), reverse=True)[MOST_NODES]
        large = [at for at in large if whole[at] > least or at == 0]
    kept: dict[int, None] = {}
    for at in large:  # a child can exceed its parent only if a damaged recording has negative times
        if parents[at] < 0 or parents[at] in kept:
            kept[at] = None
    return list(kept)


def _icicle_spec(values: list[dict[str, Any]], levels: int) -> dict[str, Any]:
    height = levels * ROW_PX
    zoomed = {"signal": "datum.parent === null ? [0, 1] : [datum.x0, datum.x1]"}
    return {
        "$schema": "https://vega.github.io/schema/vega/v6.json", "height": height, "padding": 0,
        "autosize": {"type": "none"},
        "signals": [
            {"name": "width", "init": "containerSize()[0]",
             "on": [{"events": "window:resize", "update": "containerSize()[0]"}]},
            {"name": "focus", "value": [0, 1], "on": [{"events": "@box:click, @label:click",
                                                       "update": zoomed["signal"]}]}],
        "data": [{"name": "tree", "values": values, "transform": [
            {"type": "stratify", "key": "id", "parentKey": "parent"},
            {"type": "partition", "field": "own", "sort": {"field": "value", "order": "descending"}, "round": False,
             "size": [1, levels]}]}],
        "scales": [
            {"name": "x", "type": "linear", "domain": {"signal": "focus"}, "range": "width", "zero": False,
             "nice": False},
            {"name": "phase", "type": "ordinal", "domain": list(_PHASE_COLOURS),
             "range": list(_PHASE_COLOURS.values())}],
        "marks": [
            {"type": "rect", "name": "box", "from": {"data": "tree"}, "clip": True, "encode": {
                "enter": {"fill": {"scale": "phase", "field": "phase"}, "cursor": {"value": "pointer"},
                          "stroke": {"value": "@{raised}"}, "strokeWidth": {"value": 0.8},
                          "tooltip": {"signal": "{title: datum.name, kind: datum.kind, phase: datum.phase, 'ms a "
                                                "step': datum.ms, 'own ms': datum.self, share: datum.share}"}},
                "update": {"x": {"scale": "x", "field": "x0"}, "x2": {"scale": "x", "field": "x1"},
                           "y": {"signal": f"datum.y0 * {ROW_PX}"}, "y2": {"signal": f"datum.y1 * {ROW_PX}"},
                           "fillOpacity": {"signal": "datum.kind === 'operation' ? 0.72 : datum.kind === 'module' ? "
                                                     "0.88 : 1"}}}},
            {"type": "text", "name": "label", "from": {"data": "tree"}, "clip": True, "interactive": False, "encode": {
                "enter": {"text": {"field": "name"}, "baseline": {"value": "middle"}, "fontSize": {"value": 11},
                          "fill": {"signal": "datum.kind === 'step' ? '@{text}' : '@{on-mark}'"}},
                "update": {"x": {"signal": "max(scale('x', datum.x0), 0) + 4"},
                           "y": {"signal": f"(datum.y0 + 0.5) * {ROW_PX}"},
                           "limit": {"signal": "max(min(scale('x', datum.x1), width) - max(scale('x', datum.x0), 0) - "
                                               "7, 0.1)"},
                           "opacity": {"signal": "min(scale('x', datum.x1), width) - max(scale('x', datum.x0), 0) > 28 "
                                                 "? 1 : 0"}}}}],
    }


def path_table(path: Sequence[PathItem]) -> PageTable:
    """Return the table of a critical path."""
    return table("path", "Critical path by operation, ms a step", [
        text_column("operation"), text_column("bound"), Column("ms"), Column("share")], (
        [e.operation, e.bound, ms_cell(e.time_us * 1e3), share_cell(e.share)] for e in path), most=500)


_GROUPS = {"products": (Family.GEMM, Family.CONV, Family.RECURRENT), "attention": (Family.ATTENTION,),
           "norm, softmax, reduction": (Family.NORM, Family.SOFTMAX, Family.REDUCTION, Family.LOSS, Family.POOLING),
           "look-ups, indices": (Family.EMBEDDING, Family.INDEX, Family.SORT), "optimizer": (Family.OPTIMIZER,)}
_ELSE = "elementwise and other"
_GROUP_COLOURS = {"products": "@{compute}", "attention": "@{backward}", "norm, softmax, reduction": "@{forward}",
            "look-ups, indices": "@{copy}", "optimizer": "@{optimizer}", _ELSE: "@{host}"}


@dataclass(frozen=True, slots=True)
class RoofPoint:
    """Equal pieces of work: FLOPs and bytes of one piece, pieces a step, and their time, ns a step of all ranks."""

    name: str
    family: str
    dtype: str
    matrix: bool
    flops: float
    moved_bytes: float
    count: float
    time_ns: float

    def share(self, device: DeviceSpec) -> float:
        """Return the least time at the device's peak rates, as a share of the actual time."""
        rate = device.peak_tflops(self.dtype, matrix=self.matrix) * 1e3
        least_ns = max(self.flops / rate if rate else 0.0, self.moved_bytes / device.memory_bandwidth_gbps)
        return least_ns * self.count / self.time_ns if self.time_ns else 0.0


def roofline_section(times: JobTimes, scenario: Scenario) -> PageSection:
    """Return the roofline of predicted or recorded work; empty without a known device or work of known sizes."""
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
        parts.append(_roof_plot(which, points, device))
    sized = sum(p.time_ns for p in series[0][1])
    return PageSection("roofline", "Roofline", parts, (
        f"Each point is work of one kind and size: further right it computes more for each byte, higher up it is "
        f"faster. The roof is {target.name}'s data sheet: {target.memory_bandwidth_gbps:,.0f} GB/s and the peak rate "
        f"of the element type. Work of known sizes, {sized / 1e6:,.3f} ms a step of all ranks, is shown; bytes count "
        "each stored element once, so that what comes from a cache can lie above the roof."))


def _points(times: JobTimes, scenario: Scenario, predicted: bool) -> list[RoofPoint]:
    """Return the work of a step of all ranks, longest first."""
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
    # A recorded piece is repeated in every window: its kernels here, over its kernels in the recording, is how often.
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
                     most.family in PRODUCTS, sum(call.flops for call in calls),
                     sum(call.bytes_moved for call in calls), count, time_ns)


def _roof_plot(which: str, points: list[RoofPoint], device: DeviceSpec) -> PagePlot:
    shown = [p for p in points if p.flops > 0 and p.moved_bytes > 0 and p.time_ns > 0][:400]
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
        _roof_spec(values, roof), table(
            f"work-{which}", f"Work on {device.name}, {which}, a step of all ranks",
            [text_column("work"), text_column("family"), Column("pieces"), Column("ms"), Column("TFLOP/s"),
             Column("GB/s"), Column("FLOP/byte"), Column("of the roof", note="least time by the data sheet over the "
                                                                           "time it takes")], rows, folded=True))


def _group(family: str) -> str:
    return next((name for name, families in _GROUPS.items() if Family(family) in families), _ELSE)


def _peaks(points: list[RoofPoint], device: DeviceSpec) -> list[tuple[str, float]]:
    """Return peak rates of the element types that take most time, at most one for each kind of unit, with labels."""
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


def _roof_spec(values: list[dict[str, Any]], roof: list[dict[str, Any]]) -> dict[str, Any]:
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
                              "domain": list(_GROUP_COLOURS), "range": list(_GROUP_COLOURS.values())}},
                          "tooltip": [{"field": "name", "title": "work"}, {"field": "time"},
                                      {"field": "rate", "title": "TFLOP/s", "format": ",.2f", "type": "quantitative"},
                                      {"field": "intensity", "title": "FLOP/byte", "format": ",.2f",
                                       "type": "quantitative"}, {"field": "share", "title": "of the roof"}]}}],
    }


_PART_COLOURS = {"busy": "@{compute}", "exposed communication": "@{comm}", "waiting for ranks": "@{waiting}",
          "bubble": "@{loading}", "idle": "@{other}"}
_FIELDS = {"busy": "busy_ns", "exposed communication": "exposed_ns", "waiting for ranks": "waiting_ns",
           "bubble": "bubble_ns", "idle": "idle_ns"}


def ranks_section(found: JobReport) -> PageSection:
    """Return the section of a job's ranks, with the figures of ``foretrace ranks``."""
    steps = found.steps
    recorded, which = found.times.recorded, which_times(found.times.profiled, ran=found.times.ran)
    longest = f"the longest of {count(len(found.ranks))} ranks"
    figures = [KeyFigure("Recorded step", f"{milliseconds(recorded.step_ns)} ms", recorded.how())
               if recorded is not None else
               KeyFigure(f"{'Step' if found.times.predicted else 'Replayed'} {which}",
                         f"{milliseconds(found.step_ns)} ms", longest),
               *(KeyFigure(f"Largest over mean, {name}", f"{share:.3f}") for name, share in found.imbalance.items())]
    parts: list[Part] = [KeyFigures(figures)]
    if found.late is not None:
        parts.append(KeyFigures([KeyFigure(
            "Late because it computes longer", f"rank {found.times.number(found.late.rank)}",
            f"{milliseconds(found.late.more_ns)} ms a step more than the median rank")]))
    rows = _rank_table(found, steps)
    parts += [_bars(found, rows, steps)] if found.shows_meetings else [rows]
    if found.shows_meetings:
        parts += [_arrivals(found, steps), _traffic(found, steps)]
    parts.append(_rank_path(found))
    parts += notes_part(found.notes)
    return PageSection("ranks", "Ranks", [p for p in parts if not isinstance(p, PageTable) or p.rows], (
        "Busy is computing; exposed communication has nothing computed beside it; waiting is for the last rank to "
        "arrive at a collective."))


def _bars(found: JobReport, rows: PageTable, steps: int) -> PagePlot:
    used = {name: field for name, field in _FIELDS.items() if any(getattr(r, field) for r in found.ranks)}
    values: list[dict[str, Any]] = [
        {"rank": r.rank, "part": name, "ms": getattr(r, field) / steps / 1e6,
         "text": milliseconds(getattr(r, field) / steps), "order": i}
        for r in found.ranks for i, (name, field) in enumerate(used.items())]
    spec = {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json", "width": "container",
        "height": max(120, min(18 * len(found.ranks) + 30, 560)), "data": {"values": values},
        "mark": {"type": "bar", "cornerRadius": 1},
        "encoding": {
            "y": {"field": "rank", "type": "ordinal", "title": "rank", "sort": "ascending",
                  "axis": {"labelOverlap": True, "labelAngle": 0}},
            "x": {"field": "ms", "type": "quantitative", "title": "ms a step", "stack": "zero"},
            "order": {"field": "order"},
            "color": {"field": "part", "type": "nominal", "title": None, "sort": list(used),
                      "scale": {"domain": list(used), "range": [_PART_COLOURS[name] for name in used]}},
            "tooltip": [{"field": "rank"}, {"field": "part"}, {"field": "text", "title": "ms a step"}]},
    }
    return PagePlot("rank-parts", "Each rank's step, ms", "What each rank's step consists of; the parts add up to it.",
                    spec, rows)


def _rank_table(found: JobReport, steps: int) -> PageTable:
    bubbles, late = any(r.bubble_ns for r in found.ranks), any(r.late_ns for r in found.ranks)
    name = "step" if found.times.predicted else "replayed"
    return table(
        "by-rank", "By rank, ms a step; busy to idle add up to the step",
        [Column("rank"), Column(name), Column("busy"), Column("exposed comm."), Column("waiting for ranks"),
         *([Column("bubble")] if bubbles else []), Column("idle"), Column("overlapped comm."),
         *([Column("begins later by")] if late else [])],
        ([count_cell(r.rank), *(ms_cell(ns / steps) for ns in (
            r.step_ns, r.busy_ns, r.exposed_ns, r.waiting_ns, *([r.bubble_ns] if bubbles else []), r.idle_ns,
            r.overlapped_ns, *([r.late_ns] if late else [])))] for r in found.ranks), folded=False)


def _arrivals(found: JobReport, steps: int) -> PageTable:
    rows = sorted((r for r in found.ranks if r.arrivals.last), key=lambda r: -r.arrivals.held_ns)
    return table(
        "arrivals", "Who arrives last at collectives, ms a step",
        [Column("rank"), Column("last"), Column("of"), Column("behind the last but one"),
         Column("others waited, all together"), Column("job like median", note="the job's step if the rank had the "
                                                                             "median rank's work"), Column("gain")],
        ([count_cell(r.rank), count_cell(r.arrivals.last / steps), count_cell(r.arrivals.met / steps),
          ms_cell(r.arrivals.held_ns / steps), ms_cell(r.arrivals.others_waited_ns / steps), ms_cell(r.like_median_ns),
          share_cell(None if r.like_median_ns is None else 1 - r.like_median_ns / found.step_ns)] for r in rows))


def _traffic(found: JobReport, steps: int) -> PageTable:
    rows = []
    for row in found.groups:
        waited = waiting_ns(row, None)
        last = row.straggler if row.skew_ns and max(row.skew_ns) > TOGETHER_NS else None
        rows.append([
            Cell(row.group), Cell(row.kind), count_cell(row.ranks), count_cell(row.count / steps / max(row.ranks, 1)),
            number_cell(row.payload_bytes / steps / max(row.ranks, 1) / 1e6),
            ms_cell(row.transfer_ns / steps if row.matched else None),
            ms_cell(None if waited is None else waited * 1e3 / steps), ms_cell(row.exposed_ns / steps),
            ms_cell((row.kernel_ns - row.exposed_ns) / steps), number_cell(row.busbw_gbps, 1),
            Cell(f"{last[0]} ({last[1]:.0%})" if last else "–")])
    return table("groups", "Collectives by process group and kind, ms a step (means over its ranks)",
                 [text_column("group"), text_column("kind"), Column("ranks"), Column("calls"), Column("MB a rank"),
                  Column("transfer"), Column("waiting"), Column("exposed"), Column("overlapped"),
                  Column("bus GB/s"), text_column("last rank")], rows)


def _rank_path(found: JobReport) -> PageTable:
    total = sum(s.length_ns for s in found.path) or 1
    return table(
        "rank-path", f"Path across ranks ({found.path_step}), in order",
        [Column("rank"), Column("from ms"), Column("ms"), Column("share"), text_column("takes over at"),
         text_column("mostly")],
        ([count_cell(found.times.number(s.rank)), ms_cell(s.start_ns), ms_cell(s.length_ns),
          share_cell(s.length_ns / total), s.after,
          "; ".join(f"{p.bound.label} {milliseconds(p.time_ns)} {p.operation}" for p in s.parts[:3])]
         for s in found.path), most=200)
