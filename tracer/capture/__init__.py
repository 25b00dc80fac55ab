"""The capture hook: one line in a training script records everything a prediction needs.

    with tracer.capture("runs/a", steps=3) as capture:
        for batch in capture.wrap(loader):
            ...                     # the script's own step
            capture.step()

A capture runs warm-up steps, then steps timed without the profiler (the truth that a prediction is compared with), then
a few more timed as one. Then come the profiler's own warm-up and the profiled steps. The package imports no torch.
"""

from __future__ import annotations

import sys
from os import PathLike
from types import ModuleType
from typing import Any, Literal

from tracer.capture.options import CaptureOptions, CaptureWarning, world_of
from tracer.capture.session import Capture
from tracer.errors import CaptureError

__all__ = ["Capture", "CaptureError", "CaptureOptions", "CaptureWarning", "capture"]


def capture(out: str | PathLike[str], *, steps: int = 3, warmup: int = 3, timed: int = 10, cycles: int = 1,
            execution_trace: Literal["apart", "all", "none"] = "apart", form: Literal["json", "foretrace"] = "json",
            stacks: bool = False, replace: bool = False, world_size: int | None = None, rank: int = 0,
            lookups: bool = False, python_calls: bool = False, profile_memory: bool = False) -> Capture:
    """Record a training run: a context manager, or a decorator of a function whose every call is one step.

    Args:
        out: Directory of the job; every rank writes its own part, ``OUT/rank<r>``.
        steps: Profiled steps of each cycle, at least 1.
        warmup: Steps run before anything is measured.
        timed: Steps timed without the profiler; each waits at its borders for every device in use. On a machine with a
            GPU up to 4 more are timed as one, waiting at their end only: what a loop gains by running ahead of its GPU.
        cycles: Windows of ``steps`` profiled steps, each after a warm-up of the profiler; at least 1.
        execution_trace: "apart" records PyTorch's execution trace in one more step after the last window. The windows
            are then free of its cost, some 20 µs of host time for each operation (the profiler itself takes 2;
            measured on one AMD EPYC core, torch 2.13). Their operations are joined to the trace by their sequence.
            With "all" every window records it: operations are joined by their ids, and their times hold that cost. With
            "none" no window does.
        form: "json" keeps the profiler's own files, "foretrace" writes the one-file form of the graph instead.
        stacks: Also record Python stacks. Gives the module path of each operation and slows the host down a lot.
        replace: Replace a capture that is already there, complete or partial, once this one has measured something.
        world_size: Make this process one rank of a fake world of this many ranks while the ``with`` block runs: build
            and wrap the model inside it (see ``tracer.fake_world``). Compute is real and timed; collectives are
            recorded but take no time, and what is read back says so.
        rank: Which rank of the fake world.
        lookups: Count how often rows of each embedding table are looked up and how long bags are
            (``tracer.lookup_data``), so that their time can be predicted. One discarded step of the profiler's warm-up
            is counted. Only counts are kept, never an index. Measured steps are as without.
        python_calls: Count the calls of Python functions between operations in the same discarded step. The counts
            separate what a model's own Python costs a host from what its operations do (docs/host_overheads.md).
        profile_memory: Also record every change of the devices' memory in the windows, for ``foretrace memory``. Each
            costs the host about what another operation does.

    Returns:
        The capture, not started yet. It needs ``capture.options.total_steps`` steps.

    Raises:
        CaptureError: An argument is wrong. Entering raises it if the directory cannot be written, holds a capture, or
            another capture (here, or in another process into the same directory) or profiler is running; ``step``
            raises it if the files cannot be written, or if another profiler has been started.
        FakeWorldError: Entering, if a fake world is asked for and process groups are up already.
    """
    options = CaptureOptions(steps, warmup, timed, cycles, execution_trace, form, stacks, replace, lookups,
                             python_calls, profile_memory)
    return Capture(out, options, world_of(world_size, rank))


class _CallableModule(ModuleType):
    """Makes ``tracer.capture`` both this package and the function, in any order of imports."""

    def __call__(self, *args: Any, **kwargs: Any) -> Capture:
        return capture(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
