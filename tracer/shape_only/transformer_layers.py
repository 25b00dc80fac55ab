"""Layers of one rank's share of a block beside attention: norms, the feed-forward part, experts, and what stands for
collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tracer.shape_only.transformer import TransformerPart, TransformerShape

EPSILON = 1e-5


class Resized(torch.autograd.Function):
    """A stand-in for a collective that changes a tensor's first dimension: an empty tensor of that size, both ways."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: int) -> Tensor:
        """Return so many rows."""
        ctx.rows = x.shape[0]
        return x.new_empty(rows, *x.shape[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return as many as came in."""
        return grads[0].new_empty(ctx.rows, *grads[0].shape[1:]), None


@contextmanager
def gathered_again(gathered: Tensor, shard: Tensor) -> Iterator[None]:
    """Keep a rank's own part of what was gathered for backward, as Megatron-LM does, which gathers it once more there
    (Korthikanti et al., 2022, section 4.2.2)."""
    whole = gathered.untyped_storage()._cdata

    def pack(saved: Tensor) -> Tensor | tuple[Tensor, torch.Size]:
        return (shard, saved.shape) if saved.untyped_storage()._cdata == whole else saved

    def unpack(kept: Tensor | tuple[Tensor, torch.Size]) -> Tensor:
        return kept if isinstance(kept, Tensor) else kept[0].new_empty(kept[1])

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def norm_of(shape: TransformerShape, width: int | None = None) -> nn.Module:
    """Return a norm over so many features, by default the stream's."""
    width = width or shape.hidden
    return nn.RMSNorm(width, EPSILON) if shape.rms else nn.LayerNorm(width, EPSILON)


class SplitFeedForward(nn.Module):
    """One rank's columns of the first product and rows of the second.

    Args:
        shape: of the decoder.
        inner: width between the products, on this rank.
    """

    def __init__(self, shape: TransformerShape, inner: int) -> None:
        super().__init__()
        self.shape = shape
        self.up = nn.Linear(shape.hidden, inner * (2 if shape.gated else 1), shape.bias)
        self.down = nn.Linear(inner, shape.hidden, shape.bias)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., hidden]`` → the same."""
        return self.down(_activated(self.up(x), self.shape))


class GroupedExperts(nn.Module):
    """One rank's experts, as Megatron-Core runs them: tokens are sorted by expert, sent, and sorted by the experts of
    the rank; each of the two products is one grouped kernel for all of them."""

    def __init__(self, shape: TransformerShape, part: TransformerPart) -> None:
        super().__init__()
        self.shape, self.part = shape, part
        self.count, inner = shape.experts // part.ep, shape.ffn // part.expert_tp
        self.router = nn.Linear(shape.hidden, shape.experts, bias=False)
        self.up = nn.Parameter(torch.empty(self.count, shape.hidden, inner * (2 if shape.gated else 1)))
        self.down = nn.Parameter(torch.empty(self.count, inner, shape.hidden))
        if shape.bias:
            self.up_bias = nn.Parameter(torch.empty(self.count, 1, self.up.shape[2]))
            self.down_bias = nn.Parameter(torch.empty(self.count, 1, shape.hidden))

    def forward(self, x: Tensor) -> Tensor:
        """``[seq, batch, hidden]`` → the same, of the rank's own tokens."""
        seq, batch, width = x.shape
        tokens = x.reshape(seq * batch, width)
        weight, _ = torch.topk(torch.softmax(self.router(tokens), dim=-1), self.shape.top_k, dim=-1)
        place = torch.empty(len(tokens) * self.shape.top_k, dtype=torch.int64, device=x.device)
        sent = torch.index_select(tokens, 0, place % len(tokens))
        back = torch.index_select(Resized.apply(self._experts(sent), len(sent)), 0, place)
        return (back.view(len(tokens), self.shape.top_k, width) * weight.unsqueeze(-1)).sum(1).view(seq, batch, width)

    def _experts(self, sent: Tensor) -> Tensor:
        """The rows that come to the rank's experts, through them."""
        # Shards of an expert gather the tokens of each other.
        rows = len(sent) * (self.part.expert_tp if self.part.sequence_parallel else 1) * self.shape.imbalance
        each = max(round(rows / self.count), 1)
        received = Resized.apply(sent, each * self.count)
        order = None
        if self.part.ep > 1 and self.count > 1:  # each sender's rows come sorted, all together do not
            order = torch.empty(len(received), dtype=torch.int64, device=sent.device)
            received = torch.index_select(received, 0, order)
        inner = self._product(received.view(self.count, each, -1), self.up, "up_bias")
        done = self._product(_activated(inner, self.shape), self.down, "down_bias").view(len(received), -1)
        return done if order is None else torch.index_select(done, 0, order)

    def _product(self, x: Tensor, weight: Tensor, bias: str) -> Tensor:
        return torch.baddbmm(getattr(self, bias), x, weight) if self.shape.bias else torch.bmm(x, weight)


class RoutedPart(nn.Module):
    """Routed experts, and beside them those that every token goes to."""

    def __init__(self, shape: TransformerShape, part: TransformerPart) -> None:
        super().__init__()
        self.part = part
        self.experts = GroupedExperts(shape, part)
        self.shared = SplitFeedForward(shape, shape.shared_ffn // part.tp) if shape.shared_ffn else None

    def forward(self, x: Tensor) -> Tensor:
        """``[seq, batch, hidden]`` → the same, of the rank's own tokens."""
        routed = self.experts(x)
        if self.shared is None:
            return routed
        return routed + on_all_tokens(self.shared, x, self.part)


def on_all_tokens(layer: Callable[..., Tensor], x: Tensor, part: TransformerPart, *more: object) -> Tensor:
    """Return what a tensor-parallel layer makes of the tokens of all its ranks, this rank's own of it."""
    if not part.sequence_parallel:
        return layer(x, *more)
    gathered = Resized.apply(x, len(x) * part.tp)
    with gathered_again(gathered, x):
        done = layer(gathered, *more)
    return Resized.apply(done, len(x))


class _Gated(torch.autograd.Function):
    """A gate with its activation, one kernel each way: of two values one, and of a gradient two."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        return gate * up

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return (x.unflatten(-1, (2, -1)) * grads[0].unsqueeze(-2)).flatten(-2)


def _activated(x: Tensor, shape: TransformerShape) -> Tensor:
    if not shape.gated:
        return F.gelu(x)
    if shape.fused:
        return _Gated.apply(x)
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up
