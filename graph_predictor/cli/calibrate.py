"""``foretrace calibrate``: measure a device for a few minutes, and write its profile."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from graph_predictor.cli.calibrate_host import calibrate_host
from graph_predictor.cli.console import Column, Report, count, microseconds, print_json
from graph_predictor.cli.errors import INTERRUPTED, one_sentence
from graph_predictor.cli.fit import error_cells
from graph_predictor.cli.options import Debug, Json, shared
from graph_predictor.cli.progress_line import ProgressLine
from graph_predictor.cli.text import tell
from graph_predictor.prediction import overheads as prediction_overheads
from kernel_models import profile as kernel_models_profile
from kernel_models.calibration import run as calibration
from kernel_models.host import overheads, segments
from tracer import graph, job
from tracer.output_kind import PROFILE, check_output

WORK_ENDING = ".measurements"
ALL = "all"


def calibrate(
    out: Annotated[str, shared(
        "--out", "a profile, named *.profile by convention", short="-o")],
    on: Annotated[str, typer.Option(
        metavar="auto|cuda|cpu", help="What to calibrate; auto is a GPU if nvidia-smi shows one.")] = "auto",
    host: Annotated[bool, typer.Option(
        "--host", help="Calibrate the host instead: what operations cost it before any device computes.")] = False,
    minutes: Annotated[float | None, shared(
        "--minutes", "for measuring and fitting, over all runs that are resumed; default: 9, with --host 2")] = None,
    families: Annotated[str, typer.Option(
        metavar="NAME,NAME,…", help="Only these families of kernels; default: all that the device has.")] = ALL,
    work: Annotated[str, typer.Option(
        metavar="DIR", help="Directory of the measurements; default: beside PROFILE.")] = "",
    resume: Annotated[bool, shared("--resume")] = False,
    threads: Annotated[int, typer.Option(min=1, help="Threads of a CPU's operations.")] = 1,
    seed: Annotated[int, shared("--seed", "the cases that are measured", least=0)] = 0,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Calibrate a device: micro-benchmarks of its kernels, most of the families that are least known, and models
    fitted to them.

    A third of all shapes is held out and never fitted to; the table at the end is of their errors. May be interrupted
    at any moment, and resumed.

    With --host, small programs are recorded in turn instead, and the file says what operations cost this host:
    foretrace predict --host-from FILE.
    """
    with one_sentence(debug):
        if host:
            refused = [option for option, given in (
                ("--families", families != ALL), ("--work", bool(work)), ("--resume", resume), ("--seed", seed != 0))
                if given]
            calibrate_host(out, on, 2.0 if minutes is None else minutes, threads, refused, as_json=json)
            return
        check_output(out, [], PROFILE)
        folder = Path(work or _beside(out))
        named = [name.strip() for name in families.split(",") if name.strip()]
        if not named:
            raise calibration.CalibrationError("--families names none: give names separated by commas, or leave it out "
                                               "for all.")
        request = calibration.Request(folder, on, 9.0 if minutes is None else minutes, [] if families == ALL else named,
                                      resume, threads, seed)
        line = ProgressLine()
        try:
            found = calibration.calibrate(request, host=_host, say=line.say)
        except KeyboardInterrupt:
            line.end()
            again = f"{' --work ' + work if work else ''} --resume"
            tell(f"foretrace: Interrupted. What was measured is kept in {folder}; go on with the same command and "
                 f"{again.strip()}.")
            raise typer.Exit(INTERRUPTED) from None
        line.end()
        kernel_models_profile.save_profile(found.profile, out)
        if json:
            print_json(_as_json(out, folder, found))
        else:
            _report(out, folder, found)


def _beside(output: str) -> str:
    if "://" in output:
        raise calibration.CalibrationError(f"{output} is a URL: name a local directory for the measurements with "
                                           f"--work.")
    path = Path(output)
    return str(path.with_name(path.name.removesuffix(".profile") + WORK_ENDING))


def _host(graphs: Sequence[graph.ExecutionGraph]) -> overheads.HostOverheads:
    return prediction_overheads.measure_overheads(job.Job(list(graphs))).overheads


def _best(found: calibration.Calibration) -> list[kernel_models_profile.ProfileEntry]:
    """The preferred model of each family."""
    return [found.profile.entries_of(family)[0] for family in found.profile.families]


def _report(output: str, folder: Path, found: calibration.Calibration) -> None:
    report = Report()
    profile = found.profile
    size = f", {count(round(os.path.getsize(output) / 1e3))} kB" if "://" not in output else ""
    measured = count(profile.provenance["measurements"])
    report.line(f"Wrote {output}: {len(_best(found))} families of {profile.device.name}{size}; {measured} measurements "
                f"in {found.outcome.seconds / 60:.1f} minutes, kept in {os.path.join(folder, '')}")
    report.table("Errors on held-out shapes",
                 [Column("family", name=True), Column("model", name=True), Column("fitted to"), Column("held out"),
                  Column("MAPE"), Column("median"), Column("bias"), Column("p90"), Column("max")],
                 ([entry.model.family.value, entry.kind, count(entry.rows), *error_cells(entry.facts.get("held_out"))]
                  for entry in _best(found)))
    spec = profile.device
    report.line()
    rates = ", ".join(f"{name} {rate:.3g}" for name, rate in
                      sorted({**spec.vector_tflops, **spec.matrix_tflops}.items()))
    report.line(f"Device: memory {spec.memory_bandwidth_gbps:.4g} GB/s; TFLOP/s: {rates}", indent=8)
    if profile.host is not None:
        table = profile.host.table
        told = [f"{kind.label} {microseconds(table[kind, overheads.ANY, overheads.ANY].quantiles_ns[2])} µs"
                for kind in segments.Overhead
                if (kind, overheads.ANY, overheads.ANY) in table]
        report.line(f"Host overheads (medians): {', '.join(told)}", indent=8)
    lacking = [entry.model.family.value for entry in _best(found) if not (entry.facts.get("held_out") or {}).get("n")]
    if lacking:
        report.line(f"Too few measurements to judge {', '.join(lacking)}; give more minutes with --resume.")
    report.notes(found.notes)


def _as_json(output: str, folder: Path, found: calibration.Calibration) -> dict[str, Any]:
    profile = found.profile
    return {"file": output, "measurements": str(folder), "device": profile.device.to_json(),
            "provenance": profile.provenance, "notes": found.notes, "seconds": round(found.outcome.seconds, 1),
            "benchmarks": {name: {"fit": fit, "held_out": held} for name, (fit, held) in found.counts.items()},
            "models": [{"family": entry.model.family.value, "kind": entry.kind, "rows": entry.rows,
                        **entry.facts} for entry in _best(found)]}
