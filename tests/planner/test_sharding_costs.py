"""What a table adds to a rank: indices and their weights, copies, CPUs, hosts' memory; and results of any order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from dlrm_parts.tasks import dreamshard_task

from kernel_models.collectives import CollectiveModel, topology_of
from kernel_models.device import device
from kernel_models.lookups import backward_call, forward_call
from kernel_models.op_call import TablePart
from kernel_models.pricing import price
from planner.sharding.choices import choices_of
from planner.sharding.estimate import estimate
from planner.sharding.planning import DataDrift
from planner.sharding.problem import ShardingPlan, ShardingProblem
from planner.sharding.search import ShardingSearch, search
from planner.sharding.step import Scores, StepModel, assignment_of
from tracer.lookup_data.plan_file import ShardingError, ShardKind, TableSharding
from tracer.lookup_data.tables import EmbeddingTable

TABLE = EmbeddingTable("t", 200_000, 64, bag=20.0, skew=1.05)


def problem(tables: Sequence[EmbeddingTable], ranks: int = 2, on: str = "h100-sxm", **changed: Any) -> ShardingProblem:
    spec = device(on)
    return ShardingProblem(tuple(tables), changed.pop("samples", 1024), ranks, spec,
                           CollectiveModel(topology_of(spec, ranks)), **changed)


def tablewise(made: ShardingProblem, places: Sequence[int]) -> tuple[Scores, ShardingPlan]:
    plan = ShardingPlan(made.tables, tuple(TableSharding(ShardKind.TABLE_WISE, (rank,)) for rank in places),
                        made.ranks, made.per_node)
    return Scores(made, choices_of(made, plan.shardings), StepModel(made)), plan


@pytest.mark.parametrize("fused", [True, False])
def test_indices_are_exchanged_whatever_the_kernel(fused: bool) -> None:
    made = problem([TABLE], fused=fused)
    scores, plan = tablewise(made, [0])
    found = estimate(scores, assignment_of(plan, scores.choices))
    assert found.index_bytes[0] == made.batch * (20 * 8 + 4)
    assert found.memory[0].buffers == 2 * made.batch * (20 * 8 + 4)  # this batch's and the next one's


def test_weights_are_exchanged_kept_and_read() -> None:
    plain, weighted = (problem([replace(TABLE, weighted=each)]) for each in (False, True))
    sent, memory = zip(*((found.index_bytes[0], found.memory[0].buffers) for found in (
        estimate(scores, assignment_of(plan, scores.choices)) for scores, plan in (
            tablewise(plain, [0]), tablewise(weighted, [0])))), strict=True)
    lookups = plain.batch * 20
    assert sent[1] - sent[0] == 4 * lookups and memory[1] - memory[0] == 8 * lookups
    parts = [TablePart.of(replace(TABLE, weighted=each), 4096) for each in (False, True)]
    for call in (forward_call, backward_call):
        assert call([parts[1]]).bytes_read - call([parts[0]]).bytes_read == 4 * 20 * 4096
    us = price([forward_call([part]) for part in parts], device("h100-sxm")).times_us
    assert us[1] > us[0]


def test_large_tables_that_are_only_looked_up_are_copied_where_that_is_fastest() -> None:
    tables = [replace(TABLE, name=f"t{i}", rows=1_000_000, optimizer="none") for i in range(4)]
    found = search(problem(tables), 1)
    assert found.proven
    step = estimate(found.scores, found.best[0][1])
    assert {each.kind for each in step.plan.shardings} == {ShardKind.DATA_PARALLEL}
    assert step.communication_us == 0


def test_a_proof_has_weighed_every_way_of_every_table() -> None:
    large = EmbeddingTable("large", 10_000_000, 96, bag=8.0)
    made = problem([large], 3)
    known = choices_of(made)
    assert {(known.kinds[row], int(known.parts[row])) for row in known.of_table(0)} == {
        (ShardKind.TABLE_WISE, 1), (ShardKind.COLUMN_WISE, 2), (ShardKind.COLUMN_WISE, 3), (ShardKind.ROW_WISE, 1),
        (ShardKind.DATA_PARALLEL, 1)}


def test_a_search_on_a_cpu_compares_what_the_cpu_takes() -> None:
    made = problem(dreamshard_task(3, 6, 64), on="cpu")
    found = search(made, 5)
    shown = [estimate(found.scores, assignment).time_us for _, assignment in found.best]
    # One call over a rank's tables misses its caches more often than each table by itself.
    assert [us for us, _ in found.best] == pytest.approx(shown, rel=0.1)


@pytest.mark.parametrize(("changed", "says"), [
    ({"on": "cpu", "host_bytes": 1e11}, "host's memory anyway"),
    ({"on": "cpu", "tables": [replace(TABLE, location="uvm")]}, "cpu has none"),
    ({"fused": False, "host_bytes": 1e11}, "fused kernels alone")])
def test_host_memory_that_nothing_reads_is_refused(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(ShardingError, match=says):
        problem(changed.pop("tables", [TABLE]), **changed)


def placed(found: ShardingSearch) -> dict[str, TableSharding]:
    plan = found.best[0][1].plan(found.scores.problem, found.scores.choices)
    return {table.name: sharding for table, sharding in zip(plan.tables, plan.shardings, strict=True)}


def test_the_order_of_the_tables_changes_nothing() -> None:
    tables = dreamshard_task(5, 24, 64)
    mixed = [tables[i] for i in np.random.default_rng(1).permutation(len(tables))]
    found = [search(problem(each, 4, kinds=frozenset({ShardKind.TABLE_WISE})), 2) for each in (tables, mixed)]
    assert found[0].best[0][0] == found[1].best[0][0]
    assert placed(found[0]) == placed(found[1])
    for name, known in found[0].baselines.items():
        other = found[1].baselines[name]
        assert known is not None and other is not None and known[0] == other[0], name
    bags = [{table.name: table.bag for table in DataDrift("b", bags=0.5).applied(each)} for each in (tables, mixed)]
    assert bags[0] == bags[1]
