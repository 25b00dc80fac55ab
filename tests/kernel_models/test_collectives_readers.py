"""Logs of measured collectives: what they say, and one sentence with the line for each way of being broken.

Rows of other GPUs and clusters are never pooled, and no predicted curve falls. In logs of NCCL's inspector transfers
are the quickest rank's, sizes those of whole buffers.
"""

from __future__ import annotations

import json
from pathlib import Path

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
from kernel_models.collectives.measurements import Hints, gpu_of_system, join, of_cluster, same_gpu
from kernel_models.collectives.recorded import payload_bytes
from kernel_models.op_call import Source
from tracer.errors import ForetraceError

TITLE = "# Collective test starting: all_reduce_perf\n"
DEVICES = "".join(f"#  Rank {i:2} Group  0 Pid  471{i} on  {'node1' if i < 2 else 'node2'} device  {i} [0x07] NVIDIA "
                  "H100\n" for i in range(3))
COLUMNS = """#
#                                          out-of-place              in-place
#   size   count   type redop root   time  algbw  busbw #wrong   time  algbw  busbw #wrong
#    (B) (elements)                   (us) (GB/s) (GB/s)          (us) (GB/s) (GB/s)
"""
ROWS = """       0       0  float   sum   -1   5.05   0.00   0.00      0   5.01   0.00   0.00      0
    1024     256  float   sum   -1  10.00   0.10   0.14      0   9.80   0.10   0.14      0
 1048576  262144  float   sum   -1  25.41  41.27  55.02      0  25.17  41.66  55.55      0
"""
TAIL = "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 13.7885\n"
LOG = TITLE + DEVICES + COLUMNS + ROWS + TAIL
HEADER_LINE = LOG.splitlines().index(next(line for line in LOG.splitlines() if "algbw" in line)) + 1

PARAM = """[Rank   0] allSizes: [1024, 4194304] local_rank: 0 element_size: 4
\tCOMMS-RES   size (B) nElementsPerRank Latency(us):p50  p75  p95  Min  Max AlgBW(GB/s) BusBW(GB/s)
\tCOMMS-RES-all_reduce     1024      256  24.1  24.5  25.0  23.0  26.0   0.042   0.074
\tCOMMS-RES-all_reduce  4194304  1048576  84.0  85.0  86.0  83.0  87.0  49.932  87.381
"""


def write(tmp_path, text: str, name: str = "run.log") -> str:
    path = tmp_path / name
    path.write_text(text)
    return str(path)


def test_an_nccl_tests_log(tmp_path):
    rows = read_log(write(tmp_path, LOG))
    assert rows.time_us.tolist() == [5.05, 10.0, 25.41] and rows.batch.payload_bytes.tolist() == [0, 1024, 1048576]
    assert set(rows.batch.kind) == {int(CollectiveKind.ALL_REDUCE)}
    # Three ranks, two on one node and one on the other.
    assert (rows.batch.ranks[0], rows.batch.nodes[0], rows.batch.widest[0], rows.batch.narrowest[0]) == (3, 2, 2, 1)


def test_an_rccl_log_without_its_name_is_known_by_its_bus_bandwidth_or_told(tmp_path):
    text = "rccl-tests: Version develop:5272cd1\n" + LOG.replace(TITLE, "")
    large = text.replace(ROWS, ROWS.splitlines()[2] + "\n")
    assert set(read_log(write(tmp_path, large)).batch.kind) == {int(CollectiveKind.ALL_REDUCE)}
    with pytest.raises(CommError, match=r"run\.log, line 9: the log does not name its collective; give --collective"):
        read_log(write(tmp_path, text))
    given = read_log(write(tmp_path, text), Hints(kind=CollectiveKind.ALL_REDUCE, backend="rccl"))
    assert given.backend == ["rccl"] * 3


def test_older_columns_and_given_ranks(tmp_path):
    text = """# nThread 1 nGpus 1 minBytes 8 maxBytes 8 step: 2(factor) validation: 1
#       size         count      type   redop     time   algbw   busbw  error     time   algbw   busbw  error
#        (B)    (elements)                       (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
     4194304       1048576     float     sum   100.00   41.94   73.40  1e-07   100.00   41.94   73.40  1e-07
"""
    with pytest.raises(CommError, match="line 4: the log does not say how many ranks there were; give --ranks"):
        read_log(write(tmp_path, text))
    rows = read_log(write(tmp_path, text), Hints(ranks=8, per_node=4))
    assert (rows.batch.ranks[0], rows.batch.nodes[0], rows.time_us[0]) == (8, 2, 100.0)


def test_param_output(tmp_path):
    rows = read_log(write(tmp_path, PARAM))
    # 87.381 / 49.932 = 1.75: eight ranks.
    assert rows.batch.ranks.tolist() == [8, 8] and rows.time_us.tolist() == [24.1, 84.0]
    assert read_log(write(tmp_path, PARAM), Hints(ranks=8, per_node=4)).batch.nodes.tolist() == [2, 2]


def test_tables(tmp_path):
    text = "collective,dtype,ranks,ranks_per_node,payload_bytes,time_ms,backend\nall_reduce,half,4,2,1024,0.5,gloo\n"
    rows = read_log(write(tmp_path, text, "t.csv"))
    assert (rows.time_us[0], rows.backend[0], rows.batch.nodes[0]) == (500.0, "gloo", 2)
    bare = read_log(write(tmp_path, "bytes,latency_us\n1024,5\n2048,6\n", "t.csv"),
                    Hints(ranks=2, kind=CollectiveKind.BROADCAST))
    assert bare.time_us.tolist() == [5, 6] and bare.batch.kind[0] == int(CollectiveKind.BROADCAST)
    # Empty cells of the backend are no backend of their own.
    empty = text.replace(",gloo", ",") + "all_reduce,half,4,2,2048,0.6,\n"
    assert read_log(write(tmp_path, empty, "t.csv"), Hints(backend="gloo")).backend == ["gloo"] * 2
    lines = '{"collective": "all_gather", "ranks": 2, "payload_bytes": 64, "latency_us": 3.5}\n'
    assert read_log(write(tmp_path, lines, "t.jsonl")).time_us.tolist() == [3.5]


def test_sizes_of_recorded_collectives():
    kind = CollectiveKind
    assert payload_bytes(kind.ALL_REDUCE, 10, 10, 4, 8) == 40
    # Of an all-gather the output, of a reduce-scatter the input; from the other end times the ranks.
    assert payload_bytes(kind.ALL_GATHER, 10, 80, 2, 8) == payload_bytes(kind.ALL_GATHER, 10, -1, 2, 8) == 160
    assert payload_bytes(kind.REDUCE_SCATTER, 80, 10, 2, 8) == payload_bytes(kind.REDUCE_SCATTER, -1, 10, 2, 8) == 160
    # Of an uneven all-to-all the larger side.
    assert payload_bytes(kind.ALL_TO_ALL, 3392, 1792, 4, 8) == 4 * 3392
    assert np.isnan(payload_bytes(kind.BROADCAST, -1, -1, 4, 8))
    assert payload_bytes(kind.BARRIER, -1, -1, 4, 8) == 4
    assert find_topology("dgx-v100").place(range(8)).per_node == (8,)


OSU = """# OSU MPI {name} Latency Test v7.3
# Datatype: MPI_{dtype}.
# Size       Avg Latency(us)   Min Latency(us)   Max Latency(us)  Iterations
1024                   21.95             20.00             23.00        1000
4096                   25.97             24.00             27.00        1000
"""
UCC = """Collective:             {name}
Memory type:            cuda
Datatype:               float32
Iterations:
  small                 1000

       Count        Size                Time, us                           Bandwidth, GB/s
                                 avg         min         max         avg         max         min
         256        1024        17.97       17.29       18.99        0.00        0.00        0.00
        1024        4096        18.50       17.90       19.40        0.20        0.20        0.20
"""


@pytest.mark.parametrize(("name", "kind", "times"), [
    ("Allgather", CollectiveKind.ALL_GATHER, 4), ("Bcast", CollectiveKind.BROADCAST, 1)])
def test_mpi_and_ucc_outputs_have_one_convention_of_size(tmp_path, name, kind, times):
    for text, first_us in ((OSU.format(name=name, dtype="FLOAT"), 21.95), (UCC.format(name=name), 17.97)):
        rows = read_log(write(tmp_path, text), Hints(ranks=4, backend="mine"))
        assert set(rows.batch.kind) == {int(kind)} and rows.backend == ["mine"] * 2
        assert rows.batch.payload_bytes.tolist() == [1024 * times, 4096 * times] and rows.time_us[0] == first_us


def test_an_mpi_output_of_pairs_needs_no_ranks(tmp_path):
    pair = read_log(write(tmp_path, OSU.format(name="", dtype="CHAR").replace("MPI  ", "MPI ")))
    assert set(pair.batch.kind) == {int(CollectiveKind.SEND_RECV)} and set(pair.batch.ranks) == {2}


def entry(kind: str, number: int, size: int, time: float, rank: int = 0, ranks: int = 8, nodes: int = 1,
          scale: int = 1) -> str:
    return json.dumps({
        "header": {"id": "0x7f", "rank": rank, "n_ranks": ranks, "nnodes": nodes},
        "metadata": {"inspector_output_format_version": "v4.0", "rec_mechanism": "profiler_plugin"},
        "coll_perf": {"coll": kind, "coll_sn": number, "coll_msg_size_bytes": size, "coll_exec_time_us": time,
                      "coll_algobw_gbs": size * scale / max(time, 1) / 1e3, "coll_busbw_gbs": 0}},
        indent=number % 2 or None)


def test_the_quickest_rank_tells_the_transfer_and_sizes_are_of_whole_buffers(tmp_path: Path) -> None:
    for rank, waited in ((0, 0.0), (1, 900.0)):
        (tmp_path / f"host-pid{rank}.log").write_text("\n".join([
            entry("AllReduce", 1, 17179869184, 61974 + waited, rank, 2),
            entry("ReduceScatter", 2, 2147483648, 41057 + waited, rank, 2, scale=2),
            entry("AllGather", 3, 1 << 20, 50 + waited, rank, 2, nodes=2, scale=2)]))
    found = read_log(str(tmp_path))
    assert found.batch.kind.tolist() == [int(CollectiveKind.ALL_REDUCE), int(CollectiveKind.REDUCE_SCATTER),
                                         int(CollectiveKind.ALL_GATHER)]
    assert found.batch.payload_bytes.tolist() == [17179869184, 2 * 2147483648, 2 << 20]
    assert found.time_us.tolist() == [61974, 41057, 50] and found.batch.nodes.tolist() == [1, 1, 2]
    assert not any("not logged by all" in note for note in found.notes)
    alone = read_log(str(tmp_path / "host-pid1.log"))
    assert alone.time_us.tolist() == [61974 + 900, 41057 + 900, 50 + 900]
    assert any("3 of 3 collectives were not logged by all of their ranks" in note for note in alone.notes)


TABLE = "collective,ranks,bytes,time_us\n"
ENTRY = entry("AllReduce", 1, 1, 5)
CHAR = OSU.format(name="Allreduce", dtype="CHAR")
BAD_LOGS = [
    (LOG.replace("(us)", "(ms)", 1), f"line {HEADER_LINE + 1}: a column is in ms"),
    (LOG.replace("  25.41 ", "  0.025 "), "line 11: 1,048,576 bytes in 0.025 µs are .* units are mixed"),
    (LOG[:LOG.index("  41.27")], f"line 11: the row has 6 columns and line {HEADER_LINE} names 13; it is cut off"),
    (LOG[:LOG.index("262144")], "line 11: the row is cut off"), (LOG.replace(ROWS, ""), "no row of results"),
    (LOG.replace("  41.27", "  fast!"), "line 11: a number or column that nccl-tests writes is missing"),
    (LOG.replace("256  float", "256  quark"), "line 10: .*another tool's"),
    (LOG.replace(COLUMNS, "# nThread 1 algbw busbw\n"), "results before any line that names the columns"),
    (LOG.replace("#  Rank  1 ", "#  Rank  7 "), "of 8 ranks only 3 are listed"),
    (LOG.replace("10.00   0.10", "0.00   0.10"), "line 10: 1024 bytes took 0 µs"),
    (LOG.replace("device  1 [0x07] NVIDIA H100", "device  1 [0x07] NVIDIA L40S"), "ranks ran on different GPUs"),
    ("OSU MPI Allreduce Latency Test\n8 1.2\n", "bad.log is no output of nccl-tests"),
    (PARAM.replace("Latency(us)", "Latency(ms)"), "line 2: PARAM's columns"),
    (PARAM.replace("  83.0  87.0", ""), "line 4: the row has not the 9 numbers that line 2 names"),
    (PARAM.replace("COMMS-RES  ", "COMMS "), "line 3: there are results before any line that names"),
    ("\n".join(PARAM.splitlines()[:2]), "no COMMS-RES row"),
    (PARAM.replace("84.0", "0.084"), "line 4: .* units are mixed"),
    (PARAM.replace("87.381", "86.0"), "line 3: the output does not say how many ranks"),
    (CHAR, "does not say how many ranks there were; give --ranks"),
    (OSU.format(name="Gatherv", dtype="CHAR"), "'gatherv' is no collective"),
    (ENTRY[:-200], "no collective of several ranks"),
    (entry("AllReduce", 1, 1, 5, ranks=1) + entry("Nothing", 2, 1, 5) + entry("Broadcast", 3, 9, 0),
     "no collective of several ranks"),
    (ENTRY.replace('"n_ranks": 8', '"n_ranks": "x"'), "an entry that is none of the inspector's"),
    (ENTRY.replace('"n_ranks": 8', '"\\ud800": 1, "n_ranks": 8'), "none of the inspector's"),
    (ENTRY[:-200] + entry("AllReduce", 2, 1, 5), "is damaged at character 0"),
]
BAD_TABLES = [
    ("collective,ranks,time_us\nall_reduce,2,1\n", "line 1: no column holds sizes"),
    ("collective,ranks,bytes,time\nall_reduce,2,1,1\n", "line 1: no column holds times with their unit"),
    ("collective,ranks,bytes,time_us,time_ms\nall_reduce,2,1,1,1\n", "line 1: times are given in several units"),
    ("ranks,bytes,time_us\n2,1,1\n", "line 1: no column says the collective"),
    ("collective,bytes,time_us\nall_reduce,1,1\n", "line 1: no column says the number of ranks"),
    (TABLE + "all_reduce,2,8,1\nall_reduce,2,8,-1\n", "line 3: it is no measurement"),
    (TABLE + "all_reduce,0,8,1\n", "line 2: it is no measurement"),
    (TABLE + "all_reduce,2,8,1" + 3000 * ",1" + "\n", "line 2 has 3,004 cells"),
    *((TABLE + f"all_reduce,2,{row}\n", "line 2: it is no measurement")
      for row in ("1e30,5", "1024,1e300", "1024,1e-300", "inf,5", "1024,nan")),
    ("", "is an empty file"), (TABLE, "the table has no rows"),
]


@pytest.mark.parametrize(("name", "text", "said"), [
    *(("bad.log", *each) for each in BAD_LOGS), *(("bad.csv", *each) for each in BAD_TABLES),
    ("bad.parquet", "PAR1 but not really", "is a damaged Parquet file")])
def test_what_is_no_log_is_told_in_one_sentence_with_its_line(tmp_path, name, text, said):
    with pytest.raises(ForetraceError, match=said) as error:
        read_log(write(tmp_path, text, name))
    assert "\n" not in str(error.value)
    assert name in str(error.value)


@pytest.mark.parametrize(("text", "said"), [
    (CHAR.replace("1024                   21.95", "1024 x"), "line 4: the row is cut off"),
    (CHAR.split("1024")[0], "no row of results")])
def test_an_mpi_output_that_is_cut_off_is_told(tmp_path, text, said):
    with pytest.raises(CommError, match=said):
        read_log(write(tmp_path, text), Hints(ranks=2))


A100 = find_topology("dgx-a100")


def rows(device: str = "", system: str = "", count: int = 3) -> CollectiveMeasurements:
    return make_measurements([("all_reduce", "half", Placement((8,)), 2.0**(10 + i), 10.0 + i) for i in range(count)],
                             device=device, system=system)


@pytest.mark.parametrize(("name", "node", "same"), [
    ("NVIDIA A100-SXM4-40GB", "dgx-a100", True), ("A100", "pcie-a100", True),
    ("NVIDIA A100 80GB PCIe", "dgx-a100", False), ("NVIDIA H100 80GB HBM3", "dgx-h200", False),
    ("V100", "dgx-v100", True), ("a card of ours", "dgx-a100", False)])
def test_which_reported_gpu_is_a_topologys(name, node, same):
    assert same_gpu(name, find_topology(node)) is same
    assert [gpu_of_system(system) for system in ("h100_dgx", "a100_pairwise_nvlink", "cluster 7", "")] == [
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
    text = "gpu,cluster,op,gpus,bytes,time_us\nL40S,one,all_reduce,2,1024,9\nH100,,all_reduce,2,1024,9\n"
    read = read_log(write(tmp_path, text, "t.csv"))
    assert (read.device, read.system) == (["L40S", "H100"], ["one", ""])
    assert read_log(write(tmp_path, LOG)).device == ["NVIDIA H100"] * 3
    # Without its last lines it may have been cut off.
    cut = read_log(write(tmp_path, LOG.replace(TAIL, "")))
    assert len(cut.notes) == 1 and "run.log ends without" in cut.notes[0] and not read_log(write(tmp_path, LOG)).notes


@settings(max_examples=12, deadline=None)
@given(st.lists(st.floats(2.0, 400.0), min_size=2, max_size=9), st.sampled_from((9, 15, 20)),
       st.sampled_from(("dgx-h100x4", "dgx-a100x4", "pcie-l40sx4")))
def test_no_level_and_no_change_of_levels_makes_a_larger_collective_faster(times, first, node):
    where = find_topology(node)
    table = make_measurements([("all_reduce", "half", Placement((n,)), 2.0**(first + i), t * n**0.5)
                               for n in (2, 8) for i, t in enumerate(times)])
    profile = CommProfile.fit(table, where)
    models = profile.backends["nccl"]
    sizes = np.geomspace(1, 2.0**32, 400)
    for kind in (CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER):
        for placement in (Placement((2,)), Placement((3,)), Placement((8, 3))):
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
    assert profile.interval_checked(kind, eight, Level.FITTED) and profile.interval_checked(kind, eight, Level.MEASURED)
    assert not profile.interval_checked(kind, Placement((4,)), Level.FITTED)
    assert profile.measured_dtypes(kind) == ["float16"]
