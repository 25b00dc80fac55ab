"""Host time of a workload from others of its host (``benchmarks/shared_overheads.py``): planted laws, real captures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from micro import Micro
from shared_overheads import HostEvents, SharedOverheads, host_class, step_events

from tracer.errors import ForetraceError


def planted_step(tensors: int) -> HostEvents:
    """A step of ten views, a linear layer, its node, and an optimizer's list operation; view 1 µs, list 2 + 0.5 µs
    for each tensor, the gap before it 10 + 3 for each; what runs once a step is cold."""
    rows = [(False, "aten::view", "", 0, 1_000.0)] * 10
    rows += [(False, "aten::linear", "", 0, 4_000.0), (False, "MmBackward0", "", 0, 6_000.0),
             (False, "aten::addmm", "aten::linear", 0, 90_000.0)]
    rows += [(True, "aten::_foreach_add_", "MmBackward0", tensors, 10_000.0 + 3_000.0 * tensors),
             (False, "aten::_foreach_add_", "", tensors, 2_000.0 + 500.0 * tensors)]
    gap, name, beside, count, ns = (list(column) for column in zip(*rows, strict=True))
    return HostEvents(np.array(gap), np.array(name, object), np.array(beside, object), np.array(count),
                      np.array([one == "aten::addmm" for one in name]), np.array(ns))


def test_the_distance_to_the_same_event_goes_round_the_step() -> None:
    step = planted_step(1)
    assert step.distance().tolist() == [6, *[1] * 9, *[15] * 5]
    assert step.alone().tolist() == [False] * 10 + [True] * 5
    cold = np.ones(64, np.bool_)
    once = HostEvents(~cold, np.array(["a", *["b"] * 63], object), np.full(64, "", object), np.zeros(64, np.int64),
                      ~cold, np.ones(64))
    assert once.coldness()[0] == pytest.approx(np.exp(0.2)) and once.coldness()[5] == 1.0  # one doubling beyond 32


def test_a_law_planted_in_two_workloads_gives_the_third() -> None:
    """Per-tensor costs are found from 4 and 12 tensors and hold at 50; the CPU's computation is no overhead."""
    shared = SharedOverheads.fit([planted_step(4), planted_step(12)])
    new = planted_step(50)
    estimate = shared.estimate_ns(new)
    assert estimate.sum() == pytest.approx(new.host_ns, rel=1e-9)
    assert estimate[new.computes].sum() == 0.0
    assert shared.seen(new).sum() == len(new) - 1
    blind = HostEvents(new.is_gap, new.name, new.beside, new.tensors, new.computes, np.zeros(len(new)))
    assert (shared.estimate_ns(blind) == estimate).all()  # the new workload's times are not looked at


def test_what_no_workload_ran_costs_what_its_class_does() -> None:
    shared = SharedOverheads.fit([planted_step(4), planted_step(12)])
    one = [(False, "AddBackward0", ""), (False, "aten::transpose", ""), (False, "aten::view", "aten::reshape"),
           (False, "aten::conv2d", "")]
    new = HostEvents(np.array([row[0] for row in one]), np.array([row[1] for row in one], object),
                     np.array([row[2] for row in one], object), np.zeros(4, np.int64), np.zeros(4, np.bool_),
                     np.zeros(4))
    assert shared.estimate_ns(new) == pytest.approx([6_000, 1_000, 1_000, 4_000])  # node, view, same name, module
    assert not shared.seen(new).any()
    assert [host_class(name) for name in ("autograd::engine::evaluate_function: MmBackward0", "aten::_foreach_mul_",
                                          "aten::mul_", "aten::mm")] == ["engine", "list", "in place", "other"]
    with pytest.raises(ForetraceError, match="no host time to share"):
        SharedOverheads.fit([])


def test_events_of_a_step_are_its_host_time(tmp_path: Path) -> None:
    """Three equal steps and one of another sequence; gaps and own times sum to the step, a slow one does not count."""
    trace = Micro()
    for number, slow in enumerate((1, 1, 3, 1)):
        at = 1_000 * number
        trace.step(at, at + 500, number)
        trace.op("aten::linear", at + 10, at + 10 + 60 * slow)
        trace.op("aten::t", at + 15, at + 20)
        if number != 3:
            trace.op("aten::view", at + 300, at + 310)
    events = step_events([trace.read(tmp_path)])
    assert events.name.tolist() == ["aten::linear", "aten::linear", "aten::t", "aten::view", "aten::view", ""]
    assert events.beside.tolist() == ["", "", "aten::linear", "aten::linear", "", "aten::view"]
    assert events.is_gap.tolist() == [True, False, False, True, False, True]
    assert (events.ns / 1e3).tolist() == [10, 55, 5, 230, 10, 190]


def test_three_small_captures_of_the_suite_give_the_fourth() -> None:
    """Every case is in the docs; this holds them to the errors reached, and the mean to half of the means by kind."""
    from tracer.job import read_job

    here = Path(__file__).resolve().parents[2] / "traces" / "host"
    steps = {name: step_events([read_job(path).graphs[0] for path in sorted((here / name).glob("round*"))])
             for name in ("dlrm", "resnet50", "bert", "llama")}
    errors = {}
    for name, step in steps.items():
        shared = SharedOverheads.fit([other for key, other in steps.items() if key != name])
        errors[name] = abs(float(shared.estimate_ns(step).sum()) / step.host_ns - 1)
    assert max(errors[name] for name in ("dlrm", "bert", "llama")) < 0.16, errors
    assert errors["resnet50"] < 0.32 and np.mean(list(errors.values())) < 0.17, errors
