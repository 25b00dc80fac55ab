"""Memory on pages: drawn moments are ones that were, peaks are the command line's, and a page says what fits."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from memory_trace import recorded_memory
from page_support import PageFile
from report_support import own_program
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


pytestmark = pytest.mark.usefixtures("quick_pages")


def drawn(values: list[dict[str, float]]) -> dict[float, float]:
    """What a plot stacks at each moment."""
    total = Counter[float]()
    for row in values:
        total[row["at"]] += row["gb"]
    return total


def plot_of(at: list[float], **kinds: list[float]) -> PagePlot:
    (plot,) = (part for part in memory_section(moments=[MemoryMoments(at, dict(kinds))]).parts
               if isinstance(part, PagePlot))
    return plot


def test_kinds_that_are_full_in_turn_and_changes_at_one_time_are_not_added() -> None:
    many = 3 * MOST_MOMENTS
    plot = plot_of([float(i) for i in range(many)], activations=[1e9 * (i % 2) for i in range(many)],
                   temporaries=[1e9 * (1 - i % 2) for i in range(many)])
    found = drawn(plot.spec["data"]["values"])
    assert len(found) == MOST_MOMENTS
    assert set(found.values()) == {1.0}
    assert "fullest of 3 moments" in plot.description
    assert plot.table is not None and len(plot.table.rows) == plot.table.total == MOST_MOMENTS
    plot = plot_of([1.0, 1.0, 1.0, 2.0], activations=[1e9, 3e9, 2e9, 1e9])
    assert drawn(plot.spec["data"]["values"]) == {1.0: 3.0, 2.0: 1.0}


def test_a_report_draws_recorded_memory(tmp_path: Path, run: Run) -> None:
    trace = recorded_memory(tmp_path, CHANGES)
    assert run("report", trace, "-o", tmp_path / "page.html").code == 0
    page, found = PageFile(tmp_path / "page.html"), run("memory", trace, "--json").json["measured"]
    held = [[name.replace("_", " "), binary_size(size)] for name, size in found["holds_bytes"].items() if size]
    assert [row[:2] for row in page.rows("measured-memory")] == held
    assert [row[:2] for row in page.rows("measured-places")] == [
        [place, binary_size(size)] for place, size in found["places_bytes"].items()]
    moments = drawn(page.value("measured-moments")["data"]["values"])
    assert max(moments.values()) == pytest.approx(found["peak_bytes"] / 1e9)
    assert "were there before the window" in page.text and "is inferred from the phases" in page.text


def test_a_report_has_the_predicted_peak_beside_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run: Run) -> None:
    pytest.importorskip("torch")
    from tracer import workloads
    from tracer.shape_only import trace_workload

    graph = trace_workload(workloads.configure("bert", preset="tiny", batch=2, seq=32), "h100-sxm")
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
    assert run("trace", own_program(tmp_path), "-o", tmp_path / "a.foretrace").code == 0
    assert run("report", tmp_path / "a.foretrace", "-o", tmp_path / "page.html").code == 0
    page, found = PageFile(tmp_path / "page.html"), run("memory", tmp_path / "a.foretrace", "--json").json["predicted"]
    moments = drawn(page.value("predicted-moments")["data"]["values"])
    assert max(moments.values()) == pytest.approx(found["peak_bytes"] / 1e9)
    assert "The step fits h200-sxm: its predicted" in page.text


@pytest.mark.parametrize(("held", "said"), [(10e9, "Batch 4 fits t4"), (14.5e9, "Batch 4 may not fit t4"),
                                            (40e9, "Batch 4 does not fit t4"), (None, "")])
def test_whether_a_batch_fits_and_nothing_of_host_memory(held: float | None, said: str, tmp_path: Path) -> None:
    account = None if held is None else MemoryAccount(activations=held)
    timeline = memory_timeline(read_kineto(recorded_memory(tmp_path, CHANGES, device=-1))) if held is None else None
    assert timeline is None or not timeline.on_device
    section = step_memory(account, find_device("t4"), timeline, batch=4)
    texts = [text for part in section.parts for text in getattr(part, "paragraphs", ())]
    assert any(said in text for text in texts) if said else not any("fit" in text for text in texts)
