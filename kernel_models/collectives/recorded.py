"""Measurements from recorded jobs: the time of a collective after its last rank arrived.

A rank's recorded duration is waiting and transfer; over all ranks of a group the shortest is the transfer (the rank
that arrived last waited least). Only collectives that every rank of their group recorded are used.
"""

from __future__ import annotations

from collections.abc import Sequence

from kernel_models.collectives.call import (
    DTYPE_BYTES,
    CollectiveKind,
    CommError,
    collective_kind,
)
from kernel_models.collectives.measurements import CollectiveMeasurements, make_measurements
from kernel_models.collectives.topology import Topology
from tracer.graph import NONE, CollectiveTable, ExecutionGraph


def payload_bytes(kind: CollectiveKind, elements_in: int, elements_out: int, element_bytes: int, ranks: int) -> float:
    """Return nccl-tests' size of a recorded collective, bytes; ``NaN`` where no sizes were recorded.

    The size of an all-gather is its output, of a reduce-scatter its input; where only the other end is known, ``ranks``
    times that. The size of an uneven all-to-all is the larger of the bytes that the rank sends and receives.
    """
    known_in, known_out = elements_in >= 0, elements_out >= 0
    if kind is CollectiveKind.BARRIER:
        return 4.0
    if kind is CollectiveKind.ALL_GATHER:
        elements = elements_out if known_out else elements_in * ranks if known_in else -1
    elif kind is CollectiveKind.REDUCE_SCATTER:
        elements = elements_in if known_in else elements_out * ranks if known_out else -1
    elif kind is CollectiveKind.ALL_TO_ALL:
        elements = max(elements_in, elements_out)
    else:
        elements = elements_in if known_in else elements_out
    return float(elements * element_bytes) if elements >= 0 else float("nan")


def kind_of(graph: ExecutionGraph, table: CollectiveTable, row: int) -> CollectiveKind | None:
    """Return a collective's kind; ``None`` if unknown."""
    try:
        return collective_kind(graph.string(int(table.kind[row])))
    except CommError:
        return None


def element_bytes(graph: ExecutionGraph, table: CollectiveTable, row: int) -> tuple[str, int]:
    """Return the dtype and its bytes; float32 where the trace does not record it."""
    name = graph.string(int(table.dtype[row])) if table.dtype[row] != NONE else ""
    return (name, DTYPE_BYTES[name]) if name in DTYPE_BYTES else ("float32", 4)


def read_matched(graphs: Sequence[ExecutionGraph], groups: Sequence[Sequence[tuple[int, int]]],
                 intrinsic_ns: Sequence[int], on: Topology, backend: str = "nccl") -> CollectiveMeasurements:
    """Return the measurements of collectives whose kernels were matched over ranks.

    Args:
        graphs: One for each recorded rank.
        groups: For each collective its kernels: pairs (index into ``graphs``, row of that graph's ``kernels``).
        intrinsic_ns: Time of each collective after its last rank arrived, ns.
        on: Cluster on which the ranks lie.
        backend: Name of the backend.

    Raises:
        CommError: No collective has its kind, size and all ranks recorded, or the ranks ran on different GPUs.
    """
    row_of = [{int(k): i for i, k in enumerate(g.collectives.kernel.tolist()) if k >= 0} for g in graphs]
    rows = []
    for members, time_ns in zip(groups, intrinsic_ns, strict=True):
        ranks = [graphs[p].meta.rank if graphs[p].meta.rank >= 0 else p for p, _ in members]
        largest, what = float("nan"), None
        complete = True
        for position, kernel in members:
            graph = graphs[position]
            row = row_of[position].get(kernel)
            kind = kind_of(graph, graph.collectives, row) if row is not None else None
            if row is None or kind is None:
                complete = False
                break
            table = graph.collectives
            complete &= int(table.group_size[row]) in (NONE, len(members))
            dtype, width = element_bytes(graph, table, row)
            size = payload_bytes(kind, int(table.elements_in[row]), int(table.elements_out[row]), width, len(members))
            largest, what = (size if not largest >= size else largest), (kind, dtype)
        if complete and what is not None and largest == largest and time_ns > 0:
            rows.append((what[0], what[1], on.place(ranks), largest, time_ns / 1e3))
    if not rows:
        raise CommError("No collective in the trace has its kind, its size and all its ranks recorded; record every "
                        "rank, with shapes.")
    found = sorted({graph.meta.device for graph in graphs if graph.meta.device})
    if len(found) > 1:
        raise CommError(f"The trace's ranks ran on different GPUs ({', '.join(found)}), which no topology describes; "
                        "give a trace of one kind of GPU.")
    return make_measurements(rows, backend, found[0] if found else "")
