"""What files that claim more than they hold cost to read: processor time and peak memory of the whole command.

    python benchmarks/amplification.py

A row each: 50,000 modules in one another, a name of 20 MB in 20,000 rows, stacks that all events share, a key of
tuples without end (``tests/tracer/lying_files.py`` writes them). Exits with 1 where one takes more than 3 s of
processor time or 300 MB.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests" / "tracer"))

from lying_files import LIES  # noqa: E402

MOST_SECONDS, MOST_BYTES = 3.0, 300_000_000


def main() -> int:
    """Print the table."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    over = False
    print(f"{'file':16} {'bytes':>12} {'exit':>5} {'CPU s':>6} {'peak MB':>8}")
    with tempfile.TemporaryDirectory() as folder:
        for name, (command, write) in LIES.items():
            path = Path(folder) / name
            # By a process of its own: what this one holds would count as the peak of those it starts.
            writer = multiprocessing.get_context("spawn").Process(target=write, args=(path,))
            writer.start()
            writer.join()
            process = subprocess.Popen([sys.executable, "-m", "foretrace", command, str(path)], env=environment,
                                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            _, status, used = os.wait4(process.pid, 0)
            seconds, size = used.ru_utime + used.ru_stime, used.ru_maxrss * 1024
            process.returncode = os.waitstatus_to_exitcode(status)
            over |= seconds > MOST_SECONDS or size > MOST_BYTES or process.returncode not in (0, 2)
            print(f"{name:16} {path.stat().st_size:12,} {process.returncode:5} {seconds:6.1f} {size / 1e6:8.0f}")
    return int(over)


if __name__ == "__main__":
    sys.exit(main())
