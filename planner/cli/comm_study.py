"""``foretrace comm study``: communication of a decoder's plans, and how long their steps wait for it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any

import typer

from graph_predictor.comm import traffic
from graph_predictor.figures import count, percent
from kernel_models import device as known_devices
from planner.cli.options import DecoderSource, Profiles
from planner.parallel import comm_study
from step_views.cli.console import Column, Report, print_json, working
from step_views.cli.mixture import mixture_json, report_mixture
from step_views.cli.options import Json, Top, axis, in_one_sentence, numbers, profile_of, shared

BEST = 40  # chosen: a longer table would not be read
SIZES = (1 << 16, 1 << 20, 1 << 24, 1 << 28)
"""Limits of the columns of the table of sizes, bytes; powers of two, as in ``PlanCommunication.histogram``."""


@in_one_sentence
def study(
    source: DecoderSource,
    gpus: Annotated[str, typer.Option(metavar="N,…", help="GPUs of the job; several sizes are compared.")],
    device: Annotated[str, shared("--device")] = "h200-sxm",
    topology: Annotated[str | None, shared("--topology")] = None,
    assignments: Annotated[list[str] | None, shared("--set")] = None,
    preset: Annotated[str | None, axis(
        "--preset", "or trained models: llama 8b, 70b, 405b; gpt2 xl, 175b; moe 8x7b; the first by default")] = None,
    seq: Annotated[str | None, typer.Option(
        metavar="N,…", help="Tokens of a sequence; by default what the source says.")] = None,
    parallel: Annotated[list[str] | None, shared(
        "--parallel", "repeatable; one of the sizes may be left out; by default each usual kind once")] = None,
    global_batch: Annotated[int | None, shared(
        "--global-batch", "for plans that do not say their micro-batches, which else do one, of a pipeline one a stage",
        least=1)] = None,
    comm_profile: Annotated[str | None, shared("--comm-profile")] = None,
    comm_choices: Annotated[str | None, shared("--comm-choices")] = None,
    profile: Profiles = None,
    top: Top = None,
    json: Json = False,
) -> None:
    """Show volume, count and sizes of every collective of a decoder's plans by cause, and how long the step waits for
    it. Compares sequences, models, numbers of GPUs and plans.

    foretrace comm study llama --preset 8b,70b --seq 4096,32768 --gpus 64 --device h100-sxm --global-batch 128
    """
    with working("Tracing and pricing"):
        found = comm_study.comm_study(
            source, numbers(gpus, "--gpus", "64,128"), device=device, topology=topology,
            settings=assignments or (), presets=[each.strip() for each in preset.split(",")] if preset else (),
            seqs=numbers(seq, "--seq", "4096,8192") if seq else (), plans=parallel or (),
            global_batch=global_batch, comm_profile=comm_profile, comm_choices=comm_choices,
            profile=profile_of(profile, known_devices.find_device(device)))
    if json:
        print_json({"device": found.device, "topology": found.topology,
                    **{name: table().to_dict("records") for name, table in found.tables().items()},
                    "refused": [{"plan": text, "reason": why} for text, why in found.refused],
                    **_mixture_json(found.cases), "notes": found.notes})
    else:
        _report(found, top or BEST)


def _mixture_json(cases: Sequence[comm_study.PlanCommunication]) -> dict[str, Any]:
    """Return which backend does each collective, if one plan is studied."""
    if len(cases) != 1 or cases[0].mixture is None:
        return {}
    return mixture_json(cases[0].mixture, cases[0].estimate.time_us, cases[0].single_us)


def _report(found: comm_study.CommStudy, top: int) -> None:
    out, cases = Report(), found.cases
    several = {name: len({getter(each) for each in cases}) > 1 for name, getter in _WHICH.items()}
    shown = cases[:top]
    first = cases[0]
    out.line(f"{_models(found)} on {found.device}, {found.topology}: what a rank communicates in a step.")
    names = [name for name in _WHICH if several[name]]

    def case(each: comm_study.PlanCommunication) -> list[str]:
        return [_text(_WHICH[name](each)) for name in names] + [str(each.estimate.plan)]

    columns = [Column(name, name=name == "model") for name in names] + [Column("plan", name=True, whole=True)]
    out.table("Steps and what of them is exposed communication, ms", [
        *columns, Column("step"), Column("exposed"), Column("80% between"), Column("of the\nstep"),
        Column("alone"), Column("sent\nGB"), Column("calls"), Column("", name=True)], [
        [*case(each), _ms(each.estimate.time_us), _ms(each.all_exposed.us),
         f"{_ms(each.all_exposed.low)} – {_ms(each.all_exposed.high)}",
         percent(each.all_exposed.us / each.estimate.time_us), _ms(each.alone_us),
         f"{each.wire_bytes / 1e9:,.4g}", count(round(sum(row.count for row in each.messages))),
         "" if each.fit.value == "fits" else each.fit.value] for each in shown])
    out.line("Exposed: what the step would save if communication cost nothing. Alone: all of it, one after another, "
             "of one stage; in a pipeline others wait for it too. Sent: bytes that leave the rank.")
    causes = [cause for cause in comm_study.CommCause if any(cause in each.exposed for each in shown)]
    if len(cases) > 1:
        headed = [*columns, *(Column(cause.value.replace(" ", "\n", 1)) for cause in causes)]
        out.table("Exposed by cause, ms", headed, [
            [*case(each), *(_ms(each.exposed[cause].us) if cause in each.exposed else "" for cause in causes)]
            for each in shown])
        out.table("GB sent by cause", headed, [
            [*case(each), *(_gb(each, cause) for cause in causes)] for each in shown])
    else:
        out.table("Collectives", [
            Column("for", name=True), Column("kind", name=True), Column("ranks"), Column("nodes"), Column("each"),
            Column("calls"), Column("µs each"), Column("ms alone"), Column("GB sent")], [
            [row.cause.value, row.kind.label, count(row.ranks), count(row.nodes), traffic.bytes_text(row.payload_bytes),
             f"{row.count:,.4g}", f"{row.us:,.1f}", _ms(row.count * row.us), f"{row.wire_bytes / 1e9:,.4g}"]
            for row in first.messages])
        if first.mixture is not None:
            report_mixture(first.mixture, first.estimate.time_us, first.single_us)
        out.table("By cause", [Column("for", name=True), Column("exposed ms"), Column("80% between")], [
            [cause.value, _ms(time.us), f"{_ms(time.low)} – {_ms(time.high)}"]
            for cause, time in first.exposed.items()])
    out.table("Calls by size", [*columns, *(Column(name) for name in _size_names())], [
        [*case(each), *_counts(each)] for each in shown])
    if len(cases) > len(shown):
        out.line(f"{len(cases) - len(shown):,} more; --top {len(cases)} shows them all.")
    for text, why in found.refused:
        out.line(f"Not possible: {text}. {why}")
    out.notes(found.notes)


_WHICH: dict[str, Any] = {
    "model": lambda each: each.model, "tokens": lambda each: each.shape.seq,
    "GPUs": lambda each: each.estimate.plan.world_size}


def _text(value: str | int) -> str:
    return value if isinstance(value, str) else f"{value:,}"


def _models(found: comm_study.CommStudy) -> str:
    names = list(dict.fromkeys(each.model for each in found.cases))
    return names[0] if len(names) == 1 else f"{len(names)} models"


def _ms(us: float) -> str:
    return f"{us / 1e3:,.1f}" if us >= 1e4 else f"{us / 1e3:,.3g}"


def _gb(each: comm_study.PlanCommunication, cause: object) -> str:
    sent = [row.wire_bytes for row in each.messages if row.cause is cause]
    return f"{sum(sent) / 1e9:,.4g}" if sent else ""


def _size_names() -> list[str]:
    ends = [traffic.bytes_text(size) for size in SIZES]
    between = [f"{low} –\n{high}" for low, high in pairwise(ends)]
    return [f"below\n{ends[0]}", *between, f"from\n{ends[-1]}"]


def _counts(each: comm_study.PlanCommunication) -> list[str]:
    found = [0.0] * (len(SIZES) + 1)
    for (_, power), (number, _) in each.histogram().items():
        found[sum(2 ** power >= size for size in SIZES)] += number
    return [f"{number:,.0f}" if number else "" for number in found]
