"""``Shared``, a cache of results that several predictions need, and recorded steps repeated back to back.

Functions of plain values use ``functools``' cache; results in ``Shared`` depend on objects too large to compare.

Repeated steps (``Repeated``) are a ``Program`` of their own.

::

    recorded    | step 0 | step 1 | step 2 |           (queues fill, the first steps run ahead of the GPU)
    repeated                      | step 2 | step 2 | step 2 | step 2 | …

A dependency within the steps stays within each copy; a dependency on the step before becomes one on the copy before.
Time between two steps is not repeated: replay does not count it either, and with the profiler's step markers it is the
profiler's own. A batch that a data loader delivered late arrives one recorded period later in every further copy.
"""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import TypeVar

import numpy as np

from graph_predictor.recorded.counted_steps import step_lengths
from graph_predictor.simulation.build import Built
from graph_predictor.simulation.engine import structure_of
from graph_predictor.simulation.program import NEVER, ItemKind, Program, Structure, pointers, step_items
from kernel_models.device import DeviceSpec
from tracer.arrays import Bool, Int64
from tracer.errors import ForetraceError
from tracer.shape_only.devices import TracedDevice

KEPT = 6
"""Results kept of each kind. Few suffice: the points of a sweep that share results follow each other. Chosen."""
LARGE = 500_000
"""A job with more items and kernels keeps fewer results, as each takes tens of MB (a choice)."""
LARGE_KEPT = 2
"""Number of results of each kind that a large job keeps: of the unedited step and of the last edited one."""
_PLAIN = frozenset({float, str})
_BY_VALUE = frozenset({dict, DeviceSpec, TracedDevice})
_MOST_NUMBERED = 512  # chosen: beyond what a sweep asks for at one time

T = TypeVar("T")


class Shared:
    """A cache of the last few results of each kind, by their inputs; errors are kept too.

    Args:
        most: number of results of each kind to keep.
    """

    def __init__(self, most: int = KEPT) -> None:
        self.most = most
        self._found: dict[str, OrderedDict[Hashable, tuple[object, object]]] = {}
        self._numbered: OrderedDict[int, object] = OrderedDict()
        self._numbers = count()

    def once(self, kind: str, of: tuple[object, ...], make: Callable[[], T], *,
             keep: Callable[[T], bool] = lambda result: True, most: int | None = None) -> T:
        """Return ``make()``, or the kept result for an equal ``of``. Callers must not change the result.

        Args:
            kind: name of the kind of result.
            of: everything the result depends on: numbers, texts, devices, tuples and dictionaries compare by value,
                other objects by identity.
            make: makes the result. A ``ForetraceError`` that it raises is kept too and raised again.
            keep: returns whether to keep a result.
            most: number of results of this kind to keep; by default ``self.most``.
        """
        most = self.most if most is None else most
        kept = self._found.setdefault(kind, OrderedDict())
        key = self._key(of)
        if key in kept:
            kept.move_to_end(key)
            result = kept[key][1]
            if isinstance(result, ForetraceError):
                raise result.with_traceback(None)
            return result  # type: ignore[return-value]
        while len(kept) >= most:
            kept.popitem(last=False)
        try:
            made = make()
        except ForetraceError as error:
            kept[key] = of, error
            raise
        if keep(made):
            kept[key] = of, made
        return made

    def as_many(self, numbers: int, room: int, most: int) -> int:
        """Return how many results of ``numbers`` numbers each to keep: as many as fit into ``room`` numbers, at most
        ``most``; for a large job only the last one."""
        return 1 if self.most < KEPT else min(max(room // max(numbers, 1), KEPT), most)

    def _key(self, value: object) -> Hashable:
        """Return a key that equal values share. An object's identity is a valid key while its result is kept, because
        the result keeps the object."""
        kind = type(value)
        if kind is tuple:
            return tuple(map(self._key, value))  # type: ignore[call-overload]
        if kind in _PLAIN:
            return value
        if kind is int or kind is bool:
            return kind, value  # 1, 1.0 and True are equal, but different keys
        return (self._number(value) if kind in _BY_VALUE else id(value),)

    def _number(self, value: object) -> int:
        """Return a number for a value that cannot be hashed: that of an equal earlier value, or a new one."""
        for number, known in reversed(self._numbered.items()):
            if known is value or (type(known) is type(value) and known == value):
                return number
        if len(self._numbered) >= _MOST_NUMBERED:
            self._numbered.popitem(last=False)
        number = next(self._numbers)
        self._numbered[number] = value
        return number


def results_kept(program: Program) -> int:
    """Return how many results of each kind are kept of a job."""
    return KEPT if len(program.item_kind) + len(program.kernel_item) <= LARGE else LARGE_KEPT


def collect(program: Program) -> None:
    """Free the unused memory of a large job, which may be hundreds of MB. Copies and the results they share refer to
    each other, so only a garbage collection frees them."""
    if results_kept(program) < KEPT:
        gc.collect()


MOST_KEPT = 1_000_000
"""Most items and kernels of a repetition that is kept for further predictions: some 200 MB."""


@dataclass(frozen=True, slots=True)
class Cycle:
    """The recorded steps that are repeated.

    Attributes:
        built: the recorded job.
        steps: steps in the cycle, of every rank.
        item, kernel: which items and kernels of the recorded program belong to it.
        first, last: begin item of the first step and end item of the last one, per rank.
        names: names of the steps, of the first rank.
        row: rows of ``graph.steps``, [ranks, steps].
        numbers: numbers of the steps, within each rank.
    """

    built: Built
    steps: int
    item: Bool
    kernel: Bool
    first: Int64
    last: Int64
    names: tuple[str, ...]
    row: Int64
    numbers: tuple[int, ...]
    shared: Shared = field(default_factory=Shared, init=False, repr=False, compare=False)
    """Repetitions of the cycle, shared by predictions from one recording."""

    @property
    def working(self) -> Bool:
        """Return a mask of the cycle's items whose host time counts: all but begins of steps (time between steps)."""
        return self.item & (self.built.program.item_kind != ItemKind.STEP_BEGIN)

    def kernel_rows(self, rank: int) -> Int64:
        """Return the rows of a rank's kernels of the recorded program that belong to it."""
        pointer = self.built.program.kernel_ptr.tolist()
        return self.shared.once("kernel rows", (), lambda: [
            low + np.flatnonzero(self.kernel[low:high]) for low, high in pairwise(pointer)])[rank]

    def recorded_ns(self, rank: int) -> Int64:
        """Return the recorded length of a rank's steps, [steps]."""
        graphs = self.built.graphs
        lengths = self.shared.once("lengths", (), lambda: [step_lengths(graph).length_ns for graph in graphs])
        return lengths[rank][self.row[rank]]

    @property
    def period_ns(self) -> int:
        """Return the recorded length of the cycle, of the slowest rank."""
        program = self.built.program
        return int((program.recorded_item_end[self.last] - program.recorded_item_start[self.first]).max())


@dataclass(frozen=True, slots=True)
class Repeated:
    """Copies of a cycle of steps, back to back.

    Attributes:
        program: the copies.
        copies: their number.
        item, kernel: row of the recorded program that each row of ``program`` is a copy of.
        copy_of_item, copy_of_kernel: number of the copy, from 0.
        end: end item of the last step of each rank and copy, [ranks, copies].
        tail: last kernel of each stream and copy, [streams, copies]; tail_rank the rank of each stream.
        structure: the dependencies of ``program``, shared by all programs with the same copies.
    """

    program: Program
    copies: int
    item: Int64
    kernel: Int64
    copy_of_item: Int64
    copy_of_kernel: Int64
    end: Int64
    tail: Int64
    tail_rank: Int64
    structure: Structure
    shared: Shared = field(default_factory=Shared, init=False, repr=False, compare=False)
    """Results that predictions share, such as orders of computation."""


def steps_of(built: Built, steps: str | int | Sequence[int] | None = None) -> Cycle:
    """Return the steps to repeat, as ``choose_steps`` does; a job without steps is an error.

    Raises:
        ForetraceError: the job has no steps, or no such step.
    """
    found = choose_steps(built, steps)
    if found is None:
        raise ForetraceError("The trace has no steps to repeat: name the region that marks them with --step-region "
                             "(foretrace inspect lists those that repeat), call prof.step() after each iteration, or "
                             "capture with foretrace capture.")
    return found


def choose_steps(built: Built, steps: str | int | Sequence[int] | None = None) -> Cycle | None:
    """Return the steps to repeat; ``None`` where a rank has no steps.

    Args:
        built: a recorded job.
        steps: a step's name, its number within each rank (negative counts from the end), or several numbers, which must
            be consecutive if the steps are to be repeated. By default the last step.

    Raises:
        ForetraceError: there is no such step.
    """
    program = built.program
    by_rank: dict[int, list[tuple[int, int, int]]] = {}
    for rank, row, begin, end in step_items(program):
        by_rank.setdefault(rank, []).append((row, begin, end))
    if len(by_rank) < program.ranks:
        return None
    fewest = min(len(found) for found in by_rank.values())
    step_names = [built.graphs[0].string(int(built.graphs[0].steps.name[row])) for row, _, _ in by_rank[0]]
    numbers = step_numbers(step_names, -1 if steps is None else steps, fewest)
    thread = program.item_thread()
    item = np.zeros(len(program.item_kind), np.bool_)
    first, last, rows = [], [], []
    for rank in range(program.ranks):
        own = by_rank[rank]
        chosen = [own[number] for number in numbers]
        main = int(thread[chosen[0][1]])
        others = (program.thread_rank[thread] == rank) & (thread != main)
        for _, begin, end in chosen:
            item[begin:end + 1] = True
        start = np.sort(program.recorded_item_start[[begin for _, begin, _ in chosen]])
        until = np.maximum.accumulate(np.sort(program.recorded_item_end[[end for _, _, end in chosen]]))
        at = np.searchsorted(start, program.recorded_item_start, side="right") - 1
        item |= others & (at >= 0) & (program.recorded_item_start < until[at])
        rows.append([row for row, _, _ in chosen])
        first.append(chosen[0][1])
        last.append(chosen[-1][2])
    launcher = program.kernel_item
    kernel = np.where(launcher >= 0, item[launcher] if len(item) else False, False).astype(np.bool_)
    names = tuple(step_names[number] for number in numbers)
    cycle = Cycle(built, len(numbers), item, kernel, np.array(first, np.int64), np.array(last, np.int64), names,
                  np.array(rows, np.int64), tuple(numbers))
    cycle.shared.most = results_kept(program)
    return cycle


def step_numbers(names: Sequence[str], wanted: str | int | Sequence[int], fewest: int) -> list[int]:
    """Return the numbers of steps within each rank, from 0; a name means the first step of that name.

    Args:
        names: names of the steps, in order.
        wanted: a name, a number (negative from the end) or its text, or several numbers.
        fewest: number of steps that every rank has.

    Raises:
        ForetraceError: there is no such step.
    """
    if isinstance(wanted, str):
        try:
            numbers = [names.index(wanted) if wanted in names else int(wanted)]
        except ValueError:
            numbers = []
    else:
        numbers = [wanted] if isinstance(wanted, int) else list(wanted)
    found = [number + fewest if number < 0 else number for number in numbers]
    if not found or min(found) < 0 or max(found) >= fewest:
        known = list(dict.fromkeys(names))
        listed = ", ".join(known[:6]) + (f" … {known[-1]}" if len(known) > 6 else "")
        raise ForetraceError(f"There is no step {wanted!r}: the trace has {listed}; give one of these names, or a "
                             f"number from 0 to {fewest - 1} (or from -1 backwards).")
    return found


def repeat(cycle: Cycle, copies: int) -> Repeated:
    """Return the program of ``copies`` repetitions of a cycle. It is kept for the next call, unless it is large."""
    return cycle.shared.once("repeated", (copies,), lambda: _repeated(cycle, copies),
                             keep=lambda found: len(found.item) + len(found.kernel) <= MOST_KEPT)


def _repeated(cycle: Cycle, copies: int) -> Repeated:
    p = cycle.built.program
    rows = np.flatnonzero(cycle.item)
    kept, counts = np.unique(p.item_thread()[rows], return_counts=True)
    thread_ptr, items = _copied(rows, counts, len(p.item_kind), copies)
    rows = np.flatnonzero(cycle.kernel)
    kernel_ptr, kernels = _copied(rows, np.bincount(p.kernel_rank()[rows], minlength=p.ranks), len(p.kernel_item),
                                  copies)

    twin = _twins(cycle)
    previous, tail, tail_rank = _streams(cycle, kernels, copies)
    work = p.item_work[items.of]
    work[p.item_kind[items.of] == ItemKind.STEP_BEGIN] = 0
    external = p.item_external[items.of]
    external = np.where(external > NEVER, external + items.copy * cycle.period_ns, NEVER)
    queue, before = _queue(cycle, items, kernels, copies)
    after_ptr, (after_item, after_lag) = _edges(p.after_ptr, p.after_item, (p.after_lag,), items, items, None)
    wait_ptr, (wait_kernel, wait_lag) = _edges(p.wait_ptr, p.wait_kernel, (p.wait_lag,), items, kernels, twin)
    edge_ptr, (edge_kernel, edge_fraction, edge_lag) = _edges(
        p.edge_ptr, p.edge_kernel, (p.edge_fraction, p.edge_lag), kernels, kernels, twin)
    group, group_size, duration = _groups(cycle, kernels, copies)
    start = p.recorded_item_start[cycle.first]
    program = Program(
        thread_ptr=thread_ptr, thread_rank=p.thread_rank[kept], thread_start=start[p.thread_rank[kept]],
        item_kind=p.item_kind[items.of], item_row=p.item_row[items.of], item_work=work, item_cost=p.item_cost[items.of],
        item_external=external, item_queue=before,
        item_channel=p.item_channel[items.of], item_return=p.item_return[items.of],
        after_ptr=after_ptr, after_item=after_item, after_lag=after_lag,
        wait_ptr=wait_ptr, wait_kernel=wait_kernel, wait_lag=wait_lag,
        kernel_ptr=kernel_ptr, kernel_item=items.at(p.kernel_item[kernels.of], kernels.copy),
        kernel_reference=p.kernel_reference[kernels.of], kernel_latency=p.kernel_latency[kernels.of],
        kernel_previous=previous, kernel_gap=p.kernel_gap[kernels.of], kernel_duration=duration,
        kernel_external=np.full(len(kernels.of), NEVER, np.int64),
        edge_ptr=edge_ptr, edge_kernel=edge_kernel, edge_fraction=edge_fraction, edge_lag=edge_lag,
        kernel_group=group, group_size=group_size, queue_ptr=queue[0], queue_kernel=queue[1], queue_depth=p.queue_depth,
        recorded_item_start=p.recorded_item_start[items.of], recorded_item_end=p.recorded_item_end[items.of],
        recorded_kernel_start=p.recorded_kernel_start[kernels.of],
        recorded_kernel_end=p.recorded_kernel_end[kernels.of])
    end = items.at(cycle.last[:, None], np.arange(copies))
    found = Repeated(program, copies, items.of, kernels.of, items.copy, kernels.copy, end, tail, tail_rank,
                     structure_of(program))
    found.shared.most = results_kept(p)
    return found


@dataclass(frozen=True, slots=True)
class _Copies:
    """New rows by recorded row: ``first`` + copy × ``stride``. Recorded row and copy by new row: ``of``, ``copy``."""

    first: Int64
    stride: Int64
    of: Int64
    copy: Int64

    def at(self, row: Int64, copy: Int64 | int) -> Int64:
        """Return the new rows of copies of recorded rows."""
        return self.first[row] + copy * self.stride[row]


def _copied(rows: Int64, counts: Int64, length: int, copies: int) -> tuple[Int64, _Copies]:
    """Copy ``rows`` of ``length`` rows, which are ``counts`` rows of each group in turn. Groups stay contiguous, their
    copies in order.

    Returns:
        The groups' first new rows [groups + 1], and the copies.
    """
    pointer = pointers(counts * copies)
    place = np.arange(len(rows)) + np.repeat(pointer[:-1] - (np.cumsum(counts) - counts), counts)
    found = _Copies(np.full(length, -1, np.int64), np.zeros(length, np.int64),
                    np.empty(pointer[-1], np.int64), np.empty(pointer[-1], np.int64))
    found.first[rows], found.stride[rows] = place, np.repeat(counts, counts)
    for copy in range(copies):
        new = found.at(rows, copy)
        found.of[new], found.copy[new] = rows, copy
    return pointer, found


def _streams(cycle: Cycle, copied: _Copies, copies: int) -> tuple[Int64, Int64, Int64]:
    """Return each copied kernel's predecessor on its stream, each stream's last kernel by copy, and its rank."""
    p, kernels = cycle.built.program, np.flatnonzero(cycle.kernel)
    rank = p.kernel_rank()[kernels]
    stream, device = (np.concatenate([getattr(g.kernels, name) for g in cycle.built.graphs])[kernels].astype(np.int64)
                      for name in ("stream", "device"))
    order = np.lexsort((kernels, p.recorded_kernel_start[kernels], stream, device, rank))
    key = np.stack([rank, device, stream])[:, order]
    opens = np.ones(len(order), np.bool_)
    opens[1:] = (key[:, 1:] != key[:, :-1]).any(axis=0)
    begins = np.flatnonzero(opens)
    ends = np.append(begins[1:], len(order)) - 1 if len(order) else begins
    ordered = kernels[order]
    before = np.concatenate([[-1], ordered[:-1]])[: len(ordered)]
    before[begins] = ordered[ends]
    previous = np.full(len(kernels) * copies, -1, np.int64)
    for copy in range(copies):
        from_copy = np.where(opens, copy - 1, copy)
        previous[copied.at(ordered, copy)] = np.where(from_copy >= 0, copied.at(before, from_copy), -1)
    return previous, copied.at(ordered[ends][:, None], np.arange(copies)), rank[order][ends]


def _queue(cycle: Cycle, items: _Copies, kernels: _Copies, copies: int) -> tuple[tuple[Int64, Int64], Int64]:
    """Return the launch-queue entries (pointer by channel, kernels), and how many come before each item."""
    p = cycle.built.program
    before = np.where(p.item_queue[items.of] >= 0, 0, -1)
    entries, counts = [], []
    for channel in range(len(p.queue_depth)):
        queued = p.queue_kernel[p.queue_ptr[channel]:p.queue_ptr[channel + 1]]
        inside = cycle.kernel[queued]
        reached = np.concatenate([[0], np.cumsum(inside)])
        mine = queued[inside]
        rows = np.flatnonzero(p.item_channel[items.of] == channel)
        before[rows] = reached[p.item_queue[items.of[rows]]] + items.copy[rows] * len(mine)
        entries += [kernels.at(mine, number) for number in range(copies)]
        counts.append(len(mine) * copies)
    pointer = pointers(counts)
    return (pointer, np.concatenate(entries) if entries else np.zeros(0, np.int64)), before


def _edges(pointer: Int64, source: Int64, values: tuple[np.ndarray, ...], owners: _Copies, sources: _Copies,
           twin: Int64 | None) -> tuple[Int64, tuple[np.ndarray, ...]]:
    """Copy CSR edges. A source outside the cycle becomes ``twin[source]`` one copy earlier, or its edge is dropped."""
    owner = owners.of
    count = (pointer[1:] - pointer[:-1])[owner]
    at = np.repeat(np.arange(len(owner)), count)
    row = np.arange(len(at)) - np.repeat(np.cumsum(count) - count, count) + np.repeat(pointer[owner], count)
    found, from_copy = source[row], owners.copy[at]
    outside = sources.first[found] < 0 if len(found) else np.zeros(0, np.bool_)
    if twin is not None and outside.any():
        found = np.where(outside, twin[found], found)
        from_copy = from_copy - outside
    kept = (found >= 0) & (from_copy >= 0)
    kept &= sources.first[np.maximum(found, 0)] >= 0
    found, from_copy = found[kept], from_copy[kept]
    ptr = pointers(np.bincount(at[kept], minlength=len(owner)))
    return ptr, (sources.at(found, from_copy), *(value[row[kept]] for value in values))


def _twins(cycle: Cycle) -> Int64:
    """Return, for kernels of the step before the cycle, the equal kernels of the cycle's last step (-1: none).

    The n-th kernels of two steps are equal if both steps launch the same number of kernels with the same names.
    """
    p, built = cycle.built.program, cycle.built
    twin = np.full(len(p.kernel_item), -1, np.int64)
    thread = p.item_thread()
    for rank, graph in enumerate(built.graphs):
        low = int(p.kernel_ptr[rank])
        first, last = int(p.item_row[cycle.first[rank]]), int(p.item_row[cycle.last[rank]])
        kernels = graph.kernels
        mine = [low + np.flatnonzero((kernels.step == step) & (kernels.launch >= 0)) for step in (first - 1, last)]
        mine = [rows[np.lexsort((rows, p.kernel_item[rows], thread[p.kernel_item[rows]]))]
                for rows in (one[p.kernel_item[one] >= 0] for one in mine)]
        if first > 0 and len(mine[0]) == len(mine[1]) and np.array_equal(
                kernels.name[mine[0] - low], kernels.name[mine[1] - low]):
            twin[mine[0]] = mine[1]
    return twin


def _groups(cycle: Cycle, kernels: _Copies, copies: int) -> tuple[Int64, Int64, Int64]:
    """Return groups, group sizes and durations of all copies; a collective partly outside the cycle is no group."""
    p = cycle.built.program
    group = p.kernel_group
    inside = cycle.kernel & (group >= 0)
    members = np.bincount(group[inside], minlength=len(p.group_size)) if len(p.group_size) else np.zeros(0, np.int64)
    whole = members == p.group_size
    number = np.cumsum(whole) - 1
    kept = int(whole.sum())
    of = group[kernels.of]
    complete = (of >= 0) & (whole[np.maximum(of, 0)] if len(whole) else False)
    new_group = np.where(complete, number[np.maximum(of, 0)] + kernels.copy * kept, -1) if len(whole) else np.full(
        len(kernels.of), -1, np.int64)
    recorded = p.recorded_kernel_end - p.recorded_kernel_start
    duration = np.where((of >= 0) & ~complete, recorded[kernels.of], p.kernel_duration[kernels.of])
    return new_group.astype(np.int64), np.tile(p.group_size[whole], copies), duration.astype(np.int64)
