"""Capture foreign programs as ``foretrace capture`` does, each in a process of its own that finds its imports made.

    python tests/foreign/capturing.py DIR [NAME:OPTION=SIZE,… …]

Importing PyTorch and transformers takes longer than the programs: it is done once, and every program runs in a fork of
that process, as ``__main__``, through the command line. What it printed is in ``DIR/NAME.log``.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from catalogue import CATALOGUE, Program, program

COUNTS = ("--warmup", "2", "--timed", "4", "--steps", os.environ.get("FOREIGN_STEPS", "2"))
"""Enough for every command, and few. Three and more show which calls a busy machine stopped: equal ones took less."""
ALWAYS = ("torch", "torch._dynamo", "torch.profiler", "tracer.capture.script", "tracer.job", "step_views.cli")
"""What every program needs; PyTorch's optimizers import its compiler."""
TOGETHER = min(2, os.cpu_count() or 1)
"""Processes that run at one time."""
HEAVY = {"transformers": ("transformers", "transformers.trainer"), "accelerate": ("accelerate",),
         "lightning": ("lightning",)}
"""What is worth importing once, by the package that a program needs."""


def capture_all(out: Path, wanted: Sequence[tuple[str, Program, dict[str, int]]]) -> dict[str, int]:
    """Exit status of each capture, by the name of its directory below ``out``."""
    for module in ALWAYS:
        importlib.import_module(module)
    for package in sorted({package for _, each, _ in wanted for package in each.needs}):
        for module in HEAVY.get(package, ()):
            importlib.import_module(module)
    status = dict.fromkeys((name for name, _, _ in wanted), 0)
    running: dict[int, str] = {}

    def wait() -> None:
        child, ended = os.wait()
        name = running.pop(child)
        status[name] = max(status[name], abs(os.waitstatus_to_exitcode(ended)))

    for name, each, sizes in wanted:
        # Two programs of one process, or one of more: no core is idle, and none has to be shared.
        while len(running) + each.processes > max(TOGETHER, each.processes):
            wait()
        running |= dict.fromkeys(_begin(out, name, each, sizes), name)
    while running:
        wait()
    return status


def _begin(out: Path, name: str, which: Program, sizes: dict[str, int]) -> list[int]:
    """Start a capture; the process of each rank."""
    command = ["foretrace", "capture", "--out", str(out / name), *COUNTS, str(which.path), "--",
               *which.arguments(**sizes)]
    port = _free_port()
    children = []
    for rank in range(which.processes):
        child = os.fork()
        if child == 0:
            if which.processes > 1:
                os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(which.processes),
                                  MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            _become(command, out / f"{name}.log")
        children.append(child)
    return children


def _become(command: list[str], log: Path) -> None:
    """Run the command line with its output in a file, and end this process."""
    status = 1
    try:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, 1)
        os.dup2(file, 2)
        sys.argv = command
        from foretrace.commands import main

        main()
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def parse(text: str) -> tuple[str, Program, dict[str, int]]:
    """``NAME:OPTION=SIZE,…`` as the name of its directory, the program, and the sizes that differ from its own."""
    name, _, sizes = text.partition(":")
    found = {key: int(size) for key, _, size in (part.partition("=") for part in sizes.split(",") if part)}
    return text.replace(":", "-").replace("=", "").replace(",", "-"), program(name), found


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    todo = [parse(text) for text in sys.argv[2:]] or [
        (each.name, each, {}) for each in CATALOGUE if not each.lacking]
    outcome = capture_all(folder, todo)
    for name, status in outcome.items():
        print(f"{name} {status}")
    sys.exit(max(outcome.values()))
