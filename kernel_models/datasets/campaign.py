"""Micro-benchmark tables of ``foretrace campaign``: one Parquet file per family, ``campaign.json`` next to the folder.

Each row becomes the timed operation, and the operation its call, by the rules for a trace's operations. Rows with warm
caches are used. Where one kernel ran, the time is the median between two events, minus the time of an empty pair of
events. Where several ran, it is the kernels' own time by the profiler. On a host it is the 10th percentile: other
processes lengthen a run and never shorten it. Rows that are no single call (optimizers' steps, cross entropy,
overheads) are left out, and so are rows whose kernels are not those of the operation. The table's own split is kept.

The names of a row's kernels (on a CPU: operations) show whether they belong to its operation. A name that shows no
family is accepted; a name of another family, or of another implementation of attention than was forced, is not.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kernel_models.datasets.samples import DataError, Samples
from kernel_models.datasets.tables import LARGEST, Reader, check_sizes, check_texts
from kernel_models.device import DeviceSpec, reported_figure, resolve_device
from kernel_models.families.copy import memset, transfer
from kernel_models.families.recurrent import recurrent
from kernel_models.kernel_names import family_hint
from kernel_models.op_call import Family, OpCall, TablePart
from kernel_models.operation import Operation, backward_calls_of, calls_of, family_of, operation
from tracer.campaign.families import FAMILIES
from tracer.campaign.families.family import Called, Constant, TensorArgument
from tracer.campaign.lab import ZIPF_EXPONENT
from tracer.campaign.results import Index
from tracer.campaign.tables import quickest_visits
from tracer.errors import reason_of
from tracer.input_file import DecodeError, from_json, read_input
from tracer.lookup_data.tables import histogram_of_zipf

if TYPE_CHECKING:
    import pandas

_ALSO: dict[Family, frozenset[Family]] = {
    # Families of kernels that libraries use to implement a family.
    Family.CONV: frozenset({Family.GEMM}),
    Family.ATTENTION: frozenset({Family.GEMM, Family.SOFTMAX}),
    Family.RECURRENT: frozenset({Family.GEMM, Family.ELEMENTWISE}),
    Family.REDUCTION: frozenset({Family.ELEMENTWISE, Family.SORT, Family.COPY}),
    Family.EMBEDDING: frozenset({Family.INDEX, Family.SORT, Family.REDUCTION}),
    Family.INDEX: frozenset({Family.ELEMENTWISE, Family.SORT, Family.EMBEDDING, Family.COPY}),
    Family.SORT: frozenset({Family.INDEX, Family.REDUCTION}),
    Family.COPY: frozenset({Family.ELEMENTWISE, Family.TRANSFER}),
    Family.CONCAT: frozenset({Family.COPY, Family.ELEMENTWISE, Family.TRANSFER}),
    Family.TRANSFER: frozenset({Family.COPY, Family.ELEMENTWISE}),
    Family.MEMSET: frozenset({Family.ELEMENTWISE}),
    Family.RANDOM: frozenset({Family.ELEMENTWISE}),
    Family.LOSS: frozenset({Family.ELEMENTWISE, Family.REDUCTION, Family.SOFTMAX}),
    Family.POOLING: frozenset({Family.REDUCTION, Family.ELEMENTWISE}),
    Family.NORM: frozenset({Family.REDUCTION, Family.ELEMENTWISE}),
    Family.SOFTMAX: frozenset({Family.REDUCTION}),
    Family.OPTIMIZER: frozenset({Family.ELEMENTWISE, Family.REDUCTION}),
    Family.ELEMENTWISE: frozenset({Family.COPY}),
}
_ROCM = r"attn_fwd|bwd_(kernel|preprocess)|[Ff]mha_?([Ff]wd|[Bb]wd)"
"""Attention kernels on AMD's GPUs (AOTriton, Composable Kernel, AITER): both "flash" and "efficient" run them."""
_BACKENDS = {"flash": re.compile(rf"^(?!.*cudnn).*(flash|{_ROCM})"), "cudnn": re.compile(r"cudnn"),
             "efficient": re.compile(rf"fmha|efficient|mem_eff|{_ROCM}")}
_OPERATION = "aten::"


def is_intended(call: OpCall, row: Mapping[str, Any]) -> bool:
    """Return whether any kernel named in a row of a micro-benchmark's table can be the call's; true without any
    name."""
    found = row.get("kernels")
    names = [] if found is None else [str(name) for name in found]
    if not names:
        return True
    on_gpu = [name for name in names if not name.startswith(_OPERATION)]
    if call.family is Family.ATTENTION and row.get("backend") in _BACKENDS and on_gpu:
        told = _BACKENDS[row["backend"]]
        return any(told.search(name) for name in on_gpu)
    wanted = {call.family, Family.OTHER} | _ALSO.get(call.family, frozenset())
    return any(_family(name) in wanted for name in names)


def _family(name: str) -> Family:
    return family_of(name) if name.startswith(_OPERATION) else family_hint(name)


Row = dict[str, Any]
Calls = tuple[OpCall, ...]
_LEAST_US = 0.3  # chosen: shorter than the shortest kernels, so a failed measurement
MOST_TENSORS = 100_000
"""Most tensors in a list of one operation; each becomes an object."""
_GENERATED = "triton_"

_KERNELS: dict[str, Callable[..., Iterable[OpCall]]] = {
    "recurrent": recurrent, "memset": lambda *sizes: [memset(*sizes)], "transfer": lambda *sizes: [transfer(*sizes)]}
"""Kernels without an operator in the framework, by the name in their benchmarks."""


def calls_of_benchmark(family: str, settings: Row) -> Calls:
    """Return the calls that a micro-benchmark with these settings measures: one call, or none if it is no single call.

    Args:
        family: family of the micro-benchmark.
        settings: its settings, or a row of its table, whose kernels show the name of a generated kernel.
    """
    called = FAMILIES[family].called(settings) if family in FAMILIES else None
    if called is None or not called.priced:
        return ()
    if called.name in _KERNELS:
        return tuple(_KERNELS[called.name](*called.arguments))
    if called.name.startswith(_GENERATED) and "kernels" in settings:
        ran = [] if settings["kernels"] is None else map(str, settings["kernels"])
        names = [name for name in ran if name.startswith(_GENERATED)]
        if len(names) != 1:
            return ()
        called = replace(called, name=names[0])
    dtype = str(settings["dtype"])
    op = _recorded(called.recorded or called, dtype)
    calls = (backward_calls_of if called.gradient else calls_of)(op, dtype == "tf32")
    changes = {"accesses": _accesses(settings)} if family == "embedding" else called.call
    return tuple(replace(call, **changes) for call in calls) if len(calls) == 1 else ()


def _recorded(called: Called, dtype: str) -> Operation:
    """Return the operator with its arguments in the form that a profiler records."""
    shapes, dtypes, strides, values = zip(*(_argument(each, dtype) for each in called.arguments), strict=True)
    return operation(called.name, shapes, dtypes, strides, values)


def _argument(argument: Any, dtype: str) -> tuple[Any, str, Any, Any]:
    """Return shape, element type, strides and value of an argument, in the form that ``operation`` takes."""
    if isinstance(argument, TensorArgument):
        return argument.shape, argument.dtype or dtype, argument.strides, None
    if isinstance(argument, list) and isinstance(argument[0], TensorArgument):
        return [tensor.shape for tensor in argument], argument[0].dtype or dtype, None, None
    return None, "", None, argument.name if isinstance(argument, Constant) else argument


def _accesses(settings: Row) -> tuple[TablePart, ...]:
    rows, lookups, pooling = settings["rows"], settings["lookups"], settings["pooling"] or 1
    reuse = histogram_of_zipf(lookups, rows, ZIPF_EXPONENT) if settings["law"] == "zipf" else ()
    return (TablePart(rows, settings["width"], settings["dtype"], lookups, -(-lookups // pooling), pooling, reuse),)


def time_us(row: Row, *, host: bool) -> float:
    """Return the time of a row, µs (see the module); not finite if the row has none."""
    overhead = row.get("event_overhead_us")
    taken_off = float(overhead) if overhead and math.isfinite(overhead) else 0.0
    if host:
        return float(row["p10_us"]) - taken_off
    several, kernels = row.get("kernel_count") or 1.0, row.get("kernel_us")
    if several > 1 and kernels and math.isfinite(kernels):
        return float(kernels)
    return float(row["p50_us"]) - taken_off


def read(frame: pandas.DataFrame, path: Path) -> Iterator[Samples]:
    """Yield a samples object for each session and family of calls; the shape group is the benchmark's sizes."""
    family = path.name.partition(".")[0]
    if family not in FAMILIES:
        return
    sessions = _sessions(path)
    for name in FAMILIES[family].sizes:
        check_sizes(frame, [name], path, least=0, most=MOST_TENSORS if name == "tensors" else LARGEST)
    check_texts(frame, ["variant", *(name for name, choice in FAMILIES[family].choices.items()
                                     if isinstance(choice[0], str) and name in frame)], path)
    for session, rows in quickest_visits(frame).groupby("session", sort=True):
        if not 0 <= int(session) < len(sessions):
            raise DataError(f"{path} names session {session}, which its campaign.json does not have.")
        context = sessions[int(session)]
        hardware = context.get("hardware", {})
        memory, units = (int(reported_figure(hardware, key) or 0) for key in ("total_memory", "multi_processor_count"))
        spec = resolve_device(str(hardware.get("device", "")), memory, units)
        if units and spec.vendor != "host" and units != spec.sm_count:
            raise DataError(f"{path} was measured on {units} of the {spec.sm_count} units of {spec.name}: a part of "
                            "it, whose times are not the device's; foretrace calibrate makes such a part's profile.")
        yield from samples_of(rows, path.name, spec, software_of(context))


def software_of(context: dict[str, Any]) -> str:
    """Return the software of a campaign's session, such as "torch 2.9.0"."""
    return f"torch {context.get('software', {}).get('torch', '')}".strip()


def samples_of(rows: pandas.DataFrame, name: str, spec: DeviceSpec, software: str) -> Iterator[Samples]:
    """Yield the samples of one session's warm rows of a table, by family of calls.

    Args:
        rows: rows as ``tracer.campaign.tables`` describes them.
        name: name of the table, "<family>.…".
        spec: the measured device.
        software: see ``software_of``.
    """
    host = spec.vendor == "host"
    found: dict[str, list[tuple[OpCall, float, str, bool]]] = {}
    for row in map(_with_own_size, rows.to_dict("records")):
        calls, time = calls_of_benchmark(name.partition(".")[0], row), time_us(row, host=host)
        sized = bool(calls) and "unsized" not in calls[0].flags
        if sized and math.isfinite(time) and time >= _LEAST_US and is_intended(calls[0], row):
            sizes = "x".join(str(row[column]) for column in row if column in _SHAPE)
            found.setdefault(calls[0].family.value, []).append((calls[0], time, sizes, row["split"] == "held-out"))
    for mine in found.values():
        yield Samples(spec.name, software, name, [call for call, *_ in mine],
                      np.array([time for _, time, *_ in mine]), {"sizes": [group for *_, group, _ in mine]},
                      np.array([held for *_, held in mine], bool))


def _with_own_size(row: Row) -> Row:
    """Return a row whose bytes count each copied byte once: a table counts a copy within the device twice."""
    if "direction" in row:
        return {**row, "bytes": int(row["bytes"]) // (2 if row["direction"] == "d2d" else 1)}
    return row


_SHAPE = frozenset({
    "m", "n", "k", "batch", "heads", "kv_heads", "seq", "kv_seq", "head_dim", "channels", "out_channels", "size",
    "kernel", "stride", "groups", "rows", "width", "elements", "lookups", "pooling", "count", "bytes", "tensors",
    "factor", "classes", "input", "hidden", "layers"})


def _sessions(path: Path) -> list[dict[str, Any]]:
    index = path.resolve().parent.parent / "campaign.json"
    try:
        sessions = from_json(read_input(index), Index).sessions
    except (OSError, DecodeError) as error:
        raise DataError(f"{path} is a campaign's table, and the campaign.json that names its device cannot be read "
                        f"beside its folder ({reason_of(error, 100)}); keep the campaign's directory "
                        "together.") from None
    return sessions


READER = Reader("micro-benchmarks", frozenset({"id", "session", "split", "variant", "p50_us"}), read,
                takes_all=False)
