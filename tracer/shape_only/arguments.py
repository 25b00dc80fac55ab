"""An operator's arguments: the tensors among them, and all as the profiler writes them ("Input Dims", "Input type", …).

So ``graph.arguments(op)`` gives the same for a recorded operation and for one traced by shapes alone: every argument of
the schema in order, defaults filled in; tensors with shape, stride and C++ type name; lists of tensors as
``TensorList[c10::Half]``, where the profiler writes ``TensorList`` and no type; numbers as ``Scalar`` and lists of
numbers as ``ScalarList`` with their text; the rest empty. A sparse tensor has no strides, as the profiler writes it,
and, what the profiler leaves out, how many of its entries are stored in place of a number's text: "stored=4096".
"""

from __future__ import annotations

import json
from typing import Any

import torch


def tensors_in(value: Any) -> list[Any]:
    """Return the tensors in a value and in the lists, tuples and dictionaries that it consists of, in their order.

    As ``torch.utils._pytree.tree_leaves`` finds them, in a fifth of its time: this is asked several times an operator.
    """
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [tensor for part in value for tensor in tensors_in(part)]


_TYPES: dict[Any, str] = {
    torch.float32: "float", torch.float64: "double", torch.float16: "c10::Half", torch.bfloat16: "c10::BFloat16",
    torch.int64: "long int", torch.int32: "int", torch.int16: "short int", torch.int8: "signed char",
    torch.uint8: "unsigned char", torch.bool: "bool", torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>",
}
_SCALAR_TYPES: dict[Any, int] = {
    torch.uint8: 0, torch.int8: 1, torch.int16: 2, torch.int32: 3, torch.int64: 4, torch.float16: 5, torch.float32: 6,
    torch.float64: 7, torch.complex64: 9, torch.complex128: 10, torch.bool: 11, torch.bfloat16: 15,
}
for _name, _type, _code in (("float8_e5m2", "c10::Float8_e5m2", 23), ("float8_e4m3fn", "c10::Float8_e4m3fn", 24),
                            ("uint16", "unsigned short", 27), ("uint32", "unsigned int", 28),
                            ("uint64", "unsigned long", 29)):
    if hasattr(torch, _name):
        _TYPES[getattr(torch, _name)], _SCALAR_TYPES[getattr(torch, _name)] = _type, _code
_WRAPPED = {int: "long int", float: "double", bool: "bool"}
_FORMATS = {torch.contiguous_format: 0, torch.preserve_format: 1, torch.channels_last: 2, torch.channels_last_3d: 3}

Texts = tuple[str, str, str, str]
"""Shapes, dtypes, strides and scalars, each a JSON text."""


class ArgumentWriter:
    """Writes the arguments of calls; the argument names and defaults of each operator are looked up once."""

    def __init__(self) -> None:
        self._schemas: dict[Any, list[tuple[str, Any, str]]] = {}

    def texts(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Texts:
        """The four texts of one call. ``kwargs`` may hold a device only where the call moves data to or from it."""
        schema = self._schemas.get(func)
        if schema is None:
            schema = self._schemas[func] = [
                (a.name, a.default_value, str(a.type))
                for a in func._schema.arguments]
        shapes: list[Any] = []
        dtypes: list[Any] = []
        strides: list[Any] = []
        scalars: list[Any] = []
        given = len(args)
        for i, (name, default, kind) in enumerate(schema):
            value = args[i] if i < given else kwargs.get(name, default)
            # A number in a tensor's place is a tensor without dimensions.
            if kind in ("Tensor", "Optional[Tensor]") and type(value) in _WRAPPED:
                written: tuple[str, Any, Any, str] = (_WRAPPED[type(value)], [], [], "")
            elif kind == "List[Tensor]" and not value:
                written = ("TensorList", [], [], "")
            else:
                written = _argument(value)
            for texts, text in zip((dtypes, shapes, strides, scalars), written, strict=True):
                texts.append(text)
        return json.dumps(shapes), json.dumps(dtypes), json.dumps(strides), json.dumps(scalars)


def type_name(dtype: Any) -> str:
    """A torch type as the profiler names it."""
    return _TYPES.get(dtype, str(dtype).removeprefix("torch."))


def _argument(value: Any) -> tuple[str, Any, Any, str]:
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided:
            return type_name(value.dtype), [int(n) for n in value.shape], [int(n) for n in value.stride()], ""
        stored = f"stored={value._nnz()}" if value.layout is torch.sparse_coo else ""
        return type_name(value.dtype), [int(n) for n in value.shape], [], stored
    if value is None or isinstance(value, str):
        return "", [], [], ""
    if isinstance(value, bool | int | float | torch.SymInt | torch.SymFloat | torch.SymBool):
        return "Scalar", [], [], _number(value)
    if isinstance(value, torch.dtype):
        return "Scalar", [], [], str(_SCALAR_TYPES.get(value, -1))
    if isinstance(value, torch.layout):
        return "Scalar", [], [], "0" if value is torch.strided else "1"
    if isinstance(value, torch.memory_format):
        return "Scalar", [], [], str(_FORMATS.get(value, 1))
    if isinstance(value, torch.device):
        return ("Device", [], [], str(value)) if value.type == "cuda" else ("", [], [], "")
    if isinstance(value, list | tuple):
        if any(isinstance(part, torch.Tensor) for part in value):
            tensors = [part for part in value if isinstance(part, torch.Tensor)]
            kinds = {type_name(t.dtype) for t in tensors}
            kind = f"TensorList[{kinds.pop()}]" if len(kinds) == 1 else "TensorList"
            return kind, [[int(n) for n in t.shape] for t in tensors], \
                [[int(n) for n in t.stride()] if t.layout is torch.strided else [] for t in tensors], ""
        if all(isinstance(part, bool | int | float | torch.SymInt) for part in value):
            return "ScalarList", [], [], "[" + ", ".join(map(_number, value)) + "]"
    return "", [], [], ""


def _number(value: Any) -> str:
    """Write a number as C++ prints it: 17 digits, and a point at the end of a whole floating-point number."""
    if isinstance(value, bool | torch.SymBool):
        return str(bool(value))
    if isinstance(value, float):
        text = f"{value:.17g}"
        return text + "." if text.lstrip("-").isdigit() else text
    return str(int(value))
