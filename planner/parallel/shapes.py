"""``advise``: find sizes of a decoder that cost more GPU time than similar sizes, and the reasons.

Compared is the time that GPUs work on a token, forward and backward, without collectives, the optimizer and the host,
which ``plan`` includes. After Anthony et al., "The Case for Co-Designing Model Architectures with Hardware" (2024).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from typing import TYPE_CHECKING, Any

import numpy as np

from kernel_models.device import DeviceSpec, find_device
from kernel_models.heuristics.shape_terms import TERMS, arithmetic_share, shape_terms
from kernel_models.op_call import OpCall
from kernel_models.pricing import LIMITED, sustained_tflops
from kernel_models.profile import DeviceProfile
from planner.parallel.corrections import Z80
from planner.parallel.decoder import read_decoder
from planner.parallel.layer_costs import LayerCosts
from tracer.arrays import Float64
from tracer.job import Job
from tracer.parallel_plan import ParallelPlan, PlanError, Recomputation
from tracer.shape_only.errors import ShapeOnlyError
from tracer.shape_only.transformer import Piece, TransformerPart, TransformerShape
from tracer.shown import Shown, frame_of

if TYPE_CHECKING:
    import pandas

HEAD_SIZES = range(32, 257, 8)
"""Head sizes that are tried: those with kernels of fused attention, in steps of one vector load."""
STEPS = (8, 64, 128, 256)
"""Multiples, on each rank, to which inner widths and vocabularies are rounded."""
NEAR, MOST_WIDTHS = 0.04, 6
"""Largest relative change of inner widths and widths, and most values of each that are tried on either side."""


@dataclass(frozen=True, slots=True)
class ShapeChange:
    """A change of one size of a decoder or its plan.

    Attributes:
        setting: name of the size: "heads", "ffn", "vocab", "hidden", "microbatch", "tp" or "".
        value: the new value as text.
        shape, plan: the decoder and its plan after the change.
        credited: whether more parameters count as a larger model, so that time per parameter is compared.
    """

    setting: str
    value: str
    shape: TransformerShape
    plan: ParallelPlan
    credited: bool = False


def neighbours(shape: TransformerShape, plan: ParallelPlan) -> Iterator[ShapeChange]:
    """Yield the changes to compare, setting by setting, without the decoder itself."""
    ranks, size, tp = plan.expert_tp if shape.experts else plan.tp, plan.samples, plan.tp
    inner = [ShapeChange("ffn", f"{ffn:,}", changed(shape, ffn=ffn), plan, credited=True)
             for ffn in (_around(shape.ffn, ranks) if shape.ffn else ())]
    batches = [ShapeChange("microbatch", f"{count}", shape, replace(plan, microbatch=count))
               for count in (size // 2, size - 1, size + 1, 2 * size, 4 * size) if count > 0]
    tensor = [ShapeChange("tp", f"{each}", shape, replace(
        plan, tp=each, sequence_parallel=plan.sequence_parallel and each > 1,
        tensor_overlap=plan.tensor_overlap and each > 1)) for each in (tp // 2, 2 * tp, 4 * tp) if each > 0]
    seen = {(shape, plan)}
    for each in (*_heads(shape, plan), *inner, *_vocabulary(shape, plan), *_widths(shape, plan), *batches, *tensor):
        if (each.shape, each.plan) not in seen:
            seen.add((each.shape, each.plan))
            yield each


def changed(shape: TransformerShape, **values: Any) -> TransformerShape:
    """Return the decoder with other sizes; runs of blocks change too where they have the decoder's size."""
    own = {name: getattr(shape, name) for name in values}
    stack = tuple(replace(run, hidden=values.get("hidden", run.hidden), **{
        name: value for name, value in values.items() if getattr(run, name) == own[name]}) for run in shape.stack)
    return replace(shape, stack=stack, **values)


def _heads(shape: TransformerShape, plan: ParallelPlan) -> Iterator[ShapeChange]:
    """Yield changes of the number of heads with the same parameters and the same ratio of query to key heads."""
    if shape.latent is not None or not any(run.attends for run in shape.runs):
        return
    size = shape.width_of_head
    inner, keys = shape.heads * size, shape.kv_heads * size
    for new in HEAD_SIZES:
        heads, kv_heads = inner // new, keys // new
        if inner % new or keys % new or heads % kv_heads or heads % plan.tp or kv_heads % plan.tp:
            continue
        given = new if shape.head_size or inner != shape.hidden else 0
        yield ShapeChange("heads", f"{heads} of {new}",
                          changed(shape, heads=heads, kv_heads=kv_heads, head_size=given), plan)


def _around(size: int, ranks: int) -> list[int]:
    """Return sizes near a size: multiples of ``STEPS`` times the ranks, and multiples of a tile's width."""
    found = set()
    for step in (each * ranks for each in STEPS):
        for value in (size // step * step, -(-size // step) * step):
            found.add(value)
    wide = 128 * ranks
    for offset in range(1, MOST_WIDTHS + 1):
        found |= {(size // wide - offset + 1) * wide, (size // wide + offset) * wide}
    near = sorted(each for each in found if each > 0 and abs(each / size - 1) <= NEAR)
    below, above = [each for each in near if each < size], [each for each in near if each > size]
    return below[-MOST_WIDTHS:] + above[:MOST_WIDTHS]


def _vocabulary(shape: TransformerShape, plan: ParallelPlan) -> Iterator[ShapeChange]:
    """Yield larger vocabularies; none is smaller, because no token can be left out. Padding adds no model."""
    for step in STEPS:
        vocab = -(-shape.vocab // (step * plan.tp)) * step * plan.tp
        yield ShapeChange("vocab", f"{vocab:,}", changed(shape, vocab=vocab), plan)


def _widths(shape: TransformerShape, plan: ParallelPlan) -> Iterator[ShapeChange]:
    """Yield widths with more or fewer heads of the same size, and an inner width in proportion."""
    if shape.latent is not None or shape.heads * shape.width_of_head != shape.hidden or any(
            run.state is not None for run in shape.runs):
        return  # a mixer's width depends on the residual stream's
    group = shape.heads // shape.kv_heads
    found = []
    for heads in range(1, 2 * shape.heads):
        kv_heads, hidden = heads // group, heads * shape.width_of_head
        if heads % (group * plan.tp) or kv_heads % plan.tp or heads == shape.heads or (
                abs(hidden / shape.hidden - 1) > 2 * NEAR):
            continue
        step = 64 * plan.tp
        ffn = max(round(shape.ffn * hidden / shape.hidden / step), 1) * step
        found.append(ShapeChange("hidden", f"{hidden:,}", changed(
            shape, hidden=hidden, heads=heads, kv_heads=kv_heads, ffn=ffn), plan, credited=True))
    found.sort(key=lambda each: abs(each.shape.hidden - shape.hidden))
    yield from found[:MOST_WIDTHS]


REPEATED, SHARE = 0.035, 0.40
"""Standard deviation of the logarithm of measured over predicted time of a kernel whose sizes change: a constant, and a
share of the change of the kernel's efficiency. Fitted in ``benchmarks/shape_advice.py`` to neighbouring sizes of four
measured sweeps; the other sweeps judge it."""
REST = "arithmetic and traffic"
"""Name of all time that no other term covers: the work itself, and kernels that the terms do not describe."""
TOLD = 0.2
"""Reasons are shown if they have at least this share of the largest reason's time."""


@dataclass(frozen=True, slots=True)
class ShapeCost:
    """GPU time of a decoder's kernels for a token, and what its sizes cost.

    Attributes:
        calls: distinct kernels.
        us: time of all runs of each kernel for a token, µs of GPU time [n].
        one_us: time of one run of each kernel, µs [n].
        lost_us: by term, the part of ``us`` that full tiles and whole rows would save, µs [n].
    """

    calls: tuple[OpCall, ...]
    us: Float64
    one_us: Float64
    lost_us: Mapping[str, Float64]

    @property
    def total_us(self) -> float:
        """Time of all kernels, µs."""
        return float(self.us.sum())

    def lost(self) -> dict[str, float]:
        """Return the share of the time that each term costs."""
        return {name: float(us.sum()) / self.total_us for name, us in self.lost_us.items()}


@dataclass(frozen=True, slots=True)
class ShapeAdvice:
    """A change of a size, and its gain.

    Attributes:
        change: the change.
        us: GPU time of a token after the change, µs.
        gain: share of the time that it saves; per parameter if the change is ``credited``.
        low, high: 80% interval of the gain.
        parameters: parameters after the change over those before.
        reasons: by term, increase of its cost as a share of the time before; negative for a decrease.
    """

    change: ShapeChange
    us: float
    gain: float
    low: float
    high: float
    parameters: float
    reasons: Mapping[str, float]

    @property
    def sure(self) -> bool:
        """Return whether the interval excludes a gain of zero."""
        return self.low > 0 or self.high < 0

    def why(self) -> str:
        """Return the terms that change the time most, largest first, as text."""
        most = max((abs(value) for value in self.reasons.values()), default=0.0)
        told = sorted((name for name, value in self.reasons.items() if abs(value) >= max(TOLD * most, 0.001)),
                      key=lambda name: -abs(self.reasons[name]))
        return ", ".join(f"{abs(self.reasons[name]):.1%} {'more' if self.reasons[name] > 0 else 'less'} for "
                         f"{TERMS.get(name, name)}" for name in told)


@dataclass(frozen=True, repr=False)
class ShapeReport(Shown):
    """A decoder's sizes on a device, compared with similar sizes.

    Attributes:
        model: name of the decoder.
        shape, plan, device: the compared decoder, its plan and the device.
        cost: GPU time of the unchanged decoder.
        advice: changes, the largest gain first.
        refused: changes that are not possible, with the reason.
        notes: assumptions.
    """

    model: str
    shape: TransformerShape
    plan: ParallelPlan
    device: DeviceSpec
    cost: ShapeCost
    advice: tuple[ShapeAdvice, ...]
    refused: tuple[tuple[ShapeChange, str], ...]
    notes: tuple[str, ...] = ()

    def headline(self) -> str:
        """Return the time of a token and the largest gain in a line."""
        best = f"; {self.advice[0].change.setting} {self.advice[0].change.value} gains {self.advice[0].gain:.1%}" if (
            self.advice) else ""
        return f"{self.model} on {self.device.name}: {self.cost.total_us:,.4g} µs of a GPU a token{best}"

    def tables(self) -> Mapping[str, Callable[[], pandas.DataFrame]]:
        """Return tables: changes, largest gain first; kernels with what their sizes cost; impossible changes."""
        cost = self.cost
        return {"changes": lambda: frame_of({
            "setting": each.change.setting, "value": each.change.value, "us_per_token": each.us, "gain": each.gain,
            "low": each.low, "high": each.high, "sure": each.sure, "parameters_ratio": each.parameters,
            "per_parameter": each.change.credited, "why": each.why()} for each in self.advice),
            "kernels": lambda: frame_of({
                "kind": call.kind, "layout": call.layout, "sizes": call.dims, "us_per_token": float(cost.us[row]),
                **{f"lost_to_{name}_us": float(us[row]) for name, us in cost.lost_us.items()}}
                for row, call in enumerate(cost.calls)),
            "refused": lambda: frame_of(({"setting": change.setting, "value": change.value, "reason": reason}
                                         for change, reason in self.refused), ["setting", "value", "reason"])}


def shapes(source: str | Job, *, device: str = "h200-sxm", settings: Sequence[str] = (), preset: str | None = None,
           parallel: str = "microbatch=1", profile: DeviceProfile | None = None) -> ShapeReport:
    """Find the sizes of a model that cost more GPU time than their neighbours.

    Args:
        source, settings, preset: as in ``plan``.
        device: the GPU: a name or a file.
        parallel: split of layers and size of a micro-batch, such as "tp=8,microbatch=4,sequence_parallel".
        profile: models fitted for the device.

    Raises:
        PlanError: the source is no decoder, or cannot be split in this way.
        ForetraceError: a name or a file is unknown, or cannot be read.
    """
    plan, spec = ParallelPlan.parse(parallel), find_device(device)
    name, shape, _, notes = read_decoder(source, settings, preset)
    if plan.dp * plan.pp > 1 or plan.recompute is not Recomputation.NONE or plan.passes > 1:
        notes = (*notes, "Of the plan its micro-batch, tp, cp and ep decide what a rank's layers are; replicas, "
                         "stages, recomputation and micro-batches are left out.")
    return replace(advise(shape, plan, LayerCosts(spec, profile)), model=name, notes=notes)


def advise(shape: TransformerShape, plan: ParallelPlan, pieces: LayerCosts,
           settings: Collection[str] | None = None) -> ShapeReport:
    """Compare a decoder with decoders of similar sizes.

    Args:
        shape: sizes of the decoder.
        plan: split of its layers, and its micro-batch.
        pieces: costs on the device.
        settings: sizes that may change, as in ``ShapeChange``; all by default.

    Raises:
        PlanError: the plan cannot split the decoder.
    """
    try:
        now = cost_of(shape, plan, pieces)
    except ShapeOnlyError as error:
        raise PlanError(str(error)) from None
    found, refused = [], []
    for change in neighbours(shape, plan):
        if settings is not None and change.setting not in settings:
            continue
        try:
            found.append(compared(change, shape, now, cost_of(change.shape, change.plan, pieces)))
        except ShapeOnlyError as error:
            refused.append((change, str(error)))
    found.sort(key=lambda each: -each.gain)
    return ShapeReport("a decoder", shape, plan, pieces.device, now, tuple(found), tuple(refused))


def cost_of(shape: TransformerShape, plan: ParallelPlan, pieces: LayerCosts) -> ShapeCost:
    """Return GPU time of a decoder's kernels for a token on one rank, multiplied by the ranks that share a layer.

    Raises:
        ShapeOnlyError: the plan does not divide the shape.
    """
    calls: list[OpCall] = []
    us: list[float] = []
    times: list[float] = []
    each_token = plan.tp * plan.cp / (plan.samples * shape.seq)
    for kind, part, count in _parts(shape, plan):
        part.check(kind)
        priced = pieces.priced(kind, part)
        runs = np.bincount(priced.index, minlength=len(priced.calls))
        calls += priced.calls
        us += priced.time_us.tolist()
        times += (runs * count * each_token).tolist()
    one_us, every = np.array(us), np.array(times)
    lost = {name: each * every for name, each in _lost(calls, one_us, pieces.device).items()}
    return ShapeCost(tuple(calls), one_us * every, one_us, lost)


def _parts(shape: TransformerShape, plan: ParallelPlan) -> Iterator[tuple[TransformerShape, TransformerPart, int]]:
    """Yield a rank's pieces with their numbers."""
    def part(piece: Piece) -> TransformerPart:
        return TransformerPart(piece, plan.samples, plan.tp, plan.cp, plan.ep, plan.sequence_parallel, plan.etp)

    for run in shape.runs:
        yield run.one_layer(), part(Piece.BLOCK), run.layers
    for piece in (Piece.EMBEDDING, Piece.HEAD):
        yield shape.one_layer(), part(piece), 1


def _lost(calls: Sequence[OpCall], us: Float64, device: DeviceSpec) -> dict[str, Float64]:
    """Return what each term costs of one run of each kernel, µs [n]. Without a term, arithmetic would be faster, down
    to the rate that the board's power sustains."""
    share = arithmetic_share(calls, device)
    fed = np.array([call.flops / sustained_tflops(device, call.dtype) / 1e6 if call.family in LIMITED else 0.0
                    for call in calls])
    return {name: us - np.maximum(us * (1.0 - share * (1.0 - 1.0 / factor)), np.minimum(fed, us))
            for name, factor in shape_terms(calls, device).items()}


def compared(change: ShapeChange, shape: TransformerShape, now: ShapeCost, then: ShapeCost) -> ShapeAdvice:
    """Return what a change of a decoder gains, from its cost before and after."""
    more = change.shape.parameters / shape.parameters
    ratio = then.total_us / now.total_us / (more if change.credited else 1.0)
    spread = Z80 * _spread(now, then)
    before, after = now.lost(), then.lost()
    scale = then.total_us / now.total_us
    reasons = {name: after[name] * scale - before[name] for name in TERMS}
    reasons[REST] = scale / (more if change.credited else 1.0) - 1.0 - sum(reasons.values())
    return ShapeAdvice(change, then.total_us, 1.0 - ratio, 1.0 - ratio * exp(spread), 1.0 - ratio * exp(-spread), more,
                       reasons)


def _spread(now: ShapeCost, then: ShapeCost) -> float:
    """Return the standard deviation of the logarithm of the ratio of two times.

    Errors of kernels that both have cancel. The other kernels are paired in order. Errors of pairs are independent;
    each consists of ``REPEATED`` and of ``SHARE`` times the change of efficiency.
    """
    common = set(now.calls) & set(then.calls)
    before = [i for i, call in enumerate(now.calls) if call not in common]
    after = [i for i, call in enumerate(then.calls) if call not in common]
    pairs = zip(before, after, strict=True) if len(before) == len(after) else ((None, i) for i in after)
    variance = 0.0
    for i, j in pairs:
        weight = then.us[j] / then.total_us
        moved = 0.0 if i is None else abs(_efficiency(then, j) - _efficiency(now, i))
        variance += weight**2 * (REPEATED**2 + (SHARE * moved)**2)
    return float(np.sqrt(variance))


def _efficiency(cost: ShapeCost, i: int) -> float:
    """Return the logarithm of a kernel's time over its work: FLOPs of products, bytes of other kernels."""
    call = cost.calls[i]
    work = call.flops if call.family in LIMITED and call.flops else call.bytes_moved
    return log(cost.one_us[i]) - log(max(work, 1.0))
