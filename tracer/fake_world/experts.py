"""Expert parallelism: the experts of the suite's mixture of experts spread over data-parallel ranks.

::

    [experts, places, width]                    what this rank's tokens ask of every expert
         │ all-to-all
    [own experts, ranks × places, width]        what every rank of the group asks of this rank's experts
         │ own experts
         │ all-to-all
    [experts, places, width]                    the answers

The ``ep`` ranks of a group lie side by side and have experts of their own each; the other parameters are replicated or
sharded over all data-parallel ranks, the experts over the ``dp / ep`` ranks that have the same ones, as torchtitan and
Megatron-LM do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn.parallel import DistributedDataParallel


class SpreadExperts(nn.Module):
    """This rank's experts in the place of all of them: ``[experts, places, width]`` → the same."""

    def __init__(self, experts: nn.Module, count: int, ranks: int, place: int, group: Any) -> None:
        """``experts`` has parameters whose first dimension is the ``count`` experts; it is changed."""
        super().__init__()
        self.ranks, self.group = ranks, group
        own = count // ranks
        for name, whole in list(experts.named_parameters(recurse=False)):
            setattr(experts, name, nn.Parameter(whole.detach()[place * own:(place + 1) * own].clone()))
        self.experts = experts

    def forward(self, x: Tensor) -> Tensor:
        """Send places to the ranks that have their experts, and their answers back."""
        count, places, width = x.shape
        asked = self._exchange(x).unflatten(0, (self.ranks, count // self.ranks)).transpose(0, 1).flatten(1, 2)
        answers = self.experts(asked).unflatten(1, (self.ranks, places)).transpose(0, 1)
        return self._exchange(answers.reshape(count, places, width))

    def _exchange(self, x: Tensor) -> Tensor:
        return all_to_all_single_autograd(x.contiguous(), None, None, self.group)


class DataParallelWithExperts(DistributedDataParallel):
    """DDP of all but the experts, each of which may be in a DDP of its own: they stop synchronising together."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Skip the reduction as ``DistributedDataParallel`` does, for the experts too."""
        with ExitStack() as stack:
            for part in self.module.modules():
                if isinstance(part, DistributedDataParallel):
                    stack.enter_context(part.no_sync())
            stack.enter_context(super().no_sync())
            yield


def spread_experts(model: Any, count: int, ranks: int, place: int, group: Any) -> list[SpreadExperts]:
    """Leave each block of a mixture of experts the experts of one place of an expert-parallel group, in place."""
    found = []
    for block in model.blocks:
        part = block.feed_forward
        part.experts = SpreadExperts(part.experts, count, ranks, place, group)
        found.append(part.experts)
    return found


def replicate_experts(spread: list[SpreadExperts], group: Any, copies: int, **options: Any) -> None:
    """Average the gradients of equal experts over the ``copies`` ranks that have them, by DDP."""
    for part in spread:
        # Each rank's loss is a mean over its own tokens, and gradients of all ranks of the group add up here.
        for weight in part.experts.parameters():
            weight.register_hook(lambda gradient, ranks=part.ranks: gradient / ranks)
        if copies > 1:
            part.experts = DistributedDataParallel(part.experts, process_group=group, **options)


def shard_experts(spread: list[SpreadExperts], mesh: Any, ranks: int) -> None:
    """Shard equal experts over the ranks of ``mesh`` by FSDP2; ``ranks`` are all data-parallel ones."""
    from torch.distributed.fsdp import fully_shard

    for part in spread:
        sharded: Any = fully_shard(part.experts, mesh=mesh)
        divide = getattr(sharded, "set_gradient_divide_factor", None) or sharded.set_reduce_scatter_divide_factor
        divide(float(ranks))
        if dist.get_backend(mesh.get_group()) == "gloo":  # which cannot scale while it reduces
            sharded.set_force_sum_reduction_for_comms(True)


def expert_parameters(model: nn.Module) -> list[str]:
    """Names of the parameters of spread experts."""
    inside = [name for name, part in model.named_modules() if isinstance(part, SpreadExperts)]
    return [name for name, _ in model.named_parameters() if name.startswith(tuple(f"{each}." for each in inside))]


def ignore_experts(model: nn.Module) -> None:
    """Let a DDP around the model leave the experts alone."""
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, expert_parameters(model))
