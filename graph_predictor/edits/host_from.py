"""The host of another capture: its time in and between operations, and its launch latencies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from graph_predictor.prediction.repeat import Cycle, choose_steps
from graph_predictor.prediction.scenario import EditError, Origin, Scenario
from graph_predictor.prediction.unprofiled import unprofiled
from graph_predictor.recorded.typical_steps import similar_steps
from graph_predictor.simulation.build import build_program
from graph_predictor.simulation.host_pieces import HostPieces, host_pieces, top_operations
from kernel_models.spreads import OTHER_HOST
from tracer.alignment import align
from tracer.arrays import Float64, Int64
from tracer.graph import NONE, ExecutionGraph


@dataclass(frozen=True)
class HostFrom:
    """The host of another capture of the same or a similar program.

    Its top-level operations are matched with those of this one, thread by thread, in program order. A matched operation
    and the gap before it take the other's mean time; an operation without a partner takes the mean of the other's
    operations of its name, and what has neither the ratio of all matched time. Calls within an operation scale with it.
    Launch latencies are the other's too. Assumes that the other trace ran the same framework path: its host time, not
    its waiting, is taken.

    A step that was traced again at other sizes is changed as the recorded one is whose times it has taken.

    Attributes:
        graphs: of the other capture, a rank each; ranks are paired by position, the first stands for those it lacks.
        name: how to call it.
    """

    graphs: Sequence[ExecutionGraph]
    name: str = "another trace"

    def describe(self) -> str:
        """One phrase."""
        return f"host of {self.name}"

    def apply(self, scenario: Scenario) -> Scenario:
        """See ``Edit``."""
        scenario = scenario.claim("the host", f"--host-from {self.name}")
        if scenario.origin is not None:
            return self._retraced(scenario, scenario.origin)
        other = build_program(list(self.graphs))
        steps = similar_steps(other.graphs)
        if not scenario.profiled:
            other = unprofiled(other, steps=steps)
        cycle = choose_steps(other, steps)
        if cycle is None:
            raise EditError(f"{self.name} has no steps, so that its host time cannot be told apart by step; give a "
                            "trace "
                            "with steps.")
        pieces = host_pieces(other)
        # The ratio of the hosts is of recorded times, and applies to whatever other edits made of them.
        ns = scenario.host_times()
        matched = total = 0.0
        for rank in range(len(scenario.built.graphs)):
            other_rank = min(rank, len(other.graphs) - 1)
            done, all_ = _rank(scenario, rank, pieces, cycle, other_rank, ns)
            matched, total = matched + done, total + all_
        if not matched:
            raise EditError(f"No operation of the step is in {self.name}: its host cannot stand in; give a trace of "
                            "the same "
                            "model.")
        share = matched / total if total else 0.0
        host = scenario.host.widened((1.0 - share) * OTHER_HOST)
        changed = replace(scenario, host=replace(host, ns=ns, constants=[report.constants for report in other.reports]))
        if other.profiled and not scenario.profiled:
            changed = replace(changed, warnings=(*changed.warnings, (
                f"{self.name} does not say what its step takes without the profiler: its host times are those under "
                "it.")))
        return changed.with_note(f"Host time is that of {self.name}: {share:.0%} of it by the same operation in the "
                                 "same "
                                 "place, the rest by operations of the same name or the mean ratio.")


    def _retraced(self, scenario: Scenario, origin: Origin) -> Scenario:
        """The same of a step traced again: each operation changes as the recorded one that stands for it."""
        recorded = self.apply(origin.scenario)
        there = recorded.host
        assert there.ns is not None and there.constants is not None
        ns = scenario.host_times() * origin.host_factors(scenario.pieces, there.ns)
        constants = [there.constants[min(rank, len(there.constants) - 1)] for rank in origin.ranks]
        return replace(
            scenario, host=replace(scenario.host.widened(there.spread), ns=ns, constants=constants),
            warnings=tuple(dict.fromkeys((*scenario.warnings, *recorded.warnings))),
            notes=tuple(dict.fromkeys((*scenario.notes, *recorded.notes))))


@dataclass(frozen=True, slots=True)
class _Slots:
    """Host time of one thread's top-level operations in a cycle: in each, and in the gap before it; ns."""

    op: Int64
    token: Int64
    inside: Float64
    before: Float64


def _rank(scenario: Scenario, rank: int, pieces: HostPieces, cycle: Cycle, other_rank: int, ns: Float64) -> tuple[
        float, float]:
    """Put the other's times into ``ns`` for one rank; (time matched in place, all time), of the source, ns."""
    names: dict[str, int] = {}
    mine_top, theirs_top = _owners(scenario.pieces, scenario.cycle, rank), _owners(pieces, cycle, other_rank)
    mine = _threads(scenario.built.graphs[rank], scenario.pieces, mine_top, rank, scenario.cycle, names)
    theirs = _threads(cycle.built.graphs[other_rank], pieces, theirs_top, other_rank, cycle, names)
    by_name = _means(theirs)
    factor_in: dict[int, float] = {}
    factor_gap: dict[int, float] = {}
    in_place = 0.0
    taken_mine = taken_theirs = 0.0
    for number, slots in enumerate(mine):
        partner: npt.NDArray[Any] = np.full(len(slots.op), NONE, np.int64)
        if number < len(theirs) and len(slots.op) and len(theirs[number].op):
            partner = _partners(slots, theirs[number])
        for i, p in enumerate(partner.tolist()):
            name = int(slots.token[i])
            if p >= 0:
                inside, before = float(theirs[number].inside[p]), float(theirs[number].before[p])
                in_place += float(slots.inside[i] + slots.before[i])
            elif name in by_name:
                inside, before = by_name[name]
            else:
                continue
            taken_mine += float(slots.inside[i] + slots.before[i])
            taken_theirs += inside + before
            # What has no time here to scale goes to the other part of the same slot.
            if slots.inside[i] <= 0:
                inside, before = 0.0, inside + before
            elif slots.before[i] <= 0:
                inside, before = inside + before, 0.0
            factor_in[int(slots.op[i])] = inside / slots.inside[i] if slots.inside[i] > 0 else 0.0
            factor_gap[int(slots.op[i])] = before / slots.before[i] if slots.before[i] > 0 else 0.0
    overall = taken_theirs / taken_mine if taken_mine else 1.0
    tails = [_tail(*of) for of in ((scenario.pieces, mine_top, scenario.cycle, rank),
                                   (pieces, theirs_top, cycle, other_rank))]
    factor_gap[NONE] = tails[1] / tails[0] if tails[0] > 0 else overall
    in_place += tails[0] * scenario.cycle.steps if tails[1] > 0 else 0.0
    rows = np.flatnonzero((scenario.pieces.rank == rank) & scenario.cycle.working[scenario.pieces.item])
    top = mine_top[rows]
    gap = (scenario.pieces.op[rows] < 0) | (top < 0)
    factors = np.array([(factor_gap if g else factor_in).get(int(t), overall) for t, g in zip(top, gap, strict=True)])
    ns[rows] *= factors
    return in_place, float(scenario.pieces.ns[rows].sum())


def _tail(pieces: HostPieces, owner: Int64, cycle: Cycle, rank: int) -> float:
    """Host time after the last operation of a step, ns a step."""
    rows = (pieces.rank == rank) & cycle.working[pieces.item] & (owner < 0)
    return float(pieces.ns[rows].sum()) / cycle.steps


def _owners(pieces: HostPieces, cycle: Cycle, rank: int) -> Int64:
    """Top-level operation of every piece of a rank; of a gap the one that follows (-1: none)."""
    graph = cycle.built.graphs[rank]
    is_top = np.zeros(len(graph.ops) + 1, np.bool_)
    is_top[top_operations(graph)] = True
    above: npt.NDArray[Any] = np.append(graph.ops.parent.astype(np.int64), NONE)
    mine = pieces.rank == rank
    found: npt.NDArray[Any] = np.where(mine, np.where(pieces.op < 0, pieces.following, pieces.op), NONE)
    while True:
        inner = (found >= 0) & ~is_top[found]
        if not inner.any():
            return found
        found[inner] = above[found[inner]]


def _threads(graph: ExecutionGraph, pieces: HostPieces, owner: Int64, rank: int, cycle: Cycle,
             names: dict[str, int]) -> list[_Slots]:
    """Slots of every thread with operations in the cycle, threads in order of their first operation."""
    rows = np.flatnonzero((pieces.rank == rank) & cycle.working[pieces.item] & (owner >= 0))
    gap = pieces.op[rows] < 0
    size = len(graph.ops)
    inside = np.bincount(owner[rows[~gap]], weights=pieces.ns[rows[~gap]], minlength=size)
    before = np.bincount(owner[rows[gap]], weights=pieces.ns[rows[gap]], minlength=size)
    ops = np.unique(owner[rows])
    found = []
    thread = graph.ops.thread[ops]
    order = sorted(set(thread.tolist()), key=lambda t: int(graph.ops.start_ns[ops[thread == t]].min()))
    for t in order:
        mine = ops[thread == t]
        mine = mine[np.argsort(graph.ops.start_ns[mine], kind="stable")]
        token = np.array([names.setdefault(graph.string(int(code)), len(names)) for code in graph.ops.name[mine]])
        found.append(_Slots(mine, token.astype(np.int64), inside[mine], before[mine]))
    return found


def _partners(mine: _Slots, theirs: _Slots) -> Int64:
    """The other's slot for each of ours. Where one cycle has more steps, each part is matched on its own."""
    none = np.full(len(mine.op), NONE, np.int64)
    if np.array_equal(mine.token, theirs.token):
        return np.arange(len(mine.op))
    partner = align(mine.token, theirs.token, none, np.full(len(theirs.op), NONE, np.int64))
    left = np.flatnonzero(partner < 0)
    # A second step finds its partners from the start again.
    for _ in range(8):
        if len(left) < 0.05 * len(partner):
            break
        again = align(mine.token[left], theirs.token, none[left], np.full(len(theirs.op), NONE, np.int64))
        if not (again >= 0).any():
            break
        partner[left] = again
        left = left[again < 0]
    return partner


def _means(threads: list[_Slots]) -> dict[int, tuple[float, float]]:
    """Mean time in, and before, the operations of each name."""
    token = np.concatenate([slots.token for slots in threads] or [np.zeros(0, np.int64)])
    inside, before = (np.concatenate([getattr(slots, name) for slots in threads] or [np.zeros(0)])
                      for name in ("inside", "before"))
    count = np.bincount(token)
    a, b = np.bincount(token, weights=inside), np.bincount(token, weights=before)
    return {i: (float(a[i] / count[i]), float(b[i] / count[i])) for i in np.flatnonzero(count).tolist()}
