"""Collectives of jobs: thousands of ranks, recorded jobs, reports and volumes, with answers worked out on paper."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from micro import Micro, read_ranks

from graph_predictor.comm.recorded_calls import find_collectives, with_transfers
from graph_predictor.comm.report import communication_report
from graph_predictor.comm.traffic import (
    JobShape,
    bytes_text,
    check_volumes,
    expected_volumes,
    parse_bytes,
    parse_ranks,
    read_job_shape,
)
from graph_predictor.prediction.tuned_workload import tune_workload
from graph_predictor.simulation.build import build_program
from graph_predictor.simulation.engine import simulate
from graph_predictor.simulation.program import step_items
from kernel_models.collectives import (
    CollectiveKind,
    CollectiveMeasurements,
    CollectiveModel,
    CommError,
    CommProfile,
    Placement,
    find_topology,
    make_measurements,
    price_calls,
)
from kernel_models.collectives.measurements import join
from kernel_models.collectives.recorded import read_matched
from kernel_models.collectives.tuner import backends_of
from tracer.job import read_job

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
KINDS = CollectiveKind
WHERE = find_topology("dgx-v100")


ARGS = {"Collective name": "allreduce", "Process Group Name": "dp", "Process Group Ranks": "[0, 1]", "Group size": 2,
        "In msg nelems": 1024, "Out msg nelems": 1024, "dtype": "Float"}


def two_ranks() -> list[Micro]:
    """Rank 1 arrives 200 us late and computes for 20 of rank 0's 240 us.

        rank 0   collective  ############ 1020-1260 ############
                 gemm              ## 1050-1070 ##
        rank 1   collective                        ## 1220-1260 ##     40 us from the last arrival
    """
    first = Micro(rank=0, world_size=2).calibrate().step(1000, 1275)
    first.launch(1010, 5, (20, 1020, 240), name=NCCL, **ARGS)
    first.launch(1040, 5, (7, 1050, 20))
    first.call("cudaDeviceSynchronize", 1050, 220)
    second = Micro(rank=1, world_size=2).calibrate().step(1000, 1275)
    second.launch(1210, 5, (20, 1220, 40), name=NCCL, **ARGS)
    second.call("cudaDeviceSynchronize", 1230, 40)
    return [first, second]


def flat(time_us: float, name: str = "", last: int = 2**20) -> CollectiveMeasurements:
    """All-reduces of two ranks that take the same time at each size."""
    rows = [("all_reduce", "float", Placement((2,)), size, time_us) for size in (1024, 4096, last)]
    return make_measurements(rows, *([name] if name else []))


def test_transfer_times_are_replaced_and_waiting_is_not(tmp_path: Path):
    built = build_program(read_ranks(two_ranks(), tmp_path))
    (found,), unknown = find_collectives(built, WHERE)
    call = found.call
    assert (call.kind, call.payload_bytes, call.placement.per_node, call.dtype) == (KINDS.ALL_REDUCE, 4096, (2,),
                                                                                    "float32")
    assert (found.recorded_ns, found.alone, unknown) == (40_000, False, 0)
    times = price_calls([call], CollectiveModel(WHERE, CommProfile.fit(flat(140.0), WHERE)))
    # From the last arrival 140 instead of 40: both steps end 100 later.
    before, after = simulate(built.program), simulate(with_transfers(built, [found], times.time_us))
    longer = [int((after.item_end[end] - after.item_end[begin]) - (before.item_end[end] - before.item_end[begin]))
              for _, _, begin, end in step_items(built.program)]
    assert sorted(longer) == [0, 0, 100_000, 100_000]  # the calibrating steps have no collective
    # As measurements of a recorded job.
    rows = read_matched(built.graphs, built.rendezvous.groups, built.rendezvous.intrinsic_ns, WHERE)
    assert (rows.time_us.tolist(), rows.batch.payload_bytes.tolist()) == ([40.0], [4096])
    with pytest.raises(CommError, match="No collective in the trace"):
        read_matched(built.graphs, [], [], WHERE)


def test_a_rank_alone_is_priced_without_its_wait(tmp_path: Path):
    built = build_program(read_ranks(two_ranks()[:1], tmp_path))
    (found,), _ = find_collectives(built, WHERE)
    assert found.alone and found.call.ranks == 2
    time_us = price_calls([found.call], CollectiveModel(WHERE)).time_us
    duration = with_transfers(built, [found], time_us).kernel_duration[found.members[0][1]]
    assert duration == round(time_us[0] * 1e3) < 40_000


def test_a_report(tmp_path: Path):
    report = communication_report(read_ranks(two_ranks(), tmp_path))
    assert len(report.traffic) == 1 and report.unknown_sizes == 0 and report.histogram == {"all_reduce": {12: 2}}
    row = report.traffic[0].to_json()
    assert (row["group"], row["kind"], row["ranks"], row["count"]) == ("dp", "all_reduce", 2, 2)
    assert row["payload_bytes"] == 8192 and row["wire_bytes"] == 8192
    assert row["transfer_us"] == 40 and row["algbw_gbps"] == pytest.approx(4096 / 40e3)
    assert row["busbw_gbps"] == pytest.approx(row["algbw_gbps"])
    assert (row["median_skew_us"], row["straggler"], row["straggler_share"]) == (200, 1, 1.0)
    # Mean over ranks: (240 + 40) / 2, of which 20 / 2 beside the gemm.
    assert (row["kernel_us"], row["overlapped_us"], row["exposed_us"]) == (140, 10, 130)
    assert report.exposed_ns == {0: 220_000, 1: 40_000}
    # Two steps, the first of them without a collective.
    assert report.recorded_payload() == {KINDS.ALL_REDUCE: 2048}


def test_exposure_where_computation_touches_only_the_ends(tmp_path: Path):
    """Collective 1020-1120; gemms 1000-1030, 1025-1040 on two streams and 1110-1200: 20 + 10 are overlapped."""
    trace = Micro(rank=0, world_size=2).calibrate().step(900, 1300)
    for call, stream, begin, length in ((950, 7, 1000, 30), (960, 8, 1025, 15), (970, 7, 1110, 90)):
        trace.launch(call, 5, (stream, begin, length))
    trace.launch(980, 5, (20, 1020, 100), name=NCCL, **{"Collective name": "allreduce", "In msg nelems": 7,
                                                        "dtype": "Half"})
    report = communication_report([trace.read(tmp_path)])
    assert report.exposed_ns == {0: 70_000} and report.kernel_ns == {0: 100_000}
    assert report.traffic[0].payload_bytes == 14 and report.traffic[0].algbw_gbps is None
    none = communication_report([Micro().step(0, 10).read(tmp_path)])
    assert none.traffic == [] and none.recorded_payload() == {}


MILLION = {"parameters": 1e6, "gradient_bytes": 4, "parameter_bytes": 2, "dp": 4}
THRICE = {**MILLION, "micro_batches": 3}
BLOCK = {"layers": 3, "sequence": 8, "batch": 2, "hidden": 16, "micro_batches": 5}
"""sbh = 8 * 2 * 16 elements of two bytes."""


@pytest.mark.parametrize(("job", "expected"), [
    ({"data_scheme": "ddp", **MILLION}, {"all_reduce": 4e6}),
    ({"data_scheme": "zero1", **MILLION}, {"reduce_scatter": 4e6, "all_gather": 2e6}),
    ({"data_scheme": "zero2", **MILLION}, {"reduce_scatter": 4e6, "all_gather": 2e6}),
    ({"data_scheme": "zero3", **MILLION}, {"reduce_scatter": 4e6, "all_gather": 4e6}),
    # Sharded gradients and parameters go round with every micro-batch; what is not sharded is reduced once a step.
    ({"data_scheme": "zero2", **THRICE}, {"reduce_scatter": 12e6, "all_gather": 2e6}),
    ({"data_scheme": "zero3", **THRICE}, {"reduce_scatter": 12e6, "all_gather": 12e6}),
    ({"data_scheme": "ddp", **THRICE}, {"all_reduce": 4e6}),
    ({"data_scheme": "zero1", **THRICE}, {"reduce_scatter": 4e6, "all_gather": 2e6}),
    # Four all-reduces a layer and micro-batch, six with recomputation.
    ({**BLOCK, "tp": 2}, {"all_reduce": 4 * 3 * 5 * 512}),
    ({**BLOCK, "tp": 2, "full_recompute": True}, {"all_reduce": 6 * 3 * 5 * 512}),
    # Korthikanti et al., section 4.2.2: an extra all-gather in backward of what each rank kept a part of.
    ({**BLOCK, "tp": 2, "sequence_parallel": True}, {"reduce_scatter": 30720, "all_gather": 46080}),
    # A middle stage sends and receives at both its boundaries, activations and gradients.
    ({**BLOCK, "pp": 4}, {"send_recv": 2 * 2 * 5 * 512}), ({**BLOCK, "pp": 2}, {"send_recv": 2 * 5 * 512}),
    ({**BLOCK, "ep": 8, "moe_layers": 2, "top_k": 2}, {"all_to_all": 4 * 2 * 5 * 2 * 512}),
    # On one rank nothing is communicated.
    ({"data_scheme": "ddp", "dp": 1, "parameters": 1e6}, {})])
def test_closed_formulas(job: dict[str, Any], expected: dict[str, float]):
    found: Counter[str] = Counter()
    for volume in expected_volumes(JobShape(**job)):
        found[volume.kind.label] += volume.payload_bytes
    assert found == expected


@pytest.mark.parametrize(("scheme", "passes"), [("ddp", 2), ("zero3", 3)])
def test_bytes_on_the_wire(scheme: str, passes: int):
    """With elements of two bytes everywhere: 2P(d-1)/d for DDP, 3P(d-1)/d for ZeRO-3."""
    volumes = expected_volumes(JobShape(scheme, **{**MILLION, "gradient_bytes": 2}))
    assert sum(volume.wire_bytes for volume in volumes) == pytest.approx(passes * 2e6 * 3 / 4)


def test_volumes_are_compared_by_kind():
    job = JobShape("ddp", dp=4, parameters=1e6)
    checks = check_volumes(job, {KINDS.ALL_REDUCE: 4.1e6, KINDS.BROADCAST: 8.0})
    assert [(c.kind.label, c.agrees) for c in checks] == [("all_reduce", True), ("broadcast", False)]
    assert not check_volumes(job, {})[0].agrees


@pytest.mark.parametrize(("text", "said"), [
    ('data_scheme = "magic"', "one of ddp"), ("dp = -3", "from 0 to 1e"), ("parameters = inf", "from 0 to 1e"),
    ("parameters = nan", "from 0 to 1e"), ("world = 8", "'world' is nothing a job says"), ('dp = "8"', "dp is '8'"),
    ("dp = true", "dp is True"), ("dp =", "is no TOML"), ("", "cannot be read")])
def test_a_wrong_job_description_is_told(tmp_path: Path, text: str, said: str):
    path = tmp_path / "job.toml"
    if text:
        path.write_text(text)
    with pytest.raises(CommError, match=said):
        read_job_shape(str(path))


def test_sizes_and_ranks_as_people_write_them():
    assert [parse_bytes(t) for t in ("512", "64KiB", "1.5GB", " 2 MiB ", "1e3", "0")] == [512, 65536, 1.5e9, 2**21,
                                                                                          1000, 0]
    assert (bytes_text(1536), bytes_text(100), bytes_text(2**30)) == ("1.5 KiB", "100 B", "1 GiB")
    assert parse_ranks("0-3,8") == [0, 1, 2, 3, 8] and parse_ranks("0-9:4") == [0, 4, 8]
    for parse, texts in ((parse_bytes, ("", "-1", "many", "5XB", "1 2", "2000000 GiB")),
                         (parse_ranks, ("", "3-1", "a", "0-8:0", "1,,2", "0-99999999"))):
        for text in texts:
            with pytest.raises(CommError):
                parse(text)


def test_a_workload_is_tuned_for_each_collective(tmp_path: Path):
    built = build_program(read_ranks(two_ranks(), tmp_path))
    profile = CommProfile.fit(join([flat(90.0, "nccl"), flat(40.0, "oneshot")]), WHERE)
    tuned = tune_workload(built, backends_of([profile]), profile.topology)
    # Steps of 600 (no collective) and 275 us with 40 us, as recorded; 50 us more with 90.
    assert tuned.best_ns == 437_500 and tuned.step_ns == {"nccl": 462_500, "oneshot": 437_500}
    assert tuned.winner == ["oneshot"] and tuned.gain == pytest.approx(25 / 437.5)


@pytest.mark.real_traces
def test_predicted_collectives_of_the_eight_rank_job(real_trace: Callable[[str], Path]):
    built = build_program(read_job(real_trace("dlrm-8xV100-2023")).graphs)
    program = built.program
    found, unknown = find_collectives(built, WHERE)
    assert unknown == 0 and len(found) == 8
    time_us = price_calls([each.call for each in found], CollectiveModel(WHERE)).time_us
    priced = with_transfers(built, found, time_us)
    grouped = program.kernel_group >= 0
    assert (priced.kernel_duration[grouped] != program.kernel_duration[grouped]).all()
    ends = simulate(priced).item_end
    errors = [(ends[e] - ends[b]) / (program.recorded_item_end[e] - program.recorded_item_end[b]) - 1
              for _, _, b, e in step_items(program)]
    assert np.mean(np.abs(errors)) < 0.05 and np.max(np.abs(errors)) < 0.10
    # Each alone within a factor of two of what was recorded from the last arrival on.
    ratio = time_us * 1e3 / [c.recorded_ns for c in found]
    assert ratio.min() > 0.5 and ratio.max() < 2


@pytest.mark.real_traces
def test_the_volume_of_a_recorded_ddp_step(real_trace: Callable[[str], Path]):
    report = communication_report(read_job(real_trace("resnet50-ddp-2xA100/rank0.kineto.json.gz")).graphs)
    # ResNet-50 has 25,557,032 parameters of four bytes.
    checks = check_volumes(JobShape("ddp", dp=2, parameters=25_557_032), report.recorded_payload())
    assert checks[0].kind is KINDS.ALL_REDUCE and checks[0].agrees
    assert checks[0].recorded_bytes == pytest.approx(checks[0].expected_bytes, rel=1e-6)
