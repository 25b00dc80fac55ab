"""The process of one part: ``python -m graph_predictor.acceptance.worker NUMBER FOLDER SCALE``; a point is a line.

Points are written as they are found, so that a process that dies leaves those before.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib import import_module
from itertools import chain
from math import inf
from pathlib import Path

import msgspec

from graph_predictor.acceptance.parts import PARTS, SCALES, AcceptanceScale
from graph_predictor.acceptance.points import AcceptancePoint, noted
from kernel_models.calibration.checks import during, probe

POINTS = "points.jsonl"


def part_folder(folder: Path, number: int) -> Path:
    """Return the folder of a part's files."""
    return folder / f"part{number}"


def judged_here(scale: AcceptanceScale) -> tuple[AcceptanceScale, list[AcceptancePoint]]:
    """Return the scale without conditions on times where a CPU is busy with other work, and a point that says so."""
    busy = [] if scale.is_cuda else [each.text for each in during(probe("cpu")) if each.what == "load"]
    if not busy:
        return scale, []
    free = replace(scale, mape=inf, worst=inf, covered=-inf, family_median=inf, products=inf)
    return free, [noted("other work", f"{busy[0]} Errors of times are not judged.")]


def work(number: int, folder: Path, scale: str) -> None:
    """Run a part and write its points."""
    part = PARTS[number]
    chosen, points = judged_here(SCALES[scale])
    found = getattr(import_module(f"{__package__}.{part.module}"), part.function)(folder, chosen)
    with (part_folder(folder, number) / POINTS).open("wb", buffering=0) as file:
        for point in chain(points, found):
            file.write(msgspec.json.encode(point) + b"\n")


if __name__ == "__main__":
    work(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
