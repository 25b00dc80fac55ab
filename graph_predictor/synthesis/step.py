"""A step that was traced by shapes alone, with times from models.

Every call of an operation is priced on the device and becomes a kernel on one compute stream. Collectives run on a
stream of their own and start after the work launched before them; the operation that first needs a result (``wait_op``)
waits for it. Shapes do not determine host time: it comes from a given host, or a default with a wide interval.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from graph_predictor.comm.recorded_calls import price_table
from graph_predictor.prediction.host_steps import traced_host_step
from graph_predictor.synthesis.program import (
    COMMUNICATION_STREAM,
    COMPUTE_STREAM,
    DeviceWork,
    HostCall,
    OperationTimes,
    RankTimes,
    Synthesized,
    plain_constants,
    synthesize,
)
from kernel_models.collectives.call import Level
from kernel_models.device import DeviceSpec, resolve_device
from kernel_models.host.model import CPU_HOST, GPU_HOST, HostModel, shipped_host
from kernel_models.op_call import Family, OpCall, Source
from kernel_models.operation import host_work_ns, placed_calls
from kernel_models.pricing import Models, price, sustained
from kernel_models.spreads import UNKNOWN_HOST
from tracer.errors import ForetraceError
from tracer.graph import HOST_READ, NONE, ExecutionGraph, KernelKind, LaunchKind, Place

if TYPE_CHECKING:
    from kernel_models.collectives import CollectiveModel

LEAST_US = 1e-3
"""Least time of a collective in the ratio of its interval, µs: collectives that launch nothing take no time."""
_COPIES = {("h2d", "pageable"): "Memcpy HtoD (Pageable -> Device)", ("h2d", "pinned"): "Memcpy HtoD (Pinned -> Device)",
           ("d2h", "pageable"): "Memcpy DtoH (Device -> Pageable)", ("d2h", "pinned"): "Memcpy DtoH (Device -> Pinned)"}
"""Names of copies as CUDA reports them: a call waits for those with pageable memory (see ``simulation.ranks``)."""
MOST_CALLS = 0.8
"""Largest share of an operation's host time that its launches take."""
HOST_DEVICE = "cpu"
"""The device whose models price work on tensors in the host's memory of a GPU machine."""
WAIT = "cudaStreamSynchronize"
HOST_WORK_TOLD_NS = 1e6
"""Least host computation that is reported, ns: an optimizer's step counters of some hundred parameters take half."""


@dataclass(frozen=True, slots=True)
class HostThread:
    """The host thread's time in a step, ns.

    Attributes:
        told_ns: time predicted by the host model.
        computed_ns: time of operations' computation on the host, if the host is the device.
        width_ns: its 80% interval's half width. Errors within a family are common, between families independent.
    """

    told_ns: float
    computed_ns: float
    width_ns: float

    @classmethod
    def of(cls, told_ns: float, computed: Iterable[DeviceWork]) -> HostThread:
        """Return the sum of the host model's time and the computed work; a work's name begins with its family."""
        widths: dict[str, float] = {}
        total = 0.0
        for work in computed:
            family = work.name.partition(":")[0]
            widths[family] = widths.get(family, 0.0) + work.ns * (work.high - work.low) / 2.0
            total += work.ns
        return cls(told_ns, total, float(np.sqrt(sum(width * width for width in widths.values()))))

    def spread(self, law: float, host: float, device: float) -> float:
        """Return the log half width of the 80% interval of the sum of both times.

        Args:
            law: log half width of the host model for a known host.
            host, device: additional log half widths of an unknown machine, as a host and as a device; they add up,
                because a machine is slow or fast at both.
        """
        whole = self.told_ns + self.computed_ns
        machine_ns = host * self.told_ns + device * self.computed_ns
        return float(np.sqrt((law * self.told_ns)**2 + self.width_ns**2 + machine_ns**2) / whole) if whole else law


def calls_by_operation(graph: ExecutionGraph, rows: Iterable[int]) -> dict[int, tuple[OpCall, ...]]:
    """Return the calls of operations of a shape-only graph, by row of ``ops``; equal operations are described once."""
    known: dict[tuple[int, ...], tuple[OpCall, ...]] = {}
    ops = graph.ops
    columns = (ops.name, ops.shapes, ops.dtypes, ops.strides, ops.scalars, ops.place)
    found = {}
    for op in rows:
        key = tuple(int(column[op]) for column in columns)
        if key not in known:
            known[key] = placed_calls(graph, op)
        found[op] = known[key]
    return found


def modelled_works(calls: dict[int, tuple[OpCall, ...]], spec: DeviceSpec, models: Models | None) -> dict[
        int, list[DeviceWork]]:
    """Return the device work of operations: each of their calls becomes one kernel."""
    every = [call for of in calls.values() for call in of]
    if not every:
        return {op: [] for op in calls}
    priced = sustained(price(every, spec, models), spec)
    ns = (priced.times_us * 1e3).tolist()
    source = priced.source[priced.index].tolist()
    # A step has many kernels of a family: their independent errors average out, so only the common error is kept.
    low = (priced.common * np.log(priced.low_us / priced.time_us))[priced.index].tolist()
    high = (priced.common * np.log(priced.high_us / priced.time_us))[priced.index].tolist()
    found: dict[int, list[DeviceWork]] = {}
    at = 0
    for op, of in calls.items():
        found[op] = [_work(call, ns[i], source[i], low[i], high[i]) for i, call in enumerate(of, at)]
        at += len(of)
    return found


def _work(call: OpCall, ns: float, source: int, low: float, high: float) -> DeviceWork:
    copy = _COPIES.get((call.kind, "pageable" if "pageable" in call.flags else "pinned")) if (
        call.family is Family.TRANSFER) else None
    if copy is None:
        return DeviceWork(f"{call.family.value}: {call.kind} {call.dtype}", KernelKind.COMPUTE, ns, source=source,
                          low=low, high=high)
    return DeviceWork(copy, KernelKind.MEMCPY, ns, moved=call.dims[0] if call.dims else NONE, source=source, low=low,
                      high=high, in_call="-> Pageable" in copy)


def collective_works(graph: ExecutionGraph, spec: DeviceSpec, collectives: CollectiveModel | None) -> dict[
        int, DeviceWork]:
    """Return the device work of each row of the rank's collectives."""
    if not len(graph.collectives):
        return {}
    table, times = graph.collectives, price_table(graph, spec, collectives)
    us = np.maximum(times.time_us, LEAST_US)
    low, high = (np.log(np.maximum(end, LEAST_US) / us).tolist() for end in (times.low_us, times.high_us))
    return {row: DeviceWork(f"collective: {graph.string(int(table.kind[row]))}", KernelKind.COLLECTIVE,
                            float(times.time_us[row] * 1e3), COMMUNICATION_STREAM, collective=row,
                            source=Level(level).source, low=low[row], high=high[row])
            for row, level in enumerate(times.level.tolist())}


@dataclass(frozen=True, slots=True)
class SynthesizedStep:
    """A step that never ran, and its uncertainty.

    Attributes:
        made: its program, and the sources of its kernels' times.
        device: the device it runs on.
        host_spread: log half width of the 80% interval of the host's time.
        host_source: source of most of the host's time.
        change_spread: log half width of the change of anchored host time (80%).
        notes: assumptions.
        warnings: reasons for less reliable results.
        guessed: share of the host's time that comes from formulas.
    """

    made: Synthesized
    device: DeviceSpec
    host_spread: float
    host_source: Source
    change_spread: float
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    guessed: float = 0.0


def modelled_step(graphs: Sequence[ExecutionGraph], device: DeviceSpec | None = None, models: Models | None = None,
                  host: HostModel | None = None, collectives: CollectiveModel | None = None) -> SynthesizedStep:
    """Give shape-only graphs times by models alone.

    Args:
        graphs: the graphs of one job, one for each rank.
        device: the device it runs on; by default the one it was traced for.
        models: fitted models of the device.
        host: model of the host; by default the shipped model of other hosts (``kernel_models.host.model``).
        collectives: the cluster's prices; by default rings over the links of one node.

    Raises:
        DeviceError: the device is unknown.
    """
    spec = device or resolve_device(graphs[0].meta.device)
    check_fits(graphs, collectives)
    constants = plain_constants(round(spec.launch_latency_us * 1e3))
    known = host or shipped_host(CPU_HOST if spec.vendor == "host" else GPU_HOST)
    if spec.vendor == "host" and known.launch_ns:
        raise ForetraceError(f"{known.host} is of programs whose operations a GPU runs, and this step's compute on "
                             f"their host; give captures of programs that do, or {CPU_HOST}.")
    known = known.suited(all((graph.steps.python_calls >= 0).all() for graph in graphs))
    ranks, threads = [], []
    for graph in graphs:
        times, thread = _modelled(graph, spec, models, known, collective_works(graph, spec, collectives))
        threads.append(thread)
        ranks.append(RankTimes(graph, with_host_waits(graph, times, spec), constants))
    thread = max(threads, key=lambda one: one.told_ns + one.computed_ns)
    told_ns = float(np.mean([one.told_ns for one in threads]))
    notes = [*_notes(spec, host is not None, known), *filter(None, [spec.note]), _told(told_ns, known),
             *_computing(spec, thread, host, models), *collective_notes(graphs, spec, collectives)]
    warnings = () if spec.vendor == "host" else tuple(_host_work_warnings(graphs, spec))
    unknown = 0.0 if host is not None else UNKNOWN_HOST
    spread = thread.spread(known.spread, unknown, unknown if spec.placeholder and models is None else 0.0)
    return SynthesizedStep(synthesize(ranks), spec, spread, Source.HEURISTIC, 0.0, tuple(notes), warnings)


def check_fits(graphs: Sequence[ExecutionGraph], collectives: CollectiveModel | None) -> None:
    """Raise an error if the cluster has fewer ranks than the job."""
    if collectives is not None:
        collectives.check_fits(max(graph.meta.world_size for graph in graphs))


def collective_notes(graphs: Sequence[ExecutionGraph], spec: DeviceSpec, collectives: CollectiveModel | None) -> \
        list[str]:
    """Return notes on how collectives are priced."""
    if not any(len(graph.collectives) for graph in graphs) or spec.vendor == "host":
        return []
    return ["Collectives are rings over the links of one node of the device, by its data sheet; give --topology for a "
            "cluster's." if collectives is None else
            f"Collectives are priced for {collectives.topology.name}, each as if its ranks arrive together."]


def _host_work_warnings(graphs: Sequence[ExecutionGraph], spec: DeviceSpec) -> list[str]:
    """Return a warning on operations whose tensors lie in the host's memory of a GPU machine: the GPU does not compute
    them."""
    by_name: dict[str, float] = {}
    number = 0
    for graph in graphs:
        for op in np.flatnonzero(graph.ops.place == Place.HOST).tolist():
            ns = host_work_ns(graph, op)
            name = graph.string(int(graph.ops.name[op]))
            by_name[name] = by_name.get(name, 0.0) + ns
            number += ns > 0.0
    total = sum(by_name.values()) / len(graphs)
    if total < HOST_WORK_TOLD_NS:
        return []
    most = ", ".join(sorted(by_name, key=lambda name: (-by_name[name], name))[:3])
    return [f"{number:,} operations ({total / 1e6:,.3f} ms a step and rank; most: {most}) work on tensors in the "
            f"host's memory, so that {spec.name} does not compute them: they are priced for a usual CPU ({HOST_DEVICE} "
            "of foretrace devices), the same whatever --device names. Move model and batch to the device if they were "
            "meant for it."]


def _notes(spec: DeviceSpec, given: bool, host: HostModel) -> list[str]:
    learned = f"{host.programs} program{'s' * (host.programs != 1)}"
    return [f"The step never ran: its kernels are priced for {spec.name}, and its host time is "
            + (f"what operations cost in {learned} of {host.host} (right within ×/÷ {np.exp(host.spread):.2f} in 80% "
               "of the cases)." if given else
               f"what operations cost in {learned} on hosts that no --device names (right within a factor of "
               f"{np.exp(np.hypot(host.spread, UNKNOWN_HOST)):.1f} in 80% of the cases); give --host-from for a real "
               "one.")]


def _computing(spec: DeviceSpec, thread: HostThread, host: HostModel | None, models: Models | None) -> list[str]:
    """Return a note if the host is known but the speed of its computation is not."""
    if host is None or models is not None or not spec.placeholder or not thread.computed_ns:
        return []
    return [f"What operations compute there, {thread.computed_ns / 1e6:,.3f} ms, is priced for a CPU that stands for "
            "any; captures on yours teach it (foretrace fit CAPTURE… --device cpu -o cpu.profile, then --profile)."]


def _told(host_ns: float, host: HostModel) -> str:
    """Return a note on the part of the step that comes from the host's model."""
    python = " and calls of Python between them" if host.with_calls else ""
    return (f"{host_ns / 1e6:,.3f} ms of host time a rank, for its operations{python}, rest on that; the critical path "
            "says how much of it the step waits for.")


def _modelled(graph: ExecutionGraph, spec: DeviceSpec, models: Models | None, host: HostModel,
              collectives: dict[int, DeviceWork]) -> tuple[OperationTimes, HostThread]:
    """Return the times of all operations from models alone (each of their calls launches a kernel), and the host's."""
    ops = graph.ops
    row_of = {int(op): row for row, op in enumerate(graph.collectives.op.tolist())}
    calls = calls_by_operation(graph, (op for op in range(len(ops)) if op not in row_of))
    works = modelled_works(calls, spec, models)
    on_host = spec.vendor == "host"
    computed = [host_work_ns(graph, op) if ops.place[op] == Place.HOST else 0.0 for op in range(len(ops))]
    own = {op: [collectives[row_of[op]]] if op in row_of else works[op] for op in range(len(ops))}
    on_cpu = [sum(work.ns for work in own[op]) if on_host and op not in row_of else 0.0 for op in own]
    before, inside = host.estimate(traced_host_step(graph, np.array(on_cpu, np.float64)))
    told_ns = float(before.sum() + inside.sum())
    found: dict[int, list[HostCall]] = {}
    for op in range(len(ops)):
        if on_host and op not in row_of:
            # On a CPU the operation itself computes: it makes no calls.
            inside[op] += on_cpu[op] + computed[op]
            continue
        reads = graph.string(int(ops.name[op])) == HOST_READ
        count = len(own[op]) + reads
        launch = min(host.launch_ns, MOST_CALLS * float(inside[op]) / count) if count else 0.0
        inside[op] += computed[op] - count * launch
        found[op] = [HostCall(*_launch_of(work), launch, [work]) for work in own[op]]
        if reads:
            found[op].append(HostCall(WAIT, LaunchKind.BLOCKING_SYNC, launch, stream=COMPUTE_STREAM))
    calls_of = {op: calls for op, calls in found.items() if calls}
    computed_here = [work for op in own if on_host and op not in row_of for work in own[op]]
    return OperationTimes(before[:-1], inside, calls_of, float(before[-1])), HostThread.of(told_ns, computed_here)


def _launch_of(work: DeviceWork) -> tuple[str, LaunchKind]:
    """Return the name and kind of the call that starts some work."""
    copied = work.kind == KernelKind.MEMCPY
    return ("cudaMemcpyAsync", LaunchKind.MEMCPY) if copied else ("cudaLaunchKernel", LaunchKind.KERNEL)


def with_host_waits(graph: ExecutionGraph, times: OperationTimes, spec: DeviceSpec) -> OperationTimes:
    """Add the host's waits for collectives on a CPU, where the host waits instead of a stream: in synchronous calls
    (FSDP2's), else where the result is first needed. Recorded host times of CPU jobs include these waits."""
    if spec.vendor != "host" or not any(work.kind == KernelKind.COLLECTIVE for own in times.calls.values()
                                        for call in own for work in call.kernels):
        return times
    calls = dict(times.calls)
    table = graph.collectives
    at_once = (table.is_async == 0) & (table.op >= 0)
    wait = HostCall(WAIT, LaunchKind.BLOCKING_SYNC, 0.0, stream=COMMUNICATION_STREAM)
    for op in np.unique(table.op[at_once]).tolist():
        calls[op] = [*calls.get(op, []), replace(wait)]
    for op in np.unique(table.wait_op[(table.wait_op >= 0) & ~at_once]).tolist():
        calls[op] = [replace(wait), *calls.get(op, [])]
    return replace(times, calls=calls)
