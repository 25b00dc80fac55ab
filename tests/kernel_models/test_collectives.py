"""Collectives: conventions, topologies and formulas, with answers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from kernel_models.collectives import (
    CollectiveBatch,
    CollectiveCall,
    CollectiveKind,
    CommError,
    CommProfile,
    Level,
    Placement,
    bus_factor,
    collective_kind,
    find_topology,
    uneven_all_to_all,
)
from kernel_models.collectives.datasheet import (
    Algorithm,
    DatasheetModel,
    Protocol,
    RankGroup,
    algorithm_label,
    lines,
    nccl_lines,
)
from kernel_models.collectives.price import overlap_slowdown
from kernel_models.collectives.topology import networks, node_names, node_type, read_node
from kernel_models.device import device

KINDS = list(CollectiveKind)


def test_names_of_collectives_and_their_bus_factors():
    names = ("AllReduce", "alltoall_perf", "reduce_scatter_tensor", "send", "all-gather", "sendrecv", "all_to_allv")
    assert [collective_kind(name).label for name in names] == [
        "all_reduce", "all_to_all", "reduce_scatter", "send_recv", "all_gather", "send_recv", "all_to_all"]
    with pytest.raises(CommError, match=r"'gossip' is no collective .* all_reduce"):
        collective_kind("gossip")
    assert bus_factor(CollectiveKind.ALL_REDUCE, 8) == pytest.approx(1.75)
    assert bus_factor(CollectiveKind.ALL_GATHER, 3) == pytest.approx(2 / 3)
    assert bus_factor(CollectiveKind.ALL_TO_ALL, 5) == pytest.approx(0.8)
    assert bus_factor(CollectiveKind.BROADCAST, 7) == 1.0
    assert all(bus_factor(kind, 1) == 0.0 for kind in KINDS)


def test_one_rank_and_zero_bytes_take_no_time_but_a_barrier_takes_that_of_four_bytes():
    profile = CommProfile(find_topology("dgx-h100"))
    for kind in KINDS:
        times = profile.predict(CollectiveBatch.of(kind, [0, 1, 1e9], Placement((1,))))
        assert times.time_us.tolist() == times.high_us.tolist() == [0.0, 0.0, 0.0]
        assert set(times.level) == {int(Level.NOTHING_TO_DO)}
        time_us = profile.predict(CollectiveBatch.of(kind, 0, Placement((8,)))).time_us[0]
        # Ring and LL: 6.6 + 14 steps of 0.6 us, and 4 bytes.
        assert time_us == pytest.approx(15.0, abs=0.01) if kind is CollectiveKind.BARRIER else time_us == 0.0


A2A, KIND = CollectiveKind.ALL_TO_ALL, CollectiveKind.ALL_REDUCE
CARD = 25 * 0.994 * 0.92  # GB/s of a node's network card, less headers
LINES = {
    # 2(n-1) = 4 steps of 3.4 us after 8.4 us; 4/3 of the bytes over 300 * 0.8 * 0.92 GB/s.
    "a ring of three": ("dgx-a100", KIND, RankGroup(3, 1, 3, 3), Algorithm.RING, Protocol.SIMPLE,
                        8.4 + 4 * 3.4, 4 / 3 / 220.8),
    # 2/3 of the bytes on the ring, 1/3 through 24 channels of 20 GB/s.
    "a gather copies its own part too": (
        "dgx-a100", CollectiveKind.ALL_GATHER, RankGroup(3, 1, 3, 3), Algorithm.RING, Protocol.SIMPLE,
        8.4 + 2 * 3.4, 2 / 3 / 220.8 + 1 / 3 / 480),
    # 30 steps in all, 2 * 2 of them across.
    "a ring over two nodes has network steps": ("dgx-a100x2", KIND, RankGroup(16, 2, 8, 8), Algorithm.RING,
                                                Protocol.LL, 6.6 + 26 * 0.6 + 4 * 2.7, None),
    # Seven ranks here and one there: the one rank's card carries the ring.
    "an uneven ring is held up by its narrowest node": (
        "dgx-a100x2", KIND, RankGroup(8, 2, 7, 1), Algorithm.RING, Protocol.SIMPLE, None, 1.75 / CARD),
    # The single rank sends 7/8 of its bytes over its card; the seven send 7/8 over seven cards together.
    "so is an all-to-all": ("dgx-a100x2", A2A, RankGroup(8, 2, 7, 1), Algorithm.DIRECT, Protocol.SIMPLE, None,
                            7 / 8 / CARD + 1 / 8 / 480),
    # 2 * (8.4 + 3 * 3.4) inside, 8.4 + 2 * 14 across; 2 * 3/4 over NVLink and 2 * 1/2 over four cards.
    "a hierarchical all-reduce": ("dgx-a100x2", KIND, RankGroup(8, 2, 4, 4), Algorithm.HIERARCHICAL, Protocol.SIMPLE,
                                  2 * (8.4 + 3 * 3.4) + 8.4 + 28, 1.5 / 220.8 + 1 / (4 * CARD)),
}


@pytest.mark.parametrize("case", LINES)
def test_latency_and_rate_of_an_algorithm_are_those_on_paper(case):
    cluster, kind, group, algorithm, protocol, latency_us, us_per_kb = LINES[case]
    (way,) = (way for way in lines(find_topology(cluster), kind, group)
              if way.algorithm is algorithm and way.protocol is protocol)
    assert latency_us is None or way.latency_us == pytest.approx(latency_us)
    assert us_per_kb is None or way.us_per_byte == pytest.approx(us_per_kb * 1e-3)


def test_the_switch_reduces_large_messages_of_full_h100_nodes_only():
    model = DatasheetModel(find_topology("dgx-h100"))

    def chosen(size: float, ranks: int) -> str:
        times = model.predict(CollectiveBatch.of(CollectiveKind.ALL_REDUCE, size, Placement((ranks,))))
        return algorithm_label(int(times.algorithm[0]))

    # As observed on 8 x H200: ring/LL up to 1 MiB, NVLS from 2 MiB.
    assert [chosen(2.0**20, 8), chosen(2.0**21, 8)] == ["ring/LL", "nvls/Simple"]
    assert chosen(2.0**29, 2) == "ring/Simple"
    # Uneven groups have neither a hierarchy nor the switch.
    uneven = {w.algorithm for w in lines(find_topology("dgx-h100x2"), CollectiveKind.ALL_REDUCE, RankGroup(8, 2, 7, 1))}
    assert uneven == {Algorithm.RING, Algorithm.TREE}


@pytest.mark.parametrize(("name", "ranks", "kind", "more"), [
    ("dgx-h100", 4, CollectiveKind.ALL_REDUCE, 4.4), ("dgx-h200", 8, CollectiveKind.ALL_REDUCE, 4.4),
    ("dgx-h100", 2, CollectiveKind.SEND_RECV, 0.0), ("dgx-a100", 4, CollectiveKind.ALL_REDUCE, 0.0),
    ("dgx-h100x2", 16, CollectiveKind.ALL_REDUCE, 0.0)])
def test_simple_starts_later_than_the_tuner_has_it_in_hopper_nodes_alone(
        name: str, ranks: int, kind: CollectiveKind, more: float):
    where, sizes = find_topology(name), np.geomspace(2.0**10, 2.0**30, 200)
    place = where.first(ranks)
    ways = nccl_lines(where, kind, RankGroup(ranks, place.nodes, place.widest, place.narrowest))
    times = DatasheetModel(where).predict(CollectiveBatch.of(kind, sizes, place))
    tuner = np.min([way.latency_us + way.us_per_byte * sizes for way in ways], axis=0)
    simple = np.array([algorithm_label(int(code)).endswith("Simple") for code in times.algorithm])
    assert times.time_us - tuner == pytest.approx(more * simple)
    assert simple.any() and (np.diff(times.time_us) > 0).all()


def test_names_of_topologies():
    assert (find_topology("dgx-h100").gpus, find_topology("dgx-h100x16").gpus) == (8, 128)
    assert find_topology("dgx-a100x4@roce-100").network.title.startswith("RoCE")
    assert find_topology("dgx-a100x4@roce-100").name == "dgx-a100x4@roce-100"
    assert find_topology("HGX-A100-4").gpus == 4
    full, half = find_topology("dgx-h100x4"), find_topology("dgx-h100x4", 2.0)
    assert half.node_gbps(8) == pytest.approx(full.node_gbps(8) / 2)
    with pytest.raises(CommError, match="oversubscription"):
        find_topology("dgx-h100x4", 0.5)
    for name in node_names():
        assert find_topology(f"{name}x3").nodes == 3
    for wrong, said in (("dgx-h10", "did you mean dgx-h100"), ("dgx-h100x0", "0 nodes"), ("", "no node type"),
                        ("dgx-h100@token-ring", "token-"), ("../dgx-h100", "no node type"), ("networks", "no node")):
        with pytest.raises(CommError, match=said):
            find_topology(wrong)


@pytest.mark.parametrize("name", node_names())
def test_every_figure_of_a_node_has_a_source_and_agrees_with_its_device(name):
    node = node_type(name)
    assert node.name == name
    assert set(node.sources) == {"gpus", "peer_gbps", "nics", "in_switch_reduction"} and all(node.sources.values())
    assert node.network in networks()
    gpu = device(node.device)
    assert gpu.architecture == node.architecture or node.link == "loopback"
    if name in ("lassen", "frontier"):  # links of one machine: some go to the processors, or only to the next die
        assert 0 < node.peer_gbps < gpu.peer_gbps
    elif node.link in ("nvswitch", "nvlink-mesh"):
        assert node.peer_gbps == gpu.peer_gbps
    elif node.link == "pcie":
        assert node.peer_gbps == gpu.host_gbps


def test_every_network_has_sources_and_a_rate_and_a_broken_node_file_is_told_in_one_sentence(tmp_path):
    for network in networks().values():
        assert network.card_gbps > 1 and 0.9 < network.payload_share < 1
        assert set(network.sources) == {"card_gbps", "payload_share", "extra_latency_us", "oversubscription"}
    path = tmp_path / "box.toml"
    path.write_text('name = "box"\ndevice = "x"\narchitecture = "x"\nlink = "string"\nnetwork = "ib-hdr"\n'
                    '[sources]\na = "b"\n[figures]\ngpus = { value = 8, source = "a" }\n')
    with pytest.raises(CommError, match=r"box\.toml is no node type: it lacks figures\.peer_gbps; expected"):
        read_node(path)
    path.write_text("name = ")
    with pytest.raises(CommError, match="is no TOML"):
        read_node(path)


def test_where_ranks_lie():
    cluster = find_topology("dgx-a100x2")
    assert cluster.place([0, 1, 2, 8]).per_node == (3, 1)
    assert cluster.place(range(0, 16, 8)).per_node == (1, 1)
    assert cluster.first(11).per_node == (8, 3)
    assert Placement.even(7, 3).per_node == (3, 3, 1)
    for ranks, said in (([0, 0], "twice"), ([16], "no GPU"), ([-1], "no GPU")):
        with pytest.raises(CommError, match=said):
            cluster.place(ranks)
    for place in (lambda: cluster.first(17), lambda: Placement((4, 0)), lambda: Placement.even(0, 8)):
        with pytest.raises(CommError):
            place()


def test_an_uneven_all_to_all_is_as_large_as_its_busiest_rank():
    # Rank 0 sends 6 and 2 to the others, and receives 1 + 1: 8 bytes leave it, as in an even one of 12 bytes.
    assert uneven_all_to_all([[5, 6, 2], [1, 0, 0], [1, 0, 0]]) == pytest.approx(8 * 3 / 2)
    # Rank 2 receives 9 from everybody together.
    assert uneven_all_to_all([[0, 0, 4], [0, 0, 5], [0, 0, 7]]) == pytest.approx(9 * 3 / 2)
    # Even: the payload itself; one rank: what it keeps.
    assert uneven_all_to_all(np.full((4, 4), 2.0)) == pytest.approx(8.0)
    assert uneven_all_to_all([[3.0]]) == 3.0
    with pytest.raises(CommError, match="square table"):
        uneven_all_to_all([[1, 2]])


@pytest.mark.parametrize("name", node_names())
def test_formulas_never_fall_with_size_and_contain_themselves(name):
    profile = CommProfile(find_topology(f"{name}x4"))
    sizes = np.geomspace(1, 2**34, 100)
    for kind in KINDS:
        for placement in ((2,), (3, 1), (4, 4), (4, 4, 4, 1)):
            times = profile.predict(CollectiveBatch.of(kind, sizes, Placement(placement)))
            assert (np.diff(times.time_us) >= 0).all() and (times.time_us > 0).all()
            assert (times.low_us < times.time_us).all() and (times.time_us < times.high_us).all()
    calls = [CollectiveCall(CollectiveKind.ALL_GATHER, 2.0**i, Placement.even(n, 8), "float16")
             for i in (10, 20) for n in (3, 8, 12)]
    together = profile.predict(CollectiveBatch.from_calls(calls))
    alone = [profile.predict(CollectiveBatch.of(call.kind, call.payload_bytes, call.placement, call.dtype))
             for call in calls]
    assert [one.time_us[0] for one in alone] == together.time_us.tolist()


def test_overlap_takes_multiprocessors_and_memory():
    h100 = device("h100-sxm")
    slow = overlap_slowdown(h100, busbw_gbps=335.0)
    assert slow.compute_bound == pytest.approx(132 / 108)
    # 2 * 335 of 3350 GB/s are taken: what needs all of the memory runs at 80%; together they ask for 120%.
    assert slow.memory_bound == pytest.approx(1.25) and slow.collective == pytest.approx(1.2)
