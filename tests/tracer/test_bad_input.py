"""Damaged and foreign files: one clear sentence or a stated repair, never another exception, never a silent zero."""

from __future__ import annotations

import contextlib
import gzip
import json
import random
from pathlib import Path

import pytest
from kineto_support import call, event, kernel, names, op, real, small_step, write

from tracer.errors import ForetraceError, TraceError
from tracer.graph import NONE
from tracer.kineto import chunks, read_kineto, source


def many(count: int) -> list[dict]:
    """``count`` operations of 8 us, each with a launch and a kernel."""
    events = []
    for i in range(count):
        events += [op(f"aten::op{i % 7}", 10 * i + 1, 8), call("cudaLaunchKernel", 10 * i + 2, 3, i + 1),
                   kernel("k", 10 * i + 6, 4, i + 1)]
    return events


@pytest.mark.parametrize(("content", "says"), [
    (b"", "is empty"),
    (b"  \n ", "is empty"),
    (gzip.compress(b""), "is empty"),
    (b"\x00\x01\x02", "is not JSON"),
    (b"PK\x03\x04 zip", "zip archive"),
    (b"{}", "no profiler trace"),
    (b'{"schema": "1.1.0", "nodes": []}', "execution trace"),
    (b'{"traceEvents": []}', "list of events is empty"),
    (b"[]", "without events"),
    (b'{"traceEvents": 5}', "no profiler trace"),
    (b'{"schemaVersion": 1, "deviceProp', "cut off"),
    (b'{"schemaVersion": 1,, }', "not valid JSON"),
    (json.dumps([op("a", -1, 1), op("b", 1, -1)]).encode(), "none of its 2 timed events"),
    (b'{"traceEvents": [{"ph": "X", "cat": "cpu', "within its first event"),
    (b'{"traceEvents": [{"ph": "M", "name": "process_name"}]}', "no timed event"),
    (b"[" * 100_000, "holds nothing to read"),
    (b'{"traceEvents": ' + b"[" * 100_000, "holds nothing to read"),
    (b'{"x": ' + b'{"a":' * 100_000, "cut off|nested"),
    (b'{"traceEvents": [{"ph": "X", "args": ' + b"[" * 200_000 + b"]" * 200_000 + b"}]}", "holds nothing to read"),
])
def test_what_is_no_trace_is_refused_in_one_sentence(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=says) as caught:
        read_kineto(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_file_and_a_directory(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="does not exist"):
        read_kineto(tmp_path / "no.json")
    with pytest.raises(TraceError, match="directory"):
        read_kineto(tmp_path)
    with pytest.raises(TraceError, match="cannot be fetched"):
        read_kineto("nosuchprotocol://bucket/trace.json")


@pytest.mark.parametrize(("suffix", "keep", "says"), [
    (".json", 0.3, "cut off"), (".json.gz", 0.6, "gzip stream ends too early"), (".json.gz", 0.97, "gzip stream"),
    (".json.gz", None, "gzip stream")], ids=["text", "gzip", "gzip's end", "damage within"])
def test_a_truncated_or_damaged_file_gives_its_head(tmp_path: Path, suffix: str, keep: float | None, says: str) -> None:
    whole = write(tmp_path, many(5000), "whole" + suffix)
    stored = whole.read_bytes()
    middle = len(stored) // 2
    cut = tmp_path / ("cut" + suffix)
    cut.write_bytes(stored[:int(len(stored) * keep)] if keep else stored[:middle] + b"\xff" * 64 + stored[middle + 64:])
    graph, full = read_kineto(cut), read_kineto(whole)
    assert 0 < len(graph.ops) < len(full.ops)
    assert not keep or graph.ops.start_ns.tolist() == full.ops.start_ns[:len(graph.ops)].tolist()
    note = " ".join(graph.meta.loss.notes)
    assert says in note and f"{graph.meta.loss.events_read} events before that were recovered" in note
    assert "absolute start may be unknown" in note


def test_every_cut_of_a_small_file_is_survived(tmp_path: Path) -> None:
    text = write(tmp_path, small_step()[1:4:2], deviceProperties=[{"id": 0, "name": "A"}]).read_bytes()
    read, path = 0, tmp_path / "cut.json"
    for length in range(len(text)):
        path.write_bytes(text[:length])
        with contextlib.suppress(TraceError):
            loss = read_kineto(path).meta.loss
            assert loss.notes and loss.events_read >= 1
            read += 1
    assert read > len(text) // 3  # once the first event is whole


def test_several_gzip_members_are_one_text(tmp_path: Path) -> None:
    text = write(tmp_path, many(100)).read_bytes()
    path = tmp_path / "members.json.gz"
    path.write_bytes(gzip.compress(text[:5000]) + gzip.compress(text[5000:]) + b"\0" * 512)
    graph = read_kineto(path)
    assert len(graph.ops) == 100 and not graph.meta.loss.truncated_bytes


BROKEN = {
    "quotes": (b'"name": "TARGET"', b'"name": "say "hi" to <lambda>"', 'say "hi" to <lambda>'),
    "backslash": (b'"name": "TARGET"', b'"name": "C:\\qath\\file.py(3): f"', "C:\\qath\\file.py(3): f"),
    "control": (b'"name": "TARGET"', b'"name": "a\x01b\tc"', "a\x01b\tc"),
    "utf-8": (b'"name": "TARGET"', b'"name": "a\xff\xfeb"', "a\ufffd\ufffdb"),
    "comma": (b'"name": "TARGET"', b'"name": "TARGET",', "TARGET"),
    "bare NaN": (b'"name": "TARGET"', b'"name": "TARGET", "x": NaN', "TARGET"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_invalid_json_within_an_event_is_mended(tmp_path: Path, fault: str) -> None:
    last = {"ph": "X", "cat": "cpu_op", "pid": 1, "tid": 1, "ts": 4, "dur": 2, "name": "TARGET"}
    good = write(tmp_path, [op("before", 1, 2), last, op("after", 7, 2)]).read_bytes()
    old, new, expected = BROKEN[fault]
    path = tmp_path / "bad.json"
    path.write_bytes(good.replace(old, new))
    graph = read_kineto(path)
    assert names(graph, graph.ops.name) == ["before", expected, "after"]
    assert graph.meta.loss.repaired_events == 1 and graph.meta.loss.dropped_events == 0
    assert "mended" in " ".join(graph.meta.loss.notes)


def test_a_comma_after_the_last_event_and_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    text = json.dumps({"traceEvents": small_step()})
    path.write_bytes(b"\xef\xbb\xbf" + text.replace("]}", ",]}").encode().replace(b"},]}", b"}, ]}"))
    graph = read_kineto(path)
    assert len(graph.ops) == 4 and len(graph.kernels) == 1 and graph.meta.loss.dropped_events == 0


def test_an_unmendable_event_costs_only_itself(tmp_path: Path) -> None:
    text = write(tmp_path, many(5)).read_bytes()
    path = tmp_path / "bad.json"
    path.write_bytes(text.replace(b'"ts": 21', b'"ts" 21 ??', 1))
    graph = read_kineto(path)
    assert len(graph.ops) == 4 and len(graph.kernels) == 5
    assert graph.meta.loss.dropped_events == 1 and "dropped" in " ".join(graph.meta.loss.notes)


@pytest.mark.parametrize("bad", [
    *[op("bad", value, 1) for value in (float("nan"), None, -5, "x", [1], 1e300)],
    *[op("bad", 5, value) for value in (float("inf"), None, -5, {})], kernel("lost", 0, 3, 99),
    {"ph": "X", "cat": "cpu_op", "name": "bad", "ts": 5}])
def test_events_of_unusable_times_are_dropped_and_counted(tmp_path: Path, bad: dict) -> None:
    odd = [event("mystery", "?", 1, 2), {"ph": "B"}, {"ph": "i", "ts": {}}]  # these are no error
    graph = read_kineto(write(tmp_path, [*small_step(), bad, *odd]))
    assert graph.meta.loss.dropped_events == 1 and graph.meta.window_ns == 100_000
    assert (len(graph.ops), len(graph.kernels)) == (4, 1)


def test_a_time_decades_away_does_not_stretch_the_window(tmp_path: Path) -> None:
    events = [{**e, "ts": e["ts"] + 1_700_000_000_000_000} for e in small_step()]
    events += [op("aten::odd", 3, 1), op("aten::long", 1_700_000_000_000_150, 10**15)]
    graph = read_kineto(write(tmp_path, events))
    assert graph.meta.window_ns == 100_000 and graph.meta.loss.dropped_events == 2
    assert "half a week" in " ".join(graph.meta.loss.notes)


def test_fields_of_wrong_types_do_not_lose_the_event(tmp_path: Path) -> None:
    events = small_step()
    events[3]["args"]["correlation"] = "11"
    events[1]["args"]["Sequence number"] = {"a": 1}
    events[2]["pid"], events[2]["tid"] = "1", "1"
    events[5]["name"] = None
    events.append({**op("aten::add", 175, 1), "args": None})
    events[3:3] = [None, 3, "text", []]
    graph = read_kineto(write(tmp_path, events))
    assert len(graph.ops) == 5 and len(graph.threads) == 1
    assert graph.kernels.launch.tolist() == [0] and graph.kernels.op[0] >= 0


def test_no_gpu_work_no_steps_no_host_operations_are_said(tmp_path: Path) -> None:
    cpu = read_kineto(write(tmp_path, [op("aten::add", 1, 5)]))
    assert len(cpu.kernels) == 0 and len(cpu.steps) == 0 and cpu.meta.step_source == NONE
    assert any("no GPU work" in n for n in cpu.meta.loss.notes) and any("no steps" in n for n in cpu.meta.loss.notes)
    gpu = read_kineto(write(tmp_path, [kernel("k", 5, 5, 1)]))
    assert len(gpu.ops) == 0 and any("no host operations" in n for n in gpu.meta.loss.notes)
    assert gpu.meta.loss.orphan_kernels == gpu.meta.loss.leading_orphans == 1


def test_broken_metadata_keeps_what_can_be_read(tmp_path: Path) -> None:
    text = write(tmp_path, small_step()).read_bytes()
    path = tmp_path / "bad.json"
    path.write_bytes(text[:-1] + b', "baseTimeNanoseconds": 1711964646000000000, "INFO": ["a "quoted" b"], '
                     b'"distributedInfo": {"rank": 3, "world_size": 8}}')
    graph = read_kineto(path)
    assert len(graph.ops) == 4 and (graph.meta.rank, graph.meta.world_size) == (3, 8)
    assert graph.meta.base_time_ns == 1711964646000000000 + 100_000
    assert any("metadata" in note for note in graph.meta.loss.notes)


@pytest.mark.parametrize("metadata", [
    {"deviceProperties": "x"}, {"deviceProperties": [3, {"id": "a", "name": None, "numSms": {}}]},
    {"distributedInfo": [1]}, {"distributedInfo": {"rank": "zero", "world_size": None, "pg_config": {}}},
    {"baseTimeNanoseconds": "soon", "record_shapes": [], "torch_version": 3}])
def test_odd_metadata_is_left_out(tmp_path: Path, metadata: dict) -> None:
    assert len(read_kineto(write(tmp_path, small_step(), **metadata)).ops) == 4


def test_pieces_are_cut_right_whatever_their_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects in lists inside events and metadata look like event boundaries; small blocks hit all of them."""
    events = many(40)
    for e in events[::5]:
        e["args"]["list"] = [{"name": "x", "ts": 1}, {"name": "y", "ts": 2}]
    devices = [{"name": f"GPU {i}", "id": i} for i in range(8)]
    first = write(tmp_path, events, "first.json", deviceProperties=devices)
    last = write(tmp_path, {"traceEvents": events, "deviceProperties": devices, "traceName": "t }], x"}, "last.json")
    bare = write(tmp_path, json.dumps(events).encode(), "list.json")
    for size in (1 << 23, 4096, 1000, 257):
        monkeypatch.setattr(source, "BLOCK_BYTES", size)
        monkeypatch.setattr(source, "_COMPRESSED_READ", size)
        for path in (first, last, bare):
            graph = read_kineto(path)
            assert (len(graph.ops), len(graph.launches), len(graph.kernels)) == (40, 40, 40), (size, path.name)
            assert graph.meta.loss.dropped_events == graph.meta.loss.truncated_bytes == 0
            assert not any("cut off" in n or "metadata" in n for n in graph.meta.loss.notes)
            if path is not bare:
                assert graph.meta.device == "GPU 0" and graph.meta.device_count == 8


def test_text_without_an_event_is_refused_before_it_fills_memory(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "_EVENT_LIMIT", 1 << 16)
    monkeypatch.setattr(source, "BLOCK_BYTES", 1 << 14)
    monkeypatch.setattr(source, "_COMPRESSED_READ", 1 << 14)
    path = tmp_path / "huge.json"
    path.write_bytes(b'{"traceEvents": [{"ph": "X", "name": "' + b"a" * (1 << 18))
    with pytest.raises(TraceError, match="without the start of an event"):
        read_kineto(path)


@pytest.mark.real_traces
def test_a_truncated_real_trace(tmp_path: Path) -> None:
    path = tmp_path / "cut.json.gz"
    path.write_bytes(real("resnet50-ddp-2xA100/rank0.kineto.json.gz").read_bytes()[:500_000])
    graph = read_kineto(path)
    assert len(graph.ops) > 5000 and len(graph.kernels) > 500
    assert "absolute start may be unknown" in " ".join(graph.meta.loss.notes)


@pytest.mark.parametrize("seed", range(60))
def test_random_damage_never_raises_anything_else(tmp_path: Path, seed: int) -> None:
    generator = random.Random(seed)
    text = bytearray(write(tmp_path, [*small_step(), *many(30)], distributedInfo={"rank": 1}).read_bytes())
    for _ in range(generator.randint(1, 12)):
        at = generator.randrange(len(text))
        what = generator.random()
        if what < 0.4:
            text[at] = generator.randrange(256)
        elif what < 0.7:
            del text[at:at + generator.randint(1, 60)]
        else:
            text[at:at] = generator.choice([b'"', b"\\", b"{", b"}", b"[", b"]", b",", b"\x00", b"1e9999", b"},{"])
    path = tmp_path / "damaged.json"
    path.write_bytes(text)
    with contextlib.suppress(ForetraceError):
        assert read_kineto(path).meta.loss.events_read > 0
