"""``retrace``: predict a step at other sizes by tracing its program again; and parse sizes as a user writes them.

The program runs by shapes alone at the new sizes (needs PyTorch, no device). Each of its operations takes its time from
the recorded operation that represents it (``synthesis.recorded_times``). The result includes everything that the sizes
change: numbers of operations, other kernels, memory. The program is a workload of the suite that the capture names, or
a user's function that builds the step and takes the sizes as arguments.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from graph_predictor.prediction.scenario import EditError, OtherSizes, SizeRoute
from graph_predictor.sizes.data_rows import share_of
from graph_predictor.synthesis.baseline import retraced
from kernel_models.device import shape_device
from tracer import shape_only, workloads
from tracer.graph import ExecutionGraph
from tracer.lookup_data.noted import note_tables, tables_of
from tracer.program_note import LEFT_OUT, code_for
from tracer.shape_only.apart import trace_apart
from tracer.shape_only.devices import TracedDevice
from tracer.step_work import whole_cycle

if TYPE_CHECKING:
    from graph_predictor.prediction.predictor import Baseline


_SET = re.compile(r"(\w+)=(?:(\d+):)?(\d+)")
_WORD = re.compile(r"(\w+)=([A-Za-z_][\w.+-]*|-?\d*\.\d+(?:e-?\d+)?|-?\d+e-?\d+)")
_ALSO = re.compile(r"(?P<path>.+?)(?::(?P<sizes>\w+=\d+(?:,\w+=\d+)*))?")
SEED = "seed"
LEADING = frozenset({"batch", "b", "bs", "batch_size"})
"""Names of the dimension that comes first in activations: a rank's samples. Other sizes may be at any place."""
MOST = 2**31 - 1
"""Largest possible size: PyTorch's kernels index dimensions by 32 bits."""
_SHOWN = 24
"""Number of digits that a message shows of a refused size."""


def parse_sets(texts: Sequence[str]) -> tuple[dict[str, int], dict[str, int]]:
    """Return old sizes, where they are named, and new sizes, from "batch=32:128" or "batch=128".

    Raises:
        EditError: a text names no size, or a size that PyTorch cannot index.
    """
    old: dict[str, int] = {}
    new: dict[str, int] = {}
    for text in texts:
        match = _SET.fullmatch(text.strip())
        if match is None and text.strip().startswith("skew="):
            raise EditError(f"{text!r} is no size: by which law rows of tables are looked up is said by --indices, as "
                            "zipf:1.05.")
        if match is None:
            word = _WORD.fullmatch(text.strip())
            way = "" if word is None else (
                f" A setting that is no size is known to the program alone: give --code SCRIPT.py:FUNCTION, whose "
                f"FUNCTION takes {word[1]} by name.")
            raise EditError(f"{text!r} names no size: write it like batch=128, or batch=32:128 with the recorded one."
                            f"{way}")
        if match[1] in new:
            raise EditError(f"{match[1]} is set twice; give one new size.")
        new[match[1]] = _size(match[1], match[3])
        if match[2] is not None:
            old[match[1]] = _size(match[1], match[2])
    return old, new


def parse_settings(texts: Sequence[str]) -> tuple[dict[str, int], dict[str, int | str]]:
    """Return old sizes and new settings as ``parse_sets`` does; new ones may also be words and fractions as texts, such
    as "opt=fused" or "lr=0.1". Only a program that is traced again can use these.

    Raises:
        EditError: a text is no size and no setting, or a setting is set twice.
    """
    words = {text.strip(): match for text in texts if (match := _WORD.fullmatch(text.strip())) is not None}
    old, sizes = parse_sets([text for text in texts if text.strip() not in words])
    new: dict[str, int | str] = dict(sizes)
    for match in words.values():
        if match[1] in new:
            raise EditError(f"{match[1]} is set twice; give one new value.")
        new[match[1]] = match[2]
    return old, new


def are_sizes(settings: Mapping[str, int | str]) -> bool:
    """Return whether all settings are sizes, to which one capture can be scaled."""
    return not any(isinstance(value, str) for value in settings.values())


def _size(name: str, digits: str) -> int:
    """Return a size. Raises ``EditError`` above ``MOST``; callers refuse 0, since functions may accept it."""
    digits = digits.lstrip("0") or "0"
    if len(digits) > len(str(MOST)) or int(digits) > MOST:
        raise no_size(name, digits if len(digits) <= _SHOWN else digits[:_SHOWN] + "…")
    return int(digits)


def no_size(name: str, value: int | str) -> EditError:
    """Return the error for a value that is no size."""
    return EditError(f"{name}={value} is no size: give a whole number from 1 to {MOST:,}.")


def parse_also(text: str) -> tuple[str, dict[str, int]]:
    """Return the path of a capture and its sizes, from "runs/b:batch=64,seq=128" or the path alone."""
    match = _ALSO.fullmatch(text)
    if match is None:
        raise EditError("--also needs the path of a capture, such as runs/b:batch=64.")
    pairs = (part.split("=") for part in (match["sizes"] or "").split(",") if part)
    return match["path"], {name: _size(name, size) for name, size in pairs}


def samples_of(settings: Mapping[str, Any]) -> int | None:
    """Return the samples of a workload's step from its settings; ``None`` if they are missing."""
    batch, accumulation = settings.get("batch"), settings.get("accumulation") or 1
    return batch * accumulation if type(batch) is int and type(accumulation) is int else None


def captured_sizes(graphs: Sequence[ExecutionGraph], named: Sequence[Mapping[str, int]],
                   new: Mapping[str, int]) -> list[dict[str, int]]:
    """Return each capture's sizes that are named, predicted or differ: as the user named them, else as recorded.

    Args:
        graphs: one graph of each capture.
        named: for each capture, the sizes that the user named.
        new: sizes to predict.

    Raises:
        EditError: the captures are of two workloads, differ in more than sizes, or one lacks a size.
    """
    settings: list[Mapping[str, Any]] = [graph.meta.workload.get("settings", {}) for graph in graphs]
    names = list(dict.fromkeys([*new, *(name for one in named for name in one)]))
    if all(settings):
        workloads = sorted({str(graph.meta.workload.get("name")) for graph in graphs})
        if len(workloads) > 1:
            raise EditError(f"The captures are of {' and '.join(workloads)}; give captures of one program.")
        for name in dict.fromkeys(name for one in settings for name in one):
            values = [one.get(name) for one in settings]
            if len({repr(value) for value in values}) == 1 or name in names or name == SEED:
                continue
            if not all(type(value) is int for value in values):
                raise EditError(f"The captures differ in {name} ({' and '.join(map(str, values))}), which is no size; "
                                "give captures that differ in sizes alone.")
            names.append(name)
    found = []
    for one, graph in zip(named, graphs, strict=True):
        noted = noted_sizes(graph)
        found.append({**{name: noted[name] for name in names if name in noted}, **one})
        if lacking := next((name for name in names if name not in found[-1]), None):
            raise EditError(f"One of the captures does not say its {lacking}: name it, as in --also PATH:{lacking}=64, "
                            f"or --set {lacking}=32:128 for the one that is predicted from.")
    return found


def nearest(captured: Sequence[Mapping[str, int]], wanted: Mapping[str, int]) -> int:
    """Return the index of the capture with sizes nearest to the wanted ones by ratio; the first if several are.

    Raises:
        EditError: a size is not possible.
    """
    for sizes in (wanted, *captured):
        for name, size in sizes.items():
            if not 1 <= size <= MOST:
                raise no_size(name, size)
    return min(range(len(captured)), key=lambda number: sum(
        abs(math.log(wanted[name] / size)) for name, size in captured[number].items()))


NO_TORCH = "PyTorch is not installed, so that the program was not traced again at the new sizes"


def why_not(baseline: Baseline, code: str | None = None) -> str | None:
    """Return why a recorded step cannot be traced again, as a sentence without full stop; ``None`` if it can."""
    graph = baseline.built.graphs[0]
    if code is None and not graph.meta.workload:
        return "The capture is of no workload of the suite; give the function that builds the step with --code"
    if find_spec("torch") is None:
        return NO_TORCH
    if code is None and graph.meta.world_size > 1:
        return "The workload ran on several ranks, in a way the capture does not tell; give --code"
    return None


def retrace(baseline: Baseline, new: Mapping[str, int | str], old: Mapping[str, int] | None = None, *,
            code: str | None = None, selected: float | None = None) -> Baseline:
    """Return the baseline of a recorded step as its program runs it at other sizes, by shapes.

    Args:
        baseline: the recorded step.
        new: sizes and settings to predict, by name.
        old: recorded sizes that the user named; they are checked if the capture has them.
        code: "train.py:build", a function that takes the sizes as arguments and returns the step; by default the
            workload of the suite that was captured.
        selected: share of elements that masks made of data select; by default that of the recorded steps, if they have
            such masks.

    Raises:
        EditError: the program cannot be traced again (``why_not``), a size is not valid, or an old size is wrong.
        ShapeOnlyError, WorkloadError: the program has no such size, or cannot be traced.
    """
    reason = why_not(baseline, code)
    if reason is not None:
        raise EditError(f"{reason}.")
    recorded = recorded_sizes(baseline)
    for name in new:
        was = (old or {}).get(name)
        if was is not None and recorded.get(name, was) != was:
            raise EditError(f"The step was recorded with {name}={recorded[name]}, not {was}.")
    device = shape_device(baseline.scenario.known_source())
    shares = [share_of(graph) if selected is None and code is not None else selected for graph in baseline.built.graphs]
    graphs = [trace_again(graph, new, device, code, share)
              for graph, share in zip(baseline.built.graphs, shares, strict=True)]
    for graph, captured in zip(graphs, baseline.built.graphs, strict=True):
        counted = [table for table in tables_of(captured) if table.reuse]
        if counted:  # counted look-ups are more precise than the law that the program states
            note_tables(graph, counted)
    sizes = {**noted_sizes(baseline.built.graphs[0]), **(old or {}), **recorded}
    known = {**sizes, **baseline.built.graphs[0].meta.workload.get("settings", {})}
    said = ", ".join(f"{name} {known.get(name, '?')} → {size}" for name, size in new.items())
    found = retraced(baseline, graphs, f"{said} by tracing the program again")
    found.scenario = replace(found.scenario, sizes=OtherSizes(
        SizeRoute.TRACED_AGAIN, tuple((name, known.get(name), size) for name, size in new.items())))
    batch = next((size for name, size in new.items() if name.lower() in LEADING and isinstance(size, int)), None)
    was = next((size for name, size in sizes.items() if name.lower() in LEADING), None)
    if batch is not None and was:
        found.scenario = found.scenario.with_samples(batch / was, was)
    settings = graphs[0].meta.workload.get("settings", {})
    return found.with_items(samples_of(settings if batch is None else {**settings, "batch": batch}))


def recorded_sizes(baseline: Baseline) -> dict[str, int]:
    """Return the sizes that a capture of a workload of the suite recorded."""
    settings = baseline.built.graphs[0].meta.workload.get("settings", {})
    return {name: value for name, value in settings.items() if type(value) is int}


def noted_sizes(graph: ExecutionGraph) -> dict[str, int]:
    """Return the sizes that a capture notes: a workload's settings, or a program's options that are whole numbers."""
    options = {} if graph.meta.program is None else graph.meta.program.options
    found = {**{name: size for name, size in options.items() if size}, **graph.meta.workload.get("settings", {})}
    return {name: size for name, size in found.items() if type(size) is int}


def way_again(graph: ExecutionGraph, names: Collection[str]) -> str:
    """Return a sentence on how a captured program is traced again at other sizes; empty if it cannot be named.

    Tracing runs the user's program, by shapes. So it is never done without ``--code``.
    """
    code = code_for(graph.meta.program, names)
    if not code:
        return ""
    left_out = f" (instead of {LEFT_OUT} write what the capture does not keep)" if LEFT_OUT in code else ""
    return f"To trace the program again, which is as it was captured, add --code {code}{left_out}."


def trace_again(graph: ExecutionGraph | None, sizes: Mapping[str, int | str], device: str | TracedDevice,
                code: str | None = None, selected: float | None = None) -> ExecutionGraph:
    """Return a step's program traced by shapes at other sizes; a step that is a cycle has as many of its steps.

    Args:
        graph: the step, of a workload of the suite unless ``code`` is given; ``None`` for ``code`` on a single rank.
        sizes: other sizes and settings, by name.
        device: name of the device to trace for.
        code: see ``retrace``; it runs in a process of its own, because it may have run in this one before.
        selected: see ``retrace``.

    Raises:
        EditError: a size is not valid.
        ShapeOnlyError, WorkloadError: the program has no such size, or cannot be traced.
    """
    for name, size in sizes.items():
        if isinstance(size, int) and not 1 <= size <= MOST:
            raise no_size(name, size)
    if graph is None:
        return whole_cycle(lambda steps: _traced(graph, sizes, device, code, selected, steps), 1)
    found = whole_cycle(lambda steps: _traced(graph, sizes, device, code, selected, steps), graph.meta.cycle)
    # Edits of the new step need the number formats in which the recording's processor multiplies.
    return replace(found, meta=replace(found.meta, host_units=list(graph.meta.host_units)))


def _traced(graph: ExecutionGraph | None, sizes: Mapping[str, int | str], device: str | TracedDevice, code: str | None,
            selected: float | None, steps: int) -> ExecutionGraph:
    if code is not None:
        world = graph.meta.world_size if graph is not None and graph.meta.world_size > 1 else None
        rank = max(graph.meta.rank, 0) if graph is not None else 0
        return trace_apart(code, device, world_size=world, rank=rank, arguments=sizes, selected=selected, steps=steps)
    assert graph is not None
    if selected is not None:
        raise EditError("--selected belongs to a function: no workload selects by data; leave it out.")
    noted = graph.meta.workload
    return shape_only.trace_workload(workloads.configure(noted["name"], **{**noted["settings"], **sizes}), device,
                                     steps=steps)
