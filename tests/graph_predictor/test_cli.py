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
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert ran.err.startswith("foretrace: ") and "Traceback" not in ran.err
    for part in parts:
        assert part in ran.err


def test_help_names_the_commands_and_a_version_is_told(run: Run) -> None:
    ran = run("--help")
    assert ran.code == 0
    for command in ("inspect", "breakdown", "replay", "convert"):
        assert command in ran.out
        assert run(command, "--help").code == 0
    assert run("--version").out.startswith("foretrace ")


def test_inspect_of_a_cpu_trace(run: Run) -> None:
    ran = run("inspect", CPU_SMALL, "--json")
    found, recorded = ran.json, ran.json["recorded"]
    assert (ran.code, ran.err) == (0, "")
    assert (found["ranks"], found["world_size"], found["steps"], found["ops"]) == (1, 1, 5, 9435)
    assert (found["kernels"], found["collectives"], found["launches"]) == (0, 0, 0)
    assert found["device"] is found["gpu_active_us"] is None
    assert found["loss"]["events_read"] > 9435
    assert 0.01 < found["host_outside_ops_share"] < 0.2
    (rank,) = found["per_rank"]
    assert rank["steps"] == 5 and rank["profiler_flags"]["record_shapes"] is True
    said = plain(run("inspect", CPU_SMALL).out)
    assert "no GPU work recorded" in said and "of 9,4" in said  # the join
    # The step by both clocks.
    assert 0 < recorded["unprofiled_us"] < recorded["step_us"]
    assert (f"recorded step {recorded['step_us'] / 1e3:,.3f} ms under the profiler (mean of 5 steps), "
            f"{recorded['unprofiled_us'] / 1e3:,.3f} ms without it (median of 30)") in said


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


def test_overlapping_kernels_count_once(run: Run, tmp_path: Path) -> None:
    trace = Micro().step(0, 100)
    trace.launch(0, 5, (7, 10, 40)), trace.launch(5, 5, (8, 20, 10)), trace.launch(15, 5, (9, 40, 20))
    assert run("inspect", trace.write(tmp_path / "t.json"), "--json").json["gpu_active_us"] == 50.0


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


def test_breakdown_table_and_json_agree(run: Run, worked: Path) -> None:
    step = run("breakdown", worked, "--json", "--step", "ProfilerStep#1").json["steps"][0]
    assert (step["rank"], step["simulated_us"], sum(step["span_bounds_us"].values())) == (0, 400.0, 400.0)
    ran = run("breakdown", worked, "--step", "ProfilerStep#1")
    assert "0.100" in ran.out
    assert "[red]mul<4>(float*)" in ran.out  # no markup
    assert all(len(line) <= 100 for line in ran.out.splitlines())


def test_breakdown_and_replay_of_a_cpu_trace_are_the_hosts(run: Run) -> None:
    found = run("breakdown", TRACE, "--json", "--step", "-1", "--top", 3).json
    (step,) = found["steps"]
    assert step["step"] == "ProfilerStep#7" and len(step["operations"]) == 3
    assert step["span_bounds_us"]["host"] == step["simulated_us"]
    assert any("no GPU work" in note for note in found["notes"])
    assert "playback of the host's own recorded time" in plain(run("replay", TRACE).out)
    assert run("replay", TRACE, "--json").json["gpu_work"] is False


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


def test_replay_json_has_the_promised_keys(run: Run, worked: Path) -> None:
    found = run("replay", worked, "--json").json
    assert found["steps"][1] == {
        "rank": 0, "step": "ProfilerStep#1", "measured_us": 400.0, "replayed_us": 400.0, "error": 0.0,
        "counts": True, "why_not": None}
    assert {found[key] for key in ("median_abs_error", "max_abs_error", "unexplained_share")} == {0.0}
    assert found["kernel_end_p95_share"] == 0.0
    assert found["reproducible"] is True
    assert found["ranks"][0]["launch_queue_source"] == "default"
    # What if is measured against the recording.
    found = run("replay", worked, "--scale-kernels", 2, "--json").json
    assert (found["steps"][1]["replayed_us"], found["steps"][1]["error"]) == (500.0, 0.25)
    assert found["kernel_end_p95_share"] is None
    assert any("× 2" in note for note in found["notes"])


def test_constants_and_residuals(run: Run, worked: Path) -> None:
    ran = run("replay", worked, "--constants", "--residuals")
    assert "latency/compute" in ran.out and "playback" in ran.out
    (constants,) = run("replay", worked, "--constants", "--json").json["constants"]
    assert (constants["latency/compute"], constants["gap/compute/compute"]) == (5.0, 1.0)


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


def without_source(value: Any) -> Any:
    """A report without where its input lay."""
    if isinstance(value, dict):
        return {k: without_source(v) for k, v in value.items() if k not in ("source", "notes")}
    return [without_source(v) for v in value] if isinstance(value, list) else value


def test_every_command_reads_the_converted_file(run: Run, tmp_path: Path) -> None:
    saved, again = tmp_path / "job.foretrace", tmp_path / "again.foretrace"
    ran = run("convert", CPU_SMALL, "-o", saved, "--json")
    assert ran.code == 0 and ran.json["bytes"] == saved.stat().st_size
    for command in ("inspect", "breakdown", "replay"):
        of_file, of_trace = (run(command, path, "--json") for path in (saved, CPU_SMALL))
        assert of_file.code == 0
        assert without_source(of_file.json) == without_source(of_trace.json)
    assert run("convert", saved, "-o", again).code == 0
    assert again.read_bytes() == saved.read_bytes()


def test_convert_does_not_overwrite_what_it_reads(run: Run, worked: Path) -> None:
    before = worked.read_bytes()
    one_sentence(run("convert", worked, "-o", worked), "is one of the files being read")
    one_sentence(run("convert", worked.parent, "-o", worked), "is one of the files being read")
    one_sentence(run("replay", worked, "--timeline", worked), "is one of the files being read")
    assert worked.read_bytes() == before


WHOLE = gzip.compress(json.dumps({"traceEvents": []}).encode())
BAD_FILES = {
    "empty.json": b"", "no_json.json": b"hello\n", "no_trace.json": b'{"a": 1}', "no_events.json.gz": WHOLE,
    "cut.json.gz": WHOLE[:10], "junk.foretrace": b"junk", "cut.foretrace": b"PK\x03\x04" + bytes(40)}
"""The others are missing, or a directory of nothing."""


@pytest.mark.parametrize(("command", "name"), [
    *(("inspect", name) for name in (*BAD_FILES, "missing.json", "nothing", "none*.json")),
    ("breakdown", "cut.json.gz"), ("replay", "no_events.json.gz"), ("convert", "empty.json"), ("convert", "nothing")])
def test_bad_input(run: Run, tmp_path: Path, command: str, name: str) -> None:
    (tmp_path / "nothing").mkdir()
    if name in BAD_FILES:
        (tmp_path / name).write_bytes(BAD_FILES[name])
    extra = ["-o", tmp_path / "out.foretrace"] if command == "convert" else ["--json"]
    one_sentence(run(command, tmp_path / name, *extra), name.partition("*")[0])
    assert not (tmp_path / "out.foretrace").exists()


def test_a_corrupt_saved_file(run: Run, worked: Path, tmp_path: Path) -> None:
    saved = tmp_path / "job.foretrace"
    run("convert", worked, "-o", saved)
    content = bytearray(saved.read_bytes())
    content[len(content) // 2] ^= 255
    for damaged, said in ((content, "job.foretrace is corrupt"), (content[: len(content) // 2], "job.foretrace")):
        saved.write_bytes(bytes(damaged))
        one_sentence(run("inspect", saved), said)


@pytest.mark.parametrize("arguments", [
    (), ("inspect",), ("nonsense",), ("breakdown", TRACE, "--top", "0"), ("breakdown", TRACE, "--top", "x"),
    ("replay", TRACE, "--scale-kernels", "x"), ("replay", TRACE, "--nonsense"), ("convert", TRACE),
    ("replay", TRACE, "--scale-kernels", "-1"), ("replay", TRACE, "--scale-kernels", "nan"),
    ("replay", TRACE, "--scale-kernels", "inf"), ("breakdown", TRACE, "--step", "99")])
def test_wrong_usage(run: Run, arguments: tuple[str, ...]) -> None:
    ran = run(*arguments)
    assert ran.code == 2
    assert "Traceback" not in ran.err
    if TRACE in arguments and "Usage" not in ran.err:
        one_sentence(ran)


@pytest.mark.parametrize("where", ["none/out.json", "worked.json/out.json", "."])
def test_outputs_that_cannot_be_written_are_refused_early(run: Run, worked: Path, tmp_path: Path, where: str) -> None:
    one_sentence(run("replay", tmp_path / "missing.json", "--timeline", tmp_path / where), "none" if "none" in where
                 else "")
    one_sentence(run("convert", worked, "-o", tmp_path / where))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["worked.json"]
    one_sentence(run("convert", worked, "-o", os.devnull), "no regular file")
    assert Path(os.devnull).is_char_device()


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
    assert (ran.code, ran.err.count("\n")) == (code, 1) and part in ran.err
    debugged = run("inspect", TRACE, "--debug")
    assert debugged.code == code and "Traceback" in debugged.err
    monkeypatch.setenv("FORETRACE_DEBUG", "1")
    assert "Traceback" in run("inspect", TRACE).err


def test_a_reader_that_leaves_is_no_error() -> None:
    with process("breakdown", TRACE, "--json") as child:
        assert child.stdout is not None and child.stderr is not None
        assert child.stdout.read(1) == "{"
        child.stdout.close()
        assert child.stderr.read() == ""
        assert child.wait(timeout=120) == 141


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
    moments = ["foretrace.commands", "step_views.cli.console", "numpy", "the end"]
    running = [subprocess.Popen([sys.executable, "-c", INTERRUPTED, when, "inspect", TRACE], stdout=subprocess.DEVNULL,
                                stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
               for when in moments]
    found = {when: (one.communicate()[1], one.returncode) for when, one in zip(moments, running, strict=True)}
    said = "foretrace: Interrupted.\n"
    assert found == {when: ("" if when.endswith("console") else said, 130) for when in moments}  # typer says nothing


def test_a_terminal_without_unicode_is_no_error() -> None:
    child = process("breakdown", TRACE, PYTHONIOENCODING="ascii")
    out, err = child.communicate(timeout=120)
    assert (child.returncode, err) == (0, "") and "aten::mm" in out


def test_nothing_steers_the_terminal(run: Run, tmp_path: Path) -> None:
    trace = worked_step().op("evil\x1b[2J\x07\u202eop", 1300, 1380).write(tmp_path / "t.json")
    ran = run("breakdown", trace, "--top", 50)
    assert ran.code == 0 and "evil\\x1b[2J" in ran.out
    assert "\x1b" not in ran.out + run("breakdown", trace, "--json").out


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
