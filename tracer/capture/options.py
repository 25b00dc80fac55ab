"""Options of a capture, checked before anything starts, and ways to count its steps."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import Enum
from typing import Literal, get_args

from tracer.errors import CaptureError
from tracer.fake_world.fit import FakeWorldError, check_world

Form = Literal["json", "foretrace"]
Observed = Literal["apart", "all", "none"]
"""Steps of the execution trace: a separate one after the last window, those of every window, or none."""

PROFILER_WARMUP = 2
"""Discarded steps under the running profiler before each window: the first steps initialise CUPTI and its buffers."""
FREE_RUNNING = 4
"""Most steps that are timed together, with a single wait for the devices at their end."""
TRACED_APART = 1
"""Steps of a separately recorded execution trace."""


class CaptureWarning(UserWarning):
    """A capture ended without everything that it was asked to record."""


class CapturePhase(Enum):
    """A stage of a capture's progress."""

    NEW = "not entered"
    WARMUP = "the warm-up steps"
    TIMED = "the timed steps"
    FREE = "the free-running steps"
    PROFILED = "the profiled steps"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class CaptureOptions:
    """The options of a capture, see ``tracer.capture.capture``.

    Raises:
        CaptureError: a value is wrong.
    """

    steps: int = 3
    warmup: int = 3
    timed: int = 10
    cycles: int = 1
    execution_trace: Observed = "apart"
    form: Form = "json"
    stacks: bool = False
    replace: bool = False
    lookups: bool = False
    python_calls: bool = False
    profile_memory: bool = False

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("warmup", 0), ("timed", 0), ("cycles", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise CaptureError(f"{name}={value!r} is not possible: give a whole number, {least} or more.")
        for name, known in (("execution_trace", get_args(Observed)), ("form", get_args(Form))):
            if getattr(self, name) not in known:
                raise CaptureError(f"{name}={getattr(self, name)!r} is not known: choose one of {', '.join(known)}.")

    @property
    def total_steps(self) -> int:
        """Return the number of steps that the script must run until everything is recorded."""
        windows = self.cycles * (PROFILER_WARMUP + self.steps)
        return self.warmup + self.timed + self.free_running + windows + self.traced_steps

    @property
    def free_running(self) -> int:
        """Return the number of steps that are timed together after the separately timed ones; 0 without a GPU."""
        torch = sys.modules.get("torch")
        return min(self.timed, FREE_RUNNING) if torch is not None and torch.cuda.is_available() else 0

    @property
    def traced_steps(self) -> int:
        """Return the number of steps after the windows that record only the execution trace."""
        return TRACED_APART if self.execution_trace == "apart" else 0

    @property
    def parts(self) -> str:
        """Return ``total_steps`` in words, as a sum of its parts."""
        window = f"{PROFILER_WARMUP} profiler warm-up + {self.steps} profiled"
        return " + ".join([*([f"{self.warmup} warm-up"] if self.warmup else []),
                           *([f"{self.timed} timed"] if self.timed else []),
                           *([f"{self.free_running} free-running"] if self.free_running else []),
                           window if self.cycles == 1 else f"{self.cycles} × ({window})",
                           *([f"{self.traced_steps} traced"] if self.traced_steps else [])])


def world_of(world_size: int | None, rank: int) -> tuple[int, int] | None:
    """Return the checked (world size, rank) of a fake world; ``None`` if none is asked for. Raises ``CaptureError``."""
    if world_size is None:
        if rank != 0:
            raise CaptureError(f"rank={rank} is of a fake world; give its world_size too. (A rank of a real job is "
                               "known from torch.distributed.)")
        return None
    try:
        check_world(world_size, rank)
    except FakeWorldError as error:
        raise CaptureError(str(error)) from None
    return world_size, rank


@dataclass(frozen=True, slots=True)
class Counting:
    """A way to count steps.

    Attributes:
        unit: Name of the counted steps, in the plural.
        rule: Definition of a step; empty if it needs no explanation.
        never: Sentence for the case that there was none.
        before: Steps that pass before the capture begins.
    """

    unit: str
    rule: str
    never: str
    before: int = 0

    def needed(self, options: CaptureOptions) -> int:
        """Return the number of steps that the script must run until everything is recorded."""
        return self.before + options.total_steps

    def too_few(self, options: CaptureOptions, done: int, phase: str) -> str:
        """Return the sentence for a script that ended after ``done`` steps of the capture, in ``phase``."""
        parts = f"{f'{self.before} first + ' if self.before else ''}{options.parts}"
        rule = f"; {self.rule}" if self.rule else ""
        where = f", in {phase}: run more steps, or ask for fewer." if done else f": {self.never}"
        return (f"the script ended after {done + self.before} of the {self.needed(options)} {self.unit} it needs "
                f"({parts}{rule}){where}")


BY_CALL = Counting("steps", "", "capture.step() was never called; call it at the end of each step.")
BY_FUNCTION = Counting("calls of the decorated function", "each call is one step",
                       "it never returned; let each call be one step.")


def by_optimizer(number: int = 0) -> Counting:
    """Return how to count steps of optimizer ``number``, from 0 in order of first steps. Raises ``CaptureError``."""
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise CaptureError(f"optimizer={number!r} is not possible: give a whole number, 0 for the one that makes the "
                           "script's first step.")
    which = f"optimizer {number}" if number else "the first optimizer"
    return Counting("optimizer steps", f"each step of {which} is one, and its first one ends the script's preparations",
                    "run more steps, or ask for fewer.", before=1)
