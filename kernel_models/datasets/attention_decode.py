"""Tables of decoding attention: gpu, batch, heads, head size, tokens in the cache, its type, window, latency_us.

One row is one token of every sequence over its cache. Columns that may be left out: ``software``, ``kernel_source``,
``dtype`` (of the products; "bf16"), ``kv_dtype`` (of the cache; as the products), ``window_size`` (0 or nothing: all),
``q_len`` (tokens of the step; 1), ``v_head_dim`` (512 of 576: a latent cache, as of MLA).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from kernel_models.datasets.samples import Samples
from kernel_models.datasets.tables import Reader, check_sizes
from kernel_models.device import resolve_device
from kernel_models.families.attention import attention
from kernel_models.op_call import OpCall
from kernel_models.tensors import short_dtype

if TYPE_CHECKING:
    import pandas

_COLUMNS = ("batch_size", "num_heads", "num_kv_heads", "head_dim", "context_length")
LATENT_SIZE, LATENT_VALUES = 576, 512
"""Features of a latent cache's token, and how many of them are values too (DeepSeek-V2 and V3)."""
_ALIASES = MappingProxyType({
    "gpu": ("device",), "context_length": ("context_len", "kv_len", "kv_seq_len", "cache_len", "context"),
    "num_kv_heads": ("num_key_value_heads",), "num_heads": ("num_q_heads",), "kv_dtype": ("kv_cache_dtype",),
    "window_size": ("window",)})


def read(frame: pandas.DataFrame, path: Path) -> Iterator[Samples]:
    """One samples object for each device, stack and kernel.

    Two groupings: "heads" (heads, key/value heads, head size, window, type) and "tokens" (batch and context).
    """
    usual = {"software": "", "kernel_source": "", "dtype": "bf16", "kv_dtype": "", "window_size": 0, "q_len": 1,
             "v_head_dim": 0}
    frame = frame.assign(**{name: frame[name].fillna(value) if name in frame else value
                            for name, value in usual.items()})
    check_sizes(frame, ("window_size", "v_head_dim"), path, least=0)
    check_sizes(frame, ("q_len",), path)
    for (gpu, software, kernel), rows in frame.groupby(["gpu", "software", "kernel_source"], sort=True):
        device = resolve_device(str(gpu))
        calls = [_call(row) for row in rows.to_dict("records")]
        yield Samples(
            device.name, "/".join(part for part in (str(software), str(kernel)) if part), path.name, calls,
            rows.latency_us.to_numpy(float),
            {"heads": [f"heads={c.dims[1]} kv={c.dims[2]} d={c.dims[5]} window={c.dims[7]}" for c in calls],
             "tokens": [f"batch={c.dims[0]} context={c.dims[4]}" for c in calls]})


def _call(row: dict[str, Any]) -> OpCall:
    batch, heads, kv_heads, size, context = (int(row[name]) for name in _COLUMNS)
    dtype = short_dtype(str(row["dtype"])) or "bf16"
    v_size = int(row["v_head_dim"]) or (LATENT_VALUES if size == LATENT_SIZE else size)
    latent = v_size < size and kv_heads == 1
    # A latent cache has one head, which kernels read once for all queries.
    return next(attention(
        "mla_forward" if latent else "paged_forward", batch, heads, kv_heads, int(row["q_len"]), context, size, v_size,
        dtype, causal=True, window=int(row["window_size"]), flags=("latent",) if latent else (),
        kv_dtype=short_dtype(str(row["kv_dtype"]))))


READER = Reader("decoding attention", frozenset({"gpu", "latency_us", *_COLUMNS}), read, sizes=_COLUMNS,
                aliases=_ALIASES)
