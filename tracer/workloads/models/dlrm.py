"""DLRM: embedding tables looked up in bags, an MLP for dense features, all pairwise dot products, and a second MLP.

Look-ups follow a Zipf law over each table's rows (a few rows are hot, as in recorded click logs), with the hot rows
spread over the table. Bags differ in length from sample to sample, while a batch's look-ups add up to a fixed number,
so that shapes stay the same from step to step.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tracer.workloads.catalogue import DlrmSettings
from tracer.workloads.data import Batch
from tracer.workloads.models.layers import run_block
from tracer.workloads.workload import Definition

SPREAD = 2_654_435_761
"""A prime (Knuth's multiplicative hash): popularity rank × this, modulo the rows, is a row; no two ranks share one."""


def table_rows(settings: DlrmSettings) -> list[int]:
    """Rows of each table: the full number, then a half, a quarter and an eighth, and so on again."""
    return [settings.rows >> (table % 4) for table in range(settings.tables)]


def mlp(features: list[int]) -> nn.Sequential:
    """Linear layers with a ReLU after each but the last."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(features):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Interaction(nn.Module):
    """The dense vector, then the dot products of all pairs: ``[batch, n, d]`` → ``[batch, d + n * (n - 1) / 2]``."""

    first: Tensor
    second: Tensor

    def __init__(self, vectors: int) -> None:
        super().__init__()
        first, second = torch.tril_indices(vectors, vectors, offset=-1)
        self.register_buffer("first", first, persistent=False)
        self.register_buffer("second", second, persistent=False)

    def forward(self, vectors: Tensor) -> Tensor:
        """Vector 0 is the dense one."""
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        return torch.cat((vectors[:, 0], products[:, self.first, self.second]), dim=1)


class Dlrm(nn.Module):
    """Dense features, look-ups and bag starts → click logits ``[batch]``."""

    def __init__(self, settings: DlrmSettings) -> None:
        super().__init__()
        width, vectors = settings.width, settings.tables + 1
        self.checkpointing = settings.checkpointing
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(rows, settings.embedding, mode="sum", sparse=settings.sparse)
            for rows in table_rows(settings))
        hidden = [width] * (settings.depth - 1)
        self.bottom = mlp([settings.dense, *hidden, settings.embedding])
        self.interaction = Interaction(vectors)
        self.top = mlp([settings.embedding + vectors * (vectors - 1) // 2, *hidden, 1])
        for table in self.tables:
            nn.init.uniform_(table.weight, -table.num_embeddings**-0.5, table.num_embeddings**-0.5)

    @property
    def blocks(self) -> list[nn.Module]:
        """The two MLPs; the tables keep no activations worth recomputing."""
        return [self.bottom, self.top]

    def forward(self, dense: Tensor, rows: Tensor, starts: Tensor) -> Tensor:
        """Score each sample.

        Args:
            dense: floating point ``[batch, dense]``.
            rows: int64 ``[tables, batch * pooling]``, each table's look-ups, bag after bag.
            starts: int64 ``[tables, batch]``, where each sample's bag begins.
        """
        vectors = [run_block(self.bottom, self.checkpointing, dense)]
        vectors += [table(rows[number], starts[number]) for number, table in enumerate(self.tables)]
        dtype = vectors[0].dtype  # under autocast the MLP gives bf16 and the tables fp32
        joined = self.interaction(torch.stack([vector.to(dtype) for vector in vectors], dim=1))
        return run_block(self.top, self.checkpointing, joined).squeeze(1)


def zipf_rows(rows: int, count: int, skew: float, generator: torch.Generator) -> Tensor:
    """``count`` rows, int64; the k-th most popular row is drawn with a probability proportional to ``k ** -skew``."""
    weights = torch.arange(1, rows + 1, dtype=torch.float64) ** -skew
    steps = weights.cumsum(0)
    draws = torch.rand(count, generator=generator, dtype=torch.float64) * steps[-1]
    ranks = torch.searchsorted(steps, draws, right=True).clamp_(max=rows - 1)
    return ranks * SPREAD % rows


def bag_starts(batch: int, count: int, generator: torch.Generator) -> Tensor:
    """``count`` look-ups dealt to the samples at random: where each sample's bag begins, int64 ``[batch]``."""
    samples = torch.randint(batch, (count,), generator=generator)
    lengths = samples.new_zeros(batch).scatter_add(0, samples, torch.ones_like(samples))
    return lengths.cumsum(0) - lengths


def _batch(settings: DlrmSettings, generator: torch.Generator) -> Batch:
    count = settings.batch * settings.pooling
    dense = torch.randn(settings.batch, settings.dense, generator=generator)
    rows = torch.stack([zipf_rows(size, count, settings.skew, generator) for size in table_rows(settings)])
    starts = torch.stack([bag_starts(settings.batch, count, generator) for _ in range(settings.tables)])
    clicks = torch.randint(2, (settings.batch,), generator=generator).float()
    return Batch((dense, rows, starts), clicks)


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits.float(), targets)


DEFINITION = Definition(Dlrm, _batch, _loss)
