"""The memory section: device memory by what it holds, at its fullest moment and over the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from graph_predictor.pages.parts import Cell, PagePlot, PageSection, Part, Stack, share_cell, table, text_column
from graph_predictor.pages.parts import PageColumn as Column
from tracer.memory_account import MemoryAccount, binary_size

_COLOURS = {"parameters": "compute", "buffers": "copy", "gradients": "backward", "optimizer_state": "optimizer",
            "activations": "forward", "temporaries": "host", "other": "other", "reserved": "sync",
            "held before the task": "compute", "needed more in it": "host"}
MOST_MOMENTS = 2_000


@dataclass(frozen=True, slots=True)
class MemoryMoments:
    """Memory over a step: ``at`` are moments, by number or in ms as ``unit`` says, ``kinds`` the bytes of each kind at
    them; ``names`` say what a moment is."""

    at: Sequence[float]
    kinds: dict[str, Sequence[float]]
    unit: str = "ms"
    names: Sequence[str] = ()
    title: str = "Memory over the step"
    key: str = "memory-moments"


def memory_section(account: MemoryAccount | None = None, moments: Sequence[MemoryMoments] = (), *,
                   limit_bytes: float | None = None, device: str = "", more: Sequence[Part] = ()) -> PageSection:
    """Return the section; without parts where nothing is known.

    Args:
        account: bytes at the fullest moment, by kind.
        moments: memory over the step, by kind.
        limit_bytes: what the device has, and ``device`` its name.
        device: name of the device.
        more: further parts.
    """
    parts: list[Part] = []
    if account is not None and account.total > 0:
        parts += _account(account, limit_bytes, device)
    parts += [_plot(each) for each in moments if len(each.at)]
    return PageSection("memory", "Memory", [*parts, *more])


def _account(account: MemoryAccount, limit: float | None, device: str) -> list[Part]:
    total = account.total
    of = f" of the {limit / 1e9:,.4g} GB of {device}" if limit else ""
    shown = [(name.replace("_", " "), binary_size(size), size / total, _COLOURS.get(name, "other"))
             for name, size in account.parts.items() if size > 0]
    rows = [[Cell(name), Cell(text, share * total), share_cell(share)] for name, text, share, _ in shown]
    return [Stack(f"Peak memory {total / 1e9:,.2f} GB ({binary_size(total)}){of}, by what it holds", shown),
            table("memory-parts", "Memory at its fullest moment", [text_column("holds"), Column("bytes"),
                                                                   Column("share")], rows)]


def _plot(found: MemoryMoments) -> PagePlot:
    values: list[dict[str, Any]] = []
    step = max(1, -(-len(found.at) // MOST_MOMENTS))
    for name, column in found.kinds.items():
        # Of several moments the fullest stands for all.
        values += [{"at": float(found.at[i]), "kind": name.replace("_", " "),
                    "gb": max(float(size) for size in column[i:i + step]) / 1e9}
                   for i in range(0, len(found.at), step)]
    kinds = [name.replace("_", " ") for name in found.kinds]
    colours = [f"@{{{_COLOURS.get(name, 'other')}}}" for name in found.kinds]
    spec = {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json", "width": "container", "height": 260,
        "data": {"values": values}, "mark": {"type": "area", "interpolate": "step-after", "opacity": 0.85},
        "encoding": {
            "x": {"field": "at", "type": "quantitative", "title": found.unit, "scale": {"nice": False, "zero": False}},
            "y": {"field": "gb", "type": "quantitative", "title": "GB", "stack": True},
            "color": {"field": "kind", "type": "nominal", "title": None, "sort": kinds,
                      "scale": {"domain": kinds, "range": colours}},
            "tooltip": [{"field": "kind"}, {"field": "gb", "title": "GB", "format": ",.3f", "type": "quantitative"},
                        {"field": "at", "title": found.unit, "format": ",.3f", "type": "quantitative"}]},
    }
    columns = [text_column("moment") if found.names else Column(found.unit),
               *(Column(f"{name.replace('_', ' ')} GB") for name in found.kinds)]
    rows = ([found.names[i] if found.names else Cell(f"{found.at[i]:,.3f}", float(found.at[i])),
             *(Cell(f"{float(column[i]) / 1e9:,.3f}", float(column[i])) for column in found.kinds.values())]
            for i in range(len(found.at)))
    fewer = f" Each point is the fullest of {step:,} moments." if step > 1 else ""
    return PagePlot(found.key, found.title, f"Device memory by what it holds.{fewer}", spec,
                    table(f"table-of-{found.key}", found.title, columns, rows, folded=True))
