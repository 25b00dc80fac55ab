"""``export``: a job or a result in the format of another program.

Formats of a job, replayed or predicted:

- ``chrome``: NAME.json, NAME.json.gz
- ``perfetto``: NAME.pftrace, NAME.perfetto-trace
- ``chakra``: NAME.{rank}.et, one per rank

Formats of results:

- ``csv``, ``parquet``: the tables of any result, in NAME.csv, NAME.parquet, or a folder of all tables
- ``tensorboard``: the figures of a prediction, replay, breakdown or check, in a folder
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from graph_predictor.prediction.simulated_job import simulated_job
from step_views.exports.chakra import write_chakra
from step_views.exports.perfetto import write_perfetto
from step_views.exports.tables import TABLE_ENDINGS, scalars_of, write_all_tables, write_scalars, write_table_file
from step_views.reports.timeline import write_timeline
from tracer.errors import ForetraceError
from tracer.shown import Shown


class ExportFormat(str, Enum):
    """A format in which jobs or results are written."""

    CHROME = "chrome"
    PERFETTO = "perfetto"
    CHAKRA = "chakra"
    CSV = "csv"
    PARQUET = "parquet"
    TENSORBOARD = "tensorboard"

    @property
    def of_job(self) -> bool:
        """Return whether it is a format of simulated jobs; otherwise it is one of tables or figures."""
        return self in (ExportFormat.CHROME, ExportFormat.PERFETTO, ExportFormat.CHAKRA)


_ENDINGS = {".json": ExportFormat.CHROME, ".json.gz": ExportFormat.CHROME, ".pftrace": ExportFormat.PERFETTO,
            ".perfetto-trace": ExportFormat.PERFETTO, ".et": ExportFormat.CHAKRA, ".csv": ExportFormat.CSV,
            ".parquet": ExportFormat.PARQUET}


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export wrote: its format, the files or the folder, and notes."""

    format: ExportFormat
    paths: list[str]
    notes: list[str] = field(default_factory=list)


def format_of(path: str | os.PathLike[str], wanted: str | None = None) -> ExportFormat:
    """Return the wanted format, or the one of the file name's ending. Raises ``ForetraceError`` if there is no such
    format or the ending is not known."""
    listed = ", ".join(one.value for one in ExportFormat)
    if wanted is not None:
        try:
            return ExportFormat(wanted)
        except ValueError:
            raise ForetraceError(f"--format {wanted} is not known; formats are {listed}.") from None
    name = os.fspath(path).lower()
    for ending, found in _ENDINGS.items():
        if name.endswith(ending):
            return found
    raise ForetraceError(f"The name {os.fspath(path)} says no format: end it with {', '.join(_ENDINGS)}, or give one "
                         f"with --format ({listed}).")


def export(source: object, path: str | os.PathLike[str], *, format: str | None = None, table: str | None = None,
           at: int = 0) -> Exported:
    """Write a job or a result in the format of another program.

    Args:
        source: for ``chrome``, ``perfetto`` and ``chakra`` a job, its graphs, a replay, a baseline, or a simulated job
            from ``Baseline.simulated``. For the others any result with tables (``Shown``), or a mapping of names to
            such results.
        path: a file; for all tables and for TensorBoard a folder.
        format: a name of ``ExportFormat``; by default the file's ending determines it.
        table: name of the result's table for a single file; by default its first.
        at: TensorBoard's step, for example the number of a commit.

    Raises:
        ForetraceError: the source cannot be written in this format, or to this path.
    """
    chosen = format_of(path, format)
    if chosen.of_job:
        return _job(source, path, chosen)
    if chosen is ExportFormat.TENSORBOARD:
        write_scalars(scalars_of(source), path, at)
        return Exported(chosen, [os.fspath(path)])
    return _tables(source, path, chosen, table)


def _job(source: object, path: str | os.PathLike[str], chosen: ExportFormat) -> Exported:
    job = simulated_job(source)
    notes = [*job.notes]
    if chosen is ExportFormat.CHAKRA:
        found = write_chakra(job, path)
        exact = "as simulated" if not found.off_by_us else f"up to {found.off_by_us:,} µs off the simulation"
        said = (f"{found.nodes:,} nodes and {found.dependencies:,} dependencies; by these alone every node ends "
                f"{exact}, to the microsecond.")
        return Exported(chosen, found.paths, [said, *found.notes, *notes])
    if chosen is ExportFormat.PERFETTO:
        write_perfetto(job, path)
    else:
        write_timeline(job, path)
    return Exported(chosen, [os.fspath(path)], notes)


def _tables(source: object, path: str | os.PathLike[str], chosen: ExportFormat, table: str | None) -> Exported:
    tables = {}
    results = source if isinstance(source, Mapping) else {"": source}
    for name, result in results.items():
        if not isinstance(result, Shown):
            raise ForetraceError(f"{type(result).__name__} has no tables to write; give a result such as a prediction, "
                                 "a replay, a plan or a sweep.")
        tables.update({f"{name}_{each}" if name else each: make for each, make in result.tables().items()})
    ending = f".{chosen.value}"
    if not os.fspath(path).lower().endswith(TABLE_ENDINGS):
        return Exported(chosen, list(write_all_tables(tables, path, ending)))
    if not os.fspath(path).lower().endswith(ending):
        raise ForetraceError(f"{os.fspath(path)} is named as another format than {chosen.value}; end it with {ending}.")
    name = next(iter(tables)) if table is None else table
    if name not in tables:
        raise ForetraceError(f"There is no table {name!r}; tables are: {', '.join(tables)}.")
    write_table_file(tables[name](), path)
    others = [each for each in tables if each != name]
    note = f"It is the table {name}; others (--only-table) are: {', '.join(others)}."
    return Exported(chosen, [os.fspath(path)], [note] if table is None and others else [])
