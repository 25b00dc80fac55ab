"""Replays and what-ifs of every real trace, against the measured times and against golden results.

The figures come from the traces themselves: measured steps, a trace's own repetition (leave one step out), and for
the what-ifs an independent throw-away simulator of the same recordings.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from delayed_rank import delay_rank
from leave_one_out import leave_one_out

from graph_predictor.prediction.replay import WINDOW, Replay, replay
from graph_predictor.simulation.build import Built, build_program
from graph_predictor.simulation.engine import Causes, simulate, walks_back
from graph_predictor.simulation.program import Program, step_items
from tracer.errors import ForetraceError
from tracer.graph import KernelKind
from tracer.job import read_job

pytestmark = pytest.mark.real_traces

DLRM = "dlrm-8xV100-2023"
NANOGPT = "nanogpt-8xH100"
HOOK = "nanogpt-rank0-of-8xH100/hook.kineto.json.gz"
MI300_DDP = "resnet18-ddp-MI300X/rank0.kineto.json.gz"
H100_COPIES = "h100-vs-mi300/h100-google_owlv2-large-patch14-ensemble.json.gz"
V100 = "resnet50-V100/rank0.kineto.json.gz"
DDP = "resnet50-ddp-2xA100/rank0.kineto.json.gz"
RANK3 = "rank3-of-8xA100-6steps/rank3.kineto.json.gz"
SAMPLED = ("rank0-1-of-128/sampled_rank-0.json.gz", "rank0-1-of-128/sampled_rank-1.json.gz")

WITH_STEPS = (
    "cuda-sync-A100/cuda_event_sync/event_sync_trace.json.gz", DLRM, NANOGPT, HOOK, MI300_DDP, H100_COPIES,
    "h100-vs-mi300/mi300-google_owlv2-large-patch14-ensemble.json.gz",
    "h100-vs-mi300/h100-Qwen_Qwen1.5-0.5B-Chat.json.gz", "h100-vs-mi300/h100-gaunernst_bert-small-uncased.json.gz",
    "h100-vs-mi300/mi300-Qwen_Qwen1.5-0.5B-Chat.json.gz", "h100-vs-mi300/mi300-gaunernst_bert-small-uncased.json.gz",
    "linear-2080Ti/kineto.json.gz", *SAMPLED, RANK3, "resnet50-V100-2021/list-form-2020.json.gz",
    "resnet50-V100-2021/loader-workers-0.json.gz", V100, DDP, "triton-example/triton_example.json.gz",
    "vllm-cuda-graph/graph-execution.json.gz", "vllm-eager-B200/rank0.json.gz",
)
WITHOUT_STEPS = (
    "cuda-sync-A100/alexnet/benchmark_result_2869224_1695835535_trace.json.gz",
    "cuda-sync-A100/cuda_event_sync_multi_stream/event_sync_trace.json.gz",
    "cuda-sync-A100/simple_add/benchmark_result_493459_1694039959_trace.json.gz",
    "gpu-only-MI210/rank0.json.gz", "triton-example/torch-compile-mi300.json.gz",
)
GOLDEN_PPM = 10
"""Constants are medians and rounded means: another NumPy may sum a mean differently, by a nanosecond a kernel."""


@lru_cache(maxsize=8)
def built_from(path: Path) -> Built:
    return build_program(read_job(path).graphs)


@pytest.fixture
def built(real_trace: Callable[[str], Path]) -> Callable[[str], Built]:
    return lambda name: built_from(real_trace(name))


def steps_ms(program: Program) -> list[float]:
    """Simulated time of every step, ms."""
    simulated = simulate(program)
    return [float(simulated.item_end[end] - simulated.item_end[begin]) / 1e6
            for _, _, begin, end in step_items(program)]


def scaled_ms(built: Built, factor: float) -> list[float]:
    """Replayed time of every step with kernels other than collectives scaled, ms."""
    return [step.replayed_ns / 1e6 for step in replay(built.graphs, built=built, scale_kernels=factor).steps]


def test_every_trace_is_here(data_folder: Path) -> None:
    """A trace added to the data gets a test."""
    traces = data_folder / "traces"
    names = {str(path.relative_to(traces)) for path in traces.glob("**/*.json.gz")
             if ".et." not in path.name and path.name != "et.json.gz" and path.parent.name not in (DLRM, NANOGPT)}
    assert names | {DLRM, NANOGPT} == {*WITH_STEPS, *WITHOUT_STEPS}


@pytest.mark.parametrize("name", [*WITH_STEPS, *WITHOUT_STEPS])
def test_a_trace_is_replayed(name: str, built: Callable[[str], Built], replay_golden: Any) -> None:
    found = built(name)
    p, result = found.program, replay(found.graphs, built=found)
    is_closed(name, result)
    # Replayed times are what they were. See `tests/conftest.py` for how to change them.
    times = {f"rank {step.rank} {step.name}": step.replayed_ns for step in result.steps}
    expected = replay_golden.expected(name, times)
    assert times.keys() == expected.keys()
    moved = {key: ns / 1e6 for key, ns in times.items() if abs(ns - expected[key]) > GOLDEN_PPM * 1e-6 * expected[key]}
    assert not moved, f"ms now: {moved}; ms expected: { {key: expected[key] / 1e6 for key in moved} }"
    # No duration is negative, nothing ends before it starts, and residuals play the recording back exactly.
    for column in (p.item_work, p.item_cost, p.kernel_duration):
        assert column.min(initial=0) >= 0
    assert (result.simulated.item_end >= result.simulated.item_start).all()
    assert (result.simulated.kernel_end >= result.simulated.kernel_start).all()
    played = replay(found.graphs, built=found, residuals=True)
    assert not played.kernel_end_errors_ns().any()
    assert (played.simulated.item_end == p.recorded_item_end).all()
    # Segments of the critical path are contiguous and sum to the simulated step, to the nanosecond.
    causes = Causes(result.program, result.simulated, [graph.kernels.kind for graph in result.graphs])
    for step in result.steps if name in WITH_STEPS else []:
        path = walks_back(causes, [step.span.path_start(result.simulated)]).one(0)
        assert path.total_ns == step.replayed_ns == sum(path.by_bound().values())
        assert (path.start_ns[1:] == path.end_ns[:-1]).all()


def is_closed(name: str, result: Replay) -> None:
    """Constants mode: median error of the steps at most 0.3%, maximum 1%, kernel ends within 1% of a step."""
    assert all(step.name != WINDOW for step in result.steps) == (name in WITH_STEPS)
    assert result.median_abs_error <= 0.003
    assert result.max_abs_error <= 0.01
    if name in SAMPLED:
        # Every other rank of the job is missing: its collectives explain the timeline, and are not there.
        assert not result.reproducible
        return
    assert result.reproducible
    assert result.unexplained_share <= 0.005
    step = np.median([s.measured_ns for s in result.steps])
    assert np.percentile(np.abs(result.kernel_end_errors_ns()), 95) <= 0.01 * step


# The eight-rank job


def test_dlrm_ranks_and_collectives(built: Callable[[str], Built]) -> None:
    found = built(DLRM)
    result = replay(found.graphs, built=found)
    assert [step.rank for step in result.steps] == list(range(8))
    assert result.max_abs_error <= 0.01
    grouped = found.program.kernel_group >= 0
    assert (found.program.group_size == 8).all()
    kinds = np.concatenate([graph.kernels.kind for graph in found.graphs])
    assert (grouped == (kinds == KernelKind.COLLECTIVE)).all(), "every collective is a rendezvous of all ranks"
    step = np.median([s.measured_ns for s in result.steps])
    assert np.abs(result.kernel_end_errors_ns()[grouped]).max() <= 0.005 * step


@pytest.mark.parametrize(("rank", "delay_ms", "expected_us", "tolerance_us"), [
    (7, 5, 5000, 1),  # rank 7 is the last to arrive everywhere: everyone follows it
    (7, -5, -505, 60),  # until the next-latest rank binds
    (1, 10, 2376, 80),  # rank 1 has 7.6 ms of slack
    (1, -5, 0, 1),
])
def test_dlrm_delayed_rank(rank: int, delay_ms: int, expected_us: int, tolerance_us: int,
                           built: Callable[[str], Built]) -> None:
    program = built(DLRM).program
    grouped = program.kernel_group >= 0
    delayed = simulate(delay_rank(program, rank, delay_ms * 1_000_000))
    moved_us = (delayed.kernel_end - simulate(program).kernel_end)[grouped] / 1000
    assert np.abs(moved_us - expected_us).max() <= tolerance_us
    with pytest.raises(ForetraceError, match="8 ranks"):
        delay_rank(program, 8, 1)


# What-ifs


@pytest.mark.parametrize(("factor", "steps", "low", "high"), [
    (0.5, slice(3, 5), 47.5, 49.5), (0.25, slice(1, 5), 30, 34), (2, slice(2, 5), 188, 192)])
def test_v100_scaled_kernels(factor: float, steps: slice, low: float, high: float,
                             built: Callable[[str], Built]) -> None:
    times = scaled_ms(built(V100), factor)[steps]
    assert low <= min(times) <= max(times) <= high


def test_v100_one_longer_kernel(built: Callable[[str], Built]) -> None:
    """20 ms on one kernel in the middle of step 1 are felt in step 2, through the full launch queue."""
    found = built(V100)
    kernels = found.graphs[0].kernels
    first = np.nonzero((kernels.step == 0) & (kernels.launch >= 0))[0]
    durations = found.program.kernel_duration.copy()
    durations[first[len(first) // 2]] += 20_000_000
    grown = steps_ms(found.program.with_durations(durations))[1] - steps_ms(found.program)[1]
    assert grown == pytest.approx(20, abs=0.5)


@pytest.mark.parametrize("factor", [0.1, 0.5, 2])
def test_ddp_is_host_bound(factor: float, built: Callable[[str], Built]) -> None:
    found = built(DDP)
    changes = np.array(scaled_ms(found, factor)) / np.array(scaled_ms(found, 1)) - 1
    assert np.abs(changes).max() <= 0.001


@pytest.mark.parametrize(("factor", "low", "high"), [(0.25, 69, 73), (2, 108, 116)])
def test_rank3_scaled_kernels(factor: float, low: float, high: float, built: Callable[[str], Built]) -> None:
    """Its collectives keep their recorded durations."""
    assert low <= np.mean(scaled_ms(built(RANK3), factor)) <= high


@pytest.mark.parametrize(("name", "limit"), [(V100, 0.005), (RANK3, 0.03)])
def test_leave_one_step_out(name: str, limit: float, built: Callable[[str], Built]) -> None:
    found = built(name)
    out = leave_one_out(found)
    assert out.matched_share >= 0.99
    changed = out.program.kernel_duration != found.program.kernel_duration
    assert changed.mean() >= 0.5, "the durations really come from elsewhere"
    measured = [step.measured_ns / 1e6 for step in replay(found.graphs, built=found).steps]
    errors = np.array(steps_ms(out.program)) / np.array(measured) - 1
    assert np.abs(errors).max() <= limit
    # With one step there is nothing to learn from: nothing matched, nothing changed.
    single = built(DLRM)
    out = leave_one_out(single)
    assert out.matched_share == 0
    assert (out.program.kernel_duration == single.program.kernel_duration).all()


# A simulator without one of its rules must fail on the trace that shows it.


def without(program: Program, relation: str) -> Program:
    """The program without its ``edge``, ``wait`` or ``after`` relations."""
    mutant = program.copy()
    for name in Program.__dataclass_fields__:
        if name == f"{relation}_ptr":
            setattr(mutant, name, np.zeros_like(getattr(mutant, name)))
        elif name.startswith(f"{relation}_"):
            setattr(mutant, name, getattr(mutant, name)[:0])
    return mutant


@pytest.mark.parametrize(("name", "relation", "at_least"), [
    (RANK3, "edge", 0.15), (RANK3, "wait", 0.15), ("h100-vs-mi300/mi300-Qwen_Qwen1.5-0.5B-Chat.json.gz", "wait", 0.25),
    (V100, "after", 0.4), ("resnet50-V100-2021/list-form-2020.json.gz", "after", 0.2)])
def test_a_missing_rule_shows(name: str, relation: str, at_least: float, built: Callable[[str], Built]) -> None:
    found = built(name)
    measured = [step.measured_ns / 1e6 for step in replay(found.graphs, built=found).steps]
    errors = np.array(steps_ms(without(found.program, relation))) / np.array(measured) - 1
    assert np.abs(errors).max() >= at_least
    if relation == "after":  # and without the queue's limit a step of the V100 takes what the host needs
        program = built(V100).program.copy()
        program.queue_depth[:] = 0
        assert steps_ms(program)[2] < 0.7 * scaled_ms(built(V100), 1)[2]
