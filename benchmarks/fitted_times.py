"""Durations from models fitted to recorded steps, none of them measured in the step that is predicted.

Kernels: the median duration of the same call by the same kernel. Host: ``HostOverheads`` of the same steps, by kind of
overhead, operation and call; pauses stay in the means, since they come as often again, if elsewhere. What a prediction
of one more step of the same run rests on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from graph_predictor.prediction.overheads import recorded_overheads
from graph_predictor.prediction.scenario import KernelSources, Scenario
from graph_predictor.simulation.program import ItemKind
from kernel_models.host.overheads import fit_overheads
from kernel_models.host.segments import Overhead
from kernel_models.op_call import Source
from kernel_models.spreads import MEASURED_KERNELS
from tracer.arrays import Float64, Int64


@dataclass(frozen=True)
class Fitted:
    """All durations of the repeated steps from models fitted to those steps.

    Assumes that steps to come do the same work: equal calls take their median time, host overheads their means.
    """

    def describe(self) -> str:
        """One phrase."""
        return "durations from models fitted to the recorded steps"

    def apply(self, scenario: Scenario) -> Scenario:
        """See ``Edit``."""
        duration = scenario.built.program.kernel_duration
        ratio = kernel_medians(scenario) / np.maximum(duration, 1)
        known = ~np.isnan(ratio) & (duration > 0)
        wide = np.full(len(duration), MEASURED_KERNELS)
        sources = KernelSources(np.where(known, Source.LEARNED, Source.MEASURED), -wide, wide)
        kernels = replace(scenario.kernels.scaled(np.where(known, ratio, 1.0)), sources=sources)
        return replace(scenario, kernels=kernels, host=replace(scenario.host, ns=host_estimates(scenario)))


def kernel_medians(scenario: Scenario) -> Float64:
    """Median duration (ns) of the kernels with the same calls and name, over the cycle; NaN outside it."""
    built, work = scenario.built, scenario.work
    result = np.full(len(built.program.kernel_item), np.nan)
    rows = np.flatnonzero(scenario.cycle.kernel)
    if not len(rows):
        return result
    name = np.concatenate([g.kernels.name for g in built.graphs])[rows].astype(np.int64)
    group = np.where(work.kernel_group[rows] >= 0, work.call_row[np.maximum(work.kernel_group[rows], 0)],
                     -1) if len(work.call_row) else (
        np.full(len(rows), -1))
    rank = built.program.kernel_rank()[rows]
    # A kernel's place within its piece tells equal kernels of one operation apart; a collective goes by its place.
    _, key = np.unique(np.stack([rank, group, name, _place(scenario, rows)]), axis=1, return_inverse=True)
    key = key.reshape(-1)
    order = np.argsort(key, kind="stable")
    bounds = np.searchsorted(key[order], np.arange(key.max() + 2))
    duration = built.program.kernel_duration[rows].astype(np.float64)
    for low, high in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        result[rows[order[low:high]]] = np.median(duration[order[low:high]])
    return result


def _place(scenario: Scenario, rows: Int64) -> Int64:
    """How many kernels of the same piece come before; of collectives and pieces without sizes, of the same step."""
    built, work = scenario.built, scenario.work
    piece = work.kernel_group[rows]
    unsized = (piece < 0) | (~work.sized[np.maximum(piece, 0)] if len(work.sized) else True)
    step = np.concatenate([g.kernels.step for g in built.graphs])[rows].astype(np.int64)
    name = np.concatenate([g.kernels.name for g in built.graphs])[rows].astype(np.int64)
    rank = built.program.kernel_rank()[rows]
    within = np.where(unsized, -1, piece)
    keys = np.stack([rank, np.where(unsized, step, -1), np.where(unsized, name, -1), within])
    order = np.lexsort((built.program.kernel_item[rows], *keys[::-1]))
    ordered = keys[:, order]
    opens = np.ones(len(rows), np.bool_)
    opens[1:] = (ordered[:, 1:] != ordered[:, :-1]).any(axis=0)
    begin = np.maximum.accumulate(np.where(opens, np.arange(len(rows)), 0))
    place = np.empty(len(rows), np.int64)
    place[order] = np.arange(len(rows)) - begin
    return place


def host_estimates(scenario: Scenario) -> Float64:
    """Times of the host's pieces (ns) such that each item's work and cost are what the fitted overheads say."""
    built, pieces, program = scenario.built, scenario.slices, scenario.built.program
    ns = pieces.ns.astype(np.float64)
    size = len(program.item_kind)
    for rank, graph in enumerate(built.graphs):
        steps = np.unique(program.item_row[np.flatnonzero(
            scenario.cycle.item & (program.item_kind == ItemKind.STEP_BEGIN)
            & (program.thread_rank[program.item_thread()] == rank))]).tolist()
        recorded, _ = recorded_overheads(graph, profiled=scenario.profiled)
        recorded = recorded.take(np.isin(recorded.segments.step, steps))
        estimate = fit_overheads([recorded]).estimate_ns(recorded)
        item, is_cost = _items_of(scenario, rank, recorded.segments.thread, recorded.segments.start_ns,
                                  np.where(recorded.segments.kind == Overhead.CALL, recorded.segments.call, -1))
        found = item >= 0
        for cost in (False, True):
            rows = found & (is_cost == cost)
            new = np.bincount(item[rows], weights=estimate[rows], minlength=size)
            mine = np.flatnonzero((pieces.rank == rank) & (pieces.is_cost == cost)
                                  & scenario.cycle.working[pieces.item])
            old = np.bincount(pieces.item[mine], weights=pieces.ns[mine], minlength=size)
            ns[mine] = pieces.ns[mine] * (new / np.maximum(old, 1))[pieces.item[mine]]
    return ns


def _items_of(scenario: Scenario, rank: int, thread: Int64, start: Int64, call: Int64) -> tuple[Int64, np.ndarray]:
    """Item of the recorded program that each segment of host time belongs to (-1: none); whether to its cost."""
    built, program = scenario.built, scenario.built.program
    owner = program.item_thread()
    item = np.full(len(thread), -1, np.int64)
    graph = built.graphs[rank]
    of_call = np.full(len(graph.launches) + 1, -1, np.int64)
    calls = np.flatnonzero((program.thread_rank[owner] == rank) & (program.item_kind == ItemKind.CALL))
    of_call[program.item_row[calls]] = calls
    for number, name in enumerate(built.thread_number):
        if program.thread_rank[number] != rank:
            continue
        low, high = int(program.thread_ptr[number]), int(program.thread_ptr[number + 1])
        mine = np.flatnonzero((thread == name) & (call < 0))
        at = np.searchsorted(program.recorded_item_start[low:high] - built.clock_ns[rank], start[mine], side="right")
        item[mine] = np.where(at < high - low, low + at, -1)
    is_call = call >= 0
    item[is_call] = of_call[call[is_call]]
    return item, is_call
