"""Micro-benchmark tables of ``foretrace campaign``: one Parquet file a family, ``campaign.json`` beside their folder.

Each row becomes the operation that was timed, and that its call, by the same rules as a trace's operations. Rows are
taken warm. The time is the median between two events less what an empty pair of events takes, where one kernel ran,
and the kernels' own time by the profiler, where several did. What is no single call (optimizers as a loop, fused
chains, overheads) is left out. The table's own split is kept.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kernel_models.datasets.samples import DataError, Samples
from kernel_models.datasets.tables import Reader
from kernel_models.device import resolve_device
from kernel_models.families.attention import attention
from kernel_models.families.copy import transfer
from kernel_models.families.gemm import gemm
from kernel_models.op_call import OpCall
from kernel_models.operation import backward_calls_of, calls_of, operation

if TYPE_CHECKING:
    import pandas

Row = dict[str, Any]
Calls = tuple[OpCall, ...]
_LEAST_US = 0.3
_SHORT = {"cast_fp32": "fp32", "cast_bf16": "bf16", "cast_fp16": "fp16"}


def _of(row: Row, name: str, shapes: list[Any], values: list[Any] | None = None, strides: list[Any] | None = None,
        dtypes: Any = None) -> Calls:
    """The calls of an operation, or of its gradient for the backward benchmarks."""
    op = operation(name, shapes, dtypes or row["dtype"], strides, values)
    return backward_calls_of(op) if str(row.get("op", "")).startswith("backward") else calls_of(op)


def _gemm(row: Row) -> Calls:
    return tuple(gemm(row["batch"], row["m"], row["n"], row["k"], row["dtype"], row["layout"],
                      added="bias" if row["op"] == "addmm" else "", out_dtype="bf16" if row["dtype"] == "fp8" else ""))


def _attention(row: Row) -> Calls:
    head = row["head_dim"]
    return tuple(attention(f"{row['backend']}_{row['op']}", row["batch"], row["heads"], row["kv_heads"], row["seq"],
                           row["kv_seq"] or row["seq"], head, head, row["dtype"], causal=bool(row["causal"])))


def _convolution(row: Row) -> Calls:
    batch, channels, outs, size = (row[name] for name in ("batch", "channels", "out_channels", "size"))
    kernel, stride, groups, pad = row["kernel"], row["stride"], row["groups"], row["kernel"] // 2
    out = (size + 2 * pad - kernel) // stride + 1
    image, weight = (batch, channels, size, size), (outs, channels // groups, kernel, kernel)
    result = (batch, outs, out, out)
    last = bool(row["channels_last"])
    tail = [None, [stride] * 2, [pad] * 2, [1, 1], False, [0, 0], groups]
    if row["op"] == "forward":
        strides = [_channels_last(image), _channels_last(weight)] if last else None
        return calls_of(operation("aten::convolution", [image, weight], row["dtype"], strides, [None, None, *tail]),
                        row["dtype"] == "tf32")
    strides = [_channels_last(shape) for shape in (result, image, weight)] if last else None
    mask = [row["op"] == "dgrad", row["op"] == "wgrad", False]
    return calls_of(operation("aten::convolution_backward", [result, image, weight], row["dtype"], strides,
                              [None, None, None, *tail, mask]), row["dtype"] == "tf32")


def _channels_last(shape: tuple[int, ...]) -> tuple[int, ...]:
    _, channels, high, wide = shape
    return channels * high * wide, 1, wide * channels, channels


def _norm(row: Row) -> Calls:
    x, weight = (row["rows"], row["width"]), (row["width"],)
    if row["norm"] == "rms":
        return _of(row, "aten::rms_norm", [x, None, weight], [None, [row["width"]], None])
    return _of(row, "aten::native_layer_norm", [x, None, weight, weight], [None, [row["width"]], None, None])


def _channel_norm(row: Row) -> Calls:
    batch, channels, size = row["batch"], row["channels"], row["size"]
    x, weight = (batch, channels, size, size), (channels,)
    strides = [_channels_last(x)] if row["channels_last"] else None
    if row["norm"] == "batch":
        return _of(row, "aten::native_batch_norm", [x, weight, weight, weight, weight], [None] * 5 + [True], strides,
                   [row["dtype"], *["fp32"] * 4])
    return _of(row, "aten::native_group_norm", [x, weight, weight],
               [None, None, None, batch, channels, size * size, min(row["groups"], channels)], strides)


def _softmax(row: Row) -> Calls:
    x, name = (row["rows"], row["width"]), "_log_softmax" if row["log"] else "_softmax"
    if row["op"] == "backward":
        return calls_of(operation(f"aten::{name}_backward_data", [x, x], row["dtype"], None, [None, None, -1]))
    return calls_of(operation(f"aten::{name}", [x], row["dtype"], None, [None, -1, False]))


def _elementwise(row: Row) -> Calls:
    rows, width, op = row["rows"], row["width"], row["op"]
    whole = (rows, width)
    last = {"row": (1, width), "column": (rows, 1)}.get(row["layout"], whole)
    stride = (1, rows) if row["layout"] == "transposed" else None
    plain = (width, 1) if stride else None
    if op in ("add", "mul", "gelu_backward"):
        return calls_of(operation(f"aten::{op}", [whole, last], row["dtype"], [plain, stride] if stride else None))
    if op in _SHORT or op == "copy":
        target = _SHORT.get(str(op)) or str(row["dtype"])
        return calls_of(operation("aten::copy_", [whole, whole], [target, row["dtype"]],
                                  [plain, stride] if stride else None))
    if op == "add_inplace":
        return calls_of(operation("aten::add_", [whole], row["dtype"], None, [None, 1e-6]))
    name = "add" if op == "add_scalar" else op
    return calls_of(operation(f"aten::{name}", [whole], row["dtype"], [stride] if stride else None,
                              [None, 1.5] if op == "add_scalar" else None))


def _reduction(row: Row) -> Calls:
    x, over, op = (row["rows"], row["width"]), row["over"], row["op"]
    dim = {"width": 1, "rows": 0}.get(over)
    if op in ("cumsum", "argmax"):
        return calls_of(operation(f"aten::{op}", [x], row["dtype"], None, [None, 1 if dim is None else dim]))
    if op == "norm":
        return calls_of(operation("aten::linalg_vector_norm", [x], row["dtype"], None,
                                  [None, 2, None if dim is None else [dim]]))
    return calls_of(operation(f"aten::{op}", [x], row["dtype"], None, [None, None if dim is None else [dim]]))


def _random(row: Row) -> Calls:
    x, op = (row["elements"],), row["op"]
    if op == "dropout":
        return calls_of(operation("aten::native_dropout", [x], row["dtype"], None, [None, 0.1, True]))
    if op == "randint":
        return ()
    return calls_of(operation(f"aten::{op}_", [x], row["dtype"]))


def _embedding(row: Row) -> Calls:
    if row["op"] == "backward_sparse" or row["law"] != "uniform":
        return ()
    table, chosen = (row["rows"], row["width"]), (row["lookups"],)
    dtypes = [row["dtype"], "int64", "int64"]
    if row["pooling"]:
        bags = (-(-row["lookups"] // row["pooling"]),)
        return _of(row, "aten::_embedding_bag", [table, chosen, bags], None, None, dtypes)
    return _of(row, "aten::embedding", [table, chosen], None, None, dtypes)


def _index(row: Row) -> Calls:
    if row["law"] != "uniform":
        return ()
    table, chosen, wide = (row["rows"], row["width"]), (row["count"],), (row["count"], row["width"])
    op, dtype = row["op"], row["dtype"]
    if op == "index_select":
        return calls_of(operation("aten::index_select", [table, None, chosen], [dtype, "", "int64"], None,
                                  [None, 0, None]))
    if op == "gather":
        return calls_of(operation("aten::gather", [table, None, wide], [dtype, "", "int64"], None, [None, 0, None]))
    if op in ("scatter", "scatter_add"):
        return calls_of(operation(f"aten::{op}_", [table, None, wide, wide], [dtype, "", "int64", dtype], None,
                                  [None, 0, None, None]))
    if op == "index_add":
        return calls_of(operation("aten::index_add_", [table, None, chosen, wide], [dtype, "", "int64", dtype], None,
                                  [None, 0, None, None]))
    return ()


def _sort(row: Row) -> Calls:
    x = (row["rows"], row["width"])
    if row["op"] == "topk":
        return calls_of(operation("aten::topk", [x], row["dtype"], None, [None, min(row["k"], row["width"]), -1]))
    return calls_of(operation("aten::sort", [x], row["dtype"], None, [None, -1]))


def _copy(row: Row) -> Calls:
    side = () if row["direction"] == "d2d" else (str(row["memory"]),)
    return tuple(transfer(row["direction"], row["bytes"], side) for _ in (0,))


_CALLS: dict[str, Callable[[Row], Calls]] = {
    "gemm": _gemm, "attention": _attention, "convolution": _convolution, "norm": _norm, "channel_norm": _channel_norm,
    "softmax": _softmax, "elementwise": _elementwise, "reduction": _reduction, "random": _random,
    "embedding": _embedding, "index": _index, "sort": _sort, "copy": _copy,
}


def _time_us(row: Row) -> float:
    several = row.get("kernel_count") or 1.0
    kernels = row.get("kernel_us")
    if several > 1 and kernels and math.isfinite(kernels):
        return float(kernels)
    overhead = row.get("event_overhead_us")
    return float(row["p50_us"]) - (float(overhead) if overhead and math.isfinite(overhead) else 0.0)


def read(frame: pandas.DataFrame, path: Path) -> Iterator[Samples]:
    """One samples object for each session and family of calls; the shape group is the benchmark's sizes."""
    describe = _CALLS.get(path.name.partition(".")[0])
    if describe is None:
        return
    sessions = _sessions(path)
    for session, rows in frame[frame.variant == "warm"].groupby("session", sort=True):
        if not 0 <= int(session) < len(sessions):
            raise DataError(f"{path} names session {session}, which its campaign.json does not have.")
        context = sessions[int(session)]
        spec = resolve_device(str(context.get("hardware", {}).get("device", "")))
        torch = context.get("software", {}).get("torch", "")
        found: dict[str, list[tuple[OpCall, float, str, bool]]] = {}
        for row in rows.to_dict("records"):
            calls, time = describe(row), _time_us(row)
            if len(calls) == 1 and math.isfinite(time) and time >= _LEAST_US:
                sizes = "x".join(str(row[name]) for name in row if name in _SHAPE)
                found.setdefault(calls[0].family.value, []).append((calls[0], time, sizes, row["split"] == "held-out"))
        for mine in found.values():
            yield Samples(spec.name, f"torch {torch}".strip(), path.name, [call for call, *_ in mine],
                          np.array([time for _, time, *_ in mine]), {"sizes": [group for *_, group, _ in mine]},
                          np.array([held for *_, held in mine], bool))


_SHAPE = frozenset({
    "m", "n", "k", "batch", "heads", "kv_heads", "seq", "kv_seq", "head_dim", "channels", "out_channels", "size",
    "kernel", "stride", "groups", "rows", "width", "elements", "lookups", "pooling", "count", "bytes"})


def _sessions(path: Path) -> list[dict[str, Any]]:
    index = path.resolve().parent.parent / "campaign.json"
    try:
        sessions = json.loads(index.read_text(encoding="utf-8"))["sessions"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is a campaign's table, and the campaign.json that names its device cannot be read "
                        f"beside its folder ({str(error)[:100]}); keep the campaign's directory together.") from None
    return [session if isinstance(session, dict) else {} for session in sessions]


READER = Reader("micro-benchmarks", frozenset({"id", "session", "split", "variant", "p50_us"}), read)
