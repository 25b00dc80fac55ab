"""Rules of operations for the layouts of their arguments and results.

A rule takes the arguments with one layout each and gives the results' layouts, or raises ``Inconsistent`` if no
operation of that name takes such arguments: a product's shared dimension, say, follows a size on one side only. Only
what the arguments decide is known; a result that depends on numbers the trace lacks has no rule.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from graph_predictor.sizes.layouts import Dim, Layout, NamedSizes, Shape, reshaped
from tracer.decode import value_of
from tracer.views import Argument

_WHOLE = re.compile(r"-?[0-9]{1,18}")


class Inconsistent(Exception):
    """No operation of this name takes arguments of these layouts."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor: its shape, how that follows the sizes, and its strides where known."""

    shape: Shape
    layout: Layout
    stride: Shape | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """One operation with layouts of its arguments.

    Attributes:
        sizes: the named sizes.
        tensors: those among the arguments, in order; of lists each.
        arguments: all as recorded.
        places: of each tensor, the argument it is, or is in.
        guess: what a tensor of a shape probably is, for results of a size that nothing else explains.
    """

    sizes: NamedSizes
    tensors: tuple[Tensor, ...]
    arguments: tuple[Argument, ...]
    places: tuple[int, ...]
    guess: Callable[[Shape], Layout]

    def number(self, place: int) -> int | None:
        """The whole number that an argument is; ``None`` where it is none, or not recorded."""
        text = self.arguments[place].value if place < len(self.arguments) else ""
        return int(text) if _WHOLE.fullmatch(text) else None

    def numbers(self, place: int) -> tuple[int, ...] | None:
        """The list of whole numbers that an argument is; ``None`` where it is none, or not recorded."""
        text = self.arguments[place].value if place < len(self.arguments) else ""
        found = value_of(text) if text.startswith("[") else None
        return tuple(found) if isinstance(found, list) and all(type(one) is int for one in found) else None


@dataclass(frozen=True, slots=True)
class Outcome:
    """A rule's answer: the results, and by position the arguments whose layout follows from the others."""

    results: tuple[Tensor, ...] = ()
    refined: dict[int, Layout] = field(default_factory=dict)


Rule = Callable[[Call], Outcome]
_RULES: dict[str, Rule] = {}


def rule_of(name: str) -> Rule:
    """The rule of an operation; any without one of its own is taken to combine its arguments elementwise."""
    kind, _, short = name.rpartition("::")
    if kind in ("c10d", "_c10d_functional", "nccl") or name.startswith("nccl:"):
        return _exchange
    return _RULES.get(short.rstrip("_") if kind == "aten" else name, _elementwise)


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(names, rule))
        return rule
    return register


def _elementwise(call: Call) -> Outcome:
    """Broadcast from the last dimension; no result where the shapes do not fit each other."""
    result = _broadcast(call.sizes, call.tensors)
    return Outcome() if result is None else Outcome((result,))


def _broadcast(sizes: NamedSizes, tensors: tuple[Tensor, ...]) -> Tensor | None:
    """Tensors broadcast to each other; ``None`` if their shapes do not allow it, or they have none."""
    rank = max((len(one.shape) for one in tensors), default=0)
    shape, layout = [1] * rank, [sizes.constant] * rank
    for one in tensors:
        for at, (size, dim) in enumerate(zip(one.shape, one.layout, strict=True), rank - len(one.shape)):
            if size == 1:
                continue
            if shape[at] == 1:
                shape[at], layout[at] = size, dim
            elif shape[at] != size:
                return None
            elif layout[at] != dim:
                raise Inconsistent
    strides = {one.stride for one in tensors if one.shape == tuple(shape)}
    return Tensor(tuple(shape), tuple(layout), strides.pop() if len(strides) == 1 else None) if rank else None


def contiguous(shape: Shape) -> Shape:
    """Strides of a new tensor."""
    return tuple(math.prod(shape[at + 1:]) for at in range(len(shape)))


@_rule("mm", "_scaled_mm", "bmm", "matmul", "_int_mm", "linalg_matmul")
def _product(call: Call) -> Outcome:
    return _multiplied(call.tensors[:2])


@_rule("addmm", "baddbmm", "addbmm", "_addmm_activation")
def _added_product(call: Call) -> Outcome:
    outcome = _multiplied(call.tensors[1:3])
    for result in outcome.results:
        _broadcast(call.sizes, (call.tensors[0], result))
    return outcome


def _multiplied(pair: tuple[Tensor, ...]) -> Outcome:
    if len(pair) != 2 or min(len(one.shape) for one in pair) < 2:
        return Outcome()
    a, b = pair
    if a.layout[-1] != b.layout[-2] or (len(a.shape) == len(b.shape) and a.layout[:-2] != b.layout[:-2]):
        raise Inconsistent
    outer = a if len(a.shape) >= len(b.shape) else b
    shape = (*outer.shape[:-2], a.shape[-2], b.shape[-1])
    return Outcome((Tensor(shape, (*outer.layout[:-2], a.layout[-2], b.layout[-1]), contiguous(shape)),))


@_rule("linear")
def _linear(call: Call) -> Outcome:
    if len(call.tensors) < 2 or not call.tensors[0].shape or len(call.tensors[1].shape) != 2:
        return Outcome()
    a, weight = call.tensors[:2]
    if a.layout[-1] != weight.layout[-1]:
        raise Inconsistent
    return Outcome((Tensor((*a.shape[:-1], weight.shape[0]), (*a.layout[:-1], weight.layout[0])),))


@_rule("convolution", "conv1d", "conv2d", "conv3d", "_convolution", "cudnn_convolution", "mkldnn_convolution",
       "convolution_backward", "slow_conv2d_forward", "_slow_conv2d_forward", "miopen_convolution",
       "max_pool2d_with_indices", "avg_pool2d", "index", "index_put",
       "_index_put_impl", "gather", "scatter", "scatter_add", "index_select",
       "embedding_dense_backward", "topk", "sort", "lstm", "gru", "_cudnn_rnn",
       "set_data", "resize", "as_strided", "set", "unfold", "repeat", "one_hot")
def _unknown(call: Call) -> Outcome:
    """A result whose shape the arguments' shapes alone do not tell."""
    del call
    return Outcome()


@_rule("native_batch_norm", "cudnn_batch_norm", "batch_norm", "miopen_batch_norm", "_batch_norm_impl_index",
       "native_batch_norm_backward", "cudnn_batch_norm_backward", "miopen_batch_norm_backward",
       "_native_batch_norm_legit", "_native_batch_norm_legit_functional", "_batch_norm_with_update",
       "batch_norm_backward")
def _by_channel(call: Call) -> Outcome:
    """Statistics and parameters of channels, however many samples there are."""
    refined = {at: call.sizes.constants(one.shape) for at, one in enumerate(call.tensors) if len(one.shape) == 1}
    wide = [one for one in call.tensors if len(one.shape) > 1]
    if len({one.layout for one in wide}) > 1:
        raise Inconsistent
    return Outcome(tuple(wide[:1]), refined)


@_rule("nll_loss", "nll_loss_forward", "nll_loss_backward", "nll_loss_nd", "nll_loss2d_forward",
       "nll_loss2d_backward", "cross_entropy_loss")
def _classified(call: Call) -> Outcome:
    """A class for each sample."""
    wide = [one for one in call.tensors if one.shape][:2]
    if len(wide) == 2 and wide[0].layout[0] != wide[1].layout[0]:
        raise Inconsistent
    return Outcome((wide[0],)) if wide else Outcome()


@_rule("t", "numpy_T", "mT", "adjoint")
def _transposed(call: Call) -> Outcome:
    return _permuted(call, tuple(reversed(range(len(call.tensors[0].shape))))) if call.tensors else Outcome()


@_rule("transpose", "swapaxes")
def _swapped(call: Call) -> Outcome:
    first, second = call.number(1), call.number(2)
    if not call.tensors or first is None or second is None:
        return Outcome()
    order = list(range(len(call.tensors[0].shape)))
    if not order:
        return Outcome()
    order[first], order[second] = order[second], order[first]
    return _permuted(call, tuple(order))


@_rule("permute")
def _permute(call: Call) -> Outcome:
    order = call.numbers(1)
    rank = len(call.tensors[0].shape) if call.tensors else 0
    if order is None or sorted(one % rank for one in order) != list(range(rank)):
        return Outcome()
    return _permuted(call, tuple(one % rank for one in order))


def _permuted(call: Call, order: tuple[int, ...]) -> Outcome:
    one = call.tensors[0]
    stride = None if one.stride is None or len(one.stride) != len(order) else tuple(one.stride[at] for at in order)
    return Outcome((Tensor(tuple(one.shape[at] for at in order), tuple(one.layout[at] for at in order), stride),))


@_rule("view", "_unsafe_view", "reshape", "_reshape_alias", "_view_copy")
def _viewed(call: Call) -> Outcome:
    target = call.numbers(1)
    return Outcome() if target is None or not call.tensors else _as(call, target)


@_rule("flatten")
def _flat(call: Call) -> Outcome:
    first, last = call.number(1), call.number(2)
    if not call.tensors or first is None or last is None or not call.tensors[0].shape:
        return Outcome()
    shape = call.tensors[0].shape
    first, last = first % len(shape), last % len(shape)
    return _as(call, (*shape[:first], math.prod(shape[first:last + 1]), *shape[last + 1:]))


@_rule("unsqueeze")
def _unsqueezed(call: Call) -> Outcome:
    at = call.number(1)
    if not call.tensors or at is None:
        return Outcome()
    one = call.tensors[0]
    at %= len(one.shape) + 1
    return Outcome((Tensor((*one.shape[:at], 1, *one.shape[at:]),
                           (*one.layout[:at], call.sizes.constant, *one.layout[at:])),))


@_rule("squeeze")
def _squeezed(call: Call) -> Outcome:
    if not call.tensors or not call.tensors[0].shape:
        return Outcome()
    one, at = call.tensors[0], call.number(1)
    keep = [i for i, size in enumerate(one.shape)
            if size != 1 or (at is not None and i != at % len(one.shape))]
    return Outcome((Tensor(tuple(one.shape[i] for i in keep), tuple(one.layout[i] for i in keep)),))


def _as(call: Call, target: Shape) -> Outcome:
    """The first tensor's elements in another shape, of which one size may be -1."""
    one = call.tensors[0]
    elements, known = math.prod(one.shape), math.prod(size for size in target if size >= 0)
    if -1 in target:
        if not known or elements % known:
            return Outcome()
        target = tuple(elements // known if size < 0 else size for size in target)
    if math.prod(target) != elements:
        return Outcome()
    layout = reshaped(call.sizes, one.shape, one.layout, target)
    return Outcome() if layout is None else Outcome((Tensor(target, layout),))


@_rule("expand")
def _expanded(call: Call) -> Outcome:
    target = call.numbers(1)
    if target is None or not call.tensors:
        return Outcome()
    one = call.tensors[0]
    new = len(target) - len(one.shape)
    if new < 0:
        return Outcome()
    shape = tuple(one.shape[at - new] if size < 0 and at >= new else size for at, size in enumerate(target))
    guessed = call.guess(shape)
    layout = tuple(one.layout[at - new] if at >= new and one.shape[at - new] == size else guessed[at]
                   for at, size in enumerate(shape))
    return Outcome((Tensor(shape, layout),))


@_rule("slice", "narrow", "slice_backward")
def _sliced(call: Call) -> Outcome:
    at, start, stop = (call.number(place) for place in (1, 2, 3))
    if not call.tensors or not call.tensors[0].shape or at is None or start is None or stop is None:
        return Outcome()
    one = call.tensors[0]
    at %= len(one.shape)
    size = one.shape[at]
    step = call.number(4) or 1
    if len(call.arguments) < 5:  # aten::narrow gives a length
        stop = start + stop
    start, stop = (min(max(end + size if end < 0 else end, 0), size) for end in (start, stop))
    count = max(-(-(stop - start) // step), 0)
    shape = (*one.shape[:at], count, *one.shape[at + 1:])
    return Outcome((Tensor(shape, (*one.layout[:at], _part(call, one, at, count, shape), *one.layout[at + 1:])),))


_FEW = 2
"""Elements that a slice leaves out of a dimension whatever its size (a class token, the last target)."""


def _part(call: Call, one: Tensor, at: int, count: int, shape: Shape) -> Dim:
    """Return how ``count`` elements of a dimension follow the sizes: less a few, or in proportion."""
    dim, size = one.layout[at], one.shape[at]
    if not dim.follows:
        guessed = call.guess(shape)[at]
        leads = any(power and leading for power, leading in zip(guessed.powers, call.sizes.leading, strict=True))
        return dim if count == size or leads else guessed
    if size - count <= _FEW < count:
        return Dim(dim.powers, dim.fixed - (size - count))
    return Dim(dim.powers) if count > 1 and size % count == 0 else call.sizes.constant if count <= 1 else Dim(
        dim.powers)


@_rule("select")
def _selected(call: Call) -> Outcome:
    at = call.number(1)
    if not call.tensors or not call.tensors[0].shape or at is None:
        return Outcome()
    one = call.tensors[0]
    at %= len(one.shape)
    return Outcome((Tensor((*one.shape[:at], *one.shape[at + 1:]), (*one.layout[:at], *one.layout[at + 1:])),))


@_rule("split_with_sizes", "split", "chunk", "unsafe_split", "unsafe_chunk")
def _split(call: Call) -> Outcome:
    """Parts of a dimension that follows nothing; parts of samples are as many as the program says."""
    counts, at = call.numbers(1), call.number(2)
    if not call.tensors or not call.tensors[0].shape or counts is None or at is None:
        return Outcome()
    one = call.tensors[0]
    at %= len(one.shape)
    whole = one.layout[at].powers
    return Outcome(tuple(
        Tensor((*one.shape[:at], count, *one.shape[at + 1:]), (*one.layout[:at], Dim(whole), *one.layout[at + 1:]))
        for count in dict.fromkeys(counts)))


@_rule("cat", "concat", "concatenate")
def _joined(call: Call) -> Outcome:
    parts = [one for one in call.tensors if one.shape and one.shape != (0,)]
    at = call.number(1)
    if not parts or len({len(one.shape) for one in parts}) != 1:
        return Outcome()
    at = (at or 0) % len(parts[0].shape)
    beside = {(one.shape[:at], one.shape[at + 1:]) for one in parts}
    if len(beside) != 1:
        return Outcome()
    if len({(one.layout[:at], one.layout[at + 1:]) for one in parts}) != 1:
        raise Inconsistent
    powers = {one.layout[at].powers for one in parts if one.layout[at].follows}
    if len(powers) > 1:
        return Outcome()
    fixed = sum(one.layout[at].fixed if one.layout[at].follows else one.shape[at] for one in parts)
    dim = Dim(powers.pop(), fixed) if powers else call.sizes.constant
    first = parts[0]
    return Outcome((Tensor((*first.shape[:at], sum(one.shape[at] for one in parts), *first.shape[at + 1:]),
                           (*first.layout[:at], dim, *first.layout[at + 1:])),))


@_rule("stack")
def _stacked(call: Call) -> Outcome:
    if not call.tensors or len({one.shape for one in call.tensors}) != 1:
        return Outcome()
    if len({one.layout for one in call.tensors}) != 1:
        raise Inconsistent
    one = call.tensors[0]
    at = (call.number(1) or 0) % (len(one.shape) + 1)
    return Outcome((Tensor((*one.shape[:at], len(call.tensors), *one.shape[at:]),
                           (*one.layout[:at], call.sizes.constant, *one.layout[at:])),))


@_rule("sum", "mean", "amax", "amin", "std", "var", "norm", "linalg_vector_norm", "logsumexp", "prod", "all", "any")
def _reduced(call: Call) -> Outcome:
    gone = call.numbers(1)
    if not call.tensors or not call.tensors[0].shape or gone is None:
        return Outcome()
    one = call.tensors[0]
    away = {at % len(one.shape) for at in gone} or set(range(len(one.shape)))
    if len(call.arguments) > 2 and call.arguments[2].value == "True":
        return Outcome((Tensor(tuple(1 if at in away else size for at, size in enumerate(one.shape)),
                               tuple(call.sizes.constant if at in away else dim
                                     for at, dim in enumerate(one.layout))),))
    keep = [at for at in range(len(one.shape)) if at not in away]
    return Outcome((Tensor(tuple(one.shape[at] for at in keep), tuple(one.layout[at] for at in keep)),))


@_rule("embedding")
def _embedded(call: Call) -> Outcome:
    if len(call.tensors) < 2 or len(call.tensors[0].shape) != 2:
        return Outcome()
    weight, indices = call.tensors[:2]
    return Outcome((Tensor((*indices.shape, weight.shape[1]), (*indices.layout, call.sizes.constant)),))


@_rule("_embedding_bag", "embedding_bag", "_embedding_bag_forward_only")
def _bagged(call: Call) -> Outcome:
    """A row for each bag; one fewer than offsets where the last of these ends the list."""
    if len(call.tensors) < 3 or len(call.tensors[0].shape) != 2:
        return Outcome()
    weight, _, offsets = call.tensors[:3]
    ends = any(argument.value == "True" for argument in call.arguments[7:8])
    count = offsets.shape[0] - ends
    dim = Dim(offsets.layout[0].powers, max(offsets.layout[0].fixed - ends, 0))
    return Outcome((Tensor((count, weight.shape[1]), (dim, call.sizes.constant)),))


@_rule("empty", "zeros", "ones", "full", "randn", "rand", "empty_strided", "new_empty", "new_zeros", "new_ones",
       "new_full", "new_empty_strided", "randint", "normal")
def _created(call: Call) -> Outcome:
    """A new tensor, of sizes that were written down."""
    found: Any = next((numbers for place in range(min(len(call.arguments), 3))
                       if (numbers := call.numbers(place)) is not None), None)
    return Outcome() if not found else Outcome((Tensor(found, call.guess(found)),))


def _exchange(call: Call) -> Outcome:
    """Return what a collective takes and gives follows the same sizes, whatever share of it each rank has."""
    flat = [at for at, one in enumerate(call.tensors) if one.shape]
    known = [call.tensors[at].layout[0] for at in flat if call.tensors[at].layout[0].follows]
    if not known:
        return Outcome(tuple(call.tensors[at] for at in flat))
    dim = Dim(known[0].powers)
    refined = {at: (dim, *call.tensors[at].layout[1:]) for at in flat if len(call.tensors[at].shape) == 1}
    return Outcome(tuple(Tensor(call.tensors[at].shape, refined.get(at, call.tensors[at].layout)) for at in flat),
                   refined)


PRODUCTS: frozenset[Rule] = frozenset({_product, _added_product, _linear})
"""Rules of products of matrices."""
GUESSING: frozenset[Rule] = frozenset({_expanded, _sliced, _created})
"""Rules that ask what a shape probably is, whose answer changes as the step goes on."""
