"""Commands killed at random moments: nothing written before may be lost, and nothing may be left over.

    python tests/fuzz/kill_run.py --kills 200 --seed 1
    python tests/fuzz/kill_run.py --command sweep --kills 40

Each command first runs whole, which tells how long it takes and which files it writes. Then it is started again and
again in the same folder, as a user would start it, and its process group is killed (signal 9) at a random moment.
After each kill every file of the run before must still be read as foretrace reads it; of a command that resumes, every
other run begins anew, and the next one goes on with what the kill left. After the last kill a whole run must leave the
same files and an empty folder of temporary files. Exits with 1 where that is not so.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECORDING = ROOT / "traces" / "cpu-small"
PROGRAM = """
import torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(40):
    optimizer.zero_grad()
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
"""

PLAN = """
name = "killed"
description = "A workload and a few micro-benchmarks."
device = "cpu"
threads = 1
minutes = 1

[[workload]]
workload = "dlrm"
preset = "tiny"
timed = 4
seconds = 5

[[kernel]]
family = "gemm"
product = { m = [32, 128], n = [64], k = [64, 256], dtype = ["fp32"] }
"""


@dataclass(frozen=True)
class Killed:
    """A command that is killed.

    Attributes:
        arguments: of ``foretrace``, run in a folder of its own.
        results: what it writes there, by name.
        read: arguments of ``foretrace`` that read a result, with its path last; none for a table.
        again: more arguments of every run after the first, such as ``--resume``.
        first: a command that makes what this one reads.
        resumes: whether it goes on with what a killed run left; then it also begins anew between kills.
    """

    arguments: tuple[str, ...]
    results: tuple[str, ...]
    read: tuple[str, ...] = ()
    again: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    resumes: bool = False


TRACE = ("trace", "--workload", "dlrm", "--preset", "tiny", "-o")
COMMANDS = {
    "capture": Killed(("capture", "-o", "job", "--timed", "4", "program.py"), ("job",), ("replay",), ("--replace",)),
    "trace": Killed((*TRACE, "step.foretrace"), ("step.foretrace",), ("inspect",)),
    "export": Killed(("export", str(RECORDING), "-o", "tables", "--format", "csv"), ("tables",)),
    "sweep": Killed(("sweep", "source.foretrace", "--device", "h100-sxm,h200-sxm,a100-sxm-80g,v100-sxm2-16g", "-o",
                     "sweep.csv"), ("sweep.csv",), first=(*TRACE, "source.foretrace")),
    "campaign": Killed(("campaign", "run", "plan.toml", "-o", "measured", "--minutes", "0.2"), ("measured",),
                       ("campaign", "status"), ("--resume",), resumes=True),
    "calibrate": Killed(("calibrate", "--on", "cpu", "--minutes", "0.3", "--families", "gemm,elementwise", "-o",
                         "own.profile"), ("own.profile",), (), ("--resume",), resumes=True),
}


def environment(folder: Path) -> dict[str, str]:
    """Of a run whose temporary files lie in a folder of their own."""
    (folder / "tmp").mkdir(exist_ok=True)
    return {**os.environ, "TMPDIR": str(folder / "tmp"), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def foretrace(arguments: tuple[str, ...], folder: Path) -> subprocess.Popen[bytes]:
    """Start a command in a process group of its own."""
    with (folder.parent / "said").open("wb") as said:
        return subprocess.Popen([sys.executable, "-m", "foretrace", *arguments], cwd=folder, stdout=said, stderr=said,
                                env=environment(folder.parent), start_new_session=True)


def contents(folder: Path) -> Iterator[str]:
    """The files and folders in a folder, by their paths in it."""
    return (str(path.relative_to(folder)) for path in sorted(folder.rglob("*")))


def whole(command: Killed, folder: Path, more: tuple[str, ...]) -> float:
    """Run a command to its end; return how long it took, s."""
    begin = time.monotonic()
    code = foretrace((*command.arguments, *more), folder).wait()
    if code:
        said = (folder.parent / "said").read_text(errors="replace").strip()
        raise SystemExit(f"foretrace {command.arguments[0]} ended with {code}: {said}")
    return time.monotonic() - begin


def lost(command: Killed, folder: Path) -> str:
    """Why a result can no longer be read; empty where all can."""
    for name in command.results:
        if not (folder / name).exists():
            return f"{name} is gone"
        if command.read:
            reader = foretrace((*command.read, name), folder)
            if reader.wait():
                return f"{name}: {(folder.parent / 'said').read_text(errors='replace').strip()}"
    return ""


def _next(command: Killed, folder: Path, given: list[str]) -> tuple[str, ...]:
    """The arguments of another run: as the first one where the last one was killed before it wrote anything."""
    return (*command.arguments, *(command.again if set(contents(folder)) - set(given) else ()))


def tried(name: str, kills: int, draw: random.Random, say: Callable[[str], None]) -> int:
    """Kill one command so many times; return in how many something was wrong."""
    command, wrong = COMMANDS[name], 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "work"
        folder.mkdir()
        (folder / "program.py").write_text(PROGRAM, encoding="utf-8")
        (folder / "plan.toml").write_text(PLAN, encoding="utf-8")
        if command.first:
            whole(Killed(command.first, ()), folder, ())
        given = list(contents(folder))
        seconds = whole(command, folder, ())
        expected = list(contents(folder))
        made = [folder / path for path in expected if "/" not in path and path not in given]
        for number in range(kills):
            if command.resumes and number % 2 == 0:
                for path in made:
                    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            running = foretrace(_next(command, folder, given), folder)
            at = draw.uniform(0.0, seconds)
            try:
                running.wait(at)
            except subprocess.TimeoutExpired:
                os.killpg(running.pid, signal.SIGKILL)
                running.wait()
            if not command.resumes and (why := lost(command, folder)):
                wrong += 1
                say(f"{name}, kill {number} after {at:.2f} s: {why}")
                break
        whole(command, folder, _next(command, folder, given)[len(command.arguments):])
        more = sorted(set(contents(folder)) - set(expected))
        # PyTorch's compiler keeps a folder of its own there.
        left = [path for path in contents(folder.parent / "tmp") if not path.startswith("torchinductor_")]
        if more or left or (why := lost(command, folder)):
            wrong += 1
            say(f"{name}, after {kills} kills and a whole run: left over {[*more, *left]}{why}")
        say(f"{name}: {kills} kills of a run of {seconds:.1f} s, {wrong} wrong")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=60, help="of all commands together")
    parser.add_argument("--command", choices=COMMANDS, action="append", help="only this one (repeatable)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chosen = options.command or list(COMMANDS)
    draw = random.Random(options.seed)
    wrong = sum(tried(name, -(-options.kills // len(chosen)), draw, lambda text: print(text, flush=True))
                for name in chosen)
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
