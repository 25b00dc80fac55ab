"""Python processes that foretrace starts run no module of the directory they start in."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tracer.cores import _NOT_FROM_HERE, RUN_MODULE

ROOT = Path(__file__).resolve().parents[2]
PLANTED = ("runpy", "json", "argparse", "multiprocessing", "joblib", "pickle", "tracer", "signal", "os", "threading")


@pytest.fixture()
def planted(tmp_path: Path) -> Path:
    """A directory of modules by the names of others, each of which leaves a file and ends its process."""
    for name in PLANTED:
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\nraise SystemExit(3)\n")
    return tmp_path


def _run(planted: Path, *words: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(words, cwd=planted, capture_output=True, text=True, check=False)
    assert not (planted / "ran").exists(), "a planted module ran"
    return done


@pytest.mark.parametrize("words", [
    (sys.executable, "-c", _NOT_FROM_HERE), ("python3.10", "-c", _NOT_FROM_HERE), RUN_MODULE],
    ids=["without option P", "Python 3.10", "as here"])
def test_a_module_is_run(planted: Path, words: tuple[str, ...]) -> None:
    if shutil.which(words[0]) is None or subprocess.run([words[0], "--version"], capture_output=True).returncode:
        pytest.skip(f"there is no {words[0]}")
    (planted / "in.txt").write_text('{"a": [1, 2]}')
    done = _run(planted, *words, "json.tool", "in.txt", "--compact")
    assert (done.returncode, done.stdout.strip()) == (0, '{"a":[1,2]}')


def test_processes_of_comparisons_and_of_joblib_run_none(planted: Path) -> None:
    """Where code starts processes as the command ``foretrace`` does, without the current directory."""
    done = _run(planted, sys.executable, "-c", f"""
import sys
sys.path[:] = [*filter(None, sys.path), {str(ROOT)!r}]
import os
from joblib import Parallel, delayed
from step_views.check import noise
from tracer.cores import safe_paths
noise.IMPORTED = []
context = noise.process_context()
queue = context.SimpleQueue()
process = context.Process(target=queue.put, args=(1,))
process.start()
process.join()
assert process.exitcode == 0 and queue.get() == 1
if sys.version_info >= (3, 11):  # Python 3.10 has no PYTHONSAFEPATH
    with safe_paths():
        where = Parallel(n_jobs=2, backend="loky")(delayed(os.getcwd)() for _ in range(2))
    assert where == [os.getcwd()] * 2 and "PYTHONSAFEPATH" not in os.environ
""")
    assert done.returncode == 0, done.stderr
