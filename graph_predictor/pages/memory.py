"""The memory section: device memory by what it holds, at its fullest moment and over the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from graph_predictor.pages.parts import (
    MOST_ROWS,
    Cell,
    PagePlot,
    PageSection,
    Part,
    Stack,
    share_cell,
    table,
    text_column,
)
from graph_predictor.pages.parts import PageColumn as Column
from tracer.memory_account import MemoryAccount, binary_size

_COLOURS = {"parameters": "compute", "buffers": "copy", "gradients": "backward", "optimizer_state": "optimizer",
            "activations": "forward", "temporaries": "host", "other": "other", "reserved": "sync",
            "held before the task": "compute", "needed more in it": "host"}
MOST_MOMENTS = MOST_ROWS
"""As many as its table has rows, so that the two show the same."""


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
        parts += account_parts(account, limit_bytes, device)
    parts += [_plot(each) for each in moments if len(each.at)]
    return PageSection("memory", "Memory", [*parts, *more])


def account_parts(account: MemoryAccount, limit_bytes: float | None = None, device: str = "", *,
                  name: str = "Peak memory", key: str = "memory-parts") -> list[Part]:
    """Return a fullest moment by what memory holds, as a bar and as a table."""
    total = account.total
    of = f" of the {limit_bytes / 1e9:,.4g} GB of {device}" if limit_bytes else ""
    shown = [(name.replace("_", " "), binary_size(size), size / total, _COLOURS.get(name, "other"))
             for name, size in account.parts.items() if size > 0]
    rows = [[Cell(name), Cell(text, share * total), share_cell(share)] for name, text, share, _ in shown]
    return [Stack(f"{name} {total / 1e9:,.2f} GB ({binary_size(total)}){of}, by what it holds", shown),
            table(key, f"{name} at the fullest moment", [text_column("holds"), Column("bytes"), Column("share")], rows)]


def _plot(found: MemoryMoments) -> PagePlot:
    kept, step = _fullest(found)
    values: list[dict[str, Any]] = [
        {"at": float(found.at[i]), "kind": name.replace("_", " "), "gb": float(column[i]) / 1e9}
        for name, column in found.kinds.items() for i in kept]
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
            for i in kept)
    fewer = f" Each point is the fullest of {step:,} moments." if step > 1 else ""
    return PagePlot(found.key, found.title, f"Device memory by what it holds.{fewer}", spec,
                    table(f"table-of-{found.key}", found.title, columns, rows, folded=True))


def _fullest(found: MemoryMoments) -> tuple[list[int], int]:
    """Return which moments are drawn, and of how many each is the one that needs most in all: a sum of the kinds' own
    peaks never was, and of several changes at one time a plot would draw the sum."""
    total = [sum(float(column[i]) for column in found.kinds.values()) for i in range(len(found.at))]
    places = [max(same, key=total.__getitem__)
              for _, same in groupby(range(len(total)), key=lambda i: found.at[i])]
    step = max(1, -(-len(places) // MOST_MOMENTS))
    return [max(places[start:start + step], key=total.__getitem__) for start in range(0, len(places), step)], step
