"""Real runs of several processes under torchrun, captured, read back, matched and replayed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forks import run_program, run_ranks

torch = pytest.importorskip("torch")
if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
    pytest.skip("torch was built without gloo", allow_module_level=True)

from graph_predictor import replay  # noqa: E402
from tracer import read_job  # noqa: E402
from tracer.capture.merge import RecordedCall, notes_of  # noqa: E402
from tracer.capture_layout import find_parts, read_context  # noqa: E402
from tracer.errors import TraceError  # noqa: E402
from tracer.execution_trace import read_execution_trace  # noqa: E402
from tracer.graph import NONE, ExecutionGraph  # noqa: E402
from tracer.job import Job  # noqa: E402

STEP_ERROR = 0.03
STEPS = 2

SCRIPT = """
import sys
import torch
import torch.distributed as dist
import tracer

kind, out = sys.argv[1:]
torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo")
blocks = [torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 16)) for _ in range(2)]
model = torch.nn.Sequential(*blocks)
if kind == "ddp":
    model = torch.nn.parallel.DistributedDataParallel(model)
else:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
pair = dist.new_group([0, 1])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with tracer.capture(out, steps=2, warmup=3, timed=3, execution_trace="all") as capture:
    while not capture.finished:
        optimizer.zero_grad()
        loss = model(torch.randn(8, 16)).square().mean()
        loss.backward()
        optimizer.step()
        if kind == "ddp":
            dist.all_reduce(loss.detach(), group=pair)
        capture.step()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def ddp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ddp")
    (folder / "train.py").write_text(SCRIPT)
    run_ranks(2, folder / "train.py", "ddp", folder / "job")
    return folder / "job"


def described(graph: ExecutionGraph) -> list[tuple[str, str, str, str, int, int, int]]:
    table = graph.collectives
    return [(graph.string(int(table.kind[i])), graph.string(int(table.group[i])), graph.string(int(table.ranks[i])),
             graph.string(int(table.dtype[i])), int(table.elements_in[i]), int(table.elements_out[i]),
             int(table.order[i])) for i in range(len(table))]


def check_job(job: Job, out: Path, ranks: int) -> None:
    """Every rank is there with its measurements, joined to its execution trace both ways, and replays."""
    assert [graph.meta.rank for graph in job.graphs] == list(range(ranks))
    # Others may keep the machine busy, and ranks that share its processors wait for each other at steps' borders.
    notes = [note for note in job.notes if "the machine" not in note and "ran at its borders" not in note]
    assert (job.world_size, job.missing_ranks, notes) == (ranks, [], [])
    result, pairs = replay(job.graphs), []
    assert len(result.steps) == ranks * STEPS and result.max_abs_error <= STEP_ERROR
    for graph, part in zip(job.graphs, find_parts(out), strict=True):
        assert graph.meta.backend == "gloo" and len(graph.meta.unprofiled_step_ns) == 3
        steps = np.array([name.startswith("ProfilerStep#") for name in graph.strings])[graph.ops.name]
        assert graph.meta.et_joined == graph.meta.et_candidates == int((~steps).sum())
        trace = read_execution_trace(part.execution_trace)
        ids = graph.ops.record_id[graph.ops.record_id > 0]
        assert np.isin(trace.record_id[(trace.record_id >= ids.min()) & (trace.record_id <= ids.max())], ids).all()
        mine = [step.replayed_ns for step in result.steps if step.rank == graph.meta.rank]
        pairs += zip(mine, read_context(part.path)["profiled_step_ns"], strict=True)
    # As of one process, on a machine that has fewer cores than there are ranks: an annotation's borders lie outside
    # the clock's readings, and another rank may run in between, in some of the steps.
    assert all(outer > inner * (1 - STEP_ERROR) for outer, inner in pairs)
    assert any(outer == pytest.approx(inner, rel=STEP_ERROR, abs=1_000_000) for outer, inner in pairs)


def check_matched(graphs: list[ExecutionGraph]) -> None:
    """All ranks saw the same collectives, in the same order, in the same groups, one row for each."""
    first = described(graphs[0])
    assert first and all(described(graph) == first for graph in graphs)
    for graph in graphs:
        table = graph.collectives
        assert (table.kernel == NONE).all()
        assert len(set(table.op.tolist())) == len(table)
        assert all(graph.string(int(graph.ops.name[op])).startswith("c10d::") for op in table.op)
        assert (np.diff(graph.ops.start_ns[table.op]) > 0).all()
        assert np.bincount(graph.ops.step[table.op]).tolist() == [len(table) // STEPS] * STEPS


def test_ddp_on_two_processes(ddp: Path) -> None:
    job = read_job(ddp)
    check_job(job, ddp, 2)
    check_matched(job.graphs)
    elements = 2 * (16 * 32 + 32 + 32 * 16 + 16)
    world, pair = (group["pg_name"] for group in job.graphs[0].meta.process_groups)
    assert described(job.graphs[0]) == [
        ("all_reduce", world, "[0, 1]", "float32", elements, elements, 0),
        ("all_reduce", pair, "[0, 1]", "float32", 1, 1, 0),
        ("all_reduce", world, "[0, 1]", "float32", elements, elements, 1),
        ("all_reduce", pair, "[0, 1]", "float32", 1, 1, 1),
    ]
    told = "async" in str(torch.ops.c10d.allreduce_.default._schema).lower()  # not in torch 2.6
    assert job.graphs[0].collectives.is_async.tolist() == ([1, 0, 1, 0] if told else [NONE] * 4)


@pytest.mark.slow
def test_fsdp2_on_four_processes_under_torchrun(tmp_path: Path) -> None:
    if not hasattr(torch.cpu.current_stream(), "record_event"):
        pytest.skip("this torch's FSDP2 does not run on a CPU")
    script, out = tmp_path / "train.py", tmp_path / "job"
    script.write_text(SCRIPT)
    torchrun = "from torch.distributed.run import main; main()"
    result = run_program(torchrun, "--standalone", "--nproc-per-node", 4, script, "fsdp", out)
    assert result.returncode == 0, result.stderr[-3000:]
    job = read_job(out)
    check_job(job, out, 4)
    check_matched(job.graphs)
    block = 16 * 32 + 32 + 32 * 16 + 16
    step = [kind for kind, *_ in described(job.graphs[0])][:len(job.graphs[0].collectives) // STEPS]
    assert step.count("reduce_scatter") == 2 and step.count("all_gather") == 4  # one a block; forward and backward
    for kind, _, ranks, dtype, sent, received, _ in described(job.graphs[0]):
        assert (ranks, dtype) == ("[0, 1, 2, 3]", "float32")
        assert (sent, received) == ((block // 4, block) if kind == "all_gather" else (block, block // 4))


def test_one_rank_lost(ddp: Path, tmp_path: Path) -> None:
    shutil.copytree(ddp, tmp_path / "job")
    shutil.rmtree(tmp_path / "job" / "rank0")
    job = read_job(tmp_path / "job")
    assert ([graph.meta.rank for graph in job.graphs], job.missing_ranks) == ([1], [0])
    shutil.copytree(ddp / "rank0", tmp_path / "job" / "rank0")
    (tmp_path / "job" / "rank0" / "kineto.json.gz").write_bytes(b"")
    job = read_job(tmp_path / "job")
    assert job.missing_ranks == [0] and any(note.startswith("Skipped: ") for note in job.notes)


def test_collectives_that_are_not_those_noted(ddp: Path, tmp_path: Path) -> None:
    shutil.copytree(ddp / "rank0", tmp_path / "rank0")
    path = tmp_path / "rank0" / "collectives.json"
    stored = json.loads(path.read_text())
    stored["rows"].pop()
    path.write_text(json.dumps(stored))
    # The one that is left keeps its group; the other may be of either, unless there is one only.
    job = read_job(tmp_path)
    told = "2 of 2 steps have other collectives than the step in which they were noted: "
    assert f"{told}the process groups of 2 of their 4 collectives are unknown." in job.notes
    assert [(kind, group) for kind, group, *_ in described(job.graphs[0])] == [
        ("all_reduce", "0"), ("all_reduce", "")] * 2
    context = json.loads((tmp_path / "rank0" / "context.json").read_text())
    context["process_groups"].pop()
    (tmp_path / "rank0" / "context.json").write_text(json.dumps(context))
    job = read_job(tmp_path)
    assert f"{told}2 of their 4 collectives are taken to be of the job's only process group." in job.notes
    assert [(kind, group, ranks, elements) for kind, group, ranks, _, elements, *_ in described(job.graphs[0])] == [
        ("all_reduce", "0", "[0, 1]", 2144), ("all_reduce", "0", "[0, 1]", 1)] * 2
    path.write_text("[")
    with pytest.raises(TraceError, match=r"collectives\.json"):
        read_job(tmp_path)


def test_steps_with_an_occasional_collective_are_aligned() -> None:
    def note(op: str, group: str, size: int, received: int | None = None) -> dict[str, Any]:
        return {"op": op, "group": group, "elements_in": size, "elements_out": received or size}

    a, b, c = note("reduce", "0", 10), note("reduce", "1", 20), note("gather", "0", 3, 12)
    call = RecordedCall
    assert notes_of([call("reduce", 10), call("reduce", 7), call("reduce", 20), call("gather", 15)], [a, b, c]) == [
        a, None, b, c]
    # It was noted in a step that had more.
    assert notes_of([call("reduce", 20), call("gather", 3)], [a, b, c]) == [b, c]
    assert notes_of([call("gather"), call("reduce"), call("reduce")], [a, b]) == [None, a, b]
    # Which of three the two are is not known without sizes; if they are the same all the same, it does not matter.
    assert notes_of([call("reduce")] * 3, [a, b]) == [None, None, None]
    assert notes_of([call("reduce", 10)], [a, dict(a)]) == [a]
    assert notes_of([], [a]) == [] and notes_of([call("reduce", 10)], []) == [None]
