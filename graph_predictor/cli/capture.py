"""``foretrace capture``: record the training steps of an unmodified script, or of a workload of the suite."""

from __future__ import annotations

import sys
import traceback
from typing import TYPE_CHECKING, Annotated

import typer

from graph_predictor.cli.errors import FAILED, one_sentence
from graph_predictor.cli.options import Debug
from tracer.errors import CaptureError, ForetraceError

if TYPE_CHECKING:
    from tracer.capture.options import CaptureOptions
    from tracer.capture.session import Capture


def capture(
    out: Annotated[str, typer.Option(metavar="DIR", help="Directory of the job; each rank writes its part.")],
    script: Annotated[str | None, typer.Argument(
        metavar="SCRIPT.py", help="The script; its own arguments follow after --.")] = None,
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Arguments of the script.")] = None,
    workload: Annotated[str | None, typer.Option(metavar="NAME", help="A workload of the suite, not a script.")] = None,
    assignments: Annotated[list[str] | None, typer.Option(
        "--set", metavar="KEY=VALUE", help="A setting of the workload (repeatable).")] = None,
    preset: Annotated[str, typer.Option(metavar="NAME", help="The workload's preset.")] = "default",
    steps: Annotated[int, typer.Option(help="Profiled steps of each cycle.")] = 3,
    warmup: Annotated[int, typer.Option(help="Steps before anything is measured.")] = 3,
    timed: Annotated[int, typer.Option(help="Steps timed without the profiler.")] = 10,
    cycles: Annotated[int, typer.Option(help="Windows of profiled steps.")] = 1,
    execution_trace: Annotated[str, typer.Option(
        metavar="all|last|none", help="Windows that get an execution trace too.")] = "all",
    form: Annotated[str, typer.Option(
        metavar="json|foretrace", help="The profiler's own files, or the one-file form.")] = "json",
    replace: Annotated[bool, typer.Option("--replace", help="Replace a complete capture in DIR.")] = False,
    run_on: Annotated[bool, typer.Option(
        "--continue", help="Let the script run to its end; without it, it ends once all is recorded.")] = False,
    debug: Debug = False,
) -> None:
    """Record a script's training steps, found by its optimizer, or those of a workload.

    First steps are timed with nothing watching, then profiled ones give the trace. Under torchrun:
    torchrun --nproc-per-node 2 --no-python foretrace capture --out DIR SCRIPT.py -- ARGS
    """
    with one_sentence(debug):
        from tracer.capture import CaptureOptions

        options = CaptureOptions(steps, warmup, timed, cycles, execution_trace, form, False, replace)  # type: ignore[arg-type]
        if (script is None) == (workload is None):
            raise CaptureError("Name what to capture: a script, or a workload with --workload.")
        if workload is None and assignments:
            raise CaptureError("--set belongs to --workload; give a script's arguments after --.")
        if workload is not None:
            done = _workload(workload, assignments or [], preset, out, options)
        else:
            done = _script(str(script), arguments or [], out, options, run_on)
        _report(done)


def _workload(name: str, assignments: list[str], preset: str, out: str, options: CaptureOptions) -> Capture:
    from tracer import workloads
    from tracer.capture.script import run_workload

    return run_workload(workloads.parse(name, assignments, preset=preset), out, options)


def _script(path: str, arguments: list[str], out: str, options: CaptureOptions, run_on: bool) -> Capture:
    from tracer.capture.script import ScriptOptions, run_script

    try:
        return run_script(path, arguments, ScriptOptions(out, options, "continue" if run_on else "stop"))
    except (ForetraceError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException:
        # The script's own failure is shown as Python would, not as one of foretrace.
        traceback.print_exc()
        typer.echo(f"foretrace: {path} failed; if steps were recorded until then, they are in {out}.", err=True)
        raise typer.Exit(FAILED) from None


def _report(done: Capture) -> None:
    import statistics

    lines = [f"Recorded {len(done.profiled_step_ns)} steps in {done.part}"]
    if done.unprofiled_step_ns:
        times = sorted(done.unprofiled_step_ns)
        lines.append(f"Step without the profiler: {statistics.median(times) / 1e6:.3f} ms (median of {len(times)}, "
                     f"{times[0] / 1e6:.3f} to {times[-1] / 1e6:.3f})")
    if done.slowdown is not None:
        lines.append(f"Under the profiler it takes {done.slowdown:.2f} times as long")
    sys.stdout.write("\n".join(lines) + "\n")
