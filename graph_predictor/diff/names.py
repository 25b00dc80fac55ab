"""What operations' names say."""

from __future__ import annotations

HOST_READ = "aten::_local_scalar_dense"
"""The operation under ``.item()``, ``bool(tensor)`` and the like: on a GPU it waits for all work before it."""


def is_collective(name: str) -> bool:
    """Whether an operation is torch.distributed's."""
    return name.startswith(("c10d::", "_c10d_functional::", "record_param_comms", "gloo:", "nccl:"))


def plain_name(name: str) -> str:
    """An operation's name without autograd's own words."""
    return name.removeprefix("autograd::engine::evaluate_function: ")
