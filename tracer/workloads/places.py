"""Places of embedding tables over ranks: which piece of which table each rank holds. Imports no torch.

A *piece* is some rows and some columns of a table on one rank. Every rank sends a piece's rank the look-ups of its own
samples that fall into the piece's rows, and gets a vector a sample back; vectors of pieces by rows add up, those by
columns lie side by side::

    table-wise      one piece with all rows and columns
    row-wise        a piece on every rank, rows in equal parts
    column-wise     a piece on every rank, columns likewise
    copy            no piece: each rank holds the table, and its gradient is averaged
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
        if word not in (ROW, COLUMN, COPY) and not word.isdecimal() and (word != IN_TURN or len(words) > 1):
            raise WorkloadError(f"sharding={text}: {word!r} is no place of a table; write a rank, row, column or copy "
                                "for each, or table, row, column or copy for all.")
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
        if place in (ROW, COLUMN):
            size = table.rows if place == ROW else table.columns
            for rank, (first, count) in enumerate(_chunks(table, str(place), size, ranks)):
                found.append(TablePiece(number, rank, first, count, 0, table.columns) if place == ROW
                             else TablePiece(number, rank, 0, table.rows, first, count))
            continue
        rank = number % ranks if place == IN_TURN else int(place)
        if rank >= ranks:
            raise WorkloadError(f"Table {table.name} is to lie on rank {rank}, and there are {ranks}; choose 0 to "
                                f"{ranks - 1}.")
        found.append(TablePiece(number, rank, 0, table.rows, 0, table.columns))
    return sorted(found, key=lambda piece: (piece.rank, piece.table))


def _chunks(table: EmbeddingTable, kind: str, size: int, ranks: int) -> list[tuple[int, int]]:
    if size < ranks:
        raise WorkloadError(f"Table {table.name} has {size} {kind}s, fewer than the {ranks} ranks; place it otherwise.")
    bounds = [size * rank // ranks for rank in range(ranks + 1)]
    return [(first, last - first) for first, last in pairwise(bounds)]
