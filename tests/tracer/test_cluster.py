"""Ranks read by processes of Dask and Ray: as one process reads them, and a rank that is lost is named."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from kineto_support import call, event, kernel, write
from typer.testing import CliRunner

from foretrace.commands import app
from kernel_models.device import find_device
from planner.cli.plan import plain, plain_exploration
from planner.parallel import exploration
from planner.parallel.layer_costs import LayerCosts
from planner.parallel.planning import PlanRequest, find_plans
from planner.sharding.planning import shard
from tracer.cluster import ClusterError, Failed, LostWorkerError, TaskWorkers, open_workers
from tracer.cluster.engines import RayWorkers
from tracer.errors import ForetraceError, TraceError
from tracer.job import read_job

SIZES = ("seq=64", "depth=2", "width=512", "heads=8", "vocabulary=2048", "positions=64", "batch=1", "dtype=bf16")
TABLES = ("batch=64", "tables=2", "rows=4000", "embedding=64", "pooling=4", "width=64", "depth=2")


@pytest.fixture(scope="module", params=["dask", pytest.param("ray", marks=pytest.mark.slow)])
def workers(request: pytest.FixtureRequest) -> Iterator[TaskWorkers]:
    """A cluster of this machine, whose processes find this file."""
    pytest.importorskip("distributed" if request.param == "dask" else "ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        with open_workers(request.param) as found:
            yield found


def job(folder: Path, ranks: int) -> Path:
    """A trace for each rank, of one launch."""
    folder.mkdir(exist_ok=True)
    for rank in range(ranks):
        write(folder, [event("user_annotation", "ProfilerStep#1", 0, 100), call("cudaLaunchKernel", 10, 5, 1),
                       kernel(f"gemm{rank}", 20, 30, 1)], f"rank{rank}.json",
              distributedInfo={"backend": "nccl", "rank": rank, "world_size": ranks})
    return folder


def die(item: int) -> int:
    """Kill the process that works on item 3, else return its square."""
    if item == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return item * item


def refuse(item: int) -> int:
    """Refuse odd items."""
    if item % 2:
        raise TraceError(f"{item} is odd.")
    return item


def test_a_job_is_what_one_process_reads(workers: TaskWorkers, tmp_path: Path) -> None:
    folder = job(tmp_path / "job", 5)
    (folder / "rank5.json").write_text('{"traceEvents": [', encoding="utf-8")  # damaged
    here, there = read_job(folder), read_job(folder, workers=workers)
    assert [graph.meta for graph in here.graphs] == [graph.meta for graph in there.graphs]
    assert here.notes == there.notes and here.world_size == there.world_size
    for one, other in zip(here.graphs, there.graphs, strict=True):
        assert one.strings == other.strings
        assert all((getattr(one.kernels, name) == getattr(other.kernels, name)).all()
                   for name in ("start_ns", "duration_ns", "name", "launch"))


def test_results_come_in_order_and_refusals_and_deaths_are_named(workers: TaskWorkers) -> None:
    found = list(workers.map(refuse, list(range(9))))
    assert [each for each in found if not isinstance(each, Failed)] == [0, 2, 4, 6, 8]
    assert [str(each.error) for each in found if isinstance(each, Failed)] == [f"{n} is odd." for n in (1, 3, 5, 7)]
    found = list(workers.map(die, list(range(6)), name=lambda item: f"item {item}"))
    assert [each for each in found if not isinstance(each, Failed)] == [0, 1, 4, 16, 25]
    (lost,) = (each for each in found if isinstance(each, Failed))
    assert isinstance(lost.error, LostWorkerError) and "item 3 could not be worked on" in str(lost.error)


def test_other_data_of_a_sharding_that_are_shared_give_what_this_process_gives(workers: TaskWorkers) -> None:
    tables = {"settings": TABLES, "device": "h100-sxm", "skews": (0.5,)}
    assert shard("dlrm", 2, **tables, workers=workers).drifted == shard("dlrm", 2, **tables).drifted


@pytest.mark.slow
def test_plans_that_are_shared_are_those_of_this_process(workers: TaskWorkers) -> None:
    """Its cases and its sizes, to the bit."""
    request = PlanRequest("gpt2", 2, settings=SIZES, preset="default", global_batch=4)
    cases = exploration.cases_of("a100-sxm-80g,h100-sxm", None, None, {"link": "0.5"}, 2)
    here, there = (plain_exploration(exploration.explore(cases, request, by)) for by in (None, workers))
    assert here == there and len(here["cases"]) == 2
    known = replace(request, device="h100-sxm", pieces=LayerCosts(find_device("h100-sxm")))
    sizes = [replace(known, gpus=size) for size in (1, 2)]
    assert plain(list(workers.each(find_plans, sizes)), None, None, None) == plain(
        [find_plans(each) for each in sizes], None, None, None)
    with pytest.raises(ForetraceError, match="zero"):
        list(workers.each(find_plans, [replace(request, device="zero")]))


def test_calls_of_ray_are_awaited_and_what_ends_them_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one that calls at once; ``make slow`` has processes of the real one."""
    class RayError(Exception):
        """Of everything that Ray raises."""

    class RayTaskError(RayError):
        cause = TraceError("1 is odd.")

    kinds = {name: type(name, (RayError,), {}) for name in ("WorkerCrashedError", "OutOfMemoryError", "NodeDiedError")}
    crashed, away = kinds["WorkerCrashedError"], type("Away", (RayError,), {})
    ends = {"refused": RayTaskError, "crashed": crashed, "away": away}

    def get(item: str) -> bytes:
        if item in ends:
            raise ends[item]
        return item.encode()

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(
        exceptions=SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError, **kinds),
        init=lambda **_: None, shutdown=lambda: None, cluster_resources=lambda: {"CPU": 3.0}, get=get,
        remote=lambda **_: lambda call: SimpleNamespace(remote=call), wait=lambda calls, num_returns: ([calls[0]], [])))
    with open_workers("ray") as found:
        assert isinstance(found, RayWorkers) and found.size == 3
        assert found.next_done([found.submit(str.upper, "a")]) == ("A", b"A")
        assert found.next_done(["crashed"]) == ("crashed", None)
        with pytest.raises(TraceError, match="1 is odd"):
            found.next_done(["refused"])
        with pytest.raises(ClusterError, match="The Ray cluster went away"):
            found.next_done(["away"])
    with pytest.raises(ClusterError, match="No Ray cluster answers"), open_workers("ray:127.0.0.1:1"):
        pass


def test_a_rank_whose_workers_die_is_named_and_the_rest_goes_on(tmp_path: Path) -> None:
    class Losing(TaskWorkers):
        elsewhere = True

        def map(self, function, items, *, name=str):  # type: ignore[no-untyped-def]
            for item in items:
                yield Failed(LostWorkerError(f"{item} could not be worked on.")) if "rank2" in item else function(item)

    folder = job(tmp_path / "job", 4)
    found = read_job([str(path) for path in sorted(folder.iterdir())], workers=Losing())
    assert [graph.meta.rank for graph in found.graphs] == [0, 1, 3] and found.missing_ranks == [2]
    assert any("rank2.json could not be worked on" in note for note in found.notes)


@pytest.mark.parametrize(("workers", "why"), [
    ("spark", "There are no workers 'spark'"), ("local:tcp://x:1", "There are no workers 'local:tcp://x:1'"),
    ("ray:", "There are no workers 'ray:'"), ("dask:nonsense://x", "No Dask cluster answers at nonsense://x")])
def test_what_is_no_cluster_is_told(workers: str, why: str, tmp_path: Path) -> None:
    pytest.importorskip("distributed")
    with pytest.raises(ClusterError, match=why), open_workers(workers):
        pass
    done = CliRunner().invoke(app, ["inspect", str(job(tmp_path / "job", 2)), "--workers", workers])
    assert done.exit_code == 2 and why in done.stderr.replace("\n", " ")
