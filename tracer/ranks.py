"""Ranks of a job: credible numbers, and classes of ranks that do the same work.

A number that a file merely claims allocates no memory. A thousand data-parallel ranks differ in their numbers only, and
one graph represents all of them. Its own number and the ranks of its process groups are derived for each rank from the
rank's place on the mesh.

*The same work* means equal operations, calls, kernels and collectives apart from rank numbers: process groups are
compared by their shape around the rank, not by their members. Times are not compared, so a folded recording keeps those
of the first rank of each class; recordings are folded only on request.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tracer.columns import NONE, named
from tracer.graph import SHAPE_ONLY, ExecutionGraph, Table
from tracer.guard import MOST_RANKS
from tracer.input_file import DecodeError, from_json

FAKE = "fake"
"""``meta.backend`` of a rank of a fake world (see ``tracer.fake_world``)."""
Span = tuple[int, int, int]
"""The ranks ``first, first + step, … last`` as (first, last, step)."""


@dataclass(frozen=True)
class RankClass:
    """Ranks that do the same work.

    Attributes:
        ranks: spans (first, last, step), by first; none overlap.
        graph: row of ``Job.graphs``; ``NONE`` where no rank of the class was traced.
    """

    ranks: tuple[Span, ...]
    graph: int = NONE

    def __len__(self) -> int:
        return sum((last - first) // step + 1 for first, last, step in self.ranks)

    def __contains__(self, rank: int) -> bool:
        return any(first <= rank <= last and (rank - first) % step == 0 for first, last, step in self.ranks)

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(rank for first, last, step in self.ranks for rank in range(first, last + 1, step)))

    @property
    def first(self) -> int:
        """Return the lowest rank."""
        return min(first for first, _, _ in self.ranks)

    def __str__(self) -> str:
        """Return text such as "0–63, 128" or "1–7 (every 2nd)"."""
        parts = []
        for first, last, step in self.ranks:
            text = str(first) if first == last else f"{first}–{last}"
            ending = {1: "st", 2: "nd", 3: "rd"}.get(step % 10 if step % 100 not in (11, 12, 13) else 0, "th")
            parts.append(text if step == 1 or first == last else f"{text} (every {step}{ending})")
        return ", ".join(parts)


def spans(ranks: Iterable[int]) -> tuple[Span, ...]:
    """Return ranks as few spans, each with a constant step, built greedily from the lowest rank."""
    rest = sorted(set(ranks))
    found: list[Span] = []
    start = 0
    while start < len(rest):
        end = start + 1
        step = rest[end] - rest[start] if end < len(rest) else 1
        while end < len(rest) and rest[end] - rest[end - 1] == step:
            end += 1
        if end - start == 2 and step > 1:  # two ranks are no pattern
            end -= 1
        found.append((rest[start], rest[end - 1], step if end - start > 1 else 1))
        start = end
    return tuple(found)


def checked_classes(value: object, world_size: int) -> list[tuple[Span, ...]] | None:
    """Return the classes in a JSON value (lists of [first, last, step]), or ``None`` if they do not fit this world."""
    if world_size > MOST_RANKS:
        return None
    try:
        found = [tuple((int(first), int(last), int(step)) for first, last, step in ranks)
                 for ranks in value]  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        return None
    if not all(0 <= first <= last < world_size and step > 0 and (last - first) % step == 0
               for ranks in found for first, last, step in ranks):
        return None
    total = sum(len(RankClass(ranks)) for ranks in found)
    if total != world_size or len({rank for ranks in found for rank in RankClass(ranks)}) != total:
        return None
    return found


def groups_like(ranks: Sequence[int], of: int, to: int) -> list[int]:
    """Return the group of rank ``to`` that corresponds to the group ``ranks`` of rank ``of``.

    Groups along the dimensions of a mesh form a lattice: a number of ranks at a fixed distance, in one or more
    dimensions. The group of ``to`` is the lattice of the same shape through it. Other groups are the same for both.
    """
    shape = lattice(ranks, of)
    return list(ranks) if shape is None else _through(shape, to)


def peers_like(ranks: Sequence[int], of: int, to: int) -> list[int]:
    """Return the ranks that send to ``to`` or receive from it, at the same distances as ``ranks`` from ``of``."""
    return [rank - of + to for rank in ranks]


def lattice(ranks: Sequence[int], of: int) -> tuple[tuple[int, int], ...] | None:
    """Return (distance, number) of each dimension of the lattice that ranks form around ``of``, ``None`` otherwise."""
    rest, shape = list(ranks), []
    while len(rest) > 1:
        step, count = rest[1] - rest[0], 2
        while count < len(rest) and rest[count] - rest[count - 1] == step:
            count += 1
        inner = range(0, count * step, step) if step > 0 else ()
        if step <= 0 or len(rest) % count or any(
                rest[start + place] - rest[start] != offset
                for start in range(0, len(rest), count) for place, offset in enumerate(inner)):
            return None
        shape.append((step, count))
        rest = rest[::count]
    found = tuple(shape)
    return found if ranks and _through(found, of) == list(ranks) else None


def _through(shape: tuple[tuple[int, int], ...], rank: int) -> list[int]:
    base = rank - sum(rank // step % count * step for step, count in shape)
    found = [base]
    for step, count in shape:
        found = [start + place * step for place in range(count) for start in found]
    return sorted(found)


_RANK_IN_NAME = re.compile(r"(?:rank|worker|trainer|node)[-_.]?([0-9]+)", re.IGNORECASE)
_MOST_IN_NAME = 1 << 17
"""A larger number in a file's name is a date, a host or a job, not a rank."""


def rank_in_name(path: str) -> int:
    """Return the rank in a file's name ("rank3.json", "worker3_step_12…"), ``NONE`` without one."""
    match = _RANK_IN_NAME.search(path.rstrip("/").rsplit("/", 1)[-1])
    return int(match.group(1)) if match and len(match.group(1)) < 9 and int(match.group(1)) < _MOST_IN_NAME else NONE


def missing_of(size: int, covered: Collection[int]) -> list[int]:
    """Return the ranks below ``size`` that are not covered, in order."""
    missing = np.ones(min(size, MOST_RANKS), bool)
    missing[[rank for rank in covered if 0 <= rank < len(missing)]] = False
    found: list[int] = np.flatnonzero(missing).tolist()
    return found


POINT_TO_POINT = frozenset({"send", "recv", "send_recv"})

REPLICATED = frozenset({"all_reduce", "broadcast", "barrier"})
"""Kinds of collectives that have equal sizes on every replica; those of shards may differ from rank to rank."""

_COMPARED: dict[str, frozenset[str]] = {
    "ops": frozenset({"start_ns", "duration_ns", "sequence", "forward_thread", "external_id", "record_id", "scalars",
                      "et_node"}),
    "launches": frozenset({"start_ns", "duration_ns", "correlation"}),
    "kernels": frozenset({"start_ns", "duration_ns", "correlation", "device"}),
    "collectives": frozenset({"group", "ranks"}),
    "steps": frozenset({"name", "start_ns", "duration_ns"}),
}
"""Tables whose rows define the work, and the columns that may differ between equal ranks. These are times, numbers that
only link rows, scalars (with offsets of a rank's shard), and values compared in another form."""


def all_alike(graphs: Sequence[ExecutionGraph]) -> bool:
    """Return whether captured ranks of a fake world may represent the whole world. Each collective must be one of plain
    data parallelism over all ranks, and the captured ranks, if several, must do the same work."""
    for graph in graphs:
        table, size = graph.collectives, graph.meta.world_size
        kinds = {graph.string(code) for code in np.unique(table.kind).tolist()}
        ranks = {graph.string(code) for code in np.unique(table.ranks).tolist()}
        if graph.meta.backend != FAKE or graph.meta.era == SHAPE_ONLY or graph.meta.rank == NONE or size < 2 or \
                not kinds or not kinds <= REPLICATED or ranks != {json.dumps(list(range(size)))}:
            return False
    return bool(graphs) and len({(work_digest(graph), graph.meta.world_size) for graph in graphs}) == 1


def renumbered(graph: ExecutionGraph, rank: int) -> ExecutionGraph:
    """Return the graph as another rank of its class would have it, with its rank and the ranks of its groups and peers.

    Tables are shared, except for the collectives' ranks; groups keep the names that they have on the traced rank.
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
    """Return a digest of a graph's work, equal for ranks that do the same work."""
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
    """Return (code of the ranks, whether point to point) → rows of the collectives."""
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
    """Return codes in the alphabetical order of their texts, and add the texts to the digest."""
    unique, inverse = np.unique(codes, return_inverse=True)
    texts = ["" if code < 0 else strings[code] for code in unique.tolist()]
    order = sorted(range(len(texts)), key=lambda place: (texts[place], unique[place] >= 0))
    add("\0".join(texts[place] for place in order).encode("utf-8", "surrogatepass"))
    place_of = np.empty(len(order), np.int64)
    place_of[order] = np.arange(len(order))
    found: np.ndarray = place_of[inverse]
    return found


def _by_appearance(values: np.ndarray) -> np.ndarray:
    """Return values numbered in order of first appearance."""
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
