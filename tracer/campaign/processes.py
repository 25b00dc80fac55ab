"""Worker processes: started ahead, asked with a timeout, killed with all their children."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from tracer.campaign.plan import CampaignError
from tracer.campaign.record import Answer, Task, sentence
from tracer.cores import RUN_MODULE

START_S = 180.0
"""Longest time, s, in which a worker imports torch and initialises the device."""
_LOG_BYTES = 2000  # chosen: a traceback's last lines
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
"""Variables that hide GPUs from a CPU worker, so that its context is the CPU's and nothing runs on a GPU."""
_GPUS = ("import sys; sys.path[:] = filter(None, sys.path); import torch; "
         "print(torch.cuda.is_available() and torch.cuda.device_count())")


def torch_sees_gpu() -> bool:
    """Return whether torch, in a separate process, sees a GPU; false where torch is missing."""
    return torch_gpus() > 0


def torch_gpus() -> int:
    """Return the number of GPUs that torch, in a separate process, sees."""
    try:
        asked = subprocess.run([sys.executable, "-c", _GPUS], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                               timeout=START_S, check=False)
        return int(asked.stdout.split()[-1]) if asked.returncode == 0 else 0
    except (subprocess.TimeoutExpired, ValueError, IndexError):  # "False" is no number
        return 0


class NoWorkerError(CampaignError):
    """No worker process can record here. ``reason`` is a sentence."""

    def __init__(self, reason: str, advice: str = "") -> None:
        super().__init__(f"The process that records could not start: {reason}{advice}")
        self.reason = reason


class WorkerDied(Exception):
    """The worker ended, or did not answer in time; the text gives the reason."""


class Worker:
    """A worker process, which records one task after another."""

    def __init__(self, device: str, threads: int, log: Path) -> None:
        task_read, self._tasks = os.pipe()
        self._answers, answer_write = os.pipe()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONUNBUFFERED": "1",
                       **(dict.fromkeys(_VISIBLE, "-1") if device == "cpu" else {})}
        self._log = log
        with open(log, "wb") as file:
            self._process = subprocess.Popen(
                [*RUN_MODULE, "tracer.campaign.worker", str(task_read), str(answer_write), device, str(threads)],
                pass_fds=(task_read, answer_write), stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                env=environment, start_new_session=True)
        os.close(task_read)
        os.close(answer_write)
        self._buffer = b""
        self.tasks_done = 0
        self.context: dict[str, object] | None = None

    def wait_ready(self) -> None:
        """Wait until the worker can take a task; its ``context`` is known then.

        Raises:
            NoWorkerError: torch or the device cannot be used.
        """
        if self.context is not None:
            return
        try:
            answer = self.answer(START_S)
        except WorkerDied as error:
            raise NoWorkerError(str(error)) from error
        if answer.phase != "ready":
            raise NoWorkerError(answer.reason, " It needs torch (pip install 'foretrace[capture]') and the plan's "
                                               "device; --rehearse runs on the CPU.")
        self.context = answer.values

    def ask(self, task: Task) -> None:
        """Send a task. Raises ``WorkerDied``."""
        self.tasks_done += 1
        line = msgspec.json.encode(task) + b"\n"
        try:
            while line:
                line = line[os.write(self._tasks, line):]
        except OSError as error:
            raise WorkerDied(self._how_it_ended()) from error

    def answer(self, seconds: float) -> Answer:
        """Return the worker's next answer. Raises ``WorkerDied`` if it ends first or does not answer in time."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self._answers], [], [], max(0.0, left))
            if not ready:
                raise WorkerDied(f"it took longer than {seconds:.0f} s and was stopped.")
            piece = os.read(self._answers, 1 << 16)
            if not piece:
                raise WorkerDied(self._how_it_ended())
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        return msgspec.json.decode(line, type=Answer)

    def kill(self) -> None:
        """End the process and all its children, and wait for their end. Safe to repeat."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # a process stuck in the driver is left to the system
            self._process.wait(10)
        for descriptor in (self._tasks, self._answers):
            with suppress(OSError):
                os.close(descriptor)
        self._tasks = self._answers = -1
        self._log.unlink(missing_ok=True)

    def _how_it_ended(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        code = self._process.returncode
        how = "ended" if code is None else f"was ended by signal {-code}" if code < 0 else f"ended with status {code}"
        return f"the process {how}{_last_line(self._log)}."


def _last_line(log: Path) -> str:
    try:
        lines = [line for line in log.read_bytes()[-_LOG_BYTES:].decode(errors="replace").splitlines() if line.strip()]
    except OSError:
        return ""
    return f" ({sentence(RuntimeError(lines[-1])).removeprefix('RuntimeError: ').rstrip('.')})" if lines else ""


class Workers:
    """The worker in use and, while it writes its files, the next one starting."""

    def __init__(self, device: str, threads: int, scratch: Path) -> None:
        self._device, self._threads, self._scratch = device, threads, scratch
        self._current: Worker | None = None
        self._next: Worker | None = None
        self._started = 0

    def take(self, *, fresh: bool) -> Worker:
        """Return a ready worker; ``fresh``: one without earlier tasks. Raises ``NoWorkerError``.

        A worker that was started ahead replaces the current one at once: an idle process would also use the device.
        """
        if self._current is not None and (self._next is not None or (fresh and self._current.tasks_done)):
            self.drop()
        if self._current is None:
            self._current, self._next = self._next or self._new(), None
        self._current.wait_ready()
        return self._current

    def prepare_next(self) -> None:
        """Start the next worker now, so that it is ready when it is needed."""
        if self._next is None:
            self._next = self._new()

    def drop(self) -> None:
        """End the current worker."""
        if self._current is not None:
            self._current.kill()
            self._current = None

    def close(self) -> None:
        """End all workers."""
        self.drop()
        if self._next is not None:
            self._next.kill()
            self._next = None

    def _new(self) -> Worker:
        self._started += 1
        return Worker(self._device, self._threads, self._scratch / f"worker-{self._started}.log")
