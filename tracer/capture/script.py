"""Captures of programs that have no line for it: an unmodified script, or a workload of the suite.

A script's steps are found by its optimizer: a step ends when the first optimizer that was seen has updated the
parameters, so that gradient accumulation and further optimizers need no care.
"""

from __future__ import annotations

import functools
import os
import runpy
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from tracer.capture.options import CaptureOptions, CaptureWarning
from tracer.capture.session import Capture
from tracer.errors import CaptureError

if TYPE_CHECKING:
    from tracer.workloads import Settings


@dataclass(frozen=True, slots=True)
class ScriptOptions:
    """How ``run_script`` captures.

    Attributes:
        out: directory of the job.
        capture: what to record.
        afterwards: "stop" ends the script when everything is recorded, "continue" lets it run to its own end.
    """

    out: str | os.PathLike[str]
    capture: CaptureOptions = field(default_factory=CaptureOptions)
    afterwards: Literal["stop", "continue"] = "stop"


class _RecordedAll(SystemExit):
    """Ends a script whose steps are all recorded; as its own exit would, it passes ``except Exception``."""


def run_script(path: str | os.PathLike[str], args: Sequence[str], options: ScriptOptions) -> Capture:
    """Run a Python script as ``python path args…`` would, and capture its training steps.

    Its first optimizer step is never measured: it ends the script's preparations. The capture begins after it.

    Returns:
        The finished capture.

    Raises:
        CaptureError: the script does not exist, the directory cannot be written, or the script ended too early (what
            there is of the capture has been written).
        BaseException: whatever the script raised, as it was raised; ``SystemExit`` only if it reports a failure.
    """
    script = os.fspath(path)
    if not os.path.isfile(script):
        raise CaptureError(f"There is no script {script}; check the path.")
    capture = Capture(options.out, options.capture)
    capture.check()
    finder = _StepFinder(capture, options.afterwards)
    with finder.installed(), _as_main(script, args), _ended_quietly(capture):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as error:
            if error.code not in (None, 0) and not isinstance(error, _RecordedAll):
                raise
    if not finder.seen:
        raise CaptureError(f"{script} ended without a single optimizer step, so that no training step was found: put "
                           "the capture into its loop (with tracer.capture(…) as capture: … capture.step()).")
    if capture.ended:
        raise CaptureError(f"The capture into {capture.out} is not complete: {capture.ended}")
    return capture


def run_workload(settings: Settings, out: str | os.PathLike[str], options: CaptureOptions) -> Capture:
    """Build a workload of the suite and capture as many of its steps as are needed.

    Args:
        settings: checked settings (``tracer.workloads.configure`` or ``parse``).

    Raises:
        CaptureError: the capture cannot start or be written.
        WorkloadError: the workload cannot be built here.
    """
    from tracer import workloads

    capture = Capture(out, options)
    capture.check()
    workload = workloads.create(settings)
    capture.facts["workload"] = {"name": settings.WORKLOAD, "settings": workloads.as_plain(settings),
                                 "split": workloads.split(settings), "parameters": workload.parameters}
    with capture:
        for batch in capture.wrap(workload.batches()):
            workload.step(batch)
            capture.step()
            if capture.finished:
                break
    return capture


class _StepFinder:
    """Calls ``capture.step`` after each step of the first optimizer that takes one."""

    def __init__(self, capture: Capture, afterwards: str) -> None:
        self.seen = False
        self._over = False
        self._capture = capture
        self._afterwards = afterwards
        self._hook: Any = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Watch all optimizers until one has made a step."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._hook = register_optimizer_step_post_hook(self._first_step)
        try:
            yield
        finally:
            self._hook.remove()

    def _first_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """The hook runs inside torch's ``Optimizer.step`` range; later steps end outside, around the whole call."""
        if self.seen:
            return
        self.seen = True
        self._hook.remove()
        optimizer.step = types.MethodType(self._around(optimizer.step), optimizer)
        self._capture.__enter__()

    def _around(self, step: Callable[..., Any]) -> Callable[..., Any]:
        # `wraps` keeps the marks that learning-rate schedulers leave on the method, and its signature.
        @functools.wraps(step)
        def counted(_: Any, *args: Any, **kwargs: Any) -> Any:
            result = step(*args, **kwargs)
            self._end_step()
            return result

        return counted

    def _end_step(self) -> None:
        if self._over:
            return
        self._capture.step()
        self._over = self._capture.finished
        if self._over and self._afterwards == "stop":
            raise _RecordedAll(0)


@contextmanager
def _as_main(script: str, args: Sequence[str]) -> Iterator[None]:
    """``sys.argv`` and ``sys.path`` as Python sets them for a script."""
    argv, path = sys.argv, list(sys.path)
    sys.argv = [script, *args]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path


@contextmanager
def _ended_quietly(capture: Capture) -> Iterator[None]:
    """End the capture as ``with`` would, without the warning: the caller raises it."""
    try:
        yield
    except BaseException as error:
        capture.__exit__(type(error), error, error.__traceback__)
        raise
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)
        capture.__exit__(None, None, None)
