"""Find sentences that a reader has to read twice: words of the list in CONTRIBUTING.md, and more than 30 words.

    python ci/plain_words.py docs/serving.md planner     # findings of pages and packages, one a line
    python ci/plain_words.py --check                     # exit with 1 where there are more than CEILINGS

Prose of pages is read without code, tables and captions; of Python files the docstrings and the ``help`` of options.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LONGEST = 30
"""Words of a sentence."""
CEILINGS = {"README.md": 0, "CONTRIBUTING.md": 0, "SECURITY.md": 0, "docs": 0, "foretrace": 0, "planner": 0,
            "step_views": 0, "graph_predictor": 8, "kernel_models": 1, "tracer": 18}
"""How many findings a path may have; to be lowered as texts are mended, never raised."""
_LIST = re.compile(r"<!-- words to avoid -->(.*?)<!-- until here -->", re.DOTALL)
_ENTRY = re.compile(r"^\| `([^`]+)` \|", re.MULTILINE)
_FENCE = re.compile(r"^( *)(```|~~~)[\s\S]*?^\1\2 *$|<!--[\s\S]*?-->|^ *\|.*$|^#.*$|^---[\s\S]*?^---$", re.MULTILINE)
"""Code, comments, tables, headings and front matter of a page."""
_LITERAL = re.compile(r"::\n *\n(?:(?: {4,}.*| *)\n)+|^(?: {4,8}python .*|.*>>>.*)$", re.MULTILINE)
"""Blocks of code in a docstring."""
_CODE = re.compile(r"``[^`]*``|`[^`]*`|\[([^\]]*)\]\([^)]*\)|!\[[^\]]*\]")
_END = re.compile(r"(?<=[.!?:;])[\"')*]*\s+(?=[\"'(*]*[A-Z0-9`])|\n\s*\n|\n *(?:[-*]|\d+\.) |"
                  r"\n +(?=[\w*`, ]{1,80}: )")
"""Ends of sentences: also paragraphs, items of lists, and entries of Args and Attributes."""


class HardSentence(NamedTuple):
    """A sentence that breaks a rule, and where it begins."""

    path: str
    line: int
    rule: str
    sentence: str


def words_to_avoid(root: Path = ROOT) -> list[re.Pattern[str]]:
    """Return the patterns of CONTRIBUTING.md's table. Raises ``ValueError``: the page has no such table."""
    found = _LIST.search((root / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    if found is None:
        raise ValueError("CONTRIBUTING.md has no table between its comments 'words to avoid' and 'until here'.")
    return [re.compile(rf"\b(?:{entry})\b".replace(r"\|", "|"), re.IGNORECASE)
            for entry in _ENTRY.findall(found.group(1))]


def _blank(found: re.Match[str]) -> str:
    """Return as many lines as were matched, empty, and an end of a sentence."""
    return "\n" + "\n" * found.group().count("\n") if "\n" in found.group() else ""


def texts_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of a file's prose. Raises ``SyntaxError``: a Python file that is none."""
    content = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield 1, _FENCE.sub(_blank, _LIST.sub(_blank, content))
        return
    for node in ast.walk(ast.parse(content)):
        value = None
        if isinstance(node, ast.Expr):
            value = node.value  # docstrings, those of attributes included
        elif isinstance(node, ast.keyword) and node.arg == "help":
            value = node.value
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield value.lineno, _LITERAL.sub(_blank, value.value)


def findings_of(path: Path, avoided: list[re.Pattern[str]]) -> Iterator[HardSentence]:
    """Yield what is wrong with the sentences of a file."""
    for first, text in texts_of(path):
        start = 0
        for end in [*(found.end() for found in _END.finditer(text)), len(text)]:
            sentence = " ".join(_CODE.sub(lambda found: found.group(1) or "x", text[start:end]).split())
            line = first + text[:start].count("\n")
            start = end
            for pattern in avoided:
                if (hit := pattern.search(sentence)) is not None:
                    yield HardSentence(str(path), line, f"'{hit.group()}'", sentence)
            if (count := len(re.findall(r"[^\W_][\w'’.,%/-]*", sentence))) > LONGEST:
                yield HardSentence(str(path), line, f"{count} words", sentence)


def all_findings(path: Path) -> list[HardSentence]:
    """Return the findings of a file, or of the pages and Python files of a folder."""
    files = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.suffix in (".md", ".py"))
    avoided = words_to_avoid()
    return [found for file in files for found in findings_of(file, avoided)]


def main(arguments: list[str] | None = None) -> int:
    """Print the findings; return 1 where ``--check`` finds more than agreed."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("paths", nargs="*", type=Path)
    options.add_argument("--check", action="store_true")
    given = options.parse_args(arguments)
    for path in given.paths:
        for found in all_findings(path):
            sys.stdout.write(f"{found.path}:{found.line}: {found.rule}: {found.sentence[:200]}\n")
    over = 0
    for name, ceiling in CEILINGS.items() if given.check else ():
        count = len(all_findings(ROOT / name))
        if count > ceiling:
            over = 1
            sys.stdout.write(f"{name} has {count} sentences to be read twice, at most {ceiling} were agreed; "
                             f"'python ci/plain_words.py {name}' lists them\n")
    return over


if __name__ == "__main__":
    raise SystemExit(main())
