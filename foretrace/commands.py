"""The command ``foretrace``: a table of all commands, each imported when it runs, and the function that starts them."""

from __future__ import annotations

from typing import Annotated

import typer

from step_views.cli.running import LazyCommand, lazy_group, run_program
from tracer.versions import installed_version

PLANS = frozenset({"plan", "serve", "price-layer", "shapes", "shard", "comm"})
"""Commands of ``planner``; the others are in ``step_views``."""
COMMANDS = {name: LazyCommand(f"{'planner' if name in PLANS else 'step_views'}.cli.{home}",
                              name.replace("-", "_"), group, sentence, own)
            for group, commands in {
    "See what was recorded": (
        ("inspect", "inspect", "Show what traces hold and what they lack.", None),
        ("breakdown", "breakdown", "Show where the time of the steps goes.", None),
        ("replay", "replay", "Replay the steps and compare with what was measured.", None),
        ("report", "report",
         "Write one HTML page of a recording: overview, timeline, operations, roofline, memory, ranks, what-ifs.",
         None),
        ("diff", "diff", "Show what makes B's step take longer, or shorter, than A's.", None),
        ("ranks", "ranks",
         "Compare the ranks of a job: waiting, stragglers, bubbles, and the path across them.", None),
        ("survey", "survey", "Survey the recordings of many jobs into one table, and show what it says of them.", None),
        ("overheads", "overheads", "Show what the host costs each step, by kind (T1 to T5), without waiting.", None),
    ),
    "Predict what was not": (
        ("predict", "predict", "Predict the step time of a configuration that was never run.", None),
        ("opportunities", "opportunities", "List the changes of a step that would save most.", None),
        ("sweep", "sweep", "Predict every combination of sizes, devices, ranks and edits, in parallel.", None),
        ("price", "price", "Price one operation on a device, from fitted models or its data sheet alone.", None),
    ),
    "Look at memory": (
        ("memory", "memory", "Show what memory held at its fullest: by kind, by module, measured next to predicted.",
         None),
        ("fit-batch", "memory", "Find the largest batch (or other size) that fits a device's memory.", None),
    ),
    "Plan a cluster": (
        ("plan", "plan",
         "Find the best parallel plan of all that Megatron-Core, torchtitan or FSDP have: data, tensor, "
         "sequence, pipeline, context and expert parallelism, schedules, micro-batches, recomputation and "
         "sharding.", None),
        ("serve", "serve",
         "Predict a decoder's serving: time of a prompt and of a decoding step, memory, and the largest batch. With "
         "--rate or --concurrency also the time to the first token, time between tokens, and throughput.", None),
        ("price-layer", "price_layer",
         "Price each operation of a decoder's layer on several devices: its time, its share of the layer, its "
         "operations a byte, and whether arithmetic or memory bounds it.", None),
        ("shapes", "shapes",
         "Find sizes of a model that cost more GPU time than their neighbours, with reason and gain of each change at "
         "equal parameters. It tries heads, widths, vocabulary, micro-batch and tensor parallelism.", None),
        ("shard", "shard",
         "Find the fastest sharding of embedding tables: by tables, columns, rows, rows within a node, or "
         "copies.", None),
        ("comm", "comm", "Collectives and networks: predict, study, fit, measure, tune, report.", None),
    ),
    "Gate changes": (
        ("validate", "check",
         "Capture a program once, predict it at other sizes, then run those and compare.", None),
        ("check", "check",
         "Compare captures with their baseline; exit code 1 if something got worse, 3 if noise hides whether "
         "it did.", None),
    ),
    "Record, and prepare": (
        ("capture", "capture",
         "Record a script's training steps, found by its optimizer, or those of a workload.", "CaptureCommand"),
        ("trace", "trace", "Trace a training step by shapes alone: no GPU, no time, no memory.", None),
        ("convert", "export", "Convert traces to one file, which every command reads.", None),
        ("export", "export", "Export a job for Perfetto, Chakra, TensorBoard, or as tables.", None),
        ("campaign", "campaign", "Record a plan of workloads and micro-benchmarks within a time box.", None),
        ("workloads", "capture",
         "List the workloads for 'foretrace capture --workload', their settings and presets.", None),
        ("doctor", "doctor",
         "Look at this machine: GPU, driver, CUPTI rights, PyTorch, clocks, caches, disk; what is missing, "
         "what to do.", None),
    ),
    "Model devices and networks": (
        ("calibrate", "calibrate",
         "Calibrate a device: micro-benchmarks of its kernels, most of the families that are least known, and "
         "models fitted to them.", None),
        ("fit", "fit", "Fit a device profile to measured kernels, to whole steps, or to both.", None),
        ("models", "fit", "List fitted device profiles, and judge them by measured kernels.", None),
        ("devices", "devices", "List the devices that are known, or show one with the source of each figure.", None),
        ("topologies", "devices",
         "List the nodes and networks that are known, or show a cluster with the source of each figure.", None),
    ),
}.items() for name, home, sentence, own in commands}
"""Commands by name: heading and module, the first sentence of the help, and sometimes a special class."""

app = typer.Typer(
    name="foretrace", cls=lazy_group(COMMANDS), no_args_is_help=True, pretty_exceptions_enable=False,
    rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]},
    help="Read recorded PyTorch steps, see where their time goes, and replay them. PATH is a profiler trace, a file "
         "of 'foretrace convert', a directory or glob of a job's ranks, or a URL of these.",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"foretrace {installed_version('foretrace') or 'unknown (not installed)'}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option(
        "--version", callback=_version, is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    """Options before the command."""


def main() -> None:
    """Run the command line. The process ends with 0, or with 2 for bad input (see ``running.one_sentence``)."""
    run_program(app)


__all__ = ["COMMANDS", "app", "main"]
