"""Files of other programs that claim more than they hold: an answer or one sentence, from bounded structures.

How long they take and how much memory is in ``benchmarks/amplification.py`` and in the fuzzer's judge.
"""

from __future__ import annotations

import json
import pickle
import sqlite3
from pathlib import Path
from typing import Any

import lying_files as lies
import pytest
from kineto_support import event, op, write
from other_profilers import SHIFT
from said import Run

from tracer.errors import ForetraceError, TraceError
from tracer.graph import ExecutionGraph
from tracer.guard import (
    MOST_DEPTH,
    MOST_NAME,
    DecodeError,
    NameBudget,
    RowBudget,
    check_cells,
    check_key,
    parse_xml,
    well_formed,
)
from tracer.kineto import read_kineto
from tracer.memory_snapshot import SnapshotError, snapshot_timeline


def text_of(graph: ExecutionGraph) -> int:
    """Characters of all of a graph's strings."""
    return sum(map(len, graph.strings))


def test_modules_nested_without_end_count_for_the_deepest_that_is_kept(tmp_path: Path) -> None:
    lies.nested_modules(tmp_path / "a.json.gz")
    graph = read_kineto(tmp_path / "a.json.gz")
    operation = next(i for i in range(len(graph.ops)) if graph.string(int(graph.ops.name[i])) == "aten::mm")
    assert graph.string(int(graph.ops.module[operation])) == "/".join(f"L_{i}" for i in range(MOST_DEPTH))
    assert text_of(graph) < 2_000_000
    folded = lies.NESTED - MOST_DEPTH
    assert any(note.startswith(f"{folded:,} calls of modules lie deeper") for note in graph.meta.loss.notes)


def test_modules_of_long_names_take_bounded_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = [event("python_function", f"nn.Module: L_{i}", 2 * i + 1, 1) for i in range(100)]
    path = write(tmp_path, [event("python_function", "nn.Module: " + "n" * 1000, 0, 1000), *modules,
                            op("aten::mm", 199.1, 0.5)], "a.json.gz")
    assert read_kineto(path).strings[-1] == "n" * 1000 + "/L_99"
    monkeypatch.setattr("tracer.kineto.modules.FREE_TEXT", 10_000)
    graph = read_kineto(path)
    assert graph.string(int(graph.ops.module[0])) == "n" * 1000 and text_of(graph) < 20_000


@pytest.mark.parametrize(("name", "write"), [
    ("name.sqlite", lies.long_name_nsys), ("name.json", lies.long_name_rocprof)])
def test_a_long_name_in_many_rows_is_kept_once(name: str, write: Any, tmp_path: Path) -> None:
    write(tmp_path / name, 2_000_000)
    graph = read_kineto(tmp_path / name)
    assert len(graph.kernels) == lies.ROWS
    assert {graph.string(code) for code in set(graph.kernels.name.tolist())} == {"k" * (MOST_NAME - 1) + "…"}
    assert text_of(graph) < 2 * MOST_NAME + 1000
    assert any(f"names are longer than {MOST_NAME:,} characters" in note for note in graph.meta.loss.notes)


def test_stacks_that_events_share_are_looked_at_once(tmp_path: Path) -> None:
    lies.shared_frames(tmp_path / "a.pickle")
    found = snapshot_timeline(tmp_path / "a.pickle")
    assert found.peak_bytes == 512 * lies.SHARED and found.places == {"b0.py:0 f0": 512 * lies.SHARED}


def test_a_key_of_tuples_without_end_is_a_sentence(tmp_path: Path, run: Run) -> None:
    lies.nested_key(tmp_path / "a.pickle")
    ran = run("memory", tmp_path / "a.pickle")
    said = " ".join(ran.err.split())
    assert ran.code == 2 and "a.pickle is no snapshot of CUDA memory: it has a tuple as a dictionary's key" in said
    for protocol in (0, 2, 4):
        content = {"segments": [], "x": {(1, 2): 3}, "y": {4: 5, 6: 7}}
        (tmp_path / "b.pickle").write_bytes(pickle.dumps(content, protocol))
        with pytest.raises(SnapshotError, match="a tuple as a dictionary's key"):
            snapshot_timeline(tmp_path / "b.pickle")


@pytest.mark.parametrize("event", [
    {"size": 1 << 62}, {"size": 10**400}, {"time_us": 1 << 62}, {"addr": -(1 << 80)}, {"frames": [{"filename": []}]},
    {"frames": [{"filename": "\ud800.py", "name": "\ud800" * 300}]}])
def test_odd_figures_of_a_snapshot_are_none(event: dict[str, Any], tmp_path: Path) -> None:
    events = [{"action": "alloc", "addr": 512 * i, "size": 512, "time_us": i, "frames": []} | event for i in range(4)]
    (tmp_path / "a.pickle").write_bytes(pickle.dumps({"segments": [], "device_traces": [events]}))
    found = snapshot_timeline(tmp_path / "a.pickle")
    assert found.peak_bytes in (0, 2048)
    json.dumps(found.to_json()).encode()
    (tmp_path / "a.pickle").write_bytes(pickle.dumps({"segments": [{"device": 0, "allocated_size": 1 << 49}] * 10_000}))
    with pytest.raises(ForetraceError, match="more bytes than a number of 64 bits"):
        snapshot_timeline(tmp_path / "a.pickle")


def an_export(path: Path, *statements: str) -> Path:
    lies.long_name_nsys(path, 10, 100)
    file = sqlite3.connect(path)
    for statement in statements:
        file.execute(statement)
    file.commit()
    file.close()
    return path


def test_cells_of_an_export_that_are_no_numbers_or_no_text(tmp_path: Path) -> None:
    graph = read_kineto(an_export(
        tmp_path / "a.sqlite", "ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL ADD COLUMN staticSharedMemory DEFAULT 'many'",
        "ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL ADD COLUMN dynamicSharedMemory DEFAULT 9223372036854775807",
        "UPDATE StringIds SET value = CAST(x'6bff6b' AS TEXT)", "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET streamId = 'x' "
        "WHERE correlationId = 7", "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (-9223372036854775808, "
        f"9223372036854775807, {5 * SHIFT}, 1, 1)"))
    assert len(graph.kernels) == 99 and len(graph.launches) == 100 and graph.meta.loss.dropped_events == 1
    assert graph.string(int(graph.kernels.name[0])) == "k\ufffdk"


@pytest.mark.parametrize(("statements", "says"), [
    (["PRAGMA writable_schema = ON", "UPDATE sqlite_master SET name = x'ff', rootpage = NULL"],
     "cannot be read|without CUDA"),
    (["CREATE TABLE NVTX_EVENTS (start, end, eventType, globalTid)", *(
        [f"INSERT INTO NVTX_EVENTS VALUES (1, 2, 59, {5 * SHIFT})"] * 1000),
      f"ALTER TABLE NVTX_EVENTS ADD COLUMN text TEXT DEFAULT '{'x' * 100_000}'"],
     "names together are longer than the file")])
def test_an_export_that_lies_is_a_sentence(statements: list[str], says: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=says):
        read_kineto(an_export(tmp_path / "a.sqlite", *statements))


@pytest.mark.parametrize("value", ["1", "[" * 3000 + "]" * 3000, '"\ud800"', "9" * 400])
def test_odd_values_of_rocprof_are_a_sentence_and_names_that_are_no_utf8_mended(value: str, tmp_path: Path) -> None:
    text = ('{"rocprofiler-sdk-tool": [{"buffer_records": {"hip_api": [{"start_timestamp": 1, "end_timestamp": 2, '
            f'"operation": "hip\udcff"}}]}}, "more": {value}}}]}}')
    (tmp_path / "a.json").write_bytes(text.encode("utf-8", "surrogatepass").replace(b"\xed\xb3\xbf", b"\xff"))
    try:
        graph = read_kineto(tmp_path / "a.json")
        assert graph.string(int(graph.launches.name[0])) == "hip\ufffd"
    except TraceError as error:
        assert value != "1" and "cannot be read as rocprofv3's results" in str(error)


def test_limits() -> None:
    names = NameBudget(0)
    names.count(64 << 20)
    with pytest.raises(DecodeError, match="longer than the file"):
        names.kept("a")
    budget = RowBudget(80_000)
    budget.take(10_000)
    with pytest.raises(DecodeError, match="more rows"):
        budget.take(1)
    check_cells(100, 1000, 0)
    with pytest.raises(DecodeError, match="more than measurements"):
        check_cells(101, 1000, 0)
    assert well_formed("a\ud800b") == "a?b" and well_formed("abc", 2) == "a…"
    assert parse_xml("<a b='1'/>").get("b") == "1"
    for text in ("", "<a>" * (MOST_DEPTH + 1) + "</a>" * (MOST_DEPTH + 1), "<a b='\0'/>", "<!DOCTYPE a><a/>"):
        with pytest.raises(DecodeError):
            parse_xml(text)


@pytest.mark.parametrize("row", [
    "INSERT INTO StringIds VALUES (7, char(0) || hex(zeroblob(1000)))",
    "INSERT INTO TARGET_INFO_GPU (id, name) VALUES (0, hex(zeroblob(1000)))",
    "INSERT INTO NVTX_EVENTS (start, end, eventType, text) VALUES (1, 2, 59, char(0) || hex(zeroblob(1000)))"])
def test_what_texts_have_in_the_file_counts(row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite reads all of a text, also what lies behind a zero or is cut; rows of a damaged file may share it."""
    file = sqlite3.connect(tmp_path / "a.sqlite")
    file.executescript("CREATE TABLE StringIds (id, value); CREATE TABLE TARGET_INFO_GPU (id, name); CREATE TABLE "
                       "CUPTI_ACTIVITY_KIND_RUNTIME (start, end, globalTid, correlationId, nameId); CREATE TABLE "
                       "NVTX_EVENTS (start, end, eventType, text, globalTid DEFAULT 0); INSERT INTO "
                       "CUPTI_ACTIVITY_KIND_RUNTIME VALUES (1, 2, 0, 1, 0);" + row)
    file.close()
    assert len(read_kineto(tmp_path / "a.sqlite").launches) == 1
    monkeypatch.setattr("tracer.guard.NAME_TEXT_A_BYTE", 0)
    monkeypatch.setattr("tracer.guard.FREE_TEXT", 1500)
    with pytest.raises(TraceError, match="its names together are longer than the file"):
        read_kineto(tmp_path / "a.sqlite")


def test_a_key_of_many_digits_is_refused() -> None:
    """Its hash is computed each time that it is a key."""
    with pytest.raises(DecodeError, match="more than three hundred digits"):
        check_key(1 << 2000)
