"""``trace_apart``: a script's step traced by another interpreter.

A file's top level may do what a process can do only once: register an operator, a class of models, the way processes
are started. A second run here would fail at it, or find what the first has left. So a script is run again elsewhere:

    request.json ──▶ another interpreter: trace_script ──▶ step.pickle, or error.json

What comes back is pickled: importing what writes and reads files of graphs takes both processes longer than the step
takes to trace. Where processes can be forked, all of them are forks of one that has imported PyTorch (``waiting``).
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path

import msgspec

from tracer.decode import from_json
from tracer.errors import ForetraceError
from tracer.graph import ExecutionGraph
from tracer.shape_only.devices import TracedDevice
from tracer.shape_only.errors import ShapeOnlyError, UnknownSizeError
from tracer.shape_only.waiting import WaitingTracer, possible

_REQUEST, _GRAPH, _ERROR = "request.json", "step.pickle", "error.json"
_PROGRAM = "import sys; folder, *sys.path = sys.argv[1:]; from tracer.shape_only.apart import main; main(folder)"
"""It finds the modules that this process finds, before it imports any."""
_INTERRUPTED = 130
_WAITING = WaitingTracer()


class _Request(msgspec.Struct):
    """Arguments of ``trace_script``."""

    target: str
    device: str | TracedDevice
    world_size: int | None
    rank: int
    arguments: dict[str, int]


class _Failure(msgspec.Struct):
    """An error of the other process: its sentence, whether the size is unknown, and where it was raised."""

    sentence: str
    unknown_size: bool
    where: str


class _Elsewhere(Exception):
    """The traceback of the other process, which ``--debug`` shows before this one's."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def trace_apart(target: str, device: str | TracedDevice = "h200-sxm", *, world_size: int | None = None, rank: int = 0,
                arguments: Mapping[str, int] | None = None) -> ExecutionGraph:
    """Trace the step that ``SCRIPT.py:FUNCTION`` returns in a process of its own; arguments as ``trace_script``.

    Raises:
        UnknownSizeError: the function takes no such argument.
        ShapeOnlyError: as ``trace_script``, or the process ended before it answered.
    """
    with tempfile.TemporaryDirectory(prefix="foretrace-") as folder:
        place = Path(folder)
        request = _Request(target, device, world_size, rank, dict(arguments or {}))
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
    """Let another interpreter answer a request; returns its status."""
    if possible():
        return _WAITING.run(folder)
    return subprocess.run([sys.executable, "-c", _PROGRAM, folder, *sys.path], check=False).returncode


def main(folder: str) -> None:
    """Trace what a folder's request asks for, and leave the graph or the error there."""
    from tracer.shape_only.script import trace_script

    place = Path(folder)
    request = from_json((place / _REQUEST).read_bytes(), _Request)
    try:
        graph = trace_script(request.target, request.device, world_size=request.world_size, rank=request.rank,
                             arguments=request.arguments)
        (place / _GRAPH).write_bytes(pickle.dumps(graph, protocol=5))
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    except ForetraceError as error:
        failure = _Failure(str(error), isinstance(error, UnknownSizeError), traceback.format_exc())
        (place / _ERROR).write_bytes(msgspec.json.encode(failure))
