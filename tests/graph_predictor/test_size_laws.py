"""Laws of a larger batch from one capture: nothing grows faster than its samples, no parameter's gradient changes.

Programs whose layers are as wide as the batch are traced by shapes at two sizes: what scaling the smaller says is what
the larger has. On real traces, where nobody knows the truth, the laws themselves are checked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from slowly import mostly_slow

from graph_predictor.sizes.layouts import NamedSizes, reshaped
from graph_predictor.sizes.scaled_shapes import ScaledShapes, tensors_in
from kernel_models.op_call import Family
from kernel_models.operation import Operation, calls_of
from tracer.errors import ForetraceError
from tracer.graph import ExecutionGraph, Phase
from tracer.job import read_job

Find = Callable[[str], Path]
SIZED = ("dlrm-8xV100-2023", "rank3-of-8xA100-6steps", "nanogpt-8xH100", "rank0-1-of-128", "resnet50-ddp-2xA100",
         "resnet18-ddp-MI300X", "linear-2080Ti", "vllm-eager-B200")
OWN = ("dlrm-cpu", "llama-cpu", "bert-cpu", "resnet50-cpu")
ACCUMULATE = "torch::autograd::AccumulateGrad"


def likeliest_batch(graph: ExecutionGraph) -> int:
    """The first dimension most tensors have."""
    sizes: Counter[int] = Counter()
    codes, counts = np.unique(graph.ops.shapes[graph.ops.shapes >= 0], return_counts=True)
    for code, count in zip(codes.tolist(), counts.tolist(), strict=True):
        for shape in tensors_in(graph.string(code)):
            sizes[shape[0]] += count * (len(shape) > 1 and shape[0] > 1)
    return sizes.most_common(1)[0][0]


def check_laws(graph: ExecutionGraph, batch: int, times: int) -> None:
    scaled = ScaledShapes(graph, (("batch", batch, times * batch),))
    seen: set[tuple[object, ...]] = set()
    followed = 0
    for row in np.flatnonzero(graph.ops.shapes >= 0).tolist():
        layouts, phase = scaled.layouts(row), int(graph.ops.phase[row])
        key = (int(graph.ops.name[row]), int(graph.ops.shapes[row]), layouts, phase)
        if key in seen:
            continue
        seen.add(key)
        followed += any(dim.follows for layout in layouts for dim in layout)
        before, after = Operation.from_graph(graph, row), scaled.operation_of(row)
        if phase == Phase.OPTIMIZER or before.name.startswith(ACCUMULATE):
            assert [one.shape for one in after.arguments] == [one.shape for one in before.arguments]
        # Each tensor holds the samples once, so that no work is more than as many times as large.
        assert all(scaled.sizes.samples(layout) <= 1 for layout in layouts), before
        old, new = calls_of(before), calls_of(after)
        if [call.kind for call in old] != [call.kind for call in new]:
            continue  # another implementation at the new size
        for was, will in zip(old, new, strict=True):
            # What lies between samples is one less than they are: 511 of 512 become 16,383 of 16,384.
            most = 1.001 + 1.0 / batch
            if "sort" in was.kind or "topk" in was.kind or was.family is Family.ATTENTION:
                continue  # n log n; n² where the tokens of one sequence are the first dimension
            for less, more in ((was.flops, will.flops), (was.bytes_moved, will.bytes_moved)):
                assert less * 0.999 <= more <= less * times * most, (before, after)
    assert followed
    for row in range(len(graph.collectives)):
        assert scaled.payload(row) in (1, pytest.approx(times, rel=1 / batch))


@pytest.mark.real_traces
@pytest.mark.parametrize("name", mostly_slow(SIZED, {"linear-2080Ti"}))
def test_no_call_of_a_real_trace_grows_faster_than_its_samples(name: str, real_trace: Find) -> None:
    graph = read_job(real_trace(name)).graphs[0]
    check_laws(graph, likeliest_batch(graph), 32 if len(graph.ops) < 10_000 else 8)


@pytest.mark.parametrize("name", mostly_slow(OWN, OWN[:2]))
def test_no_call_of_an_own_trace_grows_faster_than_its_samples(name: str) -> None:
    graph = read_job(Path(__file__).parents[2] / "traces" / name).graphs[0]
    check_laws(graph, graph.meta.workload["settings"]["batch"], 32)


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(shape=st.lists(st.integers(1, 6), min_size=1, max_size=4), data=st.data())
def test_reshaping_keeps_the_number_of_elements(shape: list[int], data: st.DataObject) -> None:
    sizes = NamedSizes((3,), (12,), (True,))
    at = data.draw(st.integers(0, len(shape) - 1))
    shape[at] = 3
    layout = tuple(sizes.following(0) if place == at else sizes.constant for place in range(len(shape)))
    elements = int(np.prod(shape))
    first = data.draw(st.sampled_from([size for size in range(1, elements + 1) if elements % size == 0]))
    target = (first, elements // first)
    found = reshaped(sizes, tuple(shape), layout, target)
    assert found is not None
    assert int(np.prod(sizes.shape(target, found))) in (4 * elements, elements)
    assert sizes.samples(found) == 1


KINDS = ("perceptron", "tokens", "images", "bags")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 10_000))
def test_programs_as_wide_as_their_batch_scale_as_they_are_traced(kind: str, seed: int) -> None:
    """Work of every operation, by shapes scaled from a trace of ``batch`` and by a trace of three times as many."""
    pytest.importorskip("torch")
    from size_programs import traced

    try:
        batch, small, large = traced(kind, seed)
    except ForetraceError:
        return  # attention kernels want heads of other sizes
    scaled = ScaledShapes(small, (("batch", batch, 3 * batch),))
    assert len(small.ops) == len(large.ops)
    differ = compared = 0
    for row in range(len(small.ops)):
        before = Operation.from_graph(small, row)
        if not calls_of(before):
            continue
        compared += 1
        got, truth = calls_of(scaled.operation_of(row)), calls_of(Operation.from_graph(large, row))
        work = [[(call.flops, call.bytes_moved) for call in calls] for calls in (got, truth)]
        differ += work[0] != work[1] and not scaled.undecided(row)
        if small.ops.phase[row] == Phase.OPTIMIZER:
            assert got == truth
    assert differ <= 0.05 * compared
