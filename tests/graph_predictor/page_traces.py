"""Recordings made by hand for pages: names that are markup, and many events."""

from __future__ import annotations

from micro import Micro

EVIL = ('<img src=x onerror="window.pwned=1">', "</script><script>window.pwned=2</script>",
        "<!-- <script> \u2028 & 'q' \"q\"", "{{ 7*7 }}<svg onload=window.pwned=3>", "javascript:window.pwned=4")
"""Names that would run or load something if they became markup."""


def evil_step(kernels: int = 40, *, longer: float = 0) -> Micro:
    """A step whose operations and kernels are named like markup, long enough for tables that a browser makes; each
    kernel takes so much ``longer``, µs."""
    trace = Micro(rank=0).calibrate().step(1000, 1000 + 60 * kernels)
    for number in range(kernels):
        name = EVIL[number % len(EVIL)] if number % 3 == 0 else f"aten::operation_{number:03}"
        at = 1010 + 50 * number
        trace.op(name, at, at + 40)
        trace.launch(at + 5, 5, (7, at + 15, 20 + number % 9 + longer), name=f"{name} kernel {number}")
    return trace
