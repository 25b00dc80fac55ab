"""Small recordings that were once answered wrongly: the right value in the step, its interval and the page."""

from __future__ import annotations

from pathlib import Path

import pytest
from report_support import ROOT
from said import Run
from said_facts import facts_of_page, facts_of_text

CASES = ROOT.parent / "shared" / "data" / "cases"
RIGHT = {
    "one_step_and_an_empty_one": (1.000, 0.600), "kernels_run_past_their_step": (1.000, 0.992),
    "kernel_ts_zero": (1.000, 0.600), "kernel_impossible_duration": (1.000, 0.600),
    "one_kernel_27h_early": (1.000, 0.600), "kernels_overlap_one_stream": (1.000, 0.420),
    "two_gpus_one_process": (1.000, 0.360), "two_ranks_merged_in_one_file": (1.000, 0.450),
    "record_function_steps": (1.000, None)}
"""Step and GPU active time, ms."""
READ = {"record_function_steps": ("--step-region", "train_step")}


@pytest.mark.usefixtures("quick_pages")
@pytest.mark.parametrize("name", RIGHT)
def test_a_case_is_answered_right(name: str, run: Run, tmp_path: Path) -> None:
    if not (CASES / name).is_dir():
        pytest.skip(f"{CASES / name} is absent")
    step_ms, active_ms = RIGHT[name]
    path, read = CASES / name, READ.get(name, ())
    found = run("predict", path, *read, "--json").json
    low, high = found["interval_us"]
    assert found["recorded"]["step_us"] == pytest.approx(1e3 * step_ms, rel=1e-3)
    assert found["step_time_us"] == pytest.approx(1e3 * step_ms, rel=5e-3)
    assert 0.75 * step_ms < low / 1e3 <= step_ms <= high / 1e3 < 1.3 * step_ms
    if active_ms is not None:
        assert found["gpu_active_us"] == pytest.approx(1e3 * active_ms, rel=1e-3)
    shown = f"{step_ms:.3f}"
    for command in ("inspect", "replay", "breakdown", "predict"):
        assert facts_of_text(run(command, path, *read).out)["recorded step"] == shown, command
    for command, option in (("predict", "--html"), ("breakdown", "--html"), ("report", "-o")):
        page = tmp_path / f"{command}.html"
        assert run(command, path, *read, option, page).code == 0
        said = facts_of_page(page)
        assert said["recorded step"] == shown and said.get("step", shown) == shown
        if active_ms is not None:
            assert said["GPU active"] == f"{active_ms:.3f}"
