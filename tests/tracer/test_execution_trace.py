"""The execution-trace reader: every schema, collectives, process groups, and what is wrong in the wild."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest
from et_support import node, real, write_trace

from tracer.errors import TraceError
from tracer.execution_trace import is_execution_trace, read_execution_trace

FLAT = {
    "name": "aten::mm", "id": 5, "rf_id": 3, "parent": 2, "fw_parent": 0, "seq_id": 9, "scope": 0, "tid": 1,
    "fw_tid": 0, "op_schema": "aten::mm(Tensor self, Tensor mat2) -> Tensor",
    "inputs": [[1, 2, 0, 6, 4, "cuda:0"], [[3, 4, 8, 6, 4, "cuda:0"]]], "input_shapes": [[2, 3], [[3, 2]]],
    "input_types": ["Tensor(float)", "GenericList[Tensor(float)]"], "outputs": [], "output_shapes": [],
    "output_types": [],
}


@pytest.mark.parametrize(("file", "schema", "nodes", "operations", "collectives"), [
    ("dlrm-8xV100-2023/rank0.et.json.gz", "1.0.1", 1675, 1672, 8),
    ("linear-2080Ti/et.json.gz", "1.0.1", 931, 928, 0),
    ("resnet50-ddp-2xA100/rank0.schema-1.0.3.et.json.gz", "1.0.3-chakra.0.0.4", 14391, 14388, 21),
    ("resnet50-ddp-2xA100/rank0.schema-1.1.0.et.json.gz", "1.1.0-chakra.0.0.4", 14392, 14388, 21),
    ("resnet50-ddp-2xA100/rank0.schema-1.1.1.et.json.gz", "1.1.1-chakra.0.0.4", 14392, 14388, 21),
    ("gpt2-et/et.json.gz", "1.1.0-chakra.0.0.4", 27156, 27153, 0),
])
def test_real_traces(file: str, schema: str, nodes: int, operations: int, collectives: int) -> None:
    trace = read_execution_trace(real(file))
    assert trace.schema == schema
    assert len(trace) == nodes
    assert np.count_nonzero(trace.is_operation()) == operations
    assert len([comm for comm in trace.comms if comm.name != "wait"]) == collectives
    assert trace.notes == []
    assert (np.diff(trace.id) > 0).all()


def test_collectives_of_every_schema_say_the_same() -> None:
    seen = []
    for schema in ("1.0.3", "1.1.0", "1.1.1"):
        trace = read_execution_trace(real(f"resnet50-ddp-2xA100/rank0.schema-{schema}.et.json.gz"))
        seen.append([(c.name, c.group, c.dtype, c.elements_in, c.elements_out) for c in trace.comms])
        assert all(c.ranks == str(list(range(c.group_size))) for c in trace.comms if c.name != "wait")
    assert seen[0][0] == ("broadcast", "0", "float32", 53120, 53120)
    sent = [[comm for comm in one if comm[0] != "wait"] for one in seen]
    assert sent[0] == sent[1] == sent[2]


def test_old_collectives_have_only_an_address_as_group() -> None:
    comm = next(c for c in read_execution_trace(real("dlrm-8xV100-2023/rank0.et.json.gz")).comms
                if c.name == "all_to_allv")
    assert (comm.elements_in, comm.elements_out, comm.dtype, comm.group) == (6144, 6144, "float32", "")


def test_strides_exist_only_in_1_1_1() -> None:
    for schema, has in (("1.0.3", False), ("1.1.0", False), ("1.1.1", True)):
        trace = read_execution_trace(real(f"resnet50-ddp-2xA100/rank0.schema-{schema}.et.json.gz"))
        assert bool((trace.input_strides >= 0).any()) is has


def test_process_groups() -> None:
    trace = read_execution_trace(real("resnet50-ddp-2xA100/rank0.schema-1.1.0.et.json.gz"))
    assert trace.process_groups == [
        {"pg_name": "0", "pg_desc": "default_pg", "backend_config": "cuda:nccl", "ranks": [], "pg_size": 2}
    ]


def test_flat_schema(tmp_path) -> None:
    path = tmp_path / "et.json"
    path.write_text(json.dumps({"schema": "1.0.1", "pid": 1, "nodes": [FLAT]}))
    trace = read_execution_trace(path)
    assert (trace.sequence[0], trace.record_id[0], trace.thread[0], trace.parent[0]) == (9, 3, 1, 2)


def test_gzip_plain_and_url_are_the_same(tmp_path) -> None:
    plain = write_trace(tmp_path / "et.json", [node(3, "aten::mm")])
    zipped = tmp_path / "et.json.gz"
    zipped.write_bytes(gzip.compress(plain.read_bytes()))
    traces = [read_execution_trace(source) for source in (plain, zipped, f"file://{plain}")]
    assert [trace.strings for trace in traces] == [traces[0].strings] * 3


def test_nodes_are_sorted_by_id(tmp_path) -> None:
    path = write_trace(tmp_path / "et.json", [node(9, "b"), node(4, "a")])
    assert read_execution_trace(path).id.tolist() == [1, 2, 4, 9]


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
    (b"", "empty"),
    (b"   ", "empty"),
    (b'{"schema": "1.1.1", "nodes": []}', "no nodes"),
    (b'{"schema": "1.1.1", "nodes": [{"id": 1, "na', "truncated"),
    (b'{"traceEvents": []}', "not an execution trace"),
    (b"[1, 2]", "not an execution trace"),
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


def test_missing_file() -> None:
    with pytest.raises(TraceError, match="does not exist"):
        read_execution_trace("/nowhere/et.json")


def test_detection() -> None:
    assert is_execution_trace(b'{\n "schema": "1.0.1", "pid": 1')
    assert not is_execution_trace(b'{"schemaVersion": 1, "traceEvents": [')
    assert not is_execution_trace(b'[{"ph": "X"')
    assert not is_execution_trace(b"")


def test_groups_of_very_many_ranks_are_not_listed() -> None:
    from tracer.execution_trace.trace import comm_node

    def ranks(**attributes: int) -> str:
        found = comm_node(0, "[]", "[]", "[]", "[]", {"collective_name": "allreduce", "global_rank_start": 0,
                                                      "global_rank_stride": 2, **attributes})
        assert found is not None
        return found.ranks

    assert ranks(pg_size=3) == "[0, 2, 4]"
    assert ranks(pg_size=1_000_000) == ranks(pg_size=4, global_rank_start=10**12) == ""
