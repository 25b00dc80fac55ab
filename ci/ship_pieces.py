"""Trace the pieces that plans of some decoders need, and ship them: to be run when tracing gives something else.

    python ci/ship_pieces.py

They are those of ``SEARCHES`` on ``DEVICE`` with the suite's own presets.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from planner.parallel import kept_layers  # noqa: E402
from planner.parallel.planning import plan  # noqa: E402
from tracer.errors import ForetraceError  # noqa: E402
from tracer.kept_files import read_kept  # noqa: E402

SEARCHES = (*((source, gpus) for source in ("gpt2", "llama", "moe") for gpus in (8, 64)), ("deepseek-v3", 2048))
"""Models, and how many GPUs each is planned for."""
DEVICE = "h200-sxm"


def traced() -> dict[str, bytes]:
    """Search without anything kept or shipped, and return what was traced, by piece."""
    found: dict[str, bytes] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        kept_layers.SHIPPED.unlink(missing_ok=True)
        for source, gpus in SEARCHES:
            try:
                plan(source, gpus, device=DEVICE)
            except ForetraceError as error:
                sys.stdout.write(f"{source} on {gpus}: {error}\n")
        for file in Path(folder).rglob("piece-*.kept"):
            content = read_kept(file.name)
            assert content is not None
            found[file.stem.rpartition("-")[2]] = content
    return found


def main() -> None:
    """Ship them."""
    pieces = traced()
    kept_layers.ship(pieces)
    sys.stdout.write(f"{len(pieces)} pieces, {kept_layers.SHIPPED.stat().st_size:,} bytes\n")


if __name__ == "__main__":
    main()
