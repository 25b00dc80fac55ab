"""Host time of steps by operation, at the level of a trace by shapes. A model is fitted to measured times of recorded
steps, and predicts the times of traced steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from graph_predictor.prediction.operation_costs import OperationCosts, operation_costs, operations_named
from graph_predictor.prediction.predictor import Baseline
from graph_predictor.prediction.unprofiled import profiler_share
from graph_predictor.recorded.facts import damage_notes
from graph_predictor.simulation.program import whole_ns
from kernel_models.datasets.traces import HostWork
from kernel_models.host.events import LISTS, HostStep, is_flat
from kernel_models.host.fitting import ENOUGH_PROGRAMS, ToldHost, fit_few, fit_host, left_out
from kernel_models.host.model import HostModel, host_names, is_host_file, read_host, shipped_host
from kernel_models.spreads import OTHER_PROGRAM, SMALL_PROGRAMS
from tracer.arrays import Float64, Int64
from tracer.errors import ForetraceError
from tracer.graph import LAUNCHING, NONE, ExecutionGraph
from tracer.job import Job, read_job


def recorded_host_steps(graphs: Sequence[ExecutionGraph]) -> list[HostStep]:
    """Return each rank's step, the mean of the repeated steps, without waits and without the profiler. The profiler's
    cost comes from the capture's steps without it, or else from the known cost of events.

    Raises:
        ForetraceError: a recording has no steps.
    """
    return [_recorded(Baseline.recorded([graph])) for graph in graphs]


def usual_step(steps: Sequence[HostStep]) -> HostStep:
    """Return one step from several recordings of a program: the medians of the steps with the most common operations.

    Raises:
        ForetraceError: there is no step.
    """
    if not steps:
        raise ForetraceError("There is no recorded step whose host time could be used.")
    order = [tuple(step.name) for step in steps]
    usual = Counter(order).most_common(1)[0][0]
    alike = [step for step, names in zip(steps, order, strict=True) if names == usual]
    first = alike[0]
    return HostStep(first.name, first.phase, first.tensors, np.median([step.before_ns for step in alike], axis=0),
                    np.median([step.inside_ns for step in alike], axis=0),
                    np.median([step.compute_ns for step in alike], axis=0),
                    float(np.median([step.launch_ns for step in alike])),
                    next((step.calls for step in alike if step.calls is not None), None))


def traced_host_step(graph: ExecutionGraph, compute_ns: Float64 | None = None) -> HostStep:
    """Return a traced step's operations, without times.

    Args:
        graph: traced by shapes.
        compute_ns: computation of each operation on the host itself, ns; ``None`` if a GPU computes.
    """
    return named_host_step(graph, np.arange(len(graph.ops)), compute_ns)


def named_host_step(graph: ExecutionGraph, rows: Int64, compute_ns: Float64 | None = None) -> HostStep:
    """Return the operations of some rows of a graph, without times; for ``compute_ns`` see ``traced_host_step``."""
    computed = np.zeros(len(rows)) if compute_ns is None else compute_ns
    return _step(graph, rows, np.zeros(len(rows) + 1), np.zeros(len(rows)), computed, 0.0)


def host_model(steps: Sequence[HostStep], name: str) -> HostModel:
    """Return the model of a host, fitted to recorded steps of different programs; if they are few, data of other hosts
    are added.

    Args:
        steps: one step of each capture.
        name: name of the host in reports.

    Raises:
        ForetraceError: the steps have no host time.
    """
    few = len(steps) < ENOUGH_PROGRAMS and any(step.compute_ns.any() for step in steps)
    return fit_few(steps, f"{name} and other hosts") if few else fit_host(steps, name)


def recorded_host_work(graph: ExecutionGraph) -> HostWork:
    """Return the computation of each operation of a recorded step on the host, as mean of the repeated steps, without
    waits and the profiler. Raises ``ForetraceError`` if there are no steps."""
    costs, _ = _measured(Baseline.recorded([graph]))
    return HostWork(costs.op, costs.compute.mean(axis=0))


def _recorded(baseline: Baseline) -> HostStep:
    graph = baseline.scenario.built.graphs[0]
    costs, of_calls = _measured(baseline)
    inside, compute = costs.inside.mean(axis=0), costs.compute.mean(axis=0)
    called = np.isin(graph.launches.kind, LAUNCHING)
    launch = of_calls * float(np.median(graph.launches.duration_ns[called])) if called.any() else 0.0
    return _step(graph, costs.op, costs.before.mean(axis=0), np.maximum(inside - compute, 0.0),
                 compute, launch)


def _measured(baseline: Baseline) -> tuple[OperationCosts, float]:
    """Return the costs of operations, and the share of calls' recorded time left, both without the profiler."""
    scenario, slices = baseline.scenario, baseline.scenario.slices
    graph = scenario.built.graphs[0]
    owner = operations_named(graph, (name for name in graph.strings if is_flat(name)))
    of_calls = 1.0
    if scenario.profiled:
        share = profiler_share(scenario)
        of_calls = 1.0 - float(share.calls.sum()) / max(float(slices.ns[slices.is_cost].sum()), 1.0)
        slices = replace(slices, ns=whole_ns(slices.ns - share.ns))
    return operation_costs(scenario.cycle, slices, 0, owner), of_calls


def _step(graph: ExecutionGraph, rows: Int64, before: np.ndarray, inside: np.ndarray,
          compute_ns: Float64, launch_ns: float) -> HostStep:
    names = np.array([graph.string(int(code)) for code in graph.ops.name[rows]], dtype=object)
    return HostStep(names, graph.ops.phase[rows], np.array(list(_tensors(graph, rows, names)), np.int64), before,
                    inside, compute_ns, launch_ns, _python_calls(graph, rows))


def _python_calls(graph: ExecutionGraph, rows: Int64) -> Float64 | None:
    """Return the number of calls of Python functions before each of some operations of one step, and after the last;
    ``None`` where they were not counted."""
    ops = graph.ops
    step = int(ops.step[rows[0]]) if len(rows) else NONE
    if step == NONE or graph.steps.python_calls[step] == NONE or (ops.python_calls[rows] == NONE).any():
        return None
    found = np.zeros(len(rows) + 1)
    for thread in np.unique(ops.thread[rows]).tolist():
        mine = np.flatnonzero((ops.step == step) & (ops.thread == thread))
        reached = np.cumsum(np.maximum(ops.python_calls[mine], 0))
        places = np.flatnonzero(ops.thread[rows] == thread)
        at = reached[np.searchsorted(mine, rows[places])]
        found[places] = np.maximum(np.diff(at, prepend=0), 0)
        if thread == graph.steps.thread[step]:
            found[-1] = max(int(graph.steps.python_calls[step]) - int(at[-1]), 0)
    return found


def _tensors(graph: ExecutionGraph, rows: Int64, names: Iterable[str]) -> Iterable[int]:
    """Return the number of tensors that each operation on lists works on: from its arguments, else from its parts."""
    parts = np.bincount(graph.ops.parent[graph.ops.parent >= 0], minlength=len(graph.ops))
    for row, name in zip(rows.tolist(), names, strict=True):
        if not any(mark in name for mark in LISTS):
            yield 0
            continue
        listed = (len(each.shape) for each in graph.arguments(row)
                  if isinstance(each.shape, tuple) and each.shape and isinstance(each.shape[0], tuple))
        yield max(listed, default=0) or int(parts[row])


TOO_BUSY = "This host is too busy to be calibrated"


@dataclass(frozen=True, slots=True)
class HostCalibration:
    """A host's costs, measured with small programs.

    Attributes:
        model: the model fitted to all programs; its interval is for programs that differ from them.
        programs: each program as predicted from the others.
    """

    model: HostModel
    programs: list[ToldHost]


def read_rounds(folder: Path) -> dict[str, HostStep]:
    """Return the usual step of each program of a folder of ``PROGRAM/roundN``. Raises ``ForetraceError`` for captures
    that cannot be read."""
    found = {}
    for path in sorted(each for each in folder.iterdir() if each.is_dir()):
        rounds = [recorded_host_steps(read_job(one).graphs)[0] for one in sorted(path.glob("round*"))]
        if rounds:
            found[path.name] = usual_step(rounds)
    return found


def calibrated(steps: Mapping[str, HostStep], name: str) -> HostCalibration:
    """Return a host's model, and how well each of its programs is predicted from the others.

    Args:
        steps: steps of the small programs, by name.
        name: name of the host in reports.

    Raises:
        ForetraceError: the steps have no host time; or programs predict each other worse than a single program would,
            because something else kept the host busy.
    """
    model = fit_host(list(steps.values()), name)
    programs = left_out(steps)
    if model.suited(True).spread > OTHER_PROGRAM:
        errors = [abs(program.error) for program in programs]
        raise ForetraceError(
            f"{TOO_BUSY}: left out in turn, its small programs are predicted with a MAPE "
            f"of {np.mean(errors):.0%} (worst {max(errors):.0%}), which is worse than from one recorded program. "
            "Nothing was written; stop what else runs here, or give more --minutes.")
    counted = None if model.counted is None else _for_others(model.counted)
    return HostCalibration(replace(_for_others(model), counted=counted), programs)


def _for_others(model: HostModel) -> HostModel:
    """Widen a model's spread: small programs are more alike than the programs it will predict."""
    return replace(model, spread=float(np.hypot(model.spread, SMALL_PROGRAMS)))


def host_by_name(text: str, read: Callable[[str], Job]) -> HostModel:
    """Return the model of a host.

    Args:
        text: a shipped host's name, a file of ``foretrace calibrate --host``, or captures on one host, separated by
            commas.
        read: returns the job of a capture's path.

    Raises:
        ForetraceError: a file or capture cannot be read, is damaged, or has no steps that ran; or a list has captures
            of different kinds, or one twice.
    """
    name = text.strip()
    if name in host_names():
        return shipped_host(name)
    if is_host_file(name):
        return read_host(Path(name))
    paths = [path.strip() for path in text.split(",") if path.strip()] or [text]
    if len(set(paths)) < len(paths):
        raise ForetraceError(f"--host-from {text}: a capture is named twice; each counts as a program of its own.")
    if len(paths) > 1 and (other := next((one for one in paths if one in host_names() or is_host_file(one)), None)):
        raise ForetraceError(f"--host-from {text}: {other} is a host, and a list is of captures; give it alone, or "
                             "captures alone.")
    steps = [_step_of(path, read) for path in paths]
    launching = [path for path, step in zip(paths, steps, strict=True) if not step.compute_ns.any()]
    if 0 < len(launching) < len(paths):
        raise ForetraceError(f"--host-from {text}: operations of {launching[0]} run on a GPU and those of others on "
                             "their host, which cost it differently; give captures of one kind.")
    return host_model(steps, text)


def _step_of(path: str, read: Callable[[str], Job]) -> HostStep:
    """Return the step of a capture's first rank, to teach a host model. Errors name the capture."""
    try:
        graphs = read(path).graphs[:1]
        step = recorded_host_steps(graphs)[0]
        if graphs[0].meta.loss.truncated_bytes:
            raise ForetraceError(f"{damage_notes(graphs)[0]} It would teach what a part of a step costs: record it "
                                 "again, or leave it out.")
        return step
    except ForetraceError as error:
        known = "" if Path(path).exists() or "/" in path or "." in path else (
            f" Hosts that are known by name: {', '.join(host_names())}.")
        said = str(error)
        raise type(error)(f"{said if path in said else f'{path}: {said}'}{known}") from None
