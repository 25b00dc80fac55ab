"""DeepFM: a factorisation machine and an MLP over the same embeddings (Guo et al., 2017, arXiv 1703.04247).

The machine adds a weight for every feature and the products of all pairs of their vectors, as half of (sum² − sum of
squares); dense features go into both parts through a linear layer.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tracer.workloads.catalogue import DeepfmSettings
from tracer.workloads.data import Batch
from tracer.workloads.models.layers import click_loss, run_block
from tracer.workloads.models.lookups import embeddings, single_rows
from tracer.workloads.workload import Definition


class Deepfm(nn.Module):
    """Dense features ``[batch, dense]`` and look-ups int64 ``[tables, batch]`` → click logits ``[batch]``."""

    def __init__(self, settings: DeepfmSettings) -> None:
        super().__init__()
        tables, count = settings.embedding_tables(), settings.tables
        self.checkpointing = settings.checkpointing
        self.tables = embeddings(tables[:count], sparse=settings.sparse)
        self.weights = embeddings(tables[count:], sparse=settings.sparse)
        self.linear = nn.Linear(settings.dense, 1)
        self.dense = nn.Linear(settings.dense, settings.embedding)
        layers: list[nn.Module] = []
        inputs = (count + 1) * settings.embedding
        for _ in range(settings.depth):
            layers += [nn.Linear(inputs, settings.width), nn.ReLU(), nn.Dropout(settings.dropout)]
            inputs = settings.width
        self.deep = nn.Sequential(*layers, nn.Linear(inputs, 1))

    @property
    def blocks(self) -> list[nn.Module]:
        """The MLP."""
        return [self.deep]

    def forward(self, dense: Tensor, rows: Tensor) -> Tensor:
        """Score each sample."""
        first = self.linear(dense)
        features = self.dense(dense)
        vectors = torch.stack([features, *(table(own).to(features.dtype)
                                           for table, own in zip(self.tables, rows, strict=True))], dim=1)
        weights = torch.cat([table(own) for table, own in zip(self.weights, rows, strict=True)], dim=1)
        pairs = 0.5 * (vectors.sum(1).square() - vectors.square().sum(1)).sum(1)
        deep = run_block(self.deep, self.checkpointing, vectors.flatten(1))
        return (first + deep).squeeze(1) + weights.sum(1) + pairs


def _batch(settings: DeepfmSettings, generator: torch.Generator) -> Batch:
    dense = torch.randn(settings.batch, settings.dense, generator=generator)
    rows = single_rows(settings.embedding_tables()[:settings.tables], settings.batch, generator)
    return Batch((dense, rows), torch.randint(2, (settings.batch,), generator=generator).float())


DEFINITION = Definition(Deepfm, _batch, click_loss)
