"""DDP added to a recording whose program cannot be run again: against the program run again, on paper, and refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from micro import Micro
from recordings import llama, llama_on
from said import plain
from slowly import mostly_slow
from typer.testing import CliRunner

import foretrace.edits as ed
from foretrace.commands import app
from graph_predictor.comm.traffic import buckets_of
from graph_predictor.prediction.predictor import Baseline
from graph_predictor.prediction.scenario import EditError
from graph_predictor.request.parallel_ranks import NOTE, gradients_of, with_ddp
from graph_predictor.synthesis.baseline import baseline_of
from kernel_models.collectives import CollectiveModel, find_topology
from kernel_models.device import device
from tracer.graph import NONE, ExecutionGraph
from tracer.job import read_job
from tracer.parallel_plan import ParallelPlan

ROOT = Path(__file__).resolve().parents[2]
READY = "torch::autograd::AccumulateGrad"
Reduce = tuple[str, str, str, str, int, int]


@pytest.fixture(scope="module")
def alone() -> Baseline:
    """A Llama that was captured on one rank."""
    return llama()


def reduces(graph: ExecutionGraph) -> list[Reduce]:
    """Kind, group, members, dtype, elements and place (matrix products before it) of the all-reduces of a step."""
    table = graph.collectives
    products = np.cumsum([graph.string(code) == "aten::mm" for code in graph.ops.name.tolist()])
    return [(graph.string(int(table.kind[row])), graph.string(int(table.group[row])),
             graph.string(int(table.ranks[row])), graph.string(int(table.dtype[row])), int(table.elements_in[row]),
             int(products[table.op[row]])) for row in range(len(table))
            if graph.string(int(table.kind[row])) == "all_reduce"]


@pytest.mark.parametrize("plan", mostly_slow(["ddp=2,bucket_mb=1", "ddp=2", "ddp=4,bucket_mb=1", "ddp=64"],
                                             ["ddp=2,bucket_mb=1"]))
def test_all_reduces_are_those_of_the_program_run_again(alone: Baseline, plan: str) -> None:
    pytest.importorskip("torch")
    ranks = ParallelPlan.parse(plan)
    again, added = llama_on(plan).built.graphs, with_ddp(alone, ranks).built.graphs
    assert [graph.meta.rank for graph in added] == [graph.meta.rank for graph in again]
    expected = reduces(again[-1])
    assert len(expected) > 1
    assert reduces(added[-1]) == expected
    # What is reduced is waited for after backward: all products are done by then.
    waits = added[0].collectives.wait_op
    names = [added[0].string(code) for code in added[0].ops.name.tolist()]
    assert {names[row] for row in waits.tolist()} == {"aten::copy_"}
    assert max(at for at, name in enumerate(names) if name == "aten::mm") < min(waits.tolist())


@pytest.fixture(scope="module")
def spread(alone: Baseline) -> Baseline:
    """It on two ranks, without its program run again."""
    return with_ddp(alone, ParallelPlan.parse("ddp=2"), CollectiveModel(find_topology("cpu")))


def test_a_step_with_ddp_takes_as_long_as_that_of_the_program_run_again(spread: Baseline) -> None:
    pytest.importorskip("torch")
    found = spread.predict()
    assert found.step_time_us == pytest.approx(llama_on("ddp=2").predict().step_time_us, rel=0.05)
    assert NOTE in found.notes and found.edits == ["ddp=2 on 2 ranks, approximate"]


@pytest.mark.parametrize("edit", [ed.FusedOptimizer(), *(
    pytest.param(edit, marks=pytest.mark.slow) for edit in (ed.FuseElementwise(), ed.Compile(), ed.Recompute(True)))],
                         ids=lambda edit: edit.describe())
def test_edits_of_a_cpus_work_change_as_much_of_it_with_ddp(alone: Baseline, spread: Baseline, edit: ed.Edit) -> None:
    """Its collectives are all the device work there is: operations still compute on the host, DDP's own among them."""
    changed, before = alone.predict([edit]).step_time_us, alone.predict().step_time_us
    found = spread.predict([edit]).step_time_us - spread.predict().step_time_us
    assert 0.6 < found / (changed - before) < 1.7


def test_work_whose_sizes_were_not_recorded_is_no_obstacle(alone: Baseline) -> None:
    """DDP leaves it as it is; a list of more than 30 tensors, as fused optimizers take, has no sizes in a recording."""
    recorded = alone.built.graphs[0]
    graph = replace(recorded, ops=recorded.ops.take(np.arange(len(recorded.ops))))
    graph.ops.shapes[graph.ops.name == graph.strings.index("aten::mm")] = NONE
    found = with_ddp(baseline_of(graph), ParallelPlan.parse("ddp=2"), CollectiveModel(find_topology("cpu")))
    assert found.predict().step_time_us > 0


def test_buckets_are_filled_as_gradients_become_ready() -> None:
    sizes = [("float", kib << 10) for kib in (700, 400, 20_000, 6_000, 100)]
    # 700 + 400 KiB reach the first bucket's 1 MiB; 20,000 + 6,000 the others' 25 MiB; 100 are left.
    assert buckets_of(sizes) == [[0, 1], [2, 3], [4]]
    assert buckets_of(sizes, 25) == [[0, 1, 2, 3], [4]]
    assert buckets_of(sizes, 1) == [[0, 1], [2], [3], [4]]
    mixed = [(("float", "c10::BFloat16")[at % 2], kib << 10) for at, kib in enumerate((700, 800, 400, 300))]
    assert buckets_of(mixed) == [[0, 2], [1, 3]]


def on_gpu(passes: int = 1, dims: bool = True) -> Micro:
    """Two gradients of 1 MiB and of 2 MiB, the second ready 500 us after the first.

        forward 1000-1100 | backward: kernel 500 us, gradient 1, kernel 500 us, gradient 2 | optimizer 100 us
    """
    trace = Micro(rank=0).calibrate().step(1000, 3300)
    at, gpu = 1010.0, 1020.0

    def kernel(name: str, length: float, **args: object) -> None:
        nonlocal at, gpu
        trace.op(name, at, at + 8, **args)
        trace.launch(at + 1, 5, (7, gpu, length))
        at, gpu = at + 10, gpu + length + 1

    def ready(size: list[int]) -> None:
        nonlocal at
        trace.op(READY, at, at + 4, **({"Input Dims": [size], "Input type": ["float"]} if dims else {}))
        at += 6

    sized = {"Input Dims": [[1024, 256], [256, 1024]], "Input type": ["float", "float"]}
    elementwise = {"Input Dims": [[64, 64], [64, 64]], "Input type": ["float", "float"]}
    for _ in range(passes):
        kernel("aten::mm", 100, **sized)
        for size in ([1024, 256], [2048, 256]):
            trace.op("autograd::engine::evaluate_function: MulBackward0", at, at + 8)
            kernel("aten::mul", 500, **elementwise)
            ready(size)
    kernel("aten::add_", 100, **sized)
    trace.call("cudaDeviceSynchronize", at, 3290 - at)
    return trace


def test_on_a_gpu_all_but_the_last_bucket_lie_beside_backward(tmp_path: Path) -> None:
    job = read_job(on_gpu().write(tmp_path / "trace.json"))
    baseline = baseline_of(job, device=device("h100-sxm"))
    spread = with_ddp(baseline, ParallelPlan.parse("ddp=8"), CollectiveModel(find_topology("dgx-h100")))
    graph = spread.built.graphs[0]
    assert graph.collectives.elements_in.tolist() == [1024 * 256, 2048 * 256]
    settled = spread.simulated()
    program, simulated = settled.steady.program, settled.steady.simulated
    rank = program.kernel_rank()
    last = np.flatnonzero((rank == 0) & (settled.steady.repeated.copy_of_kernel == settled.steady.repeated.copies - 1))
    row = settled.steady.repeated.kernel[last] - int(settled.scenario.built.program.kernel_ptr[0])
    owner = [graph.string(int(graph.ops.name[graph.kernels.op[each]])) for each in row.tolist()]
    start, end = simulated.kernel_start[last], simulated.kernel_end[last]
    first, second = (at for at, name in enumerate(owner) if name == "c10d::allreduce_")
    backward = [at for at, name in enumerate(owner) if name == "aten::mul" and end[at] - start[at] == 500_000]
    returned = [at for at, name in enumerate(owner) if name == "aten::copy_"]
    optimizer = owner.index("aten::add_")
    assert end[backward[0]] <= start[first] < end[first] <= end[backward[1]] <= start[second]
    assert min(start[at] for at in returned) >= end[first]
    assert start[optimizer] >= end[second]


def test_of_several_micro_batches_the_last_one_is_reduced_and_none_without_sizes(alone: Baseline,
                                                                                 tmp_path: Path) -> None:
    graph = read_job(on_gpu(passes=2).write(tmp_path / "trace.json")).graphs[0]
    step = int(graph.steps.start_ns[-1])
    found = gradients_of(graph, step, step + int(graph.steps.duration_ns[-1]))
    assert [gradient.shape for gradient in found] == [(1024, 256), (2048, 256)]
    graph = alone.built.graphs[0]
    ops = replace(graph.ops, name=np.where(
        graph.ops.name == graph.strings.index(READY), NONE, graph.ops.name).astype(np.int32))
    with pytest.raises(EditError, match="does not show when gradients become ready"):
        gradients_of(replace(graph, ops=ops), 0, 10**18)
    unsized = baseline_of(read_job(on_gpu(dims=False).write(tmp_path / "unsized.json")))
    for baseline, plan, why in ((unsized, "ddp=2", "does not have the sizes of its gradients"),
                                (alone, "fsdp2=2", "only ddp=N"), (alone, "ddp=2,ep=2", "only ddp=N"),
                                (alone, "ddp=2,accumulation=2", "only ddp=N can be added to it")):
        with pytest.raises(EditError, match=why):
            with_ddp(baseline, ParallelPlan.parse(plan))


def test_the_command_on_a_recording_of_unknown_work() -> None:
    runner, source = CliRunner(), str(ROOT / "traces" / "cpu-small")
    told = runner.invoke(app, ["predict", source, "--parallel", "ddp=2"])
    assert told.exit_code == 0 and "ddp=2 on 2 ranks, approximate" in plain(told.output)
    sized = runner.invoke(app, ["predict", source, "--parallel", "ddp=2", "--set", "batch=8:16"])
    assert sized.exit_code == 2 and "leave --set or --parallel out" in plain(sized.stderr)
