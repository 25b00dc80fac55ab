"""Element-wise operations, reductions and random numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tracer.campaign.families.family import BYTES, DTYPES, Bench, CampaignFamily, FamilyChoice, SizeRange

if TYPE_CHECKING:
    from tracer.campaign.lab import Lab

_SIZES = {"rows": SizeRange(16), "width": SizeRange(64)}
_TWO_INPUTS = ("add", "mul", "gelu_backward")
_ONE_INPUT = ("gelu", "silu", "exp", "sqrt", "copy", "add_scalar", "add_inplace")
_CASTS = {"cast_fp32": "fp32", "cast_bf16": "bf16", "cast_fp16": "fp16"}
_FLOPS = {"gelu": 10.0, "gelu_backward": 15.0, "silu": 5.0, "exp": 4.0, "copy": 0.0}


def _elementwise(settings: dict[str, Any], lab: Lab) -> Bench:
    """``layout``: how the second (or only) input lies: "transposed" in memory, or one "row" or "column" broadcast."""
    torch, op, dtype = lab.torch, settings["op"], settings["dtype"]
    rows, width, layout = settings["rows"], settings["width"], settings["layout"]
    shape = {"row": (1, width), "column": (rows, 1), "transposed": (width, rows)}.get(layout, (rows, width))
    last = lab.random(*shape, dtype=dtype)
    if layout == "transposed":
        last = last.t()
    element, elements = BYTES[dtype], rows * width
    if op in _TWO_INPUTS:
        first = lab.random(rows, width, dtype=dtype)
        function: Callable[..., Any] = {
            "add": torch.add, "mul": torch.mul, "gelu_backward": torch.ops.aten.gelu_backward}[op]
        return Bench(lambda: function(first, last), _FLOPS.get(op, 1.0) * elements,
                     element * (2.0 * elements + last.numel()))
    if op in _CASTS:
        kind = lab.dtype(_CASTS[op])
        return Bench(lambda: last.to(kind, memory_format=torch.contiguous_format, copy=True), 0.0,
                     float(elements * (element + BYTES[_CASTS[op]])))
    functions: dict[str, Callable[[], Any]] = {
        "gelu": lambda: torch.nn.functional.gelu(last), "silu": lambda: torch.nn.functional.silu(last),
        "exp": lambda: torch.exp(last), "sqrt": lambda: torch.sqrt(last),
        "copy": lambda: last.clone(memory_format=torch.contiguous_format),
        "add_scalar": lambda: torch.add(last, 1.5), "add_inplace": lambda: last.add_(1e-6),
    }
    return Bench(functions[op], _FLOPS.get(op, 1.0) * elements, 2.0 * element * elements)


def _layout_fits(settings: dict[str, Any]) -> str:
    if settings["layout"] in ("row", "column") and settings["op"] not in _TWO_INPUTS:
        return f"layout={settings['layout']} needs an op of two inputs ({', '.join(_TWO_INPUTS)})."
    return ""


def _reduction(settings: dict[str, Any], lab: Lab) -> Bench:
    torch, rows, width, element = lab.torch, settings["rows"], settings["width"], BYTES[settings["dtype"]]
    x = lab.random(rows, width, dtype=settings["dtype"])
    function = {"sum": torch.sum, "mean": torch.mean, "amax": torch.amax, "argmax": torch.argmax,
                "norm": torch.linalg.vector_norm, "cumsum": torch.cumsum}[settings["op"]]
    along = settings["over"]
    outputs = {"width": rows, "rows": width, "all": 1}[along]
    if settings["op"] == "cumsum":
        return Bench(lambda: function(x, 0 if along == "rows" else 1), float(x.numel()), 2.0 * element * x.numel())
    arguments = {"width": {"dim": 1}, "rows": {"dim": 0}, "all": {}}[along]
    return Bench(lambda: function(x, **arguments), float(x.numel()), float(element * (x.numel() + outputs)))


def _random(settings: dict[str, Any], lab: Lab) -> Bench:
    torch, elements, element = lab.torch, settings["elements"], BYTES[settings["dtype"]]
    x = lab.random(elements, dtype=settings["dtype"])
    op = settings["op"]
    if op == "dropout":  # a mask of one byte an element is written too
        return Bench(lambda: torch.native_dropout(x, 0.1, True), 3.0 * elements, elements * (2.0 * element + 1))
    if op == "randint":
        return Bench(lambda: torch.randint(1000, (elements,), device=lab.device), float(elements), 8.0 * elements)
    functions: dict[str, Callable[[], Any]] = {
        "normal": lambda: x.normal_(), "uniform": lambda: x.uniform_(), "bernoulli": lambda: x.bernoulli_(0.5)}
    return Bench(functions[op], 10.0 * elements, float(element * elements))


FAMILIES = [
    CampaignFamily(
        "elementwise",
        "one or two inputs: contiguous, transposed, broadcast; casts",
        _SIZES,
        {
            "op": FamilyChoice((*_TWO_INPUTS, *_ONE_INPUT, *_CASTS)),
            "layout": FamilyChoice(("contiguous", "transposed", "row", "column")),
            "dtype": FamilyChoice(DTYPES),
        },
        _elementwise,
        _layout_fits,
    ),
    CampaignFamily(
        "reduction",
        "reductions and cumulative sums over the width, the rows or all",
        _SIZES,
        {
            "op": FamilyChoice(("sum", "mean", "amax", "argmax", "norm", "cumsum")),
            "over": FamilyChoice(("width", "rows", "all")),
            "dtype": FamilyChoice(DTYPES),
        },
        _reduction,
    ),
    CampaignFamily(
        "random",
        "random numbers and dropout",
        {"elements": SizeRange(1024)},
        {"op": FamilyChoice(("dropout", "normal", "uniform", "bernoulli", "randint")), "dtype": FamilyChoice(DTYPES)},
        _random,
    ),
]
