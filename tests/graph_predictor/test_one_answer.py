"""One answer: whichever command is asked of a recording, the same name has the same figure.

The commands themselves are run, and their text and pages read back (``said_facts``).
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
QUICK = ("cpu-small", "resnet50-V100", "resnet18-ddp-MI300X", "rank0-1-of-128", "vllm-cuda-graph", "gpu-only-MI210",
         "mi300-gaunernst_bert-small-uncased.json.gz")
"""Of the recordings of whole steps, those asked in every run: a CPU, a GPU, ranks, a CUDA graph, no host, AMD."""


def recordings() -> list[Path]:
    """Every recording at hand: of the shared data each folder of ranks or file, the small cases, and our own."""
    found = [ROOT / "traces" / name for name in OWN]
    for folder in sorted((DATA / "traces").glob("*")) + sorted((DATA / "cases").glob("*")):
        if folder.is_dir():
            found += _within(folder)
    return found


def _within(folder: Path) -> list[Path]:
    """A folder of one job's ranks is one recording; another one holds several."""
    files = [path for path in sorted(folder.rglob("*.json*")) if not path.name.startswith("et.")]
    several = {"h100-vs-mi300", "cuda-sync-A100", "resnet50-V100-2021", "triton-example"}
    return files if folder.name in several else [folder] if files else []


def said_by(path: Path, run: Run, folder: Path) -> dict[str, Facts]:
    """What each command says of a recording; one that refuses it says nothing, in a sentence."""
    found: dict[str, Facts] = {}
    page = folder / "page.html"
    for command, *more in (*((each, path) for each in COMMANDS), ("diff", path, path), ("report", path, "-o", page),
                           *((each, path, "--html", page) for each in WITH_PAGES)):
        ended, text, error = run(command, *more)
        assert ended in (0, 2) and "Traceback" not in text + error, (command, error)
        found[command] = facts_of_text(text) if ended == 0 else {}
        if page in more and ended == 0:
            found[f"{command} page"] = facts_of_page(page)
    return found


def _name(path: Path) -> str:
    return "/".join(path.parts[-2:])


@pytest.mark.usefixtures("quick_pages")
@pytest.mark.parametrize("path", mostly_slow(recordings(), {
    _name(path) for path in recordings() if path.parent.name not in ("traces", "h100-vs-mi300", "resnet50-V100-2021")
    or path.name in QUICK}, [_name(path) for path in recordings()]))
def test_no_command_and_no_page_contradicts_another(path: Path, run: Run, tmp_path: Path) -> None:
    said = said_by(path, run, tmp_path)
    if said["predict"]:
        assert said["predict"].keys() >= {"step", "decides", "path"} and said["predict page"].keys() >= {"step", "path"}
    assert not contradictions(said), "\n".join(contradictions(said))
