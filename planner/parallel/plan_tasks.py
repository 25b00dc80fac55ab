"""The rows of each task of a plan's step: forward, backward and weights' gradients of a stage's chunk, and the step's
end.

What an ``estimate`` adds up stands here where it happens: collectives between the parts of a block, gradients and
parameters block by block beside the work that hides them.
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.parallel.estimate import Rates, exchange_us
from planner.parallel.loads import BlockLoads, Exchange, Loads
from planner.parallel.pieces import LayerWork
from planner.parallel.task_rows import PlanStream, TaskRows, slower_beside
from tracer.parallel_plan import Recomputation, Schedule, Sharding


class PlanTasks:
    """Makes the rows of tasks.

    Args:
        loads: what the plan's step is made of.
        rates: factors and the host's times.
    """

    def __init__(self, loads: Loads, rates: Rates) -> None:
        self._loads, self._rates, self._plan = loads, rates, loads.plan
        self._by_block = loads.plan.sharding is Sharding.PARAMETERS and loads.plan.pp == 1
        self._once_beside = loads.plan.overlap and not self._by_block
        self._blocks = [sum(sum(counts) for counts in stage) for stage in loads.counts]

    def begin(self, stage: int) -> tuple[TaskRows, list[int]]:
        """Return what begins the step of a stage after the first: its parameters are gathered while it waits for its
        input; and the last kernel of each chunk's."""
        out, ends = TaskRows.begun(), []
        for chunk in range(self._plan.chunks):
            end = -1
            for _ in range(sum(self._loads.counts[stage][chunk])):
                end = self._of_state(out, self._loads.gather[stage], stage, "gather parameters")
            ends.append(end)
        return out, ends

    @property
    def gathers_first(self) -> bool:
        """Return whether stages gather parameters once a step, beside work."""
        return self._once_beside and bool(self._plan.sharding)

    def forward(self, stage: int, chunk: int, *, first: bool) -> TaskRows:
        """Return the forward of a micro-batch; with the first stage's ``first`` one parameters are gathered once."""
        out, loads, rates = TaskRows.begun(), self._loads, self._rates
        if self._by_block:
            out.waited(loads.root_gather, rates, "gather parameters", 1 if loads.root_gather.us else 0)
        if stage == 0 and chunk == 0:
            out.work(loads.embedding.forward, rates, "embedding")
            out.waited(loads.embedding_forward, rates, "embedding's all-reduce")
        blocks = [block for block, count in loads.held(stage, chunk) for _ in range(count)]
        gathers = _Gathers(self, out, blocks)
        for block in blocks:
            slower = gathers.begin()
            if first and self._once_beside and stage == 0:
                out.wait_for([self._of_state(out, loads.gather[stage], stage, "gather parameters")])
            self._block_forward(out, block, slower)
            gathers.end()
        if stage == self._plan.pp - 1 and chunk == self._plan.chunks - 1:
            for _ in range(1 + loads.shape.predictions):
                out.work(loads.head.forward, rates, "head and loss")
                out.waited(loads.head_forward, rates, "loss's all-reduce")
        else:
            self._send(out, stage)
        return out

    def backward(self, stage: int, chunk: int, *, last: bool) -> TaskRows:
        """Return the backward of a micro-batch; with the ``last`` one gradients are reduced once a step."""
        out, loads, rates, plan = TaskRows.begun(), self._loads, self._rates, self._plan
        if stage == plan.pp - 1 and chunk == plan.chunks - 1:
            for _ in range(1 + loads.shape.predictions):
                out.work(self._without_weights(loads.head.backward, loads.head.weights), rates, "head, backward")
                out.waited(loads.head_backward, rates, "head's all-reduce")
        runs = [(block, place < again) for (block, count), again in
                zip(loads.held(stage, chunk), loads.rerun(stage, chunk), strict=True) for place in range(count)][::-1]
        gathers = _Gathers(self, out, [block for block, _ in runs], backward=True)
        reduces = self._reduces(last) and plan.schedule is not Schedule.ZERO_BUBBLE
        for block, again in runs:
            slower = gathers.begin()
            if again:
                self._block_forward(out, block, slower, plan.recompute)
            elif plan.recompute is Recomputation.SELECTIVE:
                out.work(block.work.core, rates, "block, computed again")
            if reduces:
                slower *= slower_beside((loads.reduce[stage],), self._stage_backward_us(stage), rates)
            beside = block.context_backward, block.beside_backward
            self._block(out, "block, backward", self._without_weights(block.work.backward, block.work.weights),
                        block.backward, block.experts_backward, beside, slower)
            gathers.end()
            if reduces:
                self._of_state(out, loads.reduce[stage], stage, "reduce gradients", after=(out.last_compute,))
        if stage == 0 and chunk == 0:
            out.work(loads.embedding.backward, rates, "embedding, backward")
        else:
            self._send(out, stage - 1)
        if self._by_block:
            out.waited(loads.root_reduce, rates, "reduce gradients", 1 if loads.root_reduce.us else 0)
        return out

    def weights(self, stage: int, chunk: int, *, last: bool) -> TaskRows:
        """Return weights' gradients of a micro-batch, where the schedule does them apart; those of the ``last`` are
        reduced."""
        out, loads = TaskRows.begun(), self._loads
        if stage == self._plan.pp - 1 and chunk == self._plan.chunks - 1:
            for _ in range(1 + loads.shape.predictions):
                out.work(loads.head.weights, self._rates, "head's weights")
        for block, count in loads.held(stage, chunk):
            for _ in range(count):
                out.work(block.work.weights, self._rates, "weights")
                if self._reduces(last):
                    self._of_state(out, loads.reduce[stage], stage, "reduce gradients", after=(out.last_compute,))
        return out

    def end(self, stage: int) -> TaskRows:
        """Return what ends the step of a stage: the tied embedding's gradients, the optimizer, and collectives of
        replicas that nothing is to hide."""
        out, loads, plan = TaskRows.begun(), self._loads, self._plan
        in_row = not plan.overlap and not self._by_block
        if in_row:
            for _ in range(plan.passes if plan.sharding is Sharding.GRADIENTS else 1):
                self.wait_for_state(out, loads.reduce[stage], "reduce gradients")
        if stage in (0, plan.pp - 1):
            out.waited(loads.tied, self._rates, "tied embedding's all-reduce")
        out.work(loads.optimizer[stage], self._rates, "optimizer")
        if in_row:
            self.wait_for_state(out, loads.gather[stage], "gather parameters")
        return out

    def gathered(self, out: TaskRows, block: BlockLoads, after: Sequence[int]) -> int:
        """Gather a block's parameters, and return the kernel."""
        return out.beside(PlanStream.STATE, exchange_us(block.gather, self._rates), self._rates, "gather parameters",
                          after=after)

    def reduced(self, out: TaskRows, block: BlockLoads) -> None:
        """Reduce the gradients of a block, fully sharded."""
        out.beside(PlanStream.STATE, exchange_us(block.reduce, self._rates), self._rates, "reduce gradients",
                   after=(out.last_compute,))

    def slower_for_state(self, block: BlockLoads, backward: bool) -> float:
        """Return the factor by which a block's gathers and reductions slow its work down."""
        work = block.work.backward if backward else block.work.forward
        exchanges = (block.gather, block.reduce) if backward else (block.gather,)
        return slower_beside(exchanges, self._us(work), self._rates)

    @property
    def by_block(self) -> bool:
        """Return whether parameters are gathered block by block, and beside the work before."""
        return self._by_block and self._plan.overlap

    @property
    def in_row(self) -> bool:
        """Return whether they are gathered block by block, and work waits for all of it."""
        return self._by_block and not self._plan.overlap

    def wait_for_state(self, out: TaskRows, exchange: Exchange, name: str) -> None:
        """Let work wait for all of a block's collectives of state."""
        out.waited(exchange, self._rates, name, 1 if exchange.us else 0)

    def _reduces(self, last: bool) -> bool:
        """Return whether a micro-batch's gradients are reduced beside work."""
        return self._once_beside and (self._plan.sharding is Sharding.GRADIENTS or last)

    def _block_forward(self, out: TaskRows, block: BlockLoads, slower: float,
                       again: Recomputation = Recomputation.NONE) -> None:
        whole = again in (Recomputation.NONE, Recomputation.FULL)
        name = "block" if again is Recomputation.NONE else "block, computed again"
        self._block(out, name, block.work.forward if whole else block.work.again[again],
                    block.forward if whole else block.forward.without_last(), block.experts_forward,
                    (block.context_forward, block.beside_forward), slower)

    def _block(self, out: TaskRows, name: str, work: LayerWork, waited: Exchange, experts: Exchange,
               beside: Sequence[Exchange], slower: float) -> None:
        """A block's work in as many parts as there are collectives between them."""
        rates, before = self._rates, out.last_compute
        overlapped = self._plan.overlap
        if overlapped:
            slower *= slower_beside(beside, self._us(work), rates)
        kernels = [out.beside(PlanStream.BESIDE, exchange_us(each, rates), rates, "collectives beside the block",
                              after=(before,), count=1) for each in beside] if overlapped else []
        parts = max(waited.count + (experts.count > 0), 1)
        share = work.times(1 / parts)
        for part in range(parts):
            out.work(share, rates, name, slower=slower)
            if part < waited.count:
                out.waited(_one(waited), rates, "layers' collectives", 1)
            else:
                out.waited(experts, rates, "experts' collectives")
        if not overlapped:
            for each in beside:
                out.waited(each, rates, "layers' collectives", 1 if each.us else 0)
        out.wait_for(kernels)

    def _of_state(self, out: TaskRows, exchange: Exchange, stage: int, name: str, after: Sequence[int] = ()) -> int:
        """A block's share of what a stage's replicas communicate beside work; returns the kernel."""
        us = exchange_us(exchange, self._rates) / max(self._blocks[stage], 1)
        return out.beside(PlanStream.STATE, us, self._rates, name, after=after)

    def _send(self, out: TaskRows, boundary: int) -> None:
        exchange = self._loads.transfer[boundary % self._plan.pp]
        if exchange.count:
            out.send(exchange_us(exchange, self._rates), self._rates, exchange.count)

    def _without_weights(self, work: LayerWork, weights: LayerWork) -> LayerWork:
        """Backward without what a task of its own does."""
        if self._plan.schedule is not Schedule.ZERO_BUBBLE:
            return work
        return LayerWork(work.products - weights.products, work.others - weights.others,
                         launches=max(work.launches - weights.launches, 0))

    def _us(self, work: LayerWork) -> float:
        return work.products * self._rates.products + work.others * self._rates.others

    def _stage_backward_us(self, stage: int) -> float:
        """A stage's backward of one micro-batch of every chunk."""
        return sum(count * self._us(block.work.backward) for chunk in range(self._plan.chunks)
                   for block, count in self._loads.held(stage, chunk))


class _Gathers:
    """Parameters of fully sharded blocks: each is gathered beside the block before, once the one before that has gone;
    in backward gradients follow it on the same links."""

    def __init__(self, tasks: PlanTasks, out: TaskRows, blocks: Sequence[BlockLoads], backward: bool = False) -> None:
        self._tasks, self._out, self._blocks, self._backward = tasks, out, blocks, backward
        self._at = 0
        self._ends = [out.last_compute]
        self._next = tasks.gathered(out, blocks[0], self._ends) if tasks.by_block and blocks else -1

    def begin(self) -> float:
        """Have the next block's parameters, gather those after it, and return the factor on its work."""
        tasks, out, block = self._tasks, self._out, self._blocks[self._at]
        if tasks.in_row:
            tasks.wait_for_state(out, block.gather, "gather parameters")
        if not tasks.by_block:
            return 1.0
        out.wait_for([self._next])
        if self._at + 1 < len(self._blocks):
            self._next = tasks.gathered(out, self._blocks[self._at + 1], self._ends[-1:])
        return tasks.slower_for_state(block, self._backward)

    def end(self) -> None:
        """Note that the block's work has been added."""
        block = self._blocks[self._at]
        self._at += 1
        self._ends.append(self._out.last_compute)
        if not self._backward:
            return
        if self._tasks.by_block:
            self._tasks.reduced(self._out, block)
        elif self._tasks.in_row:
            self._tasks.wait_for_state(self._out, block.reduce, "reduce gradients")


def _one(exchange: Exchange) -> Exchange:
    """One of equal collectives."""
    return Exchange(exchange.us / exchange.count, count=1, ranks=exchange.ranks, between_nodes=exchange.between_nodes)
