"""`foretrace check`: models that got worse, programs that got slower, and what is wrong with a baseline."""

from __future__ import annotations

import json
import shutil
import xml.etree.ElementTree as ElementTree
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from check_support import SIZES, samples, step_trace, write_capture
from micro import Micro
from said import Ran, Run, plain

from step_views.check import gate
from step_views.check.baseline import BaselineFile, disturbance
from step_views.check.gate import judge
from step_views.check.measure import CheckError, find_captures, pair_captures
from step_views.check.validate import Accuracy
from step_views.check.verdict import Status, Verdict


@pytest.fixture
def run(run: Run) -> Run:
    return partial(run, "check")


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A directory with one program and its baseline."""
    folder = tmp_path / "kept"
    write_capture(folder / "step")
    gate.update_baseline(str(folder), "first")
    return folder


def failed(verdicts: list[Verdict]) -> set[str]:
    return {verdict.quantity for verdict in verdicts if verdict.failed}


def against(kept: Path, new: Path) -> set[str]:
    return failed(gate.check_against(str(kept), str(new)).verdicts)


def pair(folder: Path, *captures: dict[str, Any]) -> tuple[Path, Path]:
    """The directories of a baseline and of new captures of one program."""
    for name, capture in zip(("kept", "new"), captures, strict=True):
        write_capture(folder / name / "step", **capture)
    gate.update_baseline(str(folder / "kept"), "first")
    return folder / "kept", folder / "new"


def test_what_is_stored_is_found_again(kept: Path, run: Run) -> None:
    said = run(kept, "--json")
    assert said.code == 0 and said.json["passed"] is True
    figures = {each["quantity"]: each for each in said.json["verdicts"]}
    assert figures.keys() == {"predicted step time", "replayed steps", "modelled device time",
                              "modelled device time by family"}
    assert all(each["before"] == each["now"] for each in figures.values())
    # 100 µs measured; on an A100 19.5 Tflop/s in fp32 (no TF32 kernel ran) make 440 µs of 8.6 Gflop.
    assert 2 < figures["modelled device time"]["now"] < 6


@pytest.mark.parametrize(("old", "new", "worse"), [(0.10, 0.14, False), (0.10, 0.16, True), (0.10, -0.16, True),
                                                   (-0.30, 0.05, False), (0.0, 0.05, False), (0.02, None, True)])
def test_an_error_may_grow_by_the_tolerance_in_either_direction(old: float, new: float | None, worse: bool) -> None:
    """A figure without a stored one is named and passes."""
    verdicts = judge("x", Accuracy(old, None, None, None), Accuracy(new, None, 0.5, None), 0.05)
    assert [verdict.status for verdict in verdicts if not verdict.failed] == [
        *([] if worse else [Status.PASSED]), Status.SKIPPED]


def changed(kept: Path, part: str, **change: Any) -> None:
    """Change figures of the baseline's program; without one, empty the part."""
    path = kept / "baseline.json"
    value = json.loads(path.read_text(encoding="utf-8"))
    entry = value["captures"]["step"]
    entry[part] = {**entry[part], **change} if change else {}
    path.write_text(json.dumps(value), encoding="utf-8")


def test_models_that_got_worse_fail(kept: Path, run: Run) -> None:
    """The baseline is told that the models had been right."""
    changed(kept, "accuracy", device=0.01)
    said = run(kept)
    assert said.code == 1
    assert "modelled device time" in plain(said.out) and "FAILED" in said.out
    assert run(kept, "--tolerance", "900%").code == 0


@pytest.mark.parametrize(("step_ns", "undecided"), [
    (samples(550, seed=1), []),
    # The timed steps doubled, the profiled ones of the same run did not: the machine had a bad moment.
    (samples(1100, seed=1), ["step time"])])
def test_the_same_again_and_what_only_one_of_two_moments_shows_are_no_alarms(
        kept: Path, tmp_path: Path, step_ns: list[int], undecided: list[str]) -> None:
    write_capture(tmp_path / "new" / "step", step_ns=step_ns)
    found = gate.check_against(str(kept), str(tmp_path / "new"))
    assert failed(found.verdicts) == set()
    assert [verdict.quantity for verdict in found.inconclusive] == undecided


@pytest.mark.parametrize(("change", "expected"), [
    ({"trace": step_trace(launches=2, kernel_us=50)}, {"launches", "kernels"}),
    ({"trace": step_trace(items=2)}, {"values read by the host", "blocking synchronisations"}),
    ({"trace": step_trace(length=900), "step_ns": samples(800, seed=1)}, {"step time"}),
    ({"memory": 11 * 10**8}, {"peak device memory"}),
    ({"trace": step_trace(launches=2, kernel_us=100)}, {"launches", "kernels", "GPU active time"}),
], ids=["launch", "read", "slower", "memory", "work"])
def test_each_kind_of_growth_is_told_apart(kept: Path, tmp_path: Path, change: dict[str, Any],
                                           expected: set[str]) -> None:
    write_capture(tmp_path / "new" / "step", **change)
    assert against(kept, tmp_path / "new") == expected


def test_less_of_everything_is_no_alarm(tmp_path: Path) -> None:
    more = {"trace": step_trace(launches=3, items=2), "step_ns": samples(800), "memory": 2 * 10**9}
    assert against(*pair(tmp_path, more, {})) == set()


def test_what_is_too_small_to_matter_passes_and_the_tolerance_says_what_that_is(kept: Path, tmp_path: Path) -> None:
    write_capture(tmp_path / "new" / "step", step_trace(length=750), samples(700, seed=1))
    assert against(kept, tmp_path / "new") == {"step time"}
    assert failed(gate.check_against(str(kept), str(tmp_path / "new"), tolerance=0.5).verdicts) == set()


def test_repeated_runs_of_a_program_see_smaller_changes(tmp_path: Path) -> None:
    """8% hide in the noise between two runs and are seen with five on either side."""
    kept, new = tmp_path / "kept", tmp_path / "new"
    for number in range(5):
        write_capture(kept / "step" / f"run{number}", step_ns=samples(550, seed=number))
        write_capture(new / "step" / f"run{number}", step_trace(length=644), samples(594, seed=9 + number))
    gate.update_baseline(str(kept), "first")
    assert against(kept, new) == {"step time"}
    assert against(kept, new / "step" / "run0") == set()


def test_another_machine_is_compared_by_counts_alone(kept: Path, tmp_path: Path) -> None:
    other = {"device": "NVIDIA A100-SXM4-80GB", "cpu": "another CPU", "cores": 8}
    write_capture(tmp_path / "new" / "step", step_trace(launches=2, kernel_us=50), samples(2000), hardware=other)
    found = gate.check_against(str(kept), str(tmp_path / "new"))
    assert failed(found.verdicts) == {"launches", "kernels"}
    assert {v.quantity for v in found.verdicts if v.status is Status.SKIPPED} >= {"step time", "GPU active time"}
    assert any("another CPU" in note for note in found.notes)


@pytest.mark.parametrize("grown", [1.5, 1.1])
def test_a_slower_machine_is_taken_off_where_unchanged_work_tells_it(tmp_path: Path, grown: float) -> None:
    """Every one of ten different operations takes 1.5 times as long, and so does the step, or a tenth more: what a
    machine did while profiled steps ran explains no more than the others grew by."""
    def capture(folder: Path, factor: float, step: float) -> None:
        trace = step_trace(launches=0, items=0)
        for n in range(9):
            for i in range(10):
                at = 1000 + 600 * n + 50 * i
                trace.op(f"aten::op{i}", at + 1, at + 1 + 20 * factor)
        write_capture(folder, trace, samples(500 * step))

    capture(tmp_path / "kept" / "step", 1.0, 1.0)
    gate.update_baseline(str(tmp_path / "kept"), "first")
    capture(tmp_path / "new" / "step", 1.5, grown)
    found = gate.check_against(str(tmp_path / "kept"), str(tmp_path / "new"))
    assert failed(found.verdicts) == set()
    (time,) = (each.text for each in found.verdicts if each.quantity == "step time")
    assert ", 0.0% in the quickest steps (90% between" in time and f"after {grown - 1:.1%} were taken off" in time
    assert any("took 50% longer" in note for note in found.notes)


def test_what_noise_hides_is_inconclusive_and_the_caller_says_what_becomes_of_it(kept: Path, tmp_path: Path,
                                                                                 run: Run) -> None:
    """The step takes twice as long in runs whose steps differ by a factor of three: neither passed nor failed."""
    new, junit, text = tmp_path / "new", tmp_path / "out.xml", tmp_path / "out.md"
    write_capture(new / "step", step_trace(length=1200), samples(1100, spread=1.2, number=8, seed=1))
    said = run(kept, "--against", new, "--json", "--junit", junit, "--markdown", text)
    assert (said.code, said.json["outcome"], said.json["passed"]) == (3, "inconclusive", False)
    (verdict,) = [each for each in said.json["verdicts"] if each["status"] == "inconclusive"]
    assert verdict["quantity"] == "step time" and "undecided" in verdict["text"]
    for options, code in ((("--inconclusive", "fail"), 1), (("--inconclusive", "pass"), 0),
                          (("--resolution", "100000%"), 2)):
        assert run(kept, "--against", new, *options).code == code
    assert "INCONCLUSIVE" in run(kept, "--against", new).out
    (case,) = [case for case in ElementTree.parse(junit).iter("testcase") if case.get("name") == "step time"]
    assert [child.tag for child in case] == ["skipped"]
    assert "❔" in text.read_text(encoding="utf-8")
    (new / "step" / "rank0" / "kineto.json.gz").write_bytes(b"nothing")
    assert run(kept, "--against", new).code == 2


@pytest.mark.parametrize("back", [False, True])
def test_other_element_types_fail(tmp_path: Path, back: bool) -> None:
    """The same products in fp64, or in fp32 where fp64 was: what must not change has changed."""
    both = [{"trace": step_trace(launches=3, args=args)} for args in (None, {**SIZES, "Input type": ["double"] * 3})]
    found = gate.check_against(*map(str, pair(tmp_path, *(both[::-1] if back else both))))
    (verdict,) = found.failures
    assert (verdict.quantity, verdict.before, verdict.now) == ("element types", 0, 3)
    assert ("double → float" if back else "float → double") in verdict.text


def test_a_number_that_is_passed_another_way_is_no_other_element_type(tmp_path: Path) -> None:
    """An optimizer without foreach passes its factors as tensors: the same products by numbers."""
    assert against(*pair(tmp_path, *({"trace": step_trace(name="aten::mul_", args={
        "Input Dims": [[64, 64], []], "Input type": ["float", kind]})} for kind in ("Scalar", "double")))) == set()


def test_interruptions_of_the_same_work_are_told_from_a_quiet_machine(tmp_path: Path) -> None:
    """Nine calls of 8 µs; then two of them take 80: 26 µs in the mean, 8 at the lower quartile, 1.4 being calm."""
    def recorded(name: str, long: int) -> float:
        trace = step_trace(launches=0, items=0)
        for n in range(9):
            trace.op("aten::add", 1100 + 600 * n, 1108 + 600 * n + (72 if n < long else 0))
        return disturbance(find_captures(str(write_capture(tmp_path / name, trace)))[0].job.graphs,
                           device_decides=False)

    assert recorded("quiet", 0) == 0.0
    assert recorded("shaken", 2) == pytest.approx(np.log((7 * 8 + 2 * 80) / (9 * 8) / 1.4))


def test_reports_for_machines_and_pull_requests(kept: Path, tmp_path: Path, run: Run) -> None:
    junit, text = tmp_path / "out.xml", tmp_path / "out.md"
    write_capture(tmp_path / "new" / "step", step_trace(launches=2, kernel_us=50))
    said = run(kept, "--against", tmp_path / "new", "--json", "--junit", junit, "--markdown", text)
    assert (said.code, said.json["passed"]) == (1, False) and said.json["causes"]["step"]
    suites = ElementTree.parse(junit).getroot()
    (suite,) = suites
    cases = {case.attrib["name"]: case for case in suite}
    assert suites.attrib["failures"] == "2"
    assert len(cases) == int(suite.attrib["tests"]) == len(said.json["verdicts"])
    assert cases["launches"].find("failure") is not None and cases["step time"].find("failure") is None
    summary = text.read_text(encoding="utf-8")
    assert summary.startswith("### ❌") and "| ❌ | step | launches | 1 | 2 |" in summary


def test_names_that_others_wrote_break_neither_table_nor_xml() -> None:
    from step_views.check.verdict import GateOutcome, junit_xml, markdown

    nasty = "a|b <img> `x` \x00\x1b[31m\n]]> &"
    found = GateOutcome(nasty, [Verdict(nasty, nasty, Status.FAILED, 1, 2, "", nasty)], {nasty: [nasty]}, [nasty])
    suites = ElementTree.fromstring(junit_xml(found))
    assert suites[0].attrib["name"].startswith("a|b <img>")
    text = markdown(found)
    assert "<img>" not in text and "\x1b" not in text
    assert [line.count("|") - line.count("\\|") for line in text.splitlines() if line.startswith("| ❌")] == [7, 7]


def refused(said: Ran, *words: str) -> None:
    assert (said.code, said.out, said.err.count("\n")) == (2, "", 1), said
    assert said.err.startswith("foretrace: ")
    for word in words:
        assert word in said.err, said.err


def test_no_directory_no_capture_no_baseline_a_file(tmp_path: Path, run: Run) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x", encoding="utf-8")
    write_capture(tmp_path / "new" / "step")
    for name, words in (("none", "does not exist"), ("empty", "holds no capture"), ("file", "is a file"),
                        ("new", "baseline.json does not exist")):
        refused(run(tmp_path / name), words)


@pytest.mark.parametrize(("text", "words"), [
    ('{"name": "another tool"}', "was not written by foretrace"),
    ("[]", "was not written by foretrace"),
    ("{", "is no JSON"),
    ('{"format": "foretrace-baseline", "version": 99}', "of version 99"),
    ('{"format": "foretrace-baseline", "version": "1"}', "is damaged"),
    ('{"format": "foretrace-baseline", "version": 1, "reasons": [], "captures": {"step": 3}}', "is damaged"),
], ids=["foreign", "list", "torn", "newer", "version", "fields"])
def test_a_baseline_that_is_none(kept: Path, run: Run, text: str, words: str) -> None:
    """Told, and never overwritten by an update either."""
    (kept / "baseline.json").write_text(text, encoding="utf-8")
    refused(run(kept), words)
    refused(run(kept, "--update-baseline", "--reason", "again"), words)
    assert (kept / "baseline.json").read_text(encoding="utf-8") == text


@pytest.mark.parametrize(("part", "change"), [
    ("counts", {}), ("run", {"step_ns": []}), ("run", {"step_ns": [-5]}), ("run", {"profiled_ns": [0]}),
    ("run", {"peak_host_bytes": -1}), ("counts", {"kernels": {"typical": -3, "steady": True, "most": 1}})])
def test_a_baseline_with_figures_that_cannot_be(kept: Path, run: Run, part: str, change: dict[str, Any]) -> None:
    changed(kept, part, **change)
    refused(run(kept), "is damaged")


def test_a_baseline_of_other_captures(kept: Path, run: Run) -> None:
    write_capture(kept / "another")
    refused(run(kept), "made from other captures", "another is not in it")
    shutil.rmtree(kept / "another")
    shutil.move(kept / "step", kept / "renamed")
    refused(run(kept), "step is missing here", "renamed is not in it")
    shutil.move(kept / "renamed", kept / "step")
    context = kept / "step" / "rank0" / "context.json"
    context.write_text(context.read_text(encoding="utf-8") + " ", encoding="utf-8")
    refused(run(kept), "step has other files")


def test_captures_of_different_programs(kept: Path, tmp_path: Path, run: Run) -> None:
    other = step_trace(name="aten::conv2d", args={"Input Dims": [[8, 3, 4, 4]], "Input type": ["float"]}, items=0)
    write_capture(tmp_path / "new" / "step", other)
    refused(run(kept, "--against", tmp_path / "new"), "record different programs", "share 0% of their operations")
    write_capture(tmp_path / "named" / "something", other)
    refused(run(kept, "--against", tmp_path / "named"), "of none of the baseline's programs")


def test_a_workload_with_other_settings(tmp_path: Path, run: Run) -> None:
    kept, new = pair(tmp_path, *({"workload": {"name": "llama", "settings": {"batch": batch}}} for batch in (4, 8)))
    refused(run(kept, "--against", new), "batch=8 where the baseline has 4")


def test_a_new_capture_under_another_name_goes_by_what_it_runs(kept: Path, tmp_path: Path) -> None:
    write_capture(kept / "second", step_trace(name="aten::conv2d", args={
        "Input Dims": [[8, 3, 4, 4]], "Input type": ["float"]}, items=0))
    pairs = pair_captures(find_captures(str(kept)), find_captures(str(write_capture(tmp_path / "fresh"))))
    assert [(pair.program, [new.name for new in pair.new]) for pair in pairs] == [("step", ["fresh"])]
    write_capture(kept / "third")
    with pytest.raises(CheckError, match="could be"):
        pair_captures(find_captures(str(kept)), find_captures(str(tmp_path / "fresh")))


@pytest.mark.parametrize(("trace", "words"), [
    (Micro(), "is empty"), (Micro().op("aten::linear", 0, 10, **SIZES), "has no steps")])
def test_empty_jobs(kept: Path, tmp_path: Path, run: Run, trace: Micro, words: str) -> None:
    write_capture(tmp_path / "new" / "step", trace)
    refused(run(kept, "--against", tmp_path / "new"), "step", words)


def test_a_capture_that_lost_its_end_is_not_work_saved(kept: Path, tmp_path: Path, run: Run) -> None:
    trace = write_capture(tmp_path / "new" / "step") / "rank0" / "kineto.json.gz"
    trace.write_bytes(trace.read_bytes()[:-500])
    refused(run(kept, "--against", tmp_path / "new"), "step is damaged", "ends too early")


@pytest.mark.parametrize(("new", "words"), [
    ("step", "baseline's own captures"), ("baseline.json", "no profiler trace"), ("/dev/null", "is a pipe or device"),
    ("absent", "does not exist"), (".", "own directory")])
def test_what_is_no_new_capture(kept: Path, run: Run, new: str, words: str) -> None:
    refused(run(kept, "--against", kept / new), words)


def test_a_new_trace_without_a_context_and_one_that_ended_early(kept: Path, tmp_path: Path) -> None:
    """A file by itself says nothing of PyTorch, of the machine, or of steps with nothing watching."""
    trace = write_capture(tmp_path / "new", complete=False, ended="the script raised ValueError") / "rank0"
    found = gate.check_against(str(kept), str(trace / "kineto.json.gz"))
    assert failed(found.verdicts) == set()
    assert not any("PyTorch" in note for note in found.notes)
    assert "step time" in {v.quantity for v in found.verdicts if v.status is Status.SKIPPED}
    notes = gate.check_against(str(kept), str(tmp_path / "new")).notes
    assert notes == ["The capture new is not complete: the script raised ValueError."]


@pytest.mark.parametrize(("options", "words"), [
    (("--update-baseline",), "needs --reason"), (("--update-baseline", "--reason", "  "), "needs --reason"),
    (("--reason", "x"), "--reason belongs to --update-baseline"),
    (("--update-baseline", "--reason", "x", "--against", "new"), "exclude each other"), (("--against", ""), "exist"),
    (("--tolerance", "little"), "is no share"), (("--tolerance", "-1%"), "is no share"),
    (("--tolerance", "5"), "would be 500%"), (("--resolution", "5"), "--resolution 5 would be 500%")])
def test_options_that_exclude_each_other(kept: Path, run: Run, options: tuple[str, ...], words: str) -> None:
    refused(run(kept, *options), words)
    assert run(kept, "--tolerance", "0.05").code == 0


@pytest.mark.parametrize("option", ["--junit", "--markdown"])
def test_a_report_replaces_nothing_that_is_checked(kept: Path, tmp_path: Path, run: Run, option: str) -> None:
    write_capture(tmp_path / "new" / "step")
    for victim in (kept / "baseline.json", kept / "step" / "rank0" / "kineto.json.gz",
                   tmp_path / "new" / "step" / "rank0" / "context.json"):
        before = victim.read_bytes()
        refused(run(kept, "--against", tmp_path / "new", option, victim), "would be overwritten")
        assert victim.read_bytes() == before
    (kept / "baseline.json").unlink()
    refused(run(kept, "--update-baseline", "--reason", "x", option, kept / "baseline.json"), "would be overwritten")
    refused(run(kept, "--junit", tmp_path / "out", "--markdown", tmp_path / "out"), "name two files")


def test_an_update_keeps_the_earlier_reasons(kept: Path, run: Run) -> None:
    write_capture(kept / "another")
    said = run(kept, "--update-baseline", "--reason", "one more\nprogram")
    assert said.code == 0
    assert "The new baseline is written: 8 figures of 2 programs" in plain(said.out)
    assert "Nothing got worse" not in plain(said.out)
    found = BaselineFile(str(kept)).read()
    assert [each.reason for each in found.reasons] == ["first", "one more program"]
    assert found.captures.keys() == {"step", "another"} and run(kept).code == 0


def test_an_update_that_fails_leaves_the_old_baseline_whole(kept: Path, run: Run,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    old = (kept / "baseline.json").read_bytes()
    broken = write_capture(kept / "broken")
    (broken / "rank0" / "kineto.json.gz").write_bytes(b"no trace")
    refused(run(kept, "--update-baseline", "--reason", "x"), "broken")
    shutil.rmtree(broken)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("os.replace", full)
        refused(run(kept, "--update-baseline", "--reason", "x"), "No space left")
    assert (kept / "baseline.json").read_bytes() == old
    assert [path.name for path in kept.iterdir() if path.name.startswith(".")] == []
    assert run(kept).code == 0
