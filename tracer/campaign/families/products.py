"""Matrix products, attention, convolutions and recurrent layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tracer.campaign.families.family import (
    ALL_DTYPES,
    BYTES,
    FORWARD_BACKWARD,
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
    prepared,
)

if TYPE_CHECKING:
    from tracer.campaign.lab import Lab


def _gemm(settings: Settings) -> Called:
    """Return the product. ``layout``: storage of A [m, k] and B [k, n], "n" row-major, "t" transposed."""
    m, n, k, batch, op = (settings[name] for name in ("m", "n", "k", "batch", "op"))
    outer = (batch,) if op == "bmm" else ()
    a, b = (TensorArgument((*outer, *shape), lies="t" if side == "t" else "")
            for shape, side in zip(((m, k), (k, n)), settings["layout"], strict=True))
    call, flops = {"layout": settings["layout"], "kind": "mm" if batch == 1 else "bmm"}, 2.0 * batch * m * n * k
    if settings["dtype"] == "fp8":
        one = TensorArgument((), "fp32", of="ones")
        return Called("aten::_scaled_mm", (a, b, one, one, None, None, Constant("bf16")), flops, call=call)
    return Called(f"aten::{op}", (TensorArgument((n,)), a, b) if op == "addmm" else (a, b), flops, call=call)


def _gemm_fits(settings: Settings) -> str:
    if settings["dtype"] == "fp8":
        if settings["layout"] != "nt" or settings["op"] != "mm":
            return "dtype=fp8 goes with op=mm and layout=nt only (rows of the one by rows of the other)."
        if settings["n"] % 16 or settings["k"] % 16:
            return "dtype=fp8 needs n and k to be multiples of 16."
    if (settings["op"] == "bmm") != (settings["batch"] > 1):
        return "op=bmm goes with batch above 1, the others with batch=1."
    return ""


_LAYOUTS = ("nt", "nn", "tn")

_GEMM = CampaignFamily(
    "gemm", "matrix products [m, k] × [k, n], plain, with bias and batched",
    {"m": SizeRange(32), "n": SizeRange(32), "k": SizeRange(32), "batch": SizeRange(2, 1)},
    {"op": ("mm", "addmm", "bmm"), "layout": (*_LAYOUTS, "tt"), "dtype": ("bf16", "fp32", "tf32", "fp16", "fp8")},
    _gemm, check=_gemm_fits, spaces=(
        SearchSpace("cuda", {"m": Span(1, 16384, (1, 8, 64, 128)), "n": Span(16, 16384, (8, 64, 128)),
                             "k": Span(16, 16384, (8, 64, 128))},
                    {"layout": _LAYOUTS, "dtype": (*ALL_DTYPES, "tf32"), "op": ("mm", "addmm")}),
        SearchSpace("cuda", {"batch": Span(2, 512), **{name: Span(16, 4096, (8, 64)) for name in "mnk"}},
                    {"layout": _LAYOUTS, "dtype": (*ALL_DTYPES, "tf32")}),
        SearchSpace("cpu", {"m": Span(1, 2048, (1, 1, 8, 64)), "n": Span(16, 2048, (16, 64)),
                            "k": Span(16, 2048, (16, 64))},
                    {"layout": _LAYOUTS, "dtype": TWO_DTYPES, "op": ("mm", "addmm")}),
        SearchSpace("cpu", {"batch": Span(2, 64), **{name: Span(16, 256, (8,)) for name in "mnk"}},
                    {"layout": _LAYOUTS, "dtype": TWO_DTYPES})),
    fit=lambda values: {**values, "op": "bmm" if values.get("batch", 1) > 1 else values.get("op", "mm")})


_BACKENDS = {"flash": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION", "efficient": "EFFICIENT_ATTENTION",
             "math": "MATH"}
BACKWARD_PRODUCTS = 2.5
"""Backward does five matrix products (the scores again, and four gradients) where forward does two."""


def _attention(settings: Settings) -> Called:
    """Return attention; ``kv_seq`` 0 means ``seq``. FLOPs of causal attention count the lower triangle only."""
    batch, heads, seq, head = (settings[name] for name in ("batch", "heads", "seq", "head_dim"))
    kv_heads, kv_seq = settings["kv_heads"], settings["kv_seq"] or seq
    causal, backward = bool(settings["causal"]), settings["op"] == "backward"
    # As in models: [batch, seq, heads, head] in memory, viewed as [batch, heads, seq, head].
    query = TensorArgument((batch, heads, seq, head), lies="middle")
    key = TensorArgument((batch, kv_heads, kv_seq, head), lies="middle")
    flops = 4.0 * batch * heads * seq * kv_seq * head * (0.5 if causal else 1.0)
    once, output = 2.0 * batch * head * (heads * seq + kv_heads * kv_seq), float(batch * heads * seq * head)
    return Called("aten::scaled_dot_product_attention", (query, key, key, None, 0.0, causal),
                  BACKWARD_PRODUCTS * flops if backward else flops,
                  BYTES[settings["dtype"]] * (2.0 * once + output if backward else once), gradient=backward,
                  options={"enable_gqa": True} if heads != kv_heads else {},
                  call={"kind": f"{settings['backend']}_{settings['op']}"})


def _forced(settings: Settings, lab: Lab) -> Bench:
    """Return the benchmark of attention by one implementation (``backend``)."""
    attention = lab.torch.nn.attention
    lab.enter(attention.sdpa_kernel(attention.SDPBackend.__members__[_BACKENDS[settings["backend"]]]))
    return prepared(_attention(settings), settings, lab)


def _heads_fit(settings: Settings) -> str:
    if settings["heads"] % settings["kv_heads"]:
        return f"heads={settings['heads']} is no multiple of kv_heads={settings['kv_heads']}."
    return ""


def _shared(values: Settings) -> Settings:
    """Return settings with ``share`` query heads for each key and value head."""
    shared = values.pop("share", 1)
    kv_heads = max(values["heads"] // shared, 1)
    return {**values, "kv_heads": kv_heads, "heads": kv_heads * shared}


_HEADS = {"batch": Span(1, 128), "heads": Span(4, 64, (4,)), "seq": Span(64, 16384, (1, 64)),
          "head_dim": Span(64, 128, (64,))}

_ATTENTION = CampaignFamily(
    "attention", "scaled-dot-product attention forward and backward: flash, cuDNN, memory-efficient, plain",
    {"batch": SizeRange(1), "heads": SizeRange(4), "kv_heads": SizeRange(2), "seq": SizeRange(32),
     "kv_seq": SizeRange(32, 0, 0), "head_dim": SizeRange(16)},
    {"op": FORWARD_BACKWARD, "backend": tuple(_BACKENDS), "causal": (True, False), "dtype": ALL_DTYPES},
    _attention, _forced, _heads_fit, spaces=(
        SearchSpace("cuda", {**_HEADS, "share": Span(1, 8)},
                    {"op": FORWARD_BACKWARD, "backend": ("flash", "cudnn"), "causal": (True, False),
                     "dtype": ("bf16", "fp16")}),
        # The memory-efficient implementation needs as many key and value heads as query heads.
        SearchSpace("cuda", _HEADS, {"op": FORWARD_BACKWARD, "backend": ("efficient",), "causal": (True, False),
                                     "dtype": ("bf16", "fp16")}),
        SearchSpace("cuda", {"batch": Span(1, 32), "heads": Span(4, 32, (4,)), "seq": Span(64, 4096, (64,)),
                             "head_dim": Span(64, 128, (64,))},
                    {"op": FORWARD_BACKWARD, "backend": ("efficient", "math"), "causal": (True, False),
                     "dtype": ("fp32",)}),
        SearchSpace("cpu", {"batch": Span(1, 8), "heads": Span(2, 16, (2,)), "seq": Span(32, 512, (16,)),
                            "head_dim": Span(32, 128, (32,))},
                    {"op": FORWARD_BACKWARD, "backend": ("flash",), "causal": (True, False), "dtype": TWO_DTYPES})),
    fit=_shared,
    traits=lambda settings: "shared heads" if settings["heads"] != settings["kv_heads"] else "")


def _convolution(settings: Settings) -> Called:
    """Return a convolution of square images and kernels, padded by ``kernel // 2``."""
    batch, channels, outs, size = (settings[name] for name in ("batch", "channels", "out_channels", "size"))
    kernel, stride, groups, op = (settings[name] for name in ("kernel", "stride", "groups", "op"))
    pad = kernel // 2
    out = (size + 2 * pad - kernel) // stride + 1
    image, weight, result = (
        TensorArgument(shape, lies="nhwc" if settings["channels_last"] else "")
        for shape in ((batch, channels, size, size), (outs, channels // groups, kernel, kernel),
                      (batch, outs, out, out)))
    of_weight, elements = channels // groups * kernel * kernel, batch * outs * out * out
    flops = 2.0 * elements * of_weight
    tail = (None, [stride] * 2, [pad] * 2, [1, 1], False, [0, 0], groups)
    if op == "forward":
        return Called("aten::convolution", (image, weight, *tail), flops)
    moved = float(BYTES[settings["dtype"]] * (batch * channels * size * size + outs * of_weight + elements))
    return Called("aten::convolution_backward", (result, image, weight, *tail, [op == "dgrad", op == "wgrad", False]),
                  flops, moved)


def _convolution_fits(settings: Settings) -> str:
    for name in ("channels", "out_channels"):
        if settings[name] % settings["groups"]:
            return f"{name}={settings[name]} is no multiple of groups={settings['groups']}."
    if settings["kernel"] > settings["size"]:
        return f"kernel={settings['kernel']} exceeds the image's size={settings['size']}."
    return ""


def _grouped(values: Settings) -> Settings:
    """Return settings in which a grouped convolution has one channel in each group."""
    alike = dict.fromkeys(("groups", "out_channels"), values["channels"]) if values.get("groups", 1) > 1 else {}
    return {**values, **alike}


_IMAGES = {"batch": Span(1, 256), "channels": Span(3, 2048, (1, 16, 64)), "size": Span(4, 256, (1, 2, 4))}
_DIRECTIONS = ("forward", "dgrad", "wgrad")

_CONVOLUTION = CampaignFamily(
    "convolution", "2-d convolution: forward, dgrad, wgrad; NCHW and NHWC",
    {"batch": SizeRange(2), "channels": SizeRange(8), "out_channels": SizeRange(8), "size": SizeRange(16),
     "kernel": SizeRange(7, 3), "stride": SizeRange(2, 1), "groups": SizeRange(1, 1)},
    {"op": _DIRECTIONS, "dtype": ("bf16", "fp32", "tf32", "fp16"), "channels_last": (True, False)},
    _convolution, check=_convolution_fits, spaces=(
        SearchSpace("cuda", {**_IMAGES, "out_channels": Span(16, 2048, (16, 64)), "kernel": (1, 1, 3, 3, 5, 7),
                             "stride": (1, 1, 2)},
                    {"op": _DIRECTIONS, "dtype": (*ALL_DTYPES, "tf32"), "channels_last": (True, False)}),
        SearchSpace("cuda", {**_IMAGES, "out_channels": Span(16, 1024, (16,)), "kernel": (3, 5, 7), "groups": (2,)},
                    {"op": _DIRECTIONS, "dtype": TWO_DTYPES, "channels_last": (True, False)}),
        SearchSpace("cpu", {"batch": Span(1, 16), "channels": Span(8, 256, (8, 16)), "size": Span(7, 112, (1, 7)),
                            "out_channels": Span(8, 256, (8,)), "kernel": (1, 3, 3, 5), "stride": (1, 1, 2)},
                    {"op": _DIRECTIONS, "dtype": ("fp32",), "channels_last": (False,)})),
    fit=_grouped, traits=lambda settings: "groups" if settings["groups"] > 1 else "")


_GATES = {"lstm": 4, "gru": 3}  # by definition


def _recurrent(settings: Settings) -> Called:
    """Return a recurrent layer; its input is [seq, batch, input], its hidden states start at zero."""
    seq, batch, inputs, hidden, layers = (settings[name] for name in ("seq", "batch", "input", "hidden", "layers"))
    backward, dtype = settings["op"] == "backward", settings["dtype"]
    products = _GATES[settings["cell"]] * hidden * sum(
        (inputs if layer == 0 else hidden) + hidden for layer in range(layers))
    values, times = seq * batch * (inputs + hidden * (2 * layers - 1)), 2.0 if backward else 1.0
    return Called("recurrent", (f"{settings['cell']}{'_backward' if backward else ''}", seq, batch, inputs, hidden,
                                layers, 1, dtype),
                  times * 2.0 * seq * batch * products, times * BYTES[dtype] * (products + values))


def _layers(settings: Settings, lab: Lab) -> Bench:
    torch, dtype, backward = lab.torch, settings["dtype"], settings["op"] == "backward"
    lab.tf32(dtype == "tf32")
    kind = torch.nn.LSTM if settings["cell"] == "lstm" else torch.nn.GRU
    module = kind(settings["input"], settings["hidden"], settings["layers"]).to(
        device=lab.device, dtype=lab.dtype(dtype)).train(backward)
    x = lab.random(settings["seq"], settings["batch"], settings["input"], dtype=dtype, grad=backward)
    called = _recurrent(settings)
    assert called.bytes is not None
    if not backward:
        def forward() -> Any:
            with torch.no_grad():
                return module(x)[0]
        return Bench(forward, called.flops, called.bytes)
    out = module(x)[0]
    return Bench(lab.gradients(out, (x, *module.parameters()), lab.random_like(out)), called.flops, called.bytes)


_RECURRENT = CampaignFamily(
    "recurrent", "LSTM and GRU layers over whole sequences",
    {"seq": SizeRange(4), "batch": SizeRange(2), "input": SizeRange(8), "hidden": SizeRange(8),
     "layers": SizeRange(2, 1)},
    {"cell": tuple(_GATES), "op": FORWARD_BACKWARD, "dtype": ("fp32", "bf16", "fp16", "tf32")},
    _recurrent, _layers, spaces=(
        SearchSpace("cuda", {"seq": Span(4, 256), "batch": Span(1, 256), "input": Span(32, 1024, (16,)),
                             "hidden": Span(32, 1536, (16,)), "layers": Span(1, 3)},
                    {"cell": tuple(_GATES), "op": FORWARD_BACKWARD, "dtype": ALL_DTYPES}),
        SearchSpace("cpu", {"seq": Span(4, 64), "batch": Span(1, 32), "input": Span(16, 256, (16,)),
                            "hidden": Span(16, 256, (16,)), "layers": Span(1, 2)},
                    {"cell": ("lstm",), "op": FORWARD_BACKWARD, "dtype": ("fp32",)})))

FAMILIES = [_GEMM, _ATTENTION, _CONVOLUTION, _RECURRENT]
