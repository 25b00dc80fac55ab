"""Rows of other GPUs and clusters are never pooled, and no predicted curve falls."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_models.collectives import (
    CollectiveBatch,
    CollectiveKind,
    CollectiveMeasurements,
    CommError,
    CommProfile,
    Level,
    Placement,
    find_topology,
    make_measurements,
)
from kernel_models.collectives.logs import read_log
from kernel_models.collectives.measurements import gpu_of_system, join, of_cluster, same_gpu
from kernel_models.op_call import Source

A100 = find_topology("dgx-a100")


def rows(device: str = "", system: str = "", count: int = 3) -> CollectiveMeasurements:
    return make_measurements([("all_reduce", "half", Placement((8,)), 2.0**(10 + i), 10.0 + i) for i in range(count)],
                             device=device, system=system)


@pytest.mark.parametrize(("name", "node", "same"), [
    ("NVIDIA A100-SXM4-80GB", "dgx-a100", True), ("NVIDIA A100-SXM4-40GB", "dgx-a100", True),
    ("A100", "dgx-a100", True), ("A100", "pcie-a100", True), ("NVIDIA A100 80GB PCIe", "dgx-a100", False),
    ("NVIDIA H100 80GB HBM3", "dgx-a100", False), ("NVIDIA H100 80GB HBM3", "dgx-h200", False),
    ("H200-SXM-141GB", "dgx-h100", False), ("V100", "dgx-v100", True), ("a card of ours", "dgx-a100", False)])
def test_which_reported_gpu_is_a_topologys(name, node, same):
    assert same_gpu(name, find_topology(node)) is same


def test_a_systems_name_tells_its_gpu():
    assert [gpu_of_system(name) for name in ("h100_dgx", "a100_pairwise_nvlink", "cluster 7", "")] == [
        "h100", "a100", "", ""]


def test_only_rows_of_the_topologys_gpu_are_kept():
    table = join([rows("A100-SXM4-80GB"), rows("H100-SXM5-80GB"), rows("L40S")])
    kept, notes = of_cluster(table, A100)
    assert set(kept.device) == {"A100-SXM4-80GB"} and len(kept) == 3
    assert notes == ["3 of 9 measurements are of dgx-a100; the others were left out (H100-SXM5-80GB, L40S)."]
    # Two names of one GPU are one; rows that name none are taken at the user's word.
    kept, notes = of_cluster(join([rows("A100-SXM4-80GB"), rows("NVIDIA A100-SXM4-80GB"), rows()]), A100)
    assert len(kept) == 9 and notes == []
    assert len(CommProfile.fit(table, A100).backends["nccl"].measured.curves) == 1


@pytest.mark.parametrize(("table", "device", "system", "said"), [
    ([rows("NVIDIA H100 80GB HBM3")], None, None, "are of NVIDIA H100 80GB HBM3, and dgx-a100 has a100-sxm-80g"),
    ([rows("L40S"), rows("H200-SXM-141GB")], None, None, "are of H200-SXM-141GB, L40S, and"),
    ([rows("A100-SXM4-80GB"), rows("A100-SXM4-40GB")], None, None, "several devices .*name one with --gpu-name"),
    ([rows(system="a100_dgx"), rows(system="a100_pairwise_nvlink"), rows(system="h100_dgx")], None, None,
     "several systems .a100_dgx, a100_pairwise_nvlink.; name one with --system"),
    ([rows(system="a100_dgx")], None, "b", "No row is of system 'b'; there are a100_dgx"),
    ([rows(system="a100_dgx"), rows(system="h100_dgx")], None, "h100_dgx", "are of h100, and dgx-a100 has"),
    ([rows("A100-SXM4-80GB")], "H100", None, "No row is of device 'H100'; there are A100-SXM4-80GB"),
    ([rows("a card of ours")], None, None, "are of a card of ours, and")])
def test_what_cannot_be_pooled_is_refused_in_one_sentence(table, device, system, said):
    with pytest.raises(CommError, match=said) as error:
        of_cluster(join(table), A100, device, system)
    assert "\n" not in str(error.value)


def test_one_system_or_device_of_several():
    table = join([rows(system="a100_dgx"), rows(system="a100_pairwise_nvlink")])
    assert set(of_cluster(table, A100, system="A100_DGX")[0].system) == {"a100_dgx"}
    both = join([rows("A100-SXM4-80GB"), rows("A100-SXM4-40GB")])
    assert set(of_cluster(both, A100, "NVIDIA A100-SXM4-40GB")[0].device) == {"A100-SXM4-40GB"}
    # A name that is in no device file is taken when the user says it.
    assert len(of_cluster(rows("a card of ours"), A100, "a card of ours")[0]) == 3


def test_tables_and_logs_say_what_they_were_measured_on(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("gpu,cluster,op,gpus,bytes,time_us\nL40S,one,all_reduce,2,1024,9\nH100,,all_reduce,2,1024,9\n")
    read = read_log(str(path))
    assert (read.device, read.system) == (["L40S", "H100"], ["one", ""])
    head = "# Collective test starting: all_reduce_perf\n"
    name = "#  Rank  {0} Group  0 Pid 1 on  host device  {0} [0x07] {1}\n"
    body = ("#  size  count  type  redop  root  time  algbw  busbw #wrong  time  algbw  busbw #wrong\n"
            "    1024     256  float   sum   -1  10.00   0.10   0.10      0   9.80   0.10   0.10      0\n")
    log = tmp_path / "a.log"
    log.write_text(head + name.format(0, "NVIDIA H100 80GB HBM3") + name.format(1, "NVIDIA H100 80GB HBM3") + body)
    read = read_log(str(log))
    assert read.device == ["NVIDIA H100 80GB HBM3"]
    # Without its last lines it may have been cut off.
    assert len(read.notes) == 1 and "a.log ends without" in read.notes[0]
    log.write_text(log.read_text() + "# Avg bus bandwidth    : 13.7885\n")
    assert read_log(str(log)).notes == []
    log.write_text(head + name.format(0, "NVIDIA H100 80GB HBM3") + name.format(1, "NVIDIA L40S") + body)
    with pytest.raises(CommError, match="ranks ran on different GPUs"):
        read_log(str(log))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(2.0, 400.0), min_size=2, max_size=9), st.sampled_from((9, 15, 20)),
       st.sampled_from(("dgx-h100x4", "dgx-a100x4", "pcie-l40sx4")))
def test_no_level_and_no_change_of_levels_makes_a_larger_collective_faster(times, first, node):
    where = find_topology(node)
    table = make_measurements([("all_reduce", "half", Placement((n,)), 2.0**(first + i), t * n**0.5)
                               for n in (2, 8) for i, t in enumerate(times)])
    profile = CommProfile.fit(table, where)
    models = profile.backends["nccl"]
    sizes = np.geomspace(1, 2.0**32, 900)
    for kind in (CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER):
        for placement in (Placement((2,)), Placement((3,)), Placement((8,)), Placement((8, 8)), Placement((8, 3))):
            batch = CollectiveBatch.of(kind, sizes, placement, "float16")
            for predict in (models.measured.predict, models.fitted.predict, profile.predict):
                found = predict(batch)
                time_us = found.time_us[found.level != int(Level.UNKNOWN)]
                assert (np.diff(time_us) >= -1e-9 * time_us[1:]).all()


def test_levels_are_sources_of_all_kernel_models_and_intervals_say_whether_they_were_checked():
    assert [level.source for level in (Level.MEASURED, Level.INTERPOLATED, Level.FITTED, Level.DATASHEET)] == [
        Source.MEASURED, Source.LEARNED, Source.LEARNED, Source.DATASHEET]
    kind, eight = CollectiveKind.ALL_REDUCE, Placement((8,))
    checked = [CommProfile(find_topology(name)).interval_checked(kind, placement, Level.DATASHEET)
               for name, placement in (("dgx-h100", eight), ("dgx-h100x2", Placement((8, 8))),
                                       ("dgx-h100x4", Placement((8,) * 4)), ("dgx-b200", eight), ("cpu", eight))]
    assert checked == [True, True, False, False, False]
    profile = CommProfile.fit(rows(), A100)
    assert profile.interval_checked(kind, eight, Level.FITTED)
    assert not profile.interval_checked(kind, Placement((4,)), Level.FITTED)
    assert profile.measured_dtypes(kind) == ["float16"]
