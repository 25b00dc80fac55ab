"""Inner loops run wherever their machine code can, or cannot, be kept."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULE = """
from kernel_models.compiled import compiled

@compiled()
def add(a, b):
    return a + b

if __name__ == "__main__":
    print(add(1, 2), sum(add.stats.cache_hits.values()))
"""


def _ran(folder: Path, temporary: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the module where neither its folder nor a home can be written to (also for root, whom no mode stops)."""
    folder.mkdir(exist_ok=True)
    (folder / "loop.py").write_text(MODULE)
    (folder / "__pycache__").touch()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("NUMBA", "XDG"))}
    return subprocess.run([sys.executable, str(folder / "loop.py")], capture_output=True, text=True, check=False, env={
        **kept, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "HOME": "/dev/null",
        "TMPDIR": str(temporary), **environment})


def test_without_a_place_of_numba_s_own_a_private_one_is_taken(tmp_path: Path) -> None:
    for hits in (0, 1):
        ran = _ran(tmp_path / "code", tmp_path)
        assert ran.stdout.split() == ["3", str(hits)], ran.stderr
    private = tmp_path / f"foretrace-{os.getuid()}"
    assert private.stat().st_mode & 0o777 == 0o700 and list(private.rglob("*.nbi"))


@pytest.mark.parametrize("spoil", ["open to all", "a link", "a file"])
def test_a_folder_of_others_is_not_trusted(spoil: str, tmp_path: Path) -> None:
    private, other = tmp_path / f"foretrace-{os.getuid()}", tmp_path / "other"
    other.mkdir(mode=0o700)
    if spoil == "open to all":
        private.mkdir()
        private.chmod(0o777)
    elif spoil == "a link":
        private.symlink_to(other)
    else:
        private.touch()
    ran = _ran(tmp_path / "code", tmp_path)
    assert ran.stdout.split() == ["3", "0"], ran.stderr
    assert not list(tmp_path.rglob("*.nb*"))


def test_a_cache_that_was_damaged_is_no_error(tmp_path: Path) -> None:
    _ran(tmp_path / "code", tmp_path)
    for file in tmp_path.rglob("*.nb*"):
        file.write_bytes(file.read_bytes()[:50])
    ran = _ran(tmp_path / "code", tmp_path)
    assert ran.stdout.split() == ["3", "0"], ran.stderr


def test_a_cache_that_cannot_be_written_any_more_is_no_error(tmp_path: Path) -> None:
    code = MODULE.replace('if __name__ == "__main__":', "import shutil; shutil.rmtree(add._cache.cache_path)\n"
                          "if True:")
    (tmp_path / "gone.py").write_text(code)
    ran = subprocess.run([sys.executable, str(tmp_path / "gone.py")], capture_output=True, text=True, check=False,
                         env={**os.environ, "PYTHONPATH": str(ROOT), "NUMBA_CACHE_DIR": str(tmp_path / "kept")})
    assert ran.stdout.split() == ["3", "0"], ran.stderr


@pytest.mark.slow  # the whole of it: what can go wrong alone is above
def test_a_read_only_installation_without_a_home_simulates(tmp_path: Path) -> None:
    site = tmp_path / "site"
    for package in ("tracer", "kernel_models", "graph_predictor"):
        shutil.copytree(ROOT / package, site / package, ignore=shutil.ignore_patterns("__pycache__", "*.profile"))
        for folder in [site / package, *(each for each in (site / package).rglob("*") if each.is_dir())]:
            (folder / "__pycache__").touch()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("NUMBA", "XDG"))}
    ran = subprocess.run(
        [sys.executable, "-c", "from foretrace.commands import main; main()", "replay",
         str(ROOT / "traces" / "cpu-small"), "--json"], capture_output=True, text=True, check=False, cwd=tmp_path,
        env={**kept, "PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1", "HOME": "/dev/null",
             "TMPDIR": str(tmp_path)})
    assert ran.returncode == 0, ran.stderr
    assert '"median_abs_error"' in ran.stdout
