"""The fuzzer: as many cases as wanted, and what was wrong with which.

    python tests/fuzz/fuzz_run.py --cases 20000 [--seed 1] [--jobs 2] [--kind kineto] [--out out/fuzz]

Hypothesis makes the choices (a run with the same seed makes the same), ``fuzz_mutators`` and ``fuzz_foreign`` damage
sound files of every kind, and real commands read them. Wrong are: a traceback or "a bug", an exit code that a command
does not have, over 20 s, over 1.5 GB, a warning, and printed numbers that are none. Small files may not become large:
what only reads (``READING``) has 5 s of processor time for less than 2 MB, half a gigabyte for less than 1 MB, and
10 s in all. What is found is kept as a directory each: ``fuzz_run.py --again DIR`` runs it again.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parent))

from fuzz_cases import KINDS, QUICK, Case, draw_case, keep, kept
from fuzz_worker import BYTES, ROOT, SECONDS, WRITTEN, Worker
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

CODES = {"check": {0, 1, 2, 3}, "plan": {0, 1, 2}, "sweep": {0, 1, 2}, "capture": {0, 1, 2, 3}}
"""Exit codes of commands that are gates, or end as the program does that they run; all others end with 0 or 2."""
_GONE = 141
"""Exit code where nobody reads the output any more."""
READING = frozenset({"inspect", "replay", "breakdown", "memory", "topologies", "convert", "export", "diff", "shard",
                     "comm", "models", "fit", "devices", "price"})
"""Commands whose time and memory are to be those of the file."""
SMALL_SECONDS, SMALL_BYTES, HUNG_SECONDS = 5, 500_000_000, 10
"""What reading may take: of a file of less than 2 MB, of one of less than 1 MB, and of any."""
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_CHUNK = 200
_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Where inputs are written: no disk, if there is such a place."""
_NO_NUMBER = re.compile(r"(?<!inf or )(?<![\w.:/'\"=-])[-+]?(?:nan|inf)(?! or nan)(?![\w.'\"=/-])")

_INFINITE = re.compile("(?i)nan|inf|[0-9]{300}")
"""Given as an option, such a number may be quoted."""


@dataclass
class Outcome:
    """How a case ended; ``wrong`` says what should not be, empty where all is well."""

    case: Case
    code: int
    seconds: float
    bytes: int
    processor: float = 0.0
    wrong: str = ""
    where: str = ""
    """The line of foretrace that raised, for what is wrong by an exception."""
    text: str = ""
    own: int = 0
    """Bytes beyond those that its process began with."""

    @property
    def given(self) -> int:
        """Bytes of its input."""
        return sum(map(len, self.case.files.values()))


@dataclass
class Tally:
    """Outcomes together. ``kept`` of each fault the first few."""

    codes: Counter[str] = field(default_factory=Counter)
    faults: dict[tuple[str, str], list[Outcome]] = field(default_factory=dict)
    cases: int = 0
    processor: float = 0.0
    slowest: float = 0.0
    largest: int = 0
    amplified: dict[str, tuple[float, float]] = field(default_factory=dict)
    """By kind the most seconds of processor, and bytes, that reading took a byte of an input of 10 kB or more."""

    def add(self, outcome: Outcome) -> None:
        """Count an outcome."""
        self.cases += 1
        self.processor += outcome.processor
        self.codes[f"{outcome.case.kind}: {outcome.wrong or f'exit {outcome.code}'}"] += 1
        self.slowest, self.largest = max(self.slowest, outcome.seconds), max(self.largest, outcome.bytes)
        if outcome.given >= 10_000 and outcome.case.arguments[0] in READING:
            before = self.amplified.get(outcome.case.kind, (0.0, 0.0))
            self.amplified[outcome.case.kind] = (max(before[0], outcome.processor / outcome.given),
                                                 max(before[1], outcome.own / outcome.given))
        if outcome.wrong:
            self.faults.setdefault((outcome.wrong, outcome.where), []).append(outcome)

    def by_outcome(self) -> Counter[str]:
        """Counts without the kinds."""
        found: Counter[str] = Counter()
        for name, number in self.codes.items():
            found[name.partition(": ")[2]] += number
        return found

    def told(self) -> str:
        """What was found, as text."""
        lines = [f"{self.cases:,} cases, {self.processor:,.0f} s of processor; slowest {self.slowest:.1f} s, largest "
                 f"{self.largest / 1e6:,.0f} MB"]
        lines += [f"  {number:7,} {name}" for name, number in sorted(self.by_outcome().items())]
        lines += [f"  {kind}: at most {1e6 * seconds:,.1f} s of processor a MB, {size:,.0f} bytes a byte"
                  for kind, (seconds, size) in sorted(self.amplified.items())]
        for (wrong, where), found in sorted(self.faults.items(), key=lambda item: -len(item[1])):
            first = found[0]
            lines += ["", f"{len(found)} × {wrong} at {where or '?'}",
                      f"    foretrace {' '.join(a[:80] for a in first.case.arguments)}"[:300],
                      f"    {first.text[-300:]}"]
        return "\n".join(lines)


def cases(seeds: Path, number: int, seed_number: int, kinds: Sequence[str] = ()) -> Iterator[Case]:
    """Cases of a seed, in chunks that hypothesis draws."""
    for chunk in itertools.count():
        size = min(_CHUNK, number - chunk * _CHUNK)
        if size <= 0:
            return
        yield from _chunk(seeds, size, seed_number * 1_000_003 + chunk, kinds)


def _chunk(seeds: Path, size: int, number: int, kinds: Sequence[str]) -> list[Case]:
    found: list[Case] = []

    # Only its choices: what is wrong is kept as files, and must not end the run.
    @seed(number)
    @settings(max_examples=size, phases=[Phase.generate], database=None, deadline=None,
              suppress_health_check=list(HealthCheck))
    @given(st.randoms(use_true_random=True))
    def draw(r: Random) -> None:
        found.append(draw_case(r, seeds, kinds))

    draw()
    return found[:size]


def run_cases(todo: Iterable[Case], seeds: Path, jobs: int = 1) -> Iterator[Outcome]:
    """Run cases in ``jobs`` processes; outcomes come as they end."""
    warm = warm_up(seeds)
    queue, lock, done = iter(todo), threading.Lock(), threading.Condition()
    results: list[Outcome] = []
    running = jobs
    errors: list[BaseException] = []

    def work() -> None:
        nonlocal running
        worker = Worker(warm)
        try:
            while True:
                with lock:
                    case = next(queue, None)
                if case is None:
                    return
                outcome = run_one(worker, case, seeds)
                with done:
                    results.append(outcome)
                    done.notify()
        except BaseException as error:
            errors.append(error)
        finally:
            worker.close()
            with done:
                running -= 1
                done.notify()

    for _ in range(jobs):
        threading.Thread(target=work, daemon=True).start()
    while True:
        with done:
            done.wait_for(lambda: results or not running)
            ready, results[:] = list(results), []
            over = not running
        yield from ready
        if over and not ready:
            break
    if errors:
        raise errors[0]


def warm_up(seeds: Path) -> list[list[str]]:
    """Commands that import and compile what cases need."""
    one, job = str(seeds / "kineto_linear.json"), str(seeds / "job")
    programs = [["plan", str(seeds / "decoder"), "--gpus", "8"],
                ["predict", str(seeds / "decoder"), "--set", "batch=8"]] if (seeds / "decoder").exists() else []
    return [*programs,
            ["replay", one], ["breakdown", job], ["predict", one, "--clock", "2", "--device", "b200"], ["inspect", one],
            ["opportunities", one], ["ranks", job], ["diff", one, one], ["comm", "report", job], ["overheads", one],
            ["predict", one, "--set", "batch=4096:64"], ["predict", one, "--parallel", "ddp=4"],
            ["comm", "tune", str(seeds / "comm.json")], ["models", "list", str(seeds / "device.profile")],
            ["price", "aten::linear", "--shapes", "32x64,128x64", "--profile", str(seeds / "device.profile")],
            ["check", str(seeds / "checked")], ["campaign", "status", str(seeds / "campaign")],
            ["models", "evaluate", str(seeds / "device.profile"), str(seeds / "table.parquet")],
            ["replay", str(seeds / "graph_long.foretrace")],
            ["comm", "predict", "all_reduce", "--bytes", "1MiB", "--profile", str(seeds / "comm.json")],
            ["sweep", one, "--clock", "1,2", "--jobs", "1", "-o", str(seeds / "warm.csv"), "--plot",
             str(seeds / "warm.svg")],
            ["plan", one, "--gpus", "8"]]


def run_one(worker: Worker, case: Case, seeds: Path) -> Outcome:
    """Run a case and judge it."""
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=_MEMORY) as folder:
        root = Path(folder)
        try:
            argv = case.write(root, seeds)
        except OSError as error:  # a name that this file system cannot have
            return Outcome(case, 2, 0.0, 0, text=str(error))
        answer = worker.run(root, argv, case.stdout)
        outcome = Outcome(case, answer["code"], answer["seconds"], answer["bytes"], answer["processor"],
                          own=answer["own"])
        _judge(outcome, answer["hung"], root)
        if case.kind == "output" and not outcome.wrong and not _untouched(case, root / "in"):
            outcome.wrong, outcome.where = "what was there is changed", case.arguments[0]
    return outcome


def _untouched(case: Case, root: Path) -> bool:
    """Whether all of a case's files that held something are as they were."""
    return all((root / name).is_file() and (root / name).read_bytes() == content
               for name, content in case.files.items() if content)


def _judge(outcome: Outcome, hung: bool, root: Path) -> None:
    errors = _text(root / "stderr")
    outcome.text = " ".join(errors.strip().rsplit("\n", 1)[-1].split())
    gate = outcome.case.arguments[0]
    code = 0 if outcome.case.stdout == "gone" and outcome.code == _GONE else outcome.code
    if hung or code == -signal.SIGXCPU:
        outcome.wrong = f"over {SECONDS} s"
    elif outcome.bytes > BYTES:
        outcome.wrong = f"over {BYTES / 1e9} GB"
    elif gate in READING and (slow := _amplified(outcome)):
        outcome.wrong, outcome.text = slow, f"{outcome.given:,} bytes given; {outcome.text}"
    elif any(path.is_file() and not path.is_symlink() and path.stat().st_size >= WRITTEN for path in root.iterdir()):
        outcome.wrong = f"wrote over {WRITTEN / 1e6:.0f} MB"
    elif code < 0:
        outcome.wrong = f"ended by signal {-code}"
    elif "which is a bug of foretrace" in errors or code >= 90:
        outcome.wrong = "a bug"
    elif "not enough memory" in errors:
        outcome.wrong = "out of memory"
    elif "Warning: " in errors:
        outcome.wrong = "a warning"
        outcome.text = errors[max(errors.index("Warning: ") - 200, 0):][:400]
    elif code not in CODES.get(gate, {0, 2}):
        outcome.wrong = f"exit {code}"
    elif outcome.code == 0 and not any(map(_INFINITE.search, outcome.case.arguments[1:])) and (
            (root / "unfinished").exists() or _NO_NUMBER.search(_text(root / "stdout"))):
        outcome.wrong = "a number that is none"
        found = _NO_NUMBER.search(_text(root / "stdout"))
        outcome.text = found.string[max(found.start() - 100, 0):found.end() + 30] if found else "in JSON"
    if outcome.wrong:
        outcome.where = _where(errors) or (gate if outcome.wrong == "a number that is none" else "")


def _amplified(outcome: Outcome) -> str:
    """Say what reading took that its input is too small for."""
    if outcome.processor > HUNG_SECONDS and outcome.given < 10_000_000:
        return f"over {HUNG_SECONDS} s to read"
    if outcome.processor > SMALL_SECONDS and outcome.given < 2_000_000:
        return f"over {SMALL_SECONDS} s to read less than 2 MB"
    if outcome.own > SMALL_BYTES and outcome.given < 1_000_000:
        return f"over {SMALL_BYTES / 1e9} GB to read less than 1 MB"
    return ""


def _text(path: Path) -> str:
    if not path.exists():
        return ""
    with path.open("rb") as file:
        return file.read(4_000_000).decode("utf-8", "replace")


def _where(errors: str) -> str:
    """The last line of foretrace in a traceback."""
    own = [match for match in _FRAME.finditer(errors) if match[1].startswith(str(ROOT)) and "/tests/" not in match[1]]
    return f"{Path(own[-1][1]).relative_to(ROOT)}:{own[-1][2]} {own[-1][3]}" if own else ""


def main() -> None:
    """Run the fuzzer as its options say; ends with 1 if something was wrong."""
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--cases", type=int, default=20_000)
    options.add_argument("--seed", type=int, default=int(time.time()), help="by default another one each time")
    options.add_argument("--minutes", type=float, default=float("inf"), help="stop after so long")
    options.add_argument("--jobs", type=int, default=2)
    options.add_argument("--kind", action="append", default=[], help="only this kind of file (repeatable)")
    options.add_argument("--traces", type=Path, nargs="*", default=[], help="files of one's own, damaged too")
    options.add_argument("--quick", action="store_true", help="leave out what imports PyTorch")
    options.add_argument("--out", type=Path, default=Path("out/fuzz"), help="where what is found is kept")
    options.add_argument("--again", type=Path, action="append", default=[], help="run what was kept again")
    given_options = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="fuzz-seeds-") as folder:
        from fuzz_seeds import build_seeds

        stdout, sys.stdout = sys.stdout, sys.stderr
        if given_options.quick:
            given_options.kind = [name for name in given_options.kind or [*QUICK, "given"] if name in [*QUICK, "given"]]
        slow = set(given_options.kind or KINDS) - set(QUICK) - {"given"}
        seeds = build_seeds(Path(folder), programs=bool(slow))
        sys.stdout = stdout
        (seeds / "given").mkdir()
        for path in given_options.traces:
            shutil.copy(path, seeds / "given" / f"{path.parent.name}-{path.name}")
        todo = [kept(each) for each in given_options.again] if given_options.again else cases(
            seeds, given_options.cases, given_options.seed, given_options.kind)
        print(f"seed {given_options.seed}", flush=True)
        tally, until = Tally(), time.monotonic() + 60 * given_options.minutes
        # No case begins after the time is up; those that run are waited for.
        todo = itertools.takewhile(lambda case: time.monotonic() < until, todo)
        for outcome in run_cases(todo, seeds, given_options.jobs):
            tally.add(outcome)
            if tally.cases % 1000 == 0:
                wrong = sum(map(len, tally.faults.values()))
                print(f"{tally.cases:,} cases, {wrong} wrong in {len(tally.faults)} ways", file=sys.stderr, flush=True)
            found = tally.faults.get((outcome.wrong, outcome.where), [])
            if outcome.wrong and not given_options.again and len(found) <= 3:
                name = re.sub(r"\W+", "-", f"{outcome.wrong} {outcome.where}").strip("-")[:100]
                target = given_options.out / f"{name}-{len(found)}"
                shutil.rmtree(target, ignore_errors=True)
                keep(outcome.case, target, {"wrong": outcome.wrong, "where": outcome.where, "text": outcome.text[:500]})
    print(tally.told())
    sys.exit(1 if tally.faults else 0)


if __name__ == "__main__":
    main()
