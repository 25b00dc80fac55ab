"""Views for people: rows, frames, arguments and the networkx graph."""

from __future__ import annotations

from collections import Counter

import networkx
import numpy as np
import pytest
from et_support import empty_graph, graph_of, real

from tracer.graph import (
    NONE,
    ExecutionGraph,
    KernelKind,
    KernelTable,
    LaunchKind,
    LaunchTable,
    OpKind,
    SyncKind,
    SyncTable,
    Thread,
)
from tracer.kineto import read_kineto
from tracer.views import Argument, arguments, forward_backward_pairs, row, to_pandas


def test_row_decodes_strings_enumerations_and_nothing() -> None:
    graph = graph_of([(0, "aten::mm"), (0, "ProfilerStep#1")])
    first = row(graph, "ops", 0)
    assert (first.index, first.name, first.kind, first.parent, first.shapes) == \
        (0, "aten::mm", OpKind.OPERATION, None, None)
    assert (first.start_ns, first.duration_ns) == (0, 1000)
    assert row(graph, "ops", -1).name == "ProfilerStep#1"
    with pytest.raises(IndexError):
        row(graph, "ops", 2)
    with pytest.raises(KeyError):
        row(graph, "nonsense", 0)
    with pytest.raises(AttributeError):
        first.name = "other"


def test_pandas_frames_of_every_table() -> None:
    graph = graph_of([(0, "aten::mm"), (0, "aten::relu"), (0, "aten::mm")])
    graph.strings.append("aten::mm")  # a string that is stored twice
    graph.ops.name[2] = 2
    frame = to_pandas(graph, "ops")
    assert frame["name"].tolist() == ["aten::mm", "aten::relu", "aten::mm"]
    assert frame["shapes"].isna().all()
    assert frame["kind"].tolist() == ["operation"] * 3
    for name, kind in ExecutionGraph.TABLES.items():
        assert tuple(to_pandas(graph, name).columns) == tuple(kind.layout())
        assert len(to_pandas(empty_graph(), name)) == 0


def test_arguments() -> None:
    graph = graph_of([(0, "aten::cat"), (0, "aten::mm")])
    graph.strings += ["[[[2, 3], [4, 5]], [], []]", '["TensorList", "Scalar", ""]', "[[[3, 1], [5, 1]], [], []]",
                      '["", "1", ""]', "no JSON at all"]
    graph.ops.shapes[0], graph.ops.dtypes[0], graph.ops.strides[0], graph.ops.scalars[0] = 2, 3, 4, 5
    assert arguments(graph, 0) == [
        Argument("TensorList", ((2, 3), (4, 5)), ((3, 1), (5, 1)), ""), Argument("Scalar", (), (), "1"),
        Argument("", (), (), ""),
    ]
    assert arguments(graph, 1) == []
    graph.ops.shapes[1] = 6
    assert arguments(graph, 1) == []


@pytest.mark.parametrize(("shapes", "strides", "shape", "stride"), [
    ("[[2, 3]]", "[[3]]", (2, 3), None), ("[[2, 3]]", "[[]]", (2, 3), None), ("[[2, 3]]", "[[3, -1]]", (2, 3), None),
    ("[[[2, 3], [4]]]", "[[[3, 1]]]", ((2, 3), (4,)), None), ("[[[2, 3], [4]]]", "[[[3], [1]]]", ((2, 3), (4,)),
                                                              ((), (1,))),
    ("[[[[2, 3], [4]], [5]]]", "[[[3, 1], [1]]]", ((2, 3), (4,), (5,)), None),
    ("[[8, [[1, {}], [3]]]]", "[[]]", ((), (), (), (3,)), None),
    ("[[-2, 3]]", "[[3, 1]]", None, None), (f"[[{10**30}]]", "[[1]]", None, None),
    (f"[[{2**40}, {2**40}]]", "[[1, 1]]", None, None)])
def test_sizes_that_no_tensor_has_are_not_recorded(shapes: str, strides: str, shape: object, stride: object) -> None:
    graph = graph_of([(0, "aten::mm")])
    graph.strings += [shapes, strides]
    graph.ops.shapes[0], graph.ops.strides[0] = len(graph.strings) - 2, len(graph.strings) - 1
    assert arguments(graph, 0) == [Argument("", shape, stride, "")]


def _two_streams() -> ExecutionGraph:
    """One op launching a kernel on stream 1; stream 2 waits for it; a second op on another thread runs backward."""
    graph = graph_of([(0, "aten::mm"), (0, "aten::t"), (1, "MmBackward0")], parents=[NONE, 0, NONE],
                     sequence=[5, 5, 5], forward_thread=[NONE, NONE, 1])
    graph.ops.start_ns[:] = [0, 10, 900]
    graph.threads = [Thread("7", "0"), Thread("7", "1")]
    graph.strings += ["cudaLaunchKernel", "cudaEventRecord", "cudaStreamWaitEvent", "cudaStreamSynchronize", "k"]
    launches = LaunchTable.empty(6)
    launches.name[:] = [3, 4, 5, 3, 6, 4]
    launches.kind[:] = [LaunchKind.KERNEL, LaunchKind.EVENT_RECORD, LaunchKind.STREAM_WAIT, LaunchKind.KERNEL,
                        LaunchKind.BLOCKING_SYNC, LaunchKind.EVENT_RECORD]
    launches.op[:] = [0, 0, 0, 0, NONE, NONE]
    launches.thread[:] = 0
    launches.start_ns[:] = [20, 40, 60, 80, 100, 700]
    launches.correlation[:] = [1, 2, 3, 4, 5, 6]
    kernels = KernelTable.empty(2)
    kernels.name[:] = 7
    kernels.kind[:] = KernelKind.COMPUTE
    kernels.launch[:] = [0, 3]
    kernels.device[:], kernels.stream[:] = 0, [1, 2]
    kernels.start_ns[:], kernels.duration_ns[:] = [50, 400], [300, 200]
    syncs = SyncTable.empty(2)
    syncs.kind[:] = [SyncKind.STREAM_WAIT_EVENT, SyncKind.STREAM_SYNC]
    syncs.launch[:], syncs.stream[:] = [2, 4], [2, 2]
    syncs.wait_stream[:], syncs.record_correlation[:] = [1, NONE], [2, NONE]
    graph.launches, graph.kernels, graph.syncs = launches, kernels, syncs
    return graph


def test_nodes_and_edges_of_a_graph_known_on_paper() -> None:
    made = _two_streams().to_networkx()
    assert {(a, b, kind) for a, b, kind in made.edges(data="kind")} == {
        (("op", 0), ("op", 1), "nesting"),
        (("op", 1), ("op", 2), "forward_backward"),  # the innermost forward operation of the number
        *((("op", 0), ("launch", i), "calls") for i in range(4)),
        *((("launch", i), ("launch", i + 1), "program_order") for i in range(5)),
        (("launch", 0), ("kernel", 0), "launches"), (("launch", 3), ("kernel", 1), "launches"),
        (("kernel", 0), ("kernel", 1), "sync"),   # stream 2 waits for the event recorded behind kernel 0
        (("kernel", 1), ("launch", 5), "sync"),   # what follows cudaStreamSynchronize waits for kernel 1
    }
    assert (made.nodes["op", 2]["name"], made.nodes["kernel", 1]["stream"]) == ("MmBackward0", 2)
    assert made.nodes["launch", 4]["kind"] == "blocking_sync"


@pytest.mark.parametrize(("trace", "kinds"), [
    ("dlrm-8xV100-2023/rank0.kineto.json.gz", {"forward_backward"}),
    ("resnet50-V100/rank0.kineto.json.gz", {"forward_backward"}),
    ("cuda-sync-A100/alexnet/benchmark_result_2869224_1695835535_trace.json.gz", {"sync"}),
    ("cuda-sync-A100/cuda_event_sync_multi_stream/event_sync_trace.json.gz", {"sync"}),
    pytest.param("linear-2080Ti/kineto.json.gz", {"forward_backward"}, marks=pytest.mark.slow),  # forty alike steps
    pytest.param("resnet50-V100-2021/list-form-2020.json.gz", set(), marks=pytest.mark.slow),  # read by kineto_real
    ("gpu-only-MI210/rank0.json.gz", set()),
])
def test_real_graphs_are_acyclic(trace: str, kinds: set[str]) -> None:
    graph = read_kineto(real(trace))
    made = graph.to_networkx()
    assert networkx.is_directed_acyclic_graph(made)
    assert len(made) == len(graph.ops) + len(graph.launches) + len(graph.kernels)
    found = Counter(kind for _, _, kind in made.edges(data="kind"))
    assert {"launches", "stream_order", "program_order"} | kinds <= set(found)
    assert found["launches"] == np.count_nonzero(graph.kernels.launch >= 0)
    if trace.startswith("resnet50-V100/"):
        pairs = forward_backward_pairs(graph)
        names = {(graph.string(int(graph.ops.name[a])), graph.string(int(graph.ops.name[b]))) for a, b in pairs}
        assert any("conv" in a and "Convolution" in b for a, b in names)
        assert all(graph.ops.start_ns[a] < graph.ops.start_ns[b] for a, b in pairs)
