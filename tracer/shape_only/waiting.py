"""``WaitingTracer``: an interpreter that has imported PyTorch and waits; each script is traced by a fork of it.

Importing PyTorch, and what it imports at its first operation, takes several times as long as tracing a step. A fork
starts with that imported and with nothing of any other script; it gets the asking process's environment, directory,
module path and streams.

    this process ──folder, streams──▶ waiting interpreter ──fork──▶ trace_script, ends
                 ◀──────status────────
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys

_PROGRAM = ("import sys; channel, *sys.path = sys.argv[1:]; from tracer.shape_only.waiting import serve; "
            "serve(int(channel))")
_MOST_BYTES = 1 << 20
"""Of a request."""
_STREAMS = (0, 1, 2)


class WaitingTracer:
    """The interpreter, started when it is first asked, ended with this process or by ``close``."""

    def __init__(self) -> None:
        self._channel: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def run(self, folder: str) -> int:
        """Let ``apart.main`` answer a folder's request; returns the status it ended with, negative for a signal."""
        try:
            if self._owner != os.getpid():  # this process is a fork of the one that started it
                self._start()
            assert self._channel is not None
            asked = {"folder": folder, "path": sys.path, "directory": os.getcwd(), "environment": dict(os.environ)}
            answer = b""
            with open(os.devnull, "r+b") as nothing, contextlib.suppress(ConnectionError):  # it ended
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
            self.close()  # it may be at work for nobody
            raise

    def close(self) -> None:
        """End it."""
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
            self._process = subprocess.Popen([sys.executable, "-c", _PROGRAM, str(theirs.fileno()), *sys.path],
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
    gc.disable()  # what is imported stays: neither this process nor a fork need look through it
    import tracer.shape_only.script  # noqa: F401 - the forks have it
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
            except OSError:  # nobody waits for it
                return


def _answer(asked: dict[str, object], streams: list[int]) -> None:
    """Trace in this process, which is a fork, and end it."""
    from tracer.shape_only.apart import main

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
        gc.unfreeze()  # the trace freezes it all again, which takes no time; to count what is frozen does
        main(folder)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        for file in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # closed
                file.flush()
        os._exit(status)
