"""Captures around the loops of frameworks: Accelerate, DeepSpeed, Megatron-LM, Ray Train, torch.profiler."""

from __future__ import annotations

import atexit
import functools
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import TracebackType
from typing import Any, TypeVar

from tracer.capture import capture
from tracer.capture.context import collect_context, peak_memory, rank_and_world
from tracer.capture.output import PartWriter
from tracer.capture.session import Capture, checked_directory, need_torch
from tracer.capture_layout import window_name
from tracer.errors import CaptureError


class CaptureCourse:
    """One capture, driven by calls instead of a ``with`` block.

    It begins at the first step, when the model is wrapped and process groups exist, and ends with training. A second
    training in the process records nothing more.

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
        """Mark the beginning of a step, without the time of work that ``note_other_work`` noted since the last step."""
        if self.finished:
            return
        if not self._begun:
            self.capture.__enter__()
            self._begun = True
        elif self._other_work:
            self.capture.leave_out(self._other_work)
        self._other_work = ""

    def end_step(self) -> None:
        """Mark the end of the step."""
        if self._begun:
            self.capture.step()

    def note_other_work(self, what: str) -> None:
        """Exclude the work that runs until the next step begins, such as an evaluation."""
        self._other_work = what

    def end(self, error: BaseException | None = None) -> None:
        """Mark the end of training, normal or by an error, and write what was recorded."""
        if self._begun:
            self.capture.__exit__(type(error) if error is not None else None, error,
                                  error.__traceback__ if error is not None else None)


def need(package: str, error: ImportError, install: str = "") -> CaptureError:
    """Return the error for a hook whose framework is not installed."""
    return CaptureError(f"This hook needs {package} ({error}); install it with: pip install {install or package}.")


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
        """Mark the end of a batch."""
        if self._accelerator.sync_gradients:
            self._course.end_step()

    def leave_out(self, what: str = "other work") -> None:
        """Exclude what ran since the last step ended from the next, such as an evaluation."""
        self.capture.leave_out(what)

    def wrap(self, loader: Iterable[Batch]) -> Iterable[Batch]:
        """Return the loader with each fetch marked as data loading, see ``Capture.wrap``."""
        return self.capture.wrap(loader)


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


LOOP = "megatron.training.training"
"""Name of the module whose ``train`` calls ``train_step`` once for each iteration."""


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
        out: Directory of the job, on a disk that all workers see (a worker runs in a directory of its own, so that a
            relative path would be its alone).
        options: Those of ``tracer.capture.capture`` (``steps``, ``warmup``, ``timed``, …).

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


def handler(out: str | os.PathLike[str], *, replace: bool = False) -> ProfilerHandler:
    """Return what ``torch.profiler.profile`` calls when a trace is ready.

        with torch.profiler.profile(schedule=…, record_shapes=True, on_trace_ready=handler("runs/a")) as profiler:
            for batch in loader:
                …
                profiler.step()

    Each trace becomes a window of the capture, together with the machine's facts. The profiler is at work in all of
    its steps, so that nothing is known of steps without it: ``foretrace predict --without-profiler`` estimates them,
    ``tracer.capture`` measures them. Record shapes: without them little can be predicted at another size.

    Args:
        out: directory of the job; every rank writes its own part, ``OUT/rank<r>``.
        replace: replace a capture that is already there.

    Raises:
        CaptureError: the path can be no directory.
    """
    return ProfilerHandler(out, replace)


class ProfilerHandler:
    """Stores ready traces, see ``handler``. Raises ``CaptureError``: it holds a capture or cannot be written."""

    def __init__(self, out: str | os.PathLike[str], replace: bool) -> None:
        self._out, self._replace = checked_directory(out), replace
        self._output: PartWriter | None = None
        self._windows = 0

    def __call__(self, profiler: Any) -> None:
        """Store the trace that a profiler has ready."""
        need_torch()
        if self._output is None:
            rank, world_size = rank_and_world()
            self._output = PartWriter(self._out, rank, self._replace, world_size)
            atexit.register(self.close)
        output = self._output
        source = output.scratch / f"ready-{self._windows}.json"
        output.scratch.mkdir(exist_ok=True)
        try:
            profiler.export_chrome_trace(str(source))
        except (RuntimeError, AssertionError, OSError) as error:
            raise CaptureError(f"The profiler has no trace to write into {output.path} ({error}): give the handler to "
                               "torch.profiler.profile as on_trace_ready.") from error
        output.store_trace(source, window_name(self._windows, "json"))
        self._windows += 1
        flags = {name: bool(getattr(profiler, name, False))
                 for name in ("record_shapes", "with_stack", "with_modules", "profile_memory", "with_flops")}
        output.write_context({**collect_context(), "profiler": flags, "unprofiled_step_ns": [],
                              "profiled_step_ns": [], "peak_memory": peak_memory(), "complete": True})

    def close(self) -> None:
        """Release the directory; done when the program ends."""
        if self._output is not None:
            self._output.close()
            self._output = None
            atexit.unregister(self.close)
