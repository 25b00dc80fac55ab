"""One rank's share of a Mamba-2 mixer: the kernels of its recurrence as the products and the bytes that they take.

The recurrence runs chunk by chunk (Dao and Gu, 2024, section 6) in Triton kernels, which PyTorch has no operations for:
each stands here as the matrix product, or the pass over memory, that it mostly is. What runs again in backward, and
which products run for a group of heads or for each head, is that of ``mamba_split_conv1d_scan_combined`` of the package
mamba-ssm (2.2), which Megatron-Core and transformers call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tracer.shape_only.state_space import StateSpace
from tracer.shape_only.transformer import TransformerPart, TransformerShape


class StateSpaceMixer(nn.Module):
    """A mixer; context-parallel ranks share its heads while the recurrence runs (all-to-all)."""

    def __init__(self, shape: TransformerShape, part: TransformerPart, sizes: StateSpace) -> None:
        super().__init__()
        own, running = sizes.share(part.tp), sizes.share(part.tp, part.cp)
        self.rows, self.running, self.inner = part.cp, running, own.inner
        self.into = nn.Linear(shape.hidden, own.projected, bias=sizes.bias)
        self.convolution = nn.Parameter(torch.empty(own.mixed, sizes.window))
        self.convolution_bias = nn.Parameter(torch.empty(own.mixed)) if sizes.convolution_bias else None
        self.steps, self.decay, self.skipped = (nn.Parameter(torch.empty(own.heads)) for _ in range(3))
        self.norm = nn.Parameter(torch.empty(own.inner)) if sizes.norm else None
        self.scan = _Scan(running)
        self.out = nn.Linear(own.inner, shape.hidden, bias=sizes.bias)

    def forward(self, x: Tensor) -> Tensor:
        """``[seq, batch, hidden]`` → the same."""
        projected = self.into(x)
        if self.rows > 1:
            projected = _Exchanged.apply(projected, (len(x) * self.rows, x.shape[1], self.running.projected))
        done = self.scan(projected)  # named as SCAN says
        return self.out(_Exchanged.apply(done, (*x.shape[:2], self.inner)) if self.rows > 1 else done)


class _Exchanged(torch.autograd.Function):
    """A stand-in for an all-to-all from tokens to heads, or back: an empty tensor of that size, both ways."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: tuple[int, ...]) -> Tensor:
        ctx.sizes = x.shape
        return x.new_empty(sizes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].new_empty(ctx.sizes), None


class _Scan(nn.Module):
    """Convolution, recurrence and gate of one rank's heads."""

    def __init__(self, sizes: StateSpace) -> None:
        super().__init__()
        self.sizes = sizes

    def forward(self, projected: Tensor) -> Tensor:
        """``[seq, batch, projected]`` → ``[seq, batch, inner]``."""
        return _Recurrence.apply(projected, self.sizes)


class _Recurrence(torch.autograd.Function):
    """Keeps its input and the recurrence's output for backward, which computes the rest of forward again."""

    @staticmethod
    def forward(ctx: Any, projected: Tensor, sizes: StateSpace) -> Tensor:
        ctx.sizes = sizes
        gate, *_ = _parts(projected, sizes)
        _states(projected, sizes)
        each, size = _chunks(projected, sizes)
        y = projected.new_empty(*projected.shape[:2], sizes.inner)
        # Of a chunk, each token attends to half of the others on average, and to the state before the chunk.
        _product(projected, each * sizes.heads, size, sizes.head_size, size // 2 + sizes.state)
        ctx.save_for_backward(projected, y)
        return y * gate

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        projected, y = ctx.saved_tensors
        of: StateSpace = ctx.sizes
        gate, mixed, _ = _parts(projected, of)
        _states(projected, of)
        each, size = _chunks(projected, of)
        groups, heads = each * of.groups, each * of.heads
        wide = of.inner // of.groups
        grads[0] * gate, grads[0] * y
        _product(projected, heads, of.head_size, of.state, size)  # of states
        _passed(projected, each, of)
        _product(projected, heads, size, of.head_size, size // 2 + of.state)  # of inputs
        _product(projected, groups, size, of.state, wide)  # of B
        _product(projected, groups, size, of.state, wide)  # of C
        # Of B·C, and of the decay between tokens, which needs the same products head by head and keeps sums alone.
        _product(projected, groups, size, size // 2, 2 * wide)
        for _ in range(2):
            _product(projected, groups, size, of.state, size)
        mixed * mixed.new_empty(mixed.shape)
        return projected.new_empty(projected.shape), None


def _parts(projected: Tensor, of: StateSpace) -> tuple[Tensor, Tensor, Tensor]:
    """The gate, what the convolution sees, and the time steps."""
    gate, mixed, steps = projected.split([of.inner, of.mixed, of.heads], dim=-1)
    return gate, mixed, steps


def _chunks(projected: Tensor, of: StateSpace) -> tuple[int, int]:
    """Chunks of all sequences, and tokens of one."""
    size = min(of.chunk, len(projected))
    return -(-len(projected) // size) * projected.shape[1], size


def _states(projected: Tensor, of: StateSpace) -> None:
    """The convolution, the decay along a chunk, each chunk's state, the states before each chunk, and B·C."""
    _, mixed, steps = _parts(projected, of)
    torch.nn.functional.silu(mixed)
    steps.float()
    each, size = _chunks(projected, of)
    _product(projected, each * of.heads, of.head_size, of.state, size)
    _passed(projected, each, of)
    _product(projected, each * of.groups, size, size, of.state)


def _passed(like: Tensor, chunks: int, of: StateSpace) -> None:
    """States, in fp32, handed on from chunk to chunk."""
    like.new_empty(chunks, of.heads, of.head_size, of.state, dtype=torch.float32).to(like.dtype)


def _product(like: Tensor, batch: int, m: int, n: int, k: int) -> None:
    torch.bmm(like.new_empty(batch, m, max(k, 1)), like.new_empty(batch, max(k, 1), max(n, 1)))
