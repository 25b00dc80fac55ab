"""A made-up GPU law that is known on paper, tables of it, and quick boosting for tests."""

from __future__ import annotations

import numpy as np
import pandas as pd

from kernel_models.datasets.samples import Samples
from kernel_models.device import device
from kernel_models.families.gemm import gemm
from kernel_models.learned.boosting import Boosting

QUICK = Boosting(iterations=60, learning_rate=0.2, leaves=15, feature_share=0.5, least_rows=5)
SIZES = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192)


def law_us(m: np.ndarray, n: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Waves of 128×128 tiles over the SMs of an H200, each as long as its contraction, plus a start, µs."""
    tiles = -(-m // 128) * -(-n // 128)
    waves = -(-tiles // device("h200-sxm").sm_count)
    return 3.0 + waves * (0.8 + k * 0.006)


def gemm_table(rows: int = 1200, noise: float = 0.01, seed: int = 0) -> pd.DataFrame:
    """A table of the law with a little noise, in the form of the published linear-layer tables."""
    random = np.random.default_rng(seed)
    m = random.choice([1, 8, 17, 64, 100, 128, 256, 500, 1024, 2048, 4096], rows)
    n, k = random.choice(SIZES, rows), random.choice(SIZES, rows)
    return pd.DataFrame({
        "gpu": "H200-SXM-141GB", "software": "lib-1.0", "kernel_source": "linear", "dtype": "bfloat16", "m": m, "n": n,
        "k": k, "latency_us": law_us(m, n, k) * np.exp(random.normal(0, noise, rows))})


def gemm_samples(rows: int = 1200, noise: float = 0.01, seed: int = 0) -> Samples:
    """The same as samples, each call once."""
    table = gemm_table(rows, noise, seed)
    sizes = table[["m", "n", "k"]].to_numpy().tolist()
    return Samples(
        "h200-sxm", "lib-1.0/linear", "law", [next(gemm(1, m, n, k, "bf16", "nt")) for m, n, k in sizes],
        table.latency_us.to_numpy(), {"site": [f"n={n} k={k}" for _, n, k in sizes]}).aggregated()
