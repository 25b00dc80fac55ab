"""Sweeps of collectives: what is timed of each, by whose clock, and that its tables are read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from simulated_gpu.driver import SimulatedGpu, simulated_torch

from kernel_models.collectives import logs
from tracer.comm_bench import BenchPlan, run_bench

torch = pytest.importorskip("torch", reason="a sweep needs torch")
SIZES = (4096, 1 << 20)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The sweep's process, with itself as the only rank."""
    import torch.distributed as dist

    from tracer.comm_bench import worker

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield worker
    dist.destroy_process_group()


def test_calls_on_gpus_are_timed_without_their_launch(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launching takes the host five times as long as the device takes for the call."""
    gpu = SimulatedGpu(dispatch_us=30.0, kernel_us=0.0)
    real, kernel_us = worker.dist.all_reduce, {size: 6.0 * (1 + number) for number, size in enumerate(SIZES)}

    def all_reduce(tensor: Any, **options: Any) -> Any:
        gpu.launch(kernel_us.get(tensor.nbytes, 1.0))
        return real(tensor, **options)

    monkeypatch.setattr(worker.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(worker, "time", gpu)
    device = torch.device("cuda")
    with simulated_torch(gpu, monkeypatch):
        rows = worker.sweep(BenchPlan(("all_reduce",), SIZES, "nccl", rounds=2), device)
    assert {(row["payload_bytes"], row["timing"]) for row in rows} == {(size, "device") for size in SIZES}
    for row in rows:
        assert row["latency_us"] == pytest.approx(kernel_us[row["payload_bytes"]])


@pytest.mark.parametrize(("visible", "number"), [(4, 3), (1, 0)])
def test_each_process_sweeps_on_the_gpu_of_its_local_rank(worker: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                                          visible: int, number: int) -> None:
    """Its own of those of the machine, or the one that a scheduler lets it see."""
    chosen: list[Any] = []
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(worker.torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(worker.torch.cuda, "set_device", chosen.append)
    for name in ("init_process_group", "destroy_process_group"):
        monkeypatch.setattr(worker.dist, name, lambda *backend: None)
    monkeypatch.setattr(worker, "sweep", lambda plan, device: chosen.append(device) or [{"ranks": 1}])
    plan = BenchPlan(("all_reduce",), SIZES, "nccl").to_text()
    monkeypatch.setattr(worker.sys, "argv", ["worker", plan, str(tmp_path / "table.jsonl")])
    worker.main()
    monkeypatch.undo()
    assert chosen == [torch.device("cuda", number)] * 2
    assert json.loads((tmp_path / "table.jsonl").read_text()) == {"ranks": 1}


def test_rows_of_a_host_say_so_and_tables_without_it_are_read(worker: Any, tmp_path: Path) -> None:
    rows = worker.sweep(BenchPlan(("all_reduce", "all_gather"), SIZES, rounds=2, loop_seconds=1e-4),
                        torch.device("cpu"))
    assert len(rows) == 8 and {row["timing"] for row in rows} == {"host"}
    found = []
    for old in (False, True):
        path = tmp_path / f"{old}.jsonl"
        kept = [{name: value for name, value in row.items() if name != "timing" or not old} for row in rows]
        path.write_text("".join(json.dumps({**row, "ranks": 4, "ranks_per_node": 4}) + "\n" for row in kept))
        found.append(logs.read_log(str(path)).time_us.tolist())
    assert found[0] == found[1] and sorted(found[0]) == sorted(row["latency_us"] for row in rows)


@pytest.mark.slow
def test_a_sweep_of_two_processes_fills_its_table(tmp_path: Path) -> None:
    plan = BenchPlan(("all_reduce", "send_recv"), (1024,), rounds=1, loop_seconds=1e-3)
    lines = run_bench(plan, 2, tmp_path / "table.jsonl").read_text(encoding="utf-8").splitlines()
    assert {json.loads(line)["collective"] for line in lines} == {"all_reduce", "send_recv"}
