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


def _run_here(planted: Path, code: str) -> None:
    """Run code as the command ``foretrace`` runs: without the current directory, where the code starts processes."""
    begin = f"import sys; sys.path[:] = [*filter(None, sys.path), {str(ROOT)!r}]; import os\n"
    done = _run(planted, sys.executable, "-c", begin + code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("python", [sys.executable, "python3.10"])
def test_a_module_is_run_without_option_p(planted: Path, python: str) -> None:
    if shutil.which(python) is None or subprocess.run([python, "--version"], capture_output=True).returncode:
        pytest.skip(f"there is no {python}")
    (planted / "in.txt").write_text('{"a": [1, 2]}')
    done = _run(planted, python, "-c", _NOT_FROM_HERE, "json.tool", "in.txt", "--compact")
    assert (done.returncode, done.stdout.strip()) == (0, '{"a":[1,2]}')


def test_a_module_is_run_as_it_is_here(planted: Path) -> None:
    done = _run(planted, *RUN_MODULE, "json.tool", "--help")
    assert done.returncode == 0 and "usage" in done.stdout


def test_captures_of_a_comparison_run_none(planted: Path) -> None:
    _run_here(planted, """
from step_views.check import noise
noise.IMPORTED = []
context = noise.process_context()
queue = context.SimpleQueue()
process = context.Process(target=queue.put, args=(1,))
process.start()
process.join()
assert process.exitcode == 0 and queue.get() == 1
""")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no PYTHONSAFEPATH")
def test_workers_of_joblib_run_none(planted: Path) -> None:
    _run_here(planted, """
from joblib import Parallel, delayed
from tracer.cores import safe_paths
with safe_paths():
    where = Parallel(n_jobs=2, backend="loky")(delayed(os.getcwd)() for _ in range(2))
assert where == [os.getcwd()] * 2 and "PYTHONSAFEPATH" not in os.environ
""")
