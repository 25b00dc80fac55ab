"""The operations section: what a step spends its time on, by operation, module, phase and kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from graph_predictor.figures import count, milliseconds
from graph_predictor.pages.parts import (
    Cell,
    PagePlot,
    PageSection,
    PageTable,
    Part,
    count_cell,
    ms_cell,
    share_cell,
    table,
    text_column,
    us_cell,
)
from graph_predictor.pages.parts import PageColumn as Column
from graph_predictor.prediction.result import PathItem
from graph_predictor.reports.breakdown import Breakdown, ModuleTime, OperationTime, PhaseTime
from graph_predictor.reports.call_tree import STEP, CallTree

LEAST_SHARE = 0.001
"""Nodes of less than this share of the whole are merged with their neighbours in the icicle."""
MOST_NODES = 1_500
ROW_PX = 22
TREE_PAGE = 40
"""Rows of the module tree that are seen at once."""
_PHASES = ("forward", "backward", "optimizer", "data", "other")
_COLOURS = {"step": "@{faint}", "forward": "@{forward}", "backward": "@{backward}", "optimizer": "@{optimizer}",
            "data": "@{loading}", "other": "@{other}"}
PATH_ROWS = 500


def operations_section(result: Breakdown, tree: CallTree | None = None,
                       lines: Mapping[str, str] | None = None) -> PageSection:
    """Return the section of a breakdown: the same tables as ``foretrace breakdown``, all rows, and the call tree.

    Args:
        result: the breakdown.
        tree: of its steps.
        lines: by module path the function that calls it, where stacks were recorded.
    """
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
    """Return modules with their forward and backward time, in the order of their paths, indented; times are those of
    a module and all below it."""
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
    """Return the call tree as an icicle of one kind of time; ``None`` where there is none of it.

    Args:
        tree: of a step.
        what: attribute of ``CallNode``.
        name: in words.
    """
    own = [getattr(node, what) for node in tree.nodes]
    whole = tree.inclusive(what)
    if whole[0] <= 0:
        return None
    kept = _kept(tree, whole)
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
                       # What small nodes below it take is its own.
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


def _kept(tree: CallTree, whole: list[int]) -> list[int]:
    """Return the nodes that are large enough, the largest ``MOST_NODES``, parents before children."""
    least = whole[0] * LEAST_SHARE
    large = [at for at, ns in enumerate(whole) if ns > least or at == 0]
    if len(large) > MOST_NODES:
        least = sorted((whole[at] for at in large), reverse=True)[MOST_NODES]
        large = [at for at in large if whole[at] > least or at == 0]
    # A parent is at least as large as what is below it, so that it is among them.
    return large


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
            {"name": "phase", "type": "ordinal", "domain": list(_COLOURS), "range": list(_COLOURS.values())}],
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
    """Return a critical path."""
    return table("path", "Critical path by operation, ms a step", [
        text_column("operation"), text_column("bound"), Column("ms"), Column("share")], (
        [e.operation, e.bound, ms_cell(e.time_us * 1e3), share_cell(e.share)] for e in path), most=PATH_ROWS)
