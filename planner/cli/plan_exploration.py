"""``foretrace plan`` over devices and their figures: which cases there are, and the tables of what was found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graph_predictor.cli.console import Column, Report
from graph_predictor.figures import percent
from planner.parallel import exploration, technology


def plain_exploration(found: Sequence[exploration.Explored]) -> dict[str, Any]:
    """Return every case as values."""
    return {"model": found[0].plans.model, "gpus": found[0].plans.gpus, "cases": [_values(each) for each in found],
            "notes": list(dict.fromkeys(note for each in found for note in each.plans.notes))}


def _values(each: exploration.Explored) -> dict[str, Any]:
    from dataclasses import asdict

    best = each.best
    return {
        "device": each.plans.device, "topology": each.plans.topology, "factors": asdict(each.case.technology),
        "power_w": each.spec.power_w, "memory_gb_device": each.spec.memory_gb,
        "sources": {key: text for key, text in each.spec.sources.items() if ", × " in text},
        "plan": None if best is None else str(best.estimate.plan),
        "step_ms": None if best is None else best.estimate.time_us / 1e3,
        "interval_ms": None if best is None else [best.estimate.low_us / 1e3, best.estimate.high_us / 1e3],
        "memory_gb": None if best is None else best.memory.total / 1e9,
        "tokens_per_gpu_second": each.tokens_per_gpu_second, "joules_per_token": each.joules_per_token,
        "cost_per_million_tokens": each.cost_per_million_tokens, "binds": each.binds, "gains": dict(each.gains)}


def report_exploration(found: Sequence[exploration.Explored]) -> None:
    """Print the table of all cases and, over two changed figures, the map of what binds."""
    out, first = Report(), found[0].plans
    out.line(f"{first.model} on {first.gpus} GPUs, the best plan of each device that was asked for.")
    columns = [Column("device", name=True, whole=True), Column("step\nms"), Column("80% between\nms"),
               Column("tokens a second\nand GPU"), Column("memory\nGB"), Column("J a\ntoken"),
               Column("binds", name=True, whole=True), Column("twice as much of it\nsaves"),
               Column("plan", name=True, whole=True)]
    priced = any(each.case.price is not None for each in found)
    if priced:
        columns.insert(6, Column("cost of 10⁶\ntokens"))
    rows = []
    for each in found:
        best, joules, cost = each.best, each.joules_per_token, each.cost_per_million_tokens
        row = [each.plans.device, *(("–",) * 4 if best is None else (
            f"{best.estimate.time_us / 1e3:,.1f}",
            f"{best.estimate.low_us / 1e3:,.1f} – {best.estimate.high_us / 1e3:,.1f}",
            f"{each.tokens_per_gpu_second:,.0f}", f"{best.memory.total / 1e9:.1f}")),
            "–" if joules is None else f"{joules:.3g}", each.binds,
            percent(each.gains[each.binds]) if each.binds in each.gains else "–",
            "none fits" if best is None else str(best.estimate.plan)]
        if priced:
            row.insert(6, "–" if cost is None else f"{cost:.3g}")
        rows.append(row)
    out.table("Devices", columns, rows)
    out.line("J a token: every board at its power limit all the time. What binds is what the same plan would be "
             "quickest with twice as much of: compute with the power that feeds it, power alone, the memory's "
             "bandwidth, the network; capacity: the best plan of all with twice the memory.")
    _report_map(out, found)
    for line in _sources(found):
        out.line(line)
    out.notes(dict.fromkeys(note for each in found for note in each.plans.notes))


def _sources(found: Sequence[exploration.Explored]) -> list[str]:
    """Say of every changed device where its figures are from; figures of one source together."""
    lines = {}
    for each in found:
        keys: dict[str, dict[str, None]] = {}
        for key, text in each.spec.sources.items():
            if ", × " in text:
                keys.setdefault(text, {})[key.partition(".")[0] if "tflops" in key else key] = None
        if keys:
            lines[each.spec.name] = f"{each.spec.name}: " + "; ".join(
                f"{', '.join(names)} from {text}" for text, names in keys.items()) + "."
    return list(lines.values())


def _report_map(out: Report, found: Sequence[exploration.Explored]) -> None:
    """Print what binds over two figures, with the step's time beside the first case's."""
    values = {axis: list(dict.fromkeys(getattr(each.case.technology, axis) for each in found))
              for axis in technology.AXES}
    axes = [axis for axis, factors in values.items() if len(factors) > 1]
    if len(axes) != 2 or len({each.case.device for each in found}) > 1:
        return
    down, across = axes
    by = {(getattr(each.case.technology, down), getattr(each.case.technology, across)): each for each in found}
    # Beside the device as it is, where that is among them.
    start = min(found, key=lambda each: abs(getattr(each.case.technology, down) - 1)
                + abs(getattr(each.case.technology, across) - 1)).best

    def cell(each: exploration.Explored) -> str:
        if each.best is None or start is None:
            return each.binds
        return f"{each.binds} ×{each.best.estimate.time_us / start.estimate.time_us:.2f}"

    out.table("What binds, and the step's time beside the one nearest to the device as it is", [
        Column(f"{down} \\ {across}", name=True), *(Column(f"× {value:g}", name=True, whole=True)
                                                   for value in values[across])], [
        [f"× {one:g}", *(cell(by[one, other]) for other in values[across])] for one in values[down]])
