"""Another batch size or sequence length, from one capture: the operations' sizes scaled consistently, then priced
again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from graph_predictor.comm.recorded_calls import payload_ratios
from graph_predictor.prediction.anchoring import resized_calls, resized_on_cpu, shrinking
from graph_predictor.prediction.memory import most_activations, with_sizes
from graph_predictor.prediction.scenario import EditError, Scenario
from graph_predictor.sizes.named_sizes import LEADING, MOST, no_size, parse_sets
from graph_predictor.sizes.scaled_shapes import ScaledShapes
from graph_predictor.sizes.size_kinds import ScaledRank
from graph_predictor.sizes.size_times import computing_kinds, host_factors, log_work
from graph_predictor.sizes.unrolled import unrolled_size
from kernel_models.op_call import OpCall
from kernel_models.operation import Operation
from kernel_models.spreads import RESIZED_WITH_DATA
from tracer.arrays import Bool, Float64, Int64

MOST_GROWTH = 1000
"""Times the recorded size, up or down: beyond it (``anchoring.MOST_RATIO``) one recorded time says nothing."""
MOST_UNDECIDED = 0.05
"""Share of the step's work on matrices that may be parameters or samples."""
MOST_UNSIZED = 0.05
"""Share of the kernels' time whose sizes may be missing."""
MOST_KEPT = 50_000
"""Operations of a job whose layouts are kept for the next prediction: some kilobytes each."""
SAME = 1e-9
"""A factor that is 1 but for rounding."""
LEAST_MOVED = 0.01
"""Share of the step's work by which a new size should change it at least; less is said."""


@dataclass(frozen=True)
class Sizes:
    """Dimensions of another size.

    A dimension is named by its old size: wherever a tensor that is no parameter has that size (a batch: as its first
    dimension), it gets the new one, and so do first dimensions that are products of it with those beside it (tokens =
    batch × sequence). Refused where a parameter has the same size somewhere, so that the two cannot be told apart.
    Kernels get their measured time × model(new sizes) / model(old sizes); host time, the number of operations and
    collectives of gradients stay. Assumes that no size but the named ones depends on them.

    Attributes:
        changes: (name, old, new).
        because: why no better way than one capture was taken, as a sentence without its end.
    """

    changes: tuple[tuple[str, int, int], ...]
    because: str = ""

    @classmethod
    def parse(cls, texts: Sequence[str], known: Mapping[str, int] | None = None, because: str = "") -> Sizes:
        """Parse "batch=32:64", or "batch=64" where the old size is known. Raises ``EditError`` for anything else."""
        old, new = parse_sets(texts)
        old = {**(known or {}), **old}
        for name, size in new.items():
            if name not in old:
                raise EditError(f"{name}={size} names no old size: one capture does not say which of its dimensions is "
                                f"meant; write it like {name}=32:64.")
            bad = next((one for one in (old[name], size) if not 1 <= one <= MOST), None)
            if bad is not None:
                raise no_size(name, bad)
        return cls(tuple((name, old[name], size) for name, size in new.items()), because)

    def describe(self) -> str:
        """One phrase."""
        said = ", ".join(f"{name} {old} → {new}" for name, old, new in self.changes)
        return f"{said} by scaling one capture" if said else "sizes as recorded"

    def operations_of(self, scenario: Scenario, rows: Sequence[int] | Int64, rank: int = 0) -> list[Operation]:
        """Operations at the new sizes, of rows of a rank's ``ops``. Raises ``EditError`` as ``apply``."""
        scaled = ScaledShapes(scenario.built.graphs[rank], self.changes)
        scaled.check()
        return [scaled.operation_of(int(row)) for row in rows]

    def apply(self, scenario: Scenario) -> Scenario:
        """See ``Edit``. Sizes are scaled once for all predictions from a scenario."""
        if not self.changes:
            return scenario
        return scenario.shared.once("sizes", (scenario, self.changes, self.because), lambda: self._scaled(scenario))

    def _scaled(self, scenario: Scenario) -> Scenario:
        scenario = scenario.claim("the sizes", f"--set {self.describe()}")
        for name, old, new in self.changes:
            if max(new / old, old / new) > MOST_GROWTH:
                raise EditError(f"{name}={new} is more than {MOST_GROWTH:,} times away from the recorded {old}: one "
                                "capture says nothing of it; capture the step at a size nearer to it.")
        scenario.known_source()
        work = scenario.work
        mine = np.unique(work.kernel_group[scenario.cycle.kernel & (work.kernel_group >= 0)])
        unsized = work.measured_ns[mine[~work.sized[mine]]].sum() / max(int(work.measured_ns[mine].sum()), 1)
        if unsized > MOST_UNSIZED:
            raise EditError(f"The trace has no sizes for {unsized:.0%} of its kernels' time, so that they cannot be "
                            "changed; record with record_shapes=True (foretrace capture does).")
        graphs = scenario.built.graphs
        scaled = scenario.shared.once(
            "scaled shapes", (scenario.built, self.changes),
            lambda: [ScaledShapes(graph, self.changes) for graph in graphs],
            keep=lambda found: sum(len(graph.ops) for graph in graphs) <= MOST_KEPT)
        for rank in scaled:
            rank.check()
        _check_rolled(scaled, self)
        _check_decided(scenario, scaled, self)
        if self.because:
            scenario = scenario.with_note(f"{self.because}; the sizes of one capture were scaled instead.")
        samples = next((new / old for name, old, new in self.changes if name.lower() in LEADING), 1.0)
        batch = next((old for name, old, _ in self.changes if name.lower() in LEADING), None)
        grown = math.prod(new / old for _, old, new in self.changes)
        scenario = scenario.with_samples(samples, batch, grown)
        if scenario.built.computes_on_host:
            return _resized_on_cpu(scenario, scaled, self.changes)
        return _resized(scenario, scaled, self.changes)


def _check_rolled(scaled: list[ScaledShapes], sizes: Sizes) -> None:
    """Raise ``EditError`` where another size is another number of operations."""
    for rank in scaled:
        size = unrolled_size(rank)
        if size is not None:
            raise EditError(f"{sizes.describe()} may change how many operations there are: the step goes along a "
                            f"dimension of {size} piece by piece (a recurrent layer, a loop, micro-batches), and one "
                            "capture does not say whether there are then more pieces or longer ones; trace the program "
                            "again (--code), or, if there are as many at every size, capture it at two (--also).")


def _check_decided(scenario: Scenario, scaled: list[ScaledShapes], sizes: Sizes) -> None:
    """Raise ``EditError`` where too much work is on matrices that may be parameters or samples."""
    if not scenario.built.computes_on_host:
        work = scenario.work
        rank, op, ns = work.rank, work.op, work.measured_ns
    else:
        pieces = scenario.slices
        mine = scenario.cycle.working[pieces.item] & ~pieces.fetched
        rank, op, ns = pieces.rank[mine], pieces.op[mine], pieces.ns[mine]
    undecided = 0
    for r, o, time in zip(rank.tolist(), op.tolist(), ns.tolist(), strict=True):
        if o >= 0:
            undecided += time * scaled[r].undecided(o)
    share = undecided / max(int(ns.sum()), 1)
    if share > MOST_UNDECIDED:
        raise EditError(f"{sizes.describe()} is ambiguous: parameters have as many rows as there are samples, and "
                        f"{share:.0%} of the work is on matrices that may be either; capture the step at another size, "
                        "or two sizes.")


def _resized(scenario: Scenario, scaled: list[ScaledShapes], changes: tuple[tuple[str, int, int], ...]) -> Scenario:
    """New calls for every piece of device work; where they cannot be made, it grows with its data."""
    work = scenario.work
    known: dict[tuple[Any, ...], tuple[tuple[OpCall, ...] | None, float]] = {}
    calls: list[tuple[OpCall, ...]] = []
    factor = np.ones(len(work.call_row))
    doubtful = np.zeros(len(work.call_row), np.bool_)
    for i, (number, rank,
            op) in enumerate(zip(work.call_row.tolist(), work.rank.tolist(), work.op.tolist(), strict=True)):
        calls.append(work.calls[number])
        if op < 0:
            continue
        shapes = scaled[rank]
        ops = shapes.graph.ops
        key = (number, rank, *(int(column[op]) for column in (ops.name, ops.shapes, ops.dtypes, ops.strides,
                                                              ops.scalars)), shapes.layouts(op))
        if key not in known:
            known[key] = (resized_calls(calls[i], Operation.from_graph(shapes.graph, op), shapes.operation_of(op),
                                        shapes.growth(op)), float(shapes.growth(op)))
        new, growth = known[key]
        calls[i], factor[i] = (calls[i], growth) if new is None else (new, 1.0)
        doubtful[i] = shapes.undecided(op)
    resized, after = work.regrouped(calls)
    kernel_factor = np.where(work.kernel_group >= 0, factor[np.maximum(work.kernel_group, 0)],
                             1.0) if len(factor) else np.ones(
        len(work.kernel_group))
    collectives, exchanged = _collectives(scenario, scaled)
    kernel_factor = kernel_factor * collectives
    spread = np.where(kernel_factor != 1.0, RESIZED_WITH_DATA, 0.0)
    if doubtful.any():
        mine = (work.kernel_group >= 0) & doubtful[np.maximum(work.kernel_group, 0)]
        spread = np.hypot(spread, np.where(mine, _either(changes), 0.0))
    batch = next((new for name, _, new in changes if name.lower() in LEADING), None)
    share = work.measured_ns[factor != 1.0].sum() / max(int(work.measured_ns.sum()), 1)
    sized = (factor != 1.0) | np.isin(resized.call_row, list(after))
    scenario = _moving(scenario, changes, float(work.measured_ns[sized].sum()) / max(int(work.measured_ns.sum()), 1))
    kernels = replace(scenario.kernels.scaled(kernel_factor).widened(spread), calls=after)
    changed = replace(_with_activations(scenario, changes), regrouped=resized,
                      kernels=kernels, items_per_rank=None if batch is None else float(batch))
    if doubtful.any():
        changed = changed.with_note(_doubt(work.measured_ns[doubtful].sum() / max(int(work.measured_ns.sum()), 1)))
    return changed.with_note(
        f"Sizes were scaled through the graph of one capture; host time stays. {share:.0%} of the kernels' time, of "
        "operations "
        "no formula gives back, was taken to grow with their data." + (
            f" {exchanged:,} collectives of samples change with them; those of gradients and parameters stay."
            if exchanged else ""))


def _resized_on_cpu(scenario: Scenario, scaled: list[ScaledShapes], changes: tuple[tuple[str, int, int], ...]) -> \
        Scenario:
    """On a CPU the operations are the kernels: the own time of those that compute × model(new sizes) / model(old)."""
    scenario = scenario.claim("the host's computation", "--set")
    pieces, working = scenario.slices, scenario.cycle.working[scenario.slices.item]
    was, factor = scenario.host_times(), np.ones(len(pieces))
    known: Bool = np.zeros(len(pieces), np.bool_)
    doubtful: Bool = np.zeros(len(pieces), np.bool_)
    for number, shapes in enumerate(scaled):
        rank = ScaledRank(scenario, number, shapes)
        factor *= host_factors(scenario, rank, log_work(scenario, rank), np.zeros(2))
        computes = computing_kinds(scenario, rank)
        undecided = computes & np.array([kind.undecided for kind in rank.kinds], np.bool_)
        none = np.zeros(len(rank.kind) + 1)
        known, doubtful = (so_far | (rank.costs[0].by_slice(pieces, kinds[rank.kind].astype(np.float64), none, 0.0, 0.0)
                                     > 0) for so_far, kinds in ((known, computes), (doubtful, undecided)))
    changed = np.abs(factor - 1.0) > SAME
    if not changed.any():
        raise EditError("No operation that computes has one of the sizes: nothing would change.")
    ns = was * factor
    moved = abs(float((ns - was)[changed].sum())) / max(float(was[working].sum()), 1.0)
    scenario = _moving(scenario, changes, moved)
    share, doubt = (float(pieces.ns[rows].sum()) / max(float(pieces.ns[working].sum()), 1.0)
                    for rows in (changed, doubtful))
    stays = float(ns[working & ~pieces.fetched & ~known].sum())
    less = shrinking(stays, float(ns[working].sum()), math.prod(new / old for _, old, new in changes))
    host = scenario.host.widened(resized_on_cpu(ns[changed], factor[changed], float(ns[working].sum())))
    host = host.widened(less)
    if doubt:
        scenario, host = scenario.with_note(_doubt(doubt)), host.widened(doubt * _either(changes))
    batch = next((new for name, _, new in changes if name.lower() in LEADING), None)
    changed_step = replace(_with_activations(scenario, changes), host=replace(host, ns=ns),
                           items_per_rank=None if batch is None else float(batch))
    return changed_step.with_note(
        f"{share:.0%} of the step is operations that compute on the CPU and grow by their models; the rest of the "
        "host's time stays." + (" The interval holds a step in which that shrinks too." if less else ""))


def _moving(scenario: Scenario, changes: tuple[tuple[str, int, int], ...], moved: float) -> Scenario:
    """The scenario with a warning where new sizes change next to nothing.

    Args:
        scenario: with the sizes changed.
        changes: (name, old, new).
        moved: share of the work that they change.
    """
    growth = math.prod(new / old for _, old, new in changes)
    if moved >= LEAST_MOVED * min(abs(math.log(growth)), 1.0):
        return scenario
    said = " and ".join(f"{name} {old} → {new}" for name, old, new in changes)
    return replace(scenario, warnings=(*scenario.warnings, (
        f"{said} changes {moved:.2%} of the step's work, as hardly any operation has that size: what follows it in "
        "another way (a loop, a loader, a size that is worked out from it) is not in this number; trace the program "
        "again (--code), or capture it at two sizes (--also).")))


def _either(changes: tuple[tuple[str, int, int], ...]) -> float:
    """Log half width of the interval of work that follows the sizes or does not: both are in it."""
    return math.fsum(abs(math.log(new / old)) for _, old, new in changes)


def _doubt(share: float) -> str:
    return (f"{share:.1%} of the work is on tensors that may be parameters or samples, for all the trace says; their "
            "interval holds both.")


def _with_activations(scenario: Scenario, changes: tuple[tuple[str, int, int], ...]) -> Scenario:
    """Memory that grows with the sizes; a note says where the trace knows no moment with activations."""
    factor = math.prod(new / old for _, old, new in changes)
    changed = with_sizes(scenario, factor)
    graphs = scenario.built.graphs
    if factor > 1 and any(graph.meta.memory and not most_activations(graph) for graph in graphs):
        return changed.with_note(
            "Peak memory is that of a moment without activations (the optimizer's step): what they need at the new "
            "sizes is not known from it and may be more; trace the program again at the new sizes (--code, or "
            "SCRIPT.py:FUNCTION as the source) for the peak there.")
    return changed


def payload_factors(scenario: Scenario, scaled: list[ScaledShapes]) -> Float64:
    """Return how much more every kernel's collective moves, the same on all ranks that take part; 1 for other
    kernels."""
    program, graphs = scenario.built.program, scenario.built.graphs
    factor = np.ones(len(program.kernel_item))
    for rank, (graph, shapes) in enumerate(zip(graphs, scaled, strict=True)):
        table = graph.collectives
        for row in np.flatnonzero(table.kernel >= 0).tolist():
            factor[int(program.kernel_ptr[rank]) + int(table.kernel[row])] = float(shapes.payload(row))
    group = program.kernel_group
    mine = group >= 0
    most = np.ones(len(program.group_size))
    np.maximum.at(most, group[mine], factor[mine])
    least = np.full(len(program.group_size), np.inf)
    np.minimum.at(least, group[mine], factor[mine])
    # One rank that is sure decides for all: lists of indices differ in length from rank to rank.
    factor[mine] = np.where(most > 1, most, least)[group[mine]]
    return factor


def _collectives(scenario: Scenario, scaled: list[ScaledShapes]) -> tuple[Float64, int]:
    """Factors on the time of collectives that move more (or less), and how many there are."""
    program = scenario.built.program
    moved = payload_factors(scenario, scaled)
    time = np.ones(len(moved))
    for rank, graph in enumerate(scenario.built.graphs):
        table = graph.collectives
        kernels = int(program.kernel_ptr[rank]) + table.kernel
        rows = np.flatnonzero((table.kernel >= 0) & (moved[np.maximum(kernels, 0)] != 1))
        if len(rows):
            own = kernels[rows]
            time[own] = payload_ratios(graph, rows.tolist(), moved[own].tolist(), scenario.known_source())
    return time, int((moved != 1).sum())
