"""Capture foreign programs as ``foretrace capture`` does, each in a fork of a process that has made its imports.

    python tests/foreign/capturing.py DIR [NAME:OPTION=SIZE,… …]

Importing PyTorch and transformers takes longer than the programs. What a program printed is in ``DIR/NAME.log``.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from catalogue import CATALOGUE, Program, program

sys.path.append(str(Path(__file__).resolve().parents[1]))

from forks import IMPORTED, ForkedProgram, Forks, warm

COMMAND = "import sys; sys.argv[0] = 'foretrace'; from foretrace.commands import main; sys.exit(main())"
HEAVY = {"transformers": ("transformers", "transformers.trainer"), "accelerate": ("accelerate",),
         "lightning": ("lightning",)}
"""What is worth importing once, by the package that a program needs."""


def capture_all(out: Path, wanted: Sequence[str], steps: int = 2) -> dict[str, int]:
    """Capture so many steps of programs. Two and more show which calls a busy machine stopped: equal ones took less.

    Args:
        out: for a directory and a log of each.
        wanted: names of programs, with the sizes that differ from their own: ``NAME:OPTION=SIZE,…``.
        steps: that are recorded; few are enough for every command.

    Returns:
        The exit status of each, by the name of its directory.
    """
    todo = [_parsed(text) for text in wanted]
    heavy = [module for package, modules in HEAVY.items() if any(package in each.needs for _, each, _ in todo)
             for module in modules]
    forks = Forks(*IMPORTED, *heavy) if heavy else warm()
    status: dict[str, int] = {}
    for name, each, sizes in todo:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            world = {"WORLD_SIZE": each.processes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": probe.getsockname()[1]}
        command = ("capture", "--out", out / name, "--warmup", 2, "--timed", 4, "--steps", steps, each.path, "--",
                   *each.arguments(**sizes))
        ranks = [{"RANK": rank, "LOCAL_RANK": rank, **world} if each.processes > 1 else {}
                 for rank in range(each.processes)]
        done = forks.run([ForkedProgram.of(COMMAND, *command, HF_HUB_OFFLINE=1, **rank) for rank in ranks])
        (out / f"{name}.log").write_text("".join(one.stdout + one.stderr for one in done), encoding="utf-8")
        status[name] = max(abs(one.returncode) for one in done)
    if heavy:
        forks.close()
    return status


def _parsed(text: str) -> tuple[str, Program, dict[str, int]]:
    """The name of its directory, the program, and the sizes that differ from its own."""
    name, _, sizes = text.partition(":")
    found = {key: int(size) for key, _, size in (part.partition("=") for part in sizes.split(",") if part)}
    return text.replace(":", "-").replace("=", "").replace(",", "-"), program(name), found


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    outcome = capture_all(folder, sys.argv[2:] or [each.name for each in CATALOGUE if not each.lacking])
    for name, status in outcome.items():
        print(f"{name} {status}")
    sys.exit(max(outcome.values()))
