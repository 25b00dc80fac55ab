"""Every failure of a command as one sentence on stderr and an exit code."""

from __future__ import annotations

import errno
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from graph_predictor.cli.text import STDOUT, finish_output, tell
from tracer.disk import FULL
from tracer.errors import ForetraceError, reason_of

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
