"""Typed decoding of PyTorch execution traces, schemas 1.0.1 to 1.1.1, with or without the Chakra suffix."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from tracer.columns import NONE
from tracer.errors import TraceError
from tracer.execution_trace.trace import (
    COMM_NODE,
    PROCESS_GROUP_NODE,
    ExecutionTrace,
    comm_node,
    number_of,
    process_groups,
)
from tracer.kineto.source import TraceSource

KNOWN_SCHEMAS = frozenset({"1.0.1", "1.0.2", "1.0.3", "1.0.4", "1.1.0", "1.1.1"})

_SCHEMA = re.compile(rb'"schema"\s*:\s*"\d')
_NODES = re.compile(rb'"nodes"\s*:\s*\[')
_EVENTS = re.compile(rb'"traceEvents"\s*:')
# Infinity and NaN as older PyTorch wrote them: bare, which is no JSON.
_BARE_NUMBER = re.compile(rb"(?<=[\[,:\s])(-?(?:inf|nan|Infinity|NaN))(?=\s*[,\]}])")
# One node is a few kB at most (a process-group list is longer, but rarely a megabyte).
_SNIFF_BYTES = 1 << 20

_EMPTY_LIST = msgspec.Raw(b"[]")
_ABSENT = msgspec.Raw()


class _File(msgspec.Struct):
    nodes: msgspec.Raw
    schema: str = ""
    pid: int = 0


class _Values(msgspec.Struct):
    values: msgspec.Raw = _EMPTY_LIST
    shapes: msgspec.Raw = _EMPTY_LIST
    types: msgspec.Raw = _EMPTY_LIST
    strides: msgspec.Raw = _ABSENT


class _Attribute(msgspec.Struct):
    name: str
    value: Any = None


class _Node(msgspec.Struct):
    """A node of schema 1.0.2 and later: arguments in objects, numbers in an attribute list."""

    id: int
    name: str
    inputs: _Values
    outputs: _Values
    attrs: list[_Attribute]
    ctrl_deps: int = NONE


class _FlatNode(msgspec.Struct):
    """A node of schema 1.0.1: everything at one level."""

    id: int
    name: str
    parent: int = NONE
    rf_id: int = NONE
    seq_id: int = NONE
    tid: int = NONE
    inputs: msgspec.Raw = _EMPTY_LIST
    input_shapes: msgspec.Raw = _EMPTY_LIST
    input_types: msgspec.Raw = _EMPTY_LIST
    output_shapes: msgspec.Raw = _EMPTY_LIST


_NUMBERS = ("rf_id", "seq_id", "tid")
"""Attributes that are read; ``NONE`` if a node lacks one."""


def is_execution_trace(head: bytes) -> bool:
    """Return whether a file's first (uncompressed) bytes are those of an execution trace; more bytes are more certain.

    Execution traces begin with their ``schema``; Kineto files are a list, or have ``schemaVersion`` and events.
    """
    if _EVENTS.search(head) or not head.lstrip().startswith(b"{"):
        return False
    return _SCHEMA.search(head) is not None or _NODES.search(head) is not None


def read_execution_trace(path: str | os.PathLike[str]) -> ExecutionTrace:
    """Read an execution trace.

    Args:
        path: a local path or fsspec URL of a JSON file, gzipped or plain.

    Raises:
        TraceError: the file is missing, empty, truncated, not JSON, not an execution trace, or of a schema whose
            fields this version cannot read.
    """
    source = TraceSource(path)
    label = source.name
    data = b"".join(source.blocks())
    if source.damage:
        raise TraceError(f"{label} is damaged: {source.damage}; copy or record it again.")
    if not data.strip():
        raise TraceError(f"{label} is empty; record the execution trace again.")
    notes: list[str] = []
    try:
        file, nodes = _decode(data, label)
    except msgspec.DecodeError as error:
        mended, count = _BARE_NUMBER.subn(rb'"\1"', data)
        if not count:
            raise _broken(label, error) from None
        notes.append(f"{count} bare inf or nan values are no JSON and were read as texts.")
        try:
            file, nodes = _decode(mended, label)
        except msgspec.DecodeError as second:
            raise _broken(label, second) from None
    if not nodes:
        raise TraceError(f"{label} has no nodes; the observer was probably stopped before anything ran.")
    if file.schema.split("-")[0] not in KNOWN_SCHEMAS:
        notes.append(f"schema {file.schema or 'unknown'} is newer than 1.1.1; the fields known from 1.1.1 were read.")
    return _build(file, nodes, notes)


def _broken(label: str, error: msgspec.DecodeError) -> TraceError:
    return TraceError(
        f"{label} is not a readable execution trace ({error}); it is probably truncated because the observer was "
        "not stopped, so record it again."
    )


def _decode(data: bytes, label: str) -> tuple[_File, list[Any]]:
    try:
        file = msgspec.json.decode(data, type=_File)
    except (msgspec.ValidationError, UnicodeDecodeError, RecursionError):
        raise TraceError(
            f"{label} is not an execution trace: it has no list of nodes; give a file written by "
            "torch.profiler.ExecutionTraceObserver."
        ) from None
    nested = b'"attrs"' in bytes(memoryview(file.nodes)[:_SNIFF_BYTES])
    try:
        if nested:
            return file, msgspec.json.decode(file.nodes, type=list[_Node])
        return file, msgspec.json.decode(file.nodes, type=list[_FlatNode])
    except (msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise TraceError(
            f"{label} has schema {file.schema or 'unknown'}, whose nodes this version cannot read ({error}); "
            "record with a PyTorch that writes schema 1.0.1 to 1.1.1."
        ) from None


class _Interner:
    """Gives texts codes, in order of first appearance."""

    def __init__(self) -> None:
        self.codes: dict[bytes, int] = {}

    def column(self, texts: Iterable[bytes | msgspec.Raw]) -> np.ndarray:
        """Return the codes of texts; an empty text has the code ``NONE``."""
        codes = self.codes
        return np.array(
            [codes.setdefault(text, len(codes)) if text else NONE for text in map(bytes, texts)], dtype=np.int32
        )

    def strings(self) -> list[str]:
        return [text.decode("utf-8", "replace") for text in self.codes]


def _build(file: _File, nodes: list[Any], notes: list[str]) -> ExecutionTrace:
    nodes.sort(key=lambda node: node.id)
    intern = _Interner()
    attributes: list[dict[str, Any]] = []
    columns: dict[str, Any] = {}
    if isinstance(nodes[0], _FlatNode):
        numbers = {name: [getattr(node, name) for node in nodes] for name in _NUMBERS}
        parents = [node.parent for node in nodes]
        for column in ("inputs", "input_shapes", "input_types", "output_shapes"):
            columns[column] = intern.column(getattr(node, column) for node in nodes)
        columns["input_strides"] = np.full(len(nodes), NONE, np.int32)
    else:
        attributes = [{a.name: a.value for a in node.attrs} for node in nodes]
        numbers = {name: [number_of(found.get(name)) for found in attributes] for name in _NUMBERS}
        parents = [node.ctrl_deps for node in nodes]
        columns["inputs"] = intern.column(node.inputs.values for node in nodes)
        for part in ("shapes", "types", "strides"):
            columns[f"input_{part}"] = intern.column(getattr(node.inputs, part) for node in nodes)
        columns["output_shapes"] = intern.column(node.outputs.shapes for node in nodes)
    columns["name"] = intern.column(node.name.encode() for node in nodes)
    trace = ExecutionTrace(
        schema=file.schema, pid=file.pid, strings=intern.strings(), id=_int64(node.id for node in nodes),
        parent=_int64(parents), record_id=_int64(numbers["rf_id"]), sequence=_int64(numbers["seq_id"]),
        thread=_int64(numbers["tid"]), notes=notes, **columns)
    for row, node in enumerate(nodes):
        if node.name == COMM_NODE:
            _add_comm(trace, row, attributes[row] if attributes else {})
        elif node.name == PROCESS_GROUP_NODE:
            groups_found, whole = process_groups(trace.string(int(trace.inputs[row])))
            trace.process_groups.extend(groups_found)
            if not whole:
                notes.append(f"the list of process groups was cut off when recorded; {len(groups_found)} were read.")
    return trace


def _add_comm(trace: ExecutionTrace, row: int, attributes: dict[str, Any]) -> None:
    texts = [trace.string(int(getattr(trace, column)[row]))
             for column in ("inputs", "input_shapes", "input_types", "output_shapes")]
    try:
        comm = comm_node(row, texts[0], texts[1], texts[2], texts[3], attributes)
    except (msgspec.MsgspecError, TypeError, ValueError):
        comm = None
    if comm is not None:
        trace.comms.append(comm)
    else:
        trace.notes.append(f"communication node {int(trace.id[row])} does not name its collective and was skipped.")


def _int64(values: Iterable[int]) -> np.ndarray:
    # Ids are uint64 in the format; anything beyond int64 is a "-1" PyTorch printed as unsigned.
    return np.array([value if -(1 << 63) <= value < 1 << 63 else NONE for value in values], dtype=np.int64)
