"""The simulator's defining equations, solved as slowly and plainly as possible, and random programs to solve.

Independent of the compiled engine: nothing is ordered by time or kept in heaps. Every equation is tried again and
again until no time is unknown any more; what stays unknown lies on a cycle.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import numpy as np
from hypothesis import strategies as st

from graph_predictor.simulation.program import NEVER, ItemKind, LaunchReference, Program


@dataclass
class ReferenceTimes:
    item_start: list[int | None]
    item_end: list[int | None]
    kernel_start: list[int | None]
    kernel_end: list[int | None]

    @property
    def unknown(self) -> int:
        return sum(end is None for end in [*self.item_end, *self.kernel_end])


def solve(p: Program) -> ReferenceTimes:
    """Times of every item and kernel; ``None`` on a cycle."""
    items, kernels = len(p.item_kind), len(p.kernel_item)
    out = ReferenceTimes([None] * items, [None] * items, [None] * kernels, [None] * kernels)
    submitted: list[int | None] = [None] * items
    thread_of = p.item_thread().tolist()
    first_of = {int(t): n for n, t in reversed(list(enumerate(thread_of)))}
    members: dict[int, list[int]] = {}
    for k, g in enumerate(p.kernel_group.tolist()):
        members.setdefault(g, []).append(k)
    before = -1
    while out.unknown != before:
        before = out.unknown
        for n in range(items):
            thread = thread_of[n]
            begin = int(p.thread_start[thread]) if first_of[thread] == n else out.item_end[n - 1]
            _item(p, out, submitted, n, begin)
        for k in range(kernels):
            if out.kernel_start[k] is None:
                out.kernel_start[k] = _kernel_start(p, out, submitted, k)
        for k, g in enumerate(p.kernel_group.tolist()):
            arrivals = [out.kernel_start[m] for m in (members[g] if g >= 0 else [k])]
            if None not in arrivals:
                out.kernel_end[k] = max(arrivals) + int(p.kernel_duration[k])  # type: ignore[type-var, operator]
    return out


def _item(p: Program, out: ReferenceTimes, submitted: list[int | None], n: int, begin: int | None) -> None:
    if begin is None or out.item_end[n] is not None:
        return
    after = range(int(p.after_ptr[n]), int(p.after_ptr[n + 1]))
    if any(out.item_end[p.after_item[j]] is None for j in after):
        return
    start = max([begin + int(p.item_work[n]), *(out.item_end[p.after_item[j]] + int(p.after_lag[j]) for j in after)])
    out.item_start[n] = start
    cost, queued, channel = int(p.item_cost[n]), int(p.item_queue[n]), int(p.item_channel[n])
    depth = int(p.queue_depth[channel]) if channel >= 0 else 0
    end, enters = start + cost, start
    if queued >= depth > 0:
        # What leaves room for it: the first of the entries before it, so that depth - 1 are left.
        low = int(p.queue_ptr[channel])
        ends = [out.kernel_end[k] for k in p.queue_kernel[low:low + queued - depth + 1]]
        if None in ends:
            return
        freed = max(ends)
        end, enters = max(end, freed + int(p.item_return[n])), max(start, freed)
    submitted[n] = enters
    waits = range(int(p.wait_ptr[n]), int(p.wait_ptr[n + 1]))
    if any(out.kernel_end[p.wait_kernel[j]] is None for j in waits):
        return
    out.item_end[n] = max([end, int(p.item_external[n]),
                           *(out.kernel_end[p.wait_kernel[j]] + int(p.wait_lag[j]) for j in waits)])


def _kernel_start(p: Program, out: ReferenceTimes, submitted: list[int | None], k: int) -> int | None:
    terms = [int(p.kernel_external[k])]
    n = int(p.kernel_item[k])
    if n >= 0:
        if p.kernel_reference[k] == LaunchReference.CALL_START:
            if submitted[n] is None:
                return None
            terms.append(submitted[n] + int(p.kernel_latency[k]))
        else:
            if out.item_end[n] is None:
                return None
            feeds = int(p.kernel_duration[k]) if p.kernel_reference[k] == LaunchReference.STAGED else 0
            terms.append(max(out.item_end[n] + int(p.kernel_latency[k]) - feeds, out.item_start[n]))
    previous = int(p.kernel_previous[k])
    if previous >= 0:
        if out.kernel_end[previous] is None:
            return None
        terms.append(max(out.kernel_end[previous] + int(p.kernel_gap[k]), out.kernel_start[previous]))
    for j in range(int(p.edge_ptr[k]), int(p.edge_ptr[k + 1])):
        source = p.edge_kernel[j]
        if out.kernel_end[source] is None:
            return None
        if p.edge_fraction[j] == 1.0:
            ready = out.kernel_end[source]
        else:
            begun = out.kernel_start[source]
            ready = begun + int(p.edge_fraction[j] * (out.kernel_end[source] - begun))
        terms.append(ready + int(p.edge_lag[j]))
    return max(terms)


@dataclass
class _Item:
    thread: int
    work: int
    cost: int
    queue: int
    external: int = int(NEVER)
    returns: int = 0
    after: list[tuple[int, int]] = field(default_factory=list)
    waits: list[tuple[int, int]] = field(default_factory=list)


@dataclass
class _Kernel:
    rank: int
    stream: int
    item: int
    anchor: LaunchReference
    latency: int
    previous: int
    gap: int
    duration: int
    external: int
    group: int = -1
    edges: list[tuple[int, float, int]] = field(default_factory=list)


@dataclass
class Draft:
    """A program under construction; whatever is added depends on what was added before only, so it is acyclic."""

    thread_rank: list[int]
    thread_start: list[int]
    depths: list[int]
    items: list[_Item] = field(default_factory=list)
    kernels: list[_Kernel] = field(default_factory=list)
    queues: list[list[int]] = field(default_factory=list)
    groups: int = 0

    def program(self) -> Program:
        """Lay the lists out as a ``Program``."""
        item_order = sorted(range(len(self.items)), key=lambda i: self.items[i].thread)
        kernel_order = sorted(range(len(self.kernels)), key=lambda k: self.kernels[k].rank)
        item_at = {old: new for new, old in enumerate(item_order)}
        kernel_at = {old: new for new, old in enumerate(kernel_order)}
        items, kernels = [self.items[i] for i in item_order], [self.kernels[k] for k in kernel_order]
        ranks = range(len(self.depths))

        def column(values: list[int], dtype: type = np.int64) -> np.ndarray:
            return np.array(values, dtype)

        def pointer(counts: list[int]) -> np.ndarray:
            return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)

        nothing = column([])
        groups = [k.group for k in kernels]
        return Program(
            thread_ptr=pointer([sum(i.thread == t for i in items) for t in range(len(self.thread_rank))]),
            thread_rank=column(self.thread_rank, np.int32), thread_start=column(self.thread_start),
            item_kind=column([ItemKind.CALL] * len(items), np.int8), item_row=column([-1] * len(items), np.int32),
            item_work=column([i.work for i in items]), item_cost=column([i.cost for i in items]),
            item_external=column([i.external for i in items]), item_queue=column([i.queue for i in items]),
            item_channel=column([self.thread_rank[i.thread] if i.queue >= 0 else -1 for i in items]),
            item_return=column([i.returns for i in items]),
            after_ptr=pointer([len(i.after) for i in items]),
            after_item=column([item_at[a] for i in items for a, _ in i.after]),
            after_lag=column([lag for i in items for _, lag in i.after]),
            wait_ptr=pointer([len(i.waits) for i in items]),
            wait_kernel=column([kernel_at[k] for i in items for k, _ in i.waits]),
            wait_lag=column([lag for i in items for _, lag in i.waits]),
            kernel_ptr=pointer([sum(k.rank == r for k in kernels) for r in ranks]),
            kernel_item=column([item_at[k.item] if k.item >= 0 else -1 for k in kernels]),
            kernel_reference=column([k.anchor for k in kernels], np.int8),
            kernel_latency=column([k.latency for k in kernels]),
            kernel_previous=column([kernel_at[k.previous] if k.previous >= 0 else -1 for k in kernels]),
            kernel_gap=column([k.gap for k in kernels]), kernel_duration=column([k.duration for k in kernels]),
            kernel_external=column([k.external for k in kernels]),
            edge_ptr=pointer([len(k.edges) for k in kernels]),
            edge_kernel=column([kernel_at[s] for k in kernels for s, _, _ in k.edges]),
            edge_fraction=np.array([f for k in kernels for _, f, _ in k.edges], np.float64),
            edge_lag=column([lag for k in kernels for _, _, lag in k.edges]),
            kernel_group=column(groups), group_size=column([groups.count(g) for g in range(self.groups)]),
            queue_ptr=pointer([len(q) for q in self.queues]),
            queue_kernel=column([kernel_at[k] for q in self.queues for k in q]), queue_depth=column(self.depths),
            recorded_item_start=column([0] * len(items)), recorded_item_end=column([0] * len(items)),
            recorded_kernel_start=column([0] * len(kernels)), recorded_kernel_end=column([0] * len(kernels)),
        ) if items or kernels else Program(**{
            f.name: {"edge_fraction": nothing.astype(np.float64)}.get(f.name, nothing) for f in fields(Program)})


SMALL = st.integers(0, 30)


@st.composite
def programs(draw: st.DrawFn, *, negative_gaps: bool = True, staged: bool = True) -> Program:
    """Random acyclic programs: threads, streams, waits, edges, queues, graphs' repeated entries, rendezvous."""
    ranks = draw(st.integers(1, 2))
    threads = [r for r in range(ranks) for _ in range(draw(st.integers(1, 3)))]
    depths = [draw(st.sampled_from([0, 1, 2, 3, 5])) for _ in range(ranks)]
    draft = Draft(threads, [draw(SMALL) for _ in threads], depths)
    draft.queues = [[] for _ in range(ranks)]
    gaps = st.integers(-3 if negative_gaps else 0, 4)
    anchors = [LaunchReference.CALL_END, *([LaunchReference.STAGED] if staged else [])]
    for _ in range(draw(st.integers(0, 25))):
        rank = draw(st.integers(0, ranks - 1))
        kind = draw(st.sampled_from(["item", "item", "launch", "launch", "graph", "copy", "orphan", "rendezvous"]))
        if kind == "rendezvous" and ranks == 2:
            for member in range(ranks):
                item = _draw_item(draw, draft, member, launches=True)
                _draw_kernel(draw, draft, member, item, LaunchReference.CALL_END, gaps, group=draft.groups)
            draft.groups += 1
        elif kind == "orphan":
            _draw_kernel(draw, draft, rank, -1, LaunchReference.CALL_END, gaps)
        else:
            item = _draw_item(draw, draft, rank, launches=kind != "item")
            if kind == "copy":
                kernel = _draw_kernel(draw, draft, rank, item, LaunchReference.CALL_START, gaps)
                draft.items[item].waits.append((kernel, draw(st.integers(-2, 5))))
            elif kind == "launch":
                _draw_kernel(draw, draft, rank, item, draw(st.sampled_from(anchors)), gaps)
            elif kind == "graph":
                for _ in range(draw(st.integers(1, 3))):
                    kernel = _draw_kernel(draw, draft, rank, item, LaunchReference.CALL_END, gaps, enters=False)
                draft.queues[rank] += [kernel] * draw(st.integers(1, 3))
    return draft.program()


def _draw_item(draw: st.DrawFn, draft: Draft, rank: int, launches: bool) -> int:
    thread = draw(st.sampled_from([t for t, r in enumerate(draft.thread_rank) if r == rank]))
    # Depths change what counts as full; a call may also submit work that left no record (a lost launch).
    queue = len(draft.queues[rank]) if launches or draw(st.booleans()) else -1
    item = _Item(thread, draw(SMALL), draw(SMALL), queue, returns=draw(st.integers(0, 5)))
    if draw(st.integers(0, 5)) == 0:
        item.external = draw(st.integers(0, 300))
    if draft.items and draw(st.integers(0, 2)) == 0:
        item.after.append((draw(st.integers(0, len(draft.items) - 1)), draw(st.integers(0, 10))))
    mine = [k for k, kernel in enumerate(draft.kernels) if kernel.rank == rank]
    if mine and not launches and draw(st.booleans()):
        item.waits = [(k, draw(st.integers(-2, 5))) for k in draw(st.lists(st.sampled_from(mine), max_size=2))]
    draft.items.append(item)
    return len(draft.items) - 1


def _draw_kernel(draw: st.DrawFn, draft: Draft, rank: int, item: int, anchor: LaunchReference,
                 gaps: st.SearchStrategy[int], group: int = -1, enters: bool = True) -> int:
    stream = draw(st.integers(0, 2))
    before = [k for k, kernel in enumerate(draft.kernels) if (kernel.rank, kernel.stream) == (rank, stream)]
    external = draw(st.integers(0, 200)) if item < 0 or draw(st.integers(0, 9)) == 0 else int(NEVER)
    kernel = _Kernel(rank, stream, item, anchor, draw(st.integers(-5, 15)), before[-1] if before else -1, draw(gaps),
                     draw(st.integers(0, 120)), external, group)
    others = [k for k, other in enumerate(draft.kernels) if (other.rank == rank) and other.stream != stream]
    if others and draw(st.integers(0, 2)) == 0:
        source = draw(st.sampled_from(others))
        # A staged copy that grows begins earlier, so a share of it is no monotone time; no builder makes such an edge.
        whole = draft.kernels[source].anchor == LaunchReference.STAGED or draw(st.booleans())
        fraction = 1.0 if whole else draw(st.floats(0, 1, exclude_max=True))
        kernel.edges.append((source, fraction, draw(st.integers(-1, 5)) if whole else 0))
    draft.kernels.append(kernel)
    if enters:
        draft.queues[rank].append(len(draft.kernels) - 1)
    return len(draft.kernels) - 1
