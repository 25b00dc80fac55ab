"""Backward operations get the module of their forward operation: a real capture, with a checkpoint, a shared module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graph_predictor.prediction.replay import replay
from graph_predictor.recorded.module_paths import with_backward_modules
from graph_predictor.simulation.host_slices import exclusive_time
from step_views.reports.breakdown import breakdown
from tracer.graph import ExecutionGraph, OpKind, Phase
from tracer.job import read_job

LOSS = {f"autograd::engine::evaluate_function: {name}Backward0" for name in ("Mean", "Pow")}
"""What runs backward and is of no module: the loss, which is called outside."""
WIDTHS = (48, 80, 112, 144)
"""Hidden sizes of the blocks: each product's shapes say whose it is. The last block is used twice, the second one is
checkpointed."""


def _record(out: Path, *, stacks: bool) -> None:
    torch = pytest.importorskip("torch")
    from torch.utils.checkpoint import checkpoint

    import tracer

    def block(width: int) -> Any:
        return torch.nn.Sequential(torch.nn.LayerNorm(32), torch.nn.Linear(32, width), torch.nn.GELU(),
                                   torch.nn.Linear(width, 32))

    class Net(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList(map(block, WIDTHS))

        def forward(self, x: Any) -> Any:
            first, second, third, shared = self.blocks
            x = x + checkpoint(second, first(x), use_reentrant=False)
            return shared(shared(third(x)))

    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.randn(64, 32)
    with tracer.capture(out, steps=2, warmup=2, timed=2, stacks=stacks, execution_trace="none") as capture:
        while not capture.finished:
            optimizer.zero_grad()
            model(data).square().mean().backward()
            optimizer.step()
            capture.step()


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> ExecutionGraph:
    out = tmp_path_factory.mktemp("modules") / "capture"
    _record(out, stacks=True)
    return read_job(out).graphs[0]


def _backward(graph: ExecutionGraph) -> np.ndarray:
    return (graph.ops.phase == Phase.BACKWARD) & (graph.ops.kind == OpKind.OPERATION)


def _outermost(graph: ExecutionGraph, row: int) -> str:
    """The name of the outermost operation that runs backward and holds one."""
    backward = _backward(graph)
    while (above := int(graph.ops.parent[row])) >= 0 and backward[above]:
        row = above
    return graph.string(int(graph.ops.name[row]))


def test_all_that_runs_backward_but_the_loss_has_a_module(graph: ExecutionGraph) -> None:
    backward = _backward(graph)
    assert (graph.ops.module[backward] >= 0).mean() < 0.5
    without = np.flatnonzero(backward & (with_backward_modules(graph).ops.module < 0))
    assert {_outermost(graph, row) for row in without.tolist()} == LOSS


def test_each_product_belongs_to_the_module_whose_sizes_it_has(graph: ExecutionGraph) -> None:
    """Of every width the backward products are in the module of the forward ones, also run again or used twice."""
    found = with_backward_modules(graph)
    ops = found.ops
    forward: dict[int, set[str]] = {}
    backward: dict[int, set[str]] = {}
    for row in np.flatnonzero((ops.kind == OpKind.OPERATION) & (ops.step >= 0)).tolist():
        name, shapes = found.string(int(ops.name[row])), found.string(int(ops.shapes[row]))
        for width in WIDTHS:
            if name in ("aten::addmm", "aten::mm") and str(width) in shapes:
                side = backward if name == "aten::mm" else forward
                side.setdefault(width, set()).add(found.string(int(ops.module[row])))
    assert set(forward) == set(WIDTHS)
    assert backward == forward
    assert all(len(modules) == 2 for modules in forward.values())


def test_the_breakdown_by_module_has_the_backward_pass(graph: ExecutionGraph) -> None:
    modules = breakdown(replay([graph])).total().modules
    own, ops = exclusive_time(graph), with_backward_modules(graph).ops
    ns = np.bincount(own.op, weights=own.end_ns - own.start_ns, minlength=len(ops))
    linear = np.array([module >= 0 and "Linear" in graph.string(module) for module in ops.module.tolist()])
    forward, backward = (ns[linear & (ops.step >= 0) & (ops.phase == phase)].sum()
                         for phase in (Phase.FORWARD, Phase.BACKWARD))
    assert min(forward, backward) > 0
    assert sum(each.host_ns for each in modules if "Linear" in each.module) == pytest.approx(forward + backward)


def test_the_advice_fits_what_was_recorded(tmp_path: Path, graph: ExecutionGraph) -> None:
    """The capture had with_modules on, which names no module of an eager model; stacks do."""
    _record(tmp_path / "plain", stacks=False)
    plain = read_job(tmp_path / "plain").graphs[0]
    assert plain.meta.profiler_flags["with_modules"]
    (note,) = [note for note in breakdown(replay([plain])).notes if "modules" in note]
    assert "record with with_stack=True" in note
    assert "with_modules=True names those of TorchScript alone" in note
    assert not any("modules" in note for note in breakdown(replay([graph])).notes)
