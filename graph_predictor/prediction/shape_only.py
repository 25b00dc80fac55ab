"""A recording made up for a step that was traced by shapes alone, so that it can be predicted like any other.

Every operation's calls are priced on the device, and each becomes a kernel on one compute stream; collectives go to a
stream of their own, start after the work launched before them, and the operation that first needs a result
(``wait_op``) waits for it. The host's time is that of a given host, or a default with a wide interval: what no shape
can tell.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from graph_predictor.build import Built, build_program
from graph_predictor.program import Float64, Int64, Program
from kernel_models.device import DeviceSpec, resolve_device
from kernel_models.dtypes import itemsize, short_dtype
from kernel_models.host.overheads import ANY, HostOverheads
from kernel_models.host.segments import Overhead
from kernel_models.launch_constants import GAP_DEFAULT_NS
from kernel_models.model import Source
from kernel_models.op_call import OpCall
from kernel_models.operation import Operation, calls_of
from kernel_models.pricing import Models, price
from tracer.graph import NONE, ExecutionGraph, KernelKind, KernelTable, LaunchKind, LaunchTable, StepTable

HOST_NS = 15_000.0
HOST_SPREAD = 1.1
"""Host time of a launching operation and the log half width of its 80% interval (a factor of 3): an assumption.
Recorded hosts take 26 to 28 µs a kernel (V100, H100 and MI300X traces) to 44 to 177 µs, all under the profiler, of
which about half is here taken to be the profiler's where the host is fast."""
CALL_SHARE = 0.3
"""Of it, the launch call itself."""
OVERHEADS_SPREAD = 0.3
"""The same where overheads of a real host are given: an assumption, see ``whatif.host_from.FALLBACK_SPREAD``."""
RING_EFFICIENCY = 0.75
COLLECTIVE_ALPHA_NS = 20_000.0
COLLECTIVE_SPREAD = 0.7
"""Collectives by a ring over the device's links at this share of the data sheet's rate, and a fixed cost. An assumption
with a wide interval (a factor of 2); ``kernel_models.collectives`` knows better where a topology is given."""
COMPUTE_STREAM, COMMUNICATION_STREAM = 7, 20


@dataclass(frozen=True, slots=True)
class MadeUp:
    """A built job with its kernels' sources and intervals (logs of their ends over the time), by kernel."""

    built: Built
    source: Int64
    low: Float64
    high: Float64
    host_spread: float
    device: DeviceSpec
    notes: tuple[str, ...]


def make_up(graphs: list[ExecutionGraph], device: DeviceSpec | None = None, models: Models | None = None,
            host: HostOverheads | None = None) -> MadeUp:
    """Give shape-only graphs times.

    Args:
        graphs: of one job, a rank each.
        device: where they run; by default what they were traced for.
        models: fitted models of it.
        host: overheads of the host; by default ``HOST_NS`` for each operation.

    Raises:
        DeviceError: the device is not known.
    """
    spec = device or resolve_device(graphs[0].meta.device)
    parts = [_timed(graph, spec, models, host) for graph in graphs]
    built = build_program([part[0] for part in parts])
    program = _with_waits(built)
    notes = [f"The step never ran: its kernels are priced for {spec.name}, and "
             + ("its host time is made of the given host's overheads." if host is not None else
                f"its host is taken to spend {HOST_NS / 1e3:.0f} µs on each operation that launches work; give "
                "--host-from for a real one.")]
    if any(len(graph.collectives) for graph in graphs):
        notes.append("Collectives are rings over the links of one node of the device, by its data sheet.")
    # Kernels are in order of their starts, what was priced in order of launching.
    source = np.concatenate([of[timed.kernels.launch] for timed, of, _, _ in parts])
    low = np.concatenate([of[timed.kernels.launch] for timed, _, of, _ in parts])
    high = np.concatenate([of[timed.kernels.launch] for timed, _, _, of in parts])
    return MadeUp(replace(built, program=program), source, low, high,
                  HOST_SPREAD if host is None else OVERHEADS_SPREAD, spec, tuple(notes))


def _timed(graph: ExecutionGraph, spec: DeviceSpec, models: Models | None, host: HostOverheads | None) -> tuple[
        ExecutionGraph, Int64, Float64, Float64]:
    """A rank's graph with times, launches and kernels; source and interval of each kernel."""
    ops = graph.ops
    communicates = {int(op): row for row, op in enumerate(graph.collectives.op.tolist())}
    known: dict[tuple[int, ...], tuple[OpCall, ...]] = {}
    calls: list[OpCall] = []
    owner: list[int] = []
    collective: list[int] = []
    for op in range(len(ops)):
        if op in communicates:
            owner.append(op)
            collective.append(communicates[op])
            continue
        key = tuple(int(column[op]) for column in (ops.name, ops.shapes, ops.dtypes, ops.strides, ops.scalars))
        if key not in known:
            known[key] = calls_of(Operation.from_graph(graph, op))
        calls += known[key]
        owner += [op] * len(known[key])
        collective += [NONE] * len(known[key])
    op_of, row_of = np.array(owner, np.int64), np.array(collective, np.int64)
    computes = row_of < 0
    priced = price(calls, spec, models)
    ns = np.empty(len(op_of))
    source = np.full(len(op_of), Source.DATASHEET, np.int64)
    low, high = np.full(len(op_of), -COLLECTIVE_SPREAD), np.full(len(op_of), COLLECTIVE_SPREAD)
    ns[computes] = priced.times_us * 1e3
    source[computes] = priced.source[priced.index]
    low[computes] = np.log(priced.low_us / priced.time_us)[priced.index]
    high[computes] = np.log(priced.high_us / priced.time_us)[priced.index]
    ns[~computes] = [_ring_ns(graph, row, spec) for row in row_of[~computes].tolist()]
    return _laid_out(graph, op_of, row_of, np.rint(ns).astype(np.int64), calls, spec, host), source, low, high


def _ring_ns(graph: ExecutionGraph, row: int, spec: DeviceSpec) -> float:
    """A collective over one node's links: every byte goes (n-1)/n times, twice for an all-reduce."""
    table = graph.collectives
    n = max(int(table.group_size[row]), 1)
    elements = max(int(table.elements_in[row]), int(table.elements_out[row]), 0)
    size = elements * itemsize(short_dtype(graph.string(int(table.dtype[row]))) or "fp32")
    rounds = 2.0 if graph.string(int(table.kind[row])) == "all_reduce" else 1.0
    bandwidth = max(spec.peer_gbps, spec.host_gbps, 1.0) * RING_EFFICIENCY
    return COLLECTIVE_ALPHA_NS + rounds * (n - 1) / n * size / bandwidth


def _laid_out(graph: ExecutionGraph, op_of: Int64, row_of: Int64, ns: Int64, calls: list[OpCall], spec: DeviceSpec,
              host: HostOverheads | None) -> ExecutionGraph:
    """Host operations one after the other, their launches inside them, and kernels as soon as their streams are
    free."""
    ops = graph.ops
    strings = list(graph.strings)
    codes: dict[str, int] = {}

    def code(text: str) -> int:
        if text not in codes:
            codes[text] = len(strings)
            strings.append(text)
        return codes[text]

    between, launch, rest = _host_times(graph, op_of, host)
    count = np.bincount(op_of, minlength=len(ops))
    length = np.where(count > 0, rest + count * launch, 0)
    gap = np.where(count > 0, between, 0)
    start = np.cumsum(gap + length) - length
    within = np.arange(len(op_of)) - (np.cumsum(count) - count)[op_of]
    call_start = start[op_of] + rest[op_of] // 2 + within * launch[op_of]
    call_end = call_start + launch[op_of]
    latency = round(spec.launch_latency_us * 1e3)
    stream = np.where(row_of < 0, COMPUTE_STREAM, COMMUNICATION_STREAM)
    begin = np.zeros(len(op_of), np.int64)
    for number in (COMPUTE_STREAM, COMMUNICATION_STREAM):
        mine = np.flatnonzero(stream == number)
        free = 0
        for i in mine.tolist():
            begin[i] = max(int(call_end[i]) + latency, free + GAP_DEFAULT_NS if free else 0)
            free = int(begin[i] + ns[i])
    names = iter(calls)
    kernel_name = [code(f"{c.family.value}: {c.kind} {c.dtype}") if row < 0 and (c := next(names)) else code(
        f"collective: {graph.string(int(graph.collectives.kind[row]))}") for row in row_of.tolist()]
    order = np.argsort(begin, kind="stable")
    launches = LaunchTable.empty(len(op_of))
    launches.name[:], launches.kind[:], launches.op[:] = code("cudaLaunchKernel"), LaunchKind.KERNEL, op_of
    launches.thread[:], launches.start_ns[:], launches.duration_ns[:] = ops.thread[op_of], call_start, launch[op_of]
    launches.correlation[:], launches.step[:] = np.arange(len(op_of)), ops.step[op_of]
    kernels = KernelTable.empty(len(op_of))
    kernels.name[:] = np.array(kernel_name, np.int64)[order] if len(order) else 0
    kernels.kind[:] = np.where(row_of < 0, KernelKind.COMPUTE, KernelKind.COLLECTIVE)[order]
    kernels.launch[:], kernels.op[:], kernels.device[:] = order, op_of[order], 0
    kernels.stream[:], kernels.start_ns[:], kernels.duration_ns[:] = stream[order], begin[order], ns[order]
    kernels.correlation[:], kernels.step[:] = order, ops.step[op_of[order]]
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    collectives = graph.collectives.take(np.arange(len(graph.collectives)))
    collectives.kernel[row_of[row_of >= 0]] = place[np.flatnonzero(row_of >= 0)]
    end = int((start + length).max(initial=0)) + 1
    steps = StepTable.empty(1)
    steps.name[:], steps.start_ns[:], steps.duration_ns[:] = code("traced step"), 0, end
    steps.thread[:] = ops.thread[0] if len(ops) else 0
    timed = ops.take(np.arange(len(ops)))
    timed.start_ns[:], timed.duration_ns[:] = start, length
    meta = replace(graph.meta, era="", window_ns=max(end, int((begin + ns).max(initial=0))))
    return replace(graph, strings=strings, ops=timed, launches=launches, kernels=kernels, collectives=collectives,
                   steps=steps, meta=meta)


def _host_times(graph: ExecutionGraph, op_of: Int64, host: HostOverheads | None) -> tuple[Int64, Int64, Int64]:
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
        return np.rint([by_name[code] for code in names.tolist()]).astype(np.int64)

    launches = [found for (kind, op, detail), found in host.table.items()
                if kind == Overhead.CALL and op == ANY and detail.endswith("LaunchKernel")]
    call = HOST_NS * CALL_SHARE
    if launches:
        call = sum(found.total_ns for found in launches) / max(sum(found.count for found in launches), 1)
    return (column(Overhead.BETWEEN_OPS), np.full(len(names), round(call), np.int64),
            column(Overhead.BEFORE_CALL, Overhead.AFTER_CALL))


def _with_waits(built: Built) -> Program:
    """Edges of collectives: after the compute work launched before, and before the work that needs their result."""
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
    own = np.repeat(np.arange(len(program.kernel_item)), np.diff(program.edge_ptr))
    owner = np.concatenate([own, np.array(target, np.int64)])
    order = np.argsort(owner, kind="stable")
    pointer = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=len(program.kernel_item)))]).astype(np.int64)
    more = len(target)
    return replace(
        program, edge_ptr=pointer,
        edge_kernel=np.concatenate([program.edge_kernel, np.array(source, np.int64)])[order],
        edge_fraction=np.concatenate([program.edge_fraction, np.ones(more)])[order],
        edge_lag=np.concatenate([program.edge_lag, np.zeros(more, np.int64)])[order])
