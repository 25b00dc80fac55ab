"""Micro-benchmark tables of ``foretrace campaign``: one Parquet file a family, ``campaign.json`` beside their folder.

Each row becomes the operation that was timed, and that its call, by the same rules as a trace's operations. Rows are
taken warm. The time is the median between two events less what an empty pair of events takes, where one kernel ran,
and the kernels' own time by the profiler, where several did. Of a host the 10th percentile is taken: other processes
lengthen a run and never shorten it. What is no single call (optimizers' steps, cross entropy, overheads) is left out,
and so are rows whose kernels are not those of the operation. The table's own split is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from kernel_models.datasets.intended import is_intended
from kernel_models.datasets.samples import DataError, Samples
from kernel_models.datasets.tables import LARGEST, Reader, check_sizes
from kernel_models.device import DeviceSpec, resolve_device
from kernel_models.families.attention import attention
from kernel_models.families.copy import memset, transfer
from kernel_models.families.gemm import gemm
from kernel_models.families.pooling import pooling
from kernel_models.families.recurrent import recurrent
from kernel_models.families.reduction import loss
from kernel_models.op_call import OpCall, TablePart
from kernel_models.operation import backward_calls_of, calls_of, operation
from tracer.campaign.families import FAMILIES
from tracer.campaign.lab import ZIPF_EXPONENT
from tracer.campaign.tables import quickest_visits
from tracer.decode import DecodeError, from_json
from tracer.errors import reason_of
from tracer.input_file import read_input
from tracer.lookup_data.tables import histogram_of_zipf

if TYPE_CHECKING:
    import pandas

Row = dict[str, Any]
Calls = tuple[OpCall, ...]
_LEAST_US = 0.3
MOST_TENSORS = 100_000
"""In a list that one operation works on; each becomes an object."""
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
    table, chosen = (row["rows"], row["width"]), (row["lookups"],)
    dtypes, sparse = [row["dtype"], "int64", "int64"], row["op"] == "backward_sparse"
    bags = -(-row["lookups"] // row["pooling"]) if row["pooling"] else row["lookups"]
    if row["pooling"]:
        values = [None, None, None, False, 0, sparse]
        calls = _of(row, "aten::_embedding_bag", [table, chosen, (bags,)], values, None, dtypes)
    else:
        calls = _of(row, "aten::embedding", [table, chosen], [None, None, None, False, sparse], None, dtypes)
    reuse = histogram_of_zipf(row["lookups"], row["rows"], ZIPF_EXPONENT) if row["law"] == "zipf" else ()
    part = TablePart(row["rows"], row["width"], row["dtype"], row["lookups"], bags, row["pooling"] or 1, reuse)
    return tuple(replace(call, accesses=(part,)) for call in calls)


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


def _concat(row: Row) -> Calls:
    part = (row["rows"], row["width"])
    return calls_of(operation("aten::cat", [[part] * row["tensors"]], row["dtype"], None,
                              [None, 0 if row["along"] == "rows" else 1]))


def _memset(row: Row) -> Calls:
    return (memset(int(row["bytes"])),)


def _pooling(row: Row) -> Calls:
    size, stride, kind = row["size"], row["stride"], row["pool"]
    back = "_backward" if row["op"] == "backward" else ""
    out = max(size // stride, 1) if kind == "adaptive_avg" else (size - row["kernel"]) // stride + 1
    window = row["kernel"] ** 2 if kind != "adaptive_avg" else -(-size * size // (out * out))
    return tuple(pooling(f"{kind}{back}", row["batch"] * row["channels"], size * size, out * out, window, row["dtype"],
                         _image_flags(row)))


def _interpolate(row: Row) -> Calls:
    x, out = (row["batch"], row["channels"], row["size"], row["size"]), [row["size"] * row["factor"]] * 2
    back, mode = row["op"] == "backward", f"aten::upsample_{row['mode']}2d"
    source = (*x[:2], *out) if back else x
    found = calls_of(operation(f"{mode}_backward" if back else mode, [source], row["dtype"], None,
                               [None, out, list(x)] if back else [None, out]))
    return tuple(replace(call, flags=_image_flags(row)) for call in found)


def _image_flags(row: Row) -> tuple[str, ...]:
    return ("nhwc",) if row["channels_last"] else ()


def _recurrent(row: Row) -> Calls:
    kind = f"{row['cell']}{'_backward' if row['op'] == 'backward' else ''}"
    return tuple(recurrent(kind, row["seq"], row["batch"], row["input"], row["hidden"], row["layers"], 1, row["dtype"]))


def _loss(row: Row) -> Calls:
    back = "_backward" if row["op"] == "backward" else ""
    if row["loss"] == "nll":
        return tuple(loss(f"nll_loss{back}", row["rows"], row["classes"], row["dtype"]))
    return tuple(loss(f"{row['loss']}_loss{back}", row["rows"] * row["classes"], 1, row["dtype"]))


_FOREACH_LISTS = {"add_": 2, "addcmul_": 3, "addcdiv_": 3, "lerp_": 2, "fused_adamw_": 4, "fused_sgd_": 3}


def _foreach(row: Row) -> Calls:
    one: list[tuple[int, ...]] = [(row["elements"],)] * row["tensors"]
    op = row["op"]
    name = f"aten::_{op}" if op.startswith("fused") else f"aten::_foreach_{op}"
    return calls_of(operation(name, [one] * _FOREACH_LISTS.get(op, 1), row["dtype"]))


_FUSED_TENSORS = {"pointwise": (3, 1), "norm": (2, 1), "softmax": (2, 0)}


def _fused(row: Row) -> Calls:
    """Return what one generated kernel is given: whole tensors, a vector of the width, and the output."""
    names = [name for name in row.get("kernels", ()) or () if str(name).startswith("triton_")]
    if len(names) != 1:
        return ()
    whole, vectors = _FUSED_TENSORS[row["chain"]]
    x = (row["rows"], row["width"])
    return calls_of(operation(str(names[0]), [*[x] * whole, *[(row["width"],)] * vectors, x], row["dtype"]))


def _copy(row: Row) -> Calls:
    side = () if row["direction"] == "d2d" else (str(row["memory"]),)
    return (transfer(row["direction"], row["bytes"], side),)


_CALLS: dict[str, Callable[[Row], Calls]] = {
    "gemm": _gemm, "attention": _attention, "convolution": _convolution, "norm": _norm, "channel_norm": _channel_norm,
    "softmax": _softmax, "elementwise": _elementwise, "reduction": _reduction, "random": _random,
    "embedding": _embedding, "index": _index, "sort": _sort, "copy": _copy, "concat": _concat, "memset": _memset,
    "pooling": _pooling, "interpolate": _interpolate, "recurrent": _recurrent, "loss": _loss, "foreach": _foreach,
    "fused": _fused,
}


def calls_of_benchmark(family: str, settings: Row) -> Calls:
    """Return what a micro-benchmark with these settings measures: one call, or none where it is no single one."""
    describe = _CALLS.get(family)
    found = () if describe is None else describe(settings)
    return found if len(found) == 1 else ()


def time_us(row: Row, *, host: bool) -> float:
    """The time of a row, µs (see above); not finite where it has none."""
    overhead = row.get("event_overhead_us")
    taken_off = float(overhead) if overhead and math.isfinite(overhead) else 0.0
    if host:
        return float(row["p10_us"]) - taken_off
    several, kernels = row.get("kernel_count") or 1.0, row.get("kernel_us")
    if several > 1 and kernels and math.isfinite(kernels):
        return float(kernels)
    return float(row["p50_us"]) - taken_off


def read(frame: pandas.DataFrame, path: Path) -> Iterator[Samples]:
    """One samples object for each session and family of calls; the shape group is the benchmark's sizes."""
    family = path.name.partition(".")[0]
    if family not in _CALLS:
        return
    sessions = _sessions(path)
    for name in FAMILIES[family].sizes:
        check_sizes(frame, [name], path, least=0, most=MOST_TENSORS if name == "tensors" else LARGEST)
    for session, rows in quickest_visits(frame).groupby("session", sort=True):
        if not 0 <= int(session) < len(sessions):
            raise DataError(f"{path} names session {session}, which its campaign.json does not have.")
        context = sessions[int(session)]
        spec = resolve_device(str(context.get("hardware", {}).get("device", "")))
        yield from samples_of(rows, path.name, spec, software_of(context))


def software_of(context: dict[str, Any]) -> str:
    """The software of a campaign's session, such as "torch 2.9.0"."""
    return f"torch {context.get('software', {}).get('torch', '')}".strip()


def samples_of(rows: pandas.DataFrame, name: str, spec: DeviceSpec, software: str) -> Iterator[Samples]:
    """Samples of one session's warm rows of a table, by family of calls.

    Args:
        rows: as ``tracer.campaign.tables`` describes them.
        name: of the table, "<family>.…".
        spec: what they were measured on.
        software: see ``software_of``.
    """
    host = spec.vendor == "host"
    found: dict[str, list[tuple[OpCall, float, str, bool]]] = {}
    for row in map(_with_own_size, rows.to_dict("records")):
        calls, time = calls_of_benchmark(name.partition(".")[0], row), time_us(row, host=host)
        if calls and math.isfinite(time) and time >= _LEAST_US and is_intended(calls[0], row):
            sizes = "x".join(str(row[column]) for column in row if column in _SHAPE)
            found.setdefault(calls[0].family.value, []).append((calls[0], time, sizes, row["split"] == "held-out"))
    for mine in found.values():
        yield Samples(spec.name, software, name, [call for call, *_ in mine],
                      np.array([time for _, time, *_ in mine]), {"sizes": [group for *_, group, _ in mine]},
                      np.array([held for *_, held in mine], bool))


def _with_own_size(row: Row) -> Row:
    """A table's column of bytes is what is moved; a copy within the device moves twice its size."""
    if "direction" in row:
        return {**row, "bytes": int(row["bytes"]) // (2 if row["direction"] == "d2d" else 1)}
    return row


_SHAPE = frozenset({
    "m", "n", "k", "batch", "heads", "kv_heads", "seq", "kv_seq", "head_dim", "channels", "out_channels", "size",
    "kernel", "stride", "groups", "rows", "width", "elements", "lookups", "pooling", "count", "bytes", "tensors",
    "factor", "classes", "input", "hidden", "layers"})


class _Index(msgspec.Struct):
    sessions: list[dict[str, Any]]


def _sessions(path: Path) -> list[dict[str, Any]]:
    index = path.resolve().parent.parent / "campaign.json"
    try:
        sessions = from_json(read_input(index), _Index).sessions
    except (OSError, DecodeError) as error:
        raise DataError(f"{path} is a campaign's table, and the campaign.json that names its device cannot be read "
                        f"beside its folder ({reason_of(error, 100)}); keep the campaign's directory "
                        "together.") from None
    return sessions


READER = Reader("micro-benchmarks", frozenset({"id", "session", "split", "variant", "p50_us"}), read,
                takes_all=False)
