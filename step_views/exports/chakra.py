"""Chakra execution traces of a simulated job, one file a rank, with durations and all dependencies.

Chakra's own converter derives dependencies from the host's call stack and the order of calls: a kernel depends on its
launch, and nothing depends on the kernel. Here dependencies are the simulator's: launches, order on streams, waits
between streams, blocking calls, the full launch queue, hand-overs between threads. Collectives of a process group meet
in order.
::

    NAME.{rank}.et = (length as varint, GlobalMetadata), then (length as varint, Node)…, each after its dependencies
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from typing import Any, BinaryIO

import numpy as np

from graph_predictor.prediction.simulated_job import SimulatedJob
from graph_predictor.simulation.program import ItemKind
from kernel_models.collectives.recorded import element_bytes
from step_views.exports.perfetto import varint
from step_views.exports.work_graph import After, WorkGraph, WorkKind, work_graph
from tracer.columns import spans
from tracer.errors import ForetraceError
from tracer.graph import ExecutionGraph, KernelKind
from tracer.output_file import whole_file
from tracer.output_kind import CHAKRA, check_output

VERSION = "0.0.4"
"""Version of the schema, as Chakra's own converters write it."""


class ChakraNodeType(IntEnum):
    """``NodeType`` of the schema."""

    INVALID = 0
    METADATA = 1
    COMP = 4
    COMM_SEND = 5
    COMM_RECV = 6
    COMM_COLL = 7


COLLECTIVES = {"all_reduce": 0, "reduce": 1, "all_gather": 2, "gather": 3, "scatter": 4, "broadcast": 5,
               "all_to_all": 6, "reduce_scatter": 7, "barrier": 9}
"""``CollectiveCommType`` numbers of the schema, by foretrace's names of collectives."""

# FieldDescriptorProto.Type of protobuf; fields and kinds of nodes are those of Chakra's schema.
_DOUBLE, _UINT64, _INT32, _BOOL, _STRING, _MESSAGE, _ENUM, _INT64 = 1, 4, 5, 8, 9, 11, 14, 3
_ATTRIBUTES = (("double_val", 3, _DOUBLE), ("int32_val", 7, _INT32), ("int64_val", 9, _INT64),
               ("uint64_val", 13, _UINT64), ("bool_val", 27, _BOOL), ("string_val", 29, _STRING))
_TYPES = (("INVALID_NODE", 0), ("METADATA_NODE", 1), ("MEM_LOAD_NODE", 2), ("MEM_STORE_NODE", 3), ("COMP_NODE", 4),
          ("COMM_SEND_NODE", 5), ("COMM_RECV_NODE", 6), ("COMM_COLL_NODE", 7))
_PACKAGE = "ChakraProtoMsg"
"""``FieldDescriptorProto.Type`` of protobuf, and fields, types and package of Chakra's et_def.proto."""


@lru_cache(maxsize=1)
def messages() -> dict[str, Any]:
    """Return the protobuf classes ``GlobalMetadata``, ``Node`` and ``AttributeProto``, by name. Raises
    ``ForetraceError`` if protobuf is not installed."""
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    except ImportError as error:
        raise ForetraceError("Chakra traces are written with protobuf, which is not installed; pip install "
                             "'foretrace[export]'.") from error
    file = descriptor_pb2.FileDescriptorProto(name="et_def.proto", package=_PACKAGE, syntax="proto3")
    kinds = file.enum_type.add(name="NodeType")
    for name, number in _TYPES:
        kinds.value.add(name=name, number=number)

    def message(name: str, *fields: tuple[str, int, int, bool, str]) -> Any:
        found = file.message_type.add(name=name)
        for name_of, number, kind, repeated, of in fields:
            found.field.add(name=name_of, number=number, type=kind, label=3 if repeated else 1,
                            type_name=f".{_PACKAGE}.{of}" if of else None)
        return found

    attribute = message("AttributeProto", ("name", 1, _STRING, False, ""), ("doc_string", 2, _STRING, False, ""))
    attribute.oneof_decl.add(name="value")
    for name, number, kind in _ATTRIBUTES:
        attribute.field.add(name=name, number=number, type=kind, label=1, oneof_index=0)
    attributes = ("attr", _MESSAGE, True, "AttributeProto")
    message("GlobalMetadata", ("version", 1, _STRING, False, ""), (attributes[0], 2, *attributes[1:]))
    message("IOInfo", *((name, number, _STRING, False, "") for number, name in enumerate(
        ("values", "shapes", "types"), 1)))
    message("Node", ("id", 1, _UINT64, False, ""), ("name", 2, _STRING, False, ""),
            ("type", 3, _ENUM, False, "NodeType"), ("ctrl_deps", 4, _UINT64, True, ""),
            ("data_deps", 5, _UINT64, True, ""), ("start_time_micros", 6, _UINT64, False, ""),
            ("duration_micros", 7, _UINT64, False, ""), ("inputs", 8, _MESSAGE, False, "IOInfo"),
            ("outputs", 9, _MESSAGE, False, "IOInfo"), (attributes[0], 10, *attributes[1:]))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
            for name in ("GlobalMetadata", "Node", "AttributeProto")}


_MARKERS = {ItemKind.STEP_BEGIN: "begin of", ItemKind.STEP_END: "end of", ItemKind.HAND_OVER: "hand-over",
            ItemKind.RESUME: "resume", ItemKind.DATA_READY: "data ready"}
NODES_AT_ONCE = 20_000
"""Nodes whose columns are converted at once: Python's numbers take ten times the room (a choice)."""
_SEND, _RECEIVE, _BARRIER = "send", "recv", "barrier"


@dataclass(frozen=True, slots=True)
class ChakraFiles:
    """The Chakra traces that were written.

    Attributes:
        paths: one file a rank.
        nodes, dependencies: numbers over all files.
        off_by_us: largest difference of a node's end between the simulation and the files' own durations and
            dependencies, µs.
        notes: remarks for the reader.
    """

    paths: list[str]
    nodes: int
    dependencies: int
    off_by_us: int
    notes: list[str] = field(default_factory=list)


def write_chakra(job: SimulatedJob, path: str | os.PathLike[str]) -> ChakraFiles:
    """Write a simulated job as Chakra execution traces, in files named ``path.{rank}.et`` (``path`` may end with
    ``.et``). Raises ``ForetraceError`` if a file cannot be written, exists and is no such trace, or protobuf is not
    installed."""
    kinds = messages()
    graph = work_graph(job)
    name = os.fspath(path).removesuffix(".et")
    paths = [f"{name}.{job.rank_of(position)}.et" for position in range(len(job.graphs))]
    for each in paths:
        check_output(each, [], CHAKRA)
    ends, _ = graph.ends(graph.duration_us)
    off = int(np.abs(ends - (graph.start_ns + graph.duration_ns) // 1000).max(initial=0))
    ids, order = _numbers(graph)
    notes = []
    remote = undescribed = 0
    for position, each in enumerate(paths):
        writer = _RankFile(job, graph, position, ids, kinds)
        with whole_file(each) as stream:
            _write(stream, writer.metadata())
            for node in writer.nodes(order[graph.rank[order] == position]):
                _write(stream, node)
        remote, undescribed = remote + writer.remote, undescribed + writer.undescribed
    if remote:
        notes.append(f"{remote:,} dependencies on other ranks (receives on sends) are no part of a rank's file; nodes "
                     "carry them as the attribute after_rank, and readers pair sends with receives.")
    if undescribed:
        notes.append(f"{undescribed:,} collectives of unknown kind or size are written as work of their simulated "
                     "duration: a simulator of networks would make them free.")
    if graph.left_out:
        notes.append(f"{graph.left_out:,} dependencies with a negative lag decide nothing and were left out.")
    return ChakraFiles(paths, len(graph), len(graph.before) - remote, off, notes)


def _write(stream: BinaryIO, message: Any) -> None:
    """Write a message with its length before it."""
    body = message.SerializeToString()
    stream.write(varint(len(body)) + body)


def _numbers(graph: WorkGraph) -> tuple[np.ndarray, np.ndarray]:
    """Return each node's number within its rank, from 1 in an order of dependencies; and that order over all ranks."""
    order = graph.in_order
    by_rank = order[np.argsort(graph.rank[order], kind="stable")]
    counts = np.bincount(graph.rank, minlength=len(graph.job.graphs))
    ids = np.zeros(len(graph), np.int64)
    ids[by_rank] = np.arange(len(graph)) - np.repeat(np.cumsum(counts) - counts, counts) + 1
    return ids, order


class _RankFile:
    """Makes the messages of one rank's file."""

    def __init__(self, job: SimulatedJob, work: WorkGraph, position: int, ids: np.ndarray, kinds: dict[str, Any]):
        self.job, self.work, self.position, self.ids, self.kinds = job, work, position, ids, kinds
        self.graph: ExecutionGraph = job.graphs[position]
        self.rank = job.rank_of(position)
        self.remote = self.undescribed = 0
        self.low = int(job.built.program.kernel_ptr[position])
        table = self.graph.collectives
        self.collective = {int(kernel): row for row, kernel in enumerate(table.kernel.tolist()) if kernel >= 0}
        self.thread = job.thread_numbers()

    def metadata(self) -> Any:
        """Return the message with a file's common facts: versions, job, rank, world size, device, process groups."""
        meta = self.graph.meta
        found = self.kinds["GlobalMetadata"](version=VERSION)
        groups = {self.graph.string(int(group)): self.graph.string(int(ranks)) for group, ranks in zip(
            self.graph.collectives.group, self.graph.collectives.ranks, strict=True) if group >= 0}
        _add(found, "schema", "1.0.2-chakra.0.0.4")
        _add(found, "written_by", "foretrace")
        _add(found, "job", self.job.title)
        _add(found, "rank", self.rank)
        _add(found, "world_size", max(meta.world_size, len(self.job.graphs)))
        _add(found, "device", meta.device)
        _add(found, "process_groups", json.dumps(groups))
        if self.job.step_ns is not None:
            _add(found, "step_time_ns", round(self.job.step_ns))
        return found

    def nodes(self, rows: np.ndarray) -> Iterator[Any]:
        """Yield the rank's nodes; write each before taking the next, because the message is reused."""
        node, duration_us = self.kinds["Node"](), self.work.duration_us
        for low in range(0, len(rows), NODES_AT_ONCE):
            some = rows[low:low + NODES_AT_ONCE]
            yield from self._nodes(some, duration_us[some], node)

    def _nodes(self, rows: np.ndarray, duration_us: np.ndarray, node: Any) -> Iterator[Any]:
        work, ids = self.work, self.ids
        pointer = work.before_ptr
        kind, row, on_kernel = work.kind[rows].tolist(), work.row[rows].tolist(), work.on_kernel[rows].tolist()
        op, number = work.op[rows].tolist(), ids[rows].tolist()
        start, length = (work.start_ns[rows] // 1000).tolist(), duration_us.tolist()
        exact = work.duration_ns[rows].tolist()
        # The dependencies of these rows, one row after another.
        counts = pointer[rows + 1] - pointer[rows]
        before = work.before[spans(pointer[rows], pointer[rows + 1])]
        needs, far = ids[before].tolist(), work.rank[before] != self.position
        ends = np.cumsum(counts)
        # Cumulative number of dependencies on other ranks.
        apart = np.concatenate([[0], np.cumsum(far)])
        remote = (apart[ends] - apart[ends - counts]).tolist()
        first, last, why_of = (ends - counts).tolist(), ends.tolist(), pointer[rows].tolist()
        for at in range(len(rows)):
            node.Clear()
            node.id, node.start_time_micros, node.duration_micros = number[at], start[at], length[at]
            low, high = first[at], last[at]
            if not remote[at]:
                node.data_deps.extend(needs[low:high])
            else:
                self._across(node, before[low:high].tolist())
            if kind[at] == WorkKind.KERNEL:
                self._kernel(node, row[at])
            elif kind[at] == WorkKind.TAIL:
                self._tail(node, row[at])
            else:
                node.type = ChakraNodeType.COMP
                _add(node, "is_cpu_op", True)
                if kind[at] == WorkKind.HOST:
                    node.name = self._op(op[at]) or "host work outside any operation"
                    self._thread(node, row[at])
                elif kind[at] == WorkKind.CALL:
                    node.name = self._call(row[at])
                    self._thread(node, row[at])
                else:
                    why = After(int(work.why[why_of[at]])).label if high > low else After.OUTSIDE.label
                    node.name = self._moment(kind[at], row[at], on_kernel[at], why)
                    _add(node, "delay" if kind[at] == WorkKind.DELAY else "moment", True)
            if exact[at]:
                _add(node, "duration_ns", exact[at])
            yield node

    def _across(self, node: Any, before: list[int]) -> None:
        """Add dependencies on nodes of any rank; those on other ranks become an attribute."""
        for other in before:
            if self.work.rank[other] != self.position:
                self.remote += 1
                _add(node, "after_rank", f"{self.job.rank_of(int(self.work.rank[other]))}:{int(self.ids[other])}")
            else:
                node.data_deps.append(int(self.ids[other]))

    def _thread(self, node: Any, item: int) -> None:
        _add(node, "tid", int(self.thread[item]))

    def _op(self, row: int) -> str:
        return self.graph.string(int(self.graph.ops.name[row])) if row >= 0 else ""

    def _call(self, item: int) -> str:
        program = self.job.program
        kind, row = int(program.item_kind[item]), int(program.item_row[item])
        if kind == ItemKind.CALL:
            return self.graph.string(int(self.graph.launches.name[row])) if row >= 0 else "call"
        name = _MARKERS[ItemKind(kind)]
        return f"{name} {self.graph.string(int(self.graph.steps.name[row]))}" if row >= 0 and kind in (
            ItemKind.STEP_BEGIN, ItemKind.STEP_END) else name

    def _moment(self, kind: int, row: int, on_kernel: bool, why: str) -> str:
        if kind == WorkKind.DELAY:
            return f"delay ({why})"
        what = "kernel" if on_kernel else self._call(row)
        return f"{'return from' if kind == WorkKind.RETURN else 'start of'} {what}"

    def _kernel(self, node: Any, kernel: int) -> None:
        kernels = self.graph.kernels
        row = int(self.job.kernel[kernel]) - self.low
        node.name = self.graph.string(int(kernels.name[row]))
        node.type = ChakraNodeType.COMP
        _add(node, "is_cpu_op", False)
        _add(node, "stream", int(kernels.stream[row]))
        _add(node, "kernel_kind", KernelKind(int(kernels.kind[row])).name.lower())
        if operation := self._op(int(kernels.op[row])):
            _add(node, "op", operation)
        if kernels.bytes[row] > 0:
            _add(node, "tensor_size", int(kernels.bytes[row]), unsigned=True)
        if kernels.kind[row] == KernelKind.COLLECTIVE:
            self._communication(node, row, kernel)

    def _tail(self, node: Any, kernel: int) -> None:
        """Set a node to the end of a kernel with which the next kernel may overlap."""
        row = int(self.job.kernel[kernel]) - self.low
        node.name = f"end of {self.graph.string(int(self.graph.kernels.name[row]))}"
        node.type = ChakraNodeType.COMP
        _add(node, "is_cpu_op", False)
        _add(node, "stream", int(self.graph.kernels.stream[row]))
        _add(node, "tail", True)

    def _communication(self, node: Any, row: int, kernel: int) -> None:
        """Add the attributes of communication that Chakra's readers use. Without a description in the trace the node
        remains work of known duration; nothing is invented."""
        group = int(self.job.program.kernel_group[kernel])
        if group >= 0:
            _add(node, "rendezvous", group)
        if row not in self.collective:
            self.undescribed += 1
            return
        table, at = self.graph.collectives, self.collective[row]
        kind = self.graph.string(int(table.kind[at]))
        _add(node, "collective", kind)
        if kind != _BARRIER and table.elements_in[at] < 0 and table.elements_out[at] < 0:
            self.undescribed += 1
            return
        _, width = element_bytes(self.graph, table, at)
        size = max(int(table.elements_in[at]), 0) * width or max(int(table.elements_out[at]), 0) * width
        ranks = self.graph.string(int(table.ranks[at]))
        if kind in COLLECTIVES:
            node.type = ChakraNodeType.COMM_COLL
            _add(node, "comm_type", COLLECTIVES[kind])
        elif kind in (_SEND, _RECEIVE) and (pair := _pair(ranks)) is not None:
            node.type = ChakraNodeType.COMM_SEND if kind == _SEND else ChakraNodeType.COMM_RECV
            for name, rank in zip(("comm_src", "comm_dst"), pair, strict=True):
                _add(node, name, rank, narrow=True)
            _add(node, "comm_tag", max(int(table.order[at]), 0), narrow=True)
        _add(node, "comm_size", int(size))
        if table.group[at] >= 0:
            _add(node, "pg_name", self.graph.string(int(table.group[at])))
        if ranks:
            _add(node, "pg_ranks", ranks)


def _pair(ranks: str) -> tuple[int, int] | None:
    """Return sender and receiver if a text names two ranks; else ``None``."""
    try:
        found = json.loads(ranks)
    except ValueError:
        return None
    return (int(found[0]), int(found[1])) if isinstance(found, list) and len(found) == 2 else None


def _add(message: Any, name: str, value: bool | int | str, *, narrow: bool = False, unsigned: bool = False) -> None:
    """Add an attribute, with the type that Chakra's readers expect for its name."""
    attribute = message.attr.add()
    attribute.name = name
    if isinstance(value, bool):
        attribute.bool_val = value
    elif isinstance(value, str):
        attribute.string_val = value
    elif narrow:
        attribute.int32_val = value
    elif unsigned:
        attribute.uint64_val = value
    else:
        attribute.int64_val = value
