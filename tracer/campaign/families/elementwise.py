"""Element-wise operations, reductions, random numbers, operations over lists of tensors, and chains of operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tracer.campaign.families.family import (
    ALL_DTYPES,
    BYTES,
    DTYPES,
    TWO_DTYPES,
    Bench,
    Called,
    CampaignFamily,
    Constant,
    SearchSpace,
    Settings,
    SizeRange,
    Span,
    TensorArgument,
)

if TYPE_CHECKING:
    from tracer.campaign.lab import Lab

_SIZES = {"rows": SizeRange(16), "width": SizeRange(64)}
_CUDA = {"rows": Span(16, 131072, (1, 16)), "width": Span(16, 16384, (1, 8, 64))}
_CPU = {"rows": Span(8, 4096), "width": Span(32, 4096, (1, 16))}
_TWO_INPUTS = ("add", "mul", "gelu_backward")
_ONE_INPUT = ("gelu", "silu", "exp", "sqrt", "copy", "add_scalar", "add_inplace")
_CASTS = {"cast_fp32": "fp32", "cast_bf16": "bf16", "cast_fp16": "fp16"}
# Chosen: FLOPs of each element, by a usual formula.
_FLOPS = {"gelu": 10.0, "gelu_backward": 15.0, "silu": 5.0, "exp": 4.0, "copy": 0.0}


def _elementwise(settings: Settings) -> Called:
    """Return the call; ``layout``: the second (or only) input is "transposed", or one "row" or "column" broadcast."""
    rows, width, op, layout = (settings[name] for name in ("rows", "width", "op", "layout"))
    whole = TensorArgument((rows, width))
    last = TensorArgument({"row": (1, width), "column": (rows, 1)}.get(layout, whole.shape),
                  lies="t" if layout == "transposed" else "")
    flops = _FLOPS.get(op, 1.0) * rows * width
    if op in _TWO_INPUTS:
        return Called(f"aten::{op}", (whole, last), flops)
    if op in _CASTS or op == "copy":
        kind: str = _CASTS.get(op) or settings["dtype"]
        recorded, form = Called("aten::copy_", (TensorArgument(whole.shape, kind), last)), Constant("contiguous_format")
        if op == "copy":
            return Called("aten::clone", (last,), options={"memory_format": form}, recorded=recorded)
        return Called("aten::to", (last, Constant(kind)), options={"memory_format": form, "copy": True},
                      recorded=recorded)
    if op == "add_inplace":
        return Called("aten::add_", (last, 1e-6), flops, recorded=Called("aten::add_", (whole, 1e-6)))
    return Called("aten::add", (last, 1.5), flops) if op == "add_scalar" else Called(f"aten::{op}", (last,), flops)


def _layout_fits(settings: Settings) -> str:
    if settings["layout"] in ("row", "column") and settings["op"] not in _TWO_INPUTS:
        return f"layout={settings['layout']} needs an op of two inputs ({', '.join(_TWO_INPUTS)})."
    return ""


def _reduction(settings: Settings) -> Called:
    op, x, dim = settings["op"], TensorArgument((settings["rows"], settings["width"])), {"width": 1, "rows": 0}.get(
        settings["over"])
    flops, one = float(settings["rows"] * settings["width"]), 1 if dim is None else dim
    if op == "cumsum":
        return Called("aten::cumsum", (x, one), flops)
    if op == "argmax":
        return Called("aten::argmax", (x,) if dim is None else (x, dim), flops,
                      recorded=Called("aten::argmax", (x, one)))
    dims = () if dim is None else ([dim],)
    return Called("aten::linalg_vector_norm", (x, 2, *dims), flops) if op == "norm" else Called(
        f"aten::{op}", (x, *dims), flops)


def _random(settings: Settings) -> Called:
    op, elements = settings["op"], settings["elements"]
    x = TensorArgument((elements,))
    if op == "dropout":  # it also writes a mask of one byte for each element
        return Called("aten::native_dropout", (x, 0.1, True), 3.0 * elements)
    if op == "randint":
        return Called("aten::randint_like", (x._replace(dtype="int64", of="uniform", high=1000), 1000),
                      float(elements), 8.0 * elements, priced=False)
    return Called(f"aten::{op}_", (x, 0.5) if op == "bernoulli" else (x,), 10.0 * elements,
                  float(BYTES[settings["dtype"]] * elements))


_LISTS = {"add_": (2, 1), "mul_": (1, 1), "addcmul_": (3, 1), "addcdiv_": (3, 1), "lerp_": (2, 1), "sqrt": (1, 1),
          "norm": (1, 0), "fused_adamw_": (4, 3), "fused_sgd_": (3, 2)}
"""Numbers of lists that each operation reads and writes."""
# FLOPs of each element, counted in each formula.
_LIST_FLOPS = {"addcmul_": 3.0, "addcdiv_": 3.0, "lerp_": 3.0, "norm": 2.0, "fused_adamw_": 13.0, "fused_sgd_": 4.0}
# Chosen: so small that numbers stay finite after any number of runs.
_RATES = {"lr": 1e-6, "weight_decay": 0.01, "maximize": False, "grad_scale": None, "found_inf": None}
# Rates as above, otherwise PyTorch's defaults.
_LIST_OPTIONS: dict[str, dict[str, Any]] = {
    "add_": {"alpha": 1e-6}, "mul_": {"scalar": 1.000001}, "addcmul_": {"value": 1e-6}, "addcdiv_": {"value": 1e-6},
    "lerp_": {"weight": 1e-6},
    "fused_adamw_": {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "amsgrad": False, "max_exp_avg_sqs": [], **_RATES},
    "fused_sgd_": {"momentum": 0.9, "dampening": 0.0, "nesterov": False, "is_first_step": False, **_RATES}}


def _foreach(settings: Settings) -> Called:
    """Return the call on lists of ``tensors`` tensors of ``elements`` numbers each."""
    op, count, elements = settings["op"], settings["tensors"], float(settings["tensors"] * settings["elements"])
    read, written = _LISTS[op]
    options = dict(_LIST_OPTIONS.get(op, {}))
    if op == "fused_adamw_":
        options["state_steps"] = [TensorArgument((), "fp32", of="ones")] * count
    return Called(f"aten::_{'' if op.startswith('fused') else 'foreach_'}{op}",
                  [[TensorArgument((settings["elements"],), of="positive")] * count] * read,
                  _LIST_FLOPS.get(op, 1.0) * elements, BYTES[settings["dtype"]] * elements * (read + written), options)


_TRAFFIC = {"sgd": 5.0, "adamw": 7.0, "clip": 3.0}
"""Reads and writes for one element: of parameter, gradient and momenta (clipping reads the gradients twice)."""


def _optimizer(settings: Settings, lab: Lab) -> Bench:
    """Return an optimizer's step over ``tensors`` parameters of ``elements`` numbers each."""
    torch, kind = lab.torch, settings["optimizer"]
    parameters = [lab.random(settings["elements"], dtype=settings["dtype"], grad=True)
                  for _ in range(settings["tensors"])]
    for parameter in parameters:
        parameter.grad = lab.random_like(parameter.detach())
    total = settings["elements"] * settings["tensors"]
    moved = _TRAFFIC[kind] * BYTES[settings["dtype"]] * total
    how = {"foreach": settings["implementation"] == "foreach", "fused": settings["implementation"] == "fused"}
    if kind == "clip":
        return Bench(lambda: torch.nn.utils.clip_grad_norm_(parameters, 1e6, foreach=how["foreach"]), 3.0 * total,
                     moved)
    if kind == "sgd":
        optimizer: Any = torch.optim.SGD(parameters, lr=1e-6, momentum=0.9, **how)
    else:
        optimizer = torch.optim.AdamW(parameters, lr=1e-6, **how)
    optimizer.step()  # makes the state
    return Bench(optimizer.step, (4.0 if kind == "sgd" else 15.0) * total, moved)


def _optimizer_fits(settings: Settings) -> str:
    if settings["optimizer"] == "clip" and settings["implementation"] == "fused":
        return "optimizer=clip has no fused implementation."
    return ""


_CHAINS = {"pointwise": (3, 1, "poi"), "norm": (2, 1, "per"), "softmax": (2, 0, "per")}
"""Numbers of whole tensors and of vectors of the width that each chain reads, and the kind of its kernel."""


def _fused(settings: Settings) -> Called:
    """Return the call of a generated kernel; its arguments are its inputs and its output."""
    whole, vectors, kind = _CHAINS[settings["chain"]]
    x, elements = TensorArgument((settings["rows"], settings["width"])), settings["rows"] * settings["width"]
    return Called(f"triton_{kind}_fused_0", (*[x] * whole, *[TensorArgument((settings["width"],))] * vectors, x),
                  12.0 * elements, (whole + 1.0) * BYTES[settings["dtype"]] * elements)


def _chain(settings: Settings, lab: Lab) -> Bench:
    """Return a chain. Pointwise: GELU of a product, plus a residual; norm: residual, RMS norm; softmax: masked."""
    torch, dtype = lab.torch, settings["dtype"]
    rows, width = settings["rows"], settings["width"]
    x, y, z = (lab.random(rows, width, dtype=dtype) for _ in range(3))
    weight = lab.random(width, dtype=dtype)
    functional = torch.nn.functional

    def pointwise() -> Any:
        return functional.gelu(x * y + weight) + z

    def norm() -> Any:
        return functional.rms_norm(x + y, (width,), weight)

    def softmax() -> Any:
        return functional.softmax(x * 0.125 + y, -1)

    chains: dict[str, Callable[[], Any]] = {"pointwise": pointwise, "norm": norm, "softmax": softmax}
    called = _fused(settings)
    assert called.bytes is not None
    return Bench(torch.compile(chains[settings["chain"]], dynamic=False), called.flops, called.bytes)


FAMILIES = [
    CampaignFamily(
        "elementwise", "one or two inputs: contiguous, transposed, broadcast; casts", _SIZES,
        {"op": (*_TWO_INPUTS, *_ONE_INPUT, *_CASTS), "layout": ("contiguous", "transposed", "row", "column"),
         "dtype": DTYPES},
        _elementwise, check=_layout_fits, spaces=(
            SearchSpace("cuda", _CUDA, {
                "op": ("add", "mul", "gelu", "silu", "exp", "sqrt", "gelu_backward", "add_scalar", "add_inplace"),
                "layout": ("contiguous", "contiguous", "transposed", "row", "column"), "dtype": ALL_DTYPES}),
            SearchSpace("cuda", _CUDA, {"op": ("copy", "cast_fp32", "cast_bf16"),
                                        "layout": ("contiguous", "transposed"), "dtype": TWO_DTYPES}),
            SearchSpace("cpu", _CPU, {"op": ("add", "mul", "gelu", "silu", "gelu_backward", "add_scalar"),
                                      "layout": ("contiguous",), "dtype": TWO_DTYPES}),
            SearchSpace("cpu", _CPU, {"op": ("add", "mul"), "layout": ("row", "column"), "dtype": ("fp32",)}),
            SearchSpace("cpu", _CPU, {"op": ("copy", "cast_fp32", "cast_bf16"), "layout": ("contiguous",),
                                      "dtype": TWO_DTYPES}))),
    CampaignFamily(
        "reduction", "reductions and cumulative sums over the width, the rows or all", _SIZES,
        {"op": ("sum", "mean", "amax", "argmax", "norm", "cumsum"), "over": ("width", "rows", "all"), "dtype": DTYPES},
        _reduction, spaces=(
            SearchSpace("cuda", _CUDA, {"op": ("sum", "mean", "amax", "argmax", "norm", "cumsum"),
                                        "over": ("width", "rows", "all"), "dtype": TWO_DTYPES}),
            SearchSpace("cpu", _CPU, {"op": ("sum", "mean", "amax", "norm"), "over": ("width", "rows", "all"),
                                      "dtype": ("fp32",)}))),
    CampaignFamily(
        "random", "random numbers and dropout", {"elements": SizeRange(1024)},
        {"op": ("dropout", "normal", "uniform", "bernoulli", "randint"), "dtype": DTYPES}, _random, spaces=(
            SearchSpace("cuda", {"elements": Span(64, 1 << 28)},
                        {"op": ("dropout", "normal", "uniform", "bernoulli"), "dtype": TWO_DTYPES}),
            SearchSpace("cpu", {"elements": Span(256, 1 << 21)},
                        {"op": ("dropout", "normal", "uniform", "bernoulli"), "dtype": ("fp32",)}))),
    CampaignFamily(
        "optimizer", "optimizer steps and gradient clipping over many tensors",
        {"tensors": SizeRange(4), "elements": SizeRange(256)},
        {"optimizer": ("adamw", "sgd", "clip"), "implementation": ("foreach", "fused", "loop"),
         "dtype": ("fp32", "bf16")}, prepare=_optimizer, check=_optimizer_fits),
    CampaignFamily(
        "foreach", "single operations over lists of tensors: arithmetic, norms, fused updates",
        {"tensors": SizeRange(4), "elements": SizeRange(256)}, {"op": tuple(_LISTS), "dtype": ("fp32", "bf16")},
        _foreach, spaces=(
            SearchSpace("cuda", {"tensors": Span(1, 300), "elements": Span(16, 1 << 24)},
                        {"op": tuple(_LISTS), "dtype": TWO_DTYPES}),
            SearchSpace("cpu", {"tensors": Span(1, 30), "elements": Span(64, 1 << 19)},
                        {"op": tuple(op for op in _LISTS if op != "lerp_"), "dtype": ("fp32",)}))),
    CampaignFamily(
        "fused", "chains fused by torch.compile", _SIZES, {"chain": tuple(_CHAINS), "dtype": DTYPES}, _fused, _chain,
        spaces=(SearchSpace("cuda", {"rows": Span(128, 32768, (16,)), "width": Span(128, 8192, (64,))},
                            {"chain": tuple(_CHAINS), "dtype": ("bf16",)}),)),
]
