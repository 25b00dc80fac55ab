"""Costs of one rank's pieces of a decoder: a block, the embedding, the head and the optimizer, each traced once by
shapes and priced on the device.

Linear layers in fp8 and fp4 are priced as Transformer Engine runs them. A layer's input is cast once, by the norm
before it if there is one. The gradient of its output is cast once for both products of backward; master weights are
cast once a step. A cast writes a second, transposed copy where matrix units take operands in one order only (Hopper's
fp8), or where scales run along rows (blocks, MX, NVFP4).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from graph_predictor.synthesis.step import calls_by_operation
from kernel_models.device import DeviceSpec, shape_device
from kernel_models.op_call import Family, OpCall, itemsize
from kernel_models.pricing import Models, PricedCalls, price, sustained, sustained_tflops
from kernel_models.spreads import STATE_SPACE_KERNELS
from planner.parallel.frameworks import PLAIN, FrameworkProfile
from planner.parallel.kept_layers import KeptLayers
from planner.parallel.routed_calls import ROWS, RoutedCalls, along, at_ranks, evened, routed_calls, with_experts
from planner.parallel.work import LayerWork, PieceCost, RecomputedWork
from tracer.graph import ExecutionGraph, Phase
from tracer.parallel_plan import Graphs, ParallelPlan, PlanError, Recomputation
from tracer.shape_only.transformer import LINEARS, SCAN, Piece, TransformerPart, TransformerShape

_WIDTH = {"fp8": 1.0, "fp8_block": 1.0 + 4 / 128, "mxfp8": 1.0 + 1 / 32, "nvfp4": 0.5 + 1 / 16}
"""Bytes of a value, including its share of a scale, by type of linear layers."""


@dataclass(frozen=True, slots=True)
class NarrowType:
    """The narrow type in which a device computes the products of linear layers.

    Attributes:
        dtype: type of the operands.
        bytes: bytes of one value, with its share of a scale.
        copies: number of copies that a cast writes.
        flags: flags that such products get in addition.
    """

    dtype: str
    bytes: float
    copies: int
    flags: tuple[str, ...] = ()


def narrow_type(linears: str, device: DeviceSpec) -> NarrowType | None:
    """Return the type named by a shape's ``linears``; ``None`` if the shape names no type.

    Raises:
        PlanError: the name is unknown, or the device's matrix units do not have the type.
    """
    if not linears:
        return None
    if linears not in LINEARS:
        raise PlanError(f"{linears} is no type of linear layers' products; give {', '.join(LINEARS)}.")
    dtype = "fp4" if linears == "nvfp4" else "fp8"
    scaled = linears in ("mxfp8", "nvfp4") and device.architecture in ("hopper", "ada", "cdna3")
    if dtype not in device.matrix_tflops or scaled:
        raise PlanError(f"The matrix units of {device.name} do not have {linears}; choose another type or device.")
    one_order = linears != "fp8" or device.architecture in ("hopper", "ada")
    # Scales of a whole tensor are applied once, those of MX and NVFP4 by the matrix units.
    return NarrowType(dtype, _WIDTH[linears], 2 if one_order else 1, () if linears == "fp8_block" else ("unit_scales",))


def narrowed(calls: Sequence[OpCall], shape: TransformerShape, to: NarrowType) -> list[OpCall]:
    """Return a block's calls with the products of its linear layers in a narrower type, and the casts they need.

    Args:
        calls: calls of forward or of backward, in order.
        shape: shape of the block.
    """
    found: list[OpCall] = []
    before: OpCall | None = None
    for call in calls:
        if _is_linear(call, shape):
            batch, m, _, k = call.dims
            # The weight gradient's product reads the operands that were cast for the input gradient's product.
            by_norm = before is not None and before.family is Family.NORM
            if not call.layout.startswith("t") and not by_norm:
                found.append(_cast(batch * m * k, itemsize(call.dtype), to))
            found.append(_product(call, to))
        else:
            found.append(call)
        before = call
    return found


def kept_less(forward: Iterable[OpCall], shape: TransformerShape, to: NarrowType) -> float:
    """Return the bytes that forward keeps less for backward, because inputs of linear layers are kept as cast."""
    return sum(call.dims[0] * call.dims[1] * call.dims[3] * (itemsize(call.dtype) - to.bytes)
               for call in forward if _is_linear(call, shape))


def fused_experts(calls: Sequence[OpCall], shape: TransformerShape) -> list[OpCall]:
    """Return a block's calls with the experts' products fused: the products also do what lies between them (activation,
    casts, adding up weight gradients). All groups of a product are one kernel."""
    grouped = [i for i, call in enumerate(calls) if call.kind == "grouped"]
    if not grouped:
        return list(calls)
    found = []
    for i, call in enumerate(calls):
        within = grouped[0] < i < grouped[-1] and call.family is Family.ELEMENTWISE
        # The cast of the gradient that reaches the experts' output from outside stays a kernel of its own.
        if within and not (call.kind == "cast" and call.dims[0] % shape.hidden == 0 and _rows(calls[grouped[0]]) == (
                call.dims[0] // shape.hidden)):
            continue
        found.append(replace(call, flags=tuple(sorted({*call.flags, "one_launch"}))) if call.kind == "grouped"
                     else call)
    return found


def stashed(calls: Sequence[OpCall], shape: TransformerShape) -> list[OpCall]:
    """Return a block's calls and a copy of what its experts keep for backward. A CUDA graph of a whole step computes
    experts in shared buffers, sized for the most tokens that can arrive. Kept values are copied out of them until
    backward (Megatron-Core's paged stashing, ``moe_paged_stash``)."""
    grouped = [call for call in calls if call.kind == "grouped"]
    if not grouped:
        return list(calls)
    narrow = 2.0 * itemsize(grouped[0].dtype) if grouped[0].dtype in ("fp8", "fp4") else float(shape.element_bytes)
    each = (shape.hidden + shape.ffn) * narrow + (2 if shape.gated else 1) * shape.ffn * shape.element_bytes
    kept = _rows(grouped[0]) * each
    elements = round(kept / shape.element_bytes)
    return [*calls, OpCall(Family.ELEMENTWISE, "copy", (elements, 1, elements), shape.dtype, flops=0.0,
                           bytes_read=kept, bytes_written=kept)]


def _rows(grouped: OpCall) -> int:
    """Return the rows of all groups of a product; in the product of a weight gradient, its contracted side."""
    batch, m, _, k = grouped.dims
    return batch * (k if grouped.layout.startswith("t") else m)


ROUTED_LAUNCHES = 85
"""Host cost of experts in a pass in addition to their traced kernels, in launches. Causes: a kernel for each expert and
cast, Python of the dispatcher and of Transformer Engine's grouped layers. Fitted to NVIDIA's step of Qwen3 30B A3B in
fp8 on 16 H100, whose GPUs wait for their hosts: 9.5 ms a block and micro-batch, as on B200
(``benchmarks/weak_scaling.py --rows experts``)."""


def _launched(calls: Sequence[OpCall], kernels: BlockKernels) -> int:
    """Return the launches of a pass. Where CUDA graphs replay parts of a block, only those of its experts remain, from
    the call that sorts their tokens on."""
    of_experts = [i for i, call in enumerate(calls) if call.family is Family.INDEX or call.kind == "grouped"]
    routed = ROUTED_LAUNCHES if not kernels.fused_experts and any(call.kind == "grouped" for call in calls) else 0
    if kernels.graphs is not Graphs.PARTIAL:
        return len(calls) + routed
    return of_experts[-1] - of_experts[0] + 1 + routed if of_experts else 0


def _is_linear(call: OpCall, shape: TransformerShape) -> bool:
    """Return whether a call is the product of a linear layer whose operands are cast. Experts' grouped products count;
    products of routers, of unfused attention and of a state-space mixer's recurrence do not."""
    if call.family is not Family.GEMM or SCAN in call.flags:
        return False
    batch, *sizes = call.dims
    if batch > 1:
        return _of_experts(call, shape)
    return not (shape.experts and shape.experts in sizes)


def _of_experts(call: OpCall, shape: TransformerShape) -> bool:
    """Return whether a call is a product of all of a rank's experts."""
    return call.family is Family.GEMM and SCAN not in call.flags and bool(shape.experts) and call.dims[0] > 1 and (
        shape.experts % call.dims[0] == 0)


def _product(call: OpCall, to: NarrowType) -> OpCall:
    batch, m, n, k = call.dims
    packed = 2 if to.dtype == "fp4" else 1
    less = batch * (m * k + k * n) * (itemsize(call.dtype) - to.bytes)
    return replace(call, kind="scaled" if batch == 1 else "grouped", dims=(batch, m, n, max(k // packed, 1)),
                   dtype=to.dtype, flags=tuple(sorted({*call.flags, "out_bf16", *to.flags})), flops=call.flops,
                   bytes_read=max(call.bytes_read - less, 0.0), bytes_written=call.bytes_written)


def _cast(elements: int, width: int, to: NarrowType) -> OpCall:
    return OpCall(Family.ELEMENTWISE, "cast", (elements, 1, elements), "bf16", flags=(f"to_{to.dtype}",),
                  flops=float(elements), bytes_read=float(elements * width),
                  bytes_written=elements * to.bytes * to.copies)


@dataclass(frozen=True, slots=True)
class TracedCalls:
    """A piece's calls of forward and of backward, in order, and the bytes that forward keeps for backward, including
    the piece's output."""

    forward: tuple[OpCall, ...]
    backward: tuple[OpCall, ...]
    kept: int = 0


def grown(one: TracedCalls, two: TracedCalls, factor: int) -> TracedCalls | None:
    """Return the calls for ``factor`` times the sequences of ``one``, extrapolated from ``one`` and ``two``.

    ``two`` has twice the sequences of ``one``. ``None`` if the two differ in more than sizes. This happens where a
    dimension of one sequence has special strides, or where a number of tokens is rounded because it does not divide.
    """
    passes = []
    for small, large in ((one.forward, two.forward), (one.backward, two.backward)):
        if len(small) != len(large):
            return None
        calls = [_grown(*pair, factor) for pair in zip(small, large, strict=True)]
        passes.append(tuple(call for call in calls if call is not None))
        if len(passes[-1]) != len(calls):
            return None
    return TracedCalls(passes[0], passes[1], one.kept + (two.kept - one.kept) * (factor - 1))


def _grown(one: OpCall, two: OpCall, factor: int) -> OpCall | None:
    if replace(two, dims=one.dims) != one:
        return None
    # Elements of a tensor broadcast over the sequences do not grow: they are a constant in the sum.
    both = list(zip(one.dims, two.dims, strict=True))
    if one.family is not Family.ELEMENTWISE and any(b not in (a, 2 * a) for a, b in both):
        return None
    more = factor - 1
    return replace(
        one, dims=tuple(a + (b - a) * more for a, b in both),
        flops=one.flops + (two.flops - one.flops) * more,
        bytes_read=one.bytes_read + (two.bytes_read - one.bytes_read) * more,
        bytes_written=one.bytes_written + (two.bytes_written - one.bytes_written) * more)


SPLIT = (2, 4)
"""Numbers of tensor-parallel ranks that are traced. Parts with more ranks are derived from these two."""


def _splits(shape: TransformerShape, part: TransformerPart) -> bool:
    """Return whether a part has more ranks than ``SPLIT`` and may be derived from the traces with ``SPLIT`` ranks."""
    return part.tp > SPLIT[1] and part.etp in (None, 1) and not part.once and shape.state is None


def split_further(one: TracedCalls, two: TracedCalls, ranks: int) -> TracedCalls | None:
    """Return the calls of a part with ``ranks`` tensor-parallel ranks, from the calls of parts with ``SPLIT`` ranks.

    ``None`` if the two differ in more than sizes, or if a size would not be whole. Also ``None`` if a product's FLOPs
    are not proportional to the product of its sizes, because several sizes are split.
    """
    passes = []
    for fewer, more in ((one.forward, two.forward), (one.backward, two.backward)):
        if len(fewer) != len(more):
            return None
        calls = [_split_further(*pair, ranks) for pair in zip(fewer, more, strict=True)]
        passes.append(tuple(call for call in calls if call is not None))
        if len(passes[-1]) != len(calls):
            return None
    kept = _share(one.kept, two.kept, ranks)
    return None if kept is None else TracedCalls(passes[0], passes[1], int(kept))


def _split_further(one: OpCall, two: OpCall, ranks: int) -> OpCall | None:
    if replace(two, dims=one.dims) != one:
        return None
    dims = [_share(*pair, ranks) for pair in zip(one.dims, two.dims, strict=True)]
    flops, read, written = (_share(getattr(one, name), getattr(two, name), ranks) for name in (
        "flops", "bytes_read", "bytes_written"))
    if None in dims or flops is None or read is None or written is None:
        return None
    found = replace(one, dims=tuple(int(each or 0) for each in dims), flops=flops, bytes_read=read,
                    bytes_written=written)
    if one.family in PRODUCTS and found.flops * math.prod(one.dims) != one.flops * math.prod(found.dims):
        return None
    return found


def _share(one: float, two: float, ranks: int) -> float | None:
    """Return a + b / ``ranks``, given this figure for 2 and for 4 ranks; ``None`` if the result is not whole."""
    share, rest = divmod(4 * (one - two), ranks)
    return None if rest else 2 * two - one + share


PRODUCTS = frozenset((Family.GEMM, Family.ATTENTION))
"""Families limited by arithmetic; all others count as limited by memory."""
_CORE = frozenset(("bmm", "softmax", "softmax_backward", "native_dropout_backward"))


@dataclass(frozen=True, slots=True)
class BlockKernels:
    """Options of a plan that decide which kernels a block runs.

    Attributes:
        fused_experts, fp8_attention, modules: ``fused_experts``, ``fp8_attention`` and ``recompute_modules`` of
            ``ParallelPlan``.
        graphs: the part of a block's launches that CUDA graphs replay.
    """

    fused_experts: bool = False
    fp8_attention: bool = False
    modules: tuple[str, ...] = ()
    graphs: Graphs = Graphs.NONE

    @staticmethod
    def of(plan: ParallelPlan) -> BlockKernels:
        """Return the options of a plan."""
        return BlockKernels(plan.fused_experts, plan.fp8_attention, plan.recompute_modules, plan.graphs)

    def least_launches(self, shape: TransformerShape) -> int:
        """Return a lower bound of the launches in one pass of a block, without tracing it."""
        return ROUTED_LAUNCHES * (bool(shape.experts) and not self.fused_experts and self.graphs is not Graphs.WHOLE)


USUAL_KERNELS = BlockKernels()


class LayerCosts:
    """Traces and prices a decoder's pieces (``Piece``). Each is traced once, and kept; each kernel is priced once.

    Args:
        device: the device that runs the pieces.
        models: models fitted for the device.
        like: costs for another device that runs the same operations (``runs_as``), whose traces are shared.
        profile: the framework, which may add kernels to blocks.
    """

    def __init__(self, device: DeviceSpec, models: Models | None = None, like: LayerCosts | None = None,
                 profile: FrameworkProfile = PLAIN) -> None:
        self.device, self.profile = device, profile
        self._models = models
        self._kept = KeptLayers(device)
        self._calls: dict[tuple[TransformerShape, TransformerPart], TracedCalls] = {} if like is None else like._calls
        self._experts: dict[tuple[TransformerShape, int, int, int], RoutedCalls | None] = {}
        self._kernels: dict[OpCall, tuple[float, float, float, int, bool, float]] = {}
        self._costs: dict[tuple[TransformerShape, TransformerPart, BlockKernels], PieceCost] = {}
        self._optimizers: dict[tuple[TransformerShape, TransformerPart], LayerWork] = {}
        self._saved: dict[tuple[TransformerShape, TransformerPart], int] = {} if like is None else like._saved

    def __reduce__(self) -> tuple[type[LayerCosts], tuple[Any, ...]]:
        """Return how to make them in another process, with nothing traced or priced yet."""
        return LayerCosts, (self.device, self._models, None, self.profile)

    def runs_as(self, device: DeviceSpec) -> bool:
        """Return whether a device runs the same operations as this one, so that both can share traces."""
        return (device.vendor, device.compute_capability) == (self.device.vendor, self.device.compute_capability)

    def cost(self, shape: TransformerShape, part: TransformerPart,
             kernels: BlockKernels = USUAL_KERNELS) -> PieceCost:
        """Return the cost of a part with a plan's kernels.

        Raises:
            ShapeOnlyError: the shape cannot be divided as the part requires.
        """
        shape = shape.one_layer()
        if not shape.experts:
            part = _without_experts(part)
        by_tokens = part.piece is Piece.HEAD or (part.piece is Piece.EMBEDDING and not shape.learned_positions)
        if by_tokens and (shared := math.gcd(part.microbatch, part.cp)) > 1:
            # Head and embedding depend on the number of tokens only, not on how sequences are cut.
            part = replace(part, microbatch=part.microbatch // shared, cp=part.cp // shared)
        key = shape, part, kernels
        if key not in self._costs:
            traced = self._traced(shape, part)
            forward, backward = (self._as_run(calls, shape, part, kernels, back=back) for calls, back in (
                (traced.forward, False), (traced.backward, True)))
            priced, n = self._priced([*forward, *backward]), len(forward)

            def work(rows: Sequence[int]) -> LayerWork:
                return self._work([forward[i] if i < n else backward[i - n] for i in rows], priced.part(rows), kernels)

            whole = work(range(n))
            self._costs[key] = PieceCost(
                whole, work(range(n, n + len(backward))), work(_selected(forward, shape, part, kernels)),
                RecomputedWork(whole, lambda kind: work(_recomputed(forward, kind))),
                work([n + i for i, call in enumerate(backward) if _is_of_weights(call)]))
        return self._costs[key]

    def least_products_us(self, shape: TransformerShape, part: TransformerPart) -> float:
        """Return the least time of a block's linear layers in forward, µs, without tracing: their FLOPs at the highest
        rate that the board's power sustains (``sustained``). Backward has twice the FLOPs."""
        narrow = narrow_type(shape.linears, self.device)
        rate = max(sustained_tflops(self.device, each) for each in (
            shape.dtype, "tf32", *([] if narrow is None else [narrow.dtype])))
        each = (3 if shape.gated else 2) * shape.hidden
        weights = float(each * (shape.shared_ffn if shape.experts else shape.ffn) // part.tp)
        if shape.attends:  # ``few`` is at least the norms' and biases' parameters, which multiply nothing
            few = 4 * shape.hidden + 3 * shape.heads * shape.width_of_head
            weights += max(shape.attention_parameters(part.tp) - few, 0)
        multiplied = part.microbatch * shape.seq // part.cp * weights
        if shape.experts:
            multiplied += part.rows_of_expert(shape) * (shape.experts // part.ep) * each * (shape.ffn // part.expert_tp)
        return 2.0 * multiplied / rate / 1e6

    def _as_run(self, calls: Sequence[OpCall], shape: TransformerShape, part: TransformerPart,
                kernels: BlockKernels = USUAL_KERNELS, *, back: bool = False) -> Sequence[OpCall]:
        """Return a part's traced calls with the kernels and dtypes of the shape and the plan, and the calls that the
        framework adds."""
        found = [_by_kernels(call, shape.flash_version) for call in calls]
        if part.piece is Piece.BLOCK:
            added = [call for each in self.profile.passes for call in each.calls(shape, part, back=back)]
            found = [*found, *added] if back else [*added, *found]
        if kernels.fp8_attention and "fp8" in self.device.matrix_tflops:
            found = [replace(call, dtype="fp8") if call.family is Family.ATTENTION else call for call in found]
        narrow = narrow_type(shape.linears, self.device) if part.piece is Piece.BLOCK else None
        if narrow is not None:
            found = narrowed(found, shape, narrow)
        elif shape.experts:
            found = [replace(call, kind="grouped") if _of_experts(call, shape) else call for call in found]
        if kernels.fused_experts:
            found = fused_experts(found, shape)
        return stashed(found, shape) if kernels.graphs is Graphs.WHOLE else found

    def _traced(self, shape: TransformerShape, part: TransformerPart) -> TracedCalls:
        """Return a part's calls, derived from a few traced parts where possible, else traced."""
        key = shape, part if shape.experts else _without_experts(part)
        if key not in self._calls:
            self._calls[key] = self._grown(*key) or self._traced_itself(*key)
        return self._calls[key]

    def _traced_itself(self, shape: TransformerShape, part: TransformerPart) -> TracedCalls:
        """Return a part's calls, derived from parts with less tensor parallelism, or kept on disk, else traced."""
        key = shape, part
        if key not in self._calls:
            self._calls[key] = self._split(*key) or self._kept.of(
                "calls", *key, TracedCalls, lambda: self._trace(*key))
        return self._calls[key]

    def _split(self, shape: TransformerShape, part: TransformerPart) -> TracedCalls | None:
        """Return a part's calls, derived from those with two and four tensor-parallel ranks. Each figure is a constant
        plus a share of a whole. ``None`` if a rank has a single head, whose strides differ, or if the part is not known
        to follow this rule."""
        heads = shape.kv_heads if shape.latent is None else shape.heads
        if not _splits(shape, part) or (shape.attends and part.tp >= heads):
            return None
        part.check(shape)
        one, two = (self._traced_itself(*at_ranks(shape, part, tp)) for tp in SPLIT)
        return split_further(one, two, part.tp)

    def _grown(self, shape: TransformerShape, part: TransformerPart) -> TracedCalls | None:
        like = evened(shape, part)
        if like is not None and like != (shape, part):
            return self._with_experts(shape, part, *like)
        for least in (1, 2):
            factor, rest = divmod(part.microbatch, least)
            smaller = [evened(shape, replace(part, microbatch=count)) for count in (least, 2 * least)]
            if rest or factor <= 2 or None in smaller:
                continue
            one, two = (self._traced(*each) for each in smaller if each is not None)
            if (calls := grown(one, two, factor)) is not None:
                return calls
        return None

    def _with_experts(self, shape: TransformerShape, part: TransformerPart, even: TransformerShape,
                      usual: TransformerPart) -> TracedCalls | None:
        """Return the calls of ``usual`` with the experts' calls replaced by those of ``part``."""
        rows, found = part.rows_of_expert(shape), self._traced(even, usual)
        passes, kept = [], found.kept
        for back, calls in enumerate((found.forward, found.backward)):
            there, own = (self._routed(shape, each, back) for each in (usual, part))
            whole = None if there is None or own is None or rows < 2 else with_experts(
                calls, there.corners[0], own.of(rows, shape.experts // part.ep))
            if whole is None or there is None or own is None:
                return None
            passes.append(tuple(whole))
            if not back:
                kept += own.kept_bytes(rows, shape.experts // part.ep) - there.kept_bytes(
                    ROWS, shape.experts // usual.ep)
        return TracedCalls(passes[0], passes[1], kept)

    def _routed(self, shape: TransformerShape, part: TransformerPart, back: int) -> RoutedCalls | None:
        """Return the experts' calls of one pass for parts like this one; ``back`` is 1 for backward."""
        count = shape.experts // part.ep
        key = replace(shape, merges=False, imbalance=1.0), part.expert_tp, count in (1, shape.experts) and count, back
        if key not in self._experts:
            def trace(shape: TransformerShape, part: TransformerPart) -> tuple[Sequence[OpCall], int]:
                found = self._traced_itself(shape, part)
                return (found.backward if back else found.forward), found.kept

            self._experts[key] = routed_calls(shape, part, trace)
        return self._experts[key]

    def _trace(self, shape: TransformerShape, part: TransformerPart) -> TracedCalls:
        from tracer.shape_only.transformer_parts import kept_by_forward, trace_part

        graph = trace_part(shape, part, shape_device(self.device))
        phase = graph.ops.phase
        calls = calls_by_operation(graph, range(len(graph.ops)))
        if shape.state is not None:
            calls = {op: tuple(replace(call, flags=(*call.flags, SCAN)) for call in each)
                     if _scans(graph, op) else each for op, each in calls.items()}
        forward, backward = (tuple(call for op, each in calls.items() if bool(phase[op] == Phase.BACKWARD) is back
                                   for call in each) for back in (False, True))
        return TracedCalls(forward, backward, kept_by_forward(graph))

    def optimizer(self, shape: TransformerShape, part: TransformerPart) -> LayerWork:
        """Return the optimizer's work for the parameters of one block."""
        shape = shape.one_layer()
        # Parameters of a block do not depend on its tokens. Whole experts of a rank (``etp``) need parallel sequences.
        key = shape, replace(part, microbatch=1, cp=1, sequence_parallel=part.etp is not None)
        if key not in self._optimizers:
            part.check(shape)
            calls = self._updates(*key)
            if (narrow := narrow_type(shape.linears, self.device)) is not None:
                # Weights are cast once a step.
                parameters = round(shape.block_parameters(part.tp, part.ep, part.etp))
                calls.append(_cast(parameters, shape.element_bytes, narrow))
            self._optimizers[key] = self._work(calls, self._priced(calls))
        return self._optimizers[key]

    def _updates(self, shape: TransformerShape, part: TransformerPart) -> list[OpCall]:
        """Return the optimizer's calls, from few traces. Every figure is a + b·experts of the rank + c·share of the
        layers + d·experts·share."""
        few = (2, 4)
        if shape.experts % few[1] == 0 < shape.experts and (own := shape.experts // part.ep) not in few:
            one, two = (self._updates(shape, replace(part, ep=shape.experts // count)) for count in few)
            if len(one) == len(two):
                return [along(*pair, own - few[0], few[1] - few[0]) for pair in zip(one, two, strict=True)]
        if _splits(shape, part):
            fewer, more = (TracedCalls(tuple(self._updates(shape, replace(part, tp=tp))), ()) for tp in SPLIT)
            if (split := split_further(fewer, more, part.tp)) is not None:
                return list(split.forward)
        return self._kept.of("optimizer", shape, part, list[OpCall], lambda: self._trace_optimizer(shape, part))

    def _trace_optimizer(self, shape: TransformerShape, part: TransformerPart) -> list[OpCall]:
        from tracer.shape_only.transformer_parts import trace_optimizer

        graph = trace_optimizer(shape, part, shape_device(self.device))
        return [call for each in calls_by_operation(graph, range(len(graph.ops))).values() for call in each]

    def saved_bytes(self, shape: TransformerShape, part: TransformerPart) -> int:
        """Return the bytes that forward of a part keeps for backward, including the part's output."""
        key = shape.one_layer(), part
        if key not in self._saved:
            traced = self._traced(*key)
            self._saved[key] = traced.kept
            if part.piece is Piece.BLOCK and (narrow := narrow_type(shape.linears, self.device)) is not None:
                self._saved[key] -= round(kept_less(traced.forward, shape, narrow))
        added = (each.kept * each.size(*key) for each in self.profile.passes) if part.piece is Piece.BLOCK else ()
        return self._saved[key] + shape.element_bytes * sum(added)

    def priced(self, shape: TransformerShape, part: TransformerPart) -> PricedCalls:
        """Return a part's calls of forward and backward, priced at the sustained clock of a busy device."""
        shape = shape.one_layer()
        traced = self._traced(shape, part)
        return self._priced([*self._as_run(traced.forward, shape, part),
                             *self._as_run(traced.backward, shape, part, back=True)])

    def kept_bytes(self, shape: TransformerShape, part: TransformerPart, kind: Recomputation) -> float:
        """Return the bytes that a block keeps with this kind of recomputation, in addition to its input."""
        if kind not in _KEPT:
            return 0.0
        forward = self._traced(shape.one_layer(), part).forward
        return float(sum(forward[i].bytes_written for i in _KEPT[kind](forward)))

    def module_bytes(self, shape: TransformerShape, part: TransformerPart, modules: Sequence[str]) -> float:
        """Return the bytes that a block saves if backward computes results of these modules (``MODULES``) again. These
        are queries, keys and values; cast inputs of linear layers; everything between a dense block's two products."""
        shape = shape.one_layer()
        forward = self._as_run(self._traced(shape, part).forward, shape, part)
        narrow = narrow_type(shape.linears, self.device)
        cast = 1.0 if narrow is None else narrow.bytes / shape.element_bytes
        less = 0.0
        for call, module in zip(forward, _modules(forward, shape, part), strict=True):
            if module not in modules or call.kind == "cast":
                continue
            if module == "mla_up_proj":
                less += call.bytes_written * (call.family in (Family.GEMM, Family.CONCAT))
            elif module in ("layernorm", "moe_act"):
                less += call.bytes_written * cast * (call.family in (Family.NORM, Family.ELEMENTWISE))
            elif module == "mlp":
                wide = call.bytes_written > part.microbatch * shape.seq // part.cp * shape.hidden * shape.element_bytes
                less += call.bytes_written * wide * (1.0 if call.family is Family.GEMM else cast)
        return less

    @staticmethod
    def _work(calls: Sequence[OpCall], priced: PricedCalls, kernels: BlockKernels = USUAL_KERNELS) -> LayerWork:
        if not calls:
            return LayerWork()
        us = priced.times_us
        product = np.array([call.family in PRODUCTS for call in priced.calls])[priced.index]
        source = priced.source[priced.index]
        low, high = priced.total_interval_us()
        # The kernels of state-space scans were not measured: all of them may be off by the same factor.
        scans = float(us[[SCAN in call.flags for call in calls]].sum())
        low, high = low - scans * -math.expm1(-STATE_SPACE_KERNELS), high + scans * math.expm1(STATE_SPACE_KERNELS)
        return LayerWork(float(us[product].sum()), float(us[~product].sum()), low, high, _launched(calls, kernels),
                         {int(each): float(us[source == each].sum()) for each in np.unique(source)})

    def _priced(self, calls: Sequence[OpCall]) -> PricedCalls:
        """Price calls at the sustained clock of a busy device, each distinct kernel once for all pieces."""
        place: dict[OpCall, int] = {}
        index = np.array([place.setdefault(call, len(place)) for call in calls], np.int64)
        if new := [call for call in place if call not in self._kernels]:
            priced = sustained(price(new, self.device, self._models), self.device)
            columns = (priced.time_us, priced.low_us, priced.high_us, priced.source, priced.by_variant, priced.common)
            self._kernels.update(zip(new, zip(*(each.tolist() for each in columns), strict=True), strict=True))
        rows = [self._kernels[call] for call in place]
        time, low, high, source, by_variant, common = zip(*rows, strict=True) if rows else [()] * 6
        return PricedCalls(list(place), index, np.array(time, np.float64), np.array(low, np.float64),
                           np.array(high, np.float64), np.array(source, np.int8), np.array(by_variant, np.bool_),
                           np.array(common, np.float64))


def _without_experts(part: TransformerPart) -> TransformerPart:
    """Return a part with the default expert parallelism, which does not matter to a block without experts."""
    return replace(part, ep=1, etp=None, once=False)


def _recomputed(forward: Sequence[OpCall], kind: Recomputation) -> list[int]:
    """Return the indices of forward's calls that backward runs again."""
    kept = set(_KEPT[kind](forward))
    return [i for i in range(max(_products(forward), default=len(forward))) if i not in kept]


def _scans(graph: ExecutionGraph, op: int) -> bool:
    """Return whether an operation belongs to a state-space mixer's recurrence."""
    return graph.strings[int(graph.ops.module[op])].rpartition("/")[2] == SCAN


def _products(forward: Sequence[OpCall]) -> list[int]:
    return [i for i, call in enumerate(forward) if call.family is Family.GEMM and SCAN not in call.flags]


def _projections(forward: Sequence[OpCall]) -> list[int]:
    """Return the indices of the products before attention."""
    first = next((i for i, call in enumerate(forward) if call.family is Family.ATTENTION or call.kind == "softmax"), 0)
    return [i for i in _products(forward) if i < first and forward[i].kind != "bmm"]


def _operators(forward: Sequence[OpCall]) -> list[int]:
    """Return the indices of attention and of every second product, from the first."""
    return [i for i, call in enumerate(forward) if call.family is Family.ATTENTION] + _products(forward)[::2]


_KEPT: Mapping[Recomputation, Callable[[Sequence[OpCall]], list[int]]] = {
    Recomputation.NEEDED: lambda forward: [], Recomputation.PROJECTIONS: _projections,
    Recomputation.OPERATORS: _operators}
"""By kind of recomputation: a function that returns the indices of forward's calls whose results are kept."""


def _is_of_weights(call: OpCall) -> bool:
    """Return whether a call gives a linear layer's weight gradient: output gradient, transposed, times input."""
    return call.family is Family.GEMM and call.layout.startswith("t")


def _by_kernels(call: OpCall, version: int) -> OpCall:
    """Return a fused attention call with the kernel of ``TransformerShape.flash_version`` instead of PyTorch's. This
    includes attention with narrower value heads, for which PyTorch only has its memory-efficient kernels."""
    name, _, direction = call.kind.partition("_")
    if call.family is not Family.ATTENTION or name not in ("flash", "efficient"):
        return call
    return replace(call, kind=f"{({0: 'cudnn', 1: 'flash1', 2: 'flash', 3: 'flash3'}[version])}_{direction}")


def _selected(forward: Sequence[OpCall], shape: TransformerShape, part: TransformerPart,
              kernels: BlockKernels) -> list[int]:
    """Return the indices of forward's calls that selective recomputation runs again: those of the plan's modules, by
    default of attention's core."""
    if part.piece is not Piece.BLOCK:
        return []
    modules = _modules(forward, shape, part)
    return [i for name in kernels.modules or ("core_attn",) for i, own in enumerate(modules) if own == name]


def _modules(forward: Sequence[OpCall], shape: TransformerShape, part: TransformerPart) -> list[str]:
    """Return the module (``MODULES``) of each call of a block's forward, "" if it belongs to no module."""
    grouped = [i for i, call in enumerate(forward) if call.kind == "grouped"]
    attends = next((i for i, call in enumerate(forward) if call.family is Family.ATTENTION), 0)
    after = next((i for i in range(attends, len(forward)) if forward[i].family is Family.NORM), len(forward))
    found = []
    for i, call in enumerate(forward):
        name = ""
        if not shape.flash and shape.attends and SCAN not in call.flags and (
                call.kind in _CORE or _is_core_dropout(call, shape, part)):
            name = "core_attn"
        elif call.family is Family.NORM and call.dims[-1] == shape.hidden:
            name = "layernorm"
        elif shape.latent is not None and i < attends and (
                call.dims[-1] in (shape.latent.query_rank, shape.latent.key_rank)
                if call.family is Family.GEMM else call.family in (Family.CONCAT, Family.ELEMENTWISE)):
            name = "mla_up_proj"
        elif not shape.experts and i > after:
            name = "mlp"
        elif grouped and grouped[0] < i < grouped[-1] and call.kind != "cast":
            name = "moe_act"
        found.append(name)
    return found


def _is_core_dropout(call: OpCall, shape: TransformerShape, part: TransformerPart) -> bool:
    """Return whether a call is the dropout of attention's probabilities, which has more elements than other dropout."""
    return call.family is Family.RANDOM and call.dims[0] == (
        shape.heads // part.tp * part.microbatch * (shape.seq // part.cp) * shape.seq)
