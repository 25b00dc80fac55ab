"""``SizeFlow``: find the dimensions that follow a named size, by following a step's tensors between operations.

A trace names no tensors, only shapes. An argument is therefore looked for among earlier tensors: first the arguments of
the operation around it, then the latest result of its shape (and strides, if recorded). Several may fit, so each tensor
keeps its possible layouts, the likeliest first. Each operation rules out layouts that do not fit together, and results
would hold the samples twice. A layout that is ruled out once is ruled out everywhere. So a product of a gradient and a
weight decides which of the two was the matrix that was transposed before it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from graph_predictor.recorded.module_paths import ACCUMULATE
from graph_predictor.sizes.layout_rules import GUESSING, PRODUCTS, Call, Inconsistent, Outcome, Tensor, rule_of
from graph_predictor.sizes.layouts import Layout, NamedSizes, Shape, reshaped, total
from tracer.graph import NONE, ExecutionGraph, Phase
from tracer.views import Argument, arguments

MOST_LAYOUTS = 4
"""Most layouts that are kept for one tensor."""
MOST_TOGETHER = 256
"""Most combinations of layouts of an operation's arguments that are tried."""
MOST_RECENT = 4
"""Number of the latest results of one shape among which an argument is looked for."""
FAR = 100
"""Number of operations after which a parameter is likelier than a result of the same shape."""
ALONE = 50
"""Cost of arguments that do not fit each other, more than of any that do. A layout costs its place in its list."""
TWICE = 20
"""Cost of a result that holds the samples twice. Few programs make one, and only from two tensors that are surely data
(a contrastive loss). A tensor with as many rows as samples may also be a parameter."""
OUT_OF_PLACE = 1.0
"""Cost of a result whose samples do not come first."""
NO_SAMPLES = 2.5
"""Cost of a product that takes no samples, or in forward returns none. Nearly all products have samples, so the cost is
more than the second choices of two arguments."""
CLEAR = 1.0
"""An operation decides for its cheapest choice if all others cost at least this much more."""
OF_GRADIENTS = frozenset({"t", "transpose", "permute", "view", "reshape", "_reshape_alias", "detach", "copy", "clone",
                          "to", "_to_copy", "mul", "div", "add", "contiguous"})
"""Operations that a parameter's gradient goes through on its way to the optimizer."""


class Role(Enum):
    """An argument's role, by its name in the operation's schema."""

    PARAMETER = "parameter"
    DATA = "data"
    """Samples, indices, their gradients: no parameter."""
    ANY = "any"


@dataclass(slots=True, eq=False)
class Value:
    """A tensor of the step.

    Attributes:
        shape: its sizes.
        layouts: its possible layouts, the likeliest first.
        known: whether the layouts come from an operation or a name, and not from the shape alone.
        stride: its strides, if known.
        made: number of the operation that made it, or first used it.
        gradient: whether it is a parameter's gradient, or a view of one.
        viewed, views: the tensor that this one is (or may be) a view of, and its layout for each layout of this one.
    """

    shape: Shape
    layouts: list[Layout]
    known: bool
    stride: Shape | None = None
    made: int = 0
    gradient: bool = False
    viewed: Value | None = None
    views: dict[Layout, Layout] = field(default_factory=dict)

    def narrow(self, layouts: list[Layout]) -> None:
        """Keep only these layouts, the likeliest first; likewise for the tensor that this one is a view of."""
        self.layouts[:] = layouts
        self.known |= len(layouts) == 1
        if self.viewed is not None and len(self.viewed.layouts) > 1 and layouts[0] in self.views:
            self.viewed.narrow(list(dict.fromkeys(self.views[one] for one in layouts if one in self.views)))

    @property
    def undecided(self) -> bool:
        """Return whether the step leaves open by which factor the tensor grows."""
        return not self.known and len({total(layout) for layout in self.layouts}) > 1


Use = tuple[int, int]
"""An argument's place, and the place in its list of tensors; -1 if the argument is no list."""


@dataclass(slots=True)
class _Pool:
    """Results by shape, the latest last."""

    by_shape: dict[Shape, list[Value]] = field(default_factory=dict)
    by_elements: dict[int, Value] = field(default_factory=dict)

    def add(self, value: Value) -> None:
        self.by_shape.setdefault(value.shape, []).append(value)
        self.by_elements[math.prod(value.shape)] = value

    def again(self, value: Value) -> None:
        """Make a result the latest of its shape."""
        others = self.by_shape[value.shape]
        others.append(others.pop(next(at for at in reversed(range(len(others))) if others[at] is value)))
        self.by_elements[math.prod(value.shape)] = value

    def recent(self, shape: Shape) -> list[Value]:
        return self.by_shape.get(shape, [])[-MOST_RECENT:][::-1]


@dataclass(frozen=True, slots=True)
class _Around:
    """The operation that encloses another: its arguments, and the number at which it began."""

    values: tuple[Value, ...] = ()
    began: int = 0


class SizeFlow:
    """The layouts of every tensor that a rank's operations take.

    Args:
        graph: the graph of the rank.
        sizes: the named sizes.
        by_shape: returns the layouts that a tensor may have by its shape alone, the likeliest first.
        sure: returns the layout of a shape that another operation's arguments determine; ``None`` if none do.
        parameters: shapes of parameters.
        role: returns an argument's role in the schema, by operation and place.

    Attributes:
        changed: shapes of parameters that would change at the new sizes.
    """

    def __init__(self, graph: ExecutionGraph, sizes: NamedSizes, by_shape: Callable[[Shape], list[Layout]],
                 sure: Callable[[Shape], Layout | None], parameters: set[Shape],
                 role: Callable[[str, int], Role]) -> None:
        self.graph, self.sizes, self.parameters = graph, sizes, parameters
        self._guess, self._sure, self._role = by_shape, sure, role
        self._pool = _Pool()
        self._wide = any(old in shape for old in sizes.old for shape in parameters)
        self._data: set[Shape] = set()  # shapes of tensors that are surely data (see ``_gives_data``)
        self._now = 0
        self._began: dict[int, int] = {}
        self.changed: list[Shape] = []
        self._guesses: dict[tuple[Shape, int], list[Layout]] = {}
        self._known_choices: dict[tuple[Any, ...], list[_Choice]] = {}
        self._of_forward: dict[int, list[Value]] = {}
        self._forward: dict[tuple[int, str], int] = {}
        self._open: list[tuple[int, list[Value]]] = []  # operations around the next one, and their results
        self._inputs: dict[int, dict[Use, Value]] = {}
        self._decoded: dict[tuple[int, ...], list[Argument]] = {}
        for op in np.argsort(graph.ops.start_ns, kind="stable").tolist():
            self._visit(op)

    def values(self, op: int) -> dict[Use, Value]:
        """Return the tensors among an operation's arguments."""
        return self._inputs.get(op, {})

    def every(self) -> Iterator[Value]:
        """Yield the tensors among all operations' arguments, in the step's order."""
        for values in self._inputs.values():
            yield from values.values()

    def values_of(self, name: str, taken: list[Argument]) -> dict[Use, Value]:
        """Return the tensors of an operation that is not in the step, with layouts of the step's equal shapes."""
        found = self._look_up(name, taken, Phase.OTHER, _Around())
        self._decide(name, taken, found, Phase.BACKWARD)
        return found

    def guessed(self, shape: Shape) -> Layout:
        """Return the likeliest layout of a shape: that of its latest tensor, else by the shape alone."""
        sure = self._sure(shape)
        if sure is not None:
            return sure
        recent = self._pool.recent(shape)
        return recent[0].layouts[0] if recent else self._by_shape(shape)[0]

    def _visit(self, op: int) -> None:
        ops = self.graph.ops
        name, taken = self.graph.string(int(ops.name[op])), self._arguments(op)
        self._now += 1
        self._began[op] = self._now
        phase, parent, sequence = int(ops.phase[op]), int(ops.parent[op]), int(ops.sequence[op])
        self._close(parent)
        if not taken:
            return
        outer = tuple(self._inputs.get(parent, {}).values()) if parent >= 0 else ()
        if phase == Phase.BACKWARD and parent >= 0:
            outer = (*outer, *self._saved(parent))
        if phase == Phase.BACKWARD and "Backward" in name and sequence >= 0:
            outer = (*self._of_forward.get(sequence, ()), *outer)
        found = self._look_up(name, taken, phase, _Around(outer, self._began.get(parent, 0)))
        if found:
            self._inputs[op] = found
        if _is_constant(name, phase):
            return
        results = self._decide(name, taken, found, phase)
        self._open.append((op, results))
        if phase != Phase.BACKWARD and sequence >= 0:
            self._of_forward.setdefault(sequence, []).extend(results)
            self._forward.setdefault((sequence, _node(name)), op)

    def _close(self, parent: int) -> None:
        """Make the results of operations that have ended the latest ones. Results of operations within them are seldom
        used next: a product's own factors, a tensor before it is transposed."""
        while self._open and self._open[-1][0] != parent:
            _, results = self._open.pop()
            for value in results:
                self._pool.again(value)

    def _saved(self, node: int) -> tuple[Value, ...]:
        """Return tensors that autograd may have saved for a backward node: its forward operation's arguments."""
        ops = self.graph.ops
        key = int(ops.sequence[node]), _node(self.graph.string(int(ops.name[node])))
        return tuple(self._inputs.get(self._forward.get(key, NONE), {}).values()) if key[0] >= 0 else ()

    def _arguments(self, op: int) -> list[Argument]:
        ops = self.graph.ops
        key = (int(ops.shapes[op]), int(ops.dtypes[op]), int(ops.strides[op]), int(ops.scalars[op]))
        if key[0] < 0:
            return []
        if key not in self._decoded:
            self._decoded[key] = arguments(self.graph, op)
        return self._decoded[key]

    def _look_up(self, name: str, taken: list[Argument], phase: int, around: _Around) -> dict[Use, Value]:
        found: dict[Use, Value] = {}
        short = name.rpartition("::")[2].rstrip("_")
        for place, argument in enumerate(taken):
            shape = argument.shape
            if not shape:
                continue
            nested = any(isinstance(part, tuple) for part in shape)
            for at, one in enumerate(shape if nested else (shape,)):
                if not isinstance(one, tuple) or not one or not all(type(size) is int for size in one):
                    continue
                stride = argument.stride if not nested else (argument.stride or (None,) * len(shape))[at]
                role = self._role(name, place)
                if _is_constant(name, phase) or role == Role.PARAMETER:
                    value = Value(one, [self.sizes.constants(one)], True, stride, self._now)
                else:
                    value = self._value(one, stride or None, around, role, short)
                found[place, at if nested else -1] = value
        if rule_of(name) in PRODUCTS and len(found) > 1:
            (first, a), (second, b) = list(found.items())[-2:]
            if a is b:  # a product of a matrix with itself is rarer than one of two matrices of the same shape
                found[first], found[second] = self._either(a), self._either(b)
        return found

    def _either(self, value: Value) -> Value:
        """Return a tensor with the layouts of all recent ones of its shape (and strides, if known)."""
        layouts = _in_turn([value, *(one for one in self._pool.recent(value.shape)
                                     if value.stride is None or one.stride in (None, value.stride))])
        layouts = list(dict.fromkeys((*layouts, *self._by_shape(value.shape))))
        return Value(value.shape, layouts[:MOST_LAYOUTS], value.known, value.stride, self._now)

    def _value(self, shape: Shape, stride: Shape | None, around: _Around, role: Role,
               name: str) -> Value:
        """Return an argument's tensor: the nearest earlier one, or a new one with all of its possible layouts."""
        sure = self._sure(shape)
        if sure is not None:
            return Value(shape, [sure], True, stride, self._now)
        recent = self._pool.recent(shape)
        near = [*(one for one in recent if one.made > around.began),
                *(one for one in around.values if one.shape == shape),
                *(one for one in recent if self._now - FAR < one.made <= around.began)]
        far = [one for one in recent if one not in near]
        if name not in OF_GRADIENTS:
            near, far = ([one for one in some if not one.gradient] for some in (near, far))
        if stride is not None:
            near = [one for one in near if one.stride in (None, stride)]
            far = [one for one in far if one.stride in (None, stride)] or far
        if near and near[0].stride is None:
            near[0].stride = stride
        if near and len(near[0].layouts) > 1 and shape not in self.parameters:
            return near[0]  # the same tensor: a layout ruled out at one use is ruled out at all
        guesses = self._by_shape(shape)
        layouts = _in_turn(near)
        if shape in self.parameters and role != Role.DATA:
            layouts.append(self.sizes.constants(shape))
        layouts += _in_turn(far)
        known = bool(near) or (bool(far) and shape not in self.parameters)
        if not layouts:
            layouts = self._of_as_many(shape)
            known = bool(layouts)
        layouts = list(dict.fromkeys((*layouts, *guesses)))
        constants = self.sizes.constants(shape)
        if role == Role.DATA and len(layouts) > 1 and constants in layouts and (shape in self.parameters or not any(
                one.known and one.layouts[0] == constants for one in (*near, *far))):
            layouts.remove(constants)
        layouts = layouts[:MOST_LAYOUTS]
        if near and layouts == near[0].layouts:
            return near[0]
        value = Value(shape, layouts, known or len(layouts) == 1, stride, self._now)
        if near:
            value.viewed = near[0]
            value.views = {one: one for one in near[0].layouts if one != constants}
        return value

    def _by_shape(self, shape: Shape) -> list[Layout]:
        """Return the possible layouts of a tensor by its shape alone."""
        key = shape, len(self.sizes.derived)
        found = self._guesses.get(key)
        if found is None:
            found = self._guess(shape)
            if shape in self.parameters:
                found = list(dict.fromkeys((self.sizes.constants(shape), *found)))
            self._guesses[key] = found
        return found

    def _of_as_many(self, shape: Shape) -> list[Layout]:
        """Return the layouts of the latest result with as many elements, as if a view had reshaped it."""
        one = self._pool.by_elements.get(math.prod(shape))
        if one is None or one.shape in self.parameters:
            return []
        found = (reshaped(self.sizes, one.shape, layout, shape) for layout in one.layouts)
        return [layout for layout in found if layout is not None]

    def _decide(self, name: str, taken: list[Argument], found: dict[Use, Value], phase: int) -> list[Value]:
        """Rule out layouts of arguments that do not fit together; return the results."""
        values = list(found.values())
        choices = self._choices(name, taken, found, phase)
        best = choices[0]
        if phase == Phase.FORWARD:
            self.changed += self._parameters_changed(name, values, best)
        possible = [one for one in choices if one.cost < TWICE]
        for at, value in enumerate(values):
            likely = list(dict.fromkeys(one.layouts[at] for one in possible))
            if at in best.outcome.refined:
                value.narrow([best.outcome.refined[at]])
            elif len(values) > 1 and possible and all(
                    one.cost >= best.cost + CLEAR or one.layouts[at] == best.layouts[at] for one in possible):
                value.narrow(likely[:1])
            elif likely and len(value.layouts) > 1:
                value.narrow(likely)
        if self._gives_data(name, values):
            self._data.update(one.shape for one in best.outcome.results if one.shape not in self.parameters)
        results = []
        known = all(value.known for value in values) if values else True
        for number, one in enumerate(best.outcome.results):
            others = [other.outcome.results[number].layout for other in possible
                      if len(other.outcome.results) > number and other.outcome.results[number].shape == one.shape]
            layouts = list(dict.fromkeys((one.layout, *others)))[:MOST_LAYOUTS]
            results.append(Value(one.shape, layouts, known, one.stride, self._now))
            for size, dim in zip(one.shape, one.layout, strict=True):
                if dim.rounded and size > 1:
                    self.sizes.derived.setdefault(size, dim)
            results[-1].gradient = self._is_gradient(name, values, best)
            if len(values) == 1 and len(layouts) > 1:
                results[-1].viewed = values[0]
                results[-1].views = {other.outcome.results[number].layout: other.layouts[0]
                                     for other in reversed(possible) if len(other.outcome.results) > number}
            self._pool.add(results[-1])
        return results

    def _parameters_changed(self, name: str, values: list[Value], best: _Choice) -> list[Shape]:
        """Return an operation's parameters that would differ at the new sizes: a layer over all of a map, positions of
        patches. Such a parameter meets a dimension that follows a size but has another one."""
        def loses(value: Value, layout: Layout, parameter: Shape) -> bool:
            return value.known and any(
                was.follows and not now.follows and size in self.sizes.derived and size in parameter
                for size, was, now in zip(value.shape, value.layouts[0], layout, strict=True))

        found = [parameter for parameter in (value.shape for value in values if value.shape in self.parameters)
                 if any(loses(value, layout, parameter) for value, layout in zip(values, best.layouts, strict=True))]
        if name == "aten::embedding" and len(values) > 1 and math.prod(values[1].shape) == values[0].shape[0]:
            # every row of a table once: positions of a map or of frames; a larger map has more of them
            found += [values[0].shape for size, dim in zip(values[1].shape, best.layouts[1], strict=True)
                      if size == values[0].shape[0] and dim.follows and (dim.rounded or dim.fixed)]
        return found

    def _is_gradient(self, name: str, values: list[Value], best: _Choice) -> bool:
        """Return whether a result is the gradient of a parameter: a product that sums over the samples, or a view of
        one."""
        if rule_of(name) in PRODUCTS:
            return all(any(dim.follows for dim in layout) for layout in best.layouts[-2:]) and not any(
                dim.follows for one in best.outcome.results for dim in one.layout)
        return len(values) == 1 and values[0].gradient

    def _gives_data(self, name: str, values: list[Value]) -> bool:
        """Return whether a result is surely data: made from data, or by a layer with only one argument that has no
        parameter's shape. Never, if a parameter has a named size."""
        if self._wide:
            return False
        if any(value.shape in self._data for value in values):
            return True
        return rule_of(name) in PRODUCTS and [value.shape in self.parameters for value in values[:3]].count(False) == 1

    def _choices(self, name: str, taken: list[Argument], found: dict[Use, Value], phase: int) -> list[_Choice]:
        """Return all combinations of one layout for each argument, the likeliest first."""
        rule, values = rule_of(name), list(found.values())
        first = {id(value): at for at, value in reversed(list(enumerate(values)))}
        key = (name, phase == Phase.BACKWARD, tuple(taken),
               tuple((first[id(value)], value.shape, value.stride, value.shape in self._data, *value.layouts)
                     for value in values))
        if rule not in GUESSING and key in self._known_choices:
            return self._known_choices[key]
        distinct = {id(value): value for value in values}
        possible = {key: value.layouts for key, value in distinct.items()}
        if rule in PRODUCTS:  # a matrix not seen before may be a parameter that was looked up or computed
            for value in (one for one in values[-2:] if one.shape not in self._data):
                possible[id(value)] = list(dict.fromkeys((*value.layouts, self.sizes.constants(value.shape))))
        while math.prod(map(len, possible.values())) > MOST_TOGETHER:
            possible = {key: layouts[:max(len(layouts) - 1, 1)] for key, layouts in possible.items()}
        choices: list[_Choice] = []
        for ranks in itertools.product(*(range(len(one)) for one in possible.values())):
            chosen = {key: possible[key][rank] for key, rank in zip(possible, ranks, strict=True)}
            layouts = tuple(chosen[id(value)] for value in values)
            tensors = tuple(Tensor(value.shape, layout, value.stride)
                            for value, layout in zip(values, layouts, strict=True))
            cost = float(sum(ranks))
            try:
                outcome = rule(Call(self.sizes, tensors, tuple(taken), self.guessed))
            except Inconsistent:
                outcome, cost = Outcome(), cost + ALONE
            sure = all(value.shape in self._data or not self.sizes.samples(one)
                       for value, one in zip(values, layouts, strict=True))
            held = max(map(self.sizes.samples, layouts), default=0)
            cost += sum(self._cost(one, 2 if sure else max(held, 1)) for one in outcome.results)
            if rule in PRODUCTS:
                working = layouts[-2:] if phase == Phase.BACKWARD else [one.layout for one in outcome.results]
                cost += NO_SAMPLES * (not any(dim.follows for layout in working for dim in layout))
            choices.append(_Choice(cost, layouts, outcome))
        self._known_choices[key] = sorted(choices, key=_cost_of)
        return self._known_choices[key]

    def _cost(self, result: Tensor, usual: int) -> float:
        """Return a result's cost: ``TWICE`` if it holds the samples more than ``usual`` times, plus ``OUT_OF_PLACE`` if
        they are not in its first dimension. Dimensions that are rounded shares of samples may be anywhere."""
        places = [at for at, dim in enumerate(result.layout) if self.sizes.samples((dim,)) and not dim.rounded]
        return TWICE * (self.sizes.samples(result.layout) > usual) + OUT_OF_PLACE * bool(places and places[0])


@dataclass(frozen=True, slots=True)
class _Choice:
    """Layouts of an operation's arguments, the results that follow, and their cost (higher is less likely)."""

    cost: float
    layouts: tuple[Layout, ...]
    outcome: Outcome


def _cost_of(choice: _Choice) -> float:
    return choice.cost


def _in_turn(values: list[Value]) -> list[Layout]:
    """Return all layouts: the likeliest of each tensor, then the second of each, and so on."""
    ranked = itertools.zip_longest(*(one.layouts for one in values))
    return [layout for rank in ranked for layout in rank if layout is not None]


def _node(name: str) -> str:
    """Return one name for an operation and its backward node: ``addmm`` for AddmmBackward0 and aten::addmm_."""
    short = name.rpartition("::")[2].rpartition(" ")[2].partition("Backward")[0]
    return short.replace("_", "").lower()


def _is_constant(name: str, phase: int) -> bool:
    """Return whether an operation works on parameters, gradients of parameters and the optimizer's states alone."""
    return phase == Phase.OPTIMIZER or name.startswith(ACCUMULATE)
