"""``foretrace sweep``: every combination of sizes, devices, ranks and edits."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from graph_predictor.comm import traffic
from graph_predictor.request import study
from step_views import sweep as step_views_sweep
from step_views.cli.console import Column, Report, print_json, working
from step_views.cli.options import (
    Cycle,
    Html,
    Json,
    Profiled,
    Step,
    StepRegion,
    Top,
    Window,
    Workers,
    axis,
    check_html,
    in_one_sentence,
    shared,
    with_axes,
    write_html,
)
from step_views.pages import comparison
from step_views.sweep import files, run
from tracer import output_kind
from tracer.lazy import rich_console, rich_progress

if TYPE_CHECKING:
    import pandas as pd

_FIGURES = r"\d[\d,.]*"


class Known(NamedTuple):
    """A column that is shown if at least one point has a value for it."""
    name: str
    title: str
    scale: float = 1.0
    digits: int = 3


KNOWN = (Known("items_per_second", "samples/s", digits=1), Known("peak_memory_bytes", "memory\nGB", 1e-9, 2),
         Known("cost_per_million_items", "cost of\nmillion\nsamples"),
         Known("cost_per_step", "cost of\nmillion\nsteps", 1e6, 2))


@with_axes
@in_one_sentence
def sweep(
    source: Annotated[list[str], typer.Argument(
        metavar="SOURCE", help="As in foretrace predict: traces, a capture, a converted file, or SCRIPT.py:FUNCTION.")],
    out: Annotated[str, shared(
        "--out", "FILE.parquet or FILE.csv; FILE.journal keeps finished points until then, from which the same command "
                 "goes on", short="-o")],
    sizes: Annotated[list[str] | None, axis("--set", "such as batch=8,16,32")] = None,
    device: Annotated[str | None, axis("--device")] = None,
    world_size: Annotated[str | None, axis("--world-size", "1 is the source's own")] = None,
    parallel: Annotated[list[str] | None, shared("--parallel", "repeatable, one plan each")] = None,
    topology: Annotated[str | None, axis("--topology")] = None,
    switches: Annotated[str | None, typer.Option(
        "--edits", metavar="A,B+C,…",
        help="Edits without a value, such as none,cuda-graphs,cuda-graphs+fused-optimizer.")] = None,
    host_from: Annotated[str | None, shared("--host-from", "for all")] = None,
    from_device: Annotated[str | None, shared("--from-device")] = None,
    from_topology: Annotated[str | None, shared("--from-topology")] = None,
    profile: Annotated[list[str] | None, shared("--profile", "repeatable")] = None,
    comm_profile: Annotated[str | None, shared("--comm-profile")] = None,
    comm_backend: Annotated[str | None, shared("--comm-backend")] = None,
    comm_choices: Annotated[str | None, shared("--comm-choices")] = None,
    code: Annotated[str | None, shared("--code")] = None,
    selected: Annotated[float | None, shared("--selected", "by default as recorded")] = None,
    also: Annotated[list[str] | None, shared("--also")] = None,
    step: Step = None,
    price: Annotated[float | None, shared("--price", least=0)] = None,
    best: Annotated[str | None, typer.Option(
        metavar="throughput|time|cost", help="Show the feasible points, the best first.")] = None,
    memory_limit: Annotated[str | None, shared("--memory-limit", "points that need more are not feasible")] = None,
    plot: Annotated[str | None, typer.Option(metavar="FILE", help="Also a plot: .png, .svg or .pdf.")] = None,
    html: Html = None,
    workers: Workers = "local",
    jobs: Annotated[int, typer.Option(metavar="N", help="Processes on this machine; -1 for one a core.")] = -1,
    top: Top = None,
    window: Window = 0,
    step_region: StepRegion = None,
    cycle: Cycle = None,
    profiled: Profiled = False,
    json: Json = False,
    **edits: str | None,
) -> None:
    """Predict every combination of sizes, devices, ranks and edits, in parallel.

    foretrace sweep runs/a --set batch=8,16,32 --device h100-sxm,h200-sxm -o sweep.parquet --best throughput

    Ends with status 1 where no combination can be predicted.
    """
    files.check_table(out)
    goal = None if best is None else _goal(best)
    limit = None if memory_limit is None else traffic.parse_bytes(memory_limit)
    _check_goal(goal, price)
    files.check_not_anothers(out)
    output_kind.check_output(out, list(source), output_kind.TABLE)
    check_html(html, source)
    if plot is not None:
        output_kind.check_output(plot, list(source), output_kind.PLOT)
        files.check_plot(plot)
    fixed = study.Configuration(host_from=host_from, from_topology=from_topology, comm_profile=comm_profile,
                                comm_backend=comm_backend, comm_choices=comm_choices, code=code, selected=selected,
                                also=tuple(also or ()))
    lists = {"device": device, "world_size": world_size, "topology": topology, **edits, "edits": switches}
    space = _space(sizes or [], lists, parallel or [], fixed)
    where = run.SweepSource(tuple(source), window, step, from_device, tuple(profile or ()), profiled,
                            step_region, cycle)
    with _progress(len(space)) as progress:
        found = step_views_sweep.sweep(where, space, output=out, price_per_hour=price, workers=workers,
                                        jobs=jobs, progress=progress)
    if plot is not None:
        with working("Drawing"):
            files.write_plot(found.table, found.axes, plot)
    shown = _shown(found, goal, limit)
    if html is not None:
        write_html(html, source, lambda where: comparison.sweep_page(found, shown, _what(goal, limit), where))
    if json:
        print_json(_plain((shown if goal is not None else found.table).head(top or len(found.table)), found))
    else:
        _report(found, shown, goal, limit, top or 20, [out, *([] if plot is None else [plot])])
    if found.table["step_time_us"].isna().all():
        raise typer.Exit(1)


def _goal(text: str) -> step_views_sweep.Goal:
    try:
        return step_views_sweep.Goal(text)
    except ValueError:
        goals = ", ".join(one.value for one in step_views_sweep.Goal)
        raise step_views_sweep.SweepError(f"--best {text!r} is not known; there are {goals}.") from None


def _check_goal(goal: step_views_sweep.Goal | None, price: float | None) -> None:
    """Raise ``SweepError`` for a goal that no point can reach."""
    if goal is step_views_sweep.Goal.COST and price is None:
        raise step_views_sweep.SweepError("--best cost needs the price of one device and hour; give it with "
                                               "--price.")


def _space(sizes: list[str], lists: dict[str, str | None], plans: list[str],
           fixed: study.Configuration) -> step_views_sweep.SweepSpace:
    axes: list[step_views_sweep.Axis] = [step_views_sweep.Axis.sizes(text) for text in sizes]
    axes += [step_views_sweep.Axis.texts(name, text) for name, text in lists.items() if text is not None]
    if plans:
        axes.append(step_views_sweep.Axis("parallel", tuple(plans)))
    if not axes:
        known = ("set", "parallel", *(name.replace("_", "-") for name in lists))
        raise step_views_sweep.SweepError(f"Nothing varies; give values with --{', --'.join(known[:-1])} or "
                                               f"--{known[-1]}.")
    return step_views_sweep.SweepSpace(tuple(axes), fixed)


@contextmanager
def _progress(points: int) -> Iterator[Callable[[int, int], None] | None]:
    if not sys.stderr.isatty():
        yield None
        return

    # No separate thread draws it, because processes for points may be forked from this one.
    columns = (rich_progress.TextColumn("Predicting"), rich_progress.BarColumn(), rich_progress.MofNCompleteColumn(),
               rich_progress.TimeRemainingColumn())
    with rich_progress.Progress(*columns, console=rich_console.Console(stderr=True), transient=True,
                                auto_refresh=False) as bar:
        task = bar.add_task("Predicting", total=points)
        yield lambda done, total: bar.update(task, completed=done, total=total, refresh=True)


def _shown(found: step_views_sweep.Sweep, goal: step_views_sweep.Goal | None, limit: float
           | None) -> pd.DataFrame:
    if goal is not None:
        return step_views_sweep.ranked(found.table, goal, limit)
    return found.table if limit is None else step_views_sweep.feasible(found.table, limit)


def _plain(table: pd.DataFrame, found: step_views_sweep.Sweep) -> dict[str, object]:
    rows = [{name: None if isinstance(value, float) and value != value else value for name, value in row.items()}
            for row in table.to_dict("records")]
    return {"axes": list(found.axes), "points": len(found.table), "resumed": found.resumed, "notes": list(found.notes),
            "rows": rows}


def _report(found: step_views_sweep.Sweep, shown: pd.DataFrame, goal: step_views_sweep.Goal | None,
            limit: float | None, top: int, written: list[str]) -> None:
    report = Report()
    table = found.table
    refused = table[table["step_time_us"].isna()]
    known = [column for column in KNOWN if shown[column.name].notna().any()]
    columns = [*(Column(name) for name in found.axes), Column("ms"), Column("80%\nbetween"), Column("and"),
               *(Column(column.title) for column in known), Column("bound", name=True)]
    what = _what(goal, limit)
    priced = shown[shown["step_time_us"].notna()]
    which = "".join(f", step {times}" for times in priced["times"].unique())
    report.table(f"{what}: {min(len(priced), top):,} of {len(table):,}{which}", columns,
                 (_cells(row, found.axes, known) for row in priced.head(top).to_dict("records")))
    report.notes([*found.notes, *_warnings(priced)])
    if priced.empty:
        report.line()
        report.line("No point is feasible.")
    if goal is not None and limit is not None and priced["peak_memory_bytes"].isna().any():
        report.notes(["Points of unknown peak memory are among them."])
    if len(refused):
        report.table(f"Not priced: {_points(len(refused))}", [Column("points"), Column("such as", name=True)],
                     ([f"{number:,}", _values(refused[refused["refused"] == why].iloc[0], found.axes)]
                      for why, number in refused["refused"].value_counts().items()))
        for why in refused["refused"].unique()[:top]:
            report.line(f"Not priced: {why}", indent=4)
    report.line()
    more = f" ({found.resumed:,} of an earlier run)" if found.resumed else ""
    report.line(f"{_points(len(table))}{more} written to {' and '.join(written)}.")


def _points(number: int) -> str:
    return "1 point" if number == 1 else f"{number:,} points"


def _warnings(priced: pd.DataFrame) -> Iterator[str]:
    """Yield points' warnings, each with the number of its points; of those that differ only in figures, the first."""
    texts = priced["warnings"].fillna("")
    kinds = texts.str.replace(_FIGURES, "#", regex=True)
    for kind, number in kinds[kinds != ""].value_counts(sort=False).items():
        of = "All points" if number == len(priced) else f"{number:,} of {len(priced):,} points"
        yield f"{of}, such as the first of them: {texts[kinds == kind].iloc[0]}"


def _what(goal: step_views_sweep.Goal | None, limit: float | None) -> str:
    """Return a title that describes which points are shown."""
    what = "Points" if goal is None else f"Best by {goal.value}"
    return what if limit is None else f"{what}, up to {limit / 1e9:,.4g} GB"


def _values(row: pd.Series[object], axes: tuple[str, ...]) -> str:
    return ", ".join(f"{name} {row[name]}" for name in axes)


def _cells(row: dict[str, object], axes: tuple[str, ...], known: list[Known]) -> list[str]:
    def number(name: str, scale: float = 1.0, digits: int = 3) -> str:
        value = row[name]
        if not isinstance(value, int | float) or value != value:
            return "–"
        return f"{value * scale:,.{digits}f}"

    return [*(str(row[name]) for name in axes), number("step_time_us", 1e-3), number("low_us", 1e-3),
            number("high_us", 1e-3), *(number(each.name, each.scale, each.digits) for each in known),
            str(row["bound"])]
