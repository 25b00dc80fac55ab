"""Threads, one per core, for work that runs without Python's lock: compiled loops and numpy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tracer.cores import usable_cores

Result = TypeVar("Result")


def in_threads(tasks: Sequence[Callable[[], Result]]) -> list[Result]:
    """Run independent tasks, started in order, on as many threads as there are cores.

    Returns the results in the tasks' order.
    """
    if len(tasks) < 2:
        return [task() for task in tasks]
    with ThreadPoolExecutor(min(len(tasks), usable_cores())) as pool:
        running = [pool.submit(task) for task in tasks]
        return [one.result() for one in running]
