"""Ranks read by copies of this process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest

import tracer.job
from tracer.cluster import Failed, LostWorkerError, forked
from tracer.cluster.forked import ForkedWorkers, idle_cores
from tracer.columns import is_constant
from tracer.errors import ForetraceError, TraceError
from tracer.job import read_job

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="processes are forked on Linux alone")


def _work(item: int) -> np.ndarray:
    if item == 3:
        raise ForetraceError("Three is too many.")
    if item == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    if item == 7:
        raise ZeroDivisionError("seven")
    return np.arange(item)


def test_results_come_in_order_and_a_process_that_dies_takes_its_item_alone_along() -> None:
    with ForkedWorkers(2) as workers:
        found = list(workers.map(_work, [4, 0, 3, 6, 5, *[1] * 30]))
    assert [len(each) for each in found if not isinstance(each, Failed)] == [4, 0, 6, *[1] * 30]
    assert isinstance(found[2], Failed) and str(found[2].error) == "Three is too many."
    assert isinstance(found[4], Failed) and isinstance(found[4].error, LostWorkerError)
    found[0][0] = 9  # results can be written to


def _children() -> set[str]:
    found = [path.read_text().split() for path in Path("/proc/self/task").glob("*/children")]
    return {child for children in found for child in children}


def test_other_errors_are_raised_and_leave_no_process() -> None:
    before = _children()
    with pytest.raises(ZeroDivisionError, match="seven"), ForkedWorkers(2) as workers:
        list(workers.map(_work, [1, 7, 2, 2]))
    with pytest.raises(KeyboardInterrupt), ForkedWorkers(2) as workers:
        next(workers.map(_work, [1, 2, 2]))
        raise KeyboardInterrupt
    assert _children() <= before


def test_columns_of_one_value_are_handed_over_as_such() -> None:
    with ForkedWorkers(1) as workers:
        [found] = workers.map(_alike, [1 << 20])
    assert not isinstance(found, Failed)
    assert is_constant(found) and found.shape == (1 << 20,) and found[-1] == 7


def _alike(rows: int) -> np.ndarray:
    return np.broadcast_to(np.array([7]), rows)


@pytest.mark.parametrize(("running", "idle"), [(1, 2), (2, 1), (9, 1)])
def test_cores_that_others_use_are_not_counted(running: int, idle: int, tmp_path: Path,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "loadavg").write_text(f"0.00 0.01 0.05 {running}/123 4567\n")
    monkeypatch.setattr(forked, "_LOAD", tmp_path / "loadavg")
    monkeypatch.setattr(forked, "cores", lambda: 2)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert idle_cores() == idle


def test_a_process_with_threads_or_on_one_core_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(idle_cores()))
    thread.start()
    thread.join()
    assert found == [1]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    assert idle_cores() == 1


def _read_as_a_daemon(folder: str) -> list[list[str]]:
    tracer.job.LEAST_BYTES, tracer.job.idle_cores = 0, lambda: 2
    return [graph.strings for graph in read_job(folder).graphs]


@pytest.mark.slow
def test_a_daemon_reads_ranks_by_copies(tmp_path: Path) -> None:
    _write_job(tmp_path)
    with multiprocessing.get_context("spawn").Pool(1) as pool:  # its processes are daemons, which may have no others
        assert pool.apply(_read_as_a_daemon, (str(tmp_path),)) == [g.strings for g in read_job(tmp_path).graphs]


def _write_job(folder: Path) -> None:
    """Three ranks, and a fourth that holds nothing."""
    for rank in range(3):
        event = f'{{"ph":"X","cat":"cpu_op","name":"op{rank}","pid":1,"tid":1,"ts":{rank + 1},"dur":2}}'
        (folder / f"rank{rank}.json").write_text(f'{{"traceEvents":[{event}]}}')
    (folder / "rank3.json").write_text('{"traceEvents":[]}')


def test_a_job_is_the_same_however_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write_job(tmp_path)
    alone = read_job(tmp_path)
    monkeypatch.setattr(tracer.job, "LEAST_BYTES", 0)
    monkeypatch.setattr(tracer.job, "idle_cores", lambda: 2)
    together = read_job(tmp_path)
    assert together.notes == alone.notes and any("rank3" in note for note in together.notes)
    assert [graph.strings for graph in together.graphs] == [graph.strings for graph in alone.graphs]
    with pytest.raises(TraceError, match=r"rank3\.json holds nothing to read"):
        read_job([tmp_path / "rank0.json", tmp_path / "rank3.json"])
