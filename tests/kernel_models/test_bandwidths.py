"""Measured bus bandwidths: what was measured comes out again, other groups follow, and what is no bandwidth is
refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_models.collectives import (
    CollectiveCall,
    CollectiveKind,
    CollectiveModel,
    CommError,
    Placement,
    find_topology,
    price_calls,
)
from kernel_models.collectives.bandwidths import LARGE, BusBandwidths
from kernel_models.collectives.call import Level, bus_factor
from kernel_models.op_call import Source
from tracer.table_input import TableInputError

TEXT = "1:458/265/265,16:52/27/27"


def _us(kind: CollectiveKind, payload: float, per_node: tuple[int, ...], text: str = "") -> float:
    on = CollectiveModel(find_topology("dgx-h100x16"), bandwidths=BusBandwidths.parse(text) if text else None)
    return float(price_calls([CollectiveCall(kind, payload, Placement(per_node), "bfloat16")], on).time_us[0])


@pytest.mark.parametrize(("kind", "nodes", "gbps"), [
    (CollectiveKind.ALL_REDUCE, 1, 458), (CollectiveKind.ALL_GATHER, 1, 265), (CollectiveKind.ALL_REDUCE, 16, 52),
    (CollectiveKind.REDUCE_SCATTER, 16, 27)])
def test_what_was_measured_comes_out(kind: CollectiveKind, nodes: int, gbps: float) -> None:
    us = _us(kind, LARGE, (8,) * nodes, TEXT)
    assert 1e-3 * bus_factor(kind, 8 * nodes) * LARGE / us == pytest.approx(gbps, rel=0.03)


def test_a_busbw_that_falls_with_the_nodes_is_a_latency_and_no_lost_bandwidth() -> None:
    small, large = (_us(CollectiveKind.ALL_GATHER, size, (8,) * 16, TEXT) for size in (1e3, 64 * LARGE))
    assert small > 1e4 > 100 * _us(CollectiveKind.ALL_GATHER, 1e3, (8,) * 16) / 10
    assert 1e-3 * bus_factor(CollectiveKind.ALL_GATHER, 128) * 64 * LARGE / large > 100
    assert BusBandwidths.parse(TEXT).on(find_topology("dgx-h100x16")).hop_us == pytest.approx(297, rel=0.02)  # type: ignore[union-attr]


def test_nodes_in_between_lie_in_between_and_other_kinds_follow_the_quickest() -> None:
    def gather(nodes: int) -> float:
        us = _us(CollectiveKind.ALL_GATHER, LARGE, (8,) * nodes, TEXT)
        return 1e-3 * bus_factor(CollectiveKind.ALL_GATHER, 8 * nodes) * LARGE / us

    assert 27 < gather(8) < gather(4) < gather(2) < 265
    alone = "1:100"  # all-reduce, at less than a quarter of what the data sheet says
    assert _us(CollectiveKind.SEND_RECV, LARGE, (2,), alone) > 3 * _us(CollectiveKind.SEND_RECV, LARGE, (2,))
    assert _us(CollectiveKind.ALL_REDUCE, LARGE, (8, 8), alone) == _us(CollectiveKind.ALL_REDUCE, LARGE, (8, 8))


def test_the_source_is_measured_where_it_was() -> None:
    on = CollectiveModel(find_topology("dgx-h100x16"), bandwidths=BusBandwidths.parse(TEXT))
    calls = [CollectiveCall(CollectiveKind.ALL_REDUCE, LARGE, Placement(each), "bfloat16")
             for each in ((8,) * 16, (1,) * 16)]
    times = price_calls(calls, on)
    assert [Level(int(each)).source for each in times.level] == [Source.MEASURED, Source.LEARNED]
    assert (times.low_us < times.time_us).all() and (times.time_us < times.high_us).all()


def test_a_table_says_the_same(tmp_path: Path) -> None:
    path = tmp_path / "bus.csv"
    path.write_text("nodes,all_reduce_gbps,all_gather_gbps,reduce_scatter_gbps\n1,458,265,265\n16,52,27,27\n")
    assert BusBandwidths.read(str(path)) == BusBandwidths.parse(TEXT)
    path.write_text("nodes,all_reduce_gbps\n1,fast\n")
    with pytest.raises(TableInputError, match="'fast' is no busbw in GB/s"):
        BusBandwidths.read(str(path))


def test_no_bandwidths() -> None:
    assert BusBandwidths.parse("comm.json") is None
    for text, says in (("0/1/2", "is no bandwidth in GB/s"), ("1:5,1:6", "gives 1 nodes twice")):
        with pytest.raises(CommError, match=says):
            BusBandwidths.parse(text)


def test_a_node_that_was_not_measured_is_the_data_sheets() -> None:
    both, alone = (_us(CollectiveKind.ALL_GATHER, 64e6, (8,) * 16, text) for text in (TEXT, "16:52/27/27"))
    assert alone == pytest.approx(both, rel=0.1)


@pytest.mark.parametrize("text", ["0:4/4/4", "9" * 20 + ":4/4/4", "1:nan/1/1", "-1:4/2/2", "1.5:4/4/4"])
def test_numbers_of_nodes_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(CommError, match=r"no (number of nodes|bandwidth of a number)"):
        BusBandwidths.parse(text)
