"""Collectives of a recorded job on another network or on more ranks: by the models' ratio, jitter by its extremes."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from micro import Micro, read_ranks
from said import plain
from typer.testing import CliRunner

from foretrace.commands import app
from foretrace.edits import OnTopology, ScaleLink, ScaleOut
from graph_predictor.prediction.predictor import Baseline
from graph_predictor.prediction.scenario import EditError
from graph_predictor.recorded.facts import further_out, kernel_jitter
from graph_predictor.synthesis.baseline import baseline_of
from kernel_models.collectives import (
    CollectiveCall,
    CollectiveKind,
    CollectiveMeasurements,
    CollectiveModel,
    CommProfile,
    Placement,
    Topology,
    find_topology,
    make_measurements,
    planned_topology,
    price_calls,
    topology_of,
)
from kernel_models.collectives.call import CommError
from kernel_models.collectives.measurements import join
from kernel_models.device import device
from tracer.parallel_plan import PlanError, slowest_of
from tracer.shape_only.devices import device_names

ROOT = Path(__file__).resolve().parents[2]
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
ELEMENTS, TRANSFER = 16 << 20, 800
"""Of the all-reduce: floats of each rank, and µs recorded."""


def rank(number: int, world: int) -> Micro:
    """Three steps of 1,000 µs, in which the host waits for an all-reduce of the whole world.

        calls   |15 launch 20|  |25 synchronise ··························|
        kernel                 25 ───────────── all-reduce ──────────── 825       + 175 of host after it
    """
    args = {"Collective name": "allreduce", "Process Group Name": "dp",
            "Process Group Ranks": str(list(range(world))), "Group size": world, "In msg nelems": ELEMENTS,
            "Out msg nelems": ELEMENTS, "dtype": "Float"}
    trace = Micro(rank=number, world_size=world).calibrate()
    for n in range(3):
        at = 1000 + 1000 * n
        trace.step(at, at + 1000, n + 1)
        trace.launch(at + 15, 5, (20, at + 25, TRANSFER), name=NCCL, **args)
        trace.op("aten::item", at + 24, at + TRANSFER + 31)
        trace.call("cudaDeviceSynchronize", at + 25, TRANSFER + 5)
    return trace


def all_reduce_us(where: Topology, world: int) -> float:
    """What the model says of the recorded all-reduce on a cluster."""
    call = CollectiveCall(CollectiveKind.ALL_REDUCE, 4.0 * ELEMENTS, where.first(world), "float32")
    return float(price_calls([call], CollectiveModel(where)).time_us[0])


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Baseline:
    """Both ranks of a job on two A100."""
    return baseline_of(read_ranks([rank(0, 2), rank(1, 2)], tmp_path_factory.mktemp("pair")),
                       device=device("a100-sxm-80g"))


@pytest.mark.parametrize(("name", "faster"), [("dgx-h100", True), ("pcie-a100", False)])
def test_the_transfer_takes_the_models_ratio_and_nothing_else_changes(pair: Baseline, name: str, faster: bool) -> None:
    recorded = find_topology("dgx-a100")
    assert pair.predict().step_time_us == pair.predict([OnTopology(CollectiveModel(recorded))]).step_time_us == 1000
    said = pair.predict([OnTopology(CollectiveModel(find_topology(name)))])
    ratio = all_reduce_us(find_topology(name), 2) / all_reduce_us(recorded, 2)
    assert (ratio < 1) == faster
    assert said.step_time_us == pytest.approx(1000 - TRANSFER + TRANSFER * ratio, abs=0.01)
    assert said.interval_us[0] < said.step_time_us < said.interval_us[1]
    assert said.families_us == {"collective": pytest.approx(TRANSFER * ratio)}
    assert any("were recorded on dgx-a100 (the device's usual nodes)" in note for note in said.notes)


@pytest.mark.parametrize("factor", [0.25, 1.0, 4.0])
def test_faster_links_are_another_network(pair: Baseline, factor: float) -> None:
    usual = find_topology("dgx-a100")
    ratio = all_reduce_us(usual.with_links(factor), 2) / all_reduce_us(usual, 2)
    assert (ratio < 1) == (factor > 1) and (ratio == 1) == (factor == 1)
    said = pair.predict([ScaleLink(factor)])
    assert said.step_time_us == pytest.approx(1000 - TRANSFER + TRANSFER * ratio, abs=0.01)
    with pytest.raises(EditError, match="Links cannot be scaled by -1"):
        pair.predict([ScaleLink(-1.0)])


def test_one_recorded_rank_of_two_nodes_on_a_slower_or_too_small_network(tmp_path: Path) -> None:
    alone = baseline_of(rank(3, 16).read(tmp_path), device=device("h100-sxm"))
    slow, usual, small = find_topology("dgx-h100x2", 8.0), find_topology("dgx-h100x2"), find_topology("dgx-h100")
    ratio = all_reduce_us(slow, 16) / all_reduce_us(usual, 16)
    assert ratio > 1.5
    said = alone.predict([OnTopology(CollectiveModel(slow))])
    assert said.step_time_us == pytest.approx(1000 - TRANSFER + TRANSFER * ratio, abs=0.01)
    back = alone.predict([OnTopology(CollectiveModel(usual), slow)])
    assert back.step_time_us == pytest.approx(1000 - TRANSFER + TRANSFER / ratio, abs=0.01)
    with pytest.raises(EditError, match=r"16 ranks do not fit on dgx-h100, which has 8 GPUs; name .* dgx-h100x2"):
        alone.predict([OnTopology(CollectiveModel(small))])
    with pytest.raises(EditError, match="16 ranks do not fit on dgx-h100"):
        alone.predict([OnTopology(CollectiveModel(usual), small)])


def test_two_networks_contradict_each_other_and_none_is_needed_without_collectives(
        pair: Baseline, tmp_path: Path) -> None:
    edit, other = (OnTopology(CollectiveModel(find_topology(name))) for name in ("dgx-h100", "pcie-a100"))
    with pytest.raises(EditError, match="the network"):
        pair.predict([edit, other])
    plain = Micro().calibrate()
    for n in range(3):
        plain.step(1000 + 100 * n, 1100 + 100 * n, n + 1).launch(1010 + 100 * n, 5, (7, 1020 + 100 * n, 20))
    said = baseline_of(plain.read(tmp_path), device=device("h100-sxm")).predict([edit])
    assert said.step_time_us == 100
    assert any("no collectives" in note for note in said.notes)


def test_another_backend_is_priced_as_it_was_measured(pair: Baseline) -> None:
    def flat(time_us: float, name: str) -> CollectiveMeasurements:
        return make_measurements([("all_reduce", "float", Placement((2,)), size, time_us)
                                  for size in (1024, 1 << 20, 4 * ELEMENTS, 1 << 30)], name)

    where = find_topology("dgx-a100")
    profile = CommProfile.fit(join([flat(500.0, "nccl"), flat(2000.0, "gloo")]), where)
    steps = {name: pair.predict([OnTopology(CollectiveModel(where, profile, name))]) for name in (None, "nccl", "gloo")}
    assert steps["gloo"].edits == ["collectives on dgx-a100 by gloo"]
    assert steps[None].step_time_us == steps["nccl"].step_time_us
    # The transfer alone changes, by the ratio of the measured times: 1,500 of the model's µs for NCCL's.
    expected = 1500.0 * TRANSFER / all_reduce_us(where, 2)
    assert steps["gloo"].step_time_us - steps["nccl"].step_time_us == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(("where", "usual", "other"), [("dgx-a100", "nccl", "gloo"), ("cpu", "gloo", "nccl")])
def test_a_backend_that_nobody_measured_is_told(where: str, usual: str, other: str) -> None:
    assert price_calls([], CollectiveModel(find_topology(where), None, usual)).time_us.size == 0
    with pytest.raises(PlanError, match=f"Nothing is known of {other}'s collectives on {where}.*only {usual}'s"):
        CollectiveModel(find_topology(where), None, other)
    result = CliRunner().invoke(app, ["predict", str(ROOT / "traces" / "llama-cpu"), "--comm-backend", "gloo"])
    assert result.exit_code == 2 and "name it with --topology" in plain(result.stderr)


def test_collectives_of_all_ranks_take_the_models_ratio(pair: Baseline) -> None:
    usual, times = all_reduce_us(find_topology("dgx-a100"), 2), []
    for ranks in (2, 8, 16, 128, 1024):
        said = pair.predict([ScaleOut(ranks)])
        where = find_topology("dgx-a100" if ranks <= 8 else f"dgx-a100x{ranks // 8}")
        ratio = all_reduce_us(where, ranks) / usual
        assert said.step_time_us == pytest.approx(1000 - TRANSFER + TRANSFER * ratio, abs=0.01)
        assert said.interval_us[0] < said.step_time_us < said.interval_us[1]
        assert any("each rank's work" in note for note in said.notes)
        times.append(said.step_time_us)
    assert times == sorted(times)


def test_another_network_between_nodes(pair: Baseline) -> None:
    usual, slower = (pair.predict([ScaleOut.parse(text)]) for text in ("16", "16@ethernet-25"))
    assert slower.step_time_us > usual.step_time_us and "16 ranks on ethernet-25" in slower.edits
    assert pair.predict([ScaleOut.parse("8@ethernet-25")]).step_time_us == pair.predict([ScaleOut(8)]).step_time_us
    with pytest.raises(EditError, match="no network 'carrier-pigeon'"):
        pair.predict([ScaleOut.parse("16@carrier-pigeon")])
    with pytest.raises(EditError, match="64@roce-100"):
        ScaleOut.parse("16@")


def test_one_gpu_needs_no_known_nodes_and_another_memory_no_others() -> None:
    assert topology_of(device("a100-sxm-40g"), 8).name == topology_of(device("a100-sxm-80g"), 8).name == "dgx-a100"
    assert topology_of(device("a10g"), 1).gpus == 1
    with pytest.raises(PlanError, match="No node type"):
        topology_of(device("a10g"), 2)
    with pytest.raises(CommError, match="no network"):
        topology_of(device("a10g"), 1, "carrier-pigeon")


@pytest.mark.parametrize("name", device_names())
def test_a_plan_takes_a_server_of_pcie_devices_or_says_what_to_give(name: str) -> None:
    spec = device(name)
    with suppress(PlanError):
        usual = topology_of(spec, 4)
        assert planned_topology(spec, 4) == usual
        return
    if spec.vendor == "host" or not spec.pcie_width or spec.peer_gbps:  # links of unknown layout
        with pytest.raises(PlanError, match=r"give --topology node\.toml"):
            planned_topology(spec, 4)
        return
    where = planned_topology(spec, 4)
    assert where.gpus == 8 and where.node.device == name and where.node.peer_gbps == spec.host_gbps
    calls = [CollectiveCall(CollectiveKind.ALL_REDUCE, 1e8, where.first(ranks)) for ranks in (2, 4, 8)]
    times = price_calls(calls, CollectiveModel(where)).time_us
    assert (np.diff(times) > 0).all() and times[0] > 1e8 / spec.host_gbps / 1e3
    with pytest.raises(PlanError, match=r"topologies pcie-l40s --toml > node\.toml"):
        planned_topology(spec, 9)


def test_the_slowest_of_many_lies_further_out() -> None:
    drawn = np.random.default_rng(0).normal(size=(20_000, 16)).max(axis=1).mean()
    assert slowest_of(16) == pytest.approx(drawn, abs=0.03)
    assert slowest_of(1) == pytest.approx(0.0) and slowest_of(8) < slowest_of(64) < slowest_of(4096)


def test_jitter_is_of_steps_that_launch_the_same(pair: Baseline, tmp_path: Path) -> None:
    assert kernel_jitter(pair.built.graphs) is None  # there is nothing but the collective
    graph = read_ranks([rank(0, 2)], tmp_path)[0]
    kinds = graph.kernels.kind.copy()
    graph.kernels.kind[:] = 0
    graph.kernels.duration_ns[kinds != 0] = [100_000, 110_000, 90_000]
    sigma = kernel_jitter([graph]) or 0.0
    assert 0.05 < sigma < 0.15
    alone, said = further_out([graph], 1, 8)
    assert alone == pytest.approx(sigma * slowest_of(8)) and "the slowest rank's take +" in said
    assert further_out([graph], 8, 8)[0] == 0.0 and further_out(pair.built.graphs, 1, 8)[0] == 0.0


def test_what_cannot_be_scaled_is_told(pair: Baseline, tmp_path: Path) -> None:
    for text in ("1", "many", "-8", "1e3", "99999999"):
        with pytest.raises(EditError, match="is no number of ranks"):
            ScaleOut.parse(text)
    with pytest.raises(EditError, match="Only a recorded job of several GPUs"):
        baseline_of(read_ranks([rank(0, 1)], tmp_path), device=device("a100-sxm-80g")).predict([ScaleOut(8)])
