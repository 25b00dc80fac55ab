"""Shared parts of the suite's models: blocks, initialisation, losses, and synthetic data that is repeated.

Making random data takes longer than many GPU steps, so new data for each batch would not imitate a real loader. A few
batches are repeated instead, which also lets the loss of a random task fall.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

POOL_STEPS = 4
"""Number of different steps' batches before they repeat."""


@dataclass(frozen=True)
class Batch:
    """One micro-batch. ``model(*inputs)`` is the output for ``loss_fn(output, targets)``."""

    inputs: tuple[Tensor, ...]
    targets: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """Return the batch with every tensor replaced (pinned, moved, made fake ...)."""
        return Batch(tuple(function(tensor) for tensor in self.inputs), function(self.targets))

    def to(self, device: torch.device, dtype: torch.dtype) -> Batch:
        """Return the batch on a device, with floating-point inputs as ``dtype`` (cast there, not on the host)."""
        moved = self.map(lambda tensor: tensor.to(device, non_blocking=True))
        inputs = (tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in moved.inputs)
        return Batch(tuple(inputs), moved.targets)


@dataclass(frozen=True)
class Definition:
    """A workload's definition; each file of ``tracer.workloads.models`` lists its own in ``DEFINITIONS``.

    Attributes:
        model: Settings → the module. Its ``blocks`` lists the repeated parts that are checkpointed, and that a sharding
            wrapper may treat one by one.
        batch: Settings and generator → one random micro-batch on the host.
        loss: Output and targets → the loss, a scalar in fp32.
    """

    model: Callable[[Any], nn.Module]
    batch: Callable[[Any, torch.Generator], Batch]
    loss: Callable[[Any, Tensor], Tensor]


StepBatch = tuple[Batch, ...]
"""The micro-batches of one training step."""


def serve(make: Callable[[torch.Generator], Batch], *, accumulation: int, seed: int, pin: bool) -> Iterator[StepBatch]:
    """Yield the batches of ``POOL_STEPS`` steps in endless repetition; they are made at the first request.

    Args:
        make: returns one random micro-batch from a generator.
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
    """Draw random token numbers, int64 ``[batch, seq]``."""
    return torch.randint(vocabulary, (batch, seq), generator=generator)


def next_tokens(batch: int, seq: int, vocabulary: int, generator: torch.Generator) -> Batch:
    """Draw random text with each next token as the target: both int64 ``[batch, seq]``."""
    text = tokens(batch, seq + 1, vocabulary, generator)
    return Batch((text[:, :-1].contiguous(),), text[:, 1:].contiguous())


def images(batch: int, resolution: int, classes: int, generator: torch.Generator) -> Batch:
    """Draw random images, float32 ``[batch, 3, resolution, resolution]``, and class numbers, int64 ``[batch]``."""
    pixels = torch.randn(batch, 3, resolution, resolution, generator=generator)
    return Batch((pixels,), torch.randint(classes, (batch,), generator=generator))


def run_block(block: nn.Module, checkpointing: bool, *inputs: Any) -> Any:
    """Return ``block(*inputs)``; with checkpointing only the inputs are kept, and backward runs the block again."""
    if checkpointing:
        return checkpoint(block, *inputs, use_reentrant=False)
    return block(*inputs)


def initialise(module: nn.Module, std: float = 0.02) -> None:
    """Draw linear and embedding weights normally with ``std``, and set biases to zero, as GPT-2 and BERT do."""
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=std)
            if isinstance(part, nn.Linear) and part.bias is not None:
                nn.init.zeros_(part.bias)


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in fp32 of ``[batch, seq, vocabulary]`` and ``[batch, seq]``, without targets of -100."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def click_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean binary cross entropy in fp32 of logits ``[batch]`` and targets 0 or 1."""
    return F.binary_cross_entropy_with_logits(logits.float(), targets)


class SelfAttention(nn.Module):
    """Multi-head attention with one product for queries, keys and values. ``[batch, seq, width]`` → the same shape."""

    def __init__(self, width: int, heads: int, dropout: float, *, causal: bool) -> None:
        super().__init__()
        self.head_size = width // heads
        self.dropout = dropout
        self.causal = causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attend within each sample."""
        q, k, v = (part.unflatten(-1, (-1, self.head_size)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(
            q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=self.causal)
        return self.out(attended.transpose(1, 2).flatten(2))


class FeedForward(nn.Sequential):
    """Linear to four times the width, GELU, linear back."""

    def __init__(self, width: int, *, approximate: str = "none") -> None:
        super().__init__(nn.Linear(width, 4 * width), nn.GELU(approximate), nn.Linear(4 * width, width))


class PreNormBlock(nn.Module):
    """Attention and feed-forward, each added to its unnormalised input (GPT-2, ViT)."""

    def __init__(
        self, width: int, heads: int, dropout: float, *, causal: bool, epsilon: float, approximate: str = "none",
    ) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, eps=epsilon)
        self.attention = SelfAttention(width, heads, dropout, causal=causal)
        self.forward_norm = nn.LayerNorm(width, eps=epsilon)
        self.feed_forward = FeedForward(width, approximate=approximate)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, seq, width]`` to the same shape."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.feed_forward(self.forward_norm(x)))
