"""``EditedServingModel``: the steps of a served decoder with edits that are made for recorded steps.

Edits work on scenarios only. All calls that a model prices together therefore become one scenario
(``served_scenario``), which edits change. ``price_kernels`` then returns each kernel's time, as for a recorded step:

    calls ──price──▶ µs ──served_scenario──▶ edits ──price_kernels──▶ µs

The scenario is one rank of the replica; its peers do the same at the same time. Its host prepares the step (engine's
time), launches kernels, one by one or as a CUDA graph, and waits for them, since it needs the sampled tokens::

    host      ─engine─[launch]────────wait────────▏─engine─[launch]─ …
    stream               [kernel][all-reduce][kernel]          [kernel] …

Changes of host time and of waiting are read from the same scenario. An edit that rewrites the operations of a
recorded step is refused, because a served step has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from graph_predictor.prediction.edited_repeats import edit_host
from graph_predictor.prediction.pricing import price_kernels
from graph_predictor.prediction.repeat import steps_of
from graph_predictor.prediction.scenario import (
    COLLECTIVE,
    OTHER_RANKS,
    DeviceChange,
    Edit,
    HostChange,
    KernelChange,
    KernelSources,
    Scenario,
    Work,
)
from graph_predictor.simulation.host_slices import host_slices
from graph_predictor.synthesis.program import (
    DeviceWork,
    HostCall,
    OperationTimes,
    RankTimes,
    plain_constants,
    synthesize,
)
from kernel_models.collectives import CollectiveCall, CommTimes
from kernel_models.collectives.recorded import element_bytes
from kernel_models.device import DeviceSpec
from kernel_models.op_call import OpCall, Source
from kernel_models.pricing import Models, PricedCalls
from kernel_models.trace_calls import FAMILIES
from planner.serving.setup import ServingError
from planner.serving.steps import GRAPH_LAUNCH_US, PrefillChunk, ServedStep, ServingModel
from tracer.arrays import Float64, Int64
from tracer.graph import (
    NONE,
    CollectiveTable,
    ExecutionGraph,
    GapTable,
    KernelKind,
    KernelTable,
    LaunchKind,
    LaunchTable,
    Meta,
    OpKind,
    OpTable,
    OverheadTable,
    StepTable,
    SyncTable,
    Thread,
)

LAUNCH, GRAPH_LAUNCH, WAIT = "cudaLaunchKernel", "cudaGraphLaunch", "cudaStreamSynchronize"
END = "sampled tokens"
"""Name of the operation in which the host waits for the step."""


@dataclass(frozen=True, slots=True)
class ServedKernel:
    """A kernel of a served step: its name, its call, its time, µs, and the ends of its 80% interval."""

    name: str
    call: OpCall | CollectiveCall
    us: float
    low_us: float
    high_us: float
    source: int = Source.DATASHEET


@dataclass(frozen=True, slots=True)
class ServedHost:
    """Host time of a served step, µs: around the step, for each kernel's launch, and for each collective's launch. With
    ``graph_us``, one launch of that time starts all kernels instead."""

    step_us: float
    launch_us: float
    collective_us: float
    graph_us: float | None = None


def served_scenario(kernels: Sequence[ServedKernel], host: ServedHost, device: DeviceSpec, models: Models | None,
                    gpus: int) -> Scenario:
    """Return a step with these kernels, one after another, as a scenario without edits.

    Args:
        kernels: kernels of one GPU, at least one.
        device: the device of each GPU; ``models`` are models fitted for it.
        gpus: number of GPUs of the replica.
    """
    graph, works = _graph(kernels, device, gpus)
    calls = {len(kernels): [HostCall(WAIT, LaunchKind.BLOCKING_SYNC, 0.0)]}
    if host.graph_us is not None:
        calls[0] = [HostCall(GRAPH_LAUNCH, LaunchKind.GRAPH, 1e3 * host.graph_us, works)]
    else:
        for row, work in enumerate(works):
            us = host.collective_us if work.collective >= 0 else host.launch_us
            calls[row] = [HostCall(LAUNCH, LaunchKind.KERNEL, 1e3 * us, [work])]
    before = np.zeros(len(graph.ops))
    before[0] = 1e3 * host.step_us
    # Prices of kernels include the gap between two kernels.
    constants = plain_constants(round(device.launch_latency_us * 1e3))
    constants = replace(constants, gap=np.zeros_like(constants.gap))
    made = synthesize([RankTimes(graph, OperationTimes(before, np.zeros(len(graph.ops)), calls), constants)])
    return Scenario(
        made.built, steps_of(made.built), host_slices(made.built), DeviceChange(device, models),
        KernelChange(sources=KernelSources(made.source, made.low, made.high)), HostChange(source=Source.HEURISTIC),
        regrouped=_work(kernels, works), profiled=False)


def _graph(kernels: Sequence[ServedKernel], device: DeviceSpec, gpus: int) -> tuple[ExecutionGraph, list[DeviceWork]]:
    """Return a rank's operations and collectives without times, and their device work."""
    strings: dict[str, int] = {}

    def code(text: str) -> int:
        return strings.setdefault(text, len(strings))

    ops = OpTable.empty(len(kernels) + 1)
    ops.name[:] = [*(code(each.name) for each in kernels), code(END)]
    ops.kind[:], ops.thread[:], ops.step[:] = OpKind.OPERATION, 0, 0
    exchanges = [(row, each.call) for row, each in enumerate(kernels) if isinstance(each.call, CollectiveCall)]
    table = CollectiveTable.empty(len(exchanges))
    for number, (row, call) in enumerate(exchanges):
        table.op[number], table.kind[number], table.dtype[number] = row, code(call.kind.name.lower()), code(call.dtype)
        table.group_size[number], table.order[number] = call.placement.ranks, number
    meta = Meta(device=device.name, rank=0, world_size=gpus)
    graph = ExecutionGraph(
        list(strings), [Thread("0", "0", "engine")], ops, LaunchTable.empty(), KernelTable.empty(), table,
        SyncTable.empty(), GapTable.empty(), StepTable.empty(), OverheadTable.empty(), meta)
    for number, (_, call) in enumerate(exchanges):
        elements = round(call.payload_bytes / element_bytes(graph, table, number)[1])
        table.elements_in[number] = table.elements_out[number] = elements
    of = {row: number for number, (row, _) in enumerate(exchanges)}
    works = [DeviceWork(
        each.name, KernelKind.COLLECTIVE if row in of else KernelKind.COMPUTE, 1e3 * each.us,
        collective=of.get(row, NONE), source=int(each.source), low=_log(each.low_us, each.us),
        high=_log(each.high_us, each.us)) for row, each in enumerate(kernels)]
    return graph, works


def _work(kernels: Sequence[ServedKernel], works: Sequence[DeviceWork]) -> Work:
    """Return the device work of a scenario, with a kernel group for each kernel that is not a collective."""
    computed = [(row, each.call) for row, each in enumerate(kernels) if isinstance(each.call, OpCall)]
    numbers = {calls: number for number, calls in enumerate(dict.fromkeys((call,) for _, call in computed))}
    piece: Int64 = np.full(len(kernels), NONE, np.int64)
    family: Int64 = np.full(len(kernels), COLLECTIVE, np.int64)
    for number, (row, call) in enumerate(computed):
        piece[row], family[row] = number, FAMILIES.index(call.family)
    op = np.array([row for row, _ in computed], np.int64)
    return Work(piece, family, list(numbers), np.array([numbers[call,] for _, call in computed], np.int64),
                np.zeros(len(op), np.int64), op, np.ones(len(op), np.bool_),
                np.array([round(works[row].ns) for row in op.tolist()], np.int64))


def _log(end: float, us: float) -> float:
    return float(np.log(max(end, 1e-6) / us)) if us > 0 else 0.0


READ = ("devices", "kernels", "host", "launches")
"""Fields of a scenario that an edit of a served step may change."""
SAID = ("set_by", "shared", "warnings", "notes")
LEAST_US = 1e-3
"""Least time of a scenario's kernel: times are whole nanoseconds. Launches that differ by less count as equal."""


class EditedServingModel(ServingModel):
    """A ``ServingModel`` with edits.

    Args:
        model: the model without edits.
        edits: edits of ``graph_predictor.edits``.

    Raises:
        EditError: an edit is not possible.
        ServingError: an edit has no meaning for a served step.
    """

    def __init__(self, model: ServingModel, edits: Sequence[Edit]) -> None:
        self.__dict__.update({name: value for name, value in model.__dict__.items() if name != "surface"})
        self._grids = []
        self._edits = tuple(edits)
        self._of_step = [ServedKernel(each.name, each.call, 1.0, 1.0, 1.0) for each in dict.fromkeys(
            model.in_order(ServedStep(1, 1, (PrefillChunk(1, 1),))))]
        edited, (step, launch, collective) = self._of_host()
        _, (_, self.graph_us, _) = self._of_host(GRAPH_LAUNCH_US)
        self.waits, self.hides = edited.launches.waits, edited.launches.hidden_collectives
        rates, engine = model.rates, model.setup.engine
        self.rates = replace(rates, host_us=rates.host_us * launch, step_us=rates.step_us * step,
                             host_collective_us=rates.host_collective_us * collective)
        self.setup = replace(model.setup, engine=replace(
            engine, request_us=engine.request_us * step, reply_us=engine.reply_us * step))

    def _of_host(self, graph_us: float | None = None) -> tuple[Scenario, list[float]]:
        """Return an edited synthetic step, and three host times, µs, that are 1 µs each without edits. They are the
        engine's, a kernel's launch (or the graph's, ``graph_us`` without edits), and a collective's launch."""
        edited = self._apply(served_scenario(self._of_step, ServedHost(1.0, 1.0, 1.0, graph_us), self.device,
                                             self.models, self.setup.gpus))
        slices, us = edited.slices, edit_host(edited, None).ns / 1e3
        exchange = np.isin(slices.op, edited.built.graphs[0].collectives.op) & (graph_us is None)
        parts = [us[~slices.is_cost], us[slices.is_cost & ~exchange], us[slices.is_cost & exchange]]
        if edited.host.constants is not None or any(np.ptp(part) > LEAST_US for part in parts if len(part)):
            edits = ", ".join(each.describe() for each in self._edits)[:80]
            raise ServingError(f"{edits!r} changes launches unlike one another, and those of a served step all take "
                               "one time; scale them alike (--host).")
        return edited, [float(part[0]) if len(part) else 1.0 for part in parts]  # one GPU has no collectives

    def _prices(self, calls: Sequence[OpCall]) -> PricedCalls:
        priced = super()._prices(calls)
        ratio = self._ratios(priced.calls, priced.time_us)
        return replace(priced, **{name: getattr(priced, name) * ratio for name in ("time_us", "low_us", "high_us")})

    def _exchange_times(self, calls: Sequence[CollectiveCall]) -> CommTimes:
        times = super()._exchange_times(calls)
        ratio = self._ratios(calls, times.time_us)
        return replace(times, **{name: getattr(times, name) * ratio for name in ("time_us", "low_us", "high_us")})

    def _ratios(self, calls: Sequence[OpCall | CollectiveCall], us: Float64) -> Float64:
        """Return the time of each call with the edits over its time without them."""
        if not len(calls):
            return np.ones(0)
        whole = np.maximum(us, LEAST_US)
        # A whole step is included, because an edit of collectives, for example, refuses a step without any.
        edited = self._apply(served_scenario(
            [*(ServedKernel("", call, each, each, each) for call, each in zip(calls, whole.tolist(), strict=True)),
             *self._of_step], ServedHost(0.0, 0.0, 0.0), self.device, self.models, self.setup.gpus))
        found: Float64 = price_kernels(edited).ns[:len(calls)] / edited.built.program.kernel_duration[:len(calls)]
        return found

    def _apply(self, scenario: Scenario) -> Scenario:
        for edit in self._edits:
            scenario = _applied(edit, scenario)
        return scenario


def edited_model(model: ServingModel, edits: Sequence[Edit]) -> ServingModel:
    """Return a model with edits; the same model without edits. Raises the errors of ``EditedServingModel``."""
    return EditedServingModel(model, edits) if edits else model


def _applied(edit: Edit, scenario: Scenario) -> Scenario:
    """Return an edited scenario. Raises ``ServingError`` for an edit of something that a served step does not have."""
    edited = edit.apply(scenario)
    changed = [each.name for each in fields(Scenario) if each.name not in (*READ, *SAID)
               and getattr(edited, each.name) is not getattr(scenario, each.name)
               and getattr(edited, each.name) != getattr(scenario, each.name)]
    kernels, claims = edited.kernels, edited.set_by
    if OTHER_RANKS in claims or claims.get("the network") == "--scale-out":
        raise ServingError(f"{edit.describe()[:80]!r} is of a recorded job's ranks; a served replica has as many as "
                           "--tp, --pp and --attention-dp say, which all work alike.")
    if changed or kernels.calls != scenario.kernels.calls or kernels.call_edits != scenario.kernels.call_edits or (
            edited.launches.graphed):
        raise ServingError(f"{edit.describe()[:80]!r} changes the operations of a recorded step, and those of a served "
                           "one are the engine's own; say how it is served (--precision, --cuda-graphs, --tp, …).")
    return edited
