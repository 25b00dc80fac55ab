"""Which rows of the serving table were looked at while the models were built, and which rows calibrate them.

Both rules were written before any time of the table was read: whole series (one model on one engine, GPU, split,
precision and pair of lengths, at all its concurrencies) are one half's or the other's.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Any

SERIES = ("backend", "backend_version", "model", "gpu", "gemm_quant_mode", "moe_quant_mode", "tp", "attention_dp_size",
          "moe_tp_size", "moe_ep_size", "input_tokens", "output_tokens")
"""Columns that name a series."""
ROW = (*SERIES, "concurrency", "batch")
"""Columns that name a row."""


def digest(row: Any, columns: tuple[str, ...]) -> str:
    """Return the checksum of a row's columns, a missing value as its word."""
    return sha256("|".join(str(getattr(row, name)) for name in columns).encode()).hexdigest()


def is_development(row: Any) -> bool:
    """Return whether a row's series was looked at: half of all series, by the first bit of their names' checksum."""
    return int(digest(row, SERIES)[0], 16) < 8


def calibrates_before(row: Any) -> str:
    """Return the key by which rows of a group are ordered; its first ten calibrate."""
    return digest(row, ROW)
