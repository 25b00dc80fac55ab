"""Where a recorded step is counted from and to: by its host, by a device that falls behind it, or the whole window.

The same span gives the step's measured time, its simulated time, and where the walk along its path begins.
"""

from __future__ import annotations

from dataclasses import dataclass

from graph_predictor.recorded.step_lengths import StepLengths
from graph_predictor.simulation.critical_path import EventTimes, PathStart, window_start
from graph_predictor.simulation.program import Program
from tracer.arrays import Int64

Event = tuple[str, int]
"""("item" or "kernel", row of the program)."""


@dataclass(frozen=True, slots=True)
class RecordedEvents:
    """The recorded times of a program, ns."""

    item_start: Int64
    item_end: Int64
    kernel_start: Int64
    kernel_end: Int64

    @classmethod
    def of(cls, program: Program) -> RecordedEvents:
        """Take them from a program."""
        return cls(program.recorded_item_start, program.recorded_item_end, program.recorded_kernel_start,
                   program.recorded_kernel_end)


@dataclass(frozen=True, slots=True, eq=False)
class CountedSpan:
    """A step of one rank, or the rank's whole window.

    Attributes:
        program: what the events are of, or any other program of the same rows.
        rank: position in the job.
        since: the event at whose end it begins; ``None`` of a window.
        until: the event at whose end it ends; ``None`` of a window, which ends with its last event.
        from_start: whether it begins at the start of ``since``.
    """

    program: Program
    rank: int
    since: Event | None = None
    until: Event | None = None
    from_start: bool = False

    @classmethod
    def of_step(cls, program: Program, rank: int, lengths: StepLengths, row: int, begin: int, end: int) -> CountedSpan:
        """Return the span of a step.

        Args:
            program: the recorded one.
            rank: its position in the job.
            lengths: of the rank's steps.
            row: of the step in ``graph.steps``.
            begin: item of the step's begin.
            end: item of its end.
        """
        if not lengths.on_device[row]:
            return cls(program, rank, ("item", begin), ("item", end))
        first = int(program.kernel_ptr[rank])
        return cls(program, rank, ("kernel", first + int(lengths.since[row])),
                   ("kernel", first + int(lengths.last[row])), bool(lengths.from_start[row]))

    def path_start(self, times: EventTimes) -> PathStart:
        """Return where the walk along its path begins, and where it stops."""
        if self.since is None or self.until is None:
            return window_start(self.program, times, self.rank)
        kind, row = self.since
        begin = times.kernel_start if self.from_start else times.item_end if kind == "item" else times.kernel_end
        kind, last = self.until
        end = times.item_end if kind == "item" else times.kernel_end
        return PathStart(self.until, int(end[last]), int(begin[row]))

    def length_ns(self, times: EventTimes) -> int:
        """Return the time from begin to end, ns."""
        start = self.path_start(times)
        return start.end_ns - start.stop_ns
