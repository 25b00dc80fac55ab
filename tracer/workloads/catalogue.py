"""The settings of the workloads: their sizes, defaults, least values and presets. Imports no torch.

A step of ``default`` sizes takes under a second on one CPU thread, one of ``TINY`` sizes about 50 ms or less. ``REAL``
sizes are what people train on one H200.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from tracer.lookup_data.tables import EmbeddingTable
from tracer.workloads.places import PLAN, check_places, places_of_plan
from tracer.workloads.settings import DtypeMode, Norm, OptimizerKind, Settings, WorkloadError, mode, size

RESNET_STAGES = {14: (1, 1, 1, 1), 26: (2, 2, 2, 2), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
"""Depth of a bottleneck ResNet → blocks in each of its four stages (depth = 3 × blocks + 2)."""


@dataclass(frozen=True, kw_only=True)
class _RecommendationSettings(Settings):
    """Settings that workloads with embedding tables share; ``batch`` is large because each sample is little work."""

    batch: int = size(512, "samples in a micro-batch")
    tables: int = size(8, "embedding tables")
    rows: int = size(20_000, "rows of the largest table; every table in four has half the rows of the one before", 8)
    embedding: int = size(32, "columns of every table")
    width: int = size(256, "hidden features of the MLPs")
    depth: int = size(3, "linear layers of each MLP")
    skew: float = size(1.05, "exponent of the Zipf law that rows are looked up by; 0 is uniform", 0)
    sparse: bool = mode(False, "sparse gradients for the tables (optimizer=sgd, eager; their momentum is 0)")

    def check(self) -> None:
        """Raise ``WorkloadError`` if sparse gradients are combined with AdamW or with compilation."""
        name = self.WORKLOAD
        if self.sparse and self.optimizer is not OptimizerKind.SGD:
            raise WorkloadError(f"{name}: sparse=true does not go with optimizer={self.optimizer.value}; AdamW takes "
                                "no sparse gradients, so set sparse=false or optimizer=sgd.")
        if self.sparse and self.compile:  # seen with torch 2.13: "Cannot access storage of SparseTensorImpl"
            raise WorkloadError(f"{name}: sparse=true does not go with compile=true; torch.compile takes no sparse "
                                "gradients, so set one of them to false.")

    def table_rows(self, table: int) -> int:
        """Return a table's rows: ``rows`` halved ``table % 4`` times."""
        return self.rows >> (table % 4)

    def embedding_tables(self) -> list[EmbeddingTable]:
        """Return the tables; a sample looks up one row in each table."""
        return [EmbeddingTable(f"tables.{table}", self.table_rows(table), self.embedding, skew=self.skew,
                               pooling="none", optimizer="none") for table in range(self.tables)]


@dataclass(frozen=True, kw_only=True)
class DlrmSettings(_RecommendationSettings):
    """A recommendation model whose tables may be unequal, and spread over ranks."""

    WORKLOAD: ClassVar[str] = "dlrm"
    SUMMARY: ClassVar[str] = "recommendation: pooled embedding look-ups with Zipf skew, dot interaction, two MLPs"
    TINY: ClassVar[Mapping[str, Any]] = {
        "batch": 32, "tables": 4, "rows": 500, "embedding": 16, "pooling": 4, "width": 32, "depth": 2}
    REAL: ClassVar[Mapping[str, Any]] = {
        "batch": 8192, "tables": 26, "rows": 1_000_000, "embedding": 128, "pooling": 20, "width": 1024, "depth": 4,
        "sparse": True, "optimizer": OptimizerKind.SGD}

    pooling: int = size(10, "look-ups a sample makes in each table, on average (bags differ in length)")
    dense: int = size(13, "dense features of a sample")
    columns_halved: int = size(
        1, "numbers of columns: table t has embedding / 2^((t // 2) mod columns_halved), 4 or more", later=True)
    bags_halved: int = size(
        1, "bag lengths: table t has pooling / 2^((t // 3) mod bags_halved) look-ups, 1 or more", later=True)
    batched: bool = mode(False, "tables of equal columns in one weight, looked up by one operation (as FBGEMM does)")
    sharding: str = mode(
        "", "places of the tables under ddp: a rank, row, column or copy for each, as 0,1,row; one word for all; "
            "table deals them out in turn; the file of a plan (foretrace shard --out); empty copies all to every rank")
    pipelined: bool = mode(
        False, "with sharding, a batch's look-ups go to the tables' ranks beside the dense part of the batch before "
               "(as TorchRec's pipeline does)")

    def check(self) -> None:
        """Check the tables' places. A plan file's name is replaced by the places in it: the file may then go."""
        super().check()
        if self.sharding.lower().endswith(PLAN):
            object.__setattr__(self, "sharding", places_of_plan(self.sharding, self.embedding_tables()))
        if self.sharding:
            check_places(self.sharding, self.tables)
        if self.sharding and self.compile:
            raise WorkloadError("dlrm: sharding does not go with compile=true; set compile=false.")
        if self.pipelined and not self.sharding:
            raise WorkloadError("dlrm: pipelined=true is of look-ups that go to other ranks; set sharding too, or "
                                "leave it out.")

    def table_columns(self, table: int) -> int:
        """Return a table's columns: ``embedding`` halved ``table // 2 % columns_halved`` times, but not below 4."""
        return max(self.embedding >> (table // 2 % self.columns_halved), min(self.embedding, 4))

    def table_bag(self, table: int) -> int:
        """Return a sample's mean look-ups in a table: ``pooling`` halved ``table // 3 % bags_halved`` times."""
        return max(self.pooling >> (table // 3 % self.bags_halved), 1)

    def embedding_tables(self) -> list[EmbeddingTable]:
        """Return the tables, each with its distribution of bag lengths. Look-ups are dealt to samples at random, so
        that a batch's longest bag is about four standard deviations of a Poisson law above the mean."""
        return [EmbeddingTable(
            f"tables.{table}", self.table_rows(table), self.table_columns(table), skew=self.skew, optimizer="none",
            bag=float(self.table_bag(table)),
            longest_bag=round(self.table_bag(table) + 4 * self.table_bag(table) ** 0.5))
            for table in range(self.tables)]


@dataclass(frozen=True, kw_only=True)
class DeepfmSettings(_RecommendationSettings):
    """A factorisation machine and an MLP over the same embeddings, one look-up a sample in each table."""

    WORKLOAD: ClassVar[str] = "deepfm"
    SUMMARY: ClassVar[str] = "recommendation: factorisation machine beside an MLP over shared embeddings, dropout"
    TINY: ClassVar[Mapping[str, Any]] = {
        "batch": 32, "tables": 4, "rows": 500, "embedding": 8, "width": 32, "depth": 2}
    REAL: ClassVar[Mapping[str, Any]] = {
        "batch": 8192, "tables": 26, "rows": 4_000_000, "embedding": 16, "width": 400, "depth": 3, "sparse": True,
        "optimizer": OptimizerKind.SGD}

    dense: int = size(13, "dense features of a sample")
    dropout: float = mode(0.1, "dropout probability of the MLP", 0)

    def check(self) -> None:
        """Raise ``WorkloadError`` unless the dropout is a probability below 1."""
        super().check()
        _probability(self, self.dropout)

    def embedding_tables(self) -> list[EmbeddingTable]:
        """Return two tables for each feature: one of vectors, one of single weights."""
        vectors = super().embedding_tables()
        return vectors + [replace(table, name=f"weights.{i}", columns=1) for i, table in enumerate(vectors)]


@dataclass(frozen=True, kw_only=True)
class DcnSettings(_RecommendationSettings):
    """A deep and cross network of the second version: full-matrix crosses, then an MLP."""

    WORKLOAD: ClassVar[str] = "dcn_v2"
    SUMMARY: ClassVar[str] = "recommendation: cross layers of full or low rank over embeddings, then an MLP"
    TINY: ClassVar[Mapping[str, Any]] = {
        "batch": 32, "tables": 4, "rows": 500, "embedding": 8, "width": 32, "depth": 2, "crosses": 2}
    REAL: ClassVar[Mapping[str, Any]] = {
        "batch": 8192, "tables": 26, "rows": 1_000_000, "embedding": 128, "width": 1024, "depth": 4, "rank": 512,
        "sparse": True, "optimizer": OptimizerKind.SGD}

    dense: int = size(13, "dense features of a sample")
    crosses: int = size(3, "cross layers")
    rank: int = size(0, "rank of the crosses' matrices; 0: full", 0)


@dataclass(frozen=True, kw_only=True)
class NcfSettings(_RecommendationSettings):
    """Neural collaborative filtering (NeuMF): users and items, each with a vector for a product and one for an MLP."""

    WORKLOAD: ClassVar[str] = "ncf"
    SUMMARY: ClassVar[str] = "recommendation: neural collaborative filtering (NeuMF) of users and items"
    TINY: ClassVar[Mapping[str, Any]] = {
        "batch": 32, "rows": 500, "items": 200, "embedding": 8, "width": 32, "depth": 2}
    REAL: ClassVar[Mapping[str, Any]] = {
        "batch": 65_536, "rows": 138_493, "items": 26_744, "embedding": 64, "width": 256, "depth": 4}

    tables: int = size(4, "embedding tables: a product's and an MLP's of users and of items; no other number", 4)
    rows: int = size(20_000, "users", 8)
    items: int = size(5_000, "items", 8)
    embedding: int = size(32, "columns of the product's tables; the MLP's have half the width")

    def check(self) -> None:
        """Raise ``WorkloadError`` unless there are four tables and the MLP's width is even."""
        super().check()
        if self.tables != 4:
            raise WorkloadError(f"ncf: tables={self.tables} is not possible; users and items have two each, so leave "
                                "it at 4.")
        if self.width % 2:
            raise WorkloadError(f"ncf: width={self.width} is odd, and half of it is a user's; choose {self.width + 1}.")

    def embedding_tables(self) -> list[EmbeddingTable]:
        """Return the four tables: users are drawn uniformly, items by popularity."""
        sizes = [("users", self.rows, self.embedding, 0.0), ("items", self.items, self.embedding, self.skew),
                 ("mlp_users", self.rows, self.width // 2, 0.0), ("mlp_items", self.items, self.width // 2, self.skew)]
        return [EmbeddingTable(name, rows, columns, skew=skew, pooling="none", optimizer="none")
                for name, rows, columns, skew in sizes]


@dataclass(frozen=True, kw_only=True)
class ResnetSettings(Settings):
    """A bottleneck ResNet (stride in the 3×3 convolution)."""

    WORKLOAD: ClassVar[str] = "resnet50"
    SUMMARY: ClassVar[str] = "image classification: bottleneck ResNet with batch norm"
    TINY: ClassVar[Mapping[str, Any]] = {"batch": 2, "resolution": 32, "width": 8, "depth": 14, "classes": 10}
    REAL: ClassVar[Mapping[str, Any]] = {
        "batch": 256, "resolution": 224, "dtype": DtypeMode.BF16_AUTOCAST, "channels_last": True,
        "optimizer": OptimizerKind.SGD}

    batch: int = size(2, "images in a micro-batch")
    resolution: int = size(96, "height and width of an image in pixels", 32)
    width: int = size(64, "channels after the first convolution")
    depth: int = size(50, f"layers: one of {', '.join(map(str, RESNET_STAGES))}", min(RESNET_STAGES))
    classes: int = size(1000, "classes", 2)
    channels_last: bool = mode(False, "store images and weights with the channels last (NHWC)")
    optimizer: OptimizerKind = mode(OptimizerKind.SGD, "optimizer and its implementation")  # noqa: RUF009

    def check(self) -> None:
        """Raise ``WorkloadError`` for an unknown depth, or if the last batch norm sees only one value per channel."""
        if self.depth not in RESNET_STAGES:
            raise WorkloadError(f"resnet50: depth={self.depth} is no ResNet; choose one of "
                                f"{', '.join(map(str, RESNET_STAGES))}.")
        if self.batch == 1 and self.resolution <= 32:
            raise WorkloadError("resnet50: batch=1 with resolution=32 leaves batch norm one value a channel; "
                                "choose batch=2 or resolution=64.")


@dataclass(frozen=True, kw_only=True)
class _TextSettings(Settings):
    TOKENS: ClassVar[bool] = True

    seq: int = size(64, "tokens of a sample", 2)
    width: int = size(128, "features of a token")
    depth: int = size(2, "blocks")
    vocabulary: int = size(2000, "distinct tokens", 2)


@dataclass(frozen=True, kw_only=True)
class BertSettings(_TextSettings):
    """A BERT encoder (post-norm) with the masked-token head, every sample filled to ``seq`` tokens."""

    WORKLOAD: ClassVar[str] = "bert"
    SUMMARY: ClassVar[str] = "encoder language model: post-norm blocks, dropout, masked-token loss, tied head"
    TINY: ClassVar[Mapping[str, Any]] = {"batch": 2, "seq": 16, "width": 32, "depth": 1, "heads": 2, "vocabulary": 100}
    REAL: ClassVar[Mapping[str, Any]] = {
        "batch": 64, "seq": 512, "width": 768, "depth": 12, "heads": 12, "vocabulary": 30522,
        "dtype": DtypeMode.BF16_AUTOCAST}

    heads: int = size(4, "attention heads")
    positions: int = size(512, "learned positions")
    masked: float = size(0.15, "share of tokens that are masked and scored", 0.01)
    dropout: float = mode(0.1, "dropout probability, attention included", 0)

    def check(self) -> None:
        """Raise ``WorkloadError`` unless heads divide the width, positions suffice and ``masked`` is at most 1."""
        self.needs_multiple("width", "heads")
        _positions_suffice(self, self.seq, self.positions)
        if self.masked > 1:
            raise WorkloadError(f"bert: masked={self.masked} is more than all tokens; choose a share up to 1.")


@dataclass(frozen=True, kw_only=True)
class Gpt2Settings(_TextSettings):
    """A GPT-2 decoder; the head is the transposed token embedding."""

    WORKLOAD: ClassVar[str] = "gpt2"
    SUMMARY: ClassVar[str] = "decoder language model: learned positions, LayerNorm, GELU, causal attention, tied head"
    TINY: ClassVar[Mapping[str, Any]] = {"batch": 2, "seq": 16, "width": 32, "depth": 1, "heads": 2, "vocabulary": 100}
    REAL: ClassVar[Mapping[str, Any]] = {
        "batch": 16, "seq": 1024, "width": 768, "depth": 12, "heads": 12, "vocabulary": 50257,
        "dtype": DtypeMode.BF16_AUTOCAST, "optimizer": OptimizerKind.ADAMW_FUSED}

    heads: int = size(4, "attention heads")
    positions: int = size(1024, "learned positions")
    dropout: float = mode(0.0, "dropout probability, attention included", 0)

    def check(self) -> None:
        """Raise ``WorkloadError`` unless heads divide the width and positions suffice."""
        self.needs_multiple("width", "heads")
        _positions_suffice(self, self.seq, self.positions)


@dataclass(frozen=True, kw_only=True)
class LlamaSettings(_TextSettings):
    """A Llama decoder: no biases, grouped-query attention, rotary positions, untied head."""

    WORKLOAD: ClassVar[str] = "llama"
    SUMMARY: ClassVar[str] = "decoder language model: RMSNorm, rotary positions, SwiGLU, grouped-query attention"
    TINY: ClassVar[Mapping[str, Any]] = {
        "batch": 2, "seq": 16, "width": 32, "depth": 1, "heads": 4, "kv_heads": 2, "hidden": 64, "vocabulary": 100}
    REAL: ClassVar[Mapping[str, Any]] = {
        "batch": 4, "seq": 2048, "width": 2048, "depth": 8, "heads": 16, "kv_heads": 8, "hidden": 5632,
        "vocabulary": 32000, "dtype": DtypeMode.BF16, "optimizer": OptimizerKind.ADAMW_FUSED}

    heads: int = size(4, "query heads")
    kv_heads: int = size(2, "key and value heads, each shared by heads/kv_heads query heads")
    hidden: int = size(352, "hidden features of the feed-forward part")

    def check(self) -> None:
        """Raise ``WorkloadError`` unless heads divide the width, key heads the heads, and heads are of even size."""
        self.needs_multiple("width", "heads")
        self.needs_multiple("heads", "kv_heads")
        if self.width // self.heads % 2:
            raise WorkloadError(f"{self.WORKLOAD}: width={self.width} over heads={self.heads} gives heads of "
                                f"{self.width // self.heads} features; rotary positions need an even number.")


@dataclass(frozen=True, kw_only=True)
class MoeSettings(LlamaSettings):
    """The Llama decoder with a routed mixture of SwiGLU experts in place of each feed-forward part."""

    WORKLOAD: ClassVar[str] = "moe"
    SUMMARY: ClassVar[str] = "decoder language model with top-k routed experts of fixed capacity (static shapes)"
    TINY: ClassVar[Mapping[str, Any]] = {
        "batch": 2, "seq": 16, "width": 32, "depth": 1, "heads": 4, "kv_heads": 2, "hidden": 32, "vocabulary": 100,
        "experts": 4}
    REAL: ClassVar[Mapping[str, Any]] = {
        "batch": 4, "seq": 2048, "width": 1024, "depth": 8, "heads": 16, "kv_heads": 8, "hidden": 1792,
        "vocabulary": 32000, "dtype": DtypeMode.BF16, "optimizer": OptimizerKind.ADAMW_FUSED}

    experts: int = size(8, "experts of a block", 2)
    top_k: int = size(2, "experts each token is sent to")
    capacity: float = size(1.25, "places of an expert, as a multiple of an even share; tokens beyond are dropped", 0.1)
    hidden: int = size(176, "hidden features of an expert")

    def check(self) -> None:
        """Raise ``WorkloadError`` if a token goes to more experts than there are."""
        super().check()
        if self.top_k > self.experts:
            raise WorkloadError(f"moe: top_k={self.top_k} exceeds experts={self.experts}; choose a smaller top_k.")


@dataclass(frozen=True, kw_only=True)
class VitSettings(Settings):
    """A vision transformer with a class token and learned positions."""

    WORKLOAD: ClassVar[str] = "vit"
    SUMMARY: ClassVar[str] = "image classification: vision transformer, pre-norm, class token"
    TINY: ClassVar[Mapping[str, Any]] = {
        "batch": 2, "resolution": 16, "patch": 8, "width": 32, "depth": 1, "heads": 2, "classes": 10}
    REAL: ClassVar[Mapping[str, Any]] = {
        "batch": 128, "resolution": 224, "width": 768, "depth": 12, "heads": 12, "classes": 1000,
        "dtype": DtypeMode.BF16_AUTOCAST}

    resolution: int = size(64, "height and width of an image in pixels", 2)
    patch: int = size(16, "height and width of a patch in pixels")
    width: int = size(192, "features of a patch")
    depth: int = size(4, "blocks")
    heads: int = size(3, "attention heads")
    classes: int = size(100, "classes", 2)
    dropout: float = mode(0.0, "dropout probability, attention included", 0)

    def check(self) -> None:
        """Raise ``WorkloadError`` unless heads divide the width, patches the image, and dropout is below 1."""
        self.needs_multiple("width", "heads")
        self.needs_multiple("resolution", "patch")
        _probability(self, self.dropout)


@dataclass(frozen=True, kw_only=True)
class UnetSettings(Settings):
    """A U-Net for segmentation: two convolutions a level, transposed convolutions upwards."""

    WORKLOAD: ClassVar[str] = "unet"
    SUMMARY: ClassVar[str] = "image segmentation: U-Net with batch or group norm and transposed convolutions"
    TINY: ClassVar[Mapping[str, Any]] = {"batch": 1, "resolution": 16, "width": 8, "depth": 2}
    REAL: ClassVar[Mapping[str, Any]] = {
        "batch": 16, "resolution": 512, "width": 64, "depth": 4, "dtype": DtypeMode.BF16_AUTOCAST,
        "channels_last": True}

    batch: int = size(2, "images in a micro-batch")
    resolution: int = size(64, "height and width of an image in pixels", 4)
    width: int = size(16, "channels of the first level; each level below has twice as many")
    depth: int = size(4, "levels below the first")
    classes: int = size(2, "classes of a pixel", 2)
    norm: Norm = size(Norm.GROUP, "normalisation", None)  # noqa: RUF009
    groups: int = size(8, "groups of a group norm")
    channels_last: bool = mode(False, "store images and weights with the channels last (NHWC)")

    def check(self) -> None:
        """Raise ``WorkloadError`` unless images halve at every level and the norm has enough groups or values."""
        unit = 2**self.depth
        if self.resolution % unit:
            raise WorkloadError(f"unet: resolution={self.resolution} does not halve depth={self.depth} times; "
                                f"resolution={-(-self.resolution // unit) * unit} does.")
        if self.norm is Norm.GROUP:
            self.needs_multiple("width", "groups")
        elif self.batch == 1 and self.resolution == unit:
            raise WorkloadError("unet: batch=1 leaves batch norm one value a channel at the lowest level; "
                                "choose batch=2 or a larger resolution.")


@dataclass(frozen=True, kw_only=True)
class LstmSettings(_TextSettings):
    """A language model of stacked LSTM layers."""

    WORKLOAD: ClassVar[str] = "lstm"
    SUMMARY: ClassVar[str] = "language model: embedding, stacked nn.LSTM with dropout between layers, linear head"
    TINY: ClassVar[Mapping[str, Any]] = {"batch": 2, "seq": 8, "width": 32, "depth": 1, "vocabulary": 100}
    REAL: ClassVar[Mapping[str, Any]] = {
        "batch": 128, "seq": 256, "width": 1024, "depth": 4, "vocabulary": 32000, "dtype": DtypeMode.TF32}

    depth: int = size(2, "LSTM layers")
    dropout: float = mode(0.2, "dropout probability after the embedding and each layer", 0)

    def check(self) -> None:
        """Raise ``WorkloadError`` unless the dropout is a probability below 1."""
        _probability(self, self.dropout)


def _probability(settings: Settings, dropout: float) -> None:
    if dropout >= 1:
        raise WorkloadError(f"{settings.WORKLOAD}: dropout={dropout} drops everything; choose a value below 1.")


def _positions_suffice(settings: BertSettings | Gpt2Settings, seq: int, positions: int) -> None:
    _probability(settings, settings.dropout)
    if seq > positions:
        raise WorkloadError(f"{settings.WORKLOAD}: seq={seq} exceeds positions={positions}; raise positions as well.")
