"""``capture_deepspeed``: steps of a DeepSpeed engine."""

from __future__ import annotations

import atexit
import functools
import os
from typing import Any, TypeVar

from tracer.errors import CaptureError
from tracer.hooks.course import CaptureCourse

Engine = TypeVar("Engine")


def capture_deepspeed(engine: Engine, out: str | os.PathLike[str], **options: Any) -> Engine:
    """Capture the steps of a DeepSpeed engine.

        engine, _, loader, _ = deepspeed.initialize(…)
        engine = capture_deepspeed(engine, "runs/a")

    The loop stays as it is. A step ends with the call of ``engine.step`` that ends an accumulation, or with
    ``engine.train_batch`` of a pipeline engine. What there is when the program ends is written then.

    Args:
        engine: what ``deepspeed.initialize`` returned, changed in place.
        out: directory of the job.
        options: those of ``tracer.capture.capture`` (``steps``, ``warmup``, ``timed``, …).

    Returns:
        The same engine; its ``foretrace_capture`` is the capture.

    Raises:
        CaptureError: it is no engine.
    """
    whole = getattr(engine, "train_batch", None)  # of a pipeline engine: a step with all its micro-batches
    method = "train_batch" if callable(whole) else "step"
    if not callable(getattr(engine, method, None)) or not hasattr(engine, "is_gradient_accumulation_boundary"):
        raise CaptureError(f"{type(engine).__name__} is no engine of DeepSpeed: give what deepspeed.initialize "
                           "returned first.")
    course = CaptureCourse(out, options)
    run = getattr(engine, method)
    ends: Any = engine.is_gradient_accumulation_boundary  # asked before: the engine counts on within its step

    @functools.wraps(run)
    def step(*args: Any, **kwargs: Any) -> Any:
        last = method == "train_batch" or ends()
        try:
            result = run(*args, **kwargs)
        except BaseException as error:
            course.end(error)
            raise
        if last:
            course.end_step()
            course.begin_step()  # the first call ends the program's preparations
        return result

    setattr(engine, method, step)
    engine.foretrace_capture = course.capture  # type: ignore[attr-defined]
    atexit.register(course.end)
    return engine
