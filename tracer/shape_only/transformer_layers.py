"""Layers of one rank's share of a block: norms, feed-forward part, experts, attention, a Mamba-2 mixer.

A mixer's recurrence runs chunk by chunk (Dao and Gu, 2024, section 6) in Triton kernels, which PyTorch has no
operations for: each stands here as the matrix product, or the pass over memory, that it mostly is. What runs again in
backward, and which products run for a group of heads or for each head, is that of
``mamba_split_conv1d_scan_combined`` of the package mamba-ssm (2.2), which Megatron-Core and transformers call.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tracer.shape_only.transformer import Latent, StateSpace, TransformerPart, TransformerShape, expected_places

EPSILON = 1e-5  # any: no value is computed


class Resized(torch.autograd.Function):
    """A stand-in for a collective that changes a tensor's sizes: an empty tensor of those sizes, both ways."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *sizes: int) -> Tensor:
        """Return a tensor of the first dimensions; further ones are those of ``x``."""
        ctx.sizes = x.shape
        return x.new_empty(*sizes, *x.shape[len(sizes):])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return as many as came in."""
        return grads[0].new_empty(ctx.sizes), *[None] * len(ctx.needs_input_grad[1:])


def _packed(pack: Callable[[Tensor], Tensor | tuple[Tensor, torch.Size]]) -> AbstractContextManager[Any]:
    """Keep for backward what ``pack`` makes of each tensor: the tensor, or another one and the size that it had."""
    return torch.autograd.graph.saved_tensors_hooks(
        pack, lambda kept: kept if isinstance(kept, Tensor) else kept[0].new_empty(kept[1]))


def gathered_again(gathered: Tensor, shard: Tensor) -> AbstractContextManager[Any]:
    """Keep a rank's own part of what was gathered for backward, as Megatron-LM does, which gathers it once more there
    (Korthikanti et al., 2022, section 4.2.2)."""
    whole = gathered.untyped_storage()._cdata

    def pack(saved: Tensor) -> Tensor | tuple[Tensor, torch.Size]:
        return (shard, saved.shape) if saved.untyped_storage()._cdata == whole else saved

    return _packed(pack)


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
        if self.part.once:
            return self._once(tokens, weight).view(seq, batch, width)
        place = torch.empty(len(tokens) * self.shape.top_k, dtype=torch.int64, device=x.device)
        sent = torch.index_select(tokens, 0, place % len(tokens))
        back = torch.index_select(Resized.apply(self._experts(sent, weight), len(sent)), 0, place)
        return (back.view(len(tokens), self.shape.top_k, width) * weight.unsqueeze(-1)).sum(1).view(seq, batch, width)

    def _once(self, tokens: Tensor, weight: Tensor) -> Tensor:
        """Tokens that come once to each rank that has experts of theirs, and what these make of them.

        They are sorted by expert when they have come, and what a rank's experts make of one is added up before it goes
        back, weighted within the activation (Megatron-Core's ``flex`` dispatcher).
        """
        ranks = self.part.ep
        share = self.part.expert_tp if self.part.sequence_parallel else 1
        rows = len(tokens) * share * self.shape.imbalance
        come = round(rows * expected_places(self.shape.top_k, self.shape.experts, ranks))
        each = max(round(rows * self.shape.top_k / self.count), 1)
        received = _Placed.apply(Resized.apply(tokens, come), each * self.count)
        inner = self._product(received.view(self.count, each, -1), self.up, "up_bias")
        weighted = _Weighted.apply(_activated(inner, self.shape), weight)
        done = self._given(weighted, weight).view(len(received), -1)
        return Resized.apply(_Placed.apply(done, come), len(tokens))

    def _experts(self, sent: Tensor, weight: Tensor) -> Tensor:
        """The rows that come to the rank's experts, through them."""
        each = self.part.rows_of_expert(self.shape)
        received = Resized.apply(sent, each * self.count)
        order = None
        if self.part.ep > 1 and self.count > 1:  # each sender's rows come sorted, all together do not
            order = torch.empty(len(received), dtype=torch.int64, device=sent.device)
            received = torch.index_select(received, 0, order)
        inner = self._product(received.view(self.count, each, -1), self.up, "up_bias")
        done = self._given(_activated(inner, self.shape), weight).view(len(received), -1)
        return done if order is None else torch.index_select(done, 0, order)

    def _given(self, inner: Tensor, weight: Tensor) -> Tensor:
        """The experts' second product. A bias is added to it weighted by the router, which weights are in fp32 for:
        expert by expert, one operation after another (``TEGroupedMLP._apply_bias`` of Megatron-Core)."""
        done = torch.bmm(inner, self.down)
        if not self.shape.bias:
            return done
        share = Resized.apply(weight.reshape(-1), done.shape[0] * done.shape[1]).view(*done.shape[:2], 1).float()
        return torch.cat([done + self.down_bias * share]).to(done.dtype)

    def _product(self, x: Tensor, weight: Tensor, bias: str) -> Tensor:
        return torch.baddbmm(getattr(self, bias), x, weight) if self.shape.bias else torch.bmm(x, weight)


class _Placed(torch.autograd.Function):
    """Rows put in another order by one kernel each way: so many of them, some read several times or summed up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int) -> Tensor:
        """Return ``count`` rows."""
        ctx.rows = len(x)
        return torch.index_select(x, 0, torch.empty(count, dtype=torch.int64, device=x.device))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return as many rows as came in."""
        places = torch.empty(ctx.rows, dtype=torch.int64, device=grads[0].device)
        return torch.index_select(grads[0], 0, places), None


class _Weighted(torch.autograd.Function):
    """Rows times the router's weights, within the kernel of the activation before."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """Return the rows."""
        ctx.save_for_backward(weight)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of both."""
        return grads[0], torch.empty_like(ctx.saved_tensors[0])


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


class Attention(nn.Module):
    """Attention with a head of keys and values for one query head or several."""

    def __init__(self, shape: TransformerShape, part: TransformerPart) -> None:
        super().__init__()
        self.shape, self.part = shape, part
        self.d = shape.width_of_head
        self.heads, self.kv_heads = shape.heads // part.tp, shape.kv_heads // part.tp
        self.qkv = nn.Linear(shape.hidden, (self.heads + 2 * self.kv_heads) * self.d, shape.biased_qkv)
        self.norms = nn.ModuleList([norm_of(shape, self.d), norm_of(shape, self.d)] if shape.qk_norm else [])
        self.out = nn.Linear(self.heads * self.d, shape.hidden, shape.bias)

    def forward(self, x: Tensor, angles: Tensor | None) -> Tensor:
        """``[seq, batch, hidden]`` → the same."""
        seq, batch, _ = x.shape
        # As Megatron-LM lays them out, each group of heads beside its keys and values.
        each = self.heads // self.kv_heads
        qkv = self.qkv(x).view(seq, batch, self.kv_heads, each + 2, self.d)
        q, k, v = (t.reshape(seq, batch, -1, self.d) for t in qkv.split([each, 1, 1], dim=3))
        if self.norms:
            q, k = self.norms[0](q), self.norms[1](k)
        if angles is not None:
            q, k = (_turned(t, angles, self.shape) for t in (q, k))
        return self.out(attended(q, k, v, self.shape, self.part).reshape(seq, batch, self.heads * self.d))


class LatentAttention(nn.Module):
    """Multi-head latent attention as Megatron-Core trains it: keys and values are made whole again for every head."""

    def __init__(self, shape: TransformerShape, part: TransformerPart, sizes: Latent) -> None:
        super().__init__()
        self.shape, self.part, self.sizes = shape, part, sizes
        self.heads = shape.heads // part.tp
        width = self.heads * shape.width_of_head
        self.query_down = nn.Linear(shape.hidden, sizes.query_rank, bias=False) if sizes.query_rank else None
        self.query_norm = norm_of(shape, sizes.query_rank) if sizes.query_rank else nn.Identity()
        self.query = nn.Linear(sizes.query_rank or shape.hidden, width, bias=False)
        self.key_down = nn.Linear(shape.hidden, sizes.key_rank + sizes.rotated, bias=False)
        self.key_norm = norm_of(shape, sizes.key_rank)
        self.key = nn.Linear(sizes.key_rank, self.heads * (sizes.plain + sizes.values), bias=False)
        self.out = nn.Linear(self.heads * sizes.values, shape.hidden, shape.bias)

    def forward(self, x: Tensor, angles: Tensor | None) -> Tensor:
        """``[seq, batch, hidden]`` → the same."""
        seq, batch, _ = x.shape
        of = self.sizes
        narrow = x if self.query_down is None else self.query_norm(self.query_down(x))
        q = self.query(narrow).view(seq, batch, self.heads, -1)
        low, k_turned = self.key_down(x).split([of.key_rank, of.rotated], dim=-1)
        k_plain, v = self.key(self.key_norm(low)).view(seq, batch, self.heads, -1).split([of.plain, of.values], dim=-1)
        k_turned = k_turned.unsqueeze(2)
        if angles is not None:
            k_turned = _turned(k_turned, angles, self.shape)
            q = _turned_in_place(q, angles, self.shape, of)
        k = torch.cat((k_plain, k_turned.expand(-1, -1, self.heads, -1)), dim=-1)
        done = attended(q, k, v, self.shape, self.part)
        return self.out(done.reshape(seq, batch, self.heads * of.values))


class _InPlace(torch.autograd.Function):
    """Rotary positions of the last features of queries where they lie, one kernel each way (Megatron-Core's
    ``fused_apply_mla_rope_for_q``)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, angles: Tensor, rotated: int) -> Tensor:
        """Return the queries."""
        ctx.save_for_backward(angles)
        ctx.rotated = rotated
        q.detach()[..., -rotated:].mul_(angles)
        return q.view_as(q)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient, turned back where it lies."""
        grads[0][..., -ctx.rotated:].mul_(ctx.saved_tensors[0])
        return grads[0], None, None


def _turned_in_place(q: Tensor, angles: Tensor, shape: TransformerShape, of: Latent) -> Tensor:
    """Return queries whose last features are turned: by one kernel, or taken apart and put together again."""
    if shape.fused:
        return _InPlace.apply(q, angles, of.rotated)
    plain, turned = q.split([of.plain, of.rotated], dim=-1)
    return torch.cat((plain, _turned(turned, angles, shape)), dim=-1)


def attention_of(shape: TransformerShape, part: TransformerPart) -> nn.Module:
    """Return the attention of a block."""
    return Attention(shape, part) if shape.latent is None else LatentAttention(shape, part, shape.latent)


def attended(q: Tensor, k: Tensor, v: Tensor, shape: TransformerShape, part: TransformerPart) -> Tensor:
    """Return values by attention, all ``[seq, batch, heads, features]``."""
    own = len(k)
    if part.cp > 1:  # of a causal half, each rank of cp does 1/cp: half of the keys for each of its queries
        whole = len(q) * part.cp // 2
        if shape.window:  # of a window's, all of it
            whole = min(whole, shape.window)
        k, v = Resized.apply(k, whole), Resized.apply(v, whole)
    with _kept_apart([k, v] if part.cp > 1 else [], own):
        return _core(q, k, v, shape, part)


def _core(q: Tensor, k: Tensor, v: Tensor, shape: TransformerShape, part: TransformerPart) -> Tensor:
    if not shape.flash:
        return _plain(q, k, v, shape.dropout)
    if shape.window and part.cp == 1 and shape.window < len(q):
        return _windowed(q, k, v, shape)
    q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, dropout_p=shape.dropout, is_causal=part.cp == 1,
                                         enable_gqa=q.shape[1] != k.shape[1])
    return out.permute(2, 0, 1, 3)


def _kept_apart(gathered: list[Tensor], rows: int) -> AbstractContextManager[Any]:
    """Keep for backward what attention needs and no more: not the product that values are a slice of (attention's
    kernels take them dense, as Transformer Engine makes them), and of ``gathered`` keys and values this rank's rows."""
    shared = {t.untyped_storage()._cdata: len(t) for t in gathered}

    def pack(saved: Tensor) -> Tensor | tuple[Tensor, torch.Size]:
        memory = saved.untyped_storage()
        if memory._cdata in shared:
            return saved.new_empty(saved.numel() * rows // shared[memory._cdata]), saved.shape
        return saved.new_empty(saved.shape) if memory.nbytes() > saved.nbytes else saved

    return _packed(pack)


def _windowed(q: Tensor, k: Tensor, v: Tensor, shape: TransformerShape) -> Tensor:
    """Fused attention to the last tokens: PyTorch's functions have no window, the kernel under them has."""
    q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    out = torch.ops.aten._flash_attention_forward(
        q, k, v, None, None, q.shape[1], k.shape[1], shape.dropout, True, False, window_size_left=shape.window - 1,
        window_size_right=0)[0]
    return out.transpose(0, 1)


def _plain(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    """Products, and scale, mask and softmax in one kernel."""
    seq, batch, heads = q.shape[:3]
    if heads != k.shape[2]:
        k, v = (t.repeat_interleave(heads // t.shape[2], dim=2) for t in (k, v))
    q, k, v = (t.reshape(t.shape[0], batch * heads, t.shape[3]).transpose(0, 1) for t in (q, k, v))
    scores = torch.softmax(torch.bmm(q, k.transpose(1, 2)), dim=-1)
    scores = F.dropout(scores, dropout)
    return torch.bmm(scores, v).transpose(0, 1).reshape(seq, batch, heads, v.shape[2])


class _Turned(torch.autograd.Function):
    """Rotary positions in one kernel each way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, angles: Tensor) -> Tensor:
        ctx.save_for_backward(angles)
        return x * angles

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.saved_tensors[0], None


def _turned(x: Tensor, angles: Tensor, shape: TransformerShape) -> Tensor:
    if shape.fused:
        return _Turned.apply(x, angles)
    first, second = x.chunk(2, dim=-1)
    return x * angles + torch.cat((-second, first), dim=-1) * angles


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
            projected = Resized.apply(projected, len(x) * self.rows, x.shape[1], self.running.projected)
        done = self.scan(projected)  # named as SCAN says
        return self.out(Resized.apply(done, *x.shape[:2], self.inner) if self.rows > 1 else done)


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
