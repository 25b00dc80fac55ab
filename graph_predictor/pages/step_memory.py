"""The memory section of one step: predicted beside measured, over the step, and whether it fits its device."""

from __future__ import annotations

from collections.abc import Sequence

from graph_predictor.figures import signed_percent
from graph_predictor.pages.memory import MemoryMoments, account_parts, memory_section
from graph_predictor.pages.parts import Cell, PageNotes, PageSection, Part, Prose, share_cell, table, text_column
from graph_predictor.pages.parts import PageColumn as Column
from graph_predictor.prediction.memory import memory_account
from graph_predictor.prediction.scenario import Scenario
from graph_predictor.request.memory_fit import Fit, fit_of, with_waste
from kernel_models.device import DeviceSpec
from tracer.graph import ExecutionGraph
from tracer.memory_account import PEAK, MemoryAccount, binary_size
from tracer.memory_timeline import KINDS, MemoryTimeline, memory_timeline

INFERRED = "What measured memory holds is inferred from the phases it was handed out and given back in."


def scenario_memory(scenario: Scenario, measured: MemoryTimeline | None = None,
                    traced: MemoryTimeline | None = None) -> PageSection:
    """Return the memory section of a predicted step.

    Args:
        scenario: the step.
        measured: memory that was recorded of it.
        traced: memory of its program, where the step itself says nothing of it.
    """
    graphs = scenario.built.graphs
    account = memory_account(scenario)
    changed = bool(scenario.activation_factors or scenario.rewrites)
    if account is not None:
        # Edits scale the fullest moment; what they make of the others is not known.
        traced = None if changed else fullest([graph for graph in graphs if PEAK in graph.meta.memory])
    elif traced is not None:
        account = traced.at_peak
    batch = None if changed else graphs[0].meta.workload.get("settings", {}).get("batch")
    return step_memory(account, scenario.devices.scaled(), measured, traced, batch=batch)


def step_memory(account: MemoryAccount | None, device: DeviceSpec | None, measured: MemoryTimeline | None = None,
                predicted: MemoryTimeline | None = None, *, batch: int | None = None) -> PageSection:
    """Return the memory section of one step; without parts where nothing is known.

    Args:
        account: the predicted fullest moment.
        device: the one it runs on, if known.
        measured: memory that was recorded.
        predicted: memory over the step as its program was traced.
        batch: of the step, if known.
    """
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
    """Return the memory of the rank that held most; ``None`` where none says anything of it."""
    found = [memory_timeline(graph) for graph in graphs if len(graph.allocations)]
    return max(found, key=lambda one: (one.on_device, one.peak_bytes), default=None)


def moments_of(found: MemoryTimeline, what: str) -> MemoryMoments:
    """Return a timeline as a page draws it."""
    at = (found.time_ns / 1e6 if found.timed else found.time_ns).tolist()
    kinds = {kind.value: found.held_bytes[i].tolist() for i, kind in enumerate(KINDS) if found.held_bytes[i].any()}
    return MemoryMoments(at, kinds, "ms" if found.timed else "operation",
                         title=f"Memory over the step, {what} ({found.source})", key=f"{what}-moments")


def _fit(account: MemoryAccount, limit: float, device: str, what: str, batch: int | None) -> str:
    """Return whether a step fits its device, in a sentence."""
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
