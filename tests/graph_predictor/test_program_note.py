"""A capture notes how its program was started, and what is refused of it names the way that works."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from foretrace.commands import app
from tracer.program_note import code_for, note
from tracer.user_code import find_main

LOOP = '''
import argparse
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("-b", "--batch-size", type=int, default=6)
parser.add_argument("--length", type=int, default=5)
parser.add_argument("--opt", default="adam")
parser.add_argument("--token")
options = parser.parse_args()
cell, head = nn.LSTMCell(8, 8), nn.Linear(8, 3)
both = [*cell.parameters(), *head.parameters()]
optimizer = torch.optim.SGD(both, lr=0.1) if options.opt == "sgd" else torch.optim.Adam(both)
for number in range(30):
    h = c = torch.zeros(options.batch_size, 8)
    for one in torch.randn(options.length, options.batch_size, 8).unbind(0):
        h, c = cell(one, (h, c))
    optimizer.zero_grad()
    loss = head(h).square().mean()
    loss.backward()
    optimizer.step()
    print("step", number, loss.item())
'''
BUILT = '''
import torch
from torch import nn

def trained(model, loss):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def step():
        loss().backward()
        optimizer.step()
    return step

def collated(length=5):
    def collate(rows):
        return rows[:length]
    return collate

def build(batch=6, length=5):
    cell, head = nn.LSTMCell(8, 8), nn.Linear(8, 3)
    def loss():
        h = c = torch.zeros(batch, 8)
        for one in torch.randn(length, batch, 8).unbind(0):
            h, c = cell(one, (h, c))
        return head(h).square().mean()
    return trained(nn.ModuleList([cell, head]), loss)

if __name__ == "__main__":
    step = build()
    for _ in range(30):
        step()
'''


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop.py").write_text(LOOP)
    (tmp_path / "built.py").write_text(BUILT)
    return tmp_path


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(words))
    return done.exit_code, " ".join(done.output.split())


def capture(*program: str) -> None:
    code, text = run("capture", "--out", "job", "--steps", "2", "--timed", "3", "--warmup", "1",
                     "--execution-trace", "none", *program)
    assert code == 0, text


@pytest.mark.parametrize(("program", "way"), [
    (["loop.py", "--", "-b", "4", "--length=6", "--opt", "sgd"], "'loop.py -b 4 --length={length} --opt sgd'"),
    (["built.py"], "built.py:build"), (["-m", "loop"], "'-m loop'"),
])
def test_the_way_that_a_refusal_names_works(here: Path, program: list[str], way: str) -> None:
    capture(*program)
    code, sentence = run("predict", "job", "--set", "length=5:20" if way == "built.py:build" else "length=20")
    assert code == 2 and "piece by piece" in sentence
    found = re.search(r"add (--code .*)\.$", sentence)
    assert found and found[1] == f"--code {way}"
    code, text = run("predict", "job", "--set", "length=20", *shlex.split(found[1]))
    assert code == 0 and "by tracing the program again" in text


def test_a_size_is_known_by_its_option_and_a_changed_program_is_not_named(here: Path) -> None:
    capture("loop.py")
    code, text = run("predict", "job", "--set", "batch_size=12")
    assert code == 0 and "batch_size 6 → 12 by scaling one capture" in text and "add --code loop.py." in text
    code, text = run("predict", "job", "--set", "batch_size=12", "--code", "loop.py --wide 3")
    assert code == 0 and "ended itself with exit status 2" in text  # and is scaled instead
    (here / "loop.py").write_text(LOOP.replace("0.1", "0.2"))
    code, text = run("predict", "job", "--set", "length=20")
    assert code == 2 and "piece by piece" in text and "add --code" not in text


def test_no_secret_and_no_path_is_noted(here: Path) -> None:
    program = find_main(str(here / "loop.py"))
    assert program is not None
    found = note(program, ["--token", "hf_Ab12", "--token=hf_Ab12", "-phf_Ab12", "/srv/private/data", "--opt=sgd",
                           "me@host", "-b", "3"])
    assert found.name == "loop.py" and found.options == {
        "batch_size": 3, "length": 5, "opt": None, "token": None}
    assert found.arguments == ["--token", "…", "--token=…", "…", "…", "--opt=sgd", "…", "-b", "3"]
    assert "Ab12" not in json.dumps(found.arguments) + json.dumps(found.options)
    assert code_for(found, ["batch_size"]) == "'loop.py --token … --token=… … … --opt=sgd … -b {batch_size}'"
    assert code_for(found, ["heads"]) == "" and code_for(None, ["batch_size"]) == ""
