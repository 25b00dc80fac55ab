"""The command line: what it prints, its JSON, and how it fails."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from micro import Micro
from report_support import CPU_SMALL, ROOT, real_trace, worked_step
from said import Ran, Run, plain

from step_views.cli.console import Column, Report, shortened

COMMAND = "import sys; sys.argv[0] = 'foretrace'; from foretrace.commands import main; sys.exit(main())"
TRACE = str(CPU_SMALL / "kineto.json.gz")


def process(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        encoding="utf-8", env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p), **environment})


@pytest.fixture
def worked(tmp_path: Path) -> Path:
    return worked_step().write(tmp_path / "worked.json")


def one_sentence(ran: Ran, *parts: str) -> None:
    """Exit code 2, nothing on stdout, one line on stderr."""
    assert ran.code == 2
    assert ran.out == ""
    assert ran.err.startswith("foretrace: ")
    assert ran.err.count("\n") == 1
    assert "Traceback" not in ran.err
    for part in parts:
        assert part in ran.err


# --- help and version --------------------------------------------------------------------------------------------


def test_help_names_the_commands(run: Run) -> None:
    ran = run("--help")
    assert ran.code == 0
    for command in ("inspect", "breakdown", "replay", "convert"):
        assert command in ran.out
        assert run(command, "--help").code == 0


def test_version(run: Run) -> None:
    ran = run("--version")
    assert ran.code == 0
    assert ran.out.startswith("foretrace ")


# --- inspect -----------------------------------------------------------------------------------------------------


def test_inspect_json_of_a_cpu_trace(run: Run) -> None:
    ran = run("inspect", TRACE, "--json")
    assert ran.code == 0
    assert ran.err == ""
    found = ran.json
    assert (found["ranks"], found["world_size"], found["steps"], found["ops"]) == (1, 1, 5, 9435)
    assert (found["kernels"], found["collectives"], found["launches"]) == (0, 0, 0)
    assert found["device"] is None
    assert found["gpu_active_us"] is None
    assert any("no GPU work" in note for note in found["notes"])
    assert found["loss"]["events_read"] > 9435
    assert 0.01 < found["host_outside_ops_share"] < 0.2
    (rank,) = found["per_rank"]
    assert rank["steps"] == 5
    assert rank["profiler_flags"]["record_shapes"] is True


def test_inspect_by_hand(run: Run, worked: Path) -> None:
    found = run("inspect", worked, "--json").json
    assert (found["ops"], found["kernels"], found["launches"], found["calls"]) == (4, 8, 8, 9)
    # From 0 to 1400: three kernels of 20, four of 50 one after another, one of 100.
    assert found["per_rank"][0]["window_us"] == 1400
    # Both steps count: one has three kernels of 20 and four of 50, the other one of 100.
    assert found["gpu_active_us"] == (260.0 + 100.0) / 2
    # Step 0 has 7 calls of 5 and nothing else; step 1 has outer, item and after.
    assert found["host_outside_ops_share"] == pytest.approx((600 - 35 + 400 - 100 - 45 - 10) / 1000)
    assert (found["recorded"]["step_us"], found["recorded"]["unprofiled_us"]) == (500.0, None)
    assert "0.500 ms under the profiler (mean of 2 steps)" in plain(run("inspect", worked).out)


def test_inspect_tells_the_step_by_both_clocks(run: Run) -> None:
    found = run("inspect", CPU_SMALL, "--json").json["recorded"]
    assert 0 < found["unprofiled_us"] < found["step_us"]
    said = plain(run("inspect", CPU_SMALL).out)
    assert (f"recorded step {found['step_us'] / 1e3:,.3f} ms under the profiler (mean of 5 steps), "
            f"{found['unprofiled_us'] / 1e3:,.3f} ms without it (median of 30)") in said


def test_overlapping_kernels_count_once(run: Run, tmp_path: Path) -> None:
    trace = Micro().step(0, 100)
    trace.launch(0, 5, (7, 10, 40)), trace.launch(5, 5, (8, 20, 10)), trace.launch(15, 5, (9, 40, 20))
    assert run("inspect", trace.write(tmp_path / "t.json"), "--json").json["gpu_active_us"] == 50.0


def test_inspect_tells_that_there_is_no_gpu(run: Run) -> None:
    ran = run("inspect", CPU_SMALL)
    assert ran.code == 0
    assert "no GPU work recorded" in plain(ran.out)
    assert "of 9,4" in plain(ran.out)  # the join


@pytest.mark.real_traces
def test_inspect_eight_ranks(run: Run) -> None:
    found = run("inspect", real_trace("dlrm-8xV100-2023"), "--json").json
    assert (found["ranks"], found["world_size"], found["steps"]) == (8, 8, 1)
    assert "V100" in found["device"]
    assert (found["kernels"], found["collectives"]) == (2244, 64)
    assert found["execution_trace"]["joined"] >= 0.999 * found["execution_trace"]["candidates"] > 0
    assert [rank["rank"] for rank in found["per_rank"]] == list(range(8))
    assert found["gpu_active_us"] == max(rank["gpu_active_us"] for rank in found["per_rank"])
    assert found["loss"]["orphan_kernels"] == sum(rank["loss"]["orphan_kernels"] for rank in found["per_rank"]) == 128


# --- breakdown ---------------------------------------------------------------------------------------------------


def test_breakdown_table_and_json_agree(run: Run, worked: Path) -> None:
    step = run("breakdown", worked, "--json", "--step", "ProfilerStep#1").json["steps"][0]
    assert (step["rank"], step["simulated_us"], sum(step["span_bounds_us"].values())) == (0, 400.0, 400.0)
    ran = run("breakdown", worked, "--step", "ProfilerStep#1")
    assert ran.code == 0
    assert "0.100" in ran.out
    assert "[red]mul<4>(float*)" in ran.out  # no markup
    assert all(len(line) <= 100 for line in ran.out.splitlines())


def test_top_limits_every_list(run: Run) -> None:
    steps = run("breakdown", TRACE, "--json", "--top", 3).json["steps"]
    assert [len(step["operations"]) for step in steps] == [3] * 5
    assert all(len(step["operations"]) > 20 for step in run("breakdown", TRACE, "--json").json["steps"])


def test_breakdown_of_a_cpu_trace_is_the_hosts(run: Run) -> None:
    found = run("breakdown", TRACE, "--json", "--step", "-1").json
    (step,) = found["steps"]
    assert step["step"] == "ProfilerStep#7"
    assert step["span_bounds_us"]["host"] == step["simulated_us"]
    assert any("no GPU work" in note for note in found["notes"])


@pytest.mark.real_traces
@pytest.mark.parametrize("command", ["inspect", "breakdown", "replay"])
@pytest.mark.parametrize("name", ["dlrm-8xV100-2023", "rank0-1-of-128", "vllm-cuda-graph", "gpu-only-MI210"])
def test_tables_stay_in_their_width_and_whole(run: Run, command: str, name: str) -> None:
    ran = run(command, real_trace(name))
    assert ran.code == 0
    assert ran.err == ""
    assert all(len(line.rstrip()) <= 105 for line in ran.out.splitlines())
    # Only names are cut: no digit or percent sign is followed by an ellipsis at the end of a numeric cell.
    assert not any(cell[0].isdigit() and cell.endswith("…") and cell[:-1].replace(".", "").replace(",", "").isdigit()
                   for line in ran.out.splitlines() for cell in line.split())


# --- replay ------------------------------------------------------------------------------------------------------


def test_replay_json_has_the_promised_keys(run: Run, worked: Path) -> None:
    found = run("replay", worked, "--json").json
    assert found["steps"][1] == {
        "rank": 0, "step": "ProfilerStep#1", "measured_us": 400.0, "replayed_us": 400.0, "error": 0.0,
        "counts": True, "why_not": None}
    assert {found[key] for key in ("median_abs_error", "max_abs_error", "unexplained_share")} == {0.0}
    assert found["kernel_end_p95_share"] == 0.0
    assert found["reproducible"] is True
    assert found["ranks"][0]["launch_queue_source"] == "default"


def test_what_if_is_measured_against_the_recording(run: Run, worked: Path) -> None:
    found = run("replay", worked, "--scale-kernels", 2, "--json").json
    step = found["steps"][1]
    assert (step["measured_us"], step["replayed_us"], step["error"]) == (400.0, 500.0, 0.25)
    assert found["kernel_end_p95_share"] is None
    assert any("× 2" in note for note in found["notes"])


def test_replay_of_a_cpu_trace_says_what_it_is(run: Run) -> None:
    ran = run("replay", TRACE)
    assert ran.code == 0
    assert "no GPU work" in plain(ran.out)
    assert "playback of the host's own recorded time" in plain(ran.out)
    found = run("replay", TRACE, "--json").json
    assert found["gpu_work"] is False
    assert len(found["steps"]) == 5


def test_constants_and_residuals(run: Run, worked: Path) -> None:
    ran = run("replay", worked, "--constants", "--residuals")
    assert ran.code == 0
    assert "latency/compute" in ran.out
    assert "playback" in ran.out
    constants = run("replay", worked, "--constants", "--json").json["constants"]
    assert constants[0]["latency/compute"] == 5.0
    assert constants[0]["gap/compute/compute"] == 1.0


@pytest.mark.real_traces
def test_what_decides_is_told_with_its_evidence(run: Run) -> None:
    """The host of the first is behind its GPU, which takes all of the step of the second one."""
    for name, bound in (("resnet50-ddp-2xA100/rank0.kineto.json.gz", "host"), ("resnet50-V100", "compute")):
        found = run("predict", real_trace(name), "--json").json
        savings = found["savings_us"]
        assert found["bound"] == bound
        assert (savings["host"] > savings["GPU"]) == (bound == "host"), savings


@pytest.mark.real_traces
def test_what_no_rule_explains_is_told(run: Run) -> None:
    ran = run("replay", real_trace("rank0-1-of-128"))
    assert "GPU timeline not reproducible" in plain(ran.out)
    assert run("replay", real_trace("rank0-1-of-128"), "--json").json["reproducible"] is False


@pytest.mark.parametrize("name", ["out.json", "out.json.gz"])
def test_timeline_is_written(run: Run, worked: Path, tmp_path: Path, name: str) -> None:
    out = tmp_path / name
    ran = run("replay", worked, "--timeline", out, "--json")
    assert ran.json["timeline"] == str(out)
    content = gzip.decompress(out.read_bytes()) if name.endswith(".gz") else out.read_bytes()
    assert len(json.loads(content)["traceEvents"]) > 50
    assert "Timeline written to" in plain(run("replay", worked, "--timeline", out).out)


# --- convert -----------------------------------------------------------------------------------------------------


def without_source(value: Any) -> Any:
    """A report without where its input lay."""
    if isinstance(value, dict):
        return {k: without_source(v) for k, v in value.items() if k not in ("source", "notes")}
    return [without_source(v) for v in value] if isinstance(value, list) else value


def test_every_command_reads_the_converted_file(run: Run, tmp_path: Path) -> None:
    saved = tmp_path / "job.foretrace"
    ran = run("convert", CPU_SMALL, "-o", saved, "--json")
    assert ran.code == 0
    assert ran.json["bytes"] == saved.stat().st_size
    for command in ("inspect", "breakdown", "replay"):
        of_file, of_trace = (run(command, path, "--json") for path in (saved, CPU_SMALL))
        assert of_file.code == 0
        assert without_source(of_file.json) == without_source(of_trace.json)
    again = tmp_path / "again.foretrace"
    assert run("convert", saved, "-o", again).code == 0
    assert again.read_bytes() == saved.read_bytes()


def test_convert_does_not_overwrite_what_it_reads(run: Run, worked: Path) -> None:
    before = worked.read_bytes()
    one_sentence(run("convert", worked, "-o", worked), "is one of the files being read")
    one_sentence(run("convert", worked.parent, "-o", worked), "is one of the files being read")
    one_sentence(run("replay", worked, "--timeline", worked), "is one of the files being read")
    assert worked.read_bytes() == before


# --- bad input ---------------------------------------------------------------------------------------------------


def bad_files(folder: Path) -> dict[str, Path]:
    whole = gzip.compress(json.dumps({"traceEvents": []}).encode())
    contents = {
        "empty.json": b"", "no_json.json": b"hello\n", "no_trace.json": b'{"a": 1}', "no_events.json.gz": whole,
        "cut.json.gz": whole[:10], "junk.foretrace": b"junk", "cut.foretrace": b"PK\x03\x04" + bytes(40),
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    (folder / "nothing").mkdir()
    return {name: folder / name for name in [*contents, "missing.json", "nothing", "none*.json"]}


@pytest.mark.parametrize("command", ["inspect", "breakdown", "replay", "convert"])
@pytest.mark.parametrize("name", [
    "empty.json", "no_json.json", "no_trace.json", "no_events.json.gz", "cut.json.gz", "junk.foretrace",
    "cut.foretrace", "missing.json", "nothing", "none*.json"])
def test_bad_input(run: Run, tmp_path: Path, command: str, name: str) -> None:
    path = bad_files(tmp_path)[name]
    extra = ["-o", tmp_path / "out.foretrace"] if command == "convert" else ["--json"]
    one_sentence(run(command, path, *extra), name if name != "none*.json" else "none*")
    assert not (tmp_path / "out.foretrace").exists()


def test_a_corrupt_saved_file(run: Run, worked: Path, tmp_path: Path) -> None:
    saved = tmp_path / "job.foretrace"
    run("convert", worked, "-o", saved)
    content = bytearray(saved.read_bytes())
    content[len(content) // 2] ^= 255
    saved.write_bytes(bytes(content))
    one_sentence(run("inspect", saved), "job.foretrace is corrupt")
    saved.write_bytes(bytes(content[: len(content) // 2]))
    one_sentence(run("inspect", saved), "job.foretrace")


@pytest.mark.parametrize("arguments", [
    ("replay", TRACE, "--scale-kernels", "-1"), ("replay", TRACE, "--scale-kernels", "nan"),
    ("replay", TRACE, "--scale-kernels", "inf"), ("breakdown", TRACE, "--step", "nonsense"),
    ("breakdown", TRACE, "--step", "99"),
])
def test_impossible_wishes(run: Run, arguments: tuple[str, ...]) -> None:
    one_sentence(run(*arguments))


@pytest.mark.parametrize("arguments", [
    (), ("inspect",), ("nonsense",), ("breakdown", TRACE, "--top", "0"), ("breakdown", TRACE, "--top", "x"),
    ("replay", TRACE, "--scale-kernels", "x"), ("replay", TRACE, "--nonsense"), ("convert", TRACE),
])
def test_wrong_usage(run: Run, arguments: tuple[str, ...]) -> None:
    ran = run(*arguments)
    assert ran.code == 2
    assert "Traceback" not in ran.err


@pytest.mark.parametrize("where", ["none/out.json", "worked.json/out.json", "."])
def test_outputs_that_cannot_be_written_are_refused_early(run: Run, worked: Path, tmp_path: Path, where: str) -> None:
    one_sentence(run("replay", tmp_path / "missing.json", "--timeline", tmp_path / where), "none" if "none" in where
                 else "")
    one_sentence(run("convert", worked, "-o", tmp_path / where))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["worked.json"]


def test_convert_leaves_devices_alone(run: Run, worked: Path) -> None:
    one_sentence(run("convert", worked, "-o", os.devnull), "no regular file")
    assert Path(os.devnull).is_char_device()


# --- other failures ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("error", "code", "part"), [
    (KeyboardInterrupt(), 130, "Interrupted"), (MemoryError(), 1, "not enough memory"),
    (OSError(28, "No space left on device"), 2, "No space left"), (RuntimeError("odd\nthing"), 1, "odd thing"),
])
def test_every_failure_is_one_sentence(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, part: str,
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("tracer.job.read_job", failing)
    ran = run("inspect", TRACE)
    assert ran.code == code
    assert part in ran.err
    assert ran.err.count("\n") == 1
    debugged = run("inspect", TRACE, "--debug")
    assert debugged.code == code
    assert "Traceback" in debugged.err
    monkeypatch.setenv("FORETRACE_DEBUG", "1")
    assert "Traceback" in run("inspect", TRACE).err


def test_a_reader_that_leaves_is_no_error() -> None:
    child = process("breakdown", TRACE, "--json")
    assert child.stdout is not None
    assert child.stderr is not None
    assert child.stdout.read(1) == "{"
    child.stdout.close()
    assert child.stderr.read() == ""
    assert child.wait(timeout=120) == 141
    child.stderr.close()


INTERRUPTED = """
import atexit, os, runpy, signal, sys
when = sys.argv.pop(1)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are born ignoring it
interrupt = lambda: os.kill(os.getpid(), signal.SIGINT)
sys.addaudithook(lambda event, names: event == "import" and names[0] == when and interrupt())
if when == "the end":
    atexit.register(interrupt)
runpy.run_module("foretrace", run_name="__main__", alter_sys=True)
"""


@pytest.mark.skipif(os.name == "nt", reason="no signals")
def test_an_interruption_is_one_sentence_however_early_or_late() -> None:
    moments = ["foretrace.commands", "typer", "tempfile", "step_views.cli.console", "numpy", "the end"]
    running = [subprocess.Popen([sys.executable, "-c", INTERRUPTED, when, "inspect", TRACE], stdout=subprocess.DEVNULL,
                                stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
               for when in moments]
    found = {when: (one.communicate()[1], one.returncode) for when, one in zip(moments, running, strict=True)}
    said = "foretrace: Interrupted.\n"
    assert found == {when: ("" if when.endswith("console") else said, 130) for when in moments}  # typer says nothing


def test_a_terminal_without_unicode_is_no_error() -> None:
    child = process("breakdown", TRACE, PYTHONIOENCODING="ascii")
    out, err = child.communicate(timeout=120)
    assert child.returncode == 0
    assert err == ""
    assert "aten::mm" in out


def test_nothing_steers_the_terminal(run: Run, tmp_path: Path) -> None:
    trace = worked_step().op("evil\x1b[2J\x07\u202eop", 1300, 1380)
    ran = run("breakdown", trace.write(tmp_path / "t.json"), "--top", 50)
    assert ran.code == 0
    assert "evil\\x1b[2J" in ran.out
    assert "\x1b" not in ran.out
    ran = run("breakdown", tmp_path / "t.json", "--json")
    assert "\x1b" not in ran.out


def test_names_are_shortened_where_they_matter_least() -> None:
    assert shortened("void kernel<4>", 20) == "void kernel<4>"
    assert shortened("void kernel<4>(int)", 14) == "kernel<4>(int)"
    assert shortened("void kernel<4>(int)", 8) == "kernel<…"
    assert shortened("Net/Encoder/Layer_3", 9, keep_end=True) == "…/Layer_3"


def test_a_full_table_is_cut_once_and_fits(capsys: pytest.CaptureFixture[str]) -> None:
    columns = [Column("operation", name=True), Column("module", name=True, path=True), Column("ms"), Column("n")]
    Report().table("Title", columns, [["o" * 70 + "end", "start" + "m" * 70, "1,234.567", "89"]] * 2)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) == 100
    assert lines[-1].split() == ["o" * 40 + "…", "…" + "m" * 41, "1,234.567", "89"]
