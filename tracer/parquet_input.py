"""Parquet tables of others: read only if they hold no more than their bytes can, as a few bytes may stand for billions
of equal cells."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    import pyarrow

CELLS_A_BYTE = 16
"""Published tables of measurements hold up to 7.4 (by encoding of equal values), most less than one."""
GROWTH = 200
"""Bytes of values for each stored byte; as for traces."""
_SMALL = 100_000
"""Cells and bytes that every file may have."""


def read_parquet(stream: BinaryIO) -> pyarrow.Table:
    """Return the table of an open file.

    Raises:
        pyarrow.ArrowException: it is no Parquet, is damaged, or claims more than its bytes can hold.
        OSError, ValueError: likewise, of pyarrow's own.
    """
    import pyarrow
    import pyarrow.compute
    from pyarrow import parquet

    size = stream.seek(0, os.SEEK_END)
    stream.seek(0)
    plain = parquet.ParquetFile(stream).schema_arrow.remove_metadata()  # what another program adds is not believed
    if len(set(plain.names)) < len(plain.names):
        raise pyarrow.ArrowInvalid("two of its columns have one name")
    texts = [field.name for field in plain if field.type in (pyarrow.string(), pyarrow.binary())]
    # Texts as the numbers that stand for them: a long one may stand in every row.
    file = parquet.ParquetFile(stream, read_dictionary=texts)
    meta = file.metadata
    cells = meta.num_rows * meta.num_columns
    unpacked = sum(meta.row_group(i).total_byte_size for i in range(meta.num_row_groups))
    if cells > CELLS_A_BYTE * size + _SMALL or unpacked > GROWTH * size + _SMALL:
        raise pyarrow.ArrowInvalid(f"{meta.num_rows:,} rows in {size:,} bytes are more than measurements take")
    table = file.read()
    for name in texts:
        column = table.column(name)
        longest = max((pyarrow.compute.max(pyarrow.compute.binary_length(chunk.dictionary)).as_py() or 0
                       for chunk in column.chunks if pyarrow.types.is_dictionary(chunk.type)), default=0)
        if longest * meta.num_rows > GROWTH * size + _SMALL:
            raise pyarrow.ArrowInvalid(f"a text of {longest:,} bytes stands in {meta.num_rows:,} rows")
    return table.cast(plain)
