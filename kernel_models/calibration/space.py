"""The space a calibration measures in: for each family of kernels, bounded sizes and its micro-benchmarks' modes.

A space's sizes are drawn log-uniformly, most often as the multiples that models use. What would take too long or too
much memory on the device at hand is not drawn; a CPU has smaller bounds and fewer modes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from kernel_models.datasets.campaign import calls_of_benchmark
from kernel_models.device import DeviceSpec
from kernel_models.heuristics.roofline import RooflineModel
from kernel_models.op_call import Family, OpCall
from tracer.campaign.errors import CampaignError
from tracer.campaign.families import FAMILIES
from tracer.campaign.items import Item, Split, kernel_item

_TRIES = 60
"""Draws until one fits the limits."""
_RUNS = 32
"""Runs of one micro-benchmark where each takes long: warm-up, both variants, profile."""


class Span(NamedTuple):
    """Least and most of a size, and the units of which one is drawn for it to be a multiple of."""

    low: int
    high: int
    units: tuple[int, ...] = (1,)


@dataclass(frozen=True)
class Space:
    """Settings of one micro-benchmark.

    Attributes:
        family: of the calls that it gives.
        benchmark: its name in ``tracer.campaign.families``.
        sizes: spans by name, or the values themselves.
        choices: values to choose from by name; what is not named takes its default.
    """

    family: Family
    benchmark: str
    sizes: Mapping[str, Span | tuple[int, ...]]
    choices: Mapping[str, tuple[str | bool, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Limits:
    """The limits of one measurement.

    Attributes:
        run_us: longest run, by the formulas, µs.
        bytes: most memory that its tensors may take together.
        fixed_s: what any measurement takes beside its runs, seconds.
        budget_s: longest that the runs of one variant are repeated.
        fill_gbps: at which random data are made, 10⁹ bytes/s.
    """

    run_us: float
    bytes: float
    fixed_s: float
    budget_s: float
    fill_gbps: float


class Candidate(NamedTuple):
    """One thing that could be measured: the item, its call, and the seconds it is expected to take."""

    item: Item
    call: OpCall

    @property
    def split(self) -> Split:
        """The side of its shape group."""
        return self.item.split


def limits_for(spec: DeviceSpec, free_bytes: float) -> Limits:
    """Limits on a device with so much free memory."""
    if spec.vendor == "host":
        return Limits(run_us=6e3, bytes=min(0.1 * free_bytes, 192e6), fixed_s=0.02, budget_s=0.02, fill_gbps=0.3)
    return Limits(run_us=2e4, bytes=min(0.3 * free_bytes, 16e9), fixed_s=0.06, budget_s=0.1, fill_gbps=50.0)


def families_of(device: str) -> list[str]:
    """Families that can be calibrated on "cuda" or "cpu"."""
    return list(dict.fromkeys(space.family.value for space in spaces(device)))


def spaces(device: str) -> Sequence[Space]:
    """All spaces of "cuda" or "cpu"."""
    return _CPU if device == "cpu" else _GPU


def draw(space: Space, spec: DeviceSpec, limits: Limits, rng: np.random.Generator) -> Candidate | None:
    """Draw settings within the limits; nothing if none were found."""
    benchmark = FAMILIES[space.benchmark]
    for _ in range(_TRIES):
        values: dict[str, Any] = {name: _size(span, rng) for name, span in space.sizes.items()}
        values |= {name: options[rng.integers(len(options))] for name, options in space.choices.items()}
        try:
            settings = benchmark.checked(_fitting(space.benchmark, values))
        except CampaignError:
            continue
        calls = calls_of_benchmark(space.benchmark, _seen(space.benchmark, settings))
        if calls and calls[0].family is space.family:
            found = candidate(space.benchmark, settings, calls[0], spec, limits)
            if found is not None:
                return found
    return None


def candidate(benchmark: str, settings: dict[str, Any], call: OpCall, spec: DeviceSpec, limits: Limits,
              ) -> Candidate | None:
    """The candidate of settings; nothing if they exceed the limits."""
    run_us = float(RooflineModel(call.family, spec).predict([call]).time_us[0])
    stored = 3.0 * call.bytes_moved if call.family is Family.RANDOM else 1.5 * call.bytes_moved
    if call.family in (Family.EMBEDDING, Family.INDEX):
        stored += 4.0 * settings["rows"] * settings["width"]
    if run_us > limits.run_us or stored > limits.bytes:
        return None
    runs_s = min(_RUNS * run_us / 1e6, 2 * limits.budget_s + 12 * run_us / 1e6)
    seconds = limits.fixed_s + runs_s + stored / (limits.fill_gbps * 1e9)
    return Candidate(kernel_item(benchmark, settings, seconds=seconds), call)


def _size(span: Span | tuple[int, ...], rng: np.random.Generator) -> int:
    if not isinstance(span, Span):
        return int(span[rng.integers(len(span))])
    unit = span.units[rng.integers(len(span.units))]
    value = span.low * (span.high / span.low) ** rng.random()
    return int(np.clip(round(value / unit) * unit, -(-span.low // unit) * unit, span.high))


def _fitting(benchmark: str, values: dict[str, Any]) -> dict[str, Any]:
    """Sizes that depend on one another put right."""
    if benchmark == "gemm":
        values["op"] = "bmm" if values.get("batch", 1) > 1 else values.get("op", "mm")
    if benchmark == "attention":
        shared = values.pop("share", 1)
        values["kv_heads"] = max(values["heads"] // shared, 1)
        values["heads"] = values["kv_heads"] * shared
    if benchmark == "convolution" and values.get("groups", 1) > 1:
        values["channels"] = values["out_channels"] = values["groups"] = values["channels"]
    if benchmark == "channel_norm" and values["norm"] == "group":
        values["groups"] = 32 if values["channels"] % 32 == 0 else 1
    if benchmark == "pooling" and values["pool"] == "adaptive_avg":
        values["kernel"] = values["stride"]
    return values


def _seen(benchmark: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Settings as a row of the table would have them, before anything ran."""
    return {**settings, "kernels": ["triton_poi_fused_0" if settings["chain"] == "pointwise" else
                                    "triton_per_fused_0"]} if benchmark == "fused" else settings


_BOTH = ("forward", "backward")
_ALL = ("bf16", "fp16", "fp32")
_HALF = ("bf16", "fp32")
_LAWS = ("uniform", "zipf")


def _gpu() -> tuple[Space, ...]:
    product = {"m": Span(1, 16384, (1, 8, 64, 128)), "n": Span(16, 16384, (8, 64, 128)),
               "k": Span(16, 16384, (8, 64, 128))}
    modes = {"layout": ("nt", "nn", "tn"), "dtype": ("bf16", "fp16", "fp32", "tf32")}
    plain = {"rows": Span(16, 131072, (1, 16)), "width": Span(16, 16384, (1, 8, 64))}
    image = {"batch": Span(1, 256), "channels": Span(3, 2048, (1, 16, 64)), "size": Span(4, 256, (1, 2, 4))}
    return (
        Space(Family.GEMM, "gemm", product, {**modes, "op": ("mm", "addmm")}),
        Space(Family.GEMM, "gemm", {"batch": Span(2, 512), **{name: Span(16, 4096, (8, 64)) for name in "mnk"}},
              modes),
        Space(Family.ATTENTION, "attention", {"batch": Span(1, 128), "heads": Span(4, 64, (4,)),
                                              "seq": Span(64, 16384, (1, 64)), "head_dim": Span(64, 128, (64,)),
                                              "share": Span(1, 8)},
              {"op": _BOTH, "backend": ("flash", "cudnn", "efficient"), "causal": (True, False),
               "dtype": ("bf16", "fp16")}),
        Space(Family.ATTENTION, "attention", {"batch": Span(1, 32), "heads": Span(4, 32, (4,)),
                                              "seq": Span(64, 4096, (64,)), "head_dim": Span(64, 128, (64,))},
              {"op": _BOTH, "backend": ("efficient", "math"), "causal": (True, False), "dtype": ("fp32",)}),
        Space(Family.CONV, "convolution", {**image, "out_channels": Span(16, 2048, (16, 64)),
                                           "kernel": (1, 1, 3, 3, 5, 7), "stride": (1, 1, 2)},
              {"op": ("forward", "dgrad", "wgrad"), "dtype": ("bf16", "fp16", "fp32", "tf32"),
               "channels_last": (True, False)}),
        Space(Family.CONV, "convolution", {**image, "out_channels": Span(16, 1024, (16,)), "kernel": (3, 5, 7),
                                           "groups": (2,)},
              {"op": ("forward", "dgrad", "wgrad"), "dtype": _HALF, "channels_last": (True, False)}),
        Space(Family.NORM, "norm", plain, {"norm": ("layer", "rms"), "op": _BOTH, "dtype": _ALL}),
        Space(Family.NORM, "channel_norm", {name: image[name] for name in ("batch", "channels", "size")},
              {"norm": ("batch", "group"), "channels_last": (True, False), "op": _BOTH, "dtype": _HALF}),
        Space(Family.SOFTMAX, "softmax", plain, {"log": (False, True), "op": _BOTH, "dtype": _ALL}),
        Space(Family.ELEMENTWISE, "elementwise", plain,
              {"op": ("add", "mul", "gelu", "silu", "exp", "sqrt", "gelu_backward", "add_scalar", "add_inplace"),
               "layout": ("contiguous", "contiguous", "transposed", "row", "column"), "dtype": _ALL}),
        Space(Family.REDUCTION, "reduction", plain,
              {"op": ("sum", "mean", "amax", "argmax", "norm", "cumsum"), "over": ("width", "rows", "all"),
               "dtype": _HALF}),
        Space(Family.EMBEDDING, "embedding",
              {"rows": Span(1000, 4_000_000), "width": Span(16, 4096, (16, 64)), "lookups": Span(64, 1_000_000)},
              {"op": (*_BOTH, "backward_sparse"), "law": _LAWS, "dtype": _HALF}),
        Space(Family.EMBEDDING, "embedding",
              {"rows": Span(1000, 4_000_000), "width": Span(16, 256, (16,)), "lookups": Span(256, 1_000_000),
               "pooling": Span(2, 64)}, {"op": _BOTH, "law": _LAWS, "dtype": ("fp32",)}),
        Space(Family.INDEX, "index",
              {"rows": Span(256, 1_000_000), "width": Span(16, 4096, (16,)), "count": Span(64, 1_000_000)},
              {"op": ("index_select", "gather", "scatter", "scatter_add", "index_add"), "dtype": _HALF}),
        Space(Family.SORT, "sort", {"rows": Span(1, 16384), "width": Span(8, 1_000_000), "k": Span(1, 100)},
              {"op": ("sort", "topk"), "dtype": _HALF}),
        Space(Family.CONCAT, "concat", {"rows": Span(16, 65536), "width": Span(16, 4096, (8,)), "tensors": Span(2, 32)},
              {"along": ("rows", "width"), "dtype": _HALF}),
        Space(Family.COPY, "elementwise", plain,
              {"op": ("copy", "cast_fp32", "cast_bf16"), "layout": ("contiguous", "transposed"), "dtype": _HALF}),
        Space(Family.TRANSFER, "copy", {"bytes": Span(64, 1 << 30)},
              {"direction": ("h2d", "d2h"), "memory": ("pinned", "pageable")}),
        Space(Family.TRANSFER, "copy", {"bytes": Span(64, 1 << 30)}, {"direction": ("d2d",)}),
        Space(Family.MEMSET, "memset", {"bytes": Span(64, 1 << 31)}),
        Space(Family.RANDOM, "random", {"elements": Span(64, 1 << 28)},
              {"op": ("dropout", "normal", "uniform", "bernoulli"), "dtype": _HALF}),
        Space(Family.LOSS, "loss", {"rows": Span(16, 65536), "classes": Span(2, 131072)},
              {"loss": ("nll", "mse", "smooth_l1"), "op": _BOTH, "dtype": _HALF}),
        Space(Family.POOLING, "pooling", {**image, "kernel": Span(2, 7), "stride": Span(1, 4)},
              {"pool": ("max", "avg", "adaptive_avg"), "op": _BOTH, "channels_last": (True, False), "dtype": _HALF}),
        Space(Family.INTERPOLATE, "interpolate", {**image, "factor": Span(2, 4)},
              {"mode": ("nearest", "bilinear", "bicubic"), "op": _BOTH, "channels_last": (True, False),
               "dtype": _HALF}),
        Space(Family.RECURRENT, "recurrent",
              {"seq": Span(4, 256), "batch": Span(1, 256), "input": Span(32, 1024, (16,)),
               "hidden": Span(32, 1536, (16,)), "layers": Span(1, 3)},
              {"cell": ("lstm", "gru"), "op": _BOTH, "dtype": _ALL}),
        Space(Family.OPTIMIZER, "foreach", {"tensors": Span(1, 300), "elements": Span(16, 1 << 24)},
              {"op": ("add_", "mul_", "addcmul_", "addcdiv_", "lerp_", "sqrt", "norm", "fused_adamw_", "fused_sgd_"),
               "dtype": _HALF}),
        Space(Family.TRITON, "fused", {"rows": Span(128, 32768, (16,)), "width": Span(128, 8192, (64,))},
              {"chain": ("pointwise", "norm", "softmax"), "dtype": ("bf16",)}),
    )


def _cpu() -> tuple[Space, ...]:
    plain = {"rows": Span(8, 4096), "width": Span(32, 4096, (1, 16))}
    image = {"batch": Span(1, 16), "channels": Span(8, 256, (8, 16)), "size": Span(7, 112, (1, 7))}
    product = {"m": Span(1, 2048, (1, 1, 8, 64)), "n": Span(16, 2048, (16, 64)), "k": Span(16, 2048, (16, 64))}
    modes = {"layout": ("nt", "nn", "tn"), "dtype": _HALF}
    return (
        Space(Family.GEMM, "gemm", product, {**modes, "op": ("mm", "addmm")}),
        Space(Family.GEMM, "gemm", {"batch": Span(2, 64), **{name: Span(16, 256, (8,)) for name in "mnk"}}, modes),
        Space(Family.ATTENTION, "attention", {"batch": Span(1, 8), "heads": Span(2, 16, (2,)),
                                              "seq": Span(32, 512, (16,)), "head_dim": Span(32, 128, (32,))},
              {"op": _BOTH, "backend": ("flash",), "causal": (True, False), "dtype": _HALF}),
        Space(Family.CONV, "convolution", {**image, "out_channels": Span(8, 256, (8,)), "kernel": (1, 3, 3, 5),
                                           "stride": (1, 1, 2)},
              {"op": ("forward", "dgrad", "wgrad"), "dtype": ("fp32",), "channels_last": (False,)}),
        Space(Family.NORM, "norm", plain, {"norm": ("layer",), "op": _BOTH, "dtype": _HALF}),
        Space(Family.NORM, "channel_norm", image,
              {"norm": ("batch",), "channels_last": (False,), "op": _BOTH, "dtype": ("fp32",)}),
        Space(Family.SOFTMAX, "softmax", plain, {"log": (False, True), "op": _BOTH, "dtype": ("fp32",)}),
        Space(Family.ELEMENTWISE, "elementwise", plain,
              {"op": ("add", "mul", "gelu", "silu", "gelu_backward", "add_scalar"), "layout": ("contiguous",),
               "dtype": _HALF}),
        Space(Family.ELEMENTWISE, "elementwise", plain,
              {"op": ("add", "mul"), "layout": ("row", "column"), "dtype": ("fp32",)}),
        Space(Family.REDUCTION, "reduction", plain,
              {"op": ("sum", "mean", "amax", "norm"), "over": ("width", "rows", "all"), "dtype": ("fp32",)}),
        Space(Family.EMBEDDING, "embedding",
              {"rows": Span(100, 100_000), "width": Span(16, 512, (16,)), "lookups": Span(32, 16384)},
              {"op": ("forward",), "law": _LAWS, "dtype": ("fp32",)}),
        Space(Family.EMBEDDING, "embedding",
              {"rows": Span(100, 100_000), "width": Span(16, 128, (16,)), "lookups": Span(64, 32768),
               "pooling": Span(2, 32)}, {"op": _BOTH, "law": _LAWS, "dtype": ("fp32",)}),
        Space(Family.INDEX, "index", {"rows": Span(100, 50_000), "width": Span(16, 512, (16,)),
                                      "count": Span(32, 16384)},
              {"op": ("index_select", "index_add"), "dtype": ("fp32",)}),
        Space(Family.SORT, "sort", {"rows": Span(1, 512), "width": Span(16, 8192), "k": Span(1, 64)},
              {"op": ("sort", "topk"), "dtype": ("fp32",)}),
        Space(Family.CONCAT, "concat", {"rows": Span(8, 1024), "width": Span(16, 1024, (8,)), "tensors": Span(2, 8)},
              {"along": ("rows", "width"), "dtype": _HALF}),
        Space(Family.COPY, "elementwise", plain,
              {"op": ("copy", "cast_fp32", "cast_bf16"), "layout": ("contiguous",), "dtype": _HALF}),
        Space(Family.TRANSFER, "copy", {"bytes": Span(1 << 14, 48 << 20)}, {"direction": ("d2d",)}),
        Space(Family.MEMSET, "memset", {"bytes": Span(1 << 14, 64 << 20)}),
        Space(Family.RANDOM, "random", {"elements": Span(256, 1 << 21)},
              {"op": ("dropout", "normal", "uniform", "bernoulli"), "dtype": ("fp32",)}),
        Space(Family.LOSS, "loss", {"rows": Span(8, 2048), "classes": Span(2, 4096)},
              {"loss": ("nll", "mse"), "op": _BOTH, "dtype": ("fp32",)}),
        Space(Family.POOLING, "pooling", {**image, "kernel": (2, 3), "stride": (1, 2)},
              {"pool": ("max", "avg"), "op": _BOTH, "channels_last": (False,), "dtype": ("fp32",)}),
        Space(Family.INTERPOLATE, "interpolate", {**image, "factor": (2,)},
              {"mode": ("nearest", "bilinear"), "op": _BOTH, "channels_last": (False,), "dtype": ("fp32",)}),
        Space(Family.RECURRENT, "recurrent",
              {"seq": Span(4, 64), "batch": Span(1, 32), "input": Span(16, 256, (16,)), "hidden": Span(16, 256, (16,)),
               "layers": Span(1, 2)}, {"cell": ("lstm",), "op": _BOTH, "dtype": ("fp32",)}),
        Space(Family.OPTIMIZER, "foreach", {"tensors": Span(1, 30), "elements": Span(64, 1 << 19)},
              {"op": ("add_", "mul_", "addcmul_", "addcdiv_", "sqrt", "norm", "fused_adamw_", "fused_sgd_"),
               "dtype": ("fp32",)}),
    )


_GPU, _CPU = _gpu(), _cpu()
