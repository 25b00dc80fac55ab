"""A recorded step on ranks it never ran on: collectives as in a fake world, stragglers, bad input."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from recordings import llama, llama_on  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from foretrace.commands import app  # noqa: E402
from foretrace.edits import Straggler  # noqa: E402
from graph_predictor.prediction.scenario import EditError  # noqa: E402
from graph_predictor.request.parallel_ranks import on_ranks  # noqa: E402
from kernel_models.collectives import CollectiveModel, find_topology  # noqa: E402
from tracer import workloads  # noqa: E402
from tracer.capture import Capture, CaptureOptions  # noqa: E402
from tracer.capture.script import run_workload  # noqa: E402
from tracer.capture_layout import read_window  # noqa: E402
from tracer.parallel_plan import ParallelPlan, PlanError  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
from rank_edits import collectives  # noqa: E402

OPTIONS = CaptureOptions(steps=1, warmup=3, timed=0, execution_trace="none")
SETTINGS = workloads.configure("llama", optimizer="adamw-foreach")


@pytest.mark.slow  # a fake world against a real one: test_fake_world.py; of DDP: test_recorded_ddp.py
@pytest.mark.parametrize(("plan", "ranks"), [
    ("fsdp2=2,tp=2", 4), ("ddp=2,bucket_mb=1", 2), ("ddp=2", 2), ("fsdp2=4", 4)])
def test_collectives_are_those_of_a_captured_fake_world(tmp_path: Path, plan: str, ranks: int) -> None:
    graphs = llama_on(plan).built.graphs
    assert [graph.meta.rank for graph in graphs] == list(range(ranks))
    last = ranks - 1
    run_workload(SETTINGS, Capture(tmp_path / "fake", OPTIONS), ParallelPlan.parse(plan, ranks), (ranks, last))
    expected = collectives(read_window(tmp_path / "fake" / f"rank{last}"))
    assert expected
    assert collectives(graphs[last]) == expected


def test_ranks_meet_in_their_collectives_so_that_one_straggler_holds_up_all() -> None:
    pair = llama_on("ddp=2")
    even = pair.predict()
    slowed = pair.predict([Straggler(1, 1.0)])
    first, last = slowed.per_rank
    assert first.step_time_us == pytest.approx(last.step_time_us, rel=1e-3)
    assert first.bound == "waiting for rank"
    assert slowed.step_time_us > 1.5 * even.step_time_us
    # DDP adds operations and takes none away: every recorded one stands for its own.
    told = " ".join(pair.notes)
    assert "was traced again by shapes" in told and "that the trace does not have" not in told


def test_accumulation_repeats_the_micro_batch_and_reduces_once() -> None:
    once, twice = (llama_on(text).built.graphs[0] for text in ("ddp=2", "ddp=2,accumulation=2"))
    products = [sum(graph.string(int(name)) == "aten::mm" for name in graph.ops.name) for graph in (once, twice)]
    assert products[1] == 2 * products[0] > 0
    assert collectives(twice) == collectives(once)
    said = llama_on(f"dp=2,microbatch={once.meta.workload['settings']['batch']},microbatches=2").built.graphs[0]
    assert said.meta.workload == twice.meta.workload


@pytest.mark.parametrize(("make", "why"), [
    (lambda: on_ranks(llama(), ParallelPlan.parse("tp=3")), "heads=4"),
    (lambda: on_ranks(llama(), ParallelPlan.parse("ddp=16"), CollectiveModel(find_topology("dgx-h100"))), "do not fit"),
    (lambda: on_ranks(llama(), ParallelPlan.parse("dp=2,microbatch=6"), sizes={"batch": 4}),
     "plan says batch=6 and the sizes say batch=4"),
    (lambda: on_ranks(llama(), ParallelPlan.parse("ddp=2"), also=[2]), "no rank 2"),
    (lambda: llama().predict([Straggler(5, 0.1)]), "no rank 5"),
    (lambda: Straggler.parse("slow"), "names no straggler"), (lambda: Straggler.parse("1:nan%"), "slower by nan%"),
    (lambda: on_ranks(llama_on("ddp=2"), ParallelPlan.parse("ddp=2")), "one rank")])
def test_plans_that_cannot_be_are_told(make: Callable[[], object], why: str) -> None:
    with pytest.raises((PlanError, EditError), match=why):
        make()


def test_a_recording_of_unknown_work_is_told() -> None:
    result = CliRunner().invoke(app, ["predict", str(ROOT / "traces" / "cpu-small"), "--parallel", "fsdp2=2"])
    assert result.exit_code == 2
    assert "does not say which workload" in result.stderr
