"""Experts spread over ranks: the same training as unspread, by real processes; collectives counted on paper; errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from forks import run_ranks

torch = pytest.importorskip("torch")
if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
    pytest.skip("torch was built without gloo", allow_module_level=True)

from tracer import workloads  # noqa: E402
from tracer.capture.notes import CollectiveNotes  # noqa: E402
from tracer.fake_world import fake_world, parallelize, rank_classes  # noqa: E402
from tracer.parallel_plan import ParallelPlan, PlanError  # noqa: E402
from tracer.shape_only import trace_job  # noqa: E402

SETTINGS = {"preset": "tiny", "depth": 2}
STEPS = """
import os, sys
import torch, torch.distributed as dist
from torch.distributed.tensor import DTensor
from tracer import workloads
from tracer.fake_world import parallelize
from tracer.parallel_plan import ParallelPlan

torch.set_num_threads(1)
rank, folder = int(os.environ["RANK"]), sys.argv[1]

def train(plan, accumulation):
    build = lambda: workloads.build("moe", preset="tiny", depth=2, optimizer="sgd", accumulation=accumulation)
    alone, spread = build(), parallelize(build(), ParallelPlan.parse(plan, 4))
    for _, one, other in zip(range(2), alone.batches(), spread.batches()):
        torch.testing.assert_close(spread.step(other), alone.step(one))
    whole, seen = dict(alone.model.named_parameters()), 0
    for name, value in spread.model.named_parameters():
        value = value.detach().full_tensor() if isinstance(value, DTensor) else value.detach()
        plain = name.replace("module.", "").replace("experts.experts.", "experts.")
        expected = whole[plain].detach()
        if ".experts." in plain:
            seen += 1
            expected = expected[rank % 2 * 2:][:2]
        torch.testing.assert_close(value, expected)
    assert seen == 6

for number, (plan, accumulation) in enumerate((("ddp=4,ep=2", 2), ("fsdp2=4,ep=2", 1))):
    dist.init_process_group("gloo", init_method=f"file://{folder}/{number}", rank=rank, world_size=4)
    train(plan, accumulation)
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_spread_experts_train_as_unspread_ones(tmp_path: Path) -> None:
    """Two steps by four processes with equal batches, under DDP with accumulation and under FSDP2, against the same
    steps by one: losses and parameters."""
    (tmp_path / "train.py").write_text(STEPS)
    run_ranks(4, tmp_path / "train.py", tmp_path)


def noted(plan: str, ranks: int, rank: int, **settings: Any) -> list[dict[str, Any]]:
    with fake_world(ranks, rank):
        workload = parallelize(workloads.build("moe", **SETTINGS, **settings), ParallelPlan.parse(plan, ranks))
        batches, notes = workload.batches(), CollectiveNotes()
        for _ in range(2):
            workload.step(next(batches))
        notes.start()
        workload.step(next(batches))
        notes.stop()
    return notes.rows


def what(rows: list[dict[str, Any]]) -> list[tuple[str, list[int], int]]:
    return [(row["kind"], row["ranks"], row["elements_in"]) for row in rows]


def test_collectives_of_expert_parallelism() -> None:
    """Two blocks, two exchanges each in forward and in backward; 4 experts of 3 × 32 × 32 numbers on 2 ranks."""
    places = 20  # 2 × 16 tokens, each to 2 of 4 experts, with a quarter more room: 16 × 1.25
    rows = what(noted("ddp=4,ep=2", 4, 3))
    exchanges = [row for row in rows if row[0] == "all_to_all"]
    assert exchanges == [("all_to_all", [2, 3], 4 * places * 32)] * 8
    experts = [row for row in rows if row[:2] == ("all_reduce", [1, 3])]
    assert experts == [("all_reduce", [1, 3], 2 * 3 * 32 * 32)] * 2
    rest = [row for row in rows if row[:2] == ("all_reduce", [0, 1, 2, 3])]
    parameters = workloads.build("moe", **SETTINGS).parameters
    assert sum(row[2] for row in rest) == parameters - 2 * 4 * 3 * 32 * 32
    # Where every rank has experts of its own, nobody shares their gradients.
    assert {tuple(row[1]) for row in what(noted("ddp=2,ep=2", 2, 0))} == {(0, 1)}


def test_a_trace_has_the_collectives_of_real_values() -> None:
    plan = "fsdp2=4,ep=2"
    graph = trace_job(workloads.configure("moe", **SETTINGS), "cpu", world_size=4, parallel=plan).rank(3)
    table = graph.collectives
    found = [(graph.string(int(table.kind[row])), json.loads(graph.string(int(table.ranks[row]))),
              int(table.elements_in[row])) for row in range(len(table))]
    assert found == what(noted(plan, 4, 3))
    exchanges = [row for row in range(len(table)) if found[row][0] == "all_to_all"]
    assert {graph.string(int(graph.ops.name[table.wait_op[row]])) for row in exchanges} == {
        "_c10d_functional::wait_tensor"}


def test_classes_of_ranks_with_spread_experts() -> None:
    settings = workloads.configure("moe", **SETTINGS, experts=4)
    assert len(rank_classes(ParallelPlan.parse("ddp=8,ep=4", 8), settings)) == 1
    # Three ranks share the rows of 2 experts each: 1, 1 and none; of the other parameters' rows all six have some.
    classes = rank_classes(ParallelPlan.parse("fsdp2=6,ep=2", 6), settings)
    empty = [rank for each in classes for rank in each if each.first >= 4]
    assert empty == [4, 5]


@pytest.mark.parametrize(("workload", "plan", "world", "settings", "message"), [
    ("moe", "ep=2", 1, {}, "number .1. it does not divide"),
    ("moe", "ddp=8,ep=8", 8, {}, "experts=4 cannot be split evenly by ep=8"),
    ("llama", "ddp=2,ep=2", 2, {}, "llama has no experts"),
    ("moe", "ddp=2,ep=2", 2, {"compile": True}, "compile=true does not go with expert parallelism"),
    ("moe", "ddp=2,ep=0", 2, {}, "ep=0 is not possible"),
])
def test_experts_that_cannot_be_spread_are_told(workload: str, plan: str, world: int, settings: dict[str, Any],
                                                message: str) -> None:
    with pytest.raises(PlanError, match=message):
        rank_classes(ParallelPlan.parse(plan, world), workloads.configure(workload, preset="tiny", **settings))


def test_checkpointed_blocks_with_spread_experts() -> None:
    rows = what(noted("ddp=4,ep=2", 4, 0, checkpointing=True))
    # Each block's forward, with its two exchanges, is run again in backward; gradients are shared once.
    assert sum(row[0] == "all_to_all" for row in rows) == 12
    assert sum(row[:2] == ("all_reduce", [0, 2]) for row in rows) == 2
