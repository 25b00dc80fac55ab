"""Other sizes by tracing the program again: recorded steps stand for those that never ran."""

from __future__ import annotations

import json
import math
import runpy
from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from micro import Micro
from recordings import slowed
from report_support import own_program
from slowly import mostly_slow
from test_predict_shapes import LAYERS, TOKENS, WIDTH, product_us, traced
from typer.testing import CliRunner

from foretrace.commands import app
from foretrace.edits import HostFrom, ScaleHost, ScaleKernels
from graph_predictor.prediction.operation_costs import operation_costs, operations_named
from graph_predictor.prediction.predictor import Baseline
from graph_predictor.prediction.scenario import EditError
from graph_predictor.sizes.retrace import retrace, why_not
from graph_predictor.synthesis.baseline import baseline_of, retraced
from graph_predictor.synthesis.recorded_operations import match, names_of_both, out_of_place, recorded_operations
from graph_predictor.synthesis.recorded_times import StandInTimes, _narrow, _Tally
from kernel_models.device import device
from kernel_models.operation import calls_of, operation
from tracer.arrays import Bool, Float64, Int64
from tracer.errors import ForetraceError
from tracer.graph import NONE, SHAPE_ONLY, ExecutionGraph, Place
from tracer.job import read_job

ROOT = Path(__file__).resolve().parents[2]
Find = Callable[[str], Path]


def recorded(**options: bool) -> Baseline:
    """A recording of ``traced``: what it would look like on the device, taken for real."""
    made = baseline_of(traced(**options))  # type: ignore[arg-type]
    return baseline_of(made.built.graphs[0], device=device("h200-sxm"))


def at(tokens: int, layers: int = LAYERS, collective: bool = False, elements: int = 10**8) -> ExecutionGraph:
    graph = traced(layers, collective)
    graph.strings[1] = f"[[{tokens},{WIDTH}],[{WIDTH},{WIDTH}]]"
    graph.collectives.elements_in[:] = graph.collectives.elements_out[:] = elements
    return graph


@pytest.mark.parametrize("collective", [False, True])
def test_the_same_size_is_what_was_recorded(collective: bool) -> None:
    base = recorded(collective=collective)
    again = retraced(base, at(TOKENS, collective=collective)).predict()
    # The trace says which operation waits for the collective, which no event of the recording does.
    was = baseline_of(traced(collective=collective)).predict()
    assert again.step_time_us == pytest.approx(was.step_time_us, rel=0.005)
    assert again.kernel_sources == {"measured": 1.0}
    assert again.recorded_us == base.predict().recorded_us
    if collective:  # half of it is anchored; 20 µs are the ring's fixed cost
        half = retraced(base, at(TOKENS, collective=True, elements=5 * 10**7)).predict().families_us["collective"]
        assert half - 20 == pytest.approx(0.5 * (base.predict().families_us["collective"] - 20), rel=1e-3)


def test_the_changed_is_measured_times_the_models_ratio() -> None:
    """Recorded kernels take a third longer than the models say: at twice the tokens they still do."""
    graph = recorded().built.graphs[0]
    graph = replace(graph, kernels=graph.kernels.take(np.arange(LAYERS)))
    slow = round(product_us(tokens=TOKENS) * 1e3 * 4 / 3)
    graph.kernels.duration_ns[:] = slow
    graph.kernels.start_ns[:] = graph.kernels.start_ns[0] + (slow + 1200) * np.arange(LAYERS)
    base = retraced(baseline_of(graph, device=device("h200-sxm")), at(2 * TOKENS), "twice the tokens")
    twice = base.predict()
    assert twice.gpu_active_us == pytest.approx(LAYERS * product_us(tokens=2 * TOKENS) * 4 / 3, rel=1e-3)
    assert twice.kernel_sources == {"anchored": 1.0}
    assert twice.edits == ["twice the tokens"]
    assert twice.interval_us[0] < twice.step_time_us < twice.interval_us[1]
    # Latency and gaps are constants of the machine.
    doubled = base.predict([ScaleKernels(2), ScaleHost(2)])
    assert doubled.step_time_us == pytest.approx(2 * twice.step_time_us, rel=0.01)


def test_a_smaller_step_on_a_cpu_may_be_shorter_than_what_stays_says() -> None:
    """Of 100 ns 20 are computation that was 40: the other 80 may be 40 too, as log half width ln 2; and it is a run of
    its own."""
    times = StandInTimes(capture("llama").scenario, 0.0)
    times._tallies.append(_Tally(host_ns=100.0, computed_ns=[20.0], ratio=[0.5]))
    assert times.change_spread == pytest.approx(math.hypot(0.15 * 0.2 * math.log(2), -math.log(0.6), 0.07))
    times._tallies[0] = _Tally(host_ns=100.0, computed_ns=[20.0], ratio=[2.0], narrow_ns=10.0)
    assert times.change_spread == pytest.approx(math.hypot(0.15 * 0.2 * math.log(2), math.log(1.1), 0.07))


def test_a_rank_below_the_lanes_of_a_processor_may_change_nothing() -> None:
    for was, now, narrow in ((6, 24, True), (64, 16, True), (64, 256, False), (6, 6, False)):
        one, other = (calls_of(operation("aten::mm", [(320, 128), (128, rank)], "fp32")) for rank in (was, now))
        assert _narrow(one, other) is narrow


def test_more_layers_cost_what_their_namesakes_do_and_an_operation_nobody_recorded_is_modelled() -> None:
    base = recorded()
    for layers in (LAYERS + 3, LAYERS - 2):
        other = retraced(base, at(TOKENS, layers))
        assert other.predict().gpu_active_us == pytest.approx(layers * product_us(tokens=TOKENS), rel=1e-3)
        assert any("were left out" in note for note in other.notes) is (layers < LAYERS)
    graph = at(TOKENS)
    graph.strings += ["aten::relu", f"[[{TOKENS},{WIDTH}]]", '["c10::BFloat16"]']
    graph.ops.name[2], graph.ops.shapes[2], graph.ops.dtypes[2] = (len(graph.strings) - n for n in (3, 2, 1))
    result = retraced(base, graph).predict()
    assert 0 < result.kernel_sources["datasheet"] < 0.5
    assert "elementwise" in result.families_us
    assert any("which the recording does not have" in note for note in result.notes)


def test_what_cannot_be_retraced_says_so() -> None:
    base = recorded()
    with pytest.raises(ForetraceError, match="recorded step"):
        retraced(base, base.built.graphs[0])
    with pytest.raises(ForetraceError, match="recorded step"):
        retraced(baseline_of(at(TOKENS)), at(TOKENS))
    graph = replace(base.built.graphs[0], ops=base.built.graphs[0].ops.take(np.arange(LAYERS)))
    graph.ops.shapes[:] = NONE
    with pytest.raises(EditError, match="no sizes"):
        retraced(baseline_of(graph, device=device("h200-sxm")), at(TOKENS))
    with pytest.raises(EditError, match="--code"):
        retrace(base, {"batch": 2})
    assert out_of_place("aten::add_") == "aten::add" and out_of_place("aten::__and__") == "aten::__and__"


# Recorded on a CPU, traced again for it.

@lru_cache(maxsize=3)
def capture(name: str) -> Baseline:
    return baseline_of(read_job(ROOT / "traces" / f"{name}-cpu"))


@cache
def twice() -> Baseline:
    """The Llama at twice its batch."""
    batch = capture("llama").built.graphs[0].meta.workload["settings"]["batch"]
    return retrace(capture("llama"), {"batch": 2 * batch}, {"batch": batch})


@pytest.mark.parametrize("name", mostly_slow(["dlrm", "llama"], {"dlrm"}))
def test_a_cpu_capture_at_its_own_size(name: str) -> None:
    """All host time of the recorded step is found in its operations, and comes back."""
    pytest.importorskip("torch", reason="tracing by shapes needs torch")
    base = capture(name)
    batch = base.built.graphs[0].meta.workload["settings"]["batch"]
    again = retrace(base, {"batch": batch})
    assert again.predict().step_time_us == pytest.approx(base.predict().step_time_us, rel=0.01)
    graph = again.built.graphs[0]
    found = recorded_operations(base.scenario, 0, names_of_both(graph))
    assert match(graph, found).own.mean() > 0.97
    host_ns = base.slices.ns[base.cycle.working[base.slices.item]].sum() / base.cycle.steps
    assert found.host().sum() + found.tail + found.costs.fetch == pytest.approx(host_ns, rel=1e-6)


def test_another_batch_and_another_depth() -> None:
    pytest.importorskip("torch", reason="tracing by shapes needs torch")
    base = capture("llama")
    settings = base.built.graphs[0].meta.workload["settings"]
    once = base.predict()
    larger = twice().predict()
    assert 1.2 < larger.step_time_us / once.step_time_us < 2.2
    assert larger.items_per_second == pytest.approx(2 * settings["batch"] / larger.step_time_us * 1e6)
    assert larger.interval_us[1] / larger.interval_us[0] > once.interval_us[1] / once.interval_us[0]
    deeper = retrace(base, {"depth": 2 * settings["depth"]}).predict()
    assert 1.3 < deeper.step_time_us / once.step_time_us < 2.1
    with pytest.raises(EditError, match="recorded with batch"):
        retrace(base, {"batch": 8}, {"batch": settings["batch"] + 1})
    with pytest.raises(EditError, match="is no size"):
        retrace(base, {"batch": 10**14})
    with pytest.raises(ForetraceError, match="no setting 'width_of_it'"):
        retrace(base, {"width_of_it": 2})


def test_another_host_changes_the_retraced_as_it_does_the_recorded() -> None:
    """What takes longer at another size still does: a host is compared with the recorded step, not the traced one."""
    pytest.importorskip("torch", reason="tracing by shapes needs torch")
    base, again = capture("llama"), twice()
    (graph,) = base.built.graphs
    was, sized = base.predict().step_time_us, again.predict().step_time_us
    assert sized > 1.2 * was
    assert again.predict([HostFrom([graph])]).step_time_us == pytest.approx(sized, rel=1e-6)
    slow = HostFrom([slowed(graph, 3)])
    ratio = base.predict([slow]).step_time_us / was
    assert ratio > 2
    assert again.predict([slow]).step_time_us / sized == pytest.approx(ratio, rel=0.01)
    assert again.predict([slow, ScaleHost(0.5)]).step_time_us == pytest.approx(0.5 * ratio * sized, rel=0.01)


def run(*arguments: object) -> tuple[dict[str, Any], str]:
    """What ``predict --json`` says, or nothing and its refusal."""
    result = CliRunner().invoke(app, ["predict", *map(str, arguments), "--json"])
    assert result.exit_code == (0 if result.stdout else 2), result.stderr
    return json.loads(result.stdout or "{}"), result.stderr


def test_command_line_takes_the_best_way(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="tracing by shapes needs torch")
    path = ROOT / "traces" / "dlrm-cpu"
    batch = capture("dlrm").built.graphs[0].meta.workload["settings"]["batch"]
    values, _ = run(path, "--set", f"batch={2 * batch}")
    assert values["edits"] == [f"batch {batch} → {2 * batch} by tracing the program again"]
    monkeypatch.setattr("graph_predictor.sizes.retrace.find_spec", lambda name: None)
    assert why_not(capture("dlrm")) is not None
    values, _ = run(path, "--set", f"batch={2 * batch}")
    assert values["edits"] == [f"batch {batch} → {2 * batch} by scaling one capture"]
    assert any("PyTorch is not installed" in note for note in values["notes"])
    assert "PyTorch is not installed" in run(path, "--set", "batch=8", "--code", "train.py:build")[1]


def test_the_users_own_code(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="tracing by shapes needs torch")
    import tracer

    script = own_program(tmp_path, cuda=False)
    step = runpy.run_path(script.removesuffix(":build"))["build"](16)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with tracer.capture(tmp_path / "capture", steps=3, timed=3, warmup=1, execution_trace="none") as recording:
        for _ in range(12):
            step()
            recording.step()
    torch.set_num_threads(threads)
    source, code = tmp_path / "capture", ("--code", script)
    values, _ = run(source, "--set", "batch=4096", *code)
    assert values["step_time_us"] > 1.5 * values["unprofiled_us"]
    assert values["edits"] == ["batch ? → 4096 by tracing the program again"]
    assert "takes no argument 'width'" in run(source, "--set", "width=3", *code)[1]
    assert "--set" in run(source, *code)[1]


@pytest.mark.real_traces
def test_a_gpus_step_comes_back_from_its_own_operations(real_trace: Find) -> None:
    """The operations of a DDP rank, with no times, take theirs from the recording: the step is what it was."""
    base = baseline_of(read_job(real_trace("resnet50-ddp-2xA100")))
    graph = base.built.graphs[0]
    names = {name for name in graph.strings if name.startswith(("aten::_foreach", "c10d::allreduce")) or name in {
        "aten::convolution", "aten::cudnn_batch_norm", "aten::convolution_backward", "aten::add_", "aten::threshold",
        "aten::cudnn_batch_norm_backward", "aten::relu_", "aten::threshold_backward", "aten::mean", "aten::addmm",
        "aten::mm", "aten::copy_", "aten::fill_", "aten::zero_", "aten::sum", "aten::div_", "aten::mul_"}}
    again = retraced(base, _without_times(base, names))
    was, now = base.predict(), again.predict()
    assert now.step_time_us == pytest.approx(was.step_time_us, rel=0.01)
    assert now.bound == was.bound == "host"
    assert now.kernel_sources == {"measured": 1.0}


def _without_times(base: Baseline, names: set[str]) -> ExecutionGraph:
    """The operations of a recorded rank as a trace by shapes would show them."""
    graph = base.built.graphs[0]
    owner = operations_named(graph, names)
    rows = operation_costs(base.cycle, base.slices, 0, owner).op
    ops = graph.ops.take(rows)
    ops.place[:], ops.parent[:], ops.thread[:], ops.step[:] = Place.DEVICE, NONE, 0, 0
    ops.start_ns[:], ops.duration_ns[:] = np.arange(len(ops)), 0
    place = {int(op): row for row, op in enumerate(rows.tolist())}
    known = [row for row, op in enumerate(graph.collectives.op.tolist()) if op >= 0 and int(owner[op]) in place]
    collectives = graph.collectives.take(np.array(known, np.int64))
    collectives.op[:] = [place[int(owner[graph.collectives.op[row]])] for row in known]
    collectives.kernel[:], collectives.wait_op[:] = NONE, NONE
    alone = traced()
    alone.steps.duration_ns[:] = len(ops)
    return replace(alone, strings=graph.strings, ops=ops, collectives=collectives,
                   meta=replace(graph.meta, era=SHAPE_ONLY, unprofiled_step_ns=[]))


def in_turn(folder: Path, names: list[str]) -> tuple[ExecutionGraph, Int64]:
    """A step of operations one after another, and their rows."""
    trace = Micro().step(0, 1000)
    for number, name in enumerate(names):
        trace.op(name, 10 + 20 * number, 20 + 20 * number)
    graph = trace.read(folder)
    rows = np.array([row for row, code in enumerate(graph.ops.name.tolist()) if graph.string(code) in set(names)])
    assert len(rows) == len(names)
    return graph, rows


def matched(folder: Path, was: list[str], now: list[str], took: Float64) -> tuple[Int64, Bool]:
    """Which recorded operation stands for each of a traced step, and whether it is its own."""
    graph, rows = in_turn(folder, was)
    traced, of = in_turn(folder, now)
    found = match(traced, SimpleNamespace(graph=graph, op=rows, host=lambda: took,  # type: ignore[arg-type]
                                          device=lambda: np.zeros(len(was))))
    return found.row[of], found.own[of]


def test_equal_layers_are_not_taken_for_each_other(tmp_path: Path) -> None:
    """A traced step that begins with a broadcast and drops nothing meets every recorded operation in its place."""
    layer = ["aten::mm", "aten::add", "aten::pow", "aten::mul", "aten::mm", "aten::silu"]
    plain = ["aten::view", *layer * 3, "aten::sum"]
    spread = ["aten::cat", "c10d::broadcast_", "aten::slice", *plain[:9], "aten::copy_", *plain[9:]]
    met, own = matched(tmp_path, plain, spread, np.ones(len(plain)))
    added = [0, 1, 2, 12]
    assert np.delete(met, added).tolist() == list(range(len(plain)))
    assert np.flatnonzero(~own).tolist() == added


def test_the_first_of_many_does_not_stand_for_those_that_were_never_recorded(tmp_path: Path) -> None:
    """A recurrent layer's third to sixth steps: of four recorded ones the first took ten times as long."""
    took = np.array([100.0, 50.0, 10.0, 5.0, 12.0, 6.0, 11.0, 5.5])
    cell = ["aten::mm", "aten::sigmoid"]
    met, own = matched(tmp_path, cell * 4, cell * 9, took)
    alone = met[~own & (met >= 0)]
    assert len(alone) == 10 and not set(alone.tolist()) & {0, 1}
