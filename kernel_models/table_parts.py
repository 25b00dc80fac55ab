"""``TablePart``: what one device holds of one embedding table, and what a batch looks up in it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from tracer.lookup_data.tables import EmbeddingTable, row_state_bytes, stored_row_bytes


@dataclass(frozen=True, slots=True)
class TablePart:
    """One table's share of a batched look-up.

    Attributes:
        rows, columns: of the part.
        dtype: of the weights.
        lookups, bags: of the batch, in this part; ``bags`` are output rows (look-ups where nothing is pooled).
        longest: look-ups of the longest bag; 0: not known.
        reuse: histogram of the look-ups (``tracer.lookup_data.tables``); nothing: rows are drawn evenly.
        weighted: whether each look-up has a weight.
        optimizer: fused into the backward pass; "none": rows are only looked up.
        output_bytes: of an element of a bag.
        location: of the weights (``tracer.lookup_data.tables.LOCATIONS``).
        missed: rows that cross the host's link for these look-ups (``EmbeddingTable.missed``).
    """

    rows: int
    columns: int
    dtype: str
    lookups: int
    bags: int
    longest: int = 0
    reuse: tuple[float, ...] = ()
    weighted: bool = False
    optimizer: str = "rowwise_adagrad"
    output_bytes: float = 4.0
    location: str = "hbm"
    missed: float = 0.0

    @classmethod
    def of(cls, table: EmbeddingTable, samples: int) -> TablePart:
        """A whole table, for so many samples."""
        lookups = round(table.lookups(samples))
        pooled = table.pooling != "none"
        even = not table.reuse and not table.skew
        return cls(table.rows, table.columns, table.dtype, lookups, samples if pooled else lookups,
                   round(table.longest()) if pooled else 1, () if even else table.histogram(samples), table.weighted,
                   table.optimizer, table.output_bytes, table.location, table.missed(samples))

    def cut(self, share_of_rows: float = 1.0, columns: int = 0) -> TablePart:
        """A share of the rows (and of the look-ups, which fall on all rows alike), or some columns.

        Every sample still has its bag in a row-wise part, if an emptier one.
        """
        pooled = self.longest != 1 or self.bags != self.lookups
        lookups = round(self.lookups * share_of_rows)
        return replace(self, rows=max(round(self.rows * share_of_rows), 1), columns=columns or self.columns,
                       lookups=lookups, bags=self.bags if pooled else lookups,
                       longest=max(round(self.longest * share_of_rows), 1) if self.longest else 0,
                       missed=self.missed * share_of_rows)

    @property
    def trained(self) -> bool:
        """Return whether a step changes its rows."""
        return self.optimizer != "none"

    @property
    def row_bytes(self) -> float:
        """Return bytes of a row's weights, as they are stored."""
        return stored_row_bytes(self.dtype, self.columns)

    @property
    def state_bytes(self) -> float:
        """Return bytes of the optimizer's state of a row in the device's memory."""
        return sum(row_state_bytes(self.optimizer, self.columns)) - self.host_state_bytes

    @property
    def host_state_bytes(self) -> float:
        """Return bytes of the optimizer's state of a row in the host's memory (``EmbeddingTable.host_state_bytes``)."""
        return 0.0 if self.location == "hbm" else row_state_bytes(self.optimizer, self.columns)[1]


def with_host_rows(flags: Iterable[str], parts: Iterable[TablePart]) -> tuple[str, ...]:
    """The flags of a look-up of these parts: with "host_rows" no model that was fitted to rows on the device has it."""
    far = any(part.location != "hbm" for part in parts)
    return tuple(sorted({*flags} | {"host_rows"})) if far else tuple(each for each in flags if each != "host_rows")
