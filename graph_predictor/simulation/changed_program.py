"""A program made of another one: without dependencies that close cycles, without some work, or with residuals."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np

from graph_predictor.simulation.acyclic_loop import take_away
from graph_predictor.simulation.program import NEVER, LaunchReference, Program, entries_waited_for, owners, pointers
from tracer.arrays import Bool, Int64
from tracer.graph import NONE
from tracer.lazy import csgraph, sparse

FACT, CONTENTION, WAIT_ACROSS, QUEUE, BLOCKING, RENDEZVOUS, HAND_OVER = range(7)
"""Kinds of dependency. If several inferred kinds close a cycle and no time decides, the first kind is dropped."""
NAMES = {CONTENTION: "contention", WAIT_ACROSS: "waits across streams", QUEUE: "launch queue",
         BLOCKING: "blocking calls", RENDEZVOUS: "rendezvous", HAND_OVER: "hand-overs between threads"}


class _Dependencies:
    """Edges between nodes as columns. ``row`` is the program's edge, wait, item or group behind each; ``backward`` is
    true if the recording has its target first."""

    def __init__(self) -> None:
        self._added: list[list[np.ndarray]] = [[], [], [], [], []]

    def add(self, source: Int64, target: Int64, kind: int = FACT, row: Int64 | None = None,
            backward: Bool | None = None) -> None:
        """Add edges of one kind."""
        count = len(source)
        columns: list[np.ndarray] = [
            source, target, np.broadcast_to(np.int8(kind), count),
            np.broadcast_to(np.int64(NONE), count) if row is None else row,
            np.broadcast_to(np.False_, count) if backward is None else backward]
        for column, values in zip(self._added, columns, strict=True):
            column.append(values)

    def done(self) -> _Dependencies:
        """Join the added parts into columns, one column after the other to save memory; return the table."""
        self.source, self.target, self.kind, self.row, self.backward = map(_joined, self._added)
        return self


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    whole = np.concatenate(parts)
    parts.clear()
    return whole


def without_cycles(program: Program) -> tuple[Program, dict[str, int]]:
    """Return the program without the inferred dependencies that close cycles, and their number by kind.

    Dependencies that a recording does not state are inferred one by one. Examples are the kernel or queue slot that a
    call waited for, and the kernels of one collective. Each is possible by itself. Together they can form a cycle, for
    example if clocks disagree. Program order, launches and the order of streams are facts, and stay.

    A call whose wait is left out keeps its recorded duration.
    """
    left_out: dict[str, int] = {}
    found = _dependencies(program)
    while len(inside := _on_cycles(found)):
        guessed = inside[found.kind[inside] != FACT]
        if not len(guessed):
            break
        chosen = guessed[found.backward[guessed]]
        if not len(chosen):
            chosen = guessed[found.kind[guessed] == found.kind[guessed].min()]
        program = _without(program, found, chosen, left_out)
        found = _dependencies(program)
    return program, left_out


def _dependencies(p: Program) -> _Dependencies:
    """Return all dependencies of a program. Nodes: items' starts, items' ends, kernels, queue entries, rendezvous."""
    items, kernels, entries = len(p.item_kind), len(p.kernel_item), len(p.queue_kernel)
    item, kernel = np.arange(items), np.arange(kernels)
    kernel_node = np.where(p.kernel_group >= 0, 2 * items + kernels + entries + p.kernel_group, 2 * items + kernel)
    found = _Dependencies()
    add = found.add
    add(item, items + item)
    follows = np.ones(items, np.bool_)
    follows[p.thread_ptr[:-1][np.diff(p.thread_ptr) > 0]] = False
    later = item[follows]
    add(items + later - 1, later)
    owner = owners(p.after_ptr)
    add(items + p.after_item, owner, HAND_OVER, np.arange(len(owner)),
        p.recorded_item_end[p.after_item] > p.recorded_item_start[owner])
    owner = owners(p.wait_ptr)
    add(kernel_node[p.wait_kernel], items + owner, BLOCKING, np.arange(len(owner)),
        p.recorded_kernel_end[p.wait_kernel] > p.recorded_item_end[owner])
    in_call = p.kernel_reference == LaunchReference.CALL_START
    launched = p.kernel_item >= 0
    add(np.where(in_call, p.kernel_item, items + p.kernel_item)[launched], kernel_node[launched])
    behind = kernel[p.kernel_previous >= 0]
    add(kernel_node[p.kernel_previous[behind]], kernel_node[behind])
    owner = owners(p.edge_ptr)
    whole = p.edge_fraction == 1.0
    since = np.where(whole, p.recorded_kernel_end[p.edge_kernel], p.recorded_kernel_start[p.edge_kernel])
    for kind, mine in ((WAIT_ACROSS, whole), (CONTENTION, ~whole)):
        add(kernel_node[p.edge_kernel[mine]], kernel_node[owner[mine]], kind, np.flatnonzero(mine),
            (since > p.recorded_kernel_start[owner])[mine])
    _add_queue(p, found, kernel_node, 2 * items + kernels)
    found.done()
    # A rendezvous is one node. All edges into it are inferred, because the rendezvous itself is.
    first = 2 * items + kernels + entries
    meets = (found.target >= first) & (found.kind == FACT)
    found.kind[meets], found.row[meets] = RENDEZVOUS, found.target[meets] - first
    return found


def _add_queue(p: Program, found: _Dependencies, kernel_node: Int64, first: int) -> None:
    """Add the queue: each entry leaves after the one before it, and a call waits for the entry whose slot it takes."""
    items = len(p.item_kind)
    entry = np.arange(len(p.queue_kernel))
    found.add(kernel_node[p.queue_kernel], first + entry)
    opens = np.zeros(len(entry), np.bool_)
    opens[p.queue_ptr[:-1][np.diff(p.queue_ptr) > 0]] = True
    found.add(first + entry[~opens] - 1, first + entry[~opens])
    waited_for = entries_waited_for(p)
    waits = np.flatnonzero(waited_for >= 0)
    slot = waited_for[waits]
    backward = p.recorded_kernel_end[p.queue_kernel[slot]] > p.recorded_item_end[waits]
    found.add(first + slot, items + waits, QUEUE, waits, backward)
    # A copy in its call is submitted once there is a slot.
    kernel = np.flatnonzero((p.kernel_reference == LaunchReference.CALL_START) & (p.kernel_item >= 0))
    place = np.full(items, -1)
    place[waits] = np.arange(len(waits))
    at = place[p.kernel_item[kernel]]
    kernel, at = kernel[at >= 0], at[at >= 0]
    found.add(first + slot[at], kernel_node[kernel], QUEUE, waits[at], backward[at])


def _on_cycles(found: _Dependencies) -> Int64:
    """Return the rows of the dependencies that lie on a cycle."""
    if not len(found.source):
        return np.zeros(0, np.int64)
    nodes = int(max(found.source.max(), found.target.max())) + 1
    if not _has_cycle(found.source, found.target, nodes):
        return np.zeros(0, np.int64)

    links = sparse.csr_matrix((np.ones(len(found.source), np.int8), (found.source, found.target)), shape=(nodes, nodes))
    parts, part = csgraph.connected_components(links, directed=True, connection="strong")
    if parts == nodes and not (found.source == found.target).any():
        return np.zeros(0, np.int64)
    return np.flatnonzero(part[found.source] == part[found.target])


def _without(p: Program, found: _Dependencies, rows: Int64, left_out: dict[str, int]) -> Program:
    """Return the program without some inferred dependencies."""
    changes: dict[str, np.ndarray] = {}
    gone = {kind: np.unique(found.row[rows[found.kind[rows] == kind]]) for kind in NAMES}
    for kind, name in NAMES.items():
        if len(gone[kind]):
            left_out[name] = left_out.get(name, 0) + len(gone[kind])
    cost = p.item_cost.copy()
    edges = np.concatenate([gone[CONTENTION], gone[WAIT_ACROSS]])
    for prefix, dropped, columns in (("edge", edges, ("edge_kernel", "edge_fraction", "edge_lag")),
                                     ("wait", gone[BLOCKING], ("wait_kernel", "wait_lag")),
                                     ("after", gone[HAND_OVER], ("after_item", "after_lag"))):
        if len(dropped):
            pointer = getattr(p, f"{prefix}_ptr")
            owner = owners(pointer)
            kept = ~np.isin(np.arange(len(owner)), dropped)
            counts = np.bincount(owner[kept], minlength=len(pointer) - 1)
            changes[f"{prefix}_ptr"] = pointers(counts)
            changes.update({name: getattr(p, name)[kept] for name in columns})
            if prefix == "wait":
                alone = np.setdiff1d(owner[dropped], owner[kept])
                cost[alone] = (p.recorded_item_end - p.recorded_item_start)[alone]
    if len(gone[QUEUE]):
        changes["item_channel"] = p.item_channel.copy()
        changes["item_channel"][gone[QUEUE]] = -1
        cost[gone[QUEUE]] = np.maximum(cost, p.recorded_item_end - p.recorded_item_start)[gone[QUEUE]]
    if len(gone[RENDEZVOUS]):
        apart = np.isin(p.kernel_group, gone[RENDEZVOUS])
        stays = np.setdiff1d(np.arange(len(p.group_size)), gone[RENDEZVOUS])
        number = np.full(len(p.group_size), -1)
        number[stays] = np.arange(len(stays))
        group = np.where(p.kernel_group >= 0, number[p.kernel_group], -1)
        changes |= {"kernel_group": group, "group_size": p.group_size[stays],
                    "kernel_duration": np.where(apart, p.recorded_kernel_end - p.recorded_kernel_start,
                                                p.kernel_duration)}
    return replace(p, item_cost=cost, **changes)


def _has_cycle(source: Int64, target: Int64, nodes: int) -> bool:
    """Return whether the edges from ``source`` to ``target`` close a cycle; an edge from a node to itself does too."""
    edges = len(source)
    return take_away(np.ascontiguousarray(source, np.int64), np.ascontiguousarray(target, np.int64),
                      np.zeros(nodes, np.int64), np.zeros(nodes + 1, np.int64),
                      np.empty(edges, np.int64), np.empty(nodes, np.int64)) < nodes


def without(program: Program, kernels: Bool, items: Bool) -> Program:
    """Return a program without some kernels and calls. The caller sets their durations and costs to 0.

    Rows keep their numbers, so that every other column of the program keeps its meaning. A removed kernel delays
    nothing: it has no latency, gap, lag or rendezvous, and no entry of the launch queue. A removed call waits for
    nothing.

    Args:
        program: the program. The result shares arrays of unchanged dependencies (``same_order`` compares them).
        kernels: mask of the kernels to remove.
        items: mask of the calls to remove.
    """
    p = program
    return replace(
        p, kernel_latency=np.where(kernels, 0, p.kernel_latency), kernel_gap=np.where(kernels, 0, p.kernel_gap),
        edge_lag=np.where(np.repeat(kernels, np.diff(p.edge_ptr)), 0, p.edge_lag),
        **_waits(p, items), **_groups(p, kernels), **_queue(p, kernels, items))


def same_order(program: Program, other: Program) -> bool:
    """Return whether ``program``, made from ``other``, shares its dependencies' arrays, so that only times differ."""
    return all(getattr(program, name) is getattr(other, name)
               for name in ("wait_kernel", "kernel_group", "queue_kernel"))


def _waits(p: Program, gone: Bool) -> dict[str, np.ndarray]:
    """Return the waits of the calls that stay."""
    count = np.diff(p.wait_ptr)
    if not count[gone].any():
        return {}
    kept = np.repeat(~gone, count)
    return {"wait_ptr": pointers(np.where(gone, 0, count)), "wait_kernel": p.wait_kernel[kept],
            "wait_lag": p.wait_lag[kept]}


def _groups(p: Program, gone: Bool) -> dict[str, np.ndarray]:
    """Return the rendezvous of the kernels that stay."""
    leaves = gone & (p.kernel_group >= 0)
    if not leaves.any():
        return {}
    fewer = np.bincount(p.kernel_group[leaves], minlength=len(p.group_size))
    return {"kernel_group": np.where(leaves, NONE, p.kernel_group), "group_size": p.group_size - fewer}


def _queue(p: Program, gone: Bool, items: Bool) -> dict[str, np.ndarray]:
    """Return the launch queues without entries of removed kernels and without removed calls; unchanged where no launch
    waits for room."""
    kept = ~gone[p.queue_kernel]
    if kept.all() or not (entries_waited_for(p) >= 0).any():
        return {}
    before = pointers(kept)
    first = p.queue_ptr[np.maximum(p.item_channel, 0)]
    there = (p.item_channel >= 0) & (p.item_queue >= 0)
    entry = np.where(there, first + p.item_queue, 0)
    return {"queue_kernel": p.queue_kernel[kept], "queue_ptr": before[p.queue_ptr],
            "item_queue": np.where(there, before[entry] - before[np.where(there, first, 0)], p.item_queue),
            "item_channel": np.where(items, NONE, p.item_channel)}


def with_residuals(program: Program) -> Program:
    """Return the program with each kernel's and each call's difference from its recorded time (residual) added, ns.

    A replay with residuals is a playback: it checks the bookkeeping, not the model. It is the starting point for edits
    that should keep every recorded irregularity in place.

    A residual is the recorded time less the time that the program gives for *recorded* inputs. The program takes each
    time as a maximum of terms. The residual is added to each term, so that the program gives the recorded times.
    """
    p, changed = program, {}
    kernels = len(p.kernel_item)
    item_start, item_end = p.recorded_item_start, p.recorded_item_end
    start, end = p.recorded_kernel_start, p.recorded_kernel_end
    if kernels:
        said, clamped_latency, clamped_gap = _kernel_start(p, item_start, item_end, start, end)
        residual = np.where(said > NEVER, start - said, 0)
        changed = {"kernel_latency": p.kernel_latency + residual + clamped_latency,
                   "kernel_gap": p.kernel_gap + residual + clamped_gap,
                   "edge_lag": p.edge_lag + np.repeat(residual, np.diff(p.edge_ptr)),
                   "kernel_external": np.where(p.kernel_external > NEVER, start, NEVER)}
        grouped = p.kernel_group >= 0
        last = np.full(len(p.group_size), NEVER, np.int64)
        np.maximum.at(last, p.kernel_group[grouped], start[grouped])
        if grouped.any():
            changed["kernel_duration"] = np.where(grouped, end - last[p.kernel_group], p.kernel_duration)

    said_end = item_start + p.item_cost
    owner = owners(p.wait_ptr)
    if len(owner):
        np.maximum.at(said_end, owner, end[p.wait_kernel] + p.wait_lag)
    slot = _freed_slots(p, end)
    said_end = np.maximum(said_end, np.where(slot > NEVER, slot + p.item_return, NEVER))
    said_end = np.maximum(said_end, p.item_external)
    residual_end = item_end - said_end
    # A call's own cost cannot fall below zero; the other terms have the whole negative residual.
    return replace(p, **changed, item_cost=np.maximum(p.item_cost + residual_end, 0),
                   wait_lag=p.wait_lag + residual_end[owner], item_return=p.item_return + residual_end,
                   item_external=p.item_external + np.where(p.item_external > NEVER, residual_end, 0))


def _kernel_start(p: Program, item_start: Int64, item_end: Int64, start: Int64, end: Int64) -> tuple[
        Int64, Int64, Int64]:
    """Return the earliest start of each kernel by the program, given recorded times of everything it depends on (ns).

    Also returns by how much the launch and stream terms were raised: no kernel starts before its call, or before its
    stream's previous kernel.
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
    owner = owners(p.edge_ptr)
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
    entry = entries_waited_for(p)
    left = [np.maximum.accumulate(end[p.queue_kernel[low:high]]) for low, high in pairwise(p.queue_ptr.tolist())]
    return np.where(entry >= 0, np.concatenate([*left, np.zeros(1, np.int64)])[entry], NEVER)
