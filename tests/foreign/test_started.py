"""Programs however they are started: modules of packages, folders without ``__init__.py``, notebooks, with files of
settings. Each is captured unchanged, and the function that builds its step is traced by its name.

``started/`` has the programs. Each is run from there, as its README would say: ``python -m deep.recipes.finetune``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
from capturing import COMMAND
from forks import run_program
from said import plain

pytest.importorskip("torch")

import tracer.user_code
from tracer.notebook import NotebookError, run
from tracer.shape_only.apart import trace_apart

HERE = Path(__file__).resolve().parent / "started"
COUNTS = ("--warmup", "1", "--timed", "2", "--steps", "2")


@dataclass(frozen=True)
class Started:
    """A program: the words of its command line, its functions' names, and the packages that it needs."""

    words: tuple[str, ...]
    code: str
    needs: tuple[str, ...] = ()


PROGRAMS = {
    "a module with relative imports and YAML": Started(("-m", "small.train"), "small/train.py:build", ("yaml",)),
    "a package in a package, with JSON": Started(
        ("-m", "deep.recipes.finetune", "--", "--config", "deep/finetune.json", "--steps", "30"),
        "deep.recipes.finetune:build"),
    "a package that is run itself": Started(("-m", "runner", "--", "4"), "runner.loop:build"),
    "a folder without __init__.py, with INI": Started(("-m", "loose.train"), "loose/train.py:build"),
    "a library with a registry, and a file of arguments": Started(
        ("-m", "vision.train", "--", "@vision/recipe.txt"), "vision.train:build"),
    "transformers with its own configuration": Started(("-m", "lm.train", "--", "--batch", "3"), "lm/train.py:build",
                                                       ("transformers",)),
    "the same after --": Started(("--", "-m", "lm.train", "--batch", "2"), "lm.train:build", ("transformers",)),
    "a script that changes its folder": Started(
        ("tools/train_dotted.py", "--", "model.width=28", "train.steps=31"), "tools/train_dotted.py:build"),
    "a notebook with magics": Started(("magics.ipynb",), "magics.ipynb:build"),
}


@pytest.mark.parametrize("name", [
    name if at in (7, 8) else pytest.param(name, marks=pytest.mark.slow) for at, name in enumerate(PROGRAMS)])
def test_a_program_is_captured_and_traced_as_it_is_started(name: str, tmp_path: Path,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    program = PROGRAMS[name]
    if lacking := [each for each in program.needs if find_spec(each) is None]:
        pytest.skip(f"needs {', '.join(lacking)}")
    done = run_program(COMMAND, "capture", *COUNTS, "--out", tmp_path / "out", *program.words, folder=HERE,
                       HF_HUB_OFFLINE=1)
    assert done.returncode == 0, done.stderr
    assert "Recorded 2 steps" in plain(done.stdout)
    (recorded,) = tracer.read_job(tmp_path / "out").graphs
    there = {recorded.strings[name] for name in recorded.ops.name}
    monkeypatch.chdir(HERE)
    traced = trace_apart(program.code, "cpu", arguments={"batch": 3})
    names = [traced.strings[name] for name in traced.ops.name]
    assert sum(name in there for name in names) > 0.7 * len(names) > 4


@pytest.mark.parametrize(("words", "code", "said"), [
    (("-m", "small.absent"), 2, "There is no module small.absent that python -m"),
    (("-m", "small"), 2, "of a package it runs __main__.py"),
    (("small/absent.py",), 2, "There is no script small/absent.py"),
    (("-m", "small.train", "--width", "3"), 2, "put -- before the script's arguments: small.train -- --width"),
    (("small/train.py",), 1, "name it as the module it is, -m small.train.")])
def test_what_cannot_be_started_is_one_sentence(words: tuple[str, ...], code: int, said: str, tmp_path: Path) -> None:
    done = run_program(COMMAND, "capture", "--out", tmp_path / "out", *words, folder=HERE)
    assert done.returncode == code and said in plain(done.stderr)
    if code == 1:
        assert "ImportError: attempted relative import with no known parent package" in done.stderr
        assert done.stderr.rstrip().endswith(said) and str(HERE.parents[2] / "tracer") not in done.stderr
    else:
        assert done.stderr.startswith("foretrace: ")


def test_an_error_in_a_notebook_has_the_line_of_its_cell(tmp_path: Path) -> None:
    text = (HERE / "magics.ipynb").read_text().replace("net(x).mean()", "net(y).mean()")
    (tmp_path / "wrong.ipynb").write_text(text.replace("from small.model import Net", "Net = torch.nn.LazyLinear"))
    done = run_program(COMMAND, "capture", "--out", tmp_path / "out", "wrong.ipynb", folder=tmp_path)
    assert done.returncode == 1 and "NameError: name 'y' is not defined" in done.stderr
    assert 'wrong.ipynb, cell 5", line 14, in step\n    net(y).mean().backward()' in done.stderr
    assert "\nTraceback" in done.stderr and "tracer/notebook.py" not in done.stderr


def in_a_cell(text: str) -> str:
    return json.dumps({"cells": [{"cell_type": "code", "source": [text]}]})


@pytest.mark.parametrize(("text", "error", "said"), [
    ("not JSON", NotebookError, "cannot be read as a notebook"),
    ('{"cells": [{}]}', NotebookError, "cannot be read as a notebook"),
    ('{"cells": [], "metadata": {"kernelspec": {"language": "R"}}}', NotebookError, "a notebook of R"),
    # Text that nests too deep is left to Python to refuse.
    (in_a_cell(f"x = {'-' * 5_000}1"), RecursionError, ""), (in_a_cell(f"x = {'-' * 10_000}1"), MemoryError, "")])
def test_a_file_that_is_no_notebook_of_python(text: str, error: type[BaseException], said: str, tmp_path: Path) -> None:
    (tmp_path / "n.ipynb").write_text(text)
    with pytest.raises(error, match=said):
        run(tmp_path / "n.ipynb", "n", until="x")


@pytest.mark.parametrize("depth", [5_000, 10_000])
def test_a_script_that_nests_too_deep_is_imported_by_its_path(depth: int, tmp_path: Path) -> None:
    (tmp_path / "deep.py").write_text(f"x = {'-' * depth}1")
    assert tracer.user_code.find_importable(str(tmp_path / "deep.py")) is not None
