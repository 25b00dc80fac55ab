"""``AccelerateCapture``: a capture around a loop of one's own with Hugging Face Accelerate."""

from __future__ import annotations

import os
from collections.abc import Iterable
from types import TracebackType
from typing import Any, TypeVar

from tracer.hooks.course import CaptureCourse

Batch = TypeVar("Batch")


class AccelerateCapture:
    """Capture a loop that Accelerate runs.

        with AccelerateCapture(accelerator, "runs/a") as capture:
            for batch in loader:
                with accelerator.accumulate(model):
                    …
                capture.step()

    ``step`` is called for each batch; a step ends where gradients were synchronised, that is with the last batch of an
    accumulation.

    Args:
        accelerator: the ``accelerate.Accelerator``, with model and optimizer prepared before the block.
        out: directory of the job.
        options: those of ``tracer.capture.capture`` (``steps``, ``warmup``, ``timed``, …).

    Attributes:
        capture: the capture itself.
    """

    def __init__(self, accelerator: Any, out: str | os.PathLike[str], **options: Any) -> None:
        self._accelerator = accelerator
        self._course = CaptureCourse(out, options)
        self.capture = self._course.capture

    @property
    def finished(self) -> bool:
        """Return whether the loop may end: everything is recorded, or the capture ended early."""
        return self._course.finished

    def __enter__(self) -> AccelerateCapture:
        self._course.begin_step()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        self._course.end(error)

    def step(self) -> None:
        """Say that a batch was worked off."""
        if self._accelerator.sync_gradients:
            self._course.end_step()

    def leave_out(self, what: str = "other work") -> None:
        """Say that what ran since the last step ended is none of the next, such as an evaluation."""
        self.capture.leave_out(what)

    def wrap(self, loader: Iterable[Batch]) -> Iterable[Batch]:
        """Return the loader with each fetch marked as data loading, see ``Capture.wrap``."""
        return self.capture.wrap(loader)
