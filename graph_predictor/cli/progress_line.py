"""One line on a terminal that says how far a long command is."""

from __future__ import annotations

import sys

from graph_predictor.cli.text import one_line, tell


class ProgressLine:
    """One line on a terminal that is written over; lines of their own elsewhere. Warnings always stay."""

    def __init__(self) -> None:
        self._on_terminal = sys.stderr.isatty()
        self._open = False

    def say(self, text: str) -> None:
        """Show a line."""
        passing = " s: " in text or text.startswith(("fitting ", "round "))
        if self._on_terminal and passing:
            sys.stderr.write(f"\r\x1b[2K{one_line(text)}")
            self._open = True
        else:
            self.end()
            tell(text)
        sys.stderr.flush()

    def end(self) -> None:
        """Leave the line."""
        if self._open:
            sys.stderr.write("\n")
            self._open = False
