"""Memory on pages: drawn moments are ones that were, peaks are the command line's, and a page says what fits."""

from __future__ import annotations

from pathlib import Path

import pytest
from memory_trace import recorded_memory
from page_support import PageFile
from said import Run

pytest.importorskip("jinja2")
pytest.importorskip("vl_convert", reason="pages need the extra `report`")
pytest.importorskip("itables", reason="pages need the extra `report`")

from kernel_models.device import find_device
from step_views.pages.memory import MOST_MOMENTS, MemoryMoments, memory_section, step_memory
from step_views.pages.parts import PagePlot
from tracer.device_memory import MemoryAccount, binary_size, memory_timeline
from tracer.kineto import read_kineto

CHANGES = [(20, 1, 100_000_000), (30, 2, 40_000_000), (40, 2, -40_000_000), (330, 3, 70_000_000),
           (340, 1, -100_000_000), (720, 4, 8_000_000), (730, 3, -70_000_000)]
PROGRAM = """
import torch

def build(batch=4, width=256):
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, width)).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.zeros(batch, width).cuda()
    def step():
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return step
"""


@pytest.fixture(autouse=True)
def quick_bundle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("step_views.pages.page.plot_script", lambda: b"// Vega")


def drawn(plot: PagePlot) -> dict[float, float]:
    """What a plot stacks at each moment."""
    total: dict[float, float] = {}
    for row in plot.spec["data"]["values"]:
        total[row["at"]] = total.get(row["at"], 0.0) + row["gb"]
    return total


def plot_of(at: list[float], **kinds: list[float]) -> PagePlot:
    (plot,) = (part for part in memory_section(moments=[MemoryMoments(at, dict(kinds))]).parts
               if isinstance(part, PagePlot))
    return plot


def test_kinds_that_are_full_in_turn_are_not_added() -> None:
    many = 3 * MOST_MOMENTS
    plot = plot_of([float(i) for i in range(many)], activations=[1e9 * (i % 2) for i in range(many)],
                   temporaries=[1e9 * (1 - i % 2) for i in range(many)])
    assert len(drawn(plot)) == MOST_MOMENTS and set(drawn(plot).values()) == {1.0}
    assert "fullest of 3 moments" in plot.description
    assert plot.table is not None and len(plot.table.rows) == plot.table.total == MOST_MOMENTS


def test_changes_at_one_time_are_not_added() -> None:
    assert drawn(plot_of([1.0, 1.0, 1.0, 2.0], activations=[1e9, 3e9, 2e9, 1e9])) == {1.0: 3.0, 2.0: 1.0}


def test_a_report_draws_recorded_memory(tmp_path: Path, run: Run) -> None:
    trace = recorded_memory(tmp_path, CHANGES)
    assert run("report", trace, "-o", tmp_path / "page.html").code == 0
    page, found = PageFile(tmp_path / "page.html"), run("memory", trace, "--json").json["measured"]
    assert "memory" in page.sections
    held = [[name.replace("_", " "), binary_size(size)] for name, size in found["holds_bytes"].items() if size]
    assert [row[:2] for row in page.rows("measured-memory")] == held
    assert [row[:2] for row in page.rows("measured-places")] == [
        [place, binary_size(size)] for place, size in found["places_bytes"].items()]
    total: dict[float, float] = {}
    for row in page.value("measured-moments")["data"]["values"]:
        total[row["at"]] = total.get(row["at"], 0.0) + row["gb"]
    assert max(total.values()) == pytest.approx(found["peak_bytes"] / 1e9)
    assert "were there before the window" in page.text and "is inferred from the phases" in page.text


def test_a_report_has_the_predicted_peak_beside_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run: Run) -> None:
    pytest.importorskip("torch")
    from tracer import workloads
    from tracer.shape_only import trace_workload

    graph = trace_workload(workloads.configure("bert", batch=2, seq=32), "h100-sxm")
    monkeypatch.setattr("graph_predictor.request.program_memory.trace_again", lambda *_: graph)
    trace, code = recorded_memory(tmp_path, CHANGES), "train.py:build"
    assert run("report", trace, "--code", code, "-o", tmp_path / "page.html").code == 0
    page, found = PageFile(tmp_path / "page.html"), run("memory", trace, "--code", code, "--json").json
    assert [row[1] for row in page.rows("memory-parts")] == [
        binary_size(size) for size in found["predicted"]["holds_bytes"].values()]
    assert (f"Predicted are {binary_size(found['predicted']['peak_bytes'])}, measured were "
            f"{binary_size(found['measured']['peak_bytes'])}") in page.text


def test_a_report_of_a_traced_step_draws_its_operations_and_says_whether_it_fits(tmp_path: Path, run: Run) -> None:
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text(PROGRAM)
    assert run("trace", f"{tmp_path / 'train.py'}:build", "-o", tmp_path / "a.foretrace").code == 0
    assert run("report", tmp_path / "a.foretrace", "-o", tmp_path / "page.html").code == 0
    page, found = PageFile(tmp_path / "page.html"), run("memory", tmp_path / "a.foretrace", "--json").json["predicted"]
    total: dict[float, float] = {}
    for row in page.value("predicted-moments")["data"]["values"]:
        total[row["at"]] = total.get(row["at"], 0.0) + row["gb"]
    assert max(total.values()) == pytest.approx(found["peak_bytes"] / 1e9)
    assert "The step fits h200-sxm: its predicted" in page.text


@pytest.mark.parametrize(("held", "said"), [(10e9, "Batch 4 fits t4"), (14.5e9, "Batch 4 may not fit t4"),
                                            (40e9, "Batch 4 does not fit t4")])
def test_whether_a_batch_fits(held: float, said: str) -> None:
    section = step_memory(MemoryAccount(activations=held), find_device("t4"), batch=4)
    assert any(said in text for part in section.parts for text in getattr(part, "paragraphs", ()))


def test_host_memory_is_not_held_against_the_device(tmp_path: Path) -> None:
    trace = recorded_memory(tmp_path, CHANGES, device=-1)
    found = memory_timeline(read_kineto(trace))
    assert not found.on_device
    section = step_memory(None, find_device("t4"), found)
    assert not any("fit" in text for part in section.parts for text in getattr(part, "paragraphs", ()))
