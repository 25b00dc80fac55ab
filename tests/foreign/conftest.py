"""Captures of the foreign programs, made once for all tests of them: they are in one file, which one process runs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from catalogue import BY_SHAPES, CATALOGUE, OTHER_SIZE, program  # noqa: E402

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

Captured = dict[str, tuple[Path, int, str]]
"""Directory, exit status and output of the capture of each program."""


def _capture(folder: Path, names: list[str], steps: int = 2) -> dict[str, str]:
    """Capture programs, so many steps of each, into directories of a folder; their exit statuses."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    run = subprocess.run(
        [sys.executable, str(HERE / "capturing.py"), str(folder), *names], check=False, text=True, capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "HF_HUB_OFFLINE": "1",
             "FOREIGN_STEPS": str(steps)})
    if not run.stdout:
        pytest.fail(f"No program was captured: {run.stderr}")
    return dict(line.split() for line in run.stdout.splitlines() if " " in line)


@pytest.fixture(scope="session")
def captures(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Captured:
    """The captures of the programs that are asked for and whose packages are installed."""
    folder = tmp_path_factory.mktemp("foreign")
    asked = {item.callspec.params.get("name") for item in request.session.items
             if hasattr(item, "callspec")} | {BY_SHAPES}
    status = _capture(folder, [*(each.name for each in CATALOGUE if each.name in asked and not each.lacking),
                               OTHER_SIZE])
    return {name: (folder / name, int(code), (folder / f"{name}.log").read_text(encoding="utf-8", errors="replace"))
            for name, code in status.items()}


@pytest.fixture(scope="session")
def captured_anew(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function from a program's name to another, longer capture of it, beside one at another size."""
    def capture(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        assert set(_capture(folder, [name, OTHER_SIZE], steps=5).values()) == {"0"}
        return folder / name

    return capture


@pytest.fixture(scope="session")
def captured(captures: Captured) -> Callable[[str], Path]:
    """A function from a program's name to its capture; skips where its packages are missing."""
    def find(name: str) -> Path:
        if name not in captures:
            pytest.skip(f"{name} needs {' and '.join(program(name).lacking)}, which is not installed"
                        + (" (timm needs a torchvision of the same build as torch)" if name == "timm_images" else ""))
        path, status, log = captures[name]
        assert status == 0, log
        return path

    return find
