"""Dependencies that cannot all be true: those on a cycle that the recorded times contradict are left out, and counted.

What a recording does not say is inferred, edge by edge: which kernel another one or a call waited for, which slot of
the launch queue, which collectives are one. Each looks possible by itself; together they can form a cycle, in a trace
whose clocks disagree, say. Program order, launches and the order of streams are facts and stay.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from graph_predictor.simulation.acyclic_loop import has_cycle
from graph_predictor.simulation.program import LaunchReference, Program
from tracer.arrays import Bool, Int64

FACT, CONTENTION, WAIT_ACROSS, QUEUE, BLOCKING, RENDEZVOUS, HAND_OVER = range(7)
"""Kinds of dependency. Of several inferred ones that no time contradicts, the kind named first is given up."""
NAMES = {CONTENTION: "contention", WAIT_ACROSS: "waits across streams", QUEUE: "launch queue",
         BLOCKING: "blocking calls", RENDEZVOUS: "rendezvous", HAND_OVER: "hand-overs between threads"}


class _Dependencies:
    """Edges between nodes as columns. ``row`` says which edge, wait, item or group of the program each is, ``backward``
    whether the recording has its target first."""

    def __init__(self) -> None:
        self.columns: list[tuple[np.ndarray, ...]] = []

    def add(self, source: Int64, target: Int64, kind: int = FACT, row: Int64 | None = None,
            backward: Bool | None = None) -> None:
        """Add edges of one kind."""
        count = len(source)
        self.columns.append((source, target, np.full(count, kind), np.full(count, -1) if row is None else row,
                             np.zeros(count, np.bool_) if backward is None else backward))

    def done(self) -> _Dependencies:
        """All that was added, as columns."""
        self.source, self.target, self.kind, self.row, self.backward = (
            np.concatenate(column) for column in zip(*self.columns, strict=True))
        return self


def without_cycles(program: Program) -> tuple[Program, dict[str, int]]:
    """The program without the inferred dependencies that close cycles, and how many there were of each kind.

    A call whose wait is left out keeps its recorded duration.
    """
    left_out: dict[str, int] = {}
    found = _dependencies(program)
    while len(inside := _on_cycles(program, found)):
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
    """All dependencies of a program. Nodes: items' starts, items' ends, kernels, queue entries, then rendezvous."""
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
    owner = np.repeat(item, np.diff(p.after_ptr))
    add(items + p.after_item, owner, HAND_OVER, np.arange(len(owner)),
        p.recorded_item_end[p.after_item] > p.recorded_item_start[owner])
    owner = np.repeat(item, np.diff(p.wait_ptr))
    add(kernel_node[p.wait_kernel], items + owner, BLOCKING, np.arange(len(owner)),
        p.recorded_kernel_end[p.wait_kernel] > p.recorded_item_end[owner])
    in_call = p.kernel_reference == LaunchReference.CALL_START
    launched = p.kernel_item >= 0
    add(np.where(in_call, p.kernel_item, items + p.kernel_item)[launched], kernel_node[launched])
    behind = kernel[p.kernel_previous >= 0]
    add(kernel_node[p.kernel_previous[behind]], kernel_node[behind])
    owner = np.repeat(kernel, np.diff(p.edge_ptr))
    whole = p.edge_fraction == 1.0
    since = np.where(whole, p.recorded_kernel_end[p.edge_kernel], p.recorded_kernel_start[p.edge_kernel])
    for kind, mine in ((WAIT_ACROSS, whole), (CONTENTION, ~whole)):
        add(kernel_node[p.edge_kernel[mine]], kernel_node[owner[mine]], kind, np.flatnonzero(mine),
            (since > p.recorded_kernel_start[owner])[mine])
    _add_queue(p, found, kernel_node, 2 * items + kernels)
    found.done()
    # A rendezvous is one node. That it is one is a guess, which all that leads there rests on.
    first = 2 * items + kernels + entries
    meets = (found.target >= first) & (found.kind == FACT)
    found.kind[meets], found.row[meets] = RENDEZVOUS, found.target[meets] - first
    return found


def _add_queue(p: Program, found: _Dependencies, kernel_node: Int64, first: int) -> None:
    """Each entry leaves after the one before it; a call waits for the entry whose slot it takes."""
    items = len(p.item_kind)
    entry = np.arange(len(p.queue_kernel))
    found.add(kernel_node[p.queue_kernel], first + entry)
    opens = np.zeros(len(entry), np.bool_)
    opens[p.queue_ptr[:-1][np.diff(p.queue_ptr) > 0]] = True
    found.add(first + entry[~opens] - 1, first + entry[~opens])
    channel = np.maximum(p.item_channel, 0)
    if not len(p.queue_depth):
        return
    depth = p.queue_depth[channel]
    waits = np.flatnonzero((p.item_channel >= 0) & (depth > 0) & (p.item_queue >= depth))
    slot = p.queue_ptr[channel[waits]] + p.item_queue[waits] - depth[waits]
    backward = p.recorded_kernel_end[p.queue_kernel[slot]] > p.recorded_item_end[waits]
    found.add(first + slot, items + waits, QUEUE, waits, backward)
    # A copy in its call is submitted once there is a slot.
    kernel = np.flatnonzero((p.kernel_reference == LaunchReference.CALL_START) & (p.kernel_item >= 0))
    place = np.full(items, -1)
    place[waits] = np.arange(len(waits))
    at = place[p.kernel_item[kernel]]
    kernel, at = kernel[at >= 0], at[at >= 0]
    found.add(first + slot[at], kernel_node[kernel], QUEUE, waits[at], backward[at])


def _on_cycles(p: Program, found: _Dependencies) -> Int64:
    """Rows of the dependencies that lie on a cycle."""
    if not len(found.source):
        return np.zeros(0, np.int64)
    nodes = int(max(found.source.max(), found.target.max())) + 1
    if not has_cycle(found.source, found.target, nodes):
        return np.zeros(0, np.int64)
    from scipy.sparse import csr_matrix
    from scipy.sparse.csgraph import connected_components

    links = csr_matrix((np.ones(len(found.source), np.int8), (found.source, found.target)), shape=(nodes, nodes))
    parts, part = connected_components(links, directed=True, connection="strong")
    if parts == nodes and not (found.source == found.target).any():
        return np.zeros(0, np.int64)
    return np.flatnonzero(part[found.source] == part[found.target])


def _without(p: Program, found: _Dependencies, rows: Int64, left_out: dict[str, int]) -> Program:
    """The program without some inferred dependencies."""
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
            owner = np.repeat(np.arange(len(pointer) - 1), np.diff(pointer))
            kept = ~np.isin(np.arange(len(owner)), dropped)
            counts = np.bincount(owner[kept], minlength=len(pointer) - 1)
            changes[f"{prefix}_ptr"] = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
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
