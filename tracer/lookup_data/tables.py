"""``EmbeddingTable``: one embedding table and how a step looks rows up in it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tracer.errors import ForetraceError
from tracer.lookup_data.reuse import (
    STEEPEST_SKEW,
    checked_histogram,
    distinct_of_histogram,
    distinct_of_zipf,
    histogram_of_zipf,
    lru_misses,
    skew_of_distinct,
)

TABLE_DTYPES = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "int8": 1.0, "int4": 0.5}
"""Bytes of an element of a row, by its precision."""
QUANTIZED = ("int8", "int4")
"""Precisions whose rows carry a scale and a bias. FBGEMM looks such rows up for inference alone
(``IntNBitTableBatchedEmbeddingBagsCodegen``): its training on GPUs dropped int8 in 2024 (pull request 2371)."""
SCALE_AND_BIAS_BYTES, ROW_ALIGNMENT = 4.0, 16.0
"""Bytes of a quantized row's scale and bias on a GPU, fp16 each, and the multiple that rows are padded to (FBGEMM,
``rounded_row_size_in_bytes``)."""
OUTPUT_DTYPES = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0}
"""Bytes of an element of a pooled vector, by its precision."""
ROW_STATE_BYTES = {"sgd": (0, 0), "adagrad": (0, 4), "rowwise_adagrad": (4, 0), "adam": (0, 8),
                   "partial_rowwise_adam": (4, 4), "none": (0, 0)}
"""Bytes of optimizer state (a row, an element), by optimizer: FBGEMM's names of its fused optimizers."""
BAG_QUANTILES = (0.1, 0.5, 0.9, 0.99)
"""Shares of a batch's bags that are no longer than ``EmbeddingTable.bag_quantiles``."""
MOST = {"rows": 1e15, "columns": 1e7, "bag": 1e9, "longest_bag": 1e9}
"""Largest sizes: no machine holds more, and squares of what follows from them are still numbers."""
ROUNDED = 1e-4
"""Most that rounding adds to a mean bag length in a graph's notes (``noted``, five digits), as a share."""
POOLINGS = ("sum", "mean", "none")
LOCATIONS = ("hbm", "uvm", "uvm_cached")
"""Where weights lie: in the device's memory; in the host's, read by the device over its link; or there, with rows that
were looked up lately kept in the device's memory. FBGEMM's ``EmbeddingLocation``: DEVICE, MANAGED, MANAGED_CACHING."""
CACHE_LOAD_FACTOR = 0.2
"""FBGEMM's own default."""
CACHE_SLOT_BYTES, CACHE_MAP_BYTES = 16.0, 4.0
"""Device memory that finds cached rows: of a row in the cache its index and when it was last used, of every row of the
table the table's number (TorchRec's storage estimator, ``_calculate_cache_aux_state_sizes``)."""


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
        optimizer: a key of ``ROW_STATE_BYTES``; "none" of a table that is only looked up.
        output_dtype: of its vectors: a key of ``OUTPUT_DTYPES``.
        location: one of ``LOCATIONS``.
        cache_load_factor: of ``uvm_cached`` tables: share of the rows that the device keeps.

    Raises:
        TableError: a number is not finite, negative or (sizes) zero, a word is unknown, or two fields contradict each
            other.
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
    output_dtype: str = "fp32"
    location: str = "hbm"
    cache_load_factor: float = CACHE_LOAD_FACTOR

    def __post_init__(self) -> None:
        for name, least in (("rows", 1), ("columns", 1), ("bag", 0), ("longest_bag", 0), ("skew", 0),
                            ("cache_load_factor", 0), ("unique", 0), ("reuse_lookups", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise TableError(f"table {self.name!r}: {name} is {value!r}, not a number. Give a finite one.")
            if value < least:
                raise TableError(f"table {self.name!r}: {name} is {value}. It must be {least} or more.")
            if name == "skew" and value > STEEPEST_SKEW:
                raise TableError(f"table {self.name!r}: skew is {value:g}. It is the exponent of a Zipf law: at most "
                                 f"{STEEPEST_SKEW:g}, with which nearly every look-up is of one row.")
            if value > MOST.get(name, math.inf):
                raise TableError(f"table {self.name!r}: {name} is {value:g}. It must be {MOST[name]:g} or less.")
            if name not in ("bag", "skew", "cache_load_factor") and value != int(value):
                raise TableError(f"table {self.name!r}: {name} is {value}, which is no whole number.")
        for name, known in (("dtype", TABLE_DTYPES), ("pooling", POOLINGS), ("optimizer", ROW_STATE_BYTES),
                            ("output_dtype", OUTPUT_DTYPES), ("location", LOCATIONS)):
            if getattr(self, name) not in known:
                raise TableError(f"table {self.name!r}: {name} {getattr(self, name)!r} is unknown; known are "
                                 f"{', '.join(known)}.")
        if not 0 < self.cache_load_factor <= 1:
            raise TableError(f"table {self.name!r}: cache_load_factor is {self.cache_load_factor}. It is a share of "
                             "the rows: above 0, at most 1.")
        if self.dtype in QUANTIZED and self.trained:
            raise TableError(f"table {self.name!r}: rows of {self.dtype} are only looked up (FBGEMM trains fp32, fp16 "
                             f"and bf16), and its optimizer is {self.optimizer}. Give optimizer none.")
        if self.dtype == "int4" and self.columns % 2:
            raise TableError(f"table {self.name!r}: {self.columns} columns of int4 do not fill whole bytes; give an "
                             "even number.")
        if self.reuse:
            try:
                checked_histogram(self.reuse)
            except ValueError as error:
                raise TableError(f"table {self.name!r}: {error}.") from None
        self._check_batch()

    def _check_batch(self) -> None:
        """Bags and counts are such as one batch can have. Raises ``TableError``."""
        if self.longest_bag and self.bag > self.longest_bag * (1 + ROUNDED):
            raise TableError(f"table {self.name!r}: bag is {self.bag:g}, and longest_bag is {self.longest_bag}. The "
                             "mean is no more than the longest; leave longest_bag out where it is not known.")
        for most, what in ((self.rows, "rows"), (self.reuse_lookups or self.rows, "look-ups (reuse_lookups)")):
            if self.unique > most:
                raise TableError(f"table {self.name!r}: unique is {self.unique:,}, and there are {most:,} {what}. It "
                                 "counts the different rows among a batch's look-ups.")
        lengths = self.bag_quantiles
        if lengths and (len(lengths) != len(BAG_QUANTILES) or not all(map(math.isfinite, lengths))
                        or list(lengths) != sorted(lengths) or lengths[0] < 0):
            raise TableError(f"table {self.name!r}: bag_quantiles are {', '.join(f'{each:g}' for each in lengths)}. "
                             f"They are the look-ups of bags at {', '.join(f'{each:g}' for each in BAG_QUANTILES)}: "
                             f"{len(BAG_QUANTILES)} numbers, none less than the one before.")

    def resized(self, rows: int) -> EmbeddingTable:
        """The table with other rows; of those that were counted no more than there are."""
        return replace(self, rows=rows, unique=min(self.unique, rows))

    @property
    def trained(self) -> bool:
        """Return whether a step changes its rows."""
        return self.optimizer != "none"

    @property
    def row_bytes(self) -> float:
        """Return bytes of one row's weights (``stored_row_bytes``)."""
        return stored_row_bytes(self.dtype, self.columns)

    @property
    def weight_bytes(self) -> float:
        """Return bytes of all rows."""
        return self.rows * self.row_bytes

    @property
    def state_bytes(self) -> float:
        """Return bytes of the optimizer's state of all rows, wherever it lies."""
        return self.rows * sum(row_state_bytes(self.optimizer, self.columns))

    @property
    def cached_rows(self) -> int:
        """Rows that the device keeps of a table in the host's memory."""
        return math.ceil(self.cache_load_factor * self.rows) if self.location == "uvm_cached" else 0

    @property
    def host_weight_bytes(self) -> float:
        """Return bytes of the weights in the host's memory: all of them or none, cached or not."""
        return 0.0 if self.location == "hbm" else self.weight_bytes

    @property
    def host_state_bytes(self) -> float:
        """Return bytes of the optimizer's state there: a number an element lies with the weights, one a row on the
        device (FBGEMM,
        ``construct_split_state``)."""
        return 0.0 if self.location == "hbm" else self.rows * row_state_bytes(self.optimizer, self.columns)[1]

    @property
    def device_weight_bytes(self) -> float:
        """Return bytes of the device's memory: the weights, or the cache of them with what finds rows in it."""
        if self.location == "hbm":
            return self.weight_bytes
        if self.location == "uvm":
            return 0.0
        return self.cached_rows * (self.row_bytes + CACHE_SLOT_BYTES) + self.rows * CACHE_MAP_BYTES

    @property
    def device_state_bytes(self) -> float:
        """Return bytes of the optimizer's state there."""
        return self.state_bytes - self.host_state_bytes

    @property
    def output_bytes(self) -> float:
        """Return bytes of an element of its vectors."""
        return OUTPUT_DTYPES[self.output_dtype]

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

    def missed(self, samples: float) -> float:
        """Rows that cross the host's link for the look-ups of so many samples.

        None of a table on the device, each look-up's of one in the host's memory, and of a cached one those that a
        least-recently-used cache of ``cached_rows`` lacks (``reuse.lru_misses``). FBGEMM's tables share one cache; here
        each has its own part of it.
        """
        count = self.lookups(samples)
        if self.location == "hbm":
            return 0.0
        if self.location == "uvm":
            return count
        return lru_misses(count, self.rows, self.law_skew(), self.cached_rows)


def stored_row_bytes(dtype: str, columns: float) -> float:
    """Bytes of one row: of quantized ones with scale and bias, and padded."""
    size = columns * TABLE_DTYPES.get(dtype, TABLE_DTYPES["fp32"])
    if dtype not in QUANTIZED:
        return size
    return math.ceil((size + SCALE_AND_BIAS_BYTES) / ROW_ALIGNMENT) * ROW_ALIGNMENT


def row_state_bytes(optimizer: str, columns: float) -> tuple[float, float]:
    """Bytes of optimizer state of one row: what a row has one of, and what every element has."""
    of_row, of_element = ROW_STATE_BYTES.get(optimizer, (0, 0))
    return float(of_row), of_element * float(columns)
