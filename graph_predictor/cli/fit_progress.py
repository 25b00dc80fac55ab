"""How far fits are, on stderr: bars on a terminal, elsewhere a line for each when it begins."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

from graph_predictor.cli.text import printable, tell
from kernel_models import fitting


@contextmanager
def showing_fits() -> Iterator[fitting.Progress]:
    """Show fits that run beside each other."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield _tell_begin
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

    bars: dict[str, TaskID] = {}
    lock = Lock()
    with Progress(TextColumn("Fitting {task.description}"), BarColumn(), TaskProgressColumn(),
                          TimeElapsedColumn(), console=Console(stderr=True), transient=True) as shown:
        def show(name: str, done: float) -> None:
            with lock:
                if name not in bars:
                    bars[name] = shown.add_task(escape(printable(name)), total=1.0)
                shown.update(bars[name], completed=done, visible=done < 1.0)

        yield show


def _tell_begin(name: str, done: float) -> None:
    if done == 0.0:
        tell(f"fitting {name}")
