"""Steps of several processes on this CPU, predicted from captures of one process, then really run over gloo.

    python benchmarks/gloo_steps.py --keep DIR [--measure SECONDS] [--development]

Each workload is captured alone, spread over 2 and 4 ranks under DDP and FSDP2
(`graph_predictor.request.parallel_ranks`, the profiler's cost taken out), with collectives of a profile measured here
(`tracer.comm_bench`), and compared with steps of real processes on the loopback that nothing watched. Every process has
one thread. `--measure` goes on with what is not measured yet for about so long and ends; without it all is measured,
and the table printed.

A capture knows one process that has the machine to itself. Several share its cores, which predictions know
(`synthesis/recorded_times.py`), caches and memory, which none does. What both cost is measured with copies of another
workload, `NEIGHBOUR`, that run beside each other and say nothing to each other.

All is run in `ROUNDS` rounds, and what a step takes is the median of the quickest fifth of all rounds' steps, as in
`predict_cpu.py`, of the slowest rank. `REPORTED` was written down before anything of it had been run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
from predict_cpu import COMMAND, ROOT, Case, quickest, summary

from graph_predictor.prediction.predictor import Baseline
from graph_predictor.request.parallel_ranks import on_ranks
from graph_predictor.synthesis.baseline import baseline_of
from kernel_models.collectives import CollectiveModel, CommProfile, find_topology
from kernel_models.collectives.logs import read_log
from kernel_models.collectives.measurements import join
from tracer.comm_bench import BenchPlan, sweep_sizes
from tracer.job import Job, read_job
from tracer.parallel_plan import ParallelPlan

REPORTED = ("dlrm", "llama", "gpt2", "vit")
"""Chosen before looking, at their default sizes."""
DEVELOPMENT = ("moe", "lstm")
NEIGHBOUR = "bert"
KINDS, PROCESSES = ("ddp", "fsdp2", "tp"), (2, 4)
TENSOR_PARALLEL = {"llama": (2,)}
"""Workloads that tensor parallelism can split, and over how many processes at their default sizes."""
ASKED = {2: 0.10, 4: 0.12}
ROUNDS = 2
OPTIONS = ("--warmup", "5", "--timed", "40", "--steps", "3", "--execution-trace", "none", "--form", "foretrace")
BENCH = BenchPlan(("all_reduce", "all_gather", "reduce_scatter", "broadcast"), sweep_sizes(256, 32 << 20), rounds=5)

Run = tuple[str, Callable[[Path], None]]


def _start(command: list[str], rank: int = 0, ranks: int = 1, port: int = 0) -> subprocess.Popen[bytes]:
    """A process on one thread; as one of several ranks, with what a launcher would tell it.

    A launcher would give its processes sessions of their own, which some schedulers share the cores out by.
    """
    told = {} if ranks == 1 else {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return subprocess.Popen([sys.executable, *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **told})


def _wait(processes: list[subprocess.Popen[bytes]]) -> None:
    failed = [process.args for process in processes if process.wait()]
    if failed:
        raise SystemExit(f"{failed[0]} failed")


def _together(command: list[str], ranks: int) -> None:
    """The same command in every rank of a world."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    _wait([_start(command, rank, ranks, port) for rank in range(ranks)])


def _capture(workload: str, out: Path, *more: str) -> list[str]:
    return ["-c", COMMAND, "capture", "--workload", workload, *OPTIONS, *more, "--out", str(out)]


def _copies(count: int, out: Path) -> None:
    """Processes beside each other that do not know of each other."""
    out.mkdir()
    _wait([_start(_capture(NEIGHBOUR, out / str(number))) for number in range(count)])


def _alone(workload: str, out: Path) -> None:
    _wait([_start(_capture(workload, out))])


def _ranks(workload: str, kind: str, count: int, out: Path) -> None:
    _together(_capture(workload, out, "--parallel", kind), count)


def _bench(count: int, out: Path) -> None:
    out.mkdir()
    _together(["-m", "tracer.comm_bench.worker", BENCH.to_text(), str(out / "table.jsonl")], count)


def kinds_of(workload: str, processes: int) -> tuple[str, ...]:
    """Plans that a workload can be spread by."""
    return tuple(kind for kind in KINDS if kind != "tp" or processes in TENSOR_PARALLEL.get(workload, ()))


def runs(workloads: tuple[str, ...]) -> Iterator[Run]:
    """Everything that is measured: a name in the folder and what fills it."""
    for number in range(ROUNDS):
        for count in (1, *PROCESSES):
            yield f"copies{count}-{number}", partial(_copies, count)
        for workload in workloads:
            yield f"{workload}-{number}", partial(_alone, workload)
            for count in PROCESSES:
                for kind in kinds_of(workload, count):
                    yield f"{workload}-{kind}={count}-{number}", partial(_ranks, workload, kind, count)
        for count in PROCESSES:
            yield f"comm{count}-{number}", partial(_bench, count)


def measure(workloads: tuple[str, ...], folder: Path, seconds: float) -> int:
    """Measure what is missing, for so long; how many are still missing."""
    begun, missing = time.monotonic(), 0
    for name, run in runs(workloads):
        if (folder / name).exists():
            continue
        if time.monotonic() - begun > seconds:
            missing += 1
            continue
        part = folder / f"part of {name}"
        shutil.rmtree(part, ignore_errors=True)
        run(part)
        part.rename(folder / name)
    return missing


def _jobs(folder: Path, name: str) -> list[Job]:
    return [read_job(folder / f"{name}-{number}") for number in range(ROUNDS)]


def step_ms(jobs: list[Job]) -> float:
    """What a step takes when nothing watches, of the slowest rank."""
    ranks = zip(*([graph.meta.unprofiled_step_ns for graph in job.graphs] for job in jobs), strict=True)
    return max(float(np.median(quickest(*rounds))) for rounds in ranks) / 1e6


def baseline(folder: Path, workload: str) -> Baseline:
    """The capture with the quickest profiled steps, with the quickest unwatched steps of all rounds."""
    jobs = _jobs(folder, workload)
    best = min(jobs, key=lambda job: float(np.median(job.graphs[0].steps.duration_ns)))
    best.graphs[0].meta.unprofiled_step_ns = quickest(*(job.graphs[0].meta.unprofiled_step_ns for job in jobs))
    return baseline_of(best)


def crowding(folder: Path, count: int) -> float:
    """How much slower a process is among others that it has nothing to do with."""
    def copies(many: int) -> float:
        rounds = [[read_job(folder / f"copies{many}-{number}" / str(copy)) for copy in range(many)]
                  for number in range(ROUNDS)]
        times = [step_ms(list(jobs)) for jobs in zip(*rounds, strict=True)]
        return float(np.mean(times))

    return copies(count) / copies(1)


def cases(folder: Path, workloads: tuple[str, ...], count: int) -> list[Case]:
    """Predictions for so many processes, each with its truth."""
    tables = [read_log(str(folder / f"comm{many}-{number}" / "table.jsonl"))
              for many in PROCESSES for number in range(ROUNDS)]
    cpu = find_topology("cpu")
    collectives = CollectiveModel(cpu, CommProfile.fit(join(tables).aggregated(), cpu))
    found = []
    for workload in workloads:
        alone = baseline(folder, workload)
        for kind in kinds_of(workload, count):
            spread = on_ranks(alone, ParallelPlan.parse(f"{kind}={count}"), collectives)
            said = spread.predict()
            truth = _jobs(folder, f"{workload}-{kind}={count}")
            rounds = [step_ms([job]) for job in truth]
            low, high = said.interval_us
            found.append(Case(workload, kind, said.step_time_us / 1e3, low / 1e3, high / 1e3, step_ms(truth),
                              (min(rounds), max(rounds))))
    return found


def main() -> None:
    """Measure, predict, and print every case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep what is measured here, and use what is there")
    parser.add_argument("--measure", type=float, metavar="SECONDS", help="only measure, for about so long")
    parser.add_argument("--development", action="store_true", help="the workloads that the tables do not rest on")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    workloads = DEVELOPMENT if options.development else REPORTED
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(exist_ok=True)
        missing = measure(workloads, folder, np.inf if options.measure is None else options.measure)
        if options.measure is not None or missing:
            print(f"{missing} runs are missing")
            return
        for count in PROCESSES:
            found = cases(folder, workloads, count)
            print(f"\n{count} processes on {os.cpu_count()} cores (copies of {NEIGHBOUR} that know nothing of each "
                  f"other take {crowding(folder, count):.2f} times as long)")
            print(f"{'workload':10}{'plan':7}{'predicted ms':>13}{'80% interval':>18}{'real ms':>9}{'rounds':>16}"
                  f"{'error':>8}  covered")
            for case in found:
                print(f"{case.workload:10}{case.sizes:7}{case.predicted:13.2f}"
                      f"{f'{case.low:.2f} – {case.high:.2f}':>18}{case.truth:9.2f}"
                      f"{f'{case.rounds[0]:.2f} – {case.rounds[1]:.2f}':>16}{case.error:+8.1%}"
                      f"  {'yes' if case.covered else 'no'}")
            print(summary(f"asked: MAPE {ASKED[count]:.0%}", found))


if __name__ == "__main__":
    main()
