"""Products of a whole step run no faster than the board's power lets them."""

from dataclasses import replace

import numpy as np
import pytest

from kernel_models.device import device
from kernel_models.families.gemm import gemm
from kernel_models.op_call import Family, OpCall
from kernel_models.pricing import price, sustained, sustained_tflops


def product(size: int, dtype: str = "bf16") -> OpCall:
    return next(gemm(1, size, size, size, dtype, "nt"))


def test_a_large_product_ends_at_the_rate_that_the_power_feeds() -> None:
    spec = device("b200")
    burst = price([product(16_384)], spec)
    slowed = sustained(burst, spec)
    rate = burst.calls[0].flops / slowed.times_us[0] / 1e6
    assert rate == pytest.approx(sustained_tflops(spec, "bf16"))
    assert slowed.times_us[0] > 1.4 * burst.times_us[0]
    # The interval keeps its relative width.
    np.testing.assert_allclose(slowed.low_us / slowed.time_us, burst.low_us / burst.time_us)


def test_more_power_is_never_slower_and_enough_of_it_changes_nothing() -> None:
    spec = device("h100-sxm")
    calls = [product(size) for size in (512, 2048, 8192, 16_384)]
    burst = price(calls, spec).times_us
    before = np.full(len(calls), np.inf)
    for watts in (350.0, 500.0, 700.0, 5_000.0):
        now = sustained(price(calls, spec), replace(spec, power_w=watts)).times_us
        assert (now <= before).all() and (now >= burst).all()
        before = now
    np.testing.assert_array_equal(before, burst)


def test_small_products_and_traffic_are_left_alone() -> None:
    spec = device("b200")
    calls = [product(256), OpCall(Family.ELEMENTWISE, "add", (10**8, 2, 2 * 10**8), "bf16", bytes_read=4e8,
                                  bytes_written=2e8)]
    burst = price(calls, spec)
    np.testing.assert_array_equal(sustained(burst, spec).times_us, burst.times_us)


def test_an_8_bit_product_takes_less_energy_than_a_16_bit_one_and_more_than_half() -> None:
    spec = device("h200-sxm")
    assert 1.5 < sustained_tflops(spec, "fp8") / sustained_tflops(spec, "bf16") < 2


@pytest.mark.parametrize("name", ["v100-sxm2-32g", "rtx-4090", "cpu"])
def test_a_board_of_which_nothing_is_known_is_not_limited(name: str) -> None:
    assert sustained_tflops(device(name), "bf16") == np.inf
