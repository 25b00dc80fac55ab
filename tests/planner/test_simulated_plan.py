"""Plans as programs of the simulator: exact where an estimate is exact, near it elsewhere, and lawful."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from foretrace.commands import app
from kernel_models.collectives import CollectiveModel, find_topology
from kernel_models.device import device
from planner.parallel import plan_program
from planner.parallel.decoder import check_decoder_plan
from planner.parallel.estimate import Rates, estimate
from planner.parallel.loads import Loads, loads_of
from planner.parallel.pieces import LayerPieces
from planner.parallel.planning import plan as planned
from planner.parallel.planning import read_decoder
from planner.parallel.simulated_plan import simulate_plan
from planner.parallel.task_rows import START, PlanStream
from tracer.parallel_plan import ParallelPlan, PlanError

SIZES = ["width=2048", "depth=8", "heads=16", "kv_heads=8", "hidden=4096", "vocabulary=8192", "seq=2048"]
QUIET = replace(Rates(), host_us=0.0, host_collective_us=0.0, jitter=0.0)
"""A host that costs nothing, and equal GPUs."""
CLUSTER = CollectiveModel(find_topology("dgx-h100x4"))


@pytest.fixture(scope="module")
def pieces() -> LayerPieces:
    return LayerPieces(device("h100-sxm"))


def loads(pieces: LayerPieces, text: str) -> Loads:
    return loads_of(ParallelPlan.parse(text), read_decoder("llama", SIZES, "8b")[1], pieces, CLUSTER)


@pytest.mark.parametrize("text", ["dp=1,microbatch=2", "dp=1,microbatches=3,recompute=full", "tp=4,microbatches=2",
                                  "tp=4,sequence_parallel,recompute=needed", "dp=4,overlap=false,microbatches=2",
                                  "dp=4,sharding=1,overlap=false", "fsdp2=4,overlap=false"])
def test_work_and_collectives_in_a_row_are_their_sum(pieces: LayerPieces, text: str) -> None:
    own = loads(pieces, text)
    assert simulate_plan(own, QUIET).time_us == pytest.approx(estimate(own, QUIET).time_us, rel=1e-3)


@pytest.mark.parametrize("text", [
    "pp=4,microbatches=8", "pp=4,microbatches=8,schedule=gpipe", "pp=2,chunks=4,microbatches=8,schedule=interleaved",
    "pp=4,microbatches=8,schedule=zero_bubble", "pp=2,chunks=2,microbatches=4,schedule=zero_bubble",
    "pp=4,tp=2,microbatches=6,recompute=full"])
def test_pipelines_run_as_scheduled(pieces: LayerPieces, text: str) -> None:
    own = loads(pieces, text)
    assert simulate_plan(own, QUIET).time_us == pytest.approx(estimate(own, QUIET).time_us, rel=0.005)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(["dp=4", "dp=4,sharding=1", "fsdp2=4", "dp=2,tp=2,sharding=1", "fsdp2=4,tp=2,sequence_parallel",
                        "dp=4,tp=4,sequence_parallel,tensor_overlap,sharding=1", "dp=2,cp=2,sharding=1",
                        "dp=2,pp=2,tp=2,sharding=1"]),
       st.sampled_from(["none", "full", "needed"]), st.integers(2, 8))
def test_an_estimate_is_near_the_program(text: str, recompute: str, passes: int) -> None:
    # Where host and device take about as long, the estimate lets each wait for the other at times; a program does not.
    rates = replace(Rates(), host_us=2.0, host_collective_us=5.0)
    own = loads(_SHARED, f"{text},recompute={recompute},microbatch=2,microbatches={passes}")
    assert estimate(own, rates).time_us == pytest.approx(simulate_plan(own, rates).time_us, rel=0.08)


_SHARED = LayerPieces(device("h100-sxm"))


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(["fsdp2=4,microbatches=2", "dp=2,tp=2,pp=2,microbatches=4,sharding=1,sequence_parallel",
                        "dp=4,cp=2,sharding=2,microbatches=2", "pp=4,microbatches=4,schedule=zero_bubble"]),
       st.sampled_from(["products", "others", "collectives", "network", "host_us", "host_collective_us"]),
       st.floats(1.0, 20.0))
def test_what_takes_longer_never_shortens_the_step(text: str, name: str, factor: float) -> None:
    own = loads(_SHARED, text)
    slower = replace(Rates(), **{name: factor * getattr(Rates(), name)})
    assert simulate_plan(own, slower).time_us >= simulate_plan(own, Rates()).time_us * (1 - 1e-9)


def test_gradients_and_parameters_hide_behind_work(pieces: LayerPieces) -> None:
    hidden, shown = (simulate_plan(loads(pieces, f"fsdp2=4,microbatch=8,overlap={how}"), QUIET) for how in (
        "true", "false"))
    alone = simulate_plan(loads(pieces, "dp=1,microbatch=8"), QUIET)
    assert hidden.time_us < shown.time_us
    assert hidden.time_us < 1.2 * alone.time_us
    assert min(hidden.compute_busy()) > 0.9


def test_of_a_stream_no_two_kernels_run_at_once_and_nothing_starts_before_its_input(pieces: LayerPieces) -> None:
    found = simulate_plan(loads(pieces, "dp=2,tp=2,pp=4,microbatches=6,sharding=1,sequence_parallel"), Rates())
    made, times, program = found.made, found.times, found.made.program
    for stage in range(4):
        low, high = program.kernel_ptr[stage:stage + 2]
        for stream in PlanStream:
            rows = low + np.flatnonzero(made.stream[low:high] == stream)
            assert (times.kernel_start[rows][1:] >= times.kernel_end[rows][:-1]).all()
    owner = np.repeat(np.arange(len(program.kernel_item)), np.diff(program.edge_ptr))
    assert (times.kernel_start[owner] >= times.kernel_end[program.edge_kernel]).all()
    starts = made.task_kernel[:-1]
    assert {made.names[code] for code in made.name[starts].tolist()} == {START}
    assert len(found.stage_us) == 4 and max(found.stage_us) <= found.time_us


def test_the_launches_of_a_step_that_the_host_decides_are_all_there(pieces: LayerPieces) -> None:
    own = loads(pieces, "dp=1")
    slow = replace(QUIET, host_us=1e4)
    block, count = own.whole[0]
    launches = own.embedding.forward.launches + own.head.forward.launches + count * block.work.forward.launches
    launches += own.embedding.backward.launches + own.head.backward.launches + count * block.work.backward.launches
    launches += own.optimizer[0].launches
    assert simulate_plan(own, slow).time_us == pytest.approx(1e4 * launches, rel=0.01)


def test_a_step_too_long_to_simulate_has_its_estimate_and_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_program, "MOST_KERNELS", 10)
    found = planned("llama", 2, device="h100-sxm", settings=SIZES, preset="8b", only="dp=2")
    assert found.simulated is None
    assert found.plans
    assert any("more than 10 kernels" in note for note in found.notes)


def test_every_plan_of_a_search_can_be_simulated(pieces: LayerPieces) -> None:
    shape = read_decoder("moe", ["depth=4", "seq=1024"], "8x7b")[1]
    for text in ("dp=4,ep=4,sharding=1", "dp=4,tp=2,ep=4,etp=1,sequence_parallel,sharding=1", "dp=2,pp=2,ep=2"):
        plan = ParallelPlan.parse(text)
        check_decoder_plan(plan, shape, CLUSTER.topology)
        own = loads_of(plan, shape, pieces, CLUSTER)
        assert simulate_plan(own, Rates()).time_us == pytest.approx(estimate(own).time_us, rel=0.15)


def run(*words: str) -> tuple[int, str, str]:
    found = CliRunner().invoke(app, ["plan", "llama", "--preset", "8b", "--device", "h100-sxm",
                                     *(word for size in SIZES for word in ("--set", size)), *words])
    return found.exit_code, found.stdout, found.stderr


def test_command(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    code, out, _ = run("--gpus", "8", "--parallel", "dp=2,tp=2,pp=2,microbatches=4", "--timeline", str(path))
    assert code == 0
    assert "Simulated, one rank of each stage" in " ".join(out.split())
    events = json.loads(path.read_text())["traceEvents"]
    titles = {event["name"] for event in events if event.get("cat") == "task"}
    assert {"forward 0", "backward 3", "end of the step"} <= titles
    tracks = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert tracks == {"stage 0", "stage 1"}
    code, out, _ = run("--gpus", "8", "--json")
    found = json.loads(out)
    assert found["simulated"]["plan"] == found["plans"][0]["plan"]
    assert 0.8 < found["simulated"]["estimate_over_simulated"] < 1.2


def test_a_timeline_is_of_one_plan(tmp_path: Path) -> None:
    kept = tmp_path / "notes.txt"
    kept.write_text("mine")
    for words, said in ((("--gpus", "8,16", "--timeline", str(tmp_path / "a.json")), "--timeline"),
                        (("--gpus", "8", "--clock", "1,2", "--timeline", str(tmp_path / "a.json")), "--timeline"),
                        (("--gpus", "8", "--timeline", str(kept)), "notes.txt")):
        code, out, err = run(*words)
        assert (code, out) == (2, "")
        assert said in err
    assert kept.read_text() == "mine"
    code, out, _ = run("--gpus", "8", "--parallel", "dp=8,microbatch=4096", "--timeline", str(tmp_path / "a.json"))
    assert code == 1 and "Not possible" in out
    assert not (tmp_path / "a.json").exists()
    with pytest.raises(PlanError):
        planned("llama", 3, device="h100-sxm", settings=SIZES, preset="8b", only="dp=2")
