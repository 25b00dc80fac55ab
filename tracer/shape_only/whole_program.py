"""A program without a function that builds its step, traced by shapes from its start to the end of the traced steps."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from typing import Any

from tracer.capture.script import StepFinder
from tracer.shape_only.errors import ShapeOnlyError
from tracer.user_code import UserCommand


class WholeProgram:
    """A program whose steps are found as a capture finds them: by its first optimizer (``tracer.capture.script``).

    Attributes:
        finished: whether all steps are traced; the program then ends.
        late_facts: what a capture would note of the program's optimizers.
    """

    def __init__(self, command: UserCommand) -> None:
        self.finished = False
        self.late_facts: Callable[[], dict[str, Any]] = dict
        self._command = command
        self._borders: Iterator[None] = iter(())

    def run_between(self, borders: Iterator[None]) -> None:
        """Run the program, and ask for the next border where a step begins. What it prints goes to standard error.

        Raises:
            ShapeOnlyError: the program ends before all steps are traced.
            BaseException: any exception of the program.
        """
        self._borders = borders
        with StepFinder(self, 0, "stop").installed(), redirect_stdout(sys.stderr):
            try:
                self._command.code.run(self._command.arguments)
            except SystemExit as error:
                if not self.finished and error.code not in (None, 0):
                    raise ShapeOnlyError(
                        f"{self._command} ended itself with exit status {error.code} before its steps were traced: "
                        "check that it has these options, or name a function that builds the step, "
                        "SCRIPT.py:FUNCTION.") from error
        if not self.finished:
            raise ShapeOnlyError(f"{self._command} ended before all of its optimizer steps were traced, of which the "
                                 "first is never counted: let it make more, or name a function that builds the step, "
                                 "SCRIPT.py:FUNCTION.")

    def __enter__(self) -> None:
        """Begin the first step, after the optimizer's first one."""
        self.step()

    def step(self) -> None:
        """End a step, and begin the next one."""
        self.finished = next(self._borders, self) is self
