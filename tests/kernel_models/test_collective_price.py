"""What collectives cost: every level behind one function, down to a ring where no cluster is given."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kernel_models.collectives import (
    CollectiveCall,
    CollectiveKind,
    CollectiveModel,
    CommProfile,
    Level,
    Placement,
    find_topology,
    make_measurements,
    price_calls,
)
from kernel_models.collectives.price import RING_EFFICIENCY, RING_US
from kernel_models.device import device
from kernel_models.op_call import Source
from tracer.parallel_plan import PlanError

KINDS = CollectiveKind
H100 = device("h100-sxm")
SIZE = 64 * 2.0**20


@pytest.mark.parametrize(("kind", "ranks", "crossing"), [
    (KINDS.ALL_REDUCE, 8, 14 / 8), (KINDS.ALL_GATHER, 8, 7 / 8), (KINDS.REDUCE_SCATTER, 4, 3 / 4),
    (KINDS.SEND_RECV, 2, 1.0), (KINDS.BROADCAST, 8, 1.0)])
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
    calls = [CollectiveCall(KINDS.ALL_REDUCE, SIZE, Placement((1,))),
             CollectiveCall(KINDS.ALL_TO_ALL, 0, Placement((4,)))]
    for on in (H100, CollectiveModel(find_topology("dgx-h100"))):
        times = price_calls(calls, on)
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
    assert price_calls([call], H100).level[0] == Level.LINKS


def test_a_backend_of_which_nothing_is_known_is_refused() -> None:
    with pytest.raises(PlanError, match="Nothing is known of gloo's collectives on dgx-h100"):
        CollectiveModel(find_topology("dgx-h100"), None, "gloo")
