"""``advise``: which sizes of a decoder cost its GPUs more than their neighbours, and why.

What is compared is the time that GPUs work on a token, forward and backward, without collectives, the optimizer and the
host (``plan`` has these). After Anthony et al., "The Case for Co-Designing Model Architectures with Hardware" (2024).
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
"""Sizes of heads that are tried: those that fused attention has kernels for, in steps of one load."""
STEPS = (8, 64, 128, 256)
"""Multiples, on each rank, that inner widths and vocabularies are rounded to."""
NEAR, MOST_WIDTHS = 0.04, 6
"""How far inner widths and widths are changed, and how many of each kind to either side are tried."""


@dataclass(frozen=True, slots=True)
class ShapeChange:
    """A change of one size.

    Attributes:
        setting: which: "heads", "ffn", "vocab", "hidden", "microbatch", "tp" or "".
        value: the new one, as people write it.
        shape, plan: the decoder and its plan with it.
        credited: more parameters count as more model: time is compared for each of them.
    """

    setting: str
    value: str
    shape: TransformerShape
    plan: ParallelPlan
    credited: bool = False


def neighbours(shape: TransformerShape, plan: ParallelPlan) -> Iterator[ShapeChange]:
    """Yield the changes, setting by setting; none of them is the decoder itself."""
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
    """Return the decoder with other sizes, in every run of its blocks that has the decoder's own."""
    own = {name: getattr(shape, name) for name in values}
    stack = tuple(replace(run, hidden=values.get("hidden", run.hidden), **{
        name: value for name, value in values.items() if getattr(run, name) == own[name]}) for run in shape.stack)
    return replace(shape, stack=stack, **values)


def _heads(shape: TransformerShape, plan: ParallelPlan) -> Iterator[ShapeChange]:
    """As many parameters in other heads: of queries, and in the same proportion of keys and values."""
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
    """Multiples of ``STEPS`` times the ranks nearest to a size, and the nearest of a tile's width."""
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
    """Larger ones alone: tokens cannot be left out, and padding adds no model."""
    for step in STEPS:
        vocab = -(-shape.vocab // (step * plan.tp)) * step * plan.tp
        yield ShapeChange("vocab", f"{vocab:,}", changed(shape, vocab=vocab), plan)


def _widths(shape: TransformerShape, plan: ParallelPlan) -> Iterator[ShapeChange]:
    """More or fewer heads of the same size, with an inner width in proportion."""
    if shape.latent is not None or shape.heads * shape.width_of_head != shape.hidden or any(
            run.state is not None for run in shape.runs):
        return  # a mixer's width goes with the stream's
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
"""Standard deviation of the logarithm of a kernel's time over the predicted one where its sizes change. Terms: what
neighbouring sizes differ by anyway, and a share of the change of its efficiency. Fitted in
``benchmarks/shape_advice.py`` to neighbours of four measured sweeps; the others are judged there."""
REST = "arithmetic and traffic"
"""What no other term covers: work itself, and kernels that the terms do not describe."""
TOLD = 0.2
"""Reasons that are shown have at least so much of the largest one's time."""


@dataclass(frozen=True, slots=True)
class ShapeCost:
    """The time of a rank's kernels for a token, and the share of it that its sizes cost.

    Attributes:
        calls: distinct kernels.
        us: of each, all its runs together, µs of a GPU a token [n].
        one_us: of each, one run, µs [n].
        lost_us: of each, by term, what full tiles of whole rows would save [n].
    """

    calls: tuple[OpCall, ...]
    us: Float64
    one_us: Float64
    lost_us: Mapping[str, Float64]

    @property
    def total_us(self) -> float:
        """All of it."""
        return float(self.us.sum())

    def lost(self) -> dict[str, float]:
        """Return the share of the time that each term costs."""
        return {name: float(us.sum()) / self.total_us for name, us in self.lost_us.items()}


@dataclass(frozen=True, slots=True)
class ShapeAdvice:
    """A change and what it gains.

    Attributes:
        change: the size that changes, and its new value.
        us: GPU time of a token with it, µs.
        gain: share of the time that it saves, for each parameter where more of them are more model.
        low, high: 80% interval of the gain.
        parameters: with it over those without.
        reasons: what the terms cost more (above 0) or less than before, share of the time before.
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
        """Return whether the interval says that the gain, or the loss, is one."""
        return self.low > 0 or self.high < 0

    def why(self) -> str:
        """Say which terms change the time most, in their order."""
        most = max((abs(value) for value in self.reasons.values()), default=0.0)
        told = sorted((name for name, value in self.reasons.items() if abs(value) >= max(TOLD * most, 0.001)),
                      key=lambda name: -abs(self.reasons[name]))
        return ", ".join(f"{abs(self.reasons[name]):.1%} {'more' if self.reasons[name] > 0 else 'less'} for "
                         f"{TERMS.get(name, name)}" for name in told)


@dataclass(frozen=True, repr=False)
class ShapeReport(Shown):
    """A decoder's sizes on a device.

    Attributes:
        model: its name.
        shape, plan, device: what was looked at.
        cost: of the decoder as it is.
        advice: changes, the greatest gain first.
        refused: changes that cannot be, with the reason.
        notes: what was assumed.
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
        """Say what a token takes, and what gains most."""
        best = f"; {self.advice[0].change.setting} {self.advice[0].change.value} gains {self.advice[0].gain:.1%}" if (
            self.advice) else ""
        return f"{self.model} on {self.device.name}: {self.cost.total_us:,.4g} µs of a GPU a token{best}"

    def tables(self) -> Mapping[str, Callable[[], pandas.DataFrame]]:
        """Make the changes, the greatest gain first; the kernels with what their sizes cost; and what cannot be."""
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
        source, settings, preset: as ``plan`` takes them.
        device: where it runs; a name or a file.
        parallel: how layers are split and the micro-batch's size, such as "tp=8,microbatch=4,sequence_parallel".
        profile: fitted models of the device.

    Raises:
        PlanError: the source is no decoder, or cannot be split so.
        ForetraceError: a name or a file is not known, or cannot be read.
    """
    plan, spec = ParallelPlan.parse(parallel), find_device(device)
    name, shape, _, notes = read_decoder(source, settings, preset)
    if plan.dp * plan.pp > 1 or plan.recompute is not Recomputation.NONE or plan.passes > 1:
        notes = (*notes, "Of the plan its micro-batch, tp, cp and ep decide what a rank's layers are; replicas, "
                         "stages, recomputation and micro-batches are left out.")
    return replace(advise(shape, plan, LayerCosts(spec, profile)), model=name, notes=notes)


def advise(shape: TransformerShape, plan: ParallelPlan, pieces: LayerCosts,
           settings: Collection[str] | None = None) -> ShapeReport:
    """Compare a decoder with its neighbours.

    Args:
        shape: its sizes.
        plan: how its layers are split, and its micro-batch.
        pieces: of the device.
        settings: sizes that may change, as ``ShapeChange`` names them; all by default.

    Raises:
        PlanError: it cannot be split as the plan says.
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
    """Return what a decoder's kernels take for a token on one rank of a plan, all ranks of a layer counted.

    Raises:
        ShapeOnlyError: the shape does not divide as the plan wants it.
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
    """A rank's pieces and how many of each there are."""
    def part(piece: Piece) -> TransformerPart:
        return TransformerPart(piece, plan.samples, plan.tp, plan.cp, plan.ep, plan.sequence_parallel, plan.etp)

    for run in shape.runs:
        yield run.one_layer(), part(Piece.BLOCK), run.layers
    for piece in (Piece.EMBEDDING, Piece.HEAD):
        yield shape.one_layer(), part(piece), 1


def _lost(calls: Sequence[OpCall], us: Float64, device: DeviceSpec) -> dict[str, Float64]:
    """Return what each term costs of one run, µs [n]: without it the arithmetic is quicker, down to what the board's
    power feeds."""
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
    """Standard deviation of the logarithm of the ratio of two times.

    Kernels that both run err by the same and cancel. The others are paired in their order: each pair errs by itself, by
    what neighbours differ by, and by a share of what its efficiency changes.
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
    """Logarithm of a kernel's time over its work: operations of products, bytes of others."""
    call = cost.calls[i]
    work = call.flops if call.family in LIMITED and call.flops else call.bytes_moved
    return log(cost.one_us[i]) - log(max(work, 1.0))
