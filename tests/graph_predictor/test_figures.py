"""Figures as text: zero has no sign, whichever side it was rounded from."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
from report_support import ROOT

from graph_predictor.figures import (
    microseconds,
    milliseconds,
    percent,
    signed_microseconds,
    signed_milliseconds,
    signed_percent,
)


@pytest.mark.parametrize(("text", "zero"), [
    (milliseconds, "0.000"), (microseconds, "0.0"), (percent, "0.0%"), (signed_microseconds, "0.0"),
    (signed_milliseconds, "0.000"), (signed_percent, "0.0%")])
def test_what_rounds_to_zero_has_no_sign(text: Callable[[float], str], zero: str) -> None:
    for number in (0, -0.0, 1e-9, -1e-9, np.float64(-1e-9)):
        assert text(number) == zero


def test_differences_have_their_sign() -> None:
    assert [signed_milliseconds(ns) for ns in (1_234_567_890, -400, -600)] == ["+1,234.568", "0.000", "-0.001"]
    assert [signed_percent(share) for share in (0.0321, -0.0004, -65.0, None)] == ["+3.2%", "0.0%", "-6,500.0%", "–"]
    assert [signed_percent(0.00042, 2), signed_microseconds(-2_500), signed_microseconds(7e6, 0)] == [
        "+0.04%", "-2.5", "+7,000"]
    assert [milliseconds(-1_500_000), percent(-0.25)] == ["-1.500", "-25.0%"]


def test_only_this_module_writes_signs() -> None:
    """A sign that a format string writes says "+0.0%" of nothing."""
    sign = re.compile(r"\{[^{}]*:\+[^{}]*\}")
    found = [path.name for path in sorted((ROOT / "graph_predictor").rglob("*.py"))
             if path.name != "figures.py" and sign.search(path.read_text("utf-8"))]
    assert not found
