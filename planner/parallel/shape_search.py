"""``shape_search``: decoders of as many parameters in other depths, widths and heads, by time and memory a token.

Compared are the time that GPUs work on a token, as ``shapes`` counts it, and the memory of a rank. How well a model of
another depth learns is not judged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kernel_models.device import DeviceSpec, find_device
from kernel_models.op_call import Family, OpCall
from kernel_models.profile import DeviceProfile
from planner.parallel.decoder import read_decoder
from planner.parallel.layer_costs import LayerCosts
from planner.parallel.memory import fullest_of
from planner.parallel.shapes import ShapeAdvice, ShapeChange, ShapeCost, changed, compared, cost_of
from tracer.parallel_plan import ParallelPlan, PlanError
from tracer.shape_only.errors import ShapeOnlyError
from tracer.shape_only.transformer import TransformerShape
from tracer.shown import Shown, frame_of

if TYPE_CHECKING:
    import pandas

WITHIN = 0.01
"""Designs have as many parameters as the decoder, to 1% (chosen)."""
WIDTHS = tuple(2 ** (k / 4) for k in range(-3, 4))
"""Widths that are tried, times the decoder's: 0.59 to 1.68."""
INNER = (0.75, 1.0, 1.25)
"""Inner widths that are tried, of the decoder's proportion to its width; the depth follows from them."""
HEAD_SIZES = (64, 128)
"""Sizes of heads that are tried, together with the decoder's own."""
WHOLE = 64
"""Widths, inner widths and vocabularies are multiples of it on each rank (Anthony et al. 2024, section VI)."""
REPLANNED = 4
"""Number of the quickest designs that are also tried with other micro-batches and tensor parallelism."""


@dataclass(frozen=True, slots=True)
class ShapeDesign:
    """A decoder with as many parameters as a given one, and its plan.

    Attributes:
        advice: its gain over the given decoder, per parameter.
        memory_bytes: memory of a rank at its fullest moment.
        best: whether it is on the Pareto front: no other design takes less time with no more memory.
        products: by part of a layer, the share of the decoder's time that it adds (above 0) or saves.
    """

    advice: ShapeAdvice
    memory_bytes: float
    best: bool
    products: Mapping[str, float]


@dataclass(frozen=True, repr=False)
class ShapeDesigns(Shown):
    """Other designs of a decoder, with as many parameters.

    Attributes:
        model: the decoder's name.
        shape, plan, device: the decoder, plan and device that the designs are compared with.
        us, memory_bytes: the given decoder's GPU time of a token, µs, and its memory of a rank.
        designs: the designs, the largest gain first.
        refused: designs whose layers cannot be split as in the plan.
        notes: assumptions.
    """

    model: str
    shape: TransformerShape
    plan: ParallelPlan
    device: DeviceSpec
    us: float
    memory_bytes: float
    designs: tuple[ShapeDesign, ...]
    refused: int
    notes: tuple[str, ...]

    def headline(self) -> str:
        """Return the number of designs and the gain of the best in a line."""
        gain = f", the quickest gains {self.designs[0].advice.gain:.1%}" if self.designs else ""
        return f"{self.model} on {self.device.name}: {len(self.designs)} designs of as many parameters{gain}"

    def tables(self) -> Mapping[str, Callable[[], pandas.DataFrame]]:
        """Return one table: the designs, the largest gain first."""
        return {"designs": lambda: frame_of(values_of(each) for each in self.designs)}


def values_of(each: ShapeDesign) -> dict[str, object]:
    """Return a design as a row of a table."""
    advice, shape, plan = each.advice, each.advice.change.shape, each.advice.change.plan
    return {"layers": shape.layers, "hidden": shape.hidden, "heads": shape.heads, "kv_heads": shape.kv_heads,
            "head_size": shape.width_of_head, "ffn": shape.ffn, "vocab": shape.vocab, "microbatch": plan.samples,
            "tp": plan.tp, "parameters": shape.parameters, "us_per_token": advice.us, "gain": advice.gain,
            "low": advice.low, "high": advice.high, "memory_bytes": each.memory_bytes, "best": each.best,
            **{f"{name} adds": share for name, share in each.products.items()}}


def shape_search(source: str, *, device: str = "h200-sxm", settings: Sequence[str] = (), preset: str | None = None,
                 parallel: str = "microbatch=1", profile: DeviceProfile | None = None) -> ShapeDesigns:
    """Search depths, widths, heads, inner widths, micro-batches and tensor parallelism at equal parameters.

    Args:
        source, device, settings, preset, parallel, profile: as ``shapes`` takes them.

    Raises:
        PlanError: the source is no decoder of equal blocks, or the plan cannot split it.
        ForetraceError: a name or a file is not known, or cannot be read.
    """
    plan, spec = ParallelPlan.parse(parallel), find_device(device)
    name, shape, _, notes = read_decoder(source, settings, preset)
    return replace(find_designs(shape, plan, LayerCosts(spec, profile)), model=name, notes=notes)


def find_designs(shape: TransformerShape, plan: ParallelPlan, pieces: LayerCosts) -> ShapeDesigns:
    """Compare a decoder with designs of as many parameters.

    Raises:
        PlanError: the blocks are not equal, or lack attention or a feed-forward part; or the plan cannot split them.
    """
    if shape.stack or shape.latent is not None or shape.state is not None or not (shape.attends and shape.ffn):
        raise PlanError("A search over shapes needs a decoder of equal blocks, each with attention of heads and a "
                        "feed-forward part; this one has other blocks. foretrace shapes without --search tells "
                        "which of its sizes cost more than their neighbours.")
    try:
        now, memory = cost_of(shape, plan, pieces), fullest_of(plan, shape, pieces).account.total
    except ShapeOnlyError as error:
        raise PlanError(str(error)) from None
    found: dict[tuple[TransformerShape, ParallelPlan], ShapeDesign] = {}
    refused = 0

    def look_at(other: TransformerShape, split: ParallelPlan) -> None:
        nonlocal refused
        try:
            cost, total = cost_of(other, split, pieces), fullest_of(split, other, pieces).account.total
        except ShapeOnlyError:
            refused += 1
            return
        advice = compared(ShapeChange("", "", other, split, credited=True), shape, now, cost)
        before, after = by_product(now, shape, plan), by_product(cost, other, split)
        found[other, split] = ShapeDesign(advice, total, False, {
            part: (after.get(part, 0.0) - us) / now.total_us for part, us in before.items()})

    for other in designs(shape, plan):
        look_at(other, plan)
    for other, _ in sorted(found, key=lambda key: found[key].advice.us)[:REPLANNED]:
        for split in _plans(plan):
            look_at(other, split)
    front = _front([*found.values()], now.total_us, memory)
    order = sorted((replace(each, best=each in front) for each in found.values()), key=lambda each: -each.advice.gain)
    return ShapeDesigns("a decoder", shape, plan, pieces.device, now.total_us, memory, tuple(order), refused, ())


def designs(shape: TransformerShape, plan: ParallelPlan) -> Iterator[TransformerShape]:
    """Yield other decoders with as many parameters (within the share ``WITHIN``); sizes are whole on each rank."""
    whole, group, seen = WHOLE * plan.tp, shape.heads // shape.kv_heads, {shape}
    vocab = -(-shape.vocab // whole) * whole
    for factor in WIDTHS:
        for size in sorted({*HEAD_SIZES, shape.width_of_head}):
            heads = round(factor * shape.hidden / size / (group * plan.tp)) * group * plan.tp
            hidden = heads * size
            if not heads or hidden % whole:
                continue
            for proportion in INNER:
                wide = changed(shape, hidden=hidden, heads=heads, kv_heads=heads // group, vocab=vocab, head_size=0,
                               ffn=_whole(proportion * shape.ffn / shape.hidden * hidden, whole))
                found = _as_deep(wide, shape.parameters, whole)
                # As wide as queries, keys and values together, the feed-forward part cannot be told from them.
                if found is not None and found not in seen and found.ffn != (heads + 2 * found.kv_heads) * size:
                    seen.add(found)
                    yield found


def _as_deep(wide: TransformerShape, parameters: int, whole: int) -> TransformerShape | None:
    """Return ``wide`` with the depth and inner width nearest to ``parameters``; ``None`` if not within ``WITHIN``."""
    block, rest = wide.block_parameters(), parameters - wide.root_parameters()
    layers = round(rest / block)
    if layers < 1:
        return None
    each = changed(wide, ffn=wide.ffn + whole).block_parameters() - block
    ffn = _whole(wide.ffn + (rest / layers - block) / each * whole, whole)
    found = changed(replace(wide, layers=layers), ffn=ffn)
    return found if abs(found.parameters / parameters - 1) <= WITHIN else None


def _whole(size: float, whole: int) -> int:
    return max(round(size / whole), 1) * whole


def _plans(plan: ParallelPlan) -> Iterator[ParallelPlan]:
    """Yield the plan with half and with twice its micro-batch, and with half and with twice its tensor parallelism."""
    for factor in (0.5, 2.0):
        if plan.samples * factor >= 1:
            yield replace(plan, microbatch=int(plan.samples * factor))
        if (tp := int(plan.tp * factor)) >= 1:
            yield replace(plan, tp=tp, sequence_parallel=plan.sequence_parallel and tp > 1,
                          tensor_overlap=plan.tensor_overlap and tp > 1)


def _front(found: Sequence[ShapeDesign], us: float, memory: float) -> list[ShapeDesign]:
    """Return the Pareto front of time and memory, without designs that the given decoder (``us``, ``memory``) beats."""
    front, least = [], float("inf")
    for each in sorted(found, key=lambda each: (each.memory_bytes, each.advice.us)):
        if memory <= each.memory_bytes:
            least = min(least, us)
        if each.advice.us < least:
            front.append(each)
            least = each.advice.us
    return front


def by_product(cost: ShapeCost, shape: TransformerShape, plan: ParallelPlan) -> dict[str, float]:
    """Return the time of each part of a decoder, forward and backward, µs of a GPU a token."""
    found = dict.fromkeys(("queries, keys and values", "attention", "attention's output", "feed-forward", "logits",
                           "norms and others"), 0.0)
    for call, us in zip(cost.calls, cost.us.tolist(), strict=True):
        found[_product(call, shape, plan)] += us
    return found


def _product(call: OpCall, shape: TransformerShape, plan: ParallelPlan) -> str:
    """Return the part of a decoder that a kernel belongs to, by the sizes that only this part has."""
    if call.family in (Family.ATTENTION, Family.SOFTMAX) or call.kind == "bmm":
        return "attention"
    if call.family is not Family.GEMM and call.kind != "grouped_mm":
        return "norms and others"
    sizes, size = set(call.dims), shape.width_of_head
    if -(-shape.vocab // plan.tp) in sizes:
        return "logits"
    if sizes & {shape.ffn // plan.expert_tp, 2 * shape.ffn // plan.expert_tp} if shape.experts else sizes & {
            shape.ffn // plan.tp, 2 * shape.ffn // plan.tp}:
        return "feed-forward"
    return "queries, keys and values" if (shape.heads + 2 * shape.kv_heads) * size // plan.tp in sizes else (
        "attention's output")
