"""Captures of the foreign programs, made once for all tests of them: they are in one file, which one process runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from capturing import capture_all  # noqa: E402
from catalogue import BY_SHAPES, CATALOGUE, OTHER_SIZE, program  # noqa: E402


@pytest.fixture(scope="session")
def captures(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Path]:
    """The directory of the capture of each program that is asked for and whose packages are installed."""
    folder = tmp_path_factory.mktemp("foreign")
    asked = {item.callspec.params.get("name") for item in request.session.items
             if hasattr(item, "callspec")} | {BY_SHAPES}
    names = [each.name for each in CATALOGUE if each.name in asked and not each.lacking]
    return {name: folder / name if not code else folder / f"{name}.log"
            for name, code in capture_all(folder, [*names, OTHER_SIZE]).items()}


@pytest.fixture(scope="session")
def captured_anew(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function from a program's name to another, longer capture of it, beside one at another size."""
    def capture(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        assert set(capture_all(folder, [name, OTHER_SIZE], steps=5).values()) == {0}
        return folder / name

    return capture


@pytest.fixture(scope="session")
def captured(captures: dict[str, Path]) -> Callable[[str], Path]:
    """A function from a program's name to its capture; skips where its packages are missing."""
    def find(name: str) -> Path:
        if name not in captures:
            pytest.skip(f"{name} needs {' and '.join(program(name).lacking)}, which is not installed"
                        + (" (timm needs a torchvision of the same build as torch)" if name == "timm_images" else ""))
        assert captures[name].is_dir(), captures[name].read_text(encoding="utf-8", errors="replace")
        return captures[name]

    return find
