"""Predictions of steps that were only traced by shapes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from said import plain
from typer.testing import CliRunner

from foretrace.commands import app
from foretrace.edits import CudaGraphs, Device, ScaleHost, Sizes
from graph_predictor.request.study import Study
from graph_predictor.synthesis.baseline import baseline_of
from kernel_models.device import device
from kernel_models.operation import calls_of, operation
from kernel_models.pricing import price, sustained
from tracer.errors import ForetraceError
from tracer.graph import (
    NONE,
    SHAPE_ONLY,
    CollectiveTable,
    ExecutionGraph,
    GapTable,
    KernelTable,
    LaunchTable,
    Meta,
    OpKind,
    OpTable,
    OverheadTable,
    Phase,
    Place,
    StepTable,
    SyncTable,
    Thread,
    WaitSource,
)
from tracer.job import assemble_job

TOKENS, WIDTH = 16384, 2048
LAYERS = 6


def traced(layers: int = LAYERS, collective: bool = False, peak: int = 8 * 10**9) -> ExecutionGraph:
    """A row of products; with ``collective`` an all-reduce after the first, whose result the last one needs."""
    strings = ["aten::mm", f"[[{TOKENS},{WIDTH}],[{WIDTH},{WIDTH}]]", '["c10::BFloat16","c10::BFloat16"]',
               "c10d::allreduce_", "all_reduce", "0", "[0,1,2,3,4,5,6,7]", "float32"]
    count = layers + collective
    ops = OpTable.empty(count)
    ops.name[:], ops.shapes[:], ops.dtypes[:] = 0, 1, 2
    if collective:
        ops.name[1], ops.shapes[1], ops.dtypes[1] = 3, NONE, NONE
    ops.kind[:], ops.thread[:], ops.step[:], ops.phase[:] = OpKind.OPERATION, 0, 0, Phase.FORWARD
    ops.start_ns[:], ops.duration_ns[:] = np.arange(count), 0
    table = CollectiveTable.empty(int(collective))
    if collective:
        table.op[:], table.kind[:], table.group[:], table.ranks[:], table.dtype[:] = 1, 4, 5, 6, 7
        table.elements_in[:], table.elements_out[:], table.group_size[:], table.order[:] = 10**8, 10**8, 8, 0
        table.wait_op[:], table.wait_source[:] = count - 1, WaitSource.MODELLED
    steps = StepTable.empty(1)
    steps.name[:], steps.start_ns[:], steps.duration_ns[:], steps.thread[:] = 0, 0, count, 0
    meta = Meta(source="a step", era=SHAPE_ONLY, device="h200-sxm", rank=0, world_size=8 if collective else 1,
                memory={"peak": peak})
    return ExecutionGraph(strings, [Thread("0", "0")], ops, LaunchTable.empty(), KernelTable.empty(), table,
                          SyncTable.empty(), GapTable.empty(), steps, OverheadTable.empty(), meta)


def product_us(name: str = "h200-sxm", tokens: int = TOKENS) -> float:
    calls = calls_of(operation("aten::mm", [(tokens, WIDTH), (WIDTH, WIDTH)], "bf16"))
    return sustained(price(calls, device(name)), device(name)).total_us


def test_there_is_one_step_to_choose() -> None:
    assert baseline_of(traced(), -1).predict().step_time_us == baseline_of(traced(), 0).predict().step_time_us
    with pytest.raises(ForetraceError, match="no step 99: the trace has traced step"):
        baseline_of(traced(), 99)
    with pytest.raises(ForetraceError, match="no step '99'"):  # refused before anything is priced
        Study(assemble_job([traced()]), "99")


def test_kernels_are_priced_and_the_rest_told() -> None:
    graph = traced()
    graph.meta.loss.notes.append("Boxes are taken to be large.")
    baseline = baseline_of(graph)
    result = baseline.predict()
    assert result.notes.count("Boxes are taken to be large.") == 1
    assert result.gpu_active_us == pytest.approx(LAYERS * product_us(), rel=1e-3)
    assert result.bound == "compute"
    assert result.kernel_sources == {"datasheet": 1.0}
    assert "measured" not in result.sources
    assert result.recorded_us is None
    assert result.peak_memory_bytes == 8 * 10**9
    assert result.mfu is not None and 0.3 < result.mfu < 1
    assert result.interval_us[1] > 1.1 * result.step_time_us
    half = baseline.predict([Sizes((("batch", TOKENS, TOKENS // 2),))])
    assert half.gpu_active_us == pytest.approx(LAYERS * product_us(tokens=TOKENS // 2), rel=1e-3)
    assert half.kernel_sources == {"datasheet": 1.0}
    assert baseline.predict([Device("b200")]).gpu_active_us == pytest.approx(LAYERS * product_us("b200"), rel=1e-3)


def test_the_host_decides_when_the_work_is_little() -> None:
    baseline = baseline_of(traced(), device=device("b200"))
    slow = baseline.predict([ScaleHost(50)])
    assert slow.bound == "host"
    # A product and the Python around it take 10 to 100 µs of the hosts that are known, as much again the step's begin
    # and end.
    assert (LAYERS + 2) * 10 * 50 < slow.step_time_us < (2 * LAYERS) * 100 * 50
    assert baseline.predict([ScaleHost(50), CudaGraphs()]).step_time_us < 0.7 * slow.step_time_us


def test_a_collective_overlaps_until_its_result_is_needed() -> None:
    """800 MB over eight ranks take longer than all the products but the last, which waits for it."""
    shared = baseline_of(traced(collective=True)).predict()
    collective = shared.families_us["collective"]
    assert collective > 0
    expected = max(product_us() + collective + product_us(), LAYERS * product_us())
    assert shared.step_time_us == pytest.approx(expected, rel=0.05)
    assert shared.step_time_us > baseline_of(traced()).predict().step_time_us
    assert shared.bounds_us["exposed communication"] > 0


def test_a_step_that_never_ran_is_not_said_to_be_recorded(tmp_path: Path) -> None:
    path = tmp_path / "step.foretrace"
    traced().save(path)
    said = plain(CliRunner().invoke(app, ["predict", str(path)]).output)
    assert "Step that never ran: " in said and "(as traced for h200-sxm)" in said
    assert "recorded" not in said and "the profiler" not in said
    assert "on hosts that no --device names (right within a factor of 3" in said
    assert "the host's memory" not in said
    result = json.loads(CliRunner().invoke(app, ["opportunities", str(path), "--json"]).stdout)
    assert result["times"] == "that never ran"


def test_work_in_the_hosts_memory_is_told_whatever_the_device() -> None:
    """It is no device's work: the time is the same on each, that of a usual CPU, and a warning says so."""
    graph = traced()
    graph.ops.place[:] = Place.HOST
    times = []
    for name in ("h200-sxm", "a100-sxm-80g"):
        result = baseline_of(graph, device=device(name)).predict()
        (warning,) = [text for text in result.warnings if "the host's memory" in text]
        assert f"{LAYERS} operations (" in warning and "most: aten::mm)" in warning
        assert f"so that {name} does not compute them" in warning
        times.append(result.step_time_us)
    assert times[0] == times[1] > 0.9 * LAYERS * product_us("cpu")
    assert not any("the host's memory" in text for text in baseline_of(traced()).predict().warnings)
