"""Calls that a device's fitted models do not cover, priced by a covered variant of the same work.

A profile of linear layers' forward products knows nothing of their gradients', which differ in how operands lie. The
data sheet's formula knows what the difference costs, the profile how far this device is from that formula:

    t(call) = t_datasheet(call) · t_profile(variant) / t_datasheet(variant)

so that forward and backward of one layer are priced by the same measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from kernel_models.families.attention import attention
from kernel_models.model import KernelModel, Source, Times
from kernel_models.op_call import Family, OpCall
from kernel_models.spreads import OTHER_LAYOUT
from tracer.arrays import Bool

_LAYOUTS = ("nt", "nn", "tn", "tt")
_DIRECTIONS = ("forward", "dgrad", "wgrad")


def anchored(
    calls: Sequence[OpCall], fitted: Sequence[KernelModel], datasheet: KernelModel,
) -> tuple[Bool, Times]:
    """Return which of a family's calls have a variant that a fitted model covers [n], and the times of those, µs.

    Args:
        calls: of one family, none covered by a fitted model.
        fitted: the family's fitted models, best first.
        datasheet: prices any call of the family.
    """
    variant: list[OpCall | None] = [None] * len(calls)
    by: list[KernelModel | None] = [None] * len(calls)
    of_calls = [list(_variants(call)) for call in calls]
    for model in fitted:
        if model.source == Source.DATASHEET:
            continue
        for place in range(max(map(len, of_calls), default=0)):
            rows = [i for i, found in enumerate(of_calls) if variant[i] is None and place < len(found)]
            if rows:
                tried = [of_calls[i][place] for i in rows]
                for i, other, known in zip(rows, tried, model.covers(tried), strict=True):
                    if known:
                        variant[i], by[i] = other, model
    found = np.array([one is not None for one in variant], np.bool_)
    chosen: list[int] = np.flatnonzero(found).tolist()
    time, low, high = (np.zeros(len(chosen)) for _ in range(3))
    for model in fitted:
        mine = [at for at, i in enumerate(chosen) if by[i] is model]
        near = [one for at in mine if (one := variant[chosen[at]]) is not None]
        if near:
            times, formula = model.predict(near), datasheet.predict(near).time_us
            time[mine] = datasheet.predict([calls[chosen[at]] for at in mine]).time_us * times.time_us / formula
            with np.errstate(all="ignore"):  # times of nonsense are the caller's to pass over
                low[mine] = time[mine] * np.exp(-np.hypot(np.log(times.time_us / times.low_us), OTHER_LAYOUT))
                high[mine] = time[mine] * np.exp(np.hypot(np.log(times.high_us / times.time_us), OTHER_LAYOUT))
    return found, Times(time, low, high)


def _variants(call: OpCall) -> Iterator[OpCall]:
    """The same work in other forms, nearest first."""
    if "unsized" not in call.flags:
        yield from _VARIANTS.get(call.family, lambda call: iter(()))(call)


def _products(call: OpCall) -> Iterator[OpCall]:
    """Other layouts, then without what is added to the product."""
    plain = tuple(flag for flag in call.flags if flag not in ("bias", "accumulate"))
    for flags in dict.fromkeys((call.flags, plain)):
        for layout in dict.fromkeys((call.layout, *_LAYOUTS)):
            if (layout, flags) != (call.layout, call.flags):
                yield replace(call, layout=layout, flags=flags)


def _convolutions(call: OpCall) -> Iterator[OpCall]:
    """The other directions, whose operations are as many, then the other layout."""
    plain = tuple(flag for flag in call.flags if flag != "bias")
    for layout in dict.fromkeys((call.layout, "nchw", "nhwc")):
        for flags in dict.fromkeys((call.flags, plain)):
            for kind in dict.fromkeys((call.kind, *_DIRECTIONS)):
                if (kind, layout, flags) != (call.kind, call.layout, call.flags):
                    yield replace(call, kind=kind, layout=layout, flags=flags)


def _attentions(call: OpCall) -> Iterator[OpCall]:
    """The other direction of the same kernel."""
    name, _, direction = call.kind.rpartition("_")
    batch, heads, kv_heads, q_len, kv_len, head_dim, v_head_dim, window = call.dims
    yield from attention(
        f"{name}_{'forward' if direction == 'backward' else 'backward'}", batch, heads, kv_heads, q_len, kv_len,
        head_dim, v_head_dim, call.dtype, causal="causal" in call.flags, window=window,
        flags=tuple(flag for flag in call.flags if flag != "causal"))


def _images(call: OpCall) -> Iterator[OpCall]:
    """The same on images of the usual layout."""
    if call.layout == "nhwc":
        yield replace(call, layout="")


_VARIANTS: dict[Family, Callable[[OpCall], Iterator[OpCall]]] = {
    Family.GEMM: _products, Family.CONV: _convolutions, Family.ATTENTION: _attentions,
    Family.NORM: _images, Family.POOLING: _images, Family.INTERPOLATE: _images}
