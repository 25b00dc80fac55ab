"""Logs of NCCL's inspector: transfers are the quickest rank's, sizes those of whole buffers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from said import Run

from kernel_models.collectives.call import CollectiveKind, CommError
from kernel_models.collectives.logs import read_log


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


def test_a_fit_takes_a_run_apart(tmp_path: Path, run: Run) -> None:
    (tmp_path / "a.log").write_text("\n".join(
        entry("AllReduce", i, 1 << (10 + i), 20 + (1 << (10 + i)) / 200e3, ranks=8) for i in range(16)))
    fitted = run("comm", "fit", str(tmp_path / "a.log"), "-o", str(tmp_path / "comm.json"), "--topology", "dgx-h100")
    assert fitted.code == 0, fitted.err
    told = run("comm", "predict", "all_reduce", "--bytes", "512KiB", "--topology", "dgx-h100", "--comm-profile",
               str(tmp_path / "comm.json"), "--json").json
    assert told["time_us"] == pytest.approx(20 + (1 << 19) / 200e3, rel=0.1)


@pytest.mark.parametrize(("text", "says"), [
    (entry("AllReduce", 1, 1, 5)[:-200], "no collective of several ranks"),
    (entry("AllReduce", 1, 1, 5, ranks=1) + entry("Nothing", 2, 1, 5) + entry("Broadcast", 3, 9, 0),
     "no collective of several ranks"),
    (entry("AllReduce", 1, 1, 5).replace('"n_ranks": 8', '"n_ranks": "x"'), "an entry that is none of the inspector's"),
    (entry("AllReduce", 1, 1, 5)[:-200] + entry("AllReduce", 2, 1, 5), "is damaged at character 0"),
])
def test_a_bad_log_is_refused_in_a_sentence(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(text)
    with pytest.raises(CommError, match=says):
        read_log(str(tmp_path / "a.log"))
