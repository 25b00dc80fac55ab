"""``foretrace shapes``: sizes of a decoder that cost more GPU time than similar sizes."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from graph_predictor.figures import percent, signed_percent
from kernel_models import device as known_devices
from kernel_models import op_call
from kernel_models.heuristics import shape_terms
from planner.cli.options import DecoderSource, Profiles, TrainedPreset
from planner.cli.plan import heads_text
from planner.parallel import shape_search
from planner.parallel import shapes as parallel_shapes
from step_views.cli.console import Column, Report, print_json, working
from step_views.cli.options import Json, Top, in_one_sentence, profile_of, shared
from tracer.lazy import numpy as np

BEST = 12  # chosen: a longer table would not be read
MOST_LOSING = 5
"""Rows of the table of kernels with the largest loss."""
DEFAULT_PLAN = "microbatch=1"
SETTINGS = {"heads": "heads", "ffn": "inner width", "vocab": "vocabulary", "hidden": "width",
            "microbatch": "micro-batch", "tp": "tensor parallelism"}


@in_one_sentence
def shapes(
    source: DecoderSource,
    device: Annotated[str, shared("--device")] = "h200-sxm",
    assignments: Annotated[list[str] | None, shared("--set")] = None,
    preset: TrainedPreset = None,
    parallel: Annotated[str, shared(
        "--parallel", "how layers are split and the micro-batch's size, such as tp=8,microbatch=4,sequence_parallel"
    )] = DEFAULT_PLAN,
    search: Annotated[bool, typer.Option(
        "--search", help="Search depths, widths, heads, inner widths, micro-batches and tp at equal parameters (±1%).",
    )] = False,
    profile: Profiles = None,
    top: Top = None,
    json: Json = False,
) -> None:
    """Find sizes of a model that cost more GPU time than their neighbours, with reason and gain of each change at equal
    parameters. It tries heads, widths, vocabulary, micro-batch and tensor parallelism.

    foretrace shapes gpt2 --preset xl --device a100-sxm-80g --parallel microbatch=8

    Collectives, the optimizer and the host are left out: foretrace plan has them.
    """
    asked: dict[str, Any] = {"device": device, "settings": assignments or (), "preset": preset, "parallel": parallel,
                             "profile": profile_of(profile, known_devices.find_device(device))}
    if search:
        with working("Tracing and pricing designs"):
            designs = shape_search.shape_search(source, **asked)
        if json:
            print_json(_plain_designs(designs, top))
        else:
            _report_designs(designs, top or BEST)
        return
    with working("Tracing and pricing"):
        found = parallel_shapes.shapes(source, **asked)
    if json:
        print_json(_plain(found, top))
    else:
        _report(found, top or BEST)


def _plain(found: parallel_shapes.ShapeReport, top: int | None) -> dict[str, Any]:
    return {
        "model": found.model, "device": found.device.name, "plan": str(found.plan), "shape": asdict(found.shape),
        "parameters": found.shape.parameters, "us_per_token": found.cost.total_us, "lost": found.cost.lost(),
        "changes": [_values(each) for each in found.advice[:top or None]],
        "refused": [{"setting": change.setting, "value": change.value, "reason": reason}
                    for change, reason in found.refused], "notes": found.notes}


def _values(each: parallel_shapes.ShapeAdvice) -> dict[str, Any]:
    return {"setting": each.change.setting, "value": each.change.value, "us_per_token": each.us, "gain": each.gain,
            "interval": [each.low, each.high], "sure": each.sure, "parameters_ratio": each.parameters,
            "per_parameter": each.change.credited, "reasons": dict(each.reasons)}


def _report(found: parallel_shapes.ShapeReport, top: int) -> None:
    out, shape, cost = Report(), found.shape, found.cost
    out.line(f"{found.model} on {found.device.name}: {shape.layers} layers of width {shape.hidden:,}, "
             f"{heads_text(shape, sized=True)}, inner width {shape.ffn:,}, vocabulary {shape.vocab:,}, {shape.dtype}; "
             f"a rank's micro-batch is {found.plan.samples} × {shape.seq:,} tokens, tp={found.plan.tp}.")
    lost = {term: share for term, share in cost.lost().items() if share >= 0.0005}
    said = ", ".join(f"{percent(share)} for {shape_terms.TERMS[term]}" for term, share in lost.items()) or "nothing"
    out.line(f"A token takes {cost.total_us:,.4g} µs of a GPU, forward and backward. Of this its sizes cost: {said}.")
    out.table("Changes, the greatest gain first", [
        Column("change", name=True, whole=True), Column("GPU µs\na token"), Column("gain"), Column("80% between"),
        Column("", name=True), Column("parameters"), Column("of the time", name=True, whole=True)], [
        [f"{SETTINGS[each.change.setting]} {each.change.value}", f"{each.us:,.4g}",
         signed_percent(each.gain), f"{signed_percent(each.low)} – {signed_percent(each.high)}",
         "" if each.sure else "=", signed_percent(each.parameters - 1), each.why()]
        for each in found.advice[:top]])
    out.line("=: the gain lies inside its own uncertainty. Widths are compared per parameter; padding "
             "of the vocabulary adds no model.")
    out.table("Neighbours: gain against what is", [
        Column("size", name=True), Column("now"), Column("neighbours", name=True, whole=True)], [
        [SETTINGS[setting], _now(found, setting), ",  ".join(
            f"{each.change.value} {signed_percent(each.gain)}{'' if each.sure else '='}"
            for each in found.advice if each.change.setting == setting)]
        for setting in SETTINGS if any(each.change.setting == setting for each in found.advice)])
    for change, reason in found.refused:
        out.line(f"Not possible: {SETTINGS[change.setting]} {change.value}. {reason}")
    _report_losing(out, found)
    out.notes(found.notes)


def _plain_designs(found: shape_search.ShapeDesigns, top: int | None) -> dict[str, Any]:
    return {"model": found.model, "device": found.device.name, "plan": str(found.plan), "shape": asdict(found.shape),
            "parameters": found.shape.parameters, "us_per_token": found.us, "memory_bytes": found.memory_bytes,
            "designs": [shape_search.values_of(each) for each in found.designs[:top or None]],
            "refused": found.refused, "notes": found.notes}


def _report_designs(found: shape_search.ShapeDesigns, top: int) -> None:
    out, shape = Report(), found.shape
    out.line(f"{found.model} on {found.device.name}: {shape.layers} layers of width {shape.hidden:,}, "
             f"{heads_text(shape, sized=True)}, inner width {shape.ffn:,}, micro-batch {found.plan.samples}, "
             f"tp={found.plan.tp}: {found.us:,.4g} µs of a GPU a token and {found.memory_bytes / 1e9:,.1f} GB a rank.")
    shown = found.designs[:top] + tuple(each for each in found.designs[top:] if each.best)
    out.table(f"The quickest of {len(found.designs)} designs with as many parameters (±1%)", [
        Column("layers × width", name=True, whole=True), Column("heads"), Column("inner"), Column("micro-\nbatch"),
        Column("tp"), Column("GPU µs\na token"), Column("gain"), Column("80% between"), Column("memory\nGB"),
        Column("", name=True)], [_design_row(each) for each in shown])
    out.line("*: no design is quicker with no more memory. Gains are for each parameter; how well another depth learns "
             "is not judged.")
    if found.designs:
        adds = found.designs[0].products
        parts = sorted((name for name in adds if abs(adds[name]) >= 0.0005), key=lambda name: adds[name])
        out.line("The first one's time against now: " + ", ".join(
            f"{name} {signed_percent(adds[name])}" for name in parts) + ".")
    if found.refused:
        out.line(f"{found.refused} more cannot be split as the plan says.")
    out.notes(found.notes)


def _design_row(each: shape_search.ShapeDesign) -> list[str]:
    advice, shape, plan = each.advice, each.advice.change.shape, each.advice.change.plan
    return [f"{shape.layers} × {shape.hidden:,}", f"{shape.heads} of {shape.width_of_head}", f"{shape.ffn:,}",
            str(plan.samples), str(plan.tp), f"{advice.us:,.4g}", signed_percent(advice.gain),
            f"{signed_percent(advice.low)} – {signed_percent(advice.high)}", f"{each.memory_bytes / 1e9:,.1f}",
            "*" if each.best else ""]


def _now(found: parallel_shapes.ShapeReport, setting: str) -> str:
    if setting in ("microbatch", "tp"):
        return str(found.plan.samples if setting == "microbatch" else found.plan.tp)
    more = f" of {found.shape.width_of_head}" if setting == "heads" else ""
    return f"{getattr(found.shape, setting):,}{more}"


def _report_losing(out: Report, found: parallel_shapes.ShapeReport) -> None:
    """Print the kernels whose sizes cost most."""

    cost = found.cost
    total = np.sum(list(cost.lost_us.values()), axis=0)
    order = sorted(range(len(cost.calls)), key=lambda i: -total[i])[:MOST_LOSING]
    rows = []
    for i in order:
        call, worst = cost.calls[i], max(cost.lost_us, key=lambda name: cost.lost_us[name][i])
        if total[i] < 0.0005 * cost.total_us:
            break
        sizes = " ".join(f"{name}={size:,}" for name,
                         size in zip(op_call.DIMENSIONS[call.family], call.dims, strict=False)
                         if size > 1)
        rows.append([f"{call.kind} {call.layout}".strip(), sizes, percent(cost.us[i] / cost.total_us),
                     percent(total[i] / cost.total_us), shape_terms.TERMS[worst]])
    if rows:
        out.table("Kernels that lose most", [
            Column("kernel", name=True), Column("sizes", name=True, whole=True), Column("of the time"), Column("lost"),
            Column("most for", name=True)], rows)
