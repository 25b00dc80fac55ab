"""A step that was traced by shapes alone, with the times that models or a recording give it.

Every operation's calls are priced on the device, and each becomes a kernel on one compute stream; collectives go to a
stream of their own, start after the work launched before them, and the operation that first needs a result
(``wait_op``) waits for it. The host's time is that of a given host, or a default with a wide interval: what no shape
can tell. Where a recorded step of the same or a similar program is given (``RecordedTimes``), its times are taken
instead wherever one of its operations stands for the traced one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from graph_predictor.prediction.host_steps import traced_host_step
from graph_predictor.synthesis.host_thread import HostThread
from graph_predictor.synthesis.modelled import calls_by_operation, collective_works, modelled_works
from graph_predictor.synthesis.operation_times import (
    COMMUNICATION_STREAM,
    COMPUTE_STREAM,
    DeviceWork,
    HostCall,
    OperationTimes,
)
from graph_predictor.synthesis.program import RankTimes, Synthesized, plain_constants, synthesize
from graph_predictor.synthesis.shared_cores import SharedCores, cores_shared
from kernel_models.device import DeviceSpec, resolve_device
from kernel_models.host.model import CPU_HOST, GPU_HOST, HostModel, shipped_host
from kernel_models.model import Source
from kernel_models.operation import host_work_ns
from kernel_models.pricing import Models
from kernel_models.spreads import SHARED_CORES, UNKNOWN_HOST
from tracer.errors import ForetraceError
from tracer.graph import HOST_READ, ExecutionGraph, KernelKind, LaunchKind, Place

if TYPE_CHECKING:
    from graph_predictor.synthesis.recorded_times import RecordedTimes
    from kernel_models.collectives import CollectiveModel

MOST_CALLS = 0.8
"""Share of an operation's host time that its launches take at most."""
HOST_DEVICE = "cpu"
"""The device whose models price work on tensors in a GPU's host."""
WAIT = "cudaStreamSynchronize"
HOST_WORK_TOLD_NS = 1e6
"""Computing on the host that is reported: an optimizer's step counters of some hundred parameters take half of it."""


@dataclass(frozen=True, slots=True)
class SynthesizedStep:
    """A step that never ran, and how sure it is.

    Attributes:
        made: its program, and where its kernels' times come from.
        device: where it runs.
        host_spread: log half width of the 80% interval of the host's time.
        host_source: where most of that comes from.
        change_spread: the same of what changed in anchored host time.
        notes: what was assumed.
        warnings: what makes it unsure.
    """

    made: Synthesized
    device: DeviceSpec
    host_spread: float
    host_source: Source
    change_spread: float
    notes: tuple[str, ...]
    warnings: tuple[str, ...]


def modelled_step(graphs: Sequence[ExecutionGraph], device: DeviceSpec | None = None, models: Models | None = None,
                  host: HostModel | None = None, collectives: CollectiveModel | None = None) -> SynthesizedStep:
    """Give shape-only graphs times by models alone.

    Args:
        graphs: of one job, a rank each.
        device: where they run; by default what they were traced for.
        models: fitted models of it.
        host: what is known of the host; by default what is shipped of others (``kernel_models.host.model``).
        collectives: the cluster's; by default rings over the links of one node.

    Raises:
        DeviceError: the device is not known.
    """
    spec = device or resolve_device(graphs[0].meta.device)
    _check_fits(graphs, collectives)
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
        ranks.append(RankTimes(graph, _with_host_waits(graph, times, spec), constants))
    thread = max(threads, key=lambda one: one.told_ns + one.computed_ns)
    told_ns = float(np.mean([one.told_ns for one in threads]))
    notes = [*_notes(spec, host is not None, known), _told(told_ns, known), *_computing(spec, thread, host, models),
             *_collective_notes(graphs, spec, collectives)]
    warnings = () if spec.vendor == "host" else tuple(_host_work_warnings(graphs, spec))
    unknown = 0.0 if host is not None else UNKNOWN_HOST
    spread = thread.spread(known.spread, unknown, unknown if spec.placeholder and models is None else 0.0)
    return SynthesizedStep(synthesize(ranks), spec, spread, Source.HEURISTIC, 0.0, tuple(notes), warnings)


def anchored_step(graphs: Sequence[ExecutionGraph], recorded: RecordedTimes,
                  collectives: CollectiveModel | None = None) -> SynthesizedStep:
    """Give shape-only graphs the times of the recorded operations that stand for theirs.

    Args:
        graphs: of one job, a rank each.
        recorded: a recorded job whose operations stand for the traced ones.
        collectives: another cluster's; by default collectives take what they took in the recording.

    Raises:
        EditError: the recording does not say where it ran, or what its operations worked on.
    """
    spec = recorded.device
    _check_fits(graphs, collectives)
    ranks = []
    shared = _cores_shared(graphs, recorded, collectives) if recorded.on_cpu else None
    for position, graph in enumerate(graphs):
        works = collective_works(graph, spec, collectives)
        times = recorded.times(graph, position, works, measured_collectives=collectives is None)
        times = times if shared is None else shared.apply(graph, times)
        ranks.append(RankTimes(graph, _with_host_waits(graph, times, spec), recorded.constants(position)))
    made = synthesize(ranks)
    device_ns = float(made.built.program.kernel_duration.sum())
    notes = [*recorded.notes(device_ns), *(() if shared is None else (shared.note(),)),
             *(() if collectives is None else _collective_notes(graphs, spec, collectives))]
    change = recorded.change_spread if shared is None else float(np.hypot(recorded.change_spread, SHARED_CORES))
    return SynthesizedStep(made, spec, recorded.recorded_spread, recorded.host_source, change, tuple(notes), ())


def _cores_shared(graphs: Sequence[ExecutionGraph], recorded: RecordedTimes, collectives: CollectiveModel | None) -> \
        SharedCores | None:
    ranks = max(graph.meta.world_size for graph in graphs)
    if collectives is not None:
        ranks = min(ranks, collectives.topology.node.gpus)
    return cores_shared(recorded.scenario.built.graphs[0].meta, ranks)


def _check_fits(graphs: Sequence[ExecutionGraph], collectives: CollectiveModel | None) -> None:
    if collectives is not None:
        collectives.check_fits(max(graph.meta.world_size for graph in graphs))


def _collective_notes(graphs: Sequence[ExecutionGraph], spec: DeviceSpec, collectives: CollectiveModel | None) -> \
        list[str]:
    if not any(len(graph.collectives) for graph in graphs) or spec.vendor == "host":
        return []
    return ["Collectives are rings over the links of one node of the device, by its data sheet; give --topology for a "
            "cluster's." if collectives is None else
            f"Collectives are priced for {collectives.topology.name}, each as if its ranks arrive together."]


def _host_work_warnings(graphs: Sequence[ExecutionGraph], spec: DeviceSpec) -> list[str]:
    """Return what to say of operations whose tensors lie in the host's memory: no device that is named computes
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
    """Return what to say where the host is known and what it computes is not."""
    if host is None or models is not None or not spec.placeholder or not thread.computed_ns:
        return []
    return [f"What operations compute there, {thread.computed_ns / 1e6:,.3f} ms, is priced for a CPU that stands for "
            "any; captures on yours teach it (foretrace fit CAPTURE… --device cpu -o cpu.profile, then --profile)."]


def _told(host_ns: float, host: HostModel) -> str:
    """Return what of the step rests on the host's model."""
    python = " and calls of Python between them" if host.with_calls else ""
    return (f"{host_ns / 1e6:,.3f} ms of host time a rank, for its operations{python}, rest on that; the critical path "
            "says how much of it the step waits for.")


def _modelled(graph: ExecutionGraph, spec: DeviceSpec, models: Models | None, host: HostModel,
              collectives: dict[int, DeviceWork]) -> tuple[OperationTimes, HostThread]:
    """Everything from models: each call of an operation is a kernel that is launched; and what the host does."""
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
            # Where operations compute on the host, calls are part of them.
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
    """Return the call that starts some work, and its kind."""
    copied = work.kind == KernelKind.MEMCPY
    return ("cudaMemcpyAsync", LaunchKind.MEMCPY) if copied else ("cudaLaunchKernel", LaunchKind.KERNEL)


def _with_host_waits(graph: ExecutionGraph, times: OperationTimes, spec: DeviceSpec) -> OperationTimes:
    """On a CPU the host itself waits for a collective: in the call where it is synchronous (FSDP2's are; on a GPU only
    its stream would wait), else where its result is first needed. Those of a recorded CPU job are in its host time."""
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
