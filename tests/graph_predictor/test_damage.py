"""What was lost when reading is told by everything that rests on the traces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from graph_predictor import replay
from graph_predictor.recorded.facts import by_rank, damage_notes
from tracer.errors import GraphFileError, TraceError
from tracer.graph import ExecutionGraph
from tracer.job import read_job
from tracer.kineto import read_kineto


def write(path: Path, events: list[dict[str, object]]) -> Path:
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}), encoding="utf-8")
    return path


def op(name: str, ts: float, dur: float) -> dict[str, object]:
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": dur, "args": {}}


def kernel(ts: float, dur: float, correlation: int, name: str = "gemm") -> dict[str, object]:
    return {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": ts, "dur": dur,
            "args": {"device": 0, "stream": 7, "correlation": correlation}}


def call(ts: float, dur: float, correlation: int) -> dict[str, object]:
    return {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1, "ts": ts, "dur": dur,
            "args": {"correlation": correlation}}


EVENTS = [op("aten::mm", 0, 50), call(10, 5, 1), kernel(20, 30, 1), op("aten::add", 60, 40), call(70, 5, 2),
          kernel(80, 10, 2)]


def test_a_cut_file_says_so_in_a_replay(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.json", EVENTS)
    cut = tmp_path / "cut.json"
    cut.write_bytes(whole.read_bytes()[:-60])
    assert not damage_notes(read_job(whole).graphs)
    graphs = read_job(cut).graphs
    assert graphs[0].meta.loss.truncated_bytes > 0
    assert damage_notes(graphs)
    assert set(damage_notes(graphs)) <= set(replay(graphs).notes)


def test_a_cpu_run_is_not_blamed_for_what_was_cut_off(tmp_path: Path) -> None:
    events = [op("aten::mm", 0, 50), op("aten::add", 60, 40), kernel(20, 30, 1)]
    cut = tmp_path / "cut.json"
    cut.write_bytes(write(tmp_path / "whole.json", events).read_bytes()[:-60])
    notes = read_kineto(cut).meta.loss.notes
    assert any("no GPU work" in note and "lost" in note for note in notes)
    assert not any("CPU run" in note for note in notes)


def test_unknown_categories_are_counted(tmp_path: Path) -> None:
    graph = read_kineto(write(tmp_path / "odd.json", [*EVENTS[:3], {**op("x", 60, 5), "cat": "quantum_op"}]))
    assert any("1 events were left out" in note and "quantum_op" in note for note in graph.meta.loss.notes)
    assert damage_notes([graph])


def test_a_lone_surrogate_does_not_lose_the_kernel(tmp_path: Path) -> None:
    path = write(tmp_path / "surrogate.json", EVENTS)
    path.write_text(path.read_text(encoding="utf-8").replace('"gemm"', '"ge\\ud800mm \\ud83d\\ude00"'),
                    encoding="utf-8")
    graph = read_kineto(path)
    assert len(graph.kernels) == 2
    assert graph.string(int(graph.kernels.name[0])) == "ge\ufffdmm \U0001f600"
    assert graph.meta.loss.repaired_events == 2


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(TraceError, match="a pipe or a device, not a file"):
        read_job(tmp_path / "pipe.json")
    write(tmp_path / "trace.json", EVENTS)
    assert len(read_job(tmp_path).graphs) == 1  # one found in a directory is passed over


def test_work_without_launches_keeps_its_pauses(tmp_path: Path) -> None:
    """Nobody recorded why the second kernel began a millisecond later: it is external, and that is told.

        stream 7   ## 10-110 ##                         ## 1110-1210 ##
    """
    graphs = read_job(write(tmp_path / "gpu.json", [kernel(10, 100, 1), kernel(1110, 100, 2)])).graphs
    result = replay(graphs)
    assert result.steps[0].replayed_ns == result.steps[0].measured_ns == 1_200_000
    assert any("external events" in note for note in result.notes)


def test_a_saved_kind_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    graph = read_kineto(write(tmp_path / "trace.json", EVENTS))
    graph.kernels.kind[0] = 99
    graph.save(tmp_path / "graph.foretrace")
    with pytest.raises(GraphFileError, match=r"kernels\.kind"):
        ExecutionGraph.load(tmp_path / "graph.foretrace")


def test_notes_name_their_ranks() -> None:
    assert by_rank([(0, "a"), (1, "a"), (1, "b")], 2) == ["a", "Rank 1: b"]
