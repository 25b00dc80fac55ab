"""Starting the processes of a sweep and collecting what they measured."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from tracer.comm_bench.plan import BenchPlan
from tracer.errors import ForetraceError
from tracer.output_file import whole_file

MOST_PROCESSES = 256
"""Each is a PyTorch of its own."""
TAIL = 300


def run_bench(plan: BenchPlan, processes: int, out: str | os.PathLike[str], *, timeout_s: float = 1800.0) -> Path:
    """Run a sweep on this host and write its table.

    Args:
        plan: What to measure.
        processes: Ranks on this host.
        out: A ``.jsonl`` file; it appears whole at the end.
        timeout_s: After this long the sweep is given up.

    Raises:
        ForetraceError: PyTorch is missing, or the processes failed; the end of their output is in the sentence.
    """
    if not 2 <= processes <= MOST_PROCESSES:
        raise ForetraceError(f"A sweep on this host is of 2 to {MOST_PROCESSES} processes, and {processes} was asked "
                             "for.")
    target = Path(out)
    with tempfile.TemporaryDirectory(prefix="foretrace-comm-bench-") as folder:
        table = Path(folder) / "table.jsonl"
        # One thread a process, so that ranks on one host do not take each other's cores.
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", str(processes),
                   "--master-addr", "127.0.0.1", "--master-port", str(_free_port()), "-m", "tracer.comm_bench.worker",
                   plan.to_text(), os.fspath(table)]
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s,
                                  check=False)
        except subprocess.TimeoutExpired:
            raise ForetraceError(f"The sweep was not done after {timeout_s:.0f} s; give fewer sizes.") from None
        if done.returncode or not table.is_file():
            if "No module named torch" in done.stderr:
                raise ForetraceError("A sweep needs PyTorch; install it with pip install 'foretrace[capture]'.")
            lines = [line for line in done.stderr.splitlines() if "Error" in line or "error" in line]
            raise ForetraceError(f"The sweep failed: {(lines or [done.stderr.strip()])[0][-TAIL:]}")
        with whole_file(target) as stream:
            stream.write(table.read_bytes())
    return target


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
