"""DLRM: embedding tables looked up in bags, an MLP for dense features, all pairwise dot products, and a second MLP.

Look-ups follow a Zipf law over each table's rows (a few rows are hot, as in recorded click logs), with the hot rows
spread over the table. Bags differ in length from sample to sample, while a batch's look-ups add up to a fixed number,
so that shapes stay the same from step to step.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from tracer.workloads.catalogue import DlrmSettings
from tracer.workloads.data import Batch
from tracer.workloads.models.layers import click_loss, run_block
from tracer.workloads.models.lookups import BatchedTables, PlainTables, bag_starts, sizes_of, zipf_rows
from tracer.workloads.workload import Definition


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
    """Dense features, look-ups and bag starts → click logits ``[batch]``.

    Attributes:
        tables: gives each table's vectors; another module of the same interface may take its place.
        projections: of tables with fewer columns, to as many as the dense vector has.
    """

    def __init__(self, settings: DlrmSettings) -> None:
        super().__init__()
        tables, width = settings.embedding_tables(), settings.width
        vectors = len(tables) + 1
        self.checkpointing = settings.checkpointing
        kind = BatchedTables if settings.batched else PlainTables
        self.tables: nn.Module = kind(tables, settings.batch, sparse=settings.sparse)
        hidden = [width] * (settings.depth - 1)
        self.projections = nn.ModuleDict({
            str(number): nn.Linear(table.columns, settings.embedding, bias=False)
            for number, table in enumerate(tables) if table.columns != settings.embedding})
        self.bottom = mlp([settings.dense, *hidden, settings.embedding])
        self.interaction = Interaction(vectors)
        self.top = mlp([settings.embedding + vectors * (vectors - 1) // 2, *hidden, 1])

    @property
    def blocks(self) -> list[nn.Module]:
        """The two MLPs; the tables keep no activations worth recomputing."""
        return [self.bottom, self.top]

    def forward(self, dense: Tensor, rows: Tensor, starts: Tensor) -> Tensor:
        """Score each sample.

        Args:
            dense: floating point ``[batch, dense]``.
            rows: int64, each table's look-ups, bag after bag: ``[tables, batch * pooling]``, or flat where tables
                differ in bag length.
            starts: int64 ``[tables, batch]``, where each sample's bag begins.
        """
        vectors = [run_block(self.bottom, self.checkpointing, dense)]
        dtype = vectors[0].dtype  # under autocast the MLP gives bf16 and the tables fp32
        for table, vector in enumerate(self.tables(rows, starts)):
            found = vector.to(dtype)
            if str(table) in self.projections:
                found = self.projections[str(table)](found)
            vectors.append(found)
        joined = self.interaction(torch.stack(vectors, dim=1))
        return run_block(self.top, self.checkpointing, joined).squeeze(1)


def _batch(settings: DlrmSettings, generator: torch.Generator) -> Batch:
    dense = torch.randn(settings.batch, settings.dense, generator=generator)
    tables = settings.embedding_tables()
    counts = sizes_of(tables, settings.batch)
    drawn = [zipf_rows(table.rows, count, table.law_skew(), generator)
             for table, count in zip(tables, counts, strict=True)]
    rows = torch.stack(drawn) if len(set(counts)) == 1 else torch.cat(drawn)
    starts = torch.stack([bag_starts(settings.batch, count, generator) for count in counts])
    clicks = torch.randint(2, (settings.batch,), generator=generator).float()
    return Batch((dense, rows, starts), clicks)


DEFINITION = Definition(Dlrm, _batch, click_loss)
