"""Small steps of several programs recorded alternately, so that the machine's changing speed affects all of them alike.

One process builds all programs and visits them in rounds: it times some unprofiled steps of a program, profiles some,
and goes on to the next program. A virtual machine's core is half as fast while a neighbour uses its other thread.
Captures made one after the other, minutes apart, differ by that; captures of one round do not. A neighbour that fills
the shared cache slows a program down even where a short loop runs at full speed. So each program is also compared with
its own fastest round. Each capture is a directory ``OUT/<program>/round<n>`` that foretrace reads. Of each program the
least disturbed rounds are kept.
"""

from __future__ import annotations

import gc
import math
import shutil
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tracer.capture import capture
from tracer.capture.session import need_torch
from tracer.errors import CaptureError

STEPS, TIMED, WARM_UP, FIRST_STEPS = 3, 9, 2, 20  # chosen: steps of a capture, and before the first one
TRIES = 4  # chosen: after these a disturbed capture is kept
PROBE_ROUNDS = 4000
"""Iterations of the loop whose time shows the core's speed; about 0.1 ms."""
SLOW = 1.2  # chosen: ratio above which the loop counts as disturbed
SLOW_STEPS = 1.1
"""A program's steps are recorded again if they take longer than this multiple of its fastest round's."""
SETTLE_S = 0.5  # chosen: a pause in which other work may end

Program = tuple[Callable[[], object], Mapping[str, Any]]
"""A step, and the facts of its captures."""


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """How much to record.

    Attributes:
        rounds: largest number of rounds.
        keep: number of least disturbed rounds that are kept of each program.
        seconds: time after which no round begins; running ones are finished.
    """

    rounds: int = 12
    keep: int = 6
    seconds: float = float("inf")


class Core:
    """Tells whether this thread's core runs at full speed: a loop takes at most ``SLOW`` times its shortest time."""

    def __init__(self) -> None:
        self.best_ns = min(self._loop_ns() for _ in range(20))

    def _loop_ns(self) -> int:
        times = []
        for _ in range(2):
            start = time.perf_counter_ns()
            for _ in range(PROBE_ROUNDS):
                pass
            times.append(time.perf_counter_ns() - start)
        return min(times)

    def calm(self) -> bool:
        """Return whether the core runs at full speed now."""
        now = self._loop_ns()
        self.best_ns = min(self.best_ns, now)
        return now <= SLOW * self.best_ns

    def settle(self) -> bool:
        """Wait up to ``SETTLE_S`` until the core runs at full speed; return whether it does."""
        end = time.monotonic() + SETTLE_S
        while not (calm := self.calm()) and time.monotonic() < end:
            time.sleep(0.01)
        return calm


def built_on(on: str, threads: int = 1) -> tuple[str, dict[str, Callable[[], object]]]:
    """Return the device to which ``on`` refers, and all steps built on it.

    Args:
        on: "cpu", "cuda", or "auto": a GPU if PyTorch sees one.
        threads: number of threads of a CPU's operations.

    Raises:
        CaptureError: PyTorch is missing, or sees no GPU.
    """
    need_torch()
    import torch

    from tracer.campaign.host_programs import PROGRAMS

    there = torch.cuda.is_available()
    if on == "cuda" and not there:
        raise CaptureError("PyTorch sees no GPU here; give --on cpu, or install its CUDA build.")
    device = "cuda" if there and on != "cpu" else "cpu"
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    return device, {name: build(device) for name, build in PROGRAMS.items()}


def record_rounds(programs: Mapping[str, Program], out: Path, plan: RoundPlan,
                  say: Callable[[str], None] = lambda text: None) -> int:
    """Warm all programs up, and record them round by round; return how many rounds are kept.

    Args:
        programs: By name, built on this process's device.
        out: Directory of the captures.
        plan: Amount to record.
        say: Called with a line on each round.

    Raises:
        CaptureError: a capture cannot be written.
    """
    end = time.monotonic() + plan.seconds
    for step, _ in programs.values():
        for _ in range(FIRST_STEPS):
            step()
    gc.collect()
    gc.freeze()  # new objects are kept out of garbage collections during a step
    core, names = Core(), list(programs)
    taken: dict[str, list[float]] = {name: [] for name in names}
    longest = 0.0
    for number in range(plan.rounds):
        begun = time.monotonic()
        if number and begun + longest > end:
            break
        turn = number % len(names)
        calm = [_recorded(programs[name], out / name / f"round{number}", core, taken[name])
                for name in names[turn:] + names[:turn]]
        longest = max(longest, time.monotonic() - begun)
        say(f"round {number + 1}: {sum(calm)} of {len(names)} programs undisturbed, {longest:.1f} s a round")
    return _keep(out, taken, plan.keep)


def _recorded(program: Program, out: Path, core: Core, taken: list[float]) -> bool:
    """Record some steps, again if the core or the steps were slow; return whether the last try was undisturbed."""
    step, facts = program
    quickest = min(taken, default=math.inf)
    for _ in range(TRIES):
        calm = core.settle()
        with capture(out, steps=STEPS, warmup=WARM_UP, timed=TIMED, execution_trace="none", form="foretrace",
                     replace=True, python_calls=True) as recorder:
            recorder.facts = dict(facts)
            while not recorder.finished:
                step()
                recorder.step()
        median = statistics.median(recorder.unprofiled_step_ns)
        calm = calm and core.calm() and median <= SLOW_STEPS * quickest
        if calm:
            break
    taken.append(median)
    return calm


def _keep(out: Path, taken: Mapping[str, list[float]], keep: int) -> int:
    """Delete the slowest rounds of each program, and renumber the others; return the number that is left."""
    for name, medians in taken.items():
        rounds = sorted(range(len(medians)), key=medians.__getitem__)
        for number in rounds[keep:]:
            shutil.rmtree(out / name / f"round{number}")
        for place, number in enumerate(sorted(rounds[:keep])):
            (out / name / f"round{number}").rename(out / name / f"round{place}")
    return min(keep, *(len(medians) for medians in taken.values()))
