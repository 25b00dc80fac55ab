"""The table of a survey on disk: Parquet parts in three folders, which pandas, polars and DuckDB open as they are.

::

    survey.parquet/jobs/part-00003.parquet             a row a job
    survey.parquet/families/part-00003.parquet         a row a job and family of kernels
    survey.parquet/opportunities/part-00003.parquet    a row a job and change that would save time

A part is whole or not there: of its three files that of ``jobs`` is written last. Of a job that is in several parts the
last one's rows are the job's. ``compact`` makes one part of all, in order of the jobs' names.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from step_views.survey.discovery import FORMAT
from step_views.survey.facts import BOUND_COLUMNS, JobRows
from tracer.errors import ForetraceError, reason_of
from tracer.lazy import compute, parquet, pyarrow
from tracer.output_file import Busy, DirectoryLock, whole_file
from tracer.table_input import read_parquet

TABLES = ("families", "opportunities", "jobs")
"""Folders, in the order in which a part is written."""
PART_JOBS, PART_S = 64, 5.0
"""A part is written after this many jobs or seconds: what a killed survey reads again."""
_PART = re.compile(r"part-(\d{5,9})\.parquet$")
_MARK = b"foretrace_survey"
_TEXT, _WHOLE, _NUMBER, _YES = "string", "int64", "float64", "bool"
COLUMNS: Mapping[str, Mapping[str, str]] = {
    "jobs": {
        "job": _TEXT, "key": _TEXT, "error": _TEXT, "not_predicted": _TEXT, "tags": "list<string>", "files": _WHOLE,
        "bytes": _WHOLE, "foretrace": _TEXT, "recorded_at_ns": _WHOLE, "ranks": _WHOLE, "world_size": _WHOLE,
        "device": _TEXT, "format": _TEXT, "torch": _TEXT, "versions": _TEXT, "backend": _TEXT, "steps": _WHOLE,
        "counted_steps": _WHOLE, "step_times_us": "list<float64>", "profiled": _YES, "recorded_step_us": _NUMBER,
        "unprofiled_step_us": _NUMBER, "recorded_gpu_active_us": _NUMBER, "host_outside_ops_share": _NUMBER,
        "operations": _WHOLE, "launches": _WHOLE, "kernels": _WHOLE, "collectives": _WHOLE,
        "peak_memory_bytes": _WHOLE, "lost_events": _WHOLE, "lost_bytes": _WHOLE, "damage": _TEXT, "notes": _TEXT,
        "times": _TEXT, "step_time_us": _NUMBER, "low_us": _NUMBER, "high_us": _NUMBER, "bound": _TEXT,
        "gpu_active_us": _NUMBER, **dict.fromkeys(BOUND_COLUMNS, _NUMBER), "saves_host_us": _NUMBER,
        "saves_gpu_us": _NUMBER, "saves_network_us": _NUMBER, "saves_loading_us": _NUMBER,
        "simulated_ranks": "list<int64>", "mfu": _NUMBER, "warnings": _TEXT, "program": _TEXT,
        "operation_codes": "list<int64>", "operation_counts": "list<int64>",
    },
    "families": {"job": _TEXT, "key": _TEXT, "family": _TEXT, "time_us": _NUMBER, "share": _NUMBER},
    "opportunities": {
        "job": _TEXT, "key": _TEXT, "place": _WHOLE, "change": _TEXT, "option": _TEXT, "is_bound": _YES,
        "gain_us": _NUMBER, "low_us": _NUMBER, "high_us": _NUMBER, "share": _NUMBER, "then_decides": _TEXT,
    },
}
"""Columns of each table and their types. Times are µs a step."""
ADDED = {"simulated_ranks"}
"""Columns that tables of an earlier ``FORMAT`` lack; they are read as empty."""


class SurveyError(ForetraceError):
    """A survey's table cannot be written or read."""


def _schema(name: str) -> Any:
    made = {"string": pyarrow.string(), "int64": pyarrow.int64(), "float64": pyarrow.float64(), "bool": pyarrow.bool_()}

    def type_of(text: str) -> Any:
        return pyarrow.list_(made[text[5:-1]]) if text.startswith("list<") else made[text]

    return pyarrow.schema([(column, type_of(text)) for column, text in COLUMNS[name].items()],
                          metadata={_MARK: str(FORMAT).encode()})


def _parts(folder: Path) -> list[int]:
    """Return the numbers of the parts that are whole."""
    try:
        return sorted(int(match.group(1)) for name in os.listdir(folder / "jobs") if (match := _PART.match(name)))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise SurveyError(f"{folder} cannot be read ({error.strerror}); check the path and its permissions.") from None


def _read(path: Path) -> Any:
    """Return one file's columns. Raises ``SurveyError``: it is no part of a survey, is of a newer one, or damaged."""
    schema = _schema(path.parent.name)
    try:
        with open(path, "rb") as stream:
            whole = parquet.ParquetFile(stream).schema_arrow
            form = (whole.metadata or {}).get(_MARK, b"")
            if not form.isdigit():
                raise SurveyError(f"{path} is no part of a survey; name the directory that foretrace survey wrote.")
            if int(form) > FORMAT:
                raise SurveyError(f"{path} was written by a newer foretrace; use that, or name another output.")
            missing = set(schema.names) - set(whole.names)
            if lost := missing - (ADDED if int(form) < FORMAT else set()):
                raise SurveyError(f"{path} has no column {min(lost)}; it is no part of this table, so name another "
                                  "output.")
            found = read_parquet(stream)
            for name in missing:
                found = found.append_column(name, pyarrow.nulls(len(found), schema.field(name).type))
            found = found.select(schema.names).cast(schema)
        for name, column in zip(schema.names, found.columns, strict=True):
            numbers = column.combine_chunks().flatten() if name == "step_times_us" else column
            if numbers.type == pyarrow.float64() and compute.all(compute.is_finite(numbers)).as_py() is False:
                raise ValueError(f"column {name} has a number that is none")
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        jobs = path.parent.parent / "jobs" / path.name  # without it the two others are no part
        raise SurveyError(f"{path} cannot be read ({reason_of(error)}); remove {'it' if path == jobs else jobs}, and "
                          "the same survey reads its jobs again.") from None
    return found


def read_tables(output: str | os.PathLike[str]) -> dict[str, Any]:
    """Return a survey's three tables as pyarrow has them, in order of the jobs' names.

    Raises:
        SurveyError: there is no survey, or a part cannot be read.
    """
    folder = Path(output)
    parts = _parts(folder)
    if not parts:
        raise SurveyError(f"{folder} is no survey: it has no folder jobs with parts; name the directory that foretrace "
                          "survey wrote with -o.")
    return _together(folder, parts)


def _together(folder: Path, parts: Sequence[int]) -> dict[str, Any]:
    """Return the tables of some parts; each job's rows are the last part's that has it."""
    kept: dict[str, list[Any]] = {name: [] for name in TABLES}
    known: Any = pyarrow.array([], pyarrow.string())
    for number in reversed(parts):
        jobs = _read(folder / "jobs" / _name(number))
        for name in TABLES:
            rows = jobs if name == "jobs" else _read(folder / name / _name(number))
            kept[name].append(rows.filter(compute.invert(compute.is_in(rows["job"], value_set=known))))
        known = pyarrow.concat_arrays([known, jobs["job"].combine_chunks()])
    order = {"jobs": [], "families": [("time_us", "descending"), ("family", "ascending")],
             "opportunities": [("place", "ascending")]}
    return {name: pyarrow.concat_tables(tables).sort_by([("job", "ascending"), *order[name]])
            for name, tables in kept.items()}


def _name(part: int) -> str:
    return f"part-{part:05}.parquet"


class SurveyTable:
    """A survey's directory while it is written, by one process at a time. To be used in a ``with`` block.

    Raises:
        SurveyError: the directory is another's, cannot be written, or is being written by another survey.
    """

    def __init__(self, output: str | os.PathLike[str]) -> None:
        self.folder = Path(output)
        try:
            os.fspath(output).encode()
            there = [name for name in os.listdir(self.folder) if name not in TABLES and not name.startswith(".")]
        except FileNotFoundError:
            there = []
        except NotADirectoryError:
            raise SurveyError(f"{self.folder} is no directory, which a survey is written into; name another output."
                              ) from None
        except (OSError, ValueError) as error:  # of a name too long or with a null character
            why = "its name is not UTF-8" if isinstance(error, UnicodeError) else reason_of(error)
            raise SurveyError(f"{os.fspath(output)!r} cannot be written into ({why}); name another output.") from None
        if not os.fspath(output):
            raise SurveyError("The empty path is no directory, which a survey is written into; name another output.")
        if there and not (self.folder / "jobs").is_dir():
            raise SurveyError(f"{self.folder} holds other files ({there[0]}, …) and no survey; name another output.")
        try:
            self._lock = DirectoryLock(self.folder)
        except Busy:
            raise SurveyError(f"{self.folder} is being written by another survey; wait for it, or name another "
                              "output.") from None
        except OSError as error:
            raise SurveyError(f"{self.folder} cannot be written ({error.strerror or error}); check the folder."
                              ) from None
        try:
            _make_writable(self.folder)
            self.parts = _parts(self.folder)
            self._waiting: list[JobRows] = []
            self._since = time.monotonic()
        except BaseException:
            self._lock.release()
            raise

    def __enter__(self) -> SurveyTable:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Write what waits, of a run that was interrupted too, and let others write."""
        try:
            self.flush()
        finally:
            self._lock.release()

    def jobs(self) -> list[dict[str, Any]]:
        """Return ``job``, ``key`` and ``error`` of the jobs that the table has."""
        rows: list[dict[str, Any]] = []
        if self.parts:
            rows = _together(self.folder, self.parts)["jobs"].select(["job", "key", "error"]).to_pylist()
        return rows

    def add(self, rows: JobRows) -> None:
        """Keep a job's rows; they are on the disk with the next part."""
        self._waiting.append(rows)
        if len(self._waiting) >= PART_JOBS or time.monotonic() - self._since > PART_S:
            self.flush()

    def flush(self) -> None:
        """Write the rows that wait as one part; they are on the disk when this returns."""
        rows, self._waiting, self._since = self._waiting, [], time.monotonic()
        if rows:
            self._write({"jobs": _table("jobs", [one.job for one in rows]),
                         "families": _table("families", [row for one in rows for row in one.families]),
                         "opportunities": _table("opportunities", [row for one in rows for row in one.opportunities])})

    def compact(self, tags: Mapping[str, Sequence[str]]) -> None:
        """Make one part of all, with more tags for some jobs. Killed at any moment it loses nothing."""
        self.flush()
        if not self.parts:
            return
        tables = _together(self.folder, self.parts)
        jobs, old = tables["jobs"]["job"].to_pylist(), tables["jobs"]["tags"].to_pylist()
        new = [sorted({*(had or ()), *tags.get(job, ())}) for job, had in zip(jobs, old, strict=True)]
        if len(self.parts) == 1 and new == old:
            return
        place = tables["jobs"].schema.get_field_index("tags")
        tables["jobs"] = tables["jobs"].set_column(place, "tags", pyarrow.array(new, pyarrow.list_(pyarrow.string())))
        done = list(self.parts)
        self._write(tables)
        for number in done:
            for name in reversed(TABLES):
                with suppress(OSError):
                    (self.folder / name / _name(number)).unlink()
        self.parts = self.parts[len(done):]

    def _write(self, tables: Mapping[str, Any]) -> None:
        number = self.parts[-1] + 1 if self.parts else 0
        for name in TABLES:
            with whole_file(self.folder / name / _name(number)) as stream:
                parquet.write_table(tables[name], stream)
        self.parts.append(number)


def _make_writable(folder: Path) -> None:
    """Make the folders of the tables, and a file in each, gone at once. Raises ``SurveyError``: one cannot be made."""
    for name in TABLES:
        try:
            (folder / name).mkdir(exist_ok=True)
            tempfile.TemporaryFile(dir=folder / name).close()
        except OSError as error:
            raise SurveyError(f"{folder / name} cannot be written into ({error.strerror or error}); check its "
                              "permissions, or name another output.") from None


def _table(name: str, rows: Sequence[Mapping[str, Any]]) -> Any:
    return pyarrow.Table.from_pylist(list(rows), schema=_schema(name))
