"""``foretrace calibrate``: micro-benchmarks of a device, or of a host, and models fitted to them."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from graph_predictor.figures import count, microseconds, signed_percent
from graph_predictor.prediction import host_steps, overheads
from kernel_models import profile as kernel_models_profile
from kernel_models.calibration import run
from kernel_models.calibration.checks import CalibrationError
from kernel_models.host import model, segments
from kernel_models.host import overheads as host_overheads
from step_views.cli.console import Column, ProgressLine, Report, print_json
from step_views.cli.fit import error_cells
from step_views.cli.options import Json, in_one_sentence, shared
from step_views.cli.running import INTERRUPTED, TERMINATED, tell
from tracer import graph, job, kept_files
from tracer.campaign import host_rounds
from tracer.capture import interruption
from tracer.errors import ForetraceError
from tracer.output_kind import HOST, PROFILE, check_output

DEVICES = ("auto", "cpu", "cuda")
MOST_MINUTES = 60.0  # chosen: more is probably a typing error
KEEP = 6
"""Number of rounds that are used, those with least disturbance."""


def calibrate_host(out: str, on: str, minutes: float, threads: int, refused: list[str], *, as_json: bool) -> None:
    """Record, fit, write and report. Raises ``ForetraceError`` if options were given that --host refuses (``refused``),
    an option is impossible, PyTorch is missing, or a file cannot be written."""
    if refused:
        raise ForetraceError(f"{refused[0]} is for a device's kernels; leave it out with --host.")
    if on not in DEVICES:
        raise ForetraceError(f"{on!r} cannot be calibrated; choose one of {', '.join(DEVICES)}.")
    if not 0 < minutes <= MOST_MINUTES:
        raise ForetraceError(f"{minutes:g} minutes are none for a host: give up to {MOST_MINUTES:g}.")
    check_output(out, [], HOST)
    line = ProgressLine()
    try:
        with kept_files.scratch_folder("foretrace-host-") as folder:
            found, kept, device = _measured(Path(folder), on, 60.0 * minutes, threads, line)
    except KeyboardInterrupt:
        line.end()
        tell("foretrace: Interrupted; nothing was written. Start it again: a host's rounds are not resumed.")
        raise typer.Exit(INTERRUPTED) from None
    line.end()

    model.write_host(found.model, Path(out))
    if as_json:
        print_json(_host_json(out, found, kept, device))
    else:
        _report_host(out, found, kept, device)


def _measured(folder: Path, on: str, seconds: float, threads: int, line: ProgressLine) -> tuple[
        host_steps.HostCalibration, int, str]:
    """Record rounds into a folder and fit. Return the calibration, the number of rounds used, and the device."""
    device, steps = host_rounds.built_on(on, threads)
    plan = host_rounds.RoundPlan(40, KEEP, seconds)
    kept = host_rounds.record_rounds({name: (step, {}) for name, step in steps.items()}, folder, plan, line.say)
    line.say("fitting the host's model")
    return host_steps.calibrated(host_steps.read_rounds(folder), f"this host ({device})"), kept, device


def _report_host(out: str, found: host_steps.HostCalibration, kept: int, device: str) -> None:
    report = Report()
    errors = [abs(program.error) for program in found.programs]
    report.line(f"Wrote {out}: what operations cost this host, from {count(len(found.programs))} small programs on "
                f"{device} ({count(kept)} rounds each).")
    report.table("Host time of each program, as the others tell it (µs a step)",
                 [Column("program", name=True), Column("measured"), Column("told"), Column("error")],
                 ([program.name, f"{program.measured_ns / 1e3:,.0f}", f"{program.told_ns / 1e3:,.0f}",
                   signed_percent(program.error)] for program in found.programs))
    report.line()
    report.line(f"Left out in turn: MAPE {statistics.fmean(errors):.1%}, median {statistics.median(errors):.1%}, "
                f"worst {max(errors):.1%}. Programs unlike these are told within ×/÷ "
                f"{math.exp(found.model.suited(True).spread):.2f} in 80% of the cases.")
    if (ratio := _over_shipped(found, device)) is not None:
        report.line(f"The same operations take {ratio:.2f} times as long as on the host that is shipped.")
    report.line(f"Use it: foretrace predict STEP.foretrace --host-from {out}; foretrace plan … --host-from {out}")


def _over_shipped(found: host_steps.HostCalibration, device: str) -> float | None:
    """Return the ratio of operation times here to those of the shipped host: the median over the labels of both."""
    other = model.shipped_host(model.CPU_HOST if device == "cpu" else model.GPU_HOST)
    both = [label for label, pool in found.model.pools.items() if len(label) == 3 and label[0] == "own"
            and label in other.pools]
    if not both:
        return None
    apart = statistics.median([found.model.pools[label].log_base - other.pools[label].log_base for label in both])
    return math.exp(apart + found.model.offset - other.offset)


def _host_json(out: str, found: host_steps.HostCalibration, kept: int, device: str) -> dict[str, Any]:
    return {"file": out, "device": device, "rounds": kept, "interval_factor": math.exp(found.model.suited(True).spread),
            "over_shipped": _over_shipped(found, device),
            "programs": [{"name": program.name, "measured_us": program.measured_ns / 1e3,
                          "told_us": program.told_ns / 1e3, "error": program.error} for program in found.programs]}


WORK_ENDING = ".measurements"
ALL = "all"


@in_one_sentence
def calibrate(
    out: Annotated[str, shared(
        "--out", "a profile, named *.profile by convention", short="-o")],
    on: Annotated[str, typer.Option(
        metavar="auto|cuda|cpu", help="What to calibrate; auto is a GPU if torch sees one.")] = "auto",
    host: Annotated[bool, typer.Option(
        "--host", help="Calibrate the host instead: what operations cost it before any device computes.")] = False,
    minutes: Annotated[float | None, shared(
        "--minutes", "for measuring and fitting, over all runs that are resumed; default: 9, with --host 2")] = None,
    families: Annotated[str, typer.Option(
        metavar="NAME,NAME,…", help="Only these families of kernels; default: all that the device has.")] = ALL,
    work: Annotated[str, typer.Option(
        metavar="DIR", help="Directory of the measurements; default: next to PROFILE.")] = "",
    resume: Annotated[bool, shared("--resume")] = False,
    threads: Annotated[int, typer.Option(min=1, help="Threads of a CPU's operations.")] = 1,
    seed: Annotated[int, shared("--seed", "the cases that are measured", least=0)] = 0,
    json: Json = False,
) -> None:
    """Calibrate a device: micro-benchmarks of its kernels, most of the families that are least known, and models
    fitted to them.

    A third of all shapes is held out and never fitted to; the table at the end is of their errors. May be interrupted
    at any moment, and resumed.

    With --host, small programs are recorded in turn instead, and the file says what operations cost this host:
    foretrace predict --host-from FILE.
    """
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
        raise CalibrationError("--families names none: give names separated by commas, or leave it out "
                                           "for all.")
    request = run.Request(folder, on, 9.0 if minutes is None else minutes, [] if families == ALL else named,
                                  resume, threads, seed)
    line = ProgressLine()
    try:
        with interruption.termination_unwinds():
            found = run.calibrate(request, host=_host, say=line.say)
    except KeyboardInterrupt as error:
        line.end()
        ended = isinstance(error, interruption.Terminated)
        again = f"{' --work ' + work if work else ''} --resume"
        tell(f"foretrace: {'Terminated' if ended else 'Interrupted'}. What was measured is kept in {folder}; go on "
             f"with the same command and {again.strip()}.")
        raise typer.Exit(TERMINATED if ended else INTERRUPTED) from None
    line.end()
    try:
        kernel_models_profile.save_profile(found.profile, out)
    except ForetraceError as error:
        raise CalibrationError(f"{str(error).rstrip('.')}. What was measured is kept in {folder}, and the same command "
                               "with --resume fits it again.") from error
    if json:
        print_json(_as_json(out, folder, found))
    else:
        _report(out, folder, found)


def _beside(output: str) -> str:
    if "://" in output:
        raise CalibrationError(f"{output} is a URL: name a local directory for the measurements with "
                                           f"--work.")
    path = Path(output)
    return str(path.with_name(path.name.removesuffix(".profile") + WORK_ENDING))


def _host(graphs: Sequence[graph.ExecutionGraph]) -> host_overheads.HostOverheads:
    return overheads.measure_overheads(job.Job(list(graphs))).overheads


def _best(found: run.Calibration) -> list[kernel_models_profile.ProfileEntry]:
    """Return each family's preferred model."""
    return [found.profile.entries_of(family)[0] for family in found.profile.families]


def _report(output: str, folder: Path, found: run.Calibration) -> None:
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
    clock = profile.provenance.get("clock_mhz")
    report.line(f"Device: memory {spec.memory_bandwidth_gbps:.4g} GB/s; TFLOP/s: {rates}"
                f"{f'; measured at {clock:,.0f} MHz' if clock else ''}", indent=8)
    if profile.host is not None:
        table = profile.host.table
        told = [f"{kind.label} {microseconds(table[kind, host_overheads.ANY, host_overheads.ANY].quantiles_ns[2])} µs"
                for kind in segments.Overhead
                if (kind, host_overheads.ANY, host_overheads.ANY) in table]
        report.line(f"Host overheads (medians): {', '.join(told)}", indent=8)
    lacking = [entry.model.family.value for entry in _best(found) if not (entry.facts.get("held_out") or {}).get("n")]
    if lacking:
        report.line(f"Too few measurements to judge {', '.join(lacking)}; give more minutes with --resume.")
    report.notes(found.notes)


def _as_json(output: str, folder: Path, found: run.Calibration) -> dict[str, Any]:
    profile = found.profile
    return {"file": output, "measurements": str(folder), "device": profile.device.to_json(),
            "provenance": profile.provenance, "notes": found.notes, "seconds": round(found.outcome.seconds, 1),
            "benchmarks": {name: {"fit": fit, "held_out": held} for name, (fit, held) in found.counts.items()},
            "models": [{"family": entry.model.family.value, "kind": entry.kind, "rows": entry.rows,
                        **entry.facts} for entry in _best(found)]}
