"""Digits → nanoseconds: exact, never through float."""

from __future__ import annotations

from decimal import ROUND_HALF_UP, Decimal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracer.kineto.numbers import MAX_US, int64_column, nanoseconds


def convert(*texts: str) -> list[int | None]:
    values, valid = nanoseconds([text.encode() for text in texts])
    return [int(v) if ok else None for v, ok in zip(values, valid, strict=True)]


def test_epoch_microseconds_keep_every_nanosecond() -> None:
    # float("1712195495519761.132") is ...761.25: a float64 there has 0.25 us resolution
    assert convert("1712195495519761.132") == [1712195495519761132]
    assert convert("1661203462598738", "4458676522690.655", "0.001") == [1661203462598738000, 4458676522690655, 1]


def test_odd_but_valid_numbers() -> None:
    assert convert("1.5e3", '"42.5"', "12.", ".5", "-3.25", "1E-3") == [1_500_000, 42500, 12000, 500, -3250, 1]


def test_fourth_digit_rounds_half_up() -> None:
    assert convert("1.0004", "1.0005", "1.9999999") == [1000, 1001, 2000]


@pytest.mark.parametrize("text", ["", "null", "NaN", "Infinity", "-Infinity", "true", '"x"', "[1]", "{}", "1.2.3",
                                  "--1", "1e999999999", "99999999999999999999", "[\n1\n]"])
def test_no_number_is_not_valid(text: str) -> None:
    assert convert("7", text, "8") == [7000, None, 8000]


def test_empty() -> None:
    values, valid = nanoseconds([])
    assert len(values) == len(valid) == 0


@given(st.lists(st.decimals(min_value=-MAX_US, max_value=MAX_US, allow_nan=False, places=3), min_size=1))
def test_agrees_with_decimal(numbers: list[Decimal]) -> None:
    texts = [f"{number:f}" for number in numbers]
    assert convert(*texts) == [int((n * 1000).to_integral_value(ROUND_HALF_UP)) for n in numbers]


def test_integer_columns_survive_what_does_not_fit() -> None:
    assert int64_column([1, 2**64 - 1, "13248", "x", None]).tolist() == [1, -1, 13248, -1, -1]
    assert int64_column([3, 4]).dtype == np.int64
