"""Counting of steps: the event that ends one, the number a capture needs, and the message when there were too few."""

from __future__ import annotations

from dataclasses import dataclass

from tracer.capture.options import CaptureOptions


@dataclass(frozen=True, slots=True)
class Counting:
    """A way to count steps.

    Attributes:
        unit: what is counted, in the plural.
        rule: what makes one of them; empty where there is nothing to explain.
        never: what to say if there was none.
        before: steps that pass before the capture begins.
    """

    unit: str
    rule: str
    never: str
    before: int = 0

    def needed(self, options: CaptureOptions) -> int:
        """Steps the script must run until everything is recorded."""
        return self.before + options.total_steps

    def too_few(self, options: CaptureOptions, done: int, phase: str) -> str:
        """The sentence of a script that ended after ``done`` steps of the capture, in ``phase``."""
        parts = f"{f'{self.before} first + ' if self.before else ''}{options.parts}"
        rule = f"; {self.rule}" if self.rule else ""
        where = f", in {phase}: run more steps, or ask for fewer." if done else f": {self.never}"
        return (f"the script ended after {done + self.before} of the {self.needed(options)} {self.unit} it needs "
                f"({parts}{rule}){where}")


BY_CALL = Counting("steps", "", "capture.step() was never called; call it at the end of each step.")
BY_FUNCTION = Counting("calls of the decorated function", "each call is one step",
                       "it never returned; let each call be one step.")


def by_optimizer(number: int = 0) -> Counting:
    """Counting the steps of one optimizer; 0 is the one that made the first step."""
    which = f"optimizer {number}" if number else "the first optimizer"
    return Counting("optimizer steps", f"each step of {which} is one, and its first one ends the script's preparations",
                    "run more steps, or ask for fewer.", before=1)
