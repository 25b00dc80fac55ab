"""Work in threads, one a core: loops of machine code, which run without Python's lock, and numpy's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tracer.cores import usable_cores

Result = TypeVar("Result")


def in_threads(tasks: Sequence[Callable[[], Result]]) -> list[Result]:
    """Run tasks that do not depend on each other, begun in their order on as many cores as there are.

    Returns what each gave, in their order.
    """
    if len(tasks) < 2:
        return [task() for task in tasks]
    with ThreadPoolExecutor(min(len(tasks), usable_cores())) as pool:
        running = [pool.submit(task) for task in tasks]
        return [one.result() for one in running]
