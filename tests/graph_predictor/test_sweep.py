"""Sweeps: the points of a space, resuming, backends that agree, ranking, and bad input."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from said import plain
from typer.testing import CliRunner

from foretrace.commands import app
from graph_predictor.prediction.edited_repeats import HOSTS_KEPT
from graph_predictor.request.study import Configuration
from step_views.cli.sweep import _warnings
from step_views.exports.tables import write_frame
from step_views.sweep import Axis, Goal, SweepError, SweepSpace, feasible, ranked, sweep
from step_views.sweep import run as running
from step_views.sweep.files import write_plot
from step_views.sweep.run import SweepSource
from tracer.errors import ForetraceError

CAPTURE = str(Path(__file__).parents[2] / "traces" / "dlrm-cpu")
HERE = SweepSource((CAPTURE,))
HOSTS = Axis("host", (1.0, 0.5, 0.25))
SMALL = SweepSpace((HOSTS, Axis("edits", ("none", "no-data-loading"))))


def _result(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["sweep", *arguments])


def test_a_space_is_every_combination() -> None:
    space = SweepSpace((Axis.sizes("batch=32:8,16"), Axis.texts("device", "b200, h200-sxm"),
                        Axis.texts("world_size", "1,8")),
                       Configuration(edits={"host": 0.5}))
    points = list(space)
    assert len(space) == len(points) == len({point.key for point in points}) == 8
    assert points[-1].values == {"batch": 16, "device": "h200-sxm", "world_size": 8}
    last = points[-1].configuration
    assert (last.sizes, last.device, last.parallel) == (("batch=32:16",), "h200-sxm", "ddp=8")
    assert last.edits == {"host": 0.5}
    assert points[0].configuration.parallel is None


@pytest.mark.parametrize(("make", "says"), [
    (lambda: Axis.sizes("batch"), "names no sizes"),
    (lambda: Axis.sizes("batch=8,,16"), "names no sizes"),
    (lambda: Axis.sizes("batch=8,8"), "value 8 twice"),
    (lambda: Axis.texts("device", "b200,,"), "empty value"),
    (lambda: Axis.texts("remove", "\udcff"), "not valid UTF-8"),
    (lambda: Axis.texts("host", "fast"), "no list of numbers"),
    (lambda: Axis.texts("colour", "red"), "cannot be swept"),
    (lambda: SweepSpace((HOSTS, HOSTS)), "swept twice"),
    (lambda: SweepSpace((Axis("parallel", ("ddp=2",)), Axis("world_size", (2,)))), "one of them"),
    (lambda: SweepSpace((Axis("clock", tuple(range(1, 1002))), Axis("host", tuple(range(1, 1002))))), "the most"),
    (lambda: list(SweepSpace((Axis("edits", ("warp-drive",)),))), "warp-drive"),
    (lambda: list(SweepSpace((Axis("world_size", (0,)),))), "no number of ranks"),
    (lambda: sweep(HERE, SweepSpace((Axis("device", ("cpu", "b2000")),)), jobs=1), "b2000"),
    (lambda: sweep(HERE, SweepSpace((Axis("topology", ("dgx-h100x8", "nowhere")),)), jobs=1), "nowhere"),
    (lambda: sweep(HERE, SweepSpace((Axis("parallel", ("ddp=2", "dpd=2")),)), jobs=1), "dpd"),
])
def test_what_is_no_space_is_refused(make: Any, says: str) -> None:
    with pytest.raises(Exception, match=says) as error:
        make()
    assert "\n" not in str(error.value)


def test_rows_are_predictions_or_say_why_there_is_none() -> None:
    space = SweepSpace((HOSTS, Axis("edits", ("none", "no-data-loading", "flash-attention"))))
    found = sweep(HERE, space, jobs=1).table
    study = HERE.study()
    for point, row in zip(space, found.to_dict("records"), strict=True):
        if point.values["edits"] == "flash-attention":
            assert row["refused"] and pd.isna(row["step_time_us"])
            continue
        expected = study.predict(point.configuration)
        assert row["refused"] == "" and row["step_time_us"] == expected.step_time_us
        assert (row["low_us"], row["high_us"]) == expected.interval_us
    times = found.set_index(["host", "edits"])["step_time_us"]
    assert times[0.25, "none"] < times[0.5, "none"] < times[1.0, "none"]
    assert len(feasible(found)) == 6


@pytest.mark.parametrize(("trace", "axes", "price"), [
    ("resnet50-V100", (Axis("device", ("b200", "l40s")), Axis("clock", (0.9,)), Axis("host", (0.5, 1.2)),
                       Axis("edits", ("none", "cuda-graphs", "free-launches"))), None),
    pytest.param("resnet50-ddp-2xA100", (
        Axis("set:batch", (16, 64), 32), Axis("bandwidth", (0.9,)), Axis("host", (0.5, 1.2)),
        Axis("edits", ("none", "hide-collectives"))), None, marks=pytest.mark.slow),
    pytest.param("h100-vs-mi300/h100-gaunernst_bert-small-uncased.json.gz", (
        Axis("device", ("b200", "xeon-8575c")), Axis("clock", (0.8,)), Axis("host", (0.5, 1.0)),
        Axis("dtype", ("fp16", "bf16")), Axis("edits", ("none", "cuda-graphs", "flash-attention"))), 2.0,
        marks=pytest.mark.slow),
])
def test_points_are_those_of_each_alone(trace: str, axes: tuple[Axis, ...], price: float | None,
                                        data_folder: Path) -> None:
    """Points share nothing that another changes: other devices, hosts, sizes, launches and work beside the step, drawn
    ones or several variants simulated at once, refused ones among them, in whatever order they are asked for, to the
    bit."""
    source, space = SweepSource((str(data_folder / "traces" / trace),)), SweepSpace(axes)
    job = source.study().job
    together = sweep(source, space, jobs=1, price_per_hour=price).table
    assert together["step_time_us"].notna().all() == (price is None) and together["step_time_us"].notna().any()
    assert len(together[["step_time_us", "gpu_active_us"]].drop_duplicates()) > (5 if price is None else 3)
    study, points = source.study(job), list(space)
    backwards = [running.row(study, point, price) for point in reversed(points)][::-1]
    pd.testing.assert_frame_equal(together, pd.DataFrame(backwards, columns=together.columns), check_exact=True)
    places = [0, len(together) // 2, len(together) - 1] if price is None else range(len(points))
    alone = [running.row(source.study(job), points[place], price) for place in places]
    pd.testing.assert_frame_equal(together.iloc[places].reset_index(drop=True),
                                  pd.DataFrame(alone, columns=together.columns), check_exact=True)
    point = next(one for one, row in zip(points, backwards, strict=True) if not row["refused"])
    told, plain = (source.study(job).predict(point.configuration, path=path) for path in (True, False))
    assert told.critical_path and dataclasses.replace(told, critical_path=[]) == plain


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The journal of a sweep whose table could not be written at its end: all points of SMALL are in it."""
    def full(table: pd.DataFrame, path: Path) -> None:
        raise ForetraceError(f"{path} cannot be written (No space left on device)")

    folder = tmp_path_factory.mktemp("full")
    with pytest.MonkeyPatch.context() as patched, pytest.raises(ForetraceError, match="No space"):
        patched.setattr(running, "write_frame", full)
        sweep(HERE, SMALL, output=folder / "all.csv", jobs=1)
    assert os.listdir(folder) == ["all.csv.journal"]
    return (folder / "all.csv.journal").read_bytes()


@pytest.fixture
def journal(written: bytes, tmp_path: Path) -> Path:
    """That journal, in a folder of the test's own."""
    (tmp_path / "all.csv.journal").write_bytes(written)
    return tmp_path / "all.csv.journal"


def test_an_ended_sweep_goes_on_where_it_was(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = journal.with_name("all.csv")
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:3]) + lines[3][:20])  # killed while the third point was written
    done: list[Any] = []
    plain = running.row
    monkeypatch.setattr(running, "row", lambda *given: done.append(given[1].key) or plain(*given))
    more = sweep(HERE, SweepSpace((Axis("host", (*HOSTS.values, 2.0)), SMALL.axes[1])), output=output, jobs=1)
    assert more.resumed == 2 and len(done) == len(SMALL) and len(more.table) == len(SMALL) + 2
    pd.testing.assert_frame_equal(more.table[:len(SMALL)], sweep(HERE, SMALL, jobs=1).table)


def test_the_journal_goes_when_the_table_is_written(journal: Path) -> None:
    """A damaged line is named, and its point predicted again."""
    output = journal.with_name("all.csv")
    lines = journal.read_bytes().splitlines(keepends=True)
    lines[2] = lines[2][:30] + b"\xff" + lines[2][31:]
    journal.write_bytes(b"".join([*lines, b"[1]\n"]))
    found = sweep(HERE, SMALL, output=output, jobs=1)
    assert found.resumed == len(SMALL) - 1 and found.table["step_time_us"].notna().all()
    assert found.notes == (f"{journal}: line 3, {len(lines) + 1} are damaged; their points were predicted again.",)
    assert os.listdir(output.parent) == ["all.csv"]
    pd.testing.assert_frame_equal(pd.read_csv(output, keep_default_na=False)[["bound"]], found.table[["bound"]])


def test_files_of_others_are_left(tmp_path: Path) -> None:
    """Journals that no sweep wrote, none is written through a link, and no table but a sweep's is replaced."""
    mine, victim = tmp_path / "t.csv.journal", tmp_path / "victim"
    for content in (b"my own notes", b'{"foretrace": 1}\n', b"\n"):
        mine.write_bytes(content)
        with pytest.raises(SweepError, match="no journal of a sweep"):
            sweep(HERE, SMALL, output=tmp_path / "t.csv", jobs=1)
        assert mine.read_bytes() == content and os.listdir(tmp_path) == [mine.name]
    mine.unlink()
    victim.touch()
    mine.symlink_to(victim)
    with pytest.raises(SweepError, match="cannot be written"):
        sweep(HERE, SMALL, output=tmp_path / "t.csv", jobs=1)
    assert victim.read_bytes() == b""
    table = tmp_path / "mine.csv"
    table.write_text("precious")
    said = _result(CAPTURE, "--host", "1", "-o", str(table))
    assert said.exit_code == 2 and "is no table of a sweep" in plain(said.output)
    assert table.read_text() == "precious" and sorted(os.listdir(tmp_path)) == ["mine.csv", "t.csv.journal", "victim"]


def test_a_journal_of_something_else_is_refused(journal: Path) -> None:
    output = journal.with_name("all.csv")
    with pytest.raises(SweepError, match="another price"):
        sweep(HERE, SMALL, output=output, jobs=1, price_per_hour=2.0)
    with pytest.raises(SweepError, match="another options"):
        sweep(HERE, SweepSpace(SMALL.axes, Configuration(edits={"kernels": 2.0})), output=output, jobs=1)
    head, _, rest = journal.read_bytes().partition(b"\n")
    for broken, says in ((b"not a journal\n" + rest, "no journal"),
                         (head.replace(b'"foretrace_sweep":1', b'"foretrace_sweep":99') + b"\n" + rest, "newer")):
        journal.write_bytes(broken)
        with pytest.raises(SweepError, match=says):
            sweep(HERE, SMALL, output=output, jobs=1)
        assert journal.read_bytes() == broken


MANY = SweepSpace((Axis("host", tuple(1 + i / 100 for i in range(24))),))
"""Points of several chunks."""


@pytest.mark.slow
def test_processes_give_what_one_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_forks", lambda: 1)
    pd.testing.assert_frame_equal(sweep(HERE, MANY, jobs=2).table, sweep(HERE, MANY, jobs=1).table)


def test_copies_of_a_process_give_what_it_gives() -> None:
    """In a process without threads, which may be copied; what a copy raises is raised."""
    program = """
import pytest, sys
from test_sweep import HERE, MANY, pd, running, sweep
plain, running._forks = running.row, lambda: 2
pd.testing.assert_frame_equal(sweep(HERE, MANY, jobs=2).table, sweep(HERE, MANY, jobs=1).table)
assert "torch" not in sys.modules
def broken(study, point, price):
    if point.values["host"] > 1.1:
        raise ForetraceError("no more")
    return plain(study, point, price)
from tracer.errors import ForetraceError
running.row = broken
with pytest.raises(ForetraceError, match="no more"):
    sweep(HERE, MANY, jobs=2)
"""
    path = os.pathsep.join([str(Path(__file__).parents[2]), str(Path(__file__).parents[1]), str(Path(__file__).parent)])
    done = subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": path}, text=True,
                          capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_dask_cluster_gives_what_this_process_gives(tmp_path: Path) -> None:
    distributed = pytest.importorskip("distributed", reason="the extra 'cluster' is not installed")
    with distributed.LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None,
                                  local_directory=str(tmp_path)) as cluster:
        there = sweep(HERE, MANY, workers=f"dask:{cluster.scheduler_address}", output=tmp_path / "t.csv")
    pd.testing.assert_frame_equal(there.table, sweep(HERE, MANY, jobs=1).table)


@pytest.mark.slow
def test_a_killed_sweep_loses_no_finished_point(tmp_path: Path) -> None:
    output = tmp_path / "t.parquet"
    journal = tmp_path / "t.parquet.journal"
    hosts = ",".join(str(1 + i / 1000) for i in range(200))
    command = [sys.executable, "-c", "from foretrace.commands import main; main()", "sweep", CAPTURE, "--host", hosts,
               "-o", str(output), "--jobs", "1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for _ in range(3000):
        if process.poll() is not None or (journal.exists() and journal.read_bytes().count(b"\n") > 20):
            break
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = journal.read_bytes().count(b"\n") - 1
    assert not output.exists() and 0 < kept < 200
    done = subprocess.run([*command, "--json"], check=True, capture_output=True, text=True)
    assert json.loads(done.stdout)["resumed"] == kept
    assert len(pd.read_parquet(output)) == 200


def test_ranking() -> None:
    table = pd.DataFrame({
        "step_time_us": [4.0, 2.0, None, 8.0], "items_per_second": [1.0, 2.0, None, 9.0],
        "peak_memory_bytes": [10, 50, None, 90], "cost_per_step": [3.0, 1.0, None, 2.0],
        "cost_per_million_items": [None] * 4})
    assert list(ranked(table, Goal.TIME).index) == [1, 0, 3]
    assert list(ranked(table, Goal.THROUGHPUT).index) == [3, 1, 0]
    assert list(ranked(table, Goal.THROUGHPUT, 60).index) == [1, 0]
    assert list(ranked(table, Goal.COST).index) == [1, 3, 0]
    with pytest.raises(SweepError, match="--price"):
        ranked(table.assign(cost_per_step=None), Goal.COST)
    with pytest.raises(SweepError, match="samples"):
        ranked(table.assign(items_per_second=None), Goal.THROUGHPUT)


def test_files(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra 'plot' is not installed")
    found = sweep(HERE, SMALL, jobs=1)
    write_frame(found.table, str(tmp_path / "t.parquet"))
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "t.parquet"), found.table, check_dtype=False)
    write_plot(found.table, found.axes, str(tmp_path / "t.png"))
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SweepError, match="no axis has several numbers"):
        write_plot(found.table, ("edits",), str(tmp_path / "u.svg"))


def test_the_command(tmp_path: Path) -> None:
    output = str(tmp_path / "t.csv")
    said = _result(CAPTURE, "--host", "1,0.5", "--edits", "none,flash-attention", "-o", output, "--best", "time",
                   "--jobs", "1", "--price", "2")
    assert said.exit_code == 0, said.output
    out = plain(said.stdout)
    assert all(text in out for text in (
        "Best by time: 2 of 4, step without the profiler", "Not priced", "4 points written to"))
    assert os.listdir(tmp_path) == ["t.csv"]
    assert _result(CAPTURE, "--host", "1", "-o", output).exit_code == 0  # a sweep's table may be replaced
    table = pd.DataFrame({"warnings": ["26 operations.", "1,026 operations.", "", "Another."]})
    assert list(_warnings(table)) == ["2 of 4 points, such as the first of them: 26 operations.",
                                      "1 of 4 points, such as the first of them: Another."]
    assert list(_warnings(table[:2])) == ["All points, such as the first of them: 26 operations."]


@pytest.mark.parametrize(("arguments", "says"), [
    (["--host", "1,2"], "Missing option"),
    (["-o", "t.xlsx", "--host", "1"], ".parquet or .csv"),
    (["-o", "t.csv"], "Nothing varies"),
    (["-o", "t.csv", "--host", "1", "--best", "beauty"], "beauty"),
    (["-o", "t.csv", "--host", "1", "--memory-limit", "lots"], "no size"),
    (["-o", "t.csv", "--host", "1", "--best", "cost"], "--price"),
    (["-o", "t.csv", "--host", "1", "--workers", "cloud"], "no workers"),
    (["-o", "t.csv", "--host", "1,2", "--jobs", "0"], "no number of processes"),
    (["-o", "t.csv", "--host", "1", "--workers", "local:tcp://nowhere:1"], "no workers"),
    (["-o", "t.csv", "--host", "1", "--workers", "dask:nonsense://x"], "scheduler"),
    (["-o", "nowhere/t.csv", "--host", "1"], "does not exist"),
    (["-o", "t.csv", "--host", "1", "--plot", "t.bmp"], ".png"),
    (["-o", "t.csv", "--host", "1", "--profile", "missing.profile"], "missing.profile"),
    (["-o", "t.csv", "--host", "1", "--from-device", "gpu9000"], "gpu9000"),
])
def test_bad_commands_get_a_sentence(arguments: list[str], says: str, tmp_path: Path,
                                     monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = _result(CAPTURE, *arguments)
    assert said.exit_code == 2 and says in said.output and "Traceback" not in said.output
    assert not os.listdir(tmp_path)


def test_points_of_one_chunk_share_a_clock_and_come_back_to_kept_hosts() -> None:
    hosts = tuple(0.5 + number / 1000 for number in range(HOSTS_KEPT + 36))
    points = list(SweepSpace((Axis("clock", tuple(0.5 + number / 100 for number in range(64))), Axis("host", hosts))))
    chunks = list(running._chunks(points))
    assert sorted(point.key for chunk in chunks for point in chunk) == sorted(point.key for point in points)
    assert [len({point.values["clock"] for point in chunk}) for chunk in chunks] == [1] * 128
    for some, kept in ((chunks[:64], hosts[:HOSTS_KEPT]), (chunks[64:], hosts[HOSTS_KEPT:])):
        assert {point.values["host"] for chunk in some for point in chunk} == set(kept)  # at all clocks, then others
    assert [len(chunk) for chunk in running._chunks(points[:40])] == [16, 16, 8]  # work for all, a kill loses little
