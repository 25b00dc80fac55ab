"""Shardings of a recorded step: what is measured, what is anchored on it, and the recorded sharding's own step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from kernel_models.collectives import CollectiveModel, topology_of
from kernel_models.device import device
from kernel_models.op_call import Source
from planner.sharding.estimate import AnchoredProblem, anchored_problem, measured_dense
from planner.sharding.problem import NO_ANCHORS, DenseWork, ShardingProblem, WorkAnchor
from planner.sharding.sources import RecordedStep, StepPart, device_of, parts_of, recorded_step, sharding_source
from tracer.job import Job
from tracer.lookup_data.plan_file import ShardingError, ShardKind

pytestmark = pytest.mark.usefixtures("read_once")
ROOT = Path(__file__).resolve().parents[2]
CAPTURE = ROOT / "traces" / "dlrm-cpu"
V100 = ROOT.parent / "shared" / "data" / "traces" / "dlrm-8xV100-2023"


ANCHOR = WorkAnchor(30.0, 20.0, 15.0, 40.0, noise=0.01)


def test_the_recorded_work_takes_what_was_measured_and_other_work_is_scaled_and_less_sure() -> None:
    us, low, high = ANCHOR.times(*(np.array([x, 1.1 * x, 2.2 * x]) for x in (20.0, 15.0, 40.0)))
    assert us == pytest.approx([30.0, 33.0, 66.0])
    assert (low[0], high[0]) == pytest.approx((30 * np.exp(-0.01), 30 * np.exp(0.01)))
    assert (high / us)[2] > (high / us)[1] > np.exp(0.01) and (us / low)[2] > (us / low)[1]
    # On another device models err whatever the size.
    there = replace(ANCHOR, elsewhere=True).times(*(np.array([x]) for x in (20.0, 15.0, 40.0)))
    assert there[2][0] > 1.5 * high[0]


def test_a_dense_part_is_measured_and_follows_the_models_to_another_batch() -> None:
    parts = np.zeros((len(StepPart), 2))
    parts[StepPart.DENSE_FORWARD], parts[StepPart.DENSE_BACKWARD], parts[StepPart.OPTIMIZER] = [9, 11], [20, 20], [4, 6]
    step = RecordedStep(None, 100.0, parts, 5.0, 7.0)
    was = DenseWork(1.0, 2.0, 3.0, 4.0, 5.0, low=10.0, high=30.0)
    same = measured_dense(was, was, step, elsewhere=False, noise=0.01)
    assert (same.us, same.host, same.sources) == (pytest.approx(35.0), 7.0, {Source.MEASURED: pytest.approx(35.0)})
    assert (same.bottom_forward, same.top_forward) == (pytest.approx(2.5), pytest.approx(7.5))
    assert same.high / same.us == pytest.approx(np.exp(0.01))
    twice = DenseWork(2.0, 4.0, 6.0, 8.0, 10.0, low=20.0, high=60.0)
    larger = measured_dense(twice, was, step, elsewhere=False, noise=0.01)
    assert larger.us == pytest.approx(70.0) and set(larger.sources) == {Source.ANCHORED}
    assert larger.high / larger.us > 1.5


@cache
def anchored(path: Path, ranks: int, name: str, samples: int | None = None) -> AnchoredProblem:
    spec = device(name)
    found = sharding_source(str(path), spec, samples=samples)
    assert found.recorded is not None
    problem = ShardingProblem(found.tables, found.samples, ranks, spec, CollectiveModel(topology_of(spec, ranks)),
                              dense=found.dense)
    return anchored_problem(problem, found.recorded, same_cluster=True)


def test_parts_of_a_recorded_step_add_up_to_it(read_once: Callable[..., Job]) -> None:
    job = read_once([str(CAPTURE)])
    found = recorded_step(job)
    assert found.device is not None and found.device.name == "cpu"
    assert found.parts.sum() == pytest.approx(found.step, rel=0.05)
    graph, part = job.graphs[0], parts_of(job.graphs[0])
    named = {kind: {graph.string(int(code)) for code in graph.ops.name[part == kind]} for kind in StepPart}
    assert "aten::_embedding_bag" in named[StepPart.LOOKUPS]
    assert "aten::_embedding_bag_dense_backward" in named[StepPart.GRADIENTS]
    assert "aten::addmm" in named[StepPart.DENSE_FORWARD] and "aten::addmm" not in named[StepPart.LOOKUPS]


def test_a_captures_own_device_is_the_default_and_its_dense_part_measured(read_once: Callable[..., Job]) -> None:
    pytest.importorskip("torch")
    assert device_of(str(CAPTURE)).name == "cpu"
    found = anchored(CAPTURE, 2, "cpu")
    step, dense = recorded_step(read_once([str(CAPTURE)])), found.problem.dense
    parts = (StepPart.DENSE_FORWARD, StepPart.DENSE_BACKWARD, StepPart.OPTIMIZER)
    assert dense.us == pytest.approx(sum(step.mean(part) for part in parts)) and dense.host == pytest.approx(step.host)
    assert found.own is not None and {Source.MEASURED, Source.ANCHORED} <= set(found.own.sources)
    assert sum(found.own.phases.values()) == pytest.approx(found.own.time_us)
    # One rank exchanges nothing: what was measured adds up.
    assert found.own.time_us == pytest.approx(found.measured_us, rel=0.05)
    assert found.notes[0].startswith("Measured in the recorded step: the dense part")
    # A CPU's step says nothing of a GPU.
    there = anchored(CAPTURE, 2, "h200-sxm")
    assert there.problem.anchors == NO_ANCHORS and there.problem.dense.host == 0
    assert "runs other operations than h200-sxm" in there.notes[0]


@pytest.mark.skipif(not V100.is_dir(), reason="the published traces are not here")
def test_eight_ranks_own_step_is_close_to_the_measured_one() -> None:
    found, there = (anchored(V100, 8, name) for name in ("v100-sxm2-32g", "h100-sxm"))
    assert len(found.problem.tables) == 26 and found.problem.samples == 16 and found.own is not None
    kinds = [each.kind for each in found.own.plan.shardings]
    assert kinds.count(ShardKind.TABLE_WISE) == 24 and kinds.count(ShardKind.DATA_PARALLEL) == 2
    assert found.measured_us == 12_509 and found.own.time_us == pytest.approx(12_509, rel=0.03)
    assert found.own.low_us < 12_509 < found.own.high_us
    for anchor in (found.problem.anchors.forward, found.problem.anchors.backward):
        assert anchor is not None and 0.5 < anchor.factor < 2
    # Another device keeps the ratios.
    anchors, dense = there.problem.anchors, there.problem.dense
    assert anchors.exchanges is None and anchors.forward is not None and anchors.forward.elsewhere
    assert dense.us < found.problem.dense.us and set(dense.sources) == {Source.ANCHORED}
    # A dense part that cannot be scaled has a wide interval.
    larger = anchored(V100, 8, "v100-sxm2-32g", samples=512)
    assert larger.problem.dense.high / larger.problem.dense.us > 30
    assert any("recorded 16 samples a rank" in note for note in larger.notes)


def test_nothing_to_shard_is_one_sentence() -> None:
    with pytest.raises(ShardingError, match="has no embedding tables"):
        sharding_source(str(ROOT / "traces" / "resnet50-cpu"), device("cpu"))
