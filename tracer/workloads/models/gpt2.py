"""GPT-2: learned positions, pre-norm blocks with causal attention, and the token embedding as the head."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tracer.workloads.catalogue import Gpt2Settings
from tracer.workloads.data import Batch, next_tokens
from tracer.workloads.models.layers import PreNormBlock, initialise, run_block, token_loss
from tracer.workloads.workload import Definition


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
        """Predict each next token."""
        x = self.dropout(self.tokens(text) + self.positions(torch.arange(text.shape[1], device=text.device)))
        for block in self.blocks:
            x = run_block(block, self.checkpointing, x)
        return F.linear(self.norm(x), self.tokens.weight)


def _batch(settings: Gpt2Settings, generator: torch.Generator) -> Batch:
    return next_tokens(settings.batch, settings.seq, settings.vocabulary, generator)


DEFINITION = Definition(Gpt2, _batch, token_loss)
