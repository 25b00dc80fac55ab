"""What a survey of many jobs costs, whether it survives being killed, and whether it names what was planted.

    python benchmarks/survey.py ../shared/data/traces --jobs 100            # all parts; --jobs 1000 for the large one
    python benchmarks/survey.py ../shared/data/traces --only planted quiet

Jobs are made of published traces whose time is warped: each stretch of 1 to 3% of the window is made longer or shorter
by a normal error (``--sd``), and every event of every rank goes through the same map, so that nothing overtakes
anything. One in twenty files is damaged (cut off, empty, no gzip). What is planted is a warp too: the intervals of
chosen events are stretched such that the window becomes 5 to 25% longer. The words expected were
written before a run; the kinds were not: attention took the place of a late blocking call, which is kept as a 13th.
"""

from __future__ import annotations

import argparse
import gzip
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import msgspec
import numpy as np

from step_views.survey.discovery import find_jobs
from step_views.survey.facts import BOUND_COLUMNS, job_rows
from step_views.survey.fleet import fleet
from step_views.survey.run import survey
from step_views.survey.slower import regressions
from step_views.survey.table import read_tables

BASES = ("resnet50-V100/*.gz", "nanogpt-rank0-of-8xH100/*.gz", "rank3-of-8xA100-6steps/*.gz", "vllm-eager-B200/*.gz",
         "resnet50-ddp-2xA100/rank0.kineto.json.gz", "dlrm-8xV100-2023/*.kineto.json.gz",
         "linear-2080Ti/kineto.json.gz", "resnet50-V100-2021/loader*.gz", "vllm-cuda-graph/*.gz",
         "resnet18-ddp-MI300X/*.gz")
DAMAGED = 0.05
HOST, DEVICE = "cpu_op", "kernel"


class Planted(NamedTuple):
    """What is stretched: events of a base whose category and name match, or the gaps between them, or the part of them
    in which the device is idle already (``lag``); and the word."""

    base: str
    category: str
    name: str
    cause: str
    gaps: bool = False
    lag: bool = False


PLANTED = {
    "operations": Planted("resnet50-ddp-2xA100/rank0.kineto.json.gz", HOST, "^aten::(convolution|add_)$", "host"),
    "python": Planted("linear-2080Ti/kineto.json.gz", HOST, "", "host", gaps=True),
    "launches": Planted("linear-2080Ti/kineto.json.gz", "cuda_runtime", "^cudaLaunchKernel", "launch"),
    "attention": Planted("nanogpt-rank0-of-8xH100/*.gz", DEVICE, "(?i)flash::.*Flash", "compute: attention"),
    "loader": Planted("resnet50-V100-2021/loader*.gz", HOST, r"^enumerate\(DataLoader\)", "data loading"),
    "copies": Planted("resnet50-V100/*.gz", "gpu_memcpy", "", "memory copy"),
    "network": Planted("nanogpt-rank0-of-8xH100/*.gz", DEVICE, "nccl", "exposed communication"),
    "conv": Planted("resnet50-V100/*.gz", DEVICE, "(?i)conv|scudnn|winograd|wgrad|dgrad", "compute: conv"),
    "norm": Planted("resnet50-V100/*.gz", DEVICE, "(?i)bn_|batch_norm|batchnorm", "compute: norm"),
    "gemm": Planted("nanogpt-rank0-of-8xH100/*.gz", DEVICE, "(?i)^(?!.*flash).*(gemm|nvjet)", "compute: gemm"),
    "elementwise": Planted("resnet50-V100/*.gz", DEVICE, "elementwise", "compute: elementwise"),
    # A blocking call that returns late; called the host's where a host decides, as its other calls are.
    "sync": Planted("rank3-of-8xA100-6steps/*.gz", "cuda_runtime", "^cudaStreamSynchronize", "sync", lag=True),
    "clock": Planted("resnet50-V100/*.gz", DEVICE, "", "compute: all kernels"),
}


@cache
def events_of(path: str) -> tuple[Any, list[dict[str, Any]]]:
    """A trace's document and its events with times."""
    document = msgspec.json.decode(gzip.decompress(Path(path).read_bytes()))
    events = document["traceEvents"] if isinstance(document, dict) else document
    return document, [each for each in events if isinstance(each.get("ts"), int | float)]


def files_of(data: Path, pattern: str) -> list[Path]:
    """The ranks of a base."""
    return sorted(data.glob(pattern))


def window(files: Sequence[Path]) -> tuple[float, float]:
    """First and last time of the ranks, µs."""
    ends = [(each["ts"], each["ts"] + (each.get("dur") or 0)) for file in files for each in events_of(str(file))[1]
            if each.get("ph") == "X"]
    return min(start for start, _ in ends), max(end for _, end in ends)


def intervals(files: Sequence[Path], planted: Planted) -> list[tuple[float, float]]:
    """What is stretched, apart from one another; of several ranks where all of them are in it."""
    found: list[tuple[float, float]] = []
    per_rank = []
    for file in files:
        complete = [each for each in events_of(str(file))[1] if each.get("ph") == "X"]
        own = sorted((each["ts"], each["ts"] + each["dur"]) for each in complete
                     if category_of(each) == planted.category and re.search(planted.name, each["name"]))
        if planted.lag:
            busy = np.sort([each["ts"] + each["dur"] for each in complete if category_of(each) == DEVICE])
            own = [(max(a, float(busy[np.searchsorted(busy, b) - 1])), b) for a, b in own if b > busy[0]]
        joined: list[list[float]] = []
        for start, end in own:
            if joined and start <= joined[-1][1]:
                joined[-1][1] = max(joined[-1][1], end)
            else:
                joined.append([start, end])
        if planted.gaps:
            joined = [[a[1], b[0]] for a, b in pairwise(joined)]
        per_rank.append([(a, b) for a, b in joined if b > a])
    found = per_rank[0]
    for other in per_rank[1:]:
        found = [(max(a, c), min(b, d)) for a, b in found for c, d in other if max(a, c) < min(b, d)]
    return found


def category_of(event: dict[str, Any]) -> str:
    """The category of an event in the words of today's profiler."""
    category = str(event.get("cat", "")).lower()
    return {"operator": HOST, "runtime": "cuda_runtime", "memcpy": "gpu_memcpy"}.get(category, category)


def warp(files: Sequence[Path], rng: np.random.Generator, sd: float, planted: Planted | None = None,
         longer: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Old and new times between which a map of times is linear: of the jitter, and of what is planted."""
    first, last = window(files)
    parts = int(rng.integers(33, 100))
    old = np.linspace(first, last, parts + 1)
    stretches = intervals(files, planted) if planted is not None else []
    total = sum(b - a for a, b in stretches)
    if planted is not None and not total:
        raise SystemExit(f"Nothing of {files[0]} is what would be planted: {planted}")
    marks = np.unique(np.concatenate([old, np.array(stretches).ravel()]))
    middle = (marks[1:] + marks[:-1]) / 2
    rate = np.exp(rng.normal(0.0, sd, parts))[np.clip(np.searchsorted(old, middle) - 1, 0, parts - 1)]
    if stretches:
        starts = np.array([a for a, _ in stretches])
        ends = np.array([b for _, b in stretches])
        at = np.searchsorted(starts, middle, side="right") - 1
        inside = (at >= 0) & (middle < ends[np.maximum(at, 0)])
        rate[inside] *= 1.0 + longer * (last - first) / total
    return marks, marks[0] + np.concatenate([[0.0], np.cumsum(rate * np.diff(marks))])


def write_job(files: Sequence[Path], folder: Path, times: tuple[np.ndarray, np.ndarray]) -> None:
    """Write the ranks with other times."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        document, events = events_of(str(file))
        start = np.array([each["ts"] for each in events], np.float64)
        end = start + np.array([each.get("dur") or 0 for each in events], np.float64)
        new_start, new_end = (_mapped(values, *times) for values in (start, end))
        was = [(each["ts"], each.get("dur")) for each in events]
        for each, a, b in zip(events, new_start.tolist(), new_end.tolist(), strict=True):
            each["ts"] = round(a, 3)
            if each.get("dur") is not None:
                each["dur"] = round(b - a, 3)
        (folder / file.name).write_bytes(gzip.compress(msgspec.json.encode(document), 1))
        for each, (ts, dur) in zip(events, was, strict=True):
            each["ts"] = ts
            if dur is not None:
                each["dur"] = dur


def _mapped(values: np.ndarray, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Times mapped; outside of the marks they are shifted."""
    found = np.interp(values, old, new)
    return np.where(values < old[0], values - old[0] + new[0], np.where(values > old[-1], values - old[-1] + new[-1],
                                                                        found))


def make_fleet(data: Path, out: Path, jobs: int, sd: float, seed: int) -> None:
    """Jobs of varied times, some damaged."""
    rng, dice = np.random.default_rng(seed), random.Random(seed)
    for number in range(jobs):
        files = files_of(data, BASES[number % len(BASES)])
        folder = out / f"job{number:05}"
        write_job(files, folder, warp(files, rng, sd))
        if dice.random() < DAMAGED:
            victim = folder / files[0].name
            content = victim.read_bytes()
            victim.write_bytes(dice.choice([content[:len(content) // 2], b"", b"no gzip" * 99]))


def tree_memory(process: int) -> int:
    """Bytes that a process and its children have, shared pages once."""
    total = 0
    for pid in (process, *children(process)):
        with suppress(OSError, AttributeError):
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
            total += 1024 * int(re.search(r"^Pss:\s+(\d+)", rollup, re.MULTILINE).group(1))  # type: ignore[union-attr]
    return total


def command(runs: Path, table: Path) -> list[str]:
    """The command of a survey."""
    return [sys.executable, "-m", "foretrace", "survey", str(runs), "-o", str(table), "--least-read", "0"]


def measured(runs: Path, table: Path) -> tuple[float, float, int]:
    """CPU seconds, seconds, and the most bytes of a survey in processes of its own."""
    before, since, most = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic(), 0
    process = subprocess.Popen(command(runs, table), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        most = max(most, tree_memory(process.pid))
        time.sleep(0.2)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, time.monotonic() - since, most)


def equal(one: Path, other: Path) -> bool:
    """Whether two tables are equal."""
    return all(rows.equals(read_tables(other)[name]) for name, rows in read_tables(one).items())


def cost(data: Path, folder: Path, options: argparse.Namespace) -> None:
    """CPU against reading singly, and memory; then kills."""
    runs = folder / "runs"
    if not runs.exists():
        make_fleet(data, runs, options.jobs, options.sd, 1)
    cpu, seconds, most = measured(runs, folder / "whole")
    rows = read_tables(folder / "whole")["jobs"].to_pylist()
    failed = sum(bool(row["error"]) for row in rows)
    print(f"{len(rows)} jobs ({failed} not read): {cpu:.1f} CPU s, {seconds:.1f} s, {most / 1e9:.2f} GB at most")
    stored = sum(path.stat().st_size for path in (folder / "whole").rglob("*.parquet"))
    print(f"a job: {sum(row['bytes'] for row in rows) / len(rows) / 1e6:.1f} MB of recordings, "
          f"{stored / len(rows) / 1e3:.1f} KB of the table, {cpu / len(rows):.2f} CPU s")
    found = find_jobs([str(runs)])
    since = time.process_time()
    for job in found.jobs:
        job_rows(job)
    singly = time.process_time() - since
    print(f"each singly in one process: {singly:.1f} CPU s; the survey takes {cpu / singly:.2f} times that")
    again, _, _ = measured(runs, folder / "whole")
    print(f"once more, unchanged: {again:.1f} CPU s")


def kills(data: Path, folder: Path, options: argparse.Namespace) -> None:
    """Kill surveys at random moments until one ends."""
    runs, whole, killed = folder / "runs", folder / "whole", folder / "killed"
    dice = random.Random(2)
    for number in range(options.kills):
        process = subprocess.Popen(command(runs, killed), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        try:
            process.wait(dice.uniform(5, 5 + options.jobs / 4))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
        there = len(read_tables(killed)["jobs"]) if list(killed.glob("jobs/part-*")) else 0
        print(f"kill {number + 1}: {there} jobs are in the table")
    result = survey(str(runs), killed)
    print(f"resumed: {result.headline()}; equal to the whole one's table: {equal(whole, killed)}")


def planted(data: Path, folder: Path, options: argparse.Namespace) -> None:
    """A fleet with slowness of twelve kinds and a late ``sync`` against a quiet one."""
    rng = np.random.default_rng(3)
    each = options.planted // len(PLANTED)
    truth = {}
    for kind, one in PLANTED.items():
        files = files_of(data, one.base)
        for number in range(each):
            name = f"{kind}-{number:02}"
            device = f"{name} {files[0].parent.name}"
            for side, longer in (("quiet", 0.0), ("slow", float(rng.uniform(0.05, 0.25)))):
                if not (folder / side / name).exists():
                    times = warp(files, rng, options.sd, one if longer else None, longer)
                    write_job(files, folder / side / name, times)
            truth[name] = one.cause, device
    for side in ("quiet", "slow"):
        survey(str(folder / side), folder / f"{side}.parquet", tags=[side])
    # Each job against its own: one program is in the fleet many times.
    right, ranked = 0, 0
    wrong: dict[str, list[str]] = {}
    for name, (cause, _) in truth.items():
        found = one_against_one(folder, name)
        if found and found[0].cause == cause:
            right += 1
        else:
            kind = name.rpartition("-")[0]
            wrong.setdefault(kind, []).append(found[0].cause if found else "none found")
        ranked += bool(found)
    print(f"planted: {right} of {len(truth)} causes named, {ranked} found slower; wrong: {wrong}")
    for one in fleet(folder / "slow.parquet").lost:
        print(f"  lost to {one.cause}: {one.gpu_s_an_hour:,.0f} GPU-s an hour")


def one_against_one(folder: Path, name: str) -> list[Any]:
    """Regressions of one job against its quiet one."""
    sides = []
    for side in ("quiet", "slow"):
        tables = tables_of(str(folder / f"{side}.parquet"))
        sides.append(tuple([row for row in tables[kind] if f"/{name}/" in row["job"]] for kind in ("jobs", "families")))
    return regressions(*sides)[0]


@cache
def tables_of(path: str) -> dict[str, list[dict[str, Any]]]:
    """A survey's rows."""
    return {name: rows.to_pylist() for name, rows in read_tables(path).items()}


def quiet(data: Path, folder: Path, options: argparse.Namespace) -> None:
    """Pairs of surveys without a change, and with every step 3% longer."""
    rng = np.random.default_rng(4)
    alarms = compared = missed = silent = 0
    for pair in range(options.pairs):
        for side, longer in (("before", 0.0), ("after", 0.0), ("slower", options.least)):
            for number, base in enumerate(BASES):
                files = files_of(data, base)
                old, new = warp(files, rng, options.sd)
                new = new[0] + (new - new[0]) * (1 + longer)
                write_job(files, folder / f"pair{pair}" / side / f"{number}", (old, new))
            survey(str(folder / f"pair{pair}" / side), folder / f"pair{pair}" / f"{side}.parquet")
        before, after, slower = (folder / f"pair{pair}" / f"{side}.parquet" for side in ("before", "after", "slower"))
        still = fleet(after, since=before)
        grown = fleet(slower, since=before)
        alarms, compared = alarms + len(still.slower), compared + (still.compared or 0)
        missed += (grown.compared or 0) - len(grown.slower)
        silent += (grown.compared or 0) - len(grown.slower) - len(grown.untold)
        told = ", ".join(f"{one.steps_before} steps {one.least:.1%}" for one in grown.untold)
        print(f"pair {pair + 1}: {len(still.slower)} false of {still.compared}; planted {options.least:.1%}: "
              f"{len(grown.slower)} of {grown.compared} found; could tell only {told or 'all'}", flush=True)
    print(f"quiet pairs: {alarms} false of {compared}; planted: {missed} of {compared} not found, of which {silent} "
          "without saying that there are too few steps")


def engines(data: Path, folder: Path, options: argparse.Namespace) -> None:
    """Surveys by Dask's and Ray's processes against one of this process; then with a worker killed under way."""
    runs = folder / "runs"
    if not runs.exists():
        make_fleet(data, runs, options.jobs, options.sd, 5)
    survey(str(runs), folder / "here", workers=1)
    for engine in options.engines:
        for kill in (False, True):
            table, since = folder / f"{engine}{kill:d}", time.monotonic()
            process = subprocess.Popen([*command(runs, table), "--workers", engine], stdout=subprocess.DEVNULL,
                                       stderr=subprocess.PIPE, text=True)
            killed = kill and kill_worker(process, engine)
            said = (process.communicate()[1] or "").strip().splitlines()
            same = process.returncode == 0 and equal(folder / "here", table)
            how = ", a worker killed" if killed else ", no worker could be killed" if kill else ""
            took = time.monotonic() - since
            print(f"{engine}{how}: exit code {process.returncode}, equal table: {same}, {took:.0f} s"
                  f"{'' if same else f': {said[-1:]}'}", flush=True)


def kill_worker(process: subprocess.Popen[str], engine: str) -> bool:
    """Kill a process that works on a job, once one has used processor time for it; false where the survey ended."""
    marks = {"dask": "spawn_main", "ray": "ray::_call"}
    while process.poll() is None:
        for pid in children(process.pid):
            with suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                ticks = sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
                if marks[engine] in line and ticks > 300:
                    os.kill(pid, signal.SIGKILL)
                    return True
        time.sleep(0.1)
    return False


def children(process: int) -> list[int]:
    """A process's children and theirs."""
    found, waiting = list[int](), [process]
    while waiting:
        pid = waiting.pop()
        with suppress(OSError):
            own = [int(child) for task in os.listdir(f"/proc/{pid}/task") for child in Path(
                f"/proc/{pid}/task/{task}/children").read_text(encoding="ascii").split()]
            found += own
            waiting += own
    return found


def ranks(data: Path, folder: Path, options: argparse.Namespace) -> None:
    """One job of ever more ranks: copies of a rank's trace with the number of another one."""
    [file] = files_of(data, options.rank_of)
    document, _ = events_of(str(file))
    whole = msgspec.json.encode({key: value for key, value in document.items() if key != "distributedInfo"})
    most = gzip.compress(whole[1:], 1)  # a file of two members, of which the first is a rank's own
    for number in options.ranks:
        runs = folder / f"{number}"
        runs.mkdir(parents=True, exist_ok=True)
        for rank in range(number):
            own = b'{"distributedInfo":{"backend":"nccl","rank":%d,"world_size":%d},' % (rank, number)
            (runs / f"rank{rank}.json.gz").write_bytes(gzip.compress(own, 1) + most)
        cpu, seconds, most = measured(runs, folder / f"{number}.parquet")
        [row] = read_tables(folder / f"{number}.parquet")["jobs"].to_pylist()
        print(f"{number} ranks ({row['ranks']} read, {row['operations'] + row['kernels']:,} operations and kernels"
              f"{', ' + row['error'] if row['error'] else ''}): {cpu:.1f} CPU s, {seconds:.1f} s, {most / 1e9:.2f} GB, "
              f"{1e3 * cpu / number:.0f} ms a rank", flush=True)


def mixed(data: Path, folder: Path, options: argparse.Namespace) -> None:
    """Made-up rows of fleets of 20 programs whose steps vary by 0.3 to 4% (log-normal around 1%), of 1 to 30 steps."""
    lengths, false, silent = (1, 2, 3, 6, 12, 30), 0, 0
    there: Counter[int] = Counter()
    found: Counter[int] = Counter()
    for fleet_number in range(options.fleets):
        rng = np.random.default_rng(fleet_number)
        sd, steps = np.exp(rng.normal(np.log(0.01), 1.0, 20)), rng.choice(lengths, 20)
        before, after, slower = ([{
            "job": str(at), "program": str(at), "profiled": True, "device": "H100", "ranks": 1, "world_size": 8,
            "step_time_us": 1e5, "step_times_us": (1e5 * times * np.exp(rng.normal(0, sd[at], steps[at]))).tolist(),
            "operation_codes": [at], "operation_counts": [1], "saves_loading_us": 0.0,
            **dict.fromkeys(BOUND_COLUMNS, 0.0), "compute_us": 8e4} for at in range(20)]
            for times in (1.0, 1.0, 1.0 + options.least))
        false += len(regressions((before, []), (after, []))[0])
        told, untold, _ = regressions((before, []), (slower, []))
        there.update(steps.tolist())
        found.update(int(steps[int(one.job)]) for one in told)
        silent += 20 - len(told) - len(untold)
    print(f"{options.fleets} fleets: {false} false; {options.least:.0%} planted, found by steps of a run: "
          + ", ".join(f"{each}: {found[each]} of {there[each]}" for each in lengths)
          + f"; neither found nor named: {silent}")


def requests(data: Path, folder: Path, options: argparse.Namespace) -> None:
    """Calls of an fsspec file system for each file: listed, looked at, read."""
    made: Counter[str] = Counter()
    memory = fsspec.filesystem("memory")
    files = 8
    for number in range(files):
        memory.pipe(f"/fleet/{number}/rank0.json.gz", files_of(data, options.rank_of)[0].read_bytes())
    with counting(type(memory), made, ("find", "info", "open")):
        found = find_jobs(["memory://fleet"])
        listed = dict(made)
        made.clear()
        for job in found.jobs:
            job_rows(job)
    for what, calls in (("found", listed), ("read", made)):
        print(f"{files} files {what}: " + ", ".join(f"{name} {number}" for name, number in sorted(calls.items())))


@contextmanager
def counting(kind: type, made: Counter[str], names: Sequence[str]) -> Iterator[None]:
    """Count calls of a class's methods."""
    usual = {name: getattr(kind, name) for name in names}

    def counted(name: str) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            made[name] += 1
            return usual[name](*given, **named)

        return call

    for name in names:
        setattr(kind, name, counted(name))
    try:
        yield
    finally:
        for name in names:
            setattr(kind, name, usual[name])


def trees(data: Path, folder: Path, options: argparse.Namespace) -> None:
    """Links in a circle, very many small files, and directories and files without rights, beside two good jobs."""
    runs = folder / "runs"
    for name in ("a", "b"):
        write_job(files_of(data, BASES[4]), runs / name, (np.array([0.0, 1.0]), np.array([0.0, 1.0])))
    (runs / "many").mkdir()
    for number in range(options.small):
        (runs / "many" / f"{number}.json").write_text('{"settings": 1}')
    for link, target in (("a/up", runs), ("b/self", runs / "b" / "self"), ("b/other", runs / "a")):
        (runs / link).symlink_to(target)
    shutil.copytree(runs / "a", runs / "secret", symlinks=True)
    shutil.copytree(runs / "a", runs / "file", symlinks=True)
    (runs / "secret").chmod(0)
    next((runs / "file").glob("*.gz")).chmod(0)
    # Root may read everything unless it gives that up.
    limited = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    since = time.monotonic()
    done = subprocess.run([*limited, *command(runs, folder / "table")[:-2], "--workers", "1"], text=True,
                          capture_output=True, check=False)
    (runs / "secret").chmod(0o700)
    lines = done.stderr.strip().splitlines()
    print(f"exit code {done.returncode}, {len(lines)} lines, {time.monotonic() - since:.1f} s\n{done.stdout}")
    print("\n".join(lines[:20]))


PARTS: dict[str, Callable[[Path, Path, argparse.Namespace], None]] = {
    "cost": cost, "kills": kills, "planted": planted, "quiet": quiet, "mixed": mixed, "engines": engines,
    "ranks": ranks, "requests": requests, "trees": trees}


def main() -> None:
    """Run the parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="published traces, a directory each")
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--planted", type=int, default=130)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--least", type=float, default=0.03, help="growth that is planted in pairs")
    parser.add_argument("--sd", type=float, default=0.01, help="of the log of the time of a stretch of the window")
    parser.add_argument("--engines", nargs="*", default=["dask", "ray"])
    parser.add_argument("--fleets", type=int, default=100, help="of made-up rows")
    parser.add_argument("--ranks", nargs="*", type=int, default=[2, 16, 64, 256], help="of one job")
    parser.add_argument("--rank-of", default="linear-2080Ti/kineto.json.gz", help="whose trace is copied for each rank")
    parser.add_argument("--small", type=int, default=100_000, help="files of a tree that are no recordings")
    parser.add_argument("--only", nargs="*", choices=[*PARTS], default=[*PARTS])
    parser.add_argument("--keep", type=Path, help="a directory for what is made, used again by the next run")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch)
        for name in options.only:
            print(f"== {name}", flush=True)
            PARTS[name](options.data, folder / ("cost" if name == "kills" else name), options)


if __name__ == "__main__":
    main()
