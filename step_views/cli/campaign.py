"""``foretrace campaign``: run a plan of captures and micro-benchmarks, list the plans, show what a directory has."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from graph_predictor.figures import count, milliseconds, percent
from step_views.cli.console import Column, Report, print_json
from step_views.cli.options import Json, in_one_sentence, shared
from step_views.cli.running import tell
from tracer import campaign as tracer_campaign
from tracer.campaign import runner
from tracer.lazy import msgspec

campaign = typer.Typer(no_args_is_help=True, rich_markup_mode=None,
                       help="Record a plan of workloads and micro-benchmarks within a time box.")

_SHOWN_FAILURES = 12  # chosen: about one screen


@campaign.command("run")
@in_one_sentence
def run_plan(
    plan: Annotated[str, typer.Argument(metavar="PLAN", help="A plan of the package by name, or a TOML file.")],
    out: Annotated[str, shared("--out", "a directory", short="-o")],
    minutes: Annotated[float, shared("--minutes", "nothing is started that would end after it")] = 9.0,
    resume: Annotated[bool, shared("--resume")] = False,
    part: Annotated[int | None, typer.Option(metavar="N", help="Only this part of the plan, from 1.")] = None,
    max_mb: Annotated[float, typer.Option(metavar="MB", help="Most megabytes of DIR.")] = 30.0,
    rehearse: Annotated[bool, typer.Option(
        "--rehearse", help="Tiny sizes on the CPU; the items, their order and all else stay.")] = False,
) -> None:
    """Run a plan, the most useful items first. May be killed at any moment, and resumed.

    Full graphs are kept until they have used their share of the megabytes; of later items a table of operations and
    kernels is kept instead.
    """
    options = tracer_campaign.RunOptions(minutes=minutes, max_mb=max_mb, part=part, resume=resume,
                                         rehearse=rehearse, say=tell)
    outcome = tracer_campaign.run(tracer_campaign.read_plan(plan), out, options)
    _report_run(outcome, tracer_campaign.Results.read(out), out)


@campaign.command("list")
@in_one_sentence
def list_plans(json: Json = False) -> None:
    """List the plans that come with foretrace, with their parts."""
    found: list[dict[str, Any]] = []
    for name in tracer_campaign.packaged_plans():
        plan = tracer_campaign.read_plan(name)
        for number, items in enumerate(tracer_campaign.parts(tracer_campaign.expand(plan), plan.parts), start=1):
            found.append({
                "plan": name, "description": plan.description, "device": plan.device, "part": number,
                "parts": plan.parts, "items": len(items),
                "captures": sum(item.kind == "workload" for item in items),
                "held_out": sum(item.split == "held-out" for item in items),
                "expected_minutes": round(sum(item.seconds for item in items) / 60, 2)})
    if json:
        print_json(found)
        return
    report = Report()
    report.table("Plans", [Column("plan", name=True), Column("device", name=True), Column("part"),
                           Column("captures"), Column("micro-\nbenchmarks"), Column("held out"),
                           Column("expected\nminutes")],
                 ([row["plan"], row["device"], f"{row['part']} of {row['parts']}", count(row["captures"]),
                   count(row["items"] - row["captures"]), count(row["held_out"]),
                   f"{row['expected_minutes']:.1f}"] for row in found))
    report.line()
    for name, description in dict.fromkeys((row["plan"], row["description"]) for row in found):
        report.line(f"{name}: {description}", indent=2)


@campaign.command("status")
@in_one_sentence
def show_status(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="The directory given to --out.")],
    json: Json = False,
) -> None:
    """Show what a campaign's directory holds."""
    results = tracer_campaign.Results.read(directory)
    if json:
        print_json({"index": msgspec.to_builtins(results.index),
                    "items": [msgspec.to_builtins(line) for line in results.lines.values()]})
        return
    report = Report()
    _report_results(report, results)
    _report_captures(report, [line for line in results.lines.values() if line.kind == "workload"])
    _report_failures(report, list(results.lines.values()))


def _report_run(outcome: tracer_campaign.CampaignOutcome, results: tracer_campaign.Results, out: str) -> None:
    report = Report()
    _report_results(report, results)
    _report_failures(report, outcome.results)
    report.line()
    worked = sum(result.status == "ok" for result in outcome.results)
    report.line(f"This run: {count(worked)} of {count(len(outcome.results))} items worked, in "
                f"{outcome.seconds / 60:.1f} minutes; {count(outcome.done_before)} of {count(outcome.planned)} were "
                "there before.")
    if outcome.left:
        report.line(f"{count(outcome.left)} items are left, because {outcome.stopped} Go on with --resume.")
    report.line(f"Results in {os.path.join(out, '')}")


def _report_results(report: Report, results: tracer_campaign.Results) -> None:
    index = results.index
    title = f"Campaign {index.plan}" + (" (rehearsal: tiny sizes on the CPU)" if index.rehearsal else "")
    report.table(title, [Column("kind", name=True), Column("name", name=True), Column("ok"), Column("fit"),
                         Column("held out"), Column("unsupported"), Column("failed")],
                 (["capture" if kind == "workload" else "micro", name,
                   *(count(counter[key]) for key in ("ok", "fit", "held-out", "unsupported", "failed"))]
                  for (kind, name), counter in sorted(runner.count_by(list(results.lines.values())).items(),
                                                      reverse=True)))
    report.line()
    devices = dict.fromkeys(_device(session) for session in index.sessions)
    contents = [line.content for line in results.lines.values() if line.kind == "workload" and line.status == "ok"]
    report.line(f"{count(index.items)} items, {index.bytes / 1e6:.1f} MB, on {'; '.join(devices) or 'nothing yet'}")
    if contents:
        report.line(f"Captures kept: {contents.count('graph')} as full graphs, {contents.count('summary')} as "
                    f"operation and kernel tables, {contents.count('times')} as times only")


def _device(session: dict[str, Any]) -> str:
    hardware = session.get("hardware") or {}
    name = hardware.get("device", "an unknown device")
    return f"{hardware.get('cpu', 'CPU')}" if name == "CPU" else str(name)


def _report_captures(report: Report, lines: list[tracer_campaign.ItemResult]) -> None:
    report.table(
        "Captures (step without the profiler: median and interquartile range over it; slow-down under the profiler)",
        [Column("file", name=True, path=True), Column("split", name=True), Column("step ms"), Column("spread"),
         Column("slow-\ndown"), Column("seconds")],
        ([line.file or f"{line.name}-{line.id}", line.split, milliseconds(line.median_ns or 0), percent(line.spread),
          f"{line.profiler_slowdown:.2f}" if line.profiler_slowdown else "–", f"{line.seconds:.1f}"]
         for line in lines if line.status == "ok"))


def _report_failures(report: Report, lines: list[tracer_campaign.ItemResult]) -> None:
    # Equal reasons are listed once, with their number.
    reasons: dict[tuple[str, str, str], int] = {}
    for line in lines:
        if line.status != "ok":
            key = (line.status, line.name, line.reason)
            reasons[key] = reasons.get(key, 0) + 1
    if not reasons:
        return
    report.line()
    for (status, name, reason), times in list(reasons.items())[:_SHOWN_FAILURES]:
        report.line(f"{status}: {name}{f' (× {times})' if times > 1 else ''}: {reason}", indent=2)
    if len(reasons) > _SHOWN_FAILURES:
        report.line(f"… and {len(reasons) - _SHOWN_FAILURES} other reasons (items.jsonl has them)")
