"""Part 7: a ``torchrun`` job whose collectives must have names and sizes, and a calibration of the host."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from graph_predictor.prediction.host_steps import TOO_BUSY
from graph_predictor.prediction.replay import replay
from kernel_models.host.model import read_host
from step_views.acceptance.parts import AcceptanceScale
from step_views.acceptance.points import AcceptancePoint, absent, guarded, is_true, noted
from step_views.acceptance.run import last_words
from step_views.acceptance.worker import part_folder
from step_views.check.validate import FORETRACE
from tracer.campaign.processes import torch_gpus
from tracer.cores import RUN_MODULE, usable_cores
from tracer.graph import ExecutionGraph
from tracer.job import read_job

MOST_RANKS = 2
"""Most ranks of the job; with NCCL also at most one for each GPU, because it requires a GPU for each rank."""


def collectives(folder: Path, scale: AcceptanceScale) -> Iterator[AcceptancePoint]:
    """Capture a data-parallel job, and calibrate the host."""
    own = part_folder(folder, 7)
    yield from guarded("job", _job(own, scale))
    yield from guarded("the host's model", _host(own / "host.gz", scale))


def _host(host: Path, scale: AcceptanceScale) -> Iterator[AcceptancePoint]:
    ran = _ran("calibrate --host", [*FORETRACE, "calibrate", "--host", "--on", scale.device, "--minutes",
                                    str(scale.host_minutes), "--out", str(host)])
    if TOO_BUSY in ran.measured:
        yield absent(ran.name, f"{TOO_BUSY}: stop what else runs here, and give --parts 7")
        return
    yield ran
    yield is_true("the host's model", "it can be read", True, f"{len(read_host(host).pools):,} kinds of operations")


def _job(own: Path, scale: AcceptanceScale) -> Iterator[AcceptancePoint]:
    ranks = min(MOST_RANKS, max(torch_gpus(), 1) if scale.is_cuda else usable_cores())
    if scale.is_cuda and ranks == 1:
        yield noted("GPUs", "one: its collectives are named and sized, and nothing goes between GPUs")
    launch = [*RUN_MODULE, "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
              "--no-python", *RUN_MODULE]  # torchrun's -m would search modules in the current directory
    yield _ran(f"torchrun, {ranks} ranks, {'nccl' if scale.is_cuda else 'gloo'}", [
        *launch, "foretrace", "capture", "--out", str(own / "job"), "--replace", "--form", "foretrace",
        "--workload", "gpt2", "--preset", "tiny", f"--set=device={scale.device}", "--parallel", f"ddp={ranks}"])
    yield from judged_collectives(read_job(own / "job").graphs, ranks)


def _ran(what: str, command: Sequence[str]) -> AcceptancePoint:
    ran = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False,
                         env={"OMP_NUM_THREADS": "1", **os.environ})
    said = last_words(ran.stderr)
    return is_true(what, "it ends with 0", not ran.returncode, f"{ran.returncode}{f' ({said})' * bool(ran.returncode)}")


def judged_collectives(graphs: Sequence[ExecutionGraph], ranks: int) -> Iterator[AcceptancePoint]:
    """Judge whether each rank's collectives have a name, a size, and the ranks of their group."""
    yield is_true("ranks", str(ranks), len(graphs) == ranks, str(len(graphs)))
    for graph in graphs:
        table = graph.collectives
        kinds = [graph.string(int(code)) for code in table.kind]
        unsized = int(((table.elements_in <= 0) & (table.elements_out <= 0)).sum())
        named = len(kinds) > 0 and not {"", "unknown"} & set(kinds)
        yield is_true(f"rank {graph.meta.rank}: collectives", "≥ 1, all named", named,
                      f"{len(kinds)}: {', '.join(sorted(set(kinds))) or 'none'}")
        yield is_true(f"rank {graph.meta.rank}: sizes", "all known", not unsized and bool(kinds),
                      f"{unsized} of {len(kinds)} unknown")
        yield is_true(f"rank {graph.meta.rank}: groups", f"of {ranks}", bool(kinds) and bool(
            (table.group_size == ranks).all()), ", ".join(map(str, sorted(set(table.group_size.tolist())))))
    error = replay(graphs).max_abs_error
    yield noted("replay of the job", f"{error:.2%}", error)
