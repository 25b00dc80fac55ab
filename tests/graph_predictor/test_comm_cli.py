"""``foretrace comm``: what it prints, its JSON, and how it fails."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from said import Run, plain
from test_comm import two_ranks

from kernel_models.collectives import CommError, CommProfile, find_topology

LOG = """# Collective test starting: all_reduce_perf
{devices}#  size  count  type  redop  root  time  algbw  busbw #wrong  time  algbw  busbw #wrong
#  (B)  (elements)  (us) (GB/s) (GB/s)  (us) (GB/s) (GB/s)
{rows}# Avg bus bandwidth    : 1
"""


@pytest.fixture
def run(run: Run) -> Run:
    return partial(run, "comm")


@pytest.fixture
def predict(run: Run) -> Callable[..., Any]:
    """A function that predicts a collective and returns what the command says, as JSON."""
    return lambda *arguments: run("predict", *arguments, "--json").json


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """The directory of a job of two ranks."""
    folder = tmp_path / "job"
    folder.mkdir()
    for rank, trace in enumerate(two_ranks()):
        trace.write(folder / f"rank{rank}.json")
    return folder


def log(folder: Path, name: str, latency_us: float, gbps: float, ranks: int = 8) -> Path:
    devices = "".join(f"#  Rank {i:2} Group  0 Pid 1 on  host device {i} [0x07] NVIDIA H100\n" for i in range(ranks))
    rows = ""
    for i in range(10, 27):
        size, time_us = 2**i, latency_us + 2**i / gbps * 1e-3
        rows += (f"{size:12} {size // 4:12}     float     sum      -1 {time_us:9.3f} {size / time_us * 1e-3:7.2f} "
                 f"{size / time_us * 1.75e-3:7.2f}      0 {time_us:9.3f}    1.00    1.00      0\n")
    path = folder / name
    path.write_text(LOG.format(devices=devices, rows=rows))
    return path


def test_predict_from_data_sheets(run, predict):
    asked = ("all_reduce", "--bytes", "64MiB", "--topology", "dgx-h100x4")
    values = predict(*asked)
    assert values["source"] == "datasheet" and values["per_node"] == [8, 8, 8, 8]
    low, high = values["interval_us"]
    assert low < values["time_us"] < high
    assert values["busbw_gbps"] == pytest.approx(2**26 / values["time_us"] * 1e-3 * 2 * 31 / 32)
    shown = [row for row in values["breakdown"] if row["algorithm"] != "hierarchical"]
    assert values["time_us"] == pytest.approx(min(row["time_us"] for row in shown))
    assert values["algorithm"] in {f"{row['algorithm']}/{row['protocol']}" for row in shown}
    out = run("predict", *asked).out
    assert "64 MiB over 32 ranks on dgx-h100x4" in plain(out) and "hierarchical" in out


def test_collectives_that_share_links(predict):
    asked = ("all_reduce", "--bytes", "64MiB", "--topology", "dgx-a100", "--algorithm", "ring")
    one, three = predict(*asked), predict(*asked, "--sharing", "3")
    # Ring and Simple: 8.4 + 14 * 3.4 us, and 1.75 * 2**26 bytes at 220.8 GB/s. Of three, only LL's 15 us overlap.
    assert one["time_us"] == pytest.approx(56 + 1.75 * 2**26 / 220.8e3)
    assert three["time_us"] == pytest.approx(3 * one["time_us"] - 2 * 15, rel=1e-4)
    assert one["overlap"]["compute_bound"] == pytest.approx(108 / 84)


@pytest.mark.parametrize("arguments", [("--bytes", "1GiB", "--ranks", "1"), ("--bytes", "0")])
def test_predict_of_one_rank_or_nothing(predict, arguments):
    values = predict("all_gather", *arguments, "--topology", "dgx-a100")
    assert (values["time_us"], values["busbw_gbps"], values["level"]) == (0, 0, "nothing to do")
    assert values["algorithm"] is None and values["breakdown"] == [] and values["source"] == "heuristic"


@pytest.mark.parametrize(("kind", "sizes", "payload"), [
    ("all_to_allv", "1MiB,1MiB", 2 * 2**20),
    # Rank 1 receives 3 MiB from each of two others: 9 MiB with its own part.
    ("all_to_all", "0,3MiB,0", 9 * 2**20), ("all_to_all", "0,1KiB;2KiB,0", 4096)])
def test_an_uneven_all_to_all_by_its_sizes(predict, kind, sizes, payload):
    found = predict(kind, "--sizes", sizes, "--topology", "dgx-h100")
    assert (found["collective"], found["payload_bytes"]) == ("all_to_all", payload)


@pytest.mark.parametrize(("size", "topology", "words"), [
    ("1MiB", "dgx-h100", "with 80% certainty"), ("1MiB", "dgx-b200", "with an assumed certainty of 80%"),
    ("0", "dgx-h100", "nothing is launched")])
def test_an_interval_says_whether_it_was_checked(run, predict, size, topology, words):
    asked = ("all_reduce", "--bytes", size, "--topology", topology)
    assert words in plain(run("predict", *asked).out)
    if "assumed" in words:
        values = predict(*asked)
        assert (values["interval"], values["source"], values["level"]) == ("assumed", "datasheet", "datasheet")


def test_a_log_of_another_gpu_is_refused(run, tmp_path: Path):
    code, out, err = run("fit", log(tmp_path, "a.log", 20, 100), "-o", tmp_path / "p.json", "--topology", "dgx-a100")
    assert code == 2 and "are of NVIDIA H100, and dgx-a100 has a100-sxm-80g" in err and out == ""
    with pytest.raises(CommError, match=r"p\.json cannot be written \(No such file") as error:
        CommProfile(find_topology("dgx-h100")).save(tmp_path / "absent" / "p.json")
    assert "Errno" not in str(error.value) and ".tmp" not in str(error.value)


@pytest.mark.parametrize(("arguments", "said"), [
    (("all_reduce", "--topology", "cpu"), "give --bytes"),
    (("all_reduce", "--sizes", "1,2", "--topology", "cpu"), "Only an all-to-all"),
    (("all_to_all", "--sizes", "1,2", "--bytes", "1", "--topology", "cpu"), "given twice"),
    (("all_to_all", "--sizes", "1,2;3", "--topology", "cpu"), "no table of sizes"),
    (("all_to_all", "--sizes", "1,2", "--ranks", "3", "--topology", "cpu"), "2 ranks and the group has 3"),
    (("all_reduce", "--bytes", "1", "--topology", "dgx-h100", "--ranks", "0"), "at least one rank"),
    (("all_reduce", "--bytes", "1", "--topology", "dgx-h100x-1"), "has -1 nodes"),
    (("all_reduce", "--bytes", "1", "--topology", "dgx-h100xfour"), "no count of nodes"),
    (("all_reduce", "--bytes", "1"), "give --topology"),
    (("gossip", "--bytes", "1", "--topology", "cpu"), "'gossip' is no collective"),
    (("all_reduce", "--bytes", "lots", "--topology", "cpu"), "'lots' is no size"),
    (("all_reduce", "--bytes", "1", "--topology", "dgx-h10"), "did you mean dgx-h100"),
    (("all_reduce", "--bytes", "1", "--topology", "dgx-h100", "--ranks", "9"), "9 ranks do not fit"),
    (("all_reduce", "--bytes", "1", "--topology", "dgx-h100", "--ranks", "2", "--group", "0-1"), "given twice"),
    (("all_reduce", "--bytes", "1", "--topology", "dgx-h100", "--dtype", "quark"), "'quark' is no dtype"),
    (("all_reduce", "--bytes", "1", "--topology", "dgx-h100", "--backend", "mpi"), "Nothing is known of mpi's"),
    (("all_reduce", "--bytes", "1", "--topology", "dgx-h100", "--algorithm", "fast"), "'fast' is no algorithm"),
    (("all_gather", "--bytes", "1", "--topology", "dgx-h100", "--algorithm", "tree"), "cannot be done by tree"),
    (("all_reduce", "--bytes", "1", "--comm-profile", "absent.json"), "absent.json cannot be read")])
def test_what_cannot_be_predicted_is_one_sentence(run, arguments, said):
    code, out, err = run("predict", *arguments)
    assert code == 2 and said in err and out == "" and err.count("\n") == 1


def test_fit_then_predict_then_tune(run, predict, tmp_path: Path):
    profile, other = tmp_path / "nccl.json", tmp_path / "one.json"
    ran = run("fit", log(tmp_path, "a.log", 20, 100), "-o", profile, "--topology", "dgx-h100", "--json")
    assert ran.code == 0 and ran.json["measurements"] == 17
    assert run("fit", log(tmp_path, "b.log", 5, 50), "-o", other, "--topology", "dgx-h100", "--backend",
               "oneshot").code == 0
    asked = ("all_reduce", "--bytes", "1MiB", "--comm-profile", profile)
    # A measured size is measured without naming its dtype.
    for given, dtype in (((), "float32"), (("--dtype", "float"), "float")):
        values = predict(*asked, *given)
        assert (values["source"], values["dtype"], values["interval"]) == ("measured", dtype, "checked")
        assert values["time_us"] == pytest.approx(20 + 2**20 * 1e-5, rel=1e-3)
    far = predict(*asked, "--topology", "dgx-h100x2")
    assert far["level"] == "fitted" and far["source"] == "learned" and far["per_node"] == [8, 8]
    assert "says nothing about dgx-a100" in run("predict", *asked, "--topology", "dgx-a100").err
    ran = run("tune", profile, other, "-o", tmp_path / "t.json", "--csv", tmp_path / "t.csv", "--json")
    # 20 us + 10 ns/kB against 5 us + 20 ns/kB: equal at 1.5 MB, within 5% from about 1.29 MB on.
    found = ran.json["crossovers"]
    assert ran.code == 0 and [(c["before"], c["after"]) for c in found] == [("oneshot", "nccl")]
    assert found[0]["payload_bytes"] == pytest.approx(1.29e6, rel=0.12)
    assert json.loads((tmp_path / "t.json").read_text())["crossovers"] == found
    assert (tmp_path / "t.csv").read_text().startswith("collective_type,min_bytes,max_bytes,algorithm,protocol")
    out = run("tune", profile, other).out
    assert "Crossovers" in out and "oneshot" in out


def test_bad_logs_exit_with_the_line(run, tmp_path: Path):
    path = log(tmp_path, "a.log", 20, 100)
    path.write_text(path.read_text()[:-400])
    for file, words in ((path, "a.log, line 2"), (tmp_path / "absent.log", "absent.log")):
        code, out, err = run("fit", file, "-o", tmp_path / "p.json", "--topology", "dgx-h100")
        assert code == 2 and words in err and out == "" and not (tmp_path / "p.json").exists()


def test_a_job_is_reported_and_fitted(run, job: Path, tmp_path: Path):
    # Two steps are recorded, the first of them without a collective: 2,048 bytes a step.
    shape, profile = tmp_path / "job.toml", tmp_path / "p.json"
    shape.write_text('data_scheme = "ddp"\ndp = 2\nparameters = 512.0\n')
    values = run("report", job, "--job", shape, "--json").json
    assert values["volumes"] == [{"collective": "all_reduce", "causes": ["DDP gradients"],
                                  "expected_bytes": 2048, "recorded_bytes": 2048, "agrees": True}]
    assert values["traffic"][0]["straggler"] == 1 and values["ranks"][0]["exposed_us"] == 220
    said = plain(run("report", job, "--job", shape).out)
    assert "DDP gradients" in said and "2 KiB" in said
    assert run("fit", job, "-o", profile, "--topology", "dgx-v100").code == 0
    assert CommProfile.load(profile).backend_names() == ["nccl"]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="a sweep needs PyTorch")
def test_a_small_sweep_with_gloo(run, predict, tmp_path: Path):
    profile, table = tmp_path / "p.json", tmp_path / "t.jsonl"
    code, _, err = run("bench", "-o", profile, "--collective", "all_reduce", "--smallest", "1KiB", "--largest", "8KiB",
                       "--rounds", "2", "--table", table)
    assert code == 0, err
    rows = [json.loads(line) for line in table.read_text().splitlines()]
    assert len(rows) == 2 * 4 and {row["payload_bytes"] for row in rows} == {1024, 2048, 4096, 8192}
    assert {(row["ranks"], row["backend"]) for row in rows} == {(2, "gloo")} and min(r["latency_us"] for r in rows) > 1
    values = predict("all_reduce", "--bytes", "3000", "--comm-profile", profile, "--ranks", "2", "--dtype", "float32")
    assert values["source"] == "measured" and values["time_us"] > 1


@pytest.mark.parametrize(("arguments", "said"), [
    (("--backend", "carrier-pigeon"), "no backend"), (("--collective", "barrier"), "no collective"),
    (("--smallest", "2KiB", "--largest", "1KiB"), "no sizes"), (("--processes", 30_000_000), "2 to 256 processes")])
def test_a_sweep_that_cannot_be_is_not_started(run, tmp_path: Path, arguments, said):
    code, out, err = run("bench", "-o", tmp_path / "p.json", *arguments)
    assert code == 2 and said in err and out == "" and not list(tmp_path.iterdir())


def test_tuning_a_workload_of_another_gpu_or_with_lacking_backends_is_said(run, job: Path, tmp_path: Path):
    nccl, other, gather = tmp_path / "nccl.json", tmp_path / "one.json", tmp_path / "g.log"
    assert run("fit", log(tmp_path, "a.log", 20, 100, 2), "-o", nccl, "--topology", "dgx-h100").code == 0
    gather.write_text(log(tmp_path, "b.log", 5, 50, 2).read_text().replace("all_reduce_perf", "all_gather_perf"))
    assert run("fit", gather, "-o", other, "--topology", "dgx-h100", "--backend", "oneshot").code == 0
    tuned = run("tune", nccl, other, "--trace", job, "--json").json["workload"]
    assert tuned["missing"] == {"oneshot": ["all_reduce over 2 ranks"]} and tuned["winners"] == {"nccl": 1}
    assert tuned["step_us"]["oneshot"] == tuned["step_us"]["nccl"]
    assert "oneshot was not measured for all_reduce over 2 ranks" in plain(run("tune", nccl, other, "--trace", job).out)
