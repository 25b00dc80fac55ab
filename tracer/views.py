"""Views of a graph for people: rows with decoded strings, pandas frames, decoded arguments, and a networkx ``DiGraph``.

The simulator does not use them. Dependencies are drawn as::

    op ──nesting──▶ op            op ──forward_backward──▶ op
     └──calls──▶ launch ──program_order──▶ launch
                   └──launches──▶ kernel ──stream_order──▶ kernel
                                    └──sync──▶ launch, kernel

Nodes are ``("op", row)``, ``("launch", row)`` and ``("kernel", row)``. Each edge has a ``kind``, as drawn. It is
acyclic: every edge leads to the same or a later time, and edges between equal times follow row order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np

from tracer.arrays import Int64
from tracer.graph import NONE, ExecutionGraph, KernelKind, LaunchKind, OpKind, Phase, SyncKind
from tracer.input_file import list_of
from tracer.lazy import networkx, pandas

_MOST_NESTED = 2
"""Deepest nesting of lists of tensors."""
_MOST_ELEMENTS = 1 << 60
"""Most elements of a tensor: no memory holds more, and their bytes still fit into 64 bits."""


@dataclass(frozen=True, slots=True)
class Argument:
    """One recorded argument of an operation.

    ``dtype`` is the profiler's type name ("float", "c10::BFloat16", "Scalar", "TensorList", or "" for other
    things). ``shape`` and ``stride`` are in elements, nested for a list of tensors, ``None`` where not recorded;
    ``value`` is the text of a number or list of numbers, "" where not recorded.
    """

    dtype: str
    shape: tuple[Any, ...] | None = None
    stride: tuple[Any, ...] | None = None
    value: str = ""


class Row(SimpleNamespace):
    """One row of a table, an attribute for each column: strings and enumerations decoded, ``None`` if missing.

    Read-only; ``row.index`` is its number in the table.
    """

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("rows are read-only views; change the table's columns instead")

    def __delattr__(self, name: str) -> None:
        raise AttributeError("rows are read-only views; change the table's columns instead")


def row(graph: ExecutionGraph, table: str, index: int) -> Row:
    """Return row ``index`` (negative: from the end) of a table such as ``"ops"``.

    Raises:
        IndexError: the table has no such row.
        KeyError: the graph has no such table.
    """
    kind = ExecutionGraph.TABLES[table]
    columns = getattr(graph, table).columns()
    size = len(getattr(graph, table))
    if not -size <= index < size:
        raise IndexError(f"row {index} of {table}, which has {size}")
    index %= size
    values: dict[str, Any] = {"index": index}
    for name, column in columns.items():
        value = column[index].item()
        if name in kind.STRING_COLUMNS:
            value = graph.strings[value] if value >= 0 else None
        elif name in kind.ENUMS:
            value = kind.ENUMS[name](value) if value >= 0 else None
        elif value == NONE and not name.endswith("_ns"):
            value = None
        values[name] = value
    return Row(**values)


def to_pandas(graph: ExecutionGraph, table: str) -> pandas.DataFrame:
    """Return a table as a DataFrame: strings and enumerations as categoricals (missing ones null), numbers as stored.

    Raises:
        KeyError: the graph has no such table.
    """
    kind = ExecutionGraph.TABLES[table]
    frame: dict[str, Any] = {}
    for name, column in getattr(graph, table).columns().items():
        if name in kind.STRING_COLUMNS:
            used = np.unique(column[column >= 0])
            # A string may have been stored twice; categories must differ.
            texts, position = np.unique([graph.strings[code] for code in used.tolist()], return_inverse=True)
            codes = _categorical_codes(column, used, position) if len(used) else column
            frame[name] = pandas.Categorical.from_codes(codes, categories=texts.astype(object))
        elif name in kind.ENUMS:
            members = list(kind.ENUMS[name])
            frame[name] = pandas.Categorical.from_codes(column, categories=[member.name.lower() for member in members])
        else:
            frame[name] = column
    return pandas.DataFrame(frame)


def arguments(graph: ExecutionGraph, op: int) -> list[Argument]:
    """Return the arguments of operation ``op``, in order; empty where the trace recorded none.

    Raises:
        IndexError: there is no such operation.
    """
    ops = graph.ops
    return list(_arguments(*(graph.string(int(column[op]))
                             for column in (ops.dtypes, ops.shapes, ops.strides, ops.scalars))))


@lru_cache(maxsize=2048)  # a step has some hundreds of different ones
def _arguments(*texts: str) -> tuple[Argument, ...]:
    """Decode the texts of dtypes, shapes, strides and scalars; cached, since most operations share them."""
    dtypes, shapes, strides, scalars = map(list_of, texts)
    count = max(len(part) for part in (dtypes, shapes, strides, scalars))
    return tuple(
        Argument(str(_at(dtypes, i, "")), shape, _strides(_at(strides, i, None), shape), str(_at(scalars, i, "")))
        for i in range(count) for shape in [_sizes(_at(shapes, i, None))])


def _categorical_codes(column: Int64, used: Int64, position: Int64) -> Int64:
    """Convert a column of string codes to codes of the sorted texts, -1 where a row has no text."""
    at = np.minimum(np.searchsorted(used, column), len(used) - 1)
    return np.where(column >= 0, position[at], NONE)


def _at(values: list[Any], index: int, missing: Any) -> Any:
    return values[index] if index < len(values) else missing


def _sizes(value: Any) -> tuple[Any, ...] | None:
    """Return the sizes of a tensor, or of each tensor in a list (empty for other items); else ``None``."""
    if not isinstance(value, list):
        return None
    if all(type(part) is int for part in value):
        return tuple(value) if min(value, default=0) >= 0 and prod(value) <= _MOST_ELEMENTS else None
    return tuple(_listed(value))


def _listed(value: list[Any], depth: int = 0) -> Iterator[tuple[int, ...]]:
    """Yield the sizes of the tensors in a list, and in lists within it."""
    for part in value:
        if isinstance(part, list) and depth < _MOST_NESTED and not all(type(size) is int for size in part):
            yield from _listed(part, depth + 1)
        else:
            yield _sizes(part if depth < _MOST_NESTED else None) or ()


def _strides(value: Any, shape: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    """Return the strides that match the sizes of a tensor or of those in a list; ``None`` where their lengths
    differ."""
    if not isinstance(value, list) or shape is None or len(value) != len(shape):
        return None
    if all(type(size) is int for size in shape):
        return tuple(value) if all(type(part) is int and 0 <= part <= _MOST_ELEMENTS for part in value) else None
    return tuple(_strides(part, one) or () for part, one in zip(value, shape, strict=True))


Pairs = list[tuple[int, int]]


def dependency_graph(graph: ExecutionGraph) -> networkx.DiGraph:
    """Return all operations, calls and device work with what each must wait for.

    Sync edges come from recorded synchronisations only. They lead from the last work that a sync waits for to the first
    later call of the waiting thread, or first later kernel of the waiting stream. The simulator infers more.
    """
    result = networkx.DiGraph(source=graph.meta.source, rank=graph.meta.rank)
    _add_nodes(result, graph)
    ops, launches, kernels = graph.ops, graph.launches, graph.kernels
    starts = _kernel_times(graph)

    def add(kind: str, source: str, target: str, pairs: Pairs) -> None:
        result.add_edges_from(((source, a), (target, b), {"kind": kind}) for a, b in pairs)

    add("nesting", "op", "op", _known(ops.parent))
    add("calls", "op", "launch", _known(launches.op))
    add("launches", "launch", "kernel", _known(kernels.launch))
    add("program_order", "launch", "launch", _chains([launches.thread], launches.start_ns))
    add("stream_order", "kernel", "kernel", _chains([kernels.device, kernels.stream], kernels.start_ns))
    add("forward_backward", "op", "op", forward_backward_pairs(graph))
    for target, source_row, target_row in _sync_waits(graph, starts):
        result.add_edge(("kernel", source_row), (target, target_row), kind="sync")
    return result


def forward_backward_pairs(graph: ExecutionGraph) -> Pairs:
    """Return the rows of (forward operation, backward operation), by autograd's sequence number.

    Several nested forward operations carry one number; the innermost (latest to start) created the autograd node.
    Numbers count per forward thread; its host thread is the one with most matching numbers.
    """
    ops = graph.ops
    backward = (ops.sequence >= 0) & (ops.forward_thread > 0)
    if not backward.any():
        backward = (ops.sequence >= 0) & (ops.phase == Phase.BACKWARD)
    forward = np.flatnonzero((ops.sequence >= 0) & ~backward)
    latest: dict[int, dict[int, int]] = {}
    for row in forward[np.argsort(ops.start_ns[forward], kind="stable")].tolist():
        latest.setdefault(int(ops.thread[row]), {})[int(ops.sequence[row])] = row
    first: dict[int, dict[int, int]] = {}
    rows = np.flatnonzero(backward)
    for row in rows[np.argsort(ops.start_ns[rows], kind="stable")].tolist():
        first.setdefault(int(ops.forward_thread[row]), {}).setdefault(int(ops.sequence[row]), row)
    pairs: Pairs = []
    for by_sequence in first.values():
        host = max(latest.values(), key=lambda known: len(known.keys() & by_sequence.keys()), default={})
        pairs.extend((host[number], row) for number, row in by_sequence.items() if number in host)
    return [(a, b) for a, b in pairs if ops.start_ns[a] < ops.start_ns[b]]


def _add_nodes(result: networkx.DiGraph, graph: ExecutionGraph) -> None:
    strings = graph.strings
    ops, launches, kernels = graph.ops, graph.launches, graph.kernels
    for row, (name, kind, thread, start, duration, phase, module, step) in enumerate(zip(
        ops.name.tolist(), ops.kind.tolist(), ops.thread.tolist(), ops.start_ns.tolist(), ops.duration_ns.tolist(),
        ops.phase.tolist(), ops.module.tolist(), ops.step.tolist(), strict=True,
    )):
        result.add_node(
            ("op", row), type="op", name=strings[name] if name >= 0 else "",
            kind=OpKind(kind).name.lower() if kind >= 0 else "", thread=thread, start_ns=start, duration_ns=duration,
            phase=Phase(phase).name.lower() if phase >= 0 else "", module=strings[module] if module >= 0 else "",
            step=step,
        )
    for row, (name, kind, thread, start, duration, step) in enumerate(zip(
        launches.name.tolist(), launches.kind.tolist(), launches.thread.tolist(), launches.start_ns.tolist(),
        launches.duration_ns.tolist(), launches.step.tolist(), strict=True,
    )):
        result.add_node(
            ("launch", row), type="launch", name=strings[name] if name >= 0 else "",
            kind=LaunchKind(kind).name.lower() if kind >= 0 else "", thread=thread, start_ns=start,
            duration_ns=duration, step=step,
        )
    for row, (name, kind, device, stream, start, duration, step) in enumerate(zip(
        kernels.name.tolist(), kernels.kind.tolist(), kernels.device.tolist(), kernels.stream.tolist(),
        kernels.start_ns.tolist(), kernels.duration_ns.tolist(), kernels.step.tolist(), strict=True,
    )):
        result.add_node(
            ("kernel", row), type="kernel", name=strings[name] if name >= 0 else "",
            kind=KernelKind(kind).name.lower() if kind >= 0 else "", device=device, stream=stream, start_ns=start,
            duration_ns=duration, step=step,
        )


def _known(column: np.ndarray) -> Pairs:
    """Return pairs (row that is referred to, row) for all rows with a reference."""
    rows = np.flatnonzero(column >= 0)
    return list(zip(column[rows].tolist(), rows.tolist(), strict=True))


def _chains(keys: list[np.ndarray], start: Int64) -> Pairs:
    """Return pairs (row, next row) in time order among the rows that agree in all keys."""
    order = np.lexsort((np.arange(len(start)), start, *keys))
    same = np.ones(max(len(order) - 1, 0), dtype=bool)
    for key in keys:
        same &= key[order[:-1]] == key[order[1:]]
    return list(zip(order[:-1][same].tolist(), order[1:][same].tolist(), strict=True))


def _kernel_times(graph: ExecutionGraph) -> Int64:
    """Return each kernel's start, moved so that it is not before its launch or an earlier kernel of its stream."""
    kernels, launches = graph.kernels, graph.launches
    time = kernels.start_ns.copy()
    launched = np.flatnonzero(kernels.launch >= 0)
    time[launched] = np.maximum(time[launched], launches.start_ns[kernels.launch[launched]])
    for before, after in _chains([kernels.device, kernels.stream], kernels.start_ns):
        time[after] = max(time[after], time[before])
    return time


def _sync_waits(graph: ExecutionGraph, starts: Int64) -> Iterator[tuple[str, int, int]]:
    """Yield ("launch" or "kernel", awaited kernel, waiting row) for each recorded sync that can be resolved."""
    syncs, launches, kernels = graph.syncs, graph.launches, graph.kernels
    by_correlation = {c: row for row, c in enumerate(launches.correlation.tolist()) if c >= 0}
    launched = np.where(kernels.launch >= 0, launches.start_ns[kernels.launch], NONE) if len(launches) \
        else np.full(len(kernels), NONE, np.int64)
    for row in range(len(syncs)):
        call = int(syncs.launch[row])
        if call < 0:
            continue
        kind, stream = int(syncs.kind[row]), int(syncs.stream[row])
        at = int(launches.start_ns[call])
        record = by_correlation.get(int(syncs.record_correlation[row]), NONE)
        recorded = int(launches.start_ns[record]) if record >= 0 else at
        waited = int(syncs.wait_stream[row])
        # A stream or device sync waits for all earlier work, other syncs for work submitted before the event's record.
        mask = (kernels.launch >= 0) & (launched < (recorded if kind in _EVENT_SYNCS else at))
        if kind in _EVENT_SYNCS:
            if waited == NONE:
                continue
            mask &= kernels.stream == waited
        elif kind == SyncKind.STREAM_SYNC:
            mask &= kernels.stream == stream
        before = np.flatnonzero(mask)
        if not len(before):
            continue
        source = int(before[np.argmax(kernels.start_ns[before])])
        if kind == SyncKind.STREAM_WAIT_EVENT:
            after = np.flatnonzero((kernels.stream == stream) & (launched > at))
            after = after[starts[after] > starts[source]]
            if len(after):
                yield "kernel", source, int(after[np.argmin(launched[after])])
            continue
        following = call + 1
        if following < len(launches) and launches.thread[following] == launches.thread[call] \
                and launches.start_ns[following] > starts[source]:
            yield "launch", source, following


_EVENT_SYNCS = (SyncKind.STREAM_WAIT_EVENT, SyncKind.EVENT_SYNC)
