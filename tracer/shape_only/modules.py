"""The module of each operation: global hooks keep the stack of modules under way.

Backward operations get the module of the forward operation whose autograd node runs, found by its sequence number.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules import module as hooks


class ModuleStack:
    """The path of the running module, such as "Llama/blocks.0/attention/q"; a context that installs the hooks."""

    def __init__(self) -> None:
        self.modules: dict[int, Any] = {}
        """Every module that ran, by id (kept alive, so that ids stay unique)."""
        self._names: dict[int, str] = {}
        self._stack: list[str] = []
        self._handles: list[Any] = []

    @property
    def path(self) -> str:
        """The innermost running module's path, "" outside."""
        return self._stack[-1] if self._stack else ""

    def __enter__(self) -> ModuleStack:
        self._handles = [hooks.register_module_forward_pre_hook(self._enter),
                         hooks.register_module_forward_hook(self._leave, always_call=True)]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def forget(self) -> None:
        """Leave every module: a step that failed, or ended."""
        self._stack.clear()

    def _enter(self, module: Any, _: Any) -> None:
        if id(module) not in self._names:
            self._learn(module)
        self._stack.append(self._names[id(module)])

    def _leave(self, module: Any, *_: Any) -> None:
        name = self._names.get(id(module))
        if name in self._stack:  # a module that failed leaves those inside it behind
            while self._stack.pop() != name:
                pass

    def _learn(self, module: Any) -> None:
        root = type(module).__name__
        for name, part in module.named_modules():
            self.modules.setdefault(id(part), part)
            self._names.setdefault(id(part), f"{root}/{name.replace('.', '/')}" if name else root)


def current_sequence() -> int:
    """The sequence number autograd's next node will have."""
    return int(torch._C._autograd._get_sequence_nr())
