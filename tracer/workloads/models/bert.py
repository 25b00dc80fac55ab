"""BERT: a post-norm encoder that predicts masked tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tracer.workloads.catalogue import BertSettings
from tracer.workloads.data import Batch, tokens
from tracer.workloads.models.layers import FeedForward, SelfAttention, initialise, run_block, token_loss
from tracer.workloads.workload import Definition

EPSILON = 1e-12
"""Epsilon of every layer norm, as in the published model."""
SEGMENTS = 2
MASK_TOKEN = 0
IGNORED = -100
"""Target of a token that is not scored (what ``cross_entropy`` leaves out)."""


class BertBlock(nn.Module):
    """Attention and feed-forward, each normalised after its input was added."""

    def __init__(self, settings: BertSettings) -> None:
        super().__init__()
        width = settings.width
        self.attention = SelfAttention(width, settings.heads, settings.dropout, causal=False)
        self.attention_norm = nn.LayerNorm(width, eps=EPSILON)
        self.feed_forward = FeedForward(width)
        self.forward_norm = nn.LayerNorm(width, eps=EPSILON)
        self.dropout = nn.Dropout(settings.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, seq, width]`` → the same."""
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
        self.norm = nn.LayerNorm(width, eps=EPSILON)
        self.dropout = nn.Dropout(settings.dropout)
        self.blocks = nn.ModuleList(BertBlock(settings) for _ in range(settings.depth))
        self.head = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width, eps=EPSILON))
        self.head_bias = nn.Parameter(torch.zeros(settings.vocabulary))
        initialise(self)

    def forward(self, text: Tensor, segments: Tensor) -> Tensor:
        """Predict every token; the loss looks at the masked ones."""
        places = torch.arange(text.shape[1], device=text.device)
        x = self.dropout(self.norm(self.tokens(text) + self.positions(places) + self.segments(segments)))
        for block in self.blocks:
            x = run_block(block, self.checkpointing, x)
        return F.linear(self.head(x), self.tokens.weight, self.head_bias)


def _batch(settings: BertSettings, generator: torch.Generator) -> Batch:
    shape = (settings.batch, settings.seq)
    text = tokens(*shape, settings.vocabulary, generator)
    masked = torch.rand(shape, generator=generator) < settings.masked
    masked[:, 0] = True  # so that there is always something to score
    segments = (torch.arange(settings.seq) >= settings.seq // 2).long().expand(shape).contiguous()
    return Batch((text.masked_fill(masked, MASK_TOKEN), segments), text.masked_fill(~masked, IGNORED))


DEFINITION = Definition(Bert, _batch, token_loss)
