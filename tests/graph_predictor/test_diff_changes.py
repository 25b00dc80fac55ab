"""Changes of a program that many operations give away are named as one, on hand-made traces of a step on the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from check_support import samples, step_trace, write_capture
from micro import Micro

from step_views.check import gate
from step_views.check.measure import Environment, find_captures
from step_views.check.verdict import GateOutcome
from step_views.cli.check import explain
from step_views.diff.jobs import diff_jobs
from tracer.job import Job

BACKWARD = "autograd::engine::evaluate_function: "
SUM = f"{BACKWARD}torch::autograd::AccumulateGrad"


def step(*, optimizer: str = "aten::_foreach_add_", zeros: bool = False, batch: int = 32, hidden: int = 256,
         kind: str = "float", passes: int = 1, again: bool = False, pause: float = 5.0, layers: int = 1) -> Micro:
    """Five operations forward, their backward, and an optimizer's pass over one weight."""
    trace = Micro()
    now = 0.0
    usual = (batch, hidden, kind) == (32, 256, "float")

    def op(name: str, shapes: list[list[int]], length: float = 20.0 if usual else 40.0, **args: object) -> None:
        nonlocal now
        now += pause
        trace.op(name, now, now + length, **{"Input Dims": shapes, "Input type": [kind] * len(shapes), **args})
        now += length

    weight = [[hidden, 64]]
    ranges: list[tuple[str, float]] = []
    if zeros:
        ranges.append(("Optimizer.zero_grad#SGD.zero_grad", now + 1))
        op("aten::_foreach_zero_", weight)
        ranges.append(("", now + 1))
    number = 10
    for _ in range(passes):
        for _ in range(layers):
            for name in ("linear", "relu", "mul", "add", "mean"):
                number += 1
                op(f"aten::{name}", [[batch, 64]], **{"Sequence number": number, "Fwd thread id": 0})
        for back, forward in (("MeanBackward0", "mean"), ("MulBackward0", "mul"), ("ReluBackward0", "relu")):
            begin = now + pause
            now += pause
            if again and back == "MulBackward0":
                number += 1
                op("aten::linear", [[batch, 64]], **{"Sequence number": number})
            op(f"aten::{forward}_backward", [[batch, 64]])
            now += 1
            trace.op(f"{BACKWARD}{back}", begin, now, **{"Fwd thread id": 1, "Sequence number": 11})
        begin = now + pause
        now += pause
        op("aten::add_" if zeros else "aten::detach", weight)
        now += 1
        trace.op(SUM, begin, now, **{"Fwd thread id": 1})
    begin = now + 1
    for _ in range(layers):
        op(optimizer, weight, 20.0 if optimizer == "aten::_foreach_add_" else 30.0)
    ranges += [("Optimizer.step#SGD.step", begin), ("", now + 1)]
    for (name, low), (_, high) in zip(ranges[::2], ranges[1::2], strict=True):
        trace._event("note", name, low, high - low, 1, 1)
    return trace.step(0, now + 10)


@pytest.mark.parametrize(("after", "named"), [
    ({"optimizer": "aten::add_"}, "optimizer: foreach → for-loop"),
    ({"optimizer": "aten::_fused_sgd_"}, "optimizer: foreach → fused"),
    ({"zeros": True}, "zero_grad: gradients are filled with zeros"), ({"batch": 64}, "sizes of inputs: 32 → 64"),
    ({"hidden": 512}, "sizes of parameters: 256 → 512"), ({"kind": "double"}, "element types: float → double"),
    ({"kind": "c10::BFloat16"}, "element types: float → bfloat16"),
    ({"passes": 2}, "gradient accumulation: forward and backward passes a step, 1 → 2"),
    ({"again": True}, "checkpointing: operations run again in the backward pass, 0 → 1"),
    ({"pause": 50.0}, "outside operations (Python, sleep, input or output): mostly before"),
    ({"layers": 2}, "layers: more of those that there were, only in B: aten::"),
])
def test_a_change_is_named_as_one(after: dict[str, Any], named: str, tmp_path: Path) -> None:
    found = diff_jobs(*(Job([trace.read(tmp_path)], 1) for trace in (step(), step(**after))))
    assert found.changes()[0].what.startswith(named)
    assert sum(change.time_ns for change in found.changes()) == found.total_ns


def checked(folder: Path, kept: dict[str, Any], new: dict[str, Any]) -> GateOutcome:
    """Check a new capture of a program, with causes."""
    for name, capture in (("kept", kept), ("new", new)):
        write_capture(folder / name / "step", **capture)
    gate.update_baseline(str(folder / "kept"), "first")
    return gate.check_against(str(folder / "kept"), str(folder / "new"), explain=explain)


def test_fewer_threads_of_the_same_processor_are_the_first_cause(tmp_path: Path) -> None:
    found = checked(tmp_path, {"torch_threads": 8}, {"torch_threads": 4})
    assert [verdict.quantity for verdict in found.failures] == ["threads"]
    assert found.causes["step"][0].startswith("threads: 8 → 4")
    assert not Environment(cpu="one", threads=8).fewer_threads(Environment(cpu="other", threads=4))


def test_a_program_at_other_sizes_is_compared_and_the_sizes_are_named(tmp_path: Path) -> None:
    shapes = {"Input Dims": [[8192, 1024], [1024, 1024], [1024]], "Input type": ["float"] * 3}
    found = checked(tmp_path, {"trace": step_trace(launches=4)}, {
        "trace": step_trace(launches=4, kernel_us=120, args=shapes), "step_ns": samples(1100)})
    assert "most operations have other sizes than in the baseline" in " ".join(found.notes)
    assert found.causes["step"][0].startswith("sizes of inputs: 4096 → 8192")


def test_what_noise_hides_names_only_what_is_sure(tmp_path: Path) -> None:
    """Nothing is decided: a change of the program is named, and a time of the same program only where it is sure."""
    captures = []
    for name, changed in (("a", {}), ("b", {"optimizer": "aten::add_"}), ("c", {"pause": 6.0}), ("d", {"pause": 50.0})):
        write_capture(tmp_path / name, step(**changed))  # type: ignore[arg-type]
        captures.append(find_captures(str(tmp_path / name))[0])
    named = [explain(captures[0], each, False) for each in captures]
    assert named[0] == [] == named[2]
    assert named[1][0].startswith("optimizer: foreach → for-loop")
    assert named[3][0].startswith("outside operations")
