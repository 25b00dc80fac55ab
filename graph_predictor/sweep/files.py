"""The table of a sweep as a file, and as a plot."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

import pandas as pd

from graph_predictor.sweep.space import SweepError
from tracer.input_file import open_input
from tracer.output_file import whole_file

TABLES = (".parquet", ".csv")
PLOTS = (".png", ".svg", ".pdf")
MOST_LINES = 12
_MOST_HEADER = 1 << 16


def check_table(path: str) -> None:
    """Raise ``SweepError`` if the name says no known format."""
    _check(path, TABLES, "A table")


def check_not_anothers(path: str) -> None:
    """Raise ``SweepError`` if the file is there and is no sweep's table."""
    if os.path.lexists(path) and not {"step_time_us", "low_us", "high_us", "refused"} <= _columns(path):
        raise SweepError(f"{path} exists and is no table of a sweep; remove it, or name another output.")


def _columns(path: str) -> set[str]:
    """Names of a table's columns; none of what is no table."""
    import pyarrow.parquet

    try:
        with open_input(path) as stream:
            if Path(path).suffix.lower() == ".csv":
                return set(next(csv.reader([stream.readline(_MOST_HEADER).decode()]), []))
            return set(pyarrow.parquet.read_schema(stream).names)
    except (OSError, ValueError, csv.Error, pyarrow.ArrowException):
        return set()


def check_plot(path: str) -> None:
    """Raise ``SweepError`` if the name says no known format, or there is nothing to plot with."""
    _check(path, PLOTS, "A plot")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise SweepError("Plots need matplotlib; install it with: pip install 'foretrace[plot]'.") from None


def write_table(table: pd.DataFrame, path: str | os.PathLike[str]) -> None:
    """Write it whole or not at all, as Parquet or CSV by its name.

    Raises:
        ForetraceError: it cannot be written.
    """
    with whole_file(path) as stream:
        if Path(path).suffix.lower() == ".csv":
            stream.write(table.to_csv(index=False).encode())
        else:
            table.to_parquet(stream, index=False)


def write_plot(table: pd.DataFrame, axes: tuple[str, ...], path: str) -> None:
    """Step time with its interval against the axis of numbers that has most values; a line for each of the others.

    Raises:
        SweepError: no axis has numbers, or nothing was priced.
        ForetraceError: it cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    draw_sweep(table, axes, figure.subplots())
    with whole_file(path) as stream:
        figure.savefig(stream, format=Path(path).suffix[1:].lower())


def draw_sweep(table: pd.DataFrame, axes: tuple[str, ...], chart: Any = None) -> Any:
    """Draw the same into matplotlib's ``Axes``, new ones by default; return them.

    Raises:
        SweepError: as ``write_plot``; matplotlib is not installed.
    """
    priced = table[table["step_time_us"].notna()]
    numbers = [name for name in axes if pd.api.types.is_numeric_dtype(table[name]) and table[name].nunique() > 1]
    if priced.empty or not numbers:
        raise SweepError("There is nothing to plot: " + ("no point was priced." if priced.empty else
                         "no axis has several numbers; sweep a size, a factor or --world-size."))
    across = max(numbers, key=lambda name: int(table[name].nunique()))
    others = [name for name in axes if name != across and table[name].nunique() > 1]
    if chart is None:
        try:
            import matplotlib.pyplot
        except ImportError:
            raise SweepError("Plots need matplotlib; install it with: pip install 'foretrace[plot]'.") from None
        _, chart = matplotlib.pyplot.subplots(figsize=(8, 5), layout="constrained")
    for values, line in priced.groupby(others, sort=False) if others else [((), priced)]:
        if len(chart.lines) >= MOST_LINES:
            chart.set_title(f"the first {MOST_LINES} lines")
            break
        own = line.sort_values(across)
        label = ", ".join(f"{name} {value}" for name, value in zip(others, values, strict=True))
        drawn = chart.plot(own[across], own["step_time_us"] / 1e3, marker="o", label=label or None)
        chart.fill_between(own[across], own["low_us"] / 1e3, own["high_us"] / 1e3, alpha=0.15,
                           color=drawn[0].get_color())
    chart.set_xlabel(across)
    chart.set_ylabel("step time, ms (80% interval shaded)")
    chart.set_ylim(bottom=0)
    if others:
        chart.legend(fontsize="small")
    chart.grid(alpha=0.3)
    return chart


def _check(path: str, known: tuple[str, ...], what: str) -> None:
    if Path(path).suffix.lower() not in known:
        raise SweepError(f"{path} cannot be written: {what.lower()}'s name ends with {' or '.join(known)}.")
