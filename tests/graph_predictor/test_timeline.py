"""The timeline file: valid, complete, side by side, and written whole or not at all."""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from report_support import CPU_SMALL, real_trace, worked_step
from slowly import mostly_slow

from graph_predictor.prediction.replay import Replay, replay
from step_views.reports import timeline as timeline_module
from step_views.reports.timeline import write_timeline
from tracer.errors import ForetraceError
from tracer.job import read_job


def written(result: Replay, path: Path) -> list[dict[str, Any]]:
    write_timeline(result, path)
    return json.loads(path.read_text(encoding="utf-8"))["traceEvents"]


def names(events: list[dict[str, Any]], kind: str) -> dict[Any, str]:
    return {(e["pid"] if kind == "process_name" else (e["pid"], e["tid"])): e["args"]["name"]
            for e in events if e["ph"] == "M" and e["name"] == kind}


def slices(events: list[dict[str, Any]], process: str, category: str) -> list[dict[str, Any]]:
    processes = names(events, "process_name")
    return [e for e in events if e["ph"] == "X" and processes[e["pid"]] == process and e["cat"] == category]


def test_worked_step_side_by_side(tmp_path: Path) -> None:
    events = written(replay(worked_step().read(tmp_path), scale_kernels=2.0), tmp_path / "out.json")
    assert sorted(names(events, "process_name").values()) == ["rank 0 measured", "rank 0 simulated"]

    def at(process: str, category: str, name: str) -> list[tuple[float, float]]:
        return [(e["ts"], e["dur"]) for e in slices(events, process, category) if e["name"] == name]

    measured, simulated = "rank 0 measured", "rank 0 simulated"
    assert at(measured, "step", "ProfilerStep#1") == [(1000, 400)]
    # Step 0 lasts as long: its kernels end before it does, at twice their time too. The sync returns 100 later.
    assert at(simulated, "step", "ProfilerStep#1") == [(1000, 500)]
    assert at(measured, "op", "aten::after") == [(1200, 10)]
    assert at(simulated, "op", "aten::after") == [(1300, 10)]
    assert at(simulated, "op", "aten::inner") == [(1030, 30)]
    assert at(simulated, "call", "cudaDeviceSynchronize") == [(1125, 135)]
    assert at(measured, "kernel", "void [red]mul<4>(float*)") == [(1050, 100)]
    assert at(simulated, "kernel", "void [red]mul<4>(float*)") == [(1050, 200)]
    (kernel,) = [e for e in slices(events, simulated, "kernel") if e["name"].endswith("mul<4>(float*)")]
    assert kernel["args"] == {"op": "aten::inner", "starts after": "its launch"}
    tracks = names(events, "thread_name")
    assert tracks[kernel["pid"], kernel["tid"]] == "stream 7"


def test_arrows_join_launches_and_kernels(tmp_path: Path) -> None:
    events = written(replay(worked_step().read(tmp_path)), tmp_path / "out.json")
    begins = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert len(begins) == len(ends) == 8
    assert begins.keys() == ends.keys()
    kernels = {(e["tid"], e["ts"]) for e in slices(events, "rank 0 simulated", "kernel")}
    calls = {(e["tid"], e["ts"]) for e in slices(events, "rank 0 simulated", "call")}
    assert {(e["tid"], e["ts"]) for e in ends.values()} == kernels
    assert {(e["tid"], e["ts"]) for e in begins.values()} <= calls


def test_hostile_names_fractions_and_overlapping_kernels_survive(tmp_path: Path) -> None:
    hostile = 'a"b\\c\n</script>\x1b[31mé%d'
    trace = worked_step().op(hostile, 1300, 1310).op("aten::short", 1320.123, 1320.456)
    trace.launch(1250, 5, (7, 1260, 30)), trace.launch(1256, 3, (7, 1280, 40))
    result = replay(trace.read(tmp_path))
    events = written(result, tmp_path / "out.json")
    assert [e["dur"] for e in events if e["ph"] == "X" and e["name"].startswith('a"b\\c\n</script>')] == [10, 10]
    assert [(e["ts"], e["dur"]) for e in slices(events, "rank 0 measured", "op") if e["name"] == "aten::short"] == [
        (1320.123, 0.333)]
    assert_slices_nest(events)
    assert "stream 7, overlapping 1" in names(events, "thread_name").values()
    write_timeline(result, tmp_path / "out.json.gz")
    assert gzip.decompress((tmp_path / "out.json.gz").read_bytes()) == (tmp_path / "out.json").read_bytes()


def assert_slices_nest(events: list[dict[str, Any]]) -> None:
    """On one track, of two slices one holds the other or they are apart (kernels, steps; times in whole ns)."""
    by_track: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for e in events:
        if e["ph"] == "X" and e["cat"] in ("kernel", "step"):
            by_track[e["pid"], e["tid"]].append((round(e["ts"] * 1000), round((e["ts"] + e["dur"]) * 1000)))
    for found in by_track.values():
        found.sort()
        for (_, end), (start, _) in pairwise(found):
            assert start >= end


@pytest.mark.real_traces
@pytest.mark.parametrize("name", mostly_slow(["dlrm-8xV100-2023", "resnet50-V100", "vllm-eager-B200", "gpu-only-MI210"],
                                             {"vllm-eager-B200", "gpu-only-MI210"}))
def test_real_timelines_are_complete(name: str, tmp_path: Path) -> None:
    result = replay(read_job(real_trace(name)).graphs)
    events = written(result, tmp_path / "out.json")
    processes = names(events, "process_name")
    found = Counter((processes[e["pid"]].split()[-1], e["cat"]) for e in events if e["ph"] == "X")
    kernels = sum(len(g.kernels) for g in result.graphs)
    assert found["measured", "kernel"] == found["simulated", "kernel"] == kernels
    assert found["measured", "call"] == sum(len(g.launches) for g in result.graphs)
    steps = sum(len(g.steps) for g in result.graphs)
    assert found["measured", "step"] == found["simulated", "step"] == steps
    assert len(processes) == 2 * len(result.graphs)
    named = names(events, "thread_name")
    assert all((e["pid"], e["tid"]) in named for e in events if e["ph"] in "Xsf")
    assert all(e["dur"] >= 0 for e in events if e["ph"] == "X")
    assert_slices_nest(events)
    orders = [e for e in events if e["ph"] == "M" and e["name"] == "thread_sort_index"]
    assert len(orders) == len(named)


def test_a_cpu_trace_shows_its_operations(tmp_path: Path) -> None:
    result = replay(read_job(CPU_SMALL / "kineto.json.gz").graphs)
    events = written(result, tmp_path / "out.json")
    measured, simulated = (slices(events, f"rank 0 {which}", "op") for which in ("measured", "simulated"))
    assert len(measured) == len(simulated) > 9_000
    assert len(slices(events, "rank 0 simulated", "step")) == 5
    # The playback leaves them where they were.
    assert {(e["name"], e["ts"]) for e in measured} == {(e["name"], e["ts"]) for e in simulated}


def test_a_failure_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(result: Replay) -> Iterator[str]:
        yield '{"ph":"X"}'
        raise MemoryError

    result = replay(worked_step().read(tmp_path))
    for name in ("old.json", "old.json.gz"):
        old = tmp_path / name
        write_timeline(result, old)
        before = old.read_bytes()
        with monkeypatch.context() as patched:
            patched.setattr(timeline_module, "timeline_events", failing)
            with pytest.raises(MemoryError):
                write_timeline(result, old)
        assert old.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["micro.json", "old.json", "old.json.gz"]


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    result = replay(worked_step().read(tmp_path))
    for path, why in ((tmp_path, "is a directory"), (tmp_path / "none" / "out.json", "create that directory"),
                      (tmp_path / "micro.json" / "out.json", "cannot be written"),
                      (Path("/dev/full"), "No space left")):
        if path.name != "full" or path.is_char_device():
            with pytest.raises(ForetraceError, match=why):
                write_timeline(result, path)
