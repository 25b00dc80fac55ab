"""Attention written out, replaced by one fused operator."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from graph_predictor.prediction.operation_costs import WRITTEN_OUT
from graph_predictor.prediction.rewriting import units_of
from graph_predictor.prediction.scenario import EditError, Replacement, Rewriting, Scenario, WorkUnits
from kernel_models.families.attention import attention
from kernel_models.op_call import Family, OpCall, itemsize
from kernel_models.operation import Operation, calls_of
from tracer.columns import within
from tracer.graph import ExecutionGraph, Phase
from tracer.views import forward_backward_pairs

BETWEEN = frozenset({Family.ELEMENTWISE, Family.COPY, Family.RANDOM, Family.REDUCTION, Family.OTHER})
"""Families of work between the two products, without the softmax: scale, mask, dropout, copies, fully masked rows."""
MOST_BETWEEN = 16
"""Most kernels between the two products of one attention; chosen, above the longest chain of eager models."""


@dataclass(frozen=True)
class FlashAttention:
    """Replace attention written as two products and a softmax by a fused operator, forward and backward.

    Matches ``aten::_scaled_dot_product_attention_math``, and two batched products with one softmax of the scores
    between them; their backward is found by autograd's sequence numbers. Each becomes one call that never writes the
    scores: flash attention for types of 16 bits and on CPUs, else the memory-efficient kernels, which take fp32.
    Attention that no fused kernel of a CPU supports (``_refusal``) stays as it is. The new call takes the replaced
    operations' time × model(fused) / model(written out). Assumes that nothing else reads the scores. A mask counts as
    causal, so that the fused operator skips masked blocks, only where the recorded operator states it.
    """

    def describe(self) -> str:
        """Return one phrase for reports."""
        return "flash attention"

    def apply(self, scenario: Scenario) -> Scenario:
        """Return the scenario with this edit applied (``Edit.apply``)."""
        units = units_of(scenario)
        every = list(_attentions(scenario, units))
        if not every:
            if any(call.family is Family.ATTENTION for calls in units.calls for call in calls):
                raise EditError("The step's attention is fused already: no products with a softmax between them were "
                                "found.")
            raise EditError("The step has no attention that is written out: no softmax was found between two batched "
                            "products.")
        refused = [why for one in every if (why := _refusal(one.call, units.on_host))]
        if len(refused) == len(every):
            raise EditError(f"{refused[0]}: it stays written out there.")
        found = replace_attention(scenario, units).replacements
        scenario.known_source()
        scenario = replace(scenario, rewrites={**scenario.rewrites, "0 attention": replace_attention})
        backward = sum(one.calls[0].kind.endswith("backward") for one in found)
        forward, steps = len(found) - backward, scenario.cycle.steps
        left = f" {len(refused) / steps:,.0f} stay written out. {refused[0]}." if refused else ""
        return scenario.with_note(
            f"{forward / steps:,.0f} attentions a step, {backward / steps:,.0f} of them with their backward, become "
            f"{found[0].calls[0].kind.rsplit('_', 1)[0]} attention.{left}")


@dataclass(frozen=True, slots=True)
class _WrittenOut:
    """An attention that is written out: its rank, its units and operations in forward, and the fused call for it."""

    rank: int
    members: np.ndarray
    ops: np.ndarray
    call: OpCall


def _refusal(call: OpCall, on_host: bool) -> str:
    """Return why no fused kernel can compute an attention; "" if one can.

    A CPU has one fused kernel, ``_scaled_dot_product_flash_attention_for_cpu``. PyTorch uses it for every type, for any
    mask without a gradient, and for shared keys. It supports no dropout, and no values of another size than keys
    (ATen/native/transformers/sdp_utils_cpp.cpp).
    """
    if not on_host:
        return ""
    if "dropout" in call.flags:
        return "On a CPU PyTorch has no fused attention with dropout"
    head, value = call.dims[5:7]
    return "" if head == value else "On a CPU PyTorch has no fused attention for values of another size than keys"


def replace_attention(scenario: Scenario, units: WorkUnits) -> Rewriting:
    """Return replacements of every attention that a fused kernel supports, forward and backward."""
    found: list[Replacement] = []
    backward: dict[int, dict[int, list[int]]] = {}
    for one in _attentions(scenario, units):
        if _refusal(one.call, units.on_host):
            continue
        found.append(Replacement(one.members, (one.call,)))
        if one.rank not in backward:
            backward[one.rank] = _backward_units(units, _alive(units, one.rank), scenario.built.graphs[one.rank])
        behind = sorted({u for op in one.ops.tolist() for u in backward[one.rank].get(op, ())},
                        key=lambda u: int(units.start[u]))
        if behind:
            found.append(Replacement(np.array(behind, np.int64), (_backward_call(one.call),)))
    return Rewriting(found)


def _attentions(scenario: Scenario, units: WorkUnits) -> Iterator[_WrittenOut]:
    """Yield every attention that is written out, rank by rank."""
    for rank, graph in enumerate(scenario.built.graphs):
        for members, ops, call in _forward(units, _alive(units, rank), graph):
            yield _WrittenOut(rank, members, ops, call)


def _alive(units: WorkUnits, rank: int) -> np.ndarray:
    """Return a rank's units that are not removed and have an operation."""
    return np.flatnonzero((units.rank == rank) & units.alive & (units.op >= 0))


def _forward(units: WorkUnits, mine: np.ndarray,
             graph: ExecutionGraph) -> Iterator[tuple[np.ndarray, np.ndarray, OpCall]]:
    """Yield units, operations and fused call of each attention in forward."""
    names = np.array([text in WRITTEN_OUT for text in graph.strings] or [False], np.bool_)
    taken = np.zeros(len(units), np.bool_)
    for op in np.flatnonzero(names[graph.ops.name]).tolist():
        inside = within(graph.ops.parent, np.arange(len(graph.ops)) == op)
        members = mine[inside[units.op[mine]]]
        made = _products(units, members)
        calls = calls_of(Operation.from_graph(graph, op))
        if len(members) < 2 or made is None:
            continue
        if calls and calls[0].family is Family.ATTENTION and "unsized" not in calls[0].flags:
            # A recorded operator may lack its numbers; its random draws are visible inside it.
            flags = tuple((set(calls[0].flags) - {"causal"}) | (set(made.flags) & {"dropout"}))
            batch, heads, kv_heads = calls[0].dims[:3]
            # The products inside have the edited sizes and type. The operator knows how many heads share keys.
            made = replace(made, flags=flags)
            grown = made.dims[1] / max(batch * heads, 1)
            made = _call(_kind(made.dtype, units.on_host), max(round(batch * grown), 1), heads, kv_heads,
                         made.dims[3:7], made.dtype, "causal" in calls[0].flags, flags)
        taken[members] = True
        yield members, np.flatnonzero(inside), made
    yield from _written_out(units, mine[~taken[mine]], graph)


def _written_out(units: WorkUnits, mine: np.ndarray, graph: ExecutionGraph) -> Iterator[
        tuple[np.ndarray, np.ndarray, OpCall]]:
    """Yield each two batched products with one softmax of the scores between them (as ``_forward``)."""
    rows = mine[units.phase[mine] != Phase.BACKWARD].tolist()
    for at, u in enumerate(rows):
        softmax = _one(units, u, Family.SOFTMAX)
        if softmax is None or "backward" in softmax.kind:
            continue
        scores = softmax.dims[0] * softmax.dims[1] * softmax.dims[2]
        first = _product(units, rows, at, -1, scores, softmax.dims[1], is_scores=True)
        second = _product(units, rows, at, 1, scores, softmax.dims[1], is_scores=False)
        if first is None or second is None:
            continue
        members = np.array(rows[first:second + 1], np.int64)
        made = _products(units, members)
        if made is None or len(set(units.lane[members].tolist())) > 1:
            continue
        ops = graph.ops
        begin, end = ops.start_ns[units.op[members[0]]], ops.start_ns[units.op[members[-1]]]
        between = np.flatnonzero((ops.thread == ops.thread[units.op[members[0]]]) & (ops.start_ns >= begin)
                                 & (ops.start_ns <= end))
        last = np.zeros(len(ops), np.bool_)
        last[units.op[members[-1]]] = True
        yield members, np.union1d(between, np.flatnonzero(within(ops.parent, last))), made


def _product(units: WorkUnits, rows: list[int], at: int, direction: int, scores: int, keys: int, *,
             is_scores: bool) -> \
        int | None:
    """Return the position of the batched product before a softmax (makes the scores) or after it (reads them)."""
    for distance in range(1, MOST_BETWEEN + 1):
        here = at + direction * distance
        if not 0 <= here < len(rows):
            return None
        calls = units.calls[rows[here]]
        product = _one(units, rows[here], Family.GEMM)
        if product is not None:
            batch, m, n, k = product.dims
            size, contracted = (batch * m * n, n) if is_scores else (batch * m * k, k)
            return here if batch > 1 and size == scores and contracted == keys else None
        if not all(call.family in BETWEEN for call in calls):
            return None
    return None


def _one(units: WorkUnits, u: int, family: Family) -> OpCall | None:
    calls = [call for call in units.calls[u] if call.family is family and "unsized" not in call.flags]
    return calls[0] if calls else None


def _products(units: WorkUnits, members: np.ndarray) -> OpCall | None:
    """Return the fused call of an attention, by its first and last product [batch·heads, queries, keys, head size]."""
    products = [call for call in (_one(units, int(u), Family.GEMM) for u in members) if call is not None]
    if len(products) < 2:
        return None
    (batch, queries, keys, head), value = products[0].dims, products[-1].dims[2]
    between = [call for u in members.tolist() for call in units.calls[u]]
    flags = tuple(name for name, found in (
        ("bias", any(call.family is Family.ELEMENTWISE and call.kind in _MASKS for call in between)),
        ("dropout", any(call.family is Family.RANDOM for call in between))) if found)
    return _call(_kind(products[0].dtype, units.on_host), 1, batch, batch, (queries, keys, head, value),
                 products[0].dtype, False, flags)


_MASKS = frozenset({"add", "add_", "masked_fill", "masked_fill_", "where"})


def _call(kind: str, batch: int, heads: int, kv_heads: int, sizes: tuple[int, ...], dtype: str, causal: bool,
          flags: tuple[str, ...]) -> OpCall:
    queries, keys, head, value = sizes
    (made,) = attention(f"{kind}_forward", batch, heads, kv_heads, queries, keys, head, value, dtype, causal=causal,
                        flags=flags)
    return made


def _kind(dtype: str, on_host: bool) -> str:
    """Return the fused kernels for a type: flash attention for 16 bits, and on a CPU for all types."""
    return "flash" if on_host or itemsize("fp32" if dtype == "tf32" else dtype) <= 2 else "efficient"


def _backward_call(forward: OpCall) -> OpCall:
    batch, heads, kv_heads, queries, keys, head, value, _ = forward.dims
    flags = tuple(flag for flag in forward.flags if flag != "causal")
    (made,) = attention(forward.kind.replace("forward", "backward"), batch, heads, kv_heads, queries, keys, head, value,
                        forward.dtype, causal="causal" in forward.flags, flags=flags)
    return made


def _backward_units(units: WorkUnits, mine: np.ndarray, graph: ExecutionGraph) -> dict[int, list[int]]:
    """Return the units of the backward function of each forward operation."""
    of_op: dict[int, list[int]] = defaultdict(list)
    parent = graph.ops.parent
    for u in mine[units.phase[mine] == Phase.BACKWARD].tolist():
        here = int(units.op[u])
        while here >= 0:
            of_op[here].append(u)
            here = int(parent[here])
    found: dict[int, list[int]] = defaultdict(list)
    for forward, backward in _pairs(graph):
        found[forward] += of_op.get(backward, [])
    return found


def _pairs(graph: ExecutionGraph) -> list[tuple[int, int]]:
    """Return (forward, backward) operations. If the profiler recorded no backward functions, as in steps traced by
    shapes, every operation of backward itself has its forward operation's number."""
    ops = graph.ops
    numbered = ops.sequence >= 0
    if (numbered & (ops.forward_thread > 0)).any():
        return forward_backward_pairs(graph)
    forward: dict[int, int] = {}
    for row in np.flatnonzero(numbered & (ops.phase == Phase.FORWARD)).tolist():
        forward[int(ops.sequence[row])] = row
    return [(forward[int(ops.sequence[row])], row) for row in np.flatnonzero(
        numbered & (ops.phase == Phase.BACKWARD)).tolist() if int(ops.sequence[row]) in forward]
