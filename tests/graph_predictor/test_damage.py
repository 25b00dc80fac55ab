"""What was lost when reading is told by everything that rests on the traces."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from micro import Micro

from graph_predictor import replay
from graph_predictor.recorded.facts import by_rank, damage_notes
from tracer.errors import GraphFileError, TraceError
from tracer.graph import ExecutionGraph
from tracer.job import read_job
from tracer.kineto import read_kineto


def two_kernels() -> Micro:
    """Two operations, each with a kernel."""
    trace = Micro().op("aten::mm", 0, 50).op("aten::add", 60, 100)
    for start, kernel in ((10, (7, 20, 30)), (70, (7, 80, 10))):
        trace.launch(start, 5, kernel)
    return trace


def cut(trace: Micro, folder: Path) -> Path:
    """The trace's file without its end."""
    path = trace.write(folder / "cut.json")
    path.write_bytes(path.read_bytes()[:-60])
    return path


def test_a_cut_file_says_so_in_a_replay(tmp_path: Path) -> None:
    assert not damage_notes([two_kernels().read(tmp_path)])
    graphs = read_job(cut(two_kernels(), tmp_path)).graphs
    assert graphs[0].meta.loss.truncated_bytes > 0
    assert damage_notes(graphs)
    assert set(damage_notes(graphs)) <= set(replay(graphs).notes)
    assert by_rank([(0, "a"), (1, "a"), (1, "b")], 2) == ["a", "Rank 1: b"]
    # What is left may be the host's alone; it is not called a run on a CPU.
    lost = Micro().op("aten::mm", 0, 50).op("aten::add", 60, 100).device_work(7, 20, 30, 1)
    notes = read_kineto(cut(lost, tmp_path)).meta.loss.notes
    assert any("no GPU work" in note and "lost" in note for note in notes)
    assert not any("CPU run" in note for note in notes)


def test_unknown_categories_are_counted(tmp_path: Path) -> None:
    trace = two_kernels()
    trace.events.append({**trace.events[0], "name": "x", "cat": "quantum_op"})
    graph = trace.read(tmp_path)
    assert any("1 events were left out" in note and "quantum_op" in note for note in graph.meta.loss.notes)
    assert damage_notes([graph])


def test_a_lone_surrogate_does_not_lose_the_kernel(tmp_path: Path) -> None:
    path = two_kernels().write(tmp_path / "surrogate.json")
    path.write_text(path.read_text(encoding="utf-8").replace('"gemm"', '"ge\\ud800mm \\ud83d\\ude00"'),
                    encoding="utf-8")
    graph = read_kineto(path)
    assert (len(graph.kernels), graph.meta.loss.repaired_events) == (2, 2)
    assert graph.string(int(graph.kernels.name[0])) == "ge\ufffdmm \U0001f600"


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(TraceError, match="a pipe or a device, not a file"):
        read_job(tmp_path / "pipe.json")
    two_kernels().write(tmp_path / "trace.json")
    assert len(read_job(tmp_path).graphs) == 1  # one found in a directory is passed over


def test_work_without_launches_keeps_its_pauses(tmp_path: Path) -> None:
    """Nobody recorded why the second kernel began a millisecond later: it is external, and that is told.

        stream 7   ## 10-110 ##                         ## 1110-1210 ##
    """
    result = replay(Micro().device_work(7, 10, 100, 1).device_work(7, 1110, 100, 2).read(tmp_path))
    assert result.steps[0].replayed_ns == result.steps[0].measured_ns == 1_200_000
    assert any("external events" in note for note in result.notes)


def test_a_saved_kind_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    graph = two_kernels().read(tmp_path)
    graph.kernels.kind[0] = 99
    graph.save(tmp_path / "graph.foretrace")
    with pytest.raises(GraphFileError, match=r"kernels\.kind"):
        ExecutionGraph.load(tmp_path / "graph.foretrace")
