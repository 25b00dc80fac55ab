"""``CaptureCourse``: a capture that begins, goes on and ends where a framework calls its hooks."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from tracer.capture import capture
from tracer.errors import CaptureError

if TYPE_CHECKING:
    from tracer.capture.session import Capture


class CaptureCourse:
    """One capture, driven by calls instead of a ``with`` block.

    It begins at the first step, so that the model is wrapped and process groups are up, and ends with training. A
    second training in the process records nothing more.

    Args:
        out: directory of the job.
        options: those of ``tracer.capture.capture``.
    """

    def __init__(self, out: str | os.PathLike[str], options: dict[str, Any]) -> None:
        self.capture: Capture = capture(out, **options)
        self._begun = False
        self._other_work = ""

    @property
    def finished(self) -> bool:
        """Return whether everything is recorded, or the capture ended early."""
        return self.capture.finished

    def begin_step(self) -> None:
        """Say that a step begins. What was noted as other work since the last one is left out of its time."""
        if self.finished:
            return
        if not self._begun:
            self.capture.__enter__()
            self._begun = True
        elif self._other_work:
            self.capture.leave_out(self._other_work)
        self._other_work = ""

    def end_step(self) -> None:
        """Say that the step has ended."""
        if self._begun:
            self.capture.step()

    def note_other_work(self, what: str) -> None:
        """Say that what runs until the next step begins is none of it, such as an evaluation."""
        self._other_work = what

    def end(self, error: BaseException | None = None) -> None:
        """Say that training has ended, of itself or by an error: what was recorded is written."""
        if self._begun:
            self.capture.__exit__(type(error) if error is not None else None, error,
                                  error.__traceback__ if error is not None else None)


def need(package: str, error: ImportError, install: str = "") -> CaptureError:
    """Return the error of a hook whose framework is not installed."""
    return CaptureError(f"This hook needs {package} ({error}); install it with: pip install {install or package}.")
