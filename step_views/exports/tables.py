"""Tables of results as CSV and Parquet files, and their figures as TensorBoard scalars."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graph_predictor.prediction.replay import Replay
from graph_predictor.prediction.result import Prediction
from step_views.reports.breakdown import Breakdown
from tracer.errors import ForetraceError
from tracer.input_file import open_input
from tracer.lazy import parquet, pyarrow
from tracer.output_file import whole_file
from tracer.output_kind import TABLE_FILE, check_output

if TYPE_CHECKING:
    import pandas as pd


TABLE_ENDINGS = (".csv", ".parquet")
ROWS_AT_ONCE = 20_000
"""Rows of a CSV file that are formatted together: their text takes a few MB (chosen)."""
_MOST_HEADER = 1 << 16  # bytes of a CSV file's first line; chosen

Tables = Mapping[str, Callable[[], "pd.DataFrame"]]


def write_table_file(table: pd.DataFrame, path: str | os.PathLike[str]) -> None:
    """Write a table whole or not at all, as CSV or Parquet by the name's ending. Raises ``ForetraceError`` if it cannot
    be written or would replace another table."""
    name = os.fspath(path)
    check_output(name, [], TABLE_FILE)
    if os.path.lexists(name) and os.path.getsize(name) and (there := table_columns(name)) != [*map(str, table.columns)]:
        listed = f"a table with other columns ({', '.join(there[:4])}…)" if there else "no such table"
        raise ForetraceError(f"{name} exists and is {listed}: it would be overwritten; remove it, or name another "
                             "output.")
    write_frame(table if name.lower().endswith(".csv") else _plain(table), path)


def write_frame(table: pd.DataFrame, path: str | os.PathLike[str]) -> None:
    """Write a table whole or not at all, as CSV or Parquet by the name's ending. May raise ``ForetraceError``."""
    with whole_file(path) as stream:
        if Path(path).suffix.lower() == ".csv":
            for low in range(0, max(len(table), 1), ROWS_AT_ONCE):
                some = table.iloc[low:low + ROWS_AT_ONCE]
                stream.write(some.to_csv(index=False, header=low == 0).encode("utf-8", "replace"))
        else:
            table.to_parquet(stream, index=False)


def write_all_tables(tables: Tables, folder: str | os.PathLike[str], ending: str) -> Iterator[str]:
    """Write every table into a folder, which is made; yield each path after its file is written. Raises
    ``ForetraceError`` if a table cannot be written."""
    path = Path(folder)
    try:
        path.mkdir(exist_ok=True)
    except OSError as error:
        raise ForetraceError(f"{path} is no folder to write tables into ({error.strerror}); name another "
                             "one.") from error
    for name, make in tables.items():
        file = path / f"{name}{ending}"
        write_table_file(make(), file)
        yield str(file)


def _plain(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table with text in columns whose values have several types, because Parquet has no such columns."""
    mixed = [name for name in table.columns if table[name].dtype == object
             and len({type(value) for value in table[name]}) > 1]
    return table.assign(**{name: table[name].astype(str) for name in mixed}) if mixed else table


def table_columns(path: str) -> list[str]:
    """Return the names of a table's columns; an empty list if the file is not a table. Unlike ``read_frame``, this
    reads only the header and never raises."""
    try:
        with open_input(path) as stream:
            if Path(path).suffix.lower() == ".csv":
                return next(csv.reader([stream.readline(_MOST_HEADER).decode()]), [])
            return list(parquet.read_schema(stream).names)
    except (OSError, ValueError, csv.Error, pyarrow.ArrowException):
        return []


def write_scalars(scalars: Mapping[str, float], folder: str | os.PathLike[str], step: int = 0) -> None:
    """Write figures as TensorBoard scalars, at one step of its axis; files of earlier runs in the folder remain. Raises
    ``ForetraceError`` if the folder cannot be written or tensorboardX is not installed."""
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise ForetraceError("TensorBoard's files are written with tensorboardX, which is not installed: pip install "
                             "'foretrace[export]'.") from error
    if os.path.lexists(folder) and not os.path.isdir(folder):
        raise ForetraceError(f"{os.fspath(folder)} is a file; TensorBoard reads a folder: name one.")
    try:
        with SummaryWriter(os.fspath(folder)) as writer:
            for name, value in scalars.items():
                writer.add_scalar(name, value, step)
    except OSError as error:
        raise ForetraceError(f"{os.fspath(folder)} cannot be written ({error.strerror}); name another "
                             "folder.") from error


def scalars_of(result: object) -> Mapping[str, float]:
    """Return a result's figures by name; names are paths, by which TensorBoard groups them. Raises ``ForetraceError``
    if the result has no figures."""
    if isinstance(result, Prediction):
        return _of_prediction(result)
    if isinstance(result, Replay):
        return {f"step_ms/rank{step.rank}/{step.name}/{which}": ns / 1e6 for step in result.steps
                for which, ns in (("measured", step.measured_ns), ("replayed", step.replayed_ns))}
    if isinstance(result, Breakdown):
        return {"step_ms": result.step_ns / 1e6,
                **{f"critical_path_ms/{name}": us / 1e3 for name, us in result.bounds_us.items() if us}}
    # Figures of a check: the old and the new value.
    if (verdicts := getattr(result, "verdicts", None)) is not None:
        return {f"{one.program}/{one.quantity}/{which}": float(value) for one in verdicts
                for which, value in (("before", one.before), ("now", one.now)) if value is not None}
    raise ForetraceError(f"{type(result).__name__} has no figures for TensorBoard; give a prediction, a replay, a "
                         "breakdown, or the outcome of a check.")


def _of_prediction(result: Prediction) -> dict[str, float]:
    low, high = result.interval_us
    known = {"peak_memory_gb": None if result.peak_memory_bytes is None else result.peak_memory_bytes / 1e9,
             "mfu": result.mfu, "samples_per_second": result.items_per_second, "cost_per_step": result.cost_per_step}
    return {"step_ms/expected": result.step_time_us / 1e3, "step_ms/low": low / 1e3, "step_ms/high": high / 1e3,
            "gpu_active_ms": result.gpu_active_us / 1e3,
            **{f"critical_path_ms/{name}": us / 1e3 for name, us in result.bounds_us.items() if us},
            **{f"source_share/{name}": share for name, share in result.sources.items()},
            **{name: float(value) for name, value in known.items() if value is not None}}


def log(result: object, run: Any, step: int | None = None, prefix: str = "foretrace") -> dict[str, float]:
    """Log a result's figures, each with a name that begins with ``prefix/``.

        foretrace.log(foretrace.predict(job), wandb.run)
        foretrace.log(prediction, SummaryWriter("runs/a"), step=100)

    Args:
        result: a prediction, a replay, a breakdown, or the outcome of a check.
        run: where to log: a Weights & Biases run (or any object with ``log(figures, step=…)``), a ``SummaryWriter``
            (``add_scalar``), or a function that is called with the figures by name.
        step: step on the run's axis; by default the run's own.
        prefix: prefix of each name; empty for none.

    Returns:
        The figures that were logged, by name.

    Raises:
        ForetraceError: the result has no figures, or ``run`` cannot log them.
    """
    figures = {f"{prefix}/{name}" if prefix else name: value for name, value in scalars_of(result).items()}
    if callable(getattr(run, "add_scalar", None)):
        for name, value in figures.items():
            run.add_scalar(name, value, step)
    elif callable(getattr(run, "log", None)):
        run.log(figures, step=step) if step is not None else run.log(figures)
    elif callable(run):
        run(figures)
    else:
        raise ForetraceError(f"{type(run).__name__} logs nothing that is known: give a Weights & Biases run, a "
                             "SummaryWriter, or a function that takes the figures.")
    return figures
