"""Notes of one discarded step: its collectives, its look-ups in embedding tables, the Python between operations.

Under gloo and fake groups the profiler records no group, ranks or element counts; it never records indices and calls of
Python. A ``TorchDispatchMode`` sees them, in the C++ code of reducers too, but it also sees every other operation: it
costs microseconds each, and compiled code runs eagerly under it. It therefore watches one discarded step of the
profiler's warm-up, and never a timed or profiled one. The profiled steps do the same in the same order, which reading
checks (``tracer.capture.merge``).
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    is_traceable_wrapper_subclass_type,
)

from tracer.capture_layout import COLLECTIVES, LOOKUPS, PYTHON_CALLS
from tracer.kineto.linking import collective_kind
from tracer.lookup_data.indices import counted
from tracer.lookup_data.tables import TABLE_DTYPES, EmbeddingTable
from tracer.python_calls import PythonCalls

_NAMESPACES = ("c10d", "_c10d_functional")
_NOT_COLLECTIVES = {"wait_tensor", "check_for_nan", "batch_p2p_ops", "_wrap_tensor_autograd"}
_FILL_NOTHING = {"send", "barrier"}
_BAGS = ("aten::_embedding_bag", "aten::_embedding_bag_forward_only")
_LOOKUPS = ("aten::embedding", *_BAGS)
_WRAPPERS = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "int8": "int8"}


class StepNotes:
    """Notes in program order, taken between ``start`` and ``stop``.

    Attributes:
        file: Name of the file that stores them.
        rows: Its content.
        started: Whether a step was watched.
    """

    file: ClassVar[str]

    def __init__(self) -> None:
        self.rows: list[Any] = []
        self.started = False
        self._mode: TorchDispatchMode | None = None

    @property
    def worth_writing(self) -> bool:
        """Return whether there is anything to store."""
        return bool(self.rows)

    def start(self) -> None:
        """Watch from now on, in this thread and those its backward passes run in."""
        self.started = True
        self._mode = self._watching()
        self._mode.__enter__()

    def stop(self) -> None:
        """Stop watching; does nothing if not started."""
        mode, self._mode = self._mode, None
        if mode is not None:
            mode.__exit__(None, None, None)

    def see(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Note one operator call, if it is of interest."""

    def _watching(self) -> TorchDispatchMode:
        return _Watching(self)


class _Watching(TorchDispatchMode):
    def __init__(self, notes: StepNotes) -> None:
        super().__init__()
        self._notes = notes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._notes.see(func, args, kwargs or {}, result)
        return result


# -- collectives ------------------------------------------------------------------------------------------------------


def profiler_lacks_collectives() -> bool:
    """Return whether there are process groups whose collectives the profiler does not describe (all but pure NCCL)."""
    if not (dist.is_available() and dist.is_initialized()):
        return False
    groups = dist.distributed_c10d._world.pg_map.values()
    return any(str(backend).lower() not in ("nccl", "cuda:nccl") for backend, _ in groups)


class CollectiveNotes(StepNotes):
    """The collectives of a step."""

    file = COLLECTIVES

    def __init__(self) -> None:
        super().__init__()
        self._order: dict[str, int] = {}

    def see(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Note an operator call if it is a collective."""
        if func.namespace in _NAMESPACES:
            self.note(func, args, kwargs, result)

    def note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Add the row of one call of a collective operator."""
        schema = func._schema
        name = schema.name.partition("::")[2]
        if name in _NOT_COLLECTIVES:
            return
        values = _values_of(func, args, kwargs)
        group, ranks = _group_of(values)
        sent, received = _tensors_of(values, result)
        row = {
            "op": schema.name,
            "kind": collective_kind(name),
            "group": group,
            "ranks": _peers(values, ranks),
            "dtype": str((sent or received)[0].dtype).removeprefix("torch.") if sent or received else "",
            "elements_in": sum(map(_elements, sent)),
            "elements_out": sum(map(_elements, received)),
            "async": _is_async(values),
            "order": self._order.get(group, 0),
        }
        self._order[group] = row["order"] + 1
        self.rows.append(row)


def received_tensors(func: Any, args: Any, kwargs: Any, result: Any) -> list[Any]:
    """Return the tensors that a call of a collective operator fills on this rank; a send or a barrier fills none.

    Schemas do not show it: c10d's operators mark no argument as written, and several (``recv_``, ``alltoall_base_``,
    ``allreduce_coalesced_``) return only their work.
    """
    if collective_kind(func._schema.name.partition("::")[2]) in _FILL_NOTHING:
        return []
    return _tensors_of(_values_of(func, args, kwargs), result)[1]


def _values_of(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return a call's arguments by name."""
    return {a.name: args[i] if i < len(args) else kwargs.get(a.name, a.default_value)
            for i, a in enumerate(func._schema.arguments)}


def _group_of(values: dict[str, Any]) -> tuple[str, list[int]]:
    given = values.get("process_group", values.get("group_name"))
    try:
        if isinstance(given, str):
            given = dist.distributed_c10d._resolve_process_group(given)
        elif not isinstance(given, dist.ProcessGroup):
            given = dist.ProcessGroup.unbox(given)
        return str(given.group_name), list(dist.get_process_group_ranks(given))
    except Exception:  # an older torch, or a group of another kind: if there is only one group, it is that one
        names = dist.distributed_c10d._world.pg_names
        if len(names) != 1:
            return "", []
        group, name = next(iter(names.items()))
        return str(name), list(dist.get_process_group_ranks(group))


def _peers(values: dict[str, Any], ranks: list[int]) -> list[int]:
    """Return the participating ranks: the whole group; for a send or a receive, the sender, then the receiver."""
    peer = values.get("dst", values.get("src"))  # numbered within the group
    if not isinstance(peer, int) or not 0 <= peer < len(ranks):
        return ranks
    return [dist.get_rank(), ranks[peer]] if "dst" in values else [ranks[peer], dist.get_rank()]


def _tensors_of(values: dict[str, Any], result: Any) -> tuple[list[Any], list[Any]]:
    """Return the tensors a collective sends and receives on this rank."""
    sent = [t for name, value in values.items() if name.startswith("input") for t in _flat(value)]
    received = [t for name, value in values.items() if name.startswith("out") and "split" not in name
                for t in _flat(value)]
    both = [t for name, value in values.items() if name in ("tensor", "tensors") for t in _flat(value)]
    if both:
        return both, both
    return sent, received or _flat(result)


def _elements(tensor: Any) -> int:
    """Return the elements that are sent: of a sparse tensor its values, and its indices in units of a value's size."""
    if not tensor.is_sparse:
        return int(tensor.numel())
    values, indices = tensor._values(), tensor._indices()
    return int(values.numel()) + -(-int(indices.numel()) * indices.element_size() // values.element_size())


def _flat(value: Any) -> list[Any]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _flat(item)]
    return []


def _is_async(values: dict[str, Any]) -> bool | None:
    if "group_name" in values:
        return True  # a functional collective: wait_tensor waits for it
    given = values.get("async_op", values.get("asyncOp"))
    return given if isinstance(given, bool) else None


# -- look-ups ---------------------------------------------------------------------------------------------------------


class LookupNotes(StepNotes):
    """The tables of a step's look-ups: how often rows repeat, and how long bags are.

    Indices are copied to the host and counted; only counts are kept.
    """

    file = LOOKUPS

    def __init__(self) -> None:
        super().__init__()
        self._names = _Names()

    @property
    def worth_writing(self) -> bool:
        """Return true: a step without look-ups is written too."""
        return True

    def start(self) -> None:
        """Watch look-ups and the names of modules from now on."""
        self._names.watch()
        super().start()

    def stop(self) -> None:
        """Stop watching; does nothing if not started."""
        super().stop()
        self._names.forget()

    def see(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Add the table of one look-up, with the statistics of its indices."""
        name = func._schema.name
        if name not in _LOOKUPS:
            return
        values = _values_of(func, args, kwargs)
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
    """Names of called modules' weights, by storage, and of the running module."""

    def __init__(self) -> None:
        self._of_storage: dict[int, str] = {}
        self._of_module: dict[int, str] = {}
        self._current = ""
        self._handle: Any = None

    def watch(self) -> None:
        self._handle = register_module_forward_pre_hook(self._called)

    def forget(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()
        self._of_module.clear()

    def of(self, weight: Any) -> str:
        """Return the name of a weight, else of the embedding called last; empty where neither is known."""
        return self._of_storage.get(_storage(weight), self._current)

    def _called(self, module: Any, _: Any) -> None:
        if id(module) not in self._of_module:  # the outermost comes first, and names all modules inside
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


# -- calls of Python --------------------------------------------------------------------------------------------------


class PythonNotes(StepNotes):
    """The calls of Python that a step makes between its operations (``tracer.python_calls``).

    Operations are those the dispatcher runs below autograd.

    Attributes:
        rows: (operation's name, calls since the previous operation) each; last, ("", calls after all operations).
    """

    file = PYTHON_CALLS

    def __init__(self) -> None:
        super().__init__()
        self._calls = PythonCalls()

    @property
    def worth_writing(self) -> bool:
        """Return whether there was an operation at which to count."""
        return len(self.rows) > 1

    def start(self) -> None:
        """Watch from now on, in this thread."""
        super().start()
        self._calls.start()

    def stop(self) -> None:
        """Stop watching; does nothing if not started."""
        watched = self._mode is not None
        if watched:
            self._calls.stop()
        super().stop()
        if watched:
            self.rows.append(("", self._calls.taken()))

    def _watching(self) -> TorchDispatchMode:
        return _WatchingPython(self.rows, self._calls)


class _WatchingPython(TorchDispatchMode):
    def __init__(self, rows: list[tuple[str, int]], calls: PythonCalls) -> None:
        super().__init__()
        self._rows, self._calls = rows, calls

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would wrap each call in a function of its own

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # a DTensor and the like, whose Python is the program's: seen again by its parts
        self._calls.hide()
        try:
            self._rows.append((func._schema.name, self._calls.taken()))
            return func(*args, **(kwargs or {}))
        finally:
            self._calls.show()
