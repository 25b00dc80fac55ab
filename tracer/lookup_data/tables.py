"""``EmbeddingTable``: one embedding table, how a step looks rows up in it, and how often rows are looked up again.

Time of an embedding follows the rows that are *different*: the first access of a row comes from memory, a later one may
come from a cache. A histogram of reuse over powers of two describes a batch without revealing who looked up what; a
Zipf law predicts other batches. Source: Lin et al., 2024 (arXiv 2404.12674), section on data-distribution-aware
embeddings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tracer.arrays import Float64, Int64
from tracer.errors import ForetraceError
from tracer.lazy import optimize, special

REUSE_BINS = 17
"""Bins of a histogram by the accesses of a row: 1, 2, 3–4, 5–8, …, 16,385–32,768, and more."""
REUSE_OF_BIN = np.array([1.0, 2.0] + [0.75 * 2.0**b for b in range(2, REUSE_BINS)])
"""Accesses of a row in each bin: the middle of the bin."""
_RANKS = 512
"""Pieces for the sum over a Zipf law's ranks, a quarter of them single rows; the error of the sum is 1e-4."""
_SURE = 8.0
"""Standard deviations from an edge beyond which a Poisson number counts as on one side of it: error 1e-15."""
_NEVER_GONE = 50.0
"""A cache in which a row stays for more look-ups of the rarest row than this never evicts it: e^-50."""
STEEPEST_SKEW = 8.0
"""Steepest exponent of a Zipf law: nearly all look-ups are of one row."""


def reuse_histogram(indices: Int64) -> Float64:
    """Return the share of look-ups in each bin, by how often their row is looked up, [17]; zeros for no look-ups."""
    if not len(indices):
        return np.zeros(REUSE_BINS)
    _, counts = np.unique(indices, return_counts=True)
    bins = np.minimum(np.ceil(np.log2(counts)).astype(np.int64), REUSE_BINS - 1)
    return np.bincount(bins, weights=counts, minlength=REUSE_BINS) / len(indices)


def checked_histogram(shares: Sequence[float]) -> tuple[float, ...]:
    """Return the shares scaled to a sum of one.

    Raises:
        ValueError: they are not ``REUSE_BINS`` numbers, one is negative, or all are zero.
    """
    values = np.asarray(shares, np.float64)
    if values.shape != (REUSE_BINS,) or not np.isfinite(values).all() or (values < 0).any() or values.sum() <= 0:
        raise ValueError(f"a reuse histogram is {REUSE_BINS} shares, none negative, not all zero")
    return tuple((values / values.sum()).tolist())


def distinct_of_histogram(lookups: float, shares: Sequence[float]) -> float:
    """Return the number of different rows among look-ups with this histogram: lookups · Σ share/reuse."""
    return lookups * float((np.asarray(shares) / REUSE_OF_BIN).sum())


def distinct_of_zipf(lookups: float, rows: float, skew: float) -> float:
    """Return the mean number of different rows among look-ups drawn by a Zipf law: Σ_r 1 − (1 − p_r)^lookups.

    ``skew`` 0 draws them uniformly: T·(1 − (1 − 1/T)^lookups).
    """
    wide, chances = _zipf(rows, skew)
    return float((wide * -np.expm1(lookups * np.log1p(-np.minimum(chances, 1.0 - 1e-12)))).sum())


def histogram_of_zipf(lookups: float, rows: float, skew: float) -> tuple[float, ...]:
    """Return the expected reuse histogram of look-ups whose rows a Zipf law draws.

    A row of probability p is looked up Poisson(p·lookups) times; its expected accesses with k-fold reuse are k·P(k).
    """
    wide, chances = _zipf(rows, skew)
    mean = lookups * chances
    # Accesses with reuse ≤ n: Σ_{k≤n} k·P(k; λ) = λ·P(K ≤ n − 1; λ).
    edges = (2.0 ** np.arange(REUSE_BINS - 1))[:, None]
    away = _SURE * np.sqrt(mean) + _SURE
    chance = (edges - 1 > mean - away).astype(np.float64)
    near = np.abs(edges - 1 - mean) <= away
    where, at = np.nonzero(near)
    chance[where, at] = special.pdtr(edges[where, 0] - 1, mean[at])
    below = chance @ (wide * mean)
    shares = np.diff(np.concatenate([[0.0], below, [(wide * mean).sum()]]))
    return checked_histogram(np.maximum(shares, 0.0).tolist())


def lru_misses(lookups: float, rows: float, skew: float, kept_rows: float) -> float:
    """Return the rows of each batch that a least-recently-used cache lacks, if all batches follow one Zipf law.

    A row stays for T batches, until as many different rows were looked up as the cache keeps: Σ_r 1 − e^(−λ_r·T). Here
    λ_r counts look-ups of row r in a batch. A batch needs row r with probability 1 − e^(−λ_r), and the cache has lost
    it with probability e^(−λ_r·T). A cache smaller than a batch is filled again 1/T times in each batch. Source: Che,
    Tung and Wang, "Hierarchical Web caching systems" (IEEE JSAC, 2002).
    """
    if lookups <= 0 or kept_rows >= rows:
        return 0.0
    if kept_rows < 1:
        return lookups
    wide, chances = _zipf(rows, skew)
    mean = lookups * chances

    def more(log_stay: float) -> float:
        return float((wide * -np.expm1(-mean * np.exp(log_stay))).sum()) - kept_rows

    low = high = float(np.log(kept_rows / lookups))
    while more(high) < 0:
        high += 2.0
        if float(mean.min()) * np.exp(high) > _NEVER_GONE:
            return 0.0
    stay = float(np.exp(optimize.brentq(more, low, high, xtol=1e-9))) if high > low else float(np.exp(low))
    window = min(stay, 1.0)
    return min(float((wide * -np.expm1(-mean * window) * np.exp(-mean * stay)).sum()) / window, lookups)


def skew_of_distinct(lookups: float, rows: float, distinct: float) -> float:
    """Return the exponent (0 to 8) of the Zipf law under which ``lookups`` touch ``distinct`` different rows.

    Every recorded batch gives these two numbers. They determine the law, and the law describes any other batch. A
    histogram alone does not scale: with twice the look-ups, the reuse of rows depends on the skew.
    """
    def more(skew: float) -> float:
        return distinct_of_zipf(lookups, rows, skew) - distinct

    if more(0.0) <= 0:
        return 0.0
    return STEEPEST_SKEW if more(STEEPEST_SKEW) >= 0 else float(optimize.brentq(more, 0.0, STEEPEST_SKEW, xtol=1e-9))


def _zipf(rows: float, skew: float) -> tuple[Float64, Float64]:
    """Return for each range of rows, by popularity, how many rows it has and the probability of one of them."""
    count = max(int(rows), 1)
    if count <= _RANKS:
        edges = np.arange(count + 1, dtype=np.float64)
    else:
        edges = np.unique(np.concatenate([np.arange(_RANKS // 4), np.geomspace(_RANKS // 4, count, _RANKS)]).round())
    wide, ranks = np.diff(edges), 0.5 * (edges[1:] + edges[:-1]) + 0.5
    weights = ranks**-skew
    return wide, weights / float((wide * weights).sum())


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
"""Bytes of optimizer state (for each row, for each element), by optimizer: FBGEMM's names of its fused optimizers."""
BAG_QUANTILES = (0.1, 0.5, 0.9, 0.99)
"""Quantiles of a batch's bag lengths that ``EmbeddingTable.bag_quantiles`` holds."""
MOST = {"rows": 1e15, "columns": 1e7, "bag": 1e9, "longest_bag": 1e9}
"""Largest sizes: no machine holds more, and squares of derived sizes are still finite."""
ROUNDED = 1e-4
"""Largest relative error that rounding adds to a mean bag length in a graph's notes (``noted``, five digits)."""
POOLINGS = ("sum", "mean", "none")
LOCATIONS = ("hbm", "uvm", "uvm_cached")
"""Where weights lie: in the device's memory; in the host's, read by the device over its link; or in the host's with
recently used rows kept in the device's. FBGEMM's ``EmbeddingLocation``: DEVICE, MANAGED, MANAGED_CACHING."""
CACHE_LOAD_FACTOR = 0.2
"""Share of the rows that the device keeps: FBGEMM's own default."""
CACHE_SLOT_BYTES, CACHE_MAP_BYTES = 16.0, 4.0
"""Device memory that finds cached rows. The first, for each row in the cache: its index and time of last use. The
second, for each row of the table: the table's number (TorchRec's ``_calculate_cache_aux_state_sizes``)."""


class TableError(ForetraceError):
    """A description of embedding tables contradicts itself."""


@dataclass(frozen=True, slots=True)
class EmbeddingTable:
    """One embedding table: its sizes, the look-ups of its rows, and the memory that holds it.

    Attributes:
        name: Unique within a model.
        rows, columns: Shape of the weights.
        dtype: Precision of the weights: a key of ``TABLE_DTYPES``.
        bag: Mean look-ups of a sample.
        longest_bag: Look-ups of the longest bag of a batch; 0: as long as the mean.
        bag_quantiles: Bag lengths of a recorded batch at its ``BAG_QUANTILES``, or nothing.
        skew: Exponent of the Zipf law by which rows are drawn (0: uniformly); unused where ``reuse`` shows the law.
        reuse: Histogram of a recorded batch (``reuse_histogram``), or nothing.
        reuse_lookups: Look-ups of the batch of ``reuse``.
        unique: Different rows of that batch, counted; 0: estimated from the histogram.
        pooling: "sum" and "mean" give one vector for each sample, "none" one for each look-up.
        weighted: Whether each look-up has a weight.
        optimizer: A key of ``ROW_STATE_BYTES``; "none" for a table without training.
        output_dtype: Precision of its output vectors: a key of ``OUTPUT_DTYPES``.
        location: One of ``LOCATIONS``.
        cache_load_factor: Share of the rows that the device keeps, if the location is ``uvm_cached``.

    Raises:
        TableError: A number is not finite, negative or (sizes) zero, a word is unknown, or two fields contradict each
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
        """Check that bags and counts are possible in one batch. Raises ``TableError``."""
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
        """Return the table with another number of rows, which limits its counts of rows."""
        return replace(self, rows=rows, unique=min(self.unique, rows))

    @property
    def trained(self) -> bool:
        """Return whether a training step changes its rows."""
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
        """Return bytes of the optimizer's state of all rows, on any device."""
        return self.rows * sum(row_state_bytes(self.optimizer, self.columns))

    @property
    def cached_rows(self) -> int:
        """Return how many rows of a table in the host's memory the device keeps."""
        return math.ceil(self.cache_load_factor * self.rows) if self.location == "uvm_cached" else 0

    @property
    def host_weight_bytes(self) -> float:
        """Return bytes of the weights in the host's memory: 0, or all weights, even if some rows are cached."""
        return 0.0 if self.location == "hbm" else self.weight_bytes

    @property
    def host_state_bytes(self) -> float:
        """Return bytes of the optimizer's state in the host's memory. State for each element lies with the weights,
        state for each row on the device (FBGEMM, ``construct_split_state``)."""
        return 0.0 if self.location == "hbm" else self.rows * row_state_bytes(self.optimizer, self.columns)[1]

    @property
    def device_weight_bytes(self) -> float:
        """Return bytes in the device's memory: the weights, or their cache and the maps that find rows in it."""
        if self.location == "hbm":
            return self.weight_bytes
        if self.location == "uvm":
            return 0.0
        return self.cached_rows * (self.row_bytes + CACHE_SLOT_BYTES) + self.rows * CACHE_MAP_BYTES

    @property
    def device_state_bytes(self) -> float:
        """Return bytes of the optimizer's state in the device's memory."""
        return self.state_bytes - self.host_state_bytes

    @property
    def output_bytes(self) -> float:
        """Return bytes of one element of its output vectors."""
        return OUTPUT_DTYPES[self.output_dtype]

    def lookups(self, samples: float) -> float:
        """Return the look-ups of a number of samples."""
        return self.bag * samples

    def longest(self) -> float:
        """Return look-ups of the longest bag: the given number, else the mean rounded up."""
        return float(self.longest_bag) if self.longest_bag else float(math.ceil(self.bag))

    def law_skew(self) -> float:
        """Return the exponent of the Zipf law of this table's reuse: the histogram's, else ``skew``."""
        if self.reuse and self.reuse_lookups:
            seen = float(self.unique) or distinct_of_histogram(self.reuse_lookups, self.reuse)
            return skew_of_distinct(self.reuse_lookups, self.rows, seen)
        return self.skew

    def histogram(self, samples: float) -> tuple[float, ...]:
        """Return the reuse histogram of a batch of ``samples`` samples; empty without look-ups."""
        count = self.lookups(samples)
        if count <= 0:
            return ()
        if self.reuse and self.reuse_lookups and abs(count / self.reuse_lookups - 1.0) < 0.01:
            return checked_histogram(self.reuse)
        return histogram_of_zipf(count, self.rows, self.law_skew())

    def distinct(self, samples: float) -> float:
        """Return the different rows that ``samples`` samples look up, on average."""
        count = self.lookups(samples)
        return min(distinct_of_zipf(count, self.rows, self.law_skew()), count, float(self.rows))

    def missed(self, samples: float) -> float:
        """Return the rows that cross the host's link for the look-ups of ``samples`` samples.

        Tables on the device have none; for those in the host's memory each look-up's row counts. Of cached tables the
        rows count that a least-recently-used cache of ``cached_rows`` lacks (``lru_misses``). FBGEMM's tables share one
        cache; here each has its own part of it.
        """
        count = self.lookups(samples)
        if self.location == "hbm":
            return 0.0
        if self.location == "uvm":
            return count
        return lru_misses(count, self.rows, self.law_skew(), self.cached_rows)


def stored_row_bytes(dtype: str, columns: float) -> float:
    """Return the bytes of one row. Quantized rows have scale and bias, and are padded."""
    size = columns * TABLE_DTYPES.get(dtype, TABLE_DTYPES["fp32"])
    if dtype not in QUANTIZED:
        return size
    return math.ceil((size + SCALE_AND_BIAS_BYTES) / ROW_ALIGNMENT) * ROW_ALIGNMENT


def row_state_bytes(optimizer: str, columns: float) -> tuple[float, float]:
    """Return bytes of optimizer state: those for each row, and those for each element."""
    of_row, of_element = ROW_STATE_BYTES.get(optimizer, (0, 0))
    return float(of_row), of_element * float(columns)
