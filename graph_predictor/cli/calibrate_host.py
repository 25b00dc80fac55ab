"""``foretrace calibrate --host``: small programs recorded in turn, and a model of what operations cost the host."""

from __future__ import annotations

import math
import statistics
import tempfile
from pathlib import Path
from typing import Any

import typer

from graph_predictor.cli.console import Column, Report, count, print_json
from graph_predictor.cli.errors import INTERRUPTED
from graph_predictor.cli.progress_line import ProgressLine
from graph_predictor.cli.text import tell
from graph_predictor.figures import signed_percent
from graph_predictor.prediction import host_calibration
from kernel_models.host import model as hosts
from tracer.campaign import host_programs, host_rounds
from tracer.errors import ForetraceError
from tracer.output_kind import HOST, check_output

DEVICES = ("auto", "cpu", "cuda")
MOST_MINUTES = 60.0
KEEP = 6
"""Rounds, those least disturbed."""
MOST_ROUNDS = 40


def calibrate_host(out: str, on: str, minutes: float, threads: int, refused: list[str], *, as_json: bool) -> None:
    """Record, fit, write and report.

    Args:
        out: file of the model.
        on: "auto", "cpu" or "cuda": where the programs compute.
        minutes: for recording.
        threads: of a CPU's operations.
        refused: options that were given and mean nothing here.
        as_json: print JSON.

    Raises:
        ForetraceError: an option cannot be, PyTorch is missing, or a file cannot be written.
    """
    if refused:
        raise ForetraceError(f"{refused[0]} is for a device's kernels; leave it out with --host.")
    if on not in DEVICES:
        raise ForetraceError(f"{on!r} cannot be calibrated; choose one of {', '.join(DEVICES)}.")
    if not 0 < minutes <= MOST_MINUTES:
        raise ForetraceError(f"{minutes:g} minutes are none for a host: give up to {MOST_MINUTES:g}.")
    check_output(out, [], HOST)
    line = ProgressLine()
    try:
        with tempfile.TemporaryDirectory(prefix="foretrace-host-") as folder:
            found, kept, device = _measured(Path(folder), on, 60.0 * minutes, threads, line)
    except KeyboardInterrupt:
        line.end()
        tell("foretrace: Interrupted; nothing was written. Start it again: a host's rounds are not resumed.")
        raise typer.Exit(INTERRUPTED) from None
    line.end()

    hosts.write_host(found.model, Path(out))
    if as_json:
        print_json(_as_json(out, found, kept, device))
    else:
        _report(out, found, kept, device)


def _measured(folder: Path, on: str, seconds: float, threads: int, line: ProgressLine) -> tuple[
        host_calibration.HostCalibration, int, str]:
    """Record rounds into a folder and fit; the calibration, the rounds kept, and the device."""
    device, steps = host_programs.built_on(on, threads)
    plan = host_rounds.RoundPlan(MOST_ROUNDS, KEEP, seconds)
    kept = host_rounds.record_rounds({name: (step, {}) for name, step in steps.items()}, folder, plan, line.say)
    line.say("fitting the host's model")
    return host_calibration.calibrated(host_calibration.read_rounds(folder), f"this host ({device})"), kept, device


def _report(out: str, found: host_calibration.HostCalibration, kept: int, device: str) -> None:
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


def _over_shipped(found: host_calibration.HostCalibration, device: str) -> float | None:
    """Return how long operations take here over the shipped host's, the median of those that both know as they are."""
    other = hosts.shipped_host(hosts.CPU_HOST if device == "cpu" else hosts.GPU_HOST)
    both = [label for label, pool in found.model.pools.items() if len(label) == 3 and label[0] == "own"
            and label in other.pools]
    if not both:
        return None
    apart = statistics.median([found.model.pools[label].log_base - other.pools[label].log_base for label in both])
    return math.exp(apart + found.model.offset - other.offset)


def _as_json(out: str, found: host_calibration.HostCalibration, kept: int, device: str) -> dict[str, Any]:
    return {"file": out, "device": device, "rounds": kept, "interval_factor": math.exp(found.model.suited(True).spread),
            "over_shipped": _over_shipped(found, device),
            "programs": [{"name": program.name, "measured_us": program.measured_ns / 1e3,
                          "told_us": program.told_ns / 1e3, "error": program.error} for program in found.programs]}
