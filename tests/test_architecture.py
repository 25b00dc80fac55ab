"""The page on how the house is built names files that are there and names that they have."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PATHS = sorted({text for text in re.findall(r"`([^`\s]+)`", PAGE) if "/" in text})
OWNED = re.findall(r"`([A-Za-z_]\w*)(?:\.(\w+))?`s?\s+(?:in\s+|of\s+)?\(?`([^`\s]+\.py)`", PAGE)


def imported(path: str) -> object:
    return import_module(path.removesuffix(".py").removesuffix("/__init__").replace("/", "."))


def test_the_page_names_files() -> None:
    assert len(PATHS) > 30 and len(OWNED) >= 5


def test_a_file_that_the_page_names_is_there_and_is_imported() -> None:
    for path in PATHS:
        # A room may be named by its short name, such as `sizes/`.
        rooms = [ROOT / path, ROOT / "graph_predictor" / path, ROOT / "step_views" / path, ROOT / "planner" / path]
        assert any(place.is_dir() if path.endswith("/") else place.is_file() for place in rooms), path
        if path.endswith(".py") and not path.startswith("tests/"):
            imported(path)


def test_a_name_that_the_page_places_in_a_file_is_there() -> None:
    for name, member, path in OWNED:
        found = getattr(imported(path), name)
        assert not member or hasattr(found, member), (name, member, path)
