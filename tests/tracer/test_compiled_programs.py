"""Programs that compile themselves are traced as they run without a compiler, in this process and apart."""

from __future__ import annotations

import runpy
from functools import partial
from pathlib import Path

import pytest
from slowly import mostly_slow

torch = pytest.importorskip("torch")

from tracer.graph import ExecutionGraph  # noqa: E402
from tracer.shape_only.apart import trace_apart  # noqa: E402
from tracer.shape_only.trace import trace_step  # noqa: E402

BEFORE = torch.compile, torch.nn.Module.compile
PROGRAM = """
import torch
from torch import nn
from torch.nn import functional as F

def build(how="whole", batch=3, seq=5):
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    net = nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Linear(16, 10))
    optimizer = torch.optim.AdamW(net.parameters())
    x, y = torch.randn(batch, seq, 16), torch.randint(0, 10, (batch, seq))

    def loss_of(x, y):
        return F.cross_entropy(net(x).flatten(0, 1), y.flatten())

    if how == "whole":
        net = torch.compile(net)
    elif how == "in place":
        net.compile(mode="reduce-overhead")
    elif how == "function":
        loss_of = torch.compile(fullgraph=True, dynamic=False)(loss_of)
    elif how == "compiler":
        loss_of = torch.compiler.compile(loss_of)

    def step():
        optimizer.zero_grad()
        loss_of(x, y).backward()
        optimizer.step()

    return torch.compile(step) if how == "step" else step
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("compiled") / "user.py"
    path.write_text(PROGRAM)
    return path


def traced(program: Path, how: str) -> ExecutionGraph:
    return trace_step(partial(runpy.run_path(str(program))["build"], how=how), "cpu")


@pytest.fixture(scope="module")
def plain(program: Path) -> ExecutionGraph:
    return traced(program, "none")


@pytest.mark.parametrize("how", mostly_slow(["whole", "in place", "function", "step", "compiler"], {"whole", "step"}))
def test_a_compiled_step_has_the_operations_of_one_that_is_not(how: str, program: Path, plain: ExecutionGraph) -> None:
    compiled = traced(program, how) if how != "whole" else trace_apart(
        f"{program}:build", "cpu", arguments={"how": how})
    for name in ("name", "shapes", "dtypes"):
        mine, theirs = (
            [graph.string(code) for code in getattr(graph.ops, name).tolist()] for graph in (compiled, plain))
        assert mine == theirs
    assert compiled.ops.phase.tolist() == plain.ops.phase.tolist()
    (note,) = (text for text in compiled.meta.loss.notes if "compile" in text)
    assert note.startswith("The program compiles parts of itself")
    assert not any("compile" in text for text in plain.meta.loss.notes)
    assert (torch.compile, torch.nn.Module.compile) == BEFORE  # PyTorch compiles again afterwards
