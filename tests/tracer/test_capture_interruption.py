"""Captures ended from outside keep what was measured and say so; progress is shown on terminals alone."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from forks import run_program

pytest.importorskip("torch")

from tracer.capture.interruption import Terminated, termination_unwinds, uninterrupted
from tracer.capture_layout import read_context

SCRIPT = """
import os, signal, sys, torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters())
for number in range(50):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    if number == 8:
        os.kill(os.getpid(), getattr(signal, sys.argv[1]))
"""


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """Ctrl-C counts here, and in what is started, also where the tests run in a background that ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(("name", "status", "says"), [
    ("SIGINT", 130, "was interrupted"), ("SIGTERM", 143, "was terminated")])
def test_ctrl_c_and_termination_keep_every_timed_step(name: str, status: int, says: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = run_program("from foretrace.commands import main; main()", "capture", "--out", tmp_path / "out", "--warmup",
                       2, "--timed", 40, script, "--", name)
    context = read_context(tmp_path / "out" / "rank0")
    assert len(context["unprofiled_step_ns"]) == 6 and context["complete"] is False
    assert done.returncode == status, done.stderr
    assert says in done.stderr and "6 timed steps" in done.stderr and "Traceback" not in done.stderr
    assert "Capturing" not in done.stderr  # no terminal, no progress


def test_writing_is_not_interrupted_and_the_signal_comes_after() -> None:
    seen = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        seen.append("written")
    assert seen == ["written"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_the_programs_own_stays() -> None:
    def own(number: int, frame: object) -> None:
        pass

    before = signal.signal(signal.SIGTERM, own)
    try:
        with termination_unwinds():
            assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)
    with pytest.raises(Terminated), termination_unwinds():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


QUIET = """
import os, sys
from tracer.capture.recorder import QuietStderr
quiet = QuietStderr()
with quiet.quiet():
    os.write(2, b"USDT: profiler_start\\nterminate called: CUPTI lost the device\\n")
    if sys.argv[1] == "abort":
        os.abort()
quiet.close()
os.write(2, b"the end\\n")
"""


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="nothing is held back where there are no files in memory")
@pytest.mark.parametrize(("how", "last"), [("abort", "CUPTI lost the device"), ("end", "the end")])
def test_the_last_words_of_a_process_that_aborts_are_written(how: str, last: str) -> None:
    ended = run_program(QUIET, how)
    assert ended.stderr.strip().endswith(last) and "terminate called" in ended.stderr
    assert (ended.returncode == 0) == ("USDT" not in ended.stderr) == (how == "end")
