"""Recordings changed in ways that several tests need, and recordings made here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache
from pathlib import Path

import numpy as np

from graph_predictor.comm.recorded_calls import with_host_collectives
from graph_predictor.prediction.predictor import Baseline
from graph_predictor.prediction.replay import replay
from graph_predictor.request.parallel_ranks import on_ranks
from graph_predictor.synthesis.baseline import baseline_of
from kernel_models.collectives import CollectiveModel, find_topology
from step_views.reports.ranks.report import rank_report
from step_views.reports.ranks.times import recorded_times
from tracer.graph import ExecutionGraph
from tracer.job import Job, read_job
from tracer.parallel_plan import ParallelPlan

ATTEMPTS = 6


@cache
def llama() -> Baseline:
    """A Llama that was captured on one rank, of a CPU with two cores."""
    return baseline_of(read_job(Path(__file__).resolve().parents[1] / "traces" / "llama-cpu"))


@cache
def llama_on(plan: str) -> Baseline:
    """It, traced again for the ranks of a plan, which the CPU's network joins."""
    return on_ranks(llama(), ParallelPlan.parse(plan), CollectiveModel(find_topology("cpu")))


def slowed(graph: ExecutionGraph, factor: int) -> ExecutionGraph:
    """The recording with all times so many times as long."""
    tables = {}
    for part in fields(graph):
        table = getattr(graph, part.name)
        if hasattr(table, "take"):
            table = tables[part.name] = table.take(np.arange(len(table)))
            for name in ("start_ns", "duration_ns"):
                if hasattr(table, name):
                    getattr(table, name)[:] *= factor
    meta = replace(graph.meta, window_ns=graph.meta.window_ns * factor,
                   base_time_ns=graph.meta.base_time_ns * factor,
                   unprofiled_step_ns=[factor * ns for ns in graph.meta.unprofiled_step_ns])
    return replace(graph, meta=meta, **tables)


def recorded_until(check: Callable[[Path], None], record: Callable[[Path], object], folder: Path) -> Path:
    """Record until a check passes, which a machine that is busy with something else may fail, or for the last time.

    What is wrong in foretrace fails it each time, so that the tests which ask the same of the recording fail too.

    Args:
        check: raises ``AssertionError`` where a recording does not show what was made to be seen.
        record: into a directory that is not there yet.
        folder: in which each attempt has a directory of its own.
    """
    for attempt in range(ATTEMPTS):
        path = folder / f"attempt{attempt}"
        record(path)
        try:
            check(path)
        except AssertionError:
            continue
        break
    return path


def worst_closing(job: Job) -> float:
    """By what share the steps of a rank over gloo are played back longer or shorter than recorded, at most.

    Ranks that a scheduler lets go one after the other are played back as ending together: steps move a bit.
    """
    found = rank_report(recorded_times(replay([with_host_collectives(graph) for graph in job.graphs], residuals=True)))
    counted = {step[0].name for step in found.times.windows}
    recorded = [sum(ns for name, ns in zip(graph.steps.name.tolist(), graph.steps.duration_ns.tolist(), strict=True)
                    if graph.string(name) in counted) for graph in job.graphs]
    return max(abs(row.step_ns / ns - 1) for row, ns in zip(found.ranks, recorded, strict=True))
