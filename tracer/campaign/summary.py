"""A recorded graph as one small table: its operations and kernels, grouped. Needs no torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas

    from tracer.graph import ExecutionGraph

_OP_KEYS = ["name", "phase", "shapes", "dtypes"]
_KERNEL_KEYS = ["name", "op_name", "phase", "shapes", "dtypes", "kind", "stream"]


def summarise(graph: ExecutionGraph) -> pandas.DataFrame:
    """Groups of alike rows of all profiled steps.

    Columns: ``table`` ("op" or "kernel"), ``name``; for a kernel also ``op_name``, ``kind``, ``stream``; ``phase``,
    ``shapes`` and ``dtypes`` of the operation (JSON texts); ``count``; ``median_ns``, ``total_ns`` of the durations
    (an operation's contains what it calls).
    """
    import pandas

    ops = graph.to_pandas("ops")
    for name in ("name", "phase", "shapes", "dtypes"):
        ops[name] = ops[name].astype(object).where(ops[name].notna(), "")
    kernels = graph.to_pandas("kernels")
    for name in ("name", "kind"):
        kernels[name] = kernels[name].astype(object)
    of_op = ops.reindex(kernels["op"]).reset_index(drop=True)
    kernels = kernels.reset_index(drop=True).assign(
        op_name=of_op["name"].fillna(""), phase=of_op["phase"].fillna(""), shapes=of_op["shapes"].fillna(""),
        dtypes=of_op["dtypes"].fillna(""))
    return pandas.concat([_grouped(ops[ops["kind"] == "operation"], _OP_KEYS, "op"),
                          _grouped(kernels, _KERNEL_KEYS, "kernel")], ignore_index=True)


def save_summary(graph: ExecutionGraph, path: str | os.PathLike[str]) -> Path:
    """Write ``summarise(graph)`` as Parquet."""
    target = Path(path)
    summarise(graph).to_parquet(target, compression="zstd", index=False)
    return target


def _grouped(frame: pandas.DataFrame, keys: list[str], table: str) -> pandas.DataFrame:
    groups = frame.groupby(keys, sort=False, dropna=False)["duration_ns"]
    found = groups.agg(count="count", median_ns="median", total_ns="sum").reset_index()
    found.insert(0, "table", table)
    return found.astype({"median_ns": "float64", "total_ns": "int64", "count": "int64"})
