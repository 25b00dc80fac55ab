"""Coming back to benchmarks on a shared CPU: when a visit is due, when enough is known, what the tables then say."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pandas
import pytest

from kernel_models.calibration.planner import GAPS, Visits
from tracer.campaign import runner, tables
from tracer.campaign.families import FAMILIES
from tracer.campaign.items import Item, kernel_item
from tracer.campaign.record import Answer, Task
from tracer.campaign.results import Results
from tracer.campaign.runner import RunOptions, run_items
from tracer.campaign.source import Rows, Setup


def item(size: int) -> Item:
    return kernel_item("memset", FAMILIES["memset"].checked({"bytes": size}), seconds=0.1)


def test_a_benchmark_is_visited_later_and_later_until_two_visits_agree() -> None:
    visits = Visits(begun_s=0.0, time_s=96.0)
    visits.add(item(64), 100.0, now_s=10.0)
    assert visits.due(15.9) is None
    again = visits.due(16.0)
    assert again is not None and again.visit == 2 and again.id == item(64).id
    assert not visits.took(again, 130.0, now_s=16.0)  # slower: no agreement
    assert visits.due(31.9) is None
    again = visits.due(32.0)
    assert again is not None and again.visit == 3
    assert visits.took(again, 95.0, now_s=32.0)  # 100 and 95 agree
    assert visits.due(1e9) is None
    assert visits.spread() == [pytest.approx(130 / 95 - 1)]


def test_visits_that_never_agree_end_and_one_that_took_no_time_is_not_compared() -> None:
    visits = Visits(begun_s=0.0, time_s=96.0)
    visits.add(item(64), 0.0, now_s=0.0)
    again = visits.due(10.0)
    assert again is not None
    visits.took(again, 1.0, now_s=10.0)
    assert visits.spread() == []
    visits = Visits(begun_s=0.0, time_s=96.0)
    visits.add(item(64), 100.0, now_s=0.0)
    for number, time_us in enumerate((80.0, 64.0, 51.0)):
        again = visits.due(1e6 * (number + 1))
        assert again is not None
        visits.took(again, time_us, now_s=1e6 * number)
    assert visits.due(1e9) is None and len(GAPS) == 3


def test_near_the_end_visits_come_early() -> None:
    visits = Visits(begun_s=0.0, time_s=100.0)
    visits.add(item(64), 100.0, now_s=84.0)
    visits.add(item(128), 100.0, now_s=84.5)
    assert visits.due(84.9) is None  # due at 90.25
    first, second = visits.due(86.0), visits.due(86.0)
    assert first is not None and second is not None and {first.id, second.id} == {item(64).id, item(128).id}
    assert visits.due(86.0) is None
    visits.took(first, 50.0, now_s=86.0)
    assert visits.due(86.5) is None  # within a second of the last one it would see the same disturbance


def test_the_quickest_visit_has_the_times_and_the_first_one_the_rest() -> None:
    rows = [{"id": "a", "variant": "warm", "p10_us": 9.0, "p50_us": 11.0, "kernels": ["k"]},
            {"id": "a", "variant": "cold", "p10_us": 1.0, "p50_us": 1.0, "kernels": ["k"]},
            {"id": "a", "variant": "warm 2", "p10_us": 7.0, "p50_us": 8.0, "kernels": None},
            {"id": "a", "variant": "warm 3", "p10_us": 8.0, "p50_us": 8.5, "kernels": None},
            {"id": "b", "variant": "warm", "p10_us": 5.0, "p50_us": 6.0, "kernels": ["l"]},
            {"id": "c", "variant": "warm 2", "p10_us": 5.0, "p50_us": 6.0, "kernels": None}]
    others = dict.fromkeys(("runs", "min_us", "p25_us", "p75_us", "p90_us", "event_overhead_us"), 1.0)
    frame = pandas.DataFrame([{**others, **row} for row in rows])
    found = tables.quickest_visits(frame)
    assert found.id.tolist() == ["a", "b"]
    assert found.p10_us.tolist() == [7.0, 5.0] and found.p50_us.tolist() == [8.0, 6.0]
    assert found.kernels.tolist() == [["k"], ["l"]]


class Twice:
    """A source that gives one benchmark, then a visit of it, then one that fails."""

    def __init__(self) -> None:
        self.setup = Setup("calibration", "", "cpu", 1)
        one = item(4096)
        self._items = [one, msgspec.structs.replace(one, visit=2), msgspec.structs.replace(one, visit=3)]
        self.recorded: list[tuple[int, str, int]] = []

    def begin(self, lines: object) -> int:
        return 0

    def known(self) -> list[Item]:
        return []

    def started(self, context: object) -> None:
        pass

    def next(self, fits: object) -> Item | None:
        return self._items.pop(0) if self._items else None

    def record(self, asked: Item, result: object, rows: Rows) -> None:
        self.recorded.append((asked.visit, result.status, len(rows)))  # type: ignore[attr-defined]

    def planned(self) -> int:
        return 0

    def left(self) -> int:
        return len(self._items)

    def stopped(self) -> str:
        return ""


class Workers:
    """Answers at once; the third visit fails."""

    tasks_done = 1

    def __init__(self) -> None:
        self.context: dict[str, object] = {"hardware": {"device": "cpu"}}

    def take(self, *, fresh: bool) -> Workers:
        return self

    def ask(self, task: Task) -> None:
        self.asked = task.item

    def drop(self) -> None:
        pass

    prepare_next = close = drop

    def answer(self, seconds: float) -> Answer:
        visit = self.asked.visit
        if visit == 3:
            return Answer("failed", values={"status": "failed"}, reason="RuntimeError: out of luck.")
        row = {"variant": tables.warm_variant(visit), "p10_us": 10.0 - visit, "p50_us": 12.0, "runs": 10}
        rows = [row] if visit > 1 else [row, {**row, "variant": "cold"}]
        return Answer("done", values={"content": "kernels", "median_ns": 12000}, rows=rows)


def test_a_visit_adds_rows_and_takes_nothing_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "Workers", lambda *arguments: Workers())
    source = Twice()
    outcome = run_items(source, tmp_path / "out", RunOptions(minutes=1.0))
    assert source.recorded == [(1, "ok", 2), (2, "ok", 1), (3, "failed", 0)]
    assert len(outcome.results) == 1  # a visit is no further benchmark
    lines = Results.read(tmp_path / "out").lines
    assert len(lines) == 1 and next(iter(lines.values())).status == "ok"
    frame = tables.read_kernels(tmp_path / "out", "memset")
    assert sorted(frame.variant) == ["cold", "warm", "warm 2"]
    assert tables.quickest_visits(frame).p10_us.tolist() == [8.0]
