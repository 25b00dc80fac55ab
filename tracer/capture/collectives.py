"""Notes the collectives of one step: the profiler records no group, ranks or element counts under gloo and fake groups.

A ``TorchDispatchMode`` sees every collective, in the reducer's C++ code too, but it also sees every other operation:
it costs microseconds each, and compiled code runs eagerly under it. It therefore watches one step only, a step of the
profiler's warm-up that is thrown away, and never a timed or profiled one. The steps of the profile have the same
collectives in the same order, which reading checks (``tracer.capture.merge``).
"""

from __future__ import annotations

from typing import Any

from tracer.kineto.collectives import collective_kind

_NAMESPACES = ("c10d", "_c10d_functional")
_NOT_COLLECTIVES = {"wait_tensor", "check_for_nan", "batch_p2p_ops", "_wrap_tensor_autograd"}
_FILL_NOTHING = {"send", "barrier"}


def profiler_lacks_collectives() -> bool:
    """Return whether there are process groups whose collectives the profiler does not describe (all but pure NCCL)."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return False
    groups = dist.distributed_c10d._world.pg_map.values()
    return any(str(backend).lower() not in ("nccl", "cuda:nccl") for backend, _ in groups)


class CollectiveNotes:
    """Collectives in program order while ``start`` to ``stop``; ``rows`` is what ``collectives.json`` stores."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.started = False
        self._order: dict[str, int] = {}
        self._mode: Any = None

    def start(self) -> None:
        """Watch from now on, in this thread and those its backward passes run in."""
        from torch.utils._python_dispatch import TorchDispatchMode

        self.started = True
        notes = self

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                result = func(*args, **(kwargs or {}))
                if func.namespace in _NAMESPACES:
                    notes.note(func, args, kwargs or {}, result)
                return result

        self._mode = Watch()
        self._mode.__enter__()

    def stop(self) -> None:
        """Stop watching; harmless if not started."""
        mode, self._mode = self._mode, None
        if mode is not None:
            mode.__exit__(None, None, None)

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
    """Tensors that a call of a collective operator fills on this rank: none of a send or a barrier.

    Schemas do not tell: c10d's operators mark no argument as written, and several (``recv_``, ``alltoall_base_``,
    ``allreduce_coalesced_``) return nothing but their work.
    """
    if collective_kind(func._schema.name.partition("::")[2]) in _FILL_NOTHING:
        return []
    return _tensors_of(_values_of(func, args, kwargs), result)[1]


def _values_of(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """A call's arguments by name."""
    return {a.name: args[i] if i < len(args) else kwargs.get(a.name, a.default_value)
            for i, a in enumerate(func._schema.arguments)}


def _group_of(values: dict[str, Any]) -> tuple[str, list[int]]:
    import torch.distributed as dist

    given = values.get("process_group", values.get("group_name"))
    try:
        if isinstance(given, str):
            given = dist.distributed_c10d._resolve_process_group(given)
        elif not isinstance(given, dist.ProcessGroup):
            given = dist.ProcessGroup.unbox(given)
        return str(given.group_name), list(dist.get_process_group_ranks(given))
    except Exception:  # an older torch, or a group of another kind: where there is only one, it is that one
        names = dist.distributed_c10d._world.pg_names
        if len(names) != 1:
            return "", []
        group, name = next(iter(names.items()))
        return str(name), list(dist.get_process_group_ranks(group))


def _peers(values: dict[str, Any], ranks: list[int]) -> list[int]:
    """Return the ranks that take part: all of the group; for a send or a receive the sender, then the receiver."""
    import torch.distributed as dist

    peer = values.get("dst", values.get("src"))  # numbered within the group
    if not isinstance(peer, int) or not 0 <= peer < len(ranks):
        return ranks
    return [dist.get_rank(), ranks[peer]] if "dst" in values else [ranks[peer], dist.get_rank()]


def _tensors_of(values: dict[str, Any], result: Any) -> tuple[list[Any], list[Any]]:
    """Tensors a collective sends and receives on this rank."""
    sent = [t for name, value in values.items() if name.startswith("input") for t in _flat(value)]
    received = [t for name, value in values.items() if name.startswith("out") and "split" not in name
                for t in _flat(value)]
    both = [t for name, value in values.items() if name in ("tensor", "tensors") for t in _flat(value)]
    if both:
        return both, both
    return sent, received or _flat(result)


def _elements(tensor: Any) -> int:
    """Elements that are sent: of a sparse tensor its values, and its indices in elements of their size."""
    if not tensor.is_sparse:
        return int(tensor.numel())
    values, indices = tensor._values(), tensor._indices()
    return int(values.numel()) + -(-int(indices.numel()) * indices.element_size() // values.element_size())


def _flat(value: Any) -> list[Any]:
    import torch

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
