"""``megatron_capture``: steps of Megatron-LM's training loop, in the place of its ``--profile`` window."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from tracer.errors import CaptureError
from tracer.hooks.course import CaptureCourse, need

if TYPE_CHECKING:
    from tracer.capture.session import Capture

LOOP = "megatron.training.training"
"""The module whose ``train`` calls ``train_step`` once for each iteration."""


@contextmanager
def megatron_capture(out: str | os.PathLike[str], **options: Any) -> Iterator[Capture]:
    """Capture what Megatron-LM trains in the block.

        with megatron_capture("runs/a"):
            pretrain(…)

    Its ``train_step`` is one step; what lies between two calls counts to the later one, but evaluations and
    checkpoints, which are left out. Run without ``--profile``: there can be only one profiler.

    Args:
        out: directory of the job.
        options: those of ``tracer.capture.capture`` (``steps``, ``warmup``, ``timed``, …).

    Raises:
        CaptureError: Megatron-LM is not on the path, or has no ``train_step`` there.
    """
    try:
        loop: Any = import_module(LOOP)
    except ImportError as error:
        raise need("Megatron-LM's megatron.training on PYTHONPATH", error, "megatron-core (and a checkout of "
                   "Megatron-LM)") from error
    if not callable(getattr(loop, "train_step", None)):
        raise CaptureError(f"{LOOP} has no train_step: this version of Megatron-LM is not known. Put "
                           "tracer.capture(…) around its training loop, with capture.step() after each iteration.")
    course = CaptureCourse(out, options)
    before = {name: getattr(loop, name) for name in ("train_step", *_BETWEEN) if hasattr(loop, name)}

    @functools.wraps(loop.train_step)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        course.begin_step()
        result = before["train_step"](*args, **kwargs)
        course.end_step()
        return result

    loop.train_step = train_step
    for name, what in _BETWEEN.items():
        if name in before:
            setattr(loop, name, _noting(before[name], course, what))
    error_there: BaseException | None = None
    try:
        yield course.capture
    except BaseException as error:
        error_there = error
        raise
    finally:
        for name, function in before.items():
            setattr(loop, name, function)
        course.end(error_there)


_BETWEEN = {"evaluate_and_print_results": "an evaluation", "save_checkpoint_and_time": "a checkpoint"}


def _noting(function: Callable[..., Any], course: CaptureCourse, what: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def noted(*args: Any, **kwargs: Any) -> Any:
        course.note_other_work(what)
        return function(*args, **kwargs)

    return noted
