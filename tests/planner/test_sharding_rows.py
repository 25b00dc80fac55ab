"""Sharding by what tables have: indices, weights, precision, order, and rows in the hosts' memory."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dlrm_parts.tasks import dreamshard_task
from hypothesis import given, settings
from hypothesis import strategies as st
from said import plain
from table_files import write_tables
from typer.testing import CliRunner

from foretrace.commands import app
from kernel_models.collectives import CollectiveModel, topology_of
from kernel_models.device import device
from kernel_models.lookups import backward_call, forward_call
from kernel_models.op_call import TablePart
from kernel_models.pricing import price
from planner.sharding.choices import choices_of
from planner.sharding.estimate import ShardedStep, estimate
from planner.sharding.planning import DataDrift, drifted
from planner.sharding.problem import RESERVED_BYTES, Anchors, ShardingPlan, ShardingProblem, WorkAnchor, load_plan
from planner.sharding.search import search
from planner.sharding.step import Scores, StepModel, assignment_of
from tracer.lookup_data.plan_file import ShardingError, ShardKind, TableSharding
from tracer.lookup_data.tables import EmbeddingTable
from tracer.workloads.places import places_of_plan

RUNNER = CliRunner()
TABLE = EmbeddingTable("t", 10_000_000, 64, bag=20.0, skew=0.8)
LARGE = [EmbeddingTable(f"t{i}", 40_000_000, 64, bag=bag, skew=0.9) for i, bag in enumerate((2, 20, 40, 5))]
"""Four tables of 10 GB each."""


def problem(tables: list[EmbeddingTable], ranks: int = 2, on: str = "h100-sxm", **changed: Any) -> ShardingProblem:
    spec = device(on)
    return ShardingProblem(tuple(tables), changed.pop("samples", 2048), ranks, spec,
                           CollectiveModel(topology_of(spec, ranks)), **changed)


def whole_tables(*ranks: int) -> tuple[TableSharding, ...]:
    return tuple(TableSharding(ShardKind.TABLE_WISE, (rank,)) for rank in ranks)


def step(made: ShardingProblem, *shardings: TableSharding) -> ShardedStep:
    plan = ShardingPlan(made.tables, shardings, made.ranks, made.per_node)
    scores = Scores(made, choices_of(made, plan.shardings), StepModel(made))
    return estimate(scores, assignment_of(plan, scores.choices))


def whole(table: EmbeddingTable, **changed: Any) -> ShardedStep:
    """The step of one table on rank 0, where it says that it lies."""
    one = replace(table, **changed)
    return step(problem([one], host_bytes=0.0 if one.location == "hbm" else 1e12),
                TableSharding(ShardKind.TABLE_WISE, (0,), one.location))


# Laws

@settings(max_examples=8, deadline=None)
@given(st.integers(10**5, 10**7), st.floats(1, 8), st.integers(1, 60), st.sampled_from((32, 64, 128)),
       st.sampled_from(("hbm", "uvm", "uvm_cached")))
def test_a_step_grows_with_rows_look_ups_and_columns_and_falls_with_reuse(
        rows: int, more: float, bag: int, columns: int, location: str) -> None:
    table, least = replace(TABLE, rows=rows, bag=float(bag), columns=columns, location=location), 1 - 1e-9

    def look_ups(**changed: Any) -> float:
        return whole(table, **changed).phases["look-ups"]

    # Of few look-ups a gradient takes longer if many are of one row, whose gradients are added one after another.
    base = whole(table)
    # A share of more rows would be a larger cache: it stays as it is.
    larger = round(rows * more)
    assert look_ups(rows=larger, cache_load_factor=0.2 * rows / larger) >= base.phases["look-ups"] * 0.999
    assert look_ups(skew=0.4) >= base.phases["look-ups"] * least >= look_ups(skew=1.3) * least**2
    assert whole(table, bag=bag * more).time_us >= base.time_us * least
    assert whole(table, columns=2 * columns).time_us >= base.time_us * least


@settings(max_examples=8, deadline=None)
@given(st.integers(10**4, 10**8), st.integers(1, 60), st.sampled_from((8, 32, 128)),
       st.sampled_from(("hbm", "uvm", "uvm_cached")))
def test_a_larger_precision_is_never_quicker(rows: int, bag: int, columns: int, location: str) -> None:
    table = replace(TABLE, rows=rows, bag=float(bag), columns=columns, location=location)
    looked_up = [whole(table, dtype=dtype, optimizer="none") for dtype in ("int4", "int8", "fp16", "fp32")]
    trained = [whole(table, dtype=dtype) for dtype in ("fp16", "fp32")]
    for steps in (looked_up, trained):
        times = [each.time_us for each in steps]
        assert all(more >= less * (1 - 1e-9) for less, more in pairwise(times))
        held = [each.fullest.total + each.host_bytes.sum() for each in steps]
        assert held == sorted(held)


def test_the_hosts_memory_costs_time_and_its_interval_is_wider() -> None:
    near, cached, far = (whole(TABLE, location=where) for where in ("hbm", "uvm_cached", "uvm"))
    assert near.time_us < cached.time_us < far.time_us
    assert near.host_bytes.tolist() == [0, 0] and far.host_bytes.tolist() == [TABLE.weight_bytes, 0]
    assert far.fullest.parameters == 0 < cached.fullest.parameters < near.fullest.parameters
    assert far.high_us / far.time_us > 1.5 * near.high_us / near.time_us
    assert whole(TABLE, location="uvm_cached", cache_load_factor=0.6).time_us < cached.time_us


def test_measured_look_ups_do_not_narrow_the_interval_of_rows_in_the_hosts_memory() -> None:
    table = replace(TABLE, location="uvm")
    made, sharding = problem([table], host_bytes=1e12), TableSharding(ShardKind.TABLE_WISE, (0,), "uvm")
    modelled = step(made, sharding)
    us = float(modelled.forward_us[0])
    # As long as what was recorded: other work would be known as well as that.
    anchored = step(replace(made, anchors=Anchors(WorkAnchor(us, us, 0.9 * us, 1.1 * us))), sharding)
    assert anchored.time_us == pytest.approx(modelled.time_us)
    assert anchored.high_us >= modelled.high_us * (1 - 1e-9)


def test_vectors_of_half_the_precision_are_half_as_large() -> None:
    full, half = whole(TABLE), whole(TABLE, output_dtype="fp16")
    assert half.sent_bytes[0] == full.sent_bytes[0] / 2 and half.phases["vectors"] < full.phases["vectors"]


def test_tables_that_are_only_looked_up_have_no_gradients() -> None:
    trained, looked_up = whole(TABLE), whole(TABLE, optimizer="none")
    assert looked_up.phases["look-ups"] == pytest.approx(trained.phases["look-ups"])
    for phase in ("gradients of vectors", "look-ups, backward", "all-reduce"):
        assert looked_up.phases[phase] == 0
    copied = step(problem([replace(TABLE, rows=1000, optimizer="none")]), TableSharding(
        ShardKind.DATA_PARALLEL, (0, 1)))
    assert copied.phases["copied tables"] == copied.phases["all-reduce"] == 0


# The search


@pytest.mark.slow  # limits of both memories: the next test
def test_the_table_with_most_look_ups_stays_on_a_device() -> None:
    made = problem(LARGE, memory_bytes=20e9, host_bytes=60e9)
    found = search(made, 2)
    for us, assignment in found.best:
        assert estimate(found.scores, assignment).time_us == pytest.approx(us, rel=0.1)
    best = found.best[0][1].plan(made, found.scores.choices)
    assert best.shardings[2].location == "hbm" and {each.location for each in best.shardings} != {"hbm"}
    assert found.best[0][0] > search(problem(LARGE), 1).best[0][0]
    shown = drifted(made, [best], DataDrift("flat", 0.0))
    assert shown.plans_us[0] >= shown.best_us > 0


@pytest.mark.parametrize("host", [0.0, 25e9])
def test_baselines_and_plans_never_exceed_either_memory(host: float) -> None:
    made = problem(LARGE, memory_bytes=20e9 if host else 32e9, host_bytes=host,
                   kinds=frozenset({ShardKind.TABLE_WISE, ShardKind.ROW_WISE}))
    found = search(made, 2)
    steps = [*found.best, *(each for each in found.baselines.values() if each is not None)]
    assert len(steps) > 2
    for _, assignment in steps:
        loads = found.scores.adder.loads(assignment)
        assert (loads.memory + RESERVED_BYTES + made.received_bytes <= made.limit_bytes).all()
        assert (loads.host_bytes <= host / 2).all()


def test_a_table_that_says_where_it_lies_stays_there() -> None:
    made = problem([replace(TABLE, location="uvm"), replace(TABLE, name="u")], host_bytes=1e11)
    for _, assignment in search(made, 3).best:
        shardings = assignment.plan(made, choices_of(made)).shardings
        assert shardings[0].location == "uvm"


def test_a_plan_names_torchrecs_kernels_and_is_read_again(tmp_path: Path) -> None:
    tables = (TABLE, replace(TABLE, name="u", cache_load_factor=0.3))
    plan = ShardingPlan(tables, (TableSharding(ShardKind.TABLE_WISE, (1,), "uvm"),
                                 TableSharding(ShardKind.ROW_WISE, (0, 1), "uvm_cached")), 2, 2)
    plan.save(tmp_path / "plan.json")
    module = json.loads((tmp_path / "plan.json").read_text())["plan"]["embeddings"]
    assert [module[name]["compute_kernel"] for name in "tu"] == ["fused_uvm", "fused_uvm_caching"]
    assert "cache_params" not in module["t"] and module["u"]["cache_params"] == {"load_factor": 0.3}
    assert load_plan(tmp_path / "plan.json", tables) == plan
    looked_up = tuple(replace(table, dtype="int8", optimizer="none") for table in tables)
    replace(plan, tables=looked_up).save(tmp_path / "plan.json")
    assert "quant_uvm_caching" in (tmp_path / "plan.json").read_text()
    assert load_plan(tmp_path / "plan.json", looked_up).shardings == plan.shardings
    with pytest.raises(ShardingError, match="make a plan without --host-memory"):
        places_of_plan(str(tmp_path / "plan.json"), tables)
    (tmp_path / "plan.json").write_text((tmp_path / "plan.json").read_text().replace("quant_uvm_caching", "ssd"))
    with pytest.raises(ShardingError, match="'ssd' is no compute kernel"):
        load_plan(tmp_path / "plan.json", looked_up)
    with pytest.raises(ShardingError, match="copies lie in the devices' memory"):
        ShardingPlan((TABLE,), (TableSharding(ShardKind.DATA_PARALLEL, (0, 1), "uvm"),), 2, 2)


@pytest.mark.parametrize(("tables", "changed", "says"), [
    ([replace(TABLE, location="uvm_cached")], {}, "no host memory is given"),
    ([TABLE, replace(TABLE, name="u", dtype="int4", optimizer="none")], {}, "'u' is only looked up and 't' is trained"),
    (LARGE, {"memory_bytes": 10e9, "host_bytes": 20e9}, "their hosts 20 GB"),
    ([replace(TABLE, location="uvm")], {"host_bytes": 1e9, "memory_bytes": 80e9}, "whose host has no room"),
    ([replace(TABLE, location="uvm")], {"host_bytes": 1e12, "kinds": frozenset({ShardKind.DATA_PARALLEL})},
     "cannot be copied"),
    ([TABLE], {"on": "cpu", "host_bytes": 1e11}, "host's memory anyway"),
    ([replace(TABLE, location="uvm")], {"on": "cpu"}, "cpu has none"),
    ([TABLE], {"fused": False, "host_bytes": 1e11}, "fused kernels alone")])
def test_what_cannot_be_is_one_sentence(tables: list[EmbeddingTable], changed: dict[str, Any], says: str) -> None:
    with pytest.raises(ShardingError, match=says):
        search(problem(tables, **changed))


def run(*arguments: str) -> Any:
    return RUNNER.invoke(app, ["shard", *arguments])


def test_host_memory_is_shown_beside_the_devices(tmp_path: Path) -> None:
    write_tables(LARGE, tmp_path / "t.csv")
    usual = (str(tmp_path / "t.csv"), "--gpus", "2", "--device", "h100-sxm", "--memory", "20", "--batch", "512")
    for more, says in (((), "--host-memory"), (("--host-memory", "0"), "--host-memory 0 leaves no memory")):
        refused = run(*usual, *more)
        assert refused.exit_code == 2 and says in plain(refused.output)
    found = run(*usual, "--host-memory", "60", "--kinds", "tw", "--top", "1", "--out", str(tmp_path / "p.json"))
    assert found.exit_code == 0, found.output
    shown = plain(found.output)
    assert "uvm" in shown and "hosts" in shown and "no measurement has tested" in shown
    assert any(each.location != "hbm" for each in load_plan(tmp_path / "p.json", LARGE).shardings)


@pytest.mark.parametrize(("text", "says"), [
    ("name,rows,columns,location\na,10,4,ssd\n", "location 'ssd' is unknown"),
    ("name,rows,columns,cache_load_factor\na,10,4,-1\n", "cache_load_factor is -1"),
    ("name,rows,columns,cache_load_factor\na,10,4,nan\n", "cache_load_factor is nan"),
    ("name,rows,columns,dtype\na,10,4,int3\n", "dtype 'int3' is unknown"),
    ("name,rows,columns,dtype,optimizer\na,10,4,int8,sgd\n", "only looked up"),
    ("name,rows,columns,location\na,10,4,uvm\n", "no host memory is given"),
    ("name,rows,columns\na,nan,4\n", "line 2: rows is nan")])
def test_bad_tables_are_one_sentence(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    found = run(str(tmp_path / "t.csv"), "--gpus", "2")
    assert found.exit_code == 2 and says in plain(found.output) and "Traceback" not in found.output


@pytest.mark.parametrize("fused", [True, False])
def test_indices_are_exchanged_whatever_the_kernel(fused: bool) -> None:
    made = problem([TABLE], fused=fused)
    found = step(made, *whole_tables(0))
    assert found.index_bytes[0] == made.batch * (20 * 8 + 4)
    assert found.memory[0].buffers == 2 * made.batch * (20 * 8 + 4)  # this batch's and the next one's


def test_weights_are_exchanged_kept_and_read() -> None:
    tables = [replace(TABLE, weighted=each) for each in (False, True)]
    plain, weighted = (step(problem([table]), *whole_tables(0)) for table in tables)
    lookups = problem(tables).batch * 20
    assert weighted.index_bytes[0] - plain.index_bytes[0] == 4 * lookups
    assert weighted.memory[0].buffers - plain.memory[0].buffers == 8 * lookups
    parts = [TablePart.of(table, 4096) for table in tables]
    for call in (forward_call, backward_call):
        assert call([parts[1]]).bytes_read - call([parts[0]]).bytes_read == 4 * 20 * 4096
    us = price([forward_call([part]) for part in parts], device("h100-sxm")).times_us
    assert us[1] > us[0]


def test_large_tables_that_are_only_looked_up_are_copied_where_that_is_fastest() -> None:
    tables = [replace(TABLE, name=f"t{i}", rows=1_000_000, optimizer="none") for i in range(4)]
    found = search(problem(tables), 1)
    assert found.proven
    best = estimate(found.scores, found.best[0][1])
    assert {each.kind for each in best.plan.shardings} == {ShardKind.DATA_PARALLEL} and best.communication_us == 0


def test_a_proof_has_weighed_every_way_of_every_table() -> None:
    known = choices_of(problem([EmbeddingTable("large", 10_000_000, 96, bag=8.0)], 3))
    assert {(known.kinds[row], int(known.parts[row])) for row in known.of_table(0)} == {
        (ShardKind.TABLE_WISE, 1), (ShardKind.COLUMN_WISE, 2), (ShardKind.COLUMN_WISE, 3), (ShardKind.ROW_WISE, 1),
        (ShardKind.DATA_PARALLEL, 1)}


def test_a_search_on_a_cpu_compares_what_the_cpu_takes() -> None:
    found = search(problem(dreamshard_task(3, 6, 64), on="cpu"), 5)
    shown = [estimate(found.scores, assignment).time_us for _, assignment in found.best]
    # One call over a rank's tables misses its caches more often than each table by itself.
    assert [us for us, _ in found.best] == pytest.approx(shown, rel=0.1)


def test_the_order_of_the_tables_changes_nothing() -> None:
    tables = dreamshard_task(5, 24, 64)
    mixed = [tables[i] for i in np.random.default_rng(1).permutation(len(tables))]
    one, other = (search(problem(each, 4, kinds=frozenset({ShardKind.TABLE_WISE})), 2) for each in (tables, mixed))
    assert one.best[0][0] == other.best[0][0]
    assert {name: known[0] for name, known in one.baselines.items() if known} == {
        name: known[0] for name, known in other.baselines.items() if known}
    plans = [found.best[0][1].plan(found.scores.problem, found.scores.choices) for found in (one, other)]
    placed, again = (dict(zip([table.name for table in plan.tables], plan.shardings, strict=True)) for plan in plans)
    assert placed == again
    bags = [{table.name: table.bag for table in DataDrift("b", bags=0.5).applied(each)} for each in (tables, mixed)]
    assert bags[0] == bags[1]
