"""Eighty damaged inputs and odd options: an answer or one sentence, never anything else.

More of them: ``make fuzz CASES=100000``. What that finds is kept below its output directory; a directory of it that is
copied to ``tests/fuzz/kept`` is run here from then on.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fuzz_cases import QUICK, kept
from fuzz_options import commands
from fuzz_run import Tally, cases, run_one, run_some, warm_up
from fuzz_seeds import build_seeds
from fuzz_worker import Worker

CASES = int(os.environ.get("FUZZ_CASES", "80"))
SEED = 1
KEPT = sorted(path.parent for path in (Path(__file__).resolve().parent / "kept").glob("*/case.json"))

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="a case's process is watched as Linux can")


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with contextlib.redirect_stdout(io.StringIO()):
        return build_seeds(tmp_path_factory.mktemp("seeds"))


@pytest.fixture(scope="module")
def worker(seeds: Path) -> Iterator[Worker]:
    """One for all: to import and to load what cases need takes it longer than a hundred of them."""
    # No quick kind traces a step, which takes a third of the time to warm up; PyTorch is imported by some.
    traced, imported = ["shard", "dlrm", "--gpus", "2"], ["trace", "x.py:f", "-o", "x.foretrace"]
    found = Worker([imported if words == traced else words for words in warm_up(seeds)])
    yield found
    found.close()


def test_damaged_inputs_and_odd_options_end_as_they_should(seeds: Path, worker: Worker) -> None:
    tally = Tally()
    drawn = list(cases(seeds, CASES, SEED, QUICK))
    for first in range(0, CASES, 40):
        for outcome in run_some(worker, drawn[first:first + 40], seeds):
            tally.add(outcome)
    assert not tally.faults, tally.told()
    ended = tally.by_outcome()
    # Neither refuses everything nor swallows everything.
    assert tally.cases == CASES and min(ended["exit 0"], ended["exit 2"]) > CASES // 10


def test_the_same_seed_makes_the_same_cases(seeds: Path) -> None:
    first, again, other = (list(cases(seeds, 50, number, QUICK)) for number in (7, 7, 8))
    assert first == again != other


def test_every_kind_of_file_is_damaged_and_read(seeds: Path) -> None:
    for name in QUICK:
        drawn = list(cases(seeds, 5, 3, [name]))
        assert {case.kind for case in drawn} == {name} and all(case.files and case.arguments for case in drawn)


@pytest.mark.parametrize("folder", KEPT, ids=lambda folder: folder.name)
def test_an_input_that_was_once_wrong(folder: Path, seeds: Path, worker: Worker) -> None:
    outcome = run_one(worker, kept(folder), seeds)
    assert not outcome.wrong, f"{outcome.wrong} at {outcome.where}: {outcome.text}"


def test_options_are_those_of_the_commands() -> None:
    import typer.main

    from foretrace.commands import app

    def real(command: Any, words: str) -> Iterator[tuple[str, set[str]]]:
        for name, inner in getattr(command, "commands", {}).items():
            yield from real(inner, f"{words} {name}".strip())
        if not hasattr(command, "commands"):
            yield words, {name for option in command.params for name in option.opts if name.startswith("--")}

    needed = {"--out", "--gpus", "--shapes", "--topology", "--debug", "--device", "--set", "--jobs",
              "--update-baseline", "--workers"}
    for words, names in real(typer.main.get_command(app), ""):
        drawn = {option.name for option in commands()[words]}
        assert drawn <= names <= drawn | needed, words
