"""Device memory: one account of it, and its timeline from the profiler's events, from shapes, and from snapshots that
are only data."""

from __future__ import annotations

import io
import json
import os
import pickle
import pickletools
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_trace import recorded_memory

import tracer.memory_snapshot as snapshot_module
from tracer.device_memory import KINDS, PEAK, Holds, MemoryAccount, binary_size, memory_timeline
from tracer.errors import ForetraceError
from tracer.graph import SHAPE_ONLY, ExecutionGraph, Phase
from tracer.kineto import read_kineto
from tracer.memory_snapshot import SnapshotError, plain_pickle, read_snapshot, snapshot_timeline
from tracer.optimizer_memory import kept_by_optimizer

BYTES = st.integers(0, 1 << 40)


# -- the account -----------------------------------------------------------------------------------------------------


@given(st.dictionaries(st.sampled_from([what.value for what in Holds]), BYTES), BYTES)
def test_the_parts_of_a_traced_step_add_up_to_its_peak(parts: dict[str, int], more: int) -> None:
    peak = sum(parts.values()) + more
    account = MemoryAccount.of_trace({**parts, PEAK: peak, "peak_blocks": 2 * peak, "start": 3})
    assert account.total == peak == sum(account.parts.values())
    assert account.other == parts.get("other", 0) + more


def test_what_does_not_fit_is_one_sentence() -> None:
    account = MemoryAccount(parameters=60e9, activations=30e9)
    assert account.lacking(90e9, "h200-sxm") is None and account.lacking(0, "an unknown device") is None
    assert account.lacking(80e9, "h100-sxm") == (
        "It does not fit: it needs more than the 80 GB of h100-sxm; choose a larger device, a smaller batch, or "
        "recomputation.")
    assert str(MemoryAccount(parameters=1 << 30, optimizer_state=1 << 29)) == (
        "1.50 GiB (parameters 1.00 GiB, optimizer state 512.00 MiB)")
    assert str(MemoryAccount()) == binary_size(0) == "0 B"


# -- the profiler's events ---------------------------------------------------------------------------------------------


def recorded(tmp_path: Path, changes: list[tuple[float, int, int]]) -> ExecutionGraph:
    return read_kineto(recorded_memory(tmp_path, changes))


def test_what_memory_holds_is_told_by_when_it_comes_and_goes(tmp_path: Path) -> None:
    graph = recorded(tmp_path, [(20, 1, 100), (30, 2, 40), (40, 2, -40), (330, 3, 70), (340, 1, -100), (720, 4, 8),
                                (730, 3, -70)])
    assert [Phase(int(graph.ops.phase[op])).name for op in graph.allocations.op] == [
        "FORWARD", "FORWARD", "FORWARD", "BACKWARD", "BACKWARD", "OPTIMIZER", "OPTIMIZER"]
    found = memory_timeline(graph)
    held = {kind: found.held_bytes[KINDS.index(kind)].tolist() for kind in Holds}
    assert held[Holds.ACTIVATIONS] == [100, 100, 100, 100, 0, 0, 0]
    assert held[Holds.TEMPORARIES] == [0, 40, 0, 0, 0, 0, 0]
    assert held[Holds.GRADIENTS] == [0, 0, 0, 70, 70, 70, 0]
    assert held[Holds.OPTIMIZER_STATE] == [0, 0, 0, 0, 0, 8, 8]
    assert set(held[Holds.OTHER]) == {1_000_000}
    assert found.peak_bytes == 1_000_170 and found.time_ns[found.peak_at] == 330_000
    assert found.inferred and found.timed and found.steps == (("ProfilerStep#1", 0, 1_000_000),)
    assert found.places == {"before the window": 1_000_000, "aten::mm": 170}
    assert found.to_pandas("timeline")["total_bytes"].tolist() == found.total_bytes.tolist()
    assert found.at_peak == MemoryAccount(activations=100, gradients=70, other=1_000_000)
    assert "peak 976.73 KiB" in found.headline() and "7 changes" in found.headline()


def test_a_hosts_memory_says_that_it_lacks_what_was_there_before(tmp_path: Path) -> None:
    found = memory_timeline(read_kineto(recorded_memory(tmp_path, [(20, 1, 100), (340, 1, -100)], device=-1)))
    assert found.lacks_earlier and found.earlier_bytes == {} and found.to_json()["lacks_earlier"] is True
    assert "handed out before the window" in found.notes[-1] and "the recording does not tell" in found.notes[-1]
    on_gpu = memory_timeline(recorded(tmp_path, [(20, 1, 100), (340, 1, -100)]))
    assert not on_gpu.lacks_earlier and not any("begin" in note for note in on_gpu.notes)


P = 100 * 32 + 32
LISTS, ONE_LIST = "[[100, 32], [32]]", "[[[100, 32], [32]]]"


@pytest.mark.parametrize(("optimizer", "operations", "states"), [
    ("AdamW", [("aten::_foreach_add_", "[[[], []]]"), ("aten::_foreach_mul_", ONE_LIST),
               ("aten::_foreach_mul_", ONE_LIST), ("aten::_foreach_lerp_", f"[{LISTS}, {LISTS}]"),
               ("aten::_foreach_sqrt", ONE_LIST)], 2),
    ("Adam", [("aten::_fused_adam_", f"[{LISTS}, {LISTS}, {LISTS}, {LISTS}]")], 2),
    ("SGD", [("aten::_foreach_mul_", ONE_LIST), ("aten::_foreach_add_", f"[{LISTS}, {LISTS}]"),
             ("aten::_foreach_add_", f"[{LISTS}, {LISTS}]")], 1),
    ("SGD", [("aten::add_", "[[100, 32], [100, 32]]"), ("aten::add_", "[[32], [32]]")], 0),
    ("SGD", [("aten::_fused_sgd_", f"[{LISTS}, {LISTS}, []]")], 0),
    ("SGD", [("aten::_fused_sgd_", f"[{LISTS}, {LISTS}, {LISTS}]")], 1),
    ("Lion", [("aten::_foreach_add_", f"[{LISTS}, {LISTS}]")], 0)])
def test_an_optimizers_operations_show_what_it_keeps(
        optimizer: str, operations: list[tuple[str, str]], states: int, tmp_path: Path) -> None:
    path = recorded_memory(tmp_path, [(20, 1, 100)], device=-1)
    trace = json.loads(path.read_text())
    annotation = next(each for each in trace["traceEvents"] if each["name"].startswith("Optimizer.step#"))
    annotation["name"] = f"Optimizer.step#{optimizer}.step"
    trace["traceEvents"] = [each for each in trace["traceEvents"] if each["name"] != "aten::add_"]
    for number, (name, shapes) in enumerate(operations):
        sizes = json.loads(shapes)
        types = ["TensorList" if size and isinstance(size[0], list) else "float" for size in sizes]
        trace["traceEvents"].append({"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 1, "ts": 710 + number,
                                     "dur": 0.5, "args": {"Input Dims": sizes, "Input type": types}})
    path.write_text(json.dumps(trace))
    graph = read_kineto(path)
    assert kept_by_optimizer(graph) == (4 * P, 4 * P * states)
    found = memory_timeline(graph)
    assert sum(found.earlier_bytes.values()) == 4 * P * (1 + states)
    assert f"{binary_size(4 * P * (1 + states))} or more (parameters 12.62 KiB" in found.notes[-1]


def test_a_graph_keeps_its_changes_in_a_file(tmp_path: Path) -> None:
    graph = recorded(tmp_path, [(20, 1, 100), (340, 1, -100)])
    graph.save(tmp_path / "a.foretrace")
    again = ExecutionGraph.load(tmp_path / "a.foretrace")
    assert len(again.allocations) == 2 and memory_timeline(again).to_json() == memory_timeline(graph).to_json()
    with pytest.raises(ForetraceError, match=r"No memory of device 3 was recorded; there is that of 0"):
        memory_timeline(graph, 3)


@pytest.mark.real_traces
@pytest.mark.parametrize("device", ["h100", "mi300"])
@pytest.mark.parametrize("model", [
    "gaunernst_bert-small-uncased", "Qwen_Qwen1.5-0.5B-Chat", "google_owlv2-large-patch14-ensemble"])
def test_real_changes_add_up_to_the_recorded_totals(real_trace: Callable[[str], Path], device: str, model: str) -> None:
    graph = read_kineto(real_trace(f"h100-vs-mi300/{device}-{model}.json.gz"))
    found = memory_timeline(graph)
    rows = graph.allocations.device >= 0
    assert np.array_equal(found.total_bytes, graph.allocations.total_bytes[rows])
    assert sum(found.places.values()) == pytest.approx(found.peak_bytes, rel=0.02)


# -- steps traced by shapes --------------------------------------------------------------------------------------------


def test_a_recording_without_changes_says_why(tmp_path: Path) -> None:
    graph = recorded(tmp_path, [])
    with pytest.raises(ForetraceError, match="says nothing of memory: record it with --profile-memory"):
        memory_timeline(graph)
    graph.meta.era, graph.meta.source = SHAPE_ONLY, "train.py:build"
    with pytest.raises(ForetraceError, match=r"train.py:build keeps nothing in the device's memory, as its model"):
        memory_timeline(graph)


def test_a_step_traced_by_shapes_has_the_peak_it_always_had() -> None:
    pytest.importorskip("torch")
    from tracer import workloads
    from tracer.shape_only import trace_workload

    graph = trace_workload(workloads.configure("bert", preset="tiny", vocabulary=20_000), "h100-sxm")
    found = memory_timeline(graph)
    assert found.peak_bytes == graph.meta.memory["peak"] and not found.inferred and not found.timed
    account = MemoryAccount.of_trace(graph.meta.memory)
    assert found.at_peak.parts == account.parts
    assert sum(found.places.values()) == found.peak_bytes
    assert any("/" in place or "." in place for place in found.places)
    assert (found.held_bytes >= 0).all() and found.total_bytes[-1] == graph.meta.memory["end"]


# -- snapshots ---------------------------------------------------------------------------------------------------------


def a_snapshot() -> dict[str, Any]:
    def event(action: str, address: int, size: int, at: int, *frames: tuple[str, int, str]) -> dict[str, Any]:
        return {"action": action, "addr": address, "size": size, "stream": 0, "time_us": at, "pool_id": (0, 0),
                "frames": [{"filename": name, "line": line, "name": function} for name, line, function in frames]}

    forward = ("/code/model.py", 12, "forward"), ("/code/train.py", 40, "main")
    optimizer = ("/x/site-packages/torch/optim/adam.py", 5, "step"), ("/code/train.py", 44, "main")
    history = [event("segment_alloc", 0, 2 << 20, 1), event("alloc", 64, 1000, 2, *forward),
               event("alloc", 2048, 500, 3, *forward), event("free_requested", 2048, 500, 4),
               event("free_completed", 2048, 500, 4, *forward), event("alloc", 4096, 800, 5),
               event("free_completed", 64, 1000, 6), event("alloc", 8192, 16, 7, *optimizer),
               {"action": "oom", "size": 1 << 40, "stream": 0, "device_free": 3, "frames": []}]
    blocks = [{"size": 800, "requested_size": 800, "address": 4096, "state": "active_allocated", "frames": []}]
    return {"segments": [{"device": 0, "address": 0, "total_size": 2 << 20, "allocated_size": 5816, "active_size": 5816,
                          "stream": 0, "segment_type": "small", "segment_pool_id": (0, 0), "blocks": blocks}],
            "device_traces": [history, []], "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "", "x": None, "y": 0.5}}


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_snapshots_of_every_protocol_are_read_as_what_they_are(protocol: int, tmp_path: Path) -> None:
    path, loop = tmp_path / "snapshot.pickle", []
    path.write_bytes(pickle.dumps(a_snapshot(), protocol))
    assert read_snapshot(path) == a_snapshot()
    loop.append(loop)
    path.write_bytes(pickle.dumps({"segments": loop, "device_traces": [loop]}, protocol))
    assert snapshot_timeline(path).peak_bytes == 0  # a value in itself does not hang
    path.write_bytes(pickle.dumps({"something": 1}, protocol))
    with pytest.raises(SnapshotError, match="is no snapshot of CUDA memory"):
        read_snapshot(path)


def test_a_snapshots_history(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(a_snapshot()))
    found = snapshot_timeline(path)
    # 5,816 bytes are there at the end; the history accounts for 816 of them.
    assert found.total_bytes.tolist() == [6000, 6500, 6000, 6800, 5800, 5816]
    assert found.at_peak == MemoryAccount(activations=1000, gradients=800, other=5000)
    assert found.places == {"model.py:12 forward": 1000, "not recorded": 800}
    assert found.time_ns.tolist() == [2000, 3000, 4000, 5000, 6000, 7000]
    assert any("1 allocations failed" in note for note in found.notes)
    without = {**a_snapshot(), "device_traces": []}
    path.write_bytes(pickle.dumps(without))
    assert snapshot_timeline(path).peak_bytes == 5816 and "no history" in snapshot_timeline(path).notes[0]
    with pytest.raises(ForetraceError, match="says nothing of GPU 1"):
        snapshot_timeline(path, 1)


class Evil:
    """A value whose pickle runs a command."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


class Odd:
    pass


@pytest.mark.parametrize("content", [
    {"segments": [Evil(Path("ran"))]}, {"segments": [Odd]}, {"a": Odd()}, {"segments": [{1, 2}]}, [Path("x")],
    {"x": np.zeros(3)}, bytearray(b"x")])
def test_what_could_run_is_refused_and_does_not(content: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        Path("evil.pickle").write_bytes(pickle.dumps(content, protocol))
        with pytest.raises(SnapshotError, match="more than plain values"):
            read_snapshot(Path("evil.pickle"))
    assert not Path("ran").exists()


@pytest.mark.parametrize("body", [
    b"cos\nsystem\n(S'echo x'\ntR.", b"(S'echo x'\nios\nsystem\n.",
    b"\x80\x02cbuiltins\neval\nX\x01\x00\x00\x001\x85R.",
    b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x01x\x85R.", b"\x82\x01.", b"P1\n.", b"]Q.", b"]b.", b"(]o.",
    b"\x80\x05\x97.",
    b"\x80\x05]\x98."])
def test_no_operation_but_those_of_plain_values_is_done(body: bytes) -> None:
    with pytest.raises(SnapshotError, match=r"more than plain values|is damaged"):
        plain_pickle(io.BytesIO(body), "x.pickle")


def test_operations_that_are_done_are_a_closed_list() -> None:
    known = {snapshot_module._NAMES[code] for code in snapshot_module._PlainUnpickler.dispatch}
    assert known == snapshot_module._OPERATIONS
    every = {operation.name for operation in pickletools.opcodes}
    assert every - known >= {"GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "EXT1",
                             "EXT2", "EXT4", "PERSID", "BINPERSID", "BYTEARRAY8", "NEXT_BUFFER", "READONLY_BUFFER"}


@pytest.mark.parametrize("body", [
    b"", b".", b"N", b"0.", b"a.", b"(", b"((a.", b"]a.", b"s.", b"t.", b"j\xff\xff\xff\xff.",
    b"r\x01\x00\x00\x00.", b"(r\x01\x00\x00\x00.", b"}(]K\x01u.",
    b"X" + struct.pack("<I", 0xFFFFFFFF) + b"x.", b"\x8d" + struct.pack("<Q", 1 << 60) + b"x.",
    b"\x8b" + struct.pack("<i", -5) + b".", b"I" + b"9" * 5000 + b"\n.",
    b"L" + b"9" * 5000 + b"L\n.", b"garbage", b"Kx", b"M\x01", bytes(range(256))])
def test_damage_is_told_in_a_sentence(body: bytes) -> None:
    with pytest.raises(SnapshotError, match=r"x\.pickle"):
        plain_pickle(io.BytesIO(body), "x.pickle")


def test_bombs_of_depth_and_size_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SnapshotError, match="is damaged"):
        plain_pickle(io.BytesIO(b"(" * 100_000 + b"."), "x.pickle")
    assert plain_pickle(io.BytesIO(b"]" * 100_000 + b"a" * 99_999 + b"."), "x.pickle")
    with pytest.raises(SnapshotError, match="is damaged"):
        plain_pickle(io.BytesIO(b"Nr\xff\xff\xff\xff"), "x.pickle")  # a place far away takes no room
    monkeypatch.setattr(snapshot_module, "MOST_BYTES", 100)
    with pytest.raises(SnapshotError, match="larger than"):
        plain_pickle(io.BytesIO(b"N" * 200), "x.pickle")


@pytest.mark.parametrize(("content", "device"), [
    ({"segments": [], "device_traces": [5]}, None), ({"segments": [], "device_traces": [[], {"a": 1}]}, 1),
    ({"segments": [], "device_traces": [[{"action": "alloc", "size": 8, "addr": 1}]]}, -1)])
def test_a_history_that_is_none_is_one_sentence(content: dict[str, Any], device: int | None, tmp_path: Path) -> None:
    (tmp_path / "a.pickle").write_bytes(pickle.dumps(content))
    with pytest.raises(ForetraceError, match=r"says nothing of GPU"):
        snapshot_timeline(tmp_path / "a.pickle", device)
