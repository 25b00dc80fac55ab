"""The process that records: it reads tasks from one pipe and writes answers to another, as JSON lines.

Started by ``tracer.campaign.processes`` as ``python -m tracer.campaign.worker READ WRITE DEVICE THREADS``. It ends when
its task pipe closes, and (on Linux) is killed with the process that started it.
"""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import signal
import sys
from contextlib import suppress
from typing import IO, Any

import msgspec

from tracer.campaign.lab import Lab
from tracer.campaign.record import (
    Answer,
    Task,
    capture_workload,
    convert,
    full_folder,
    is_unsupported,
    measure_kernel,
    sentence,
)
from tracer.capture.context import collect_context
from tracer.errors import DiskFullError
from tracer.gpu_state import why_none


def main(arguments: list[str]) -> int:
    """Serve tasks until the pipe closes; return the exit status."""
    with suppress(Exception):  # Linux only; elsewhere the closed pipe ends it after the current item
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG of sys/prctl.h: it dies with its parent
    tasks, answers = os.fdopen(int(arguments[0]), "rb"), os.fdopen(int(arguments[1]), "wb")
    device, threads = arguments[2], int(arguments[3])
    try:
        context = _start(device, threads)
    except Exception as error:  # any error in torch's start is reported to the parent
        _say(answers, Answer("failed", reason=sentence(error)))
        return 1
    _say(answers, Answer("ready", values=context))
    lab: Lab | None = None
    for line in tasks:
        task = msgspec.json.decode(line, type=Task)
        try:
            if task.item.kind == "kernel":
                if lab is None:
                    lab = Lab(device)
                values, rows = measure_kernel(task, lab)
                _say(answers, Answer("done", values=values, rows=rows))
            else:
                _workload(task, answers)
        except Exception as error:  # one item's failure is its result
            _say(answers, Answer("failed", values={"status": "unsupported" if is_unsupported(error) else "failed"},
                                 reason=sentence(error), disk_full=full_folder(error, task)))
            del error
            gc.collect()
    return 0


def _workload(task: Task, answers: IO[bytes]) -> None:
    values, part = capture_workload(task)
    gc.collect()
    _free_device_memory()
    _say(answers, Answer("measured", values=values))
    try:
        kept = convert(task, part)
    except DiskFullError:
        raise
    except Exception as error:  # the measured times are valid without the trace
        kept = {"content": "times", "file": "", "notes": [f"The trace could not be kept: {sentence(error)}"]}
    shutil.rmtree(part.parent, ignore_errors=True)
    kept["notes"] = [*values.get("notes", []), *kept["notes"]]
    _say(answers, Answer("done", values={**values, **kept, "file": ""}, file=kept["file"]))


def _start(device: str, threads: int) -> dict[str, Any]:
    """Import torch, initialise the device, and describe both."""
    import torch

    if threads:
        torch.set_num_threads(threads)
    if device != "cuda":
        return collect_context()
    if not torch.cuda.is_available():
        raise RuntimeError(f"torch {torch.__version__} sees no CUDA device{f': {why}' if (why := why_none()) else ''}.")
    torch.ones(1, device="cuda").item()
    context = collect_context()
    with suppress(Exception):  # some drivers do not report it; a partition's memory is its own, not the whole device's
        context["hardware"]["free_memory"] = int(torch.cuda.mem_get_info()[0])
    return context


def _free_device_memory() -> None:
    with suppress(Exception):
        import torch

        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def _say(answers: IO[bytes], answer: Answer) -> None:
    answers.write(msgspec.json.encode(answer) + b"\n")
    answers.flush()


if __name__ == "__main__":
    sys.stdout = sys.stderr  # what an item prints
    sys.exit(main(sys.argv[1:]))
