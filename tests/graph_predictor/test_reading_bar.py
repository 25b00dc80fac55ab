"""The progress bar of reading, which leaves the process its single thread: copies of it read a job's ranks."""

from __future__ import annotations

import sys
import threading

import pytest

import tracer.job
from graph_predictor.cli.console import read


def test_a_bar_on_a_terminal_is_drawn_without_a_thread(monkeypatch: pytest.MonkeyPatch,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    alone, seen = threading.active_count(), []

    def read_job(paths: list[str], **given: object) -> list[str]:
        progress = given["progress"]
        assert callable(progress)
        progress(30_000, 90_000)
        seen.append(threading.active_count())
        return paths

    monkeypatch.setattr(tracer.job, "read_job", read_job)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert read(["rank0.json"]) == ["rank0.json"]  # type: ignore[comparison-overlap]
    assert seen == [alone]
    assert "30.0/90.0 kB" in capsys.readouterr().err
