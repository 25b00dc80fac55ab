"""The largest batch that fits: neighbours were traced, and the next one does not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import foretrace
import graph_predictor.request.program_memory as module
from foretrace.commands import app
from graph_predictor.prediction.scenario import EditError
from graph_predictor.request.memory_fit import CONTEXT
from graph_predictor.request.program_memory import _largest, fit_batch
from tracer.graph import ExecutionGraph
from tracer.job import read_job

pytest.importorskip("torch")
BERT = Path(__file__).resolve().parents[2] / "traces" / "bert-cpu"
PROGRAM = '''
import torch

def build(batch=4, width=256):
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, width)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.zeros(batch, width).cuda()
    def step():
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return step
'''


@pytest.mark.parametrize("begin", [1, 7, 90, 5000])
@pytest.mark.parametrize(("fixed", "each", "curve"), [(100, 10, 0.0), (0, 1, 0.0), (500, 3, 0.001), (1001, 1, 0.0)])
def test_the_search_ends_at_the_last_that_fits(begin: int, fixed: float, each: float, curve: float) -> None:
    tried: list[int] = []

    def needed(size: int) -> float:
        tried.append(size)
        return fixed + each * size + curve * size * size

    found = _largest(needed, 1000.0, begin)
    want = max((size for size in range(1, 2000) if fixed + each * size + curve * size * size <= 1000), default=None)
    assert found == want and len(tried) <= (9 if not curve else 16)
    assert (found or 0) + 1 in tried


def test_of_a_capture(tmp_path: Path) -> None:
    graph = read_job(BERT).graphs[0]
    found = fit_batch(graph, "t4", sizes=["depth=1"], limit_bytes=2e9)
    sizes = list(found.tried)
    assert found.fits is not None and found.may_fit is not None and found.fits <= found.may_fit
    assert {found.fits, found.fits + 1, found.may_fit, found.may_fit + 1} <= set(sizes) and sizes == sorted(sizes)
    assert found.tried[found.may_fit].account.total <= 2e9 < found.tried[found.may_fit + 1].account.total
    assert found.tried[found.fits].high <= 2e9 < found.tried[found.fits + 1].high
    assert list(found.to_pandas()["batch"]) == sizes and f"batch {found.fits:,} fits" in repr(found)
    none = fit_batch(graph, "t4", sizes=["depth=1"], limit_bytes=CONTEXT, first=1)
    assert none.fits is None and none.may_fit is None and "no batch fits" in none.headline()


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def traced(graph: ExecutionGraph, sizes: dict[str, int], *others: object) -> ExecutionGraph:
        asked.append(sizes)
        meta = replace(graph.meta, memory={"peak": sizes["batch"] << 20, "activations": sizes["batch"] << 20})
        return replace(graph, meta=meta)

    asked: list[dict[str, int]] = []
    monkeypatch.setattr(module, "trace_again", traced)
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    done = CliRunner().invoke(app, ["fit-batch", str(BERT), "--device", "a100-sxm-40g", "--set", "seq=32",
                                    "--memory-limit", "1GiB", "--json"])
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert all(sizes["seq"] == 32 for sizes in asked) and found["fits"] < found["may_fit"]
    assert found["limit_bytes"] == 1 << 30 and found["fits"] in [row["batch"] for row in found["tried"]]
    monkeypatch.undo()
    said = CliRunner().invoke(app, ["memory", f"{script}:build", "--set", "batch=16", "--device", "a100-sxm-40g"])
    assert said.exit_code == 0 and "Peak predicted" in said.stdout and "parameters" in said.stdout


def test_what_cannot_be_told_is_refused(tmp_path: Path) -> None:
    graph = read_job(BERT).graphs[0]
    graph.meta.workload = {}
    with pytest.raises(EditError, match="nothing says where that is"):
        fit_batch(graph, "t4")
    with pytest.raises(EditError, match="the size that is sought"):
        foretrace.fit_batch(read_job(BERT).graphs[0], "t4", sizes=["batch=3"])
    done = CliRunner().invoke(app, ["memory", str(Path(__file__).resolve().parents[2] / "traces" / "cpu-small" /
                                                  "kineto.json.gz")])
    assert done.exit_code == 2 and "says nothing of memory" in done.stderr


@pytest.mark.parametrize(("held", "said"), [
    ({}, "keeps nothing in the memory of h100-sxm, as its model stayed on the CPU"),
    ({"peak": 1000, "parameters": 1000}, "the step's memory hardly grows with batch")])
def test_what_a_size_does_not_fill_is_no_answer(held: dict[str, int], said: str,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    graph = read_job(BERT).graphs[0]
    monkeypatch.setattr(module, "trace_again", lambda *_: replace(graph, meta=replace(graph.meta, memory=held)))
    with pytest.raises(EditError, match=said):
        fit_batch(graph, "h100-sxm")
