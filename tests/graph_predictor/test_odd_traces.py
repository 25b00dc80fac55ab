"""Readable traces of an odd history: every command answers, or refuses in one sentence."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from micro import Micro
from said import Run

from tracer.guard import MOST_RANKS
from tracer.job import read_job
from tracer.ranks import rank_in_name


def one_product() -> Micro:
    trace = Micro().calibrate().step(1000, 1300).op("aten::mm", 1010, 1040)
    trace.launch(1020, 5, (7, 1030, 100))
    trace.call("cudaDeviceSynchronize", 1050, 90)
    return trace


def without_operations() -> Micro:
    trace = Micro().step(0, 100, 1).step(100, 230, 2)
    trace.orphan(7, 20, 30)
    return trace


def kernel_before_its_launch() -> Micro:
    trace = one_product()
    trace.launch(1200, 5, (7, 1150, 20))
    trace.launch(1250, 5, (9, 900, 20))
    return trace


def a_step_inside_a_synchronisation() -> Micro:
    trace = one_product()
    trace.launch(1310, 5, (7, 1320, 900))
    trace.call("cudaDeviceSynchronize", 1330, 900)
    return trace.step(1400, 1600, 2)


def long_numbers() -> Micro:
    trace = one_product()
    for name in ("Ev Idx", "Sequence number", "Input Dims", "correlation"):
        trace.events[-2]["args"][name] = int("9" * 4000)
    trace.metadata["baseTimeNanoseconds"] = int("9" * 4000)
    return trace


ODD = {"no operations": without_operations, "a kernel before its launch": kernel_before_its_launch,
       "steps of no length": lambda: one_product().step(1300, 1300, 2).step(1300, 1300, 3),
       "a step inside a synchronisation": a_step_inside_a_synchronisation, "long numbers": long_numbers}
COMMANDS = (["replay", "IN"], ["replay", "IN", "--timeline", "OUT"], ["breakdown", "IN"], ["diff", "IN", "OTHER"],
            ["diff", "OTHER", "IN"], ["inspect", "IN"], ["opportunities", "IN"], ["predict", "IN", "--clock", "2"],
            ["overheads", "IN"], ["comm", "report", "IN"])


@pytest.mark.parametrize("make", ODD.values(), ids=ODD)
def test_an_odd_trace_is_answered_or_refused(tmp_path: Path, run: Run, make: Callable[[], Micro]) -> None:
    names = {"IN": make().write(tmp_path / "in.json"), "OTHER": one_product().write(tmp_path / "other.json"),
             "OUT": tmp_path / "timeline.json"}
    for command in COMMANDS:
        code, out, errors = run(*(names.get(word, word) for word in command))
        assert code in (0, 2), (command, errors)
        assert out if code == 0 else errors.startswith("foretrace: ") and errors.count("\n") == 1, command
        assert "bug of foretrace" not in errors


@pytest.mark.parametrize("arguments", [
    ["replay", "IN", "--scale-kernels", "1e15"], ["replay", "HOST", "--scale-kernels", "1e20"],
    ["predict", "IN", "--kernels", "1e18"],
    ["predict", "IN", "--host", "1e15"], ["predict", "IN", "--host", "1e308"],
    ["predict", "IN", "--straggler", "0:1e308%"],
    ["comm", "predict", "all_reduce", "--bytes", "1MiB", "--topology", "dgx-h100x4", "--oversubscription", "1e308"]])
def test_factors_beyond_all_times_are_refused(tmp_path: Path, run: Run, arguments: list[str]) -> None:
    host = Micro().step(100, 500).op("aten::relu", 110, 480)
    names = {"IN": one_product().write(tmp_path / "in.json"), "HOST": host.write(tmp_path / "host.json")}
    code, out, errors = run(*(names.get(word, word) for word in arguments))
    assert code == 2 and not out and errors.count("\n") == 1


def test_no_rank_is_taken_from_a_date_or_a_host_and_no_world_that_cannot_be(tmp_path: Path) -> None:
    dated = "node-20240115_77.1700000000.pt.trace.json"
    assert [rank_in_name(name) for name in (dated, "rank3.json", "worker131072.json")] == [-1, 3, -1]
    job = read_job(one_product().write(tmp_path / dated))
    assert job.world_size == 1
    assert job.missing_ranks in ([], [0])
    for world, believed in ((30_000_000, 1), (MOST_RANKS, MOST_RANKS)):
        job = read_job(Micro(rank=0, world_size=world).calibrate().write(tmp_path / "rank0.json"))
        assert job.world_size == believed
        assert len(job.missing_ranks) == believed - 1
        assert any(str(world) in note for note in job.graphs[0].meta.loss.notes) is (believed == 1)


def test_streams_beyond_those_a_process_has_are_left_out_and_said(tmp_path: Path) -> None:
    trace = one_product()
    for stream in range(20_000):
        trace.orphan(100 + stream, 1000 + stream / 1000, 1)
    graph = trace.read(tmp_path)
    assert len(set(graph.kernels.stream.tolist())) == 4096 and len(graph.kernels) > 4096
    assert any("streams beyond the first 4,096" in note for note in graph.meta.loss.notes)


def test_a_gzip_of_tiny_events_is_not_read_to_its_end(tmp_path: Path) -> None:
    head = json.dumps(one_product().document())[:-2].encode()
    path = tmp_path / "tiny.json.gz"
    path.write_bytes(gzip.compress(head + b',{"ph":"i"}' * 3_000_000 + b"]}"))
    graph = read_job(path).graphs[0]
    assert graph.meta.loss.events_read < 2_500_000
    assert len(graph.ops) == 3
    assert any("an event for every" in note for note in graph.meta.loss.notes)
