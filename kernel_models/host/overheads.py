"""``HostOverheads``: distributions of host time by kind, operation and call, fitted on recorded steps.

A recorded operation's own samples are used, even a single one: operations differ far more than the samples of one. An
operation without samples takes the pool of its kind ("shared overheads" of Lin et al. 2022: they transfer between
models of one host). A sum needs means; quantiles show how far single events stray (T5: as much as the mean).

*The profiler's part* (``event_cost``) shows in the recording itself. An operation made of others (``aten::t`` of
``aten::transpose``) does little but call them, so its own recorded time is the profiler's, for noting its parts::

    recorded    |= aten::t =|~prof~|= aten::transpose =|~prof~|= aten::t =|       own time of aten::t ≈ one event

Its median is longer on a slower host, as the profiler is, and with each option that makes events cost more. 27 programs
were recorded together with unprofiled steps (``traces/host``, ``traces/host-held-out``). There the profiler's true cost
of an event is 0.76 to 1.39 times this median, 1.02 times in the median (``benchmarks/profiler_cost.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from kernel_models.host.segments import HostIntervals, Overhead, Segments, host_segments
from tracer.arrays import Bool, Float64, Int8, Int64
from tracer.errors import ForetraceError
from tracer.graph import ExecutionGraph
from tracer.input_file import DecodeError, convert

QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
"""Quantiles stored for each distribution."""
STALL_TIMES, STALL_NS = 20.0, 500_000
"""A segment of at least ``STALL_NS`` that exceeds its key's median by the factor ``STALL_TIMES`` is a stall: the
operating system, a garbage collection, a driver's lock. On the traces here such pauses of 1–3 ms come up to once a
step, at a different operation each time."""
ANY = "*"

Key = tuple[int, str, str]
"""Kind, operation and detail (T4: the call; T1: the operation before); ``ANY`` where pooled."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """The samples of one key (kind of host time, operation, detail), ns.

    Attributes:
        count: Number of samples.
        mean_ns, total_ns: Mean and sum.
        quantiles_ns: Quantiles at ``QUANTILES``.
        estimate_ns: Expected time of one more event: the mean. For a pool, it is the median of its keys' means, since
            the next event is of another operation and a few keys cost a thousand times the others. On the suite's five
            other workloads, each left out once, the mean error is 11%, with the mean of keys 29%.
    """

    count: int
    mean_ns: float
    total_ns: float
    quantiles_ns: tuple[float, ...]
    estimate_ns: float


@dataclass(frozen=True, slots=True)
class Recorded:
    """One rank's segments (spans of host time), and the names that their keys consist of.

    Attributes:
        segments: the host time.
        op, detail: names for the keys; [n] of str objects.
        step_names: names of the graph's steps.
    """

    segments: Segments
    op: npt.NDArray[np.object_]
    detail: npt.NDArray[np.object_]
    step_names: list[str]

    def stalls(self) -> Bool:
        """Return which segments are stalls (see ``STALL_NS``), compared with all segments of the key."""
        codes, _ = _codes(self.segments.kind, self.op, self.detail)
        duration = self.segments.duration_ns
        found = duration >= STALL_NS
        for code in np.unique(codes[found]).tolist():
            mine = codes == code
            far = mine & (duration > STALL_TIMES * np.median(duration[mine]))
            # A pause that recurs in most of the steps belongs to the operation, even if it is rare within a step.
            again = 2 * len(np.unique(self.segments.step[far])) > len(np.unique(self.segments.step[mine]))
            found &= ~mine | (far & (not again))
        return found

    def take(self, rows: Bool) -> Recorded:
        """Return the recording with the chosen segments only."""
        return Recorded(self.segments.take(rows), self.op[rows], self.detail[rows], self.step_names)

    def steps(self, numbers: Sequence[int]) -> Recorded:
        """Return the recording with the segments of the steps of these numbers only."""
        return self.take(np.isin(self.segments.step, list(numbers)))

    def without_profiler(self, event_ns: float) -> Recorded:
        """Return the recording without the profiler's cost of each recorded operation and call, never below zero."""
        s = self.segments
        left = np.maximum(s.duration_ns - np.rint(s.events * event_ns).astype(np.int64), 0)
        return Recorded(Segments(s.kind, s.op, s.before, s.call, s.thread, s.start_ns, left, s.events, s.step),
                        self.op, self.detail, self.step_names)


def record(graph: ExecutionGraph, excluded: HostIntervals | None = None) -> Recorded:
    """Return the segments of a graph and their names.

    Args:
        graph: a recorded window.
        excluded: see ``host_segments``.
    """
    segments = host_segments(graph, excluded)
    names = np.array([*graph.strings, ""], dtype=object)
    op_name = np.append(graph.ops.name, -1)
    call_name = np.append(graph.launches.name, -1)
    detail = np.where(segments.kind == Overhead.CALL, names[call_name[segments.call]],
                      names[op_name[segments.before]])
    return Recorded(segments, names[op_name[segments.op]], detail,
                    [graph.string(int(code)) for code in graph.steps.name])


def profiler_event_ns(graph: ExecutionGraph, recorded: Recorded) -> float | None:
    """Return the profiler's cost of a recorded operation or call, ns; ``None`` without unprofiled steps to compare.

    The cost is the median profiled step minus the median unprofiled one, over the median step's events. If the profiled
    step is faster (this happens where the GPU decides), the cost is 0.
    """
    if not graph.meta.unprofiled_step_ns or not len(graph.steps):
        return None
    inside = recorded.segments.step >= 0
    events = np.bincount(recorded.segments.step[inside], weights=recorded.segments.events[inside],
                         minlength=len(graph.steps))
    slower = float(np.median(graph.steps.duration_ns) - np.median(graph.meta.unprofiled_step_ns))
    return max(slower, 0.0) / max(float(np.median(events)), 1.0)


@dataclass(frozen=True, slots=True)
class HostOverheads:
    """Fitted overheads of one host.

    Attributes:
        table: a distribution for every key, including pooled keys.
        host: where they were measured (CPU model, torch version…), for the provenance.
    """

    table: dict[Key, Distribution]
    host: dict[str, Any]

    def estimate_ns(self, recorded: Recorded) -> Float64:
        """Return each segment's expected time by its key alone, ns; durations in ``recorded`` are ignored."""
        codes, keys = _codes(recorded.segments.kind, recorded.op, recorded.detail)
        return np.array([self._estimate(key) for key in keys])[codes] if keys else np.zeros(0)

    def _estimate(self, key: Key) -> float:
        kind, op, detail = key
        for level in ((kind, op, detail), *_above(kind, op, detail)):
            if level in self.table:
                return self.table[level].estimate_ns
        return 0.0

    def scaled(self, factor: float) -> HostOverheads:
        """Return the overheads of a host whose single-thread times are multiplied by ``factor``.

        Raises:
            ForetraceError: the factor is not a positive number.
        """
        if not np.isfinite(factor) or factor <= 0:
            raise ForetraceError(f"Host overheads cannot be scaled by {factor}: give a positive factor, for example "
                                 "the ratio of two hosts' single-thread times.")
        table = {key: Distribution(d.count, d.mean_ns * factor, d.total_ns * factor,
                                   tuple(q * factor for q in d.quantiles_ns), d.estimate_ns * factor)
                 for key, d in self.table.items()}
        return HostOverheads(table, {**self.host, "scaled_by": factor * float(self.host.get("scaled_by", 1.0))})

    def to_json(self) -> dict[str, Any]:
        """Return the overheads as plain values, for a profile."""
        rows = [[kind, op, detail, d.count, d.mean_ns, d.total_ns, list(d.quantiles_ns), d.estimate_ns]
                for (kind, op, detail), d in self.table.items()]
        return {"host": self.host, "quantiles": list(QUANTILES), "rows": rows}

    @classmethod
    def from_json(cls, state: dict[str, Any]) -> HostOverheads:
        """Return the overheads that ``to_json`` stored. Raises ``ForetraceError`` for other values."""
        try:
            stored = convert(state, _State)
        except DecodeError as error:
            raise ForetraceError(f"The host overheads are not in the form foretrace writes ({error}): the file is "
                                 "damaged or of another version; fit them again.") from None
        return cls({(kind, op, detail): Distribution(count, mean, total, quantiles, estimate)
                    for kind, op, detail, count, mean, total, quantiles, estimate in stored.rows}, stored.host)


_Nanoseconds = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
_Row = tuple[Annotated[int, msgspec.Meta(ge=0, le=127)], str, str, Annotated[int, msgspec.Meta(ge=0)], _Nanoseconds,
             Annotated[float, msgspec.Meta(ge=0, le=1e18)], tuple[_Nanoseconds, ...], _Nanoseconds]


class _State(msgspec.Struct):
    """The stored form of ``HostOverheads``, as ``to_json`` returns it."""

    host: dict[str, Any]
    rows: list[_Row]


def fit_overheads(parts: Sequence[Recorded], host: dict[str, Any] | None = None) -> HostOverheads:
    """Return the distributions of every key in the recorded parts, and of the pools above them.

    Raises:
        ForetraceError: there is no host time in them.
    """
    columns = [(p.segments.kind, p.op, p.detail, p.segments.duration_ns) for p in parts if len(p.segments)]
    if not columns:
        raise ForetraceError("There is no host time to fit: the traces have no operations on any host thread. Profile "
                             "with ProfilerActivity.CPU.")
    kind, op, detail, duration = (np.concatenate(c) for c in zip(*columns, strict=True))
    every = np.full(len(kind), ANY, dtype=object)
    table: dict[Key, Distribution] = {}
    finest, _ = _codes(kind, op, detail)
    mean_of_key = np.bincount(finest, weights=duration) / np.bincount(finest)
    for ops, details in ((op, detail), (op, every), (every, detail), (every, every)):
        codes, keys = _codes(kind, ops, details)
        order = np.argsort(codes, kind="stable")
        bounds = np.searchsorted(codes[order], np.arange(len(keys) + 1))
        for index, key in enumerate(keys):
            rows = order[bounds[index]:bounds[index + 1]]
            samples = duration[rows]
            table[key] = Distribution(
                len(rows), float(samples.mean()), float(samples.sum()),
                tuple(float(q) for q in np.quantile(samples, QUANTILES)),
                float(np.median(mean_of_key[np.unique(finest[rows])])))
    return HostOverheads(table, dict(host or {}))


def _above(kind: int, op: str, detail: str) -> list[Key]:
    """Return the pools above a key, nearest first. A call's own name tells more than the operation around it."""
    if kind == Overhead.CALL:
        return [(kind, ANY, detail), (kind, op, ANY), (kind, ANY, ANY)]
    return [(kind, op, ANY), (kind, ANY, ANY)]


def _codes(kind: Int8, op: npt.NDArray[np.object_], detail: npt.NDArray[np.object_]) -> \
        tuple[Int64, list[Key]]:
    """Return a number for every row's key, and the keys by number."""
    numbers: dict[Key, int] = {}
    codes = np.fromiter((numbers.setdefault(key, len(numbers))
                         for key in zip(kind.tolist(), op.tolist(), detail.tolist(), strict=True)),
                        np.int64, len(kind))
    return codes, list(numbers)


@dataclass(frozen=True, slots=True)
class HostRatio:
    """The comparison of one host with another over the keys of both.

    Attributes:
        shared: Number of keys in both.
        ratio: Time of the second host over the first, each shared key weighted by its time on the first.
        low, high: The quartiles of the keys' own ratios.
    """

    shared: int
    ratio: float
    low: float
    high: float


def compare_hosts(first: HostOverheads, second: HostOverheads) -> dict[Overhead | None, HostRatio]:
    """Return the second host's overheads over the first's, by kind, and over all kinds (key ``None``).

    The ratio over all kinds is the single-thread speed factor that ``HostOverheads.scaled`` takes. Kinds without a
    shared operation are left out.
    """
    shared = [key for key in first.table if ANY not in key[1:] and key in second.table
              and first.table[key].mean_ns > 0 and second.table[key].mean_ns > 0]
    kinds: list[Overhead | None] = [None, *Overhead]
    found = {}
    for kind in kinds:
        keys = [key for key in shared if kind is None or key[0] == kind]
        if not keys:
            continue
        mine = np.array([first.table[key].total_ns for key in keys])
        ratios = np.array([second.table[key].mean_ns / first.table[key].mean_ns for key in keys])
        low, high = np.quantile(ratios, (0.25, 0.75))
        found[kind] = HostRatio(len(keys), float((mine * ratios).sum() / mine.sum()), float(low), float(high))
    return found
