"""Sharding of tables: plans, laws of the step's time, the search against brute force, baselines, drift, the command."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dlrm_parts.tasks import dreamshard_task, neuroshard_task
from hypothesis import given, settings
from hypothesis import strategies as st
from said import plain
from table_files import write_tables
from typer.testing import CliRunner

from foretrace.commands import app
from kernel_models.collectives import CollectiveModel, find_topology, uneven_all_to_all
from kernel_models.device import device
from planner.sharding.choices import Choices, Scope, choices_of
from planner.sharding.estimate import estimate
from planner.sharding.planning import DataDrift, drifted
from planner.sharding.problem import DenseWork, ShardingPlan, ShardingProblem, load_plan
from planner.sharding.search import NAMES, ShardingSearch, fastest, search
from planner.sharding.step import EMPTY, Assignment, Scores, StepModel, assignment_of
from tracer.lookup_data.plan_file import ShardingError, ShardKind, TableSharding
from tracer.lookup_data.tables import EmbeddingTable

RUNNER = CliRunner()
H100 = device("h100-sxm")


def problem(tables: list[EmbeddingTable], ranks: int = 4, nodes: int = 1, **changed: Any) -> ShardingProblem:
    where = find_topology("dgx-h100" if nodes == 1 else f"dgx-h100x{nodes}")
    return ShardingProblem(tuple(tables), changed.pop("samples", 1024), ranks, H100, CollectiveModel(where), **changed)


def scores_of(made: ShardingProblem, plan: ShardingPlan | None = None) -> Scores:
    return Scores(made, choices_of(made, plan.shardings if plan else None), StepModel(made))


def all_on(made: ShardingProblem, ranks: list[int]) -> ShardingPlan:
    return ShardingPlan(made.tables, tuple(TableSharding(ShardKind.TABLE_WISE, (rank,)) for rank in ranks), made.ranks,
                        made.per_node)


def step(made: ShardingProblem, plan: ShardingPlan) -> float:
    scores = scores_of(made, plan)
    return estimate(scores, assignment_of(plan, scores.choices)).time_us


SIX = dreamshard_task(3, 6, 64)


def placed(*ranks: int) -> tuple[ShardingProblem, Scores, Assignment]:
    """The six tables, each on a rank."""
    made = problem(SIX)
    plan = all_on(made, list(ranks))
    scores = scores_of(made, plan)
    return made, scores, assignment_of(plan, scores.choices)


@pytest.fixture(scope="module")
def small_search() -> ShardingSearch:
    return search(problem(SIX, 2), 5)


class TestPlans:
    tables = (EmbeddingTable("a", 103, 64), EmbeddingTable("b", 1000, 32), EmbeddingTable("c", 10, 16))

    def plan(self) -> ShardingPlan:
        return ShardingPlan(self.tables, (
            TableSharding(ShardKind.ROW_WISE, (0, 1, 2, 3)), TableSharding(ShardKind.COLUMN_WISE, (2, 0)),
            TableSharding(ShardKind.DATA_PARALLEL, (0, 1, 2, 3))), 4, 4)

    def test_is_written_and_read_again(self, tmp_path: Path) -> None:
        plan = self.plan()
        plan.save(tmp_path / "plan.json")
        assert load_plan(tmp_path / "plan.json", self.tables) == plan
        sizes = [sum(shard.rows * shard.columns for row, shard in plan.shards() if row == i) for i in (0, 1)]
        assert sizes == [table.rows * table.columns for table in self.tables[:2]]
        module = json.loads((tmp_path / "plan.json").read_text())["plan"]["embeddings"]
        assert module["a"]["sharding_spec"]["shards"][3] == {
            "shard_offsets": [78, 0], "shard_sizes": [25, 64], "placement": "rank:3/cuda:3"}
        assert module["b"]["sharding_spec"]["shards"][1] == {
            "shard_offsets": [0, 16], "shard_sizes": [1000, 16], "placement": "rank:0/cuda:0"}
        assert (module["c"]["compute_kernel"], module["c"]["sharding_spec"]) == ("dense", None)

    @pytest.mark.parametrize(("kind", "ranks", "says"), [
        (ShardKind.TABLE_WISE, (0, 1), "that is one rank"), (ShardKind.TABLE_WISE, (4,), "not among 0 to 3"),
        (ShardKind.COLUMN_WISE, (0, 1, 2), "no 3 equal parts"), (ShardKind.COLUMN_WISE, (1, 1), "named twice"),
        (ShardKind.ROW_WISE, (0, 1), "all 4 ranks"), (ShardKind.TABLE_ROW_WISE, (0, 1), "one node"),
        (ShardKind.TABLE_WISE, (), "not among")])
    def test_what_cannot_be_is_named(self, kind: ShardKind, ranks: tuple[int, ...], says: str) -> None:
        with pytest.raises(ShardingError, match=says):
            ShardingPlan((self.tables[0],), (TableSharding(kind, ranks),), 4, 4)

    @pytest.mark.parametrize("damage", [
        lambda d: d.pop("plan"), lambda d: d.update(world_size="x"), lambda d: d.update(world_size=0),
        lambda d: d["plan"]["embeddings"].pop("a"),
        lambda d: d["plan"]["embeddings"]["a"].update(sharding_type="diagonal"),
        lambda d: d["plan"]["embeddings"].update(z=d["plan"]["embeddings"]["a"])])
    def test_a_damaged_plan_is_one_sentence(self, damage: Callable[[Any], Any], tmp_path: Path) -> None:
        document = self.plan().to_document()
        damage(document)
        (tmp_path / "plan.json").write_text(json.dumps(document))
        with pytest.raises(ShardingError):
            load_plan(tmp_path / "plan.json", self.tables)


class TestLaws:
    @settings(max_examples=10, deadline=None)
    @given(st.permutations(range(4)), st.lists(st.integers(0, 3), min_size=8, max_size=8))
    def test_names_of_equal_ranks_do_not_matter(self, names: list[int], ranks: list[int]) -> None:
        made = problem(dreamshard_task(1, 8))
        assert step(made, all_on(made, ranks)) == pytest.approx(step(made, all_on(made, [names[r] for r in ranks])))

    def test_tables_that_are_not_fused_take_one_after_another(self) -> None:
        def forward_and_backward(fused: bool, *tables: EmbeddingTable) -> tuple[float, float]:
            made = problem(list(tables), 2, fused=fused)
            plan = all_on(made, [0] * len(tables))
            scores = scores_of(made, plan)
            assignment = assignment_of(plan, scores.choices)
            found = estimate(scores, assignment)
            assert scores.standing(assignment).step_us == pytest.approx(found.time_us)
            return float(found.forward_us[0]), float(found.backward_us[0])

        each = np.array([forward_and_backward(False, table) for table in SIX[:3]])
        together = np.array(forward_and_backward(False, *SIX[:3]))
        assert together == pytest.approx(each.sum(axis=0))
        assert together[0] > forward_and_backward(True, *SIX[:3])[0]
        assert forward_and_backward(False, replace(SIX[0], optimizer="adam"))[1] > each[0, 1]

    def test_phases_add_up_and_exchanges_are_those_of_the_busiest_rank(self) -> None:
        made, scores, assignment = placed(0, 0, 0, 1, 2, 3)
        found = estimate(scores, assignment)
        assert sum(found.phases.values()) == pytest.approx(found.time_us)
        assert found.low_us < found.time_us < found.high_us
        assert sum(found.sources.values()) == pytest.approx(found.time_us)
        # Each rank sends its tables' vectors of a quarter of the batch to each rank.
        share = np.array([3, 1, 1, 1]) * made.batch * 64 * 4.0 / 4
        matrix = np.repeat(share[:, None], 4, axis=1)
        assert found.sent_bytes.max() == pytest.approx(uneven_all_to_all(matrix))

    def test_changes_are_scored_as_what_they_lead_to(self) -> None:
        scores = scores_of(problem(SIX))
        choices = scores.choices
        first = [int(row) for row in choices.first[:-1]]
        now, placed = scores.standing(Assignment(np.array(first), np.array([0, 1, 2, 3, 0, 1]))), EMPTY
        for choice in first:
            standing = scores.placed(scores.standing(placed), choice)
            placed = standing.assignment
            assert standing.step_us == pytest.approx(scores.standing(placed).step_us, rel=1e-9)
        moved = now.assignment.copy()
        moved.place[0] = 3
        after = scores.adder.loads(moved)
        score, fits = scores.changed(now, 0, np.array([3]), (after.sums[:, [0]], after.sums[:, [3]]),
                                     (after.chains[:, [0]], after.chains[:, [3]]))
        assert fits.all()
        assert score[0] == pytest.approx(scores.standing(moved).score, rel=0.02)

    def test_dense_work_hides_exchanges_and_adds_up(self) -> None:
        dense = DenseWork(bottom_forward=1e4, bottom_backward=1e4, top_forward=50.0, low=1e4, high=3e4,
                          sources={3: 1.0})
        made, scores, assignment = placed(0, 1, 2, 3, 0, 1)
        found = estimate(scores, assignment)
        hidden = found.phases["vectors"] + found.phases["gradients of vectors"] + found.phases["indices"]
        whole = step(replace(made, dense=dense), all_on(made, [0, 1, 2, 3, 0, 1]))
        assert whole == pytest.approx(found.time_us - hidden + 2e4 + 50.0, rel=0.02)


def every_sharding(scores: Scores) -> list[Assignment]:
    """Brute force over every choice and place."""
    made, choices = scores.problem, scores.choices

    def ways(choices: Choices, table: int) -> list[tuple[int, list[int]]]:
        return [(row, list(places)) for row in choices.of_table(table) for places in (
            [[0]] if choices.scope[row] == Scope.ALL else [[node] for node in range(made.nodes)]
            if choices.scope[row] == Scope.NODE else combinations(range(made.ranks), int(choices.parts[row])))]

    found = []
    for chosen in product(*(ways(choices, table) for table in range(len(made.tables)))):
        assignment = EMPTY
        for row, places in chosen:
            assignment = assignment.plus(row, places)
        found.append(assignment)
    return found


class TestSearch:
    @pytest.mark.parametrize(("seed", "ranks", "kinds", "host"), [
        (1, 2, frozenset(ShardKind), 0), (2, 3, frozenset({ShardKind.TABLE_WISE, ShardKind.ROW_WISE}), 0),
        (5, 2, frozenset({ShardKind.TABLE_WISE, ShardKind.COLUMN_WISE, ShardKind.DATA_PARALLEL}), 0),
        (3, 2, frozenset({ShardKind.TABLE_WISE}), 1e12)])
    def test_exact_is_what_brute_force_finds(self, seed: int, ranks: int, kinds: frozenset[ShardKind],
                                             host: float) -> None:
        made = problem(neuroshard_task(seed, 4, 1e12), ranks, kinds=kinds, host_bytes=host)
        scores = scores_of(made)
        steps = sorted(scores.model.step_us(scores.adder.loads(each)) for each in every_sharding(scores))
        proven = fastest(scores, np.inf, 1)
        assert proven.complete and proven.best[0][0] == pytest.approx(steps[0])
        found = search(made, 3)
        assert found.proven and found.best[0][0] == pytest.approx(steps[0])

    def test_is_never_worse_than_its_baselines_and_its_plans_differ(self, small_search: ShardingSearch) -> None:
        for found in (small_search, search(problem(neuroshard_task(4, 16, 60e9)), 2)):
            assert set(found.baselines) == set(NAMES)
            for known in found.baselines.values():
                assert known is not None and found.best[0][0] <= known[0] * (1 + 1e-9)
        made, choices = small_search.scores.problem, small_search.scores.choices
        steps, plans = zip(*((us, each.plan(made, choices)) for us, each in small_search.best), strict=True)
        assert list(steps) == sorted(steps) and len({plan.shardings for plan in plans}) == 5
        priced = [estimate(small_search.scores, each).time_us for _, each in small_search.best]
        assert priced == pytest.approx(steps, rel=0.1)
        shown = drifted(made, plans[:2], DataDrift("flat", 0.0))
        assert len(shown.plans_us) == 2 and shown.regret >= 0 and shown.best_us <= min(shown.plans_us)

    def test_memory_is_never_exceeded(self) -> None:
        tables = dreamshard_task(2, 12, 64)
        largest = max(table.weight_bytes + table.state_bytes for table in tables)
        # A device that the largest table alone does not fit: it must be split.
        made = problem(tables, memory_bytes=3e9 + 0.8 * largest)
        made = replace(made, memory_bytes=made.limit_bytes + made.received_bytes)
        found = search(made, 2)
        for _, assignment in found.best:
            shown = estimate(found.scores, assignment)
            assert shown.fullest.total <= made.limit_bytes
            largest_kind = shown.plan.shardings[int(np.argmax([table.weight_bytes for table in tables]))].kind
            assert largest_kind is not ShardKind.TABLE_WISE

    def test_memory_of_the_ranks_adds_up_to_the_tables(self, small_search: ShardingSearch) -> None:
        made, scores, assignment = placed(0, 1, 2, 3, 0, 1)
        found = estimate(scores, assignment)
        assert sum(each.parameters for each in found.memory) == pytest.approx(sum(t.weight_bytes for t in SIX))
        assert sum(each.optimizer_state for each in found.memory) == pytest.approx(sum(t.state_bytes for t in SIX))
        fixed = [each.total - each.reserved - made.received_bytes for each in found.memory]
        assert fixed == pytest.approx(scores.adder.loads(assignment).memory.tolist())

    def test_pins_and_kinds_are_kept(self) -> None:
        made = problem(SIX, pinned={SIX[0].name: 2, SIX[1].name: 2}, kinds=frozenset({ShardKind.ROW_WISE}))
        found = search(made, 2)
        for _, assignment in found.best:
            shardings = assignment.plan(made, found.scores.choices).shardings
            assert shardings[0] == shardings[1] == TableSharding(ShardKind.TABLE_WISE, (2,))
            assert {each.kind for each in shardings[2:]} == {ShardKind.ROW_WISE}

    def test_two_nodes_and_rows_within_one(self) -> None:
        made = problem(SIX, 16, nodes=2, kinds=frozenset({ShardKind.TABLE_ROW_WISE}))
        found = search(made, 1)
        plan = found.best[0][1].plan(made, found.scores.choices)
        assert {each.ranks for each in plan.shardings} == {tuple(range(8)), tuple(range(8, 16))}
        assert estimate(found.scores, found.best[0][1]).time_us > 0

    @pytest.mark.parametrize(("changed", "says"), [
        ({"memory_bytes": 4e9}, r"The tables take .* GB with their optimizer's state"),
        ({"pinned": {"nobody": 0}}, "names table 'nobody'"), ({"pinned": {"t": 9}}, "ranks are 0 to 3"),
        ({"kinds": frozenset()}, "No kind"), ({"samples": 0}, "batch of 0 samples"),
        ({"memory_bytes": 20e9, "kinds": frozenset({ShardKind.TABLE_WISE})}, "Table 't' fits no rank")])
    def test_what_cannot_be_is_one_sentence(self, changed: dict[str, Any], says: str) -> None:
        with pytest.raises(ShardingError, match=says):
            search(problem([EmbeddingTable("t", 150_000_000, 64)], **changed))


class TestCommand:
    def run(self, *arguments: str) -> Any:
        return RUNNER.invoke(app, ["shard", *arguments])

    @pytest.fixture()
    def tables(self, tmp_path: Path) -> str:
        write_tables(SIX[:4], tmp_path / "tables.csv")
        return str(tmp_path / "tables.csv")

    def test_prints_plans_baselines_and_drift_and_writes_the_plan(self, tables: str, tmp_path: Path) -> None:
        out = tmp_path / "plan.json"
        found = self.run(tables, "--gpus", "2", "--device", "h100-sxm", "--batch", "256", "--skews", "1.2", "--out",
                         str(out))
        assert found.exit_code == 0, found.output
        for word in ("Fastest shardings", "Baselines under the same model", "TorchRec's planner", "skew 1.2",
                     "80% between"):
            assert word in found.output
        assert load_plan(out, SIX[:4]).ranks == 2

    def test_json_has_ranks_and_plans(self, tables: str) -> None:
        found = json.loads(self.run(tables, "--gpus", "2", "--batch", "256", "--json", "--top", "2",
                                    "--pin", f"{SIX[0].name}=1").output)
        assert len(found["plans"]) == 2 and len(found["plans"][0]["ranks"]) == 2
        assert found["plans"][0]["plan"]["plan"]["embeddings"][SIX[0].name]["ranks"] == [1]
        assert sum(found["plans"][0]["sources"].values()) == pytest.approx(1)

    @pytest.mark.parametrize(("arguments", "says"), [
        (("--pin", "x"), "is no TABLE=RANK"), (("--kinds", "diagonal"), "is no kind of sharding"),
        (("--skews", "99"), "is no exponent"), (("--memory", "0"), "leaves no memory"),
        (("--memory", "3.5"), "GPUs"), (("--memory", "900"), "GB, and --memory gives it 900"),
        (("--kinds", ","), "no kind"), (("--batch", "2000000000"), "take a smaller --batch"),
        (("--preset", "real"), "is no workload"), (("--device", "nothing"), "nothing")])
    def test_bad_options_are_one_sentence(self, tables: str, arguments: tuple[str, ...], says: str) -> None:
        found = self.run(tables, "--gpus", "2", *arguments)
        assert found.exit_code == 2 and says in plain(found.output) and "Traceback" not in found.output

    @pytest.mark.parametrize("source", ["nowhere.csv", "resnet50"])
    def test_what_has_no_tables_is_refused(self, source: str) -> None:
        assert self.run(source, "--gpus", "2").exit_code == 2
