"""``StepModel``: the time of one step from what lies on each rank.

A collective ends when its slowest rank has come, so that each phase takes what its slowest rank takes::

    indices ─▶ look-ups ─▶ vectors ─▶ interaction, top MLP ─▶ gradients ─▶ look-ups' backward, fused optimizer
     (1)        max rank    (2)        (rest of the dense part)  (2)          max rank │ dense all-reduce beside it (3)

(1) Copies of the batch to the device; all-to-all of lengths, then of indices. With a pipeline they are the next batch's
    and the dense part hides them.
(2) All-to-all of pooled vectors; reduce-scatter (backward: all-gather) of row-wise tables; for table-row-wise ones the
    same within a node and an all-to-all across nodes. The bottom MLP runs meanwhile.
(3) What the look-ups' backward hides is free, as DDP does it; gradients of data-parallel tables are ready only after
    it, and their optimizer's pass follows.

Source: Naumov et al., 2019 (arXiv 1906.00091), section on parallelism; TorchRec's ``TrainPipelineSparseDist``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kernel_models.lookups import batched_backward_us, batched_forward_us
from planner.sharding.exchanges import Exchanges
from planner.sharding.loads import SUMS, RankLoads
from planner.sharding.problem import ShardingProblem
from tracer.arrays import Float64

INDEX, SENT, MEMORY, HOST = (SUMS.index(name) for name in ("index_bytes", "sent_bytes", "memory", "host_bytes"))
LENGTHS_BYTES = 64.0
"""Payload by which the latency of the all-to-all of lengths is priced; their bytes go with the indices'."""


Values = float | Float64
"""Times of one step, or of many."""


@dataclass(frozen=True, slots=True)
class CommonTimes:
    """Parts of a step that do not depend on single ranks, µs."""

    vectors: float
    gradients: float
    reduced: float
    copied: float


class StepModel:
    """Prices steps of one problem."""

    def __init__(self, problem: ShardingProblem) -> None:
        self.problem = problem
        self.exchanges = Exchanges(problem)
        dense = problem.dense
        self.hidden_us = dense.top_forward + dense.top_backward if problem.pipelined else 0.0
        self._dense = dense.top_forward + dense.top_backward + dense.optimizer + dense.host
        anchors = problem.anchors
        self._forward, self._backward = anchors.factor(anchors.forward), anchors.factor(anchors.backward)
        self._dense_reduced = float(self.exchanges.all_reduce.us(dense.gradient_bytes))
        self.returned = float(problem.trained)
        """Times that the vectors' bytes come back, as gradients."""
        self._lengths = float(self.exchanges.all_to_all.us(LENGTHS_BYTES))

    def shared(self, loads: RankLoads) -> CommonTimes:
        """Return what is the same whatever lies on single ranks."""
        e = self.exchanges
        node, cross = loads.node_bytes.max(initial=0.0), loads.cross_bytes.max(initial=0.0)
        across = float(e.across_nodes.us(cross))
        return CommonTimes(
            float(e.reduce_scatter.us(loads.reduced_bytes) + e.node_reduce_scatter.us(node)) + across,
            self.returned * (float(e.all_gather.us(loads.reduced_bytes) + e.node_all_gather.us(node)) + across),
            float(e.all_reduce.us(loads.gradient_bytes)), loads.copy_us)

    def total(self, shared: CommonTimes, forward: Values, backward: Values, index: Values, sent: Values) -> Float64:
        """Steps, µs, from the slowest rank of each phase: look-ups in µs, exchanges in bytes; any shape."""
        dense, e = self.problem.dense, self.exchanges
        indices = e.all_to_all.us(index)
        indices = indices + np.where(indices > 0, self._lengths, 0.0)
        vectors = e.all_to_all.us(sent)
        found: Float64 = (
            np.maximum(indices + dense.inputs - self.hidden_us, 0.0) + forward
            + np.maximum(vectors + shared.vectors, dense.bottom_forward) + self._dense
            + np.maximum(self.returned * vectors + shared.gradients, dense.bottom_backward) + backward
            + np.maximum(self._dense_reduced - backward, 0.0) + shared.reduced + shared.copied)
        return found

    def step_us(self, loads: RankLoads) -> float:
        """One step, µs."""
        forward, backward = self.rank_us(loads.sums, loads.chains)
        return float(self.total(self.shared(loads), forward.max(), backward.max(), loads.sums[INDEX].max(),
                                loads.sums[SENT].max()))

    def rank_us(self, sums: Float64, chains: Float64) -> tuple[Float64, Float64]:
        """Look-ups, forward and backward, µs, from sums [``SUMS``, …] and chains [``CHAINS``, …] of ranks."""
        spec, shape = self.problem.device, sums.shape[1:]
        if shape != chains.shape[1:]:
            shape = np.broadcast_shapes(shape, chains.shape[1:])
            sums, chains = (np.broadcast_to(each, (len(each), *shape)) for each in (sums, chains))
        if self.problem.additive:
            return self._forward * sums[0], self._backward * sums[2]
        s, c = sums.reshape(len(sums), -1), chains.reshape(len(chains), -1)
        forward = self._forward * batched_forward_us(s[0], s[1], c[0], spec)
        backward = self._backward * batched_backward_us(s[2], s[3], c[1], s[4], s[5], spec)
        return forward.reshape(shape), backward.reshape(shape)
