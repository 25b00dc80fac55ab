"""Fake worlds: what a rank does in one is what it does in a real job of gloo processes; plans, scripts, bad input."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from forks import run_ranks
from said import plain
from slowly import mostly_slow

torch = pytest.importorskip("torch")
if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
    pytest.skip("torch was built without gloo", allow_module_level=True)

import torch.distributed as dist  # noqa: E402
from fake_world_support import CASES, STEPS, fake_rank, sequence  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

import tracer  # noqa: E402
from foretrace.commands import app  # noqa: E402
from tracer import workloads  # noqa: E402
from tracer.capture import Capture, CaptureOptions  # noqa: E402
from tracer.capture.notes import CollectiveNotes  # noqa: E402
from tracer.capture.script import run_workload  # noqa: E402
from tracer.capture_layout import read_window  # noqa: E402
from tracer.errors import CaptureError  # noqa: E402
from tracer.fake_world import (  # noqa: E402
    FakeWorldError,
    current_world,
    fake_launch,
    fake_world,
    parallelize,
    rank_classes,
)
from tracer.fake_world.streams import ALL_GATHER, BUCKETS, IN_ORDER, PEERS, REDUCE_SCATTER, model_overlap  # noqa: E402
from tracer.graph import NONE, ExecutionGraph, WaitSource  # noqa: E402
from tracer.parallel_plan import ParallelPlan, PlanError  # noqa: E402

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
Faked = Callable[[str, int], ExecutionGraph]
QUICK = {("ddp", 0), ("pp", 0), ("pp", 1), ("uneven", 2)}
"""Ranks that the quick tests compare: of ``fsdp2`` those that are uneven, all others run by ``make slow``."""
KINDS = {  # of a step of a Llama with two blocks, on rank 0, counted on paper
    "ddp": {"broadcast": 1, "all_reduce": 1},  # rotary tables; all gradients fit one bucket
    "fsdp2": {"all_gather": 5, "reduce_scatter": 3},  # root, 2 blocks, 2 blocks again; 2 blocks, root
    "tp": {"all_reduce": 1 + 4 + 1 + 4, "all_gather": 1},  # embedding, 2 a block, head's input, 2 a block; logits
    "pp": {"send": 2, "recv": 2},  # two micro-batches: features there, their gradients back
    "fsdp2-tp": {"all_gather": 5 + 1, "reduce_scatter": 3, "all_reduce": 10},
    "uneven": {"all_gather": 5, "reduce_scatter": 3},
}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """The folder of the real runs' captures: every case asked for, by as many gloo processes as it has ranks."""
    folder = tmp_path_factory.mktemp("real")
    asked = {item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")}
    names = [name for name in CASES if name in asked]
    run_ranks(max(CASES[name].ranks for name in names), HERE / "fake_world_support.py", folder, *names)
    return folder


@pytest.fixture(scope="module")
def faked(tmp_path_factory: pytest.TempPathFactory) -> Faked:
    """From a case and a rank to its capture in a fake world of this process."""
    folder = tmp_path_factory.mktemp("fake")
    return cache(lambda name, rank: fake_rank(CASES[name], rank, folder / name))


@pytest.mark.parametrize(("name", "rank"), [
    pytest.param(name, rank, marks=() if (name, rank) in QUICK else pytest.mark.slow)
    for name, case in CASES.items() for rank in range(case.ranks)])
def test_a_fake_rank_does_what_the_real_one_does(real: Path, faked: Faked, name: str, rank: int) -> None:
    graph, truth = faked(name, rank), read_window(real / name / f"rank{rank}")
    assert (graph.meta.rank, graph.meta.world_size, graph.meta.backend) == (rank, CASES[name].ranks, "fake")
    assert truth.meta.backend == "gloo"
    for step in range(STEPS):
        mine, theirs = sequence(graph, step), sequence(truth, step)
        assert len(mine) > 500
        assert mine == theirs
    kinds = Counter(graph.string(int(kind)) for kind in graph.collectives.kind)
    assert kinds == {kind: STEPS * number for kind, number in KINDS[name].items()}


def overlap(graph: ExecutionGraph) -> list[tuple[str, str, str, str]]:
    """(kind, stream, the waiting operation, what it is in) of each collective."""
    waits, found = model_overlap(graph), []
    assert (waits.wait_op == graph.collectives.wait_op).all() and (waits.wait_op > graph.collectives.op).all()
    assert (graph.collectives.wait_source == WaitSource.MODELLED).all()
    for kind, stream, op in zip(graph.collectives.kind, waits.stream, waits.wait_op.tolist(), strict=True):
        parent = int(graph.ops.parent[op])
        found.append((graph.string(int(kind)), stream, graph.string(int(graph.ops.name[op])),
                      graph.string(int(graph.ops.name[parent])) if parent != NONE else ""))
    return found


def test_overlap_of_fsdp2_is_the_streams_of_its_code(faked: Faked) -> None:
    graph = faked("fsdp2", 0)
    found = overlap(graph)
    assert [(kind, stream) for kind, stream, *_ in found] == (
        [("all_gather", ALL_GATHER)] * 5 + [("reduce_scatter", REDUCE_SCATTER)] * 3)
    # In backward block 0 is gathered before block 1 runs and waited for after it.
    order = ("", " (blocks.0)", " (blocks.1)", " (blocks.1)", " (blocks.0)")
    assert [where for *_, where in found[:5]] == [f"FSDP::all_gather_copy_out{block}" for block in order]
    second_last = graph.collectives.op[4]
    between = graph.ops.name[second_last:graph.collectives.wait_op[4]]
    assert "aten::_scaled_dot_product_flash_attention_for_cpu_backward" in {graph.string(int(code)) for code in between}
    # A reduce-scatter is waited for by the next one, the last by the optimizer.
    waits = graph.collectives.wait_op
    assert graph.collectives.op[5] < waits[5] < graph.collectives.op[6] < waits[6] < graph.collectives.op[7] < waits[7]


def test_overlap_of_the_other_kinds(faked: Faked) -> None:
    buffers, bucket = overlap(faked("ddp", 0))
    assert buffers[1:] == (IN_ORDER, "aten::unflatten_dense_tensors", "DistributedDataParallel.forward")
    assert bucket[0:2] == ("all_reduce", BUCKETS)
    assert bucket[3].startswith("ProfilerStep#")  # after backward
    assert {(stream, op) for _, stream, op, _ in overlap(faked("tp", 0))} == {
        ("group 0", "_c10d_functional::wait_tensor")}
    graph = faked("pp", 0)
    assert [(kind, stream) for kind, stream, *_ in overlap(graph)] == [
        ("send", PEERS), ("send", PEERS), ("recv", PEERS), ("recv", PEERS)]
    assert [graph.string(int(ranks)) for ranks in graph.collectives.ranks] == ["[0, 1]"] * 2 + ["[1, 0]"] * 2
    first, second, back, last = graph.collectives.wait_op.tolist()
    assert first == graph.collectives.op[1]  # sent during the second forward
    assert second == back < last  # sent and received together


class Net(torch.nn.Module):
    """Layers run in another order than they are registered: the first step's buckets are not the later ones'."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(200, 200) for _ in range(4))

    def forward(self, x: Any) -> Any:
        for place in (2, 0, 3, 1):
            x = self.layers[place](x)
        return x


def noted(step: Callable[[], object]) -> list[dict[str, Any]]:
    """The collectives of a call."""
    notes = CollectiveNotes()
    notes.start()
    step()
    notes.stop()
    return notes.rows


def test_ddp_rebuilds_fake_buckets_as_real_ones() -> None:
    def buckets(mode: Any) -> list[list[int]]:
        with fake_world(2), mode:
            wrapped = torch.nn.parallel.DistributedDataParallel(Net(), bucket_cap_mb=0.3)
            steps = [noted(lambda: wrapped(torch.ones(2, 200)).sum().backward()) for _ in range(3)]
        return [[row["elements_in"] for row in rows if row["kind"] == "all_reduce"] for rows in steps]

    found = buckets(nullcontext())
    assert found[1] == found[2] and found == buckets(FakeTensorMode())
    assert [sum(sizes) for sizes in found] == [4 * (200 * 200 + 200)] * 3 and len(found[2]) > 1


def second_step(workload: str, plan: str, ranks: int, mode: Any, **settings: Any) -> list[dict[str, Any]]:
    """The collectives of the last rank's second step."""
    with fake_world(ranks, ranks - 1), mode:
        built = parallelize(workloads.build(workload, preset="tiny", **settings), ParallelPlan.parse(plan, ranks))
        batches = built.batches()
        built.step(next(batches))
        return noted(lambda: built.step(next(batches)))


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["fsdp2=2,tp=2", "fsdp2=2,pp=2"])
def test_fake_tensors_have_the_collectives_of_real_ones(plan: str) -> None:
    shapes_only = second_step("llama", plan, 4, FakeTensorMode(), depth=2)
    assert shapes_only and shapes_only == second_step("llama", plan, 4, nullcontext(), depth=2)


@pytest.mark.parametrize("name", mostly_slow([name for name in workloads.names() if name != "llama"],
                                             {"dlrm", "moe"}))
def test_other_workloads_run_under_ddp_and_fsdp2(name: str) -> None:
    for plan, kind in (("ddp", "all_reduce"), ("fsdp2", "reduce_scatter")):
        rows = second_step(name, plan, 2, nullcontext())
        assert kind in {row["kind"] for row in rows}
        assert all(row["ranks"] == [0, 1] and row["elements_in"] > 0 for row in rows)
    with pytest.raises(PlanError, match=f"^{name} cannot be split by tensor parallelism yet"):
        rank_classes(ParallelPlan.parse("tp", 2), workloads.configure(name, preset="tiny"))


def test_the_world_comes_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "7")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    reducer, init = dist.Reducer, dist.init_process_group
    with pytest.raises(ZeroDivisionError), fake_world(1024, 1000):
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (1000, 1024, "fake")
        assert (os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"]) == ("1000", "1024", "0")
        assert current_world() == (1024, 1000)
        everyone: list[Any] = [None] * 1024
        dist.all_gather_object(everyone, {"rank": 1000})
        assert everyone == [{"rank": 1000}] * 1024
        with pytest.raises(FakeWorldError, match="is up already, and they do not nest"), fake_world(2):
            pass
        assert dist.get_world_size() == 1024
        1 / 0  # noqa: B018
    assert not dist.is_initialized() and current_world() is None
    assert os.environ["RANK"] == "7" and "WORLD_SIZE" not in os.environ
    assert dist.Reducer is reducer and dist.init_process_group is init
    with fake_world(2):
        dist.destroy_process_group()  # as scripts do
    with fake_launch(4, 2):
        assert not dist.is_initialized()
        with pytest.raises(FakeWorldError, match="asks for world_size=2 where the capture was given 4"):
            dist.init_process_group("gloo", world_size=2, rank=0)
        dist.init_process_group("gloo", world_size=4, rank=2)
        with pytest.raises(ValueError, match="twice"):
            dist.init_process_group("gloo")
    assert not dist.is_initialized()


def test_real_process_groups_are_left_alone(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        with pytest.raises(FakeWorldError, match=r"^A process group \(gloo\) is up already"), fake_world(2):
            pass
        with pytest.raises(FakeWorldError, match="up already"), tracer.capture(tmp_path / "job", world_size=2):
            pass
        assert dist.get_backend() == "gloo"
        with pytest.raises(PlanError, match="is for 4 ranks and there are 1"):
            parallelize(workloads.build("llama", preset="tiny"), ParallelPlan.parse("fsdp2", 4))
    finally:
        dist.destroy_process_group()
    assert not (tmp_path / "job" / "rank0").exists()


@pytest.mark.parametrize(("size", "rank", "message"), [
    (0, 0, "world_size=0 is not possible: give a whole number, 1 or more."),
    (True, 0, "world_size=True is not possible: give a whole number, 1 or more."),
    (4, -1, "rank=-1 is not possible: give a whole number, 0 or more."),
    (4, 4, "There is no rank 4 in a world of 4; choose one from 0 to 3."),
    (1_000_001, 0, "world_size=1,000,001 is more than a fake world can have; give 1,000,000 or less."),
    (10**4000, 0, "world_size=10^4000 or so is more than a fake world can have; give 1,000,000 or less."),
])
def test_impossible_worlds(size: Any, rank: int, message: str, tmp_path: Path) -> None:
    with pytest.raises(FakeWorldError) as error, fake_world(size, rank):
        pass
    assert str(error.value) == message
    with pytest.raises(CaptureError) as refused:
        tracer.capture(tmp_path, world_size=size, rank=rank)
    assert str(refused.value) == message
    assert not dist.is_initialized()


@pytest.mark.parametrize(("plan", "size", "settings", "message"), [
    ("tp", 4, {}, r"kv_heads=2 cannot be split evenly by tp=4; choose a multiple of 4 \(--set kv_heads=…\) or the pub"),
    ("pp", 4, {"depth": 2}, r"depth=2 is less than pp=4.* \(--set depth=…\) or the published size \(--preset real\)"),
    ("pp=2,microbatches=3", 2, {"depth": 2}, "batch=2 cannot be split evenly by microbatches=3"),
    ("pp", 2, {"depth": 2, "accumulation": 2}, "accumulation=2 does not go with a pipeline"),
    ("tp", 2, {"compile": True}, "compile=true does not go with tensor parallelism"),
])
def test_plans_that_do_not_fit_the_model(plan: str, size: int, settings: dict[str, Any], message: str) -> None:
    parsed = ParallelPlan.parse(plan, size)
    with pytest.raises(PlanError, match=f"^llama: .*{message}"):
        rank_classes(parsed, workloads.configure("llama", preset="tiny", **settings))
    if "compile" not in settings:
        workload = workloads.build("llama", preset="tiny", **settings)
        with fake_world(size), pytest.raises(PlanError, match=message):
            parallelize(workload, parsed)


def test_capture_of_a_rank_with_one_line(tmp_path: Path) -> None:
    with tracer.capture(tmp_path, steps=1, warmup=1, timed=1, execution_trace="none", world_size=8, rank=5) as capture:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 3))
        while not capture.finished:
            model(torch.ones(2, 4)).sum().backward()
            capture.step()
        model(torch.ones(2, 4)).sum().backward()  # the world stays until the block ends
    assert not dist.is_initialized()
    job = tracer.read_job(tmp_path)
    assert (job.world_size, job.missing_ranks, [str(each) for each in job.classes]) == (8, [], ["0–7"])
    assert any(note.startswith("Assumed: every rank does the same as rank 5, because") for note in job.notes)
    assert any(note.startswith("Rank 5 of a fake world of 8: its collectives took no time") for note in job.notes)
    graph = job.rank(5)
    assert json.loads(graph.string(int(graph.collectives.ranks[0]))) == list(range(8))
    assert (graph.collectives.elements_in.tolist(), graph.meta.backend) == ([15], "fake")
    with pytest.raises(CaptureError, match="world_size does not go with a decorator"):
        tracer.capture(tmp_path / "other", world_size=2)(lambda: None)
    with pytest.raises(CaptureError, match="give its world_size too"):
        tracer.capture(tmp_path / "other", rank=2)


SCRIPT = """
import os, sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("nccl")
assert os.environ["RANK"] == "2" and dist.get_rank() == 2 and dist.get_world_size() == 4
pair = dist.new_group([2, 3], backend="gloo")
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
if sys.argv[1] == "fsdp":
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
else:
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(20):
    optimizer.zero_grad()
    loss = model(torch.ones(2, 8)).sum()
    loss.backward()
    dist.all_reduce(loss.detach(), group=pair)
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(("kind", "kinds"), [
    ("ddp", ["all_reduce", "all_reduce"]), ("fsdp", ["all_gather", "reduce_scatter", "all_reduce"])])
def test_an_unchanged_script_in_a_fake_world(kind: str, kinds: list[str], tmp_path: Path) -> None:
    script, out = tmp_path / "train.py", tmp_path / "job"
    script.write_text(SCRIPT)
    result = CliRunner().invoke(app, [
        "capture", "--world-size", "4", "--rank", "2", "--out", str(out), "--steps", "1", "--warmup", "0", "--timed",
        "1", "--execution-trace", "none", str(script), "--", kind])
    assert result.exit_code == 0, result.output
    assert not dist.is_initialized() and dist.init_process_group.__module__.startswith("torch.")
    job = tracer.read_job(out)
    # Its loss is reduced in a group of two: what other ranks do is not assumed.
    assert (job.classes, job.missing_ranks) == ([], [0, 1, 3])
    assert any(note.startswith("1 of 4 ranks was recorded, in a fake world; whether") for note in job.notes)
    assert not any("waiting" in note for note in job.notes)
    graph = job.rank(2)
    assert [graph.string(int(code)) for code in graph.collectives.kind] == kinds
    groups = [json.loads(graph.string(int(code))) for code in graph.collectives.ranks]
    assert groups == [[0, 1, 2, 3]] * (len(kinds) - 1) + [[2, 3]]
    assert graph.meta.backend == "fake"


def test_pipeline_stages_of_a_script_must_know_their_shapes() -> None:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    with fake_world(2), pytest.raises(FakeWorldError, match="give PipelineStage its input_args and output_args"):
        Schedule1F1B(PipelineStage(torch.nn.Linear(2, 2), 0, 2, torch.device("cpu")), 2).step(torch.ones(2, 2))


@pytest.mark.parametrize(("arguments", "message"), [
    (["--workload", "llama", "--world-size", "4"], "Say how the workload is spread over the ranks"),
    (["--workload", "llama", "--parallel", "ddp"], "give --world-size for a fake world"),
    (["--workload", "llama", "--parallel", "ddp=3", "--world-size", "4"], "which is not the world size 4"),
    (["--workload", "llama", "--parallel", "ddp", "--world-size", "4", "--rank", "4"], "There is no rank 4"),
    (["--parallel", "ddp", "--world-size", "4", "train.py"], "--parallel belongs to --workload"),
    (["--rank", "1", "train.py"], "rank=1 is of a fake world"),
])
def test_bad_commands(arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    result = CliRunner().invoke(app, ["capture", "--out", str(tmp_path / "job"), *arguments])
    assert result.exit_code == 2
    assert message in plain(result.output)
    assert not (tmp_path / "job").exists()


def test_parts_of_another_run_do_not_stay_beside_a_fake_rank(tmp_path: Path) -> None:
    def captured(rank: int, plan: str = "ddp", size: int = 4, **options: Any) -> list[str]:
        run_workload(workloads.configure("llama", preset="tiny"), Capture(
                     tmp_path, CaptureOptions(steps=1, warmup=0, timed=1, execution_trace="none", **options)),
                     ParallelPlan.parse(plan, size), (size, rank))
        return sorted(path.name for path in tmp_path.iterdir())

    captured(0)
    assert captured(3) == ["rank0", "rank3"]  # another rank of the same job
    with pytest.raises(CaptureError, match=r"holds rank 0 of another job than this one; .* --replace"):
        captured(1, "fsdp2")
    assert captured(3, replace=True) == ["rank0", "rank3"]
    assert captured(1, "fsdp2", replace=True) == ["rank1"]
    assert captured(0, "fsdp2", 2, replace=True) == ["rank0"]
