"""A difference agrees with itself: B less A as shown, the mirrored pair, and nothing between a recording and itself."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from micro import Micro
from page_support import PageFile
from report_support import ROOT
from said import Run
from said_facts import rows_of_table
from test_diff import BLOCK, MORE, job

from step_views.diff.jobs import diff_jobs
from step_views.diff.result import UNEXPLAINED, Difference, DifferenceKind, Part
from step_views.pages.parts import MOST_ROWS
from tracer.errors import ForetraceError
from tracer.job import Job, read_job

DATA = ROOT.parent / "shared" / "data"
TRACES = DATA / "traces"
MI300 = TRACES / "h100-vs-mi300"
OWN = [ROOT / "traces" / name for name in ("bert-cpu", "cpu-small", "dlrm-cpu", "llama-cpu", "resnet50-cpu")]
DIGIT = 0.001
"""The last digit of a time in ms."""
LARGE = {"h100-google_owlv2-large-patch14-ensemble.json.gz", "mi300-google_owlv2-large-patch14-ensemble.json.gz",
         "linear-2080Ti"}
ALIKE = LARGE | {"bert-cpu", "dlrm-cpu", "llama-cpu", "resnet50-cpu", "resnet50-ddp-2xA100",
                 "h100-Qwen_Qwen1.5-0.5B-Chat.json.gz", "mi300-Qwen_Qwen1.5-0.5B-Chat.json.gz"}
"""Recordings whose commands are run by ``make slow``: a CPU's, two GPUs', a job's and the cases are run always."""
SIDES = {"only in A": "only in B", "only in B": "only in A"}


def pairs(slow: set[str]) -> list[Any]:
    """Pairs of recordings of one program; of a recording on its own, two of its steps."""
    return [pytest.param(a, b, options, marks=pytest.mark.slow if a.name in slow else ()) for a, b, options in _pairs()]


def _pairs() -> Iterator[tuple[Path, Path, tuple[str | int, ...]]]:
    for path in OWN:
        yield path, path, ("--step", 1, "--step-b", 2)
    for model in ("gaunernst_bert-small-uncased", "Qwen_Qwen1.5-0.5B-Chat", "google_owlv2-large-patch14-ensemble"):
        yield MI300 / f"h100-{model}.json.gz", MI300 / f"mi300-{model}.json.gz", ()
    resnets = [TRACES / name for name in ("resnet50-V100", "resnet50-ddp-2xA100")]
    yield resnets[0], resnets[1], ()
    for path in (resnets[0], TRACES / "nanogpt-rank0-of-8xH100", TRACES / "linear-2080Ti"):
        yield path, path, ("--step", 0, "--step-b", 1)
    for path in sorted((DATA / "cases").glob("*")):
        if any(path.glob("*.json*")):
            yield path, path, ("--step", 0, "--step-b", 1)


RECORDINGS = list(dict.fromkeys(path for a, b, _ in _pairs() for path in (a, b)))
"""Each recording of the pairs once."""


def name(value: object) -> str:
    return "/".join(value.parts[-2:]) if isinstance(value, Path) else "steps" if value else "jobs"


@cache
def read(path: Path) -> Job:
    if not path.exists():
        pytest.skip(f"{path.name} of the shared data is not here")
    return read_job(path)


@cache
def compared(a: Path, b: Path, options: tuple[str | int, ...]) -> Difference:
    steps = {} if not options else {"step": str(options[1]), "step_b": str(options[3])}
    try:
        return diff_jobs(read(a), read(b), **steps)
    except ForetraceError as error:
        pytest.skip(f"cannot be compared: {error}")


def sided(part: Part) -> DifferenceKind | None:
    """The side that alone has a part, by what people read of it."""
    return next((kind for kind in (DifferenceKind.REMOVED, DifferenceKind.ADDED)
                 if part.kind is kind or part.what.endswith(f"({kind.value})")), None)


@pytest.mark.parametrize(("a", "b", "options"), pairs(LARGE), ids=name)
def test_every_part_is_b_less_a(a: Path, b: Path, options: tuple[str | int, ...]) -> None:
    found = compared(a, b, options)
    assert found.total_ns == found.after_ns - found.before_ns == sum(part.time_ns for part in found.parts)
    for part in found.parts:
        absent = {DifferenceKind.REMOVED: [False, True], DifferenceKind.ADDED: [True, False]}.get(
            sided(part), [part.kind in UNEXPLAINED] * 2)
        assert [part.before_ns is None, part.after_ns is None] == absent, part
        if not all(absent):
            assert part.time_ns == (part.after_ns or 0) - (part.before_ns or 0)
            assert min(part.before_ns or 0, part.after_ns or 0) >= 0


@pytest.mark.parametrize(("a", "b", "options"), pairs(LARGE), ids=name)
def test_exchanged_recordings_give_the_mirrored_difference(a: Path, b: Path, options: tuple[str | int, ...]) -> None:
    """To the nanosecond, but for the rounding of a mean over ranks."""
    there = compared(a, b, options)
    back = compared(b, a, ("--step", options[3], "--step-b", options[1]) if options else ())
    near = 0 if len(read(a).graphs) == 1 else 2
    assert abs(there.before_ns - back.after_ns) <= near and abs(there.after_ns - back.before_ns) <= near
    assert (there.aligned, there.steps_before, there.steps_after) == (
        back.aligned, back.steps_after, back.steps_before)
    for one, other in ((there.host_ratio, back.host_ratio), (there.device_ratio, back.device_ratio)):
        assert (one is None and other is None) or one * other == pytest.approx(1.0)
    mirrored = {(part.kind, part.what): part for part in back.parts}
    for part in there.parts:
        if max(abs(part.time_ns), abs(part.hidden_ns)) <= near:
            continue
        other = mirrored[turned(part)]
        assert other.time_ns == pytest.approx(-part.time_ns, abs=near)
        assert other.hidden_ns == pytest.approx(-part.hidden_ns, abs=near)
        for one_ns, other_ns in ((part.before_ns, other.after_ns), (part.after_ns, other.before_ns)):
            assert (one_ns is None) == (other_ns is None) and abs((one_ns or 0) - (other_ns or 0)) <= near
        assert other.certain_ns == pytest.approx(part.certain_ns, abs=near)


def turned(part: Part) -> tuple[DifferenceKind, str]:
    """The name of the part in the mirrored difference."""
    kind = DifferenceKind(SIDES.get(part.kind.value, part.kind.value))
    what = re.sub(r"only in [AB]", lambda side: SIDES[side[0]], part.what)
    what = re.sub(r"^where ([AB]) has", lambda side: f"where {'AB'[side[1] == 'A']} has", what)
    head, colon, tail = what.partition(": ") if kind is DifferenceKind.KERNELS else ("", "", what)
    if " → " in tail:
        tail = " → ".join(reversed(tail.split(" → ")))
    return kind, head + colon + tail


def number(text: str) -> float:
    return 0.0 if text == "–" else float(text.replace(",", "").rstrip("%"))


ZERO = re.compile(r"(?<![\w.])[+-]0(?:\.0+)?(?:%|(?![\w.]))")
"""A zero with a sign."""


@pytest.fixture
def compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands of a test, which print one difference in several ways, find it once."""
    known: dict[tuple[object, ...], tuple[Difference, tuple[Job, ...]]] = {}

    def once(*jobs: Job, **options: Any) -> Difference:
        key = (*map(id, jobs), *options.items())
        if key not in known:
            known[key] = diff_jobs(*jobs, **options), jobs
        return known[key][0]

    monkeypatch.setattr("step_views.diff.jobs.diff_jobs", once)


@pytest.mark.usefixtures("quick_pages", "compared_once")
@pytest.mark.parametrize(("a", "b", "options"), pairs(ALIKE), ids=name)
def test_text_json_and_page_show_b_less_a(
        a: Path, b: Path, options: tuple[str | int, ...], run: Run, tmp_path: Path) -> None:
    code, text, error = run("diff", a, b, *options, "--top", 100_000)
    assert code in (0, 2) and "Traceback" not in error
    if code == 2:
        pytest.skip(f"cannot be compared: {error}")
    before, after, by = re.search(r"(?m)^A ([\d.,]+) ms, B ([\d.,]+) ms [^:]*:\s+B's\s+step\s+is\s+"
                                  r"(as long|[\d.,]+ ms \([\d.,]+%\)\s+(?:longer|shorter))", text).groups()
    moved = number(after) - number(before)
    if by != "as long":
        assert number(by.split()[0]) == pytest.approx(abs(moved), abs=1e-9)
        assert ("longer" in by) == (moved > 0) or abs(moved) < DIGIT
        assert number(re.search(r"\(([\d.,]+)%", by)[1]) == pytest.approx(
            100 * abs(moved) / number(before), abs=0.06 + 100 * DIGIT / number(before))
    page = tmp_path / "page.html"
    value = run("diff", a, b, *options, "--json", "--html", page).json
    shown = PageFile(page)
    kinds = page_rows(shown, "kinds")
    assert abs(sum(number(row[1]) for row in kinds) - moved) <= DIGIT * (len(kinds) + 2)
    assert not ZERO.findall(text)
    parts = rows_of_table(text, "Causes: first of")
    assert len(parts) == value["parts_total"] == len(value["parts"])
    for row in parts:
        check(*row[-4:-1])
    for part in value["parts"]:
        if part["before_us"] is not None or part["after_us"] is not None:
            assert part["time_us"] == pytest.approx((part["after_us"] or 0) - (part["before_us"] or 0), abs=1e-3)
        assert str(part["time_us"]) != "-0.0"
    assert value["total_us"] == pytest.approx(value["after_us"] - value["before_us"], abs=1e-3)
    assert not ZERO.findall(shown.text)
    rows = page_rows(shown, "parts")
    assert len(rows) == min(len(parts), MOST_ROWS)
    for row in rows:
        assert not any(ZERO.fullmatch(cell) for cell in row)
        check(*row[-4:-1])
        if any(side in " ".join(row) for side in SIDES):
            assert row[-4 if "only in B" in " ".join(row) else -3] == "–"


def page_rows(page: PageFile, key: str) -> list[list[str]]:
    return page.rows(key) if f"data-{key}" in page.data or key in page.tables else []


def check(before: str, after: str, ms: str) -> None:
    """B less A to the last digit shown; of what no operation explains only the difference is known."""
    if not before == after == "–":
        assert number(ms) == pytest.approx(number(after) - number(before), abs=1e-9), (before, after, ms)
    assert not any(ZERO.fullmatch(text) for text in (ms, before, after))


@pytest.mark.usefixtures("compared_once")
@pytest.mark.parametrize("path", [pytest.param(path, marks=pytest.mark.slow if path.name in ALIKE else ())
                                  for path in RECORDINGS], ids=name)
def test_a_recording_does_not_differ_from_itself(path: Path, run: Run) -> None:
    code, text, error = run("diff", path, path)
    if code == 2:
        pytest.skip(f"cannot be compared: {error}")
    assert "B's step is as long" in " ".join(text.split())
    assert not re.search(r"[+-]\d+\.\d{3}", text) and not ZERO.findall(text)
    _, out, _ = run("diff", path, path, "--json")
    value: dict[str, Any] = json.loads(out)
    assert (value["total_us"], value["parts"], value["attributed"], value["aligned"]) == (0.0, [], 1.0, 1.0)
    assert value["before_us"] == value["after_us"] and value["recorded_a"] == value["recorded_b"]
    assert {ratio for ratio in (value["host_ratio"], value["device_ratio"]) if ratio is not None} <= {1.0}


def test_both_recorded_steps_come_first(run: Run) -> None:
    path = ROOT / "traces" / "bert-cpu"
    step = re.search(r"(?m)^recorded step\s+([\d.,]+ ms) under the profiler", run("inspect", path).out)[1]
    lines = " ".join(run("diff", path, path).out.split())
    assert lines.startswith(f"A: Recorded step: {step} under the profiler")
    assert f"B: Recorded step: {step} under the profiler" in lines
    assert run("diff", path, path, "--step", 1, "--json").json["recorded_a"] is None


def test_a_shorter_pause_at_an_added_operation_is_a_gap(tmp_path: Path) -> None:
    """A pauses for 100 us where B, with two pauses of 5 us, computes for 30: no operation takes less than nothing."""
    def paused(names: list[tuple[str, float]], pause: float) -> Micro:
        trace, now = Micro(), 0.0
        for at, (each, length) in enumerate(names):
            now += pause if at == 2 else 5
            trace.op(each, now, now + length)
            now += length
        return trace.step(0, now + 5)

    a, b = job(paused(BLOCK, 100), tmp_path, "a"), job(paused(MORE, 5), tmp_path, "b")
    for jobs, side, times in (((a, b), "B", (60_000, 0, -60_000)), ((b, a), "A", (0, 60_000, 60_000))):
        (part,) = diff_jobs(*jobs).parts
        assert (part.kind, part.what) == (DifferenceKind.GAP, f"where {side} has aten::layer_norm")
        assert (part.before_ns, part.after_ns, part.time_ns) == times
