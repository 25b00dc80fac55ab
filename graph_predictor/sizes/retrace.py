"""Other sizes by tracing the program again: ``retrace``.

The program is run by shapes alone at the new sizes (needs PyTorch, no device), and each of its operations takes its
time from the recorded one that stands for it (``synthesis.recorded_times``). Whatever the sizes change is
changed: numbers of operations, other kernels, memory. The program is a workload of the suite, which the capture noted,
or a function of the user's that builds it and takes the sizes as arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

from graph_predictor.prediction.scenario import EditError
from graph_predictor.sizes.named_sizes import LEADING, MOST, no_size, samples_of
from graph_predictor.synthesis.baseline import retraced
from kernel_models.device_choice import shape_device
from tracer.graph import ExecutionGraph
from tracer.lookup_data.noted import note_tables, tables_of
from tracer.shape_only.devices import TracedDevice

if TYPE_CHECKING:
    from graph_predictor.prediction.predictor import Baseline

NO_TORCH = "PyTorch is not installed, so that the program was not traced again at the new sizes"


def why_not(baseline: Baseline, code: str | None = None) -> str | None:
    """Say why a recorded step cannot be traced again, as a sentence without its end; ``None`` if it can."""
    graph = baseline.built.graphs[0]
    if code is None and not graph.meta.workload:
        return "The capture is of no workload of the suite; give the function that builds the step with --code"
    if find_spec("torch") is None:
        return NO_TORCH
    if code is None and graph.meta.world_size > 1:
        return "The workload ran on several ranks, in a way the capture does not tell; give --code"
    return None


def retrace(baseline: Baseline, new: Mapping[str, int], old: Mapping[str, int] | None = None, *,
            code: str | None = None) -> Baseline:
    """A recorded step as its program makes it at other sizes.

    Args:
        baseline: recorded.
        new: sizes that are asked for, by name.
        old: recorded ones, as far as they were named: they are checked where the capture says them.
        code: "train.py:build", a function that takes the sizes as arguments and returns the step; by default the
            workload of the suite that was captured.

    Raises:
        EditError: it cannot be traced again (``why_not``), a size is none, or was not the recorded one.
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
    graphs = [trace_again(graph, new, device, code) for graph in baseline.built.graphs]
    for graph, captured in zip(graphs, baseline.built.graphs, strict=True):
        counted = [table for table in tables_of(captured) if table.reuse]
        if counted:  # says more than the law that the program states
            note_tables(graph, counted)
    said = ", ".join(f"{name} {(recorded.get(name) or (old or {}).get(name, '?'))} → {size}"
                     for name, size in new.items())
    found = retraced(baseline, graphs, f"{said} by tracing the program again")
    batch = next((size for name, size in new.items() if name.lower() in LEADING), None)
    was = next((size for name, size in {**(old or {}), **recorded}.items() if name.lower() in LEADING), None)
    if batch is not None and was:
        found.scenario = found.scenario.with_samples(batch / was, was)
    settings = graphs[0].meta.workload.get("settings", {})
    return found.with_items(samples_of(settings if batch is None else {**settings, "batch": batch}))


def recorded_sizes(baseline: Baseline) -> dict[str, int]:
    """The sizes that a capture of a workload of the suite says of itself."""
    settings = baseline.built.graphs[0].meta.workload.get("settings", {})
    return {name: value for name, value in settings.items() if type(value) is int}


def trace_again(graph: ExecutionGraph | None, sizes: Mapping[str, int], device: str | TracedDevice,
                code: str | None = None) -> ExecutionGraph:
    """A step's program traced by shapes at other sizes.

    Args:
        graph: of the step; of a workload of the suite unless ``code`` is given, which needs none for a single rank.
        sizes: other ones, by name.
        device: name of the device it is traced for.
        code: see ``retrace``; it runs in a process of its own, as it may have run in this one.

    Raises:
        EditError: a size is none.
        ShapeOnlyError, WorkloadError: the program has no such size, or cannot be traced.
    """
    for name, size in sizes.items():
        if not 1 <= size <= MOST:
            raise no_size(name, size)
    if code is not None:
        world = graph.meta.world_size if graph is not None and graph.meta.world_size > 1 else None
        rank = max(graph.meta.rank, 0) if graph is not None else 0
        from tracer.shape_only.apart import trace_apart

        return trace_apart(code, device, world_size=world, rank=rank, arguments=sizes)
    assert graph is not None
    from tracer import workloads
    from tracer.shape_only import trace_workload

    noted = graph.meta.workload
    return trace_workload(workloads.configure(noted["name"], **{**noted["settings"], **sizes}), device)
