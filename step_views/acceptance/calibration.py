"""Part 4: a calibration of the device: its duration, its coverage, and its errors on held-out shapes."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

from graph_predictor.prediction.overheads import measure_overheads
from kernel_models.calibration import run
from kernel_models.calibration.space import families_of
from kernel_models.profile import DeviceProfile, save_profile
from step_views.acceptance.parts import JUDGED, AcceptanceScale
from step_views.acceptance.points import AcceptancePoint, at_least, at_most, is_true, noted, plain
from step_views.acceptance.worker import part_folder
from tracer.job import Job

PROFILE = "device.profile"
USED = 0.8
"""Least share of its minutes that a calibration must use over all its runs: an earlier end is a failure."""


def calibration(folder: Path, scale: AcceptanceScale) -> Iterator[AcceptancePoint]:
    """Calibrate the device, save the profile, and judge it."""
    own = part_folder(folder, 4)
    work = own / "measurements"
    request = run.Request(work, scale.device, scale.minutes, scale.families,
                          resume=(work / "campaign.json").is_file())
    # An interrupted run has used a part of the same time.
    began = time.monotonic() - run.spent_s(request)
    found = run.calibrate(request, host=lambda graphs: measure_overheads(Job(list(graphs))).overheads, say=_say)
    seconds = time.monotonic() - began
    save_profile(found.profile, own / PROFILE)
    yield at_least("minutes used", seconds / 60.0 / scale.minutes, USED)
    yield from judged_profile(found.profile, scale)
    for note in found.notes:
        yield noted("note", note)


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def judged_profile(profile: DeviceProfile, scale: AcceptanceScale) -> Iterator[AcceptancePoint]:
    """Judge a profile: its families, the number of measurements of each, and its errors on held-out shapes."""
    wanted = scale.families or families_of(scale.device)
    lacking = sorted(set(wanted) - {family.value for family in profile.families})
    yield is_true("families", f"all {len(wanted)}", not lacking, f"without {', '.join(lacking)}" if lacking else "all")
    for family in profile.families:
        entry = profile.entries_of(family)[0]
        errors = entry.facts.get("held_out") or {}
        yield at_least(f"{family.value}: measurements", entry.rows + errors.get("n", 0), scale.measurements, plain)
        name, median = f"{family.value}: median error, held out", errors["median"] if errors.get("n") else None
        if family.value in JUDGED:
            yield at_most(name, median, scale.family_median)
        elif median is not None:
            yield noted(name, f"{median:.2%}", median)
