"""Which backend does a collective: curves whose crossing is known on paper, switches, NCCL's algorithms by formula."""

from __future__ import annotations

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
from kernel_models.collectives.measurements import join
from kernel_models.collectives.price import PINNED, SWITCH_US, Backends

H100, TWO = find_topology("dgx-h100"), find_topology("dgx-h100x2")
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
                           H100)


def test_the_faster_backend_does_it_and_the_switch_is_paid(profile: CommProfile) -> None:
    free = Backends(H100, profile, base="nccl", switch_us=0.0).choose(calls(4096.0, 0.98e6, 1.02e6, 64e6))
    assert [free.label(i) for i in range(4)] == ["small", "small", "nccl", "nccl"]
    # With 4.2 µs the two are equal at (15 - 4.2) / 0.015 = 720 kB.
    paid = Backends(H100, profile, base="nccl").choose(calls(4096.0, 0.65e6, 0.8e6, 64e6))
    assert [paid.label(i) for i in range(4)] == ["small", "small", "nccl", "nccl"]
    assert paid.times.time_us[0] == pytest.approx(5 + 4096 / 50e3 + SWITCH_US, rel=0.02)
    assert paid.times.time_us[3] == pytest.approx(20 + 64e6 / 200e3, rel=0.02)
    assert (paid.times.low_us < paid.times.time_us).all() and (paid.times.time_us < paid.times.high_us).all()
    assert set(paid.times.level.tolist()) == {Level.MEASURED}
    assert free.sure.tolist() == [True, False, False, True]


def test_the_base_is_who_makes_the_step_fastest_and_can_do_all_of_it(profile: CommProfile) -> None:
    backends = Backends(H100, profile)
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
    mixed = CollectiveModel(H100, profile, mixed=True)
    by_nccl = price_calls(asked, mixed.by_one())
    assert price_calls(asked, mixed).time_us == pytest.approx([5.08 + SWITCH_US, by_nccl.time_us[1]], rel=0.02)
    assert price_calls(asked, mixed.by_one("small")).time_us[0] == pytest.approx(5.08, rel=0.02)
    assert price_calls([], mixed).time_us.size == 0
    nothing = [CollectiveCall(REDUCE, 0.0, NODE), CollectiveCall(REDUCE, 1e6, Placement((1,)))]
    assert price_calls(nothing, mixed).time_us.tolist() == [0.0, 0.0]
    with pytest.raises(CommError, match="no backend 'none' to choose; there are nccl, small"):
        CollectiveModel(H100, profile, "none", mixed=True)


def test_without_measurements_nccls_own_choice_is_the_best_of_its_algorithms() -> None:
    found = Backends(H100, CommProfile(H100)).choose(calls(1024.0, 1e6, 1e9))
    plain = CommProfile(H100).predict(calls(1024.0, 1e6, 1e9))
    assert found.times.time_us.tolist() == plain.time_us.tolist() and (found.winner == 0).all()
    assert found.label(0) == "nccl (nvls/Simple)" or found.label(0).startswith("nccl (ring/")
    pinned = np.nanmin(found.table_us[1:], axis=0)
    assert pinned == pytest.approx(plain.time_us)
    assert found.names == ("nccl", *PINNED) and np.isnan(found.table_us[found.names.index("direct/LL")]).all()


def test_across_nodes_the_hierarchical_one_may_be_worth_its_switch() -> None:
    pair = CollectiveBatch.of(REDUCE, [1024.0, 1e6, 1e8], Placement((8, 8)))
    found = Backends(TWO, CommProfile(TWO)).choose(pair)
    alone = found.table_us[found.names.index("hierarchical/Simple")]
    expected = np.minimum(found.table_us[0], alone + SWITCH_US)
    assert found.times.time_us == pytest.approx(expected)
