"""The console blocks of documentation: run them, and say where a page no longer shows what its commands print.

    python tests/docs_blocks.py docs/tutorials/plan.md                # what differs
    python tests/docs_blocks.py --update docs/tutorials/*.md          # write what they print now into the pages

A block is run if a comment before it says so:

    <!-- run -->                  its output is that of the page, to the letter
    <!-- run: figures vary -->    to the letter but for figures: what a machine measured differs from time to time
    <!-- file: train.py -->       the code block that follows is that file

Blocks of a page run in order, in a directory of their own that has the project's ``traces``. Of long output a page
shows parts: a line that is only "…" stands for any lines, so that ``--update`` leaves such blocks to a person.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from forks import run_program

ROOT = Path(__file__).resolve().parents[1]
_BLOCK = re.compile(r"<!-- (?P<what>run|run: figures vary|file: (?P<file>[\w./-]+)) -->\n+```(?P<kind>\w*)[^\n]*\n"
                    r"(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_FIGURE = re.compile(r"[+-]?\d[\d,]*(?:\.\d+)?")
_RULE = re.compile("─+")
_PAUSES = ((re.compile(r"Note: 0 of 0 steps do not count \([^)]*\)\. ?"), ""),
           (re.compile(r"mean of 0 of 0 steps"), "mean of 0 steps"),
           (re.compile(r"no: 0 times as long as the median one"), "yes"),
           (re.compile(r"(foretrace: Warning|Note: rank0): the machine (was busy|may have) .*? (by 0%|these steps)"
                       r"\. ?(The timed steps stand here without the 0 ms that they waited in all\. ?)?"), ""),
           (re.compile(r"; 0 with what it waited for a processor"), ""),
           (re.compile(r"Note: Calls were stopped in .*? no work\. ?"), ""))
"""On a busy machine a step or another takes too long to count, steps wait, and commands say so."""
_COUNTS_LESS = sys.version_info >= (3, 12)
"""Comprehensions are no calls from Python 3.12 on: the host time of a traced step differs by less than a percent. The
pages show what earlier versions print; later ones are held to the words alone."""
SECONDS = 600.0


@dataclass(frozen=True)
class Shown:
    """One command of a block and the output that the page shows of it."""

    command: str
    output: str
    vary: bool


def commands(text: str, vary: bool) -> list[Shown]:
    """The commands ("$ …") of a block, each with the lines that follow it."""
    found: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        elif found:
            found[-1][1].append(line)
    return [Shown(command, "\n".join(lines).strip("\n"), vary) for command, lines in found]


_MINUTES = re.compile(r"(?<=--minutes )[\d.]+")
_PLAIN = re.compile(r"(?P<program>foretrace|python -m) (?P<words>[^|&;<>$`*?]+)(?:\| tail -n (?P<last>\d+))?")
"""A command that asks nothing of the shell but its last lines."""
_PROGRAMS = {
    "foretrace": "sys.argv[0] = 'foretrace'; from foretrace.commands import main; sys.exit(main())",
    "python -m": "import runpy; del sys.argv[0]; runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"}
_TOGETHER = "import os, sys, warnings; os.dup2(1, 2); warnings.simplefilter('ignore'); "


def run(command: str, folder: Path, longer: float = 1.0) -> str:
    """What a command prints in a folder, stdout and stderr together; with ``longer`` times the minutes it is given."""
    command = _MINUTES.sub(lambda minutes: f"{float(minutes[0]) * longer:g}", command.partition("   #")[0])
    environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "COLUMNS": "100",
                   "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1",
                   # What forks find imported is a plugin of pytest.
                   "PYTEST_ADDOPTS": "-W ignore::pytest.PytestAssertRewriteWarning"}
    if plain := _PLAIN.fullmatch(command):
        printed = run_program(_TOGETHER + _PROGRAMS[plain["program"]], *shlex.split(plain["words"]), folder=folder,
                              seconds=SECONDS, **environment).stdout
    else:
        printed = subprocess.run(["bash", "-c", command], cwd=folder, env={**os.environ, **environment}, text=True,
                                 stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=SECONDS, check=False).stdout
    lines = printed.strip("\n").splitlines()
    return "\n".join(line.rstrip() for line in lines[-int(plain["last"] or len(lines)) if plain else 0:])


def differs(shown: Shown, printed: str) -> bool:
    """Whether a page shows something else than was printed. Where figures vary, lines may break elsewhere."""
    if shown.vary:
        parts = _masked(shown.output).split("…")
        return re.fullmatch(".*".join(re.escape(part.strip()) for part in parts), _masked(printed)) is None
    expected, found = ([line.rstrip() for line in text.splitlines()] for text in (shown.output, printed))
    if "…" not in expected:
        return expected != found
    pattern = "\n".join(r"(?:.*\n)*?.*" if line == "…" else re.escape(line) for line in expected)
    return re.fullmatch(pattern, "\n".join(found)) is None


def _masked(text: str) -> str:
    found = " ".join(_RULE.sub("─", _FIGURE.sub("0", text)).split())
    for pattern, usual in _PAUSES:
        found = pattern.sub(usual, found)
    return found


def stale(page: Path, folder: Path, longer: float = 1.0) -> Iterator[tuple[Shown, str]]:
    """Commands of a page whose output it no longer shows, with what they print; all of its blocks are run, with
    ``longer`` times the minutes they are given."""
    for block in _BLOCK.finditer(page.read_text(encoding="utf-8")):
        if block["file"]:
            (folder / block["file"]).write_text(block["text"], encoding="utf-8")
            continue
        for shown in commands(block["text"], "vary" in block["what"] or _COUNTS_LESS):
            printed = run(shown.command, folder, longer)
            if differs(shown, printed):
                yield shown, printed


def prepared(folder: Path) -> Path:
    """A directory to run a page's blocks in."""
    if not (folder / "traces").exists():
        # Of the recordings of hosts, half of what is there, no page has need.
        shutil.copytree(ROOT / "traces", folder / "traces", ignore=shutil.ignore_patterns("host*"))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument("--update", action="store_true")
    options = parser.parse_args()
    code = 0
    for page in options.pages:
        with tempfile.TemporaryDirectory() as folder:
            text = page.read_text(encoding="utf-8")
            for shown, printed in stale(page, prepared(Path(folder))):
                code = 1
                print(f"{page}: $ {shown.command}\n{printed}\n")
                old = f"$ {shown.command}\n{shown.output}" if shown.output else f"$ {shown.command}"
                if options.update and "…" not in shown.output.splitlines():
                    text = text.replace(old, f"$ {shown.command}\n{printed}", 1)
            if options.update:
                page.write_text(text, encoding="utf-8")
    sys.exit(code)


if __name__ == "__main__":
    main()
