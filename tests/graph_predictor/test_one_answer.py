"""One answer: whichever command is asked of a recording, the same name has the same figure.

The commands themselves are run, and their text and pages read back (``said_facts``). Small recordings that were once
answered wrongly have the right value in the step, its interval and the pages.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from report_support import ROOT
from said import Run
from said_facts import Facts, contradictions, facts_of_page, facts_of_text
from slowly import mostly_slow

DATA = ROOT.parent / "shared" / "data"
OWN = ["bert-cpu", "cpu-small", "dlrm-cpu", "llama-cpu", "resnet50-cpu"]
COMMANDS = ("inspect", "replay", "opportunities", "ranks", "memory")
WITH_PAGES = ("breakdown", "predict")
QUICK = ("bert-cpu", "resnet18-ddp-MI300X", "rank0-1-of-128", "vllm-cuda-graph", "gpu-only-MI210",
         "triton_example.json.gz")
"""Of the recordings of whole steps, those asked in every run: a CPU, a GPU of AMD's, ranks, a CUDA graph, no host, code
that was compiled. So are all small cases."""


RIGHT = {
    "one_step_and_an_empty_one": (1.000, 0.600), "kernels_run_past_their_step": (1.000, 0.992),
    "kernel_ts_zero": (1.000, 0.600), "kernel_impossible_duration": (1.000, 0.600),
    "one_kernel_27h_early": (1.000, 0.600), "kernels_overlap_one_stream": (1.000, 0.420),
    "two_gpus_one_process": (1.000, 0.360), "two_ranks_merged_in_one_file": (1.000, 0.450),
    "record_function_steps": (1.000, None)}
"""Step and GPU active time of a small case, ms."""
REGION = ("--step-region", "train_step")
"""What the steps of the last one are."""


def recordings() -> list[Path]:
    """Every recording at hand: of the shared data each folder of ranks or file, the small cases, and our own."""
    found = [ROOT / "traces" / name for name in OWN]
    several = {"h100-vs-mi300", "cuda-sync-A100", "resnet50-V100-2021", "triton-example"}  # recordings in one folder
    for folder in (each for parent in ("traces", "cases") for each in sorted((DATA / parent).glob("*/"))):
        files = [path for path in sorted(folder.rglob("*.json*")) if not path.name.startswith("et.")]
        found += files if folder.name in several else [folder] if files else []
    return found


def said_by(path: Path, run: Run, folder: Path, *read: str) -> dict[str, Facts]:
    """What each command says of a recording; one that refuses it says nothing, in a sentence."""
    found: dict[str, Facts] = {}
    page = folder / "page.html"
    for command, *more in (*((each, path) for each in COMMANDS), ("diff", path, path), ("report", path, "-o", page),
                           *((each, path, "--html", page) for each in WITH_PAGES)):
        ended, text, error = run(command, *more, *read)
        assert ended in (0, 2) and "Traceback" not in text + error, (command, error)
        found[command] = facts_of_text(text) if ended == 0 else {}
        if page in more and ended == 0:
            found[f"{command} page"] = facts_of_page(page)
    return found


def is_right(path: Path, said: dict[str, Facts], run: Run, *read: str) -> None:
    step_ms, active_ms = RIGHT[path.name]
    found = run("predict", path, *read, "--json").json
    low, high = found["interval_us"]
    assert found["recorded"]["step_us"] == pytest.approx(1e3 * step_ms, rel=1e-3)
    assert found["step_time_us"] == pytest.approx(1e3 * step_ms, rel=5e-3)
    assert 0.75 * step_ms < low / 1e3 <= step_ms <= high / 1e3 < 1.3 * step_ms
    if active_ms is not None:
        assert found["gpu_active_us"] == pytest.approx(1e3 * active_ms, rel=1e-3)
    shown = f"{step_ms:.3f}"
    for command in ("inspect", "replay", "breakdown", "predict"):
        assert said[command]["recorded step"] == shown, command
    for page in (said[f"{command} page"] for command in ("predict", "breakdown", "report")):
        assert page["recorded step"] == shown and page.get("step", shown) == shown
        assert active_ms is None or page["GPU active"] == f"{active_ms:.3f}"


def _name(path: Path) -> str:
    return "/".join(path.parts[-2:])


@pytest.mark.usefixtures("quick_pages")
@pytest.mark.parametrize("path", mostly_slow(
    recordings(), {_name(path) for path in recordings() if path.parent.name == "cases" or path.name in QUICK},
    [_name(path) for path in recordings()]))
def test_no_command_and_no_page_contradicts_another(path: Path, run: Run, tmp_path: Path) -> None:
    said = said_by(path, run, tmp_path)
    if said["predict"]:
        assert said["predict"].keys() >= {"step", "decides", "path"} and said["predict page"].keys() >= {"step", "path"}
    assert not contradictions(said), "\n".join(contradictions(said))
    if path.parent.name == "cases" and path.name in RIGHT and RIGHT[path.name][1] is not None:
        is_right(path, said, run)


@pytest.mark.usefixtures("quick_pages")
def test_steps_that_are_regions_are_answered_right(run: Run, tmp_path: Path) -> None:
    path = DATA / "cases" / "record_function_steps"
    if not path.is_dir():
        pytest.skip(f"{path} is absent")
    said = said_by(path, run, tmp_path, *REGION)
    assert not contradictions(said)
    is_right(path, said, run, *REGION)
