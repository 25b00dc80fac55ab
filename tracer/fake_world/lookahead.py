"""A workload with sharded tables that distributes its look-ups one micro-batch ahead."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from torch import Tensor

from tracer.workloads.data import Batch, StepBatch
from tracer.workloads.models.sharded_tables import ShardedTables
from tracer.workloads.workload import Workload


class LookaheadWorkload(Workload):
    """A ``Workload`` whose step copies the next micro-batch to the device and distributes its look-ups too.

    What comes next is known of steps' batches that are used as ``batches`` gives them, one after the other; any other
    is copied and distributed in its own step.
    """

    def __init__(self, whole: Workload, tables: ShardedTables) -> None:
        """``tables`` are those of the model."""
        self.__dict__.update(whole.__dict__)
        self._tables = tables
        self._following: Batch | None = None
        """The first micro-batch of the step after the one whose batch was given out last."""
        self._coming: list[Batch] = []
        """Micro-batches after the present one."""
        self._copied: tuple[Batch, Batch] | None = None
        """The next micro-batch, on the host and on the device."""

    def batches(self) -> Iterator[StepBatch]:
        """As without looking ahead; draws a step's batch when the one before it is asked for."""
        for batch, following in pairwise(super().batches()):
            self._following = following[0]
            yield batch

    def step(self, batch: StepBatch) -> Tensor:
        """One full training step, and the distribution of the next one's first look-ups."""
        self._coming = [*batch[1:], *([self._following] if self._following is not None else [])]
        self._following = None
        return super().step(batch)

    def _on_device(self, batch: Batch) -> Batch:
        copied, self._copied = self._copied, None
        own = copied[1] if copied is not None and copied[0] is batch else super()._on_device(batch)
        if self._coming:
            following = self._coming.pop(0)
            self._copied = following, super()._on_device(following)
            _, rows, starts = self._copied[1].inputs
            self._tables.announce(rows, starts)
        return own
