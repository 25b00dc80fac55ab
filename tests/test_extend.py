"""The page on extending foretrace: each of its blocks, followed in a copy of the packages, makes what it says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "howto" / "extend.md"
PACKAGES = ("foretrace", "tracer", "kernel_models", "graph_predictor", "planner", "step_views")
BLOCK = re.compile(r"^`(?P<file>[\w./-]+)`, (?:a new file|a copy of `(?P<copied>[\w./-]+)` with|below "
                   r"`(?P<line>[^`\n]+)`):\n\n```\w+\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
STEP = """
import torch

def build():
    model, x = torch.nn.Linear(8192, 8192).cuda(), torch.randn(64, 8192, device="cuda")
    return lambda: model(x).sum().backward()
"""
SAYS = {"predict traces/cpu-small": "20% of the host taken", "devices": "ACME", "predict step.py:build": "acme-gpu",
        "price": "rotary", "topologies": "acme-node"}
"""What each command of the page says, by its beginning."""


def followed(folder: Path) -> None:
    """Write the page's blocks into the files that they name."""
    for block in BLOCK.finditer(PAGE.read_text(encoding="utf-8")):
        path, text = folder / block["file"], block["text"]
        if block["line"]:
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            place = [line.strip() for line in lines].index(block["line"])
            text = "".join([*lines[:place + 1], text, *lines[place + 1:]])
        elif block["copied"]:
            changed = {line.partition(" = ")[0]: line for line in text.splitlines()}
            copied = (folder / block["copied"]).read_text(encoding="utf-8").splitlines()
            assert changed.keys() <= {line.partition(" = ")[0] for line in copied}
            text = "\n".join(changed.get(line.partition(" = ")[0], line) for line in copied)
        path.write_text(text, encoding="utf-8")


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("extended")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "traces").symlink_to(ROOT / "traces")
    (folder / "step.py").write_text(STEP)
    followed(folder)
    return folder


COMMANDS = re.findall(r"^\$ foretrace (.*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
RUN = """
import sys, shlex
from foretrace.commands import main
from tried_edits import EVERY  # what tests try, without a further row
assert ("host-load", "20%") in [(option.name, value) for option, value in EVERY]
for command in sys.argv[1:]:
    print("$", command, flush=True)
    sys.argv = ["foretrace", *shlex.split(command)]
    try:
        main()
    except SystemExit as ended:
        if ended.code:
            raise
"""


def test_what_the_page_adds_works(copied: Path) -> None:
    pytest.importorskip("torch")
    places = os.pathsep.join([str(copied), str(ROOT / "tests")])
    ran = subprocess.run([sys.executable, "-c", RUN, *COMMANDS], cwd=copied, capture_output=True, text=True,
                         check=False, env={**os.environ, "PYTHONPATH": places})
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr
    said = dict(part.split("\n", 1) for part in ran.stdout[2:].split("\n$ "))
    for start, words in SAYS.items():
        assert words in next(text for command, text in said.items() if command.startswith(start)), start


def test_every_kind_of_addition_is_shown() -> None:
    files = [block["file"] for block in BLOCK.finditer(PAGE.read_text(encoding="utf-8"))]
    assert len(files) == 6 and len(COMMANDS) == len(SAYS) and files.count("kernel_models/op_call.py") == 1
