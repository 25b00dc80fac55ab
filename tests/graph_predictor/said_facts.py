"""Facts of a step as commands print them, read back from their text and pages: one name, one figure."""

from __future__ import annotations

import re
from pathlib import Path

from page_support import PageFile

Facts = dict[str, object]
"""What a text says, by name."""
_NAMES = {
    "recorded step": r"(?im)^\s*(?:A: )?recorded step:?\s+([\d,.]+) ms",
    "step": r"(?m)^Step (?:under|without) the profiler: ([\d,.]+) ms",
    "GPU active": r"(?m)^GPU active:?\s+([\d,.]+) ms",
    "decides": r"(?im)(?:^|; )decided by: ([a-z ]+)$",
}
PATH_ROWS = 5


def facts_of_text(text: str) -> Facts:
    """Return what a command's text says."""
    found: Facts = {}
    for name, pattern in _NAMES.items():
        said = re.findall(pattern, text)
        assert len(set(said)) <= 1, f"{name} is said to be {said}"
        if said:
            found[name] = said[0]
    if path := rows_of_table(text, "Critical path: largest"):
        found["path"] = tuple(path[:PATH_ROWS])
    return found


def rows_of_table(text: str, title: str) -> list[tuple[str, ...]]:
    """Rows of a table by its title, cells apart by two spaces; empty where there is none."""
    lines = text.splitlines()
    start = next((at for at, line in enumerate(lines) if line.startswith(title)), None)
    if start is None:
        return []
    rule = next(at for at in range(start, len(lines)) if lines[at].startswith("─"))
    rows = []
    for line in lines[rule + 1:]:
        if not line.strip():
            break
        rows.append(tuple(re.split(r"  +", line.strip())))
    return rows


def facts_of_page(path: Path) -> Facts:
    """Return what a page says: its key figures, and its critical path."""
    page = PageFile(path)
    found: Facts = {}
    for name, pattern in {
            "recorded step": r"Recorded step:? ?([\d,]+\.\d{3}) ms", "decides": r"Decided by((?:[a-z]+ ?)+?)(?=[A-Z])",
            "step": r"Step (?:under|without) the profiler ?([\d,]+\.\d{3}) ms",
            "GPU active": r"GPU active([\d,]+\.\d{3}) ms"}.items():
        said = set(re.findall(pattern, page.text))
        assert len(said) <= 1, f"{name} is said to be {said}"
        if said:
            found[name] = said.pop().strip()
    if "data-path" in page.data or "path" in page.tables:
        found["path"] = tuple(tuple(row) for row in page.rows("path")[:PATH_ROWS])
    return found


def contradictions(said: dict[str, Facts]) -> list[str]:
    """Return where two commands give one name two figures. Names that a narrow table cut are compared as far as they
    go."""
    found = []
    for name in dict.fromkeys(name for facts in said.values() for name in facts):
        values = {command: facts[name] for command, facts in said.items() if name in facts}
        first, *others = values.items()
        found += [f"{name}: {first[0]} says {first[1]}, {command} says {value}" for command, value in others
                  if not _same(first[1], value)]
    return found


def _same(one: object, other: object) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    texts = sorted((str(one), str(other)), key=len)
    if any("…" in text for text in texts):
        begins = [text.split("…")[0].removeprefix("void ") for text in texts]
        return begins[0].startswith(begins[1]) or begins[1].startswith(begins[0])
    return texts[0] == texts[1]
