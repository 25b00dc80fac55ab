"""A recorded job on other numbers of ranks: collectives by the models' ratio, jitter by its extremes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from micro import read_ranks
from test_topology_edit import ELEMENTS, TRANSFER, rank

from foretrace.edits import ScaleOut
from graph_predictor.prediction.predictor import Baseline
from graph_predictor.prediction.scenario import EditError
from graph_predictor.recorded.facts import further_out, kernel_jitter, slowest_of
from graph_predictor.synthesis.baseline import baseline_of
from kernel_models.collectives import (
    CollectiveCall,
    CollectiveKind,
    CollectiveModel,
    find_topology,
    planned_topology,
    price_calls,
    topology_of,
)
from kernel_models.collectives.call import CommError
from kernel_models.device import device
from tracer.parallel_plan import PlanError
from tracer.shape_only.devices import device_names


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Baseline:
    """Both ranks of a job on two A100: 200 µs of host and an all-reduce of all ranks."""
    return baseline_of(read_ranks([rank(0, 2), rank(1, 2)], tmp_path_factory.mktemp("pair")),
                       device=device("a100-sxm-80g"))


def all_reduce_us(ranks: int) -> float:
    """What the model says of the all-reduce on the usual nodes."""
    where = find_topology("dgx-a100" if ranks <= 8 else f"dgx-a100x{ranks // 8}")
    call = CollectiveCall(CollectiveKind.ALL_REDUCE, 4.0 * ELEMENTS, where.first(ranks), "float32")
    return float(price_calls([call], CollectiveModel(where)).time_us[0])


@pytest.mark.parametrize("ranks", [2, 4, 8, 16, 64])
def test_collectives_of_all_ranks_take_the_models_ratio(pair: Baseline, ranks: int) -> None:
    said = pair.predict([ScaleOut(ranks)])
    ratio = all_reduce_us(ranks) / all_reduce_us(2)
    assert said.step_time_us == pytest.approx(1000 - TRANSFER + TRANSFER * ratio, abs=0.01)
    assert said.interval_us[0] < said.step_time_us < said.interval_us[1]
    assert any("each rank's work" in note for note in said.notes)


def test_another_network_between_nodes(pair: Baseline) -> None:
    usual, slower = (pair.predict([ScaleOut.parse(text)]) for text in ("16", "16@ethernet-25"))
    assert slower.step_time_us > usual.step_time_us and "16 ranks on ethernet-25" in slower.edits
    assert pair.predict([ScaleOut.parse("8@ethernet-25")]).step_time_us == pair.predict([ScaleOut(8)]).step_time_us
    with pytest.raises(EditError, match="no network 'carrier-pigeon'"):
        pair.predict([ScaleOut.parse("16@carrier-pigeon")])
    with pytest.raises(EditError, match="64@roce-100"):
        ScaleOut.parse("16@")


def test_a_device_with_another_memory_is_in_the_same_nodes() -> None:
    assert topology_of(device("a100-sxm-40g"), 8).name == topology_of(device("a100-sxm-80g"), 8).name == "dgx-a100"


def test_one_gpu_needs_no_known_nodes() -> None:
    assert topology_of(device("a10g"), 1).gpus == 1
    with pytest.raises(PlanError, match="No node type"):
        topology_of(device("a10g"), 2)
    with pytest.raises(CommError, match="no network"):
        topology_of(device("a10g"), 1, "carrier-pigeon")


@pytest.mark.parametrize("name", device_names())
def test_a_plan_takes_a_server_of_pcie_devices_or_says_what_to_give(name: str) -> None:
    spec = device(name)
    try:
        usual = topology_of(spec, 4)
    except PlanError:
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
    else:
        assert planned_topology(spec, 4) == usual


def test_more_ranks_are_never_quicker(pair: Baseline) -> None:
    times = [pair.predict([ScaleOut(ranks)]).step_time_us for ranks in (2, 8, 16, 128, 1024)]
    assert times == sorted(times)


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
