"""Arguments and options that several commands share: one name, one meaning, one kind of value.

The options for edits are made from ``edits.registry``: a new edit gets its option without a change here."""

from __future__ import annotations

import inspect
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Annotated, Any, NamedTuple

import typer

from graph_predictor.edits.registry import FACTOR, NOTHING, ON_OFF, OPTIONS, EditOption, Value
from kernel_models import device
from kernel_models import profile as kernel_models_profile
from kernel_models.collectives import topology
from step_views.cli.console import working
from step_views.cli.running import one_sentence
from step_views.pages import page, parts
from step_views.pages import page as provenance
from tracer import guard, workloads
from tracer.errors import ForetraceError
from tracer.parallel_plan import PlanError
from tracer.shape_only import devices


class SharedOption(NamedTuple):
    """An option of several commands: the name of its value, and the beginning of its help, which is the same in all."""
    value: str
    stem: str


SHARED = {
    "--out": SharedOption("PATH", "Where the result is written"),
    "--device": SharedOption("DEVICE", "Device, by name or a FILE.toml of one's own (foretrace devices)"),
    "--from-device": SharedOption("DEVICE", "The device it was recorded on, where the trace does not say"),
    "--topology": SharedOption(
        "CLUSTER",
        "Cluster NODE[xN][@NET], such as dgx-h200x8, NODE also a FILE.toml of one's own (foretrace topologies)",
    ),
    "--from-topology": SharedOption("CLUSTER", "The cluster of the recording; by default its device's usual nodes"),
    "--profile": SharedOption("FILE", "Fitted models of the device (foretrace fit)"),
    "--comm-profile": SharedOption("FILE", "Measured collectives of the cluster (foretrace comm fit)"),
    "--comm-backend": SharedOption("NAME", "Collectives of this backend, such as gloo"),
    "--comm-choices": SharedOption(
        "FILE|auto", "Each collective by the best of several backends: those of a FILE (foretrace comm backends), or "
                     "auto, those of --comm-profile, without it NCCL's algorithms by formula"),
    "--host": SharedOption("FACTOR", "Host time × FACTOR"),
    "--host-from": SharedOption("PATH", "A capture whose host it is; of a step that never ran also several "
                                        "captures, separated by commas, or a host alone: cpu-steps, cpu-plans, "
                                        "gpu-steps or a file of foretrace calibrate --host"),
    "--dtype": SharedOption("TYPE", "Element type, such as bf16"),
    "--indices": SharedOption(
        "FILE|zipf:S", "Indices that embedding tables are looked up by: Parquet, CSV, dlrm_datasets, or a Zipf law"),
    "--parallel": SharedOption("PLAN", "Parallel plan, such as ddp=8 or fsdp2=8,tp=2"),
    "--straggler": SharedOption("RANK:PERCENT%", "One rank slower, such as 3:10%"),
    "--set": SharedOption("NAME=VALUE", "Another size or setting of the program, such as batch=64 (repeatable)"),
    "--code": SharedOption(
        "SCRIPT.py:FUNCTION", "The program, which is traced again at each size: a function, or a script with its "
                              "arguments, as in 'train.py --batch {batch}'"),
    "--selected": SharedOption(
        "SHARE", "Share of their elements that masks made of data select, and of their range that clamped numbers "
                 "fill, where a program is traced"),
    "--also": SharedOption("PATH[:NAME=SIZE,…]", "A capture of the same program at another size (repeatable)"),
    "--step": SharedOption("STEP", "One recorded step: its name, or its number from 0 (-1: the last)"),
    "--step-region": SharedOption(
        "NAME", "The steps are the regions of this name, marked with record_function in the program; * matches any "
                "text, as in 'iteration *'"),
    "--cycle": SharedOption(
        "N", "Recorded steps that are one, where the loop alternates (a rollout at every fourth update)"),
    "--top": SharedOption("N", "Rows of each table"),
    "--price": SharedOption("PER_HOUR", "Price of one device and hour"),
    "--memory-limit": SharedOption("SIZE", "Memory of a device, such as 80GiB"),
    "--timeline": SharedOption("OUT.json[.gz]", "Write a timeline, for ui.perfetto.dev"),
    "--html": SharedOption("FILE", "Also write a page to look at: one HTML file that needs no network"),
    "--workload": SharedOption("NAME", "A workload of the suite (foretrace workloads)"),
    "--preset": SharedOption("NAME", "The workload's preset"),
    "--global-batch": SharedOption("N", "Sequences of a step"),
    "--world-size": SharedOption("N", "Ranks of the job"),
    "--rank": SharedOption("N", "One rank of the job"),
    "--ranks": SharedOption("N", "Number of ranks"),
    "--minutes": SharedOption("MINUTES", "Time box"),
    "--resume": SharedOption("", "Go on with what an earlier run left"),
    "--backend": SharedOption("NAME", "Backend of the collectives, such as nccl or gloo"),
    "--seed": SharedOption("N", "Seed of what is drawn"),
    "--batch": SharedOption("N", "Batch"),
    "--gpus": SharedOption("N", "GPUs of the job"),
    "--calibrate": SharedOption("TABLE", "Measured runs to calibrate on (Parquet, CSV)"),
    "--collective": SharedOption("NAME", "Which collective"),
}


def complete_device(incomplete: str) -> list[str]:
    """Return the names of devices that begin with this text, for a shell's completion."""
    return [name for name in devices.device_names() if name.startswith(incomplete)]


def complete_cluster(incomplete: str) -> list[str]:
    """Return the names of nodes that begin with this text, for a shell's completion."""
    return [name for name in topology.node_names() if name.startswith(incomplete)]


def complete_workload(incomplete: str) -> list[str]:
    """Return the names of the suite's workloads that begin with this text, for a shell's completion."""
    return [name for name in workloads.names() if name.startswith(incomplete)]


_COMPLETED = {"--device": complete_device, "--from-device": complete_device, "--topology": complete_cluster,
              "--from-topology": complete_cluster, "--workload": complete_workload}


def shared(name: str, more: str = "", *, short: str = "", least: float | None = None) -> Any:
    """Declare one of the shared options. ``more`` is the end of its help, for one command."""
    value, stem = SHARED[name]
    return typer.Option(*([short] if short else []), name, metavar=value or None, min=least, help=_help(stem, more),
                        autocompletion=_COMPLETED.get(name))


def axis(name: str, more: str = "") -> Any:
    """Declare a shared option with several values to be tried, separated by commas."""
    value, stem = SHARED[name]
    return typer.Option(name, metavar=f"{value},…", help=_help(f"{stem}; several", more))


def _help(stem: str, more: str) -> str:
    return f"{stem}: {more}." if more else f"{stem}."


Paths = Annotated[list[str], typer.Argument(
    metavar="PATH", help="Traces or converted files, a directory or glob of a job's ranks, or URLs.")]
Window = Annotated[int, typer.Option(
    min=0, metavar="N", help="Which window of a capture with several cycles, from 0.")]
StepRegion = Annotated[str | None, shared("--step-region")]
Cycle = Annotated[int | None, shared("--cycle", "by default as many as its work repeats after; 1: each by itself",
                                     least=1)]
Workers = Annotated[str, typer.Option(
    metavar="local|dask|ray", help="Where the work is done: in this process, by new Dask or Ray processes of this "
                                   "machine, or by a running cluster: dask:ADDRESS, ray:ADDRESS.")]
Step = Annotated[str | None, shared("--step")]
Top = Annotated[int | None, shared("--top", "by default as many as are quickly read, and all with --json", least=1)]
Profiled = Annotated[bool, typer.Option(
    "--profiled", help="The step under the profiler, as it was recorded; by default it is the step without the "
                       "profiler, where the capture says what that takes.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, to stdout.")]
Debug = Annotated[bool, typer.Option(
    "--debug", envvar="FORETRACE_DEBUG", show_envvar=False, help="Print the traceback of an error.")]


Command = Callable[..., None]


def in_one_sentence(command: Command) -> Command:
    """Add ``--debug`` to a command, and print each of its errors as one sentence (``running.one_sentence``)."""
    @wraps(command)
    def run(*arguments: Any, debug: bool = False, typer_context: typer.Context | None = None, **options: Any) -> None:
        with one_sentence(debug, typer_context):
            command(*arguments, **options)

    own = list(inspect.signature(command, eval_str=True).parameters.values())
    rest = [one for one in own if one.kind is inspect.Parameter.VAR_KEYWORD]
    return _declared(run, [*own[:len(own) - len(rest)], inspect.Parameter(
        "debug", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=False, annotation=Debug), inspect.Parameter(
            "typer_context", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=typer.Context), *rest])


def _declared(command: Command, parameters: list[inspect.Parameter]) -> Command:
    """Declare a command's parameters for typer."""
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in parameters} | {"return": None}
    return command


def with_edits(command: Command) -> Command:
    """Add an option for each edit to a command, which receives their values as ``**edits``."""
    return _with(command, [(option, *_one(option)) for option in OPTIONS])


def with_some_edits(*names: str) -> Callable[[Command], Command]:
    """Return a decorator that adds the options of these edits to a command, which receives them as ``**edits``."""
    return lambda command: _with(command, [(option, *_one(option)) for option in OPTIONS if option.name in names])


def with_edits_but(*names: str) -> Callable[[Command], Command]:
    """Return a decorator that adds the options of all other edits to a command, which receives them as ``**edits``."""
    return lambda command: _with(command, [(option, *_one(option)) for option in OPTIONS if option.name not in names])


def with_axes(command: Command) -> Command:
    """Add an option for several values of each edit that has a value; the command receives the texts as ``**edits``."""
    return _with(command, [(option, str | None, None, typer.Option(
        f"--{option.name}", metavar=f"{option.takes},…", help=f"{option.help.removesuffix('.')}; several."))
        for option in OPTIONS if not option.switches])


def _one(option: EditOption) -> tuple[Any, Any, Any]:
    """Return the type, default and declaration of an option for one value."""
    kind, default = {NOTHING: (bool, False), FACTOR: (float, 1.0)}.get(option.takes, (str | None, None))
    metavar = None if option.takes == NOTHING else option.takes
    return kind, default, typer.Option(f"--{option.name}", help=option.help, metavar=metavar)


def _with(command: Command, more: list[tuple[EditOption, Any, Any, Any]]) -> Command:
    """Replace a command's ``**edits`` by options."""
    own = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY)
           for one in inspect.signature(command, eval_str=True).parameters.values()
           if one.kind is not inspect.Parameter.VAR_KEYWORD]
    added = [inspect.Parameter(option.attribute, inspect.Parameter.KEYWORD_ONLY, default=default,
                               annotation=Annotated[kind, declared]) for option, kind, default, declared in more]
    return _declared(command, [*own, *added])


def chosen_edits(values: dict[str, Any]) -> dict[str, Value]:
    """Return the edits that the options' values choose, by name, for ``Configuration.edits``. Raises ``ForetraceError``
    if an option cannot have its value."""
    found: dict[str, Value] = {}
    for option in OPTIONS:
        value = values.get(option.attribute)
        if option.takes == ON_OFF and value is not None:
            if value not in ("on", "off"):
                raise ForetraceError(f"--{option.name} {value} is not known: it is on or off.")
            value = value == "on"
        if value is not None and (value or option.takes != NOTHING):
            found[option.name] = value
    return found


MOST_NUMBERS = 16
"""Most values of one option that are compared."""


def numbers(text: str, option: str, example: str) -> list[int]:
    """Read different whole numbers from 1 up, separated by commas. Raises ``PlanError`` if the text is not such a list
    or has more than ``MOST_NUMBERS``."""

    parts = [part.strip() for part in text.split(",")]
    if len(parts) > MOST_NUMBERS or not all(
            part.isascii() and part.isdecimal() and len(part) <= len(str(guard.MOST_RANKS))
            and 0 < int(part) <= guard.MOST_RANKS
            for part in parts):
        raise PlanError(f"{option} {text[:40]} is not possible; give a whole number from 1 to "
                        f"{guard.MOST_RANKS:,}, or up to "
                        f"{MOST_NUMBERS} separated by commas, such as {example}.")
    return list(dict.fromkeys(int(part) for part in parts))


def loaded_profiles(paths: Sequence[str] | None) -> list[kernel_models_profile.DeviceProfile]:
    """Return the profiles in files. Raises ``ForetraceError`` if a file cannot be read."""
    return [kernel_models_profile.load_profile(path) for path in paths or ()]


def profile_of(paths: Sequence[str] | None, spec: device.DeviceSpec) -> kernel_models_profile.DeviceProfile | None:
    """Return the first profile of a device from files; ``None`` if no files are given. Raises ``ForetraceError`` if a
    file cannot be read, or if all are of other devices."""
    found = loaded_profiles(paths)
    for profile in found:
        if profile.device.name == spec.name:
            return profile
    if not found:
        return None

    raise kernel_models_profile.unused_error(found, [spec.name])


Html = Annotated[str | None, shared("--html")]


def check_html(path: str | None, inputs: Sequence[str]) -> None:
    """Raise ``ForetraceError`` if a page could not be written; checked before the long work."""
    if path is not None:
        page.check_page(path, list(inputs))


def write_html(path: str | None, sources: Sequence[str],
               make: Callable[[provenance.Provenance], parts.ReportPage]) -> None:
    """Write the page that ``make`` returns; nothing without a path. Raises ``ForetraceError`` if writing fails."""
    if path is None:
        return

    with working("Drawing"):
        page.write_page(make(provenance.Provenance(tuple(sources), shlex.join(["foretrace", *sys.argv[1:]]))), path)
