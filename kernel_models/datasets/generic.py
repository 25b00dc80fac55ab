"""The documented schema of our own: one row a measured call.

Columns, units and defaults:

    family        a ``Family`` value, such as "gemm"
    device        a device's name, or what the driver reports
    latency_us    the time, microseconds
    <dimensions>  one column for each of ``DIMENSIONS[family]``, whole numbers
    kind, dtype   as ``OpCall`` has them (default: the family's name, "bf16")
    layout, flags flags separated by spaces (default: none)
    software      library and version (default: none)
    group         shape group, kept together in every split (default: the sizes)
    split         "fit" or "held-out"; held-out rows are never fitted to (default: by the hash of the group)
    flops, bytes_read, bytes_written   (default: computed for matrix products and attention, needed for the rest)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kernel_models.datasets.samples import DataError, Samples
from kernel_models.datasets.tables import Reader, check_sizes
from kernel_models.device import resolve_device
from kernel_models.families.attention import attention
from kernel_models.families.gemm import gemm
from kernel_models.op_call import DIMENSIONS, Family, OpCall

if TYPE_CHECKING:
    import pandas


def _call(family: Family, row: dict[str, Any]) -> OpCall:
    dims = tuple(int(row[name]) for name in DIMENSIONS[family])
    kind, dtype = str(row.get("kind") or family.value), str(row.get("dtype") or "bf16")
    layout, flags = str(row.get("layout") or ""), tuple(sorted(str(row.get("flags") or "").split()))
    work = tuple(row.get(name) for name in ("flops", "bytes_read", "bytes_written"))
    if all(isinstance(number, float | int) and np.isfinite(number) for number in work):
        flops, read_bytes, written = (float(number) for number in work)  # type: ignore[arg-type]
        return OpCall(family, kind, dims, dtype, layout, flags, flops, read_bytes, written)
    if family is Family.GEMM:
        batch, m, n, k = dims
        return _one(gemm(batch, m, n, k, dtype, layout or "nt", kind=str(row.get("kind") or ""), flags=flags), family)
    if family is Family.ATTENTION:
        batch, heads, kv_heads, q_len, kv_len, head_dim, v_head_dim, window = dims
        plain = tuple(flag for flag in flags if flag != "causal")
        return _one(attention(kind if "_" in kind else "flash_forward", batch, heads, kv_heads, q_len, kv_len, head_dim,
                              v_head_dim, dtype, window=window, causal="causal" in flags, flags=plain), family)
    raise DataError(f"A table of {family.value} needs the columns flops, bytes_read and bytes_written.")


def _one(calls: Iterable[OpCall], family: Family) -> OpCall:
    found = next(iter(calls), None)
    if found is None:
        raise DataError(f"A row of {family.value} has a size of 0, so that there is no work to measure; remove it.")
    return found


def read(frame: pandas.DataFrame, path: Path) -> Iterator[Samples]:
    """One samples object for each device, software and family."""
    frame = frame.assign(**{name: frame[name].fillna("") if name in frame else "" for name in
                            ("software", "kind", "dtype", "layout", "flags")})
    known = {family.value for family in Family}
    for (family_name, gpu, software), rows in frame.groupby(["family", "device", "software"], sort=True):
        if family_name not in known:
            raise DataError(f"{path} names a family {str(family_name)[:40]!r}; known are {', '.join(sorted(known))}.")
        family = Family(family_name)
        lacking = [name for name in DIMENSIONS[family] if name not in rows or rows[name].isna().any()]
        if lacking:
            raise DataError(f"{path} lacks sizes of {family.value}: {', '.join(lacking)}.")
        check_sizes(rows, DIMENSIONS[family], path, least=0)
        calls = [_call(family, row) for row in rows.to_dict("records")]
        groups = ([str(group) for group in rows["group"]] if "group" in rows
                  else ["x".join(map(str, call.dims)) for call in calls])
        yield Samples(resolve_device(str(gpu)).name, str(software), path.name, calls, rows.latency_us.to_numpy(float),
                      {"group": groups}, np.array(rows["split"] == "held-out", bool) if "split" in rows else None)


READER = Reader("measured calls", frozenset({"family", "device", "latency_us"}), read)
