"""Synthetic training data on the host: a few batches made once from the seed, then served in a circle.

Making random data takes longer than many a GPU step, so a real loader's work must not be imitated by making each
batch anew; and serving few batches again lets the loss of a random task fall.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn

POOL_STEPS = 4
"""Distinct steps' batches in the circle."""


@dataclass(frozen=True)
class Batch:
    """One micro-batch. ``model(*inputs)`` gives the output that ``loss_fn(output, targets)`` scores."""

    inputs: tuple[Tensor, ...]
    targets: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """The batch with every tensor replaced (pinned, moved, made fake ...)."""
        return Batch(tuple(function(tensor) for tensor in self.inputs), function(self.targets))

    def to(self, device: torch.device, dtype: torch.dtype) -> Batch:
        """The batch on a device, its floating-point inputs as ``dtype`` (cast there, not on the host)."""
        moved = self.map(lambda tensor: tensor.to(device, non_blocking=True))
        inputs = (tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in moved.inputs)
        return Batch(tuple(inputs), moved.targets)


@dataclass(frozen=True)
class Definition:
    """A workload's definition, which a file of ``tracer.workloads.models`` has among its ``DEFINITIONS``.

    Attributes:
        model: the module for given settings. Its ``blocks`` lists the repeated parts that are checkpointed, and
            that a sharding wrapper may treat one by one.
        batch: one micro-batch on the host, drawn from a generator.
        loss: output and targets → the loss, a scalar in fp32.
    """

    model: Callable[[Any], nn.Module]
    batch: Callable[[Any, torch.Generator], Batch]
    loss: Callable[[Any, Tensor], Tensor]


StepBatch = tuple[Batch, ...]
"""The micro-batches of one training step."""


def serve(make: Callable[[torch.Generator], Batch], *, accumulation: int, seed: int, pin: bool) -> Iterator[StepBatch]:
    """Endlessly the same ``POOL_STEPS`` steps' batches, made when the first is asked for.

    Args:
        make: draws one micro-batch from a generator.
        accumulation: micro-batches of a step.
        pin: put the tensors into page-locked memory, so that copies to the GPU are asynchronous.
    """
    generator = torch.Generator().manual_seed(seed)
    pool: list[StepBatch] = []
    for _ in range(POOL_STEPS):
        step = tuple(make(generator) for _ in range(accumulation))
        pool.append(tuple(batch.map(lambda tensor: tensor.pin_memory()) for batch in step) if pin else step)
    yield from cycle(pool)


def tokens(batch: int, seq: int, vocabulary: int, generator: torch.Generator) -> Tensor:
    """Random token numbers, int64 ``[batch, seq]``."""
    return torch.randint(vocabulary, (batch, seq), generator=generator)


def next_tokens(batch: int, seq: int, vocabulary: int, generator: torch.Generator) -> Batch:
    """Random text with each next token as the target: both int64 ``[batch, seq]``."""
    text = tokens(batch, seq + 1, vocabulary, generator)
    return Batch((text[:, :-1].contiguous(),), text[:, 1:].contiguous())


def images(batch: int, resolution: int, classes: int, generator: torch.Generator) -> Batch:
    """Random images, float32 ``[batch, 3, resolution, resolution]``, and class numbers, int64 ``[batch]``."""
    pixels = torch.randn(batch, 3, resolution, resolution, generator=generator)
    return Batch((pixels,), torch.randint(classes, (batch,), generator=generator))
