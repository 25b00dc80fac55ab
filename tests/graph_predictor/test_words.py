"""Settings that are words or fractions: only a program that is traced again takes them, no scaled capture does."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from graph_predictor.prediction.scenario import EditError
from graph_predictor.request.study import Configuration, Study
from graph_predictor.sizes.retrace import parse_sets, parse_settings
from tracer.errors import ForetraceError
from tracer.shape_only.errors import ShapeOnlyError

PROGRAM = """
import torch

def build(batch=4, opt="adamw", fused=False, lr=0.5):
    assert type(opt) is str and type(fused) is bool and type(lr) is float
    net = torch.nn.Linear(8, 8)
    kind = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[opt]
    optimizer = kind(net.parameters(), lr=lr, fused=fused)
    x = torch.randn(batch, 8)

    def step():
        optimizer.zero_grad()
        net(x).sum().backward()
        optimizer.step()

    return step
"""


@pytest.fixture
def study(tmp_path: Path) -> Study:
    (tmp_path / "user.py").write_text(PROGRAM)
    return Study(None, code=f"{tmp_path / 'user.py'}:build", device="cpu")


def names_with(study: Study, *sets: str) -> set[str]:
    graph = study.prepared(Configuration(sizes=sets)).start.built.graphs[0]
    return {graph.string(code) for code in graph.ops.name}


def test_words_reach_the_function_as_what_its_defaults_are(study: Study) -> None:
    assert "aten::addcdiv_" in names_with(study, "batch=2")
    assert "aten::addcdiv_" not in names_with(study, "opt=sgd", "lr=0.25", "batch=2")
    assert "aten::_fused_adamw_" in names_with(study, "fused=true")


@pytest.mark.parametrize(("text", "said"), [
    ("fused=perhaps", "fused=perhaps names no size or setting of .*: it takes true or false"),
    ("batch=many", "batch=many names no size or setting of .*: it takes a number, as 4 is"),
    ("lr=fast", "it takes a number, as 0.5 is"),
    ("depth=deep", r"takes no argument 'depth' \(it takes batch, opt, fused, lr\).*\(depth='deep'\)")])
def test_words_that_a_function_does_not_take(study: Study, text: str, said: str) -> None:
    with pytest.raises(ShapeOnlyError, match=said):
        study.prepared(Configuration(sizes=(text,)))


def test_texts() -> None:
    assert parse_settings(["opt=fused", "batch=8:16", "lr=1e-3", "x=-.5"]) == (
        {"batch": 8}, {"batch": 16, "opt": "fused", "lr": "1e-3", "x": "-.5"})
    for wrong in (["opt="], ["=fused"], ["opt=a b"], ["opt=sgd", "opt=adam"], ["opt=1", "opt=adam"]):
        with pytest.raises(ForetraceError):
            parse_settings(wrong)
    with pytest.raises(EditError, match=r"names no size.*give --code SCRIPT\.py:FUNCTION, whose FUNCTION takes opt"):
        parse_sets(["opt=sgd"])
