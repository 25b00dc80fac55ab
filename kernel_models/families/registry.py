"""The registry of each family's operations, and access to an operation's arguments by name.

A family's file decorates functions::

    @forward(Family.GEMM, "aten::mm(self, mat2)")
    def _mm(op: Inputs) -> Iterator[OpCall]:
        yield gemm(op.tensor("self"), op.tensor("mat2"))

The text is the operation's schema, reduced to the argument names in order, up to the last that is needed; a test
compares each with PyTorch's own. In-place variants ("aten::add_") and out variants follow from the plain name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from kernel_models.families import load
from kernel_models.op_call import DIMENSIONS, Family, OpCall, TensorSpec, promoted, scalar_type, short_dtype
from tracer.guard import MOST_PART
from tracer.views import Argument


class Unpriceable(Exception):
    """Raised where an argument that a formula needs was not recorded, or is invalid."""


class Inputs:
    """The arguments of one operation by the names of its schema. Arguments that were not recorded read as ``None``.

    Attributes:
        name: The operation's name.
        names: The names of its schema's arguments; any other name reads as ``None`` too.
        tf32: Whether fp32 products run as TF32.
        is_backward: Whether the work is a gradient's: of a forward operation, or of an operation with such a name.
    """

    def __init__(
        self, name: str, arguments: tuple[Argument, ...], names: tuple[str, ...], list_dtype: str, tf32: bool = False,
        told: tuple[tuple[str, str], ...] = (), is_gradient: bool = False,
    ) -> None:
        self.name, self.arguments, self.names, self.tf32 = name, arguments, names, tf32
        self.is_backward = is_gradient or "backward" in name or name.endswith("bwd")
        self._told = dict(told)
        self._assumed: dict[str, str] = {}
        self._position = {argument: i for i, argument in enumerate(names)}
        self._list_dtype = list_dtype

    @property
    def short_name(self) -> str:
        """Return the name without name space and without the underscore of in-place variants."""
        return plain_name(self.name)

    @property
    def suffix(self) -> str:
        """Return the suffix of a gradient's kind: "_backward"; "" for other work."""
        return "_backward" if self.is_backward else ""

    def tensor(self, name: str) -> TensorSpec:
        """Return a required tensor.

        Raises:
            Unpriceable: it was not recorded.
        """
        found = self.optional(name)
        if found is None:
            raise Unpriceable(f"{self.name} has no tensor {name!r}")
        return found

    def optional(self, name: str) -> TensorSpec | None:
        """Return a tensor, or ``None`` if the argument is missing, a list or a number."""
        argument = self._argument(name)
        return None if argument is None else _tensor(argument)

    def has(self, name: str) -> bool:
        """Return whether there is a tensor of that name."""
        return self.optional(name) is not None

    def tensor_list(self, name: str) -> list[TensorSpec]:
        """Return the tensors of a required list.

        Raises:
            Unpriceable: it was not recorded (profilers leave out long lists), or is empty.
        """
        argument = self._argument(name)
        found = [] if argument is None else _tensor_list(argument, self._list_dtype)
        if not found:
            raise Unpriceable(f"{self.name} has no list {name!r}")
        return found

    def optional_list(self, name: str) -> list[TensorSpec]:
        """Return the tensors of a list; empty if the argument is missing."""
        argument = self._argument(name)
        return [] if argument is None else _tensor_list(argument, self._list_dtype)

    def tensors(self) -> list[TensorSpec]:
        """Return every tensor among the arguments, including those in lists."""
        found = []
        for argument in self.arguments:
            one = _tensor(argument)
            found += [one] if one is not None else _tensor_list(argument, self._list_dtype)
        return found

    def named(self) -> list[TensorSpec]:
        """Return the recorded tensors among the schema's arguments, in order.

        Raises:
            Unpriceable: none was recorded.
        """
        found = [tensor for tensor in map(self.optional, self.names) if tensor is not None]
        return found or [self.tensor(self.names[0])]

    def lists(self) -> Iterator[list[TensorSpec]]:
        """Return the tensors of each argument that is a list; an empty list for other arguments."""
        return (_tensor_list(argument, self._list_dtype) for argument in self.arguments)

    def told(self, name: str, default: float) -> float:
        """Return a number that no argument holds and the user stated; else ``default``."""
        value = _number(self._told.get(name, ""))
        return default if value is None else value

    def assume(self, name: str, default: float) -> float:
        """Return a number that no argument holds, as stated; else ``default``, listed in ``assumptions``."""
        if _number(self._told.get(name, "")) is None:
            self._assumed[name] = f"{default:g}"
        return self.told(name, default)

    def told_type(self, name: str, default: str) -> str:
        """Return an element type that no argument holds and the user stated; else ``default``."""
        found = self._told.get(name, "")
        return short_dtype(found) or (found if found in STORED_ONLY else default)

    def assume_type(self, name: str, default: str) -> str:
        """Return an element type that no argument holds, as stated, else ``default`` (listed in ``assumptions``)."""
        if not self.told_type(name, ""):
            self._assumed[name] = default
        return self.told_type(name, default)

    def assumptions(self) -> tuple[str, ...]:
        """Return flags for all assumptions, such as ("assumed", "assumed_context=0"); empty if nothing was assumed."""
        return ("assumed", *(f"assumed_{name}={text}" for name, text in self._assumed.items())) if self._assumed else ()

    def missing(self, what: str) -> NoReturn:
        """Raise the error for a missing argument.

        Raises:
            Unpriceable: always.
        """
        raise Unpriceable(f"{self.name} has no {what}")

    def text(self, name: str) -> str:
        """Return the recorded text of a number or list, "" where not recorded."""
        argument = self._argument(name)
        return "" if argument is None or argument.value == "None" else argument.value

    def ints(self, name: str) -> tuple[int, ...] | None:
        """Return a list of integers, or of booleans as 0 and 1; ``None`` where not recorded."""
        text = self.text(name).strip()
        if not (text.startswith(("[", "(")) and text.endswith(("]", ")"))):
            return None
        parts = [part.strip() for part in text[1:-1].split(",") if part.strip()]
        values = [_number(part) for part in parts]
        return None if None in values else tuple(int(value) for value in values if value is not None)

    def stored_entries(self, name: str) -> int | None:
        """Return a sparse tensor's number of stored entries (for a look-up's gradient: rows); ``None`` if dense."""
        return _stored_entries(self.text(name))

    def number(self, name: str) -> float | None:
        """Return a number or boolean; ``None`` where not recorded."""
        return _number(self.text(name).strip())

    def integer(self, name: str, default: int) -> int:
        """Return a whole number, ``default`` where not recorded."""
        value = self.number(name)
        return default if value is None else int(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """Return a boolean, ``default`` where not recorded."""
        value = self.number(name)
        return default if value is None else bool(value)

    def dtype(self, name: str) -> str:
        """Return the element type of a ``ScalarType`` argument, "" where not recorded."""
        return scalar_type(self.text(name))

    def math_dtype(self, tensor: TensorSpec) -> str:
        """Return the element type of products of this tensor: tf32 for fp32 if the operation runs so."""
        return "tf32" if self.tf32 and tensor.dtype == "fp32" else tensor.dtype

    def _argument(self, name: str) -> Argument | None:
        position = self._position.get(name, len(self.arguments))
        return self.arguments[position] if position < len(self.arguments) else None


STORED_ONLY = ("int4",)
"""Types in which weights are stored and which no tensor has."""
Function = Callable[[Inputs], Iterable[OpCall]]


@dataclass(frozen=True, slots=True)
class Rule:
    """The function that returns an operation's calls, with its family and the names of the operation's arguments."""

    family: Family
    names: tuple[str, ...]
    function: Function
    is_free: bool = False
    is_gradient: bool = False


FORWARD: dict[str, Rule] = {}
BACKWARD: dict[str, Rule] = {}
PATTERNS: list[tuple[re.Pattern[str], Rule]] = []
WITHOUT_GRADIENT: set[str] = set()
"""Operations without a gradient in autograd."""

_SIGNATURE = re.compile(r"^(?P<name>[^()]+)(?:\((?P<names>[^()]*)\))?$")


def forward(family: Family, *signatures: str) -> Callable[[Function], Function]:
    """Register a function for operations, each given as "name(argument, ...)".

    Raises:
        ValueError: an operation is registered twice.
    """
    return _registering(FORWARD, family, signatures)


def backward(family: Family, *signatures: str) -> Callable[[Function], Function]:
    """Register a function that returns the calls of the operations' gradients, from their forward arguments.

    Raises:
        ValueError: an operation is registered twice.
    """
    return _registering(BACKWARD, family, signatures)


def both(family: Family, *signatures: str) -> Callable[[Function], Function]:
    """Register a function for operations and their gradients, which ``Inputs.is_backward`` distinguishes."""
    def register(function: Function) -> Function:
        return forward(family, *signatures)(backward(family, *signatures)(function))
    return register


def pattern(family: Family, expression: str) -> Callable[[Function], Function]:
    """Register a function for all operations whose whole name matches an expression; registered names come first."""
    def register(function: Function) -> Function:
        PATTERNS.append((re.compile(expression), Rule(family, (), function)))
        return function
    return register


def free(*names: str) -> None:
    """Register operations without device work."""
    for name in names:
        FORWARD[name] = Rule(Family.OTHER, (), lambda op: (), is_free=True)


def without_gradient(*names: str) -> None:
    """Register operations without a gradient in autograd."""
    WITHOUT_GRADIENT.update(names)


def forward_rule(name: str) -> Rule | None:
    """Return the rule for an operation's own work."""
    _load()
    found = _by_name(FORWARD, name)
    if found is None and len(name) <= MOST_PART:  # generated names have up to 200 characters; longer ones are slow
        found = next((rule for expression, rule in PATTERNS if expression.fullmatch(name)), None)
    return found


def backward_rule(name: str) -> Rule | None:
    """Return the rule for an operation's gradient."""
    rule = forward_rule(name)
    return rule if rule is not None and rule.is_free else _by_name(BACKWARD, name)


def has_gradient(name: str) -> bool:
    """Return whether an operation of this name has a gradient in autograd; optimizers have none."""
    rule = forward_rule(name)
    base = name.split(".")[0]
    return not (rule is not None and rule.family is Family.OPTIMIZER) and not (
        {base, base.rstrip("_")} & WITHOUT_GRADIENT)


def words(text: str) -> list[str]:
    """Split names separated by blanks: long lists are easier to read in this form."""
    return text.split()


def plain_name(name: str) -> str:
    """Return a name without name space, overload and in-place underscore: "aten::add_.Tensor" → "add"."""
    name = name.rsplit("::", 1)[-1].split(".")[0]
    return name.rstrip("_") or name


def unsized(family: Family, kind: str) -> OpCall:
    """Return a call without known sizes: only the family is known, all sizes are 0, and its flag is "unsized"."""
    return OpCall(family, kind, (0,) * len(DIMENSIONS[family]), "", flags=("unsized",))


def assumptions_of(calls: Iterable[OpCall]) -> dict[str, str]:
    """Return the values that calls assumed for missing arguments, by name."""
    found = {}
    for call in calls:
        for flag in call.flags:
            if flag.startswith("assumed_"):
                name, _, text = flag.removeprefix("assumed_").partition("=")
                found[name] = text
    return found


def mixed_types(read: list[TensorSpec], dtype: str, written: str = "") -> tuple[str, ...]:
    """Return flags for element types that differ from a call's own, so that its bytes follow from the call alone.

    "in_bf16": all elements read have that type. "in_bf16=4096": 4,096 of them do. "out_bool": that type is written.
    """
    counts: dict[str, int] = {}
    for tensor in read:
        counts[tensor.dtype] = counts.get(tensor.dtype, 0) + tensor.stored
    flags = [f"in_{kind}" if len(counts) == 1 else f"in_{kind}={n}" for kind, n in counts.items() if kind != dtype]
    if written and written != dtype:
        flags.append(f"out_{written}")
    return tuple(sorted(flags))


def compute_dtype(tensors: list[TensorSpec]) -> str:
    """Return the type in which an operation computes; tensors without dimensions count only if all have none."""
    with_sizes = [tensor.dtype for tensor in tensors if tensor.shape]
    return promoted(with_sizes or [tensor.dtype for tensor in tensors])


def spread(sizes: tuple[int, ...] | None, n: int, missing: int) -> tuple[int, ...]:
    """Return sizes for n dimensions; a single size holds for all, ``missing`` where none is given."""
    return (missing,) * n if not sizes else sizes * n if len(sizes) == 1 else sizes[:n]


def dimension(index: int | None, rank: int) -> int:
    """Return a dimension counted from the front; the last one if not recorded.

    Raises:
        Unpriceable: there is no such dimension.
    """
    index = rank - 1 if index is None else index
    if rank and not -rank <= index < rank:
        raise Unpriceable(f"dimension {index} of {rank}")
    return index % rank if rank else 0


def _registering(table: dict[str, Rule], family: Family, signatures: tuple[str, ...]) -> Callable[[Function], Function]:
    def register(function: Function) -> Function:
        for signature in signatures:
            match = _SIGNATURE.match(signature)
            if match is None or match["name"] in table:
                raise ValueError(f"{signature!r} is registered twice, or is no signature")
            names = tuple(name.strip() for name in (match["names"] or "").split(",") if name.strip())
            table[match["name"]] = Rule(family, names, function, is_gradient=table is BACKWARD)
        return function
    return register


def _by_name(table: dict[str, Rule], name: str) -> Rule | None:
    base = name.split(".")[0]
    for candidate in (name, base, base.removesuffix("_out"), base.rstrip("_")):
        if candidate in table:
            return table[candidate]
    return None


def _load() -> None:
    load()


def _stored_entries(text: str) -> int | None:
    start, _, count = text.partition("=")
    return int(count) if start == "stored" and count.isdigit() else None


def _tensor(argument: Argument) -> TensorSpec | None:
    """Return an argument's tensor; for a sparse tensor its stored entries, on which an operation works."""
    shape, dtype = argument.shape, short_dtype(argument.dtype)
    if shape is None or (shape and not all(isinstance(size, int) for size in shape)):
        return None
    # The 2020 format records sizes without types: fp32 is assumed there.
    if not dtype and (argument.dtype or not shape):
        return None
    entries = _stored_entries(argument.value) if shape and argument.value else None
    if entries is not None:
        return TensorSpec((entries, *shape[1:]), dtype or "fp32")
    stride = argument.stride
    return TensorSpec(shape, dtype or "fp32", stride if stride and len(stride) == len(shape) else None)


def _tensor_list(argument: Argument, dtype: str) -> list[TensorSpec]:
    """Return the tensors of a list. "TensorList[c10::Half]" includes their type; profilers write "TensorList" only."""
    shapes: Any = argument.shape
    dtype = short_dtype(argument.dtype.partition("[")[2].removesuffix("]")) or dtype
    if not shapes or not all(isinstance(shape, tuple) for shape in shapes):
        return []
    strides: Any = argument.stride if argument.stride and len(argument.stride) == len(shapes) else (None,) * len(shapes)
    return [
        TensorSpec(shape, dtype, stride if stride and len(stride) == len(shape) else None)
        for shape, stride in zip(shapes, strides, strict=True)
    ]


def _number(text: str) -> float | None:
    if text in ("True", "true"):
        return 1.0
    if text in ("False", "false"):
        return 0.0
    try:
        return float(text)
    except ValueError:
        return None
