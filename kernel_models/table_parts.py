"""``TablePart``: what one device holds of one embedding table, and what a batch looks up in it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tracer.lookup_data.tables import ROW_STATE_BYTES, TABLE_DTYPES, EmbeddingTable


@dataclass(frozen=True, slots=True)
class TablePart:
    """One table's share of a batched look-up.

    Attributes:
        rows, columns: of the part.
        dtype: of the weights.
        lookups, bags: of the batch, in this part; ``bags`` are output rows (look-ups where nothing is pooled).
        longest: look-ups of the longest bag; 0: not known.
        reuse: histogram of the look-ups (``tracer.lookup_data.reuse``); nothing: rows are drawn evenly.
        weighted: whether each look-up has a weight.
        optimizer: fused into the backward pass.
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

    @classmethod
    def of(cls, table: EmbeddingTable, samples: int) -> TablePart:
        """A whole table, for so many samples."""
        lookups = round(table.lookups(samples))
        pooled = table.pooling != "none"
        even = not table.reuse and not table.skew
        return cls(table.rows, table.columns, table.dtype, lookups, samples if pooled else lookups,
                   round(table.longest()) if pooled else 1, () if even else table.histogram(samples), table.weighted,
                   table.optimizer)

    def cut(self, share_of_rows: float = 1.0, columns: int = 0) -> TablePart:
        """A share of the rows (and of the look-ups, which fall on all rows alike), or some columns.

        Every sample still has its bag in a row-wise part, if an emptier one.
        """
        pooled = self.longest != 1 or self.bags != self.lookups
        lookups = round(self.lookups * share_of_rows)
        return replace(self, rows=max(round(self.rows * share_of_rows), 1), columns=columns or self.columns,
                       lookups=lookups, bags=self.bags if pooled else lookups,
                       longest=max(round(self.longest * share_of_rows), 1) if self.longest else 0)

    @property
    def row_bytes(self) -> float:
        """Of a row's weights, with the scale and bias of quantized ones."""
        return self.columns * TABLE_DTYPES.get(self.dtype, 4.0) + (4.0 if self.dtype in ("int8", "int4") else 0.0)

    @property
    def state_bytes(self) -> float:
        """Of the optimizer's state of a row."""
        of_row, of_element = ROW_STATE_BYTES.get(self.optimizer, (0, 0))
        return of_row + of_element * float(self.columns)
