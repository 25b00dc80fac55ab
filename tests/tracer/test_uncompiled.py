"""Traces without PyTorch's compiler: not imported, the same graph as with it, and there when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from types import SimpleNamespace

import pytest
from forks import ForkedProgram, Forks, run_program
from slowly import mostly_slow

pytest.importorskip("torch")

PROGRAM = """
import hashlib, sys
import torch
if {first!r}:
    import torch._dynamo
from tracer.shape_only import trace_step

def build():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.tensor([[1.0] * 8] * 4).cuda()
    {built}

    def step():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step

graph = trace_step(build)
imported = hasattr(sys.modules.get("torch._dynamo"), "OptimizedModule")
columns = [getattr(graph.ops, name).tolist() for name in ("name", "shapes", "module", "phase", "python_calls")]
print(imported, "torch._dynamo.config" in sys.modules, hashlib.sha256(repr(columns).encode()).hexdigest())
{after}
"""


ASKING = ("from torch._dynamo.utils import counters", "torch._dynamo.reset()", "torch._dynamo.disable(build)",
          "torch._dynamo.disable(None, recursive=False)")
"""What a program does that asks for the compiler while it is built."""
OPTIMIZER = """
import torch._dynamo.config
print(torch._dynamo.config.cache_size_limit > 0, torch.optim.Optimizer.zero_grad.__wrapped__.__dict__)
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))])
optimizer.zero_grad()
print(torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item(),
      torch.optim.Optimizer.zero_grad.__wrapped__.__dict__["__dynamo_disable"].__module__)
"""
SET = "from torch import _dynamo; _dynamo.config.cache_size_limit = 17"
FIRST = """
import sys, torch
from tracer.shape_only.uncompiled import UncompiledFakeMode, first_operation, without_compiler
first_operation()
before = set(sys.modules)
with without_compiler(), UncompiledFakeMode():
    torch.ones(3, 2).normal_() @ torch.ones(2)
print(sorted(set(sys.modules) - before), "torch._dynamo" in sys.modules)
"""
PROGRAMS: dict[str, dict[str, object]] = {
    "plain": {"after": OPTIMIZER}, "compiler first": {"first": True}, **{built: {"built": built} for built in ASKING},
    "setting": {"built": SET, "after": "import torch._dynamo; print(torch._dynamo.config.cache_size_limit)"}}

Traced = Callable[[str], list[str]]


@pytest.fixture(scope="module")
def traced() -> Iterator[Traced]:
    """From a program's name, traced apart: whether the compiler and its settings were imported, a digest, and what came
    after."""
    forks = Forks("torch", "tracer.shape_only")  # and nothing more: what else is imported is what these tests ask

    @cache
    def find(name: str) -> list[str]:
        text = FIRST if name == "first operation" else PROGRAM.format(
            **{"first": False, "built": "", "after": "", **PROGRAMS[name]})
        done = run_program(text) if name == "compiler first" else forks.run([ForkedProgram.of(text)])[0]
        assert not done.returncode, done.stderr
        return done.stdout.split()

    yield find
    forks.close()


def test_a_trace_imports_no_compiler_and_is_what_it_is_with_one(traced: Traced) -> None:
    without, beside = traced("plain"), traced("compiler first")
    assert without[:2] == ["False", "False"]
    assert beside[:2] == ["True", "True"]
    assert without[2] == beside[2]  # the calls of Python that the compiler's functions make among it
    # Afterwards the compiler is imported as ever, with the settings that a program changed.
    assert without[3:] == ["True", "{}", "2.0", "torch._dynamo.eval_frame"]
    assert traced("setting")[-1] == "17"
    assert traced("first operation") == ["[]", "False"]  # the next ones import nothing


@pytest.mark.parametrize("built", mostly_slow(ASKING, (ASKING[0],)))  # what others reach: the next test
def test_a_program_that_asks_for_the_compiler_gets_it(built: str, traced: Traced) -> None:
    assert traced(built)[:2] == ["True", "True"]
    assert traced(built)[2] == traced("plain")[2]


def test_what_is_not_answered_is_asked_of_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    from tracer.shape_only.uncompiled import Uncompiled

    asked: list[object] = []
    compiler = SimpleNamespace(reset="its reset", disable=lambda *given, **options: asked.append((given, options)))
    monkeypatch.setattr(Uncompiled, "make_way", lambda self: compiler)
    standing = Uncompiled.__new__(Uncompiled)
    assert standing.reset == "its reset"
    standing.disable(None, recursive=False)
    assert asked == [((None, False), {"wrapping": True})]
