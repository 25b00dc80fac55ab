"""``foretrace fit`` and ``foretrace models``: device profiles of kernels and whole steps, and how wrong they are."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Annotated, Any

import typer

from graph_predictor.figures import count, percent, signed_percent
from graph_predictor.request import measured
from graph_predictor.request import measured as request_measured
from kernel_models import datasets, fitting, op_call, scores, step_profile
from kernel_models import device as known_devices
from kernel_models import profile as kernel_models_profile
from step_views.cli.console import Column, Report, print_json
from step_views.cli.options import Json, in_one_sentence, shared
from step_views.cli.running import printable, tell
from tracer.lazy import rich_console, rich_markup, rich_progress
from tracer.output_kind import PROFILE, check_output


@contextmanager
def showing_fits() -> Iterator[fitting.Progress]:
    """Show the progress of fits that run in parallel."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield _tell_begin
        return

    bars: dict[str, rich_progress.TaskID] = {}
    lock = Lock()
    columns = (rich_progress.TextColumn("Fitting {task.description}"), rich_progress.BarColumn(),
               rich_progress.TaskProgressColumn(), rich_progress.TimeElapsedColumn())
    with rich_progress.Progress(*columns, console=rich_console.Console(stderr=True), transient=True) as shown:
        def show(name: str, done: float) -> None:
            with lock:
                if name not in bars:
                    bars[name] = shown.add_task(rich_markup.escape(printable(name)), total=1.0)
                shown.update(bars[name], completed=done, visible=done < 1.0)

        yield show


def _tell_begin(name: str, done: float) -> None:
    if done == 0.0:
        tell(f"fitting {name}")


@in_one_sentence
def fit(
    out: Annotated[str, shared(
        "--out", "a profile, named *.profile by convention", short="-o")],
    data: Annotated[list[str] | None, typer.Argument(
        metavar="[TRACE|DATASET]...", help="Tables of measured kernels (Parquet, CSV), traces with shapes, directories "
        "of either, or those of 'foretrace campaign'.")] = None,
    steps: Annotated[str, typer.Option(
        metavar="TABLE", help="Table of whole steps (Parquet, CSV) with columns trace (a file of it), step_ms (without "
        "the profiler) and, if need be, device and software.")] = "",
    device: Annotated[str, shared(
        "--device", "its measurements only; needed where the data are of several, or a table names none")] = "",
    software: Annotated[str, typer.Option(
        help="Fit only to software whose name contains this, such as 'vllm-0.24'.")] = "",
    family: Annotated[list[str] | None, typer.Option(help="Fit only this family; may be repeated.")] = None,
    refit: Annotated[bool, typer.Option(
        help="Fit the stored models to the held-out calls too, once these have judged them.")] = True,
    json: Json = False,
) -> None:
    """Fit a device profile to measured kernels, to whole steps, or to both.

    For each family and software, formulas and learned models are compared by cross-validation over groups of shapes. A
    fifth of the groups is held out of all choices and judges the result; its errors are stored in the profile. Learned
    models grow as long as left-out groups gain by it, on all cores.

    Captures of programs that compute on a CPU are measurements of that CPU: each operation's own time, without the
    profiler's. Many small programs of any kind tell what another one's steps compute there.

    Whole steps correct the formulas of all families that no kernels were measured of; each trace's steps are left out
    in turn to judge what the others teach. Steps that the host decides are left out: the fit is of the device's time.
    """
    if not data and not steps:
        raise datasets.DataError("There is nothing to fit to: give tables of kernels or traces, or a table of "
                                 "steps with "
                                 "--steps.")
    check_output(out, [*(data or ()), *([steps] if steps else [])], PROFILE)
    spec = known_devices.find_device(device) if device else None
    known = {one.value: one for one in op_call.Family}
    for name in family or ():
        if name not in known:
            raise datasets.DataError(f"There is no family {name!r}; choose one of {', '.join(known)}.")
    notes: list[str] = []
    profile = None
    if data:
        samples = request_measured.read_kernels(data, tell, spec=spec, notes=notes)
        some = [one for one in samples if software in one.software and (not family or one.family.value in family)]
        if not some:
            named = sorted({one.software for one in samples})
            families = sorted({one.family.value for one in samples})
            raise datasets.DataError(f"Nothing in the data fits these options; its software: "
                                     f"{', '.join(named[:8])}, its "
                                     f"families: {', '.join(families)}.")
        on_cpu = (spec or known_devices.find_device(some[0].device)).vendor == "host"
        options = fitting.Options.of_one_machine(refit=refit) if on_cpu else fitting.Options(refit=refit)
        with showing_fits() as progress:
            profile = fitting.fit_profile(some, spec, options, progress, notes)
    if steps:
        left_out: list[str] = []
        found, measured = request_measured.read_steps(steps, profile.device if profile else spec, software,
                                                      left_out, tell)
        tell(f"fitting to whole steps: {len(measured):,}")
        profile = step_profile.fit_steps(measured, found, os.path.basename(steps), profile, left_out)
        if family:
            profile = replace(profile, entries=[one for one in profile.entries if one.model.family.value in family])
    assert profile is not None
    kernel_models_profile.save_profile(profile, out)
    size = os.path.getsize(out) if "://" not in out else None
    if json:
        print_json({"file": out, "bytes": size, "device": profile.device.name, "provenance": profile.provenance,
                    "models": [{"family": entry.model.family.value, "software": entry.software, "kind": entry.kind,
                                "rows": entry.rows, **entry.facts} for entry in profile.entries]})
        return
    report = Report()
    report.line(f"Wrote {out}: {len(profile.entries)} models of {profile.device.name}"
                + (f", {count(round(size / 1e3))} kB." if size else "."))
    if data:
        models_table(report, profile.entries)
    steps_table(report, profile)
    report.notes(profile.provenance.get("notes", ()))


LEAST_HELD_OUT = 20
"""With fewer held-out calls, the cross-validated errors are shown instead."""
_MARK = "*"
_COLUMNS = [
    Column("family", name=True), Column("software", name=True), Column("model", name=True), Column("fitted to"),
    Column("judged on"), Column("MAPE"), Column("median"), Column("bias"), Column("p90"), Column("max")]

_STEP_COLUMNS = [Column("fitted", name=True), Column("steps"), *_COLUMNS[5:]]


def models_table(report: Report, entries: Sequence[kernel_models_profile.ProfileEntry]) -> None:
    """Print a profile's models with their errors."""
    shown = [shown_errors(entry) for entry in entries]
    report.table("Errors on held-out groups of shapes", _COLUMNS, (
        [entry.model.family.value, entry.software, entry.kind, count(entry.rows), n + _MARK * crossed, *errors]
        for entry, (found, crossed) in zip(entries, shown, strict=True) for n, *errors in [error_cells(found)]))
    if any(crossed for _, crossed in shown):
        report.line(f"{_MARK} fewer than {LEAST_HELD_OUT} calls were held out: errors of cross-validation over the "
                    "groups that were fitted to.", indent=2)


def steps_table(report: Report, profile: kernel_models_profile.DeviceProfile) -> None:
    """Print errors of whole steps, if the profile was fitted to any."""
    facts = profile.provenance.get("steps")
    if not facts:
        return
    report.table(f"Errors on whole steps ({facts['rows']:,}, traces: {facts['graphs']:,})", _STEP_COLUMNS, (
        [name, *error_cells(facts[key])] for name, key in (
            ("before", "before"), ("each trace left out in turn", "left_out")) if key in facts))


def shown_errors(entry: kernel_models_profile.ProfileEntry) -> tuple[dict[str, float] | None, bool]:
    """Return a model's errors, and whether they are cross-validated because there are too few held-out calls."""
    held = entry.facts.get("held_out") or {}
    crossed = entry.facts.get("cross_validation")
    if held.get("n", 0) >= LEAST_HELD_OUT or not crossed:
        return held, False
    return crossed, True


def error_cells(errors: dict[str, float] | None) -> list[str]:
    """Return the cells for n, MAPE, median, bias, p90 and max; dashes if there are no errors."""
    if not errors or not errors.get("n"):
        return ["–"] * 6
    bias = errors.get("bias")
    return [count(errors["n"]), *(percent(errors.get(name)) for name in ("mape", "median")),
            signed_percent(bias), *(percent(errors.get(name)) for name in ("p90", "max"))]


models = typer.Typer(no_args_is_help=True, rich_markup_mode=None,
                     help="List fitted device profiles, and judge them by measured kernels.")


@models.command("list")
@in_one_sentence
def list_models(
    path: Annotated[str, typer.Argument(
        metavar="PROFILE|DIR", help="A profile or a directory of them.")],
    json: Json = False,
) -> None:
    """List profiles with their models, what they were fitted to, and their held-out errors."""
    found = [(name, kernel_models_profile.load_profile(name)) for name in _profiles(path)]
    if json:
        print_json([_as_json(name, profile) for name, profile in found])
        return
    report = Report()
    for name, profile in found:
        data = profile.provenance.get("data", [])
        date = profile.provenance.get("date", "at an unknown date")
        clock = profile.provenance.get("clock_mhz")
        report.line(f"{name}: {profile.device.name}, fitted {date} to {', '.join(data) or 'unnamed data'}"
                    f"{f', measured at {clock:,.0f} MHz' if clock else ''}", style="bold")
        models_table(report, profile.entries)
        report.line()


@models.command()
@in_one_sentence
def evaluate(
    profile: Annotated[str, typer.Argument(metavar="PROFILE", help="A file of 'foretrace fit'.")],
    data: Annotated[list[str], typer.Argument(
        metavar="DATA...", help="Tables, traces or directories of them, as 'foretrace fit' takes.")],
    json: Json = False,
) -> None:
    """Compare a profile's times with measured ones, family by family.

    Every measured call of the profile's device counts once. Each is priced by the model of its own software where the
    profile has one, else by the best that covers it, and by formulas where none does.
    """
    judged, notes = kernel_models_profile.load_profile(profile), list[str]()
    found = scores.evaluate_profile(judged,
                                    measured.read_kernels(data, spec=judged.device,
                                                                                  notes=notes))
    found.notes[:0] = notes
    if json:
        print_json(found.to_json())
        return
    report = Report()
    columns = [Column("calls"), Column("MAPE"), Column("median"), Column("bias"), Column("p90"), Column("max")]
    report.table("Errors by family", [Column("family", name=True), *columns],
                 ([name, *error_cells(errors.to_json())] for name, errors in found.families.items()))
    report.table("Errors by family and software",
                 [Column("family", name=True), Column("software", name=True), *columns],
                 ([family, software, *error_cells(errors.to_json())]
                  for (family, software), errors in found.by_software.items()))
    report.notes(found.notes)


def _profiles(path: str) -> list[str]:
    """Return a profile's path, or the paths of the profiles in a directory."""
    if "://" in path or not os.path.isdir(path):
        return [path]
    found = sorted(str(one) for one in Path(path).glob(f"*{kernel_models_profile.ENDING}"))
    if not found:
        raise kernel_models_profile.ProfileError(f"The directory {path} holds no profile "
                                                 f"(*{kernel_models_profile.ENDING}); make one with foretrace fit.")
    return found


def _as_json(path: str, profile: kernel_models_profile.DeviceProfile) -> dict[str, Any]:
    return {"file": path, "device": profile.device.name, "provenance": profile.provenance,
            "models": [{"family": entry.model.family.value, "software": entry.software, "kind": entry.kind,
                        "rows": entry.rows, **entry.facts} for entry in profile.entries]}
