"""Folding: classes of ranks, the groups of another rank, folded jobs saved, loaded and shown. Needs torch in part."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import et_support
import numpy as np
import pytest
from said import Run, plain

import tracer
from tracer import JobError
from tracer.errors import GraphFileError
from tracer.graph import NONE, SHAPE_ONLY, CollectiveTable, ExecutionGraph, OpKind, StepTable
from tracer.job import Job, folded_job, load_job, save_job
from tracer.ranks import RankClass, checked_classes, groups_like, lattice, peers_like, renumbered, spans, work_digest

MB = 1 << 20


def graph_of(rank: int, world: int, groups: dict[str, tuple[str, list[int]]], *, rows: int = 4,
             shift_ns: int = 0) -> ExecutionGraph:
    """One step of ``rows`` operations, of which the first ones are the collectives ``name → (kind, ranks)``."""
    graph = et_support.graph_of([(0, "mm")] * rows, step=0, kind=OpKind.OPERATION, shapes=1,
                                start_ns=np.arange(rows) * 10 + shift_ns, duration_ns=5 + shift_ns)
    graph.strings += [f"[[{rows}]]", "float32"]
    graph.collectives = table = CollectiveTable.empty(len(groups))
    for row, (name, (kind, ranks)) in enumerate(groups.items()):
        graph.strings += [name, kind, json.dumps(ranks)]
        table.group[row], table.kind[row], table.ranks[row] = np.arange(-3, 0) + len(graph.strings)
        table.op[row], table.dtype[row], table.group_size[row], table.order[row] = row, 2, len(ranks), 0
        table.elements_in[row] = table.elements_out[row] = 7
    graph.steps = StepTable(np.array([0], np.int32), np.zeros(1, np.int64), np.array([rows * 10]),
                            np.zeros(1, np.int32), np.full(1, -1, np.int32))
    graph.meta = replace(graph.meta, source=f"rank{rank}", era=SHAPE_ONLY, rank=rank, world_size=world, backend="fake",
                         process_groups=[{"pg_name": name, "ranks": ranks} for name, (_, ranks) in groups.items()])
    return graph


def mesh_graph(rank: int, dp: int, tp: int, **other: Any) -> ExecutionGraph:
    """A rank of a dp × tp mesh, whose group names differ from rank to rank as torch's may."""
    return graph_of(rank, dp * tp, {
        f"dp{rank % tp}": ("all_reduce", [place * tp + rank % tp for place in range(dp)]),
        f"tp{rank // tp}": ("all_gather", [rank // tp * tp + place for place in range(tp)]),
        "all": ("barrier", list(range(dp * tp))),
    }, **other)


def ranks_of(graph: ExecutionGraph) -> list[list[int]]:
    return [json.loads(graph.string(int(code))) for code in graph.collectives.ranks]


@pytest.mark.parametrize(("ranks", "expected", "text"), [
    ([5], ((5, 5, 1),), "5"),
    (range(1024), ((0, 1023, 1),), "0–1023"),
    ([0, 1, 2, 7], ((0, 2, 1), (7, 7, 1)), "0–2, 7"),
    ([1, 3, 5, 7], ((1, 7, 2),), "1–7 (every 2nd)"),
    ([0, 9], ((0, 0, 1), (9, 9, 1)), "0, 9"),
    ([0, 13, 26], ((0, 26, 13),), "0–26 (every 13th)"),
])
def test_ranks_as_spans(ranks: Any, expected: Any, text: str) -> None:
    found = RankClass(spans(ranks))
    assert (found.ranks, str(found)) == (expected, text)
    assert list(found) == list(ranks) and len(found) == len(list(ranks))
    assert all(rank in found for rank in ranks) and max(ranks) + 1 not in found and -1 not in found


@pytest.mark.parametrize("sizes", [(4, 2), (3, 2, 2), (1, 5)])
def test_groups_of_every_rank_of_a_mesh(sizes: tuple[int, ...]) -> None:
    mesh = np.arange(np.prod(sizes)).reshape(sizes)
    for kept in range(1, 1 << len(sizes)):  # groups along every set of dimensions
        def group(rank: int, kept: int = kept) -> list[int]:
            place = np.argwhere(mesh == rank)[0]
            index = tuple(slice(None) if kept >> axis & 1 else place[axis] for axis in range(len(sizes)))
            return sorted(int(r) for r in np.ravel(mesh[index]))
        for of in range(mesh.size):
            for to in range(mesh.size):
                assert groups_like(group(of), of, to) == group(to)


def test_groups_that_are_no_mesh() -> None:
    assert lattice([0, 1, 5], 0) is lattice([3, 1], 1) is lattice([1, 2], 1) is None  # no mesh has such a pair
    assert groups_like([0, 1, 5], 0, 3) == [0, 1, 5]
    assert peers_like([4, 8], 4, 6) == [6, 10]


def folded_alike(graphs: list[ExecutionGraph], world: int) -> Job:
    """The job of graphs of every rank in classes of those that do the same work."""
    alike: dict[bytes, list[ExecutionGraph]] = {}
    for graph in graphs:
        alike.setdefault(work_digest(graph), []).append(graph)
    return folded_job([each[0] for each in alike.values()],
                      [spans([graph.meta.rank for graph in each]) for each in alike.values()], world)


def test_fold_and_every_rank_again() -> None:
    graphs = [mesh_graph(rank, 4, 2, shift_ns=rank) for rank in range(8)]
    folded = folded_alike(graphs, 8)
    assert [(each.ranks, each.graph) for each in folded.classes] == [(((0, 7, 1),), 0)]
    assert (len(folded.graphs), folded.known_ranks, folded.missing_ranks, folded.world_size) == (1, 8, [], 8)
    for rank, original in enumerate(graphs):
        again = folded.rank(rank)
        assert again.meta.rank == rank
        assert ranks_of(again) == ranks_of(original)
        assert [g["ranks"] for g in again.meta.process_groups] == [g["ranks"] for g in original.meta.process_groups]
        assert again.ops is folded.graphs[0].ops  # shared, not copied
    assert ranks_of(folded.graphs[0]) == ranks_of(graphs[0])
    with pytest.raises(JobError, match=r"Rank 8 is not in this job \(it has 0–7\)"):
        folded.rank(8)
    assert renumbered(graphs[3], 3) is graphs[3]


def test_only_equal_work_is_folded() -> None:
    graphs = [mesh_graph(rank, 4, 2, rows=5 if rank == 3 else 4) for rank in range(8)]
    folded = folded_alike(graphs, 8)
    assert [str(each) for each in folded.classes] == ["0–2, 4–7", "3"]
    assert [graph.meta.rank for graph in folded.graphs] == [0, 3]
    assert len(folded.rank(3).ops) == 5 and len(folded.rank(4).ops) == 4
    base = graph_of(0, 2, {"w": ("all_reduce", [0, 1])})
    others = {
        "kind": graph_of(0, 2, {"w": ("broadcast", [0, 1])}),
        "members": graph_of(0, 2, {"w": ("all_reduce", [0])}),
        "bytes": replace(base, collectives=replace(base.collectives, elements_in=np.array([8]))),
        "wait": replace(base, collectives=replace(base.collectives, wait_op=np.array([3], np.int32))),
        "shapes": graph_of(0, 2, {"w": ("all_reduce", [0, 1])}, rows=5),
    }
    assert work_digest(base) == work_digest(graph_of(0, 2, {"other": ("all_reduce", [0, 1])}, shift_ns=9))
    assert all(work_digest(graph) != work_digest(base) for graph in others.values())


def test_pipeline_neighbours_keep_their_distance() -> None:
    middle = [graph_of(rank, 12, {"send": ("send", [rank, rank + 4])}) for rank in range(4, 8)]
    folded = folded_alike(middle, 12)
    assert [str(each) for each in folded.classes] == ["4–7"]
    assert ranks_of(folded.rank(6)) == [[6, 10]]
    assert folded.missing_ranks == [0, 1, 2, 3, 8, 9, 10, 11]


def test_a_thousand_ranks_are_one_small_file(tmp_path: Path, run: Run) -> None:
    ones = folded_job([mesh_graph(17, 128, 8, rows=20_000)], [((0, 1023, 1),)], 1024)
    path = tmp_path / "job.foretrace"
    save_job(ones, path)
    assert path.stat().st_size < MB
    job = load_job(path)
    assert (job.classes, job.world_size, job.missing_ranks) == (ones.classes, 1024, [])
    assert len(job.graphs) == 1 and job.known_ranks == 1024
    last = job.rank(1023)
    assert last.meta.rank == 1023
    assert ranks_of(last)[:2] == [list(range(7, 1024, 8)), list(range(1016, 1024))]
    assert "1,024 ranks in 1 class: 0–1023" in plain(run("inspect", path).out)
    shown = run("inspect", path, "--json").json
    assert shown["classes"] == [{"ranks": [[0, 1023, 1]], "number": 1024, "traced": 17}]
    assert shown["missing_ranks"] == []


def test_classes_that_were_not_traced(tmp_path: Path, run: Run) -> None:
    job = folded_job([mesh_graph(5, 4, 2)], [((0, 3, 1),), ((4, 7, 1),)], 8)
    assert (job.missing_ranks, job.known_ranks) == ([0, 1, 2, 3], 4)
    assert [each.graph for each in job.classes] == [NONE, 0]
    with pytest.raises(JobError, match="Rank 2 is not in this job"):
        job.rank(2)
    assert job.rank(7).meta.rank == 7
    save_job(job, tmp_path / "job.foretrace")
    assert "4 of 8 ranks in 1 class: 4–7" in plain(run("inspect", tmp_path / "job.foretrace").out)
    with pytest.raises(JobError, match="Rank 6 does the same work as rank 5"):
        folded_job([mesh_graph(5, 4, 2), mesh_graph(6, 4, 2)], [((0, 3, 1),), ((4, 7, 1),)], 8)
    with pytest.raises(JobError, match="Rank 5 is in none of the job's classes"):
        folded_job([mesh_graph(5, 4, 2)], [((0, 3, 1),)], 8)


def test_files_without_classes_and_with_impossible_ones(tmp_path: Path) -> None:
    from tracer.store.graphs import pack_graphs

    graphs = [mesh_graph(rank, 2, 1) for rank in range(2)]
    others = {"world_size": 2, "notes": ["old"], "missing_ranks": []}
    path = tmp_path / "old.foretrace"
    path.write_bytes(pack_graphs("job", graphs, others, "old"))
    job = load_job(path)
    assert (job.classes, job.notes, len(job), job.known_ranks) == ([], ["old"], 2, 2)
    for ranks, graph in (([[0, 2, 1]], 0), ([[1, 0, 1]], 0), ([[0, 1, 0]], 0), ([[0, 1, 1]], 2), ([], 0),
                         ([[0, 1]], 0)):
        path.write_bytes(pack_graphs("job", graphs, {**others, "classes": [{"ranks": ranks, "graph": graph}]}, "old"))
        with pytest.raises(GraphFileError):
            load_job(path)


@pytest.mark.parametrize("value", [None, 3, [[[0, 3]]], [[["a", 3, 1]]], [[[0, 4, 1]]], [[[0, 2, 1]]],
                                   [[[0, 3, 1]], [[3, 3, 1]]], [[[0, 3, 0]]]])
def test_classes_of_a_damaged_context(value: Any) -> None:
    assert checked_classes(value, 4) is None
    assert checked_classes([[[0, 2, 1]], [[3, 3, 1]]], 4) == [((0, 2, 1),), ((3, 3, 1),)]


def test_workload_captured_once_for_all_its_ranks(tmp_path: Path, run: Run) -> None:
    pytest.importorskip("torch")
    done = run("capture", "--workload", "llama", "--preset", "tiny", "--world-size", "1024", "--parallel", "ddp",
               "--out", tmp_path / "job", "--warmup", "2", "--timed", "1", "--steps", "1", "--execution-trace", "none")
    assert done.code == 0, done.err
    job = tracer.read_job(tmp_path / "job")
    assert [str(each) for each in job.classes] == ["0–1023"]
    assert (job.world_size, job.missing_ranks) == (1024, [])
    path = tmp_path / "job.foretrace"
    save_job(job, path)
    assert path.stat().st_size < 20 * MB
    loaded = load_job(path).rank(777)
    assert loaded.meta.rank == 777 and ranks_of(loaded) == [list(range(1024))] * 2
    shown, replayed = (plain(run(name, path).out) for name in ("inspect", "replay"))
    assert all("Rank 0 of a fake world of 1024: its collectives took no time" in each for each in (shown, replayed))
    assert "The job is folded: only rank 0 is simulated, for all 1,024 ranks" in replayed


@pytest.mark.slow
def test_uneven_shards_are_classes_of_their_own(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from fake_world_support import CASES, fake_rank

    case = CASES["uneven"]
    predicted = classes_of(case.plan, case.ranks, depth=2, **case.settings)
    assert [str(each) for each in predicted] == ["0–1", "2"]  # 31 rows: 11, 11, 9; 20: 7, 7, 6; 100: 34, 34, 32
    graphs = [fake_rank(case, rank, tmp_path) for rank in range(case.ranks)]
    assert [each.ranks for each in folded_alike(graphs, case.ranks).classes] == [each.ranks for each in predicted]


def classes_of(plan: str, world: int, **settings: Any) -> list[RankClass]:
    pytest.importorskip("torch")
    from tracer import workloads
    from tracer.fake_world import rank_classes
    from tracer.parallel_plan import ParallelPlan

    return rank_classes(ParallelPlan.parse(plan, world), workloads.configure("llama", preset="tiny", **settings))


@pytest.mark.parametrize(("plan", "world", "settings", "expected"), [
    ("ddp", 1024, {}, ["0–1023"]),
    ("fsdp2", 64, {}, ["0–15", "16–31", "32–49", "50–63"]),  # 16 rows of k and v; 32; 50 × 2 of 100; 64
    ("tp", 2, {}, ["0–1"]),
    ("ddp=2,tp=2", 4, {"vocabulary": 101}, ["0, 2", "1, 3"]),
    ("ddp=4,pp=2", 8, {"depth": 2}, ["0–3", "4–7"]),
    ("fsdp2=2,tp=2,pp=2", 8, {"depth": 3}, ["0–3", "4–7"]),
])
def test_classes_of_plans(plan: str, world: int, settings: dict[str, Any], expected: list[str]) -> None:
    found = classes_of(plan, world, **settings)
    assert [str(each) for each in found] == expected
    assert sorted(rank for each in found for rank in each) == list(range(world))
    assert [each.graph for each in found] == list(range(len(found)))
