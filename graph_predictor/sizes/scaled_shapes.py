"""``ScaledShapes``: find the dimensions of a recorded step that follow a named size.

A trace does not say what a tensor's dimensions mean: a number that equals the batch may be a layer's width. Parameters
and their gradients do not change. Their shapes are those that the optimizer works on and that operations' schemas name.
Lists of indices have the lengths that their offsets state. From these the step's tensors are followed from operation to
operation (``size_flow``). A shape alone decides only if nothing else does.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, islice, pairwise
from operator import mul
from typing import TypeGuard

import numpy as np

from graph_predictor.prediction.scenario import EditError, FollowingDimension
from graph_predictor.sizes import twins
from graph_predictor.sizes.data_rows import selections
from graph_predictor.sizes.layouts import Dim, Layout, NamedSizes, Shape, total
from graph_predictor.sizes.retrace import LEADING
from graph_predictor.sizes.size_flow import Role, SizeFlow, Use, Value
from kernel_models.families import registry
from kernel_models.operation import Operation
from tracer.graph import ExecutionGraph, Phase
from tracer.input_file import list_of
from tracer.views import Argument

Changes = tuple[tuple[str, int, int], ...]

PARAMETERS = frozenset({"weight", "bias", "running_mean", "running_var", "weights", "dev_weights", "uvm_weights",
                        *(f"weight{number}" for number in range(5))})
"""Arguments that hold parameters, as the operations' schemas call them (``weight0`` …: recurrent layers' on a CPU)."""
STATES = frozenset({"hx", "cx", "hx_", "cx_"})
"""Arguments that hold a recurrent layer's states."""
DATA = frozenset({"indices", "offsets", "offset2bag", "bag_size", "maximum_indices", "target", "grad_output",
                  "grad_out", "grad"})
"""Arguments that never hold parameters."""
_TRACED_AGAIN = "Trace the program again (--code SCRIPT.py:FUNCTION, or foretrace trace)"
_OR_AGAIN = "trace the program again (--code)"
INPUTS = {**{name: name for name in twins.COUNTED}, "input": "input", "mat1": "input"}
"""Arguments of layers that hold the data: their names in the operations' schemas, and their names in notes."""
_ORDINALS = ("1st", "2nd", "3rd", "4th", "5th")
_SHOWN = 2
"""Number of inputs whose following dimension a note shows, for each size."""
_MAP = 4
"""Number of dimensions of a batch of images' feature maps: samples, channels, rows, columns."""
_FLAT = 2
"""Most dimensions of a tensor whose samples need not come first (transposed, or stacked lists of samples)."""


class ScaledShapes:
    """One rank's shapes at the recorded and at the new sizes.

    Attributes:
        parameters: shapes of parameters, transposed ones too.
        sizes: the named sizes.
    """

    def __init__(self, graph: ExecutionGraph, changes: Changes) -> None:
        self.graph, self.changes = graph, changes
        self.sizes = NamedSizes(tuple(old for _, old, _ in changes), tuple(new for _, _, new in changes),
                                tuple(name.lower() in LEADING for name, _, _ in changes))
        self.world = max(graph.meta.world_size, 1)
        self.parameters = _parameter_shapes(graph)
        self._states = _states(graph)
        self._sizes_of_parameters = {size for shape in self.parameters for size in shape}
        self.shapes = {shape for text in _texts(graph) for shape in tensors_in(text)} - self.parameters
        # Sizes that are products of a named size and dimensions next to it, and lengths of lists of indices.
        self._products: dict[int, tuple[int, ...]] = {}
        self._twins: set[int] = set()  # products that are also the size of a dimension after the samples
        self._lists: dict[int, tuple[int, ...]] = {}
        self._rows: set[int] = set()  # numbers of rows that data select; a tensor with samples too is not selected rows
        self._find_products()
        self._find_lists()
        self.selected = selections(graph, {*self.sizes.old} - self._sizes_of_parameters)
        self._find_rows()

    @cached_property
    def flow(self) -> SizeFlow:
        """Return how every tensor of the step follows the sizes; computed on first use, as ``check`` may fail first."""
        return SizeFlow(self.graph, self.sizes, self._by_shape, self._list, self.parameters, _role)

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
            samples = _samples_of_inputs(self.graph, self.shapes)
            if leading and samples not in (None, old):
                raise EditError(f"{changes} is not the step's number of samples: {samples} lead all its indices and "
                                f"targets, and {old} none of them; write {name}={samples}:{new} for other samples, or "
                                "name another size by a name of its own.")
            if old == 1:
                raise EditError(f"{changes} is ambiguous: dimensions of 1 are everywhere, and most have nothing to do "
                                f"with {name}; capture the step at another size, or {_OR_AGAIN}.")
            if not leading:
                self._check_twins(name, old, changes)
            if not leading and old == samples and not self._only_samples(name, old):
                raise EditError(f"{changes} is ambiguous: the step has {old} samples too, so that the two cannot be "
                                f"told apart; capture the step at another {name}, or another number of samples, or "
                                f"write batch={old}:{new} if samples are meant.")
            clash = [shape for shape in self.parameters if old in shape]
            if clash and not leading:
                shown = "×".join(map(str, sorted(clash, key=_dimensions)[-1]))
                raise EditError(f"{changes} is ambiguous: a parameter of {shown} has the size {old} too, so that they "
                                f"cannot be told apart; capture the step at another size, or {_OR_AGAIN}.")
            if not leading and self.flow.changed:
                raise EditError(f"{changes} changes parameters of the model: one of {by(self.flow.changed[0])} is as "
                                f"large as {name} makes it, and one capture scales what the data change. "
                                f"{_TRACED_AGAIN}.")
            strided = [] if leading else [  # after the flow, which finds derived sizes
                side for side in strided_maps(self.shapes, old) if side not in self.sizes.derived]
            if strided:
                maps = " and ".join(f"{size}×{size}" for size in strided)
                raise EditError(f"{changes} changes more than what has the size {old}: maps of {maps} follow from it "
                                "by strides, which one capture does not tell; trace the program again (--code).")

    def _only_samples(self, name: str, size: int) -> bool:
        """Return whether only samples have this size, although its name is not a batch's: nodes, points."""
        if not any(size in shape[1:] for shape in self.shapes):
            return True
        if twins.bare(name) not in twins.OF_DATA or twins.picks_as_many(self.graph, size):
            return False
        at = next(at for at, (one, *_) in enumerate(self.changes) if one == name)
        changes = (*self.changes[:at], ("batch", *self.changes[at][1:]), *self.changes[at + 1:])
        return all(dim.powers[at] for value in ScaledShapes(self.graph, changes).flow.every()
                   for one, dim in zip(value.shape, value.layouts[0], strict=True) if one == size)

    def _check_twins(self, name: str, old: int, changes: str) -> None:
        """Raise ``EditError`` if something else has the size too (``twins``)."""
        if twins.bare(name) in twins.OF_MODELS:
            raise EditError(f"{changes} is a size of the model: its parameters change with it, and one capture scales "
                            f"what the data change. {_TRACED_AGAIN}, or name a size of the data.")
        square = twins.square_input(self.graph, old)
        if square is not None:
            raise EditError(f"{changes} is ambiguous: an input of the step is {by(square)}, so that samples and {name} "
                            f"cannot be told apart. Capture the step where they differ, or write batch={old}:… if "
                            f"samples are meant; or {_OR_AGAIN}.")
        parts = twins.split_parameter(self.graph, self._sizes_of_parameters, old)
        if parts is not None:
            said = f"{changes} is ambiguous: the step takes a width of {parts[0]} apart into {by(parts[1])}, whose"
            if twins.bare(name) not in twins.OF_DATA:
                raise EditError(f"{said} {old} may be meant. Capture the step at another size, or call it by what it "
                                f"is (seq, batch, image); or {_OR_AGAIN}.")
            confused = twins.confused_shape(self.flow, old)
            if confused is not None:
                raise EditError(f"{said} {old} stays: among the tensors of {by(confused)} the two cannot be told "
                                f"apart. Capture the step at another {name}; or {_OR_AGAIN}.")
        if len([one for one, size, _ in self.changes if size == old and one.lower() not in LEADING]) > 1:
            return  # the user says that all of them change
        apart = twins.separate_inputs(self.graph, old)
        if apart:
            raise EditError(f"{changes} is ambiguous: {len(apart)} inputs of the step ({' and '.join(map(by, apart))}) "
                            f"are {old} long, and nothing says that they grow together. Capture the step where they "
                            f"differ; if all grow, name them one by one ({changes} and other={old}:…); or "
                            f"{_OR_AGAIN}.")

    def said(self) -> str:
        """Return a phrase that names the dimensions of the step's first inputs that follow each name."""
        phrases = []
        for name, old, new in self.changes:
            found = [one for one in self.following if one.name == name]
            dims = {one.dimension for one in found}
            said = [f"the {_ORDINALS[one.dimension]} dimension of " * (not at or len(dims) > 1)
                    + f"{one.operation}'s {by(one.shape)} {one.argument}" for at, one in enumerate(found)]
            phrases.append(f"{name} {old} → {new} is {' and '.join(said) or 'no dimension of an input'}")
        return "; ".join(phrases)

    @cached_property
    def following(self) -> tuple[FollowingDimension, ...]:
        """Return the dimensions of the step's first inputs that follow the names."""
        return tuple(one for at in range(len(self.changes)) for one in islice(self._followed(at), _SHOWN))

    def _followed(self, name: int) -> Iterator[FollowingDimension]:
        """Yield dimensions that follow a name, in inputs of look-ups, products, convolutions and losses: each shape
        once, in the step's order."""
        seen: set[tuple[str, Shape]] = set()
        ops = self.graph.ops
        for row in np.flatnonzero((ops.phase != Phase.BACKWARD) & (ops.phase != Phase.OPTIMIZER)).tolist():
            operation = self.graph.string(int(ops.name[row]))
            rule = registry.forward_rule(operation)
            if rule is None:
                continue
            for (place, _), value in self.flow.values(row).items():
                argument = rule.names[place] if place < len(rule.names) else ""
                short = operation.rpartition("::")[2].strip("_")
                dim = next((at for at, one in enumerate(value.layouts[0]) if one.powers[name]), None)
                if argument in INPUTS and dim is not None and dim < len(_ORDINALS) and (short, value.shape) not in seen:
                    seen.add((short, value.shape))
                    yield FollowingDimension(self.changes[name][0], short, INPUTS[argument], value.shape, dim)

    def undecided(self, op: int) -> bool:
        """Return whether an operation that does work takes a tensor that may be a parameter or samples: the step does
        not decide which."""
        rule = registry.forward_rule(self.graph.string(int(self.graph.ops.name[op])))
        if rule is not None and rule.is_free:
            return False
        return any(value.undecided for value in self.flow.values(op).values())

    def selects(self, op: int) -> bool:
        """Return whether an operation works on rows that data select."""
        return bool(self._rows) and any(
            dim.rounded and size in self._rows for value in self.flow.values(op).values()
            for size, dim in zip(value.shape, value.layouts[0], strict=True))

    def operation(self, operation: Operation) -> Operation:
        """Return an operation at the new sizes; it need not be one of the step's."""
        return self._resized(operation, self.flow.values_of(operation.name, list(operation.arguments)))

    def operation_of(self, op: int) -> Operation:
        """Return a row of the rank's ``ops`` as an operation at the new sizes."""
        return self._resized(Operation.from_graph(self.graph, op), self.flow.values(op))

    def layouts(self, op: int) -> tuple[Layout, ...]:
        """Return how the tensors among an operation's arguments follow the sizes."""
        return tuple(value.layouts[0] for value in self.flow.values(op).values())

    def growth(self, op: int) -> Fraction:
        """Return the factor by which the largest tensor among an operation's arguments grows."""
        values = list(self.flow.values(op).values())
        return self._growth(max(values, key=_elements)) if values else Fraction(1)

    def payload(self, row: int) -> Fraction:
        """Return the factor by which the payload of a row of the rank's collectives grows.

        A collective's payload follows the sizes as its tensor does; gradients and parameters stay. If a trace has only
        the number of elements, the payload grows if it is an all-to-all of a list of samples.
        """
        table = self.graph.collectives
        op = int(table.op[row])
        values = list(self.flow.values(op).values()) if op >= 0 else []
        elements = max(int(table.elements_in[row]), int(table.elements_out[row]))
        if values:
            return self._growth(max(values, key=_elements))
        powers = self._lists.get(elements) or self._products.get(elements)
        if powers is None or self.graph.string(int(table.kind[row])) != "all_to_all":
            return Fraction(1)
        return self.sizes.factor(powers)

    def _growth(self, value: Value) -> Fraction:
        new = self.sizes.shape(value.shape, value.layouts[0])
        return Fraction(math.prod(new), max(math.prod(value.shape), 1))

    def _by_shape(self, shape: Shape) -> list[Layout]:
        """Return the layouts that a tensor may have by its shape alone, the likeliest first."""
        plain = self._elsewhere(shape)
        rows = self._rows if any(dim.follows for dim in self._with_samples(shape, plain)[0]) else set()
        derived = tuple(dim if dim.follows or size in rows else self.sizes.derived.get(size, dim)
                        for size, dim in zip(shape, plain, strict=True))
        if shape in self.parameters:
            likely = [plain]
        elif any(size in self._sizes_of_parameters for size in shape if size in self.sizes.derived):
            likely = [plain, derived]
        else:
            likely = [derived]
        return list(dict.fromkeys(found for base in likely for found in self._with_samples(shape, base)))

    def _with_samples(self, shape: Shape, base: Layout) -> list[Layout]:
        """Return ``base`` with the samples at each possible place, the likeliest first; ``base`` if there is none."""
        found = [(*base[:at], dim, *base[at + 1:]) for at, dim in self._samples(shape)
                 if not base[at].follows or base[at] == dim]
        if found and (self._leads(shape) or self._twins.isdisjoint(shape)):
            return found
        return [base, *found] if len(shape) == 1 else [*found, base]

    def _list(self, shape: Shape) -> Layout | None:
        """Return how a list of indices, or of offsets into one (one element more), follows the sizes."""
        if len(shape) != 1 or shape in self.parameters:
            return None
        for fixed in (0, 1):
            if shape[0] - fixed in self._lists:
                return (Dim(self._lists[shape[0] - fixed], fixed),)
        return None

    def _elsewhere(self, shape: Shape) -> Layout:
        """Return how dimensions follow the names other than a batch; such a size may be at any place."""
        dims = []
        for size in shape:
            name = next((at for at, (old, leads) in enumerate(zip(self.sizes.old, self.sizes.leading, strict=True))
                         if size == old and not leads), None)
            dims.append(self.sizes.constant if name is None else self.sizes.following(name))
        return tuple(dims)

    def _samples(self, shape: Shape) -> Iterator[tuple[int, Dim]]:
        """Yield possible places of the samples, and how these follow the sizes; at most one place is right."""
        flat = len(shape) <= _FLAT
        for name, (old, leads) in enumerate(zip(self.sizes.old, self.sizes.leading, strict=True)):
            if not leads:
                continue
            follows = self.sizes.following(name)
            if shape[0] == old:
                yield 0, follows
            elif shape[1:2] == (old,) and shape[1:] in self._states:
                yield 1, follows
            elif flat and old in shape:
                yield shape.index(old), follows
            elif self.world > 1 and old * self.world in shape[:_FLAT if flat else 1]:
                yield shape.index(old * self.world), follows
        for at, size in enumerate(shape[:_FLAT] if flat else shape[:1]):
            if size in self._sizes_of_parameters:
                continue
            elif size in self._products:
                yield at, Dim(self._products[size])
            elif flat and size in self._lists:
                yield at, Dim(self._lists[size])

    def _find_products(self) -> None:
        """Find products of a tensor's first dimensions that include a dimension that follows a name."""
        found: dict[int, set[tuple[int, ...]]] = {}
        for shape in self.shapes:
            layout = self._by_shape(shape)[0]
            for size, end in zip(accumulate(shape, mul), range(1, len(shape) + 1), strict=True):
                powers = total(layout[:end])
                if size and any(powers) and end > 1:
                    found.setdefault(size, set()).add(powers)
        self._products.update({size: powers.pop() for size, powers in found.items()
                               if len(powers) == 1 and size not in self.sizes.old})
        self._twins.update(size for shape in self.shapes if self._leads(shape) for size in shape[1:]
                           if size in self._products)

    def _leads(self, shape: Shape) -> bool:
        """Return whether samples come first, by the shape alone."""
        return any(leads and shape[0] == old for old, leads in zip(self.sizes.old, self.sizes.leading, strict=True))

    def _find_lists(self) -> None:
        """Find lengths of lists of indices whose offsets or lengths show that they grow."""
        ops = self.graph.ops
        kinds = np.unique(np.stack([ops.name, ops.shapes]), axis=1).T if len(ops) else np.zeros((0, 2), np.int64)
        for code, shapes in kinds.tolist():
            name = self.graph.string(code)
            if shapes < 0 or not ("embedding" in name or name.startswith("fbgemm::")):
                continue
            parts: list[Shape] = [tuple(part) for part in list_of(self.graph.string(shapes)) if _is_shape(part)]
            lists = [*pairwise(parts)]
            if "permute_2D" in name:
                lists = [(parts[2], parts[1])] if len(parts) > 2 else []
            for indices, telling in lists:
                if len(indices) != 1 or not indices[0] or indices in self.parameters:
                    continue
                counts, powers = self._told(telling, bags=not name.startswith("fbgemm::"))
                for size in (indices[0], counts) if powers else ():
                    if size not in self.sizes.old and (size,) not in self.parameters:
                        self._lists.setdefault(size, powers)

    def _find_rows(self) -> None:
        """Find numbers of rows that data select and that grow because their source grows."""
        for rows, source, *_ in self.selected:
            powers = self._powers_of(source)
            if any(powers) and rows not in self.sizes.old and rows not in self._products:
                self.sizes.derived.setdefault(rows, Dim(powers, 0, True))
                self._rows.add(rows)

    def _powers_of(self, source: Shape) -> tuple[int, ...]:
        """Return the powers that a mask's shape follows; it may be of tokens repeated for each of their experts."""
        powers = total(self._by_shape(source)[0])
        for size in () if any(powers) else source:
            of = [known for known in self._products if known == size or (
                not size % known and (known, size // known) in self.shapes)]
            powers = self._products[max(of)] if of else powers
        return powers

    def _told(self, telling: Shape, *, bags: bool) -> tuple[int, tuple[int, ...]]:
        """Return how many samples offsets or lengths count, and the powers that these follow. Only PyTorch's bags may
        leave out the last offset."""
        if len(telling) != 1:
            powers = total(self._by_shape(telling)[0]) if telling else ()
            return math.prod(telling), powers if any(powers) else ()
        for count in (telling[0], telling[0] - 1) if bags else (telling[0] - 1,):
            powers = self._products.get(count) or self._by_shape((count,))[0][0].powers
            if count > 0 and any(powers):
                return count, powers
        return 0, ()

    def _resized(self, operation: Operation, values: dict[Use, Value]) -> Operation:
        found = [self._argument(argument, place, values) for place, argument in enumerate(operation.arguments)]
        return Operation(operation.name, tuple(found), operation.list_dtype)

    def _argument(self, argument: Argument, place: int, values: dict[Use, Value]) -> Argument:
        """Return an argument with new sizes and strides; a list of numbers that is a tensor's shape changes too."""
        shape = argument.shape
        if not shape:
            numbers = list_of(argument.value) if argument.value.startswith("[") else []
            if _is_shape(numbers) and tuple(numbers) in self.shapes:
                sizes = tuple(numbers)
                new = self.sizes.shape(sizes, self.flow.guessed(sizes))
                return Argument(argument.dtype, shape, argument.stride, str(list(new)))
            return argument
        if (place, -1) in values:
            return _reshaped(argument, self._new(values[place, -1]))
        if not any(isinstance(part, tuple) for part in shape):
            return argument
        shapes = tuple(self._new(values[place, at]) if (place, at) in values else one for at, one in enumerate(shape))
        strides = argument.stride
        if strides is not None:
            strides = tuple(_strides(a, b, c) for a, b, c in zip(shape, shapes, strides, strict=False))
        return Argument(argument.dtype, shapes, strides, argument.value)

    def _new(self, value: Value) -> Shape:
        return self.sizes.shape(value.shape, value.layouts[0])


def _role(name: str, place: int) -> Role:
    """Return an argument's role from its name in the operation's schema."""
    rule = registry.forward_rule(name)
    argument = rule.names[place] if rule is not None and place < len(rule.names) else ""
    return Role.PARAMETER if argument in PARAMETERS else Role.DATA if argument in DATA else Role.ANY


def _samples_of_inputs(graph: ExecutionGraph, shapes_of_step: Iterable[Shape]) -> int | None:
    """Return the common first size of all indices and targets of a step, if there are at least two of them. ``None`` if
    they differ, or if the size is samples times tokens.

    Indices with one row (positions, equal for all samples) and lists of indices (longer than the samples) do not count.
    """
    leads = [shape[0] for _, argument, shape in twins.counted_inputs(graph)
             if shape[0] != 1 and (len(shape) > 1 or argument != "indices")]
    together = {shape[0] * shape[1] for shape in shapes_of_step if len(shape) > 1 and 1 not in shape[:2]}
    return leads[0] if len(set(leads)) == 1 and len(leads) > 1 and leads[0] not in together else None


def by(shape: Iterable[int]) -> str:
    """Return a shape as text: 16×64."""
    return "×".join(map(str, shape))


def _elements(value: Value) -> int:
    return math.prod(value.shape)


def strided_maps(shapes: Iterable[Shape], size: int) -> list[int]:
    """Return the sides of square maps that are 1/2, 1/4, … of an image's side (rounded up), the largest first. Strides
    and pooling make such maps. Empty if no map has the side ``size``."""
    sides = {shape[-1] for shape in shapes if len(shape) == _MAP and shape[-1] == shape[-2]}
    if size not in sides:
        return []
    parts = {-(-size // 2**halvings) for halvings in range(1, size.bit_length())} - {1, size}
    return sorted(sides & parts, reverse=True)


def tensors_in(text: str) -> Iterator[Shape]:
    """Yield the shapes of all tensors in a JSON text of the profiler, also of those in lists."""
    todo = list(list_of(text))
    while todo:
        one = todo.pop()
        if isinstance(one, list) and one:
            if _is_shape(one):
                yield tuple(one)
            else:
                todo.extend(one)


def _dimensions(shape: Shape) -> int:
    return len(shape)


def _is_shape(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and bool(value) and all(type(size) is int and size >= 0 for size in value)


def _reshaped(argument: Argument, shape: Shape) -> Argument:
    stride = None if argument.stride is None else _strides(argument.shape or (), shape, argument.stride)
    return Argument(argument.dtype, shape, stride, argument.value)


def _strides(old: Shape, new: Shape, stride: Shape) -> Shape:
    """Return the strides of a tensor whose sizes changed; those of dimensions outside a changed one grow with it."""
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
    """Return the shapes of parameters, also transposed: tensors that the optimizer works on, and weights by the
    operations' schemas."""
    found: set[Shape] = set()
    ops = graph.ops
    codes = np.unique(ops.shapes[(ops.phase == Phase.OPTIMIZER) & (ops.shapes >= 0)])
    for code in codes.tolist():
        found |= set(tensors_in(graph.string(code)))
    found |= {tuple(part) for part in _called(graph, PARAMETERS) if _is_shape(part)}
    return found | {tuple(reversed(shape)) for shape in found if len(shape) == _FLAT}


def _called(graph: ExecutionGraph, names: frozenset[str]) -> Iterator[object]:
    """Yield the shapes of arguments with these names in the operations' schemas: a tensor's, or a list of tensors'."""
    ops = graph.ops
    pairs = np.unique(np.stack([ops.name, ops.shapes]), axis=1).T if len(ops) else np.zeros((0, 2), np.int64)
    for name, shapes in pairs.tolist():
        rule = registry.forward_rule(graph.string(name))
        if rule is not None and shapes >= 0:
            yield from (part for argument, part in zip(rule.names, list_of(graph.string(shapes)), strict=False)
                        if argument in names)


def _states(graph: ExecutionGraph) -> set[Shape]:
    """Return samples × width of recurrent layers' states. By PyTorch's documentation a state is layers × samples ×
    width, and a layer's result steps × samples × width."""
    return {shape[-_FLAT:] for part in _called(graph, STATES) if isinstance(part, list)
            for shape in tensors_in(json.dumps([part])) if len(shape) > 1}
