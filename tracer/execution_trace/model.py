"""The columnar form of one PyTorch execution trace.

An execution trace lists the operations of a short window with their arguments and tensor identities, but without
any times. Node ids are numbered in the order the operations *started*, so sorting by id gives program order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tracer.arrays import Bool, Int32, Int64

NONE = -1

PROCESS_GROUP_NODE = "## process_group:init ##"
COMM_NODE = "record_param_comms"


@dataclass(frozen=True, slots=True)
class CommNode:
    """One ``record_param_comms`` node: a collective call, or a ``wait`` on one.

    ``name`` is what PyTorch wrote ("allreduce", "all_to_allv", "wait"). Elements are this rank's. ``group`` is the
    process group's name where the schema has names; ``group_pointer`` the in-process address older schemas wrote
    instead (not comparable between ranks). ``ranks`` is JSON text such as "[0, 1]". Unknown numbers are ``-1``,
    unknown texts empty.
    """

    node: int
    """Row in the trace's columns."""
    name: str
    group: str = ""
    group_description: str = ""
    group_pointer: int = 0
    group_size: int = NONE
    ranks: str = ""
    dtype: str = ""
    elements_in: int = NONE
    elements_out: int = NONE
    sequence: int = NONE
    in_splits: str = ""
    out_splits: str = ""


@dataclass(slots=True)
class ExecutionTrace:
    """One execution trace as columns, sorted by node id (start order). -1 is "none" everywhere.

    ``name``, ``op_schema`` and the eight argument columns hold codes into ``strings``; the argument texts are
    JSON exactly as the trace wrote them (``input_shapes`` such as ``[[16,416],[]]``). ``parent`` and
    ``forward_parent`` are node *ids*. ``thread`` counts from 1 within the trace, 0 is the process node.
    """

    schema: str
    pid: int
    time: str
    start_ts: int
    finish_ts: int
    strings: list[str]
    id: Int64
    name: Int32
    parent: Int64
    forward_parent: Int64
    record_id: Int64
    sequence: Int64
    scope: Int64
    thread: Int64
    forward_thread: Int64
    op_schema: Int32
    inputs: Int32
    input_shapes: Int32
    input_types: Int32
    input_strides: Int32
    outputs: Int32
    output_shapes: Int32
    output_types: Int32
    output_strides: Int32
    comms: list[CommNode] = field(default_factory=list)
    process_groups: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.id)

    def string(self, code: int) -> str:
        """The text of a string code; empty for ``-1``."""
        return "" if code < 0 else self.strings[code]

    def row_of(self, node_id: int) -> int:
        """Row of a node id, -1 if the trace has no such node."""
        row = int(np.searchsorted(self.id, node_id))
        return row if row < len(self.id) and self.id[row] == node_id else NONE

    def is_operation(self) -> Bool:
        """Mask of the nodes a profiler records too: all but the process, thread and process-group nodes."""
        synthetic = {
            code for code, text in enumerate(self.strings)
            if text == PROCESS_GROUP_NODE or (text.startswith("[pytorch|profiler|execution_") and text.endswith("]"))
        }
        return ~np.isin(self.name, np.array(sorted(synthetic), dtype=np.int32))
