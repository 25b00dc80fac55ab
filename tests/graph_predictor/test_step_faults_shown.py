"""What commands say of recordings with steps that are none, or that lost device work: the good steps' time."""

from __future__ import annotations

from pathlib import Path

import pytest
from micro import Micro
from report_support import ROOT
from said import Run, plain
from said_facts import facts_of_page

CASE = ROOT.parent / "shared" / "data" / "cases" / "one_step_and_an_empty_one"


def planted(folder: Path, lengths: list[float], *, rank: int | None = None, lost: int = -1,
            last: float | None = None) -> Path:
    """Steps of these lengths in ms, of 100 launches each; one that lost half its kernels; a last one without work."""
    trace, at = Micro(rank=rank, world_size=1 if rank is None else 2), 1000.0
    for number, ms in enumerate(lengths):
        length = 1000.0 * ms
        each = length / 110
        trace.step(at, at + length, number)
        for launch in range(100):
            begin = at + each * (launch + 1)
            trace.op("aten::mm", begin, begin + 0.8 * each)
            kept = number != lost or launch >= 50
            trace.launch(begin + 2, 5, (7, begin + 12, 0.5 * each) if kept else None)
        at += length
    if last is not None:
        trace.step(at, at + 1000 * last, len(lengths))
        trace.call("cudaDeviceSynchronize", at + 1, 6)
    return trace.write(folder / f"rank{rank or 0}.json")


def says(run: Run, path: Path, ms: float, because: str) -> None:
    """Every command leads with the same recorded step, and the reason is in the notes; the interval holds the step."""
    for command in ("inspect", "predict", "breakdown", "replay"):
        ended, text, error = run(command, path)
        assert ended == 0, error
        said = plain(text).replace("recorded step ", "Recorded step: ")
        assert f"Recorded step: {ms:,.3f} ms" in said, (command, text)
        assert because in said, (command, text)
    found = run("predict", path, "--json").json
    assert found["recorded"]["step_us"] == pytest.approx(1000 * ms, abs=0.5)
    low, high = found["interval_us"]
    assert 0.8 * 1000 * ms <= low <= 1000 * ms * 1.001 and 1000 * ms * 0.999 <= high <= 1.2 * 1000 * ms


def test_the_case_of_an_empty_last_step(run: Run) -> None:
    if not CASE.is_dir():
        pytest.skip(f"{CASE} is absent")
    says(run, CASE / "trace.json", 1.0, "ProfilerStep#1 holds almost no work")


@pytest.mark.parametrize("last", [0.012, 5.0, 300.0])
@pytest.mark.parametrize("lengths", [[67.8], [67.8, 67.8, 67.8]], ids=["one", "three"])
def test_an_empty_last_step_does_not_move_the_answer(tmp_path: Path, run: Run, lengths: list[float],
                                                     last: float) -> None:
    says(run, planted(tmp_path, lengths, last=last), 67.8, f"ProfilerStep#{len(lengths)} holds almost no work")


def test_an_empty_last_step_of_two_ranks(tmp_path: Path, run: Run) -> None:
    for rank in range(2):
        planted(tmp_path, [20.0, 20.0], rank=rank, last=0.5 + rank)
    says(run, tmp_path, 20.0, "ProfilerStep#2 holds almost no work")
    assert "steps left out: almost no work 2" in plain(run("inspect", tmp_path).out)


@pytest.mark.usefixtures("quick_pages")
def test_pages_say_the_good_step(tmp_path: Path, run: Run) -> None:
    path = planted(tmp_path, [67.8], last=0.012)
    for command, option in (("predict", "--html"), ("breakdown", "--html"), ("report", "-o")):
        page = tmp_path / f"{command}.html"
        assert run(command, path, option, page)[0] == 0
        assert facts_of_page(page).get("recorded step", "67.800") == "67.800"
        assert "ProfilerStep#1 holds almost no work" in page.read_text(encoding="utf-8")


def test_a_step_that_lost_its_work_does_not_count(tmp_path: Path, run: Run) -> None:
    """The other of two steps is the good one: they are not as long as each other."""
    path = planted(tmp_path, [20.0, 24.0], lost=1)
    says(run, path, 20.0, "lost the device work of 50 launches")
    inspected = plain(run("inspect", path).out)
    assert "ProfilerStep#1 is damaged and does not count" in inspected
    assert "steps that lost device work 1" in inspected


def test_repeats_unlike_each_other_are_not_predicted_from(tmp_path: Path, run: Run) -> None:
    trace, at = Micro(), 0.0
    for length in (344_000.0, 2_750.0, 145.0):
        for k in range(4):
            trace.op(f"aten::op{k}", at + k * length / 4, at + (k + 0.9) * length / 4)
        trace.launch(at + 1, 2, (7, at + 5, 20))
        at += length
    path = trace.write(tmp_path / "trace.json")
    ended, text, _ = run("inspect", path)
    assert ended == 0 and "repeat 3 times, 0.141 to 344.000 ms long" in plain(text)
    for command in ("predict", "breakdown", "replay"):
        ended, text, error = run(command, path)
        assert "from: period" not in text and "2.750" not in text
        assert ended == 0 or (ended == 2 and "steps" in error and "Traceback" not in error), (command, text, error)
    assert run("predict", path)[0] == 2
