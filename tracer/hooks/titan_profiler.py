"""``TitanCapture`` replaces torchtitan's profiler and keeps its interface (0.3)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from tracer.hooks.loops import CaptureCourse, need

try:
    from torchtitan.tools.profiler import Profiler
except ImportError as error:
    raise need("torchtitan 0.3 or newer", error, "torchtitan") from error


class TitanCapture(Profiler):  # type: ignore[misc]  # torchtitan is not type checked here
    """Capture a training by torchtitan.

        config.profiler = TitanCapture.Config(out="runs/a")

    The trainer builds it, enters it around its loop and calls ``step`` at the end of each step. What torchtitan's own
    profiler does (its trace schedule, memory snapshots) is not done.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Profiler.Config):  # type: ignore[misc,name-defined]
        """Where to capture and how much; see ``tracer.capture.capture``."""

        out: str = "foretrace"
        """Directory of the job, within the trainer's dump folder unless absolute."""
        steps: int = 3
        """Profiled steps."""
        warmup: int = 3
        """Steps before anything is measured."""
        timed: int = 10
        """Steps timed without the profiler."""

    def __enter__(self) -> TitanCapture:
        chosen: Any = self._config
        self._course = CaptureCourse(os.path.join(self._base_folder, chosen.out),
                                     {"steps": chosen.steps, "warmup": chosen.warmup, "timed": chosen.timed})
        self._course.begin_step()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        self._course.end(error)

    def step(self) -> None:
        """Mark the end of a step."""
        self._course.end_step()
