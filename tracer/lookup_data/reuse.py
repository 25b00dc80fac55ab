"""Reuse of rows: how often the rows that a batch looks up are looked up in it, as a histogram and as a Zipf law.

Time of an embedding follows the rows that are *different*: the first access of a row comes from memory, a later one may
come from a cache. A histogram over powers of two says enough and tells nothing of who looked up what.
Source: Lin et al., 2024 (arXiv 2404.12674), section on data-distribution-aware embeddings.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tracer.arrays import Float64, Int64

REUSE_BINS = 17
"""Accesses of a distinct row: 1, 2, 3–4, 5–8, …, 16,385–32,768, and more."""
REUSE_OF_BIN = np.array([1.0, 2.0] + [0.75 * 2.0**b for b in range(2, REUSE_BINS)])
"""Accesses that a row of each bin stands for: the middle of the bin."""
_RANKS = 512
"""Pieces that the ranks of a Zipf law are summed in, a quarter of them single rows: 1e-4 off the sum over every row."""
_SURE = 8.0
"""Standard deviations beyond which a Poisson number is taken to be on one side of an edge: 1e-15."""
_NEVER_GONE = 50.0
"""Look-ups of the rarest row while a cache keeps it, beyond which it is never gone: e^-50."""
STEEPEST_SKEW = 8.0
"""Nearly every look-up is of one row."""


def reuse_histogram(indices: Int64) -> Float64:
    """Shares of the look-ups by how often their row is looked up [17]; zeros for no look-ups."""
    if not len(indices):
        return np.zeros(REUSE_BINS)
    _, counts = np.unique(indices, return_counts=True)
    bins = np.minimum(np.ceil(np.log2(counts)).astype(np.int64), REUSE_BINS - 1)
    return np.bincount(bins, weights=counts, minlength=REUSE_BINS) / len(indices)


def checked_histogram(shares: Sequence[float]) -> tuple[float, ...]:
    """The same shares, adding up to one.

    Raises:
        ValueError: they are not ``REUSE_BINS`` numbers, or negative, or add up to nothing.
    """
    values = np.asarray(shares, np.float64)
    if values.shape != (REUSE_BINS,) or not np.isfinite(values).all() or (values < 0).any() or values.sum() <= 0:
        raise ValueError(f"a reuse histogram is {REUSE_BINS} shares, none negative, not all zero")
    return tuple((values / values.sum()).tolist())


def distinct_of_histogram(lookups: float, shares: Sequence[float]) -> float:
    """Different rows among look-ups of this histogram: lookups · Σ share/reuse."""
    return lookups * float((np.asarray(shares) / REUSE_OF_BIN).sum())


def distinct_of_zipf(lookups: float, rows: float, skew: float) -> float:
    """Different rows that look-ups touch on average, rows drawn by a Zipf law: Σ_r 1 − (1 − p_r)^lookups.

    ``skew`` 0 draws them evenly: T·(1 − (1 − 1/T)^lookups).
    """
    wide, chances = _zipf(rows, skew)
    return float((wide * -np.expm1(lookups * np.log1p(-np.minimum(chances, 1.0 - 1e-12)))).sum())


def histogram_of_zipf(lookups: float, rows: float, skew: float) -> tuple[float, ...]:
    """The expected reuse histogram of look-ups whose rows a Zipf law draws: a row's accesses are Poisson.

    A row of chance p is looked up Poisson(p·lookups) times; of its accesses those of k-fold reuse are k·P(k).
    """
    from scipy.special import pdtr

    wide, chances = _zipf(rows, skew)
    mean = lookups * chances
    # Accesses with reuse ≤ n: Σ_{k≤n} k·P(k; λ) = λ·P(K ≤ n − 1; λ).
    edges = (2.0 ** np.arange(REUSE_BINS - 1))[:, None]
    away = _SURE * np.sqrt(mean) + _SURE
    chance = (edges - 1 > mean - away).astype(np.float64)
    near = np.abs(edges - 1 - mean) <= away
    where, at = np.nonzero(near)
    chance[where, at] = pdtr(edges[where, 0] - 1, mean[at])
    below = chance @ (wide * mean)
    shares = np.diff(np.concatenate([[0.0], below, [(wide * mean).sum()]]))
    return checked_histogram(np.maximum(shares, 0.0).tolist())


def lru_misses(lookups: float, rows: float, skew: float, kept_rows: float) -> float:
    """Rows that a cache of the least recently used ones lacks of each batch, batch after batch by one Zipf law.

    A row stays for T batches, so long that as many different rows come by as it keeps: Σ_r 1 − e^(−λ_r·T) = kept rows,
    λ_r look-ups of a row in a batch. Of those looked up, 1 − e^(−λ_r), the share e^(−λ_r·T) was gone. A cache that is
    smaller than a batch is filled anew 1/T times in each.
    Source: Che, Tung and Wang, "Hierarchical Web caching systems" (IEEE JSAC, 2002).
    """
    from scipy.optimize import brentq

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
    stay = float(np.exp(brentq(more, low, high, xtol=1e-9))) if high > low else float(np.exp(low))
    window = min(stay, 1.0)
    return min(float((wide * -np.expm1(-mean * window) * np.exp(-mean * stay)).sum()) / window, lookups)


def skew_of_distinct(lookups: float, rows: float, distinct: float) -> float:
    """The exponent of the Zipf law under which so many look-ups touch so many different rows; 0 … 8.

    Two numbers that every recorded batch gives tell the law, and the law tells any other batch's: a histogram alone
    does not scale (twice the look-ups reuse rows more than twice as often, or less, by how skewed they are).
    """
    from scipy.optimize import brentq

    def more(skew: float) -> float:
        return distinct_of_zipf(lookups, rows, skew) - distinct

    if more(0.0) <= 0:
        return 0.0
    return STEEPEST_SKEW if more(STEEPEST_SKEW) >= 0 else float(brentq(more, 0.0, STEEPEST_SKEW, xtol=1e-9))


def _zipf(rows: float, skew: float) -> tuple[Float64, Float64]:
    """Rows of each piece of a table's ranks, and the chance of one of its rows."""
    count = max(int(rows), 1)
    if count <= _RANKS:
        edges = np.arange(count + 1, dtype=np.float64)
    else:
        edges = np.unique(np.concatenate([np.arange(_RANKS // 4), np.geomspace(_RANKS // 4, count, _RANKS)]).round())
    wide, ranks = np.diff(edges), 0.5 * (edges[1:] + edges[:-1]) + 0.5
    weights = ranks**-skew
    return wide, weights / float((wide * weights).sum())
