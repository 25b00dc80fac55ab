"""The progress bar of reading, which leaves the process its single thread: copies of it read a job's ranks."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace

import pytest

import tracer.job
from step_views.cli.console import read, too_large


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
