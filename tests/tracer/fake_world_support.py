"""Plans that are run twice, by real gloo processes and in fake worlds, and what of their captures must be equal.

As a program of ``forks`` it is one real rank: ``fake_world_support.py FOLDER CASE…`` runs those of the cases that have
such a rank.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import tracer
from tracer import workloads
from tracer.capture_layout import read_window
from tracer.fake_world import fake_world, parallelize
from tracer.graph import ExecutionGraph, OpKind
from tracer.parallel_plan import ParallelPlan

STEPS = 1


@dataclass(frozen=True)
class Case:
    plan: str
    ranks: int
    settings: dict[str, Any] = field(default_factory=dict)


CASES = {
    "ddp": Case("ddp", 2),
    "fsdp2": Case("fsdp2", 2),
    "tp": Case("tp", 2),
    "pp": Case("pp", 2),
    "fsdp2-tp": Case("fsdp2=2,tp=2", 4),
    "uneven": Case("fsdp2", 3, {"heads": 2, "width": 20, "vocabulary": 100, "hidden": 31}),
}


def capture_rank(case: Case, out: Path) -> None:
    """Capture this process's rank, whose process groups are up."""
    settings = {"depth": 2, **case.settings}
    plan = ParallelPlan.parse(case.plan, case.ranks)
    workload = parallelize(workloads.build("llama", preset="tiny", **settings), plan)
    # The first recorded step is the job's fifth: optimizer state is there, and DDP has rebuilt its buckets.
    with tracer.capture(out, steps=STEPS, warmup=2, timed=0, execution_trace="none") as capture:
        for batch in workload.batches():
            workload.step(batch)
            capture.step()
            if capture.finished:
                break


def fake_rank(case: Case, rank: int, out: Path) -> ExecutionGraph:
    with fake_world(case.ranks, rank):
        capture_rank(case, out)
    return read_window(out / f"rank{rank}")


def sequence(graph: ExecutionGraph, step: int) -> list[tuple[Any, ...]]:
    """The operations and collectives of a step in order; what a backend does inside a collective is left out.

    An operation is (name, shapes, dtypes) of its inputs, a collective (kind, group, ranks, dtype, bytes in, bytes out).
    """
    ops, table = graph.ops, graph.collectives
    # gloo copies in threads of its own; on a CPU forward, backward and optimizer all run in the step's thread.
    own_thread = ops.thread == graph.steps.thread[step]
    rows = np.flatnonzero((ops.step == step) & (ops.kind == OpKind.OPERATION) & own_thread)
    rows = rows[np.argsort(ops.start_ns[rows], kind="stable")]
    described = {int(op): row for row, op in enumerate(table.op.tolist())}
    found: list[tuple[Any, ...]] = []
    inside: set[int] = set()
    for row in rows.tolist():
        name = graph.string(int(ops.name[row]))
        if int(ops.parent[row]) in inside or name.startswith(("c10d::", "_c10d_functional::")):
            inside.add(row)
        else:
            found.append((name, graph.string(int(ops.shapes[row])), graph.string(int(ops.dtypes[row]))))
        if row in described:
            place = described[row]
            size = torch.empty(0, dtype=getattr(torch, graph.string(int(table.dtype[place])))).element_size()
            found.append((graph.string(int(table.kind[place])), graph.string(int(table.group[place])),
                          graph.string(int(table.ranks[place])), graph.string(int(table.dtype[place])),
                          int(table.elements_in[place]) * size, int(table.elements_out[place]) * size))
    return _without_gloos_reduce_scatter(found)


def _without_gloos_reduce_scatter(items: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """gloo all-reduces a copy, and ``wait`` takes this rank's part out of it: a chunk of the whole and one copy."""
    found: list[tuple[Any, ...]] = []
    rest = iter(items)
    for item in rest:
        while item[0] == "aten::chunk" and found and found[-1][0] == "reduce_scatter":
            _, _, ranks, dtype, sent, received = found[-1]
            size = torch.empty(0, dtype=getattr(torch, dtype)).element_size()
            assert item[1] == f"[[{sent // size}], [], []]"
            inside = [next(rest) for _ in range(1 + 3 * len(json.loads(ranks)))]
            assert {part[0] for part in inside} == {"aten::split", "aten::narrow", "aten::slice", "aten::as_strided"}
            assert next(rest)[:2] == ("aten::copy_", f"[[{received // size}], [{received // size}], []]")
            item = next(rest)
        found.append(item)
    return found


def main(rank: int, folder: Path, *names: str) -> None:
    torch.set_num_threads(1)
    for name, case in ((name, CASES[name]) for name in names):
        if rank < case.ranks:
            dist.init_process_group("gloo", init_method=f"file://{folder / name}.store", rank=rank,
                                    world_size=case.ranks)
            try:
                capture_rank(case, folder / name)
            finally:
                dist.destroy_process_group()


if __name__ == "__main__":
    main(int(os.environ["RANK"]), Path(sys.argv[1]), *sys.argv[2:])
