"""Believable rank numbers and world sizes: nothing is allocated by a number that a file merely claims."""

from __future__ import annotations

import re
from collections.abc import Collection

import numpy as np

from tracer.graph import NONE, Meta
from tracer.rank_classes import MOST_RANKS

_RANK_IN_NAME = re.compile(r"(?:rank|worker|trainer|node)[-_.]?([0-9]+)", re.IGNORECASE)
_MOST_IN_NAME = 1 << 17
"""A number in a file's name above this is a date, a host or a job, not a rank."""


def rank_in_name(path: str) -> int:
    """Return the rank a file's name gives ("rank3.json", "worker3_step_12…"), ``NONE`` if it gives none."""
    match = _RANK_IN_NAME.search(path.rstrip("/").rsplit("/", 1)[-1])
    return int(match.group(1)) if match and len(match.group(1)) < 9 and int(match.group(1)) < _MOST_IN_NAME else NONE


def leave_out_unbelievable(meta: Meta) -> None:
    """Take out a rank and a world size that cannot be, and say so in the loss report."""
    for name, what, least in (("rank", "rank", 0), ("world_size", "world size", 1)):
        value = getattr(meta, name)
        if value != NONE and not least <= value < MOST_RANKS + least:
            meta.loss.notes.append(f"The {what} {value} that the file gives cannot be, and was left out.")
            setattr(meta, name, NONE)


def missing_of(size: int, covered: Collection[int]) -> list[int]:
    """Return the ranks below ``size`` that are not covered, in order."""
    missing = np.ones(min(size, MOST_RANKS), bool)
    missing[[rank for rank in covered if 0 <= rank < len(missing)]] = False
    found: list[int] = np.flatnonzero(missing).tolist()
    return found
