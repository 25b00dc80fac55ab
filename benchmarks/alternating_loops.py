"""Loops whose work alternates, at sizes they never ran: captured, predicted as whole cycles by three routes, then run.

    python benchmarks/alternating_loops.py [--keep DIR] [--rounds N] [--busy N]

Three programs of ``foreign_programs``: a rollout at every fourth update, a generator's step at every third of its
critic, an optimizer's at every fourth small batch. Each is captured at its own sizes and at a second size; a step of
the capture is one call of the step that ``build`` returns, and what a cycle is has to be found. The truth is what a
whole cycle takes at the size asked for: programs at both sizes run in turns of some cycles, and the median ratio of the
turns, × the capture's cycle with nothing watching, is compared with the prediction. Turns are timed by the processor's
time of their thread, which others on the machine do not lengthen. Of several rounds the quickest capture counts.
``--busy N`` captures beside N processes that do nothing but count; the truth is then what the turns, which run without
them, take themselves.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = ROOT / "benchmarks" / "foreign_programs"
STEPS, TIMED = 12, 24
"""Steps that are recorded and timed: two cycles or more of three steps, and of four."""
CYCLES, TURNS = 3, 10
"""Cycles of a turn, of which the first does not count, and turns."""
ENDED = 60.0
"""Seconds that a process may take to end."""


@dataclass(frozen=True)
class Loop:
    """A program, how many of its steps are a cycle, its sizes, and of each name the second and the asked size."""

    name: str
    cycle: int
    base: dict[str, int]
    asked: dict[str, tuple[int, int]]

    @property
    def script(self) -> Path:
        """Of the program."""
        return PROGRAMS / f"{self.name}.py"


LOOPS = (
    Loop("ppo_rollouts", 4, {"envs": 64}, {"envs": (128, 512)}),
    Loop("gan_critic", 3, {"batch": 12}, {"batch": (24, 48)}),
    Loop("accumulated_encoder", 4, {"batch": 3, "seq": 20}, {"batch": (6, 12), "seq": (30, 50)}),
)


def environment() -> dict[str, str]:
    """One thread, and this tree's modules."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """Run so many processes that only count."""
    running = [subprocess.Popen([sys.executable, "-c", "while 1: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for one in running:
            one.kill()
            one.communicate(timeout=ENDED)


def build(script: str, sizes: dict[str, int]):
    """Make a program's step."""
    import torch

    torch.manual_seed(0)
    return runpy.run_path(script, run_name="program")["build"](**sizes)


def record(script: str, sizes: dict[str, int], out: str) -> None:
    """Capture a program's loop here."""
    import tracer

    step = build(script, sizes)
    with tracer.capture(out, steps=STEPS, timed=TIMED, form="foretrace") as capture:
        while not capture.finished:
            step()
            capture.step()


def turns(script: str, sizes: dict[str, int], cycle: int) -> None:
    """Run some cycles for each line of the standard input, and print what one takes, ms."""
    step = build(script, sizes)
    for _ in range(2 * cycle):
        step()
    for _ in sys.stdin:
        times = []
        for _ in range(CYCLES):
            begin = time.thread_time()
            for _ in range(cycle):
                step()
            times.append(1e3 * (time.thread_time() - begin))
        print(float(np.median(times[1:])), flush=True)


def run_apart(*words: str) -> subprocess.Popen[str]:
    """Run this file in a process of its own."""
    return subprocess.Popen([sys.executable, __file__, *words], env=environment(), text=True, stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def measured(loop: Loop, sizes: dict[str, int]) -> list[list[float]]:
    """What a cycle takes at the own and at other sizes, ms, in every turn."""
    runs = [run_apart("--turns", str(loop.script), json.dumps(one), str(loop.cycle)) for one in (loop.base, sizes)]
    found = []
    for _ in range(TURNS):
        times = []
        for one in runs:
            print("go", file=one.stdin, flush=True)
            times.append(float(one.stdout.readline()))
        found.append(times)
    for one in runs:
        one.communicate(timeout=ENDED)
    return found


def capture(loop: Loop, sizes: dict[str, int], out: Path, processes: int) -> tuple[Path, str]:
    """Capture a loop in a process of its own; the capture, and what it said."""
    said = ""
    if not out.exists():
        with busy(processes):
            run = run_apart("--record", str(loop.script), json.dumps(sizes), str(out))
            said = run.communicate()[1]
        if run.returncode:
            raise RuntimeError(said)
        (out / "said").write_text(said)
    return out, (out / "said").read_text()


def cases(loop: Loop, folder: Path, rounds: int, processes: int) -> Iterator[tuple[str, str, float, float, float, float,
                                                                                    bool]]:
    """Predictions and truths: size, route, truth, predicted, low and high (ms), and whether the capture was flagged."""
    from graph_predictor.request.study import Configuration, Study
    from tracer.job import read_job

    def captures(sizes: dict[str, int]) -> tuple[Path, str]:
        label = "-".join(f"{name}{size}" for name, size in sizes.items())
        found = [capture(loop, sizes, folder / f"{loop.name}-{label}-{number}", processes) for number in range(rounds)]
        return min(found, key=lambda one: np.median(read_job(one[0]).graphs[0].meta.unprofiled_step_ns))

    path, said = captures(loop.base)
    job = read_job(path)
    assert job.graphs[0].meta.cycle == loop.cycle, (loop.name, job.graphs[0].meta.cycle)
    captured = float(np.median(job.graphs[0].meta.unprofiled_step_ns)) / 1e6
    study = Study(job)
    for name, (second, asked) in loop.asked.items():
        grown = folder / f"{loop.name}-{name}{asked}.json"
        if not grown.exists():
            grown.write_text(json.dumps(measured(loop, {**loop.base, name: asked})))
        own, new = np.array(json.loads(grown.read_text())).T
        truth = float(np.median(new)) if processes else captured * float(np.median(new / own))
        other, _ = captures({**loop.base, name: second})
        change = f"{name}={loop.base[name]}:{asked}"
        for route, wanted in (
                ("traced again", Configuration(sizes=(f"{name}={asked}",), code=f"{loop.script}:build")),
                ("nearer capture", Configuration(sizes=(change,), also=(f"{other}:{name}={second}",))),
                ("one capture", Configuration(sizes=(change,)))):
            found = study.predict(wanted)
            low, high = found.interval_us
            yield change, route, truth, found.step_time_us / 1e3, low / 1e3, high / 1e3, "the machine was busy" in said


def main() -> None:
    """Print every case, and their mean."""
    words = sys.argv[1:]
    if words[:1] == ["--record"]:
        record(words[1], json.loads(words[2]), words[3])
        return
    if words[:1] == ["--turns"]:
        turns(words[1], json.loads(words[2]), int(words[3]))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", type=Path, help="where captures are kept, and found again")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--busy", type=int, default=0)
    chosen = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    with tempfile.TemporaryDirectory() as scratch:
        folder = chosen.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        errors, inside = [], []
        for loop in LOOPS:
            for size, route, truth, predicted, low, high, flagged in cases(loop, folder, chosen.rounds, chosen.busy):
                errors.append(predicted / truth - 1)
                inside.append(low <= truth <= high)
                print(f"{loop.name:<20} {size:<13} {route:<15} {truth:9.2f} {predicted:9.2f} {errors[-1]:+7.1%}  "
                      f"{low:.2f} to {high:.2f} {'inside' if inside[-1] else 'outside'}"
                      f"{' flagged' if flagged else ''}", flush=True)
        print(f"MAPE {np.mean(np.abs(errors)):.1%}, worst {np.max(np.abs(errors)):.1%}, inside {sum(inside)} of "
              f"{len(inside)}")


if __name__ == "__main__":
    main()
