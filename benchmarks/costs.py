"""What every command costs, and whether its cost has grown: ratios to what bounds it, measured in the same run.

    python benchmarks/costs.py                       # the ratios with their limits; exit code 1 if one is over its own
    python benchmarks/costs.py --page docs/speed.md  # all of it, written as the page of costs (some minutes)
    python benchmarks/costs.py --page PAGE DATA      # with the traces below DATA (default: FORETRACE_DATA, else the
                                                     # shared data beside the checkout) instead of generated ones alone

Times are processor seconds, user and system, of a process of its own; each is measured in turns with its reference,
several times, and medians are divided. Limits are about 1.7 times what was measured when they were set, so that a busy
machine does not trip them and a lost optimisation does. Peak memory is the process's maximum resident set.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("FORETRACE_DATA", ROOT.parent / "shared" / "data"))
SMALL = ROOT / "traces" / "cpu-small"
"""A capture that comes with the sources."""
FORETRACE = str(Path(sysconfig.get_path("scripts"), "foretrace"))
SCRIPT = """\
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def build():
    model = torch.nn.Sequential(*(torch.nn.TransformerEncoderLayer(64, 4, 128) for _ in range(4))).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(16, 8, 64, device=DEVICE)

    def step():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    build()
"""
"""A user's program, which is predicted without being run."""
EVENTS, STEPS = 200_000, 50
"""Of the generated trace whose ratios are checked; memory is that of four times as many events, as what reading holds
besides columns is the same for all."""


class Limit(NamedTuple):
    """A ratio that is checked: what, to what, and the most it may be."""

    what: str
    reference: str
    most: float


class Cost(NamedTuple):
    """Of a process: processor and wall seconds, and peak bytes."""

    cpu_s: float
    wall_s: float
    peak: int


LIMITS = {
    "help": Limit("`foretrace --help`", "an empty Python", 8.0),
    "import": Limit("`import foretrace`", "an empty Python", 2.5),
    "command help": Limit("`foretrace predict --help`", "an empty Python", 16.0),
    "predict": Limit("`foretrace predict` of a small capture", "an empty Python", 70.0),
    "plan": Limit("`foretrace plan gpt2 --gpus 64` again", "an empty Python", 70.0),
    "first plan": Limit("`foretrace plan gpt2 --gpus 64`, nothing kept", "an empty Python", 70.0),
    "traced plan": Limit("`foretrace plan` of another size, nothing kept", "importing PyTorch", 6.0),
    "script": Limit("`foretrace predict SCRIPT:build --device`", "importing PyTorch", 5.0),
    "script alone": Limit("`foretrace predict SCRIPT:build --device`", "the script's imports and building", 2.0),
    "read": Limit("reading a trace", "decoding it into typed events", 1.8),
    "read memory": Limit("peak memory of reading small events", "their text", 1.3),
    "breakdown": Limit("breaking 50 steps down", "replaying them", 0.9),
    "first": Limit("the first `predict` after installation", "the second", 2.5),
    "steps": Limit("breaking 50 steps down", "breaking down 5 steps of as many events", 1.8),
    "variants": Limit("16 variants of a program", "simulating it once", 5.0),
    "whatif": Limit("a prediction on another host", "simulating its copies once", 12.0),
}


# -- processes --------------------------------------------------------------------------------------------------------


def run(command: list[str], **variables: str) -> Cost:
    """Run a command to its end, in an environment with some more variables."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment |= {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL", "NUMBA")}
    environment |= variables
    with tempfile.TemporaryFile() as said:
        begin = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said, env=environment)
        _, status, used = os.wait4(process.pid, 0)
        wall = time.perf_counter() - begin
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            said.seek(0)
            raise SystemExit(f"{' '.join(command)} failed: {said.read().decode()[-500:]}")
    return Cost(used.ru_utime + used.ru_stime, wall, used.ru_maxrss * (1 if sys.platform == "darwin" else 1024))


def in_turns(commands: Iterable[list[str]], times: int) -> list[Cost]:
    """Medians of several commands, run in turns after one run each that fills caches."""
    wanted = list(commands)
    found: list[list[Cost]] = [[] for _ in wanted]
    for turn in range(times + 1):
        for at, command in enumerate(wanted):
            cost = run(command)
            if turn:
                found[at].append(cost)
    return [Cost(statistics.median(c.cpu_s for c in each), statistics.median(c.wall_s for c in each),
                 max(c.peak for c in each)) for each in found]


def inside(part: str, *arguments: object) -> dict[str, float]:
    """Run a part of this file in a process of its own, and return what it prints."""
    done = subprocess.run([sys.executable, __file__, "--part", part, *map(str, arguments)], capture_output=True,
                          text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{part} failed: {done.stderr[-1500:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def seconds(work: Callable[[], object], times: int = 5) -> float:
    """Median processor seconds of some work."""
    found = []
    for _ in range(times):
        begin = time.process_time()
        work()
        found.append(time.process_time() - begin)
    return statistics.median(found)


# -- parts, each in a process of its own ------------------------------------------------------------------------------


def _reading(path: str) -> dict[str, float]:
    """Seconds of decoding and of reading, in turns, events, and how far memory peaks above the imports."""
    import msgspec

    from tracer.kineto import read_kineto
    from tracer.kineto.events import Event

    decoder: Any = msgspec.json.Decoder(msgspec.defstruct("Trace", [("traceEvents", list[Event])]))
    text = Path(path).read_bytes()
    read_kineto(path)
    decode, read = [], []
    for _ in range(5):
        decode.append(seconds(lambda: decoder.decode(text), 1))
        read.append(seconds(lambda: read_kineto(path), 1))
    return {"events": len(decoder.decode(text).traceEvents), "bytes": len(text), "decode": statistics.median(decode),
            "read": statistics.median(read)}


def _memory(path: str) -> dict[str, float]:
    from tracer.kineto import read_kineto

    def peak() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

    with tempfile.TemporaryDirectory() as folder:
        read_kineto(str(generated(Path(folder), 500, 5)))  # what reading loads is not of the trace
    before = peak()
    read_kineto(path)
    return {"imports": before, "peak": peak(), "bytes": Path(path).stat().st_size}


def _reports(path: str) -> dict[str, float]:
    """Seconds of reading, replaying and breaking down."""
    from graph_predictor import replay
    from step_views.reports.breakdown import breakdown
    from tracer.job import read_job

    job = read_job(path)
    breakdown(replay(job.graphs))
    found: dict[str, list[float]] = {"read": [], "replay": [], "breakdown": []}
    for _ in range(3):
        found["read"].append(seconds(lambda: read_job(path), 1))
        found["replay"].append(seconds(lambda: replay(job.graphs), 1))
        found["breakdown"].append(seconds(partial(breakdown, replay(job.graphs)), 1))
    return {name: statistics.median(each) for name, each in found.items()}


def _whatifs(path: str) -> dict[str, float]:
    """Seconds of predictions by what they change, of one simulation of the copies, and of 16 variants together."""
    import numpy as np

    from foretrace import edits
    from graph_predictor.prediction.interval import KernelVariants
    from graph_predictor.simulation.engine import simulate
    from graph_predictor.synthesis.baseline import baseline_of
    from tracer.errors import ForetraceError
    from tracer.job import read_job

    job = read_job(path)
    start = baseline_of(job)
    steady = start.simulated().steady
    recorded = steady.copies.rows.recorded[:, None].astype(np.float64)
    many = steady.copies.kernels(KernelVariants(np.repeat(recorded, 16, axis=1)))
    found = {"events": float(len(steady.program.item_work) + len(steady.program.kernel_item)),
             "simulate": seconds(lambda: simulate(steady.program, structure=steady.repeated.structure), 9),
             "variants": seconds(lambda: steady.copies.periods_ns(many, [1.0] * 16), 9)}
    factors = iter(np.linspace(0.7, 1.3, 200).tolist())
    found["host"] = seconds(lambda: start.predict([edits.ScaleHost(next(factors))]), 11)
    with contextlib.suppress(ForetraceError):  # a device that the trace does not name
        found["clock"] = seconds(lambda: start.predict([edits.ScaleClock(next(factors))]), 11)
        found["device"] = seconds(lambda: start.predict([edits.Device("h200-sxm"), edits.ScaleClock(next(factors))]),
                                  11)
    return found


def _points(path: str, count: str, jobs: str) -> dict[str, float]:
    """Processor seconds, of all processes, and wall seconds of a sweep of so many points."""
    from sweep_speed import space

    from step_views.sweep import sweep
    from step_views.sweep.run import SweepSource

    source = SweepSource((path,))
    with tempfile.TemporaryDirectory() as folder:
        wall, began = time.perf_counter(), os.times()
        found = sweep(source, space(int(count)), output=Path(folder) / "t.parquet", jobs=int(jobs))
        wall, ended = time.perf_counter() - wall, os.times()
    return {"points": len(found.table), "wall": wall, "cpu": ended.user + ended.system - began.user - began.system}


def _profile(*command: str) -> dict[str, Any]:
    """The functions that take most of a command's own time."""
    import cProfile
    import io
    import pstats

    from foretrace.commands import main as command_line

    sys.argv = ["foretrace", *command]
    profile = cProfile.Profile()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        profile.runcall(command_line)
    stats = pstats.Stats(profile)
    total = stats.total_tt  # type: ignore[attr-defined]
    rows = sorted(stats.stats.items(), key=lambda each: -each[1][2])[:6]  # type: ignore[attr-defined]
    return {f"{Path(file).parent.name}/{Path(file).name}:{function}" if line else function: spent / total
            for (file, line, function), (_, _, spent, _, _) in rows}


PARTS: dict[str, Callable[..., dict[str, Any]]] = {
    "reading": _reading, "memory": _memory, "reports": _reports, "whatifs": _whatifs, "points": _points,
    "profile": _profile}


# -- the ratios that are checked --------------------------------------------------------------------------------------


def generated(folder: Path, events: int, steps: int) -> Path:
    """Write a trace of products (see ``breakdown_speed``)."""
    from breakdown_speed import write_trace

    path = folder / f"{events}-{steps}.json"
    with path.open("w", encoding="utf-8") as file:
        write_trace(file, events, steps)
    return path


def ratios(folder: Path, turns: int = 7) -> dict[str, float]:
    """Measure every ratio that has a limit."""
    python = [sys.executable, "-c", "pass"]
    empty, shown, imported, command, predicted, planned = (each.cpu_s for each in in_turns(
        [python, [FORETRACE, "--help"], [sys.executable, "-c", "import foretrace"], [FORETRACE, "predict", "--help"],
         [FORETRACE, "predict", str(SMALL)], [FORETRACE, "plan", "gpt2", "--gpus", "64"]], turns))
    first, other = (first_plan(folder, turns, *words) for words in ((), ("--set", "seq=768")))
    script = folder / "step.py"
    script.write_text(SCRIPT, encoding="utf-8")
    torch, alone, traced = (each.cpu_s for each in in_turns(
        [[sys.executable, "-c", "import torch"], [sys.executable, str(script)],
         [FORETRACE, "predict", f"{script}:build", "--device", "h200-sxm"]], 3))
    big = generated(folder, EVENTS, STEPS)
    reading, many = inside("reading", big), inside("reports", big)
    memory = inside("memory", generated(folder, 4 * EVENTS, STEPS))
    few, whatifs = inside("reports", generated(folder, EVENTS, STEPS // 10)), inside("whatifs", big)
    return {"help": shown / empty, "import": imported / empty, "command help": command / empty,
            "predict": predicted / empty, "plan": planned / empty, "first plan": first / empty,
            "traced plan": other / torch, "script": traced / torch,
            "script alone": traced / alone, "read": reading["read"] / reading["decode"],
            "read memory": (memory["peak"] - memory["imports"]) / memory["bytes"], "first": first_run(folder),
            "breakdown": many["breakdown"] / many["replay"], "steps": many["breakdown"] / few["breakdown"],
            "variants": whatifs["variants"] / whatifs["simulate"], "whatif": whatifs["host"] / whatifs["simulate"]}


def first_plan(folder: Path, turns: int, *words: str) -> float:
    """Median processor time of a search for a plan where nothing that was traced is kept of an earlier one."""
    found = []
    for _ in range(turns):
        with tempfile.TemporaryDirectory(dir=folder) as empty:
            command = [FORETRACE, "plan", "gpt2", "--gpus", "64", *words]
            found.append(run(command, XDG_CACHE_HOME=empty, TMPDIR=empty).cpu_s)
    return statistics.median(found)


def first_run(folder: Path) -> float:
    """Processor time of the first prediction over that of the second, where nothing is kept of an earlier one."""
    place = folder / "installed"
    for package in ("foretrace", "step_views", "graph_predictor", "kernel_models", "tracer"):
        shutil.copytree(ROOT / package, place / package, ignore=shutil.ignore_patterns("*.o", "*.nbi", "*.nbc"))
    program = f"import sys; sys.path.insert(0, {str(place)!r}); from foretrace.commands import main; main()"
    times = [run([sys.executable, "-c", program, "predict", str(SMALL)], HOME=str(folder),
                 XDG_CACHE_HOME="").cpu_s for _ in range(2)]
    return times[0] / times[1]


def ratio_table(found: dict[str, float]) -> list[str]:
    """The ratios beside their limits."""
    lines = [f"{'what':<48} {'over':<42} {'ratio':>6} {'limit':>6}"]
    for name, limit in LIMITS.items():
        over = "  over its limit" if found[name] > limit.most else ""
        lines.append(f"{limit.what:<48} {limit.reference:<42} {found[name]:>6.2f} {limit.most:>6.1f}{over}")
    return lines


# -- the page ---------------------------------------------------------------------------------------------------------


def commands(data: Path, folder: Path) -> dict[str, list[str]]:
    """Commands whose cost is shown, by their words; on a real trace where there is one, and on it saved as one file."""
    trace = str(data / "traces" / "resnet50-V100" / "rank0.kineto.json.gz")
    trace = trace if Path(trace).exists() else str(SMALL)
    job = str(data / "traces" / "nanogpt-8xH100")
    found = {"--help": ["--help"], "devices": ["devices"], "predict (shipped CPU capture)": ["predict", str(SMALL)],
             "check traces": ["check", str(ROOT / "traces")], "plan gpt2 --gpus 64": ["plan", "gpt2", "--gpus", "64"]}
    for name in ("inspect", "replay", "breakdown", "overheads", "opportunities"):
        found[f"{name} TRACE"] = [name, trace]
    run([FORETRACE, "convert", trace, "-o", saved := str(folder / "saved.foretrace")])
    for name in ("inspect", "replay", "breakdown"):
        found[f"{name} SAVED"] = [name, saved]
    found["predict TRACE"] = ["predict", trace]
    found["predict TRACE --device h200-sxm"] = ["predict", trace, "--device", "h200-sxm"]
    if Path(job).exists():
        found["breakdown JOB (8 ranks)"] = ["breakdown", job]
        found["ranks JOB (8 ranks)"] = ["ranks", job]
    return found


def page(data: Path, folder: Path) -> str:
    """Measure everything and lay it out as docs/speed.md."""
    lines = ["# What every command costs", "",
             "Written by `python benchmarks/costs.py --page docs/speed.md`; not to be edited. Times are processor "
             "seconds (user and system)", f"of one process, on {os.cpu_count()} shared cores of a virtual machine, "
             f"with Python {sys.version.split()[0]}. Each time is a median of", "alternating runs. Compare ratios: "
             "seconds depend on the machine.", "", "## Ratios that are checked", "",
             "`make costs` measures these, and fails where one is over its limit.", "", "```",
             *ratio_table(ratios(folder)), "```", ""]
    lines += ["## Commands", "", "TRACE is rank 0 of ResNet-50 on a V100 (4,796 operations a step, 24,000 in all), "
              "SAVED the", "same as a `.foretrace` file, JOB eight ranks of nanoGPT.", "", "```",
              f"{'command':<38} {'CPU s':>7} {'over Python':>12} {'peak MB':>8}"]
    wanted = commands(data, folder)
    empty, *costs = in_turns([[sys.executable, "-c", "pass"], *([FORETRACE, *words] for words in wanted.values())], 3)
    for name, cost in zip(wanted, costs, strict=True):
        lines.append(f"{name:<38} {cost.cpu_s:>7.2f} {cost.cpu_s / empty.cpu_s:>11.1f}x {cost.peak / 1e6:>8.0f}")
    lines += ["```", "", "## Growth with events", "",
              "Generated traces of products, 100 steps each. Decoding is that of a typed decoder (msgspec) of the same "
              "text.", "Memory is the peak above that of reading a tiny trace, divided by the size of the text.", "",
              "```",
              f"{'events':>10} {'decode s':>9} {'read s':>7} {'us/event':>9} {'over decoder':>13} {'memory x':>9} "
              f"{'replay s':>9} {'breakdown s':>12}"]
    for events in (50_000, 200_000, 800_000):
        path = generated(folder, events, 100)
        reading, memory, reports = inside("reading", path), inside("memory", path), inside("reports", path)
        lines.append(
            f"{reading['events']:>10,.0f} {reading['decode']:>9.2f} {reading['read']:>7.2f} "
            f"{reading['read'] / reading['events'] * 1e6:>9.2f} {reading['read'] / reading['decode']:>12.1f}x "
            f"{(memory['peak'] - memory['imports']) / reading['bytes']:>9.2f} {reports['replay']:>9.2f} "
            f"{reports['breakdown']:>12.2f}")
        path.unlink()
    lines += ["```", "", "## Growth with steps", "", "Traces of 200,000 events.", "", "```",
              f"{'steps':>6} {'replay s':>9} {'breakdown s':>12} {'over replay':>12}"]
    for steps in (5, 50, 500):
        reports = inside("reports", generated(folder, 200_000, steps))
        lines.append(f"{steps:>6} {reports['replay']:>9.2f} {reports['breakdown']:>12.2f} "
                     f"{reports['breakdown'] / reports['replay']:>11.2f}x")
    lines += ["```", ""]
    if (data / "traces").exists():
        lines += _real(data, folder)
    if (data / "traces").exists():
        lines += _others(data)
    lines += ["## Where the time goes", "", "Share of the profiled time in the functions themselves, of the five "
              "commands that take longest.", "", "```"]
    slowest = sorted(zip(wanted, costs, strict=True), key=lambda each: -each[1].cpu_s)[:5]
    for name, _ in slowest:
        lines.append(name)
        lines += [f"  {share:>6.1%}  {function}" for function, share in inside("profile", *wanted[name]).items()]
    return "\n".join([*lines, "```", ""])


def _others(data: Path) -> list[str]:
    """What other benchmarks print: of reading beside a generic decoder and peers, of loading, and of simulating."""
    environment = {**os.environ, "FORETRACE_DATA": str(data)}
    lines: list[str] = []
    for title, text, command in (
        ("Reading, next to others",
         "`python benchmarks/parse_speed.py`: the trace of rank 3 of 8 A100 repeated until it has 1.3 million events. "
         "Each reader has\na process of its own on one core. foretrace builds the whole execution graph in that time.\n"
         "In an earlier run with HolisticTraceAnalysis installed, it took 16.4 µs an event and 5.5 times the size of "
         "the text; foretrace took\n2.3 µs in the same run. The TraceLens on PyPI is another project.",
         ["parse_speed.py"]),
        ("Loading the one-file form",
         "`python benchmarks/load_speed.py`. Smaller than the gzipped JSON everywhere; smaller traces load in 0.3 to "
         "2 ms, where the\nParquet reader's fixed cost is the floor.", ["load_speed.py"]),
        ("Simulating", "`python benchmarks/simulator_speed.py DATA`, with machine code that was kept by an earlier "
                       "process.", ["simulator_speed.py", str(data)]),
    ):
        done = subprocess.run([sys.executable, str(ROOT / "benchmarks" / command[0]), *command[1:]], text=True,
                              capture_output=True, check=False, env=environment)
        said = [line.rstrip() for line in done.stdout.strip().splitlines()]
        said = said or [f"(no result: exit code {done.returncode})"]
        lines += [f"## {title}", "", text, "", "```", *said, "```", ""]
    return lines


def _real(data: Path, folder: Path) -> list[str]:
    """Growth with ranks, operations and points, on recorded traces."""
    import rank_reading

    traces = data / "traces"
    lines = ["## Growth with ranks", "", "`foretrace breakdown` of nanoGPT on H100, by number of ranks.", "", "```",
             f"{'ranks':>6} {'CPU s':>7} {'wall s':>7} {'peak MB':>8}"]
    files = sorted((traces / "nanogpt-8xH100").glob("*.json.gz"))
    for count in (1, 2, 4, 8):
        [cost] = in_turns([[FORETRACE, "breakdown", *map(str, files[:count])]], 1)
        lines.append(f"{count:>6} {cost.cpu_s:>7.2f} {cost.wall_s:>7.2f} {cost.peak / 1e6:>8.0f}")
    lines += ["```", "", "`python benchmarks/rank_reading.py`: wall seconds of reading eight ranks, the best of nine "
              "alternating runs, and processor", "seconds of all processes. One process reads on one core, or one on "
              "each idle core. `bound` is the ratio that idle cores allow.", "On a busy machine several processes are "
              "slower than one.", "", "```", rank_reading.HEAD,
              *rank_reading.rows(data, folder)]
    lines += ["```", "", "## What-ifs, by operations", "",
              "Milliseconds of one prediction with its interval and path, each with another factor. Events are items "
              "and kernels of the", "four copies of the repeated steps that are simulated; 16 variants are simulated "
              "together for the interval.", "", "```",
              f"{'trace':<34} {'events':>8} {'simulate':>9} {'16 variants':>12} {'host':>7} {'clock':>7} {'device':>7}"]
    for name in ("h100-vs-mi300/h100-gaunernst_bert-small-uncased.json.gz", "resnet50-V100/rank0.kineto.json.gz",
                 "resnet50-ddp-2xA100", "rank3-of-8xA100-6steps/rank3.kineto.json.gz"):
        try:
            found = inside("whatifs", traces / name)
        except SystemExit:
            continue
        lines.append(f"{name[:34]:<34} {found['events']:>8,.0f} " + " ".join(
            f"{found.get(each, float('nan')) * 1e3:>{width}.1f}" for each, width in (
                ("simulate", 9), ("variants", 12), ("host", 7), ("clock", 7), ("device", 7))))
    lines += ["```", "", "## Sweeps, by points", "", "Devices, clocks, bandwidths and hosts of ResNet-50 "
              "(resnet50-V100), in one process; reading and starting included.", "", "```",
              f"{'points':>7} {'CPU s':>7} {'ms a point':>11}"]
    for points in (200, 1000, 5000):
        found = inside("points", traces / "resnet50-V100" / "rank0.kineto.json.gz", points, 1)
        lines.append(f"{found['points']:>7,.0f} {found['cpu']:>7.1f} {found['cpu'] / found['points'] * 1e3:>11.1f}")
    return [*lines, "```", ""]


def main() -> int:
    """Print the ratios, or write the page."""
    if sys.argv[1:2] == ["--part"]:
        name, *arguments = sys.argv[2:]
        print(json.dumps(PARTS[name](*arguments)))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", type=Path, default=DATA)
    parser.add_argument("--page", type=Path, help="measure everything, and write the page of costs here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.page:
            options.page.write_text(page(options.data, Path(folder)), encoding="utf-8")
            return 0
        found = ratios(Path(folder))
    print("\n".join(ratio_table(found)))
    return int(any(found[name] > limit.most for name, limit in LIMITS.items()))


if __name__ == "__main__":
    sys.exit(main())
