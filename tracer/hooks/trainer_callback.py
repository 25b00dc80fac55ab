"""``TrainerCapture``: a callback of Hugging Face's ``Trainer``, and of trainers built on it (TRL, PEFT recipes)."""

from __future__ import annotations

import os
from typing import Any

from tracer.hooks.loops import CaptureCourse, need

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise need("transformers", error) from error


class TrainerCapture(TrainerCallback):  # type: ignore[misc]  # transformers is not type checked here
    """Capture a training by Hugging Face's ``Trainer``.

        Trainer(…, callbacks=[TrainerCapture("runs/a")]).train()

    A step is one of the optimizer's, for any ``gradient_accumulation_steps``. Evaluations and checkpoints between
    steps are left out of the times; a warning reports one within a profiled step.

    Args:
        out: directory of the job.
        stop: end the training when everything is recorded.
        options: those of ``tracer.capture.capture`` (``steps``, ``warmup``, ``timed``, …).

    Attributes:
        capture: the capture itself.
    """

    def __init__(self, out: str | os.PathLike[str], *, stop: bool = False, **options: Any) -> None:
        self._course = CaptureCourse(out, options)
        self._stop = stop
        self.capture = self._course.capture

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin the capture with the first step."""
        self._course.begin_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """End a step; ask the trainer to stop if that was wanted and all is recorded."""
        self._course.end_step()
        if self._stop and self._course.finished:
            control.should_training_stop = True
        return control

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave an evaluation out of the steps' times."""
        self._course.note_other_work("an evaluation")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave a checkpoint out of the steps' times."""
        self._course.note_other_work("a checkpoint")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write what was recorded."""
        self._course.end()
