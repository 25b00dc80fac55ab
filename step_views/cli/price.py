"""``foretrace price``: the time of one operation on a device."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any

import typer

from kernel_models import device as known_devices
from kernel_models import op_call, pricing
from kernel_models import operation as kernel_models_operation
from kernel_models import profile as kernel_models_profile
from kernel_models.families import embedding, registry
from kernel_models.heuristics import work
from step_views.cli.console import Column, Report, print_json
from step_views.cli.options import Json, in_one_sentence, profile_of, shared
from step_views.cli.price_arguments import (
    MOST,
    Asked,
    PriceError,
    asked,
    check,
    full_name,
    is_empty,
    missing,
    near_operations,
    registry_names,
)
from tracer.lookup_data import indices as lookup_data_indices
from tracer.lookup_data import tables as lookup_data_tables

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


@in_one_sentence
def price(
    operation: Annotated[str, typer.Argument(metavar="OPERATION", help="Such as aten::linear.")],
    shapes: Annotated[str, typer.Option(
        metavar="SIZES", help="Sizes of its tensors in the order of its arguments, such as 8192x4096,11008x4096. "
        "Write none for an omitted tensor, 1 for a tensor of one element, [1024x1024;512] for a list of tensors.")],
    dtype: Annotated[str, shared("--dtype", "one for each tensor, separated by commas, or one for all")] = "fp32",
    device: Annotated[str | None, shared("--device", "the profile's if left out")] = None,
    profile: Annotated[list[str] | None, shared("--profile", "repeatable; the first of the device counts")] = None,
    value: Annotated[list[str] | None, typer.Option(
        metavar="NAME=VALUE", help="An argument that is no tensor, such as stride=2, is_causal=true or dim=-1; may be "
        "repeated. Others are PyTorch's defaults.")] = None,
    assume: Annotated[list[str] | None, typer.Option(
        metavar="NAME=VALUE,…", help="What an inference server's operator leaves to its state, such as "
        "context=4096,sequences=32 or experts=16,visits=8; may be repeated.")] = None,
    backward: Annotated[bool, typer.Option("--backward", help="Price its gradient instead.")] = False,
    tf32: Annotated[bool, typer.Option("--tf32", help="Products of fp32 run as TF32.")] = False,
    indices: Annotated[str | None, shared("--indices", "for an operation that looks rows up")] = None,
    json: Json = False,
) -> None:
    """Price one operation on a device, from fitted models or its data sheet alone.

    foretrace price aten::linear --shapes 8192x4096,11008x4096 --dtype bf16 --device h200-sxm
    """
    operation = full_name(operation)
    spec, fitted = _device(device, profile)
    told = told_of(operation, assume or ())
    calls, wanted = calls_to_price(operation, shapes, dtype, value or (), backward=backward, tf32=tf32, told=told)
    if indices is not None:
        calls = _looked_up(calls, indices, operation)
    priced = pricing.price(calls, spec, fitted)
    low, high = priced.total_interval_us()
    flops, moved = sum(call.flops for call in calls), sum(call.bytes_moved for call in calls)
    sources = list(priced.share_by_source())
    found: dict[str, Any] = {
        "time_us": round(priced.total_us, 3), "interval_us": [round(low, 3), round(high, 3)],
        "source": sources[0] if len(sources) == 1 else "mixed" if sources else "none", "flops": flops,
        "bytes": moved}
    rows: list[dict[str, Any]] = []
    for i in priced.index.tolist():
        call, interval = priced.calls[i], (float(priced.low_us[i]), float(priced.high_us[i]))
        rows.append({"family": call.family.value, "kind": call.kind, "dtype": call.dtype,
                     "time_us": round(float(priced.time_us[i]), 3), "interval_us": [round(t, 3) for t in interval],
                     "source": op_call.Source(int(priced.source[i])).label, "flops": call.flops,
                     "bytes": call.bytes_moved})
    notes = [*wanted.notes, *_of_types(calls, spec), *_of_sources(priced, fitted)]
    if json:
        print_json({**found, "operation": operation, "device": spec.name, "backward": backward,
                    "values": wanted.values, "told": told, "assumed": wanted.assumed, "notes": notes,
                    "calls": rows})
        return
    report = Report()
    report.line()
    what = "Gradient of " if backward else ""
    if not calls:
        report.line(f"{what}{operation} on {spec.name}: 0 µs, no work", indent=2, style="bold")
        report.notes(notes)
        return
    report.line(f"{what}{operation} on {spec.name}: {_time(priced.total_us)} µs, 80% between {_time(low)} and "
                f"{_time(high)} µs ({found['source']})", indent=2, style="bold")
    report.table("Device work", [Column("family", name=True), Column("kind", name=True), Column("type", name=True),
                                 Column("time µs"), Column("80% interval"), Column("source", name=True),
                                 Column("GFLOP"), Column("MB")],
                 ([r["family"], r["kind"], r["dtype"], _time(r["time_us"]),
                   f"{_time(r['interval_us'][0])} to {_time(r['interval_us'][1])}", r["source"],
                   f"{r['flops'] / 1e9:,.3f}", f"{r['bytes'] / 1e6:,.3f}"] for r in rows))
    if wanted.assumed:
        ways = "--assume says otherwise" if registry.assumptions_of(calls) else "--value and --dtype say otherwise"
        notes.insert(0, f"Assumed: {', '.join(f'{name}={text}' for name, text in wanted.assumed.items())}; {ways}.")
    report.notes(notes)


def calls_to_price(
    name: str, shapes: str, dtype: str, values: Sequence[str] = (), *, backward: bool = False, tf32: bool = False,
    told: Mapping[str, str] = MappingProxyType({}),
) -> tuple[list[op_call.OpCall], Asked]:
    """Return the device work of an operation from the command line, and how its text was understood.

    There are no calls if a tensor without elements leaves nothing to do. Raises ``PriceError`` if the name, sizes,
    types or values cannot be understood or do not fit the operation.
    """

    known = registry.forward_rule(name) is not None
    wanted = asked(name, shapes, dtype, values)
    wanted.operation = replace(wanted.operation, told=tuple(told.items()))
    if kernel_models_operation.is_free(name):
        raise PriceError(f"{name} has no device work: it only makes a view or looks at sizes.")
    check(name, wanted)
    if not known:
        near = near_operations(name)
        wanted.notes.append(f"No family knows {name}: priced by its bytes{near if 'did you mean' in near else ''}.")
        if any(word in name for word in COLLECTIVES):
            wanted.notes.append("By its name it is a collective, which its bytes say little of: foretrace comm predict "
                                "prices it on a cluster.")
    forward = kernel_models_operation.calls_of(wanted.operation, tf32)
    family = kernel_models_operation.family_of(name)
    misfit = known and forward == (kernel_models_operation.by_bytes(wanted.operation),) and family != forward[0].family
    if not misfit and is_empty(forward, wanted):
        wanted.notes.append("No work: a tensor without elements leaves nothing to do.")
        return [], wanted
    names = registry_names(name)
    arguments = f"({', '.join(names)})" if names else ""
    if misfit:
        raise PriceError(f"The sizes {shapes} do not fit {name}{arguments}; check their number and order"
                         f"{missing(name, wanted)}.")
    if not forward or any("unsized" in call.flags for call in forward):
        raise PriceError(f"The sizes {shapes} give {name}{arguments} no work; check their number and order"
                         f"{missing(name, wanted)}.")
    calls = kernel_models_operation.backward_calls_of(wanted.operation, tf32) if backward else forward
    if not calls:
        raise PriceError(f"{name} has no gradient to price.")
    wanted.assumed.update(registry.assumptions_of(calls))
    for call in calls:
        if call.family is op_call.Family.CONV:
            wanted.assumed.update({} if "groups" in wanted.values else {"groups": call.dims[3]})
    return list(calls), wanted


def told_of(name: str, texts: Sequence[str]) -> dict[str, str]:
    """Return the values of ``--assume`` by name. Raises ``PriceError`` for a name that no operator leaves open, or for
    an impossible value."""

    found: dict[str, str] = {}
    if texts and name.startswith("aten::"):
        raise PriceError(f"--assume is of what an inference server's operator leaves to its state, and {name} leaves "
                         "nothing; leave it out.")
    for text in (part for whole in texts for part in whole.split(",") if part.strip()):
        one, _, value = (part.strip() for part in text.partition("="))
        if one not in kernel_models_operation.TOLD:
            raise PriceError(f"--assume {text.strip()[:60]!r} names nothing that operators leave open; it takes "
                             f"{', '.join(kernel_models_operation.TOLD)}.")
        if one in ("kv", "weights"):
            if not op_call.short_dtype(value) and value not in registry.STORED_ONLY:
                raise PriceError(f"--assume {one}={value[:40]!r} is no element type; write it like {one}=fp8.")
        elif _is_count(value) and not int(value) and one not in ("context", "window", "imbalance"):
            raise PriceError(f"--assume {one}=0 leaves {name} nothing to do; give a whole number from 1.")
        elif not _is_count(value) and not (one == "imbalance" and _is_exponent(value)):
            raise PriceError(f"--assume {one}={value[:40]!r} is no number that {name} could have; write it like "
                             f"{one}={'1.2' if one == 'imbalance' else '4096'}.")
        found[one] = value
    return found


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 12 and int(text) < MOST


def _is_exponent(text: str) -> bool:
    return bool(re.fullmatch(r"[0-9]{1,2}(\.[0-9]{1,6})?", text, re.ASCII)) and float(text) <= 10


def _looked_up(calls: Sequence[op_call.OpCall], text: str, operation: str) -> list[op_call.OpCall]:
    """Return the calls with other indices for the rows that are looked up."""
    indices = lookup_data_indices.read_indices(text)
    found = []
    for call in calls:
        if call.family is not op_call.Family.EMBEDDING:
            raise PriceError(f"{operation} looks no rows up in tables: leave --indices out.")
        lookups, bags, rows, columns, tables = call.dims
        each = [lookup_data_tables.EmbeddingTable(f"table {i}", max(rows, 1), max(columns, 1),
                                                  bag=lookups / max(bags, 1))
                for i in range(tables)]
        found.append(embedding.with_tables(call, indices.of(each)))
    return found


def _of_types(calls: Sequence[op_call.OpCall], spec: known_devices.DeviceSpec) -> list[str]:
    """Return remarks on types that the device, or its measurements, lack."""
    notes = []
    for dtype in dict.fromkeys(call.dtype for call in calls if call.family in (
            op_call.Family.GEMM, op_call.Family.CONV, op_call.Family.ATTENTION, op_call.Family.RECURRENT)):
        computed = work.computed_as(spec, dtype)
        if computed != dtype:
            notes.append(f"{spec.name} has no {dtype} matrix units: priced as {computed}, with a wide interval.")
        elif dtype == "fp4":
            notes.append("No measurement has fp4: its efficiency is taken from fp8, with a wide interval.")
        if dtype == "fp4":
            notes.append("Sizes of fp4 count packed pairs, as PyTorch's float4_e2m1fn_x2 does.")
    return notes


def _of_sources(priced: pricing.PricedCalls, profile: pricing.Models | None) -> list[str]:
    """Return remarks on the sources of the times."""
    sheet = [call for call, source in zip(priced.calls, priced.source, strict=True)
             if source == op_call.Source.DATASHEET]
    if profile is None:
        return ["Priced from published figures and efficiencies of other devices; a profile of this device narrows the "
                "interval."] if sheet else []
    notes = []
    by_variant = [call for call, near in zip(priced.calls, priced.by_variant, strict=True) if near]
    if by_variant:
        notes.append(f"The profile covers {_work(by_variant)} in another form only: priced from that form and the data "
                     "sheet's difference between the two.")
    if sheet:
        notes.append(f"The profile does not cover {_work(sheet)}: priced from the data sheet.")
    return notes


def _work(calls: Sequence[op_call.OpCall]) -> str:
    return ", ".join(dict.fromkeys(" ".join(filter(None, (
        call.family.value, call.kind, call.layout, call.dtype))) for call in calls))


def _device(name: str | None, profiles: Sequence[str] | None) -> tuple[known_devices.DeviceSpec, pricing.Models
                                                                       | None]:
    """Return the device for which to price, and the models for it."""
    if name is not None:
        spec = known_devices.find_device(name)
        return spec, profile_of(profiles, spec)
    if not profiles:
        raise PriceError("Name a device with --device, or a profile with --profile.")
    fitted = kernel_models_profile.load_profile(profiles[0])
    return fitted.device, fitted


def _time(us: float) -> str:
    return f"{us:,.1f}" if us >= 10 else f"{us:.2f}"
