"""A recording made up for a step that was traced by shapes alone, so that it can be predicted like any other.

Every operation's calls are priced on the device, and each becomes a kernel on one compute stream; collectives go to a
stream of their own, start after the work launched before them, and the operation that first needs a result
(``wait_op``) waits for it. The host's time is that of a given host, or a default with a wide interval: what no shape
can tell. Where a recorded step of the same or a similar program is given (``Anchors``), its times are taken instead
wherever one of its operations stands for the traced one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from graph_predictor.comm.collective_times import CollectiveModel
from graph_predictor.simulation.build import Built, build_program
from graph_predictor.simulation.program import Anchor, Program, whole_ns
from graph_predictor.synthesis.laid_out import (
    COMMUNICATION_STREAM,
    COMPUTE_STREAM,
    Call,
    LaidOut,
    OpTimes,
    Work,
    laid_out,
    plain_constants,
)
from graph_predictor.synthesis.modelled import calls_by_operation, collective_works, modelled_works
from graph_predictor.synthesis.transfers import paired_transfers
from kernel_models.device import DeviceSpec, resolve_device
from kernel_models.host.overheads import ANY, HostOverheads
from kernel_models.host.segments import Overhead
from kernel_models.launch_constants import LaunchConstants
from kernel_models.model import Source
from kernel_models.placed import host_work_ns
from kernel_models.pricing import Models
from tracer.arrays import Float64, Int64
from tracer.graph import HOST_READ, ExecutionGraph, KernelKind, LaunchKind, Place

if TYPE_CHECKING:
    from graph_predictor.synthesis.retraced import Anchors

HOST_NS = 15_000.0
HOST_SPREAD = 1.1
"""Host time of a launching operation and the log half width of its 80% interval (a factor of 3): an assumption.
Recorded hosts take 26 to 28 µs a kernel (V100, H100 and MI300X traces) to 44 to 177 µs, all under the profiler, of
which about half is here taken to be the profiler's where the host is fast."""
CALL_SHARE = 0.3
"""Of it, the launch call itself."""
OVERHEADS_SPREAD = 0.3
"""The same where overheads of a real host are given: an assumption, see ``edits.host_from.FALLBACK_SPREAD``."""
HOST_DEVICE = "cpu"
"""Of this device operations run on the host thread itself."""
WAIT = "cudaStreamSynchronize"
HOST_WORK_TOLD_NS = 1e6
"""Computing on the host that is reported: an optimizer's step counters of some hundred parameters take half of it."""


@dataclass(frozen=True, slots=True)
class MadeUp:
    """A built job with its kernels' sources and intervals (logs of their ends over the time), by kernel.

    ``host_spread`` is the log half width of the 80% interval of the host's time, ``change_spread`` what is added where
    anchored times changed; ``host_source`` says where most of it comes from. ``warnings`` say what makes it unsure.
    """

    built: Built
    source: Int64
    low: Float64
    high: Float64
    host_spread: float
    device: DeviceSpec
    notes: tuple[str, ...]
    host_source: Source = Source.HEURISTIC
    change_spread: float | None = None
    warnings: tuple[str, ...] = ()


def make_up(graphs: list[ExecutionGraph], device: DeviceSpec | None = None, models: Models | None = None,
            host: HostOverheads | None = None, collectives: CollectiveModel | None = None,
            anchors: Anchors | None = None) -> MadeUp:
    """Give shape-only graphs times.

    Args:
        graphs: of one job, a rank each.
        device: where they run; by default where the anchors were recorded, else what they were traced for.
        models: fitted models of it.
        host: overheads of the host; by default the anchors', else ``HOST_NS`` for each operation.
        collectives: the cluster's; by default rings over the links of one node.
        anchors: a recorded job whose operations stand for the traced ones.

    Raises:
        DeviceError: the device is not known.
    """
    spec = device or (anchors.device if anchors is not None else resolve_device(graphs[0].meta.device))
    if collectives is not None:
        collectives.check_fits(max(graph.meta.world_size for graph in graphs))
    parts: list[LaidOut] = []
    for position, graph in enumerate(graphs):
        works = collective_works(graph, spec, collectives)
        if anchors is not None:
            times = anchors.times(graph, position, spec, models, works,
                                  measured_collectives=collectives is None)
            constants = anchors.constants(position)
        else:
            times = _modelled(graph, spec, models, host, works)
            constants = plain_constants(round(spec.launch_latency_us * 1e3))
        if spec.name == HOST_DEVICE and _has_collectives(times):
            _host_waits(graph, times)
        parts.append(laid_out(graph, times, constants))
    # Ranks laid out one by one do not meet in their collectives yet: their order tells which belong together.
    built = build_program([part.graph for part in parts], by_order=True)
    program = replace(_with_waits(built), kernel_duration=_durations(built, parts))
    if anchors is not None:
        program = _recorded_constants(program, built, anchors)
    notes = anchors.notes(parts) if anchors is not None else _notes(spec, host)
    measured = anchors is not None and collectives is None
    if any(len(graph.collectives) for graph in graphs) and spec.name != HOST_DEVICE and not measured:
        notes.append("Collectives are rings over the links of one node of the device, by its data sheet; give "
                     "--topology for a cluster's." if collectives is None else
                     f"Collectives are priced for {collectives.topology.name}, each as if its ranks arrive together.")
    spread = anchors.recorded_spread if anchors is not None else HOST_SPREAD if host is None else OVERHEADS_SPREAD
    return MadeUp(replace(built, program=program), np.concatenate([part.source for part in parts]),
                  np.concatenate([part.low for part in parts]), np.concatenate([part.high for part in parts]),
                  spread, spec, tuple(notes), Source.HEURISTIC if anchors is None else anchors.host_source,
                  None if anchors is None else anchors.change_spread,
                  () if anchors is not None or spec.name == HOST_DEVICE else tuple(_host_work_warnings(graphs, spec)))


def _host_work_warnings(graphs: list[ExecutionGraph], spec: DeviceSpec) -> list[str]:
    """What to say of operations whose tensors lie in the host's memory: no device that is named computes them."""
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


def _notes(spec: DeviceSpec, host: HostOverheads | None) -> list[str]:
    return [f"The step never ran: its kernels are priced for {spec.name}, and "
            + ("its host time is made of the given host's overheads." if host is not None else
               f"its host, which no --device names, is taken to spend {HOST_NS / 1e3:.0f} µs on each operation that "
               f"launches work (an assumption, right within a factor of {np.exp(HOST_SPREAD):.0f} in 80% of the "
               "cases); give --host-from for a real one.")]


def _modelled(graph: ExecutionGraph, spec: DeviceSpec, models: Models | None, host: HostOverheads | None,
              collectives: dict[int, Work]) -> OpTimes:
    """Everything from models: each call of an operation is a kernel that is launched."""
    ops = graph.ops
    row_of = {int(op): row for row, op in enumerate(graph.collectives.op.tolist())}
    calls = calls_by_operation(graph, (op for op in range(len(ops)) if op not in row_of))
    works = modelled_works(calls, spec, models)
    between, launch, rest = _host_times(graph, host)
    on_host = spec.name == HOST_DEVICE
    before, inside = np.zeros(len(ops)), np.zeros(len(ops))
    found: dict[int, list[Call]] = {}
    for op in range(len(ops)):
        own = [collectives[row_of[op]]] if op in row_of else works[op]
        computed = host_work_ns(graph, op) if ops.place[op] == Place.HOST else 0.0
        if not own and not computed:
            continue
        before[op], inside[op] = between[op], computed or rest[op]
        if on_host and op not in row_of:
            # Where operations compute on the host, what a call costs is part of the operation.
            inside[op] += sum(work.ns for work in own) + launch[op]
            continue
        found[op] = [Call("cudaLaunchKernel" if work.kind != KernelKind.MEMCPY else "cudaMemcpyAsync",
                          LaunchKind.KERNEL if work.kind != KernelKind.MEMCPY else LaunchKind.MEMCPY, float(launch[op]),
                          [work]) for work in own]
        if graph.string(int(ops.name[op])) == HOST_READ:
            found[op].append(Call(WAIT, LaunchKind.BLOCKING_SYNC, float(launch[op]), stream=COMPUTE_STREAM))
    return OpTimes(before, inside, found)


def _has_collectives(times: OpTimes) -> bool:
    """Whether collectives are work of their own; those of a recorded CPU job are in its host time."""
    return any(work.kind == KernelKind.COLLECTIVE for own in times.calls.values() for call in own
               for work in call.kernels)


def _host_waits(graph: ExecutionGraph, times: OpTimes) -> None:
    """On a CPU the host itself waits for a collective: in the call where it is synchronous (FSDP2's are; on a GPU only
    its stream would wait), else where its result is first needed."""
    table = graph.collectives
    at_once = (table.is_async == 0) & (table.op >= 0)
    wait = Call(WAIT, LaunchKind.BLOCKING_SYNC, 0.0, stream=COMMUNICATION_STREAM)
    for op in np.unique(table.op[at_once]).tolist():
        times.calls[op] = [*times.calls.get(op, []), replace(wait)]
    for op in np.unique(table.wait_op[(table.wait_op >= 0) & ~at_once]).tolist():
        times.calls[op] = [replace(wait), *times.calls.get(op, [])]


def _durations(built: Built, parts: list[LaidOut]) -> Int64:
    """What each kernel takes; a collective, on each of its ranks, what it takes on the slowest."""
    ns = np.concatenate([part.ns for part in parts]).astype(np.int64)
    group = built.program.kernel_group
    longest = np.zeros(len(built.program.group_size), np.int64)
    np.maximum.at(longest, group[group >= 0], ns[group >= 0])
    return np.where(group >= 0, longest[group] if len(longest) else 0, ns)


def _recorded_constants(program: Program, built: Built, anchors: Anchors) -> Program:
    """The recorded launch latencies, gaps and queue depths, rather than those read off the few launches of one step."""
    latency, gap = program.kernel_latency.copy(), program.kernel_gap.copy()
    depth = program.queue_depth.copy()
    channel_rank = program.kernel_rank()[program.queue_kernel[program.queue_ptr[:-1]]]
    for rank, graph in enumerate(built.graphs):
        low, high = int(program.kernel_ptr[rank]), int(program.kernel_ptr[rank + 1])
        own: LaunchConstants = anchors.constants(rank)
        kind = graph.kernels.kind
        plain = program.kernel_anchor[low:high] == Anchor.CALL_END
        latency[low:high] = np.where(plain, own.latency[kind], latency[low:high])
        before = np.maximum(program.kernel_previous[low:high] - low, -1)
        gap[low:high] = np.where(before >= 0, own.gap[kind[before], kind, 0], gap[low:high]) if len(kind) else 0
        depth[channel_rank == rank] = max(own.queue_depth, 0)
    return replace(program, kernel_latency=latency, kernel_gap=gap, queue_depth=depth)


def _host_times(graph: ExecutionGraph, host: HostOverheads | None) -> tuple[Int64, Int64, Int64]:
    """Host time before each operation, of each of its launches, and of the rest of it, ns."""
    names = graph.ops.name
    if host is None:
        shares = ((1 - CALL_SHARE) / 2, CALL_SHARE, (1 - CALL_SHARE) / 2)
        between, launch, rest = (np.full(len(names), round(HOST_NS * share), np.int64) for share in shares)
        return between, launch, rest

    def expected(kind: Overhead, op: str) -> float:
        found = host.table.get((kind, op, ANY)) or host.table.get((kind, ANY, ANY))
        return found.estimate_ns if found else 0.0

    def column(*kinds: Overhead) -> Int64:
        by_name = {code: sum(expected(kind, graph.string(code)) for kind in kinds)
                   for code in np.unique(names).tolist()}
        return whole_ns([by_name[code] for code in names.tolist()])

    launches = [found for (kind, op, detail), found in host.table.items()
                if kind == Overhead.CALL and op == ANY and detail.endswith("LaunchKernel")]
    call = HOST_NS * CALL_SHARE
    if launches:
        call = sum(found.total_ns for found in launches) / max(sum(found.count for found in launches), 1)
    return (column(Overhead.BETWEEN_OPS), np.full(len(names), round(call), np.int64),
            column(Overhead.BEFORE_CALL, Overhead.AFTER_CALL))


def _with_waits(built: Built) -> Program:
    """Edges of collectives: after the compute work launched before, and before the work that needs their result; of
    receives: not before what they receive is sent."""
    program = built.program
    target: list[int] = []
    source: list[int] = []
    for rank, graph in enumerate(built.graphs):
        low, kernels = int(program.kernel_ptr[rank]), graph.kernels
        compute = np.flatnonzero(kernels.kind == KernelKind.COMPUTE)
        compute = compute[np.argsort(kernels.launch[compute], kind="stable")]
        table = graph.collectives
        for row in np.flatnonzero(table.kernel >= 0).tolist():
            k = int(table.kernel[row])
            before = int(np.searchsorted(kernels.launch[compute], kernels.launch[k])) - 1
            if before >= 0:
                target.append(low + k)
                source.append(low + int(compute[before]))
            if table.wait_op[row] >= 0:
                after = int(np.searchsorted(kernels.op[compute], table.wait_op[row]))
                if after < len(compute) and kernels.launch[compute[after]] > kernels.launch[k]:
                    target.append(low + int(compute[after]))
                    source.append(low + k)
    whole = len(target)
    for receive, send in paired_transfers(built):
        target.append(receive)
        source.append(send)
    own = np.repeat(np.arange(len(program.kernel_item)), np.diff(program.edge_ptr))
    owner = np.concatenate([own, np.array(target, np.int64)])
    order = np.argsort(owner, kind="stable")
    pointer = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=len(program.kernel_item)))]).astype(np.int64)
    more = len(target)
    return replace(
        program, edge_ptr=pointer,
        edge_kernel=np.concatenate([program.edge_kernel, np.array(source, np.int64)])[order],
        edge_fraction=np.concatenate([program.edge_fraction, np.arange(more) < whole])[order],
        edge_lag=np.concatenate([program.edge_lag, np.zeros(more, np.int64)])[order])
