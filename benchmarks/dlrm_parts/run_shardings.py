"""Really runs a DLRM with its tables spread in several ways, in turns, over processes of this machine (gloo).

    measure(tables, [["0", "1", "row"], ["table"] * 3], ranks=2, batch=512, steps=15)   # seconds a step of each

A process imports PyTorch once and forks the ranks of each model, which hold all candidates at once and run one step of
each in turn: what slows the machine down for a while slows all of them. A step ends when its slowest rank does; the
mean of the quickest third of the rounds counts. Every process has one thread, and look-ups of its own; gradients of
tables are sparse.

    cd benchmarks; python -m dlrm_parts.run_shardings        an example: three tables, four candidates
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from dlrm_parts.steady import STEADY_MEMORY
from tracer.lookup_data.tables import EmbeddingTable
from tracer.workloads.catalogue import DlrmSettings
from tracer.workloads.places import Place

ROOT = Path(__file__).resolve().parents[2]
WARM_UP = 3
"""Rounds before those that count."""
QUICK = 1 / 3
"""Share of the rounds, the quickest, whose mean counts: others lengthen a step and never shorten it. Of two halves of
60 rounds, this agrees best (correlation of ten candidates' times 0.9–0.96 where they differ; a quartile's 0.8–0.95, the
least's 0.3–0.9)."""


@dataclass(frozen=True, kw_only=True)
class DlrmOfTables(DlrmSettings):
    """A DLRM of any tables, in the place of those that its settings would give it."""

    GIVEN: ClassVar[tuple[EmbeddingTable, ...]] = ()

    def embedding_tables(self) -> list[EmbeddingTable]:
        """The given ones."""
        return list(self.GIVEN)


def settings_of(tables: Sequence[EmbeddingTable], batch: int, places: Sequence[Place] = (), *, width: int = 64,
                depth: int = 2, embedding: int = 0, sparse: bool = True, batched: bool = False) -> DlrmSettings:
    """Settings of the suite's DLRM with these tables at these places, for whatever takes settings.

    Args:
        tables: named as modules of the model (``tables.0``, …) or not.
        batch: samples of a rank.
        places: of each table (``tracer.workloads.places``); none: every rank has all tables.
        embedding: of the dense vector and the interaction; by default the most columns of any table.
    """
    made: Any = type("DlrmOfTables", (DlrmOfTables,), {"GIVEN": tuple(tables)})
    return made(  # type: ignore[no-any-return]
        batch=batch, tables=len(tables), embedding=embedding or max(table.columns for table in tables), width=width,
        depth=depth, sparse=sparse, optimizer="sgd" if sparse else "adamw-foreach", batched=batched,
        sharding=",".join(map(str, places)))


def measure(tables: Sequence[EmbeddingTable], assignments: Sequence[Sequence[Place]], ranks: int, batch: int,
            steps: int, **settings: Any) -> list[float]:
    """Seconds a step with the tables at each of several places; see ``measure_all``."""
    return measure_all([(tables, assignments)], ranks, batch, steps, **settings)[0]


def measure_all(models: Sequence[tuple[Sequence[EmbeddingTable], Sequence[Sequence[Place]]]], ranks: int, batch: int,
                steps: int, **settings: Any) -> list[list[float]]:
    """Seconds a step of several models, each with its tables at each of several places.

    Args:
        models: tables of a model and candidates: a place for each table (``tracer.workloads.places``).
        ranks: processes.
        batch: samples of each.
        steps: rounds that count; in each every candidate makes one step.
        settings: of ``settings_of``.

    Raises:
        RuntimeError: a rank failed.
    """
    tasks = "".join(json.dumps({"tables": [asdict(table) for table in tables],
                                "places": [list(map(str, places)) for places in candidates], "ranks": ranks,
                                "batch": batch, "steps": steps, "settings": settings}) + "\n"
                    for tables, candidates in models)
    path = os.pathsep.join((str(ROOT), str(ROOT / "benchmarks")))
    done = subprocess.run([sys.executable, "-m", "dlrm_parts.run_shardings", "--worker"], input=tasks, text=True,
                          capture_output=True, check=False,
                          env={**os.environ, **STEADY_MEMORY, "OMP_NUM_THREADS": "1", "PYTHONPATH": path})
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    if done.returncode or len(found) < len(models):
        raise RuntimeError(f"a rank failed: {done.stderr[-2000:]}")
    return found


def _serve() -> None:
    import torch._dynamo
    import torch.distributed  # noqa: F401

    import tracer.fake_world.apply  # noqa: F401

    for line in sys.stdin:
        task = json.loads(line)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        read, write = os.pipe()
        children = [_fork(task, rank, port, write if rank == 0 else -1) for rank in range(task["ranks"])]
        os.close(write)
        with os.fdopen(read) as stream:
            result = stream.read()
        if any(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children) or not result:
            raise SystemExit("a rank failed")
        print(result, flush=True)


def _fork(task: dict[str, Any], rank: int, port: int, write: int) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(task["ranks"]),
                          MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        found = _rank(task, rank)
        if write >= 0:
            os.write(write, json.dumps(found).encode())
        status = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _rank(task: dict[str, Any], rank: int) -> list[float]:
    import torch
    import torch.distributed as dist

    from tracer.fake_world.apply import parallelize
    from tracer.parallel_plan import ParallelPlan
    from tracer.workloads import create

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    tables = [EmbeddingTable(**{**table, "reuse": tuple(table["reuse"]),
                                "bag_quantiles": tuple(table["bag_quantiles"])}) for table in task["tables"]]
    plan = ParallelPlan.parse("ddp", task["ranks"])
    running = []
    for places in task["places"]:
        settings = settings_of(tables, task["batch"], places, **task["settings"])
        running.append(parallelize(create(replace(settings, seed=rank)), plan))
    batches = [batch for _, batch in zip(range(4), running[0].batches(), strict=False)]
    rounds = WARM_UP + task["steps"]
    spent = torch.zeros(rounds, len(running), dtype=torch.float64)
    for number in range(rounds):
        # In another order every round, the same on all ranks: a candidate is not always after the same one.
        for place in np.random.default_rng(number).permutation(len(running)).tolist():
            dist.barrier()
            began = time.perf_counter()
            running[place].step(batches[number % len(batches)])
            spent[number, place] = time.perf_counter() - began
    dist.all_reduce(spent, op=dist.ReduceOp.MAX)
    dist.barrier()
    quickest = np.sort(spent[WARM_UP:].numpy(), axis=0)[:max(round(QUICK * task["steps"]), 1)]
    found: list[float] = quickest.mean(0).tolist()
    return found


def _example() -> None:
    tables = [EmbeddingTable("tables.0", 400_000, 64, bag=20, skew=1.05),
              EmbeddingTable("tables.1", 100_000, 32, bag=4), EmbeddingTable("tables.2", 2_000, 16, bag=1)]
    candidates: list[list[Place]] = [[0, 1, 1], [0, 0, 0], ["row"] * 3, ["column", 0, "copy"]]
    for ranks in (2, 4):
        began = time.perf_counter()
        found = measure(tables, candidates, ranks, batch=512, steps=15)
        print(f"{ranks} ranks, {time.perf_counter() - began:.1f} s in all")
        for places, seconds in zip(candidates, found, strict=True):
            print(f"  {','.join(map(str, places)):>16}  {1e3 * seconds:7.2f} ms a step")


if __name__ == "__main__":
    if "--worker" in sys.argv:
        _serve()
    else:
        _example()
