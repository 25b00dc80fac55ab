"""``foretrace inspect``: contents of the traces, and what they lack."""

from __future__ import annotations

from graph_predictor.figures import count, milliseconds, percent
from step_views.cli.console import Column, Report, print_json, read
from step_views.cli.options import Cycle, Json, Paths, StepRegion, Window, Workers, in_one_sentence
from step_views.reports import inspection
from tracer import job

_SHOWN_CLASSES = 8  # chosen: a longer list would not be read
_GAPS = {"blocked": "waiting for other threads (autograd, communication)"}
"""Descriptions of kinds of host time outside operations, if the kind's name is not clear."""


@in_one_sentence
def inspect(paths: Paths, window: Window = 0, step_region: StepRegion = None, cycle: Cycle = None,
            workers: Workers = "local", json: Json = False) -> None:
    """Show what traces hold and what they lack.

    Device, ranks, the recorded step, counts, GPU active time, host time outside operations, and the loss report.
    """
    found = inspection.inspect_job(read(paths, window, workers, step_region=step_region, cycle=cycle))
    if json:
        print_json(found.to_json())
    else:
        _report(found)


def _report(found: inspection.Inspection) -> None:
    report = Report()
    first = found.ranks[0]
    known = found.world_size if found.world_size > 0 else len(found.ranks)
    facts = {
        "device": ", ".join(found.devices) or "not named in the trace",
        "ranks": _ranks(found, known),
        "steps": _steps(found),
        "recorded step": "unknown (no steps)" if found.recorded is None else found.recorded.sentence(),
        "operations": count(found.total("ops")),
        "launches": f"{count(found.total('launches'))} of {count(found.total('calls'))} runtime calls",
        "kernels": _kernels(found),
        "collectives": count(found.total("collectives")),
        "GPU active": _active(found),
        "host outside ops": _outside(found),
        "profiler": _flags(first),
        "execution trace": _join(found),
        "PyTorch": ", ".join(sorted({r.torch_version for r in found.ranks if r.torch_version})) or "not named",
        "trace format": ", ".join(sorted({r.era for r in found.ranks if r.era})),
    }
    if not first.has_times:
        _without_times(facts, found)
    width = max(map(len, facts))
    for name, text in facts.items():
        report.line(f"{name:<{width}}  {text}", indent=width + 2)
    if len(found.ranks) > 1:
        report.table(
            "By rank (host outside ops: share of the steps, on their thread)",
            [Column("rank"), Column("steps"), Column("step ms,\nprofiled"), Column("window ms"), Column("operations"),
             Column("kernels"), Column("collectives"), Column("GPU active\nms"), Column("host outside\nops")],
            ([str(r.rank), count(r.steps), "–" if r.step_ns is None else milliseconds(r.step_ns),
              milliseconds(r.window_ns), count(r.ops), count(r.kernels),
              count(r.collectives), "–" if r.gpu_active_ns is None else milliseconds(r.gpu_active_ns),
              percent(r.host_outside_ops_share)]
             for r in found.ranks))
    loss = found.loss()
    report.table(
        "Loss report (events)", [Column("what", name=True), Column("events")],
        [[text, count(getattr(loss, name))] for name, text in (
            ("events_read", "read"), ("orphan_kernels", "GPU work without a recorded launch"),
            ("leading_orphans", "  of these, before their stream's first launched work"),
            ("launches_without_kernels", "launches whose GPU work was not recorded"),
            ("clamped_children", "host events cut to the one around them"),
            ("dropped_events", "dropped: no usable times, or broken beyond repair"),
            ("repaired_events", "repaired: invalid JSON"))]
        + [[text, count(getattr(loss, name))] for name, text in (
            ("shifted_kernels", "GPU work moved with its device's clock"),
            ("early_kernels", "GPU work before its launch, by a clock that is not steady"),
            ("placed_kernels", "GPU work with an impossible start, placed after its launch"),
            ("cut_kernels", "GPU work with an impossible duration, cut"),
            ("unreadable_device_events", "of a device, of a kind that cannot be read"),
            ("unreadable_device_calls", "calls of an accelerator, whose work cannot be read"),
            ("other_process_events", "of other processes in the same file"),
            ("lossy_steps", "steps that lost device work"),
            ("empty_steps", "steps left out: almost no work"),
            ("unlike_repeats", "repeats too unlike to be steps")) if getattr(loss, name)]
        + ([["bytes of an unfinished tail thrown away", count(loss.truncated_bytes)]] if loss.truncated_bytes else []))
    report.notes([*loss.notes, *found.notes])


def _without_times(facts: dict[str, str], found: inspection.Inspection) -> None:
    """Add the facts about a step traced by shapes: that it has no times, and its memory."""
    for name in ("recorded step", "launches", "kernels", "GPU active", "host outside ops", "profiler",
                 "execution trace"):
        facts.pop(name)
    facts["times"] = "none: a step that never ran, traced by shapes alone"
    worst = max(found.ranks, key=lambda rank: rank.memory.get("peak", 0))
    facts.update(zip(("memory", ""), inspection.memory_lines(worst.memory), strict=False))
    used = ", ".join(f"{name} {count(number)}" for name, number in worst.substitutions.items())
    facts["substitutions"] = used or "none"


def _ranks(found: inspection.Inspection, known: int) -> str:
    if not found.classes:
        return f"{len(found.ranks)} recorded of {known}"
    traced = [each for each in found.classes if each.graph >= 0]
    ranks = sum(map(len, traced))
    classes = "1 class" if len(traced) == 1 else f"{len(traced)} classes, each counted once below"
    shown = "; ".join(map(str, traced[:_SHOWN_CLASSES])) + ("; …" if len(traced) > _SHOWN_CLASSES else "")

    shown += ", assumed" if any(note.startswith(job.ASSUMED) for note in found.notes) else ""
    return f"{count(ranks)}{'' if ranks == known else f' of {count(known)}'} ranks in {classes}: {shown}"


def _steps(found: inspection.Inspection) -> str:
    if not found.steps:
        return "none found: the window counts as a whole"
    sources = {r.step_source.replace("_", " ") + (f" {r.step_region}" if r.step_region else "")
               for r in found.ranks if r.step_source}
    return f"{count(found.steps)} (from: {', '.join(sorted(sources))})"


def _active(found: inspection.Inspection) -> str:
    """Return the GPU active time per step, or of a window without steps."""
    if found.gpu_active_ns is None:
        return "no GPU work recorded"
    of = "the window" if found.recorded is None else "the step"
    whole = max(rank.window_ns for rank in found.ranks) if found.recorded is None else found.recorded.step_ns
    return f"{milliseconds(found.gpu_active_ns)} ms ({percent(found.gpu_active_ns / max(whole, 1))} of {of})"


def _kernels(found: inspection.Inspection) -> str:
    kinds: dict[str, int] = {}
    for rank in found.ranks:
        for kind, number in rank.kernels_by_kind.items():
            kinds[kind] = kinds.get(kind, 0) + number
    parts = ", ".join(f"{count(number)} {kind}" for kind, number in kinds.items() if number)
    return f"{count(found.total('kernels'))}{f' ({parts})' if parts else ''}"


def _outside(found: inspection.Inspection) -> str:
    if found.host_outside_ops_share is None:
        return "unknown (no steps)"
    kinds: dict[str, int] = {}
    for rank in found.ranks:
        for kind, ns in rank.gaps_ns.items():
            kinds[kind] = kinds.get(kind, 0) + ns
    total = sum(kinds.values())
    parts = [f"{percent(ns / total, 0)} {_GAPS.get(kind, kind.replace('_', ' '))}" for kind, ns in kinds.items()
             if total]
    why = f" ({', '.join(parts)})" if parts else ""
    return f"{percent(found.host_outside_ops_share)} of the steps on their thread{why}"


def _flags(rank: inspection.RankInspection) -> str:
    on = [name for name, value in rank.profiler_flags.items() if value]
    off = [name for name, value in rank.profiler_flags.items() if not value]
    parts = ([", ".join(on)] if on else []) + ([f"without {', '.join(off)}"] if off else [])
    return "; ".join(parts) or "options not recorded"


def _join(found: inspection.Inspection) -> str:
    schemas = sorted({r.et_schema for r in found.ranks if r.et_schema})
    if not schemas:
        return "none"
    joined, candidates = found.total("et_joined"), found.total("et_candidates")
    share = percent(joined / candidates, 2) if candidates else "nothing in common"
    return f"schema {', '.join(schemas)}, {count(joined)} of {count(candidates)} events joined ({share})"
