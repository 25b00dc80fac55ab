"""What a command said, and that free of how wide the terminal was: Rich wraps lines, and pads columns."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

_FRAMES = re.compile(r"[\u2500-\u257f]+")
"""Box drawing, as around the errors of an option that is not known."""


class Ran(NamedTuple):
    """What one run of the command left."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Ran]

def plain(output: str) -> str:
    """Return the text with every run of white space and of frames as one blank, so that sentences can be looked for.

    A name that was broken inside a word (a path, a kernel) is not put together again: compare ``--json`` for those.
    """
    return " ".join(_FRAMES.sub(" ", output).split())
