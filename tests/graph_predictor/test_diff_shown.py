"""What ``diff`` shows agrees with itself: B less A in every row, nothing of one program in the other, no zero with a
sign, and the same the other way round."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from report_support import ROOT, real_trace
from said import Run
from said_facts import rows_of_table

OWN = [f"traces/{name}" for name in ("bert-cpu", "cpu-small", "llama-cpu")]
GPUS = "h100-vs-mi300/{}-gaunernst_bert-small-uncased.json.gz"
PAIRS = [(name, name) for name in OWN] + [
    (GPUS.format("h100"), GPUS.format("mi300")), (GPUS.format("mi300"), GPUS.format("h100")),
    ("h100-vs-mi300/h100-Qwen_Qwen1.5-0.5B-Chat.json.gz", "h100-vs-mi300/mi300-Qwen_Qwen1.5-0.5B-Chat.json.gz"),
    ("linear-2080Ti", "linear-2080Ti")]


def found(name: str) -> Path:
    return ROOT / name if name.startswith("traces/") else real_trace(name)


def us(text: str) -> int:
    return round(1000 * float(text.replace(",", "")))


def shown(run: Run, one: str, other: str) -> str:
    ran = run("diff", found(one), found(other), "--top", 200)
    assert ran.code == 0, ran.err
    return ran.out


@pytest.mark.real_traces
@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_every_row_is_b_less_a(one: str, other: str, run: Run) -> None:
    text = shown(run, one, other)
    assert not re.search(r"[-+]0\.0+%?(?![\d.])", text)
    a, b = (us(ms) for ms in re.search(r"(?m)^A ([\d.,]+) ms, B ([\d.,]+) ms", text).groups())  # type: ignore[union-attr]
    if between := re.search(r"B's step is ([\d.,]+) ms", text):
        assert us(between[1]) == abs(b - a)
    else:
        assert abs(b - a) <= 1
    for row in rows_of_table(text, "Causes: first of"):
        kind, (before, after, ms) = row[0], row[-4:-1]
        if before == after == "–":
            continue
        known = [0 if each == "–" else us(each) for each in (before, after)]
        assert us(ms) == known[1] - known[0], row
        assert (before == "–") == (kind == "only in B") and (after == "–") == (kind == "only in A"), row


@pytest.mark.parametrize("name", OWN)
def test_a_recording_does_not_differ_from_itself(name: str, run: Run) -> None:
    found_json = run("diff", found(name), found(name), "--json").json
    assert found_json["total_us"] == 0 and not found_json["parts"]


@pytest.mark.real_traces
def test_exchanged_recordings_give_the_difference_the_other_way_round(run: Run) -> None:
    names = [GPUS.format(device) for device in ("h100", "mi300")]
    there, back = (run("diff", *map(found, pair), "--json", "--top", 500).json for pair in (names, names[::-1]))
    assert there["total_us"] == pytest.approx(-back["total_us"], abs=0.002)
    assert there["before_us"] == pytest.approx(back["after_us"], abs=0.002)
    exchanged = {"only in A": "only in B", "only in B": "only in A"}
    kinds = {kind["kind"]: kind["time_us"] for kind in there["kinds"]}
    mirrored = {exchanged.get(kind["kind"], kind["kind"]): -kind["time_us"] for kind in back["kinds"]}
    for kind in kinds.keys() | mirrored.keys():
        assert kinds.get(kind, 0.0) == pytest.approx(mirrored.get(kind, 0.0), abs=0.02 * abs(there["total_us"])), kind
