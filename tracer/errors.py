"""The errors a user can cause, each one sentence: what happened, the likely cause, what to do."""

from __future__ import annotations

from collections.abc import Iterable


class ForetraceError(Exception):
    """Base of every error foretrace raises on purpose; the command line prints it and exits with code 2."""


class TraceError(ForetraceError):
    """A trace file cannot be read, or lacks the requested data."""


class StepRegionError(ForetraceError):
    """The region that shall mark the steps is missing in a recording, or the recording was saved with other steps.

    It is no ``TraceError``: files that raise those may be skipped, but a rank without the region must not be.
    """


class CycleError(ForetraceError):
    """Recorded steps cannot be grouped into cycles of the requested number."""


class GraphFileError(ForetraceError):
    """A saved graph file is corrupt, incomplete or of a newer version."""


class JobError(ForetraceError):
    """Several ranks' files do not form one job."""


class CaptureError(ForetraceError):
    """A capture cannot start, or cannot write what it recorded."""

    reason = "its files could not be written."
    """Why a capture is incomplete, for its ``context.json``: without the paths that the message may contain."""


class DiskFullError(CaptureError):
    """There is no space left where a capture is written."""

    reason = "the disk was full."


class ProfilerBusyError(CaptureError):
    """Another torch profiler is running."""

    reason = "another torch profiler was running."


def listed(texts: Iterable[str], most: int = 8) -> str:
    """Return the first texts, and the number of further ones, as part of a sentence: "a, b and 3 more"."""
    every = list(texts)
    return ", ".join(every[:most]) + (f" and {len(every) - most:,} more" if len(every) > most else "")


def reason_of(error: BaseException, most: int = 200) -> str:
    """Return an exception's message as one line, see ``cut_text``; its type if it has no message."""
    return cut_text(str(error), most) or type(error).__name__


def cut_text(text: str, most: int) -> str:
    """Return a text as one line of at most ``most`` characters and an ellipsis, cut between words."""
    line = " ".join(text.split())
    if len(line) <= most:
        return line
    kept = line[:most + 1]
    return f"{kept.rpartition(' ')[0] or kept[:-1]} …"
