"""Parameters of a test of which only some run in ``make test``; ``make slow`` runs the others.

    @pytest.mark.parametrize("name", mostly_slow(NAMES, {"cpu-small", "linear-2080Ti"}))
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pytest


def mostly_slow(values: Sequence[Any], quick: Collection[Any], ids: Sequence[str] | None = None) -> list[Any]:
    """Return the values as parameters, those that are not ``quick`` (by their ids, where these are given) marked."""
    named = list(values) if ids is None else list(ids)
    return [pytest.param(value, marks=() if name in quick else pytest.mark.slow, id=None if ids is None else name)
            for value, name in zip(values, named, strict=True)]
