"""What the command line costs before it does anything: wall time of `foretrace --help` and of bare imports.

Prints one table of medians. The target for `foretrace --help` is under 0.5 s.

Usage: python benchmarks/startup.py [--runs 7]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import sysconfig
import time
from pathlib import Path


def wall_times_ms(command: list[str], runs: int) -> list[float]:
    """Wall time of each run in milliseconds, after one run that warms the file cache."""
    times = []
    for run in range(runs + 1):
        start = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        if run:
            times.append((time.perf_counter() - start) * 1e3)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description="time `foretrace --help`")
    parser.add_argument("--runs", type=int, default=7, help="timed runs of each command")
    runs = parser.parse_args().runs
    foretrace = str(Path(sysconfig.get_path("scripts"), "foretrace"))
    commands = {
        "foretrace --help": [foretrace, "--help"],
        "foretrace inspect --help": [foretrace, "inspect", "--help"],
        "python -c 'import tracer'": [sys.executable, "-c", "import tracer"],
        "python -c 'import graph_predictor'": [sys.executable, "-c", "import graph_predictor"],
        "python -c pass": [sys.executable, "-c", "pass"],
    }
    print(f"{'command':<36} {'median ms':>9} {'min ms':>8} {'max ms':>8}")
    for name, command in commands.items():
        times = wall_times_ms(command, runs)
        print(f"{name:<36} {statistics.median(times):>9.0f} {min(times):>8.0f} {max(times):>8.0f}")


if __name__ == "__main__":
    main()
