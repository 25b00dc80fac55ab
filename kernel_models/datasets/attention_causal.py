"""Tables of causal attention over whole prompts: gpu, software, kernel, batch, length, heads, window, latency_us."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kernel_models.datasets.samples import DeferredCalls, Samples
from kernel_models.datasets.tables import Reader, check_sizes
from kernel_models.device import resolve_device
from kernel_models.families.attention import attention
from kernel_models.op_call import OpCall

if TYPE_CHECKING:
    import pandas

_COLUMNS = ("batch_size", "seq_len", "num_heads", "num_kv_heads", "head_dim", "window_size")


def read(frame: pandas.DataFrame, path: Path) -> Iterator[Samples]:
    """One samples object for each device, stack and kernel. A window of NaN or 0 means full attention.

    Two groupings: "heads" (heads, key/value heads, head size, window) and "tokens" (batch and length).
    """
    frame = frame.assign(window_size=frame.window_size.fillna(0))
    check_sizes(frame, ("window_size",), path, least=0)
    for (gpu, software, kernel), rows in frame.groupby(["gpu", "software", "kernel_source"], sort=True):
        device = resolve_device(str(gpu))
        # Servers run FlashAttention-3 wherever it runs.
        kind = "flash3_forward" if device.architecture == "hopper" else "flash_forward"
        sizes = rows[list(_COLUMNS)].astype("int64").to_numpy().tolist()
        yield Samples(
            device.name, f"{software}/{kernel}", path.name,
            DeferredCalls(len(sizes), partial(_calls, kind, sizes)),
            rows.latency_us.to_numpy(float),
            {"heads": [f"heads={heads} kv={kv_heads} d={width} window={window}"
                       for _, _, heads, kv_heads, width, window in sizes],
             "tokens": [f"batch={batch} length={length}" for batch, length, *_ in sizes]})


def _calls(kind: str, sizes: Sequence[Sequence[int]]) -> list[OpCall]:
    return [call for batch, length, heads, kv_heads, width, window in sizes
            for call in attention(kind, batch, heads, kv_heads, length, length, width, width, "bf16", causal=True,
                                  window=window)]


READER = Reader("attention", frozenset({"gpu", "software", "kernel_source", "latency_us", *_COLUMNS}), read,
                sizes=_COLUMNS[:-1])
