"""Tables of linear layers' forward products by device and software: gpu, software, dtype, m, n, k, latency_us."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kernel_models.datasets.samples import DataError, DeferredCalls, Samples
from kernel_models.datasets.tables import Reader
from kernel_models.device import resolve_device
from kernel_models.families.gemm import gemm
from kernel_models.op_call import OpCall
from kernel_models.tensors import short_dtype

if TYPE_CHECKING:
    import pandas


def read(frame: pandas.DataFrame, path: Path) -> Iterator[Samples]:
    """One samples object for each device, stack and dtype; the shape group is the weight, (n, k)."""
    for (gpu, software, kernel, dtype), rows in frame.groupby(["gpu", "software", "kernel_source", "dtype"], sort=True):
        name = short_dtype(str(dtype))
        if not name:
            raise DataError(f"{path} names the element type {str(dtype)[:40]!r}, which foretrace does not know; write "
                            "it like bfloat16 or fp8.")
        out = "bf16" if name == "fp8" else ""
        sizes = list(zip(rows.m.tolist(), rows.n.tolist(), rows.k.tolist(), strict=True))
        yield Samples(
            resolve_device(str(gpu)).name, f"{software}/{kernel}", path.name,
            DeferredCalls(len(sizes), partial(_calls, sizes, name, out)),
            rows.latency_us.to_numpy(float), {"site": [f"n={n} k={k}" for _, n, k in sizes]})


def _calls(sizes: Sequence[tuple[int, int, int]], dtype: str, out_dtype: str) -> list[OpCall]:
    return [call for m, n, k in sizes for call in gemm(1, m, n, k, dtype, "nt", out_dtype=out_dtype)]


READER = Reader("linear layers", frozenset(
    {"gpu", "software", "kernel_source", "dtype", "m", "n", "k", "latency_us"}), read,
    sizes=("m", "n", "k"))
