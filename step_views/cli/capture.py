"""``foretrace capture`` and ``foretrace workloads``: record an unmodified script, or a workload of the suite."""

from __future__ import annotations

import os
import statistics
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from step_views.cli.console import Column, Report, print_json
from step_views.cli.options import Debug, Json, in_one_sentence, shared
from step_views.cli.running import FAILED, INTERRUPTED, TERMINATED, one_sentence, tell
from tracer import capture_layout, user_code
from tracer import workloads as tracer_workloads
from tracer.capture import interruption, session
from tracer.capture import options as capture_options
from tracer.capture import script as capture_script
from tracer.errors import CaptureError, ForetraceError
from tracer.lazy import rich_console, rich_progress
from tracer.parallel_plan import ParallelPlan

_AS_MODULE = ("-m", "--module")


class CaptureCommand(TyperCommand):
    """The class of the command ``capture``. It recognises options that probably belong to the script."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments. An unknown option after a script is probably the script's own, which must follow ``--``."""
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            script = next((text for before, text in zip(["", *given], given, strict=False)
                           if text.endswith(user_code.SUFFIXES) or before in _AS_MODULE), None)
            # The class is found by its name, because its module depends on typer's version.
            if type(error).__name__ != "NoSuchOption" or script is None:
                raise
            option = getattr(error, "option_name", "an option")
            with one_sentence(False):
                raise CaptureError(f"foretrace capture has no option {option}; if it is one of {script}, put -- before "
                                   f"the script's arguments: {script} -- {option} …") from None
            raise


def capture(
    out: Annotated[str, shared(
        "--out", "the job's directory; each rank writes its part", short="-o")],
    script: Annotated[str | None, typer.Argument(
        metavar="SCRIPT.py", help="The script or notebook; its own arguments follow after --.")] = None,
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Arguments of the script.")] = None,
    module: Annotated[bool, typer.Option(
        *_AS_MODULE, help="SCRIPT.py is the name of a module, such as package.train, run as python -m does.")] = False,
    workload: Annotated[str | None, shared("--workload", "instead of a script")] = None,
    assignments: Annotated[list[str] | None, shared("--set")] = None,
    preset: Annotated[str, shared("--preset")] = "default",
    steps: Annotated[int, typer.Option(help="Profiled steps of each cycle.")] = 3,
    warmup: Annotated[int, typer.Option(help="Steps before anything is measured.")] = 3,
    timed: Annotated[int, typer.Option(help="Steps timed without the profiler.")] = 10,
    cycles: Annotated[int, typer.Option(help="Windows of profiled steps.")] = 1,
    execution_trace: Annotated[str, typer.Option(
        metavar="apart|all|none", help="Where the execution trace is recorded: in a step of its own, in every window "
                                       "(which slows it down), or nowhere.")] = "apart",
    form: Annotated[str, typer.Option(
        metavar="json|foretrace", help="The profiler's own files, or the one-file form.")] = "json",
    stacks: Annotated[bool, typer.Option(
        "--stacks", help="Record Python stacks too: the module of each operation, and a much slower host.")] = False,
    lookups: Annotated[bool, typer.Option(
        "--lookups", help="Count how often rows of embedding tables are looked up, in one step that is thrown away.")
    ] = False,
    python_calls: Annotated[bool, typer.Option(
        "--python-calls", help="Count the calls of Python functions between operations, in the same step.")] = False,
    profile_memory: Annotated[bool, typer.Option(
        "--profile-memory", help="Record every change of the devices' memory too, for foretrace memory.")] = False,
    world_size: Annotated[int | None, shared(
        "--world-size", "a fake world, of which this one process does what one rank would do")] = None,
    rank: Annotated[int, shared("--rank", "of the fake world")] = 0,
    parallel: Annotated[str | None, shared("--parallel", "of a workload; also ddp, fsdp2, tp or pp alone")] = None,
    optimizer: Annotated[int | None, typer.Option(
        metavar="INDEX", help="The optimizer of the script whose steps are counted: 0, which is the default, makes its "
                              "first step before all others.")] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace a capture that is in DIR.")] = False,
    run_on: Annotated[bool, typer.Option(
        "--continue", help="Let the script run to its end; without it, it ends once all is recorded.")] = False,
    debug: Debug = False,
) -> None:
    """Record a script's training steps, found by its optimizer, or those of a workload.

    First steps are timed with nothing watching, then profiled ones give the trace. Under torchrun:
    torchrun --nproc-per-node 2 --no-python foretrace capture --out DIR SCRIPT.py -- ARGS

    With --world-size nothing is sent: the collectives are recorded, and take no time.
    """
    with one_sentence(debug):
        world = capture_options.world_of(world_size, rank)
        options = capture_options.CaptureOptions(
            steps, warmup, timed, cycles, execution_trace, form, stacks, replace,  # type: ignore[arg-type]
            lookups, python_calls, profile_memory)
        if script == _AS_MODULE[0] and arguments:  # after --
            module, (script, *arguments) = True, arguments
        if script is None and workload is None:
            raise CaptureError("Name what to capture: a script, or a workload with --workload.")
        if script is not None and workload is not None:
            raise CaptureError(f"Both the script {script} and the workload {workload} are named, and only one of them "
                               "can be captured: leave out the script or --workload (settings of a workload are given "
                               "with --set).")
        if workload is None and assignments:
            raise CaptureError("--set belongs to --workload; give a script's arguments after --.")
        if workload is None and parallel is not None:
            raise CaptureError("--parallel belongs to --workload; a script spreads its model itself.")
        if workload is not None and optimizer is not None:
            raise CaptureError("--optimizer belongs to a script: a workload says itself what its steps are.")
        if workload is not None:
            done = _workload(workload, assignments or [], preset, out, options, parallel, world)
        else:
            code = user_code.find_main(str(script), as_module=module)
            if code is None:
                raise CaptureError(capture_script.not_there(str(script), module))
            done = _script(code, arguments or [], out, options, run_on, debug, world, optimizer or 0)
        _report(done, out)


def _workload(name: str, assignments: list[str], preset: str, out: str, options: capture_options.CaptureOptions,
              parallel: str | None, world: tuple[int, int] | None) -> session.Capture:

    settings = tracer_workloads.parse(name, assignments, preset=preset)
    begun = session.Capture(out, options)
    with _progress(begun), _interruption_told(f"the workload {name}", begun):
        if parallel is None and world is None:
            return capture_script.run_workload(settings, begun)
        if parallel is None:
            raise CaptureError("Say how the workload is spread over the ranks: --parallel ddp, fsdp2, tp, pp, or sizes "
                               "such as fsdp2=8,tp=8.")
        plan = ParallelPlan.parse(parallel, world[0] if world else _launched_ranks())
        return capture_script.run_workload(settings, begun, plan, world)


def _launched_ranks() -> int:
    text = os.environ.get("WORLD_SIZE", "")
    if not text.isdecimal() or "RANK" not in os.environ:
        raise CaptureError("A parallel plan needs several ranks: give --world-size for a fake world, or start real "
                           "ranks with torchrun.")
    return int(text)


def _script(code: user_code.UserCode, arguments: list[str], out: str, options: capture_options.CaptureOptions,
            run_on: bool, debug: bool, world: tuple[int, int] | None, optimizer: int) -> session.Capture:

    begun, path = session.Capture(out, options), code.name
    try:
        with _progress(begun), _interruption_told(path, begun):
            return capture_script.run_script(code, arguments, begun, afterwards="continue" if run_on else "stop",
                                             world=world, optimizer=optimizer)
    except (ForetraceError, typer.Exit):
        raise
    except SystemExit as error:
        advice = ""
        # As in Python: a number is the exit status; anything else is printed, with exit status 1.
        status = error.code if isinstance(error.code, int) else FAILED
        if not isinstance(error.code, int):
            tell(str(error.code))
        what = f"{path} ended itself with exit status {status}"
    except BaseException as error:
        # A failure of the script is shown in Python's format, without foretrace's frames.
        shown = error if debug else capture_script.without_our_frames(error, code.file)
        traceback.print_exception(type(shown), shown, shown.__traceback__)
        status, what = FAILED, f"{path} failed with {type(error).__name__}"
        named = code.module_wanted_by(error)
        advice = f" It imports from its own package: name it as the module it is, -m {named}." if named else ""
    tell(f"foretrace: {what}; {begun.kept}.{advice}")
    raise typer.Exit(status)


@contextmanager
def _interruption_told(what: str, begun: session.Capture) -> Iterator[None]:
    """After Ctrl-C or SIGTERM, print the capture's contents and exit with a shell's status."""
    try:
        yield
    except KeyboardInterrupt as error:

        ended = isinstance(error, interruption.Terminated)
        tell(f"foretrace: {what} was {'terminated' if ended else 'interrupted'}; {begun.kept}.")
        raise typer.Exit(TERMINATED if ended else INTERRUPTED) from None


@contextmanager
def _progress(begun: session.Capture) -> Iterator[None]:
    """Show on a terminal how many steps are done. It is drawn only between steps, outside their timed part."""
    if not sys.stderr.isatty() or os.environ.get("RANK", "0") != "0":
        yield
        return

    columns = (rich_progress.TextColumn("Capturing steps"), rich_progress.BarColumn(),
               rich_progress.MofNCompleteColumn())
    with rich_progress.Progress(*columns, console=rich_console.Console(stderr=True), auto_refresh=False, transient=True,
                                redirect_stdout=False, redirect_stderr=False) as bar:
        task = bar.add_task("steps", total=begun.options.total_steps)

        def show(done: int, needed: int) -> None:
            bar.update(task, completed=done, total=needed, refresh=True)

        begun.progress = show
        try:
            yield
        finally:
            begun.progress = None


def _report(done: session.Capture, out: str) -> None:
    number = len(done.profiled_step_ns)
    lines = [f"Recorded {number} step{'' if number == 1 else 's'} in "
             f"{os.path.join(out, done.part.name) if done.part else out}"]
    if done.unprofiled_step_ns:
        timed = done.unprofiled_step_ns
        times = sorted(capture_layout.step_times(done.part) if done.part else timed)
        waited = "" if sum(times) == sum(timed) else (
            f"; {statistics.median(timed) / 1e6:.3f} with what it waited for a processor")
        lines.append(f"Step without the profiler: {statistics.median(times) / 1e6:.3f} ms (median of {len(times)}, "
                     f"{times[0] / 1e6:.3f} to {times[-1] / 1e6:.3f}{waited})")
    if done.free_running and done.waited_for:
        lines.append(f"Running ahead of the device: {done.free_running.mean_ns / 1e6:.3f} ms (mean of "
                     f"{done.free_running.steps} steps without a wait between them)")
    if done.slowdown is not None:
        lines.append(f"Under the profiler it takes {done.slowdown:.2f} times as long")
    if done.options.lookups and not done.looked_up:
        lines.append("Note: --lookups found no look-up of an embedding table in the step; the capture is as without.")
    again = done.alternation
    if again is not None and done.options.steps < 2 * again[0]:
        lines.append(f"Note: Every {again[0]} timed steps one or more take {again[1]:.1f} times as long as the others: "
                     f"if the loop alternates, record two whole rounds (--steps {2 * again[0]} --timed "
                     f"{5 * again[0]}), and commands take the round for a step.")
    note = done.late_facts().get("optimizers", {}).get("note")
    if note:
        lines.append(f"Note: {note}")
    report = Report()
    for line in lines:
        report.line(line)


@in_one_sentence
def workloads(json: Json = False) -> None:
    """List the workloads for 'foretrace capture --workload', their settings and presets."""
    found = tracer_workloads.describe()
    if json:
        print_json([asdict(info) for info in found])
        return
    report = Report()
    shared = set.intersection(*({_described(setting) for setting in info.settings} for info in found))
    for info in found:
        report.line()
        report.line(f"{info.name}: {info.summary}", indent=2, style="bold")
        own = [f"{s.name}={_text(s.default)}" for s in info.settings if _described(s) not in shared]
        report.line(f"  {' '.join(own)}", indent=2)
        for preset, values in info.presets.items():
            if values:
                shown = " ".join(f"{name}={_text(value)}" for name, value in values.items())
                report.line(f"  preset {preset}: {shown}", indent=4)
    everywhere = [s for s in found[0].settings if _described(s) in shared]
    report.table("Settings of every workload", [Column("setting"), Column("default"), Column("meaning", name=True)],
                 ([s.name, _text(s.default), s.doc + (f": {', '.join(s.choices)}" if s.choices else "")]
                  for s in everywhere))
    report.line()
    report.line("Record one with: foretrace capture --workload llama --set batch=8 --out DIR (all settings with "
                "their types and meanings: --json)")


def _described(setting: tracer_workloads.Setting) -> tuple[str, str, str]:
    return setting.name, _text(setting.default), setting.doc


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
