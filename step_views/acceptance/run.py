"""The acceptance run: each part in its own process within the time limit; ``results.json`` is written after each part.

::

    results.json ── parts that are done ──▶ skipped
    other parts, in order, if they fit the time left ──▶ process ──▶ points, or its last output ──▶ results.json
"""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path

import msgspec

from step_views.acceptance.parts import PARTS, SCALES, AcceptancePart
from step_views.acceptance.points import AcceptancePoint, PointVerdict, verdict_of
from step_views.acceptance.worker import COULD_NOT_RUN, POINTS, part_folder
from tracer.campaign.processes import torch_sees_gpu
from tracer.capture.context import cpu_model
from tracer.capture.interruption import TERMINATIONS, termination_unwinds
from tracer.cores import RUN_MODULE
from tracer.errors import ForetraceError, reason_of
from tracer.gpu_state import find_gpus
from tracer.output_file import Busy, DirectoryLock, whole_file, writing_error
from tracer.versions import installed_version

RESULTS = "results.json"
VERSION = 1  # of the format; to be raised if an older reader would misread it
OUTPUT = "output.txt"
TAIL_LINES, BEFORE_CRASH, TAIL_CHARACTERS = 6, 2, 800  # chosen: a crash and what led to it
NOISE = ("USDT:", "Extension modules:", "During handling of the above", "The above exception was")
"""Beginnings of lines without information, from PyTorch's profiler and Python's reports of crashes and exceptions."""
INTERRUPTIONS = (COULD_NOT_RUN, -signal.SIGINT, *(-number for number in TERMINATIONS))
"""Exit statuses of a part that say nothing about the machine."""
TRACEBACK = re.compile(r"^Traceback \(most recent call last\):\n(?:[ \t].*\n)*", re.MULTILINE)
"""Python's report of an exception, up to the line with the exception itself."""
MOST_MINUTES = 24 * 60.0  # chosen: a day
WORKER = (RUN_MODULE[0], "-X", "faulthandler", *RUN_MODULE[1:], "step_views.acceptance.worker")
"""Command of a part's process; its arguments are the part's number, the folder and the scale."""


class PartResult(msgspec.Struct):
    """The outcome of one part: its points, its duration, and its last output if it did not end by itself."""

    number: int
    title: str
    verdict: PointVerdict
    points: list[AcceptancePoint]
    seconds: float
    failure: str = ""


class AcceptanceResults(msgspec.Struct):
    """The content of ``results.json``: the scale ("cuda" or "cpu"), the parts that ran, and their machine. ``unrun``
    gives, by number, the reason why the last call did not run a requested part."""

    scale: str
    parts: list[PartResult]
    version: int = VERSION
    unrun: dict[int, str] = {}
    machine: str = ""

    @property
    def left(self) -> list[AcceptancePart]:
        """The parts that have not run, or were interrupted."""
        done = {part.number for part in self.parts if part.verdict is not PointVerdict.INTERRUPTED}
        return [part for part in PARTS if part.number not in done]

    def numbers(self, verdict: PointVerdict) -> str:
        """Return the numbers of the parts with a verdict, separated by commas."""
        return ",".join(str(part.number) for part in self.parts if part.verdict is verdict)


def read_results(folder: Path) -> AcceptanceResults | None:
    """Return the results in a folder; ``None`` if there are none.

    Raises:
        ForetraceError: the file cannot be read, has another version, or contains values that no run writes.
    """
    path = folder / RESULTS
    if not os.path.lexists(path):
        return None
    if not path.is_file():
        raise ForetraceError(f"{path} is no file, so that results could not be written there: give another directory "
                             "(--out).")
    try:
        found = msgspec.json.decode(path.read_bytes(), type=AcceptanceResults)
        wrong = _why_impossible(found.parts)
    except (OSError, msgspec.DecodeError) as error:
        wrong = str(error)
    else:
        if found.version != VERSION:
            raise ForetraceError(f"{path} is of version {found.version}, and this foretrace reads {VERSION}: give "
                                 "another directory (--out), or go on with the foretrace that wrote it.")
    if wrong:
        raise ForetraceError(f"{path} cannot be read ({wrong}), and what the parts found is still in part*/{POINTS}: "
                             "give another directory (--out).")
    return found


def _why_impossible(parts: Sequence[PartResult]) -> str:
    """Return a reason why no run can have written these results; "" if there is none."""
    numbers = [part.number for part in parts]
    for part in parts:
        its = (verdict_of(part.points),) if not part.failure else (PointVerdict.FAILED, PointVerdict.INTERRUPTED)
        if not 0 <= part.number < len(PARTS):
            return f"there is no part {part.number}"
        if numbers.count(part.number) > 1:
            return f"part {part.number} is in it twice"
        if not 0 <= part.seconds < math.inf:
            return f"part {part.number} took {part.seconds:g} seconds"
        if part.verdict not in its:
            return f"part {part.number} is {part.verdict.value}, which its points are not"
    return ""


def torch_device() -> str:
    """Return "cuda" if PyTorch sees a GPU, else "cpu".

    Raises:
        ForetraceError: PyTorch is missing.
    """
    if find_spec("torch") is None:
        raise ForetraceError("The acceptance run needs PyTorch; install it with: pip install 'foretrace[capture]'.")
    return "cuda" if torch_sees_gpu() else "cpu"


def accept(folder: Path, minutes: float, scale: str, again: Collection[int] = (),
           say: Callable[[str], None] = lambda text: None) -> AcceptanceResults:
    """Run the parts that have not run, as far as the time allows.

    Args:
        folder: folder of the results and of all files.
        minutes: the time limit; a part whose longest time no longer fits is left for the next call.
        scale: name of one of ``SCALES``.
        again: run only these parts, from the beginning if they have ended; if empty, all parts that are left.
        say: called with a line about each part.

    Raises:
        ForetraceError: a time or part is not possible, the folder cannot be written, another run uses it, or it holds
            results of another device.
        KeyboardInterrupt: interrupted; parts that have ended are kept.
    """
    ends = time.monotonic() + 60.0 * minutes
    if not 0 < minutes <= MOST_MINUTES:
        raise ForetraceError(f"An acceptance run cannot last {minutes:g} minutes (--minutes).")
    if unknown := [number for number in again if not 0 <= number < len(PARTS)]:
        raise ForetraceError(f"There is no part {unknown[0]}; parts are 0 to {len(PARTS) - 1} (--parts).")
    with _alone_in(folder):
        return _go_on(folder, ends, scale, again, say)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Keep other runs out of a folder. Raises ``ForetraceError`` if another run uses it or it cannot be written."""
    try:
        lock = DirectoryLock(folder)
    except Busy:
        raise ForetraceError(f"Another acceptance run is writing to {folder}: wait for it, or give another directory "
                             "(--out).") from None
    except OSError as error:
        raise _unwritable(folder, error) from error
    try:
        yield
    finally:
        lock.release()


def _go_on(folder: Path, ends: float, scale: str, again: Collection[int], say: Callable[[str], None]
           ) -> AcceptanceResults:
    results = read_results(folder) or AcceptanceResults(scale, [])
    if results.scale != scale:
        raise ForetraceError(f"{folder} holds results of {results.scale}, and this machine's would be of {scale}: give "
                             "another directory (--out).")
    machine = _machine()
    if results.parts and results.machine not in ("", machine):
        raise ForetraceError(f"{folder} holds results of {results.machine}, and this is {machine}: what holds for one "
                             "says nothing of the other; give another directory (--out).")
    results.unrun, results.machine = {}, machine
    for part in [PARTS[number] for number in sorted(set(again))] or results.left:
        longest = part.gpu_s if SCALES[scale].is_cuda else part.cpu_s
        missing = set(part.after) & {other.number for other in results.left}
        why = f"it needs part {min(missing)}" if missing else (
            f"it may take {longest / 60:.1f} minutes" if longest > ends - time.monotonic() + 1.0 else "")
        if why:
            say(f"Part {part.number} is left: {why}")
            if again:
                results.unrun[part.number] = why
        else:
            say(f"Part {part.number}: {part.title}")
            ended, others = part not in results.left, [one for one in results.parts if one.number != part.number]
            own, earlier = _writable(part, folder, anew=ended)
            results.parts = others
            if ended:
                _save(results, folder)
            _remove(earlier, own)
            done = _run(part, own, folder, scale, longest)
            results.parts = sorted([*others, done], key=lambda one: one.number)
            _save(results, folder)
    return results


def _machine() -> str:
    """Return the devices with their driver, or the processor, and PyTorch's version: what the results apply to."""
    found = find_gpus()
    states = [] if found is None else [found.state(index) for index in range(len(found))]
    devices = " and ".join(sorted({f"{one.name} (driver {one.driver})" for one in states})) or cpu_model()
    return f"{devices} with PyTorch {installed_version('torch')}"


def _unwritable(folder: Path, error: OSError) -> ForetraceError:
    return ForetraceError(f"{folder} cannot be written ({error.strerror or reason_of(error)}); give another directory "
                          "(--out).")


def _save(results: AcceptanceResults, folder: Path) -> None:
    with whole_file(folder / RESULTS) as file:
        file.write(msgspec.json.format(msgspec.json.encode(results)))


def _writable(part: AcceptancePart, folder: Path, *, anew: bool) -> tuple[Path, list[Path]]:
    """Return the folder of a part, checked to be writable, and the files to remove before the part begins: its points,
    or all of an earlier run. Raises ``ForetraceError`` if the folder cannot be written or has other files."""
    own = part_folder(folder, part.number)
    if own.is_symlink():
        raise ForetraceError(f"{own} is a link, and a part writes and removes files: remove the link, or give another "
                             "directory (--out).")
    try:
        own.mkdir(parents=True, exist_ok=True)
        names = sorted(os.listdir(own))
        if (error := writing_error(own)) is not None:
            raise error
    except OSError as error:
        raise _unwritable(own, error) from error
    if not anew:
        return own, [own / POINTS]
    known = OUTPUT, POINTS, ".*.tmp", *part.leaves
    if others := [name for name in names if not any(fnmatchcase(name, pattern) for pattern in known)]:
        raise ForetraceError(f"{own} has {others[0]}, which part {part.number} did not leave, and what is there goes "
                             "when the part begins anew: move it elsewhere, or give another directory (--out).")
    return own, [own / name for name in names]


def _remove(earlier: Sequence[Path], own: Path) -> None:
    """Remove the files of a part's earlier run, which must not count as measured now."""
    try:
        for path in earlier:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    except OSError as error:
        raise _unwritable(own, error) from error


def _run(part: AcceptancePart, own: Path, folder: Path, scale: str, longest: float) -> PartResult:
    command = [*WORKER, str(part.number), str(folder.absolute()), scale]
    began = time.monotonic()
    # A CPU is calibrated with one thread, so its steps use one thread too.
    threads = {} if SCALES[scale].is_cuda else {"OMP_NUM_THREADS": "1"}
    code, failure = _ended(command, own / OUTPUT, longest, threads)
    points = _points(own / POINTS)
    verdict = verdict_of(points) if not code else (
        PointVerdict.INTERRUPTED if code in INTERRUPTIONS else PointVerdict.FAILED)
    return PartResult(part.number, part.title, verdict, points, round(time.monotonic() - began, 1), failure)


def _ended(command: Sequence[str], output: Path, longest: float, also: Mapping[str, str]) -> tuple[int, str]:
    """Run a process, with all its children, for at most ``longest`` seconds; return its status and why it failed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **also}
    # If this command is terminated, no part may remain on the device.
    with termination_unwinds(), output.open("wb") as stream:
        # The pipe closes when this process ends in any way: see ``end_with_parent``.
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=stream, stderr=subprocess.STDOUT,
                                   env=environment, start_new_session=True)
        try:
            code = process.wait(longest)
            how = f"ended with code {code}" if code > 0 else f"was ended by signal {-code}"
        except subprocess.TimeoutExpired:
            code, how = 1, f"was ended after {longest:.0f} s"
        finally:
            with suppress(ProcessLookupError):  # kills its children too
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if not code:
        return code, ""
    how = "could not run" if code == COULD_NOT_RUN else how
    return code, f"It {how}: {last_words(output.read_text(encoding='utf-8', errors='replace')) or 'it said nothing'}"


def last_words(text: str) -> str:
    """Return the last lines of an output; for a crash, the lines before Python's own report, and its first frames."""
    lines = [line.strip() for line in TRACEBACK.sub("", text).splitlines()
             if line.strip() and not line.startswith(NOISE)]
    fatal = next((number for number, line in enumerate(lines) if line.startswith("Fatal Python error")), None)
    if fatal is not None:
        lines = lines[max(fatal - BEFORE_CRASH, 0):fatal + TAIL_LINES - BEFORE_CRASH]
    return " | ".join(lines[-TAIL_LINES:])[-TAIL_CHARACTERS:]


def _points(path: Path) -> list[AcceptancePoint]:
    """Return the points that a process wrote, without an unfinished last line."""
    if not path.is_file():
        return []
    return [msgspec.json.decode(line, type=AcceptancePoint) for line in path.read_bytes().split(b"\n")[:-1]]
