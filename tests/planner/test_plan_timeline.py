"""The step of a plan in time: the schedule of its estimate, as a page and a trace show it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from foretrace.commands import app
from planner.parallel.page import KINDS, StepTimeline, plan_timeline
from planner.parallel.planning import plan

pytest.importorskip("torch")
SIZES = ["width=2048", "depth=8", "heads=16", "kv_heads=8", "hidden=4096", "vocabulary=8192", "seq=2048"]


@pytest.mark.parametrize("text", ["dp=2,tp=2,pp=2,microbatches=4,sharding=1", "fsdp2=8",
                                  "dp=2,pp=4,microbatches=8,chunks=2,schedule=interleaved",
                                  "pp=8,microbatches=8,schedule=zero_bubble"])
def test_tasks_follow_one_another_and_end_with_the_estimate(text: str) -> None:
    found = plan("llama", 8, device="h100-sxm", settings=SIZES, preset="8b", only=text)
    assert found.schedule is not None
    best = found.plans[0].estimate
    shown = StepTimeline.of(found.schedule, best)
    assert shown.end_ns.max() == pytest.approx(best.time_us * 1e3, abs=1)
    passes = best.plan.passes * best.plan.chunks
    for stage in range(shown.stages):
        rows = np.flatnonzero(shown.stage == stage)
        assert (shown.start_ns[rows][1:] >= shown.end_ns[rows][:-1]).all()
        kinds = [KINDS[kind] for kind in shown.kind[rows].tolist()]
        assert kinds.count("forward") == kinds.count("backward") == passes
        assert kinds.count("optimizer") == kinds.count("waiting for the slowest GPU") == 1
    assert plan_timeline(shown).parts


def run(*words: str) -> tuple[int, str, str]:
    found = CliRunner().invoke(app, ["plan", "llama", "--preset", "8b", "--device", "h100-sxm",
                                     *(word for size in SIZES for word in ("--set", size)), *words])
    return found.exit_code, found.stdout, found.stderr


def test_command(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    code, _, _ = run("--gpus", "8", "--parallel", "dp=2,tp=2,pp=2,microbatches=4", "--timeline", str(path))
    assert code == 0
    events = json.loads(path.read_text())["traceEvents"]
    assert {"forward 0", "backward 3", "optimizer"} <= {event["name"] for event in events if event.get("cat") == "task"}
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {"stage 0", "stage 1"}


def test_a_timeline_is_of_one_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused is refused before a search."""
    kept = tmp_path / "notes.txt"
    kept.write_text("mine")
    monkeypatch.setattr("planner.parallel.planning.find_plans", lambda request: pytest.fail("searched"))
    for words, said in ((("--gpus", "8,16", "--timeline", str(tmp_path / "a.json")), "--timeline"),
                        (("--gpus", "8", "--clock", "1,2", "--timeline", str(tmp_path / "a.json")), "--timeline"),
                        (("--gpus", "8", "--timeline", str(kept)), "notes.txt")):
        code, out, err = run(*words)
        assert (code, out) == (2, "")
        assert said in err
    assert kept.read_text() == "mine"
    monkeypatch.undo()
    code, out, _ = run("--gpus", "8", "--parallel", "dp=8,microbatch=4096", "--timeline", str(tmp_path / "a.json"))
    assert code == 1 and "Not possible" in out
    assert not (tmp_path / "a.json").exists()
