"""Model of a captured step's collectives on a GPU: their streams, and the first operation that waits. Needs no torch.

A CPU runs every collective where it is called. On a GPU each runs on its own stream, and the compute stream waits for
it at a point that the framework's code fixes. The names and the order of the recorded operations show that point:

- DDP: a bucket is reduced from when its last gradient is ready until the end of backward, which waits for all buckets.
- FSDP2: a block's all-gather runs from its issue (in backward during the previous block) until its copy-out. On the GPU
  it may begin while the previous block still computes, in forward too: its stream waits for no compute. A
  reduce-scatter runs until the next one is issued, and the last until the optimizer.
- Functional collectives (DTensor, tensor parallelism): until ``wait_tensor``.
- Pipelines: a receive is waited for at once, a lone send at the next send or receive.
- All others: at once if called synchronously, otherwise unknown.

All of it is a model, and marked as one (``WaitSource.MODELLED``). Shape-only traces give the first use of the data. The
two agree except for FSDP2's reduce-scatters: the stream waits for the next one although no data depends on it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass

import numpy as np

from tracer.arrays import Int32
from tracer.graph import NONE, ExecutionGraph, OpKind, WaitSource

ALL_GATHER, REDUCE_SCATTER, BUCKETS, PEERS, IN_ORDER = (
    "fsdp all-gather", "fsdp reduce-scatter", "ddp buckets", "point to point", "compute")
_AUTOGRAD = "autograd::engine::evaluate_function"
_COLLECTIVE = ("c10d::", "_c10d_functional::")


@dataclass(slots=True)
class ModelledOverlap:
    """For each row of ``graph.collectives``: the name of its stream (for functional ones, their group), and its waiter.

    ``wait_op`` is a row of ``graph.ops``, ``NONE`` where no wait is known.
    """

    stream: list[str]
    wait_op: Int32


def model_overlap(graph: ExecutionGraph) -> ModelledOverlap:
    """Return the streams and waits of a captured graph's collectives (see the module's text)."""
    found = ModelledOverlap([""] * len(graph.collectives), np.full(len(graph.collectives), NONE, np.int32))
    steps = graph.ops.step[np.maximum(graph.collectives.op, 0)]
    for step in np.unique(steps[graph.collectives.op != NONE]).tolist():
        _Step(graph, step).fill(found)
    return found


def note_overlap(graph: ExecutionGraph) -> None:
    """Put the modelled waits into the graph's collectives, where no wait is known."""
    table = graph.collectives
    rows = (table.wait_op == NONE) & (table.wait_source == NONE)
    waits = model_overlap(graph).wait_op
    table.wait_op = np.where(rows, waits, table.wait_op).astype(np.int32)
    table.wait_source = np.where(rows & (waits != NONE), WaitSource.MODELLED, table.wait_source).astype(np.int8)


class _Step:
    """One step's operations on the thread that calls collectives, in time order."""

    def __init__(self, graph: ExecutionGraph, step: int) -> None:
        self.graph, ops = graph, graph.ops
        mine = np.flatnonzero(ops.step[graph.collectives.op] == step)
        self.collectives = mine[graph.collectives.op[mine] != NONE].tolist()
        threads = np.unique(ops.thread[graph.collectives.op[self.collectives]])
        rows = np.flatnonzero((ops.step == step) & np.isin(ops.thread, threads))
        self.rows: list[int] = rows[np.argsort(ops.start_ns[rows], kind="stable")].tolist()
        self.starts: list[int] = ops.start_ns[self.rows].tolist()
        self.names = [graph.string(code) for code in ops.name[self.rows].tolist()]
        self.is_op: list[bool] = (ops.kind[self.rows] == OpKind.OPERATION).tolist()
        self.place = {row: place for place, row in enumerate(self.rows)}
        self.tops = [place for place, row in enumerate(self.rows) if self._is_top(row)]

    def fill(self, found: ModelledOverlap) -> None:
        """Set stream and wait of each collective of the step."""
        table = self.graph.collectives
        functional: list[int] = []
        peers: list[int] = []
        for index in self.collectives:
            chain = self._chain(int(table.op[index]))
            call = next((place for place in reversed(chain) if self.names[place].startswith(_COLLECTIVE)), chain[0])
            labels = [self.names[place] for place in chain]
            gather = next((label for label in labels if label.startswith("FSDP::all_gather")), "")
            if gather:
                suffix = gather.removeprefix("FSDP::all_gather")
                found.stream[index] = ALL_GATHER
                found.wait_op[index] = self._first_inside(self._next(call, f"FSDP::all_gather_copy_out{suffix}"))
            elif any(label.startswith("FSDP::post_backward_reduce") for label in labels):
                found.stream[index] = REDUCE_SCATTER
                found.wait_op[index] = self._after_reduce_scatter(call)
            elif self.names[call].startswith("_c10d_functional::"):
                functional.append(index)
            elif self.graph.string(int(table.kind[index])) in ("send", "recv"):
                peers.append(index)
            elif self._is_bucket(labels):
                found.stream[index] = BUCKETS
                found.wait_op[index] = self._after_backward(chain[-1])
            elif table.is_async[index] != 1 or any("DistributedDataParallel.forward" in label for label in labels):
                found.stream[index] = IN_ORDER
                found.wait_op[index] = self._op_after(call)
        self._functional(functional, found)
        self._peers(peers, found)

    def _chain(self, row: int) -> list[int]:
        """Return the indices of an operation and its enclosing ones, innermost first, without the step's annotation."""
        chain = []
        while row in self.place:
            chain.append(self.place[row])
            row = int(self.graph.ops.parent[row])
        return [place for place in chain if not self.names[place].startswith("ProfilerStep#")] or chain

    def _is_top(self, row: int) -> bool:
        parent = int(self.graph.ops.parent[row])
        return parent not in self.place or self.names[self.place[parent]].startswith("ProfilerStep#")

    def _is_bucket(self, labels: list[str]) -> bool:
        return labels[0] == "c10d::allreduce_" and any(label.startswith(_AUTOGRAD) for label in labels)

    def _next(self, place: int, prefix: str) -> int:
        """Return the next index whose name begins with ``prefix`` (a copy-out's must be equal to it), or ``NONE``."""
        exact = prefix.startswith("FSDP::all_gather_copy_out")
        for later in range(place + 1, len(self.rows)):
            name = self.names[later]
            if name == prefix or (not exact and name.startswith(prefix)):
                return later
        return NONE

    def _first_inside(self, place: int) -> int:
        """Return the first operation at or after an index, as a row."""
        if place == NONE:
            return NONE
        return next((self.rows[later] for later in range(place, len(self.rows)) if self.is_op[later]), NONE)

    def _op_after(self, place: int) -> int:
        """Return the first operation that begins after the end of the operation at an index, as a row."""
        ops, row = self.graph.ops, self.rows[place]
        later = bisect_left(self.starts, int(ops.start_ns[row] + ops.duration_ns[row]))
        inside = max(later, place + 1)
        return self._first_inside(inside) if inside < len(self.rows) else NONE

    def _after_reduce_scatter(self, call: int) -> int:
        for label in ("FSDP::post_backward_rs_wait", "FSDP::post_backward_reduce"):
            if (wait := self._next(call, label)) != NONE:
                return self._first_inside(wait)
        ends = (self.graph.ops.start_ns + self.graph.ops.duration_ns)[self.rows]
        last = next((place for place in self.tops if ends[place] >= self.starts[call]
                     and self.names[place].startswith("FSDP::root_post_backward_callback")), call)
        return self._op_after(last)

    def _after_backward(self, outermost: int) -> int:
        """Return the row of the first operation after the run of autograd's ranges at ``outermost``, or NONE."""
        at = bisect_left(self.tops, outermost)
        later = next((place for place in self.tops[at:] if not self.names[place].startswith(_AUTOGRAD)), NONE)
        return self._first_inside(later)

    def _functional(self, indices: list[int], found: ModelledOverlap) -> None:
        """Match each ``wait_tensor`` with the oldest running collective; if none runs, the wait is ignored."""
        table = self.graph.collectives
        events = [(self.place[int(table.op[index])], index) for index in indices]
        events += [(place, NONE) for place, name in enumerate(self.names) if name == "_c10d_functional::wait_tensor"]
        under_way: deque[int] = deque()
        for place, index in sorted(events):
            if index != NONE:
                found.stream[index] = f"group {self.graph.string(int(table.group[index]))}"
                under_way.append(index)
            elif under_way:
                found.wait_op[under_way.popleft()] = self.rows[place]

    def _peers(self, indices: list[int], found: ModelledOverlap) -> None:
        """Group sends and receives without other operations between them into one batch."""
        table = self.graph.collectives
        batches: list[list[int]] = []
        for index in indices:
            place = self.place[int(table.op[index])]
            following = self._op_after(self.place[int(table.op[batches[-1][-1]])]) if batches else NONE
            if batches and following == self.rows[place]:
                batches[-1].append(index)
            else:
                batches.append([index])
        for number, batch in enumerate(batches):
            receives = any(self.graph.string(int(table.kind[index])) == "recv" for index in batch)
            after = self._op_after(self.place[int(table.op[batch[-1]])])
            if not receives and number + 1 < len(batches):
                after = int(table.op[batches[number + 1][0]])
            for index in batch:
                found.stream[index] = PEERS
                found.wait_op[index] = after
