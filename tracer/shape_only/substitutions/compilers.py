"""Programs that compile themselves: ``torch.compile`` in a trace by shapes.

Compiled code reads and writes memory, which a fake tensor does not have, and a compiler that looks into the trace's own
modes compiles these too. So nothing is compiled: the step is traced as it runs without a compiler. Which values a
compiler would fuse is an edit's question (``--compile``).
"""

from __future__ import annotations

from typing import Any

import torch

from tracer.shape_only.substitutions.operators import Site

NOTE = ("The program compiles parts of itself (torch.compile), which a trace by shapes does not: it has the operations "
        "that these parts run without a compiler.")
_PLAIN = ("eager",)
"""Backends that run the program's own operations; PyTorch's own functions ask for it."""


def compilers(site: Site) -> None:
    """Let ``torch.compile`` and ``Module.compile`` leave what they are given as it is."""
    original = torch.compile

    def compiled(model: Any = None, **options: Any) -> Any:
        if options.get("backend") in _PLAIN:
            return original(model, **options)
        if model is None:  # as a decorator with arguments
            return lambda function: compiled(function, **options)
        _used(site)
        return model

    def in_place(self: torch.nn.Module, *_: Any, **__: Any) -> None:
        _used(site)

    site.patch(torch, "compile", compiled)
    site.patch(torch.nn.Module, "compile", in_place)


def _used(site: Site) -> None:
    site.note(NOTE)
