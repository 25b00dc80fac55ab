"""Edits of a program: each returns a new one, the old stays as it is."""

from __future__ import annotations

import numpy as np

from graph_predictor.simulation.program import NEVER, Program
from tracer.errors import ForetraceError


def delay_rank(program: Program, rank: int, ns: int) -> Program:
    """The same job with everything of one rank that comes from outside shifted in time.

    Shifted are the begin of its host threads, the arrival of its data batches and the work already on its streams
    when the window opened. All else follows from dependencies, so other ranks are late only where they wait for it.

    Args:
        program: The job.
        rank: Position of the rank in the program, from 0.
        ns: How much later (negative: earlier), in nanoseconds.

    Raises:
        ForetraceError: The program has no such rank.
    """
    if not 0 <= rank < program.ranks:
        raise ForetraceError(f"The job has {program.ranks} ranks, counted from 0: rank {rank} cannot be delayed.")
    edited = program.copy()
    threads = edited.thread_rank == rank
    items = threads[edited.item_thread()]
    edited.thread_start[threads] += ns
    edited.item_external[items & (edited.item_external > NEVER)] += ns
    low, high = int(edited.kernel_ptr[rank]), int(edited.kernel_ptr[rank + 1])
    external = edited.kernel_external[low:high]
    edited.kernel_external[low:high] = np.where(external > NEVER, external + ns, NEVER)
    return edited
