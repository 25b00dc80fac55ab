"""Numbers that a program reads from data go on as stand-ins, unless they decide what the step does."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from tracer.shape_only.errors import ShapeOnlyError
from tracer.shape_only.stand_ins import CountOfData, NumberOfData, OfData, stand_in
from tracer.shape_only.trace import trace_script

PROGRAM = """
import math
import torch

def build(batch=4, read="log"):
    net = torch.nn.Linear(8, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    x, y = torch.randn(batch, 8), torch.randint(3, (batch,))
    total, hits, best = 0.0, 0, 9.0

    def step():
        nonlocal total, hits
        optimizer.zero_grad()
        out = net(x)
        loss = torch.nn.functional.cross_entropy(out, y)
        if read == "scaler":
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() > 0
            return
        loss.backward()
        optimizer.step()
        if read == "log":
            total += loss.item() * batch
            hits += (out.argmax(1) == y).sum().item()
            print(f"{loss.item():.3f} {loss:.2f} {hits:d} {hits / 10:.1%} {round(total, 3)}")
            if not math.isfinite(loss.item()):
                raise SystemExit(1)
        elif read == "best":
            if loss.item() < best:
                optimizer.step()
        elif read == "list":
            torch.zeros(int(torch.tensor([0.5, loss.item()])[1]))
        elif read == "rows":
            net(x[:(out.argmax(1) == y).sum().item()])
        elif read == "whole":
            torch.zeros(int(loss.item()))

    return step
"""


@pytest.fixture
def traced(tmp_path: Path) -> Callable[[str], Any]:
    (tmp_path / "user.py").write_text(PROGRAM)
    return lambda read: trace_script(f"{tmp_path / 'user.py'}:build", "cpu", arguments={"read": read})


def test_numbers_that_are_logged_are_read(traced: Callable[[str], Any], capsys: pytest.CaptureFixture[str]) -> None:
    graph = traced("log")
    names = [graph.string(code) for code in graph.ops.name]
    assert names.count("aten::_local_scalar_dense") == 5  # each read is work of the step
    assert capsys.readouterr().out.splitlines()[0] == "1.000 1.00 1 100.0% 1.0"
    (note,) = (text for text in graph.meta.loss.notes if "reads numbers of its data" in text)
    assert "user.py:26 (`total += loss.item() * batch`)" in note


@pytest.mark.parametrize(("read", "line"), [("best", "if loss.item() < best"), ("rows", "net(x[:(out.argmax(1)"),
                                            ("whole", "torch.zeros(int(loss.item()))")])
def test_numbers_that_decide_are_refused(traced: Callable[[str], Any], read: str, line: str) -> None:
    with pytest.raises(ShapeOnlyError, match="decides by a number that it read") as told:
        traced(read)
    assert f"(`{line}" in str(told.value)


def test_a_gradient_scaler_of_the_cpu_takes_its_step(traced: Callable[[str], Any]) -> None:
    graph = traced("scaler")
    names = [graph.string(code) for code in graph.ops.name]
    assert {"aten::_amp_foreach_non_finite_check_and_unscale_", "aten::_amp_update_scale_", "aten::add_",
            "aten::_local_scalar_dense"} <= set(names)
    assert any("goes on as it does where all of them are" in text for text in graph.meta.loss.notes)


def test_arithmetic_keeps_the_kind() -> None:
    loss, hits = stand_in(0.5), stand_in(3)
    assert isinstance(loss, NumberOfData) and isinstance(hits, CountOfData) and not isinstance(hits, int)
    for made in (loss + 1, 2 - loss, loss * hits, hits / 2, 1 / hits, -loss, abs(loss), loss ** 2, round(loss, 2),
                 sum([loss, loss]), 1.5 + hits):
        assert isinstance(made, NumberOfData)
    for made in (hits + 1, 2 * hits, hits // 2, sum([hits, hits])):
        assert isinstance(made, CountOfData)
    assert math.isfinite(loss) and math.isfinite(hits) and json.dumps({"loss": loss}) == '{"loss": 1.0}'
    assert f"{hits:5d}{loss:6.2f}{hits}" == "    1  1.001"


def test_a_tensor_of_stand_ins_has_no_values(traced: Callable[[str], Any]) -> None:
    with pytest.raises(ShapeOnlyError, match="reads a tensor's values"):
        traced("list")


@pytest.mark.parametrize("number", [stand_in(0.5), stand_in(3)])
def test_what_decides_is_refused(number: OfData) -> None:
    for asked in (bool, int, round, math.floor, lambda one: one < 2, lambda one: one == 2, lambda one: max(one, 2),
                  lambda one: one >= 2):
        with pytest.raises(ShapeOnlyError, match="decides by a number"):
            asked(number)


def test_a_count_is_no_size() -> None:
    for asked in (range, operator.index, lambda one: [1, 2][one], lambda one: [1, 2][:one]):
        with pytest.raises(ShapeOnlyError, match="decides by a number"):
            asked(stand_in(3))
