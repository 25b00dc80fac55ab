"""Files kept for the next process: where, and what is left where keeping one fails."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tracer import kept_files
from tracer.kept_files import KEY, places, read_kept, write_kept


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where files are kept, not yet there."""
    monkeypatch.setattr(kept_files, "places", lambda: iter([str(tmp_path / "new" / "place")]))
    return tmp_path / "new" / "place"


@pytest.mark.parametrize("users", [True, False], ids=["by descriptors", "as on Windows"])
def test_a_file_comes_back_or_is_none(users: bool, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_files, "_USERS", users and kept_files._USERS)
    assert read_kept("one.kept") is None
    assert write_kept("one.kept", b"text")
    assert read_kept("one.kept") == b"text"
    (place / "one.kept").write_bytes((place / "one.kept").read_bytes()[:-1])
    assert read_kept("one.kept") is None
    assert write_kept("one.kept", b"text") and read_kept("one.kept") == b"text"
    (place / KEY).write_bytes(b"another")
    assert read_kept("one.kept") is None and not write_kept("one.kept", b"text")


def _link(path: Path) -> None:
    path.symlink_to(path.rename(path.parent.parent / "elsewhere"))


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="this system has no modes of files")
@pytest.mark.parametrize("spoil", [
    lambda place: _link(place / "one.kept"), lambda place: os.link(place / "one.kept", place.parent / "another"),
    lambda place: (place / "one.kept").chmod(0o620), lambda place: (place / KEY).chmod(0o640), _link,
    lambda place: place.chmod(0o720), lambda place: place.parent.chmod(0o770),
    lambda place: (place / "one.kept").write_bytes(bytes(32) + b"text"),
    lambda place: ((place / "one.kept").unlink(), os.mkfifo(place / "one.kept"))],
    ids=["link", "hard link", "open file", "known key", "linked folder", "open folder", "open above", "unsigned",
         "pipe"])
def test_what_another_user_could_have_changed_is_not_used(spoil: Callable[[Path], object], place: Path) -> None:
    assert write_kept("one.kept", b"text") and read_kept("one.kept") == b"text"
    spoil(place)
    assert read_kept("one.kept") is None


def test_no_folder_is_relative_to_where_a_command_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Machine code would be loaded from what anybody has put there."""
    monkeypatch.setenv("XDG_CACHE_HOME", "rel")
    assert all(map(os.path.isabs, places()))
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # a user whom nobody knows has no home
    assert all(map(os.path.isabs, places()))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert next(places()) == str(tmp_path / "foretrace")


def test_a_full_disk_leaves_nothing_behind(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert not write_kept("one.kept", b"text")
    assert list(place.iterdir()) == []
