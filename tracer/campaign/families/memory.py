"""Rows of tables, sorting, joining, copies, and resizing of images."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tracer.campaign.families.family import (
    BYTES,
    DTYPES,
    FORWARD_BACKWARD,
    TWO_DTYPES,
    Bench,
    Called,
    CampaignFamily,
    Choice,
    SearchSpace,
    Settings,
    SizeRange,
    Span,
    TensorArgument,
)

if TYPE_CHECKING:
    from tracer.campaign.lab import Lab

_LAWS = ("uniform", "zipf")


def _embedding(settings: Settings) -> Called:
    """Return the call of a plain look-up (``pooling`` 0), or of bags that sum ``pooling`` rows. Large tables miss L2.

    ``backward`` makes a dense gradient of the whole table, ``backward_sparse`` one of the looked-up rows.
    """
    rows, width, lookups, pooling = (settings[name] for name in ("rows", "width", "lookups", "pooling"))
    backward, sparse = settings["op"] != "forward", settings["op"] == "backward_sparse"
    element, bags = BYTES[settings["dtype"]], -(-lookups // pooling) if pooling else lookups
    table, chosen = TensorArgument((rows, width)), TensorArgument((lookups,), "int64", of=settings["law"], high=rows)
    starts = TensorArgument((bags,), "int64", of="starts", high=pooling)
    name = f"aten::embedding{'_bag' if pooling else ''}"
    arguments = table, chosen, *((starts, False, 0) if pooling else (-1, False)), sparse
    if not backward:
        return Called(name, arguments, float(width * lookups) if pooling else 0.0,
                      element * width * (lookups + bags) + 8.0 * lookups)
    written = element * width * (lookups if sparse else rows)
    return Called(name, arguments, float(width * lookups),
                  element * width * bags + 8.0 * lookups + written, gradient=True)


def _index(settings: Settings) -> Called:
    """Return the call that reads or writes ``count`` rows of a [rows, width] table."""
    op, rows, width, count = (settings[name] for name in ("op", "rows", "width", "count"))
    table, source = TensorArgument((rows, width)), TensorArgument((count, width))
    chosen = TensorArgument((count,), "int64", of=settings["law"], high=rows)
    wide = chosen._replace(shape=source.shape)
    name, arguments = {
        "index_select": ("index_select", (table, 0, chosen)), "index": ("index", (table, [chosen])),
        "gather": ("gather", (table, 0, wide)), "scatter": ("scatter_", (table, 0, wide, source)),
        "scatter_add": ("scatter_add_", (table, 0, wide, source)),
        "index_add": ("index_add_", (table, 0, chosen, source)),
        "index_put": ("index_put_", (table, [chosen], source, True)),
    }[op]
    elements, adds = count * width, op in ("scatter_add", "index_add", "index_put")
    return Called(f"aten::{name}", arguments, float(elements) if adds else 0.0,
                  BYTES[settings["dtype"]] * elements * (2.0 + adds) + 8.0 * count,
                  priced=settings["law"] == "uniform" and op not in ("index", "index_put"))


def _sort(settings: Settings) -> Called:
    rows, width = settings["rows"], settings["width"]
    x, flops = TensorArgument((rows, width)), float(rows * width)
    if settings["op"] == "topk":
        return Called("aten::topk", (x, min(settings["k"], width), -1), flops)
    return Called("aten::sort", (x, -1), flops)


def _concat(settings: Settings) -> Called:
    """Return the call that joins ``tensors`` tensors of [rows, width] along one of the two dimensions."""
    return Called("aten::cat", ([TensorArgument((settings["rows"], settings["width"]))] * settings["tensors"],
                                0 if settings["along"] == "rows" else 1))


def _memset(settings: Settings, lab: Lab) -> Bench:
    target = lab.torch.empty(settings["bytes"], dtype=lab.torch.uint8, device=lab.device)
    return Bench(lambda: lab.machine.memset(target), 0.0, float(settings["bytes"]))


def _copied(settings: Settings) -> Called:
    sides = () if settings["direction"] == "d2d" else (str(settings["memory"]),)
    return Called("transfer", (settings["direction"], settings["bytes"], sides))


def _copy(settings: Settings, lab: Lab) -> Bench:
    """Return a copy's benchmark: copies from or to pageable memory block the host; other copies are queued."""
    torch, size, direction = lab.torch, settings["bytes"], settings["direction"]
    pinned = settings["memory"] == "pinned"
    on_device = torch.randint(256, (size,), dtype=torch.uint8, device=lab.device)
    if direction == "d2d":
        target = torch.empty_like(on_device)
        return Bench(lambda: target.copy_(on_device), 0.0, 2.0 * size)
    on_host = torch.randint(256, (size,), dtype=torch.uint8)
    if pinned:
        on_host = lab.pinned(on_host)
    source, target = (on_host, on_device) if direction == "h2d" else (on_device, on_host)
    return Bench(lambda: target.copy_(source, non_blocking=pinned), 0.0, float(size), asynchronous=pinned)


def _copy_fits(settings: Settings) -> str:
    if settings["direction"] == "d2d" and settings["memory"] == "pageable":
        return "direction=d2d has no host memory; leave memory=pinned, the default."
    return ""


def _image(settings: Settings) -> TensorArgument:
    return TensorArgument((settings["batch"], settings["channels"], settings["size"], settings["size"]),
                  lies="nhwc" if settings["channels_last"] else "")


def _as_fitted(settings: Settings) -> dict[str, Any]:
    """Return the flag that marks channels-last calls for the models fitted to these families."""
    return {"layout": "", "flags": ("nhwc",) if settings["channels_last"] else ()}


def _pooling(settings: Settings) -> Called:
    """Return a pooling with square windows; ``adaptive`` has ``size / stride`` windows each way, at least one."""
    x, size, kernel, stride = _image(settings), settings["size"], settings["kernel"], settings["stride"]
    adaptive, backward = settings["pool"] == "adaptive_avg", settings["op"] == "backward"
    out, images = max(size // stride, 1) if adaptive else (size - kernel) // stride + 1, x.shape[0] * x.shape[1]
    name, arguments = {
        "max": ("max_pool2d_with_indices", (x, [kernel] * 2, [stride] * 2)),
        "avg": ("avg_pool2d", (x, [kernel] * 2, [stride] * 2)),
        "adaptive_avg": ("_adaptive_avg_pool2d", (x, [out] * 2)),
    }[settings["pool"]]
    element = BYTES[settings["dtype"]]
    moved = images * (element * size * size + (element + 8 * (settings["pool"] == "max")) * out * out)
    return Called(f"aten::{name}", arguments, float(images * out * out * kernel**2), float(moved), gradient=backward,
                  call=_as_fitted(settings))


def _window_fits(settings: Settings) -> str:
    if settings["kernel"] > settings["size"]:
        return f"kernel={settings['kernel']} exceeds the image's size={settings['size']}."
    return ""


_MIXED = {"nearest": 1, "bilinear": 4, "bicubic": 16}
"""Number of input values that are mixed into one output value."""


def _interpolate(settings: Settings) -> Called:
    """Return the call that resizes images to ``factor`` times the size in each direction."""
    x, mode, size = _image(settings), settings["mode"], settings["size"]
    images, out = x.shape[0] * x.shape[1], size * settings["factor"]
    return Called(f"aten::upsample_{mode}2d", (x, [out] * 2, *(() if mode == "nearest" else (False,))),
                  2.0 * _MIXED[mode] * images * out * out,
                  float(BYTES[settings["dtype"]] * images * (size * size + out * out)),
                  gradient=settings["op"] == "backward", call=_as_fitted(settings))


_IMAGES = {"batch": SizeRange(2), "channels": SizeRange(8), "size": SizeRange(16)}
_MODES: dict[str, Choice] = {"op": FORWARD_BACKWARD, "channels_last": (False, True), "dtype": DTYPES}
_CUDA = {"batch": Span(1, 256), "channels": Span(3, 2048, (1, 16, 64)), "size": Span(4, 256, (1, 2, 4))}
_CUDA_MODES: dict[str, Choice] = {"op": FORWARD_BACKWARD, "channels_last": (True, False), "dtype": TWO_DTYPES}
_CPU = {"batch": Span(1, 16), "channels": Span(8, 256, (8, 16)), "size": Span(7, 112, (1, 7))}
_CPU_MODES: dict[str, Choice] = {"op": FORWARD_BACKWARD, "channels_last": (False,), "dtype": ("fp32",)}

FAMILIES = [
    CampaignFamily(
        "embedding", "look-ups and summed bags, forward and backward; uniform and Zipf rows; tables in and beyond L2",
        {"rows": SizeRange(100), "width": SizeRange(16), "lookups": SizeRange(64), "pooling": SizeRange(4, 0, 0)},
        {"op": (*FORWARD_BACKWARD, "backward_sparse"), "law": _LAWS, "dtype": ("fp32", "bf16")}, _embedding, spaces=(
            SearchSpace("cuda", {"rows": Span(1000, 4_000_000), "width": Span(16, 4096, (16, 64)),
                                 "lookups": Span(64, 1_000_000)},
                        {"op": (*FORWARD_BACKWARD, "backward_sparse"), "law": _LAWS, "dtype": TWO_DTYPES}),
            SearchSpace("cuda", {"rows": Span(1000, 4_000_000), "width": Span(16, 256, (16,)),
                                 "lookups": Span(256, 1_000_000), "pooling": Span(2, 64)},
                        {"op": FORWARD_BACKWARD, "law": _LAWS, "dtype": ("fp32",)}),
            SearchSpace("cpu", {"rows": Span(100, 100_000), "width": Span(16, 512, (16,)),
                                "lookups": Span(32, 16384)},
                        {"op": ("forward",), "law": _LAWS, "dtype": ("fp32",)}),
            SearchSpace("cpu", {"rows": Span(100, 100_000), "width": Span(16, 128, (16,)), "lookups": Span(64, 32768),
                                "pooling": Span(2, 32)},
                        {"op": FORWARD_BACKWARD, "law": _LAWS, "dtype": ("fp32",)})),
        traits=lambda settings: "bags" if settings["pooling"] else ""),
    CampaignFamily(
        "index", "rows of a table by number: index, gather, scatter and their sums",
        {"rows": SizeRange(100), "width": SizeRange(16), "count": SizeRange(64)},
        {"op": ("index_select", "index", "gather", "scatter", "scatter_add", "index_add", "index_put"), "law": _LAWS,
         "dtype": DTYPES}, _index, spaces=(
            SearchSpace("cuda", {"rows": Span(256, 1_000_000), "width": Span(16, 4096, (16,)),
                                 "count": Span(64, 1_000_000)},
                        {"op": ("index_select", "gather", "scatter", "scatter_add", "index_add"),
                         "dtype": TWO_DTYPES}),
            SearchSpace("cpu", {"rows": Span(100, 50_000), "width": Span(16, 512, (16,)), "count": Span(32, 16384)},
                        {"op": ("index_select", "index_add"), "dtype": ("fp32",)}))),
    CampaignFamily(
        "sort", "sort and top-k of each row", {"rows": SizeRange(8), "width": SizeRange(64), "k": SizeRange(4, 8)},
        {"op": ("sort", "topk"), "dtype": DTYPES}, _sort, spaces=(
            SearchSpace("cuda", {"rows": Span(1, 16384), "width": Span(8, 1_000_000), "k": Span(1, 100)},
                        {"op": ("sort", "topk"), "dtype": TWO_DTYPES}),
            SearchSpace("cpu", {"rows": Span(1, 512), "width": Span(16, 8192), "k": Span(1, 64)},
                        {"op": ("sort", "topk"), "dtype": ("fp32",)}))),
    CampaignFamily(
        "concat", "tensors joined along their rows or their width",
        {"rows": SizeRange(16), "width": SizeRange(32), "tensors": SizeRange(3)},
        {"along": ("rows", "width"), "dtype": DTYPES}, _concat, spaces=(
            SearchSpace("cuda", {"rows": Span(16, 65536), "width": Span(16, 4096, (8,)), "tensors": Span(2, 32)},
                        {"along": ("rows", "width"), "dtype": TWO_DTYPES}),
            SearchSpace("cpu", {"rows": Span(8, 1024), "width": Span(16, 1024, (8,)), "tensors": Span(2, 8)},
                        {"along": ("rows", "width"), "dtype": TWO_DTYPES}))),
    CampaignFamily(
        "copy", "copies host to device, device to host and within the device; pinned and pageable host memory",
        {"bytes": SizeRange(4096)}, {"direction": ("h2d", "d2h", "d2d"), "memory": ("pinned", "pageable")},
        _copied, _copy, _copy_fits, spaces=(
            SearchSpace("cuda", {"bytes": Span(64, 1 << 30)},
                        {"direction": ("h2d", "d2h"), "memory": ("pinned", "pageable")}),
            SearchSpace("cuda", {"bytes": Span(64, 1 << 30)}, {"direction": ("d2d",)}),
            SearchSpace("cpu", {"bytes": Span(1 << 14, 48 << 20)}, {"direction": ("d2d",)}))),
    CampaignFamily(
        "memset", "memory of the device set to zero by its own call", {"bytes": SizeRange(4096)}, {},
        lambda settings: Called("memset", (int(settings["bytes"]),)), _memset, spaces=(
            SearchSpace("cuda", {"bytes": Span(64, 1 << 31)}), SearchSpace("cpu", {"bytes": Span(1 << 14, 64 << 20)}))),
    CampaignFamily(
        "pooling", "pooling by maximum and by mean, and to a given size",
        {**_IMAGES, "kernel": SizeRange(3), "stride": SizeRange(2)},
        {"pool": ("max", "avg", "adaptive_avg"), **_MODES}, _pooling, check=_window_fits, spaces=(
            SearchSpace("cuda", {**_CUDA, "kernel": Span(2, 7), "stride": Span(1, 4)},
                        {"pool": ("max", "avg", "adaptive_avg"), **_CUDA_MODES}),
            SearchSpace("cpu", {**_CPU, "kernel": (2, 3), "stride": (1, 2)},
                        {"pool": ("max", "avg"), **_CPU_MODES})),
        fit=lambda values: {**values, **({"kernel": values["stride"]} if values["pool"] == "adaptive_avg" else {})}),
    CampaignFamily(
        "interpolate", "enlarged images: nearest, bilinear, bicubic", {**_IMAGES, "factor": SizeRange(2, 2)},
        {"mode": tuple(_MIXED), **_MODES}, _interpolate, spaces=(
            SearchSpace("cuda", {**_CUDA, "factor": Span(2, 4)}, {"mode": tuple(_MIXED), **_CUDA_MODES}),
            SearchSpace("cpu", {**_CPU, "factor": (2,)}, {"mode": ("nearest", "bilinear"), **_CPU_MODES}))),
]
