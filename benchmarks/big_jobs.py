"""Jobs of hundreds of ranks read by processes of Dask or Ray: time, memory, and the same results as one process.

    python benchmarks/big_jobs.py DATA [--ranks 16 64 256] [--megabytes 20] [--workers dask ray local]

``DATA`` is the folder with ``traces/nanogpt-8xH100``. The eight ranks' traces are repeated in time until each has so
many megabytes, and handed out again as many ranks of a larger job. Each job is read in a process of its own; memory is
the largest resident set of that process, and of any of its workers, sampled ten times a second. The smallest job is
replayed by all of them, and must come out equal.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

READ = """
import json, sys
from tracer.cluster import open_workers
from tracer.job import read_job
if __name__ == "__main__":
    with open_workers(sys.argv[2]) as workers:
        job = read_job(sys.argv[1], workers=workers)
    print(json.dumps([len(job.graphs), sum(len(graph.ops) + len(graph.kernels) for graph in job.graphs)]))
"""


def bodies(folder: Path, megabytes: float) -> list[str]:
    """Events of each of the eight ranks, repeated one after the other, as JSON text."""
    found = []
    for path in sorted(folder.glob("*.json.gz")):
        with gzip.open(path) as stream:
            events: list[dict[str, Any]] = json.load(stream)["traceEvents"]
        timed = [event for event in events if "ts" in event]
        span = max(event["ts"] + event.get("dur", 0) for event in timed) - min(event["ts"] for event in timed) + 1000
        parts, size, turn = [], 0, 0
        while size < megabytes * 1e6:
            text = ",".join(json.dumps(_moved(event, turn, span), separators=(",", ":")) for event in events
                            if turn == 0 or "ts" in event)
            parts.append(text)
            size, turn = size + len(text), turn + 1
        found.append(",".join(parts))
    return found


def _moved(event: dict[str, Any], turn: int, span: float) -> dict[str, Any]:
    """An event so many turns later, with numbers of its own for what joins it to others."""
    moved = {**event, "ts": event["ts"] + turn * span} if "ts" in event else dict(event)
    if "id" in moved and isinstance(moved["id"], int):
        moved["id"] += turn * 10_000_000
    if "args" in moved and turn:
        moved["args"] = {name: value + turn * 10_000_000 if name in ("correlation", "External id") and isinstance(
            value, int) else value for name, value in moved["args"].items()}
    return moved


def write_job(folder: Path, texts: list[str], ranks: int) -> float:
    """Write each rank's trace; megabytes of one in the mean."""
    folder.mkdir(exist_ok=True)
    for rank in range(ranks):
        head = {"schemaVersion": 1, "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": ranks}}
        (folder / f"rank{rank}.json").write_text(
            json.dumps(head)[:-1] + ', "traceEvents": [' + texts[rank % len(texts)] + "]}", encoding="utf-8")
    return sum(path.stat().st_size for path in folder.iterdir()) / ranks / 1e6


def measured(folder: Path, workers: str) -> tuple[float, float, float, list[int]]:
    """Seconds to read a job, peak GB of the reading process and of any worker, and what was read."""
    with tempfile.TemporaryDirectory() as code:
        script = Path(code) / "read_it.py"
        script.write_text(READ, encoding="utf-8")
        begin = time.perf_counter()
        process = subprocess.Popen([sys.executable, str(script), str(folder), workers], stdout=subprocess.PIPE,
                                   stderr=subprocess.DEVNULL, text=True)
        peak = [0.0, 0.0]
        done = threading.Event()
        watcher = threading.Thread(target=_watch, args=(process.pid, peak, done))
        watcher.start()
        text, _ = process.communicate()
        seconds = time.perf_counter() - begin
        done.set()
        watcher.join()
    return seconds, peak[0], peak[1], json.loads(text)


def _watch(pid: int, peak: list[float], done: threading.Event) -> None:
    """Keep the largest resident set of a process, and of any below it, GB."""
    while not done.wait(0.1):
        try:
            main = psutil.Process(pid)
            peak[0] = max(peak[0], main.memory_info().rss / 1e9)
            for child in main.children(recursive=True):
                peak[1] = max(peak[1], child.memory_info().rss / 1e9)
        except psutil.Error:
            continue


def main() -> None:
    """Write, read, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--ranks", nargs="+", type=int, default=[16, 64, 256])
    parser.add_argument("--megabytes", type=float, default=20.0)
    parser.add_argument("--workers", nargs="+", default=["dask", "ray", "local"])
    options = parser.parse_args()
    texts = bodies(options.data / "traces" / "nanogpt-8xH100", options.megabytes)
    print(f"{'ranks':>6}{'MB each':>9}{'workers':>9}{'seconds':>9}{'a rank':>8}{'reader GB':>11}{'worker GB':>11}"
          f"{'events':>13}")
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "job"
            size = write_job(folder, texts, ranks)
            for workers in options.workers:
                seconds, reader, worker, (read, events) = measured(folder, workers)
                assert read == ranks
                print(f"{ranks:6}{size:9.1f}{workers:>9}{seconds:9.1f}{seconds / ranks:8.3f}{reader:11.2f}"
                      f"{worker:11.2f}{events:13,}", flush=True)
            if ranks == min(options.ranks):
                said = [subprocess.run([sys.executable, "-m", "foretrace", "replay", str(folder), "--json", "--workers",
                                        workers], capture_output=True, check=True).stdout
                        for workers in dict.fromkeys(("local", *options.workers))]
                print("replayed alike by all:", all(text == said[0] for text in said))


if __name__ == "__main__":
    main()
