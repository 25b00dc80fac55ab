"""Every edit and every pair of edits of ``foretrace predict`` on programs of other people.

    python benchmarks/foreign_edits.py [--keep DIR] [--only NAME,NAME] [--source capture|shapes|both] [--each]

Each program of ``tests/foreign`` is captured once, and, where its code makes its step, traced by shapes for a GPU: a
recording of a CPU has no kernels, and edits of them are refused there. Of either, every edit is predicted by itself and
with every other one. Exit code 1 if an edit is lost in a pair (``tests/foreign/edits.py`` says what that means), an
interval has no width, or anything but a prediction or a sentence comes of it. ``--each`` prints every refusal.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOREIGN = ROOT / "tests" / "foreign"
sys.path[:0] = [str(ROOT), str(FOREIGN), str(FOREIGN.parent)]

from catalogue import CATALOGUE, OTHER_SIZE, Program  # noqa: E402
from edits import Pair, Predictor, complaints, edits_of, pairs_of, together  # noqa: E402

import tracer  # noqa: E402
from graph_predictor.request.study import read_source  # noqa: E402

DEVICE = "h200-sxm"
"""What a step is traced for."""


@dataclass(frozen=True)
class Row:
    """All that came of one program."""

    name: str
    source: str
    step_ms: float
    refused: dict[str, str]
    edits: int
    pairs: list[Pair]
    exclusive: int
    wrong: list[str]
    seconds: float

    def told(self) -> str:
        """One line of the table."""
        predicted = sum(not isinstance(pair.result, str) for pair in self.pairs)
        lost = sum(any("lost" in text or "turned" in text for text in pair.wrong) for pair in self.pairs)
        narrow = sum(any("width" in text or "hold" in text for text in pair.wrong) for pair in self.pairs)
        return (f"{self.name:22} {self.source:8} {self.step_ms:9.3f} {self.edits - len(self.refused):3} of "
                f"{self.edits:2} {len(self.pairs):6} {predicted:9} {len(self.refusals):8} {lost:5} {narrow:8} "
                f"{self.seconds:6.0f}")

    @property
    def refusals(self) -> list[Pair]:
        """Pairs that are refused although each of the two edits is not."""
        return [pair for pair in self.pairs if isinstance(pair.result, str)
                and not {pair.first, pair.second} & set(self.refused)]


def captured(folder: Path, wanted: list[Program]) -> dict[str, str]:
    """Capture what is not in the folder yet; the names whose capture failed, with the end of what they printed."""
    names = [each.name for each in wanted]
    if any(OTHER_SIZE.startswith(f"{name}:") for name in names):
        names.append(OTHER_SIZE)
    missing = [name for name in names if not (folder / _directory(name)).exists()]
    if missing:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
                       "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
        subprocess.run([sys.executable, str(FOREIGN / "capturing.py"), str(folder), *missing], check=False,
                       env=environment, stdout=subprocess.DEVNULL)
    return {name: (folder / f"{_directory(name)}.log").read_text(encoding="utf-8", errors="replace")[-500:]
            for name in names if not (folder / _directory(name)).exists()}


def _directory(name: str) -> str:
    return name.replace(":", "-").replace("=", "")


def tried(which: Program, folder: Path, source: str) -> Row:
    """Every edit and every pair on one source of one program."""
    begun = time.perf_counter()
    job = tracer.read_job(folder / which.name)
    other = None
    if OTHER_SIZE.startswith(f"{which.name}:") and source == "capture":
        other = (str(folder / _directory(OTHER_SIZE)), OTHER_SIZE.partition(":")[2])
    if source == "shapes":
        predict = Predictor(read_source([which.code], device=DEVICE), code=which.code, hosts=job)
    else:
        predict = Predictor(job)
    edits = edits_of(which, folder, other, traced=source == "shapes")
    alone = {name: predict(change) for name, change in edits.items()}
    wrong = [f"{name}: {text}" for name, result in alone.items() for text in complaints(result)]
    pairs = list(pairs_of(predict, edits))
    exclusive = sum(together(edits[a], edits[b]) is None for a, b in combinations(edits, 2))
    return Row(which.name, source, predict.base.step_time_us / 1e3,
               {name: result for name, result in alone.items() if isinstance(result, str)}, len(edits), pairs,
               exclusive, [*wrong, *(pair.told for pair in pairs if pair.wrong)], time.perf_counter() - begun)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", help="directory of the captures; those that are there are not made again")
    parser.add_argument("--only", help="names of programs, separated by commas")
    parser.add_argument("--source", choices=("capture", "shapes", "both"), default="both")
    parser.add_argument("--each", action="store_true", help="print every refusal")
    parser.add_argument("--json", help="write what came of every pair to this file")
    options = parser.parse_args()
    wanted = [each for each in CATALOGUE if not options.only or each.name in options.only.split(",")]
    for each in wanted:
        if each.lacking:
            print(f"{each.name} is left out: {', '.join(each.lacking)} is not installed")
    wanted = [each for each in wanted if not each.lacking]
    bad = 0
    found: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(options.keep or scratch)
        folder.mkdir(parents=True, exist_ok=True)
        failed = captured(folder, wanted)
        for name, log in failed.items():
            bad += 1
            print(f"{name} was not captured: {log}")
        print(f"{'program':22} {'source':8} {'step ms':>9} {'edits':>8} {'pairs':>6} {'predicted':>9} {'refused':>8} "
              f"{'lost':>5} {'no width':>8} {'s':>6}")
        for which in wanted:
            if which.name in failed:
                continue
            for source in ("capture", "shapes"):
                if options.source not in (source, "both") or (source == "shapes" and not which.builds):
                    continue
                row = tried(which, folder, source)
                found.append(row)
                bad += len(row.wrong)
                print(row.told(), flush=True)
                for text in row.wrong:
                    print(f"    WRONG {text}", flush=True)
                if options.each:
                    print_refusals(row)
        if options.json:
            Path(options.json).write_text(json.dumps([
                {"program": row.name, "source": row.source, "first": pair.first, "second": pair.second,
                 "moved": pair.moved, "wrong": pair.wrong, "refused": pair.result if isinstance(pair.result, str) else
                 ""} for row in found for pair in row.pairs], indent=1))
    print(f"{sum(len(row.pairs) for row in found):,} pairs of edits on {len(found)} sources: {bad} wrong")
    return int(bad > 0)


def print_refusals(row: Row) -> None:
    """Sentences of single edits that are refused, and of pairs whose edits are not."""
    for name, sentence in row.refused.items():
        print(f"    {name}: {sentence}")
    for sentence, number in Counter(str(pair.result) for pair in row.refusals).most_common():
        one = next(pair for pair in row.refusals if pair.result == sentence)
        print(f"    {number} pairs such as {one.first} with {one.second}: {sentence}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
