"""Scripts traced by forks of one interpreter: each has the asking process's surroundings, and nothing of another's."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from tracer.shape_only.apart import WaitingTracer, possible, trace_apart

SCRIPT = """
import os, sys, torch
print("seen", os.environ.get("WORD"), os.getcwd(), hasattr(torch, "left_behind"))
print("told", file=sys.stderr)
torch.left_behind = True

def build(batch=2):
    x = torch.randn(batch, 4)
    return lambda: x @ x.T
"""


def test_each_script_has_the_surroundings_of_who_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                      capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "step.py").write_text(SCRIPT)
    shapes = []
    for word in ("one", "two"):
        folder = tmp_path / word
        folder.mkdir()
        monkeypatch.chdir(folder)
        monkeypatch.setenv("WORD", word)
        shapes.append(len(trace_apart(f"{tmp_path / 'step.py'}:build", "cpu", arguments={"batch": 3}).ops))
        said = capfd.readouterr()
        assert f"seen {word} {folder} False" in said.out and "told" in said.err
    assert shapes[0] == shapes[1] > 0


@pytest.mark.skipif(not possible(), reason="processes are forked on Linux only")
def test_an_interpreter_that_ends_is_told_and_another_one_starts(tmp_path: Path) -> None:
    waiting = WaitingTracer()
    assert waiting.run(str(tmp_path / "absent")) == 1  # its fork found no request
    assert waiting._process is not None
    waiting._process.kill()
    assert waiting.run(str(tmp_path)) != 0
    assert waiting._process is None
    waiting.close()
