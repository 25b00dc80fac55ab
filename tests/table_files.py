"""Files of embedding tables, as users write them: CSV, Parquet or JSON by the name's ending."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pandas as pd

from tracer.lookup_data.tables import EmbeddingTable

LISTS = ["reuse", "bag_quantiles"]


def write_tables(tables: Sequence[EmbeddingTable], path: Path) -> None:
    """Write tables as ``read_tables`` reads them; a list is one cell, in CSV its numbers with spaces between."""
    frame = pd.DataFrame([asdict(table) for table in tables])
    if path.suffix == ".csv":
        frame.assign(**{name: [" ".join(map(repr, each)) for each in frame[name]] for name in LISTS}).to_csv(
            path, index=False)
    elif path.suffix == ".parquet":
        frame.assign(**{name: [list(each) for each in frame[name]] for name in LISTS}).to_parquet(path)
    else:
        path.write_text(json.dumps({"tables": [asdict(table) for table in tables]}))
