"""One account of memory: its parts are those a trace follows, they add up, and one sentence says what does not fit."""

from __future__ import annotations

from dataclasses import fields

from hypothesis import given
from hypothesis import strategies as st

from tracer.memory_account import PEAK, Holds, MemoryAccount, binary_size

BYTES = st.integers(0, 1 << 40)


def test_there_is_a_part_for_everything_that_bytes_are_for() -> None:
    assert [field.name for field in fields(MemoryAccount)] == [what.value for what in Holds]


@given(st.dictionaries(st.sampled_from([what.value for what in Holds]), BYTES), BYTES)
def test_the_parts_of_a_traced_step_add_up_to_its_peak(parts: dict[str, int], more: int) -> None:
    peak = sum(parts.values()) + more
    account = MemoryAccount.of_trace({**parts, PEAK: peak, "peak_blocks": 2 * peak, "start": 3})
    assert account.total == peak == sum(account.parts.values())
    assert account.other == parts.get("other", 0) + more


def test_what_does_not_fit_is_one_sentence() -> None:
    account = MemoryAccount(parameters=60e9, activations=30e9)
    assert account.lacking(90e9, "h200-sxm") is None and account.lacking(0, "an unknown device") is None
    assert account.lacking(80e9, "h100-sxm") == (
        "It does not fit: it needs more than the 80 GB of h100-sxm; choose a larger device, a smaller batch, or "
        "recomputation.")


def test_it_is_written_with_its_parts() -> None:
    account = MemoryAccount(parameters=1 << 30, optimizer_state=1 << 29)
    assert str(account) == "1.50 GiB (parameters 1.00 GiB, optimizer state 512.00 MiB)"
    assert str(MemoryAccount()) == binary_size(0) == "0 B"
