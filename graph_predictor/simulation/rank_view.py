"""One rank's graph prepared for the builders: ends, top-level calls, launch order, stream predecessors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracer.arrays import Bool, Int32, Int64
from tracer.columns import outermost
from tracer.graph import NONE, ExecutionGraph, KernelKind, LaunchKind

LONG_AGO = np.int64(-(2**60))

STAGED_BYTES = 64 * 1024
"""CUDA copies up to this size from pageable memory through one internal buffer, larger ones piece by piece."""

IN_CALL_COPIES = ("hipMemcpyWithStream", "cudaMemcpy", "hipMemcpy", "cudaMemcpy_v3020")
"""Copies whose call returns only when the copy is done, whatever the memory."""


@dataclass(slots=True)
class RankView:
    """Arrays derived from one graph; ``k_*`` have a row a kernel, ``c_*`` a row a call. Times in ns of its window.

    ``c_top`` is the outermost call a call is nested in (itself mostly). ``k_call`` is the top-level launch call of a
    kernel (-1: orphan) and ``k_call_start`` / ``k_call_end`` its times. ``k_order`` ranks the kernels by launch time,
    orphans first. ``k_previous`` is the kernel before it on its stream.
    """

    graph: ExecutionGraph
    c_end: Int64
    c_top: Int64
    k_end: Int64
    k_call: Int64
    k_call_start: Int64
    k_call_end: Int64
    k_order: Int64
    k_queued: Int64
    """Begin of the kernel's call, or of its stream predecessor's if that is later: the order of the launch queue."""
    k_previous: Int64
    k_stream: Int32
    """Stream index, 0-based over the (device, stream) pairs of the rank."""
    k_in_graph: Bool
    k_in_call: Bool
    k_staged: Bool
    streams: list[tuple[int, int]]
    """(device, stream) of each stream index."""

    def call_name(self, call: int) -> str:
        """Name of a row of ``launches``."""
        return self.graph.string(int(self.graph.launches.name[call]))


def view_rank(graph: ExecutionGraph) -> RankView:
    """Prepare a graph for the builders."""
    calls, kernels = graph.launches, graph.kernels
    c_end = calls.start_ns + calls.duration_ns
    c_top = outermost(calls.parent)
    k_end = kernels.start_ns + kernels.duration_ns
    launched = kernels.launch >= 0
    k_call = np.where(launched, c_top[kernels.launch], NONE).astype(np.int64) if len(calls) else np.full(
        len(kernels), NONE, np.int64)
    k_call_start = np.where(launched, calls.start_ns[k_call], LONG_AGO) if len(calls) else np.full(
        len(kernels), LONG_AGO)
    k_call_end = np.where(launched, c_end[k_call], LONG_AGO) if len(calls) else np.full(len(kernels), LONG_AGO)
    in_graph = np.zeros(len(kernels), np.bool_)
    if len(calls):
        in_graph = launched & (calls.kind[kernels.launch] == LaunchKind.GRAPH)
    in_call, staged = _copies(graph, launched, k_call_end)
    pairs, index = _streams(kernels.device, kernels.stream)
    # Kernels of one call (a CUDA graph) keep their device order; orphans were launched before everything else.
    by_launch = np.lexsort((kernels.start_ns, k_call_start))
    order = np.empty(len(kernels), np.int64)
    order[by_launch] = np.arange(len(kernels))
    by_stream = np.lexsort((order, kernels.start_ns, index))
    # Two threads' overlapping calls can enter a stream in the other order: a kernel is queued after its predecessor.
    queued = running_maximum(index[by_stream], k_call_start[by_stream])
    k_queued = np.empty(len(kernels), np.int64)
    k_queued[by_stream] = queued
    # At one time: device order, so that a kernel never precedes its stream predecessor.
    in_stream = np.empty(len(kernels), np.int64)
    in_stream[by_stream] = np.arange(len(kernels))
    order[np.lexsort((in_stream, kernels.start_ns, k_queued))] = np.arange(len(kernels))
    return RankView(
        graph=graph, c_end=c_end, c_top=c_top, k_end=k_end, k_call=k_call,
        k_call_start=k_call_start, k_call_end=k_call_end, k_order=order, k_queued=k_queued,
        k_previous=_previous(index, by_stream),
        k_stream=index, k_in_graph=in_graph, k_in_call=in_call, k_staged=staged, streams=pairs,
    )


def _streams(device: Int32, stream: Int64) -> tuple[list[tuple[int, int]], Int32]:
    """Distinct (device, stream) pairs and the index of each kernel's pair."""
    if not len(device):
        return [], np.zeros(0, np.int32)
    both, index = np.unique(np.stack([device.astype(np.int64), stream]), axis=1, return_inverse=True)
    return [(int(d), int(s)) for d, s in both.T], index.reshape(-1).astype(np.int32)


def _previous(stream: Int32, order: Int64) -> Int64:
    """Row of the previous kernel of the same stream, or -1; ``order`` sorts the rows by stream and start."""
    previous = np.full(len(stream), NONE, np.int64)
    same = stream[order][1:] == stream[order][:-1]
    previous[order[1:][same]] = order[:-1][same]
    return previous


def running_maximum(group: Int32, value: Int64) -> Int64:
    """Cumulative maximum of ``value`` within each contiguous group."""
    result = np.empty(len(value), np.int64)
    bounds = np.concatenate([[0], np.nonzero(np.diff(group))[0] + 1, [len(group)]])
    for low, high in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        result[low:high] = np.maximum.accumulate(value[low:high])
    return result


def _copies(graph: ExecutionGraph, launched: Bool, call_end: Int64) -> tuple[
        Bool, Bool]:
    """Copies their own call waits for (to pageable memory, or a synchronous copy call), and staged copies.

    A large copy *from* pageable memory is staged by the call piece by piece: the copy runs during the call and ends
    when the call has staged the last piece. One that began after its call had returned was staged before, all of it,
    and launched like any other, as a small one is.
    """
    kernels = graph.kernels
    none = np.zeros(len(kernels), np.bool_)
    if not len(graph.strings) or not len(graph.launches):
        return none, none
    to_host = np.array(["-> Pageable" in text for text in graph.strings], np.bool_)
    from_host = np.array(["Pageable ->" in text for text in graph.strings], np.bool_)
    blocking = np.array([text in IN_CALL_COPIES for text in graph.strings], np.bool_)
    copies = launched & (kernels.kind == KernelKind.MEMCPY)
    by_call = none.copy()
    by_call[copies] = blocking[graph.launches.name[kernels.launch[copies]]]
    in_call = copies & (to_host[kernels.name] | by_call)
    staged = copies & ~in_call & from_host[kernels.name] & (kernels.bytes > STAGED_BYTES)
    staged &= kernels.start_ns < call_end
    return in_call, staged
