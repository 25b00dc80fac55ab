"""Parses the arguments of ``foretrace price`` by the operation's schema: sizes, lists of sizes, dtypes and numbers."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from kernel_models import op_call
from kernel_models import op_call as kernel_models_tensors
from kernel_models import operation as kernel_models_operation
from kernel_models.families import arguments, registry
from tracer.errors import ForetraceError

MOST = 2**40
"""Limit of sizes and numbers: all are below it."""
_MOST_ELEMENTS = 2**60  # of up to 8 bytes: the bytes of a tensor fit into 64 bits
_MOST_DIGITS = 20  # digits of 2**64; longer numbers are read as floating point
_NUMBER = re.compile(r"[+-]?([0-9]{1,400}\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_DECISIVE = frozenset(("hidden_size", "kernel_size", "output_size", "scale_factors", "input_size", "input_sizes",
                       "size", "split_sizes"))
"""Numbers without which an operation cannot be priced."""
Sizes = tuple[int, ...]


class PriceError(ForetraceError):
    """An operation as written cannot be priced."""


@dataclass
class Asked:
    """An operation built from the command line's text, and the assumptions made.

    Attributes:
        operation: the operation with all its arguments.
        values: numbers given, by argument.
        assumed: numbers and types assumed because they were not given, by argument.
        notes: sentences for the report.
    """

    operation: kernel_models_operation.Operation
    values: dict[str, Any] = field(default_factory=dict)
    assumed: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass
class _Given:
    """One entry of ``--shapes``: a tensor, a list of tensors or (``sizes`` is ``None``) no tensor."""
    sizes: Sizes | list[Sizes] | None
    dtype: str = ""
    own_dtype: bool = False

    @property
    def shapes(self) -> list[Sizes]:
        return [] if self.sizes is None else self.sizes if isinstance(self.sizes, list) else [self.sizes]


def full_name(name: str) -> str:
    """Return an operation's name with its name space. Raises ``PriceError`` for a name without a name space that is no
    operation of ``aten``."""

    if re.fullmatch(r"\w+(::\w+)+(\.\w+)?", name, re.ASCII):
        return name
    if re.fullmatch(r"[\w.]+", name, re.ASCII) and registry.forward_rule(f"aten::{name}") is not None:
        return f"aten::{name}"
    raise PriceError(f"There is no operation {name!r} that foretrace knows{near_operations(name)}.")


def near_operations(name: str) -> str:
    """Return the end of a sentence that names similar operations."""
    registry.forward_rule("aten::mm")  # loads the families
    near = difflib.get_close_matches(name if "::" in name else f"aten::{name}", list(registry.FORWARD), n=3,
                                     cutoff=0.6)
    return f"; did you mean {' or '.join(near)}" if near else "; names look like aten::linear"


def asked(name: str, shapes: str, dtype: str, values: Sequence[str] = ()) -> Asked:
    """Build an operation from text. Raises ``PriceError`` for text that is not understood, or an argument that the
    operation lacks."""

    rule = registry.forward_rule(name)
    names = rule.names if rule is not None else ()
    found = Asked(put_together(name, (), ()))
    found.values = dict(_value(name, text) for text in values)
    known = (*names, *arguments.more_values(name))
    for one in found.values:
        if rule is not None and one not in known:
            raise PriceError(f"{name} has no argument {one!r} that counts{': ' if known else ''}{', '.join(known)}.")
    given = _types([_Given(_entry(text, shapes)) for text in _split(shapes)], dtype)
    if rule is not None and name.startswith("aten::"):
        placed, numbers = _placed(name, names, given, found)
    else:
        placed, numbers = given, [None] * len(given)
        for one, value in found.values.items():
            at = names.index(one) if one in names else len(placed)
            while len(placed) <= at:
                placed, numbers = [*placed, _Given(None)], [*numbers, None]
            placed[at], numbers[at] = _Given(None), value
    found.operation = put_together(name, placed, numbers)
    return found


def put_together(name: str, placed: Sequence[_Given], numbers: Sequence[Any]) -> kernel_models_operation.Operation:
    """Return the operation with these entries and numbers as arguments."""
    return kernel_models_operation.operation(name, [one.sizes for one in placed], [one.dtype for one in placed],
                                             values=list(numbers))


def _placed(name: str, names: Sequence[str], given: list[_Given], found: Asked) -> tuple[list[_Given], list[Any]]:
    """Return every argument of the schema in order. An argument that is a number takes no entry except "none"."""
    queue = _as_lists(name, names, given, found)
    if "_foreach_" in name and not names:
        return queue, [None] * len(queue)
    placed: list[_Given] = []
    numbers: list[Any] = []
    for argument in names:
        value, kind = found.values.get(argument), arguments.kind_of(name, argument)
        if value is not None or kind == "number":
            if value is None and argument == "size" and not placed and queue and queue[0].sizes is not None:
                value, found.values["size"] = [list(queue[0].shapes[0])] * 2
                queue.pop(0)
            elif queue and queue[0].sizes is None:
                queue.pop(0)
            if value is None and (value := arguments.default_of(name, argument)) is not None:
                found.assumed[argument] = value
            placed.append(_Given(None))
            numbers.append(value)
            continue
        one = queue.pop(0) if queue else _Given(None)
        if kind == "list" and isinstance(one.sizes, tuple):
            one = _Given([one.sizes], one.dtype, one.own_dtype)
        usual = arguments.element_type(argument)
        if one.sizes is not None and usual and not one.own_dtype:
            one.dtype = found.assumed[argument] = usual
        placed.append(one)
        numbers.append(None)
    left = sum(one.sizes is not None for one in queue)
    if left:
        found.notes.append(f"The last {left} of the sizes belong to no argument of {name}({', '.join(names)}) that "
                           "counts.")
    placed, numbers = [*placed, *queue], [*numbers, *[None] * len(queue)]
    return _completed(name, names, placed, numbers, found)


def _as_lists(name: str, names: Sequence[str], given: list[_Given], found: Asked) -> list[_Given]:
    """Return the entries with tensors gathered into lists for operations on lists; a single list is repeated."""
    foreach = "_foreach_" in name and not names
    if not foreach and not (names and arguments.kind_of(name, names[0]) == "list"):
        return list(given)
    rest = [one for one in given if one.sizes is not None]
    lists = [one for one in rest if isinstance(one.sizes, list)]
    if not lists and rest:
        lists = [_joined(rest)]
    elif len(lists) < len(rest):
        raise PriceError(f"{name} takes lists of tensors: write them like [1024x1024;512], or all sizes without "
                         "brackets.")
    count = 1
    if foreach:
        count = arguments.lists_of_foreach(name, bool(found.values))
    elif "_fused_" in name:
        count = len(names) - (1 if "_fused_adam" in name and "adagrad" not in name and not found.values.pop(
            "amsgrad", False) else 0)
    if len(lists) == 1 and count > 1:
        found.assumed["lists"] = count
        return lists * count
    return lists


def _joined(entries: list[_Given]) -> _Given:
    return _Given([shape for one in entries for shape in one.shapes],
                  kernel_models_tensors.promoted([one.dtype for one in entries]), True)


def _completed(
    name: str, names: Sequence[str], placed: list[_Given], numbers: list[Any], found: Asked,
) -> tuple[list[_Given], list[Any]]:
    """Add arguments that are not in the schema but needed: scale factors, and the state of a recurrent layer."""
    factors, hidden = found.values.get("scale_factors"), found.values.get("hidden_size")
    if factors is not None and "scale_factors" not in names:
        spatial = next((int(digit) for digit in "321" if f"{digit}d" in name), 2)
        placed = [*placed[:len(names)], _Given(None)]
        numbers = [*numbers[:len(names)], factors * spatial if len(factors) == 1 else factors]
    if hidden is not None and "hidden_size" not in names and "hx" in names:
        at, source = names.index("hx"), placed[0]
        if placed[at].sizes is None and source.shapes and len(source.shapes[0]) == 3:
            of = dict(zip(names, numbers, strict=False))
            batch = source.shapes[0][0 if of.get("batch_first") else 1]
            state = (int(of.get("num_layers") or 1) * (2 if of.get("bidirectional") else 1), batch, int(hidden))
            placed[at] = _Given([state, state] if name.startswith("aten::lstm") else state, source.dtype)
    return placed, numbers


def registry_names(name: str) -> tuple[str, ...]:
    """Return the names of those arguments of an operation that its formula uses."""
    rule = registry.forward_rule(name)
    return rule.names if rule is not None else ()


def missing(name: str, wanted: Asked) -> str:
    """Return the end of a sentence that names missing arguments that decide sizes; "" if none is missing."""
    names = [one for one in (*registry_names(name), *arguments.more_values(name)) if one not in wanted.values
             and one in _DECISIVE]
    return f", or give --value {' or '.join(f'{one}=…' for one in names)}" if names else ""


def is_empty(calls: Sequence[op_call.OpCall], wanted: Asked) -> bool:
    """Return whether an operation has no work because a tensor has no elements."""
    shapes: list[Any] = []
    for one in wanted.operation.arguments:
        sizes: Any = one.shape
        shapes += sizes if sizes and isinstance(sizes[0], tuple) else [sizes] if sizes else []
    empty = [0 in shape for shape in shapes]
    return bool(shapes) and (all(empty) or (any(empty) and not calls))


def _split(shapes: str) -> list[str]:
    """Split a text at commas outside brackets."""
    if shapes.count("[") != shapes.count("]") or re.search(r"\[[^\]]*\[", shapes):
        raise PriceError(f"{shapes!r} has brackets that do not match; write a list like [1024x1024;512x1024].")
    parts = re.split(r"(\[[^\]]*\])", shapes)  # each second one is in brackets
    return "".join(part if at % 2 else part.replace(",", "\0") for at, part in enumerate(parts)).split("\0")


def _entry(text: str, whole: str) -> Sizes | list[Sizes] | None:
    text = text.strip().lower()
    if text.startswith("[") and text.endswith("]"):
        return [_sizes(one, whole) for one in re.split("[;,]", text[1:-1])]
    return None if text in ("none", "-") else _sizes(text, whole)


def _sizes(text: str, whole: str) -> Sizes:
    text = text.strip()
    if not re.fullmatch(r"[0-9]+(x[0-9]+)*", text):
        raise PriceError(f"{text or whole!r} are no sizes; write them like 8192x4096,11008x4096.")
    parts = text.split("x")
    sizes = tuple(int(part) if len(part) < 20 else MOST for part in parts)
    if max(sizes) >= MOST or prod(sizes) >= _MOST_ELEMENTS:
        raise PriceError(f"The sizes {text[:80]} are out of range; each is below 2^40 = {MOST:,}, and a tensor has "
                         "less than 2^60 elements.")
    return sizes


def _types(given: list[_Given], dtype: str) -> list[_Given]:
    """Set the element types of entries: one type for all, one for each entry ("none" for no tensor) or each tensor."""
    types = [text.strip() for text in dtype.split(",")]
    nothing = ("none", "-")
    for text in types:
        if not kernel_models_tensors.short_dtype(text) and (text not in nothing or len(types) == 1):
            raise PriceError(f"There is no element type {text!r}; known are "
                             f"{', '.join(kernel_models_tensors.ITEMSIZE)}.")
    tensors = [one for one in given if one.sizes is not None]
    if len(types) == 1:
        chosen = types * len(tensors)
    elif len(types) == len(given):
        chosen = [text for text, one in zip(types, given, strict=True) if one.sizes is not None]
    else:
        chosen = [text for text in types if text not in nothing]
    if len(chosen) != len(tensors) or any(text in nothing for text in chosen):
        raise PriceError(f"{len(types)} element types are given for {len(tensors)} tensors; give one, or one for each.")
    for one, text in zip(tensors, chosen, strict=True):
        one.dtype, one.own_dtype = kernel_models_tensors.short_dtype(text), len(types) > 1
    return given


def _value(operation: str, text: str) -> tuple[str, Any]:
    """Parse an argument's number: "stride=2" gives ("stride", [2])."""
    name, _, written = (part.strip() for part in text.partition("="))
    if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) or not written:
        raise PriceError(f"--value {text!r} is no number of an argument; write it like stride=2 or is_causal=true.")
    listed = arguments.is_listed(operation, name)
    if written.lower() in ("true", "false"):
        return name, written.lower() == "true"
    if name in ("dtype", "out_dtype", "input_dtype") and kernel_models_tensors.short_dtype(written):
        return name, kernel_models_tensors.short_dtype(written)
    if name == "padding" and written in ("same", "valid"):
        return name, written
    bare = written.strip("[]()")
    parts = [part.strip() for part in re.split(r"[,;x]" if listed else r"[,;]", bare) if part.strip()]
    if not parts or not all(_NUMBER.fullmatch(part) for part in parts):
        raise PriceError(f"--value {text!r} is no number, list of numbers, true or false; write it like stride=2.")
    # A number with too many digits is read as the nearest floating-point number, which is out of range too.
    numbers = [float(part) if len(part) > _MOST_DIGITS or re.search(r"[.eE]", part) else int(part) for part in parts]
    if not all(abs(number) < MOST for number in numbers):
        raise PriceError(f"--value {text[:80]!r} is out of range; numbers are below 2^40 = {MOST:,}.")
    if not listed and (len(numbers) > 1 or bare != written):
        return name, numbers
    return name, numbers if listed else numbers[0]


_PRODUCTS = {"mm": ("self", "mat2"), "bmm": ("self", "mat2"), "baddbmm": ("batch1", "batch2"),
             "addbmm": ("batch1", "batch2"), "addmm": ("mat1", "mat2"), "matmul": ("self", "other"),
             "linear": ("input", "weight")}
_ATTENTION = ("scaled_dot_product_attention", "_scaled_dot_product_flash_attention",
              "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
              "_scaled_dot_product_attention_math")
"""Operations whose tensors have the shape (batch, heads, tokens, head size)."""
_OF_CLASSES = ("nll_loss_forward", "nll_loss2d_forward", "nll_loss", "nll_loss2d", "nll_loss_nd", "cross_entropy_loss")
_WINDOWS = ("max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d",
            "max_pool2d_with_indices", "max_pool3d_with_indices")


@dataclass(frozen=True)
class _Sizes:
    """An operation's arguments, ready for the rules.

    Attributes:
        name: name of the operation, as written.
        plain: the name without name space, overload and trailing underscore.
        tensors: shapes of the given tensors, by argument.
        dtypes: their element types.
        values: given numbers, by argument.
    """

    name: str
    plain: str
    tensors: Mapping[str, Sizes]
    dtypes: Mapping[str, str]
    values: Mapping[str, Any]

    def refuse(self, why: str) -> PriceError:
        """Return the error for sizes that do not fit, with the reason ``why``."""
        shapes = ", ".join(f"{name} {shown(sizes)}" for name, sizes in self.tensors.items())
        return PriceError(f"{self.name} cannot take {shapes}: {why}.")


def check(name: str, wanted: Asked) -> None:
    """Check sizes that an operation would refuse but its formula accepts. Raises ``PriceError`` if sizes do not fit
    each other."""

    given, rule = wanted.operation.arguments, registry.forward_rule(name)
    if not name.startswith("aten::") or not given or rule is None:
        return
    plain = registry.plain_name(name)
    if plain in ("cat", "concat", "concatenate", "stack"):
        _check_joined(name, plain, given[0].shape, int(wanted.values.get("dim", 0)))
    pairs = [(one, argument) for one, argument in zip(registry_names(name), given, strict=False)
             if argument.shape is not None and not argument.dtype.startswith(("Scalar", "TensorList"))]
    tensors: dict[str, Any] = {one: argument.shape for one, argument in pairs}
    sizes = _Sizes(name, plain, tensors, {one: argument.dtype for one, argument in pairs}, wanted.values)
    if plain in _PRODUCTS:
        _product(sizes, *_PRODUCTS[plain])
    elif plain in _ATTENTION:
        _attention(sizes)
    elif plain in ("conv1d", "conv2d", "conv3d", "convolution"):
        _convolution(sizes)
    elif plain == "embedding" and sizes.dtypes.get("weight", "").startswith(("int", "uint")):
        raise PriceError(f"{name} takes its table before its indices: {name}(weight, indices).")
    elif plain in _WINDOWS and "kernel_size" not in wanted.values:
        raise PriceError(f"{name} needs the size of its window; give --value kernel_size=….")
    elif plain in ("topk", "kthvalue"):
        _some_of(sizes)
    else:
        _normalised(sizes)
        _broadcast(sizes, rule)


def _check_joined(name: str, plain: str, first: Any, dim: int) -> None:
    if not first or not isinstance(first[0], tuple):
        return
    shapes = [shape for shape in first if shape != (0,)]
    rank = len(shapes[0]) if shapes else 0
    if not -rank - (plain == "stack") <= dim < rank + (plain == "stack"):
        raise PriceError(f"{name} has no dimension {dim} to join tensors of {rank} dimensions along.")
    kept = [shape if plain == "stack" else shape[:dim % rank] + shape[dim % rank + 1:] for shape in shapes]
    if len({len(shape) for shape in shapes}) > 1 or len(set(kept)) > 1:
        but = "" if plain == "stack" else f" but those of dimension {dim}"
        raise PriceError(f"{name} cannot join {', '.join(map(shown, shapes))}: all sizes{but} must be equal.")


def _product(sizes: _Sizes, left: str, right: str) -> None:
    """Check that both factors have equal batches (or broadcast in matmul) and equal element types."""
    one, other = sizes.tensors.get(left), sizes.tensors.get(right)
    if one is None or other is None:
        return
    batches = (one[:-2], other[:-2]) if sizes.plain != "linear" else ((), ())
    if batches[0] != batches[1] and not (sizes.plain == "matmul" and _fit_together(batches)):
        raise sizes.refuse("their batches must be equal")
    if sizes.dtypes[left] != sizes.dtypes[right]:
        raise PriceError(f"{sizes.name} cannot multiply {sizes.dtypes[left]} by {sizes.dtypes[right]}; give both one "
                         "type with --dtype.")


def _attention(sizes: _Sizes) -> None:
    query, key, value = (sizes.tensors.get(one, ()) for one in ("query", "key", "value"))
    if not len(query) == len(key) == len(value) >= 3:
        return
    if query[-1] != key[-1]:
        raise sizes.refuse("queries and keys must be of one head size")
    if key[-2] != value[-2]:
        raise sizes.refuse("there must be as many keys as values")
    if len(query) == 4:
        if len({query[0], key[0], value[0]} - {1}) > 1:
            raise sizes.refuse("their batches must be equal")
        if key[1] != value[1] or (key[1] and query[1] % key[1]):
            raise sizes.refuse("the heads of queries must be a multiple of those of keys and values")


def _convolution(sizes: _Sizes) -> None:
    first, weight = sizes.tensors.get("input", ()), sizes.tensors.get("weight", ())
    for one, least in (("stride", 1), ("dilation", 1), ("padding", 0), ("groups", 1)):
        given = sizes.values.get(one)
        if given is not None and not isinstance(given, str) and any(
                number < least for number in (given if isinstance(given, list) else [given])):
            raise PriceError(f"The {one} of {sizes.name} is {least} or more; correct --value {one}=….")
    if len(first) < 2 or len(weight) < 2 or sizes.values.get("transposed"):
        return
    channels, each = first[1] if len(first) == len(weight) else first[0], weight[1]
    groups = sizes.values.get("groups")
    if each * groups != channels if groups else channels % max(each, 1):
        raise PriceError(f"The weight {shown(weight)} of {sizes.name} takes {each} channels a group, which does not "
                         f"fit {channels} channels{f' in {groups} groups' if groups else ''}.")
    if groups and weight[0] % groups:
        raise PriceError(f"The weight {shown(weight)} of {sizes.name} gives {weight[0]} channels, which cannot be "
                         f"split into {groups} groups.")


def _some_of(sizes: _Sizes) -> None:
    """Check that ``k`` is at most the number of elements along the dimension."""
    shape, some, dim = sizes.tensors.get("self", ()), sizes.values.get("k"), sizes.values.get("dim", -1)
    if not shape or not isinstance(some, int) or not isinstance(dim, int) or not -len(shape) <= dim < len(shape):
        return
    if not 0 <= some <= shape[dim]:
        raise PriceError(f"{sizes.name} cannot give {some} of {shape[dim]} elements; correct --value k=….")


def _normalised(sizes: _Sizes) -> None:
    """Check that weights and statistics have one element for each normalised size or channel."""
    first = sizes.tensors.get("input", ())
    if not first or sizes.plain.endswith("backward"):
        return
    own = {one: sizes.tensors[one] for one in ("weight", "bias", "running_mean", "running_var") if one in sizes.tensors}
    if sizes.plain in ("layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm"):
        weight = own.get("weight", ())
        over = tuple(sizes.values.get("normalized_shape") or (
            weight if weight and first[-len(weight):] == weight else first[-1:]))
        what = "normalised sizes"
        if "normalized_shape" in sizes.values and first[-len(over):] != over:
            raise PriceError(f"The normalised sizes {shown(over)} of {sizes.name} are not the last sizes of "
                             f"{shown(first)}; correct --value normalized_shape=….")
    elif "batch_norm" in sizes.plain or sizes.plain in ("group_norm", "instance_norm"):
        over, what = first[1:2], "channels"
        groups = sizes.values.get("num_groups")
        if groups is not None and (groups < 1 or prod(over) % groups):
            raise PriceError(f"{sizes.name} cannot split {shown(over)} channels into {groups} groups; correct --value "
                             "num_groups=….")
    else:
        return
    for one, shape in own.items():
        if shape and prod(shape) != prod(over):
            raise PriceError(f"The {one} {shown(shape)} of {sizes.name} does not fit its {what} {shown(over)}.")


def _broadcast(sizes: _Sizes, rule: registry.Rule) -> None:
    """Check that tensors of an element-by-element operation broadcast, and that a loss has a target for each input."""
    first, target = sizes.tensors.get("self"), sizes.tensors.get("target")
    if sizes.plain in _OF_CLASSES:
        if first and target is not None and target != first[:1] * (len(first) > 1) + first[2:] and not (
                sizes.plain == "cross_entropy_loss" and target == first):
            raise sizes.refuse("there must be one target for each row of classes")
        return
    elementwise = rule.family is op_call.Family.ELEMENTWISE and rule.names[:2] in (("self", "other"),
                                                                                   ("self", "tensor1"))
    spread = elementwise or sizes.plain in ("lerp", "where") or rule.names == ("self", "target")
    if spread and sizes.plain != "isin" and not _fit_together(list(sizes.tensors.values())):
        raise sizes.refuse("counted from the last, sizes must be equal or 1")


def _fit_together(shapes: Sequence[Sizes]) -> bool:
    """Return whether these shapes broadcast."""
    rank = max((len(shape) for shape in shapes), default=0)
    return all(len({shape[-d] for shape in shapes if d <= len(shape)} - {1}) <= 1 for d in range(1, rank + 1))


def shown(sizes: Sequence[int]) -> str:
    """Return sizes as text: "3x4", or "()" for a tensor without dimensions."""
    return "x".join(map(str, sizes)) or "()"
