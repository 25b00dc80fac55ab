"""What reaches a terminal, a pipe that was closed, or a full disk."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from micro import Micro
from said import plain
from slowly import mostly_slow

import tracer.job
from step_views.cli.console import Column, Report, print_json, read, too_large
from step_views.cli.running import MOST_CELL, MOST_TEXT, one_line, printable, tell

ROOT = Path(__file__).resolve().parents[2]
CAPTURE = ROOT / "traces" / "cpu-small"
EVIL = "\x1b]0;evil\x07\x9b31m\u202egnp\r[bold]x[/bold]"
COMMAND = "from foretrace.commands import main; main()"
STEERS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Everything but the newline that a terminal obeys or that turns text round."""


def foretrace(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **options.pop("environment", {})}
    return subprocess.run([sys.executable, "-c", COMMAND, *map(str, arguments)], text=True, check=False,
                          env=environment, **{"capture_output": "stdout" not in options, **options})


def test_text_steers_nothing_and_is_bounded(capsys: pytest.CaptureFixture[str]) -> None:
    assert printable(EVIL) == "\\x1b]0;evil\\x07\\x9b31m\\u202egnp\\r[bold]x[/bold]"
    assert one_line("a\nb") == "a\\nb"
    long = printable("a" * 70_000 + ": do this.")
    assert len(long) < MOST_TEXT + 100 and long.endswith(": do this.") and "characters left out" in long
    report = Report()
    report.table(EVIL, [Column("name", name=True), Column("n")], [[EVIL, EVIL], ["x" * 70_000, "1" * 70_000]])
    report.line(EVIL + "y" * 70_000)
    report.notes([EVIL, *(f"note {number}" for number in range(1000))])
    tell(EVIL + "z" * 70_000)
    shown = capsys.readouterr()
    for text in (shown.out, shown.err):
        assert not STEERS.search(text) and "[bold]x[/bold]" in text
        assert max(map(len, text.split())) < MOST_TEXT + MOST_CELL
    assert len(shown.out) < 20_000 and "notes more" in plain(shown.out)


def test_json_is_what_the_file_says_and_steers_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    value = {EVIL: [EVIL, "µ – ü 漢 \U000e0001 \U0001f600"]}
    print_json(value)
    out = capsys.readouterr().out
    assert json.loads(out) == value and not STEERS.search(out) and "\U000e0001" not in out and "漢 " in out


def _trace(name: str) -> bytes:
    trace = Micro().step(1, 101).op(name, 10, 60, **{"External id": 1})
    trace.metadata["deviceProperties"] = [{"id": 0, "name": name}]
    return json.dumps(trace.document()).encode()


@pytest.mark.parametrize(("command", "kind"), [
    *((command, "context") for command in ("inspect", "breakdown", "replay", "predict", "opportunities", "ranks",
                                           "overheads", "check", "convert", "diff")),
    *((command, kind) for command in ("inspect", "predict") for kind in ("names", "long"))])
def test_no_command_passes_on_what_steers_a_terminal(command: str, kind: str, tmp_path: Path, run: Any) -> None:
    name = "n" * 70_000 if kind == "long" else EVIL
    part = tmp_path / ("cap" if kind == "long" else "c\x1b]0;evil\x07p") / "rank0"
    part.mkdir(parents=True)
    (part / "kineto.json.gz").write_bytes(gzip.compress(_trace(name)))
    context: dict[str, Any] = {"complete": True}
    if kind == "context":
        context = {"complete": False, "ended": name, "hardware": {"device": name}, "optimizers": {"note": name},
                   "software": {"torch": name}, "workload": {"name": name, "settings": {}}}
    (part / "context.json").write_text(json.dumps(context))
    (part.parent / "baseline.json").write_text(json.dumps(
        {"format": "foretrace-baseline", "version": 1, "reasons": [], "captures": {name: {name: 1}}}))
    more = {"diff": [part.parent], "convert": ["-o", tmp_path / "x.foretrace"]}.get(command, [])
    for form in ([], ["--json"]):
        code, out, err = run(command, part.parent, *more, *form)
        assert code in (0, 1, 2), err
        assert not STEERS.search(out) and not STEERS.search(err)
        if not form:
            assert len(out) + len(err) < 30_000


@pytest.mark.parametrize("arguments", mostly_slow(
    [("workloads", "--json"), ("--help",), ("inspect", CAPTURE)], {("--help",)}))
def test_a_reader_that_has_gone_is_no_error(arguments: tuple[object, ...]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        ran = foretrace(*arguments, stdout=writing, stderr=subprocess.PIPE)
    finally:
        os.close(writing)
    assert ran.stderr == "" and ran.returncode in (0, 1, 141)


@pytest.mark.parametrize("closed", mostly_slow([">&-", "2>&-", ">&- 2>&-", ">&- <&-"], {">&-", "2>&-"}))
def test_an_answer_that_could_not_be_written_is_no_success(closed: str, tmp_path: Path) -> None:
    out = tmp_path / "small.foretrace"
    for arguments in (f"convert {CAPTURE} -o {out}", *(["--help"] if closed == ">&-" else [])):
        ran = subprocess.run(f"{sys.executable} -c '{COMMAND}' {arguments} {closed}", shell=True, text=True,
                             check=False, capture_output=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
        lost = closed != "2>&-"
        assert ran.returncode == (2 if lost else 0) and "Traceback" not in ran.stderr
        assert ("standard output is closed" in ran.stderr) == (lost and "2>&-" not in closed)
    assert out.read_bytes().startswith(b"PK\x03\x04")  # nothing else was written into it


def test_a_full_standard_output_is_named() -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    with open("/dev/full", "w") as full:
        ran = foretrace("--help", stdout=full, stderr=subprocess.PIPE)
    assert ran.returncode == 2 and ran.stderr.count("\n") == 1
    assert ran.stderr.startswith("foretrace: the standard output: No space left on device")


def test_an_output_that_a_program_has_closed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from step_views.cli.running import STDOUT, standard_output

    gone = io.StringIO()
    gone.close()
    monkeypatch.setattr(sys, "stdout", gone)
    with pytest.raises(OSError, match="Bad file descriptor") as caught, standard_output():
        print("an answer")
    assert caught.value.filename == STDOUT


def test_a_bar_on_a_terminal_is_drawn_without_a_thread(monkeypatch: pytest.MonkeyPatch,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    alone, seen = threading.active_count(), []

    def read_job(paths: list[str], **given: object) -> SimpleNamespace:
        progress = given["progress"]
        assert callable(progress)
        progress(30_000, 90_000)
        seen.append(threading.active_count())
        return SimpleNamespace(paths=paths, graphs=[])

    monkeypatch.setattr(tracer.job, "read_job", read_job)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert read(["rank0.json"]).paths == ["rank0.json"]  # type: ignore[attr-defined]
    assert seen == [alone]
    assert "30.0/90.0 kB" in capsys.readouterr().err


def test_a_recording_that_may_not_fit_is_warned_of() -> None:
    assert too_large(5_000_000, 8e9) == "" == too_large(5_000_000, None)
    said = too_large(5_000_000, 2e9)
    assert "5.0 million events and 2.0 GB of memory are free" in said and "fewer ranks" in said
