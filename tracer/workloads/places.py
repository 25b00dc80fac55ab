"""Places of embedding tables over ranks: which piece of which table each rank holds. Imports no torch.

A *piece* is some rows and some columns of a table on one rank. Every rank sends a piece's rank the look-ups of its own
samples that fall into the piece's rows, and gets a vector a sample back; vectors of pieces by rows add up, those by
columns lie side by side::

    table-wise      one piece with all rows and columns
    row-wise        a piece on every rank, rows in equal parts
    column-wise     a piece on every rank, columns likewise
                    (both also on chosen ranks, part by part: ``row:0+1``, ``column:3+3+1``)
    copy            no piece: each rank holds the table, and its gradient is averaged
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from tracer.lookup_data.tables import EmbeddingTable
from tracer.workloads.settings import WorkloadError

ROW, COLUMN, COPY, IN_TURN = "row", "column", "copy", "table"
Place = int | str
"""Of a table: its rank, or one of the words."""


@dataclass(frozen=True, slots=True)
class TablePiece:
    """Rows and columns of a table on one rank.

    Attributes:
        table: its number.
        rank: where it lies.
        first_row, rows: of the table's.
        first_column, columns: of the table's.
    """

    table: int
    rank: int
    first_row: int
    rows: int
    first_column: int
    columns: int


def table_places(text: str, tables: int) -> list[Place]:
    """The places that a text says, one a table; ``table`` stays a word until the number of ranks is known.

    Raises:
        WorkloadError: it says something else, or other than one place a table.
    """
    words = [word.strip().lower() for word in text.split(",")]
    for word in words:
        kind, _, ranks = word.partition(":")
        parts = ranks.split("+") if ranks else []
        cut = kind in (ROW, COLUMN) and all(part.isdecimal() for part in parts) and (
            kind == COLUMN or len(set(parts)) == len(parts))
        if not cut and word != COPY and not word.isdecimal() and (word != IN_TURN or len(words) > 1):
            raise WorkloadError(f"sharding={text}: {word!r} is no place of a table; write a rank, row, column (or "
                                "row:0+1, on these ranks) or copy for each, or table, row, column or copy for all.")
    if len(words) == 1 and not words[0].isdecimal():
        words *= tables
    if len(words) != tables:
        raise WorkloadError(f"sharding={text} places {len(words)} tables, and there are {tables}; give each a place.")
    return [int(word) if word.isdecimal() else word for word in words]


def pieces_of(tables: Sequence[EmbeddingTable], places: Sequence[Place], ranks: int) -> list[TablePiece]:
    """Every piece of tables at their places, by rank and then by table. Tables that are copied have none.

    Raises:
        WorkloadError: a rank is not there, or a table has fewer rows or columns than it is to be cut into.
    """
    found: list[TablePiece] = []
    for number, (table, place) in enumerate(zip(tables, places, strict=True)):
        if place == COPY:
            continue
        kind, _, chosen = str(place).partition(":")
        if kind in (ROW, COLUMN):
            on = [int(rank) for rank in chosen.split("+")] if chosen else list(range(ranks))
            _check_there(table, max(on), ranks)
            size = table.rows if kind == ROW else table.columns
            for rank, (first, count) in zip(on, _chunks(table, kind, size, len(on)), strict=True):
                found.append(TablePiece(number, rank, first, count, 0, table.columns) if kind == ROW
                             else TablePiece(number, rank, 0, table.rows, first, count))
            continue
        rank = number % ranks if place == IN_TURN else int(place)
        _check_there(table, rank, ranks)
        found.append(TablePiece(number, rank, 0, table.rows, 0, table.columns))
    return sorted(found, key=lambda piece: (piece.rank, piece.table, piece.first_column))


def tables_at(tables: Sequence[EmbeddingTable], pieces: Sequence[TablePiece], rank: int) -> list[EmbeddingTable]:
    """The tables as one rank holds them: its pieces, in their order, and tables without a piece.

    Rows of a table are taken to be equally popular wherever it is cut.
    """
    cut = {piece.table for piece in pieces}
    found = [replace(tables[piece.table], rows=piece.rows, columns=piece.columns,
                     bag=tables[piece.table].bag * piece.rows / tables[piece.table].rows)
             for piece in pieces if piece.rank == rank]
    return found + [table for number, table in enumerate(tables) if number not in cut]


def _check_there(table: EmbeddingTable, rank: int, ranks: int) -> None:
    if rank >= ranks:
        raise WorkloadError(f"Table {table.name} is to lie on rank {rank}, and there are {ranks}; choose 0 to "
                            f"{ranks - 1}.")


def _chunks(table: EmbeddingTable, kind: str, size: int, ranks: int) -> list[tuple[int, int]]:
    if size < ranks:
        raise WorkloadError(f"Table {table.name} has {size} {kind}s, fewer than its {ranks} ranks; place it otherwise.")
    bounds = [size * rank // ranks for rank in range(ranks + 1)]
    return [(first, last - first) for first, last in pairwise(bounds)]
