"""Folding: one graph for all ranks that do the same work, and the graph of any one of them again.

*The same work* means equal operations, calls, kernels and collectives once rank numbers are taken out: process groups
count by their shape around the rank, not by their members. Times are not compared, so a folded recording keeps those
of the first rank of each class; nothing is folded unless it is asked for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from tracer.columns import named
from tracer.decode import DecodeError, from_json
from tracer.errors import JobError
from tracer.graph import NONE, SHAPE_ONLY, ExecutionGraph, Table
from tracer.ranks import RankClass, Span, groups_like, lattice, missing_of, peers_like, spans

if TYPE_CHECKING:
    from tracer.job import Job

POINT_TO_POINT = frozenset({"send", "recv", "send_recv"})

REPLICATED = frozenset({"all_reduce", "broadcast", "barrier"})
"""Kinds of collectives that every replica does with the same sizes; those of shards may differ from rank to rank."""

_COMPARED: dict[str, frozenset[str]] = {
    "ops": frozenset({"start_ns", "duration_ns", "sequence", "forward_thread", "external_id", "record_id", "scalars",
                      "et_node"}),
    "launches": frozenset({"start_ns", "duration_ns", "correlation"}),
    "kernels": frozenset({"start_ns", "duration_ns", "correlation", "device"}),
    "collectives": frozenset({"group", "ranks"}),
    "steps": frozenset({"name", "start_ns", "duration_ns"}),
}
"""Tables whose rows make the work, and the columns that may differ between equal ranks: times, numbers that only link
rows, scalars (offsets of a rank's shard are among them), and what is compared in another form."""


def fold(job: Job) -> Job:
    """The job with one graph for each class of ranks that do the same work; the first rank's, in order of rank.

    Raises:
        JobError: a graph does not know its rank.
    """
    merged: dict[bytes, tuple[ExecutionGraph, list[int]]] = {}
    held = job.classes or [RankClass(((g.meta.rank, g.meta.rank, 1),), i) for i, g in enumerate(job.graphs)]
    for each in held:
        if each.graph == NONE:
            continue
        graph = job.graphs[each.graph]
        if graph.meta.rank == NONE:
            raise JobError(f"{graph.meta.source or 'A graph'} does not know its rank, so that it cannot be folded.")
        merged.setdefault(work_digest(graph), (graph, []))[1].extend(each)
    notes = list(job.notes)
    if len(merged) < len(job.graphs) and any(graph.meta.era != SHAPE_ONLY for graph, _ in merged.values()):
        notes.append("Ranks that do the same work were folded: the times are those of the first rank of each class.")
    graphs = [graph for graph, _ in merged.values()]
    return folded_job(graphs, [spans(ranks) for _, ranks in merged.values()], job.world_size, notes)


def folded_job(graphs: Sequence[ExecutionGraph], classes: Sequence[tuple[Span, ...]], world_size: int,
               notes: Iterable[str] = ()) -> Job:
    """A job of classes, of which each may have a graph: that of any one of its ranks.

    Raises:
        JobError: a graph's rank is in no class, or two graphs are of one class.
    """
    from tracer.job import Job

    ordered = sorted(graphs, key=lambda graph: graph.meta.rank)
    rows: dict[int, int] = {}
    found = [RankClass(ranks) for ranks in sorted(classes, key=lambda ranks: RankClass(ranks).first)]
    for row, graph in enumerate(ordered):
        place = next((place for place, each in enumerate(found) if graph.meta.rank in each), NONE)
        if place == NONE or place in rows:
            why = "is in none of the job's classes" if place == NONE else (
                f"does the same work as rank {ordered[rows[place]].meta.rank}, whose graph is there")
            raise JobError(f"Rank {graph.meta.rank} {why}; give one graph for each class of ranks.")
        rows[place] = row
    held = [replace(each, graph=rows.get(place, NONE)) for place, each in enumerate(found)]
    covered = {rank for each in held if each.graph != NONE for rank in each}
    return Job(list(ordered), world_size, list(notes), missing_of(world_size, covered), held)


def all_alike(graphs: Sequence[ExecutionGraph]) -> bool:
    """Return whether captured ranks of a fake world may be taken to stand for all of it: each collective is one of
    plain data parallelism over the whole world, and the ranks, if several, do the same work."""
    from tracer.job import FAKE

    for graph in graphs:
        table, size = graph.collectives, graph.meta.world_size
        kinds = {graph.string(code) for code in np.unique(table.kind).tolist()}
        ranks = {graph.string(code) for code in np.unique(table.ranks).tolist()}
        if graph.meta.backend != FAKE or graph.meta.era == SHAPE_ONLY or graph.meta.rank == NONE or size < 2 or \
                not kinds or not kinds <= REPLICATED or ranks != {json.dumps(list(range(size)))}:
            return False
    return bool(graphs) and len({(work_digest(graph), graph.meta.world_size) for graph in graphs}) == 1


def renumbered(graph: ExecutionGraph, rank: int) -> ExecutionGraph:
    """The graph as another rank of its class would have it: its rank, and the ranks of its groups and peers.

    Tables are shared but for the collectives' ranks; names of groups stay those of the traced rank.
    """
    own = graph.meta.rank
    if own == rank:
        return graph
    table, strings = graph.collectives, list(graph.strings)
    codes: dict[str, int] = {}
    ranks = table.ranks.copy()
    for (code, kind), rows in _ranks_and_kinds(graph).items():
        found = _ranks_in(graph.strings[code])
        if found is None:
            continue
        text = json.dumps((peers_like if kind else groups_like)(found, own, rank))
        if text != graph.strings[code]:
            if text not in codes:
                codes[text] = len(strings)
                strings.append(text)
            ranks[rows] = codes[text]
    groups = [{**group, "ranks": groups_like(group["ranks"], own, rank)} if _are_ranks(group.get("ranks")) else group
              for group in graph.meta.process_groups]
    return replace(graph, strings=strings, collectives=replace(table, ranks=ranks),
                   meta=replace(graph.meta, rank=rank, process_groups=groups))


def work_digest(graph: ExecutionGraph) -> bytes:
    """A digest of the work of a graph, equal for ranks that do the same."""
    digest = hashlib.sha256()
    for name, left_out in _COMPARED.items():
        table: Table = getattr(graph, name)
        digest.update(f"{name} {len(table)}".encode())
        for column, values in table.columns().items():
            if column in left_out:
                continue
            if column in table.STRING_COLUMNS:
                values = _by_text(graph.strings, values, digest.update)
            elif column == "stream":
                values = _by_appearance(values)
            digest.update(column.encode() + np.ascontiguousarray(values).tobytes())
    digest.update(_by_appearance(graph.collectives.group).tobytes())
    for (code, kind), rows in sorted(_ranks_and_kinds(graph).items(), key=lambda item: int(item[1][0])):
        digest.update(_shape_text(graph.strings[code], graph.meta.rank, kind).encode() + rows.tobytes())
    return digest.digest()


def _ranks_and_kinds(graph: ExecutionGraph) -> dict[tuple[int, bool], np.ndarray]:
    """(code of the ranks, whether it is point to point) → rows of the collectives."""
    table = graph.collectives
    between_two = named(table.kind, graph.strings, POINT_TO_POINT.__contains__)
    found = {}
    for code in np.unique(table.ranks).tolist():
        for kind in (False, True):
            rows = np.flatnonzero((table.ranks == code) & (between_two == kind))
            if code != NONE and len(rows):
                found[code, kind] = rows
    return found


def _by_text(strings: list[str], codes: np.ndarray, add: Callable[[bytes], None]) -> np.ndarray:
    """Codes by the alphabetical order of their texts, which are added to the digest."""
    unique, inverse = np.unique(codes, return_inverse=True)
    texts = ["" if code < 0 else strings[code] for code in unique.tolist()]
    order = sorted(range(len(texts)), key=lambda place: (texts[place], unique[place] >= 0))
    add("\0".join(texts[place] for place in order).encode("utf-8", "surrogatepass"))
    place_of = np.empty(len(order), np.int64)
    place_of[order] = np.arange(len(order))
    found: np.ndarray = place_of[inverse]
    return found


def _by_appearance(values: np.ndarray) -> np.ndarray:
    """Values numbered in the order in which they first appear."""
    _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    number = np.empty(len(first), np.int64)
    number[np.argsort(first, kind="stable")] = np.arange(len(first))
    found: np.ndarray = number[inverse]
    return found


def _shape_text(text: str, own: int, between_two: bool) -> str:
    ranks = _ranks_in(text)
    if ranks is None:
        return text
    if between_two:
        return f"peers {[rank - own for rank in ranks]}"
    shape = lattice(ranks, own)
    return f"ranks {ranks}" if shape is None else f"shape {shape}"


def _ranks_in(text: str) -> list[int] | None:
    try:
        value = from_json(text)
    except DecodeError:
        return None
    return value if _are_ranks(value) else None


def _are_ranks(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(rank) is int for rank in value)
