"""Collectives and process groups of an execution trace: from attributes (1.1) or positional inputs (all schemas)."""

from __future__ import annotations

import math
import re
from functools import lru_cache
from typing import Any

import msgspec

from tracer.decode import list_of
from tracer.execution_trace.model import NONE, CommNode
from tracer.ranks import MOST_RANKS

# C++ type names that schemas without a dtype attribute put into "Tensor(...)" → the names newer schemas use.
SCALAR_TYPES = {
    "float": "Float", "double": "Double", "int": "Int", "long": "Long", "long int": "Long", "short": "Short",
    "short int": "Short", "bool": "Bool", "unsigned char": "Byte", "signed char": "Char", "c10::Half": "Half",
    "c10::BFloat16": "BFloat16", "c10::Float8_e4m3fn": "Float8_e4m3fn", "c10::Float8_e5m2": "Float8_e5m2",
    "c10::complex<float>": "ComplexFloat", "c10::complex<double>": "ComplexDouble",
}

_TENSOR_TYPE = re.compile(r"Tensor\(([^()]*(?:\(.*?\))?)\)")
_MOST_LISTED = 1 << 17
"""Ranks of a group that are listed: larger than any job there has been, and a megabyte of text."""
_GROUP_OBJECT = re.compile(r"\{[^{}]*\}")


def comm_node(
    row: int, inputs: str, input_shapes: str, input_types: str, output_shapes: str, attributes: dict[str, Any]
) -> CommNode | None:
    """A ``record_param_comms`` node's facts, ``None`` where neither attributes nor inputs name the collective.

    The positional inputs are ``[tensors], sequence, group, rank, name, in splits, out splits`` and, from schema
    1.0.3 on, ``first global rank, stride, group size``; ``group`` is an address, later ``(name, description)``.
    A ``wait`` has no tensors. Attributes win where both exist.
    """
    values = list_of(inputs)
    types = list_of(input_types)
    at = next((i for i, kind in enumerate(types) if kind == "String" and i < len(values)), None)
    name = str(attributes.get("collective_name", values[at] if at is not None else ""))
    if not name:
        return None
    group, description, pointer, sequence, in_splits, out_splits = "", "", 0, NONE, "", ""
    start = stride = size = NONE
    if at is not None and at >= 3:
        tail = values[at + 1:]
        sequence = _number(values[at - 3])
        if isinstance(values[at - 2], list) and len(values[at - 2]) == 2:
            group, description = (str(part) for part in values[at - 2])
        elif isinstance(values[at - 2], int):
            pointer = values[at - 2]
        if len(tail) >= 2:
            in_splits, out_splits = (msgspec.json.encode(part).decode() for part in tail[:2])
        if len(tail) >= 5:
            start, stride, size = (_number(part) for part in tail[2:5])
    size = _number(attributes.get("pg_size", size))
    start = _number(attributes.get("global_rank_start", start))
    stride = _number(attributes.get("global_rank_stride", stride))
    dtype = _TENSOR_TYPE.search(input_types)
    return CommNode(
        node=row,
        name=name,
        group=str(attributes.get("pg_name", group)),
        group_description=str(attributes.get("pg_desc", description)),
        group_pointer=pointer,
        group_size=size,
        ranks=_ranks(start, stride, size),
        dtype=str(attributes.get("dtype", SCALAR_TYPES.get(dtype.group(1), dtype.group(1)) if dtype else "")),
        elements_in=_number(attributes.get("in_msg_nelems", _elements(input_shapes, input_types))),
        elements_out=_number(attributes.get("out_msg_nelems", _elements(output_shapes, None))),
        sequence=sequence,
        in_splits=str(attributes.get("in_split_size", in_splits)),
        out_splits=str(attributes.get("out_split_size", out_splits)),
    )


def process_groups(inputs: str) -> tuple[list[dict[str, Any]], bool]:
    """Groups of a ``## process_group:init ##`` node, and whether its text was cut off.

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


def _number(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else NONE


@lru_cache(maxsize=256)
def _ranks(start: int, stride: int, size: int) -> str:
    """The ranks as a list's text; the same text for the same group, as a job of many ranks has many collectives."""
    if start < 0 or not 1 <= size <= _MOST_LISTED or (stride < 1 and size > 1) or start + stride * size > MOST_RANKS:
        return ""
    return str(list(range(start, start + max(stride, 1) * size, max(stride, 1))))


def _elements(shapes: str, types: str | None) -> int:
    """Elements of the tensor arguments: every innermost list of numbers in ``shapes`` is one tensor's shape."""
    decoded = list_of(shapes)
    if types is not None:
        decoded = [shape for shape, kind in zip(decoded, list_of(types), strict=False)
                   if isinstance(kind, str) and "Tensor(" in kind]

    def count(value: Any) -> int:
        if value and all(isinstance(part, int) for part in value):
            return math.prod(value)
        return sum(count(part) for part in value if isinstance(part, list))

    return count(decoded) if decoded else NONE
