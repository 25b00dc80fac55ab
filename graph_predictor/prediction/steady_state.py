"""The steady state of a repeated step: how much later everything happens from one copy to the next.

In a periodic program whatever decides runs at the job's period: host threads where the host decides, a stream's last
kernel where the GPU does, even while the host still runs ahead and fills the launch queue. The period is therefore the
largest difference between two copies over all threads and streams, and it is found without waiting for queues to fill.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from graph_predictor.prediction.repeat import Cycle, Repeated, repeat
from graph_predictor.simulation.engine import Simulated, simulate_in_order
from graph_predictor.simulation.program import NEVER, ItemKind, Program
from graph_predictor.simulation.retiming import ProgramVariants, WorkingOrder
from tracer.arrays import Int64
from tracer.errors import ForetraceError

FIRST_COPIES = 4
MOST_COPIES = 64
MOST_EVENTS = 4_000_000
SAME = 1e-4
"""Two consecutive periods that differ by no more than this share are the steady state."""


@dataclass(frozen=True, slots=True)
class Steady:
    """Copies of a cycle in their steady state, or as near to it as was tried.

    Attributes:
        repeated: the copies.
        program: the copies as simulated, with edited durations.
        simulated: their times.
        period_ns: of a cycle, by rank.
        at: ("item" or "kernel", row) of the last copy's event that sets each rank's period.
        stop_ns: the time of the same event one copy earlier, by rank.
        reached: whether two consecutive periods agree.
        nodes: the order in which they became known, as of ``simulate_in_order``.
    """

    repeated: Repeated
    program: Program
    simulated: Simulated
    period_ns: Int64
    at: list[tuple[str, int]]
    stop_ns: Int64
    reached: bool
    nodes: Int64

    def periods_ns(self, program: Program, variants: ProgramVariants | None = None) -> Int64:
        """Periods of the slowest rank, of copies with a program's other times or those of its variants, [variants]."""
        ends = self._order().ends(program, variants)
        return np.concatenate([end[:, 1] - end[:, 0] for end in ends]).max(axis=0)  # type: ignore[no-any-return]

    def _order(self) -> WorkingOrder:
        """Return the order of all copies that differ in times alone, which are worked out along that of the first."""
        p, repeated = self.program, self.repeated
        # Begins of steps are never taken in by others, whatever holds them back.
        held = (p.item_external > NEVER) & (p.item_kind != ItemKind.STEP_BEGIN)
        of = (len(p.wait_kernel), tuple(np.flatnonzero(held).tolist()), tuple(p.queue_depth.tolist()))
        return repeated.shared.once("order", of, lambda: WorkingOrder.of(
            p, self.nodes, repeated.structure, repeated.item, repeated.end[:, -2:], repeated.tail[:, -2:]))


MakeProgram = Callable[[Repeated], Program]
"""Makes the program to simulate of the copies: puts edited durations in."""


def steady_state(cycle: Cycle, make: MakeProgram, copies: int = FIRST_COPIES) -> Steady:
    """Repeat a cycle until its period no longer changes (or ``MOST_COPIES``).

    Raises:
        ForetraceError: nothing happens in the cycle, so that it cannot be repeated.
    """
    size = int(cycle.item.sum() + cycle.kernel.sum())
    if not cycle.item.any():
        raise ForetraceError("Nothing happens in the chosen step (its marker has no length, or no call lies in it), so "
                             "that it cannot be repeated; choose another with --step.")
    while True:
        repeated = repeat(cycle, copies)
        steady = measure(repeated, make(repeated))
        if steady.reached or 2 * copies > MOST_COPIES or 2 * copies * size > MOST_EVENTS:
            return steady
        copies *= 2


def measure(repeated: Repeated, program: Program) -> Steady:
    """Simulate the copies and read the period off the last ones."""
    simulated, nodes = simulate_in_order(program, structure=repeated.structure)
    times = np.concatenate([simulated.item_end[repeated.end], simulated.kernel_end[repeated.tail]])
    rank = np.concatenate([np.arange(len(repeated.end)), repeated.tail_rank])
    period = times[:, -1] - times[:, -2]
    before = times[:, -2] - times[:, -3]
    at: list[tuple[str, int]] = []
    found, stop = np.zeros(len(repeated.end), np.int64), np.zeros(len(repeated.end), np.int64)
    reached = True
    for number in range(len(repeated.end)):
        mine = np.flatnonzero(rank == number)
        best = int(mine[np.argmax(period[mine])])
        is_item = best < len(repeated.end)
        at.append(("item", int(repeated.end[best, -1])) if is_item
                  else ("kernel", int(repeated.tail[best - len(repeated.end), -1])))
        found[number], stop[number] = period[best], times[best, -2]
        reached &= bool(abs(int(before[mine].max()) - found[number]) <= SAME * max(int(found[number]), 1))
    return Steady(repeated, program, simulated, found, at, stop, reached, nodes)
