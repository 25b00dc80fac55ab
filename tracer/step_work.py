"""Recorded steps: their work, the cycle in which it repeats, and steps whose device work was lost.

A step's work is how often it runs each kind of operation, that is its name and sizes. A call's duration does not count,
because a pause of the machine would make two steps differ. The mean time of a kind's calls is its weight.

In a loop that alternates, one step may be a whole cycle of recorded steps::

    recorded   | rollout, update | update | update | update | rollout, update | update | update | update |
    steps      |------------------ 0 -----------------------|------------------ 1 -----------------------|

No recorded step of such a loop is typical: the median one has no rollout. So both the recorded steps and the steps that
a capture timed without the profiler are grouped here, once, right after a job was read.

A profiler with full buffers drops kernels, not calls. Between ``cudaStreamBeginCapture`` and ``cudaStreamEndCapture``
launches are put into a graph instead of a stream, also those of other threads (autograd's thread launches the
backward). A step that records its graph takes host time but no device time. It is not the step that the program runs
afterwards::

    calls    begin capture | launch launch launch … | end capture, instantiate | launch graph
    stream                                                                       ######### the step's kernels #########
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tracer.arrays import Bool, Float64, Int64
from tracer.columns import kinds_of, named, within
from tracer.errors import CycleError
from tracer.graph import LAUNCHING, NONE, SHAPE_ONLY, ExecutionGraph, LaunchTable, OpKind, StepTable

DIFFERENT = 0.05
"""Share of two steps' time in operations above which work that only one of them has makes the steps different."""
MOST_STEPS = 64
"""Number of recorded steps, the last ones, that are compared."""
LOADER = "DataLoader"
"""Part of the names of all ranges that PyTorch's data loaders mark."""
WORKERS = "_MultiProcessingDataLoaderIter"
"""Part of the name of the range in which a process waits for a batch from workers."""


@dataclass(frozen=True, slots=True)
class WorkOfSteps:
    """The work of some steps of a rank.

    Attributes:
        row: One call of each kind, a row of ``graph.ops``, [kinds].
        count: How often each step runs each kind, [steps, kinds].
        mean_ns: Mean time of a kind's call without the calls inside it, on the host and on the device, [kinds]; 1 for
            steps traced by shapes, which have no times.
    """

    row: Int64
    count: Float64
    mean_ns: Float64

    @classmethod
    def of(cls, graph: ExecutionGraph, steps: Int64) -> WorkOfSteps:
        """Count the work of steps, by their rows of ``graph.steps``.

        Loading a batch is not compared: the loader decides how many samples it reads.
        """
        ops = graph.ops
        rows = np.flatnonzero((ops.kind == OpKind.OPERATION) & np.isin(ops.step, steps)
                              & ~data_loading_operations(graph))
        name, shapes = ops.name[rows].astype(np.int64), ops.shapes[rows].astype(np.int64)
        # If only some calls of an operation have sizes, the sizes do not show a difference: all are left out.
        unsized = (shapes < 0) | np.isin(shapes, [code for code, text in enumerate(graph.strings) if not text])
        kind, first = kinds_of(name, np.where(np.isin(name, np.unique(name[unsized])), NONE, shapes))
        size = len(first)
        place = np.searchsorted(steps, ops.step[rows]) * size + kind
        count = np.bincount(place, minlength=len(steps) * size).reshape(len(steps), size).astype(np.float64)
        own = np.bincount(kind, weights=np.ones(len(rows)) if graph.meta.era == SHAPE_ONLY else _own_ns(graph)[rows],
                          minlength=size)
        return cls(rows[first], count, own / np.maximum(np.bincount(kind, minlength=size), 1.0))

    def apart(self, one: Int64 | slice, other: Int64 | slice) -> Float64:
        """Return the share of the time of each pair of steps that belongs to work of only one of them, [pairs]."""
        a, b = self.count[one], self.count[other]
        return np.asarray((np.abs(a - b) @ self.mean_ns) / np.maximum((a + b) @ self.mean_ns, 1.0), np.float64)


def worked_steps(graph: ExecutionGraph) -> Int64:
    """Return the last steps, which are compared, as rows of ``graph.steps``. A range without operations or length is a
    marker, not a step."""
    inside = (graph.ops.step >= 0) & (graph.ops.kind == OpKind.OPERATION)
    worked = np.bincount(graph.ops.step[inside], minlength=len(graph.steps))
    return np.flatnonzero((worked > 0) & (graph.steps.duration_ns > 0))[-MOST_STEPS:]


def period_of(graphs: Sequence[ExecutionGraph]) -> int:
    """Return the number of steps after which a job's work repeats; at least two whole rounds must be recorded.

    ::

        work      | A | B | B | B | A | B | B | B |        4
                  | A | A | A | A |                        1: all do the same
                  | A | B | B | A |                        1: it is not known to repeat

    Where ranks recorded different numbers of steps, their last steps correspond to each other.
    """
    steps = [worked_steps(graph) for graph in graphs]
    fewest = min(map(len, steps), default=0)
    if fewest < 2 * 2 or not all(_in_a_row(graph, own) for graph, own in zip(graphs, steps, strict=True)):
        return 1
    works = [WorkOfSteps.of(graph, own[-fewest:]) for graph, own in zip(graphs, steps, strict=True)]
    for period in range(1, fewest // 2 + 1):
        later, earlier = slice(period, None), slice(None, -period)
        if all((work.apart(later, earlier) <= DIFFERENT).all() for work in works):
            return period
    return 1


def _in_a_row(graph: ExecutionGraph, steps: Int64) -> bool:
    """Return whether steps are the last steps of a graph and on one thread."""
    return int(steps[0]) == len(graph.steps) - len(steps) and len(np.unique(graph.steps.thread)) == 1


def data_loading_operations(graph: ExecutionGraph) -> Bool:
    """Return a mask of the operations in which the training process makes samples and collates them, [ops]."""
    loader, workers = (operations_under(graph, name) for name in (LOADER, WORKERS))
    return (graph.ops.kind == OpKind.OPERATION) & loader & ~workers


def operations_like(graph: ExecutionGraph, text: str) -> Bool:
    """Return a mask of the operations and annotations whose names contain a text, [ops]."""
    known = np.array([text in name for name in graph.strings], np.bool_)
    return known[graph.ops.name] if len(graph.ops) else np.zeros(0, np.bool_)


def operations_under(graph: ExecutionGraph, text: str) -> Bool:
    """Return a mask of the operations whose names contain a text, and of all operations inside them, [ops]."""
    named = operations_like(graph, text)
    return within(graph.ops.parent, named) if named.any() else named


def _own_ns(graph: ExecutionGraph) -> Float64:
    """Return the time of each operation without the operations inside it, plus its device work, ns, [ops]."""
    ops, kernels = graph.ops, graph.kernels
    inside = ops.parent >= 0
    called = np.bincount(ops.parent[inside], weights=ops.duration_ns[inside], minlength=len(ops))
    mine = kernels.op >= 0
    device = np.bincount(kernels.op[mine], weights=kernels.duration_ns[mine], minlength=len(ops))
    return np.asarray(np.maximum(ops.duration_ns - called, 0.0) + device, np.float64)


def step_of(steps: StepTable, start: np.ndarray) -> np.ndarray:
    """Return the step in which each event starts, by time; steps do not overlap and apply to all threads."""
    if len(steps) == 0:
        return np.full(len(start), NONE, np.int32)
    found = np.searchsorted(steps.start_ns, start, side="right") - 1
    inside = (found >= 0) & (start < (steps.start_ns + steps.duration_ns)[np.maximum(found, 0)])
    return np.where(inside, found, NONE).astype(np.int32)


WHOLE = 2
"""Whole cycles that must be recorded to find a period."""
_NUMBERED = re.compile(r"(.*?)(\d+)")


def check_cycle(cycle: int | None) -> None:
    """Raise ``CycleError`` for an impossible number of steps."""
    if cycle is not None and (not isinstance(cycle, int) or isinstance(cycle, bool) or cycle < 1):
        raise CycleError(f"cycle={cycle!r} is not possible: give the number of recorded steps after which the loop's "
                         "work repeats, 1 for steps by themselves.")


def group_steps(graphs: list[ExecutionGraph], cycle: int | None = None) -> list[str]:
    """Group the steps of a job into whole cycles. In place.

    Args:
        graphs: One for each rank.
        cycle: Recorded steps of a cycle; by default the period of their work, or 1 where it does not repeat or fewer
            than ``WHOLE`` cycles were recorded.

    Returns:
        Sentences for reports.

    Raises:
        CycleError: A rank has fewer steps, or was saved with cycles of another length.
    """
    check_cycle(cycle)
    before = {graph.meta.cycle for graph in graphs}
    if before != {1}:  # keep the cycles with which it was saved
        if cycle is not None and before != {cycle}:
            raise CycleError(f"{graphs[0].meta.source} was saved with steps that are cycles of {max(before)}, and "
                             f"cycles of {cycle} were asked for: leave --cycle (cycle=) out, or convert the traces "
                             "again.")
        return []
    if cycle == 1 or not graphs or any(graph.meta.era == SHAPE_ONLY for graph in graphs):
        return []
    chosen = cycle or period_of(graphs)
    if chosen == 1:
        return []
    fewest = min(len(graph.steps) for graph in graphs)
    if fewest < chosen:
        raise CycleError(f"{graphs[0].meta.source} has {fewest} step{'' if fewest == 1 else 's'}, fewer than a cycle "
                         f"of {chosen}: record {WHOLE} cycles or more (foretrace capture --steps {WHOLE * chosen}).")
    notes = [f"{graphs[0].meta.source or 'The trace'}: {_how(graphs, chosen, found=cycle is None)}"]
    for graph in graphs:
        timed = len(graph.meta.unprofiled_step_ns)
        _group(graph, chosen)
        if timed and not graph.meta.unprofiled_step_ns:
            notes.append(f"{graph.meta.source}: the {timed} steps timed without the profiler are fewer than a cycle of "
                         f"{chosen} and are left out; record more (foretrace capture --timed {5 * chosen}).")
    return notes


def whole_cycle(trace: Callable[[int], ExecutionGraph], cycle: int) -> ExecutionGraph:
    """Return the graph of one cycle of a program that is traced by shapes.

    Args:
        trace: Traces the given number of steps in a row.
        cycle: Recorded steps of a cycle. If all traced steps are alike, each one is a whole cycle: the function
            contains the loop.
    """
    graph = trace(cycle)
    if cycle == 1:
        return graph
    work = WorkOfSteps.of(graph, np.arange(cycle))
    if (work.apart(slice(1, None), slice(None, -1)) <= DIFFERENT).all():
        graph = trace(1)
        graph.meta.cycle = cycle
    else:
        _group(graph, cycle)
    return graph


def _how(graphs: list[ExecutionGraph], cycle: int, *, found: bool) -> str:
    cycles = min(len(graph.steps) for graph in graphs) // cycle
    why = (f"the loop alternates, its work repeats after {cycle} recorded steps" if found
           else f"{cycle} recorded steps were asked for as one")
    return (f"{why}: a step here is a cycle of {cycle} of them, of which {cycles} {'was' if cycles == 1 else 'were'} "
            f"recorded{' (--cycle 1, cycle=1, takes each by itself)' if found else ''}.")


def _group(graph: ExecutionGraph, cycle: int) -> None:
    """Join each ``cycle`` steps to one, in place; steps at the start that fill no cycle are dropped."""
    steps = graph.steps
    marks = np.unique(steps.name)
    count = len(steps) // cycle
    first = np.arange(len(steps) - count * cycle, len(steps), cycle)
    last = first + cycle - 1
    found = StepTable.empty(count)
    found.start_ns = steps.start_ns[first]
    found.duration_ns = (steps.start_ns + steps.duration_ns)[last] - found.start_ns
    found.thread = steps.thread[first]
    calls = steps.python_calls[first[:, None] + np.arange(cycle)]
    found.python_calls = np.where((calls == NONE).any(axis=1), NONE, calls.sum(axis=1)).astype(np.int32)
    begin = len(graph.strings)
    graph.strings.extend(_name(graph.string(int(steps.name[one])), graph.string(int(steps.name[other])))
                         for one, other in zip(first.tolist(), last.tolist(), strict=True))
    found.name = np.arange(begin, begin + count, dtype=np.int32)
    graph.steps = found
    ops, kernels = graph.ops, graph.kernels
    for table in (ops, graph.launches, graph.gaps):
        table.step = step_of(found, table.start_ns)
    linked = kernels.launch >= 0
    if linked.any():
        kernels.step = np.where(linked, graph.launches.step[np.maximum(kernels.launch, 0)], NONE).astype(np.int32)
    # A former step mark now marks a part of a step: reports leave it out, as they do a step's mark.
    marked = np.flatnonzero((ops.kind == OpKind.ANNOTATION) & np.isin(ops.name, marks) & (ops.step >= 0))
    if len(marked):
        ops.writable("name")[marked] = found.name[ops.step[marked]]
    graph.meta.cycle = cycle
    graph.meta.unprofiled_step_ns = _sums(graph.meta.unprofiled_step_ns, cycle)


def _sums(times: list[int], cycle: int) -> list[int]:
    """Return the times of the last whole cycles; a cycle may begin at any step, as it has each of its steps once."""
    rest = len(times) % cycle
    whole: Int64 = np.array(times[rest:], np.int64).reshape(-1, cycle)
    return [int(ns) for ns in whole.sum(axis=1)]


def _name(first: str, last: str) -> str:
    """Return a cycle's name from its first and last step, such as ``ProfilerStep#4-7``."""
    one, other = _NUMBERED.fullmatch(first), _NUMBERED.fullmatch(last)
    if one is None or other is None or one[1] != other[1]:
        return f"{first} to {last}"
    return f"{first}-{other[2]}"


_BEGIN, _END = (re.compile(rf"(?:cuda|cu|hip)Stream{what}Capture") for what in ("Begin", "End"))


def while_capturing(calls: LaunchTable, strings: Sequence[str]) -> Bool:
    """Return a mask of the calls made while a CUDA graph was captured, on any thread, [calls]."""
    begins, ends = (np.flatnonzero(named(calls.name, strings, pattern.match)) for pattern in (_BEGIN, _END))
    if not len(begins) and not len(ends):
        return np.zeros(len(calls), np.bool_)
    begin = np.sort(calls.start_ns[begins])
    end = np.sort(calls.start_ns[ends])
    # A capture lasts to the next end call. If the window cuts it off, it lasts from the window's start or to its end.
    if len(end) and (not len(begin) or end[0] < begin[0]):
        begin = np.concatenate([[np.iinfo(np.int64).min], begin])
    after = np.searchsorted(end, begin)
    until = np.append(end, np.iinfo(np.int64).max)[after]
    latest = np.searchsorted(begin, calls.start_ns, side="right") - 1
    return (latest >= 0) & (calls.start_ns < until[np.maximum(latest, 0)])


def captured_launches(graph: ExecutionGraph) -> Bool:
    """Return a mask of the launches captured into a CUDA graph, which have no device work of their own, [calls]."""
    calls = graph.launches
    found = while_capturing(calls, graph.strings)
    if found.any():
        found &= np.isin(calls.kind, LAUNCHING)
        found[graph.kernels.launch[graph.kernels.launch >= 0]] = False
    return found


def captured_of_steps(graph: ExecutionGraph) -> Int64:
    """Return the number of launches in each step that were only captured into a CUDA graph, [steps]."""
    captured = captured_launches(graph)
    step = graph.launches.step[captured]
    return np.bincount(step[step >= 0], minlength=len(graph.steps)).astype(np.int64)


LOST_SHARE = 0.01
"""Largest share of a step's launches without device work that is no loss: steps of equal work differ by less."""


def lost_launches(graph: ExecutionGraph) -> Int64:
    """Return the number of launches in each step whose device work is missing but present in other steps, [steps].

    Launches without device work in every step are no loss: empty copies, failing launches. Launches that are captured
    into a CUDA graph start nothing. A step that lacks at most ``LOST_SHARE`` of its launches lost none.
    """
    calls, steps = graph.launches, len(graph.steps)
    launching = np.isin(calls.kind, LAUNCHING) & (calls.step >= 0)
    launching &= ~while_capturing(calls, graph.strings)
    missing = launching.copy()
    missing[graph.kernels.launch[graph.kernels.launch >= 0]] = False
    every, count = (np.bincount(calls.step[rows], minlength=steps).astype(np.int64) for rows in (launching, missing))
    count -= count.min(initial=int(count.max(initial=0)))
    return np.where(count > LOST_SHARE * every, count, 0)
