"""An execution-trace node's arguments in the layout of the profiler's "Input Dims", "Input type" and so on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tracer.decode import list_of

# The trace's names of element types → the profiler's, which are those of C++.
_ELEMENT_TYPES = {"long": "long int", "short": "short int"}
_SCALARS = frozenset({"Int", "Double", "Bool", "SymInt", "SymFloat", "SymBool", "ComplexDouble"})


@dataclass(frozen=True, slots=True)
class ProfilerArguments:
    """JSON texts as the profiler writes them; empty where the node does not record that part."""

    shapes: str
    dtypes: str
    strides: str
    scalars: str


def profiler_arguments(values: str, shapes: str, types: str, strides: str) -> ProfilerArguments:
    """Translate one node's argument texts.

    Tensors keep their shape and stride and get their C++ element type; lists of tensors become ``TensorList`` with
    one shape each; numbers become ``Scalar`` and lists of numbers ``ScalarList``, with an empty shape and their
    value among the scalars; everything else is empty. A node without inputs gives four empty texts, and so does
    one whose lists differ in length.
    """
    kinds: list[Any] = list_of(types)
    dims = list_of(shapes)
    if not kinds or len(kinds) != len(dims):
        return ProfilerArguments("", "", "", "")
    steps = list_of(strides)
    given = list_of(values)
    dtypes = [_type(str(kind)) for kind in kinds]
    keeps = [dtype not in ("", "Scalar", "ScalarList") for dtype in dtypes]
    return ProfilerArguments(
        shapes=json.dumps([dim if keep else [] for dim, keep in zip(dims, keeps, strict=True)]),
        dtypes=json.dumps(dtypes),
        strides=json.dumps([s if keep else [] for s, keep in zip(steps, keeps, strict=True)])
        if len(steps) == len(kinds) else "",
        scalars=json.dumps([_scalar(value, dtype) for value, dtype in zip(given, dtypes, strict=True)])
        if len(given) == len(kinds) else "",
    )


def _type(kind: str) -> str:
    if kind.startswith("Tensor("):
        element = kind[len("Tensor("):-1]
        return "" if element.startswith("nullptr") else _ELEMENT_TYPES.get(element, element)
    if kind in _SCALARS:
        return "Scalar"
    if kind.startswith("GenericList["):
        inner = kind[len("GenericList["):-1]
        if inner.startswith("Tensor("):
            return "TensorList"
        # An empty list has no element type; the profiler calls it a list of scalars too.
        return "ScalarList" if not inner or inner.split(",")[0] in _SCALARS else ""
    return ""


def _scalar(value: object, dtype: str) -> str:
    """Write a value as the profiler's "Concrete Inputs" do: Python-like text of a number or list of numbers."""
    if dtype == "Scalar":
        return str(value)
    if dtype == "ScalarList" and isinstance(value, list):
        return "[" + ", ".join(str(part) for part in value) + "]"
    return ""
