"""``handler``: what ``torch.profiler.profile`` gives its traces to, as a capture's directory."""

from __future__ import annotations

import atexit
import os
from typing import TYPE_CHECKING, Any

from tracer.capture.session import checked_directory, need_torch
from tracer.capture_layout import window_name
from tracer.errors import CaptureError

if TYPE_CHECKING:
    from tracer.capture.output import PartWriter


def handler(out: str | os.PathLike[str], *, replace: bool = False) -> ProfilerHandler:
    """Return what ``torch.profiler.profile`` calls when a trace is ready.

        with torch.profiler.profile(schedule=…, record_shapes=True, on_trace_ready=handler("runs/a")) as profiler:
            for batch in loader:
                …
                profiler.step()

    Each trace becomes a window of the capture, with the machine's facts beside it. The profiler is at work in all of
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
    """See ``handler``. Calling it raises ``CaptureError`` if the directory cannot be written or holds a capture."""

    def __init__(self, out: str | os.PathLike[str], replace: bool) -> None:
        self._out, self._replace = checked_directory(out), replace
        self._output: PartWriter | None = None
        self._windows = 0

    def __call__(self, profiler: Any) -> None:
        """Store the trace that a profiler has ready."""
        need_torch()
        from tracer.capture.context import collect_context, measurements, peak_memory, rank_and_world
        from tracer.capture.output import PartWriter

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
        output.write_context({**collect_context(), "profiler": flags, **measurements([], [], None),
                              "peak_memory": peak_memory(), "complete": True})

    def close(self) -> None:
        """Give the directory up; done when the program ends."""
        if self._output is not None:
            self._output.close()
            self._output = None
            atexit.unregister(self.close)
