"""The columnar form of one PyTorch execution trace, its collectives, and its arguments as the profiler writes them.

An execution trace lists the operations of a short window with their arguments and tensor identities, but without times.
Node ids are numbered in the order in which operations *started*, so sorting by id gives program order. Collectives and
process groups are identified by attributes (schema 1.1) or positional inputs (all schemas).
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from tracer.arrays import Bool, Int32, Int64
from tracer.columns import NONE
from tracer.guard import MOST_RANKS
from tracer.input_file import list_of
from tracer.kineto.events import dtype_name

PROCESS_GROUP_NODE = "## process_group:init ##"
COMM_NODE = "record_param_comms"


@dataclass(frozen=True, slots=True)
class CommNode:
    """One ``record_param_comms`` node: a collective call, or a ``wait`` on one.

    ``name`` is what PyTorch wrote ("allreduce", "all_to_allv", "wait"). Elements are this rank's. ``group`` is the
    process group's name where the schema has names. ``ranks`` is JSON text such as "[0, 1]". Unknown numbers are
    ``-1``, unknown texts empty.
    """

    node: int
    """Row in the trace's columns."""
    name: str
    group: str = ""
    group_description: str = ""
    group_size: int = NONE
    ranks: str = ""
    dtype: str = ""
    elements_in: int = NONE
    elements_out: int = NONE


@dataclass(slots=True)
class ExecutionTrace:
    """One execution trace as columns, sorted by node id (start order). -1 is "none" everywhere.

    ``name`` and the argument columns hold codes into ``strings``; the argument texts are JSON exactly as the trace
    wrote them (``input_shapes`` such as ``[[16,416],[]]``). ``parent`` is a node's *id*. ``thread`` counts from 1
    within the trace, 0 is the process node.
    """

    schema: str
    pid: int
    strings: list[str]
    id: Int64
    name: Int32
    parent: Int64
    record_id: Int64
    sequence: Int64
    thread: Int64
    inputs: Int32
    input_shapes: Int32
    input_types: Int32
    input_strides: Int32
    output_shapes: Int32
    comms: list[CommNode] = field(default_factory=list)
    process_groups: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.id)

    def string(self, code: int) -> str:
        """Return the text of a string code; empty for ``-1``."""
        return "" if code < 0 else self.strings[code]

    def is_operation(self) -> Bool:
        """Return a mask of the nodes that a profiler records too: no process, thread or process-group nodes."""
        synthetic = {
            code for code, text in enumerate(self.strings)
            if text == PROCESS_GROUP_NODE or (text.startswith("[pytorch|profiler|execution_") and text.endswith("]"))
        }
        return ~np.isin(self.name, np.array(sorted(synthetic), dtype=np.int32))


_TENSOR_TYPE = re.compile(r"Tensor\(([^()]*(?:\([^()]*\))?)\)")
_MOST_LISTED = 1 << 17
"""Most ranks of a group that are listed: more than any known job has, and a megabyte of text."""
_GROUP_OBJECT = re.compile(r"\{[^{}]*\}")


def comm_node(
    row: int, inputs: str, input_shapes: str, input_types: str, output_shapes: str, attributes: dict[str, Any]
) -> CommNode | None:
    """Return a ``record_param_comms`` node's facts, ``None`` where neither attributes nor inputs name the collective.

    The positional inputs are ``[tensors], sequence, group, rank, name, in splits, out splits`` and, from schema
    1.0.3 on, ``first global rank, stride, group size``; ``group`` is an address of the process, later ``(name,
    description)``.
    A ``wait`` has no tensors. Attributes win where both exist.
    """
    values = list_of(inputs)
    types = list_of(input_types)
    at = next((i for i, kind in enumerate(types) if kind == "String" and i < len(values)), None)
    name = str(attributes.get("collective_name", values[at] if at is not None else ""))
    if not name:
        return None
    group = description = ""
    start = stride = size = NONE
    if at is not None and at >= 3:
        tail = values[at + 1:]
        if isinstance(values[at - 2], list) and len(values[at - 2]) == 2:
            group, description = (str(part) for part in values[at - 2])
        if len(tail) >= 5:
            start, stride, size = (number_of(part) for part in tail[2:5])
    size = number_of(attributes.get("pg_size", size))
    start = number_of(attributes.get("global_rank_start", start))
    stride = number_of(attributes.get("global_rank_stride", stride))
    dtype = _TENSOR_TYPE.search(input_types)
    return CommNode(
        node=row,
        name=name,
        group=str(attributes.get("pg_name", group)),
        group_description=str(attributes.get("pg_desc", description)),
        group_size=size,
        ranks=_ranks(start, stride, size),
        dtype=dtype_name(str(attributes.get("dtype", dtype.group(1) if dtype else ""))),
        elements_in=number_of(attributes.get("in_msg_nelems", _elements(input_shapes, input_types))),
        elements_out=number_of(attributes.get("out_msg_nelems", _elements(output_shapes, None))),
    )


def process_groups(inputs: str) -> tuple[list[dict[str, Any]], bool]:
    """Return the groups of a ``## process_group:init ##`` node, and whether its text was cut off.

    Keys are those of Kineto's ``distributedInfo.pg_config``: pg_name, pg_desc, backend_config, pg_size, ranks.
    PyTorch truncates the text on large jobs; the groups before the cut are kept.
    """
    values = list_of(inputs)
    text = next((value for value in values if isinstance(value, str)), "")
    whole = True
    try:
        found = msgspec.json.decode(text, type=list[dict[str, Any]])
    except msgspec.MsgspecError:
        whole = False
        found = []
        for match in _GROUP_OBJECT.finditer(text):
            try:
                found.append(msgspec.json.decode(match.group(), type=dict[str, Any]))
            except msgspec.MsgspecError:
                continue
    groups = []
    for group in found:
        size = group.pop("group_size", None)
        group.pop("group_count", None)
        if size is not None:
            group.setdefault("pg_size", size)
        groups.append(group)
    return groups, whole


def number_of(value: object) -> int:
    """Return a whole number; ``NONE`` for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) else NONE


@lru_cache(maxsize=256)
def _ranks(start: int, stride: int, size: int) -> str:
    """Return the ranks as a list's text; equal groups share one text object, to save memory in large jobs."""
    if start < 0 or not 1 <= size <= _MOST_LISTED or (stride < 1 and size > 1) or start + stride * size > MOST_RANKS:
        return ""
    return str(list(range(start, start + max(stride, 1) * size, max(stride, 1))))


def _elements(shapes: str, types: str | None) -> int:
    """Return the elements of tensor arguments: each innermost list of numbers in ``shapes`` is one tensor's shape."""
    decoded = list_of(shapes)
    if types is not None:
        decoded = [shape for shape, kind in zip(decoded, list_of(types), strict=False)
                   if isinstance(kind, str) and "Tensor(" in kind]

    def count(value: Any) -> int:
        if value and all(isinstance(part, int) for part in value):
            return math.prod(value)
        return sum(count(part) for part in value if isinstance(part, list))

    return count(decoded) if decoded else NONE


# The trace's names of element types → the profiler's, which are C++ names.
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

    Tensors keep their shape and stride, and get their C++ element type. Lists of tensors become ``TensorList`` with one
    shape each. Numbers become ``Scalar`` and lists of numbers ``ScalarList``, with an empty shape and their value among
    the scalars. Everything else is empty. A node without inputs, or with lists of different lengths, gives four empty
    texts.
    """
    dtypes, written, nothing = _element_types(types)
    kept = _of_tensors(shapes, types)
    if not dtypes or not kept:
        return ProfilerArguments("", "", "", "")
    given, scalars = list_of(values), ""
    if len(given) == len(dtypes):
        scalars = nothing or json.dumps([_scalar(value, dtype) for value, dtype in zip(given, dtypes, strict=True)])
    return ProfilerArguments(shapes=kept, dtypes=written, strides=_of_tensors(strides, types), scalars=scalars)


@lru_cache(maxsize=4096)
def _element_types(types: str) -> tuple[tuple[str, ...], str, str]:
    """Return the profiler's names, their text, and the text without scalars; nodes with equal types share them."""
    found = tuple(_type(str(kind)) for kind in list_of(types))
    return found, json.dumps(found), "" if {"Scalar", "ScalarList"} & {*found} else json.dumps([""] * len(found))


@lru_cache(maxsize=4096)
def _of_tensors(text: str, types: str) -> str:
    """Return the shapes or strides of tensors only; empty if their number differs from that of the types."""
    found, dtypes = list_of(text), _element_types(types)[0]
    if len(found) != len(dtypes):
        return ""
    return json.dumps([each if dtype not in ("", "Scalar", "ScalarList") else []
                       for each, dtype in zip(found, dtypes, strict=True)])


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
        # An empty list has no element type; the profiler also calls it a list of scalars.
        return "ScalarList" if not inner or inner.split(",")[0] in _SCALARS else ""
    return ""


def _scalar(value: object, dtype: str) -> str:
    """Write a value as the profiler's "Concrete Inputs" do: Python-like text of a number or list of numbers."""
    if dtype == "Scalar":
        return str(value)
    if dtype == "ScalarList" and isinstance(value, list):
        return "[" + ", ".join(str(part) for part in value) + "]"
    return ""
