"""Steps that lost device work, planted: the reader finds, counts and names them."""

from __future__ import annotations

from pathlib import Path

import pytest
from kineto_support import call, event, op
from test_step_faults import graph_of, iteration

from tracer.step_work import lost_launches


@pytest.mark.parametrize(("lost", "expected"), [
    ([0, 30, 0], [0, 30, 0]), ([100, 0, 45], [100, 0, 45]), ([0, 1, 0], [0, 0, 0]), ([20, 20, 20], [0, 0, 0]),
    ([20, 50, 20], [0, 30, 0]), ([40], [0])])
@pytest.mark.parametrize("streams", [1, 3])
def test_launches_that_lost_their_work_are_counted_by_step(tmp_path: Path, lost: list[int], expected: list[int],
                                                           streams: int) -> None:
    """Beyond those that every step lacks, and not where they are 1% of the step's hundred."""
    events = [each for number, missing in enumerate(lost)
              for each in iteration(number, 1e5 * number, 1e5, 100, streams=streams, lost=missing)]
    graph = graph_of(tmp_path, events)
    assert lost_launches(graph).tolist() == expected
    assert graph.meta.loss.lossy_steps == sum(map(bool, expected))
    assert graph.meta.loss.launches_without_kernels == sum(lost)
    told = [note for note in graph.meta.loss.notes if "lost the device work" in note]
    assert len(told) == any(expected)
    assert not told or f"of {sum(expected):,} launches" in told[0]


def test_launches_that_are_captured_are_not_lost(tmp_path: Path) -> None:
    """The first step captures a CUDA graph, which the others launch."""
    captured = [event("user_annotation", "ProfilerStep#0", 0, 1000), op("aten::mm", 5, 900),
                call("cudaStreamBeginCapture", 10, 5, 1),
                *(call("cudaLaunchKernel", 20 + 10 * at, 5, 10 + at) for at in range(50)),
                call("cudaStreamEndCapture", 800, 5, 2)]
    graph = graph_of(tmp_path, captured + iteration(1, 1000, 1000, 60) + iteration(2, 2000, 1000, 60))
    assert lost_launches(graph).tolist() == [0, 0, 0] and graph.meta.loss.lossy_steps == 0
