"""The join: real pairs to the target, windows that differ, and hand-made cases with known answers."""

from __future__ import annotations

import json

import numpy as np
import pytest
from et_support import graph_of, node, real, write_trace
from hypothesis import given, settings
from hypothesis import strategies as st
from slowly import mostly_slow

from tracer.alignment_loop import align_windows
from tracer.execution_trace import read_execution_trace
from tracer.execution_trace.trace import profiler_arguments
from tracer.graph import NONE, CollectiveTable
from tracer.join import join_execution_trace
from tracer.kineto import read_kineto

RESNET = "resnet50-ddp-2xA100/rank0.kineto.json.gz"


@pytest.mark.parametrize("rank", mostly_slow(range(8), {0, 5}))
def test_dlrm_pairs(rank: int) -> None:
    graph = read_kineto(real(f"dlrm-8xV100-2023/rank{rank}.kineto.json.gz"))
    report = join_execution_trace(graph, real(f"dlrm-8xV100-2023/rank{rank}.et.json.gz"))
    assert report.method == "sequence"
    assert report.candidates == len(graph.ops) - 1  # all but ProfilerStep#10
    assert report.share >= 0.999
    assert report.parents_agree >= 0.95
    assert (graph.collectives.elements_out > 0).all()
    assert (graph.meta.et_schema, graph.meta.et_joined) == ("1.0.1", report.joined)


@pytest.mark.parametrize(("schema", "offset"), [
    ("1.0.3", 0), pytest.param("1.1.0", 1, marks=pytest.mark.slow), ("1.1.1", 1)])
def test_resnet_pairs(schema: str, offset: int) -> None:
    graph = read_kineto(real(RESNET))
    trace = read_execution_trace(real(f"resnet50-ddp-2xA100/rank0.schema-{schema}.et.json.gz"))
    report = join_execution_trace(graph, trace)
    assert (report.method, report.offset) == ("record_id", offset)
    assert report.candidates == len(graph.ops) - 3  # all but three ProfilerStep#N
    assert report.share >= 0.999
    assert report.parents_agree >= 0.999
    assert report.filled["shapes"] == report.filled["dtypes"] > 13_000
    assert ("strides" in report.filled) is (schema == "1.1.1")
    # Without ids, the alignment of names finds the very same nodes.
    other = read_kineto(real(RESNET))
    other.ops.record_id[:] = NONE
    assert join_execution_trace(other, trace).method == "sequence"
    np.testing.assert_array_equal(graph.ops.et_node, other.ops.et_node)


def test_one_iteration_of_forty() -> None:
    graph = read_kineto(real("linear-2080Ti/kineto.json.gz"))
    trace = read_execution_trace(real("linear-2080Ti/et.json.gz"))
    report = join_execution_trace(graph, trace)
    assert (report.joined, report.candidates) == (928, 928)
    assert report.parents_agree >= 0.999
    # Both are of one process, so the sequence numbers tell which of the forty it is.
    joined = np.flatnonzero(graph.ops.et_node != NONE)
    nodes = np.searchsorted(trace.id, graph.ops.et_node[joined])
    both = (graph.ops.sequence[joined] >= 0) & (trace.sequence[nodes] >= 0)
    assert both.sum() > 50
    assert (graph.ops.sequence[joined] == trace.sequence[nodes])[both].all()


ITERATION = ["aten::linear", "aten::t", "aten::transpose", "aten::as_strided", "aten::addmm", "aten::relu", "aten::sum"]
PROGRAM = [f"aten::op{i}" for i in range(100)]
CYCLE = [f"aten::op{i % 13}" for i in range(200)]


def _nodes(names: list[str], **other: object) -> list[dict]:
    return [node(number, name, rf_id=number, **other) for number, name in enumerate(names, start=3)]


@pytest.mark.parametrize(("recorded", "traced", "joined", "candidates", "missing"), [
    (PROGRAM[:70], PROGRAM[40:], 30, 30, range(40)),  # what both cover
    (["ProfilerStep#3", "## forward ##", *ITERATION], ITERATION, 7, 7, [0, 1]),
    (CYCLE, [*CYCLE[:50], "aten::extra", *CYCLE[50:100], *CYCLE[102:150], "aten::renamed", *CYCLE[151:]], 197, 200,
     [100, 101, 150]),
    ([*PROGRAM[:20], PROGRAM[21], PROGRAM[20], *PROGRAM[22:40]], PROGRAM[:40], 40, 40, []),
    ([], ITERATION, 0, 0, []),
    (ITERATION, ["aten::conv2d", "aten::bmm"], 0, 0, range(7))],
    ids=["overlap", "annotations", "missing, renamed and extra", "swapped", "empty", "two programs"])
def test_what_is_joined_of_two_programs(tmp_path, recorded, traced, joined, candidates, missing) -> None:
    graph = graph_of([(0, name) for name in recorded], record_id=0)  # ids of zero are none
    report = join_execution_trace(graph, write_trace(tmp_path / "et.json", _nodes(traced)))
    assert (report.joined, report.candidates) == (joined, candidates)
    assert np.flatnonzero(graph.ops.et_node == NONE).tolist() == list(missing)
    named = dict(enumerate(traced, start=3))
    assert [named[at] for at in graph.ops.et_node.tolist() if at != NONE] == [
        name for row, name in enumerate(recorded) if row not in missing]
    assert report.method == ("sequence" if joined else "none")


def test_other_programs_and_wrong_parents_do_not_join(tmp_path) -> None:
    graph = graph_of([(0, name) for name in ITERATION])
    report = join_execution_trace(graph, write_trace(tmp_path / "et.json", _nodes(["aten::conv2d", "aten::bmm"])))
    assert "two programs" in report.notes[-1]
    # The same names, but in the trace each operation lies inside the one before it.
    nodes = [node(i + 3, name, parent=i + 2) for i, name in enumerate(ITERATION)]
    assert join_execution_trace(graph, write_trace(tmp_path / "et.json", nodes)).joined == 0


def test_periodic_program_is_placed_by_sequence_number_only_within_one_process(tmp_path) -> None:
    rows = [(0, name) for _ in range(10) for name in ITERATION]
    sequence = [100 + i // 7 if i % 7 == 0 else NONE for i in range(70)]
    nodes = _nodes(ITERATION * 2)
    for place in (0, 7):
        next(a for a in nodes[place]["attrs"] if a["name"] == "seq_id")["value"] = 104 + place // 7
    graph = graph_of(rows, sequence=sequence)
    join_execution_trace(graph, write_trace(tmp_path / "a.json", nodes, pid=7))
    assert np.flatnonzero(graph.ops.et_node != NONE).tolist() == list(range(28, 42))
    join_execution_trace(graph, write_trace(tmp_path / "b.json", nodes, pid=8))
    assert np.flatnonzero(graph.ops.et_node != NONE).tolist() == list(range(14))


def test_threads_are_told_apart_by_their_operations(tmp_path) -> None:
    backward = [f"aten::back{i}" for i in range(30)]
    forward = [f"aten::fore{i}" for i in range(30)]
    graph = graph_of([(0, name) for name in backward] + [(1, name) for name in forward])
    nodes = _nodes(forward, tid=1) + [node(100 + i, name, tid=2) for i, name in enumerate(backward)]
    report = join_execution_trace(graph, write_trace(tmp_path / "et.json", nodes))
    assert (report.joined, report.candidates) == (60, 60)
    assert graph.ops.et_node[0] == 100


def test_nothing_recorded_is_overwritten(tmp_path) -> None:
    inputs = {"values": [[1, 2, 0, 6, 4, "cpu"], 3], "shapes": [[2, 3], []], "types": ["Tensor(long)", "Int"],
              "strides": [[3, 1], []]}
    graph = graph_of([(0, "aten::a"), (0, "aten::b")])
    graph.strings.append("[[9]]")
    graph.ops.shapes[0] = len(graph.strings) - 1
    report = join_execution_trace(graph, write_trace(
        tmp_path / "et.json", [node(3, "aten::a", inputs=inputs), node(4, "aten::b", inputs=inputs)]))
    ops = graph.ops
    assert [graph.string(code) for code in ops.shapes] == ["[[9]]", "[[2, 3], []]"]
    assert graph.string(ops.dtypes[0]) == '["long int", "Scalar"]'
    assert graph.string(ops.strides[1]) == "[[3, 1], []]"
    assert graph.string(ops.scalars[1]) == '["", "3"]'
    assert report.filled == {"shapes": 1, "dtypes": 2, "strides": 2, "scalars": 2}


def test_details_of_collectives_are_filled(tmp_path) -> None:
    graph = graph_of([(0, "c10d::allreduce_"), (0, "record_param_comms"), (0, "nccl:all_reduce")], parents=[-1, 0, 1])
    graph.strings.append("unknown")
    graph.collectives = CollectiveTable.empty(1)
    graph.collectives.op[0] = 2
    graph.collectives.kind[0] = len(graph.strings) - 1
    arguments = {"values": [[[1, 2, 0, 6, 4, "cuda:0"]], 5, ["3", "dp"], 0, "allreduce", [], [], 0, 2, 2],
                 "shapes": [[[2, 3]], [], [[], []], [], [], [], [], [], [], []],
                 "types": ["GenericList[Tensor(c10::BFloat16)]", "Int", "Tuple[String,String]", "Int", "String",
                           "GenericList[]", "GenericList[]", "Int", "Int", "Int"]}
    nodes = [node(3, "c10d::allreduce_", parent=2), node(4, "record_param_comms", parent=3, inputs=arguments),
             node(5, "nccl:all_reduce", parent=4)]
    report = join_execution_trace(graph, write_trace(tmp_path / "et.json", nodes))
    row = graph.collectives
    texts = [graph.string(int(column[0])) for column in (row.kind, row.group, row.ranks, row.dtype)]
    assert texts == ["all_reduce", "3", "[0, 2]", "bfloat16"]
    assert (row.elements_in[0], row.group_size[0]) == (6, 2)
    assert report.filled["collectives.kind"] == 1


def test_profiler_form_equals_what_the_profiler_wrote() -> None:
    """Where both recorded shapes and types, they agree: DLRM's 2023 profiler, but for its name of scalar lists."""
    graph = read_kineto(real("dlrm-8xV100-2023/rank0.kineto.json.gz"))
    trace = read_execution_trace(real("dlrm-8xV100-2023/rank0.et.json.gz"))
    join_execution_trace(graph, trace)
    compared = different = 0
    for row in np.flatnonzero((graph.ops.et_node != NONE) & (graph.ops.dtypes >= 0)).tolist():
        at = int(np.searchsorted(trace.id, graph.ops.et_node[row]))
        ours = profiler_arguments(*(trace.string(int(column[at])) for column in (
            trace.inputs, trace.input_shapes, trace.input_types, trace.input_strides)))
        theirs = json.loads(graph.string(int(graph.ops.dtypes[row])))
        compared += 1
        simple = [("" if kind == "ScalarList" else kind) for kind in json.loads(ours.dtypes or "[]")]
        different += simple != theirs
    assert compared > 1500
    assert different <= 0.02 * compared


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 6), max_size=120), st.lists(st.integers(0, 6), max_size=120))
def test_alignment_pairs_equal_tokens_in_order(left: list[int], right: list[int]) -> None:
    a, b = np.array(left, np.int64), np.array(right, np.int64)
    partner = align_windows(a, b)
    found = partner[partner >= 0]
    assert (np.diff(found) > 0).all()
    assert (a[partner >= 0] == b[found]).all()
    assert len(partner) == len(a)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 400), st.integers(1, 400), st.integers(0, 2**32 - 1))
def test_alignment_finds_any_window(start: int, length: int, seed: int) -> None:
    program = np.random.default_rng(seed).integers(0, 1000, 800)
    partner = align_windows(program[start:start + length], program)
    if length >= 24:
        assert partner.tolist() == list(range(start, start + length))
