"""The memory section: device memory by content, at its fullest moment and over the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from graph_predictor.figures import signed_percent
from graph_predictor.prediction.result import memory_account
from graph_predictor.prediction.scenario import Scenario
from graph_predictor.request.memory_fit import Fit, fit_of, with_waste
from kernel_models.device import DeviceSpec
from step_views.pages.parts import (
    MOST_ROWS,
    Cell,
    PageNotes,
    PagePlot,
    PageSection,
    Part,
    Prose,
    Stack,
    share_cell,
    table,
    text_column,
)
from step_views.pages.parts import PageColumn as Column
from tracer.device_memory import KINDS, PEAK, MemoryAccount, MemoryTimeline, binary_size, memory_timeline
from tracer.graph import ExecutionGraph

_COLOURS = {"parameters": "compute", "buffers": "copy", "gradients": "backward", "optimizer_state": "optimizer",
            "activations": "forward", "temporaries": "host", "other": "other", "reserved": "sync",
            "held before the task": "compute", "needed more in it": "host"}
MOST_MOMENTS = MOST_ROWS
"""Most moments of a plot: as many as rows of its table, so that both show the same."""


@dataclass(frozen=True, slots=True)
class MemoryMoments:
    """Memory over a step: moments ``at`` (numbers, or ms if ``unit`` says so), bytes of each kind at these moments, and
    ``names`` of the moments."""

    at: Sequence[float]
    kinds: dict[str, Sequence[float]]
    unit: str = "ms"
    names: Sequence[str] = ()
    title: str = "Memory over the step"
    key: str = "memory-moments"


def memory_section(account: MemoryAccount | None = None, moments: Sequence[MemoryMoments] = (), *,
                   limit_bytes: float | None = None, device: str = "", more: Sequence[Part] = ()) -> PageSection:
    """Return the memory section; without parts if nothing is known."""
    parts: list[Part] = []
    if account is not None and account.total > 0:
        parts += account_parts(account, limit_bytes, device)
    parts += [_plot(each) for each in moments if len(each.at)]
    return PageSection("memory", "Memory", [*parts, *more])


def account_parts(account: MemoryAccount, limit_bytes: float | None = None, device: str = "", *,
                  name: str = "Peak memory", key: str = "memory-parts") -> list[Part]:
    """Return memory's content at the fullest moment, as a bar and as a table."""
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
    """Return the moments to draw (of each group, the one of largest total), and the number of moments in a group.
    Kinds' own peaks may lie at different times, so their sum would never have existed."""
    total = [sum(float(column[i]) for column in found.kinds.values()) for i in range(len(found.at))]
    places = [max(same, key=total.__getitem__)
              for _, same in groupby(range(len(total)), key=lambda i: found.at[i])]
    step = max(1, -(-len(places) // MOST_MOMENTS))
    return [max(places[start:start + step], key=total.__getitem__) for start in range(0, len(places), step)], step


INFERRED = "What measured memory holds is inferred from the phases it was handed out and given back in."


def scenario_memory(scenario: Scenario, measured: MemoryTimeline | None = None,
                    traced: MemoryTimeline | None = None) -> PageSection:
    """Return the memory section of a predicted step. ``traced`` is the memory of its program traced by shapes, used if
    the step has no memory data itself."""
    graphs = scenario.built.graphs
    account = memory_account(scenario)
    changed = bool(scenario.activation_factors or scenario.rewrites)
    if account is not None:
        # Edits scale the fullest moment only; their effect on other moments is unknown.
        traced = None if changed else fullest([graph for graph in graphs if PEAK in graph.meta.memory])
    elif traced is not None:
        account = traced.at_peak
    batch = None if changed else graphs[0].meta.workload.get("settings", {}).get("batch")
    return step_memory(account, scenario.devices.scaled(), measured, traced, batch=batch)


def step_memory(account: MemoryAccount | None, device: DeviceSpec | None, measured: MemoryTimeline | None = None,
                predicted: MemoryTimeline | None = None, *, batch: int | None = None) -> PageSection:
    """Return the memory section of one step; without parts if nothing is known. ``account`` is the predicted fullest
    moment, ``predicted`` the memory over the step of the program traced by shapes."""
    limit, name = (None, "") if device is None else (device.memory_gb * 1e9 or None, device.name)
    of_gpu = limit if measured is None or measured.on_device else None
    said = [_fit(one, limit, name, what, batch) for one, limit, what in (
        (account, limit, "predicted"), (None if measured is None else measured.at_peak, of_gpu, "measured"))
        if one is not None and one.total > 0 and limit]
    if account is not None and measured is not None and measured.peak_bytes:
        more = account.total / measured.peak_bytes - 1
        said.append(f"Predicted are {binary_size(account.total)}, measured were {binary_size(measured.peak_bytes)} "
                    f"({signed_percent(more)}).")
    more_parts: list[Part] = [Prose(said)] if said else []
    if measured is not None and measured.peak_bytes:
        more_parts += account_parts(measured.at_peak, of_gpu, name, name=f"Measured ({measured.source})",
                                    key="measured-memory")
    known = [(one, what) for one, what in ((predicted, "predicted"), (measured, "measured")) if one is not None]
    more_parts += [_places(one, what) for one, what in known if one.places]
    notes = [note for one, _ in known for note in one.notes]
    if measured is not None and measured.inferred:
        notes.append(INFERRED)
    if notes:
        more_parts.append(PageNotes(notes))
    return memory_section(account, [moments_of(one, what) for one, what in known], limit_bytes=limit, device=name,
                          more=more_parts)


def fullest(graphs: Sequence[ExecutionGraph]) -> MemoryTimeline | None:
    """Return the memory timeline of the rank with the highest peak; ``None`` if no rank has one."""
    found = [memory_timeline(graph) for graph in graphs if len(graph.allocations)]
    return max(found, key=lambda one: (one.on_device, one.peak_bytes), default=None)


def moments_of(found: MemoryTimeline, what: str) -> MemoryMoments:
    """Return a memory timeline in the form that pages draw."""
    at = (found.time_ns / 1e6 if found.timed else found.time_ns).tolist()
    kinds = {kind.value: found.held_bytes[i].tolist() for i, kind in enumerate(KINDS) if found.held_bytes[i].any()}
    return MemoryMoments(at, kinds, "ms" if found.timed else "operation",
                         title=f"Memory over the step, {what} ({found.source})", key=f"{what}-moments")


def _fit(account: MemoryAccount, limit: float, device: str, what: str, batch: int | None) -> str:
    """Return a sentence on whether a step fits its device."""
    memory = with_waste(account)
    fit = {Fit.FITS: "fits", Fit.TIGHT: "may not fit", Fit.NO: "does not fit"}[fit_of(memory, limit)]
    step = "The step" if batch is None else f"Batch {batch:,}"
    return (f"{step} {fit} {device}: its {what} {binary_size(account.total)}, with contexts and fragmentation as plans "
            f"assume them, are {binary_size(memory.low)} to {binary_size(memory.high)} of {binary_size(limit)}.")


def _places(found: MemoryTimeline, what: str) -> Part:
    total = max(found.peak_bytes, 1)
    return table(f"{what}-places", f"At the fullest moment, by who allocated it ({what})",
                 [text_column("place", path=True), Column("bytes"), Column("share")],
                 ([Cell(place), Cell(binary_size(size), size), share_cell(size / total)]
                  for place, size in found.places.items()))
