"""``foretrace models``: the profiles there are, and how wrong one is on measurements."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from graph_predictor.cli.console import Column, Report, print_json
from graph_predictor.cli.fit import error_cells, models_table
from graph_predictor.cli.options import Json, in_one_sentence
from graph_predictor.request import measured
from kernel_models import profile as kernel_models_profile
from kernel_models import scores

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
    found = [(name, _load(name)) for name in _profiles(path)]
    if json:
        print_json([_as_json(name, profile) for name, profile in found])
        return
    report = Report()
    for name, profile in found:
        data = profile.provenance.get("data", [])
        date = profile.provenance.get("date", "at an unknown date")
        report.line(f"{name}: {profile.device.name}, fitted {date} to {', '.join(data) or 'unnamed data'}",
                    style="bold")
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
    judged, notes = _load(profile), list[str]()
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


def _load(path: str) -> kernel_models_profile.DeviceProfile:
    return kernel_models_profile.load_profile(path)


def _profiles(path: str) -> list[str]:
    """A profile's path itself, or those of a directory."""
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
