"""Another batch size or sequence length, from one capture: the operations' sizes scaled consistently, then priced
again."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np

from graph_predictor.overheads import computing_operations
from graph_predictor.prediction.scenario import EditError, Scenario
from kernel_models.families import registry
from kernel_models.families.copy import memset, transfer
from kernel_models.op_call import Family, OpCall
from kernel_models.operation import Operation, calls_of
from kernel_models.pricing import price
from tracer.graph import ExecutionGraph, Phase
from tracer.views import Argument

Shape = tuple[int, ...]

LEADING = frozenset({"batch", "b", "bs", "batch_size"})
"""Names of the dimension that comes first in activations. Any other name may stand anywhere."""
PARAMETERS = frozenset({"weight", "bias", "running_mean", "running_var", "weights"})
"""Arguments that hold parameters, as the operations' schemas call them."""
MOST_UNSIZED = 0.05
"""Share of the kernels' time whose sizes may be missing."""
LINEAR_SPREAD = 0.2
"""Log half width of the 80% interval of kernels taken to scale with their data: from a fixed cost to a cache's edge."""
CPU_SPREAD = 0.2
"""The same of a CPU's operations, whose caches and threads the formulas know little of."""


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
    """

    changes: tuple[tuple[str, int, int], ...]

    @classmethod
    def parse(cls, texts: list[str]) -> Sizes:
        """From "batch=32:64". Raises ``EditError`` for anything else."""
        found = []
        for text in texts:
            match = re.fullmatch(r"(\w+)=(\d+):(\d+)", text.strip())
            if match is None or int(match[2]) < 1 or int(match[3]) < 1:
                raise EditError(f"{text!r} names no old and new size: one capture does not say which of its "
                                "dimensions is "
                                "meant; write it like batch=32:64.")
            found.append((match[1], int(match[2]), int(match[3])))
        names = [name for name, _, _ in found]
        if len(set(names)) < len(names):
            raise EditError(f"{max(names, key=names.count)} is set twice; give one old and one new size.")
        return cls(tuple(found))

    def describe(self) -> str:
        """One phrase."""
        return ", ".join(f"{name} {old} → {new}" for name, old, new in self.changes)

    def apply(self, scenario: Scenario) -> Scenario:
        """See ``Edit``."""
        if not self.changes:
            return scenario
        scenario = scenario.claim("the sizes", f"--set {self.describe()}")
        scenario.known_source()
        work = scenario.work
        mine = np.unique(work.piece[scenario.cycle.kernel & (work.piece >= 0)])
        unsized = work.measured_ns[mine[~work.sized[mine]]].sum() / max(int(work.measured_ns[mine].sum()), 1)
        if unsized > MOST_UNSIZED:
            raise EditError(f"The trace has no sizes for {unsized:.0%} of its kernels' time, so that they cannot be "
                            "changed; record with record_shapes=True (foretrace capture does).")
        scaled = [_Scaled(graph, self.changes) for graph in scenario.built.graphs]
        for rank in scaled:
            rank.check()
        if not len(scenario.built.program.kernel_item):
            return _resized_on_cpu(scenario, scaled, self.changes)
        return _resized(scenario, scaled, self.changes)


class _Scaled:
    """One rank's shapes before and after."""

    def __init__(self, graph: ExecutionGraph, changes: tuple[tuple[str, int, int], ...]) -> None:
        self.graph, self.changes = graph, changes
        self.parameters = _parameter_shapes(graph)
        self.parameter_sizes = {size for shape in self.parameters for size in shape}
        self.shapes = {shape for text in _texts(graph) for shape in _tensors(text)} - self.parameters
        self.found = {name: False for name, _, _ in changes}
        self.products: dict[int, Fraction] = {}
        for name, old, new in changes:
            for shape in self.shapes:
                if shape and shape[0] == old and name.lower() in LEADING:
                    total = old
                    for size in shape[1:]:
                        total *= size
                        self.products[total] = Fraction(new, old)
        for _, old, _ in changes:
            self.products.pop(old, None)
        self.products = {size: factor for size, factor in self.products.items() if size not in self.parameter_sizes}

    def check(self) -> None:
        """Raise ``EditError`` if a dimension is unknown or ambiguous."""
        for name, old, new in self.changes:
            leading = name.lower() in LEADING
            holders = [s for s in self.shapes if (s[:1] == (old,) if leading else old in s)]
            if not holders:
                where = "as its first dimension " if leading else ""
                sizes = sorted({shape[0] for shape in self.shapes if shape})[:8]
                raise EditError(f"No tensor of the step has {old} {where}(there are {', '.join(map(str, sizes))}, …): "
                                f"{name}={old}:{new} changes nothing; name the size that was recorded.")
            clash: list[Shape] = [shape for shape in self.parameters if old in shape]
            if clash and old > 1:
                shown = "×".join(map(str, sorted(clash, key=_dimensions)[-1]))
                raise EditError(f"{name}={old}:{new} is ambiguous: a parameter of {shown} has the size {old} too, so "
                                "that "
                                "they cannot be told apart; capture the step at another size, or two sizes.")

    def shape(self, shape: Shape) -> Shape:
        """A tensor's new shape."""
        if shape in self.parameters or not shape:
            return shape
        new = list(shape)
        for name, old, size in self.changes:
            for at in range(1 if name.lower() in LEADING else len(shape)):
                if shape[at] == old:
                    new[at] = size
        if new[0] == shape[0] and shape[0] in self.products:
            scaled = shape[0] * self.products[shape[0]]
            if scaled.denominator == 1:
                new[0] = int(scaled)
        return tuple(new)

    def argument(self, argument: Argument) -> Argument:
        """An argument with new sizes and strides; lists of numbers that are a tensor's sizes change too."""
        shape = argument.shape
        if shape is None:
            try:
                value = msgspec.json.decode(argument.value) if argument.value.startswith("[") else None
            except msgspec.DecodeError:
                value = None
            if isinstance(value, list) and all(isinstance(v, int) for v in value) and tuple(value) in self.shapes:
                return argument.__class__(argument.dtype, None, argument.stride, str(list(self.shape(tuple(value)))))
            return argument
        if any(isinstance(part, tuple) for part in shape):
            shapes = tuple(self.shape(part) for part in shape)
            strides = argument.stride
            if strides is not None:
                strides = tuple(_strides(a, b, c) for a, b, c in zip(shape, shapes, strides, strict=False))
            return argument.__class__(argument.dtype, shapes, strides, argument.value)
        new = self.shape(shape)
        stride = None if argument.stride is None else _strides(shape, new, argument.stride)
        return argument.__class__(argument.dtype, new, stride, argument.value)

    def growth(self, op: int) -> Fraction:
        """How much larger the largest tensor among an operation's arguments becomes."""
        shapes: list[Shape] = list(_tensors(self.graph.string(int(self.graph.ops.shapes[op]))))
        largest: Shape = max(shapes, key=_elements) if shapes else ()
        after = self.shape(largest)
        return Fraction(math.prod(after), max(math.prod(largest), 1))


def _resized(scenario: Scenario, scaled: list[_Scaled], changes: tuple[tuple[str, int, int], ...]) -> Scenario:
    """New calls for every piece in the cycle; pieces are grouped again by old and new calls."""
    work = scenario.work
    known: dict[tuple[Any, ...], tuple[tuple[OpCall, ...], Fraction]] = {}
    numbers: dict[tuple[int, tuple[OpCall, ...]], int] = {}
    calls: list[tuple[OpCall, ...]] = []
    after: dict[int, tuple[OpCall, ...]] = {}
    group = np.empty(len(work.group), np.int64)
    factor = np.ones(len(work.group))
    for i, (number, rank, op) in enumerate(zip(work.group.tolist(), work.rank.tolist(), work.op.tolist(), strict=True)):
        ops = scaled[rank].graph.ops
        columns = [ops.name, ops.shapes, ops.dtypes, ops.strides, ops.scalars] if op >= 0 else []
        key = (number, rank, *(int(column[op]) for column in columns))
        if key not in known:
            known[key] = _new_calls(scaled[rank], op, work.calls[number])
        new, grown = known[key]
        pair = (number, new)
        if pair not in numbers:
            numbers[pair] = len(calls)
            calls.append(work.calls[number])
            if new != work.calls[number]:
                after[numbers[pair]] = new
        group[i] = numbers[pair]
        factor[i] = float(grown)
    kernel_factor = np.where(work.piece >= 0, factor[np.maximum(work.piece, 0)], 1.0)
    spread = np.where(kernel_factor != 1.0, LINEAR_SPREAD, 0.0)
    if scenario.kernel_factor is not None:
        kernel_factor = kernel_factor * scenario.kernel_factor
    batch = next((new for name, _, new in changes if name.lower() in LEADING), None)
    share = work.measured_ns[factor != 1.0].sum() / max(int(work.measured_ns.sum()), 1)
    changed = replace(scenario, work=replace(work, calls=calls, group=group), calls=after,
                      kernel_factor=kernel_factor, kernel_spread=spread,
                      items_per_rank=None if batch is None else float(batch))
    return changed.with_note(
        f"Sizes were scaled through the graph of one capture; host time stays. {share:.0%} of the kernels' time, of "
        "operations "
        "no formula gives back, was taken to grow with their data.")


def _resized_on_cpu(scenario: Scenario, scaled: list[_Scaled], changes: tuple[tuple[str, int, int], ...]) -> Scenario:
    """On a CPU the operations are the kernels: the own time of those that compute × model(new sizes) / model(old)."""
    scenario = scenario.claim("the host's computation", "--set")
    spec, pieces = scenario.known_source(), scenario.pieces
    ns = pieces.ns.astype(np.float64) if scenario.host_ns is None else scenario.host_ns.copy()
    before: list[OpCall] = []
    after: list[OpCall] = []
    known: dict[tuple[int, ...], tuple[int, int, int, int] | None] = {}
    rows: list[int] = []
    spans: list[tuple[int, int, int, int]] = []
    computes = [computing_operations(rank.graph) for rank in scaled]
    for i in np.flatnonzero((pieces.op >= 0) & scenario.cycle.working[pieces.item]).tolist():
        rank, op = int(pieces.rank[i]), int(pieces.op[i])
        if not computes[rank][op]:
            continue
        ops = scaled[rank].graph.ops
        key = (rank, *(int(c[op]) for c in (ops.name, ops.shapes, ops.dtypes, ops.strides, ops.scalars)))
        if key not in known:
            operation = Operation.from_graph(scaled[rank].graph, op)
            old = calls_of(operation)
            new = calls_of(replace(operation, arguments=tuple(scaled[rank].argument(a) for a in operation.arguments)))
            sized = old and new and not any("unsized" in call.flags for call in (*old, *new)) and old != new
            known[key] = (len(before), len(before) + len(old), len(after), len(after) + len(new)) if sized else None
            before += old if sized else ()
            after += new if sized else ()
        found = known[key]
        if found is not None:
            rows.append(i)
            spans.append(found)
    if not rows:
        raise EditError("No operation that computes has one of the sizes: nothing would change.")
    was, will = (price(calls, spec, scenario.source_models).times_us for calls in (before, after))
    ratio = np.array([will[c:d].sum() / was[a:b].sum() for a, b, c, d in spans])
    ns[rows] *= ratio
    batch = next((new for name, _, new in changes if name.lower() in LEADING), None)
    share = float(pieces.ns[rows].sum()) / max(float(pieces.ns[scenario.cycle.working[pieces.item]].sum()), 1.0)
    changed = replace(scenario, host_ns=ns, host_spread=share * CPU_SPREAD,
                      items_per_rank=None if batch is None else float(batch))
    return changed.with_note(f"{share:.0%} of the step is operations that compute on the CPU and grow by their models; "
                             "the rest of the host's time stays.")


def _new_calls(scaled: _Scaled, op: int, old: tuple[OpCall, ...]) -> tuple[tuple[OpCall, ...], Fraction]:
    """Calls of an operation at the new sizes, or the old ones and a factor where its calls cannot be made again."""
    if op < 0:
        return old, Fraction(1)
    growth = scaled.growth(op)
    if old and old[0].family in (Family.TRANSFER, Family.MEMSET) and len(old) == 1 and "unsized" not in old[0].flags:
        if growth == 1:
            return old, growth
        size = int(old[0].dims[0] * growth)
        new = memset(size) if old[0].family is Family.MEMSET else transfer(old[0].kind, size, old[0].flags)
        return (new,), Fraction(1)
    tf32 = any(call.dtype == "tf32" for call in old)
    before = Operation.from_graph(scaled.graph, op)
    if calls_of(before, tf32) != old:
        return old, growth
    return calls_of(replace(before, arguments=tuple(scaled.argument(a) for a in before.arguments)), tf32), Fraction(1)


def _elements(shape: Shape) -> int:
    return math.prod(shape)


def _dimensions(shape: Shape) -> int:
    return len(shape)


def _strides(old: Shape, new: Shape, stride: Shape) -> Shape:
    """Strides of a tensor whose sizes changed: those of dimensions outside a changed one follow it."""
    result = [Fraction(s) for s in stride]
    for at, (before, after) in enumerate(zip(old, new, strict=True)):
        if before != after and before:
            for j, s in enumerate(stride):
                if j != at and (s, -j) > (stride[at], -at) and s >= stride[at] * before:
                    result[j] *= Fraction(after, before)
    return tuple(int(s) for s in result)


def _texts(graph: ExecutionGraph) -> set[str]:
    return {graph.string(int(code)) for code in np.unique(graph.ops.shapes) if code >= 0}


def _tensors(text: str) -> Iterator[Shape]:
    """Shapes of all tensors in a JSON text of the profiler, those in lists too."""
    try:
        value = msgspec.json.decode(text) if text else []
    except msgspec.DecodeError:
        return
    todo = list(value) if isinstance(value, list) else []
    while todo:
        one = todo.pop()
        if isinstance(one, list) and one:
            if all(isinstance(size, int) for size in one):
                yield tuple(one)
            else:
                todo.extend(one)


def _parameter_shapes(graph: ExecutionGraph) -> set[Shape]:
    """Shapes of parameters: what the optimizer works on, and weights by the operations' schemas; transposed ones
    too."""
    found: set[Shape] = set()
    ops = graph.ops
    codes = np.unique(ops.shapes[(ops.phase == Phase.OPTIMIZER) & (ops.shapes >= 0)])
    for code in codes.tolist():
        found |= set(_tensors(graph.string(code)))
    pairs = np.unique(np.stack([ops.name, ops.shapes]), axis=1).T if len(ops) else np.zeros((0, 2), np.int64)
    for name, shapes in pairs.tolist():
        rule = registry.forward_rule(graph.string(name))
        if rule is None or shapes < 0:
            continue
        try:
            parts = msgspec.json.decode(graph.string(shapes) or "[]")
        except msgspec.DecodeError:
            continue
        for argument, part in zip(rule.names, parts, strict=False):
            if argument in PARAMETERS and isinstance(part, list) and part and all(isinstance(s, int) for s in part):
                found.add(tuple(part))
    return found | {tuple(reversed(shape)) for shape in found if len(shape) == 2}
