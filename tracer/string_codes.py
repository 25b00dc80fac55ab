"""``string_coder``: codes of texts in a graph's ``strings``."""

from __future__ import annotations

from collections.abc import Callable

from tracer.graph import NONE, ExecutionGraph

CodeOf = Callable[[str], int]


def string_coder(graph: ExecutionGraph) -> CodeOf:
    """A function from a text to its code in ``graph.strings``, appended where new; ``NONE`` for the empty text."""
    codes = {text: code for code, text in reversed(list(enumerate(graph.strings)))}

    def code_of(text: str) -> int:
        if not text:
            return NONE
        if text not in codes:
            codes[text] = len(graph.strings)
            graph.strings.append(text)
        return codes[text]

    return code_of
