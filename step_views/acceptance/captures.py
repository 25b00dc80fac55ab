"""Part 2: captures of several models, with and without the device's management library, compared with a clock.

::

    own clock:     |── batch, step, wait for the device ──|        with the library: every step drained by the program
    recorded:      |══════ step by the capture ══════|             without it: steps as a plain loop runs them
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from graph_predictor.figures import signed_percent
from graph_predictor.prediction.replay import replay
from step_views.acceptance.parts import AcceptanceScale, Settings
from step_views.acceptance.points import AcceptancePoint, absent, at_most, guarded, is_true, noted, plain
from step_views.acceptance.worker import part_folder
from tracer import workloads
from tracer.campaign.lab import Lab
from tracer.capture import Capture, CaptureOptions
from tracer.capture_layout import read_context
from tracer.errors import ForetraceError
from tracer.graph import ExecutionGraph
from tracer.job import read_job

LIBRARIES = ("pynvml", "amdsmi")
REPLAYED = 0.005
"""Largest allowed error of a replayed step, as a share."""
BORDER_S = 1e-4
"""Time of the profiler between two steps, which lies inside its marks of steps: it is not an error of the clock."""
AFTER = 6
"""Number of steps that run after the capture."""
OPTIONS = CaptureOptions(steps=4, form="foretrace", replace=True)

Times = Sequence[tuple[float, float]]
"""For each step, in seconds: time by the program's clock, and recorded time."""


def captures(folder: Path, scale: AcceptanceScale) -> Iterator[AcceptancePoint]:
    """Capture each model twice and read it back."""
    lab = Lab(scale.device)
    for name in scale.models:
        for library in (True, False):
            what = f"{name}, {'with' if library else 'without'} the management library"
            yield from guarded(what, _captured(lab, folder, scale, name, what, library))
            lab.tidy()


def _captured(lab: Lab, folder: Path, scale: AcceptanceScale, name: str, what: str, library: bool
              ) -> Iterator[AcceptancePoint]:
    out = part_folder(folder, 2) / name / ("with" if library else "without")
    with _libraries(library):
        timed, profiled, after = capture_with_own_clock(lab, name, scale.models[name], out, drained=library)
    graph = read_job(out).graphs[0]
    yield from judged_graph(what, graph, scale.is_cuda)
    if library:
        yield judged_clock(f"{what}: timed steps over own clock", timed, scale.own_clock)
        recorded = [ns / 1e9 for ns in graph.steps.duration_ns.tolist()]
        own = [own for own, _ in profiled][-len(recorded):]
        yield judged_clock(f"{what}: profiled steps over own clock", list(zip(own, recorded, strict=False)),
                           scale.own_clock)
        change = statistics.median(after) / statistics.median(time for _, time in timed) - 1.0
        yield noted(f"{what}: steps after the capture over timed ones", signed_percent(change), change)
    context = read_context(out / "rank0")
    yield _samples(what, context, library, scale.is_cuda)
    if not library:
        yield free_running(what, context, scale.is_cuda)


@contextmanager
def _libraries(there: bool) -> Iterator[None]:
    """Hide the management libraries from imports, or do nothing."""
    before = {name: sys.modules.get(name) for name in LIBRARIES}
    if not there:
        sys.modules.update(dict.fromkeys(LIBRARIES))  # type: ignore[arg-type]  # None makes an import fail
    try:
        yield
    finally:
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


def capture_with_own_clock(lab: Lab, name: str, settings: Settings, out: Path, *, drained: bool
                           ) -> tuple[Times, Times, list[float]]:
    """Capture a workload, and time its steps with a separate clock at the same time.

    Args:
        lab: the device's lab.
        name, settings: the workload.
        out: directory of the capture.
        drained: whether the program waits for the device at the end of each step, as its clock requires.

    Returns:
        Times of steps without the profiler and under it, and times of some steps after the capture, seconds.
    """
    chosen = workloads.configure(name, **{"device": lab.device, **settings})
    workload = workloads.create(chosen)
    times: dict[str, list[tuple[float, float]]] = {"unprofiled_step_ns": [], "profiled_step_ns": []}
    after: list[float] = []
    with Capture(out, OPTIONS) as capture:
        capture.facts["workload"] = {"name": name, "settings": workloads.as_plain(chosen)}
        start = time.perf_counter()
        for batch in capture.wrap(workload.batches()):
            workload.step(batch)
            if drained:
                lab.machine.synchronize()
            own = time.perf_counter() - start
            if capture.finished:
                after.append(own)
            before = {attribute: len(getattr(capture, attribute)) for attribute in times}
            capture.step()
            for attribute, number in before.items():
                times[attribute] += [(own, ns / 1e9) for ns in getattr(capture, attribute)[number:]]
            if len(after) == AFTER:
                break
            start = time.perf_counter()
    return times["unprofiled_step_ns"], times["profiled_step_ns"], after


def judged_graph(what: str, graph: ExecutionGraph, is_cuda: bool) -> Iterator[AcceptancePoint]:
    """Judge a capture's content: whether every launch has device work, and whether steps replay."""
    loss = graph.meta.loss
    if is_cuda:
        yield is_true(f"{what}: kernels", "> 0", len(graph.kernels) > 0, f"{len(graph.kernels):,}")
        yield at_most(f"{what}: launches without work", loss.launches_without_kernels, 0.0, plain)
    yield at_most(f"{what}: steps that lost work", loss.lossy_steps, 0.0, plain)
    try:
        yield at_most(f"{what}: replay", replay([graph]).max_abs_error, REPLAYED)
    except ForetraceError as error:
        yield is_true(f"{what}: replay", "it can be replayed", False, str(error))


def judged_clock(name: str, times: Times, within: float) -> AcceptancePoint:
    """Judge recorded steps by the program's clock: the median of their differences, as shares of a step."""
    error = statistics.median(max(abs(recorded - own) - BORDER_S, 0.0) / own for own, recorded in times
                              ) if times else None
    return at_most(name, error, within)


def _samples(what: str, context: Mapping[str, Any], library: bool, is_cuda: bool) -> AcceptancePoint:
    name, found = f"{what}: samples of the clock", "gpu_samples" in context
    if not library:
        return is_true(name, "none", not found, "some" if found else "none")
    if not is_cuda or not any(find_spec(module) for module in LIBRARIES):
        return absent(name, "no GPU" if not is_cuda else "no library (pip install 'foretrace[gpu]')")
    return is_true(name, "some", found, "some" if found else "none")


def free_running(what: str, context: Mapping[str, Any], is_cuda: bool) -> AcceptancePoint:
    """Return the time of steps whose host runs ahead, relative to steps that wait for the device. A capture on a GPU
    must have timed both."""
    name, drained = f"{what}: free-running over drained steps", context.get("unprofiled_median_ns")
    window = context.get("timing", {}).get("free_running")
    if not drained or not window:
        why = "the capture did not time any"
        return is_true(name, "timed", False, why) if is_cuda else absent(name, why)
    free = window["ns"] / window["steps"]
    return noted(name, f"{free / 1e6:.3f} of {drained / 1e6:.3f} ms ({signed_percent(free / drained - 1.0)})",
                 free / drained - 1.0)
