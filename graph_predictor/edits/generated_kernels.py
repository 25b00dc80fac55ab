"""The kernels that a compiler makes of a step's operations: it generates one kernel in place of several, and chooses
layouts of its own.

TorchInductor keeps the libraries' kernels for products (convolutions, matrix products, fused attention) and generates
the rest. It computes a value where it is used instead of writing it. So work on equally many elements between two
products becomes one kernel, which reads values from outside and writes only values that are used outside:

    conv ─▶ bn ─▶ relu ─▶ conv              conv ─▶ [bn relu] ─▶ conv           one read, one write
    linear ─▶ + ─▶ norm ─▶ cast ─▶ linear   linear ─▶ [+ norm cast] ─▶ linear   the sum is needed again: written too

Traces do not name tensors, so sizes decide which values an operation reads: the latest values of its size that nothing
has read yet. If these are too few, it reads one that was read before (a residual), which then has to be written.

Source: ``torch/_inductor``: ``lowering.py``, ``scheduler.py``, ``graph.py`` (``decide_layout_opt``), 2.4 to 2.13.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np

from graph_predictor.prediction.scenario import Replacement, WorkUnits, sized
from kernel_models.op_call import Family, OpCall, itemsize
from tracer.graph import Phase

PERSISTENT_COLUMNS = 16384
"""A generated norm or softmax reads longer rows than this twice: once for their sums, once for the values."""


@dataclass(eq=False, slots=True)
class _Kernel:
    """A kernel that the compiler generates.

    Attributes:
        units: rows of ``WorkUnits`` that it replaces.
        read: bytes read from outside.
        rows: number and length of the rows that it reduces, if it does.
        values: results of operations that it computes.
        inputs: results of other kernels that it reads.
    """

    units: list[int] = field(default_factory=list)
    read: float = 0.0
    rows: tuple[int, ...] | None = None
    values: list[_Value] = field(default_factory=list)
    inputs: list[_Value] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class _Value:
    """A result of an operation.

    Attributes:
        kernel: the kernel that computes it; ``None`` for a library's.
        elements, size: number of elements, and their bytes.
        written: whether it is in memory.
        inner: the value of the same kernel that was normalised to make it.
        unbiased: the unit of the convolution whose bias is not added yet; -1 for none.
        number: order in which values were made.
    """

    kernel: _Kernel | None
    elements: int
    size: float
    written: bool = False
    inner: _Value | None = None
    unbiased: int = -1
    number: int = 0


@dataclass(frozen=True, slots=True)
class _Work:
    """The work of a generated operation.

    Attributes:
        over: elements of each of its whole operands.
        operands: number of whole operands; broadcast operands do not count.
        elements, size: elements of its result, and their bytes.
        rows: see ``_Kernel``.
        gathers: whether it reads each element several times, so that its input is written first.
        normalises: whether its result is a normalised form of its operand.
        tensors: number of tensors that it concatenates; 0 for other operations.
    """

    over: int
    operands: int
    elements: int
    size: float
    rows: tuple[int, ...] | None = None
    gathers: bool = False
    normalises: bool = False
    tensors: int = 0


class _Step:
    """The kernels that the compiler generates for an unbroken run of one phase's work on one stream.

    Args:
        turned: whether convolutions have channels last.
        peels: whether the kernel after a convolution adds its bias.
    """

    def __init__(self, turned: bool, peels: bool) -> None:
        self._turned = turned
        self._peels = peels
        self._waiting: dict[int, list[_Value]] = {}
        self._past: dict[int, list[_Value]] = {}
        self._count = 0
        self._kernels: dict[int, _Kernel] = {}
        self._calls: dict[int, tuple[OpCall, ...]] = {}
        self._libraries: dict[int, list[OpCall]] = {}

    def generated(self, u: int, call: OpCall, work: _Work) -> None:
        """Add an operation that the compiler generates code for."""
        self._calls[u] = (call,)
        if work.tensors:
            self._concatenated(u, call, work)
            return
        kernel = _Kernel([u])
        operands = [self._take(work.over) for _ in range(work.operands)]
        left, inner = call.bytes_read, None
        for value in operands:
            if value is None:
                continue
            value.unbiased = -1
            if self._fuses(value, work):
                left -= value.size
                assert value.kernel is not None
                kernel = self._merged(value.kernel, kernel)
                inner = inner or (value if work.normalises else value.inner)
            else:
                self._write(value)
                kernel.inputs.append(value)
        if None in operands:
            self._read_again(work.over, max(left, 0.0), kernel)
        kernel.rows = work.rows or kernel.rows
        kernel.read += max(left, 0.0)
        self._results(kernel, work, inner)

    def _concatenated(self, u: int, call: OpCall, work: _Work) -> None:
        """Add a concatenation: part of the kernel that makes one of its tensors; a copy if all are in memory."""
        kernel, left, room, alone = _Kernel([u]), call.bytes_read, work.elements, True
        newest = sorted((value for values in self._waiting.values() for value in values[-work.tensors:]),
                        key=lambda value: -value.number)[:work.tensors]
        for value in newest:
            if not work.elements <= LEAST_PART * value.elements <= LEAST_PART * room:
                break
            room -= value.elements
            self._waiting[value.elements].remove(value)
            alone &= value.unbiased < 0
            value.unbiased = -1
            if self._fuses(value, work):
                left, alone = left - value.size, False
                assert value.kernel is not None
                kernel = self._merged(value.kernel, kernel)
        kernel.read += max(left, 0.0)
        self._results(kernel, work, None)
        kernel.values[-1].written = alone

    def _results(self, kernel: _Kernel, work: _Work, inner: _Value | None) -> None:
        result = _Value(kernel, work.elements, work.size, inner=inner)
        kernel.values.append(result)
        self._kernels[id(kernel)] = kernel
        self._put(result)

    def library(self, u: int, calls: Sequence[OpCall]) -> None:
        """Add an operation that the compiler leaves to a library's kernels."""
        self._calls[u] = tuple(calls)
        for call in calls:
            for elements in _inputs(call):
                value = self._take(elements)
                if value is not None:
                    self._write(value)
            value = _Value(None, _elements(call), call.bytes_written, True)
            if call.family is Family.CONV:
                changed = self._convolution(call)
                self._libraries.setdefault(u, []).append(changed)
                value.unbiased = u if "bias" in call.flags and "bias" not in changed.flags else -1
            else:
                self._libraries.setdefault(u, []).append(call)
            self._put(value)

    def end(self) -> list[Replacement]:
        """Write all values that nothing has read, and return the replacements by the compiler's kernels."""
        for values in self._waiting.values():
            for value in values:
                self._write(value)
        found = []
        for kernel in self._kernels.values():
            if not any(value.written for value in kernel.values):
                kernel.values[-1].written = True
            members = sorted(kernel.units)
            fused = self._fused(kernel)
            moved = self._calls[members[0]][0].bytes_moved
            if len(members) > 1 or abs(fused.bytes_moved - moved) > SAME * moved:
                found.append(Replacement(np.array(members, np.int64), (fused,)))
        found += [Replacement(np.array([u], np.int64), tuple(calls)) for u, calls in self._libraries.items()
                  if tuple(calls) != self._calls[u]]
        return found

    def _fused(self, kernel: _Kernel) -> OpCall:
        calls = [self._calls[u][0] for u in sorted(kernel.units)]
        last = calls[-1]
        elements, size = max(map(_elements, calls)), itemsize(last.dtype)
        again = 2.0 if kernel.rows is not None and kernel.rows[-1] > PERSISTENT_COLUMNS else 1.0
        read = again * kernel.read
        inputs = max(round(read / max(elements * size, 1)), 1)
        return OpCall(Family.ELEMENTWISE, "fused", (elements, inputs, max(round(read / size), 1)), last.dtype,
                      flops=sum(call.flops for call in calls), bytes_read=read,
                      bytes_written=sum(value.size for value in kernel.values if value.written))

    def _convolution(self, call: OpCall) -> OpCall:
        """Return a convolution as the compiler calls it: without its bias, which the next kernel adds."""
        layout = "nhwc" if self._turned else call.layout
        if not self._peels or "bias" not in call.flags or call.kind != "forward":
            return replace(call, layout=layout)
        return replace(call, layout=layout, flags=tuple(flag for flag in call.flags if flag != "bias"))

    def _write(self, value: _Value) -> None:
        """Put a value into memory; a convolution's missing bias is then added by a kernel of its own."""
        value.written = True
        if value.unbiased >= 0:
            conv = self._libraries[value.unbiased][0]
            n = _elements(conv)
            self._libraries[value.unbiased].append(OpCall(
                Family.ELEMENTWISE, "fused", (n, 1, n), conv.dtype, flops=float(n), bytes_read=value.size,
                bytes_written=value.size))
            value.unbiased = -1

    def _take(self, elements: int) -> _Value | None:
        waiting = self._waiting.get(elements)
        return waiting.pop() if waiting else None

    def _put(self, value: _Value) -> None:
        self._count += 1
        value.number = self._count
        self._waiting.setdefault(value.elements, []).append(value)
        self._past.setdefault(value.elements, []).append(value)

    def _read_again(self, elements: int, size: float, kernel: _Kernel) -> None:
        """Add an input that was read before: the largest in memory (then newest) that is not yet the kernel's input."""
        past = [value for value in self._past.get(elements, ())[-MOST_PAST:] if value.size <= size * 1.001
                and value.kernel is not kernel and not any(value is one for one in kernel.inputs)]
        if not past:
            return
        value = max(past, key=lambda value: (value.size, value.number))
            # The value that was normalised is assumed to be a sum that is needed again in addition to the result.
        if value.inner is not None and value.inner.size == value.size:
            value = value.inner
        kernel.inputs.append(value)
        value.written = True

    @staticmethod
    def _fuses(value: _Value, work: _Work) -> bool:
        kernel = value.kernel
        return (kernel is not None and not work.gathers and not value.written
                and (kernel.rows is None or work.rows is None or kernel.rows == work.rows))

    def _merged(self, kernel: _Kernel, other: _Kernel) -> _Kernel:
        """Return two kernels merged into one."""
        if other is not kernel:
            kernel.units += other.units
            kernel.read += other.read
            kernel.rows = kernel.rows or other.rows
            for value in other.values:
                value.kernel = kernel
            kernel.values += other.values
            kernel.inputs += other.inputs
            self._kernels.pop(id(other), None)
        return kernel


def generated_kernels(units: WorkUnits) -> list[Replacement]:
    """Return the replacements by generated kernels, and by convolutions that the compiler calls in another way."""
    training = bool((units.phase[units.alive] == Phase.BACKWARD).any())
    turned = not units.on_host and channels_last(units, training)
    found: list[Replacement] = []
    step, key = _Step(turned, not units.on_host), None
    for u in np.flatnonzero(units.alive & (units.phase != Phase.OPTIMIZER)).tolist():
        here = tuple(int(column[u]) for column in (units.rank, units.lane, units.phase, units.step))
        if here != key or not units.follows[u]:
            found += step.end()
            step, key = _Step(turned, not units.on_host), here
        calls = units.calls[u]
        work = work_of(calls[0]) if len(calls) == 1 and sized(calls) and units.kernels[u] <= MOST_KERNELS else None
        if work is not None:
            step.generated(u, calls[0], work)
        else:
            step.library(u, calls)
        if units.watched[u]:
            found += step.end()
            step = _Step(turned, not units.on_host)
    return found + step.end()


LEAST_PART = 64
"""A tensor counts as a part of a concatenation if it has at least 1/64 of its size."""
SAME = 0.02
"""Greatest relative difference in bytes at which a kernel of one operation counts as the operation itself."""
MOST_PAST = 8
"""Number of latest values of one size among which a value to be read again is searched."""
MOST_KERNELS = 2
"""Most kernels of an operation that the compiler treats as one: a reduction to few results has two."""


def work_of(call: OpCall) -> _Work | None:
    """Return an operation's work as the compiler sees it; ``None`` if the compiler leaves it to a library."""
    family, dims, size = call.family, call.dims, itemsize(call.dtype)
    if family is Family.ELEMENTWISE:
        return _Work(dims[0], min(dims[2] // max(dims[0], 1), dims[1]), dims[0], call.bytes_written)
    if family is Family.COPY:
        return _Work(_source_elements(call), 1, dims[0], call.bytes_written)
    if family is Family.RANDOM:
        return _Work(dims[0], 0, dims[0], call.bytes_written)
    if family is Family.CONCAT:
        return _Work(dims[0], 0, dims[0], call.bytes_written, tensors=dims[1])
    if family in (Family.NORM, Family.SOFTMAX):
        n = prod(dims)
        rows = None if "eval" in call.flags else (dims[0], n // max(dims[0], 1))
        return _Work(n, 2 if call.kind.endswith("backward") else 1, n, n * size, rows,
                     normalises=family is Family.NORM)
    if family is Family.REDUCTION:
        outer, reduced, _ = dims
        return _Work(outer * reduced, 1, outer, call.bytes_written, (outer, reduced))
    if family in (Family.POOLING, Family.INTERPOLATE) and not call.kind.endswith("backward"):
        channels, before, after, *_ = dims
        return _Work(channels * before, 1, channels * after, channels * after * size,
                     gathers=not call.kind.startswith("nearest"))
    return None


def _source_elements(call: OpCall) -> int:
    """Return the number of elements that a copy reads; a padded copy writes more."""
    given = next((flag.partition("=")[2] for flag in call.flags if flag.startswith("from=")), "")
    return int(given) if given else call.dims[0]


def _elements(call: OpCall) -> int:
    """Return the elements of a call's result."""
    family, dims = call.family, call.dims
    if family is Family.GEMM:
        return dims[0] * dims[1] * dims[2]
    if family is Family.REDUCTION:
        return dims[0]
    if family in (Family.NORM, Family.SOFTMAX):
        return prod(dims)
    if family in (Family.POOLING, Family.INTERPOLATE):
        return dims[0] * dims[2]
    if family in (Family.ELEMENTWISE, Family.COPY, Family.RANDOM, Family.CONCAT):
        return dims[0]
    return round(call.bytes_written / itemsize(call.dtype))


def _inputs(call: OpCall) -> tuple[int, ...]:
    """Return the number of elements of each tensor that a library's kernel reads."""
    dims = call.dims
    if call.family is Family.GEMM:
        batch, m, n, k = dims
        return (batch * m * k, batch * k * n, *((n,) if "bias" in call.flags else ()))
    if call.family is Family.CONV:
        batch, inputs, outputs, groups = dims[:4]
        images = (batch * inputs * prod(dims[4:7]), batch * outputs * prod(dims[7:10]))
        weight = outputs * (inputs // max(groups, 1)) * prod(dims[10:13])
        if call.kind == "forward":
            return (images[0], weight, *((outputs,) if "bias" in call.flags else ()))
        return (images[1], weight if call.kind == "dgrad" else images[0])
    if call.family is Family.ATTENTION:
        batch, heads, kv_heads, q_len, kv_len, head, v_head, _ = dims
        return (batch * heads * q_len * head, batch * kv_heads * kv_len * head, batch * kv_heads * kv_len * v_head)
    return ()


# Layout -------------------------------------------------------------------------------------------------------------

GROUPED, SMALL, SHRINKING, USUAL = 1.358, 0.783, 0.725, 0.823
"""Factors on the time of kinds of convolutions with channels last; by them the compiler chooses for inference."""
NODES_A_UNIT = 3
"""Nodes of a compiler's graph for each piece of device work (roughly): views, statistics and casts are nodes too."""
MOST_NODES = 300
"""A graph with this many nodes for each convolution, or more, does not count as convolutional."""


def channels_last(units: WorkUnits, training: bool) -> bool:
    """Return whether the compiler changes a step's convolutions to channels last.

    Source: ``torch._inductor.graph.GraphLowering.decide_layout_opt``.
    """
    alive = [u for u in np.flatnonzero(units.alive).tolist() if units.phase[u] != Phase.OPTIMIZER]
    calls = [call for u in alive for call in units.calls[u] if call.family is Family.CONV and call.kind == "forward"]
    if not calls or NODES_A_UNIT * len(alive) >= MOST_NODES * len(calls):
        return False
    total = sum(call.flops for call in calls)
    if not training:
        return sum(call.flops * _kind(call) for call in calls) <= total
    kinds = [_kind(call) for call in calls]
    return GROUPED not in kinds and SHRINKING not in kinds and set(kinds) != {SMALL}


def _kind(call: OpCall) -> float:
    _, inputs, outputs, groups, *_ = call.dims
    each, height = inputs // max(groups, 1), call.dims[11]
    if groups > 1 and each > 1:
        return GROUPED
    if outputs <= 64 and each <= 64:
        return SMALL
    return SHRINKING if outputs * 2 <= each and height > 1 else USUAL
