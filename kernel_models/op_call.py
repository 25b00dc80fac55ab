"""``OpCall``: one priced piece of device work, its tensors, and the interface of the models that price it.

``TensorSpec`` is what a call needs to know of a tensor: sizes, strides, element type.

Profilers, C++ and PyTorch name element types differently; each type has one short name here, and a size. Sizes are
bytes of one stored element (``torch/headeronly/core/ScalarType.h``). Both 8-bit floats are "fp8": they cost the same. A
packed pair of 4-bit floats is one element of one byte, as the tensor's shape counts it.

A call is described by what it computes, not by the name of a kernel. Families (``kernel_models.families``) turn a
framework operation into calls; models turn calls into microseconds. A call is small, hashable and equal to every other
call of the same work, so that repeated work is priced once. A model gives times with intervals and a source for a batch
of calls of one family.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum
from math import prod
from typing import Any, Protocol

import numpy as np

from tracer.arrays import Bool, Float64
from tracer.lookup_data.tables import EmbeddingTable, row_state_bytes, stored_row_bytes

ITEMSIZE: dict[str, int] = {
    "fp64": 8, "fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "fp4": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1, "bool": 1,
    "complex32": 4, "complex64": 8, "complex128": 16,
}
"""Bytes of an element by short name."""

_NAMES: dict[str, str] = {
    # C++ names, as the profiler writes them, and the execution trace's.
    "double": "fp64", "float": "fp32", "c10::Half": "fp16", "Half": "fp16", "half": "fp16", "__half": "fp16",
    "c10::BFloat16": "bf16", "BFloat16": "bf16", "__nv_bfloat16": "bf16", "__hip_bfloat16": "bf16",
    "long int": "int64", "long": "int64", "int": "int32", "short int": "int16", "short": "int16",
    "signed char": "int8", "unsigned char": "uint8", "bool": "bool", "char": "int8",
    "unsigned long": "uint64", "unsigned int": "uint32", "unsigned short": "uint16",
    "long unsigned int": "uint64", "short unsigned int": "uint16",
    "c10::complex<float>": "complex64", "c10::complex<double>": "complex128", "c10::complex<c10::Half>": "complex32",
    "c10::Float8_e4m3fn": "fp8", "c10::Float8_e5m2": "fp8", "c10::Float8_e4m3fnuz": "fp8",
    "c10::Float8_e5m2fnuz": "fp8", "c10::Float8_e8m0fnu": "fp8", "c10::Float4_e2m1fn_x2": "fp4",
    "c10::qint8": "int8", "c10::quint8": "uint8", "c10::qint32": "int32",
    # PyTorch's names.
    "float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16",
    "float8_e4m3fn": "fp8", "float8_e5m2": "fp8", "float8_e4m3fnuz": "fp8", "float8_e5m2fnuz": "fp8",
    "float8_e8m0fnu": "fp8", "fp8_e4m3": "fp8", "fp8_e5m2": "fp8",
    "float8_e4m3": "fp8", "float4_e2m1fn_x2": "fp4", "cfloat": "complex64", "cdouble": "complex128",
}

MULTIPLY_ADDS: dict[str, int] = {"fp4": 2, "complex32": 4, "complex64": 4, "complex128": 4}
"""Real multiply-adds in one product of two elements where not 1: packed pairs have 2, complex numbers 4."""

_SCALAR_TYPES: dict[int, str] = {
    0: "uint8", 1: "int8", 2: "int16", 3: "int32", 4: "int64", 5: "fp16", 6: "fp32", 7: "fp64", 8: "complex32",
    9: "complex64", 10: "complex128", 11: "bool", 12: "int8", 13: "uint8", 14: "int32", 15: "bf16",
    23: "fp8", 24: "fp8", 25: "fp8", 26: "fp8", 27: "uint16", 28: "uint32", 29: "uint64", 44: "fp8", 45: "fp4",
}

_RANK = ("bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "fp4", "fp8", "bf16",
         "fp16", "fp32", "tf32", "fp64", "complex32", "complex64", "complex128")


def short_dtype(name: str) -> str:
    """Return the short name of an element type ("c10::BFloat16" → "bf16"); "" if the name is no element type.

    Number types such as "Scalar", "Int" or "Double" are not element types: they describe arguments, not tensors.
    """
    name = name.removeprefix("torch.")
    return name if name in ITEMSIZE else _NAMES.get(name, "")


def scalar_type(text: str) -> str:
    """Return the element type of a recorded ``ScalarType`` argument by its short name ("15" → "bf16"), else ""."""
    return _SCALAR_TYPES.get(int(text), "") if text.isdecimal() and len(text) < 5 else short_dtype(text)


def itemsize(dtype: str) -> int:
    """Return the bytes of an element; 4 for an unknown type."""
    return ITEMSIZE.get(dtype, 4)


def stored_itemsize(kind: str) -> float:
    """Return the bytes of one value of a quantised weight, its share of scales included; for other types ``itemsize``.
    Both "fp4" (a scale for each 16 or 32 values) and "int4" (a scale for each 128) are one value here."""
    return {"fp4": 0.5 + 1 / 24, "int4": 0.5 + 2 / 128}.get(kind, float(itemsize(kind)))


def multiply_adds(dtype: str) -> int:
    """Return the number of real multiply-adds in a product of two elements."""
    return MULTIPLY_ADDS.get(dtype, 1)


def promoted(dtypes: list[str]) -> str:
    """Return the type that operands of these types are computed in (PyTorch's promotion; bf16 with fp16 gives fp32)."""
    known = {dtype for dtype in dtypes if dtype in ITEMSIZE}
    if {"bf16", "fp16"} <= known:
        known.add("fp32")
    return max(known, key=_RANK.index, default="fp32")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor: sizes and strides in elements; ``stride`` is ``None`` where not recorded (contiguous is assumed)."""

    shape: tuple[int, ...]
    dtype: str
    stride: tuple[int, ...] | None = None

    @property
    def elements(self) -> int:
        """Number of elements that the shape counts; 1 for a tensor without dimensions."""
        return prod(self.shape)

    @property
    def stored(self) -> int:
        """Number of distinct elements: a broadcast (stride 0) dimension counts once."""
        if self.stride is None or len(self.stride) != len(self.shape):
            return self.elements
        return prod(size if step or not size else 1 for size, step in zip(self.shape, self.stride, strict=True))

    @property
    def bytes(self) -> int:
        """Return the bytes of the distinct elements."""
        return self.stored * itemsize(self.dtype)

    @property
    def strides(self) -> tuple[int, ...]:
        """Recorded strides, or those of a contiguous tensor."""
        if self.stride is not None and len(self.stride) == len(self.shape):
            return self.stride
        return contiguous_strides(self.shape)

    @property
    def is_dense(self) -> bool:
        """Return whether the elements fill their memory without holes, in any order of dimensions."""
        return self.run == self.elements

    @property
    def run(self) -> int:
        """Number of contiguous elements in one piece, in any order of dimensions; ``elements`` if dense."""
        expected = 1
        for step, size in sorted((s, n) for s, n in zip(self.strides, self.shape, strict=True) if n > 1):
            if step != expected:
                break
            expected *= size
        return expected if self.elements else 0

    @property
    def is_channels_last(self) -> bool:
        """Return whether the tensor is a batch of images whose channels are contiguous ("nhwc")."""
        return len(self.shape) > 3 and self.shape[1] > 1 and self.order[-1:] == (1,)

    @property
    def order(self) -> tuple[int, ...]:
        """Dimensions of more than one element, from the slowest to the fastest in memory."""
        steps = self.strides
        return tuple(sorted((d for d, n in enumerate(self.shape) if n > 1), key=lambda d: (-steps[d], d)))


def channels_last(tensor: TensorSpec) -> str:
    """Return "nhwc" for channels-last images, else "": the layout of calls whose kinds name only channels last."""
    return "nhwc" if tensor.is_channels_last else ""


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return row-major strides, in elements."""
    steps, step = [], 1
    for size in reversed(shape):
        steps.append(step)
        step *= max(size, 1)
    return tuple(reversed(steps))


def broadcast(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the shape to which these shapes broadcast; where sizes conflict (old recordings), the larger size."""
    rank = max((len(shape) for shape in shapes), default=0)
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    return tuple(0 if 0 in sizes else max(sizes) for sizes in zip(*padded, strict=True))


@dataclass(frozen=True, slots=True)
class TablePart:
    """One table's share of a batched look-up.

    Attributes:
        rows, columns: Size of the part.
        dtype: Element type of the weights.
        lookups, bags: Number in the batch, in this part; ``bags`` are output rows (look-ups where nothing is pooled).
        longest: Look-ups of the longest bag; 0: not known.
        reuse: Histogram of the look-ups (``tracer.lookup_data.tables``); empty: rows are drawn evenly.
        weighted: Whether each look-up has a weight.
        optimizer: Optimizer fused into the backward pass; "none": rows are only looked up.
        output_bytes: Bytes of an element of a bag.
        location: Memory of the weights (``tracer.lookup_data.tables.LOCATIONS``).
        missed: Rows that cross the host's link for these look-ups (``EmbeddingTable.missed``).
    """

    rows: int
    columns: int
    dtype: str
    lookups: int
    bags: int
    longest: int = 0
    reuse: tuple[float, ...] = ()
    weighted: bool = False
    optimizer: str = "rowwise_adagrad"
    output_bytes: float = 4.0
    location: str = "hbm"
    missed: float = 0.0

    @classmethod
    def of(cls, table: EmbeddingTable, samples: int) -> TablePart:
        """Return the part that is a whole table, for a batch of ``samples``."""
        lookups = round(table.lookups(samples))
        pooled = table.pooling != "none"
        even = not table.reuse and not table.skew
        return cls(table.rows, table.columns, table.dtype, lookups, samples if pooled else lookups,
                   round(table.longest()) if pooled else 1, () if even else table.histogram(samples), table.weighted,
                   table.optimizer, table.output_bytes, table.location, table.missed(samples))

    def cut(self, share_of_rows: float = 1.0, columns: int = 0) -> TablePart:
        """Return a part with a share of the rows (and of the look-ups, which are spread evenly), or with some columns.

        In a row-wise part every sample still has its bag, with fewer look-ups.
        """
        pooled = self.longest != 1 or self.bags != self.lookups
        lookups = round(self.lookups * share_of_rows)
        return replace(self, rows=max(round(self.rows * share_of_rows), 1), columns=columns or self.columns,
                       lookups=lookups, bags=self.bags if pooled else lookups,
                       longest=max(round(self.longest * share_of_rows), 1) if self.longest else 0,
                       missed=self.missed * share_of_rows)

    @property
    def trained(self) -> bool:
        """Return whether a training step changes the rows."""
        return self.optimizer != "none"

    @property
    def row_bytes(self) -> float:
        """Return the bytes of a row's weights as stored."""
        return stored_row_bytes(self.dtype, self.columns)

    @property
    def state_bytes(self) -> float:
        """Return the bytes of the optimizer's state of a row in the device's memory."""
        return sum(row_state_bytes(self.optimizer, self.columns)) - self.host_state_bytes

    @property
    def host_state_bytes(self) -> float:
        """Return the bytes of a row's optimizer state in the host's memory (``EmbeddingTable.host_state_bytes``)."""
        return 0.0 if self.location == "hbm" else row_state_bytes(self.optimizer, self.columns)[1]


def with_host_rows(flags: Iterable[str], parts: Iterable[TablePart]) -> tuple[str, ...]:
    """Return a look-up's flags; parts in host memory add "host_rows", which models of device memory exclude."""
    far = any(part.location != "hbm" for part in parts)
    return tuple(sorted({*flags} | {"host_rows"})) if far else tuple(each for each in flags if each != "host_rows")


class Family(str, Enum):
    """Kinds of work that share a model, each with the names of its calls' sizes (``OpCall.dims``).

    ``OTHER`` is work that no family knows: it is priced by its bytes, and listed.
    """

    dimensions: tuple[str, ...]

    def __new__(cls, name: str, dimensions: tuple[str, ...] = ()) -> Family:
        """Make a member that equals its name."""
        member = str.__new__(cls, name)
        member._value_, member.dimensions = name, dimensions
        return member

    # out[batch, m, n] = A[batch, m, k] · B[batch, k, n]; a linear layer has m = tokens, n = outputs, k = inputs.
    GEMM = "gemm", ("batch", "m", "n", "k")
    # Sizes without a value in one or two dimensions are 1. `in_*`/`out_*` are the forward's spatial sizes.
    CONV = "conv", ("batch", "in_channels", "out_channels", "groups", "in_d", "in_h", "in_w", "out_d", "out_h", "out_w",
                    "kernel_d", "kernel_h", "kernel_w", "stride_d", "stride_h", "stride_w",
                    "dilation_d", "dilation_h", "dilation_w")
    # `window` is 0 for full attention.
    ATTENTION = "attention", ("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim", "v_head_dim", "window")
    # Elements of the output, number of tensors read, elements of all inputs as stored (a broadcast one once).
    ELEMENTWISE = "elementwise", ("elements", "inputs", "elements_in")
    # `outer` results, each of `reduced` values; `inner` is the stride between these values (1: contiguous).
    REDUCTION = "reduction", ("outer", "reduced", "inner")
    SOFTMAX = "softmax", ("outer", "reduced", "inner")
    # Layer and RMS norm: rows × normalised columns. Batch and group norm: groups × values in each.
    NORM = "norm", ("rows", "columns")
    # Lookups in all, output rows (bags), rows and columns of the table, tables in one kernel.
    EMBEDDING = "embedding", ("lookups", "bags", "table_rows", "columns", "tables")
    # Elements moved, contiguous elements of each piece, elements of the indexed tensor.
    INDEX = "index", ("elements", "inner", "source_elements")
    SORT = "sort", ("rows", "columns", "k")
    CONCAT = "concat", ("elements", "tensors", "inner")
    # Elements, and how many of them are contiguous in both tensors (= elements: one run).
    COPY = "copy", ("elements", "inner")
    TRANSFER = "transfer", ("bytes",)
    MEMSET = "memset", ("bytes",)
    RANDOM = "random", ("elements",)
    LOSS = "loss", ("rows", "classes")
    POOLING = "pooling", ("channels", "in_size", "out_size", "window")
    INTERPOLATE = "interpolate", ("channels", "in_size", "out_size")
    RECURRENT = "recurrent", ("sequence", "batch", "input", "hidden", "layers", "directions")
    OPTIMIZER = "optimizer", ("tensors", "elements")
    # Elements of the output (OTHER: of the largest tensor), number of tensor arguments, elements of all of them.
    TRITON = "triton", ("elements", "tensors", "elements_all")
    OTHER = "other", ("elements", "tensors", "elements_all")

    # Enum's own hash is a Python function and differs from the equal string's; a call's hash uses it every time.
    __hash__ = str.__hash__


DIMENSIONS: dict[Family, tuple[str, ...]] = {family: family.dimensions for family in Family}
"""Names of the sizes in ``OpCall.dims``, by family."""
PRODUCTS = frozenset({Family.GEMM, Family.CONV, Family.ATTENTION, Family.RECURRENT})
"""Families whose time arithmetic may determine; the time of other families depends on traffic."""


@dataclass(frozen=True, slots=True)
class OpCall:
    """One piece of device work.

    Attributes:
        family: Family of the models that price the call.
        kind: The variant within the family, such as "mm", "dgrad", "flash_backward", "layer_norm_backward", "adamw".
        dims: Sizes, in the order of ``DIMENSIONS[family]``.
        dtype: Of the computation: "fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "int64", "int32", "int8", "bool", ….
        layout: Memory order of operands. GEMM: two letters, A then B, "n" row-major, "t" column-major ("nt" is a linear
            layer's forward). Convolution: "nchw" or "nhwc". Norms, pooling, interpolation: "" or "nhwc". Others: "" or
            "strided", "broadcast".
        flags: Further properties that change the time, sorted, such as ("bias",) or ("causal", "dropout").
        accesses: For look-ups, what is known of each table: sizes, bags, and how often rows are reused.
        flops: Floating-point operations (a multiply-add is two).
        bytes_read, bytes_written: Device memory that the work must move at least, each stored element once.

    ``flops`` and bytes follow from the rest, so equality ignores them.
    """

    family: Family
    kind: str
    dims: tuple[int, ...]
    dtype: str
    layout: str = ""
    flags: tuple[str, ...] = ()
    flops: float = field(default=0.0, compare=False)
    bytes_read: float = field(default=0.0, compare=False)
    bytes_written: float = field(default=0.0, compare=False)
    accesses: tuple[TablePart, ...] = ()

    @property
    def bytes_moved(self) -> float:
        """Return the bytes read and written."""
        return self.bytes_read + self.bytes_written


Arrays = dict[str, np.ndarray]


class Source(IntEnum):
    """The source of a time, best first."""

    MEASURED = 0
    ANCHORED = 1
    LEARNED = 2
    HEURISTIC = 3
    DATASHEET = 4

    @property
    def label(self) -> str:
        """The source's name in lower case, as reports and JSON show it."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Times:
    """Times of n calls: ``time_us`` is the expected median, ``low_us`` to ``high_us`` the 80% interval, all [n] µs.

    ``common`` [n] is the share of an interval's log width that all calls of a family have in common. A sum over many
    calls has at least that relative width. ``None``: the whole width is common.
    """

    time_us: Float64
    low_us: Float64
    high_us: Float64
    common: Float64 | None = None


class KernelModel(Protocol):
    """A model of one family on one device (or, with the device's figures as features, on any).

    ``source`` is ``LEARNED`` or ``HEURISTIC`` for fitted models, ``DATASHEET`` for formulas from specifications only.
    """

    @property
    def family(self) -> Family:
        """Return the family that the model prices."""
        ...

    @property
    def source(self) -> Source:
        """Return the source of the model's times."""
        ...

    def covers(self, calls: Sequence[OpCall]) -> Bool:
        """Return which of the calls lie within the model's range (kind, dtype, sizes), [n] booleans."""
        ...

    def predict(self, calls: Sequence[OpCall]) -> Times:
        """Return the times of calls of this family; vectorised, no work per call except collecting its numbers."""
        ...

    def state(self) -> tuple[dict[str, Any], Arrays]:
        """Return what a profile stores: plain JSON values and plain numeric arrays (never a pickle)."""
        ...


def covered_times(model: KernelModel, calls: Sequence[OpCall]) -> tuple[Bool, Times]:
    """Return which calls a model covers, [n], and the times of the covered calls. A model's own faster method is used
    if it has one."""
    own = getattr(model, "covered_times", None)
    if own is not None:
        found: tuple[Bool, Times] = own(calls)
        return found
    covered = np.asarray(model.covers(calls), np.bool_)
    if not covered.any():
        return covered, Times(np.zeros(0), np.zeros(0), np.zeros(0))
    return covered, model.predict(calls if covered.all() else [calls[i] for i in np.flatnonzero(covered).tolist()])
