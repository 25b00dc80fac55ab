"""The recording campaign: plans, order, split and grids without torch; runs, kills and resumes in real processes."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from disk_support import small_disk
from said import Run, plain

from tracer import campaign
from tracer.campaign import tables
from tracer.campaign.families import FAMILIES
from tracer.campaign.items import rehearsed
from tracer.campaign.record import Task, full_folder, is_unsupported, sentence
from tracer.campaign.results import Results
from tracer.errors import DiskFullError
from tracer.store import load_graph
from tracer.workloads import configure, names, size_text, split

ROOT = Path(__file__).resolve().parents[2]
COMMAND = "import sys; sys.argv[0] = 'foretrace'; from foretrace.commands import main; sys.exit(main())"
H200 = ("h200-workloads", "h200-kernels")

PLAN = """
name = "mine"
description = "for a test"
device = "cpu"
threads = 1
"""
QUICK = PLAN + """
[[kernel]]
family = "gemm"
product = { m = [16, 32], n = [16], k = [16, 48], dtype = ["fp32"] }
[[kernel]]
family = "softmax"
product = { rows = [8], width = [16, 32], dtype = ["fp32"] }
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "plan.toml"
    path.write_text(text, encoding="utf-8")
    return path


def start(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    return subprocess.Popen([sys.executable, "-c", COMMAND, *arguments], env=environment, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, **options)


def foretrace(*arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    process = start(*arguments)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


def check_sound(out: Path) -> Results:
    """Every file of a campaign can be read, each line's file is there, and nothing names this machine."""
    results = Results.read(out)
    for line in results.lines.values():
        if line.content == "graph":
            graph = load_graph(out / line.file)
            # On a busy machine without what steps waited for a processor.
            pairs = zip(graph.meta.unprofiled_step_ns, line.unprofiled_step_ns, strict=True)
            assert all(0 < own <= timed for own, timed in pairs)
            assert len(graph.steps)
        if line.content == "kernels":
            frame = campaign.read_kernels(out, line.name)
            assert line.id in set(frame["id"])
    listed = {line.file for line in results.lines.values()}
    for path in out.rglob("*"):
        if path.is_file() and path.parent.name in ("graphs", "tables"):
            assert str(path.relative_to(out)) in listed
    text = (out / "items.jsonl").read_text(encoding="utf-8") + (out / "campaign.json").read_text(encoding="utf-8")
    assert str(ROOT) not in text
    assert os.uname().nodename not in text or len(os.uname().nodename) < 4
    return results


# --- plans, without torch ------------------------------------------------------------------------------------------


def test_reading_and_expanding_imports_no_torch() -> None:
    code = ("import sys; from tracer import campaign as c; [c.expand(c.read_plan(n)) for n in c.packaged_plans()];"
            "sys.exit(any(name.partition('.')[0] == 'torch' for name in sys.modules))")
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, timeout=240).returncode == 0


@pytest.mark.parametrize("name", H200)
def test_parts_of_the_h200_plans_fit_and_cover_all_items_in_order(name: str) -> None:
    plan = campaign.read_plan(name)
    items = campaign.expand(plan)
    cut = campaign.parts(items, plan.parts)
    assert [item for part in cut for item in part] == items
    assert plan.minutes <= 9
    for part in cut:
        assert part and sum(item.seconds for item in part) <= plan.minutes * 60
    assert campaign.expand(plan) == items  # deterministic


def test_the_h200_workloads_cover_what_is_asked_for() -> None:
    items = campaign.expand(campaign.read_plan("h200-workloads"))
    assert len(items) >= 60
    # DLRM stands for the recommenders: its minutes are few.
    nine = set(names()) - {"deepfm", "dcn_v2", "ncf"}
    assert {item.name for item in items} == nine
    for name in nine:
        own = [item for item in items if item.name == name]
        configured = [configure(name, **item.settings) for item in own]
        assert [item.split for item in own] == [split(settings) for settings in configured]
        assert {item.split for item in own} == {"fit", "held-out"} and len(set(map(size_text, configured))) >= 4
        assert len({item.settings["dtype"] for item in own}) >= 2
        assert {item.settings["compile"] for item in own} == {True, False}
    assert {item.settings["dtype"] for item in items} == {"fp32", "tf32", "bf16-autocast", "bf16"}
    assert {"adamw-foreach", "adamw-fused"} <= {item.settings["optimizer"] for item in items}
    assert any(item.settings["checkpointing"] for item in items)
    assert all((item.counts["timed"], item.counts["steps"]) == (30, 3) for item in items)
    assert all(item.settings["device"] == "cuda" for item in items)
    # The extremes of all nine workloads come first, in turn.
    assert [item.name for item in items[:9]] == [item.name for item in items[9:18]]
    assert {item.name for item in items[:9]} == nine


def test_every_family_with_sizes_has_both_sides_in_the_h200_kernels() -> None:
    sides: dict[str, set[str]] = {}
    for item in campaign.expand(campaign.read_plan("h200-kernels")):
        sides.setdefault(item.name, set()).add(item.split)
    assert set(sides) == set(FAMILIES)
    assert {name for name, found in sides.items() if found != {"fit", "held-out"}} == {"overheads"}


def test_the_side_follows_the_written_rule(tmp_path: Path) -> None:
    modes = QUICK + """
[[kernel]]
family = "gemm"
draw = { m = [16, 4096, 16], n = [16, 4096, 16], k = [16, 4096, 16] }
count = 20
product = { layout = ["nn", "tt"], dtype = ["bf16", "fp32"], op = ["mm", "addmm"] }
"""
    items = [item for item in campaign.expand(campaign.read_plan(write(tmp_path, modes))) if item.name == "gemm"]
    assert len(items) == 4 + 20 * 8 and {item.split for item in items} == {"fit", "held-out"}
    for item in items:
        text = "gemm batch=1 k={k} m={m} n={n}".format(**item.settings)
        held_out = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % 3 == 0
        assert item.split == ("held-out" if held_out else "fit")


def test_ids_depend_on_the_content_alone(tmp_path: Path) -> None:
    one = campaign.expand(campaign.read_plan(write(tmp_path, QUICK)))
    turned = QUICK.replace("m = [16, 32]", "m = [32, 16]").replace('"mine"', '"other"')
    two = campaign.expand(campaign.read_plan(write(tmp_path, turned)))
    assert {item.id: item.settings for item in one} == {item.id: item.settings for item in two}
    assert len({item.id for item in one}) == len(one) == 6
    # The same configuration twice runs once.
    assert len(campaign.expand(campaign.read_plan(write(tmp_path, QUICK + QUICK[len(PLAN):])))) == 6


@pytest.mark.parametrize("name", H200)
def test_a_rehearsal_changes_sizes_and_device_and_nothing_else(name: str) -> None:
    for item in campaign.expand(campaign.read_plan(name)):
        tiny = rehearsed(item)
        assert msgspec.structs.replace(tiny, settings=item.settings) == item
        modes: Any = ("dtype", "optimizer", "compile", "checkpointing", "accumulation")
        if item.kind == "workload":
            assert tiny.settings["device"] == "cpu"
        else:
            modes = FAMILIES[item.name].choices
            assert FAMILIES[item.name].checked(tiny.settings) == tiny.settings
        assert all(tiny.settings[mode] == item.settings[mode] for mode in modes)


LLAMA = PLAN + '[[workload]]\nworkload = "llama"\n'
MISTAKES = {
    "no TOML": ("name = ", "no TOML"),
    "an unknown key": (PLAN + "colour = 1\n", "`colour`"),
    "a value of the wrong type": (LLAMA + 'timed = "many"\n', "workload[0].timed"),
    "no device": (PLAN.replace('device = "cpu"', ""), "device"),
    "nothing to record": (PLAN, "nothing to record"),
    "an unknown workload": (PLAN + '[[workload]]\nworkload = "alexnet"\n', "alexnet"),
    "a bad value": (LLAMA + 'product = { dtype = ["int4"] }\n', "int4"),
    "an unknown family": (PLAN + '[[kernel]]\nfamily = "fft"\n', "fft"),
    "a missing size": (PLAN + '[[kernel]]\nfamily = "gemm"\nproduct = { m = [1], n = [1] }\n', "needs k"),
    "a size too small": (PLAN + '[[kernel]]\nfamily = "copy"\nproduct = { bytes = [0] }\n', "bytes=0"),
    "a short row": (LLAMA + 'columns = ["batch", "seq"]\nrows = [[1]]\n', "2 columns"),
    "columns without rows": (LLAMA + 'columns = ["batch"]\n', "no rows"),
    "an empty list": (LLAMA + 'product = { batch = [] }\n', "empty"),
    "a setting twice": (LLAMA + 'columns = ["seq"]\nrows = [[8]]\nproduct = { seq = [16] }\n', "twice"),
    "a draw without count": (PLAN + '[[kernel]]\nfamily = "copy"\ndraw = { bytes = [1, 10, 1] }\n', "count"),
    "a draw upside down": (PLAN + '[[kernel]]\nfamily = "copy"\ndraw = { bytes = [10, 1, 1] }\ncount = 1\n', "least"),
    "a part too long": (PLAN + 'minutes = 0.1\n[[workload]]\nworkload = "llama"\nseconds = 20\n', "more parts"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_plan_is_one_sentence(tmp_path: Path, mistake: str) -> None:
    text, told = MISTAKES[mistake]
    with pytest.raises(campaign.CampaignError) as error:
        campaign.expand(campaign.read_plan(write(tmp_path, text)))
    assert told in str(error.value)
    assert "\n" not in str(error.value)


def test_a_part_that_is_not_there(tmp_path: Path) -> None:
    for name, part, told in (("smoke", 2, "has one part, so there is no part 2; leave --part out."),
                             ("h200-kernels", 4, "has 3 parts, so there is no part 4; choose one from 1 to 3.")):
        with pytest.raises(campaign.CampaignError, match=told):
            campaign.run(campaign.read_plan(name), tmp_path / "out", campaign.RunOptions(part=part))


def test_mistakes_end_the_command_with_2(run: Run, tmp_path: Path) -> None:
    bad = write(tmp_path, MISTAKES["an unknown key"][0])
    for arguments in ((str(bad),), ("nowhere.toml",), ("smoke", "--minutes", "0"), ("smoke", "--minutes", "nan"),
                      ("smoke", "--part", "2")):
        code, _, error = run("campaign", "run", *arguments, "--out", tmp_path / "out")
        assert code == 2 and error.startswith("foretrace: ") and error.count("\n") == 1
    code, _, error = run("campaign", "status", tmp_path)
    assert code == 2 and "holds no campaign" in error


def test_the_commands_list_plans_and_workloads(run: Run) -> None:
    rows = run("campaign", "list", "--json").json
    assert Counter(row["plan"] for row in rows) == {"smoke": 1, "h200-kernels": 3, "h200-workloads": 3}
    assert all(row["expected_minutes"] <= 9 and row["held_out"] for row in rows)
    assert "h200-workloads" in run("campaign", "list").out
    found = run("workloads", "--json").json
    assert [info["name"] for info in found] == names()
    text = run("workloads").out
    for name in [*names(), "bf16-autocast", "kv_heads=", "preset real"]:
        assert name in text


# --- tables and directories ----------------------------------------------------------------------------------------


def row(item: str, variant: str, p50: float) -> dict[str, Any]:
    return {"id": item, "session": 0, "split": "fit", "rows": 1, "width": 2, "log": False, "op": "forward",
            "dtype": "fp32", "variant": variant, "runs": 3, "min_us": p50, "p50_us": p50, "kernels": ["a"]}


def test_parts_merge_and_a_later_measurement_replaces_the_earlier(tmp_path: Path) -> None:
    import pyarrow.parquet

    folder = tmp_path / tables.KERNELS
    path = tables.write_part(folder, tmp_path, "softmax", "000-00001", [row("a", "warm", 1.0), row("b", "warm", 2.0)])
    assert all(field.metadata[b"description"] for field in pyarrow.parquet.read_schema(path))
    tables.write_part(folder, tmp_path, "softmax", "001-00001", [row("a", "warm", 3.0)])
    before = campaign.read_kernels(tmp_path, "softmax")
    tables.merge_parts(folder, tmp_path)
    after = campaign.read_kernels(tmp_path, "softmax")
    assert [path.name for path in folder.iterdir()] == ["softmax.parquet"]
    assert sorted(zip(after["id"], after["p50_us"], strict=True)) == [("a", 3.0), ("b", 2.0)]
    assert before.equals(after)
    tables.write_part(folder, tmp_path, "softmax", "002-00001", [row("b", "warm", 4.0)])
    assert sorted(campaign.read_kernels(tmp_path, "softmax")["p50_us"]) == [3.0, 4.0]


@pytest.mark.parametrize(("text", "says"), [("{", "changed or damaged"), ('{"version": 99}', "newer")])
def test_a_damaged_directory_is_one_sentence(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "campaign.json").write_text(text, encoding="utf-8")
    with pytest.raises(campaign.CampaignError, match=says):
        Results.read(tmp_path)


def test_failures_are_told_without_paths() -> None:
    told = sentence(RuntimeError("CUDA out of memory.\nSee /some/where/deep/file.py, line 3\nmore"))
    assert told == "RuntimeError: CUDA out of memory. See file.py, line 3."
    assert is_unsupported(RuntimeError("No available kernel. Aborting execution."))
    assert not is_unsupported(RuntimeError("CUDA out of memory"))


# --- runs, in real processes ---------------------------------------------------------------------------------------

MINUTES = 20.0
"""More than any run here takes where the machine is busy with something else; none waits for its end."""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that hardly gets the processor is no hanging one."""
    from tracer.campaign import runner

    monkeypatch.setattr(runner, "LEAST_TIMEOUT_S", 600.0)


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip("torch", reason="recording needs torch")


@pytest.mark.slow
def test_smoke_is_killed_half_way_resumed_and_sound(torch: Any, tmp_path: Path) -> None:
    out = tmp_path / "smoke"
    items = campaign.expand(campaign.read_plan("smoke"))
    process = start("campaign", "run", "smoke", "--out", str(out), "--minutes", "1")
    deadline, lines = time.monotonic() + 60, out / "items.jsonl"
    try:
        while time.monotonic() < deadline and (not lines.exists() or lines.read_text().count("\n") < 3):
            time.sleep(0.02)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    half = check_sound(out)
    assert 3 <= len(half.lines) < len(items)
    for more, told in (((), "--resume"), (("--resume", "--rehearse"), "do not mix")):
        refused = foretrace("campaign", "run", "smoke", "--out", str(out), *more)
        assert refused.returncode == 2 and told in refused.stderr
    ran = foretrace("campaign", "run", "smoke", "--out", str(out), "--minutes", "5", "--resume", timeout=300)
    assert ran.returncode == 0, ran.stderr
    whole = check_sound(out)
    assert set(whole.lines) == {item.id for item in items}
    assert all(line.status == "ok" for line in whole.lines.values())
    assert all(whole.lines[name] == line for name, line in half.lines.items())
    assert sorted(path.name for path in out.iterdir()) == ["campaign.json", "graphs", "items.jsonl", "kernels"]
    assert not list(out.glob("kernels/*.part.parquet"))
    assert len(whole.index.sessions) == 2 and whole.index.sessions[0]["software"]["torch"]
    for line in whole.lines.values():
        if line.kind == "workload":
            assert len(line.unprofiled_step_ns) == 10 and len(line.profiled_step_ns) == 3
            assert line.median_ns and line.profiler_slowdown and line.peak_memory
    again = foretrace("campaign", "run", "smoke", "--out", str(out), "--resume")
    assert again.returncode == 0 and "31 of 31 were there before" in plain(again.stdout)
    told = json.loads(foretrace("campaign", "status", str(out), "--json").stdout)
    assert told["index"]["ok"] == len(items) == len(told["items"])


def test_micro_benchmarks_say_what_ran_and_how_long_and_none_overruns_the_box(torch: Any, tmp_path: Path) -> None:
    said: list[str] = []
    plan = QUICK.replace("threads = 1", """threads = 1
minutes = 60
[[kernel]]
family = "norm"
seconds = 500
product = { rows = [8], width = [16, 32], dtype = ["fp32"] }
""")
    outcome = campaign.run(campaign.read_plan(write(tmp_path, plan)), tmp_path / "out",
                           campaign.RunOptions(minutes=8, say=said.append))
    assert Counter(result.name for result in outcome.results) == {"gemm": 4, "softmax": 2} and said
    assert [result.status for result in outcome.results] == ["ok"] * 6
    assert outcome.left == 2 and "time box" in outcome.stopped
    gemm = campaign.read_kernels(tmp_path / "out", "gemm")
    assert len(gemm) == 8 and set(gemm["variant"]) == {"warm", "cold"}
    assert (gemm["runs"] >= 3).all() and (gemm["min_us"] <= gemm["p50_us"]).all()
    assert (gemm["p10_us"] <= gemm["p90_us"]).all()
    assert all("aten::mm" in kernels for kernels in gemm["kernels"])
    assert (gemm["flops"] == 2.0 * gemm["m"] * gemm["n"] * gemm["k"]).all()
    assert (gemm["bytes"] == 4.0 * (gemm["m"] * gemm["k"] + gemm["n"] * gemm["k"] + gemm["m"] * gemm["n"])).all()
    with pytest.raises(campaign.CampaignError, match="no family"):
        campaign.read_kernels(tmp_path / "out", "fft")


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "fused"])
def test_each_family_of_the_h200_plan_is_measured_in_rehearsal(torch: Any, name: str) -> None:
    """Through the same code as on a GPU; ``HostMachine`` stands in for its clock and streams."""
    from tracer.campaign.lab import Lab
    from tracer.campaign.micro import measure

    threads, lab = torch.get_num_threads(), Lab("cpu")
    torch.set_num_threads(1)
    first: dict[Any, Any] = {}
    for item in campaign.expand(campaign.read_plan("h200-kernels")):
        if item.name == name:
            first.setdefault(tuple(item.settings[choice] for choice in FAMILIES[name].choices), item)
    try:
        for item in list(first.values())[:12]:
            tiny = rehearsed(item).settings
            lacks = name == "attention" and tiny["backend"] in ("cudnn", "efficient")
            try:
                rows = measure(name, tiny, lab)
            except RuntimeError as error:  # torch 2.6 has neither fp8 nor grouped heads on a CPU
                # A host queues nothing, but may be held up for that long.
                assert tiny.get("case") == "queue_depth" or is_unsupported(error)
                assert lacks or "case" in tiny or tiny.get("dtype") == "fp8" or tiny["heads"] != tiny["kv_heads"]
                continue
            assert rows and all(row["p50_us"] >= 0 and row["runs"] for row in rows) and not lacks
            assert set(rows[0]) <= set(tables.describe(FAMILIES[name]))
    finally:
        torch.set_num_threads(threads)
    assert first


@pytest.mark.slow
def test_the_beginning_of_the_h200_workloads_is_rehearsed(torch: Any, tmp_path: Path) -> None:
    out = tmp_path / "rehearsal"
    # On a crowded machine a worker may need all of a short run to start: then the next run goes on.
    for resume in ((), *[("--resume",)] * 5):
        ran = foretrace("campaign", "run", "h200-workloads", "--part", "1", "--out", str(out), "--rehearse",
                        "--minutes", "0.25", *resume, timeout=240)
        assert ran.returncode == 0, ran.stderr
        results = check_sound(out)
        if results.index.ok:
            break
    assert results.index.rehearsal and results.index.ok and "Go on with --resume" in plain(ran.stdout)
    first = campaign.expand(campaign.read_plan("h200-workloads"))
    assert set(results.lines) <= {item.id for item in first}
    line = results.lines[first[0].id]
    assert line.settings["device"] == "cpu" and line.settings["dtype"] == first[0].settings["dtype"]
    assert len(line.unprofiled_step_ns) == 30 and all("the machine was busy" in note for note in line.notes)


@pytest.mark.slow
@pytest.mark.parametrize(("megabytes", "content"), [(0.2, "summary"), (0.0012, "times")])
def test_the_directory_stays_below_its_size(torch: Any, tmp_path: Path, megabytes: float, content: str) -> None:
    """A graph's share too small for the second keeps its tables instead; too small for those, its times."""
    import pandas

    plan = PLAN + '[[workload]]\nworkload = "lstm"\npreset = "tiny"\ntimed = 3\nproduct = { batch = [2, 3] }\n'
    done = campaign.run(campaign.read_plan(write(tmp_path, plan)), tmp_path / "out",
                        campaign.RunOptions(minutes=MINUTES, max_mb=megabytes))
    assert {result.content for result in done.results} == {content}
    check_sound(tmp_path / "out")
    if content == "summary":
        table = pandas.read_parquet(tmp_path / "out" / done.results[0].file)
        assert "op" in set(table["table"]) and (table["count"] > 0).all() and "aten::lstm" in set(table["name"])
    else:
        assert "reached" in done.stopped or len(done.results) == 2


def test_a_full_disk_stops_the_campaign_with_one_sentence(torch: Any, tmp_path: Path) -> None:
    plan = campaign.read_plan(write(tmp_path, PLAN + '[[workload]]\nworkload = "lstm"\npreset = "tiny"\ntimed = 2\n'))
    said: list[str] = []
    with small_disk(tmp_path, "150k") as disk:
        with pytest.raises(campaign.CampaignError) as told:
            campaign.run(plan, disk / "out", campaign.RunOptions(minutes=MINUTES, say=said.append))
        assert f"the disk of {disk / 'out'} is too full for the next item" in str(told.value)
        assert "--resume" in str(told.value) and "\n" not in str(told.value)
        assert not said and not check_sound(disk / "out").lines  # no item is blamed, so that all are done on resuming
        assert sorted(path.name for path in (disk / "out").iterdir()) == ["campaign.json", "items.jsonl"]


def test_whose_disk_is_full(tmp_path: Path) -> None:
    task = Task(campaign.expand(campaign.read_plan(write(tmp_path, QUICK)))[0], str(tmp_path))
    elsewhere = OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "cache" / "kernel.so"))
    assert full_folder(DiskFullError("full"), task) == ""  # by its cause
    ours = DiskFullError("full")
    ours.__cause__ = elsewhere
    assert full_folder(ours, task) == str(tmp_path)
    assert full_folder(elsewhere, task) == str(tmp_path / "cache")
    assert full_folder(OSError(errno.EACCES, "no"), task) == ""


@pytest.mark.slow
def test_a_failing_item_is_a_result_and_the_run_goes_on(torch: Any, tmp_path: Path) -> None:
    plan = QUICK + """
[[workload]]
workload = "lstm"
preset = "tiny"
timed = 2
product = { batch = [1000000000000] }
"""
    outcome = campaign.run(campaign.read_plan(write(tmp_path, plan)), tmp_path / "out",
                           campaign.RunOptions(minutes=MINUTES))
    statuses = Counter((result.kind, result.status) for result in outcome.results)
    assert statuses == {("kernel", "ok"): 6, ("workload", "failed"): 1}
    failed = next(result for result in outcome.results if result.status == "failed")
    assert failed.reason.endswith(".") and str(ROOT) not in failed.reason
    # It alone is tried again.
    again = campaign.run(campaign.read_plan(write(tmp_path, plan)), tmp_path / "out",
                         campaign.RunOptions(minutes=MINUTES, resume=True))
    assert [result.id for result in again.results] == [failed.id]
    assert again.done_before == 6


@pytest.mark.slow
def test_a_hanging_and_a_dying_worker_cost_one_item_each(torch: Any, tmp_path: Path,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    from tracer.campaign import runner

    # What a driver fault does: the process goes; what a dead-lock does: nothing comes.
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        "import sys\n"
        "if any('campaign.worker' in a for a in sys.orig_argv):\n"
        "    import os, time\n"
        "    from tracer.campaign import record\n"
        "    real = record.measure\n"
        "    def measure(family, settings, lab, visit=1):\n"
        "        if settings.get('k') == 48 and settings['m'] == 16: os.abort()\n"
        "        if settings.get('k') == 48: time.sleep(60)\n"
        "        return real(family, settings, lab)\n"
        "    record.measure = measure\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(site))  # workers look for modules where this process does
    monkeypatch.setattr(runner, "LEAST_TIMEOUT_S", 12.0)  # of which a busy machine needs some to begin
    monkeypatch.setattr(runner, "TIMEOUT_FACTOR", 1.0)
    outcome = campaign.run(campaign.read_plan(write(tmp_path, QUICK)), tmp_path / "out",
                           campaign.RunOptions(minutes=2))
    reasons = {result.settings["m"]: result.reason for result in outcome.results if result.status == "failed"}
    assert set(reasons) == {16, 32}
    assert "signal 6" in reasons[16]
    assert "longer than 12 s" in reasons[32]
    assert sum(result.status == "ok" for result in outcome.results) == 4


def test_a_plan_for_a_gpu_without_one_says_so(torch: Any, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(campaign.CampaignError, match=r"sees no CUDA device.*--rehearse"):
        campaign.run(campaign.read_plan("h200-kernels"), tmp_path / "out", campaign.RunOptions(minutes=1))
    assert not (tmp_path / "out").exists()  # nothing was measured


@pytest.mark.parametrize("name", ["layer_norm", "group_norm", "cross_entropy", "rms_norm", "bag", "attention"])
def test_gradients_are_autograds_whichever_way_they_are_run(torch: Any, name: str) -> None:
    """A host runs a chain of nodes without the engine, whose own time is no work of theirs; other graphs with it."""
    from tracer.campaign.lab import Lab

    lab, functional = Lab("cpu"), torch.nn.functional
    x, image = lab.random(8, 16, grad=True), lab.random(2, 8, 4, 4, grad=True)
    scale, channels = lab.random(16, grad=True), lab.random(8, grad=True)
    query, key, value = (lab.random(1, 2, 32, 8, grad=True) for _ in range(3))
    output, inputs = {
        "layer_norm": lambda: (functional.layer_norm(x, (16,), scale), (x, scale)),
        "group_norm": lambda: (functional.group_norm(image, 4, channels), (image, channels)),
        "cross_entropy": lambda: (functional.cross_entropy(x, lab.indices(8, high=16)), (x,)),
        "rms_norm": lambda: (functional.rms_norm(x, (16,), scale), (x, scale)),
        "bag": lambda: (functional.embedding_bag(lab.indices(20, high=8), x, torch.arange(0, 20, 4), mode="sum"), (x,)),
        "attention": lambda: (functional.scaled_dot_product_attention(query, key, value), (query, key, value)),
    }[name]()
    gradient = None if output.dim() == 0 else lab.random_like(output)
    run = lab.gradients(output, inputs, gradient)
    for _ in range(2):
        found = run()
        mine = [found] if isinstance(found, torch.Tensor) else [one for one in found if one is not None]
        for wanted in torch.autograd.grad(output, inputs, gradient, retain_graph=True):
            assert any(one.shape == wanted.shape and torch.allclose(one, wanted) for one in mine)
