"""``EmbeddingTable``: one embedding table and how a step looks rows up in it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tracer.errors import ForetraceError
from tracer.lookup_data.reuse import (
    checked_histogram,
    distinct_of_histogram,
    distinct_of_zipf,
    histogram_of_zipf,
    skew_of_distinct,
)

TABLE_DTYPES = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "int8": 1.0, "int4": 0.5}
"""Bytes of an element of a row, by its precision; rows of int8 and int4 carry a scale and a bias of fp16 each."""
ROW_STATE_BYTES = {"sgd": (0, 0), "adagrad": (0, 4), "rowwise_adagrad": (4, 0), "adam": (0, 8),
                   "partial_rowwise_adam": (4, 4), "none": (0, 0)}
"""Bytes of optimizer state (a row, an element), by optimizer: FBGEMM's names of its fused optimizers."""
BAG_QUANTILES = (0.1, 0.5, 0.9, 0.99)
"""Shares of a batch's bags that are no longer than ``EmbeddingTable.bag_quantiles``."""
POOLINGS = ("sum", "mean", "none")


class TableError(ForetraceError):
    """A description of embedding tables does not hold together."""


@dataclass(frozen=True, slots=True)
class EmbeddingTable:
    """One table.

    Attributes:
        name: unique within a model.
        rows, columns: of the weights.
        dtype: of the weights: a key of ``TABLE_DTYPES``.
        bag: look-ups of a sample, mean.
        longest_bag: look-ups of the longest bag of a batch; 0: as long as the mean.
        bag_quantiles: look-ups of the bags at ``BAG_QUANTILES`` of a recorded batch, or nothing.
        skew: exponent of the Zipf law by which rows are drawn (0: evenly). With a histogram it only scales that.
        reuse: histogram of a batch (``reuse_histogram``), or nothing.
        reuse_lookups: look-ups of the batch that ``reuse`` is of.
        unique: different rows of that batch, counted; 0: estimated from the histogram.
        pooling: "sum" and "mean" give a vector a sample, "none" one a look-up.
        weighted: whether each look-up has a weight.
        optimizer: a key of ``ROW_STATE_BYTES``.

    Raises:
        TableError: a number is not finite, negative or (sizes) zero, or a word is unknown.
    """

    name: str
    rows: int
    columns: int
    dtype: str = "fp32"
    bag: float = 1.0
    longest_bag: int = 0
    bag_quantiles: tuple[float, ...] = ()
    skew: float = 0.0
    reuse: tuple[float, ...] = ()
    reuse_lookups: int = 0
    unique: int = 0
    pooling: str = "sum"
    weighted: bool = False
    optimizer: str = "rowwise_adagrad"

    def __post_init__(self) -> None:
        for name, least in (("rows", 1), ("columns", 1), ("bag", 0), ("longest_bag", 0), ("skew", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise TableError(f"table {self.name!r}: {name} is {value!r}, not a number. Give a finite one.")
            if value < least:
                raise TableError(f"table {self.name!r}: {name} is {value}. It must be {least} or more.")
            if name in ("rows", "columns", "longest_bag") and value != int(value):
                raise TableError(f"table {self.name!r}: {name} is {value}, which is no whole number.")
        for name, known in (("dtype", TABLE_DTYPES), ("pooling", POOLINGS), ("optimizer", ROW_STATE_BYTES)):
            if getattr(self, name) not in known:
                raise TableError(f"table {self.name!r}: {name} {getattr(self, name)!r} is unknown; known are "
                                 f"{', '.join(known)}.")
        if self.reuse:
            try:
                checked_histogram(self.reuse)
            except ValueError as error:
                raise TableError(f"table {self.name!r}: {error}.") from None

    @property
    def row_bytes(self) -> float:
        """Of one row's weights, with the scale and bias of quantized rows."""
        extra = 4.0 if self.dtype in ("int8", "int4") else 0.0
        return self.columns * TABLE_DTYPES[self.dtype] + extra

    @property
    def weight_bytes(self) -> float:
        """Of all rows."""
        return self.rows * self.row_bytes

    @property
    def state_bytes(self) -> float:
        """Of the optimizer's state of all rows."""
        of_row, of_element = ROW_STATE_BYTES[self.optimizer]
        return self.rows * (of_row + of_element * float(self.columns))

    def lookups(self, samples: float) -> float:
        """Look-ups of so many samples."""
        return self.bag * samples

    def longest(self) -> float:
        """Look-ups of the longest bag: what was stated, else the mean rounded up."""
        return float(self.longest_bag) if self.longest_bag else float(math.ceil(self.bag))

    def law_skew(self) -> float:
        """The exponent of the Zipf law that gives this table's reuse: the histogram's where there is one."""
        if self.reuse and self.reuse_lookups:
            seen = float(self.unique) or distinct_of_histogram(self.reuse_lookups, self.reuse)
            return skew_of_distinct(self.reuse_lookups, self.rows, seen)
        return self.skew

    def histogram(self, samples: float) -> tuple[float, ...]:
        """The reuse histogram of a batch of so many samples; nothing where it looks nothing up."""
        count = self.lookups(samples)
        if count <= 0:
            return ()
        if self.reuse and self.reuse_lookups and abs(count / self.reuse_lookups - 1.0) < 0.01:
            return checked_histogram(self.reuse)
        return histogram_of_zipf(count, self.rows, self.law_skew())

    def distinct(self, samples: float) -> float:
        """Different rows that so many samples look up, on average."""
        count = self.lookups(samples)
        return min(distinct_of_zipf(count, self.rows, self.law_skew()), count, float(self.rows))
