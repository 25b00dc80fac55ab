"""Counts what one step looks up in embedding tables: how often rows repeat, and how long bags are.

As with the notes of collectives, a ``TorchDispatchMode`` watches one step of the profiler's warm-up, which is thrown
away. There, indices are copied to the host and counted; what is kept of them are counts.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tracer.lookup_data.indices import counted
from tracer.lookup_data.tables import TABLE_DTYPES, EmbeddingTable

_BAGS = ("aten::_embedding_bag", "aten::_embedding_bag_forward_only")
_LOOKUPS = ("aten::embedding", *_BAGS)
_WRAPPERS = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "int8": "int8"}


class LookupNotes:
    """Look-ups in program order while ``start`` to ``stop``; ``rows`` is what ``lookups.json`` stores."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.started = False
        self._names = _Names()
        self._mode: Any = None

    def start(self) -> None:
        """Watch from now on, in this thread and those its backward passes run in."""
        from torch.utils._python_dispatch import TorchDispatchMode

        self.started = True
        notes = self

        class WatchLookups(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if func._schema.name in _LOOKUPS:
                    notes.note(func, args, kwargs or {})
                return func(*args, **(kwargs or {}))

        self._names.watch()
        self._mode = WatchLookups()
        self._mode.__enter__()

    def stop(self) -> None:
        """Stop watching; harmless if not started."""
        mode, self._mode = self._mode, None
        if mode is not None:
            mode.__exit__(None, None, None)
            self._names.forget()

    def note(self, func: Any, args: Any, kwargs: Any) -> None:
        """Add the table of one call as its indices look rows up in it."""
        from dataclasses import asdict

        from torch.utils._python_dispatch import _disable_current_modes

        name = func._schema.name
        values = {a.name: args[i] if i < len(args) else kwargs.get(a.name, a.default_value)
                  for i, a in enumerate(func._schema.arguments)}
        weight, indices = values["weight"], values["indices"]
        dtype = _DTYPES.get(str(weight.dtype).removeprefix("torch."), "fp32")
        assert dtype in TABLE_DTYPES
        pooling = ("mean" if values.get("mode") == 1 else "sum") if name in _BAGS else "none"
        table = EmbeddingTable(
            self._names.of(weight) or f"table {len(self.rows)}", max(int(weight.shape[0]), 1),
            max(int(weight.shape[1]), 1), dtype, pooling=pooling, optimizer="none",
            weighted=values.get("per_sample_weights") is not None)
        with _disable_current_modes():
            rows = indices.detach().cpu().numpy().astype(np.int64)
            starts = values["offsets"].detach().cpu().numpy().astype(np.int64) if name in _BAGS else None
        if starts is not None:
            ends = starts[1:] if values.get("include_last_offset") else np.append(starts[1:], len(rows))
            lengths = ends - starts[:len(ends)]
        else:
            lengths = np.full(rows.shape[0] if rows.ndim else 1, rows.size // max(rows.shape[0] if rows.ndim else 1, 1))
        self.rows.append(asdict(counted(table, rows.reshape(-1), lengths)))


class _Names:
    """Names of the weights of modules that are called, by their storages, and of the module under way."""

    def __init__(self) -> None:
        self._of_storage: dict[int, str] = {}
        self._of_module: dict[int, str] = {}
        self._current = ""
        self._handle: Any = None

    def watch(self) -> None:
        from torch.nn.modules.module import register_module_forward_pre_hook

        self._handle = register_module_forward_pre_hook(self._called)

    def forget(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()
        self._of_module.clear()

    def of(self, weight: Any) -> str:
        """The name of a weight, else of the embedding that was called last; empty where neither is known."""
        return self._of_storage.get(_storage(weight), self._current)

    def _called(self, module: Any, _: Any) -> None:
        from torch import nn

        if id(module) not in self._of_module:  # the outermost comes first, and names all inside
            for path, part in module.named_modules():
                self._of_module.setdefault(id(part), path)
            for name, weight in module.named_parameters():
                self._of_storage.setdefault(_storage(weight), _plain(name).removesuffix(".weight"))
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            self._current = _plain(self._of_module[id(module)])


def _plain(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _storage(tensor: Any) -> int:
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):  # a tensor without storage of its own (DTensor and the like)
        return 0
