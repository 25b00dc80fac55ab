"""A script run in turns in two trees of its program: the present one, and the one it is compared with.

::

    pair 1   base | present          each run is a process of its own: warm-up, steps timed with nothing watching,
    pair 2   present | base          then profiled ones, for what is counted
    pair 3   base | present  …

What the machine does meanwhile is in both runs of a pair alike, and what it does in time (warming up, another's work)
falls on either side as often. The other tree is a directory, or a commit of the script's git repository.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_all_start_methods, get_context
from pathlib import Path
from typing import Any

from graph_predictor.check.captures import CheckError, StoredCapture
from tracer.errors import ForetraceError

IMPORTED = ["torch", "torch._dynamo", "torch.profiler", "tracer.capture.script", "tracer.job"]
"""Imported once for all runs; PyTorch's optimizers import its compiler."""
LINES = 5
"""Lines of a script's output that are shown when it fails."""
SIDES = ("base", "present")

Progress = Callable[[int, int], None]
"""Called with the number of the pair that begins, and of all."""


@dataclass(frozen=True)
class Tree:
    """A tree of the program: the directory that stands for the current one, and the tree's own root."""

    name: str
    here: Path
    root: Path


@contextmanager
def other_tree(base: str) -> Iterator[tuple[Tree, Tree]]:
    """The tree to compare with and the present one.

    Args:
        base: a directory, which stands for the current one, or a commit of the repository around it, whose files are
            put into a temporary directory; neither index nor working tree is touched.

    Raises:
        CheckError: it is neither.
    """
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
    with tempfile.TemporaryDirectory(prefix="foretrace-base-") as folder, tarfile.open(
            fileobj=io.BytesIO(archive)) as files:
        # Python 3.10 and 3.11 have the filters from some patch release on.
        if hasattr(tarfile, "data_filter"):
            files.extractall(folder, filter="data")
        else:
            files.extractall(folder)
        copy = Path(folder)
        yield Tree(base, copy / here.resolve().relative_to(root.resolve()), copy), Tree("present", here, root)


def _git(folder: Path, *arguments: str) -> bytes | None:
    """Return what git printed; ``None`` where it failed or there is no git."""
    try:
        return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None


def run_in_turns(script: str, arguments: Sequence[str], trees: tuple[Tree, Tree], pairs: int, out: Path,
                 progress: Progress = lambda at, of: None) -> tuple[list[StoredCapture], list[StoredCapture]]:
    """Capture a script in both trees, one after the other, in pairs; every second pair begins with the present one.

    Args:
        script: its path from the current directory.
        arguments: its own.
        trees: the one to compare with, and the present one.
        pairs: how many.
        out: directory of the captures.
        progress: told before each pair.

    Returns:
        Captures of the other tree and of the present one, in the order of the pairs.

    Raises:
        CheckError: a tree has no such script, or it fails or makes too few steps there.
    """
    if os.path.isabs(script):
        raise CheckError(f"Name {script} by its path from the current directory, so that the other version's is known.")
    for tree in trees:
        if not (tree.here / script).is_file():
            raise CheckError(f"There is no script {script} in {tree.name if tree is trees[0] else tree.here}; check "
                             "the path, and that it was there then.")
    found: tuple[list[StoredCapture], list[StoredCapture]] = ([], [])
    for pair in range(pairs):
        progress(pair + 1, pairs)
        for side in (0, 1) if pair % 2 == 0 else (1, 0):
            path = out / f"{SIDES[side]}{pair + 1}"
            _run(script, arguments, trees, side, path)
            found[side].append(StoredCapture(path.name, path, script))
    return found


def _run(script: str, arguments: Sequence[str], trees: tuple[Tree, Tree], side: int, out: Path) -> None:
    """Capture in a process of its own, a fork of one that has imported PyTorch: that takes longer than most runs."""
    context: Any = get_context("forkserver" if "forkserver" in get_all_start_methods() else "spawn")
    context.set_forkserver_preload(IMPORTED)
    log = out.with_suffix(".log")
    tree = trees[side]
    process = context.Process(target=_capture, args=(script, list(arguments), out, tree, trees[1].root, log))
    process.start()
    process.join()
    if process.exitcode:
        said = "\n".join(log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-LINES:])
        raise CheckError(f"{script} cannot be captured in {tree.name} (exit status {process.exitcode}); it said: "
                         f"{said}")


def _capture(script: str, arguments: list[str], out: Path, tree: Tree, present: Path, log: Path) -> None:
    """Capture a script in a tree, with everything that is printed in a file."""
    from tracer.capture import CaptureOptions
    from tracer.capture.script import ScriptOptions, run_script

    with log.open("wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.chdir(tree.here)
    sys.path[:] = [_moved(entry, present, tree.root) for entry in sys.path]
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.update(PWD=os.fspath(tree.here), PYTHONPATH=os.pathsep.join(
        _moved(entry, present, tree.root) for entry in paths))
    try:
        # An execution trace says nothing that is compared.
        run_script(script, arguments, ScriptOptions(out, CaptureOptions(execution_trace="none")))
    except ForetraceError as error:
        sys.exit(str(error))


def _moved(entry: str, present: Path, root: Path) -> str:
    """A directory of Python's modules; one within the present tree is the same place of the other."""
    inside = bool(entry) and Path(entry).is_absolute() and Path(entry).is_relative_to(present)
    return os.fspath(root / Path(entry).relative_to(present)) if inside else entry
