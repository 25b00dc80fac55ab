"""Edits that replace work, repeat it, hide it or launch it otherwise: hand-made traces whose answer is known on paper,
the project's own CPU captures, and properties over small random steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from micro import Micro, read_ranks

import foretrace.edits as ed
from graph_predictor.edits.fusion import fused_call
from graph_predictor.edits.recompute import repeated_run
from graph_predictor.prediction.predictor import Baseline
from graph_predictor.prediction.rewriting import rewrite
from graph_predictor.prediction.scenario import EditError
from graph_predictor.request.predict import predict
from graph_predictor.synthesis.baseline import baseline_of
from kernel_models.device import device
from kernel_models.families.attention import attention
from kernel_models.op_call import Family, OpCall
from kernel_models.operation import calls_of, operation
from kernel_models.pricing import price
from tracer.graph import Phase
from tracer.job import read_job

TRACES = Path(__file__).resolve().parents[2] / "traces"
A100 = "a100-sxm-80g"
ROWS, WIDTH = 8192, 1024
LARGE = [ROWS, WIDTH]
BATCH, QUERIES, HEAD = 64, 512, 64
SCORES = [BATCH, QUERIES, QUERIES]


@dataclass(frozen=True)
class Op:
    """An operation of a hand-made step: 8 µs on the host of which 4 are its launch, one kernel."""

    name: str
    shapes: Sequence[Sequence[int]]
    kernel: float = 50
    stream: int = 7
    dtype: str = "float"
    thread: int = 1
    sequence: int = -1
    wait: bool = False

    def arguments(self, step: int) -> dict[str, Any]:
        more: dict[str, Any] = {"Sequence number": self.sequence + 100 * step} if self.sequence >= 0 else {}
        if self.thread == 2:
            more["Fwd thread id"] = 1
        return {"Input Dims": [list(shape) for shape in self.shapes], "Input type": [self.dtype] * len(self.shapes),
                **more}


def trace_of(ops: Sequence[Op], *, steps: int = 3, rank: int | None = None, world_size: int = 1,
             loading: float = 0) -> Micro:
    """Equal steps: loading, the operations 10 µs after one another, and a wait for all of them at the end."""
    trace = Micro(rank=rank, world_size=world_size)
    trace.metadata["deviceProperties"] = [{"id": 0, "name": "NVIDIA A100-SXM4-80GB", "totalGlobalMem": 85 * 10**9,
                                           "numSms": 108}]
    trace.calibrate()
    at = 1000.0
    for n in range(steps):
        begin, last = at, 0.0
        free: dict[int, float] = {}
        if loading:
            trace.op("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", at, at + loading)
            at += loading
        at += 2
        for op in ops:
            name = f"autograd::engine::evaluate_function: {op.name}" if op.thread == 2 else op.name
            trace.op(name, at, at + 8, op.thread, **op.arguments(n))
            if op.thread == 2:
                inner = {key: value for key, value in op.arguments(n).items() if key.startswith("Input")}
                trace.op(op.name, at + 1, at + 8, op.thread, **inner)
            start = max(at + 2 + 4 + 5, free.get(op.stream, 0) + 1)
            free[op.stream] = start + op.kernel
            trace.launch(at + 2, 4, (op.stream, start, op.kernel), thread=op.thread, name=_kernel(op.name))
            last = max(last, free[op.stream])
            at += 10
            if op.wait:
                trace.call("cudaDeviceSynchronize", at, max(last - at, 1))
                at = max(last, at + 1) + 5
        trace.call("cudaDeviceSynchronize", at, max(last - at, 1))
        at = max(last, at + 1) + 10
        trace.step(begin, at, n + 1)
    return trace


def _kernel(name: str) -> str:
    return "ncclKernel_AllReduce" if "allreduce" in name else f"{name}_kernel"


CHAIN = [Op("aten::mm", [LARGE, [WIDTH, WIDTH]], 100), Op("aten::add", [LARGE, LARGE]), Op("aten::mul", [LARGE, LARGE]),
         Op("aten::relu", [LARGE]), Op("aten::mm", [LARGE, [WIDTH, WIDTH]], 100)]
MATH = [Op("aten::bmm", [[BATCH, QUERIES, HEAD], [BATCH, HEAD, QUERIES]], 80, sequence=1),
        Op("aten::mul", [SCORES, []], 70, sequence=2), Op("aten::_softmax", [SCORES], 90, sequence=3),
        Op("aten::bmm", [SCORES, [BATCH, QUERIES, HEAD]], 80, sequence=4)]
BACKWARD = [Op("aten::bmm", [SCORES, [BATCH, QUERIES, HEAD]], 160, thread=2, sequence=4),
            Op("aten::_softmax_backward_data", [SCORES, SCORES], 120, thread=2, sequence=3),
            Op("aten::mul", [SCORES, []], 70, thread=2, sequence=2),
            Op("aten::bmm", [[BATCH, QUERIES, HEAD], [BATCH, HEAD, QUERIES]], 160, thread=2, sequence=1)]
DROPPING = [*MATH[:3], Op("aten::bernoulli_", [SCORES]), MATH[3]]
WIDER = [*MATH[:3], Op("aten::bmm", [SCORES, [BATCH, QUERIES, 2 * HEAD]])]


def calls(ops: Sequence[Op]) -> list[OpCall]:
    return [call for op in ops for call in calls_of(operation(op.name, [tuple(shape) for shape in op.shapes]))]


def time_of(calls: Sequence[OpCall], spec: str = A100) -> float:
    return float(price(list(calls), device(spec)).times_us.sum())


# Chains of elementwise kernels


def test_a_chain_becomes_one_kernel_of_its_outer_tensors(tmp_path: Path) -> None:
    baseline = baseline_of(trace_of(CHAIN).read(tmp_path))
    chain = calls(CHAIN[1:4])
    size = ROWS * WIDTH
    fused = fused_call(chain)
    # add reads two tensors, mul one more, relu writes one.
    assert (fused.bytes_read, fused.bytes_written, fused.dims) == (3 * size * 4, size * 4, (size, 3, 3 * size))
    assert fused.flops == sum(call.flops for call in chain)
    ratio = time_of([fused]) / time_of(chain)
    before, after = baseline.predict(), baseline.predict([ed.FuseElementwise()])
    assert before.gpu_active_us == 350
    assert after.gpu_active_us == pytest.approx(200 + 150 * ratio, abs=0.01)
    assert after.edits == ["elementwise chains fused"]
    assert any("3 elementwise operations a step become 1" in note for note in after.notes)
    # Two kernels and the gaps of a microsecond before them are gone.
    assert before.step_time_us - after.step_time_us == pytest.approx(150 * (1 - ratio) + 2, abs=0.01)


def test_launches_of_a_fused_chain_vanish(tmp_path: Path) -> None:
    """With short kernels the host decides: two operations of 8 µs are gone, the Python between them stays."""
    ops = [replace(op, kernel=1) for op in CHAIN]
    baseline = baseline_of(trace_of(ops).read(tmp_path))
    before, after = baseline.predict(), baseline.predict([ed.FuseElementwise()])
    assert before.step_time_us - after.step_time_us == pytest.approx(16, abs=1.5)


@pytest.mark.parametrize("ops", [
    [CHAIN[1], CHAIN[0], CHAIN[2]], [CHAIN[1], Op("aten::mul", [[16, 16], [16, 16]])],
    [CHAIN[1], replace(CHAIN[2], stream=9)], [replace(CHAIN[1], wait=True), CHAIN[2]],
    [CHAIN[1], Op("aten::fill_", [[ROWS, WIDTH], []])]], ids=[
    "a product between", "other sizes", "another stream", "the host waits for the first", "nothing is read"])
def test_what_is_no_chain(tmp_path: Path, ops: list[Op]) -> None:
    with pytest.raises(EditError, match="No two elementwise operations"):
        predict(trace_of(ops).read(tmp_path), [ed.FuseElementwise()])


# Attention


def test_attention_written_out_becomes_flash_attention_forward_and_backward(tmp_path: Path) -> None:
    half = [replace(op, dtype="c10::Half") for op in (*MATH, *BACKWARD)]
    baseline = baseline_of(trace_of([Op("aten::mm", [LARGE, [WIDTH, WIDTH]], 100, dtype="c10::Half"), *half]).read(
        tmp_path))
    before, after = baseline.predict(), baseline.predict([ed.FlashAttention()])
    assert before.gpu_active_us == 100 + 320 + 510
    assert 100 < after.gpu_active_us < 100 + 320 + 510
    assert any("1 attentions a step, 1 of them with their backward, become flash attention" in n for n in after.notes)
    assert set(before.families_us) >= {"softmax"}
    # Everything but the first product is attention now, forward and backward.
    assert set(after.families_us) == {"gemm", "attention"}
    assert after.families_us["gemm"] == 100
    only = baseline_of(trace_of(half[:4]).read(tmp_path)).predict([ed.FlashAttention()])
    assert only.gpu_active_us < after.families_us["attention"]


def test_attention_in_fp32_takes_the_memory_efficient_kernels(tmp_path: Path) -> None:
    after = predict(trace_of(MATH).read(tmp_path), [ed.FlashAttention()])
    (call,) = attention("efficient_forward", 1, BATCH, BATCH, QUERIES, QUERIES, HEAD, HEAD, "fp32")
    assert after.gpu_active_us == pytest.approx(320 * time_of([call]) / time_of(calls(MATH)), rel=2e-3)
    assert any("become efficient attention" in note for note in after.notes)
    assert set(predict(trace_of(DROPPING).read(tmp_path), [ed.FlashAttention()]).families_us) == {"attention"}


def on_a_cpu(folder: Path, attentions: Sequence[Sequence[Op]]) -> Baseline:
    """Three steps of attentions written out inside the operator that PyTorch has for it."""
    trace = Micro()
    heads = [[1, BATCH, QUERIES, HEAD]] * 3
    for n in range(3):
        at = 1000.0 + 1000 * n
        trace.step(at, at + 1000, n + 1)
        for ops in attentions:
            trace.op("aten::_scaled_dot_product_attention_math", at + 5, at + 15 + 75 * len(ops),
                     **Op("", heads).arguments(n))
            for number, op in enumerate(ops):
                trace.op(op.name, at + 10 + 75 * number, at + 85 + 75 * number, **op.arguments(n))
            at += 20 + 75 * len(ops)
    return baseline_of(trace.read(folder), device=device("cpu"))


def test_a_cpus_attention_is_priced_by_what_computes_it(tmp_path: Path) -> None:
    """The operator around the products and the softmax is not priced as one more attention beside them."""
    done = rewrite(ed.FlashAttention().apply(on_a_cpu(tmp_path, [MATH]).scenario))
    assert done is not None
    (call,) = attention("flash_forward", 1, BATCH, BATCH, QUERIES, QUERIES, HEAD, HEAD, "fp32")
    expected = price([call], device("cpu")).total_us / price(calls(MATH), device("cpu")).total_us
    assert done.ratio == pytest.approx([expected] * len(done.replacements))


@pytest.mark.parametrize(("ops", "why"), [(DROPPING, "with dropout"), (WIDER, "values of another size than keys")])
def test_attention_that_no_kernel_of_a_cpu_takes_stays_written_out(tmp_path: Path, ops: list[Op], why: str) -> None:
    with pytest.raises(EditError, match=f"On a CPU PyTorch has no fused attention .*{why}"):
        on_a_cpu(tmp_path, [ops]).predict([ed.FlashAttention()])
    mixed = on_a_cpu(tmp_path, [MATH, ops])
    done = rewrite(ed.FlashAttention().apply(mixed.scenario))
    assert done is not None
    assert [len(one.units) for one in done.replacements] == [len(MATH)] * mixed.scenario.cycle.steps
    said = mixed.predict([ed.FlashAttention()]).notes
    assert any("1 attentions a step" in note and "1 stay written out" in note and why in note for note in said)


# Number formats


def test_autocast_is_switched_on_and_off(tmp_path: Path) -> None:
    """fp32 → bf16 and bf16 → fp32 are each other's inverse; between fp32 and TF32 products alone change."""
    wide, half = (baseline_of(trace_of([replace(op, dtype=dtype) for op in CHAIN]).read(tmp_path))
                  for dtype in ("float", "c10::BFloat16"))
    there, back = wide.predict([ed.Precision("bf16")]), half.predict([ed.Precision("fp32")])
    assert there.gpu_active_us < 0.7 * 350
    for family in ("gemm", "elementwise"):
        before = wide.predict().families_us[family]
        # Of each kernel alone exactly; a family's kernels have ratios of their own, whose two means are not the same.
        assert there.families_us[family] / before == pytest.approx(before / back.families_us[family], rel=0.02)
    faster = wide.predict([ed.Precision("tf32")])
    assert faster.families_us["elementwise"] == 150
    assert faster.families_us["gemm"] < 200
    assert half.predict([ed.Precision("fp16")]).families_us["elementwise"] == pytest.approx(150, rel=0.05)


# What is recomputed


LAYER = [Op("aten::mm", [LARGE, [WIDTH, WIDTH]], 100), Op("aten::relu", [LARGE]), Op("aten::add", [LARGE, LARGE])]


def test_a_rank_without_forward_operations_has_no_share_of_what_is_recomputed(tmp_path: Path) -> None:
    graphs = [trace_of([*LAYER, *LAYER]).read(tmp_path) for _ in range(2)]
    graphs[1].ops.writable("phase")[:] = Phase.OTHER
    for rank, graph in enumerate(graphs):
        graph.meta.rank, graph.meta.world_size = rank, 2
    assert any("100% of forward's operations" in note for note in predict(graphs, [ed.Recompute(True)]).notes)


def test_longest_repeated_run() -> None:
    assert repeated_run(np.array([9, 1, 2, 3, 1, 2, 3, 1, 2, 3, 8])) == (1, 9, 3)
    assert repeated_run(np.array([1, 2, 3])) == repeated_run(np.array([], np.int64)) == (0, 0, 0)


def test_recomputation_runs_the_blocks_forward_twice(tmp_path: Path) -> None:
    head = Op("aten::mm", [LARGE, [WIDTH, 8]], 30)
    baseline = baseline_of(trace_of([head, *LAYER, *LAYER]).read(tmp_path))
    assert baseline.predict().gpu_active_us == 430
    after = baseline.predict([ed.Recompute(True)])
    assert after.gpu_active_us == 830
    assert any("2 blocks, 86% of forward's operations" in note for note in after.notes)


def test_forward_operations_within_backward_are_left_out(tmp_path: Path) -> None:
    """A product with a number of its own runs inside the backward function, 100 µs; Python between is its own time."""
    trace = trace_of([CHAIN[0], replace(BACKWARD[2], sequence=1)])
    for event in [e for e in trace.events if e["name"] == "aten::mul"]:
        args = {"Input Dims": [LARGE, [WIDTH, WIDTH]], "Input type": ["float", "float"], "Sequence number": 7777,
                "Fwd thread id": 0}
        trace.op("aten::mm", event["ts"] + 0.2, event["ts"] + event["dur"] - 0.1, 2, **args)
    baseline = baseline_of(trace.read(tmp_path))
    with pytest.raises(EditError, match="already"):
        baseline.predict([ed.Recompute(True)])
    assert baseline.predict().gpu_active_us == 170
    assert baseline.predict([ed.Recompute(False)]).gpu_active_us == 100


# Loading, launches, waits, collectives


FUSED = Op("aten::_scaled_dot_product_flash_attention", [[2, 8, 256, 64]] * 3, 90, dtype="c10::Half")


@pytest.mark.parametrize(("ops", "loading", "edits", "why"), [
    (CHAIN, 0, [ed.FlashAttention()], "no attention that is written out"),
    (MATH[2:3], 0, [ed.FlashAttention()], "no attention that is written out"),
    ([FUSED], 0, [ed.FlashAttention()], "fused already"),
    ([FUSED], 0, [ed.Precision("fp16")], "No operation of the step changes"),
    (CHAIN, 0, [ed.Recompute(False)], "recomputes nothing"),
    (LAYER * 2, 0, [ed.Recompute(True), ed.Recompute(False)], "both change recomputation"),
    (CHAIN, 0, [ed.Recompute(True)], "No block of the forward repeats"),
    (CHAIN, 200, [ed.OverlapLoading(), ed.NoDataLoading()], "both change loading"),
    (CHAIN, 0, [ed.OverlapLoading()], "loads nothing"), (CHAIN, 0, [ed.NoDataLoading()], "loads nothing"),
    (CHAIN, 0, [ed.HideCollectives()], "no collectives"),
    (LAYER, 0, [ed.Device("i9-10940x")], "i9-10940x is a CPU, which runs other operations: trace the step")])
def test_what_an_edit_does_not_find_is_refused(tmp_path: Path, ops: list[Op], loading: float, edits: list[ed.Edit],
                                               why: str) -> None:
    with pytest.raises(EditError, match=why):
        predict(trace_of(ops, loading=loading).read(tmp_path), edits)


def test_loading_runs_beside_the_step_and_bounds_it(tmp_path: Path) -> None:
    short = baseline_of(trace_of(CHAIN, loading=200).read(tmp_path))
    step = short.predict().step_time_us
    overlapped, none = short.predict([ed.OverlapLoading()]), short.predict([ed.NoDataLoading()])
    # The 2 µs of Python after loading stay.
    assert none.step_time_us == pytest.approx(step - 200, abs=1)
    assert overlapped.step_time_us == none.step_time_us
    long = baseline_of(trace_of(CHAIN, loading=900).read(tmp_path))
    overlapped, none = long.predict([ed.OverlapLoading()]), long.predict([ed.NoDataLoading()])
    assert overlapped.step_time_us == pytest.approx(900, abs=1)
    assert overlapped.bound == "data loading"
    assert none.step_time_us < 450
    assert long.predict([ed.OverlapLoading(), ed.ScaleHost(0.8)]).step_time_us == pytest.approx(900 * 0.8, abs=1)


def test_free_launches_leave_the_rest_of_the_host(tmp_path: Path) -> None:
    ops = [replace(op, kernel=1) for op in CHAIN]
    baseline = baseline_of(trace_of(ops).read(tmp_path))
    gain = baseline.predict().step_time_us - baseline.predict([ed.FreeLaunches()]).step_time_us
    # Five calls of 4, and that the host need not wait for the last kernel to start.
    assert gain == pytest.approx(5 * 4 + 2, abs=1)
    assert baseline.predict([ed.CudaGraphs()]).step_time_us < baseline.predict([ed.FreeLaunches()]).step_time_us


def test_without_waits_the_device_alone_decides(tmp_path: Path) -> None:
    baseline = baseline_of(trace_of(CHAIN).read(tmp_path))
    after = baseline.predict([ed.NoWaits()])
    assert after.bound == "compute"
    assert after.step_time_us == pytest.approx(350 + 5, abs=1)  # five gaps
    assert after.step_time_us < baseline.predict().step_time_us


def test_collectives_are_hidden_but_no_step_is_shorter_than_they_are(tmp_path: Path) -> None:
    for length, expected in ((300.0, None), (5000.0, pytest.approx(5000.0, abs=1))):
        ops = [CHAIN[0], Op("c10d::allreduce_", [LARGE], length, stream=20, wait=True), CHAIN[4]]
        traces = [trace_of(ops, rank=rank, world_size=2) for rank in range(2)]
        baseline = baseline_of(read_ranks(traces, tmp_path))
        after = baseline.predict([ed.HideCollectives()]).step_time_us
        assert length <= after < baseline.predict().step_time_us
        assert expected is None or after == expected


def test_compiling_fuses_and_quarters_the_hosts_time(tmp_path: Path) -> None:
    ops = [replace(op, kernel=1) for op in CHAIN]
    baseline = baseline_of(trace_of(ops).read(tmp_path))
    before, after = baseline.predict(), baseline.predict([ed.Compile()])
    assert after.step_time_us < 0.7 * before.step_time_us
    assert any("approximate" in text for text in (*after.edits, *after.notes))
    width = [np.log(one.interval_us[1] / one.interval_us[0]) for one in (before, after)]
    assert width[1] > 1.3 * width[0]
    for edit in (ed.FreeLaunches(), ed.CudaGraphs()):
        with pytest.raises(EditError, match="no GPU work"):
            predict(read_job(str(TRACES / "bert-cpu")), [edit])


# The optimizer


STEP = [("aten::mul_", 1), ("aten::lerp_", 2), ("aten::mul_", 1), ("aten::addcmul_", 3), ("aten::addcdiv_", 3)]
"""AdamW written out, on one parameter: decay, two moments (the second in two operations), and the update."""


@pytest.mark.parametrize(("name", "kind", "states", "flops"), [
    ("AdamW", "adam", 2, 12.0), ("SGD", "sgd", 1, 4.0), ("Adagrad", "adagrad", 1, 8.0), ("RMSprop", "rmsprop", 1, 8.0)])
def test_a_fused_optimizer_moves_every_value_once(tmp_path: Path, name: str, kind: str, states: int,
                                                  flops: float) -> None:
    trace = trace_of([CHAIN[0], *[Op(name, [LARGE] * inputs) for name, inputs in STEP]])
    for event in [e for e in trace.events if e["name"].startswith("ProfilerStep#") and e["ts"] >= 1000]:
        # From after the product to the end of the last operation.
        trace._event("note", f"Optimizer.step#{name}.step", event["ts"] + 11.5, 51, 1, 1)
    baseline = baseline_of(trace.read(tmp_path))
    after = baseline.predict([ed.FusedOptimizer()])
    size = ROWS * WIDTH
    fused = OpCall(Family.OPTIMIZER, kind, (1, size), "fp32", flops=flops * size, bytes_read=4.0 * (2 + states) * size,
                   bytes_written=4.0 * (1 + states) * size)
    old = calls([Op(name, [LARGE] * inputs) for name, inputs in STEP])
    assert after.gpu_active_us == pytest.approx(100 + 250 * time_of([fused]) / time_of(old), abs=0.01)
    assert after.gpu_active_us < 300
    assert after.step_time_us < baseline.predict().step_time_us


def on_cpu(inside: bool) -> Micro:
    """A fill of as many values as the operation after it works on: beside it, or as a part of one before it."""
    trace = Micro()
    size = {"Input Dims": [[64, 64], []], "Input type": ["float", "Scalar"]}
    for n in range(3):
        at = 1000.0 + 1000 * n
        trace.step(at, at + 900, n + 1)
        trace.op("aten::max_pool2d_with_indices_backward", at + 100, at + (400 if inside else 200))
        trace.op("aten::fill_", at + 250, at + 300, **size)
        trace.op("aten::threshold_backward", at + 500, at + 600, **{
            "Input Dims": [[64, 64], [64, 64], []], "Input type": ["float", "float", "Scalar"]})
    return trace


def test_what_a_cpus_operation_does_inside_is_no_neighbour_of_the_next_one(tmp_path: Path) -> None:
    beside = baseline_of(on_cpu(inside=False).read(tmp_path))
    assert beside.predict([ed.FuseElementwise()]).step_time_us < beside.predict().step_time_us
    with pytest.raises(EditError, match="nothing to fuse"):
        baseline_of(on_cpu(inside=True).read(tmp_path)).predict([ed.FuseElementwise()])


def test_a_faster_device_that_changes_nothing_is_said(tmp_path: Path) -> None:
    baseline = baseline_of(trace_of([Op("aten::relu", [LARGE])]).read(tmp_path))
    assert not any("no kernel's time" in note for note in baseline.predict([ed.ScaleBandwidth(3)]).notes)
    assert "GPU clock × 3 changes no kernel's time by 0.1%." in baseline.predict([ed.ScaleClock(3)]).notes
    said = baseline_of(read_job(str(TRACES / "cpu-small"))).predict([ed.ScaleClock(3), ed.ScaleBandwidth(2)]).notes
    assert "No time of the step is a GPU's: nothing changes with GPU clock × 3 and memory bandwidth × 2." in said


def test_edits_of_a_cpus_step_replace_its_operations() -> None:
    baseline = baseline_of(read_job(str(TRACES / "bert-cpu")))
    step = baseline.predict()
    for edit in (ed.FusedOptimizer(), ed.FuseElementwise(), ed.Compile()):
        after = baseline.predict([edit])
        assert 0.5 * step.step_time_us < after.step_time_us < step.step_time_us
        low, high = after.interval_us
        assert low < after.step_time_us < high
    with pytest.raises(EditError, match="no fused attention with dropout"):
        baseline.predict([ed.FlashAttention()])
    with pytest.raises(EditError, match="fused already"):
        predict(read_job(str(TRACES / "llama-cpu")), [ed.FlashAttention()])


# Memory


def test_recomputation_makes_a_step_fit(tmp_path: Path) -> None:
    """40 GB of activations in two blocks: with recomputation one block's, and the blocks' inputs, are kept."""
    graph = trace_of([*LAYER, *LAYER]).read(tmp_path)
    graph.meta.memory.update(peak=60 * 10**9, activations=40 * 10**9)
    baseline = baseline_of(graph)
    with pytest.raises(EditError, match=r"does not fit.*recomputation"):
        baseline.predict([ed.Device("a100-sxm-40g")])
    fits = baseline.predict([ed.Device("a100-sxm-40g"), ed.Recompute(True)])
    assert fits.peak_memory_bytes == 40 * 10**9
    assert baseline.predict([ed.Recompute(True), ed.Device("a100-sxm-40g")]).step_time_us == fits.step_time_us
    # The optimizer's step needs parameters, as many gradients, and its states, with recomputation or without.
    graph.meta.memory.update(parameters=15 * 10**9, optimizer_state=30 * 10**9)
    assert baseline_of(graph).predict([ed.Recompute(True)]).peak_memory_bytes == 60 * 10**9
    graph.meta.memory["peak"] = 100 * 10**9
    assert any("does not fit" in text for text in baseline_of(graph).predict().warnings)
    with pytest.raises(EditError, match="does not fit"):
        baseline_of(graph).predict([ed.ScaleHost(0.5)])


# Properties

PALETTE = [
    *CHAIN, *MATH, Op("aten::copy_", [LARGE, LARGE]), Op("aten::native_layer_norm", [LARGE, [WIDTH], [WIDTH]]),
    Op("aten::gelu", [LARGE], 20), Op("aten::mul", [LARGE, LARGE], 3, wait=True), Op("aten::sum", [LARGE], 10),
    Op("aten::add", [LARGE, LARGE], 15, stream=9)]
EDITS: list[ed.Edit] = [
    ed.FuseElementwise(), ed.FlashAttention(), ed.Compile(), ed.Recompute(True), ed.OverlapLoading(), ed.FreeLaunches(),
    ed.NoWaits(), ed.CudaGraphs(), ed.Device("h100-sxm"), ed.ScaleClock(0.8), ed.ScaleBandwidth(1.5), ed.ScaleHost(0.7),
    ed.ScaleKernels(1.2), ed.Precision("bf16"), ed.Precision("tf32"), ed.Sizes((("batch", ROWS, ROWS // 2),)),
    ed.NoDataLoading(), ed.FusedOptimizer()]
FASTER: tuple[type, ...] = (ed.FreeLaunches, ed.NoWaits, ed.CudaGraphs, ed.NoDataLoading, ed.OverlapLoading)

few = settings(max_examples=24, deadline=None, derandomize=True,
               suppress_health_check=[HealthCheck.function_scoped_fixture])
steps = st.tuples(st.lists(st.sampled_from(PALETTE), min_size=1, max_size=9), st.sampled_from([0.0, 150.0]),
                  st.booleans())


@few
@given(steps, st.lists(st.sampled_from(EDITS), min_size=1, max_size=3)
       | st.lists(st.sampled_from([edit for edit in EDITS if isinstance(edit, FASTER)]), min_size=1, max_size=1))
def test_edits_commute_make_no_negative_times_and_never_slow_what_they_take_away(
        tmp_path: Path, drawn: tuple[list[Op], float, bool], edits: list[ed.Edit]) -> None:
    """Free launches move a kernel's earliest start, never later; a graph's launch is the exception told."""
    ops, loading, twice = drawn
    baseline = baseline_of(trace_of(ops * 2 if twice else ops, loading=loading).read(tmp_path))
    program = baseline.built.program.copy()
    try:
        result = baseline.predict(edits)
    except EditError:
        with pytest.raises(EditError):
            baseline.predict(edits[::-1])
        return
    other = baseline.predict(edits[::-1])
    assert (result.step_time_us, *result.interval_us, result.gpu_active_us) == pytest.approx(
        (other.step_time_us, *other.interval_us, other.gpu_active_us), rel=1e-9)
    low, high = result.interval_us
    assert 0 <= low <= result.step_time_us <= high
    assert 0 <= result.gpu_active_us <= result.step_time_us + 1e-6
    assert min(*result.bounds_us.values(), *result.families_us.values()) >= 0
    assert sum(result.bounds_us.values()) == pytest.approx(result.step_time_us, rel=1e-6)
    for name in ("kernel_duration", "item_work"):
        assert np.array_equal(getattr(program, name), getattr(baseline.built.program, name))
    if all(isinstance(edit, FASTER) for edit in edits):
        allowance = 10.0 if any(isinstance(edit, ed.CudaGraphs) for edit in edits) else 1e-6
        assert result.step_time_us <= baseline.predict().step_time_us + allowance
