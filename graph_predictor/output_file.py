"""Writing an output file whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from tracer.errors import ForetraceError


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A stream whose content becomes the file at ``path`` when the block ends without an exception.

    It goes to a temporary file beside it and is renamed, so that an existing file is kept until the new one is
    complete. A device or pipe (``/dev/stdout``) is written directly.

    Raises:
        ForetraceError: it cannot be written.
    """
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(6)}.tmp")
    try:
        if target.is_dir():
            raise IsADirectoryError("it is a directory")
        if target.exists() and not target.is_file():
            with open(target, "wb") as stream:
                yield stream
            return
        with open(temporary, "xb") as stream:
            yield stream
        os.replace(temporary, target)
    except BrokenPipeError:
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise ForetraceError(f"{path} cannot be written ({reason}); check the folder and its free space.") from error
    finally:
        with suppress(OSError):  # mostly it is not there
            temporary.unlink()
