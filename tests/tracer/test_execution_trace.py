"""The execution-trace reader: every schema, collectives, process groups, and what is wrong in the wild."""

from __future__ import annotations

import gzip
import json
from functools import cache

import numpy as np
import pytest
from et_support import node, real, write_trace

from tracer.errors import TraceError
from tracer.execution_trace import ExecutionTrace, is_execution_trace, read_execution_trace
from tracer.execution_trace.trace import comm_node

FLAT = {
    "name": "aten::mm", "id": 5, "rf_id": 3, "parent": 2, "fw_parent": 0, "seq_id": 9, "scope": 0, "tid": 1,
    "fw_tid": 0, "op_schema": "aten::mm(Tensor self, Tensor mat2) -> Tensor",
    "inputs": [[1, 2, 0, 6, 4, "cuda:0"], [[3, 4, 8, 6, 4, "cuda:0"]]], "input_shapes": [[2, 3], [[3, 2]]],
    "input_types": ["Tensor(float)", "GenericList[Tensor(float)]"], "outputs": [], "output_shapes": [],
    "output_types": [],
}


RESNET = "resnet50-ddp-2xA100/rank0.schema-{}.et.json.gz"


@cache
def read_once(file: str) -> ExecutionTrace:
    return read_execution_trace(real(file))


@pytest.mark.parametrize(("file", "schema", "nodes", "operations", "collectives"), [
    ("dlrm-8xV100-2023/rank0.et.json.gz", "1.0.1", 1675, 1672, 8),
    ("linear-2080Ti/et.json.gz", "1.0.1", 931, 928, 0),
    (RESNET.format("1.0.3"), "1.0.3-chakra.0.0.4", 14391, 14388, 21),
    (RESNET.format("1.1.0"), "1.1.0-chakra.0.0.4", 14392, 14388, 21),
    (RESNET.format("1.1.1"), "1.1.1-chakra.0.0.4", 14392, 14388, 21)])
def test_real_traces(file: str, schema: str, nodes: int, operations: int, collectives: int) -> None:
    trace = read_once(file)
    assert (trace.schema, len(trace), np.count_nonzero(trace.is_operation())) == (schema, nodes, operations)
    assert len([comm for comm in trace.comms if comm.name != "wait"]) == collectives
    assert trace.notes == [] and (np.diff(trace.id) > 0).all()
    assert bool((trace.input_strides >= 0).any()) is schema.startswith("1.1.1")


def test_collectives_of_every_schema_say_the_same() -> None:
    seen = []
    for schema in ("1.0.3", "1.1.0", "1.1.1"):
        sent = [comm for comm in read_once(RESNET.format(schema)).comms if comm.name != "wait"]
        seen.append([(c.name, c.group, c.dtype, c.elements_in, c.elements_out) for c in sent])
        assert all(c.ranks == str(list(range(c.group_size))) for c in sent)
    assert seen[0][0] == ("broadcast", "0", "float32", 53120, 53120) and seen[0] == seen[1] == seen[2]
    assert read_once(RESNET.format("1.1.0")).process_groups == [
        {"pg_name": "0", "pg_desc": "default_pg", "backend_config": "cuda:nccl", "ranks": [], "pg_size": 2}]
    # Old ones have only an address as group.
    old = next(c for c in read_once("dlrm-8xV100-2023/rank0.et.json.gz").comms if c.name == "all_to_allv")
    assert (old.elements_in, old.elements_out, old.dtype, old.group) == (6144, 6144, "float32", "")


def test_flat_schema(tmp_path) -> None:
    path = tmp_path / "et.json"
    path.write_text(json.dumps({"schema": "1.0.1", "pid": 1, "nodes": [FLAT]}))
    trace = read_execution_trace(path)
    assert (trace.sequence[0], trace.record_id[0], trace.thread[0], trace.parent[0]) == (9, 3, 1, 2)


def test_gzip_plain_and_url_are_the_same(tmp_path) -> None:
    plain = write_trace(tmp_path / "et.json", [node(9, "b"), node(4, "a")])
    zipped = tmp_path / "et.json.gz"
    zipped.write_bytes(gzip.compress(plain.read_bytes()))
    traces = [read_execution_trace(source) for source in (plain, zipped, f"file://{plain}")]
    assert [trace.strings for trace in traces] == [traces[0].strings] * 3
    assert traces[0].id.tolist() == [1, 2, 4, 9]  # sorted
    with pytest.raises(TraceError, match="does not exist"):
        read_execution_trace(tmp_path / "nowhere.json")


def test_newer_schema_is_read_with_a_note(tmp_path) -> None:
    path = write_trace(tmp_path / "et.json", [node(3, "aten::mm")], schema="1.3.0")
    assert "1.3.0" in read_execution_trace(path).notes[0]


def test_truncated_process_groups_keep_the_whole_ones(tmp_path) -> None:
    text = '[{"pg_name": "0", "ranks": [0, 1], "group_size": 2}, {"pg_name": "1", "ra'
    groups = {"values": [text], "shapes": [[]], "types": ["String"], "strides": [[]]}
    trace = read_execution_trace(
        write_trace(tmp_path / "et.json", [node(3, "## process_group:init ##", inputs=groups)]))
    assert trace.process_groups == [{"pg_name": "0", "ranks": [0, 1], "pg_size": 2}]
    assert "cut off" in trace.notes[0]


def test_bare_infinity_is_mended_and_told(tmp_path) -> None:
    path = write_trace(tmp_path / "et.json", [
        node(3, "aten::fill_", inputs={"values": ["MARK", 1.5], "shapes": [[], []], "types": ["Double"] * 2})])
    path.write_text(path.read_text().replace('"MARK"', "-inf"))
    trace = read_execution_trace(path)
    assert "inf" in trace.notes[0]
    assert trace.string(int(trace.inputs[2])) == '["-inf", 1.5]'


@pytest.mark.parametrize(("content", "says"), [
    (b"   ", "empty"),
    (b'{"schema": "1.1.1", "nodes": []}', "no nodes"),
    (b'{"schema": "1.1.1", "nodes": [{"id": 1, "na', "truncated"),
    (b'{"traceEvents": []}', "not an execution trace"),
    (b'{"schema": "9.0", "nodes": [{"key": 1}]}', "9.0"),
    (b'{"schema": "1.1.1", "nodes": ' + b"[" * 100_000, "execution trace"),
    (gzip.compress(b'{"schema": "1.1.1", "nodes": []}', mtime=0)[:-9], "damaged"),
    (b"\x00\x01\x02", "not a readable"),
])
def test_bad_files_are_one_sentence(tmp_path, content: bytes, says: str) -> None:
    path = tmp_path / "et.json"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=says) as error:
        read_execution_trace(path)
    assert "\n" not in str(error.value)


def test_detection() -> None:
    assert is_execution_trace(b'{\n "schema": "1.0.1", "pid": 1')
    assert not is_execution_trace(b'{"schemaVersion": 1, "traceEvents": [')
    assert not is_execution_trace(b'[{"ph": "X"')
    assert not is_execution_trace(b"")


@pytest.mark.parametrize(("start", "size", "ranks"), [(0, 3, "[0, 2, 4]"), (0, 1_000_000, ""), (10**12, 4, "")])
def test_groups_of_very_many_ranks_are_not_listed(start: int, size: int, ranks: str) -> None:
    found = comm_node(0, "[]", "[]", "[]", "[]", {
        "collective_name": "allreduce", "global_rank_start": start, "global_rank_stride": 2, "pg_size": size})
    assert found is not None and found.ranks == ranks
