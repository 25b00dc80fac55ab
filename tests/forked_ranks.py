"""The ranks of a job as forks of one process that has imported PyTorch, which takes longer than the job.

    python tests/forked_ranks.py RANKS PROGRAM [ARGUMENT …]

Each rank runs the program as ``__main__`` with torchrun's environment.
"""

from __future__ import annotations

import importlib
import os
import runpy
import socket
import subprocess
import sys
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IMPORTED = ("torch", "torch._dynamo", "torch.profiler", "torch.distributed", "tracer.capture.session")
"""Imported before the forks; PyTorch's optimizers import its compiler."""


def run_ranks(ranks: int, program: Path, *arguments: object, seconds: float = 240) -> None:
    """Run a job and wait for its end. Fails with the end of what it printed if a rank does."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1",
                   "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen([sys.executable, __file__, str(ranks), str(program), *map(str, arguments)], text=True,
                               env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                               start_new_session=True)
    try:
        said = process.communicate(timeout=seconds)[1]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        raise
    assert process.returncode == 0, said[-3000:]


def _fork(rank: int, program: str) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        sys.path.insert(0, str(Path(program).parent))
        runpy.run_path(program, run_name="__main__")
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def main(ranks: int, program: str) -> int:
    for module in IMPORTED:
        importlib.import_module(module)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    children = [_fork(rank, program) for rank in range(ranks)]
    return max(abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) for child in children)


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    number = int(sys.argv.pop(0))
    sys.exit(main(number, sys.argv[0]))
