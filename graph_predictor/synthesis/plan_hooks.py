"""The cost of a parallel plan to a CPU's host beside what was recorded without it: hooks, and sharded tensors'
dispatch.

::

    recorded        |view|        |addmm|                  one process alone
    under FSDP      hooks |all_gather| hooks |view|hooks|addmm|        what a host model knows of programs with hooks

A recording without the plan has none of it. The shipped host model has programs that ran under DDP and FSDP
(``traces/host-parallel``); what it says of the traced step beyond what it says of the recorded one is added, event by
event, at this host's own speed.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from graph_predictor.prediction.host_steps import named_host_step, traced_host_step
from graph_predictor.synthesis.operation_match import OperationMatch
from graph_predictor.synthesis.operation_times import OperationTimes
from graph_predictor.synthesis.recorded_operations import RecordedOperations
from kernel_models.host.model import PLANS_HOST, shipped_host
from tracer.graph import ExecutionGraph


def with_hooks(graph: ExecutionGraph, times: OperationTimes, recorded: RecordedOperations,
               pairs: OperationMatch) -> OperationTimes:
    """Return a traced rank's times with what its plan costs the host.

    Args:
        graph: traced by shapes under a plan.
        times: of its operations, by the recording.
        recorded: operations of one process without a plan.
        pairs: which of them stand for traced ones.
    """
    row = pairs.row
    mine, theirs = np.flatnonzero(row >= 0), row[row >= 0]
    computed = np.zeros(len(graph.ops))
    computed[mine] = recorded.compute[theirs]
    model = shipped_host(PLANS_HOST)
    before, inside = model.estimate(traced_host_step(graph, computed))
    was_before, was_inside = model.estimate(named_host_step(recorded.graph, recorded.op, recorded.compute))
    own = np.maximum(recorded.inside - recorded.compute, 0.0)
    speed = float(own[theirs].sum()) / max(float(was_inside[theirs].sum()), 1.0) if len(mine) else 1.0
    more_before, more_inside = speed * before, np.zeros(len(graph.ops))
    more_before[mine] = speed * np.maximum(before[mine] - was_before[theirs], 0.0)
    more_inside[mine] = speed * np.maximum(inside[mine] - was_inside[theirs], 0.0)
    tail = speed * max(float(before[-1] - was_before[-1]), 0.0)
    return replace(times, before=times.before + more_before[:-1], inside=times.inside + more_inside,
                   tail=times.tail + tail)
