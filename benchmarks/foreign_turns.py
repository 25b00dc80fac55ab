"""How many times as long a script's step takes at other sizes, by processes that take turns.

    python benchmarks/foreign_turns.py SCRIPT -- [OPTIONS] -- [OPTIONS] ...

A machine that is shared changes its speed within seconds, so that two runs one after the other differ by more than a
prediction errs. Here the script runs once for each set of options, all at the same time, but only one of them at any
moment: every process goes on for a few steps, tells their times, and waits for its next turn. The first step of a turn
finds cold caches and does not count. The ratio is the median over the turns.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import numpy as np

STEPS = 4
"""Steps of a turn, of which the first does not count."""
WARM_UP = 5
"""Steps before the first turn."""
TURNS = 12
ENDED = 60.0
"""Seconds that a process may take to end."""


class Runner:
    """A script in a process of its own that runs when it is its turn."""

    def __init__(self, script: Path, words: Sequence[str], threads: int = 1) -> None:
        asked, self._ask = os.pipe()
        self._told, telling = os.pipe()
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--child", str(asked), str(telling), str(script), *words],
            pass_fds=(asked, telling), env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        os.close(asked)
        os.close(telling)
        self._lines = os.fdopen(self._told)

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None,
                 ) -> None:
        self._process.kill()
        self._process.communicate(timeout=ENDED)
        self._lines.close()
        os.close(self._ask)

    def turn(self) -> float:
        """Median step of one turn, ms. Raises ``RuntimeError`` where the script has ended."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._ask, b"\n")
        line = self._lines.readline()
        if not line:
            said = (self._process.communicate()[1] or b"").decode(errors="replace").strip().splitlines()
            raise RuntimeError(said[-1] if said else "the script ended before its turns did")
        return float(np.median([float(word) for word in line.split()]))


def ratios(script: Path, options: Sequence[Sequence[str]], *, turns: int = TURNS, threads: int = 1,
           ) -> list[list[float]]:
    """Of every set of options but the first, its step over the first one's, in every turn."""
    with contextlib.ExitStack() as stack:
        runners = [stack.enter_context(Runner(script, words, threads)) for words in options]
        times = [[runner.turn() for runner in runners] for _ in range(turns)]
    return [[row[number] / row[0] for row in times] for number in range(1, len(options))]


def _child(asked: int, telling: int, script: str, words: list[str]) -> None:
    """Run a script as Python does, and wait at the end of an optimizer's step until it is this one's turn."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    asking, last, times = os.fdopen(asked), [time.perf_counter()], list[float]()

    def after(*_: object) -> None:
        now = time.perf_counter()
        times.append((now - last[0]) * 1e3)
        if len(times) == WARM_UP + STEPS or (len(times) > WARM_UP and (len(times) - WARM_UP) % STEPS == 0):
            os.write(telling, (" ".join(f"{one:.6f}" for one in times[-STEPS + 1:]) + "\n").encode())
        if len(times) >= WARM_UP and (len(times) - WARM_UP) % STEPS == 0 and not asking.readline():
            os._exit(0)
        last[0] = time.perf_counter()

    register_optimizer_step_post_hook(after)
    sys.argv = [script, *words]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


def main() -> None:
    """Print the ratios of every set of options after the first."""
    if sys.argv[1:2] == ["--child"]:
        _child(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5:])
        return
    script, groups = sys.argv[1], [[]]  # type: tuple[str, list[list[str]]]
    for word in sys.argv[3:]:
        if word == "--":
            groups.append([])
        else:
            groups[-1].append(word)
    for words, found in zip(groups[1:], ratios(Path(script), groups), strict=True):
        low, middle, high = np.quantile(found, (0.1, 0.5, 0.9))
        print(f"{' '.join(words):<40} {middle:.3f} times the first (80% of turns {low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
