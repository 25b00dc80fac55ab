"""Test whether repeated measurements got larger, beyond their noise: a one-sided test on runs of step times.

Steps of one run share its conditions: the machine's other work, clocks, memory layout. So ten thousand steps of a run
predict the next run no better than a hundred do. A rank test on the steps of any two runs would find a difference. Here
a run is one observation: the log of its typical step. Its variance has three parts:

* *between runs*, ``s²``: estimated from repeated runs where there are any, and a prior of ``Prior.sd`` worth
  ``Prior.weight`` runs. A scaled inverse χ² prior gives s² = (weight · sd² + Σ(x − mean)²) / (weight + n − 1);
* *within a run*, the variance of its own median, by a bootstrap of blocks of consecutive steps (Künsch 1989), because
  neighbouring steps are alike;
* *disturbance by the machine*, ``disturbed``: the spread, within each run's recording, of unchanged work.

The difference less ``least``, over its standard error, is Student's t with weight + n − 1 degrees of freedom. The null
hypothesis is "slower by no more than ``least``": a difference too small to matter never fails. The difference is the
smallest of those of medians, lower quartiles and lower deciles. A slower program moves all three; a machine with a bad
moment mostly moves the slower half.

This module also runs a script alternately in two trees of its program: the present one, and the base to compare with.

::

    pair 1:  base | present          each run is a process of its own: warm-up, steps timed without the profiler,
    pair 2:  present | base          then profiled steps for the counts
    pair 3:  base | present  …

Both runs of a pair meet the same machine. Its slow changes (warming up, other work) fall on both sides equally often.
The other tree is a directory, or a commit of the script's git repository.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_all_start_methods, get_context
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from step_views.check.measure import CheckError, StoredCapture
from tracer.capture import Capture, CaptureOptions
from tracer.capture.script import run_script
from tracer.cores import away_from_here
from tracer.errors import ForetraceError
from tracer.kept_files import scratch_folder
from tracer.lazy import special

Samples = npt.NDArray[np.float64]

QUANTILES = (0.1, 0.25, 0.5)  # chosen, see above
RESAMPLES = 400  # chosen: the relative error of a variance is then √(2/400), 7%
SEED = 12  # any value; fixed, so that a check repeats exactly


@dataclass(frozen=True, slots=True)
class Prior:
    """What is known of a quantity's noise before any run is repeated.

    Attributes:
        sd: standard deviation of the log between runs of one program on one machine.
        weight: number of repeated runs that this knowledge counts for.
        within: least standard deviation of the log within a run, for runs of few samples.
        within_weight: how many samples that is worth; infinity where it is known.
    """

    sd: float
    weight: float
    within: float = 0.01
    within_weight: float = float("inf")


@dataclass(frozen=True, slots=True)
class Slowdown:
    """The difference between new and old runs, as logarithms of ratios.

    Attributes:
        difference: new over old.
        low, high: ends of its two-sided 90% interval.
        p_value: probability of a difference at least this large, if the slowdown were at most ``least``.
        detectable: smallest difference that these runs could have shown at the requested level.
    """

    difference: float
    low: float
    high: float
    p_value: float
    detectable: float

    @property
    def confidence(self) -> float:
        """Return the confidence in a slowdown of more than ``least``: 1 − ``p_value``."""
        return 1.0 - self.p_value


def slowdown(base: Sequence[Sequence[float]], new: Sequence[Sequence[float]], prior: Prior, *, least: float,
             level: float, shared: float = 0.0, shared_sd: float = 0.0, disturbed: Sequence[float] = ()) -> Slowdown:
    """Compare old and new runs; each run is a list of positive samples.

    Args:
        base, new: old and new runs.
        prior: prior noise of this quantity.
        least: ratio − 1 that is too small to matter.
        level: p-value at which the test fails, for ``detectable``.
        shared: log of the known slowdown of the machine, which is subtracted from the difference.
        shared_sd: standard deviation of ``shared``.
        disturbed: standard deviation of the log that each run's own recording shows, old runs first.
    """
    old_places, old_variance = _runs(base, prior)
    new_places, new_variance = _runs(new, prior)
    spread = [_squares(side) for side in (old_places, new_places)]
    freedom = prior.weight + len(base) + len(new) - 2
    # Each quantile has its own spread; the largest spread counts.
    between = (prior.weight * prior.sd**2 + max(a + b for a, b in zip(*spread, strict=True))) / freedom
    seen = [float(np.sum(np.square(side))) / max(len(side), 1) ** 2
            for side in (disturbed[:len(base)], disturbed[len(base):])]
    from_runs, from_steps = between * (1 / len(base) + 1 / len(new)), old_variance + new_variance
    error = float(np.sqrt(from_runs + from_steps + shared_sd**2 + sum(seen)))
    # Degrees of freedom of a sum of variances that are estimated apart (Satterthwaite 1946).
    freedom = min(freedom, error**4 / (from_runs**2 / freedom + from_steps**2 / prior.within_weight))
    moved = float(np.min(new_places.mean(axis=0) - old_places.mean(axis=0))) - shared
    floor = float(np.log1p(least))
    return Slowdown(
        difference=moved, low=moved + error * float(special.stdtrit(freedom, 0.05)),
        high=moved + error * float(special.stdtrit(freedom, 0.95)),
        p_value=float(special.stdtr(freedom, -(moved - floor) / error)),
        detectable=floor - error * float(special.stdtrit(freedom, level)))


def _runs(runs: Sequence[Sequence[float]], prior: Prior) -> tuple[Samples, float]:
    """Return the logs of each run's quantiles [runs, quantiles], and the variance of the mean run from within runs."""
    logs = [np.log(np.maximum(np.asarray(run, np.float64), 1e-9)) for run in runs]
    places = np.stack([np.quantile(each, QUANTILES) for each in logs])
    variances = [max(_variance_of_median(each), prior.within**2 / len(each)) for each in logs]
    return places, float(np.sum(variances)) / len(runs) ** 2


def _squares(places: Samples) -> Samples:
    """Return the sum of squared deviations from the mean, for each quantile."""
    return np.asarray(((places - places.mean(axis=0)) ** 2).sum(axis=0), np.float64)


def _variance_of_median(logs: Samples) -> float:
    """Return the variance of a run's median from resampled blocks (about n^(1/3) · 1.5 samples, which wrap around)."""
    n = len(logs)
    if n < 3:
        return 0.0
    block = max(1, min(n // 2, round(1.5 * n ** (1 / 3))))
    draw = np.random.default_rng(SEED).integers(0, n, size=(RESAMPLES, -(-n // block)))
    rows = (draw[:, :, None] + np.arange(block)).reshape(RESAMPLES, -1)[:, :n] % n
    return float(np.var(np.median(logs[rows], axis=1)))


IMPORTED = ["torch", "torch._dynamo", "torch.profiler", "tracer.capture.script", "tracer.job"]
"""Modules imported once for all runs; PyTorch's optimizers import its compiler."""
LINES = 5
"""Lines of a script's output that are shown if it fails."""
SIDES = ("base", "present")


@dataclass(frozen=True)
class Tree:
    """A version of the program: ``here`` corresponds to the current directory, ``root`` is the root of the tree."""

    name: str
    here: Path
    root: Path


@contextmanager
def other_tree(base: str) -> Iterator[tuple[Tree, Tree]]:
    """Yield the tree to compare with and the present tree. ``base`` is a directory that replaces the current one, or a
    commit of the repository around the current one. A commit's files are put into a temporary directory; index and
    working tree are not touched. Raises ``CheckError`` if ``base`` is neither."""
    here = Path.cwd()
    if Path(base).is_dir():
        if os.path.samefile(base, here):
            raise CheckError(f"{base} is the current directory; name the directory of another version of the program.")
        other = Path(base).resolve()
        yield Tree(base, other, other), Tree("present", here, here)
        return
    top, commit = _git(here, "rev-parse", "--show-toplevel"), _git(here, "rev-parse", "--verify", "--quiet",
                                                                   f"{base}^{{commit}}")
    if top is None or commit is None:
        why = "is no directory" if top is None else "is no directory, and no commit of this repository"
        raise CheckError(f"{base} {why}; name a commit such as HEAD or main, or the directory of another version.")
    root = Path(top.decode().strip())
    archive = _git(root, "archive", "--format=tar", commit.decode().strip())
    if archive is None:
        raise CheckError(f"git cannot give the files of {base}; check the repository with git archive {base}.")
    with scratch_folder("foretrace-base-") as folder, tarfile.open(
            fileobj=io.BytesIO(archive)) as files:
        # Patch releases of Python 3.10 and 3.11 added the filters.
        if hasattr(tarfile, "data_filter"):
            files.extractall(folder, filter="data")
        else:
            files.extractall(folder)
        copy = Path(folder)
        yield Tree(base, copy / here.resolve().relative_to(root.resolve()), copy), Tree("present", here, root)


def _git(folder: Path, *arguments: str) -> bytes | None:
    """Return git's output; ``None`` if it failed or git is missing."""
    try:
        return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None


def run_in_turns(script: str, arguments: Sequence[str], trees: tuple[Tree, Tree], pairs: int,
                 out: Path) -> tuple[list[StoredCapture], list[StoredCapture]]:
    """Capture a script in both trees alternately, in pairs; every second pair begins with the present tree. ``trees``
    are the tree to compare with and the present tree. Raises ``CheckError`` if a tree has no such script, or if the
    script fails or makes too few steps there.

    Returns:
        Captures in the tree to compare with and in the present tree, in the order of the pairs.
    """
    if os.path.isabs(script):
        raise CheckError(f"Name {script} by its path from the current directory, so that the other version's is known.")
    for tree in trees:
        if not (tree.here / script).is_file():
            raise CheckError(f"There is no script {script} in {tree.name if tree is trees[0] else tree.here}; check "
                             "the path, and that it was there then.")
    found: tuple[list[StoredCapture], list[StoredCapture]] = ([], [])
    for pair in range(pairs):
        for side in (0, 1) if pair % 2 == 0 else (1, 0):
            path = out / f"{SIDES[side]}{pair + 1}"
            _run(script, arguments, trees, side, path)
            found[side].append(StoredCapture(path.name, path, script))
    return found


def _run(script: str, arguments: Sequence[str], trees: tuple[Tree, Tree], side: int, out: Path) -> None:
    """Capture in a new process, forked from one that has imported PyTorch, because that takes longer than most runs."""
    context = process_context()
    log = out.with_suffix(".log")
    tree = trees[side]
    process = context.Process(target=_capture, args=(script, list(arguments), out, tree, trees[1].root, log))
    process.start()
    process.join()
    if process.exitcode:
        said = "\n".join(log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-LINES:])
        raise CheckError(f"{script} cannot be captured in {tree.name} (exit status {process.exitcode}); it said: "
                         f"{said}")


def process_context() -> Any:
    """Return multiprocessing's context for captures; its processes run no module of the current directory."""
    if "forkserver" not in get_all_start_methods():
        return get_context("spawn")
    from multiprocessing.forkserver import ensure_running  # missing on Windows

    context: Any = get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    with away_from_here():
        ensure_running()
    return context


def _capture(script: str, arguments: list[str], out: Path, tree: Tree, present: Path, log: Path) -> None:
    """Capture a script in a tree, with its printed output in a file."""
    with log.open("wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.chdir(tree.here)
    sys.path[:] = [_moved(entry, present, tree.root) for entry in sys.path]
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.update(PWD=os.fspath(tree.here), PYTHONPATH=os.pathsep.join(
        _moved(entry, present, tree.root) for entry in paths))
    try:
        # Nothing in an execution trace is compared.
        run_script(script, arguments, Capture(out, CaptureOptions(execution_trace="none")))
    except ForetraceError as error:
        sys.exit(str(error))


def _moved(entry: str, present: Path, root: Path) -> str:
    """Return a module directory for another tree: a directory inside the present tree is moved to that tree."""
    inside = bool(entry) and Path(entry).is_absolute() and Path(entry).is_relative_to(present)
    return os.fspath(root / Path(entry).relative_to(present)) if inside else entry
