"""Places of embedding tables on ranks: the pieces of tables that each rank holds. Imports no torch.

A *piece* is some rows and some columns of a table on one rank. Every rank sends the piece's rank its samples' look-ups
in the piece's rows, and gets back one vector for each sample. Vectors of pieces by rows are added, those of pieces by
columns are concatenated:

- table-wise: One piece with all rows and columns.
- row-wise: A piece on every rank, with equal parts of the rows; or on chosen ranks, part by part (``row:0+1``).
- column-wise: A piece on every rank, with equal parts of the columns; or on chosen ranks (``column:3+3+1``).
- copy: No piece; each rank holds the table, and its gradient is averaged.

A sharding plan (``foretrace shard --out``) is converted to such places, followed by the plan's number of ranks:
``0,copy,column:3+1@4``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from tracer.lookup_data.plan_file import ShardingError, ShardKind, TableSharding, read_plan
from tracer.lookup_data.tables import EmbeddingTable
from tracer.workloads.settings import Settings, WorkloadError

ROW, COLUMN, COPY, IN_TURN = "row", "column", "copy", "table"
Place = int | str
"""A table's place: its rank, or one of the words."""
PLAN = ".json"
"""Ending of the name of a plan's file, which may be given instead of places."""
_FOR = "@"
_DIGITS = 9  # such numbers fit into 32 bits


@dataclass(frozen=True, slots=True)
class TablePiece:
    """Rows and columns of a table on one rank.

    Attributes:
        table: number of the table.
        rank: rank that holds the piece.
        first_row, rows: range of the table's rows.
        first_column, columns: range of the table's columns.
    """

    table: int
    rank: int
    first_row: int
    rows: int
    first_column: int
    columns: int


def check_places(text: str, tables: int) -> None:
    """Raise ``WorkloadError`` unless a text gives a place for each of ``tables`` tables."""
    _table_places(text, tables)


def places_of_plan(path: str, tables: Sequence[EmbeddingTable]) -> str:
    """Return the places of these tables in a sharding plan's file.

    Raises:
        ShardingError: it cannot be read, is no plan, has other tables, or leaves some in the hosts' memory.
    """
    plan = read_plan(path)
    words = []
    for table, each in zip(tables, plan.shardings(tables), strict=True):
        if each.location != "hbm":
            raise ShardingError(f"The plan has table {table.name!r} in the host's memory, and a workload's tables lie "
                                "on their devices; make a plan without --host-memory.")
        ranks = "+".join(map(str, each.ranks))
        words.append({ShardKind.TABLE_WISE: ranks, ShardKind.COLUMN_WISE: f"{COLUMN}:{ranks}", ShardKind.ROW_WISE: ROW,
                      ShardKind.TABLE_ROW_WISE: f"{ROW}:{ranks}", ShardKind.DATA_PARALLEL: COPY}[each.kind])
    return f"{','.join(words)}{_FOR}{plan.world_size}"


def shardings_of(tables: Sequence[EmbeddingTable], text: str, ranks: int) -> list[TableSharding]:
    """Return the sharding of each table, given the text of their places.

    Rows on some ranks are table-row-wise, even if these ranks are not one node.

    Raises:
        WorkloadError: The text lacks the place of a table, a rank does not exist, or a table has fewer columns than
            pieces. Also if the places are those of a plan for another number of ranks.
    """
    places, planned = _table_places(text, len(tables))
    if planned not in (0, ranks):
        raise WorkloadError(f"The tables' places are those of a sharding plan for {planned} ranks, and there are "
                            f"{ranks}; take as many, or make a plan for these (foretrace shard --gpus {ranks}).")
    everyone = tuple(range(ranks))
    found = []
    for number, (table, place) in enumerate(zip(tables, places, strict=True)):
        kind, _, chosen = str(place).partition(":")
        on = tuple(map(int, chosen.split("+"))) if chosen else everyone
        if kind == COLUMN:
            each = TableSharding(ShardKind.COLUMN_WISE, on)
            if table.columns < len(on):
                raise WorkloadError(f"Table {table.name} has {table.columns} columns, fewer than its {len(on)} ranks; "
                                    "place it otherwise.")
        elif kind == ROW:
            each = TableSharding(ShardKind.ROW_WISE if on == everyone else ShardKind.TABLE_ROW_WISE, on)
        elif kind == COPY:
            each = TableSharding(ShardKind.DATA_PARALLEL, everyone)
        else:
            each = TableSharding(ShardKind.TABLE_WISE, (number % ranks if place == IN_TURN else int(place),))
        if max(each.ranks) >= ranks:
            raise WorkloadError(f"Table {table.name} is to lie on rank {max(each.ranks)}, and there are {ranks}; "
                                f"choose 0 to {ranks - 1}.")
        found.append(each)
    return found


def pieces_of(tables: Sequence[EmbeddingTable], text: str, ranks: int) -> list[TablePiece]:
    """Return the pieces of tables, given the text of their places, by rank and then by table. A table copied to every
    rank has no pieces. Raises as ``shardings_of``."""
    found: list[TablePiece] = []
    for number, (table, spread) in enumerate(zip(tables, shardings_of(tables, text, ranks), strict=True)):
        on = spread.ranks
        if spread.kind is ShardKind.COLUMN_WISE:
            bounds = [table.columns * part // len(on) for part in range(len(on) + 1)]  # as even as possible
            found += [TablePiece(number, rank, 0, table.rows, first, last - first)
                      for rank, (first, last) in zip(on, pairwise(bounds), strict=True)]
        elif spread.kind is not ShardKind.DATA_PARALLEL:
            # Equal blocks, except that the last one is shorter and those after it are empty (as in TorchRec).
            block = -(-table.rows // len(on))
            bounds = [min(part * block, table.rows) for part in range(len(on) + 1)]
            found += [TablePiece(number, rank, first, last - first, 0, table.columns)
                      for rank, (first, last) in zip(on, pairwise(bounds), strict=True) if last > first]
    return sorted(found, key=lambda piece: (piece.rank, piece.table, piece.first_column))


def check_alone(settings: Settings) -> None:
    """Raise ``WorkloadError`` if a workload that runs in one process shall have tables on other ranks."""
    text: str = getattr(settings, "sharding", "")
    if not text:
        return
    try:
        pieces_of(settings.embedding_tables(), text, 1)
    except WorkloadError:
        raise WorkloadError(f"{settings.WORKLOAD}: sharding={text} has tables on several ranks, and there is one "
                            "process without a plan; spread it over as many with --parallel ddp=N, or leave sharding "
                            "out.") from None


def tables_at(tables: Sequence[EmbeddingTable], pieces: Sequence[TablePiece], rank: int) -> list[EmbeddingTable]:
    """Return the tables as one rank holds them: its pieces, in order, and tables without a piece.

    All pieces of a table are assumed to have equally popular rows.
    """
    cut = {piece.table for piece in pieces}
    found = [replace(tables[piece.table].resized(piece.rows), columns=piece.columns,
                     bag=tables[piece.table].bag * piece.rows / tables[piece.table].rows)
             for piece in pieces if piece.rank == rank]
    return found + [table for number, table in enumerate(tables) if number not in cut]


def _table_places(text: str, tables: int) -> tuple[list[Place], int]:
    """Return the place of each table in a text, and the number of ranks they are for (0: any); ``table`` stays a word
    until that number is known."""
    listed, at, planned = text.partition(_FOR)
    words = [word.strip().lower() for word in listed.split(",")]
    for word in words:
        kind, _, ranks = word.partition(":")
        parts = ranks.split("+") if ranks else []
        cut = kind in (ROW, COLUMN) and all(map(_is_number, parts)) and (
            kind == COLUMN or len(set(parts)) == len(parts))
        if not cut and word != COPY and not _is_number(word) and (word != IN_TURN or len(words) > 1):
            raise WorkloadError(f"sharding={text}: {word!r} is no place of a table; write a rank, row, column (or "
                                "row:0+1, on these ranks) or copy for each, or table, row, column or copy for all.")
    if at and not _is_number(planned):
        raise WorkloadError(f"sharding={text}: {planned!r} is no number of ranks; write one after {_FOR}.")
    if len(words) == 1 and not words[0].isdecimal():
        words *= tables
    if len(words) != tables:
        raise WorkloadError(f"sharding={text} places {len(words)} tables, and there are {tables}; give each a place.")
    return [int(word) if word.isdecimal() else word for word in words], int(planned or 0)


def _is_number(text: str) -> bool:
    return text.isdecimal() and text.isascii() and len(text) <= _DIGITS
