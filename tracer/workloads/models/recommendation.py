"""Recommendation models over embedding tables.

- DLRM: tables looked up in bags, an MLP for dense features, all pairwise dot products, and a second MLP. Look-ups
  follow a Zipf law over each table's rows (a few rows are hot, as in recorded click logs), with the hot rows spread
  over the table. Bags differ in length from sample to sample, while a batch's look-ups add up to a fixed number, so
  that shapes stay the same from step to step.
- DeepFM: a factorisation machine and an MLP over the same embeddings (Guo et al., 2017, arXiv 1703.04247).
- DCN-v2: cross layers over embeddings and dense features, then an MLP (Wang et al., 2021, arXiv 2008.13535).
- NCF: users and items, scored by the product of one pair of vectors and an MLP of another (NeuMF, He et al., 2017,
  1708.05031). One in five items of a batch was liked by its user; the others are drawn as negatives.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from tracer.workloads.catalogue import DcnSettings, DeepfmSettings, DlrmSettings, NcfSettings
from tracer.workloads.models.lookups import (
    BatchedTables,
    PlainTables,
    bag_starts,
    embeddings,
    initialise_rows,
    single_rows,
    sizes_of,
    zipf_rows,
)
from tracer.workloads.models.parts import Batch, Definition, click_loss, run_block

NEGATIVES = 4
"""Negatives drawn for each liked item, as published."""


def mlp(features: list[int]) -> nn.Sequential:
    """Return linear layers with a ReLU after each one except the last."""
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
        """Append the dot products of all pairs of vectors to vector 0, the dense one."""
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        return torch.cat((vectors[:, 0], products[:, self.first, self.second]), dim=1)


class Dlrm(nn.Module):
    """Dense features, look-ups and bag starts → click logits ``[batch]``.

    Attributes:
        tables: returns each table's vectors; another module with the same interface may replace it.
        projections: map tables with fewer columns to the width of the dense vector.
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
        """Return the two MLPs; the tables keep no activations worth recomputing."""
        return [self.bottom, self.top]

    def forward(self, dense: Tensor, rows: Tensor, starts: Tensor) -> Tensor:
        """Return the click logit of each sample, ``[batch]``.

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


def _bags_batch(settings: DlrmSettings, generator: torch.Generator) -> Batch:
    dense = torch.randn(settings.batch, settings.dense, generator=generator)
    tables = settings.embedding_tables()
    counts = sizes_of(tables, settings.batch)
    drawn = [zipf_rows(table.rows, count, table.law_skew(), generator)
             for table, count in zip(tables, counts, strict=True)]
    rows = torch.stack(drawn) if len(set(counts)) == 1 else torch.cat(drawn)
    starts = torch.stack([bag_starts(settings.batch, count, generator) for count in counts])
    clicks = torch.randint(2, (settings.batch,), generator=generator).float()
    return Batch((dense, rows, starts), clicks)


class Deepfm(nn.Module):
    """Dense features ``[batch, dense]`` and look-ups int64 ``[tables, batch]`` → click logits ``[batch]``.

    The factorisation machine adds a weight for every feature and the products of all pairs of their vectors: half of
    (sum² − sum of squares). Dense features go into both parts through a linear layer.
    """

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
        """Return the MLP."""
        return [self.deep]

    def forward(self, dense: Tensor, rows: Tensor) -> Tensor:
        """Return the click logit of each sample, ``[batch]``."""
        first = self.linear(dense)
        features = self.dense(dense)
        vectors = torch.stack([features, *(table(own).to(features.dtype)
                                           for table, own in zip(self.tables, rows, strict=True))], dim=1)
        weights = torch.cat([table(own) for table, own in zip(self.weights, rows, strict=True)], dim=1)
        pairs = 0.5 * (vectors.sum(1).square() - vectors.square().sum(1)).sum(1)
        deep = run_block(self.deep, self.checkpointing, vectors.flatten(1))
        return (first + deep).squeeze(1) + weights.sum(1) + pairs


class CrossLayer(nn.Module):
    """``[batch, features]`` and the first layer's input → the same size: x₀ · (W x + b) + x, element by element, with a
    full matrix W or a product of two narrow ones."""

    def __init__(self, features: int, rank: int) -> None:
        super().__init__()
        self.narrow = nn.Linear(features, rank, bias=False) if rank else nn.Identity()
        self.wide = nn.Linear(rank or features, features)

    def forward(self, x: Tensor, first: Tensor) -> Tensor:
        """Return ``first`` · (W ``x`` + b) + ``x``, ``[batch, features]``."""
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
        """Return the cross layers and the MLP."""
        return [*self.crosses, self.deep]

    def forward(self, dense: Tensor, rows: Tensor) -> Tensor:
        """Return the click logit of each sample, ``[batch]``."""
        first = torch.cat([dense, *(table(own).to(dense.dtype)
                                    for table, own in zip(self.tables, rows, strict=True))], dim=1)
        x = first
        for cross in self.crosses:
            x = run_block(cross, self.checkpointing, x, first)
        return run_block(self.deep, self.checkpointing, x).squeeze(1)


def _batch(settings: DcnSettings | DeepfmSettings, generator: torch.Generator) -> Batch:
    dense = torch.randn(settings.batch, settings.dense, generator=generator)
    rows = single_rows(settings.embedding_tables()[:settings.tables], settings.batch, generator)
    return Batch((dense, rows), torch.randint(2, (settings.batch,), generator=generator).float())


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
        """Return the MLP."""
        return [self.mlp]

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """Return the logit of each pair of a user and an item, ``[batch]``."""
        product = self.users(users) * self.items(items)
        pair = torch.cat([self.mlp_users(users), self.mlp_items(items)], dim=1)
        deep = run_block(self.mlp, self.checkpointing, pair)
        return self.out(torch.cat([product.to(deep.dtype), deep], dim=1)).squeeze(1)


def _pairs_batch(settings: NcfSettings, generator: torch.Generator) -> Batch:
    users, items, *_ = settings.embedding_tables()
    drawn = [zipf_rows(table.rows, settings.batch, table.skew, generator) for table in (users, items)]
    liked = torch.randint(NEGATIVES + 1, (settings.batch,), generator=generator) == 0
    return Batch((drawn[0], drawn[1]), liked.float())


DEFINITIONS = {
    "dlrm": Definition(Dlrm, _bags_batch, click_loss), "deepfm": Definition(Deepfm, _batch, click_loss),
    "dcn_v2": Definition(DcnV2, _batch, click_loss), "ncf": Definition(Ncf, _pairs_batch, click_loss)}
