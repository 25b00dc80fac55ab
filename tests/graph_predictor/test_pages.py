"""Pages without a browser: what is on them is what the commands print, and nothing on them can run."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from check_support import write_capture
from micro import Micro
from page_support import PageFile, shown_numbers
from page_traces import EVIL, evil_step
from report_support import CPU_SMALL, ROOT, real_trace, worked_step
from said import Run
from typer.testing import CliRunner

pytest.importorskip("jinja2")
pytest.importorskip("vl_convert", reason="pages need the extra `report`")
pytest.importorskip("itables", reason="pages need the extra `report`")

from foretrace.commands import app
from graph_predictor.figures import milliseconds, part_percent, signed_milliseconds
from step_views.pages import page as scripts
from step_views.pages.events import EventNames, Track, pack, safe_json
from step_views.pages.overview import report_page
from step_views.pages.page import Provenance, write_page
from step_views.pages.sections import _kept
from tracer.job import read_job
from tracer.versions import installed_version

LIMIT = 5_000_000


pytestmark = pytest.mark.usefixtures("quick_pages")  # none of Vega is run here


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("traces")
    worked_step().write(folder / "worked.json")
    evil_step().write(folder / "evil.json")
    evil_step(longer=10).write(folder / "longer.json")
    return folder


def ms(us: float) -> str:
    return milliseconds(us * 1e3)


# -- a recording ------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def cpu_page(tmp_path_factory: pytest.TempPathFactory) -> PageFile:
    path = tmp_path_factory.mktemp("page") / "report.html"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("step_views.pages.page.plot_script", lambda: b"// Vega")
        write_page(report_page(read_job(CPU_SMALL), Provenance((str(CPU_SMALL),), "foretrace report")), path)
    return PageFile(path)


@pytest.fixture(scope="module")
def broken_down() -> dict[str, Any]:
    """What ``breakdown --json`` says of the same recording."""
    return json.loads(CliRunner().invoke(app, ["breakdown", str(CPU_SMALL), "--json"]).stdout)


def test_a_recording_has_the_sections_of_what_there_is(cpu_page: PageFile, run: Run) -> None:
    assert cpu_page.sections == ["overview", "timeline", "operations", "what-ifs", "provenance"]
    links = [values["href"] for tag, values in cpu_page.tags if tag == "a" and values.get("href", "").startswith("#")]
    assert links == ["#main", *(f"#{name}" for name in cpu_page.sections)]
    found = run("inspect", CPU_SMALL, "--json").json
    assert ["events read", f"{found['loss']['events_read']:,}"] in cpu_page.rows("loss")
    made = dict(cpu_page.rows("made"))
    assert made["command"] == "foretrace report"
    assert made["itables"] != "not installed"


def test_the_overview_says_what_predict_says(cpu_page: PageFile, run: Run) -> None:
    found = run("predict", CPU_SMALL, "--json").json
    for us in (found["step_time_us"], *found["interval_us"], found["recorded_us"], *(
            us for us in found["bounds_us"].values() if us > 0)):
        assert ms(us) in shown_numbers(cpu_page.text)
    assert f"Decided by{found['bound']}" in cpu_page.text
    shares = {row[0]: row[1] for row in cpu_page.rows("sources")}
    assert shares == {name: part_percent(share) for name, share in found["sources"].items()}


def test_what_would_save_most_is_what_opportunities_says(cpu_page: PageFile, run: Run) -> None:
    found = run("opportunities", CPU_SMALL, "--json").json["opportunities"]
    rows = cpu_page.rows("what-ifs")
    assert [(row[1], row[2], row[3], row[7]) for row in rows] == [
        (ms(o["step_time_us"]), ms(o["gain_us"]), f"{o['gain']:.1%}", o["option"]) for o in found[:len(rows)]]
    assert len(rows) == min(len(found), 10)


def test_the_operations_are_those_of_breakdown(cpu_page: PageFile, broken_down: dict[str, Any]) -> None:
    counted = [step for step in broken_down["steps"] if step["counts"]]
    calls, host_us = Counter[str](), Counter[str]()
    for entry in (entry for step in counted for entry in step["operations"]):
        calls[entry["operation"]] += entry["calls"] / len(counted)
        host_us[entry["operation"]] += entry["host_us"] / len(counted)
    rows = cpu_page.rows("by-operation")
    assert len(rows) == len(calls)
    for name, count, host, *_ in rows:
        assert float(count.replace(",", "")) == pytest.approx(calls[name], abs=0.051)
        assert float(host.replace(",", "")) == pytest.approx(host_us[name] / 1e3, abs=0.00051)
    assert [row[2:4] for row in cpu_page.rows("steps")] == [
        [ms(step["measured_us"]), "yes"] for step in broken_down["steps"]]
    for what in ("host_us", "waiting_us"):
        assert sum(entry[what] for step in counted for entry in step["phases"]) == pytest.approx(
            sum(entry[what] for step in counted for entry in step["operations"]))
    # The icicle is the whole host time.
    nodes = cpu_page.value("icicle-host")["data"][0]["values"]
    assert sum(node["own"] for node in nodes) == pytest.approx(host_us.total() / 1e3)
    assert nodes[0]["name"] == "step"
    assert nodes[0]["ms"] == ms(host_us.total())
    assert {node["name"] for node in nodes if node["kind"] == "phase"} >= {"forward", "backward", "optimizer"}
    assert {node["parent"] for node in nodes[1:]} <= {node["id"] for node in nodes}
    assert _kept([10, -5, 6, 4], [-1, 0, 1, 0]) == [0, 3]  # a damaged recording's times may be negative


def test_the_module_tree_has_lines_and_both_directions(tmp_path: Path, run: Run) -> None:
    """Forward 300 µs in the linear layer, backward 100 of it on the autograd thread; the tree adds up upwards."""
    trace = Micro().step(0, 1000)
    rows = [("train.py(17): step", 0, 990), ("nn.Module: Net_0", 10, 500), ("net.py(40): forward", 15, 480),
            ("nn.Module: Linear_3", 20, 400)]
    trace.events += [trace._row("python_function", name, start, length, 1, 1, {}) for name, start, length in rows]
    trace.op("aten::linear", 100, 400, **{"Sequence number": 5})
    trace.op("autograd::engine::evaluate_function: AddmmBackward0", 600, 700, thread=2,
             **{"Sequence number": 5, "Fwd thread id": 1})
    trace.write(tmp_path / "trace.json")
    assert run("breakdown", tmp_path / "trace.json", "--html", tmp_path / "page.html").code == 0
    page = PageFile(tmp_path / "page.html")
    assert page.titles["module-tree"] == ["module", "forward host", "backward host", "called in"]
    assert page.rows("module-tree") == [["Net_0", "0.300", "0.100", "train.py(17): step"],
                                        ["\u2003Linear_3", "0.300", "0.100", "net.py(40): forward"]]


# -- the timeline -----------------------------------------------------------------------------------------------------

def test_the_critical_path_is_as_long_as_the_step(cpu_page: PageFile, broken_down: dict[str, Any]) -> None:
    head, columns = cpu_page.events()
    (path,) = (track for track in head["tracks"] if track["title"] == "critical path")
    (first, count), = path["runs"]
    shown = columns["length"][first:first + count].sum() * head["unit_ns"]
    assert any(shown / 1e3 == pytest.approx(step["simulated_us"], rel=1e-6) for step in broken_down["steps"])


def test_events_of_the_worked_step(written: Path, tmp_path: Path, run: Run) -> None:
    """The kernel runs from 50 to 150 µs of the step, measured and replayed, on the critical path."""
    assert run("breakdown", written / "worked.json", "--step", "-1", "--html", tmp_path / "page.html").code == 0
    head, columns = PageFile(tmp_path / "page.html").events()
    names = np.array(head["names"])
    for source, lit in (("measured", 0), ("replayed", 1)):
        (track,) = (t for t in head["tracks"] if t["title"] == f"stream 7, {source}")
        (first, count), = track["runs"]
        assert count == 1 and columns["start"][first] == 50_000 and columns["length"][first] == 100_000
        assert names[columns["name"][first]] == "void [red]mul<4>(float*)" and columns["lit"][first] == lit
    (thread,) = (t for t in head["tracks"] if t["title"].endswith("measured") and "stream" not in t["title"])
    row0, row1 = thread["runs"][:2]
    assert names[columns["name"][row0[0]:sum(row0)]].tolist() == ["aten::outer", "aten::item", "aten::after"]
    assert np.cumsum(columns["start"][row0[0]:sum(row0)]).tolist() == [10_000, 120_000, 200_000]
    assert "aten::inner" in names[columns["name"][row1[0]:sum(row1)]]


def many(count: int, length: int = 100) -> Track:
    start = np.arange(count, dtype=np.int64) * (length + 20)
    zero = np.zeros(count, np.int64)
    return Track("stream", "", "", zero, start, start + length, zero, zero, zero.astype(bool))


def test_too_many_events_are_merged_and_the_page_says_so() -> None:
    names = EventNames()
    names.code("kernel")
    track = many(5_000)
    track.end[::500] += 15  # ten longer ones stay as they are
    packed, said = pack([track], names, int(track.end.max()), most=500)
    head, columns = packed.head, packed.columns
    assert len(columns["start"]) <= 500 and "of 5,000" in said and "merged" in said
    start = np.cumsum(columns["start"])
    assert (start[1:] >= (start + columns["length"])[:-1]).all()
    assert start[0] == 0 and start[-1] + columns["length"][-1] == track.end.max()
    merged = [int(head["names"][n].split()[0].replace(",", "")) for n in columns["name"] if "short" in head["names"][n]]
    assert sum(merged) + (len(start) - len(merged)) == 5_000


@pytest.mark.parametrize(("count", "length", "said"), [(50, 100, "50 events."), (3, 10**11, "3 events.")])
def test_few_events_are_kept_to_the_nanosecond_and_windows_of_minutes_fit(count: int, length: int, said: str) -> None:
    track = many(count, length)
    packed, told = pack([track], EventNames({"kernel": 0}), int(track.end.max()))
    assert told == said
    assert (packed.head["unit_ns"] == 1) is (count == 50)
    end = (np.cumsum(packed.columns["start"]) + packed.columns["length"]) * packed.head["unit_ns"]
    assert end.tolist() == pytest.approx(track.end.tolist(), rel=0 if count == 50 else 1e-8)


# -- nothing on it runs -----------------------------------------------------------------------------------------------

def test_names_that_are_markup_stay_names(written: Path, tmp_path: Path, run: Run) -> None:
    ran = run("report", written / "evil.json", "--step", "-1", "-o", tmp_path / "evil.html")
    assert ran.code == 0, ran.err
    page = PageFile(tmp_path / "evil.html")
    tags = [tag for tag, _ in page.tags]
    assert "img" not in tags and "svg" not in tags
    assert not [values for _, values in page.tags if any(name.startswith("on") for name in values)]
    kernels = [row[0] for row in page.rows("by-kernel")]
    for name in EVIL:
        assert any(kernel.startswith(name) for kernel in kernels)
        assert any(own.startswith(name) for own in page.events()[0]["names"])


def test_one_script_runs_and_the_page_names_its_hash(cpu_page: PageFile) -> None:
    running = [values for tag, values in cpu_page.tags if tag == "script" and "type" not in values]
    assert len(running) == 1
    (policy,) = (values["content"] for tag, values in cpu_page.tags
                 if tag == "meta" and values.get("http-equiv") == "Content-Security-Policy")
    script = re.search(r"<script>(.*?)</script>", cpu_page.source, re.DOTALL).group(1)
    assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in policy
    assert "default-src 'none'" in policy and "http" not in policy and "unsafe-eval" not in policy
    assert not re.search(r"(?:src|href)=[\"']?(?:https?:)?//", cpu_page.source)


@pytest.mark.parametrize("text", [*EVIL, "\u2028\u2029", "\ud800", "]]>"])
def test_data_breaks_out_of_no_script(text: str) -> None:
    written = safe_json({"name": [text]})
    assert not set("<>&\u2028\u2029") & set(written)
    assert json.loads(written)["name"][0] == text.encode("utf-8", "replace").decode()


# -- files ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("name", "content", "said"), [
    ("a.json", b"", ""), ("a.json", b'{"hello": 1}', ""), ("a.json", b'{"traceEvents": [{"ph": "X", "ts"', ""),
    ("a.json", b"\x00\xff" * 50, ""), ("", b"", ""), ("absent", b"", ""),
    ("a.csv", b"host,step_time_us\n0.5,1\n", "is a table, not a recording; a sweep's page is written"),
    ("a.parquet", b"host,step_time_us\n0.5,1\n", "is a table")])
def test_what_is_no_trace_is_one_sentence(name: str, content: bytes, said: str, tmp_path: Path, run: Run) -> None:
    if "." in name:
        (tmp_path / name).write_bytes(content)
    ran = run("report", tmp_path / name, "-o", tmp_path / "page.html")
    assert ran.code == 2
    assert ran.out == ""
    assert said in " ".join(ran.err.split())
    assert ran.err.startswith("foretrace: ")
    assert "Traceback" not in ran.err
    assert len(ran.err.strip().splitlines()) == 1
    assert not (tmp_path / "page.html").exists()


def test_a_page_replaces_a_page_and_nothing_else(written: Path, tmp_path: Path, run: Run) -> None:
    page = tmp_path / "page.html"
    page.write_text("mine")
    ran = run("report", written / "worked.json", "-o", page)
    assert ran.code == 2 and "no page of foretrace" in ran.err and page.read_text() == "mine"
    page.unlink()
    for _ in range(2):
        assert run("report", written / "worked.json", "-o", page).code == 0
    assert list(tmp_path.iterdir()) == [page]
    trace = written / "worked.json"
    assert run("report", trace, "-o", trace).code == 2


def test_what_is_missing_is_named_before_the_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run: Run) -> None:
    known = scripts.util.find_spec
    absent = ("vl_convert", "itables")
    monkeypatch.setattr(scripts.util, "find_spec", lambda name: None if name in absent else known(name))
    ran = run("report", tmp_path / "absent", "-o", tmp_path / "page.html")
    assert ran.code == 2 and "pip install 'foretrace[report]'" in ran.err and "vl-convert-python and itables" in ran.err


def test_without_steps_the_window_is_shown(tmp_path: Path, run: Run) -> None:
    trace = Micro()
    trace.launch(1000, 5, (7, 1020, 30))
    trace.write(tmp_path / "trace.json")
    ran = run("report", tmp_path / "trace.json", "-o", tmp_path / "page.html")
    assert ran.code == 0, ran.err
    assert "Nothing is predicted of it" in PageFile(tmp_path / "page.html").text


# -- the other commands -----------------------------------------------------------------------------------------------

def test_predict(tmp_path: Path, run: Run) -> None:
    ran = run("predict", CPU_SMALL, "--host", "0.5", "--html", tmp_path / "page.html", "--json")
    assert ran.code == 0, ran.err
    found, page = ran.json, PageFile(tmp_path / "page.html")
    assert {ms(found["step_time_us"]), *map(ms, found["interval_us"])} <= shown_numbers(page.text)
    assert found["edits"][0] in page.text
    assert [row[2] for row in page.rows("path")] == [ms(entry["time_us"]) for entry in found["critical_path"]]
    head, _ = page.events()
    assert {track["source"] for track in head["tracks"]} == {"", "measured", "predicted"}


def test_diff(written: Path, tmp_path: Path, run: Run) -> None:
    ran = run("diff", written / "evil.json", written / "longer.json", "--html", tmp_path / "diff.html", "--json")
    assert ran.code == 0, ran.err
    found, page = ran.json, PageFile(tmp_path / "diff.html")
    assert page.sections == ["overview", "causes", "provenance"]
    assert {ms(found["before_us"]), ms(found["after_us"])} <= shown_numbers(page.text)
    assert [row[1] for row in page.rows("kinds")] == [
        signed_milliseconds(1e3 * kind["time_us"]) for kind in found["kinds"]]
    bars = page.value("waterfall")["data"]["values"]
    assert bars[0]["high"] == pytest.approx(found["before_us"] / 1e3)
    assert bars[-1]["high"] == pytest.approx(found["after_us"] / 1e3)


def test_sweep(tmp_path: Path, run: Run) -> None:
    ran = run("sweep", CPU_SMALL, "--host", "0.5,1,2", "-o", tmp_path / "s.csv", "--html", tmp_path / "page.html",
              "--jobs", 1, "--json")
    assert ran.code == 0, ran.err
    assert [row[1:4] for row in PageFile(tmp_path / "page.html").rows("sweep-points")] == [
        [ms(row["step_time_us"]), ms(row["low_us"]), ms(row["high_us"])] for row in ran.json["rows"]]


def test_check_and_plan(tmp_path: Path, run: Run) -> None:
    runs = write_capture(tmp_path / "runs" / "step").parent
    assert run("check", runs, "--update-baseline", "--reason", "the first").code == 0
    ran = run("check", runs, "--html", tmp_path / "check.html", "--json")
    page = PageFile(tmp_path / "check.html")
    assert len(page.rows("verdicts")) == len(ran.json["verdicts"])
    assert ran.json["summary"] in page.text
    ran = run("plan", "llama", "--preset", "8b", "--gpus", 8, "--parallel", "dp=8,sharding=3", "--html",
              tmp_path / "plan.html", "--json")
    page = PageFile(tmp_path / "plan.html")
    assert ran.code in (0, 1)
    assert "overview" in page.sections
    assert {f"{plan['step_ms']:,.1f}" for plan in ran.json["plans"]} <= shown_numbers(page.text)


def test_ranks_of_a_real_job(tmp_path: Path, run: Run) -> None:
    source = real_trace("dlrm-8xV100-2023")
    ran = run("ranks", source, "--html", tmp_path / "page.html", "--json")
    page = PageFile(tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size < LIMIT
    assert [row[:6] for row in page.rows("by-rank")] == [
        [str(r["rank"]), *(ms(r[f"{what}_us"]) for what in ("step", "busy", "exposed", "waiting", "idle"))]
        for r in ran.json["ranks"]]
    assert ms(ran.json["recorded"]["step_us"]) in shown_numbers(page.text)
    head, _ = page.events()
    assert len({track["group"] for track in head["tracks"]}) == 8


def test_roofline_counts_what_the_models_count(tmp_path: Path, run: Run) -> None:
    source = real_trace("h100-vs-mi300/h100-gaunernst_bert-small-uncased.json.gz")
    assert run("predict", source, "--html", tmp_path / "page.html", "--json").code == 0
    page = PageFile(tmp_path / "page.html")
    work = [float(row[4].replace(",", "")) for row in page.rows("work-predicted") if row[1] == "gemm"]
    assert work and min(work) > 0
    assert all(point["y"] <= 4_000 for point in page.value("roof-predicted")["layer"][0]["data"]["values"])


ON_PAGES = """
import contextlib, resource, sys
from foretrace.commands import main
from step_views.pages.page import plot_script
from tracer.kept_files import write_kept
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
script, trace, *pages = sys.argv[1:]
for page in pages:
    sys.argv = ["foretrace", "report", trace, "-o", page]
    with contextlib.suppress(SystemExit):
        main()
    assert write_kept(script, b"// Vega")
    plot_script.cache_clear()
"""


@pytest.mark.slow
def test_under_a_limit_on_address_space_a_page_has_plots_once_their_script_is_kept(tmp_path: Path) -> None:
    script = f"vega-{installed_version('vl-convert-python')}.js"
    trace = str(ROOT / "traces" / "llama-cpu")
    pages = {tmp_path / "before.html": False, tmp_path / "after.html": True}
    ran = subprocess.run([sys.executable, "-c", ON_PAGES, script, trace, *map(str, pages)], cwd=ROOT,
                         capture_output=True, text=True, timeout=120, check=False, env={
                             **os.environ, "XDG_CACHE_HOME": str(tmp_path), "TMPDIR": str(tmp_path)})
    assert ran.returncode == 0, ran.stderr
    for path, kept in pages.items():
        page = path.read_text(encoding="utf-8")
        assert ("data-plot=" in page, 'id="library-plots"' in page, "Not drawn" in page) == (kept, kept, not kept)
