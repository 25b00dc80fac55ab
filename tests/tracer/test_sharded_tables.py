"""Embedding tables over ranks: the losses of copies, real uneven exchanges over gloo, and steps by shapes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forks import run_ranks
from recordings import recorded_until, worst_closing

from graph_predictor.comm.recorded_calls import with_host_collectives
from kernel_models.collectives import CollectiveModel, topology_of
from kernel_models.device import device
from planner.sharding.estimate import anchored_problem
from planner.sharding.problem import ShardingPlan, ShardingProblem, shards_of
from planner.sharding.sources import StepPart, sharding_source
from tracer import workloads
from tracer.fake_world.fit import check_plan
from tracer.job import Job, read_job
from tracer.lookup_data.noted import find_lookups, tables_of
from tracer.lookup_data.plan_file import ShardingError, ShardKind, TableSharding
from tracer.lookup_data.tables import EmbeddingTable
from tracer.parallel_plan import ParallelPlan, PlanError
from tracer.workloads.places import pieces_of

CLOSING = 0.03

SHARDINGS = ("table", "row", "column", "0,0,row,column", "1,row:1+0,column:1+0+1,copy")
LOSSES = """
import json, sys
import torch
import torch.distributed as dist
from tracer.fake_world import parallelize
from tracer.parallel_plan import ParallelPlan
from tracer.workloads import configure, create

torch.set_num_threads(1)
dist.init_process_group("gloo")
base = {"preset": "tiny", "columns_halved": 2, "bags_halved": 2, "optimizer": "sgd"}
plain = create(configure("dlrm", **base)).model
whole = [10 * table.weight.detach() for table in plain.tables]
rest = {name: value for name, value in plain.state_dict().items() if not name.startswith("tables")}


def losses(sharding, batched, kept=False, **more):
    settings = configure("dlrm", sharding=sharding, batched=batched, **base, **more)
    spread = parallelize(create(settings), ParallelPlan.parse("ddp", dist.get_world_size()))
    model = spread.model.module
    model.load_state_dict(rest, strict=False)
    with torch.no_grad():
        if not sharding:
            for table, weight in zip(model.tables, whole):
                table.weight.copy_(weight)
        else:
            for number, table in model.tables.copies.items():
                table.weight.copy_(whole[int(number)])
            for places, table in zip(model.tables.groups, model.tables.weights.values()):
                begin = 0
                for piece in (model.tables.own[place] for place in places):
                    part = whole[piece.table][piece.first_row:][:piece.rows, piece.first_column:][:, :piece.columns]
                    table.weight[begin:begin + piece.rows] = part
                    begin += piece.rows
    group = spread.optimizer.param_groups[0]
    group["lr"] = 0.5
    batches = (batch for _, batch in zip(range(6), spread.batches()))
    return [float(spread.step(batch)) for batch in (list(batches) if kept else batches)]


found = {f"{sharding} {batched}": losses(sharding, batched)
         for sharding in ("", *sys.argv[2].split(";")) for batched in (False, True) if sharding or not batched}
for kept in (False, True):  # batches that were drawn before are not known to follow one another
    found[f"ahead {kept}"] = losses("0,0,row,column", True, kept, pipelined=True)
if dist.get_rank() == 0:
    json.dump(found, open(sys.argv[1], "w"))
dist.barrier()
dist.destroy_process_group()
"""
CAPTURE = """
import sys
import torch
import torch.distributed as dist
from tracer.capture import Capture, CaptureOptions
from tracer.capture.script import run_workload
from tracer.parallel_plan import ParallelPlan
from tracer.workloads import configure

torch.set_num_threads(1)
dist.init_process_group("gloo")
for out, pipelined in ((sys.argv[1], False), (sys.argv[2], True)):
    settings = configure("dlrm", preset="tiny", columns_halved=2, bags_halved=2, sharding="0,1,0,0",
                         pipelined=pipelined)
    options = CaptureOptions(steps=4, warmup=2, timed=2, execution_trace="none", lookups=True)
    run_workload(settings, Capture(out, options), ParallelPlan.parse("ddp", 2))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module", autouse=True)
def torch() -> Any:
    found = pytest.importorskip("torch")
    if not (found.distributed.is_available() and found.distributed.is_gloo_available()):
        pytest.skip("torch was built without gloo")
    return found


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job, and beside it, ``ahead``, one whose look-ups are a pipeline."""
    folder = tmp_path_factory.mktemp("sharded")
    (folder / "train.py").write_text(CAPTURE)

    def closes(path: Path) -> None:
        assert all(worst_closing(read_job(path / name)) <= CLOSING for name in ("job", "ahead"))

    return recorded_until(closes, lambda path: run_ranks(2, folder / "train.py", path / "job", path / "ahead"),
                          folder) / "job"


@pytest.fixture(scope="module")
def job(captured: Path) -> Job:
    return read_job(captured)


def test_every_sharding_learns_as_copies_do(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LOSSES)
    run_ranks(2, tmp_path / "train.py", tmp_path / "losses.json", ";".join(SHARDINGS))
    losses = json.loads((tmp_path / "losses.json").read_text())
    copies = losses.pop(" False")
    assert len(losses) == 2 * len(SHARDINGS) + 2
    for name, found in losses.items():
        assert found == pytest.approx(copies, rel=1e-4), name
    assert abs(copies[4] - copies[0]) > 1e-3  # the same batch, learned from


def test_a_captured_job_has_uneven_exchanges_and_replays(job: Job) -> None:
    exchanged = []
    for graph in job.graphs:
        table, steps = graph.collectives, len(graph.steps)
        kinds = np.array([graph.string(int(code)) for code in table.kind])
        assert (kinds == "all_to_all").sum() >= 4 * steps  # lengths, indices, vectors, gradients
        assert (kinds == "all_reduce").sum() >= steps
        exchanged.append(table.elements_out[kinds == "all_to_all"].sum())
    assert exchanged[0] != exchanged[1]  # rank 0 has three tables, rank 1 one
    assert worst_closing(job) <= CLOSING
    own = [{(table.rows, table.columns) for table in tables_of(graph)} for graph in job.graphs]
    assert own == [{(500, 16), (125, 8), (62, 8)}, {(250, 16)}]


def test_a_captured_pipeline_exchanges_the_next_batchs_look_ups_aside(captured: Path) -> None:
    job = read_job(captured.with_name("ahead"))
    for graph in job.graphs:
        table, steps = graph.collectives, len(graph.steps)
        exchanges = np.array([graph.string(int(code)) == "all_to_all" for code in table.kind])
        assert exchanges.sum() == 4 * steps
        # Lengths, vectors, indices, gradients of vectors.
        assert table.is_async[exchanges].tolist() == [1, 0, 1, 0] * steps
        assert (with_host_collectives(graph).collectives.kernel >= 0).all()
    assert worst_closing(job) <= CLOSING


def test_a_captured_sharding_anchors_others(captured: Path) -> None:
    cpu = device("cpu")
    found = sharding_source(str(captured.with_name("ahead")), cpu)
    assert [table.rows for table in found.tables] == [500, 250, 125, 62]
    assert all(table.reuse for table in found.tables)  # counted on the rank that has it
    assert found.recorded is not None and found.recorded.shardings is not None
    assert found.recorded.pipelined
    assert [each.ranks for each in found.recorded.shardings] == [(0,), (1,), (0,), (0,)]
    problem = ShardingProblem(found.tables, found.samples, 2, cpu, CollectiveModel(topology_of(cpu, 2)),
                              dense=found.dense)
    anchored = anchored_problem(problem, found.recorded, same_cluster=True)
    step, own = found.recorded.step, anchored.own
    assert own is not None and step.exchanged > 0
    assert own.forward_us.mean() == pytest.approx(step.mean(StepPart.LOOKUPS), rel=0.02)
    assert own.backward_us.mean() == pytest.approx(step.mean(StepPart.GRADIENTS), rel=0.02)
    assert own.phases["host"] == step.host


@pytest.mark.slow
def test_eight_ranks_by_shapes_have_a_class_for_each_share() -> None:
    from tracer.shape_only import trace_job

    settings = workloads.configure("dlrm", preset="tiny", tables=8, sharding="table")
    found = trace_job(settings, world_size=8, parallel="ddp")
    assert [list(each) for each in found.classes] == [[0, 4], [1, 5], [2, 6], [3, 7]]  # of 500, 250, 125 and 62 rows
    for graph, rows in zip(found.graphs, (500, 250, 125, 62), strict=True):
        (own,) = find_lookups(graph)
        assert own.shape == (rows, 16)
        assert own.lookups == 8 * settings.batch * settings.pooling
        assert [graph.string(int(code)) for code in graph.collectives.kind].count("all_to_all") == 4


@pytest.mark.parametrize("sharding", ["row", "column", "0,3,row,copy", "row:2+1,column:3+3,0,copy"])
def test_pieces_cover_every_table_once(sharding: str) -> None:
    tables = [EmbeddingTable(f"t{i}", 100 + i, 8) for i in range(4)]
    pieces = pieces_of(tables, sharding, 4)
    for number, table in enumerate(tables):
        own = [piece for piece in pieces if piece.table == number]
        copied = sharding.endswith("copy") and number == 3
        assert sum(piece.rows * piece.columns for piece in own) == (0 if copied else table.rows * table.columns)
    for rows, blocks in ((10, [3, 3, 3, 1]), (9, [3, 3, 3]), (3, [1, 1, 1]), (8, [2, 2, 2, 2])):
        assert [piece.rows for piece in pieces_of([EmbeddingTable("t", rows, 8)], "row", 4)] == blocks


@pytest.mark.parametrize(("values", "plan", "message"), [
    ({"sharding": "0,9,0,0"}, "ddp", "is to lie on rank 9, and there are 2"),
    ({"sharding": "table"}, "fsdp2", "sharding spreads tables over ddp's replicas"),
    ({"sharding": "column", "embedding": 1}, "ddp", "has 1 columns, fewer than its 2 ranks"),
])
def test_plans_that_do_not_fit(values: dict[str, Any], plan: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_plan(workloads.configure("dlrm", preset="tiny", **values), ParallelPlan.parse(plan, 2))


def test_a_plan_of_shard_is_a_place_for_each_table(tmp_path: Path) -> None:
    tables = workloads.configure("dlrm", preset="tiny", tables=5).embedding_tables()
    everyone = (0, 1, 2, 3)
    plan = ShardingPlan(tuple(tables), (
        TableSharding(ShardKind.ROW_WISE, everyone), TableSharding(ShardKind.COLUMN_WISE, (3, 1)),
        TableSharding(ShardKind.TABLE_WISE, (2,)), TableSharding(ShardKind.DATA_PARALLEL, everyone),
        TableSharding(ShardKind.TABLE_ROW_WISE, (2, 3))), 4, 2)
    plan.save(tmp_path / "plan.json")
    text = f"sharding={tmp_path / 'plan.json'}"
    settings: Any = workloads.parse("dlrm", ["tables=5", text], preset="tiny")
    assert settings.sharding == "row,column:3+1,2,copy,row:2+3@4"
    pieces = {(each.table, each.rank, each.first_row, each.rows, each.first_column, each.columns)
              for each in pieces_of(tables, settings.sharding, 4)}
    assert pieces == {(row, shard.rank, shard.row, shard.rows, shard.column, shard.columns)
                      for row, shard in plan.shards() if row != 3}
    assert len(shards_of(tables[3], plan.shardings[3])) == 4
    with pytest.raises(workloads.WorkloadError, match="for 4 ranks, and there are 8"):
        pieces_of(tables, settings.sharding, 8)
    for sizes, says in ((["tables=5", "rows=600"], "of 500 rows and 16 columns, and the table has 600"),
                        (["tables=6"], "says nothing of table")):
        with pytest.raises(ShardingError, match=says):
            workloads.parse("dlrm", [*sizes, text], preset="tiny")


def test_tables_on_other_ranks_need_a_plan(tmp_path: Path) -> None:
    from tracer.capture import Capture, CaptureOptions
    from tracer.capture.script import run_workload
    from tracer.shape_only import trace_workload

    settings = workloads.configure("dlrm", preset="tiny", sharding="0,1,0,1@2")
    with pytest.raises(workloads.WorkloadError, match="one process without a plan"):
        trace_workload(settings)
    with pytest.raises(workloads.WorkloadError, match="one process without a plan"):
        run_workload(settings, Capture(tmp_path / "out", CaptureOptions()))


@pytest.mark.parametrize("text", ["0,1", "somewhere", "0,1,table,2", "row:0+0", "row:a", "0,1,0,0@x", "0@"])
def test_places_that_are_none(text: str) -> None:
    with pytest.raises(workloads.WorkloadError, match="sharding="):
        workloads.configure("dlrm", preset="tiny", sharding=text)
