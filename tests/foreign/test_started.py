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
from forks import run_program
from said import plain

pytest.importorskip("torch")

import tracer.notebook
import tracer.user_code
from tracer.shape_only.apart import trace_apart

HERE = Path(__file__).resolve().parent / "started"
COMMAND = "import sys; sys.argv[0] = 'foretrace'; from foretrace.commands import main; sys.exit(main())"
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
    "a notebook": Started(("plain.ipynb",), "plain.ipynb:build"),
    "a notebook with magics": Started(("magics.ipynb",), "magics.ipynb:build"),
}


@pytest.mark.parametrize("name", [
    name if at in (1, 7, 9) else pytest.param(name, marks=pytest.mark.slow) for at, name in enumerate(PROGRAMS)])
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


def test_what_is_no_module_is_one_sentence(tmp_path: Path) -> None:
    for words, said in ((("-m", "small.absent"), "There is no module small.absent that python -m"),
                        (("-m", "small"), "of a package it runs __main__.py"),
                        (("small/absent.py",), "There is no script small/absent.py"),
                        (("-m", "small.train", "--width", "3"), "put -- before the script's arguments: small.train -- "
                                                                "--width")):
        done = run_program(COMMAND, "capture", "--out", tmp_path / "out", *words, folder=HERE)
        assert done.returncode == 2 and said in plain(done.stderr) and done.stderr.startswith("foretrace: ")


def test_a_script_that_python_cannot_start_is_named_as_a_module(tmp_path: Path) -> None:
    done = run_program(COMMAND, "capture", "--out", tmp_path / "out", "small/train.py", folder=HERE)
    assert done.returncode == 1
    assert "ImportError: attempted relative import with no known parent package" in done.stderr
    assert done.stderr.rstrip().endswith("name it as the module it is, -m small.train.")
    assert str(HERE.parents[2] / "tracer") not in done.stderr


def test_an_error_in_a_notebook_has_the_line_of_its_cell(tmp_path: Path) -> None:
    (tmp_path / "wrong.ipynb").write_text((HERE / "plain.ipynb").read_text().replace("net(x).mean()", "net(y).mean()"))
    done = run_program(COMMAND, "capture", "--out", tmp_path / "out", "wrong.ipynb", folder=tmp_path)
    assert done.returncode == 1 and "NameError: name 'y' is not defined" in done.stderr
    assert 'wrong.ipynb, cell 4", line 8, in step\n    net(y).mean().backward()' in done.stderr
    assert done.stderr.startswith("Traceback") and "tracer/notebook.py" not in done.stderr


@pytest.mark.parametrize(("text", "said"), [
    ("not JSON", "cannot be read as a notebook"), ('{"cells": [{}]}', "cannot be read as a notebook"),
    ('{"cells": [], "metadata": {"kernelspec": {"language": "R"}}}', "a notebook of R")])
def test_a_file_that_is_no_notebook_of_python(text: str, said: str, tmp_path: Path) -> None:
    from tracer.notebook import NotebookError, run

    (tmp_path / "n.ipynb").write_text(text)
    with pytest.raises(NotebookError, match=said):
        run(tmp_path / "n.ipynb", "n")


@pytest.mark.parametrize(("depth", "said"), [(5_000, RecursionError), (10_000, MemoryError)])
def test_text_that_nests_too_deep_is_left_to_python_to_refuse(
        depth: int, said: type[BaseException], tmp_path: Path) -> None:
    deep = f"x = {'-' * depth}1"
    (tmp_path / "deep.py").write_text(deep)
    assert tracer.user_code.find_importable(str(tmp_path / "deep.py")) is not None
    (tmp_path / "deep.ipynb").write_text(json.dumps({"cells": [{"cell_type": "code", "source": [deep]}]}))
    with pytest.raises(said):
        tracer.notebook.run(tmp_path / "deep.ipynb", "n", until="x")
