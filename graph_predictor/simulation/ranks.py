"""The ranks of a recorded job: each prepared for the builders, their collectives matched and their clocks aligned."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from graph_predictor.figures import signed_microseconds
from tracer.arrays import Bool, Float64, Int32, Int64
from tracer.columns import outermost
from tracer.graph import NONE, ExecutionGraph, KernelKind, LaunchKind, StepSource

LONG_AGO = np.int64(-(2**60))
"""A time before every recorded one."""

STAGED_BYTES = 64 * 1024
"""CUDA copies up to this size from pageable memory through one internal buffer, larger ones piece by piece."""

IN_CALL_COPIES = ("hipMemcpyWithStream", "cudaMemcpy", "hipMemcpy", "cudaMemcpy_v3020")
"""Copies whose call returns only when the copy is done, from any kind of memory."""


@dataclass(slots=True)
class RankView:
    """Arrays derived from one graph: ``k_*`` have a row for each kernel, ``c_*`` for each call. Times: ns of a window.

    ``k_call`` is the top-level launch call of a kernel (-1: orphan) and ``k_call_start`` / ``k_call_end`` its times.
    ``k_order`` ranks the kernels by launch time, orphans first. ``k_previous`` is the kernel before it on its stream.
    """

    graph: ExecutionGraph
    c_end: Int64
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
        """Return the name of a row of ``launches``."""
        return self.graph.string(int(self.graph.launches.name[call]))


def view_rank(graph: ExecutionGraph) -> RankView:
    """Return the arrays that the builders need of a graph."""
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
    # Kernels queued at one time keep device order, so that a kernel never precedes its stream predecessor.
    in_stream = np.empty(len(kernels), np.int64)
    in_stream[by_stream] = np.arange(len(kernels))
    order[np.lexsort((in_stream, kernels.start_ns, k_queued))] = np.arange(len(kernels))
    return RankView(
        graph=graph, c_end=c_end, k_end=k_end, k_call=k_call,
        k_call_start=k_call_start, k_call_end=k_call_end, k_order=order, k_queued=k_queued,
        k_previous=_previous(index, by_stream),
        k_stream=index, k_in_graph=in_graph, k_in_call=in_call, k_staged=staged, streams=pairs,
    )


def _streams(device: Int32, stream: Int64) -> tuple[list[tuple[int, int]], Int32]:
    """Return the distinct (device, stream) pairs and the index of each kernel's pair."""
    if not len(device):
        return [], np.zeros(0, np.int32)
    both, index = np.unique(np.stack([device.astype(np.int64), stream]), axis=1, return_inverse=True)
    return [(int(d), int(s)) for d, s in both.T], index.reshape(-1).astype(np.int32)


def _previous(stream: Int32, order: Int64) -> Int64:
    """Return the row of the previous kernel of the same stream, or -1; ``order`` sorts the rows by stream and start."""
    previous = np.full(len(stream), NONE, np.int64)
    same = stream[order][1:] == stream[order][:-1]
    previous[order[1:][same]] = order[:-1][same]
    return previous


def running_maximum(group: Int32, value: Int64) -> Int64:
    """Return the cumulative maximum of ``value`` within each contiguous group."""
    result = np.empty(len(value), np.int64)
    bounds = np.concatenate([[0], np.nonzero(np.diff(group))[0] + 1, [len(group)]])
    for low, high in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        result[low:high] = np.maximum.accumulate(value[low:high])
    return result


def _copies(graph: ExecutionGraph, launched: Bool, call_end: Int64) -> tuple[
        Bool, Bool]:
    """Return copies that their own call waits for (to pageable memory, or a synchronous copy call), and staged copies.

    A large copy *from* pageable memory is staged by the call piece by piece: the copy runs during the call and ends
    when the call has staged the last piece. A copy that began after its call had returned was staged completely before
    it, and launched like any other work, as small copies are.
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


ENDS_AGREE_NS = 1_000_000
"""Recorded ends of one collective agree within 1–7 µs; different clocks of hosts may add up to this."""
HOST_RANGE = "gloo:"
"""Prefix of the names of ranges of a host backend's threads."""
HOST_ENDS_AGREE_NS = 50_000_000
"""``ENDS_AGREE_NS`` for collectives that threads of the host run (gloo). Their ends depend on each rank's scheduler:
on two busy cores they are 5 ms apart. Wrong matches are further apart, or differ in order."""


@dataclass(slots=True)
class Rendezvous:
    """Groups of kernels, as lists of (rank position, kernel row); ``intrinsic_ns`` has one value for each group.

    A collective starts its transfer when its last rank arrives, and ends on all ranks together after the intrinsic
    time. This is the shortest recorded duration over the ranks: the last rank to arrive waited least. Ranks are matched
    by process group and order within it, else by the order in which kernels of one name end. A match whose recorded
    ends disagree is dropped and reported.
    """

    groups: list[list[tuple[int, int]]] = field(default_factory=list)
    intrinsic_ns: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def match_collectives(views: list[RankView], clock_ns: list[int], drifts: list[float]) -> Rendezvous:
    """Match the recorded collective kernels of all ranks. ``clock_ns`` is the start of each window on the job's clock,
    and ``drifts`` the relative rate by which each rank's clock is faster than the job's (see ``job_clock``)."""
    result = Rendezvous()
    apart: dict[str, list[float]] = defaultdict(list)
    for name, members in recorded_meetings(views, result.notes):
        ends = [round(int(views[p].k_end[k]) * (1.0 - drifts[p])) + clock_ns[p] for p, k in members]
        if max(ends) - min(ends) > (HOST_ENDS_AGREE_NS if runs_on_host(views, members) else ENDS_AGREE_NS):
            apart[name].append((max(ends) - min(ends)) / 1e6)
            continue
        result.groups.append(members)
        result.intrinsic_ns.append(min(int(views[p].graph.kernels.duration_ns[k]) for p, k in members))
    result.notes += [
        f"{len(found)} collectives ({name}) end up to {max(found):.1f} ms apart on different ranks: they are replayed "
        "with their recorded durations, not as rendezvous." for name, found in apart.items()]
    return result


def recorded_meetings(views: Sequence[RankView], notes: list[str]) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """Yield each recorded collective's name and (rank position, kernel row) pairs, without a check of their ends.

    Collectives that cannot be matched are reported in ``notes``.
    """
    ends = [view.k_end + view.graph.meta.base_time_ns for view in views]
    return _meetings([_recorded_sequences(view) for view in views], notes, ends)


def runs_on_host(views: Sequence[RankView], members: list[tuple[int, int]]) -> bool:
    """Return whether threads of the host run a collective (gloo)."""
    return all(views[p].graph.string(int(views[p].graph.kernels.name[k])).startswith(HOST_RANGE) for p, k in members)


def match_in_order(graphs: list[ExecutionGraph]) -> Rendezvous:
    """Match the collectives of ranks that never ran, by process group and the order in which each launches them.

    A collective takes the time of its slowest rank. Sends and receives are no rendezvous (see ``synthesis.program``).
    """
    result = Rendezvous()
    for _, members in _meetings([_sequences(graph, np.flatnonzero(graph.kernels.kind == KernelKind.COLLECTIVE),
                                            _described(graph, pairs=False)) for graph in graphs], result.notes):
        result.groups.append(members)
        result.intrinsic_ns.append(max(int(graphs[p].kernels.duration_ns[k]) for p, k in members))
    return result


def _meetings(ranks: list[dict[tuple[str, ...], list[int]]], notes: list[str],
              ends: Sequence[Int64] | None = None) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """Yield the name of each collective, and its (rank position, kernel row) pairs, from the ``_sequences`` of each
    rank. ``ends`` are the ends of every rank's kernels, on one clock: they align sequences of different lengths."""
    buckets: dict[tuple[str, ...], dict[int, list[int]]] = defaultdict(dict)
    for position, sequences in enumerate(ranks):
        for key, rows in sequences.items():
            buckets[key][position] = rows
    for key, by_rank in sorted(buckets.items()):
        lengths = {len(rows) for rows in by_rank.values()}
        if len(by_rank) < 2:
            continue
        if len(lengths) > 1:
            numbers = f"The ranks recorded different numbers of {key[-1]} collectives ({sorted(lengths)}): "
            aligned = None if ends is None else _aligned(by_rank, ends)
            if aligned is None:
                notes.append(f"{numbers}they are replayed with their recorded durations, not as rendezvous.")
                continue
            met = [members for members in aligned if len(members) > 1]
            notes.append(f"{numbers}the {len(met)} that at least two ranks have were matched by when they ended.")
            for members in met:
                yield key[-1], members
            continue
        for order in range(lengths.pop()):
            yield key[-1], [(position, rows[order]) for position, rows in sorted(by_rank.items())]


def _aligned(by_rank: dict[int, list[int]], ends: Sequence[Int64]) -> list[list[tuple[int, int]]] | None:
    """Return the members of each collective of the longest sequence. Every other sequence must be a part of it without
    gaps, with the same ends; ``None`` if one is not."""
    longest = max(by_rank, key=lambda position: (len(by_rank[position]), -position))
    reference = ends[longest][by_rank[longest]]
    found: list[list[tuple[int, int]]] = [[] for _ in reference]
    for position, rows in sorted(by_rank.items()):
        own = ends[position][rows]
        apart = [float(np.median(np.abs(own - reference[shift:shift + len(own)])))
                 for shift in range(len(reference) - len(own) + 1)]
        shift = int(np.argmin(apart))
        if apart[shift] > ENDS_AGREE_NS:
            return None
        for number, row in enumerate(rows):
            found[shift + number].append((position, row))
    return found


def _recorded_sequences(view: RankView) -> dict[tuple[str, ...], list[int]]:
    rows = np.nonzero((view.graph.kernels.kind == KernelKind.COLLECTIVE) & (view.k_call >= 0))[0]
    rows = rows[np.argsort(view.k_order[rows], kind="stable")]
    described = _described(view.graph, pairs=True)
    if not all(int(k) in described for k in rows):
        # Without groups, two overlapping collectives can have been launched in another order on another rank. They
        # end together everywhere, so the order of their ends is used.
        rows = rows[np.argsort(view.k_end[rows], kind="stable")]
    return _sequences(view.graph, rows, described)


def _described(graph: ExecutionGraph, pairs: bool) -> dict[int, tuple[str, ...]]:
    """Return a key for each collective kernel with a process group: it identifies the kernel's sequence across ranks.

    With ``pairs``, a send and its receive in a group of two ranks have one key.
    """
    table = graph.collectives
    described: dict[int, tuple[str, ...]] = {}
    for i in range(len(table)):
        # Groups of one name can differ by rank (a row and a column of a mesh): the list of their ranks separates them.
        if table.kernel[i] >= 0 and table.group[i] >= 0:
            kind = graph.string(int(table.kind[i]))
            if pairs and kind in ("send", "recv") and table.group_size[i] == 2:
                # In a group of two ranks, one rank's send is the other's receive.
                kind = "send_recv"
            described[int(table.kernel[i])] = (
                "group", graph.string(int(table.group[i])), graph.string(int(table.ranks[i])), kind)
    return described


def _sequences(graph: ExecutionGraph, rows: Int64, described: dict[int, tuple[str, ...]]) -> dict[
        tuple[str, ...], list[int]]:
    """Return the collective kernels of one rank in the given order, by a key that identifies sequences across ranks."""
    named = all(int(k) in described for k in rows)
    sequences: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for k in rows.tolist():
        sequences[described[k] if named else ("name", graph.string(int(graph.kernels.name[k])))].append(k)
    return sequences


ONE_CLOCK_NS = 7 * 24 * 3600 * 10**9
"""Windows farther apart were not timed by one clock."""
ONE_HOST_NS = 20_000
"""Clocks with a smaller offset count as one clock."""
STEADY_NS = 100_000
"""Largest median deviation of collectives' ends from a linear offset; beyond it the offset is not that of a clock."""
LEAST_MEETINGS = 3
"""Least number of common collectives that show how their ends scatter."""
DRIFT_TOLD_NS = 20_000
"""Least change of a clock offset over the window that is reported and corrected; smaller changes are scatter."""


@dataclass(frozen=True, slots=True)
class JobClock:
    """The clocks of a job's ranks, with notes on corrections. ``starts_ns`` are the windows' starts on the job's clock,
    from the first one. ``drifts`` are relative rates of the ranks' own clocks against the job's."""

    starts_ns: list[int]
    drifts: list[float]
    notes: list[str]


def window_starts(graphs: Sequence[ExecutionGraph]) -> list[int]:
    """Return when each rank's window starts by its own clock, ns from the first.

    Windows more than a week apart were not timed by one clock: all windows then start together.
    """
    starts = [graph.meta.base_time_ns for graph in graphs]
    first = min(starts, default=0)
    apart = max(starts, default=0) - first > ONE_CLOCK_NS
    return [0 if apart else start - first for start in starts]


def job_clock(views: Sequence[RankView]) -> JobClock:
    """Return the clock of a recorded job: each rank's own clock, corrected by its collectives if its host is another.

    Clocks are aligned by the collectives that ranks end together (as dPRO does, Hu et al., MLSys 2022).

    ::

        rank 0   ────|== all_reduce ==|────────|== all_gather ==|         ends on its own clock
        rank 1       ────|== all_reduce ==|────────|== all_gather ==|     ends on its own clock, later by an offset

    Ranks of one host share a clock, and their collectives end within 1 to 7 µs of each other. Hosts' clocks differ by
    microseconds to milliseconds. Ranks timed from different origins can differ by any amount.
    """
    starts = window_starts([view.graph for view in views])
    level = [0.0] * len(views)
    ends = _ends(views, starts) if len(views) > 1 else np.zeros((0, 0))
    if not len(ends):
        return JobClock(starts, level, [])
    # The reference is the rank with the most collectives in common with other ranks.
    reference = int(np.isfinite(ends).sum(axis=0).argmax())
    notes, found, drifts = _other_steps([view.graph for view in views], reference), list(starts), level
    for position, view in enumerate(views):
        both = np.isfinite(ends[:, position]) & np.isfinite(ends[:, reference])
        ahead = (ends[:, position] - ends[:, reference])[both]
        if position == reference or len(ahead) < LEAST_MEETINGS:
            continue
        own = ends[both, position]
        drift = _drift(own, ahead)
        if abs(drift) * float(np.ptp(own)) <= DRIFT_TOLD_NS:
            drift = 0.0
        offsets = ahead - drift * (own - starts[position])
        offset = float(np.median(offsets))
        scatter = float(np.median(np.abs(offsets - offset)))
        if (abs(offset) <= ONE_HOST_NS and not drift) or scatter > STEADY_NS:
            continue
        found[position] -= round(offset)
        drifts[position] = drift
        more = (f", and changes by {signed_microseconds(drift * float(np.ptp(own)), 0)} µs over the window"
                if drift else "")
        notes.append(
            f"Rank {number_of(view.graph, position)}'s clock is {abs(offset) / 1e6:,.3f} ms "
            f"{'ahead' if offset > 0 else 'behind'} by the ends of {len(ahead)} collectives (within "
            f"{scatter / 1e3:,.1f} µs){more}; it was set.")
    first = min(found)
    return JobClock([start - first for start in found], drifts, notes)


def number_of(graph: ExecutionGraph, position: int) -> int:
    """Return a rank's number: the recorded one, or its position if that is larger (none was recorded)."""
    return max(graph.meta.rank, position)


def _other_steps(graphs: Sequence[ExecutionGraph], reference: int) -> list[str]:
    """Return a sentence for each rank whose profiler marked none of the steps that the reference rank's marked."""
    marked = [[graph.string(int(name)) for name in graph.steps.name]
              if graph.meta.step_source == StepSource.PROFILER_STEP else [] for graph in graphs]
    of = marked[reference]
    return [f"Rank {number_of(graphs[position], position)} recorded {own[0]} to {own[-1]}, rank "
            f"{number_of(graphs[reference], reference)} {of[0]} to {of[-1]}: what they did is matched in order, as if "
            "these were the same steps; give one run's traces of the same steps." for position, own in enumerate(marked)
            if own and of and not set(own) & set(of)]


def _ends(views: Sequence[RankView], starts: Sequence[int]) -> Float64:
    """Return each collective's ends on each rank's own clock, [collectives, ranks], ns; NaN for ranks not in it."""
    rows = []
    for _, members in recorded_meetings(views, []):
        if runs_on_host(views, members):  # their ends depend on the host's scheduler
            continue
        row = np.full(len(views), np.nan)
        for position, kernel in members:
            row[position] = float(int(views[position].k_end[kernel]) + starts[position])
        rows.append(row)
    return np.array(rows)


def _drift(when: Float64, ahead: Float64) -> float:
    """Return the rate by which a clock runs faster than another: the slope of a line fitted to its offsets."""
    span = float(np.ptp(when))
    return float(np.polyfit((when - when.min()) / span, ahead, 1)[0]) / span if span > 0 else 0.0
