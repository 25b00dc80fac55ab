"""What rows of tables cost by their precision and by the memory they lie in: laws, and an LRU cache in a simulation."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_models.device import device
from kernel_models.heuristics.roofline import RooflineModel
from kernel_models.lookups import PartCosts, backward_call, forward_call
from kernel_models.op_call import Family, OpCall, TablePart, Times
from tracer.lookup_data.tables import EmbeddingTable, distinct_of_zipf, lru_misses

H100 = device("h100-sxm")


def times(calls: list[OpCall], on: str = "h100-sxm") -> Times:
    return RooflineModel(Family.EMBEDDING, device(on)).predict(calls)


def forward_us(table: EmbeddingTable, samples: int = 4096, on: str = "h100-sxm") -> float:
    return float(times([forward_call([TablePart.of(table, samples)])], on).time_us[0])


def backward_us(table: EmbeddingTable, samples: int = 4096) -> float:
    return float(times([backward_call([TablePart.of(table, samples)])]).time_us[0])


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 128), st.integers(1, 10**8), st.integers(1, 10**5), st.integers(1, 200),
       st.sampled_from((0.0, 0.7, 1.2)))
def test_a_larger_precision_is_never_cheaper(quads: int, rows: int, samples: int, bag: int, skew: float) -> None:
    table = EmbeddingTable("t", rows, 4 * quads, bag=bag, skew=skew, optimizer="none")
    costs = [forward_us(replace(table, dtype=dtype), samples) for dtype in ("int4", "int8", "fp16", "fp32")]
    sizes = [replace(table, dtype=dtype).weight_bytes for dtype in ("int4", "int8", "fp16", "fp32")]
    assert all(more >= less * (1 - 1e-9) for less, more in pairwise(costs))
    assert sizes == sorted(sizes)


def test_int4_halves_the_elements_bytes_and_its_look_ups_move_fewer() -> None:
    table = EmbeddingTable("t", 10**8, 256, bag=50, optimizer="none")
    int4, int8, fp16 = (replace(table, dtype=dtype) for dtype in ("int4", "int8", "fp16"))
    assert int4.weight_bytes / int8.weight_bytes == pytest.approx(0.5, abs=0.03)
    few, more, most = (forward_us(table, 10**5) for table in (int4, int8, fp16))
    assert few < 0.8 * more and more < 0.8 * most
    whole, half = (forward_call([TablePart.of(replace(int8, output_dtype=dtype), 4096)]) for dtype in ("fp32", "fp16"))
    assert whole.bytes_written == 2 * half.bytes_written and whole.flops > 256 * 50 * 4096
    stored = times([OpCall(Family.EMBEDDING, "bag", (10**7, 10**5, 10**7, 128, 1), dtype)
                    for dtype in ("int4", "int8", "fp16", "fp32")]).time_us
    assert (np.diff(stored) > 0).all()


def test_fbgemms_inference_has_its_precision_and_its_memory() -> None:
    from step_views.cli.price import calls_to_price

    name = "fbgemm::int_nbit_split_embedding_codegen_lookup_function"
    # Two tables of 1,000 rows of 128 columns: 80 bytes a row in int4.
    sizes = "{near},{far},2,2,2,3," + "none," * 6 + "20000,513,none,none,none,{kept}"
    values = ["total_D=256", "max_int4_D=128"]
    near, = calls_to_price(name, sizes.format(near=160_000, far="none", kept="none"), "int64", values)[0]
    far, = calls_to_price(name, sizes.format(near=0, far=160_000, kept="none"), "int64", values)[0]
    cached, = calls_to_price(name, sizes.format(near=0, far=160_000, kept=32_000), "int64", values)[0]
    assert (near.dtype, near.dims, near.flags) == ("int4", (20_000, 512, 1000, 128, 2), ())
    assert [part.location for part in far.accesses] == ["uvm"] * 2 and far.flags == ("host_rows",)
    assert {part.location for part in cached.accesses} == {"uvm_cached"}
    assert times([near]).time_us[0] < times([cached]).time_us[0]
    assert times([near]).time_us[0] < times([far]).time_us[0]


# The host's memory

FAR = EmbeddingTable("t", 10**7, 64, bag=20, skew=0.9, location="uvm_cached")


@pytest.mark.parametrize("skew", [0.0, 0.8, 1.2])
def test_misses_are_those_of_a_simulated_cache(skew: float) -> None:
    draw, rows, lookups, kept = np.random.default_rng(0), 1000, 300, 250
    chances = np.arange(1.0, rows + 1) ** -skew
    cache: OrderedDict[int, None] = OrderedDict()
    missed = []
    for _ in range(120):
        batch = np.unique(draw.choice(rows, lookups, p=chances / chances.sum())).tolist()
        missed.append(sum(row not in cache for row in batch))
        for row in batch:
            cache[row] = None
            cache.move_to_end(row)
        while len(cache) > kept:
            cache.popitem(last=False)
    assert lru_misses(lookups, rows, skew, kept) == pytest.approx(np.mean(missed[30:]), rel=0.08)
    falling = [lru_misses(lookups, rows, skew, share * rows) for share in (0.3, 0.5, 0.8, 1.0)]
    assert falling == sorted(falling, reverse=True) and falling[-1] == 0
    assert lru_misses(lookups, rows, skew, 0) == lookups
    assert falling[0] <= distinct_of_zipf(lookups, rows, skew) * (1 + 1e-6)  # a batch fits: no row comes twice


def test_rows_in_the_hosts_memory_cost_more_the_less_the_device_keeps() -> None:
    near = replace(FAR, location="hbm")
    tables = [near, *(replace(FAR, cache_load_factor=share) for share in (0.9, 0.5, 0.2, 0.02)),
              replace(FAR, location="uvm")]
    costs = [forward_us(table) + backward_us(table) for table in tables]
    assert costs == sorted(costs) and forward_us(tables[-1]) > forward_us(tables[3])
    assert forward_us(replace(FAR, skew=1.3)) < forward_us(FAR)
    assert forward_us(replace(FAR, bag=40)) > forward_us(FAR)
    assert forward_us(replace(FAR, columns=128)) > forward_us(FAR)
    # Rows that are only looked up are not written back.
    assert forward_us(replace(FAR, optimizer="none")) < forward_us(FAR)
    # The interval is wider, and no fitted model takes them.
    beside, beyond = (forward_call([TablePart.of(tables[at], 4096)]) for at in (0, -1))
    found = times([beside, beyond])
    width = np.log(found.high_us / found.low_us)
    assert width[1] > width[0] + 0.5 and (beside.flags, beyond.flags) == ((), ("host_rows",))


def test_the_link_is_the_devices() -> None:
    far = replace(FAR, location="uvm")
    # 1.6 million rows of 256 bytes over 63 GB/s of PCIe 5, of which look-ups reach 0.8; over 450 GB/s of NVLink-C2C.
    moved = 20 * 4096 * (256 + 128 * np.exp(-2))
    assert forward_us(far) == pytest.approx(moved / 63e3 / 0.802, rel=0.15)
    assert forward_us(far, on="gb200") < 0.3 * forward_us(far)


def test_gradients_update_rows_where_they_lie() -> None:
    near = replace(FAR, location="hbm")
    assert backward_us(replace(FAR, location="uvm")) > 2 * backward_us(near)
    assert backward_us(FAR) == pytest.approx(backward_us(near))  # the cache has all rows of the batch by then
    # Adam's two numbers an element stay with the weights, row-wise Adagrad's number a row on the device.
    assert backward_us(replace(FAR, optimizer="adam")) > 2 * backward_us(replace(near, optimizer="adam"))
    parts = [TablePart.of(replace(FAR, location=where), 4096) for where in ("hbm", "uvm_cached", "uvm")]
    costs: Any = PartCosts.of(parts, H100).forward
    assert list(costs.stream_us) == sorted(costs.stream_us)
    half = PartCosts.of([parts[2].cut(0.5)], H100).forward
    assert half.stream_us[0] == pytest.approx(0.5 * costs.stream_us[2], rel=0.01)
