"""Text for a terminal, closed streams, and every failure of a command as one sentence on stderr and an exit code."""

from __future__ import annotations

import errno
import io
import os
import sys
import tempfile
import traceback
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import typer

from tracer.errors import ForetraceError, reason_of
from tracer.output_file import FULL

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


BAD_INPUT = 2
"""Something the user can mend: a file, an option, a full disk."""
FAILED = 1
"""A bug, or too little memory."""
INTERRUPTED = 130
TERMINATED = 143
"""The exit status of a program ended by SIGTERM, as shells report it (128 + 15)."""
BROKEN_PIPE = 141
"""The exit status of a program ended by SIGPIPE, as shells report it (128 + 13)."""


@contextmanager
def one_sentence(debug: bool) -> Iterator[None]:
    """Turn what a command raises into one sentence and ``typer.Exit``; with ``debug`` the traceback comes first."""
    try:
        yield
        finish_output()
    except typer.Exit:
        raise
    except BrokenPipeError:
        # The reader of stdout has gone (`| head`); nothing more can be said, and Python must not try at exit.
        _forget_stdout()
        raise typer.Exit(BROKEN_PIPE) from None
    except (Exception, KeyboardInterrupt) as error:
        if debug:
            traceback.print_exc()
        code, sentence = _told(error)
        hint = "" if debug or code != FAILED else " The option --debug prints where."
        if isinstance(error, OSError) and error.filename == STDOUT:
            _forget_stdout()
        tell(f"foretrace: {' '.join(sentence.split())}{hint}")
        raise typer.Exit(code) from None


def _told(error: BaseException) -> tuple[int, str]:
    """Exit code and sentence of an exception."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, "Interrupted."
    if isinstance(error, ForetraceError):
        return BAD_INPUT, str(error)
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == "torch":
        lacking = "PyTorch" if error.name == "torch" else f"a PyTorch that has {error.name} (2.6 or newer)"
        return BAD_INPUT, f"This needs {lacking}; install it with: pip install 'foretrace[capture]'."
    if isinstance(error, MemoryError):
        return FAILED, "There is not enough memory for this trace; give fewer ranks at a time, or use a larger machine."
    if isinstance(error, OSError) and error.filename == STDOUT and error.errno == errno.EBADF:
        return BAD_INPUT, ("The standard output is closed, so that the answer could not be written; send it to a file, "
                           "or to /dev/null if it is not wanted.")
    if isinstance(error, OSError) and error.filename is None and error.errno in FULL:
        return BAD_INPUT, (f"{error.strerror}: neither what was written, nor the temporary directory "
                           f"{tempfile.gettempdir()}, may have had room; free space. Existing outputs are unchanged.")
    if isinstance(error, OSError):
        where = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""
        return BAD_INPUT, f"{where}{error.strerror or error}; check the path, its permissions and the free space."
    return FAILED, (f"An unexpected error, which is a bug of foretrace: {type(error).__name__}: "
                    f"{reason_of(error, 300)}. Please report it with the trace.")


def _forget_stdout() -> None:
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    except (OSError, ValueError):  # stdout is no real file (a test's buffer)
        pass
