"""Programs as forks of one process that has imported PyTorch, which takes longer than they do.

    run_ranks(2, folder / "train.py", folder / "out")             # a job, with torchrun's environment
    done = run_program("import torch; print(torch.__version__)")  # as python -c, or as python FILE

The process is started by the first test that asks, and is there for all tests of a pytest process. What a program
changes no other one sees.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
IMPORTED = ("torch", "torch._dynamo", "torch.profiler", "torch.distributed", "tracer.capture.session",
            "tracer.capture.script", "step_views.cli")
"""What programs find imported; PyTorch's optimizers import its compiler."""
SECONDS = 240.0
"""What programs may take."""
_ASKED_S = 0.01
"""How often a process looks whether a program has ended."""


@dataclass(frozen=True)
class ForkedProgram:
    """A program to run.

    Attributes:
        source: a file, or a text.
        is_file: which of the two.
        arguments: of its command line.
        environment: what it has beside that of the process.
    """

    source: str
    is_file: bool
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, source: str | Path, *arguments: object, **environment: object) -> ForkedProgram:
        """Return the program of a file's path or of a text."""
        return cls(str(source), isinstance(source, Path), tuple(map(str, arguments)),
                   {name: str(value) for name, value in environment.items()})


class Forks:
    """The process that forks. ``imported``: modules that programs find imported."""

    def __init__(self, *imported: str) -> None:
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [sys.executable, __file__, *imported], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}, start_new_session=True)

    def run(self, programs: Sequence[ForkedProgram], folder: Path | None = None,
            seconds: float = SECONDS) -> list[subprocess.CompletedProcess[str]]:
        """Run programs at one time, each in a fork and all in one directory, the present one if none is given.

        Raises:
            subprocess.TimeoutExpired: they took longer than ``seconds``; they have been killed.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        with tempfile.TemporaryDirectory() as output:
            print(json.dumps({"programs": [asdict(each) for each in programs], "seconds": seconds, "output": output,
                              "folder": str(folder or Path.cwd())}), file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline()
            assert answer, "the process that forks has ended"
            texts = [[(Path(output) / f"{number}.{name}").read_text(encoding="utf-8", errors="replace")
                      for name in ("out", "err")] for number in range(len(programs))]
        status = json.loads(answer)
        if status is None:
            raise subprocess.TimeoutExpired([each.source for each in programs], seconds, *texts[0])
        return [subprocess.CompletedProcess([each.source, *each.arguments], code, *said)
                for each, code, said in zip(programs, status, texts, strict=True)]

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


@cache
def warm() -> Forks:
    """The process that all tests share."""
    found = Forks(*IMPORTED)
    atexit.register(found.close)
    return found


def run_program(source: str | Path, *arguments: object, folder: Path | None = None, seconds: float = SECONDS,
                **environment: object) -> subprocess.CompletedProcess[str]:
    """Run a file or a text, as ``python FILE`` or ``python -c TEXT`` would, in a directory, by default the present
    one."""
    return warm().run([ForkedProgram.of(source, *arguments, **environment)], folder, seconds)[0]


def run_ranks(ranks: int, program: Path, *arguments: object) -> None:
    """Run a job and wait for its end. Fails with the end of what a rank said of errors if it does not end well."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = {"WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    done = warm().run([ForkedProgram.of(program, *arguments, RANK=rank, LOCAL_RANK=rank, **world)
                        for rank in range(ranks)])
    assert [each.returncode for each in done] == [0] * ranks, "\n".join(each.stderr[-3000:] for each in done)


def _serve(imported: Sequence[str]) -> None:
    """Answer lines of programs on stdin with a line of their exit statuses on stdout, or ``null``: out of time."""
    sys.path.remove(str(TESTS))  # python -c would not look there
    for module in imported:
        importlib.import_module(module)
    for line in sys.stdin:
        asked = json.loads(line)
        children = [_fork(ForkedProgram(**each), asked["folder"], Path(asked["output"]) / str(number))
                    for number, each in enumerate(asked["programs"])]
        print(json.dumps(_ends(children, time.monotonic() + asked["seconds"])), flush=True)


def _ends(children: Sequence[int], deadline: float) -> list[int] | None:
    """Wait for children; their exit statuses, ``None`` where they were killed at the deadline."""
    status: dict[int, int] = {}
    while len(status) < len(children):
        for child in set(children) - set(status):
            ended, how = os.waitpid(child, os.WNOHANG)
            if ended:
                status[child] = os.waitstatus_to_exitcode(how)
        if time.monotonic() > deadline:
            for child in set(children) - set(status):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
            return None
        time.sleep(_ASKED_S)
    return [status[child] for child in children]


def _fork(program: ForkedProgram, folder: str, output: Path) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(output.with_name(f"{output.name}.{name}"), os.O_WRONLY | os.O_CREAT, 0o600), number)
        os.chdir(folder)
        os.environ.update(program.environment)
        _become(program)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _become(program: ForkedProgram) -> None:
    """Run a program as ``__main__``, with the ``sys.argv`` and ``sys.path`` that Python would give it."""
    sys.argv = [program.source if program.is_file else "-c", *program.arguments]
    if program.is_file:
        sys.path[:0] = [str(Path(program.source).parent), str(TESTS)]
        runpy.run_path(program.source, run_name="__main__")
    else:
        sys.path.insert(0, "")
        scope: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(program.source, "<string>", "exec"), scope)


if __name__ == "__main__":
    _serve(sys.argv[1:])
