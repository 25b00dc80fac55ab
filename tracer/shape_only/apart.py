"""``trace_apart``: a script's step traced by another interpreter.

A file's top level may do what a process can do only once: register an operator or a class of models, or set how
processes are started. A second run in this process would fail there, or find what the first has left. So another
process runs it:

    request.json ──▶ another interpreter: trace_script ──▶ step.pickle, or error.json

The result is pickled: importing the code for files of graphs takes both processes longer than tracing the step.
Importing PyTorch, and what it imports at its first operation, takes several times as long as tracing. Where processes
can be forked, one interpreter (``WaitingTracer``) imports it and waits. A fork of it traces each script, so that
scripts do not see each other; it gets the environment, directory, module path and streams of the asking process.

    this process ──folder, streams──▶ waiting interpreter ──fork──▶ trace_script, ends
                 ◀──────status────────
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path

import msgspec

from tracer import shape_only
from tracer.errors import ForetraceError
from tracer.graph import ExecutionGraph
from tracer.input_file import from_json
from tracer.kept_files import scratch_folder
from tracer.shape_only.devices import TracedDevice
from tracer.shape_only.errors import ShapeOnlyError, UnknownSizeError

_SERVING = ("import sys; channel, *sys.path = sys.argv[1:]; from tracer.shape_only.apart import serve; "
            "serve(int(channel))")
_MOST_BYTES = 1 << 20
"""Most bytes of a request."""
_STREAMS = (0, 1, 2)  # POSIX: standard input, output, error


class WaitingTracer:
    """An interpreter that waits for traces to make, from the first one to the end of this process or ``close``."""

    def __init__(self) -> None:
        self._channel: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def run(self, folder: str) -> int:
        """Let ``apart.main`` answer the request in a folder; return its exit status, negative for a signal."""
        try:
            if self._owner != os.getpid():  # this process is a fork of the process that started it
                self._start()
            assert self._channel is not None
            asked = {"folder": folder, "path": sys.path, "directory": os.getcwd(), "environment": dict(os.environ)}
            answer = b""
            with open(os.devnull, "r+b") as nothing, contextlib.suppress(ConnectionError):  # the interpreter ended
                socket.send_fds(self._channel, [json.dumps(asked).encode()], [
                    stream if _is_open(stream) else nothing.fileno() for stream in _STREAMS])
                answer = self._channel.recv(64)
            if not answer:
                assert self._process is not None
                ended = self._process.wait()
                self.close()
                return ended or 1
            return int(answer)
        except BaseException:
            self.close()  # it may still work on a request that is given up
            raise

    def close(self) -> None:
        """End the interpreter."""
        if self._channel is not None:
            self._channel.close()
        if self._process is not None and self._owner == os.getpid():
            self._process.terminate()
            self._process.wait()
        self._channel, self._process, self._owner = None, None, 0

    def _start(self) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MOST_BYTES)
        with theirs:
            self._process = subprocess.Popen([sys.executable, "-c", _SERVING, str(theirs.fileno()), *sys.path],
                                             pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL)
        self._owner = os.getpid()
        atexit.register(self.close)


def _is_open(stream: int) -> bool:
    try:
        os.fstat(stream)
    except OSError:
        return False
    return True


def possible() -> bool:
    """Return whether a process that has imported PyTorch may be forked here."""
    return sys.platform == "linux"


def serve(channel: int) -> None:
    """Answer requests until the other end is closed."""
    gc.disable()  # imports stay: neither this process nor a fork need search them
    import tracer.shape_only.trace  # noqa: F401 - the forks have it
    from tracer.shape_only.uncompiled import first_operation

    first_operation()
    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=channel) as asked:
        while True:
            message, streams, _, _ = socket.recv_fds(asked, _MOST_BYTES, len(_STREAMS))
            if not message:
                return
            child = os.fork()
            if not child:
                asked.close()
                _answer(json.loads(message), streams)
            for stream in streams:
                os.close(stream)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            try:
                asked.send(str(status).encode())
            except OSError:  # the asking process has ended
                return


def _answer(asked: dict[str, object], streams: list[int]) -> None:
    """Trace in this process, which is a fork, and end it."""
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for own, stream in zip(_STREAMS, streams, strict=True):
            os.dup2(stream, own)
            os.close(stream)
        os.chdir(str(asked["directory"]))
        os.environ.clear()
        os.environ.update(asked["environment"])  # type: ignore[call-overload]
        sys.path[:] = asked["path"]  # type: ignore[call-overload]
        folder = str(asked["folder"])
        sys.argv[1:] = [folder]
        gc.unfreeze()  # the trace freezes everything again, which is quick; counting frozen objects is not
        main(folder)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        for file in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # closed
                file.flush()
        os._exit(status)


_REQUEST, _GRAPH, _ERROR = "request.json", "step.pickle", "error.json"
_PROGRAM = "import sys; folder, *sys.path = sys.argv[1:]; from tracer.shape_only.apart import main; main(folder)"
"""Program of the interpreter: it sets this process's module path before it imports anything else."""
_INTERRUPTED = 130  # as shells report SIGINT (128 + 2)
_WAITING = WaitingTracer()


class _Request(msgspec.Struct):
    """Arguments of ``trace_script``."""

    target: str
    device: str | TracedDevice
    world_size: int | None
    rank: int
    arguments: dict[str, int | str]
    selected: float | None = None
    steps: int = 1


class _Failure(msgspec.Struct):
    """An error of the other process: its sentence, whether a size is unknown, and where it was raised."""

    sentence: str
    unknown_size: bool
    where: str


class _Elsewhere(Exception):
    """The traceback of the other process; ``--debug`` shows it before this process's."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def trace_apart(target: str, device: str | TracedDevice = "h200-sxm", *, world_size: int | None = None, rank: int = 0,
                arguments: Mapping[str, int | str] | None = None, selected: float | None = None,
                steps: int = 1) -> ExecutionGraph:
    """Trace the step that ``SCRIPT.py:FUNCTION`` returns in a separate process; arguments as ``trace_script``.

    Raises:
        UnknownSizeError: the function takes no such argument.
        ShapeOnlyError: as ``trace_script``, or the process ended before it answered.
    """
    with scratch_folder() as folder:
        place = Path(folder)
        request = _Request(target, device, world_size, rank, dict(arguments or {}), selected, steps)
        (place / _REQUEST).write_bytes(msgspec.json.encode(request))
        ended = _run(folder)
        if (place / _ERROR).is_file():
            failure = from_json((place / _ERROR).read_bytes(), _Failure)
            kind = UnknownSizeError if failure.unknown_size else ShapeOnlyError
            raise kind(failure.sentence) from _Elsewhere(failure.where)
        if ended == _INTERRUPTED:
            raise KeyboardInterrupt
        if ended or not (place / _GRAPH).is_file():
            how = f"by signal {-ended}" if ended < 0 else f"with status {ended}"
            raise ShapeOnlyError(f"The process that traced {target} ended {how} before it was done: was it killed for "
                                 "want of memory, or does the script end its process? Trace it alone with foretrace "
                                 "trace.")
        graph: ExecutionGraph = pickle.loads((place / _GRAPH).read_bytes())  # noqa: S301 -- written by ``main``
        return graph


def _run(folder: str) -> int:
    """Let another interpreter answer a request; return its exit status."""
    if possible():
        return _WAITING.run(folder)
    return subprocess.run([sys.executable, "-c", _PROGRAM, folder, *sys.path], check=False).returncode


def main(folder: str) -> None:
    """Trace the step that a folder's request names, and write the graph or the error there."""
    place = Path(folder)
    request = from_json((place / _REQUEST).read_bytes(), _Request)
    try:
        graph = shape_only.trace_script(request.target, request.device, world_size=request.world_size,
                                        rank=request.rank, arguments=request.arguments, selected=request.selected,
                                        steps=request.steps)
        (place / _GRAPH).write_bytes(pickle.dumps(graph, protocol=5))
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    except ForetraceError as error:
        failure = _Failure(str(error), isinstance(error, UnknownSizeError), traceback.format_exc())
        (place / _ERROR).write_bytes(msgspec.json.encode(failure))
