"""Alarms of `foretrace check --against`: none where nothing changed, one for each planted regression.

    python benchmarks/check_alarms.py [--keep DIR] [--only NAME] [--repeats 10] [--record-only]

Each program is recorded once for the baseline and then again `--repeats` times without a change, every capture in a
process of its own, on one thread. Each repetition is checked against the baseline. Then every capture is checked
against every other: the share of those that fail is what a check's level (1% for all it compares) promises. The five
regressions of `tests/graph_predictor/planted.py` are recorded `--planted` times each, and each is checked against the
baseline of its program. Record on a quiet machine; with --keep what is there is not recorded again.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from functools import cache
from itertools import permutations
from pathlib import Path

import numpy as np

from graph_predictor.check.baseline import BaselineEntry
from graph_predictor.check.gate import new_entry
from graph_predictor.check.measure import Pair, StoredCapture
from graph_predictor.check.program_gate import LEVEL, check_programs
from graph_predictor.check.verdict import Verdict

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
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, timeout=300,
                   env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(PLANTED)]), "OMP_NUM_THREADS": "1"})


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
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
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


if __name__ == "__main__":
    main()
