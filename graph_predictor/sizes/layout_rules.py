"""Rules that give the layouts of an operation's results from those of its arguments.

A rule takes one layout for each argument. It raises ``Inconsistent`` if no operation of that name takes such arguments;
for example, if a product's shared dimension follows a size on one side only. A result that depends on numbers missing
from the trace has no layout.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import wraps

from graph_predictor.sizes.layouts import Dim, Layout, NamedSizes, Shape, reshaped
from tracer.input_file import value_of
from tracer.views import Argument

Dims = list[tuple[int, Dim]]
"""Dimensions of a tensor: each one's size, and how it follows the named sizes."""
_WHOLE = re.compile(r"-?[0-9]{1,18}")
_FEW = 2
"""A slice that omits at most this many elements (a class token, the last target) omits as many at any size."""


class Inconsistent(Exception):
    """Raised by a rule if no operation of its name takes arguments of these layouts."""


class _Untold(Exception):
    """Raised by a rule if the trace lacks a number that decides the result."""


def whole_number(arguments: Sequence[Argument], place: int) -> int | None:
    """Return an argument as a whole number; ``None`` if it is another value, or not recorded."""
    text = arguments[place].value if place < len(arguments) else ""
    return int(text) if _WHOLE.fullmatch(text) else None


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor: its shape, how that follows the sizes, and its strides where known."""

    shape: Shape
    layout: Layout
    stride: Shape | None = None

    @property
    def dims(self) -> Dims:
        """Return the tensor's dimensions."""
        return list(zip(self.shape, self.layout, strict=True))


@dataclass(frozen=True, slots=True)
class Call:
    """One operation with layouts of its arguments.

    Attributes:
        sizes: the named sizes.
        tensors: the tensors among the arguments, in order, those of lists one by one; no scalars.
        arguments: all arguments, as recorded.
        guess: returns the probable layout of a shape, for results of a size that nothing else explains.
    """

    sizes: NamedSizes
    tensors: tuple[Tensor, ...]
    arguments: tuple[Argument, ...]
    guess: Callable[[Shape], Layout]

    def first(self) -> Tensor:
        """Return the first tensor. Raises ``_Untold`` without any."""
        if not self.tensors:
            raise _Untold
        return self.tensors[0]

    def number(self, place: int, otherwise: int | None = None) -> int:
        """Return the whole number that an argument is, else ``otherwise``. Raises ``_Untold`` without either."""
        found = whole_number(self.arguments, place)
        if found is None and otherwise is None:
            raise _Untold
        return found if found is not None else otherwise or 0

    def numbers(self, place: int) -> Shape:
        """Return the list of whole numbers that an argument is. Raises ``_Untold`` if it is no such list."""
        text = self.arguments[place].value if place < len(self.arguments) else ""
        found = value_of(text) if text.startswith("[") else None
        if not isinstance(found, list) or not all(type(one) is int for one in found):
            raise _Untold
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A rule's answer: the results, and layouts of arguments that follow from the other arguments, by position."""

    results: tuple[Tensor, ...] = ()
    refined: dict[int, Layout] = field(default_factory=dict)


Rule = Callable[[Call], Outcome]
_RULES: dict[str, Rule] = {}


def rule_of(name: str) -> Rule:
    """Return the rule of an operation. One without a rule of its own combines its arguments elementwise."""
    kind, _, short = name.rpartition("::")
    if kind in ("c10d", "_c10d_functional", "nccl") or name.startswith("nccl:"):
        return _exchange
    return _RULES.get(short.rstrip("_") if kind == "aten" else name, _elementwise)


def _rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for these operations. Its result is unknown where the trace lacks a number that decides it."""
    def register(rule: Rule) -> Rule:
        @wraps(rule)
        def guarded(call: Call) -> Outcome:
            try:
                return rule(call)
            except _Untold:
                return Outcome()

        _RULES.update(dict.fromkeys(names, guarded))
        return guarded
    return register


def _one(dims: Iterable[tuple[int, Dim]]) -> Outcome:
    """Return one result of these dimensions, whose strides are not known."""
    shape, layout = tuple(zip(*dims, strict=True)) or ((), ())
    return Outcome((Tensor(shape, layout),))


def _elementwise(call: Call) -> Outcome:
    """Return the tensors broadcast from the last dimension; no result where their shapes do not fit each other."""
    result = _broadcast(call.sizes, call.tensors)
    return Outcome() if result is None else Outcome((result,))


def _broadcast(sizes: NamedSizes, tensors: tuple[Tensor, ...]) -> Tensor | None:
    """Return tensors broadcast to each other; ``None`` if their shapes do not allow it, or all are scalars."""
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
    """Return the strides of a new tensor of a shape."""
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
    if len(call.tensors) < 2 or len(call.tensors[1].shape) != 2:
        return Outcome()
    a, weight = call.tensors[:2]
    if a.layout[-1] != weight.layout[-1]:
        raise Inconsistent
    return _one([*a.dims[:-1], weight.dims[0]])


@_rule("convolution_backward", "slow_conv2d_forward", "_slow_conv2d_forward", "max_pool2d_with_indices_backward",
       "avg_pool2d_backward", "index", "index_put",
       "_index_put_impl", "gather", "scatter", "scatter_add",
       "embedding_dense_backward", "sort", "lstm", "gru", "_cudnn_rnn", "mkldnn_rnn_layer_backward",
       "set_data", "resize", "set", "repeat", "one_hot")
def _unknown(call: Call) -> Outcome:
    """Return no result: the arguments' shapes alone do not determine it."""
    del call
    return Outcome()


@_rule("index_select")
def _picked(call: Call) -> Outcome:
    """Return one slice of a dimension for each index."""
    if len(call.tensors) < 2 or len(call.tensors[1].shape) != 1:
        raise _Untold
    dims = call.first().dims
    dims[call.number(1) % len(dims)] = call.tensors[1].dims[0]
    found = _one(dims).results[0]
    return Outcome((Tensor(found.shape, found.layout, contiguous(found.shape)),))


@_rule("mkldnn_rnn_layer")
def _recurrent_layer(call: Call) -> Outcome:
    """Return what one direction of a recurrent layer outputs at each step (steps × samples), and its two last states.

    Its first tensor is the input, its last two are the states (see ``kernel_models.families.recurrent``).
    """
    if len(call.tensors) < 3 or len(call.first().shape) != 3:
        return Outcome()
    (steps, samples, _), state = call.first().dims, call.tensors[-1].dims
    if samples != state[0]:
        raise Inconsistent
    given, last = _one([steps, samples, state[1]]).results[0], _one(state).results[0]
    return Outcome((given, last, last))


@_rule("native_batch_norm", "cudnn_batch_norm", "batch_norm", "miopen_batch_norm", "_batch_norm_impl_index",
       "native_batch_norm_backward", "cudnn_batch_norm_backward", "miopen_batch_norm_backward",
       "_native_batch_norm_legit", "_native_batch_norm_legit_functional", "_batch_norm_with_update",
       "batch_norm_backward")
def _by_channel(call: Call) -> Outcome:
    """Return the first tensor; statistics and parameters of channels (one dimension) follow no size."""
    refined = {at: call.sizes.constants(one.shape) for at, one in enumerate(call.tensors) if len(one.shape) == 1}
    wide = [one for one in call.tensors if len(one.shape) > 1]
    if len({one.layout for one in wide}) > 1:
        raise Inconsistent
    return Outcome(tuple(wide[:1]), refined)


@_rule("nll_loss", "nll_loss_forward", "nll_loss_backward", "nll_loss_nd", "nll_loss2d_forward",
       "nll_loss2d_backward", "cross_entropy_loss")
def _classified(call: Call) -> Outcome:
    """Return the first tensor, if there is one class for each sample."""
    if len({one.layout[0] for one in call.tensors[:2]}) > 1:
        raise Inconsistent
    return Outcome((call.first(),))


@_rule("t", "numpy_T", "mT", "adjoint")
def _transposed(call: Call) -> Outcome:
    return _permuted(call, range(len(call.first().shape))[::-1])


@_rule("transpose", "swapaxes")
def _swapped(call: Call) -> Outcome:
    first, second, order = call.number(1), call.number(2), list(range(len(call.first().shape)))
    order[first], order[second] = order[second], order[first]
    return _permuted(call, order)


@_rule("permute")
def _reordered(call: Call) -> Outcome:
    rank = len(call.first().shape)
    order = [one % rank for one in call.numbers(1)]
    return _permuted(call, order) if sorted(order) == list(range(rank)) else Outcome()


def _permuted(call: Call, order: Sequence[int]) -> Outcome:
    one = call.first()
    stride = None if one.stride is None or len(one.stride) != len(order) else tuple(one.stride[at] for at in order)
    return Outcome((Tensor(tuple(one.shape[at] for at in order), tuple(one.layout[at] for at in order), stride),))


@_rule("view", "_unsafe_view", "reshape", "_reshape_alias", "_view_copy")
def _viewed(call: Call) -> Outcome:
    return _as(call, call.numbers(1))


@_rule("flatten")
def _flat(call: Call) -> Outcome:
    shape = call.first().shape
    first, last = call.number(1) % len(shape), call.number(2) % len(shape)
    return _as(call, (*shape[:first], math.prod(shape[first:last + 1]), *shape[last + 1:]))


@_rule("unsqueeze")
def _unsqueezed(call: Call) -> Outcome:
    dims = call.first().dims
    dims.insert(call.number(1) % (len(dims) + 1), (1, call.sizes.constant))
    return _one(dims)


@_rule("squeeze")
def _squeezed(call: Call) -> Outcome:
    dims, place = call.first().dims, whole_number(call.arguments, 1)
    gone = range(len(dims)) if place is None else [place % len(dims)]
    return _one(dim for at, dim in enumerate(dims) if at not in gone or dim[0] != 1)


def _as(call: Call, target: Shape) -> Outcome:
    """Return the first tensor's elements in another shape; one size of ``target`` may be -1."""
    one = call.first()
    elements, known = math.prod(one.shape), math.prod(size for size in target if size >= 0)
    if -1 in target:
        if not known or elements % known:
            return Outcome()
        target = tuple(elements // known if size < 0 else size for size in target)
    if math.prod(target) != elements:
        return Outcome()
    layout = reshaped(call.sizes, one.shape, one.layout, target)
    stride = contiguous(target) if one.stride == contiguous(one.shape) else None
    return Outcome() if layout is None else Outcome((Tensor(target, layout, stride),))


@_rule("expand")
def _expanded(call: Call) -> Outcome:
    target, one = call.numbers(1), call.first()
    new = len(target) - len(one.shape)
    if new < 0:
        return Outcome()
    shape = tuple(one.shape[at - new] if size < 0 and at >= new else size for at, size in enumerate(target))
    guessed = call.guess(shape)
    return _one((size, one.layout[at - new] if at >= new and one.shape[at - new] == size else guessed[at])
                for at, size in enumerate(shape))


def _strided(call: Call, sizes: Sequence[tuple[int, int, int]], places: Sequence[int], *, up: bool = False) -> Dims:
    """Return the first tensor's dimensions after windows moved over some of them (PyTorch's documentation of
    convolutions and pooling)::

        out = (size + padded - window) / stride + 1          rounded down
        out = (size - 1) × stride - padded + window          transposed

    Args:
        call: the operation.
        sizes: for each place its stride, elements padded at both ends (in ``up`` less the output's padding), and window
            with its dilation.
        places: dimensions that windows move over.
        up: whether the convolution is transposed.
    """
    dims = call.first().dims
    for at, (stride, padded, window) in zip(places, sizes, strict=True):
        size, dim = dims[at]
        if stride < 1 or size < 1:
            raise _Untold
        if up:
            out, fixed = (size - 1) * stride - padded + window, (dim.fixed - 1) * stride - padded + window
            follows = Dim(dim.powers, fixed, dim.rounded)
        else:
            out = (size + padded - window) // stride + 1
            fraction = out - Fraction(size - dim.fixed, stride)
            whole = fraction.denominator == 1
            follows = Dim(dim.powers, int(fraction) if whole else fraction, dim.rounded or stride > 1)
        dims[at] = out, follows if dim.follows else call.sizes.constant
    return dims


def _each(numbers: Shape, count: int) -> Shape:
    """Return one number for each dimension; a single given number counts for all."""
    found = numbers * count if len(numbers) == 1 else numbers
    if len(found) != count:
        raise _Untold
    return found


def _convolved(call: Call, stride: int, padding: int, dilation: int, transposed: int | None) -> Outcome:
    """Return a convolution's result; ``stride`` to ``transposed`` are the places of these arguments."""
    if len(call.tensors) < 2 or len(call.tensors[0].shape) != len(call.tensors[1].shape):
        raise _Untold
    weight = call.tensors[1].shape
    count = len(weight) - 2
    places, up = range(2, 2 + count), transposed is not None and call.arguments[transposed].value == "True"
    strides, padded, dilated = (_each(call.numbers(place), count) for place in (stride, padding, dilation))
    more = _each(call.numbers((transposed or 0) + 1), count) if up else (0,) * count
    sizes = [(a, 2 * b - extra, c * (window - 1) + 1) for a, b, c, extra, window in zip(
        strides, padded, dilated, more, weight[2:], strict=True)]
    dims = _strided(call, sizes, places, up=up)
    groups = call.number(transposed + 2, 1) if up and transposed is not None else 1
    dims[1] = (weight[1] * groups if up else weight[0]), call.sizes.constant
    shape = tuple(size for size, _ in dims)
    return Outcome((Tensor(shape, tuple(dim for _, dim in dims)),))


@_rule("convolution", "_convolution", "conv1d", "conv2d", "conv3d")
def _convolution(call: Call) -> Outcome:
    return _convolved(call, 3, 4, 5, 6 if len(call.arguments) > 7 else None)


@_rule("mkldnn_convolution")
def _mkldnn_convolution(call: Call) -> Outcome:
    return _convolved(call, 4, 3, 5, None)


@_rule("cudnn_convolution", "miopen_convolution")
def _cudnn_convolution(call: Call) -> Outcome:
    first = 2 if len(call.tensors) < 3 else 3  # MIOpen's has a bias
    return _convolved(call, first + 1, first, first + 2, None)


@_rule("max_pool1d", "max_pool1d_with_indices", "max_pool2d", "max_pool2d_with_indices", "max_pool3d",
       "max_pool3d_with_indices", "mkldnn_max_pool2d")
def _max_pooled(call: Call) -> Outcome:
    return _pooled(call, call.numbers(4), call.arguments[5].value)


@_rule("avg_pool1d", "avg_pool2d", "avg_pool3d")
def _mean_pooled(call: Call) -> Outcome:
    return _pooled(call, (1,), call.arguments[4].value)


def _pooled(call: Call, dilation: Shape, ceiled: str) -> Outcome:
    window = call.numbers(1)
    rank = len(call.first().shape)
    count = max(len(window), 1)
    strides, padded, dilated = (_each(one, count) for one in (call.numbers(2) or window, call.numbers(3), dilation))
    sizes = [(a, 2 * b + (a - 1) * (ceiled == "True"), c * (size - 1) + 1)
             for a, b, c, size in zip(strides, padded, dilated, window, strict=True)]
    found = _one(_strided(call, sizes, range(rank - count, rank)))
    return Outcome(found.results * 2)  # max pooling also returns indices


@_rule("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "_adaptive_avg_pool2d",
       "_adaptive_avg_pool3d", "adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d",
       "mkldnn_adaptive_avg_pool2d")
def _pooled_to(call: Call) -> Outcome:
    """Return maps pooled to a size that the program fixes."""
    dims, target = call.first().dims, call.numbers(1)
    return _one([*dims[:len(dims) - len(target)], *((size, call.sizes.constant) for size in target)])


@_rule("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d", "upsample_bilinear2d",
       "upsample_bicubic2d", "upsample_trilinear3d", "_upsample_nearest_exact2d", "_upsample_bilinear2d_aa")
def _upsampled(call: Call) -> Outcome:
    """Return maps a whole number of times as large; no answer for others, which the program may have fixed."""
    dims, target = call.first().dims, call.numbers(1)
    first = len(dims) - len(target)
    for at, out in enumerate(target, first):
        size, dim = dims[at]
        if dim.follows and out % size:
            raise _Untold
        times = out // size
        dims[at] = out, Dim(dim.powers, dim.fixed * times, dim.rounded) if dim.follows else dim
    return _one(dims)


@_rule("constant_pad_nd", "pad", "reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d")
def _padded(call: Call) -> Outcome:
    dims, pads = call.first().dims, call.numbers(1)
    for number, (before, after) in enumerate(zip(pads[::2], pads[1::2], strict=True), 1):
        size, dim = dims[-number]
        follows = Dim(dim.powers, dim.fixed + before + after, dim.rounded)
        dims[-number] = size + before + after, follows if dim.follows else dim
    return _one(dims)


@_rule("unfold")
def _windows(call: Call) -> Outcome:
    """Return windows along a dimension; the window becomes the last dimension."""
    at = call.number(1) % len(call.first().shape)
    window, stride = call.number(2), call.number(3)
    return _one([*_strided(call, [(stride, 0, window)], [at]), (window, call.sizes.constant)])


@_rule("topk")
def _best(call: Call) -> Outcome:
    """Return the largest elements of a dimension. Usually the program fixes their number. If all choices together are
    as many as the elements, experts with a capacity choose tokens, and the number is a share of the tokens. If the
    choosers grow too (distances between points), each chooses a fixed number (its nearest neighbours)."""
    dims, count = call.first().dims, call.number(1)
    at = call.number(2, -1) % len(dims)
    size, dim = dims[at]
    others = [one for place, one in enumerate(dims) if place != at]
    chosen_by = math.prod(one for one, _ in others)
    each = any(power and other for _, one in others for power, other in zip(dim.powers, one.powers, strict=True))
    share = dim.follows and not each and count * chosen_by >= size and count > 1
    dims[at] = count, Dim(dim.powers, 0, True) if share else call.sizes.constant
    return _one(dims)


@_rule("as_strided")
def _overlapping(call: Call) -> Outcome:
    """Return windows along the last dimension that are written as strides (frames of a short-time Fourier transform).

    A single window over the whole dimension is an ``unsqueeze``, written as strides too. It has no result here.
    """
    one, sizes, strides = call.first(), call.numbers(1), call.numbers(2)
    if len(sizes) != len(one.shape) + 1 or sizes[:-2] != one.shape[:-1] or strides[-1] != 1 or sizes[-2] == 1:
        return Outcome()
    at, window = len(one.shape) - 1, sizes[-1]
    dims = _strided(call, [(strides[-2], 0, window)], [at])
    return _one([*dims, (window, call.sizes.constant)]) if dims[at][0] == sizes[-2] else Outcome()


@_rule("slice", "narrow", "slice_backward")
def _sliced(call: Call) -> Outcome:
    one = call.first()
    at, start, stop = call.number(1) % len(one.shape), call.number(2), call.number(3)
    size, step = one.shape[at], call.number(4, 1) or 1
    if len(call.arguments) < 5:  # aten::narrow gives a length
        stop = start + stop
    start, stop = (min(max(end + size if end < 0 else end, 0), size) for end in (start, stop))
    count = max(-(-(stop - start) // step), 0)
    shape = (*one.shape[:at], count, *one.shape[at + 1:])
    return _one([*one.dims[:at], (count, _part(call, one, at, count, shape)), *one.dims[at + 1:]])


def _part(call: Call, one: Tensor, at: int, count: int, shape: Shape) -> Dim:
    """Return how a slice of ``count`` elements follows the sizes: as its dimension does, or less a fixed number."""
    dim, size = one.layout[at], one.shape[at]
    if not dim.follows:
        guessed = call.guess(shape)[at]
        leads = any(power and leading for power, leading in zip(guessed.powers, call.sizes.leading, strict=True))
        return dim if count == size or leads else guessed
    if size - count <= _FEW < count:
        return Dim(dim.powers, dim.fixed - (size - count), dim.rounded)
    return Dim(dim.powers, 0, dim.rounded or count in call.sizes.derived) if count > 1 else call.sizes.constant


@_rule("select")
def _selected(call: Call) -> Outcome:
    dims = call.first().dims
    del dims[call.number(1) % len(dims)]
    return _one(dims)


@_rule("unbind")
def _unbound(call: Call) -> Outcome:
    """Return the slices along a dimension, all of one shape."""
    dims = call.first().dims
    at = call.number(1, 0) % len(dims)
    one = _one([*dims[:at], *dims[at + 1:]])
    return Outcome(one.results * dims[at][0])


@_rule("split_with_sizes", "split", "chunk", "unsafe_split", "unsafe_chunk")
def _split(call: Call) -> Outcome:
    """Return one part of a dimension for each different length; each follows the sizes as the whole does."""
    counts, dims = call.numbers(1), call.first().dims
    at = call.number(2) % len(dims)
    powers = dims[at][1].powers
    return Outcome(tuple(_one([*dims[:at], (count, Dim(powers, 0, any(powers) and count in call.sizes.derived)),
                               *dims[at + 1:]]).results[0] for count in dict.fromkeys(counts)))


@_rule("cat", "concat", "concatenate")
def _joined(call: Call) -> Outcome:
    parts = [one for one in call.tensors if one.shape != (0,)]
    if not parts or len({len(one.shape) for one in parts}) != 1:
        return Outcome()
    at = call.number(1, 0) % len(parts[0].shape)
    if len({(one.shape[:at], one.shape[at + 1:]) for one in parts}) != 1:
        return Outcome()
    if len({(one.layout[:at], one.layout[at + 1:]) for one in parts}) != 1:
        raise Inconsistent
    powers = {one.layout[at].powers for one in parts if one.layout[at].follows}
    rounded = any(one.layout[at].rounded for one in parts)
    if len(powers) > 1:
        return Outcome()
    fixed = sum(one.layout[at].fixed if one.layout[at].follows else one.shape[at] for one in parts)
    dims = parts[0].dims
    dims[at] = sum(one.shape[at] for one in parts), Dim(powers.pop(), fixed, rounded) if powers else call.sizes.constant
    return _one(dims)


@_rule("stack")
def _stacked(call: Call) -> Outcome:
    if len({one.shape for one in call.tensors}) != 1:
        return Outcome()
    if len({one.layout for one in call.tensors}) != 1:
        raise Inconsistent
    dims, count = call.first().dims, len(call.tensors)
    samples = [call.sizes.following(name) for name, (old, leads) in enumerate(zip(
        call.sizes.old, call.sizes.leading, strict=True)) if leads and old == count]
    collated = samples and not any(dim.follows for _, dim in dims)  # a loader's samples, one by one
    dims.insert(call.number(1, 0) % (len(dims) + 1), (count, samples[0] if collated else call.sizes.constant))
    return _one(dims)


@_rule("sum", "mean", "amax", "amin", "std", "var", "norm", "linalg_vector_norm", "logsumexp", "prod", "all", "any")
def _reduced(call: Call) -> Outcome:
    dims = call.first().dims
    away = {at % len(dims) for at in call.numbers(1)} or set(range(len(dims)))
    if len(call.arguments) > 2 and call.arguments[2].value == "True":
        return _one((1, call.sizes.constant) if at in away else dim for at, dim in enumerate(dims))
    return _one(dim for at, dim in enumerate(dims) if at not in away)


@_rule("embedding")
def _embedded(call: Call) -> Outcome:
    if len(call.tensors) < 2 or len(call.tensors[0].shape) != 2:
        return Outcome()
    weight, indices = call.tensors[:2]
    return _one([*indices.dims, (weight.shape[1], call.sizes.constant)])


@_rule("_embedding_bag", "embedding_bag", "_embedding_bag_forward_only")
def _bagged(call: Call) -> Outcome:
    """Return a row for each bag: one for each offset, less one if the last offset is the end of the list."""
    if len(call.tensors) < 3 or len(call.tensors[0].shape) != 2:
        return Outcome()
    weight, _, offsets = call.tensors[:3]
    ends = any(argument.value == "True" for argument in call.arguments[7:8])
    bags = Dim(offsets.layout[0].powers, max(offsets.layout[0].fixed - ends, 0))
    return _one([(offsets.shape[0] - ends, bags), (weight.shape[1], call.sizes.constant)])


@_rule("empty", "zeros", "ones", "full", "randn", "rand", "empty_strided", "new_empty", "new_zeros", "new_ones",
       "new_full", "new_empty_strided", "randint", "normal")
def _created(call: Call) -> Outcome:
    """Return a new tensor whose sizes are arguments."""
    lists = [place for place, one in enumerate(call.arguments[:3]) if one.value.startswith("[")]
    shape = call.numbers(lists[0]) if lists else ()
    return Outcome((Tensor(shape, call.guess(shape)),)) if shape else Outcome()


@_rule("scaled_dot_product_attention", "_scaled_dot_product_attention_math",
       "_scaled_dot_product_attention_math_for_mps", "_scaled_dot_product_flash_attention",
       "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention",
       "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_fused_attention_overrideable")
def _attended(call: Call) -> Outcome:
    """Return a row of values for each query and, for fused kernels, the logarithm of each query's sum, as in PyTorch's
    documentation of ``scaled_dot_product_attention`` (a mask is queries × keys)."""
    if len(call.tensors) < 3 or min(len(one.shape) for one in call.tensors[:3]) < 3:
        raise _Untold
    query, key, value, *masks = call.tensors
    if key.layout[-2] != value.layout[-2] or query.layout[-1] != key.layout[-1] or (
            query.shape[0] == key.shape[0] and query.layout[0] != key.layout[0]):
        raise Inconsistent
    scores = Tensor((*query.shape[:-1], key.shape[-2]), (*query.layout[:-1], key.layout[-2]))
    if masks and len(masks[0].shape) <= len(scores.shape):
        _broadcast(call.sizes, (scores, masks[0]))
    result, sums = (_one(dims).results[0] for dims in ([*query.dims[:-1], value.dims[-1]], query.dims[:-1]))
    return Outcome((result, sums))


@_rule("_scaled_dot_product_flash_attention_backward", "_scaled_dot_product_flash_attention_for_cpu_backward")
def _attended_backward(call: Call) -> Outcome:
    """Return the gradients of queries, keys and values."""
    if len(call.tensors) < 6 or min(len(one.shape) for one in call.tensors[:5]) < 3:
        raise _Untold
    grad, query, key, value, out, sums = call.tensors[:6]
    if not (grad.layout[:-1] == query.layout[:-1] == out.layout[:-1]) or key.layout[:-1] != value.layout[:-1] or (
            len(sums.shape) == len(query.shape) - 1 and sums.layout != query.layout[:-1]):
        raise Inconsistent
    return Outcome((query, key, value))


def _exchange(call: Call) -> Outcome:
    """Let a collective's flat inputs and outputs follow the same sizes, also where a rank has a share of them."""
    known = next((one.layout[0] for one in call.tensors if one.layout[0].follows), None)
    if known is None:
        return Outcome(call.tensors)
    dim = Dim(known.powers)
    refined: dict[int, Layout] = {at: (dim,) for at, one in enumerate(call.tensors) if len(one.shape) == 1}
    return Outcome(tuple(Tensor(one.shape, refined.get(at, one.layout)) for at, one in enumerate(call.tensors)),
                   refined)


PRODUCTS: frozenset[Rule] = frozenset({_product, _added_product, _linear})
"""Rules of products of matrices."""
GUESSING: frozenset[Rule] = frozenset({_expanded, _sliced, _created})
"""Rules that guess the layout of a shape; their answer may change as more of the step is seen."""
