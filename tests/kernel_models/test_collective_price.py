"""What collectives cost: every level behind one function, down to a ring where no cluster is given.

Measured bus bandwidths come out again; the backend that does a collective is the one whose curve lies lowest.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kernel_models.collectives import (
    CollectiveBatch,
    CollectiveCall,
    CollectiveKind,
    CollectiveMeasurements,
    CollectiveModel,
    CommError,
    CommProfile,
    Level,
    Placement,
    find_topology,
    make_measurements,
    price_calls,
)
from kernel_models.collectives.bandwidths import LARGE, BusBandwidths
from kernel_models.collectives.call import bus_factor
from kernel_models.collectives.measurements import join
from kernel_models.collectives.price import PINNED, RING_EFFICIENCY, RING_US, SWITCH_US, Backends
from kernel_models.device import device
from kernel_models.op_call import Source
from tracer.parallel_plan import PlanError
from tracer.table_input import TableInputError

KINDS = CollectiveKind
H100 = device("h100-sxm")
SIZE = 64 * 2.0**20


@pytest.mark.parametrize(("kind", "ranks", "crossing"), [
    (KINDS.ALL_REDUCE, 8, 14 / 8), (KINDS.REDUCE_SCATTER, 4, 3 / 4), (KINDS.BROADCAST, 8, 1.0)])
def test_without_a_cluster_a_ring_runs_over_the_devices_links(kind: KINDS, ranks: int, crossing: float) -> None:
    times = price_calls([CollectiveCall(kind, SIZE, Placement((ranks,)))], H100)
    rate = H100.peer_gbps * RING_EFFICIENCY
    assert times.time_us[0] == pytest.approx(RING_US + crossing * SIZE / rate * 1e-3)
    assert [int(each) for each in times.level] == [Level.LINKS]
    assert Level.LINKS.source is Source.DATASHEET
    # A factor of two either way: twice as wide as what published constants of a cluster say.
    sheet = price_calls([CollectiveCall(kind, SIZE, Placement((ranks,)))], CollectiveModel(find_topology("dgx-h100")))
    assert np.log(times.high_us / times.low_us)[0] > np.log(sheet.high_us / sheet.low_us)[0]


def test_what_launches_nothing_takes_no_time() -> None:
    times = price_calls([CollectiveCall(KINDS.ALL_REDUCE, SIZE, Placement((1,))),
                         CollectiveCall(KINDS.ALL_TO_ALL, 0, Placement((4,)))], H100)
    assert times.time_us.tolist() == [0.0, 0.0] and set(times.level.tolist()) == {Level.NOTHING_TO_DO}
    barrier = price_calls([CollectiveCall(KINDS.BARRIER, 0, Placement((4,)))], H100)
    assert barrier.time_us[0] >= RING_US
    assert len(price_calls([], H100).time_us) == 0


def test_the_best_that_is_known_answers() -> None:
    where = find_topology("dgx-h100")
    call = CollectiveCall(KINDS.ALL_REDUCE, 2.0**20, Placement((8,)))
    profile = CommProfile.fit(make_measurements([("all_reduce", "float", Placement((8,)), 2.0**20 * n, 100.0 * n)
                                                 for n in (1, 2, 4)]), where)
    larger = replace(call, placement=Placement((8, 8)))
    found = price_calls([call, larger], CollectiveModel(find_topology("dgx-h100x2"), profile))
    assert found.time_us[0] == pytest.approx(100.0) and found.level[0] == Level.MEASURED
    assert found.level[1] > Level.MEASURED
    assert price_calls([call], CollectiveModel(where)).level[0] == Level.DATASHEET
    with pytest.raises(PlanError, match="Nothing is known of gloo's collectives on dgx-h100"):
        CollectiveModel(find_topology("dgx-h100"), None, "gloo")


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
    # A node that was not measured is the data sheet's.
    assert _us(CollectiveKind.ALL_REDUCE, LARGE, (8, 8), alone) == _us(CollectiveKind.ALL_REDUCE, LARGE, (8, 8))
    both, across = (_us(CollectiveKind.ALL_GATHER, 64e6, (8,) * 16, text) for text in (TEXT, "16:52/27/27"))
    assert across == pytest.approx(both, rel=0.1)


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
    number = r"no (number of nodes|bandwidth of a number)"
    for text, says in (("0/1/2", "is no bandwidth in GB/s"), ("1:5,1:6", "gives 1 nodes twice"), ("0:4/4/4", number),
                       ("9" * 20 + ":4/4/4", number), ("1:nan/1/1", number), ("1.5:4/4/4", number)):
        with pytest.raises(CommError, match=says):
            BusBandwidths.parse(text)


DGX, TWO = find_topology("dgx-h100"), find_topology("dgx-h100x2")
NODE = Placement((8,))
REDUCE, GATHER = CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER
SIZES = [2.0**i for i in range(10, 29, 2)]


def line(backend: str, latency_us: float, gbps: float, kind: str = "all_reduce") -> CollectiveMeasurements:
    return make_measurements([(kind, "half", NODE, size, latency_us + size / gbps * 1e-3) for size in SIZES], backend)


def calls(*sizes: float, kind: CollectiveKind = REDUCE) -> CollectiveBatch:
    return CollectiveBatch.of(kind, sizes, NODE, "half")


@pytest.fixture(scope="module")
def profile() -> CommProfile:
    """NCCL 20 µs + S at 200 GB/s, which gathers too; small 5 µs + S at 50 GB/s: equal at 1 MB."""
    return CommProfile.fit(join([line("nccl", 20, 200), line("small", 5, 50), line("nccl", 20, 200, "all_gather")]),
                           DGX)


def test_the_faster_backend_does_it_and_the_switch_is_paid(profile: CommProfile) -> None:
    free = Backends(DGX, profile, base="nccl", switch_us=0.0).choose(calls(4096.0, 0.98e6, 1.02e6, 64e6))
    assert [free.label(i) for i in range(4)] == ["small", "small", "nccl", "nccl"]
    # With 4.2 µs the two are equal at (15 - 4.2) / 0.015 = 720 kB.
    paid = Backends(DGX, profile, base="nccl").choose(calls(4096.0, 0.65e6, 0.8e6, 64e6))
    assert [paid.label(i) for i in range(4)] == ["small", "small", "nccl", "nccl"]
    assert paid.times.time_us[0] == pytest.approx(5 + 4096 / 50e3 + SWITCH_US, rel=0.02)
    assert paid.times.time_us[3] == pytest.approx(20 + 64e6 / 200e3, rel=0.02)
    assert (paid.times.low_us < paid.times.time_us).all() and (paid.times.time_us < paid.times.high_us).all()
    assert set(paid.times.level.tolist()) == {Level.MEASURED}
    assert free.sure.tolist() == [True, False, False, True]


def test_the_base_is_who_makes_the_step_fastest_and_can_do_all_of_it(profile: CommProfile) -> None:
    backends = Backends(DGX, profile)
    small = backends.choose(calls(4096.0, 8192.0))
    assert small.names[0] == "small" and (small.winner == 0).all()
    assert small.times.time_us == pytest.approx([5.08, 5.16], rel=0.02)
    both = calls(4096.0, 64e6)
    assert backends.choose(both).names[0] == "nccl"
    # Once the small one is done often, it is the other that pays for the switch.
    assert backends.choose(both, np.array([100.0, 1.0])).names[0] == "small"
    # What the small backend was not measured for is the usual one's, whatever a formula says of it.
    mixed = CollectiveBatch.from_calls([CollectiveCall(REDUCE, 4096.0, NODE, "float16")] * 9
                                       + [CollectiveCall(GATHER, 4096.0, NODE, "float16")])
    found = backends.choose(mixed)
    assert found.names[0] == "nccl" and [found.label(0), found.label(9)] == ["small", "nccl"]
    assert np.isnan(found.table_us[1, 9]) and np.isfinite(found.table_us[0]).all()


def test_a_model_that_mixes_prices_calls_by_the_best_of_them(profile: CommProfile) -> None:
    asked = [CollectiveCall(REDUCE, size, NODE, "float16") for size in (4096.0, 64e6)]
    mixed = CollectiveModel(DGX, profile, mixed=True)
    by_nccl = price_calls(asked, mixed.by_one())
    assert price_calls(asked, mixed).time_us == pytest.approx([5.08 + SWITCH_US, by_nccl.time_us[1]], rel=0.02)
    assert price_calls(asked, mixed.by_one("small")).time_us[0] == pytest.approx(5.08, rel=0.02)
    assert price_calls([], mixed).time_us.size == 0
    nothing = [CollectiveCall(REDUCE, 0.0, NODE), CollectiveCall(REDUCE, 1e6, Placement((1,)))]
    assert price_calls(nothing, mixed).time_us.tolist() == [0.0, 0.0]
    with pytest.raises(CommError, match="no backend 'none' to choose; there are nccl, small"):
        CollectiveModel(DGX, profile, "none", mixed=True)


def test_without_measurements_nccls_own_choice_is_the_best_of_its_algorithms() -> None:
    found = Backends(DGX, CommProfile(DGX)).choose(calls(1024.0, 1e6, 1e9))
    plain = CommProfile(DGX).predict(calls(1024.0, 1e6, 1e9))
    assert found.times.time_us.tolist() == plain.time_us.tolist() and (found.winner == 0).all()
    assert found.label(0) == "nccl (nvls/Simple)" or found.label(0).startswith("nccl (ring/")
    pinned = np.nanmin(found.table_us[1:], axis=0)
    assert pinned == pytest.approx(plain.time_us)
    assert found.names == ("nccl", *PINNED) and np.isnan(found.table_us[found.names.index("direct/LL")]).all()
    # Across nodes the hierarchical one may be worth its switch.
    found = Backends(TWO, CommProfile(TWO)).choose(CollectiveBatch.of(REDUCE, [1024.0, 1e6, 1e8], Placement((8, 8))))
    alone = found.table_us[found.names.index("hierarchical/Simple")]
    assert found.times.time_us == pytest.approx(np.minimum(found.table_us[0], alone + SWITCH_US))
