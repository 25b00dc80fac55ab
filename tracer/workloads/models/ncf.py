"""NCF: users and items by the product of their vectors beside an MLP of others (NeuMF, He et al., 2017, 1708.05031).

A batch has one item in five that the user liked; the others are drawn as negatives.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tracer.workloads.catalogue import NcfSettings
from tracer.workloads.data import Batch
from tracer.workloads.models.layers import click_loss, run_block
from tracer.workloads.models.lookups import initialise_rows, zipf_rows
from tracer.workloads.workload import Definition

NEGATIVES = 4
"""Sampled for each item that was liked, as published."""


class Ncf(nn.Module):
    """Users and items, int64 ``[batch]`` each → logits ``[batch]``."""

    def __init__(self, settings: NcfSettings) -> None:
        super().__init__()
        self.checkpointing = settings.checkpointing
        self.users, self.items, self.mlp_users, self.mlp_items = (
            nn.Embedding(table.rows, table.columns, sparse=settings.sparse) for table in settings.embedding_tables())
        for part in (self.users, self.items, self.mlp_users, self.mlp_items):
            initialise_rows(part.weight, part.num_embeddings)
        layers: list[nn.Module] = []
        features = 2 * (settings.width // 2)
        for _ in range(settings.depth):
            outputs = max(features // 2, 1)
            layers += [nn.Linear(features, outputs), nn.ReLU()]
            features = outputs
        self.mlp = nn.Sequential(*layers)
        self.out = nn.Linear(settings.embedding + features, 1)

    @property
    def blocks(self) -> list[nn.Module]:
        """The MLP."""
        return [self.mlp]

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """Score each pair."""
        product = self.users(users) * self.items(items)
        pair = torch.cat([self.mlp_users(users), self.mlp_items(items)], dim=1)
        deep = run_block(self.mlp, self.checkpointing, pair)
        return self.out(torch.cat([product.to(deep.dtype), deep], dim=1)).squeeze(1)


def _batch(settings: NcfSettings, generator: torch.Generator) -> Batch:
    users, items, *_ = settings.embedding_tables()
    drawn = [zipf_rows(table.rows, settings.batch, table.skew, generator) for table in (users, items)]
    liked = torch.randint(NEGATIVES + 1, (settings.batch,), generator=generator) == 0
    return Batch((drawn[0], drawn[1]), liked.float())


DEFINITION = Definition(Ncf, _batch, click_loss)
