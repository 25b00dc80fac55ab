"""``TaskRows``: the host calls and kernels of one task of a plan's step, such as one chunk's forward, in rows that are
laid out once and then repeated for every micro-batch.

A block's launches are folded: a stretch of work is ``FOLDS`` calls, each with its share of the launches' host time,
and as many kernels. Collectives that work waits for are kernels in its stream; others have streams of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from planner.parallel.estimate import Rates, exchange_us, slowed_us
from planner.parallel.loads import Exchange
from planner.parallel.pieces import LayerWork

FOLDS = 4
"""Calls and kernels that stand for a stretch's launches: the device begins with the first quarter of them."""


START = "start"
"""Name of a task's first kernel."""


class PlanStream(IntEnum):
    """Where a kernel runs."""

    COMPUTE = 0
    BESIDE = 1
    """Collectives of layers that run beside their work: context parallelism, overlapped tensor parallelism."""
    STATE = 2
    """Gradients and parameters of replicas."""
    SEND = 3
    """Activations to the next stage, or gradients to the one before."""


@dataclass(slots=True)
class TaskRows:
    """Rows of one task; items and kernels are numbered from 0.

    Attributes:
        item_us: host time of each call.
        kernel_item, kernel_stream, kernel_us, kernel_name: the call that launches a kernel, its stream and duration.
        edges: (kernel, the kernel before whose end it cannot start).
        sends: the kernel that sends the result to another stage; -1 without one.
    """

    item_us: list[float] = field(default_factory=list)
    kernel_item: list[int] = field(default_factory=list)
    kernel_stream: list[int] = field(default_factory=list)
    kernel_us: list[float] = field(default_factory=list)
    kernel_name: list[str] = field(default_factory=list)
    edges: list[tuple[int, int]] = field(default_factory=list)
    sends: int = -1
    _compute: int = -1
    _waited: list[int] = field(default_factory=list)

    @classmethod
    def begun(cls) -> TaskRows:
        """Make the rows of a task whose first kernel is its start, which takes no time."""
        out = cls()
        out._kernel(PlanStream.COMPUTE, 0.0, 0.0, START)
        return out

    @property
    def last_compute(self) -> int:
        """The last kernel so far that computes."""
        return self._compute

    def work(self, work: LayerWork, rates: Rates, name: str, *, slower: float = 1.0) -> None:
        """Add a stretch of work.

        Args:
            slower: factor on its kernels, for collectives beside it.
        """
        us = slower * (work.products * rates.products + work.others * rates.others)
        host = work.launches * rates.host_us
        if us <= 0 and host <= 0:
            return
        for _ in range(FOLDS):
            self._kernel(PlanStream.COMPUTE, us / FOLDS, host / FOLDS, name)

    def waited(self, exchange: Exchange, rates: Rates, name: str, count: int | None = None) -> None:
        """Add collectives that work waits for: all ``count`` of them, by default as many as there are."""
        number = exchange.count if count is None else count
        for _ in range(number):
            self._kernel(PlanStream.COMPUTE, exchange_us(exchange, rates) / number, rates.host_collective_us, name)

    def beside(self, stream: PlanStream, us: float, rates: Rates, name: str, *, after: Sequence[int] = (),
               count: int = 1) -> int:
        """Add collectives on another stream, after these kernels and all on it before, and return the last of them; -1
        where there is nothing."""
        found = -1
        for _ in range(count if us > 0 else 0):
            found = self._kernel(stream, us / count, rates.host_collective_us, name, tuple(after))
        return found

    def wait_for(self, kernels: Sequence[int]) -> None:
        """Let the next kernel that computes start after these."""
        self._waited += [kernel for kernel in kernels if kernel >= 0]

    def send(self, us: float, rates: Rates, count: int) -> None:
        """Send the task's result to another stage."""
        self.sends = self._kernel(PlanStream.SEND, us, count * rates.host_collective_us, "send", (self._compute,))

    def _kernel(self, stream: PlanStream, us: float, host_us: float, name: str, after: tuple[int, ...] = ()) -> int:
        number = len(self.kernel_us)
        self.item_us.append(host_us)
        self.kernel_item.append(len(self.item_us) - 1)
        self.kernel_stream.append(int(stream))
        self.kernel_us.append(us)
        self.kernel_name.append(name)
        self.edges += [(number, each) for each in after if each >= 0]
        if stream is PlanStream.COMPUTE:
            self._compute = number
            self.edges += [(number, each) for each in self._waited]
            self._waited = []
        return number


def slower_beside(exchanges: Sequence[Exchange], compute_us: float, rates: Rates) -> float:
    """Return the factor by which collectives that run beside so much work slow it down."""
    us = sum(exchange_us(each, rates) for each in exchanges)
    return 1 + slowed_us(exchanges, min(us, compute_us), rates) / compute_us if compute_us > 0 else 1.0
