"""Invariants of the simulator over random programs, against an independent slow solver of the same equations."""

from __future__ import annotations

from dataclasses import fields
from dataclasses import replace as with_fields

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from reference_simulator import Draft, _Item, _Kernel, programs, solve

from graph_predictor.simulation.changed_program import with_residuals
from graph_predictor.simulation.engine import SimulationStuck, critical_path, simulate, structure_of
from graph_predictor.simulation.host_slices import HostRows, WorkingOrder, lanes
from graph_predictor.simulation.program import NEVER, KernelCause, LaunchReference, Program, Simulated
from graph_predictor.simulation.tape import Rows, Tape
from graph_predictor.simulation.tape_loop import LAUNCH, QUEUED_LAUNCH
from tracer.arrays import Int64
from tracer.graph import ExecutionGraph, KernelKind, Meta

RANDOM = settings(max_examples=12, deadline=None, derandomize=True,
                  suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


def two_threads_share_a_queue() -> Program:
    """Thread 0 runs ahead of thread 1 although its second call was recorded after thread 1's.

        entry     0: long kernel of thread 0     1: thread 1's     2: thread 0's
        depth 1: an entry may only be submitted when all earlier ones have ended.
    """
    draft = Draft([0, 0], [0, 50], [1], queues=[[0, 1, 2]])
    draft.items = [_Item(0, 0, 1, 0), _Item(1, 0, 1, 1), _Item(0, 0, 1, 2)]
    draft.kernels = [_Kernel(0, 0, n, LaunchReference.CALL_END, 1, n - 1, 0, 10, int(NEVER)) for n in range(3)]
    return draft.program()


def four_launches(depth: int) -> Program:
    """Four launches of one thread, one behind the other, into a queue of one stream."""
    draft = Draft([0], [0], [depth], queues=[[0, 1, 2, 3]])
    draft.items = [_Item(0, 1, 2, n) for n in range(4)]
    draft.kernels = [_Kernel(0, 0, n, LaunchReference.CALL_END, 1, n - 1, 0, 10, int(NEVER)) for n in range(4)]
    return draft.program()


def test_a_launch_and_its_kernel_are_one_operation() -> None:
    """All but the first, which nothing is before, and the one that lets the first entry leave a full queue."""
    rows = np.arange(4)
    for depth, alone in ((1, [QUEUED_LAUNCH] * 2), (0, [LAUNCH] * 3)):
        program = four_launches(depth)
        tape = Tape.of(program, simulate(program).order, structure_of(program),
                       Rows(rows, rows, np.full(4, -1)), np.arange(-1, 3))
        codes = tape.operations[:, 0].tolist()
        assert codes[-len(alone):] == alone
        assert sum(code in (LAUNCH, QUEUED_LAUNCH) for code in codes) == len(alone)


@RANDOM
@given(programs())
@example(two_threads_share_a_queue())
def test_reference_solver_agrees(program: Program) -> None:
    """And all of it again."""
    expected = solve(program)
    assert expected.unknown == 0
    simulated = simulate(program)
    assert simulated.kernel_start.tolist() == expected.kernel_start
    assert simulated.kernel_end.tolist() == expected.kernel_end
    assert simulated.item_start.tolist() == expected.item_start
    assert simulated.item_end.tolist() == expected.item_end
    again = simulate(program.copy())
    for f in fields(Simulated):
        assert np.array_equal(getattr(simulated, f.name), getattr(again, f.name)), f.name


def order_of(program: Program, random: np.random.Generator) -> WorkingOrder:
    """The order of a program whose items and kernels take their times from rows in another order than theirs; a few
    ends are asked for, other items are taken in by those behind them, and some have a floor."""
    items, kernels = len(program.item_work), len(program.kernel_item)
    begins = np.flatnonzero(random.random(items) < 0.2)
    floor = np.full(items, -1)
    floor[begins] = random.permutation(len(begins))
    rows = Rows(random.permutation(items), random.permutation(kernels), floor)
    asked = np.union1d(np.flatnonzero(random.random(items) < 0.2), begins)
    return WorkingOrder(program, structure_of(program), rows, asked, np.flatnonzero(random.random(kernels) < 0.2))


def by_row(values: Int64, row: Int64) -> Int64:
    """Values of items or kernels, by the rows they have."""
    found = np.empty_like(values)
    found[row] = values
    return found


def other_times(program: Program, random: np.random.Generator) -> Program:
    """The same with other times; gaps that are negative remain so."""
    gap = random.integers(0, 4, len(program.kernel_gap))
    return with_fields(program, **{name: random.integers(0, 40, len(getattr(program, name))) for name in (
        "item_work", "item_cost", "kernel_duration", "kernel_latency", "after_lag", "thread_start", "edge_lag",
        "wait_lag", "item_return")}, kernel_gap=np.where(program.kernel_gap < 0, -gap, gap))


@RANDOM
@given(programs(), st.integers(0, 2**32 - 1))
@example(two_threads_share_a_queue(), 0)
@example(four_launches(1), 1)
def test_other_times_are_worked_out_along_the_order_of_one_simulation(program: Program, seed: int) -> None:
    random = np.random.default_rng(seed)
    order = order_of(program, random)
    for each in (program, other_times(program, random)):
        floor = random.integers(0, 400, int((order.rows.floor >= 0).sum()))
        external = each.item_external.copy()
        held = np.flatnonzero(order.rows.floor >= 0)
        external[held] = np.maximum(external[held], floor[order.rows.floor[held]])
        expected = simulate(with_fields(each, item_external=external))
        host = HostRows(*(by_row(ns, order.rows.item)[None] for ns in (each.item_work, each.item_cost)))
        found = order.simulate(order.lags(each), host, by_row(each.kernel_duration, order.rows.kernel), floor)
        for name in ("item_start", "item_end", "kernel_start", "kernel_end"):
            assert np.array_equal(getattr(found, name), getattr(expected, name)), name


@RANDOM
@given(programs())
@example(two_threads_share_a_queue())
def test_what_times_are_bound_by_is_found_along_the_order_too(program: Program) -> None:
    items, kernels = np.arange(len(program.item_work)), np.arange(len(program.kernel_item))
    order = WorkingOrder(program, structure_of(program), Rows(items, kernels, np.full(len(items), -1)), items, kernels)
    found = order.simulate(order.lags(program), HostRows(program.item_work[None], program.item_cost[None]),
                           program.kernel_duration, np.zeros(0, np.int64))
    expected = simulate(program)
    for name in ("item_start_cause", "item_start_source", "item_end_cause", "item_end_source"):
        assert np.array_equal(getattr(found, name), getattr(expected, name)), name
    # Two that hold a kernel back to the same nanosecond may be named either way round.
    for k in np.flatnonzero(found.kernel_source != expected.kernel_source).tolist():
        assert found.kernel_start[k] in inputs_of(program, expected, k)[int(found.kernel_cause[k])]
    for group, last in enumerate(found.group_last.tolist()):
        assert expected.kernel_start[last] == expected.kernel_start[expected.group_last[group]]


def inputs_of(p: Program, s: Simulated, k: int) -> dict[int, set[int]]:
    """The times before which a kernel cannot start, by what they come from."""
    found: dict[int, set[int]] = {int(cause): set() for cause in KernelCause}
    found[KernelCause.EXTERNAL].add(int(p.kernel_external[k]))
    n, before = int(p.kernel_item[k]), int(p.kernel_previous[k])
    if n >= 0:
        found[KernelCause.LAUNCH] |= set(range(int(s.item_start[n]), int(s.kernel_start[k]) + 1))
    if before >= 0:
        found[KernelCause.STREAM] |= {int(s.kernel_end[before] + p.kernel_gap[k]), int(s.kernel_start[before])}
    for e in range(int(p.edge_ptr[k]), int(p.edge_ptr[k + 1])):
        start, end = (int(x[p.edge_kernel[e]]) for x in (s.kernel_start, s.kernel_end))
        found[KernelCause.EDGE].add(start + int(p.edge_fraction[e] * (end - start)) + int(p.edge_lag[e]))
    return found


@RANDOM
@given(programs(), st.integers(0, 2**32 - 1), st.integers(1, 40))
def test_variants_are_worked_out_together_as_each_alone(program: Program, seed: int, count: int) -> None:
    random = np.random.default_rng(seed)
    order = order_of(program, random)
    other = other_times(program, random)
    items, kernels = len(program.item_work), len(program.kernel_item)
    host = HostRows(random.integers(0, 40, (3, items)), random.integers(0, 40, (3, items)))
    of = random.integers(0, 3, count)
    duration = random.integers(0, 40, (kernels, count))
    held = np.flatnonzero(order.rows.floor >= 0)
    floor = random.integers(0, 400, (len(held), count))
    ends = order.ends(order.lags(other), order.host_variants(host, of), lanes(duration), lanes(floor))
    for number in range(count):
        external = program.item_external.copy()
        external[held] = np.maximum(external[held], floor[order.rows.floor[held], number])
        expected = simulate(with_fields(
            other, item_work=host.work[of[number], order.rows.item],
            item_cost=host.cost[of[number], order.rows.item],
            kernel_duration=duration[order.rows.kernel, number], item_external=external))
        assert np.array_equal(ends[0][:, number], expected.item_end[order.items])
        assert np.array_equal(ends[1][:, number], expected.kernel_end[order.kernels])


@RANDOM
@given(programs(negative_gaps=False) | programs(staged=False), st.data())
def test_nothing_ends_earlier_when_something_grows(program: Program, data: st.DataObject) -> None:
    """Of streams whose kernels overlap too. Lengthen some durations; no end of anything may come earlier."""
    before = simulate(program)
    larger = program.copy()
    for name in ("kernel_duration", "item_work", "item_cost", "kernel_latency", "kernel_gap", "item_return", "wait_lag",
                 "after_lag", "edge_lag", "kernel_external", "item_external", "thread_start"):
        column = getattr(larger, name)
        if len(column) and data.draw(st.booleans(), label=name):
            row = data.draw(st.integers(0, len(column) - 1), label="row")
            by = data.draw(st.integers(1, 150), label="by")
            column[row] = by if column[row] == NEVER else column[row] + by
    after = simulate(larger)
    assert (after.kernel_end >= before.kernel_end).all()
    assert (after.item_end >= before.item_end).all()
    assert (after.item_start >= before.item_start).all()


def graphs_for(program: Program) -> list[ExecutionGraph]:
    """Graphs with the right number of kernels, which is all a critical path reads of them."""
    graphs = []
    for count in np.diff(program.kernel_ptr).tolist():
        tables = {name: table.empty() for name, table in ExecutionGraph.TABLES.items()}
        tables["kernels"] = ExecutionGraph.TABLES["kernels"].empty(count)
        tables["kernels"].kind[:] = KernelKind.COMPUTE
        graphs.append(ExecutionGraph(strings=[], threads=[], meta=Meta(), **tables))
    return graphs


@RANDOM
@given(programs(), st.data())
def test_critical_path_adds_up(program: Program, data: st.DataObject) -> None:
    simulated = simulate(program)
    sizes = np.diff(program.thread_ptr)
    if not len(program.item_kind):
        return
    thread = data.draw(st.sampled_from(np.nonzero(sizes)[0].tolist()))
    low, high = int(program.thread_ptr[thread]), int(program.thread_ptr[thread + 1])
    begin = data.draw(st.integers(low, high - 1))
    end = data.draw(st.integers(begin, high - 1))
    path = critical_path(program, simulated, graphs_for(program), begin, end)
    expected = int(simulated.item_end[end] - simulated.item_end[begin])
    assert path.total_ns == expected
    assert sum(path.by_bound().values()) == expected
    if expected:
        assert (path.start_ns[1:] == path.end_ns[:-1]).all() and (path.end_ns > path.start_ns).all()
        assert (int(path.start_ns[0]), int(path.end_ns[-1])) == (simulated.item_end[begin], simulated.item_end[end])


@RANDOM
@given(programs(), st.integers(0, 2**32 - 1))
def test_residuals_play_the_recording_back(program: Program, seed: int) -> None:
    """Record a program with other durations and lags; with residuals the first program gives those times again."""
    recorded, random = program.copy(), np.random.default_rng(seed)
    for name in ("kernel_duration", "item_cost", "kernel_latency", "kernel_gap", "edge_lag", "wait_lag"):
        column = getattr(recorded, name)
        column += random.integers(0, 21, len(column))
    times = simulate(recorded)
    played = with_residuals(with_fields(
        program, kernel_duration=recorded.kernel_duration, recorded_item_start=times.item_start,
        recorded_item_end=times.item_end, recorded_kernel_start=times.kernel_start,
        recorded_kernel_end=times.kernel_end))
    again = simulate(played)
    assert again.kernel_start.tolist() == times.kernel_start.tolist()
    assert again.kernel_end.tolist() == times.kernel_end.tolist()
    assert again.item_end.tolist() == times.item_end.tolist()


def test_cycle_is_an_error() -> None:
    """Two threads that hand over to each other."""
    threads = Draft([0, 0], [0, 0], [0], queues=[[]])
    threads.items = [_Item(0, 0, 1, -1, after=[(1, 0)]), _Item(1, 0, 1, -1, after=[(0, 0)])]
    with pytest.raises(SimulationStuck, match="cycle"):
        simulate(threads.program())


def test_empty_and_lopsided_programs() -> None:
    """No events at all; threads without items; only kernels; only items."""
    empty = Draft([0, 0], [0, 0], [0], queues=[[]])
    assert len(simulate(empty.program()).item_end) == 0
    only_kernels = Draft([], [], [1022], queues=[[0, 1]])
    only_kernels.kernels = [_Kernel(0, 0, -1, LaunchReference.CALL_END, 0, n - 1, 1, 10, 5) for n in range(2)]
    assert simulate(only_kernels.program()).kernel_end.tolist() == [15, 26]
    only_items = Draft([0, 0, 0], [0, 7, 9], [1022], queues=[[]])
    only_items.items = [_Item(1, 2, 3, 0)]
    simulated = simulate(only_items.program())
    assert (simulated.item_start.tolist(), simulated.item_end.tolist()) == ([9], [12])


def test_times_far_from_zero() -> None:
    """Absolute epoch nanoseconds and days of duration fit; negative times (a rank moved earlier) are times too."""
    for origin in (1_800_000_000_000_000_000, -10_000):
        draft = Draft([0], [origin], [1], queues=[[0, 1]])
        draft.items = [_Item(0, 1, 2, 0), _Item(0, 1, 2, 1)]
        draft.kernels = [_Kernel(0, 0, n, LaunchReference.CALL_END, 3, n - 1, 1, 10**15, int(NEVER)) for n in range(2)]
        simulated = simulate(draft.program())
        assert (simulated.kernel_start - origin).tolist() == [6, 6 + 10**15 + 3]
        assert (simulated.item_end - origin).tolist() == [3, 6 + 10**15]
