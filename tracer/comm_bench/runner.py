"""A sweep over collectives and sizes: its plan, its processes, and its table."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from tracer.cores import RUN_MODULE
from tracer.errors import ForetraceError
from tracer.kept_files import scratch_folder
from tracer.output_file import whole_file

BENCH_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "send_recv")
BACKENDS = ("gloo", "nccl")
DTYPES = ("float32", "float16", "bfloat16", "int8")
MOST_SECONDS = 0.02
"""Approximate longest time, s, for which one timed loop repeats an operation."""


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """The measurements of a sweep.

    Attributes:
        kinds: Collectives, from ``BENCH_KINDS``.
        sizes: Payload bytes (a rank's whole buffer, as nccl-tests counts it).
        backend: "gloo" or "nccl".
        dtype: Type of the elements.
        rounds: Number of measurements of each size; the sizes are in a different order each time.
        loop_seconds: Duration of one timed loop.
    """

    kinds: tuple[str, ...]
    sizes: tuple[int, ...]
    backend: str = "gloo"
    dtype: str = "float32"
    rounds: int = 7
    loop_seconds: float = MOST_SECONDS

    def __post_init__(self) -> None:
        for value, known, what in ((self.backend, BACKENDS, "backend"), (self.dtype, DTYPES, "dtype"),
                                   *((kind, BENCH_KINDS, "collective") for kind in self.kinds)):
            if value not in known:
                raise ForetraceError(f"{value!r} is no {what} that can be swept; choose from {', '.join(known)}.")
        if not self.kinds or not self.sizes or min(self.sizes) < 1 or self.rounds < 1:
            raise ForetraceError("A sweep needs a collective, a size of at least one byte and a round.")

    def to_text(self) -> str:
        """Return the plan as one argument of a command line."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_text(text: str) -> BenchPlan:
        """Return the plan from a text that ``to_text`` made."""
        data = json.loads(text)
        return BenchPlan(**{**data, "kinds": tuple(data["kinds"]), "sizes": tuple(data["sizes"])})


def sweep_sizes(smallest: int, largest: int, per_octave: int = 1) -> tuple[int, ...]:
    """Return sizes in bytes, ``per_octave`` in each doubling, rounded to multiples of 64 bytes from 64 bytes on."""
    if not 1 <= smallest <= largest or per_octave < 1:
        raise ForetraceError(f"There are no sizes from {smallest} to {largest} bytes.")
    found, at = [], float(smallest)
    while at <= largest * 1.0001:
        found.append(round(at / 64) * 64 if at >= 64 else round(at))
        at *= 2 ** (1 / per_octave)
    return tuple(dict.fromkeys(found))


MOST_PROCESSES = 256
"""Most processes of a sweep: each imports PyTorch."""
TAIL = 300  # chosen: characters of an error that are shown


def run_bench(plan: BenchPlan, processes: int, out: str | os.PathLike[str], *, timeout_s: float = 1800.0) -> Path:
    """Run a sweep on this host, write its table and return the table's path.

    Args:
        plan: The measurements.
        processes: Ranks on this host.
        out: A ``.jsonl`` file; it is written complete at the end.
        timeout_s: Seconds after which the sweep is given up.

    Raises:
        ForetraceError: PyTorch is missing, or the processes failed; the end of their output is in the sentence.
    """
    if not 2 <= processes <= MOST_PROCESSES:
        raise ForetraceError(f"A sweep on this host is of 2 to {MOST_PROCESSES} processes, and {processes} was asked "
                             "for.")
    target = Path(out)
    with scratch_folder("foretrace-comm-bench-") as folder:
        table = Path(folder) / "table.jsonl"
        # One thread for each process, so that ranks on one host do not compete for cores.
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [*RUN_MODULE, "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", str(processes),
                   "--master-addr", "127.0.0.1", "--master-port", str(_free_port()), "-m", "tracer.comm_bench.worker",
                   plan.to_text(), os.fspath(table)]
        try:
            done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True,
                                  timeout=timeout_s, check=False)
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
