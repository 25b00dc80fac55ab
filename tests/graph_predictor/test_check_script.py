"""`foretrace check SCRIPT.py --base …`: two versions of a script run in turns, and what their pairs show."""

from __future__ import annotations

import subprocess
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from said import Run, plain

from step_views.check.gate import FEWEST, PAIRS, _typical_pair, check_script, paired
from step_views.check.measure import CheckError
from step_views.check.noise import Tree, other_tree, run_in_turns
from step_views.check.verdict import Status

SCRIPT = """
import sys, time
import torch
from steps import PAUSE
torch.manual_seed(0)
layer = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
for _ in range(25):
    optimizer.zero_grad()
    layer(torch.ones(4, 8)).sum().backward()
    time.sleep(0.008 + PAUSE)
    optimizer.step()
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository whose last commit has a quick step; the working tree sleeps as long again, in a module."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    (folder / "steps.py").write_text("PAUSE = 0.0\n")
    for words in ("init -q", "add -A", "-c user.name=a -c user.email=a@example.org commit -q -m first"):
        subprocess.run(["git", *words.split()], cwd=folder, check=True)
    (folder / "steps.py").write_text("PAUSE = 0.008\n")
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.slow
def test_a_planted_sleep_is_found_and_nothing_is_left_behind(project: Path) -> None:
    pytest.importorskip("torch")
    found = check_script("train.py", "HEAD", pairs=FEWEST)
    step, *counted = found.verdicts
    assert step.status is Status.FAILED and step.confidence is not None and step.confidence > 0.99
    assert step.before is not None and step.now is not None and step.now > step.before
    assert counted and not any(verdict.failed for verdict in counted)
    assert sorted(path.name for path in project.iterdir() if path.name != "__pycache__") == [
        ".git", "steps.py", "train.py"]


def test_a_script_that_fails_there_is_told_with_what_it_said(project: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    other = tmp_path / "other"
    other.mkdir()
    (other / "train.py").write_text("raise ValueError('broken then')")
    with other_tree(str(other)) as trees, pytest.raises(CheckError, match=r"broken then"):
        run_in_turns("train.py", [], trees, 1, tmp_path)


def test_every_second_pair_begins_with_the_present_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[int] = []
    monkeypatch.setattr("step_views.check.noise._run", lambda script, arguments, trees, side, out:
                        order.append(side))
    (tmp_path / "train.py").touch()
    tree = Tree("here", tmp_path, tmp_path)
    old, new = run_in_turns("train.py", [], (tree, tree), 4, tmp_path)
    assert order == [0, 1, 1, 0, 0, 1, 1, 0]
    assert [each.name for each in old] == ["base1", "base2", "base3", "base4"]
    assert [each.name for each in new] == ["present1", "present2", "present3", "present4"]


def test_the_same_program_alarms_as_rarely_as_it_says_whatever_the_noise() -> None:
    """Of all 2⁸ signs of any differences, which are equally likely without a change, at most 1% fail."""
    sizes = np.random.default_rng(3).standard_t(2, PAIRS) * 0.4
    results = [paired(list(sizes * signs), 0.0) for signs in product((-1, 1), repeat=PAIRS)]
    assert 0 < np.mean([each.p_value <= 0.01 for each in results]) <= 0.01
    assert np.mean([each.low <= 0.0 <= each.high for each in results]) >= 0.9
    assert all(each.low <= each.difference <= each.high for each in results)
    # Causes are those of the pair of the median ratio.
    assert _typical_pair([[10, 10, 90], [10], [10]], [[40], [12], [13]]) == 2


def test_one_disturbed_pair_moves_the_estimate_little_and_small_growth_never_fails() -> None:
    calm, disturbed = (paired([0.100, 0.101, 0.099, 0.102, 0.098, 0.100, 0.101, last], 0.01) for last in (0.099, 3.0))
    assert calm.p_value == disturbed.p_value == pytest.approx(2**-8)
    assert abs(disturbed.difference - calm.difference) < 0.01
    assert [paired([0.009] * 8, least).p_value for least in (0.01, 0.0)] == [1.0, pytest.approx(2**-8)]


@pytest.mark.parametrize(("script", "base", "words"), [
    ("train.py", "HEAD~5", "no commit of this repository"), ("train.py", "nowhere/at/all", "no commit"),
    ("train.py", ".", "the current directory"), ("new.py", "HEAD", r"no script new\.py in HEAD"),
    ("/train.py", "HEAD", "path from the current directory")])
def test_what_is_no_other_tree_and_a_script_that_was_not_there_then(
        project: Path, script: str, base: str, words: str) -> None:
    (project / "new.py").touch()
    with pytest.raises(CheckError, match=words):
        check_script(script.replace("/", f"{project}/"), base)


@pytest.mark.parametrize(("arguments", "words"), [
    (["train.py"], "say with --base"), (["kept", "--pairs", "9"], "--pairs belongs to a script"),
    (["kept", "--base", "HEAD"], "captures are compared with --against"),
    (["kept", "--", "--batch", "8"], "--batch belongs to a script"),
    (["train.py", "--base", "HEAD", "--against", "new"], "leave --against"),
    (["train.py", "--base", "HEAD", "--pairs", "6"], "--pairs 7 or more")])
def test_options_that_do_not_go_together(arguments: list[str], words: str, run: Run) -> None:
    code, _, said = run("check", *arguments)
    assert code == 2 and words in plain(said)
