"""``foretrace price``: what one operation would cost on a device."""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graph_predictor.cli.console import Column, Report, print_json
from graph_predictor.cli.errors import one_sentence
from graph_predictor.cli.options import Debug, Json
from tracer.errors import ForetraceError

if TYPE_CHECKING:
    from kernel_models.device import DeviceSpec
    from kernel_models.op_call import OpCall
    from kernel_models.pricing import Models
    from kernel_models.profile import DeviceProfile


class PriceError(ForetraceError):
    """What was asked for cannot be priced as it was written."""


def price(
    operation: Annotated[str, typer.Argument(metavar="OPERATION", help="Such as aten::linear.")],
    shapes: Annotated[str, typer.Option(
        metavar="SIZES", help="Sizes of its tensors in the order of its arguments, such as 8192x4096,11008x4096; "
        "none for an argument that is no tensor, 1 for a tensor of one element.")],
    dtype: Annotated[str, typer.Option(metavar="TYPE", help="Element type, or one for each tensor.")] = "fp32",
    device: Annotated[str | None, typer.Option(
        metavar="NAME", help="Such as h200-sxm, or as a trace reports it; the profile's if left out.")] = None,
    profile: Annotated[str | None, typer.Option(metavar="FILE", help="Fitted models of the device.")] = None,
    backward: Annotated[bool, typer.Option("--backward", help="Price its gradient instead.")] = False,
    tf32: Annotated[bool, typer.Option("--tf32", help="Products of fp32 run as TF32.")] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Price one operation on a device, from fitted models or its data sheet alone.

    foretrace price aten::linear --shapes 8192x4096,11008x4096 --dtype bf16 --device h200-sxm
    """
    with one_sentence(debug):
        from kernel_models.pricing import price as price_calls

        spec, fitted = _device(device, profile)
        calls = calls_to_price(operation, shapes, dtype, backward=backward, tf32=tf32)
        priced = price_calls(calls, spec, fitted)
        low, high = priced.total_interval_us()
        flops, moved = sum(call.flops for call in calls), sum(call.bytes_moved for call in calls)
        sources = list(priced.share_by_source())
        found: dict[str, Any] = {
            "time_us": round(priced.total_us, 3), "interval_us": [round(low, 3), round(high, 3)],
            "source": sources[0] if len(sources) == 1 else "mixed", "flops": flops, "bytes": moved}
        rows: list[dict[str, Any]] = []
        for i in priced.index.tolist():
            call, interval = priced.calls[i], (float(priced.low_us[i]), float(priced.high_us[i]))
            rows.append({"family": call.family.value, "kind": call.kind, "dtype": call.dtype,
                         "time_us": round(float(priced.time_us[i]), 3), "interval_us": [round(t, 3) for t in interval],
                         "source": _label(int(priced.source[i])), "flops": call.flops, "bytes": call.bytes_moved})
        if json:
            print_json({**found, "operation": operation, "device": spec.name, "backward": backward, "calls": rows})
            return
        report = Report()
        report.line()
        what = "Gradient of " if backward else ""
        report.line(f"{what}{operation} on {spec.name}: {_time(priced.total_us)} µs, 80% between {_time(low)} and "
                    f"{_time(high)} µs ({found['source']})", indent=2, style="bold")
        report.table("Device work", [Column("family", name=True), Column("kind", name=True), Column("type", name=True),
                                     Column("time µs"), Column("80% interval"), Column("source", name=True),
                                     Column("GFLOP"), Column("MB")],
                     ([r["family"], r["kind"], r["dtype"], _time(r["time_us"]),
                       f"{_time(r['interval_us'][0])} to {_time(r['interval_us'][1])}", r["source"],
                       f"{r['flops'] / 1e9:,.3f}", f"{r['bytes'] / 1e6:,.3f}"] for r in rows))
        if found["source"] == "datasheet":
            report.notes(["Priced from published figures and efficiencies of other devices; a profile of this device "
                          "narrows the interval."])


def calls_to_price(name: str, shapes: str, dtype: str, *, backward: bool = False, tf32: bool = False) -> list[OpCall]:
    """The device work of an operation written as on the command line.

    Raises:
        PriceError: the name, sizes or types cannot be understood, or do not fit the operation.
    """
    from kernel_models import operation as operations
    from kernel_models.dtypes import ITEMSIZE, short_dtype

    if not re.fullmatch(r"\w+::[\w.]+", name) or not (operations.is_free(name) or _known(name)):
        raise PriceError(f"There is no operation {name!r} that foretrace knows{_near_operations(name)}.")
    sizes = [_sizes(text, shapes) for text in shapes.split(",")]
    types = [text.strip() for text in dtype.split(",")]
    for text in types:
        if not short_dtype(text):
            raise PriceError(f"There is no element type {text!r}; known are {', '.join(ITEMSIZE)}.")
    types = [short_dtype(text) for text in types]
    tensors = sum(size is not None for size in sizes)
    if len(types) not in (1, tensors):
        raise PriceError(f"{len(types)} element types are given for {tensors} tensors; give one, or one for each.")
    of_tensor = iter(types * tensors if len(types) == 1 else types)
    kinds = ["" if size is None else next(of_tensor) for size in sizes]
    if operations.is_free(name):
        raise PriceError(f"{name} has no device work: it only makes a view or looks at sizes.")
    wanted = operations.operation(name, sizes, kinds)
    forward = operations.calls_of(wanted, tf32)
    family = operations.family_of(name)
    if not forward or any("unsized" in call.flags for call in forward):
        raise PriceError(f"The sizes {shapes} give {name} no work; check their number and order.")
    if forward == (operations.by_bytes(wanted),) and family != forward[0].family:
        raise PriceError(f"The sizes {shapes} do not fit {name}{_arguments(name)}; check their number and order.")
    calls = operations.backward_calls_of(wanted, tf32) if backward else forward
    if not calls:
        raise PriceError(f"{name} has no gradient to price.")
    return list(calls)


def _device(name: str | None, profile: str | None) -> tuple[DeviceSpec, Models | None]:
    """The device to price on and the models to price with."""
    from kernel_models.device import DeviceError, device, resolve_device

    fitted: DeviceProfile | None = None
    if profile is not None:
        from kernel_models.profile import load_profile

        fitted = load_profile(profile)
    if name is None:
        if fitted is None:
            raise PriceError("Name a device with --device, or a profile with --profile.")
        return fitted.device, fitted
    try:
        spec = device(name)
    except DeviceError:
        spec = resolve_device(name)
    if fitted is not None and fitted.device.name != spec.name:
        raise PriceError(f"{profile} is a profile of {fitted.device.name}, not of {spec.name}; leave out one of them.")
    return spec, fitted


def _sizes(text: str, whole: str) -> tuple[int, ...] | None:
    text = text.strip().lower()
    if text in ("none", "-"):
        return None
    if not re.fullmatch(r"\d+(x\d+)*", text):
        raise PriceError(f"{text or whole!r} are no sizes; write them like 8192x4096,11008x4096.")
    sizes = tuple(int(part) for part in text.split("x"))
    if 0 in sizes or max(sizes) >= 2**40:
        raise PriceError(f"The sizes {text} are out of range; each is at least 1.")
    return sizes


def _known(name: str) -> bool:
    from kernel_models.families import registry

    return registry.forward_rule(name) is not None


def _arguments(name: str) -> str:
    from kernel_models.families import registry

    rule = registry.forward_rule(name)
    return f"({', '.join(rule.names)})" if rule is not None and rule.names else ""


def _near_operations(name: str) -> str:
    from kernel_models.families import registry

    registry.forward_rule("aten::mm")  # loads the families
    near = difflib.get_close_matches(name if "::" in name else f"aten::{name}", list(registry.FORWARD), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(near)}" if near else "; names look like aten::linear"


def _label(source: int) -> str:
    from kernel_models.model import Source

    return Source(source).label


def _time(us: float) -> str:
    return f"{us:,.1f}" if us >= 10 else f"{us:.2f}"
