"""The largest batch that fits: neighbours were traced, and the next one does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from report_support import own_program
from said import Run

import foretrace
import graph_predictor.request.program_memory as module
from graph_predictor.prediction.scenario import EditError
from graph_predictor.request.memory_fit import CONTEXT
from graph_predictor.request.program_memory import _largest, fit_batch
from tracer.graph import ExecutionGraph
from tracer.job import read_job

pytest.importorskip("torch")
BERT = Path(__file__).resolve().parents[2] / "traces" / "bert-cpu"


@pytest.mark.parametrize("begin", [1, 90, 5000])
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
    found = fit_batch(graph, "t4", sizes=["depth=1", "seq=8"], limit_bytes=2e9, first=4400)
    sizes = list(found.tried)
    assert found.fits is not None and found.may_fit is not None and found.fits <= found.may_fit
    assert {found.fits, found.fits + 1, found.may_fit, found.may_fit + 1} <= set(sizes) and sizes == sorted(sizes)
    assert found.tried[found.may_fit].account.total <= 2e9 < found.tried[found.may_fit + 1].account.total
    assert found.tried[found.fits].high <= 2e9 < found.tried[found.fits + 1].high
    assert list(found.to_pandas()["batch"]) == sizes and f"batch {found.fits:,} fits" in repr(found)
    none = fit_batch(graph, "t4", sizes=["depth=1"], limit_bytes=CONTEXT, first=1)
    assert none.fits is None and none.may_fit is None and "no batch fits" in none.headline()


def holding(graph: ExecutionGraph, memory: dict[str, int]) -> ExecutionGraph:
    return replace(graph, meta=replace(graph.meta, memory=memory))


def test_the_command(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    def traced(graph: ExecutionGraph, sizes: dict[str, int], *others: object) -> ExecutionGraph:
        asked.append(sizes)
        return holding(graph, {"peak": sizes["batch"] << 20, "activations": sizes["batch"] << 20})

    asked: list[dict[str, int]] = []
    monkeypatch.setattr(module, "trace_again", traced)
    found = run("fit-batch", BERT, "--device", "a100-sxm-40g", "--set", "seq=32", "--memory-limit", "1GiB",
                "--json").json
    assert all(sizes["seq"] == 32 for sizes in asked) and found["fits"] < found["may_fit"]
    assert found["limit_bytes"] == 1 << 30 and found["fits"] in [row["batch"] for row in found["tried"]]


def test_memory_of_a_program_of_ones_own(tmp_path: Path, run: Run) -> None:
    said = run("memory", own_program(tmp_path), "--set", "batch=16", "--device", "a100-sxm-40g")
    assert said.code == 0
    assert "Peak predicted" in said.out
    assert "parameters" in said.out


def test_what_cannot_be_told_is_refused(run: Run) -> None:
    graph = read_job(BERT).graphs[0]
    with pytest.raises(EditError, match="the size that is sought"):
        foretrace.fit_batch(graph, "t4", sizes=["batch=3"])
    graph.meta.workload = {}
    with pytest.raises(EditError, match="nothing says where that is"):
        fit_batch(graph, "t4")
    done = run("memory", BERT.parent / "cpu-small" / "kineto.json.gz")
    assert done.code == 2
    assert "says nothing of memory" in done.err


@pytest.mark.parametrize(("held", "said"), [
    ({}, "keeps nothing in the memory of h100-sxm, as its model stayed on the CPU"),
    ({"peak": 1000, "parameters": 1000}, "the step's memory hardly grows with batch")])
def test_what_a_size_does_not_fill_is_no_answer(held: dict[str, int], said: str,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "trace_again", lambda graph, *_: holding(graph, held))
    with pytest.raises(EditError, match=said):
        fit_batch(read_job(BERT).graphs[0], "h100-sxm")
