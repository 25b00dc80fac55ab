"""``ray_capture``: a capture within a worker of Ray Train."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tracer.capture import capture
from tracer.errors import CaptureError
from tracer.hooks.course import need

if TYPE_CHECKING:
    from tracer.capture.session import Capture


@contextmanager
def ray_capture(out: str | os.PathLike[str], **options: Any) -> Iterator[Capture]:
    """Capture the loop of a worker of Ray Train, each worker its own rank of the job.

        def train_loop(config):
            model = ray.train.torch.prepare_model(…)
            with ray_capture("/shared/runs/a") as capture:
                for batch in loader:
                    …
                    capture.step()

    Args:
        out: directory of the job, on a disk that all workers see (a worker runs in a directory of its own, so that a
            relative path would be its alone).
        options: those of ``tracer.capture.capture`` (``steps``, ``warmup``, ``timed``, …).

    Raises:
        CaptureError: Ray is not installed, this is no worker of a training, or the path is relative.
    """
    try:
        from ray.train import get_context
    except ImportError as error:
        raise need("Ray Train", error, "'ray[train]'") from error
    try:
        workers = int(get_context().get_world_size())
    except (RuntimeError, AttributeError) as error:
        raise CaptureError("ray_capture was called outside a worker of Ray Train: call it in the training loop that "
                           "TorchTrainer runs.") from error
    if workers > 1 and "://" not in os.fspath(out) and not os.path.isabs(out):
        raise CaptureError(f"{os.fspath(out)} is relative, and each of the {workers} workers runs in a directory of "
                           "its own: give an absolute path that all of them see.")
    with capture(out, **options) as running:
        yield running
