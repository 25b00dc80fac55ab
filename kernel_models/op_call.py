"""``OpCall``: one priced piece of device work, described by what it computes rather than by a kernel's name.

Families (``kernel_models.families``) turn a framework operation into its calls; models turn calls into microseconds.
A call is small, hashable and equal to every other call of the same work, so that repeated work is priced once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum

from tracer.lookup_data.tables import EmbeddingTable, row_state_bytes, stored_row_bytes


@dataclass(frozen=True, slots=True)
class TablePart:
    """One table's share of a batched look-up.

    Attributes:
        rows, columns: of the part.
        dtype: of the weights.
        lookups, bags: of the batch, in this part; ``bags`` are output rows (look-ups where nothing is pooled).
        longest: look-ups of the longest bag; 0: not known.
        reuse: histogram of the look-ups (``tracer.lookup_data.tables``); nothing: rows are drawn evenly.
        weighted: whether each look-up has a weight.
        optimizer: fused into the backward pass; "none": rows are only looked up.
        output_bytes: of an element of a bag.
        location: of the weights (``tracer.lookup_data.tables.LOCATIONS``).
        missed: rows that cross the host's link for these look-ups (``EmbeddingTable.missed``).
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
        """A whole table, for so many samples."""
        lookups = round(table.lookups(samples))
        pooled = table.pooling != "none"
        even = not table.reuse and not table.skew
        return cls(table.rows, table.columns, table.dtype, lookups, samples if pooled else lookups,
                   round(table.longest()) if pooled else 1, () if even else table.histogram(samples), table.weighted,
                   table.optimizer, table.output_bytes, table.location, table.missed(samples))

    def cut(self, share_of_rows: float = 1.0, columns: int = 0) -> TablePart:
        """A share of the rows (and of the look-ups, which fall on all rows alike), or some columns.

        Every sample still has its bag in a row-wise part, if an emptier one.
        """
        pooled = self.longest != 1 or self.bags != self.lookups
        lookups = round(self.lookups * share_of_rows)
        return replace(self, rows=max(round(self.rows * share_of_rows), 1), columns=columns or self.columns,
                       lookups=lookups, bags=self.bags if pooled else lookups,
                       longest=max(round(self.longest * share_of_rows), 1) if self.longest else 0,
                       missed=self.missed * share_of_rows)

    @property
    def trained(self) -> bool:
        """Return whether a step changes its rows."""
        return self.optimizer != "none"

    @property
    def row_bytes(self) -> float:
        """Return bytes of a row's weights, as they are stored."""
        return stored_row_bytes(self.dtype, self.columns)

    @property
    def state_bytes(self) -> float:
        """Return bytes of the optimizer's state of a row in the device's memory."""
        return sum(row_state_bytes(self.optimizer, self.columns)) - self.host_state_bytes

    @property
    def host_state_bytes(self) -> float:
        """Return bytes of the optimizer's state of a row in the host's memory (``EmbeddingTable.host_state_bytes``)."""
        return 0.0 if self.location == "hbm" else row_state_bytes(self.optimizer, self.columns)[1]


def with_host_rows(flags: Iterable[str], parts: Iterable[TablePart]) -> tuple[str, ...]:
    """The flags of a look-up of these parts: with "host_rows" no model that was fitted to rows on the device has it."""
    far = any(part.location != "hbm" for part in parts)
    return tuple(sorted({*flags} | {"host_rows"})) if far else tuple(each for each in flags if each != "host_rows")


class Family(str, Enum):
    """Kinds of work that share a model, each with the names of its calls' sizes (``OpCall.dims``).

    ``OTHER`` is work no family knows: priced by its bytes, and listed.
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
    # Elements of the output, tensors read, and elements of all inputs as stored (a broadcast input counts once).
    ELEMENTWISE = "elementwise", ("elements", "inputs", "elements_in")
    # `outer` results, each of `reduced` values; `inner` is the stride between them (1: they lie side by side).
    REDUCTION = "reduction", ("outer", "reduced", "inner")
    SOFTMAX = "softmax", ("outer", "reduced", "inner")
    # Layer and RMS norm: rows × normalised columns. Batch and group norm: groups × values in each.
    NORM = "norm", ("rows", "columns")
    # Lookups in all, output rows (bags), rows and columns of the table, tables in one kernel.
    EMBEDDING = "embedding", ("lookups", "bags", "table_rows", "columns", "tables")
    # Elements moved, side-by-side elements of each piece, elements of the indexed tensor.
    INDEX = "index", ("elements", "inner", "source_elements")
    SORT = "sort", ("rows", "columns", "k")
    CONCAT = "concat", ("elements", "tensors", "inner")
    # Elements, and how many lie side by side in both tensors (= elements: one run).
    COPY = "copy", ("elements", "inner")
    TRANSFER = "transfer", ("bytes",)
    MEMSET = "memset", ("bytes",)
    RANDOM = "random", ("elements",)
    LOSS = "loss", ("rows", "classes")
    POOLING = "pooling", ("channels", "in_size", "out_size", "window")
    INTERPOLATE = "interpolate", ("channels", "in_size", "out_size")
    RECURRENT = "recurrent", ("sequence", "batch", "input", "hidden", "layers", "directions")
    OPTIMIZER = "optimizer", ("tensors", "elements")
    # Elements of the output (OTHER: of the largest tensor), tensors among the arguments, elements of all of them.
    TRITON = "triton", ("elements", "tensors", "elements_all")
    OTHER = "other", ("elements", "tensors", "elements_all")

    # Enum's own is a Python function and differs from the equal string's; a call's hash asks for it every time.
    __hash__ = str.__hash__


DIMENSIONS: dict[Family, tuple[str, ...]] = {family: family.dimensions for family in Family}
"""Names of the numbers of ``OpCall.dims``, by family."""


@dataclass(frozen=True, slots=True)
class OpCall:
    """One piece of device work.

    Attributes:
        family: which models price it.
        kind: the variant within the family, such as "mm", "dgrad", "flash_backward", "layer_norm_backward", "adamw".
        dims: sizes, as ``DIMENSIONS[family]`` names them.
        dtype: of the computation: "fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "int64", "int32", "int8", "bool", ….
        layout: how operands lie. GEMM: two letters, A then B, "n" row-major, "t" column-major ("nt" is a linear layer's
            forward). Convolution: "nchw" or "nhwc". Norms, pooling, interpolation: "" or "nhwc".
            Elsewhere "" or "strided", "broadcast".
        flags: further properties that change the time, sorted, such as ("bias",) or ("causal", "dropout").
        accesses: of look-ups what is known of each table, where it is: sizes, bags, and how often rows are reused.
        flops: floating-point operations (a multiply-add is two).
        bytes_read, bytes_written: device memory the work must move at least, each stored element once.

    ``flops`` and bytes follow from the rest, so they take no part in equality.
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
        """Read and written, bytes."""
        return self.bytes_read + self.bytes_written
