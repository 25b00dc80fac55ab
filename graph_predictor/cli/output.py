"""Checks of an output path before the long work, so that nothing is lost at its end."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from tracer.errors import ForetraceError


def check_output(path: str, inputs: list[str], *, device_allowed: bool) -> None:
    """Refuse an output that cannot be written or would overwrite what is being read.

    Args:
        path: Where the output goes; a URL is left to its file system.
        inputs: What the command reads.
        device_allowed: Whether a pipe or device such as ``/dev/null`` can be written to.

    Raises:
        ForetraceError: with the reason.
    """
    if "://" in path:
        return
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise ForetraceError(f"{path} is a directory; name a file in it.")
    if not target.parent.is_dir():
        raise ForetraceError(f"{path} cannot be written: {target.parent} does not exist; create that directory first.")
    if target.exists() and not stat.S_ISREG(target.stat().st_mode):
        if device_allowed:
            return
        raise ForetraceError(f"{path} is no regular file; name another output.")
    if not os.access(target.parent, os.W_OK):
        raise ForetraceError(f"{path} cannot be written: there is no permission to write to {target.parent}.")
    if target.exists() and any(os.path.samefile(target, source) for source in _local_files(inputs)):
        raise ForetraceError(f"{path} is one of the files being read and would be overwritten; name another output.")


def _local_files(inputs: list[str]) -> list[str]:
    """The existing local files that the inputs stand for; what cannot be found is told when it is read."""
    from tracer.files import find_files

    found = []
    for path in inputs:
        try:
            found += [file.path for file in find_files([path], []) if "://" not in file.path]
        except ForetraceError:
            continue
    return [path for path in found if os.path.exists(path)]
