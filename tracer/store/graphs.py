"""Graphs saved to one file and loaded again, with checks."""

from __future__ import annotations

import os
from typing import Any

import msgspec
import numpy as np

from tracer.arrays import Int32
from tracer.columns import NONE
from tracer.errors import GraphFileError, StepRegionError
from tracer.graph import LEAST_STEP_NS, ExecutionGraph, Meta, Thread
from tracer.guard import MOST_RANKS
from tracer.input_file import DecodeError, from_json
from tracer.store.container import (
    MANIFEST,
    MAX_ROWS,
    VERSION,
    StringsRecord,
    TableRecord,
    corrupt,
    decode_strings,
    decode_table,
    decoded_bytes,
    encode_strings,
    encode_table,
    pack,
    read_file,
    unpack,
    write_file,
)
from tracer.versions import installed_version

SUFFIX = ".foretrace"

# Real traces unpack to 10-40 times their file. A file that claims far more is refused before memory is allocated.
_MAX_EXPANSION = 1000
_FREE_BYTES = 256 << 20  # chosen: memory that any machine has

# Some 12 days: a window lasts minutes, and readers drop events more than half a week from the median.
MOST_NS = 1 << 50

# Columns of row numbers, and the tables they refer to. Checked on save and load, so that no lookup leaves its table.
_REFERENCES: dict[str, dict[str, str]] = {
    "ops": {"parent": "ops", "thread": "threads", "step": "steps"},
    "launches": {"op": "ops", "parent": "launches", "thread": "threads", "step": "steps"},
    "kernels": {"launch": "launches", "op": "ops", "step": "steps"},
    "collectives": {"kernel": "kernels", "op": "ops", "wait_op": "ops"},
    "syncs": {"launch": "launches"},
    "gaps": {"thread": "threads", "step": "steps"},
    "steps": {"thread": "threads"},
    "overheads": {"thread": "threads"},
    "allocations": {"op": "ops", "thread": "threads"},
}


class _GraphRecord(msgspec.Struct):
    meta: Meta
    threads: list[Thread]
    strings: StringsRecord
    tables: dict[str, TableRecord]


class GraphManifest(msgspec.Struct):
    """A file's own description: its kind, and the places of its graphs' tables."""

    format: str
    version: int
    kind: str
    """"graph" or "job"."""
    foretrace: str
    graphs: list[_GraphRecord]
    job: dict[str, Any] = {}


def save_graph(graph: ExecutionGraph, path: str | os.PathLike[str]) -> None:
    """Save one rank's graph as one file, conventionally named ``*.foretrace``.

    Args:
        path: a local path or fsspec URL. An existing file is replaced, and only once the new one is complete.

    Raises:
        GraphFileError: the file cannot be written, or the graph's columns contradict each other.
    """
    write_file(path, pack_graphs("graph", [graph], {}, os.fspath(path)))


def load_graph(path: str | os.PathLike[str], *, step_region: str | None = None) -> ExecutionGraph:
    """Load the graph that ``save_graph`` wrote; every column, string and field is unchanged.

    Args:
        step_region: the name of the regions that must be the file's steps; by default any steps are accepted.

    Raises:
        StepRegionError: the graph was saved with other steps.
        GraphFileError: the file is missing, damaged, truncated, of another format or a newer version, implausibly
            large, or holds a job.
    """
    name = os.fspath(path)
    manifest, graphs = load_graphs(name, step_region)
    if len(graphs) != 1 or manifest.kind != "graph":
        raise GraphFileError(f"{name} holds a job of {len(graphs)} ranks, not one graph; load it with load_job.")
    return graphs[0]


def pack_graphs(kind: str, graphs: list[ExecutionGraph], job: dict[str, Any], label: str) -> bytes:
    """Return the bytes of a file of graphs; ``job`` has a job's other fields, ``label`` names the file in errors."""
    members: dict[str, bytes] = {MANIFEST: b""}
    records = []
    for index, graph in enumerate(graphs):
        _check_columns(graph, label)
        _check_references(graph, label)
        strings, content = encode_strings(graph.strings)
        if content:
            members[_member(kind, index, "strings")] = content
        tables = {}
        for name in ExecutionGraph.TABLES:
            tables[name], content = encode_table(getattr(graph, name))
            if content:
                members[_member(kind, index, name)] = content
        records.append(_GraphRecord(graph.meta, graph.threads, strings, tables))
    own = installed_version("foretrace") or "unknown"
    members[MANIFEST] = msgspec.json.encode(GraphManifest("foretrace", VERSION, kind, own, records, job))
    return pack(members)


def _member(kind: str, index: int, table: str) -> str:
    """Return the name of a Parquet member: ``ops.parquet``, in a job ``3/ops.parquet`` for its fourth graph."""
    return f"{table}.parquet" if kind == "graph" else f"{index}/{table}.parquet"


def load_graphs(label: str, step_region: str | None = None) -> tuple[GraphManifest, list[ExecutionGraph]]:
    """Return a file's manifest and its checked graphs; if ``step_region`` is given, the steps must be those regions."""
    data = read_file(label)
    members = unpack(data, label)
    try:
        manifest = from_json(members.get(MANIFEST, b""), GraphManifest)
    except DecodeError as error:
        raise corrupt(label, f"its manifest cannot be read: {error}") from None
    if manifest.format != "foretrace" or manifest.version != VERSION or manifest.kind not in ("graph", "job"):
        raise corrupt(label, "its manifest is not one of this format")
    _check_sizes(manifest, len(data), label)
    if step_region:
        _check_region(manifest, step_region, label)
    return manifest, [_decode(record, members, manifest.kind, i, label) for i, record in enumerate(manifest.graphs)]


def _check_region(manifest: GraphManifest, step_region: str, label: str) -> None:
    """Refuse a file with other steps: data that depends on them, such as gaps, was derived when it was written."""
    for record in manifest.graphs:
        own = record.meta.step_region
        if own != step_region:
            what = f"the regions {own!r}" if own else "those that the trace marks"
            raise StepRegionError(f"The steps in {label} are {what}, not the regions {step_region!r}: leave "
                                  "--step-region (step_region=) out, or give it to foretrace convert with the "
                                  "original traces.")


def _check_sizes(manifest: GraphManifest, file_bytes: int, label: str) -> None:
    total = 0
    for record in manifest.graphs:
        rows = [record.strings.rows, record.strings.bytes, *(table.rows for table in record.tables.values())]
        if not set(ExecutionGraph.TABLES) - ExecutionGraph.ADDED_TABLES <= set(record.tables) <= set(
                ExecutionGraph.TABLES):
            raise corrupt(label, "its tables are not those of a graph")
        if min(rows) < 0 or max(rows) > MAX_ROWS:
            raise corrupt(label, "it claims an impossible number of rows")
        total += record.strings.bytes + 64 * record.strings.rows
        total += sum(decoded_bytes(ExecutionGraph.TABLES[name], table.rows) for name, table in record.tables.items())
    if total > max(_FREE_BYTES, _MAX_EXPANSION * file_bytes):
        raise corrupt(label, f"it claims to unpack to {total / 1e9:.1f} GB from {file_bytes / 1e3:.0f} kB")


def _decode(record: _GraphRecord, members: dict[str, bytes], kind: str, index: int, label: str) -> ExecutionGraph:
    strings = decode_strings(record.strings, members.get(_member(kind, index, "strings")), label)
    tables: dict[str, Any] = {
        name: decode_table(table, record.tables[name], members.get(_member(kind, index, name)), f"{label} ({name})")
        for name, table in ExecutionGraph.TABLES.items() if name in record.tables
    }
    graph = ExecutionGraph(strings=strings, threads=record.threads, meta=record.meta, **tables)
    _check_references(graph, label)
    _check_kinds(graph, label)
    _check_times(graph, label)
    _check_meta(graph.meta, label)
    for name in ("rank", "world_size"):
        if not NONE <= getattr(graph.meta, name) <= MOST_RANKS:
            raise corrupt(label, f"its {name.replace('_', ' ')} cannot be")
    return graph


def _check_columns(graph: ExecutionGraph, label: str) -> None:
    """Refuse to store a graph whose columns differ in length, or in type from their table's declaration."""
    for name, kind in ExecutionGraph.TABLES.items():
        table = getattr(graph, name)
        columns = table.columns()
        if any(columns[c].shape != (len(table),) or columns[c].dtype != dtype for c, dtype in kind.layout().items()):
            raise GraphFileError(f"{label}: the columns of {name} differ in length or type; it cannot be stored.")


def _check_kinds(graph: ExecutionGraph, label: str) -> None:
    """Refuse a graph with kinds or phases that this version does not know."""
    for name, table in ExecutionGraph.TABLES.items():
        for column, kind in table.ENUMS.items():
            values = getattr(getattr(graph, name), column)
            if len(values) and (int(values.min()) < NONE or int(values.max()) >= len(kind)):
                raise GraphFileError(f"{label}: column {name}.{column} holds kinds this version does not know; the "
                                     "file is damaged or of a newer version, so convert the traces again.")


def _check_times(graph: ExecutionGraph, label: str) -> None:
    """Refuse a graph with impossible times: sums of them would exceed 64 bits."""
    for name in ExecutionGraph.TABLES:
        for column, values in getattr(graph, name).columns().items():
            if not column.endswith("_ns") or not len(values):
                continue
            least = NONE if column == "duration_ns" else -MOST_NS
            if int(values.min()) < least or int(values.max()) > MOST_NS:
                raise corrupt(label, f"column {name}.{column} holds a time that cannot be")
    times = [graph.meta.window_ns, *graph.meta.unprofiled_step_ns]
    if min(times) < NONE or max(times) > MOST_NS or min(times[1:], default=LEAST_STEP_NS) < LEAST_STEP_NS:
        raise corrupt(label, "the length of its window or of a step cannot be")


_MOMENT = 4
"""Numbers of a moment of ``memory_moments``."""


def _check_meta(meta: Meta, label: str) -> None:
    """Refuse a context whose form differs from what its readers rely on."""
    workload = meta.workload
    if workload and not (isinstance(workload.get("name"), str) and isinstance(workload.get("settings"), dict)):
        raise corrupt(label, "its workload has no name or no settings")
    sizes = [*meta.memory.values(), *(size for moment in meta.memory_moments for size in moment)]
    if any(len(moment) != _MOMENT for moment in meta.memory_moments) or not all(abs(size) < 1 << 62 for size in sizes):
        raise corrupt(label, "its memory cannot be")


def _check_references(graph: ExecutionGraph, label: str) -> None:
    """Refuse a graph whose codes or row numbers refer to nothing, or whose rows contain themselves."""
    sizes = {name: len(getattr(graph, name)) for name in ExecutionGraph.TABLES} | {"threads": len(graph.threads)}
    for name, kind in ExecutionGraph.TABLES.items():
        if not sizes[name]:
            continue
        limits = {column: sizes[target] for column, target in _REFERENCES[name].items()}
        limits.update(dict.fromkeys(kind.STRING_COLUMNS, len(graph.strings)))
        table = getattr(graph, name)
        for column, limit in limits.items():
            values = getattr(table, column)
            low, high = int(values.min()), int(values.max())
            if low < NONE or high >= limit:
                raise GraphFileError(
                    f"{label}: column {name}.{column} points to row {low if low < NONE else high} of {limit}; "
                    "the file or the graph is damaged, so convert the traces again."
                )
        if "parent" in limits and _in_circles(table.parent):
            raise GraphFileError(f"{label}: rows of {name} lie in themselves by their column parent; the file or the "
                                 "graph is damaged, so convert the traces again.")


def _in_circles(parent: Int32) -> bool:
    """Return whether a row is its own ancestor: it then has ancestors at any distance, up to the number of rows."""
    above = parent.copy()
    for _ in range(len(parent).bit_length()):  # the distance doubles each time
        above = np.where(above < 0, NONE, above[above])
    return bool((above >= 0).any())
