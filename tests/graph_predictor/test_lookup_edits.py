"""What look-ups cost follows their indices: stated by a workload, given with ``--indices``, or counted by a capture."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from micro import Micro
from said import Run

from graph_predictor.edits import lookups
from graph_predictor.edits.lookups import OtherIndices
from graph_predictor.prediction.scenario import EditError
from graph_predictor.request.study import Configuration, Study
from kernel_models.device import find_device
from kernel_models.families.embedding import with_tables
from kernel_models.operation import Operation, calls_of, operation
from kernel_models.pricing import price
from tracer import workloads
from tracer.columns import within
from tracer.graph import ExecutionGraph
from tracer.job import assemble_job, read_job
from tracer.lookup_data.indices import counted, read_indices
from tracer.lookup_data.noted import find_lookups, note_tables, tables_of
from tracer.lookup_data.tables import EmbeddingTable, histogram_of_zipf

SIZES = {"preset": "tiny", "batch": 4096, "rows": 200_000, "embedding": 64, "pooling": 20}


@pytest.fixture(scope="module", autouse=True)
def torch() -> Any:
    return pytest.importorskip("torch")


def traced(**settings: Any) -> ExecutionGraph:
    from tracer.shape_only import trace_workload

    return trace_workload(workloads.configure("dlrm", **{**SIZES, **settings}))


def embedding_us(graph: ExecutionGraph, **changed: Any) -> float:
    return Study(assemble_job([graph])).predict(Configuration(**changed)).families_us["embedding"]


def forward_us(graph: ExecutionGraph) -> float:
    calls = [call for own in find_lookups(graph) for call in calls_of(Operation.from_graph(graph, own.rows[0][0]))]
    return float(price(calls, find_device("h200-sxm"), None).total_us)


@pytest.mark.slow
def test_steps_of_other_skew_cost_otherwise_traced_or_edited_alike() -> None:
    graphs = {skew: traced(skew=skew) for skew in (0.0, 1.05, 3.0)}
    times = {skew: embedding_us(graph) for skew, graph in graphs.items()}
    forward = {skew: forward_us(graph) for skew, graph in graphs.items()}
    assert forward[0.0] > 1.1 * forward[1.05] > 1.1**2 * forward[3.0]
    assert len({round(time, 3) for time in times.values()}) == 3
    for skew in (1.05, 3.0):
        assert embedding_us(graphs[0.0], edits={"indices": f"zipf:{skew}"}) == pytest.approx(times[skew], rel=0.01)


def test_a_skew_that_is_set_takes_the_place_of_what_was_counted() -> None:
    graph = traced(skew=1.05)
    with pytest.raises(EditError, match="looks rows up so already"):
        embedding_us(graph, edits={"indices": "zipf:1.05"})
    note_tables(graph, [replace(table, reuse=histogram_of_zipf(4096 * 20, table.rows, 1.05), reuse_lookups=4096 * 20)
                        for table in tables_of(graph)])
    usual, half = embedding_us(graph), embedding_us(graph, sizes=("skew=0.5",))
    assert embedding_us(graph, sizes=("skew=0",)) > 1.05 * usual
    assert usual > 1.03 * embedding_us(graph, sizes=("skew=2.5",))
    assert half == embedding_us(graph, edits={"indices": "zipf:0.5"})
    assert embedding_us(graph, sizes=("skew=0.5", "batch=8192")) > half
    with pytest.raises(EditError, match="give one of them"):
        embedding_us(graph, sizes=("skew=0.5",), edits={"indices": "zipf:0.5"})


def test_calls_of_one_weight_share_the_look_ups_by_bags() -> None:
    (call,) = calls_of(_first(traced(batched=True, bags_halved=2)))
    assert [part.rows for part in call.accesses] == [200_000, 100_000, 50_000, 25_000]
    assert [part.lookups for part in call.accesses] == [20 * 4096] * 3 + [10 * 4096]
    assert {part.bags for part in call.accesses} == {4096}
    assert sum(part.lookups for part in call.accesses) == call.dims[0]


def _first(graph: ExecutionGraph) -> Operation:
    return Operation.from_graph(graph, find_lookups(graph)[0].rows[0][0])


def test_a_counted_batch_scales_to_other_batches() -> None:
    """Twice the look-ups of a Zipf law: more rows, but not twice as many, and longer reuse."""
    generator = np.random.default_rng(1)
    weights = np.arange(1, 5001) ** -1.05
    table = counted(EmbeddingTable("t", 5000, 16), generator.choice(5000, 20_000, p=weights / weights.sum()),
                    np.full(1000, 20))
    types = ["fp32", "int64", "int64"]
    parts = [part for batch in (1000, 4000) for call in calls_of(
        operation("aten::embedding_bag", [(5000, 16), (20 * batch,), (batch,)], types))
        for part in with_tables(call, [table]).accesses]
    assert [part.lookups for part in parts] == [20_000, 80_000]
    assert parts[0].reuse == pytest.approx(table.reuse)
    assert sum(parts[1].reuse[6:]) > sum(parts[0].reuse[6:]) + 0.05
    (call,) = calls_of(operation("aten::mm", [(8, 8), (8, 8)]))
    assert with_tables(call, [table]) is call


@pytest.mark.slow
def test_a_captured_step_on_the_cpu_uses_its_counts_and_other_indices_move_look_ups_only(tmp_path: Path) -> None:
    from tracer.capture import Capture, CaptureOptions
    from tracer.capture.script import run_workload

    settings = workloads.configure("dlrm", preset="tiny", skew=2.0, rows=200_000, embedding=32, batch=512, pooling=20,
                                   sparse=True, optimizer="sgd")
    run_workload(settings, Capture(tmp_path / "run", CaptureOptions(steps=2, warmup=1, timed=2, execution_trace="none",
                                                                   lookups=True)))
    job = read_job(tmp_path / "run")
    study = Study(job)
    plain = study.predict(Configuration())
    recorded = study._recorded
    assert recorded is not None
    edited = OtherIndices.parse("zipf:0").apply(recorded.scenario)
    weight, pieces = edited.host.weight, edited.slices
    assert weight is not None
    graph = job.graphs[0]
    looks_up = np.zeros(len(graph.ops), np.bool_)
    looks_up[[row for own in find_lookups(graph) for row, _ in own.rows]] = True
    changed = pieces.op[weight != 1.0]
    assert len(changed) and within(graph.ops.parent, looks_up)[changed].all()
    # A gradient of rows is mostly what its parts take.
    assert not looks_up[changed].all()
    larger = study.predict(Configuration(sizes=("batch=2048",)))
    assert larger.step_time_us > plain.step_time_us
    (call, *_) = calls_of(_first(graph))
    assert call.accesses[0].reuse == pytest.approx(tables_of(graph)[0].reuse, abs=1e-4)


def test_commands_take_indices(tmp_path: Path, run: Run) -> None:
    times = [run("price", "aten::embedding_bag", "--shapes", "1000000x128,163840,8192", "--device", "h200-sxm",
                 "--json", "--indices", text).json["time_us"] for text in ("zipf:0", "zipf:1.05", "zipf:3")]
    assert times[0] > times[1] > times[2]
    out = tmp_path / "a.foretrace"
    trace = ("trace", "--preset", "tiny", "-o", out, "--workload")
    assert run(*trace, "dlrm", "--indices", "zipf:3").code == 0
    assert {table.skew for table in tables_of(read_job(out).graphs[0])} == {3.0}
    for arguments, said in (
            (["price", "aten::linear", "--shapes", "8x8,8x8", "--device", "h200-sxm", "--indices", "zipf:1"],
             "looks no rows up"),
            (["predict", out, "--indices", "zipf:x"], "is no Zipf law"),
            ([*trace, "vit", "--indices", "zipf:1"], "looks up no embedding table")):
        refused = run(*arguments)
        assert refused.code == 2
        assert said in " ".join(refused.err.split())


def fused_lookup(tmp_path: Path, total: str) -> ExecutionGraph:
    """Three tables in one weight, looked up and updated by FBGEMM as a profiler records it."""
    trace = Micro().calibrate().step(1000, 2000, 1)
    sizes = [[0], [9_600_000], [0], [0, 0], [3], [3], [4], [], [], [4], [], [30_000], [3001], [], []]
    types = ["float"] * 4 + ["int", "long int", "int", "Scalar", "Scalar", "long int", "Scalar", "long int", "long int",
                             "Scalar", ""]
    trace.op("fbgemm::split_embedding_codegen_lookup_adagrad_function", 1010, 1100, **{
        "Input Dims": sizes, "Input type": types, "Concrete Inputs": [""] * 7 + [total, "16"] + [""] * 6})
    trace.launch(1020, 5, (7, 1030, 60), name="embedding_forward")
    trace.op("torch::autograd::CppNode<SplitLookupFunction_adagrad_Op>", 1200, 1300, **{
        "Input Dims": [[1000, 48]], "Input type": ["float"], "Sequence number": 7})
    trace.launch(1220, 5, (7, 1230, 100), name="embedding_backward")
    graph = trace.read(tmp_path)
    graph.meta.device = "NVIDIA A100-SXM4-80GB"
    return graph


def test_tables_in_one_recorded_weight_follow_other_indices(tmp_path: Path) -> None:
    """Their gradient too, which records no index; tables of unknown columns keep theirs, and it is said."""
    graph = fused_lookup(tmp_path, "48")
    found, _ = lookups.tables_with(graph, read_indices("zipf:3"))
    assert len(found) == 2
    for tables in found.values():
        assert [(table.rows, table.columns, table.bag, table.skew) for table in tables] == [(200_000, 16, 10, 3)] * 3
    even, skewed = (embedding_us(graph, edits={"indices": f"zipf:{skew}"}) for skew in (0, 3))
    assert even != pytest.approx(skewed, rel=0.05)
    with pytest.raises(EditError, match="1 of 1 look-ups are of several tables whose columns"):
        embedding_us(fused_lookup(tmp_path, ""), edits={"indices": "zipf:3"})
