"""One calibration from beginning to end: check the device, measure within the time limit, fit, report the errors."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from kernel_models.calibration import checks
from kernel_models.calibration.checks import CalibrationError, Finding
from kernel_models.calibration.figures import max_clock_mhz, measured_device, spec_of, with_measured
from kernel_models.calibration.planner import LEAST_TO_LEARN
from kernel_models.calibration.source import GAVE_UP, Measurements
from kernel_models.calibration.space import families_of
from kernel_models.datasets.campaign import samples_of, software_of
from kernel_models.datasets.samples import Samples, joined
from kernel_models.device import DeviceSpec
from kernel_models.fitting import Options, fit_entries, formula_entry
from kernel_models.host.overheads import HostOverheads
from kernel_models.op_call import Family
from kernel_models.profile import DeviceProfile, ProfileEntry
from tracer.campaign.families import FAMILIES
from tracer.campaign.processes import NoWorkerError, torch_sees_gpu
from tracer.campaign.results import Results
from tracer.campaign.runner import BOX_ENDED, CampaignOutcome, RunOptions, run_items
from tracer.campaign.source import Setup
from tracer.campaign.tables import KERNELS, quickest_visits, read_kernels
from tracer.capture_layout import are_unlike_clocks
from tracer.errors import ForetraceError
from tracer.gpu_state import find_gpus
from tracer.graph import ExecutionGraph
from tracer.store import load_graph

NAME = "calibration"
"""Name of the measurements' directory, as written in ``campaign.json``."""
START_S, FAMILY_S = 12.0, 2.0
"""Fewest seconds of the limit that the start, and each family, need."""
MOST_MINUTES = 24 * 60.0
"""Most minutes of a calibration: chosen, a day."""
FIT_SHARE, MOST_FIT_S = 0.2, 60.0
"""Part of the minutes kept for fitting, and the most seconds of it: chosen."""
_MAX_MB = 200.0
"""Most MB of measurements: chosen."""


@dataclass(frozen=True)
class Request:
    """A request for a calibration.

    Attributes:
        device: "auto" (a GPU if torch sees one, else the CPU), "cuda" or "cpu".
        minutes: Limit of measuring and fitting together, over all runs of one directory.
        families: Names of families; empty for all that the device has.
        work: Directory of the measurements.
        resume: Whether to continue in a directory that holds measurements.
        threads: Threads of a CPU.
        seed: Seed of the random choices.
    """

    work: Path
    device: str = "auto"
    minutes: float = 9.0
    families: Sequence[str] = ()
    resume: bool = False
    threads: int = 1
    seed: int = 0


@dataclass(frozen=True)
class Calibration:
    """The result of a calibration: profile, run, notes, and numbers of measurements by benchmark (fit, held out)."""

    profile: DeviceProfile
    outcome: CampaignOutcome
    notes: list[str]
    counts: dict[str, tuple[int, int]] = field(default_factory=dict)


HostFit = Callable[[Sequence[ExecutionGraph]], HostOverheads]
"""Function that fits host overheads to captures."""


def calibrate(request: Request, *, probe: checks.Probe = checks.probe, host: HostFit | None = None,
              say: Callable[[str], None] = lambda line: None) -> Calibration:
    """Measure a device within a time limit, fit its profile, and judge it on held-out measurements.

    Args:
        request: What to measure, for how long, and where the measurements go.
        probe: Function that returns the device's health.
        host: Function that fits the host's overheads to the captures; without it the profile has none.
        say: Called with lines of progress.

    Raises:
        CalibrationError: The request has a mistake, or the device is not fit for it.
        CampaignError: The measurements cannot be made or written.
        KeyboardInterrupt: All measurements so far are kept.
    """
    began = time.monotonic()
    device = _device(request.device)
    families = _families(request.families, device)
    needed = START_S + FAMILY_S * len(families)
    if not 0 < request.minutes <= MOST_MINUTES:
        raise CalibrationError(f"A calibration cannot last {request.minutes:g} minutes: give a number up to "
                               f"{MOST_MINUTES:.0f}, a day (--minutes; nine are enough for a GPU).")
    if not request.minutes * 60 >= needed:
        raise CalibrationError(f"{request.minutes:g} minutes are not enough for {len(families)} families: give at "
                               f"least {math.ceil(needed / 6) / 10:.1f} (--minutes), or fewer families (--families).")
    if device == "cpu":
        _check_threads(request)
    health = probe(device)
    findings = checks.before(health)
    if request.device == "auto" and device == "cpu" and find_gpus() is not None:
        findings.append(Finding("device", "PyTorch does not see this machine's GPU (foretrace doctor says why): the "
                                          "CPU is calibrated."))
    for finding in findings:
        if finding.fatal:
            raise CalibrationError(finding.text)
        say(finding.text)
    if request.resume and request.minutes * 60 * (1 - FIT_SHARE) < spent_s(request) + 1:
        findings.append(Finding("time", f"Earlier runs used the {request.minutes:g} minutes up: nothing more was "
                                        "measured; give more (--minutes)."))
        say(findings[-1].text)
    box_s = request.minutes * 60 - min(FIT_SHARE * request.minutes * 60, MOST_FIT_S)
    left_s = box_s - spent_s(request)
    setup = Setup(NAME, f"calibration of {device}", device, request.threads if device == "cpu" else 0)
    source = Measurements(setup, families, request.work, box_s, request.seed, probe, health.free_bytes or 8e9, say,
                          left_s=max(left_s, 1.0))
    source.findings += findings
    options = RunOptions(minutes=max(left_s, 1.0) / 60, max_mb=_MAX_MB, resume=request.resume)
    outcome = _run(source, request.work, options, device)
    for finding in checks.during(probe(device)):
        if finding.what not in {one.what for one in source.findings}:
            source.findings.append(finding)
    notes = [*(finding.text for finding in source.findings), *source.notes()]
    if outcome.stopped not in ("", BOX_ENDED):
        notes.append(f"The measurements ended before their time: {outcome.stopped}")
    # Fitting gets the rest of the minutes after measuring, and at least the part that was kept for fitting.
    until = max(began + request.minutes * 60, time.monotonic() + request.minutes * 60 - box_s)
    profile = fit_measurements(request.work, families, host, notes, threads=setup.threads, say=say, until=until)
    return Calibration(profile, outcome, notes, _counts(request.work))


def fit_measurements(work: Path, families: Sequence[Family], host: HostFit | None = None,
                     notes: list[str] | None = None, *, threads: int = 1,
                     say: Callable[[str], None] = lambda line: None, until: float = math.inf) -> DeviceProfile:
    """Return the profile of a directory of measurements.

    Args:
        work: The directory.
        families: Families to fit; those measured only by the first benchmarks of a run (anchors) are left out.
        host: Function that fits the host's overheads.
        notes: Notes to store in the profile; this function adds its own.
        threads: Threads of a CPU.
        say: Called with the family being fitted.
        until: Time on the monotonic clock after which the remaining families get the formulas alone, and a note.

    Raises:
        CalibrationError: There is nothing to fit, or the directory holds measurements of several devices.
    """
    notes = [] if notes is None else notes
    results = Results.read(work)
    sessions = results.index.sessions
    names = list(dict.fromkeys(measured_device(session.get("hardware", {})) for session in sessions))
    if len(names) > 1:
        raise CalibrationError(f"{work} holds measurements of several devices ({', '.join(names)}); give each its own "
                               "directory (--work).")
    spec = spec_of(sessions[-1].get("hardware", {}), threads) if sessions else None
    samples = [] if spec is None else _samples(work, sessions, spec)
    if spec is None or not samples:
        raise CalibrationError(f"{work} holds no measurement to fit to; calibrate with more minutes.")
    wanted = set(families)
    mine = joined(part for part in samples if part.family in wanted)
    if not mine:
        why = next((f" ({note.rstrip('.')})" for note in notes if GAVE_UP in note), "")
        raise CalibrationError(f"{work} holds no measurement of {', '.join(sorted(one.value for one in wanted))}{why}: "
                               "calibrate other families (--families), or with more minutes.")
    spec = with_measured(spec, [(call, float(time)) for one in samples
                                for call, time in zip(one.calls, one.measured_us, strict=True)])
    entries: list[ProfileEntry] = []
    late: list[str] = []
    ended: list[str] = []
    for number, one in enumerate(mine):
        say(f"fitting {one.family.value}, {number + 1} of {len(mine)}: {len(one):,} measurements")
        now = time.monotonic()
        if now > until:
            late.append(one.family.value)
            entries.append(formula_entry(one, spec))
        else:
            ends = now + share_of_time(mine[number:]) * (until - now)
            found = fit_entries(one, spec, replace(Options.of_one_machine(), until=ends))
            if found[0].facts.get("ended_early"):
                ended.append(one.family.value)
            entries += found
        if entries[-1].rows < LEAST_TO_LEARN:
            notes.append(f"{one.family.value} rests on {entries[-1].rows} measurements: its errors say little; give "
                         "more minutes with --resume.")
    if late:
        notes.append(f"The minutes were over before {', '.join(late)} could be fitted: the formulas, fitted to the "
                     "same measurements, stand for learned models; give more minutes with --resume.")
    if ended:
        notes.append(f"The models of {', '.join(ended)} are what their share of the minutes allowed to learn, and no "
                     "trees were tried; give more minutes with --resume.")
    overheads = _overheads(results, host, notes)
    clock_mhz = _clock_mhz(work)
    highest = max_clock_mhz(sessions[-1].get("hardware", {})) or spec.boost_clock_mhz
    if clock_mhz is not None and clock_mhz < highest and are_unlike_clocks(clock_mhz, highest):
        notes.append(f"The measurements ran at {clock_mhz:,.0f} MHz (median) of at most {highest:,.0f}: the profile's "
                     "times are those of that clock.")
    provenance = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"), "data": ["foretrace calibrate"],
        "hardware": sessions[-1].get("hardware", {}), "software": sessions[-1].get("software", {}),
        "measurements": results.index.ok, "seconds": round(sum(line.seconds for line in results.lines.values()), 1),
        **({} if clock_mhz is None else {"clock_mhz": clock_mhz}),
        "split": "a third of all shapes, by the SHA-256 of the shape, is held out and never fitted to",
        "notes": notes}
    return DeviceProfile(spec, entries, provenance, overheads)


def _run(source: Measurements, work: Path, options: RunOptions, device: str) -> CampaignOutcome:
    try:
        return run_items(source, work, options)
    except NoWorkerError as error:
        hint = " --on cpu calibrates the CPU." if device == "cuda" else ""
        needs = " PyTorch is needed (pip install 'foretrace[capture]')." if "No module" in error.reason else ""
        raise CalibrationError(f"Nothing can be measured here: {error.reason}{needs}{hint}") from error


def share_of_time(left: Sequence[Samples]) -> float:
    """Return the share of the remaining time for fitting the first of the remaining families: its share of the rows."""
    return len(left[0]) / max(sum(map(len, left)), 1)


def _samples(work: Path, sessions: Sequence[dict[str, Any]], spec: DeviceSpec) -> list[Samples]:
    found: list[Samples] = []
    for benchmark in FAMILIES:
        if not any((work / KERNELS).glob(f"{benchmark}.*parquet")):
            continue
        frame = read_kernels(work, benchmark)
        if not frame.session.between(0, len(sessions) - 1).all():
            raise CalibrationError(f"{work} holds measurements of more runs than its campaign.json knows; it was "
                                   "changed or damaged, so measure again in another directory (--work).")
        for session, rows in quickest_visits(frame).groupby("session", sort=True):
            found += samples_of(rows, f"{benchmark}.parquet", spec, software_of(sessions[int(session)]))
    return [one for one in found if len(one)]


def _clock_mhz(work: Path) -> float | None:
    """Return the median clock of a GPU's units right after its measurements, MHz; ``None`` where it was never read."""
    read = [read_kernels(work, name).sm_clock_mhz.dropna() for name in FAMILIES
            if any((work / KERNELS).glob(f"{name}.*parquet"))]
    clocks = np.concatenate([np.asarray(one, np.float64) for one in read]) if read else np.zeros(0)
    return float(np.median(clocks)) if len(clocks) else None


def _overheads(results: Results, host: HostFit | None, notes: list[str]) -> HostOverheads | None:
    files = [results.path / line.file for line in results.lines.values()
             if line.kind == "workload" and line.status == "ok" and line.content == "graph"]
    if host is None:
        return None
    if not files:
        notes += [f"The host's overheads are not in the profile, since the step that tells them was not kept: "
                  f"{line.reason or ' '.join(line.notes) or f'there is only its {line.content}.'}"
                  for line in results.lines.values() if line.kind == "workload"][:1]
        return None
    try:
        return host([load_graph(path) for path in files])
    except ForetraceError as error:
        notes.append(f"The host's overheads could not be fitted: {error}")
        return None


def _counts(work: Path) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for line in Results.read(work).lines.values():
        if line.status == "ok" and line.kind == "kernel":
            fit, held = found.get(line.name, (0, 0))
            found[line.name] = (fit + (line.split == "fit"), held + (line.split == "held-out"))
    return found


def spent_s(request: Request) -> float:
    """Return the seconds that earlier runs measured; 0 for a request that does not resume a run."""
    if not request.resume or not (request.work / "campaign.json").is_file():
        return 0.0
    return sum(line.seconds for line in Results.read(request.work).lines.values())


def _device(name: str) -> str:
    if name not in ("auto", "cuda", "cpu"):
        raise CalibrationError(f"There is no device {name!r} to calibrate; choose auto, cuda or cpu.")
    return name if name != "auto" else "cuda" if torch_sees_gpu() else "cpu"


def _check_threads(request: Request) -> None:
    """Raise ``CalibrationError`` for more threads than cores, or a number that differs from earlier runs."""
    cores = os.cpu_count() or 1
    if request.threads > cores:
        raise CalibrationError(f"{request.threads:,} threads are more than the {cores} cores of this machine; give at "
                               "most as many (--threads).")
    if not request.resume or not (request.work / "campaign.json").is_file():
        return
    sessions = Results.read(request.work).index.sessions
    earlier = {int(session["torch_threads"]) for session in sessions if session.get("torch_threads")}
    if earlier - {request.threads}:
        raise CalibrationError(f"{request.work} was measured with --threads {', '.join(map(str, sorted(earlier)))} and "
                               f"this run has {request.threads}: times of different threads are different devices'; "
                               "give the same, or another directory (--work).")


def _families(names: Sequence[str], device: str) -> list[Family]:
    known = families_of(device)
    for name in names:
        if name not in known:
            raise CalibrationError(f"There is no family {name!r} to calibrate on {device}; choose from "
                                   f"{', '.join(known)}.")
    return [Family(name) for name in dict.fromkeys(names or known)]
