"""The fuzzer: as many cases as wanted, and what was wrong with which.

    python tests/fuzz/fuzz_run.py --cases 20000 [--seed 1] [--jobs 2] [--kind kineto] [--out out/fuzz]

A run with the same seed makes the same choices, of every kind of file as many and of what takes ten times as long a
sixteenth; ``fuzz_mutators`` and ``fuzz_foreign`` damage sound files, and real commands read them. Wrong are: a
traceback or "a bug", an exit code that a command does not have, over 20 s, over 1.5 GB, a warning, and numbers that are
none, printed or written. Small files may not become large: what only reads (``READING``) has 5 s of processor time for
less than 2 MB, half a gigabyte for less than 1 MB, and 10 s in all. What is found is kept as a directory each:
``fuzz_run.py --again DIR`` runs it again.

Most cases run together with others in one process (``fuzz_worker`` says what they may not leave to the next), and every
one is judged by all of the above: by its own output, its own processor time, and no less than its own memory. Whatever
is wrong so, or has ended that process, runs once more in a process of its own, which decides; the summary counts what
was wrong only among others. One of ``ALONE`` cases runs by itself at once, and so does all that imports PyTorch or
whose standard output cannot be written.
"""

from __future__ import annotations

import argparse
import contextlib
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
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from fuzz_cases import KINDS, QUICK, Case, draw_case, keep, kept
from fuzz_worker import BYTES, ROOT, SECONDS, WRITTEN, Worker

CODES = {"check": {0, 1, 2, 3}, "survey": {0, 1, 2}, "plan": {0, 1, 2}, "sweep": {0, 1, 2}, "capture": {0, 1, 2, 3}}
"""Exit codes of commands that are gates, or end as the program does that they run; all others end with 0 or 2."""
_GONE = 141
"""Exit code where nobody reads the output any more."""
READING = frozenset({"inspect", "replay", "breakdown", "memory", "topologies", "convert", "export", "diff", "shard",
                     "comm", "models", "fit", "devices", "price"})
"""Commands whose time and memory are to be those of the file."""
SMALL_SECONDS, SMALL_BYTES, HUNG_SECONDS = 5, 500_000_000, 10
"""What reading may take: of a file of less than 2 MB, of one of less than 1 MB, and of any."""
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
BUSY = "foretrace: Warning: the machine was busy"
"""What a capture says of other work, which a fuzzer is."""
OF_PROGRAMS = "UserWarning: Initializing zero-element tensors is a no-op"
"""What PyTorch says of a program that is damaged to be of nothing."""
ALONE = 25
"""One of so many cases runs in a process of its own at once: what a process of many may hide is met there."""
APART = frozenset({"capture", "trace", "calibrate", "validate"})
"""Commands that always do."""
_TOGETHER = 160
"""Cases of one process: a fork costs 20 ms, and as much again for the pages that its cases write to."""
_ROUNDS = 16
"""Cases of each other kind for one of those that take ten times as long."""
_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Where inputs are written: no disk, if there is such a place."""
_NO_NUMBER = re.compile(r"(?<!inf or )(?<![\w.:/'\"=\[-])[-+]?(?:nan|inf)(?! or nan)(?![\w.'\"=/\]-])")
"""A number that is none, but for those that a sentence quotes: 'nan', [nan], x=nan."""

_INFINITE = re.compile("(?i)nan|inf|[0-9]{300}|e[0-9]{3}")
"""Given as an option, such a number may be quoted."""
_GIVEN_INFINITE = re.compile(rb"(?i)nan|inf|[0-9]{300}|[0-9]e\+?[0-9]{3}")
"""So may one that a file holds."""
_WRITTEN_INFINITE = {".json": re.compile(r"(?<=[:\[,])\s*(?:NaN|-?Infinity)\b"), ".csv": re.compile(
    r"(?m)(?:^|,)-?(?:nan|inf)(?=,|$)")}
"""What no JSON, and no table of ours, may have."""


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
    alone: bool = True
    """Whether it had a process of its own."""
    only_together: str = ""
    """What was wrong with it among others, where nothing is by itself."""

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
    """By kind the most seconds of processor, and bytes, that reading took a byte of an input of 10 kB or more, of cases
    that had a process of their own."""
    seconds: Counter[str] = field(default_factory=Counter)
    """Of processor, by kind."""
    only_together: Counter[str] = field(default_factory=Counter)

    def add(self, outcome: Outcome) -> None:
        """Count an outcome."""
        self.cases += 1
        self.processor += outcome.processor
        self.codes[f"{outcome.case.kind}: {outcome.wrong or f'exit {outcome.code}'}"] += 1
        self.slowest, self.largest = max(self.slowest, outcome.seconds), max(self.largest, outcome.bytes)
        self.seconds[outcome.case.kind] += outcome.processor  # type: ignore[assignment] -- seconds, not a count
        if outcome.only_together:
            self.only_together[outcome.only_together] += 1
        if outcome.alone and outcome.given >= 10_000 and outcome.case.arguments[0] in READING:
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
        numbers: Counter[str] = Counter()
        for name, number in self.codes.items():
            numbers[name.partition(": ")[0]] += number
        lines += [f"  {number:7,} {kind}: {1e3 * self.seconds[kind] / number:.1f} ms of processor each"
                  for kind, number in sorted(numbers.items())]
        lines += [f"  {number:7,} only among others: {wrong}" for wrong, number in self.only_together.items()]
        lines += [f"  {kind}: at most {1e6 * seconds:,.1f} s of processor a MB, {size:,.0f} bytes a byte"
                  for kind, (seconds, size) in sorted(self.amplified.items())]
        for (wrong, where), found in sorted(self.faults.items(), key=lambda item: -len(item[1])):
            first = found[0]
            lines += ["", f"{len(found)} × {wrong} at {where or '?'}",
                      f"    foretrace {' '.join(a[:80] for a in first.case.arguments)}"[:300],
                      f"    {first.text[-300:]}"]
        return "\n".join(lines)


def cases(seeds: Path, number: int, seed_number: int, kinds: Sequence[str] = ()) -> Iterator[Case]:
    """Cases of a seed, each of choices of its own; what costs ten times a file comes a sixteenth as often."""
    rounds = [*QUICK, "given"] * _ROUNDS + [name for name in KINDS if name not in QUICK and name != "given"]
    wanted = [name for name in (kinds or rounds) if name != "given" or any((seeds / "given").glob("*"))]
    for at in range(number):
        yield draw_case(Random(f"{seed_number}: {at}"), seeds, wanted[at % len(wanted)])


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
                    some = list(itertools.islice(queue, _TOGETHER))
                if not some:
                    return
                found = run_some(worker, some, seeds)
                with done:
                    results.extend(found)
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
            ["survey", "run", job, "--workers", "1", "-o", str(seeds / "warm.survey")],
            ["survey", "show", str(seeds / "survey" / "table")],
            ["sweep", one, "--clock", "1,2", "--jobs", "1", "-o", str(seeds / "warm.csv"), "--plot",
             str(seeds / "warm.svg")],
            ["plan", one, "--gpus", "8"], ["serve", "llama-3.1-8b", "--device", "h100-sxm"],
            ["memory", str(seeds / "snapshot.pickle")], ["memory", one],
            ["report", one, "-o", str(seeds / "warm.html")],
            ["report", job, "-o", str(seeds / "warm.html")], ["topologies", "dgx-h100"], ["devices"],
            ["topologies", "mine", "--from", str(seeds / "topo.xml"), "--device", "h100-sxm"], ["workloads"],
            ["export", one, "-o", str(seeds / "warm.json")], ["export", one, "-o", str(seeds / "warm.chakra")],
            ["convert", one, "-o", str(seeds / "warm.foretrace")], ["inspect", str(seeds / "nsys.sqlite")],
            ["inspect", str(seeds / "rocprof.json")], ["shard", str(seeds / "embeddings.csv"), "--gpus", "2"],
            ["shard", "dlrm", "--gpus", "2"], ["comm", "fit", str(seeds / "nccl.log"), "-o", str(
                seeds / "warm.comm.json"), "--topology", "dgx-h100"],
            ["fit", str(seeds / "table.csv"), "-o", str(seeds / "warm.profile"), "--device", "h200-sxm"],
            ["validate", "x.py"], ["doctor", "--help"],
            ["capture", "x.py", "--out", str(seeds / "warm")], ["models", "evaluate", str(
                seeds / "device.profile"), str(seeds / "table.csv")]]


def run_some(worker: Worker, some: Sequence[Case], seeds: Path) -> list[Outcome]:
    """Run cases, together those that can be, and judge each; what is wrong decides a run by itself."""
    found: dict[int, Outcome] = {}
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=_MEMORY) as folder:
        roots: dict[int, tuple[Path, list[str]]] = {}
        for number, case in enumerate(some):
            if number % ALONE and not case.stdout and case.arguments[0] not in APART:
                (root := Path(folder) / str(number)).mkdir()
                with contextlib.suppress(OSError):  # a name that this file system cannot have
                    roots[number] = (root, case.write(root, seeds))
        answers = worker.run_together(list(roots.values())) if roots else []
        for (number, (root, _)), answer in zip(roots.items(), answers, strict=True):
            found[number] = _outcome(some[number], answer, root) if answer else Outcome(
                some[number], -1, 0.0, 0, wrong="ended the process")
            found[number].alone = False
    for number, case in enumerate(some):
        together = found.get(number)
        if together is None or together.wrong:
            found[number] = run_one(worker, case, seeds)
            if together and not found[number].wrong:
                found[number].only_together = f"{together.wrong} at {together.where or '?'}"
    return [found[number] for number in range(len(some))]


def run_one(worker: Worker, case: Case, seeds: Path) -> Outcome:
    """Run a case in a process of its own and judge it."""
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=_MEMORY) as folder:
        root = Path(folder)
        try:
            argv = case.write(root, seeds)
        except OSError as error:  # a name that this file system cannot have
            return Outcome(case, 2, 0.0, 0, text=str(error))
        return _outcome(case, worker.run(root, argv, case.stdout), root)


def _outcome(case: Case, answer: dict[str, Any], root: Path) -> Outcome:
    """Judge an answer by what it took and by what lies in its folder."""
    outcome = Outcome(case, answer["code"], answer["seconds"], answer["bytes"], answer["processor"], own=answer["own"])
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
    elif "Warning: " in errors.replace(BUSY, "").replace(OF_PROGRAMS, ""):
        outcome.wrong = "a warning"
        outcome.text = errors[max(errors.index("Warning: ") - 200, 0):][:400]
    elif code not in CODES.get(gate, {0, 2}):
        outcome.wrong = f"exit {code}"
    elif not any(map(_INFINITE.search, outcome.case.arguments[1:])) and (none := _no_number(outcome, errors, root)):
        outcome.wrong, outcome.text = "a number that is none", none
    if outcome.wrong:
        outcome.where = _where(errors) or (gate if outcome.wrong == "a number that is none" else "")


def _no_number(outcome: Outcome, errors: str, root: Path) -> str:
    """Quote a number that is none: printed, in JSON, in a sentence (if the input has none), or in a file written."""
    given = any(map(_GIVEN_INFINITE.search, outcome.case.files.values()))
    if outcome.code == 0 and (root / "unfinished").exists():
        return "in JSON"
    told = errors.rpartition("\nforetrace: ")[2]  # a traceback, which is printed here only, quotes what it likes
    # A row of a survey begins with the job's name, which is any text.
    printed = re.sub(r"(?m)^(nan|inf) ", "", _text(root / "stdout"))
    for text in (*([printed] * (outcome.code == 0)), *([told] * (not given))):
        if found := _NO_NUMBER.search(text):
            return text[max(found.start() - 100, 0):found.end() + 30]
    for path in (root / "out").rglob("*"):
        if (pattern := _WRITTEN_INFINITE.get(path.suffix)) and path.is_file() and (
                found := pattern.search(text := _text(path))):
            return f"{path.name}: {text[max(found.start() - 100, 0):found.end() + 30]}"
    return ""


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
