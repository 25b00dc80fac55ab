"""Llama: RMSNorm, rotary positions, grouped-query attention and SwiGLU, without biases.

Queries, keys and values have their own layers, and heads are counted from the layers' outputs, so that tensor
parallelism may split ``q``, ``k``, ``v``, ``gate`` and ``up`` by columns and ``out`` and ``down`` by rows.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tracer.workloads.catalogue import LlamaSettings
from tracer.workloads.data import Batch, next_tokens
from tracer.workloads.models.layers import initialise, run_block, token_loss
from tracer.workloads.workload import Definition

EPSILON = 1e-5
ROTARY_BASE = 10_000.0
"""Base of the rotary angles, as in the published Llama and Llama 2."""


def rotary_angles(seq: int, head_size: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[seq, head_size]``: features i and i + head_size/2 turn together by t / base^(2i/size)."""
    frequencies = ROTARY_BASE ** (-torch.arange(0, head_size, 2).float() / head_size)
    angles = torch.outer(torch.arange(seq).float(), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turn the features of ``[batch, heads, seq, head_size]`` by their position."""
    first, second = x.chunk(2, dim=-1)
    return x * cosines.to(x.dtype) + torch.cat((-second, first), dim=-1) * sines.to(x.dtype)


class GroupedAttention(nn.Module):
    """Causal attention whose key and value heads each serve several query heads."""

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
        """``[batch, seq, width]`` → the same."""
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
        """``[batch, seq, width]`` → the same."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class LlamaBlock(nn.Module):
    """Attention and feed-forward, each added to its unnormalised input."""

    def __init__(self, settings: LlamaSettings) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(settings.width, eps=EPSILON)
        self.attention = GroupedAttention(settings)
        self.forward_norm = nn.RMSNorm(settings.width, eps=EPSILON)
        self.feed_forward = SwiGlu(settings)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """``[batch, seq, width]`` → the same."""
        x = x + self.attention(self.attention_norm(x), cosines, sines)
        return x + self.feed_forward(self.forward_norm(x))


class Llama(nn.Module):
    """Token numbers ``[batch, seq]`` → logits ``[batch, seq, vocabulary]``."""

    cosines: Tensor
    sines: Tensor

    def __init__(self, settings: LlamaSettings) -> None:
        super().__init__()
        self.checkpointing = settings.checkpointing
        self.tokens = nn.Embedding(settings.vocabulary, settings.width)
        self.blocks = nn.ModuleList(LlamaBlock(settings) for _ in range(settings.depth))
        self.norm = nn.RMSNorm(settings.width, eps=EPSILON)
        self.head = nn.Linear(settings.width, settings.vocabulary, bias=False)
        cosines, sines = rotary_angles(settings.seq, settings.width // settings.heads)
        self.register_buffer("cosines", cosines, persistent=False)
        self.register_buffer("sines", sines, persistent=False)
        initialise(self)

    def forward(self, text: Tensor) -> Tensor:
        """Predict each next token."""
        x = self.tokens(text)
        for block in self.blocks:
            x = run_block(block, self.checkpointing, x, self.cosines, self.sines)
        return self.head(self.norm(x))


def llama_batch(settings: LlamaSettings, generator: torch.Generator) -> Batch:
    """Random text with the next tokens as targets."""
    return next_tokens(settings.batch, settings.seq, settings.vocabulary, generator)


DEFINITION = Definition(Llama, llama_batch, token_loss)
