"""Which dimensions of a recorded step follow a named size: ``ScaledShapes``.

A tensor says nothing of what its dimensions are. What is known: parameters do not change, and their shapes are those
the optimizer works on and those that operations' schemas name. A product of two matrices says which of its dimensions
is shared, so that a parameter on one side, or as its result, tells the third. Lists of indices are as long as the
offsets into them say.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise
from typing import TypeGuard

import msgspec
import numpy as np

from graph_predictor.prediction.scenario import EditError
from graph_predictor.whatif.named_sizes import LEADING
from kernel_models.families import registry
from kernel_models.operation import Operation
from tracer.graph import ExecutionGraph, Phase
from tracer.views import Argument

Shape = tuple[int, ...]
Changes = tuple[tuple[str, int, int], ...]

PARAMETERS = frozenset({"weight", "bias", "running_mean", "running_var", "weights"})
"""Arguments that hold parameters, as the operations' schemas call them."""
_PRODUCTS = {"aten::mm": (0, 1), "aten::addmm": (1, 2)}
"""Products of two matrices, and the positions of these."""
_FLAT = 2
"""A leading dimension stands elsewhere only in matrices (transposed, or several lists of samples stacked)."""


class ScaledShapes:
    """One rank's shapes before and after.

    Attributes:
        parameters: shapes of parameters, transposed ones too.
        factors: of sizes that are products of a named one with others, or lengths of lists of indices.
    """

    def __init__(self, graph: ExecutionGraph, changes: Changes) -> None:
        self.graph, self.changes = graph, changes
        self.leading = {old: new for name, old, new in changes if name.lower() in LEADING}
        self.anywhere = {old: new for name, old, new in changes if name.lower() not in LEADING}
        world = max(graph.meta.world_size, 1)
        self.global_batch = {old * world: new * world for old, new in self.leading.items() if world > 1}
        self.parameters = _parameter_shapes(graph)
        self.sizes_of_parameters = {size for shape in self.parameters for size in shape}
        self.shapes = {shape for text in _texts(graph) for shape in tensors_in(text)} - self.parameters
        self.factors: dict[int, Fraction] = {}
        self._find_products()
        self._find_lists()

    def check(self) -> None:
        """Raise ``EditError`` if a dimension is unknown or ambiguous."""
        for name, old, new in self.changes:
            leading = name.lower() in LEADING
            changes = f"{name}={old}:{new}"
            if not any(shape[:1] == (old,) if leading else old in shape for shape in self.shapes):
                where = "as its first dimension " if leading else ""
                sizes = sorted({shape[0] for shape in self.shapes if shape})[:8]
                raise EditError(f"No tensor of the step has {old} {where}(there are {', '.join(map(str, sizes))}, …): "
                                f"{changes} changes nothing; name the size that was recorded.")
            if old == 1:
                raise EditError(f"{changes} is ambiguous: dimensions of 1 are everywhere, and most have nothing to do "
                                f"with {name}; capture the step at another size, or two sizes.")
            clash = [shape for shape in self.parameters if old in shape]
            if clash and not leading:
                shown = "×".join(map(str, sorted(clash, key=_dimensions)[-1]))
                raise EditError(f"{changes} is ambiguous: a parameter of {shown} has the size {old} too, so that they "
                                "cannot be told apart; capture the step at another size, or two sizes.")

    def undecided(self, op: int) -> bool:
        """Whether an operation works on a matrix that may be a parameter or as many samples as it has rows."""
        if self.graph.ops.phase[op] == Phase.OPTIMIZER or self.graph.string(int(self.graph.ops.name[op])) in _PRODUCTS:
            return False
        rule = registry.forward_rule(self.graph.string(int(self.graph.ops.name[op])))
        if rule is not None and (rule.is_free or PARAMETERS & set(rule.names)):
            return False
        shapes = tensors_in(self.graph.string(int(self.graph.ops.shapes[op])))
        return any(len(shape) > 1 and shape in self.parameters and shape[0] in self.leading for shape in shapes)

    def operation(self, operation: Operation) -> Operation:
        """An operation at the new sizes."""
        found = [self._argument(argument) for argument in operation.arguments]
        for at, shape in self._product(operation).items():
            found[at] = _reshaped(operation.arguments[at], shape)
        return Operation(operation.name, tuple(found), operation.list_dtype)

    def growth(self, op: int) -> Fraction:
        """How much larger the largest tensor among an operation's arguments becomes."""
        largest = max(tensors_in(self.graph.string(int(self.graph.ops.shapes[op]))), key=math.prod, default=())
        return Fraction(math.prod(self.shape(largest)), max(math.prod(largest), 1))

    def payload(self, row: int) -> Fraction:
        """How much more a row of the rank's collectives moves.

        What all ranks exchange with all are samples, except short lists of counts. Of other collectives those that work
        on a matrix of samples grow; gradients and parameters stay.
        """
        table = self.graph.collectives
        if self.graph.string(int(table.kind[row])) == "all_to_all":
            for elements in (int(table.elements_in[row]), int(table.elements_out[row])):
                for old, new in self.leading.items():
                    if elements in self.factors or (elements > 0 and elements % old == 0):
                        return self.factors.get(elements, Fraction(new, old))
            return Fraction(1)
        op = int(table.op[row])
        shapes = [] if op < 0 else [shape for shape in tensors_in(self.graph.string(int(self.graph.ops.shapes[op])))
                                    if len(shape) > 1]
        largest = max(shapes, key=math.prod, default=())
        return Fraction(math.prod(self.shape(largest)), max(math.prod(largest), 1))

    def shape(self, shape: Shape) -> Shape:
        """A tensor's new shape."""
        if not shape or shape in self.parameters:
            return shape
        new = list(self._named(shape))
        for at, size in enumerate(shape):
            if new[at] == size and (at == 0 or len(shape) <= _FLAT):
                new[at] = self._followed(size, offsets=len(shape) == 1)
        return tuple(new)

    def _named(self, shape: Shape) -> Shape:
        """A shape with the named sizes alone changed."""
        new = [self.anywhere.get(size, size) for size in shape]
        if shape[0] in self.leading:
            new[0] = self.leading[shape[0]]
        elif len(shape) <= _FLAT:
            for sizes in (self.leading, self.global_batch):
                places = [at for at, size in enumerate(shape) if size in sizes and (at or sizes is self.leading)]
                if len(places) == 1:
                    new[places[0]] = sizes[shape[places[0]]]
                    break
        return tuple(new)

    def _followed(self, size: int, *, offsets: bool = False) -> int:
        """A size that follows a named one; offsets into a list are one more than what they count."""
        if size in self.factors and size not in self.sizes_of_parameters:
            return _times(size, self.factors[size])
        if offsets and size - 1 in self.factors and size not in self.sizes_of_parameters:
            return _times(size - 1, self.factors[size - 1]) + 1
        return size

    def _size(self, size: int) -> int:
        """A dimension that is known to be no parameter's."""
        if size in self.leading:
            return self.leading[size]
        return _times(size, self.factors[size]) if size in self.factors else self.anywhere.get(size, size)

    def _find_products(self) -> None:
        found: dict[int, set[Fraction]] = {}
        for shape in self.shapes:
            if not shape:
                continue
            new, total, after = self._named(shape), 1, 1
            for old, size in zip(shape, new, strict=True):
                total, after = total * old, after * size
                if total != after and total:
                    found.setdefault(total, set()).add(Fraction(after, total))
        named = {*self.leading, *self.anywhere}
        self.factors.update({size: ratios.pop() for size, ratios in found.items()
                             if len(ratios) == 1 and size not in named})

    def _find_lists(self) -> None:
        """Lengths of lists of indices, of which offsets or lengths say that they grow."""
        ops = self.graph.ops
        kinds = np.unique(np.stack([ops.name, ops.shapes]), axis=1).T if len(ops) else np.zeros((0, 2), np.int64)
        for code, shapes in kinds.tolist():
            name = self.graph.string(code)
            if shapes < 0 or not ("embedding" in name or name.startswith("fbgemm::")):
                continue
            parts: list[Shape] = [tuple(part) for part in _decoded(self.graph.string(shapes)) if _is_shape(part)]
            lists = [*pairwise(parts)]
            if "permute_2D" in name:
                lists = [(parts[2], parts[1])] if len(parts) > 2 else []
            for indices, telling in lists:
                if len(indices) != 1 or not indices[0] or indices in self.parameters:
                    continue
                ratio = self._ratio(telling, bags=not name.startswith("fbgemm::"))
                if ratio != 1 and indices[0] not in self.leading:
                    self.factors.setdefault(indices[0], ratio)

    def _ratio(self, telling: Shape, *, bags: bool) -> Fraction:
        """How much more the samples that offsets or lengths count become; only PyTorch's bags may leave out the last
        offset."""
        if len(telling) == 1:
            for count in (telling[0], telling[0] - 1) if bags else (telling[0] - 1,):
                after = self._size(count)
                if count > 0 and after != count:
                    return Fraction(after, count)
            return Fraction(1)
        return Fraction(math.prod(self._named(telling)), max(math.prod(telling), 1))

    def _product(self, operation: Operation) -> dict[int, Shape]:
        """New shapes of the two matrices of a product by where its parameter is; none where it has none."""
        places = _PRODUCTS.get(operation.name)
        if places is None or len(operation.arguments) <= places[1]:
            return {}
        a, b = (operation.arguments[at].shape or () for at in places)
        if len(a) != 2 or len(b) != 2:
            return {}
        (m, k), n = a, b[1]
        if b in self.parameters:
            m = self._size(m)
        elif (m, n) in self.parameters:
            k = self._size(k)
        elif a in self.parameters:
            n = self._size(n)
        else:
            return {}
        return {places[0]: (m, k), places[1]: (k, n)}

    def _argument(self, argument: Argument) -> Argument:
        """An argument with new sizes and strides; lists of numbers that are a tensor's sizes change too."""
        shape = argument.shape
        if shape is None or (not shape and argument.value.startswith("[")):
            value = _decoded(argument.value) if argument.value.startswith("[") else []
            if _is_shape(value) and tuple(value) in self.shapes:
                return Argument(argument.dtype, shape, argument.stride, str(list(self.shape(tuple(value)))))
            return argument
        if any(isinstance(part, tuple) for part in shape):
            shapes = tuple(self.shape(part) for part in shape)
            strides = argument.stride
            if strides is not None:
                strides = tuple(_strides(a, b, c) for a, b, c in zip(shape, shapes, strides, strict=False))
            return Argument(argument.dtype, shapes, strides, argument.value)
        return _reshaped(argument, self.shape(shape))


def tensors_in(text: str) -> Iterator[Shape]:
    """Shapes of all tensors in a JSON text of the profiler, those in lists too."""
    todo = list(_decoded(text))
    while todo:
        one = todo.pop()
        if isinstance(one, list) and one:
            if _is_shape(one):
                yield tuple(one)
            else:
                todo.extend(one)


def _dimensions(shape: Shape) -> int:
    return len(shape)


def _decoded(text: str) -> list[object]:
    try:
        value = msgspec.json.decode(text) if text else []
    except msgspec.DecodeError:
        return []
    return value if isinstance(value, list) else []


def _is_shape(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and bool(value) and all(type(size) is int for size in value)


def _times(size: int, factor: Fraction) -> int:
    """A size times a factor, where that is whole; else the size itself."""
    scaled = size * factor
    return int(scaled) if scaled.denominator == 1 else size


def _reshaped(argument: Argument, shape: Shape) -> Argument:
    stride = None if argument.stride is None else _strides(argument.shape or (), shape, argument.stride)
    return Argument(argument.dtype, shape, stride, argument.value)


def _strides(old: Shape, new: Shape, stride: Shape) -> Shape:
    """Strides of a tensor whose sizes changed: those of dimensions outside a changed one follow it."""
    if len(stride) != len(old):
        return stride
    result = [Fraction(s) for s in stride]
    for at, (before, after) in enumerate(zip(old, new, strict=True)):
        if before != after and before:
            for j, s in enumerate(stride):
                if j != at and (s, -j) > (stride[at], -at) and s >= stride[at] * before:
                    result[j] *= Fraction(after, before)
    return tuple(int(s) for s in result)


def _texts(graph: ExecutionGraph) -> set[str]:
    return {graph.string(int(code)) for code in np.unique(graph.ops.shapes) if code >= 0}


def _parameter_shapes(graph: ExecutionGraph) -> set[Shape]:
    """Shapes of parameters: what the optimizer works on, and weights by the operations' schemas; transposed ones
    too."""
    found: set[Shape] = set()
    ops = graph.ops
    codes = np.unique(ops.shapes[(ops.phase == Phase.OPTIMIZER) & (ops.shapes >= 0)])
    for code in codes.tolist():
        found |= set(tensors_in(graph.string(code)))
    pairs = np.unique(np.stack([ops.name, ops.shapes]), axis=1).T if len(ops) else np.zeros((0, 2), np.int64)
    for name, shapes in pairs.tolist():
        rule = registry.forward_rule(graph.string(name))
        if rule is None or shapes < 0:
            continue
        for argument, part in zip(rule.names, _decoded(graph.string(shapes)), strict=False):
            if argument in PARAMETERS and _is_shape(part):
                found.add(tuple(part))
    return found | {tuple(reversed(shape)) for shape in found if len(shape) == _FLAT}
