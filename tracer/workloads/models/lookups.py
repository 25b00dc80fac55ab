"""Embedding tables of recommendation models, plain or batched as in FBGEMM, and their synthetic look-ups.

Both classes take all look-ups of a batch and return each table's vectors. ``PlainTables`` runs one operation for each
table, ``BatchedTables`` one for all tables of equal columns. These lie one after another in one weight: rows are
numbered consecutively, and the bags of one table follow those of the previous one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tracer.lookup_data.tables import EmbeddingTable

SPREAD = 2_654_435_761
"""A prime (Knuth's multiplicative hash): popularity rank × this, modulo the rows, is a row; no two ranks share one."""


class PlainTables(nn.ModuleList):
    """One ``nn.EmbeddingBag`` for each table."""

    def __init__(self, tables: Sequence[EmbeddingTable], batch: int, *, sparse: bool) -> None:
        super().__init__(nn.EmbeddingBag(table.rows, table.columns, mode="sum", sparse=sparse) for table in tables)
        self.sizes = sizes_of(tables, batch)
        for part in self:
            initialise_rows(part.weight, part.num_embeddings)

    def forward(self, rows: Tensor, starts: Tensor) -> list[Tensor]:
        """Return each table's vectors, ``[batch, columns]``; see ``Dlrm.forward``."""
        parts = rows if rows.dim() == 2 else rows.split(self.sizes)
        return [table(parts[number], starts[number]) for number, table in enumerate(self)]


class BatchedTables(nn.ModuleList):
    """One ``nn.EmbeddingBag`` for all tables of equal columns."""

    def __init__(self, tables: Sequence[EmbeddingTable], batch: int, *, sparse: bool) -> None:
        super().__init__()
        self.sizes = sizes_of(tables, batch)
        self.groups = by_columns([table.columns for table in tables])
        for group in self.groups:
            own = [tables[number] for number in group]
            self.append(nn.EmbeddingBag(sum(t.rows for t in own), own[0].columns, mode="sum", sparse=sparse))
            for part, table in zip(self[-1].weight.split([t.rows for t in own]), own, strict=True):
                initialise_rows(part, table.rows)
        self.bases = {number: sum(tables[other].rows for other in group[:place])
                      for group in self.groups for place, number in enumerate(group)}

    def forward(self, rows: Tensor, starts: Tensor) -> list[Tensor]:
        """Return each table's vectors, ``[batch, columns]``; see ``Dlrm.forward``."""
        parts = rows.flatten().split(self.sizes)
        found: dict[int, Tensor] = {}
        for group, table in zip(self.groups, self, strict=True):
            together = torch.cat([parts[number] + self.bases[number] for number in group])
            before = [sum(self.sizes[other] for other in group[:place]) for place in range(len(group))]
            begins = torch.cat([starts[number] + before[place] for place, number in enumerate(group)])
            vectors = table(together, begins).unflatten(0, (len(group), starts.shape[1]))
            found.update(zip(group, vectors.unbind(), strict=True))
        return [found[number] for number in range(len(self.sizes))]


def sizes_of(tables: Sequence[EmbeddingTable], batch: int) -> list[int]:
    """Return the number of a batch's look-ups in each table."""
    return [round(table.lookups(batch)) for table in tables]


def by_columns(columns: Sequence[int]) -> list[list[int]]:
    """Return the indices of equal columns in groups, widest first."""
    return [[number for number, own in enumerate(columns) if own == each]
            for each in sorted(set(columns), reverse=True)]


def initialise_rows(weight: Tensor, rows: int) -> None:
    """Draw a table's weights uniformly within ±1/√rows, the initialisation of DLRM."""
    with torch.no_grad():
        weight.uniform_(-rows**-0.5, rows**-0.5)


def zipf_rows(rows: int, count: int, skew: float, generator: torch.Generator) -> Tensor:
    """Draw ``count`` rows, int64; the k-th most popular has a probability proportional to ``k ** -skew``."""
    weights = torch.arange(1, rows + 1, dtype=torch.float64) ** -skew
    steps = weights.cumsum(0)
    draws = torch.rand(count, generator=generator, dtype=torch.float64) * steps[-1]
    ranks = torch.searchsorted(steps, draws, right=True).clamp_(max=rows - 1)
    return ranks * SPREAD % rows


def bag_starts(batch: int, count: int, generator: torch.Generator) -> Tensor:
    """Deal ``count`` look-ups to samples at random; return where each sample's bag begins, int64 ``[batch]``."""
    samples = torch.randint(batch, (count,), generator=generator)
    lengths = samples.new_zeros(batch).scatter_add(0, samples, torch.ones_like(samples))
    return lengths.cumsum(0) - lengths


def single_rows(tables: Sequence[EmbeddingTable], batch: int, generator: torch.Generator) -> Tensor:
    """Draw one look-up for each sample in each table by the table's distribution, int64 ``[tables, batch]``."""
    return torch.stack([zipf_rows(table.rows, batch, table.law_skew(), generator) for table in tables])


def embeddings(tables: Sequence[EmbeddingTable], *, sparse: bool) -> nn.ModuleList:
    """Return an ``nn.Embedding`` for each table."""
    found = nn.ModuleList(nn.Embedding(table.rows, table.columns, sparse=sparse) for table in tables)
    for part, table in zip(found, tables, strict=True):
        initialise_rows(part.weight, table.rows)
    return found
