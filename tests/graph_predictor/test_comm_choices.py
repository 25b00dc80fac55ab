"""``--comm-choices``: each collective by the best backend in a recorded step, plans and shardings; what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from micro import Micro
from said import Run, plain

from kernel_models.collectives import CollectiveMeasurements, CommProfile, Placement, find_topology, make_measurements
from kernel_models.collectives.measurements import join
from kernel_models.collectives.price import SWITCH_US

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
SIZES = (1024, 1 << 20, 1 << 26, 1 << 30)
SMALL, LARGE = (1024, 40), (1 << 26, 800)
"""Bytes of the two all-reduces of a step, and µs recorded."""
NCCL_US, FAST_US = (40.0, 50.0, 1000.0, 16000.0), (10.0, 100.0, 4000.0, 64000.0)


def rank(number: int) -> Micro:
    """Three steps of 1,000 µs of two ranks, in which the host waits for two all-reduces.

        calls   |15 launch 20| |22 launch 24| |30 synchronise ·······························|
        kernel                 25 ─ small ─ 65 ────────────── large ─────────────────────── 865      + 135 of host
    """
    trace = Micro(rank=number, world_size=2).calibrate()
    for n in range(3):
        at = 1000 + 1000 * n
        trace.step(at, at + 1000, n + 1)
        for start, (size, time_us), launch in ((at + 25, SMALL, at + 15), (at + 65, LARGE, at + 22)):
            trace.launch(launch, 2, (20, start, time_us), name=NCCL, **{
                "Collective name": "allreduce", "Process Group Name": "dp", "Process Group Ranks": "[0, 1]",
                "Group size": 2, "In msg nelems": size // 4, "Out msg nelems": size // 4, "dtype": "Float"})
        trace.op("aten::item", at + 29, at + 871)
        trace.call("cudaDeviceSynchronize", at + 30, 840)
    return trace


def measured(name: str, times: tuple[float, ...]) -> CollectiveMeasurements:
    return make_measurements([("all_reduce", "float", Placement((2,)), size, us)
                              for size, us in zip(SIZES, times, strict=True)], name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job's two ranks, and profiles of one and of two backends."""
    found = tmp_path_factory.mktemp("choices")
    (found / "job").mkdir()
    for number in range(2):
        rank(number).write(found / "job" / f"rank{number}.json")
    where = find_topology("dgx-a100")
    CommProfile.fit(join([measured("nccl", NCCL_US), measured("fast", FAST_US)]), where).save(found / "two.json")
    CommProfile.fit(measured("nccl", NCCL_US), where).save(found / "one.json")
    return found


def predict(run: Run, folder: Path, *more: object) -> Any:
    ran = run("predict", folder / "job", "--from-device", "a100-sxm-80g", *more, "--json")
    assert ran.code == 0, ran.err
    return ran.json


def on_gpus(run: Run, *words: object) -> Any:
    ran = run(*words, "--preset", "tiny", "--gpus", 2, "--device", "a100-sxm-80g", "--json")
    assert ran.code == 0, ran.err
    return ran.json


def test_each_collective_takes_the_ratio_of_its_backend_to_the_recorded_one(run: Run, folder: Path) -> None:
    found = predict(run, folder, "--comm-choices", folder / "two.json")
    mixed = found["comm_choices"]
    assert mixed["base"] == mixed["best_single"] == "nccl"
    # The small one is done by the fast backend and pays for the switch; the large one stays what it was recorded as.
    small = 10.0 + SWITCH_US
    assert found["step_time_us"] == pytest.approx(1000 - SMALL[1] + small, abs=0.1)
    assert mixed["single_step_us"] == pytest.approx(1000, abs=0.1)
    assert mixed["step_gain_us"] == pytest.approx(40 - small, abs=0.2)
    assert mixed["gain_us"] == pytest.approx(40 - small, abs=0.1) and mixed["switched_calls"] == 1
    low, high = mixed["gain_interval_us"]
    assert low < mixed["gain_us"] < high
    assert [(row["backend"], row["calls"]) for row in mixed["choices"]] == [("fast", 1), ("nccl", 1)]
    assert mixed["choices"][1]["gain_interval_us"] == [0, 0] and mixed["memory_bytes"] == 2 * 1024


def test_the_report_says_who_does_what_and_what_it_gains(run: Run, folder: Path) -> None:
    said = plain(run("predict", folder / "job", "--from-device", "a100-sxm-80g", "--comm-choices",
                     folder / "two.json").out)
    for words in ("each by the best backend", "nccl alone", "80% between", "each is taken to cost 4.2 µs more"):
        assert words in said
    auto = predict(run, folder, "--comm-choices", "auto", "--comm-profile", folder / "two.json")
    assert auto["comm_choices"]["switched_calls"] == 1
    formulas = predict(run, folder, "--comm-choices", "auto")
    assert formulas["step_time_us"] == pytest.approx(1000) and formulas["comm_choices"]["pinned_us"] > 0
    assert "comm_choices" not in predict(run, folder)


@pytest.mark.parametrize(("more", "sentence"), [
    (("--comm-choices", "two.json", "--comm-profile", "two.json"), "both name measured collectives"),
    (("--comm-choices", "one.json"), "has nccl alone, and nothing to choose from"),
    (("--comm-choices", "absent.json"), "absent.json cannot be read"),
    (("--comm-choices", "job/rank0.json"), "is no profile of collectives"),
    (("--comm-choices", "two.json", "--comm-backend", "other"), "no backend 'other' to choose; there are fast, nccl"),
    (("--comm-choices", "two.json", "--topology", "dgx-h100"), "says nothing about dgx-h100")])
def test_what_cannot_be_chosen_from_is_told_in_a_sentence(
        run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...], sentence: str) -> None:
    monkeypatch.chdir(folder)
    ran = run("predict", "job", "--from-device", "a100-sxm-80g", *more)
    assert ran.code == 2 and sentence in plain(ran.err)


def test_backends_are_joined_from_profiles_and_logs(run: Run, folder: Path, tmp_path: Path) -> None:
    one, log, joined = folder / "one.json", tmp_path / "osu.txt", tmp_path / "joined.json"
    log.write_text("# OSU MPI Allreduce Latency Test v7.3\n# Datatype: MPI_FLOAT.\n# Size  Avg Latency(us)\n"
                   + "".join(f"{size} {us}\n" for size, us in zip(SIZES, FAST_US, strict=True)))
    ran = run("comm", "backends", one, f"mpi={log}", "--ranks", 2, "-o", joined, "--json")
    assert ran.code == 0 and [each["backend"] for each in ran.json["backends"]] == ["nccl", "mpi"]
    rows = predict(run, folder, "--comm-choices", joined)["comm_choices"]["choices"]
    assert [row["backend"] for row in rows] == ["mpi", "nccl"]
    assert "mpi" in run("comm", "backends", one, f"mpi={log}", "--ranks", 2, "-o", joined).out
    CommProfile.fit(measured("nccl", NCCL_US), find_topology("dgx-h100")).save(tmp_path / "h100.json")
    for arguments, sentence in (
            ((one, folder / "two.json"), "Two files measure the backend 'nccl'"),
            ((f"a={folder / 'two.json'}",), "'a' names one"), ((log,), "give --topology"),
            ((one, f"mpi={log}"), "give --ranks"),
            ((one, f"b={tmp_path / 'h100.json'}"), "join backends of one cluster")):
        ran = run("comm", "backends", *arguments, "-o", tmp_path / "no.json")
        assert ran.code == 2 and sentence in plain(ran.err) and not (tmp_path / "no.json").exists()


def test_plans_and_shardings_say_who_does_what(run: Run, folder: Path) -> None:
    pytest.importorskip("torch")
    chosen = ("--parallel", "ddp=2", "--comm-choices", folder / "two.json")
    notes = " ".join(on_gpus(run, "plan", "gpt2", *chosen)["notes"])
    assert "A step's collectives by backend" in notes and "A rank's collectives take" in notes
    assert "by backend: nccl" in " ".join(on_gpus(run, "shard", "dlrm", "--comm-choices", "auto")["notes"])
    found = on_gpus(run, "comm", "study", "gpt2", *chosen)
    mixed, (step,) = found["comm_choices"], found["plans"]
    assert {row["backend"] for row in mixed["choices"]} <= {"nccl", "fast"}
    assert step["gain_ms"] == pytest.approx(step["single_step_ms"] - step["step_ms"])
    assert step["gain_low_ms"] <= step["gain_ms"] <= step["gain_high_ms"]
    assert step["best_single"] == mixed["best_single"]


def test_a_sweep_takes_it_too(run: Run, folder: Path, tmp_path: Path) -> None:
    ran = run("sweep", folder / "job", "--from-device", "a100-sxm-80g", "--comm-choices", folder / "two.json", "--host",
              "1,2", "--jobs", 1, "-o", tmp_path / "s.csv", "--json")
    assert ran.code == 0, ran.err
    assert ran.json["rows"][0]["step_time_us"] == pytest.approx(1000 - 40 + 10 + SWITCH_US, abs=0.1)
