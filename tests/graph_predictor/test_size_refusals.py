"""Every way out that a refusal of another size names works when it is followed literally.

The captures are of small steps on this CPU; no time of them matters here.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tracer
from foretrace.commands import app

PROGRAMS = '''
import torch
from torch import nn
from torch.nn import functional as F


def trained(model, loss):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()
    return step


def texts(batch=16, seq=16, width=48, heads=4):
    layer = nn.TransformerEncoderLayer(width, heads, 2 * width, 0.0, batch_first=True)
    model = nn.Sequential(nn.Embedding(100, width), layer, nn.Linear(width, 100))

    def loss():
        x = torch.randint(0, 100, (batch, seq))
        return F.cross_entropy(model(x).flatten(0, 1), x.flatten())
    return trained(model, loss)


def pairs(batch=6, source=24, target=24):
    first, second, head = nn.Embedding(90, 32), nn.Embedding(70, 32), nn.Linear(32, 9)
    def loss():
        a, b = first(torch.randint(90, (batch, source))), second(torch.randint(70, (batch, target)))
        return F.cross_entropy(head(a).mean(1) + head(b).mean(1), torch.randint(9, (batch,)))
    return trained(nn.ModuleList([first, second, head]), loss)


def layers(batch=20, features=30, hidden=50):
    model = nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, 7))
    return trained(model, lambda: F.cross_entropy(model(torch.randn(batch, features)), torch.randint(7, (batch,))))


def asked(batch=20):
    model = nn.Linear(30, 7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def step():
        loss = model(torch.randn(batch, 30)).square().mean()
        if loss.item() < 3:
            print("low")
        loss.backward()
        optimizer.step()
    return step


def number(batch=20):
    return batch


def experts(batch=6, seq=14):
    embed, router = nn.Embedding(100, 32), nn.Linear(32, 5)
    each = nn.ModuleList(nn.Linear(32, 32) for _ in range(5))
    def loss():
        x = embed(torch.randint(100, (batch, seq))).flatten(0, 1)
        weight, chosen = router(x).max(-1)
        parts = []
        for number, one in enumerate(each):
            mine = chosen == number
            if mine.any():
                parts.append(one(x[mine]) * weight[mine, None])
        return torch.cat(parts).square().mean()
    return trained(nn.ModuleList([embed, router, each]), loss)
'''
Sizes = Mapping[str, int]


@dataclass(frozen=True)
class Refused:
    """A command that is refused, and those that its sentence names.

    Attributes:
        program: function of the script; what is captured of it, at ``sizes``, is what the command predicts from.
        words: of the command, after the capture.
        said: what the sentence says.
        ways: pieces of the sentence, and the words that follow them literally; sizes before the words where the step is
            captured again.
        other: sizes of a second capture, ``{other}`` in the words.
    """

    program: str
    sizes: Sizes
    words: str
    said: str
    ways: tuple[tuple[str, str] | tuple[str, str, Sizes], ...]
    other: Sizes = field(default_factory=dict)


AGAIN = (
    Refused("texts", {"batch": 16, "seq": 16}, "--set seq=16:64", "an input of the step is 16×16", (
        ("Capture the step where they differ", "--set seq=20:64", {"batch": 16, "seq": 20}),
        ("write batch=16:… if samples", "--set batch=16:64"), ("(--code)", "--set seq=64 --code {script}:texts"))),
    Refused("texts", {"batch": 6, "seq": 8, "heads": 8}, "--set heads=8:16", "a size of the model", (
        ("--code SCRIPT.py:FUNCTION", "--set heads=16 --code {script}:texts"),
        ("name a size of the data", "--set batch=6:12"))),
    Refused("texts", {"batch": 6, "seq": 8, "heads": 8}, "--set speed=8:16", "takes a width of 48 apart", (
        ("Capture the step at another size", "--set speed=10:16", {"batch": 6, "seq": 10, "heads": 8}),
        ("(seq, batch, image)", "--set batch=6:16"), ("(--code)", "--set seq=16 --code {script}:texts"))),
    Refused("texts", {"batch": 5, "seq": 48}, "--set seq=48:96", "a parameter of", (
        ("capture the step at another size", "--set seq=20:64", {"batch": 16, "seq": 20}),
        ("(--code)", "--set seq=96 --code {script}:texts"))),
    Refused("texts", {"batch": 6, "seq": 1}, "--set seq=1:4", "dimensions of 1 are everywhere", (
        ("capture the step at another size", "--set seq=20:64", {"batch": 16, "seq": 20}),
        ("(--code)", "--set seq=4 --code {script}:texts"))),
    Refused("texts", {"batch": 16, "seq": 20}, "--set seq=15:30", "No tensor of the step has 15", (
        ("name the size that was recorded", "--set seq=20:30"),)),
    Refused("texts", {"batch": 16, "seq": 20}, "--set batch=15:30", "as its first dimension", (
        ("name the size that was recorded", "--set batch=16:30"),)),
    Refused("pairs", {}, "--set source=24:72", "2 inputs of the step", (
        ("Capture the step where they differ", "--set source=20:72", {"source": 20}),
        ("name them one by one", "--set source=24:72 --set target=24:72"),
        ("(--code)", "--set source=72 --code {script}:pairs"))),
    Refused("layers", {}, "--set batch=20:30000", "more than 1,000 times away", (
        ("capture the step at a size nearer", "--set batch=400:30000", {"batch": 400}),
        ("(--code)", "--set batch=30000 --code {script}:layers"))),
)
WRITTEN = (
    Refused("layers", {}, "--set batch=40", "names no old size", (
        ("write it like batch=32:64", "--set batch=20:40"), ("--code", "--set batch=40 --code {script}:layers"))),
    Refused("layers", {}, "--set batch=20:0", "is no size", (("from 1 to", "--set batch=20:1"),)),
    Refused("layers", {}, "--set batch=20:40 --set batch=20:60", "set twice", (
        ("give one new size", "--set batch=20:40"),)),
    Refused("layers", {}, "--code {script}:layers", "are for other sizes", (
        ("such as --set batch=64", "--set batch=64 --code {script}:layers"),)),
    Refused("layers", {}, "--also {other}:batch=60", "are for other sizes", (
        ("such as --set batch=64", "--set batch=20:64 --also {other}:batch=60"),), {"batch": 60}),
    Refused("layers", {}, "--set batch=20:30 --selected 0.5", "says what masks select", (
        ("name the program with --code", "--set batch=30 --selected 0.5 --code {script}:layers"),
        ("leave --selected out", "--set batch=20:30"))),
)
PROGRAM = (
    Refused("layers", {}, "--set samples=40 --code {script}:layers", "takes no argument 'samples'", (
        ("it takes batch, features, hidden", "--set batch=40 --code {script}:layers"),)),
    Refused("layers", {}, "--set batch=40 --code {script}:layer", "has no function 'layer'", (
        ("layers", "--set batch=40 --code {script}:layers"),)),
    Refused("layers", {}, "--set batch=40 --code {script}:number", "where the step was expected", (
        ("return a function without arguments", "--set batch=40 --code {script}:layers"),)),
    Refused("layers", {}, "--set batch=40 --code {script}:asked", "decides by a number that it read", (
        ("leave it out of the traced step", "--set batch=40 --code {script}:layers"),
        ("--set batch=RECORDED:40", "--set batch=20:40 --code {script}:asked"))),
    Refused("layers", {}, "--set batch=40 --code {script}:experts", "reads a tensor's values", (
        ("--selected 0.5", "--set batch=40 --code {script}:experts --selected 0.5"),
        ("--set batch=RECORDED:40", "--set batch=20:40 --code {script}:experts"))),
)
ALSO = (
    Refused("layers", {}, "--set batch=20:40 --also {other}", "does not say its batch", (
        ("--also PATH:batch=64", "--set batch=20:40 --also {other}:batch=60"),), {"batch": 60}),
    Refused("layers", {}, "--set batch=20:40 --also {other}:batch=50", "do not differ by that", (
        ("{other}:batch=60", "--set batch=20:40 --also {other}:batch=60"),), {"batch": 60}),
    Refused("layers", {}, "--set batch=20:60 --also {other}:batch=60", "no shape differs", (
        ("leave --also out", "--set batch=20:60"),), {"batch": 20}),
    Refused("layers", {}, "--set batch=20:60 --also {other}:batch=20", "name its own sizes", (
        ("NAME=", "--set batch=20:60 --also {other}:batch=60"),), {"batch": 60}),
    Refused("layers", {}, "--set batch=20:60 --also {other}:batch=0", "is no size", (
        ("from 1 to", "--set batch=20:60 --also {other}:batch=60"),), {"batch": 60}),
    Refused("layers", {}, "--set batch=20:60 --also {other}:batch=60 --parallel ddp=2", "leave --also or --parallel", (
        ("leave --also or --parallel", "--set batch=20:60 --also {other}:batch=60"),), {"batch": 60}),
)


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Sizes], Path]:
    """The capture of a program at some sizes, made once."""
    folder = tmp_path_factory.mktemp("captures")
    script = folder / "programs.py"
    script.write_text(PROGRAMS)

    def capture(program: str, sizes: Sizes) -> Path:
        path = folder / "-".join([program, *(f"{name}{size}" for name, size in sizes.items())])
        if not path.exists():
            step = runpy.run_path(str(script))[program](**sizes)
            with tracer.capture(path, steps=2, timed=2, warmup=1, execution_trace="none") as recording:
                for _ in range(8):
                    step()
                    recording.step()
        return path
    return capture


@cache
def predicted(*arguments: str) -> tuple[int, str]:
    """The same way out is named by several refusals."""
    done = CliRunner().invoke(app, ["predict", *arguments])
    return done.exit_code, " ".join(done.output.split())


ALL = (*AGAIN, *WRITTEN, *PROGRAM, *ALSO)


@pytest.mark.parametrize("refused", ALL, ids=[f"{one.program} {one.words}" for one in ALL])
def test_what_a_refusal_names_works(captured: Callable[[str, Sizes], Path], refused: Refused) -> None:
    other = captured(refused.program, refused.other or refused.sizes)

    def run(words: str, sizes: Sizes) -> tuple[int, str]:
        source = captured(refused.program, sizes)
        return predicted(str(source), *words.format(script=source.parent / "programs.py", other=other).split())

    code, sentence = run(refused.words, refused.sizes)
    assert code == 2 and refused.said in sentence, sentence
    for piece, words, *sizes in refused.ways:
        assert piece.format(other=other) in sentence, (piece, sentence)
        code, text = run(words, sizes[0] if sizes else refused.sizes)  # type: ignore[arg-type]
        assert code == 0, (words, text)
