"""The critical path's segments tied to operations: host work is split over the operations it was spent in."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from graph_predictor.prediction.replay import Replay
from graph_predictor.simulation.engine import Path, Paths
from graph_predictor.simulation.host_slices import HostSplit, HostTime, split
from graph_predictor.simulation.program import Bound, ItemKind, StartCause, whole_ns
from tracer.arrays import Float64, Int8, Int64
from tracer.graph import NONE


@dataclass(slots=True)
class PathPieces:
    """Parts of paths, each in one operation, in no order; together they are as long as the paths, to the nanosecond.

    ``op`` is a row of the rank's ``ops`` and ``kernel`` a row of its ``kernels`` (-1: none). ``segment`` is a row of
    the paths.
    """

    segment: Int64
    bound: Int8
    op: Int64
    kernel: Int64
    ns: Int64


def attribute_paths(replay: Replay, paths: Paths, rank: int, host: HostTime, operation: Int64,
                    share: Float64 | None = None) -> PathPieces:
    """Cut some paths into parts, each with the operation that it belongs to.

    Args:
        replay: The replay with the paths.
        paths: Paths within one rank.
        rank: Position of that rank in the job.
        host: The rank's ``exclusive_time``.
        operation: The rank's ``operation_of``, and -1 at the end.
        share: For a replay without the profiler, the share of recorded time left in each ``op`` of ``host``; the last
            share is of time outside operations.
    """
    program, built, path = replay.program, replay.built, paths.joined
    graph = built.graphs[rank]
    length = path.end_ns - path.start_ns
    first_kernel = int(program.kernel_ptr[rank])
    kernel = np.where(path.kernel >= 0, path.kernel - first_kernel, NONE)
    op = np.full(len(length), NONE, np.int64)
    with_kernel = kernel >= 0
    op[with_kernel] = operation[graph.kernels.op[kernel[with_kernel]]]
    item = np.maximum(path.item, 0)
    if len(program.item_kind):
        is_call = (path.item >= 0) & ~path.is_work & (program.item_kind[item] == ItemKind.CALL)
        op[is_call] = operation[graph.launches.op[program.item_row[item[is_call]]]]
        spread = (path.item >= 0) & ~is_call
    else:
        spread = np.zeros(len(length), np.bool_)
    whole = np.nonzero(~spread)[0]
    rows = np.nonzero(spread)[0]
    thread, low, high = _recorded(replay, path, rows, rank)
    pieces = split(host, thread, low, high)
    if share is not None:
        pieces.ns = _fitted(pieces, length[rows], share, np.searchsorted(rows, paths.first))
    at = rows[pieces.query]
    # Time beyond the recorded length, which an edit added, has no recorded interval and so no operation.
    covered = np.bincount(pieces.query, weights=pieces.ns, minlength=len(rows)).astype(np.int64)
    beyond = length[rows] - covered
    longer = np.nonzero(beyond > 0)[0]
    segment = np.concatenate([whole, at, rows[longer]])
    return PathPieces(
        segment=segment, bound=path.bound[segment],
        op=np.concatenate([op[whole], pieces.op, np.full(len(longer), NONE, np.int64)]),
        kernel=np.concatenate([kernel[whole], np.full(len(at) + len(longer), NONE, np.int64)]),
        ns=np.concatenate([length[whole], pieces.ns, beyond[longer]]),
    )


def _fitted(pieces: HostSplit, length: Int64, share: Float64, first: Int64) -> Int64:
    """Return the new lengths, ns, of recorded pieces of queried intervals, in proportion to what is left of each piece.
    Pieces of one query add up to its ``length`` exactly. Each path, whose queries begin at ``first``, is rounded along
    its way."""
    left = pieces.ns * share[pieces.op]
    total = np.bincount(pieces.query, weights=left, minlength=len(length))
    fitted = left * np.where(total > 0, length / np.where(total > 0, total, 1.0), 0.0)[pieces.query]
    bounds = np.searchsorted(pieces.query, first).tolist()
    return np.concatenate([np.zeros(0, np.int64), *(
        np.diff(np.rint(np.cumsum(fitted[low:high])).astype(np.int64), prepend=0) for low, high in pairwise(bounds))])


def _recorded(replay: Replay, path: Path, rows: Int64, rank: int) -> tuple[Int64, Int64, Int64]:
    """Return the thread (of the graph) and recorded interval of each host segment, ns of the rank's window."""
    program, clock = replay.program, replay.built.clock_ns[rank]
    item = path.item[rows]
    if not len(rows):
        return item, item, item
    program_thread = np.searchsorted(program.thread_ptr, item, side="right") - 1
    numbers = np.array([*replay.built.thread_number, NONE], np.int64)
    thread = numbers[program_thread] if len(numbers) > len(program.thread_rank) else np.full(len(rows), NONE, np.int64)
    recorded = replay.built.recorded_program
    length = path.end_ns[rows] - path.start_ns[rows]
    if not replay.profiled:
        # Take the same share of the recorded work as of the work without the profiler.
        now = np.maximum(program.item_work[item], 1)
        length = np.where(path.is_work[rows], whole_ns(length * (recorded.item_work[item] / now)), length).astype(
            np.int64)
    end = program.recorded_item_start[item].copy()
    # Work follows the thread's previous item; the rest of the time before a loader's batch arrives is its wait.
    has_work = path.is_work[rows] & (replay.simulated.item_start_cause[item] != StartCause.OTHER_THREAD)
    has_work &= item > program.thread_ptr[program_thread]
    worked = program.recorded_item_end[item - 1] + recorded.item_work[item]
    end = np.where(has_work, np.minimum(worked, end), end)
    start = end - length
    start = np.where(has_work, np.maximum(start, program.recorded_item_end[item - 1]), start)
    return thread, start - clock, end - clock


def bound_sums(paths: Paths) -> list[dict[Bound, int]]:
    """Return the nanoseconds of each path by bound; every bound is present."""
    joined, count, many = paths.joined, len(paths.first) - 1, len(Bound)
    path = np.repeat(np.arange(count), np.diff(paths.first))
    sums = np.bincount(path * many + joined.bound, weights=joined.end_ns - joined.start_ns, minlength=count * many)
    return [dict(zip(Bound, each, strict=True)) for each in sums.astype(np.int64).reshape(count, many).tolist()]
