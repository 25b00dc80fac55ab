"""Embedding tables spread over ranks, as in TorchRec: each rank's samples look up rows on any rank.

::

    own samples       look-ups, [tables, batch] bags
         │ all-to-all of bag lengths, then of indices
    own pieces        look-ups of all samples ──▶ vectors
         │ all-to-all
    own samples       vectors

The first all-to-all, the input distribution, is as uneven as tables and bags. Own pieces take one operation each, or
one for all of equal columns. The second all-to-all sends even and receives uneven parts; gradients go the other way.
Vectors of pieces by rows are added; vectors of pieces by columns are concatenated. Each rank looks up tables without a
piece itself. The input distribution of an announced batch overlaps the previous batch, as in TorchRec's
``TrainPipelineSparseDist``::

    host        lengths of n + 1 ─▶ vectors of n ─▶ indices of n + 1 ─▶ dense part of n, update
    backend        [lengths n + 1]   [vectors n]       [indices n + 1]     [gradients of vectors n]

The step of n + 1 waits for both where it looks up. If a table is cut by rows, the host waits for the lengths before the
look-ups of n, since they give the number of indices to receive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tracer.lookup_data.tables import EmbeddingTable
from tracer.workloads.models.lookups import by_columns, initialise_rows, sizes_of
from tracer.workloads.places import TablePiece


@dataclass
class _Distribution:
    """A batch's look-ups on their way to the ranks with the rows.

    Attributes:
        rows: The batch's rows, by which the batch is recognised.
        indices: This rank's look-ups, by rank and piece.
        given: Number of look-ups sent to each rank.
        lengths: Lengths of the received bags, [ranks * own pieces, batch].
        counts: Numbers of received look-ups, [ranks, own pieces].
        arrived: The received look-ups, once they were sent.
        under_way: Running exchanges.
    """

    rows: Tensor
    indices: Tensor
    given: list[int]
    lengths: Tensor
    counts: list[list[int]]
    arrived: Tensor | None = None
    under_way: list[Any] = field(default_factory=list)


class ShardedTables(nn.Module):
    """One rank's pieces of tables in place of all tables; inputs and outputs are those of ``PlainTables``.

    Args:
        tables: The model's tables.
        pieces: Pieces of all ranks (``tracer.workloads.places.pieces_of``).
        batch: Samples of a rank.
        sparse: The tables have sparse gradients.
        batched: Pieces of equal columns share one weight and are looked up by one operation.
        group: Process group of the ranks.
    """

    def __init__(self, tables: Sequence[EmbeddingTable], pieces: Sequence[TablePiece], batch: int, *, sparse: bool,
                 batched: bool, group: Any) -> None:
        super().__init__()
        self.group, self.ranks = group, dist.get_world_size(group)
        self.batch, self.sizes, self.count = batch, sizes_of(tables, batch), len(tables)
        self.rows = [table.rows for table in tables]
        self.pieces = [[piece for piece in pieces if piece.rank == rank] for rank in range(self.ranks)]
        self.own = self.pieces[dist.get_rank(group)]
        self.whole = all(piece.rows == tables[piece.table].rows for piece in pieces)
        self.batched = batched
        self.groups = self._grouped(self.own)
        self.weights = nn.ModuleDict()
        for places in self.groups:
            own = [self.own[place] for place in places]
            table = nn.EmbeddingBag(sum(piece.rows for piece in own), own[0].columns, mode="sum", sparse=sparse,
                                    include_last_offset=True)
            for part, piece in zip(table.weight.split([piece.rows for piece in own]), own, strict=True):
                initialise_rows(part, tables[piece.table].rows)
            name = "_".join(str(piece.table) for piece in own)
            self.weights[f"{name}_part_{own[0].first_column}" if name in self.weights else name] = table
        self.copies = nn.ModuleDict({
            str(number): nn.EmbeddingBag(table.rows, table.columns, mode="sum", sparse=sparse)
            for number, table in enumerate(tables) if all(piece.table != number for piece in pieces)})
        self._announced: tuple[Tensor, Tensor] | None = None
        self._ahead: _Distribution | None = None

    def announce(self, rows: Tensor, starts: Tensor) -> None:
        """Announce the input of the call after the next one, so that the next call distributes it during its own work.

        A call with other tensors distributes them itself. All ranks must announce in the same order.
        """
        self._announced = rows, starts

    def forward(self, rows: Tensor, starts: Tensor) -> list[Tensor]:
        """Return each table's vectors, ``[batch, columns]``; see ``Dlrm.forward``."""
        parts = rows.flatten().split(self.sizes)
        found = {int(number): table(parts[int(number)], starts[int(number)]) for number, table in self.copies.items()}
        if any(self.pieces):
            vectors = self._looked_up(rows, starts)
            by_column: dict[int, dict[int, Tensor]] = {}
            for piece, vector in zip([each for of in self.pieces for each in of], vectors, strict=True):
                columns = by_column.setdefault(piece.table, {})
                before = columns.get(piece.first_column)
                columns[piece.first_column] = vector if before is None else before + vector
            for number, columns in by_column.items():
                beside = [columns[first] for first in sorted(columns)]
                found[number] = beside[0] if len(beside) == 1 else torch.cat(beside, dim=1)
        return [found[number] for number in range(self.count)]

    def _looked_up(self, rows: Tensor, starts: Tensor) -> list[Tensor]:
        """Return vectors of own samples, one for each piece of any rank, while the announced batch is distributed."""
        (own, self._ahead), announced, self._announced = (self._ahead, None), self._announced, None
        if own is None or own.rows is not rows:
            own = self._begun(rows, starts, waits=True)
            self._send(own, waits=True)
        ahead = self._begun(*announced, waits=False) if announced is not None else None
        vectors = self._exchanged(*self._received(own))
        if ahead is not None:
            self._send(ahead, waits=False)
            self._ahead = ahead
        return vectors

    def _begun(self, rows: Tensor, starts: Tensor, *, waits: bool) -> _Distribution:
        """Sort a batch's look-ups by piece and exchange bag lengths, asynchronously unless it ``waits``."""
        lengths = torch.diff(starts, append=starts.new_tensor(self.sizes).unsqueeze(1))
        asked = self._asked(rows.flatten().split(self.sizes), lengths)
        mine = len(self.own)
        sent = torch.stack([bags for _, bags in asked])
        received = sent.new_empty((self.ranks * mine, self.batch))
        work = dist.all_to_all_single(received, sent, [mine] * self.ranks, [len(of) for of in self.pieces],
                                      group=self.group, async_op=not waits)
        # The numbers are known if each piece has all rows of its table, since a batch has a fixed number of look-ups.
        # Otherwise they are read from the lengths, for which the host waits, as in TorchRec.
        counts = [[self.sizes[piece.table] for piece in self.own]] * self.ranks
        if not self.whole:
            if work is not None:
                work.wait()
            counts = _numbers(received.view(self.ranks, mine, self.batch).sum(-1), self._expected())
        each = [len(indices) for indices, _ in asked]
        bounds = [0, *accumulate(len(of) for of in self.pieces)]
        return _Distribution(rows, torch.cat([indices for indices, _ in asked]),
                             [sum(each[first:last]) for first, last in pairwise(bounds)], received, counts,
                             under_way=[work])

    def _send(self, batch: _Distribution, *, waits: bool) -> None:
        """Exchange a batch's look-ups, asynchronously unless it ``waits``."""
        batch.arrived = batch.indices.new_empty(sum(map(sum, batch.counts)))
        batch.under_way.append(dist.all_to_all_single(
            batch.arrived, batch.indices, [sum(of) for of in batch.counts], batch.given, group=self.group,
            async_op=not waits))

    def _received(self, batch: _Distribution) -> tuple[list[Tensor], Tensor]:
        """Wait; return each own piece's look-ups, rank by rank, and bag lengths ``[pieces, ranks, batch]``."""
        for work in batch.under_way:
            if work is not None:
                work.wait()
        assert batch.arrived is not None
        mine = len(self.own)
        runs = batch.arrived.split([count for of in batch.counts for count in of])
        return ([torch.cat(runs[place::mine]) for place in range(mine)],
                batch.lengths.view(self.ranks, mine, self.batch).transpose(0, 1).contiguous())

    def _asked(self, parts: Sequence[Tensor], lengths: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return own samples' look-ups in each piece's rows and the number in each bag, by rank and piece."""
        by_block = {number: self._blocks(number, parts[number], lengths[number])
                    for number in sorted({piece.table for of in self.pieces for piece in of if self._is_cut(piece)})}
        return [by_block[piece.table][piece.first_row] if self._is_cut(piece)
                else (parts[piece.table], lengths[piece.table]) for of in self.pieces for piece in of]

    def _is_cut(self, piece: TablePiece) -> bool:
        return piece.rows < self.rows[piece.table]

    def _blocks(self, number: int, rows: Tensor, lengths: Tensor) -> dict[int, tuple[Tensor, Tensor]]:
        """Return a table's look-ups by blocks of rows, in stable order: first row of the block → (rows relative to it,
        bag lengths). All blocks except the last are equally large."""
        blocks = sorted({(piece.first_row, piece.rows): piece for of in self.pieces for piece in of
                         if piece.table == number}.items())
        size, count = blocks[0][0][1], len(blocks)
        block = rows // size
        bag = torch.repeat_interleave(torch.arange(self.batch, device=rows.device), lengths, output_size=len(rows))
        bags = lengths.new_zeros(count * self.batch).scatter_add(
            0, block * self.batch + bag, torch.ones_like(rows)).view(count, self.batch)
        (sizes,) = _numbers(bags.sum(1).unsqueeze(0), [[self._share(piece) for _, piece in blocks]])
        runs = (rows - block * size)[torch.argsort(block, stable=True)].split(sizes)
        return {first: (run, own) for ((first, _), _), run, own in zip(blocks, runs, bags, strict=True)}

    def _share(self, piece: TablePiece) -> int:
        """Return the expected look-ups in a piece if all rows are equally popular; they add up exactly over pieces."""
        size, rows = self.sizes[piece.table], self.rows[piece.table]
        return round(size * (piece.first_row + piece.rows) / rows) - round(size * piece.first_row / rows)

    def _expected(self) -> list[list[int]]:
        return [[self._share(piece) for piece in self.own]] * self.ranks

    def _exchanged(self, indices: list[Tensor], lengths: Tensor) -> list[Tensor]:
        """Look up own pieces for every rank, and exchange vectors; return those of own samples, one for each piece."""
        vectors = []
        for places, table in zip(self.groups, self.weights.values(), strict=True):
            bases = [sum(self.own[other].rows for other in places[:place]) for place in range(len(places))]
            together = torch.cat([indices[place] + base if base else indices[place]
                                  for place, base in zip(places, bases, strict=True)])
            bags = torch.cat([lengths[place].flatten() for place in places])
            ends = torch.cat([bags.new_zeros(1), bags.cumsum(0)])
            vectors.append(table(together, ends).view(len(places), self.ranks, self.batch, -1).transpose(0, 1))
        sent = torch.cat([part.flatten(1) for part in vectors], dim=1).flatten() if vectors else self._nothing(lengths)
        sizes = [self.batch * sum(piece.columns for piece in of) for of in self.pieces]
        received = _Exchange.apply(sent, sizes, [sizes[dist.get_rank(self.group)]] * self.ranks, self.group)
        found: list[Tensor] = []
        for rank, part in enumerate(received.split(sizes)):
            placed = [place for places in self._grouped(self.pieces[rank]) for place in places]
            pieces = [self.pieces[rank][place] for place in placed]
            runs = part.split([self.batch * piece.columns for piece in pieces])
            by_place = {place: run.view(self.batch, -1) for place, run in zip(placed, runs, strict=True)}
            found += [by_place[place] for place in range(len(pieces))]
        return found

    def _grouped(self, pieces: Sequence[TablePiece]) -> list[list[int]]:
        """Return the indices of a rank's pieces in groups that one operation looks up together, in its order."""
        if self.batched:
            return by_columns([piece.columns for piece in pieces])
        return [[place] for place in range(len(pieces))]

    def _nothing(self, lengths: Tensor) -> Tensor:
        """Return the empty tensor that a rank without pieces sends; it takes part in backward too."""
        return torch.zeros(0, device=lengths.device, requires_grad=True)


class _Exchange(torch.autograd.Function):
    """All-to-all of parts of any sizes; gradients go the other way.

    Each rank's loss is a mean over its own samples, and gradients of all ranks are added in a table. So they are
    divided by the number of ranks: here, where they are smallest (as in TorchRec's exchange), not as gradients of rows.
    """

    @staticmethod
    def forward(ctx: Any, sent: Tensor, received: list[int], given: list[int], group: Any) -> Tensor:
        """Exchange the parts; ``received`` and ``given`` are numbers of elements from and for each rank."""
        ctx.received, ctx.given, ctx.group = received, given, group
        result = sent.new_empty(sum(received))
        dist.all_to_all_single(result, sent.contiguous(), received, given, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        """Return the gradient of ``sent``."""
        result = gradient.new_empty(sum(ctx.given))
        dist.all_to_all_single(result, gradient.contiguous(), ctx.given, ctx.received, group=ctx.group)
        return result.div_(dist.get_world_size(ctx.group)), None, None, None


def _numbers(counts: Tensor, expected: list[list[int]]) -> list[list[int]]:
    """Return the values of a tensor, or ``expected`` if a step is traced by shapes, where tensors have no values."""
    if _has_no_values(counts):
        return expected
    found: list[list[int]] = counts.tolist()
    return found


def _has_no_values(tensor: Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor) or tensor.is_meta


def sharded_parameters(model: nn.Module) -> list[str]:
    """Return the names of the parameters that exist only on this rank."""
    inside = [f"{name}.weights." for name, part in model.named_modules() if isinstance(part, ShardedTables)]
    return [name for name, _ in model.named_parameters() if name.startswith(tuple(inside))]
