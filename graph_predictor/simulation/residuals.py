"""Per-event residuals: what the constants leave over, put back so that a replay is exact.

A replay with residuals is a playback: it shows that bookkeeping is right, and nothing about the model. It is the
starting point for edits that should keep every recorded irregularity in place.
"""

from __future__ import annotations

import numpy as np

from graph_predictor.simulation.launch_queue import slot_freed
from graph_predictor.simulation.program import NEVER, LaunchReference, Program
from tracer.arrays import Int64


def with_residuals(program: Program) -> Program:
    """The same program with each kernel's and each call's residual against its recorded time added (ns).

    A residual is the recorded time less what the program says from *recorded* inputs; it is added to every term the
    time is a maximum of, so the recorded times solve the program again.
    """
    p = program.copy()
    kernels = len(p.kernel_item)
    item_start, item_end = p.recorded_item_start, p.recorded_item_end
    start, end = p.recorded_kernel_start, p.recorded_kernel_end
    if kernels:
        said, clamped_latency, clamped_gap = _kernel_start(p, item_start, item_end, start, end)
        residual = np.where(said > NEVER, start - said, 0)
        p.kernel_latency += residual + clamped_latency
        p.kernel_gap += residual + clamped_gap
        p.edge_lag += np.repeat(residual, np.diff(p.edge_ptr))
        p.kernel_external = np.where(p.kernel_external > NEVER, start, NEVER)
        grouped = p.kernel_group >= 0
        last = np.full(len(p.group_size), NEVER, np.int64)
        np.maximum.at(last, p.kernel_group[grouped], start[grouped])
        p.kernel_duration = np.where(grouped, end - last[p.kernel_group], p.kernel_duration) if grouped.any() else (
            p.kernel_duration)

    said_end = item_start + p.item_cost
    owner = np.repeat(np.arange(len(p.item_kind)), np.diff(p.wait_ptr))
    if len(owner):
        np.maximum.at(said_end, owner, end[p.wait_kernel] + p.wait_lag)
    slot = _freed_slots(p, end)
    said_end = np.maximum(said_end, np.where(slot > NEVER, slot + p.item_return, NEVER))
    said_end = np.maximum(said_end, p.item_external)
    residual_end = item_end - said_end
    # A call's own cost cannot fall below zero; what is left of a negative residual sits in the other terms.
    p.item_cost = np.maximum(p.item_cost + residual_end, 0)
    p.wait_lag += residual_end[owner] if len(owner) else 0
    p.item_return += residual_end
    p.item_external += np.where(p.item_external > NEVER, residual_end, 0)
    return p


def _kernel_start(p: Program, item_start: Int64, item_end: Int64, start: Int64, end: Int64) -> tuple[
        Int64, Int64, Int64]:
    """Return when the program lets each kernel start, given recorded times of everything it depends on (ns).

    Also returns how far launch and stream terms lie below what they were clamped to: no kernel starts before its
    call or before its stream's previous kernel does.
    """
    launched = p.kernel_item >= 0
    said = p.kernel_external.copy()
    free = item_end[p.kernel_item] + p.kernel_latency - np.where(
        p.kernel_reference == LaunchReference.STAGED, p.kernel_duration, 0) if len(item_end) else said
    by_launch = np.maximum(free, item_start[p.kernel_item]) if len(item_end) else said
    in_call = p.kernel_reference == LaunchReference.CALL_START
    if in_call.any():
        by_launch = np.where(in_call, _submitted(p, item_start, end)[p.kernel_item] + p.kernel_latency, by_launch)
    clamped_latency = np.where(launched & ~in_call, by_launch - free, 0)
    said = np.maximum(said, np.where(launched, by_launch, NEVER))
    follows = p.kernel_previous >= 0
    queued = end[p.kernel_previous] + p.kernel_gap
    by_stream = np.maximum(queued, start[p.kernel_previous])
    clamped_gap = np.where(follows, by_stream - queued, 0)
    said = np.maximum(said, np.where(follows, by_stream, NEVER))
    owner = np.repeat(np.arange(len(start)), np.diff(p.edge_ptr))
    if len(owner):
        source = p.edge_kernel
        ready = np.where(p.edge_fraction == 1.0, end[source], start[source] + (
            p.edge_fraction * (end[source] - start[source])).astype(np.int64)) + p.edge_lag
        np.maximum.at(said, owner, ready)
    return said, clamped_latency, clamped_gap


def _submitted(p: Program, item_start: Int64, end: Int64) -> Int64:
    """Return when each call's work entered the launch queue: with the call, or once there was a slot (ns)."""
    return np.maximum(item_start, _freed_slots(p, end))


def _freed_slots(p: Program, end: Int64) -> Int64:
    """Return when the launch queue had a slot for each item in the recording (``NEVER``: it was never full before)."""
    freed = np.full(len(p.item_kind), NEVER, np.int64)
    for channel, depth in enumerate(p.queue_depth.tolist()):
        rows = np.flatnonzero((p.item_channel == channel) & (p.item_queue >= depth))
        if depth > 0 and len(rows):
            entries = p.queue_kernel[p.queue_ptr[channel]:p.queue_ptr[channel + 1]]
            freed[rows] = slot_freed(end[entries], p.item_queue[rows], depth)
    return freed
