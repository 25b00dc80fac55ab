"""Backward operations get the module of their forward operation: a real capture, with a checkpoint, a shared module."""

from __future__ import annotations

from collections import defaultdict
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


def _record(out: Path, *, stacks: bool) -> ExecutionGraph:
    torch = pytest.importorskip("torch")
    from torch.utils.checkpoint import checkpoint

    import tracer

    nn = torch.nn
    blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, width), nn.GELU(), nn.Linear(width, 32))
                           for width in WIDTHS)

    class Net(nn.Module):  # type: ignore[misc, name-defined]
        def forward(self, x: Any) -> Any:
            first, second, third, shared = self.blocks
            x = x + checkpoint(second, first(x), use_reentrant=False)
            return shared(shared(third(x)))

    model = Net()
    model.blocks = blocks
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.randn(64, 32)
    with tracer.capture(out, steps=2, warmup=2, timed=2, stacks=stacks, execution_trace="none") as capture:
        while not capture.finished:
            optimizer.zero_grad()
            model(data).square().mean().backward()
            optimizer.step()
            capture.step()
    return read_job(out).graphs[0]


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> ExecutionGraph:
    return _record(tmp_path_factory.mktemp("modules") / "capture", stacks=True)


def test_all_that_runs_backward_but_the_loss_has_a_module(graph: ExecutionGraph) -> None:
    backward = (graph.ops.phase == Phase.BACKWARD) & (graph.ops.kind == OpKind.OPERATION)
    assert (graph.ops.module[backward] >= 0).mean() < 0.5
    without = set()
    for row in np.flatnonzero(backward & (with_backward_modules(graph).ops.module < 0)).tolist():
        outermost = row
        while (above := int(graph.ops.parent[outermost])) >= 0 and backward[above]:
            outermost = above
        without.add(graph.string(int(graph.ops.name[outermost])))
    assert without == LOSS


def test_each_product_belongs_to_the_module_whose_sizes_it_has(graph: ExecutionGraph) -> None:
    """Of every width the backward products are in the module of the forward ones, also run again or used twice."""
    found = with_backward_modules(graph)
    ops = found.ops
    modules: dict[str, dict[int, set[str]]] = {"aten::addmm": defaultdict(set), "aten::mm": defaultdict(set)}
    for row in np.flatnonzero((ops.kind == OpKind.OPERATION) & (ops.step >= 0)).tolist():
        name, shapes = found.string(int(ops.name[row])), found.string(int(ops.shapes[row]))
        for width in WIDTHS:
            if name in modules and str(width) in shapes:
                modules[name][width].add(found.string(int(ops.module[row])))
    forward, backward = modules.values()
    assert set(forward) == set(WIDTHS)
    assert backward == forward
    assert all(len(each) == 2 for each in forward.values())


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
    plain = _record(tmp_path / "plain", stacks=False)
    assert plain.meta.profiler_flags["with_modules"]
    (note,) = [note for note in breakdown(replay([plain])).notes if "modules" in note]
    assert "record with with_stack=True" in note
    assert "with_modules=True names those of TorchScript alone" in note
    assert not any("modules" in note for note in breakdown(replay([graph])).notes)
