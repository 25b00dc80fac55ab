"""Facts read from operations' names."""

from __future__ import annotations


def is_collective(name: str) -> bool:
    """Return whether an operation is torch.distributed's."""
    return name.startswith(("c10d::", "_c10d_functional::", "record_param_comms", "gloo:", "nccl:"))


def plain_name(name: str) -> str:
    """An operation's name without autograd's own words."""
    return name.removeprefix("autograd::engine::evaluate_function: ")
