"""Values of data that an operator keeps between two ends: corners of boxes in an image, the numbers of tokens.

    corners.clamp(min=0, max=width)      scores.argmax(-1)      torch.rand(2, 16000)

Where a share is given, such values are assumed to fill that share of their range around its middle, in order along the
last dimension: corners clamped to an image are those of a box around its middle, half as wide as it is for 0.5.
"""

from __future__ import annotations

from typing import Any

import torch

ENDS = ("Values of data decide what the step does, and only the ends between which they lie are known: they are taken "
        "to fill the middle {:g} of that range, in order.")
MOST_CHANCE = 1 << 16
"""Most elements of a random tensor whose values are assumed: a larger one is an image, or weights."""
_CLAMPS = ("clamp", "clamp_")
_PLACES = ("argmax", "argmin")
_OF_ONE = ("rand", "rand_like")


def ends_of(func: Any, args: Any, kwargs: Any, result: Any) -> tuple[float, float] | None:
    """Return between which ends an operator's result lies, both included; ``None`` where it says nothing of them."""
    if func.namespace != "aten" or not isinstance(result, torch.Tensor) or result.layout is not torch.strided:
        return None
    given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    name = func.__name__.split(".")[0]
    if name in _CLAMPS:
        low, high = given.get("min"), given.get("max")
        numbers = isinstance(low, (int, float)) and isinstance(high, (int, float)) and low <= high
        return (float(low), float(high)) if numbers else None
    if name in _PLACES or name == "multinomial":
        of, dim = given["self"], -1 if name == "multinomial" else given.get("dim")
        count = of.numel() if dim is None or not of.dim() else of.shape[dim]
        return 0.0, float(max(count - 1, 0))
    if result.numel() > MOST_CHANCE:
        return None
    if name in _OF_ONE:
        return 0.0, 1.0
    return (float(given.get("low", 0)), float(given["high"] - 1)) if name == "randint" else None


def spread(ends: tuple[float, float], share: float, like: Any) -> torch.Tensor:
    """Make the values of a tensor that fill a share of a range around its middle, in order along the last dimension."""
    low, high = ends
    count = like.shape[-1] if like.dim() else 1
    at = torch.linspace(-share / 2, share / 2, count, dtype=torch.float64) if count > 1 else torch.zeros(count)
    values = (low + high) / 2 + at * (high - low)
    if not like.dtype.is_floating_point:
        values = values.round()
    made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
    return made.copy_(values if like.dim() else values[0])
