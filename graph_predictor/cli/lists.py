"""Lists of numbers as options take them."""

from __future__ import annotations

from tracer import rank_classes
from tracer.parallel_plan import PlanError

MOST_NUMBERS = 16
"""Values of one option that are compared."""


def numbers(text: str, option: str, example: str) -> list[int]:
    """Read whole numbers from 1 that commas separate, each once.

    Raises:
        PlanError: there is something else, or more than ``MOST_NUMBERS``.
    """

    parts = [part.strip() for part in text.split(",")]
    if len(parts) > MOST_NUMBERS or not all(
            part.isascii() and part.isdecimal() and len(part) <= len(str(rank_classes.MOST_RANKS))
            and 0 < int(part) <= rank_classes.MOST_RANKS
            for part in parts):
        raise PlanError(f"{option} {text[:40]} is not possible; give a whole number from 1 to "
                        f"{rank_classes.MOST_RANKS:,}, or up to "
                        f"{MOST_NUMBERS} separated by commas, such as {example}.")
    return list(dict.fromkeys(int(part) for part in parts))
