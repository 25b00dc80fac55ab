"""Runs cases through the real ``main``, in forked processes that have a limit of memory and of time.

    worker = Worker(commands_that_import_and_compile)
    answers = worker.run_together([(folder, argv), ...])      # one after the other in one fork
    answer = worker.run(folder, argv)                         # in a fork of its own

One process has imported everything and has compiled what numba compiles; cases run in forks of it, so that a case costs
milliseconds, and whatever it does to itself (a crash, all memory, no end) is an outcome like any other.

A fork costs more than most refusals, so cases run together where that hides nothing. Between two of them the process
gets back its directory, environment, streams, warnings, signal handlers and limits. It is replaced where a case left
more behind: memory, threads, files, processes. Processor time is measured by case; memory is counted from the fork on,
which is never less than the case's own. A case that ends the process has no answer. So a case that is sound together
with others is sound; for any other the answer in a fork of its own decides.
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
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SECONDS = 20
"""A case that computes for longer hangs."""
_WAIT = 600.0
"""So does one that has not ended after so long: it waits, or shares the processor with very many."""
_WAIT_TOGETHER = 120.0
"""Wait for a case among others; after it the case is tried by itself."""
_MOST_LEFT = 100_000_000
"""Bytes beyond those at the fork after which a process of many cases is replaced: a fifth of the least limit."""
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
        if "together" in request:
            answers.write(json.dumps(_together([(Path(folder), argv) for folder, argv in request["together"]])) + "\n")
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


def _together(cases: list[tuple[Path, list[str]]]) -> list[dict[str, Any] | None]:
    """Answers of cases that run in one process, or in one more wherever one ended; none for a case that ended one."""
    answers: list[dict[str, Any] | None] = []
    while len(answers) < len(cases):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            _child_of_many(cases[len(answers):], writing)
        os.close(writing)
        before = len(answers)
        answers += map(json.loads, _lines(child, reading))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # it waits; or what its cases may have started is left
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        if len(answers) < len(cases) and (len(answers) == before or not (answers[-1] or {"left": False})["left"]):
            answers.append(None)
    return answers


def _lines(child: int, reading: int) -> list[bytes]:
    """Whole lines that a process writes until it ends or is silent for too long; others may hold its pipe open."""
    handle, text = os.pidfd_open(child), b""
    os.set_blocking(reading, False)
    while (ready := select.select([reading, handle], [], [], _WAIT_TOGETHER)[0]) and handle not in ready:
        if not (part := os.read(reading, 1 << 16)):
            break
        text += part
    with contextlib.suppress(BlockingIOError):  # what it wrote before it ended
        while part := os.read(reading, 1 << 16):
            text += part
    os.close(handle)
    os.close(reading)
    return text.split(b"\n")[:-1]


def _child_of_many(cases: list[tuple[Path, list[str]]], writing: int) -> None:
    """Run cases until one leaves something behind, an answer a line."""
    try:
        os.setsid()
        held = _limit()
        resource.setrlimit(resource.RLIMIT_CPU, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        unfinished = _watch_numbers()
        kept = _Kept()
        for folder, argv in cases:
            begun, before = time.monotonic(), _processor()
            unfinished[0] = folder
            resource.setrlimit(resource.RLIMIT_CPU, (int(before) + SECONDS, resource.RLIM_INFINITY))
            with warnings.catch_warnings():  # and forgets which were given
                code = _ended(folder, argv)
            processor, most = _processor() - before, _most_bytes()
            left = kept.restore() or most - held > _MOST_LEFT
            os.write(writing, json.dumps({
                "code": code, "seconds": round(time.monotonic() - begun, 3), "processor": processor, "bytes": most,
                "own": max(most - held, 0), "hung": processor >= SECONDS, "left": left}).encode() + b"\n")
            if left:
                break
    finally:
        os._exit(0)


class _Kept:
    """What a process has before a case, given back after it."""

    def __init__(self) -> None:
        self._environment, self._streams = dict(os.environ), (sys.stdout, sys.stderr, sys.stdin)
        self._handlers = {number: signal.getsignal(number) for number in (
            signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGXCPU)}
        self._errors, self._depth, self._temporary = np.geterr(), sys.getrecursionlimit(), tempfile.tempdir
        self._hooks = (sys.excepthook, sys.unraisablehook, threading.excepthook)
        self._threads, self._files = threading.active_count(), len(os.listdir("/proc/self/fd"))

    def restore(self) -> bool:
        """Give it back; returns whether a case left behind what cannot be."""
        if dict(os.environ) != self._environment:
            os.environ.clear()
            os.environ.update(self._environment)
        sys.stdout, sys.stderr, sys.stdin = self._streams
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        np.seterr(**self._errors)
        sys.setrecursionlimit(self._depth)
        tempfile.tempdir = self._temporary
        sys.excepthook, sys.unraisablehook, threading.excepthook = self._hooks
        gc.enable()
        try:
            os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return threading.active_count() > self._threads or len(os.listdir("/proc/self/fd")) > self._files
        return True


def _processor() -> float:
    """Seconds of processor time of this process and of those it waited for."""
    return sum(used.ru_utime + used.ru_stime for used in map(
        resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))


def _most_bytes() -> int:
    """Most memory that this process had since it was forked, or one of those it waited for."""
    return max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) * 1024


def _held(folder: Path) -> int:
    """Bytes that a case's process had when it began."""
    with contextlib.suppress(OSError, ValueError):
        return int((folder / "held").read_text())
    return 0


def _limit() -> int:
    """Limit this process; returns the bytes that it has."""
    size, held = (int(pages) * resource.getpagesize() for pages in Path("/proc/self/statm").read_text().split()[:2])
    resource.setrlimit(resource.RLIMIT_AS, (size + _ADDRESSES, size + _ADDRESSES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (WRITTEN, WRITTEN))
    return held


def _child(folder: Path, argv: list[str], stdout: str) -> None:
    code = 99
    try:
        os.setsid()
        (folder / "held").write_text(str(_limit()))
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 1))
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        _watch_numbers()[0] = folder
        code = _ended(folder, argv, stdout)
    except BaseException:
        code = 97
    finally:
        os._exit(code)


def _ended(folder: Path, argv: list[str], stdout: str = "") -> int:
    """Run a command in its folder, with its streams there; returns its exit code."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(file, number)
        os.close(file)
    if stdout:
        os.dup2(os.open("/dev/full", os.O_WRONLY) if stdout == "full" else _closed_pipe(), 1)
    os.chdir(folder)
    try:
        _main(argv)
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 0 if left.code is None else 1
    except BaseException:
        traceback.print_exc()
        code = 98
    for stream in (sys.stdout, sys.stderr):
        if not stream.closed:  # as a program that was run may have done
            stream.flush()
    return code


def _closed_pipe() -> int:
    """A pipe that nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    return writing


def _watch_numbers() -> list[Path]:
    """Note in a file which printed JSON has numbers that are none: they would be printed as null.

    Returns a list whose first item is to be the folder of the case that runs.
    """
    from step_views.cli import console

    encodable, folder = console._encodable, [Path()]

    def watched(value: Any) -> Any:
        if isinstance(value, float) and value - value != 0:
            (folder[0] / "unfinished").write_text("a number of the JSON output is not finite")
        return encodable(value)

    console._encodable = watched
    return folder


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

    def _ask(self, request: dict[str, Any]) -> Any:
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

    def run_together(self, cases: Sequence[tuple[Path, list[str]]]) -> list[dict[str, Any] | None]:
        """Run commands one after the other in one process; none is the answer of those that ended it."""
        try:
            return self._ask({"together": [(str(folder), argv) for folder, argv in cases]})
        except (RuntimeError, BrokenPipeError):
            self.close()
            self._start()
            return [None] * len(cases)

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.communicate()


if __name__ == "__main__":
    _serve()
