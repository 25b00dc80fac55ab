"""Language models: BERT, GPT-2, Llama, a mixture of experts, and stacked LSTM layers.

Llama's queries, keys and values have separate layers, and heads are counted from the layers' outputs. So tensor
parallelism may split ``q``, ``k``, ``v``, ``gate`` and ``up`` by columns, and ``out`` and ``down`` by rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tracer.workloads.catalogue import BertSettings, Gpt2Settings, LlamaSettings, LstmSettings, MoeSettings
from tracer.workloads.models.parts import (
    Batch,
    Definition,
    FeedForward,
    PreNormBlock,
    SelfAttention,
    initialise,
    next_tokens,
    run_block,
    token_loss,
    tokens,
)

BERT_EPSILON = 1e-12
"""Epsilon of BERT's layer norms, as published."""
SEGMENTS = 2  # BERT's: sentence A and B
MASK_TOKEN = 0  # any token: the text is random
IGNORED = -100
"""Target of a token without a loss (``cross_entropy`` ignores it)."""
EPSILON = 1e-5  # of RMS norms, as in the published Llama 2
ROTARY_BASE = 10_000.0
"""Base of the rotary angles, as in the published Llama and Llama 2."""
BALANCE_WEIGHT = 0.01
"""Weight of the load-balancing loss, as in the Switch Transformer."""


class BertBlock(nn.Module):
    """Attention and feed-forward, each normalised after its input was added."""

    def __init__(self, settings: BertSettings) -> None:
        super().__init__()
        width = settings.width
        self.attention = SelfAttention(width, settings.heads, settings.dropout, causal=False)
        self.attention_norm = nn.LayerNorm(width, eps=BERT_EPSILON)
        self.feed_forward = FeedForward(width)
        self.forward_norm = nn.LayerNorm(width, eps=BERT_EPSILON)
        self.dropout = nn.Dropout(settings.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, seq, width]`` to the same shape."""
        x = self.attention_norm(x + self.dropout(self.attention(x)))
        return self.forward_norm(x + self.dropout(self.feed_forward(x)))


class Bert(nn.Module):
    """Token and segment numbers ``[batch, seq]`` → logits ``[batch, seq, vocabulary]``."""

    def __init__(self, settings: BertSettings) -> None:
        super().__init__()
        width = settings.width
        self.checkpointing = settings.checkpointing
        self.tokens = nn.Embedding(settings.vocabulary, width)
        self.positions = nn.Embedding(settings.positions, width)
        self.segments = nn.Embedding(SEGMENTS, width)
        self.norm = nn.LayerNorm(width, eps=BERT_EPSILON)
        self.dropout = nn.Dropout(settings.dropout)
        self.blocks = nn.ModuleList(BertBlock(settings) for _ in range(settings.depth))
        self.head = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width, eps=BERT_EPSILON))
        self.head_bias = nn.Parameter(torch.zeros(settings.vocabulary))
        initialise(self)

    def forward(self, text: Tensor, segments: Tensor) -> Tensor:
        """Return the logits of every token, ``[batch, seq, vocabulary]``; the loss uses the masked ones."""
        places = torch.arange(text.shape[1], device=text.device)
        x = self.dropout(self.norm(self.tokens(text) + self.positions(places) + self.segments(segments)))
        for block in self.blocks:
            x = run_block(block, self.checkpointing, x)
        return F.linear(self.head(x), self.tokens.weight, self.head_bias)


def _masked_batch(settings: BertSettings, generator: torch.Generator) -> Batch:
    shape = (settings.batch, settings.seq)
    text = tokens(*shape, settings.vocabulary, generator)
    masked = torch.rand(shape, generator=generator) < settings.masked
    masked[:, 0] = True  # at least one token per sample has a loss
    segments = (torch.arange(settings.seq) >= settings.seq // 2).long().expand(shape).contiguous()
    return Batch((text.masked_fill(masked, MASK_TOKEN), segments), text.masked_fill(~masked, IGNORED))


class Gpt2(nn.Module):
    """Token numbers ``[batch, seq]`` → logits ``[batch, seq, vocabulary]``."""

    def __init__(self, settings: Gpt2Settings) -> None:
        super().__init__()
        width = settings.width
        self.checkpointing = settings.checkpointing
        self.tokens = nn.Embedding(settings.vocabulary, width)
        self.positions = nn.Embedding(settings.positions, width)
        self.dropout = nn.Dropout(settings.dropout)
        self.blocks = nn.ModuleList(
            PreNormBlock(width, settings.heads, settings.dropout, causal=True, epsilon=1e-5, approximate="tanh")
            for _ in range(settings.depth))
        self.norm = nn.LayerNorm(width)
        initialise(self)

    def forward(self, text: Tensor) -> Tensor:
        """Return the logits of each next token, ``[batch, seq, vocabulary]``."""
        x = self.dropout(self.tokens(text) + self.positions(torch.arange(text.shape[1], device=text.device)))
        for block in self.blocks:
            x = run_block(block, self.checkpointing, x)
        return F.linear(self.norm(x), self.tokens.weight)


def rotary_angles(seq: int, head_size: int) -> tuple[Tensor, Tensor]:
    """Return cosines, sines ``[seq, head_size]``: features i and i + head_size/2 turn by t / base^(2i/size)."""
    frequencies = ROTARY_BASE ** (-torch.arange(0, head_size, 2).float() / head_size)
    angles = torch.outer(torch.arange(seq).float(), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turn the features of ``[batch, heads, seq, head_size]`` by their position."""
    first, second = x.chunk(2, dim=-1)
    return x * cosines.to(x.dtype) + torch.cat((-second, first), dim=-1) * sines.to(x.dtype)


class GroupedAttention(nn.Module):
    """Causal attention in which each key and value head serves several query heads."""

    def __init__(self, settings: LlamaSettings) -> None:
        super().__init__()
        self.head_size = settings.width // settings.heads
        self.grouped = settings.heads != settings.kv_heads
        kv_width = settings.kv_heads * self.head_size
        self.q = nn.Linear(settings.width, settings.width, bias=False)
        self.k = nn.Linear(settings.width, kv_width, bias=False)
        self.v = nn.Linear(settings.width, kv_width, bias=False)
        self.out = nn.Linear(settings.width, settings.width, bias=False)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """Map ``[batch, seq, width]`` to the same shape."""
        q, k, v = (layer(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(
            rotate(q, cosines, sines), rotate(k, cosines, sines), v, is_causal=True, enable_gqa=self.grouped)
        return self.out(attended.transpose(1, 2).flatten(2))


class SwiGlu(nn.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, settings: LlamaSettings) -> None:
        super().__init__()
        self.gate = nn.Linear(settings.width, settings.hidden, bias=False)
        self.up = nn.Linear(settings.width, settings.hidden, bias=False)
        self.down = nn.Linear(settings.hidden, settings.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, seq, width]`` to the same shape."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class LlamaBlock(nn.Module):
    """Attention and feed-forward, each added to its unnormalised input."""

    def __init__(self, settings: LlamaSettings, feed_forward: Callable[[Any], nn.Module] = SwiGlu) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(settings.width, eps=EPSILON)
        self.attention = GroupedAttention(settings)
        self.forward_norm = nn.RMSNorm(settings.width, eps=EPSILON)
        self.feed_forward = feed_forward(settings)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """Map ``[batch, seq, width]`` to the same shape."""
        x = x + self.attention(self.attention_norm(x), cosines, sines)
        return x + self.feed_forward(self.forward_norm(x))


class Llama(nn.Module):
    """Token numbers ``[batch, seq]`` → logits ``[batch, seq, vocabulary]``."""

    cosines: Tensor
    sines: Tensor

    def __init__(self, settings: LlamaSettings, block: Callable[[Any], nn.Module] = LlamaBlock) -> None:
        super().__init__()
        self.checkpointing = settings.checkpointing
        self.tokens = nn.Embedding(settings.vocabulary, settings.width)
        self.blocks = nn.ModuleList(block(settings) for _ in range(settings.depth))
        self.norm = nn.RMSNorm(settings.width, eps=EPSILON)
        self.head = nn.Linear(settings.width, settings.vocabulary, bias=False)
        cosines, sines = rotary_angles(settings.seq, settings.width // settings.heads)
        self.register_buffer("cosines", cosines, persistent=False)
        self.register_buffer("sines", sines, persistent=False)
        initialise(self)

    def forward(self, text: Tensor) -> Tensor:
        """Return the logits of each next token, ``[batch, seq, vocabulary]``."""
        x = self.tokens(text)
        for block in self.blocks:
            x = run_block(block, self.checkpointing, x, self.cosines, self.sines)
        return self.head(self.norm(x))


class Experts(nn.Module):
    """The SwiGLU layers of all experts at once: ``[experts, places, width]`` → the same shape."""

    def __init__(self, settings: MoeSettings) -> None:
        super().__init__()
        inwards = (settings.experts, settings.width, settings.hidden)
        self.gate = nn.Parameter(torch.empty(inwards))
        self.up = nn.Parameter(torch.empty(inwards))
        self.down = nn.Parameter(torch.empty(settings.experts, settings.hidden, settings.width))
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Apply each expert to its own places."""
        return torch.bmm(F.silu(torch.bmm(x, self.gate)) * torch.bmm(x, self.up), self.down)


class RoutedFeedForward(nn.Module):
    """Send each token to ``top_k`` experts of fixed capacity, and add their outputs with the router's weights.

    Routing depends on values; shapes and Python control flow do not. Every expert has ``capacity`` places for the
    tokens of a micro-batch. A token's place is its rank among the choices of that expert (a running count). Choices
    beyond the capacity go to one spare row that is discarded: those tokens pass the block by its residual only. All
    experts then run as one batched product. No Python control flow reads a tensor, so the step compiles to one graph,
    never waits for the device and can be traced by shapes. The price is work on empty places, as in GShard and Switch.
    """

    def __init__(self, settings: MoeSettings) -> None:
        super().__init__()
        self.experts_count = settings.experts
        self.top_k = settings.top_k
        self.capacity = settings.capacity
        self.router = nn.Linear(settings.width, settings.experts, bias=False)
        self.experts = Experts(settings)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Map ``[batch, seq, width]`` to the same; also return the load-balancing loss (1 at perfect balance)."""
        rows = x.flatten(0, 1)  # [tokens, width]
        places = math.ceil(self.capacity * rows.shape[0] * self.top_k / self.experts_count)
        shares = self.router(rows).float().softmax(dim=-1)  # [tokens, experts]
        weights, chosen = shares.topk(self.top_k, dim=-1)  # [tokens, top_k]
        weights = weights / weights.sum(dim=-1, keepdim=True)

        choices = F.one_hot(chosen.flatten(), self.experts_count)  # [tokens * top_k, experts]
        rank = ((choices.cumsum(dim=0) - 1) * choices).sum(dim=-1)
        spare = self.experts_count * places
        slots = torch.where(rank < places, chosen.flatten() * places + rank, spare)  # [tokens * top_k]

        sent = rows.repeat_interleave(self.top_k, dim=0, output_size=rows.shape[0] * self.top_k)
        table = rows.new_zeros(spare + 1, rows.shape[1]).index_copy(0, slots, sent)
        answers = self.experts(table[:spare].unflatten(0, (self.experts_count, places))).flatten(0, 1)
        answers = torch.cat((answers, answers.new_zeros(1, answers.shape[1])))  # the output of the spare row
        received = answers.index_select(0, slots).unflatten(0, (-1, self.top_k))  # [tokens, top_k, width]
        mixed = (received * weights.to(received.dtype).unsqueeze(-1)).sum(dim=1)

        load = choices.float().mean(dim=0)  # share of choices of each expert
        balance = self.experts_count * (load * shares.mean(dim=0)).sum()
        return mixed.view_as(x), balance


class MoeBlock(LlamaBlock):
    """Attention and routed experts, each added to its unnormalised input."""

    def __init__(self, settings: MoeSettings) -> None:
        super().__init__(settings, RoutedFeedForward)

    def forward(  # type: ignore[override]
        self, x: Tensor, cosines: Tensor, sines: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Map ``[batch, seq, width]`` to the same shape; return the block's load-balancing loss too."""
        x = x + self.attention(self.attention_norm(x), cosines, sines)
        mixed, balance = self.feed_forward(self.forward_norm(x))
        return x + mixed, balance


class Moe(Llama):
    """Token numbers ``[batch, seq]`` → logits ``[batch, seq, vocabulary]`` and the blocks' mean balance loss."""

    def __init__(self, settings: MoeSettings) -> None:
        super().__init__(settings, MoeBlock)

    def forward(self, text: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Return the logits of each next token, and the blocks' mean balance loss."""
        x = self.tokens(text)
        balances = []
        for block in self.blocks:
            x, balance = run_block(block, self.checkpointing, x, self.cosines, self.sines)
            balances.append(balance)
        return self.head(self.norm(x)), torch.stack(balances).mean()


def _balanced_loss(output: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    logits, balance = output
    return token_loss(logits, targets) + BALANCE_WEIGHT * balance


class Lstm(nn.Module):
    """Token numbers ``[batch, seq]`` → logits ``[batch, seq, vocabulary]``; each sample starts from a zero state.

    ``torch.compile`` cannot compile ``nn.LSTM``: inside a function, it stops the compilation of all of it. In a module
    of its own, as here, the LSTM runs eagerly, and the embedding before and the head after it are compiled.
    """

    def __init__(self, settings: LstmSettings) -> None:
        super().__init__()
        self.checkpointing = settings.checkpointing
        self.tokens = nn.Embedding(settings.vocabulary, settings.width)
        self.dropout = nn.Dropout(settings.dropout)
        between = settings.dropout if settings.depth > 1 else 0.0  # a single layer has nothing between, and warns
        self.layers = nn.LSTM(settings.width, settings.width, settings.depth, dropout=between, batch_first=True)
        self.head = nn.Linear(settings.width, settings.vocabulary)
        self.recur = torch.compiler.disable(self._recur) if settings.compile else self._recur
        nn.init.normal_(self.tokens.weight, std=0.1)

    @property
    def blocks(self) -> list[nn.Module]:
        """Return the stack of layers, one module."""
        return [self.layers]

    def forward(self, text: Tensor) -> Tensor:
        """Return the logits of each next token, ``[batch, seq, vocabulary]``."""
        return self.head(self.dropout(self.recur(self.dropout(self.tokens(text)))))

    def _recur(self, x: Tensor) -> Tensor:
        output: Tensor = run_block(self.layers, self.checkpointing, x)[0]
        return output


def _batch(settings: Gpt2Settings | LlamaSettings | LstmSettings, generator: torch.Generator) -> Batch:
    """Return random text with the next tokens as targets."""
    return next_tokens(settings.batch, settings.seq, settings.vocabulary, generator)


DEFINITIONS = {
    "bert": Definition(Bert, _masked_batch, token_loss), "gpt2": Definition(Gpt2, _batch, token_loss),
    "llama": Definition(Llama, _batch, token_loss), "moe": Definition(Moe, _batch, _balanced_loss),
    "lstm": Definition(Lstm, _batch, token_loss)}
