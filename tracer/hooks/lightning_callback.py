"""``LightningCapture``: a callback of Lightning's ``Trainer``."""

from __future__ import annotations

import os
from typing import Any

from tracer.hooks.loops import CaptureCourse, need

try:
    from lightning.pytorch.callbacks import Callback
except ImportError:
    try:
        from pytorch_lightning.callbacks import Callback
    except ImportError as error:
        raise need("Lightning", error, "lightning") from error


class LightningCapture(Callback):  # type: ignore[misc]  # Lightning is not type checked here
    """Capture a training by Lightning's ``Trainer``.

        Trainer(…, callbacks=[LightningCapture("runs/a")]).fit(model, data)

    A step ends with the batch in which an optimizer stepped, so that accumulated batches are one step, and several
    optimizers of a batch too. Validations and checkpoints between steps are left out of the times.

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
        self._stepped = 0
        self.capture = self._course.capture

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begin the capture with the first batch."""
        self._course.begin_step()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """End a step if an optimizer stepped in this batch; stop if that was wanted and all is recorded."""
        if trainer.global_step > self._stepped:
            self._stepped = trainer.global_step
            self._course.end_step()
        if self._stop and self._course.finished:
            trainer.should_stop = True

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Note where a resumed training begins."""
        self._stepped = trainer.global_step

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Leave a validation out of the steps' times."""
        self._course.note_other_work("a validation")

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        """Leave a checkpoint out of the steps' times."""
        self._course.note_other_work("a checkpoint")

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Write what was recorded before an error."""
        self._course.end(exception)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Write what was recorded."""
        self._course.end()
