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


def loop(batch=6, time=9):
    cell, head = nn.GRUCell(12, 30), nn.Linear(30, 7)
    def loss():
        x, state = torch.randn(batch, time, 12), torch.zeros(batch, 30)
        for at in range(time):
            state = cell(x[:, at], state)
        return F.cross_entropy(head(state), torch.randint(7, (batch,)))
    return trained(nn.ModuleList([cell, head]), loss)


def flat(batch=6, image=28):
    side = ((image - 4) // 2 - 4) // 2
    model = nn.Sequential(nn.Conv2d(1, 10, 5), nn.MaxPool2d(2), nn.Conv2d(10, 18, 5), nn.MaxPool2d(2), nn.Flatten(),
                          nn.Linear(18 * side * side, 7))
    return trained(model, lambda: F.cross_entropy(model(torch.randn(batch, 1, image, image)),
                                                  torch.randint(7, (batch,))))


def layers(batch=20, features=30, hidden=50):
    model = nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, 7))
    return trained(model, lambda: F.cross_entropy(model(torch.randn(batch, features)), torch.randint(7, (batch,))))


def plain():
    return layers()


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


def experts(batch=6, seq=14, how="masks"):
    embed, router = nn.Embedding(100, 32), nn.Linear(32, 5)
    each = nn.ModuleList(nn.Linear(32, 32) for _ in range(5))
    def loss():
        x = embed(torch.randint(100, (batch, seq))).flatten(0, 1)
        weight, chosen = router(x).max(-1)
        parts = []
        if how == "masks":
            for number, one in enumerate(each):
                mine = chosen == number
                if mine.any():
                    parts.append(one(x[mine]) * weight[mine, None])
        else:
            counts = torch.bincount(chosen, minlength=5).tolist() if how == "counts" else chosen.cpu().numpy()
            parts = [one(part) for one, part in zip(each, x[chosen.argsort()].split(counts))]
        return torch.cat(parts).square().mean()
    return trained(nn.ModuleList([embed, router, each]), loss)


def counted(batch=6, seq=14):
    return experts(batch, seq, "counts")


def read(batch=6, seq=14):
    return experts(batch, seq, "numpy")


def reading(batch=20):
    model = nn.Linear(30, 7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def step():
        loss = model(torch.randn(batch, 30)).square().mean()
        loss.backward()
        optimizer.step()
        loss.detach().numpy()
    return step


def tiny(batch=4, steps=13):
    large, small = nn.Linear(1000, 1000), nn.Linear(3, 3)
    return trained(nn.ModuleList([large, small]), lambda: large(torch.randn(batch * 300, 1000)).square().mean()
                   + small(torch.randn(steps, 3)).square().mean())
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


def _texts(batch: int, seq: int, heads: int = 4, width: int = 48) -> Sizes:
    return {"batch": batch, "seq": seq, "heads": heads, "width": width}


AGAIN = (
    Refused("texts", _texts(16, 16), "--set seq=16:64", "an input of the step is 16×16", (
        ("Capture the step where they differ", "--set seq=20:64", _texts(16, 20)),
        ("write batch=16:… if samples", "--set batch=16:64"), ("(--code)", "--set seq=64 --code {script}:texts"))),
    Refused("texts", _texts(6, 8, 8), "--set heads=8:16", "a size of the model", (
        ("--code SCRIPT.py:FUNCTION", "--set heads=16 --code {script}:texts"),
        ("name a size of the data", "--set batch=6:12"))),
    Refused("texts", _texts(6, 12, 4), "--set num_layers=12:24", "a size of the model", (
        ("--code SCRIPT.py:FUNCTION", "--set seq=24 --code {script}:texts"),
        ("name a size of the data", "--set seq=12:24"))),
    Refused("texts", _texts(6, 8, 8), "--set speed=8:16", "takes a width of 48 apart", (
        ("Capture the step at another size", "--set speed=10:16", _texts(6, 10, 8)),
        ("(seq, batch, image)", "--set batch=6:16"), ("(--code)", "--set seq=16 --code {script}:texts"))),
    Refused("texts", _texts(5, 48), "--set seq=48:96", "a parameter of", (
        ("capture the step at another size", "--set seq=20:64", _texts(16, 20)),
        ("(--code)", "--set seq=96 --code {script}:texts"))),
    Refused("texts", _texts(6, 1), "--set seq=1:4", "dimensions of 1 are everywhere", (
        ("capture the step at another size", "--set seq=20:64", _texts(16, 20)),
        ("(--code)", "--set seq=4 --code {script}:texts"))),
    Refused("texts", _texts(16, 20), "--set seq=15:30", "No tensor of the step has 15", (
        ("name the size that was recorded", "--set seq=20:30"),)),
    Refused("texts", _texts(16, 20), "--set batch=15:30", "as its first dimension", (
        ("name the size that was recorded", "--set batch=16:30"),)),
    Refused("pairs", {}, "--set batch=24:48", "24", (("name the size that was recorded", "--set batch=6:48"),)),
    Refused("pairs", {}, "--set source=24:72", "2 inputs of the step", (
        ("Capture the step where they differ", "--set source=20:72", {"source": 20}),
        ("name them one by one", "--set source=24:72 --set target=24:72"),
        ("(--code)", "--set source=72 --code {script}:pairs"))),
    Refused("loop", {}, "--set time=9:18", "piece by piece", (("(--code)", "--set time=18 --code {script}:loop"),)),
    Refused("flat", {}, "--set image=28:44", "changes parameters of the model", (
        ("--code SCRIPT.py:FUNCTION", "--set image=44 --code {script}:flat"),)),
    Refused("layers", {}, "--set hidden=50:100", "a size of the model", (
        ("--code SCRIPT.py:FUNCTION", "--set hidden=100 --code {script}:layers"),
        ("name a size of the data", "--set batch=20:40"))),
    Refused("layers", {}, "--set inner=50:100", "a parameter of", (
        ("(--code)", "--set hidden=100 --code {script}:layers"),)),
    Refused("layers", {}, "--set batch=20:30000", "more than 1,000 times away", (
        ("capture the step at a size nearer", "--set batch=400:30000", {"batch": 400}),
        ("(--code)", "--set batch=30000 --code {script}:layers"))),
    Refused("tiny", {}, "--set steps=13:26", "hardly any operation has that size", (
        ("--code SCRIPT.py:FUNCTION", "--set steps=26 --code {script}:tiny"),
        ("name the size that the step's tensors have", "--set rows=1200:2400"))),
)
WRITTEN = (
    Refused("layers", {}, "--set batch=40", "names no old size", (
        ("write it like batch=32:64", "--set batch=20:40"), ("--code", "--set batch=40 --code {script}:layers"))),
    Refused("layers", {}, "--set batch", "names no size", (
        ("batch=128", "--set batch=128 --code {script}:layers"), ("batch=32:128", "--set batch=20:128"))),
    Refused("layers", {}, "--set batch=20:40 --set batch=20:60", "set twice", (
        ("give one new size", "--set batch=20:40"),)),
    Refused("layers", {}, "--set batch=20:0", "is no size", (("from 1 to", "--set batch=20:1"),)),
    Refused("layers", {}, "--set batch=20:99999999999", "is no size", (("to 2,147,483,647", "--set batch=20:2000"),)),
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
    Refused("layers", {}, "--set batch=40 --code {script}:plain", "it takes none", (
        ("def plain(batch=32)", "--set batch=40 --code {script}:layers"),)),
    Refused("layers", {}, "--set batch=40 --code {script}:layer", "has no function 'layer'", (
        ("layers", "--set batch=40 --code {script}:layers"),)),
    Refused("layers", {}, "--set batch=40 --code {script}", "names no function", (
        ("script.py:function", "--set batch=40 --code {script}:layers"),)),
    Refused("layers", {}, "--set batch=40 --code no.py:layers", "does not exist", (
        ("check the path", "--set batch=40 --code {script}:layers"),)),
    Refused("layers", {}, "--set batch=40 --code {script}:number", "where the step was expected", (
        ("return a function without arguments", "--set batch=40 --code {script}:layers"),)),
    Refused("layers", {}, "--set batch=40 --code {script}:asked", "decides by a number that it read", (
        ("leave it out of the traced step", "--set batch=40 --code {script}:layers"),
        ("--set batch=RECORDED:40", "--set batch=20:40 --code {script}:asked"))),
    Refused("layers", {}, "--set batch=40 --code {script}:reading", "(.numpy())", (
        ("leave numpy", "--set batch=40 --code {script}:layers"),
        ("--set batch=RECORDED:40", "--set batch=20:40 --code {script}:reading"))),
    Refused("layers", {}, "--set batch=40 --code {script}:experts", "reads a tensor's values", (
        ("--selected 0.5", "--set batch=40 --code {script}:experts --selected 0.5"),
        ("--set batch=RECORDED:40", "--set batch=20:40 --code {script}:experts"))),
    Refused("layers", {}, "--set batch=40 --code {script}:counted", "shape depends on values", (
        ("--selected 0.5", "--set batch=40 --code {script}:counted --selected 0.5"),
        ("--set batch=RECORDED:40", "--set batch=20:40 --code {script}:counted"))),
    Refused("layers", {}, "--set batch=40 --code {script}:layers --selected 2", "is no share", (
        ("from 0 to 1", "--set batch=40 --code {script}:layers --selected 1"),)),
)
ALSO = (
    Refused("layers", {}, "--set batch=20:40 --also {other}", "does not say its batch", (
        ("--also PATH:batch=64", "--set batch=20:40 --also {other}:batch=60"),), {"batch": 60}),
    Refused("layers", {}, "--set batch=40 --also {other}:batch=60", "does not say its batch", (
        ("--set batch=32:128", "--set batch=20:40 --also {other}:batch=60"),), {"batch": 60}),
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


def predict(captured: Callable[[str, Sizes], Path], refused: Refused, words: str, sizes: Sizes) -> tuple[int, str]:
    source = captured(refused.program, sizes)
    other = captured(refused.program, refused.other) if refused.other else source
    return predicted(str(source), *words.format(script=source.parent / "programs.py", other=other).split())


@cache
def predicted(*arguments: str) -> tuple[int, str]:
    """The same way out is named by several refusals."""
    done = CliRunner().invoke(app, ["predict", *arguments])
    return done.exit_code, done.output


ALL = (*AGAIN, *WRITTEN, *PROGRAM, *ALSO)


@pytest.mark.parametrize("refused", ALL, ids=[f"{one.program} {one.words}" for one in ALL])
def test_what_a_refusal_names_works(captured: Callable[[str, Sizes], Path], refused: Refused) -> None:
    code, text = predict(captured, refused, refused.words, refused.sizes)
    sentence = " ".join(text.split())
    assert code == 2 and refused.said in sentence, sentence
    other = captured(refused.program, refused.other or refused.sizes)
    for piece, words, *sizes in refused.ways:
        assert piece.format(other=other) in sentence, (piece, sentence)
        code, text = predict(captured, refused, words, sizes[0] if sizes else refused.sizes)  # type: ignore[arg-type]
        assert code == 0, (words, text)


def test_there_are_as_many_ways_as_are_claimed() -> None:
    assert sum(len(one.ways) for one in ALL) >= 60
