"""Tasks of sharding as the field publishes them, drawn from a seed: nothing is downloaded.

The public data of both benchmarks is one batch of 65,536 samples for 856 tables (facebookresearch/dlrm_datasets), from
which a task draws its tables:

==========  =========================================================================================================
DreamShard  different tables of the pool, 16 columns each (arXiv 2210.02023; its tools/gen_tasks.py)
NeuroShard  tables drawn with repetition, columns drawn from 4, 8, … 128, tasks over the memory drawn again
            (arXiv 2305.01868; its tools/gen_tasks.py)
==========  =========================================================================================================

The pool here is drawn, not that batch: the recipe above is the published one, the sizes of its tables are assumptions
that stand below by name.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tracer.lookup_data.files import PUBLISHED_BATCH, PUBLISHED_COLUMNS
from tracer.lookup_data.tables import EmbeddingTable, TableError

POOL = 856
"""Tables of the public batch."""
LEAST_ROWS = 100
"""Rows that both generators raise smaller tables to."""
MEDIAN_ROWS, SPREAD_ROWS, MOST_ROWS = 300_000.0, 2.2, 4e7
"""Rows are log-normal with this median and this standard deviation of their logarithm: an assumption. Tables of
recommendation models range from tens of rows to tens of millions."""
MEDIAN_BAG, SPREAD_BAG, MOST_BAG = 3.0, 1.5, 200.0
"""Bag lengths likewise: an assumption; a few features with long histories, most with one or a few values."""
MOST_SKEW = 1.3
"""Exponents of the Zipf laws are even from 0 to this: an assumption."""
NEUROSHARD_COLUMNS = (4, 8, 16, 32, 64, 128)
"""Columns that NeuroShard's tasks draw from: halves of 128 as far as four divides them."""


def table_pool(seed: int, count: int = POOL) -> list[EmbeddingTable]:
    """Tables to draw tasks from, with the published benchmark's 16 columns and a Zipf law each."""
    draw = np.random.default_rng(seed)
    rows = np.clip(MEDIAN_ROWS * np.exp(SPREAD_ROWS * draw.standard_normal(count)), LEAST_ROWS, MOST_ROWS)
    bags = np.clip(MEDIAN_BAG * np.exp(SPREAD_BAG * draw.standard_normal(count)), 1.0 / PUBLISHED_BATCH, MOST_BAG)
    skews = draw.uniform(0.0, MOST_SKEW, count)
    return [EmbeddingTable(f"t{i}", int(rows[i]), PUBLISHED_COLUMNS, bag=round(float(bags[i]), 3),
                           skew=round(float(skews[i]), 3)) for i in range(count)]


def dreamshard_task(seed: int, tables: int, columns: int = PUBLISHED_COLUMNS) -> list[EmbeddingTable]:
    """Different tables of the pool; one of more than its tables has a larger pool."""
    pool = table_pool(seed, max(POOL, 2 * tables))
    chosen = np.random.default_rng([seed, 1]).choice(len(pool), tables, replace=False)
    return [replace(pool[i], columns=columns) for i in chosen.tolist()]


def neuroshard_task(seed: int, tables: int, memory_bytes: float) -> list[EmbeddingTable]:
    """Tables drawn with repetition and columns of their own, whose weights take no more than so many bytes.

    Raises:
        TableError: a hundred draws were all larger.
    """
    pool = table_pool(seed)
    draw = np.random.default_rng([seed, 2])
    for _ in range(100):
        chosen, columns = draw.integers(len(pool), size=tables), draw.choice(NEUROSHARD_COLUMNS, tables)
        task = [replace(pool[i], name=f"{pool[i].name}_{number}", columns=int(columns[number]))
                for number, i in enumerate(chosen.tolist())]
        if sum(table.weight_bytes for table in task) <= memory_bytes:
            return task
    raise TableError(f"A task of {tables} tables hardly ever fits {memory_bytes / 1e9:,.4g} GB; allow more memory or "
                     "fewer tables.")
