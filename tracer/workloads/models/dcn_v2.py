"""DCN-v2: cross layers over embeddings and dense features, then an MLP (Wang et al., 2021, arXiv 2008.13535).

A cross layer is x₀ · (W x + b) + x, element by element, with a full matrix W or a product of two narrow ones.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tracer.workloads.catalogue import DcnSettings
from tracer.workloads.data import Batch
from tracer.workloads.models.layers import click_loss, run_block
from tracer.workloads.models.lookups import embeddings, single_rows
from tracer.workloads.workload import Definition


class CrossLayer(nn.Module):
    """``[batch, features]`` and the first layer's input → the same size."""

    def __init__(self, features: int, rank: int) -> None:
        super().__init__()
        self.narrow = nn.Linear(features, rank, bias=False) if rank else nn.Identity()
        self.wide = nn.Linear(rank or features, features)

    def forward(self, x: Tensor, first: Tensor) -> Tensor:
        """Cross once."""
        return first * self.wide(self.narrow(x)) + x


class DcnV2(nn.Module):
    """Dense features ``[batch, dense]`` and look-ups int64 ``[tables, batch]`` → click logits ``[batch]``."""

    def __init__(self, settings: DcnSettings) -> None:
        super().__init__()
        features = settings.dense + settings.tables * settings.embedding
        self.checkpointing = settings.checkpointing
        self.tables = embeddings(settings.embedding_tables(), sparse=settings.sparse)
        self.crosses = nn.ModuleList(CrossLayer(features, settings.rank) for _ in range(settings.crosses))
        layers: list[nn.Module] = []
        for _ in range(settings.depth):
            layers += [nn.Linear(features, settings.width), nn.ReLU()]
            features = settings.width
        self.deep = nn.Sequential(*layers, nn.Linear(features, 1))

    @property
    def blocks(self) -> list[nn.Module]:
        """The cross layers and the MLP."""
        return [*self.crosses, self.deep]

    def forward(self, dense: Tensor, rows: Tensor) -> Tensor:
        """Score each sample."""
        first = torch.cat([dense, *(table(own).to(dense.dtype)
                                    for table, own in zip(self.tables, rows, strict=True))], dim=1)
        x = first
        for cross in self.crosses:
            x = run_block(cross, self.checkpointing, x, first)
        return run_block(self.deep, self.checkpointing, x).squeeze(1)


def _batch(settings: DcnSettings, generator: torch.Generator) -> Batch:
    dense = torch.randn(settings.batch, settings.dense, generator=generator)
    rows = single_rows(settings.embedding_tables(), settings.batch, generator)
    return Batch((dense, rows), torch.randint(2, (settings.batch,), generator=generator).float())


DEFINITION = Definition(DcnV2, _batch, click_loss)
