"""Alarms of `foretrace check --against`: none where nothing changed, one for each planted regression.

    python benchmarks/check_alarms.py [--keep DIR] [--only NAME] [--repeats 10] [--record-only]

Each program is recorded once for the baseline and then again `--repeats` times without a change, every capture in a
process of its own, on one thread. Each repetition is checked against the baseline. Then every capture is checked
against every other: the share of those that fail is what a check's level (1% for all it compares) promises. The five
regressions of `tests/graph_predictor/planted.py` are recorded `--planted` times each, and each is checked against the
baseline of its program. Record on a quiet machine; with --keep what is there is not recorded again.

    python benchmarks/check_alarms.py --causes [--keep DIR] [--repeats 20] [--only NAME]

Each cause of ``CAUSES`` of the same file is recorded without and with it and checked as ``foretrace check --against``
does; the first cause that the check names must match the words that were written before. Then the program without a
cause is recorded ``--repeats`` times and checked against the first recording: how many fail, and how many name a cause.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import subprocess
import sys
import tempfile
from functools import cache
from itertools import permutations
from pathlib import Path

import numpy as np

from step_views.check.baseline import BaselineEntry
from step_views.check.gate import check_against, new_entry, update_baseline
from step_views.check.measure import Pair, StoredCapture
from step_views.check.program_gate import LEVEL, check_programs
from step_views.check.verdict import GateOutcome, Verdict
from step_views.cli.check import explain
from tracer.errors import ForetraceError

ROOT = Path(__file__).resolve().parents[1]
PLANTED = ROOT / "tests" / "graph_predictor"
COMMAND = "from foretrace.commands import main; main()"
TIMED = 40
WORKLOADS = {"dlrm": ["--preset", "tiny"], "llama": ["--preset", "tiny"], "resnet50": ["--preset", "tiny"],
             "lstm": ["--preset", "tiny"]}
KINDS = ("layer_norm", "item", "fusion", "bucket", "sleep")
UNCHANGED = "classifier"
"""Without their regressions four of the five are the same program; the bucket's is one on two ranks."""


def record_workload(name: str, out: Path) -> None:
    run(["-c", COMMAND, "capture", "--workload", name, *WORKLOADS[name], "--timed", str(TIMED), "--execution-trace",
         "none", "--form", "foretrace", "--out", str(out)])


def record_planted(kind: str, out: Path, planted: bool) -> None:
    run(["-c", "import sys; from pathlib import Path; import planted; planted.record(sys.argv[1], "
         f"[(Path(sys.argv[2]), sys.argv[3] == '1')], timed={TIMED})", kind, str(out), str(int(planted))])


def run(arguments: list[str]) -> None:
    path = os.pathsep.join(map(str, (ROOT, PLANTED, PLANTED.parent)))
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, timeout=300,
                   env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"})


def record(folder: Path, program: str, repeats: int) -> list[StoredCapture]:
    """The program's captures, the baseline's first."""
    found = []
    for number in range(repeats + 1):
        out = folder / program / f"run{number}"
        if not complete(out):
            if program in WORKLOADS:
                record_workload(program, out)
            else:
                record_planted("bucket" if program == "bucket" else "item", out, False)
        found.append(StoredCapture(f"{program}/run{number}", out, program))
    return found


def complete(out: Path) -> bool:
    return any(out.glob("rank0/context.json"))


@cache
def entry(capture: StoredCapture) -> BaselineEntry:
    return new_entry(capture)


def check(old: StoredCapture, new: StoredCapture) -> list[Verdict]:
    """What `foretrace check --against` says of one new capture."""
    verdicts, _ = check_programs([Pair(old.program, [old], [new])], {old.name: entry(old)})
    return verdicts


def told(verdicts: list[Verdict]) -> str:
    return ", ".join(verdict.quantity for verdict in verdicts if verdict.failed) or "nothing"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--only", action="append")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--planted", type=int, default=3)
    parser.add_argument("--record-only", action="store_true")
    parser.add_argument("--causes", action="store_true", help="whether the first cause named is the planted one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        if options.causes:
            causes(folder, options.only, options.repeats)
            return
        programs = options.only or [UNCHANGED, "bucket", *WORKLOADS]
        runs = {program: record(folder, program, options.repeats) for program in programs if program != "planted"}
        regressions = {kind: [folder / "planted" / f"{kind}{number}" for number in range(options.planted)]
                       for kind in KINDS} if options.only is None or "planted" in options.only else {}
        for kind, outs in regressions.items():
            for out in outs:
                if not complete(out):
                    record_planted(kind, out, True)
        if options.record_only:
            return
        repetitions(runs)
        planted(regressions, {"bucket": runs.get("bucket"), UNCHANGED: runs.get(UNCHANGED)})


def repetitions(runs: dict[str, list[StoredCapture]]) -> None:
    print(f"Repeated captures without a change (level {LEVEL:.0%} a check)")
    print("program       step ms  sd from run  alarms against   alarms of all  smallest slow-down")
    print("                            to run    the baseline           pairs     that is seen")
    for program, captures in runs.items():
        steps = [float(np.median(entry(capture).run.step_ns)) for capture in captures]
        first = [check(captures[0], new) for new in captures[1:]]
        pairs = [check(old, new) for old, new in permutations(captures, 2)]
        seen = [verdict.detectable for verdicts in first for verdict in verdicts
                if verdict.quantity == "step time" and verdict.detectable is not None]
        print(f"{program:12s} {np.median(steps) / 1e6:8.3f} {np.std(np.log(steps), ddof=1):12.1%} "
              f"{sum(map(failed, first)):8d} of {len(first):2d} {sum(map(failed, pairs)):9d} of {len(pairs):3d} "
              f"{np.median(seen):16.0%}")
        for verdicts in pairs:
            if failed(verdicts):
                print("   alarm:", "; ".join(v.text for v in verdicts if v.failed))


def failed(verdicts: list[Verdict]) -> bool:
    return any(verdict.failed for verdict in verdicts)


def planted(regressions: dict[str, list[Path]], baselines: dict[str, list[StoredCapture] | None]) -> None:
    if not regressions:
        return
    print("\nPlanted regressions, each against the baseline of its program")
    for kind, outs in regressions.items():
        captures = baselines["bucket" if kind == "bucket" else UNCHANGED]
        if not captures:
            continue
        for out in outs:
            verdicts = check(captures[0], StoredCapture(out.name, out, captures[0].program))
            print(f"{kind:12s} caught by: {told(verdicts)}")


def causes(folder: Path, only: list[str] | None, repeats: int) -> None:
    """Print what the check names first for every planted cause, then what it says where there is none."""
    sys.path += [str(PLANTED), str(PLANTED.parent)]
    known = importlib.import_module("planted").CAUSES
    print("Planted causes: the steps without the profiler, and the first cause that the check names")
    print("planted       before ms  after ms  right  outcome       named")
    chosen = [kind for kind in known if only is None or kind in only]
    right = 0
    for kind in chosen:
        kept, new = folder / kind / "kept", folder / kind / "new"
        for side, is_planted in ((kept, False), (new, True)):
            if not complete(side / "program"):
                record_planted(kind, side / "program", is_planted)
        outcome, first = named_first(kept, new)
        matches = re.search(known[kind].named, first) is not None
        right += matches
        steps = [float(np.median(entry(StoredCapture("program", side / "program", "program")).run.step_ns)) / 1e6
                 for side in (kept, new)]
        print(f"{kind:12s} {steps[0]:10.2f} {steps[1]:9.2f}  {'yes' if matches else 'NO':5s}  {outcome:12s}  {first}",
              flush=True)
    print(f"{right} of {len(chosen)} are named rightly")
    if only is None or UNCHANGED in only:
        unchanged(folder / "unchanged", repeats)


def unchanged(folder: Path, repeats: int) -> None:
    """Check repetitions of a program against the first of them."""
    outcomes = []
    for number in range(repeats + 1):
        side = folder / ("kept" if not number else f"new{number}")
        if not complete(side / "program"):
            record_planted("unchanged", side / "program", False)
        if number:
            outcomes.append(named_first(folder / "kept", side))
    for word in ("failed", "inconclusive", "passed"):
        print(f"unchanged: {sum(outcome == word for outcome, _ in outcomes)} of {len(outcomes)} {word}")
    print(f"unchanged: {sum(first != '' for _, first in outcomes)} of {len(outcomes)} name a cause")
    for outcome, first in outcomes:
        if outcome == "failed" or first:
            print(f"   {outcome}: {first}")


def named_first(kept: Path, new: Path) -> tuple[str, str]:
    """Return a check's outcome and the first cause that it names; of a check that is refused, why."""
    try:
        if not (kept / "baseline.json").exists():
            update_baseline(str(kept), "first")
        found: GateOutcome = check_against(str(kept), str(new), explain=explain)
    except ForetraceError as error:
        return "refused", str(error)
    lines = next(iter(found.causes.values()), [""])
    return str(found.to_json()["outcome"]), lines[0]


if __name__ == "__main__":
    main()
