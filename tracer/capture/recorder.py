"""The profiler and the execution-trace observer, run over the same steps, and ranges of data loading.

Torch's own lines on stderr at the borders of a profile are left out: they are of no use to a user.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tracer.capture.options import PROFILER_WARMUP, CaptureOptions
from tracer.errors import ProfilerBusyError
from tracer.gpu_state import devices_in_use

if TYPE_CHECKING:
    from tracer.capture.session import Capture

_NOISE = re.compile(
    rb"USDT:.*profiler_(?:start|stop)"
    rb"|.*execution_trace_observer\.cpp:\d+\] (?:En|Dis)abling Execution Trace Observer"
    rb"|ERROR:.*DeviceProperties\.cpp:\d+\] gpuGetDeviceCount failed")  # on a machine without a GPU


class QuietStderr:
    """Holds back output to file descriptor 2 while ``quiet`` runs, then writes it without torch's known noise.

    If the process aborts meanwhile, the held text has the reason. So a second process waits for the end of this one and
    writes the text. Nothing is held back where the system has no files in memory, no stderr is open, or there is no
    shell.
    """

    def __init__(self) -> None:
        self._held = -1
        self._heir: subprocess.Popen[bytes] | None = None
        if hasattr(os, "memfd_create"):
            with suppress(OSError):
                self._held = os.memfd_create("foretrace")
                self._heir = subprocess.Popen(
                    ["/bin/sh", "-c", f"read line; cat /proc/self/fd/{self._held} >&2 2>/dev/null"],
                    stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=(self._held,),
                    start_new_session=True)  # not ended by Ctrl-C
        if self._heir is None:
            self.close()

    def close(self) -> None:
        """Release the memory. Safe to repeat."""
        held, self._held = self._held, -1
        heir, self._heir = self._heir, None
        if heir is not None:
            heir.kill()
            heir.communicate()
        if held >= 0:
            os.close(held)

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Wrap a noisy call. It adds only two system calls, so that it may lie within a profile."""
        try:
            real = os.dup(2) if self._held >= 0 else -1
        except OSError:
            real = -1
        if real < 0:
            yield
            return
        os.dup2(self._held, 2)
        try:
            yield
        finally:
            with suppress(OSError, ValueError, AttributeError):
                sys.stderr.flush()
            os.dup2(real, 2)
            os.close(real)
            self._pass_on()

    def _pass_on(self) -> None:
        with suppress(OSError):
            size = os.lseek(self._held, 0, os.SEEK_CUR)
            if not size:
                return
            text = os.pread(self._held, size, 0)
            os.lseek(self._held, 0, os.SEEK_SET)
            os.ftruncate(self._held, 0)
            kept = b"".join(line for line in text.splitlines(keepends=True) if not _NOISE.match(line))
            if kept:
                os.write(2, kept)


STEP = "ProfilerStep#"


def synchronize() -> None:
    """Wait for every device in use."""
    import torch

    for number in devices_in_use():
        torch.cuda.synchronize(number)


def refuse_another_profiler() -> None:
    """Raise ``ProfilerBusyError`` if a torch profiler is recording in this thread."""
    import torch

    if torch.autograd._profiler_enabled():
        raise ProfilerBusyError("Another torch profiler is already running, and there can be only one: stop it around "
                                "the capture.")


class Recorder:
    """Records ``cycles`` windows of ``steps`` steps, each after discarded steps of the profiler's warm-up, and the
    execution trace. The latter is recorded in every window, or in a separate step after them, since its observer costs
    ten times as much for each operation as the profiler.

    Files go to a scratch directory: one Kineto export for each window, one execution trace for all of them.
    """

    def __init__(self, scratch: Path, options: CaptureOptions) -> None:
        self.windows: list[Path] = []
        """Kineto exports written so far."""
        self.execution_trace = scratch / "et.json"
        self.flags: dict[str, Any] = {}
        self._scratch = scratch
        self._options = options
        self._number = 0
        self._observer: Any = None
        self._profiler: Any = None
        self._quiet = QuietStderr()

    @property
    def cycle_steps(self) -> int:
        """Return the number of steps of one cycle, warm-up included."""
        return PROFILER_WARMUP + self._options.steps

    @property
    def steps_done(self) -> int:
        """Return the number of steps ended so far, warm-up included."""
        return self._number

    @property
    def _windows_steps(self) -> int:
        """Return the number of steps of all cycles, warm-up included."""
        return self.cycle_steps * self._options.cycles

    @property
    def is_active_step(self) -> bool:
        """Return whether the profiler records the current step."""
        return self._number < self._windows_steps and self._number % self.cycle_steps >= PROFILER_WARMUP

    @property
    def is_at_border(self) -> bool:
        """Return whether the profiler starts or stops recording at the end of the current step."""
        return (self._number + 1) % self.cycle_steps in (0, PROFILER_WARMUP)

    @property
    def is_over(self) -> bool:
        """Return whether all steps are done."""
        return self._number >= self._windows_steps + self._options.traced_steps

    @property
    def step_name(self) -> str:
        """Return the annotation of the current step."""
        return f"{STEP}{self._number}"

    def start(self) -> None:
        """Begin the first discarded step. Raises ``ProfilerBusyError`` if another profiler is running."""
        import torch
        from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile, schedule

        refuse_another_profiler()
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
            # With CUDA graphs a second start may crash after CUPTI was torn down. Torch prevents that too, but only
            # where its compiler's own option asks for graphs.
            os.environ |= {"TEARDOWN_CUPTI": "0", "DISABLE_CUPTI_LAZY_REINIT": "1"}
        if self._options.execution_trace == "all":
            self._observer = ExecutionTraceObserver().register_callback(str(self.execution_trace))
        self.flags = {"record_shapes": True, "with_stack": self._options.stacks, "with_modules": True,
                      "profile_memory": self._options.profile_memory, "with_flops": False,
                      "execution_trace": self._options.execution_trace == "all"}
        experimental = _experimental_config() if len(activities) > 1 else None
        self.flags["cuda_sync_events"] = experimental is not None
        self.flags["cupti_kept"] = len(activities) > 1
        profiler = profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=PROFILER_WARMUP, active=self._options.steps, repeat=self._options.cycles),
            on_trace_ready=self._export,
            record_shapes=True,
            profile_memory=self._options.profile_memory,
            with_stack=self._options.stacks,
            with_modules=True,
            experimental_config=experimental,
            execution_trace_observer=self._observer,
        )
        with self._quiet.quiet(), _torch_unwarned():
            profiler.start()
        self._profiler = profiler

    def step(self) -> None:
        """End the current step and begin the next; at the end of a window, write its trace."""
        if self._profiler is None:  # the step that records the execution trace
            self._number += 1
            return
        if self.is_at_border:
            with self._quiet.quiet(), _torch_unwarned():
                self._profiler.step()
        else:  # within the recorded steps: nothing else is done there
            self._profiler.step()
        self._number += 1
        if self._number == self._windows_steps and self._options.traced_steps:
            self._observe_apart()

    def _observe_apart(self) -> None:
        """End the profile, and begin the execution trace of the next step."""
        from torch.profiler import ExecutionTraceObserver

        profiler, self._profiler = self._profiler, None
        with self._quiet.quiet(), _torch_unwarned():
            profiler.__exit__(None, None, None)
            self._observer = ExecutionTraceObserver().register_callback(str(self.execution_trace))
            self._observer.start()

    def stop(self) -> None:
        """Stop at any point; the part of a running window is written. Does nothing if not started."""
        profiler, self._profiler = self._profiler, None
        observer, self._observer = self._observer, None
        try:
            with self._quiet.quiet(), _torch_unwarned():
                try:
                    if profiler is not None:
                        profiler.__exit__(None, None, None)
                finally:
                    if observer is not None:
                        observer.unregister_callback()
        finally:
            self._quiet.close()

    def _export(self, profiler: Any) -> None:
        path = self._scratch / f"kineto-{len(self.windows)}.json"
        profiler.export_chrome_trace(str(path))
        self.windows.append(path)


@contextmanager
def _torch_unwarned() -> Iterator[None]:
    """Suppress torch's warnings about deliberate choices of a capture; the program may turn warnings into errors.

    Each window is exported before the next begins, so that clearing events loses none. Torch will drop
    ``with_modules``; where it has no effect it costs nothing.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(Profiler clears events|with_modules is deprecated)")
        yield


def _experimental_config() -> Any:
    """Return the setting that records synchronisation events on CUDA, where this torch has them."""
    try:
        from torch._C._profiler import _ExperimentalConfig

        return _ExperimentalConfig(enable_cuda_sync_events=True)
    except (ImportError, TypeError):
        return None


Batch = TypeVar("Batch")


class AnnotatedLoader(Iterable[Batch]):
    """Iterates over a loader; while the profiler records, each fetch is a range named as by torch's DataLoader.

    All other attributes (``dataset``, ``sampler``, …) and ``len`` are those of the loader.
    """

    def __init__(self, capture: Capture, loader: Iterable[Batch]) -> None:
        self._capture = capture
        self._loader = loader

    def __iter__(self) -> Iterator[Batch]:
        name = f"enumerate(DataLoader)#{type(self._loader).__name__}.__next__"
        batches = iter(self._loader)
        while True:
            try:
                if self._capture.recording:
                    from torch.profiler import record_function

                    with record_function(name):
                        batch = next(batches)
                else:
                    batch = next(batches)
            except StopIteration:
                return
            yield batch

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # a loader without a length raises its own error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
