"""``examples/demo.py`` may be run again at any time: after it ended, was interrupted or was killed."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("torch", reason="the demo records a training step")

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "examples" / "demo.py"
OLD, NEW = {"calibration": ["old"]}, {"calibration": ["new"]}


@pytest.fixture(scope="module")
def demo() -> Any:
    spec = importlib.util.spec_from_file_location("examples_demo", DEMO)
    assert spec is not None and spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def files_of(demo: Any, out: Path) -> Any:
    return demo.DemoFiles(out, ["one", "two"], ["three"])


def leave(demo: Any, out: Path, settings: dict[str, Any], *, finished: bool) -> Any:
    """What a demo leaves that has run until its calibration, which finished or did not."""
    files = files_of(demo, out)
    with files.locked():
        files.clear(settings)
    for folder in (*files.captures, files.work):
        folder.mkdir()
        (folder / "campaign.json").write_text(str(settings))
    if finished:
        files.profile.write_text("")
    return files


def test_a_calibration_goes_on_only_where_it_was_interrupted_with_the_same_settings(demo: Any, tmp_path: Path) -> None:
    for name, before, finished, goes_on in (("interrupted", NEW, False, True), ("finished", NEW, True, False),
                                            ("other", OLD, False, False), ("both", OLD, True, False)):
        files = leave(demo, tmp_path / name, before, finished=finished)
        files.clear(NEW)
        assert (files.is_begun, files.profile.exists()) == (goes_on, False), name
        assert not any(path.exists() for path in files.captures), name


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("settings", [OLD, NEW])
def test_a_kill_while_files_are_removed_harms_nothing(demo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                      settings: dict[str, Any], finished: bool) -> None:
    class Killed(BaseException):
        pass

    remove, write = demo.remove, demo.whole_file
    for survived in range(12):
        files = leave(demo, tmp_path / str(survived), settings, finished=finished)
        left = survived

        def until_killed(act: Any, path: Path) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            return act(path)

        with monkeypatch.context() as patched:
            patched.setattr(demo, "remove", lambda path: until_killed(remove, path))
            patched.setattr(demo, "whole_file", lambda path: until_killed(write, path))
            try:
                files.clear(NEW)
            except Killed:
                pass
            else:
                return
        files_of(demo, tmp_path / str(survived)).clear(NEW)
        assert files.is_begun == (settings == NEW and not finished), survived
        assert not any(path.exists() for path in (*files.captures, files.profile)), survived
    raise AssertionError("nothing was reached without a kill")


def test_files_of_others_stay(demo: Any, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    (mine / "this-machine.measurements").mkdir(parents=True)
    files = files_of(demo, mine)
    with pytest.raises(demo.Failed, match=r"this-machine\.measurements is no demo's"), files.locked():
        files.clear(NEW)
    assert [path.name for path in mine.iterdir()] == ["this-machine.measurements"]

    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "thesis.tex").write_text("text")
    files = leave(demo, shared, NEW, finished=True)
    files.work.rename(mine / "kept")
    files.work.symlink_to(mine / "kept")
    files.clear(NEW)
    assert sorted(path.name for path in shared.iterdir()) == ["demo.json", "thesis.tex"]
    assert (mine / "kept" / "campaign.json").exists(), "a link goes, and not what it leads to"
    # The files of an earlier version, without a note, are replaced.
    files = leave(demo, tmp_path / "earlier", NEW, finished=True)
    (tmp_path / "earlier" / "demo.json").unlink()
    files.clear(NEW)
    assert not files.work.exists() and not files.profile.exists()


class Run:
    """One run of the demo, in a process of its own, and what it printed up to now."""

    def __init__(self, out: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self.process = subprocess.Popen([sys.executable, str(DEMO), "--quick", "--out", str(out)], env=environment,
                                        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                        start_new_session=True)
        self.printed = ""

    def until(self, text: str) -> None:
        """Wait for a line that has the text."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.printed += line
            if text in line:
                return
        raise AssertionError(self.printed)

    def end(self) -> int:
        """Wait for its end; return its exit code."""
        self.printed += self.process.communicate(timeout=300)[0]
        return self.process.returncode


@pytest.mark.slow
def test_the_demo_runs_again_after_a_kill_an_interruption_and_its_end(tmp_path: Path) -> None:
    killed = Run(tmp_path)
    killed.until("measurements; least known")
    killed.process.kill()

    two_at_once = Run(tmp_path)
    two_at_once.until("$ foretrace capture")
    refused = Run(tmp_path)
    assert refused.end() == 1 and "Another demo is running" in refused.printed
    os.killpg(two_at_once.process.pid, signal.SIGINT)
    assert two_at_once.end() == 1 and "Interrupted. The next demo goes on" in two_at_once.printed

    resumed = Run(tmp_path)
    assert resumed.end() == 0, resumed.printed
    assert "this-machine.profile --resume" in resumed.printed and "measures again" not in resumed.printed
    again = Run(tmp_path)
    assert again.end() == 0, again.printed
    assert "--resume" not in again.printed and "never run before" in again.printed
