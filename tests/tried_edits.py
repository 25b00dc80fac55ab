"""Every edit of the registry with values to try."""

from __future__ import annotations

from graph_predictor.edits.registry import FACTOR, NOTHING, ON_OFF, OPTIONS, EditOption, Value

VALUES: dict[str, tuple[Value, ...]] = {FACTOR: (0.5, 2.0), NOTHING: (True,), ON_OFF: (True, False)}
"""Those that are tried, by what an edit takes; of a text it is the registry's example."""
EVERY: list[tuple[EditOption, Value]] = [
    (option, value) for option in OPTIONS for value in VALUES.get(option.takes) or (option.example,)]
