"""``Sizes``: predict another batch size or sequence length from one capture, by scaling and pricing its operations.

A program that loops over a changed dimension of its data is refused (``unrolled_size``): another length needs another
number of operations, which one recording does not have. A slice, ``split``, ``chunk``, ``unbind`` or an index takes a
part of a dimension, from one place to another. If parts of one length cover the dimension, the program loops over it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from graph_predictor.comm.recorded_calls import payload_ratios
from graph_predictor.prediction.operation_costs import every_operation, operation_costs
from graph_predictor.prediction.overheads import computing_operations
from graph_predictor.prediction.pricing import prices_of, resized_on_cpu, shrinking
from graph_predictor.prediction.result import most_activations, with_sizes
from graph_predictor.prediction.scenario import EditError, OtherSizes, Scenario, SizeRoute
from graph_predictor.sizes.data_rows import said_of, spread_of
from graph_predictor.sizes.layout_rules import whole_number
from graph_predictor.sizes.layouts import Dim, Shape
from graph_predictor.sizes.retrace import LEADING, MOST, no_size, parse_sets
from graph_predictor.sizes.scaled_shapes import ScaledShapes
from kernel_models.families.copy import memset, transfer
from kernel_models.op_call import Family, OpCall
from kernel_models.operation import Operation, calls_of, is_free
from kernel_models.spreads import HOST_AT_CAPTURED, RESIZED_WITH_DATA
from tracer.arrays import Bool, Float64
from tracer.graph import OpKind
from tracer.input_file import list_of
from tracer.views import Argument

if TYPE_CHECKING:
    from graph_predictor.sizes.drift import Drift

MOST_GROWTH = 1000
"""Largest ratio of new to recorded size, and inverse of the smallest (``prediction.pricing.MOST_RATIO``): beyond it a
recorded time does not help."""
MOST_UNDECIDED = 0.05
"""Largest share of the step's work on matrices that may be either parameters or samples."""
MOST_UNSIZED = 0.05
"""Largest share of the kernels' time with unknown sizes."""
MOST_KEPT = 50_000
"""Most operations of a job whose layouts are kept for the next prediction: some kilobytes each."""
LEAST_MOVED = 0.01
"""Least share of the step's work that a new size must change (see ``check_moved``), unless ..."""
LEAST_SIZED = 0.05
"""... at least this share of the computation has the size."""


Part = tuple[int, int]
"""A part of a dimension: its begin and its end."""
_FEW, _MOST_OF = 2, 4
"""A loop's parts may leave out some elements of a dimension (the last target, a class token): at most this number, and
at most one in four."""


@dataclass(frozen=True)
class Sizes:
    """An edit that gives dimensions another size.

    A dimension is identified by its old size, and a batch also by its first place. It gets the new size in all tensors
    except parameters. First dimensions that are products with it grow too (tokens = batch × sequence). The edit is
    refused if a parameter's equal size makes this ambiguous. Kernels get their measured time × model(new sizes) /
    model(old sizes). Host time, the number of operations and gradients' collectives stay. No other size is assumed to
    depend on the named ones.

    Attributes:
        changes: (name, old, new).
        because: a sentence on why this capture was scaled, for the notes.
        drift: drift of the machine since the first capture, if another capture is scaled.
        again: a sentence on how the program is traced again instead, for the notes and refusals.
    """

    changes: tuple[tuple[str, int, int], ...]
    because: str = ""
    drift: Drift | None = None
    again: str = ""

    @property
    def growth(self) -> float:
        """Return the factor on the product of all sizes."""
        return math.prod(new / old for _, old, new in self.changes)

    @property
    def either(self) -> float:
        """Return the log half width of work that may or may not follow the sizes: the interval holds both cases."""
        return math.fsum(abs(math.log(new / old)) for _, old, new in self.changes)

    @classmethod
    def parse(cls, texts: Sequence[str], known: Mapping[str, int] | None = None, because: str = "") -> Sizes:
        """Parse "batch=32:64", or "batch=64" where the old size is known. Raises ``EditError`` for anything else."""
        old, new = parse_sets(texts)
        old = {**(known or {}), **old}
        for name, size in new.items():
            if name not in old:
                raise EditError(f"{name}={size} names no old size: one capture does not say which of its dimensions is "
                                f"meant; write it like {name}=32:64 with the recorded one, or give the program (--code "
                                "SCRIPT.py:FUNCTION).")
            bad = next((one for one in (old[name], size) if not 1 <= one <= MOST), None)
            if bad is not None:
                raise no_size(name, bad)
        return cls(tuple((name, old[name], size) for name, size in new.items()), because)

    def describe(self) -> str:
        """Return the edit as a phrase."""
        said = ", ".join(f"{name} {old} → {new}" for name, old, new in self.changes)
        return f"{said} by scaling one capture" if said else "sizes as recorded"

    def apply(self, scenario: Scenario) -> Scenario:
        """Return the scenario at the new sizes (``Edit.apply``), scaled once for all predictions from a scenario."""
        if not self.changes:
            found = replace(scenario, sizes=OtherSizes(SizeRoute.AS_CAPTURED, ()))
            return found.with_note(self.because) if self.because else found
        return scenario.shared.once("sizes", (scenario, self), lambda: self._without_drift(scenario))

    def _without_drift(self, scenario: Scenario) -> Scenario:
        try:
            found = self._scaled(scenario)
            return found if self.drift is None else self.drift.taken_out(found)
        except EditError as error:
            raise EditError(f"{error} {self.again}".strip()) from error

    def _scaled(self, scenario: Scenario) -> Scenario:
        scenario = scenario.claim("the sizes", f"--set {self.describe()}")
        for name, old, new in self.changes:
            if max(new / old, old / new) > MOST_GROWTH:
                raise EditError(f"{name}={new} is more than {MOST_GROWTH:,} times away from the recorded {old}: one "
                                "capture says nothing of it; capture the step at a size nearer to it, or trace the "
                                "program again (--code).")
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
            if (size := unrolled_size(rank)) is not None:
                raise EditError(f"{self.describe()} may change how many operations there are: the step goes along a "
                                f"dimension of {size} piece by piece (a recurrent layer, a loop, micro-batches), and "
                                "one capture does not say whether there are then more pieces or longer ones; trace the "
                                "program again (--code).")
        _check_decided(scenario, scaled, self)
        if self.because or self.again:
            scenario = scenario.with_note(f"{self.because} {self.again}".strip())
        sizes = OtherSizes(SizeRoute.SCALED, self.changes, scaled[0].following)
        scenario = scenario.with_note(f"{scaled[0].said()}.", sizes=sizes)
        batch = next((one for one in self.changes if one[0].lower() in LEADING), None)
        samples, recorded = (1.0, None) if batch is None else (batch[2] / batch[1], batch[1])
        scenario = self._with_activations(scenario.with_samples(samples, recorded, self.growth))
        resized = (_resized_on_cpu if scenario.built.computes_on_host else _resized)(scenario, scaled, self)
        return replace(resized, items_per_rank=None if batch is None else float(batch[2]))

    def _with_activations(self, scenario: Scenario) -> Scenario:
        """Let memory grow with the sizes; add a note if the trace has no moment with activations."""
        changed = with_sizes(scenario, self.growth)
        graphs = scenario.built.graphs
        if self.growth > 1 and any(graph.meta.memory and not most_activations(graph) for graph in graphs):
            return changed.with_note(
                "Peak memory is that of a moment without activations (the optimizer's step): what they need at the new "
                "sizes is not known from it and may be more; trace the program again at the new sizes (--code, or "
                "SCRIPT.py:FUNCTION as the source) for the peak there.")
        return changed

    def check_moved(self, moved: float, of: float) -> None:
        """Raise ``EditError`` if the sizes hardly change the step: the prediction would then miss any work that follows
        them in another way.

        Args:
            moved: change of the step's work, as a share of it.
            of: share of the computation that has the sizes.
        """
        if moved >= LEAST_MOVED * min(abs(math.log(self.growth)), 1.0) or of >= LEAST_SIZED:
            return
        said = " and ".join(f"{name}={old}:{new}" for name, old, new in self.changes)
        raise EditError(f"{said} changes {moved:.2%} of the step's work, as hardly any operation has that size: what "
                        "follows it in another way (a loop, a loader, a size that is worked out from it) is not known "
                        "from one capture; trace the program again (--code SCRIPT.py:FUNCTION), or name the size that "
                        "the step's tensors have.")


def _check_decided(scenario: Scenario, scaled: list[ScaledShapes], sizes: Sizes) -> None:
    """Raise ``EditError`` if too much work is on matrices that may be parameters or samples."""
    if not scenario.built.computes_on_host:
        work = scenario.work
        rank, op, ns = work.rank, work.op, work.measured_ns
    else:
        slices = scenario.slices
        mine = scenario.cycle.working[slices.item] & ~slices.fetched
        rank, op, ns = slices.rank[mine].astype(np.int64), slices.op[mine].astype(np.int64), slices.ns[mine]
    undecided = 0
    for r, o, time in zip(rank.tolist(), op.tolist(), ns.tolist(), strict=True):
        if o >= 0:
            undecided += time * scaled[r].undecided(o)
    share = undecided / max(int(ns.sum()), 1)
    if share > MOST_UNDECIDED:
        raise EditError(f"{sizes.describe()} is ambiguous: parameters have as many rows as there are samples, and "
                        f"{share:.0%} of the work is on matrices that may be either; capture the step at another size, "
                        "or trace the program again (--code).")


def _resized(scenario: Scenario, scaled: list[ScaledShapes], sizes: Sizes) -> Scenario:
    """Return the scenario with new calls for all device work; work without known calls grows with its data."""
    work = scenario.work
    known: dict[tuple[Any, ...], tuple[tuple[OpCall, ...] | None, float]] = {}
    calls: list[tuple[OpCall, ...]] = []
    factor = np.ones(len(work.call_row))
    doubtful, chosen = np.zeros(len(work.call_row), np.bool_), np.zeros(len(work.call_row), np.bool_)
    rows = zip(work.call_row.tolist(), work.rank.tolist(), work.op.tolist(), strict=True)
    for i, (number, rank, op) in enumerate(rows):
        calls.append(work.calls[number])
        if op < 0:
            continue
        shapes = scaled[rank]
        ops = shapes.graph.ops
        key = (number, rank, *(int(column[op]) for column in (ops.name, ops.shapes, ops.dtypes, ops.strides,
                                                              ops.scalars)), shapes.layouts(op))
        if key not in known:
            known[key] = (_new_calls(calls[i], Operation.from_graph(shapes.graph, op), shapes.operation_of(op),
                                        shapes.growth(op)), float(shapes.growth(op)))
        new, growth = known[key]
        calls[i], factor[i] = (calls[i], growth) if new is None else (new, 1.0)
        doubtful[i], chosen[i] = shapes.undecided(op), shapes.selects(op)
    resized, after = work.regrouped(calls)
    kernel_factor, exchanged = _collectives(scenario, scaled)
    inside, of = work.kernel_group >= 0, work.kernel_group[work.kernel_group >= 0]
    kernel_factor[inside] *= factor[of]
    spread = np.where(kernel_factor != 1.0, RESIZED_WITH_DATA, 0.0)
    spread[inside] = np.hypot(spread[inside], np.where(doubtful[of], sizes.either, 0.0))
    spread[inside] = np.hypot(spread[inside], np.where(chosen[of], spread_of(scaled[0].selected), 0.0))
    share = work.measured_ns[factor != 1.0].sum() / max(int(work.measured_ns.sum()), 1)
    sized = (factor != 1.0) | np.isin(resized.call_row, list(after))
    if measured := int(work.measured_ns.sum()):  # not of a step that never ran, whose times are not known yet
        of_work = float(work.measured_ns[sized].sum()) / measured
        sizes.check_moved(of_work, of_work)
    kernels = replace(scenario.kernels.scaled(kernel_factor).widened(spread), calls=after)
    changed = replace(scenario, regrouped=resized, kernels=kernels)
    if doubtful.any():
        changed = changed.with_note(_doubt(work.measured_ns[doubtful].sum() / max(int(work.measured_ns.sum()), 1)))
    if chosen.any():
        changed = changed.with_note(said_of(scaled[0].selected, work.measured_ns[chosen].sum()
                                            / max(int(work.measured_ns.sum()), 1)))
    return changed.with_note(
        f"Sizes were scaled through the graph of one capture; host time stays. {share:.0%} of the kernels' time, of "
        "operations "
        "no formula gives back, was taken to grow with their data." + (
            f" {exchanged:,} collectives of samples change with them; those of gradients and parameters stay."
            if exchanged else ""))


def _new_calls(old: tuple[OpCall, ...], before: Operation, after: Operation, growth: Fraction) -> tuple[
        OpCall, ...] | None:
    """Return the calls of recorded work at its new sizes; ``None`` if they are unknown.

    A lone copy or memset has ``growth`` times the bytes. Other work has the calls of its operation. These are unknown
    if the operation's calls at the old sizes differ from the recorded ones.
    """
    if len(old) == 1 and old[0].family in (Family.TRANSFER, Family.MEMSET) and "unsized" not in old[0].flags:
        size = round(old[0].dims[0] * growth)
        return (memset(size) if old[0].family is Family.MEMSET else transfer(old[0].kind, size, old[0].flags),)
    tf32 = any(call.dtype == "tf32" for call in old)
    return calls_of(after, tf32) if calls_of(before, tf32) == old else None


def _resized_on_cpu(scenario: Scenario, scaled: list[ScaledShapes], sizes: Sizes) -> Scenario:
    """Scale a step on a CPU: self time of operations that compute × model(new sizes) / model(old sizes)."""
    scenario = scenario.claim("the host's computation", "--set")
    slices, working = scenario.slices, scenario.cycle.working[scenario.slices.item]
    was, factor = scenario.host_times(), np.ones(len(slices))
    known: Bool = np.zeros(len(slices), np.bool_)
    doubtful: Bool = np.zeros(len(slices), np.bool_)
    chosen: Bool = np.zeros(len(slices), np.bool_)
    for number, shapes in enumerate(scaled):
        growth, computes, undecided, selects = _computing(scenario, number, shapes)
        factor *= growth
        known, doubtful, chosen = known | computes, doubtful | undecided, chosen | selects
    changed = factor != 1.0
    if not changed.any():
        raise EditError("No operation that computes has one of the sizes: nothing would change.")
    ns = was * factor
    moved = abs(float((ns - was)[changed].sum())) / max(float(was[working].sum()), 1.0)
    share, doubt, of_rows = (float(slices.ns[rows].sum()) / max(float(slices.ns[working].sum()), 1.0)
                             for rows in (changed, doubtful, chosen))
    computing = float(slices.ns[known & working].sum())
    sizes.check_moved(moved, float(slices.ns[changed].sum()) / max(computing, 1.0))
    stays = float(ns[working & ~slices.fetched & ~known].sum())
    less = shrinking(stays, float(ns[working].sum()), sizes.growth)
    host = scenario.host.widened(resized_on_cpu(ns[changed], factor[changed], float(ns[working].sum())))
    host = host.widened(math.hypot(less, HOST_AT_CAPTURED))  # the capture and the step are two runs
    if of_rows:
        host = host.widened(of_rows * spread_of(scaled[0].selected))
        scenario = scenario.with_note(said_of(scaled[0].selected, of_rows))
    if doubt:
        scenario, host = scenario.with_note(_doubt(doubt)), host.widened(doubt * sizes.either)
    return replace(scenario, host=replace(host, ns=ns)).with_note(
        f"{share:.0%} of the step is operations that compute on the CPU and grow by their models; the rest of the "
        "host's time stays." + (" The interval holds a step in which that shrinks too." if less else ""))


def _computing(scenario: Scenario, number: int, shapes: ScaledShapes) -> tuple[Float64, Bool, Bool, Bool]:
    """Return four arrays over a rank's slices of host time: the growth of the computation, and whether the slice
    computes, is undecided, or works on rows that data select."""
    slices, graph = scenario.slices, shapes.graph
    costs = operation_costs(scenario.cycle, slices, number, every_operation(graph))
    ops, numbers = graph.ops, dict[tuple[Any, ...], int]()
    columns = np.stack([ops.name, ops.shapes, ops.dtypes, ops.strides, ops.scalars])[:, costs.op].T.tolist()
    kind = np.array([numbers.setdefault((*key, shapes.layouts(op)), len(numbers))
                     for op, key in zip(costs.op.tolist(), columns, strict=True)], np.int64)
    examples = costs.op[np.unique(kind, return_index=True)[1]].tolist()
    growth = _growth_of_work(scenario, shapes, examples)
    takes_time = np.array([not is_free(graph.string(int(ops.name[op]))) for op in examples], np.bool_)[kind]
    computes: Bool = computing_operations(graph)[costs.op] & takes_time
    undecided = computes & np.array([shapes.undecided(op) for op in examples], np.bool_)[kind]
    none = np.zeros(len(kind) + 1)
    selects = computes & np.array([shapes.selects(op) for op in examples], np.bool_)[kind]
    known, doubtful, chosen = (costs.by_slice(slices, rows.astype(np.float64), none, 0.0, 0.0) > 0
                               for rows in (computes, undecided, selects))
    return (costs.by_slice(slices, np.where(computes, growth[kind], 1.0), none + 1.0, 1.0, 1.0), known, doubtful,
            chosen)


def _growth_of_work(scenario: Scenario, shapes: ScaledShapes, ops: list[int]) -> Float64:
    """Return the ratio of operations' work at the new sizes to the recorded work, by the models.

    For collectives it is the growth of their payload; if the models know no time, that of all arguments' elements.
    """
    pairs = [(Operation.from_graph(shapes.graph, op), shapes.operation_of(op)) for op in ops]
    calls = [calls_of(one) for pair in pairs for one in pair]
    times = prices_of(calls, scenario.known_source(), scenario.devices.source_models).time_us.reshape(-1, 2)
    sized = np.array([bool(one) and not any("unsized" in call.flags for call in one) for one in calls], np.bool_)
    known: Bool = np.asarray((sized.reshape(times.shape) & (times > 0)).all(axis=1))
    table = shapes.graph.collectives
    row_of = {op: row for row, op in reversed(list(enumerate(table.op.tolist())))}
    found = np.where(known, times[:, 1], 1.0) / np.where(known, times[:, 0], 1.0)
    for number, op in enumerate(ops):
        if op in row_of:
            moved = max(int(table.elements_in[row_of[op]]), int(table.elements_out[row_of[op]]), 0)
            found[number] = (1.0 + moved * float(shapes.payload(row_of[op]))) / (1.0 + moved)
        elif not known[number]:
            before, after = (sum(_elements(argument.shape) for argument in one.arguments) for one in pairs[number])
            found[number] = (1.0 + after) / (1.0 + before)
    return found


def _elements(shape: Any) -> float:
    """Return the number of elements of a tensor, or of all tensors of a list."""
    if not shape:
        return 0.0
    return float(math.prod(shape)) if all(isinstance(one, int) for one in shape) else sum(map(_elements, shape))


def _doubt(share: float) -> str:
    return (f"{share:.1%} of the work is on tensors that may be parameters or samples, for all the trace says; their "
            "interval holds both.")


def payload_factors(scenario: Scenario, scaled: list[ScaledShapes]) -> Float64:
    """Return the growth of each kernel's collective payload, equal on all ranks that take part; 1 for other kernels."""
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
    """Return factors on the time of each kernel, and the number of collectives whose payload changes."""
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


def unrolled_size(scaled: ScaledShapes) -> int | None:
    """Return the old size of a changed dimension that the program loops over; ``None`` if there is none.

    It needs the arguments' values; a trace without them has no such dimension.
    """
    taken: dict[tuple[Shape, int, Dim], set[Part]] = {}
    experts = {(source[0], rows) for rows, source, *_ in scaled.selected if len(source) == 1}
    for row in _rows(scaled):
        operation = Operation.from_graph(scaled.graph, row)
        value = scaled.flow.values(row).get((0, -1))
        place, parts = _VIEWS[operation.name]
        dim = whole_number(operation.arguments, place)
        if value is None or dim is None or not -len(value.shape) <= dim < len(value.shape):
            continue
        at = dim % len(value.shape)
        size, follows = value.shape[at], value.layouts[0][at]
        if scaled.sizes.resized(size, follows) != size:
            taken.setdefault((value.shape, at, follows), set()).update(
                part for part in parts(operation.arguments, size) if (size, part[1] - part[0]) not in experts)
    for (shape, at, follows), found in taken.items():
        if _gone_along(shape[at], found, math.prod(old**power for old, power in zip(
                scaled.sizes.old, follows.powers, strict=True))):
            return shape[at]
    return None


def _rows(scaled: ScaledShapes) -> list[int]:
    """Return one row of each kind of operation that takes a part of a tensor (name, shapes and scalars)."""
    ops, strings = scaled.graph.ops, scaled.graph.strings
    named = np.array([*(text in _VIEWS for text in strings), False], np.bool_)[ops.name]
    rows = np.flatnonzero(named & (ops.kind == OpKind.OPERATION))
    if not len(rows):
        return []
    _, first = np.unique(np.stack([ops.name[rows], ops.shapes[rows], ops.scalars[rows]]), axis=1, return_index=True)
    found: list[int] = rows[first].tolist()
    return found


def _gone_along(size: int, parts: Iterable[Part], named: int) -> bool:
    """Return whether parts of one length cover a dimension, and their number would change with its size.

    Args:
        size: elements of the dimension.
        parts: the parts that operations take.
        named: product of the named sizes that the dimension follows. The number of parts with a multiple of that length
            is constant: the halves of two concatenated batches.
    """
    inside = sorted({part for part in parts if part[0] < part[1]})
    for length in {stop - start for start, stop in inside if 2 * (stop - start) <= size}:
        if length % named == 0 and size // length % named:
            continue
        left, reached = 0, 0
        for start, stop in inside:
            if stop - start <= length:
                left += max(start - reached, 0)
                reached = max(reached, stop)
        if left + size - reached <= min(_FEW, size // _MOST_OF):
            return True
    return False


def _all(arguments: tuple[Argument, ...], size: int) -> list[Part]:
    """Return the parts that ``aten::unbind`` takes of a dimension: each index alone, as (start, stop)."""
    del arguments
    return [(at, at + 1) for at in range(size)]


def _selected(arguments: tuple[Argument, ...], size: int) -> list[Part]:
    """Return the part of ``aten::select``: one index."""
    index = whole_number(arguments, 2)
    return [] if index is None else [(index % size, index % size + 1)]


def _sliced(arguments: tuple[Argument, ...], size: int) -> list[Part]:
    """Return the part of ``aten::slice``; none if its step is not 1."""
    start, stop, step = (whole_number(arguments, place) for place in (2, 3, 4))
    return [_within(start or 0, size if stop is None else stop, size)] if step in (None, 1) else []


def _narrowed(arguments: tuple[Argument, ...], size: int) -> list[Part]:
    """Return the part of ``aten::narrow``, from its start and length."""
    start, length = (whole_number(arguments, place) for place in (2, 3))
    if start is None or length is None:
        return []
    start = start % size
    return [_within(start, start + length, size)]


def _split(arguments: tuple[Argument, ...], size: int) -> list[Part]:
    """Return the parts of ``aten::split``, of one length or of a list of them."""
    length = whole_number(arguments, 1)
    if length is not None:
        return [_within(start, start + length, size) for start in range(0, size, length)] if length > 0 else []
    lengths = [one for one in list_of(arguments[1].value) if type(one) is int]
    ends = np.cumsum([0, *lengths]).tolist()
    return [_within(start, stop, size) for start, stop in pairwise(ends)]


def _chunked(arguments: tuple[Argument, ...], size: int) -> list[Part]:
    """Return the parts of ``aten::chunk``, at most as many as it is given."""
    count = whole_number(arguments, 1)
    if count is None or count < 1:
        return []
    length = -(-size // count)
    return [_within(start, start + length, size) for start in range(0, size, length)]


def _within(start: int, stop: int, size: int) -> Part:
    """Return a part within the dimension; ends may be negative (from the dimension's end) or too large."""
    first, last = (min(max(end + size if end < 0 else end, 0), size) for end in (start, stop))
    return first, last


_VIEWS: dict[str, tuple[int, Callable[[tuple[Argument, ...], int], list[Part]]]] = {
    "aten::unbind": (1, _all), "aten::select": (1, _selected), "aten::slice": (1, _sliced),
    "aten::narrow": (1, _narrowed), "aten::split": (2, _split), "aten::split_with_sizes": (2, _split),
    "aten::unsafe_split": (2, _split), "aten::unsafe_split_with_sizes": (2, _split), "aten::chunk": (2, _chunked),
    "aten::unsafe_chunk": (2, _chunked),
}
"""Operations that take parts of a tensor: place of the argument with the dimension, and a function for the parts."""
