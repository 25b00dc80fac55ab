"""Files kept for the next process: where, and what is left where keeping one fails."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tracer.kept_files import kept_folders, read_kept, write_kept


def test_a_file_comes_back_or_is_none(tmp_path: Path) -> None:
    assert write_kept(tmp_path / "new", "one.kept", b"text")
    path = tmp_path / "new" / "one.kept"
    assert read_kept(path) == b"text"
    path.write_bytes(path.read_bytes()[:-1])
    assert read_kept(path) is None
    assert read_kept(tmp_path / "absent") is None


def test_no_folder_is_relative_to_where_a_command_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Machine code would be loaded from what anybody has put there."""
    monkeypatch.setenv("XDG_CACHE_HOME", "rel")
    assert all(folder.is_absolute() for folder in kept_folders())
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # a user whom nobody knows has no home
    assert all(folder.is_absolute() for folder in kept_folders())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert next(kept_folders()) == tmp_path / "foretrace"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert read_kept(tmp_path / "pipe") is None


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert not write_kept(tmp_path, "one.kept", b"text")
    assert list(tmp_path.iterdir()) == []
