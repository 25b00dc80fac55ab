"""The process of one part: ``python -m step_views.acceptance.worker NUMBER FOLDER SCALE``; it writes a point a line.

Points are written as they are found, so they remain if the process dies.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib import import_module
from itertools import chain
from math import inf
from pathlib import Path

import msgspec

from kernel_models.calibration.checks import during, probe
from step_views.acceptance.parts import PARTS, SCALES, AcceptanceScale
from step_views.acceptance.points import NO_FAULT, UNJUDGED, AcceptancePoint, noted
from tracer.capture.interruption import end_with_parent
from tracer.errors import ForetraceError

POINTS = "points.jsonl"
TIMED = 2, 3, 4, 5
"""Numbers of the parts that judge times."""
COULD_NOT_RUN = 75
"""Exit status of a part that could not run, which says nothing about the machine: EX_TEMPFAIL of sysexits.h."""


def part_folder(folder: Path, number: int) -> Path:
    """Return the folder of a part's files."""
    return folder / f"part{number}"


def judged_here(number: int, scale: AcceptanceScale) -> tuple[AcceptanceScale, list[AcceptancePoint]]:
    """Return the scale without limits on times if a CPU is busy with other work, and a point that reports this."""
    busy = [each.text for each in during(probe("cpu")) if each.what == "load"] if number in TIMED else []
    if scale.is_cuda or not busy:
        return scale, []
    free = replace(scale, own_clock=inf, mape=inf, worst=inf, covered=-inf, family_median=inf, products=inf)
    return free, [noted(UNJUDGED, f"not judged: {busy[0]} Repeat it on a quiet machine.")]


def work(number: int, folder: Path, scale: str) -> None:
    """Run a part and write its points."""
    part = PARTS[number]
    chosen, points = judged_here(number, SCALES[scale])
    found = getattr(import_module(f"{__package__}.{part.module}"), part.function)(folder, chosen)
    with (part_folder(folder, number) / POINTS).open("wb", buffering=0) as file:
        for point in chain(points, found):
            file.write(msgspec.json.encode(point) + b"\n")


def main(number: int, folder: Path, scale: str) -> None:
    """Run a part as a process. Exits with ``COULD_NOT_RUN``, or with 1 and a sentence for errors of foretrace."""
    try:
        work(number, folder, scale)
    except ForetraceError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(COULD_NOT_RUN if isinstance(error, NO_FAULT) else 1)


if __name__ == "__main__":
    end_with_parent()
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
