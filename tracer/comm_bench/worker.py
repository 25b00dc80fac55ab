"""One process of a sweep, started by ``torchrun``: ``python -m tracer.comm_bench.worker PLAN OUT.jsonl``.

A loop of one operation is timed on every rank after a barrier; the slowest rank's mean counts. Sizes are measured in
rounds, each in a different order, so that a disturbance affects different sizes.

The host's clock times gloo, whose work runs on the host. The device's clock times NCCL's calls. They are queued on a
stream that is held until the host has launched them all, because predictions add the host's launch time separately.

    host    launch launch launch …
    stream  held ───────────────▶ meet │ call call call … │
                                   event                event
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from tracer.campaign.lab import CudaMachine, HostMachine, Machine
from tracer.campaign.micro import HOLD_FACTOR, HOLD_US
from tracer.comm_bench.runner import BenchPlan
from tracer.gpu_state import own_device

WARMUP = 2  # chosen: the first call opens connections
MOST_LOOP = 200  # chosen: on a host no launch queue limits the calls
MOST_QUEUED = 100
"""Calls queued on a held stream: each takes some entries of the launch queue, which holds about a thousand."""


def operation(kind: str, payload_bytes: int, dtype: torch.dtype, device: torch.device) -> tuple[Callable[[], object],
                                                                                                int]:
    """Return a function that runs the collective once, and its actual payload (whole elements for each rank), bytes."""
    world, rank = dist.get_world_size(), dist.get_rank()
    width = torch.empty(0, dtype=dtype).element_size()
    part = max(payload_bytes // width // world, 1)
    parted = kind in ("all_gather", "reduce_scatter", "all_to_all")
    count = part * world if parted else max(payload_bytes // width, 1)
    whole = torch.ones(count, dtype=dtype, device=device)
    piece = torch.ones(part, dtype=dtype, device=device)
    other = torch.empty_like(whole)

    def exchange() -> None:
        if rank == 0:
            dist.send(whole, 1)
        elif rank == 1:
            dist.recv(other, 0)

    functions: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_into_tensor(other, piece),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(piece, whole),
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "reduce": lambda: dist.reduce(whole, 0),
        "send_recv": exchange,
    }
    return functions[kind], count * width


def timed(run: Callable[[], object], loops: int, machine: Machine) -> float:
    """Return mean seconds of one of ``loops`` operations, on the slowest rank."""
    dist.barrier()
    on_device = isinstance(machine, CudaMachine)
    begin = time.perf_counter()
    run()  # this also synchronises the ranks
    queued_us = (time.perf_counter() - begin) * 1e6
    machine.synchronize()
    machine.scale_hold()
    first, second = machine.event(), machine.event()
    if on_device:
        machine.hold(HOLD_FACTOR * (loops + 1) * queued_us + HOLD_US)
        run()  # synchronises the ranks, so that no measured call waits for a late rank
    first.record()
    for _ in range(loops):
        run()
    second.record()
    machine.synchronize()
    mean = torch.tensor([first.elapsed_time(second) / 1e3 / loops], dtype=torch.float64,
                        device="cuda" if on_device else "cpu")
    dist.all_reduce(mean, op=dist.ReduceOp.MAX)
    return float(mean.item())


def sweep(plan: BenchPlan, device: torch.device) -> list[dict[str, object]]:
    """Return the rows of the table; operations that the backend lacks are left out."""
    dtype = getattr(torch, plan.dtype)
    on_device = device.type == "cuda"
    machine: Machine = CudaMachine(torch) if on_device else HostMachine(torch, time.perf_counter_ns)
    most = MOST_QUEUED if on_device else MOST_LOOP
    world = dist.get_world_size()
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    loops: dict[tuple[str, int], int] = {}
    rows: list[dict[str, object]] = []
    missing: set[str] = set()
    for round_number in range(-1, plan.rounds):
        order = [(kind, size) for kind in plan.kinds for size in plan.sizes]
        random.Random(round_number).shuffle(order)  # equal on all ranks
        for kind, size in order:
            if kind in missing:
                continue
            run, payload = operation(kind, size, dtype, device)
            if round_number < 0:
                try:
                    for _ in range(WARMUP):
                        run()
                except (RuntimeError, ValueError, NotImplementedError):
                    missing.add(kind)
                    continue
                once = timed(run, 1, machine)
                loops[kind, size] = max(1, min(most, int(plan.loop_seconds / max(once, 1e-7))))
                continue
            mean = timed(run, loops[kind, size], machine)
            rows.append({"collective": kind, "dtype": plan.dtype, "ranks": 2 if kind == "send_recv" else world,
                         "ranks_per_node": min(per_node, 2) if kind == "send_recv" else per_node,
                         "payload_bytes": payload,
                         "latency_us": mean * 1e6, "backend": plan.backend, "round": round_number,
                         "timing": "device" if on_device else "host"})
    return rows


def main() -> None:
    """Measure and, on rank 0, write the table."""
    plan, out = BenchPlan.from_text(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if plan.backend == "nccl":
        device = torch.device("cuda", own_device())
        torch.cuda.set_device(device)
    dist.init_process_group(plan.backend)
    rows = sweep(plan, device)
    if dist.get_rank() == 0:
        out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
