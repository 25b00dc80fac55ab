"""Text that is safe to send to a terminal: files are written by others, and a terminal obeys some characters."""

from __future__ import annotations

import errno
import io
import os
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager, suppress

MOST_TEXT = 3000
"""Characters of a sentence; of a longer one the middle is left out, as its end says what to do."""
MOST_CELL = 500
"""Characters of a table's cell."""
_END_SHARE = 0.25
STDOUT = "the standard output"


def printable(text: str, most: int = MOST_TEXT) -> str:
    """Return the text with control characters, and those that change the direction of writing, as escapes (``\\x1b``).

    Newlines stay; a text longer than ``most`` characters loses its middle.
    """
    if len(text) > most:
        end = int(most * _END_SHARE)
        text = f"{text[:most - end]} … ({len(text) - most:,} characters left out) … {text[-end:]}"
    return text if text.isprintable() else "".join(map(_printable, text))


def one_line(text: str, most: int = MOST_CELL) -> str:
    """The same without newlines, for a table's cell."""
    return printable(text, most).replace("\n", "\\n")


def tell(text: str) -> None:
    """Write a line to stderr; if nobody reads it any more, there is nobody to tell."""
    if sys.stderr is not None:
        with suppress(OSError, ValueError):
            sys.stderr.write(printable(text) + "\n")
            sys.stderr.flush()


@contextmanager
def standard_output() -> Iterator[None]:
    """Say what could not be written; the system's error has no name for it."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        error.filename = error.filename or STDOUT
        raise
    except ValueError as error:
        if not sys.stdout.closed:
            raise
        # A program that was run has closed it.
        raise OSError(errno.EBADF, os.strerror(errno.EBADF), STDOUT) from error


class ClosedOutput(io.TextIOWrapper):
    """Stands for a standard output that is closed: takes everything, so that work is finished, and knows of it."""
    written = False

    def write(self, text: str) -> int:
        """Take a text that goes nowhere."""
        self.written = self.written or bool(text)
        return len(text)


def finish_output() -> None:
    """Write what is left, at a command's end. Raises ``OSError``: it could not be, or nothing could."""
    with standard_output():
        sys.stdout.flush()
        if isinstance(sys.stdout, ClosedOutput) and sys.stdout.written:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))


def _printable(character: str) -> str:
    if character.isprintable() or character == "\n":
        return character
    if unicodedata.category(character) == "Zs":  # a space of another width
        return " "
    return character.encode("unicode_escape").decode("ascii")
