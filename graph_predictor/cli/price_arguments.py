"""Arguments of ``foretrace price`` from their text: sizes, lists of sizes, element types and numbers, by the schema."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from kernel_models import dtypes, op_call
from kernel_models import operation as kernel_models_operation
from kernel_models.families import arguments as families_arguments
from kernel_models.families import registry as families_registry
from tracer.errors import ForetraceError

MOST = 2**40
"""Sizes and numbers are below this."""
_MOST_ELEMENTS = 2**60
_MOST_DIGITS = 20
_NUMBER = re.compile(r"[+-]?([0-9]{1,400}\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_DECISIVE = frozenset(("hidden_size", "kernel_size", "output_size", "scale_factors", "input_size", "input_sizes",
                       "size", "split_sizes"))
"""Numbers without which an operation cannot be priced."""
Sizes = tuple[int, ...]


class PriceError(ForetraceError):
    """An operation cannot be priced as it was written."""


@dataclass
class Asked:
    """An operation put together from text, and what was assumed of it.

    Attributes:
        operation: with all its arguments.
        values: numbers as given, by argument.
        assumed: numbers and types that were not given, by argument.
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
    """The operation's name with its name space.

    Raises:
        PriceError: it has none, and ``aten`` has no such operation.
    """

    if re.fullmatch(r"\w+(::\w+)+(\.\w+)?", name, re.ASCII):
        return name
    if re.fullmatch(r"[\w.]+", name, re.ASCII) and families_registry.forward_rule(f"aten::{name}") is not None:
        return f"aten::{name}"
    raise PriceError(f"There is no operation {name!r} that foretrace knows{near_operations(name)}.")


def near_operations(name: str) -> str:
    """Names like it, as the end of a sentence."""
    families_registry.forward_rule("aten::mm")  # loads the families
    near = difflib.get_close_matches(name if "::" in name else f"aten::{name}", list(families_registry.FORWARD), n=3,
                                     cutoff=0.6)
    return f"; did you mean {' or '.join(near)}" if near else "; names look like aten::linear"


def asked(name: str, shapes: str, dtype: str, values: Sequence[str] = ()) -> Asked:
    """Put an operation together.

    Raises:
        PriceError: the sizes, types or numbers cannot be understood, or the operation has no such argument.
    """

    rule = families_registry.forward_rule(name)
    names = rule.names if rule is not None else ()
    found = Asked(put_together(name, (), ()))
    found.values = dict(_value(name, text) for text in values)
    known = (*names, *_more(name))
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
    """The operation of entries and numbers."""
    return kernel_models_operation.operation(name, [one.sizes for one in placed], [one.dtype for one in placed],
                                             values=list(numbers))


def _placed(name: str, names: Sequence[str], given: list[_Given], found: Asked) -> tuple[list[_Given], list[Any]]:
    """Every argument of the schema in its order; numbers take no entry but "none"."""
    queue = _as_lists(name, names, given, found)
    if "_foreach_" in name and not names:
        return queue, [None] * len(queue)
    placed: list[_Given] = []
    numbers: list[Any] = []
    for argument in names:
        value, kind = found.values.get(argument), families_arguments.kind_of(name, argument)
        if value is not None or kind == "number":
            if value is None and argument == "size" and not placed and queue and queue[0].sizes is not None:
                value, found.values["size"] = [list(queue[0].shapes[0])] * 2
                queue.pop(0)
            elif queue and queue[0].sizes is None:
                queue.pop(0)
            if value is None and (value := families_arguments.default_of(name, argument)) is not None:
                found.assumed[argument] = value
            placed.append(_Given(None))
            numbers.append(value)
            continue
        one = queue.pop(0) if queue else _Given(None)
        if kind == "list" and isinstance(one.sizes, tuple):
            one = _Given([one.sizes], one.dtype, one.own_dtype)
        usual = families_arguments.element_type(argument)
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
    """Entries with the tensors of operations over lists gathered, and one list repeated for all that it takes."""
    foreach = "_foreach_" in name and not names
    if not foreach and not (names and families_arguments.kind_of(name, names[0]) == "list"):
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
        count = families_arguments.lists_of_foreach(name, bool(found.values))
    elif "_fused_" in name:
        count = len(names) - (1 if "_fused_adam" in name and "adagrad" not in name and not found.values.pop(
            "amsgrad", False) else 0)
    if len(lists) == 1 and count > 1:
        found.assumed["lists"] = count
        return lists * count
    return lists


def _joined(entries: list[_Given]) -> _Given:
    return _Given([shape for one in entries for shape in one.shapes], dtypes.promoted([one.dtype for one in entries]),
                  True)


def _completed(
    name: str, names: Sequence[str], placed: list[_Given], numbers: list[Any], found: Asked,
) -> tuple[list[_Given], list[Any]]:
    """Add what some operations need and their schema does not have: scale factors, a recurrent layer's state."""
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
    """Names of the operation's arguments, as far as they count."""
    rule = families_registry.forward_rule(name)
    return rule.names if rule is not None else ()


def missing(name: str, wanted: Asked) -> str:
    """Numbers that sizes hang on and that were not given, as the end of a sentence."""
    names = [one for one in (*registry_names(name), *_more(name)) if one not in wanted.values
             and one in _DECISIVE]
    return f", or give --value {' or '.join(f'{one}=…' for one in names)}" if names else ""


def is_empty(calls: Sequence[op_call.OpCall], wanted: Asked) -> bool:
    """Return whether there is nothing to do because a tensor has no elements."""
    shapes: list[Any] = []
    for one in wanted.operation.arguments:
        sizes: Any = one.shape
        shapes += sizes if sizes and isinstance(sizes[0], tuple) else [sizes] if sizes else []
    empty = [0 in shape for shape in shapes]
    return bool(shapes) and (all(empty) or (any(empty) and not calls))


def _more(name: str) -> tuple[str, ...]:
    return families_arguments.more_values(name)


def _split(shapes: str) -> list[str]:
    """At commas outside brackets."""
    if shapes.count("[") != shapes.count("]") or re.search(r"\[[^\]]*\[", shapes):
        raise PriceError(f"{shapes!r} has brackets that do not match; write a list like [1024x1024;512x1024].")
    return re.split(r",(?![^\[]*\])", shapes)


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
    """Entries with their element types: one for all, one an entry ("none" where it is no tensor) or one a tensor."""
    types = [text.strip() for text in dtype.split(",")]
    nothing = ("none", "-")
    for text in types:
        if not dtypes.short_dtype(text) and (text not in nothing or len(types) == 1):
            raise PriceError(f"There is no element type {text!r}; known are {', '.join(dtypes.ITEMSIZE)}.")
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
        one.dtype, one.own_dtype = dtypes.short_dtype(text), len(types) > 1
    return given


def _value(operation: str, text: str) -> tuple[str, Any]:
    """ "stride=2" → ("stride", [2])."""
    name, _, written = (part.strip() for part in text.partition("="))
    if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) or not written:
        raise PriceError(f"--value {text!r} is no number of an argument; write it like stride=2 or is_causal=true.")
    listed = families_arguments.is_listed(operation, name)
    if written.lower() in ("true", "false"):
        return name, written.lower() == "true"
    if name in ("dtype", "out_dtype", "input_dtype") and dtypes.short_dtype(written):
        return name, dtypes.short_dtype(written)
    if name == "padding" and written in ("same", "valid"):
        return name, written
    bare = written.strip("[]()")
    parts = [part.strip() for part in re.split(r"[,;x]" if listed else r"[,;]", bare) if part.strip()]
    if not parts or not all(_NUMBER.fullmatch(part) for part in parts):
        raise PriceError(f"--value {text!r} is no number, list of numbers, true or false; write it like stride=2.")
    # Of more digits than any, too: the nearest floating-point number is out of range like the number itself.
    numbers = [float(part) if len(part) > _MOST_DIGITS or re.search(r"[.eE]", part) else int(part) for part in parts]
    if not all(abs(number) < MOST for number in numbers):
        raise PriceError(f"--value {text[:80]!r} is out of range; numbers are below 2^40 = {MOST:,}.")
    if not listed and (len(numbers) > 1 or bare != written):
        return name, numbers
    return name, numbers if listed else numbers[0]
