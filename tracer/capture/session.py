"""``Capture``: the course of one capture, from the first warm-up step to the last file."""

from __future__ import annotations

import atexit
import functools
import os
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from tracer.capture.context import (
    ClockLog,
    FreeRunning,
    collect_context,
    fake_world_here,
    measurements,
    peak_memory,
    rank_and_world,
)
from tracer.capture.interruption import uninterrupted
from tracer.capture.machine import CaptureVerdict, WaitingLog, alternation, say, verdict, without_waits
from tracer.capture.options import BY_CALL, BY_FUNCTION, CaptureOptions, CapturePhase, CaptureWarning, Counting
from tracer.capture.output import PartWriter
from tracer.capture.recorder import AnnotatedLoader, Recorder, refuse_another_profiler, synchronize
from tracer.capture_layout import EXECUTION_TRACE, LOOKUPS, part_name, what_it_holds, window_name
from tracer.errors import CaptureError
from tracer.gpu_state import devices_in_use

if TYPE_CHECKING:
    from tracer.capture.notes import StepNotes

Result = TypeVar("Result")
Batch = TypeVar("Batch")

_LONG_STEP_NS = 1_000_000_000
"""Steps at least this long show progress after each one: showing it takes a millisecond."""

_running: Capture | None = None
"""The one capture of this process; the profiler also exists once in a process."""


class Capture:
    """One capture; ``tracer.capture.capture`` makes it and explains the options.

    Attributes:
        finished: Whether the capture is over, so that a loop may end. Either everything is recorded (``complete``), or
            it ended early for the reason ``ended``. From then on ``step`` costs one comparison.
        recording: Whether the profiler is running now.
        ended: Why the capture ended before everything was recorded; empty if it did not.
        facts: Further entries of ``context.json``, ready for JSON.
        late_facts: Returns further entries of ``context.json``; called each time the file is written.
        counting: The definition of one step, for messages.
        progress: Called with (steps done, steps needed in all) before each step that is not measured, and between all
            steps if they are long.
        unprofiled_step_ns, profiled_step_ns: The steps measured so far, nanoseconds, each with idle devices at its end.
            Predictions from the profiled steps are compared with the unprofiled ones.
        free_running: The steps after the unprofiled ones, timed together; ``None`` before.
        waited_for: The devices in use, by PyTorch's numbers.
    """

    def __init__(self, out: str | os.PathLike[str], options: CaptureOptions,
                 world: tuple[int, int] | None = None) -> None:
        self.out = checked_directory(out)
        self.options = options
        self.finished = False
        self.recording = False
        self.unprofiled_step_ns: list[int] = []
        self.profiled_step_ns: list[int] = []
        self.free_running: FreeRunning | None = None
        self.waited_for: list[int] = []
        self._ran_free = self._uncut = 0
        """Free-running steps so far, and the number of these since the timed window began."""
        self._phase = CapturePhase.NEW
        self._warm = 0
        self._started_ns = 0
        self._output: PartWriter | None = None
        self._recorder: Recorder | None = None
        self._notes: list[StepNotes] = []
        """Watchers of one discarded step each; one that must not see the others is last."""
        self._clocks: ClockLog | None = None
        self._waiting = WaitingLog()
        self.facts: dict[str, Any] = {}
        self.late_facts: Callable[[], dict[str, Any]] = dict
        self.counting: Counting = BY_CALL
        self.progress: Callable[[int, int], None] | None = None
        self.ended = ""
        self._memory: dict[str, int] = {}
        self._machine: dict[str, Any] = {}
        self._wanted_world = world
        self._world: AbstractContextManager[None] | None = None

    @property
    def complete(self) -> bool:
        """Return whether everything is recorded and written."""
        return self.finished and not self.ended

    @property
    def part(self) -> Path | None:
        """Return this rank's directory, once entered."""
        return self._output.path if self._output else None

    @property
    def looked_up(self) -> bool:
        """Return whether look-ups of embedding tables were counted."""
        return any(notes.file == LOOKUPS and notes.rows for notes in self._notes)

    @property
    def slowdown(self) -> float | None:
        """Return the first window's median step over the median unprofiled one; ``None`` if either is missing."""
        window = self.profiled_step_ns[:self.options.steps]
        if not self.unprofiled_step_ns or not window:
            return None
        return float(np.median(window) / np.median(self.unprofiled_step_ns))

    @property
    def verdict(self) -> CaptureVerdict:
        """Return the worth of the capture, judged by what the machine did meanwhile."""
        phases = self._waiting.phases
        if rank_and_world()[1] > 1 and fake_world_here() is None:
            # Ranks of one machine wait for each other's processors: that is the job's own time.
            phases = {name: replace(one, waited_ns=()) for name, one in phases.items()}
        return verdict(phases, self.unprofiled_step_ns, self.slowdown, on_host=not self.waited_for)

    @property
    def alternation(self) -> tuple[int, float] | None:
        """Return the period in steps at which long steps recur, and their time over that of short ones."""
        return alternation(without_waits(self._waiting.phases, self.unprofiled_step_ns))

    @property
    def kept(self) -> str:
        """Return what a capture that ended early has kept, as part of a sentence."""
        held = what_it_holds(self._output.path) if self._output is not None and self._output.has_written else ""
        return f"{self.part} holds {held}" if held else "nothing was recorded"

    def check(self, world: tuple[int, int] | None = None) -> None:
        """Raise ``CaptureError`` now if the directory could not be written later. Imports no torch.

        ``world`` is the (world size, rank) of a fake world that is to come.
        """
        self._part(world).close()

    def __enter__(self) -> Capture:
        global _running
        if self._phase is not CapturePhase.NEW:
            raise CaptureError("A capture runs once; make another with tracer.capture(…).")
        if _running is not None:
            raise CaptureError(f"A capture into {_running.out} is already running in this process, and captures do not "
                               f"nest: end it before the one into {self.out}.")
        need_torch()
        refuse_another_profiler()
        self._enter_world()
        try:
            self._output = self._part()
        except BaseException:
            self._leave_world()
            raise
        self._phase = CapturePhase.WARMUP
        _running = self
        try:
            self._clocks = _clock_log()
            self._sample_before_timing()
            self._next_phase()
            synchronize()
        except BaseException:
            self._close()
            self._leave_world()
            raise
        self._begin_step()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        try:
            self._end(kind)
        finally:
            self._leave_world()

    def _enter_world(self) -> None:
        """Create the fake world if one was asked for. It stays until the ``with`` block ends."""
        if self._wanted_world is not None:
            from tracer.fake_world import fake_world

            self._world = fake_world(*self._wanted_world)
            self._world.__enter__()

    def _leave_world(self) -> None:
        world, self._world = self._world, None
        if world is not None:
            world.__exit__(None, None, None)

    def _end(self, kind: type[BaseException] | None) -> None:
        if self.finished or self._phase is CapturePhase.NEW:
            return
        ended = self._how_it_ended(kind)
        try:
            with uninterrupted():  # a second Ctrl-C must not cost what the first one left
                self._finish(ended)
        except Exception as failure:  # the script's own exception matters more than this one
            if kind is None:
                raise
            warnings.warn(f"The partial capture could not be written: {failure}", CaptureWarning, stacklevel=3)
        if kind is None:
            warnings.warn(f"The capture into {self.out} is not complete: {ended}", CaptureWarning, stacklevel=3)

    def step(self) -> None:
        """Mark the end of a step and the beginning of the next.

        Raises:
            CaptureError: the capture was not entered, or its files cannot be written (it is over then).
        """
        if self.finished:
            return
        if self._phase is CapturePhase.NEW:
            raise _not_begun("step")
        began = self._started_ns
        try:
            self._end_step()
        except CaptureError as error:
            self._abandon(error)
            raise
        if self.progress is not None and (
                not self._is_measured or time.perf_counter_ns() - began > _LONG_STEP_NS * max(self._uncut, 1)):
            self.progress(self._steps_done, self.options.total_steps)
        if not self.finished and not self._uncut:
            self._begin_step()

    def _begin_step(self) -> None:
        """Time a step from here."""
        self._waiting.begin()
        self._started_ns = time.perf_counter_ns()

    @property
    def _is_measured(self) -> bool:
        """Return whether the step under way is timed or profiled."""
        if self._phase is CapturePhase.PROFILED:
            return self._recorder is not None and self._recorder.is_active_step
        return self._phase in (CapturePhase.TIMED, CapturePhase.FREE)

    def leave_out(self, what: str = "other work") -> None:
        """Exclude what ran since the last step's end, such as an evaluation or a checkpoint, from the steps.

        The step under way is timed from here. A profiled step has already recorded the work: a warning reports that.
        """
        if self._phase in (CapturePhase.WARMUP, CapturePhase.TIMED, CapturePhase.FREE):
            synchronize()
            self._uncut = 0
            self._begin_step()
        elif self._phase is CapturePhase.PROFILED:
            warnings.warn(f"A profiled step of the capture into {self.out} holds {what} too, which a prediction would "
                          "take for a part of every step: let none run while a capture records, or record another "
                          "stretch of the run (warmup=N).", CaptureWarning, stacklevel=2)

    def wrap(self, loader: Iterable[Batch]) -> Iterable[Batch]:
        """Return the loader, with each fetch marked as data loading in the trace (torch's DataLoader marks its own).

        Does not count steps and does not end the loop: call ``step``, and break when ``finished`` if you like.

        Raises:
            CaptureError: the capture was not entered, and decorates no function: it would record nothing.
        """
        if self._phase is CapturePhase.NEW and self.counting is BY_CALL:
            raise _not_begun("wrap")
        from torch.utils.data import DataLoader

        return loader if isinstance(loader, DataLoader) else AnnotatedLoader(self, loader)

    def __call__(self, function: Callable[..., Result]) -> Callable[..., Result]:
        """Decorate a function whose every call is one step; the first call enters the capture.

        Time between two calls belongs to the later call's step, since data is often loaded there. If the program ends
        before enough calls, what was recorded is written then, with a warning.
        """
        if self._wanted_world is not None:
            raise CaptureError("world_size does not go with a decorator: the fake world must be up before the model is "
                               "wrapped; use `with tracer.capture(…) as capture:` around both.")
        self.counting = BY_FUNCTION

        @functools.wraps(function)
        def step_function(*args: Any, **kwargs: Any) -> Result:
            if self.finished:
                return function(*args, **kwargs)
            if self._phase is CapturePhase.NEW:
                self.__enter__()
                atexit.register(self._at_exit, os.getpid())
            try:
                result = function(*args, **kwargs)
            except BaseException as error:
                self.__exit__(type(error), error, error.__traceback__)
                raise
            self.step()
            return result

        return step_function

    def _at_exit(self, pid: int) -> None:
        if pid == os.getpid():  # not in a forked data loader
            self.__exit__(None, None, None)

    def _part(self, world: tuple[int, int] | None = None) -> PartWriter:
        world = world or fake_world_here()
        world_size, rank = world or rank_and_world()[::-1]
        told = {"fake_world": True, "world_size": world_size, **self.facts} if world is not None else None
        return PartWriter(self.out, rank, self.options.replace, world_size, told)

    def _end_step(self) -> None:
        if self._phase is CapturePhase.WARMUP:
            refuse_another_profiler()
            self._warm += 1
            self._sample_before_timing()
            if self._warm < self.options.warmup:
                return
            synchronize()
        elif self._phase is CapturePhase.FREE:
            refuse_another_profiler()
            self._ran_free += 1
            self._uncut += 1
            if self._ran_free < self.options.free_running:
                return
            synchronize()
            self.free_running = FreeRunning(self._uncut, time.perf_counter_ns() - self._started_ns)
            self._uncut = 0
            self._sample()
        else:
            synchronize()
            elapsed = time.perf_counter_ns() - self._started_ns
            if self._phase is CapturePhase.TIMED:
                refuse_another_profiler()
                self.unprofiled_step_ns.append(elapsed)
                self._waiting.end(elapsed)
            else:
                self._end_profiled_step(elapsed)
        self._next_phase()

    def _sample_before_timing(self) -> None:
        """Sample the clocks before the last warm-up step: if other ranks wait for this one, they wait in that step."""
        if self._phase is CapturePhase.WARMUP and self._warm == self.options.warmup - 1:
            self._sample()

    def _sample(self) -> None:
        """Sample the clocks. The next step must be one that is discarded."""
        if self._clocks is not None:
            self._clocks.note(self._phase.value)

    def _next_phase(self) -> None:
        """Go on to the next phase if the present one has had all its steps (it may have zero)."""
        options = self.options
        if self._phase is CapturePhase.WARMUP and self._warm >= options.warmup:
            self._phase = CapturePhase.TIMED
            self._waiting.enter("timed")
        if self._phase is CapturePhase.TIMED and len(self.unprofiled_step_ns) >= options.timed:
            self.waited_for = devices_in_use()
            self._phase = CapturePhase.FREE
        if self._phase is CapturePhase.FREE and self._ran_free >= options.free_running:
            self._begin_profile()
        elif self._phase is CapturePhase.PROFILED and self._recorder is not None and self._recorder.is_over:
            self._finish("")

    def _begin_profile(self) -> None:
        from tracer.capture import notes  # imports torch

        assert self._output is not None
        if self._output.path.name != part_name(rank_and_world()[0]):  # torch.distributed was set up since
            self._output.close()
            self._output = None  # another rank's from now on
            self._output = self._part()
        self._memory = peak_memory()  # before the profiler takes its own
        self._phase = CapturePhase.PROFILED
        self._waiting.enter("profiled")
        # Written now too, so that even a killed process leaves its measured steps.
        self._output.write_context(self._context("it was stopped from outside during the profiled steps."))
        self._recorder = Recorder(self._output.scratch, self.options)
        self._recorder.start()
        self.recording = True
        if notes.profiler_lacks_collectives():
            self._notes.append(notes.CollectiveNotes())
        if self.options.lookups:
            self._notes.append(notes.LookupNotes())
        if self.options.python_calls and not self.options.stacks:  # stacks have them
            self._notes.append(notes.PythonNotes())
        # Never in the process's first step: code compiled there would be compiled under the watching mode.
        if self._steps_done > 0:
            self._start_notes()

    def _start_notes(self) -> None:
        for notes in self._notes:
            if not notes.started:
                notes.start()

    def _stop_notes(self) -> None:
        for notes in reversed(self._notes):  # torch's modes are a stack
            notes.stop()

    def _end_profiled_step(self, elapsed: int) -> None:
        assert self._recorder is not None
        self._stop_notes()
        was_active = self._recorder.is_active_step
        if was_active:
            self.profiled_step_ns.append(elapsed)
            # What follows lies inside the next recorded step: one reading of the waits serves both.
            self._waiting.end(elapsed, next_begins=not self._recorder.is_at_border)
        self._recorder.step()
        if not self._recorder.is_active_step:
            if was_active:
                self._sample()
            if not self._recorder.is_over:
                self._start_notes()

    def _finish(self, ended: str) -> None:
        """Write everything. ``ended`` says why the capture is not complete; empty if it is."""
        output, recorder = self._output, self._recorder
        assert output is not None
        self.ended = ended
        self._waiting.enter("")
        unfinished = recorder.step_name if recorder is not None and not recorder.is_over else ""
        try:
            self._stop_notes()
            if recorder is not None:
                recorder.stop()
            windows = recorder.windows if recorder is not None else []
            if output.replaces and not self.unprofiled_step_ns and not windows:
                return  # nothing was measured: keep the earlier capture
            for index, source in enumerate(windows):
                output.store_trace(source, window_name(index, "json"), unfinished)
            if recorder is not None and windows:
                self._store_execution_trace(output, recorder.execution_trace, unfinished)
            for notes in self._notes:
                if notes.worth_writing:
                    output.write_json(notes.file, {"rows": notes.rows})
            context = self._context(ended)
            output.write_context({**context, "complete": False})
            if self.options.form == "foretrace" and windows:
                output.convert(len(windows))
            output.write_context(context)
            if not ended and (said := self.verdict.sentence()):
                say(f"Warning: {said}")
        except CaptureError as error:
            self._abandon(error)
            raise
        finally:
            self._close()

    def _store_execution_trace(self, output: PartWriter, source: Path, unfinished: str) -> None:
        # A capture that ended early may not have come to the window that has it.
        if source.exists() or (not self.ended and self.options.execution_trace != "none"):
            output.store_trace(source, EXECUTION_TRACE, unfinished)

    def _abandon(self, error: CaptureError) -> None:
        """Close after an error of the capture itself; the context keeps what was measured, with the true reason."""
        if self._phase is CapturePhase.DONE:
            return
        self.ended = str(error)
        self._stop_recorder()
        if self._output is not None:
            self._output.remove_scratch()  # on a full disk that makes room for the little that follows
            if self.unprofiled_step_ns or self._output.has_written:
                with suppress(CaptureError):
                    self._output.write_context(self._context(error.reason))
        self._close()

    def _stop_recorder(self) -> None:
        self._stop_notes()
        if self._recorder is not None:
            try:
                self._recorder.stop()
            except Exception as error:  # closing after another error, which is the one to report
                warnings.warn(f"The profiler did not stop cleanly: {error}", CaptureWarning, stacklevel=2)

    def _close(self) -> None:
        """Stop everything and remove temporary files, after any outcome. Safe to repeat."""
        global _running
        if _running is self:
            _running = None
        self.finished, self.recording = True, False
        self._phase = CapturePhase.DONE
        self._stop_recorder()
        if self._output is not None:
            self._output.close()
        atexit.unregister(self._at_exit)

    def _context(self, ended: str) -> dict[str, Any]:
        # Once, right after the timed steps: the clocks are then those of a device at work.
        self._machine = self._machine or collect_context()
        found = {**self.facts, **self.late_facts(), **self._machine, "capture": asdict(self.options),
                 "profiler": self._recorder.flags if self._recorder else {},
                 **measurements(self.unprofiled_step_ns, self.profiled_step_ns, self.slowdown, self.free_running,
                                self.waited_for),
                 "machine": {"waiting": self._waiting.to_json(), "verdict": self.verdict.to_json()},
                 "peak_memory": self._memory or peak_memory(), "complete": not ended,
                 **(self._clocks.to_json() if self._clocks is not None else {})}
        return {**found, "ended": ended} if ended else found

    def _how_it_ended(self, kind: type[BaseException] | None) -> str:
        if kind is not None:
            return "the script ended itself." if kind is SystemExit else f"the step raised {kind.__name__}."
        return self.counting.too_few(self.options, self._steps_done, self._phase.value)

    @property
    def _steps_done(self) -> int:
        profiled = self._recorder.steps_done if self._recorder is not None else 0
        return self._warm + len(self.unprofiled_step_ns) + self._ran_free + profiled


def _clock_log() -> ClockLog | None:
    import torch

    if not torch.cuda.is_available():
        return None
    return ClockLog()


def need_torch() -> None:
    """Raise ``CaptureError`` where PyTorch is not installed."""
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise CaptureError("Capturing needs PyTorch; install it with: pip install 'foretrace[capture]'.") from error


def checked_directory(out: str | os.PathLike[str]) -> Path:
    """Return the directory as an absolute path, safe from the script's ``os.chdir``. Raises ``CaptureError``."""
    try:
        path = Path(out)
    except TypeError as error:
        raise CaptureError(f"{out!r} is no directory for a capture: give a path.") from error
    text = os.fspath(out)
    if not text.strip():
        raise CaptureError(f"{text!r} is no directory for a capture: give its path.")
    if "://" in text:
        raise CaptureError(f"{out} is a URL, and captures are recorded on a local disk: give a local directory, "
                           "and copy it when it is finished.")
    if any(character in text for character in "\n\r\0"):
        raise CaptureError(f"{text!r} has a line break or a null character in it; give a directory without.")
    try:
        return path.absolute()
    except OSError as error:
        raise CaptureError(f"{text} lies in a working directory that is no longer there; give an absolute path.") \
            from error


def _not_begun(method: str) -> CaptureError:
    return CaptureError(f"capture.{method}() was called before the capture began: use it inside "
                        "`with tracer.capture(…) as capture:`.")
