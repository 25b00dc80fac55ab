"""Write the bitcode of every compiled loop, which is shipped: to be run when the source of one has changed.

    python ci/ship_loops.py
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tracer.machine_code import SHIPPED, KeptLoop  # noqa: E402


def loops() -> Iterator[KeptLoop]:
    """Every compiled loop."""
    for package in ("tracer", "kernel_models", "graph_predictor", "planner", "step_views"):
        for path in sorted((ROOT / package).rglob("*_loop.py")):
            module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
            for value in vars(module).values():
                if isinstance(value, KeptLoop) and value.function.__module__ == module.__name__:
                    yield value


def main() -> None:
    """Ship what is not shipped yet, and remove what is of earlier sources."""
    wanted = set()
    for loop in loops():
        if not loop.shipped.exists():
            sys.stdout.write(f"{loop.ship().relative_to(ROOT)}\n")
        wanted.add(loop.shipped)
    for path in {*ROOT.glob(f"[!.]*/**/{SHIPPED}/*.bc.z")} - wanted:
        path.unlink()


if __name__ == "__main__":
    main()
