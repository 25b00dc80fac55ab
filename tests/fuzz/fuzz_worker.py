"""Runs cases, each in a forked process of its own that has a limit of memory and of time, through the real ``main``.

    worker = Worker(commands_that_import_and_compile)
    answer = worker.run(folder, argv)

One process has imported everything and has compiled what numba compiles; a case's process is a fork of it, so that a
case costs milliseconds, and whatever it does to itself (a crash, all memory, no end) is an outcome like any other.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SECONDS = 20
"""A case that computes for longer hangs."""
_WAIT = 600.0
"""So does one that has not ended after so long: it waits, or shares the processor with very many."""
BYTES = 1_500_000_000
"""A case that takes more memory takes too much; no input is larger than a megabyte."""
WRITTEN = 200_000_000
"""So does one that writes a longer file."""
_DRAWS = 8
_ADDRESSES = 3 << 30
"""Address space a case's process may take beyond what it starts with: an end to what would fill the machine."""


def _serve() -> None:
    """Answer lines ``{"folder", "argv"}`` on stdin with outcomes on stdout, one line each."""
    sys.path.insert(0, str(ROOT))
    os.environ["FORETRACE_DEBUG"] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    _make_cheap()
    for line in sys.stdin:
        request = json.loads(line)
        if request.get("warm"):
            _call_quietly(request["argv"])
            gc.collect()
            gc.freeze()  # what is there is never looked at again, so that forks share its pages
            answers.write(json.dumps({}) + "\n")
            continue
        answers.write(json.dumps(_one(Path(request["folder"]), request["argv"], request["stdout"])) + "\n")


def _make_cheap() -> None:
    """Leave out what only costs: forks share the tree of commands, intervals are of fewer draws.

    To build the tree takes ten times as long as to refuse a file, 128 draws ten times as long as the prediction.
    """
    import typer.main

    from graph_predictor.prediction import interval

    typer.main.get_command = functools.cache(typer.main.get_command)
    interval.DRAWS = _DRAWS


def _call_quietly(argv: list[str]) -> None:
    """Run a command in this process: what it imports and compiles every later fork has."""
    nowhere, kept = os.open(os.devnull, os.O_WRONLY), (os.dup(1), os.dup(2))
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    try:
        _main(argv)
    except BaseException:
        pass
    finally:
        sys.stdout.flush()
        os.dup2(kept[0], 1)
        os.dup2(kept[1], 2)
        for each in (nowhere, *kept):
            os.close(each)


def _main(argv: list[str]) -> None:
    from foretrace.commands import main

    sys.argv = ["foretrace", *argv]
    main()


def _one(folder: Path, argv: list[str], stdout: str) -> dict[str, Any]:
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        _child(folder, argv, stdout)
    handle = os.pidfd_open(child)
    ended = select.select([handle], [], [], _WAIT)[0]
    if not ended:
        os.killpg(child, signal.SIGKILL)
    _, status, usage = os.wait4(child, 0)
    os.close(handle)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what it may have started
    return {"code": os.waitstatus_to_exitcode(status), "seconds": round(time.monotonic() - start, 3),
            "processor": usage.ru_utime + usage.ru_stime,
            "bytes": usage.ru_maxrss * 1024, "own": max(usage.ru_maxrss * 1024 - _held(folder), 0),
            "hung": not ended or usage.ru_utime + usage.ru_stime >= SECONDS}


def _held(folder: Path) -> int:
    """Bytes that a case's process had when it began."""
    with contextlib.suppress(OSError, ValueError):
        return int((folder / "held").read_text())
    return 0


def _child(folder: Path, argv: list[str], stdout: str) -> None:
    code = 99
    try:
        os.setsid()
        size, held = (int(pages) * resource.getpagesize() for pages in Path("/proc/self/statm").read_text().split()[:2])
        (folder / "held").write_text(str(held))
        resource.setrlimit(resource.RLIMIT_AS, (size + _ADDRESSES, size + _ADDRESSES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (WRITTEN, WRITTEN))
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 1))
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
        if stdout:
            os.dup2(os.open("/dev/full", os.O_WRONLY) if stdout == "full" else _closed_pipe(), 1)
        os.chdir(folder)
        try:
            _watch_numbers(folder)
            _main(argv)
            code = 0
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else 0 if left.code is None else 1
        except BaseException:
            traceback.print_exc()
            code = 98
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        code = 97
    finally:
        os._exit(code)


def _closed_pipe() -> int:
    """A pipe that nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    return writing


def _watch_numbers(folder: Path) -> None:
    """Note in a file which printed JSON has numbers that are none: they would be printed as null."""
    from graph_predictor.cli import console

    encodable = console._encodable

    def watched(value: Any) -> Any:
        if isinstance(value, float) and value - value != 0:
            (folder / "unfinished").write_text("a number of the JSON output is not finite")
        return encodable(value)

    console._encodable = watched


class Worker:
    """The process that forks: started once, and again should it end."""

    def __init__(self, warm: list[list[str]]) -> None:
        self._warm = warm
        self._start()

    def _start(self) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
                       "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "COLUMNS": "100", "TERM": "dumb"}
        self.process = subprocess.Popen([sys.executable, str(HERE / "fuzz_worker.py")], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)
        for argv in self._warm:
            self._ask({"warm": True, "argv": argv})

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("the worker has ended")
        return json.loads(line)

    def run(self, folder: Path, argv: list[str], stdout: str = "") -> dict[str, Any]:
        """Run a command on the input in a folder; ``stdout`` and ``stderr`` are files in it afterwards."""
        try:
            return self._ask({"folder": str(folder), "argv": argv, "stdout": stdout})
        except (RuntimeError, BrokenPipeError):
            self.close()
            self._start()
            return {"code": -1, "seconds": 0.0, "processor": 0.0, "bytes": 0, "own": 0, "hung": False}

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.communicate()


if __name__ == "__main__":
    _serve()
