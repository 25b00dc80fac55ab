"""The merge of ``lookups.json`` into a graph's look-ups, or of the law of a workload's data. Needs no torch."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tracer.decode import DecodeError, from_json
from tracer.errors import ForetraceError, TraceError
from tracer.graph import ExecutionGraph
from tracer.input_file import read_input, why_not_read
from tracer.lookup_data.noted import note_counted, note_tables, tables_of
from tracer.lookup_data.tables import EmbeddingTable, TableError


class _Stored(msgspec.Struct):
    rows: list[EmbeddingTable]


def merge_lookups(graph: ExecutionGraph, path: Path) -> list[str]:
    """Write what was counted with the graph's look-ups, in place; sentences for what does not fit.

    A missing file is fine.

    Raises:
        TraceError: the file is damaged.
    """
    try:
        counted = from_json(read_input(path), _Stored).rows
    except FileNotFoundError:
        return []
    except (OSError, DecodeError, TableError) as error:
        if why := why_not_read(path):
            return [f"{path.parent.name}/{path.name} {why}; it was not read, and look-ups are as the trace has them."]
        raise TraceError(f"{path} cannot be read as a capture's counts of look-ups ({error}); copy or record it "
                         "again.") from error
    if not counted:
        return ["The step in which indices were to be counted looked nothing up."]
    return note_counted(graph, counted)


def note_law(graph: ExecutionGraph) -> None:
    """Write the law of a suite's workload with its look-ups, where nothing was counted. In place."""
    noted = graph.meta.workload
    if not noted or tables_of(graph):
        return
    from tracer.workloads import configure

    try:
        tables = configure(noted["name"], **noted["settings"]).embedding_tables()
    except (ForetraceError, KeyError, TypeError):  # of another version, or a file that somebody changed
        return
    if tables:
        note_tables(graph, tables)
