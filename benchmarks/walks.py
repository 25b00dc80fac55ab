"""How far a reader of the code walks: the modules that five commands cross, and how often one calls into another.

    python benchmarks/walks.py [--root CHECKOUT]

Replay, a prediction for another device, one at another size, a plan and a price are run in this process under a
profiler hook that notes which module each Python call is made from and into. Imports and compilation are left out: each
command runs once before. Prints modules crossed, changes of module, and calls.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

PACKAGES = ("foretrace", "tracer", "kernel_models", "graph_predictor", "planner")


class Walk:
    """Counts calls between modules of the packages."""

    def __init__(self) -> None:
        self.modules: set[str] = set()
        self.changes = self.calls = 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        here = frame.f_globals.get("__name__", "")
        if frame.f_code.co_filename == "<string>":
            return  # the command line's annotations, which typer evaluates of every command
        if here.partition(".")[0] not in PACKAGES:
            return
        self.modules.add(here)
        self.calls += 1
        before = frame.f_back
        if before is not None and before.f_globals.get("__name__", "") != here:
            self.changes += 1


def run(arguments: list[str]) -> None:
    """Run a command, whatever it prints and however it ends."""
    from foretrace.commands import app

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()), \
            contextlib.suppress(SystemExit):
        app(arguments)


def watched(work: Callable[[], None]) -> Walk:
    """Do some work twice, the second time under the hook."""
    work()
    walk = Walk()
    sys.setprofile(walk)
    try:
        work()
    finally:
        sys.setprofile(None)
    return walk


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1])
    root = parser.parse_args().root.resolve()
    sys.path.insert(0, str(root))
    os.environ["OMP_NUM_THREADS"] = "1"
    trace = str(root / "traces" / "bert-cpu")
    walks = {
        "replay": ["replay", trace],
        "predict another host": ["predict", trace, "--host", "0.5"],
        "predict a size": ["predict", trace, "--set", "batch=8"],
        "plan": ["plan", "llama", "--gpus", "8"],
        "price": ["price", "aten::mm", "--shapes", "512x512,512x512", "--device", "h200-sxm"],
    }
    print(f"{'walk':24} {'modules':>8} {'changes':>10} {'calls':>10}")
    for name, arguments in walks.items():
        walk = watched(lambda arguments=arguments: run(arguments))  # type: ignore[misc]
        print(f"{name:24} {len(walk.modules):8,} {walk.changes:10,} {walk.calls:10,}")
    for package in PACKAGES:
        files = sorted((root / package).rglob("*.py"))
        lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
        print(f"{package:24} {len(files):8,} files {lines:10,} lines")
    return 0


if __name__ == "__main__":
    sys.exit(main())
