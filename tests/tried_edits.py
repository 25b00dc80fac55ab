"""Every edit of the registry with values to try."""

from __future__ import annotations

from graph_predictor.edits.registry import FACTOR, NOTHING, ON_OFF, OPTIONS, EditOption, Value

TEXTS = {"dtype": "bf16", "straggler": "0:50%", "indices": "zipf:1.05", "scale-out": "16",
         "remove": "aten::mm|aten::mul*"}
"""Values of edits that take a text."""
VALUES: dict[str, tuple[Value, ...]] = {FACTOR: (0.5, 2.0), NOTHING: (True,), ON_OFF: (True, False)}
"""Those of the others, by what they take."""
EVERY: list[tuple[EditOption, Value]] = [
    (option, value) for option in OPTIONS for value in VALUES.get(option.takes) or (TEXTS[option.name],)]
