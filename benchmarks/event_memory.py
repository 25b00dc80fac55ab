"""Peak memory and CPU of commands on large recordings, by their number of events.

    python benchmarks/event_memory.py                        # 1.25 and 5 million events
    python benchmarks/event_memory.py --events 20 --command predict

Events are operations, launches and kernels. Ten steps of one stream are written, each operation with one launch and one
kernel; whole commands are run on them, one after the other.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

COMMANDS = ("inspect", "replay", "breakdown", "predict", "opportunities", "report", "diff")
STEPS = 10
OPERATIONS = (("aten::mm", "ampere_sgemm_128x64_nn", [[1024, 512], [512, 256]]),
              ("aten::add", "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>",
               [[1024, 256], [1024, 256]]),
              ("aten::relu", "void at::native::vectorized_elementwise_kernel<4, at::native::relu_kernel>",
               [[1024, 256]]))
DEVICE = {"id": 0, "name": "NVIDIA A100-SXM4-80GB", "totalGlobalMem": 85_000_000_000, "computeMajor": 8,
          "computeMinor": 0, "numSms": 108}


def write_recording(path: Path, operations: int) -> None:
    """Write a trace of ``STEPS`` steps of so many operations each."""
    with gzip.open(path, "wt", compresslevel=1) as file:
        file.write(f'{{"schemaVersion": 1, "deviceProperties": [{json.dumps(DEVICE)}], "traceEvents": [\n')
        for event in _events(operations):
            file.write(json.dumps(event) + ",\n")
        file.write('{"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "ts": 0, "args": {"name": "python"}}\n]}')


def _events(operations: int) -> Iterator[dict[str, object]]:
    at, number = 1_000, 0
    for step in range(STEPS):
        begin = at
        for _ in range(operations):
            name, kernel, sizes = OPERATIONS[number % len(OPERATIONS)]
            number += 1
            call = {"ph": "X", "pid": 1, "tid": 1}
            yield {**call, "cat": "cpu_op", "name": name, "ts": at, "dur": 18, "args": {
                "External id": number, "Input Dims": sizes, "Input type": ["float"] * len(sizes)}}
            yield {**call, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": at + 5, "dur": 7,
                   "args": {"External id": number, "correlation": number}}
            yield {"ph": "X", "cat": "kernel", "name": kernel, "pid": 0, "tid": 7, "ts": at + 14, "dur": 12, "args": {
                "External id": number, "correlation": number, "device": 0, "stream": 7, "grid": [108, 1, 1],
                "block": [128, 1, 1]}}
            at += 20
        at += 30
        yield {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{step}", "pid": 1, "tid": 1,
               "ts": begin - 5, "dur": at - begin}
        at += 10


def cost(command: str, recording: Path, folder: Path) -> tuple[float, float]:
    """Run a command on a recording; return its peak memory, GB, and its CPU seconds."""
    paths = [str(recording)] * (2 if command == "diff" else 1)
    options = ["-o", str(folder / "page.html")] if command == "report" else []
    running = subprocess.Popen([sys.executable, "-m", "foretrace", command, *paths, *options],
                               stdout=subprocess.DEVNULL)
    _, ended, used = os.wait4(running.pid, 0)
    if ended:
        raise SystemExit(f"foretrace {command} failed on {recording.name}")
    return used.ru_maxrss * 1024 / 1e9, used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=float, action="append", help="millions of events (repeatable)")
    parser.add_argument("--command", choices=COMMANDS, action="append", help="only this one (repeatable)")
    options = parser.parse_args()
    print(f"{'events':>12} {'command':<14} {'peak, GB':>9} {'bytes/event':>12} {'CPU, s':>8}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for millions in options.events or (1.25, 5.0):
            recording = folder / f"{millions:g}.json.gz"
            write_recording(recording, round(millions * 1e6 / 3 / STEPS))
            for command in options.command or COMMANDS:
                peak, seconds = cost(command, recording, folder)
                print(f"{millions * 1e6:>12,.0f} {command:<14} {peak:>9.2f} {peak * 1e3 / millions:>12,.0f} "
                      f"{seconds:>8.1f}", flush=True)


if __name__ == "__main__":
    main()
