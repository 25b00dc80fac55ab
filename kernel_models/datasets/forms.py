"""The forms of tables that can be read, each recognised by its columns."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kernel_models.datasets import campaign
from kernel_models.datasets.samples import DataError, DeferredCalls, Samples, by_family
from kernel_models.datasets.tables import DEVICE, LARGEST, Reader, check_sizes
from kernel_models.device import DeviceSpec, resolve_device
from kernel_models.families.attention import attention
from kernel_models.families.elementwise import elementwise
from kernel_models.families.embedding import embedding
from kernel_models.families.gemm import gemm
from kernel_models.families.reduction import norm, softmax
from kernel_models.kernel_names import uses_tf32
from kernel_models.op_call import DIMENSIONS, Family, OpCall, TensorSpec, short_dtype
from kernel_models.operation import Operation, calls_of
from tracer.errors import reason_of
from tracer.table_input import TableInputError, read_frame
from tracer.views import Argument

if TYPE_CHECKING:
    import pandas


def _read_products(frame: pandas.DataFrame, path: Path) -> Iterator[Samples]:
    """Read linear layers' forward products: one samples object for each device, stack and dtype.

    The shape group is the weight, (n, k).
    """
    for (gpu, software, kernel, dtype), rows in frame.groupby(["gpu", "software", "kernel_source", "dtype"], sort=True):
        name = short_dtype(str(dtype))
        if not name:
            raise DataError(f"{path} names the element type {str(dtype)[:40]!r}, which foretrace does not know; write "
                            "it like bfloat16 or fp8.")
        out = "bf16" if name == "fp8" else ""
        sizes = list(zip(rows.m.tolist(), rows.n.tolist(), rows.k.tolist(), strict=True))
        yield Samples(
            resolve_device(str(gpu)).name, f"{software}/{kernel}", path.name,
            DeferredCalls(len(sizes), partial(_product_calls, sizes, name, out)),
            rows.latency_us.to_numpy(float), {"site": [f"n={n} k={k}" for _, n, k in sizes]})


def _product_calls(sizes: Sequence[tuple[int, int, int]], dtype: str, out_dtype: str) -> list[OpCall]:
    return [call for m, n, k in sizes for call in gemm(1, m, n, k, dtype, "nt", out_dtype=out_dtype)]


_DECODING_COLUMNS = ("batch_size", "num_heads", "num_kv_heads", "head_dim", "context_length")
LATENT_SIZE, LATENT_VALUES = 576, 512
"""Features of a latent cache's token, and how many of them also serve as values (DeepSeek-V2 and V3)."""
_ALIASES = MappingProxyType({
    "gpu": ("device",), "context_length": ("context_len", "kv_len", "kv_seq_len", "cache_len", "context"),
    "num_kv_heads": ("num_key_value_heads",), "num_heads": ("num_q_heads",), "kv_dtype": ("kv_cache_dtype",),
    "window_size": ("window",)})


def _filled(column: pandas.Series, value: str | int) -> pandas.Series:
    """Return a column with ``value`` in its empty cells."""
    # `fillna` would guess another type for a column of objects, such as an empty one, and pandas warns of that.
    return column.where(column.notna(), value) if column.dtype == object else column.fillna(value)


def _read_decoding(frame: pandas.DataFrame, path: Path) -> Iterator[Samples]:
    """Read decoding attention, a row for one token of every sequence over its cache: one object per device and kernel.

    Optional columns: ``software``, ``kernel_source``, ``dtype`` (of the products; "bf16"), ``kv_dtype`` (of the cache;
    as the products), ``window_size`` (0 or empty: all), ``q_len`` (tokens of the step; 1), ``v_head_dim`` (512 of 576:
    a latent cache, as in MLA).

    Two groupings: "heads" (heads, key/value heads, head size, window, type) and "tokens" (batch and context).
    """
    usual: dict[str, str | int] = {"software": "", "kernel_source": "", "dtype": "bf16", "kv_dtype": "",
                                   "window_size": 0, "q_len": 1, "v_head_dim": 0}
    frame = frame.assign(**{name: _filled(frame[name], value) if name in frame else value
                            for name, value in usual.items()})
    check_sizes(frame, ("window_size", "v_head_dim"), path, least=0)
    check_sizes(frame, ("q_len",), path)
    for (gpu, software, kernel), rows in frame.groupby(["gpu", "software", "kernel_source"], sort=True):
        device = resolve_device(str(gpu))
        calls = [_decoding_call(row) for row in rows.to_dict("records")]
        yield Samples(
            device.name, "/".join(part for part in (str(software), str(kernel)) if part), path.name, calls,
            rows.latency_us.to_numpy(float),
            {"heads": [f"heads={c.dims[1]} kv={c.dims[2]} d={c.dims[5]} window={c.dims[7]}" for c in calls],
             "tokens": [f"batch={c.dims[0]} context={c.dims[4]}" for c in calls]})


def _decoding_call(row: dict[str, Any]) -> OpCall:
    batch, heads, kv_heads, size, context = (int(row[name]) for name in _DECODING_COLUMNS)
    dtype = short_dtype(str(row["dtype"])) or "bf16"
    v_size = int(row["v_head_dim"]) or (LATENT_VALUES if size == LATENT_SIZE else size)
    latent = v_size < size and kv_heads == 1
    # A latent cache has one head, which kernels read once for all queries.
    return next(attention(
        "mla_forward" if latent else "paged_forward", batch, heads, kv_heads, int(row["q_len"]), context, size, v_size,
        dtype, causal=True, window=int(row["window_size"]), flags=("latent",) if latent else (),
        kv_dtype=short_dtype(str(row["kv_dtype"]))))


_PROMPTS_COLUMNS = ("batch_size", "seq_len", "num_heads", "num_kv_heads", "head_dim", "window_size")


def _read_prompts(frame: pandas.DataFrame, path: Path) -> Iterator[Samples]:
    """Read causal attention over whole prompts: one samples object for each device, stack and kernel.

    A window of NaN or 0 means full attention.

    Two groupings: "heads" (heads, key/value heads, head size, window) and "tokens" (batch and length).
    """
    frame = frame.assign(window_size=_filled(frame.window_size, 0))
    check_sizes(frame, ("window_size",), path, least=0)
    for (gpu, software, kernel), rows in frame.groupby(["gpu", "software", "kernel_source"], sort=True):
        device = resolve_device(str(gpu))
        # Servers run FlashAttention-3 on every GPU that supports it.
        kind = "flash3_forward" if device.architecture == "hopper" else "flash_forward"
        sizes = rows[list(_PROMPTS_COLUMNS)].astype("int64").to_numpy().tolist()
        yield Samples(
            device.name, f"{software}/{kernel}", path.name,
            DeferredCalls(len(sizes), partial(_prompt_calls, kind, sizes)),
            rows.latency_us.to_numpy(float),
            {"heads": [f"heads={heads} kv={kv_heads} d={width} window={window}"
                       for _, _, heads, kv_heads, width, window in sizes],
             "tokens": [f"batch={batch} length={length}" for batch, length, *_ in sizes]})


def _prompt_calls(kind: str, sizes: Sequence[Sequence[int]]) -> list[OpCall]:
    return [call for batch, length, heads, kv_heads, width, window in sizes
            for call in attention(kind, batch, heads, kv_heads, length, length, width, width, "bf16", causal=True,
                                  window=window)]


DEVICES = {"a100": "a100-pcie-80g"}
"""Ambiguous names. Vidur's ``a100`` is assumed to be the PCIe card with 80 GB: its paper (MLSys 2024) is understood to
have measured on Azure's NC A100 v4, which have those. Its repository has both nodes with pairwise NVLink and DGX A100,
and does not state which of them the tables are from."""
_GROUPS = {"gemm": ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj")}
_SIZES = ("n_head", "n_kv_head", "n_embd", "n_expanded_embd", "vocab_size", "use_gated_mlp", "num_tokens",
          "num_tensor_parallel_workers")


class _Layer(NamedTuple):
    heads: int
    kv_heads: int
    width: int
    expanded: int
    vocabulary: int
    gated: int
    tokens: int
    workers: int


def device_of(gpu: str) -> DeviceSpec:
    """Return the device that a name in these tables means; see ``DEVICES``."""
    return resolve_device(DEVICES.get(gpu, gpu))


def _block_call(op: str, layer: _Layer) -> Iterator[OpCall]:
    """Yield the call of one operation on one worker."""
    tokens, width, workers, dtype = layer.tokens, layer.width, layer.workers, "fp16"
    head = width // layer.heads
    heads = layer.heads // workers + 2 * max(layer.kv_heads // workers, 1)
    expanded = layer.expanded // workers
    if op == "attn_pre_proj":
        yield from gemm(1, tokens, heads * head, width, dtype, "nt")
    elif op == "attn_post_proj":
        yield from gemm(1, tokens, width, width // workers, dtype, "nt")
    elif op == "mlp_up_proj":
        yield from gemm(1, tokens, expanded * (2 if layer.gated else 1), width, dtype, "nt")
    elif op == "mlp_down_proj":
        yield from gemm(1, tokens, width, expanded, dtype, "nt")
    elif op == "mlp_act":
        inputs = TensorSpec((tokens, expanded * (2 if layer.gated else 1)), dtype)
        yield from elementwise("silu_and_mul" if layer.gated else "gelu", [inputs], (tokens, expanded), dtype)
    elif op == "add":
        whole = TensorSpec((tokens, width), dtype)
        yield from elementwise("add", [whole, whole])
    elif op == "attn_rope":
        rotated = (layer.heads // workers + max(layer.kv_heads // workers, 1)) * head
        yield from elementwise("rotary_embedding", [TensorSpec((tokens, rotated), dtype)])
    elif op == "emb":
        yield from embedding("embedding", tokens, tokens, layer.vocabulary // workers, width, 1, dtype, "int64",
                             ("parallel",) if workers > 1 else ())
    else:
        kind = "rms_norm" if layer.gated else "layer_norm"
        yield from norm(kind, tokens, width, dtype, width, bias=not layer.gated)


def _read_blocks(frame: pandas.DataFrame, path: Path) -> Iterator[Samples]:
    """Read Vidur's fp16 operations of one layer by tokens and tensor-parallel workers.

    ``op`` names the timed operation (their ``sarathi`` model): projections are linear layers split among the workers,
    norms and the residual addition are not split. Times are quantised to 0.5 or 1 µs. One samples object for each
    device and operation, and one for all projections. The shape group is the model.
    """
    group = {op: name for name, ops in _GROUPS.items() for op in ops}
    for (gpu, _), rows in frame.groupby(["gpu", frame.op.map(lambda op: group.get(op, op))], sort=True):
        layers = [_Layer(*(int(size) for size in sizes)) for sizes in rows[list(_SIZES)].to_numpy().tolist()]
        calls = [call for op, layer in zip(rows.op, layers, strict=True) for call in _block_call(op, layer)]
        software = "vidur" if calls[0].family is Family.GEMM else f"vidur/{rows.op.iloc[0]}"
        yield Samples(device_of(str(gpu)).name, software, path.name, calls, rows.latency_us.to_numpy(float),
                      {"model": [str(model) for model in rows.model]})


_ONE_INPUT = ("relu", "tanh", "gelu", "powu", "mulu", "divu", "addu", "pow")
_TWO_INPUTS = ("add", "mul", "div")


def _neusight_calls(op: str, b: int, h: int, m: int, n: int, k: int) -> Iterator[OpCall]:
    if op == "bmm":
        yield from gemm(b, m, k, n, "fp32", "nn")
    elif op == "linear":
        yield from gemm(1, m, k, n, "fp32", "nt", added="bias")
    elif op == "softmax":
        yield from softmax("softmax", TensorSpec((b, h), "fp32"), 1)
    elif op == "ln":
        yield from norm("layer_norm", b, h, "fp32", h)
    else:
        whole = TensorSpec((b, h), "fp32")
        yield from elementwise(op.removesuffix("u"), [whole, whole] if op in _TWO_INPUTS else [whole])


def _read_neusight(frame: pandas.DataFrame, path: Path) -> Iterator[Samples]:
    """Read NeuSight's fp32 kernels, on GPUs from P4 to L4: one samples object for each device and kind.

    In products ``N`` is the contraction and ``K`` the output's width. Convolutions have no shapes and are left out.
    Test rows of their split are never fitted to. The shape group is the sizes.
    """
    known = frame[frame.OPName.isin({"bmm", "linear", "softmax", "ln", *_ONE_INPUT, *_TWO_INPUTS})]
    sizes = ["B", "H", "M", "N", "K"]
    for name in sizes:
        check_sizes(known[known[name].notna()], [name], path, least=0)
    known = known.assign(**known[sizes].astype("float64").fillna(1))
    family = known.OPName.map(lambda op: op if op in ("softmax", "ln") else
                              "gemm" if op in ("bmm", "linear") else "elementwise")
    for (gpu, _), rows in known.groupby(["Device", family], sort=True):
        # Column M counts a linear layer's rows if it has a value, else B does.
        shapes = rows[sizes].astype("int64").to_numpy().tolist()
        calls = [call for op, shape in zip(rows.OPName, shapes, strict=True) for call in _neusight_calls(op, *shape)]
        yield Samples(resolve_device(str(gpu)).name, "neusight", path.name, calls, rows.latency_us.to_numpy(float),
                      {"shape": ["x".join(map(str, call.dims)) for call in calls]},
                      np.array(rows.split == "test", bool))


_ARGUMENTS = ("Input Dims", "Input type", "Input Strides", "Concrete Inputs")
_TIME = "Kernel Time (µs)_median"
_KERNELS = "kernel_details_summary"
_HOST_LINK = ("Memcpy HtoD", "Memcpy DtoH", "Pageable", "Pinned")
_NO_TYPES = frozenset({"", "Scalar", "ScalarList", "TensorList"})
SOFTWARE = "torch"
"""Software of these tables, which name no version."""
_MOST_LITERAL = 100_000
"""Characters of an argument that are read: a tensor list of some thousand shapes. Parsing takes a kilobyte for each."""


def operation_of(name: str, dims: str, types: str, strides: str, values: str) -> Operation:
    """Return the operation that a row's texts describe.

    Raises:
        ValueError: a text is no literal.
    """
    if max(map(len, (dims, types, strides, values))) > _MOST_LITERAL:
        raise ValueError(f"an argument of {name[:60]} has more than {_MOST_LITERAL:,} characters")
    try:
        shapes, dtypes, steps, numbers = (tuple(ast.literal_eval(text)) for text in (dims, types, strides, values))
    except (SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError(f"the arguments of {name[:60]} are not Python literals") from error
    # The element type of tensors in lists is not recorded: it is that of the first tensor.
    named = next((str(dtype) for dtype in dtypes if str(dtype) not in _NO_TYPES), "bf16")
    return Operation(name, tuple(
        Argument(str(dtype), shape, step, str(value))
        for shape, dtype, step, value in zip(shapes, dtypes, steps, numbers, strict=False)), named)


def _read_operators(frame: pandas.DataFrame, path: Path) -> Iterator[Samples]:
    """Read operators as TraceLens writes them: one samples object per family; the shape group is the sizes.

    Columns: name; Input Dims, Input type, Input Strides and Concrete Inputs (Python literals, one entry per argument);
    kernel times in microseconds by their statistic. The median is taken. The table does not name its device. An
    operation becomes its call by the rules for a trace's operations. Operations of several calls and those without
    sizes are left out, and so are copies from or to the host, whose time is the link's.
    """
    calls, us = [], []
    kernels = frame[_KERNELS] if _KERNELS in frame else [""] * len(frame)
    texts = frame[list(_ARGUMENTS)].astype(str).to_numpy().tolist()
    times = frame[_TIME].astype(float).tolist()
    names = frame["name"].fillna("a nameless row")
    for name, (dims, types, strides, values), time, ran in zip(names, texts, times, kernels, strict=True):
        call = _operator_call(str(name), (dims, types, strides, values), str(ran))
        if call is not None and np.isfinite(time) and time > 0:
            calls.append(call)
            us.append(time)
    yield from by_family(str(frame[DEVICE].iloc[0]), SOFTWARE, path.name, calls, us)


def _operator_call(name: str, texts: tuple[Any, ...], kernels: str) -> OpCall | None:
    """Return the one call of an operation whose sizes are known.

    Raises:
        ValueError: a size is above that of any tensor.
    """
    if "Synthetic Op" in name or any(word in kernels for word in _HOST_LINK):
        return None
    calls = calls_of(operation_of(name, *texts), uses_tf32(kernels))
    if len(calls) != 1 or "unsized" in calls[0].flags:
        return None
    if any(size > LARGEST for size in calls[0].dims):
        raise ValueError(f"{name[:60]} has a size above {LARGEST:,}")
    return calls[0]


def _measured_call(family: Family, row: dict[str, Any]) -> OpCall:
    dims = tuple(int(row[name]) for name in DIMENSIONS[family])
    kind, dtype = str(row.get("kind") or family.value), str(row.get("dtype") or "bf16")
    layout, flags = str(row.get("layout") or ""), tuple(sorted(str(row.get("flags") or "").split()))
    work = tuple(row.get(name) for name in ("flops", "bytes_read", "bytes_written"))
    if all(isinstance(number, float | int) and np.isfinite(number) for number in work):
        flops, read_bytes, written = (float(number) for number in work)  # type: ignore[arg-type]
        return OpCall(family, kind, dims, dtype, layout, flags, flops, read_bytes, written)
    if family is Family.GEMM:
        batch, m, n, k = dims
        return _only(gemm(batch, m, n, k, dtype, layout or "nt", kind=str(row.get("kind") or ""), flags=flags), family)
    if family is Family.ATTENTION:
        batch, heads, kv_heads, q_len, kv_len, head_dim, v_head_dim, window = dims
        plain = tuple(flag for flag in flags if flag != "causal")
        return _only(attention(kind if "_" in kind else "flash_forward", batch, heads, kv_heads, q_len, kv_len,
                               head_dim, v_head_dim, dtype, window=window, causal="causal" in flags, flags=plain),
                     family)
    raise DataError(f"A table of {family.value} needs the columns flops, bytes_read and bytes_written.")


def _only(calls: Iterable[OpCall], family: Family) -> OpCall:
    found = next(iter(calls), None)
    if found is None:
        raise DataError(f"A row of {family.value} has a size of 0, so that there is no work to measure; remove it.")
    return found


def _read_measured(frame: pandas.DataFrame, path: Path) -> Iterator[Samples]:
    """Yield samples of foretrace's own form, a row for each call: one object per device, software and family.

    - family: A ``Family`` value, such as "gemm".
    - device: A device's name, or what the driver reports.
    - latency_us: The time, microseconds.
    - <dimensions>: One column for each of the family's dimensions, whole numbers.
    - kind, dtype: As in ``OpCall`` (default: the family's name, "bf16").
    - layout, flags: Flags separated by spaces (default: none).
    - software: Library and version (default: none).
    - group: Shape group, kept together in every split (default: the sizes).
    - split: "fit" or "held-out"; held-out rows are never fitted to (default: by the hash of the group).
    - flops, bytes_read, bytes_written: Default: computed for matrix products and attention, needed for the rest.
    """
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
        calls = [_measured_call(family, row) for row in rows.to_dict("records")]
        groups = ([str(group) for group in rows["group"]] if "group" in rows
                  else ["x".join(map(str, call.dims)) for call in calls])
        yield Samples(resolve_device(str(gpu)).name, str(software), path.name, calls, rows.latency_us.to_numpy(float),
                      {"group": groups}, np.array(rows["split"] == "held-out", bool) if "split" in rows else None)


READERS = (
    Reader("linear layers", frozenset({"gpu", "software", "kernel_source", "dtype", "m", "n", "k", "latency_us"}),
           _read_products, sizes=("m", "n", "k")),
    Reader("decoding attention", frozenset({"gpu", "latency_us", *_DECODING_COLUMNS}), _read_decoding,
           sizes=_DECODING_COLUMNS, aliases=_ALIASES),
    Reader("attention", frozenset({"gpu", "software", "kernel_source", "latency_us", *_PROMPTS_COLUMNS}),
           _read_prompts, sizes=_PROMPTS_COLUMNS[:-1]),
    Reader("transformer blocks", frozenset({*_SIZES, "op", "gpu", "model", "latency_us"}), _read_blocks),
    Reader("NeuSight's kernels", frozenset({"OPName", "Device", "B", "H", "M", "N", "K", "split", "latency_us"}),
           _read_neusight),
    campaign.READER,
    Reader("operators", frozenset({"name", *_ARGUMENTS, _TIME}), _read_operators, names_device=False),
    Reader("measured calls", frozenset({"family", "device", "latency_us"}), _read_measured),
)
"""All readers, the most specific first. To support another form of table, add a reader here."""


def read_table(path: Path, spec: DeviceSpec | None = None, notes: list[str] | None = None) -> list[Samples]:
    """Return the samples of one table.

    Args:
        path: Parquet or CSV.
        spec: The device of a table that names none.
        notes: Receives a sentence on the number of unusable rows.

    Raises:
        TableInputError: the file, or a cell of it, cannot be read.
        DataError: no reader knows its columns, it names no device and none was given, or it has no usable row.
    """
    frame = read_frame(path)
    if not len(frame):
        raise DataError(f"{path} is an empty table; there is nothing to learn from it.")
    for reader in READERS:
        if reader.columns <= set(reader.renamed(frame).columns):
            frame = reader.renamed(frame)
            break
    else:
        nearest = max(READERS, key=lambda reader: len(reader.columns & set(frame.columns)) / len(reader.columns))
        missing = ", ".join(sorted(nearest.columns - set(frame.columns))[:6])
        raise DataError(f"{path} has no known table's columns; as a table of {nearest.name} it lacks {missing}.")
    if not reader.names_device:
        if spec is None:
            raise DataError(f"{path} does not name the device it was measured on; name it with --device.")
        frame = frame.assign(**{DEVICE: spec.name})
    check_sizes(frame, reader.sizes, path)
    try:
        found = [one for one in reader.read(frame, path) if len(one)]
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:  # raised by unusual cells
        raise TableInputError(f"{path} cannot be read as a table of {reader.name}: {reason_of(error)}; check its "
                              "values.") from error
    for one in found:
        if not (np.isfinite(one.measured_us).all() and (one.measured_us > 0).all()):
            raise DataError(f"{path} holds times that are not positive numbers of microseconds; remove those rows.")
    if not found:
        raise DataError(f"{path} holds no row of a known kind of kernel; there is nothing to learn from it.")
    left_out = len(frame) - sum(map(len, found))
    if notes is not None and reader.takes_all and left_out > 0:
        notes.append(f"{path.name}: {left_out:,} of {len(frame):,} rows were left out: they are no single kernel of a "
                     "known kind with known sizes.")
    return found
