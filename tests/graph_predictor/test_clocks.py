"""Ranks whose clocks differ: told by the ends of their collectives, and set."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from micro import Micro, read_ranks

from graph_predictor import replay
from graph_predictor.simulation.build import build_program
from graph_predictor.simulation.ranks import job_clock, view_rank
from tracer.graph import ExecutionGraph

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
STEP, TRANSFER = 1000, 300


def ranks(folder: Path, late: int, ahead: float, drift: float = 0.0, meetings: int = 4,
          later: int = 0) -> list[ExecutionGraph]:
    """Two ranks; in each step the second comes ``late`` µs later to an all-reduce, and its clock is ``ahead`` µs ahead,
    ``drift`` more with each step; it numbers its steps ``later`` higher."""
    traces = []
    folder.mkdir(exist_ok=True)
    for number in (0, 1):
        trace = Micro(rank=number, world_size=2, base=0.0 if number == 0 else ahead)
        if not later:
            trace.calibrate()  # which marks a step 0
        args = {"Collective name": "allreduce", "Process Group Name": "dp", "Process Group Ranks": "[0, 1]",
                "Group size": 2, "In msg nelems": 1 << 20, "Out msg nelems": 1 << 20, "dtype": "Float"}
        for n in range(meetings):
            at = 1000 + STEP * n + (round(drift * n) if number else 0)
            mine = late if number else 0
            trace.step(at, at + STEP, n + 1 + later * number)
            trace.launch(at + 15 + mine, 5, (20, at + 25 + mine, TRANSFER + late - mine), name=NCCL, **args)
            trace.op("aten::item", at + 24 + mine, at + late + TRANSFER + 31)
            trace.call("cudaDeviceSynchronize", at + 25 + mine, TRANSFER + late - mine + 5)
        traces.append(trace)
    graphs = read_ranks(traces, folder)
    if ahead > 0:
        # Each file's window starts with its first event: what a clock says of it is the file's.
        assert graphs[1].meta.base_time_ns - graphs[0].meta.base_time_ns == pytest.approx(1e3 * ahead, abs=1)
    return graphs


@pytest.mark.parametrize("ahead", [0.0, 40.0, 90_000_000.0])
def test_a_clock_that_is_ahead_is_set_and_collectives_meet(tmp_path: Path, ahead: float) -> None:
    graphs = ranks(tmp_path, late=200, ahead=ahead)
    built = build_program(graphs)
    assert built.rendezvous.intrinsic_ns == [TRANSFER * 1000] * 4
    assert abs(built.clock_ns[1] - built.clock_ns[0]) <= 1_000
    assert sum("clock is" in note for note in built.rendezvous.notes) == (1 if ahead else 0)
    for step in replay(graphs).steps:
        assert step.replayed_ns == pytest.approx(step.measured_ns, rel=2e-3)


def test_a_drift_is_told_and_clocks_of_one_host_are_left_alone(tmp_path: Path) -> None:
    """Collectives meet though a clock drifts by more than their ends may differ."""
    clock = job_clock([view_rank(graph) for graph in ranks(tmp_path, late=0, ahead=4_000.0, drift=30.0)])
    assert any("changes by +90 µs over the window" in note for note in clock.notes)
    assert clock.drifts[1] == pytest.approx(0.03, rel=0.05) and clock.drifts[0] == 0.0
    built = build_program(ranks(tmp_path, late=0, ahead=4_000.0, drift=500.0, meetings=12))
    assert len(built.rendezvous.groups) == 12
    assert any("changes by +5,500 µs over the window" in note for note in built.rendezvous.notes)
    clock = job_clock([view_rank(graph) for graph in ranks(tmp_path, late=100, ahead=8.0)])
    assert clock.starts_ns == [0, 8_000] and not clock.notes


def test_ranks_of_different_steps_are_told(tmp_path: Path) -> None:
    same, overlapping, other = (ranks(tmp_path / str(later), late=0, ahead=0.0, later=later) for later in (0, 2, 90))
    for job in (same, overlapping):
        assert not any("recorded Prof" in note for note in build_program(job).rendezvous.notes)
    assert any("Rank 1 recorded ProfilerStep#91 to ProfilerStep#94, rank 0 ProfilerStep#1 to ProfilerStep#4" in note
               for note in build_program(other).rendezvous.notes)


def test_a_rank_that_stopped_early_meets_the_others_in_what_it_has(tmp_path: Path) -> None:
    long, short = ranks(tmp_path / "a", late=200, ahead=0.0), ranks(tmp_path / "b", late=200, ahead=0.0, meetings=2)
    met = build_program([long[0], short[1]]).rendezvous
    assert [len(members) for members in met.groups] == [2, 2]
    first = [members[0][1] for members in met.groups]
    assert first == sorted(first)
    assert any("the 2 that at least two ranks have were matched" in note for note in met.notes)


def test_ends_that_have_no_constant_offset_are_no_clocks(tmp_path: Path) -> None:
    moved, few = (ranks(tmp_path / str(n), late=0, ahead=4_000.0, meetings=n) for n in (8, 2))
    moved[1].kernels.start_ns += np.random.default_rng(1).integers(-900_000, 900_000, len(moved[1].kernels))
    for graphs in (moved, few):
        assert not job_clock([view_rank(graph) for graph in graphs]).notes
