"""The page on how the house is built names files that are there and names that they have."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PATHS = sorted({text for text in re.findall(r"`([^`\s]+)`", PAGE) if "/" in text})
OWNED = re.findall(r"`([A-Za-z_]\w*)(?:\.(\w+))?`s?\s+(?:in\s+|of\s+)?\(?`([^`\s]+\.py)`", PAGE)


def imported(path: str) -> object:
    return import_module(path.removesuffix(".py").removesuffix("/__init__").replace("/", "."))


def test_the_page_names_files() -> None:
    assert len(PATHS) > 30 and len(OWNED) >= 5


@pytest.mark.parametrize("path", PATHS)
def test_a_file_that_the_page_names_is_there_and_is_imported(path: str) -> None:
    # A room may be named by its short name, such as `sizes/`.
    rooms = [ROOT / path, ROOT / "graph_predictor" / path, ROOT / "planner" / path]
    assert any(place.is_dir() if path.endswith("/") else place.is_file() for place in rooms)
    if path.endswith(".py") and not path.startswith("tests/"):
        imported(path)


@pytest.mark.parametrize(("name", "member", "path"), OWNED)
def test_a_name_that_the_page_places_in_a_file_is_there(name: str, member: str, path: str) -> None:
    found = getattr(imported(path), name)
    assert not member or hasattr(found, member)
