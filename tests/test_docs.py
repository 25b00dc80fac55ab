"""Documentation: the site builds without a warning, and tutorials show what their commands print today."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from docs_blocks import Shown, commands, differs, prepared, stale
from forks import run_program
from slowly import mostly_slow

from foretrace.commands import app

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(path for path in (ROOT / "docs").rglob("*.md") if "<!-- run" in path.read_text(encoding="utf-8"))


# What the others run, tests of captures, calibrations and ranks run; of a stale page ``make slow`` says so.
@pytest.mark.parametrize("page", mostly_slow(
    PAGES, {page.stem for page in PAGES} - {"first-capture", "calibrate", "slow-rank", "what-if"},
    [page.stem for page in PAGES]))
def test_a_page_shows_what_its_commands_print(page: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    # A short measurement shows what the page does, unless the machine is busy with something else: it gets more time.
    vary = "<!-- run: figures vary -->" in page.read_text(encoding="utf-8")
    for attempt, longer in enumerate((0.3, 1.0, 9.0) if vary else (1.0,)):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        found = [f"$ {shown.command}\n{printed}" for shown, printed in stale(page, prepared(folder), longer)]
        if not found:
            break
    assert not found, f"{page.name} is stale; python tests/docs_blocks.py --update {page}\n" + "\n\n".join(found)


def test_tutorials_are_among_the_pages_that_run() -> None:
    assert {"first-capture", "what-if", "plan", "gate", "calibrate"} <= {page.stem for page in PAGES}


def test_the_site_builds_with_no_broken_link_and_needs_no_network(tmp_path: Path) -> None:
    for package in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(package)
    # Of the trees of all packages nothing is garbage.
    code = "import gc; gc.disable(); from mkdocs.__main__ import cli; cli()"
    ran = run_program(code, "build", "--strict", "-q", "-d",
                      tmp_path / "site", folder=ROOT, NO_MKDOCS_2_WARNING="1")
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    commands_page = (tmp_path / "site" / "reference" / "commands.html").read_text(encoding="utf-8")
    assert "Usage: foretrace predict" in commands_page and "Usage: foretrace comm fit" in commands_page
    python_page = (tmp_path / "site" / "reference" / "python.html").read_text(encoding="utf-8")
    assert "Record a training run" in python_page and "TrainerCapture" in python_page
    fetched = [match for page in (tmp_path / "site").rglob("*.html") for match in
               re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=[\"']?(https?://[^\"' >]*)", page.read_text())]
    assert fetched == []


def test_a_block_is_compared_line_by_line_and_figures_only_where_they_vary() -> None:
    (first, second) = commands("$ one   # says\nstep 1.5 ms\n…\nend\n$ two\n", vary=False)
    assert (first.command, second.output) == ("one   # says", "")
    assert not differs(first, "step 1.5 ms\nanything\n\nmore\nend") and differs(first, "step 1.6 ms\nend")
    vary = Shown("x", "a   1,234.5 ms  ±3%\n───", True)
    assert not differs(vary, "a 7 ms ±12%\n─────────") and differs(vary, "b 7 ms ±12%\n──")


def test_figures_of_the_readme_and_of_trust_stand_in_the_ledger() -> None:
    import ledger

    assert [(page.name, figure) for page, figure in ledger.unknown_figures() if figure not in ledger.ASKED] == []
    page = (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8")
    kept = sorted((ROOT / "docs" / "ledger").glob("*.txt"))
    assert len(kept) > 15 and all(f"(ledger/{each.name})" in page for each in kept)


IN_THE_REFERENCE_ALONE = frozenset({
    "--constants", "--debug", "--default", "--family", "--from-device", "--from-topology", "--fused", "--group",
    "--jobs", "--largest", "--max-mb", "--memory-of", "--module", "--part", "--per-node", "--per-octave",
    "--pipeline", "--predicted", "--record", "--refit", "--rehearse", "--requests", "--smallest", "--tf32",
    "--work", "campaign list", "campaign status", "models list"})
"""Commands and options that no page explains; their help, which is on the site too, says all."""


def test_pages_mention_every_command_and_option() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    names = set()
    for name, command in _commands(typer.main.get_command(app), ""):
        names |= {name, *(option for one in command.params for option in one.opts if option.startswith("--"))}
    missing = {name for name in names if re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text) is None}
    assert len(names) > 200 and missing <= IN_THE_REFERENCE_ALONE


def _commands(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    if path:
        yield path, command
    for name, below in getattr(command, "commands", {}).items():
        yield from _commands(below, f"{path} {name}".strip())
