"""Part 6: captures of unusual programs: CUDA graphs, streams, loader workers, failures, and memory."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from graph_predictor.prediction.replay import replay
from step_views.acceptance.parts import AcceptanceScale
from step_views.acceptance.points import AcceptancePoint, absent, guarded, is_true, near, noted
from step_views.acceptance.worker import part_folder
from step_views.check.validate import FORETRACE
from tracer.capture_layout import read_context
from tracer.job import read_job
from tracer.memory_snapshot import snapshot_timeline

SCRIPT = Path(__file__).resolve().parents[2] / "tracer" / "workloads" / "unusual.py"
OPTIONS = ("--warmup", "2", "--timed", "4", "--steps", "2", "--form", "foretrace", "--replace", "--continue")
LONGEST_S = 120.0
"""Seconds after which a program counts as hanging."""
PEAK_WITHIN = 0.02  # chosen: of peaks of memory


class CapturedProgram(NamedTuple):
    """A program of ``tracer.workloads.unusual``, the status it ends with, and whether it needs a GPU."""

    name: str
    status: int = 0
    needs_gpu: bool = False
    device: str = ""
    """Device on which it computes; by default the device of the run."""


PROGRAMS = (CapturedProgram("plain"), CapturedProgram("plain", device="cpu"), CapturedProgram("loader"),
            CapturedProgram("oom", 1),
            CapturedProgram("ctrl-c", 130), CapturedProgram("graph", needs_gpu=True),
            CapturedProgram("reduce-overhead", needs_gpu=True),
            CapturedProgram("streams", needs_gpu=True), CapturedProgram("snapshot", needs_gpu=True))


def programs(folder: Path, scale: AcceptanceScale) -> Iterator[AcceptancePoint]:
    """Capture each program in a new process, and read the capture."""
    for program in PROGRAMS:
        device = program.device or scale.device
        if program.needs_gpu and not scale.is_cuda:
            yield absent(program.name, "it needs a GPU")
        elif program.device != scale.device:  # on a CPU, the plain program is a CPU program already
            yield from guarded(f"{program.name} on {device}", _captured(part_folder(folder, 6), program, device))


def _captured(own: Path, program: CapturedProgram, device: str) -> Iterator[AcceptancePoint]:
    what = f"{program.name} on {device}"
    out, snapshot = own / f"{program.name}-{device}", own / "snapshot.pickle"
    words = [*FORETRACE, "capture", "--out", str(out), *OPTIONS, str(SCRIPT), "--", program.name, device,
             *([str(snapshot)] if program.name == "snapshot" else [])]
    ran = subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=LONGEST_S, check=False)
    last = " | ".join(ran.stderr.strip().splitlines()[-3:])[-300:]
    yield is_true(f"{what}: exit status", str(program.status), ran.returncode == program.status,
                  f"{ran.returncode}{f' ({last})' if ran.returncode != program.status else ''}")
    context = read_context(out / "rank0")
    peak = re.search(r"^peak (\d+)$", ran.stdout, re.MULTILINE)
    yield from judged_context(what, context, device, int(peak[1]) if peak else None)
    if not program.status:
        error = replay(read_job(out).graphs).max_abs_error
        yield noted(f"{what}: replay", f"{error:.2%}", error)
    if program.name == "snapshot" and peak:
        found = snapshot_timeline(snapshot).peak_bytes
        yield near(f"{what}: peak of the snapshot over PyTorch's", found / int(peak[1]), 1.0, PEAK_WITHIN)


def judged_context(what: str, context: Mapping[str, Any], device: str, peak: int | None) -> Iterator[AcceptancePoint]:
    """Judge the device that a capture names, and its peak memory against the program's own figure."""
    name = str(context.get("hardware", {}).get("device", ""))
    yield is_true(f"{what}: device", "CPU" if device == "cpu" else "the GPU", bool(name) and (name == "CPU") == (
        device == "cpu"), name or "none")
    if peak is not None:
        recorded = context.get("peak_memory", {}).get("allocated_bytes", 0)
        yield near(f"{what}: peak of memory over PyTorch's", recorded / peak, 1.0, PEAK_WITHIN)
