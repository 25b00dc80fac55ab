"""The path of an edited step is that step's: every edit of the registry on recordings of CPUs and GPUs.

What the edited step gives an operation is added up here from the simulated program, not by what names the path.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from micro import Micro, read_ranks
from slowly import mostly_slow
from test_micro_traces import full_queue
from tried_edits import EVERY

from foretrace.edits import Device, Edit, FusedOptimizer, Remove
from graph_predictor.prediction.explain import GRAPH_LAUNCH, OUTSIDE
from graph_predictor.prediction.predictor import Baseline, SimulatedStep
from graph_predictor.prediction.result import PathItem
from graph_predictor.simulation.build import build_program
from graph_predictor.simulation.changed_program import same_order, without
from graph_predictor.simulation.program import ItemKind, entries_waited_for
from graph_predictor.synthesis.baseline import baseline_of
from kernel_models.device import device
from step_views.reports.ranks.stragglers import NOT_YET, job_path
from step_views.reports.ranks.times import predicted_times
from tracer.errors import ForetraceError
from tracer.job import read_job

TRACES = Path(__file__).parents[2] / "traces"
ON_CPU = ("resnet50-cpu", "bert-cpu", "dlrm-cpu", "llama-cpu", "cpu-small")
ON_GPU = ("resnet50-V100/rank0.kineto.json.gz", "nanogpt-rank0-of-8xH100", "resnet50-ddp-2xA100")
LEAST_EDITS = 5
"""Edits that each recording takes; the others are refused with a sentence."""
ROUNDED_US = 1.0
"""Whole nanoseconds of some hundred items of one operation."""


@lru_cache(maxsize=1)
def _baseline(path: Path) -> Baseline:
    return baseline_of(read_job(path))


def _holds(baseline: Baseline, edits: list[Edit]) -> tuple[list[PathItem], SimulatedStep]:
    """Check the path of a step with edits, and return it with the step."""
    result, step = baseline.predict(edits), baseline.simulated(edits)
    path, which = result.critical_path, edits[0].describe()
    assert sum(entry.time_us for entry in path) == pytest.approx(result.step_time_us, rel=1e-9), which
    assert sum(entry.share for entry in path) == pytest.approx(1.0), which
    host, devices = _given(step)
    there = _names(step)
    for entry in path:
        assert entry.operation in there, (which, entry)
        given = {"host": host, "compute": devices, "memory copy": devices}.get(entry.bound)
        if entry.operation == OUTSIDE:
            continue  # hand-overs between threads are in no piece
        assert given is None or entry.time_us <= given[entry.operation] * (1 + 1e-6) + ROUNDED_US, (which, entry)
    shares = result.sources.values()
    assert sum(shares) == pytest.approx(1.0) and all(share > 0 for share in shares), which
    return path, step


def _given(step: SimulatedStep) -> tuple[dict[str, float], dict[str, float]]:
    """What a step gives each operation on its host and its devices, of all ranks, µs."""
    scenario, steady = step.scenario, step.steady
    built, pieces, repeated, program = scenario.built, scenario.slices, steady.repeated, steady.program
    edited, on_cpu, steps = steady.copies.host, scenario.built.computes_on_host, scenario.cycle.steps
    host: dict[str, float] = defaultdict(float)
    devices: dict[str, float] = defaultdict(float)
    last = np.flatnonzero(scenario.cycle.working[pieces.item] & ~pieces.is_cost)
    own = np.isin(last, list(edited.labels)) if on_cpu else np.zeros(len(last), np.bool_)
    for row in last[own].tolist():
        host[edited.labels[row]] += edited.ns[row] / steps / 1e3
    for rank, graph in enumerate(built.graphs):
        rows = last[~own & (pieces.rank[last] == rank)]
        codes, place = np.unique(np.where(pieces.op[rows] >= 0, graph.ops.name[pieces.op[rows]], -1),
                                 return_inverse=True)
        for code, ns in zip(codes.tolist(), np.bincount(place, edited.ns[rows]), strict=True):
            host[graph.string(code) if code >= 0 else OUTSIDE] += ns / steps / 1e3
    rank_of = program.thread_rank[program.item_thread()]
    calls = (repeated.copy_of_item == repeated.copies - 1) & (program.item_kind == ItemKind.CALL)
    for item in np.flatnonzero(calls & (program.item_cost > 0)).tolist():
        graph = built.graphs[int(rank_of[item])]
        op = int(graph.launches.op[program.item_row[item]])
        name = graph.string(int(graph.ops.name[op])) if op >= 0 else OUTSIDE
        host[GRAPH_LAUNCH if scenario.launches.graphed else name] += program.item_cost[item] / steps / 1e3
    kernel_rank, pointer = program.kernel_rank(), built.program.kernel_ptr
    for kernel in np.flatnonzero(repeated.copy_of_kernel == repeated.copies - 1).tolist():
        rank, recorded = int(kernel_rank[kernel]), int(repeated.kernel[kernel])
        graph, row = built.graphs[rank], recorded - int(pointer[rank])
        op = int(graph.kernels.op[row])
        name = graph.string(int(graph.ops.name[op] if op >= 0 else graph.kernels.name[row]))
        name = name if on_cpu else edited.labels.get(recorded, name)
        devices[name] += program.kernel_duration[kernel] / steps / 1e3
    return host, devices


def _names(step: SimulatedStep) -> set[str]:
    """What can be on the path of a step: operations that are still there, and what has taken the place of others."""
    scenario, edited = step.scenario, step.steady.copies.host
    found = {OUTSIDE, *edited.labels.values(), *([GRAPH_LAUNCH] if scenario.launches.graphed else [])}
    for rank, (graph, rows) in enumerate(zip(scenario.built.graphs, scenario.cycle.row, strict=True)):
        there = np.isin(graph.ops.step, rows)
        if edited.gone is not None:
            there &= ~edited.gone.operations[rank]
        found |= {graph.string(code) for code in np.unique(graph.ops.name[there]).tolist()}
        found |= {graph.string(code) for code in np.unique(graph.kernels.name[graph.kernels.op < 0]).tolist()}
    return found


def _hold_for_all(baseline: Baseline) -> None:
    taken = 0
    for option, value in EVERY:
        with suppress(ForetraceError):
            _holds(baseline, [option.make(value)])
            taken += 1
    assert taken >= LEAST_EDITS


@pytest.mark.parametrize("name", mostly_slow(ON_CPU, ("dlrm-cpu",)))
def test_the_path_is_of_what_the_edited_step_does(name: str) -> None:
    _hold_for_all(_baseline(TRACES / name))


@pytest.mark.real_traces
@pytest.mark.parametrize("name", mostly_slow(ON_GPU, ON_GPU[:2]))
def test_the_path_is_of_what_the_edited_gpu_step_does(real_trace: Callable[[str], Path], name: str) -> None:
    baseline = _baseline(real_trace(name))
    _hold_for_all(baseline)
    path, step = _holds(baseline, [Remove("aten::*mm*|aten::*conv*|nccl*|c10d::*")])
    assert not [entry for entry in path if entry.operation.startswith(("nccl", "c10d::", "aten::mm", "aten::conv"))]
    across = job_path((times := predicted_times(step)), times.windows[0])
    parts = list(chain.from_iterable(stretch.parts for stretch in across))
    assert sum(part.time_ns for part in parts) == max(window.length_ns for window in times.windows[0])
    assert {part.operation for part in parts} <= _names(step) | {NOT_YET}


def test_nothing_of_a_replaced_optimizer_is_on_the_path() -> None:
    """The new work has a name of its own, and all other operations take what they took."""
    baseline = _baseline(TRACES / "resnet50-cpu")
    before = {entry.operation: entry.time_us for entry in baseline.predict().critical_path}
    after = {entry.operation: entry.time_us for entry in _holds(baseline, [FusedOptimizer()])[0]}
    assert before["aten::sqrt"] > 40_000 and "aten::sqrt" not in after
    assert after["aten::convolution_backward"] == pytest.approx(before["aten::convolution_backward"])
    assert "optimizer adam" in after


def test_what_is_removed_is_what_the_step_is_shorter_by() -> None:
    """On a CPU an operation takes its own time and that of all inside it."""
    baseline = _baseline(TRACES / "resnet50-cpu")
    before, after = baseline.predict(), baseline.predict([Remove("aten::sqrt")])
    own = sum(entry.time_us for entry in before.critical_path if entry.operation == "aten::sqrt")
    assert before.step_time_us - after.step_time_us == pytest.approx(own, rel=1e-6)
    assert after.sources == {"measured": 1.0}
    assert any(note.startswith("Removed a step: 161 × aten::sqrt, with 42.9") for note in after.notes)
    inside = baseline.predict([Remove("aten::convolution_backward")])
    assert not [entry for entry in inside.critical_path if entry.operation == "aten::_slow_conv2d_backward"]
    with pytest.raises(ForetraceError, match=r"no operation 'aten::srqt'; name one of its own, such as aten::sqrt"):
        baseline.predict([Remove("aten::srqt")])


@pytest.mark.real_traces
def test_sources_are_of_all_time(real_trace: Callable[[str], Path]) -> None:
    """A step that its host decides has anchored kernels all the same, where they run on another device."""
    baseline = _baseline(real_trace("resnet50-ddp-2xA100"))
    result = baseline.predict([Device(device("h100-sxm"))])
    assert result.kernel_sources["anchored"] > 0.5 and 0.05 < result.sources["anchored"] < 0.95


def _micro_steps(rank: int | None = None, before: float = 10, kernel: str = "gemm") -> Micro:
    """Steps of 300 µs whose host launches one kernel of 100 and waits for it.

        calls      |10 launch 15|  |25 synchronise ···············|
        kernel                 20 ─────── 120                    (latency 5)
    """
    trace = Micro(rank=rank, world_size=1 if rank is None else 2).calibrate()
    for number in range(3):
        at = 1000 + 300 * number
        trace.step(at, at + 300, number + 1).op("aten::linear", at + before - 2, at + before + 7)
        trace.launch(at + before, 5, (7, at + before + 10, 110 - before), name=kernel)
        trace.op("aten::item", at + before + 14, at + 126)
        trace.call("cudaDeviceSynchronize", at + before + 15, 110 - before)
    return trace


@pytest.mark.parametrize(("removed", "step_us"), [
    ("aten::linear", 203 - 9), ("aten::item", 203 - 5), ("aten::linear|aten::item", 203 - 14)])
def test_waits_go_with_what_waited_and_with_what_was_waited_for(tmp_path: Path, removed: str, step_us: float) -> None:
    """203 µs of the step are the host's: 9 in the operation that launches, and 5 in the one that waits, 3 of them its
    call's own."""
    baseline = baseline_of(_micro_steps().read(tmp_path))
    result = baseline.predict([Remove(removed)])
    assert result.step_time_us == pytest.approx(step_us, abs=0.01)
    assert not {entry.operation for entry in result.critical_path} & set(removed.split("|"))
    assert result.gpu_active_us == (0 if "linear" in removed else pytest.approx(100))


def test_ranks_no_longer_meet_in_a_collective_that_is_removed(tmp_path: Path) -> None:
    """The other rank's launch comes 80 µs later; without the collective neither waits for the other."""
    traces = [_micro_steps(rank, 10 + 80 * rank, "ncclKernel_AllReduce") for rank in range(2)]
    baseline = baseline_of(read_ranks(traces, tmp_path))
    # The first rank's host has 80 µs less before its launch, that the other's has not.
    for edits, expected in (([], [300, 300]), ([Remove("aten::linear")], [203 - 9, 203 - 9 + 80])):
        assert [each.step_time_us for each in baseline.predict(edits).per_rank] == pytest.approx(expected, abs=0.01)


def test_the_launch_queue_holds_what_is_launched(tmp_path: Path) -> None:
    """Of the launches that stay, the 1023rd is the first that may have to wait for room."""
    program = build_program([full_queue().read(tmp_path)]).program
    kernels = np.arange(len(program.kernel_item)) % 2 == 1
    items = np.zeros(len(program.item_kind), np.bool_)
    items[program.kernel_item[kernels]] = True
    left = without(program, kernels, items)
    waiting = int((entries_waited_for(program) >= 0).sum())
    entries, kept = len(program.queue_kernel), len(left.queue_kernel)
    assert waiting == entries - 1022 > 0 and kept == entries - kernels[program.queue_kernel].sum()
    assert (entries_waited_for(left) >= 0).sum() == max(kept - 1022, 0)
    assert same_order(without(program, ~(kernels | ~kernels), items & False), program)
