"""Reading a job's ranks on all cores against one: wall seconds, and what the copies of the process cost.

    python benchmarks/rank_reading.py                   # eight ranks of nanoGPT, and eight of 200,000 events
    python benchmarks/rank_reading.py TRACE TRACE ...   # these ranks
    sudo chrt --fifo 10 python benchmarks/rank_reading.py    # beside other work, which stands still for it

Each reading is a command's: the first in a process of its own, whose imports are done. One core and all cores go in
turns; the least wall time counts, and the least processor time of all processes together. ``bound`` is what that time
allows where it is shared out evenly and nothing else runs: cores × processor time on one core / on all. On all cores
copies are made whatever else runs, while a command makes them of idle cores alone: a ratio far below its bound says
that the machine was busy, as does the load that is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("FORETRACE_DATA", ROOT.parent / "shared" / "data"))
HEAD = f"{'ranks':<38} {'one core':>9} {'all cores':>10} {'ratio':>6} {'CPU one':>8} {'CPU all':>8} {'bound':>6}"


class Reading(NamedTuple):
    """Wall seconds of reading a job, and processor seconds of all processes that did."""

    wall_s: float
    cpu_s: float


def read_once(paths: list[str], cores: int) -> Reading:
    """Read a job in this process on so many of its cores, by copies if there are several."""
    import tracer.job

    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    tracer.job.LEAST_BYTES, tracer.job.idle_cores = 0, lambda: cores
    begin, before = time.perf_counter(), _processor_s()
    tracer.job.read_job(paths)
    return Reading(time.perf_counter() - begin, _processor_s() - before)


def _processor_s() -> float:
    """Processor seconds of this process and of those of its own that ended."""
    used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def in_a_process(paths: list[str], cores: int) -> Reading:
    """``read_once`` in a process of its own."""
    done = subprocess.run([sys.executable, __file__, "--once", str(cores), *paths], capture_output=True, text=True,
                          check=True)
    return Reading(*json.loads(done.stdout))


def row(name: str, paths: list[str], turns: int = 9) -> str:
    """Measure a job on one core and on all, in turns after one that fills caches; returns its line of the table."""
    cores = len(os.sched_getaffinity(0))
    turn = [(in_a_process(paths, 1), in_a_process(paths, cores)) for _ in range(turns + 1)][1:]
    one, every = zip(*turn, strict=True)
    wall, cpu = ([min(each[which] for each in some) for some in (one, every)] for which in range(2))
    return (f"{name:<38} {wall[0]:>9.2f} {wall[1]:>10.2f} {wall[0] / wall[1]:>6.2f} {cpu[0]:>8.2f} {cpu[1]:>8.2f} "
            f"{cores * cpu[0] / cpu[1]:>6.2f}")


def rows(data: Path, folder: Path) -> list[str]:
    """Measure the eight ranks of nanoGPT, if they are there, and eight generated ones."""
    from breakdown_speed import write_trace

    copies = [folder / f"rank{rank}.json" for rank in range(8)]
    with copies[0].open("w", encoding="utf-8") as file:
        write_trace(file, 200_000, 100)
    for copy in copies[1:]:
        shutil.copy(copies[0], copy)
    jobs = {"nanoGPT on H100, 5 MB of gzip": sorted((data / "traces" / "nanogpt-8xH100").glob("*.json.gz")),
            "200,000 events each, 171 MB of text": copies}
    return [row(name, list(map(str, paths))) for name, paths in jobs.items() if paths]


def main() -> None:
    """Print the table."""
    if sys.argv[1:2] == ["--once"]:
        print(json.dumps(read_once(sys.argv[3:], int(sys.argv[2]))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", help="the ranks of a job")
    options = parser.parse_args()
    print(f"{len(os.sched_getaffinity(0))} cores; load of the last minute {os.getloadavg()[0]:.1f}\n\n{HEAD}")
    with tempfile.TemporaryDirectory() as folder:
        print(*[row(f"{len(options.traces)} ranks", options.traces)] if options.traces else rows(DATA, Path(folder)),
              sep="\n")


if __name__ == "__main__":
    main()
