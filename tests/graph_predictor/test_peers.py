"""Jobs of which one rank was recorded: collectives without what that rank waited for the others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from micro import Micro, read_ranks

from foretrace.edits import RanksAlike
from graph_predictor.comm.report import communication_report
from graph_predictor.prediction.predictor import Baseline
from graph_predictor.prediction.scenario import EditError
from graph_predictor.synthesis.baseline import baseline_of
from kernel_models.collectives import CollectiveCall, CollectiveKind, CollectiveModel, find_topology, price_calls
from kernel_models.device import device

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
WORLD, ELEMENTS, HOST = 8, 16 << 20, 200
"""Ranks, floats of each rank's all-reduce, and µs of the host beside one."""


def rank(number: int, recorded: Sequence[int], elements: int | None = ELEMENTS) -> Micro:
    """Two steps in which the host waits for one all-reduce after another; each takes a number of µs, and the host
    ``HOST`` more."""
    sizes = {} if elements is None else {"In msg nelems": elements, "Out msg nelems": elements, "dtype": "Float"}
    args = {"Collective name": "allreduce", "Process Group Name": "dp",
            "Process Group Ranks": str(list(range(WORLD))), "Group size": WORLD, **sizes}
    trace, at = Micro(rank=number, world_size=WORLD).calibrate(), 1000
    for n in (1, 2):
        trace.step(at, at + sum(recorded) + HOST * len(recorded), n)
        for takes in recorded:
            trace.launch(at + 15, 5, (20, at + 25, takes), name=NCCL, **args)
            trace.op("aten::item", at + 24, at + takes + 31)
            trace.call("cudaDeviceSynchronize", at + 25, takes + 5)
            at += HOST + takes
    return trace


def baseline(folder: Path, *ranks: Micro) -> Baseline:
    """The job on A100s."""
    return baseline_of(read_ranks(ranks, folder), device=device("a100-sxm-80g"))


def longest_us() -> float:
    """Upper end of what the model says of the all-reduce."""
    call = CollectiveCall(CollectiveKind.ALL_REDUCE, 4.0 * ELEMENTS, find_topology("dgx-a100").first(WORLD), "float32")
    return float(price_calls([call], CollectiveModel(find_topology("dgx-a100"))).high_us[0])


@pytest.mark.parametrize(("recorded", "transfers"), [
    ((700, 300, 310), (305, 300, 310)),  # one waited: the median of the other two
    ((300, 440, 300), (300, 440, 300)),  # up to half as long again is a transfer that was disturbed
    ((300, 300, 300), (300, 300, 300))])
def test_a_collective_takes_its_transfer_alone(tmp_path: Path, recorded: tuple[int, ...],
                                               transfers: tuple[int, ...]) -> None:
    job = baseline(tmp_path, rank(0, recorded))
    said = job.predict([RanksAlike()])
    assert job.predict().step_time_us == pytest.approx(3 * HOST + sum(recorded), abs=0.01)
    assert said.step_time_us == pytest.approx(3 * HOST + sum(transfers), abs=0.01)
    assert said.interval_us[0] < said.step_time_us < said.interval_us[1]
    assert any("6 collectives take their transfer alone" in note for note in said.notes)


def test_some_of_the_ranks_that_all_waited_and_one_that_always_did(tmp_path: Path) -> None:
    """One that always waited is no longer than its model says."""
    some = baseline(tmp_path, *(rank(number, (700, 300, 310)) for number in range(WORLD - 1)))
    said = some.predict([RanksAlike()])
    assert said.step_time_us == pytest.approx(3 * HOST + 305 + 300 + 310, abs=0.01)
    assert any("6 collectives take their transfer alone, 0.395 ms less" in note for note in said.notes)
    always = baseline(tmp_path, rank(0, (round(20 * longest_us()),)))
    assert always.predict([RanksAlike()]).step_time_us == pytest.approx(HOST + longest_us(), abs=0.01)


def test_nothing_to_take_out_is_refused(tmp_path: Path) -> None:
    for ranks, why in (([rank(number, (300, 300)) for number in range(WORLD)], "all ranks were recorded"),
                       ([rank(0, (300, 300), elements=None)], "No collective of the step")):
        with pytest.raises(EditError, match=why):
            baseline(tmp_path, *ranks).predict([RanksAlike()])


def test_calls_are_counted_for_the_ranks_that_were_recorded(tmp_path: Path) -> None:
    """Three of eight ranks: what one of them calls a step is no matter of the others."""
    graphs = read_ranks([rank(number, (300, 300)) for number in range(3)], tmp_path)
    traffic = communication_report(graphs).traffic
    assert [(row.ranks, row.recorded, row.count) for row in traffic] == [(8, 3, 12)]
