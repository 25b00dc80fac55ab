"""An LSTM language model: embedding, stacked ``nn.LSTM`` layers (one cuDNN call on a GPU), linear head.

``torch.compile`` does not take ``nn.LSTM``. Met in the middle of a function it gives up on all of it; put aside in
one, as here, the embedding before and the head after it are compiled, and the LSTM runs as it is.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tracer.workloads.catalogue import LstmSettings
from tracer.workloads.data import Batch, next_tokens
from tracer.workloads.models.layers import run_block, token_loss
from tracer.workloads.workload import Definition


class Lstm(nn.Module):
    """Token numbers ``[batch, seq]`` → logits ``[batch, seq, vocabulary]``; each sample starts from a zero state."""

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
        """The stack of layers, which is one module."""
        return [self.layers]

    def forward(self, text: Tensor) -> Tensor:
        """Predict each next token."""
        return self.head(self.dropout(self.recur(self.dropout(self.tokens(text)))))

    def _recur(self, x: Tensor) -> Tensor:
        output: Tensor = run_block(self.layers, self.checkpointing, x)[0]
        return output


def _batch(settings: LstmSettings, generator: torch.Generator) -> Batch:
    return next_tokens(settings.batch, settings.seq, settings.vocabulary, generator)


DEFINITION = Definition(Lstm, _batch, token_loss)
